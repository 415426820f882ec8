// Lossless weights on the CPU; reference for the GPU kernels. kernels.h defines the kernels,
// lossless.h the format. Linked into the CPU program only.
#include <string.h>

#include "sdp4bit/kernels.h"

static const uint16_t FREQUENCIES[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS] = LOSSLESS_FREQUENCIES;
static const uint16_t COSTS[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS] = LOSSLESS_COSTS;

// Tables of all contexts: frequency of each symbol, start (sum of the frequencies before it), cost.
typedef struct Tables {
    uint16_t frequency[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS];
    uint16_t start[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS];
    uint16_t cost[LOSSLESS_CONTEXTS][LOSSLESS_SYMBOLS];          // in 1/256 bit
    uint8_t symbol[LOSSLESS_CONTEXTS][1 << LOSSLESS_PRECISION];  // symbol of each slot, for the decoder
} Tables;

static void fill_tables(Tables *t) {
    memcpy(t->frequency, FREQUENCIES, sizeof t->frequency);
    memcpy(t->cost, COSTS, sizeof t->cost);
    for (int c = 0; c < LOSSLESS_CONTEXTS; c++) {
        int slot = 0;
        for (int q = 0; q < LOSSLESS_SYMBOLS; q++) {
            if (c == LOSSLESS_FRESH) t->cost[c][q] = LOSSLESS_FRESH_COST;
            t->start[c][q] = (uint16_t)slot;
            for (int i = 0; i < FREQUENCIES[c][q]; i++) t->symbol[c][slot++] = (uint8_t)q;
        }
    }
}

// Step k codes 64 weights: lane l has weights 64k + 2l and 64k + 2l + 1. The decoder processes the
// steps in order. In each step all lanes decode their first weight, then all decode their second.
enum { STEP = 2 * LOSSLESS_LANES };
static int steps_of(int n) { return (n + STEP - 1) / STEP; }

// Writes a group's words from the last one to the first.
typedef struct WordWriter {
    uint16_t *words;
    int at;  // index of the first word written; negative: the group does not fit
} WordWriter;

static uint32_t spill(WordWriter *w, uint32_t state) {
    w->at--;
    if (w->at >= 0) w->words[w->at] = (uint16_t)state;
    return state >> 16;
}

static uint32_t push_bits(WordWriter *w, uint32_t state, uint32_t value, int bits) {
    if (bits == 0) return state;
    if (lossless_overflows(state, 1, bits)) state = spill(w, state);
    return lossless_push_bits(state, value, bits);
}

static uint32_t push_symbol(WordWriter *w, uint32_t state, uint32_t start, uint32_t frequency,
                            LosslessCode code) {
    if (lossless_overflows(state, frequency, LOSSLESS_PRECISION + code.low_bits)) state = spill(w, state);
    return lossless_push_symbol(state, start, frequency, code.low, code.low_bits);
}

// --- encoder ------------------------------------------------------------------------------------

// A group of n weights.
typedef struct Group {
    const uint16_t *old, *fresh;
    int n;
} Group;

static int choose_scale(const Tables *t, const Group *g) {
    uint32_t sample[LOSSLESS_RUNS * LOSSLESS_RUN] = {0}, least = UINT32_MAX;
    int samples = 0, largest = 0, best = 0;
    for (int k = 0; k < LOSSLESS_RUNS && lossless_run(k) + LOSSLESS_RUN <= g->n; k++) {
        for (int i = lossless_run(k); i < lossless_run(k) + LOSSLESS_RUN; i++, samples++) {
            sample[samples] = lossless_sample(g->old[i], g->fresh[i]);
            int exponent = (int)(sample[samples] & 0xFFu);
            if (exponent > largest) largest = exponent;
        }
    }
    for (int c = 0; c < LOSSLESS_CANDIDATES; c++) {
        uint32_t cost = 0;
        int scale = lossless_candidate(largest, c);
        for (int k = 0; k < samples; k++) cost += lossless_cost(t->cost, sample[k], scale);
        if (cost >= least) continue;
        least = cost;
        best = scale;
    }
    return best;
}

// Pushes one weight of every lane. Rounds and lanes are in the reverse order of the decoder.
static void push_row(WordWriter *w, uint32_t *state, const Tables *t, const Group *g, int first, int scale) {
    LosslessCode code[LOSSLESS_LANES];
    int context[LOSSLESS_LANES], lanes = 0;
    for (int i = first; lanes < LOSSLESS_LANES && i < g->n; i += 2, lanes++) {
        context[lanes] = lossless_context(g->old[i], scale);
        uint32_t value = lossless_value(g->old[i], g->fresh[i], context[lanes], scale);
        code[lanes] = lossless_code(value, context[lanes]);
    }
    for (int l = lanes - 1; l >= 0; l--) state[l] = push_bits(w, state[l], code[l].raw, code[l].raw_bits);
    for (int l = lanes - 1; l >= 0; l--) {
        int c = context[l];
        uint32_t q = code[l].symbol;
        state[l] = push_symbol(w, state[l], t->start[c][q], t->frequency[c][q], code[l]);
    }
}

// Writes a group's words so that they end at slot + n, with leading zeros up to a multiple of 8.
// Returns the table entry without `end`.
static LosslessEntry code_group(const Tables *t, const Group *g, uint16_t *slot) {
    uint32_t state[LOSSLESS_LANES];
    WordWriter w = {slot, g->n - LOSSLESS_STATE_WORDS};
    LosslessEntry entry = {0, (uint16_t)g->n, (uint8_t)choose_scale(t, g), 0};
    for (int l = 0; l < LOSSLESS_LANES; l++) state[l] = LOSSLESS_LOWEST;
    for (int k = steps_of(g->n) - 1; k >= 0 && w.at > 0; k--) {
        push_row(&w, state, t, g, k * STEP + 1, entry.scale);
        push_row(&w, state, t, g, k * STEP, entry.scale);
    }
    if (w.at <= 0) {  // coding does not save anything
        memcpy(slot, g->fresh, (size_t)g->n * sizeof *slot);
        return entry;
    }
    uint16_t *last = slot + g->n - LOSSLESS_STATE_WORDS;
    for (int l = 0; l < LOSSLESS_LANES; l++) {
        last[2 * l] = (uint16_t)state[l];
        last[2 * l + 1] = (uint16_t)(state[l] >> 16);
    }
    entry.words = (uint16_t)(g->n - w.at);
    while (w.at % 8) slot[--w.at] = 0;
    return entry;
}

void kernel_code_weights(Stream *s, const CodeWeights *a) {
    const LosslessLayout *m = &a->layout;
    LosslessHeader header = {sizeof header, 0, 0, 0};
    if (a->control->applied) {
        Tables tables;
        fill_tables(&tables);
        LosslessEntry *entry = (LosslessEntry *)(void *)(a->coded + m->table);
        const uint16_t *old = (const uint16_t *)(const void *)a->old;
        const uint16_t *fresh = (const uint16_t *)(const void *)a->fresh;
        uint16_t *payload = (uint16_t *)(void *)(a->coded + m->payload);
        uint32_t end = 0;
        for (int64_t i = 0; i < m->groups; i++) {
            int64_t at = i * LOSSLESS_GROUP;
            Group group = {old + at, fresh + at, lossless_group_elements(m, i)};
            entry[i] = code_group(&tables, &group, payload + at);
            entry[i].end = end += lossless_padded_words(entry[i].words);
        }
        memcpy(a->coded + m->tail, a->tail, (size_t)m->tail_elements * sizeof(uint16_t));
        header.bytes = (uint32_t)m->payload + end * (uint32_t)sizeof(uint16_t);
        header.elements = (uint32_t)m->elements;
        header.tail_elements = (uint32_t)m->tail_elements;
    }
    memcpy(a->coded, &header, sizeof header);
    *a->bytes = header.bytes;
}

void kernel_pack_weights(Stream *s, const LosslessLayout *m, const uint8_t *coded, uint8_t *message) {
    const LosslessHeader *header = (const LosslessHeader *)(const void *)coded;
    const LosslessEntry *entry = (const LosslessEntry *)(const void *)(coded + m->table);
    const uint16_t *from = (const uint16_t *)(const void *)(coded + m->payload);
    uint16_t *to = (uint16_t *)(void *)(message + m->payload);
    bool skipped = header->bytes == sizeof *header;
    memcpy(message, coded, skipped ? sizeof *header : (size_t)m->payload);
    for (int64_t i = 0; !skipped && i < m->groups; i++) {
        uint32_t words = lossless_padded_words(entry[i].words);
        int64_t end = i * LOSSLESS_GROUP + lossless_group_elements(m, i);
        memcpy(to + entry[i].end - words, from + end - words, words * sizeof *to);
    }
}

// --- decoder ------------------------------------------------------------------------------------

// Reads a group's words. In corrupt messages, reads past the end return the last word.
typedef struct WordReader {
    const uint16_t *words;
    int at, last;  // index of the next word; index of the last word, which belongs to the states
} WordReader;

static uint32_t refill(WordReader *r, uint32_t state) {
    if (state >= LOSSLESS_LOWEST) return state;
    uint16_t word = r->words[r->at < r->last ? r->at : r->last];
    r->at++;
    return lossless_take_word(state, word);
}

// With 0 bits, reads no word even if the state is below LOSSLESS_LOWEST, as in a corrupt message.
static uint32_t pop_bits(WordReader *r, uint32_t *state, int bits) {
    if (bits == 0) return 0;
    uint32_t value = *state & ((1u << bits) - 1u);
    *state = refill(r, *state >> bits);
    return value;
}

// Pops one weight of every lane: weights[first], weights[first + 2], ...
static void pop_row(WordReader *r, uint32_t *state, const Tables *t, uint16_t *weights, int first, int n,
                    int scale) {
    LosslessCode code[LOSSLESS_LANES];
    int context[LOSSLESS_LANES], lanes = 0;
    for (int i = first; lanes < LOSSLESS_LANES && i < n; i += 2, lanes++) {
        int c = context[lanes] = lossless_context(weights[i], scale), low = lossless_shift(c);
        uint32_t slot = lossless_slot(state[lanes], low), q = t->symbol[c][slot];
        code[lanes] = (LosslessCode){q, state[lanes] & ((1u << low) - 1u), 0, low, lossless_raw_bits(q, c)};
        state[lanes] = refill(r, lossless_pop_symbol(state[lanes], low, slot, t->start[c][q],
                                                     t->frequency[c][q]));
    }
    for (int l = 0; l < lanes; l++) code[l].raw = pop_bits(r, &state[l], code[l].raw_bits);
    for (int l = 0; l < lanes; l++) {
        uint16_t *weight = &weights[first + 2 * l];
        *weight = (uint16_t)lossless_weight(*weight, lossless_value_of(code[l]), context[l], scale);
    }
}

// Returns false if the group is corrupt or was coded relative to other old weights.
static bool decode_group(const Tables *t, LosslessEntry entry, const uint16_t *words, uint16_t *weights,
                         int n) {
    uint32_t state[LOSSLESS_LANES];
    if (entry.words == n) {
        memcpy(weights, words, (size_t)n * sizeof *weights);
        return true;
    }
    int states = entry.words - LOSSLESS_STATE_WORDS;
    WordReader r = {words, 0, entry.words - 1};
    for (int l = 0; l < LOSSLESS_LANES; l++) {
        const uint16_t *half = words + states + 2 * l;
        state[l] = half[0] | ((uint32_t)half[1] << 16);
    }
    for (int k = 0; k < steps_of(n); k++) {
        pop_row(&r, state, t, weights, k * STEP, n, entry.scale);
        pop_row(&r, state, t, weights, k * STEP + 1, n, entry.scale);
    }
    bool sound = r.at == states;
    for (int l = 0; l < LOSSLESS_LANES; l++) sound &= state[l] == LOSSLESS_LOWEST;
    return sound;
}

static bool decode_message(const Tables *t, const DecodeWeights *a, const uint8_t *message, uint16_t *weights,
                           uint16_t *tail) {
    const LosslessLayout *m = &a->layout;
    const LosslessHeader *header = (const LosslessHeader *)(const void *)message;
    const LosslessEntry *entry = (const LosslessEntry *)(const void *)(message + m->table);
    const uint16_t *payload = (const uint16_t *)(const void *)(message + m->payload);
    if (a->bytes < (int64_t)sizeof *header || !lossless_header_sound(header, m, a->bytes)) return false;
    int64_t words = (header->bytes - m->payload) / (int64_t)sizeof *payload;
    bool sound = true;
    memcpy(tail, message + m->tail, (size_t)m->tail_elements * sizeof *tail);
    for (int64_t i = 0; i < m->groups; i++) {
        int n = lossless_group_elements(m, i);
        sound = lossless_entry_sound(entry[i], n, words) &&
                decode_group(t, entry[i], payload + entry[i].end - entry[i].words,
                             weights + i * LOSSLESS_GROUP, n) &&
                sound;
    }
    return sound;
}

void kernel_decode_weights(Stream *s, const DecodeWeights *a) {
    const LosslessLayout *m = &a->layout;
    int messages = a->nodes * a->per_node;
    uint16_t *weights = (uint16_t *)(void *)a->weights;
    if (!a->control->applied) return;
    Tables tables;
    fill_tables(&tables);
    for (int slot = 0; slot < messages; slot++) {
        int64_t rank = gather_rank(a->nodes, a->per_node, slot);
        uint16_t *tail = weights + messages * m->elements + rank * m->tail_elements;
        const uint8_t *message = a->messages + slot * a->stride;
        bool sound = decode_message(&tables, a, message, weights + rank * m->elements, tail);
        if (!sound && !*a->fault) *a->fault = a->code + (uint64_t)slot;
    }
}
