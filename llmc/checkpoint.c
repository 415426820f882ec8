// Saving a checkpoint: see checkpoint.h. Called by train_gpt.cu. Three steps, each with its own function: collect (what goes into this rank's
// shard, in which order), write (the shard file, no communication), publish (rank 0: manifest, renames, tracker).
#include "llmc/checkpoint.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "llmc/durable.h"
#include "llmc/launch.h"
#include "llmc/manifest.h"
#include "llmc/safetensors.h"
#include "llmc/version.h"

enum { SPACE_MARGIN_BYTES = 1 << 20 };

// ---------------------------------------------------------------------------------------------------------------------
// Names

// Where a save writes and what it becomes. All under the save folder.
typedef struct Names {
    const char *directory;
    char *fresh, *final, *aside;  // folders: .iter_0000100.tmp, iter_0000100, .iter_0000100.old
    char *shard_folder;           // .iter_0000100.tmp/mp_rank_00
    char *shard_name, *shard;     // this rank's file, without and with the folder
    char *manifest;
    char *tracker, *tracker_fresh;
} Names;

// The folder of tensor rank 0, in Megatron's naming; --tensor-model-parallel-size above 1 is refused.
#define MODEL_FOLDER "mp_rank_00"

static Names make_names(const CheckpointSave *save, int rank, int ranks) {
    Names n = {.directory = save->directory};
    long long iteration = save->state.iteration;
    n.fresh = text_format("%s/.iter_%07lld.tmp", n.directory, iteration);
    n.final = text_format("%s/iter_%07lld", n.directory, iteration);
    n.aside = text_format("%s/.iter_%07lld.old", n.directory, iteration);
    n.shard_folder = text_format("%s/" MODEL_FOLDER, n.fresh);
    n.shard_name = text_format("shard_%05d_of_%05d.safetensors", rank, ranks);
    n.shard = text_format("%s/%s", n.shard_folder, n.shard_name);
    n.manifest = text_format("%s/" MANIFEST_NAME, n.fresh);
    n.tracker = text_format("%s/" CHECKPOINT_TRACKER, n.directory);
    n.tracker_fresh = text_format("%s/." CHECKPOINT_TRACKER ".tmp", n.directory);
    return n;
}

static void free_names(Names *n) {
    char *all[] = {n->fresh, n->final, n->aside, n->shard_folder, n->shard_name, n->shard, n->manifest, n->tracker, n->tracker_fresh};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Collect

// What this rank's shard will hold.
typedef struct ShardPlan {
    int count;            // slices that are not empty
    int *order;           // indices into save->slices, in the order of the file
    SafeTensor *tensors;  // the same, as the file names them
    uint64_t bytes;       // of data
    uint64_t largest;     // slice, bytes
} ShardPlan;

static bool check_slice(const CheckpointSave *save, const Slice *s, int *hint, Error *err) {
    int tries = 0;
    for (; tries < save->tensor_count && strcmp(save->tensors[*hint].name, s->tensor) != 0; tries++) *hint = (*hint + 1) % save->tensor_count;
    int64_t elements = tries < save->tensor_count ? checkpoint_tensor_elements(&save->tensors[*hint]) : 0;
    if (elements > 0 && (unsigned)s->kind < SLICE_KINDS && s->lo >= 0 && s->lo <= s->hi && s->hi <= elements) return true;
    return error_set(err, EXIT_CHECKPOINT,
                     "cannot save %" PRId64 "..%" PRId64 " of tensor '%.200s': there is no such tensor or range; this is a fault of the program",
                     s->lo, s->hi, s->tensor);
}

static void add_slice(ShardPlan *shard, const CheckpointSave *save, int i) {
    const Slice *s = &save->slices[i];
    SafeTensor *t = &shard->tensors[shard->count];
    uint64_t bytes = (uint64_t)(s->hi - s->lo) * (uint64_t)slice_kind_bytes(s->kind);
    t->name = slice_name(s->tensor, s->kind, s->lo);
    strcpy(t->dtype, slice_kind_dtype(s->kind));
    t->dims = 1;
    t->shape[0] = s->hi - s->lo;
    shard->order[shard->count++] = i;
    shard->bytes += bytes;
    if (bytes > shard->largest) shard->largest = bytes;
}

// Lists the slices, wide elements first.
static bool collect(ShardPlan *shard, const CheckpointSave *save, Error *err) {
    int hint = 0;
    memset(shard, 0, sizeof *shard);
    shard->order = (int *)xcalloc((size_t)save->slice_count + 1, sizeof *shard->order, "a checkpoint's slices");
    shard->tensors = (SafeTensor *)xcalloc((size_t)save->slice_count + 1, sizeof *shard->tensors, "a checkpoint's slices");
    for (int width = 4; width >= 2; width -= 2) {
        for (int i = 0; i < save->slice_count; i++) {
            if (!check_slice(save, &save->slices[i], &hint, err)) return false;
            if (save->slices[i].lo < save->slices[i].hi && slice_kind_bytes(save->slices[i].kind) == width) add_slice(shard, save, i);
        }
    }
    return true;
}

static void free_shard(ShardPlan *shard) {
    for (int i = 0; i < shard->count; i++) free(shard->tensors[i].name);
    free(shard->tensors);
    free(shard->order);
}

// ---------------------------------------------------------------------------------------------------------------------
// Prepare: rank 0 clears what a killed save left, checks the free space and makes the temporary folder

// True for ".iter_<digits><suffix>".
static bool is_leftover(const char *name, const char *suffix) {
    if (strncmp(name, ".iter_", 6) != 0) return false;
    const char *p = name + 6;
    while (isdigit((unsigned char)*p)) p++;
    return p > name + 6 && strcmp(p, suffix) == 0;
}

// ".iter_N.old" is the only copy of iteration N when the save that replaced it died between its two renames: it goes back to its place.
static bool settle_aside(const char *directory, const char *name, Error *err) {
    char *aside = text_format("%s/%s", directory, name);
    char *final = text_format("%s/%.*s", directory, (int)(strlen(name) - 1 - strlen(".old")), name + 1);
    bool ok = durable_exists(final) ? durable_remove_tree(aside, err) : rename(aside, final) == 0 || durable_error(err, "rename to", final);
    free(aside);
    free(final);
    return ok;
}

static bool clear_leftovers(const char *directory, Error *err) {
    DIR *folder = opendir(directory);
    if (!folder) return durable_error(err, "open folder", directory);
    bool ok = true;
    struct dirent *entry;
    while (ok && (entry = readdir(folder))) {
        if (is_leftover(entry->d_name, ".old")) {
            ok = settle_aside(directory, entry->d_name, err);
        } else if (is_leftover(entry->d_name, ".tmp")) {
            char *path = text_format("%s/%s", directory, entry->d_name);
            ok = durable_remove_tree(path, err);
            free(path);
        }
    }
    closedir(folder);
    return ok;
}

static bool check_space(const char *directory, uint64_t bytes, Error *err) {
    struct statvfs fs;
    // Some network file systems do not say; a full disk then shows when it is written to.
    if (statvfs(directory, &fs) != 0 || fs.f_blocks == 0) return true;
    uint64_t available = (uint64_t)fs.f_bavail * fs.f_frsize, needed = bytes + bytes / 1000 + SPACE_MARGIN_BYTES;
    if (needed <= available) return true;
    return error_set(err, EXIT_CHECKPOINT,
                     "a checkpoint of %.3f GB does not fit into %s, which has %.3f GB left; free some space or choose another folder with --save",
                     (double)needed / 1e9, directory, (double)available / 1e9);
}

static bool prepare(const Names *n, uint64_t bytes, Error *err) {
    return durable_make_folders(n->directory, err) && clear_leftovers(n->directory, err) && check_space(n->directory, bytes, err) &&
           durable_make_folders(n->shard_folder, err);
}

// ---------------------------------------------------------------------------------------------------------------------
// Write

static char *shard_metadata(const CheckpointSave *save, int rank, int ranks) {
    return text_format("{\"program\":\"sdp4bit.c %s %s\",\"iteration\":\"%" PRId64 "\",\"shard\":\"%d of %d\"}", version_number(), version_commit(),
                       save->state.iteration, rank, ranks);
}

// Writes this rank's shard. No communication, and nothing of the model is touched but through fetch.
static bool write_shard(const CheckpointSave *save, const ShardPlan *shard, const Names *n, const char *metadata, uint64_t *bytes, uint64_t *xxh3,
                        Error *err) {
    SafeWriter *writer = safe_writer_open(n->shard, shard->tensors, shard->count, metadata, err);
    if (!writer) return false;
    void *buffer = xmalloc((size_t)shard->largest, "a checkpoint's copy buffer");
    bool ok = true;
    for (int i = 0; ok && i < shard->count; i++) {
        const Slice *s = &save->slices[shard->order[i]];
        save->fetch(save->context, shard->order[i], buffer);
        ok = safe_writer_append(writer, buffer, (uint64_t)(s->hi - s->lo) * (uint64_t)slice_kind_bytes(s->kind), err);
    }
    free(buffer);
    if (ok) return safe_writer_close(writer, bytes, xxh3, err) && durable_sync_folder(n->shard_folder, err);
    safe_writer_discard(writer);
    return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// Publish

// Rank 0's result: all ranks' manifest entries, one after another with ",\n" between them (malloc'ed); NULL elsewhere.
static char *gather_entries(MPI_Comm comm, const char *entry, size_t entry_bytes, size_t *bytes) {
    int rank, ranks, mine = (int)entry_bytes;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    int *lengths = rank == 0 ? (int *)xcalloc((size_t)ranks, sizeof(int), "manifest entries") : NULL;
    int *starts = rank == 0 ? (int *)xcalloc((size_t)ranks, sizeof(int), "manifest entries") : NULL;
    char *all = NULL;
    *bytes = 0;
    MPI_Gather(&mine, 1, MPI_INT, lengths, 1, MPI_INT, 0, comm);
    for (int r = 0; rank == 0 && r < ranks; r++) {
        starts[r] = (int)*bytes;
        *bytes += (size_t)lengths[r] + (r + 1 < ranks ? 2 : 0);
    }
    if (rank == 0) all = (char *)xmalloc(*bytes + 1, "manifest entries");
    MPI_Gatherv(entry, mine, MPI_CHAR, all, lengths, starts, MPI_CHAR, 0, comm);
    for (int r = 0; rank == 0 && r + 1 < ranks; r++) memcpy(all + starts[r] + lengths[r], ",\n", 2);
    free(lengths);
    free(starts);
    return all;
}

// Reads the manifest as a load would: nothing is published that could not be loaded.
static bool check_manifest(const char *text, size_t bytes, const char *path, Error *err) {
    Manifest manifest;
    if (bytes > MANIFEST_MAX_BYTES)
        return error_set(err, EXIT_CHECKPOINT, "%s would take %zu bytes, more than can be read back; save with fewer ranks", path, bytes);
    if (!manifest_parse(&manifest, text, bytes, path, err)) return false;
    bool ok = manifest_check_complete(&manifest, path, err);
    manifest_free(&manifest);
    return ok;
}

// Puts back the tracker as it was (before: its text, NULL when there was none).
static void restore_tracker(const Names *n, const char *before, uint64_t bytes) {
    Error ignored;  // the caller already has an error to report
    if (!before) {
        unlink(n->tracker);
    } else if (durable_write_file(n->tracker_fresh, before, bytes, &ignored) && rename(n->tracker_fresh, n->tracker) != 0) {
        unlink(n->tracker_fresh);
    }
}

// The renames. Everything they need is on the disk already. The folder's name is made durable before the tracker names it.
static bool switch_over(const Names *n, Replacement *folder, Error *err) {
    uint64_t bytes = 0;
    char *before = NULL;
    if (durable_exists(n->tracker) && !(before = durable_read_file(n->tracker, CHECKPOINT_TRACKER_MAX_BYTES, &bytes, err))) return false;
    bool ok = durable_replace(folder, err);
    if (ok) {
        ok = durable_sync_folder(n->directory, err);
        bool tracked = ok && rename(n->tracker_fresh, n->tracker) == 0;
        if (ok && !tracked) durable_error(err, "rename to", n->tracker);
        ok = tracked && durable_sync_folder(n->directory, err);
        if (tracked && !ok) restore_tracker(n, before, bytes);
        if (!ok) durable_replace_undo(folder);
    }
    free(before);
    return ok;
}

// Rank 0, after all shards are on the disk: manifest, renames, tracker. Replaces an older checkpoint of the same iteration.
static bool publish(const CheckpointSave *save, const Names *n, const char *manifest, size_t bytes, Error *err) {
    char number[32];
    Replacement folder = {.fresh = n->fresh, .final = n->final, .aside = n->aside};
    int digits = snprintf(number, sizeof number, "%" PRId64, save->state.iteration);
    bool ok = durable_write_file(n->manifest, manifest, bytes, err) && durable_sync_folder(n->fresh, err) &&
              durable_write_file(n->tracker_fresh, number, (uint64_t)digits, err) && switch_over(n, &folder, err);
    if (!ok) unlink(n->tracker_fresh);
    Error ignored;  // an old copy that stays is removed by the next save
    if (ok && folder.replaced) durable_remove_tree(folder.exchanged ? n->fresh : n->aside, &ignored);
    return ok;
}

// Collective: gathers the shards' entries; rank 0 makes and checks the manifest and publishes.
static bool gather_and_publish(const CheckpointSave *save, const ShardPlan *shard, const Names *n, uint64_t file_bytes, uint64_t xxh3, Error *err) {
    int rank, ranks;
    MPI_Comm_rank(save->comm, &rank);
    MPI_Comm_size(save->comm, &ranks);
    size_t entry_bytes, all_bytes, bytes;
    char *entry = manifest_file_entry(save, MODEL_FOLDER, n->shard_name, shard->order, shard->count, file_bytes, xxh3, &entry_bytes);
    bool ok = entry_bytes <= (size_t)MANIFEST_MAX_BYTES / (size_t)ranks;  // keeps the gathered lengths within an int
    if (!ok) error_set(err, EXIT_CHECKPOINT, "a rank's list of slices takes %zu bytes, too many for a manifest; use larger buckets", entry_bytes);
    ok = launch_agree(save->comm, ok, err, NULL);
    if (ok) {
        char *all = gather_entries(save->comm, entry, entry_bytes, &all_bytes);
        if (rank == 0) {
            char *text = manifest_text(save, ranks, all, all_bytes, &bytes);
            ok = check_manifest(text, bytes, n->manifest, err) && publish(save, n, text, bytes, err);
            free(text);
            free(all);
        }
        ok = launch_agree(save->comm, ok, err, NULL);
    }
    free(entry);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------

static bool save_collected(const CheckpointSave *save, const ShardPlan *shard, const Names *n, Error *err) {
    int rank, ranks;
    uint64_t total = 0, bytes = 0, xxh3 = 0;
    MPI_Comm_rank(save->comm, &rank);
    MPI_Comm_size(save->comm, &ranks);
    MPI_Reduce(&shard->bytes, &total, 1, MPI_UINT64_T, MPI_SUM, 0, save->comm);
    bool ok = launch_agree(save->comm, rank != 0 || prepare(n, total, err), err, NULL);
    if (ok) {
        char *metadata = shard_metadata(save, rank, ranks);
        ok = launch_agree(save->comm, write_shard(save, shard, n, metadata, &bytes, &xxh3, err), err, NULL);
        free(metadata);
    }
    ok = ok && gather_and_publish(save, shard, n, bytes, xxh3, err);
    Error ignored;  // there is an error to report already
    if (!ok && rank == 0) durable_remove_tree(n->fresh, &ignored);
    return ok;
}

bool checkpoint_save(const CheckpointSave *save, Error *err) {
    int rank, ranks;
    Error own;
    ShardPlan shard;
    if (!err) err = &own;
    MPI_Comm_rank(save->comm, &rank);
    MPI_Comm_size(save->comm, &ranks);
    Names names = make_names(save, rank, ranks);
    bool ok = launch_agree(save->comm, collect(&shard, save, err), err, NULL);
    ok = ok && save_collected(save, &shard, &names, err);
    free_shard(&shard);
    free_names(&names);
    return ok;
}
