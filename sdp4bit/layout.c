// Layout arithmetic: see plan.h.
#include "sdp4bit/layout.h"

#include <stdlib.h>

int64_t layout_border(int group_a, int group_b, int group_c) {
    int64_t border = HADAMARD_ORDER;
    if (group_a) border = lcm64(border, group_a);
    if (group_b) border = lcm64(border, group_b);
    if (group_c) border = lcm64(border, group_c);
    return border;
}

static bool check_input(const LayoutTensor *tensors, int count, const LayoutOptions *options, Error *err) {
    if (count < 1 || options->nodes < 1 || options->per_node < 1 || options->bucket_elements < 1 ||
        options->border < 1 || options->chunk_border < 1 || options->border % options->chunk_border ||
        options->pieces < 1) {
        return error_set(
            err, EXIT_USAGE,
            "the layout needs at least one tensor, one node, one rank and a positive bucket size");
    }
    for (int i = 0; i < count; i++) {
        const LayoutTensor *t = &tensors[i];
        bool placed = t->before >= 0 && t->before % HADAMARD_ORDER == 0 && t->after >= 0;
        if (t->numel < 1 || t->unit < (i ? tensors[i - 1].unit : 0) || !placed) {
            return error_set(err, EXIT_USAGE, "tensor %d of the layout is empty or out of order", i);
        }
    }
    return true;
}

// Equal pieces that a bucket divides into.
static int64_t shares(const BucketLayout *plan) { return (int64_t)plan->dp * plan->options.pieces; }

// Below it a bucket, and a chunk, is not worth its messages.
static int64_t least_bucket(const BucketLayout *plan) { return 16 * shares(plan) * plan->options.border; }

// Decides which units share a bucket: unit_bucket[u]. Greedy in forward order.
static int merge_units(BucketLayout *plan, const LayoutTensor *tensors, int count) {
    int64_t least = least_bucket(plan);
    int64_t *size = (int64_t *)xcalloc((size_t)plan->units, sizeof *size, "the bucket plan");
    for (int i = 0; i < count; i++) size[tensors[i].unit] += tensors[i].numel;
    int bucket = 0;
    int64_t filled = 0;
    for (int u = 0; u < plan->units; u++) {
        if (filled >= least && filled + size[u] > plan->options.bucket_elements) {
            bucket++;
            filled = 0;
        }
        plan->unit_bucket[u] = bucket;
        filled += size[u];
    }
    // A last bucket below the minimum joins the one before it.
    if (bucket > 0 && filled < least) {
        for (int u = 0; u < plan->units; u++) {
            if (plan->unit_bucket[u] == bucket) plan->unit_bucket[u] = bucket - 1;
        }
        bucket--;
    }
    free(size);
    return bucket + 1;
}

// What one bucket is made of.
typedef struct Placing {
    const LayoutTensor *tensors;
    const int64_t *logical;
    int bucket;
    int *next;  // segment
} Placing;

// Lays the matrices (or the 1-D tensors) of one bucket back to back, from `at` on: those that are
// counted, or those that are not. Returns the unpadded end.
static int64_t place_part(BucketLayout *plan, const Placing *p, bool matrices, bool counted, int64_t at) {
    int64_t align = matrices ? plan->options.border : TAIL_ALIGN;
    for (int i = 0; i < plan->tensors; i++) {
        const LayoutTensor *tensor = &p->tensors[i];
        if (plan->tensor_bucket[i] != p->bucket || tensor->matrix != matrices) continue;
        if (tensor->uncounted == counted) continue;
        at = round_up64(at, align);
        Segment segment = {at, tensor->numel, p->logical[i], i};
        plan->segments[(*p->next)++] = segment;
        at += tensor->numel;
    }
    return at;
}

static bool uncounted_in(const Placing *p, const BucketLayout *plan, bool matrices) {
    for (int i = 0; i < plan->tensors; i++) {
        const LayoutTensor *tensor = &p->tensors[i];
        bool here = plan->tensor_bucket[i] == p->bucket && tensor->matrix == matrices;
        if (here && tensor->uncounted) return true;
    }
    return false;
}

static void place_bucket(BucketLayout *plan, const Placing *p) {
    Bucket *bucket = &plan->bucket[p->bucket];
    bucket->first_segment = *p->next;
    bucket->matrix_counted = place_part(plan, p, true, true, 0);
    int64_t end = place_part(plan, p, true, false, bucket->matrix_counted);
    bucket->segments = *p->next - bucket->first_segment;
    bucket->matrix_elements = round_up64(end, shares(plan) * plan->options.border);
    bucket->matrix_per_rank = bucket->matrix_elements / plan->dp;

    bucket->first_tail = *p->next;
    bucket->tail_counted = place_part(plan, p, false, true, 0);
    end = place_part(plan, p, false, false, bucket->tail_counted);
    bucket->tails = *p->next - bucket->first_tail;
    bucket->tail_elements = round_up64(end, shares(plan) * TAIL_ALIGN);
    bucket->tail_per_rank = bucket->tail_elements / plan->dp;
    // Pads are 0 and count: so where all tensors count, all of the part does.
    bucket->matrix_counted = round_up64(bucket->matrix_counted, plan->options.border);
    bucket->tail_counted = round_up64(bucket->tail_counted, TAIL_ALIGN);
    if (!uncounted_in(p, plan, true)) bucket->matrix_counted = bucket->matrix_elements;
    if (!uncounted_in(p, plan, false)) bucket->tail_counted = bucket->tail_elements;

    bucket->arena_start = plan->arena_elements;
    bucket->state_start = plan->shard_elements;
    // Buckets start on 256 bytes of bf16
    plan->arena_elements += round_up64(bucket_elements(bucket), 128);
    plan->shard_elements += round_up64(bucket_shard(bucket), 64);
    for (int i = 0; i < bucket->segments + bucket->tails; i++) {
        const Segment *segment = &plan->segments[bucket->first_segment + i];
        plan->tensor_arena[segment->tensor] = bucket->arena_start +
                                              (i < bucket->segments ? 0 : bucket->matrix_elements) +
                                              segment->start;
    }
}

bool layout_build(BucketLayout *plan, const LayoutTensor *tensors, int count, const LayoutOptions *options,
                  Error *err) {
    if (!check_input(tensors, count, options, err)) return false;
    BucketLayout fresh = {0};
    *plan = fresh;
    plan->options = *options;
    plan->dp = options->nodes * options->per_node;
    plan->tensors = count;
    plan->units = tensors[count - 1].unit + 1;
    plan->tensor_arena = (int64_t *)xcalloc((size_t)count, sizeof(int64_t), "the tensor table");
    plan->tensor_bucket = (int *)xcalloc((size_t)count, sizeof(int), "the tensor table");
    plan->unit_bucket = (int *)xcalloc((size_t)plan->units, sizeof(int), "the bucket plan");
    plan->segments = (Segment *)xcalloc((size_t)count, sizeof(Segment), "the segment table");
    plan->segments_total = count;
    plan->buckets = merge_units(plan, tensors, count);
    plan->bucket = (Bucket *)xcalloc((size_t)plan->buckets, sizeof(Bucket), "the bucket plan");

    int64_t *logical = (int64_t *)xcalloc((size_t)count, sizeof(int64_t), "the tensor table");
    int64_t offset = 0;
    for (int i = 0; i < count; i++) {
        logical[i] = offset + tensors[i].before;
        offset += round_up64(tensors[i].before + tensors[i].numel + tensors[i].after, HADAMARD_ORDER);
        plan->tensor_bucket[i] = plan->unit_bucket[tensors[i].unit];
        plan->parameters += tensors[i].numel;
        if (!tensors[i].uncounted) plan->counted_parameters += tensors[i].numel;
        if (!tensors[i].matrix) plan->tail_parameters += tensors[i].numel;
    }
    int next = 0;
    for (int b = 0; b < plan->buckets; b++) {
        Placing placing = {tensors, logical, b, &next};
        place_bucket(plan, &placing);
    }
    for (int u = plan->units - 1; u >= 0; u--) plan->bucket[plan->unit_bucket[u]].first_unit = u;
    for (int u = 0; u < plan->units; u++) plan->bucket[plan->unit_bucket[u]].end_unit = u + 1;
    free(logical);
    return true;
}

void layout_free(BucketLayout *plan) {
    free(plan->bucket);
    free(plan->segments);
    free(plan->tensor_arena);
    free(plan->tensor_bucket);
    free(plan->unit_bucket);
    BucketLayout empty = {0};
    *plan = empty;
}

int64_t layout_counted(const Bucket *bucket, bool matrix, int64_t rank) {
    int64_t piece = matrix ? bucket->matrix_per_rank : bucket->tail_per_rank;
    int64_t counted = (matrix ? bucket->matrix_counted : bucket->tail_counted) - rank * piece;
    return counted < 0 ? 0 : counted > piece ? piece : counted;
}

void layout_seal(BucketLayout *plan) {
    for (int b = 0; b < plan->buckets; b++) plan->bucket[b].sealed = true;
}

MessageLayout message_layout(Codec codec, int group, int64_t elements, int partitions, Codec tail_codec,
                             int64_t tail_elements) {
    MessageLayout m = {0};
    m.elements = elements;
    m.partitions = partitions;
    m.tail_elements = tail_elements;
    m.groups = codec_grouped(codec) ? elements / group : 0;
    m.codes_stride = codec_bytes(codec, elements);
    m.scales_stride = m.groups * (int64_t)sizeof(float);
    m.tail_stride = codec_bytes(tail_codec, tail_elements);
    m.scales = round_up64(m.codes_stride * partitions, MESSAGE_ALIGN);
    m.tail = m.scales + round_up64(m.scales_stride * partitions, MESSAGE_ALIGN);
    m.bytes = m.tail + round_up64(m.tail_stride * partitions, MESSAGE_ALIGN);
    return m;
}

// What all buckets but the embeddings', which come first, ask of the buffers; at least what a
// bucket is merged to.
static int64_t ordinary_bucket(const BucketLayout *plan) {
    int64_t size = plan->options.bucket_elements > least_bucket(plan) ? plan->options.bucket_elements
                                                                      : least_bucket(plan);
    for (int b = 1; b < plan->buckets; b++) {
        if (plan->bucket[b].matrix_elements > size) size = plan->bucket[b].matrix_elements;
    }
    return size;
}

int layout_chunks(const BucketLayout *plan, const Bucket *bucket, const GradFormat *format) {
    if (format->chunks) return format->chunks;
    int64_t size = ordinary_bucket(plan), chunks = (bucket->matrix_elements + size / 2) / size;
    return chunks < 1 ? 1 : chunks > MOST_CHUNKS ? MOST_CHUNKS : (int)chunks;
}

void layout_chunk(const BucketLayout *plan, const Bucket *bucket, int chunks, int k, int64_t *lo,
                  int64_t *hi) {
    int64_t unit = plan->options.chunk_border;
    int64_t units = bucket->matrix_per_rank / unit;
    *lo = units * k / chunks * unit;
    *hi = units * (k + 1) / chunks * unit;
}

MessageLayout layout_sealed(const Bucket *bucket, MessageLayout m) {
    if (!bucket->sealed || m.bytes == 0) return m;  // an empty chunk sends nothing
    m.check = m.bytes;
    m.bytes += MESSAGE_ALIGN;
    return m;
}

void layout_grad_messages(const BucketLayout *plan, const Bucket *bucket, const GradFormat *format, int k,
                          MessageLayout *level1, MessageLayout *level2) {
    MessageLayout none = {0};
    int nodes = plan->options.nodes, per_node = plan->options.per_node;
    int64_t lo, hi, tail = k == 0 ? bucket->tail_per_rank : 0;
    layout_chunk(plan, bucket, layout_chunks(plan, bucket, format), k, &lo, &hi);
    *level1 = *level2 = none;
    if (per_node > 1)
        *level1 = layout_sealed(bucket, message_layout(format->intra_codec, format->intra_group, hi - lo,
                                                       nodes, format->tail_codec, tail));
    if (nodes > 1)
        *level2 = layout_sealed(bucket, message_layout(format->inter_codec, format->inter_group, hi - lo, 1,
                                                       format->tail_codec, tail));
}

LosslessLayout layout_lossless(const Bucket *bucket) {
    return lossless_layout(bucket->matrix_per_rank, bucket->tail_per_rank);
}

MessageLayout layout_lossless_message(const Bucket *bucket, int64_t bytes) {
    MessageLayout m = {0};
    m.elements = bucket->matrix_per_rank;
    m.tail_elements = bucket->tail_per_rank;
    m.partitions = 1;
    m.bytes = bytes;
    return layout_sealed(bucket, m);
}

MessageLayout layout_weight_message(const Bucket *bucket, const WeightFormat *format) {
    if (format_is_lossless(format)) return layout_lossless_message(bucket, layout_lossless(bucket).most);
    return layout_sealed(bucket, message_layout(format->codec, format->group, bucket->matrix_per_rank, 1,
                                                FLOATX_CODEC, bucket->tail_per_rank));
}

WireBytes layout_bucket_wire_bytes(const BucketLayout *plan, int b, const GradFormat *grad,
                                   const WeightFormat *weight) {
    WireBytes sum = {0};
    int64_t nodes = plan->options.nodes, per_node = plan->options.per_node;
    for (int k = 0; k < layout_chunks(plan, &plan->bucket[b], grad); k++) {
        MessageLayout level1, level2;
        layout_grad_messages(plan, &plan->bucket[b], grad, k, &level1, &level2);
        sum.grad_intra += (per_node - 1) * level1.bytes;
        sum.grad_inter += (nodes - 1) * level2.bytes;
    }
    int64_t bytes = layout_weight_message(&plan->bucket[b], weight).bytes;
    if (format_is_lossless(weight)) bytes += (int64_t)sizeof(uint32_t);  // its length
    sum.weight_inter = (nodes - 1) * bytes;
    sum.weight_intra = (per_node - 1) * nodes * bytes;
    return sum;
}

WireBytes layout_wire_bytes(const BucketLayout *plan, const GradFormat *grad, const WeightFormat *weight) {
    WireBytes sum = {0};
    for (int b = 0; b < plan->buckets; b++) {
        WireBytes bucket = layout_bucket_wire_bytes(plan, b, grad, weight);
        sum.grad_intra += bucket.grad_intra;
        sum.grad_inter += bucket.grad_inter;
        sum.weight_intra += bucket.weight_intra;
        sum.weight_inter += bucket.weight_inter;
    }
    return sum;
}

// Bytes per element with its share of the scale.
static double element_bytes(Codec codec, int group) {
    CodecInfo info = codec_info(codec);
    return info.bits / 8.0 + (info.levels ? 4.0 / group : 0.0);
}

WireFormula layout_wire_formula(const BucketLayout *plan, const GradFormat *grad,
                                const WeightFormat *weight) {
    double nodes = plan->options.nodes, per_node = plan->options.per_node;
    double n = (double)(plan->parameters - plan->tail_parameters);
    WireFormula f;
    f.grad_intra = n * element_bytes(grad->intra_codec, grad->intra_group) * (per_node - 1) / per_node;
    f.grad_inter = n * element_bytes(grad->inter_codec, grad->inter_group) * (nodes - 1) / (nodes * per_node);
    f.weight_inter = n * element_bytes(weight->codec, weight->group) * (nodes - 1) / (nodes * per_node);
    f.weight_intra = n * element_bytes(weight->codec, weight->group) * (per_node - 1) / per_node;
    return f;
}
