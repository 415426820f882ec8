// Measures the speed of text generation with random weights and greedy sampling, on GPUs or CPUs.
//
//   build/dev/bench/generate [--bandwidth GB/s] [--prompt 512] [--tokens 128] FLAGS
//
// FLAGS are trainer flags that describe the model. Prints one JSON line with the seconds to process
// the prompt, median ms per token, and tokens per second. The prompt is processed twice, and only
// the second time counts, because the first one loads kernels. With --bandwidth, floor_ms is the
// time to read the weights once at that memory bandwidth.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dev/lib/text_model.h"
#include "llmc/base/version.h"
#include "llmc/config/config.h"
#include "llmc/ranks/launch.h"
#include "llmc/ranks/parallel.h"
#include "llmc/run/sampling.h"

typedef struct Bench {
    Config config;
    int prompt, tokens;
    double bandwidth;  // GB/s; 0: not given
    TextModel model;
} Bench;

// Reads this program's own flags and removes them from argv.
static bool read_flags(Bench *b, int *argc, char **argv, Error *err) {
    *b = (Bench){.prompt = 512, .tokens = 128};
    int kept = 1;
    for (int i = 1; i < *argc; i++) {
        bool own = i + 1 < *argc && (!strcmp(argv[i], "--bandwidth") || !strcmp(argv[i], "--prompt") ||
                                     !strcmp(argv[i], "--tokens"));
        if (!own) {
            argv[kept++] = argv[i];
            continue;
        }
        double value = strtod(argv[i + 1], NULL);
        if (argv[i][2] == 'b') b->bandwidth = value;
        else *(argv[i][2] == 'p' ? &b->prompt : &b->tokens) = (int)value;
        i++;
    }
    *argc = kept;
    if (b->prompt < 1 || b->tokens < 1) return usage_error(err, "--prompt and --tokens must be at least 1");
    if (!config_parse(&b->config, *argc, argv, NULL, 0, err)) return false;
    b->config.attention_dropout = b->config.hidden_dropout = 0;
    b->config.recompute_granularity = RECOMPUTE_FULL;
    if (b->prompt + b->tokens > b->config.max_position_embeddings)
        return usage_error(err, "--prompt plus --tokens exceeds --max-position-embeddings; lower --tokens");
    return config_finish(&b->config, 1, 0, 0, err);
}

static int compare_doubles(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

// Returns the median ms per token after the prompt.
static double median_ms(Bench *b, const Sampling *greedy, floatX *logits) {
    double *ms = (double *)xcalloc((size_t)b->tokens, sizeof *ms, "times");
    for (int i = 0; i < b->tokens; i++) {
        double began = monotonic_seconds();
        int32_t token = sampling_draw(greedy, logits, 0);
        gpt_continue(&b->model.gpt, &token, b->prompt + i, 1, logits);
        ms[i] = 1e3 * (monotonic_seconds() - began);
    }
    qsort(ms, (size_t)b->tokens, sizeof *ms, compare_doubles);
    double median = ms[b->tokens / 2];
    free(ms);
    return median;
}

static void measure(Bench *b) {
    Sampling greedy = {.vocab = b->config.vocab_size_unpadded};
    int32_t *ids = (int32_t *)xcalloc((size_t)b->prompt, sizeof *ids, "the prompt");
    floatX *logits = (floatX *)xcalloc((size_t)b->model.gpt.V, sizeof *logits, "the logits");
    double reading = 0.0;
    for (int i = 0; i < b->prompt; i++) ids[i] = i * 37 % greedy.vocab;
    for (int again = 0; again < 2; again++) {
        double began = monotonic_seconds();
        gpt_continue(&b->model.gpt, ids, 0, b->prompt, logits);
        reading = monotonic_seconds() - began;
    }
    double ms = median_ms(b, &greedy, logits), bytes = (double)text_model_bytes_per_token(&b->model);
    printf(
        "{\"commit\":\"%s\",\"device\":\"%s\",\"prompt\":%d,\"tokens\":%d,\"prompt_seconds\":%.4f,"
        "\"ms_per_token\":%.4f,\"tokens_per_second\":%.1f,\"weight_bytes\":%.0f,\"GB_per_second\":%.1f",
        version_commit(), device_name(b->model.device), b->prompt, b->tokens, reading, ms, 1e3 / ms, bytes,
        bytes / ms * 1e-6);
    if (b->bandwidth > 0) {
        double least = bytes / b->bandwidth * 1e-6;
        printf(",\"floor_ms\":%.4f,\"of_floor\":%.3f", least, least / ms);
    }
    printf("}\n");
    free(ids);
    free(logits);
}

int main(int argc, char **argv) {
    static Bench bench;
    Launch launch;
    Site site = {.rank = -1, .gpu = -1, .phase = "generate"};
    Error err = {0};
    launch_init(&launch, &argc, &argv);
    Peers alone = {launch.world, 0, &site};
    bool ok = read_flags(&bench, &argc, argv, &err) &&
              text_model_open(&bench.model, &bench.config, bench.prompt + bench.tokens, parallel_share(alone),
                              &site, &err);
    if (ok) {
        gpt_init_weights(&bench.model.gpt, 1234, alone);
        measure(&bench);
        text_model_close(&bench.model);
    } else {
        error_print(NULL, err.what);
    }
    config_free(&bench.config);
    launch_finalize(&launch);
    return ok ? EXIT_DONE : err.code;
}
