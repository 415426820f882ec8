// The CUDA backend of ops.h: the language-model head. Rows are processed in chunks: logits by GEMM, then one kernel that turns them into the loss and, in
// place, into their gradient, then the two GEMMs of the backward pass. Called by train_gpt.cu through ops.h, in training and in evaluation.
#include "llmc/cuda/common.cuh"

// --- workspace: [ cuBLASLt's | logits of one chunk ] ------------------------------------------------------------------------------

// A chunk's logits take at most this much: every chunk costs a pass over the fp32 gradient of the embedding, so few large ones are better.
#define CHUNK_BYTES ((int64_t)1 << 30)
enum { CHUNK_ROW_ALIGN = 256 };  // rows of the GEMM's largest tile

int64_t op_head_chunk_rows(int64_t N, int Vp) {
    int64_t most = CHUNK_BYTES / ((int64_t)Vp * (int64_t)sizeof(floatX)) / CHUNK_ROW_ALIGN * CHUNK_ROW_ALIGN;
    if (most < CHUNK_ROW_ALIGN) most = CHUNK_ROW_ALIGN;
    if (N <= most) return N;
    return round_up64(ceil_div64(N, ceil_div64(N, most)), CHUNK_ROW_ALIGN);  // chunks of about the same size
}

size_t op_head_workspace_bytes(int64_t N, int C, int Vp) {
    return GEMM_WORKSPACE_BYTES + (size_t)op_head_chunk_rows(N, Vp) * (size_t)Vp * sizeof(floatX);
}

// --- cross-entropy ---------------------------------------------------------------------------------------------------------------

struct CrossEntropy {
    floatX *logits;          // (rows, Vp) in; with gradient, out: dlogits
    float *losses;           // (rows) out
    const int32_t *targets;  // (rows)
    const float *loss_mask;  // (rows) or NULL
    float loss_scale;
    int Vp;
    bool gradient;
};

static __device__ __forceinline__ float row_weight(const float *loss_mask, float loss_scale, int64_t row) {
    return loss_mask ? loss_mask[row] * loss_scale : loss_scale;
}

// A maximum and the sum of e^(x - maximum) so far.
struct OnlineSum {
    float max, sum;
};
static __device__ __forceinline__ OnlineSum join(OnlineSum a, OnlineSum b) {
    float max = fmaxf(a.max, b.max);
    float from_a = a.max == max ? a.sum : a.sum * fast_exp2(LOG2_E * (a.max - max)), from_b = b.max == max ? b.sum : b.sum * fast_exp2(LOG2_E * (b.max - max));
    return OnlineSum{max, from_a + from_b};
}
static __device__ __forceinline__ OnlineSum add_values(OnlineSum s, const float x[PACKED]) {
    float max = x[0];
#pragma unroll
    for (int e = 1; e < PACKED; e++) max = fmaxf(max, x[e]);
    if (max > s.max) {
        s.sum *= fast_exp2(LOG2_E * (s.max - max));  // e^-inf = 0 the first time
        s.max = max;
    }
#pragma unroll
    for (int e = 0; e < PACKED; e++) s.sum += fast_exp2(fmaf(x[e], LOG2_E, -LOG2_E * s.max));
    return s;
}

enum { ROW_THREADS = 512 };

// The row's OnlineSum from the threads' own, in a fixed order, the same in every thread.
static __device__ __forceinline__ OnlineSum block_join(OnlineSum own) {
    __shared__ OnlineSum warps[ROW_THREADS / WARP];
#pragma unroll
    for (int stride = WARP / 2; stride > 0; stride /= 2) {
        OnlineSum other = {__shfl_down_sync(0xFFFFFFFFu, own.max, stride), __shfl_down_sync(0xFFFFFFFFu, own.sum, stride)};
        own = join(own, other);
    }
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = own;
    __syncthreads();
    OnlineSum row = warps[0];
    for (int w = 1; w < ROW_THREADS / WARP; w++) row = join(row, warps[w]);
    return row;
}

// One block per row. KEEP: the row waits in shared memory between the two passes, so that global memory is read once; else it is read again,
// from the L2 as a rule. Two blocks fit a multiprocessor where one row takes less than half of its shared memory, so that loads overlap with stores.
template <bool KEEP>
__global__ void __launch_bounds__(ROW_THREADS) cross_entropy_kernel(CrossEntropy a) {
    extern __shared__ uint4 kept[];  // (Vp / 8)
    floatX *row = a.logits + (int64_t)blockIdx.x * a.Vp;
    const int target = a.targets[blockIdx.x], vectors = a.Vp / PACKED;
    const float target_logit = floatX_to_float(row[target]);
    OnlineSum own = {-INFINITY, 0.0f};
#pragma unroll 4
    for (int v = threadIdx.x; v < vectors; v += ROW_THREADS) {
        Packed128 packed = KEEP ? load_packed_streaming(row + (int64_t)v * PACKED) : load_packed(row + (int64_t)v * PACKED);
        float x[PACKED];
        unpack(packed, x);
        if (KEEP) kept[v] = packed.words;
        own = add_values(own, x);
    }
    const OnlineSum sum = block_join(own);  // its barrier also separates the last read of target_logit from the first store
    if (threadIdx.x == 0) a.losses[blockIdx.x] = logf(sum.sum) + (sum.max - target_logit);
    if (!a.gradient) return;
    const float weight = row_weight(a.loss_mask, a.loss_scale, blockIdx.x), scale = weight / sum.sum;
#pragma unroll 4
    for (int v = threadIdx.x; v < vectors; v += ROW_THREADS) {
        Packed128 packed = KEEP ? Packed128{kept[v]} : load_packed(row + (int64_t)v * PACKED);
        float x[PACKED];
        unpack(packed, x);
#pragma unroll
        for (int e = 0; e < PACKED; e++) x[e] = fast_exp2(fmaf(x[e], LOG2_E, -LOG2_E * sum.max)) * scale;
        if (v == target / PACKED) {
#pragma unroll
            for (int e = 0; e < PACKED; e++) x[e] -= e == target % PACKED ? weight : 0.0f;
        }
        store_packed(row + (int64_t)v * PACKED, pack(x));  // read next by two GEMMs
    }
}

static void cross_entropy(Stream *s, const CrossEntropy *a, int64_t rows) {
    size_t row_bytes = (size_t)a->Vp * sizeof(floatX);
    if (row_bytes + 1024 <= stream_device(s)->shared_bytes_block) {
        cuda_check(stream_site(s), cudaFuncSetAttribute(cross_entropy_kernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)row_bytes),
                   "asking for shared memory for the cross-entropy");
        cross_entropy_kernel<true><<<(unsigned)rows, ROW_THREADS, row_bytes, stream_handle(s)>>>(*a);
    } else {
        cross_entropy_kernel<false><<<(unsigned)rows, ROW_THREADS, 0, stream_handle(s)>>>(*a);
    }
    check_launch(s, "cross-entropy");
}

// *loss_sum += sum of losses[n] * weight[n]: thread t adds rows t, t + 1024, ... in order, then a fixed tree joins the threads. Not the CPU backend's
// order, but the same at every run.
__global__ void __launch_bounds__(1024) loss_sum_kernel(float *loss_sum, const float *losses, const float *loss_mask, float loss_scale, int64_t N) {
    __shared__ float shared[32];
    float sum = 0.0f;
    for (int64_t n = threadIdx.x; n < N; n += 1024) sum += losses[n] * row_weight(loss_mask, loss_scale, n);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *loss_sum += sum;
}

void op_head(Stream *s, float *losses, float *loss_sum, floatX *dx, float *dwte, const floatX *x, const floatX *wte, const int32_t *targets,
             const float *loss_mask, float loss_scale, int64_t N, int C, int Vp, bool overwrite, void *workspace) {
    if (Vp % PACKED || C % PACKED) {
        fatal(stream_site(s), EXIT_USAGE, "a vocabulary of %d rows and a hidden size of %d: the GPU needs multiples of %d; see --make-vocab-size-divisible-by", Vp, C, (int)PACKED);
    }
    if (N == 0) return;
    floatX *logits = (floatX *)((uint8_t *)workspace + GEMM_WORKSPACE_BYTES);  // (rows, Vp)
    int64_t chunk = op_head_chunk_rows(N, Vp);
    for (int64_t row = 0; row < N; row += chunk) {
        int64_t rows = N - row < chunk ? N - row : chunk;
        matmul_nt(s, logits, x + row * C, wte, rows, Vp, C, workspace);
        CrossEntropy a = {logits, losses + row, targets + row, loss_mask ? loss_mask + row : NULL, loss_scale, Vp, dx || dwte};
        cross_entropy(s, &a, rows);
        if (dwte) matmul_tn(s, dwte, logits, x + row * C, Vp, C, rows, overwrite && row == 0, workspace);
        if (dx) matmul_nn(s, dx + row * C, logits, wte, rows, C, Vp, workspace);
    }
    loss_sum_kernel<<<1, 1024, 0, stream_handle(s)>>>(loss_sum, losses, loss_mask, loss_scale, N);
    check_launch(s, "loss sum");
}
