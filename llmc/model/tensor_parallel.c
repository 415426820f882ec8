// Reductions and gathers of tensor parallelism: see tensor_parallel.h.
#include "llmc/model/tensor_parallel.h"

#include <assert.h>

// Maps `shared` in all ranks, unless ranks share a GPU and this was not requested.
static void open_direct(TensorParallel *tp) {
    bool own_gpus = comm_own_gpus(tp->group, &tp->not_direct);
    if (!own_gpus && !tp->may_share_gpu) return;
    tp->not_direct = (Error){0};
    bool opened = comm_open_direct(tp->group, tp->flags, tp->shared, TP_SHARED, &tp->not_direct);
    tp->shares_gpu = opened && !own_gpus;
}

void tp_open(TensorParallel *tp, Device *device) {
    if (tp->group->size == 1) return;
    tp->side = stream_create_urgent(device, "tensor parallel");
    tp->queued = event_create(device);
    tp->gathered = event_create(device);
    for (int i = 0; i < TP_BLOCKS; i++) tp->reduced[i] = event_create(device);
    if (tp->peer) open_direct(tp);
}

void tp_close(TensorParallel *tp) {
    if (!tp->side) return;
    stream_synchronize(tp->compute);  // it waits for events on `side`
    stream_synchronize(tp->side);     // its kernels use the memory that comm_close_direct unmaps
    comm_close_direct(tp->group);
    event_destroy(tp->queued);
    event_destroy(tp->gathered);
    for (int i = 0; i < TP_BLOCKS; i++) event_destroy(tp->reduced[i]);
    stream_destroy(tp->side);
    tp->side = NULL;
}

// Returns the stream for a new collective. It waits for the work queued on the compute stream.
static Stream *begin(const TensorParallel *tp) {
    if (!tp->side) return tp->compute;
    event_record(tp->queued, tp->compute);
    stream_wait(tp->side, tp->queued);
    return tp->side;
}

static void done(const TensorParallel *tp, Event *event) {
    if (tp->side) event_record(event, tp->side);
}
static void wait_for(const TensorParallel *tp, Event *event) {
    if (tp->side) stream_wait(tp->compute, event);
}

Rows tp_rows(const TensorParallel *tp, int64_t N) {
    assert(!tp->sequence || N % tp->group->size == 0);
    if (!tp->sequence) return (Rows){0, N};
    int64_t block = N / tp->group->size;
    return (Rows){tp->group->rank * block, block};
}

bool tp_splits_rows(const Config *c) {
    return c->tp_comm_overlap && c->tensor_model_parallel_size > 1 && !c->sequence_parallel &&
           !c->quantized_tensor_parallel && !config_fp8_on(c);
}

RowBlocks tp_row_blocks(const TensorParallel *tp, int64_t N) {
    int64_t half = N / 2 / tp->group->size * tp->group->size, row = tp->C * (int64_t)sizeof(floatX);
    bool splits = tp->block_bytes > 0 && half > 0 && half * row >= tp->block_bytes;
    if (!splits) return (RowBlocks){1, {{0, N}}};
    return (RowBlocks){2, {{0, half}, {half, N - half}}};
}

void tp_norm_rows(LayerNorm *n, Rows rows) {
    int64_t at = rows.first * n->C;
    n->x += at;
    n->y += at;
    if (n->residual) n->residual += at;
    if (n->branch) n->branch += at;
    n->mean += rows.first;
    n->rstd += rows.first;
    n->rows = rows;
}

void tp_linear_rows(Linear *a, Rows rows) {
    a->x += rows.first * a->C;
    a->y += rows.first * a->OC;
    if (a->pre) a->pre += rows.first * a->OC;
    a->N = rows.count;
}

void tp_swiglu_rows(Swiglu *a, Rows rows) {
    a->pre += rows.first * 2 * a->F;
    a->y += rows.first * a->F;
    a->N = rows.count;
}

// Reduce-scatter by an all-to-all and a local sum: each rank sums one block of rows. Without
// sequence parallelism, an all-gather of the sums follows.
static void reduce_in_steps(const TensorParallel *tp, const CommReduce *a, Stream *s) {
    int ranks = tp->group->size, rank = tp->group->rank;
    int64_t block = a->total / ranks;
    size_t bytes = (size_t)block * sizeof(floatX);
    const floatX *partial = a->partial;
    floatX *out = a->out;
    comm_all_to_all(tp->group, partial, tp->parts, bytes, s);
    copy_on_device(s, tp->parts + rank * block, partial + rank * block, bytes);
    SumParts sum = {.y = a->scatter ? out : out + rank * block,
                    .parts = tp->parts,
                    .n = block,
                    .ranks = ranks,
                    .bias = a->bias,
                    .C = a->C};
    op_sum_parts(s, &sum);
    if (!a->scatter) comm_all_gather(tp->group, out, bytes, s);
}

static CommReduce reduce_of(const TensorParallel *tp, const floatX *partial, const floatX *bias, floatX *out,
                            int64_t N, CommBeside beside) {
    assert(N % tp->group->size == 0);
    return (CommReduce){.partial = partial,
                        .out = out,
                        .scratch = tp->parts,
                        .bias = bias,
                        .C = tp->C,
                        .total = N * tp->C,
                        .scatter = tp->sequence,
                        .beside = beside};
}

void tp_reduce_begin(const TensorParallel *tp, const floatX *partial, const floatX *bias, floatX *out,
                     int64_t N, int block) {
    CommReduce reduce = reduce_of(tp, partial, bias, out, N, COMM_BESIDE_GEMM);
    Stream *s = begin(tp);
    if (tp->sends_codes) tp_reduce_codes(tp, partial, bias, out, N, s);
    else if (!comm_reduce_direct(tp->group, &reduce, s)) reduce_in_steps(tp, &reduce, s);
    done(tp, tp->reduced[block]);
}

void tp_reduce_wait(const TensorParallel *tp, int block) { wait_for(tp, tp->reduced[block]); }

void tp_reduce(const TensorParallel *tp, const floatX *partial, const floatX *bias, floatX *out, int64_t N) {
    CommReduce reduce = reduce_of(tp, partial, bias, out, N, COMM_WITHOUT_GEMM);
    if (!tp->sends_codes && comm_reduce_direct(tp->group, &reduce, tp->compute)) return;
    tp_reduce_begin(tp, partial, bias, out, N, 0);
    tp_reduce_wait(tp, 0);
}

void tp_gather_bytes_begin(const TensorParallel *tp, const void *own, void *whole, size_t bytes) {
    CommGather gather = {own, whole, bytes, COMM_BESIDE_GEMM};
    Stream *s = begin(tp);
    if (!comm_gather_direct(tp->group, &gather, s)) {
        copy_on_device(s, (uint8_t *)whole + (size_t)tp->group->rank * bytes, own, bytes);
        comm_all_gather(tp->group, whole, bytes, s);
    }
    done(tp, tp->gathered);
}

static size_t bytes_of_rows(const TensorParallel *tp, int64_t N) {
    return (size_t)(tp_rows(tp, N).count * tp->C) * sizeof(floatX);
}

const floatX *tp_gather_begin(const TensorParallel *tp, const floatX *own, floatX *whole, int64_t N) {
    if (!tp->sequence) return own;
    if (tp->sends_codes) {
        tp_gather_codes(tp, own, whole, N, begin(tp));
        done(tp, tp->gathered);
        return whole;
    }
    tp_gather_bytes_begin(tp, own, whole, bytes_of_rows(tp, N));
    return whole;
}

void tp_gather_wait(const TensorParallel *tp) {
    if (tp->sequence) wait_for(tp, tp->gathered);
}

const floatX *tp_gather(const TensorParallel *tp, const floatX *own, floatX *whole, int64_t N) {
    CommGather gather = {own, whole, bytes_of_rows(tp, N), COMM_WITHOUT_GEMM};
    bool alone = tp->sequence && !tp->sends_codes;
    if (alone && comm_gather_direct(tp->group, &gather, tp->compute)) return whole;
    const floatX *all = tp_gather_begin(tp, own, whole, N);
    tp_gather_wait(tp);
    return all;
}

void tp_norm(const TensorParallel *tp, const LayerNorm *n, floatX *branch, const floatX *bias,
             floatX *whole) {
    int64_t N = (int64_t)n->B * n->T;
    bool reduces = branch && tp->group->size > 1 && !tp_reduces_early(tp, N);
    CommNorm fused = {.partial = branch, .bias = bias, .norm = n, .whole = whole};
    if (reduces && !tp->sends_codes && comm_norm_direct(tp->group, &fused, tp->compute)) return;
    if (reduces) tp_reduce(tp, branch, bias, branch, N);
    op_layernorm_forward(tp->compute, n);
    if (whole) tp_gather(tp, n->y, whole, N);
}

void tp_exchange(const TensorParallel *tp, void *buffer, size_t bytes) {
    comm_all_gather(tp->group, buffer, bytes, begin(tp));
    done(tp, tp->gathered);
    wait_for(tp, tp->gathered);
}

// Moves the range lo .. hi - 1 of the concatenated arrays into `packed` or back.
static void copy_range(Stream *s, const TpSum *sum, int sums, int64_t lo, int64_t hi, float *packed,
                       bool back) {
    int64_t start = 0;
    for (int i = 0; i < sums; start += sum[i++].n) {
        int64_t from = lo > start ? lo : start, end = start + sum[i].n, to = hi < end ? hi : end;
        if (from >= to) continue;
        float *array = sum[i].values + (from - start), *part = packed + (from - lo);
        copy_on_device(s, back ? array : part, back ? part : array, (size_t)(to - from) * sizeof(float));
    }
}

void tp_sum(const TensorParallel *tp, const TpSum *sum, int sums, void *scratch, size_t bytes) {
    int ranks = tp->group->size;
    int64_t total = 0, most = (int64_t)(bytes / sizeof(float)) / (ranks + 1);
    float *parts = (float *)scratch;  // (ranks, count), followed by their sum (count)
    assert(most > 0);
    for (int i = 0; i < sums; i++) total += sum[i].n;
    if (ranks == 1 || total == 0) return;
    Stream *s = begin(tp);
    for (int64_t at = 0; at < total; at += most) {
        int64_t count = total - at < most ? total - at : most;
        copy_range(s, sum, sums, at, at + count, parts + tp->group->rank * count, false);
        comm_all_gather(tp->group, parts, (size_t)count * sizeof(float), s);
        op_add_parts(s, parts + ranks * count, parts, count, ranks);
        copy_range(s, sum, sums, at, at + count, parts + ranks * count, true);
    }
    done(tp, tp->reduced[0]);
    wait_for(tp, tp->reduced[0]);
}
