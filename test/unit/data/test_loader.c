// Tests the loader: order of samples over ranks and micro-batches, resuming, masks and positions,
// mock data, checks and reports.
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "dev/lib/shard_writer.h"
#include "llmc/data/loader.h"
#include "test/leaks.h"
#include "test/unit/folder.h"

typedef struct Folder {
    char path[64], prefix[96], other[96];
} Folder;

static uint32_t next(uint64_t *seed) {
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33);
}

static void write_shard(const char *prefix, int dtype, const int32_t *tokens, const int32_t *lengths, int n) {
    Error err = {0};
    ShardWriter *w = shard_writer_open(prefix, dtype, &err);
    assert_non_null(w);
    for (int i = 0; i < n; i++) {
        assert_true(shard_writer_add_sequence(w, tokens, lengths[i], &err));
        shard_writer_end_document(w);
        tokens += lengths[i];
    }
    assert_true(shard_writer_close(w, &err));
}

static void write_random_shard(const char *prefix, int dtype, int n, uint64_t seed) {
    int32_t *lengths = (int32_t *)calloc((size_t)n, sizeof *lengths),
            *tokens = (int32_t *)calloc((size_t)n * 30, sizeof *tokens);
    for (int i = 0; i < n; i++) lengths[i] = (int32_t)(next(&seed) % 30);
    for (int t = 0; t < n * 30; t++) tokens[t] = (int32_t)(next(&seed) % 500);
    write_shard(prefix, dtype, tokens, lengths, n);
    free(lengths);
    free(tokens);
}

static int make_folder(void **state) {
    Folder *f = (Folder *)calloc(1, sizeof *f);
    *state = f;
    if (folder_make(f->path, sizeof f->path, "test_loader")) return -1;
    snprintf(f->prefix, sizeof f->prefix, "%s/x", f->path);
    snprintf(f->other, sizeof f->other, "%s/y", f->path);
    write_random_shard(f->prefix, SHARD_U16, 80, 1);
    write_random_shard(f->other, SHARD_I32, 50, 2);
    return 0;
}

static int remove_folder(void **state) {
    int rc = folder_remove(((Folder *)*state)->path);
    free(*state);
    return rc;
}

// One shard, T = 8, 96 training samples, B = 4, one rank.
static LoaderOptions one_shard(const char *const *prefix) {
    return (LoaderOptions){.data_path = {prefix, 1},
                           .split = "80,10,10",
                           .samples = {96, 24, 8},
                           .seq_length = 8,
                           .vocab_size = 500,
                           .eod = 499,
                           .seed = 1234,
                           .micro_batch_size = 4,
                           .dp_rank = 0,
                           .dp_size = 1};
}

static Loader *open_loader(const LoaderOptions *o) {
    Error err = {0};
    Loader *l = loader_open(o, (Peers){MPI_COMM_SELF, 0, NULL}, &err);
    if (!l) fail_msg("%s", err.what);
    return l;
}

// Reads the ids of samples directly from the dataset: (count, T + 1).
static int32_t *expected_ids(const LoaderOptions *o, int split, int64_t count) {
    DataSource source;
    BlendedDataset d;
    Error err = {0};
    double bounds[SPLITS + 1];
    assert_true(data_source_open(&source, o->data_path.words, o->data_path.count, &err) &&
                split_parse(o->split, bounds, &err));
    assert_true(
        blended_dataset_build(&d, &source,
                              &(SplitRequest){split, bounds, o->samples[split], o->seq_length, o->seed, 0},
                              NULL, &err));
    int row = o->seq_length + 1;
    int32_t *ids = (int32_t *)malloc((size_t)(count * row) * sizeof *ids);
    for (int64_t i = 0; i < count; i++) blended_dataset_sample(&d, i, ids + i * row);
    blended_dataset_free(&d);
    data_source_close(&source);
    return ids;
}

static void assert_rows(const Batch *b, int rows, int length, const int32_t *ids) {
    for (int j = 0; j < rows; j++) {
        const int32_t *row = ids + (b->first_sample + j) * (length + 1);
        assert_memory_equal(b->tokens + j * length, row, (size_t)length * sizeof *row);
        assert_memory_equal(b->targets + j * length, row + 1, (size_t)length * sizeof *row);
        for (int t = 0; t < length; t++) assert_int_equal(b->positions[j * length + t], t);
    }
    assert_null(b->loss_mask);
    assert_null(b->doc_start);
}

// --eval-seed: runs with different seeds train on different samples but evaluate on the same ones.
static void eval_seed(void **state) {
    Folder *f = (Folder *)*state;
    const char *words[1] = {f->prefix};
    LoaderOptions o = one_shard(words), evaluated = o, first = o, second = o;
    evaluated.seed = first.eval_seed = second.eval_seed = 77;
    second.seed = 4321;
    Loader *runs[2] = {open_loader(&first), open_loader(&second)};
    for (int split = 0; split < SPLITS; split++) {
        int32_t *ids = expected_ids(split == SPLIT_TRAIN ? &first : &evaluated, split, 4),
                *others = expected_ids(&second, split, 4);
        assert_memory_not_equal(ids, others, 4 * 9 * sizeof *ids);
        for (int r = 0; r < 2; r++) {
            Batch b;
            Error err = {0};
            assert_true(loader_batch(runs[r], split, 0, &b, &err));
            assert_rows(&b, 4, 8, split == SPLIT_TRAIN && r == 1 ? others : ids);
        }
        free(ids);
        free(others);
    }
    for (int r = 0; r < 2; r++) loader_close(runs[r]);
}

// For any micro-batch size and number of ranks, iteration i has samples [i * 8, i * 8 + 8) in
// order.
static void sampler_order(void **state) {
    Folder *f = (Folder *)*state;
    const char *words[4] = {"0.7", f->prefix, "0.3", f->other};
    LoaderOptions o = one_shard(words);
    o.data_path.count = 4;
    for (int split = 0; split < SPLITS; split++) {
        int32_t *ids = expected_ids(&o, split, o.samples[split]);
        for (int dp = 1; dp <= 4; dp *= 2) {
            for (int size = 1; size * dp <= 8; size *= 2) {
                for (o.dp_rank = 0; o.dp_rank < dp; o.dp_rank++) {
                    o.dp_size = dp;
                    o.micro_batch_size = size;
                    Loader *l = open_loader(&o);
                    assert_true(loader_has_split(l, split));
                    assert_true(loader_samples(l, split) >= o.samples[split]);
                    int64_t expected_first = (int64_t)o.dp_rank * size;
                    for (int64_t consumed = 0; consumed + size * dp <= o.samples[split];
                         consumed += size * dp, expected_first += size * dp) {
                        Batch b;
                        Error err = {0};
                        assert_true(loader_batch(l, split, consumed, &b, &err));
                        assert_int_equal(b.first_sample, expected_first);
                        assert_rows(&b, size, o.seq_length, ids);
                    }
                    loader_close(l);
                }
            }
        }
        free(ids);
    }
}

// A loader that is opened at any position continues like an uninterrupted one. Splits are
// independent.
static void resume(void **state) {
    const char *prefix = ((Folder *)*state)->prefix;
    LoaderOptions o = one_shard(&prefix);
    Loader *whole = open_loader(&o);
    for (int64_t stop = 4; stop < 96; stop += 20) {
        Loader *again = open_loader(&o);
        Batch a, b;
        Error err = {0};
        for (int64_t c = 0; c < stop; c += 4) assert_true(loader_batch(whole, SPLIT_TRAIN, c, &a, &err));
        for (int64_t c = stop; c < 96; c += 4) {
            assert_true(loader_batch(whole, SPLIT_VALID, c % 24, &a, &err));
            assert_true(loader_batch(whole, SPLIT_TRAIN, c, &a, &err) &&
                        loader_batch(again, SPLIT_TRAIN, c, &b, &err));
            assert_memory_equal(a.tokens, b.tokens, 32 * sizeof(int32_t));
            assert_memory_equal(a.targets, b.targets, 32 * sizeof(int32_t));
        }
        loader_close(again);
    }
    loader_close(whole);
}

enum { E = 9 };  // EOD in the example
static const int32_t EXAMPLE[9] = {5, E, 6, 7, E, E, 8, 3, E};
static const int32_t EXAMPLE_LENGTHS[1] = {9};
static const float EXAMPLE_MASK[8] = {1, 0, 1, 1, 0, 0, 1, 1};
static const int32_t EXAMPLE_POSITIONS[8] = {0, 1, 0, 1, 2, 0, 0, 1};
static const int32_t EXAMPLE_STARTS[8] = {0, 0, 2, 2, 2, 5, 6, 6};

// Tests all combinations of the three flags for document ends on a sample computed by hand.
static void masks(void **state) {
    const char *prefix = ((Folder *)*state)->prefix;
    write_shard(prefix, SHARD_U16, EXAMPLE, EXAMPLE_LENGTHS, 1);
    for (int flags = 0; flags < 8; flags++) {
        LoaderOptions o = one_shard(&prefix);
        o.split = "1,0,0";
        o.samples[0] = 2;
        o.samples[1] = o.samples[2] = 0;
        o.micro_batch_size = 2;
        o.eod = E;
        o.eod_mask_loss = flags & 1;
        o.reset_position_ids = flags & 2;
        o.reset_attention_mask = flags & 4;
        Loader *l = open_loader(&o);
        Batch b;
        Error err = {0};
        assert_true(loader_batch(l, SPLIT_TRAIN, 0, &b, &err));
        // Row 1 has tokens 8 to 16 of the stream: the last token of the first epoch and the start
        // of the second.
        const int row = b.tokens[0] == 5 ? 0 : 1;
        assert_memory_equal(b.tokens + 8 * row, EXAMPLE, 8 * sizeof(int32_t));
        assert_memory_equal(b.targets + 8 * row, EXAMPLE + 1, 8 * sizeof(int32_t));
        assert_int_equal(b.tokens[8 * (1 - row)], E);
        assert_memory_equal(b.tokens + 8 * (1 - row) + 1, EXAMPLE, 7 * sizeof(int32_t));
        assert_int_equal(b.loss_mask != NULL, o.eod_mask_loss);
        assert_int_equal(b.doc_start != NULL, o.reset_attention_mask);
        for (int t = 0; t < 8; t++) {
            assert_int_equal(b.positions[8 * row + t], o.reset_position_ids ? EXAMPLE_POSITIONS[t] : t);
            if (b.loss_mask) assert_true(b.loss_mask[8 * row + t] == EXAMPLE_MASK[t]);
            if (b.doc_start) assert_int_equal(b.doc_start[8 * row + t], EXAMPLE_STARTS[t]);
        }
        loader_close(l);
    }
}

static void mock_data(void **state) {
    LoaderOptions o = one_shard(NULL);
    o.data_path.count = 0;
    o.mock_data = true;
    o.eod = -1;
    o.eod_mask_loss = true;
    o.seq_length = 64;
    o.vocab_size = 50;
    o.micro_batch_size = 1;
    Loader *l = open_loader(&o);
    assert_true(loader_samples(l, SPLIT_TRAIN) == INT64_MAX);
    assert_true(loader_epoch(l, 5) == -1);
    bool differ = false;
    for (int64_t i = 0; i < 300; i++) {
        Batch b;
        Error err = {0};
        int32_t ids[65];
        assert_true(loader_batch(l, SPLIT_TRAIN, i, &b, &err));
        memcpy(ids, b.tokens, 64 * sizeof *ids);
        ids[64] = b.targets[63];
        int ones = 0, t = 1;
        for (; t <= 64 && ids[t] == 1; t++) ones++;
        assert_int_equal(ids[0], ones % 50);
        assert_int_equal(ids[t++], 0);
        for (; t <= 64; t++) assert_int_equal(ids[t], 2);
        for (t = 1; t < 64; t++) assert_true(b.loss_mask[t] == (ids[t] != 0));
        assert_true(loader_batch(l, SPLIT_TRAIN, i + 32767ll * 1000003, &b, &err));
        assert_memory_equal(b.tokens, ids, 64 * sizeof *ids);
        assert_true(loader_batch(l, SPLIT_VALID, i, &b, &err));
        differ |= memcmp(b.tokens, ids, 64 * sizeof *ids) != 0;
    }
    assert_true(differ);
    loader_close(l);
}

static void bad_ids(void **state) {
    const char *prefix = ((Folder *)*state)->prefix;
    const int dtype[2] = {SHARD_U16, SHARD_I32};
    for (int k = 0; k < 2; k++) {
        int32_t tokens[20], lengths[4] = {6, 0, 8, 6};
        for (int t = 0; t < 20; t++) tokens[t] = t;
        tokens[9] = k == 0 ? 500 : 7;
        write_shard(prefix, dtype[k], tokens, lengths, 4);
        if (k == 1) {  // the writer refuses negative ids
            char path[128];
            const int32_t minus = -2;
            snprintf(path, sizeof path, "%s.bin", prefix);
            FILE *file = fopen(path, "r+b");
            fseek(file, 4 * 9, SEEK_SET);
            fwrite(&minus, 4, 1, file);
            fclose(file);
        }
        LoaderOptions o = one_shard(&prefix);
        o.split = "1";
        o.samples[0] = 2;
        o.samples[1] = o.samples[2] = 0;
        o.micro_batch_size = 2;
        Loader *l = open_loader(&o);
        Batch b;
        Error err = {0}, checked = {0};
        assert_false(loader_batch(l, SPLIT_TRAIN, 0, &b, &err));
        char what[160];
        snprintf(what, sizeof what,
                 "%s: sequence 2, position 3: token id %d is outside the vocabulary of 500", prefix,
                 k == 0 ? 500 : -2);
        assert_int_equal(err.code, EXIT_DATA);
        assert_non_null(strstr(err.what, what));
        FILE *null = fopen("/dev/null", "w");
        assert_false(check_data(&o, null, &checked));
        assert_int_equal(checked.code, EXIT_DATA);
        assert_non_null(strstr(checked.what, what));
        fclose(null);
        loader_close(l);
        o.vocab_size = 501;
        l = open_loader(&o);
        assert_int_equal(loader_batch(l, SPLIT_TRAIN, 0, &b, &err), k == 0);
        loader_close(l);
    }
}

static void past_the_end(void **state) {
    const char *prefix = ((Folder *)*state)->prefix;
    LoaderOptions o = one_shard(&prefix);
    o.samples[SPLIT_TEST] = 0;
    Loader *l = open_loader(&o);
    Batch b;
    Error err = {0};
    int64_t samples = loader_samples(l, SPLIT_TRAIN);
    assert_true(loader_batch(l, SPLIT_TRAIN, samples - 4, &b, &err));
    assert_false(loader_batch(l, SPLIT_TRAIN, samples - 3, &b, &err));
    assert_int_equal(err.code, EXIT_DATA);
    assert_non_null(strstr(err.what, "is past the"));
    assert_false(loader_batch(l, SPLIT_TRAIN, -1, &b, &err));
    assert_false(loader_has_split(l, SPLIT_TEST));
    assert_int_equal(loader_samples(l, SPLIT_TEST), 0);
    assert_false(loader_batch(l, SPLIT_TEST, 0, &b, &err));
    loader_close(l);
}

static void expect_error(const LoaderOptions *o, int code, const char *what) {
    Error err = {0};
    assert_null(loader_open(o, (Peers){MPI_COMM_SELF, 0, NULL}, &err));
    if (err.code != code || !strstr(err.what, what)) {
        fail_msg("code %d: '%s' does not say '%s'", err.code, err.what, what);
    }
}

static void open_errors(void **state) {
    Folder *f = (Folder *)*state;
    const char *prefix = f->prefix, *missing = "/no/such/shard";
    const LoaderOptions good = one_shard(&prefix);
    LoaderOptions o = good;
    o.data_path.words = &missing;
    expect_error(&o, EXIT_DATA, "/no/such/shard.idx");
    o = good;
    o.split = "0,1,1";
    expect_error(&o, EXIT_USAGE, "no training data");
    o.split = "x";
    expect_error(&o, EXIT_USAGE, "not a list of numbers");
    o.split = "9999,1,0";  // 80 sequences: the validation split rounds to zero
    expect_error(&o, EXIT_DATA, "validation split has none of the 80 sequences");
    o = good;
    o.eod = -1;
    o.reset_attention_mask = true;
    expect_error(&o, EXIT_USAGE, "EOD");
    o = good;
    o.dp_rank = 1;
    expect_error(&o, EXIT_USAGE, "rank 1 of 1");
    o = good;
    o.mock_data = true;
    o.vocab_size = 2;
    expect_error(&o, EXIT_USAGE, "at least 3");
    o = good;
    o.samples[SPLIT_TRAIN] = INT64_MAX;
    expect_error(&o, EXIT_DATA, "exceed the limits of the index");
}

// With a path per split, each shard is used in full. A split without a path has no data.
static void paths_per_split(void **state) {
    Folder *f = (Folder *)*state;
    const char *train = f->prefix, *valid = f->other;
    LoaderOptions o = one_shard(NULL), alone = one_shard(&valid);
    o.data_path.count = 0;
    o.split_path[SPLIT_TRAIN] = (DataPath){&train, 1};
    o.split_path[SPLIT_VALID] = (DataPath){&valid, 1};
    Loader *l = open_loader(&o);
    assert_true(loader_has_split(l, SPLIT_TRAIN) && loader_has_split(l, SPLIT_VALID) &&
                !loader_has_split(l, SPLIT_TEST));
    alone.split = "1,0,0";
    alone.samples[SPLIT_TRAIN] = o.samples[SPLIT_VALID];
    int32_t *ids = expected_ids(&alone, SPLIT_TRAIN, 24);
    for (int64_t c = 0; c < 24; c += 4) {
        Batch b;
        Error err = {0};
        assert_true(loader_batch(l, SPLIT_VALID, c, &b, &err));
        assert_rows(&b, 4, 8, ids);
    }
    free(ids);
    loader_close(l);
}

// A list without weights is read once. A run that needs more samples is refused at the start.
static void lists_are_read_once(void **state) {
    Folder *f = (Folder *)*state;
    const char *words[2] = {f->prefix, f->other};
    LoaderOptions o = one_shard(words);
    o.data_path.count = 2;
    o.samples[SPLIT_TRAIN] = o.samples[SPLIT_VALID] = o.samples[SPLIT_TEST] = ONE_EPOCH;
    Loader *l = open_loader(&o);
    int64_t there[SPLITS];
    for (int s = 0; s < SPLITS; s++) there[s] = loader_samples(l, s);
    loader_close(l);
    for (int s = 0; s < SPLITS; s++) {
        assert_true(there[s] > 0);
        memcpy(o.samples, there, sizeof there);
        l = open_loader(&o);
        assert_int_equal(loader_samples(l, s), there[s]);
        loader_close(l);
        o.samples[s]++;
        char what[128];
        snprintf(what, sizeof what, "its %s split has %d samples but the run needs %d", split_name(s),
                 (int)there[s], (int)there[s] + 1);
        expect_error(&o, EXIT_DATA, what);
    }
}

// --full-validation reads the whole split exactly once, for any requested number of samples.
static void one_epoch(void **state) {
    Folder *f = (Folder *)*state;
    const char *prefix = f->prefix;
    LoaderOptions o = one_shard(&prefix);
    o.samples[SPLIT_VALID] = ONE_EPOCH;
    Loader *l = open_loader(&o);
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    loader_print_summary(l, out);
    fclose(out);
    assert_non_null(strstr(text, "    validation: None\n"));
    assert_non_null(strstr(text, " tokens, 1 epoch, "));
    Batch b;
    Error err = {0};
    int64_t n = loader_samples(l, SPLIT_VALID);
    assert_true(n > 4 && loader_batch(l, SPLIT_VALID, n - 4, &b, &err) &&
                !loader_batch(l, SPLIT_VALID, n - 3, &b, &err));
    free(text);
    loader_close(l);
}

static void assert_says(const char *text, const char *words) {
    if (!strstr(text, words)) fail_msg("'%s' is not in:\n%s", words, text);
}

static const char *letter(const void *context, int id, size_t *bytes) {
    *bytes = 1;
    return id == E ? NULL : (const char *)context + id;
}

static void reports(void **state) {
    Folder *f = (Folder *)*state;
    const char *prefix = f->prefix;
    write_shard(prefix, SHARD_U16, EXAMPLE, EXAMPLE_LENGTHS, 1);
    LoaderOptions o = one_shard(&prefix);
    o.split = "1,0,0";
    o.samples[0] = 1;
    o.vocab_size = 10;
    Loader *l = open_loader(&o);
    char *text = NULL;
    size_t bytes = 0;
    Error err = {0};
    FILE *out = open_memstream(&text, &bytes);
    loader_print_summary(l, out);
    fflush(out);
    const char *targets =
        " > datasets target sizes (minimum size):\n    train:      1\n    validation: 24\n    test:       "
        "8\n";
    assert_int_equal(strncmp(text, targets, strlen(targets)), 0);
    assert_says(text, " > training: 1 samples of 8 tokens from 1 shard\n");
    assert_says(text, "/x: 1 sequences, 9 tokens, 1 epoch, 1 samples\n");
    assert_says(text, " > validation: no data\n");
    assert_true(loader_epoch(l, 0) == 0 && loader_epoch(l, 9) == 8);
    rewind(out);
    assert_true(loader_inspect(l, 0, out, letter, "abcdefghij", &err));
    fflush(out);
    assert_says(text, "  epoch: 1 of 1\n    tokens 0..8: sequence 0 (9 tokens), from 0 to 8\n");
    assert_says(text, "/x: 1 samples, 8 tokens, 0.889 epochs of 9 tokens\n");
    assert_says(text, "  ids: 5 9 6 7 9 9 8 3 9\n  text:\nf<9>gh<9><9>id<9>\n");
    assert_false(loader_inspect(l, 1, out, NULL, NULL, &err));
    assert_int_equal(err.code, EXIT_USAGE);
    rewind(out);
    assert_true(check_data(&o, out, &err));
    fflush(out);
    assert_says(text,
                "/x: 1 sequences, 1 documents, 9 tokens of 2 bytes, lengths 9 to 9 (0 empty), largest id 9 "
                "of 10: OK\n");
    fclose(out);
    free(text);
    loader_close(l);
}

// Writes a shard of n sequences {5, 6, ends[i % 2]}. Returns options whose EOD is 9.
static LoaderOptions shard_with_ends(const char *const *prefix, const int32_t ends[2], int n) {
    int32_t tokens[3 * 40], lengths[40];
    for (int i = 0; i < n; i++) {
        const int32_t sequence[3] = {5, 6, ends[i % 2]};
        memcpy(tokens + 3 * i, sequence, sizeof sequence);
        lengths[i] = 3;
    }
    write_shard(*prefix, SHARD_U16, tokens, lengths, n);
    LoaderOptions o = one_shard(prefix);
    o.split = "1,0,0";
    o.samples[0] = o.seq_length = 1;
    o.samples[1] = o.samples[2] = 0;
    o.vocab_size = 10;
    o.eod = 9;
    return o;
}

static char *text_of_check(const LoaderOptions *o, bool *good, Error *err) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    *good = check_data(o, out, err);
    fclose(out);
    return text;
}

// A shard of another vocabulary may contain only valid ids. The last tokens of its documents then
// reveal the mismatch.
static void eod_of_another_vocabulary(void **state) {
    static const struct {
        int32_t ends[2];
        int sequences;
        bool known;  // options->known_ids; false for NullTokenizer
        bool refused, warns;
    } cases[] = {
        {{7, 7}, 8, true, true, false},  // 7 ends all documents, occurs nowhere else, is the largest
        {{7, 7}, 40, true, true, false},
        {{7, 7}, 40, false, false, true},  // only a warning if the vocabulary is unknown
        {{7, 7}, 7, true, false, true},    // too few documents to be certain
        {{9, 9}, 40, true, false, false},  // this vocabulary's EOD
        {{7, 9}, 40, true, false, false},
        {{7, 8}, 40, true, false, false},  // documents cut at arbitrary positions
        {{3, 3}, 40, true, false, true},   // possibly a newline, because the id is small
        {{6, 6}, 40, true, false, true},   // also occurs inside documents
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *prefix = ((Folder *)*state)->prefix;
        LoaderOptions o = shard_with_ends(&prefix, cases[i].ends, cases[i].sequences);
        o.known_ids = cases[i].known;
        Error checked = {0}, opened = {0};
        bool good;
        char *text = text_of_check(&o, &good, &checked), words[64];
        assert_int_equal(good, !cases[i].refused);
        snprintf(words, sizeof words, " ends with id %d instead of 9, ", cases[i].ends[0]);
        assert_int_equal(strstr(text, words) != NULL, cases[i].warns);
        free(text);
        Loader *l = loader_open(&o, (Peers){MPI_COMM_SELF, 0, NULL}, &opened);
        assert_int_equal(l != NULL, !cases[i].refused);
        if (cases[i].refused) {
            snprintf(words, sizeof words, "with id %d, which occurs nowhere else", cases[i].ends[0]);
            assert_int_equal(checked.code, EXIT_DATA);
            assert_int_equal(opened.code, EXIT_DATA);
            assert_says(opened.what, words);
            assert_says(checked.what, words);
        }
        if (l) {
            size_t bytes = 0;
            FILE *out = open_memstream(&text, &bytes);
            loader_print_summary(l, out);
            fclose(out);
            assert_int_equal(strstr(text, "WARNING") != NULL, cases[i].warns);
            free(text);
            loader_close(l);
        }
    }
}

// --check-data reads shards, not samples, so an empty split is no error.
static void checking_needs_no_samples(void **state) {
    const char *prefix = ((Folder *)*state)->prefix, *missing = "/no/such/shard";
    LoaderOptions o = {.data_path = {&prefix, 1}, .split = "9999,1,0", .vocab_size = 500, .eod = 499};
    Error err = {0};
    bool good;
    char *text = text_of_check(&o, &good, &err);
    assert_true(good);
    assert_says(text, "/x: 80 sequences, 80 documents");
    free(text);
    o.data_path.words = &missing;
    text = text_of_check(&o, &good, &err);
    assert_false(good);
    assert_int_equal(err.code, EXIT_DATA);
    free(text);
    o = (LoaderOptions){.mock_data = true, .vocab_size = 500};
    text = text_of_check(&o, &good, &err);
    assert_true(good);
    assert_says(text, "nothing to check");
    free(text);
}

int main(int argc, char **argv) {
    leaks_start_mpi(&argc, &argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(eval_seed, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(sampler_order, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(resume, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(masks, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(eod_of_another_vocabulary, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(checking_needs_no_samples, make_folder, remove_folder),
        cmocka_unit_test(mock_data),
        cmocka_unit_test_setup_teardown(bad_ids, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(past_the_end, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(open_errors, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(paths_per_split, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(lists_are_read_once, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(one_epoch, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(reports, make_folder, remove_folder),
    };
    int failed = cmocka_run_group_tests_name("loader", tests, NULL, NULL);
    failed += leaks_found();
    MPI_Finalize();
    return failed;
}
