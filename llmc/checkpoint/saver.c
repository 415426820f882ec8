// The saves of a run: see saver.h. Called by llmc/run.
#include "llmc/checkpoint/saver.h"

#include <stdlib.h>
#include <unistd.h>

// How many of the run's checkpoints are there already; a folder that cannot be read shows in the
// first save.
static int count_checkpoints(const Saver *saver) {
    Lineage lineage;
    if (!lineage_extend(saver->config->save, saver->before, INT64_MAX, &lineage, NULL)) return 0;
    int count = lineage.count - 1;
    lineage_free(&lineage);
    return count;
}

// The first checkpoint in the folder, of those that are not `listed`, whose place the run will
// take: by its save interval, or at its end. The run stands at `iteration`. -1: none.
static int64_t first_in_the_way(const Saver *saver, int64_t iteration, const Lineage *listed) {
    const Config *c = saver->config;
    int64_t last = c->train_iters, found = -1;
    if (c->exit_interval > 0 && last / c->exit_interval > iteration / c->exit_interval)
        last = (iteration / c->exit_interval + 1) * c->exit_interval;
    if (last < iteration) last = iteration;
    int count;
    int64_t *there = save_folder_list(c->save, &count);
    for (int i = 0; i < count && found < 0; i++) {
        if (lineage_holds(listed, there[i])) continue;
        bool by_interval = there[i] > iteration && there[i] < last && there[i] % c->save_interval == 0;
        if (by_interval || there[i] == last) found = there[i];
    }
    free(there);
    return found;
}

// A run that goes on from no checkpoint in the folder must not replace one: to it all there are
// another run's. One that goes on may replace what comes behind it: a branch that was given up, or
// what a killed save left unlisted. That cannot be told from another run's, so it is named.
static bool replaces_no_others(const Saver *saver, int64_t iteration, Error *err) {
    const Config *c = saver->config;
    Lineage listed = {NULL, 0, false, ""};
    if (c->skip_train || (saver->before >= 0 && !lineage_read(c->save, &listed, NULL))) return true;
    int64_t first = first_in_the_way(saver, iteration, &listed);
    lineage_free(&listed);
    if (first < 0) return true;
    if (saver->before >= 0) {
        log_line(saver->log,
                 "WARNING: %.600s holds a checkpoint of iteration %lld that its " LINEAGE_NAME
                 " does not name;"
                 " this run will replace it",
                 c->save, (long long)first);
        return true;
    }
    return error_set(
        err, EXIT_CHECKPOINT,
        "%.600s holds a checkpoint of iteration %lld, which this run would replace"
        " without going on from it; load it with --load of the same folder%s, give another --save folder, or"
        " remove what is there",
        c->save, (long long)first, c->finetune ? " and without --finetune" : "");
}

// Rank 0: says when the checkpoints to come will not all fit.
static void forecast(const Saver *saver, int64_t iteration, uint64_t bytes) {
    const Config *c = saver->config;
    char line[1400];
    Forecast f = {.bytes = bytes,
                  .saves = c->train_iters / c->save_interval - iteration / c->save_interval,
                  .there = count_checkpoints(saver),
                  .keep = {c->keep_last_checkpoints, c->keep_checkpoint_interval}};
    save_folder_forecast(c->save, &f, line, sizeof line);
    if (*line) log_line(saver->log, "%s", line);
}

bool saver_has_room(const Saver *saver, int64_t iteration, Error *err) {
    const Config *c = saver->config;
    bool optimizer = !c->no_save_optim;
    // All ranks see one file system. This rank's file has a header besides.
    uint64_t bytes = zero_checkpoint_bytes(saver->zero, saver->whole, saver->whole_count, optimizer);
    uint64_t own = zero_own_checkpoint_bytes(saver->zero, optimizer);
    int rank;
    MPI_Comm_rank(saver->peers.comm, &rank);
    bool ok = rank != 0 ||
              (save_folder_names_free(c->save, err) && replaces_no_others(saver, iteration, err) &&
               save_folder_has_room(c->save, bytes, err));
    if (!peers_agree(saver->peers, ok && save_folder_allows_file(own, err), err, NULL)) return false;
    if (rank == 0) forecast(saver, iteration, bytes);
    return true;
}

// Rank 0 before each save: that the folder is still the one which is locked for this run. In
// another one the run has saved nothing: its checkpoints are others'.
static bool holds_folder(Saver *saver, int64_t iteration, Error *err) {
    const Config *c = saver->config;
    const Lineage none = {NULL, 0, false, ""};
    bool moved;
    if (!save_folder_follow(c->save, saver->lock, &moved, err)) return false;
    if (!moved) return true;
    log_line(saver->log,
             "WARNING: %.600s was moved or removed and is another folder now; this run goes on saving there,"
             " and counts what it finds as another run's",
             c->save);
    saver->before = -1;
    saver->saved = false;
    if (!progress_follow(saver->progress, c->save, err)) return false;
    int64_t first = save_folder_holds(c->save, iteration) ? iteration
                                                          : first_in_the_way(saver, iteration, &none);
    if (first < 0) return true;
    return error_set(err, EXIT_CHECKPOINT,
                     "another folder was put in the place of %.600s, and holds a checkpoint of"
                     " iteration %lld, which this run would replace; put the run's own folder back, or "
                     "remove what is there",
                     c->save, (long long)first);
}

// Every replica group's counters, (replica groups), for free(): what this rank has is its replica
// group's. Collective.
static RunState *node_states(const Saver *saver, const RunState *own) {
    const Mesh *mesh = saver->mesh;
    size_t ranks = (size_t)mesh->world.size;
    RunState *all = (RunState *)xcalloc(ranks, sizeof *all, "a checkpoint's nodes");
    peers_all_gather(saver->peers, own, all, (int)sizeof *own, MPI_BYTE);
    for (int n = 0; n < mesh->replica_groups.size; n++) all[n] = all[n * mesh->per_node];
    return all;
}

static CheckpointJob *begin(const Saver *saver, const RunState *state, Error *err) {
    const Config *c = saver->config;
    char *arguments = config_to_json(c);
    int replica_groups = saver->mesh->replica_groups.size;
    RunState *nodes = replica_groups > 1 ? node_states(saver, state) : NULL;
    ZeroSlices slices = zero_slices(saver->zero, !c->no_save_optim);
    uint64_t staging_bytes;
    void *staging = zero_staging(saver->zero, &staging_bytes);
    CheckpointSave save = {
        .directory = c->save,
        .state = *state,
        .node_states = nodes,
        .node_state_count = nodes ? replica_groups : 0,
        .arguments_json = arguments,
        .tensors = saver->whole,
        .tensor_count = saver->whole_count,
        .tensor_rank = saver->mesh->tp.rank,
        .pipeline_rank = saver->mesh->pp.rank,
        .pipeline_ranks = saver->mesh->pp.size,
        .slices = slices.slices,
        .slice_count = slices.count,
        .fetch = staging ? zero_stage_slice : zero_fetch_slice,
        .context = saver->zero,
        .staging = staging,
        .staging_bytes = staging_bytes,
        .fetched = zero_slices_staged,
        .keep = {c->keep_last_checkpoints, c->keep_checkpoint_interval},
        .before = saver->before,
        .peers = saver->peers,
    };
    CheckpointJob *job = checkpoint_begin(&save, err);
    free(slices.slices);
    free(nodes);
    free(arguments);
    return job;
}

bool saver_save(Saver *saver, const RunState *state, Error *err) {
    const Config *c = saver->config;
    uint64_t staging_bytes;
    int rank;
    MPI_Comm_rank(saver->peers.comm, &rank);
    if (!saver_advance(saver, true, err)) return false;
    bool ok = rank != 0 || holds_folder(saver, state->iteration, err);
    if (!peers_agree(saver->peers, ok, err, NULL)) return false;
    log_line(saver->log, "saving checkpoint at iteration %7lld to %s", (long long)state->iteration, c->save);
    saver->job = begin(saver, state, err);
    if (!saver->job) return false;
    if (!zero_staging(saver->zero, &staging_bytes)) return saver_advance(saver, true, err);
    log_line(saver->log, "  scheduled an async checkpoint save at iteration %7lld to %s",
             (long long)state->iteration, c->save);
    return true;
}

bool saver_busy(const Saver *saver) { return saver->job && checkpoint_busy(saver->job); }

bool saver_advance(Saver *saver, bool to_the_end, Error *err) {
    bool done = false, ok = true;
    if (!saver->job) return true;
    do ok = checkpoint_advance(saver->job, &done, err);
    while (ok && !done && to_the_end);
    if (ok && !done) return true;
    RunState state = *checkpoint_job_state(saver->job);
    const FolderNotes *notes = checkpoint_job_notes(saver->job);
    if (ok && *notes->damage) log_line(saver->log, "%s", notes->damage);
    if (ok && !saver->saved && *notes->others) log_line(saver->log, "%s", notes->others);
    if (ok && *notes->stays) log_line(saver->log, "%s", notes->stays);
    checkpoint_job_free(saver->job);
    saver->job = NULL;
    if (!ok) return false;
    saver->before = state.iteration;
    saver->saved = true;
    progress_checkpoint(saver->progress, state.iteration, state.flops_so_far,
                        (double)state.consumed_train_samples * saver->config->seq_length);
    log_line(saver->log, "  successfully saved checkpoint at iteration %7lld to %s",
             (long long)state.iteration, saver->config->save);
    return true;
}

bool saver_abandon(Saver *saver) {
    bool was = saver->job != NULL;
    while (saver_busy(saver)) usleep(10000);
    saver->job = NULL;  // its memory goes with the process, which ends
    return was;
}
