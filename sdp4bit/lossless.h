// Lossless weights, inline for host and device: the change of every bf16 weight since the replica's
// latest one, entropy-coded. Receivers get the sender's bf16 weights to the bit. README.md,
// "Lossless weights", defines the message. Included by layout.h; called by the kernels of both
// backends (lossless_cpu.c, kernels_cuda_lossless.cu).
//
// A change is a number of units in the last place. How large it is likely to be depends on the
// weight's old exponent, which the receiver knows: an update is about as large for small weights as
// for large ones, but small weights have smaller units. So the old exponent, relative to a scale
// that each group sends, chooses one of 16 contexts. A context has a table of how often each symbol
// comes. The coder is rANS (Duda, arXiv 1311.2540) in 32 interleaved lanes, one per lane of a warp.
// All of it is integers.
#pragma once
#include "llmc/base/numerics.h"
#include "sdp4bit/lossless_tables.h"

enum {
    LOSSLESS_GROUP = 8192,  // weights that are coded together; a message's last group may be
                            // shorter. A multiple of 32
    LOSSLESS_LANES = 32,
    LOSSLESS_PRECISION = 10,  // bits: a context's frequencies add up to 2^10
    LOSSLESS_SYMBOLS = 16,
    LOSSLESS_ESCAPE = 15,  // the symbol of a value that has none: its 16 bits follow
    LOSSLESS_CONTEXTS = 16,
    LOSSLESS_FRESH = 14,                        // the context of weights that are smaller than their change
    LOSSLESS_ZERO = 15,                         // the context of zeros: pads, and weights nobody has used
    LOSSLESS_STATE_WORDS = 2 * LOSSLESS_LANES,  // words of 16 bits that the lanes' last states take
    LOSSLESS_CANDIDATES = 32,                   // scales that a group's encoder tries
    LOSSLESS_FRESH_COST = 2800                  // what it takes a fresh weight to cost, in 1/256 bit
};
#define LOSSLESS_LOWEST 0x10000u  // a lane's state lies in [2^16, 2^32); an encoder begins with this

// --- the message --------------------------------------------------------------------------------

// What a message begins with. A step that is skipped sends this alone, with zero elements.
typedef struct LosslessHeader {
    uint32_t bytes;  // of the message: a multiple of 16
    uint32_t elements, tail_elements;
    uint32_t zero;
} LosslessHeader;
// Where a group's words of 16 bits lie: the last one before `end`, which counts words of the
// payload and is a multiple of 8. As many words as elements: the weights as they are.
typedef struct LosslessEntry {
    uint32_t end;
    uint16_t words;
    uint8_t scale, zero;
} LosslessEntry;

// Offsets in a message, in bytes: its header, the tail as bf16, a table with an entry per group,
// and the groups. most: its bytes where nothing can be saved.
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
// Elements of group g.
HD_FN int lossless_group_elements(const LosslessLayout *m, int64_t g) {
    int64_t rest = m->elements - g * LOSSLESS_GROUP;
    return rest < LOSSLESS_GROUP ? (int)rest : (int)LOSSLESS_GROUP;
}
// Words that a group takes in the payload: groups end on 16 bytes.
HD_FN uint32_t lossless_padded_words(uint32_t words) { return (words + 7u) & ~7u; }
// Does the message speak of so many elements, and fit into so many bytes?
HD_FN bool lossless_header_sound(const LosslessHeader *h, const LosslessLayout *m, int64_t bytes) {
    return h->elements == m->elements && h->tail_elements == m->tail_elements && h->bytes <= bytes &&
           h->bytes >= m->payload && h->bytes % 16 == 0 && h->zero == 0;
}
// Does the group lie inside the payload, with a length that a group of n elements can have?
HD_FN bool lossless_entry_sound(LosslessEntry e, int n, int64_t payload_words) {
    return e.end <= payload_words && e.end % 8 == 0 && e.words <= e.end && e.zero == 0 &&
           (e.words == n || (e.words >= LOSSLESS_STATE_WORDS && e.words < n));
}

// --- one weight ---------------------------------------------------------------------------------

// bf16 bits as 16-bit integers in the order of the numbers.
HD_FN uint32_t lossless_ordered(uint32_t bits) { return (bits & 0x8000u ? ~bits : bits | 0x8000u) & 0xFFFFu; }
HD_FN uint32_t lossless_bits(uint32_t ordered) {
    return (ordered & 0x8000u ? ordered ^ 0x8000u : ~ordered) & 0xFFFFu;
}

// Contexts 0 to 13 expect changes of about 2^(context - 6) ulps. scale: the exponent of weights
// whose ulp is a group's usual change.
HD_FN int lossless_context(uint32_t old, int scale) {
    int exponent = (int)((old >> 7) & 0xFFu), context = scale - exponent + 6;
    if (context >= LOSSLESS_FRESH) return exponent == 0 ? LOSSLESS_ZERO : LOSSLESS_FRESH;
    return context < 0 ? 0 : context;
}
// Lowest bits of a value that every table takes for equally likely.
HD_FN int lossless_shift(int context) { return context < 7 || context >= LOSSLESS_FRESH ? 0 : context - 7; }

// The 16 bits that are coded for a new weight, the likeliest ones smallest. They are the change: 0,
// -1, 1, -2, ... ulps, modulo 2^16. Or a fresh weight: its exponent below the scale, then sign and
// mantissa.
HD_FN uint32_t lossless_value(uint32_t old, uint32_t fresh, int context, int scale) {
    if (context == LOSSLESS_FRESH) {
        uint32_t below = ((uint32_t)(scale - 4) - (fresh >> 7)) & 0xFFu;
        return (below << 8) | ((fresh >> 8) & 0x80u) | (fresh & 0x7Fu);
    }
    uint32_t change = lossless_ordered(fresh) - lossless_ordered(old);
    return ((change << 1) ^ (change & 0x8000u ? 0xFFFFu : 0u)) & 0xFFFFu;
}
// The weight that such a value stands for. Every value stands for one.
HD_FN uint32_t lossless_weight(uint32_t old, uint32_t value, int context, int scale) {
    if (context == LOSSLESS_FRESH) {
        uint32_t exponent = ((uint32_t)(scale - 4) - (value >> 8)) & 0xFFu;
        return ((value & 0x80u) << 8) | (exponent << 7) | (value & 0x7Fu);
    }
    uint32_t change = (value >> 1) ^ (value & 1u ? 0xFFFFu : 0u);
    return lossless_bits((lossless_ordered(old) + change) & 0xFFFFu);
}

// A value as it is coded: its symbol with the lowest bits, all at once, and then a run of bits that
// few values have.
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
// How many bits follow a symbol.
HD_FN int lossless_raw_bits(uint32_t symbol, int context) {
    if (symbol == LOSSLESS_ESCAPE) return 16 - lossless_shift(context);
    return context == LOSSLESS_FRESH ? 8 : 0;
}
// The value of a code.
HD_FN uint32_t lossless_value_of(LosslessCode code) {
    uint32_t symbol = code.symbol == LOSSLESS_ESCAPE ? 0 : code.symbol;
    return (((symbol << code.raw_bits) | code.raw) << code.low_bits) | code.low;
}

// --- rANS ---------------------------------------------------------------------------------------

// The tables of all contexts: how often a symbol comes, and how often those before it.
typedef struct LosslessTables {
    uint16_t frequency[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS];
    uint16_t start[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS];
    uint16_t cost[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS];  // in 1/256 bit
} LosslessTables;
// The symbol of each of a context's 2^10 slots, for decoders.
typedef struct LosslessSlots {
    uint8_t symbol[LOSSLESS_CONTEXTS][1 << LOSSLESS_PRECISION];
} LosslessSlots;

// The part of one of several threads. The tables must be whole before the slots are filled.
HD_FN void lossless_fill_tables(LosslessTables *t, const uint16_t frequency[][LOSSLESS_SYMBOLS],
                                const uint16_t cost[][LOSSLESS_SYMBOLS], int thread, int threads) {
    for (int c = thread; c < LOSSLESS_CONTEXTS; c += threads) {
        uint16_t start = 0;
        for (int q = 0; q < LOSSLESS_SYMBOLS; q++) {
            t->frequency[c][q] = frequency[c][q];
            t->cost[c][q] = c == LOSSLESS_FRESH ? (uint16_t)LOSSLESS_FRESH_COST : cost[c][q];
            t->start[c][q] = start;
            start = (uint16_t)(start + frequency[c][q]);
        }
    }
}
HD_FN void lossless_fill_slots(LosslessSlots *s, const LosslessTables *t, int thread, int threads) {
    for (int i = thread; i < LOSSLESS_CONTEXTS << LOSSLESS_PRECISION; i += threads) {
        int context = i >> LOSSLESS_PRECISION, slot = i & ((1 << LOSSLESS_PRECISION) - 1), q = 0;
        while (q < LOSSLESS_ESCAPE && t->start[context][q + 1] <= slot) q++;
        s->symbol[context][slot] = (uint8_t)q;
    }
}

// Must the encoder write the state's low 16 bits and drop them, before it pushes something whose
// probability is frequency / 2^precision? precision: 1 to 16.
HD_FN bool lossless_overflows(uint32_t state, uint32_t frequency, int precision) {
    return state >> (32 - precision) >= frequency;
}
// Pushes a symbol, whose place in its table is start and frequency, with its low bits.
HD_FN uint32_t lossless_push_symbol(uint32_t state, uint32_t start, uint32_t frequency, uint32_t low,
                                    int low_bits) {
    uint32_t coded = ((state / frequency) << LOSSLESS_PRECISION) + state % frequency + start;
    return (coded << low_bits) | low;
}
HD_FN uint32_t lossless_push_bits(uint32_t state, uint32_t value, int bits) {
    return (state << bits) | value;
}
// The decoder's inverse, where the state without its low bits has the slot of the symbol. Below
// LOSSLESS_LOWEST it then takes a word in.
HD_FN uint32_t lossless_slot(uint32_t state, int low_bits) {
    return (state >> low_bits) & ((1u << LOSSLESS_PRECISION) - 1u);
}
HD_FN uint32_t lossless_pop_symbol(uint32_t state, int low_bits, uint32_t slot, uint32_t start,
                                   uint32_t frequency) {
    return frequency * (state >> (low_bits + LOSSLESS_PRECISION)) + slot - start;
}
HD_FN uint32_t lossless_take_word(uint32_t state, uint16_t word) { return (state << 16) | word; }

// --- a group's scale ----------------------------------------------------------------------------

// The encoder looks at 4 neighbors of each 256 weights: the runs start at element
// lossless_run(k) of the group, k from 0 to 31. Those that lie in the group count. It tries the
// scales of all candidates, from the samples' largest old exponent on, and takes the one that costs
// least; of several the first.
enum { LOSSLESS_RUNS = 32, LOSSLESS_RUN = 4, LOSSLESS_LEAST_SCALE = 8 };
HD_FN int lossless_run(int k) { return (256 + LOSSLESS_RUN) * k; }
HD_FN int lossless_candidate(int largest_exponent, int candidate) {
    int scale = largest_exponent - 22 + candidate;
    return scale < LOSSLESS_LEAST_SCALE ? LOSSLESS_LEAST_SCALE : scale > 255 ? 255 : scale;
}
// A sample: the exponent of the old weight in 8 bits, above it the value of its change.
HD_FN uint32_t lossless_sample(uint32_t old, uint32_t fresh) {
    return (lossless_value(old, fresh, 0, 0) << 8) | ((old >> 7) & 0xFFu);
}
// What it costs, in 1/256 bit. Fresh weights and zeros cost the same at every scale.
HD_FN uint32_t lossless_cost(const uint16_t cost[][LOSSLESS_SYMBOLS], uint32_t sample, int scale) {
    int context = scale - (int)(sample & 0xFFu) + 6;
    context = context < 0 ? 0 : context < LOSSLESS_FRESH ? context : LOSSLESS_FRESH;
    uint32_t symbol = sample >> (context < 7 ? 8 : context + 1);
    return cost[context][symbol < LOSSLESS_ESCAPE ? symbol : (uint32_t)LOSSLESS_ESCAPE];
}
