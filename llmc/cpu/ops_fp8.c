// CPU ops, part 5: FP8 linear layers (see llmc/ops_fp8.h). Products decode tiles of codes to fp32
// and call OpenBLAS. Products of two codes are exact in fp32.
#include "llmc/cpu/ops_internal.h"
#include "llmc/ops_fp8.h"

bool op_check_fp8(const Device *device, Fp8Blocks blocks, Error *err) { return true; }

// --- quantization --------------------------------------------------------------------------------

enum { TILE = FP8_BLOCK };  // tensors are quantized in tiles of at most TILE x TILE elements

typedef struct Tile {
    int64_t row, column;  // of its first element
    int rows, columns;
    float values[TILE][TILE];
    uint8_t codes[TILE][TILE];
} Tile;

// Returns columns column .. column + n - 1 of a row. buffer: space for n values.
static const floatX *source_values(const Fp8Quantize *a, int64_t row, int64_t column, int n, floatX *buffer) {
    if (a->source == FP8_OF_SWIGLU) {
        const floatX *gate = a->x + row * 2 * a->C + column;
        swiglu(buffer, gate, gate + a->C, n);
        return buffer;
    }
    const floatX *x = a->x + row * a->C + column;
    if (a->source == FP8_OF_X) return x;
    op_gelu_forward(NULL, buffer, x, n);
    return buffer;
}

static uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }

static uint32_t absolute_maximum(const float *x, int64_t n) {
    uint32_t max = 0;
    for (int64_t i = 0; i < n; i++) max = max_u32(max, fp8_absolute(x[i]));
    return max;
}

static void read_tile(const Fp8Quantize *a, Tile *tile, int64_t row, int64_t column) {
    floatX buffer[TILE];
    tile->row = row, tile->column = column;
    tile->rows = (int)min64(TILE, a->N - row);
    tile->columns = (int)min64(TILE, a->C - column);
    for (int r = 0; r < tile->rows; r++) {
        const floatX *x = source_values(a, row + r, column, tile->columns, buffer);
        for (int c = 0; c < tile->columns; c++) tile->values[r][c] = floatX_to_float(x[c]);
    }
}

static inline void encode_row_as(uint8_t *restrict codes, const float *x, const float *scale, int n,
                                 Fp8Type type) {
    for (int i = 0; i < n; i++) codes[i] = fp8_encode_scaled(x[i], scale[i], type);
}
// The format is a constant in each call, which makes the loop faster.
static void encode_row(uint8_t *codes, const float *x, const float *scale, int n, Fp8Type type) {
    if (type == FP8_E4M3) {
        encode_row_as(codes, x, scale, n, FP8_E4M3);
    } else {
        encode_row_as(codes, x, scale, n, FP8_E5M2);
    }
}

// Encodes the tile into tile->codes. The scale of element (r, c) is row_scale[r] * column_scale[c],
// where one factor is 1.
static void encode_tile(Tile *tile, const float *row_scale, const float *column_scale, Fp8Type type) {
    float scale[TILE];
    for (int r = 0; r < tile->rows; r++) {
        for (int c = 0; c < TILE; c++) scale[c] = row_scale[r] * column_scale[c];
        encode_row(tile->codes[r], tile->values[r], scale, tile->columns, type);
    }
}

static void store_codes(const Fp8Quantize *a, const Tile *tile) {
    for (int r = 0; r < tile->rows; r++) {
        uint8_t *codes = a->codes + (tile->row + r) * a->C + tile->column;
        memcpy(codes, tile->codes[r], (size_t)tile->columns);
    }
}

// to[c * to_stride + r] = from[r * from_stride + c]. rows and columns are multiples of
// FP8_MULTIPLE.
static void transpose_bytes(uint8_t *to, int64_t to_stride, const uint8_t *from, int64_t from_stride,
                            int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r += FP8_MULTIPLE) {
        for (int64_t c = 0; c < columns; c++) {
            for (int i = 0; i < FP8_MULTIPLE; i++) {
                to[c * to_stride + r + i] = from[(r + i) * from_stride + c];
            }
        }
    }
}

static void store_transposed(const Fp8Quantize *a, const Tile *tile) {
    uint8_t *to = a->transposed + tile->column * a->N + tile->row;
    transpose_bytes(to, a->N, tile->codes[0], TILE, tile->rows, tile->columns);
}

static void fill(float *x, float value, int n) {
    for (int i = 0; i < n; i++) x[i] = value;
}

// Encodes with one scale for the whole tile.
static void quantize_with_scale(const Fp8Quantize *a, Tile *tile, float scale) {
    float rows[TILE], columns[TILE];
    fill(rows, scale, TILE);
    fill(columns, 1.0f, TILE);
    encode_tile(tile, rows, columns, a->type);
    if (a->codes) store_codes(a, tile);
    if (a->transposed) store_transposed(a, tile);
}

// Maximum over the tile.
static uint32_t tile_maximum(const Tile *tile) {
    uint32_t max = 0;
    for (int r = 0; r < tile->rows; r++) max = max_u32(max, absolute_maximum(tile->values[r], tile->columns));
    return max;
}

static void quantize_square(const Fp8Quantize *a, Tile *tile) {
    float scale = fp8_block_scale(tile_maximum(tile), a->type);
    int64_t i = tile->row / TILE, j = tile->column / TILE;
    if (a->codes) a->block_scales[i * fp8_squares_stride(a->C) + j] = 1.0f / scale;
    if (a->transposed) a->transposed_block_scales[j * fp8_squares_stride(a->N) + i] = 1.0f / scale;
    quantize_with_scale(a, tile, scale);
}

// Encodes the tile twice: a block is a row of it in `codes` and a column of it in `transposed`.
static void quantize_rows(const Fp8Quantize *a, Tile *tile) {
    float scale[TILE], ones[TILE];
    fill(ones, 1.0f, TILE);
    if (a->codes) {
        float *inverse = a->block_scales + tile->column / TILE * a->N + tile->row;
        for (int r = 0; r < TILE; r++) {
            scale[r] = fp8_block_scale(absolute_maximum(tile->values[r], TILE), a->type);
            inverse[r] = 1.0f / scale[r];
        }
        encode_tile(tile, scale, ones, a->type);
        store_codes(a, tile);
    }
    if (a->transposed) {
        float *inverse = a->transposed_block_scales + tile->row / TILE * a->C + tile->column;
        uint32_t max[TILE] = {0};
        for (int r = 0; r < TILE; r++) {
            for (int c = 0; c < TILE; c++) max[c] = max_u32(max[c], fp8_absolute(tile->values[r][c]));
        }
        for (int c = 0; c < TILE; c++) {
            scale[c] = fp8_block_scale(max[c], a->type);
            inverse[c] = 1.0f / scale[c];
        }
        encode_tile(tile, ones, scale, a->type);
        store_transposed(a, tile);
    }
}

void op_fp8_quantize(Stream *s, const Fp8Quantize *a) {
    Tile tile;
    for (int64_t row = 0; row < a->N; row += TILE) {
        show_progress(s);
        for (int64_t column = 0; column < a->C; column += TILE) {
            read_tile(a, &tile, row, column);
            if (a->blocks == FP8_SQUARES) {
                quantize_square(a, &tile);
            } else if (a->blocks == FP8_ROWS) {
                quantize_rows(a, &tile);
            } else {
                if (a->accumulate) a->scale->absmax = max_u32(a->scale->absmax, tile_maximum(&tile));
                quantize_with_scale(a, &tile, a->scale->scale);
            }
        }
    }
}

void op_fp8_absmax(Stream *s, const Fp8Quantize *a) {
    Tile tile;
    for (int64_t row = 0; row < a->N; row += TILE) {
        for (int64_t column = 0; column < a->C; column += TILE) {
            read_tile(a, &tile, row, column);
            a->scale->absmax = max_u32(a->scale->absmax, tile_maximum(&tile));
        }
    }
}

void op_fp8_transpose(Stream *s, uint8_t *transposed, const uint8_t *codes, int64_t N, int C) {
    for (int64_t row = 0; row < N; row += TILE) {
        for (int64_t column = 0; column < C; column += TILE) {
            transpose_bytes(transposed + column * N + row, N, codes + row * C + column, C,
                            min64(TILE, N - row), min64(TILE, C - column));
        }
    }
}

// --- scales --------------------------------------------------------------------------------------

static void set_scale(Fp8Scale *scale, float value) {
    scale->scale = value;
    scale->inverse = f32_div(1.0f, value);
    scale->absmax = 0;
}

void op_fp8_scale(Stream *s, Fp8Scale *scale, Fp8Type type, const uint32_t *absmax, int n, int margin) {
    uint32_t max = n > 0 ? 0 : scale->absmax;
    for (int i = 0; i < n; i++) max = max_u32(max, absmax[i]);
    set_scale(scale, fp8_scale(max, type, margin, 1.0f));
}

static void update_scale(const Fp8Update *a, int tensor, uint32_t max) {
    float *history = a->history + (int64_t)tensor * a->length, *newest = history + a->length - 1;
    memmove(history, history + 1, (size_t)(a->length - 1) * sizeof *history);
    *newest = max < 0x7F800000u ? f32_from_bits(max) : 0.0f;
    uint32_t absmax = a->most_recent ? fp8_absolute(*newest) : absolute_maximum(history, a->length);
    Fp8Scale *scale = &a->scale[tensor];
    set_scale(scale, fp8_scale(absmax, (Fp8Type)a->type[tensor], a->margin, scale->scale));
}

void op_fp8_update_scales(Stream *s, const Fp8Update *a) {
    for (int t = 0; t < a->tensors; t++) {
        uint32_t max = 0;
        for (int r = 0; r < a->ranks; r++) max = max_u32(max, a->all[(int64_t)r * a->tensors + t].absmax);
        if (max != 0 && (!a->applied || *a->applied)) update_scale(a, t, max);
        a->scale[t].absmax = 0;
    }
}

// --- products ------------------------------------------------------------------------------------

// Returns the factor of the codes of row `row`, columns column .. column + FP8_BLOCK - 1 of a
// (rows, k) matrix. The factor of the whole tensor is applied to the product instead.
static float block_inverse(const Fp8Matrix *a, int64_t rows, int64_t k, int64_t row, int64_t column) {
    int64_t block = column / FP8_BLOCK;
    switch (a->blocks) {
        case FP8_ROWS: return a->block_scales[block * rows + row];
        case FP8_SQUARES: return a->block_scales[row / FP8_BLOCK * fp8_squares_stride(k) + block];
        case FP8_WHOLE: break;
    }
    return 1.0f;
}
static float whole_inverse(const Fp8Matrix *a) { return a->blocks == FP8_WHOLE ? a->scale->inverse : 1.0f; }

static void decode_codes(float *x, const uint8_t *codes, int64_t n, Fp8Type type, float factor) {
    if (type == FP8_E4M3) {
        for (int64_t i = 0; i < n; i++) x[i] = f32_mul(fp8_decode(codes[i], FP8_E4M3), factor);
    } else {
        for (int64_t i = 0; i < n; i++) x[i] = f32_mul(fp8_decode(codes[i], FP8_E5M2), factor);
    }
}

// Part of a matrix of codes (total_rows, k).
typedef struct Part {
    int64_t row, rows, column, columns;
} Part;

// Decodes the part to x (rows, columns). Block scales are powers of 2, so x is exact, and the sum
// is the one over blocks whose partial sums are multiplied by both inverse scales.
static void decode_part(float *x, const Fp8Matrix *a, int64_t total_rows, int64_t k, Part part) {
    for (int64_t r = 0; r < part.rows; r++) {
        for (int64_t c = 0; c < part.columns; c += FP8_BLOCK) {
            int64_t row = part.row + r, column = part.column + c;
            float factor = block_inverse(a, total_rows, k, row, column);
            decode_codes(x + r * part.columns + c, a->codes + row * k + column,
                         min64(FP8_BLOCK, part.columns - c), a->type, factor);
        }
    }
}

// Scales n sums of row `row`, starting at `column`, and stores them in d, sum or both.
static void product_epilogue_row(const Fp8Product *a, float *product, int64_t row, int64_t column,
                                 int64_t n) {
    int64_t at = row * a->n + column;
    float inverse_a = whole_inverse(&a->a), inverse_b = whole_inverse(&a->b);
    for (int64_t i = 0; i < n; i++) product[i] = product[i] * inverse_a * inverse_b;
    if (a->sum) {
        for (int64_t i = 0; i < n; i++) {
            a->sum[at + i] = a->overwrite ? product[i] : a->sum[at + i] + product[i];
        }
    }
    if (!a->d) return;
    if (a->bias) {
        for (int64_t i = 0; i < n; i++) product[i] += floatX_to_float(a->bias[column + i]);
    }
    narrow(a->d + at, product, n);
}

// Computes results in tiles of LINEAR_ROWS x LINEAR_ROWS, LINEAR_ROWS elements of K at a time. All
// three products of a layer then fit the workspace of op_linear_workspace_bytes. Decoding `b` again
// for every tile costs little: each element is used in LINEAR_ROWS multiplications.
void op_fp8_product(Stream *s, const Fp8Product *a) {
    float *cursor = a->workspace;
    int64_t max_m = min64(a->m, LINEAR_ROWS), max_n = min64(a->n, LINEAR_ROWS),
            max_k = min64(a->k, LINEAR_ROWS);
    float *left = take_slice(&cursor, max_m * max_k), *right = take_slice(&cursor, max_n * max_k);
    float *product = take_slice(&cursor, max_m * max_n);
    for (int64_t row = 0; row < a->m; row += LINEAR_ROWS) {
        for (int64_t column = 0; column < a->n; column += LINEAR_ROWS) {
            int64_t rows = min64(LINEAR_ROWS, a->m - row), columns = min64(LINEAR_ROWS, a->n - column);
            show_progress(s);
            for (int64_t k = 0; k < a->k; k += LINEAR_ROWS) {
                int64_t depth = min64(LINEAR_ROWS, a->k - k);
                decode_part(left, &a->a, a->m, a->k, (Part){row, rows, k, depth});
                decode_part(right, &a->b, a->n, a->k, (Part){column, columns, k, depth});
                matmul_nt(rows, columns, depth, 1.0f, left, right, k == 0 ? 0.0f : 1.0f, product);
            }
            for (int64_t r = 0; r < rows; r++) {
                product_epilogue_row(a, product + r * columns, row + r, column, columns);
            }
        }
    }
}
