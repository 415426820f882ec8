// Tests the --save folder of a running job: its lock after the folder was moved or removed, folders
// that have the names of files, file size limits, and replacing links and pipes by small files.
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/base/durable.h"
#include "llmc/checkpoint/save_folder.h"
#include "test/unit/folder.h"

typedef struct Folder {
    char path[64], save[80], moved[80];
} Folder;

static int make_folder(void **state) {
    Folder *f = (Folder *)calloc(1, sizeof *f);
    if (!f || folder_make(f->path, sizeof f->path, "test_save_folder")) return -1;
    snprintf(f->save, sizeof f->save, "%s/a/save", f->path);
    snprintf(f->moved, sizeof f->moved, "%s/moved", f->path);
    alarm(60);  // ends the test if opening a pipe blocks
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

// --------------------------------------------------------------------------------------------
// The lock

static SaveLock locked_folder(const Folder *f) {
    Error err = {0};
    SaveLock lock;
    assert_true(save_folder_lock(f->save, 0, &lock, &err));
    assert_true(lock.file >= 0);
    return lock;
}

// Returns true if another job could save to the folder.
static bool is_free(const char *path) {
    Error err = {0};
    SaveLock other;
    bool free_for_all = save_folder_lock(path, 0, &other, &err);
    if (!free_for_all) assert_one_line(&err, "another job is saving into");
    save_folder_unlock(&other);
    return free_for_all;
}

static void unmoved_folder_stays_locked(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    bool moved = true;
    SaveLock lock = locked_folder(f), before = lock;
    assert_true(save_folder_follow(f->save, &lock, &moved, &err) && !moved && lock.file == before.file);
    // The same folder has other paths, including a link.
    char *parent = text_format("%s/a", f->path), *link_to = text_format("%s/b", f->path),
         *through = text_format("%s/b/save/", f->path);
    assert_int_equal(rename(parent, link_to), 0);
    assert_int_equal(symlink("b", parent), 0);
    assert_true(save_folder_follow(f->save, &lock, &moved, &err) && !moved && lock.file == before.file);
    assert_true(save_folder_follow(through, &lock, &moved, &err) && !moved && lock.file == before.file);
    assert_false(is_free(f->save));
    save_folder_unlock(&lock);
    assert_true(is_free(f->save));
    free(parent);
    free(link_to);
    free(through);
}

static void moved_or_removed(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    bool moved = false;
    SaveLock lock = locked_folder(f);
    assert_int_equal(rename(f->save, f->moved), 0);
    assert_true(save_folder_follow(f->save, &lock, &moved, &err) && moved && lock.file >= 0);
    assert_false(is_free(f->save));
    assert_true(is_free(f->moved));
    assert_true(save_folder_follow(f->save, &lock, &moved, &err) && !moved);
    // The folder is removed with its parent and created again by another process.
    char *parent = text_format("%s/a", f->path);
    assert_int_equal(folder_remove(parent), 0);
    assert_true(save_folder_follow(f->save, &lock, &moved, &err) && moved && lock.file >= 0);
    assert_int_equal(folder_remove(f->save), 0);
    assert_int_equal(mkdir(f->save, 0777), 0);
    assert_true(save_folder_follow(f->save, &lock, &moved, &err) && moved && lock.file >= 0);
    assert_false(is_free(f->save));
    save_folder_unlock(&lock);
    free(parent);
}

static void folder_locked_by_another_job(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    bool moved;
    SaveLock lock = locked_folder(f);
    assert_int_equal(rename(f->save, f->moved), 0);
    assert_int_equal(mkdir(f->save, 0777), 0);
    SaveLock other = locked_folder(f);
    assert_false(save_folder_follow(f->save, &lock, &moved, &err));
    assert_one_line(&err, "another job is saving into");
    assert_int_equal(lock.file, -1);
    save_folder_unlock(&other);
    // There is a file at the folder's path.
    lock = locked_folder(f);
    assert_int_equal(folder_remove(f->save), 0);
    assert_true(durable_write_file(f->save, "x", 1, &err));
    assert_false(save_folder_follow(f->save, &lock, &moved, &err));
    assert_one_line(&err, "a file is in the way");
}

// Other users can read the folder, but not the lock file.
static void only_the_owner_locks(void **state) {
    Folder *f = (Folder *)*state;
    struct stat status;
    int reader = open(f->save, O_RDONLY | O_DIRECTORY);
    assert_true(reader >= 0 && flock(reader, LOCK_EX | LOCK_NB) == 0);
    SaveLock lock = locked_folder(f);
    assert_int_equal(fstat(lock.file, &status), 0);
    assert_int_equal(status.st_mode & 07777, 0600);
    // If the lock file is deleted, the folder is still recognized.
    Error err = {0};
    bool moved;
    assert_int_equal(unlinkat(lock.folder, ".lock", 0), 0);
    assert_true(save_folder_follow(f->save, &lock, &moved, &err) && !moved);
    save_folder_unlock(&lock);
    close(reader);
}

static void linked_lock(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    SaveLock lock;
    char *path = text_format("%s/.lock", f->save);
    assert_int_equal(symlink("../target", path), 0);
    assert_false(save_folder_lock(f->save, 0, &lock, &err));
    assert_one_line(&err, "is a link");
    assert_int_equal(lock.file, -1);
    free(path);
}

static void without_a_lock_nothing_is_checked(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    bool moved = true;
    SaveLock none = NO_SAVE_LOCK;
    assert_int_equal(rename(f->save, f->moved), 0);
    assert_true(save_folder_follow(f->save, &none, &moved, &err) && !moved && none.file == -1);
}

// --------------------------------------------------------------------------------------------
// Names and sizes

static void folders_with_names_of_files(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    static const char *const names[] = {"latest_checkpointed_iteration.txt",
                                        ".latest_checkpointed_iteration.txt.tmp", "checkpoints_of_run.txt",
                                        ".checkpoints_of_run.txt.tmp"};
    for (int i = 0; i < 4; i++) {
        char *path = text_format("%s/%s", f->save, names[i]);
        assert_true(save_folder_names_free(f->save, &err));
        assert_int_equal(mkdir(path, 0777), 0);
        assert_false(save_folder_names_free(f->save, &err));
        assert_one_line(&err, path);
        assert_one_line(&err, "remove it");
        assert_int_equal(rmdir(path), 0);
        // A save replaces links and pipes.
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
    assert_true(save_folder_allows_file((uint64_t)1 << 40, &err) ==
                (before.rlim_cur == RLIM_INFINITY || before.rlim_cur >= (rlim_t)1 << 40));
    low = before;
    low.rlim_cur = 2000000;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    bool fits = save_folder_allows_file(2000000, &err), exceeds = !save_folder_allows_file(2000001, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_true(fits && exceeds);
    assert_one_line(&err, "ulimit -f");
    assert_one_line(&err, "2.000 MB");
}

// Writing a small file replaces a link without following it, and a pipe without blocking.
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
        cmocka_unit_test_setup_teardown(unmoved_folder_stays_locked, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(moved_or_removed, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(folder_locked_by_another_job, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(only_the_owner_locks, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(linked_lock, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(without_a_lock_nothing_is_checked, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(folders_with_names_of_files, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(file_size_limit, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(small_files_replace, make_folder, remove_folder),
    };
    return cmocka_run_group_tests_name("save_folder", tests, NULL, NULL);
}
