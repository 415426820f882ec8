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

// Describes the activations as a bucket that one rank owns.
static Bucket bucket_of(const MessageLayout *message) {
    return (Bucket){.matrix_elements = message->elements, .matrix_per_rank = message->elements};
}

void activations_encode(const ActivationFormat *format, const MessageLayout *message,
                        const ActivationScratch *scratch, RoundingKey key, const floatX *x, uint8_t *to,
                        Stream *stream) {
    assert(codec_grouped(format->codec) && message->elements > 0);
    QuantizePartitions q = {
        .grads = scratch->values,
        .bucket = bucket_of(message),
        .table = {scratch->segment, 1},
        .hi = message->elements,
        .scale = 1.0f,
        .transform = TRANSFORM_HADAMARD,
        .codec = format->codec,
        .group = format->group,
        .tail_codec = FLOATX_CODEC,
        .rounding = format->rounding,
        .key = key,
        .slots = 1,
        .self = -1,  // no part of the message stays on this rank
        .send = to,
        .message = *message,
    };
    kernel_widen(stream, scratch->values, x, message->elements);
    kernel_quantize_partitions(stream, &q);
}

void activations_decode(const ActivationFormat *format, const MessageLayout *message,
                        const ActivationScratch *scratch, const uint8_t *from, floatX *x, Stream *stream) {
    assert(codec_grouped(format->codec) && message->elements > 0);
    SumFinal f = {
        .received = from,
        .sources = 1,
        .in = *message,
        .codec = format->codec,
        .group = format->group,
        .tail_codec = FLOATX_CODEC,
        .transform = TRANSFORM_HADAMARD,
        .bucket = bucket_of(message),
        .table = {scratch->segment, 1},
        .hi = message->elements,
        .own = {scratch->values, NULL},
        .matrix_partials = scratch->partials,
    };
    kernel_sum_final(stream, &f);
    kernel_narrow(stream, x, scratch->values, message->elements);
}
