// Saves checkpoints from several ranks with odd slice boundaries, and reads them with other
// boundaries and other numbers of ranks. If one rank fails, all ranks report the same error and the
// previous checkpoint is unchanged. Run with 1, 2, 4, ... ranks.
#include <dirent.h>
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "test/checkpoint_calls.h"
#include "test/leaks.h"

static const Tensor MODEL[] = {{.name = "wte", .dims = 2, .whole = {1001, 7}},
                               {.name = "ln", .dims = 1, .whole = {13, 1}},
                               {.name = "qkv", .dims = 2, .whole = {3, 1111}},
                               {.name = "one", .dims = 1, .whole = {1, 1}}};
enum { TENSORS = sizeof MODEL / sizeof *MODEL, MAX_SLICES = 64, MAX_ELEMENTS = 1001 * 7 };

typedef struct Test {
    int rank, ranks;
    char folder[64], save[80];
    int failures;
} Test;

static void check(Test *t, bool ok, const char *what) {
    int all = ok;
    MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (t->rank == 0) printf("%s %s\n", all ? "ok" : "FAILED", what);
    t->failures += !all;
}

static int64_t elements_of(int tensor) { return tensor_whole_elements(&MODEL[tensor]); }

static void element(void *out, int width, int tensor, SliceKind kind, int64_t i, int64_t iteration) {
    int64_t key[4] = {tensor, kind, i, iteration};
    uint64_t hash = XXH3_64bits(key, sizeof key);
    memcpy(out, &hash, (size_t)width);
}

typedef struct Saved {
    CheckpointSave save;
    Slice slices[MAX_SLICES];
} Saved;

static void fetch(void *context, int i, void *host) {
    const Saved *saved = (const Saved *)context;
    const Slice *s = &saved->slices[i];
    int tensor = 0, width = slice_kind_bytes(s->kind);
    while (strcmp(MODEL[tensor].name, s->tensor) != 0) tensor++;
    for (int64_t e = s->lo; e < s->hi; e++) {
        int64_t whole = whole_element(&MODEL[tensor], s->columns, e);
        element((char *)host + (e - s->lo) * width, width, tensor, s->kind, whole,
                saved->save.state.iteration + 1000 * s->node);
    }
}

// Returns the start of part r of n. Parts are uneven and start at odd elements. For small tensors
// some parts are empty.
static int64_t part_start(int64_t elements, int r, int n) {
    return r == n ? elements : elements * r * (r + 1) / (n * (n + 1));
}

static void prepare(Saved *s, const Test *t, int64_t iteration) {
    memset(s, 0, sizeof *s);
    s->save = (CheckpointSave){.directory = t->save,
                               .state = {.iteration = iteration, .beta1_power = 0.1, .beta2_power = 0.3},
                               .tensors = MODEL,
                               .tensor_count = TENSORS,
                               .slices = s->slices,
                               .fetch = fetch,
                               .context = s,
                               .before = newest_checkpoint(t->save, NULL),
                               .peers = {MPI_COMM_WORLD, 0, NULL}};
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int k = 0; k < FIRST_KINDS; k++) {
            // The part that a rank saves differs between tensors.
            int part = (t->rank + tensor) % t->ranks;
            int64_t lo = part_start(elements_of(tensor), part, t->ranks),
                    hi = part_start(elements_of(tensor), part + 1, t->ranks);
            s->slices[s->save.slice_count++] = (Slice){MODEL[tensor].name, (SliceKind)k, lo, hi, {0, 0}, 0};
        }
    }
}

static bool reads_right(const Checkpoint *c, const Slice *slice, int tensor, int64_t iteration) {
    static unsigned char buffer[MAX_ELEMENTS * 4];
    unsigned char expected[4];
    int width = slice_kind_bytes(slice->kind);
    Error err;
    if (!checkpoint_read(c, slice, buffer, &err)) {
        printf("%s\n", err.what);
        return false;
    }
    for (int64_t e = slice->lo; e < slice->hi; e++) {
        element(expected, width, tensor, slice->kind, whole_element(&MODEL[tensor], slice->columns, e),
                iteration);
        if (memcmp(buffer + (e - slice->lo) * width, expected, (size_t)width) != 0) return false;
    }
    return true;
}

// Reads part p of n of a tensor, once as a range of columns and once as a range of elements, and
// compares the values.
static bool part_reads_right(const Checkpoint *c, int tensor, SliceKind kind, int p, int n,
                             int64_t iteration) {
    const Tensor *t = &MODEL[tensor];
    int64_t first = t->whole[1] * p / n, count = t->whole[1] * (p + 1) / n - first,
            elements = elements_of(tensor);
    Slice range = {t->name, kind, elements * p / n, elements * (p + 1) / n, {0, 0}, 0};
    Slice columns = {t->name, kind, 0, t->whole[0] * count, {first, count}, 0};
    return reads_right(c, &range, tensor, iteration) &&
           (count == 0 || reads_right(c, &columns, tensor, iteration));
}

// Opens the checkpoint with the ranks of comm and reads all tensors, unsplit and in `parts` parts.
static bool loads(const Test *t, MPI_Comm comm, int64_t iteration, int parts) {
    Error err = {0};
    Checkpoint *c = open_exactly(t->save, iteration, comm, &err);
    if (!c) printf("%s\n", err.what);
    bool ok = c && checkpoint_state(c)->iteration == iteration && checkpoint_state(c)->beta1_power == 0.1 &&
              checkpoint_check_tensors(c, MODEL, TENSORS, &err);
    for (int tensor = 0; ok && tensor < TENSORS; tensor++) {
        for (int k = 0; ok && k < FIRST_KINDS; k++) {
            ok = part_reads_right(c, tensor, (SliceKind)k, 0, 1, iteration);
            for (int p = 0; ok && p < parts; p++)
                ok = part_reads_right(c, tensor, (SliceKind)k, p, parts, iteration);
        }
    }
    checkpoint_close(c);
    return ok;
}

static bool clean(const Test *t) {
    DIR *folder = opendir(t->save);
    int hidden = 0;
    for (struct dirent *e; folder && (e = readdir(folder));)
        hidden += e->d_name[0] == '.' && strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    if (folder) closedir(folder);
    return folder && hidden == 0;
}

// Returns true if all ranks failed with the same single line, which contains `says`.
static bool same_error(bool failed, const Error *err, const char *says) {
    Error first = *err;
    MPI_Bcast(&first, (int)sizeof first, MPI_BYTE, 0, MPI_COMM_WORLD);
    bool same = failed && err->code == EXIT_CHECKPOINT && first.code == err->code &&
                strcmp(first.what, err->what) == 0 && strstr(err->what, says) && !strchr(err->what, '\n');
    if (!same) printf("failed %d: %s\n", failed, err->what);
    return same;
}

static void test_round_trip(Test *t) {
    Saved s;
    Error err = {0};
    prepare(&s, t, 100);
    bool saved = save_whole(&s.save, &err);
    if (!saved) printf("%s\n", err.what);
    check(t, saved && newest_checkpoint(t->save, &err) == 100 && clean(t), "save with all ranks");
    check(t, loads(t, MPI_COMM_WORLD, 100, 3), "load with all ranks, unsplit and at other boundaries");
    check(t, loads(t, MPI_COMM_SELF, 100, 5), "load with one rank");
    MPI_Comm half;
    MPI_Comm_split(MPI_COMM_WORLD, t->rank % 2, t->rank, &half);
    check(t, loads(t, half, 100, 1 + t->rank), "load with half of the ranks");
    MPI_Comm_free(&half);
}

// Prepares the saves of tensor-parallel ranks. As in Megatron-LM, tensor ranks are adjacent. "wte"
// is split by columns, "qkv" by rows; the other tensors are replicated and saved once. Ranks with
// the same part save slices of it, as under ZeRO.
static void prepare_split(Saved *s, const Test *t, int64_t iteration, int tensor_ranks) {
    prepare(s, t, iteration);
    int tp = t->rank % tensor_ranks, dp = t->rank / tensor_ranks, parts = t->ranks / tensor_ranks;
    s->save.tensor_rank = tp;
    for (int i = 0; i < s->save.slice_count; i++) {
        Slice *slice = &s->slices[i];
        const Tensor *tensor = &MODEL[i / FIRST_KINDS];
        int64_t rows = tensor->whole[0], all = tensor->whole[1], before = 0,
                elements = elements_of(i / FIRST_KINDS);
        if (i / FIRST_KINDS == 0) {
            slice->columns.first = all * tp / tensor_ranks;
            slice->columns.count = all * (tp + 1) / tensor_ranks - slice->columns.first;
            elements = rows * slice->columns.count;
        } else if (i / FIRST_KINDS == 2) {
            before = rows * tp / tensor_ranks * all;
            elements = rows * (tp + 1) / tensor_ranks * all - before;
        } else if (tp > 0) {
            elements = 0;
        }
        slice->lo = before + part_start(elements, dp, parts);
        slice->hi = before + part_start(elements, dp + 1, parts);
    }
}

static void test_layouts(Test *t) {
    Error err = {0};
    for (int tensor_ranks = t->ranks; tensor_ranks > 1; tensor_ranks /= 2) {
        Saved s;
        char folder[160];
        prepare_split(&s, t, 100, tensor_ranks);
        bool saved = t->ranks % tensor_ranks == 0 && save_whole(&s.save, &err);
        if (!saved) printf("%s\n", err.what);
        snprintf(folder, sizeof folder, "%s/iter_0000100/mp_rank_%02d", t->save, tensor_ranks - 1);
        check(t, saved && clean(t) && access(folder, F_OK) == 0, "save with tensors split over ranks");
        check(t, loads(t, MPI_COMM_WORLD, 100, 3) && loads(t, MPI_COMM_SELF, 100, 4),
              "load split tensors, unsplit and with another split");
    }
}

// A file size limit makes writes of the last rank fail, as if the disk were full for this rank.
static void test_one_rank_fails(Test *t) {
    Saved s;
    Error err = {0};
    struct rlimit before, small;
    prepare(&s, t, 200);
    getrlimit(RLIMIT_FSIZE, &before);
    small = before;
    small.rlim_cur = 3000;
    if (t->rank == t->ranks - 1) setrlimit(RLIMIT_FSIZE, &small);
    bool ok = save_whole(&s.save, &err);
    setrlimit(RLIMIT_FSIZE, &before);
    check(t, same_error(!ok, &err, "File too large"), "a rank that cannot write stops all ranks");
    check(t, newest_checkpoint(t->save, &err) == 100 && clean(t) && loads(t, MPI_COMM_WORLD, 100, 2),
          "the previous checkpoint is unchanged");
}

// Every rank is a node with its own master weights of all elements.
static void test_nodes(Test *t) {
    Saved s;
    Error err = {0};
    static unsigned char buffer[MAX_ELEMENTS * 4], expected[4];
    prepare(&s, t, 100);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        Slice own = {MODEL[tensor].name, SLICE_LOCAL_MASTER, 0, elements_of(tensor), {0, 0}, t->rank};
        s.slices[s.save.slice_count++] = own;
    }
    bool saved = save_whole(&s.save, &err);
    if (!saved) printf("%s\n", err.what);
    check(t, saved && loads(t, MPI_COMM_WORLD, 100, 3), "save with state of every node");
    Checkpoint *c = open_exactly(t->save, 100, MPI_COMM_WORLD, &err);
    bool ok = c && checkpoint_nodes(c, SLICE_LOCAL_MASTER) == t->ranks;
    for (int i = 0; ok && i < TENSORS * t->ranks; i++) {
        int tensor = i % TENSORS;
        int64_t elements = elements_of(tensor);
        Slice of_node = {MODEL[tensor].name, SLICE_LOCAL_MASTER, 0, elements, {0, 0}, i / TENSORS};
        ok = checkpoint_read(c, &of_node, buffer, &err);
        for (int64_t e = 0; ok && e < elements; e++) {
            element(expected, 4, tensor, SLICE_LOCAL_MASTER, e, 100 + 1000 * of_node.node);
            ok = memcmp(buffer + 4 * e, expected, 4) == 0;
        }
    }
    checkpoint_close(c);
    check(t, ok, "all ranks read the state of each node");
}

static void test_bad_slices(Test *t) {
    Saved s;
    Error err = {0};
    prepare(&s, t, 200);
    if (t->rank == t->ranks - 1) s.slices[0].tensor = "none";
    check(t, same_error(!save_whole(&s.save, &err), &err, "'none'"), "all ranks report an unknown tensor");
    prepare(&s, t, 200);
    if (t->rank == 0) s.save.slice_count--;
    bool ok = save_whole(&s.save, &err);
    // Omits rank 0's last slice, of tensor "one". A single rank saves "one"; which rank it is
    // depends on the number of ranks.
    int64_t missing = s.slices[s.save.slice_count].hi - s.slices[s.save.slice_count].lo;
    MPI_Bcast(&missing, 1, MPI_INT64_T, 0, MPI_COMM_WORLD);
    check(t, missing == 0 ? ok : same_error(!ok, &err, "no rank saves weight of 'one'"),
          "all ranks report a slice that no rank saves");
    prepare(&s, t, 300);
    if (t->rank == t->ranks - 1)
        s.slices[0].hi = s.slices[0].lo, s.slices[1] = (Slice){"wte", SLICE_EXP_AVG, 0, 7007, {0, 0}, 0};
    ok = save_whole(&s.save, &err);
    check(t, same_error(!ok, &err, t->ranks > 1 ? "overlap" : "no rank saves master of 'wte'"),
          "all ranks report overlapping slices");
    check(t, clean(t), "failed saves leave no files");
}

static void test_replace(Test *t) {
    Saved s;
    Error err = {0};
    for (int i = 0; i < 2; i++) {
        prepare(&s, t, 400);
        s.save.state.consumed_train_samples = i;
        bool saved = save_whole(&s.save, &err);
        Checkpoint *c = open_exactly(t->save, 400, MPI_COMM_WORLD, &err);
        check(t, saved && c && checkpoint_state(c)->consumed_train_samples == i && clean(t),
              i ? "save the same iteration again" : "save a later iteration");
        checkpoint_close(c);
    }
}

// A background save runs in parts, each of which finishes on all ranks before the next one begins.
// It also deletes old checkpoints.
static void test_background(Test *t) {
    Saved s;
    Error err = {0};
    prepare(&s, t, 500);
    take_staging(&s.save);
    s.save.keep.last = 1;
    CheckpointJob *job = checkpoint_begin(&s.save, &err);
    bool ok = job != NULL, done = false;
    int parts = 0;
    memset(s.slices, 0, sizeof s.slices);  // the job must use its own copy
    while (ok && !done) {
        int busy = 1;
        while (busy) {
            busy = checkpoint_busy(job);
            MPI_Allreduce(MPI_IN_PLACE, &busy, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
        }
        ok = checkpoint_advance(job, &done, &err);
        parts++;
    }
    if (!ok) printf("%s\n", err.what);
    check(t, ok && parts == 3 && checkpoint_job_state(job)->iteration == 500, "a background save succeeds");
    checkpoint_job_free(job);
    free(s.save.staging);
    MPI_Barrier(MPI_COMM_WORLD);
    check(t, newest_checkpoint(t->save, &err) == 500 && clean(t) && loads(t, MPI_COMM_WORLD, 500, 2),
          "load the checkpoint of a background save");
    int count;
    int64_t *list = save_folder_list(t->save, &count);
    check(t, count == 1 && list[0] == 500, "older checkpoints are deleted");
    free(list);
    // Restores the state that later tests expect.
    prepare(&s, t, 400);
    check(t, save_whole(&s.save, &err), "save an older iteration again");
}

// If one rank cannot write during a background save, all ranks report the same line, and no files
// remain.
static void test_background_fails(Test *t) {
    Saved s;
    Error err = {0};
    struct rlimit before, small;
    prepare(&s, t, 450);
    take_staging(&s.save);
    getrlimit(RLIMIT_FSIZE, &before);
    small = before;
    small.rlim_cur = 3000;
    if (t->rank == t->ranks - 1) setrlimit(RLIMIT_FSIZE, &small);
    CheckpointJob *job = checkpoint_begin(&s.save, &err);
    bool ok = job != NULL, done = false;
    while (ok && !done) ok = checkpoint_advance(job, &done, &err);
    setrlimit(RLIMIT_FSIZE, &before);
    check(t, same_error(!ok, &err, "File too large"), "a failed background write stops all ranks");
    checkpoint_job_free(job);
    free(s.save.staging);
    MPI_Barrier(MPI_COMM_WORLD);
    check(t, newest_checkpoint(t->save, &err) == 400 && clean(t) && loads(t, MPI_COMM_WORLD, 400, 2),
          "a failed background save leaves the previous checkpoint unchanged");
}

// The staging memory is too small on one rank, which would be a bug in the program. All ranks must
// return an error, and nothing may be written past the end of the memory.
static void test_short_staging(Test *t) {
    Saved s;
    Error err = {0};
    prepare(&s, t, 450);
    take_staging(&s.save);
    bool short_here = t->rank == t->ranks - 1;
    if (short_here) s.save.staging_bytes--;
    unsigned char *past_end = (unsigned char *)s.save.staging + s.save.staging_bytes;
    *past_end = 0xa5;
    check(t, same_error(!save_whole(&s.save, &err), &err, "this is a bug") && *past_end == 0xa5,
          "all ranks report too small staging memory");
    if (short_here) s.save.staging_bytes++;
    check(t, save_whole(&s.save, &err) && loads(t, MPI_COMM_WORLD, 450, 2),
          "staging memory of exactly the required size suffices");
    free(s.save.staging);
    MPI_Barrier(MPI_COMM_WORLD);
    prepare(&s, t, 400);
    check(t, save_whole(&s.save, &err), "save the previous iteration again");
}

// If an old checkpoint cannot be deleted, the save still succeeds, and the job reports a warning.
static void test_old_one_stays(Test *t) {
    Saved s;
    Error err = {0};
    char away[120];
    snprintf(away, sizeof away, "%s/.iter_0000400.del", t->save);
    prepare(&s, t, 460);
    s.save.keep.last = 1;
    CheckpointJob *job = checkpoint_begin(&s.save, &err);
    bool done = false, ok = job && checkpoint_advance(job, &done, &err);
    // Before deletion a checkpoint's folder is renamed. A file with the new name prevents this.
    FILE *file = t->rank == 0 ? fopen(away, "w") : NULL;
    if (file) fclose(file);
    while (ok && !done) ok = checkpoint_advance(job, &done, &err);
    const char *line = ok ? checkpoint_job_notes(job)->stays : "";
    check(t,
          ok && (t->rank == 0 ? strstr(line, "WARNING: old checkpoints could not be deleted: ") &&
                                    strstr(line, "iter_0000400") && !strchr(line, '\n')
                              : !*line),
          "an old checkpoint that cannot be deleted is reported");
    checkpoint_job_free(job);
    check(t, loads(t, MPI_COMM_WORLD, 460, 2) && save_folder_holds(t->save, 400), "both checkpoints exist");
    prepare(&s, t, 400);
    check(t, save_whole(&s.save, &err) && clean(t), "save the previous iteration once more");
}

static void test_damage(Test *t) {
    Error err = {0};
    char path[200];
    snprintf(path, sizeof path, "%s/iter_0000400/mp_rank_00/shard_%05d_of_%05d.safetensors", t->save,
             t->ranks - 1, t->ranks);
    if (t->rank == 0) {
        FILE *file = fopen(path, "rb+");
        if (file) {
            fseek(file, -1, SEEK_END);
            int last = fgetc(file);
            fseek(file, -1, SEEK_END);
            fputc(last ^ 1, file);
            fclose(file);
        }
    }
    MPI_Barrier(MPI_COMM_WORLD);
    Checkpoint *c = open_exactly(t->save, 400, MPI_COMM_WORLD, &err);
    check(t, same_error(!c, &err, path), "all ranks name the shard with a flipped bit");
    checkpoint_close(c);
    if (t->rank == 0 && truncate(path, 100) != 0) printf("cannot truncate %s\n", path);
    MPI_Barrier(MPI_COMM_WORLD);
    c = open_exactly(t->save, 400, MPI_COMM_WORLD, &err);
    check(t, same_error(!c, &err, path), "all ranks name the truncated shard");
    checkpoint_close(c);
    c = open_exactly(t->save, 700, MPI_COMM_WORLD, &err);
    check(t, same_error(!c, &err, "no checkpoint of iteration 700 (existing iterations: "),
          "all ranks report a missing checkpoint");
    checkpoint_close(c);
}

int main(int argc, char **argv) {
    Test t = {.folder = "/tmp/test_checkpoint_mpi_XXXXXX"};
    leaks_start_mpi(&argc, &argv);
    signal(SIGXFSZ, SIG_IGN);
    MPI_Comm_rank(MPI_COMM_WORLD, &t.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &t.ranks);
    bool made = t.rank != 0 || mkdtemp(t.folder);
    check(&t, made, "make a folder");
    MPI_Bcast(t.folder, (int)sizeof t.folder, MPI_CHAR, 0, MPI_COMM_WORLD);
    snprintf(t.save, sizeof t.save, "%s/save", t.folder);
    test_layouts(&t);
    test_nodes(&t);
    test_round_trip(&t);
    test_one_rank_fails(&t);
    test_bad_slices(&t);
    test_replace(&t);
    test_background(&t);
    test_background_fails(&t);
    test_short_staging(&t);
    test_old_one_stays(&t);
    test_damage(&t);
    MPI_Barrier(MPI_COMM_WORLD);
    if (t.rank == 0) {
        char command[128];
        snprintf(command, sizeof command, "rm -rf '%s'", t.folder);
        if (system(command) != 0) t.failures++;
    }
    t.failures += leaks_found();
    MPI_Finalize();
    return t.failures ? 1 : 0;
}
