// Random numbers. MT19937 reproduces numpy's legacy RandomState, which determines Megatron's sample
// order. The counter-based generator (Philox4x32-10 in numerics.h) is used for initialization
// (normal.h), dropout and sampling.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Mt19937 {
    uint32_t key[624];
    int position;
} Mt19937;

// Seeds as numpy.random.RandomState(seed) does for an integer seed (init_genrand).
void mt19937_seed(Mt19937 *rng, uint32_t seed);
uint32_t mt19937_u32(Mt19937 *rng);
// Draws a uniform integer in [0, max] by masked rejection, like numpy's legacy bounded draw. Draws
// nothing if max is 0.
uint64_t mt19937_bounded(Mt19937 *rng, uint64_t max);
// Shuffles like numpy.random.RandomState.shuffle of a 1-D array. The draws do not depend on the
// element type.
void mt19937_shuffle_i32(Mt19937 *rng, int32_t *x, int64_t n);
void mt19937_shuffle_u32(Mt19937 *rng, uint32_t *x, int64_t n);

// Returns the index-th uniform number in [0, 1) of this seed and purpose (PURPOSE_* in numerics.h),
// with 53 bits.
double rng_uniform(uint64_t seed, uint32_t purpose, uint64_t index);

LLMC_END
