// Host-side declarations shared by the CUDA backend: Device, streams, events, error checks, and the
// GEMM of linear.cu. Included by llmc/cuda/, dev/bench, the GPU tests, and through common.cuh by
// sdp4bit/kernels_cuda*.cu. Other host code sees only llmc/device.h.
#pragma once
#include <cuda_runtime.h>

#include "llmc/base/base.h"
#include "llmc/device.h"
#include "llmc/base/dtype.h"
LLMC_BEGIN

// State that one file of the backend keeps per device. It is created on first use; device_close
// frees it with the function that the file has set.
typedef struct DeviceSlot {
    void *state;  // NULL before the first use
    void (*destroy)(void *state);
} DeviceSlot;

struct Device {
    int index;
    const Site *site;
    char name[128];
    int major, minor;  // compute capability
    int multiprocessors;
    size_t shared_bytes_block;  // maximum dynamic shared memory of a block
    size_t l2_bytes;
    bool deterministic;    // --deterministic-mode
    DeviceSlot linear;     // cuBLASLt's handle and plans (linear.cu)
    DeviceSlot attention;  // cuDNN's handle and plans (attention_cudnn.cpp)
    void *scratch;         // memory for ops without a workspace (scratch.cu)
    size_t scratch_bytes;
    Stream *scratch_user;  // stream of the latest op that used scratch
    size_t allocated;      // total bytes of device_alloc
};

// Pinned memory for small asynchronous copies between host and device (device.cu).
typedef struct StagingSlot {
    void *pinned;       // (STAGING_BYTES) page-locked
    cudaEvent_t free;   // recorded after the latest use
    void *destination;  // destination of a download
    size_t bytes;
} StagingSlot;
enum { STAGING_SLOTS = 8, STAGING_BYTES = 1 << 20 };

struct Stream {
    Device *device;
    const char *name;
    cudaStream_t handle;                 // does not synchronize with the default stream
    StagingSlot staging[STAGING_SLOTS];  // allocated by the first copy
    int next_slot;
};

struct Event {
    Device *device;
    cudaEvent_t handle;
};

static inline cudaStream_t stream_handle(Stream *stream) { return stream->handle; }
static inline Device *stream_device(Stream *stream) { return stream->device; }

// Ends the job if a CUDA call failed: with EXIT_COMMUNICATION if the hardware failed during
// training, otherwise with EXIT_ENVIRONMENT. what: the call, such as "copying to the device".
void cuda_check(const Site *site, cudaError_t status, const char *what);
// Ends the job if the GPU has failed. Call it before reporting a library error, which the failure
// may have caused.
void cuda_check_gpu(const Site *site);
// Ends the job if the latest kernel launch failed. Errors inside kernels are reported by later
// calls.
void check_launch(Stream *stream, const char *kernel);

// Returns scratch memory for an op without a workspace (scratch.cu): at least `bytes` bytes,
// 256-byte aligned and uninitialized, valid in stream order until the next op calls this function.
// op: name of the op in the error message if the scratch memory is too small.
void *op_scratch(Stream *stream, size_t bytes, const char *op);

// --- GEMM (linear.cu) ----------------------------------------------------------------------------

// Operation on the fp32 product before it is rounded and stored.
typedef enum GemmEpilogue {
    GEMM_PLAIN,
    GEMM_BIAS,  // + bias, one value per column of d
    // aux = rounded(product + bias), d = GELU_tanh of the unrounded value.
    GEMM_BIAS_GELU,
    GEMM_DGELU  // times GELU_tanh'(aux)
} GemmEpilogue;

typedef enum GemmType { GEMM_BF16, GEMM_E4M3, GEMM_E5M2 } GemmType;
// What a scale of an FP8 operand covers: the matrix, 1 x 128 or 128 x 128 elements. Layouts of
// scales: see ops_fp8.h.
typedef enum GemmScales { GEMM_SCALE_WHOLE, GEMM_SCALE_ROWS, GEMM_SCALE_SQUARES } GemmScales;

// Matrix product d = op(a) op(b) of row-major, packed matrices: op(a) (m, k), op(b) (k, n), d (m,
// n). Sums in fp32 and rounds once. Row lengths of all stored matrices must be multiples of 8
// elements, and addresses must be 16-byte aligned. Results are bitwise identical for the same
// sizes, GPU model and library version.
//
// FP8: both operands have an FP8 type, not both GEMM_E5M2, and rows are multiples of 16 elements.
// Only the form d = a b^T exists (transpose_b), with GEMM_PLAIN or GEMM_BIAS.
typedef struct Gemm {
    void *d;  // (m, n) floatX or float
    const void *a, *b;
    GemmType a_type, b_type;
    const float *a_scale, *b_scale;  // multiply the codes of a, b; device memory, 16-byte aligned
    GemmScales a_scales, b_scales;   // both GEMM_SCALE_WHOLE or neither, not both GEMM_SCALE_SQUARES
    bool transpose_a;                // a is stored as (k, m)
    bool transpose_b;                // b is stored as (n, k)
    bool fp32;                       // d is float
    bool accumulate;                 // d += product; only if fp32 is set
    int64_t m, n, k;
    GemmEpilogue epilogue;
    // If add is not NULL: d = scale product + add_scale add, rounded once; add (m, n) is not d.
    // Without add, scale 0 means 1.
    const floatX *add;
    float scale, add_scale;
    const floatX *bias;      // (n) for GEMM_BIAS*
    floatX *aux;             // (m, n) for GEMM_BIAS_GELU (written) and GEMM_DGELU (read)
    bool fast;               // FP8 without block scales: sum in the tensor cores' reduced precision
    bool beside_collective;  // leave SMs to a collective: see sms_of in linear.cu
    void *workspace;         // GEMM_WORKSPACE_BYTES, 256-byte aligned
} Gemm;
#define GEMM_WORKSPACE_BYTES ((size_t)32 << 20)
void gemm(Stream *stream, const Gemm *g);
// Computes g with result `answer` (0 .. GEMM_ANSWERS - 1) of cuBLASLt's heuristic, or with the
// choice of gemm_table.h if answer is -1. Returns false if the heuristic has fewer results; it then
// uses the last one. Used by dev/bench/gemm_search.cu, which generates the table.
enum { GEMM_ANSWERS = 48 };
bool gemm_by_answer(Stream *stream, const Gemm *g, int answer);
// Returns transposes, accumulation, epilogue and FP8 types as a key of gemm_table.h, below 2^16.
int gemm_form(const Gemm *g);
// As gemm, but returns cuBLASLt's error instead of ending the job; NULL on success. For tests.
const char *gemm_attempt(Stream *stream, const Gemm *g);
// Returns the GEMM of an FP8 product (fp8.cu).
struct Fp8Product;
Gemm fp8_gemm(const struct Fp8Product *a);
// Oldest version of cuBLASLt with block scales.
enum { FP8_BLOCKS_VERSION = 120900 };

// The matrix products of a linear layer, with the same names as in the CPU backend.
// For y = x w^T: c (m, n) = a b^T, with a (m, k) and b (n, k).
void matmul_nt(Stream *stream, floatX *c, const floatX *a, const floatX *b, int64_t m, int64_t n, int64_t k,
               void *workspace);
// For dx = dy w: c (m, n) = a b, with a (m, k) and b (k, n).
void matmul_nn(Stream *stream, floatX *c, const floatX *a, const floatX *b, int64_t m, int64_t n, int64_t k,
               void *workspace);
// For dw += dy^T x: c (m, n) += a^T b (= with overwrite), with a (k, m) and b (k, n). c is fp32.
void matmul_tn(Stream *stream, float *c, const floatX *a, const floatX *b, int64_t m, int64_t n, int64_t k,
               bool overwrite, void *workspace);

// op_linear_forward of one row, for text generation (generate.cu). It is memory-bound, so
// cuBLASLt's tiles do not help.
struct Linear;
void linear_forward_row(Stream *stream, const struct Linear *a);

LLMC_END
