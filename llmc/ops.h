// The backend interface, part 2: the fused ops of the model, called by llmc/model/.
//
// Each op covers as much work as one GPU kernel should fuse. The CPU implementation is the
// reference. All pointers are device memory. Ops run asynchronously on their stream, allocate
// nothing and never synchronize. floatX is bf16 (llmc/base/dtype.h). In the comments below,
// "accumulates" means +=.
//
// Symbols: B micro-batch size, T sequence length, C hidden size, NH attention heads, HD head size,
// F FFN size, V padded vocabulary size, N = B * T rows.
//
// Every backend rounds a floatX tensor only once, when it is stored, and sums in fp32. Gradients of
// weights, biases and norms accumulate in fp32. Gradients of large matrices can be overwritten
// instead, which saves clearing and reading them.
//
// Forward and backward share one struct; fields that a direction does not use may be 0.
//
// With tensor or sequence parallelism a rank computes a part: some rows of the micro-batch (Rows),
// some heads, or some rows of the vocabulary. It applies the same dropout mask to these elements as
// a single rank would. Fields that describe a part are 0 if the rank computes everything.
#pragma once
#include "llmc/base/base.h"
#include "llmc/base/dtype.h"
#include "llmc/device.h"
LLMC_BEGIN

// Returns true if the ops support these sizes, with N rows per micro-batch. CPU ops support all
// sizes. Error: EXIT_USAGE, naming the flag to change.
bool op_check_model(int C, int NH, int HD, int F, int V, int64_t N, Error *err);
// Writes one line that explains why these settings make attention use slower kernels, or "" if they
// don't. documents: tokens attend only to their own document. unpacked: the flag because of which
// sequences are not packed (op_attention_pack), or NULL.
void op_attention_notice(int T, bool documents, const char *unpacked, char *text, size_t bytes);

// Size of the device memory for ops without a workspace field; 0 on CPUs. The caller reserves it in
// the memory plan and passes it to op_set_scratch before the first op. All ops that use it must run
// on one stream.
size_t op_scratch_bytes(int64_t N, int C);
void op_set_scratch(Device *device, void *memory, size_t bytes);

// The rows that a rank holds: first .. first + count - 1 of the micro-batch's B * T. {0, 0} means
// all rows.
typedef struct Rows {
    int64_t first, count;
} Rows;
HD_FN int64_t rows_held(Rows rows, int B, int T) { return rows.count > 0 ? rows.count : (int64_t)B * T; }

// Inverted dropout with counter-based random numbers. Each element gets 16 random bits that depend
// only on (seed, site, global sample, element within the sample), so the mask does not depend on
// the parallel layout, on resuming or on recomputation. An element is dropped if its bits are below
// rint(p * 65536); otherwise it is multiplied by 1 / (1 - p).
//
// dropout_bits computes the bits of 8 elements at once, and philox_half selects one element's bits.
typedef struct Dropout {
    float p;  // probability of dropping an element; 0: no dropout
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

// Initializes this rank's part of a tensor: rows x columns elements starting at (first_row,
// first_column). Every element gets the same value for any split and on every backend. A vector
// counts as one column.
//
// std > 0: normal(0, std), drawn from stream (seed, tensor) of llmc/base/normal.h. Element (r, c)
// of the whole tensor gets number r * whole_columns + c of the stream, rounded to fp32, then to
// floatX. std 0: zeros. std < 0: ones. bound > 0: uniform in [-bound, bound) instead, from the same
// stream.
typedef struct InitWeights {
    floatX *weights;  // (rows, columns) out
    int64_t rows, columns;
    int64_t first_row, first_column;
    int64_t whole_columns;  // columns of the whole tensor
    double std;
    uint64_t seed;
    uint32_t tensor;
    int threads;   // host threads, for backends that draw on the host
    double bound;  // 0: not uniform
} InitWeights;
void op_init_weights(Stream *s, const InitWeights *a);

// Formats of frozen matrices (QLoRA, arXiv 2305.14314). Groups of FROZEN_GROUP consecutive elements
// share a scale, their largest absolute value, divided by 127 for int8.
typedef enum FrozenFormat { FROZEN_BF16, FROZEN_INT8, FROZEN_NF4 } FrozenFormat;
enum { FROZEN_GROUP = 64, NF4_LEVELS = 16 };
// Bytes of n codes. NF4 has two per byte, the even element in the high bits.
static inline int64_t frozen_code_bytes(FrozenFormat format, int64_t n) {
    return format == FROZEN_INT8 ? n : format == FROZEN_NF4 ? ceil_div64(n, 2) : 0;
}
static inline int64_t frozen_scales(FrozenFormat format, int64_t n) {
    return format == FROZEN_BF16 ? 0 : ceil_div64(n, FROZEN_GROUP);
}
// The levels of NF4: quantiles of the normal distribution, divided by the largest.
HD_FN float nf4_level(int code) {
    const float levels[NF4_LEVELS] = {-1.0f,         -0.696192801f, -0.525073051f, -0.394917488f,
                                      -0.284441382f, -0.184773430f, -0.091050036f, 0.0f,
                                      0.079580300f,  0.160930201f,  0.246112302f,  0.337915242f,
                                      0.440709829f,  0.562617004f,  0.722956836f,  1.0f};
    return levels[code];
}
// Returns element i before the multiplication by its scale.
HD_FN float frozen_value(FrozenFormat format, const uint8_t *codes, int64_t i) {
    if (format == FROZEN_INT8) return (float)(int8_t)codes[i];
    return nf4_level(i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4);
}
// w = codes times scales, rounded once.
typedef struct Dequantize {
    int64_t n;
    FrozenFormat format;   // not FROZEN_BF16
    const uint8_t *codes;  // (frozen_code_bytes)
    const floatX *scales;  // (frozen_scales)
    floatX *w;             // (n) out
} Dequantize;
void op_dequantize(Stream *s, const Dequantize *a);

// Token and position embedding: x = dropout(wte[token] + wpe[position]). Dropout element: t * C +
// c. wpe NULL: no learned positions.
//
// With a vocabulary-parallel wte, forward takes two calls:
//   1. with `part` set: x = wte[token], or 0 for tokens that another rank holds;
//   2. after the all-reduce of x, with wte NULL: adds wpe and applies dropout. This call needs no
//      tokens and may cover only some rows (x_rows).
//
// Backward reads dx of all B * T rows and skips a table whose gradient is NULL. It needs tokens
// only for dwte, and positions only for dwpe.
typedef struct Embedding {
    int B, T, C;
    int first_row, rows;       // vocabulary rows held in wte and dwte
    const int32_t *tokens;     // (B, T)
    const int32_t *positions;  // (B, T)
    Dropout dropout;
    const floatX *wte;  // (rows, C) or NULL
    const floatX *wpe;  // (max positions, C) or NULL
    floatX *x;          // (B, T, C) out of forward; if wte is NULL: (x_rows.count, C) in and out
    const floatX *dx;   // (B, T, C) backward
    float *dwte;        // (rows, C) backward accumulates, or NULL
    float *dwpe;        // (max positions, C) backward accumulates, or NULL
    Rows x_rows;        // rows of x, if wte is NULL
    bool part;          // forward looks up only this rank's word embeddings
} Embedding;
void op_embedding_forward(Stream *s, const Embedding *a);
void op_embedding_backward(Stream *s, const Embedding *a);

// LayerNorm with a fused residual addition: y = (x - mean) * rstd * gamma + beta per row, with
// statistics in fp32. If `branch` is set, forward first computes x = residual + dropout(branch) and
// rounds it. Dropout element: t * C + c. If `rms` is set, it computes RMSNorm instead: mean is 0,
// rstd is computed from the mean square, and there is no beta.
//
// Backward adds the gradient of x to dresidual, rounding once. dbranch is the gradient of the
// branch: the updated dresidual times the dropout mask. Without dropout both are equal, and dbranch
// may be NULL. Pass branch_sum to op_bias_gradient for the branch's last linear layer.
//
// If `rows` is set, all tensors have only these rows: (rows.count, C) instead of (B, T, C), and
// (rows.count) instead of (B, T). dgamma, dbeta and branch_sum are then partial sums of this rank.
//
// absmax: forward accumulates the absolute maximum of y, backward of dbranch, or of dresidual if
// dbranch is NULL (fp8.h: bits of an fp32 number; the values as rounded). NULL: not needed.
//
// gamma NULL: only the residual addition, for the end of a pipeline stage. Forward computes only x.
// Backward takes dresidual as the complete gradient of x and computes dbranch and branch_sum.
typedef struct LayerNorm {
    int B, T, C;
    float epsilon;
    Dropout dropout;         // dropout of the branch
    floatX *x;               // (B, T, C) in; if branch is set: out of forward
    const floatX *residual;  // (B, T, C) forward, if branch is set; may be x
    const floatX *branch;    // (B, T, C) forward, or NULL; includes the bias of its last linear layer
    const floatX *gamma;     // (C), or NULL
    const floatX *beta;      // (C) forward, or NULL
    floatX *y;               // (B, T, C) out of forward
    float *mean, *rstd;      // (B, T) out of forward, read by backward
    const floatX *dy;        // (B, T, C) backward
    floatX *dresidual;       // (B, T, C) backward, in and out
    floatX *dbranch;         // (B, T, C) out of backward, or NULL
    float *dgamma, *dbeta;   // (C) backward accumulates, or NULL
    float *branch_sum;       // (C) out of backward on GPUs: dbranch summed over the rows
    Rows rows;
    bool rms;
    uint32_t *absmax;  // (1) in and out, or NULL
} LayerNorm;
void op_layernorm_forward(Stream *s, const LayerNorm *a);
void op_layernorm_backward(Stream *s, const LayerNorm *a);

// Forward: y = x w^T + add + bias. If `pre` is set: pre = x w^T + add + bias, rounded, and y =
// GELU_tanh(pre).
//
// Backward: dx = dy w + dx_add and dw += dy^T x (dw = with overwrite); NULL results are skipped.
// scale: factor of the three products; 0 means 1. x_pre: set if x is the GELU of x_pre. Then dx is
// multiplied by GELU'(x_pre), which makes it the gradient of x_pre, and its sum over the rows is
// added to dpre_bias. A backend may round dx before that multiplication.
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
    float *dw;            // (OC, C) backward accumulates (or overwrites), or NULL
    float *dpre_bias;     // (C) backward accumulates, or NULL; only if x_pre is set
    bool overwrite;
    const floatX *add;     // (N, OC) forward, or NULL; not y or pre
    const floatX *dx_add;  // (N, C) backward, or NULL; not dx
    float scale;
    void *workspace;         // op_linear_workspace_bytes
    int threads;             // CPU backend, N = 1: host threads to use; 0 or 1: the calling thread only
    bool beside_collective;  // GPU, GEMM for dw: leave SMs to a concurrent collective
} Linear;
void op_linear_forward(Stream *s, const Linear *a);
void op_linear_backward(Stream *s, const Linear *a);
// Bias gradient of a linear: dbias (OC) += sum of dy (N, OC) over the rows. sum: branch_sum of the
// op_layernorm_backward call that computed dy, or NULL. GPUs add `sum` instead of reading dy again.
// absmax: accumulates the absolute maximum of dy, or NULL; only without `sum`.
void op_bias_gradient(Stream *s, float *dbias, const floatX *dy, const float *sum, int64_t N, int OC,
                      void *workspace, uint32_t *absmax);
// y = GELU_tanh(pre) for n values, as op_linear_forward computes it. For tests.
void op_gelu_forward(Stream *s, floatX *y, const floatX *pre, int64_t n);
// dx (N, C) *= GELU_tanh'(pre), rounded. If dbias is not NULL, dbias (C) += its sum over the rows.
// absmax: accumulates the absolute maximum of the new dx, or NULL.
void op_gelu_backward(Stream *s, floatX *dx, const floatX *pre, float *dbias, int64_t N, int C,
                      void *workspace, uint32_t *absmax);
// SwiGLU: y = silu(gate) * up with silu(g) = g / (1 + e^-g). Each row of pre is gate (F), then up
// (F).
typedef struct Swiglu {
    int64_t N;
    int F;
    const floatX *pre;  // (N, 2 * F)
    floatX *y;          // (N, F) out of forward
    const floatX *dy;   // (N, F) backward
    floatX *dpre;       // (N, 2 * F) out of backward
    uint32_t *absmax;   // (1) backward accumulates the absolute maximum of dpre, or NULL
} Swiglu;
void op_swiglu_forward(Stream *s, const Swiglu *a);
void op_swiglu_backward(Stream *s, const Swiglu *a);
// Returns the workspace size of the linear ops for all sizes up to these.
size_t op_linear_workspace_bytes(int64_t max_N, int max_C, int max_OC);

// Normalizes queries and keys in place, each vector over its HD columns. x is laid out like
// Attention.qkv; its value vectors do not change. gamma[0] and beta[0] apply to all queries,
// gamma[1] and beta[1] to all keys. Forward saves the vectors in `before` first. Backward replaces
// the gradients of the normalized vectors in x by the gradients of the original vectors.
typedef struct HeadNorm {
    int64_t N;
    int groups, queries, HD;  // a group has `queries` query vectors, then one key and one value
    float epsilon;
    bool rms;                // as in LayerNorm
    floatX *x;               // (N, groups, queries + 2, HD) in and out
    floatX *before;          // (N, groups, queries + 1, HD) out of forward, read by backward
    const floatX *gamma[2];  // (HD)
    const floatX *beta[2];   // (HD) forward, or NULL
    float *dgamma[2];        // (HD) backward accumulates, or NULL
    float *dbeta[2];         // (HD) backward accumulates, or NULL
} HeadNorm;
void op_head_norm_forward(Stream *s, const HeadNorm *a);
void op_head_norm_backward(Stream *s, const HeadNorm *a);

// Rotary position embedding, in place. A token's row of x consists of `groups` groups of `heads`
// vectors: queries, then key, then value, as in Megatron-LM. The first `turned` vectors of each
// group (queries and key) are rotated. For i < columns / 2, columns i and i + columns / 2 are
// rotated by the angle in row t, column i of the table, where t is the index in the sequence. The
// remaining columns do not change. back: rotates gradients by the negative angle.
//
// If by_kind is set, forward writes to that tensor instead of x. Its rows hold all queries, then
// all keys, then all values. Backward reads gradients from by_kind and writes them to x.
typedef struct Rope {
    int B, T, groups, heads, turned, HD;
    int columns;         // even, at most HD
    const float *table;  // (T, columns): cosines (columns / 2), then sines
    floatX *x;           // (B, T, groups, heads, HD) in and out
    bool back;
    floatX *by_kind;  // (B, T, groups * heads, HD), or NULL
    // (1) accumulates the absolute maximum of the whole output, or NULL. Without by_kind, the
    // columns that do not change are then read too.
    uint32_t *absmax;
} Rope;
// Maps vector v (0 .. groups * heads - 1) of a row of x to its position in the row of by_kind.
HD_FN int rope_place(const Rope *a, int v) {
    int group = v / a->heads, head = v % a->heads, queries = a->heads - 2;
    return head < queries ? group * queries + head : head * a->groups + group;
}
void op_rope(Stream *s, const Rope *a);

// Causal self-attention with scale 1 / sqrt(HD), softmax in fp32 and dropout on the probabilities.
// Dropout element: (head * T + t) * T + key, where head is the index in the whole model. cuDNN's
// kernels draw their own masks instead, which depend on the parallel layout: see cuda/attention.h.
//
// qkv has Megatron-LM's layout: a group of heads that share key and value has the q (HD) of each
// head, then k (HD), then v (HD). by_kind: all q, then all k, then all v, which makes grouped-query
// attention faster on GPUs. If doc_start is set, query t attends to keys doc_start[b, t] .. t. With
// a window, it attends only to the last `window` of them, its own included.
typedef struct Attention {
    int B, T, NH, HD;
    Dropout dropout;
    const floatX *qkv;         // (B, T, groups, NH / groups + 2, HD)
    const int32_t *doc_start;  // (B, T) or NULL
    floatX *out;               // (B, T, NH * HD) out of forward, read by backward
    void *saved;               // op_attention_saved_bytes: out of forward, read by backward
    const floatX *dout;        // (B, T, NH * HD) backward
    floatX *dqkv;              // laid out like qkv; out of backward
    void *workspace;           // op_attention_workspace_bytes
    int first_head;            // index of the first head in the whole model
    int groups;                // number of query groups, a divisor of NH; 0: NH groups
    bool by_kind;              // qkv and dqkv are (B, T, NH + 2 * groups, HD)
    int window;                // 0: none
    int sequences;             // op_attention_pack's result, 0: not packed
    const void *packed;        // device memory that op_attention_pack filled in
} Attention;
// First key that query t sees in a document that starts at `start`.
HD_FN int attention_first_key(int window, int start, int t) {
    int first = window > 0 ? t - window + 1 : 0;
    return first > start ? first : start;
}
HD_FN int attention_groups(const Attention *a) { return a->groups > 0 ? a->groups : a->NH; }
// First columns of a group's queries, key and value within a token's row of qkv.
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
// packed: for calls with sequences, too.
size_t op_attention_workspace_bytes(int B, int T, int NH, int HD, int groups, bool packed);

// Describes the documents of a micro-batch to kernels that process packed sequences of any length.
// doc_start: (B, T) host memory, or NULL: each sample is a sequence. packed: device memory of
// op_attention_pack_bytes, which are 0 if these kernels are not used. a: sizes and layout alone.
// Returns Attention.sequences for all layers.
int op_attention_pack(Stream *s, const Attention *a, const int32_t *doc_start, void *packed);
size_t op_attention_pack_bytes(int B, int T, bool documents);

// Attention of T new positions of one sequence over a KV cache, for text generation. Query t has
// position start + t and attends to keys 0 .. start + t. Results differ from op_attention_forward
// in rounding, because the summation order differs.
typedef struct CachedAttention {
    int T, start, room;     // new positions, cached positions before them, capacity of the cache
    int NH, HD, groups;     // as in Attention
    int window;             // as in Attention
    const floatX *qkv;      // (T, groups, NH / groups + 2, HD)
    floatX *keys, *values;  // (groups, room, HD)
    floatX *out;            // (T, NH * HD) output
    void *workspace;        // op_cached_attention_workspace_bytes
} CachedAttention;
// Copies the keys and values of the new positions into the cache. Call before op_cached_attention.
void op_cache_append(Stream *s, const CachedAttention *a);
void op_cached_attention(Stream *s, const CachedAttention *a);
size_t op_cached_attention_workspace_bytes(int T, int room, int NH, int HD);

// LM head and loss:
//   logits  = x wte^T, rounded
//   loss    = cross-entropy in fp32 over all columns, including Megatron-LM's vocabulary padding
//   dlogits = weight * (softmax - onehot), rounded
//   dx      = dlogits wte
//   dwte   += dlogits^T x (or =)
// The weight of row n is loss_mask[n] * loss_scale, or loss_scale without a mask. Rows are
// processed in chunks of op_head_chunk_rows, so the complete (N, V) logits are never in memory.
//
// With a vocabulary-parallel wte, each chunk takes three steps: op_head_logits writes the
// statistics of each row over this rank's columns to `own`; the caller gathers them in rank order
// into `all`; op_head_gradients combines them. All ranks then have the same losses, and each rank's
// dx is a partial sum, which the caller reduces. Process the chunks in order from row 0, all with
// the same workspace.
typedef struct HeadStatistics {
    float max, sum;  // largest logit of a row, sum of e^(logit - max)
    float target;    // logit of the target; 0 if another rank holds it
} HeadStatistics;
// The same statistics for --eval-tasks, without vocabulary padding.
typedef struct HeadScore {
    float max, sum;
    float target;
    int32_t best;  // smallest id with the largest logit; INT32_MAX if this rank has no real ids
} HeadScore;
typedef struct Head {
    int64_t N;
    int C;
    int first_row, rows;     // vocabulary rows held in wte and dwte
    const floatX *x;         // (N, C) output of the final norm
    const floatX *wte;       // (rows, C)
    const int32_t *targets;  // (N)
    const float *loss_mask;  // (N) or NULL
    float loss_scale;
    float *losses;    // (N) out, unweighted
    float *loss_sum;  // (1) accumulates
    floatX *dx;       // (N, C) out; NULL for evaluation, which skips the backward pass
    float *dwte;      // (rows, C) accumulates (or overwrites), or NULL
    bool overwrite;
    void *workspace;            // op_head_workspace_bytes
    HeadStatistics *own;        // (rows of a chunk) out of op_head_logits
    const HeadStatistics *all;  // (ranks, rows of a chunk) input of op_head_gradients
    int ranks;
    int columns;         // op_head_scores: number of real ids among `rows`
    HeadScore *scores;   // (rows of a chunk) out of op_head_scores
    float report_scale;  // replaces loss_scale in loss_sum; 0: use loss_scale
} Head;
// Processes all chunks, for ranks that hold the whole vocabulary. Ignores `own` and `all`.
void op_head(Stream *s, const Head *a);
// Process one chunk, rows row .. row + rows - 1.
void op_head_logits(Stream *s, const Head *a, int64_t row, int64_t rows);
void op_head_gradients(Stream *s, const Head *a, int64_t row, int64_t rows);
// Adds the weighted losses of all rows to *loss_sum, in a fixed order. Call after the last chunk;
// op_head calls it itself.
void op_loss_sum(Stream *s, const Head *a);
// Computes `scores` of one chunk over this rank's columns, without loss and gradients. Rows with a
// negative target get zeros. The host combines the scores of the ranks.
void op_head_scores(Stream *s, const Head *a, int64_t row, int64_t rows);
int64_t op_head_chunk_rows(int64_t N, int rows);
size_t op_head_workspace_bytes(int64_t N, int C, int rows);

// The next two ops sum gathered parts (ranks, n) over the ranks, in fp32 and in rank order, bitwise
// identical on every backend. y must not overlap parts. Any n is allowed; GPUs are fast if n and C
// are multiples of 8 and addresses are 16-byte aligned.

// y[i] = sum over r of parts[r, i], plus bias[i % C] if bias is set, rounded once.
typedef struct SumParts {
    floatX *y;            // (n) out
    const floatX *parts;  // (ranks, n)
    int64_t n;
    int ranks;
    const floatX *bias;  // (C) or NULL
    int C;               // length of bias
} SumParts;
void op_sum_parts(Stream *s, const SumParts *a);
// y[i] = sum over r of parts[r, i], for partial gradients. Overwrites y (n).
void op_add_parts(Stream *s, float *y, const float *parts, int64_t n, int ranks);

// --- Newton-Schulz iteration of the Muon optimizer, called by llmc/state/muon.c ------------------

// One step of the iteration: X = a X + (b A + c A A) X with A = X X^T.
typedef struct NewtonSchulzStep {
    float a, b, c;
} NewtonSchulzStep;

// Replaces X by an approximation of U V^T, where U S V^T is its singular value decomposition. All
// singular values of X must be at most 1. If there are more rows than columns, a step computes X =
// a X + X (b A + c A A) with A = X^T X, which is the same in exact arithmetic and needs the smaller
// A.
//
// A, b A + c A A, and X are rounded to floatX after each product; sums are in fp32. Every product
// is one GEMM call whose shape depends only on the matrix, so the result is bitwise identical on
// all ranks of the same machine type.
//
// If c is 0, the product A A is left out, and b is applied in the last product.
typedef struct NewtonSchulz {
    int64_t rows, columns;  // on GPUs, multiples of 8
    const NewtonSchulzStep *step;
    int steps;
    floatX *x;        // (rows, columns) in; overwritten
    void *workspace;  // op_newton_schulz_bytes, 256-byte aligned
} NewtonSchulz;
// Returns the result (rows, columns): a->x, or part of the workspace.
const floatX *op_newton_schulz(Stream *s, const NewtonSchulz *a);
// Returns the workspace size for a matrix.
size_t op_newton_schulz_bytes(int64_t rows, int64_t columns);

LLMC_END
