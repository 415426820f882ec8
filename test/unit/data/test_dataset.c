// Tests the order of samples: numpy's generator and sums, splits, golden index arrays, and every
// sample of random shards against a naive reference that concatenates the whole token stream.
// Constants marked "numpy" were computed with numpy.random.RandomState.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "dev/lib/shard_writer.h"
#include "llmc/data/dataset.h"
#include "llmc/base/rng.h"
#include "test/unit/folder.h"

// --------------------------------------------------------------------------------------------
// Generator and sums

static void generator(void **state) {
    const uint32_t seeds[4] = {1234, 0, 42, UINT32_MAX};
    const uint32_t first[4][3] = {{822569775, 2137449171, 2671936806},  // numpy
                                  {2357136044, 2546248239, 3071714933},
                                  {1608637542, 3421126067, 4083286876},
                                  {419326371, 479346978, 3918654476}};
    for (int s = 0; s < 4; s++) {
        Mt19937 rng;
        mt19937_seed(&rng, seeds[s]);
        for (int i = 0; i < 3; i++) assert_int_equal(mt19937_u32(&rng), first[s][i]);
    }
    const uint64_t max[10] = {1,           2,           9,
                              10,          1000,        4294967294u,
                              4294967296u, 4294967297u, (1ull << 40) + 12345,
                              1ull << 62};
    // numpy
    const uint64_t drawn[10] = {
        1, 2, 5, 4, 664, 3312965625u, 852631582, 682106748, 1056983943678, 1128870439609013810};
    Mt19937 rng;
    mt19937_seed(&rng, 1234);
    for (int i = 0; i < 10; i++) {
        assert_true(mt19937_bounded(&rng, max[i]) == drawn[i]);
        assert_true(mt19937_bounded(&rng, 0) == 0);
    }
}

static void shuffles(void **state) {
    const uint32_t ten[10] = {7, 2, 9, 1, 0, 8, 4, 5, 6, 3};
    uint32_t x[10];
    for (uint32_t i = 0; i < 10; i++) x[i] = i;
    Mt19937 rng;
    mt19937_seed(&rng, 1234);
    mt19937_shuffle_u32(&rng, x, 10);
    assert_memory_equal(x, ten, sizeof ten);

    // Expected sums of x[i] * (i + 1) after shuffling 0..n-1 as i32, and then as u32 with the same
    // generator (numpy).
    static const struct {
        uint32_t seed;
        int64_t n, first, second;
    } cases[] = {{0, 1, 0, 0},
                 {0, 2, 1, 2},
                 {0, 3, 4, 5},
                 {0, 127, 531804, 480320},
                 {0, 128, 543309, 487321},
                 {0, 129, 562181, 500518},
                 {0, 130, 577782, 517730},
                 {42, 257, 4272952, 4285656},
                 {1234, 129, 531238, 528410},
                 {1234, 65537, 70344320767625, 70049361032179},
                 {UINT32_MAX, 65537, 70464279409061, 70218754495275}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        int64_t n = cases[c].n, first = 0, second = 0;
        int32_t *a = (int32_t *)malloc((size_t)n * sizeof *a);
        uint32_t *b = (uint32_t *)malloc((size_t)n * sizeof *b);
        for (int64_t i = 0; i < n; i++) {
            a[i] = (int32_t)i;
            b[i] = (uint32_t)i;
        }
        mt19937_seed(&rng, cases[c].seed);
        mt19937_shuffle_i32(&rng, a, n);
        mt19937_shuffle_u32(&rng, b, n);
        for (int64_t i = 0; i < n; i++) {
            first += a[i] * (i + 1);
            second += b[i] * (i + 1);
        }
        assert_int_equal(first, cases[c].first);
        assert_int_equal(second, cases[c].second);
        free(a);
        free(b);
    }
}

// Shuffles 100 million elements, which takes seconds. Runs only on request.
static void long_shuffle(void **state) {
    if (!getenv("LONG")) skip();
    const int64_t n = 100000000;
    uint32_t *x = (uint32_t *)malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = (uint32_t)i;
    Mt19937 rng;
    mt19937_seed(&rng, 1234);
    mt19937_shuffle_u32(&rng, x, n);
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (uint64_t)x[i] * (uint64_t)(i + 1);
    assert_int_equal(x[0], 53654547);
    assert_int_equal(x[12345678], 67641396);
    assert_int_equal(x[n - 1], 17263407);
    assert_true(sum == 681015022086970658u);
    free(x);
}

static void sums(void **state) {
    static const struct {
        int n;
        double sum;
    } cases[] = {{1, 0x1.0p+0},
                 {7, 0x1.4be2be2be2be2p+1},
                 {8, 0x1.5be2be2be2be2p+1},
                 {9, 0x1.6a1ba1ba1ba1bp+1},
                 {15, 0x1.a8bbba47475d4p+1},
                 {100, 0x1.4bfdfe4591243p+2},
                 {127, 0x1.5b38ae9541ca6p+2},
                 {128, 0x1.5bb8ae9541ca7p+2},
                 {129, 0x1.5c37b09149ba9p+2},
                 {136, 0x1.5f9633591b269p+2},
                 {257, 0x1.883504d2ee7e2p+2},
                 {299, 0x1.91e08d3aff956p+2},
                 {1000, 0x1.df11f45f4e61ap+2},
                 {5000, 0x1.2306376e18052p+3}};  // numpy: sum of 1/1 .. 1/n
    static double x[5000];
    for (int i = 0; i < 5000; i++) x[i] = 1.0 / (i + 1);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        assert_true(numpy_sum(x, cases[c].n) == cases[c].sum);
    assert_true(numpy_sum(x, 0) == 0);
}

static void blend_table(void **state) {
    const double weights[3] = {.5, .3, .2};
    const int16_t shard[12] = {0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1};
    const int64_t sample[12] = {0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3};
    int16_t found_shard[12];
    int64_t found_sample[12];
    blend_indices(weights, NULL, 3, 12, found_shard, found_sample);
    assert_memory_equal(found_shard, shard, sizeof shard);
    assert_memory_equal(found_sample, sample, sizeof sample);
}

// --------------------------------------------------------------------------------------------
// Splits

static void splits(void **state) {
    double b[SPLITS + 1];
    Error err = {0};
    int64_t first, end;
    assert_true(split_parse("969, 30, 1", b, &err));
    assert_true(b[0] == 0 && b[1] == 0.969 && b[2] == 0.999 && b[3] == 1.0);
    assert_true(split_range(b, SPLIT_VALID, 1000, &first, &end));
    assert_int_equal(first, 969);
    assert_int_equal(end, 999);
    assert_true(split_range(b, SPLIT_TEST, 400, &first, &end));  // has a weight but is empty
    assert_int_equal(first, 400);
    assert_int_equal(end, 400);
    assert_true(split_parse("100,0,0", b, &err));
    assert_true(split_range(b, SPLIT_TRAIN, 10, &first, &end));
    assert_int_equal(end, 10);
    assert_false(split_range(b, SPLIT_VALID, 10, &first, &end));
    assert_int_equal(first + end, 0);
    assert_true(split_parse("1/1", b, &err));
    assert_true(split_range(b, SPLIT_TRAIN, 5, &first, &end));
    assert_int_equal(end, 2);  // 2.5 rounds to even
    assert_true(split_range(b, SPLIT_VALID, 7, &first, &end));
    assert_int_equal(first, 4);  // 3.5 rounds to even
    assert_int_equal(end, 7);
    assert_true(split_parse(".9;.1", b, &err));
    assert_true(b[1] == 0.9 / (0.9 + 0.1) && b[3] == b[2]);
    static const char *const bad[] = {"",
                                      "0,0,0",
                                      "none",
                                      "1.2.3",
                                      ".",
                                      "1,2,3,4",
                                      "1,.,2",
                                      "-5,1,0",
                                      "nan,1,1",
                                      "1e3,1,1",
                                      "11111111111111111111111111111111111111111111111111111111111111111"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        err = (Error){0};
        assert_false(split_parse(bad[i], b, &err));
        assert_int_equal(err.code, EXIT_USAGE);
    }
}

// --------------------------------------------------------------------------------------------
// Generated shards

typedef struct Folder {
    char path[64];
} Folder;

static int make_folder(void **state) {
    Folder *f = (Folder *)calloc(1, sizeof *f);
    *state = f;
    return folder_make(f->path, sizeof f->path, "test_dataset");
}

static int remove_folder(void **state) {
    int rc = folder_remove(((Folder *)*state)->path);
    free(*state);
    return rc;
}

static uint32_t next(uint64_t *seed) {
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33);
}

// A shard and its copy in memory. Sequence i is ids[begin[i]] up to, but not including,
// ids[begin[i+1]].
typedef struct Corpus {
    char prefix[96];
    int64_t sequences, *begin;
    int32_t *ids;
} Corpus;

// Writes <folder>/<name> with these sequence lengths and random ids below limit, and keeps a copy.
static Corpus make_corpus(const Folder *f, const char *name, int dtype, const int32_t *lengths, int64_t n,
                          uint32_t limit, uint64_t seed) {
    Corpus c = {.sequences = n};
    Error err = {0};
    snprintf(c.prefix, sizeof c.prefix, "%s/%s", f->path, name);
    c.begin = (int64_t *)calloc((size_t)n + 1, sizeof *c.begin);
    for (int64_t i = 0; i < n; i++) c.begin[i + 1] = c.begin[i] + lengths[i];
    c.ids = (int32_t *)malloc(((size_t)c.begin[n] + 1) * sizeof *c.ids);
    for (int64_t t = 0; t < c.begin[n]; t++) c.ids[t] = (int32_t)(next(&seed) % limit);
    ShardWriter *w = shard_writer_open(c.prefix, dtype, &err);
    for (int64_t i = 0; i < n; i++) {
        assert_true(shard_writer_add_sequence(w, c.ids + c.begin[i], lengths[i], &err));
        for (uint32_t e = next(&seed) % 3; e > 0; e--) shard_writer_end_document(w);
    }
    assert_true(shard_writer_close(w, &err));
    return c;
}

static void free_corpus(Corpus *c) {
    free(c->begin);
    free(c->ids);
}

static const int32_t TEN[10] = {5, 9, 3, 12, 7, 1, 20, 4, 6, 11};

// --------------------------------------------------------------------------------------------
// Index arrays that Megatron-LM builds for ten sequences with 78 tokens, S = 8, seed 1234

static void assert_indices(const GptDataset *d, const int32_t *documents, const int entries[][2],
                           const uint32_t *shuffled) {
    assert_memory_equal(d->document_index, documents, (size_t)d->documents * sizeof *documents);
    for (int64_t k = 0; k <= d->samples; k++) {
        int64_t position, offset;
        gpt_dataset_sample_entry(d, k, &position, &offset);
        assert_int_equal(position, entries[k][0]);
        assert_int_equal(offset, entries[k][1]);
    }
    assert_memory_equal(d->shuffle_index, shuffled, (size_t)d->samples * sizeof *shuffled);
}

static void golden_indices(void **state) {
    Corpus c = make_corpus((Folder *)*state, "ten", SHARD_U16, TEN, 10, 60000, 1);
    Shard s;
    Error err = {0};
    assert_true(shard_open(&s, c.prefix, &err));
    GptDataset d;

    assert_true(gpt_dataset_build(&d, &s, &(PartRequest){SPLIT_TRAIN, 0, 10, 9, 8, 1234, NULL}, NULL, &err));
    assert_int_equal(d.epochs, 1);
    assert_int_equal(d.samples, 9);
    const int32_t documents1[10] = {7, 2, 9, 1, 0, 8, 4, 5, 6, 3};
    const int entries1[10][2] = {{0, 0}, {2, 1}, {2, 9},  {3, 6},  {5, 0},
                                 {6, 2}, {8, 2}, {8, 10}, {8, 18}, {9, 6}};
    const uint32_t shuffled1[9] = {7, 3, 5, 1, 4, 8, 0, 2, 6};
    assert_indices(&d, documents1, entries1, shuffled1);
    gpt_dataset_free(&d);

    assert_true(gpt_dataset_build(&d, &s, &(PartRequest){SPLIT_TRAIN, 0, 10, 12, 8, 1234, NULL}, NULL, &err));
    assert_int_equal(d.epochs, 2);
    assert_true(d.separate_final_epoch);
    assert_int_equal(d.samples_before_final, 9);
    assert_int_equal(d.samples, 19);
    const int32_t documents2[20] = {7, 2, 9, 1, 0, 8, 4, 5, 6, 3, 7, 3, 5, 1, 4, 8, 0, 2, 6, 9};
    const int entries2[20][2] = {{0, 0},  {2, 1},  {2, 9},  {3, 6},   {5, 0},   {6, 2},  {8, 2},
                                 {8, 10}, {8, 18}, {9, 6},  {10, 2},  {11, 6},  {13, 1}, {14, 0},
                                 {15, 1}, {16, 3}, {18, 3}, {18, 11}, {18, 19}, {19, 7}};
    const uint32_t shuffled2[19] = {7, 4, 1, 5, 3, 0, 2, 8, 6, 11, 13, 14, 18, 10, 9, 17, 16, 12, 15};
    assert_indices(&d, documents2, entries2, shuffled2);
    gpt_dataset_free(&d);

    assert_true(gpt_dataset_build(&d, &s, &(PartRequest){SPLIT_TRAIN, 0, 10, 17, 8, 1234, NULL}, NULL, &err));
    assert_int_equal(d.epochs, 2);
    assert_false(d.separate_final_epoch);
    assert_int_equal(d.samples, 19);
    const int32_t documents3[20] = {3, 3, 2, 6, 4, 5, 4, 0, 8, 8, 7, 1, 0, 9, 7, 1, 9, 2, 6, 5};
    const int entries3[20][2] = {{0, 0},  {0, 8},  {1, 4},  {2, 0},  {3, 5},  {3, 13}, {4, 1},
                                 {6, 1},  {7, 2},  {8, 5},  {10, 1}, {11, 5}, {12, 4}, {13, 7},
                                 {15, 0}, {15, 8}, {16, 7}, {18, 1}, {18, 9}, {18, 17}};
    const uint32_t shuffled3[19] = {8, 18, 13, 1, 4, 17, 14, 11, 9, 0, 7, 3, 10, 6, 2, 5, 12, 16, 15};
    assert_indices(&d, documents3, entries3, shuffled3);
    gpt_dataset_free(&d);
    shard_close(&s);
    free_corpus(&c);
}

// --------------------------------------------------------------------------------------------
// Naive reference: concatenates the epochs into one stream, slices it, shuffles the slices

typedef struct Naive {
    int64_t samples, epochs;
    bool separate;
    int32_t *stream;
    int64_t *order;
    int s;
} Naive;

static void naive_shuffle(Mt19937 *rng, int64_t *x, int64_t n) {
    for (int64_t i = n - 1; i >= 1; i--) {
        int64_t j = (int64_t)mt19937_bounded(rng, (uint64_t)i), held = x[i];
        x[i] = x[j];
        x[j] = held;
    }
}

static Naive naive_build(const Corpus *c, int64_t first, int64_t end, int64_t n, int s, uint32_t seed) {
    Naive r = {.s = s};
    int64_t tok = c->begin[end] - c->begin[first], documents = end - first;
    for (r.epochs = 1; r.epochs * tok < n * s + 1;) r.epochs++;
    int64_t sans = ((r.epochs - 1) * tok - 1) / s;
    r.separate = r.epochs > 1 && n - sans < (int64_t)(0.80 * (double)((tok - 1) / s));
    r.samples = (r.epochs * tok - 1) / s;
    int64_t *list = (int64_t *)malloc((size_t)(documents * r.epochs) * sizeof *list);
    for (int64_t i = 0; i < documents * r.epochs; i++) list[i] = first + i % documents;
    Mt19937 rng;
    mt19937_seed(&rng, seed);
    int64_t head = r.separate ? documents * (r.epochs - 1) : documents * r.epochs;
    naive_shuffle(&rng, list, head);
    if (r.separate) naive_shuffle(&rng, list + head, documents);
    r.stream = (int32_t *)malloc((size_t)(tok * r.epochs) * sizeof *r.stream);
    int64_t at = 0;
    for (int64_t i = 0; i < documents * r.epochs; i++) {
        for (int64_t t = c->begin[list[i]]; t < c->begin[list[i] + 1]; t++) r.stream[at++] = c->ids[t];
    }
    r.order = (int64_t *)malloc((size_t)(r.samples + 1) * sizeof *r.order);
    for (int64_t i = 0; i < r.samples; i++) r.order[i] = i;
    naive_shuffle(&rng, r.order, r.separate ? sans : r.samples);
    if (r.separate) naive_shuffle(&rng, r.order + sans, r.samples - sans);
    free(list);
    return r;
}

static const int32_t *naive_sample(const Naive *r, int64_t i) { return r->stream + r->order[i] * r->s; }

static void naive_free(Naive *r) {
    free(r->stream);
    free(r->order);
}

// Compares every token of every sample, and the origin of every token, with the reference.
static void compare(const Corpus *c, const Shard *shard, int split, int64_t first, int64_t end, int64_t n,
                    int s, uint32_t seed, int seen[6][2]) {
    GptDataset d;
    Error err = {0};
    Naive r = naive_build(c, first, end, n, s, seed);
    assert_true(
        gpt_dataset_build(&d, shard, &(PartRequest){split, first, end, n, s, seed, NULL}, NULL, &err));
    assert_int_equal(d.samples, r.samples);
    assert_int_equal(d.epochs, r.epochs);
    assert_int_equal(d.separate_final_epoch, r.separate);
    assert_true(d.samples >= n);
    int32_t *found = (int32_t *)malloc(((size_t)s + 1) * sizeof *found);
    for (int64_t i = 0; i < d.samples; i++) {
        gpt_dataset_sample(&d, i, found);
        assert_memory_equal(found, naive_sample(&r, i), ((size_t)s + 1) * sizeof *found);
        for (int t = 0; t <= s; t++) {
            TokenPlace p = gpt_dataset_place(&d, i, t);
            assert_true(p.sequence >= first && p.sequence < end &&
                        p.sequence == d.document_index[p.position]);
            assert_true(p.offset >= 0 && c->begin[p.sequence] + p.offset < c->begin[p.sequence + 1]);
            assert_int_equal(c->ids[c->begin[p.sequence] + p.offset], found[t]);
        }
    }
    if (r.epochs < 6) seen[r.epochs][r.separate]++;
    free(found);
    gpt_dataset_free(&d);
    naive_free(&r);
}

static void matches_naive_reference(void **state) {
    const double bounds[SPLITS + 1] = {0, .6, .85, 1};
    int seen[6][2] = {{0}};
    uint64_t seed = 99;
    for (int round = 0; round < 12; round++) {
        int32_t lengths[60];
        int64_t n = 12 + next(&seed) % 48;
        for (int64_t i = 0; i < n; i++) lengths[i] = next(&seed) % 4 == 0 ? 0 : (int32_t)(next(&seed) % 40);
        lengths[0] = round % 2 ? 0 : 7;
        lengths[n - 1] = round % 3 ? 0 : 3;
        bool wide = round % 2;
        Corpus c = make_corpus((Folder *)*state, "random", wide ? SHARD_I32 : SHARD_U16, lengths, n,
                               wide ? 2000000000 : 65536, seed);
        Shard s;
        Error err = {0};
        assert_true(shard_open(&s, c.prefix, &err));
        for (int split = 0; split < SPLITS; split++) {
            int64_t first, end;
            assert_true(split_range(bounds, split, n, &first, &end));
            int64_t tok = c.begin[end] - c.begin[first];
            if (tok < 2) continue;
            const int seq_length[3] = {1, 8, 33};
            for (int k = 0; k < 3; k++) {
                // From a quarter of an epoch to five epochs, in steps of a quarter.
                for (int64_t quarter = 1; quarter <= 20; quarter++) {
                    int64_t want = (tok * quarter / 4 - 1) / seq_length[k];
                    if (want > 0)
                        compare(&c, &s, split, first, end, want, seq_length[k], 1234 + (uint32_t)round, seen);
                }
            }
        }
        shard_close(&s);
        free_corpus(&c);
    }
    for (int e = 1; e <= 5; e++) assert_true(seen[e][0] > 5 && (e == 1 || seen[e][1] > 5));
}

// --------------------------------------------------------------------------------------------
// Blends

// For each split, compares the draws, shares and every sample of three shards.
static void blends(void **state) {
    Folder *f = (Folder *)*state;
    const char *names[3] = {"a", "b", "c"};
    Corpus c[3];
    uint64_t seed = 5;
    for (int k = 0; k < 3; k++) {
        int32_t lengths[40];
        for (int i = 0; i < 40; i++) lengths[i] = (int32_t)(next(&seed) % 30);
        c[k] = make_corpus(f, names[k], k == 1 ? SHARD_I32 : SHARD_U16, lengths, 40, 60000, seed);
    }
    const char *words[6] = {"3", c[0].prefix, "2.5", c[1].prefix, "1e-1", c[2].prefix};
    const double given[3] = {3, 2.5, 0.1}, bounds[SPLITS + 1] = {0, .5, .75, 1};
    DataSource source;
    Error err = {0};
    assert_true(data_source_open(&source, words, 6, &err));
    assert_int_equal(source.shards, 3);
    for (int split = 0; split < SPLITS; split++) {
        const int64_t target = split == 0 ? 150 : 40;
        BlendedDataset d;
        assert_true(
            blended_dataset_build(&d, &source, &(SplitRequest){split, bounds, target, 8, 77, 0}, NULL, &err));
        double w[3], sum = given[0] + given[1] + given[2];
        int64_t length = 0, drawn[3] = {0};
        Naive r[3];
        for (int k = 0; k < 3; k++) {
            int64_t first, end, share = (int64_t)ceil((double)target * (given[k] / sum) * 1.005);
            split_range(bounds, split, 40, &first, &end);
            r[k] = naive_build(&c[k], first, end, share, 8, 77);
            length += share;
            w[k] = given[k] / sum;
        }
        sum = w[0] + w[1] + w[2];
        assert_true(d.samples <= length && d.samples >= target);
        for (int64_t i = 0; i < d.samples; i++) {
            int best = 0;
            double t = i > 1 ? (double)i : 1;
            for (int k = 1; k < 3; k++) {
                if (w[k] / sum * t - (double)drawn[k] > w[best] / sum * t - (double)drawn[best]) best = k;
            }
            int64_t part_sample;
            int32_t found[9];
            assert_int_equal(blended_dataset_shard(&d, i, &part_sample), best);
            assert_int_equal(part_sample, drawn[best]);
            blended_dataset_sample(&d, i, found);
            assert_memory_equal(found, naive_sample(&r[best], drawn[best]), sizeof found);
            drawn[best]++;
        }
        for (int k = 0; k < 3; k++) {
            assert_true(drawn[k] > 0);
            naive_free(&r[k]);
        }
        blended_dataset_free(&d);
    }
    data_source_close(&source);
    for (int k = 0; k < 3; k++) free_corpus(&c[k]);
}

// One "weight prefix" pair is a blend, which requests 0.5 % more samples. A single prefix is not a
// blend. Shards of a list without weights are weighted by their samples.
static void source_kinds(void **state) {
    Folder *f = (Folder *)*state;
    const int32_t other[2] = {30, 9};
    Corpus c = make_corpus(f, "ten", SHARD_U16, TEN, 10, 60000, 1),
           e = make_corpus(f, "two", SHARD_U16, other, 2, 60000, 2);
    DataSource source;
    BlendedDataset d;
    Error err = {0};
    const char *alone[1] = {c.prefix}, *pair[2] = {"0.2", c.prefix}, *list[2] = {c.prefix, e.prefix};
    assert_true(data_source_open(&source, alone, 1, &err));
    assert_null(source.weights);
    assert_true(
        blended_dataset_build(&d, &source, &(SplitRequest){SPLIT_TRAIN, NULL, 9, 8, 1234, 0}, NULL, &err));
    assert_int_equal(d.samples, 9);
    assert_int_equal(d.parts[0].epochs, 1);
    blended_dataset_free(&d);
    data_source_close(&source);

    assert_true(data_source_open(&source, pair, 2, &err));
    assert_true(
        blended_dataset_build(&d, &source, &(SplitRequest){SPLIT_TRAIN, NULL, 9, 8, 1234, 0}, NULL, &err));
    assert_int_equal(d.samples, 10);  // ceil(9.045), hence a second epoch
    assert_int_equal(d.parts[0].epochs, 2);
    blended_dataset_free(&d);
    data_source_close(&source);

    assert_true(data_source_open(&source, list, 2, &err));
    assert_null(source.weights);
    assert_true(
        blended_dataset_build(&d, &source, &(SplitRequest){SPLIT_TEST, NULL, 99, 8, 1234, 0}, NULL, &err));
    assert_true(d.weights[0] == 9.0 / 13 && d.weights[1] == 4.0 / 13 && d.samples == 13);
    blended_dataset_free(&d);
    data_source_close(&source);
    free_corpus(&c);
    free_corpus(&e);
}

static void expect_source_error(const char *const *words, int count, int code, const char *what) {
    DataSource source;
    Error err = {0};
    assert_false(data_source_open(&source, words, count, &err));
    assert_int_equal(err.code, code);
    if (!strstr(err.what, what)) fail_msg("'%s' does not say '%s'", err.what, what);
}

static void source_errors(void **state) {
    Corpus c = make_corpus((Folder *)*state, "ten", SHARD_U16, TEN, 10, 60000, 1);
    const char *p = c.prefix;
    expect_source_error(NULL, 0, EXIT_USAGE, "is empty");
    expect_source_error((const char *[]){"/no/such/shard"}, 1, EXIT_DATA, "/no/such/shard.idx");
    expect_source_error((const char *[]){"0", p}, 2, EXIT_USAGE, "weight '0'");
    expect_source_error((const char *[]){"-1", p}, 2, EXIT_USAGE, "weight '-1'");
    expect_source_error((const char *[]){"nan", p}, 2, EXIT_USAGE, "weight 'nan'");
    expect_source_error((const char *[]){"inf", p}, 2, EXIT_USAGE, "weight 'inf'");
    expect_source_error((const char *[]){"1", p, "half", p}, 4, EXIT_USAGE, "weight 'half'");
    expect_source_error((const char *[]){p, "1"}, 2, EXIT_USAGE, "not a positive number");
    expect_source_error((const char *[]){"1", p, p}, 3, EXIT_USAGE, "3 arguments are not");
    expect_source_error((const char *[]){"1", p, "2", "/no/such"}, 4, EXIT_DATA, "/no/such.idx");
    free_corpus(&c);
}

static void build_errors(void **state) {
    Folder *f = (Folder *)*state;
    const int32_t lengths[4] = {0, 0, 1, 5};
    Corpus c = make_corpus(f, "few", SHARD_U16, lengths, 4, 60000, 1);
    Shard s;
    GptDataset d;
    Error err = {0};
    assert_true(shard_open(&s, c.prefix, &err));
    // An empty split (Megatron-LM hangs).
    assert_false(gpt_dataset_build(&d, &s, &(PartRequest){SPLIT_TEST, 4, 4, 10, 8, 1, NULL}, NULL, &err));
    assert_int_equal(err.code, EXIT_DATA);
    assert_non_null(strstr(err.what, "test split has none of the 4"));
    assert_false(gpt_dataset_build(&d, &s, &(PartRequest){SPLIT_VALID, 0, 2, 10, 8, 1, NULL}, NULL, &err));
    assert_int_equal(err.code, EXIT_DATA);
    assert_non_null(strstr(err.what, "0 tokens"));
    assert_false(gpt_dataset_build(&d, &s, &(PartRequest){SPLIT_VALID, 0, 3, 10, 8, 1, NULL}, NULL, &err));
    assert_non_null(strstr(err.what, "1 tokens"));
    const int64_t many[3] = {INT64_MAX, INT64_MAX / 8, 1ll << 33};
    for (int k = 0; k < 3; k++) {
        assert_false(
            gpt_dataset_build(&d, &s, &(PartRequest){SPLIT_TRAIN, 0, 4, many[k], 8, 1, NULL}, NULL, &err));
        assert_int_equal(err.code, EXIT_DATA);
        assert_non_null(strstr(err.what, "exceed the limits of the index"));
    }
    assert_false(gpt_dataset_build(&d, &s, &(PartRequest){SPLIT_TRAIN, 0, 4, 1, 0, 1, NULL}, NULL, &err));
    assert_int_equal(err.code, EXIT_USAGE);
    shard_close(&s);

    const double bounds[SPLITS + 1] = {0, 1, 1, 1};
    DataSource source;
    BlendedDataset b;
    const char *words[2] = {"1", c.prefix};
    assert_true(data_source_open(&source, words, 2, &err));
    assert_false(
        blended_dataset_build(&b, &source, &(SplitRequest){SPLIT_VALID, bounds, 5, 8, 1, 0}, NULL, &err));
    assert_int_equal(err.code, EXIT_USAGE);
    data_source_close(&source);
    free_corpus(&c);
}

// If a small request divides unevenly, a blend's last samples can exceed the samples of a shard.
// Megatron-LM then fails. Here the blend ends, but never before the requested number of samples.
static void blend_limits(void **state) {
    Folder *f = (Folder *)*state;
    const char *names[4] = {"p", "q", "r", "s"};
    Corpus c[4];
    const int32_t one[1] = {9};  // S = 8: exactly one sample per epoch
    for (int k = 0; k < 4; k++) c[k] = make_corpus(f, names[k], SHARD_U16, one, 1, 60000, (uint64_t)k);
    Error err = {0};
    uint64_t seed = 3;
    int built = 0, cut = 0;
    for (int round = 0; round < 400; round++) {
        char weight[4][16];
        const char *words[8];
        for (int k = 0; k < 4; k++) {
            snprintf(weight[k], sizeof weight[k], "%u", 1 + next(&seed) % (k == 0 ? 1000u : 9u));
            words[2 * k] = weight[k];
            words[2 * k + 1] = c[k].prefix;
        }
        DataSource source;
        BlendedDataset d;
        assert_true(data_source_open(&source, words, 8, &err));
        int64_t target = 1 + next(&seed) % 20, asked = 0;
        built += blended_dataset_build(&d, &source, &(SplitRequest){SPLIT_TRAIN, NULL, target, 8, 1, 0}, NULL,
                                       &err);
        assert_true(d.samples >= target);
        for (int k = 0; k < 4; k++)
            asked += (int64_t)ceil((double)target * (source.weights[k] / numpy_sum(source.weights, 4)) *
                                   1.005);
        cut += d.samples < asked;
        for (int64_t i = 0; i < d.samples; i++) {
            int64_t part_sample;
            int part = blended_dataset_shard(&d, i, &part_sample);
            assert_true(part_sample < d.parts[part].samples);
        }
        blended_dataset_free(&d);
        data_source_close(&source);
    }
    assert_int_equal(built, 400);
    assert_true(cut > 0);
    for (int k = 0; k < 4; k++) free_corpus(&c[k]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(generator),
        cmocka_unit_test(shuffles),
        cmocka_unit_test(long_shuffle),
        cmocka_unit_test(sums),
        cmocka_unit_test(blend_table),
        cmocka_unit_test(splits),
        cmocka_unit_test_setup_teardown(golden_indices, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(matches_naive_reference, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(blends, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(source_kinds, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(source_errors, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(build_errors, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(blend_limits, make_folder, remove_folder),
    };
    return cmocka_run_group_tests_name("dataset", tests, NULL, NULL);
}
