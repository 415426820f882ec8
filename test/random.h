// Pseudo-random inputs of tests (splitmix64), identical on every machine and independent of the
// program's generators. Reference results that are copied to a GPU machine (test/gpu.sh) depend on
// them.
#pragma once
#include <stdint.h>

typedef struct Random {
    uint64_t state;
} Random;

static inline uint64_t random_u64(Random *r) {
    uint64_t z = r->state += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
static inline double random_uniform(Random *r) { return (double)(random_u64(r) >> 11) * 0x1p-53; }
// Scaled sum of four uniform numbers: mean 0, standard deviation 1, magnitude at most 3.5.
static inline double random_normal(Random *r) {
    double sum = -2.0;
    for (int i = 0; i < 4; i++) sum += random_uniform(r);
    return sum * 1.7320508;
}
