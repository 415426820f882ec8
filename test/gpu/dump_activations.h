// Quantized activations in kernels_dump, which includes this file.
#pragma once
#include "sdp4bit/activations.h"
#include "test/gpu/dump.h"

// Encodes and decodes one message. x: (elements) device.
static inline void activation_message(Dump *d, ActivationFormat format, int64_t elements, const floatX *x) {
    Segment table = activations_segment(elements, 3 * elements);
    MessageLayout layout = activations_message(&format, elements, false);
    ActivationScratch scratch = {(float *)reserve(d, elements * 4), (float *)reserve(d, elements / 8),
                                 (Segment *)upload(d, &table, sizeof table)};
    RoundingKey key = {SEED, 7, PURPOSE_ACTIVATION | 5 << 8, 96};
    uint8_t *message = (uint8_t *)reserve(d, layout.bytes);
    floatX *back = (floatX *)reserve(d, elements * (int64_t)sizeof(floatX));
    set_zero(d->stream, message, (size_t)layout.bytes);
    activations_encode(&format, &layout, &scratch, key, x, 1, message, d->stream);
    result(d, RAW, message, layout.bytes, "%s group%d message", codec_info(format.codec).name, format.group);
    activations_decode(&format, &layout, &scratch, message, 1, back, d->stream);
    result(d, sizeof(floatX) == 2 ? BF16 : FP32, back, elements * (int64_t)sizeof(floatX),
           "%s group%d decoded", codec_info(format.codec).name, format.group);
    release(d, scratch.values);
    release(d, scratch.partials);
    release(d, scratch.segment);
    release(d, message);
    release(d, back);
}

// The messages of 77 tokens of 768 channels.
static inline void activations(Dump *d) {
    enum { ROWS = 77, CHANNELS = 768, ELEMENTS = ROWS * CHANNELS };
    static const int groups[] = {32, 64, 96, 128, 256, 768};
    floatX *host = (floatX *)xmalloc(ELEMENTS * sizeof *host, "test data");
    for (int i = 0; i < ELEMENTS; i++) {
        Philox4 r = philox4x32_10(SEED, PURPOSE_DATA, (uint32_t)i, 11, 7, 0);
        uint32_t bits = (r.v[0] & 0x807FFFFFu) | (118 + (r.v[0] >> 23) % 11) << 23;  // 2^-9 to 4
        host[i] = floatX_from_float(r.v[1] % 4096 ? f32_from_bits(bits) : r.v[1] % 3 ? 0.0f : INFINITY);
    }
    floatX *x = (floatX *)upload(d, host, ELEMENTS * (int64_t)sizeof *host);
    stream_synchronize(d->stream);
    snprintf(d->prefix, sizeof d->prefix, "activations");
    for (int i = 0; i < 12; i++) {
        ActivationFormat format = {i % 2 ? CODEC_INT8 : CODEC_INT4, groups[i / 2],
                                   i % 3 ? ROUND_STOCHASTIC : ROUND_NEAREST};
        activation_message(d, format, ELEMENTS, x);
    }
    release(d, x);
    free(host);
}
