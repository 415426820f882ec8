// What the files of the CUDA backend share on the host side: the Device, its streams and events,
// error checks, and the GEMM of linear.cu. Included by llmc/cuda/, dev/bench and the GPU tests, and
// by sdp4bit/kernels_cuda*.cu through common.cuh. Host code sees llmc/device.h only.
#pragma once
#include <cuda_runtime.h>

#include "llmc/base/base.h"
#include "llmc/device.h"
#include "llmc/base/dtype.h"
LLMC_BEGIN

// State that one file of the backend keeps per device. It is made when first used and freed by
// device_close. The file that fills a slot also names the function that frees it, so device.cu need
// not know what is inside.
typedef struct DeviceSlot {
    void *state;  // NULL until first used
    void (*destroy)(void *state);
} DeviceSlot;

struct Device {
    int index;
    const Site *site;
    char name[128];    // as the driver tells it
    int major, minor;  // compute capability
    int multiprocessors;
    size_t shared_bytes_block;  // dynamic shared memory that a block may ask for after cudaFuncSetAttribute
    size_t l2_bytes;
    bool deterministic;    // --deterministic-mode: attention's backward chooses its deterministic form
    DeviceSlot linear;     // linear.cu: cuBLASLt's handle and the plans of the shapes seen
    DeviceSlot attention;  // attention's file: cuDNN's handle and the plans of the shapes seen
    void *scratch;         // scratch.cu: memory of the ops that get no workspace, from the memory plan
    size_t scratch_bytes;
    Stream *scratch_user;  // the stream of the last op that used it
    size_t allocated;      // bytes handed out by device_alloc in all
};

// Pinned memory through which small copies between the host and the device pass, so that neither
// side waits for the other.
typedef struct StagingSlot {
    void *pinned;       // (STAGING_BYTES) page-locked
    cudaEvent_t free;   // recorded after the last use
    void *destination;  // of a download, for the host function that ends it
    size_t bytes;
} StagingSlot;
enum { STAGING_SLOTS = 8, STAGING_BYTES = 1 << 20 };

struct Stream {
    Device *device;
    const char *name;
    cudaStream_t handle;                 // does not synchronize with the default stream
    StagingSlot staging[STAGING_SLOTS];  // made at the first copy
    int next_slot;
};

struct Event {
    Device *device;
    cudaEvent_t handle;
};

static inline cudaStream_t stream_handle(Stream *stream) { return stream->handle; }
static inline Device *stream_device(Stream *stream) { return stream->device; }

// Ends the job when a CUDA call failed: EXIT_ENVIRONMENT, or EXIT_COMMUNICATION for what hardware
// does to a run that trains already. what: the call, as in "copying to the device".
void cuda_check(const Site *site, cudaError_t status, const char *what);
// The same where the GPU itself has failed, which any library then reports as its own failure: to
// be asked before that is believed.
void cuda_check_gpu(const Site *site);
// After every kernel launch: ends the job when the launch was refused. Errors inside the kernel
// show up at a later call.
void check_launch(Stream *stream, const char *kernel);

// --- GEMM (linear.cu) ----------------------------------------------------------------------------

// What happens to the fp32 product before it is rounded and stored.
typedef enum GemmEpilogue {
    GEMM_PLAIN,
    GEMM_BIAS,  // + bias, one value per column of d
    // Aux = rounded(product + bias) is stored, d = GELU_tanh(product + bias), from the value before
    // rounding.
    GEMM_BIAS_GELU,
    GEMM_DGELU  // times GELU_tanh'(aux)
} GemmEpilogue;

// d = op(a) op(b), row-major and packed: op(a) is (m, k), op(b) is (k, n), d is (m, n). fp32 sums,
// one rounding. The rows of every matrix, as stored, are multiples of 8 elements long and every
// address is a multiple of 16 bytes. Two calls with the same sizes on one GPU model and library
// version give the same bits.
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
    void *workspace;     // GEMM_WORKSPACE_BYTES, aligned to 256 bytes
} Gemm;
#define GEMM_WORKSPACE_BYTES ((size_t)32 << 20)
void gemm(Stream *stream, const Gemm *g);
// The same with one of the heuristic's answers, 0 .. GEMM_ANSWERS - 1, instead of the committed
// table's (-1). dev/bench/gemm_search.cu makes the table with it. False, once, when the heuristic
// has fewer answers: the last one served then.
enum { GEMM_ANSWERS = 48 };
bool gemm_by_answer(Stream *stream, const Gemm *g, int answer);
int gemm_form(const Gemm *g);  // what of it the table tells apart: transposes, accumulation, epilogue

// The three products of a layer, named as in the CPU backend.
// c (m, n) = a b^T, a being (m, k), b (n, k): y = x w^T.
void matmul_nt(Stream *stream, floatX *c, const floatX *a, const floatX *b, int64_t m, int64_t n, int64_t k,
               void *workspace);
// c (m, n) = a b, a being (m, k), b (k, n): dx = dy w.
void matmul_nn(Stream *stream, floatX *c, const floatX *a, const floatX *b, int64_t m, int64_t n, int64_t k,
               void *workspace);
// c (m, n) += a^T b, or c = a^T b with overwrite, a being (k, m), b (k, n): dw += dy^T x. c is
// fp32.
void matmul_tn(Stream *stream, float *c, const floatX *a, const floatX *b, int64_t m, int64_t n, int64_t k,
               bool overwrite, void *workspace);

// generate.cu: op_linear_forward of one row, which generation makes one after the other. Such a
// product waits for memory: cuBLASLt's tiles have nothing to share there.
struct Linear;
void linear_forward_row(Stream *stream, const struct Linear *a);

LLMC_END
