// Saving and loading the checkpoints of a run: see run.h. Called by train_gpt.c.
#include <assert.h>
#include <string.h>

#include "llmc/checkpoint/save_folder.h"
#include "llmc/checkpoint/zero_slices.h"
#include "llmc/run/run.h"
#include "llmc/state/zero.h"

// --- saving --------------------------------------------------------------------------------------

static RunState current_state(const Run *run) {
    RunState state;
    memset(&state, 0, sizeof state);
    state.iteration = run->iteration;
    state.consumed_train_samples = run->consumed_train;
    state.consumed_valid_samples = run->consumed_valid;
    state.scheduler_samples = run->scheduled;
    state.adam_steps = run->last.adam_steps;
    state.beta1_power = run->last.beta1_power;
    state.beta2_power = run->last.beta2_power;
    guard_save(&run->guard, &run->last, &state);
    state.flops_so_far = run->flops_so_far;
    // The last training step, if this run took it, ended with an outer sync of all buckets.
    bool all_synced = run->config.local_steps > 1 && run->iteration == run->config.train_iters &&
                      run->step_batch > 0;
    state.outer_applied_at = all_synced ? run->iteration : run->outer_applied_at;
    state.train_split_samples = run->split_samples[SPLIT_TRAIN];
    state.valid_split_samples = run->split_samples[SPLIT_VALID];
    elastic_save(run, &state);
    return state;
}

bool advance_save(Run *run, bool to_the_end) {
    if (!run->saver.job) return true;
    run->site.phase = "save checkpoint";
    return run_agreed(run, saver_advance(&run->saver, to_the_end, &run->error));
}

bool replicas_sound(Run *run) {
    Peers world = run_peers(run, run->launch.world);
    return run_agreed(run, replicas_verify(run->zero, world, run->log, &run->guard.repairs, &run->error));
}

bool save_checkpoint(Run *run) {
    read_step_status(run, 0, false);
    Peers world = run_peers(run, run->launch.world);
    if (!run_agreed(run, zero_sound(run->zero, world, &run->error))) return false;
    const char *folder = run->config.save;
    // The loaded checkpoint is intact and may hold more than this run would save.
    bool track = folder && run->iteration == run->resumed_from && run->launch.rank == 0;
    bool tracked = !track || checkpoint_track(folder, run->iteration, &run->error);
    if (!folder || run->last_saved == run->iteration) return run_agreed(run, tracked);
    if (run->config.verify_replicas_interval && !replicas_sound(run)) return false;
    run->site.phase = "save checkpoint";
    timer_start(run->timers, TIMER_SAVE_CHECKPOINT, NULL);
    RunState state = current_state(run);
    Fp8State fp8 = run->launch.rank == 0 ? fp8_get_state(run->gpt) : (Fp8State){0};
    bool ok = run_agreed(run, saver_save(&run->saver, &state, &fp8, &run->error));
    fp8_state_free(&fp8);
    timer_stop(run->timers, TIMER_SAVE_CHECKPOINT, NULL);
    if (!ok) return false;
    log_phase_timers(run->log, run->timers, TIMER_SAVE_CHECKPOINT, 1, world);
    run->last_saved = run->iteration;
    return true;
}

// Takes over the --save folder after the node of rank 0 was lost. A hanging node still holds the
// lock, and some file systems keep the lock of a dead one. In a network partition the node may
// be alive and save too; then the first save wins.
static bool take_folder(Run *run, int64_t iteration) {
    const char *folder = run->config.save;
    double limit = run_peers(run, run->launch.world).limit;  // the other ranks wait this long
    double patience = limit > 0 && limit < 20 ? limit / 2 : 10;
    bool locked = save_folder_lock(folder, patience, &run->save_lock, &run->error);
    if (locked ? !save_folder_holds(folder, iteration) : !save_folder_in_use(folder, iteration)) return true;
    return error_set(&run->error, EXIT_COMMUNICATION,
                     "a node was lost, and another part of the job is saving iteration %lld in %.600s, so "
                     "this part does not save; restart the job",
                     (long long)iteration, folder);
}

// Returns the state to save for the surviving groups. *saved: true if a save of this state had
// started before the failure.
static RunState surviving_state(const Run *run, Peers left, bool *saved) {
    enum { ITERATION, TRAIN, VALID, SAVED, FIELDS };
    int64_t least[FIELDS] = {run->iteration, run->consumed_train, run->consumed_valid, run->last_saved};
    RunState state = current_state(run);
    // Some nodes may be one step ahead. After the restart they repeat the samples of that step.
    peers_all_reduce(left, least, FIELDS, MPI_INT64_T, MPI_MIN);
    // The outer sync at the end of the last step may have failed, so repeat that step.
    if (least[ITERATION] == run->config.train_iters) {
        least[ITERATION]--;
        least[TRAIN] -= run->step_batch;
    }
    *saved = least[SAVED] >= least[ITERATION];
    if (run->iteration > least[ITERATION] && run->last.applied) state.scheduler_samples -= run->step_batch;
    state.iteration = state.outer_applied_at = least[ITERATION];
    state.consumed_train_samples = least[TRAIN];
    state.consumed_valid_samples = least[VALID];
    return state;
}

bool save_surviving_groups(Run *run) {
    assert(run->config.save);
    Peers left = run_peers(run, run->launch.world);
    bool begun;
    run->site.phase = "save checkpoint";
    if (!peers_agree(left, zero_sound(run->zero, left, &run->error), &run->error, NULL)) return false;
    int pending = saver_abandon(&run->saver);
    peers_all_reduce(left, &pending, 1, MPI_INT, MPI_MAX);
    RunState state = surviving_state(run, left, &begun);
    if (begun && !pending) return true;
    bool ours = run->launch.rank != 0 || run->save_lock.file >= 0 || take_folder(run, state.iteration);
    run->saver.peers = left;
    return peers_agree(left, ours, &run->error, NULL) && saver_save(&run->saver, &state, NULL, &run->error) &&
           saver_advance(&run->saver, true, &run->error);
}

// --- loading -------------------------------------------------------------------------------------

static void restore_counters(Run *run, const RunState *state) {
    run->iteration = state->iteration;
    run->consumed_train = state->consumed_train_samples;
    run->consumed_valid = run->config.skip_train ? 0 : state->consumed_valid_samples;
    run->split_samples[SPLIT_TRAIN] = state->train_split_samples;
    run->split_samples[SPLIT_VALID] = state->valid_split_samples;
    run->flops_so_far = state->flops_so_far;
    run->outer_applied_at = state->outer_applied_at;
    elastic_load(run, state);
}

static void restore_optimizer_counters(Run *run, const RunState *state) {
    run->scheduled = state->scheduler_samples;
    run->last.adam_steps = state->adam_steps;
    run->last.beta1_power = state->beta1_power;
    run->last.beta2_power = state->beta2_power;
    zero_set_counters(run->zero, &run->last);
}

// Restores the residual of error feedback if the checkpoint has one for this run's layout. Discards
// a residual of gradients that was saved after a skipped step (sdp4bit/README.md). With local steps
// a residual belongs to a replica group: it fits any layout, and new groups start without one.
static bool restore_residual(Run *run, const Checkpoint *checkpoint) {
    bool local = zero_keeps(run->zero, SLICE_LOCAL_RESIDUAL);
    SliceKind kind = local ? SLICE_LOCAL_RESIDUAL : SLICE_RESIDUAL;
    if (!zero_keeps(run->zero, kind)) return true;
    int saved = checkpoint_nodes(checkpoint, kind);
    bool fits = local ? saved > 0
                      : saved == zero_nodes(run->zero) &&
                            config_same_residual(&run->config, checkpoint_arguments(checkpoint));
    if (!fits) {
        log_line(run->log,
                 "WARNING: the checkpoint has no error-feedback residual that fits this run, so the residual "
                 "starts at 0");
        return true;
    }
    if (!local && checkpoint_state(checkpoint)->skipped_in_a_row > 0) return true;
    return zero_restore_residual(run->zero, checkpoint, kind, &run->error);
}

// Restores the state of delayed FP8 scaling. It belongs to the weights, so it is restored even if
// the optimizer state is not, as in Megatron-LM.
static void restore_fp8(Run *run, const Checkpoint *checkpoint) {
    const Config *c = &run->config;
    if (!config_fp8_on(c) || c->fp8_recipe != FP8_DELAYED) return;
    if (fp8_set_state(run->gpt, checkpoint_fp8(checkpoint))) return;
    log_line(run->log,
             "WARNING: the checkpoint has no delayed FP8 scales that fit this run, so histories are empty "
             "and the first scales follow from the first micro-batch");
}

// Checks that the loaded base model is the one that the adapters were trained on. With --finetune,
// they may start on another one.
static bool match_base(Run *run, const Checkpoint *checkpoint) {
    Error why;
    const char *step_flag;
    if (!run->config.lora_rank) return true;
    config_lora_base_step(&run->config, &step_flag);
    BaseMatch match = base_model_compare(checkpoint_base(checkpoint), &run->base, step_flag, &why);
    if (match == BASE_SAME) return true;
    if (match == BASE_DIFFERS && !run->config.finetune) {
        run->error = why;
        return false;
    }
    log_line(run->log, "WARNING: %s", why.what);
    return true;
}

// Restores counters, schedule, weights and optimizer state from an opened checkpoint, subject to
// --finetune, --no-load-optim and --skip-train.
static bool restore(Run *run, const Checkpoint *checkpoint) {
    Config *c = &run->config;
    const RunState *state = checkpoint_state(checkpoint);
    const char *arguments = checkpoint_arguments(checkpoint);
    bool optimizer = config_loads_optimizer(c);
    char notes[2048] = "";
    if (!config_match_checkpoint(c, arguments, notes, sizeof notes, &run->error)) return false;
    if (!checkpoint_check_tensors(checkpoint, run->whole, run->whole_count, &run->error) ||
        !match_base(run, checkpoint))
        return false;
    if (!c->finetune)
        config_resume_length(c, state->iteration, state->consumed_train_samples, notes, sizeof notes);
    if (run->launch.rank == 0) fputs(notes, stdout);
    if (optimizer && !checkpoint_nodes(checkpoint, SLICE_MASTER)) {
        return ckpt_error(
            &run->error,
            "the checkpoint in %s was saved without the optimizer; add --no-load-optim or --finetune",
            c->load);
    }
    if (!zero_restore(run->zero, checkpoint, optimizer, &run->error)) return false;
    if (optimizer && !restore_residual(run, checkpoint)) return false;
    restore_fp8(run, checkpoint);
    if (c->finetune) return true;
    // With --local-steps each replica group has its own optimizer counters and guard.
    const RunState *own = c->local_steps > 1 ? checkpoint_node_state(checkpoint, zero_node(run->zero))
                                             : state;
    restore_counters(run, state);
    guard_restore(&run->guard, &run->last, own);
    // Without optimizer state, Adam and the learning-rate schedule restart, as in Megatron-LM: zero
    // moments need a warm-up.
    if (optimizer) restore_optimizer_counters(run, own);
    return true;
}

// Returns the folder with this run's parameters; NULL: they are initialized.
static const char *load_folder(const Run *run) {
    const Config *c = &run->config;
    return c->lora_rank ? config_lora_adapters(c) : c->load;
}

// Handles a --load folder without checkpoints.
static Loaded nothing_to_load(Run *run) {
    log_line(run->log,
             "WARNING: could not find the metadata file %s/latest_checkpointed_iteration.txt: starting "
             "from scratch",
             run->config.load);
    if (!run->config.exit_on_missing_checkpoint) return LOAD_FRESH;
    log_line(run->log, ">> '--exit-on-missing-checkpoint' set ... exiting. <<");
    run->exit_code = EXIT_DONE;
    return LOAD_FAILED;
}

// Opens the checkpoint of *iteration, or the newest valid one before it unless --ckpt-step chose
// it, and restores the run from it.
static bool open_and_restore(Run *run, int64_t *iteration, Peers world) {
    const char *load = load_folder(run);
    char fallback[1400];
    log_line(run->log, " loading checkpoint from %s at iteration %lld", load, (long long)*iteration);
    timer_start(run->timers, TIMER_LOAD_CHECKPOINT, run->compute);
    Checkpoint *checkpoint =
        run->config.ckpt_step < 0
            ? checkpoint_open_or_fall_back(load, iteration, world, fallback, sizeof fallback, &run->error)
            : checkpoint_open(load, iteration, "--ckpt-step", world, fallback, sizeof fallback, &run->error);
    if (*fallback) log_line(run->log, "%s", fallback);
    bool ok = run_agreed(run, checkpoint != NULL) && run_agreed(run, restore(run, checkpoint));
    if (checkpoint) checkpoint_close(checkpoint);
    timer_stop(run->timers, TIMER_LOAD_CHECKPOINT, run->compute);
    if (ok)
        log_line(run->log, "  successfully loaded checkpoint from %s at iteration %lld", load,
                 (long long)*iteration);
    return ok;
}

Loaded load_checkpoint(Run *run) {
    const Config *c = &run->config;
    Peers world = run_peers(run, run->launch.world);
    run->site.phase = "load checkpoint";
    run->last.beta1_power = run->last.beta2_power = 1.0;
    run->resumed_from = -1;
    const char *load = load_folder(run);
    if (!load) return LOAD_FRESH;
    // Rank 0 decides for all ranks.
    char lost[1400] = "";
    int64_t iteration = c->ckpt_step;
    if (run->launch.rank == 0 && c->ckpt_step < 0)
        iteration = checkpoint_find(load, lost, sizeof lost, &run->error);
    if (!run_agreed(run, iteration != CHECKPOINT_UNREADABLE)) return LOAD_FAILED;
    peers_broadcast(world, &iteration, sizeof iteration, 0);
    peers_broadcast(world, lost, sizeof lost, 0);
    if (iteration == NO_CHECKPOINT) return nothing_to_load(run);
    if (*lost) log_line(run->log, "%s", lost);
    if (!run_agreed(run, same_checkpoint(load, iteration, world, &run->error))) return LOAD_FAILED;
    if (!open_and_restore(run, &iteration, world)) return LOAD_FAILED;
    if (!c->save || c->finetune || !save_folder_same(c->save, load)) return LOAD_RESTORED;
    run->resumed_from = iteration;
    run->last_saved = run->iteration;
    return LOAD_RESTORED;
}
