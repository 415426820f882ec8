// The bucket layout for random tensor lists, data-parallel shapes and group sizes: nothing
// overlaps, groups never mix tensors, shard and chunk boundaries are valid, sections are inside
// their messages, and byte counts equal independent formulas.
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/base/dtype.h"
#include "sdp4bit/layout.h"
#include "test/wire_bytes.h"

// A tensor that model parallelism does not split.
#define MATRIX(NUMEL, UNIT) \
    { .numel = (NUMEL), .matrix = true, .unit = (UNIT) }
#define VECTOR(NUMEL, UNIT) \
    { .numel = (NUMEL), .matrix = false, .unit = (UNIT) }

enum { MOST_TENSORS = 24, TRIALS = 300 };

// Pseudo-random integers in [low, high].
typedef struct Dice {
    uint32_t trial, drawn;
} Dice;

static int64_t roll(Dice *dice, int64_t low, int64_t high) {
    Philox4 r = philox4x32_10(dice->trial, 5, dice->drawn++, 0, 0, 0);
    uint64_t wide = (uint64_t)r.v[0] << 32 | r.v[1];
    return low + (int64_t)(wide % (uint64_t)(high - low + 1));
}

typedef struct Case {
    LayoutTensor tensors[MOST_TENSORS];
    int count;
    LayoutOptions options;
    GradFormat grad;
    WeightFormat weight;
    BucketLayout layout;
} Case;

static Codec roll_codec(Dice *dice) { return (Codec)roll(dice, 0, CODECS - 1); }

static void random_tensors(Case *c, Dice *dice) {
    c->count = (int)roll(dice, 1, MOST_TENSORS);
    int unit = 0;
    for (int i = 0; i < c->count; i++) {
        LayoutTensor *t = &c->tensors[i];
        t->matrix = roll(dice, 0, 2) > 0;
        t->numel = t->matrix ? roll(dice, 1, 30000) : roll(dice, 1, 400);
        unit += i > 0 && roll(dice, 0, 2) == 0;
        t->unit = unit;
    }
}

static Case *random_case(uint32_t trial) {
    static const int groups[] = {32, 64, 96, 128, 160, 512};
    Dice dice = {trial, 0};
    Case *c = (Case *)xcalloc(1, sizeof *c, "a case");
    random_tensors(c, &dice);
    c->grad.intra_codec = roll_codec(&dice);
    c->grad.inter_codec = roll_codec(&dice);
    c->grad.tail_codec = (Codec)roll(&dice, CODEC_FP32, CODEC_BF16);
    c->grad.intra_group = groups[roll(&dice, 0, 5)];
    c->grad.inter_group = groups[roll(&dice, 0, 5)];
    c->grad.chunks = (int)roll(&dice, 0, 9);  // 0: chosen by the layout
    c->weight.codec = roll_codec(&dice);
    c->weight.group = groups[roll(&dice, 0, 5)];
    c->options.nodes = (int)roll(&dice, 1, 5);
    c->options.per_node = (int)roll(&dice, 1, 5);
    c->options.chunk_alignment = layout_alignment(c->grad.intra_group, c->grad.inter_group, 0);
    c->options.alignment = layout_alignment(c->grad.intra_group, c->grad.inter_group, c->weight.group);
    c->options.bucket_elements = roll(&dice, 1, 200000);
    c->options.pieces = 1;
    Error err;
    assert_true(layout_build(&c->layout, c->tensors, c->count, &c->options, &err));
    return c;
}

static void free_case(Case *c) {
    layout_free(&c->layout);
    free(c);
}

// --- positions of tensors -----------------------------------------------------------------------

// Every tensor is in exactly one segment of its unit's bucket, in tensor order. No element of the
// arena belongs to two tensors.
static void check_tensors(const Case *c) {
    const BucketLayout *layout = &c->layout;
    uint8_t *used = (uint8_t *)xcalloc((size_t)layout->arena_elements, 1, "a map");
    int *seen = (int *)xcalloc((size_t)c->count, sizeof *seen, "a map");
    for (int b = 0; b < layout->buckets; b++) {
        const Bucket *bucket = &layout->bucket[b];
        assert_int_equal(bucket->first_tail, bucket->first_segment + bucket->segments);
        for (int s = 0; s < bucket->segments + bucket->tails; s++) {
            const Segment *segment = &layout->segments[bucket->first_segment + s];
            const LayoutTensor *tensor = &c->tensors[segment->tensor];
            bool matrix = s < bucket->segments;
            int64_t length = matrix ? bucket->matrix_elements : bucket->tail_elements,
                    base = bucket->arena_start + (matrix ? 0 : bucket->matrix_elements);
            seen[segment->tensor]++;
            assert_int_equal(tensor->matrix, matrix);
            assert_int_equal(tensor->numel, segment->numel);
            assert_int_equal(layout->tensor_bucket[segment->tensor], b);
            assert_int_equal(layout->unit_bucket[tensor->unit], b);
            assert_true(tensor->unit >= bucket->first_unit && tensor->unit < bucket->end_unit);
            assert_int_equal(layout->tensor_arena[segment->tensor], base + segment->start);
            assert_int_equal(segment->start % (matrix ? c->options.alignment : TAIL_ALIGN), 0);
            assert_true(segment->start >= 0 && segment->start + segment->numel <= length);
            for (int64_t i = 0; i < segment->numel; i++)
                assert_int_equal(used[base + segment->start + i]++, 0);
        }
    }
    for (int i = 0; i < c->count; i++) assert_int_equal(seen[i], 1);
    free(used);
    free(seen);
}

// For any shape and group size, logical offsets follow tensor order, and each tensor's size is
// rounded up to 32.
static void check_logical(const Case *c) {
    int64_t expected[MOST_TENSORS], at = 0, parameters = 0, tails = 0;
    for (int i = 0; i < c->count; i++) {
        expected[i] = at;
        at += (c->tensors[i].numel + 31) / 32 * 32;
        parameters += c->tensors[i].numel;
        tails += c->tensors[i].matrix ? 0 : c->tensors[i].numel;
    }
    for (int s = 0; s < c->layout.segments_total; s++)
        assert_int_equal(c->layout.segments[s].logical, expected[c->layout.segments[s].tensor]);
    assert_int_equal(c->layout.segments_total, c->count);
    assert_int_equal(c->layout.parameters, parameters);
    assert_int_equal(c->layout.tail_parameters, tails);
}

// No group of any of the three group sizes contains elements of two tensors or of two shards.
static void check_groups(const Case *c) {
    int sizes[3] = {c->grad.intra_group, c->grad.inter_group, c->weight.group};
    for (int b = 0; b < c->layout.buckets; b++) {
        const Bucket *bucket = &c->layout.bucket[b];
        for (int k = 0; k < 3; k++) {
            assert_int_equal(bucket->matrix_per_rank % sizes[k], 0);
            int64_t last = -1;
            for (int s = 0; s < bucket->segments; s++) {
                const Segment *segment = &c->layout.segments[bucket->first_segment + s];
                assert_true(segment->start / sizes[k] > last);
                last = (segment->start + segment->numel - 1) / sizes[k];
            }
        }
    }
}

static void check_buckets(const Case *c) {
    const BucketLayout *layout = &c->layout;
    int64_t arena = 0, shard = 0;
    int unit = 0;
    assert_int_equal(layout->dp, c->options.nodes * c->options.per_node);
    for (int b = 0; b < layout->buckets; b++) {
        const Bucket *bucket = &layout->bucket[b];
        assert_int_equal(bucket->first_unit, unit);
        unit = bucket->end_unit;
        assert_true(bucket->arena_start >= arena && bucket->arena_start % 128 == 0);
        assert_true(bucket->state_start >= shard && bucket->state_start % 64 == 0);
        assert_int_equal(bucket->matrix_elements, bucket->matrix_per_rank * layout->dp);
        assert_int_equal(bucket->tail_elements, bucket->tail_per_rank * layout->dp);
        assert_int_equal(bucket->matrix_per_rank % c->options.alignment, 0);
        assert_int_equal(bucket->tail_per_rank % TAIL_ALIGN, 0);
        arena = bucket->arena_start + bucket->matrix_elements + bucket->tail_elements;
        shard = bucket->state_start + bucket->matrix_per_rank + bucket->tail_per_rank;
    }
    assert_int_equal(unit, layout->units);
    assert_true(layout->arena_elements >= arena && layout->arena_elements < arena + 128);
    assert_true(layout->shard_elements >= shard && layout->shard_elements < shard + 64);
}

// Units are merged to buckets up to the target size. If there are several buckets, each has at
// least 16 x dp x alignment elements.
static void check_bucket_sizes(const Case *c) {
    const BucketLayout *layout = &c->layout;
    int64_t least = 16 * (int64_t)layout->dp * c->options.alignment;
    for (int b = 0; b < layout->buckets; b++) {
        int64_t elements = 0, last_unit = 0;
        for (int i = 0; i < c->count; i++) {
            if (layout->tensor_bucket[i] != b) continue;
            elements += c->tensors[i].numel;
            if (c->tensors[i].unit == layout->bucket[b].end_unit - 1) last_unit += c->tensors[i].numel;
        }
        if (layout->buckets > 1) assert_true(elements >= least);
        // A bucket gets another unit only if it is below the minimum or if the unit fits.
        if (b < layout->buckets - 1)
            assert_true(elements - last_unit < least || elements <= c->options.bucket_elements);
    }
}

static void test_layout(void **state) {
    int several = 0, pads = 0;
    for (uint32_t trial = 0; trial < TRIALS; trial++) {
        Case *c = random_case(trial);
        check_tensors(c);
        check_logical(c);
        check_groups(c);
        check_buckets(c);
        check_bucket_sizes(c);
        several += c->layout.buckets > 1;
        pads += c->layout.arena_elements > c->layout.parameters;
        free_case(c);
    }
    assert_true(several > TRIALS / 20 && pads > TRIALS / 2);  // enough nontrivial cases
}

// The order of tensors and the offsets of rounding bits do not depend on the data-parallel shape.
static void test_logical_offsets_independent_of_shape(void **state) {
    LayoutTensor tensors[] = {MATRIX(1000, 0), VECTOR(33, 0), MATRIX(64, 1), VECTOR(5, 1)};
    static const int64_t expected[] = {0, 1024, 1088, 1152};
    for (int nodes = 1; nodes <= 3; nodes++) {
        LayoutOptions options = {nodes, 2, 2048, 128, 1, 1};
        BucketLayout layout;
        assert_true(layout_build(&layout, tensors, 4, &options, NULL));
        for (int s = 0; s < 4; s++)
            assert_int_equal(layout.segments[s].logical, expected[layout.segments[s].tensor]);
        layout_free(&layout);
    }
}

// Parts of split tensors have the logical offsets of the unsplit tensor. Tensors that other ranks
// count come last.
static void test_parts_of_tensors(void **state) {
    LayoutTensor tensors[] = {MATRIX(1000, 0), VECTOR(33, 0), MATRIX(64, 0), VECTOR(5, 0), MATRIX(96, 0)};
    tensors[0].before = 2048, tensors[0].after = 24;
    tensors[1].uncounted = tensors[2].uncounted = true;
    static const int64_t logical[] = {2048, 3072, 3136, 3200, 3232}, start[] = {0, 8, 1152, 0, 1024};
    LayoutOptions options = {1, 2, 128, 128, 1, 1};
    BucketLayout layout;
    assert_true(layout_build(&layout, tensors, 5, &options, NULL));
    for (int s = 0; s < 5; s++) {
        assert_int_equal(layout.segments[s].logical, logical[layout.segments[s].tensor]);
        assert_int_equal(layout.segments[s].start, start[layout.segments[s].tensor]);
    }
    assert_int_equal(layout.parameters, 1198);
    assert_int_equal(layout.counted_parameters, 1101);
    const Bucket *b = &layout.bucket[0];
    assert_int_equal(b->matrix_per_rank, 640);
    assert_int_equal(layout_counted(b, true, 0), 640);
    assert_int_equal(layout_counted(b, true, 1), 1152 - 640);
    assert_int_equal(b->tail_per_rank, 24);
    assert_int_equal(layout_counted(b, false, 0), 8);
    assert_int_equal(layout_counted(b, false, 1), 0);
    layout_free(&layout);
    tensors[0].before = 16;  // would split a block of random numbers
    assert_false(layout_build(&layout, tensors, 5, &options, NULL));
}

// The layout without sharding has the same positions in the arena and one shard per bucket.
static void test_unsharded_layouts(void **state) {
    for (uint32_t trial = 0; trial < TRIALS; trial++) {
        Case *c = random_case(trial);
        int64_t at = 0;
        BucketLayout whole;
        layout_unshard(&whole, &c->layout);
        assert_int_equal(whole.dp, 1);
        for (int b = 0; b < whole.buckets; b++) {
            const Bucket *bucket = &whole.bucket[b], *sharded = &c->layout.bucket[b];
            assert_int_equal(bucket->arena_start, sharded->arena_start);
            assert_int_equal(bucket_shard(bucket), bucket_elements(sharded));
            assert_int_equal(layout_counted(bucket, true, 0), sharded->matrix_counted);
            assert_true(bucket->state_start >= at && bucket->state_start % 64 == 0);
            at = bucket->state_start + bucket_shard(bucket);
        }
        assert_true(whole.shard_elements >= at && whole.shard_elements < at + 64);
        free(whole.bucket);
        free_case(c);
    }
}

// --- chunks and messages ------------------------------------------------------------------------

static void test_chunks_cover_the_shard_once(void **state) {
    for (uint32_t trial = 0; trial < TRIALS; trial++) {
        Case *c = random_case(trial);
        for (int b = 0; b < c->layout.buckets; b++) {
            for (int chunks = 1; chunks <= 70; chunks = chunks * 2 + 1) {
                int64_t at = 0, smallest = INT64_MAX, largest = 0;
                for (int k = 0; k < chunks; k++) {
                    int64_t lo, hi;
                    layout_chunk(&c->layout, &c->layout.bucket[b], chunks, k, &lo, &hi);
                    assert_int_equal(lo, at);
                    assert_true(hi >= lo);
                    assert_int_equal(lo % c->options.chunk_alignment, 0);
                    assert_int_equal(hi % c->options.chunk_alignment, 0);
                    smallest = hi - lo < smallest ? hi - lo : smallest;
                    largest = hi - lo > largest ? hi - lo : largest;
                    at = hi;
                }
                assert_int_equal(at, c->layout.bucket[b].matrix_per_rank);
                assert_true(largest - smallest <= c->options.chunk_alignment);
            }
        }
        free_case(c);
    }
}

// Returns the lowest unit that a chunk contains in any shard; INT_MAX if it contains only padding.
static int lowest_unit(const Case *c, const Bucket *bucket, int chunks, int k) {
    int lowest = k == 0 ? bucket->first_unit : INT_MAX;  // chunk 0 has the tail
    int64_t lo, hi;
    layout_chunk(&c->layout, bucket, chunks, k, &lo, &hi);
    for (int i = 0; i < bucket->segments; i++) {
        const Segment *s = &c->layout.segments[bucket->first_segment + i];
        for (int64_t rank = 0; rank < c->layout.dp; rank++) {
            int64_t shard = rank * bucket->matrix_per_rank, from = shard + lo, to = shard + hi;
            bool overlaps = lo < hi && s->start < to && from < s->start + s->numel;
            if (overlaps && c->tensors[s->tensor].unit < lowest) lowest = c->tensors[s->tensor].unit;
        }
    }
    return lowest;
}

// The last chunks are complete as soon as all of their units are, and no earlier.
static void test_complete_chunks(void **state) {
    int partial = 0;
    for (uint32_t trial = 0; trial < TRIALS; trial++) {
        Case *c = random_case(trial);
        for (int b = 0; b < c->layout.buckets; b++) {
            const Bucket *bucket = &c->layout.bucket[b];
            for (int chunks = 1; chunks <= 70; chunks = chunks * 2 + 1) {
                for (int unit = bucket->first_unit; unit <= bucket->end_unit; unit++) {
                    int first = chunks;
                    while (first > 0 && lowest_unit(c, bucket, chunks, first - 1) >= unit) first--;
                    assert_int_equal(layout_first_complete(&c->layout, bucket, chunks, unit), first);
                    partial += first > 0 && first < chunks;
                }
            }
        }
        free_case(c);
    }
    assert_true(partial > 1000);
}

// By default, chunks are about as large as an ordinary bucket and never tiny. A requested number of
// chunks applies to every bucket.
static void test_automatic_chunks(void **state) {
    GradFormat left = {CODEC_INT8, CODEC_INT4, 128, 128, CODEC_BF16, true, ROUND_STOCHASTIC, 0}, given = left;
    given.chunks = 3;
    int cut = 0;
    for (uint32_t trial = 0; trial < TRIALS; trial++) {
        Case *c = random_case(trial);
        int64_t ranks = c->layout.dp, least = 16 * ranks * c->options.alignment,
                target = c->options.bucket_elements > least ? c->options.bucket_elements : least;
        for (int b = 1; b < c->layout.buckets; b++)
            target = c->layout.bucket[b].matrix_elements > target ? c->layout.bucket[b].matrix_elements
                                                                  : target;
        for (int b = 0; b < c->layout.buckets; b++) {
            const Bucket *bucket = &c->layout.bucket[b];
            int chunks = layout_chunks(&c->layout, bucket, &left);
            assert_int_equal(layout_chunks(&c->layout, bucket, &given), 3);
            assert_true(chunks >= 1 &&
                        (chunks == 1 || 2 * bucket->matrix_elements >= (2 * chunks - 1) * (target - 1)));
            assert_true(b == 0 || chunks == 1);
            cut += chunks > 1;
            for (int k = 0; k < chunks; k++) {
                int64_t lo, hi;
                layout_chunk(&c->layout, bucket, chunks, k, &lo, &hi);
                assert_true(2 * (hi - lo) * ranks <= 3 * target + 2 * ranks * c->options.chunk_alignment);
            }
        }
        free_case(c);
    }
    assert_true(cut > 10);
    // For the 125M model on 2 x 2 ranks, the embeddings (40.2 M elements) get two chunks, a bucket
    // of three layers (21.2 M) gets one. A layer above the target size, as at 1.3B, is not split
    // either.
    LayoutTensor tensors[] = {MATRIX(38633472, 0), MATRIX(1572864, 0), MATRIX(21233664, 1), VECTOR(29952, 1)};
    LayoutOptions options = {2,        2, layout_alignment(128, 128, 2048), layout_alignment(128, 128, 0),
                             25000000, 1};
    BucketLayout layout;
    assert_true(layout_build(&layout, tensors, 4, &options, NULL));
    assert_int_equal(layout.buckets, 2);
    assert_int_equal(layout_chunks(&layout, &layout.bucket[0], &left), 2);
    assert_int_equal(layout_chunks(&layout, &layout.bucket[1], &left), 1);
    layout_free(&layout);
    options.bucket_elements = 10000000;
    assert_true(layout_build(&layout, tensors, 4, &options, NULL));
    assert_int_equal(layout_chunks(&layout, &layout.bucket[0], &left), 2);
    assert_int_equal(layout_chunks(&layout, &layout.bucket[1], &left), 1);
    layout_free(&layout);
    // The target size is tiny, or a tensor is huge.
    LayoutTensor huge = MATRIX((int64_t)1 << 40, 0);
    options.bucket_elements = 1;
    assert_true(layout_build(&layout, &huge, 1, &options, NULL));
    assert_int_equal(layout_chunks(&layout, &layout.bucket[0], &left), MOST_CHUNKS);
    layout_free(&layout);
}

// Codes, scales and tails of all partitions are inside their sections and aligned for their type.
// Sections do not overlap and are MESSAGE_ALIGN-aligned.
static void check_layout(MessageLayout m, Codec codec, int group, int64_t elements, int partitions,
                         Codec tail_codec, int64_t tail_elements) {
    static const int64_t bytes_of_8[CODECS] = {
        [CODEC_FP32] = 32, [CODEC_BF16] = 16, [CODEC_INT8] = 8, [CODEC_INT4] = 4,
        [CODEC_EDEN4] = 4, [CODEC_EDEN3] = 3, [CODEC_EDEN2] = 2};
    assert_int_not_equal(bytes_of_8[codec], 0);
    bool grouped = codec != CODEC_FP32 && codec != CODEC_BF16;
    assert_int_equal(m.partitions, partitions);
    assert_int_equal(m.elements, elements);
    assert_int_equal(m.tail_elements, tail_elements);
    assert_int_equal(m.groups, grouped ? elements / group : 0);
    assert_int_equal(m.codes_stride, elements / 8 * bytes_of_8[codec]);
    assert_int_equal(m.scales_stride, 4 * m.groups);
    assert_int_equal(m.tail_stride, tail_elements / 8 * bytes_of_8[tail_codec]);
    assert_true(m.codes_stride * partitions <= m.scales &&
                m.scales < m.codes_stride * partitions + MESSAGE_ALIGN);
    assert_true(m.scales + m.scales_stride * partitions <= m.tail &&
                m.tail < m.scales + m.scales_stride * partitions + MESSAGE_ALIGN);
    assert_true(m.tail + m.tail_stride * partitions <= m.bytes &&
                m.bytes < m.tail + m.tail_stride * partitions + MESSAGE_ALIGN);
    assert_int_equal((m.scales | m.tail | m.bytes) % MESSAGE_ALIGN, 0);
    for (int i = 0; i < partitions; i++) {
        MessageSections at = message_sections(&m, i);
        assert_int_equal(at.codes, i * m.codes_stride);
        assert_int_equal(at.scales, m.scales + i * m.scales_stride);
        assert_int_equal(at.tail, m.tail + i * m.tail_stride);
    }
}

// Checks that a level with one rank sends no message. Compares fields, because struct padding is
// undefined.
static void check_no_layout(MessageLayout m) {
    assert_int_equal(m.elements | m.groups | m.tail_elements | m.partitions, 0);
    assert_int_equal(m.codes_stride | m.scales_stride | m.tail_stride, 0);
    assert_int_equal(m.scales | m.tail | m.bytes | m.check, 0);
}

static void test_message_layouts(void **state) {
    for (uint32_t trial = 0; trial < TRIALS; trial++) {
        Case *c = random_case(trial);
        for (int b = 0; b < c->layout.buckets; b++) {
            const Bucket *bucket = &c->layout.bucket[b];
            int chunks = layout_chunks(&c->layout, bucket, &c->grad);
            for (int k = 0; k < chunks; k++) {
                MessageLayout one, two;
                int64_t lo, hi, tail = k == 0 ? bucket->tail_per_rank : 0;
                layout_chunk(&c->layout, bucket, chunks, k, &lo, &hi);
                layout_grad_messages(&c->layout, bucket, &c->grad, k, &one, &two);
                if (c->options.per_node > 1) {
                    check_layout(one, c->grad.intra_codec, c->grad.intra_group, hi - lo, c->options.nodes,
                                 c->grad.tail_codec, tail);
                } else {
                    check_no_layout(one);
                }
                if (c->options.nodes > 1) {
                    check_layout(two, c->grad.inter_codec, c->grad.inter_group, hi - lo, 1,
                                 c->grad.tail_codec, tail);
                } else {
                    check_no_layout(two);
                }
            }
            check_layout(layout_weight_message(bucket, &c->weight), c->weight.codec, c->weight.group,
                         bucket->matrix_per_rank, 1, FLOATX_CODEC, bucket->tail_per_rank);
        }
        free_case(c);
    }
}

// --- bytes on the wire --------------------------------------------------------------------------

static int64_t up16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// Computes the bytes of codes, scales and tails from element counts.
static int64_t message_bytes(int bits, int group, int64_t elements, int64_t copies, int tail_bits,
                             int64_t tail) {
    int64_t groups = bits < 16 ? elements / group : 0;
    return up16(copies * elements * bits / 8) + up16(copies * groups * 4) +
           up16(copies * tail * tail_bits / 8);
}

static int bits_of(Codec codec) {
    static const int bits[CODECS] = {[CODEC_FP32] = 32, [CODEC_BF16] = 16, [CODEC_INT8] = 8, [CODEC_INT4] = 4,
                                     [CODEC_EDEN4] = 4, [CODEC_EDEN3] = 3, [CODEC_EDEN2] = 2};
    return bits[codec];
}

// Returns the requested number of chunks, or 1. If none is requested, the first bucket gets the
// number with which its chunk size is closest to the largest of three sizes: the largest other
// bucket, the target size of buckets, and 16 alignment units per rank.
static int64_t expected_chunks(const Case *c, int b) {
    int64_t size = 16 * c->options.nodes * c->options.per_node * c->options.alignment, chunks = 1;
    if (c->grad.chunks) return c->grad.chunks;
    if (size < c->options.bucket_elements) size = c->options.bucket_elements;
    for (int other = 1; other < c->layout.buckets; other++)
        size = c->layout.bucket[other].matrix_elements > size ? c->layout.bucket[other].matrix_elements
                                                              : size;
    while (b == 0 && (2 * chunks + 1) * size + size % 2 <= 2 * c->layout.bucket[b].matrix_elements) chunks++;
    return chunks;
}

static WireBytes expected_bytes(const Case *c) {
    WireBytes sum = {0};
    int64_t nodes = c->options.nodes, per_node = c->options.per_node, ranks = nodes * per_node;
    for (int b = 0; b < c->layout.buckets; b++) {
        int64_t matrix = c->layout.bucket[b].matrix_elements / ranks,
                tail = c->layout.bucket[b].tail_elements / ranks, units = matrix / c->options.chunk_alignment;
        int64_t chunks = expected_chunks(c, b);
        for (int64_t k = 0; k < chunks; k++) {
            int64_t n = ((k + 1) * units / chunks - k * units / chunks) * c->options.chunk_alignment,
                    t = k ? 0 : tail;
            int tail_bits = bits_of(c->grad.tail_codec);
            sum.grad_intra += (per_node - 1) * message_bytes(bits_of(c->grad.intra_codec),
                                                             c->grad.intra_group, n, nodes, tail_bits, t);
            sum.grad_inter += (nodes - 1) * message_bytes(bits_of(c->grad.inter_codec), c->grad.inter_group,
                                                          n, 1, tail_bits, t);
        }
        int64_t own = message_bytes(bits_of(c->weight.codec), c->weight.group, matrix, 1,
                                    bits_of(FLOATX_CODEC), tail);
        sum.weight_inter += (nodes - 1) * own;
        sum.weight_intra += (per_node - 1) * nodes * own;
    }
    return sum;
}

static void test_wire_bytes(void **state) {
    for (uint32_t trial = 0; trial < TRIALS; trial++) {
        Case *c = random_case(trial);
        WireBytes got = layout_wire_bytes(&c->layout, &c->grad, &c->weight), expected = expected_bytes(c);
        assert_int_equal(got.grad_intra, expected.grad_intra);
        assert_int_equal(got.grad_inter, expected.grad_inter);
        assert_int_equal(got.weight_intra, expected.weight_intra);
        assert_int_equal(got.weight_inter, expected.weight_inter);
        // The formulas ignore tails and padding, so they are a lower bound.
        WireFormula f = layout_wire_formula(&c->layout, &c->grad, &c->weight);
        assert_true(f.grad_intra <= (double)got.grad_intra + 1e-6 &&
                    f.grad_inter <= (double)got.grad_inter + 1e-6);
        assert_true(f.weight_intra <= (double)got.weight_intra + 1e-6 &&
                    f.weight_inter <= (double)got.weight_inter + 1e-6);
        free_case(c);
    }
}

// If there is no padding and there are no tails, the bytes equal the paper's formulas.
static void test_wire_bytes_equal_formulas(void **state) {
    for (int nodes = 1; nodes <= 4; nodes++) {
        for (int per_node = 1; per_node <= 8; per_node *= 2) {
            GradFormat grad = {CODEC_INT8, CODEC_INT4, 128, 512, CODEC_BF16, true, ROUND_STOCHASTIC, 1};
            WeightFormat weight = {CODEC_INT4, 2048, true, ROUND_NEAREST};
            // With 4 x 2048 elements per rank every scale section is a multiple of MESSAGE_ALIGN.
            int64_t unit = (int64_t)nodes * per_node * 4 * 2048;
            LayoutTensor tensors[] = {MATRIX(unit, 0), MATRIX(3 * unit, 1), MATRIX(2 * unit, 2)};
            LayoutOptions options = {
                nodes, per_node, layout_alignment(128, 512, 2048), layout_alignment(128, 512, 0), 1, 1};
            BucketLayout layout;
            assert_true(layout_build(&layout, tensors, 3, &options, NULL));
            WireBytes bytes = layout_wire_bytes(&layout, &grad, &weight);
            WireFormula formula = layout_wire_formula(&layout, &grad, &weight);
            assert_true((double)bytes.grad_intra == formula.grad_intra &&
                        (double)bytes.grad_inter == formula.grad_inter);
            assert_true((double)bytes.weight_intra == formula.weight_intra &&
                        (double)bytes.weight_inter == formula.weight_inter);
            // The codecs need 1 + 4/128, 1/2 + 4/512 and 1/2 + 4/2048 bytes per parameter.
            double n = (double)(6 * unit), d = per_node, m = nodes;
            assert_true((double)bytes.grad_intra == n * 1.03125 * (d - 1) / d);
            assert_true((double)bytes.grad_inter == n * 0.5078125 * (m - 1) / (m * d));
            assert_true((double)bytes.weight_intra == n * 0.501953125 * (d - 1) / d);
            assert_true((double)bytes.weight_inter == n * 0.501953125 * (m - 1) / (m * d));
            layout_free(&layout);
        }
    }
}

// With --verify-wire every nonempty message has an additional section.
static void test_sealed_messages(void **state) {
    // There are more chunks than alignment units, so some chunks are empty.
    GradFormat grad = {CODEC_INT8, CODEC_INT4, 128, 512, CODEC_BF16, true, ROUND_STOCHASTIC, 100};
    WeightFormat weight = {CODEC_INT4, 2048, true, ROUND_NEAREST};
    LayoutTensor tensors[] = {MATRIX(70000, 0), VECTOR(100, 0), MATRIX(90000, 1)};
    LayoutOptions options = {2, 2, layout_alignment(128, 512, 2048), layout_alignment(128, 512, 0), 1, 1};
    BucketLayout layout;
    assert_true(layout_build(&layout, tensors, 3, &options, NULL));
    WireBytes open = layout_wire_bytes(&layout, &grad, &weight);
    int64_t chunks = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int b = 0; b < layout.buckets; b++) {
            for (int k = 0; k < grad.chunks; k++) {
                MessageLayout one, two;
                layout_grad_messages(&layout, &layout.bucket[b], &grad, k, &one, &two);
                assert_true((one.bytes == 0) == (two.bytes == 0));
                assert_true(one.check == (pass && one.bytes ? one.bytes - MESSAGE_ALIGN : 0) &&
                            two.check == (pass && two.bytes ? two.bytes - MESSAGE_ALIGN : 0));
                chunks += pass && one.bytes;
            }
        }
        if (!pass) layout_seal(&layout);
    }
    WireBytes closed = layout_wire_bytes(&layout, &grad, &weight);
    assert_true(chunks > layout.buckets && chunks < (int64_t)layout.buckets * grad.chunks);
    assert_true(closed.grad_intra - open.grad_intra == chunks * MESSAGE_ALIGN &&
                closed.grad_inter - open.grad_inter == chunks * MESSAGE_ALIGN);
    assert_true(closed.weight_inter - open.weight_inter == (int64_t)layout.buckets * MESSAGE_ALIGN);
    assert_true(closed.weight_intra - open.weight_intra == (int64_t)layout.buckets * 2 * MESSAGE_ALIGN);
    layout_free(&layout);
}

// The paper's claim for its group sizes: without quantization (bf16 weights, fp32 gradients) ranks
// send 5.8 times as many bytes between nodes.
static void test_reduction_between_nodes(void **state) {
    int64_t unit = 4 * 4 * 2048;
    LayoutTensor tensors[] = {MATRIX(unit * 8, 0)};
    LayoutOptions options = {4, 4, 2048, 128, 1, 1};
    BucketLayout layout;
    assert_true(layout_build(&layout, tensors, 1, &options, NULL));
    GradFormat quantized = {CODEC_INT8, CODEC_INT4, 128, 128, CODEC_BF16, true, ROUND_STOCHASTIC, 1},
               fp32 = {0, 0, 128, 128, 0, false, 0, 1};
    WeightFormat difference = {CODEC_INT4, 2048, true, ROUND_NEAREST},
                 bf16 = {CODEC_BF16, 2048, false, ROUND_NEAREST};
    WireBytes ours = layout_wire_bytes(&layout, &quantized, &difference),
              base = layout_wire_bytes(&layout, &fp32, &bf16);
    double ratio = (double)(base.grad_inter + base.weight_inter) /
                   (double)(ours.grad_inter + ours.weight_inter);
    assert_true(ratio > 5.80 && ratio < 5.81);
    layout_free(&layout);
}

// --- errors -------------------------------------------------------------------------------------

static void check_refused(LayoutTensor *tensors, int count, LayoutOptions options) {
    BucketLayout layout;
    Error err = {0};
    assert_false(layout_build(&layout, tensors, count, &options, &err));
    assert_int_equal(err.code, EXIT_USAGE);
    assert_true(strlen(err.what) > 0);
}

static void test_refusals(void **state) {
    LayoutTensor good[] = {MATRIX(10, 0), MATRIX(10, 1)}, empty[] = {MATRIX(0, 0)},
                 falling[] = {MATRIX(10, 1), MATRIX(10, 0)};
    LayoutOptions options = {1, 1, 128, 128, 1, 1}, bad;
    check_refused(good, 0, options);
    check_refused(empty, 1, options);
    check_refused(falling, 2, options);
    bad = options;
    bad.nodes = 0;
    check_refused(good, 2, bad);
    bad = options;
    bad.per_node = 0;
    check_refused(good, 2, bad);
    bad = options;
    bad.bucket_elements = 0;
    check_refused(good, 2, bad);
    bad = options;
    bad.pieces = 0;
    check_refused(good, 2, bad);
    bad = options;
    bad.alignment = 0;
    check_refused(good, 2, bad);
    bad = options;
    bad.chunk_alignment = 96;
    check_refused(good, 2, bad);  // does not divide the alignment
}

static void test_alignment(void **state) {
    assert_int_equal(layout_alignment(0, 0, 0), 32);
    assert_int_equal(layout_alignment(128, 512, 2048), 2048);
    assert_int_equal(layout_alignment(96, 128, 0), 384);
    assert_int_equal(layout_alignment(32, 0, 160), 160);
}

// Every rank has a slot in the gathered messages. A row has the slots of one rail.
static void test_gather_slots(void **state) {
    for (int nodes = 1; nodes < 5; nodes++) {
        for (int per_node = 1; per_node < 5; per_node++) {
            for (int slot = 0; slot < nodes * per_node; slot++) {
                int64_t rank = gather_rank(nodes, per_node, slot);
                assert_int_equal(rank % per_node, slot / nodes);
                assert_int_equal(rank / per_node, slot % nodes);
                assert_int_equal(gather_slot(nodes, per_node, rank), slot);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_logical_offsets_independent_of_shape),
        cmocka_unit_test(test_parts_of_tensors),
        cmocka_unit_test(test_unsharded_layouts),
        cmocka_unit_test(test_chunks_cover_the_shard_once),
        cmocka_unit_test(test_complete_chunks),
        cmocka_unit_test(test_automatic_chunks),
        cmocka_unit_test(test_message_layouts),
        cmocka_unit_test(test_sealed_messages),
        cmocka_unit_test(test_wire_bytes),
        cmocka_unit_test(test_wire_bytes_equal_formulas),
        cmocka_unit_test(test_reduction_between_nodes),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_gather_slots),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
