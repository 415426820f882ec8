// CPU ops, part 2: causal self-attention. Processes one (sample, head) at a time, in blocks of
// query rows. A block skips keys that none of its rows can see, so almost no masked scores are
// computed. Forward saves the log-sum-exp of each row, from which backward recomputes the
// probabilities.
#include "llmc/cpu/ops_internal.h"

enum { QUERY_ROWS = 64 };

size_t op_attention_saved_bytes(int B, int T, int NH, int HD) {
    return (size_t)B * (size_t)NH * (size_t)T * sizeof(float);
}

int op_attention_pack(Stream *s, const Attention *a, const int32_t *doc_start, void *packed) { return 0; }

size_t op_attention_pack_bytes(int B, int T, bool documents) { return 0; }

size_t op_attention_workspace_bytes(int B, int T, int NH, int HD, int groups, bool packed) {
    // For backward: q, k, v, dout, dq, dk, dv, two blocks of scores, one row of dropout
    // multipliers.
    int64_t head = slice_floats((int64_t)T * HD), scores = slice_floats(min64(QUERY_ROWS, T) * T);
    return (size_t)(7 * head + 2 * scores + slice_floats(T)) * sizeof(float);
}

// Constants of one (sample, head).
typedef struct AttentionHead {
    int T, HD;
    int head;  // index in the whole model
    float scale;
    const int32_t *doc_start;  // (T) of this sample, or NULL
    int window;
    Dropout dropout;
    int64_t sample;  // global index
} AttentionHead;

// Query rows first .. first + rows - 1, and the range of keys visible to any of them.
typedef struct Block {
    int first, rows, key_begin, key_end;
} Block;

static int first_key(const AttentionHead *h, int t) {
    return attention_first_key(h->window, h->doc_start ? h->doc_start[t] : 0, t);
}

static Block block_at(const AttentionHead *h, int first) {
    Block block = {first, (int)min64(QUERY_ROWS, h->T - first), first, 0};
    block.key_end = first + block.rows;
    for (int t = first; t < block.key_end; t++) {
        block.key_begin = (int)min64(block.key_begin, first_key(h, t));
    }
    return block;
}

// Convert rows of HD values, `stride` apart, from and to a dense (T, HD) fp32 matrix.
static void load_rows(float *to, const floatX *from, int64_t stride, int T, int HD) {
    for (int t = 0; t < T; t++) {
        for (int d = 0; d < HD; d++) to[(int64_t)t * HD + d] = floatX_to_float(from[t * stride + d]);
    }
}
static void store_rows(floatX *to, int64_t stride, const float *from, int T, int HD) {
    for (int t = 0; t < T; t++) narrow(to + t * stride, from + (int64_t)t * HD, HD);
}

static void set_zero_range(float *row, int begin, int end) {
    for (int i = begin; i < end; i++) row[i] = 0.0f;
}

static float row_max(const float *x, int n) {
    float lane[LANES];
    for (int l = 0; l < LANES; l++) lane[l] = x[0];
    EACH_LANE(n, lane[l] = x[i] > lane[l] ? x[i] : lane[l]);
    return max_of_lanes(lane);
}

static float row_sum(const float *x, int n) {
    float lane[LANES] = {0};
    EACH_LANE(n, lane[l] += x[i]);
    return join_lanes(lane);
}

static float row_dot(const float *x, const float *y, int n) {
    float lane[LANES] = {0};
    EACH_LANE(n, lane[l] += x[i] * y[i]);
    return join_lanes(lane);
}

// Replaces the scores of query t with probabilities before dropout, which are 0 for masked keys.
// scores: keys key_begin .. key_end - 1. Returns the log-sum-exp of the row.
static float softmax_row(float *scores, const AttentionHead *h, Block block, int t) {
    int begin = first_key(h, t) - block.key_begin, end = t + 1 - block.key_begin;
    int width = block.key_end - block.key_begin;
    float max = row_max(scores + begin, end - begin);
    for (int i = begin; i < end; i++) scores[i] = exp_approx(scores[i] - max);
    float sum = row_sum(scores + begin, end - begin), inverse = 1.0f / sum;
    for (int i = begin; i < end; i++) scores[i] *= inverse;
    set_zero_range(scores, 0, begin);
    set_zero_range(scores, end, width);
    return max + logf(sum);
}

// Computes the dropout multipliers of query t. keep[0] belongs to its first visible key.
static void attention_multipliers(float *keep, const AttentionHead *h, int t) {
    int begin = first_key(h, t);
    int64_t first = ((int64_t)h->head * h->T + t) * h->T + begin;
    dropout_multipliers(keep, h->dropout, h->sample, first, t + 1 - begin);
}

// Computes out (T, HD) fp32 and lse (T) of one head.
static void head_forward(float *out, float *lse, const float *q, const float *k, const float *v,
                         const AttentionHead *h, float *cursor) {
    int64_t HD = h->HD;
    float *scores = take_slice(&cursor, min64(QUERY_ROWS, h->T) * h->T);  // (rows, keys)
    float *keep = take_slice(&cursor, h->T);
    for (int first = 0; first < h->T; first += QUERY_ROWS) {
        Block block = block_at(h, first);
        int keys = block.key_end - block.key_begin;
        matmul_nt(block.rows, keys, HD, h->scale, q + first * HD, k + block.key_begin * HD, 0.0f, scores);
        for (int i = 0; i < block.rows; i++) {
            int t = first + i, begin = first_key(h, t);
            float *row = scores + (int64_t)i * keys;
            lse[t] = softmax_row(row, h, block, t);
            if (!(h->dropout.p > 0.0f)) continue;
            attention_multipliers(keep, h, t);
            for (int key = begin; key <= t; key++) row[key - block.key_begin] *= keep[key - begin];
        }
        matmul_nn(block.rows, HD, keys, 1.0f, scores, v + block.key_begin * HD, 0.0f, out + first * HD);
    }
}

static AttentionHead head_of(const Attention *a, int64_t b, int head) {
    const int32_t *doc_start = a->doc_start ? a->doc_start + b * a->T : NULL;
    float scale = 1.0f / sqrtf((float)a->HD);
    return (AttentionHead){.T = a->T,
                           .HD = a->HD,
                           .head = a->first_head + head,
                           .scale = scale,
                           .doc_start = doc_start,
                           .window = a->window,
                           .dropout = a->dropout,
                           .sample = a->dropout.first_sample + b};
}

// Offsets of one (sample, query group) in qkv or dqkv, and the row stride.
typedef struct GroupPlace {
    int64_t q, k, v, row;
} GroupPlace;

static GroupPlace group_place(const Attention *a, int64_t b, int group) {
    int64_t row = (int64_t)(a->NH + 2 * attention_groups(a)) * a->HD, first = b * a->T * row;
    GroupColumns columns = attention_columns(a, group);
    return (GroupPlace){first + columns.q, first + columns.k, first + columns.v, row};
}

void op_attention_forward(Stream *s, const Attention *a) {
    int T = a->T, HD = a->HD, heads = a->NH / attention_groups(a);
    int64_t head_size = (int64_t)T * HD, C = (int64_t)a->NH * HD;
    float *cursor = a->workspace, *lse = a->saved;  // lse: (B, NH, T)
    float *q = take_slice(&cursor, head_size), *k = take_slice(&cursor, head_size);
    float *v = take_slice(&cursor, head_size), *out = take_slice(&cursor, head_size);
    for (int64_t b = 0; b < a->B; b++) {
        for (int head = 0; head < a->NH; head++) {
            AttentionHead h = head_of(a, b, head);
            GroupPlace at = group_place(a, b, head / heads);
            load_rows(q, a->qkv + at.q + (int64_t)(head % heads) * HD, at.row, T, HD);
            if (head % heads == 0) load_rows(k, a->qkv + at.k, at.row, T, HD);
            if (head % heads == 0) load_rows(v, a->qkv + at.v, at.row, T, HD);
            head_forward(out, lse + (b * a->NH + head) * T, q, k, v, &h, cursor);
            store_rows(a->out + b * T * C + (int64_t)head * HD, C, out, T, HD);
        }
    }
}

// Computes one query row of the softmax backward pass, in place.
//   scores   in: q k^T          out: probabilities after dropout
//   dprobs   in: dout v^T       out: gradient of the scaled scores, p (dp - sum p dp)
//   keep     (T) scratch
static void softmax_backward_row(float *scores, float *dprobs, float lse, const AttentionHead *h, Block block,
                                 int t, float *keep) {
    int begin = first_key(h, t) - block.key_begin, end = t + 1 - block.key_begin;
    int width = block.key_end - block.key_begin;
    for (int i = begin; i < end; i++) scores[i] = exp_approx(scores[i] - lse);
    if (h->dropout.p > 0.0f) {
        attention_multipliers(keep, h, t);
        for (int i = begin; i < end; i++) dprobs[i] *= keep[i - begin];
    }
    float mean = row_dot(scores + begin, dprobs + begin, end - begin);
    for (int i = begin; i < end; i++) dprobs[i] = scores[i] * (dprobs[i] - mean);
    if (h->dropout.p > 0.0f) {
        for (int i = begin; i < end; i++) scores[i] *= keep[i - begin];
    }
    set_zero_range(scores, 0, begin);
    set_zero_range(scores, end, width);
    set_zero_range(dprobs, 0, begin);
    set_zero_range(dprobs, end, width);
}

// fp32 matrices (T, HD) of one head in the backward pass. dk and dv accumulate over the heads of a
// group. dk is not yet multiplied by `scale`.
typedef struct HeadGradient {
    float *q, *k, *v, *dout, *dq, *dk, *dv;
} HeadGradient;

static void head_backward(HeadGradient g, const float *lse, const AttentionHead *h, float *cursor) {
    int64_t HD = h->HD;
    float *scores = take_slice(&cursor, min64(QUERY_ROWS, h->T) * h->T);  // (rows, keys)
    float *dprobs = take_slice(&cursor, min64(QUERY_ROWS, h->T) * h->T);  // (rows, keys)
    float *keep = take_slice(&cursor, h->T);
    for (int first = 0; first < h->T; first += QUERY_ROWS) {
        Block block = block_at(h, first);
        int keys = block.key_end - block.key_begin;
        int64_t row_at = first * HD, key_at = block.key_begin * HD;
        matmul_nt(block.rows, keys, HD, h->scale, g.q + row_at, g.k + key_at, 0.0f, scores);
        matmul_nt(block.rows, keys, HD, 1.0f, g.dout + row_at, g.v + key_at, 0.0f, dprobs);
        for (int i = 0; i < block.rows; i++) {
            int64_t at = (int64_t)i * keys;
            softmax_backward_row(scores + at, dprobs + at, lse[first + i], h, block, first + i, keep);
        }
        matmul_tn(keys, HD, block.rows, 1.0f, scores, g.dout + row_at, 1.0f, g.dv + key_at);
        matmul_tn(keys, HD, block.rows, 1.0f, dprobs, g.q + row_at, 1.0f, g.dk + key_at);
        matmul_nn(block.rows, HD, keys, 1.0f, dprobs, g.k + key_at, 0.0f, g.dq + row_at);
    }
    for (int64_t i = 0; i < h->T * HD; i++) g.dq[i] *= h->scale;
}

// Computes the gradients of one (sample, group).
static void group_backward(const Attention *a, int64_t b, int group, HeadGradient g, float *cursor) {
    int T = a->T, HD = a->HD, heads = a->NH / attention_groups(a);
    int64_t head_size = (int64_t)T * HD, C = (int64_t)a->NH * HD;
    const float *lse = a->saved;  // (B, NH, T)
    GroupPlace at = group_place(a, b, group);
    load_rows(g.k, a->qkv + at.k, at.row, T, HD);
    load_rows(g.v, a->qkv + at.v, at.row, T, HD);
    memset(g.dk, 0, (size_t)head_size * sizeof(float));
    memset(g.dv, 0, (size_t)head_size * sizeof(float));
    for (int i = 0; i < heads; i++) {
        int head = group * heads + i;
        AttentionHead h = head_of(a, b, head);
        load_rows(g.q, a->qkv + at.q + (int64_t)i * HD, at.row, T, HD);
        load_rows(g.dout, a->dout + b * T * C + (int64_t)head * HD, C, T, HD);
        head_backward(g, lse + (b * a->NH + head) * T, &h, cursor);
        store_rows(a->dqkv + at.q + (int64_t)i * HD, at.row, g.dq, T, HD);
    }
    float scale = head_of(a, b, 0).scale;
    for (int64_t i = 0; i < head_size; i++) g.dk[i] *= scale;
    store_rows(a->dqkv + at.k, at.row, g.dk, T, HD);
    store_rows(a->dqkv + at.v, at.row, g.dv, T, HD);
}

// Does not read `out`, from which GPU kernels compute sum p dp as dout . out. Here the complete row
// of p and dp is available, and summing it avoids the rounding error of `out`.
void op_attention_backward(Stream *s, const Attention *a) {
    float *cursor = a->workspace;
    HeadGradient g = {0};
    float **slices[] = {&g.q, &g.k, &g.v, &g.dout, &g.dq, &g.dk, &g.dv};
    for (size_t i = 0; i < sizeof slices / sizeof slices[0]; i++) {
        *slices[i] = take_slice(&cursor, (int64_t)a->T * a->HD);
    }
    for (int64_t b = 0; b < a->B; b++) {
        for (int group = 0; group < attention_groups(a); group++) group_backward(a, b, group, g, cursor);
    }
}

// --- attention with a KV cache -------------------------------------------------------------------

size_t op_cached_attention_workspace_bytes(int T, int room, int NH, int HD) {
    int64_t rows = min64(QUERY_ROWS, T), cache = slice_floats((int64_t)room * HD);
    return (size_t)(2 * cache + 2 * slice_floats(rows * HD) + slice_floats(rows * room)) * sizeof(float);
}

void op_cache_append(Stream *s, const CachedAttention *a) {
    int heads = a->NH / a->groups;
    size_t vector = (size_t)a->HD * sizeof(floatX);
    for (int t = 0; t < a->T; t++) {
        for (int group = 0; group < a->groups; group++) {
            int64_t to = ((int64_t)group * a->room + a->start + t) * a->HD;
            const floatX *key = a->qkv + (((int64_t)t * a->groups + group) * (heads + 2) + heads) * a->HD;
            memcpy(a->keys + to, key, vector);
            memcpy(a->values + to, key + a->HD, vector);
        }
    }
}

// Computes attention of one head. k, v: (start + T, HD) keys and values of its group.
static void cached_head(const CachedAttention *a, int head, const float *k, const float *v, float *cursor) {
    int64_t HD = a->HD, C = (int64_t)a->NH * HD, row = C + 2 * (int64_t)a->groups * HD;
    int heads = a->NH / a->groups;
    AttentionHead h = {.T = a->start + a->T,
                       .HD = a->HD,
                       .scale = 1.0f / sqrtf((float)a->HD),
                       .window = a->window};
    float *q = take_slice(&cursor, min64(QUERY_ROWS, a->T) * HD);
    float *out = take_slice(&cursor, min64(QUERY_ROWS, a->T) * HD);
    float *scores = take_slice(&cursor, min64(QUERY_ROWS, a->T) * a->room);
    const floatX *queries = a->qkv + ((int64_t)(head / heads) * (heads + 2) + head % heads) * HD;
    for (int first = 0; first < a->T; first += QUERY_ROWS) {
        int rows = (int)min64(QUERY_ROWS, a->T - first), keys = a->start + first + rows;
        Block block = {a->start + first, rows, 0, keys};
        load_rows(q, queries + first * row, row, rows, a->HD);
        matmul_nt(rows, keys, HD, h.scale, q, k, 0.0f, scores);
        for (int i = 0; i < rows; i++) softmax_row(scores + (int64_t)i * keys, &h, block, block.first + i);
        matmul_nn(rows, HD, keys, 1.0f, scores, v, 0.0f, out);
        store_rows(a->out + first * C + head * HD, C, out, rows, a->HD);
    }
}

void op_cached_attention(Stream *s, const CachedAttention *a) {
    int64_t elements = (int64_t)(a->start + a->T) * a->HD, room = (int64_t)a->room * a->HD;
    float *cursor = a->workspace;
    float *k_buffer = take_slice(&cursor, room), *v_buffer = take_slice(&cursor, room);
    for (int head = 0, heads = a->NH / a->groups; head < a->NH; head += heads) {
        int64_t at = head / heads * room;
        const float *k = widen(a->keys + at, elements, k_buffer);
        const float *v = widen(a->values + at, elements, v_buffer);
        for (int i = 0; i < heads; i++) cached_head(a, head + i, k, v, cursor);
    }
}
