// FP8 quantization, scales and products on GPUs: see ops_fp8.h.
//
// A block quantizes a tile of 128 x 128 elements. It reads the tensor once, and writes codes and
// transposed codes in whole lines of 128 bytes. Codes are converted by the hardware, which rounds
// as fp8_encode_scaled does.
#include <assert.h>
#include <cublasLt.h>
#include <cuda_fp8.h>

#include "llmc/cuda/common.cuh"
#include "llmc/ops_fp8.h"

// --- the quantized function of the tensor --------------------------------------------------------

// Computes columns column .. column + 7 of a row, rounded to floatX.
template <Fp8Source SOURCE>
static __device__ __forceinline__ Packed128 load_source(const floatX *x, int C, int64_t row, int column) {
    if constexpr (SOURCE == FP8_OF_X) return load_packed(x + row * C + column);
    float y[PACKED];
    if constexpr (SOURCE == FP8_OF_GELU) {
        unpack(load_packed(x + row * C + column), y);
#pragma unroll
        for (int e = 0; e < PACKED; e++) y[e] = gelu(y[e]);
    } else {
        float up[PACKED];
        unpack(load_packed(x + 2 * row * C + column), y);
        unpack(load_packed(x + (2 * row + 1) * C + column), up);
#pragma unroll
        for (int e = 0; e < PACKED; e++) y[e] = swiglu(y[e], up[e]);
    }
    return pack(y);
}

// --- absolute maxima -----------------------------------------------------------------------------

// Each thread loads ABSMAX_BATCH vectors of 8 values at once, to hide latency.
enum { ABSMAX_THREADS = 256, ABSMAX_BATCH = 4, ABSMAX_BLOCKS = 8 };

template <Fp8Source SOURCE>
static __global__ void __launch_bounds__(ABSMAX_THREADS)
    absmax_kernel(uint32_t *absmax, const floatX *x, int C, int64_t vectors) {
    const int64_t stride = (int64_t)gridDim.x * ABSMAX_THREADS;
    const int per_row = C / PACKED;
    uint32_t largest = 0;
    for (int64_t first = (int64_t)blockIdx.x * ABSMAX_THREADS + threadIdx.x; first < vectors;
         first += ABSMAX_BATCH * stride) {
        Packed128 batch[ABSMAX_BATCH];
#pragma unroll
        for (int i = 0; i < ABSMAX_BATCH; i++) {
            const int64_t vector = first + i * stride;
            batch[i].words = make_uint4(0, 0, 0, 0);
            if (vector >= vectors) continue;
            if constexpr (SOURCE == FP8_OF_SWIGLU) {
                const int64_t row = vector / per_row;
                batch[i] = load_source<SOURCE>(x, C, row, (int)(vector - row * per_row) * PACKED);
            } else {
                batch[i] = load_source<SOURCE>(x + vector * PACKED, C, 0, 0);
            }
        }
#pragma unroll
        for (int i = 0; i < ABSMAX_BATCH; i++) largest = packed_absolute(largest, batch[i]);
    }
    block_absolute(absmax, largest);
}

void op_fp8_absmax(Stream *s, const Fp8Quantize *a) {
    const int64_t vectors = a->N * a->C / PACKED, most = ABSMAX_BLOCKS * stream_device(s)->multiprocessors;
    if (vectors == 0) return;
    const int64_t wanted = ceil_div64(vectors, ABSMAX_THREADS * ABSMAX_BATCH);
    const unsigned blocks = (unsigned)(wanted < most ? wanted : most);
    uint32_t *absmax = &a->scale->absmax;
    cudaStream_t stream = stream_handle(s);
    switch (a->source) {
        case FP8_OF_X:
            absmax_kernel<FP8_OF_X><<<blocks, ABSMAX_THREADS, 0, stream>>>(absmax, a->x, a->C, vectors);
            break;
        case FP8_OF_GELU:
            absmax_kernel<FP8_OF_GELU><<<blocks, ABSMAX_THREADS, 0, stream>>>(absmax, a->x, a->C, vectors);
            break;
        case FP8_OF_SWIGLU:
            absmax_kernel<FP8_OF_SWIGLU><<<blocks, ABSMAX_THREADS, 0, stream>>>(absmax, a->x, a->C, vectors);
            break;
    }
    check_launch(s, "FP8 absmax");
}

// --- scales --------------------------------------------------------------------------------------

static __device__ __forceinline__ void set_scale(Fp8Scale *scale, float value) {
    scale->scale = value;
    scale->inverse = f32_div(1.0f, value);
}

// One warp.
static __global__ void scale_kernel(Fp8Scale *scale, Fp8Type type, const uint32_t *absmax, int n,
                                    int margin) {
    uint32_t largest = n == 0 ? scale->absmax : 0;
    for (int i = threadIdx.x; i < n; i += WARP) largest = max(largest, absmax[i]);
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
    if (threadIdx.x != 0) return;
    set_scale(scale, fp8_scale(largest, type, margin, 1.0f));
    scale->absmax = 0;
}

void op_fp8_scale(Stream *s, Fp8Scale *scale, Fp8Type type, const uint32_t *absmax, int n, int margin) {
    scale_kernel<<<1, WARP, 0, stream_handle(s)>>>(scale, type, absmax, n, margin);
    check_launch(s, "FP8 scale");
}

enum { UPDATE_WARPS = 4 };

// One warp per tensor, which shifts the tensor's history by one entry.
static __global__ void __launch_bounds__(UPDATE_WARPS *WARP) update_scales_kernel(Fp8Update a) {
    const int tensor = blockIdx.x * UPDATE_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (tensor >= a.tensors) return;
    uint32_t largest = 0;
    for (int rank = lane; rank < a.ranks; rank += WARP)
        largest = max(largest, a.all[(int64_t)rank * a.tensors + tensor].absmax);
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
    Fp8Scale *scale = &a.scale[tensor];
    if (lane == 0) scale->absmax = 0;
    if (largest == 0 || (a.applied && !*a.applied)) return;
    const uint32_t newest = largest < 0x7F800000u ? largest : 0;
    float *history = a.history + (int64_t)tensor * a.length;
    uint32_t kept = newest;  // largest entry of the new history
    for (int first = 0; first < a.length; first += WARP) {
        const int i = first + lane;
        const float next = i + 1 < a.length ? history[i + 1] : f32_from_bits(newest);
        __syncwarp();
        if (i < a.length) {
            history[i] = next;
            kept = max(kept, fp8_absolute(next));
        }
        __syncwarp();
    }
    kept = __reduce_max_sync(0xFFFFFFFFu, kept);
    if (lane != 0) return;
    const Fp8Type type = (Fp8Type)a.type[tensor];
    set_scale(scale, fp8_scale(a.most_recent ? newest : kept, type, a.margin, scale->scale));
}

void op_fp8_update_scales(Stream *s, const Fp8Update *a) {
    if (a->tensors == 0) return;
    const unsigned blocks = (unsigned)ceil_div64(a->tensors, UPDATE_WARPS);
    update_scales_kernel<<<blocks, UPDATE_WARPS * WARP, 0, stream_handle(s)>>>(*a);
    check_launch(s, "FP8 update scales");
}

// --- codes ---------------------------------------------------------------------------------------

// Encodes 8 values, as fp8_encode_scaled with a scale per value.
template <Fp8Type TYPE>
static __device__ __forceinline__ uint2 encode(const float x[PACKED], const float scale[PACKED]) {
    constexpr __nv_fp8_interpretation_t format = TYPE == FP8_E4M3 ? __NV_E4M3 : __NV_E5M2;
    float y[PACKED];
    uint32_t pair[PACKED / 2], largest = 0;
#pragma unroll
    for (int e = 0; e < PACKED; e++) {
        y[e] = f32_mul(x[e], scale[e]);
        largest = max(largest, fp8_absolute(y[e]));
    }
#pragma unroll
    for (int i = 0; i < PACKED / 2; i++)
        pair[i] = __nv_cvt_float2_to_fp8x2(make_float2(y[2 * i], y[2 * i + 1]), __NV_SATFINITE, format);
    if (largest >= 0x7F800000u) {  // rare: the conversion saturates infinities, and NaNs lose their sign
#pragma unroll
        for (int e = 0; e < PACKED; e++) {
            const uint32_t code = (f32_bits(x[e]) >> 24 & 0x80u) | 0x7Fu;
            pair[e / 2] |= fp8_absolute(x[e]) >= 0x7F800000u ? code << e % 2 * 8 : 0;
        }
    }
    return make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
}

// --- tiles ---------------------------------------------------------------------------------------

// A thread holds 8 columns (a group) of 4 consecutive rows (a quad). A warp holds all 16 groups of
// two quads.
enum { TILE = FP8_BLOCK, TILE_WARPS = 8, TILE_THREADS = TILE_WARPS * WARP };
enum { QUAD = 4, TILE_GROUPS = TILE / PACKED, TILE_QUADS = TILE / QUAD };
enum { QUAD_STEP = TILE_THREADS / TILE_GROUPS, QUAD_STEPS = TILE_QUADS / QUAD_STEP };
static_assert((int)QUAD_STEP == 2 * TILE_WARPS && (int)TILE_QUADS == WARP && TILE == 128,
              "a warp holds two quads of complete rows, and a tile's column is one line of shared memory");

// The tile's codes, transposed: one line of TILE bytes per column. The 4 codes of a quad are word
// `quad` of the line, stored at position quad ^ 2 * group, so that the 32 words that a warp writes
// are in different banks. 16-byte reads find their 4 words adjacent, in two swapped pairs if the
// group is odd.
struct TileLines {
    uint4 words[TILE][TILE / 16];
};

// Writes a thread's codes, 8 of each row of the quad.
static __device__ __forceinline__ void put_quad(TileLines *lines, int quad, int group,
                                                const uint2 rows[QUAD]) {
    uint32_t *word = reinterpret_cast<uint32_t *>(lines) + group * PACKED * TILE_QUADS + (quad ^ 2 * group);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t r[QUAD];
#pragma unroll
        for (int i = 0; i < QUAD; i++) r[i] = half ? rows[i].y : rows[i].x;
        // Transposes 4 x 4 bytes.
        const uint32_t low01 = __byte_perm(r[0], r[1], 0x5140), low23 = __byte_perm(r[2], r[3], 0x5140);
        const uint32_t high01 = __byte_perm(r[0], r[1], 0x7362), high23 = __byte_perm(r[2], r[3], 0x7362);
        word[(4 * half + 0) * TILE_QUADS] = __byte_perm(low01, low23, 0x5410);
        word[(4 * half + 1) * TILE_QUADS] = __byte_perm(low01, low23, 0x7632);
        word[(4 * half + 2) * TILE_QUADS] = __byte_perm(high01, high23, 0x5410);
        word[(4 * half + 3) * TILE_QUADS] = __byte_perm(high01, high23, 0x7632);
    }
}

// The rows and columns of a block's tile. Edges of the matrix are multiples of 16, so that quads,
// groups and 16-byte ranges of rows are inside or outside as a whole.
struct Tile {
    int64_t row, N;
    int column, C;
};
static __device__ __forceinline__ Tile block_tile(int64_t N, int C) {
    const unsigned across = (unsigned)(C + TILE - 1) / TILE;  // 1-D grid, because gridDim.y is limited
    return Tile{(int64_t)(blockIdx.x / across) * TILE, N, (int)(blockIdx.x % across) * TILE, C};
}
static unsigned tiles_of(int64_t N, int C) { return (unsigned)(ceil_div64(N, TILE) * ceil_div64(C, TILE)); }

// Stores the transposed codes: 8 lanes write the 128 bytes of a column.
static __device__ __forceinline__ void store_transposed(uint8_t *transposed, const TileLines *lines, Tile t) {
    const int lane = threadIdx.x % 8;
    const int64_t row = t.row + 16 * lane;
#pragma unroll
    for (int line = threadIdx.x / 8; line < TILE; line += TILE_THREADS / 8) {
        const int group = line / PACKED;
        uint4 v = lines->words[line][lane ^ group / 2];
        if (group % 2) v = make_uint4(v.z, v.w, v.x, v.y);
        if (row < t.N && t.column + line < t.C)
            *reinterpret_cast<uint4 *>(transposed + (int64_t)(t.column + line) * t.N + row) = v;
    }
}

// The values of a thread: quads step * QUAD_STEP + first_quad.
struct TileValues {
    Packed128 v[QUAD_STEPS][QUAD];
};
static __device__ __forceinline__ int tile_group() { return threadIdx.x % TILE_GROUPS; }
static __device__ __forceinline__ int tile_quad(int step) {
    return step * QUAD_STEP + threadIdx.x / TILE_GROUPS;
}

// Loads a tile of a matrix whose sizes are multiples of TILE.
template <Fp8Source SOURCE>
static __device__ __forceinline__ void load_tile(TileValues *values, const Fp8Quantize &a, Tile t) {
#pragma unroll
    for (int step = 0; step < QUAD_STEPS; step++) {
#pragma unroll
        for (int i = 0; i < QUAD; i++) {
            values->v[step][i] = load_source<SOURCE>(a.x, a.C, t.row + tile_quad(step) * QUAD + i,
                                                     t.column + tile_group() * PACKED);
        }
    }
}

static __device__ __forceinline__ void fill(float x[PACKED], float value) {
#pragma unroll
    for (int e = 0; e < PACKED; e++) x[e] = value;
}

template <Fp8Type TYPE>
static __device__ __forceinline__ uint2 encode_packed(Packed128 v, const float scale[PACKED]) {
    float x[PACKED];
    unpack(v, x);
    return encode<TYPE>(x, scale);
}

static __device__ __forceinline__ void store_codes(uint8_t *codes, int C, int64_t row, int column, uint2 v) {
    *reinterpret_cast<uint2 *>(codes + row * C + column) = v;
}

// --- quantization with one scale -----------------------------------------------------------------

template <Fp8Source SOURCE, Fp8Type TYPE>
static __global__ void __launch_bounds__(TILE_THREADS) quantize_kernel(Fp8Quantize a) {
    __shared__ TileLines lines;
    const Tile t = block_tile(a.N, a.C);
    const int column = t.column + tile_group() * PACKED;
    float scale[PACKED];
    fill(scale, a.scale->scale);
    uint32_t largest = 0;
#pragma unroll
    for (int step = 0; step < QUAD_STEPS; step++) {
        const int64_t row = t.row + tile_quad(step) * QUAD;
        if (row >= a.N || column >= a.C) continue;
        Packed128 values[QUAD];
        uint2 codes[QUAD];
#pragma unroll
        for (int i = 0; i < QUAD; i++) values[i] = load_source<SOURCE>(a.x, a.C, row + i, column);
#pragma unroll
        for (int i = 0; i < QUAD; i++) {
            codes[i] = encode_packed<TYPE>(values[i], scale);
            if (a.accumulate) largest = packed_absolute(largest, values[i]);
            if (a.codes) store_codes(a.codes, a.C, row + i, column, codes[i]);
        }
        if (a.transposed) put_quad(&lines, tile_quad(step), tile_group(), codes);
    }
    if (a.accumulate) block_absolute(&a.scale->absmax, largest);
    if (!a.transposed) return;
    __syncthreads();
    store_transposed(a.transposed, &lines, t);
}

// --- quantization with block scales --------------------------------------------------------------

// A block of 128 x 128 elements is a tile.
template <Fp8Source SOURCE, Fp8Type TYPE>
static __global__ void __launch_bounds__(TILE_THREADS) quantize_squares_kernel(Fp8Quantize a) {
    __shared__ TileLines lines;
    __shared__ uint32_t absmax;
    const Tile t = block_tile(a.N, a.C);
    TileValues values;
    load_tile<SOURCE>(&values, a, t);
    uint32_t largest = 0;
#pragma unroll
    for (int step = 0; step < QUAD_STEPS; step++) {
#pragma unroll
        for (int i = 0; i < QUAD; i++) largest = packed_absolute(largest, values.v[step][i]);
    }
    if (threadIdx.x == 0) absmax = 0;
    __syncthreads();
    block_absolute(&absmax, largest);
    __syncthreads();
    const float block_scale = fp8_block_scale(absmax, TYPE);
    if (threadIdx.x == 0) {
        const int64_t i = t.row / TILE, j = t.column / TILE;
        const float inverse = f32_div(1.0f, block_scale);
        if (a.codes) a.block_scales[i * fp8_squares_stride(a.C) + j] = inverse;
        if (a.transposed) a.transposed_block_scales[j * fp8_squares_stride(a.N) + i] = inverse;
    }
    float scale[PACKED];
    fill(scale, block_scale);
#pragma unroll
    for (int step = 0; step < QUAD_STEPS; step++) {
        uint2 codes[QUAD];
#pragma unroll
        for (int i = 0; i < QUAD; i++) {
            const int64_t row = t.row + tile_quad(step) * QUAD + i;
            codes[i] = encode_packed<TYPE>(values.v[step][i], scale);
            if (a.codes) store_codes(a.codes, a.C, row, t.column + tile_group() * PACKED, codes[i]);
        }
        if (a.transposed) put_quad(&lines, tile_quad(step), tile_group(), codes);
    }
    if (!a.transposed) return;
    __syncthreads();
    store_transposed(a.transposed, &lines, t);
}

// Encodes the tile's rows, each with its own scale. The 16 lanes of a row hold all of its columns.
template <Fp8Type TYPE>
static __device__ __forceinline__ void encode_rows(const Fp8Quantize &a, Tile t, const TileValues &values) {
    float *inverses = a.block_scales + t.column / TILE * a.N + t.row;
#pragma unroll
    for (int step = 0; step < QUAD_STEPS; step++) {
#pragma unroll
        for (int i = 0; i < QUAD; i++) {
            const int row = tile_quad(step) * QUAD + i;
            uint32_t largest = packed_absolute(0, values.v[step][i]);
#pragma unroll
            for (int stride = TILE_GROUPS / 2; stride > 0; stride /= 2)
                largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, stride));
            const float row_scale = fp8_block_scale(largest, TYPE);
            if (tile_group() == 0) inverses[row] = f32_div(1.0f, row_scale);
            float scale[PACKED];
            fill(scale, row_scale);
            store_codes(a.codes, a.C, t.row + row, t.column + tile_group() * PACKED,
                        encode_packed<TYPE>(values.v[step][i], scale));
        }
    }
}

// Largest |x| of each of the tile's columns, as floatX bits. maxima: of each warp's rows.
struct TileColumns {
    uint4 maxima[TILE_WARPS][TILE_GROUPS];
    float scale[TILE];
};

static __device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b) {
    return __vmaxu2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
}
static __device__ __forceinline__ uint4 max_packed(uint4 a, uint4 b) {
    return make_uint4(max_halves(a.x, b.x), max_halves(a.y, b.y), max_halves(a.z, b.z), max_halves(a.w, b.w));
}

// Computes the scale of each column of the tile. All threads must call it.
template <Fp8Type TYPE>
static __device__ __forceinline__ void scale_columns(TileColumns *columns, const Fp8Quantize &a, Tile t,
                                                     const TileValues &values) {
    uint4 largest = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int step = 0; step < QUAD_STEPS; step++) {
#pragma unroll
        for (int i = 0; i < QUAD; i++) largest = max_packed(largest, values.v[step][i].words);
    }
    uint4 other;  // the lane that holds the same columns of the warp's other quads
    other.x = __shfl_xor_sync(0xFFFFFFFFu, largest.x, TILE_GROUPS);
    other.y = __shfl_xor_sync(0xFFFFFFFFu, largest.y, TILE_GROUPS);
    other.z = __shfl_xor_sync(0xFFFFFFFFu, largest.z, TILE_GROUPS);
    other.w = __shfl_xor_sync(0xFFFFFFFFu, largest.w, TILE_GROUPS);
    const int warp = threadIdx.x / WARP;
    if (threadIdx.x % WARP < TILE_GROUPS) columns->maxima[warp][tile_group()] = max_packed(largest, other);
    __syncthreads();
    if (threadIdx.x < TILE) {
        const uint16_t *maxima = reinterpret_cast<const uint16_t *>(columns->maxima) + threadIdx.x;
        uint32_t absmax = 0;
#pragma unroll
        for (int w = 0; w < TILE_WARPS; w++) absmax = max(absmax, (uint32_t)maxima[w * TILE]);
        const float scale = fp8_block_scale(absmax << 16, TYPE);
        columns->scale[threadIdx.x] = scale;
        a.transposed_block_scales[t.row / TILE * a.C + t.column + threadIdx.x] = f32_div(1.0f, scale);
    }
    __syncthreads();
}

// Blocks are rows of the tile in `codes`, and columns of it in `transposed`.
template <Fp8Source SOURCE, Fp8Type TYPE>
static __global__ void __launch_bounds__(TILE_THREADS) quantize_rows_kernel(Fp8Quantize a) {
    __shared__ TileLines lines;
    __shared__ __align__(16) TileColumns columns;
    const Tile t = block_tile(a.N, a.C);
    TileValues values;
    load_tile<SOURCE>(&values, a, t);
    if (a.codes) encode_rows<TYPE>(a, t, values);
    if (!a.transposed) return;
    scale_columns<TYPE>(&columns, a, t, values);
    float scale[PACKED];
    load_floats(columns.scale + tile_group() * PACKED, scale);
#pragma unroll
    for (int step = 0; step < QUAD_STEPS; step++) {
        uint2 codes[QUAD];
#pragma unroll
        for (int i = 0; i < QUAD; i++) codes[i] = encode_packed<TYPE>(values.v[step][i], scale);
        put_quad(&lines, tile_quad(step), tile_group(), codes);
    }
    __syncthreads();
    store_transposed(a.transposed, &lines, t);
}

// --- launches ------------------------------------------------------------------------------------

template <Fp8Source SOURCE, Fp8Type TYPE> static void launch_quantize(Stream *s, const Fp8Quantize *a) {
    const unsigned tiles = tiles_of(a->N, a->C);
    cudaStream_t stream = stream_handle(s);
    switch (a->blocks) {
        case FP8_WHOLE: quantize_kernel<SOURCE, TYPE><<<tiles, TILE_THREADS, 0, stream>>>(*a); break;
        case FP8_ROWS: quantize_rows_kernel<SOURCE, TYPE><<<tiles, TILE_THREADS, 0, stream>>>(*a); break;
        case FP8_SQUARES:
            quantize_squares_kernel<SOURCE, TYPE><<<tiles, TILE_THREADS, 0, stream>>>(*a);
            break;
    }
    check_launch(s, "FP8 quantize");
}

template <Fp8Source SOURCE> static void quantize_as(Stream *s, const Fp8Quantize *a) {
    if (a->type == FP8_E4M3) launch_quantize<SOURCE, FP8_E4M3>(s, a);
    else launch_quantize<SOURCE, FP8_E5M2>(s, a);
}

void op_fp8_quantize(Stream *s, const Fp8Quantize *a) {
    assert(a->blocks == FP8_WHOLE || (a->N % FP8_BLOCK == 0 && a->C % FP8_BLOCK == 0));
    if (a->N == 0) return;
    switch (a->source) {
        case FP8_OF_X: quantize_as<FP8_OF_X>(s, a); break;
        case FP8_OF_GELU: quantize_as<FP8_OF_GELU>(s, a); break;
        case FP8_OF_SWIGLU: quantize_as<FP8_OF_SWIGLU>(s, a); break;
    }
}

static __global__ void __launch_bounds__(TILE_THREADS)
    transpose_kernel(uint8_t *transposed, const uint8_t *codes, int64_t N, int C) {
    __shared__ TileLines lines;
    const Tile t = block_tile(N, C);
    const int column = t.column + tile_group() * PACKED;
#pragma unroll
    for (int step = 0; step < QUAD_STEPS; step++) {
        const int64_t row = t.row + tile_quad(step) * QUAD;
        if (row >= N || column >= C) continue;
        uint2 rows[QUAD];
#pragma unroll
        for (int i = 0; i < QUAD; i++)
            rows[i] = *reinterpret_cast<const uint2 *>(codes + (row + i) * C + column);
        put_quad(&lines, tile_quad(step), tile_group(), rows);
    }
    __syncthreads();
    store_transposed(transposed, &lines, t);
}

void op_fp8_transpose(Stream *s, uint8_t *transposed, const uint8_t *codes, int64_t N, int C) {
    if (N == 0) return;
    transpose_kernel<<<tiles_of(N, C), TILE_THREADS, 0, stream_handle(s)>>>(transposed, codes, N, C);
    check_launch(s, "FP8 transpose");
}

// --- products ------------------------------------------------------------------------------------

bool op_check_fp8(const Device *device, Fp8Blocks blocks, Error *err) {
    const int capability = 10 * device->major + device->minor;
    if (capability < 89) {
        return usage_error(
            err,
            "%s (compute capability %d.%d) has no FP8 tensor cores, which need 8.9 or newer; drop "
            "--fp8-format to train in bf16",
            device->name, device->major, device->minor);
    }
    if (blocks == FP8_WHOLE) return true;
    if (device->major != 9) {
        return usage_error(err,
                           "%s (compute capability %d.%d): cuBLASLt computes --fp8-recipe blockwise only on "
                           "Hopper GPUs (9.0); use --fp8-recipe tensorwise",
                           device->name, device->major, device->minor);
    }
    const size_t version = cublasLtGetVersion();
    if (version >= FP8_BLOCKS_VERSION) return true;
    return usage_error(
        err,
        "cuBLASLt %zu.%zu does not compute --fp8-recipe blockwise, which needs 12.9 or newer; use "
        "--fp8-recipe tensorwise, or a newer CUDA toolkit",
        version / 10000, version / 100 % 100);
}

static GemmType gemm_type(Fp8Type type) { return type == FP8_E4M3 ? GEMM_E4M3 : GEMM_E5M2; }
static GemmScales gemm_scales(Fp8Blocks blocks) {
    const GemmScales scales[] = {GEMM_SCALE_WHOLE, GEMM_SCALE_ROWS, GEMM_SCALE_SQUARES};
    return scales[blocks];
}
static const float *scale_of(const Fp8Matrix *a) {
    return a->blocks == FP8_WHOLE ? &a->scale->inverse : a->block_scales;
}

Gemm fp8_gemm(const Fp8Product *a) {
    assert(a->a.blocks == FP8_WHOLE || !(a->m % FP8_BLOCK || a->n % FP8_BLOCK || a->k % FP8_BLOCK));
    Gemm g = {};
    g.d = a->d ? (void *)a->d : a->sum;
    g.a = a->a.codes, g.b = a->b.codes;
    g.a_type = gemm_type(a->a.type), g.b_type = gemm_type(a->b.type);
    g.a_scale = scale_of(&a->a), g.b_scale = scale_of(&a->b);
    g.a_scales = gemm_scales(a->a.blocks), g.b_scales = gemm_scales(a->b.blocks);
    g.transpose_b = true;
    g.fp32 = !a->d;
    g.accumulate = !a->d && !a->overwrite;
    g.m = a->m, g.n = a->n, g.k = a->k;
    g.epilogue = a->bias ? GEMM_BIAS : GEMM_PLAIN;
    g.bias = a->bias;
    g.fast = a->fast && a->a.blocks == FP8_WHOLE;  // block scales imply sums in fp32
    g.workspace = a->workspace;
    return g;
}

void op_fp8_product(Stream *s, const Fp8Product *a) {
    const Gemm g = fp8_gemm(a);
    gemm(s, &g);
}
