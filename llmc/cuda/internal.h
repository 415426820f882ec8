// Host-side declarations shared by the CUDA backend: Device, streams, events, error checks, and the
// GEMM of linear.cu. Included by llmc/cuda/, dev/bench, the GPU tests, and through common.cuh by
// sdp4bit/kernels_cuda*.cu. Other host code sees only llmc/device.h.
#pragma once
#include <cuda_runtime.h>

#include "llmc/base/base.h"
#include "llmc/device.h"
#include "llmc/base/dtype.h"
LLMC_BEGIN

// State that one file of the backend keeps per device, created on first use and freed by
// device_close with the file's own function.
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
    DeviceSlot linear;     // linear.cu: cuBLASLt's handle and plans
    DeviceSlot attention;  // attention_cudnn.cpp: cuDNN's handle and plans
    void *scratch;         // scratch.cu: memory of ops without a workspace, from the memory plan
    size_t scratch_bytes;
    Stream *scratch_user;  // stream of the last op that used it
    size_t allocated;      // total bytes of device_alloc
};

// Pinned memory for small copies between host and device, so that neither waits for the other.
typedef struct StagingSlot {
    void *pinned;       // (STAGING_BYTES) page-locked
    cudaEvent_t free;   // recorded after the last use
    void *destination;  // destination of a download, for the host function that completes it
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

// Ends the job if a CUDA call failed: EXIT_ENVIRONMENT, or EXIT_COMMUNICATION if hardware fails in
// mid-training. what: the call, as in "copying to the device".
void cuda_check(const Site *site, cudaError_t status, const char *what);
// Ends the job if the GPU itself has failed. Call it before blaming a library, which would report
// the same failure as its own.
void cuda_check_gpu(const Site *site);
// Ends the job if the last kernel launch was refused. Errors inside kernels surface in later calls.
void check_launch(Stream *stream, const char *kernel);

// Scratch memory of ops without a workspace (scratch.cu).
// Returns at least `bytes` of GPU memory, 256-byte aligned and undefined, valid in stream order
// until the next op calls it. op: name for the fatal error if it is too small.
void *op_scratch(Stream *stream, size_t bytes, const char *op);

// Ops assert the sizes that op_check_model has accepted (limits.h).

// --- GEMM (linear.cu) ----------------------------------------------------------------------------

// Applied to the fp32 product before it is rounded and stored.
typedef enum GemmEpilogue {
    GEMM_PLAIN,
    GEMM_BIAS,  // + bias, one value per column of d
    // aux = rounded(product + bias), d = GELU_tanh(product + bias) of the unrounded value.
    GEMM_BIAS_GELU,
    GEMM_DGELU  // times GELU_tanh'(aux)
} GemmEpilogue;

// d = op(a) op(b), row-major and packed: op(a) (m, k), op(b) (k, n), d (m, n). fp32 sums, one
// rounding. Rows of all stored matrices are multiples of 8 elements, addresses 16-byte aligned.
// Results are bitwise identical for the same sizes, GPU model and library version.
typedef struct Gemm {
    void *d;  // (m, n) floatX or float
    const floatX *a, *b;
    bool transpose_a;  // a is stored as (k, m)
    bool transpose_b;  // b is stored as (n, k)
    bool fp32;         // d is float
    bool accumulate;   // d += the product; with fp32
    int64_t m, n, k;
    GemmEpilogue epilogue;
    const floatX *bias;  // (n) for GEMM_BIAS*
    floatX *aux;         // (m, n) for GEMM_BIAS_GELU (written) and GEMM_DGELU (read)
    void *workspace;     // GEMM_WORKSPACE_BYTES, 256-byte aligned
} Gemm;
#define GEMM_WORKSPACE_BYTES ((size_t)32 << 20)
void gemm(Stream *stream, const Gemm *g);
// The same with result `answer` of the heuristic, 0 .. GEMM_ANSWERS - 1, or -1 for gemm_table.h's
// choice. Used by dev/bench/gemm_search.cu, which generates that table. Returns false once `answer`
// exceeds the heuristic's results; it then uses the last one.
enum { GEMM_ANSWERS = 48 };
bool gemm_by_answer(Stream *stream, const Gemm *g, int answer);
int gemm_form(const Gemm *g);  // transposes, accumulation, epilogue: key of the table

// The products of a linear layer, named as in the CPU backend.
// y = x w^T: c (m, n) = a b^T, a (m, k), b (n, k).
void matmul_nt(Stream *stream, floatX *c, const floatX *a, const floatX *b, int64_t m, int64_t n, int64_t k,
               void *workspace);
// dx = dy w: c (m, n) = a b, a (m, k), b (k, n).
void matmul_nn(Stream *stream, floatX *c, const floatX *a, const floatX *b, int64_t m, int64_t n, int64_t k,
               void *workspace);
// dw += dy^T x: c (m, n) += a^T b, or = with overwrite, a (k, m), b (k, n). c is fp32.
void matmul_tn(Stream *stream, float *c, const floatX *a, const floatX *b, int64_t m, int64_t n, int64_t k,
               bool overwrite, void *workspace);

// op_linear_forward of one row, for text generation (generate.cu). It is memory-bound, so
// cuBLASLt's tiles do not help.
struct Linear;
void linear_forward_row(Stream *stream, const struct Linear *a);

LLMC_END
