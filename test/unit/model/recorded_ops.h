// Ops of llmc/ops.h and llmc/ops_fp8.h, and direct collectives of llmc/comm.h, that only record the
// memory that they read and write (recording.h). They take precedence over the CPU backend.
// Included by recorded_run.h.
#pragma once
#include "llmc/model/gpt.h"
#include "test/unit/state/recording.h"

// How to run a step.
enum {
    BLOCKS = 1 << 0,      // --tp-comm-overlap
    DIRECT = 1 << 1,      // reductions and gathers are single kernels
    FUSED = 1 << 2,       // reductions in forward are part of the norm's kernel
    SEQUENCE = 1 << 3,    // --sequence-parallel
    CODED = 1 << 4,       // --quantized-tensor-parallel, which uses no single kernels
    TENSORWISE = 1 << 5,  // --fp8-recipe
    DELAYED = 1 << 6,
    BLOCKWISE = 1 << 7,
    QUANTIZED = 1 << 8,   // --quantized-activations
    SEALED = 1 << 9,      // --verify-wire
    UNTIED = 1 << 10,     // --untie-embeddings-and-output-weights
    RECOMPUTE = 1 << 11,  // --recompute-granularity full
    MUON = 1 << 12        // --optimizer muon, with all layers in a bucket of several chunks
};
enum { FP8 = TENSORWISE | DELAYED | BLOCKWISE };

typedef struct Case {
    const char *strategy;  // --data-parallel-sharding-strategy
    int flags;
    int stages, chunks;  // of the pipeline
} Case;
static Case way;
static const TensorParallel *closing;  // of the recording that ends

// --- ops in bf16 ---------------------------------------------------------------------------------

void op_init_weights(Stream *s, const InitWeights *a) {
    begin_on(s, "init");
    writes(s, a->weights, X * a->rows * a->columns);
}
void op_embedding_forward(Stream *s, const Embedding *a) {
    begin_on(s, "embedding");
    reads(s, a->wte, X * a->rows * a->C);
    if (!a->part) reads(s, a->wpe, X * a->T * a->C);
    writes(s, a->x, X * rows_held(a->x_rows, a->B, a->T) * a->C);
}
void op_layernorm_forward(Stream *s, const LayerNorm *a) {
    int64_t rows = rows_held(a->rows, a->B, a->T), bytes = X * rows * a->C;
    begin_on(s, "norm");
    reads(s, a->gamma, X * a->C);
    reads(s, a->beta, X * a->C);
    if (a->branch) reads(s, a->residual, bytes);
    reads(s, a->branch, bytes);
    use(s->device, a->branch ? WRITE : READ, a->x, bytes);
    writes(s, a->y, bytes);
    writes(s, a->mean, 4 * rows);
    writes(s, a->rstd, 4 * rows);
    writes(s, a->absmax, 4);
}
void op_linear_forward(Stream *s, const Linear *a) {
    begin_on(s, a->pre ? "fc1" : a->C > a->OC ? "fc2" : a->OC == 2 * a->C ? "projection" : "QKV");
    reads(s, a->x, X * a->N * a->C);
    reads(s, a->w, X * a->OC * a->C);
    reads(s, a->bias, X * a->OC);
    writes(s, a->y, X * a->N * a->OC);
    writes(s, a->pre, X * a->N * a->OC);
    writes(s, a->workspace, 1);
}
void op_attention_forward(Stream *s, const Attention *a) {
    int64_t elements = (int64_t)a->B * a->T * a->NH * a->HD;
    begin_on(s, "attention");
    reads(s, a->qkv, 3 * X * elements);
    writes(s, a->out, X * elements);
    writes(s, a->saved, 4 * (int64_t)a->B * a->T * a->NH);
    writes(s, a->workspace, 1);
}
void op_head_logits(Stream *s, const Head *a, int64_t row, int64_t rows) {
    begin_on(s, "logits");
    reads(s, a->x + row * a->C, X * rows * a->C);
    reads(s, a->wte, X * a->rows * a->C);
    writes(s, a->own, rows * (int64_t)sizeof *a->own);
    writes(s, a->workspace, 1);
}
void op_head_gradients(Stream *s, const Head *a, int64_t row, int64_t rows) {
    begin_on(s, "gradients of logits");
    reads(s, a->all, a->ranks * rows * (int64_t)sizeof *a->all);
    reads(s, a->x + row * a->C, X * rows * a->C);
    reads(s, a->wte, X * a->rows * a->C);
    writes(s, a->losses + row, 4 * rows);
    if (a->dx) writes(s, a->dx + row * a->C, X * rows * a->C);
    writes(s, a->dwte, 4 * a->rows * a->C);
    writes(s, a->workspace, 1);
}
void op_loss_sum(Stream *s, const Head *a) {
    begin_on(s, "loss");
    reads(s, a->losses, 4 * a->N);
    writes(s, a->loss_sum, 4);
}
void op_layernorm_backward(Stream *s, const LayerNorm *a) {
    int64_t rows = rows_held(a->rows, a->B, a->T), bytes = X * rows * a->C;
    begin_on(s, "norm backward");
    reads(s, a->gamma, X * a->C);
    if (a->gamma) reads(s, a->x, bytes);
    reads(s, a->mean, 4 * rows);
    reads(s, a->rstd, 4 * rows);
    reads(s, a->dy, bytes);
    writes(s, a->dresidual, bytes);
    writes(s, a->dbranch, bytes);
    writes(s, a->dgamma, 4 * a->C);
    writes(s, a->dbeta, 4 * a->C);
    writes(s, a->branch_sum, 4 * a->C);
    writes(s, a->absmax, 4);
}
// The GEMMs for dx and dw, or one of them.
void op_linear_backward(Stream *s, const Linear *a) {
    begin_on(s, a->dx && a->dw ? "dx and dw" : a->dx ? "dx" : "dw");
    reads(s, a->dy, X * a->N * a->OC);
    if (a->dx) reads(s, a->w, X * a->OC * a->C);
    if (a->dx) writes(s, a->dx, X * a->N * a->C);
    if (a->dx && a->x_pre) reads(s, a->x_pre, X * a->N * a->C);
    if (a->dx && a->x_pre) writes(s, a->dpre_bias, 4 * a->C);
    // With tensor parallelism, the GEMM for dw alone hides a collective.
    if (a->beside_collective != (a->dw && !a->dx)) fail_msg("a GEMM has the SMs of another one");
    if (a->dw) reads(s, a->x, X * a->N * a->C);
    if (a->dw) writes(s, a->dw, 4 * a->OC * a->C);
    writes(s, a->workspace, 1);
}
void op_bias_gradient(Stream *s, float *dbias, const floatX *dy, const float *sum, int64_t N, int OC,
                      void *workspace, uint32_t *absmax) {
    begin_on(s, "bias gradient");
    if (!sum) reads(s, dy, X * N * OC);
    reads(s, sum, 4 * OC);
    writes(s, dbias, 4 * OC);
    writes(s, workspace, 1);
    writes(s, absmax, 4);
}
void op_attention_backward(Stream *s, const Attention *a) {
    int64_t elements = (int64_t)a->B * a->T * a->NH * a->HD;
    begin_on(s, "attention backward");
    reads(s, a->qkv, 3 * X * elements);
    reads(s, a->out, X * elements);
    reads(s, a->saved, 4 * (int64_t)a->B * a->T * a->NH);
    reads(s, a->dout, X * elements);
    writes(s, a->dqkv, 3 * X * elements);
    writes(s, a->workspace, 1);
}
void op_embedding_backward(Stream *s, const Embedding *a) {
    begin_on(s, "embedding backward");
    reads(s, a->dx, X * a->B * a->T * a->C);
    writes(s, a->dwte, 4 * a->rows * a->C);
    writes(s, a->dwpe, 4 * a->T * a->C);
}
void op_sum_parts(Stream *s, const SumParts *a) {
    begin_on(s, "sum");
    reads(s, a->parts, X * a->ranks * a->n);
    reads(s, a->bias, X * a->C);
    writes(s, a->y, X * a->n);
}
void op_add_parts(Stream *s, float *y, const float *parts, int64_t n, int ranks) {
    begin_on(s, "sum of gradients");
    reads(s, parts, 4 * ranks * n);
    writes(s, y, 4 * n);
}

// --- FP8 -----------------------------------------------------------------------------------------

// Bytes of the tensor that is quantized.
static int64_t source_bytes(const Fp8Quantize *a) {
    return X * a->N * a->C * (a->source == FP8_OF_SWIGLU ? 2 : 1);
}
void op_fp8_absmax(Stream *s, const Fp8Quantize *a) {
    begin_on(s, "FP8 maximum");
    reads(s, a->x, source_bytes(a));
    writes(s, a->scale, sizeof *a->scale);
}
void op_fp8_scale(Stream *s, Fp8Scale *scale, Fp8Type type, const uint32_t *absmax, int n, int margin) {
    begin_on(s, "FP8 scale");
    if (n > 0) reads(s, absmax, 4 * n);
    writes(s, scale, sizeof *scale);
}
void op_fp8_quantize(Stream *s, const Fp8Quantize *a) {
    bool whole = a->blocks == FP8_WHOLE;
    begin_on(s, "FP8 codes");
    reads(s, a->x, source_bytes(a));
    if (whole) use(s->device, a->accumulate ? WRITE : READ, a->scale, sizeof *a->scale);
    writes(s, a->codes, a->N * a->C);
    writes(s, a->transposed, a->N * a->C);
    if (whole) return;
    writes(s, a->block_scales, 4 * fp8_block_scales(a->blocks, a->N, a->C));
    writes(s, a->transposed_block_scales, 4 * fp8_block_scales(a->blocks, a->C, a->N));
}
void op_fp8_transpose(Stream *s, uint8_t *transposed, const uint8_t *codes, int64_t N, int C) {
    begin_on(s, "FP8 transpose");
    reads(s, codes, N * C);
    writes(s, transposed, N * C);
}
static void reads_matrix(Stream *s, const Fp8Matrix *m, int64_t rows, int64_t columns) {
    reads(s, m->codes, rows * columns);
    if (m->blocks == FP8_WHOLE) reads(s, m->scale, sizeof *m->scale);
    else reads(s, m->block_scales, 4 * fp8_block_scales(m->blocks, rows, columns));
}
// With --fp8-format hybrid, only gradients are E5M2.
void op_fp8_product(Stream *s, const Fp8Product *a) {
    begin_on(s, a->sum ? "FP8 dw" : a->a.type == FP8_E5M2 ? "FP8 dx" : "FP8 y");
    reads_matrix(s, &a->a, a->m, a->k);
    reads_matrix(s, &a->b, a->n, a->k);
    reads(s, a->bias, X * a->n);
    writes(s, a->d, X * a->m * a->n);
    writes(s, a->sum, 4 * a->m * a->n);
    writes(s, a->workspace, 1);
}
void op_gelu_backward(Stream *s, floatX *dx, const floatX *pre, float *dbias, int64_t N, int C,
                      void *workspace, uint32_t *absmax) {
    begin_on(s, "GELU backward");
    reads(s, pre, X * N * C);
    writes(s, dx, X * N * C);
    writes(s, dbias, 4 * C);
    writes(s, workspace, 1);
    writes(s, absmax, 4);
}
void op_fp8_update_scales(Stream *s, const Fp8Update *a) {
    begin_on(s, "FP8 scales of the next step");
    reads(s, a->all, a->ranks * a->tensors * (int64_t)sizeof *a->all);
    reads(s, a->type, a->tensors);
    reads(s, a->applied, sizeof *a->applied);
    writes(s, a->scale, a->tensors * (int64_t)sizeof *a->scale);
    writes(s, a->history, 4 * (int64_t)a->tensors * a->length);
}

// --- direct collectives --------------------------------------------------------------------------

// Collectives on compute overlap with no GEMM.
static void check_beside(const Stream *s, CommBeside beside) {
    bool alone = !strcmp(s->name, "compute");
    if (beside != (alone ? COMM_WITHOUT_GEMM : COMM_BESIDE_GEMM))
        fail_msg("a collective on %s has the SMs of another one", s->name);
}
bool comm_reduce_direct(const Group *group, const CommReduce *a, Stream *s) {
    if (!(way.flags & DIRECT)) return false;
    check_beside(s, a->beside);
    begin_on(s, "reduce");
    writes(s, &group->comm->order, 1);
    reads(s, a->bias, X * a->C);
    writes(s, (void *)a->partial, X * a->total);  // its memory is also written in place, or by other ranks
    if (a->scatter) writes(s, a->scratch, X * a->total / group->size);
    writes(s, a->out, X * (a->scatter ? a->total / group->size : a->total));
    return true;
}
bool comm_gather_direct(const Group *group, const CommGather *a, Stream *s) {
    if (!(way.flags & DIRECT)) return false;
    check_beside(s, a->beside);
    begin_on(s, "gather");
    writes(s, &group->comm->order, 1);
    reads(s, a->own, (int64_t)a->bytes);
    writes(s, a->whole, group->size * (int64_t)a->bytes);
    return true;
}
bool comm_norm_direct(const Group *group, const CommNorm *a, Stream *s) {
    const LayerNorm *n = a->norm;
    int64_t rows = rows_held(n->rows, n->B, n->T), bytes = X * rows * n->C;
    if (!(way.flags & FUSED) || !n->gamma || !n->residual) return false;
    begin_on(s, "fused norm");
    writes(s, &group->comm->order, 1);
    reads(s, a->partial, X * n->B * n->T * n->C);
    reads(s, a->bias, X * n->C);
    reads(s, n->gamma, X * n->C);
    reads(s, n->beta, X * n->C);
    reads(s, n->residual, bytes);
    writes(s, n->x, bytes);
    writes(s, n->y, bytes);
    writes(s, n->mean, 4 * rows);
    writes(s, n->rstd, 4 * rows);
    writes(s, n->absmax, 4);
    writes(s, a->whole, X * n->B * n->T * n->C);
    return true;
}
// The host unmaps the memory.
void comm_close_direct(const Group *group) {
    Device *device = closing->side->device;
    begin(device, HOST, "the memory is unmapped");
    for (int i = 0; i < TP_SHARED; i++)
        use(device, WRITE, closing->shared[i].memory, (int64_t)closing->shared[i].bytes);
}
