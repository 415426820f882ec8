// Collectives over peer memory: see peer_reduce.h.
//
// A kernel has two barriers (peer_barrier.cuh). The first one waits until the other ranks have
// launched the same kernel: then their input is complete and their output may be overwritten,
// because the launch follows all earlier work of their streams. Between the barriers, each rank
// sums its range of the elements, read from all ranks (reduce), and writes the result into the
// output of all ranks (all-gather). Every element is read and written by one thread of one rank
// only, so an all-reduce may work in place. The second barrier waits until the other ranks have
// written this rank's output and have read its input.
#include <string.h>

#include "llmc/cuda/limits.h"
#include "llmc/cuda/peer_barrier.cuh"
#include "llmc/cuda/peer_memory.h"
#include "llmc/cuda/peer_norm.h"
#include "llmc/cuda/peer_reduce.h"
#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/peers.h"

static_assert((int)PEER_RANKS == (int)COMM_DIRECT_RANKS, "comm.h documents the number of ranks");

struct PeerSum {
    PeerBarrier barrier;
    const void *part[PEER_RANKS];  // (count) this rank's range in each rank's input
    void *to[PEER_RANKS];          // (count) destinations of the sums, starting with this rank's own
    int destinations;
    void *late;  // (count) copy of to[0] after the last barrier; NULL: none
    int64_t count;
    const void *bias;  // (C) or NULL
    int C, column;     // column: index of element 0 within its row
    bool vectors, bias_vectors;
};

struct PeerGather {
    PeerBarrier barrier;
    const uint8_t *own;
    uint8_t *to[PEER_RANKS];
    int destinations;
    int64_t bytes;
    bool vectors;
};

// --- elements ------------------------------------------------------------------------------------

// COUNT elements that a thread loads with one access and sums in fp32.
template <class T> struct Vector;
template <> struct Vector<floatX> {
    enum { COUNT = PACKED };
    typedef Packed128 Raw;
    static __device__ __forceinline__ Raw load(const floatX *p) { return load_packed_streaming(p); }
    static __device__ __forceinline__ void widen(Raw v, float *x) { unpack(v, x); }
    static __device__ __forceinline__ Raw narrow(const float *x) { return pack(x); }
    static __device__ __forceinline__ void store(floatX *p, Raw v) { store_packed(p, v); }
};
template <> struct Vector<float> {
    enum { COUNT = 4 };
    typedef float4 Raw;
    static __device__ __forceinline__ Raw load(const float *p) { return __ldcs((const float4 *)p); }
    static __device__ __forceinline__ void widen(Raw v, float *x) {
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    }
    static __device__ __forceinline__ Raw narrow(const float *x) {
        return make_float4(x[0], x[1], x[2], x[3]);
    }
    static __device__ __forceinline__ void store(float *p, Raw v) { *(float4 *)p = v; }
};
static __device__ __forceinline__ float widen(floatX x) { return floatX_to_float(x); }
static __device__ __forceinline__ float widen(float x) { return x; }
static __device__ __forceinline__ void narrow(floatX *y, float x) { *y = floatX_from_float(x); }
static __device__ __forceinline__ void narrow(float *y, float x) { *y = x; }
template <class T> struct Single {
    enum { COUNT = 1 };
    typedef T Raw;
    static __device__ __forceinline__ Raw load(const T *p) { return __ldcs(p); }
    static __device__ __forceinline__ void widen(Raw v, float *x) { *x = ::widen(v); }
    static __device__ __forceinline__ Raw narrow(const float *x) {
        T y;
        ::narrow(&y, *x);
        return y;
    }
    static __device__ __forceinline__ void store(T *p, Raw v) { *p = v; }
};

// Adds the bias of columns column .. column + COUNT - 1 (modulo C). whole: they are one aligned
// vector.
template <class T, class V>
static __device__ __forceinline__ void add_bias(float *sum, const T *bias, int column, int C, bool whole) {
    float b[V::COUNT];
    if (whole) V::widen(V::load(bias + column), b);
#pragma unroll
    for (int e = 0; e < V::COUNT; e++) {
        if (!whole) b[e] = ::widen(bias[(column + e) % C]);
        sum[e] = __fadd_rn(sum[e], b[e]);
    }
}

// --- reduce --------------------------------------------------------------------------------------

// Sums parts in rank order, adds the bias and rounds once, as op_sum_parts and op_add_parts do.
template <class T, class V, int RANKS>
static __device__ __forceinline__ typename V::Raw sum_of(const PeerSum &a, const typename V::Raw *part,
                                                         int64_t i) {
    float sum[V::COUNT], x[V::COUNT];
    V::widen(part[0], sum);
#pragma unroll
    for (int r = 1; r < RANKS; r++) {
        if (r >= a.barrier.size) continue;
        V::widen(part[r], x);
#pragma unroll
        for (int e = 0; e < V::COUNT; e++) sum[e] = __fadd_rn(sum[e], x[e]);
    }
    if (a.bias) {
        int column = (int)((a.column + i) % a.C);
        add_bias<T, V>(sum, (const T *)a.bias, column, a.C, V::COUNT == 1 || a.bias_vectors);
    }
    return V::narrow(sum);
}

// Sums elements first .. first + vectors * COUNT - 1 of the range. RANKS: upper bound of the
// number of ranks. Each thread has about 8 loads in flight, because the bandwidth of loads from
// other GPUs is limited by their latency.
template <class T, class V, int RANKS>
static __device__ __forceinline__ void sum_range(const PeerSum &a, int64_t first, int64_t vectors) {
    constexpr int UNROLL = 8 / RANKS;
    const int64_t stride = (int64_t)gridDim.x * PEER_THREADS;
    for (int64_t v = (int64_t)blockIdx.x * PEER_THREADS + threadIdx.x; v < vectors; v += UNROLL * stride) {
        typename V::Raw part[UNROLL][RANKS];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int64_t i = first + (v + u * stride) * V::COUNT;
#pragma unroll
            for (int r = 0; r < RANKS; r++) {
                if (v + u * stride < vectors && r < a.barrier.size)
                    part[u][r] = V::load((const T *)a.part[r] + i);
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int64_t i = first + (v + u * stride) * V::COUNT;
            if (v + u * stride >= vectors) continue;
            typename V::Raw sum = sum_of<T, V, RANKS>(a, part[u], i);
#pragma unroll
            for (int d = 0; d < RANKS; d++) {
                if (d < a.destinations) V::store((T *)a.to[d] + i, sum);
            }
        }
    }
}

// Copies the same elements from to[0] to `late`. Each thread copies what it has written.
template <class T, class V>
static __device__ void copy_late(const PeerSum &a, int64_t first, int64_t vectors) {
    const int64_t stride = (int64_t)gridDim.x * PEER_THREADS;
    for (int64_t v = (int64_t)blockIdx.x * PEER_THREADS + threadIdx.x; v < vectors; v += stride)
        V::store((T *)a.late + first + v * V::COUNT, V::load((const T *)a.to[0] + first + v * V::COUNT));
}

template <class T, int RANKS>
__global__ void __launch_bounds__(PEER_THREADS, 1) peer_sum_kernel(const __grid_constant__ PeerSum a) {
    typedef Vector<T> V;
    const int64_t vectors = a.vectors ? a.count / V::COUNT : 0, rest = vectors * V::COUNT;
    if (!wait_for_ranks(a.barrier, a.barrier.number)) return;
    sum_range<T, V, RANKS>(a, 0, vectors);
    sum_range<T, Single<T>, RANKS>(a, rest, a.count - rest);
    if (!wait_for_ranks(a.barrier, a.barrier.number + 1) || !a.late) return;
    copy_late<T, V>(a, 0, vectors);
    copy_late<T, Single<T>>(a, rest, a.count - rest);
}

// --- all-gather ----------------------------------------------------------------------------------

// Copies elements first .. first + count - 1 of type V to all destinations.
template <class V>
static __device__ __forceinline__ void gather_range(const PeerGather &a, int64_t first, int64_t count) {
    constexpr int UNROLL = 4;
    const int64_t stride = (int64_t)gridDim.x * PEER_THREADS;
    for (int64_t v = (int64_t)blockIdx.x * PEER_THREADS + threadIdx.x; v < count; v += UNROLL * stride) {
        V x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (v + u * stride < count) x[u] = __ldcs((const V *)a.own + first + v + u * stride);
        }
        for (int d = 0; d < a.destinations; d++) {
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                if (v + u * stride < count) ((V *)a.to[d])[first + v + u * stride] = x[u];
            }
        }
    }
}

__global__ void __launch_bounds__(PEER_THREADS, 1) peer_gather_kernel(const __grid_constant__ PeerGather a) {
    const int64_t vectors = a.vectors ? a.bytes / PEER_VECTOR : 0, rest = vectors * PEER_VECTOR;
    if (!wait_for_ranks(a.barrier, a.barrier.number)) return;
    gather_range<uint4>(a, 0, vectors);
    gather_range<unsigned char>(a, rest, a.bytes - rest);
    wait_for_ranks(a.barrier, a.barrier.number + 1);
}

// --- launches ------------------------------------------------------------------------------------

typedef void (*SumKernel)(PeerSum);

struct PeerReduce {
    Device *device;
    Peers ranks;  // without a site, as in peer_memory.cu
    int rank, size;
    PeerMemory *memory;
    int *abort;                    // page-locked
    const void *user[PEER_LANES];  // stream of each lane, NULL: free
    uint32_t number[PEER_LANES];   // number of the lane's last barrier
    int blocks[COMM_BESIDES];      // maximum of a launch
    bool normalizes_all;           // peer_normalizes_all
    SumKernel sum, sum_fp32;
};

template <class T> static SumKernel sum_kernel(int size) {
    return size <= 2 ? peer_sum_kernel<T, 2> : size <= 4 ? peer_sum_kernel<T, 4> : peer_sum_kernel<T, 8>;
}

// Returns the barriers of a launch on the lane.
static PeerBarrier next_barrier(PeerReduce *n, int lane) {
    PeerBarrier b = {};
    for (int r = 0; r < n->size; r++)
        b.flags[r] = (uint32_t *)(peer_memory_flags(n->memory, r) + peer_lane_offset(lane));
    b.abort = n->abort;
    b.number = n->number[lane] + 1;
    b.rank = n->rank;
    b.size = n->size;
    n->number[lane] += BARRIERS;
    return b;
}

static void *of_rank(const PeerReduce *n, int r, const void *memory, size_t bytes) {
    return peer_memory_of(n->memory, r, memory, bytes);
}

// Returns true if the kernel can run: its buffers are shared, and the output is the input or does
// not overlap it.
static bool can_sum(const PeerReduce *n, const CommReduce *a, size_t bytes) {
    size_t out_bytes = a->scatter ? bytes / (size_t)n->size : bytes;
    if (!peer_memory_hold(n->memory, a->partial, bytes)) return false;
    if (!a->scatter && !peer_memory_hold(n->memory, a->out, bytes)) return false;
    return a->out == a->partial || !peer_overlap(a->partial, bytes, a->out, out_bytes);
}

// Fills in the addresses of this rank's range. A reduce-scatter in place writes its sums to
// scratch, because rank 0 reads the output's memory as input; they are copied after the last
// barrier.
static void set_addresses(const PeerReduce *n, const CommReduce *a, size_t bytes, size_t element,
                          PeerSum *sum) {
    PeerRange range = peer_range(a->total, n->size, n->rank, a->scatter, element);
    size_t start = (size_t)range.first * element;
    uintptr_t address = a->scatter ? (uintptr_t)range.count * element : 0;
    sum->count = range.count;
    sum->destinations = a->scatter ? 1 : n->size;
    for (int r = 0; r < n->size; r++) {
        const uint8_t *part = (const uint8_t *)of_rank(n, r, a->partial, bytes);
        sum->part[r] = part + start;
        address |= (uintptr_t)part;
    }
    for (int i = 0; i < n->size && !a->scatter; i++) {
        uint8_t *out = (uint8_t *)of_rank(n, (n->rank + i) % n->size, a->out, bytes);
        sum->to[i] = out + start;
        address |= (uintptr_t)out;
    }
    if (a->scatter) {
        bool in_place = a->out == a->partial;
        sum->to[0] = in_place ? a->scratch : a->out;
        sum->late = in_place ? a->out : NULL;
        address |= (uintptr_t)sum->to[0] | (uintptr_t)sum->late;
    }
    sum->vectors = address % PEER_VECTOR == 0;
    sum->bias = a->bias;
    sum->C = a->C;
    sum->column = a->bias ? (int)(range.first % a->C) : 0;
    sum->bias_vectors = ((uintptr_t)a->bias | (uintptr_t)a->C * element) % PEER_VECTOR == 0;
}

bool peer_reduce_sum(PeerReduce *n, const CommReduce *a, Stream *stream) {
    size_t element = a->fp32 ? sizeof(float) : sizeof(floatX), bytes = (size_t)a->total * element;
    if (!can_sum(n, a, bytes)) return false;
    int lane = peer_lane(n->user, stream);
    if (lane < 0) return false;
    PeerSum sum = {};
    set_addresses(n, a, bytes, element, &sum);
    PeerRange longest = peer_range(a->total, n->size, 0, a->scatter, element);
    sum.barrier = next_barrier(n, lane);
    int blocks = peer_blocks(longest.count * (int64_t)element, PEER_BLOCK_BYTES, n->blocks[a->beside]);
    heartbeat_waiting(device_site(n->device), true);  // with a full queue, launching blocks
    (a->fp32 ? n->sum_fp32 : n->sum)<<<blocks, PEER_THREADS, 0, stream_handle(stream)>>>(sum);
    check_launch(stream, "reduction over peer memory");
    heartbeat_waiting(device_site(n->device), false);
    return true;
}

bool peer_reduce_gather(PeerReduce *n, const CommGather *a, Stream *stream) {
    size_t all = (size_t)n->size * a->bytes, slot = (size_t)n->rank * a->bytes;
    if (!peer_memory_hold(n->memory, a->whole, all)) return false;
    int lane = peer_lane(n->user, stream);
    if (lane < 0) return false;
    PeerGather gather = {};
    gather.own = (const uint8_t *)a->own;
    gather.bytes = (int64_t)a->bytes;
    uintptr_t address = (uintptr_t)a->own;
    for (int i = 0; i < n->size; i++) {
        uint8_t *to = (uint8_t *)of_rank(n, (n->rank + i) % n->size, a->whole, all) + slot;
        if (to == a->own) continue;
        gather.to[gather.destinations++] = to;
        address |= (uintptr_t)to;
    }
    gather.vectors = address % PEER_VECTOR == 0;
    gather.barrier = next_barrier(n, lane);
    int blocks = peer_blocks(gather.bytes, PEER_BLOCK_BYTES, n->blocks[a->beside]);
    heartbeat_waiting(device_site(n->device), true);
    peer_gather_kernel<<<blocks, PEER_THREADS, 0, stream_handle(stream)>>>(gather);
    check_launch(stream, "all-gather over peer memory");
    heartbeat_waiting(device_site(n->device), false);
    return true;
}

// Returns true if peer_norm_kernel can run. Every rank either normalizes its own rows and sends
// them to all ranks, or all rows for itself. The latter reads all partial sums of all ranks, which
// for more than two ranks is more than an all-reduce transfers, and needs many blocks.
static bool can_normalize(const PeerReduce *n, const CommNorm *a) {
    const LayerNorm *norm = a->norm;
    int64_t N = (int64_t)norm->B * norm->T, rows = rows_held(norm->rows, norm->B, norm->T);
    size_t bytes = (size_t)(N * norm->C) * sizeof(floatX);
    size_t own = (size_t)(rows * norm->C) * sizeof(floatX);
    const void *const vectors[] = {a->partial, a->bias,     a->whole,   norm->x,
                                   norm->y,    norm->gamma, norm->beta, norm->residual};
    const void *const separate[] = {a->whole, norm->x, norm->y, norm->residual};
    const size_t separate_bytes[] = {bytes, own, own, own};
    bool split = rows * n->size == N && norm->rows.first == n->rank * rows;
    bool whole = rows == N && !a->whole && n->normalizes_all;
    if ((!split && !whole) || !norm->gamma || !norm->residual || norm->dropout.p > 0.0f) return false;
    if (norm->C % LIMIT_MULTIPLE || norm->C > LIMIT_HIDDEN) return false;
    for (const void *p : vectors)
        if ((uintptr_t)p % PEER_VECTOR) return false;
    for (int i = 0; i < 4; i++)
        if (peer_overlap(a->partial, bytes, separate[i], separate[i] ? separate_bytes[i] : 0)) return false;
    return peer_memory_hold(n->memory, a->partial, bytes) &&
           (!a->whole || peer_memory_hold(n->memory, a->whole, bytes));
}

bool peer_reduce_norm(PeerReduce *n, const CommNorm *a, Stream *stream) {
    if (!can_normalize(n, a)) return false;
    int lane = peer_lane(n->user, stream);
    if (lane < 0) return false;
    PeerNorm norm = {};
    norm.norm = *a->norm;
    norm.bias = a->bias;
    norm.rows = rows_held(a->norm->rows, a->norm->B, a->norm->T);
    int64_t start = a->norm->rows.first * a->norm->C;
    size_t bytes = (size_t)a->norm->B * (size_t)a->norm->T * (size_t)a->norm->C * sizeof(floatX);
    for (int r = 0; r < n->size; r++) norm.part[r] = (floatX *)of_rank(n, r, a->partial, bytes) + start;
    for (int i = 0; i < n->size && a->whole; i++)
        norm.to[norm.destinations++] = (floatX *)of_rank(n, (n->rank + i) % n->size, a->whole, bytes) + start;
    PeerNormShape shape = peer_norm_shape(a->norm->C, n->size);
    norm.barrier = next_barrier(n, lane);
    int blocks = peer_blocks(norm.rows, shape.rows, n->blocks[COMM_WITHOUT_GEMM]);
    heartbeat_waiting(device_site(n->device), true);
    shape.kernel<<<blocks, shape.threads, 0, stream_handle(stream)>>>(norm);
    check_launch(stream, "reduction and norm over peer memory");
    heartbeat_waiting(device_site(n->device), false);
    return true;
}

void peer_reduce_use_blocks(PeerReduce *n, int blocks) {
    for (int &most : n->blocks) most = blocks;
}
int *peer_reduce_abort_word(PeerReduce *n) { return n->abort; }

// --- start and end -------------------------------------------------------------------------------

// Loads a kernel. CUDA would load it at the first launch, and might then wait for kernels that wait
// for other ranks.
static bool load_kernel(const void *kernel, Error *err) {
    cudaFuncAttributes attributes;
    cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status == cudaSuccess) return true;
    cudaGetLastError();  // clears the error, which check_launch would report otherwise
    return system_error(err, "loading the kernels for peer memory failed: %s", cudaGetErrorString(status));
}

static bool load_kernels(PeerReduce *n, Error *err) {
    n->sum = sum_kernel<floatX>(n->size);
    n->sum_fp32 = sum_kernel<float>(n->size);
    bool ok = load_kernel((const void *)n->sum, err) && load_kernel((const void *)n->sum_fp32, err) &&
              load_kernel((const void *)peer_gather_kernel, err);
    for (int C = WARP * PACKED; ok && C <= LIMIT_HIDDEN; C += WARP * PACKED)  // every shape of a row
        ok = load_kernel((const void *)peer_norm_shape(C, n->size).kernel, err);
    return ok;
}

// Waits for the stream, but sets the abort word after PEER_TEST_SECONDS and then returns false.
static bool ends_in_time(PeerReduce *n, Stream *stream) {
    volatile int *abort = n->abort;
    double until = monotonic_seconds() + PEER_TEST_SECONDS;
    while (cudaStreamQuery(stream_handle(stream)) == cudaErrorNotReady && !*abort)
        *abort = monotonic_seconds() > until;
    cudaGetLastError();  // clears cudaErrorNotReady
    stream_synchronize(stream);
    bool in_time = !*abort;
    *abort = 0;
    return in_time;
}

// Tests an all-reduce of small integers in the first bytes of `memory`, then zeroes them.
// Collective.
static bool try_sum(PeerReduce *n, void *memory, size_t bytes, Error *err) {
    enum { MOST = 4096 };
    static const char wrong[] = "an all-reduce over peer memory gives wrong sums";
    floatX host[MOST];
    int count = bytes / sizeof *host < MOST ? (int)(bytes / sizeof *host) : MOST, size = n->size;
    Stream *stream = stream_create(n->device, "first all-reduce");
    CommReduce sum = {};
    sum.partial = sum.out = memory;
    sum.total = count;
    for (int i = 0; i < count; i++) host[i] = floatX_from_float((float)(n->rank + 1 + i % 8));
    copy_to_device(stream, memory, host, (size_t)count * sizeof *host);
    stream_synchronize(stream);
    heartbeat_waiting(device_site(n->device), true);  // again: stream functions reset it
    peers_barrier(n->ranks);
    bool ok = peer_reduce_sum(n, &sum, stream) || system_error(err, "a buffer is not in peer memory");
    if (ok && !ends_in_time(n, stream)) {
        ok = system_error(err, "an all-reduce over peer memory did not end within %g s", PEER_TEST_SECONDS);
    }
    copy_to_host(stream, host, memory, (size_t)count * sizeof *host);
    stream_synchronize(stream);
    for (int i = 0; ok && i < count; i++) {
        float want = (float)(size * (size + 1) / 2 + size * (i % 8));
        ok = floatX_to_float(host[i]) == want || system_error(err, wrong);
    }
    heartbeat_waiting(device_site(n->device), true);
    ok = peers_agree(n->ranks, ok, err, NULL);  // also waits until all ranks have read their sums
    set_zero(stream, memory, (size_t)count * sizeof *host);
    stream_destroy(stream);  // synchronizes
    memset(n->user, 0, sizeof n->user);
    heartbeat_waiting(device_site(n->device), true);
    peers_barrier(n->ranks);
    heartbeat_waiting(device_site(n->device), false);
    return ok;
}

static bool open_peers(PeerReduce *n, void *flags, const CommPiece *piece, int pieces, int collectives,
                       Error *err) {
    bool ok = n->size >= 2 && n->size <= PEER_RANKS;
    if (!ok)
        system_error(err, "a group has %d ranks, but 2 to %d can reduce in peer memory", n->size, PEER_RANKS);
    else ok = load_kernels(n, err);
    if (ok) ok = (n->abort = (int *)host_alloc(n->device, sizeof(int), "the abort word", err)) != NULL;
    if (!peers_agree(n->ranks, ok, err, NULL)) return false;
    for (int i = 0; i < COMM_BESIDES; i++)
        n->blocks[i] = peer_most_blocks((CommBeside)i, n->device->multiprocessors, collectives);
    peers_all_reduce(n->ranks, n->blocks, COMM_BESIDES, MPI_INT, MPI_MIN);
    n->normalizes_all = peer_normalizes_all(n->size, n->blocks[COMM_WITHOUT_GEMM]);
    if (!peer_memory_share(n->memory, flags, piece, pieces, err)) return false;
    for (int i = 0; i < pieces; i++) {
        if (piece[i].bytes) return try_sum(n, piece[i].memory, piece[i].bytes, err);
    }
    return system_error(err, "there is no memory to share");
}

PeerReduce *peer_reduce_open(Device *device, MPI_Comm group, void *flags, const CommPiece *piece, int pieces,
                             int collectives, Error *err) {
    PeerReduce *n = (PeerReduce *)xcalloc(1, sizeof *n, "peer memory");
    n->device = device;
    n->ranks = {group, 0, NULL};
    MPI_Comm_rank(group, &n->rank);
    MPI_Comm_size(group, &n->size);
    n->memory = peer_memory_open(device, group);
    heartbeat_waiting(device_site(device), true);
    bool ok = open_peers(n, flags, piece, pieces, collectives, err);
    heartbeat_waiting(device_site(device), false);
    if (!ok) {
        peer_reduce_close(n);
        return NULL;
    }
    heartbeat_set_abort(device_site(device), n->abort);
    return n;
}

void peer_reduce_close(PeerReduce *n) {
    heartbeat_set_abort(device_site(n->device), NULL);
    peer_memory_close(n->memory);
    if (n->abort) host_free(n->device, n->abort);
    free(n);
}
