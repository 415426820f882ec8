// Collectives of tensor parallelism (Megatron-LM, arXiv 1909.08053) and sequence parallelism (arXiv
// 2205.05198). Every rank of the group holds some attention heads, some columns of the feed-forward
// layer and some vocabulary rows. Row-parallel GEMMs produce partial sums, which are reduced here.
// Called by transformer.c, next_logits.c and head_scores.c.
//
// Rows refer to the flattened (B*T) micro-batch. Between the GEMMs every rank holds all rows;
// with --sequence-parallel rank t holds only the t-th of equal blocks. Sums are computed in fp32 in
// rank order and rounded once, so they are bitwise identical on every rank, backend and run.
//
// Collectives run on their own stream, `side`. They are ordered after the work queued on the
// compute stream, which waits for them before it uses their results or reuses their buffers.
#pragma once
#include "llmc/comm.h"
#include "llmc/ops.h"
LLMC_BEGIN

typedef struct TensorParallel {
    const Group *group;  // size 1: no tensor parallelism
    bool sequence;       // --sequence-parallel
    int C;
    floatX *parts;           // (N, C) device memory: received blocks of rows
    Stream *compute, *side;  // side NULL: collectives run on `compute`
    Event *queued, *gathered, *reduced;
} TensorParallel;

// Creates the stream and its events. No-op in a group of one.
void tp_open(TensorParallel *tp, Device *device);
// All work on the stream must be complete. No-op unless opened.
void tp_close(TensorParallel *tp);

// Returns the rows, out of N, that this rank holds between GEMMs.
Rows tp_rows(const TensorParallel *tp, int64_t N);
// Sums `partial` (N, C) over the ranks and adds the bias (C) unless NULL. out: this rank's rows
// with sequence parallelism (reduce-scatter), else (N, C) (all-reduce). out may alias partial. N
// must be a multiple of the group's size.
void tp_reduce(const TensorParallel *tp, const floatX *partial, const floatX *bias, floatX *out, int64_t N);
// tp_reduce in two halves, to overlap it with compute.
void tp_reduce_begin(const TensorParallel *tp, const floatX *partial, const floatX *bias, floatX *out,
                     int64_t N);
void tp_reduce_wait(const TensorParallel *tp);
// All-gathers the ranks' rows `own` into `whole` (N, C) and returns it. Without sequence
// parallelism returns `own` and sends nothing.
const floatX *tp_gather(const TensorParallel *tp, const floatX *own, floatX *whole, int64_t N);
const floatX *tp_gather_begin(const TensorParallel *tp, const floatX *own, floatX *whole, int64_t N);
void tp_gather_wait(const TensorParallel *tp);
// In-place all-gather: each rank has filled its slot (offset rank * bytes) of buffer.
void tp_exchange(const TensorParallel *tp, void *buffer, size_t bytes);
// All-reduces sums (n), adding in rank order, so that the result is bitwise identical on all ranks.
// scratch: device memory of `bytes` bytes, at least 4 per rank.
void tp_sum(const TensorParallel *tp, float *sums, int64_t n, void *scratch, size_t bytes);

LLMC_END
