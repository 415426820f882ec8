// A recorded run: opens a rank of a Case, runs steps and evaluations, and ends as a run does.
// Included by test_tensor_overlap.c.
#pragma once
#include <mpi.h>

#include "test/unit/model/recorded_links.h"
#include "test/unit/model/recorded_ops.h"

enum { LAYERS = 6, STEPS = 3, TENSOR = 2, DATA = 2 };

typedef struct Recording {
    Device device;
    Config config;
    Mesh mesh;
    MemoryPlan memory_plan;
    Lanes lanes;
    Stream *compute;
    Timers *timers;
    Comm comm[MOST_GROUPS];
    Zero *zero;
    GPT gpt;
} Recording;

// A wait to omit: the calls of stream_wait(stream, event). Negative ids: none.
typedef struct Omitted {
    int stream, event;
    int call;  // 0: every call; else only the call with this number
} Omitted;
static const Omitted nothing = {-1, -1, 0};

// Pipelines need several micro-batches, and a multiple of the stages if they are interleaved. FP8
// quantizes weights in the first micro-batch of a step only.
static int micro_batches_of(const Case *c) { return c->stages > 1 ? 6 : c->flags & FP8 ? 2 : 1; }

// --- the command line ----------------------------------------------------------------------------

typedef struct Arguments {
    char text[2048];
    char *word[128];
    int count;
} Arguments;

static void add_words(Arguments *a, const char *format, ...) {
    va_list values;
    char *rest = NULL, *at = a->text;
    if (a->count) at = a->word[a->count - 1] + strlen(a->word[a->count - 1]) + 1;
    size_t room = (size_t)(a->text + sizeof a->text - at);
    va_start(values, format);
    int length = vsnprintf(at, room, format, values);
    va_end(values);
    if (length < 0 || (size_t)length >= room) fail_msg("the command line is too long");
    for (char *word = strtok_r(at, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        a->word[a->count++] = word;
}

// Block scales need multiples of 128.
static void add_sizes(Arguments *a) {
    bool wide = way.flags & BLOCKWISE;
    add_words(a, "--num-layers %d --hidden-size %d --num-attention-heads 4 --micro-batch-size 2", LAYERS,
              wide ? 256 : 32);
    add_words(a, "--seq-length %d --max-position-embeddings %d", wide ? 64 : 16, wide ? 64 : 16);
    add_words(a, "--global-batch-size %d", 2 * DATA * micro_batches_of(&way));
    if (way.stages > 1) add_words(a, "--pipeline-model-parallel-size %d", way.stages);
    if (way.chunks > 1)
        add_words(a, "--num-layers-per-virtual-pipeline-stage %d", LAYERS / way.stages / way.chunks);
}

static void add_flags(Arguments *a) {
    static const struct {
        int flags;
        const char *words;
    } rows[] = {
        {BLOCKS, "--tp-comm-overlap"},
        {FUSED, "--hidden-dropout 0"},  // which the kernel does not support
        {SEQUENCE, "--sequence-parallel"},
        {CODED, "--quantized-tensor-parallel"},
        {QUANTIZED, "--quantized-activations"},
        {CODED | QUANTIZED, "--aq-group-size 32"},
        {FP8, "--fp8-format hybrid"},
        {TENSORWISE, "--fp8-recipe tensorwise"},
        {DELAYED, "--fp8-recipe delayed"},
        {BLOCKWISE, "--fp8-recipe blockwise"},
        {SEALED, "--verify-wire"},
        {UNTIED, "--untie-embeddings-and-output-weights"},
        {RECOMPUTE, "--recompute-granularity full"},
        {MUON, "--optimizer muon --ddp-bucket-size 1000000 --gradient-alltoall-pipeline 6"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (way.flags & rows[i].flags) add_words(a, "%s", rows[i].words);
    }
}

// Describes the last tensor and data parallel rank of a pipeline stage.
static void configure(Recording *r, int stage) {
    Arguments a = {.count = 0};
    Error err = {0};
    int per_stage = TENSOR * DATA, world = per_stage * way.stages, hosts[64] = {0};
    int rank = per_stage * (stage + 1) - 1;
    add_words(&a, "test --bf16 --use-distributed-optimizer --mock-data --lr 1e-3 --train-iters 10");
    add_words(&a, "--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1 --vocab-size 31");
    add_words(&a, "--ddp-bucket-size 1 --data-parallel-sharding-strategy %s", way.strategy);
    add_words(&a, "--tensor-model-parallel-size %d", TENSOR);
    add_sizes(&a);
    add_flags(&a);
    bool ok = config_parse(&r->config, a.count, a.word, NULL, 0, &err) &&
              mesh_build(&r->mesh, rank, world, hosts, per_stage, TENSOR, way.stages, &err) &&
              config_finish(&r->config, world, 32, 31, &err);
    if (!ok) fail_msg("%s", err.what);
    if (r->config.sharding == SHARD_PARAMETERS) mesh_shard_weights(&r->mesh, false);
    r->mesh.world.mpi = MPI_COMM_SELF;
}

// --- start and end -------------------------------------------------------------------------------

static void open_recording(Recording *r, int stage, Omitted omitted) {
    Error err = {0};
    memset(r, 0, sizeof *r);
    r->device.dropped_stream = omitted.stream;
    r->device.dropped_event = omitted.event;
    r->device.dropped_call = omitted.call;
    configure(r, stage);
    r->zero = gpt_plan(&r->gpt, &r->config, &r->mesh, &r->memory_plan, &err);
    if (!r->zero) fail_msg("%s", err.what);
    assert_int_equal(r->gpt.tp.block_bytes, way.flags & BLOCKS ? TP_BLOCK_BYTES : 0);
    if (way.flags & BLOCKS) r->gpt.tp.block_bytes = 1;
    r->gpt.tp.peer = false;
    r->compute = stream_create(&r->device, "compute");
    lanes_open(&r->lanes, &r->device, true);
    r->timers = timers_create(&r->device, 0);
    connect_groups(&r->mesh, r->comm);
    r->gpt.pipeline = pipeline_open(&r->mesh, config_pipeline_chunks(&r->config), &r->device);
    assert_true(memory_plan_allocate(&r->memory_plan, &r->device, 1, &err));
    zero_start(r->zero, &r->device, r->compute, &r->lanes, r->timers);
    gpt_start(&r->gpt, r->zero, &r->device, r->compute, r->timers);
    tp_open(&r->gpt.tp, &r->device);
    gpt_init_weights(&r->gpt, 7, (Peers){MPI_COMM_SELF, 0, NULL});
}

// The host may free memory after all streams have finished their work with it.
static void free_memory(Recording *r) {
    begin(&r->device, HOST, "the memory is freed");
    for (int i = 0; i < r->memory_plan.count; i++) {
        const MemoryPlanEntry *entry = &r->memory_plan.entries[i];
        use(&r->device, WRITE, entry->memory, (int64_t)entry->bytes);
    }
    memory_plan_free(&r->memory_plan, &r->device);
}

static void close_recording(Recording *r) {
    GPT *gpt = &r->gpt;
    closing = &gpt->tp;
    tp_close(&gpt->tp);
    zero_stop(r->zero);
    close_links(&gpt->pipeline);
    free_memory(r);
    zero_free(r->zero);
    gpt_free(gpt);
    lanes_close(&r->lanes);
    timers_destroy(r->timers);
    stream_destroy(r->compute);
    free(r->device.ops);
    free(r->device.uses);
    config_free(&r->config);
}

// --- steps ---------------------------------------------------------------------------------------

static void run_passes(Recording *r, bool training) {
    GPT *gpt = &r->gpt;
    Pass pass;
    if (gpt_needs_warm_up(gpt, training, &pass)) gpt_warm_up(gpt, &pass);
    PassSchedule schedule = gpt_schedule(gpt, micro_batches_of(&way), training);
    while (gpt_next_pass(&schedule, &pass)) {
        if (pass.direction == FORWARD) gpt_forward_pass(gpt, &pass);
        else gpt_backward_pass(gpt, &pass);
    }
    if (training) gpt_end_backward(gpt);
}

// Runs steps first .. last.
static void run_steps(Recording *r, int first, int last) {
    for (int step = first; step <= last; step++) {
        zero_step_begins(r->zero, step);
        run_passes(r, true);
        zero_update(r->zero, 1e-3, 1e-3, 0.1);
        fp8_update_scales(&r->gpt);
    }
}
static void run(Recording *r) { run_steps(r, 1, STEPS); }
