// Tests saves that fail or are killed at each of their system calls, full disks, and retention.
// This file overrides the C library's system calls, so that the n-th call can fail or kill the
// process.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "test/unit/checkpoint/small_model.h"

static struct {
    int countdown;        // number of calls up to the failing one; 0: no failure
    int number;           // errno to set; 0: kill the process
    bool no_exchange;     // emulates a file system without RENAME_EXCHANGE
    bool quick;           // fsync is a no-op
    uint64_t free_bytes;  // result of statvfs; 0: the real one; UINT64_MAX: none, as on some file systems
    char *journal;        // "fsync <path>\n", "rename <path>\n", ... in order; NULL: not recorded
} faults;

enum { JOURNAL_BYTES = 1 << 16 };

static void note(const char *what, int fd, const char *path) {
    char link[64], target[512] = "";
    if (!faults.journal) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (!path && readlink(link, target, sizeof target - 1) > 0) path = target;
    size_t used = strlen(faults.journal);
    snprintf(faults.journal + used, JOURNAL_BYTES - used, "%s %s\n", what, path ? path : "?");
}

static bool fault(void) {
    if (faults.countdown == 0 || --faults.countdown > 0) return false;
    if (faults.number == 0) raise(SIGKILL);
    errno = faults.number;
    return true;
}

ssize_t write(int fd, const void *data, size_t bytes) {
    note("write", fd, NULL);
    return fault() ? -1 : syscall(SYS_write, fd, data, bytes);
}

int fsync(int fd) {
    note("fsync", fd, NULL);
    return fault() ? -1 : faults.quick ? 0 : (int)syscall(SYS_fsync, fd);
}

int mkdir(const char *path, mode_t mode) {
    return fault() ? -1 : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

int rename(const char *from, const char *to) {
    note("rename", -1, to);
    return fault() ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    note("exchange", -1, to);
    if (fault()) return -1;
    if (!faults.no_exchange) return (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
    errno = EINVAL;
    return -1;
}

int open(const char *path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    return fault() ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int statvfs(const char *path, struct statvfs *out) {
    struct statfs fs;
    memset(out, 0, sizeof *out);
    if (faults.free_bytes == UINT64_MAX) return 0;
    if (statfs(path, &fs) != 0) return -1;
    out->f_frsize = faults.free_bytes ? 1 : (unsigned long)fs.f_frsize;
    out->f_blocks = fs.f_blocks;
    out->f_bavail = faults.free_bytes ? faults.free_bytes : fs.f_bavail;
    return 0;
}

static int start(void **state) {
    memset(&faults, 0, sizeof faults);
    faults.quick = true;
    return make_folder(state);
}

static int end(void **state) {
    memset(&faults, 0, sizeof faults);
    return remove_folder(state);
}

// Returns the position of the last line "<what> <save folder><path>" in the journal. Fails if there
// is none.
static long position(const Folder *f, const char *what, const char *path) {
    char line[300];
    long last = -1;
    snprintf(line, sizeof line, "%s %s%s\n", what, f->save, path);
    for (const char *at = faults.journal; (at = strstr(at, line)); at++) last = at - faults.journal;
    if (last < 0) fail_msg("no '%s' in\n%s", line, faults.journal);
    return last;
}

// To survive power failures, data must be on disk before a file gets its name, and a folder must be
// synced before another file refers to it.
static void order_of_writing(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    const char *shard = "/.iter_0000005.tmp/mp_rank_00/shard_00000_of_00001.safetensors",
               *manifest = "/.iter_0000005.tmp/manifest.json";
    const char *tracker = "/latest_checkpointed_iteration.txt",
               *tracker_fresh = "/.latest_checkpointed_iteration.txt.tmp";
    const char *list = "/checkpoints_of_run.txt", *list_fresh = "/.checkpoints_of_run.txt.tmp";
    char *journal = (char *)calloc(1, JOURNAL_BYTES);
    for (int again = 0; again < 2; again++) {
        faults.journal = strcpy(journal, "");
        assert_true(save(f->save, 5, 1, &err));
        long named = position(f, again ? "exchange" : "rename", "/iter_0000005"),
             tracked = position(f, "rename", tracker), listed = position(f, "rename", list);
        assert_true(position(f, "write", shard) < position(f, "fsync", shard));
        assert_true(position(f, "fsync", shard) < position(f, "fsync", "/.iter_0000005.tmp/mp_rank_00"));
        assert_true(position(f, "fsync", "/.iter_0000005.tmp/mp_rank_00") < named);
        assert_true(position(f, "write", manifest) < position(f, "fsync", manifest));
        assert_true(position(f, "fsync", manifest) < position(f, "fsync", "/.iter_0000005.tmp"));
        assert_true(position(f, "fsync", "/.iter_0000005.tmp") < named);
        assert_true(position(f, "write", tracker_fresh) < position(f, "fsync", tracker_fresh));
        assert_true(position(f, "fsync", tracker_fresh) < tracked);
        assert_true(position(f, "fsync", "") > tracked);
        assert_true(position(f, "write", list_fresh) < position(f, "fsync", list_fresh));
        assert_true(position(f, "fsync", list_fresh) < listed);
        journal[tracked] = 0;  // keeps the lines before the tracker
        assert_true(listed < position(f, "fsync", ""));
        journal[listed] = 0;
        assert_true(named < position(f, "fsync", ""));
    }
    faults.journal = NULL;
    free(journal);
}

// For every n, makes the n-th system call fail in a save of `iteration` to a folder with a
// checkpoint of iteration 5. Returns the number of calls.
static int fail_every_call(Folder *f, int64_t iteration, int number) {
    int n = 0;
    for (bool reached = true; reached;) {
        Error err = {0};
        assert_true(save(f->save, 5, 50, &err));
        faults.number = number;
        faults.countdown = ++n;
        bool ok = save(f->save, iteration, 60, &err);
        reached = faults.countdown == 0;
        faults.countdown = 0;
        assert_int_equal(hidden_entries(f->save), 0);
        assert_true(ok || reached);
        if (ok) {
            assert_loads(f->save, iteration, 60);
        } else {
            assert_one_line(&err);
            assert_non_null(strstr(err.what, f->path));
            assert_loads(f->save, 5, 50);
        }
        char final[160];
        snprintf(final, sizeof final, "%s/iter_%07" PRId64, f->save, iteration);
        assert_true(ok || iteration == 5 || access(final, F_OK) != 0);
        if (iteration != 5 && ok) {  // restores the initial state of one checkpoint
            assert_int_equal(folder_remove(f->save), 0);
        }
    }
    return n - 1;
}

static void every_call_fails(void **state) {
    Folder *f = (Folder *)*state;
    int calls = fail_every_call(f, 6, ENOSPC);
    assert_true(calls >= 45);  // several per slice, file and folder
    fail_every_call(f, 5, EIO);
    faults.no_exchange = true;
    fail_every_call(f, 5, EACCES);
}

// For every `step`-th n, kills the process at the n-th system call of a save. The tracker must name
// a complete checkpoint, and the next save must delete all leftovers.
static void die_at_every_call(Folder *f, int64_t iteration, int step) {
    int status = 0, died = 0;
    for (int n = 1;; n += step) {
        Error err = {0};
        assert_true(save(f->save, 5, 50, &err));
        assert_int_equal(hidden_entries(f->save), 0);
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            faults.number = 0;
            faults.countdown = n;
            _exit(save(f->save, iteration, 60, NULL) ? 0 : 1);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        if (WIFEXITED(status)) break;
        died++;
        assert_int_equal(WTERMSIG(status), SIGKILL);
        int64_t latest = newest_checkpoint(f->save, &err);
        assert_true(latest == 5 || latest == iteration);
        Checkpoint *c = open_exactly(f->save, latest, MPI_COMM_SELF, &err);
        if (!c) fail_msg("killed at call %d: %s", n, err.what);
        int fresh = read_all(c, 60), old = read_all(c, 50);
        assert_true((fresh == 1) != (old == 1));
        if (iteration != 5) assert_int_equal(fresh == 1, latest == iteration);
        checkpoint_close(c);
    }
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_true(died * step >= 40);
    assert_loads(f->save, iteration, 60);
}

static void killed_at_every_call(void **state) {
    Folder *f = (Folder *)*state;
    die_at_every_call(f, 6, 1);
    die_at_every_call(f, 5, 1);
    faults.no_exchange = true;
    die_at_every_call(f, 5, 1);
}

static void every_call_fails_in_the_background(void **state) {
    Folder *f = (Folder *)*state;
    manner.background = true;
    int calls = fail_every_call(f, 6, ENOSPC);
    assert_true(calls >= 25);  // fewer, because one write saves all slices
    fail_every_call(f, 5, EIO);
}

// Kills saves that delete the previous checkpoint. It must stay complete as long as the tracker
// names it.
static void killed_while_old_ones_are_deleted(void **state) {
    Folder *f = (Folder *)*state;
    manner.keep.last = 1;
    manner.before = 5;
    die_at_every_call(f, 6, 1);
    char old[160];
    snprintf(old, sizeof old, "%s/iter_0000005", f->save);
    assert_int_not_equal(access(old, F_OK), 0);
    assert_int_equal(hidden_entries(f->save), 0);
}

static void old_ones_are_deleted(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    manner.keep = (Retention){2, 4};
    for (int i = 1; i <= 7; i++) {
        assert_true(save(f->save, i, (uint64_t)i, &err));
        manner.before = i;
    }
    for (int i = 1; i <= 7; i++) assert_int_equal(save_folder_holds(f->save, i), i == 4 || i >= 6);
    assert_loads(f->save, 7, 7);
    // The first save of another run starts a new lineage.
    manner.before = -1;
    manner.keep.last = 1;
    assert_true(save(f->save, 9, 9, &err));
    for (int i = 1; i <= 9; i++)
        assert_int_equal(save_folder_holds(f->save, i), i == 4 || i == 6 || i == 7 || i == 9);
}

static void falls_back_to_an_intact_checkpoint(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    Peers peers = {MPI_COMM_SELF, 0, NULL};
    char note[1400], path[200];
    int64_t iteration = 5;
    for (int i = 3; i <= 5; manner.before = i++) assert_true(save(f->save, i, (uint64_t)i, &err));
    Checkpoint *c = checkpoint_open_or_fall_back(f->save, &iteration, peers, note, sizeof note, &err);
    assert_true(c && iteration == 5 && !*note);
    checkpoint_close(c);
    for (int i = 5; i >= 3; i--) {
        snprintf(path, sizeof path, "%s/iter_%07d/mp_rank_00/shard_00000_of_00001.safetensors", f->save, i);
        assert_int_equal(truncate(path, 100), 0);
        iteration = 5;
        c = checkpoint_open_or_fall_back(f->save, &iteration, peers, note, sizeof note, &err);
        if (i == 3) break;
        assert_null(strstr(note, "checkpoints_of_run"));
        assert_true(c && iteration == i - 1 && read_all(c, (uint64_t)i - 1) == 1);
        assert_true(strstr(note, "iter_0000005") && !strchr(note, '\n'));
        checkpoint_close(c);
    }
    assert_true(!c && iteration == 5 && !*note);
    assert_one_line(&err);
    assert_non_null(strstr(err.what, "iter_0000005"));
}

// Writes the warning for a folder with one checkpoint of 1 MB.
static void forecast(const Folder *f, int64_t saves, Retention keep, char line[1400]) {
    save_folder_forecast(f->save, &(Forecast){.bytes = 1000000, .saves = saves, .there = 1, .keep = keep},
                         line, 1400);
}

static void warns_if_the_disk_will_fill(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    char line[1400];
    Retention all = {0, 0}, two = {2, 0};
    assert_true(save(f->save, 5, 1, &err));
    faults.free_bytes = (1 << 20) + 5 * 1001000;
    forecast(f, 5, all, line);
    assert_string_equal(line, "");
    forecast(f, 6, all, line);
    assert_non_null(strstr(line, "enough for 5 more checkpoints of 1.001 MB, but this run will write 6;"));
    faults.free_bytes = (1 << 20) + 2 * 1001000;  // for two more checkpoints
    forecast(f, 1000, two, line);
    assert_string_equal(line, "");
    faults.free_bytes -= 1;
    forecast(f, 1000, two, line);
    assert_non_null(strstr(line, "will write 2;"));
    faults.free_bytes = UINT64_MAX;  // a file system that does not report free space
    forecast(f, 1000, all, line);
    assert_string_equal(line, "");
}

// If a save is killed between its two renames, the folder that it moved aside is the only copy of
// the checkpoint. It is loaded and restored.
static void folder_moved_aside_is_restored(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    char final[160], aside[160];
    snprintf(final, sizeof final, "%s/iter_0000005", f->save);
    snprintf(aside, sizeof aside, "%s/.iter_0000005.old", f->save);
    assert_true(save(f->save, 5, 1, &err));
    assert_int_equal(rename(final, aside), 0);
    assert_loads(f->save, 5, 1);
    faults.free_bytes = 1000;
    assert_false(save(f->save, 6, 2, &err));
    assert_int_equal(hidden_entries(f->save), 0);
    assert_int_equal(access(final, F_OK), 0);
    assert_loads(f->save, 5, 1);
    // If there is a newer checkpoint, the folder that was moved aside is deleted. Other hidden
    // names are kept.
    assert_int_equal(mkdir(aside, 0777), 0);
    snprintf(aside, sizeof aside, "%s/.iter_0000004.tmp", f->save);
    assert_int_equal(mkdir(aside, 0777), 0);
    snprintf(aside, sizeof aside, "%s/.iter_x.tmp", f->save);
    assert_int_equal(mkdir(aside, 0777), 0);
    faults.free_bytes = 0;
    assert_true(save(f->save, 6, 2, &err));
    assert_int_equal(hidden_entries(f->save), 1);
    assert_int_equal(access(aside, F_OK), 0);
    assert_loads(f->save, 6, 2);
}

static void no_space(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    assert_true(save(f->save, 5, 1, &err));
    faults.free_bytes = 1000;
    assert_false(save(f->save, 6, 2, &err));
    assert_one_line(&err);
    assert_non_null(strstr(err.what, "does not fit"));
    assert_int_equal(hidden_entries(f->save), 0);
    assert_loads(f->save, 5, 1);
    faults.free_bytes = UINT64_MAX;  // a file system that does not report free space
    assert_true(save(f->save, 6, 2, &err));
    assert_loads(f->save, 6, 2);
}

// Fills a small file system, if the process has permission to mount one.
static void full_disk(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    if (mount("none", f->path, "tmpfs", 0, "size=64k") != 0) skip();
    bool first = (faults.free_bytes = UINT64_MAX, save(f->save, 5, 1, &err));
    char filler[128];
    static char block[4096];
    snprintf(filler, sizeof filler, "%s/filler", f->path);
    FILE *out = fopen(filler, "wb");
    while (out && fwrite(block, 1, sizeof block, out) == sizeof block && fflush(out) == 0) continue;
    if (out) fclose(out);
    Error full = {0};
    bool second = save(f->save, 6, 2, &full);
    int hidden = hidden_entries(f->save);
    int64_t latest = newest_checkpoint(f->save, &err);
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    int got = c ? read_all(c, 1) : 0;
    checkpoint_close(c);
    assert_int_equal(umount(f->path), 0);
    assert_true(first);
    assert_false(second);
    assert_one_line(&full);
    assert_non_null(strstr(full.what, "No space left"));
    assert_int_equal(hidden, 0);
    assert_int_equal(latest, 5);
    assert_int_equal(got, 1);
}

static void file_in_place_of_the_folder(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    char file[128], inside[160];
    snprintf(file, sizeof file, "%s/file", f->path);
    snprintf(inside, sizeof inside, "%s/save", file);
    write_bytes(file, "x", 1);
    assert_false(save(file, 5, 1, &err));
    assert_one_line(&err);
    assert_false(save(inside, 5, 1, &err));
    assert_one_line(&err);
    assert_non_null(strstr(err.what, file));
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(order_of_writing, start, end),
        cmocka_unit_test_setup_teardown(every_call_fails, start, end),
        cmocka_unit_test_setup_teardown(killed_at_every_call, start, end),
        cmocka_unit_test_setup_teardown(every_call_fails_in_the_background, start, end),
        cmocka_unit_test_setup_teardown(killed_while_old_ones_are_deleted, start, end),
        cmocka_unit_test_setup_teardown(old_ones_are_deleted, start, end),
        cmocka_unit_test_setup_teardown(falls_back_to_an_intact_checkpoint, start, end),
        cmocka_unit_test_setup_teardown(warns_if_the_disk_will_fill, start, end),
        cmocka_unit_test_setup_teardown(folder_moved_aside_is_restored, start, end),
        cmocka_unit_test_setup_teardown(no_space, start, end),
        cmocka_unit_test_setup_teardown(full_disk, start, end),
        cmocka_unit_test_setup_teardown(file_in_place_of_the_folder, start, end),
    };
    return run_group(&argc, &argv, "save faults", tests, sizeof tests / sizeof *tests);
}
