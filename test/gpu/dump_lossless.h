// Lossless weights in kernels_dump, which includes this file.
#pragma once
#include "test/gpu/dump.h"

// Encodes, packs and decodes the payloads of two ranks. Damaged payloads must decode to the same
// (useless) values on both backends.
typedef struct Coded {
    LosslessLayout layout;
    uint8_t *old, *fresh, *tail, *coded, *messages, *weights;  // device
    uint32_t *bytes;
    StepStatus *control;
    uint64_t *fault;
} Coded;

// Creates old weights (change = 0) or changed ones. On average `strange` of 1024 weights have
// random bits, including NaN and infinity, except weights that determine a group's scale.
static inline uint8_t *uploaded_weights(Dump *d, int64_t n, uint32_t source, float change, uint32_t strange) {
    uint16_t *host = (uint16_t *)xmalloc((size_t)(n + 1) * sizeof *host, "test data");
    for (int64_t i = 0; i < n; i++) {
        Philox4 old = philox4x32_10(SEED, PURPOSE_DATA, (uint32_t)i, source, 7, 0),
                moves = philox4x32_10(SEED, PURPOSE_DATA, (uint32_t)i, source + 1, 7, 1),
                any = change == 0.0f ? old : moves;
        // Random sign and mantissa, exponent from 112 to 122.
        uint32_t bits = (old.v[0] & 0x807FFFFFu) | (112 + (old.v[0] >> 23) % 11) << 23;
        float weight = i % 1000 < 10 ? 0.0f : f32_from_bits(bits);
        float moved = (float)((int)(moves.v[0] >> 8) - (1 << 23)) / 8388608.0f;
        bool sample = i % LOSSLESS_GROUP % lossless_run(1) < LOSSLESS_RUN;
        host[i] = !sample && any.v[1] % 1024 < strange ? (uint16_t)any.v[2]
                                                       : bf16_from_float(weight + change * moved);
    }
    uint8_t *memory = (uint8_t *)upload(d, host, n * (int64_t)sizeof *host);
    stream_synchronize(d->stream);
    free(host);
    return memory;
}

// whole: size of both payloads in bytes. room: bytes that the decoder may read.
static inline void decode_coded(Dump *d, const Coded *c, int64_t whole, int64_t room, const char *name) {
    int64_t elements = 2 * c->layout.elements;
    uint64_t none = 0;
    copy_to_device(d->stream, c->fault, &none, sizeof none);
    for (int rank = 0; rank < 2; rank++)
        copy_on_device(d->stream, c->weights + rank * c->layout.elements * 2, c->old,
                       (size_t)c->layout.elements * 2);
    DecodeWeights a = {c->control, c->layout, c->messages, c->layout.most, room,
                       2,          1,         c->weights,  c->fault,       fault_code(FAULT_OF_CODING, 0)};
    kernel_decode_weights(d->stream, &a);
    result(d, RAW, c->weights, (elements + 2 * c->layout.tail_elements) * 2, "%s weights", name);
    // If both payloads are damaged, either of them may be reported.
    uint64_t fault;
    copy_to_host(d->stream, &fault, c->fault, sizeof fault);
    stream_synchronize(d->stream);
    if (room < whole && fault) fault = a.code;
    copy_to_device(d->stream, c->fault, &fault, sizeof fault);
    result(d, RAW, c->fault, sizeof fault, "%s fault", name);
}

// Flips one bit in each of `flips` equal ranges of the first payload.
static inline void damage(Dump *d, const Coded *c, int64_t bytes, int flips) {
    uint8_t *host = (uint8_t *)xmalloc((size_t)bytes, "test data");
    copy_to_host(d->stream, host, c->messages, (size_t)bytes);
    stream_synchronize(d->stream);
    for (int i = 0; i < flips; i++) {
        uint32_t random = philox4x32_10(SEED, PURPOSE_DATA, (uint32_t)i, 9, 7, 0).v[0];
        int64_t first = bytes > c->layout.table ? c->layout.table : 0;
        int64_t at = first + (int64_t)random % (bytes - first);
        host[at] ^= (uint8_t)(1u << random % 7);
    }
    copy_to_device(d->stream, c->messages, host, (size_t)bytes);
    stream_synchronize(d->stream);
    free(host);
}

// Magnitude of weight changes, and how many of 1024 weights have random bits before and after.
typedef struct Changes {
    float change;
    uint32_t before, after;
} Changes;

static inline void lossless_of(Dump *d, int64_t elements, int64_t tail, Changes of) {
    StepStatus control = {.applied = 1};
    Coded c = {.layout = lossless_layout(elements, tail)};
    c.old = uploaded_weights(d, elements, 1, 0.0f, of.before);
    c.fresh = uploaded_weights(d, elements, 1, of.change, of.after);
    c.tail = uploaded_weights(d, tail, 50, 0.0f, 0);
    c.coded = (uint8_t *)reserve(d, c.layout.most);
    c.messages = (uint8_t *)reserve(d, 2 * c.layout.most);
    c.weights = (uint8_t *)reserve(d, 4 * (elements + tail));
    c.bytes = (uint32_t *)reserve(d, sizeof *c.bytes);
    c.control = (StepStatus *)upload(d, &control, sizeof control);
    c.fault = (uint64_t *)reserve(d, sizeof *c.fault);
    snprintf(d->prefix, sizeof d->prefix, "lossless %" PRId64 "+%" PRId64 " %g %u %u", elements, tail,
             (double)of.change, of.before, of.after);
    for (int applied = 1; applied >= 0; applied--) {
        uint32_t bytes;
        control.applied = applied;
        copy_to_device(d->stream, c.control, &control, sizeof control);
        CodeWeights code = {c.control, c.layout, c.old, c.fresh, c.tail, c.coded, c.bytes};
        kernel_code_weights(d->stream, &code);
        for (int rank = 0; rank < 2; rank++)
            kernel_pack_weights(d->stream, &c.layout, c.coded, c.messages + rank * c.layout.most);
        copy_to_host(d->stream, &bytes, c.bytes, sizeof bytes);
        stream_synchronize(d->stream);
        result(d, RAW, c.messages + c.layout.most, bytes, applied ? "message" : "skipped message");
        decode_coded(d, &c, bytes, bytes, applied ? "decoded" : "skipped");
        if (!applied) continue;
        decode_coded(d, &c, bytes, bytes - 16, "cut short");
        damage(d, &c, bytes, 5);
        decode_coded(d, &c, bytes, bytes, "damaged");
    }
    void *memory[] = {c.old, c.fresh, c.tail, c.coded, c.messages, c.weights, c.bytes, c.control, c.fault};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) release(d, memory[i]);
}

static inline void lossless(Dump *d) {
    // With 580 random weights in 1024, some groups just fit into the coded size, others do not.
    static const Changes changes[] = {{0.0f, 0, 0},    {1e-6f, 0, 0},      {1e-5f, 0, 0}, {1e-4f, 0, 0},
                                      {1e-3f, 0, 0},   {1e-2f, 0, 0},      {1.0f, 0, 0},  {1e-4f, 10, 60},
                                      {1e-4f, 0, 580}, {1e-5f, 1024, 1024}};
    static const int64_t elements[] = {0, 32, 64, 96, 160, 8192, 8192 + 4128, 1000000};
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        for (size_t k = 0; k < sizeof elements / sizeof *elements; k++) {
            lossless_of(d, elements[k], 8 * (int64_t)(k + i), changes[i]);
        }
    }
}
