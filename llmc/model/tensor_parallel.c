// Sums and gathers of tensor parallelism: see tensor_parallel.h.
#include "llmc/model/tensor_parallel.h"

Rows tp_rows(const TensorParallel *tp, int64_t N) {
    if (!tp->sequence) return (Rows){0, N};
    int64_t block = N / tp->group->size;
    return (Rows){tp->group->rank * block, block};
}

// Each rank adds up one block of rows. Without sequence parallelism all then get all blocks.
void tp_reduce(const TensorParallel *tp, const floatX *partial, const floatX *bias, floatX *out, int64_t N) {
    int ranks = tp->group->size, rank = tp->group->rank;
    int64_t block = N / ranks * tp->C;
    size_t bytes = (size_t)block * sizeof(floatX);
    comm_all_to_all(tp->group, partial, tp->parts, bytes, tp->stream);
    copy_on_device(tp->stream, tp->parts + rank * block, partial + rank * block, bytes);
    SumParts sum = {.y = tp->sequence ? out : out + rank * block,
                    .parts = tp->parts,
                    .n = block,
                    .ranks = ranks,
                    .bias = bias,
                    .C = tp->C};
    op_sum_parts(tp->stream, &sum);
    if (!tp->sequence) comm_all_gather(tp->group, out, bytes, tp->stream);
}

const floatX *tp_gather(const TensorParallel *tp, const floatX *own, floatX *whole, int64_t N) {
    if (!tp->sequence) return own;
    Rows rows = tp_rows(tp, N);
    size_t bytes = (size_t)(rows.count * tp->C) * sizeof(floatX);
    copy_on_device(tp->stream, whole + rows.first * tp->C, own, bytes);
    comm_all_gather(tp->group, whole, bytes, tp->stream);
    return whole;
}

void sum_over_group(const Group *group, float *sums, int64_t n, void *scratch, size_t bytes, Stream *stream) {
    int64_t most = (int64_t)(bytes / sizeof(float)) / group->size;
    float *parts = (float *)scratch;
    if (group->size == 1) return;
    for (int64_t at = 0; at < n; at += most) {
        int64_t count = n - at < most ? n - at : most;
        size_t part = (size_t)count * sizeof(float);
        copy_on_device(stream, parts + group->rank * count, sums + at, part);
        comm_all_gather(group, parts, part, stream);
        op_add_parts(stream, sums + at, parts, count, group->size);
    }
}
