// The --save folder under a run: names that are taken by folders, a limit on the size of files; and small files put in the place of whatever lies there.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/durable.h"
#include "llmc/save_folder.h"
#include "test/unit/folder.h"

typedef struct Folder {
    char path[64], save[80];
} Folder;

static int make_folder(void **state) {
    Folder *f = (Folder *)calloc(1, sizeof *f);
    if (!f || folder_make(f->path, sizeof f->path, "test_save_folder")) return -1;
    snprintf(f->save, sizeof f->save, "%s/a/save", f->path);
    alarm(60);  // opening a pipe would wait for its other end
    *state = f;
    return durable_make_folders(f->save, NULL) ? 0 : -1;
}

static int remove_folder(void **state) {
    Folder *f = (Folder *)*state;
    alarm(0);
    int rc = folder_remove(f->path);
    free(f);
    return rc;
}

static void assert_one_line(const Error *err, const char *holds) {
    assert_int_equal(err->code, EXIT_CHECKPOINT);
    assert_null(strchr(err->what, '\n'));
    assert_non_null(strchr(err->what, ';'));
    if (!strstr(err->what, holds)) fail_msg("'%s' is not in '%s'", holds, err->what);
}

// ---------------------------------------------------------------------------------------------------------------------
// Names and sizes

static void names_taken(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    static const char *const names[] = {"latest_checkpointed_iteration.txt", ".latest_checkpointed_iteration.txt.tmp", "checkpoints_of_run.txt",
                                        ".checkpoints_of_run.txt.tmp"};
    for (int i = 0; i < 4; i++) {
        char *path = text_format("%s/%s", f->save, names[i]);
        assert_true(save_folder_names_free(f->save, &err));
        assert_int_equal(mkdir(path, 0777), 0);
        assert_false(save_folder_names_free(f->save, &err));
        assert_one_line(&err, path);
        assert_one_line(&err, "remove it");
        assert_int_equal(rmdir(path), 0);
        // A save replaces these.
        assert_int_equal(symlink("/", path), 0);
        assert_true(save_folder_names_free(f->save, &err));
        assert_int_equal(unlink(path), 0);
        assert_int_equal(mkfifo(path, 0666), 0);
        assert_true(save_folder_names_free(f->save, &err));
        free(path);
    }
}

static void file_size_limit(void **state) {
    Error err = {0};
    struct rlimit before, low;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    assert_true(save_folder_allows_file((uint64_t)1 << 40, &err) == (before.rlim_cur == RLIM_INFINITY || before.rlim_cur >= (rlim_t)1 << 40));
    low = before;
    low.rlim_cur = 2000000;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    bool fits = save_folder_allows_file(2000000, &err), exceeds = !save_folder_allows_file(2000001, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_true(fits && exceeds);
    assert_one_line(&err, "ulimit -f");
    assert_one_line(&err, "2.000 MB");
}

// Whatever lies under the name is replaced and not written through: not waited for, not followed.
static void small_files_replace(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    uint64_t bytes;
    char *path = text_format("%s/file", f->save), *target = text_format("%s/target", f->save);
    assert_true(durable_write_file(target, "kept", 4, &err));
    assert_int_equal(symlink("target", path), 0);
    assert_true(durable_write_file(path, "new", 3, &err));
    char *text = durable_read_file(target, 100, &bytes, &err);
    assert_string_equal(text, "kept");
    free(text);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0666), 0);
    assert_true(durable_write_file(path, "12", 2, &err));
    text = durable_read_file(path, 100, &bytes, &err);
    assert_string_equal(text, "12");
    free(text);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0777), 0);
    assert_false(durable_write_file(path, "12", 2, &err));
    assert_one_line(&err, "a folder is in the way: remove it");
    assert_true(durable_exists(path));
    free(path);
    free(target);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(names_taken, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(file_size_limit, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(small_files_replace, make_folder, remove_folder),
    };
    return cmocka_run_group_tests_name("save_folder", tests, NULL, NULL);
}
