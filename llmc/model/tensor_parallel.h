// What tensor parallelism sends inside a pass (Megatron-LM's, arXiv 1909.08053; sequence parallel
// arXiv 2205.05198). Every rank of the group holds some heads, some columns of the feed-forward
// layer and some rows of the vocabulary. Where a product's sum goes over what was cut, each rank
// has a part of the sum, and the parts are added here. Called by train_gpt.c,
// next_logits.c and tasks.c.
//
// Rows are those of the flattened (B*T) micro-batch. With --sequence-parallel rank t holds the t-th
// of equal blocks of them between those products; else every rank holds all. Sums are fp32 in rank
// order and rounded once: the same on every rank, backend and run.
//
// Messages and sums have a stream of their own, `beside`, once tp_open has made it. What is begun
// runs there behind the compute stream's work so far. It is waited for before its result is used or
// its buffers are written.
#pragma once
#include "llmc/comm.h"
#include "llmc/ops.h"
LLMC_BEGIN

typedef struct TensorParallel {
    const Group *group;  // of size 1: nothing is cut, and nothing of this is called
    bool sequence;       // --sequence-parallel
    int C;
    floatX *parts;             // (N, C) device memory: blocks of rows as they arrive
    Stream *compute, *beside;  // beside NULL: everything runs on compute
    Event *asked, *gathered, *reduced;
} TensorParallel;

// Makes the stream and its events. Nothing in a group of one.
void tp_open(TensorParallel *tp, Device *device);
// Once their work has ended. Nothing without tp_open.
void tp_close(TensorParallel *tp);

// The rows that this rank holds between the products, of N.
Rows tp_rows(const TensorParallel *tp, int64_t N);
// out = the sum of the ranks' partial (N, C), and the bias (C) unless NULL. out: this rank's rows
// with sequence parallelism, else (N, C). out may be partial. N: a multiple of the group's size.
void tp_reduce(const TensorParallel *tp, const floatX *partial, const floatX *bias, floatX *out, int64_t N);
// The same in two halves: a product may run between them.
void tp_reduce_begin(const TensorParallel *tp, const floatX *partial, const floatX *bias, floatX *out,
                     int64_t N);
void tp_reduce_wait(const TensorParallel *tp);
// All rows of what each rank holds some rows of: `whole` (N, C), filled from `own`. Without
// sequence parallelism that is `own` itself, and nothing is sent.
const floatX *tp_gather(const TensorParallel *tp, const floatX *own, floatX *whole, int64_t N);
const floatX *tp_gather_begin(const TensorParallel *tp, const floatX *own, floatX *whole, int64_t N);
void tp_gather_wait(const TensorParallel *tp);
// In place: on entry the own slot (rank * bytes) of buffer is filled, on exit all are.
void tp_exchange(const TensorParallel *tp, void *buffer, size_t bytes);
// sums (n) += what the other ranks have there, in rank order from the first: the same on all.
// scratch: device memory of so many bytes, at least 4 for each rank.
void tp_sum(const TensorParallel *tp, float *sums, int64_t n, void *scratch, size_t bytes);

LLMC_END
