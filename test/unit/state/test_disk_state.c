// Optimizer state in a scratch file (llmc/state/disk_state.c): updates with chunks on disk are
// bitwise identical to updates in memory, with io_uring, with threads, and with an engine that
// returns short counts, out of order. Also skipped steps, reads and writes of any range between the
// steps, files of one chunk, buckets of whole matrices, the mode of the file, a full disk, and a
// failure of every single transfer, which must end the process with one line.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/state/disk_state.h"

// The second bucket is smaller than a chunk, and the last one has no matrices. `whole` of a Fixture
// makes the first and the third bucket consist of two matrices with padding.
enum { BUCKETS = 4, GROUP = 96, CHUNK = 3072, STEPS = 7, SKIPPED = 3 };
static const int64_t matrices[BUCKETS] = {96 * 100, 96 * 2, 96 * 64, 0};
static const int64_t tails[BUCKETS] = {77, 1000, 0, 4096};
enum { STATE = 9728 + 1216 + 6144 + 4096, MOST = 96 * 100 + 77 };  // buckets start at multiples of 64

static char folder_path[] = "/tmp/test_disk_state_XXXXXX";

// --- engines -------------------------------------------------------------------------------------

// Returns short counts and completes the last submitted block first.
static int64_t transfers, fail_at;  // number of transfers so far; the one that fails, 0: none
static int fail_result;

// Without O_DIRECT, because the counts need not be aligned.
static bool unsteady_open(ScratchFile *f) { return fcntl(f->fd, F_SETFL, O_RDWR) == 0; }
static void unsteady_close(ScratchFile *f) {}
static void unsteady_submit(ScratchFile *f, ScratchBlock *block) {
    block->next = f->submitted;
    f->submitted = block;
}
static ScratchBlock *unsteady_complete(ScratchFile *f) {
    ScratchBlock *b = f->submitted;
    f->submitted = b->next;
    int64_t number = ++transfers, bytes = b->bytes;
    if (number == fail_at) {
        b->result = fail_result;
        return b;
    }
    if (number % 5 == 0) b->result = number % 2 ? -EINTR : -EAGAIN;
    else {
        if (bytes > SCRATCH_ALIGN && number % 3)
            bytes = SCRATCH_ALIGN + (number * 131) % (bytes - SCRATCH_ALIGN);
        b->result = (int)(b->write ? pwrite(f->fd, b->memory, (size_t)bytes, b->offset)
                                   : pread(f->fd, b->memory, (size_t)bytes, b->offset));
    }
    return b;
}
static const ScratchEngine unsteady = {unsteady_open, unsteady_close, unsteady_submit, unsteady_complete};

static bool refuses(ScratchFile *f) {
    errno = EPERM;
    return false;
}
static const ScratchEngine forbidden = {.open = refuses};

// --- a run ---------------------------------------------------------------------------------------

typedef struct Fixture {
    Bucket bucket[BUCKETS];
    BucketLayout layout;
    Segment segment, whole[BUCKETS];
    DiskState disk;
    void *memory;
    float state[STATE_PARTS][STATE];  // the reference
    float grads[MOST];
    uint8_t codes[2][4 * MOST];
    float scales[2][MOST / GROUP];
    floatX tail[2][MOST];
    uint64_t fault;
} Fixture;

static float draw(uint32_t salt, int64_t i) {
    return (float)(int64_t)(replica_mix((uint64_t)i, salt) >> 40) * 0x1p-23f - 1.0f;
}

// Makes shard 1 of the bucket hold matrices of 1000 and 96 elements, at 0 and at 96 * 20.
static void use_whole_matrices(Fixture *x, int b) {
    x->bucket[b].whole = true;
    x->bucket[b].first_segment = b;
    x->bucket[b].segments = 2;
    x->bucket[b].matrix_elements = 2 * matrices[b];
    x->layout.segments = x->whole;
    x->whole[b] = (Segment){matrices[b], 1000, 0, b};
    x->whole[b + 1] = (Segment){matrices[b] + 96 * 20, 96, 0, b + 1};
}

static bool momentum_bf16;  // of the whole matrices of the next run

static Fixture *begin(const ScratchEngine *engine, int buckets, bool whole, int64_t chunk, int threads) {
    Fixture *x = calloc(1, sizeof *x);
    Error err = {0};
    assert_non_null(x);
    int64_t start = 0;
    for (int b = 0; b < buckets; b++) {
        x->bucket[b].matrix_per_rank = x->bucket[b].matrix_elements = matrices[b];
        x->bucket[b].tail_per_rank = x->bucket[b].tail_elements = tails[b];
        x->bucket[b].state_start = start;
        start += round_up64(matrices[b] + tails[b], 64);
        if (whole && b % 2 == 0) use_whole_matrices(x, b);
    }
    x->layout.buckets = buckets;
    x->layout.bucket = x->bucket;
    x->layout.dp = 1;
    x->disk.folder = (ScratchFolder){folder_path, -1, -1};
    x->segment = (Segment){0, MOST, 0, 0};
    x->disk.momentum_bf16 = momentum_bf16;
    disk_plan(&x->disk, &x->layout, whole, GROUP, chunk);
    x->memory = malloc((size_t)disk_memory_bytes(&x->disk));
    if (!disk_start(&x->disk, x->memory, threads, NULL, engine, &err)) fail_msg("%s", err.what);
    return x;
}

static void end(Fixture *x) {
    disk_stop(&x->disk);
    disk_free(&x->disk);
    free(x->memory);
    free(x);
}

static int64_t bucket_state(const Fixture *x, int b) {
    return x->bucket[b].matrix_per_rank + x->bucket[b].tail_per_rank;
}

// Returns the first element from `at` on that a part has: matrices of whole buckets have no second
// moments.
static int64_t from(const Fixture *x, int part, int b, int64_t at) {
    return part == STATE_EXP_AVG_SQ && x->bucket[b].whole && at < matrices[b] ? matrices[b] : at;
}
static int64_t position(const Fixture *x, int part, int b, int64_t at) {
    if (part != STATE_EXP_AVG_SQ) return x->bucket[b].state_start + at;
    return layout_squares_start(&x->layout, b) + at - (x->bucket[b].whole ? matrices[b] : 0);
}

// Calls work(x, part, b, element, n) for ranges of `every` elements of each part of the state.
static void for_ranges(Fixture *x, int64_t every, uint32_t salt,
                       void (*work)(Fixture *x, int part, int b, int64_t at, int64_t n, uint32_t salt)) {
    for (int b = 0; b < x->layout.buckets; b++) {
        for (int64_t at = 0; at < bucket_state(x, b); at += every) {
            int64_t end = at + every < bucket_state(x, b) ? at + every : bucket_state(x, b);
            for (int part = 0; part < STATE_PARTS; part++) {
                int64_t first = from(x, part, b, at);
                if (first < end) work(x, part, b, first, end - first, salt);
            }
        }
    }
}

static void put_range(Fixture *x, int part, int b, int64_t at, int64_t n, uint32_t salt) {
    float *own = x->state[part] + x->bucket[b].state_start + at;
    for (int64_t i = 0; i < n; i++) own[i] = 1e-2f * (1 + draw(salt + (uint32_t)part, at + i));
    disk_write(&x->disk, (StatePart)part, position(x, part, b, at), own, n);
    bool narrow = x->disk.momentum_bf16 && x->bucket[b].whole && part == STATE_EXP_AVG;
    for (int64_t i = 0; narrow && i < n && at + i < matrices[b]; i++)
        own[i] = bf16_to_float(bf16_from_float(own[i]));
}
// Writes ranges of odd lengths and offsets to both states.
static void put(Fixture *x, uint32_t salt, int64_t every) { for_ranges(x, every, salt, put_range); }

static void compare_range(Fixture *x, int part, int b, int64_t at, int64_t n, uint32_t unused) {
    static float copy[MOST];
    disk_read(&x->disk, (StatePart)part, position(x, part, b, at), copy, n);
    assert_memory_equal(copy, x->state[part] + x->bucket[b].state_start + at, (size_t)n * sizeof *copy);
}
static void compare(Fixture *x, int64_t every) { for_ranges(x, every, 0, compare_range); }

static UpdateShard update_of(Fixture *x, int b, int64_t step, const StepStatus *control, int which) {
    UpdateShard u = {.control = control,
                     .beta1 = 0.9f,
                     .beta2 = 0.95f,
                     .epsilon = 1e-8f,
                     .weight_decay = 0.1f,
                     .bucket = x->bucket[b],
                     .table = {&x->segment, 1},
                     .matrix_grads = x->grads,
                     .tail_grads = x->grads + matrices[b],
                     .codec = CODEC_INT4,
                     .group = GROUP,
                     .rounding = ROUND_STOCHASTIC,
                     .key = {7, (uint32_t)step, PURPOSE_WEIGHT, 0},
                     .codes = x->codes[which],
                     .scales = x->scales[which],
                     .tail = (uint8_t *)x->tail[which],
                     .fault = &x->fault,
                     .code = 1};
    return u;
}

// Stands for an optimizer of whole matrices.
static void update_matrix(float *master, float *exp_avg, const float *grads, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        exp_avg[i] = 0.5f * exp_avg[i] + grads[i];
        if (momentum_bf16) exp_avg[i] = bf16_to_float(bf16_from_float(exp_avg[i]));
        master[i] -= exp_avg[n - 1 - i];
    }
}

// The same for a chunk on disk, whose momentum may be in bf16.
static void update_chunk(const UpdateShard *open, const float *grads, int64_t n) {
    static float wide[MOST];
    assert_true((open->momentum_bf16 != NULL) == momentum_bf16);
    if (momentum_bf16) widen_bf16(wide, open->momentum_bf16, n);
    update_matrix(open->master, momentum_bf16 ? wide : open->exp_avg, grads, n);
    if (momentum_bf16) narrow_bf16(open->momentum_bf16, wide, n);
}

// Updates bucket b, of whole matrices, in memory and on disk.
static void update_whole(Fixture *x, int b, UpdateShard *u, UpdateShard *v, int threads) {
    const DiskState *d = &x->disk;
    int found = 0;
    u->exp_avg_sq += matrices[b];
    u->matrix_grads = v->matrix_grads = NULL;
    for (int64_t i = d->bucket_chunk[b]; i < d->bucket_chunk[b + 1]; i++) {
        const DiskChunk *chunk = &d->chunk[i];
        UpdateShard open = disk_open_chunk(&x->disk, v);
        if (chunk->tensor >= 0 && u->control->applied) {
            int64_t n = x->whole[chunk->tensor].numel, at = chunk->first;
            assert_int_equal(at, x->whole[chunk->tensor].start - matrices[b]);
            update_chunk(&open, x->grads + at, n);
            update_matrix(u->master + at, u->exp_avg + at, x->grads + at, n);
        }
        found += chunk->tensor >= 0;
        disk_update_chunk(&x->disk, v, threads, NULL);
    }
    assert_int_equal(found, 2);
    update_shard_host(u, threads, NULL);
}

static void step_once(Fixture *x, int64_t step, int threads) {
    StepStatus control = {.applied = step != SKIPPED,
                          .clip_coefficient = 0.7f,
                          .learning_rate = 1e-2f,
                          .bias_correction1 = 0.19f,
                          .bias_correction2 = 0.0975f};
    for (int b = 0; b < x->layout.buckets; b++) {
        int64_t at = x->bucket[b].state_start;
        for (int64_t i = 0; i < bucket_state(x, b); i++) x->grads[i] = draw((uint32_t)(step * 8 + b), i);
        memset(x->codes, 0x5A, sizeof x->codes);
        memset(x->scales, 0x5A, sizeof x->scales);
        memset(x->tail, 0x5A, sizeof x->tail);
        UpdateShard u = update_of(x, b, step, &control, 0), v = update_of(x, b, step, &control, 1);
        u.master = x->state[STATE_MASTER] + at;
        u.exp_avg = x->state[STATE_EXP_AVG] + at;
        u.exp_avg_sq = x->state[STATE_EXP_AVG_SQ] + at;
        if (x->bucket[b].whole) {
            update_whole(x, b, &u, &v, threads);
        } else {
            update_shard_host(&u, threads, NULL);
            disk_update(&x->disk, b, &v, threads, NULL);
        }
        assert_memory_equal(x->codes[0], x->codes[1], sizeof x->codes[0]);
        assert_memory_equal(x->scales[0], x->scales[1], sizeof x->scales[0]);
        assert_memory_equal(x->tail[0], x->tail[1], sizeof x->tail[0]);
    }
}

static void train(const ScratchEngine *engine, int buckets, bool whole, int64_t chunk, int threads) {
    Fixture *x = begin(engine, buckets, whole, chunk, threads);
    compare(x, 1000);  // zeros
    put(x, 1, 1000);
    for (int64_t step = 0; step < STEPS; step++) {
        step_once(x, step, threads);
        if (step == 1) compare(x, MOST);
        if (step == 4) put(x, 9, 777);  // chunks that have been read ahead change
        if (step == 5) compare(x, 333);
    }
    compare(x, 1001);
    end(x);
}

static void trains_alike(void **state) {
    const ScratchEngine *engines[] = {NULL, &scratch_threads, &unsteady, &forbidden};
    for (size_t i = 0; i < sizeof engines / sizeof *engines; i++) {
        transfers = fail_at = 0;
        train(engines[i], BUCKETS, false, CHUNK, 2);
        train(engines[i], BUCKETS, false, 1 << 20, 1);  // a chunk per bucket
        train(engines[i], 1, false, 1 << 20, 1);        // fewer chunks than slots
        train(engines[i], 3, false, 1 << 20, 3);
        train(engines[i], 3, true, CHUNK, 2);
        train(engines[i], 1, true, 1 << 20, 1);
        train(engines[i], 1, false, CHUNK, 1);  // as many chunks as slots
        momentum_bf16 = true;
        train(engines[i], 3, true, CHUNK, 2);
        train(engines[i], 1, true, 1 << 20, 1);
        momentum_bf16 = false;
    }
}

// --- chunks and the file -------------------------------------------------------------------------

static void chunks_hold_whole_groups(void **state) {
    Fixture *x = begin(NULL, BUCKETS, false, CHUNK, 1);
    const DiskState *d = &x->disk;
    int64_t elements = 0, end_of_file = 0;
    for (int64_t i = 0; i < d->chunks; i++) {
        const DiskChunk *chunk = &d->chunk[i];
        if (chunk->first < matrices[chunk->bucket]) assert_int_equal(chunk->first % GROUP, 0);
        assert_int_equal(chunk->offset, end_of_file);
        assert_int_equal(chunk->padded % SCRATCH_ALIGN, 0);
        assert_true(chunk->padded >= chunk->count * (int64_t)sizeof(float));
        elements += chunk->count;
        end_of_file += STATE_PARTS * chunk->padded;
    }
    assert_int_equal(elements, 96 * 166 + 77 + 1000 + 4096);
    assert_int_equal(end_of_file, d->file_bytes);
    end(x);
}

static void file_is_private_and_unnamed(void **state) {
    struct stat status;
    Fixture *x = begin(NULL, BUCKETS, false, CHUNK, 1);
    assert_int_equal(fstat(x->disk.file->fd, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    assert_int_equal(status.st_nlink, 0);
    assert_int_equal(status.st_size, x->disk.file_bytes);
    assert_true(status.st_blocks * 512 >= x->disk.file_bytes);  // reserved
    DIR *folder = opendir(folder_path);
    for (const struct dirent *entry; (entry = readdir(folder));) assert_int_equal(entry->d_name[0], '.');
    closedir(folder);
    end(x);
}

static void full_disk(void **state) {
    Error err = {0};
    struct rlimit limit, small;
    ScratchFile *file = calloc(1, sizeof *file);
    ScratchFolder folder = {folder_path, -1, -1}, nowhere = {"/nonexistent", -1, -1};
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &limit);
    small = (struct rlimit){1 << 20, limit.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
    bool opened = scratch_open(file, &folder, 2 << 20, 1, NULL, NULL, &err);
    setrlimit(RLIMIT_FSIZE, &limit);
    assert_false(opened);
    assert_int_equal(err.code, EXIT_ENVIRONMENT);
    assert_non_null(strstr(err.what, "cannot reserve"));
    assert_non_null(strstr(err.what, folder_path));
    scratch_close(file);  // no-op
    assert_false(scratch_open(file, &nowhere, 4096, 1, NULL, NULL, &err));
    assert_non_null(strstr(err.what, "/nonexistent: No such file or directory"));
    free(file);
}

// --- failures ------------------------------------------------------------------------------------

// Trains in a child process whose transfer number fail_at fails. Returns false once it succeeds,
// because there are fewer transfers.
static bool fails(const char *words) {
    char text[512];
    int pipes[2], status;
    assert_int_equal(pipe(pipes), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(pipes[1], STDERR_FILENO);
        transfers = 0;
        train(&unsteady, 2, false, CHUNK, 1);
        _exit(0);
    }
    close(pipes[1]);
    FILE *output = fdopen(pipes[0], "r");
    size_t length = fread(text, 1, sizeof text - 1, output);
    text[length] = 0;
    fclose(output);
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 0) return false;
    assert_int_equal(WEXITSTATUS(status), EXIT_ENVIRONMENT);
    if (!strstr(text, words) || strchr(text, '\n') != text + length - 1) fail_msg("printed %s", text);
    return true;
}

static void every_transfer_fails(void **state) {
    static const struct {
        int result;
        const char *words;
    } cases[] = {{-EIO, "Input/output error; check the disk"},
                 {-ENOSPC, "No space left on device; free space"},
                 {0, "the file is too short"},
                 {100, "Input/output error"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t steps = i == 0 ? 1 : 37;
        fail_result = cases[i].result;
        for (fail_at = 1; fails(cases[i].words); fail_at += steps) {
        }
        assert_true(fail_at > 100);
    }
    fail_at = 0;
}

static int make_folder(void **state) { return mkdtemp(folder_path) ? 0 : -1; }
static int remove_folder(void **state) { return rmdir(folder_path); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(trains_alike),
        cmocka_unit_test(chunks_hold_whole_groups),
        cmocka_unit_test(file_is_private_and_unnamed),
        cmocka_unit_test(full_disk),
        cmocka_unit_test(every_transfer_fails),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
