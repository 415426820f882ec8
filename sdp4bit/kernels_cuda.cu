// Kernels of the exact regime on GPUs: norm, step status, checksums, counts. Bit-identical to
// kernels_cpu.c. Called by tlq_hs.c, wire.c and llmc/state.
#include "sdp4bit/kernels_cuda.cuh"

// --- the norm -----------------------------------------------------------------------------------

// Loads up to 8 values at x[at]; those past n are 0. aligned: x is 16-byte aligned.
DEV_FN void load_bounded(float value[PACKED], const float *x, int64_t at, int64_t n, bool aligned) {
    if (aligned && at + PACKED <= n) {
        load_read_only(x + at, value);
        return;
    }
#pragma unroll
    for (int e = 0; e < PACKED; e++) value[e] = at + e < n ? __ldg(x + at + e) : 0.0f;
}

DEV_FN void load_bounded(float value[PACKED], const floatX *x, int64_t at, int64_t n, bool aligned) {
#pragma unroll
    for (int e = 0; e < PACKED; e++) value[e] = at + e < n ? floatX_to_float(x[at + e]) : 0.0f;
}

// 4 lanes with 8 elements each compute a partial sum. A thread has two vectors in flight.
template <class Value>
__global__ void __launch_bounds__(CODEC_THREADS)
    square_partials_kernel(float *partials, const Value *x, int64_t n, bool aligned) {
    int64_t stride = (int64_t)gridDim.x * CODEC_THREADS * PACKED,
            warp_first = ((int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x / WARP * WARP) * PACKED;
    int inside = threadIdx.x % WARP * PACKED;
    for (int64_t at = warp_first; at < n; at += 2 * stride) {
        float value[2][PACKED];
#pragma unroll
        for (int v = 0; v < 2; v++) load_bounded(value[v], x, at + v * stride + inside, n, aligned);
#pragma unroll
        for (int v = 0; v < 2; v++) {
            int64_t mine = at + v * stride + inside;
            float partial = square_partial_lanes(value[v]);
            if (threadIdx.x % 4 == 0 && mine < n) partials[mine / HADAMARD_ORDER] = partial;
        }
    }
}

template <class Value>
static void square_partials(Stream *s, float *partials, const Value *x, int64_t n, const char *name) {
    if (n <= 0) return;
    bool aligned = reinterpret_cast<uintptr_t>(x) % sizeof(float4) == 0;
    square_partials_kernel<<<stride_blocks(s, ceil_div64(n, 2 * PACKED)), CODEC_THREADS, 0,
                             stream_handle(s)>>>(partials, x, n, aligned);
    check_launch(s, name);
}

void kernel_square_partials(Stream *s, float *partials, const float *x, int64_t n) {
    square_partials(s, partials, x, n, "square partial sums");
}

void kernel_square_weights(Stream *s, float *partials, const floatX *weights, int64_t n) {
    square_partials(s, partials, weights, n, "square weights");
}

// Number of partial sums that a warp and a block reduce: 512 and 4096.
enum { ROW = 16, WARP_PARTIALS = ROW * WARP, BLOCK_PARTIALS = CODEC_WARPS * WARP_PARTIALS };

// Reduces up to five tree levels across lanes, into lane 0. A lane holds node `index` of `count`,
// and neighboring lanes hold nodes `unit` apart. Nodes without a partner do not change.
DEV_FN float tree_lanes(float x, int lanes, int64_t index, int64_t unit, int64_t count) {
    for (int stride = 1; stride < lanes; stride *= 2) {
        float upper = __shfl_down_sync(ALL_LANES, x, stride);
        if (index + stride * unit < count) x = f32_add(x, upper);
    }
    return x;
}

// Each block reduces 4096 of nodes[i * spacing] into the first of them, or on the last level into
// *sum.
__global__ void __launch_bounds__(CODEC_THREADS)
    tree_level_kernel(float *sum, float *nodes, int64_t count, int64_t spacing) {
    __shared__ float partial[CODEC_WARPS];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int64_t block_first = (int64_t)blockIdx.x * BLOCK_PARTIALS, first = block_first + warp * WARP_PARTIALS;
    float mine = 0.0f;  // lane j < 16 keeps the result of row j
#pragma unroll 4
    for (int row = 0; row < ROW; row++) {
        int64_t index = first + row * WARP + lane;
        float x = tree_lanes(index < count ? nodes[index * spacing] : 0.0f, WARP, index, 1, count);
        x = __shfl_sync(ALL_LANES, x, 0);
        if (lane == row) mine = x;
    }
    mine = tree_lanes(mine, ROW, first + lane * WARP, WARP, count);
    if (lane == 0) partial[warp] = mine;
    __syncthreads();
    if (warp > 0) return;
    mine = tree_lanes(lane < CODEC_WARPS ? partial[lane] : 0.0f, CODEC_WARPS,
                      block_first + lane * WARP_PARTIALS, WARP_PARTIALS, count);
    if (lane > 0) return;
    if (count <= BLOCK_PARTIALS) *sum = mine;
    else nodes[block_first * spacing] = mine;
}

void kernel_tree_sum(Stream *s, float *sum, float *partials, int64_t n) {
    if (n <= 0) {
        set_zero(s, sum, sizeof(float));
        return;
    }
    for (int64_t spacing = 1; spacing == 1 || ceil_div64(n, spacing) > 1; spacing *= BLOCK_PARTIALS) {
        int64_t count = ceil_div64(n, spacing);
        tree_level_kernel<<<(unsigned)ceil_div64(count, BLOCK_PARTIALS), CODEC_THREADS, 0,
                            stream_handle(s)>>>(sum, partials, count, spacing);
        check_launch(s, "tree sum");
    }
}

// --- step status --------------------------------------------------------------------------------

__global__ void step_record_kernel(StepRecord *record, const float *piece_sums, int pieces, const float *loss,
                                   const uint64_t *fault) {
    *record = step_record(piece_sums, pieces, *loss, *fault);
}

void kernel_step_record(Stream *s, StepRecord *record, const float *piece_sums, int pieces, const float *loss,
                        const uint64_t *fault) {
    step_record_kernel<<<1, 1, 0, stream_handle(s)>>>(record, piece_sums, pieces, loss, fault);
    check_launch(s, "step record");
}

__global__ void mark_fault_kernel(uint64_t *fault, const uint64_t *found, const volatile int *lost) {
    if (lost && *lost) return;
    atomicCAS(reinterpret_cast<unsigned long long *>(fault), 0ull, (unsigned long long)*found);
}

void kernel_mark_fault(Stream *s, uint64_t *fault, const uint64_t *found, const int *lost) {
    mark_fault_kernel<<<1, 1, 0, stream_handle(s)>>>(fault, found, lost);
    check_launch(s, "mark a fault");
}

__global__ void step_status_kernel(StepStatus *control, const __grid_constant__ StatusInputs a) {
    step_status(control, &a);
}

void kernel_step_status(Stream *s, StepStatus *control, const StatusInputs *a) {
    step_status_kernel<<<1, 1, 0, stream_handle(s)>>>(control, *a);
    check_launch(s, "step status");
}

// --- checksums of messages ----------------------------------------------------------------------

DEV_FN unsigned long long *seal_of(const SealMessages &a, int i) {
    return reinterpret_cast<unsigned long long *>(a.messages + i * a.bytes + seal_offset(a.bytes));
}

// Initializes each sum with the contribution of the key. sums NULL: the sums are in the messages.
__global__ void begin_sums_kernel(const __grid_constant__ SealMessages a, unsigned long long *sums) {
    int i = blockIdx.x * CODEC_THREADS + threadIdx.x;
    if (i >= a.count || i == a.skip) return;
    unsigned long long *sum = sums ? sums + i : seal_of(a, i);
    sum[0] = replica_mix(a.key, a.first + (uint32_t)i * a.stride);
    if (!sums) sum[1] = 0;
}

// blockIdx.y: the message. Threads load 16 bytes at a time and may add in any order.
__global__ void __launch_bounds__(CODEC_THREADS)
    sum_words_kernel(const __grid_constant__ SealMessages a, unsigned long long *sums) {
    int i = blockIdx.y;
    if (i == a.skip) return;
    const uint4 *words = reinterpret_cast<const uint4 *>(a.messages + i * a.bytes);
    int64_t quads = seal_offset(a.bytes) / 16;
    unsigned long long sum = 0;
    for_own_elements(quads, [&](int64_t q) {
        uint4 v = words[q];
        uint64_t at = 4 * (uint64_t)q;
        sum += replica_mix(at, v.x) + replica_mix(at + 1, v.y) + replica_mix(at + 2, v.z) +
               replica_mix(at + 3, v.w);
    });
    add_warp_sum(sums ? sums + i : seal_of(a, i), sum);
}

// One thread, so that the first wrong message is kept. Other streams may set the fault too.
__global__ void compare_sums_kernel(const __grid_constant__ SealMessages a, const unsigned long long *sums,
                                    unsigned long long *fault, uint64_t code) {
    for (int i = 0; i < a.count; i++) {
        if (i == a.skip || sums[i] == *seal_of(a, i)) continue;
        atomicCAS(fault, 0ull, code + (uint64_t)i);
        return;
    }
}

static void sum_messages(Stream *s, const SealMessages *a, unsigned long long *sums) {
    int64_t quads = a->bytes / 16;
    dim3 grid(stride_blocks(s, ceil_div64(quads, 4)), (unsigned)a->count);
    begin_sums_kernel<<<(unsigned)ceil_div64(a->count, CODEC_THREADS), CODEC_THREADS, 0, stream_handle(s)>>>(
        *a, sums);
    sum_words_kernel<<<grid, CODEC_THREADS, 0, stream_handle(s)>>>(*a, sums);
}

void kernel_seal_messages(Stream *s, const SealMessages *a) {
    sum_messages(s, a, nullptr);
    check_launch(s, "seal messages");
}

void kernel_check_messages(Stream *s, const SealMessages *a, uint64_t *sums, uint64_t *fault, uint64_t code) {
    sum_messages(s, a, reinterpret_cast<unsigned long long *>(sums));
    compare_sums_kernel<<<1, 1, 0, stream_handle(s)>>>(*a, reinterpret_cast<unsigned long long *>(sums),
                                                       reinterpret_cast<unsigned long long *>(fault), code);
    check_launch(s, "check messages");
}

// --- counts -------------------------------------------------------------------------------------

__global__ void __launch_bounds__(CODEC_THREADS)
    count_zeros_kernel(unsigned long long *count, const float *x, int64_t n) {
    unsigned long long zeros = 0;
    for_own_elements(n, [&](int64_t i) { zeros += x[i] == 0.0f; });
    add_warp_sum(count, zeros);
}

void kernel_count_zeros(Stream *s, int64_t *count, const float *x, int64_t n) {
    if (n <= 0) return;
    count_zeros_kernel<<<stride_blocks(s, n), CODEC_THREADS, 0, stream_handle(s)>>>(
        reinterpret_cast<unsigned long long *>(count), x, n);
    check_launch(s, "count zeros");
}
