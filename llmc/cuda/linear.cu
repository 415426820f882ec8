// Linear layers on GPUs: GEMMs by cuBLASLt, and two small kernels for operations that its epilogues
// lack. The LM head uses gemm() and matmul_* through internal.h.
//
// Forward fuses the bias, and GELU if `pre` is requested. Backward fuses the accumulation of dw in
// fp32 (beta = 1). It fuses GELU' into dx if gemm_table.h has a row for it; otherwise a separate
// pass multiplies by GELU' and sums the columns for the previous layer's bias gradient. cuBLASLt's
// bias gradient epilogue is not used: it overwrites instead of accumulating, and takes longer than
// a pass over dy.
//
// The GELU epilogue uses the unrounded sum, whereas op_gelu_forward and the CPU backend use the
// rounded `pre`. Recomputing a layer gives a bitwise identical result.
#include <assert.h>
#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/cuda/common.cuh"
#include "llmc/cuda/gemm_table.h"
#include "llmc/cuda/peer_layout.h"

// --- plans: one per shape, created on first use --------------------------------------------------

typedef struct GemmKey {
    int64_t m, n, k;
    // gemm_form, index of the heuristic's result, and pointer alignments, packed.
    int64_t form;
} GemmKey;

typedef struct GemmPlan {
    GemmKey key;  // m is 0 in an empty slot
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
    cublasStatus_t status;  // not CUBLAS_STATUS_SUCCESS: there is no algorithm
} GemmPlan;

// Hash table with open addressing, at most half full. The capacity is a power of two.
typedef struct LinearState {
    cublasLtHandle_t handle;
    GemmPlan *table;
    int capacity, used;
} LinearState;

static void blas_check(const Site *site, cublasStatus_t status, const char *what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    cuda_check_gpu(site);
    fatal(site, EXIT_ENVIRONMENT,
          "cuBLASLt: %s failed: %s; check that its version supports the GPU and the driver (--version)", what,
          cublasLtGetStatusString(status));
}

static void linear_destroy(void *memory) {
    LinearState *state = (LinearState *)memory;
    for (int i = 0; i < state->capacity; i++) {
        GemmPlan *plan = &state->table[i];
        if (plan->key.m == 0) continue;
        cublasLtMatrixLayoutDestroy(plan->d);
        cublasLtMatrixLayoutDestroy(plan->b);
        cublasLtMatrixLayoutDestroy(plan->a);
        cublasLtMatmulDescDestroy(plan->operation);
    }
    cublasLtDestroy(state->handle);
    free(state->table);
    free(state);
}

static LinearState *linear_state(Device *device) {
    if (device->linear.state) return (LinearState *)device->linear.state;
    LinearState *state = (LinearState *)xcalloc(1, sizeof *state, "the GEMM plans");
    blas_check(device->site, cublasLtCreate(&state->handle), "opening");
    state->capacity = 64;
    state->table = (GemmPlan *)xcalloc((size_t)state->capacity, sizeof *state->table, "the GEMM plans");
    device->linear.state = state;
    device->linear.destroy = linear_destroy;
    return state;
}

// Returns the slot with the key's plan, or the empty slot where it belongs.
static GemmPlan *plan_place(GemmPlan *table, int capacity, const GemmKey *key) {
    uint64_t hash = 0;
    const int64_t parts[4] = {key->m, key->n, key->k, key->form};
    for (int i = 0; i < 4; i++) hash = (hash ^ (uint64_t)parts[i]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 32;
    int place = (int)(hash & (uint64_t)(capacity - 1));
    while (table[place].key.m != 0 && memcmp(&table[place].key, key, sizeof *key) != 0)
        place = (place + 1) & (capacity - 1);
    return &table[place];
}

static void table_grow(LinearState *state) {
    int capacity = 2 * state->capacity;
    GemmPlan *table = (GemmPlan *)xcalloc((size_t)capacity, sizeof *table, "the GEMM plans");
    for (int i = 0; i < state->capacity; i++) {
        if (state->table[i].key.m != 0) *plan_place(table, capacity, &state->table[i].key) = state->table[i];
    }
    free(state->table);
    state->table = table;
    state->capacity = capacity;
}

// --- creating plans ------------------------------------------------------------------------------

// Returns the largest power of two up to 256 that divides an address, or several ORed addresses.
// Kernels with wide accesses need a minimum alignment.
static uint32_t alignment_of(uintptr_t address) {
    uintptr_t bits = address | 256;
    return (uint32_t)(bits & (~bits + 1));
}
static uint32_t matrix_alignment(const Gemm *g) {
    return alignment_of((uintptr_t)g->a | (uintptr_t)g->b | (uintptr_t)g->d | (uintptr_t)g->aux |
                        (uintptr_t)g->add);
}

static bool is_fp8(const Gemm *g) { return g->a_type != GEMM_BF16; }

int gemm_form(const Gemm *g) {
    return g->transpose_a | g->transpose_b << 1 | g->fp32 << 2 | g->epilogue << 3 | g->accumulate << 5 |
           g->a_type << 6 | g->b_type << 8 | g->fast << 10 | g->a_scales << 11 | g->b_scales << 13 |
           (g->add != NULL) << 15;
}

static GemmKey gemm_key(const Gemm *g, int answer) {
    int64_t form = gemm_form(g);
    form |= (int64_t)matrix_alignment(g) << 16 | (int64_t)alignment_of((uintptr_t)g->bias) << 28 |
            (int64_t)alignment_of((uintptr_t)g->a_scale | (uintptr_t)g->b_scale) << 40 |
            (int64_t)(answer + 1) << 52 | (int64_t)g->beside_collective << 62;
    GemmKey key = {g->m, g->n, g->k, form};
    return key;
}

// Returns the number of SMs for a GEMM, or 0 for all. A GEMM that runs at the same time as a
// collective leaves SMs to it, because the collective could otherwise start only after the first
// wave of tiles. A GEMM of many waves would lose more time than the collective gains. Counts
// cuBLASLt's usual tiles. Does not depend on --tp-comm-backend, so that both backends compute
// bitwise identical gradients.
static int sms_of(const Device *device, const Gemm *g) {
    enum { TILE_M = 128, TILE_N = 256, FEW_WAVES = 3 };
    int64_t tiles = (g->m + TILE_M - 1) / TILE_M * ((g->n + TILE_N - 1) / TILE_N);
    if (!g->beside_collective || tiles > FEW_WAVES * device->multiprocessors) return 0;
    return device->multiprocessors - peer_most_blocks(COMM_BESIDE_GEMM, device->multiprocessors, 1);
}

// Returns the row of gemm_table.h for this product, or NULL. The table applies to one library
// version and GPU family.
static const GemmAnswer *table_row(const Device *device, const Gemm *g) {
    if (cublasLtGetVersion() != GEMM_TABLE_VERSION || device->major != GEMM_TABLE_MAJOR) return NULL;
    for (size_t i = 0; i < sizeof gemm_table / sizeof gemm_table[0]; i++) {
        const GemmAnswer *row = &gemm_table[i];
        if (row->m == g->m && row->n == g->n && row->k == g->k && row->form == gemm_form(g)) return row;
    }
    return NULL;
}

static int table_answer(const Device *device, const Gemm *g) {
    if (sms_of(device, g)) return 0;  // the table was measured with all SMs
    const GemmAnswer *row = table_row(device, g);
    return row ? row->answer : 0;
}

static void set_attribute(const Site *site, cublasLtMatmulDesc_t operation,
                          cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes) {
    blas_check(site, cublasLtMatmulDescSetAttribute(operation, attribute, value, bytes),
               "describing a product");
}

static void set_pointers(const Site *site, cublasLtMatmulDesc_t operation, const Gemm *g) {
    const void *bias = g->bias, *aux = g->aux;
    if (g->epilogue == GEMM_BIAS || g->epilogue == GEMM_BIAS_GELU) {
        set_attribute(site, operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
    }
    if (g->epilogue == GEMM_BIAS_GELU || g->epilogue == GEMM_DGELU) {
        set_attribute(site, operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux, sizeof aux);
    }
    if (is_fp8(g)) {  // cuBLASLt's A is b: see describe_operation
        const void *left = g->b_scale, *right = g->a_scale;
        set_attribute(site, operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &left, sizeof left);
        set_attribute(site, operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &right, sizeof right);
    }
}

// Attributes and values of cuBLASLt 12.9, which older headers lack.
enum { A_SCALE_MODE = 31, B_SCALE_MODE = 32, VEC128_32F = 4, BLK128X128_32F = 5 };

static void describe_fp8(const Site *site, cublasLtMatmulDesc_t operation, const Gemm *g) {
    if (g->a_scales != GEMM_SCALE_WHOLE) {
        int32_t right = g->a_scales == GEMM_SCALE_ROWS ? VEC128_32F : BLK128X128_32F,
                left = g->b_scales == GEMM_SCALE_ROWS ? VEC128_32F : BLK128X128_32F;
        set_attribute(site, operation, (cublasLtMatmulDescAttributes_t)A_SCALE_MODE, &left, sizeof left);
        set_attribute(site, operation, (cublasLtMatmulDescAttributes_t)B_SCALE_MODE, &right, sizeof right);
    }
    int8_t fast = g->fast;
    set_attribute(site, operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
    int32_t bias = CUDA_R_16BF;
    if (g->bias) set_attribute(site, operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias, sizeof bias);
}

// cuBLASLt is column-major and sees a row-major matrix as its transpose. So the operation is d^T =
// op(b)^T op(a)^T, with b as the left operand.
static void describe_operation(const Device *device, GemmPlan *plan, const Gemm *g) {
    const Site *site = device->site;
    int32_t sms = sms_of(device, g);
    const cublasLtEpilogue_t epilogues[] = {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS,
                                            CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU};
    cublasLtEpilogue_t epilogue = epilogues[g->epilogue];
    cublasOperation_t left = g->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t right = g->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t made = cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    blas_check(site, made, "describing a product");
    set_attribute(site, plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, &left, sizeof left);
    set_attribute(site, plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, &right, sizeof right);
    set_attribute(site, plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    if (g->aux) {
        int64_t row = g->n;
        set_attribute(site, plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &row, sizeof row);
    }
    if (is_fp8(g)) describe_fp8(site, plan->operation, g);
    if (sms) set_attribute(site, plan->operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &sms, sizeof sms);
    set_pointers(site, plan->operation, g);
}

// Describes a packed matrix. rows, columns: of the column-major matrix that cuBLASLt sees.
static void describe_matrix(const Site *site, cublasLtMatrixLayout_t *layout, cudaDataType_t type,
                            int64_t rows, int64_t columns) {
    cublasStatus_t made = cublasLtMatrixLayoutCreate(layout, type, (uint64_t)rows, (uint64_t)columns, rows);
    blas_check(site, made, "describing a matrix");
}

static cudaDataType_t operand_type(GemmType type) {
    const cudaDataType_t types[] = {CUDA_R_16BF, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2};
    return types[type];
}

// Returns constraints on algorithms. reductions: allowed cublasLtReductionScheme_t. They must be in
// fp32, so that a product is rounded once.
static cublasLtMatmulPreference_t make_wish(const Site *site, const Gemm *g, uint32_t reductions) {
    size_t workspace = GEMM_WORKSPACE_BYTES;
    uint32_t alignment = matrix_alignment(g) < 16 ? matrix_alignment(g) : 16;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        const void *value;
        size_t bytes;
    } wanted[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment, sizeof alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &alignment, sizeof alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment, sizeof alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment, sizeof alignment},
    };
    cublasLtMatmulPreference_t wish;
    cublasStatus_t status = cublasLtMatmulPreferenceCreate(&wish);
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0] && status == CUBLAS_STATUS_SUCCESS; i++) {
        status = cublasLtMatmulPreferenceSetAttribute(wish, wanted[i].attribute, wanted[i].value,
                                                      wanted[i].bytes);
    }
    blas_check(site, status, "choosing an algorithm");
    return wish;
}

// Asks the heuristic for `wanted` algorithms. Returns the number found.
static int ask_heuristic(const Site *site, cublasLtHandle_t handle, GemmPlan *plan, const Gemm *g,
                         uint32_t reductions, int wanted, cublasLtMatmulHeuristicResult_t *found) {
    cublasLtMatmulPreference_t wish = make_wish(site, g, reductions);
    int count = 0;
    plan->status = cublasLtMatmulAlgoGetHeuristic(handle, plan->operation, plan->a, plan->b, plan->d, plan->d,
                                                  wish, wanted, found, &count);
    cublasLtMatmulPreferenceDestroy(wish);
    if (plan->status == CUBLAS_STATUS_SUCCESS && count == 0) plan->status = CUBLAS_STATUS_NOT_SUPPORTED;
    return plan->status == CUBLAS_STATUS_SUCCESS ? count : 0;
}

// Drops algorithms that cuBLASLt's own check rejects: for FP8 the heuristic also returns some that
// do not support the product. Returns the number kept.
static int keep_supported(cublasLtHandle_t handle, GemmPlan *plan, int count,
                          cublasLtMatmulHeuristicResult_t *found) {
    int kept = 0;
    for (int i = 0; i < count; i++) {
        cublasLtMatmulHeuristicResult_t result;
        plan->status = cublasLtMatmulAlgoCheck(handle, plan->operation, plan->a, plan->b, plan->d, plan->d,
                                               &found[i].algo, &result);
        bool fits = plan->status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= GEMM_WORKSPACE_BYTES;
        if (fits) found[kept++] = found[i];
    }
    if (kept > 0) plan->status = CUBLAS_STATUS_SUCCESS;
    else if (plan->status == CUBLAS_STATUS_SUCCESS) plan->status = CUBLAS_STATUS_NOT_SUPPORTED;
    return kept;
}

// Sets the plan's algorithm to result `answer` of the heuristic. If there are fewer results, uses
// the last one and returns false. The choice depends only on shape, GPU and library, never on
// timing. If there is no algorithm, plan->status says why.
static bool choose_algorithm(const Site *site, cublasLtHandle_t handle, GemmPlan *plan, const Gemm *g,
                             int answer) {
    enum { FP8_LEAST = 8 };
    cublasLtMatmulHeuristicResult_t found[GEMM_ANSWERS];
    int wanted = is_fp8(g) && answer < FP8_LEAST ? FP8_LEAST : answer + 1;
    const uint32_t reductions[] = {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, CUBLASLT_REDUCTION_SCHEME_MASK};
    int count = 0;
    for (int i = 0; i < (is_fp8(g) ? 2 : 1) && count == 0; i++) {
        count = ask_heuristic(site, handle, plan, g, reductions[i], wanted, found);
        if (is_fp8(g) && count > 0) count = keep_supported(handle, plan, count, found);
    }
    if (count > 0) plan->algorithm = found[answer < count ? answer : count - 1].algo;
    return answer < count;
}

// answer: index of the heuristic's result, or -1 for the choice of gemm_table.h. When it creates
// the plan, sets *exists to false if the heuristic has fewer results. exists may be NULL.
static const GemmPlan *find_plan(Device *device, LinearState *state, const Gemm *g, int answer,
                                 bool *exists) {
    GemmKey key = gemm_key(g, answer);
    GemmPlan *plan = plan_place(state->table, state->capacity, &key);
    if (plan->key.m != 0) return plan;
    if (2 * (state->used + 1) > state->capacity) {
        table_grow(state);
        plan = plan_place(state->table, state->capacity, &key);
    }
    plan->key = key;
    state->used++;
    describe_operation(device, plan, g);
    describe_matrix(device->site, &plan->a, operand_type(g->b_type), g->transpose_b ? g->k : g->n,
                    g->transpose_b ? g->n : g->k);
    describe_matrix(device->site, &plan->b, operand_type(g->a_type), g->transpose_a ? g->m : g->k,
                    g->transpose_a ? g->k : g->m);
    describe_matrix(device->site, &plan->d, g->fp32 ? CUDA_R_32F : CUDA_R_16BF, g->n, g->m);
    bool found = choose_algorithm(device->site, state->handle, plan, g,
                                  answer < 0 ? table_answer(device, g) : answer);
    if (exists) *exists = found;
    return plan;
}

// --- matrix products -----------------------------------------------------------------------------

static cublasStatus_t run_plan(Stream *stream, const Gemm *g, const GemmPlan *plan) {
    Device *device = stream_device(stream);
    if (plan->status != CUBLAS_STATUS_SUCCESS) return plan->status;
    // Calls may overwrite the plan's pointers, because cuBLASLt reads them before it returns, and
    // only one host thread uses a device.
    set_pointers(device->site, plan->operation, g);
    float scale = g->add || g->scale != 0 ? g->scale : 1.0f, beta = g->accumulate ? 1.0f : 0.0f;
    if (g->add) beta = g->add_scale;
    const void *added = g->add ? g->add : g->d;
    return cublasLtMatmul(linear_state(device)->handle, plan->operation, &scale, g->b, plan->a, g->a, plan->b,
                          &beta, added, plan->d, g->d, plan->d, &plan->algorithm, g->workspace,
                          GEMM_WORKSPACE_BYTES, stream_handle(stream));
}

bool gemm_by_answer(Stream *stream, const Gemm *g, int answer) {
    Device *device = stream_device(stream);
    bool exists = true;
    const GemmPlan *plan = find_plan(device, linear_state(device), g, answer, &exists);
    if (plan->status != CUBLAS_STATUS_SUCCESS) {
        fatal(device->site, EXIT_ENVIRONMENT,
              "cuBLASLt has no algorithm for a (%lld, %lld) x (%lld, %lld) matrix product (%s); use layer "
              "sizes that are multiples of %d, or another version of cuBLAS",
              (long long)g->m, (long long)g->k, (long long)g->k, (long long)g->n,
              cublasLtGetStatusString(plan->status), is_fp8(g) ? 16 : 8);
    }
    blas_check(device->site, run_plan(stream, g, plan), "a product");
    return exists;
}

const char *gemm_attempt(Stream *stream, const Gemm *g) {
    Device *device = stream_device(stream);
    cublasStatus_t status = run_plan(stream, g, find_plan(device, linear_state(device), g, -1, NULL));
    return status == CUBLAS_STATUS_SUCCESS ? NULL : cublasLtGetStatusString(status);
}

void gemm(Stream *stream, const Gemm *g) {
    if (g->m > 0) gemm_by_answer(stream, g, -1);
}

static Gemm product(void *d, const floatX *a, const floatX *b, int64_t m, int64_t n, int64_t k,
                    void *workspace) {
    Gemm g = {};
    g.d = d, g.a = a, g.b = b, g.m = m, g.n = n, g.k = k, g.workspace = workspace;
    return g;
}

void matmul_nt(Stream *stream, floatX *c, const floatX *a, const floatX *b, int64_t m, int64_t n, int64_t k,
               void *workspace) {
    Gemm g = product(c, a, b, m, n, k, workspace);
    g.transpose_b = true;
    gemm(stream, &g);
}

void matmul_nn(Stream *stream, floatX *c, const floatX *a, const floatX *b, int64_t m, int64_t n, int64_t k,
               void *workspace) {
    Gemm g = product(c, a, b, m, n, k, workspace);
    gemm(stream, &g);
}

void matmul_tn(Stream *stream, float *c, const floatX *a, const floatX *b, int64_t m, int64_t n, int64_t k,
               bool overwrite, void *workspace) {
    Gemm g = product(c, a, b, m, n, k, workspace);
    g.transpose_a = g.fp32 = true;
    g.accumulate = !overwrite;
    gemm(stream, &g);
}

// --- bias gradient and GELU': column sums in two passes, in a fixed order ------------------------

// Column sums take two passes. In pass 1 a block sums SUM_ROWS rows of SUM_COLUMNS columns; each
// warp reads 512 bytes of a row at a time, 8 columns per lane, and loads SUM_BATCH rows at once to
// hide latency. DGELU: rows are first multiplied by GELU'(pre), in place. In pass 2 a block adds
// the partial sums of JOIN_COLUMNS columns.
enum { SUM_WARPS = 8, SUM_COLUMNS = WARP * PACKED, SUM_ROWS = 256, SUM_BATCH = 4 };
enum { JOIN_COLUMNS = 32, JOIN_SLICES = 8 };

// partial (ceil(N / SUM_ROWS), OC) out; dy (N, OC) in, with DGELU also out; pre (N, OC) with DGELU.
// MAXIMUM: raises *absmax to the absolute maximum of the resulting dy.
template <bool DGELU, bool MAXIMUM>
static __global__ void __launch_bounds__(SUM_WARPS *WARP)
    column_sum_kernel(float *partial, floatX *dy, const floatX *pre, int64_t N, int OC, uint32_t *absmax) {
    __shared__ __align__(16) float sums[SUM_WARPS][SUM_COLUMNS];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int slabs = (OC + SUM_COLUMNS - 1) / SUM_COLUMNS, slab = (int)(blockIdx.x % (unsigned)slabs);
    int64_t part = blockIdx.x / (unsigned)slabs;  // 1-D grid, because gridDim.y is limited to 65535
    int column = slab * SUM_COLUMNS + lane * PACKED;
    int64_t first = part * SUM_ROWS, end = first + SUM_ROWS < N ? first + SUM_ROWS : N;
    float sum[PACKED] = {};
    uint32_t largest = 0;
    for (int64_t row = first + warp; column < OC && row < end; row += SUM_BATCH * SUM_WARPS) {
        Packed128 dy_row[SUM_BATCH], pre_row[SUM_BATCH];
#pragma unroll
        for (int i = 0; i < SUM_BATCH; i++) {
            int64_t at = (row + i * SUM_WARPS) * OC + column;
            dy_row[i].words = make_uint4(0, 0, 0, 0);
            if (row + i * SUM_WARPS >= end) continue;
            dy_row[i] = load_packed(dy + at);
            if (DGELU) pre_row[i] = load_packed_streaming(pre + at);
        }
#pragma unroll
        for (int i = 0; i < SUM_BATCH; i++) {
            float x[PACKED];
            unpack(dy_row[i], x);
            if (DGELU && row + i * SUM_WARPS < end) {
                float before[PACKED];
                unpack(pre_row[i], before);
#pragma unroll
                for (int e = 0; e < PACKED; e++) x[e] *= gelu_derivative(before[e]);
                Packed128 rounded = pack(x);
                store_packed(dy + (row + i * SUM_WARPS) * OC + column, rounded);
                unpack(rounded, x);
                if (MAXIMUM) largest = packed_absolute(largest, rounded);
            } else if (MAXIMUM) {
                largest = packed_absolute(largest, dy_row[i]);
            }
#pragma unroll
            for (int e = 0; e < PACKED; e++) sum[e] += x[e];
        }
    }
    if (MAXIMUM) block_absolute(absmax, largest);
    store_floats(&sums[warp][lane * PACKED], sum);
    __syncthreads();
    column = slab * SUM_COLUMNS + threadIdx.x;  // one column per thread
    if (column >= OC) return;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < SUM_WARPS; w++) total += sums[w][threadIdx.x];
    partial[part * OC + column] = total;
}
static_assert(SUM_COLUMNS == SUM_WARPS * WARP, "one thread per column when joining the warps' sums");

// dbias (OC) += sum of partial (parts, OC) over the parts.
static __global__ void __launch_bounds__(JOIN_SLICES *JOIN_COLUMNS)
    column_join_kernel(float *dbias, const float *partial, int parts, int OC) {
    __shared__ float sums[JOIN_SLICES][JOIN_COLUMNS];
    int slice = threadIdx.x / JOIN_COLUMNS, lane = threadIdx.x % JOIN_COLUMNS;
    int column = blockIdx.x * JOIN_COLUMNS + lane;
    float sum = 0.0f;
    if (column < OC) {
#pragma unroll 4
        for (int part = slice; part < parts; part += JOIN_SLICES) sum += partial[(int64_t)part * OC + column];
    }
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice != 0 || column >= OC) return;
    for (int i = 1; i < JOIN_SLICES; i++) sum += sums[i][lane];
    dbias[column] += sum;
}

static void join_columns(Stream *s, float *dbias, const float *partial, int parts, int OC) {
    unsigned blocks = (unsigned)ceil_div64(OC, JOIN_COLUMNS);
    column_join_kernel<<<blocks, JOIN_SLICES * JOIN_COLUMNS, 0, stream_handle(s)>>>(dbias, partial, parts,
                                                                                    OC);
    check_launch(s, "column_join");
}

template <bool DGELU, bool MAXIMUM>
static void sum_columns(Stream *s, float *partial, floatX *dy, const floatX *pre, int64_t N, int OC,
                        uint32_t *absmax) {
    unsigned blocks = (unsigned)(ceil_div64(N, SUM_ROWS) * ceil_div64(OC, SUM_COLUMNS));
    column_sum_kernel<DGELU, MAXIMUM>
        <<<blocks, SUM_WARPS * WARP, 0, stream_handle(s)>>>(partial, dy, pre, N, OC, absmax);
    check_launch(s, "column_sum");
}

// Adds the column sums of dy to dbias. If pre is not NULL, first multiplies dy by GELU'(pre). dbias
// NULL: only multiplies. absmax may be NULL.
static void bias_backward(Stream *s, float *dbias, floatX *dy, const floatX *pre, int64_t N, int OC,
                          float *partial, uint32_t *absmax) {
    const auto kernel = pre      ? absmax ? sum_columns<true, true> : sum_columns<true, false>
                             : absmax ? sum_columns<false, true>
                                 : sum_columns<false, false>;
    kernel(s, partial, dy, pre, N, OC, absmax);
    int64_t parts = ceil_div64(N, SUM_ROWS);
    if (dbias) join_columns(s, dbias, partial, (int)parts, OC);
}

// --- GELU ----------------------------------------------------------------------------------------

enum { GELU_THREADS = 256 };

static __global__ void __launch_bounds__(GELU_THREADS) gelu_kernel(floatX *y, const floatX *pre, int64_t n) {
    int64_t at = ((int64_t)blockIdx.x * GELU_THREADS + threadIdx.x) * PACKED;
    if (at + PACKED <= n) {
        float x[PACKED];
        unpack(load_packed_streaming(pre + at), x);
#pragma unroll
        for (int e = 0; e < PACKED; e++) x[e] = gelu(x[e]);
        store_packed(y + at, pack(x));
    } else {
        for (; at < n; at++) y[at] = floatX_from_float(gelu(floatX_to_float(pre[at])));
    }
}

void op_gelu_forward(Stream *s, floatX *y, const floatX *pre, int64_t n) {
    if (n == 0) return;
    gelu_kernel<<<(unsigned)ceil_div64(n, GELU_THREADS * PACKED), GELU_THREADS, 0, stream_handle(s)>>>(y, pre,
                                                                                                       n);
    check_launch(s, "gelu");
}

// --- the ops -------------------------------------------------------------------------------------

// The workspace has cuBLASLt's workspace, then the partial sums of a bias gradient, (ceil(N /
// SUM_ROWS), max(C, OC)) in fp32.
size_t op_linear_workspace_bytes(int64_t max_N, int max_C, int max_OC) {
    return GEMM_WORKSPACE_BYTES +
           (size_t)(ceil_div64(max_N, SUM_ROWS) * (max_C > max_OC ? max_C : max_OC)) * sizeof(float);
}

static float *partial_sums(void *workspace) { return (float *)((uint8_t *)workspace + GEMM_WORKSPACE_BYTES); }

// Applies the linear's factor, and adds a summand of the result unless it is NULL.
static void scale_and_add(Gemm *g, const Linear *a, const floatX *add) {
    g->scale = a->scale != 0 ? a->scale : 1.0f;
    g->add = add;
    g->add_scale = 1.0f;
}

void op_linear_forward(Stream *s, const Linear *a) {
    if (a->N == 1 && !a->add && a->scale == 0) {
        linear_forward_row(s, a);
        return;
    }
    Gemm g = product(a->y, a->x, a->w, a->N, a->OC, a->C, a->workspace);
    g.transpose_b = true;
    scale_and_add(&g, a, a->add);
    if (a->pre && !a->bias) {  // cuBLASLt's GELU epilogue can only store its input if there is a bias
        g.d = a->pre;
        gemm(s, &g);
        op_gelu_forward(s, a->y, a->pre, a->N * a->OC);
        return;
    }
    g.epilogue = a->pre ? GEMM_BIAS_GELU : a->bias ? GEMM_BIAS : GEMM_PLAIN;
    g.bias = a->bias;
    g.aux = a->pre;
    gemm(s, &g);
}

// Computes dx = dy w, multiplied by GELU'(x_pre), and adds its column sums to dpre_bias.
static void dx_through_gelu(Stream *s, const Linear *a) {
    Gemm g = product(a->dx, a->dy, a->w, a->N, a->C, a->OC, a->workspace);
    scale_and_add(&g, a, a->dx_add);
    g.epilogue = GEMM_DGELU;
    g.aux = (floatX *)a->x_pre;  // not written
    bool fused = table_row(stream_device(s), &g) != NULL;
    if (!fused) g.epilogue = GEMM_PLAIN, g.aux = NULL;
    gemm(s, &g);
    if (fused && !a->dpre_bias) return;
    bias_backward(s, a->dpre_bias, a->dx, fused ? NULL : a->x_pre, a->N, a->C, partial_sums(a->workspace),
                  NULL);
}

void op_linear_backward(Stream *s, const Linear *a) {
    if (a->N == 0) return;
    if (a->dw) {
        Gemm g = product(a->dw, a->dy, a->x, a->OC, a->C, a->N, a->workspace);
        g.transpose_a = g.fp32 = true;
        g.accumulate = !a->overwrite;
        scale_and_add(&g, a, NULL);
        g.beside_collective = a->beside_collective;
        gemm(s, &g);
    }
    if (!a->dx) return;
    if (a->x_pre) {
        dx_through_gelu(s, a);
        return;
    }
    Gemm g = product(a->dx, a->dy, a->w, a->N, a->C, a->OC, a->workspace);
    scale_and_add(&g, a, a->dx_add);
    gemm(s, &g);
}

void op_bias_gradient(Stream *s, float *dbias, const floatX *dy, const float *sum, int64_t N, int OC,
                      void *workspace, uint32_t *absmax) {
    assert(!(sum && absmax));
    if (N == 0) return;
    if (sum) join_columns(s, dbias, sum, 1, OC);
    // Does not write dy.
    else bias_backward(s, dbias, (floatX *)dy, NULL, N, OC, partial_sums(workspace), absmax);
}

void op_gelu_backward(Stream *s, floatX *dx, const floatX *pre, float *dbias, int64_t N, int C,
                      void *workspace, uint32_t *absmax) {
    if (N > 0) bias_backward(s, dbias, dx, pre, N, C, partial_sums(workspace), absmax);
}
