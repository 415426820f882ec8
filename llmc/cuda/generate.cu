// Ops for text generation on GPUs: attention with a KV cache, and linear layers of one row (see
// ops.h). Both are memory-bound, so kernels read each key, value and weight once, 8 elements per
// thread.
#include <assert.h>
#include <math.h>

#include "llmc/cuda/common.cuh"

enum { THREADS = 128 };

// --- the cache -----------------------------------------------------------------------------------

// Each thread copies 8 columns of a key or value.
static __global__ void __launch_bounds__(THREADS) cache_append_kernel(CachedAttention a, int64_t threads) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= threads) return;
    const int width = a.HD / PACKED, heads = a.NH / a.groups, column = (int)(i % width) * PACKED;
    const int64_t vector = i / width, pair = vector / 2, t = pair / a.groups, group = pair % a.groups;
    const bool value = vector % 2;
    const floatX *from = a.qkv + (pair * (heads + 2) + heads + value) * a.HD + column;
    floatX *to = (value ? a.values : a.keys) + (group * a.room + a.start + t) * a.HD + column;
    store_packed(to, load_packed(from));
}

void op_cache_append(Stream *s, const CachedAttention *a) {
    const int64_t threads = (int64_t)a->T * a->groups * 2 * (a->HD / PACKED);
    if (threads == 0) return;
    const unsigned blocks = (unsigned)ceil_div64(threads, THREADS);
    cache_append_kernel<<<blocks, THREADS, 0, stream_handle(s)>>>(*a, threads);
    check_launch(s, "cache of keys and values");
}

// --- attention -----------------------------------------------------------------------------------

// The keys of a head are divided into chunks, so that even a single query occupies the whole GPU.
// Each block computes the partial sums of a chunk; a second kernel combines the chunks in a fixed
// order.
enum { CHUNK = 64, MOST_ROWS = 16 };  // keys per chunk; maximum number of queries per launch

// Partial sums (rows, NH, chunks) of the softmax: largest score, sum of exponentials, and weighted
// sum of values (HD).
typedef struct Parts {
    float *max, *sum, *out;
    int chunks;
    float scale;  // factor of the scores, including log2(e) for base-2 exponentials
} Parts;

static int64_t chunks_of(int64_t keys) { return ceil_div64(keys, CHUNK); }

size_t op_cached_attention_workspace_bytes(int T, int room, int NH, int HD) {
    const size_t rows = T < MOST_ROWS ? (size_t)T : (size_t)MOST_ROWS;
    return rows * (size_t)NH * (size_t)chunks_of(room) * (size_t)(HD + 2) * sizeof(float);
}

// LANES threads process a key, 8 columns each, so HD <= 8 * LANES. Grid: (chunk, head, query).
template <int LANES>
static __global__ void __launch_bounds__(THREADS) cached_attention_kernel(CachedAttention a, Parts parts) {
    constexpr int TEAMS = THREADS / LANES, STEPS = CHUNK / TEAMS;
    __shared__ float team_max[TEAMS], team_total[TEAMS], team_out[TEAMS][LANES * PACKED];
    const int lane = threadIdx.x % LANES, team = threadIdx.x / LANES, column = lane * PACKED;
    const int head = blockIdx.y, t = blockIdx.z, heads = a.NH / a.groups, group = head / heads;
    const int first = blockIdx.x * CHUNK, keys = a.start + t + 1;  // end of the visible keys
    const int least = attention_first_key(a.window, 0, keys - 1);
    if (first >= keys || first + CHUNK <= least) return;
    const bool held = column < a.HD;
    const int64_t vector = ((int64_t)t * a.groups + group) * (heads + 2) + head % heads;
    const floatX *query = a.qkv + vector * a.HD + column;
    const int64_t at = ((int64_t)group * a.room + first + team) * a.HD + column;
    const Packed128 zero = {make_uint4(0, 0, 0, 0)};
    float q[PACKED], score[STEPS], max = -INFINITY, total = 0.0f, out[PACKED] = {0};
    unpack(held ? load_packed(query) : zero, q);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const int key = first + team + i * TEAMS;
        const bool sees = key < keys && key >= least;
        float k[PACKED], sum = 0.0f;
        unpack(sees && held ? load_packed(a.keys + at + (int64_t)i * TEAMS * a.HD) : zero, k);
#pragma unroll
        for (int e = 0; e < PACKED; e++) sum += q[e] * k[e];
        sum = lanes_sum<LANES>(sum);  // all lanes of the warp must call it
        score[i] = sees ? parts.scale * sum : -INFINITY;
        max = fmaxf(max, score[i]);
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const int key = first + team + i * TEAMS;
        const bool sees = key < keys && key >= least;
        float v[PACKED], share = sees ? fast_exp2(score[i] - max) : 0.0f;
        unpack(sees && held ? load_packed(a.values + at + (int64_t)i * TEAMS * a.HD) : zero, v);
        total += share;
#pragma unroll
        for (int e = 0; e < PACKED; e++) out[e] += share * v[e];
    }
    if (lane == 0) team_max[team] = max, team_total[team] = total;
#pragma unroll
    for (int e = 0; e < PACKED; e++) team_out[team][column + e] = out[e];
    __syncthreads();
    float largest = team_max[0], sum = 0.0f;
    for (int i = 1; i < TEAMS; i++) largest = fmaxf(largest, team_max[i]);
    for (int i = 0; i < TEAMS; i++) sum += team_total[i] * fast_exp2(team_max[i] - largest);
    const int64_t part = ((int64_t)t * a.NH + head) * parts.chunks + blockIdx.x;
    if (threadIdx.x == 0) parts.max[part] = largest, parts.sum[part] = sum;
    for (int d = threadIdx.x; d < a.HD; d += THREADS) {
        float value = 0.0f;
        for (int i = 0; i < TEAMS; i++) value += team_out[i][d] * fast_exp2(team_max[i] - largest);
        parts.out[part * a.HD + d] = value;
    }
}

// Grid: (head, query).
static __global__ void __launch_bounds__(THREADS) join_chunks_kernel(CachedAttention a, Parts parts) {
    const int head = blockIdx.x, t = blockIdx.y, chunks = (a.start + t + CHUNK) / CHUNK;
    const int first = attention_first_key(a.window, 0, a.start + t) / CHUNK;
    const int64_t row = (int64_t)t * a.NH + head, part = row * parts.chunks;
    float largest = -INFINITY, sum = 0.0f;
    for (int i = first; i < chunks; i++) largest = fmaxf(largest, parts.max[part + i]);
    for (int i = first; i < chunks; i++)
        sum += parts.sum[part + i] * fast_exp2(parts.max[part + i] - largest);
    for (int d = threadIdx.x; d < a.HD; d += THREADS) {
        float value = 0.0f;
        for (int i = first; i < chunks; i++)
            value += parts.out[(part + i) * a.HD + d] * fast_exp2(parts.max[part + i] - largest);
        a.out[row * a.HD + d] = floatX_from_float(value / sum);
    }
}

static void attend(Stream *s, const CachedAttention *a) {
    cudaStream_t stream = stream_handle(s);
    Parts parts;
    parts.chunks = (int)chunks_of(a->start + a->T);
    parts.scale = LOG2_E / sqrtf((float)a->HD);
    const int64_t count = (int64_t)a->T * a->NH * parts.chunks;
    parts.max = (float *)a->workspace;
    parts.sum = parts.max + count;
    parts.out = parts.sum + count;
    const dim3 grid((unsigned)parts.chunks, (unsigned)a->NH, (unsigned)a->T);
    if (a->HD <= 64) cached_attention_kernel<8><<<grid, THREADS, 0, stream>>>(*a, parts);
    else if (a->HD <= 128) cached_attention_kernel<16><<<grid, THREADS, 0, stream>>>(*a, parts);
    else cached_attention_kernel<32><<<grid, THREADS, 0, stream>>>(*a, parts);
    check_launch(s, "cached attention");
    join_chunks_kernel<<<dim3((unsigned)a->NH, (unsigned)a->T), THREADS, 0, stream>>>(*a, parts);
    check_launch(s, "cached attention, sums over chunks");
}

void op_cached_attention(Stream *s, const CachedAttention *a) {
    assert(a->HD % PACKED == 0 && a->HD <= WARP * PACKED);
    const int heads = a->NH / a->groups;
    for (int t = 0; t < a->T; t += MOST_ROWS) {
        CachedAttention some = *a;
        some.T = a->T - t < MOST_ROWS ? a->T - t : MOST_ROWS;
        some.start = a->start + t;
        some.qkv = a->qkv + (int64_t)t * a->groups * (heads + 2) * a->HD;
        some.out = a->out + (int64_t)t * a->NH * a->HD;
        attend(s, &some);
    }
}

// --- a linear layer of one row -------------------------------------------------------------------

// Each warp computes one output.
static __global__ void __launch_bounds__(THREADS) linear_row_kernel(Linear a) {
    const int lane = threadIdx.x % WARP, o = (int)(blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP);
    if (o >= a.OC) return;
    const floatX *w = a.w + (int64_t)o * a.C;
    float sum = 0.0f;
#pragma unroll 4
    for (int c = lane * PACKED; c < a.C; c += WARP * PACKED) {
        float x[PACKED], row[PACKED];
        unpack(load_packed_streaming(w + c), row);
        unpack(load_packed(a.x + c), x);
#pragma unroll
        for (int e = 0; e < PACKED; e++) sum += x[e] * row[e];
    }
    sum = warp_sum(sum);
    if (lane > 0) return;
    if (a.bias) sum += floatX_to_float(a.bias[o]);
    const floatX rounded = floatX_from_float(sum);
    if (a.pre) a.pre[o] = rounded;
    a.y[o] = a.pre ? floatX_from_float(gelu(floatX_to_float(rounded))) : rounded;
}

void linear_forward_row(Stream *s, const Linear *a) {
    const int64_t blocks = ceil_div64(a->OC, THREADS / WARP);
    linear_row_kernel<<<(unsigned)blocks, THREADS, 0, stream_handle(s)>>>(*a);
    check_launch(s, "linear layer of one row");
}
