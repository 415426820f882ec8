// Counter-based uniforms: see rng.h. The MT19937 half is in mt19937.c.
#include "llmc/base/rng.h"

#include "llmc/base/normal.h"

double rng_uniform(uint64_t seed, uint32_t purpose, uint64_t index) {
    Philox4 bits = counter_bits(seed, purpose, 0, index);
    return uniform53(bits.v[0], bits.v[1]);
}
