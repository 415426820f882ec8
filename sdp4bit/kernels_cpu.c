// The exact regime on the CPU, the reference for every GPU kernel: see kernels.h for what each kernel computes. One group of elements at a time,
// in plain loops over codec.h. Linked into the CPU program only.
#include <string.h>

#include "sdp4bit/adamw.h"
#include "sdp4bit/kernels.h"

enum { BLOCK = HADAMARD_ORDER };

// --- codes of one group ----------------------------------------------------------------------------------------------------------

// The tensor that owns position `at` of a matrix part; pads after a tensor belong to it.
static const Segment *segment_of(SegmentTable table, int64_t at) {
    int lo = 0, hi = table.count - 1;
    while (lo < hi) {
        int middle = (lo + hi + 1) / 2;
        if (table.segment[middle].start <= at) lo = middle;
        else hi = middle - 1;
    }
    return &table.segment[lo];
}

static uint32_t largest_bits(const float *x, int n) {
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) {
        uint32_t bits = f32_bits(x[i]) & 0x7FFFFFFFu;
        if (bits > largest) largest = bits;
    }
    return largest;
}

static void store_code(uint8_t *codes, int codec, int i, int q) {
    if (codec == CODEC_INT8) codes[i] = (uint8_t)(int8_t)q;
    else if (i % 2 == 0) codes[i / 2] = int4_pack(q, 0);
    else codes[i / 2] = (uint8_t)(codes[i / 2] | int4_pack(0, q));
}

// Quantises x (n = group size) into codes and *scale. logical: offset of x[0] for the rounding bits, a multiple of 32.
static void quantize_group(const float *x, int n, int codec, int rounding, RoundingKey key, int64_t logical, uint8_t *codes, float *scale) {
    int levels = codec_info(codec).levels;
    GroupScale g = group_scale(largest_bits(x, n), levels);
    *scale = g.scale;
    for (int i = 0; i < n; i += 8) {
        Philox4 bits = {{0}};
        if (rounding == ROUND_STOCHASTIC) bits = rounding_bits(key, (uint64_t)(logical + i) / 8);
        for (int e = 0; e < 8; e++) {
            float v = group_scaled(x[i + e], g);
            int q = rounding == ROUND_STOCHASTIC ? code_stochastic(v, levels, rounding_bits_element(bits, e)) : code_nearest(v, levels);
            store_code(codes, codec, i + e, q);
        }
    }
}

static void store_plain(uint8_t *to, int codec, int64_t at, const float *x, int64_t n) {
    if (codec == CODEC_FP32) {
        memcpy((float *)(void *)to + at, x, (size_t)n * sizeof(float));
    } else {
        uint16_t *half = (uint16_t *)(void *)to + at;
        for (int64_t i = 0; i < n; i++) half[i] = bf16_from_float(x[i]);
    }
}

// Quantises (or stores) n elements of a slice that starts at `offset` elements into its message; n is one group, or a block of a plain codec.
typedef struct SliceWriter {
    uint8_t *codes;
    float *scales;
    int codec, group, rounding;
    RoundingKey key;
} SliceWriter;

static void write_slice(const SliceWriter *w, int64_t offset, const float *x, int n, int64_t logical) {
    if (!codec_info(w->codec).levels) {
        store_plain(w->codes, w->codec, offset, x, n);
        return;
    }
    quantize_group(x, n, w->codec, w->rounding, w->key, logical, w->codes + offset * codec_info(w->codec).bits / 8,
                   w->scales + offset / w->group);
}

// Partition i's codes, scales and tail inside a message.
static uint8_t *message_codes(uint8_t *message, const MessageLayout *m, int i) { return message + i * m->codes_stride; }
static float *message_scales(uint8_t *message, const MessageLayout *m, int i) { return (float *)(void *)(message + m->scales + i * m->scales_stride); }
static uint8_t *message_tail(uint8_t *message, const MessageLayout *m, int i) { return message + m->tail + i * m->tail_stride; }

// Decodes n elements from `offset` of one group's codes, all with the same scale.
static void decode_group(float *x, const uint8_t *codes, float scale, int codec, int64_t offset, int n) {
    for (int i = 0; codec == CODEC_INT8 && i < n; i++) x[i] = code_value((int8_t)codes[offset + i], scale);
    for (int i = 0; codec == CODEC_INT4 && i < n; i += 2) {
        uint8_t pair = codes[(offset + i) / 2];
        x[i] = code_value(int4_even(pair), scale);
        x[i + 1] = code_value(int4_odd(pair), scale);
    }
}

// Decodes elements [offset, offset + n) of a slice into x; the slice's groups start at 0. INT4: offset and n are even.
static void decode(float *x, const uint8_t *codes, const float *scales, int codec, int group, int64_t offset, int n) {
    if (codec == CODEC_FP32) {
        memcpy(x, codes + 4 * offset, (size_t)n * sizeof(float));
    } else if (codec == CODEC_BF16) {
        const uint16_t *half = (const uint16_t *)(const void *)codes + offset;
        for (int i = 0; i < n; i++) x[i] = bf16_to_float(half[i]);
    } else {
        for (int i = 0; i < n;) {
            int rest = group - (int)((offset + i) % group);
            int run = rest < n - i ? rest : n - i;
            decode_group(x + i, codes, scales[(offset + i) / group], codec, offset + i, run);
            i += run;
        }
    }
}

// acc = the sources' values added in source order, partition i of each message.
static void sum_sources(float *acc, const uint8_t *received, int sources, const MessageLayout *in, int codec, int group, int i, int64_t offset, int n) {
    float x[LARGEST_GROUP];
    for (int source = 0; source < sources; source++) {
        uint8_t *message = (uint8_t *)received + source * in->bytes;
        decode(source ? x : acc, message_codes(message, in, i), message_scales(message, in, i), codec, group, offset, n);
        for (int j = 0; source && j < n; j++) acc[j] = f32_add(acc[j], x[j]);
    }
}

static void sum_tails(float *acc, const uint8_t *received, int sources, const MessageLayout *in, int codec, int i, int64_t offset, int n) {
    float x[BLOCK];
    for (int source = 0; source < sources; source++) {
        decode(source ? x : acc, message_tail((uint8_t *)received + source * in->bytes, in, i), NULL, codec, 1, offset, n);
        for (int j = 0; source && j < n; j++) acc[j] = f32_add(acc[j], x[j]);
    }
}

// Elements handled at a time: one group of a quantising codec, any block of a plain one.
static int piece_size(int codec, int group) { return codec_info(codec).levels ? group : BLOCK; }

// --- gradients -------------------------------------------------------------------------------------------------------------------

static void quantize_partition(const QuantizePartitions *a, uint8_t *message, int i, int64_t partition) {
    SliceWriter w = {message_codes(message, &a->message, i), message_scales(message, &a->message, i), a->codec, a->group, a->rounding, a->key};
    int n = piece_size(a->codec, a->group);
    float x[LARGEST_GROUP];
    for (int64_t at = a->lo; at < a->hi; at += n) {
        int64_t position = partition * a->bucket.matrix_per_rank + at;
        for (int j = 0; j < n; j++) x[j] = f32_mul(a->grads[position + j], a->scale);
        for (int j = 0; a->hadamard && j < n; j += BLOCK) hadamard32(x + j);
        const Segment *segment = segment_of(a->table, position);
        write_slice(&w, at - a->lo, x, n, segment->logical + position - segment->start);
    }
    const float *tail = a->grads + a->bucket.matrix_elements + partition * a->bucket.tail_per_rank;
    for (int64_t j = 0; j < a->message.tail_elements; j++) {
        float scaled = f32_mul(tail[j], a->scale);
        store_plain(message_tail(message, &a->message, i), a->tail_codec, j, &scaled, 1);
    }
}

void kernel_quantize_partitions(Stream *s, const QuantizePartitions *a) {
    for (int slot = 0; slot < a->slots; slot++) {
        uint8_t *message = slot == a->self ? a->self_slot : a->send + slot * a->message.bytes;
        for (int i = 0; i < a->message.partitions; i++) quantize_partition(a, message, i, (int64_t)i * a->slots + slot);
    }
}

static void requantize_partition(const SumRequantize *a, uint8_t *message, int node) {
    SliceWriter w = {message_codes(message, &a->out, 0), message_scales(message, &a->out, 0), a->codec, a->group, a->rounding, a->key};
    int64_t partition = (int64_t)node * a->per_node + a->local;
    int n = piece_size(a->codec, a->group);
    float acc[LARGEST_GROUP];
    for (int64_t at = a->lo; at < a->hi; at += n) {
        sum_sources(acc, a->received, a->sources, &a->in, a->in_codec, a->in_group, node, at - a->lo, n);
        int64_t position = partition * a->bucket.matrix_per_rank + at;
        const Segment *segment = segment_of(a->table, position);
        write_slice(&w, at - a->lo, acc, n, segment->logical + position - segment->start);
    }
    for (int64_t j = 0; j < a->out.tail_elements; j++) {
        sum_tails(acc, a->received, a->sources, &a->in, a->tail_codec, node, j, 1);
        store_plain(message_tail(message, &a->out, 0), a->tail_codec, j, acc, 1);
    }
}

void kernel_sum_requantize(Stream *s, const SumRequantize *a) {
    for (int node = 0; node < a->in.partitions; node++) {
        requantize_partition(a, node == a->self ? a->self_slot : a->send + node * a->out.bytes, node);
    }
}

// Square leaf of up to 32 values.
static float square_leaf(const float *x, int n) {
    float squares[BLOCK] = {0};
    for (int i = 0; i < n; i++) squares[i] = f32_mul(x[i], x[i]);
    return tree_sum32(squares);
}

void kernel_sum_final(Stream *s, const SumFinal *a) {
    float x[BLOCK];
    for (int64_t at = a->lo; at < a->hi; at += BLOCK) {
        sum_sources(x, a->received, a->sources, &a->in, a->codec, a->group, 0, at - a->lo, BLOCK);
        if (a->hadamard) {
            hadamard32(x);
            for (int j = 0; j < BLOCK; j++) x[j] = f32_mul(x[j], HADAMARD_INVERSE);
        }
        int64_t position = a->rank * a->bucket.matrix_per_rank + at;
        const Segment *segment = segment_of(a->table, position);
        for (int j = 0; j < BLOCK; j++) {
            if (position + j - segment->start >= segment->numel) x[j] = 0.0f;
            a->grads[position + j] = x[j];
        }
        a->matrix_leaves[at / BLOCK] = square_leaf(x, BLOCK);
    }
    float *tail = a->grads + a->bucket.matrix_elements + a->rank * a->bucket.tail_per_rank;
    for (int64_t at = 0; at < a->in.tail_elements; at += BLOCK) {
        int n = a->in.tail_elements - at < BLOCK ? (int)(a->in.tail_elements - at) : BLOCK;
        sum_tails(tail + at, a->received, a->sources, &a->in, a->tail_codec, 0, at, n);
        a->tail_leaves[at / BLOCK] = square_leaf(tail + at, n);
    }
}

// --- norm and verdict ------------------------------------------------------------------------------------------------------------

void kernel_square_leaves(Stream *s, float *leaves, const float *x, int64_t n) {
    for (int64_t at = 0; at < n; at += BLOCK) leaves[at / BLOCK] = square_leaf(x + at, n - at < BLOCK ? (int)(n - at) : BLOCK);
}

void kernel_tree_sum(Stream *s, float *sum, float *leaves, int64_t n) {
    for (int64_t stride = 1; stride < n; stride *= 2) {
        for (int64_t i = 0; i + stride < n; i += 2 * stride) leaves[i] = f32_add(leaves[i], leaves[i + stride]);
    }
    *sum = n > 0 ? leaves[0] : 0.0f;
}

void kernel_step_record(Stream *s, StepRecord *record, const float *piece_sums, int pieces, const float *loss) {
    *record = step_record(piece_sums, pieces, *loss);
}

void kernel_judge(Stream *s, StepControl *control, const Judge *a) { judge_step(control, a); }

// --- weights ---------------------------------------------------------------------------------------------------------------------

// n elements of the state at `at`, whose gradients start at grads.
static void adamw(const UpdateShard *a, AdamScalars scalars, int64_t at, const float *grads, int64_t n) {
    if (!a->control->applied) return;
    for (int64_t j = 0; j < n; j++) {
        a->master[at + j] = adamw_element(a->master[at + j], &a->exp_avg[at + j], &a->exp_avg_sq[at + j], grads[j], scalars);
    }
}

static void update_group(const UpdateShard *a, int64_t at, int n) {
    SliceWriter w = {a->codes, a->scales, a->codec, a->group, a->rounding, a->key};
    int64_t position = a->rank * a->bucket.matrix_per_rank + at;
    float x[LARGEST_GROUP];
    bool quantised = codec_info(a->codec).levels != 0;
    if (!quantised && !a->control->applied) return;
    for (int j = 0; j < n; j++) {
        float replica = floatX_to_float(a->weights[position + j]);
        x[j] = a->difference && quantised ? f32_sub(a->master[at + j], replica) : a->master[at + j];
        if (quantised && !a->control->applied) x[j] = 0.0f;
    }
    const Segment *segment = segment_of(a->table, position);
    write_slice(&w, at, x, n, segment->logical + position - segment->start);
}

void kernel_update_shard(Stream *s, const UpdateShard *a) {
    int64_t matrix_per_rank = a->bucket.matrix_per_rank, tail_per_rank = a->bucket.tail_per_rank;
    adamw(a, adam_scalars(a, a->weight_decay), 0, a->grads + a->rank * matrix_per_rank, matrix_per_rank);
    int n = piece_size(a->codec, a->group);
    for (int64_t at = 0; at < matrix_per_rank; at += n) update_group(a, at, n);

    adamw(a, adam_scalars(a, 0.0f), matrix_per_rank, a->grads + a->bucket.matrix_elements + a->rank * tail_per_rank, tail_per_rank);
    if (a->control->applied) store_plain(a->tail, FLOATX_CODEC, 0, a->master + matrix_per_rank, tail_per_rank);
}

// n replica weights at w take the values (or differences) decoded from codes.
static void apply_slice(const ApplyWeights *a, floatX *w, const uint8_t *codes, const float *scales, int codec, int64_t n) {
    float x[BLOCK];
    bool add = a->difference && codec_info(codec).levels != 0;
    for (int64_t at = 0; at < n; at += BLOCK) {
        int block = n - at < BLOCK ? (int)(n - at) : BLOCK;
        decode(x, codes, scales, codec, a->group, at, block);
        for (int j = 0; j < block; j++) {
            w[at + j] = floatX_from_float(add ? f32_add(floatX_to_float(w[at + j]), x[j]) : x[j]);
        }
    }
}

void kernel_apply_weights(Stream *s, const ApplyWeights *a) {
    if (!a->control->applied) return;
    for (int local = 0; local < a->per_node; local++) {
        for (int node = 0; node < a->nodes; node++) {
            uint8_t *message = (uint8_t *)a->messages + ((int64_t)local * a->nodes + node) * a->message.bytes;
            int64_t partition = (int64_t)node * a->per_node + local;
            apply_slice(a, a->weights + partition * a->bucket.matrix_per_rank, message, message_scales(message, &a->message, 0), a->codec,
                        a->bucket.matrix_per_rank);
            apply_slice(a, a->weights + a->bucket.matrix_elements + partition * a->bucket.tail_per_rank, message_tail(message, &a->message, 0), NULL,
                        FLOATX_CODEC, a->bucket.tail_per_rank);
        }
    }
}

// --- replicas and counts ---------------------------------------------------------------------------------------------------------

void kernel_replica_hash(Stream *s, uint64_t *hash, const floatX *weights, int64_t first, int64_t n) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = 0;
        memcpy(&bits, &weights[i], sizeof weights[i]);
        sum += replica_mix((uint64_t)(first + i), bits);
    }
    *hash += sum;
}

static uint64_t message_sum(const SealMessages *a, int i) {
    const uint8_t *message = a->messages + i * a->bytes;
    int64_t words = (a->bytes - MESSAGE_ALIGN) / 4;
    uint64_t sum = replica_mix(a->key, a->first + (uint32_t)i * a->stride);
    for (int64_t w = 0; w < words; w++) {
        uint32_t word;
        memcpy(&word, message + 4 * w, sizeof word);
        sum += replica_mix((uint64_t)w, word);
    }
    return sum;
}

void kernel_seal_messages(Stream *s, const SealMessages *a) {
    for (int i = 0; i < a->count; i++) {
        uint64_t seal[2] = {i == a->skip ? 0 : message_sum(a, i), 0};
        if (i != a->skip) memcpy(a->messages + (i + 1) * a->bytes - MESSAGE_ALIGN, seal, sizeof seal);
    }
}

void kernel_check_messages(Stream *s, const SealMessages *a, uint64_t *sums, uint64_t *fault, uint64_t code) {
    for (int i = 0; i < a->count; i++) {
        uint64_t sent;
        if (i == a->skip) continue;
        memcpy(&sent, a->messages + (i + 1) * a->bytes - MESSAGE_ALIGN, sizeof sent);
        sums[i] = message_sum(a, i);
        if (sums[i] != sent && !*fault) *fault = code + (uint64_t)i;
    }
}

void kernel_widen(Stream *s, float *master, const floatX *weights, int64_t n) {
    for (int64_t i = 0; i < n; i++) master[i] = floatX_to_float(weights[i]);
}

void kernel_count_zeros(Stream *s, int64_t *count, const float *x, int64_t n) {
    int64_t zeros = 0;
    for (int64_t i = 0; i < n; i++) zeros += x[i] == 0.0f;
    *count += zeros;
}
