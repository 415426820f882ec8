// Tensor and sequence parallelism: the collectives among the ranks that share the layers.
//
//   tensor_parallel.c  reductions and gathers
//   tensor_codes.c     the same in 8 bits
//
// Collectives of tensor parallelism (Megatron-LM, arXiv 1909.08053) and sequence parallelism (arXiv
// 2205.05198). Every rank of the group holds some attention heads, some columns of the feed-forward
// layer and some vocabulary rows. Row-parallel GEMMs produce partial sums, which are reduced here.
//
// Rows refer to the flattened (B*T) micro-batch. Between the GEMMs every rank holds all rows;
// with --sequence-parallel rank t holds only the t-th of equal blocks. Sums are computed in fp32 in
// rank order and rounded once, so they are bitwise identical on every rank, backend and run.
//
// Collectives run on their own stream, `side`, after the work queued on the compute stream so far.
// The compute stream waits for `side` before it uses the results or reuses the buffers. Single
// kernels over peer memory (below) that overlap with nothing run on the compute stream, on more
// SMs. All ranks queue the same collectives in the same order, and collectives of a group never run
// concurrently.
//
// Row blocks: with --tp-comm-overlap, forward splits a large micro-batch into two blocks of rows.
// From the attention output to the next layer's queries, keys and values, each block is processed
// on its own, so that the reduction of one overlaps with the products of the other.
//
// Unless --tp-comm-backend is nccl, collectives whose buffers are in `shared` are single kernels
// (comm_open_direct). In forward, such a kernel may also add bias and residual and normalize
// (tp_norm). The results are the same.
//
// Included by gpt.h.
#pragma once
#include "llmc/comm.h"
#include "llmc/base/memory_plan.h"
#include "llmc/config/config.h"
#include "llmc/ops.h"
#include "sdp4bit/activations.h"
LLMC_BEGIN

enum {
    TP_SHARED = 3,  // partial sums of forward and of backward, gathered rows
    TP_BLOCKS = 2,  // most row blocks
    // Least bytes of a row block, an estimate. Interpolated from dev/bench/NOTES.md, an all-reduce
    // of 2 MiB over peer memory takes 16 us on two H100s, of which 9 do not depend on the size.
    TP_BLOCK_BYTES = 2 << 20
};

// The blocks of rows that forward processes one after the other.
typedef struct RowBlocks {
    int count;
    Rows rows[TP_BLOCKS];
} RowBlocks;

typedef struct TensorParallel {
    const Group *group;  // size 1: no tensor parallelism
    bool sequence;       // --sequence-parallel
    int C;
    floatX *parts;       // (N, C) device memory for the blocks of rows received from other ranks
    bool peer;           // tries peer memory: --tp-comm-backend auto or peer
    bool may_share_gpu;  // also if ranks share a GPU: --tp-comm-backend peer
    bool shares_gpu;     // ranks share a GPU and use peer memory, which is slow
    void *flags;         // (COMM_FLAG_BYTES) for comm_open_direct; only if `peer`
    CommPiece shared[TP_SHARED];
    Error not_direct;        // why peer memory is not used; code 0 if it is
    Stream *compute, *side;  // side NULL: collectives run on `compute`
    Event *queued, *gathered, *reduced[TP_BLOCKS];
    int64_t block_bytes;  // least bytes of a row block; 0: forward does not split the rows
    // --quantized-tensor-parallel (tensor_codes.c)
    bool coded;        // training passes send codes
    bool sends_codes;  // --quantized-tensor-parallel in a training pass
    ActivationFormat format;
    ActivationScratch scratch;  // for (N, C); used on the stream of the collectives
    uint8_t *send, *recv;       // (ranks) messages of N / ranks rows
} TensorParallel;

// Creates `side` and the events, and maps `shared` if `peer` is set. No-op without tensor
// parallelism. Collective over the group.
void tp_open(TensorParallel *tp, Device *device);
// Waits for `compute` and `side`, and ends what tp_open has started. No-op unless opened.
// Collective over the group.
void tp_close(TensorParallel *tp);

// Called at the start of a pass. Training passes send codes with --quantized-tensor-parallel.
static inline void tp_begin_pass(TensorParallel *tp, bool training) {
    tp->sends_codes = tp->coded && training;
}

// Returns the range of rows, of N in total, that this rank holds between GEMMs.
Rows tp_rows(const TensorParallel *tp, int64_t N);
// Returns true if --tp-comm-overlap is set and has an effect. It has none if something depends on
// all rows: scales and transposed blocks of FP8, and the groups of
// --quantized-tensor-parallel. With sequence parallelism, reduce-scatters would give each rank rows
// of both blocks.
bool tp_splits_rows(const Config *config);
// Returns the row blocks of N rows. Their sizes are multiples of the group's size, as is N.
RowBlocks tp_row_blocks(const TensorParallel *tp, int64_t N);
// Limit an op of forward to some of its rows.
void tp_norm_rows(LayerNorm *n, Rows rows);
void tp_linear_rows(Linear *a, Rows rows);
void tp_swiglu_rows(Swiglu *a, Rows rows);
// Sums `partial` (N, C) over the ranks and adds the bias (C) unless it is NULL. `out` gets all rows
// (all-reduce), or only this rank's rows with sequence parallelism (reduce-scatter). It may alias
// `partial`. N must be a multiple of the group's size.
void tp_reduce(const TensorParallel *tp, const floatX *partial, const floatX *bias, floatX *out, int64_t N);
// tp_reduce in two halves, to overlap it with compute, for the N rows of row block `block` (0 if
// the rows are not split). tp_reduce_wait waits for the latest reduction of the block, if any.
// `side` may read the bias until then.
void tp_reduce_begin(const TensorParallel *tp, const floatX *partial, const floatX *bias, floatX *out,
                     int64_t N, int block);
void tp_reduce_wait(const TensorParallel *tp, int block);
// All-gathers the ranks' rows `own` into `whole` (N, C) and returns it. Without sequence
// parallelism returns `own` and sends nothing.
const floatX *tp_gather(const TensorParallel *tp, const floatX *own, floatX *whole, int64_t N);
const floatX *tp_gather_begin(const TensorParallel *tp, const floatX *own, floatX *whole, int64_t N);
// All-gathers `bytes` bytes of every rank into `whole`, in rank order. Only with sequence
// parallelism.
void tp_gather_bytes_begin(const TensorParallel *tp, const void *own, void *whole, size_t bytes);
void tp_gather_wait(const TensorParallel *tp);
// Returns true if forward starts the reduction of a branch as soon as its GEMM is queued, to
// overlap it with other row blocks. Otherwise tp_norm reduces the branch.
static inline bool tp_reduces_early(const TensorParallel *tp, int64_t N) {
    return tp_row_blocks(tp, N).count > 1;
}
// Runs norm n of forward, with the collectives before and after it: unless tp_reduces_early, sums
// `branch` (N, C) over the ranks and adds `bias`; normalizes; with sequence parallelism,
// all-gathers the output into `whole` (N, C). This is one kernel on the compute stream if
// comm_norm_direct supports it; `branch` then keeps the partial sums.
// branch: n->branch, or NULL if the norm adds none. bias, whole: may be NULL.
void tp_norm(const TensorParallel *tp, const LayerNorm *n, floatX *branch, const floatX *bias, floatX *whole);
// In-place all-gather of `bytes` bytes per rank. Each rank has filled its slot of the buffer, at
// offset rank * bytes.
void tp_exchange(const TensorParallel *tp, void *buffer, size_t bytes);
typedef struct TpSum {
    float *values;  // (n)
    int64_t n;
} TpSum;
// All-reduces arrays in rank order, so that the results are bitwise identical on all ranks.
// scratch: `bytes` bytes of device memory, at least 4 for each rank and 4 more.
void tp_sum(const TensorParallel *tp, const TpSum *sum, int sums, void *scratch, size_t bytes);

// --- tensor_codes.c: reductions and gathers in 8 bits --------------------------------------------

// Returns the format of their messages.
ActivationFormat tp_format(const Config *config);
// Reserves buffers for N rows in the memory plan, and uploads tables. No-op unless tp->coded.
void tp_reserve_codes(TensorParallel *tp, int64_t N, MemoryPlan *plan);
void tp_start_codes(const TensorParallel *tp, int64_t N);
// tp_reduce and tp_gather on stream `s`. The gather also works without sequence parallelism. `own`
// may be this rank's rows of `whole`.
void tp_reduce_codes(const TensorParallel *tp, const floatX *partial, const floatX *bias, floatX *out,
                     int64_t N, Stream *s);
void tp_gather_codes(const TensorParallel *tp, const floatX *own, floatX *whole, int64_t N, Stream *s);

LLMC_END
