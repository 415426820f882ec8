// Checkpoints of one rank: round trip at other slice borders, damage of every kind, and a save that fails or dies at each of its system calls.
// The system calls that a save makes are defined here in front of the C library's, so that the n-th of them can fail or kill the process.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include <cmocka.h>

#include "test/checkpoint_calls.h"
#include "test/leaks.h"
#include "test/unit/folder.h"

// ---------------------------------------------------------------------------------------------------------------------
// Faults

static struct {
    int countdown;        // the call that brings it to 0 fails; 0: none
    int number;           // errno, or 0: the process is killed
    bool no_exchange;     // a file system without RENAME_EXCHANGE
    bool quick;           // fsync does nothing
    uint64_t free_bytes;  // what statvfs says; 0: the truth; UINT64_MAX: nothing, as some file systems do
    char *journal;        // "fsync <path>\n", "rename <path>\n", ... in their order; NULL: not kept
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

int mkdir(const char *path, mode_t mode) { return fault() ? -1 : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode); }

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

// ---------------------------------------------------------------------------------------------------------------------
// A small model

static const CheckpointTensor MODEL[] = {{"wte", 2, {7, 5}}, {"ln \"w\"", 1, {13}}, {"h.0|qkv", 2, {3, 11}}, {"b", 1, {1}}};
enum { TENSORS = sizeof MODEL / sizeof *MODEL, MAX_SLICES = 128 };

static int64_t elements_of(int t) { return MODEL[t].dims == 2 ? MODEL[t].shape[0] * MODEL[t].shape[1] : MODEL[t].shape[0]; }

// The first `width` bytes of element i, different for every argument.
static void element(void *out, int width, int tensor, SliceKind kind, int64_t i, uint64_t salt) {
    uint64_t key[4] = {(uint64_t)tensor, kind, (uint64_t)i, salt}, hash = XXH3_64bits(key, sizeof key);
    memcpy(out, &hash, (size_t)width);
}

typedef struct Saved {
    CheckpointSave save;
    Slice slices[MAX_SLICES];
    uint64_t salt;
} Saved;

static void fetch(void *context, int i, void *host) {
    const Saved *saved = (const Saved *)context;
    const Slice *s = &saved->slices[i];
    int tensor = 0, width = slice_kind_bytes(s->kind);
    while (strcmp(MODEL[tensor].name, s->tensor) != 0) tensor++;
    for (int64_t e = s->lo; e < s->hi; e++) element((char *)host + (e - s->lo) * width, width, tensor, s->kind, e, saved->salt);
}

static RunState state_of(int64_t iteration) {
    return (RunState){.iteration = iteration,
                             .consumed_train_samples = iteration * 16 + 1,
                             .consumed_valid_samples = 33,
                             .scheduler_samples = iteration * 16,
                             .adam_steps = iteration - 1,
                             .beta1_power = 0x1.999999999999ap-4,
                             .beta2_power = 0.1 + 1e-17,
                             .skipped_iterations = 1,
                             .nan_iterations = 2,
                             .flops_so_far = 1.2345678901234567e21,
                             .train_split_samples = 77};
}

// All kinds of all tensors, each cut into pieces of `piece` elements (the last one is shorter); some empty slices among them.
static void prepare(Saved *s, const char *directory, int64_t iteration, uint64_t salt, int piece) {
    memset(s, 0, sizeof *s);
    s->salt = salt;
    s->save = (CheckpointSave){.directory = directory,
                               .state = state_of(iteration),
                               .arguments_json = "{\"lr\": 0.1, \"save\": \"a\\\"b\"}",
                               .tensors = MODEL,
                               .tensor_count = TENSORS,
                               .slices = s->slices,
                               .fetch = fetch,
                               .context = s,
                               .peers = {MPI_COMM_SELF, 0, NULL}};
    for (int t = 0; t < TENSORS; t++) {
        for (int k = 0; k < SLICE_KINDS; k++) {
            for (int64_t lo = 0; lo < elements_of(t); lo += piece) {
                int64_t hi = lo + piece < elements_of(t) ? lo + piece : elements_of(t);
                s->slices[s->save.slice_count++] = (Slice){MODEL[t].name, (SliceKind)k, lo, hi};
            }
            s->slices[s->save.slice_count++] = (Slice){MODEL[t].name, (SliceKind)k, elements_of(t), elements_of(t)};
        }
    }
    assert_true(s->save.slice_count <= MAX_SLICES);
}

// How the saves of a test are made.
static struct {
    bool background;  // by threads, from a copy
    Retention keep;
    int64_t before;   // what the run went on from
} manner;

static bool save(const char *directory, int64_t iteration, uint64_t salt, Error *err) {
    Saved s;
    prepare(&s, directory, iteration, salt, 20);
    s.save.keep = manner.keep;
    s.save.before = manner.before;
    if (manner.background) take_staging(&s.save);
    bool ok = save_whole(&s.save, err);
    free(s.save.staging);
    return ok;
}

static void assert_one_line(const Error *err) {
    assert_int_equal(err->code, EXIT_CHECKPOINT);
    assert_null(strchr(err->what, '\n'));
    assert_non_null(strchr(err->what, ';'));
}

// Whether [lo, hi) of a tensor can be read; 1: and is right, 0: could not be read, -1: is wrong.
static int read_range(const Checkpoint *c, int tensor, SliceKind kind, int64_t lo, int64_t hi, uint64_t salt, Error *err) {
    unsigned char buffer[35 * 4 + 1], expected[4];
    int width = slice_kind_bytes(kind);
    buffer[(hi - lo) * width] = 0xa5;
    Slice slice = {MODEL[tensor].name, kind, lo, hi};
    if (!checkpoint_read(c, &slice, buffer, err)) return 0;
    assert_int_equal(buffer[(hi - lo) * width], 0xa5);
    for (int64_t e = lo; e < hi; e++) {
        element(expected, width, tensor, kind, e, salt);
        if (memcmp(buffer + (e - lo) * width, expected, (size_t)width) != 0) return -1;
    }
    return 1;
}

// Reads everything: 1 when all is right, -1 when something is wrong, else 0.
static int read_all(const Checkpoint *c, uint64_t salt) {
    int worst = 1;
    for (int t = 0; t < TENSORS; t++) {
        for (int k = 0; k < SLICE_KINDS; k++) {
            Error err = {0};
            int got = read_range(c, t, (SliceKind)k, 0, elements_of(t), salt, &err);
            if (got == 0) assert_one_line(&err);
            if (got < worst) worst = got;
        }
    }
    return worst;
}

static void assert_loads(const char *directory, int64_t iteration, uint64_t salt) {
    Error err = {0};
    assert_int_equal(newest_checkpoint(directory, &err), iteration);
    Checkpoint *c = open_exactly(directory, iteration, MPI_COMM_SELF, &err);
    if (!c) fail_msg("%s", err.what);
    assert_int_equal(checkpoint_state(c)->iteration, iteration);
    assert_int_equal(read_all(c, salt), 1);
    checkpoint_close(c);
}

static int hidden_entries(const char *directory) {
    DIR *folder = opendir(directory);
    int count = 0;
    for (struct dirent *e; (e = readdir(folder));) count += e->d_name[0] == '.' && strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(folder);
    return count;
}

typedef struct Folder {
    char path[64], save[80], shard[200], manifest[160], tracker[160];
} Folder;

static int make_folder(void **state) {
    Folder *f = (Folder *)calloc(1, sizeof *f);
    if (!f) return -1;
    if (folder_make(f->path, sizeof f->path, "test_checkpoint")) return -1;
    snprintf(f->save, sizeof f->save, "%s/a/b", f->path);
    snprintf(f->shard, sizeof f->shard, "%s/iter_0000005/mp_rank_00/shard_00000_of_00001.safetensors", f->save);
    snprintf(f->manifest, sizeof f->manifest, "%s/iter_0000005/manifest.json", f->save);
    snprintf(f->tracker, sizeof f->tracker, "%s/latest_checkpointed_iteration.txt", f->save);
    memset(&faults, 0, sizeof faults);
    memset(&manner, 0, sizeof manner);
    manner.before = -1;
    faults.quick = true;
    *state = f;
    return 0;
}

static int remove_folder(void **state) {
    Folder *f = (Folder *)*state;
    memset(&faults, 0, sizeof faults);
    int result = folder_remove(f->path);
    free(f);
    return result;
}

static char *read_bytes(const char *path, size_t *bytes) {
    FILE *in = fopen(path, "rb");
    assert_non_null(in);
    char *data = (char *)malloc(1 << 20);
    assert_non_null(data);
    *bytes = fread(data, 1, 1 << 20, in);
    fclose(in);
    return data;
}

static void write_bytes(const char *path, const void *data, size_t bytes) {
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, bytes, out), bytes);
    assert_int_equal(fclose(out), 0);
}

static void flip_bit(const char *path, size_t at, int bit) {
    unsigned char byte;
    FILE *file = fopen(path, "rb+");
    assert_non_null(file);
    assert_int_equal(fseek(file, (long)at, SEEK_SET), 0);
    assert_int_equal(fread(&byte, 1, 1, file), 1);
    byte ^= (unsigned char)(1 << bit);
    assert_int_equal(fseek(file, (long)at, SEEK_SET), 0);
    assert_int_equal(fwrite(&byte, 1, 1, file), 1);
    assert_int_equal(fclose(file), 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Round trip

static void what_is_saved_is_loaded(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    assert_int_equal(newest_checkpoint(f->save, &err), NO_CHECKPOINT);
    faults.quick = false;  // once with the real fsync, which some file systems refuse on folders
    assert_true(save(f->save, 5, 77, &err));
    assert_loads(f->save, 5, 77);
    assert_int_equal(hidden_entries(f->save), 0);

    // Megatron's tracker has no newline.
    size_t bytes;
    char *tracker = read_bytes(f->tracker, &bytes);
    assert_true(bytes == 1 && tracker[0] == '5');
    free(tracker);

    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    RunState expected = state_of(5);
    assert_memory_equal(checkpoint_state(c), &expected, sizeof expected);  // doubles to the bit
    assert_string_equal(checkpoint_arguments(c), "{\"lr\":0.1,\"save\":\"a\\\"b\"}");
    for (int k = 0; k < SLICE_KINDS; k++) assert_true(checkpoint_has(c, (SliceKind)k));
    assert_true(checkpoint_check_tensors(c, MODEL, TENSORS, &err));
    checkpoint_close(c);
}

static void any_range_can_be_read(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    for (int piece = 1; piece <= 35; piece += piece < 9 ? 3 : 13) {
        Saved s;
        prepare(&s, f->save, 5, (uint64_t)piece, piece < 7 ? 7 : piece);
        assert_true(save_whole(&s.save, &err));
        Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
        assert_non_null(c);
        for (int t = 0; t < TENSORS; t++) {
            for (int64_t lo = 0; lo <= elements_of(t); lo++) {
                for (int64_t hi = lo; hi <= elements_of(t); hi++)
                    assert_int_equal(read_range(c, t, (SliceKind)((lo + hi) % SLICE_KINDS), lo, hi, (uint64_t)piece, &err), 1);
            }
        }
        Slice outside[] = {{"wte", SLICE_MASTER, 0, 36}, {"wte", SLICE_MASTER, -1, 3}, {"wte", SLICE_MASTER, 3, 2}, {"wtf", SLICE_MASTER, 0, 1}};
        for (int i = 0; i < 4; i++) {
            assert_false(checkpoint_read(c, &outside[i], NULL, &err));
            assert_one_line(&err);
            assert_non_null(strstr(err.what, outside[i].tensor));
        }
        checkpoint_close(c);
    }
}

static void kinds_can_be_left_out(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    Saved s;
    prepare(&s, f->save, 5, 1, 9);
    int kept = 0;
    for (int i = 0; i < s.save.slice_count; i++) {
        if (s.slices[i].kind == SLICE_WEIGHT) s.slices[kept++] = s.slices[i];
    }
    s.save.slice_count = kept;
    assert_true(save_whole(&s.save, &err));
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    assert_true(checkpoint_has(c, SLICE_WEIGHT));
    assert_false(checkpoint_has(c, SLICE_MASTER));
    assert_int_equal(read_range(c, 0, SLICE_WEIGHT, 0, 35, 1, &err), 1);
    assert_int_equal(read_range(c, 0, SLICE_MASTER, 3, 35, 1, &err), 0);
    assert_non_null(strstr(err.what, "master of tensor 'wte' is in no shard from element 3 (of 3..35)"));
    checkpoint_close(c);
}

// A save that a load would refuse is refused before anything gets its final name.
static void slices_must_fit(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    assert_true(save(f->save, 5, 1, &err));
    static const struct {
        Slice slice;
        const char *says;
    } cases[] = {
        {{"wte", SLICE_MASTER, 0, 10}, "overlap"},
        {{"wte", SLICE_MASTER, 1, 9}, "from element 0 of 35"},
        {{"wte", SLICE_MASTER, 0, 36}, "fault of the program"},
        {{"wte", SLICE_MASTER, -1, 9}, "fault of the program"},
        {{"wte", SLICE_MASTER, 9, 8}, "fault of the program"},
        {{"none", SLICE_MASTER, 0, 9}, "fault of the program"},
        {{"wte", SLICE_KINDS, 0, 9}, "fault of the program"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Saved s;
        prepare(&s, f->save, 6, 2, 9);
        assert_int_equal(s.slices[0].hi, 9);
        s.slices[0] = cases[i].slice;
        // A slice that does not exist cannot be fetched; what is fetched does not matter here.
        if (strcmp(cases[i].slice.tensor, "none") != 0) assert_int_equal(strcmp(s.slices[0].tensor, "wte"), 0);
        assert_false(save_whole(&s.save, &err));
        assert_one_line(&err);
        if (!strstr(err.what, cases[i].says)) fail_msg("case %zu: %s", i, err.what);
        assert_int_equal(hidden_entries(f->save), 0);
        assert_loads(f->save, 5, 1);
    }
}

static void another_model_is_named(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    assert_true(save(f->save, 5, 1, &err));
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    CheckpointTensor other[TENSORS + 1];
    memcpy(other, MODEL, sizeof MODEL);
    other[1].shape[0] = 14;
    assert_false(checkpoint_check_tensors(c, other, TENSORS, &err));
    assert_non_null(strstr(err.what, "parameter 1 is 'ln \"w\"' (13), this model's is 'ln \"w\"' (14)"));
    assert_one_line(&err);
    other[1] = MODEL[1];
    other[3].name = "c";
    assert_false(checkpoint_check_tensors(c, other, TENSORS, &err));
    assert_non_null(strstr(err.what, "parameter 3 is 'b' (1), this model's is 'c' (1)"));
    assert_false(checkpoint_check_tensors(c, MODEL, TENSORS - 1, &err));
    assert_non_null(strstr(err.what, "this model's is nothing"));
    other[3] = MODEL[3];
    other[4] = (CheckpointTensor){"more", 1, {2}};
    assert_false(checkpoint_check_tensors(c, other, TENSORS + 1, &err));
    assert_non_null(strstr(err.what, "is nothing, this model's is 'more' (2)"));
    checkpoint_close(c);
}

static void trackers(void **state) {
    enum { BAD = CHECKPOINT_UNREADABLE };
    static const struct {
        const char *text;
        int64_t iteration;
    } cases[] = {{"5", 5}, {"0000012\n", 12}, {"release", 0}, {"release\n", 0}, {"0", 0}, {"", BAD}, {"\n", BAD},
                 {"-5", BAD}, {"5x", BAD}, {"5 6", BAD}, {"1e3", BAD}, {"+5", BAD}, {"releases", BAD}, {"99999999999999999999", BAD}};
    Folder *f = (Folder *)*state;
    Error err;
    assert_int_equal(mkdir(f->save, 0777), -1);
    snprintf(f->tracker, sizeof f->tracker, "%s/latest_checkpointed_iteration.txt", f->path);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memset(&err, 0, sizeof err);
        write_bytes(f->tracker, cases[i].text, strlen(cases[i].text));
        assert_int_equal(newest_checkpoint(f->path, &err), cases[i].iteration);
        if (cases[i].iteration == BAD) assert_one_line(&err);
    }
    write_bytes(f->tracker, "1\0", 2);
    assert_int_equal(newest_checkpoint(f->path, &err), CHECKPOINT_UNREADABLE);
    static char big[10000];
    write_bytes(f->tracker, big, sizeof big);
    assert_int_equal(newest_checkpoint(f->path, &err), CHECKPOINT_UNREADABLE);
    unlink(f->tracker);
    mkdir(f->tracker, 0777);
    assert_int_equal(newest_checkpoint(f->path, &err), CHECKPOINT_UNREADABLE);
    assert_one_line(&err);
}

static void release_and_renamed_folders(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    char from[160], to[160];
    assert_true(save(f->save, 5, 1, &err));
    snprintf(from, sizeof from, "%s/iter_0000005", f->save);
    snprintf(to, sizeof to, "%s/iter_0000006", f->save);
    assert_int_equal(rename(from, to), 0);
    assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
    assert_non_null(strstr(err.what, "iter_0000005/manifest.json"));
    assert_null(open_exactly(f->save, 6, MPI_COMM_SELF, &err));
    assert_one_line(&err);
    assert_non_null(strstr(err.what, "iteration 5"));
    snprintf(from, sizeof from, "%s/release", f->save);
    assert_int_equal(rename(to, from), 0);
    write_bytes(f->tracker, "release", 7);
    assert_int_equal(newest_checkpoint(f->save, &err), 0);
    Checkpoint *c = open_exactly(f->save, 0, MPI_COMM_SELF, &err);
    assert_non_null(c);
    assert_int_equal(read_all(c, 1), 1);
    checkpoint_close(c);
}

// ---------------------------------------------------------------------------------------------------------------------
// Damage

static void damaged_manifest(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    size_t bytes;
    assert_true(save(f->save, 5, 1, &err));
    char *text = read_bytes(f->manifest, &bytes);
    for (size_t i = 0; i < bytes; i++) {
        flip_bit(f->manifest, i, i % 8);
        assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
        flip_bit(f->manifest, i, i % 8);
        assert_one_line(&err);
        assert_non_null(strstr(err.what, "manifest.json"));
    }
    for (size_t i = bytes; i-- > 0; i -= i / 8) {
        assert_int_equal(truncate(f->manifest, (off_t)i), 0);
        assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
        assert_one_line(&err);
    }
    unlink(f->manifest);
    assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
    assert_non_null(strstr(err.what, "No such file"));
    write_bytes(f->manifest, text, bytes);
    assert_loads(f->save, 5, 1);
    free(text);
}

// Replaces the first `from` in the manifest by `to` and gives the text a right hash again.
static void edit_manifest(const char *path, const char *original, size_t bytes, const char *from, const char *to) {
    enum { TAIL = 29 };  // "xxh3": "0123456789abcdef"\n}\n
    const char *at = (const char *)memmem(original, bytes, from, strlen(from));
    assert_non_null(at);
    size_t before = (size_t)(at - original), after = bytes - TAIL - before - strlen(from), length = before + strlen(to) + after;
    char *text = (char *)malloc(length + TAIL + 1);
    memcpy(text, original, before);
    memcpy(text + before, to, strlen(to));
    memcpy(text + before + strlen(to), at + strlen(from), after);
    snprintf(text + length, TAIL + 1, "\"xxh3\": \"%016" PRIx64 "\"\n}\n", XXH3_64bits(text, length));
    write_bytes(path, text, length + TAIL);
    free(text);
}

static void hostile_manifest(void **state) {
    static const char *cases[][3] = {
        {"\"version\": 1", "\"version\": 2", "newer program"},
        {"\"version\": 1", "\"version\": 0", "not a manifest"},
        {"sdp4bit.c checkpoint", "another", "not a manifest"},
        {"\"format\":", "\"format\" ", "not a JSON object"},
        {"\"iteration\": 5", "\"iteration\": -5", "counter"},
        {"\"iteration\": 5", "\"iteration\": 5.5", "counter"},
        {"\"iteration\": 5", "\"iteration\": 1e300", "counter"},
        {"\"adam_steps\": 4", "\"other\": 4", "counter"},
        {"\"0x1.999999999999ap-4\"", "\"0x1.9z\"", "malformed"},
        {"\"0x1.999999999999ap-4\"", "\"nan\"", "malformed"},
        {"\"0x1.999999999999ap-4\"", "0.1", "malformed"},
        {"\"arguments\": {", "\"argument\": {", "arguments"},
        {"\"weight_dtype\": \"", "\"weight_dtype\": \"X", "weight_dtype"},
        {"\"master\"", "\"slave\"", "kinds"},
        {"\"shape\": [7, 5]", "\"shape\": [7, 5, 1]", "malformed"},
        {"\"shape\": [7, 5]", "\"shape\": [7, 0]", "malformed"},
        {"\"shape\": [7, 5]", "\"shape\": []", "impossible"},
        {"\"shape\": [7, 5]", "\"shape\": [4294967296, 4294967296]", "impossible"},
        {"\"name\": \"b\"", "\"name\": \"wte\"", "same name"},
        {"\"folder\": \"mp_rank_00\"", "\"folder\": \"..\"", "plain name"},
        {"\"folder\": \"mp_rank_00\"", "\"folder\": \"\"", "plain name"},
        {"\"name\": \"shard_00000", "\"name\": \"../../shard_00000", "plain name"},
        {"\"name\": \"shard_00000", "\"name\": \"/etc/shard_00000", "plain name"},
        {"\"bytes\": ", "\"bytes\": -", "size"},
        {"\"bytes\": ", "\"bytes\": 1", "instead of"},
        {"\"bytes\": ", "\"bytes\": 0, \"b\": ", "too small"},
        {"\", \"slices\"", "0\", \"slices\"", "hash"},
        {"[0,0,0,20]", "[0,0,0,9,9]", "not [tensor"},
        {"[0,0,0,20]", "[0,0,0]", "not [tensor"},
        {"[0,0,0,20]", "{}", "not [tensor"},
        {"[0,0,0,20]", "[4,0,0,9]", "unknown tensor"},
        {"[0,0,0,20]", "[-1,0,0,9]", "unknown tensor"},
        {"[0,0,0,20]", "[0,4,0,9]", "unknown kind"},
        {"[0,0,0,20]", "[0,0,-1,9]", "outside"},
        {"[0,0,0,20]", "[0,0,0,36]", "outside"},
        {"[0,0,0,20]", "[0,0,9,9]", "outside"},
        {"[0,0,0,20]", "[0,0,0,21]", "overlap"},
        {"\"slices\": [", "\"slices\": 3, \"s\": [", "no slices"},
        {"\"files\": [", "\"files\": 3, \"f\": [", "list of files"},
        {"\"tensors\": [", "\"tensors\": {}, \"t\": [", "list of tensors"},
    };
    Folder *f = (Folder *)*state;
    Error err = {0};
    size_t bytes;
    assert_true(save(f->save, 5, 1, &err));
    char *text = read_bytes(f->manifest, &bytes);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        edit_manifest(f->manifest, text, bytes, cases[i][0], cases[i][1]);
        assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
        assert_one_line(&err);
        if (!strstr(err.what, cases[i][2])) fail_msg("case %zu: '%s' does not say '%s'", i, err.what, cases[i][2]);
    }
    free(text);
}

// A manifest that lacks a slice, or places it elsewhere than the shard does: the gap, or the file, is named when it is read.
static void manifest_against_shard(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    size_t bytes;
    assert_true(save(f->save, 5, 1, &err));
    char *text = read_bytes(f->manifest, &bytes);
    edit_manifest(f->manifest, text, bytes, "[0,0,20,35],", "");
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    assert_non_null(c);
    assert_int_equal(read_range(c, 0, SLICE_MASTER, 21, 25, 1, &err), 0);
    assert_non_null(strstr(err.what, "master of tensor 'wte' is in no shard from element 21 (of 21..25)"));
    assert_int_equal(read_range(c, 0, SLICE_MASTER, 2, 9, 1, &err), 0);
    assert_non_null(strstr(err.what, "its header does not say"));
    checkpoint_close(c);
    edit_manifest(f->manifest, text, bytes, "\"weight_dtype\": \"", "\"weight_dtype\": \"BF16\", \"w\": \"");
    c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    int expected = slice_kind_bytes(SLICE_WEIGHT) == 2;
    assert_int_equal(read_range(c, 0, SLICE_WEIGHT, 0, 3, 1, &err), expected);
    checkpoint_close(c);
    edit_manifest(f->manifest, text, bytes, "\"weight_dtype\": \"", "\"weight_dtype\": \"F32\", \"w\": \"");
    c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    // Read as F32 the slices do not fit the file or the build.
    if (c) assert_int_equal(read_range(c, 0, SLICE_WEIGHT, 0, 3, 1, &err), !expected);
    checkpoint_close(c);
    assert_one_line(&err);
    free(text);
}

static void state_without_younger_field(void **state) {  // of a program that did not keep it yet
    Folder *f = (Folder *)*state;
    Error err = {0};
    size_t bytes;
    assert_true(save(f->save, 5, 1, &err));
    char *text = read_bytes(f->manifest, &bytes);
    edit_manifest(f->manifest, text, bytes, ", \"train_split_samples\": 77", "");
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    free(text);
    assert_true(c && checkpoint_state(c)->train_split_samples == 0 && checkpoint_state(c)->consumed_valid_samples == 33);
    checkpoint_close(c);
}

static void damaged_shard(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    size_t bytes;
    assert_true(save(f->save, 5, 1, &err));
    char *data = read_bytes(f->shard, &bytes);
    uint64_t header;
    memcpy(&header, data, 8);
    for (size_t i = 0; i < bytes; i += i < 8 + header ? 1 : 5) {
        Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
        assert_non_null(c);
        flip_bit(f->shard, i, i % 8);
        if (i % 7 == 0) {
            assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
            assert_one_line(&err);
            assert_non_null(strstr(err.what, f->shard));
        }
        // Behind the hashes' back a flipped header is refused when read, or harmless; flipped data is what it is.
        int got = read_all(c, 1);
        checkpoint_close(c);
        flip_bit(f->shard, i, i % 8);
        if (i < 8 + header) {
            assert_int_not_equal(got, -1);
        } else {
            assert_int_equal(got, -1);
        }
    }
    for (size_t i = bytes; i-- > 0; i -= i / 8) {
        assert_int_equal(truncate(f->shard, (off_t)i), 0);
        assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
        assert_one_line(&err);
        assert_non_null(strstr(err.what, f->shard));
    }
    unlink(f->shard);
    assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
    assert_non_null(strstr(err.what, f->shard));
    free(data);
}

// The shard shrinks after the checkpoint was opened.
static void shard_that_shrinks(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    struct stat status;
    assert_true(save(f->save, 5, 1, &err));
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    assert_int_equal(read_range(c, 0, SLICE_MASTER, 0, 35, 1, &err), 1);
    assert_int_equal(stat(f->shard, &status), 0);
    assert_int_equal(truncate(f->shard, status.st_size - 2), 0);
    assert_int_equal(read_all(c, 1), 0);
    checkpoint_close(c);
}

// ---------------------------------------------------------------------------------------------------------------------
// Saves that fail or die

// Where the last line "<what> <save folder><path>" of the journal begins; it must be there.
static long position(const Folder *f, const char *what, const char *path) {
    char line[300];
    long last = -1;
    snprintf(line, sizeof line, "%s %s%s\n", what, f->save, path);
    for (const char *at = faults.journal; (at = strstr(at, line)); at++) last = at - faults.journal;
    if (last < 0) fail_msg("no '%s' in\n%s", line, faults.journal);
    return last;
}

// What a power cut would show: nothing is named before it is on the disk, and no name is relied upon before its folder is.
static void order_of_writing(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    const char *shard = "/.iter_0000005.tmp/mp_rank_00/shard_00000_of_00001.safetensors", *manifest = "/.iter_0000005.tmp/manifest.json";
    const char *tracker = "/latest_checkpointed_iteration.txt", *tracker_fresh = "/.latest_checkpointed_iteration.txt.tmp";
    const char *list = "/checkpoints_of_run.txt", *list_fresh = "/.checkpoints_of_run.txt.tmp";
    char *journal = (char *)calloc(1, JOURNAL_BYTES);
    for (int again = 0; again < 2; again++) {
        faults.journal = strcpy(journal, "");
        assert_true(save(f->save, 5, 1, &err));
        long named = position(f, again ? "exchange" : "rename", "/iter_0000005"), tracked = position(f, "rename", tracker), listed = position(f, "rename", list);
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
        journal[tracked] = 0;  // what came before the tracker
        assert_true(listed < position(f, "fsync", ""));
        journal[listed] = 0;
        assert_true(named < position(f, "fsync", ""));
    }
    faults.journal = NULL;
    free(journal);
}

// Fails the n-th system call of a save of `iteration` over a checkpoint of iteration 5, for every n. Returns how many calls there are.
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
        if (iteration != 5 && ok) {  // back to one checkpoint
            assert_int_equal(folder_remove(f->save), 0);
        }
    }
    return n - 1;
}

static void every_call_fails(void **state) {
    Folder *f = (Folder *)*state;
    int calls = fail_every_call(f, 6, ENOSPC);
    assert_true(calls >= 45);  // slices, files, folders
    fail_every_call(f, 5, EIO);
    faults.no_exchange = true;
    fail_every_call(f, 5, EACCES);
}

// Kills the process at the n-th system call of a save, for every n: what the tracker names is whole, and the next save leaves no trace of it.
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
    assert_true(calls >= 25);  // one write for all slices
    fail_every_call(f, 5, EIO);
}

// With the one before deleted too: as long as the tracker names it, it is whole.
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
    // Another run's first save begins a line of its own.
    manner.before = -1;
    manner.keep.last = 1;
    assert_true(save(f->save, 9, 9, &err));
    for (int i = 1; i <= 9; i++) assert_int_equal(save_folder_holds(f->save, i), i == 4 || i == 6 || i == 7 || i == 9);
}

static void back_to_a_sound_one(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    Peers peers = {MPI_COMM_SELF, 0, NULL};
    char note[1400], path[200];
    int64_t iteration = 5;
    for (int i = 3; i <= 5; manner.before = i++) assert_true(save(f->save, i, (uint64_t)i, &err));
    Checkpoint *c = checkpoint_open_sound(f->save, &iteration, peers, note, sizeof note, &err);
    assert_true(c && iteration == 5 && !*note);
    checkpoint_close(c);
    for (int i = 5; i >= 3; i--) {
        snprintf(path, sizeof path, "%s/iter_%07d/mp_rank_00/shard_00000_of_00001.safetensors", f->save, i);
        assert_int_equal(truncate(path, 100), 0);
        iteration = 5;
        c = checkpoint_open_sound(f->save, &iteration, peers, note, sizeof note, &err);
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

static void forecasts(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    char line[1400];
    Retention all = {0, 0}, two = {2, 0};
    assert_true(save(f->save, 5, 1, &err));
    faults.free_bytes = (1 << 20) + 5 * 1001000;
    save_folder_forecast(f->save, 1000000, 5, 1, &all, line, sizeof line);
    assert_string_equal(line, "");
    save_folder_forecast(f->save, 1000000, 6, 1, &all, line, sizeof line);
    assert_non_null(strstr(line, "room for 5 more checkpoints of 1.001 MB, but this run will want 6;"));
    faults.free_bytes = (1 << 20) + 2 * 1001000;  // one is there: with two more there are three for a while
    save_folder_forecast(f->save, 1000000, 1000, 1, &two, line, sizeof line);
    assert_string_equal(line, "");
    faults.free_bytes -= 1;
    save_folder_forecast(f->save, 1000000, 1000, 1, &two, line, sizeof line);
    assert_non_null(strstr(line, "will want 2;"));
    faults.free_bytes = UINT64_MAX;  // a file system that does not say
    save_folder_forecast(f->save, 1000000, 1000, 1, &all, line, sizeof line);
    assert_string_equal(line, "");
}

// A folder left aside, as when the save that was replacing it died between its two renames, is the only copy: it is read, and put back.
static void left_aside(void **state) {
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
    // Beside a newer one it is rubbish, like what a killed save left. Other hidden names are not ours.
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
    faults.free_bytes = UINT64_MAX;  // a file system that does not say
    assert_true(save(f->save, 6, 2, &err));
    assert_loads(f->save, 6, 2);
}

// A disk that is really full, where this process may mount one.
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

static void folder_in_the_way(void **state) {
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
        cmocka_unit_test_setup_teardown(what_is_saved_is_loaded, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(any_range_can_be_read, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(kinds_can_be_left_out, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(slices_must_fit, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(another_model_is_named, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(trackers, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(release_and_renamed_folders, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(damaged_manifest, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(hostile_manifest, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(manifest_against_shard, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(state_without_younger_field, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(damaged_shard, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(shard_that_shrinks, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(order_of_writing, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(every_call_fails, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(killed_at_every_call, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(every_call_fails_in_the_background, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(killed_while_old_ones_are_deleted, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(old_ones_are_deleted, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(back_to_a_sound_one, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(forecasts, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(left_aside, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(no_space, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(full_disk, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(folder_in_the_way, make_folder, remove_folder),
    };
    leaks_start_mpi(&argc, &argv);
    int failed = cmocka_run_group_tests_name("checkpoint", tests, NULL, NULL);
    failed += leaks_found();
    MPI_Finalize();
    return failed;
}
