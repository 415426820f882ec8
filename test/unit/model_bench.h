// A GPT on one rank with its device, plan and state, for tests of the model. Included by tests
// only.
#pragma once
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/ranks/launch.h"
#include "llmc/state/zero_parts.h"
#include "llmc/model/gpt.h"

typedef struct Bench {
    Config config;
    Mesh mesh;
    Site site;
    Device *device;
    Stream *compute;
    Lanes lanes;
    Timers *timers;
    MemoryPlan memory_plan;
    Zero *zero;
    GPT gpt;
} Bench;

// Parses flags for one rank, in addition to flags that every model needs.
static inline bool bench_configure(Config *config, int count, const char *const *flags, int vocabulary,
                                   Error *err) {
    const char *base[] = {"test",
                          "--bf16",
                          "--use-distributed-optimizer",
                          "--mock-data",
                          "--lr",
                          "1e-3",
                          "--train-iters",
                          "10",
                          "--tokenizer-type",
                          "NullTokenizer",
                          "--make-vocab-size-divisible-by",
                          "1"};
    int fixed = (int)(sizeof base / sizeof base[0]);
    char **argv = calloc((size_t)(fixed + count + 3), sizeof *argv);
    char vocab_flag[16];
    memcpy(argv, base, sizeof base);
    memcpy(argv + fixed, flags, (size_t)count * sizeof *flags);
    snprintf(vocab_flag, sizeof vocab_flag, "%d", vocabulary - 1);
    argv[fixed + count] = (char *)"--vocab-size";
    argv[fixed + count + 1] = vocab_flag;
    bool ok = config_parse(config, fixed + count + 2, argv, NULL, 0, err) &&
              config_finish(config, 1, vocabulary, vocabulary - 1, err);
    free(argv);
    return ok;
}

// Builds the model that the flags describe. Weights are not initialized.
static inline bool bench_open(Bench *b, int count, const char *const *flags, int vocabulary) {
    Error err = {0};
    int hosts[1] = {0};
    memset(b, 0, sizeof *b);
    bool ok = bench_configure(&b->config, count, flags, vocabulary, &err) &&
              mesh_build(&b->mesh, 0, 1, hosts, 0, 1, 1, &err);
    if (!ok) {
        fprintf(stderr, "bench: %s\n", err.what);
        return false;
    }
    b->device = device_open(0, &b->site, &err);
    b->compute = stream_create(b->device, "compute");
    lanes_open(&b->lanes, b->device, false);
    b->timers = timers_create(b->device, 0);
    b->zero = gpt_plan(&b->gpt, &b->config, &b->mesh, &b->memory_plan, &err);
    ok = b->zero && memory_plan_allocate(&b->memory_plan, b->device, 1, &err);
    if (!ok) fprintf(stderr, "bench: %s\n", err.what);
    zero_start(b->zero, b->device, b->compute, &b->lanes, b->timers);
    gpt_start(&b->gpt, b->zero, b->device, b->compute, b->timers);
    return ok;
}

static inline void bench_close(Bench *b) {
    memory_plan_free(&b->memory_plan, b->device);
    zero_free(b->zero);
    gpt_free(&b->gpt);
    timers_destroy(b->timers);
    stream_destroy(b->compute);
    lanes_close(&b->lanes);
    device_close(b->device);
    config_free(&b->config);
}

// Uploads one micro-batch with positions 0..T-1.
static inline void bench_upload(Bench *b, const int32_t *tokens, const int32_t *targets) {
    int N = b->gpt.B * b->gpt.T;
    int32_t *positions = calloc((size_t)N, sizeof *positions);
    for (int i = 0; i < N; i++) positions[i] = i % b->gpt.T;
    Batch batch = {0};
    batch.tokens = (int32_t *)tokens;
    batch.targets = (int32_t *)targets;
    batch.positions = positions;
    gpt_upload(&b->gpt, 0, &batch);
    free(positions);
}

static inline int64_t bench_numel(const Bench *b, int tensor) {
    return tensor_elements(&b->gpt.tensor[tensor]);
}

// Runs forward, and backward if requested, on the uploaded micro-batch. first, last: true for the
// first or last micro-batch of a step. Returns the loss accumulated in the step.
static inline float bench_pass(Bench *b, float loss_scale, bool backward, bool first, bool last) {
    GPT *g = &b->gpt;
    Pass pass = {.B = g->B,
                 .T = g->T,
                 .training = true,
                 .backward = backward,
                 .first = first,
                 .last = last,
                 .loss_scale = loss_scale};
    gpt_forward(g, &pass);
    gpt_head(g, &pass);
    pass.direction = BACKWARD;
    if (backward) gpt_backward(g, &pass);
    if (backward && last) gpt_end_backward(g);
    if (backward && last) fp8_update_scales(g);
    float loss;
    copy_to_host(b->compute, &loss, b->zero->loss_sum, sizeof loss);
    stream_synchronize(b->compute);
    return loss;
}
