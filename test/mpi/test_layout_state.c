// Training state in every layout of tensor and pipeline parallelism, and with sharded weights:
// norms and counts include each element once, copies of tensors are compared and repaired, and a
// checkpoint of any layout loads bit-exactly in any other. The tensors have the shapes of a GPT;
// gradients and states are synthetic, and there is no forward or backward pass.
//
// ranks: 1 2 4 8
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "llmc/checkpoint/saver.h"
#include "llmc/model/gpt.h"
#include "llmc/ranks/launch.h"
#include "llmc/state/zero.h"
#include "llmc/state/zero_parts.h"
#include "test/checkpoint_calls.h"
#include "test/leaks.h"

static const char *const flags[] = {"test",
                                    "--bf16",
                                    "--use-distributed-optimizer",
                                    "--mock-data",
                                    "--tokenizer-type",
                                    "NullTokenizer",
                                    "--num-layers",
                                    "4",
                                    "--global-batch-size",
                                    "16",
                                    "--seq-length",
                                    "32",
                                    "--max-position-embeddings",
                                    "32",
                                    "--micro-batch-size",
                                    "1",
                                    "--lr",
                                    "1e-3",
                                    "--train-iters",
                                    "10",
                                    "--clip-grad",
                                    "0",
                                    "--ddp-bucket-size",
                                    "1",
                                    "--hidden-size",
                                    "64",
                                    "--num-attention-heads",
                                    "4",
                                    "--vocab-size",
                                    "247",
                                    "--quantized-weights",
                                    "--quantized-gradients",
                                    "--wq-group-size",
                                    "128",
                                    "--gq-group-size-intra",
                                    "128",
                                    "--log-num-zeros-in-grad"};
enum { FLAGS = sizeof flags / sizeof *flags, STEP = 3 };

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
    char name[64];
} Layout;

static const Peers world = {MPI_COMM_WORLD, 0, NULL};
static int failures, rank, ranks;

static void check(bool ok, const Layout *l, const char *what) {
    bool all = peers_agree(world, ok, NULL, NULL);
    if (!ok) fprintf(stderr, "rank %d: %s: %s\n", rank, l->name, what);
    if (rank == 0) printf("%s %s: %s\n", all ? "ok" : "not ok", l->name, what);
    failures += !all;
}

// Storage of weights: replicated on every rank; sharded inside each of two nodes; sharded across
// all ranks; the same with a secondary copy per node.
typedef enum Sharing { WHOLE, NODES, WORLD, SECOND } Sharing;

// A layout to test. layers: number of layers per virtual stage, NULL: not interleaved.
typedef struct Shape {
    int T, P;
    const char *layers;
    Sharing sharing;
} Shape;
static const Shape shapes[] = {{1, 1, NULL, WHOLE}, {2, 1, NULL, WHOLE}, {1, 2, NULL, WHOLE},
                               {4, 1, NULL, WHOLE}, {2, 2, NULL, WHOLE}, {1, 4, NULL, WHOLE},
                               {4, 2, NULL, WHOLE}, {2, 4, NULL, WHOLE}, {1, 2, "1", WHOLE},
                               {2, 2, "1", WHOLE},  {1, 1, NULL, NODES}, {2, 1, NULL, NODES},
                               {1, 2, "1", NODES},  {1, 1, NULL, WORLD}, {2, 1, NULL, WORLD},
                               {1, 2, NULL, SECOND}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static void describe_shape(const Shape *s, char *text, size_t bytes) {
    static const char *const sharing[] = {"", ", sharded in nodes", ", sharded over all ranks",
                                          ", with a secondary copy"};
    snprintf(text, bytes, "T %d, P %d%s%s", s->T, s->P, s->layers ? " interleaved" : "", sharing[s->sharing]);
}

static int nodes_of(const Shape *s) { return s->sharing == NODES || s->sharing == SECOND ? 2 : 1; }

// Returns true if the layout fits the number of ranks and, with sharded weights, each node has
// several ranks.
static bool fits(const Shape *s) {
    int least = s->T * s->P * (s->sharing == WHOLE ? 1 : 2 * nodes_of(s));
    return ranks % (s->T * s->P) == 0 && ranks >= least;
}

// Returns false if the layout does not fit the number of ranks.
static bool open_layout(Layout *l, const Shape *s) {
    Error err = {0};
    char *argv[FLAGS + 16], size[3][16];
    int argc = FLAGS;
    memset(l, 0, sizeof *l);
    if (!fits(s) || !mesh_build(&l->mesh, rank, ranks, NULL, ranks / nodes_of(s), s->T, s->P, &err))
        return false;
    if (s->sharing != WHOLE) mesh_shard_weights(&l->mesh, s->sharing != NODES);
    describe_shape(s, l->name, sizeof l->name);
    l->site.rank = rank;
    for (int i = 0; i < FLAGS; i++) argv[i] = (char *)flags[i];
    snprintf(size[0], sizeof size[0], "%d", s->T);
    snprintf(size[1], sizeof size[1], "%d", s->P);
    snprintf(size[2], sizeof size[2], "%d", 32 / s->T);  // the same padded vocabulary in all layouts
    argv[argc++] = (char *)"--make-vocab-size-divisible-by";
    argv[argc++] = size[2];
    argv[argc++] = (char *)"--tensor-model-parallel-size";
    argv[argc++] = size[0];
    argv[argc++] = (char *)"--pipeline-model-parallel-size";
    argv[argc++] = size[1];
    if (s->layers) {
        argv[argc++] = (char *)"--num-layers-per-virtual-pipeline-stage";
        argv[argc++] = (char *)s->layers;
    }
    static const char *const shared[] = {"--data-parallel-sharding-strategy", "optim_grads_params"};
    static const char *const world_flags[] = {"--shard-params-over", "world", "--weight-quantization-method",
                                              "direct", "--secondary-partition"};
    for (int i = 0; s->sharing != WHOLE && i < 2; i++) argv[argc++] = (char *)shared[i];
    for (int i = 0; s->sharing >= WORLD && i < 4 + (s->sharing == SECOND); i++)
        argv[argc++] = (char *)world_flags[i];
    bool ok = config_parse(&l->config, argc, argv, NULL, 0, &err);
    int vocabulary = (int)l->config.vocab_size;
    ok = ok && config_finish(&l->config, ranks, vocabulary + 1, vocabulary, &err);
    l->device = device_open(0, &l->site, &err);
    l->compute = stream_create(l->device, "compute");
    lanes_open(&l->lanes, l->device, false);
    l->timers = timers_create(l->device, 0);
    if (!ok) fatal(NULL, EXIT_USAGE, "%s: %s", l->name, err.what);
    gpt_describe(&l->gpt, &l->config, &l->mesh);
    l->zero = zero_plan(&l->config, &l->mesh, l->gpt.tensor, l->gpt.tensors, &l->memory_plan, &err);
    ok = l->zero && memory_plan_allocate(&l->memory_plan, l->device, ranks, &err) &&
         mesh_open(&l->mesh, world, &err);
    if (!ok) fatal(NULL, EXIT_USAGE, "%s: %s", l->name, err.what);
    comm_open(&l->mesh, l->device, 60);
    zero_start(l->zero, l->device, l->compute, &l->lanes, l->timers);
    return true;
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

// --- synthetic contents --------------------------------------------------------------------------

// Converts element e of this rank's part to its index in the unsplit tensor.
static int64_t in_whole(const Tensor *t, int64_t e) {
    int64_t row = e / t->local[1] + (t->split == 0 ? t->offset : 0);
    return row * t->whole[1] + e % t->local[1] + (t->split == 1 ? t->offset : 0);
}

// Returns a value near 1 that differs for each element and kind, and is the same on all ranks that
// hold the element.
static float value_of(const Tensor *t, SliceKind kind, int64_t e) {
    int64_t key[3] = {t->number, kind, in_whole(t, e)};
    return 1.0f + (float)(XXH3_64bits(key, sizeof key) % 100003) / 100003.0f;
}

// Returns the model weight of an element. rounded: the rounded master weight; otherwise another
// value, as with quantized weight differences.
static floatX weight_of(const Tensor *t, bool rounded, int64_t e) {
    return floatX_from_float(value_of(t, rounded ? SLICE_MASTER : SLICE_WEIGHT, e));
}

static float *state_of(const Zero *zero, SliceKind kind) {
    return kind == SLICE_MASTER    ? zero->optimizer.master
           : kind == SLICE_EXP_AVG ? zero->optimizer.exp_avg
                                   : zero->optimizer.exp_avg_sq;
}

static void fill(const Layout *l, bool rounded) {
    Zero *zero = l->zero;
    for (int i = 0; i < zero->base.layout.tensors; i++) {
        const Tensor *t = &zero->base.tensors[i];
        for (int64_t e = 0; e < tensor_elements(t); e++) zero_weight(zero, i)[e] = weight_of(t, rounded, e);
        zero_keep_weights(zero, i);
    }
    for (int i = 0; i < zero->base.range_count; i++) {
        const Range *p = &zero->base.ranges[i];
        for (int kind = SLICE_MASTER; kind <= SLICE_EXP_AVG_SQ; kind++) {
            float *state = state_of(zero, (SliceKind)kind) + p->state_at;
            for (int64_t e = p->lo; e < p->hi; e++)
                state[e - p->lo] = value_of(&zero->base.tensors[p->tensor], (SliceKind)kind, e);
        }
    }
}

static void clear(const Layout *l) {
    Zero *zero = l->zero;
    for (int b = 0; b < zero->base.layout.buckets; b++) {
        int64_t elements;
        floatX *weights = weights_kept(&zero->base, &zero->weights, b, &elements);
        memset(weights, 0, (size_t)elements * sizeof(floatX));
    }
    for (int kind = SLICE_MASTER; kind <= SLICE_EXP_AVG_SQ; kind++)
        memset(state_of(zero, (SliceKind)kind), 0, (size_t)zero->base.layout.shard_elements * sizeof(float));
}

// Compares the weights of a tensor that forward or backward would use, gathered if they are
// sharded.
static bool same_weights(Zero *zero, int tensor, bool rounded, bool backward) {
    const Tensor *t = &zero->base.tensors[tensor];
    zero_weights_wait(zero, t->unit, -1, backward);
    for (int64_t e = 0; e < tensor_elements(t); e++) {
        floatX wanted = weight_of(t, rounded, e);
        if (floatX_to_float(zero_weight(zero, tensor)[e]) == floatX_to_float(wanted)) continue;
        fprintf(stderr, "rank %d: weight %lld of %s\n", rank, (long long)e, t->name);
        return false;
    }
    return true;
}

// Returns true if weights, master weights and moments equal those set by fill. Collective if
// weights are sharded.
static bool holds(const Layout *l, bool rounded) {
    Zero *zero = l->zero;
    bool seen = true;
    for (int i = 0; i < zero->base.layout.tensors; i++) seen = same_weights(zero, i, rounded, false) && seen;
    for (int i = zero->base.layout.tensors - 1; i >= 0; i--)
        seen = same_weights(zero, i, rounded, true) && seen;
    if (!seen) return false;
    for (int i = 0; i < zero->base.range_count; i++) {
        const Range *p = &zero->base.ranges[i];
        for (int kind = SLICE_MASTER; kind <= SLICE_EXP_AVG_SQ; kind++) {
            const float *state = state_of(zero, (SliceKind)kind) + p->state_at;
            for (int64_t e = p->lo; e < p->hi; e++) {
                if (state[e - p->lo] == value_of(&zero->base.tensors[p->tensor], (SliceKind)kind, e))
                    continue;
                fprintf(stderr, "rank %d: %s %lld of %s\n", rank, slice_kind_name((SliceKind)kind),
                        (long long)e, zero->base.tensors[p->tensor].name);
                return false;
            }
        }
    }
    return true;
}

static int64_t whole_elements(const Layout *l) {
    int64_t elements = 0;
    for (int i = 0; i < l->gpt.whole_tensors; i++) elements += tensor_whole_elements(&l->gpt.whole[i]);
    return elements;
}

// --- norms and counts ----------------------------------------------------------------------------

static double norm_of_whole(const Layout *l) {
    double squares = 0;
    for (int i = 0; i < l->gpt.whole_tensors; i++) {
        const Tensor *t = &l->gpt.whole[i];  // unsplit
        for (int64_t e = 0; e < tensor_whole_elements(t); e++) {
            float x = floatX_to_float(floatX_from_float(value_of(t, SLICE_MASTER, e)));
            squares += (double)x * x;
        }
    }
    return sqrt(squares);
}

// Runs a step in which all gradients are `gradient` and the last stage has a loss.
static StepStatus step(const Layout *l, float gradient, float loss) {
    Zero *zero = l->zero;
    zero_step_begins(zero, STEP);
    if (l->gpt.stage.heads) *zero->loss_sum = loss;
    for (int unit = zero->base.layout.units - 1; unit >= 0; unit--) {
        zero_grads_begin(zero, unit);
        for (int i = 0; i < zero->base.layout.tensors; i++) {
            const Tensor *t = &zero->base.tensors[i];
            int64_t n = t->unit == unit ? tensor_elements(t) : 0;
            for (int64_t e = 0; e < n; e++) zero_grad(zero, i)[e] = gradient;
        }
        zero_reduce_unit(zero, unit, true);
    }
    zero_update(zero, 0, 0, 0);
    return zero_step_status(zero, 0);
}

static void test_figures(const Layout *l) {
    fill(l, true);
    double norm = zero_params_norm(l->zero, world), wanted = norm_of_whole(l);
    double all = (double)whole_elements(l);
    check(fabs(norm / wanted - 1) < 1e-6, l, "the weight norm includes each element once");
    StepStatus status = step(l, 0, 2.5f + (float)l->mesh.dp.rank);
    check((double)zero_zeros(l->zero, world) == all, l, "each zero is counted once");
    check(status.grad_norm == 0 && status.loss == 2.5f + 0.5f * (float)(l->mesh.dp.size - 1), l,
          "the loss is the mean over data-parallel ranks");
    status = step(l, 1, 1);
    // The gradient is quantized, but accurately: the Hadamard transform of equal values has one
    // nonzero value per 32, which equals the scale.
    check(fabs(status.grad_norm / sqrt(all) - 1) < 0.02, l, "the gradient norm includes each element once");
}

// --- replicas ------------------------------------------------------------------------------------

static bool verify(const Layout *l, int64_t *repairs, Error *err) {
    Config quiet = {0};
    Log *log = log_open(&quiet, ranks, false, NULL, err);
    *repairs = 0;
    bool ok = replicas_verify(l->zero, world, log, repairs, err);
    log_close(log);
    return ok;
}

// Returns the row of a tensor in this rank's table, or -1.
static int row_of(const Layout *l, const char *name) {
    for (int i = 0; i < l->gpt.tensors; i++) {
        if (strstr(l->gpt.tensor[i].name, name)) return i;
    }
    return -1;
}

// Flips a bit of the tensor's fifth element, on rank `on` or, if weights are sharded, in its node.
static void flip(const Layout *l, int row, int on) {
    Zero *zero = l->zero;
    Mesh there = mesh_of_rank(&l->mesh, on);
    if (row < 0 || there.tp.rank != l->mesh.tp.rank || there.pp.rank != l->mesh.pp.rank) return;
    bool resident = !weights_store(&zero->weights, zero->base.layout.tensor_bucket[row])->gathers;
    bool same_node = (zero->weights.layers == &weights_world) || there.rail.rank == l->mesh.rail.rank;
    if (resident ? rank != on : !same_node) return;
    for (int i = 0; i < zero->weights.kept.shards; i++) {
        int64_t first, count;
        floatX *kept = weights_of_tensor(&zero->base, &zero->weights, row, i, &first, &count);
        if (kept && first <= 5 && 5 < first + count) ((uint16_t *)(void *)kept)[5 - first] ^= 4;
    }
}

// Returns how many data-parallel ranks hold each element of the tensor.
static int holders_of(const Layout *l, const char *name) {
    const Zero *zero = l->zero;
    int row = row_of(l, name), holders = 0;
    if (row >= 0) holders = (zero->weights.layers == &weights_world) ? 1 : l->mesh.rail.size;
    if (row >= 0 && !weights_store(&zero->weights, zero->base.layout.tensor_bucket[row])->gathers)
        holders = l->mesh.dp.size;
    peers_all_reduce(world, &holders, 1, MPI_INT, MPI_MAX);
    return holders;
}

// Flips one bit of the tensor on rank `on`. All copies must be correct after a repair from other
// ranks or from the master weights.
static void test_flipped_bit(const Layout *l, const char *name, int on, bool found, const char *what) {
    int64_t repairs;
    Error err = {0};
    int row = row_of(l, name);
    fill(l, true);
    // As after an update. Forward must use the repaired weights, not the payloads of the update.
    if (found) l->zero->weights.messages_valid = l->zero->weights.message != NULL;
    flip(l, row, on);
    bool ok = verify(l, &repairs, &err);
    check(ok && repairs == (found ? 1 : 0) && (!found || holds(l, true)), l, what);
}

// Like test_flipped_bit, with model weights that are not the rounded master weights. A repair from
// the master weights then changes all copies, and more than the flipped bit.
static void test_flipped_version(const Layout *l, const char *name, int on, bool found, const char *what) {
    int64_t repairs, again;
    Error err = {0};
    int row = row_of(l, name);
    fill(l, false);
    flip(l, row, on);
    bool ok = verify(l, &repairs, &err);
    check(ok && repairs == (found ? 1 : 0) && (!found || (verify(l, &again, &err) && again == 0)), l, what);
}

// On ranks with `here` set, a tensor's model weights and master weights have diverged, so the right
// values are unknown. says: tensor and ranks that the error must name.
static void test_drift(const Layout *l, const char *name, bool here, const char *says) {
    int64_t repairs;
    Error err = {0};
    int row = row_of(l, name);
    fill(l, true);
    for (int i = 0; here && i < l->zero->base.range_count; i++) {
        const Range *p = &l->zero->base.ranges[i];
        if (p->tensor == row) l->zero->optimizer.master[p->state_at] += 0.5f;
    }
    for (int64_t i = 0; here && i < tensor_elements(&l->gpt.tensor[row]); i++)
        zero_weight(l->zero, row)[i] = floatX_from_float(3);
    bool ok = verify(l, &repairs, &err);
    bool told = strstr(err.what, says) && strstr(err.what, "still differ after the repair");
    if (!told) fprintf(stderr, "rank %d: '%s' in '%s'?\n", rank, says, err.what);
    check(!ok && err.code == EXIT_COMMUNICATION && told, l, "diverged master weights end the run");
}

static void test_replicas(const Layout *l) {
    int64_t repairs;
    Error err = {0};
    int T = l->mesh.tp.size, P = l->mesh.pp.size, D = l->mesh.dp.size, last = ranks - T * D;
    fill(l, false);
    check(verify(l, &repairs, &err) && repairs == 0 && holds(l, false), l, "equal replicas are not changed");
    // Only data-parallel ranks have copies of a split tensor.
    const char *cut = "layers.0.mlp.dense_h_to_4h.weight", *vector = "layers.3.input_norm.bias";
    test_flipped_bit(l, cut, 0, holders_of(l, cut) > 1, "a flipped bit of a split tensor");
    bool twice = T > 1 || D > 1;
    test_flipped_bit(l, "position_embeddings", T - 1, twice, "a flipped bit of a replicated matrix");
    bool held = T > 1 || holders_of(l, vector) > 1;
    test_flipped_bit(l, vector, ranks - 1, held, "a flipped bit of a replicated vector");
    test_flipped_bit(l, "word_embeddings", last, P > 1 || D > 1, "a flipped bit of a copy of the embedding");
    test_flipped_version(l, "position_embeddings", T - 1, twice,
                         "a flipped bit of a matrix that differs from its master weights");
    test_flipped_version(l, "word_embeddings", last, P > 1 || D > 1,
                         "a flipped bit of an embedding that differs from its master weights");
    if (T == 2)
        test_drift(l, "position_embeddings", l->mesh.pp.rank == 0 && l->mesh.tp.rank == 1,
                   "embedding.position_embeddings.weight on ranks 0, 1");
    char says[80];
    snprintf(says, sizeof says, "embedding.word_embeddings.weight on ranks 0, %d", last);
    if (P > 1) test_drift(l, "word_embeddings", rank >= last, says);
}

// --- checkpoints ---------------------------------------------------------------------------------

static bool save(Layout *l, const char *folder, int64_t iteration, Error *err) {
    SaveLock lock = NO_SAVE_LOCK;
    l->config.save = (char *)folder;
    l->config.save_interval = 5;
    Log *log = log_open(&l->config, ranks, false, NULL, err);
    Progress *progress = progress_open(folder, ranks, 0, false, err);
    Saver saver = {.config = &l->config,
                   .mesh = &l->mesh,
                   .zero = l->zero,
                   .whole = l->gpt.whole,
                   .whole_count = l->gpt.whole_tensors,
                   .log = log,
                   .progress = progress,
                   .peers = world,
                   .before = -1,
                   .lock = &lock};
    RunState state = {.iteration = iteration, .beta1_power = 0.5, .beta2_power = 0.25};
    bool ok = (rank != 0 || save_folder_lock(folder, 5, &lock, err)) && saver_has_room(&saver, 0, err) &&
              saver_save(&saver, &state, NULL, err);
    if (rank == 0) save_folder_unlock(&lock);
    progress_close(progress);
    log_close(log);
    l->config.save = NULL;
    // Files have Megatron-LM's names, and every rank can see them after the save.
    char own[160];
    int used = snprintf(own, sizeof own, "%s/iter_%07lld/mp_rank_%02d", folder, (long long)iteration,
                        l->mesh.tp.rank);
    if (l->mesh.pp.size > 1) snprintf(own + used, sizeof own - (size_t)used, "_%03d", l->mesh.pp.rank);
    return ok && access(own, F_OK) == 0;
}

static bool load(const Layout *l, const char *folder, int64_t iteration, Error *err) {
    Checkpoint *c = open_exactly(folder, iteration, MPI_COMM_WORLD, err);
    bool ok = c && checkpoint_check_tensors(c, l->gpt.whole, l->gpt.whole_tensors, err) &&
              zero_restore(l->zero, c, true, err);
    if (c) checkpoint_close(c);
    return ok;
}

static void test_checkpoints(const char *folder) {
    Layout l;
    Error err = {0};
    for (int i = 0; i < SHAPES; i++) {
        char own[128];
        if (!open_layout(&l, &shapes[i])) continue;
        snprintf(own, sizeof own, "%s/%d", folder, i);
        fill(&l, false);
        bool ok = save(&l, own, 1, &err);
        if (!ok) fprintf(stderr, "rank %d: %s\n", rank, err.what);
        check(ok, &l, "saves a checkpoint");
        close_layout(&l);
    }
    for (int i = 0; i < SHAPES; i++) {
        if (!open_layout(&l, &shapes[i])) continue;
        for (int from = 0; from < SHAPES; from++) {
            char own[128], what[96], saver[48];
            if (!fits(&shapes[from])) continue;
            describe_shape(&shapes[from], saver, sizeof saver);
            snprintf(own, sizeof own, "%s/%d", folder, from);
            snprintf(what, sizeof what, "loads the checkpoint of %s bit-exactly", saver);
            clear(&l);
            bool ok = load(&l, own, 1, &err);
            if (!ok) fprintf(stderr, "rank %d: %s\n", rank, err.what);
            check(ok && holds(&l, false), &l, what);
        }
        close_layout(&l);
    }
}

int main(int argc, char **argv) {
    Launch launch;
    char folder[] = "/tmp/test_layout_state_XXXXXX";
    leaks_launch(&launch, &argc, &argv);
    rank = launch.rank;
    ranks = launch.size;
    bool made = rank != 0 || mkdtemp(folder);
    if (!made) fatal(NULL, EXIT_ENVIRONMENT, "cannot make a folder in /tmp");
    MPI_Bcast(folder, (int)sizeof folder, MPI_CHAR, 0, MPI_COMM_WORLD);
    for (int i = 0; i < SHAPES; i++) {
        Layout l;
        if (!open_layout(&l, &shapes[i])) continue;
        test_figures(&l);
        test_replicas(&l);
        close_layout(&l);
    }
    test_checkpoints(folder);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        char command[128];
        snprintf(command, sizeof command, "rm -rf '%s'", folder);
        if (system(command) != 0) failures++;
    }
    failures += leaks_found();
    launch_finalize(&launch);
    return failures ? 1 : 0;
}
