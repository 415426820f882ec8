// Random numbers: see rng.h.
#include "llmc/base/rng.h"

#include <assert.h>

#include "llmc/base/normal.h"

double rng_uniform(uint64_t seed, uint32_t purpose, uint64_t index) {
    Philox4 bits = counter_bits(seed, purpose, 0, index);
    return uniform53(bits.v[0], bits.v[1]);
}

// numpy's legacy RandomState, which numpy documents as frozen. Source: M. Matsumoto, T. Nishimura,
// "Mersenne Twister", ACM TOMACS 8(1), 1998; parameters of MT19937.
enum { MT_N = 624, MT_M = 397 };

void mt19937_seed(Mt19937 *rng, uint32_t seed) {
    rng->key[0] = seed;
    for (uint32_t i = 1; i < MT_N; i++) {
        uint32_t before = rng->key[i - 1];
        rng->key[i] = 1812433253u * (before ^ (before >> 30)) + i;
    }
    rng->position = MT_N;
}

static inline uint32_t twist(uint32_t high, uint32_t low, uint32_t other) {
    uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
    return other ^ (y >> 1) ^ (-(y & 1u) & 0x9908b0dfu);
}

// Generates the next 624 words of state.
static void refill(Mt19937 *rng) {
    uint32_t *k = rng->key;
    for (int i = 0; i < MT_N - MT_M; i++) k[i] = twist(k[i], k[i + 1], k[i + MT_M]);
    for (int i = MT_N - MT_M; i < MT_N - 1; i++) k[i] = twist(k[i], k[i + 1], k[i + MT_M - MT_N]);
    k[MT_N - 1] = twist(k[MT_N - 1], k[0], k[MT_M - 1]);
    rng->position = 0;
}

uint32_t mt19937_u32(Mt19937 *rng) {
    assert(rng->position <= MT_N);  // seeded
    if (rng->position == MT_N) refill(rng);
    uint32_t y = rng->key[rng->position++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

uint64_t mt19937_bounded(Mt19937 *rng, uint64_t max) {
    if (max == 0) return 0;
    uint64_t mask = UINT64_MAX >> __builtin_clzll(max), draw;
    if (max <= UINT32_MAX) {
        do draw = mt19937_u32(rng) & mask;
        while (draw > max);
        return draw;
    }
    do {
        draw = (uint64_t)mt19937_u32(rng) << 32;
        draw = (draw | mt19937_u32(rng)) & mask;
    } while (draw > max);
    return draw;
}

// Draws the swap partners of elements last, last-1, ..., last-count+1. They do not depend on the
// array, so they are drawn a block ahead and prefetched; otherwise a shuffle of 10^8 elements would
// wait for memory at every step.
enum { BLOCK = 128 };
static int draw_partners(Mt19937 *rng, int64_t last, uint64_t partner[BLOCK]) {
    int count = last < BLOCK ? (int)last : BLOCK;
    for (int k = 0; k < count; k++) partner[k] = mt19937_bounded(rng, (uint64_t)(last - k));
    return count;
}

// for i = n-1 down to 1: swaps x[i] with x[bounded draw of 0..i].
#define DEFINE_SHUFFLE(name, type) \
    void name(Mt19937 *rng, type *x, int64_t n) { \
        uint64_t partner[BLOCK]; \
        for (int64_t last = n - 1; last > 0;) { \
            int count = draw_partners(rng, last, partner); \
            for (int k = 0; k < count; k++) __builtin_prefetch(x + partner[k], 1); \
            for (int k = 0; k < count; k++, last--) { \
                type held = x[last]; \
                x[last] = x[partner[k]]; \
                x[partner[k]] = held; \
            } \
        } \
    }

DEFINE_SHUFFLE(mt19937_shuffle_i32, int32_t)
DEFINE_SHUFFLE(mt19937_shuffle_u32, uint32_t)
