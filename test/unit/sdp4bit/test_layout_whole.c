// Buckets whose shards hold whole matrices (LayoutTensor.work): every matrix is in one shard,
// buckets of both kinds stay apart, and padding and work are balanced for the layers of a GPT.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "sdp4bit/layout.h"
#include "sdp4bit/layout_whole.h"

enum { C = 64, LAYER = 6, MOST_LAYERS = 40, GROUP = 128 };

// The word embeddings, then layers of four matrices with a norm before each two.
static int gpt(LayoutTensor *tensors, int layers) {
    static const int64_t matrices[] = {3, 1, 4, 4};  // in units of C x C
    int n = 0;
    tensors[n++] = (LayoutTensor){.numel = 997 * C, .matrix = true, .unit = 0};
    for (int l = 1; l <= layers; l++) {
        for (int i = 0; i < 4; i++) {
            if (i % 2 == 0) tensors[n++] = (LayoutTensor){.numel = C, .unit = l};
            int64_t numel = matrices[i] * C * C;
            tensors[n++] = (LayoutTensor){.numel = numel, .matrix = true, .unit = l, .work = numel};
        }
    }
    return n;
}

static BucketLayout build(int layers, int nodes, int per_node, int pieces, int64_t bucket_elements) {
    LayoutTensor tensors[1 + LAYER * MOST_LAYERS];
    int count = gpt(tensors, layers);
    LayoutOptions options = {nodes, per_node, GROUP, GROUP, bucket_elements, pieces};
    BucketLayout layout;
    Error err;
    assert_true(layout_build(&layout, tensors, count, &options, &err));
    return layout;
}

static int64_t padding(const BucketLayout *layout) {
    int64_t padded = 0, elements = 0;
    for (int b = 0; b < layout->buckets; b++) {
        const Bucket *bucket = &layout->bucket[b];
        if (!bucket->whole) continue;
        padded += bucket->matrix_elements;
        for (int i = 0; i < bucket->segments; i++)
            elements += layout->segments[bucket->first_segment + i].numel;
    }
    return 1000 * (padded - elements) / elements;  // per mille
}

static void check_bucket(const BucketLayout *layout, int b, int pieces) {
    const Bucket *bucket = &layout->bucket[b];
    int64_t end = 0;
    assert_int_equal(bucket->whole, b > 0);
    assert_int_equal(bucket->matrix_elements, layout->dp * bucket->matrix_per_rank);
    assert_int_equal(bucket->matrix_per_rank % (pieces * GROUP), 0);
    assert_int_equal(bucket->matrix_counted, bucket->matrix_elements);
    for (int i = 0; i < bucket->segments; i++) {
        const Segment *s = &layout->segments[bucket->first_segment + i];
        int64_t rank = s->start / bucket->matrix_per_rank;
        assert_true(s->start >= end && s->start % GROUP == 0);
        assert_true(i > 0 || s->start == 0);
        end = s->start + s->numel;
        assert_true(end <= bucket->matrix_elements);
        if (bucket->whole) assert_true(end <= (rank + 1) * bucket->matrix_per_rank);
        assert_int_equal(layout->tensor_arena[s->tensor], bucket->arena_start + s->start);
        assert_int_equal(layout->tensor_bucket[s->tensor], b);
    }
}

static void test_every_matrix_in_one_shard(void **state) {
    for (int trial = 0; trial < 200; trial++) {
        int layers = 1 + trial % 13, nodes = 1 + trial % 3, per_node = 1 + trial % 5, pieces = 1 + trial % 2;
        BucketLayout layout = build(layers, nodes, per_node, pieces, 1 + trial * C * C);
        int64_t work = 0, segments = 0;
        assert_true(layout.buckets >= 2 && layout.bucket[0].end_unit == 1);
        for (int b = 0; b < layout.buckets; b++) {
            check_bucket(&layout, b, pieces);
            segments += layout.bucket[b].segments + layout.bucket[b].tails;
        }
        assert_int_equal(segments, layout.tensors);
        for (int r = 0; r < layout.dp; r++) work += layout.rank_work[r];
        assert_int_equal(work, 12 * C * C * (int64_t)layers);
        layout_free(&layout);
    }
}

// Buckets, padding in per mille of the matrices, and the largest work of a rank, in per mille of
// the mean. Each of the last five rows would change with another rule: a weight of 1/5, a weight of
// 1/3, a limit of 1/11, a limit of 1/13, and the smaller number on a tie.
static void test_padding_and_work(void **state) {
    static const struct {
        int layers, nodes, per_node, buckets, padding, work;
    } cases[] = {
        {12, 1, 1, 12, 0, 1000},  {12, 1, 2, 6, 0, 1000},   {12, 1, 4, 4, 0, 1000},   {12, 1, 8, 2, 0, 1000},
        {12, 2, 8, 1, 0, 1000},   {12, 4, 8, 1, 333, 1333}, {2, 1, 8, 1, 333, 1333},  {24, 1, 8, 4, 0, 1000},
        {24, 2, 8, 2, 0, 1000},   {24, 4, 8, 1, 0, 1000},   {24, 8, 8, 1, 333, 1333}, {32, 2, 8, 2, 0, 1000},
        {32, 4, 8, 1, 0, 1000},   {32, 8, 8, 1, 166, 1166}, {40, 1, 8, 5, 0, 1000},   {40, 2, 8, 8, 66, 1000},
        {40, 4, 8, 4, 66, 1000},  {40, 8, 8, 2, 66, 1066},  {32, 2, 7, 3, 57, 1020},  {40, 4, 5, 2, 0, 1000},
        {32, 1, 19, 1, 39, 1039}, {24, 1, 13, 6, 83, 1038}, {12, 4, 5, 2, 111, 1111},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        BucketLayout layout = build(cases[i].layers, cases[i].nodes, cases[i].per_node, 1, 1);
        int64_t most = 0, mean = 12 * C * C * (int64_t)cases[i].layers / layout.dp;
        for (int r = 0; r < layout.dp; r++) most = layout.rank_work[r] > most ? layout.rank_work[r] : most;
        if (layout.buckets - 1 != cases[i].buckets || padding(&layout) != cases[i].padding ||
            1000 * most / mean != cases[i].work)
            fail_msg("%d layers, %d ranks: %d buckets, padding %lld, work %lld", cases[i].layers, layout.dp,
                     layout.buckets - 1, (long long)padding(&layout), (long long)(1000 * most / mean));
        layout_free(&layout);
    }
}

// Chunks of the last bucket that are complete when backward has completed a layer, the last layer
// first. By default there is a chunk per layer, or fewer if they would be tiny. Without
// whole_spread, the second row and the last two would have none before the first layer.
static void test_complete_chunks(void **state) {
    static const struct {
        int layers, nodes, per_node, chunks;
        int complete[24];
    } cases[] = {
        {12, 1, 2, 2, {0, 2}},
        {12, 1, 8, 6, {0, 0, 2, 3, 3, 6}},
        {12, 4, 8, 12, {0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 12}},
        {32, 1, 8, 8, {0, 0, 2, 2, 3, 5, 5, 8}},
        {24, 2, 8, 12, {0, 0, 0, 1, 1, 4, 4, 6, 6, 6, 6, 12}},
        {24, 4, 8, 18, {0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 6, 6, 6, 6, 10, 10, 10, 10, 10, 10, 10, 10, 18}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        BucketLayout layout = build(cases[i].layers, cases[i].nodes, cases[i].per_node, 1, 1);
        const Bucket *bucket = &layout.bucket[layout.buckets - 1];
        GradFormat format = {.chunks = 0};
        int chunks = layout_chunks(&layout, bucket, &format);
        assert_int_equal(chunks, cases[i].chunks);
        for (int unit = bucket->end_unit - 1; unit >= bucket->first_unit; unit--) {
            int complete = chunks - layout_first_complete(&layout, bucket, chunks, unit);
            if (complete != cases[i].complete[bucket->end_unit - 1 - unit])
                fail_msg("%d layers, %d ranks, layer %d: %d chunks", cases[i].layers, layout.dp, unit,
                         complete);
        }
        layout_free(&layout);
    }
}

// Spreading moves matrices, but every shard keeps its elements and its work, also if matrices of
// equal size have different work.
static void test_spread_keeps_sizes_and_work(void **state) {
    enum { COUNT = 48, DP = 8 };
    LayoutTensor tensors[COUNT];
    for (int i = 0; i < COUNT; i++) {
        int64_t numel = (int64_t[]){3, 1, 4, 4}[i % 4] * C * C;
        tensors[i] = (LayoutTensor){.numel = numel, .matrix = true, .unit = i / 4, .work = 1 + i / 4 % 2};
    }
    WholeUnits units = {tensors, COUNT, 0, COUNT / 4, GROUP, GROUP, DP};
    int before[COUNT], after[COUNT], moved = 0;
    whole_divide(&units, before);
    for (int i = 0; i < COUNT; i++) after[i] = before[i];
    whole_spread(&units, after);
    for (int s = 0; s < DP; s++) {
        int64_t elements = 0, work = 0;
        for (int i = 0; i < COUNT; i++) {
            elements += ((after[i] == s) - (before[i] == s)) * tensors[i].numel;
            work += ((after[i] == s) - (before[i] == s)) * tensors[i].work;
        }
        assert_int_equal(elements, 0);
        assert_int_equal(work, 0);
    }
    for (int i = 0; i < COUNT; i++) moved += after[i] != before[i];
    assert_true(moved > 0);
}

// Without work the layout is as before.
static void test_mixed_units_are_refused(void **state) {
    LayoutTensor tensors[] = {{.numel = 64, .matrix = true}, {.numel = 64, .matrix = true, .work = 1}};
    LayoutOptions options = {1, 1, GROUP, GROUP, 1, 1};
    BucketLayout layout;
    Error err;
    assert_false(layout_build(&layout, tensors, 2, &options, &err));
    assert_int_equal(err.code, EXIT_USAGE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_matrix_in_one_shard), cmocka_unit_test(test_padding_and_work),
        cmocka_unit_test(test_complete_chunks),           cmocka_unit_test(test_spread_keeps_sizes_and_work),
        cmocka_unit_test(test_mixed_units_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
