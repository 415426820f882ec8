// Stream ordering of steps with tensor and sequence parallelism. The device, the collectives and
// the ops only record the memory that they read and write on each stream (recording.h), as in
// test_overlap.c. Steps run on one of four ranks: two tensor-parallel ranks in each of two
// data-parallel ones. The tests check that:
//   - events order any two uses of the same memory of which at least one is a write
//   - omitting any wait between streams of tensor parallelism is detected as a race
//   - single kernels and quantized messages are used where they should be
//   - the reduction of one row block is not ordered with the GEMMs of the other
//   - in backward, collectives are not ordered with the GEMMs that should hide them
#include <mpi.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/model/gpt.h"
#include "test/leaks.h"
#include "test/unit/state/recording.h"

enum { LAYERS = 6, STEPS = 3 };

// --- ops -----------------------------------------------------------------------------------------

// A way to run a step.
typedef struct Case {
    const char *strategy;  // --data-parallel-sharding-strategy
    bool blocks;           // --tp-comm-overlap
    bool direct;           // reductions and gathers are single kernels
    bool fused;            // reductions in forward are part of the norm's kernel
    bool sequence;         // --sequence-parallel
    bool coded;            // --quantized-tensor-parallel, which uses no single kernels
} Case;
static Case way;

void op_init_weights(Stream *s, const InitWeights *a) {
    begin_on(s, "init");
    writes(s, a->weights, X * a->rows * a->columns);
}
void op_embedding_forward(Stream *s, const Embedding *a) {
    begin_on(s, "embedding");
    if (a->wte) reads(s, a->wte, X * a->rows * a->C);
    writes(s, a->x, X * a->B * a->T * a->C);
}
void op_layernorm_forward(Stream *s, const LayerNorm *a) {
    int64_t rows = rows_held(a->rows, a->B, a->T), bytes = X * rows * a->C;
    begin_on(s, "norm");
    reads(s, a->gamma, X * a->C);
    reads(s, a->beta, X * a->C);
    if (a->branch) reads(s, a->residual, bytes);
    if (a->branch) reads(s, a->branch, bytes);
    use(s->device, a->branch ? WRITE : READ, a->x, bytes);
    writes(s, a->y, bytes);
    writes(s, a->mean, 4 * rows);
    writes(s, a->rstd, 4 * rows);
}
void op_linear_forward(Stream *s, const Linear *a) {
    begin_on(s, a->pre ? "fc1" : a->C > a->OC ? "fc2" : a->OC == 2 * a->C ? "projection" : "QKV");
    reads(s, a->x, X * a->N * a->C);
    reads(s, a->w, X * a->OC * a->C);
    if (a->bias) reads(s, a->bias, X * a->OC);
    writes(s, a->y, X * a->N * a->OC);
    if (a->pre) writes(s, a->pre, X * a->N * a->OC);
    writes(s, a->workspace, 1);
}
void op_attention_forward(Stream *s, const Attention *a) {
    int64_t elements = (int64_t)a->B * a->T * a->NH * a->HD;
    begin_on(s, "attention");
    reads(s, a->qkv, 3 * X * elements);
    writes(s, a->out, X * elements);
    writes(s, a->workspace, 1);
}
void op_head_logits(Stream *s, const Head *a, int64_t row, int64_t rows) {
    begin_on(s, "logits");
    reads(s, a->x + row * a->C, X * rows * a->C);
    reads(s, a->wte, X * a->rows * a->C);
    writes(s, a->own, rows * (int64_t)sizeof *a->own);
    writes(s, a->workspace, 1);
}
void op_head_gradients(Stream *s, const Head *a, int64_t row, int64_t rows) {
    begin_on(s, "gradients of logits");
    reads(s, a->all, a->ranks * rows * (int64_t)sizeof *a->all);
    reads(s, a->wte, X * a->rows * a->C);
    writes(s, a->losses + row, 4 * rows);
    writes(s, a->dx + row * a->C, X * rows * a->C);
    writes(s, a->dwte, 4 * a->rows * a->C);
    writes(s, a->workspace, 1);
}
void op_loss_sum(Stream *s, const Head *a) {
    begin_on(s, "loss");
    reads(s, a->losses, 4 * a->N);
    writes(s, a->loss_sum, 4);
}
void op_layernorm_backward(Stream *s, const LayerNorm *a) {
    int64_t rows = rows_held(a->rows, a->B, a->T), bytes = X * rows * a->C;
    begin_on(s, "norm backward");
    reads(s, a->gamma, X * a->C);
    reads(s, a->x, bytes);
    reads(s, a->mean, 4 * rows);
    reads(s, a->rstd, 4 * rows);
    reads(s, a->dy, bytes);
    writes(s, a->dresidual, bytes);
    writes(s, a->dgamma, 4 * a->C);
    writes(s, a->dbeta, 4 * a->C);
}
// The GEMMs for dx and dw, or one of them.
void op_linear_backward(Stream *s, const Linear *a) {
    begin_on(s, a->dx && a->dw ? "dx and dw" : a->dx ? "dx" : "dw");
    reads(s, a->dy, X * a->N * a->OC);
    if (a->dx) reads(s, a->w, X * a->OC * a->C);
    if (a->dx) writes(s, a->dx, X * a->N * a->C);
    if (a->dx && a->x_pre) reads(s, a->x_pre, X * a->N * a->C);
    if (a->dx && a->x_pre) writes(s, a->dpre_bias, 4 * a->C);
    // With tensor parallelism, the GEMM for dw alone hides a collective.
    if (a->beside_collective != (a->dw && !a->dx)) fail_msg("a GEMM has the SMs of another one");
    if (a->dw) reads(s, a->x, X * a->N * a->C);
    if (a->dw) writes(s, a->dw, 4 * a->OC * a->C);
    writes(s, a->workspace, 1);
}
void op_bias_gradient(Stream *s, float *dbias, const floatX *dy, const float *sum, int64_t N, int OC,
                      void *workspace, uint32_t *absmax) {
    begin_on(s, "bias gradient");
    reads(s, dy, X * N * OC);
    writes(s, dbias, 4 * OC);
    writes(s, workspace, 1);
}
void op_attention_backward(Stream *s, const Attention *a) {
    int64_t elements = (int64_t)a->B * a->T * a->NH * a->HD;
    begin_on(s, "attention backward");
    reads(s, a->qkv, 3 * X * elements);
    reads(s, a->out, X * elements);
    reads(s, a->dout, X * elements);
    writes(s, a->dqkv, 3 * X * elements);
    writes(s, a->workspace, 1);
}
void op_embedding_backward(Stream *s, const Embedding *a) {
    begin_on(s, "embedding backward");
    reads(s, a->dx, X * a->B * a->T * a->C);
    writes(s, a->dwte, 4 * a->rows * a->C);
    writes(s, a->dwpe, 4 * a->T * a->C);
}
void op_sum_parts(Stream *s, const SumParts *a) {
    begin_on(s, "sum");
    reads(s, a->parts, X * a->ranks * a->n);
    if (a->bias) reads(s, a->bias, X * a->C);
    writes(s, a->y, X * a->n);
}
void op_add_parts(Stream *s, float *y, const float *parts, int64_t n, int ranks) {
    begin_on(s, "sum of gradients");
    reads(s, parts, 4 * ranks * n);
    writes(s, y, 4 * n);
}
// Collectives on compute overlap with no GEMM.
static void check_beside(const Stream *s, CommBeside beside) {
    bool alone = !strcmp(s->name, "compute");
    if (beside != (alone ? COMM_WITHOUT_GEMM : COMM_BESIDE_GEMM))
        fail_msg("a collective on %s has the SMs of another one", s->name);
}
bool comm_reduce_direct(const Group *group, const CommReduce *a, Stream *s) {
    if (!way.direct) return false;
    check_beside(s, a->beside);
    begin_on(s, "reduce");
    writes(s, &group->comm->order, 1);
    if (a->bias) reads(s, a->bias, X * a->C);
    writes(s, (void *)a->partial, X * a->total);  // its memory is also written in place, or by other ranks
    if (a->scatter) writes(s, a->scratch, X * a->total / group->size);
    writes(s, a->out, X * (a->scatter ? a->total / group->size : a->total));
    return true;
}
bool comm_gather_direct(const Group *group, const CommGather *a, Stream *s) {
    if (!way.direct) return false;
    check_beside(s, a->beside);
    begin_on(s, "gather");
    writes(s, &group->comm->order, 1);
    reads(s, a->own, (int64_t)a->bytes);
    writes(s, a->whole, group->size * (int64_t)a->bytes);
    return true;
}
bool comm_norm_direct(const Group *group, const CommNorm *a, Stream *s) {
    const LayerNorm *n = a->norm;
    int64_t rows = rows_held(n->rows, n->B, n->T), bytes = X * rows * n->C;
    if (!way.fused) return false;
    begin_on(s, "fused norm");
    writes(s, &group->comm->order, 1);
    reads(s, a->partial, X * n->B * n->T * n->C);
    reads(s, a->bias, X * n->C);
    reads(s, n->gamma, X * n->C);
    reads(s, n->beta, X * n->C);
    reads(s, n->residual, bytes);
    writes(s, n->x, bytes);
    writes(s, n->y, bytes);
    writes(s, n->mean, 4 * rows);
    writes(s, n->rstd, 4 * rows);
    if (a->whole) writes(s, a->whole, X * n->B * n->T * n->C);
    return true;
}
void comm_close_direct(const Group *group) {}

// --- a run ---------------------------------------------------------------------------------------

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

static void configure(Recording *r) {
    static const char words[] =
        "test --bf16 --use-distributed-optimizer --mock-data --lr 1e-3 --train-iters 10 --tokenizer-type "
        "NullTokenizer --make-vocab-size-divisible-by 1 --vocab-size 31 --num-layers 6 --hidden-size 32 "
        "--num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 "
        "--global-batch-size 4 --ddp-bucket-size 1 --tensor-model-parallel-size 2 "
        "--data-parallel-sharding-strategy";
    char text[sizeof words], *argv[64], *rest = NULL;
    int argc = 0, hosts[4] = {0};
    Error err = {0};
    memcpy(text, words, sizeof words);
    for (char *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        argv[argc++] = word;
    argv[argc++] = (char *)way.strategy;
    if (way.blocks) argv[argc++] = "--tp-comm-overlap";
    if (way.sequence) argv[argc++] = "--sequence-parallel";
    const char *const codes[] = {"--quantized-tensor-parallel", "--aq-group-size", "32"};
    for (int i = 0; i < (way.coded ? 3 : 0); i++) argv[argc++] = (char *)codes[i];
    bool ok = config_parse(&r->config, argc, argv, NULL, 0, &err) &&
              mesh_build(&r->mesh, 3, 4, hosts, 4, 2, 1, &err) && config_finish(&r->config, 4, 32, 31, &err);
    if (!ok) fail_msg("%s", err.what);
    if (r->config.sharding == SHARD_PARAMETERS) mesh_shard_weights(&r->mesh, false);
    r->mesh.world.mpi = MPI_COMM_SELF;
}

static void open_recording(Recording *r, int dropped_stream, int dropped_event) {
    Error err = {0};
    memset(r, 0, sizeof *r);
    r->device.dropped_stream = dropped_stream;
    r->device.dropped_event = dropped_event;
    configure(r);
    r->zero = gpt_plan(&r->gpt, &r->config, &r->mesh, &r->memory_plan, &err);
    if (!r->zero) fail_msg("%s", err.what);
    assert_int_equal(r->gpt.tp.block_bytes, way.blocks ? TP_BLOCK_BYTES : 0);
    if (way.blocks) r->gpt.tp.block_bytes = 1;
    r->gpt.tp.peer = false;
    r->compute = stream_create(&r->device, "compute");
    lanes_open(&r->lanes, &r->device, true);
    r->timers = timers_create(&r->device, 0);
    connect_groups(&r->mesh, r->comm);
    assert_true(memory_plan_allocate(&r->memory_plan, &r->device, 1, &err));
    zero_start(r->zero, &r->device, r->compute, &r->lanes, r->timers);
    gpt_start(&r->gpt, r->zero, &r->device, r->compute, r->timers);
    tp_open(&r->gpt.tp, &r->device);
    gpt_init_weights(&r->gpt, 7, (Peers){MPI_COMM_SELF, 0, NULL});
}

// The host frees memory that compute and `side` use.
static void close_recording(Recording *r) {
    GPT *gpt = &r->gpt;
    tp_close(&gpt->tp);
    begin(&r->device, HOST, "the memory is freed");
    use(&r->device, WRITE, gpt->branch, X * gpt->B * gpt->T * gpt->C);
    use(&r->device, WRITE, gpt->tp.parts, X * gpt->B * gpt->T * gpt->C);
    memory_plan_free(&r->memory_plan, &r->device);
    zero_free(r->zero);
    gpt_free(gpt);
    lanes_close(&r->lanes);
    timers_destroy(r->timers);
    stream_destroy(r->compute);
    free(r->device.ops);
    free(r->device.uses);
    config_free(&r->config);
}

static void run(Recording *r) {
    Pass pass = {
        .B = r->gpt.B, .T = r->gpt.T, .training = true, .backward = true, .first = true, .last = true};
    for (int step = 1; step <= STEPS; step++) {
        zero_step_begins(r->zero, step);
        pass.direction = FORWARD;
        gpt_forward(&r->gpt, &pass);
        gpt_head(&r->gpt, &pass);
        pass.direction = BACKWARD;
        gpt_backward(&r->gpt, &pass);
        gpt_end_backward(&r->gpt);
        zero_update(r->zero, 1e-3, 1e-3, 0.1);
    }
}

// --- the tests -----------------------------------------------------------------------------------

static int count_of(const Recording *r, const char *name) {
    int count = 0;
    for (int i = 0; i < r->device.op_count; i++) count += !strcmp(r->device.ops[i].name, name);
    return count;
}

static const Case cases[] = {
    {"optim", true, false, false, false, false},
    {"optim", true, true, false, false, false},
    {"optim_grads_params", true, false, false, false, false},
    {"optim_grads_params", true, true, false, false, false},
    {"optim", false, false, false, false, false},
    {"optim", false, true, true, false, false},
    {"optim_grads_params", false, true, false, false, false},
    {"optim_grads_params", false, true, true, false, false},
    {"optim", false, false, false, true, false},
    {"optim", false, true, true, true, false},
    {"optim_grads_params", false, true, false, true, false},
    {"optim_grads_params", false, true, true, true, false},
    {"optim", false, true, true, false, true},
    {"optim_grads_params", false, false, false, true, true},
    {"optim", false, true, true, true, true},
};
enum { CASES = sizeof cases / sizeof *cases };

static void conflicting_uses_are_ordered(void **state) {
    for (int i = 0; i < CASES; i++) {
        Recording r;
        way = cases[i];
        open_recording(&r, -1, -1);
        run(&r);
        int direct = count_of(&r, "reduce") + count_of(&r, "gather") + count_of(&r, "fused norm");
        if ((direct > 0) != (way.direct && !way.coded)) fail_msg("case %d: %d single kernels", i, direct);
        close_recording(&r);
        if (r.device.races) fail_msg("case %d, %s: %s", i, way.strategy, r.device.first_race);
        assert_true(r.device.all_uses > 500);
    }
}

// Omits each wait between compute and `side` once. Only row blocks use the second event of
// reductions, and only sequence parallelism the event of gathers.
static void every_wait_is_needed(void **state) {
    for (int i = 0; i < CASES; i++) {
        Recording whole;
        way = cases[i];
        open_recording(&whole, -1, -1);
        run(&whole);
        const TensorParallel *tp = &whole.gpt.tp;
        const Event *last = way.blocks ? tp->reduced[1] : tp->gathered;
        const int events[] = {tp->queued->id, tp->reduced[0]->id, last->id};
        const int streams[] = {tp->side->id, whole.compute->id, whole.compute->id};
        for (int e = 0; e < (way.blocks || way.sequence ? 3 : 2); e++) {
            Recording r;
            assert_true(whole.device.waits[streams[e]][events[e]]);
            open_recording(&r, streams[e], events[e]);
            run(&r);
            if (!r.device.races) fail_msg("case %d: nothing is found without wait %d", i, e);
            close_recording(&r);
        }
        close_recording(&whole);
    }
}

// Returns the n-th operation with this name that the host has started.
static const Op *find(const Recording *r, const char *name, int n) {
    for (int i = 0; i < r->device.op_count; i++) {
        if (!strcmp(r->device.ops[i].name, name) && n-- == 0) return &r->device.ops[i];
    }
    fail_msg("%s was not called so often", name);
    return NULL;
}
static void overlaps(const Recording *r, const char *first, int i, const char *second, int j) {
    const Op *a = find(r, first, i), *b = find(r, second, j);
    if (before(a, b) || before(b, a)) fail_msg("%s %d and %s %d cannot overlap", first, i, second, j);
}

static void reductions_overlap_gemms(void **state) {
    Recording r;
    way = (Case){"optim_grads_params", true, true, false, false, false};
    open_recording(&r, -1, -1);
    run(&r);
    for (int l = 0; l < LAYERS; l++) {
        int block = 2 * l, reduce = 1 + 4 * l;  // the first one is of the embedding
        overlaps(&r, "reduce", reduce, "projection", block + 1);
        overlaps(&r, "reduce", reduce + 1, "fc1", block);
        overlaps(&r, "reduce", reduce + 1, "fc2", block);
        overlaps(&r, "reduce", reduce + 2, "fc1", block + 1);
        overlaps(&r, "reduce", reduce + 2, "fc2", block + 1);
        if (l + 1 < LAYERS) overlaps(&r, "reduce", reduce + 3, "QKV", block + 2);
        assert_true(before(find(&r, "QKV", block), find(&r, "attention", l)));
    }
    close_recording(&r);
}

// In backward of QKV and fc1, the gather of the norm's output can overlap with the GEMM for dx, and
// the reduction of dx with the GEMM for dw. In backward of the projection and fc2, the gather of
// the gradient precedes the GEMMs.
static void backward_overlaps_gemms(void **state) {
    Recording r;
    way = (Case){"optim", false, true, true, true, false};
    open_recording(&r, -1, -1);
    run(&r);
    assert_int_equal(find(&r, "reduce", 0)->stream, r.compute->id);  // of the embedding
    for (int i = 0; i < 2 * LAYERS; i++) {
        int saved = 3 + 2 * i, reduce = 2 + i;  // embedding, first norm and LM head come first
        overlaps(&r, "gather", saved, "dx", i);
        overlaps(&r, "reduce", reduce, "dw", i);
        assert_int_equal(find(&r, "gather", saved - 1)->stream, r.compute->id);
        assert_true(before(find(&r, "gather", saved - 1), find(&r, "dx and dw", i)));
        assert_true(before(find(&r, "gather", saved), find(&r, "dw", i)));
    }
    close_recording(&r);
}

// Without row blocks, every norm includes the reduction of the branch that it adds. Only the first
// norm of a pass adds none.
static void norms_include_reductions(void **state) {
    Recording r;
    way = (Case){"optim", false, true, true, false, false};
    open_recording(&r, -1, -1);
    run(&r);
    assert_int_equal(count_of(&r, "norm"), STEPS);
    assert_int_equal(count_of(&r, "fused norm"), STEPS * 2 * LAYERS);
    assert_int_equal(count_of(&r, "reduce"), STEPS * (2 + 2 * LAYERS));  // embedding, LM head, backward
    close_recording(&r);
}

static void small_micro_batches_stay_whole(void **state) {
    Group group = {.size = 3};
    TensorParallel tp = {.group = &group, .C = 100};
    tp.block_bytes = 200 * X * tp.C;
    assert_int_equal(tp_row_blocks(&tp, 399).count, 1);
    RowBlocks blocks = tp_row_blocks(&tp, 405);
    assert_int_equal(blocks.count, 2);
    assert_int_equal(blocks.rows[0].count, 201);  // a multiple of the ranks
    assert_int_equal(blocks.rows[1].first, 201);
    assert_int_equal(blocks.rows[1].count, 204);
    tp.block_bytes = 0;
    assert_int_equal(tp_row_blocks(&tp, 405).count, 1);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conflicting_uses_are_ordered), cmocka_unit_test(every_wait_is_needed),
        cmocka_unit_test(reductions_overlap_gemms),     cmocka_unit_test(norms_include_reductions),
        cmocka_unit_test(backward_overlaps_gemms),      cmocka_unit_test(small_micro_batches_stay_whole),
    };
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    failed += leaks_found();
    launch_finalize(&launch);
    return failed;
}
