// Reductions and gathers of tensor parallelism in 8 bits (--quantized-tensor-parallel): see
// tensor_parallel.h. Called by tensor_parallel.c.
//
//   reduce     each rank encodes one message per rank -> all-to-all -> decode, sum in rank order,
//              add the bias; without sequence parallelism a gather follows
//   gather     each rank encodes its rows -> all-gather -> decode, including its own rows
//
// A rank's own part is encoded like the others, so all ranks compute the same values. Codes are
// rounded to nearest and depend on the values only. So a second gather of the same rows in backward
// repeats the first one bit by bit.
#include <assert.h>

#include "llmc/model/tensor_parallel.h"

ActivationFormat tp_format(const Config *config) {
    return (ActivationFormat){CODEC_INT8, config->aq_group_size, ROUND_NEAREST};
}

static MessageLayout message_of(const TensorParallel *tp, int64_t N) {
    return activations_message(&tp->format, N / tp->group->size * tp->C, false);
}

void tp_reserve_codes(TensorParallel *tp, int64_t N, MemoryPlan *plan) {
    const char *group = "tensor parallel";
    if (!tp->coded) return;
    MessageLayout m = message_of(tp, N);
    size_t bytes = (size_t)(m.bytes * tp->group->size), elements = (size_t)(N * tp->C);
    memory_plan_reserve(plan, group, "quantized activations, sent", bytes, (void **)&tp->send);
    memory_plan_reserve(plan, group, "quantized activations, received", bytes, (void **)&tp->recv);
    activations_reserve(&tp->scratch, elements, group, plan);
}

void tp_start_codes(const TensorParallel *tp, int64_t N) {
    if (!tp->coded) return;
    Segment segment = activations_segment(N * tp->C, 0);
    copy_to_device(tp->compute, tp->scratch.segment, &segment, sizeof segment);
    stream_synchronize(tp->compute);
}

void tp_gather_codes(const TensorParallel *tp, const floatX *own, floatX *whole, int64_t N, Stream *s) {
    assert(tp->coded);
    MessageLayout m = message_of(tp, N);
    const RoundingKey unused = {0};
    activations_encode(&tp->format, &m, &tp->scratch, unused, own, 1, tp->recv + tp->group->rank * m.bytes,
                       s);
    comm_all_gather(tp->group, tp->recv, (size_t)m.bytes, s);
    activations_decode(&tp->format, &m, &tp->scratch, tp->recv, tp->group->size, whole, s);
}

void tp_reduce_codes(const TensorParallel *tp, const floatX *partial, const floatX *bias, floatX *out,
                     int64_t N, Stream *s) {
    assert(tp->coded);
    MessageLayout m = message_of(tp, N);
    int ranks = tp->group->size, rank = tp->group->rank;
    const RoundingKey unused = {0};
    floatX *own = tp->sequence ? out : out + rank * m.elements;
    activations_encode(&tp->format, &m, &tp->scratch, unused, partial, ranks, tp->send, s);
    comm_all_to_all(tp->group, tp->send, tp->recv, (size_t)m.bytes, s);
    copy_on_device(s, tp->recv + rank * m.bytes, tp->send + rank * m.bytes, (size_t)m.bytes);
    activations_decode(&tp->format, &m, &tp->scratch, tp->recv, ranks, tp->parts, s);
    SumParts sum = {.y = own, .parts = tp->parts, .n = m.elements, .ranks = ranks, .bias = bias, .C = tp->C};
    op_sum_parts(s, &sum);
    if (!tp->sequence) tp_gather_codes(tp, own, out, N, s);
}
