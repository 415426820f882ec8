// Tests the collectives over peer memory (llmc/cuda/peer_reduce.h) bit for bit against sums
// computed from the known inputs and against the path that they replace: all-to-all, op_sum_parts
// and all-gather.
//
//   mpirun -n 2 test_peer_reduce_gpu [--rounds N] [--group N] [--share-gpus]
//
// Options: see peer_lab.cuh.
#include "test/gpu/peer_lab.cuh"

enum { SECONDS_MOST = 180 };  // a kernel that hangs ends the test

typedef enum Mode { ALL_REDUCE, ALL_REDUCE_IN_PLACE, SCATTER, SCATTER_IN_PLACE, MODES } Mode;
static const char *const MODE[MODES] = {"all-reduce", "all-reduce in place", "reduce-scatter",
                                        "reduce-scatter in place"};

// A collective to test. offset: position in the buffers, in elements.
typedef struct Case {
    Mode mode;
    int64_t total, offset;
    int C;  // length of the bias; 0: none
    bool fp32;
    uint32_t seed;
} Case;

static bool scatters(const Case *t) { return t->mode == SCATTER || t->mode == SCATTER_IN_PLACE; }
static size_t element_bytes(const Case *t) { return t->fp32 ? sizeof(float) : sizeof(floatX); }

// --- inputs and expected sums --------------------------------------------------------------------

static __device__ float as_float(float x) { return x; }
static __device__ float as_float(floatX x) { return floatX_to_float(x); }
static __device__ uint32_t bits_of(float x) { return __float_as_uint(x); }
static __device__ uint32_t bits_of(floatX x) { return x; }
static __device__ void rounded(float *y, float x) { *y = x; }
static __device__ void rounded(floatX *y, float x) { *y = floatX_from_float(x); }

// Compares y (count), elements first .. first + count - 1 of the sum, with the sum in rank order.
template <class T>
static __global__ void verify_kernel(uint32_t *wrong, const T *y, int64_t first, int64_t count, uint32_t seed,
                                     int ranks, const T *bias, int C) {
    uint32_t found = 0;
    for (int64_t k = blockIdx.x * 256ll + threadIdx.x; k < count; k += gridDim.x * 256ll) {
        int64_t i = first + k;
        float sum = as_float(value_as((T *)NULL, i, seed, 0));
        for (int r = 1; r < ranks; r++) sum = __fadd_rn(sum, as_float(value_as((T *)NULL, i, seed, r)));
        if (C) sum = __fadd_rn(sum, as_float(bias[i % C]));
        T want;
        rounded(&want, sum);
        found += bits_of(want) != bits_of(y[k]);
    }
    if (found) atomicAdd(wrong, found);
}

template <class T> static void fill(const Lab *lab, const Buffers *m, const Case *t) {
    T *input = (T *)m->input + t->offset;
    fill_kernel<<<512, 256, 0, stream_handle(m->stream)>>>(input, t->total, t->seed, lab->rank);
    check_launch(m->stream, "fill");
}
static const void *bias_of(const Lab *lab, const Case *t) {
    return t->fp32 ? (const void *)lab->bias_fp32 : (const void *)lab->bias;
}
template <class T>
static void verify(const Lab *lab, const Buffers *m, const Case *t, const void *y, int64_t first,
                   int64_t count) {
    verify_kernel<T><<<512, 256, 0, stream_handle(m->stream)>>>(lab->wrong, (const T *)y, first, count,
                                                                t->seed, lab->size,
                                                                (const T *)bias_of(lab, t), t->C);
    check_launch(m->stream, "verify");
}

// --- one collective ------------------------------------------------------------------------------

static CommReduce reduce_of(const Lab *lab, const Buffers *m, const Case *t) {
    size_t at = (size_t)t->offset * element_bytes(t);
    void *const out[MODES] = {m->output + at, m->input + at, m->local + at, m->input + at};
    CommReduce a = {};
    a.partial = m->input + at;
    a.out = out[t->mode];
    a.scratch = m->scratch + at;
    a.bias = t->C ? bias_of(lab, t) : NULL;
    a.C = t->C;
    a.total = t->total;
    a.fp32 = t->fp32;
    a.scatter = scatters(t);
    a.beside = (CommBeside)(t->seed / (2 * MODES) % COMM_BESIDES);
    return a;
}

// Runs the case and verifies it on the device, in stream order. Elements around an output that is
// not in place must not change.
static bool run_case(Lab *lab, const Buffers *m, const Case *t) {
    CommReduce a = reduce_of(lab, m, t);
    size_t element = element_bytes(t);
    int64_t count = a.scatter ? t->total / lab->size : t->total, first = a.scatter ? lab->rank * count : 0;
    uint8_t *out = (uint8_t *)a.out, *end = out + (size_t)count * element;
    cudaStream_t stream = stream_handle(m->stream);
    bool guarded = a.out != a.partial && t->offset >= GUARD;
    if (t->fp32) fill<float>(lab, m, t);
    else fill<floatX>(lab, m, t);
    if (guarded)
        cuda_check(NULL, cudaMemsetAsync(out - GUARD, POISON, (size_t)count * element + 2 * GUARD, stream),
                   "poison");
    if (!peer_reduce_sum(lab->peers, &a, m->stream)) return false;
    if (t->fp32) verify<float>(lab, m, t, a.out, first, count);
    else verify<floatX>(lab, m, t, a.out, first, count);
    if (!guarded) return true;
    count_different<<<1, 256, 0, stream>>>(lab->wrong, out - GUARD, POISON, GUARD);
    count_different<<<1, 256, 0, stream>>>(lab->wrong, end, POISON, GUARD);
    check_launch(m->stream, "guards");
    return true;
}

static void test_sums(Lab *lab) {
    const int64_t sizes[] = {1, 7, 8, 9, 64, 1000, 4099, 65536, 99991, 1 << 20, (1 << 21) + 8};
    const int64_t offsets[] = {GUARD, GUARD + 1, 0};
    const int biases[] = {0, 1024, 1000, 37};
    for (int s = 0; s < (int)(sizeof sizes / sizeof *sizes); s++) {
        for (int i = 0; i < MODES * 3 * 4 * 2; i++) {
            Case t = {(Mode)(i % MODES),         sizes[s] * lab->size, offsets[i / MODES % 3],
                      biases[i / MODES / 3 % 4], i / MODES / 12 == 1,  (uint32_t)(100 * s + i)};
            if (!scatters(&t))
                t.total += i / MODES % 2 ? 3 : 0;  // an all-reduce allows any number of elements
            bool ran = run_case(lab, &lab->buffers[0], &t);
            uint32_t wrong = take_wrong(lab, lab->buffers[0].stream);
            check(lab->checks, ran && wrong == 0,
                  "%s of %lld %s at offset %lld, bias of %d: %s, %u elements are wrong", MODE[t.mode],
                  (long long)t.total, t.fp32 ? "floats" : "bf16 values", (long long)t.offset, t.C,
                  ran ? "ran" : "refused", wrong);
        }
    }
}

// --- all-gather ----------------------------------------------------------------------------------

static bool run_gather(Lab *lab, const Buffers *m, size_t bytes, size_t offset, bool in_place, int round) {
    cudaStream_t stream = stream_handle(m->stream);
    uint8_t *whole = m->output + offset, *slot = whole + (size_t)lab->rank * bytes;
    uint8_t *own = in_place ? slot : m->local + offset % 32, *end = whole + (size_t)lab->size * bytes;
    cudaError_t status = cudaMemsetAsync(whole - GUARD, POISON, (size_t)lab->size * bytes + 2 * GUARD,
                                         stream);
    if (status == cudaSuccess) status = cudaMemsetAsync(own, (round * 8 + lab->rank) % 251, bytes, stream);
    cuda_check(NULL, status, "fill");
    CommGather gather = {own, whole, bytes, (CommBeside)(round % COMM_BESIDES)};
    if (!peer_reduce_gather(lab->peers, &gather, m->stream)) return false;
    for (int r = 0; r < lab->size; r++) {
        count_different<<<256, 256, 0, stream>>>(lab->wrong, whole + (size_t)r * bytes,
                                                 (uint8_t)((round * 8 + r) % 251), (int64_t)bytes);
    }
    count_different<<<1, 256, 0, stream>>>(lab->wrong, whole - GUARD, POISON, GUARD);
    count_different<<<1, 256, 0, stream>>>(lab->wrong, end, POISON, GUARD);
    check_launch(m->stream, "verify");
    return true;
}

static void test_gathers(Lab *lab) {
    const size_t sizes[] = {1, 15, 16, 17, 1000, 65536, 99999, (size_t)4 << 20};
    for (int i = 0; i < 8 * 3 * 2; i++) {
        size_t bytes = sizes[i % 8], offset = GUARD + (size_t)(i / 8 % 3) * 8 + (size_t)(i / 16);
        bool in_place = i / 24 == 1, ran = run_gather(lab, &lab->buffers[0], bytes, offset, in_place, i);
        uint32_t wrong = take_wrong(lab, lab->buffers[0].stream);
        check(lab->checks, ran && wrong == 0,
              "all-gather of %zu bytes at offset %zu%s: %s, %u bytes are wrong", bytes, offset,
              in_place ? " in place" : "", ran ? "ran" : "refused", wrong);
    }
}

// --- many collectives in a row -------------------------------------------------------------------

// Issues collectives of random sizes on two streams without host synchronization. Ranks start them
// at different times: random delays on the GPU, sometimes on the host. Inputs change between
// rounds, so a collective that reads too early, or writes too late, gives wrong sums. Another
// stream keeps all SMs busy half of the time.
static void test_rounds(Lab *lab) {
    uint32_t same = 12345, own = 777u + 99u * (uint32_t)lab->rank, refused = 0;
    for (int round = 0; round < lab->rounds; round++) {
        const Buffers *m = &lab->buffers[draw(&same) % STREAMS];
        uint32_t shape = draw(&same), bits = draw(&same) % 21;
        int64_t n = 1 + draw(&same) % (1u << bits);
        Case t = {(Mode)(shape % MODES),      n * lab->size,          (shape >> 4) % 4 ? GUARD : GUARD + 1,
                  (shape >> 8) % 2 ? 512 : 0, (shape >> 12) % 4 == 0, 1000u + (uint32_t)round};
        if (draw(&own) % 2) delay_kernel<<<1, 1, 0, stream_handle(m->stream)>>>(draw(&own) % 200000);
        if (draw(&own) % 64 == 0) usleep(draw(&own) % 3000);
        if (round / 20 % 2) delay_kernel<<<4096, 256, 0, stream_handle(lab->busy)>>>(20000);
        if (shape % 16 == 5) refused += !run_gather(lab, m, (size_t)n, GUARD + n % 17, n % 2, round);
        else refused += !run_case(lab, m, &t);
    }
    stream_synchronize(lab->busy);
    uint32_t wrong = take_wrong(lab, lab->buffers[0].stream);
    check(lab->checks, refused == 0 && wrong == 0,
          "%d collectives with random delays: %u refused, %u elements wrong", lab->rounds, refused, wrong);
}

// A rank that is a second late delays the others, but does not change the sums.
static void test_late_rank(Lab *lab) {
    for (int late = 0; late < lab->size; late++) {
        Case t = {ALL_REDUCE_IN_PLACE, 100000, 0, 0, false, 7u + (uint32_t)late};
        if (lab->rank == late) sleep(1);
        bool ran = run_case(lab, &lab->buffers[0], &t);
        uint32_t wrong = take_wrong(lab, lab->buffers[0].stream);
        check(lab->checks, ran && wrong == 0, "rank %d is late: %u elements are wrong", late, wrong);
    }
}

// --- comparison with the path through NCCL -------------------------------------------------------

// Computes the case with the collectives that it replaces. Returns the address of the result.
static void *in_steps(const Lab *lab, const Buffers *m, const Case *t, const CommReduce *a) {
    const Group *tp = &lab->mesh.tp;
    int64_t n = t->total / lab->size;
    size_t bytes = (size_t)n * element_bytes(t), own = (size_t)lab->rank * bytes;
    uint8_t *parts = m->scratch, *result = m->local;
    if (t->fp32) {  // as tp_sum
        copy_on_device(m->stream, parts + own, (const uint8_t *)a->partial + own, bytes);
        comm_all_to_all(tp, a->partial, parts, bytes, m->stream);
        op_add_parts(m->stream, (float *)(result + own), (const float *)parts, n, lab->size);
    } else {
        comm_all_to_all(tp, a->partial, parts, bytes, m->stream);
        copy_on_device(m->stream, parts + own, (const uint8_t *)a->partial + own, bytes);
        SumParts sum = {
            (floatX *)(result + own), (const floatX *)parts, n, lab->size, (const floatX *)a->bias, t->C};
        op_sum_parts(m->stream, &sum);
    }
    comm_all_gather(tp, result, bytes, m->stream);
    return result;
}

static void test_against_steps(Lab *lab) {
    const int64_t sizes[] = {8, 1000, 65536, 99992, 1 << 20, 1 << 21};
    uint8_t *host = (uint8_t *)malloc(2 * BUFFER_BYTES);
    for (int i = 0; i < 6 * 2; i++) {
        const Buffers *m = &lab->buffers[0];
        Case t = {ALL_REDUCE, sizes[i % 6] * lab->size, 0, i % 2 && i < 6 ? 8 : 0, i >= 6, 50u + (uint32_t)i};
        CommReduce a = reduce_of(lab, m, &t);
        size_t bytes = (size_t)t.total * element_bytes(&t);
        bool ran = run_case(lab, m, &t);
        copy_to_host(m->stream, host, a.out, bytes);
        copy_to_host(m->stream, host + BUFFER_BYTES, in_steps(lab, m, &t, &a), bytes);
        uint32_t wrong = take_wrong(lab, m->stream);
        check(lab->checks, ran && wrong == 0 && memcmp(host, host + BUFFER_BYTES, bytes) == 0,
              "%lld %s differ from the sums of collectives through NCCL", (long long)t.total,
              t.fp32 ? "floats" : "bf16 values");
    }
    free(host);
}

// The functions of comm.h, which the model calls.
static void test_comm(Lab *lab) {
    const Group *tp = &lab->mesh.tp;
    const Buffers *m = &lab->buffers[0];
    Error err = {};
    Case t = {ALL_REDUCE_IN_PLACE, 4096 * lab->size, 0, 64, false, 3};
    CommReduce a = reduce_of(lab, m, &t);
    check(lab->checks, !comm_reduce_direct(tp, &a, m->stream),
          "a direct collective without comm_open_direct");
    CommPiece piece[] = {{m->input, BUFFER_BYTES}, {m->output, BUFFER_BYTES}, {NULL, 0}};
    for (int time = 0; time < 2; time++) {
        if (!check(lab->checks, comm_open_direct(tp, lab->flags, piece, 3, &err), "not opened: %s", err.what))
            return;
        fill<floatX>(lab, m, &t);
        uint64_t before = comm_sent(tp);
        bool ran = comm_reduce_direct(tp, &a, m->stream);
        check(lab->checks,
              ran && comm_sent(tp) - before == 2ull * 4096 * sizeof(floatX) * (unsigned)(lab->size - 1),
              "wrong count of sent bytes");
        verify<floatX>(lab, m, &t, a.out, 0, t.total);
        uint32_t wrong = take_wrong(lab, m->stream);
        check(lab->checks, wrong == 0, "comm_reduce_direct: %u elements are wrong", wrong);
        comm_close_direct(tp);
    }
}

// --- refusals and the abort word -----------------------------------------------------------------

static void test_refusals(Lab *lab) {
    const Buffers *m = &lab->buffers[0];
    Case t = {ALL_REDUCE, 1024 * lab->size, 0, 0, false, 5};
    CommReduce good = reduce_of(lab, m, &t), a = good;
    a.partial = m->local;
    check(lab->checks, !peer_reduce_sum(lab->peers, &a, m->stream), "accepts an input that is not shared");
    a = good, a.out = m->local;
    check(lab->checks, !peer_reduce_sum(lab->peers, &a, m->stream), "accepts an output that is not shared");
    a = good, a.out = m->input + 16;
    check(lab->checks, !peer_reduce_sum(lab->peers, &a, m->stream),
          "accepts an output that overlaps the input");
    a = good, a.total = (int64_t)BUFFER_BYTES;
    check(lab->checks, !peer_reduce_sum(lab->peers, &a, m->stream), "accepts an input that is too long");
    CommGather gather = {m->input, m->local, 16, COMM_BESIDE_GEMM};
    check(lab->checks, !peer_reduce_gather(lab->peers, &gather, m->stream),
          "accepts a gather into memory that is not shared");
    Stream *more[PEER_LANES + 1];
    int accepted = 0;
    for (int i = 0; i <= PEER_LANES; i++) {
        more[i] = stream_create(lab->device, "another stream");
        accepted += peer_reduce_sum(lab->peers, &good, more[i]);
        stream_synchronize(more[i]);
    }
    check(lab->checks, accepted == PEER_LANES - STREAMS, "accepts %d more streams", accepted);
    for (int i = 0; i <= PEER_LANES; i++) stream_destroy(more[i]);
}

// One rank never arrives. The other kernels wait until the abort word is set, then end at once.
static void test_abort(Lab *lab, int missing) {
    const Buffers *m = &lab->buffers[0];
    Case t = {ALL_REDUCE, 1 << 20, 0, 0, false, 9};
    CommReduce a = reduce_of(lab, m, &t);
    if (lab->rank != missing) {
        peer_reduce_sum(lab->peers, &a, m->stream);
        CommGather gather = {m->local, m->output, 4096, COMM_BESIDE_GEMM};
        peer_reduce_gather(lab->peers, &gather, m->stream);
        check_abort(lab, m->stream);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

// --- main ----------------------------------------------------------------------------------------

static void test_all(Lab *lab) {
    if (!open_peers(lab)) return;
    test_sums(lab);
    test_gathers(lab);
    test_late_rank(lab);
    test_rounds(lab);
    // Kernels of two streams wait for each other's ranks, so the blocks of both must be resident.
    const int resident = (lab->device->multiprocessors - 4) / STREAMS;
    peer_reduce_use_blocks(lab->peers, resident < PEER_BLOCKS_MOST ? resident : PEER_BLOCKS_MOST);
    test_rounds(lab);
    if (!lab->share_gpus) test_against_steps(lab);
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

int main(int argc, char **argv) {
    return lab_main("test_peer_reduce_gpu", SECONDS_MOST, argc, argv, test_all);
}
