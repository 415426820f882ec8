// Tests the list of a run's checkpoints (its lineage): parsing, hostile files, updates by saves,
// the choice of a checkpoint if the tracker is lost, and the fallback to an earlier checkpoint of
// the run. Also checks that a pipe in place of a file does not block a load.
#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/checkpoint/checkpoint.h"
#include "test/unit/folder.h"

typedef struct Folder {
    char path[64], list[128], tracker[128];
} Folder;

static int make_folder(void **state) {
    Folder *f = (Folder *)calloc(1, sizeof *f);
    if (!f) return -1;
    if (folder_make(f->path, sizeof f->path, "test_lineage")) return -1;
    snprintf(f->list, sizeof f->list, "%s/checkpoints_of_run.txt", f->path);
    snprintf(f->tracker, sizeof f->tracker, "%s/latest_checkpointed_iteration.txt", f->path);
    alarm(60);  // ends the test if a load blocks on a pipe
    *state = f;
    return 0;
}

static int remove_folder(void **state) {
    Folder *f = (Folder *)*state;
    alarm(0);
    int rc = folder_remove(f->path);
    free(f);
    return rc;
}

static void write_bytes(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}
static void write_text(const char *path, const char *text) { write_bytes(path, text, strlen(text)); }

// Replaces a file with a pipe.
static void put_pipe(const char *path) {
    unlink(path);
    assert_int_equal(mkfifo(path, 0666), 0);
}

// Saves a complete checkpoint of one parameter.
static void fetch(void *context, int i, void *host) { memset(host, 'a' + i, 8 * 4); }

static void save(const Folder *f, int64_t before, int64_t iteration, int64_t keep, char *others) {
    Error err = {0};
    static const Tensor tensor = {.name = "wte", .dims = 1, .whole = {8, 1}};
    Slice slices[FIRST_KINDS];
    for (int k = 0; k < FIRST_KINDS; k++) slices[k] = (Slice){"wte", (SliceKind)k, 0, 8, {0, 0}, 0};
    CheckpointSave what = {.directory = f->path,
                           .state = {.iteration = iteration},
                           .tensors = &tensor,
                           .tensor_count = 1,
                           .slices = slices,
                           .slice_count = FIRST_KINDS,
                           .fetch = fetch,
                           .keep = {keep, 0},
                           .before = before,
                           .peers = {MPI_COMM_SELF, 0, NULL}};
    CheckpointJob *job = checkpoint_begin(&what, &err);
    bool done = false;
    while (job && !done) {
        if (!checkpoint_advance(job, &done, &err)) break;
    }
    if (!done) fail_msg("%s", err.what);
    if (others) strcpy(others, checkpoint_job_notes(job)->others);
    assert_string_equal(checkpoint_job_notes(job)->damage, "");
    checkpoint_job_free(job);
}

static void spoil_manifest(const Folder *f, int64_t iteration) {
    char *path = text_format("%s/iter_%07" PRId64 "/manifest.json", f->path, iteration);
    assert_int_equal(truncate(path, 100), 0);
    free(path);
}

// Checks the iterations in the lineage file, for example "10 20 24".
static void assert_listed(const Folder *f, const char *wanted) {
    Lineage l;
    Error err;
    char text[200] = "";
    assert_true(lineage_read(f->path, &l, &err));
    for (int i = 0; i < l.count; i++)
        sprintf(text + strlen(text), "%s%" PRId64, i ? " " : "", l.iterations[i]);
    assert_true(l.listed);
    lineage_free(&l);
    assert_string_equal(text, wanted);
}

// Checks the iterations of the checkpoints in the folder.
static void assert_there(const Folder *f, const char *wanted) {
    int count;
    char text[200] = "";
    int64_t *list = save_folder_list(f->path, &count);
    for (int i = 0; i < count; i++) sprintf(text + strlen(text), "%s%" PRId64, i ? " " : "", list[i]);
    free(list);
    assert_string_equal(text, wanted);
}

// --------------------------------------------------------------------------------------------

static void hostile_lists(void **state) {
    Folder *f = (Folder *)*state;
    Lineage l;
    Error err;
    static const struct {
        const char *text;
        int count;  // 0: rejected
    } cases[] = {{"5\n", 1},
                 {"5", 1},
                 {"0\n", 1},
                 {"0000005\n7\n", 2},
                 {"1\n2\n3", 3},
                 {"999999999999999\n", 1},
                 {"", 0},
                 {"\n", 0},
                 {"5\n\n", 0},
                 {"-5\n", 0},
                 {"+5\n", 0},
                 {" 5\n", 0},
                 {"5 \n", 0},
                 {"5\r\n", 0},
                 {"5\n5\n", 0},
                 {"7\n5\n", 0},
                 {"5x\n", 0},
                 {"0x5\n", 0},
                 {"1e3\n", 0},
                 {"5.\n", 0},
                 {"release\n", 0},
                 {"9999999999999999\n", 0},
                 {"99999999999999999999999999\n", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_text(f->list, cases[i].text);
        assert_true(lineage_read(f->path, &l, &err));
        if (l.listed != (cases[i].count > 0) || l.count != cases[i].count || !*l.damage != l.listed)
            fail_msg("'%s': %d, %s", cases[i].text, l.count, l.damage);
        assert_null(strchr(l.damage, '\n'));
        lineage_free(&l);
    }
    write_bytes(f->list, "5\0\n", 3);
    assert_true(lineage_read(f->path, &l, &err) && !l.listed && *l.damage);
    assert_int_equal(truncate(f->list, (off_t)1 << 40), 0);  // too large
    assert_true(lineage_read(f->path, &l, &err) && !l.listed && *l.damage);
    unlink(f->list);
    assert_int_equal(mkdir(f->list, 0777), 0);
    assert_true(lineage_read(f->path, &l, &err) && !l.listed && *l.damage);
    assert_int_equal(rmdir(f->list), 0);
    put_pipe(f->list);
    assert_true(lineage_read(f->path, &l, &err) && !l.listed && *l.damage);
}

// If a list exceeds the limit, its oldest iterations are not written, and it can be read again.
static void long_lists(void **state) {
    Folder *f = (Folder *)*state;
    Error err;
    uint64_t bytes;
    Lineage l = {NULL, LINEAGE_MOST + 3, true, ""}, back;
    l.iterations = (int64_t *)calloc((size_t)l.count, sizeof(int64_t));
    for (int i = 0; i < l.count; i++) l.iterations[i] = INT64_C(900000000000000) + i;
    char *text = lineage_text(&l, &bytes);
    assert_true(bytes <= LINEAGE_MAX_BYTES);
    write_bytes(f->list, text, bytes);
    assert_true(lineage_read(f->path, &back, &err) && back.listed && back.count == LINEAGE_MOST);
    assert_int_equal(back.iterations[0], l.iterations[3]);
    assert_int_equal(lineage_before(&back, INT64_MAX), l.iterations[l.count - 1]);
    assert_true(lineage_holds(&back, l.iterations[1000]) && !lineage_holds(&back, l.iterations[0]) &&
                lineage_before(&back, 17) == -1);
    free(text);
    lineage_free(&back);
    lineage_free(&l);
}

// A second run starts from scratch in the folder. It counts only its own checkpoints and keeps
// the first run's checkpoints.
static void another_run(void **state) {
    Folder *f = (Folder *)*state;
    char others[1400];
    save(f, -1, 10, 2, others);
    assert_string_equal(others, "");
    save(f, 10, 20, 2, others);
    save(f, 20, 23, 2, others);
    assert_there(f, "20 23");
    save(f, -1, 10, 2, others);
    assert_listed(f, "10");
    assert_non_null(strstr(others, "(iterations 20 and 23), which are neither counted nor removed"));
    save(f, 10, 20, 2, others);
    save(f, 20, 30, 2, others);
    assert_listed(f, "10 20 30");
    assert_there(f, "20 23 30");
    save(f, 30, 40, 2, others);
    assert_listed(f, "20 30 40");
    assert_there(f, "23 30 40");
    for (int i = 50; i < 60; i++) save(f, -1, i, 1, others);
    assert_non_null(strstr(others, "(iterations 23 to 58, 12 in all)"));
}

// After resuming from an older checkpoint, the later checkpoints belong to an abandoned fork.
static void resuming_from_an_older_checkpoint(void **state) {
    Folder *f = (Folder *)*state;
    char others[1400];
    save(f, -1, 10, 3, NULL);
    save(f, 10, 20, 3, NULL);
    save(f, 20, 37, 3, NULL);
    save(f, 20, 24, 3, others);
    assert_listed(f, "10 20 24");
    assert_non_null(strstr(others, "(iterations 37)"));
    save(f, 24, 32, 3, NULL);
    save(f, 32, 40, 3, NULL);
    assert_there(f, "24 32 37 40");
    // Resumes from the abandoned fork. The checkpoints before 37 are unknown.
    save(f, 37, 38, 3, others);
    assert_listed(f, "37 38");
    // The same iteration is saved again.
    save(f, 38, 38, 3, NULL);
    assert_listed(f, "37 38");
}

// Without a valid list, all earlier checkpoints in the folder are treated as the run's own.
static void without_a_list(void **state) {
    Folder *f = (Folder *)*state;
    Lineage l;
    Error err;
    for (int i = 1; i <= 4; i++) save(f, i - 1, i, 0, NULL);
    unlink(f->list);
    save(f, 3, 5, 0, NULL);
    assert_listed(f, "1 2 3 5");
    write_text(f->list, "garbage");
    assert_true(lineage_extend(f->path, 5, 6, &l, &err));
    assert_true(l.count == 6 && !l.listed && *l.damage);
    lineage_free(&l);
    assert_true(lineage_extend(f->path, -1, 6, &l, &err) && l.count == 1);
    lineage_free(&l);
    assert_true(lineage_extend("/nowhere/at/all", 5, 6, &l, &err) && l.count == 1);
    lineage_free(&l);
}

// --------------------------------------------------------------------------------------------

static void falls_back_along_the_lineage(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    Peers peers = {MPI_COMM_SELF, 0, NULL};
    static const struct {
        const char *list;
        int64_t from, to;
    } cases[] = {{"3\n5\n", 5, 3}, {"4\n", 5, -1},         {"5\n", 5, -1}, {"3\n4\n", 9, 4},
                 {"3\n4", 5, -1},  {"3\n4\n6\n5\n", 5, 4}, {NULL, 5, 4}};
    char note[1400];
    for (int i = 3; i <= 5; i++) save(f, i - 1, i, 0, NULL);
    spoil_manifest(f, 5);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t iteration = cases[i].from;
        if (cases[i].list) write_text(f->list, cases[i].list);
        else unlink(f->list);
        Checkpoint *c = checkpoint_open_or_fall_back(f->path, &iteration, peers, note, sizeof note, &err);
        if ((c ? iteration : -1) != cases[i].to) fail_msg("list %d: %d", (int)i, (int)iteration);
        assert_int_equal(strstr(note, "is damaged: line 4") != NULL, i == 5);
        if (!c) assert_non_null(strstr(err.what, "iter_0000005"));
        checkpoint_close(c);
    }
}

static int64_t found(const Folder *f, char *note, size_t bytes) {
    Error err = {0};
    int64_t iteration = checkpoint_find(f->path, note, bytes, &err);
    assert_int_equal(err.code == EXIT_CHECKPOINT && err.what[0], iteration == -2);
    assert_true(!*note || (strncmp(note, "WARNING: ", 9) == 0 &&
                           strstr(note, "latest_checkpointed_iteration.txt") && !strchr(note, '\n')));
    return iteration;
}

static void lost_trackers(void **state) {
    Folder *f = (Folder *)*state;
    char note[1400];
    static const char *const bad[] = {"", "twelve", "-4", "12 3", NULL};
    assert_int_equal(found(f, note, sizeof note), -1);
    write_text(f->tracker, "");
    // The folder is not empty, so training must not start from scratch.
    assert_int_equal(found(f, note, sizeof note), -2);
    unlink(f->tracker);
    for (int i = 3; i <= 5; i++) save(f, i - 1, i, 0, NULL);
    assert_int_equal(found(f, note, sizeof note), 5);
    assert_string_equal(note, "");
    for (int i = 0; i < 5; i++) {
        if (bad[i]) write_text(f->tracker, bad[i]);
        else write_bytes(f->tracker, "4\0", 2);
        write_text(f->list, "3\n5\n");
        assert_int_equal(found(f, note, sizeof note), 5);
        assert_non_null(strstr(note, "; resuming from the newest sound checkpoint in the folder"));
        write_text(f->list, "3\n4\n9\n");
        assert_int_equal(found(f, note, sizeof note), 4);
        unlink(f->list);
        assert_int_equal(found(f, note, sizeof note), 5);
    }
    unlink(f->tracker);
    assert_int_equal(found(f, note, sizeof note), 5);
    assert_non_null(strstr(note, "is missing although there are checkpoints"));
    // There are only checkpoints of other runs. Training must neither resume nor start from
    // scratch.
    write_text(f->list, "8\n");
    assert_int_equal(found(f, note, sizeof note), -2);
    write_text(f->tracker, "4");
    assert_int_equal(found(f, note, sizeof note), 4);
    assert_string_equal(note, "");
    char *away = text_format("%s/iter_0000005", f->path),
         *aside = text_format("%s/.iter_0000005.old", f->path);
    assert_int_equal(rename(away, aside), 0);
    unlink(f->tracker);
    write_text(f->list, "4\n5\n");  // a save was killed while it replaced the checkpoint
    assert_int_equal(found(f, note, sizeof note), 5);
    free(away);
    free(aside);
}

// A tracker that names a missing checkpoint (its number was truncated, or the checkpoint was
// deleted) is treated as damaged: the run resumes from its newest checkpoint.
static void trackers_without_checkpoints(void **state) {
    Folder *f = (Folder *)*state;
    char note[1400];
    static const char *const names[] = {"0", "1", "2", "release", "6", "999999999999999"};
    for (int i = 3; i <= 5; i++) save(f, i - 1, i, 0, NULL);
    for (int i = 0; i < 6; i++) {
        write_text(f->tracker, names[i]);
        write_text(f->list, "3\n4\n5\n");
        assert_int_equal(found(f, note, sizeof note), 5);
        assert_non_null(strstr(note,
                               ", which has no checkpoint (existing iterations: 3, 4 and 5); resuming from "
                               "the newest sound checkpoint in the folder"));
        write_text(f->list, "3\n4\n9\n");
        assert_int_equal(found(f, note, sizeof note), 4);
        // There are only checkpoints of other runs. The tracker's iteration is returned; opening it
        // will report the error.
        write_text(f->list, "8\n");
        assert_int_equal(found(f, note, sizeof note), i == 3 ? 0 : atoll(names[i]));
        assert_string_equal(note, "");
    }
    // A damaged checkpoint is selected; opening it will fall back to the previous one.
    spoil_manifest(f, 4);
    write_text(f->tracker, "4");
    assert_int_equal(found(f, note, sizeof note), 4);
    assert_string_equal(note, "");
}

// Pipes are refused as manifest, tracker and list.
static void pipes(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    Peers peers = {MPI_COMM_SELF, 0, NULL};
    char note[1400];
    int64_t iteration = 5;
    for (int i = 4; i <= 5; i++) save(f, i - 1, i, 0, NULL);
    char *manifest = text_format("%s/iter_0000005/manifest.json", f->path);
    put_pipe(manifest);
    put_pipe(f->tracker);
    put_pipe(f->list);
    Checkpoint *c = checkpoint_open_or_fall_back(f->path, &iteration, peers, note, sizeof note, &err);
    assert_true(c && iteration == 4);
    assert_non_null(strstr(note, "not a plain file"));
    checkpoint_close(c);
    assert_int_equal(found(f, note, sizeof note), 5);
    assert_non_null(strstr(note, "not a plain file"));
    unlink(f->list);
    save(f, 4, 5, 0, NULL);
    assert_int_equal(found(f, note, sizeof note), 5);
    assert_string_equal(note, "");
    free(manifest);
}

// --load with a single checkpoint instead of its parent folder, or with a file, must be an error.
// It must not be treated as a folder without checkpoints.
static void load_of_a_single_checkpoint(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    char note[1400];
    save(f, -1, 5, 0, NULL);
    char *one = text_format("%s/iter_0000005", f->path), *empty = text_format("%s/empty", f->path);
    assert_int_equal(checkpoint_find(one, note, sizeof note, &err), -2);
    assert_int_equal(err.code, EXIT_CHECKPOINT);
    assert_non_null(strstr(err.what, "is a single checkpoint; use its parent folder"));
    assert_int_equal(checkpoint_find(f->list, note, sizeof note, &err), -2);
    assert_int_equal(err.code, EXIT_CHECKPOINT);
    assert_non_null(strstr(err.what, "checkpoints_of_run.txt is not a folder"));
    assert_int_equal(checkpoint_find(empty, note, sizeof note, &err), -1);
    assert_int_equal(mkdir(empty, 0777), 0);
    assert_int_equal(checkpoint_find(empty, note, sizeof note, &err), -1);
    free(one);
    free(empty);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(hostile_lists, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(long_lists, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(another_run, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(resuming_from_an_older_checkpoint, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(without_a_list, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(falls_back_along_the_lineage, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(lost_trackers, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(trackers_without_checkpoints, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(pipes, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(load_of_a_single_checkpoint, make_folder, remove_folder),
    };
    MPI_Init(&argc, &argv);
    int failed = cmocka_run_group_tests_name("lineage", tests, NULL, NULL);
    MPI_Finalize();
    return failed;
}
