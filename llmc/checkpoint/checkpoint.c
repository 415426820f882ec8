// Saves checkpoints. See checkpoint.h. Called by saver.c.
//
// This rank first collects the contents of its shard. Three phases follow that access files but do
// not call MPI, so that they can run on a thread while training continues: prepare (rank 0: the
// folder), write (all ranks: the shards) and publish (rank 0: manifest, renames, lineage, tracker,
// deletion of old checkpoints). Between the phases, on the caller's thread, the ranks agree on
// success and rank 0 gathers the manifest entries.
#include "llmc/checkpoint/checkpoint.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/durable.h"
#include "llmc/ranks/heartbeat.h"
#include "llmc/checkpoint/manifest.h"
#include "llmc/checkpoint/safetensors.h"

// --- Names ---------------------------------------------------------------------------------------

// A small file that a save replaces, and restores if the save fails later.
typedef struct SmallFile {
    char *path, *fresh;
    char *before;  // previous text; NULL: none, or not restorable
    uint64_t before_bytes;
    bool switched;
} SmallFile;

// File and folder names of a save, all inside the save folder.
typedef struct Names {
    const char *directory;
    char *fresh, *final, *aside;  // folders: .iter_0000100.tmp, iter_0000100, .iter_0000100.old
    char *model, *shard_folder;   // mp_rank_00, .iter_0000100.tmp/mp_rank_00
    char *shard_name, *shard;     // this rank's file name, and its path
    char *manifest;
    SmallFile lineage, tracker;
} Names;

static Names make_names(const CheckpointSave *save, int rank, int ranks) {
    Names n = {.directory = save->directory};
    long long iteration = save->state.iteration;
    n.fresh = text_format("%s/.iter_%07lld.tmp", n.directory, iteration);
    n.final = text_format("%s/iter_%07lld", n.directory, iteration);
    n.aside = text_format("%s/.iter_%07lld.old", n.directory, iteration);
    n.model = save->pipeline_ranks <= 1  // named as in Megatron-LM
                  ? text_format("mp_rank_%02d", save->tensor_rank)
                  : text_format("mp_rank_%02d_%03d", save->tensor_rank, save->pipeline_rank);
    n.shard_folder = text_format("%s/%s", n.fresh, n.model);
    n.shard_name = text_format("shard_%05d_of_%05d.safetensors", rank, ranks);
    n.shard = text_format("%s/%s", n.shard_folder, n.shard_name);
    n.manifest = text_format("%s/" MANIFEST_NAME, n.fresh);
    n.lineage.path = text_format("%s/" LINEAGE_NAME, n.directory);
    n.lineage.fresh = text_format("%s/." LINEAGE_NAME ".tmp", n.directory);
    n.tracker.path = text_format("%s/" CHECKPOINT_TRACKER, n.directory);
    n.tracker.fresh = text_format("%s/." CHECKPOINT_TRACKER ".tmp", n.directory);
    return n;
}

static void free_names(Names *n) {
    char *all[] = {n->fresh,          n->final,        n->aside,         n->model,         n->shard_folder,
                   n->shard_name,     n->shard,        n->manifest,      n->lineage.path,  n->lineage.fresh,
                   n->lineage.before, n->tracker.path, n->tracker.fresh, n->tracker.before};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

// --- Collect -------------------------------------------------------------------------------------

// Contents of this rank's shard.
typedef struct ShardPlan {
    int count;              // nonempty slices
    int *order;             // indices into save->slices, in file order
    ManifestSlice *slices;  // manifest entries of the slices
    SafeTensor *tensors;    // safetensors entries of the slices
    uint64_t bytes;         // size of the data
    uint64_t largest;       // size of the largest slice, bytes
} ShardPlan;

static uint64_t slice_bytes(const Slice *s) {
    return (uint64_t)(s->hi - s->lo) * (uint64_t)slice_kind_bytes(s->kind);
}

// *tensor: index where the search of the table starts; set to the index of the slice's tensor.
static bool check_slice(const CheckpointSave *save, const Slice *s, int *tensor, Error *err) {
    int tries = 0;
    for (; tries < save->tensor_count && strcmp(save->tensors[*tensor].name, s->tensor) != 0; tries++)
        *tensor = (*tensor + 1) % save->tensor_count;
    const Tensor *t = &save->tensors[*tensor];
    bool known = tries < save->tensor_count && (unsigned)s->kind < SLICE_KINDS;
    if (known && slice_fits(t, slice_block(t, s->columns), s->lo, s->hi)) return true;
    return ckpt_error(
        err,
        "failed to save %" PRId64 "..%" PRId64
        " of tensor '%.200s': there is no such tensor or range; this is a bug, please report it",
        s->lo, s->hi, s->tensor);
}

static void add_slice(ShardPlan *shard, const CheckpointSave *save, int i, int tensor) {
    const Slice *s = &save->slices[i];
    Columns block = slice_block(&save->tensors[tensor], s->columns);
    SafeTensor *t = &shard->tensors[shard->count];
    uint64_t bytes = slice_bytes(s);
    int node = slice_kind_per_node(s->kind) ? s->node : 0;
    t->name = slice_name(&save->tensors[tensor], s->kind, s->lo, block, node);
    t->dtype = slice_kind_dtype(s->kind);
    t->elements = s->hi - s->lo;
    shard->slices[shard->count] = (ManifestSlice){
        .tensor = tensor, .kind = s->kind, .node = node, .block = block, .lo = s->lo, .hi = s->hi};
    shard->order[shard->count++] = i;
    shard->bytes += bytes;
    if (bytes > shard->largest) shard->largest = bytes;
}

// Lists the slices, 4-byte elements first. The caller computes the size of the staging memory
// independently, so this checks that the slices fit before anything is copied.
static bool collect(ShardPlan *shard, const CheckpointSave *save, Error *err) {
    size_t capacity = (size_t)save->slice_count + 1;
    int tensor = 0;
    memset(shard, 0, sizeof *shard);
    shard->order = xcalloc(capacity, sizeof *shard->order, "a checkpoint's slices");
    shard->slices = xcalloc(capacity, sizeof *shard->slices, "a checkpoint's slices");
    shard->tensors = xcalloc(capacity, sizeof *shard->tensors, "a checkpoint's slices");
    for (int width = 4; width >= 2; width -= 2) {
        for (int i = 0; i < save->slice_count; i++) {
            const Slice *s = &save->slices[i];
            if (!check_slice(save, s, &tensor, err)) return false;
            if (s->lo < s->hi && slice_kind_bytes(s->kind) == width) add_slice(shard, save, i, tensor);
        }
    }
    if (!save->staging || shard->bytes <= save->staging_bytes) return true;
    return ckpt_error(err,
                      "the slices of a checkpoint take %" PRIu64 " bytes, but their copy has only %" PRIu64
                      "; this is a bug, please report it",
                      shard->bytes, save->staging_bytes);
}

static void free_shard(ShardPlan *shard) {
    for (int i = 0; i < shard->count; i++) free(shard->tensors[i].name);
    free(shard->tensors);
    free(shard->slices);
    free(shard->order);
}

// --- Prepare -------------------------------------------------------------------------------------

// Rank 0 deletes leftovers of killed saves, checks the free space and creates the temporary folder.
static bool prepare(const Names *n, uint64_t bytes, Error *err) {
    return durable_make_folders(n->directory, err) && save_folder_clear(n->directory, err) &&
           save_folder_has_room(n->directory, bytes, err) &&
           (mkdir(n->fresh, 0777) == 0 || durable_error(err, "make folder", n->fresh));
}

// --- Write ---------------------------------------------------------------------------------------

// Writes this rank's shard, either from staging memory or slice by slice through a buffer. Does not
// communicate and accesses the model only through fetch.
static bool write_shard(const CheckpointSave *save, const ShardPlan *shard, const Names *n,
                        const char *metadata, uint64_t *bytes, uint64_t *xxh3, Error *err) {
    if (!durable_make_folders(n->shard_folder, err)) return false;
    SafeWriter *writer = safe_writer_open(n->shard, shard->tensors, shard->count, metadata, err);
    if (!writer) return false;
    bool ok = true;
    if (save->staging) {
        const uint64_t step = (uint64_t)64 << 20;  // the main thread may wait for this and must see progress
        for (uint64_t at = 0; ok && at < shard->bytes; at += step) {
            ok = safe_writer_append(writer, (const char *)save->staging + at,
                                    shard->bytes - at < step ? shard->bytes - at : step, err);
            heartbeat_progress(save->peers.site);
        }
    } else {
        void *buffer = xmalloc((size_t)shard->largest, "a checkpoint's copy buffer");
        for (int i = 0; ok && i < shard->count; i++) {
            save->fetch(save->context, shard->order[i], buffer);
            ok = safe_writer_append(writer, buffer, slice_bytes(&save->slices[shard->order[i]]), err);
            heartbeat_progress(save->peers.site);
        }
        free(buffer);
    }
    if (ok) return safe_writer_close(writer, bytes, xxh3, err) && durable_sync_folder(n->shard_folder, err);
    safe_writer_discard(writer);
    return false;
}

// --- Publish -------------------------------------------------------------------------------------

// Parses the manifest like a load would, so that only loadable checkpoints are published.
static bool check_manifest(const char *text, size_t bytes, const char *path, Error *err) {
    Manifest manifest;
    if (bytes > MANIFEST_MAX_BYTES)
        return ckpt_error(err,
                          "%s would have %zu bytes, which is too large to be loaded; save with fewer ranks",
                          path, bytes);
    if (!manifest_parse(&manifest, text, bytes, path, err)) return false;
    bool ok = manifest_check_complete(&manifest, path, err);
    manifest_free(&manifest);
    return ok;
}

// Remembers the contents of a small file before it is replaced. A damaged file counts as missing.
static bool remember(SmallFile *f, uint64_t max_bytes, Error *err) {
    if (!durable_plain_file(f->path, max_bytes)) return true;
    f->before = durable_read_file(f->path, max_bytes, &f->before_bytes, err);
    return f->before != NULL;
}

static bool switch_file(SmallFile *f, const char *directory, Error *err) {
    f->switched = rename(f->fresh, f->path) == 0;
    return f->switched ? durable_sync_folder(directory, err) : durable_error(err, "rename to", f->path);
}

static void put_back(const SmallFile *f) {
    Error ignored;  // the caller already has an error to report
    if (!f->switched) return;
    if (!f->before) {
        unlink(f->path);
    } else if (durable_write_file(f->fresh, f->before, f->before_bytes, &ignored) &&
               rename(f->fresh, f->path) != 0) {
        unlink(f->fresh);
    }
}

// Publishes the checkpoint by renames; all data is already on disk. The folder's name becomes
// durable before the lineage and the tracker refer to it, and the lineage before the tracker, so
// the lineage always contains the checkpoint that the tracker names.
static bool switch_over(Names *n, Replacement *folder, Error *err) {
    if (!remember(&n->lineage, LINEAGE_MAX_BYTES, err) ||
        !remember(&n->tracker, CHECKPOINT_TRACKER_MAX_BYTES, err) || !durable_replace(folder, err))
        return false;
    bool ok = durable_sync_folder(n->directory, err) && switch_file(&n->lineage, n->directory, err) &&
              switch_file(&n->tracker, n->directory, err);
    if (ok) return true;
    put_back(&n->tracker);
    put_back(&n->lineage);
    durable_replace_undo(folder);
    return false;
}

// Runs on rank 0 after all shards are on disk: writes the manifest, then renames the folder and
// updates lineage and tracker. Replaces an older checkpoint of the same iteration.
static bool publish(const CheckpointSave *save, Names *n, const char *manifest, size_t bytes,
                    const Lineage *lineage, Error *err) {
    char number[32];
    Replacement folder = {.fresh = n->fresh, .final = n->final, .aside = n->aside};
    int digits = snprintf(number, sizeof number, "%" PRId64, save->state.iteration);
    uint64_t list_bytes;
    char *list = lineage_text(lineage, &list_bytes);
    bool ok = durable_write_file(n->manifest, manifest, bytes, err) && durable_sync_folder(n->fresh, err) &&
              durable_write_file(n->lineage.fresh, list, list_bytes, err) &&
              durable_write_file(n->tracker.fresh, number, (uint64_t)digits, err) &&
              switch_over(n, &folder, err);
    free(list);
    if (!ok) unlink(n->lineage.fresh);
    if (!ok) unlink(n->tracker.fresh);
    Error ignored;  // the next save removes a leftover old copy
    if (ok && folder.replaced) durable_remove_tree(folder.exchanged ? n->fresh : n->aside, &ignored);
    return ok;
}

// --- The job -------------------------------------------------------------------------------------

// Gathers the manifest entries of all ranks on rank 0, joined by ",\n" (malloc'ed). NULL on other
// ranks.
static char *gather_entries(Peers peers, const char *entry, size_t entry_bytes, size_t *bytes) {
    int rank = peers_rank(peers), ranks = peers_size(peers), mine = (int)entry_bytes;
    int *lengths = xcalloc((size_t)ranks, sizeof(int), "manifest entries");
    int *starts = rank == 0 ? xcalloc((size_t)ranks, sizeof(int), "manifest entries") : NULL;
    char *all = NULL;
    *bytes = 0;
    peers_all_gather(peers, &mine, lengths, 1, MPI_INT);
    for (int r = 0; rank == 0 && r < ranks; r++) {
        starts[r] = (int)*bytes;
        *bytes += (size_t)lengths[r] + (r + 1 < ranks ? 2 : 0);
    }
    if (rank == 0) all = xmalloc(*bytes + 1, "manifest entries");
    peers_gather_bytes(peers, entry, mine, all, lengths, starts);
    for (int r = 0; rank == 0 && r + 1 < ranks; r++) memcpy(all + starts[r] + lengths[r], ",\n", 2);
    free(lengths);
    free(starts);
    return all;
}

typedef enum Phase { PREPARE, WRITE, PUBLISH } Phase;

struct CheckpointJob {
    CheckpointSave save;  // slices and arguments are owned by the job
    int rank, ranks;
    Fp8State fp8;
    Site here;  // the thread's own copy, because the caller's keeps changing during training
    ShardPlan shard;
    Names names;
    char *metadata;
    uint64_t total;                  // bytes of all ranks' slices
    int kinds;                       // 1 + the highest kind that any rank saves
    uint64_t file_bytes, file_xxh3;  // size and hash of this rank's shard, once written
    char *entries;                   // manifest entries of all ranks; rank 0 only, before publishing
    size_t entries_bytes;
    Phase phase;
    bool ok;  // result of this rank's part of the phase
    Error error;
    pthread_t thread;
    bool threaded;  // a thread is running or must be joined
    atomic_bool working;
    FolderNotes notes;  // on rank 0
};

// Writes the warnings about the folder.
static void describe_folder(CheckpointJob *job, const Lineage *lineage) {
    char others[120];
    const char *directory = job->save.directory;
    if (*lineage->damage) {
        snprintf(job->notes.damage, sizeof job->notes.damage,
                 "WARNING: %.900s/" LINEAGE_NAME
                 " was damaged: %s; earlier checkpoints were found by folder name",
                 directory, lineage->damage);
    }
    lineage_others(directory, lineage, others, sizeof others);
    if (*others) {
        snprintf(job->notes.others, sizeof job->notes.others,
                 "WARNING: %.900s contains checkpoints of another run or branch (iterations %s), which are "
                 "neither counted nor removed",
                 directory, others);
    }
}

static bool publish_job(CheckpointJob *job) {
    const CheckpointSave *save = &job->save;
    size_t bytes;
    Lineage lineage = {NULL, 0, false, ""};
    Error left;
    const ManifestRun run = {.state = &save->state,
                             .node_states = save->node_states,
                             .node_state_count = save->node_state_count,
                             .fp8 = &job->fp8,
                             .base = &save->base,
                             .arguments_json = save->arguments_json,
                             .tensors = save->tensors,
                             .tensor_count = save->tensor_count};
    char *text = manifest_text(&run, job->ranks, job->kinds, job->entries, job->entries_bytes, &bytes);
    bool ok = check_manifest(text, bytes, job->names.manifest, &job->error) &&
              lineage_extend(save->directory, save->before, save->state.iteration, &lineage, &job->error) &&
              publish(save, &job->names, text, bytes, &lineage, &job->error);
    free(text);
    if (ok) describe_folder(job, &lineage);
    // The new checkpoint is complete. An old one that cannot be deleted wastes space but is
    // harmless.
    if (ok && !save_folder_prune(save->directory, &lineage, &save->keep, &left))
        snprintf(job->notes.stays, sizeof job->notes.stays,
                 "WARNING: old checkpoints could not be deleted: %s", left.what);
    lineage_free(&lineage);
    return ok;
}

// Runs this rank's part of a phase. Only accesses files, so it may run on a thread.
static void work(CheckpointJob *job) {
    switch (job->phase) {
        case PREPARE: job->ok = prepare(&job->names, job->total, &job->error); break;
        case WRITE:
            job->ok = write_shard(&job->save, &job->shard, &job->names, job->metadata, &job->file_bytes,
                                  &job->file_xxh3, &job->error);
            break;
        case PUBLISH: job->ok = publish_job(job); break;
    }
    atomic_store(&job->working, false);
}

static void *work_on_thread(void *argument) {
    CheckpointJob *job = (CheckpointJob *)argument;
    set_thread_site(&job->here);
    work(job);
    return NULL;
}

// Only rank 0 takes part in the first and the last phase. If no thread can be created, the work
// runs on the caller's thread.
static void start_phase(CheckpointJob *job, Phase phase) {
    job->phase = phase;
    job->ok = true;
    if (phase != WRITE && job->rank != 0) return;
    atomic_store(&job->working, true);
    job->threaded = job->save.staging && pthread_create(&job->thread, NULL, work_on_thread, job) == 0;
    if (!job->threaded) work(job);
}

static void finish_phase(CheckpointJob *job) {
    if (job->threaded) pthread_join(job->thread, NULL);
    job->threaded = false;
}

// Copies the slices to staging memory, in file order.
static void stage(const CheckpointJob *job) {
    char *at = (char *)job->save.staging;
    for (int i = 0; at && i < job->shard.count; i++) {
        job->save.fetch(job->save.context, job->shard.order[i], at);
        at += slice_bytes(&job->save.slices[job->shard.order[i]]);
    }
}

// Collective. Gathers the information about all shards on rank 0.
static bool gather(CheckpointJob *job) {
    size_t bytes;
    ManifestFile file = {.folder = job->names.model,
                         .name = job->names.shard_name,
                         .bytes = job->file_bytes,
                         .xxh3 = job->file_xxh3,
                         .count = job->shard.count};
    char *entry = manifest_file_entry(job->save.tensors, &file, job->shard.slices, &bytes);
    bool ok = bytes <=
              (size_t)MANIFEST_MAX_BYTES / (size_t)job->ranks;  // keeps the gathered lengths within an int
    if (!ok)
        ckpt_error(
            &job->error,
            "a rank's list of slices takes %zu bytes, too many for a manifest; raise --ddp-bucket-size",
            bytes);
    ok = peers_agree(job->save.peers, ok, &job->error, NULL);
    if (ok) job->entries = gather_entries(job->save.peers, entry, bytes, &job->entries_bytes);
    free(entry);
    return ok;
}

CheckpointJob *checkpoint_begin(const CheckpointSave *save, Error *err) {
    assert(save->state.iteration >= 0 && save->tensor_count > 0 && save->fetch);
    CheckpointJob *job = xcalloc(1, sizeof *job, "a checkpoint");
    Slice *slices = xcalloc((size_t)save->slice_count + 1, sizeof *slices, "a checkpoint's slices");
    memcpy(slices, save->slices, (size_t)save->slice_count * sizeof *slices);
    job->save = *save;
    job->save.slices = slices;
    job->save.arguments_json = save->arguments_json ? xstrdup(save->arguments_json) : NULL;
    size_t node_bytes = (size_t)save->node_state_count * sizeof(RunState);
    job->save.node_states = xmalloc(node_bytes + 1, "a checkpoint's nodes");
    if (node_bytes) memcpy((RunState *)job->save.node_states, save->node_states, node_bytes);
    if (save->fp8) job->fp8 = fp8_state_copy(save->fp8);
    job->here = save->peers.site ? *save->peers.site : (Site){.rank = -1};
    MPI_Comm_rank(save->peers.comm, &job->rank);
    MPI_Comm_size(save->peers.comm, &job->ranks);
    job->names = make_names(&job->save, job->rank, job->ranks);
    // The build is recorded in the manifest only, so that builds with bit-identical training write
    // identical shards with the same hash.
    job->metadata = text_format("{\"format\":\"sdp4bit.c checkpoint\",\"iteration\":\"%" PRId64
                                "\",\"shard\":\"%d of %d\"}",
                                job->save.state.iteration, job->rank, job->ranks);
    if (!peers_agree(save->peers, collect(&job->shard, &job->save, &job->error), &job->error, NULL)) {
        if (err) *err = job->error;
        checkpoint_job_free(job);
        return NULL;
    }
    job->total = job->shard.bytes;
    peers_all_reduce(save->peers, &job->total, 1, MPI_UINT64_T, MPI_SUM);
    for (int i = 0; i < job->shard.count; i++) {
        if ((int)job->shard.slices[i].kind >= job->kinds) job->kinds = (int)job->shard.slices[i].kind + 1;
    }
    peers_all_reduce(save->peers, &job->kinds, 1, MPI_INT, MPI_MAX);
    stage(job);
    start_phase(job, PREPARE);
    return job;
}

bool checkpoint_busy(const CheckpointJob *job) { return atomic_load(&job->working); }
const RunState *checkpoint_job_state(const CheckpointJob *job) { return &job->save.state; }
const FolderNotes *checkpoint_job_notes(const CheckpointJob *job) { return &job->notes; }

bool checkpoint_advance(CheckpointJob *job, bool *done, Error *err) {
    assert(!job->threaded || job->save.staging);
    heartbeat_waiting(job->save.peers.site, false);  // this rank is now busy saving
    finish_phase(job);
    *done = job->phase == PUBLISH;
    bool ok = peers_agree(job->save.peers, job->ok, &job->error, NULL);
    if (ok && job->phase == PREPARE) {
        if (job->save.staging && job->save.fetched) job->save.fetched(job->save.context);
        start_phase(job, WRITE);
    } else if (ok && job->phase == WRITE) {
        ok = gather(job);
        if (ok) start_phase(job, PUBLISH);
    }
    if (ok) return true;
    Error ignored;  // the first error is reported already
    if (job->rank == 0) durable_remove_tree(job->names.fresh, &ignored);
    if (err) *err = job->error;
    return false;
}

void checkpoint_job_free(CheckpointJob *job) {
    if (!job) return;
    finish_phase(job);
    free_shard(&job->shard);
    free_names(&job->names);
    free(job->metadata);
    free(job->entries);
    free((char *)job->save.arguments_json);
    free((RunState *)job->save.node_states);
    fp8_state_free(&job->fp8);
    free((Slice *)job->save.slices);
    free(job);
}
