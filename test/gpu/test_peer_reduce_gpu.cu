// Tests the collectives over peer memory (llmc/cuda/peer_reduce.h) with one GPU per rank, bit for
// bit against sums computed from the known inputs and against the path that they replace:
// all-to-all, op_sum_parts and all-gather.
//
//   mpirun -n 2 test_peer_reduce_gpu [--rounds N] [--group N] [--share-gpus]
//
//   rounds      consecutive collectives with random sizes and delays [1000]
//   group       ranks of a group, a divisor of all ranks [all]; the groups run at the same time
//   share-gpus  allows several ranks per GPU, to test more ranks than GPUs. Their kernels run in
//               turns, so use few rounds. Skips the comparison through NCCL
#include <mpi.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "llmc/comm.h"
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/peer_layout.h"
#include "llmc/cuda/peer_reduce.h"
#include "llmc/ranks/devices.h"
#include "test/gpu/check.h"

enum { GUARD = 64, POISON = 0xFF, MOST_BIAS = 4096, STREAMS = 2 };
enum { SECONDS_MOST = 180 };               // a kernel that hangs ends the test
#define MOST_ELEMENTS ((int64_t)20 << 20)  // in a buffer
#define BUFFER_BYTES (4 * (size_t)MOST_ELEMENTS)

// Buffers of one stream. input and output are in shared memory.
typedef struct Buffers {
    uint8_t *input, *output, *local, *scratch;  // (BUFFER_BYTES)
    Stream *stream;
} Buffers;

typedef struct Lab {
    Checks *checks;
    Device *device;
    Mesh mesh;
    int rank, size, rounds;
    bool share_gpus;
    void *flags;
    float *bias_fp32;  // (MOST_BIAS)
    floatX *bias;      // (MOST_BIAS)
    Buffers buffers[STREAMS];
    uint32_t *wrong;  // (1) on the device: number of wrong elements
    Stream *busy;
    PeerReduce *peers;
} Lab;

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

// Element i of a rank's input. Magnitudes differ by up to 2^15, so that the order of addends
// matters.
static __device__ float value_of(int64_t i, uint32_t seed, int rank) {
    uint32_t x = ((uint32_t)i * 0x9E3779B1u + (uint32_t)(i >> 32)) ^
                 (seed * 16u + (uint32_t)rank) * 0x85EBCA77u;
    x = (x ^ x >> 15) * 0x2C1B3C6Du;
    x = (x ^ x >> 12) * 0x297A2D39u;
    x ^= x >> 15;
    return ldexpf((float)(int32_t)(x & 0xFFFFFF00u) * 0x1p-31f, (int)(x & 15u) - 8);
}
static __device__ float value_as(float *, int64_t i, uint32_t seed, int rank) {
    return value_of(i, seed, rank);
}
static __device__ floatX value_as(floatX *, int64_t i, uint32_t seed, int rank) {
    return floatX_from_float(value_of(i, seed, rank));
}
static __device__ float as_float(float x) { return x; }
static __device__ float as_float(floatX x) { return floatX_to_float(x); }
static __device__ uint32_t bits_of(float x) { return __float_as_uint(x); }
static __device__ uint32_t bits_of(floatX x) { return x; }
static __device__ void rounded(float *y, float x) { *y = x; }
static __device__ void rounded(floatX *y, float x) { *y = floatX_from_float(x); }

enum { BIAS = 15 };  // "rank" of the bias values
template <class T> static __global__ void fill_kernel(T *p, int64_t n, uint32_t seed, int rank) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll)
        p[i] = value_as(p, i, seed, rank);
}
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
static __global__ void count_different(uint32_t *wrong, const uint8_t *p, uint8_t byte, int64_t n) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll)
        if (p[i] != byte) atomicAdd(wrong, 1u);
}
static __global__ void delay_kernel(long long cycles) {
    for (long long start = clock64(); clock64() - start < cycles;) continue;
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

static uint32_t take_wrong(const Lab *lab, Stream *stream) {
    uint32_t wrong = 0;
    stream_synchronize(lab->buffers[0].stream);
    stream_synchronize(lab->buffers[1].stream);
    copy_to_host(stream, &wrong, lab->wrong, sizeof wrong);
    set_zero(stream, lab->wrong, sizeof wrong);
    stream_synchronize(stream);
    return wrong;
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
    if (!peer_reduce_gather(lab->peers, own, whole, bytes, m->stream)) return false;
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

static uint32_t draw(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

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
    check(lab->checks, !peer_reduce_gather(lab->peers, m->input, m->local, 16, m->stream),
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

// Waits until the stream is idle, up to `seconds`.
static bool idle_within(Stream *stream, double seconds) {
    for (double until = monotonic_seconds() + seconds; monotonic_seconds() < until; usleep(1000))
        if (cudaStreamQuery(stream_handle(stream)) == cudaSuccess) return true;
    cudaGetLastError();
    return false;
}

// One rank never arrives. The other kernels wait until the abort word is set, then end at once.
static void test_abort(Lab *lab, int missing) {
    const Buffers *m = &lab->buffers[0];
    Case t = {ALL_REDUCE, 1 << 20, 0, 0, false, 9};
    CommReduce a = reduce_of(lab, m, &t);
    if (lab->rank != missing) {
        peer_reduce_sum(lab->peers, &a, m->stream);
        peer_reduce_gather(lab->peers, m->local, m->output, 4096, m->stream);
        check(lab->checks, !idle_within(m->stream, 0.5), "a kernel did not wait for the missing rank");
        *(volatile int *)peer_reduce_abort_word(lab->peers) = 1;
        if (!check(lab->checks, idle_within(m->stream, 5), "a kernel ignores the abort word")) {
            fprintf(stderr, "FAILED: the kernel hangs\n");
            _exit(1);
        }
        *(volatile int *)peer_reduce_abort_word(lab->peers) = 0;
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

// --- main ----------------------------------------------------------------------------------------

static bool open_peers(Lab *lab) {
    Error err = {};
    CommPiece piece[2 * STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        piece[2 * i] = {lab->buffers[i].input, BUFFER_BYTES};
        piece[2 * i + 1] = {lab->buffers[i].output, BUFFER_BYTES};
    }
    lab->peers = peer_reduce_open(lab->device, lab->mesh.tp.mpi, lab->flags, piece, 2 * STREAMS, &err);
    return check(lab->checks, lab->peers != NULL, "not opened: %s", err.what);
}

static void *allocate(const Lab *lab, size_t bytes) {
    Error err = {};
    void *memory = device_alloc(lab->device, bytes, "the test", &err);
    if (!memory) fatal(NULL, err.code, "%s", err.what);
    return memory;
}

static void open_lab(Lab *lab) {
    lab->flags = allocate(lab, COMM_FLAG_BYTES);
    lab->bias = (floatX *)allocate(lab, MOST_BIAS * sizeof(floatX));
    lab->bias_fp32 = (float *)allocate(lab, MOST_BIAS * sizeof(float));
    lab->wrong = (uint32_t *)allocate(lab, sizeof(uint32_t));
    lab->busy = stream_create(lab->device, "busy");
    fill_kernel<<<16, 256, 0, stream_handle(lab->busy)>>>(lab->bias, MOST_BIAS, 1, BIAS);
    fill_kernel<<<16, 256, 0, stream_handle(lab->busy)>>>(lab->bias_fp32, MOST_BIAS, 1, BIAS);
    check_launch(lab->busy, "fill");
    stream_synchronize(lab->busy);
    for (int i = 0; i < STREAMS; i++) {
        Buffers *m = &lab->buffers[i];
        uint8_t **memory[] = {&m->input, &m->output, &m->local, &m->scratch};
        for (int j = 0; j < 4; j++) *memory[j] = (uint8_t *)allocate(lab, BUFFER_BYTES);
        m->stream = stream_create_urgent(lab->device, "collectives");
    }
}

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
    if (!lab->share_gpus) test_comm(lab);
}

static void usage(void) {
    fatal(NULL, EXIT_USAGE,
          "usage: test_peer_reduce_gpu [--rounds N] [--group N] [--share-gpus], 2 to 8 ranks");
}

// Builds the groups and opens this rank's GPU.
static void place(Lab *lab, int group) {
    Error err = {};
    int rank = 0, size = 1, gpus = device_count();
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int *host_of_rank = (int *)calloc((size_t)size, sizeof(int));
    if (!mesh_build(&lab->mesh, rank, size, host_of_rank, size, group ? group : size, 1, &err) ||
        lab->mesh.tp.size < 2)
        usage();
    free(host_of_rank);
    lab->rank = lab->mesh.tp.rank;
    lab->size = lab->mesh.tp.size;
    lab->device = device_open(lab->share_gpus && gpus > 0 ? rank % gpus : rank, NULL, &err);
    if (!lab->device || !mesh_open(&lab->mesh, {MPI_COMM_WORLD, 60, NULL}, &err))
        fatal(NULL, err.code, "%s", err.what);
}

int main(int argc, char **argv) {
    Checks checks = {"test_peer_reduce_gpu", 0, 0};
    Lab lab = {};
    int group = 0;
    MPI_Init(&argc, &argv);
    lab.checks = &checks;
    lab.rounds = 1000;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--share-gpus")) lab.share_gpus = true;
        else if (!strcmp(argv[i], "--rounds") && i + 1 < argc) lab.rounds = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--group") && i + 1 < argc) group = atoi(argv[++i]);
        else usage();
    }
    alarm(SECONDS_MOST);
    place(&lab, group);
    open_lab(&lab);
    if (!lab.share_gpus) {
        comm_open(&lab.mesh, lab.device, 60);
        comm_connect(&lab.mesh, lab.buffers[0].local);
    }
    test_all(&lab);
    if (!lab.share_gpus) comm_close(&lab.mesh);
    int failed = checks.failed, rank = lab.mesh.world.rank;
    mesh_close(&lab.mesh);
    MPI_Allreduce(&failed, &checks.failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    int rc = rank == 0 ? checks_end(&checks) : checks.failed != 0;
    MPI_Finalize();
    return rc;
}
