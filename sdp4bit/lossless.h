// Lossless weights: entropy coding of the changes of bf16 weights, inline for host and device.
// Receivers get the sender's bf16 weights bit-exactly. README.md, "Lossless weights", defines the
// message. Called by the kernels of both backends (lossless_cpu.c, kernels_cuda_lossless.cu).
// A change is a number of units in the last place (ulps). Updates are about equally large for all
// weights, but small weights have smaller ulps and so change by more of them. So the old exponent,
// which the receiver knows, selects one of 16 contexts, each with its own symbol frequencies. Each
// group sends a scale that shifts this mapping. The coder is rANS (Duda, arXiv 1311.2540) in 32
// interleaved lanes, one per lane of a warp. All arithmetic is integer.
#pragma once
#include "llmc/base/numerics.h"
#include "sdp4bit/lossless_tables.h"

enum {
    LOSSLESS_GROUP = 8192,  // weights coded together, a multiple of 32; the last group may be shorter
    LOSSLESS_LANES = 32,
    LOSSLESS_PRECISION = 10,  // bits: a context's frequencies sum to 2^10
    LOSSLESS_SYMBOLS = 16,
    LOSSLESS_ESCAPE = 15,  // symbol of all values without their own symbol; raw bits follow
    LOSSLESS_CONTEXTS = 16,
    LOSSLESS_FRESH = 14,                        // context of "fresh" weights, smaller than their change
    LOSSLESS_ZERO = 15,                         // context of zeros: padding and unused embeddings
    LOSSLESS_STATE_WORDS = 2 * LOSSLESS_LANES,  // 16-bit words of the lanes' final states
    LOSSLESS_CANDIDATES = 32,                   // scales that the encoder tries per group
    LOSSLESS_FRESH_COST = 2800                  // assumed cost of a fresh weight in 1/256 bit
};
#define LOSSLESS_LOWEST 0x10000u  // lane states are in [2^16, 2^32); the encoder's initial state

// --- the message --------------------------------------------------------------------------------

// Header of a message. A skipped step sends only a header, with zero elements.
typedef struct LosslessHeader {
    uint32_t bytes;  // size of the message, a multiple of 16
    uint32_t elements, tail_elements;
    uint32_t zero;
} LosslessHeader;
// Table entry of a group. Its `words` 16-bit words end before word `end` of the payload, a multiple
// of 8. If there are as many words as weights, they are the uncoded weights.
typedef struct LosslessEntry {
    uint32_t end;
    uint16_t words;
    uint8_t scale, zero;
} LosslessEntry;

// Byte offsets in a message: header, tail in bf16, table with an entry per group, payload. most:
// size of the message if no group is compressed.
typedef struct LosslessLayout {
    int64_t elements, tail_elements, groups;
    int64_t tail, table, payload, most;
} LosslessLayout;
// elements: a multiple of 32.
HD_FN LosslessLayout lossless_layout(int64_t elements, int64_t tail_elements) {
    LosslessLayout m;
    m.elements = elements;
    m.tail_elements = tail_elements;
    m.groups = (elements + LOSSLESS_GROUP - 1) / LOSSLESS_GROUP;
    m.tail = (int64_t)sizeof(LosslessHeader);
    m.table = m.tail + (tail_elements * (int64_t)sizeof(uint16_t) + 15) / 16 * 16;
    m.payload = m.table + (m.groups * (int64_t)sizeof(LosslessEntry) + 15) / 16 * 16;
    m.most = m.payload + elements * (int64_t)sizeof(uint16_t);
    return m;
}
HD_FN int lossless_group_elements(const LosslessLayout *m, int64_t g) {
    int64_t rest = m->elements - g * LOSSLESS_GROUP;
    return rest < LOSSLESS_GROUP ? (int)rest : (int)LOSSLESS_GROUP;
}
// Returns the words of payload that a group occupies, including padding to 16 bytes.
HD_FN uint32_t lossless_padded_words(uint32_t words) { return (words + 7u) & ~7u; }
// Returns true if the header has the layout's sizes and the message fits into `bytes`.
HD_FN bool lossless_header_sound(const LosslessHeader *h, const LosslessLayout *m, int64_t bytes) {
    return h->elements == m->elements && h->tail_elements == m->tail_elements && h->bytes <= bytes &&
           h->bytes >= m->payload && h->bytes % 16 == 0 && h->zero == 0;
}
// Returns true if the group is within the payload and has a possible length for n elements.
HD_FN bool lossless_entry_sound(LosslessEntry e, int n, int64_t payload_words) {
    return e.end <= payload_words && e.end % 8 == 0 && e.words <= e.end && e.zero == 0 &&
           (e.words == n || (e.words >= LOSSLESS_STATE_WORDS && e.words < n));
}

// --- one weight ---------------------------------------------------------------------------------

// Map bf16 bits to 16-bit integers in numeric order, and back.
HD_FN uint32_t lossless_ordered(uint32_t bits) { return (bits & 0x8000u ? ~bits : bits | 0x8000u) & 0xFFFFu; }
HD_FN uint32_t lossless_bits(uint32_t ordered) {
    return (ordered & 0x8000u ? ordered ^ 0x8000u : ~ordered) & 0xFFFFu;
}

// Returns the context of a weight. Contexts 0 to 13 are for changes of about 2^(context - 6) ulps.
// scale: exponent of weights whose ulp is the group's typical change.
HD_FN int lossless_context(uint32_t old, int scale) {
    int exponent = (int)((old >> 7) & 0xFFu), context = scale - exponent + 6;
    if (context >= LOSSLESS_FRESH) return exponent == 0 ? LOSSLESS_ZERO : LOSSLESS_FRESH;
    return context < 0 ? 0 : context;
}
// Returns the number of low bits of a value that are coded as equally likely, without a model.
HD_FN int lossless_shift(int context) { return context < 7 || context >= LOSSLESS_FRESH ? 0 : context - 7; }

// Returns the 16-bit value to code for a new weight; likely values are small. In most contexts it
// is the change in ulps modulo 2^16, in the order 0, -1, 1, -2, ... In the fresh context it is the
// exponent relative to the scale, then sign and mantissa.
HD_FN uint32_t lossless_value(uint32_t old, uint32_t fresh, int context, int scale) {
    if (context == LOSSLESS_FRESH) {
        uint32_t below = ((uint32_t)(scale - 4) - (fresh >> 7)) & 0xFFu;
        return (below << 8) | ((fresh >> 8) & 0x80u) | (fresh & 0x7Fu);
    }
    uint32_t change = lossless_ordered(fresh) - lossless_ordered(old);
    return ((change << 1) ^ (change & 0x8000u ? 0xFFFFu : 0u)) & 0xFFFFu;
}
// Inverse of lossless_value. Accepts any value.
HD_FN uint32_t lossless_weight(uint32_t old, uint32_t value, int context, int scale) {
    if (context == LOSSLESS_FRESH) {
        uint32_t exponent = ((uint32_t)(scale - 4) - (value >> 8)) & 0xFFu;
        return ((value & 0x80u) << 8) | (exponent << 7) | (value & 0x7Fu);
    }
    uint32_t change = (value >> 1) ^ (value & 1u ? 0xFFFFu : 0u);
    return lossless_bits((lossless_ordered(old) + change) & 0xFFFFu);
}

// A value split for coding: a symbol and low bits, which are coded together, and raw bits, which
// follow only escapes and fresh weights.
typedef struct LosslessCode {
    uint32_t symbol, low, raw;
    int low_bits, raw_bits;
} LosslessCode;
HD_FN LosslessCode lossless_code(uint32_t value, int context) {
    int low = lossless_shift(context), raw = context == LOSSLESS_FRESH ? 8 : 0;
    uint32_t high = value >> low;
    LosslessCode code = {high >> raw, value & ((1u << low) - 1u), high & ((1u << raw) - 1u), low, raw};
    if (code.symbol >= LOSSLESS_ESCAPE) {
        code.symbol = LOSSLESS_ESCAPE;
        code.raw = high;
        code.raw_bits = 16 - low;
    }
    return code;
}
// Returns the number of raw bits that follow a symbol.
HD_FN int lossless_raw_bits(uint32_t symbol, int context) {
    if (symbol == LOSSLESS_ESCAPE) return 16 - lossless_shift(context);
    return context == LOSSLESS_FRESH ? 8 : 0;
}
// Inverse of lossless_code.
HD_FN uint32_t lossless_value_of(LosslessCode code) {
    uint32_t symbol = code.symbol == LOSSLESS_ESCAPE ? 0 : code.symbol;
    return (((symbol << code.raw_bits) | code.raw) << code.low_bits) | code.low;
}

// --- rANS ---------------------------------------------------------------------------------------

// Returns true if the encoder must emit the state's low 16 bits before it pushes an event of
// probability frequency / 2^precision. precision: 1 to 16.
HD_FN bool lossless_overflows(uint32_t state, uint32_t frequency, int precision) {
    return state >> (32 - precision) >= frequency;
}
// Pushes a symbol with its low bits.
HD_FN uint32_t lossless_push_symbol(uint32_t state, uint32_t start, uint32_t frequency, uint32_t low,
                                    int low_bits) {
    uint32_t coded = ((state / frequency) << LOSSLESS_PRECISION) + state % frequency + start;
    return (coded << low_bits) | low;
}
HD_FN uint32_t lossless_push_bits(uint32_t state, uint32_t value, int bits) {
    return (state << bits) | value;
}
// Decoder: the slot of a state selects the symbol. lossless_pop_symbol then removes symbol and low
// bits from the state. A state below LOSSLESS_LOWEST takes the next word (lossless_take_word).
HD_FN uint32_t lossless_slot(uint32_t state, int low_bits) {
    return (state >> low_bits) & ((1u << LOSSLESS_PRECISION) - 1u);
}
HD_FN uint32_t lossless_pop_symbol(uint32_t state, int low_bits, uint32_t slot, uint32_t start,
                                   uint32_t frequency) {
    return frequency * (state >> (low_bits + LOSSLESS_PRECISION)) + slot - start;
}
HD_FN uint32_t lossless_take_word(uint32_t state, uint16_t word) { return (state << 16) | word; }

// --- a group's scale ----------------------------------------------------------------------------

// The encoder samples up to 32 runs of 4 weights in the group; run k starts at element
// lossless_run(k). It tries 32 scales relative to the largest old exponent among the samples, and
// uses the cheapest one (the first in case of a tie).
enum { LOSSLESS_RUNS = 32, LOSSLESS_RUN = 4, LOSSLESS_LEAST_SCALE = 8 };
HD_FN int lossless_run(int k) { return (256 + LOSSLESS_RUN) * k; }
HD_FN int lossless_candidate(int largest_exponent, int candidate) {
    int scale = largest_exponent - 22 + candidate;
    return scale < LOSSLESS_LEAST_SCALE ? LOSSLESS_LEAST_SCALE : scale > 255 ? 255 : scale;
}
// Returns a sample: the old exponent in the low 8 bits, the value of the change above them.
HD_FN uint32_t lossless_sample(uint32_t old, uint32_t fresh) {
    return (lossless_value(old, fresh, 0, 0) << 8) | ((old >> 7) & 0xFFu);
}
// Returns the cost of a sample in 1/256 bit. Fresh weights cost LOSSLESS_FRESH_COST at any scale.
HD_FN uint32_t lossless_cost(const uint16_t cost[][LOSSLESS_SYMBOLS], uint32_t sample, int scale) {
    int context = scale - (int)(sample & 0xFFu) + 6;
    context = context < 0 ? 0 : context < LOSSLESS_FRESH ? context : LOSSLESS_FRESH;
    uint32_t symbol = sample >> (context < 7 ? 8 : context + 1);
    return cost[context][symbol < LOSSLESS_ESCAPE ? symbol : (uint32_t)LOSSLESS_ESCAPE];
}
