// A payload of losslessly coded weights from another rank. Byte 0 selects the number of weights,
// byte 1 the old weights. Byte 2 says whether the target corrects the header, because a random
// header would not let the decoder reach the data. The decoder must not write outside the weights.
// Accepted payloads are encoded and decoded again.
#include "sdp4bit/kernels.h"
#include "test/fuzz/fuzz.h"

enum { CHOICES = 3, FAULT = 77 };

static void decode(const LosslessLayout *m, const uint8_t *message, int64_t bytes, uint16_t *weights,
                   uint64_t *fault) {
    static const StepStatus applied = {.applied = 1};
    DecodeWeights d = {&applied, *m, message, bytes, bytes, 1, 1, (uint8_t *)weights, fault, FAULT};
    kernel_decode_weights(NULL, &d);
}

// Encoding the decoded weights and decoding the result must reproduce them.
static void code_again(const LosslessLayout *m, const uint16_t *old, const uint16_t *fresh) {
    static const StepStatus applied = {.applied = 1};
    size_t whole = (size_t)(m->elements + m->tail_elements) * sizeof *old;
    uint8_t *coded = (uint8_t *)xcalloc(1, (size_t)m->most, "a message"),
            *message = (uint8_t *)xmalloc((size_t)m->most, "a message");
    uint16_t *weights = (uint16_t *)fuzz_copy(old, whole);
    uint64_t fault = 0;
    uint32_t bytes;
    CodeWeights c = {
        &applied, *m,    (const uint8_t *)old, (const uint8_t *)fresh, (const uint8_t *)(fresh + m->elements),
        coded,    &bytes};
    kernel_code_weights(NULL, &c);
    kernel_pack_weights(NULL, m, coded, message);
    PROMISE(bytes <= m->most);
    decode(m, message, bytes, weights, &fault);
    PROMISE(!fault && memcmp(weights, fresh, whole) == 0);
    free(coded);
    free(message);
    free(weights);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const int lengths[] = {32, 64, 96, 160, 1024, LOSSLESS_GROUP + 64};
    if (size < CHOICES) return 0;
    LosslessLayout m = lossless_layout(lengths[data[0] % 6], data[0] / 6 % 3 * 8);
    int64_t bytes = (int64_t)(size - CHOICES) / 16 * 16;
    uint8_t *message = (uint8_t *)fuzz_copy(data + CHOICES, (size_t)bytes);
    size_t elements = (size_t)(m.elements + m.tail_elements);
    uint16_t *old = (uint16_t *)xmalloc(elements * sizeof *old, "weights");
    uint64_t fault = 0;
    for (size_t i = 0; i < elements; i++)
        old[i] = (uint16_t)(data[1] % 4 ? data[1] * 257u * (i + 1) * 2654435761u >> 16 : 0x3C00 + i % 256);
    LosslessHeader header = {(uint32_t)bytes, (uint32_t)m.elements, (uint32_t)m.tail_elements, 0};
    if (data[2] % 2 && bytes >= m.payload) memcpy(message, &header, sizeof header);
    uint16_t *weights = (uint16_t *)fuzz_copy(old, elements * sizeof *old);
    decode(&m, message, bytes, weights, &fault);
    PROMISE(fault == 0 || fault == FAULT);
    if (!fault) code_again(&m, old, weights);
    free(message);
    free(old);
    free(weights);
    return 0;
}
