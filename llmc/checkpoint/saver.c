// Saves the checkpoints of a run. See saver.h. Called by llmc/run.
#include "llmc/checkpoint/saver.h"

#include <assert.h>
#include <stdlib.h>
#include <unistd.h>

// Returns the number of the run's checkpoints in the folder. Errors are ignored here; the first
// save reports them.
static int count_checkpoints(const Saver *saver) {
    Lineage lineage;
    if (!lineage_extend(saver->config->save, saver->before, INT64_MAX, &lineage, NULL)) return 0;
    int count = lineage.count - 1;
    lineage_free(&lineage);
    return count;
}

// Returns the first checkpoint in the folder outside `listed` that the run, now at `iteration`,
// will overwrite at a save interval or its end. -1: none.
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

// Checks that the run does not overwrite checkpoints of other runs. A run that did not resume from
// this folder must not replace any. A run that did may replace later ones, left by an abandoned
// branch, or by a save that was killed before it listed the checkpoint. They cannot be
// distinguished from another run's, so this warns.
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
                 " does not list; this run will replace it",
                 c->save, (long long)first);
        return true;
    }
    return ckpt_error(
        err,
        "%.600s holds a checkpoint of iteration %lld, which this run would overwrite without having loaded "
        "it; use --load with the same folder%s, choose another --save folder, or remove the checkpoint",
        c->save, (long long)first, c->finetune ? " and without --finetune" : "");
}

// On rank 0: warns if the remaining checkpoints will not all fit.
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
    assert(iteration >= 0);
    const Config *c = saver->config;
    bool optimizer = !c->no_save_optim;
    // bytes: size of the whole checkpoint, because all ranks share one file system.
    uint64_t bytes = zero_checkpoint_bytes(saver->zero, saver->whole, saver->whole_count, optimizer);
    uint64_t own = zero_own_checkpoint_bytes(saver->zero, optimizer);
    int rank = peers_rank(saver->peers);
    bool ok = rank != 0 ||
              (save_folder_names_free(c->save, err) && replaces_no_others(saver, iteration, err) &&
               save_folder_has_room(c->save, bytes, err));
    if (!peers_agree(saver->peers, ok && save_folder_allows_file(own, err), err, NULL)) return false;
    if (rank == 0) forecast(saver, iteration, bytes);
    return true;
}

// Called on rank 0 before each save: checks that the folder is still the locked one. If it is
// another folder, the run has not saved anything there, so its checkpoints belong to other runs.
static bool holds_folder(Saver *saver, int64_t iteration, Error *err) {
    const Config *c = saver->config;
    const Lineage none = {NULL, 0, false, ""};
    bool moved;
    if (!save_folder_follow(c->save, saver->lock, &moved, err)) return false;
    if (!moved) return true;
    log_line(saver->log,
             "WARNING: %.600s was moved or removed and replaced by another folder; this run continues to "
             "save there, and treats existing checkpoints as another run's",
             c->save);
    saver->before = -1;
    saver->saved = false;
    if (!progress_follow(saver->progress, c->save, err)) return false;
    int64_t first = save_folder_holds(c->save, iteration) ? iteration
                                                          : first_in_the_way(saver, iteration, &none);
    if (first < 0) return true;
    return ckpt_error(err,
                      "%.600s was replaced by another folder, which holds a checkpoint of iteration %lld, "
                      "which this run would overwrite; restore the original folder, or remove the checkpoint",
                      c->save, (long long)first);
}

// Gathers the states of all replica groups, indexed by group, for free(). Each rank contributes its
// group's state. Collective.
static RunState *node_states(const Saver *saver, const RunState *own) {
    const Mesh *mesh = saver->mesh;
    size_t ranks = (size_t)mesh->world.size;
    RunState *all = xcalloc(ranks, sizeof *all, "a checkpoint's nodes");
    peers_all_gather(saver->peers, own, all, (int)sizeof *own, MPI_BYTE);
    for (int n = 0; n < mesh->replica_groups.size; n++) all[n] = all[n * mesh->per_node];
    return all;
}

// Returns the staging buffer of background saves. NULL: saves are synchronous.
static void *staging_of(const Saver *saver, uint64_t *bytes) {
    void *staging = zero_staging(saver->zero, bytes);
    return saver->synchronous ? NULL : staging;
}

static CheckpointJob *begin(const Saver *saver, const RunState *state, const Fp8State *fp8, Error *err) {
    const Config *c = saver->config;
    char *arguments = config_to_json(c);
    int replica_groups = saver->mesh->replica_groups.size;
    RunState *nodes = replica_groups > 1 ? node_states(saver, state) : NULL;
    ZeroSlices slices = zero_slices(saver->zero, !c->no_save_optim);
    uint64_t staging_bytes;
    void *staging = staging_of(saver, &staging_bytes);
    CheckpointSave save = {
        .directory = c->save,
        .state = *state,
        .node_states = nodes,
        .node_state_count = nodes ? replica_groups : 0,
        .base = saver->base,
        .fp8 = fp8,
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

bool saver_save(Saver *saver, const RunState *state, const Fp8State *fp8, Error *err) {
    const Config *c = saver->config;
    uint64_t staging_bytes;
    int rank = peers_rank(saver->peers);
    if (!saver_advance(saver, true, err)) return false;
    bool ok = rank != 0 || holds_folder(saver, state->iteration, err);
    if (!peers_agree(saver->peers, ok, err, NULL)) return false;
    log_line(saver->log, "saving checkpoint at iteration %7lld to %s", (long long)state->iteration, c->save);
    saver->job = begin(saver, state, fp8, err);
    if (!saver->job) return false;
    if (!staging_of(saver, &staging_bytes)) return saver_advance(saver, true, err);
    log_line(saver->log, "  scheduled an async checkpoint save at iteration %7lld to %s",
             (long long)state->iteration, c->save);
    return true;
}

bool saver_busy(const Saver *saver) { return saver->job && checkpoint_busy(saver->job); }

bool saver_advance(Saver *saver, bool to_the_end, Error *err) {
    const Config *c = saver->config;
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
                        (double)state.consumed_train_samples * c->seq_length);
    log_line(saver->log, "  successfully saved checkpoint at iteration %7lld to %s",
             (long long)state.iteration, c->save);
    if (c->local_steps > 1 && !outer_weights_synced(&state, c->train_iters))
        log_line(saver->log,
                 "  exports and evaluations of this checkpoint use the outer weights, synchronized in "
                 "iterations %lld to %lld",
                 (long long)oldest_outer_weights(&state, c->local_steps), (long long)state.iteration);
    return true;
}

bool saver_abandon(Saver *saver) {
    bool was = saver->job != NULL;
    while (saver_busy(saver)) usleep(10000);
    saver->job = NULL;  // its memory is released when the process exits
    saver->synchronous = true;
    return was;
}
