// Loads checkpoints. See checkpoint.h. Called by llmc/run/resume.c.
//
// The manifest gives the location of every slice. Shards are opened on first use. Once
// OPEN_SHARDS shards are open, all are closed before another one is opened.
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/durable.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/checkpoint/manifest.h"

enum { TRACKER_MAX_DIGITS = 15, OPEN_SHARDS = 256 };

// Cache of open shard descriptors. It does not change the observable state of a Checkpoint, so
// reading takes a const pointer.
typedef struct ShardCache {
    int *fd;    // descriptor per file of the manifest; -1: closed
    int count;  // open files
} ShardCache;

struct Checkpoint {
    char *folder;
    Manifest manifest;
    ShardCache *cache;
};

// --- Tracker -------------------------------------------------------------------------------------

static int64_t parse_tracker(char *text, uint64_t bytes, const char *path, Error *err) {
    char *end = text + strlen(text);
    bool whole = end == text + bytes;  // no NUL inside
    while (end > text && strchr(" \t\r\n", end[-1])) *--end = 0;
    if (whole && strcmp(text, "release") == 0) return 0;
    size_t length = strlen(text);
    if (whole && length > 0 && length <= TRACKER_MAX_DIGITS && strspn(text, "0123456789") == length)
        return strtoll(text, NULL, 10);
    ckpt_error(err,
               "%s holds '%.40s', which is not an iteration; write the number of an iter_ folder into it",
               path, text);
    return CHECKPOINT_UNREADABLE;
}

// Returns the folder of an iteration. Its name may end in ".old" if the save that was replacing it
// was killed (durable_replace), or be "release" as in Megatron-LM.
static char *find_folder(const char *directory, int64_t iteration) {
    char *candidates[] = {text_format("%s/iter_%07" PRId64, directory, iteration),
                          text_format("%s/.iter_%07" PRId64 ".old", directory, iteration),
                          text_format("%s/release", directory)};
    int count = iteration == 0 ? 3 : 2, found = 0;
    for (int i = count - 1; i >= 0; i--) {
        if (durable_exists(candidates[i])) found = i;
    }
    char *folder = xstrdup(candidates[found]);
    for (int i = 0; i < 3; i++) free(candidates[i]);
    return folder;
}

// Reads the iteration from the tracker. Returns NO_CHECKPOINT if there is no tracker, and
// CHECKPOINT_UNREADABLE with an error otherwise. *damaged distinguishes invalid contents from I/O
// errors.
static int64_t read_tracker(const char *directory, bool *damaged, Error *err) {
    char *path = text_format("%s/" CHECKPOINT_TRACKER, directory), *text = NULL;
    uint64_t bytes;
    int64_t iteration = NO_CHECKPOINT;
    *damaged = false;
    // Only a missing tracker means that there is no checkpoint. If the tracker cannot be read, the
    // run must not start from scratch.
    struct stat status;
    if (stat(path, &status) == 0 || (errno != ENOENT && errno != ENOTDIR)) {
        bool plain = durable_plain_file(path, CHECKPOINT_TRACKER_MAX_BYTES);
        text = durable_read_file(path, CHECKPOINT_TRACKER_MAX_BYTES, &bytes, err);
        iteration = text ? parse_tracker(text, bytes, path, err) : CHECKPOINT_UNREADABLE;
        *damaged = iteration == CHECKPOINT_UNREADABLE && (text || !plain);
    }
    free(text);
    free(path);
    return iteration;
}

static bool folder_exists(const char *directory, int64_t iteration) {
    char *folder = find_folder(directory, iteration);
    bool there = durable_exists(folder);
    free(folder);
    return there;
}

// Formats the iterations in the folder that have a checkpoint of any run: "4, 8 and 12".
static const char *existing(const char *directory, char text[200]) {
    const Lineage no_run = {NULL, 0, false, ""};
    lineage_others(directory, &no_run, text, 200);
    return text;
}

// Returns the newest checkpoint of the run in the folder, intact or not. NO_CHECKPOINT: the folder
// holds no checkpoint of any run. CHECKPOINT_UNREADABLE with an error: it only holds checkpoints of
// other runs.
static int64_t newest_of_run(const char *directory, Error *err) {
    Lineage lineage;
    int others;
    if (!lineage_read(directory, &lineage, err)) return CHECKPOINT_UNREADABLE;
    int64_t newest = NO_CHECKPOINT;
    for (int i = lineage.count - 1; i >= 0 && newest < 0; i--) {
        if (folder_exists(directory, lineage.iterations[i])) newest = lineage.iterations[i];
    }
    lineage_free(&lineage);
    if (newest >= 0) return newest;
    free(save_folder_list(directory, &others));
    if (others == 0) return NO_CHECKPOINT;
    ckpt_error(err,
               "%s has checkpoints, but none of those listed in " LINEAGE_NAME
               "; write the iteration to resume from into " CHECKPOINT_TRACKER,
               directory);
    return CHECKPOINT_UNREADABLE;
}

// Checks that a folder without checkpoints can be a save folder: it must be a folder and not a
// checkpoint itself. A missing folder is fine; the first save creates it.
static bool may_hold_a_run(const char *directory, Error *err) {
    struct stat status;
    if (stat(directory, &status) == 0 && !S_ISDIR(status.st_mode)) {
        return ckpt_error(err, "--load %s is not a folder; use one that a run saved into", directory);
    }
    char *manifest = text_format("%s/" MANIFEST_NAME, directory);
    bool one = durable_exists(manifest);
    free(manifest);
    if (!one) return foreign_refuse(directory, true, err);
    return ckpt_error(err,
                      "--load %s is a single checkpoint; use its parent folder, whose " CHECKPOINT_TRACKER
                      " names the checkpoint to load",
                      directory);
}

// Checks that the folder of a tracked iteration is missing or belongs to this program.
static bool may_be_ours(const char *directory, int64_t iteration, Error *err) {
    char *folder = find_folder(directory, iteration), *manifest = text_format("%s/" MANIFEST_NAME, folder);
    bool ok = durable_exists(manifest) || foreign_refuse(folder, false, err);
    free(folder);
    free(manifest);
    return ok;
}

int64_t checkpoint_find(const char *directory, char *note, size_t note_bytes, Error *err) {
    assert(note_bytes > 0);
    bool damaged;
    Error lost;
    char there[200];
    int64_t newest;
    *note = 0;
    int64_t tracked = read_tracker(directory, &damaged, &lost);
    switch (tracked) {
        case NO_CHECKPOINT:
            newest = newest_of_run(directory, err);
            if (newest == NO_CHECKPOINT && !may_hold_a_run(directory, err)) return CHECKPOINT_UNREADABLE;
            if (newest < 0) return newest;
            ckpt_error(&lost, "%s/" CHECKPOINT_TRACKER " is missing although there are checkpoints;",
                       directory);
            break;
        case CHECKPOINT_UNREADABLE:
            // After an I/O error the tracker itself may be sound, so a later attempt may succeed.
            newest = damaged ? newest_of_run(directory, NULL) : NO_CHECKPOINT;
            if (newest >= 0) break;
            if (err) *err = lost;
            return CHECKPOINT_UNREADABLE;
        default:
            // If that checkpoint is missing, the tracker was truncated, or the checkpoint deleted.
            newest = folder_exists(directory, tracked) ? NO_CHECKPOINT : newest_of_run(directory, NULL);
            if (newest < 0) return may_be_ours(directory, tracked, err) ? tracked : CHECKPOINT_UNREADABLE;
            ckpt_error(&lost,
                       "%s/" CHECKPOINT_TRACKER " names iteration %" PRId64
                       ", which has no checkpoint (existing iterations: %s);",
                       directory, tracked, existing(directory, there));
    }
    snprintf(note, note_bytes, "WARNING: %.*s; resuming from the newest sound checkpoint in the folder",
             (int)strcspn(lost.what, ";"), lost.what);
    return newest;
}

bool checkpoint_track(const char *folder, int64_t iteration, Error *err) {
    bool damaged;
    if (read_tracker(folder, &damaged, NULL) == iteration || !folder_exists(folder, iteration)) return true;
    char *path = text_format("%s/" CHECKPOINT_TRACKER, folder), number[32];
    char *fresh = text_format("%s/." CHECKPOINT_TRACKER ".tmp", folder);
    int digits = snprintf(number, sizeof number, "%" PRId64, iteration);
    bool ok = durable_write_file(fresh, number, (uint64_t)digits, err) &&
              (rename(fresh, path) == 0 || durable_error(err, "rename to", path)) &&
              durable_sync_folder(folder, err);
    free(path);
    free(fresh);
    return ok;
}

bool checkpoint_claim(const char *folder, int64_t iteration) {
    Error ignored = {0};
    char *found = find_folder(folder, iteration), *path = text_format("%s/continued", found);
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    bool first = file >= 0 && durable_sync_folder(found, &ignored);
    if (file >= 0) close(file);
    free(path);
    free(found);
    return first;
}

// --- Opening -------------------------------------------------------------------------------------

// Rank 0 reads the file and broadcasts its text (malloc'ed). Returns NULL on all ranks on failure.
static char *share_file(const char *path, uint64_t *bytes, Peers peers, Error *err) {
    int rank = peers_rank(peers);
    char *text = NULL;
    *bytes = 0;
    if (rank == 0) text = durable_read_file(path, MANIFEST_MAX_BYTES, bytes, err);
    if (!peers_agree(peers, rank != 0 || text, err, NULL)) return NULL;
    peers_broadcast(peers, bytes, sizeof *bytes, 0);
    if (rank != 0) text = xmalloc((size_t)*bytes + 1, "a checkpoint's manifest");
    peers_broadcast(peers, text, (size_t)*bytes, 0);
    return text;
}

static char *file_path(const Checkpoint *c, int file) {
    const ManifestFile *f = &c->manifest.files[file];
    return text_format("%s/%s/%s", c->folder, f->folder, f->name);
}

static bool keep_hashing(void *work) { return peers_work_continues((PeersWork *)work); }

static bool check_file(const Checkpoint *c, int file, PeersWork *work, Error *err) {
    const ManifestFile *f = &c->manifest.files[file];
    char *path = file_path(c, file);
    struct stat status;
    uint64_t xxh3 = f->xxh3;
    bool ok = stat(path, &status) == 0 || durable_error(err, "find", path);
    if (ok && (!S_ISREG(status.st_mode) || (uint64_t)status.st_size != f->bytes)) {
        ok = ckpt_error(err,
                        "%s is damaged: it has %lld bytes instead of %" PRIu64
                        "; restore it from a copy or load another checkpoint",
                        path, (long long)status.st_size, f->bytes);
    }
    ok = ok && durable_hash_file(path, &xxh3, keep_hashing, work, err);
    if (ok && xxh3 != f->xxh3) {
        ok = ckpt_error(err,
                        "%s is damaged: its xxh3 is %016" PRIx64 " instead of %016" PRIx64
                        "; restore it from a copy or load another checkpoint",
                        path, xxh3, f->xxh3);
    }
    free(path);
    return ok;
}

// Divides the files among the ranks: rank r checks files r, r + ranks, ...
static bool check_files(const Checkpoint *c, Peers peers, Error *err) {
    int rank = peers_rank(peers), ranks = peers_size(peers);
    bool ok = true;
    PeersWork work = peers_work(peers);
    for (int file = rank; ok && file < c->manifest.file_count; file += ranks)
        ok = check_file(c, file, &work, err) && peers_work_continues(&work);
    return peers_work_agree(&work, ok, err);
}

// Checks that the manifest belongs to the requested iteration, to detect renamed folders.
// Megatron-LM's "release" may hold any iteration.
static bool check_iteration(const Checkpoint *c, int64_t iteration, const char *path, Error *err) {
    if (c->manifest.state.iteration == iteration || iteration == 0) return true;
    return ckpt_error(err,
                      "%s belongs to iteration %" PRId64 ", but its folder is named for %" PRId64
                      "; restore the folder's name",
                      path, c->manifest.state.iteration, iteration);
}

static bool read_manifest(Checkpoint *c, int64_t iteration, Peers peers, Error *err) {
    uint64_t bytes;
    char *path = text_format("%s/" MANIFEST_NAME, c->folder);
    char *text = share_file(path, &bytes, peers, err);
    // All ranks parse the same text and get the same result.
    bool ok = text && manifest_parse(&c->manifest, text, (size_t)bytes, path, err) &&
              check_iteration(c, iteration, path, err);
    free(text);
    free(path);
    return ok;
}

static void close_shards(const Checkpoint *c) {
    for (int i = 0; c->cache->fd && i < c->manifest.file_count; i++) {
        if (c->cache->fd[i] >= 0) close(c->cache->fd[i]);
        c->cache->fd[i] = -1;
    }
    c->cache->count = 0;
}

// Reports why the folder has no checkpoint of this iteration. Returns false.
static bool no_such_checkpoint(const char *directory, int64_t iteration, const char *step_flag, Error *err) {
    char list[200];
    if (!*existing(directory, list))
        return may_hold_a_run(directory, err) &&
               ckpt_error(err, "%s holds no checkpoint; use a folder that a run saved into", directory);
    return ckpt_error(err,
                      "%s has no checkpoint of iteration %" PRId64
                      " (existing iterations: %s); choose another iteration with %s, or another folder",
                      directory, iteration, list, step_flag);
}

static Checkpoint *open_exact(const char *directory, int64_t iteration, const char *step_flag, Peers peers,
                              Error *err) {
    Checkpoint *c = xcalloc(1, sizeof *c, "a checkpoint");
    c->folder = find_folder(directory, iteration);
    c->cache = xcalloc(1, sizeof *c->cache, "a checkpoint's open files");
    bool ok = peers_rank(peers) != 0 ||
              (durable_exists(c->folder) ? may_be_ours(directory, iteration, err)
                                         : no_such_checkpoint(directory, iteration, step_flag, err));
    if (peers_agree(peers, ok, err, NULL) && read_manifest(c, iteration, peers, err) &&
        check_files(c, peers, err)) {
        size_t bytes = ((size_t)c->manifest.file_count + 1) * sizeof(int);
        c->cache->fd = xmalloc(bytes, "a checkpoint's open files");
        memset(c->cache->fd, -1, bytes);
        return c;
    }
    checkpoint_close(c);
    return NULL;
}

// Result of rank 0's search, broadcast to all ranks.
typedef struct Earlier {
    int64_t iteration;  // NO_CHECKPOINT: none
    char damage[200];   // problem with the lineage file
} Earlier;

// Finds the checkpoint before `iteration` in the lineage of `requested`. If the lineage does not
// contain `requested`, its ancestors are unknown.
static Earlier find_earlier(const char *directory, int64_t requested, int64_t iteration) {
    Lineage lineage;
    Earlier earlier = {NO_CHECKPOINT, ""};
    if (!lineage_read(directory, &lineage, NULL)) return earlier;
    memcpy(earlier.damage, lineage.damage, sizeof earlier.damage);
    bool known = !lineage.listed || lineage_holds(&lineage, requested) ||
                 !folder_exists(directory, requested);
    if (known) earlier.iteration = lineage_before(&lineage, iteration);
    lineage_free(&lineage);
    return earlier;
}

// Opens the checkpoint of *iteration or the newest intact one before it, and sets *iteration to its
// iteration. *fault: why the requested one is unusable. damage: as in Earlier.
static Checkpoint *open_intact(const char *directory, int64_t *iteration, const char *step_flag, Peers peers,
                               char damage[200], Error *fault) {
    int rank = peers_rank(peers);
    Earlier earlier = {*iteration, ""};
    Checkpoint *c = open_exact(directory, *iteration, step_flag, peers, fault);
    while (!c) {
        if (rank == 0) earlier = find_earlier(directory, *iteration, earlier.iteration);
        peers_broadcast(peers, &earlier, sizeof earlier, 0);
        if (earlier.iteration < 0) return NULL;
        c = open_exact(directory, earlier.iteration, step_flag, peers, NULL);
    }
    *iteration = earlier.iteration;
    memcpy(damage, earlier.damage, sizeof earlier.damage);
    return c;
}

Checkpoint *checkpoint_open_or_fall_back(const char *directory, int64_t *iteration, Peers peers, char *note,
                                         size_t note_bytes, Error *err) {
    assert(*iteration >= 0 && note_bytes > 0);
    const int64_t requested = *iteration;
    char damage[200];
    Error fault;
    *note = 0;
    Checkpoint *c = open_intact(directory, iteration, "--ckpt-step", peers, damage, &fault);
    if (!c && err) *err = fault;
    if (!c || *iteration == requested) return c;
    int used = snprintf(note, note_bytes,
                        "WARNING: the checkpoint of iteration %" PRId64
                        " cannot be used: %.*s; resuming from iteration %" PRId64 " instead",
                        requested, (int)strcspn(fault.what, ";"), fault.what, *iteration);
    if (*damage && (size_t)used < note_bytes) {
        snprintf(note + used, note_bytes - (size_t)used,
                 "\nWARNING: " LINEAGE_NAME
                 " is damaged: %s; the previous checkpoint was found by folder name",
                 damage);
    }
    return c;
}

Checkpoint *checkpoint_open(const char *directory, int64_t *iteration, const char *step_flag, Peers peers,
                            char *note, size_t note_bytes, Error *err) {
    char damage[200];
    Error fault;
    *note = 0;
    if (*iteration < 0) *iteration = checkpoint_find(directory, note, note_bytes, err);
    if (*iteration == CHECKPOINT_UNREADABLE) return NULL;
    int64_t intact = *iteration;
    Checkpoint *c = open_intact(directory, &intact, step_flag, peers, damage, &fault);
    if (!c && err) *err = fault;
    if (!c || intact == *iteration) return c;
    checkpoint_close(c);
    ckpt_error(err, "%.*s; pass %s %" PRId64 " to load the previous checkpoint",
               (int)strcspn(fault.what, ";"), fault.what, step_flag, intact);
    return NULL;
}

void checkpoint_close(Checkpoint *c) {
    if (!c) return;
    close_shards(c);
    free(c->cache->fd);
    free(c->cache);
    manifest_free(&c->manifest);
    free(c->folder);
    free(c);
}

// --- Reading -------------------------------------------------------------------------------------

const RunState *checkpoint_state(const Checkpoint *c) { return &c->manifest.state; }
const RunState *checkpoint_node_state(const Checkpoint *c, int node) {
    assert(node >= 0);
    return node < c->manifest.node_state_count ? &c->manifest.node_states[node] : &c->manifest.state;
}
const Fp8State *checkpoint_fp8(const Checkpoint *c) { return &c->manifest.fp8; }
const char *checkpoint_arguments(const Checkpoint *c) { return c->manifest.arguments; }
const BaseModel *checkpoint_base(const Checkpoint *c) { return &c->manifest.base; }
BaseModel checkpoint_as_base(const Checkpoint *c, const char *directory) {
    return (BaseModel){directory, c->manifest.state.iteration, manifest_content(&c->manifest)};
}

int checkpoint_nodes(const Checkpoint *c, SliceKind kind) { return c->manifest.nodes[kind]; }

// The first parameter is the word embedding. Its row count may differ because of padding only.
static const char *padding_hint(const Manifest *m, const Tensor *tensors, int count, int i) {
    bool both = i == 0 && count > 0 && m->tensor_count > 0;
    if (!both || strcmp(m->tensors[0].name, tensors[0].name) != 0 ||
        m->tensors[0].whole[1] != tensors[0].whole[1])
        return "";
    return " (a vocabulary is padded to a multiple of --make-vocab-size-divisible-by x "
           "--tensor-model-parallel-size: keep that product)";
}

// Formats parameter i like "'wte' (64, 32)", or "nothing" if i is past the end of the table.
static void describe(char *text, size_t bytes, const Tensor *tensors, int count, int i) {
    if (i >= count) {
        snprintf(text, bytes, "nothing");
        return;
    }
    const Tensor *t = &tensors[i];
    int used = snprintf(text, bytes, "'%.200s' (", t->name);
    for (int d = 0; d < t->dims; d++)
        used += snprintf(text + used, bytes - (size_t)used, "%s%" PRId64, d ? ", " : "", t->whole[d]);
    snprintf(text + used, bytes - (size_t)used, ")");
}

bool checkpoint_check_tensors(const Checkpoint *c, const Tensor *tensors, int count, Error *err) {
    const Manifest *m = &c->manifest;
    int longer = count > m->tensor_count ? count : m->tensor_count;
    for (int i = 0; i < longer; i++) {
        bool equal = i < count && i < m->tensor_count && strcmp(m->tensors[i].name, tensors[i].name) == 0 &&
                     m->tensors[i].dims == tensors[i].dims;
        for (int d = 0; equal && d < tensors[i].dims; d++)
            equal = m->tensors[i].whole[d] == tensors[i].whole[d];
        if (equal) continue;
        char saved[320], ours[320];
        describe(saved, sizeof saved, m->tensors, m->tensor_count, i);
        describe(ours, sizeof ours, tensors, count, i);
        return ckpt_error(err,
                          "%s belongs to another model: its parameter %d is %s, but this model's is %s; use "
                          "the flags of the run that saved it, or another --load%s",
                          c->folder, i, saved, ours, padding_hint(m, tensors, count, i));
    }
    return true;
}

// Checks that the header length of a shard agrees with the manifest, so that data offsets are
// right.
static bool check_header(int fd, const ManifestFile *f, const char *path, Error *err) {
    uint64_t length;
    if (!pread_all(fd, &length, sizeof length, 0)) return durable_error(err, "read", path);
    if (length == f->bytes - f->data_bytes - sizeof length) return true;
    return ckpt_error(err,
                      "%s is damaged: its header does not match the manifest; restore it from a copy or load "
                      "another checkpoint",
                      path);
}

// Returns the descriptor of a shard, or -1 on errors.
static int open_shard(const Checkpoint *c, int file, const char *path, Error *err) {
    ShardCache *cache = c->cache;
    if (cache->fd[file] >= 0) return cache->fd[file];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) durable_error(err, "open", path);
    if (fd < 0 || !check_header(fd, &c->manifest.files[file], path, err)) {
        if (fd >= 0) close(fd);
        return -1;
    }
    if (cache->count == OPEN_SHARDS) close_shards(c);
    cache->count++;
    return cache->fd[file] = fd;
}

static bool check_range(const Checkpoint *c, int tensor, const Slice *s, Error *err) {
    if (tensor < 0)
        return ckpt_error(
            err, "%s has no tensor '%.200s'; use the flags of the run that saved it or another --load",
            c->folder, s->tensor);
    const Tensor *t = &c->manifest.tensors[tensor];
    Columns block = slice_block(t, s->columns);
    if (!slice_fits(t, block, s->lo, s->hi)) {
        return ckpt_error(err,
                          "%s: elements %" PRId64 "..%" PRId64 " of %" PRId64 " columns from %" PRId64
                          " were requested of tensor '%.200s', which has %" PRId64 " x %" PRId64
                          "; this is a bug, please report it",
                          c->folder, s->lo, s->hi, block.count, block.first, s->tensor, t->whole[0],
                          t->whole[1]);
    }
    if (slice_kind_of_weights(s->kind) &&
        strcmp(c->manifest.weight_dtype, slice_kind_dtype(SLICE_WEIGHT)) != 0) {
        return ckpt_error(err,
                          "%s holds %s weights, but this program uses %s; load it with a program built for "
                          "the same precision",
                          c->folder, c->manifest.weight_dtype, slice_kind_dtype(SLICE_WEIGHT));
    }
    return true;
}

// A range of elements that is contiguous both in a saved slice and in the requested one.
typedef struct Run {
    const ManifestSlice *from;  // NULL: no shard holds the first element
    int64_t at, count;          // range in the block of `from`
} Run;

// Returns the run that starts at element `at` of the requested block. If the saved block
// has other columns, the run ends at the end of the row at the latest.
static Run run_at(const Manifest *m, int tensor, const Slice *s, Columns block, int64_t at) {
    int64_t row = at / block.count, column = block.first + at % block.count;
    int node = slice_kind_per_node(s->kind) ? s->node : 0;
    int i = manifest_first_slice(m, tensor, s->kind, node, row, column);
    if (i >= m->slice_count) return (Run){NULL, 0, 0};
    const ManifestSlice *from = &m->slices[m->order[i]];
    Run run = {from, row * from->block.count + column - from->block.first, s->hi - at};
    bool here = from->tensor == tensor && from->kind == s->kind && from->node == node &&
                from->block.first <= column && from->lo <= run.at;
    if (!here) return (Run){NULL, 0, 0};
    if (run.count > from->hi - run.at) run.count = from->hi - run.at;
    if (from->block.first == block.first && from->block.count == block.count) return run;
    int64_t ours = block.first + block.count - column,
            theirs = from->block.first + from->block.count - column;
    if (run.count > ours) run.count = ours;
    if (run.count > theirs) run.count = theirs;
    return run;
}

static bool read_run(const Checkpoint *c, const Run *run, void *host, Error *err) {
    const ManifestSlice *from = run->from;
    const ManifestFile *f = &c->manifest.files[from->file];
    uint64_t width = (uint64_t)slice_kind_bytes(from->kind);
    uint64_t at = f->bytes - f->data_bytes + from->begin + (uint64_t)(run->at - from->lo) * width;
    char *path = file_path(c, from->file);
    int fd = open_shard(c, from->file, path, err);
    bool ok = fd >= 0 &&
              (pread_all(fd, host, (uint64_t)run->count * width, at) || durable_error(err, "read", path));
    free(path);
    return ok;
}

bool checkpoint_read(const Checkpoint *c, const Slice *s, void *host, Error *err) {
    assert(s->tensor && (unsigned)s->kind < SLICE_KINDS);
    const Manifest *m = &c->manifest;
    int tensor = manifest_find_tensor(m, s->tensor);
    if (!check_range(c, tensor, s, err)) return false;
    Columns block = slice_block(&m->tensors[tensor], s->columns);
    Run run;
    for (int64_t at = s->lo; at < s->hi; at += run.count) {
        run = run_at(m, tensor, s, block, at);
        if (!run.from) {
            char of[32] = "";
            if (slice_kind_per_node(s->kind)) snprintf(of, sizeof of, " of node %d", s->node);
            return ckpt_error(err,
                              "%s: %s of tensor '%.200s'%s lacks element %" PRId64 " of %" PRId64 "..%" PRId64
                              "; load another checkpoint",
                              c->folder, slice_kind_name(s->kind), s->tensor, of, at, s->lo, s->hi);
        }
        if (!read_run(c, &run, (char *)host + (at - s->lo) * slice_kind_bytes(s->kind), err)) return false;
    }
    return true;
}
