// Tests the reduction with a norm over peer memory (peer_reduce_norm) bit for bit against the
// separate ops. Every rank computes the other ranks' inputs, so that the reference needs no
// communication: op_sum_parts, then op_layernorm_forward of all rows.
//
//   mpirun -n 2 test_peer_norm_gpu [--rounds N] [--group N] [--share-gpus]
//
// Options: see peer_lab.cuh.
#include "llmc/cuda/limits.h"
#include "test/gpu/peer_lab.cuh"

enum { SECONDS_MOST = 240 };            // a kernel that hangs ends the test
enum { RESIDUAL = 14 };                 // "rank" of the residual stream
#define MOST_NORMED ((int64_t)4 << 20)  // elements of all rows of a case

typedef enum Way { GATHERED, OWN_ROWS, ALL_ROWS, WAYS } Way;
static const char *const WAY[WAYS] = {"own rows, gathered", "own rows", "all rows"};

// A norm to test. rows: per rank.
typedef struct Case {
    Way way;
    int rows, C;
    bool rms, biased, absmax, in_place;
    uint32_t seed;
} Case;

// Every shape of a row (row_norm.cuh), at its limits and in between, and several rows per block.
static const struct {
    int rows, C;
} SHAPES[] = {{1, 8},      {3, 136},    {2000, 256}, {65, 264},  {70, 512},  {19, 520},   {100, 768},
              {77, 776},   {130, 1024}, {33, 1032},  {66, 1536}, {41, 1544}, {250, 2048}, {9, 2056},
              {150, 3072}, {20, 3080},  {90, 4096},  {30, 4104}, {64, 6144}, {17, 6152},  {64, 8192},
              {11, 8200},  {33, 12288}, {5, 12296},  {29, 16384}};
enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES };

// Tensors of a case in `local` and `scratch`. want_*: results of the separate ops for all rows.
typedef struct Tensors {
    floatX *partial, *whole;           // (N, C) in shared memory
    floatX *residual;                  // (N, C)
    floatX *x, *y;                     // (own rows, C)
    floatX *branch, *want_x, *want_y;  // (N, C)
    float *mean, *rstd, *want_mean, *want_rstd;
    uint32_t *absmax, *want_absmax;
    const floatX *bias, *gamma, *beta;  // (C)
    floatX *parts;                      // (ranks, N, C)
} Tensors;

static Tensors tensors_of(const Lab *lab, const Buffers *m) {
    const size_t step = MOST_NORMED * sizeof(floatX) + 4096;
    uint8_t *next = m->local + 4096;
    Tensors t = {};
    floatX **const matrix[] = {&t.residual, &t.x, &t.y, &t.branch, &t.want_x, &t.want_y};
    float **const vector[] = {&t.mean, &t.rstd, &t.want_mean, &t.want_rstd};
    for (int i = 0; i < 6; i++, next += step) *matrix[i] = (floatX *)next;
    for (int i = 0; i < 4; i++, next += 1 << 20) *vector[i] = (float *)next;
    t.absmax = (uint32_t *)next, t.want_absmax = t.absmax + 1;
    t.partial = (floatX *)m->input;
    t.whole = (floatX *)(m->output + 4096);
    t.parts = (floatX *)m->scratch;
    t.bias = lab->bias, t.gamma = t.bias + LIMIT_HIDDEN, t.beta = t.gamma + LIMIT_HIDDEN;
    return t;
}

// --- one case ------------------------------------------------------------------------------------

static __global__ void compare_kernel(uint32_t *wrong, const uint32_t *a, const uint32_t *b, int64_t words) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < words; i += gridDim.x * 256ll)
        if (a[i] != b[i]) atomicAdd(wrong, 1u);
}
static void compare(const Lab *lab, Stream *stream, const void *a, const void *b, size_t bytes) {
    compare_kernel<<<256, 256, 0, stream_handle(stream)>>>(lab->wrong, (const uint32_t *)a,
                                                           (const uint32_t *)b, (int64_t)(bytes / 4));
    check_launch(stream, "compare");
}
// Overwrites an output and GUARD bytes around it. intact: counts changes of these bytes.
static void poison(Stream *stream, void *p, size_t bytes) {
    cuda_check(NULL, cudaMemsetAsync((uint8_t *)p - GUARD, POISON, bytes + 2 * GUARD, stream_handle(stream)),
               "poison");
}
static void intact(const Lab *lab, Stream *stream, const void *p, size_t bytes) {
    const uint8_t *start = (const uint8_t *)p;
    count_different<<<1, 256, 0, stream_handle(stream)>>>(lab->wrong, start - GUARD, POISON, GUARD);
    count_different<<<1, 256, 0, stream_handle(stream)>>>(lab->wrong, start + bytes, POISON, GUARD);
    check_launch(stream, "guards");
}
static void fill(Stream *stream, floatX *p, int64_t n, uint32_t seed, int rank) {
    fill_kernel<<<512, 256, 0, stream_handle(stream)>>>(p, n, seed, rank);
    check_launch(stream, "fill");
}

static Rows rows_of(const Lab *lab, const Case *t) {
    if (t->way == ALL_ROWS) return {0, (int64_t)t->rows * lab->size};
    return {(int64_t)t->rows * lab->rank, t->rows};
}

// Returns the norm of all rows by the separate ops.
static LayerNorm separate_norm(const Lab *lab, const Case *t, const Tensors *m) {
    LayerNorm n = {};
    n.B = 1, n.T = t->rows * lab->size, n.C = t->C;
    n.epsilon = 1e-5f;
    n.x = m->want_x, n.y = m->want_y;
    n.residual = m->residual, n.branch = m->branch;
    n.gamma = m->gamma, n.beta = t->rms ? NULL : m->beta;
    n.mean = m->want_mean, n.rstd = m->want_rstd;
    n.rms = t->rms;
    return n;
}

// Fills the inputs and computes the expected results. The second norm computes the absolute maximum
// of this rank's rows.
static void run_separately(const Lab *lab, Stream *stream, const Case *t, const Tensors *m) {
    LayerNorm n = separate_norm(lab, t, m);
    Rows rows = rows_of(lab, t);
    int64_t count = (int64_t)n.T * t->C, own = rows.first * t->C;
    for (int r = 0; r < lab->size; r++) fill(stream, m->parts + r * count, count, t->seed, r);
    fill(stream, m->residual, count, t->seed, RESIDUAL);
    SumParts sum = {m->branch, m->parts, count, lab->size, t->biased ? m->bias : NULL, t->C};
    op_sum_parts(stream, &sum);
    op_layernorm_forward(stream, &n);
    if (!t->absmax) return;
    n.x += own, n.y += own, n.residual += own, n.branch += own;
    n.mean += rows.first, n.rstd += rows.first;
    n.rows = rows;
    n.absmax = m->want_absmax;
    op_layernorm_forward(stream, &n);
}

static CommNorm fused_norm(const Lab *lab, const Case *t, const Tensors *m, LayerNorm *n) {
    *n = separate_norm(lab, t, m);
    n->rows = rows_of(lab, t);
    n->x = m->x, n->y = m->y;
    n->residual = t->in_place ? m->x : m->residual + n->rows.first * t->C;
    n->mean = m->mean, n->rstd = m->rstd;
    n->absmax = t->absmax ? m->absmax : NULL;
    CommNorm a = {};
    a.partial = m->partial;
    a.bias = t->biased ? m->bias : NULL;
    a.norm = n;
    a.whole = t->way == GATHERED ? m->whole : NULL;
    return a;
}

// Runs the case and compares it on the device, in stream order.
static bool run_case(Lab *lab, const Buffers *buffers, const Case *t) {
    Tensors m = tensors_of(lab, buffers);
    LayerNorm n;
    Stream *s = buffers->stream;
    CommNorm a = fused_norm(lab, t, &m, &n);
    int64_t N = n.T, first = n.rows.first * t->C;
    size_t own = (size_t)(n.rows.count * t->C) * sizeof(floatX), all = (size_t)(N * t->C) * sizeof(floatX);
    size_t statistics = (size_t)n.rows.count * sizeof(float);
    set_zero(s, m.absmax, 2 * sizeof *m.absmax);
    run_separately(lab, s, t, &m);
    fill(s, m.partial, N * t->C, t->seed, lab->rank);
    poison(s, m.x, own), poison(s, m.y, own), poison(s, m.whole, all);
    poison(s, m.mean, statistics), poison(s, m.rstd, statistics);
    if (t->in_place) copy_on_device(s, m.x, m.residual + first, own);
    if (!peer_reduce_norm(lab->peers, &a, s)) return false;
    // The separate ops overwrite the partial sums next. The other ranks must have read them.
    set_zero(s, m.partial, all);
    compare(lab, s, m.x, m.want_x + first, own);
    compare(lab, s, m.y, m.want_y + first, own);
    compare(lab, s, m.mean, m.want_mean + n.rows.first, statistics);
    compare(lab, s, m.rstd, m.want_rstd + n.rows.first, statistics);
    compare(lab, s, m.absmax, m.want_absmax, sizeof *m.absmax);
    if (a.whole) compare(lab, s, m.whole, m.want_y, all);
    intact(lab, s, m.x, own), intact(lab, s, m.y, own), intact(lab, s, m.whole, all);
    intact(lab, s, m.mean, statistics), intact(lab, s, m.rstd, statistics);
    return true;
}

static bool supports_all_rows(const Lab *lab) {
    return peer_normalizes_all(lab->size,
                               peer_most_blocks(COMM_WITHOUT_GEMM, lab->device->multiprocessors, 1));
}

static bool possible(const Lab *lab, const Case *t) {
    return (int64_t)t->rows * lab->size * t->C <= MOST_NORMED &&
           (t->way != ALL_ROWS || supports_all_rows(lab));
}

static void test_shapes(Lab *lab, const char *blocks) {
    for (int i = 0; i < SHAPE_COUNT * WAYS * 4; i++) {
        int shape = i / WAYS / 4;
        Case t = {(Way)(i % WAYS),       SHAPES[shape].rows, SHAPES[shape].C, i / WAYS % 2 == 1,
                  i / WAYS / 2 % 2 == 1, i % 5 == 0,         i % 7 < 2,       10u + (uint32_t)i};
        if (!possible(lab, &t)) continue;
        bool ran = run_case(lab, &lab->buffers[0], &t);
        uint32_t wrong = take_wrong(lab, lab->buffers[0].stream);
        check(lab->checks, ran && wrong == 0,
              "rank %d, %s: %d rows per rank of %d, %s, %s%s%s%s: %s, %u words are wrong", lab->rank, blocks,
              t.rows, t.C, WAY[t.way], t.rms ? "RMSNorm" : "LayerNorm", t.biased ? ", bias" : "",
              t.absmax ? ", maximum" : "", t.in_place ? ", in place" : "", ran ? "ran" : "refused", wrong);
    }
}

// --- many in a row -------------------------------------------------------------------------------

// As in test_peer_reduce_gpu.cu: random shapes and delays on two streams without host
// synchronization, with all SMs busy half of the time. Some all-reduces use the same barriers.
static void test_rounds(Lab *lab) {
    uint32_t same = 4321, own = 99u + 7u * (uint32_t)lab->rank, refused = 0;
    for (int round = 0; round < lab->rounds; round++) {
        const Buffers *m = &lab->buffers[draw(&same) % STREAMS];
        uint32_t shape = draw(&same) % SHAPE_COUNT, bits = draw(&same);
        Case t = {(Way)(bits % (supports_all_rows(lab) ? WAYS : ALL_ROWS)),
                  1 + (int)(draw(&same) % (uint32_t)SHAPES[shape].rows),
                  SHAPES[shape].C,
                  (bits >> 4) % 2 == 1,
                  (bits >> 5) % 2 == 1,
                  (bits >> 6) % 4 == 1,
                  (bits >> 8) % 4 == 1,
                  5000u + (uint32_t)round};
        if (!possible(lab, &t)) continue;
        if (draw(&own) % 2) delay_kernel<<<1, 1, 0, stream_handle(m->stream)>>>(draw(&own) % 200000);
        if (draw(&own) % 64 == 0) usleep(draw(&own) % 3000);
        if (round / 20 % 2) delay_kernel<<<4096, 256, 0, stream_handle(lab->busy)>>>(20000);
        CommReduce sum = {};
        sum.partial = sum.out = m->input;
        sum.total = 1000;
        if ((bits >> 10) % 4 == 0) refused += !peer_reduce_sum(lab->peers, &sum, m->stream);
        refused += !run_case(lab, m, &t);
    }
    stream_synchronize(lab->busy);
    uint32_t wrong = take_wrong(lab, lab->buffers[0].stream);
    check(lab->checks, refused == 0 && wrong == 0,
          "rank %d, %d norms with random delays: %u refused, %u words are wrong", lab->rank, lab->rounds,
          refused, wrong);
}

static void test_late_rank(Lab *lab) {
    for (int late = 0; late < lab->size; late++) {
        Case t = {GATHERED, 100, 1024, false, true, false, false, 3u + (uint32_t)late};
        if (lab->rank == late) sleep(1);
        bool ran = run_case(lab, &lab->buffers[0], &t);
        uint32_t wrong = take_wrong(lab, lab->buffers[0].stream);
        check(lab->checks, ran && wrong == 0, "rank %d is late: %u words are wrong", late, wrong);
    }
}

// --- refusals, the abort word and comm.h ---------------------------------------------------------

static void test_refusals(Lab *lab) {
    Stream *s = lab->buffers[0].stream;
    Tensors m = tensors_of(lab, &lab->buffers[0]);
    Case t = {GATHERED, 16, 1024, false, true, false, false, 1};
    LayerNorm n;
    const CommNorm good = fused_norm(lab, &t, &m, &n);
    const LayerNorm usual = n;
    CommNorm a = good;
    n.dropout.p = 0.1f;
    check(lab->checks, !peer_reduce_norm(lab->peers, &a, s), "accepts dropout");
    n = usual, n.gamma = NULL;
    check(lab->checks, !peer_reduce_norm(lab->peers, &a, s), "accepts a sum without a norm");
    n = usual, n.C = 1004;
    check(lab->checks, !peer_reduce_norm(lab->peers, &a, s), "accepts rows that are not whole vectors");
    n = usual, n.rows.count /= 2;
    check(lab->checks, !peer_reduce_norm(lab->peers, &a, s), "accepts some of this rank's rows");
    n = usual, n.rows = {0, 0};
    check(lab->checks, !peer_reduce_norm(lab->peers, &a, s), "accepts a gather of all rows");
    a.whole = NULL;
    if (lab->size > 2)
        check(lab->checks, !peer_reduce_norm(lab->peers, &a, s), "accepts all rows on %d ranks", lab->size);
    n = usual, n.y = m.partial + 1024;
    check(lab->checks, !peer_reduce_norm(lab->peers, &a, s), "accepts an output that overlaps the input");
    n = usual, a.bias = m.bias + 1;
    check(lab->checks, !peer_reduce_norm(lab->peers, &a, s), "accepts a bias that is not aligned");
    a = good, a.partial = m.branch;
    check(lab->checks, !peer_reduce_norm(lab->peers, &a, s), "accepts an input that is not shared");
    a = good, a.whole = m.branch;
    check(lab->checks, !peer_reduce_norm(lab->peers, &a, s), "accepts an output that is not shared");
}

// One rank never arrives. The kernels of the others wait until the abort word is set, then end.
static void test_abort(Lab *lab, int missing) {
    const Buffers *buffers = &lab->buffers[0];
    Tensors m = tensors_of(lab, buffers);
    Case t = {GATHERED, 100, 2048, false, true, true, false, 1};
    LayerNorm n;
    CommNorm a = fused_norm(lab, &t, &m, &n);
    if (lab->rank != missing) {
        for (int i = 0; i < 2; i++) peer_reduce_norm(lab->peers, &a, buffers->stream);
        check_abort(lab, buffers->stream);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

// The function of comm.h, which the model calls: counts the bytes sent.
static void test_comm(Lab *lab) {
    const Group *tp = &lab->mesh.tp;
    const Buffers *buffers = &lab->buffers[0];
    Tensors m = tensors_of(lab, buffers);
    Error err = {};
    LayerNorm n;
    CommPiece piece[] = {{buffers->input, BUFFER_BYTES}, {buffers->output, BUFFER_BYTES}};
    Case t = {GATHERED, 16, 1024, false, true, false, false, 1};
    CommNorm a = fused_norm(lab, &t, &m, &n);
    check(lab->checks, !comm_norm_direct(tp, &a, buffers->stream), "a norm without comm_open_direct");
    if (!check(lab->checks, comm_open_direct(tp, lab->flags, piece, 2, &err), "not opened: %s", err.what))
        return;
    for (int way = 0; way < (supports_all_rows(lab) ? WAYS : ALL_ROWS); way++) {
        t.way = (Way)way;
        a = fused_norm(lab, &t, &m, &n);
        uint64_t before = comm_sent(tp), block = 16 * 1024 * sizeof(floatX);
        bool ran = comm_norm_direct(tp, &a, buffers->stream);
        uint64_t sent = comm_sent(tp) - before, blocks = way == OWN_ROWS ? 1 : 2;
        check(lab->checks, ran && sent == blocks * block * (uint64_t)(lab->size - 1),
              "%s: %s, counts %llu sent bytes", WAY[way], ran ? "ran" : "refused", (unsigned long long)sent);
    }
    stream_synchronize(buffers->stream);
    comm_close_direct(tp);
}

static void test_all(Lab *lab) {
    if (!open_peers(lab)) return;
    test_shapes(lab, "usual blocks");
    peer_reduce_use_blocks(lab->peers, 2);
    test_shapes(lab, "2 blocks");
    peer_reduce_close(lab->peers);
    if (!open_peers(lab)) return;
    test_late_rank(lab);
    test_rounds(lab);
    test_refusals(lab);
    for (int missing = 0; missing < 2; missing++) {
        test_abort(lab, missing);
        peer_reduce_close(lab->peers);
        if (!open_peers(lab)) return;
        test_late_rank(lab);
    }
    peer_reduce_close(lab->peers);
    test_comm(lab);
}

int main(int argc, char **argv) { return lab_main("test_peer_norm_gpu", SECONDS_MOST, argc, argv, test_all); }
