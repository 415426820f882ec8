// An argument file (@FILE), processed as by --plan: splits words, parses options, derives fields,
// plans memory and communication, and prints the settings.
#include <math.h>

#include "llmc/config/config.h"
#include "llmc/data/dataset.h"
#include "llmc/base/memory_plan.h"
#include "llmc/plan/plan_report.h"
#include "llmc/ranks/mesh.h"
#include "test/fuzz/fuzz.h"
#include "llmc/model/gpt.h"

// Byte counts are integers and must not overflow.
static void check_sizes(const Config *c, const GPT *gpt, const MemoryPlan *memory_plan) {
    double sum = 0, widest = 0;
    for (int i = 0; i < memory_plan->count; i++) {
        sum += (double)memory_plan->entries[i].bytes;
        if ((double)memory_plan->entries[i].bytes > widest) widest = (double)memory_plan->entries[i].bytes;
    }
    PROMISE(fabs(sum - (double)memory_plan_total(memory_plan)) <= 1e-9 * sum);
    double tokens = (double)c->micro_batch_size * c->seq_length / c->tensor_model_parallel_size;
    double wide = (double)c->kv_channels * (c->num_attention_heads + 2 * config_query_groups(c));
    PROMISE(widest >= tokens * wide * sizeof(floatX));
    PROMISE(widest >= tokens * c->ffn_hidden_size * sizeof(floatX));
    for (int i = 0; i < gpt->tensors; i++) {
        PROMISE(widest >= (double)tensor_elements(&gpt->tensor[i]) * sizeof(floatX));
    }
}

static void plan(const Config *c, const Mesh *mesh, FILE *out) {
    Error err = {0};
    MemoryPlan memory_plan = {0};
    GPT gpt;
    Zero *zero = gpt_plan(&gpt, c, mesh, &memory_plan, &err);
    if (zero) check_sizes(c, &gpt, &memory_plan);
    memory_plan_free(&memory_plan, NULL);
    zero_free(zero);
    gpt_free(&gpt);
    if (!plan_report(c, mesh, out, &err)) fuzz_check_error(&err);
}

// Checks the layout first, like run_place, because config_finish divides by T x P.
static bool place(const Config *c, int ranks, Mesh *mesh) {
    Error err = {0};
    int *hosts = (int *)xcalloc((size_t)ranks, sizeof *hosts, "the host table");
    bool ok = mesh_build(mesh, 0, ranks, hosts, c->gpus_per_node, c->tensor_model_parallel_size,
                         c->pipeline_model_parallel_size, &err);
    if (!ok) fuzz_check_error(&err);
    free(hosts);
    return ok;
}

static void finish(Config *c, FILE *out) {
    Error err = {0};
    double bounds[SPLITS + 1];
    if (c->split && !split_parse(c->split, bounds, &err)) fuzz_check_error(&err);
    int ranks = c->plan_world_size ? c->plan_world_size : 4;
    Mesh mesh;
    if (!place(c, ranks, &mesh)) return;
    if (!config_finish(c, ranks, 0, 0, &err)) {
        fuzz_check_error(&err);
        return;
    }
    PROMISE(c->micro_batches > 0 && c->vocab_size_padded >= c->vocab_size_unpadded && c->total_samples >= 0);
    for (int64_t n = 0; n < 8; n++) PROMISE(config_global_batch_size(c, n * (c->total_samples / 8)) > 0);
    config_print(c, out);
    char *json = config_to_json(c), notes[64] = "";
    // A run must accept its own checkpoint.
    PROMISE(config_match_checkpoint(c, json, notes, sizeof notes, &err) && !*notes);
    free(json);
    // The lists of a plan grow with the number of layers, so large plans would only take longer.
    if (c->num_layers <= 64 && ranks <= 4096) plan(c, &mesh, out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char word[600], notes[200];
    Error err = {0};
    Config config;
    snprintf(word, sizeof word, "@%s", fuzz_file("args", data, size));
    char *words[] = {"train_gpt_cpu", word, NULL};
    FILE *out = fopen("/dev/null", "w");
    if (!config_parse(&config, 2, words, notes, sizeof notes, &err)) {
        fuzz_check_error(&err);
    } else {
        if (!config.help && !config.version) finish(&config, out);
        config_free(&config);
    }
    fclose(out);
    return 0;
}
