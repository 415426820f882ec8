// The backend boundary, part 2: the fused ops of the GPT, called by train_gpt.c.
//
// An op is as large as what a GPU wants to fuse. The CPU backend composes it from naive parts and
// is the reference. All pointers are device memory. All ops are asynchronous on their stream. They
// allocate nothing and synchronize nothing. floatX is bf16 (llmc/base/dtype.h). "Accumulates" means
// +=.
//
// Letters: B micro-batch, T sequence length, C hidden size, NH heads, HD head size, F ffn size, V
// rows of the padded vocabulary, N rows: B * T.
//
// Rounding is the same on every backend. A floatX tensor is rounded once, when it is stored. Sums
// are fp32. Gradients of weights, biases and LayerNorms accumulate in fp32 without rounding. Those
// of the large matrices can be overwritten instead, which spares clearing and reading them.
//
// One struct describes an op in both directions. Fields that a direction does not name may be 0.
//
// With tensor or sequence parallelism a rank computes a part: some rows of the micro-batch (Rows),
// some heads, or some rows of the vocabulary. Dropout's masks are those of the whole there. Fields
// that describe a part and are 0 mean the whole.
#pragma once
#include "llmc/base/base.h"
#include "llmc/base/dtype.h"
#include "llmc/device.h"
LLMC_BEGIN

// Can the ops of this backend compute a model of these sizes, with N rows in a micro-batch? The
// CPU's take any. Error (EXIT_USAGE) names the flag to change.
bool op_check_model(int C, int NH, int HD, int F, int V, int64_t N, Error *err);
// What makes this backend's attention slower at these settings than it could be, as one line;
// empty: nothing. documents: attention stops at the borders of documents.
void op_attention_notice(int T, bool documents, char *text, size_t bytes);

// Device memory for ops that get no workspace. The caller reserves these bytes in the memory plan
// and hands them over before the first op. Ops that use it run on one stream, one after the other.
// 0: none wants any (CPU).
size_t op_scratch_bytes(int64_t N, int C);
void op_set_scratch(Device *device, void *memory, size_t bytes);

// Rows first .. first + count - 1 of the micro-batch's B * T rows, for a rank that holds only
// these. count 0: all rows, and first is 0.
typedef struct Rows {
    int64_t first, count;
} Rows;
HD_FN int64_t rows_held(Rows rows, int B, int T) { return rows.count > 0 ? rows.count : (int64_t)B * T; }

// Inverted dropout by the counter RNG. An element's 16 random bits depend on (seed, site, global
// sample, element inside the sample) alone: any layout, resume or recomputation gives the same
// mask. Philox key (seed, PURPOSE_DROPOUT + 256 * high), counter (low, site, sample low 32, sample
// high 32), where high and low are the two words of element / 8. The element takes its 16 bits as
// in philox_half. It is kept when they are at least rint(p * 65536). Kept values are
// multiplied by 1 / (1 - p).
typedef struct Dropout {
    float p;  // 0 = off
    uint32_t seed;
    uint32_t site;         // layer * 4 + DROPOUT_*
    int64_t first_sample;  // global index of row 0 of the micro-batch; row b is first_sample + b
} Dropout;
enum { DROPOUT_EMBEDDING = 0, DROPOUT_ATTENTION = 1, DROPOUT_PROJECTION = 2, DROPOUT_FFN = 3 };

// The random bits of elements 8 * block .. 8 * block + 7 of a sample.
HD_FN Philox4 dropout_bits(Dropout dropout, int64_t sample, uint64_t block) {
    uint32_t high = (uint32_t)(block >> 32), sample_high = (uint32_t)((uint64_t)sample >> 32);
    return philox4x32_10(dropout.seed, PURPOSE_DROPOUT + (high << 8), (uint32_t)block, dropout.site,
                         (uint32_t)sample, sample_high);
}

// Initial weights of a tensor or of a part: `rows` by `columns` elements from (first_row,
// first_column). Element (r, c) of the part is number (first_row + r) * whole_columns +
// first_column + c of the tensor. So a part gets the bits that the whole has there. A vector is one
// column.
//
// std above 0: the tensor's numbers are normal(0, std), drawn by llmc/base/normal.h from stream
// (seed, tensor), numbers 2i and 2i + 1 as a pair. Each is rounded once to fp32 and once to floatX:
// the same bits on every backend. std 0: zeros. Below 0: ones.
typedef struct InitWeights {
    floatX *weights;  // (rows, columns) out
    int64_t rows, columns;
    int64_t first_row, first_column;
    int64_t whole_columns;  // of the tensor that the part is cut from
    double std;
    uint64_t seed;
    uint32_t tensor;
    int threads;  // of the host, for a backend that draws there
} InitWeights;
void op_init_weights(Stream *s, const InitWeights *a);

// Token and position embedding: x = dropout(wte[token] + wpe[position]). Element inside a sample: t
// * C + c. A rank may hold some rows of the vocabulary only: tokens of other rows count as zeros,
// and get no gradient. Ranks that share the vocabulary make x in two calls, and add up x between
// them: first with part set, which leaves wpe and dropout out; then with wte NULL, which takes the
// words from x. wte NULL needs no tokens. In the second call x may hold some of the rows only.
// wpe NULL: no learned positions.
//
// Backward reads the gradients of all B * T rows. A table whose gradient is NULL gets none. Tokens
// are needed for dwte alone, positions for dwpe alone.
typedef struct Embedding {
    int B, T, C;
    int first_row, rows;       // of the vocabulary, in wte and dwte
    const int32_t *tokens;     // (B, T)
    const int32_t *positions;  // (B, T)
    Dropout dropout;
    const floatX *wte;  // (rows, C) or NULL
    const floatX *wpe;  // (max positions, C) or NULL
    floatX *x;          // (B, T, C) out of forward; with wte NULL in too, and (x_rows.count, C)
    const floatX *dx;   // (B, T, C) backward
    float *dwte;        // (rows, C) backward accumulates, or NULL
    float *dwpe;        // (max positions, C) backward accumulates, or NULL
    Rows x_rows;        // of x, in a forward with wte NULL
    bool part;          // forward makes a part of the words alone
} Embedding;
void op_embedding_forward(Stream *s, const Embedding *a);
void op_embedding_backward(Stream *s, const Embedding *a);

// y = (x - mean) * rstd * gamma + beta per row, statistics in fp32. rms: RMSNorm, which is the same
// with mean 0 and no beta, 1 / rstd being the root of the mean square. With `branch` forward first
// makes x = residual + dropout(branch), rounded. Element inside a sample for dropout: t * C + c.
//
// Backward: dresidual += the gradient of x, rounded once. dbranch = dropout'(the new dresidual),
// the gradient of the branch; with dropout off dresidual is that already, and dbranch may be NULL.
// branch_sum is for op_bias_gradient of the linear that made the branch.
//
// With `rows` set every tensor below has these rows only: (rows.count, C) instead of (B, T, C), and
// (rows.count) instead of (B, T). dgamma, dbeta and branch_sum are then this rank's part of a sum.
//
// gamma NULL: no LayerNorm follows, as where a pipeline stage ends. Forward makes x and nothing
// else. dresidual is then the whole gradient of x: backward reads it and makes dbranch and
// branch_sum from it.
typedef struct LayerNorm {
    int B, T, C;
    float epsilon;
    Dropout dropout;         // of the branch
    floatX *x;               // (B, T, C) in; with branch out of forward
    const floatX *residual;  // (B, T, C) forward, with branch; may be x
    const floatX *branch;    // (B, T, C) forward, or NULL; its linear's bias is in it
    const floatX *gamma;     // (C), or NULL
    const floatX *beta;      // (C) forward, or NULL
    floatX *y;               // (B, T, C) out of forward
    float *mean, *rstd;      // (B, T) out of forward, into backward
    const floatX *dy;        // (B, T, C) backward
    floatX *dresidual;       // (B, T, C) backward, in and out
    floatX *dbranch;         // (B, T, C) out of backward, or NULL
    float *dgamma, *dbeta;   // (C) backward accumulates; dbeta or NULL
    float *branch_sum;       // (C) out of backward on GPUs: the sum of the branch's gradient over its rows
    Rows rows;
    bool rms;
} LayerNorm;
void op_layernorm_forward(Stream *s, const LayerNorm *a);
void op_layernorm_backward(Stream *s, const LayerNorm *a);

// y = x w^T + bias. With pre: pre = x w^T + bias, rounded, and y = GELU_tanh(pre).
//
// Backward: dw += dy^T x, or dw = dy^T x with overwrite. dx = dy w. Each is not computed when NULL.
// Where x was the GELU of x_pre, dx is multiplied by GELU'(x_pre): it is then the gradient of
// x_pre, and dpre_bias gets its sum over the rows. A backend may round dx before that product as
// well as after it.
typedef struct Linear {
    int64_t N;
    int C, OC;
    const floatX *x;      // (N, C)
    const floatX *w;      // (OC, C)
    const floatX *bias;   // (OC) forward, or NULL
    floatX *y;            // (N, OC) out of forward
    floatX *pre;          // (N, OC) out of forward, or NULL
    const floatX *dy;     // (N, OC) backward
    const floatX *x_pre;  // (N, C) backward, or NULL
    floatX *dx;           // (N, C) out of backward, or NULL
    float *dw;            // (OC, C) backward accumulates, or out, or NULL
    float *dpre_bias;     // (C) backward accumulates, or NULL; with x_pre only
    bool overwrite;
    void *workspace;  // op_linear_workspace_bytes
    int threads;      // of the host, for a forward of one row; 0 or 1: the calling one alone
} Linear;
void op_linear_forward(Stream *s, const Linear *a);
void op_linear_backward(Stream *s, const Linear *a);
// dbias (OC) += the sum of dy (N, OC) over its rows: the bias gradient of a linear. sum: NULL, or
// the branch_sum that op_layernorm_backward made with dy. A GPU adds that and does not read dy
// again.
void op_bias_gradient(Stream *s, float *dbias, const floatX *dy, const float *sum, int64_t N, int OC,
                      void *workspace);
// y = GELU_tanh(pre), n values: the second half of op_linear_forward with pre, here for the tests.
void op_gelu_forward(Stream *s, floatX *y, const floatX *pre, int64_t n);
// SwiGLU. A row of pre holds gate (F), then up (F). y = silu(gate) * up, where silu(g) = g / (1 +
// e^-g). Backward: dpre from dy and pre.
typedef struct Swiglu {
    int64_t N;
    int F;
    const floatX *pre;  // (N, 2 * F)
    floatX *y;          // (N, F) out of forward
    const floatX *dy;   // (N, F) backward
    floatX *dpre;       // (N, 2 * F) out of backward
} Swiglu;
void op_swiglu_forward(Stream *s, const Swiglu *a);
void op_swiglu_backward(Stream *s, const Swiglu *a);
// Bytes of workspace that the linear ops want for sizes up to these.
size_t op_linear_workspace_bytes(int64_t max_N, int max_C, int max_OC);

// The norms of queries and keys, each over the HD columns of one vector, in place. A token's row of
// x is that of Attention.qkv, and its values stay. Queries share gamma and beta, and so do keys:
// [0] is that of queries, [1] that of keys. Forward keeps the vectors as they came in `before`.
// Backward: x holds the gradients of the normalized vectors, and gets those of the vectors before.
typedef struct HeadNorm {
    int64_t N;
    int groups, queries, HD;  // a group has so many queries, then a key and a value
    float epsilon;
    bool rms;                // as in LayerNorm
    floatX *x;               // (N, groups, queries + 2, HD) in and out
    floatX *before;          // (N, groups, queries + 1, HD) out of forward, into backward
    const floatX *gamma[2];  // (HD)
    const floatX *beta[2];   // (HD) forward, or NULL
    float *dgamma[2];        // (HD) backward accumulates
    float *dbeta[2];         // (HD) backward accumulates, or NULL
} HeadNorm;
void op_head_norm_forward(Stream *s, const HeadNorm *a);
void op_head_norm_backward(Stream *s, const HeadNorm *a);

// Rotary positions, in place. A token's row of x holds groups, each of `heads` vectors of HD, of
// which the first `turned` are turned: in Megatron-LM's order those are queries and key, before the
// value. Columns i and i + columns / 2, for i < columns / 2, are turned against each other by the
// angle of (position, i); columns from `columns` on stay. A position is a token's place in its
// sequence. back: by minus that angle, which takes gradients through.
//
// With by_kind the result goes to another tensor, whose rows have the first vectors of all groups
// first, then the second-last ones, then the last: all queries, keys, values. back: from there.
typedef struct Rope {
    int B, T, groups, heads, turned, HD;
    int columns;         // a multiple of 2, at most HD
    const float *table;  // (T, columns): cosines (columns / 2), then sines
    floatX *x;           // (B, T, groups, heads, HD) in and out; with by_kind in forward, out of back
    bool back;
    floatX *by_kind;  // (B, T, groups * heads, HD) out of forward, into back; or NULL
} Rope;
// The place of a token's vector v, of groups * heads, in by_kind.
HD_FN int rope_place(const Rope *a, int v) {
    int group = v / a->heads, head = v % a->heads, queries = a->heads - 2;
    return head < queries ? group * queries + head : head * a->groups + group;
}
void op_rope(Stream *s, const Rope *a);

// Causal self-attention, scale 1 / sqrt(HD), softmax in fp32, dropout on the probabilities. A row
// of qkv is Megatron's: per group of heads that share keys and values the heads' q(HD), then k(HD),
// v(HD). Without `groups` each head is a group. by_kind: all q first, then all k, then all v, which
// a GPU computes at once where heads share keys. With doc_start query t attends to keys
// doc_start[b, t] .. t only. Element inside a sample for dropout: (head * T + t) * T + key, where
// heads are counted in the whole model: a rank may hold heads first_head .. first_head + NH - 1.
//
// cuDNN's kernels on GPUs draw masks of their own, which no other layout repeats: see
// cuda/attention.h.
typedef struct Attention {
    int B, T, NH, HD;
    Dropout dropout;
    const floatX *qkv;         // (B, T, groups, NH / groups + 2, HD)
    const int32_t *doc_start;  // (B, T) or NULL
    floatX *out;               // (B, T, NH * HD) out of forward, into backward
    void *saved;               // op_attention_saved_bytes: out of forward, into backward
    const floatX *dout;        // (B, T, NH * HD) backward
    floatX *dqkv;              // as qkv; out of backward
    void *workspace;           // op_attention_workspace_bytes
    int first_head;            // number of the first head in the whole model
    int groups;                // of neighboring heads, a divisor of NH; 0: NH
    bool by_kind;              // qkv and dqkv are (B, T, NH + 2 * groups, HD)
} Attention;
HD_FN int attention_groups(const Attention *a) { return a->groups > 0 ? a->groups : a->NH; }
// Where a group's queries, key and value begin in a token's row of qkv.
typedef struct GroupColumns {
    int64_t q, k, v;
} GroupColumns;
HD_FN GroupColumns attention_columns(const Attention *a, int group) {
    int64_t HD = a->HD, groups = attention_groups(a), heads = a->NH / groups;
    int64_t q = group * (a->by_kind ? heads : heads + 2) * HD, k = q + heads * HD, v = k + HD;
    if (a->by_kind) k = (a->NH + group) * HD, v = k + groups * HD;
    GroupColumns columns = {q, k, v};
    return columns;
}
void op_attention_forward(Stream *s, const Attention *a);
void op_attention_backward(Stream *s, const Attention *a);
size_t op_attention_saved_bytes(int B, int T, int NH, int HD);
size_t op_attention_workspace_bytes(int B, int T, int NH, int HD, int groups);

// Attention of new positions of one sequence, which a cache of keys and values precedes (generation
// of text). Query t stands at position start + t and attends to keys 0 .. start + t. The sums are
// those of op_attention_forward in another order.
typedef struct CachedAttention {
    int T, start, room;     // new positions, those before them, those that the cache has room for
    int NH, HD, groups;     // as Attention
    const floatX *qkv;      // (T, groups, NH / groups + 2, HD)
    floatX *keys, *values;  // (groups, room, HD)
    floatX *out;            // (T, NH * HD) out of op_cached_attention
    void *workspace;        // op_cached_attention_workspace_bytes
} CachedAttention;
// Copies the new positions' keys and values into the cache, which must hold them before attention.
void op_cache_append(Stream *s, const CachedAttention *a);
void op_cached_attention(Stream *s, const CachedAttention *a);
size_t op_cached_attention_workspace_bytes(int T, int room, int NH, int HD);

// The language-model head. logits = x wte^T, rounded. Cross-entropy in fp32 over all columns;
// Megatron's padded rows take part. dlogits = weight * (softmax - onehot), rounded. dx = dlogits
// wte, dwte += (or =) dlogits^T x. The weight of row n is loss_mask[n] * loss_scale, or loss_scale
// without a mask. Rows go in chunks of op_head_chunk_rows, so the (N, V) logits never exist whole.
//
// A rank may hold some rows of the vocabulary only. Then a chunk takes two calls. op_head_logits
// leaves each row's statistics over this rank's columns in `own`. The ranks gather them in rank
// order into `all`. op_head_gradients joins them, so that every rank finds the same losses; its dx
// is this rank's part of a sum over the ranks. Chunks go in order from row 0 with one workspace,
// which belongs to the head until the last one.
typedef struct HeadStatistics {
    float max, sum;  // of a row's logits: the largest, and the sum of e^(logit - max)
    float target;    // the target's logit, 0 where another rank holds it
} HeadStatistics;
// The same without padding, for likelihoods: over the real ids among this rank's columns.
typedef struct HeadScore {
    float max, sum;
    float target;
    int32_t best;  // the id with the largest logit, the smallest of several; INT32_MAX without any
} HeadScore;
typedef struct Head {
    int64_t N;
    int C;
    int first_row, rows;     // of the vocabulary, in wte and dwte
    const floatX *x;         // (N, C) the final LayerNorm's output
    const floatX *wte;       // (rows, C)
    const int32_t *targets;  // (N)
    const float *loss_mask;  // (N) or NULL
    float loss_scale;
    float *losses;    // (N) out, unweighted
    float *loss_sum;  // (1) accumulates
    floatX *dx;       // (N, C) out, or NULL: no backward (evaluation)
    float *dwte;      // (rows, C) accumulates, with overwrite out, or NULL
    bool overwrite;
    void *workspace;            // op_head_workspace_bytes
    HeadStatistics *own;        // (a chunk's rows) out of op_head_logits
    const HeadStatistics *all;  // (ranks, a chunk's rows) into op_head_gradients
    int ranks;
    int columns;        // op_head_scores: the first so many of `rows` are real ids
    HeadScore *scores;  // (a chunk's rows) out of op_head_scores
} Head;
// All of it where this rank holds the whole vocabulary; `own` and `all` are not used.
void op_head(Stream *s, const Head *a);
// Rows row .. row + rows - 1, one chunk.
void op_head_logits(Stream *s, const Head *a, int64_t row, int64_t rows);
void op_head_gradients(Stream *s, const Head *a, int64_t row, int64_t rows);
// *loss_sum += the sum of losses[n] * weight of n, after the last chunk (op_head does it itself).
// The order is the same from run to run: row by row on CPU ranks, cuda/head.cu's own on GPUs.
void op_loss_sum(Stream *s, const Head *a);
// One chunk's rows without a loss: how likely are their targets? A row whose target is negative is
// not asked, and its score is all zeros. The ranks' scores are joined on the host.
void op_head_scores(Stream *s, const Head *a, int64_t row, int64_t rows);
int64_t op_head_chunk_rows(int64_t N, int rows);
size_t op_head_workspace_bytes(int64_t N, int C, int rows);

// Sums over the ranks of a group, which have gathered each other's parts: fp32, in rank order, the
// same bits on every backend. parts: (ranks, n), part r at parts + r * n. y overlaps no part. n of
// any size; a GPU is fast where n and C are multiples of 8 and addresses multiples of 16 bytes.

// y[i] = the sum over r of parts[r, i], plus bias[i % C], rounded once.
typedef struct SumParts {
    floatX *y;            // (n) out
    const floatX *parts;  // (ranks, n)
    int64_t n;
    int ranks;
    const floatX *bias;  // (C) or NULL
    int C;               // with bias
} SumParts;
void op_sum_parts(Stream *s, const SumParts *a);
// y[i] = the sum over r of parts[r, i]: partial gradients. y (n) is overwritten.
void op_add_parts(Stream *s, float *y, const float *parts, int64_t n, int ranks);

LLMC_END
