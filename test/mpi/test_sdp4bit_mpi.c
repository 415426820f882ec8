// Compares distributed training steps bit for bit with the single-process simulator, for every
// shape of nodes x ranks, every preset, several chunk counts, ZeRO-1 and 2, and error feedback. One
// step has a NaN or infinity and must be skipped; one has an absurd learning rate and must be
// refused. Also runs with a GPT's gradients, including tensor and pipeline parallelism.
//
// Run under mpirun with 1 to 16 ranks. Exit code 0 or 1. build/test/gpu/test_sdp4bit_mpi is the
// same program for GPU ranks; the simulator runs on the host.
//
//   test_sdp4bit_mpi [--emulate-nodes PER_NODE]
//
// With the flag only this shape runs, and NCCL treats emulated nodes as hosts that may share GPUs.
// ranks: 1 2 3 4 8 16
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sdp4bit/qwd.h"
#include "sdp4bit/tlq_hs.h"
#include "test/mpi/model_gradients.h"
#include "test/mpi/simulator.h"
#include "test/leaks.h"
#include "test/wire_bytes.h"

// A tensor that model parallelism does not split.
#define MATRIX(NUMEL, UNIT) \
    { .numel = (NUMEL), .matrix = true, .unit = (UNIT) }
#define VECTOR(NUMEL, UNIT) \
    { .numel = (NUMEL), .matrix = false, .unit = (UNIT) }

enum { STEPS = 4, POISONED_STEP = 3, WILD_STEP = 5, FAULTED_STEP = 6 };
enum { MOST_TENSORS = 12, MOST_ALLOCATIONS = 48 };
static const uint32_t SEED = 1234;
static const float BETA1 = 0.9f, BETA2 = 0.95f, EPSILON = 1e-8f, WEIGHT_DECAY = 0.1f, SPIKE_FACTOR = 3.0f;

// --- presets -------------------------------------------------------------------------------------

// Sets of tensors. PARTS: uneven tensors that are split, or that another rank counts in the norm.
typedef enum Shape { RAGGED, PARTS, BUCKETS, ALIGNED, TAILS_ONLY } Shape;

// lowest, highest: bounds of the reduced gradient's relative L2 error. 1 % of the gradients are
// outliers, which are 20 times as large.
typedef struct Preset {
    const char *name;
    GradFormat grad;  // chunks is filled per run
    WeightFormat weight;
    Shape shape;
    double lowest, highest;
} Preset;

#define F CODEC_FP32
#define H CODEC_BF16
#define I8 CODEC_INT8
#define I4 CODEC_INT4
#define E4 CODEC_EDEN4
#define E3 CODEC_EDEN3
#define E2 CODEC_EDEN2
#define ROTATE TRANSFORM_ROTATION
#define SR ROUND_STOCHASTIC
#define RN ROUND_NEAREST
static const Preset presets[] = {
    {"baseline fp32", {F, F, 32, 32, F, false, SR, 0}, {H, 32, false, RN}, RAGGED, 0, 1e-6},
    {"baseline bf16", {H, H, 32, 32, H, false, SR, 0}, {H, 32, false, RN}, RAGGED, 1e-4, 5e-3},
    {"qWD only", {F, F, 32, 32, F, false, SR, 0}, {I4, 2048, true, RN}, RAGGED, 0, 1e-6},
    {"TLq 128/128, qWD stochastic",
     {I8, I4, 128, 128, H, false, SR, 0},
     {I4, 2048, true, SR},
     RAGGED,
     0.01,
     0.6},
    {"SDP4Bit: TLq-HS 128/128, qWD 2048",
     {I8, I4, 128, 128, H, true, SR, 0},
     {I4, 2048, true, RN},
     RAGGED,
     0.004,
     0.25},
    {"TLq-HS 32/96", {I8, I4, 32, 96, H, true, SR, 0}, {I4, 160, true, RN}, RAGGED, 0.004, 0.25},
    {"TLq-HS 128/512", {I8, I4, 128, 512, H, true, SR, 0}, {I8, 64, true, SR}, RAGGED, 0.004, 0.35},
    {"TLq-HS 512/128 nearest", {I8, I4, 512, 128, H, true, RN, 0}, {I4, 2048, true, RN}, RAGGED, 0.004, 0.2},
    {"TLq-HS 4096/2048", {I8, I4, 4096, 2048, H, true, SR, 0}, {I4, 4096, true, SR}, RAGGED, 0.004, 0.4},
    {"ULq, qW", {I4, I4, 128, 128, H, false, SR, 0}, {I4, 2048, false, SR}, RAGGED, 0.1, 0.8},
    {"int8/int8, qW 8 bits nearest",
     {I8, I8, 128, 64, H, false, SR, 0},
     {I8, 32, false, RN},
     RAGGED,
     0.005,
     0.06},
    {"int4/int8 with transform",
     {I4, I8, 64, 256, H, true, SR, 0},
     {I8, 2048, true, SR},
     RAGGED,
     0.005,
     0.25},
    {"bf16/int4", {H, I4, 32, 128, H, false, SR, 0}, {I4, 128, true, RN}, RAGGED, 1e-4, 0.6},
    {"int8/fp32 with transform", {I8, F, 128, 32, H, true, SR, 0}, {H, 32, false, RN}, RAGGED, 0, 0.03},
    {"several buckets", {I8, I4, 64, 32, H, true, SR, 0}, {I4, 32, true, SR}, BUCKETS, 0.004, 0.25},
    {"bytes equal the formulas", {I8, I4, 64, 64, H, true, SR, 0}, {I4, 256, true, RN}, ALIGNED, 0.004, 0.25},
    {"parts of tensors, SDP4Bit", {I8, I4, 128, 64, H, true, SR, 0}, {I4, 256, true, SR}, PARTS, 0.004, 0.25},
    {"EDEN 4, 128/256, qWD 2048",
     {I8, E4, 128, 256, H, ROTATE, SR, 0},
     {I4, 2048, true, RN},
     RAGGED,
     0.004,
     0.12},
    {"EDEN 3, 512/256", {I8, E3, 512, 256, H, ROTATE, SR, 0}, {I4, 64, true, RN}, RAGGED, 0.004, 0.22},
    {"EDEN 2, bf16/256", {H, E2, 32, 256, H, ROTATE, RN, 0}, {I8, 32, true, RN}, RAGGED, 1e-4, 0.42},
    {"EDEN 4, fp32/256, several buckets",
     {F, E4, 32, 256, H, ROTATE, SR, 0},
     {H, 32, false, RN},
     BUCKETS,
     0,
     0.12},
    {"EDEN 3, 32/256, parts of tensors",
     {I4, E3, 32, 256, H, ROTATE, SR, 0},
     {I4, 128, true, RN},
     PARTS,
     0.01,
     0.3},
    {"lossless weights", {F, F, 32, 32, F, false, SR, 0}, {H, 32, true, RN}, RAGGED, 0, 1e-6},
    {"lossless weights, several buckets",
     {I8, I4, 64, 32, H, true, SR, 0},
     {H, 32, true, RN},
     BUCKETS,
     0.004,
     0.25},
    {"lossless weights, 1-D tensors only",
     {F, F, 32, 32, F, false, SR, 0},
     {H, 32, true, RN},
     TAILS_ONLY,
     0,
     1e-6},
    {"1-D tensors only", {I8, I4, 128, 128, H, true, SR, 0}, {I4, 128, true, RN}, TAILS_ONLY, 1e-4, 6e-3},
};
enum { PRESETS = sizeof presets / sizeof *presets };

static int preset_tensors(Shape shape, int dp, int64_t alignment, LayoutTensor *t) {
    static const LayoutTensor ragged[] = {MATRIX(5003, 0), VECTOR(37, 0),  MATRIX(2048, 1),
                                          MATRIX(100, 1),  VECTOR(5, 1),   VECTOR(64, 1),
                                          MATRIX(1, 2),    MATRIX(777, 2), VECTOR(1, 2)};
    static const LayoutTensor tails[] = {VECTOR(100, 0), VECTOR(7, 0), VECTOR(900, 1)};
    if (shape == RAGGED || shape == PARTS) memcpy(t, ragged, sizeof ragged);
    for (int i = 0; shape == PARTS && i < (int)(sizeof ragged / sizeof *ragged); i++) {
        t[i].before = i % 3 * 1024;
        t[i].after = i % 2 * 77;
        t[i].uncounted = i % 4 == 1 || i % 4 == 2;
    }
    if (shape == TAILS_ONLY) memcpy(t, tails, sizeof tails);
    if (shape == RAGGED || shape == PARTS) return sizeof ragged / sizeof *ragged;
    if (shape == TAILS_ONLY) return sizeof tails / sizeof *tails;
    int64_t least = 16 * dp * alignment;  // elements of the smallest bucket
    int count = 0;
    for (int u = 0; u < 3; u++) {
        LayoutTensor matrix = MATRIX(shape == ALIGNED ? least : least + 13 * u + 1, u);
        LayoutTensor tail = VECTOR(19 + u, u);
        t[count++] = matrix;
        if (shape == BUCKETS) t[count++] = tail;
    }
    return count;
}

// --- inputs --------------------------------------------------------------------------------------

static double uniform(uint32_t bits) { return (bits + 0.5) * 0x1p-32; }

static float random_value(uint32_t stream, uint32_t a, uint32_t b, int64_t i, bool outliers) {
    Philox4 r = philox4x32_10(stream, 0, (uint32_t)i, (uint32_t)(i >> 32), a, b);
    double x = sqrt(-2 * log(uniform(r.v[0]))) * cos(6.283185307179586 * uniform(r.v[1]));
    return (float)(outliers && uniform(r.v[2]) < 0.01 ? 20 * x : x);
}

typedef enum Poison { POISON_NAN, POISON_INF, POISON_TAIL, POISON_LOSS, POISONS } Poison;

// Sets one gradient of one rank to NaN or infinity. Element and rank depend on the trial.
static void plant(const BucketLayout *layout, const LayoutTensor *tensors, float *grads, int rank,
                  uint32_t trial) {
    bool want_tail = trial % POISONS == POISON_TAIL;
    if (rank != (int)(trial % (uint32_t)layout->dp) || trial % POISONS == POISON_LOSS) return;
    int t = 0;
    for (int i = 0; i < layout->tensors; i++) {
        if (tensors[i].matrix != want_tail) t = i;
    }
    grads[layout->tensor_arena[t] + tensors[t].numel / 2] = trial % POISONS == POISON_INF ? INFINITY : NAN;
}

static float local_loss(const BucketLayout *layout, int rank, uint32_t step, uint32_t trial) {
    bool poisoned = step == POISONED_STEP && trial % POISONS == POISON_LOSS && rank == layout->dp - 1;
    return poisoned ? NAN : 3.0f + random_value(8, (uint32_t)rank, step, 0, false);
}

static void initial_weights(const BucketLayout *layout, const LayoutTensor *tensors, floatX *w) {
    memset(w, 0, (size_t)layout->arena_elements * sizeof *w);
    for (int t = 0; t < layout->tensors; t++) {
        for (int64_t i = 0; i < tensors[t].numel; i++) {
            w[layout->tensor_arena[t] + i] = floatX_from_float(0.02f *
                                                               random_value(9, 0, (uint32_t)t, i, false));
        }
    }
}

// Returns a clip limit: one that is exceeded, one that is not, or none.
static float clip_of(uint32_t trial) { return trial % 3 == 0 ? 0.05f : trial % 3 == 1 ? 1000.0f : 0.0f; }
// In WILD_STEP the learning rate moves some elements over the limit of master weights.
static float rate_if_applied(uint32_t step) { return step == WILD_STEP ? 1e38f : 1e-3f / (float)step; }
static bool step_applied(uint32_t step) { return step != POISONED_STEP && step != FAULTED_STEP; }
static float rate_if_skipped(uint32_t step) { return 2e-3f / (float)step; }

// --- one rank of the distributed program ---------------------------------------------------------

typedef struct Machine {
    int rank, size;
    Device *device;
    Lanes *lanes;
    Stream *stream;  // stream on which the step ends
} Machine;

typedef struct Trial {
    const Machine *machine;
    const Preset *preset;
    uint32_t number;
    int micro_batches;  // micro-batches of a step, each reduced separately
    bool sharded;       // reduces into a shard, like ZeRO-2; otherwise in place
    bool feedback;      // error feedback between nodes
    LayoutTensor tensors[MOST_TENSORS];
    int count;
    const Mesh *mesh;
    BucketLayout layout;
    TlqStep tlq;
    QwdStep qwd;
    WireChecks checks;                  // checksums of payloads, in every other trial
    void *allocated[MOST_ALLOCATIONS];  // until the end of the trial
    int allocations;
    // device memory
    Faults faults;
    Segment *segments;
    floatX *weights;                       // (arena)
    float *grads;                          // (arena) without a shard, reduced in this rank's ranges
    float *shard;                          // (shard_elements) sum over micro-batches, or NULL
    float *master, *exp_avg, *exp_avg_sq;  // (shard_elements)
    float *partials, *piece_sums;
    StepRecord *records;
    StepStatus *control;
    uint64_t *hash;
    float *loss;
    float *residual;  // (nodes, matrix_per_rank) residual of each bucket, or NULL
    uint8_t *gather[3], *gathered;
    QwdLossless lossless;  // plain is NULL without lossless weights
    void *flags;           // flags of comm_share, or NULL
    // host memory
    float *local;       // (arena) this rank's local gradients
    Simulator sim;      // complete on rank 0; other ranks have only the arrays for broadcasts
    float **all_grads;  // (dp, arena) local gradients of all ranks, on rank 0
    float *losses;      // (dp)
} Trial;

// Fills grads (arena, zero padding) with the local gradient of a rank and micro-batch. Tensors have
// different magnitudes.
static void local_gradient(const Trial *t, float *grads, int rank, uint32_t step, int micro_batch) {
    const BucketLayout *layout = &t->layout;
    const LayoutTensor *tensors = t->tensors;
    uint32_t draw = (step + 1000 * (uint32_t)micro_batch) * 100;
    memset(grads, 0, (size_t)layout->arena_elements * sizeof *grads);
    for (int k = 0; k < layout->tensors; k++) {
        float size = 0.001f * (float)(k + 1);
        for (int64_t i = 0; i < tensors[k].numel; i++) {
            float value = random_value(7, (uint32_t)rank, draw + (uint32_t)k, i, tensors[k].matrix);
            grads[layout->tensor_arena[k] + i] = size * value;
        }
    }
    if (step == POISONED_STEP && micro_batch == 0) plant(layout, tensors, grads, rank, t->number);
}

static void *allocate(Trial *t, size_t bytes) {
    Error err;
    void *p = device_alloc(t->machine->device, bytes ? bytes : 1, "the test", &err);
    if (!p) fatal(NULL, EXIT_ENVIRONMENT, "%s", err.what);
    if (t->allocations == MOST_ALLOCATIONS) fatal(NULL, EXIT_USAGE, "raise MOST_ALLOCATIONS");
    return t->allocated[t->allocations++] = p;
}

// Copies between host and device on t->stream.
static void upload(Trial *t, void *device, const void *host, size_t bytes) {
    copy_to_device(t->machine->stream, device, host, bytes);
    lanes_after(t->machine->lanes, t->machine->lanes->first, t->machine->stream);
}
static void *download(const Trial *t, const void *device, size_t bytes) {
    void *host = xmalloc(bytes + 1, "the test");
    copy_to_host(t->machine->stream, host, device, bytes);
    stream_synchronize(t->machine->stream);
    return host;
}

static void build_plan(Trial *t) {
    const Preset *preset = t->preset;
    Error err = {0};
    LayoutOptions options;
    options.nodes = t->mesh->rail.size;
    options.per_node = t->mesh->node.size;
    options.chunk_alignment = layout_alignment(preset->grad.intra_group, preset->grad.inter_group, 0);
    options.alignment = layout_alignment((int)options.chunk_alignment, preset->weight.group, 0);
    options.bucket_elements = 1;
    options.pieces = 1;
    t->count = preset_tensors(preset->shape, t->machine->size, options.alignment, t->tensors);
    if (!layout_build(&t->layout, t->tensors, t->count, &options, &err))
        fatal(NULL, EXIT_USAGE, "%s", err.what);
    t->checks.sealed = t->number % 2 == 1 && preset->shape != ALIGNED;
    if (t->checks.sealed) layout_seal(&t->layout);
}

// The allocator for comm_share.
static void *allocate_shared(Trial *t, size_t bytes) {
    return allocate(t, device_kind()->only_way ? bytes : (size_t)round_up64((int64_t)bytes, COMM_ALIGNMENT));
}

// Lossless weights: the lengths of all payloads are sent after the payloads of the first bucket.
static size_t message_bytes(const Trial *t, int b) {
    size_t bytes = qwd_buffer_bytes(&t->layout, b, &t->preset->weight, false, t->layout.dp);
    return (size_t)round_up64((int64_t)bytes, 256);
}
static size_t lengths_bytes(const Trial *t) {
    return (size_t)(t->layout.dp * t->layout.buckets) * sizeof(uint32_t);
}
static size_t gather_bytes(const Trial *t, int b) {
    return message_bytes(t, b) + (b == 0 ? lengths_bytes(t) : 0);
}

static void build_lossless(Trial *t) {
    QwdLossless *lossless = &t->lossless;
    int buckets = t->layout.buckets;
    size_t plain = 0, coded = 0;
    if (t->layout.dp == 1 || !format_is_lossless(&t->preset->weight)) return;
    lossless->coded_start = (int64_t *)xcalloc((size_t)buckets, sizeof(int64_t), "the test");
    lossless->slot = (int64_t *)xcalloc((size_t)buckets, sizeof(int64_t), "the test");
    lossless->landed = (uint32_t *)xcalloc(1, lengths_bytes(t), "the test");
    for (int b = 0; b < buckets; b++) {
        size_t bytes = (size_t)qwd_plain_message(&t->layout, b).bytes;
        lossless->coded_start[b] = (int64_t)coded;
        coded += (size_t)round_up64(layout_lossless(&t->layout.bucket[b]).most, 256);
        if (bytes > plain) plain = bytes;
    }
    lossless->plain = (uint8_t *)allocate(t, plain);
    lossless->coded = (uint8_t *)allocate(t, coded);
    lossless->bytes = (uint32_t *)(void *)(t->gather[0] + message_bytes(t, 0));
    t->qwd.lossless = lossless;
}

static void build_steps(Trial *t, int chunks) {
    t->checks.sums = (uint64_t *)allocate(t, WIRE_HOPS * (size_t)t->layout.dp * sizeof(uint64_t));
    t->checks.fault = (uint64_t *)allocate(t, sizeof(uint64_t));
    t->checks.faults = &t->faults;
    t->tlq.checks = t->qwd.checks = &t->checks;
    t->tlq.layout = t->qwd.layout = &t->layout;
    t->tlq.mesh = t->qwd.mesh = t->checks.mesh = t->mesh;
    t->tlq.grad_format = t->preset->grad;
    t->tlq.grad_format.chunks = chunks;
    t->tlq.error_feedback = t->feedback;
    size_t table = (size_t)t->layout.segments_total * sizeof(Segment);
    t->segments = (Segment *)allocate(t, table);
    upload(t, t->segments, t->layout.segments, table);
    t->tlq.segments = t->qwd.segments = t->segments;
    t->tlq.seed = t->qwd.seed = SEED;
    t->qwd.weight_format = t->preset->weight;
    t->qwd.beta1 = BETA1;
    t->qwd.beta2 = BETA2;
    t->qwd.epsilon = EPSILON;
    t->qwd.weight_decay = WEIGHT_DECAY;
    TlqWorkspace *w = &t->tlq.workspace;
    tlq_workspace(w, &t->layout, &t->tlq.grad_format);
    w->send1 = (uint8_t *)allocate_shared(t, w->send1_bytes);
    w->recv1 = (uint8_t *)allocate(t, w->recv1_bytes);
    w->send2 = (uint8_t *)allocate(t, w->send2_bytes);
    w->recv2 = (uint8_t *)allocate(t, w->recv2_bytes);
    for (int b = 0; b < t->layout.buckets; b++) {
        t->gather[b] = (uint8_t *)allocate_shared(t, gather_bytes(t, b));
    }
    build_lossless(t);
}

// On GPUs, with an odd number of chunks, ranks of a node copy payloads from each other's memory.
// Results must be bitwise identical to those with NCCL.
static bool share_messages(Trial *t, int chunks) {
    Error err = {0};
    CommPiece piece[] = {{t->tlq.workspace.send1, t->tlq.workspace.send1_bytes}, {0}, {0}, {0}};
    if (chunks % 2 == 0 || t->mesh->node.size == 1 || device_kind()->only_way) return true;
    for (int b = 0; b < t->layout.buckets; b++) {
        piece[1 + b] = (CommPiece){t->gather[b], gather_bytes(t, b)};
    }
    t->flags = allocate(t, COMM_FLAG_BYTES);
    bool ok = comm_share(&t->mesh->node, t->flags, piece, 1 + t->layout.buckets, &err);
    if (!ok && t->machine->rank == 0) printf("# payloads are not copied between ranks: %s\n", err.what);
    return ok;
}

// Returns the offset of bucket b in the residual, in elements.
static size_t residual_start(const Trial *t, int b) {
    int64_t elements = 0;
    for (int i = 0; i < b; i++) elements += t->mesh->rail.size * t->layout.bucket[i].matrix_per_rank;
    return (size_t)elements;
}

static void build_state(Trial *t) {
    size_t arena = (size_t)t->layout.arena_elements, shard = (size_t)t->layout.shard_elements;
    t->weights = (floatX *)allocate(t, arena * sizeof(floatX));
    t->grads = (float *)allocate(t, arena * sizeof(float));
    if (t->sharded) t->shard = (float *)allocate(t, shard * sizeof(float));
    t->local = (float *)xmalloc(arena * sizeof(float), "the test");
    t->master = (float *)allocate(t, shard * sizeof(float));
    t->exp_avg = (float *)allocate(t, shard * sizeof(float));
    t->exp_avg_sq = (float *)allocate(t, shard * sizeof(float));
    t->partials = (float *)allocate(t, (shard / 32 + 8) * sizeof(float));
    t->piece_sums = (float *)allocate(t, 2 * (size_t)t->layout.buckets * sizeof(float));
    t->records = (StepRecord *)allocate(t, (size_t)t->layout.dp * sizeof(StepRecord));
    t->control = (StepStatus *)allocate(t, sizeof(StepStatus));
    t->hash = (uint64_t *)allocate(t, sizeof(uint64_t));
    t->loss = (float *)allocate(t, sizeof(float));
    // Large enough for the payloads of all buckets with their aligned sections.
    t->gathered = (uint8_t *)allocate(t, arena * sizeof(float) + 4096 * (size_t)t->layout.dp);
    if (t->feedback) {
        t->residual = (float *)allocate(t, residual_start(t, t->layout.buckets) * sizeof(float));
        set_zero(t->machine->stream, t->residual, residual_start(t, t->layout.buckets) * sizeof(float));
    }
    StepStatus control = {0};
    control.beta1_power = control.beta2_power = 1.0;
    control.applied = 1;
    upload(t, t->control, &control, sizeof control);
    t->qwd.control = t->control;
    floatX *weights = (floatX *)xmalloc(arena * sizeof(floatX), "the test");
    initial_weights(&t->layout, t->tensors, weights);
    upload(t, t->weights, weights, arena * sizeof(floatX));
    free(weights);
    for (int b = 0; b < t->layout.buckets; b++) {
        const Bucket *bucket = &t->layout.bucket[b];
        const floatX *matrix = t->weights + bucket->arena_start + t->mesh->dp.rank * bucket->matrix_per_rank;
        const floatX *tail = t->weights + bucket->arena_start + bucket->matrix_elements +
                             t->mesh->dp.rank * bucket->tail_per_rank;
        kernel_widen(t->machine->stream, t->master + bucket->state_start, matrix, bucket->matrix_per_rank);
        kernel_widen(t->machine->stream, t->master + bucket->state_start + bucket->matrix_per_rank, tail,
                     bucket->tail_per_rank);
    }
}

static void build_simulator(Trial *t) {
    SimulatorOptions o = {&t->layout, t->tensors,   t->preset->grad, t->preset->weight, SEED,
                          BETA1,      BETA2,        EPSILON,         WEIGHT_DECAY,      clip_of(t->number),
                          true,       SPIKE_FACTOR, t->feedback};
    floatX *weights = (floatX *)download(t, t->weights, (size_t)t->layout.arena_elements * sizeof(floatX));
    simulator_create(&t->sim, &o, weights);
    free(weights);
    t->all_grads = (float **)xcalloc((size_t)t->layout.dp, sizeof *t->all_grads, "the test");
    t->losses = (float *)xcalloc((size_t)t->layout.dp, sizeof *t->losses, "the test");
    for (int r = 0; t->machine->rank == 0 && r < t->layout.dp; r++) {
        t->all_grads[r] = (float *)xmalloc((size_t)t->layout.arena_elements * sizeof(float), "the test");
    }
}

static void free_trial(Trial *t) {
    comm_unshare(&t->mesh->node);
    for (int i = 0; i < t->allocations; i++) device_free(t->machine->device, t->allocated[i]);
    for (int r = 0; r < t->layout.dp; r++) free(t->all_grads[r]);
    free(t->all_grads);
    free(t->losses);
    free(t->local);
    free(t->lossless.coded_start);
    free(t->lossless.slot);
    free(t->lossless.landed);
    simulator_free(&t->sim);
    layout_free(&t->layout);
}

// --- a step on both sides ------------------------------------------------------------------------

static void poison(Trial *t, void *device, size_t bytes) {
    void *host = memset(xmalloc(bytes + 1, "the test"), 0xEE, bytes);
    upload(t, device, host, bytes);
    free(host);
}

// Fills buffers with garbage, because bytes of an earlier step must not be used.
static void poison_buffers(Trial *t) {
    TlqWorkspace *w = &t->tlq.workspace;
    poison(t, w->send1, w->send1_bytes);
    poison(t, w->recv1, w->recv1_bytes);
    poison(t, w->send2, w->send2_bytes);
    poison(t, w->recv2, w->recv2_bytes);
    for (int b = 0; b < t->layout.buckets; b++) {
        poison(t, t->gather[b], gather_bytes(t, b));
    }
    poison(t, t->partials, ((size_t)t->layout.shard_elements / 32 + 8) * sizeof(float));
}

static GradShard own_grads(const Trial *t, int b) {
    const Bucket *bucket = &t->layout.bucket[b];
    float *own = t->shard + bucket->state_start;
    if (!t->sharded) return grad_shard_of(bucket, t->grads + bucket->arena_start, t->mesh->dp.rank);
    return (GradShard){own, own + bucket->matrix_per_rank};
}

// Reduces a micro-batch, buckets in two parts. The first one stores its sums, later ones add to it.
static void reduce(Trial *t, uint32_t step, int micro_batch) {
    Lanes *lanes = t->machine->lanes;
    local_gradient(t, t->local, t->machine->rank, step, micro_batch);
    upload(t, t->grads, t->local, (size_t)t->layout.arena_elements * sizeof(float));
    t->tlq.micro_batch = micro_batch;
    t->tlq.add = micro_batch > 0;
    for (int b = 0; b < t->layout.buckets; b++) {
        const Bucket *bucket = &t->layout.bucket[b];
        float *grads = t->grads + bucket->arena_start;
        float *tail_partials = t->partials + bucket->matrix_per_rank / 32;
        GradShard own = own_grads(t, b);
        if (t->feedback) t->tlq.residual.values = t->residual + residual_start(t, b);
        t->tlq.residual.control = micro_batch == 0 ? t->control : NULL;
        int chunks = layout_chunks(&t->layout, bucket, &t->tlq.grad_format), first = (chunks + 1) / 2;
        for (ChunkRange part = {first, chunks}; part.end > 0; part = (ChunkRange){0, part.first})
            tlq_reduce_bucket(&t->tlq, b, part, grads, own, t->partials, tail_partials, lanes);
        tlq_sum_squares(&t->tlq, b, own, t->partials, tail_partials, t->piece_sums + 2 * b, lanes);
    }
}

static void reduce_and_check(Trial *t, uint32_t step, float loss) {
    Stream *s = t->machine->stream;
    t->tlq.step = t->qwd.step = step;
    t->checks.step = step;
    upload(t, t->loss, &loss, sizeof loss);
    for (int k = 0; k < t->micro_batches; k++) reduce(t, step, k);
    kernel_step_record(s, t->records + t->mesh->dp.rank, t->piece_sums, 2 * t->layout.buckets, t->loss,
                       t->checks.fault);
    comm_all_gather(&t->mesh->world, t->records, sizeof(StepRecord), s);
    float if_applied = rate_if_applied(step), if_skipped = rate_if_skipped(step), clip = clip_of(t->number);
    StatusInputs j = {t->records, t->layout.dp, t->layout.dp, clip,         BETA1,        BETA2, if_applied,
                      if_skipped, true,         false,        SPIKE_FACTOR, SPIKE_FACTOR, 1,     1};
    kernel_step_status(s, t->control, &j);
}

static void gather_weights(Trial *t, int b) {
    GatherBuffer buffer = {t->gather[b], t->mesh->rail.size, t->mesh->node.size, NULL};
    qwd_gather_bucket(&t->qwd, b, &buffer, t->machine->lanes);
    qwd_apply_bucket(&t->qwd, b, t->weights + t->layout.bucket[b].arena_start, &buffer, t->machine->lanes);
}

static void update_weights(Trial *t) {
    for (int b = 0; b < t->layout.buckets; b++) {
        const Bucket *bucket = &t->layout.bucket[b];
        WeightShard own = weight_shard_of(bucket, t->weights + bucket->arena_start, t->mesh->dp.rank);
        BucketState state = {.grads = own_grads(t, b),
                             .weights = own,
                             .master = t->master + bucket->state_start,
                             .exp_avg = t->exp_avg + bucket->state_start,
                             .exp_avg_sq = t->exp_avg_sq + bucket->state_start,
                             .replica = own.matrix};
        GatherBuffer buffer = {t->gather[b], t->mesh->rail.size, t->mesh->node.size, NULL};
        qwd_update_bucket(&t->qwd, b, &state, &buffer, t->machine->lanes);
        if (!t->qwd.lossless) gather_weights(t, b);
    }
    qwd_agree_lengths(&t->qwd, t->machine->lanes);
    for (int b = 0; t->qwd.lossless && b < t->layout.buckets; b++) gather_weights(t, b);
    lanes_synchronize(t->machine->lanes);
}

static void simulate_step(Trial *t, uint32_t step) {
    Simulator *sim = &t->sim;
    int dp = t->layout.dp;
    SimulatedWorld world = {sim->records, dp, dp};
    for (int k = 0; k < t->micro_batches; k++) {
        for (int r = 0; r < dp; r++) local_gradient(t, t->all_grads[r], r, step, k);
        if (k == 0) simulator_reduce(sim, t->all_grads, step);
        else simulator_add(sim, t->all_grads, NULL, step, k);
    }
    for (int r = 0; r < dp; r++) t->losses[r] = local_loss(&t->layout, r, step, t->number);
    simulator_records(sim, t->losses);
    simulator_update(sim, &world, step, rate_if_applied(step), rate_if_skipped(step));
}

static void simulate(Trial *t, uint32_t step) {
    Simulator *sim = &t->sim;
    int arena = (int)t->layout.arena_elements;
    if (t->machine->rank == 0) simulate_step(t, step);
    MPI_Bcast(sim->reduced, arena, MPI_FLOAT, 0, MPI_COMM_WORLD);
    MPI_Bcast(sim->master, arena, MPI_FLOAT, 0, MPI_COMM_WORLD);
    MPI_Bcast(sim->exp_avg, arena, MPI_FLOAT, 0, MPI_COMM_WORLD);
    MPI_Bcast(sim->exp_avg_sq, arena, MPI_FLOAT, 0, MPI_COMM_WORLD);
    MPI_Bcast(sim->replica, arena * (int)sizeof(floatX), MPI_BYTE, 0, MPI_COMM_WORLD);
    if (t->feedback) MPI_Bcast(sim->residual, t->mesh->rail.size * arena, MPI_FLOAT, 0, MPI_COMM_WORLD);
    MPI_Bcast(sim->records, t->layout.dp * (int)sizeof(StepRecord), MPI_BYTE, 0, MPI_COMM_WORLD);
    MPI_Bcast(&sim->control, sizeof sim->control, MPI_BYTE, 0, MPI_COMM_WORLD);
}

// --- comparisons ---------------------------------------------------------------------------------

static bool complain(const Trial *t, uint32_t step, const char *what, int64_t at) {
    fprintf(stderr, "rank %d, %d x %d, %s%s, chunks %d, step %u: %s differs at %lld\n", t->machine->rank,
            t->mesh->rail.size, t->mesh->node.size, t->preset->name, t->feedback ? ", error feedback" : "",
            t->tlq.grad_format.chunks, step, what, (long long)at);
    return false;
}

// Compares bit for bit, except that all NaNs are equal. (They occur only in a skipped step.)
static bool same_floats(const Trial *t, uint32_t step, const char *what, const float *a, const float *b,
                        int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        bool nans = step == POISONED_STEP && isnan(a[i]) && isnan(b[i]);
        if (f32_bits(a[i]) != f32_bits(b[i]) && !nans) return complain(t, step, what, i);
    }
    return true;
}

// The shard must contain the reduced gradient and zero padding.
static bool same_shard_of_gradients(const Trial *t, uint32_t step) {
    float *shard = (float *)download(t, t->shard, (size_t)t->layout.shard_elements * sizeof *shard);
    int64_t rank = t->mesh->dp.rank;
    bool ok = true;
    for (int b = 0; ok && b < t->layout.buckets; b++) {
        const Bucket *bucket = &t->layout.bucket[b];
        GradShard expected = grad_shard_of(bucket, t->sim.reduced + bucket->arena_start, rank);
        const float *own = shard + bucket->state_start;
        ok = same_floats(t, step, "gradient", own, expected.matrix, bucket->matrix_per_rank) &&
             same_floats(t, step, "gradient", own + bucket->matrix_per_rank, expected.tail,
                         bucket->tail_per_rank);
    }
    free(shard);
    return ok;
}

// Without a shard, this rank's ranges of the arena must contain the reduced gradient and zero
// padding. The rest of the arena must be unchanged.
static bool same_gradients(const Trial *t, uint32_t step) {
    int64_t rank = t->mesh->dp.rank, arena = t->layout.arena_elements;
    float *expected = (float *)xmalloc((size_t)arena * sizeof *expected, "the test");
    memcpy(expected, t->local, (size_t)arena * sizeof *expected);
    for (int b = 0; !t->sharded && b < t->layout.buckets; b++) {
        const Bucket *bucket = &t->layout.bucket[b];
        int64_t matrix = bucket->arena_start + rank * bucket->matrix_per_rank;
        int64_t tail = bucket->arena_start + bucket->matrix_elements + rank * bucket->tail_per_rank;
        memcpy(expected + matrix, t->sim.reduced + matrix,
               (size_t)bucket->matrix_per_rank * sizeof *expected);
        memcpy(expected + tail, t->sim.reduced + tail, (size_t)bucket->tail_per_rank * sizeof *expected);
    }
    float *grads = (float *)download(t, t->grads, (size_t)arena * sizeof *grads);
    bool ok = same_floats(t, step, "gradient", grads, expected, arena);
    free(grads);
    free(expected);
    return ok && (!t->sharded || same_shard_of_gradients(t, step));
}

// The residual must contain the node's quantization errors and zero padding.
static bool same_residual(const Trial *t, uint32_t step) {
    int nodes = t->mesh->rail.size, per_node = t->mesh->node.size;
    if (!t->feedback) return true;
    const float *whole = t->sim.residual + t->mesh->rail.rank * t->layout.arena_elements;
    size_t bytes = residual_start(t, t->layout.buckets) * sizeof(float);
    float *residual = (float *)download(t, t->residual, bytes);
    bool ok = true;
    for (int i = 0; ok && i < t->layout.buckets * nodes; i++) {
        const Bucket *bucket = &t->layout.bucket[i / nodes];
        int64_t n = bucket->matrix_per_rank, owner = i % nodes * per_node + t->mesh->node.rank;
        ok = same_floats(t, step, "residual", residual + residual_start(t, i / nodes) + i % nodes * n,
                         whole + bucket->arena_start + owner * n, n);
    }
    free(residual);
    return ok;
}

static bool same_shards(const Trial *t, uint32_t step, const char *what, const float *device,
                        const float *whole) {
    int64_t rank = t->mesh->dp.rank;
    float *shard = (float *)download(t, device, (size_t)t->layout.shard_elements * sizeof *shard);
    bool ok = true;
    for (int b = 0; ok && b < t->layout.buckets; b++) {
        const Bucket *bucket = &t->layout.bucket[b];
        const float *matrix = whole + bucket->arena_start + rank * bucket->matrix_per_rank;
        const float *tails = whole + bucket->arena_start + bucket->matrix_elements;
        const float *tail = tails + rank * bucket->tail_per_rank, *own = shard + bucket->state_start;
        size_t matrix_bytes = (size_t)bucket->matrix_per_rank * sizeof *shard;
        size_t tail_bytes = (size_t)bucket->tail_per_rank * sizeof *shard;
        ok = !memcmp(own, matrix, matrix_bytes) && !memcmp(own + bucket->matrix_per_rank, tail, tail_bytes);
        if (!ok) complain(t, step, what, b);
    }
    free(shard);
    return ok;
}

static bool same_records(const Trial *t, uint32_t step, const StepRecord *records) {
    for (int r = 0; r < t->layout.dp; r++) {
        const StepRecord *a = &records[r], *b = &t->sim.records[r];
        bool squares = a->sum_squares == b->sum_squares || (isnan(a->sum_squares) && isnan(b->sum_squares));
        bool loss = a->loss == b->loss || (isnan(a->loss) && isnan(b->loss));
        if (!squares || !loss) return complain(t, step, "record", r);
        if (a->fault != b->fault) return complain(t, step, "fault", (int64_t)a->fault);
    }
    return true;
}

static bool same_control(const Trial *t, uint32_t step, StepStatus a) {
    StepStatus b = t->sim.control;
    if (a.applied != step_applied(step)) return complain(t, step, "step status", a.applied);
    if (!a.fault != (step != FAULTED_STEP))
        return complain(t, step, "fault of the step status", (int64_t)a.fault);
    if (step == POISONED_STEP) {  // norm, loss and clip coefficient of a skipped step may be NaN
        a.grad_norm = b.grad_norm = a.loss = b.loss = a.clip_coefficient = b.clip_coefficient = 0;
    }
    return memcmp(&a, &b, sizeof a) == 0 || complain(t, step, "control", 0);
}

static bool same_status(const Trial *t, uint32_t step) {
    StepRecord *records = (StepRecord *)download(t, t->records, (size_t)t->layout.dp * sizeof *records);
    StepStatus *control = (StepStatus *)download(t, t->control, sizeof *control);
    bool ok = same_records(t, step, records) && same_control(t, step, *control);
    free(records);
    free(control);
    return ok;
}

static uint64_t replica_hash(const Trial *t) {
    int64_t arena = t->layout.arena_elements;
    set_zero(t->machine->stream, t->hash, sizeof(uint64_t));
    // The hash is computed in two parts and must not depend on this split.
    kernel_replica_hash(t->machine->stream, t->hash, t->weights, 0, arena / 3);
    kernel_replica_hash(t->machine->stream, t->hash, t->weights + arena / 3, arena / 3, arena - arena / 3);
    uint64_t *found = (uint64_t *)download(t, t->hash, sizeof *found), hash = *found;
    free(found);
    return hash;
}

static bool same_replicas(const Trial *t, uint32_t step) {
    size_t bytes = (size_t)t->layout.arena_elements * sizeof(floatX);
    floatX *weights = (floatX *)download(t, t->weights, bytes);
    bool same = memcmp(weights, t->sim.replica, bytes) == 0;
    free(weights);
    uint64_t hash = replica_hash(t), lowest = hash, highest = hash;
    if (!same) complain(t, step, "replica", 0);
    if (hash != simulator_hash(&t->sim)) same = complain(t, step, "replica hash", 0);
    MPI_Allreduce(MPI_IN_PLACE, &lowest, 1, MPI_UINT64_T, MPI_MIN, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &highest, 1, MPI_UINT64_T, MPI_MAX, MPI_COMM_WORLD);
    return (lowest == highest || complain(t, step, "another rank's replica hash", 0)) && same;
}

// The payloads of a skipped step must have zero codes and scales, for any gradients.
static bool message_is_zero(const Trial *t, uint32_t step, const uint8_t *message, const MessageLayout *m) {
    for (int64_t i = 0; i < m->codes_stride; i++) {
        if (message[i]) return complain(t, step, "a skipped step's codes", i);
    }
    for (int64_t i = 0; i < m->scales_stride; i++) {
        if (message[m->scales + i]) return complain(t, step, "a skipped step's scales", i);
    }
    return true;
}

static bool skipped_messages_are_zero(const Trial *t, uint32_t step) {
    if (step_applied(step) || t->layout.dp == 1 || !codec_info(t->preset->weight.codec).levels) return true;
    bool ok = true;
    for (int b = 0; ok && b < t->layout.buckets; b++) {
        MessageLayout m = layout_weight_message(&t->layout.bucket[b], &t->preset->weight);
        uint8_t *messages = (uint8_t *)download(t, t->gather[b], (size_t)(t->layout.dp * m.bytes));
        for (int slot = 0; ok && slot < t->layout.dp; slot++) {
            ok = message_is_zero(t, step, messages + slot * m.bytes, &m);
        }
        free(messages);
    }
    return ok;
}

typedef struct Sent {
    uint64_t node, rail, world;
} Sent;
static Sent sent_by(const Mesh *mesh) {
    return (Sent){comm_sent(&mesh->node), comm_sent(&mesh->rail), comm_sent(&mesh->world)};
}

// Lossless weights: counts the actual lengths of payloads, and the bytes of the lengths themselves.
static void count_lossless(const Trial *t, WireBytes *sum) {
    int64_t nodes = t->layout.options.nodes, others = t->layout.options.per_node - 1;
    int64_t bytes = t->layout.buckets * (int64_t)sizeof(uint32_t);
    for (int b = 0; b < t->layout.buckets; b++) {
        bytes += layout_lossless_message(&t->layout.bucket[b], t->lossless.slot[b]).bytes;
    }
    sum->weight_inter = (nodes - 1) * bytes;
    sum->weight_intra = others * nodes * bytes;
}

// A step must send exactly the planned number of bytes.
static bool same_traffic(const Trial *t, uint32_t step, const Sent *before) {
    Sent after = sent_by(t->mesh);
    WireBytes layout = layout_wire_bytes(&t->layout, &t->tlq.grad_format, &t->preset->weight);
    uint64_t records = (uint64_t)(t->layout.dp - 1) * sizeof(StepRecord);
    if (t->qwd.lossless) count_lossless(t, &layout);
    if (t->layout.dp == 1) memset(&layout, 0, sizeof layout);
    layout.grad_intra *= t->micro_batches;
    layout.grad_inter *= t->micro_batches;
    if (after.node - before->node != (uint64_t)(layout.grad_intra + layout.weight_intra)) {
        return complain(t, step, "number of bytes inside the node", 0);
    }
    if (after.rail - before->rail != (uint64_t)(layout.grad_inter + layout.weight_inter)) {
        return complain(t, step, "number of bytes between nodes", 0);
    }
    if (after.world - before->world != records) return complain(t, step, "number of bytes of records", 0);
    if (t->preset->shape != ALIGNED || t->tlq.grad_format.chunks != 1) return true;
    WireFormula f = layout_wire_formula(&t->layout, &t->tlq.grad_format, &t->preset->weight);
    bool same = (double)layout.grad_intra == f.grad_intra && (double)layout.grad_inter == f.grad_inter &&
                (double)layout.weight_intra == f.weight_intra &&
                (double)layout.weight_inter == f.weight_inter;
    return same || complain(t, step, "byte count of layout_wire_formula", 0);
}

// On rank 0, checks the relative L2 error of the reduced gradient against the mean in double.
static bool error_in_bounds(const Trial *t, uint32_t step) {
    // Not applicable if gradients of other micro-batches or residuals of earlier steps are
    // included.
    bool others = t->micro_batches > 1 || t->feedback;
    if (t->machine->rank != 0 || t->layout.dp == 1 || step == POISONED_STEP || others) return true;
    double error = 0, power = 0;
    for (int64_t i = 0; i < t->layout.arena_elements; i++) {
        double mean = 0;
        for (int r = 0; r < t->layout.dp; r++) mean += (double)t->all_grads[r][i] / t->layout.dp;
        error += (t->sim.reduced[i] - mean) * (t->sim.reduced[i] - mean);
        power += mean * mean;
    }
    double relative = sqrt(error / power);
    if (relative >= t->preset->lowest && relative <= t->preset->highest) return true;
    fprintf(stderr, "%s: relative error %g\n", t->preset->name, relative);
    return complain(t, step, "the error bound", 0);
}

// --- trials --------------------------------------------------------------------------------------

// Under no_shard every rank gathers the reduced gradients of all shards.
static bool same_gathered_gradients(Trial *t, uint32_t step) {
    bool ok = true;
    if (t->sharded || t->layout.dp == 1) return true;
    for (int b = 0; b < t->layout.buckets; b++) {
        const Bucket *bucket = &t->layout.bucket[b];
        float *full = t->grads + bucket->arena_start;
        tlq_gather_bucket(&t->tlq, b, full, t->gathered, t->machine->lanes);
        float *grads = (float *)download(t, full, (size_t)bucket_elements(bucket) * sizeof *grads);
        ok = ok && same_floats(t, step, "gathered gradient", grads, t->sim.reduced + bucket->arena_start,
                               bucket_elements(bucket));
        free(grads);
    }
    return ok;
}

// Returns true if `ok` is true on all ranks. Ranks that disagreed would wait for each other.
static bool on_all(bool ok) {
    int value = ok;
    MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return value != 0;
}

static bool run_step(Trial *t, uint32_t step) {
    Sent before = sent_by(t->mesh);
    poison_buffers(t);
    reduce_and_check(t, step, local_loss(&t->layout, t->machine->rank, step, t->number));
    simulate(t, step);
    // Compares gradients before AdamW and everything else after it.
    bool ok = same_gradients(t, step) && same_residual(t, step) && same_status(t, step) &&
              error_in_bounds(t, step);
    update_weights(t);
    ok = ok && same_shards(t, step, "master", t->master, t->sim.master) &&
         same_shards(t, step, "first moment", t->exp_avg, t->sim.exp_avg) &&
         same_shards(t, step, "second moment", t->exp_avg_sq, t->sim.exp_avg_sq) &&
         same_traffic(t, step, &before) && skipped_messages_are_zero(t, step);
    ok = same_gathered_gradients(t, step) && ok;
    return on_all(ok) && on_all(same_replicas(t, step));
}

static bool run_trial(const Machine *machine, const Mesh *mesh, int preset, int chunks, bool feedback) {
    Trial *t = (Trial *)xcalloc(1, sizeof *t, "a trial");
    t->machine = machine;
    t->mesh = mesh;
    t->preset = &presets[preset];
    t->feedback = feedback;
    t->number = (uint32_t)(preset + 7 * chunks + mesh->node.size);
    // With a single rank the gradients are already reduced.
    t->sharded = chunks > 1 && mesh->dp.size > 1;
    t->micro_batches = t->sharded && chunks == 3 ? 3 : 1;
    build_plan(t);
    build_steps(t, chunks);
    build_state(t);
    bool ok = share_messages(t, chunks);
    build_simulator(t);
    ok = on_all(ok && (t->preset->shape != BUCKETS || t->layout.buckets == 3));
    // The refused update is tested with one chunk only, because AdamW does not depend on chunks.
    uint32_t steps = chunks == 1 ? FAULTED_STEP : STEPS;
    for (uint32_t step = 1; ok && step <= steps; step++) ok = run_step(t, step);
    free_trial(t);
    free(t);
    return ok;
}

// A layout of the ranks. nodes: number of nodes in a data-parallel group.
typedef struct Split {
    int nodes, tp, pp;
    bool sequence;
} Split;

static int per_node_of(const Machine *machine, const Split *split) {
    return machine->size / split->pp / split->nodes;
}

typedef struct Ranks {
    Mesh mesh;
    Lanes lanes;
    int *hosts;
    ModelRank rank;
} Ranks;

// emulate: see devices.h.
static void open_ranks(Ranks *r, Machine *machine, const Split *split, bool emulate) {
    Error err = {0};
    Peers world = {MPI_COMM_WORLD, 0, NULL};
    r->hosts = (int *)xcalloc((size_t)machine->size, sizeof *r->hosts, "the hosts");
    if (!mesh_build(&r->mesh, machine->rank, machine->size, r->hosts, per_node_of(machine, split), split->tp,
                    split->pp, &err)) {
        fatal(NULL, EXIT_USAGE, "%s", err.what);
    }
    OwnDevice own = devices_choose(world, &r->mesh, emulate);
    Launch launch = {machine->rank, machine->size, r->hosts, MPI_COMM_WORLD, MPI_COMM_WORLD, "test", false};
    if (emulate) devices_emulate_nodes(&own, &r->mesh, &launch);
    machine->device = device_open(own.index, NULL, &err);
    if (!machine->device) fatal(NULL, err.code, "%s", err.what);
    lanes_open(&r->lanes, machine->device, machine->size > 1);
    machine->lanes = &r->lanes;
    machine->stream = r->lanes.last;
    if (!mesh_open(&r->mesh, world, &err)) fatal(NULL, EXIT_COMMUNICATION, "%s", err.what);
    comm_open(&r->mesh, machine->device, 0);
    Pipeline pipeline = pipeline_open(&r->mesh, 1, machine->device);
    void *trial = device_alloc(machine->device, (size_t)machine->size * COMM_TRIAL_BYTES, "the test", &err);
    comm_connect(&r->mesh, trial);
    device_free(machine->device, trial);
    r->rank = (ModelRank){machine->device, &r->lanes, &r->mesh, own, pipeline, split->sequence};
}

static void close_ranks(Ranks *r, Machine *machine) {
    comm_close(&r->mesh);
    mesh_close(&r->mesh);
    lanes_close(&r->lanes);
    device_close(machine->device);
    free(r->hosts);
}

// Runs every preset on this many nodes. Returns the number of failures.
static int run_shape(Machine *machine, int nodes, bool emulate) {
    Ranks ranks;
    Split split = {nodes, 1, 1, false};
    int failures = 0;
    // 50 is more than a bucket's alignment units, so some chunks are empty; 0: chosen by the bucket
    // layout.
    static const int chunk_counts[] = {1, 3, 50, 0};
    open_ranks(&ranks, machine, &split, emulate);
    for (int preset = 0; preset < PRESETS; preset++) {
        bool ok = true;
        for (size_t c = 0; ok && c < sizeof chunk_counts / sizeof chunk_counts[0]; c++) {
            ok = run_trial(machine, &ranks.mesh, preset, chunk_counts[c], false);
        }
        // Error feedback with one and three chunks, which have one and three micro-batches.
        if (ok && nodes > 1 && codec_grouped(presets[preset].grad.inter_codec))
            ok = run_trial(machine, &ranks.mesh, preset, 1 + preset % 2 * 2, true);
        failures += !ok;
        if (machine->rank == 0) {
            printf("%s %d x %d ranks: %s\n", ok ? "ok" : "not ok", nodes, per_node_of(machine, &split),
                   presets[preset].name);
        }
    }
    failures += model_gradients_failures(&ranks.rank);
    close_ranks(&ranks, machine);
    return failures;
}

// Runs all layouts with tensor or pipeline parallelism whose data-parallel groups have several
// ranks. per_node: only layouts with this many ranks per node; 0: all.
static int run_splits(Machine *machine, int per_node) {
    static const Split splits[] = {{1, 2, 1, false}, {1, 2, 1, true},  {2, 2, 1, false}, {2, 2, 1, true},
                                   {1, 1, 2, false}, {2, 1, 2, false}, {2, 2, 2, true}};
    int failures = 0;
    for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
        const Split *split = &splits[i];
        Ranks ranks;
        int model = split->tp * split->pp;
        if ((machine->size != 4 && machine->size != 8) || machine->size / model < 2) continue;
        if (per_node && per_node_of(machine, split) != per_node) continue;
        open_ranks(&ranks, machine, split, per_node > 0);
        failures += model_gradients_failures(&ranks.rank);
        close_ranks(&ranks, machine);
    }
    return failures;
}

int main(int argc, char **argv) {
    leaks_start_mpi(&argc, &argv);
    Machine machine;
    int emulated = argc == 3 && !strcmp(argv[1], "--emulate-nodes") ? atoi(argv[2]) : 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &machine.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &machine.size);
    int failures = emulated ? run_shape(&machine, machine.size / emulated, true) : 0;
    for (int nodes = machine.size; !emulated && nodes > 0; nodes--) {
        if (machine.size % nodes == 0) failures += run_shape(&machine, nodes, false);
    }
    failures += run_splits(&machine, emulated);
    failures += leaks_found();
    MPI_Finalize();
    return failures ? 1 : 0;
}
