// The backend boundary, part 2: the fused ops of the GPT. Granularity is what a GPU wants to fuse; the CPU backend composes each op from naive
// parts and is the reference. All pointers are device memory; all ops are asynchronous on their stream, allocate nothing and synchronise nothing.
// floatX is bf16 (llmc/base/dtype.h); "accumulates" means +=. Called by train_gpt.cu only.
//
// Letters: B micro-batch, T sequence length, C hidden size, NH heads, HD head size, F ffn size, Vp padded vocabulary, N = B*T rows.
// Rounding points (the same on every backend): every floatX tensor is rounded once when stored; sums are fp32; weight, bias and
// LayerNorm gradients accumulate in fp32 without rounding; the large matrices' can be overwritten instead, which spares clearing and reading them.
#pragma once
#include "llmc/base/base.h"
#include "llmc/device.h"
#include "llmc/base/dtype.h"
LLMC_BEGIN

// Device memory for ops that sum in two stages but get no workspace: the caller reserves these bytes in the memory plan and hands them over before the first
// op. Ops that use it run on one stream, one after the other. 0 where no op wants any (CPU).
size_t op_scratch_bytes(void);
void op_set_scratch(Device *device, void *memory);

// Can the ops of this backend compute a model of these sizes? The CPU's take any. Error (EXIT_USAGE) names the flag to change.
bool op_check_model(int C, int NH, int HD, int F, int Vp, Error *err);

// Inverted dropout by the counter RNG. An element's 16 random bits are a pure function of (seed, site, global sample, element inside the
// sample), so any layout, resume or recompute gives the same mask: Philox key (seed, PURPOSE_DROPOUT), counter (element / 8, site, sample low 32, sample high 32),
// 16 bits as in philox_half; kept when bits >= rint(p * 65536); kept values are multiplied by 1 / (1 - p).
typedef struct Dropout {
    float p;               // 0 = off
    uint32_t seed;
    uint32_t site;         // layer * 4 + DROPOUT_*
    int64_t first_sample;  // global index of row 0 of the micro-batch; row b is first_sample + b
} Dropout;
enum { DROPOUT_EMBEDDING = 0, DROPOUT_ATTENTION = 1, DROPOUT_PROJECTION = 2, DROPOUT_FFN = 3 };

// Initial weights. std above 0: numbers 0 .. n - 1 of normal(0, std), drawn by llmc/base/normal.h from stream (seed, tensor), numbers 2i and 2i + 1 as a pair, and
// rounded once to fp32 and once to floatX: the same bits on every backend. std 0: zeros; below 0: ones. threads: of the host, for a backend that draws there.
void op_init_weights(Stream *s,
                     floatX *weights,  // (n) out
                     int64_t n, double std, uint64_t seed, uint32_t tensor, int threads);

// x = dropout(wte[token] + wpe[position]); element index inside a sample: t * C + c.
void op_embedding_forward(Stream *s,
                          floatX *x,                 // (B, T, C) out
                          const int32_t *tokens,     // (B, T)
                          const int32_t *positions,  // (B, T)
                          const floatX *wte,         // (Vp, C)
                          const floatX *wpe,         // (max positions, C)
                          int B, int T, int C, Dropout dropout);
void op_embedding_backward(Stream *s,
                           float *dwte,               // (Vp, C) accumulates
                           float *dwpe,               // (max positions, C) accumulates
                           const floatX *dx,          // (B, T, C)
                           const int32_t *tokens, const int32_t *positions, int B, int T, int C, Dropout dropout);

// y = (x - mean) * rstd * gamma + beta per row, statistics in fp32.
void op_layernorm_forward(Stream *s,
                          floatX *y,        // (N, C) out
                          float *mean,      // (N) out
                          float *rstd,      // (N) out
                          const floatX *x,  // (N, C)
                          const floatX *gamma, const floatX *beta,  // (C), (C)
                          int64_t N, int C, float epsilon);
// residual_out = residual + dropout(branch), rounded; then LayerNorm of the rounded sum. Element index inside a sample: t * C + c, rows are (B, T).
void op_residual_layernorm_forward(Stream *s,
                                   floatX *residual_out,    // (B, T, C) out; may be residual itself
                                   floatX *y,               // (B, T, C) out
                                   float *mean, float *rstd,  // (B, T) out
                                   const floatX *residual,  // (B, T, C)
                                   const floatX *branch,    // (B, T, C) bias already added
                                   const floatX *gamma, const floatX *beta,  // (C)
                                   int B, int T, int C, float epsilon, Dropout dropout);
// dresidual += LayerNorm's input gradient (rounded once); with dbranch not NULL also dbranch = dropout'(the new dresidual): the gradient
// that enters the branch which was added just before this LayerNorm. dgamma, dbeta, dbias accumulate.
void op_layernorm_backward(Stream *s,
                           floatX *dresidual,  // (B, T, C) in: gradient arriving by the residual path; out: total gradient of x
                           floatX *dbranch,    // (B, T, C) out, or NULL when dropout.p is 0 (dresidual is the branch's gradient then) or there is no branch
                           float *dgamma, float *dbeta,  // (C) accumulate
                           float *dbias,       // (C) accumulates, or NULL: sum over the rows of the branch's gradient as stored: the bias gradient of the linear that made it
                           const floatX *dy,   // (B, T, C)
                           const floatX *x,    // (B, T, C) LayerNorm's input
                           const floatX *gamma, const float *mean, const float *rstd,  // (C), (B, T), (B, T)
                           int B, int T, int C, Dropout dropout);

// y = x w^T + bias. With pre not NULL: pre = x w^T + bias (rounded) and y = GELU_tanh(pre).
void op_linear_forward(Stream *s,
                       floatX *y,           // (N, OC) out
                       floatX *pre,         // (N, OC) out or NULL
                       const floatX *x,     // (N, C)
                       const floatX *w,     // (OC, C)
                       const floatX *bias,  // (OC) or NULL
                       int64_t N, int C, int OC, void *workspace);
// dw += dy^T x (dw = dy^T x with overwrite), dbias += sum of dy; dx = dy w (overwrites, or not computed when NULL). With pre not NULL: dx is multiplied by
// GELU'(pre), pre being the pre-activation whose GELU was this layer's input x; a backend may round dx before the multiplication as well as after it.
void op_linear_backward(Stream *s,
                        floatX *dx,          // (N, C) out or NULL
                        float *dw,           // (OC, C) accumulates
                        float *dbias,        // (OC) accumulates, or NULL
                        const floatX *dy,    // (N, OC)
                        const floatX *x,     // (N, C)
                        const floatX *w,     // (OC, C)
                        const floatX *pre,   // (N, C) or NULL
                        float *dpre_bias,    // (C) accumulates, or NULL; with pre only: sum over the rows of dx: the bias gradient of the linear before GELU
                        int64_t N, int C, int OC, bool overwrite, void *workspace);
// y = GELU_tanh(pre) elementwise, n values: the second half of op_linear_forward with pre, here for the tests of both backends.
void op_gelu_forward(Stream *s, floatX *y, const floatX *pre, int64_t n);
// Bytes of workspace the linear ops want for sizes up to these.
size_t op_linear_workspace_bytes(int64_t max_N, int max_C, int max_OC);

// Causal self-attention, scale 1/sqrt(HD), softmax in fp32, dropout on the probabilities. qkv rows are Megatron's: per head q(HD), k(HD), v(HD).
// doc_start NULL: plain causal; else query t attends to keys doc_start[b,t]..t only. Dropout element index inside a sample: (head * T + t) * T + key.
void op_attention_forward(Stream *s,
                          floatX *out,               // (B, T, NH*HD) out
                          void *saved,               // op_attention_saved_bytes: what backward needs
                          const floatX *qkv,         // (B, T, NH, 3, HD)
                          const int32_t *doc_start,  // (B, T) or NULL
                          int B, int T, int NH, int HD, Dropout dropout, void *workspace);
void op_attention_backward(Stream *s,
                           floatX *dqkv,            // (B, T, NH, 3, HD) out
                           const floatX *dout,      // (B, T, NH*HD)
                           const floatX *out,       // (B, T, NH*HD) the forward's result
                           const void *saved, const floatX *qkv, const int32_t *doc_start,
                           int B, int T, int NH, int HD, Dropout dropout, void *workspace);
size_t op_attention_saved_bytes(int B, int T, int NH, int HD);
size_t op_attention_workspace_bytes(int B, int T, int NH, int HD);

// The language-model head, forward and backward in one: logits = x wte^T (rounded to floatX), cross-entropy in fp32 over all Vp columns (Megatron: the
// padded rows take part), dlogits = weight * (softmax - onehot) (rounded), dx = dlogits wte, dwte += (or =) dlogits^T x. Rows are processed in chunks
// of op_head_chunk_rows, so the (N, Vp) logits never exist whole.
// The weight of row n is loss_mask ? loss_mask[n] * loss_scale : loss_scale; *loss_sum += sum of loss[n] * weight[n], in an order that a backend keeps
// from run to run: row by row on CPU ranks, cuda/head.cu's own on GPUs.
void op_head(Stream *s,
             float *losses,             // (N) out, unweighted
             float *loss_sum,           // (1) accumulates
             floatX *dx,                // (N, C) out, or NULL: no backward (evaluation)
             float *dwte,               // (Vp, C) accumulates (with overwrite: out), or NULL
             const floatX *x,           // (N, C) final LayerNorm's output
             const floatX *wte,         // (Vp, C)
             const int32_t *targets,    // (N)
             const float *loss_mask,    // (N) or NULL
             float loss_scale, int64_t N, int C, int Vp, bool overwrite, void *workspace);
int64_t op_head_chunk_rows(int64_t N, int Vp);
size_t op_head_workspace_bytes(int64_t N, int C, int Vp);

LLMC_END
