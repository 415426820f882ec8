// Counter-based normals and uniforms: see rng.h. The MT19937 half is in mt19937.c.
#include "llmc/rng.h"

#include <math.h>

#include "sdp4bit/codec.h"

static Philox4 draw(uint64_t seed, uint32_t stream, uint64_t index) {
    return philox4x32_10((uint32_t)seed, (uint32_t)(seed >> 32) ^ PURPOSE_INIT, (uint32_t)index, (uint32_t)(index >> 32), stream, 0);
}

static double unit53(uint32_t high, uint32_t low) { return (double)((((uint64_t)high << 32) | low) >> 11) * 0x1p-53; }

double rng_uniform(uint64_t seed, uint32_t stream, uint64_t index) {
    Philox4 bits = draw(seed, stream, index);
    return unit53(bits.v[0], bits.v[1]);
}

void rng_normal_pair(uint64_t seed, uint32_t stream, uint64_t pair, double normal[2]) {
    Philox4 bits = draw(seed, stream, pair);
    double radius = sqrt(-2.0 * log(1.0 - unit53(bits.v[0], bits.v[1])));
    double angle = 6.283185307179586 * unit53(bits.v[2], bits.v[3]);
    normal[0] = radius * cos(angle);
    normal[1] = radius * sin(angle);
}
