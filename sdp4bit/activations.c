// Quantized activations: see activations.h.
#include "sdp4bit/activations.h"

#include <assert.h>

#include "sdp4bit/kernels.h"

MessageLayout activations_message(const ActivationFormat *format, int64_t elements, bool sealed) {
    Bucket bucket = {.sealed = sealed};
    return layout_sealed(&bucket, message_layout(format->codec, format->group, elements, 1, FLOATX_CODEC, 0));
}

Segment activations_segment(int64_t elements, int64_t logical) {
    return (Segment){.numel = elements, .logical = logical};
}

void activations_reserve(ActivationScratch *scratch, size_t elements, const char *group, MemoryPlan *plan) {
    memory_plan_reserve(plan, group, "activations in fp32", elements * sizeof(float),
                        (void **)&scratch->values);
    memory_plan_reserve(plan, group, "partial sums of quantized activations",
                        elements / HADAMARD_ORDER * sizeof(float), (void **)&scratch->partials);
    memory_plan_reserve(plan, group, "segment of quantized activations", sizeof(Segment),
                        (void **)&scratch->segment);
}

// Describes the activations of all messages as a bucket with a shard per message.
static Bucket bucket_of(const MessageLayout *message, int count) {
    return (Bucket){.matrix_elements = count * message->elements, .matrix_per_rank = message->elements};
}

void activations_encode(const ActivationFormat *format, const MessageLayout *message,
                        const ActivationScratch *scratch, RoundingKey key, const floatX *x, int count,
                        uint8_t *to, Stream *stream) {
    assert(codec_grouped(format->codec) && message->elements > 0 && count > 0);
    QuantizePartitions q = {
        .grads = scratch->values,
        .bucket = bucket_of(message, count),
        .table = {scratch->segment, 1},
        .hi = message->elements,
        .scale = 1.0f,
        .transform = TRANSFORM_HADAMARD,
        .codec = format->codec,
        .group = format->group,
        .tail_codec = FLOATX_CODEC,
        .rounding = format->rounding,
        .key = key,
        .slots = count,
        .self = -1,  // all messages are written to `send`
        .send = to,
        .message = *message,
    };
    kernel_widen(stream, scratch->values, x, count * message->elements);
    kernel_quantize_partitions(stream, &q);
}

void activations_decode(const ActivationFormat *format, const MessageLayout *message,
                        const ActivationScratch *scratch, const uint8_t *from, int count, floatX *x,
                        Stream *stream) {
    assert(codec_grouped(format->codec) && message->elements > 0 && count > 0);
    SumFinal f = {
        .sources = 1,
        .in = *message,
        .codec = format->codec,
        .group = format->group,
        .tail_codec = FLOATX_CODEC,
        .transform = TRANSFORM_HADAMARD,
        .bucket = bucket_of(message, count),
        .table = {scratch->segment, 1},
        .hi = message->elements,
        .matrix_partials = scratch->partials,
    };
    for (int i = 0; i < count; i++) {
        f.received = from + i * message->bytes;
        f.rank = i;
        f.own.matrix = scratch->values + i * message->elements;
        kernel_sum_final(stream, &f);
    }
    kernel_narrow(stream, x, scratch->values, count * message->elements);
}
