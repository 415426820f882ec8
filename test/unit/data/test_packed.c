// Tests samples of packed conversations (--sft): packing, cutting, padding, masks, epochs, splits
// and blends, the batches of the loader, and errors of the mask shards.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dev/lib/shard_writer.h"
#include "llmc/data/loader.h"
#include "test/leaks.h"
#include "test/unit/folder.h"

// T = 8, so samples have 9 tokens. Token t of conversation c is 20 c + t; the loss counts odd t and
// the first token, which no token predicts.
enum { T = 8, ROOM = T + 1, COUNT = 12, STEP = 20, VOCABULARY = 500, PAD = 499 };
static const int32_t lengths[COUNT] = {3, 5, 9, 1, 8, 12, 2, 2, 4, 7, 1, 6};

typedef struct Folder {
    char path[64], prefix[96], mask[112];
} Folder;

static bool counts(int t) { return t % 2 == 1 || t == 0; }

static void write_shard(const char *prefix, int dtype, int n, int value_of_mask) {
    Error err = {0};
    ShardWriter *w = shard_writer_open(prefix, dtype, &err);
    assert_non_null(w);
    for (int c = 0; c < n; c++) {
        int32_t ids[STEP];
        for (int t = 0; t < lengths[c]; t++)
            ids[t] = value_of_mask ? (counts(t) ? value_of_mask : 0) : STEP * c + t;
        assert_true(shard_writer_add_sequence(w, ids, lengths[c], &err));
        shard_writer_end_document(w);
    }
    assert_true(shard_writer_close(w, &err));
}

static int make_folder(void **state) {
    Folder *f = calloc(1, sizeof *f);
    *state = f;
    if (folder_make(f->path, sizeof f->path, "test_packed")) return -1;
    snprintf(f->prefix, sizeof f->prefix, "%s/x", f->path);
    snprintf(f->mask, sizeof f->mask, "%s" SHARD_MASK_SUFFIX, f->prefix);
    write_shard(f->prefix, SHARD_U16, COUNT, 0);
    write_shard(f->mask, SHARD_U8, COUNT, 1);
    return 0;
}

static int remove_folder(void **state) {
    int rc = folder_remove(((Folder *)*state)->path);
    free(*state);
    return rc;
}

static LoaderOptions options(const char *const *words, int count) {
    return (LoaderOptions){.data_path = {words, count},
                           .split = "1,0,0",
                           .samples = {20, 0, 0},
                           .seq_length = T,
                           .vocab_size = VOCABULARY,
                           .eod = PAD,
                           .sft = true,
                           .seed = 1234,
                           .micro_batch_size = 1,
                           .dp_size = 1};
}

static Loader *open_loader(const LoaderOptions *o) {
    Error err = {0};
    Loader *l = loader_open(o, (Peers){MPI_COMM_SELF, 0, NULL}, &err);
    if (!l) fail_msg("%s", err.what);
    return l;
}

// Checks one row of a batch. Returns the number of conversations, and adds them to seen. *room:
// tokens that are left; *first: length of the first conversation in the sample.
static int check_row(const Batch *b, int row, int seen[COUNT], int *room, int *first) {
    const int32_t *tokens = b->tokens + row * T, *targets = b->targets + row * T;
    int32_t ids[ROOM], conversations = 0, at = 0;
    memcpy(ids, tokens, T * sizeof *ids);
    ids[T] = targets[T - 1];
    assert_memory_equal(ids + 1, targets, T * sizeof *ids);
    while (at < ROOM && ids[at] != PAD) {
        int c = ids[at] / STEP, kept = lengths[c] < ROOM ? lengths[c] : ROOM;
        assert_true(at + kept <= ROOM);
        for (int t = 0; t < kept; t++) {
            assert_int_equal(ids[at + t], STEP * c + t);
            if (at + t < T) {
                assert_int_equal(b->positions[row * T + at + t], t);
                assert_int_equal(b->doc_start[row * T + at + t], at);
            }
            // An input has the mask of its target, or 0 if the target starts a conversation.
            if (at + t > 0) assert_true(b->loss_mask[row * T + at + t - 1] == (t > 0 && counts(t)));
        }
        if (!conversations++) *first = kept;
        seen[c]++;
        at += kept;
    }
    *room = ROOM - at;
    for (int t = at; t < ROOM; t++) {
        assert_int_equal(ids[t], PAD);
        if (t > 0) assert_true(b->loss_mask[row * T + t - 1] == 0);
        if (t == T) continue;
        assert_int_equal(b->positions[row * T + t], t - at);
        assert_int_equal(b->doc_start[row * T + t], at);
    }
    return conversations;
}

// Whole conversations, each once per epoch; a sample ends only where the next one does not fit. The
// last epoch is needed for the requested samples.
static void expect_epochs(const char *prefix, int requested) {
    LoaderOptions o = options(&prefix, 1);
    o.samples[SPLIT_TRAIN] = requested;
    Loader *l = open_loader(&o);
    int seen[COUNT] = {0}, packed = 0, room = 0, epochs = 0;
    int64_t ends[100];  // samples up to the end of each epoch
    for (int64_t k = 0; k < loader_samples(l, SPLIT_TRAIN); k++) {
        Batch b;
        Error err = {0};
        int first, left = room, before = packed;
        assert_true(loader_batch(l, SPLIT_TRAIN, k, &b, &err));
        packed += check_row(&b, 0, seen, &room, &first);
        if (before % COUNT) assert_true(first > left);
        if (packed % COUNT) continue;
        epochs++;
        for (int c = 0; c < COUNT; c++) assert_int_equal(seen[c], epochs);
        assert_true(loader_epoch(l, k + 1) == epochs);
        ends[epochs - 1] = k + 1;
    }
    assert_true(epochs >= 2);
    assert_true(ends[epochs - 1] >= requested && ends[epochs - 2] < requested);
    assert_int_equal(packed, epochs * COUNT);
    loader_close(l);
}

static void every_conversation_once(void **state) {
    static const int requested[] = {9, 20, 90, 200};
    for (int i = 0; i < 4; i++) expect_epochs(((Folder *)*state)->prefix, requested[i]);
}

// Reads all batches of both loaders, which must be equal for the samples of the shorter one.
static void expect_same_start(Loader *a, Loader *b) {
    for (int64_t k = 0; k < loader_samples(a, SPLIT_TRAIN); k++) {
        Batch x, y;
        Error err = {0};
        assert_true(loader_batch(a, SPLIT_TRAIN, k, &x, &err) && loader_batch(b, SPLIT_TRAIN, k, &y, &err));
        assert_memory_equal(x.tokens, y.tokens, T * sizeof *x.tokens);
        assert_memory_equal(x.loss_mask, y.loss_mask, T * sizeof *x.loss_mask);
        assert_memory_equal(x.doc_start, y.doc_start, T * sizeof *x.doc_start);
    }
    loader_close(a);
    loader_close(b);
}

static void more_samples_change_nothing(void **state) {
    const char *words[1] = {((Folder *)*state)->prefix};
    LoaderOptions o = options(words, 1), more = o;
    more.samples[SPLIT_TRAIN] = 90;
    expect_same_start(open_loader(&o), open_loader(&more));
}

static void ranks_and_rows(void **state) {
    const char *words[1] = {((Folder *)*state)->prefix};
    LoaderOptions one = options(words, 1), part = one;
    part.micro_batch_size = 2;
    part.dp_size = 2;
    part.dp_rank = 1;
    Loader *l = open_loader(&one), *second = open_loader(&part);
    Batch whole, rows;
    Error err = {0};
    assert_true(loader_batch(second, SPLIT_TRAIN, 4, &rows, &err));
    for (int j = 0; j < 2; j++) {
        assert_true(loader_batch(l, SPLIT_TRAIN, 4 + 2 + j, &whole, &err));
        assert_memory_equal(rows.tokens + j * T, whole.tokens, T * sizeof *whole.tokens);
        assert_memory_equal(rows.loss_mask + j * T, whole.loss_mask, T * sizeof *whole.loss_mask);
    }
    loader_close(l);
    loader_close(second);
}

static void splits_and_blends(void **state) {
    const char *prefix = ((Folder *)*state)->prefix, *words[4] = {"0.7", prefix, "0.3", prefix};
    LoaderOptions split = options(words + 1, 1), blend = options(words, 4);
    split.split = "50,50,0";
    split.samples[SPLIT_VALID] = ONE_EPOCH;
    int seen[COUNT] = {0}, room, first;
    Batch b;
    Error err = {0};
    Loader *l = open_loader(&split);
    for (int64_t k = 0; k < loader_samples(l, SPLIT_VALID); k++) {
        assert_true(loader_batch(l, SPLIT_VALID, k, &b, &err));
        check_row(&b, 0, seen, &room, &first);
    }
    for (int c = 0; c < COUNT; c++) assert_int_equal(seen[c], c >= COUNT / 2);
    loader_close(l);
    l = open_loader(&blend);
    for (int64_t k = 0; k < loader_samples(l, SPLIT_TRAIN); k++) {
        assert_true(loader_batch(l, SPLIT_TRAIN, k, &b, &err));
        check_row(&b, 0, seen, &room, &first);
    }
    loader_close(l);
}

static void reports(void **state) {
    const char *words[1] = {((Folder *)*state)->prefix};
    LoaderOptions o = options(words, 1);
    char text[8192] = "";
    FILE *out = fmemopen(text, sizeof text, "w");
    Error err = {0};
    Loader *l = open_loader(&o);
    loader_print_summary(l, out);
    for (int k = 0; k < 3; k++) assert_true(loader_inspect(l, k, out, NULL, NULL, &err));
    assert_true(check_data(&o, out, &err));
    fclose(out);
    assert_non_null(
        strstr(text, "of packed conversations; 1 conversations have more than 9 tokens and are cut"));
    assert_non_null(strstr(text, ": padding\n"));
    assert_non_null(strstr(text, "  loss masks: 0 "));
    assert_non_null(strstr(text, "x_loss_mask: the loss counts 39 tokens; 0 sequences have none: OK"));
    loader_close(l);
}

// The summary and --inspect-data count conversations, because padding is not data.
static void reports_of_several_epochs(void **state) {
    enum { REQUESTED = 90 };
    const char *words[1] = {((Folder *)*state)->prefix};
    LoaderOptions o = options(words, 1);
    o.samples[SPLIT_TRAIN] = REQUESTED;
    Loader *l = open_loader(&o);
    int seen[COUNT] = {0}, room, first, conversations = 0, tokens = 0, all = 0;
    for (int k = 0; k < loader_samples(l, SPLIT_TRAIN); k++) {
        Batch b;
        Error err = {0};
        assert_true(loader_batch(l, SPLIT_TRAIN, k, &b, &err));
        int count = check_row(&b, 0, seen, &room, &first);
        all += count;
        if (k < REQUESTED) {
            conversations += count;
            tokens += ROOM - room;
        }
    }
    char text[8192] = "", summary[128], inspected[160];
    int epochs = all / COUNT;
    long samples = (long)loader_samples(l, SPLIT_TRAIN);
    assert_true(epochs > 2 && all % COUNT == 0);
    assert_true(loader_epoch(l, REQUESTED) == (double)conversations / COUNT);
    snprintf(summary, sizeof summary, "%d epochs, %ld samples (about %ld per epoch) of packed conversations",
             epochs, samples, (samples + epochs / 2) / epochs);
    snprintf(inspected, sizeof inspected, "%d samples, %d conversations, %d tokens, %.3f epochs of %d ",
             REQUESTED, conversations, tokens, (double)conversations / COUNT, COUNT);
    FILE *out = fmemopen(text, sizeof text, "w");
    Error err = {0};
    loader_print_summary(l, out);
    assert_true(loader_inspect(l, 0, out, NULL, NULL, &err));
    fclose(out);
    if (!strstr(text, summary) || !strstr(text, inspected))
        fail_msg("%s%s not in\n%s", summary, inspected, text);
    loader_close(l);
}

// The same of each shard of a blend.
static void reports_of_blends(void **state) {
    const char *prefix = ((Folder *)*state)->prefix, *words[4] = {"0.7", prefix, "0.3", prefix};
    LoaderOptions o = options(words, 4);
    o.samples[SPLIT_TRAIN] = 60;
    char text[8192] = "";
    FILE *out = fmemopen(text, sizeof text, "w");
    Error err = {0};
    Loader *l = open_loader(&o);
    assert_true(loader_inspect(l, 59, out, NULL, NULL, &err));
    fclose(out);
    int samples, conversations, tokens;
    double epochs;
    const char *at = strstr(text, "samples by part:\n");
    assert_non_null(at);
    for (int i = 0; i < 2; i++) {
        at = strstr(at, "/x: ");
        assert_non_null(at);
        assert_int_equal(sscanf(at, "/x: %d samples, %d conversations, %d tokens, %lf", &samples,
                                &conversations, &tokens, &epochs),
                         4);
        assert_int_equal(samples, i ? 18 : 42);
        assert_true(tokens > samples * ROOM / 2 && tokens <= samples * ROOM);
        assert_true(epochs > conversations / (COUNT + 0.01) && epochs < conversations / (COUNT - 0.01));
        at++;
    }
    loader_close(l);
}

// Writes masks with ones from token first[c] on. first[c] = lengths[c]: no ones.
static void write_answers(const Folder *f, const int32_t first[COUNT]) {
    Error err = {0};
    ShardWriter *w = shard_writer_open(f->mask, SHARD_U8, &err);
    assert_non_null(w);
    for (int c = 0; c < COUNT; c++) {
        int32_t mask[STEP];
        for (int t = 0; t < lengths[c]; t++) mask[t] = t >= first[c];
        assert_true(shard_writer_add_sequence(w, mask, lengths[c], &err));
        shard_writer_end_document(w);
    }
    assert_true(shard_writer_close(w, &err));
}

static void expect_summary(const LoaderOptions *o, const char *expected, const char *absent) {
    char text[8192] = "";
    FILE *out = fmemopen(text, sizeof text, "w");
    Loader *l = open_loader(o);
    loader_print_summary(l, out);
    fclose(out);
    loader_close(l);
    if (expected && !strstr(text, expected)) fail_msg("%s", text);
    if (absent && strstr(text, absent)) fail_msg("%s", text);
}

// Conversation 5 has 12 tokens, of which a sample holds the first 9.
static void cut_before_the_first_answer(void **state) {
    const Folder *f = *state;
    const char *words[1] = {f->prefix};
    LoaderOptions o = options(words, 1);
    int32_t first[COUNT] = {0};
    first[5] = 8;  // the last token of a sample
    write_answers(f, first);
    expect_summary(&o, "1 conversations have more than 9 tokens and are cut", "WARNING");
    first[5] = 11;
    write_answers(f, first);
    expect_summary(&o,
                   "x: 1 of 12 conversations of the training split are cut before their first answer and "
                   "add nothing to the loss; shorten their prompts or use --seq-length 11\n",
                   NULL);
    o.seq_length = 10;
    expect_summary(&o, "more than 11 tokens and are cut\n > WARNING: ", NULL);
    o.seq_length = 11;  // nothing is cut
    expect_summary(&o, NULL, "WARNING");
    o.seq_length = T;
    first[5] = lengths[5];  // has no answer: not for lack of room
    write_answers(f, first);
    expect_summary(&o, NULL, "WARNING");
}

static void all_cut_before_the_first_answer(void **state) {
    const Folder *f = *state;
    const char *words[1] = {f->prefix};
    LoaderOptions o = options(words, 1);
    int32_t first[COUNT] = {0};
    first[5] = 11;
    write_answers(f, first);
    o.split = "1,1,10";  // conversation 5 is in the test split
    o.samples[SPLIT_TEST] = ONE_EPOCH;
    loader_close(open_loader(&o));
    o.seq_length = 1;
    for (int c = 0; c < COUNT; c++) first[c] = lengths[c] - 1;
    write_answers(f, first);
    o.split = "1,0,11";  // the first conversation has 3 tokens
    Error err = {0};
    assert_null(loader_open(&o, (Peers){MPI_COMM_SELF, 0, NULL}, &err));
    assert_int_equal(err.code, EXIT_DATA);
    assert_non_null(strstr(err.what,
                           "all 1 conversations of the training split are cut before their first "
                           "answer; shorten their prompts or use --seq-length 2"));
}

static void fingerprints_include_masks(void **state) {
    const Folder *f = *state;
    const char *words[1] = {f->prefix};
    LoaderOptions o = options(words, 1);
    Loader *l = open_loader(&o);
    int shards;
    uint64_t *before = loader_fingerprints(l, &shards);
    loader_close(l);
    write_shard(f->mask, SHARD_I32, COUNT, 1);  // the same values in another type
    l = open_loader(&o);
    uint64_t *after = loader_fingerprints(l, &shards);
    loader_close(l);
    assert_int_equal(shards, 1);
    assert_true(*before != *after);
    free(before);
    free(after);
}

static void expect_error(const char *prefix, const char *text) {
    const char *words[1] = {prefix};
    LoaderOptions o = options(words, 1);
    Error err = {0};
    Batch b;
    Loader *l = loader_open(&o, (Peers){MPI_COMM_SELF, 0, NULL}, &err);
    bool ok = l && loader_batch(l, SPLIT_TRAIN, 0, &b, &err);
    assert_false(ok);
    assert_int_equal(err.code, EXIT_DATA);
    if (!strstr(err.what, text)) fail_msg("%s", err.what);
    loader_close(l);
}

static void wrong_masks(void **state) {
    const Folder *f = *state;
    char path[128];
    write_shard(f->mask, SHARD_U8, COUNT - 1, 1);
    expect_error(f->prefix, "has 12 sequences and");
    write_shard(f->mask, SHARD_U8, COUNT, 3);
    expect_error(f->prefix, "loss masks other than 0 and 1");
    snprintf(path, sizeof path, "%s.idx", f->mask);
    assert_int_equal(remove(path), 0);
    expect_error(f->prefix, "--sft reads the loss masks of preprocess_data --chat");
}

int main(int argc, char **argv) {
    leaks_start_mpi(&argc, &argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_conversation_once, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(more_samples_change_nothing, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(ranks_and_rows, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(splits_and_blends, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(reports, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(reports_of_several_epochs, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(reports_of_blends, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(cut_before_the_first_answer, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(all_cut_before_the_first_answer, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(fingerprints_include_masks, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(wrong_masks, make_folder, remove_folder),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL) + leaks_found();
    MPI_Finalize();
    return failures;
}
