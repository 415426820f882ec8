// The backend interface, part 2: the fused ops of the model, called by llmc/model/.
//
// An op covers as much as a GPU kernel should fuse. The CPU backend composes it from naive parts
// and is the reference. All pointers are device memory. Ops are asynchronous on their stream,
// allocate nothing and never synchronize. floatX is bf16 (llmc/base/dtype.h). "Accumulates" means
// +=.
//
// Symbols: B micro-batch, T sequence length, C hidden size, NH heads, HD head size, F ffn size, V
// rows of the padded vocabulary, N rows: B * T.
//
// Rounding is the same on every backend: a floatX tensor is rounded once, when it is stored; sums
// are fp32. Gradients of weights, biases and norms accumulate in fp32. Gradients of large matrices
// can be overwritten instead, which saves clearing and reading them.
//
// The same struct describes forward and backward; fields that a direction does not use may be 0.
//
// With tensor or sequence parallelism a rank computes a part: some rows of the micro-batch (Rows),
// some heads, or some rows of the vocabulary. Its dropout masks are parts of the masks without
// parallelism. Fields that describe a part are 0 for the whole.
#pragma once
#include "llmc/base/base.h"
#include "llmc/base/dtype.h"
#include "llmc/device.h"
LLMC_BEGIN

// Checks that the ops support these sizes, with N rows per micro-batch; CPU ops support all. Error:
// EXIT_USAGE, naming the flag to change.
bool op_check_model(int C, int NH, int HD, int F, int V, int64_t N, Error *err);
// Writes one line on why attention is slower than possible with these settings, or "". documents:
// attention is limited to each document.
void op_attention_notice(int T, bool documents, char *text, size_t bytes);

// Device memory for ops without a workspace field, 0 bytes on CPUs. The caller allocates it within
// the memory plan and sets it before the first op. All ops that use it must run on one stream.
size_t op_scratch_bytes(int64_t N, int C);
void op_set_scratch(Device *device, void *memory, size_t bytes);

// Rows first .. first + count - 1 of the micro-batch's B * T, for a rank that holds only these. {0,
// 0}: all rows.
typedef struct Rows {
    int64_t first, count;
} Rows;
HD_FN int64_t rows_held(Rows rows, int B, int T) { return rows.count > 0 ? rows.count : (int64_t)B * T; }

// Inverted dropout with counter-based random numbers. An element's 16 bits depend only on (seed,
// site, global sample, element within the sample), so the mask does not change with layout, resume
// or recomputation. Philox key (seed, PURPOSE_DROPOUT + 256 * high), counter (low, site, sample low
// 32, sample high 32), where high and low are the words of element / 8; philox_half selects the
// bits. Elements whose bits are at least rint(p * 65536) are kept, multiplied by 1 / (1 - p).
typedef struct Dropout {
    float p;  // 0 = off
    uint32_t seed;
    uint32_t site;         // layer * 4 + DROPOUT_*
    int64_t first_sample;  // global index of row 0 of the micro-batch; row b is first_sample + b
} Dropout;
enum { DROPOUT_EMBEDDING = 0, DROPOUT_ATTENTION = 1, DROPOUT_PROJECTION = 2, DROPOUT_FFN = 3 };

// Returns the random bits of elements 8 * block .. 8 * block + 7 of a sample.
HD_FN Philox4 dropout_bits(Dropout dropout, int64_t sample, uint64_t block) {
    uint32_t high = (uint32_t)(block >> 32), sample_high = (uint32_t)((uint64_t)sample >> 32);
    return philox4x32_10(dropout.seed, PURPOSE_DROPOUT + (high << 8), (uint32_t)block, dropout.site,
                         (uint32_t)sample, sample_high);
}

// Initializes the part of a tensor at (first_row, first_column), rows by columns elements, with the
// same values that it has in the whole tensor. A vector is one column.
//
// std > 0: normal(0, std) from stream (seed, tensor) of llmc/base/normal.h, numbers 2i and 2i + 1
// as a pair, indexed by r * whole_columns + c; rounded to fp32, then to floatX. Bitwise identical
// on every backend. std 0: zeros. std < 0: ones.
typedef struct InitWeights {
    floatX *weights;  // (rows, columns) out
    int64_t rows, columns;
    int64_t first_row, first_column;
    int64_t whole_columns;  // columns of the whole tensor
    double std;
    uint64_t seed;
    uint32_t tensor;
    int threads;  // host threads, for backends that draw on the host
} InitWeights;
void op_init_weights(Stream *s, const InitWeights *a);

// Token and position embedding: x = dropout(wte[token] + wpe[position]). Dropout element: t * C +
// c. With a vocabulary-parallel wte, forward takes two calls: the first with `part`, where tokens
// of other ranks count as zeros and wpe and dropout are left out; then, after the all-reduce of x,
// one with wte NULL, which needs no tokens and may cover some rows only. wpe NULL: no learned
// positions.
//
// Backward reads the gradients of all B * T rows. Tables with NULL gradients are skipped. Only dwte
// needs tokens, only dwpe positions.
typedef struct Embedding {
    int B, T, C;
    int first_row, rows;       // vocabulary rows held in wte and dwte
    const int32_t *tokens;     // (B, T)
    const int32_t *positions;  // (B, T)
    Dropout dropout;
    const floatX *wte;  // (rows, C) or NULL
    const floatX *wpe;  // (max positions, C) or NULL
    floatX *x;          // (B, T, C) out of forward; with wte NULL in and out, (x_rows.count, C)
    const floatX *dx;   // (B, T, C) backward
    float *dwte;        // (rows, C) backward accumulates, or NULL
    float *dwpe;        // (max positions, C) backward accumulates, or NULL
    Rows x_rows;        // rows of x in a forward pass with wte NULL
    bool part;          // forward computes this rank's part of the word embeddings only
} Embedding;
void op_embedding_forward(Stream *s, const Embedding *a);
void op_embedding_backward(Stream *s, const Embedding *a);

// LayerNorm: y = (x - mean) * rstd * gamma + beta per row, statistics in fp32. rms: RMSNorm, that
// is mean 0, rstd from the mean square, no beta. With `branch` forward first computes x = residual
// + dropout(branch), rounded. Dropout element: t * C + c.
//
// Backward: dresidual += gradient of x, rounded once. dbranch = gradient of the branch: the new
// dresidual with dropout's mask; without dropout it equals dresidual and may be NULL. branch_sum:
// pass it to op_bias_gradient of the branch's last linear.
//
// With `rows` set all tensors have only these rows: (rows.count, C) instead of (B, T, C),
// (rows.count) instead of (B, T). dgamma, dbeta and branch_sum are then partial sums of this rank.
//
// gamma NULL: no norm follows, as at the end of a pipeline stage. Forward computes only x. Backward
// takes dresidual as the full gradient of x and computes dbranch and branch_sum.
typedef struct LayerNorm {
    int B, T, C;
    float epsilon;
    Dropout dropout;         // dropout of the branch
    floatX *x;               // (B, T, C) in; with branch out of forward
    const floatX *residual;  // (B, T, C) forward, with branch; may be x
    const floatX *branch;    // (B, T, C) forward, or NULL; includes its linear's bias
    const floatX *gamma;     // (C), or NULL
    const floatX *beta;      // (C) forward, or NULL
    floatX *y;               // (B, T, C) out of forward
    float *mean, *rstd;      // (B, T) out of forward, read by backward
    const floatX *dy;        // (B, T, C) backward
    floatX *dresidual;       // (B, T, C) backward, in and out
    floatX *dbranch;         // (B, T, C) out of backward, or NULL
    float *dgamma, *dbeta;   // (C) backward accumulates; dbeta or NULL
    float *branch_sum;       // (C) out of backward on GPUs: sum of the branch's gradient over the rows
    Rows rows;
    bool rms;
} LayerNorm;
void op_layernorm_forward(Stream *s, const LayerNorm *a);
void op_layernorm_backward(Stream *s, const LayerNorm *a);

// y = x w^T + bias. With pre: pre = x w^T + bias, rounded, and y = GELU_tanh(pre).
//
// Backward: dw += dy^T x (= with overwrite), dx = dy w; NULL results are skipped. If x is the GELU
// of x_pre, dx is multiplied by GELU'(x_pre) and so becomes the gradient of x_pre; dpre_bias gets
// its sum over the rows. A backend may also round dx before that multiplication.
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
    int threads;      // host threads for one row on CPUs; 0 or 1: only the calling one
} Linear;
void op_linear_forward(Stream *s, const Linear *a);
void op_linear_backward(Stream *s, const Linear *a);
// Bias gradient of a linear: dbias (OC) += sum of dy (N, OC) over the rows. sum: branch_sum of the
// op_layernorm_backward that computed dy, or NULL. GPUs add it instead of reading dy again.
void op_bias_gradient(Stream *s, float *dbias, const floatX *dy, const float *sum, int64_t N, int OC,
                      void *workspace);
// y = GELU_tanh(pre), n values: the second half of op_linear_forward with pre, for tests.
void op_gelu_forward(Stream *s, floatX *y, const floatX *pre, int64_t n);
// SwiGLU: y = silu(gate) * up, silu(g) = g / (1 + e^-g). A row of pre is gate (F), then up (F).
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
// Workspace bytes of the linear ops for sizes up to these.
size_t op_linear_workspace_bytes(int64_t max_N, int max_C, int max_OC);

// Norms of queries and keys, each over the HD columns of one vector, in place. x is laid out like
// Attention.qkv; values are not changed. gamma[0], beta[0] apply to all queries, [1] to all keys.
// Forward saves the input vectors in `before`. On backward x contains the gradients of the
// normalized vectors on entry and of the input vectors on return.
typedef struct HeadNorm {
    int64_t N;
    int groups, queries, HD;  // per group: queries, then one key and one value
    float epsilon;
    bool rms;                // as in LayerNorm
    floatX *x;               // (N, groups, queries + 2, HD) in and out
    floatX *before;          // (N, groups, queries + 1, HD) out of forward, read by backward
    const floatX *gamma[2];  // (HD)
    const floatX *beta[2];   // (HD) forward, or NULL
    float *dgamma[2];        // (HD) backward accumulates
    float *dbeta[2];         // (HD) backward accumulates, or NULL
} HeadNorm;
void op_head_norm_forward(Stream *s, const HeadNorm *a);
void op_head_norm_backward(Stream *s, const HeadNorm *a);

// Rotary position embedding, in place. A token's row of x consists of groups of `heads` vectors;
// the first `turned` of each are rotated: in Megatron-LM's order queries and key, before the value.
// For i < columns / 2, columns i and i + columns / 2 are rotated by the angle of (position, i); the
// remaining columns do not change. Position: index in the sequence. back: rotates by the negative
// angle, for gradients.
//
// With by_kind the result goes to another tensor, with a row of all queries, then all keys, then
// all values. back: reads that tensor.
typedef struct Rope {
    int B, T, groups, heads, turned, HD;
    int columns;         // even, at most HD
    const float *table;  // (T, columns): cosines (columns / 2), then sines
    floatX *x;           // (B, T, groups, heads, HD) in and out; with by_kind in forward, out of back
    bool back;
    floatX *by_kind;  // (B, T, groups * heads, HD) out of forward, read by back; or NULL
} Rope;
// Returns the position in by_kind of a token's vector v of groups * heads.
HD_FN int rope_place(const Rope *a, int v) {
    int group = v / a->heads, head = v % a->heads, queries = a->heads - 2;
    return head < queries ? group * queries + head : head * a->groups + group;
}
void op_rope(Stream *s, const Rope *a);

// Causal self-attention, scale 1 / sqrt(HD), softmax in fp32, dropout on the probabilities. qkv has
// Megatron-LM's layout: per group of heads that share key and value, the heads' q (HD), then k
// (HD), v (HD). by_kind: all q, then all k, then all v; GPUs need it for shared keys. With
// doc_start query t attends to keys doc_start[b, t] .. t. Dropout element: (head * T + t) * T +
// key, with the head's index in the whole model; the rank holds heads first_head .. first_head + NH
// - 1.
//
// cuDNN's kernels draw their own masks, which depend on the layout: see cuda/attention.h.
typedef struct Attention {
    int B, T, NH, HD;
    Dropout dropout;
    const floatX *qkv;         // (B, T, groups, NH / groups + 2, HD)
    const int32_t *doc_start;  // (B, T) or NULL
    floatX *out;               // (B, T, NH * HD) out of forward, read by backward
    void *saved;               // op_attention_saved_bytes: out of forward, read by backward
    const floatX *dout;        // (B, T, NH * HD) backward
    floatX *dqkv;              // as qkv; out of backward
    void *workspace;           // op_attention_workspace_bytes
    int first_head;            // index of the first head in the whole model
    int groups;                // a divisor of NH; 0: NH groups
    bool by_kind;              // qkv and dqkv are (B, T, NH + 2 * groups, HD)
} Attention;
HD_FN int attention_groups(const Attention *a) { return a->groups > 0 ? a->groups : a->NH; }
// Columns of a group's queries, key and value within a token's row of qkv.
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

// Attention of new positions of one sequence with a KV cache, for text generation. Query t has
// position start + t and attends to keys 0 .. start + t. Sums are in a different order than in
// op_attention_forward.
typedef struct CachedAttention {
    int T, start, room;     // new positions, earlier ones, capacity of the cache
    int NH, HD, groups;     // as Attention
    const floatX *qkv;      // (T, groups, NH / groups + 2, HD)
    floatX *keys, *values;  // (groups, room, HD)
    floatX *out;            // (T, NH * HD) out of op_cached_attention
    void *workspace;        // op_cached_attention_workspace_bytes
} CachedAttention;
// Copies keys and values of the new positions into the cache; call it before op_cached_attention.
void op_cache_append(Stream *s, const CachedAttention *a);
void op_cached_attention(Stream *s, const CachedAttention *a);
size_t op_cached_attention_workspace_bytes(int T, int room, int NH, int HD);

// LM head: logits = x wte^T, rounded; cross-entropy in fp32 over all columns, Megatron-LM's padded
// rows included; dlogits = weight * (softmax - onehot), rounded; dx = dlogits wte; dwte += (or =)
// dlogits^T x. The weight of row n is loss_mask[n] * loss_scale, or loss_scale without a mask. Rows
// are processed in chunks of op_head_chunk_rows, so the (N, V) logits never exist as a whole.
//
// With a vocabulary-parallel wte a chunk takes two calls. op_head_logits writes the statistics of
// each row over this rank's columns to `own`; ranks gather them in rank order into `all`;
// op_head_gradients combines them, so all ranks get the same losses, and dx is this rank's part of
// a sum over the ranks. Chunks must be processed in order from row 0 with the same workspace.
typedef struct HeadStatistics {
    float max, sum;  // largest of a row's logits, sum of e^(logit - max)
    float target;    // logit of the target, 0 if another rank holds it
} HeadStatistics;
// The same for likelihoods, over real ids only (without vocabulary padding).
typedef struct HeadScore {
    float max, sum;
    float target;
    int32_t best;  // smallest id with the largest logit; INT32_MAX if this rank has no real ids
} HeadScore;
typedef struct Head {
    int64_t N;
    int C;
    int first_row, rows;     // vocabulary rows held in wte and dwte
    const floatX *x;         // (N, C) the final LayerNorm's output
    const floatX *wte;       // (rows, C)
    const int32_t *targets;  // (N)
    const float *loss_mask;  // (N) or NULL
    float loss_scale;
    float *losses;    // (N) out, unweighted
    float *loss_sum;  // (1) accumulates
    floatX *dx;       // (N, C) out, or NULL: no backward (evaluation)
    float *dwte;      // (rows, C) accumulates, or out with overwrite; or NULL
    bool overwrite;
    void *workspace;            // op_head_workspace_bytes
    HeadStatistics *own;        // (a chunk's rows) out of op_head_logits
    const HeadStatistics *all;  // (ranks, a chunk's rows) into op_head_gradients
    int ranks;
    int columns;         // op_head_scores: number of real ids among `rows`
    HeadScore *scores;   // (a chunk's rows) out of op_head_scores
    float report_scale;  // replaces loss_scale in loss_sum; 0: loss_scale
} Head;
// Runs everything, for ranks that hold the whole vocabulary. Does not use `own` and `all`.
void op_head(Stream *s, const Head *a);
// Process one chunk: rows row .. row + rows - 1.
void op_head_logits(Stream *s, const Head *a, int64_t row, int64_t rows);
void op_head_gradients(Stream *s, const Head *a, int64_t row, int64_t rows);
// *loss_sum += sum of losses[n] * weight of n, with report_scale instead of loss_scale if set. Call
// it after the last chunk (op_head includes it). The order is fixed: row by row on CPUs, see
// cuda/head.cu for GPUs.
void op_loss_sum(Stream *s, const Head *a);
// Scores the targets of one chunk without a loss. Rows with a negative target get zeros. The host
// combines the ranks' scores.
void op_head_scores(Stream *s, const Head *a, int64_t row, int64_t rows);
int64_t op_head_chunk_rows(int64_t N, int rows);
size_t op_head_workspace_bytes(int64_t N, int C, int rows);

// Sums over the ranks of a group from gathered parts (ranks, n), in fp32 and rank order, bitwise
// identical on every backend. y must not overlap parts. Any n is allowed; GPUs are fast if n and C
// are multiples of 8 and addresses are 16-byte aligned.

// y[i] = sum over r of parts[r, i], plus bias[i % C], rounded once.
typedef struct SumParts {
    floatX *y;            // (n) out
    const floatX *parts;  // (ranks, n)
    int64_t n;
    int ranks;
    const floatX *bias;  // (C) or NULL
    int C;               // with bias
} SumParts;
void op_sum_parts(Stream *s, const SumParts *a);
// y[i] = sum over r of parts[r, i], of partial gradients. y (n) is overwritten.
void op_add_parts(Stream *s, float *y, const float *parts, int64_t n, int ranks);

LLMC_END
