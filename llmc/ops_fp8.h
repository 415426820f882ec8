// The backend interface, part 4: FP8 linear layers, called by llmc/model/fp8_linear.c.
//
// The rules of llmc/ops.h apply: device memory, asynchronous, nothing allocated. A tensor is
// quantized in three steps: op_fp8_absmax, op_fp8_scale, op_fp8_quantize. Codes, scales and
// absolute maxima are bitwise identical on every backend for the same floatX input.
//
// A GEMM of FP8 tensor cores needs both operands with K contiguous. So a tensor that is used in two
// GEMMs is stored twice, the second time transposed:
//
//   y  = x w^T     x (N, C)          w (OC, C)
//   dx = dy w      dy (N, OC)        w transposed (C, OC)
//   dw = dy^T x    dy transposed (OC, N), x transposed (C, N)
#pragma once
#include "llmc/base/fp8.h"
#include "llmc/ops.h"
LLMC_BEGIN

// FP8_MULTIPLE: both sizes of a quantized matrix must be multiples of it.
// FP8_BLOCK: block size of the blockwise recipe; its matrices must be multiples of it.
enum { FP8_MULTIPLE = 16, FP8_BLOCK = 128 };

// What a scale covers.
typedef enum Fp8Blocks {
    FP8_WHOLE,    // the whole tensor: one Fp8Scale
    FP8_ROWS,     // 1 x FP8_BLOCK elements of a row (activations, gradients)
    FP8_SQUARES,  // FP8_BLOCK x FP8_BLOCK elements (weights)
} Fp8Blocks;

// Row length of the scales of FP8_SQUARES with C columns, as cuBLASLt requires it. Entries after
// the first C / 128 are unused.
HD_FN int64_t fp8_squares_stride(int64_t C) { return (C / FP8_BLOCK + 3) / 4 * 4; }
// Number of scales of an (N, C) matrix with block scales.
HD_FN int64_t fp8_block_scales(Fp8Blocks blocks, int64_t N, int64_t C) {
    return blocks == FP8_ROWS ? N * (C / FP8_BLOCK) : N / FP8_BLOCK * fp8_squares_stride(C);
}

// Returns true if the device computes FP8 products with these blocks. Error: EXIT_USAGE; names the
// GPU and the flag to change. CPU ranks compute all of them.
bool op_check_fp8(const Device *device, Fp8Blocks blocks, Error *err);

// The function of a stored tensor that is quantized, so that its result need not be stored. Results
// are rounded to floatX before they are encoded, so the codes are the same as with a separate op.
typedef enum Fp8Source { FP8_OF_X, FP8_OF_GELU, FP8_OF_SWIGLU } Fp8Source;

typedef struct Fp8Quantize {
    int64_t N;        // rows, a multiple of FP8_MULTIPLE
    int C;            // columns, a multiple of FP8_MULTIPLE
    const floatX *x;  // (N, C); FP8_OF_SWIGLU: (N, 2 * C), gate, then up, as Swiglu.pre
    Fp8Source source;
    Fp8Type type;
    Fp8Blocks blocks;
    uint8_t *codes;       // (N, C) out, or NULL
    uint8_t *transposed;  // (C, N) out, or NULL
    Fp8Scale *scale;      // FP8_WHOLE: op_fp8_absmax accumulates scale->absmax, op_fp8_scale sets the scale
    bool accumulate;      // op_fp8_quantize also accumulates scale->absmax (delayed scaling)
    // Inverse scales of blocks, out: fp8_block_scales(blocks, N, C) floats for `codes`,
    // fp8_block_scales(blocks, C, N) for `transposed`. Powers of 2 (fp8_block_scale). Addresses are
    // 16-byte aligned.
    //   FP8_ROWS     block k of row n at [k * N + n]; for `transposed`, block k of column c (rows
    //                128 k .. 128 k + 127) at [k * C + c]
    //   FP8_SQUARES  block (i, j) at [i * fp8_squares_stride(C) + j]; for `transposed`, the same
    //                scale at [j * fp8_squares_stride(N) + i]
    float *block_scales, *transposed_block_scales;
} Fp8Quantize;
// Accumulates the absolute maximum into scale->absmax. Not for block scales.
void op_fp8_absmax(Stream *s, const Fp8Quantize *a);
// Sets the scale from the largest of n absolute maxima (bits of fp32 numbers), or from
// scale->absmax if n is 0, divided by 2^margin. Clears scale->absmax. absmax 0, infinite or NaN
// gives scale 1.
void op_fp8_scale(Stream *s, Fp8Scale *scale, Fp8Type type, const uint32_t *absmax, int n, int margin);
// Encodes the tensor with scale->scale, or computes block scales and encodes with these.
void op_fp8_quantize(Stream *s, const Fp8Quantize *a);
// transposed (C, N) = codes (N, C). Both sizes are multiples of FP8_MULTIPLE.
void op_fp8_transpose(Stream *s, uint8_t *transposed, const uint8_t *codes, int64_t N, int C);

typedef struct Fp8Matrix {
    const uint8_t *codes;
    Fp8Type type;
    Fp8Blocks blocks;
    const Fp8Scale *scale;      // FP8_WHOLE
    const float *block_scales;  // FP8_ROWS, FP8_SQUARES
} Fp8Matrix;
// d = a b^T + bias, summed in fp32 and rounded once if d is floatX. m, n and k are multiples of
// FP8_MULTIPLE. Not both types may be FP8_E5M2, and not both FP8_SQUARES.
typedef struct Fp8Product {
    int64_t m, n, k;
    Fp8Matrix a;         // (m, k)
    Fp8Matrix b;         // (n, k)
    floatX *d;           // (m, n) out, or NULL
    const floatX *bias;  // (n), or NULL; only with d
    float *sum;          // (m, n) accumulates (or overwrites), or NULL
    bool overwrite;
    bool fast;        // GPUs sum in the tensor cores' reduced precision (forward only)
    void *workspace;  // op_linear_workspace_bytes of the layer
} Fp8Product;
void op_fp8_product(Stream *s, const Fp8Product *a);

// Delayed scaling (Transformer Engine): appends the absolute maxima of the step to the histories
// and sets the scales of the next step. Clears scale->absmax. If the step is skipped, only clears
// it, because the gradients of such a step may be far too large.
typedef struct Fp8Update {
    int tensors;
    Fp8Scale *scale;      // (tensors) in and out
    const Fp8Scale *all;  // (ranks, tensors) of all ranks that share the scales; absmax is read
    int ranks;
    const uint8_t *type;  // (tensors) Fp8Type of each tensor
    float *history;       // (tensors, length) oldest first; absolute maxima
    int length;
    bool most_recent;  // --fp8-amax-compute-algo most_recent: the newest entry, else the largest
    int margin;
    const int32_t *applied;  // 0: the step is skipped; NULL: never
} Fp8Update;
// A tensor whose maximum over the ranks is 0 (not quantized in this step) keeps history and scale.
// A maximum that is not finite enters the history as 0. If the history gives 0, the scale stays.
void op_fp8_update_scales(Stream *s, const Fp8Update *a);

LLMC_END
