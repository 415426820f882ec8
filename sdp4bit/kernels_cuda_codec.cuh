// Device code of the codecs: codec rows as constants, conversion between values and codes,
// vectorized loads and stores. Included by kernels_cuda.cuh. Bit-identical to codec.h.
#pragma once
#include "llmc/cuda/common.cuh"
#include "sdp4bit/kernels.h"

#define DEV_FN static __device__ __forceinline__
static const uint32_t ALL_LANES = 0xFFFFFFFFu;

// --- codecs at compile time ---------------------------------------------------------------------

// The row of a codec as constants. Codecs without a row do not compile.
template <Codec CODEC> struct CodecRow;
#define CUDA_CODEC_ROW(ID, BITS_, LEVELS_, EDEN_) \
    template <> struct CodecRow<CODEC_##ID> { \
        static constexpr int BITS = BITS_, LEVELS = LEVELS_; \
        static constexpr uint32_t SIGN = LEVELS_ ? 1u << (BITS_ - 1) : 0; \
        static constexpr bool GROUPED = LEVELS > 0, FINE = LEVELS < 64, EDEN = EDEN_; \
    };
#define CUDA_ORDINARY_ROW(ID, NAME, BITS, LEVELS) CUDA_CODEC_ROW(ID, BITS, LEVELS, false)
#define CUDA_EDEN_ROW(ID, NAME, BITS, LEVELS) CUDA_CODEC_ROW(ID, BITS, LEVELS, true)
PLAIN_CODECS(CUDA_ORDINARY_ROW)
UNIFORM_CODECS(CUDA_ORDINARY_ROW)
EDEN_CODECS(CUDA_EDEN_ROW)

// Passes a codec to a generic lambda as a compile-time constant: launch(CodecValue<CODEC>()).
template <Codec CODEC> struct CodecValue { static constexpr Codec VALUE = CODEC; };
#define CUDA_CODEC_CASE(ID, NAME, BITS, LEVELS) \
    case CODEC_##ID: launch(CodecValue<CODEC_##ID>()); return;
// Call launch with the codec as a constant. with_codec excludes EDEN, which is used neither for
// weights nor inside the node. with_plain_codec allows only plain codecs.
template <class Launch> static void with_any_codec(Codec codec, Launch launch) {
    switch (codec) { ALL_CODECS(CUDA_CODEC_CASE) }
    stop_here();
}
template <class Launch> static void with_codec(Codec codec, Launch launch) {
    with_any_codec(codec, [&](auto value) {
        if constexpr (!CodecRow<decltype(value)::VALUE>::EDEN) launch(value);
        else stop_here();
    });
}
template <class Launch> static void with_plain_codec(Codec codec, Launch launch) {
    with_codec(codec, [&](auto value) {
        if constexpr (!CodecRow<decltype(value)::VALUE>::GROUPED) launch(value);
        else stop_here();
    });
}

// --- 8 floats per lane, whole sectors per access ------------------------------------------------

// 8 floats are one 32-byte sector. Pairs of lanes swap halves, so that the 16-byte accesses of a
// pair cover a whole sector. Called by the whole warp; only live lanes access memory.
DEV_FN float4 swap_with_neighbor(float4 mine) {
    return make_float4(__shfl_xor_sync(ALL_LANES, mine.x, 1), __shfl_xor_sync(ALL_LANES, mine.y, 1),
                       __shfl_xor_sync(ALL_LANES, mine.z, 1), __shfl_xor_sync(ALL_LANES, mine.w, 1));
}
DEV_FN void store_pairwise(float *p, const float x[PACKED], bool live) {
    bool odd = threadIdx.x & 1;
    float4 *pair = reinterpret_cast<float4 *>(odd ? p - PACKED : p) + odd;
    float4 low = make_float4(x[0], x[1], x[2], x[3]), high = make_float4(x[4], x[5], x[6], x[7]);
    float4 got = swap_with_neighbor(odd ? low : high);
    if (!live) return;
    pair[0] = odd ? got : low;
    pair[2] = odd ? high : got;
}
// Loads 8 elements through the read-only path; L1 merges the two halves of a sector.
DEV_FN void load_read_only(const float *p, float x[PACKED]) {
    float4 low = __ldg(reinterpret_cast<const float4 *>(p)),
           high = __ldg(reinterpret_cast<const float4 *>(p) + 1);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z,
    x[7] = high.w;
}

// --- codes --------------------------------------------------------------------------------------

// rintf and floorf without slow conversion instructions: for |v| < 2^22, adding 1.5 * 2^23 leaves
// the rounded v in the low mantissa bits. The sum's bits are 0x4B400000 + q for code q.
#define CODE_SHIFT 12582912.0f

// Codes need no clamping to -L..L. Since |x| <= m and the relative error of L / m is at most 2^-24,
// |v| exceeds L by at most one fp32 step. Then rint(v) is L, and v + u rounds to the grid of u,
// below L + 1. test/unit/sdp4bit/test_codec_bounds.c tries every mantissa.
DEV_FN void code_vector_nearest(uint32_t code[PACKED], const float v[PACKED]) {
#pragma unroll
    for (int i = 0; i < PACKED; i++) code[i] = f32_bits(f32_add(v[i], CODE_SHIFT));
}
// A byte permutation combines the upper half of the offset (code_stochastic) with an element's 16
// random bits into the float offset + u. The sum v + u then has a 16-bit fraction (FINE: up to 63
// levels) or a 15-bit fraction below its integer part. FINE needs no floor: byte 2 is 64 + code.
template <bool FINE>
DEV_FN void code_vector_stochastic(uint32_t code[PACKED], const float v[PACKED], Philox4 bits) {
    const uint32_t lift = FINE ? STOCHASTIC_FINE : STOCHASTIC_COARSE;
#pragma unroll
    for (int i = 0; i < PACKED; i++) {
        uint32_t word = FINE ? bits.v[i / 2] : bits.v[i / 2] & 0x7FFF7FFFu;
        float sum = f32_add(v[i], f32_from_bits(__byte_perm(word, lift, i & 1 ? 0x7632 : 0x7610)));
        code[i] = f32_bits(FINE ? sum : __fadd_rd(sum, CODE_SHIFT - 384.0f));
    }
}

// Returns byte BYTE of four words.
template <int BYTE> DEV_FN uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t pair = BYTE | (4 + BYTE) << 4;
    return __byte_perm(__byte_perm(a, b, pair), __byte_perm(c, d, pair), 0x5410);
}
// Returns the low nibbles of byte BYTE of eight words: signed codes plus a multiple of 16.
template <int BYTE> DEV_FN uint32_t pick_nibbles(const uint32_t code[PACKED]) {
    uint32_t even = pick_bytes<BYTE>(code[0], code[2], code[4], code[6]),
             odd = pick_bytes<BYTE>(code[1], code[3], code[5], code[7]);
    return (even & 0x0F0F0F0Fu) | (odd << 4 & 0xF0F0F0F0u);
}

// Packs the codes of the i-th vector of a run. 4-bit and 8-bit codes have faster paths.
template <Codec CODEC, bool STOCHASTIC, int WORDS>
DEV_FN void put_codes(uint32_t (&word)[WORDS], int i, const uint32_t (&code)[PACKED]) {
    constexpr int BITS = CodecRow<CODEC>::BITS;
    constexpr bool ABOVE = STOCHASTIC && CodecRow<CODEC>::FINE;  // byte 2 is 64 + the code
    if constexpr (BITS == 4) {
        word[i] = pick_nibbles < ABOVE ? 2 : 0 > (code);
    } else if constexpr (BITS == 8 && !ABOVE) {
        word[2 * i] = pick_bytes<0>(code[0], code[1], code[2], code[3]);
        word[2 * i + 1] = pick_bytes<0>(code[4], code[5], code[6], code[7]);
    } else {
#pragma unroll
        for (int e = 0; e < PACKED; e++) {
            const int at = (i * PACKED + e) * BITS, low = at % 32;
            uint32_t q = (ABOVE ? (code[e] >> 16) - 64 : code[e]) & (2 * CodecRow<CODEC>::SIGN - 1);
            word[at / 32] |= q << low;
            if (low + BITS > 32) word[at / 32 + 1] |= q >> (32 - low);
        }
    }
}

// Stores the first BYTES bytes of the words with the widest accesses that divide BYTES. `to` is
// sufficiently aligned, because ranges start at multiples of 32 elements.
template <int BYTES, int WORDS> DEV_FN void store_words(uint8_t *to, const uint32_t (&word)[WORDS]) {
    static_assert(BYTES <= 4 * WORDS && BYTES % 2 == 0, "codes of 8 elements are whole half words");
    if constexpr (BYTES % 16 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++) {
            const uint32_t *w = word + 4 * i;
            reinterpret_cast<uint4 *>(to)[i] = make_uint4(w[0], w[1], w[2], w[3]);
        }
    } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 8; i++) {
            reinterpret_cast<uint2 *>(to)[i] = make_uint2(word[2 * i], word[2 * i + 1]);
        }
    } else if constexpr (BYTES % 4 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) reinterpret_cast<uint32_t *>(to)[i] = word[i];
    } else {
#pragma unroll
        for (int i = 0; i < BYTES / 2; i++) {
            reinterpret_cast<uint16_t *>(to)[i] = (uint16_t)(word[i / 2] >> (16 * (i & 1)));
        }
    }
}

// Stores 8 values of a plain codec. Called by the whole warp.
template <Codec CODEC>
DEV_FN void store_plain_vector(uint8_t *to, int64_t offset, const float x[PACKED], bool live) {
    static_assert(!CodecRow<CODEC>::GROUPED, "a plain codec");
    if constexpr (CodecRow<CODEC>::BITS == 32) {
        store_pairwise(reinterpret_cast<float *>(to) + offset, x, live);
    } else if (live) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            word[i] = (uint32_t)bf16_from_float(x[2 * i]) | (uint32_t)bf16_from_float(x[2 * i + 1]) << 16;
        *reinterpret_cast<uint4 *>(reinterpret_cast<uint16_t *>(to) + offset) = make_uint4(word[0], word[1],
                                                                                           word[2], word[3]);
    }
}
// Store or load one value of a plain codec, for tails.
template <Codec CODEC> DEV_FN void store_plain_value(uint8_t *to, int64_t at, float x) {
    static_assert(!CodecRow<CODEC>::GROUPED, "a plain codec");
    if constexpr (CodecRow<CODEC>::BITS == 32) reinterpret_cast<float *>(to)[at] = x;
    else reinterpret_cast<uint16_t *>(to)[at] = bf16_from_float(x);
}
template <Codec CODEC> DEV_FN float load_plain_value(const uint8_t *from, int64_t at) {
    static_assert(!CodecRow<CODEC>::GROUPED, "a plain codec");
    if constexpr (CodecRow<CODEC>::BITS == 32) return __ldg(reinterpret_cast<const float *>(from) + at);
    else return bf16_to_float(__ldg(reinterpret_cast<const uint16_t *>(from) + at));
}

// --- decoding -----------------------------------------------------------------------------------

// Packed codes of N elements. N: a multiple of 8.
template <Codec CODEC, int N = PACKED> struct Raw {
    static constexpr int BYTES = N * CodecRow<CODEC>::BITS / 8, WORDS = (BYTES + 3) / 4;
    uint32_t word[WORDS];
};
// codes: address of the first element's code, aligned as for store_words.
template <Codec CODEC, int N = PACKED> DEV_FN Raw<CODEC, N> load_raw(const uint8_t *codes) {
    constexpr int BYTES = Raw<CODEC, N>::BYTES;
    Raw<CODEC, N> r;
    if constexpr (BYTES % 16 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++) {
            uint4 w = __ldg(reinterpret_cast<const uint4 *>(codes) + i);
            r.word[4 * i] = w.x, r.word[4 * i + 1] = w.y, r.word[4 * i + 2] = w.z, r.word[4 * i + 3] = w.w;
        }
    } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 8; i++) {
            uint2 w = __ldg(reinterpret_cast<const uint2 *>(codes) + i);
            r.word[2 * i] = w.x, r.word[2 * i + 1] = w.y;
        }
    } else if constexpr (BYTES % 4 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) r.word[i] = __ldg(reinterpret_cast<const uint32_t *>(codes) + i);
    } else if constexpr (BYTES % 2 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 2; i++) {
            uint32_t half = __ldg(reinterpret_cast<const uint16_t *>(codes) + i);
            r.word[i / 2] = i & 1 ? r.word[i / 2] | half << 16 : half;
        }
    } else {
#pragma unroll
        for (int i = 0; i < BYTES; i++) {
            uint32_t byte = __ldg(codes + i);
            r.word[i / 4] = i % 4 ? r.word[i / 4] | byte << (8 * (i % 4)) : byte;
        }
    }
    return r;
}
// Returns code i in the low bits, with bits of other codes above it. Codes may cross words.
template <Codec CODEC, int N> DEV_FN uint32_t code_and_more(const Raw<CODEC, N> &r, int i) {
    constexpr int BITS = CodecRow<CODEC>::BITS;
    const int low = i * BITS % 32;
    uint32_t code = r.word[i * BITS / 32] >> low;
    if (low + BITS > 32) code |= r.word[i * BITS / 32 + 1] << (32 - low);
    return code;
}
// Returns code i with its sign bit flipped: code + SIGN.
template <Codec CODEC, int N> DEV_FN uint32_t flipped_code(const Raw<CODEC, N> &r, int i) {
    return (code_and_more(r, i) & (2 * CodecRow<CODEC>::SIGN - 1)) ^ CodecRow<CODEC>::SIGN;
}

// EDEN's L levels are kept in registers: lanes k, L + k, 2L + k, ... hold level k. A shuffle by the
// code, which ignores its upper bits, returns the level. Called by the whole warp.
template <Codec CODEC> DEV_FN float eden_lane_level(void) {
    typedef CodecRow<CODEC> Row;
    float level = eden_level(Row::BITS, 0);
#pragma unroll
    for (int k = 1; k < Row::LEVELS; k++) {
        level = threadIdx.x % Row::LEVELS == k ? eden_level(Row::BITS, k) : level;
    }
    return level;
}
template <Codec CODEC> DEV_FN float eden_level_of(float lane_level, uint32_t code) {
    return __shfl_sync(ALL_LANES, lane_level, (int)code, CodecRow<CODEC>::LEVELS);
}
template <Codec CODEC, int N> DEV_FN void decode_eden(float (&x)[N], const Raw<CODEC, N> &r) {
    const float lane_level = eden_lane_level<CODEC>();
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint32_t code = code_and_more(r, i);
        x[i] = with_sign(eden_level_of<CODEC>(lane_level, code), code, CodecRow<CODEC>::BITS - 1);
    }
}

// Decodes x = (float)code, or the plain value. Puts the bits of code + SIGN (the code with its sign
// bit flipped) into the mantissa of a power of two; one exact subtraction then yields the code.
// 4-bit and 8-bit codes have faster paths.
template <Codec CODEC, int N> DEV_FN void decode_raw(float (&x)[N], const Raw<CODEC, N> &r) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        constexpr int BITS = CodecRow<CODEC>::BITS;
        if constexpr (BITS == 4) {
            // Nibble k of a half word stays at bits 4k .. 4k+3; the float's last place is 16^-k
            const int k = i % 4;
            const uint32_t power = (uint32_t)(127 + 23 - 4 * k) << 23;
            uint32_t flipped = (r.word[i / 8] ^ 0x88888888u) >> (16 * (i / 4 % 2));
            x[i] = f32_sub(f32_from_bits((flipped & (0xFu << (4 * k))) | power), f32_from_bits(power) + 8.0f);
        } else if constexpr (BITS == 8) {
            uint32_t flipped = r.word[i / 4] ^ 0x80808080u;
            x[i] = f32_sub(f32_from_bits(__byte_perm(flipped, 0x4B000000u, 0x7640 + i % 4)),
                           8388608.0f + 128.0f);
        } else if constexpr (CodecRow<CODEC>::GROUPED) {
            x[i] = f32_sub(f32_from_bits(flipped_code(r, i) | 0x4B000000u),
                           8388608.0f + (float)CodecRow<CODEC>::SIGN);
        } else if constexpr (BITS == 16) {
            x[i] = f32_from_bits(i & 1 ? r.word[i / 2] & 0xFFFF0000u : r.word[i / 2] << 16);
        } else {
            x[i] = f32_from_bits(r.word[i]);
        }
    }
}

// A faster path for scales below SMALL_SCALE. decode_biased puts code + SIGN at bit 16 of a float
// whose last place is 2^-149, so u = (code + SIGN) * 2^-133. (Nibbles in the upper half of a byte
// are 16 times larger.) scale_biased computes x = u * (scale * 2^133) - SIGN * scale as one fused
// operation, which rounds code * scale once, as a multiplication would. -0 cannot occur, because a
// scale of 0 has only zero codes.
#define SMALL_SCALE 0.03125f
// Returns word ^ mask. The compiler cannot move the inline assembly past later shifts and masks.
DEV_FN uint32_t flip_once(uint32_t word, uint32_t mask) {
    uint32_t flipped;
    asm("xor.b32 %0, %1, %2;" : "=r"(flipped) : "r"(word), "r"(mask));
    return flipped;
}
template <Codec CODEC, int N> DEV_FN void decode_biased(float (&u)[N], const Raw<CODEC, N> &r) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        if constexpr (CodecRow<CODEC>::BITS == 4) {
            uint32_t flipped = flip_once(r.word[i / 8], 0x88888888u);
            const int byte = i % 8 / 2;
            uint32_t placed = byte < 2 ? flipped << (16 - 8 * byte) : flipped >> (8 * byte - 16);
            u[i] = f32_from_bits(placed & (i & 1 ? 0x00F00000u : 0x000F0000u));
        } else if constexpr (CodecRow<CODEC>::BITS == 8) {
            u[i] = f32_from_bits(__byte_perm(r.word[i / 4] ^ 0x80808080u, 0, 0x4044 | (i % 4) << 8));
        } else {
            u[i] = f32_from_bits(flipped_code(r, i) << 16);
        }
    }
}
// Computes x = code * scale from the result of decode_biased.
template <Codec CODEC, int N> DEV_FN void scale_biased(float (&x)[N], const float (&u)[N], float scale) {
    const float lift = 0x1p127f, offset = f32_mul(scale, -(float)CodecRow<CODEC>::SIGN);
    float even = f32_mul(f32_mul(scale, lift), 64.0f);
    float odd = CodecRow<CODEC>::BITS == 4 ? f32_mul(f32_mul(scale, lift), 4.0f) : even;
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = __fmaf_rn(u[i], i & 1 ? odd : even, offset);
}
