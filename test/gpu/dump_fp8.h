// FP8 quantization in kernels_dump, which includes this file.
#pragma once
#include "llmc/ops_fp8.h"
#include "test/gpu/dump.h"

// bf16 values around 1 with exponents from 2^-7 to 2^8, and random bits (including NaN and
// infinity) in one of `strange` values on average; 0: none.
static inline uint8_t *uploaded_tensor(Dump *d, int64_t n, uint32_t source, uint32_t strange) {
    uint16_t *host = (uint16_t *)xmalloc((size_t)n * sizeof *host, "test data");
    for (int64_t i = 0; i < n; i++) {
        Philox4 bits = philox4x32_10(SEED, PURPOSE_DATA, (uint32_t)i, source, 9, 0);
        host[i] = (uint16_t)((bits.v[0] & 0x807Fu) | (120 + bits.v[1] % 16) << 7);
        if (strange && bits.v[2] % strange == 0) host[i] = (uint16_t)bits.v[3];
    }
    uint8_t *memory = (uint8_t *)upload(d, host, n * (int64_t)sizeof *host);
    stream_synchronize(d->stream);
    free(host);
    return memory;
}

static inline void quantize_whole(Dump *d, Fp8Quantize *a) {
    int64_t n = a->N * a->C;
    op_fp8_absmax(d->stream, a);
    result(d, RAW, &a->scale->absmax, sizeof a->scale->absmax, "absmax");
    op_fp8_scale(d->stream, a->scale, a->type, NULL, 0, 0);
    a->accumulate = true;
    op_fp8_quantize(d->stream, a);
    result(d, RAW, a->scale, sizeof *a->scale, "scale");
    result(d, RAW, a->codes, n, "codes");
    result(d, RAW, a->transposed, n, "transposed");
    op_fp8_transpose(d->stream, a->codes, a->transposed, a->C, (int)a->N);
    result(d, RAW, a->codes, n, "transposed twice");
}

static inline void quantize_blocks(Dump *d, Fp8Quantize *a) {
    int64_t n = a->N * a->C, scales = fp8_block_scales(a->blocks, a->N, a->C) * (int64_t)sizeof(float),
            others = fp8_block_scales(a->blocks, a->C, a->N) * (int64_t)sizeof(float);
    a->block_scales = (float *)reserve(d, scales), a->transposed_block_scales = (float *)reserve(d, others);
    op_fp8_quantize(d->stream, a);
    result(d, RAW, a->block_scales, scales, "block scales");
    result(d, RAW, a->transposed_block_scales, others, "transposed block scales");
    result(d, RAW, a->codes, n, "codes");
    result(d, RAW, a->transposed, n, "transposed");
    release(d, a->block_scales), release(d, a->transposed_block_scales);
}

static inline void quantize(Dump *d, int64_t N, int C, Fp8Type type, Fp8Blocks blocks, uint32_t strange) {
    snprintf(d->prefix, sizeof d->prefix, "fp8_%lldx%d_%s_%d_%u", (long long)N, C,
             type == FP8_E4M3 ? "e4m3" : "e5m2", (int)blocks, strange);
    Fp8Quantize a = {.N = N, .C = C, .type = type, .blocks = blocks};
    a.x = (floatX *)uploaded_tensor(d, N * C, (uint32_t)C, strange);
    a.codes = (uint8_t *)reserve(d, N * C), a.transposed = (uint8_t *)reserve(d, N * C);
    a.scale = (Fp8Scale *)reserve(d, sizeof *a.scale);
    if (blocks == FP8_WHOLE) quantize_whole(d, &a);
    else quantize_blocks(d, &a);
    release(d, (void *)a.x), release(d, a.codes), release(d, a.transposed), release(d, a.scale);
}

static inline void fp8_codes(Dump *d) {
    static const int sizes[][2] = {{16, 16}, {80, 208}, {1040, 272}, {128, 256}, {384, 1152}};
    for (int i = 0; i < 5; i++) {
        bool whole_blocks = sizes[i][0] % FP8_BLOCK == 0 && sizes[i][1] % FP8_BLOCK == 0;
        for (int form = 0; form < 4; form++) {
            for (int blocks = FP8_WHOLE; blocks <= (whole_blocks ? FP8_SQUARES : FP8_WHOLE); blocks++) {
                quantize(d, sizes[i][0], sizes[i][1], (Fp8Type)(form % 2), (Fp8Blocks)blocks,
                         form < 2 ? 0 : 50);
            }
        }
    }
}
