// Compares losses and gradients of a GPT-2 and a Llama, in every layout of tensor and pipeline
// parallelism that fits the ranks, with the same model on one rank. Uses dropout and several
// micro-batches.
//   - In the fp32 build (PRECISION=fp32) they differ only by rounding; see tolerance().
//   - Values that several ranks hold are bitwise identical.
//   - On CPU ranks the row blocks of tensor parallelism change no bit; see rows_are_independent().
//   - On CPU ranks pipeline stages change no bit, except in the gradients of the word embeddings,
//     which are summed over micro-batches in a different order. For GPUs see tolerance().
//   - Every quantized message between stages has its own rounding bits, the same in every layout.
//   - Sums over the tensor-parallel ranks are correct if scratch memory holds only parts of them.
//
// Built for both backends: build/test/gpu/test_layout runs on GPUs.
//
//   test_layout [--emulate-nodes PER_NODE]
//
// With the flag NCCL treats emulated nodes as hosts, so that ranks may share GPUs.
// ranks: 1 2 4 8
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/rng.h"
#include "llmc/comm.h"
#include "llmc/ranks/devices.h"
#include "llmc/state/zero_parts.h"
#include "test/leaks.h"
#include "llmc/model/gpt.h"

enum { VOCABULARY = 128, MOST_FLAGS = 80 };

typedef struct Layout {
    int tp, pp;
    bool sequence, recompute;
    int micro_batches;
    int chunks;    // model chunks per stage
    int groups;    // query groups of a Llama; 0: GPT-2's blocks
    bool qk_norm;  // only with RoPE: otherwise key norms have biases that do not affect the loss.
                   // Also sets heads to twice their usual size.
    bool coded;    // --quantized-activations
} Layout;

// This rank and its options.
typedef struct Rank {
    const Launch *launch;
    int emulated;  // ranks per emulated node; 0: nodes are hosts
    OwnDevice own;
} Rank;

// A model and its resources.
typedef struct Model {
    Config config;
    Mesh mesh;
    Device *device;
    Stream *compute;
    Lanes lanes;
    Timers *timers;
    MemoryPlan memory_plan;
    Zero *zero;
    GPT gpt;
    Pipeline pipeline;
    bool alone;
} Model;

static const Peers everyone = {MPI_COMM_WORLD, 0, NULL};

static bool configure(Config *config, const Layout *layout, Error *err) {
    const char *argv[MOST_FLAGS] = {"test",
                                    "--bf16",
                                    "--use-distributed-optimizer",
                                    "--mock-data",
                                    "--lr",
                                    "1e-3",
                                    "--train-iters",
                                    "10",
                                    "--tokenizer-type",
                                    "NullTokenizer",
                                    "--vocab-size",
                                    "127",
                                    "--make-vocab-size-divisible-by",
                                    "16",
                                    "--num-layers",
                                    "8",
                                    "--hidden-size",
                                    "64",
                                    "--num-attention-heads",
                                    "8",
                                    "--seq-length",
                                    "24",
                                    "--max-position-embeddings",
                                    "24",
                                    "--micro-batch-size",
                                    "2",
                                    "--init-method-std",
                                    "0.1",
                                    "--recompute-granularity",
                                    layout->recompute ? "full" : "selective",
                                    "--global-batch-size"};
    int count = 31;
    char batch[16], tp[16], pp[16], chunk[16];
    snprintf(batch, sizeof batch, "%d", 2 * layout->micro_batches);
    snprintf(tp, sizeof tp, "%d", layout->tp);
    snprintf(pp, sizeof pp, "%d", layout->pp);
    argv[count++] = batch;
    argv[count++] = "--tensor-model-parallel-size";
    argv[count++] = tp;
    if (layout->tp > 1) argv[count++] = "--tp-comm-overlap";
    argv[count++] = "--pipeline-model-parallel-size";
    argv[count++] = pp;
    snprintf(chunk, sizeof chunk, "%d", 8 / layout->pp / layout->chunks);
    char groups[16];
    snprintf(groups, sizeof groups, "%d", layout->groups);
    const char *const llama[] = {"--normalization",
                                 "RMSNorm",
                                 "--position-embedding-type",
                                 "rope",
                                 "--swiglu",
                                 "--ffn-hidden-size",
                                 "128",
                                 "--disable-bias-linear",
                                 "--add-qkv-bias",
                                 "--window-size",
                                 "4,0",
                                 "--window-attn-skip-freq",
                                 "3",
                                 "--untie-embeddings-and-output-weights",
                                 "--group-query-attention",
                                 "--num-query-groups",
                                 groups};
    int blocks = layout->groups ? (int)(sizeof llama / sizeof *llama) : 0;
    for (int i = 0; i < blocks; i++) argv[count++] = llama[i];
    const char *const heads[] = {"--qk-layernorm", "--position-embedding-type", "rope", "--kv-channels",
                                 "16"};
    for (int i = 0; i < (layout->qk_norm ? 5 : 0); i++) argv[count++] = heads[i];
    if (layout->sequence) argv[count++] = "--sequence-parallel";
    const char *const codes[] = {"--quantized-activations", "--aq-group-size", "32"};
    for (int i = 0; i < (layout->coded ? 3 : 0); i++) argv[count++] = codes[i];
    if (layout->chunks > 1) {
        argv[count++] = "--num-layers-per-virtual-pipeline-stage";
        argv[count++] = chunk;
    }
    return config_parse(config, count, (char **)argv, NULL, 0, err) &&
           config_finish(config, layout->tp * layout->pp, VOCABULARY, VOCABULARY - 1, err);
}

// Sets vectors, which are initialized to zeros or ones, to other values (the same in every layout).
// Otherwise a missing or doubled bias would not be detected.
static void fill_vectors(Model *m) {
    for (int i = 0; i < m->gpt.tensors; i++) {
        const Tensor *t = &m->gpt.tensor[i];
        int64_t n = tensor_elements(t);
        if (t->dims > 1) continue;
        floatX *vector = (floatX *)xcalloc((size_t)n, sizeof *vector, "the test");
        for (int64_t at = 0; at < n; at++) {
            Philox4 r = philox4x32_10(9, 0, (uint32_t)(t->offset + at), (uint32_t)t->number, 0, 0);
            vector[at] = floatX_from_float((float)r.v[0] * 0x1p-32f + 0.5f);
        }
        copy_to_device(m->compute, zero_weight(m->zero, i), vector, (size_t)n * sizeof *vector);
        free(vector);
    }
}

static void open_device(Model *m, const OwnDevice *own) {
    Error err = {0};
    m->device = device_open(own->index, NULL, &err);
    if (!m->device) fatal(NULL, err.code, "%s", err.what);
    device_set_deterministic(m->device, true);
    m->compute = stream_create(m->device, "compute");
    lanes_open(&m->lanes, m->device, false);
    m->timers = timers_create(m->device, 0);
}

static void connect(Model *m, int chunks) {
    Error err = {0};
    size_t bytes = (size_t)m->mesh.world.size * COMM_TRIAL_BYTES;
    if (!m->alone) comm_open(&m->mesh, m->device, 60);
    m->pipeline = pipeline_open(&m->mesh, chunks, m->device);
    void *trial = device_alloc(m->device, bytes, "the test", &err);
    if (!trial) fatal(NULL, err.code, "%s", err.what);
    comm_connect(&m->mesh, trial);
    device_free(m->device, trial);
}

// With the layout 1 x 1 the model runs on this rank alone.
// block_bytes: least size of a row block, if the layout has any.
static void open_model(Model *m, const Layout *layout, const Rank *rank, int64_t block_bytes) {
    Error err = {0};
    int size = layout->tp * layout->pp, per_node = size > 1 ? rank->emulated : 0;
    memset(m, 0, sizeof *m);
    m->alone = size == 1;
    bool ok = configure(&m->config, layout, &err) &&
              mesh_build(&m->mesh, m->alone ? 0 : rank->launch->rank, size, rank->launch->host_of_rank,
                         per_node, layout->tp, layout->pp, &err);
    if (ok && !m->alone) ok = mesh_open(&m->mesh, everyone, &err);
    if (!ok) fatal(NULL, EXIT_USAGE, "%s", err.what);
    open_device(m, &rank->own);
    gpt_describe(&m->gpt, &m->config, &m->mesh);
    if (m->gpt.tp.block_bytes) m->gpt.tp.block_bytes = block_bytes;
    m->zero = zero_plan(&m->config, &m->mesh, m->gpt.tensor, m->gpt.tensors, &m->memory_plan, &err);
    if (!m->zero) fatal(NULL, EXIT_USAGE, "%s", err.what);
    gpt_reserve(&m->gpt, &m->memory_plan);
    if (!memory_plan_allocate(&m->memory_plan, m->device, devices_memory_sharers(&rank->own), &err)) {
        fatal(NULL, err.code, "%s", err.what);
    }
    connect(m, layout->chunks);
    zero_start(m->zero, m->device, m->compute, &m->lanes, m->timers);
    gpt_start(&m->gpt, m->zero, m->device, m->compute, m->timers);
    m->gpt.pipeline = m->pipeline;
    tp_open(&m->gpt.tp, m->device);
    gpt_init_weights(&m->gpt, 7, (Peers){MPI_COMM_SELF, 0, NULL});
    fill_vectors(m);
}

static void close_model(Model *m) {
    tp_close(&m->gpt.tp);
    zero_stop(m->zero);
    if (!m->alone) comm_close(&m->mesh);
    memory_plan_free(&m->memory_plan, m->device);
    zero_free(m->zero);
    gpt_free(&m->gpt);
    if (!m->alone) mesh_close(&m->mesh);
    timers_destroy(m->timers);
    stream_destroy(m->compute);
    lanes_close(&m->lanes);
    device_close(m->device);
    config_free(&m->config);
}

// A LoadMicroBatch that loads the same tokens in every layout.
static void load(GPT *gpt, int parts, Pass *pass) {
    int k = pass->micro_batch;
    int N = gpt->B * gpt->T;
    int32_t *ids = (int32_t *)xcalloc(3 * (size_t)N, sizeof *ids, "the test"), *targets = ids + N,
            *positions = targets + N;
    for (int i = 0; i < N; i++) {
        Philox4 r = philox4x32_10(5, 0, (uint32_t)i, (uint32_t)k, 0, 0);
        ids[i] = (int32_t)(r.v[0] % VOCABULARY);
        targets[i] = (int32_t)(r.v[1] % VOCABULARY);
        positions[i] = i % gpt->T;
    }
    Batch batch = {ids, targets, positions, NULL, NULL, 0};
    gpt_upload(gpt, pass->slot, &batch);
    pass->first_sample = k * gpt->B;
    pass->loss_scale = 1.0f / (float)(N * parts);
    free(ids);
}

enum { SEED = 1234, STEPS = 2, MICRO_BATCHES = 2, MOST_SENT = 64 };  // SEED: the default of --seed
// The keys of the messages that this rank has sent since its warm-up, which encodes messages too.
static struct {
    RoundingKey key[MOST_SENT];
    int count;
} sent;

static void step(Model *m, const Layout *layout, int64_t iteration) {
    int parts = layout->micro_batches;
    Pass pass;
    zero_step_begins(m->zero, iteration);
    if (gpt_needs_warm_up(&m->gpt, true, &pass)) {
        load(&m->gpt, parts, &pass);
        gpt_warm_up(&m->gpt, &pass);
        sent.count = 0;
    }
    PassSchedule schedule = gpt_schedule(&m->gpt, parts, true);
    while (gpt_next_pass(&schedule, &pass)) {
        if (pass.direction == FORWARD) load(&m->gpt, parts, &pass);
        if (pass.direction == FORWARD) gpt_forward_pass(&m->gpt, &pass);
        else gpt_backward_pass(&m->gpt, &pass);
    }
    gpt_end_backward(&m->gpt);
    stream_synchronize(m->compute);
}

// --- comparing -----------------------------------------------------------------------------------

static bool complain(const Model *m, const char *tensor, const char *what, double found, double allowed) {
    fprintf(stderr, "rank %d (T %d, P %d): %s: %s %g, allowed %g\n", m->mesh.world.rank, m->mesh.tp.rank,
            m->mesh.pp.rank, tensor, what, found, allowed);
    return false;
}

static bool on_gpu(void) { return device_kind()->own_memory; }

// Downloads device memory. The caller frees the copy.
static void *fetch(const Model *m, const void *memory, size_t bytes) {
    void *host = xmalloc(bytes, "the test");
    copy_to_host(m->compute, host, memory, bytes);
    stream_synchronize(m->compute);
    return host;
}
static float *gradient_of(const Model *m, int tensor) {
    size_t n = (size_t)tensor_elements(&m->gpt.tensor[tensor]);
    return (float *)fetch(m, zero_grad(m->zero, tensor), n * sizeof(float));
}

static int find(const GPT *gpt, const char *name) {
    int i = 0;
    while (strcmp(gpt->tensor[i].name, name) != 0) i++;
    return i;
}

// allowed: maximum error, relative to the tensor's largest gradient.
static bool compare_tensor(const Model *part, const Model *whole, int tensor, double allowed) {
    const Tensor *t = &part->gpt.tensor[tensor];
    float *ours = gradient_of(part, tensor), *all = gradient_of(whole, find(&whole->gpt, t->name));
    int64_t row = t->split == 0 ? t->offset : 0, column = t->split == 1 ? t->offset : 0;
    double worst = 0, scale = 0;
    for (int64_t i = 0; i < tensor_whole_elements(t); i++) scale = fmax(scale, fabs(all[i]));
    for (int64_t i = 0; i < tensor_elements(t); i++) {
        int64_t at = (row + i / t->local[1]) * t->whole[1] + column + i % t->local[1];
        double difference = fabs((double)ours[i] - all[at]);
        if (!(difference <= worst)) worst = difference;
    }
    free(ours);
    free(all);
    if (scale > 0 && worst <= allowed * scale) return true;
    return complain(part, t->name, "gradient differs by", worst / scale, allowed);
}

// Returns the maximum error of a tensor's gradient, relative to its largest element. Pipeline
// stages alone are bitwise identical to one rank on the CPU. On a GPU a stage ends with a separate
// kernel for the residual sum, which sums the rows of a bias gradient in another order than the
// fused LayerNorm kernel. In bf16 SwiGLU's product doubles rounding errors. Gradients of query and
// key norms are sums of terms that nearly cancel, so their rounding errors are relatively large.
static double tolerance(const Layout *layout, const Tensor *t) {
    bool fp32 = sizeof(floatX) == sizeof(float), of_heads = strstr(t->name, "_layernorm") != NULL;
    if (layout->tp > 1 && of_heads) return fp32 ? 5e-5 : 4e-1;
    if (layout->tp > 1) return fp32 ? 1e-5 : layout->groups ? 6e-2 : 4e-2;
    if (layout->pp > 1 && on_gpu()) return 1e-5;
    bool another_order = t->number == GPT_WTE && layout->pp > 1 && layout->micro_batches > 1;
    return another_order ? 1e-6 : 0.0;
}

static bool equal_over(const Model *m, const Group *group, int tensor) {
    const Tensor *t = &m->gpt.tensor[tensor];
    uint64_t hash = 1, least, most;
    if (group->size == 1) return true;
    float *gradient = gradient_of(m, tensor);
    size_t n = (size_t)tensor_elements(t);
    floatX *weight = (floatX *)fetch(m, zero_weight(m->zero, tensor), n * sizeof(floatX));
    for (int64_t i = 0; i < tensor_elements(t); i++) {
        hash = replica_mix(hash ^ f32_bits(gradient[i]), (uint64_t)i);
        hash = replica_mix(hash ^ f32_bits(floatX_to_float(weight[i])), (uint64_t)i);
    }
    free(gradient);
    free(weight);
    MPI_Allreduce(&hash, &least, 1, MPI_UINT64_T, MPI_MIN, group->mpi);
    MPI_Allreduce(&hash, &most, 1, MPI_UINT64_T, MPI_MAX, group->mpi);
    return least == most || complain(m, t->name, "differs between ranks that hold it", 1, 0);
}

static float loss_of(const Model *m) {
    float *loss = (float *)fetch(m, zero_loss_sum(m->zero), sizeof *loss), value = *loss;
    free(loss);
    return value;
}

// Returns true if a row of a GEMM has the same bits with fewer rows. OpenBLAS's kernels for Haswell
// compute 12 rows at a time, which divides the row blocks here. Other kernels may sum in another
// order.
static bool rows_are_independent(void) {
    const char *kernels = getenv("OPENBLAS_CORETYPE");
    return !on_gpu() && kernels && !strcmp(kernels, "Haswell");
}

// Compares with the same layout without row blocks.
static bool same_without_blocks(const Model *part, const Layout *layout, const Rank *rank) {
    Model all_rows;
    bool ok = true;
    if (!part->gpt.tp.block_bytes || !rows_are_independent()) return true;
    if (tp_row_blocks(&part->gpt.tp, (int64_t)part->gpt.B * part->gpt.T).count != TP_BLOCKS)
        ok = complain(part, "rows", "blocks", 1, TP_BLOCKS);
    open_model(&all_rows, layout, rank, 0);
    step(&all_rows, layout, 1);
    for (int i = 0; i < part->gpt.tensors; i++) {
        const Tensor *t = &part->gpt.tensor[i];
        size_t bytes = (size_t)tensor_elements(t) * sizeof(float);
        float *ours = gradient_of(part, i), *other = gradient_of(&all_rows, i);
        if (memcmp(ours, other, bytes) != 0) ok = complain(part, t->name, "row blocks change it", 1, 0);
        free(ours);
        free(other);
    }
    ok = peers_agree(everyone, ok, NULL, NULL);  // the other stages have received all messages
    close_model(&all_rows);
    return ok;
}

// Compares losses. In forward, pipeline stages are bitwise identical to one rank even on a GPU.
static bool compare_loss(const Model *part, const Model *whole, const Layout *layout) {
    float ours = loss_of(part), all = loss_of(whole);
    double allowed = layout->tp > 1 ? (sizeof(floatX) == sizeof(float) ? 1e-6 : 2e-3) : 0.0;
    if (!part->gpt.stage.heads) all = 0.0f;
    if (fabs(ours - all) <= allowed * fabs(all)) return true;
    return complain(part, "loss", "differs by", ours - all, allowed);
}

static bool same_model(const Layout *layout, const Rank *rank) {
    const Layout one_rank = {
        1, 1, false, layout->recompute, layout->micro_batches, 1, layout->groups, layout->qk_norm, false};
    Model part, whole;
    open_model(&part, layout, rank, 1);
    open_model(&whole, &one_rank, rank, 1);
    step(&part, layout, 1);
    step(&whole, &one_rank, 1);
    bool ok = compare_loss(&part, &whole, layout);
    ok = same_without_blocks(&part, layout, rank) && ok;
    for (int i = 0; i < part.gpt.tensors; i++) {
        const Tensor *t = &part.gpt.tensor[i];
        ok = compare_tensor(&part, &whole, i, tolerance(layout, t)) && ok;
        if (t->split < 0) ok = equal_over(&part, &part.mesh.tp, i) && ok;
        if (t->number == GPT_WTE && part.gpt.tied) ok = equal_over(&part, &part.mesh.embedding, i) && ok;
    }
    ok = peers_agree(everyone, ok, NULL, NULL);
    close_model(&whole);
    close_model(&part);
    return ok;
}

static bool test_layout(const Rank *rank, const Layout *layout) {
    bool ok = same_model(layout, rank);
    if (rank->launch->rank == 0) {
        printf("%s %s%s, T %d, P %d%s%s%s, %d micro-batches\n", ok ? "ok" : "not ok",
               layout->groups ? "Llama" : "GPT-2", layout->qk_norm ? " with norms of queries and keys" : "",
               layout->tp, layout->pp, layout->chunks > 1 ? " in chunks" : "",
               layout->sequence ? ", sequence parallel" : "", layout->recompute ? ", full recomputation" : "",
               layout->micro_batches);
    }
    return ok;
}

// --- rounding bits of messages between stages ----------------------------------------------------

// A message's rounding bits: a key, and the offsets of its elements.
typedef struct Bits {
    RoundingKey key;
    int64_t first, end;
} Bits;

// Records the keys of messages (linker option --wrap).
void __real_activations_encode(const ActivationFormat *format, const MessageLayout *message,
                               const ActivationScratch *scratch, RoundingKey key, const floatX *x, int count,
                               uint8_t *to, Stream *stream);
void __wrap_activations_encode(const ActivationFormat *format, const MessageLayout *message,
                               const ActivationScratch *scratch, RoundingKey key, const floatX *x, int count,
                               uint8_t *to, Stream *stream);
void __wrap_activations_encode(const ActivationFormat *format, const MessageLayout *message,
                               const ActivationScratch *scratch, RoundingKey key, const floatX *x, int count,
                               uint8_t *to, Stream *stream) {
    if (sent.count < MOST_SENT) sent.key[sent.count++] = key;
    __real_activations_encode(format, message, scratch, key, x, count, to, stream);
}

// Runs STEPS steps and returns the bits of the messages of all ranks, (ranks, MOST_SENT); end is 0
// where there is none. The caller frees them.
static Bits *bits_of(const Layout *layout, const Rank *rank) {
    Model m;
    Bits own[MOST_SENT] = {{{0}, 0, 0}};
    Bits *all = xcalloc((size_t)rank->launch->size, sizeof own, "the test");
    open_model(&m, layout, rank, 1);
    sent.count = 0;
    for (int i = 0; i < STEPS; i++) step(&m, layout, 1 + i);
    Segment *segment = (Segment *)fetch(&m, m.gpt.message_scratch.segment, sizeof *segment);
    for (int i = 0; i < sent.count; i++)
        own[i] = (Bits){sent.key[i], segment->logical, segment->logical + segment->numel};
    free(segment);
    peers_all_gather(everyone, own, all, (int)sizeof own, MPI_BYTE);
    close_model(&m);
    return all;
}

static bool same_key(const Bits *a, const Bits *b) { return memcmp(&a->key, &b->key, sizeof a->key) == 0; }

// Returns the elements of messages with the key of `which`, or -1 if two of them share an offset.
static int64_t elements_with_key(const Bits *all, int count, const Bits *which) {
    int64_t elements = 0;
    for (int i = 0; i < count; i++) {
        if (!same_key(&all[i], which)) continue;
        elements += all[i].end - all[i].first;
        for (int j = i + 1; j < count; j++) {
            if (same_key(&all[j], which) && all[i].first < all[j].end && all[j].first < all[i].end) return -1;
        }
    }
    return elements;
}

// Compares two stages whose ranks send parts of a message, if there are enough ranks, with as many
// stages as ranks. No two elements of any messages have the same bits, and a message has the same
// bits in both layouts.
static bool test_bits(const Rank *rank) {
    int size = rank->launch->size, count = size * MOST_SENT, messages = 0;
    if (size == 1 || size % 2) return true;
    const Layout parts = {size / 2, 2, size > 2, false, MICRO_BATCHES, 1, 0, false, true};
    const Layout stages = {1, size, false, false, MICRO_BATCHES, 1, 0, false, true};
    Bits *few = bits_of(&parts, rank), *many = bits_of(&stages, rank);
    bool ok = true;
    for (int i = 0; i < count; i++) {
        if (many[i].end > 0 && elements_with_key(many, count, &many[i]) < 0) ok = false;
        if (few[i].end == 0) continue;
        int64_t elements = elements_with_key(few, count, &few[i]);
        if (elements <= 0 || elements != elements_with_key(many, count, &few[i])) ok = false;
        if (few[i].key.seed != SEED) ok = false;
        messages++;
    }
    // Forward and backward between two stages.
    if (messages != STEPS * MICRO_BATCHES * 2 * parts.tp) ok = false;
    free(few);
    free(many);
    if (rank->launch->rank == 0)
        printf("%s rounding bits of messages, P 2 and P %d\n", ok ? "ok" : "not ok", size);
    return ok;
}

// --- sums over tensor-parallel ranks -------------------------------------------------------------

// Sums three arrays with scratch memory for CHUNK elements per rank. In memory, the arrays are in
// reverse order. Elements are integers, so sums are exact.
static bool test_sums(const Rank *rank) {
    enum { CHUNK = 5, ELEMENTS = 22 };
    const int size = rank->launch->size, scratch = (size + 1) * CHUNK;
    const Layout layout = {size, 1, false, false, 1, 1, 0, false, false};
    Model m;
    float own[ELEMENTS];
    bool ok = true;
    open_model(&m, &layout, rank, 1);
    float *values = (float *)m.gpt.dwide + scratch;
    const TpSum sum[] = {{values + 21, 1}, {values + 14, 7}, {values, 14}};
    for (int i = 0; i < ELEMENTS; i++) own[i] = (float)(100 * m.mesh.tp.rank + i);
    copy_to_device(m.compute, values, own, sizeof own);
    tp_sum(&m.gpt.tp, sum, sizeof sum / sizeof *sum, m.gpt.dwide, (size_t)scratch * sizeof(float));
    float *sums = (float *)fetch(&m, values, sizeof own);
    for (int i = 0; i < ELEMENTS; i++) {
        float expected = (float)(100 * size * (size - 1) / 2 + size * i);
        if (sums[i] != expected) ok = complain(&m, "sum in chunks", "an element is", sums[i], expected);
    }
    free(sums);
    close_model(&m);
    if (rank->launch->rank == 0) printf("%s sums in chunks, T %d\n", ok ? "ok" : "not ok", size);
    return ok;
}

// If ranks share a GPU, all layouts use the same nodes, because NCCL reads its host id only once.
static void choose_device(Rank *rank) {
    const Launch *launch = rank->launch;
    Error err = {0};
    Mesh mesh;
    if (!mesh_build(&mesh, launch->rank, launch->size, launch->host_of_rank, rank->emulated, 1, 1, &err)) {
        fatal(NULL, err.code, "%s", err.what);
    }
    rank->own = devices_choose((Peers){launch->host, 0, NULL}, &mesh, rank->emulated > 0);
    if (rank->emulated) devices_emulate_nodes(&rank->own, &mesh, launch);
}

int main(int argc, char **argv) {
    static const int micro_batches[] = {1, 3, 6};
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    Rank rank = {.launch = &launch};
    if (argc == 3 && !strcmp(argv[1], "--emulate-nodes")) rank.emulated = atoi(argv[2]);
    choose_device(&rank);
    int failures = 0;
    for (int pp = 1; pp <= 4 && pp <= launch.size; pp *= 2) {
        for (int i = 0; i < 3; i++) {
            for (int kind = 0; kind < 8; kind++) {
                Layout layout = {launch.size / pp,
                                 pp,
                                 kind % 2 == 1,
                                 kind % 4 >= 2,
                                 micro_batches[i],
                                 1,
                                 kind < 4          ? 0
                                 : launch.size < 8 ? 4
                                                   : 8,
                                 i == 1,
                                 false};
                if (layout.tp == 1 && layout.sequence) continue;
                if (layout.groups && i != 1) continue;
                failures += !test_layout(&rank, &layout);
                if (pp == 1) continue;
                layout.chunks = 2;
                layout.micro_batches = (i + 1) * pp;
                failures += !test_layout(&rank, &layout);
            }
        }
    }
    failures += !test_bits(&rank);
    failures += !test_sums(&rank);
    failures += leaks_found();
    launch_finalize(&launch);
    return failures ? 1 : 0;
}
