// Layout arithmetic: see layout.h.
#include "sdp4bit/layout.h"

#include <assert.h>
#include <stdlib.h>

#include "sdp4bit/layout_whole.h"

int64_t layout_alignment(int group_a, int group_b, int group_c) {
    assert(group_a >= 0 && group_b >= 0 && group_c >= 0);
    int64_t alignment = HADAMARD_ORDER;
    if (group_a) alignment = lcm64(alignment, group_a);
    if (group_b) alignment = lcm64(alignment, group_b);
    if (group_c) alignment = lcm64(alignment, group_c);
    return alignment;
}

static bool check_input(const LayoutTensor *tensors, int count, const LayoutOptions *options, Error *err) {
    if (count < 1 || options->nodes < 1 || options->per_node < 1 || options->bucket_elements < 1 ||
        options->alignment < 1 || options->chunk_alignment < 1 ||
        options->alignment % options->chunk_alignment || options->pieces < 1) {
        return usage_error(
            err, "the layout needs at least one tensor, one node, one rank and a positive bucket size");
    }
    for (int i = 0; i < count; i++) {
        const LayoutTensor *t = &tensors[i];
        bool placed = t->before >= 0 && t->before % HADAMARD_ORDER == 0 && t->after >= 0;
        if (t->numel < 1 || t->unit < (i ? tensors[i - 1].unit : 0) || !placed) {
            return usage_error(err, "tensor %d of the layout is empty or out of order", i);
        }
        for (int j = i - 1; t->matrix && j >= 0 && tensors[j].unit == t->unit; j--) {
            if (tensors[j].matrix && (tensors[j].work > 0) != (t->work > 0))
                return usage_error(err, "unit %d of the layout mixes whole and sharded matrices", t->unit);
        }
    }
    return true;
}

// Returns the number of equal parts that a bucket is divided into.
static int64_t shares(const BucketLayout *layout) { return (int64_t)layout->dp * layout->options.pieces; }

// Returns the minimum size of a bucket or chunk, below which messages would be inefficient.
static int64_t least_bucket(const BucketLayout *layout) {
    return 16 * shares(layout) * layout->options.alignment;
}

// --- buckets -------------------------------------------------------------------------------------

// Assigns units [first, end) to buckets greedily in forward order (unit_bucket), beginning with
// `bucket`. size: elements of each unit. Returns the last bucket.
static int merge_greedily(BucketLayout *layout, const int64_t *size, int first, int end, int bucket) {
    int64_t least = least_bucket(layout), filled = 0;
    int start = bucket;
    for (int u = first; u < end; u++) {
        if (filled >= least && filled + size[u] > layout->options.bucket_elements) {
            bucket++;
            filled = 0;
        }
        layout->unit_bucket[u] = bucket;
        filled += size[u];
    }
    // A last bucket below the minimum joins the one before it.
    if (bucket > start && filled < least) {
        for (int u = first; u < end; u++) {
            if (layout->unit_bucket[u] == bucket) layout->unit_bucket[u] = bucket - 1;
        }
        bucket--;
    }
    return bucket;
}

static WholeUnits whole_units(const BucketLayout *layout, const LayoutTensor *tensors, int first, int end) {
    int64_t alignment = layout->options.alignment;
    WholeUnits units = {tensors,   layout->tensors, first, end, alignment, layout->options.pieces * alignment,
                        layout->dp};
    return units;
}

// Assigns units to buckets (unit_bucket). Returns the number of buckets.
static int merge_units(BucketLayout *layout, const LayoutTensor *tensors, int count) {
    int64_t *size = xcalloc((size_t)layout->units, sizeof *size, "the bucket layout");
    bool *whole = xcalloc((size_t)layout->units, sizeof *whole, "the bucket layout");
    for (int i = 0; i < count; i++) {
        size[tensors[i].unit] += tensors[i].numel;
        whole[tensors[i].unit] |= tensors[i].work > 0;
    }
    int bucket = -1;
    for (int first = 0, end; first < layout->units; first = end) {
        for (end = first + 1; end < layout->units && whole[end] == whole[first];) end++;
        int start = bucket + 1;
        bucket = merge_greedily(layout, size, first, end, start);
        if (!whole[first]) continue;
        WholeUnits units = whole_units(layout, tensors, first, end);
        int64_t n = end - first, buckets = whole_buckets(&units, bucket - start + 1);
        for (int64_t b = 0; b < buckets; b++) {
            for (int64_t u = n * b / buckets; u < n * (b + 1) / buckets; u++)
                layout->unit_bucket[first + u] = start + (int)b;
        }
        bucket = start + (int)buckets - 1;
    }
    free(size);
    free(whole);
    return bucket + 1;
}

// Inputs of place_part for one bucket.
typedef struct Placing {
    const LayoutTensor *tensors;
    const int64_t *logical;
    int bucket;
    int *next;  // next free entry of layout->segments
} Placing;

// Places a bucket's matrices or 1-D tensors, either the counted or the uncounted ones, in order
// from `at` on. Returns the end without padding.
static int64_t place_part(BucketLayout *layout, const Placing *p, bool matrices, bool counted, int64_t at) {
    int64_t align = matrices ? layout->options.alignment : TAIL_ALIGN;
    for (int i = 0; i < layout->tensors; i++) {
        const LayoutTensor *tensor = &p->tensors[i];
        if (layout->tensor_bucket[i] != p->bucket || tensor->matrix != matrices) continue;
        if (tensor->uncounted == counted) continue;
        at = round_up64(at, align);
        Segment segment = {at, tensor->numel, p->logical[i], i};
        layout->segments[(*p->next)++] = segment;
        at += tensor->numel;
    }
    return at;
}

static bool uncounted_in(const Placing *p, const BucketLayout *layout, bool matrices) {
    for (int i = 0; i < layout->tensors; i++) {
        const LayoutTensor *tensor = &p->tensors[i];
        bool here = layout->tensor_bucket[i] == p->bucket && tensor->matrix == matrices;
        if (here && tensor->uncounted) return true;
    }
    return false;
}

// Returns the units of a bucket whose matrices are whole, or an empty range.
static WholeUnits bucket_units(const BucketLayout *layout, const Placing *p) {
    int first = layout->units, end = 0;
    for (int i = 0; i < layout->tensors; i++) {
        if (layout->tensor_bucket[i] != p->bucket || p->tensors[i].work == 0) continue;
        if (p->tensors[i].unit < first) first = p->tensors[i].unit;
        if (p->tensors[i].unit >= end) end = p->tensors[i].unit + 1;
    }
    return whole_units(layout, p->tensors, first, end);
}

// Places a bucket's whole matrices, rank by rank.
static void place_whole(BucketLayout *layout, const Placing *p, const WholeUnits *units) {
    Bucket *bucket = &layout->bucket[p->bucket];
    int *shard = xcalloc((size_t)layout->tensors, sizeof *shard, "the bucket layout");
    int *rank_of = xcalloc((size_t)layout->dp, sizeof *rank_of, "the bucket layout");
    bucket->whole = true;
    bucket->matrix_per_rank = whole_divide(units, shard);
    whole_spread(units, shard);
    bucket->matrix_elements = bucket->matrix_counted = bucket->matrix_per_rank * layout->dp;
    whole_assign(units, shard, layout->rank_work, rank_of);
    for (int rank = 0; rank < layout->dp; rank++) {
        int64_t at = rank * bucket->matrix_per_rank;
        for (int i = 0; i < layout->tensors; i++) {
            if (shard[i] < 0 || rank_of[shard[i]] != rank) continue;
            Segment segment = {at, p->tensors[i].numel, p->logical[i], i};
            layout->segments[(*p->next)++] = segment;
            at = round_up64(at + p->tensors[i].numel, layout->options.alignment);
        }
    }
    free(shard);
    free(rank_of);
}

static void place_matrices(BucketLayout *layout, const Placing *p) {
    Bucket *bucket = &layout->bucket[p->bucket];
    WholeUnits units = bucket_units(layout, p);
    bucket->first_segment = *p->next;
    if (units.first < units.end) {
        place_whole(layout, p, &units);
    } else {
        bucket->matrix_counted = place_part(layout, p, true, true, 0);
        int64_t end = place_part(layout, p, true, false, bucket->matrix_counted);
        bucket->matrix_elements = round_up64(end, shares(layout) * layout->options.alignment);
        bucket->matrix_per_rank = bucket->matrix_elements / layout->dp;
    }
    bucket->segments = *p->next - bucket->first_segment;
}

static void place_bucket(BucketLayout *layout, const Placing *p) {
    Bucket *bucket = &layout->bucket[p->bucket];
    place_matrices(layout, p);
    bucket->first_tail = *p->next;
    bucket->tail_counted = place_part(layout, p, false, true, 0);
    int64_t end = place_part(layout, p, false, false, bucket->tail_counted);
    bucket->tails = *p->next - bucket->first_tail;
    bucket->tail_elements = round_up64(end, shares(layout) * TAIL_ALIGN);
    bucket->tail_per_rank = bucket->tail_elements / layout->dp;
    // Padding is 0, so it may count in the norm. If all tensors count, the whole part counts.
    bucket->matrix_counted = round_up64(bucket->matrix_counted, layout->options.alignment);
    bucket->tail_counted = round_up64(bucket->tail_counted, TAIL_ALIGN);
    if (!uncounted_in(p, layout, true)) bucket->matrix_counted = bucket->matrix_elements;
    if (!uncounted_in(p, layout, false)) bucket->tail_counted = bucket->tail_elements;

    bucket->arena_start = layout->arena_elements;
    bucket->state_start = layout->shard_elements;
    // Buckets are 256-byte aligned in bf16.
    layout->arena_elements += round_up64(bucket_elements(bucket), 128);
    layout->shard_elements += round_up64(bucket_shard(bucket), 64);
    for (int i = 0; i < bucket->segments + bucket->tails; i++) {
        const Segment *segment = &layout->segments[bucket->first_segment + i];
        layout->tensor_arena[segment->tensor] = bucket->arena_start +
                                                (i < bucket->segments ? 0 : bucket->matrix_elements) +
                                                segment->start;
    }
}

bool layout_build(BucketLayout *layout, const LayoutTensor *tensors, int count, const LayoutOptions *options,
                  Error *err) {
    if (!check_input(tensors, count, options, err)) return false;
    BucketLayout fresh = {0};
    *layout = fresh;
    layout->options = *options;
    layout->dp = options->nodes * options->per_node;
    layout->tensors = count;
    layout->units = tensors[count - 1].unit + 1;
    layout->tensor_arena = xcalloc((size_t)count, sizeof(int64_t), "the tensor table");
    layout->tensor_bucket = xcalloc((size_t)count, sizeof(int), "the tensor table");
    layout->tensor_unit = xcalloc((size_t)count, sizeof(int), "the tensor table");
    layout->unit_bucket = xcalloc((size_t)layout->units, sizeof(int), "the bucket layout");
    layout->rank_work = xcalloc((size_t)layout->dp, sizeof(int64_t), "the bucket layout");
    layout->segments = xcalloc((size_t)count, sizeof(Segment), "the segment table");
    layout->segments_total = count;
    layout->buckets = merge_units(layout, tensors, count);
    layout->bucket = xcalloc((size_t)layout->buckets, sizeof(Bucket), "the bucket layout");

    int64_t *logical = xcalloc((size_t)count, sizeof(int64_t), "the tensor table");
    int64_t offset = 0;
    for (int i = 0; i < count; i++) {
        logical[i] = offset + tensors[i].before;
        offset += round_up64(tensors[i].before + tensors[i].numel + tensors[i].after, HADAMARD_ORDER);
        layout->tensor_unit[i] = tensors[i].unit;
        layout->tensor_bucket[i] = layout->unit_bucket[tensors[i].unit];
        layout->parameters += tensors[i].numel;
        if (!tensors[i].uncounted) layout->counted_parameters += tensors[i].numel;
        if (!tensors[i].matrix) layout->tail_parameters += tensors[i].numel;
    }
    int next = 0;
    for (int b = 0; b < layout->buckets; b++) {
        Placing placing = {tensors, logical, b, &next};
        place_bucket(layout, &placing);
    }
    for (int u = layout->units - 1; u >= 0; u--) layout->bucket[layout->unit_bucket[u]].first_unit = u;
    for (int u = 0; u < layout->units; u++) layout->bucket[layout->unit_bucket[u]].end_unit = u + 1;
    free(logical);
    return true;
}

void layout_free(BucketLayout *layout) {
    free(layout->bucket);
    free(layout->segments);
    free(layout->tensor_arena);
    free(layout->tensor_bucket);
    free(layout->tensor_unit);
    free(layout->unit_bucket);
    free(layout->rank_work);
    BucketLayout empty = {0};
    *layout = empty;
}

void layout_unshard(BucketLayout *whole, const BucketLayout *layout) {
    assert(whole != layout);
    *whole = *layout;
    whole->dp = whole->options.nodes = whole->options.per_node = 1;
    whole->shard_elements = 0;
    whole->bucket = xcalloc((size_t)layout->buckets, sizeof(Bucket), "the bucket layout");
    for (int b = 0; b < layout->buckets; b++) {
        Bucket *bucket = &whole->bucket[b];
        *bucket = layout->bucket[b];
        bucket->matrix_per_rank = bucket->matrix_elements;
        bucket->tail_per_rank = bucket->tail_elements;
        bucket->state_start = whole->shard_elements;
        whole->shard_elements += round_up64(bucket_shard(bucket), 64);
    }
}

int64_t layout_squares_start(const BucketLayout *layout, int b) {
    assert(b >= 0 && b <= layout->buckets);
    int64_t start = 0;
    for (int i = 0; i < b; i++) {
        const Bucket *bucket = &layout->bucket[i];
        start += round_up64(bucket->whole ? bucket->tail_per_rank : bucket_shard(bucket), 64);
    }
    return start;
}

int64_t layout_whole_start(const BucketLayout *layout, int b) {
    assert(b >= 0 && b <= layout->buckets);
    int64_t start = 0;
    for (int i = 0; i < b; i++) {
        if (layout->bucket[i].whole) start += round_up64(layout->bucket[i].matrix_per_rank, 64);
    }
    return start;
}

int64_t layout_counted(const Bucket *bucket, bool matrix, int64_t rank) {
    assert(rank >= 0);
    int64_t piece = matrix ? bucket->matrix_per_rank : bucket->tail_per_rank;
    int64_t counted = (matrix ? bucket->matrix_counted : bucket->tail_counted) - rank * piece;
    return counted < 0 ? 0 : counted > piece ? piece : counted;
}

void layout_seal(BucketLayout *layout) {
    for (int b = 0; b < layout->buckets; b++) layout->bucket[b].sealed = true;
}

MessageLayout message_layout(Codec codec, int group, int64_t elements, int partitions, Codec tail_codec,
                             int64_t tail_elements) {
    assert(elements >= 0 && tail_elements >= 0 && partitions >= 1);
    assert(!codec_grouped(tail_codec));
    assert(elements % (codec_grouped(codec) ? group : HADAMARD_ORDER) == 0);
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

// Returns the maximum of the target size, the minimum size, and all buckets but 0 (embeddings).
// Buckets of whole matrices count with their mean size per unit.
static int64_t ordinary_bucket(const BucketLayout *layout) {
    int64_t size = layout->options.bucket_elements > least_bucket(layout) ? layout->options.bucket_elements
                                                                          : least_bucket(layout);
    for (int b = 1; b < layout->buckets; b++) {
        const Bucket *bucket = &layout->bucket[b];
        int64_t units = bucket->whole ? bucket->end_unit - bucket->first_unit : 1;
        if (bucket->matrix_elements / units > size) size = bucket->matrix_elements / units;
    }
    return size;
}

int layout_chunks(const BucketLayout *layout, const Bucket *bucket, const GradFormat *format) {
    assert(format->chunks >= 0 && format->chunks <= MOST_CHUNKS);
    if (format->chunks) return format->chunks;
    int64_t size = ordinary_bucket(layout), chunks = (bucket->matrix_elements + size / 2) / size;
    return chunks < 1 ? 1 : chunks > MOST_CHUNKS ? MOST_CHUNKS : (int)chunks;
}

void layout_chunk(const BucketLayout *layout, const Bucket *bucket, int chunks, int k, int64_t *lo,
                  int64_t *hi) {
    assert(chunks >= 1 && chunks <= MOST_CHUNKS && k >= 0 && k < chunks);
    int64_t unit = layout->options.chunk_alignment;
    int64_t units = bucket->matrix_per_rank / unit;
    *lo = units * k / chunks * unit;
    *hi = units * (k + 1) / chunks * unit;
}

int layout_first_complete(const BucketLayout *layout, const Bucket *bucket, int chunks, int unit) {
    assert(chunks >= 1 && chunks <= MOST_CHUNKS);
    int64_t size = bucket->matrix_per_rank, alignment = layout->options.chunk_alignment, missing = 0;
    if (unit <= bucket->first_unit) return 0;
    // missing: where the last incomplete matrix of any shard ends, in the shard
    for (int i = 0; i < bucket->segments; i++) {
        const Segment *s = &layout->segments[bucket->first_segment + i];
        int64_t end = s->start % size + s->numel;
        if (layout->tensor_unit[s->tensor] < unit && end > missing) missing = end < size ? end : size;
    }
    if (missing == 0) return 1;
    return (int)ceil_div64(ceil_div64(missing, alignment) * chunks, size / alignment);
}

MessageLayout layout_sealed(const Bucket *bucket, MessageLayout m) {
    assert(m.bytes >= 0 && m.bytes % MESSAGE_ALIGN == 0 && m.check == 0);
    if (!bucket->sealed || m.bytes == 0) return m;  // an empty chunk sends nothing
    m.check = m.bytes;
    m.bytes += MESSAGE_ALIGN;
    return m;
}

void layout_grad_messages(const BucketLayout *layout, const Bucket *bucket, const GradFormat *format, int k,
                          MessageLayout *level1, MessageLayout *level2) {
    MessageLayout none = {0};
    int nodes = layout->options.nodes, per_node = layout->options.per_node;
    int64_t lo, hi, tail = k == 0 ? bucket->tail_per_rank : 0;
    layout_chunk(layout, bucket, layout_chunks(layout, bucket, format), k, &lo, &hi);
    *level1 = *level2 = none;
    if (per_node > 1)
        *level1 = layout_sealed(bucket, message_layout(format->intra_codec, format->intra_group, hi - lo,
                                                       nodes, format->tail_codec, tail));
    if (nodes > 1)
        *level2 = layout_sealed(bucket, message_layout(format->inter_codec, format->inter_group, hi - lo, 1,
                                                       format->tail_codec, tail));
}

MessageLayout layout_reduced_message(const Bucket *bucket) {
    return layout_sealed(bucket, message_layout(CODEC_FP32, HADAMARD_ORDER, bucket->matrix_per_rank, 1,
                                                CODEC_FP32, bucket->tail_per_rank));
}

LosslessLayout layout_lossless(const Bucket *bucket) {
    return lossless_layout(bucket->matrix_per_rank, bucket->tail_per_rank);
}

MessageLayout layout_lossless_message(const Bucket *bucket, int64_t bytes) {
    assert(bytes >= 0);
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

WireBytes layout_bucket_wire_bytes(const BucketLayout *layout, int b, const GradFormat *grad,
                                   const WeightFormat *weight) {
    assert(b >= 0 && b < layout->buckets);
    WireBytes sum = {0};
    int64_t nodes = layout->options.nodes, per_node = layout->options.per_node;
    // A single rank sends nothing. Its shard need not be a multiple of the group size.
    if (nodes * per_node == 1) return sum;
    for (int k = 0; k < layout_chunks(layout, &layout->bucket[b], grad); k++) {
        MessageLayout level1, level2;
        layout_grad_messages(layout, &layout->bucket[b], grad, k, &level1, &level2);
        sum.grad_intra += (per_node - 1) * level1.bytes;
        sum.grad_inter += (nodes - 1) * level2.bytes;
    }
    int64_t bytes = layout_weight_message(&layout->bucket[b], weight).bytes;
    if (format_is_lossless(weight)) bytes += (int64_t)sizeof(uint32_t);  // its length
    sum.weight_inter = (nodes - 1) * bytes;
    sum.weight_intra = (per_node - 1) * nodes * bytes;
    return sum;
}

// Returns the bytes per element, including its share of the group's scale.
static double element_bytes(Codec codec, int group) {
    CodecInfo info = codec_info(codec);
    return info.bits / 8.0 + (info.levels ? 4.0 / group : 0.0);
}

WireFormula layout_wire_formula(const BucketLayout *layout, const GradFormat *grad,
                                const WeightFormat *weight) {
    double nodes = layout->options.nodes, per_node = layout->options.per_node;
    double n = (double)(layout->parameters - layout->tail_parameters);
    WireFormula f;
    f.grad_intra = n * element_bytes(grad->intra_codec, grad->intra_group) * (per_node - 1) / per_node;
    f.grad_inter = n * element_bytes(grad->inter_codec, grad->inter_group) * (nodes - 1) / (nodes * per_node);
    f.weight_inter = n * element_bytes(weight->codec, weight->group) * (nodes - 1) / (nodes * per_node);
    f.weight_intra = n * element_bytes(weight->codec, weight->group) * (per_node - 1) / per_node;
    return f;
}
