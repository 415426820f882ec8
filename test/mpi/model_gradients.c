// See model_gradients.h. In each step every rank runs forward and backward on its own tokens and
// sends its local gradients to the simulator of its data-parallel group. Zero and the simulator
// then both compute reductions, step status, AdamW and gathers, and the results are compared.
// Backends may compute different local gradients, because the simulator does not compute any. Each
// step uses the weights of the previous one, so an error also shows in later steps.
//
// Odd steps reduce after the backward pass and compare the reduced gradients before AdamW. Even
// steps run as in the trainer: a second backward pass over the same tokens reports completed layers
// to Zero, and there is no synchronization until the weights are gathered.
//
// Under optim_grads a step has several micro-batches, and gradient memory is reused by the next
// layers. So a second model with the same weights computes the local gradients for the simulator.
// It keeps all gradients and reduces none.
#include "test/mpi/model_gradients.h"

#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/ranks/peers.h"
#include "llmc/state/zero_parts.h"
#include "test/mpi/orthogonalize.h"
#include "test/mpi/simulator.h"
#include "llmc/model/gpt.h"

enum { STEPS = 3 };
static const float WEIGHT_DECAY = 0.1f;

// --- presets -------------------------------------------------------------------------------------

enum { PRESET_FLAGS = 14 };  // maximum

// A preset as flags (for Zero) and as formats (for the simulator), which must be equivalent.
typedef struct ModelPreset {
    const char *name;
    const char *flags[PRESET_FLAGS + 1];  // NULL at the end
    GradFormat grad;
    WeightFormat weight;
    int micro_batches;  // micro-batches of a step under optim_grads; 0: optim with one micro-batch
} ModelPreset;

#define F CODEC_FP32
#define H CODEC_BF16
#define I8 CODEC_INT8
#define I4 CODEC_INT4
#define SR ROUND_STOCHASTIC
#define RN ROUND_NEAREST
static const ModelPreset presets[] = {
    {"baseline fp32",
     {"--clip-grad", "1000"},
     {F, F, 32, 32, F, TRANSFORM_NONE, SR, 0},
     {FLOATX_CODEC, 32, false, RN},
     0},
    {"SDP4Bit",
     {"--quantized-gradients", "--gq-group-size-intra", "128", "--hadamard-transform", "--quantized-weights",
      "--wq-rounding", "stochastic", "--gradient-alltoall-pipeline", "3"},
     {I8, I4, 128, 128, H, TRANSFORM_HADAMARD, SR, 3},
     {I4, 2048, true, SR},
     0},
    {"ULq, checksums",
     {"--quantized-gradients", "--gq-group-size-intra", "128", "--gradient-quantization-bits-intra", "4",
      "--verify-wire"},
     {I4, I4, 128, 128, H, TRANSFORM_NONE, SR, 0},
     {FLOATX_CODEC, 32, false, RN},
     0},
    {"SDP4Bit, optim_grads, 3 micro-batches",
     {"--quantized-gradients", "--gq-group-size-intra", "128", "--hadamard-transform", "--quantized-weights",
      "--wq-group-size", "128", "--gradient-alltoall-pipeline", "2", "--verify-wire"},
     {I8, I4, 128, 128, H, TRANSFORM_HADAMARD, SR, 2},
     {I4, 128, true, RN},
     3},
    {"EDEN 3",
     {"--quantized-gradients", "--gq-group-size-intra", "64", "--gradient-quantization-method", "eden",
      "--gradient-quantization-bits-inter", "3", "--quantized-weights"},
     {I8, CODEC_EDEN3, 64, 256, H, TRANSFORM_ROTATION, SR, 0},
     {I4, 2048, true, RN},
     0},
    {"EDEN 2 with error feedback, optim_grads, 3 micro-batches",
     {"--quantized-gradients", "--gq-group-size-intra", "128", "--gradient-quantization-method", "eden",
      "--gradient-quantization-bits-inter", "2", "--error-feedback", "--verify-wire",
      "--gradient-alltoall-pipeline", "2"},
     {I8, CODEC_EDEN2, 128, 256, H, TRANSFORM_ROTATION, SR, 2},
     {FLOATX_CODEC, 32, false, RN},
     3},
    {"baseline bf16, optim_grads, 1 micro-batch",
     {"--grad-reduce-in-bf16"},
     {H, H, 32, 32, H, TRANSFORM_NONE, SR, 0},
     {FLOATX_CODEC, 32, false, RN},
     1},
    {"SDP4Bit, Muon",
     {"--quantized-gradients", "--gq-group-size-intra", "128", "--hadamard-transform", "--quantized-weights",
      "--wq-rounding", "stochastic", "--optimizer", "muon", "--muon-extra-scale-factor", "0.25",
      "--muon-nesterov", "--muon-tp-mode", "blockwise"},
     {I8, I4, 128, 128, H, TRANSFORM_HADAMARD, SR, 0},
     {I4, 2048, true, SR},
     0},
    {"EDEN 2 with error feedback, Muon",
     {"--quantized-gradients", "--gq-group-size-intra", "128", "--gradient-quantization-method", "eden",
      "--gradient-quantization-bits-inter", "2", "--error-feedback", "--quantized-weights", "--optimizer",
      "muon", "--muon-tp-mode", "blockwise"},
     {I8, CODEC_EDEN2, 128, 256, H, TRANSFORM_ROTATION, SR, 0},
     {I4, 2048, true, RN},
     0},
    {"baseline fp32, Muon, optim_grads, 2 micro-batches",
     {"--optimizer", "muon", "--muon-tp-mode", "blockwise"},
     {F, F, 32, 32, F, TRANSFORM_NONE, SR, 0},
     {FLOATX_CODEC, 32, false, RN},
     2},
};
enum { PRESETS = sizeof presets / sizeof *presets };

// Small buckets: one per layer if the group sizes allow it, so reductions overlap with backward.
static const char *const model_flags[] = {"test",
                                          "--bf16",
                                          "--use-distributed-optimizer",
                                          "--mock-data",
                                          "--tokenizer-type",
                                          "NullTokenizer",
                                          "--make-vocab-size-divisible-by",
                                          "8",
                                          "--num-layers",
                                          "2",
                                          "--kv-channels",
                                          "64",
                                          "--seq-length",
                                          "64",
                                          "--max-position-embeddings",
                                          "64",
                                          "--attention-dropout",
                                          "0",
                                          "--hidden-dropout",
                                          "0",
                                          "--micro-batch-size",
                                          "2",
                                          "--lr",
                                          "1e-3",
                                          "--train-iters",
                                          "10",
                                          "--clip-grad",
                                          "0.2",
                                          "--ddp-bucket-size",
                                          "1"};
enum {
    MODEL_FLAGS = sizeof model_flags / sizeof *model_flags,
    SIZE_FLAGS = 6,
    LAYOUT_FLAGS = 5,
    SHARD_FLAGS = 4
};
// Above this number of CPU ranks the model has a quarter of the parameters, because the ranks share
// few cores and one process simulates all of them.
enum { FEW_RANKS = 4 };
static const char *const few_ranks_size[SIZE_FLAGS] = {"--hidden-size", "128", "--num-attention-heads", "2",
                                                       "--vocab-size",  "999"};
static const char *const many_ranks_size[SIZE_FLAGS] = {"--hidden-size", "64", "--num-attention-heads", "1",
                                                        "--vocab-size",  "503"};

// --- one rank ------------------------------------------------------------------------------------

typedef struct Model {
    const ModelRank *rank;
    const ModelPreset *preset;
    Config config;
    MemoryPlan memory_plan;
    Zero *zero;
    GPT gpt;
    Timers *timers;
    Stream *compute;
    LayoutTensor *tensors;
    // host memory
    float *local;         // (arena) this rank's gradients from backward
    float *found;         // (arena) results downloaded from the device
    float *every;         // (dp, arena) gradients of all ranks, only on the group's root
    float **all;          // (dp) each rank's gradients in `every`
    float *losses;        // (dp)
    StepRecord *records;  // (world) simulated records
    MuonShape *shapes;    // (tensors) of the simulated Muon
    SimulatedMuon muon;
    struct Model *whole;  // second model, which keeps all gradients; NULL under optim
    int first;            // index of the first micro-batch for load_tokens
    Simulator sim;        // complete on the root; other ranks have only the arrays for broadcasts
} Model;

// The simulated group. Its first rank is the root, which runs the simulator.
static const Group *group_of(const Model *m) { return &m->rank->mesh->dp; }
static bool is_root(const Model *m) { return group_of(m)->rank == 0; }

static size_t arena_bytes(const Model *m) {
    return (size_t)m->zero->base.layout.arena_elements * sizeof(float);
}

static void download(const Model *m, void *host, const void *device, size_t bytes) {
    copy_to_host(m->compute, host, device, bytes);
    stream_synchronize(m->compute);
}

// shared: applies the preset's gradient sharding.
static bool configure(Model *m, bool shared, Error *err) {
    const Mesh *mesh = m->rank->mesh;
    char *argv[MODEL_FLAGS + SIZE_FLAGS + LAYOUT_FLAGS + SHARD_FLAGS + PRESET_FLAGS], tp[16], pp[16],
        batch[16];
    const char *strategy = shared ? "optim_grads" : "optim";
    const char *const sharding[SHARD_FLAGS] = {"--global-batch-size", batch,
                                               "--data-parallel-sharding-strategy", strategy};
    const char *const layout[LAYOUT_FLAGS] = {"--tensor-model-parallel-size", tp,
                                              "--pipeline-model-parallel-size", pp, "--sequence-parallel"};
    int argc = 0;
    const char *const *size = mesh->dp.size <= FEW_RANKS ? few_ranks_size : many_ranks_size;
    snprintf(tp, sizeof tp, "%d", mesh->tp.size);
    snprintf(pp, sizeof pp, "%d", mesh->pp.size);
    snprintf(batch, sizeof batch, "%d", 2 * mesh->dp.size * m->preset->micro_batches);
    for (int i = 0; i < MODEL_FLAGS; i++) argv[argc++] = (char *)model_flags[i];
    for (int i = 0; i < SIZE_FLAGS; i++) argv[argc++] = (char *)size[i];
    for (int i = 0; i < LAYOUT_FLAGS - !m->rank->sequence; i++) argv[argc++] = (char *)layout[i];
    for (int i = 0; m->preset->micro_batches && i < SHARD_FLAGS; i++) argv[argc++] = (char *)sharding[i];
    for (int i = 0; m->preset->flags[i]; i++) argv[argc++] = (char *)m->preset->flags[i];
    if (!config_parse(&m->config, argc, argv, NULL, 0, err)) return false;
    int end_of_document = (int)m->config.vocab_size;
    return config_finish(&m->config, mesh->world.size, end_of_document + 1, end_of_document, err);
}

// Marks tensors that an earlier rank already counts in the gradient norm. Does not use the flags of
// the model's table, to detect errors in them.
static void set_uncounted(Model *m) {
    const Mesh *mesh = m->rank->mesh;
    for (int t = 0; t < m->gpt.tensors; t++) {
        bool first_stage_has_it = t == GPT_WTE && m->gpt.stage.heads && mesh->pp.rank > 0;
        m->tensors[t].uncounted = first_stage_has_it || (m->gpt.tensor[t].split < 0 && mesh->tp.rank > 0);
    }
}

static bool build_model(Model *m, Error *err) {
    const ModelRank *rank = m->rank;
    int sharers = devices_memory_sharers(&rank->own);
    gpt_describe(&m->gpt, &m->config, rank->mesh);
    m->tensors = tensors_for_plan(m->gpt.tensor, m->gpt.tensors);
    set_uncounted(m);
    m->zero = zero_plan(&m->config, rank->mesh, m->gpt.tensor, m->gpt.tensors, &m->memory_plan, err);
    if (!m->zero) return false;
    gpt_reserve(&m->gpt, &m->memory_plan);
    if (!memory_plan_allocate(&m->memory_plan, rank->device, sharers, err)) return false;
    device_set_deterministic(rank->device, true);
    m->compute = stream_create(rank->device, "compute");
    m->timers = timers_create(rank->device, 0);
    zero_start(m->zero, rank->device, m->compute, rank->lanes, m->timers);
    gpt_start(&m->gpt, m->zero, rank->device, m->compute, m->timers);
    m->gpt.pipeline = rank->pipeline;
    tp_open(&m->gpt.tp, rank->device);
    Peers peers = {MPI_COMM_WORLD, 0, NULL};
    gpt_init_weights(&m->gpt, (uint64_t)m->config.seed, peers);
    zero_init_master_weights(m->zero);
    return true;
}

// Describes matrices without the model's table, to detect errors in it.
static MuonShape simulated_shape(const GPT *gpt, const Tensor *tensor) {
    int T = gpt->mesh->tp.size;
    bool wide = strstr(tensor->name, "4h_to_h") != NULL,
         dense = strstr(tensor->name, "attention.dense") != NULL;
    MuonShape shape = {.row_ranks = wide || dense ? 1 : T, .column_ranks = wide || dense ? T : 1};
    if (tensor->dims == 1 || strncmp(tensor->name, "encoder.layers.", 15) != 0) return shape;
    shape.columns = (wide ? 4 : 1) * gpt->C / shape.column_ranks;
    shape.groups = 1;
    shape.part[0] = tensor_elements(tensor) / shape.columns;
    if (strstr(tensor->name, "query_key_value")) {
        shape.groups = gpt->NH;
        for (int i = 0; i < MUON_PARTS; i++) shape.part[i] = gpt->HD;
    }
    return shape;
}

static void orthogonalize(void *context, floatX *x, int64_t rows, int64_t columns) {
    const Model *m = (const Model *)context;
    orthogonalize_on(m->zero, m->compute, x, rows, columns);
}

static const SimulatedMuon *simulated_muon(Model *m) {
    const Config *c = &m->config;
    if (c->optimizer != OPTIMIZER_MUON) return NULL;
    m->shapes = (MuonShape *)xcalloc((size_t)m->gpt.tensors, sizeof(MuonShape), "the test");
    for (int t = 0; t < m->gpt.tensors; t++) m->shapes[t] = simulated_shape(&m->gpt, &m->gpt.tensor[t]);
    SimulatedMuon muon = {m->shapes,        (float)c->muon_momentum, (float)c->muon_extra_scale_factor,
                          c->muon_nesterov, orthogonalize,           m};
    m->muon = muon;
    return &m->muon;
}

static void build_simulator(Model *m) {
    const Config *c = &m->config;
    int dp = m->zero->base.layout.dp, kept = is_root(m) ? dp : 0;
    SimulatorOptions o = {&m->zero->base.layout,
                          m->tensors,
                          m->preset->grad,
                          m->preset->weight,
                          (uint32_t)c->seed,
                          (float)c->adam_beta1,
                          (float)c->adam_beta2,
                          (float)c->adam_eps,
                          WEIGHT_DECAY,
                          (float)c->clip_grad,
                          true,
                          (float)c->loss_spike_factor,
                          c->error_feedback && m->rank->mesh->rail.size > 1};
    m->local = (float *)xmalloc(arena_bytes(m), "the test");
    m->found = (float *)xmalloc(arena_bytes(m), "the test");
    m->every = (float *)xmalloc((size_t)kept * arena_bytes(m) + 1, "the test");
    m->all = (float **)xcalloc((size_t)dp, sizeof *m->all, "the test");
    m->losses = (float *)xcalloc((size_t)dp, sizeof *m->losses, "the test");
    m->records = (StepRecord *)xcalloc((size_t)m->rank->mesh->world.size, sizeof *m->records, "the test");
    for (int r = 0; r < kept; r++) m->all[r] = m->every + r * m->zero->base.layout.arena_elements;
    floatX *weights = (floatX *)xmalloc(arena_bytes(m), "the test");
    download(m, weights, m->zero->weights.arena,
             (size_t)m->zero->base.layout.arena_elements * sizeof(floatX));
    simulator_create(&m->sim, &o, weights);
    m->sim.muon = simulated_muon(m);
    free(weights);
}

static void close_model(Model *m) {
    simulator_free(&m->sim);
    if (m->whole) close_model(m->whole);
    tp_close(&m->gpt.tp);
    zero_stop(m->zero);
    memory_plan_free(&m->memory_plan, m->rank->device);
    zero_free(m->zero);
    gpt_free(&m->gpt);
    timers_destroy(m->timers);
    stream_destroy(m->compute);
    config_free(&m->config);
    free(m->tensors);
    free(m->local);
    free(m->found);
    free(m->every);
    free(m->all);
    free(m->losses);
    free(m->records);
    free(m->shapes);
    free(m);
}

// --- a step on both sides ------------------------------------------------------------------------

static int micro_batches_of(const Model *m) {
    return m->preset->micro_batches ? m->preset->micro_batches : 1;
}

// A LoadMicroBatch. Small token ids are more frequent, and the target of each token is the next
// one.
static void load_tokens(Model *m, Pass *pass) {
    const GPT *gpt = &m->gpt;
    int k = pass->micro_batch;
    uint32_t step = (uint32_t)m->zero->base.step;
    int N = gpt->B * gpt->T, T = gpt->T;
    int32_t *drawn = (int32_t *)xmalloc((size_t)(N + 1) * sizeof *drawn, "the test");
    int32_t *positions = (int32_t *)xmalloc((size_t)N * sizeof *positions, "the test");
    for (int i = 0; i <= N; i++) {
        Philox4 r = philox4x32_10(11, 0, (uint32_t)i, (uint32_t)(m->first + k), (uint32_t)group_of(m)->rank,
                                  step);
        double x = (r.v[0] + 0.5) * 0x1p-32;
        drawn[i] = (int32_t)(gpt->V * x * x);
    }
    for (int i = 0; i < N; i++) positions[i] = i % T;
    Batch batch = {drawn, drawn + 1, positions, NULL, NULL, 0};
    gpt_upload(&m->gpt, pass->slot, &batch);
    pass->loss_scale = 1.0f / (float)(N * micro_batches_of(m));
    stream_synchronize(m->compute);
    free(drawn);
    free(positions);
}

// Runs forward and backward for the micro-batches of a step.
static void run_micro_batches(Model *m, int count) {
    Pass pass;
    PassSchedule schedule = gpt_schedule(&m->gpt, count, true);
    while (gpt_next_pass(&schedule, &pass)) {
        if (pass.direction == FORWARD) load_tokens(m, &pass);
        if (pass.direction == FORWARD) gpt_forward_pass(&m->gpt, &pass);
        else gpt_backward_pass(&m->gpt, &pass);
    }
    gpt_end_backward(&m->gpt);
}

// With `on`, a backward pass reduces nothing, because no chunks are left. Otherwise the next calls
// of zero_reduce_unit reduce every bucket.
static void hold_back(Model *m, bool on) {
    const Base *base = &m->zero->base;
    Grads *grads = &m->zero->grads;
    for (int u = 0; u < base->layout.units; u++) grads->complete[u] = false;
    for (int b = 0; b < base->layout.buckets; b++) {
        grads->bucket[b].complete_from = base->layout.bucket[b].end_unit;
        grads->bucket[b].chunks_left = on ? 0 : grads_chunks(base, b);
    }
}

// Warms up communication, as a pipeline stage does before the first forward pass of a step. This
// must change only the traffic counts.
static void warm_up(Model *m) {
    zero_warm_up(m->zero, true);
    for (int again = 0; again < 2; again++) {
        for (int unit = zero_layout(m->zero)->units - 1; unit >= 0; unit--) {
            if (zero_grads_accumulate(m->zero, unit)) continue;
            zero_grads_begin(m->zero, unit);
            zero_reduce_unit(m->zero, unit, false);
        }
    }
    zero_warm_up(m->zero, false);
}

// Runs the part of the trainer's step before zero_update. overlapped: reduces layers as they
// complete; otherwise reduces nothing.
static void backward(Model *m, uint32_t step, int micro_batches, bool overlapped) {
    zero_step_begins(m->zero, step);
    if (!overlapped) hold_back(m, true);
    run_micro_batches(m, micro_batches);
}

// Gathers m->local of all ranks on the root.
static void collect_gradients(Model *m) {
    int arena = (int)m->zero->base.layout.arena_elements;
    MPI_Gather(m->local, arena, MPI_FLOAT, m->every, arena, MPI_FLOAT, 0, group_of(m)->mpi);
}

static void collect_loss(Model *m, const Zero *zero) {
    float loss;
    download(m, &loss, zero->loss_sum, sizeof loss);
    MPI_Gather(&loss, 1, MPI_FLOAT, m->losses, 1, MPI_FLOAT, 0, group_of(m)->mpi);
}

static void collect(Model *m) {
    download(m, m->local, m->zero->grads.whole, arena_bytes(m));
    collect_loss(m, m->zero);
    collect_gradients(m);
}

// Clears the accumulated gradients of 1-D tensors, as zero_update does.
static void clear_tails(Model *m) {
    for (int b = 0; b < m->zero->base.layout.buckets; b++) {
        const Bucket *bucket = &m->zero->base.layout.bucket[b];
        set_zero(m->compute, m->zero->grads.whole + bucket->arena_start + bucket->matrix_elements,
                 (size_t)bucket->tail_elements * sizeof(float));
    }
}

// Computes the sum of this rank's local gradients over `count` micro-batches, starting at
// micro-batch `first`, in m->found.
static void whole_gradients(Model *m, uint32_t step, int first, int count) {
    Model *whole = m->whole;
    clear_tails(whole);
    whole->first = first;
    backward(whole, step, count, false);
    stream_synchronize(whole->compute);
    download(m, m->found, whole->zero->grads.whole, arena_bytes(m));
}

// Copies to m->local the buckets whose gradients accumulate over micro-batches if `stay`, or all
// other buckets.
static void take_buckets(Model *m, bool stay) {
    for (int b = 0; b < m->zero->base.layout.buckets; b++) {
        const Bucket *bucket = &m->zero->base.layout.bucket[b];
        int64_t at = bucket->arena_start, n = bucket->matrix_elements + bucket->tail_elements;
        if (m->zero->grads.bucket[b].store->accumulates != stay) continue;
        memcpy(m->local + at, m->found + at, (size_t)n * sizeof *m->local);
    }
}

// Simulates the reductions of a step's micro-batches into sim->reduced. The bucket of the
// embeddings is reduced once per step, the others in each micro-batch.
static void simulate_micro_batches(Model *m, uint32_t step) {
    const BucketLayout *plan = &m->zero->base.layout;
    int count = m->preset->micro_batches;
    bool *each = (bool *)xcalloc((size_t)plan->tensors, sizeof *each, "the test");
    for (int t = 0; t < plan->tensors; t++)
        each[t] = !m->zero->grads.bucket[plan->tensor_bucket[t]].store->accumulates;
    copy_on_device(m->compute, m->whole->zero->weights.arena, m->zero->weights.arena,
                   (size_t)plan->arena_elements * sizeof(floatX));
    stream_synchronize(m->compute);
    memset(m->local, 0, arena_bytes(m));
    whole_gradients(m, step, 0, count);
    take_buckets(m, true);
    collect_loss(m, m->whole->zero);
    for (int k = 0; k < count; k++) {
        whole_gradients(m, step, k, 1);
        take_buckets(m, false);
        collect_gradients(m);
        if (!is_root(m)) continue;
        if (k == 0) simulator_reduce(&m->sim, m->all, step);
        else simulator_add(&m->sim, m->all, each, step, k);
    }
    free(each);
}

static void reduce(Model *m, uint32_t step, bool overlapped) {
    const BucketLayout *plan = &m->zero->base.layout;
    if (!overlapped) {
        hold_back(m, false);
        for (int unit = plan->units - 1; unit >= 0; unit--) zero_reduce_unit(m->zero, unit, true);
        return;
    }
    clear_tails(m);
    backward(m, step, 1, true);
}

static float rate_of(uint32_t step) { return 2e-3f / (float)step; }

// Simulates the step. The roots of all groups exchange their records before computing the step
// status.
static void simulate(Model *m, uint32_t step) {
    const Mesh *mesh = m->rank->mesh;
    Simulator *sim = &m->sim;
    MPI_Comm group = mesh->dp.mpi;
    int arena = (int)m->zero->base.layout.arena_elements, record = (int)sizeof(StepRecord);
    SimulatedWorld world = {m->records, mesh->world.size, mesh->dp.size * mesh->tp.size};
    if (is_root(m)) simulator_records(sim, m->losses);
    MPI_Bcast(sim->records, mesh->dp.size * record, MPI_BYTE, 0, group);
    MPI_Allgather(sim->records + mesh->dp.rank, record, MPI_BYTE, m->records, record, MPI_BYTE,
                  mesh->world.mpi);
    if (is_root(m)) simulator_update(sim, &world, step, rate_of(step), 0.0f);
    MPI_Bcast(sim->reduced, arena, MPI_FLOAT, 0, group);
    MPI_Bcast(sim->master, arena, MPI_FLOAT, 0, group);
    MPI_Bcast(sim->exp_avg, arena, MPI_FLOAT, 0, group);
    MPI_Bcast(sim->exp_avg_sq, arena, MPI_FLOAT, 0, group);
    MPI_Bcast(sim->replica, arena * (int)sizeof(floatX), MPI_BYTE, 0, group);
    MPI_Bcast(&sim->control, sizeof sim->control, MPI_BYTE, 0, group);
}

// --- comparisons ---------------------------------------------------------------------------------

// Returns a name like "2 x 2 ranks": nodes and ranks per node of a data-parallel group.
static const char *shape_name(const ModelRank *rank, char *text, size_t bytes) {
    const Mesh *mesh = rank->mesh;
    int tp = mesh->tp.size, pp = mesh->pp.size;
    int n = snprintf(text, bytes, "%d x %d ranks", mesh->rail.size, mesh->node.size);
    if (tp * pp > 1) {
        snprintf(text + n, bytes - (size_t)n, ", T %d, P %d%s", tp, pp,
                 rank->sequence ? ", sequence parallel" : "");
    }
    return text;
}

static bool complain(const Model *m, uint32_t step, const char *what, int64_t at) {
    char shape[64];
    fprintf(stderr, "rank %d, %s, a GPT's gradients, %s, step %u: %s at %lld\n", m->rank->mesh->world.rank,
            shape_name(m->rank, shape, sizeof shape), m->preset->name, step, what, (long long)at);
    return false;
}

// Checks that local gradients are plausible: every tensor has a nonzero gradient, ranks differ, and
// the untrained model's loss is close to log(V), the loss of a uniform guess.
static bool plausible(const Model *m, uint32_t step) {
    const BucketLayout *plan = &m->zero->base.layout;
    for (int t = 0; t < plan->tensors; t++) {
        int64_t i = 0;
        while (i < m->tensors[t].numel && m->local[plan->tensor_arena[t] + i] == 0.0f) i++;
        if (i == m->tensors[t].numel) return complain(m, step, "gradient is zero in tensor", t);
    }
    if (!is_root(m)) return true;
    for (int r = 1; r < plan->dp; r++) {
        if (!memcmp(m->all[0], m->all[r], arena_bytes(m))) {
            return complain(m, step, "same gradients as rank 0", r);
        }
    }
    return step > 1 || !m->gpt.stage.heads || fabs(m->losses[0] - log(m->gpt.V)) < 0.5 ||
           complain(m, step, "loss of the untrained model (in thousandths) is",
                    (int64_t)(1000 * m->losses[0]));
}

static bool same_bits(const Model *m, uint32_t step, const char *what, const float *a, const float *b,
                      int64_t from, int64_t n) {
    if (!memcmp(a + from, b + from, (size_t)n * sizeof *a)) return true;
    int64_t i = from;
    while (f32_bits(a[i]) == f32_bits(b[i])) i++;
    return complain(m, step, what, i);
}

// This rank's ranges of the arena must contain the reduced gradient, all others the local gradient.
// updated: after AdamW, which clears the gradients of 1-D tensors.
static bool same_gradients(const Model *m, uint32_t step, bool updated) {
    const BucketLayout *plan = &m->zero->base.layout;
    int64_t rank = m->rank->mesh->dp.rank;
    float *expected = (float *)xmalloc(arena_bytes(m), "the test");
    memcpy(expected, m->local, arena_bytes(m));
    for (int b = 0; b < plan->buckets; b++) {
        const Bucket *bucket = &plan->bucket[b];
        int64_t matrix = bucket->arena_start + rank * bucket->matrix_per_rank;
        int64_t tails = bucket->arena_start + bucket->matrix_elements;
        int64_t tail = tails + rank * bucket->tail_per_rank;
        memcpy(expected + matrix, m->sim.reduced + matrix,
               (size_t)bucket->matrix_per_rank * sizeof *expected);
        memcpy(expected + tail, m->sim.reduced + tail, (size_t)bucket->tail_per_rank * sizeof *expected);
        if (updated) memset(expected + tails, 0, (size_t)bucket->tail_elements * sizeof *expected);
    }
    download(m, m->found, m->zero->grads.whole, arena_bytes(m));
    bool ok = same_bits(m, step, "different gradient", m->found, expected, 0, plan->arena_elements);
    free(expected);
    return ok;
}

// This rank's ranges must contain the sum over the micro-batches.
static bool same_ranges(const Model *m, uint32_t step) {
    const BucketLayout *plan = &m->zero->base.layout;
    bool ok = true;
    for (int b = 0; ok && b < plan->buckets; b++) {
        const Bucket *bucket = &plan->bucket[b];
        GradShard own = grads_shard(&m->zero->base, &m->zero->grads, b),
                  expected = grad_shard_of(bucket, m->sim.reduced + bucket->arena_start,
                                           m->rank->mesh->dp.rank);
        float *tail = m->found + bucket->matrix_per_rank;
        download(m, m->found, own.matrix, (size_t)bucket->matrix_per_rank * sizeof(float));
        download(m, tail, own.tail, (size_t)bucket->tail_per_rank * sizeof(float));
        ok = same_bits(m, step, "different gradient", m->found, expected.matrix, 0,
                       bucket->matrix_per_rank) &&
             same_bits(m, step, "different gradient", tail, expected.tail, 0, bucket->tail_per_rank);
    }
    return ok;
}

static bool same_shards(const Model *m, uint32_t step, const char *what, const float *device,
                        const float *whole) {
    int64_t rank = m->rank->mesh->dp.rank;
    bool ok = true;
    download(m, m->found, device, (size_t)m->zero->base.layout.shard_elements * sizeof(float));
    for (int b = 0; ok && b < m->zero->base.layout.buckets; b++) {
        const Bucket *bucket = &m->zero->base.layout.bucket[b];
        const float *matrix = m->found + bucket->state_start, *tail = matrix + bucket->matrix_per_rank;
        const float *matrices = whole + bucket->arena_start, *tails = matrices + bucket->matrix_elements;
        int64_t matrix_n = bucket->matrix_per_rank, tail_n = bucket->tail_per_rank;
        ok = same_bits(m, step, what, matrix, matrices + rank * matrix_n, 0, matrix_n) &&
             same_bits(m, step, what, tail, tails + rank * tail_n, 0, tail_n);
    }
    return ok;
}

// The same for second moments, which buckets of whole matrices have only for their tails.
static bool same_squares(const Model *m, uint32_t step) {
    const Base *base = &m->zero->base;
    int64_t rank = m->rank->mesh->dp.rank;
    bool ok = true;
    download(m, m->found, m->zero->optimizer.exp_avg_sq,
             (size_t)base_squares_start(base, base->layout.buckets) * sizeof(float));
    for (int b = 0; ok && b < base->layout.buckets; b++) {
        const Bucket *bucket = &base->layout.bucket[b];
        const float *found = m->found + base_squares_start(base, b);
        const float *matrices = m->sim.exp_avg_sq + bucket->arena_start,
                    *tails = matrices + bucket->matrix_elements;
        int64_t matrix_n = bucket->whole ? 0 : bucket->matrix_per_rank, tail_n = bucket->tail_per_rank;
        ok = same_bits(m, step, "different second moment", found, matrices + rank * matrix_n, 0, matrix_n) &&
             same_bits(m, step, "different second moment", found + matrix_n, tails + rank * tail_n, 0,
                       tail_n);
    }
    return ok;
}

static bool same_status(Model *m, uint32_t step) {
    StepRecord *records = (StepRecord *)m->found;  // the records of all ranks fit into the arena
    int ranks = m->rank->mesh->world.size;
    download(m, records, m->zero->records, (size_t)ranks * sizeof *records);
    for (int r = 0; r < ranks; r++) {
        if (records[r].sum_squares != m->records[r].sum_squares || records[r].loss != m->records[r].loss) {
            return complain(m, step, "different record", r);
        }
        if (records[r].fault)
            return complain(m, step, "payload with a wrong checksum", (int64_t)records[r].fault);
    }
    StepStatus control = zero_step_status(m->zero, 0);
    if (!control.applied) return complain(m, step, "step was skipped", 0);
    if ((control.clip_coefficient < 1.0f) != (m->config.clip_grad < 1.0)) {
        return complain(m, step, "clipping is active or inactive unexpectedly", 0);
    }
    return memcmp(&control, &m->sim.control, sizeof control) == 0 ||
           complain(m, step, "different step status", 0);
}

static bool same_replica(const Model *m, uint32_t step) {
    const floatX *weights = (const floatX *)m->found;
    download(m, m->found, m->zero->weights.arena,
             (size_t)m->zero->base.layout.arena_elements * sizeof *weights);
    for (int64_t i = 0; i < m->zero->base.layout.arena_elements; i++) {
        if (memcmp(weights + i, m->sim.replica + i, sizeof *weights)) {
            return complain(m, step, "different weight", i);
        }
    }
    return true;
}

// Broadcasts the weights of a tensor from the first rank of the group and compares them. Collective
// over the group, whose ranks all hold the tensor. tensor: row in this rank's table.
static bool same_copy(const Model *m, uint32_t step, const Group *group, int tensor) {
    const floatX *own = (const floatX *)m->found + m->zero->base.layout.tensor_arena[tensor];
    int bytes = (int)(m->tensors[tensor].numel * (int64_t)sizeof *own);
    void *first = xmalloc((size_t)bytes, "the test");
    if (group->rank == 0) memcpy(first, own, (size_t)bytes);
    MPI_Bcast(first, bytes, MPI_BYTE, 0, group->mpi);
    bool same = !memcmp(first, own, (size_t)bytes);
    free(first);
    return same || complain(m, step, "different copy of tensor", tensor);
}

// Compares the copies of tensors that tensor parallelism does not split, and of the tied embedding
// on the last stage.
static bool same_copies(const Model *m, uint32_t step) {
    bool ok = true;
    download(m, m->found, m->zero->weights.arena,
             (size_t)m->zero->base.layout.arena_elements * sizeof(floatX));
    for (int t = 0; m->rank->mesh->tp.size > 1 && t < m->gpt.tensors; t++) {
        if (m->gpt.tensor[t].split < 0) ok = same_copy(m, step, &m->rank->mesh->tp, t) && ok;
    }
    if (m->rank->mesh->embedding.size > 1) ok = same_copy(m, step, &m->rank->mesh->embedding, GPT_WTE) && ok;
    return ok;
}

static WireBytes planned_bytes(const Model *m) {
    const BucketLayout *plan = &m->zero->base.layout;
    WireBytes sum = {0};
    for (int b = 0; plan->dp > 1 && b < plan->buckets; b++) {
        WireBytes bytes = layout_bucket_wire_bytes(plan, b, &m->preset->grad, &m->preset->weight);
        int64_t times = zero_reductions(m->zero, b, m->preset->micro_batches);
        sum.grad_intra += times * bytes.grad_intra;
        sum.grad_inter += times * bytes.grad_inter;
        sum.weight_intra += bytes.weight_intra;
        sum.weight_inter += bytes.weight_inter;
    }
    return sum;
}

// A step must send exactly the planned number of bytes.
static bool same_traffic(const Model *m, uint32_t step, Traffic before, uint64_t records_before) {
    Traffic after = zero_traffic(m->zero);
    WireBytes plan = planned_bytes(m);
    uint64_t records = (uint64_t)(m->rank->mesh->world.size - 1) * sizeof(StepRecord);
    if (after.node - before.node != (uint64_t)(plan.grad_intra + plan.weight_intra)) {
        return complain(m, step, "wrong number of bytes inside the node", 0);
    }
    if (after.rail - before.rail != (uint64_t)(plan.grad_inter + plan.weight_inter)) {
        return complain(m, step, "wrong number of bytes between nodes", 0);
    }
    return comm_sent(&m->rank->mesh->world) - records_before == records ||
           complain(m, step, "wrong number of bytes of records", 0);
}

// --- steps and presets ---------------------------------------------------------------------------

static bool on_all(bool ok) {
    int value = ok;
    MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return value != 0;
}

// Reduces the same gradients in the simulator and in Zero. Returns false if the results differ.
static bool reduce_kept(Model *m, uint32_t step, bool overlapped, Traffic *before) {
    backward(m, step, 1, false);
    collect(m);
    if (is_root(m)) simulator_reduce(&m->sim, m->all, step);
    simulate(m, step);
    *before = zero_traffic(m->zero);
    reduce(m, step, overlapped);
    if (overlapped) return true;
    lanes_synchronize(m->rank->lanes);
    return same_gradients(m, step, false);
}

// Checks that the gradients of some layers are sharded, which requires separate buckets for layers.
// With 16 ranks and groups of 256 elements no layer has one, because the smallest bucket is larger
// than a layer.
static bool some_shared(const Model *m, uint32_t step) {
    int shared = 0;
    for (int b = 0; b < m->zero->base.layout.buckets; b++)
        shared += !m->zero->grads.bucket[b].store->accumulates;
    const BucketLayout *plan = &m->zero->base.layout;
    bool too_small = plan->dp >= 16 && plan->options.alignment >= 256;
    return shared > 0 || plan->dp == 1 || too_small || complain(m, step, "no layer is sharded", 0);
}

static bool reduce_shared(Model *m, uint32_t step, bool overlapped, Traffic *before) {
    simulate_micro_batches(m, step);
    simulate(m, step);
    zero_step_begins(m->zero, step);
    warm_up(m);
    *before = zero_traffic(m->zero);
    run_micro_batches(m, m->preset->micro_batches);
    if (overlapped) return true;
    lanes_synchronize(m->rank->lanes);
    return some_shared(m, step) && same_ranges(m, step);
}

static bool run_step(Model *m, uint32_t step) {
    bool overlapped = step % 2 == 0, shared = m->preset->micro_batches > 0, ok;
    Traffic before;
    uint64_t records = comm_sent(&m->rank->mesh->world);
    if (shared) ok = reduce_shared(m, step, overlapped, &before);
    else ok = reduce_kept(m, step, overlapped, &before);
    zero_update(m->zero, rate_of(step), 0.0, WEIGHT_DECAY);
    zero_synchronize(m->zero);
    ok = ok && plausible(m, step) && (shared || same_gradients(m, step, true)) && same_status(m, step) &&
         same_shards(m, step, "different master weight", m->zero->optimizer.master, m->sim.master) &&
         same_shards(m, step, "different first moment", m->zero->optimizer.exp_avg, m->sim.exp_avg) &&
         same_squares(m, step) && same_traffic(m, step, before, records) && same_replica(m, step);
    return on_all(ok) && on_all(same_copies(m, step));
}

// shared: see configure.
static Model *open_model(const ModelRank *rank, const ModelPreset *preset, bool shared) {
    Model *m = (Model *)xcalloc(1, sizeof *m, "a model");
    Error err = {0};
    m->rank = rank;
    m->preset = preset;
    if (!configure(m, shared, &err) || !build_model(m, &err)) fatal(NULL, err.code, "%s", err.what);
    return m;
}

static bool run_preset(const ModelRank *rank, const ModelPreset *preset) {
    Model *m = open_model(rank, preset, true);
    build_simulator(m);
    if (preset->micro_batches) m->whole = open_model(rank, preset, false);
    bool ok = true;
    for (uint32_t step = 1; ok && step <= STEPS; step++) ok = run_step(m, step);
    close_model(m);
    return ok;
}

int model_gradients_failures(const ModelRank *rank) {
    char shape[64];
    int failures = 0;
    shape_name(rank, shape, sizeof shape);
    for (int preset = 0; preset < PRESETS; preset++) {
        bool ok = run_preset(rank, &presets[preset]);
        failures += !ok;
        if (rank->mesh->world.rank == 0) {
            printf("%s %s: a GPT's gradients, %s\n", ok ? "ok" : "not ok", shape, presets[preset].name);
        }
    }
    return failures;
}
