// CPU implementation of the kernels and reference for the GPU: plain loops over codec.h. kernels.h
// defines what each kernel computes. Linked into the CPU program only.
#include <string.h>

#include "sdp4bit/outer_step.h"
#include "sdp4bit/slices.h"

// --- codes and values ---------------------------------------------------------------------------

// Decodes n elements with the same scale. n: a multiple of 8.
static inline void decode_run(float *x, const uint8_t *codes, float scale, int n, int bits, bool eden) {
    for (int i = 0; i < n; i += ROUNDING_BLOCK, codes += bits) {
        uint64_t stream = 0;
        memcpy(&stream, codes, (size_t)bits);
        for (int e = 0; e < ROUNDING_BLOCK; e++) {
            int code = unpack_code(stream, e, bits);
            x[i + e] = eden ? f32_mul(eden_value(code, bits), scale) : code_value(code, scale);
        }
    }
}

static void load_values(float *x, const uint8_t *from, Codec codec, int n) {
    if (codec_info(codec).bits == 32) {
        memcpy(x, from, (size_t)n * sizeof(float));
    } else {
        const uint16_t *half = (const uint16_t *)(const void *)from;
        for (int i = 0; i < n; i++) x[i] = bf16_to_float(half[i]);
    }
}

// Codes and scales of a received shard range.
typedef struct SliceReader {
    const uint8_t *codes;
    const float *scales;
    Codec codec;
    int group;
} SliceReader;

// Reads elements [offset, offset + n) group by group into x. offset and n: multiples of 8.
static inline void read_groups(float *x, const SliceReader *r, int64_t offset, int n, int bits, bool eden) {
    for (int i = 0; i < n;) {
        int rest = r->group - (int)((offset + i) % r->group), run = rest < n - i ? rest : n - i;
        float scale = r->scales[(offset + i) / r->group];
        decode_run(x + i, r->codes + (offset + i) / 8 * bits, scale, run, bits, eden);
        i += run;
    }
}

// The same for any codec. Plain codecs allow any offset and n.
static void read_slice(float *x, const SliceReader *r, int64_t offset, int n) {
#define READ_VALUES(ID, NAME, BITS, LEVELS) \
    case CODEC_##ID: \
        load_values(x, r->codes + codec_bytes(r->codec, offset), r->codec, n); \
        return;
#define READ_GROUPS(ID, NAME, BITS, LEVELS) \
    case CODEC_##ID: \
        read_groups(x, r, offset, n, BITS, false); \
        return;
#define READ_EDEN(ID, NAME, BITS, LEVELS) \
    case CODEC_##ID: read_groups(x, r, offset, n, BITS, true); return;
    switch (r->codec) { PLAIN_CODECS(READ_VALUES) UNIFORM_CODECS(READ_GROUPS) EDEN_CODECS(READ_EDEN) }
}

// --- messages -----------------------------------------------------------------------------------

static SliceReader matrix_of(const uint8_t *message, const MessageLayout *m, int partition, Codec codec,
                             int group) {
    MessageSections at = message_sections(m, partition);
    SliceReader r = {message + at.codes, (const float *)(const void *)(message + at.scales), codec, group};
    return r;
}

static SliceReader tail_of(const uint8_t *message, const MessageLayout *m, int partition, Codec tail_codec) {
    SliceReader r = {message + message_sections(m, partition).tail, NULL, tail_codec, 1};
    return r;
}

// Sums n values over the sources, in source order. first: reads source 0's message; messages are
// `stride` bytes apart. n: at most LARGEST_GROUP.
static void sum_sources(float *acc, SliceReader first, int64_t stride, int sources, int64_t offset, int n) {
    float x[LARGEST_GROUP];
    read_slice(acc, &first, offset, n);
    for (int source = 1; source < sources; source++) {
        SliceReader r = first;
        r.codes += source * stride;
        if (r.scales) r.scales += source * stride / (int64_t)sizeof(float);
        read_slice(x, &r, offset, n);
        for (int j = 0; j < n; j++) acc[j] = f32_add(acc[j], x[j]);
    }
}

// --- transforms ---------------------------------------------------------------------------------

// Inverse of transform_block.
static void invert_block(float *x, Transform transform, RoundingKey rotation, int64_t logical) {
    if (transform == TRANSFORM_NONE) return;
    bool rotated = transform == TRANSFORM_ROTATION;
    int order = transform_order(transform);
    hadamard(x, order);
    for (int i = 0; i < order; i++) x[i] = f32_mul(x[i], rotated ? ROTATION_INVERSE : HADAMARD_INVERSE);
    if (rotated) rotation_flip(x, rotation, logical);
}

// --- gradients ----------------------------------------------------------------------------------

// Scales and transforms n gradients of a partition. n: a multiple of the transform's order.
// logical: logical offset of the first gradient.
static void transformed_grads(float *x, const QuantizePartitions *a, int64_t partition, int64_t at, int n,
                              int64_t logical) {
    const float *grads = a->grads + partition * a->bucket.matrix_per_rank + at;
    int order = transform_order(a->transform);
    for (int j = 0; j < n; j++) x[j] = f32_mul(grads[j], a->scale);
    for (int j = 0; j < n; j += order) transform_block(x + j, a->transform, a->rotation, logical + j);
}

static void quantize_partition(const QuantizePartitions *a, uint8_t *message, int i, int64_t partition) {
    MessageSections to = message_sections(&a->message, i);
    float *scales = (float *)(void *)(message + to.scales);
    SliceWriter w = {message + to.codes, scales, a->codec, a->group, a->rounding, a->key};
    int group = piece_size(a->codec, a->group), order = transform_order(a->transform);
    int n = group > order ? group : order;
    float x[LARGEST_GROUP];
    for (int64_t at = a->lo; at < a->hi; at += n) {
        int64_t position = partition_position(a, partition) + at;
        const Segment *segment = segment_of(a->table, position);
        int64_t logical = segment->logical + position - segment->start;
        transformed_grads(x, a, partition, at, n, logical);
        for (int j = 0; j < n; j += group) write_slice(&w, at - a->lo + j, x + j, group, logical + j);
    }
    const float *tail = a->grads + a->bucket.matrix_elements + partition * a->bucket.tail_per_rank;
    for (int64_t j = 0; j < a->message.tail_elements; j++) {
        float scaled = f32_mul(tail[j], a->scale);
        store_values(message + to.tail + codec_bytes(a->tail_codec, j), a->tail_codec, &scaled, 1);
    }
}

void kernel_quantize_partitions(Stream *s, const QuantizePartitions *a) {
    for (int slot = 0; slot < a->slots; slot++) {
        uint8_t *message = outgoing_message(a->send, a->self_slot, a->self, slot, &a->message);
        for (int i = 0; i < a->message.partitions; i++) {
            quantize_partition(a, message, i, (int64_t)i * a->slots + slot);
        }
    }
}

static void requantize_partition(const SumRequantize *a, uint8_t *message, int node) {
    const QuantizePartitions *q = &a->out;
    MessageSections to = message_sections(&q->message, 0);
    float *scales = (float *)(void *)(message + to.scales);
    SliceWriter w = {message + to.codes, scales, q->codec, q->group, q->rounding, q->key};
    SliceReader matrix = matrix_of(a->received, &a->in, node, a->in_codec, a->in_group);
    SliceReader tail = tail_of(a->received, &a->in, node, q->tail_codec);
    int n = piece_size(q->codec, q->group);
    float acc[LARGEST_GROUP];
    for (int64_t at = q->lo; at < q->hi; at += n) {
        sum_sources(acc, matrix, a->in.bytes, a->sources, at - q->lo, n);
        int64_t position = partition_position(q, node) + at;
        const Segment *segment = segment_of(q->table, position);
        write_slice(&w, at - q->lo, acc, n, segment->logical + position - segment->start);
    }
    for (int64_t j = 0; j < q->message.tail_elements; j++) {
        sum_sources(acc, tail, a->in.bytes, a->sources, j, 1);
        store_values(message + to.tail + codec_bytes(q->tail_codec, j), q->tail_codec, acc, 1);
    }
}

void kernel_sum_requantize(Stream *s, const SumRequantize *a) {
    for (int node = 0; node < a->in.partitions; node++) {
        const QuantizePartitions *q = &a->out;
        requantize_partition(a, outgoing_message(q->send, q->self_slot, q->self, node, &q->message), node);
    }
}

// --- error feedback -----------------------------------------------------------------------------

// Adds n values y to the residual of partition p.
static void feed(const Residual *r, const Bucket *bucket, int64_t p, int64_t at, const float *y, int n) {
    float *values = r->values + p * bucket->matrix_per_rank + at;
    bool keep = !r->control || r->control->applied;
    for (int j = 0; !r->frozen && j < n; j++) values[j] = f32_add(keep ? values[j] : 0.0f, y[j]);
}

void kernel_feed_sums(Stream *s, const SumRequantize *a, const Residual *r) {
    float y[BLOCK];
    for (int node = 0; node < a->in.partitions; node++) {
        SliceReader matrix = matrix_of(a->received, &a->in, node, a->in_codec, a->in_group);
        for (int64_t at = a->out.lo; at < a->out.hi; at += BLOCK) {
            sum_sources(y, matrix, a->in.bytes, a->sources, at - a->out.lo, BLOCK);
            feed(r, &a->out.bucket, node, at, y, BLOCK);
        }
    }
}

void kernel_feed_grads(Stream *s, const QuantizePartitions *a, const Residual *r) {
    float y[ROTATION_ORDER];
    int order = transform_order(a->transform);
    for (int p = 0; p < a->slots; p++) {
        for (int64_t at = a->lo; at < a->hi; at += order) {
            int64_t position = partition_position(a, p) + at;
            const Segment *segment = segment_of(a->table, position);
            transformed_grads(y, a, p, at, order, segment->logical + position - segment->start);
            feed(r, &a->bucket, p, at, y, order);
        }
    }
}

// Subtracts the n values `sent` from the residual of partition p.
static void keep_rest(const QuantizePartitions *a, const Residual *r, int64_t p, int64_t at,
                      const float *sent, int n) {
    float *values = r->values + p * a->bucket.matrix_per_rank + at;
    int64_t position = partition_position(a, p) + at;
    const Segment *segment = segment_of(a->table, position);
    for (int j = 0; !r->frozen && j < n; j++) {
        values[j] = residual_rest(values[j], sent[j], position + j - segment->start >= segment->numel);
    }
}

void kernel_keep_residual(Stream *s, const QuantizePartitions *a, const Residual *r) {
    float sent[BLOCK];
    for (int p = 0; p < a->slots; p++) {
        const uint8_t *message = outgoing_message(a->send, a->self_slot, a->self, p, &a->message);
        SliceReader matrix = matrix_of(message, &a->message, 0, a->codec, a->group);
        for (int64_t at = a->lo; at < a->hi; at += BLOCK) {
            read_slice(sent, &matrix, at - a->lo, BLOCK);
            keep_rest(a, r, p, at, sent, BLOCK);
        }
    }
}

// --- the last level -----------------------------------------------------------------------------

// Sums the squares of up to 32 values.
static float square_partial(const float *x, int n) {
    float squares[BLOCK] = {0};
    for (int i = 0; i < n; i++) squares[i] = f32_mul(x[i], x[i]);
    return tree_sum32(squares);
}

// Returns the size of the next block; the last block may be shorter.
static int block_size(int64_t rest) { return rest < BLOCK ? (int)rest : BLOCK; }
static void store_sums(const SumFinal *a, float *to, const float *x, int n) {
    for (int i = 0; i < n; i++) to[i] = a->add ? f32_add(to[i], x[i]) : x[i];
}

void kernel_sum_final(Stream *s, const SumFinal *a) {
    SliceReader matrix = matrix_of(a->received, &a->in, 0, a->codec, a->group);
    SliceReader tail = tail_of(a->received, &a->in, 0, a->tail_codec);
    int order = transform_order(a->transform);
    float x[ROTATION_ORDER];
    for (int64_t at = a->lo; at < a->hi; at += order) {
        sum_sources(x, matrix, a->in.bytes, a->sources, at - a->lo, order);
        int64_t position = a->rank * a->bucket.matrix_per_rank + at;
        const Segment *segment = segment_of(a->table, position);
        int64_t offset = position - segment->start;
        invert_block(x, a->transform, a->rotation, segment->logical + offset);
        for (int j = 0; j < order; j++) {
            if (offset + j >= segment->numel) x[j] = 0.0f;
        }
        store_sums(a, a->own.matrix + at, x, order);
        for (int j = 0; j < order; j += BLOCK) {
            a->matrix_partials[(at + j) / BLOCK] = square_partial(a->own.matrix + at + j, BLOCK);
        }
    }
    for (int64_t at = 0; at < a->in.tail_elements; at += BLOCK) {
        int n = block_size(a->in.tail_elements - at);
        sum_sources(x, tail, a->in.bytes, a->sources, at, n);
        store_sums(a, a->own.tail + at, x, n);
        a->tail_partials[at / BLOCK] = square_partial(a->own.tail + at, n);
    }
}

// --- norm and step status -----------------------------------------------------------------------

void kernel_square_partials(Stream *s, float *partials, const float *x, int64_t n) {
    for (int64_t at = 0; at < n; at += BLOCK)
        partials[at / BLOCK] = square_partial(x + at, block_size(n - at));
}

void kernel_square_weights(Stream *s, float *partials, const floatX *weights, int64_t n) {
    float x[BLOCK];
    for (int64_t at = 0; at < n; at += BLOCK) {
        int count = block_size(n - at);
        for (int i = 0; i < count; i++) x[i] = floatX_to_float(weights[at + i]);
        partials[at / BLOCK] = square_partial(x, count);
    }
}

void kernel_tree_sum(Stream *s, float *sum, float *partials, int64_t n) {
    for (int64_t stride = 1; stride < n; stride *= 2) {
        for (int64_t i = 0; i + stride < n; i += 2 * stride) {
            partials[i] = f32_add(partials[i], partials[i + stride]);
        }
    }
    *sum = n > 0 ? partials[0] : 0.0f;
}

void kernel_step_record(Stream *s, StepRecord *record, const float *piece_sums, int pieces, const float *loss,
                        const uint64_t *fault) {
    *record = step_record(piece_sums, pieces, *loss, *fault);
}

void kernel_mark_fault(Stream *s, uint64_t *fault, const uint64_t *found, const int *lost) {
    if (!*fault && !(lost && *lost)) *fault = *found;
}

void kernel_step_status(Stream *s, StepStatus *control, const StatusInputs *a) { step_status(control, a); }

// --- weights ------------------------------------------------------------------------------------

void kernel_update_shard(Stream *s, const UpdateShard *a) { update_shard_host(a, 1, NULL); }

// Sets n model weights at w to the slice's values, or adds them if they are differences.
static void apply_slice(const ApplyWeights *a, floatX *w, SliceReader slice, int64_t n) {
    float x[BLOCK];
    bool add = a->difference && codec_grouped(slice.codec);
    for (int64_t at = 0; at < n; at += BLOCK) {
        int block = block_size(n - at);
        read_slice(x, &slice, at, block);
        for (int j = 0; j < block; j++) {
            w[at + j] = floatX_from_float(add ? f32_add(floatX_to_float(w[at + j]), x[j]) : x[j]);
        }
    }
}

void kernel_apply_weights(Stream *s, const ApplyWeights *a) {
    if (!a->control->applied) return;
    const Bucket *bucket = &a->bucket;
    for (int rank = 0; rank < a->nodes * a->per_node; rank++) {
        const uint8_t *message = a->messages + gather_slot(a->nodes, a->per_node, rank) * a->message.bytes;
        floatX *matrix = a->weights + rank * bucket->matrix_per_rank;
        floatX *tail = a->weights + bucket->matrix_elements + rank * bucket->tail_per_rank;
        SliceReader codes = matrix_of(message, &a->message, 0, a->codec, a->group);
        apply_slice(a, matrix, codes, bucket->matrix_per_rank);
        apply_slice(a, tail, tail_of(message, &a->message, 0, FLOATX_CODEC), bucket->tail_per_rank);
    }
}

void kernel_keep_message(Stream *s, const StepStatus *control, uint8_t *to, const uint8_t *from, int64_t n) {
    if (control->applied) memcpy(to, from, (size_t)n);
}

// --- replicas and counts ------------------------------------------------------------------------

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
    int64_t words = seal_offset(a->bytes) / 4;
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
        if (i != a->skip) memcpy(a->messages + i * a->bytes + seal_offset(a->bytes), seal, sizeof seal);
    }
}

void kernel_check_messages(Stream *s, const SealMessages *a, uint64_t *sums, uint64_t *fault, uint64_t code) {
    for (int i = 0; i < a->count; i++) {
        uint64_t sent;
        if (i == a->skip) continue;
        memcpy(&sent, a->messages + i * a->bytes + seal_offset(a->bytes), sizeof sent);
        sums[i] = message_sum(a, i);
        if (sums[i] != sent && !*fault) *fault = code + (uint64_t)i;
    }
}

void kernel_widen(Stream *s, float *master, const floatX *weights, int64_t n) {
    for (int64_t i = 0; i < n; i++) master[i] = floatX_to_float(weights[i]);
}

// --- local steps ---------------------------------------------------------------------------------

void kernel_pseudo_gradient(Stream *s, float *gradient, const float *outer, const float *master, int64_t n) {
    for (int64_t i = 0; i < n; i++) gradient[i] = f32_sub(outer[i], master[i]);
}

void kernel_outer_step(Stream *s, float *outer, float *m, const float *gradient, float rate, float momentum,
                       int64_t n, const int *lost) {
    if (lost && *lost) return;
    for (int64_t i = 0; i < n; i++) outer[i] = outer_element(outer[i], &m[i], gradient[i], rate, momentum);
}

void kernel_mix_outer(Stream *s, float *master, const float *outer, float mix, int64_t n, const int *lost) {
    if (lost && *lost) return;
    for (int64_t i = 0; i < n; i++) master[i] = mix_element(master[i], outer[i], mix);
}

void kernel_add_weighted(Stream *s, float *sum, const float *x, float weight, bool first, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] = add_weighted(sum[i], x[i], weight, first);
}

void kernel_merge_outer(Stream *s, const MergeOuter *a) {
    uint64_t hash = 0;
    for (int64_t i = 0; i < a->place.n; i++) hash += merge_element(a, i);
    if (a->hash) *a->hash += hash;
}

void kernel_narrow(Stream *s, floatX *weights, const float *master, int64_t n) {
    for (int64_t i = 0; i < n; i++) weights[i] = floatX_from_float(master[i]);
}

void kernel_count_zeros(Stream *s, int64_t *count, const float *x, int64_t n) {
    int64_t zeros = 0;
    for (int64_t i = 0; i < n; i++) zeros += x[i] == 0.0f;
    *count += zeros;
}
