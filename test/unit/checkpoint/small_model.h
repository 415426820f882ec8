// A small model for checkpoint tests: four parameters with odd shapes, odd names and distinct
// elements, and helpers. Included by test_checkpoint.c, test_manifest.c and test_save_faults.c.
#pragma once
#include <dirent.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <cmocka.h>

#include "test/checkpoint_calls.h"
#include "test/leaks.h"
#include "test/unit/folder.h"

static const Tensor MODEL[] = {{.name = "wte", .dims = 2, .whole = {7, 5}},
                               {.name = "ln \"w\"", .dims = 1, .whole = {13, 1}},
                               {.name = "h.0|qkv", .dims = 2, .whole = {3, 11}},
                               {.name = "b", .dims = 1, .whole = {1, 1}}};
enum { TENSORS = sizeof MODEL / sizeof *MODEL, MAX_SLICES = 400, MOST_ELEMENTS = 35 };

static inline int64_t elements_of(int t) { return tensor_whole_elements(&MODEL[t]); }

// Writes the first `width` bytes of element i, which differ for all combinations of arguments.
static inline void element(void *out, int width, int tensor, SliceKind kind, int64_t i, uint64_t salt) {
    uint64_t key[4] = {(uint64_t)tensor, kind, (uint64_t)i, salt}, hash = XXH3_64bits(key, sizeof key);
    memcpy(out, &hash, (size_t)width);
}

static inline int tensor_named(const char *name) {
    int t = 0;
    while (strcmp(MODEL[t].name, name) != 0) t++;
    return t;
}

// Fills host with the expected (hi - lo) elements of a slice. Values differ between nodes.
static inline void fill(const Slice *s, uint64_t salt, void *host) {
    if (slice_kind_per_node(s->kind)) salt += 1000 * (uint64_t)s->node;
    int tensor = tensor_named(s->tensor), width = slice_kind_bytes(s->kind);
    for (int64_t e = s->lo; e < s->hi; e++) {
        int64_t whole = whole_element(&MODEL[tensor], s->columns, e);
        element((char *)host + (e - s->lo) * width, width, tensor, s->kind, whole, salt);
    }
}

typedef struct Saved {
    CheckpointSave save;
    Slice slices[MAX_SLICES];
    uint64_t salt;
} Saved;

static inline void fetch(void *context, int i, void *host) {
    const Saved *saved = (const Saved *)context;
    fill(&saved->slices[i], saved->salt, host);
}

static inline RunState state_of(int64_t iteration) {
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

// Adds slices of all kinds for a range of columns, with `piece` elements each (the last may have
// fewer), followed by an empty slice.
static inline void add_columns(Saved *s, int t, Columns columns, int64_t piece) {
    int64_t count = columns.count ? columns.count : MODEL[t].whole[1], elements = MODEL[t].whole[0] * count;
    for (int k = 0; k < FIRST_KINDS; k++) {
        for (int64_t lo = 0; lo <= elements; lo += piece) {
            int64_t hi = lo + piece < elements ? lo + piece : elements;
            s->slices[s->save.slice_count++] = (Slice){MODEL[t].name, (SliceKind)k, lo, hi, columns, 0};
            assert_true(s->save.slice_count < MAX_SLICES);
        }
        s->slices[s->save.slice_count++] = (Slice){MODEL[t].name, (SliceKind)k, elements,
                                                   elements,      columns,      0};
    }
}

static inline void prepare_nothing(Saved *s, const char *directory, int64_t iteration, uint64_t salt) {
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
                               .before = -1,
                               .peers = {MPI_COMM_SELF, 0, NULL}};
}

static inline void prepare(Saved *s, const char *directory, int64_t iteration, uint64_t salt, int piece) {
    prepare_nothing(s, directory, iteration, salt);
    for (int t = 0; t < TENSORS; t++) add_columns(s, t, (Columns){0, 0}, piece);
}

// Options of a save.
static struct {
    bool background;  // asynchronous, from staging memory
    Retention keep;
    int64_t before;  // iteration from which the run resumed
    const Fp8State *fp8;
    BaseModel base;
} manner;

static inline bool save(const char *directory, int64_t iteration, uint64_t salt, Error *err) {
    Saved s;
    prepare(&s, directory, iteration, salt, 20);
    s.save.keep = manner.keep;
    s.save.before = manner.before;
    s.save.fp8 = manner.fp8;
    s.save.base = manner.base;
    if (manner.background) take_staging(&s.save);
    bool ok = save_whole(&s.save, err);
    free(s.save.staging);
    return ok;
}

static inline void assert_one_line(const Error *err) {
    assert_int_equal(err->code, EXIT_CHECKPOINT);
    assert_null(strchr(err->what, '\n'));
    assert_non_null(strchr(err->what, ';'));
}

// Reads a slice. Returns 1 if its values are right, 0 if it cannot be read, -1 if they are wrong.
static inline int read_slice(const Checkpoint *c, const Slice *slice, uint64_t salt, Error *err) {
    unsigned char buffer[MOST_ELEMENTS * 4 + 1], expected[MOST_ELEMENTS * 4];
    size_t bytes = (size_t)((slice->hi - slice->lo) * slice_kind_bytes(slice->kind));
    buffer[bytes] = 0xa5;
    if (!checkpoint_read(c, slice, buffer, err)) return 0;
    assert_int_equal(buffer[bytes], 0xa5);
    fill(slice, salt, expected);
    return memcmp(buffer, expected, bytes) == 0 ? 1 : -1;
}

static inline int read_range(const Checkpoint *c, int tensor, SliceKind kind, int64_t lo, int64_t hi,
                             uint64_t salt, Error *err) {
    Slice slice = {MODEL[tensor].name, kind, lo, hi, {0, 0}, 0};
    return read_slice(c, &slice, salt, err);
}

// Reads all slices. Returns 1 if all values are right, -1 if any is wrong, 0 if a slice cannot be
// read.
static inline int read_all(const Checkpoint *c, uint64_t salt) {
    int worst = 1;
    for (int t = 0; t < TENSORS; t++) {
        for (int k = 0; k < FIRST_KINDS; k++) {
            Error err = {0};
            int got = read_range(c, t, (SliceKind)k, 0, elements_of(t), salt, &err);
            if (got == 0) assert_one_line(&err);
            if (got < worst) worst = got;
        }
    }
    return worst;
}

static inline void assert_loads(const char *directory, int64_t iteration, uint64_t salt) {
    Error err = {0};
    assert_int_equal(newest_checkpoint(directory, &err), iteration);
    Checkpoint *c = open_exactly(directory, iteration, MPI_COMM_SELF, &err);
    if (!c) fail_msg("%s", err.what);
    assert_int_equal(checkpoint_state(c)->iteration, iteration);
    assert_int_equal(read_all(c, salt), 1);
    checkpoint_close(c);
}

static inline int hidden_entries(const char *directory) {
    DIR *folder = opendir(directory);
    int count = 0;
    for (struct dirent *e; (e = readdir(folder));) {
        count += e->d_name[0] == '.' && strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    }
    closedir(folder);
    return count;
}

typedef struct Folder {
    char path[64], save[80], shard[200], manifest[160], tracker[160];
} Folder;

static inline int make_folder(void **state) {
    Folder *f = (Folder *)calloc(1, sizeof *f);
    if (!f) return -1;
    if (folder_make(f->path, sizeof f->path, "test_checkpoint")) return -1;
    snprintf(f->save, sizeof f->save, "%s/a/b", f->path);
    snprintf(f->shard, sizeof f->shard, "%s/iter_0000005/mp_rank_00/shard_00000_of_00001.safetensors",
             f->save);
    snprintf(f->manifest, sizeof f->manifest, "%s/iter_0000005/manifest.json", f->save);
    snprintf(f->tracker, sizeof f->tracker, "%s/latest_checkpointed_iteration.txt", f->save);
    memset(&manner, 0, sizeof manner);
    manner.before = -1;
    *state = f;
    return 0;
}

static inline int remove_folder(void **state) {
    Folder *f = (Folder *)*state;
    int result = folder_remove(f->path);
    free(f);
    return result;
}

static inline char *read_bytes(const char *path, size_t *bytes) {
    FILE *in = fopen(path, "rb");
    assert_non_null(in);
    char *data = (char *)malloc(1 << 20);
    assert_non_null(data);
    *bytes = fread(data, 1, 1 << 20, in);
    fclose(in);
    return data;
}

static inline void write_bytes(const char *path, const void *data, size_t bytes) {
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, bytes, out), bytes);
    assert_int_equal(fclose(out), 0);
}

// The main function of a test program.
static inline int run_group(int *argc, char ***argv, const char *name, const struct CMUnitTest *tests,
                            size_t count) {
    leaks_start_mpi(argc, argv);
    int failed = _cmocka_run_group_tests(name, tests, count, NULL, NULL);
    failed += leaks_found();
    MPI_Finalize();
    return failed;
}
