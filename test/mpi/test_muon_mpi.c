// Muon with tensor parallelism. With --muon-tp-mode duplicated, master weights and momentum after
// several steps are bitwise identical in every layout of tensor and pipeline parallelism, because
// every rank orthogonalizes whole matrices. With blockwise they are not. The tensors have the
// shapes of a GPT or a Llama; gradients are synthetic, without forward and backward passes.
//
// ranks: 1 2 4
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "llmc/model/gpt.h"
#include "llmc/ranks/launch.h"
#include "llmc/ranks/peers.h"
#include "llmc/state/zero.h"
#include "test/leaks.h"

enum { MOST_FLAGS = 12, STEPS = 3 };

static const char *const common[] = {"test",
                                     "--bf16",
                                     "--use-distributed-optimizer",
                                     "--mock-data",
                                     "--tokenizer-type",
                                     "NullTokenizer",
                                     "--num-layers",
                                     "2",
                                     "--global-batch-size",
                                     "4",
                                     "--seq-length",
                                     "32",
                                     "--max-position-embeddings",
                                     "32",
                                     "--micro-batch-size",
                                     "1",
                                     "--lr",
                                     "1e-2",
                                     "--train-iters",
                                     "10",
                                     "--clip-grad",
                                     "0",
                                     "--hidden-size",
                                     "64",
                                     "--num-attention-heads",
                                     "8",
                                     "--vocab-size",
                                     "247",
                                     "--optimizer",
                                     "muon"};
enum { COMMON = sizeof common / sizeof *common };

// poisoned: the second step has a gradient of one layer that is not a number, and is skipped.
typedef struct Preset {
    const char *name;
    bool poisoned;
    const char *flags[MOST_FLAGS + 1];  // NULL at the end
} Preset;
static const Preset presets[] = {
    {"GPT", false, {NULL}},
    {"Nesterov, one matrix of queries, keys and values", false, {"--muon-nesterov", "--muon-no-split-qkv"}},
    {"Llama",
     false,
     {"--swiglu", "--ffn-hidden-size", "96", "--group-query-attention", "--num-query-groups", "4",
      "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--muon-scale-mode",
      "unit_rms_norm"}},
    {"no sharding", false, {"--data-parallel-sharding-strategy", "no_shard"}},
    {"ZeRO-2", false, {"--data-parallel-sharding-strategy", "optim_grads"}},
    {"momentum in bf16", false, {"--exp-avg-dtype", "bf16"}},
    {"momentum in bf16 on the host", false, {"--exp-avg-dtype", "bf16", "--optimizer-cpu-offload"}},
    {"a skipped step", true, {"--on-nan", "skip"}},
    {"a skipped step on the host", true, {"--on-nan", "skip", "--optimizer-cpu-offload"}},
    {"offload to the host", false, {"--optimizer-cpu-offload", "--muon-nesterov"}},
};
enum { PRESETS = sizeof presets / sizeof *presets };

typedef struct Shape {
    int T, P;
    const char *mode;
} Shape;
static const Shape shapes[] = {{2, 1, "duplicated"}, {1, 2, "duplicated"}, {4, 1, "duplicated"},
                               {2, 2, "duplicated"}, {2, 1, "blockwise"},  {4, 1, "blockwise"}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

// This rank's state in one layout.
typedef struct Layout {
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
} Layout;

static const Peers world = {MPI_COMM_WORLD, 0, NULL};
static int failures, rank, ranks;

static void check(bool ok, const Preset *preset, const char *what, const Shape *s) {
    if (rank == 0)
        printf("%s %s: T %d, P %d, %s, %s\n", ok ? "ok" : "not ok", preset->name, s->T, s->P, s->mode, what);
    failures += !ok;
}

static void configure(Layout *l, const Preset *preset, const Shape *s) {
    Error err = {0};
    char *argv[COMMON + MOST_FLAGS + 8], size[3][16];
    int argc = 0;
    for (int i = 0; i < COMMON; i++) argv[argc++] = (char *)common[i];
    for (int i = 0; preset->flags[i]; i++) argv[argc++] = (char *)preset->flags[i];
    snprintf(size[0], sizeof size[0], "%d", s->T);
    snprintf(size[1], sizeof size[1], "%d", s->P);
    snprintf(size[2], sizeof size[2], "%d", 32 / s->T);  // the same padded vocabulary in all layouts
    const char *const layout[8] = {"--make-vocab-size-divisible-by",
                                   size[2],
                                   "--tensor-model-parallel-size",
                                   size[0],
                                   "--pipeline-model-parallel-size",
                                   size[1],
                                   "--muon-tp-mode",
                                   s->mode};
    for (int i = 0; i < 8; i++) argv[argc++] = (char *)layout[i];
    bool ok = config_parse(&l->config, argc, argv, NULL, 0, &err) &&
              config_finish(&l->config, ranks, 248, 247, &err) &&
              mesh_build(&l->mesh, rank, ranks, NULL, ranks, s->T, s->P, &err);
    if (!ok) fatal(NULL, EXIT_USAGE, "%s: %s", preset->name, err.what);
}

static void open_layout(Layout *l, const Preset *preset, const Shape *s) {
    Error err = {0};
    memset(l, 0, sizeof *l);
    configure(l, preset, s);
    l->site.rank = rank;
    l->device = device_open(0, &l->site, &err);
    l->compute = stream_create(l->device, "compute");
    lanes_open(&l->lanes, l->device, false);
    l->timers = timers_create(l->device, 0);
    gpt_describe(&l->gpt, &l->config, &l->mesh);
    l->zero = zero_plan(&l->config, &l->mesh, l->gpt.tensor, l->gpt.tensors, &l->memory_plan, &err);
    bool ok = l->zero && memory_plan_allocate(&l->memory_plan, l->device, ranks, &err) &&
              mesh_open(&l->mesh, world, &err);
    if (!ok) fatal(NULL, EXIT_USAGE, "%s: %s", preset->name, err.what);
    comm_open(&l->mesh, l->device, 60);
    zero_start(l->zero, l->device, l->compute, &l->lanes, l->timers);
}

static void close_layout(Layout *l) {
    zero_stop(l->zero);
    memory_plan_free(&l->memory_plan, l->device);
    zero_free(l->zero);
    gpt_free(&l->gpt);
    comm_close(&l->mesh);
    mesh_close(&l->mesh);
    timers_destroy(l->timers);
    stream_destroy(l->compute);
    lanes_close(&l->lanes);
    device_close(l->device);
    config_free(&l->config);
}

// --- training ------------------------------------------------------------------------------------

// Converts element e of this rank's part to its index in the unsplit tensor.
static int64_t in_whole(const Tensor *t, int64_t e) {
    int64_t row = e / t->local[1] + (t->split == 0 ? t->offset : 0);
    return row * t->whole[1] + e % t->local[1] + (t->split == 1 ? t->offset : 0);
}

// Returns a value in (-1, 1) that is the same on all ranks that hold the element.
static float value_of(const Tensor *t, int64_t step, int64_t e) {
    int64_t key[3] = {t->number, step, in_whole(t, e)};
    return (float)(XXH3_64bits(key, sizeof key) % 65521) / 32761.0f - 1.0f;
}

static void fill_weights(const Layout *l) {
    for (int i = 0; i < l->gpt.tensors; i++) {
        const Tensor *t = &l->gpt.tensor[i];
        for (int64_t e = 0; e < tensor_elements(t); e++)
            zero_weight(l->zero, i)[e] = floatX_from_float(value_of(t, 0, e));
        zero_keep_weights(l->zero, i);
    }
    zero_init_master_weights(l->zero);
}

static void run_step(const Layout *l, int64_t step, bool poisoned) {
    Zero *zero = l->zero;
    zero_step_begins(zero, step);
    for (int unit = zero_layout(zero)->units - 1; unit >= 0; unit--) {
        zero_grads_begin(zero, unit);
        for (int i = 0; i < l->gpt.tensors; i++) {
            const Tensor *t = &l->gpt.tensor[i];
            int64_t n = t->unit == unit ? tensor_elements(t) : 0;
            for (int64_t e = 0; e < n; e++) {
                bool poison = poisoned && strstr(t->name, "layers.1.mlp") && in_whole(t, e) == 5;
                zero_grad(zero, i)[e] = poison ? NAN : value_of(t, step, e);
            }
        }
        zero_reduce_unit(zero, unit, true);
    }
    zero_update(zero, 0.01, 0.01, 0.1);
    zero_synchronize(zero);
    if (zero_step_status(zero, 0).applied == poisoned) fatal(NULL, EXIT_USAGE, "a wrong step was skipped");
}

static int64_t whole_elements(const GPT *gpt) {
    int64_t elements = 0;
    for (int i = 0; i < gpt->whole_tensors; i++) elements += tensor_whole_elements(&gpt->whole[i]);
    return elements;
}

// Adds this rank's part of the state to `all` (elements of the unsplit model).
static void add_own_state(const Layout *l, SliceKind kind, float *all) {
    int count;
    const Range *range = zero_ranges(l->zero, kind, &count);
    for (int i = 0; i < count; i++) {
        const Tensor *t = &l->gpt.tensor[range[i].tensor];
        int64_t first = 0;
        if (!zero_saves_range(l->zero, kind, &range[i])) continue;
        for (int k = 0; k < t->number; k++) first += tensor_whole_elements(&l->gpt.whole[k]);
        float *found = (float *)xmalloc((size_t)(range[i].hi - range[i].lo) * sizeof(float), "the test");
        zero_fetch(l->zero, i, kind, found);
        for (int64_t e = range[i].lo; e < range[i].hi; e++)
            all[first + in_whole(t, e)] += found[e - range[i].lo];
        free(found);
    }
}

// Returns master weights and momentum after training: (2, *elements) of the unsplit model.
static float *train(const Preset *preset, const Shape *s, int64_t *elements) {
    Layout l;
    open_layout(&l, preset, s);
    *elements = whole_elements(&l.gpt);
    float *all = (float *)xcalloc(2 * (size_t)*elements, sizeof *all, "the test");
    fill_weights(&l);
    for (int64_t step = 1; step <= STEPS; step++) run_step(&l, step, preset->poisoned && step == 2);
    add_own_state(&l, SLICE_MASTER, all);
    add_own_state(&l, SLICE_EXP_AVG, all + *elements);
    peers_all_reduce(world, all, (int)(2 * *elements), MPI_FLOAT, MPI_SUM);
    close_layout(&l);
    return all;
}

static void test_layouts(const Preset *preset) {
    static const Shape alone = {1, 1, "duplicated"};
    int64_t elements, found_elements;
    float *wanted = train(preset, &alone, &elements);
    for (int i = 0; i < SHAPES; i++) {
        const Shape *s = &shapes[i];
        if (ranks % (s->T * s->P) != 0) continue;
        float *found = train(preset, s, &found_elements);
        bool sized = found_elements == elements;
        bool same = sized && memcmp(found, wanted, (size_t)elements * sizeof *found) == 0;
        bool momentum = sized &&
                        memcmp(found + elements, wanted + elements, (size_t)elements * sizeof *found) == 0;
        bool blockwise = strcmp(s->mode, "blockwise") == 0;
        check(momentum, preset, "momentum as with T = 1", s);
        check(same == !blockwise, preset, blockwise ? "other weights" : "weights as with T = 1", s);
        free(found);
    }
    free(wanted);
}

int main(int argc, char **argv) {
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    rank = launch.rank;
    ranks = launch.size;
    for (int i = 0; i < PRESETS; i++) test_layouts(&presets[i]);
    failures += leaks_found();
    launch_finalize(&launch);
    return failures ? 1 : 0;
}
