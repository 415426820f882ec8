// sdp4bit.c: GPT and Llama pretraining with sharded data parallelism in (almost) 4 bits.
//
// This file reads from top to bottom like a training run:
//
//   loading a micro-batch     next_batch, load_micro_batch
//   the micro-batch loop      run_micro_batches: forward and backward, one call per pipeline slot
//   the training step         train_step: micro-batches, then ZeRO's reduce, AdamW and all-gather
//   evaluation                evaluate, evaluate_and_log, final_evaluation
//   the training loop         train, after_step
//   the program               train_gpt
//
// The transformer itself (forward and backward of a layer) is in llmc/model/transformer.c, the
// sharding of weights, gradients and optimizer state in llmc/state/zero.h, and the 4-bit codecs and
// collectives of the paper in sdp4bit/.
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "train_gpt.h"

#include "llmc/plan/plan_report.h"  // --plan
#include "llmc/ranks/heartbeat.h"   // progress reports to the watchdog
#include "llmc/ranks/watchdog.h"
#include "llmc/ranks/node_recovery.h"  // recovery from a lost node
#include "llmc/run/run.h"              // Run: configuration, counters, logs, checkpoints
#include "llmc/state/stats.h"          // quantization statistics

// ===== loading a micro-batch =====================================================================

// Returns false, on all ranks, if some rank could not read its data. The run then ends without
// logging or saving the current step.
static bool data_sound(Run *run) {
    if (run->stop.reason != STOP_DATA) return true;
    run->site.phase = "read data";
    return run_agreed(run, run->error.code != EXIT_DATA);
}

// Uploads this rank's micro-batch, which starts at global sample `consumed`, into a slot. If the
// data is corrupt, this rank continues with zeros until all ranks stop (data_sound), because the
// other ranks may already wait in a collective of this step.
static Batch next_batch(Run *run, GPT *gpt, int slot, int split, int64_t consumed) {
    Batch batch;
    Error err;
    memset(&batch, 0, sizeof batch);
    heartbeat_waiting(&run->site, false);
    timer_start(run->timers, TIMER_BATCH_GENERATOR, run->compute);
    if (loader_batch(run->loader, split, consumed, &batch, &err)) {
        gpt_upload(gpt, slot, &batch);
    } else {
        size_t bytes = (size_t)gpt->B * (size_t)gpt->T * sizeof(int32_t);
        MicroBatch *m = &gpt->slot[slot];
        set_zero(run->compute, m->tokens, bytes);
        set_zero(run->compute, m->targets, bytes);
        set_zero(run->compute, m->positions, bytes);
        if (!run->error.code) run->error = err;
    }
    timer_stop(run->timers, TIMER_BATCH_GENERATOR, run->compute);
    return batch;
}

// Returns the number of unmasked tokens of a micro-batch.
static double count_tokens(const GPT *gpt, const Batch *batch) {
    int64_t N = (int64_t)gpt->B * gpt->T;
    double tokens = 0.0;
    if (!batch->loss_mask) return (double)N;
    for (int64_t i = 0; i < N; i++) tokens += batch->loss_mask[i];
    return tokens;
}

// The samples that run_micro_batches loads in a training step or an evaluation batch.
typedef struct BatchSource {
    int split;      // SPLIT_TRAIN, SPLIT_VALID or SPLIT_TEST
    int64_t first;  // global sample of micro-batch 0
    int64_t row;    // samples of one micro-batch over all data-parallel ranks
    int64_t parts;  // micro-batches whose losses are averaged
    double tokens;  // unmasked tokens loaded so far
} BatchSource;

// Loads a micro-batch and sets the scales of its pass:
//   report_scale  for the reported loss. Divides the loss sum by the number of tokens in `parts`
//                 micro-batches; token_factor later corrects for masked tokens. loss_scale for the
//                 gradients. Averages over the unmasked tokens of each micro-batch and then over
//                 micro-batches, as in Megatron-LM. With --calculate-per-token-loss it equals
//                 report_scale.
// Returns the number of unmasked tokens.
static double load_micro_batch(Run *run, GPT *gpt, const BatchSource *source, Pass *pass) {
    double N = (double)gpt->B * gpt->T, parts = (double)source->parts;
    int64_t sample = source->first + (int64_t)pass->micro_batch * source->row;
    Batch batch = next_batch(run, gpt, pass->slot, source->split, sample);
    pass->first_sample = batch.first_sample;
    pass->has_doc_start = batch.doc_start != NULL;
    pass->sequences = batch.tokens ? gpt->slot[pass->slot].sequences : 0;
    pass->has_loss_mask = batch.loss_mask != NULL;
    double tokens = count_tokens(gpt, &batch);
    pass->report_scale = (float)(1.0 / (N * parts));
    pass->loss_scale = run->config.calculate_per_token_loss ? pass->report_scale
                       : tokens > 0                         ? (float)(1.0 / (tokens * parts))
                                                            : 0.0f;
    return tokens;
}

// Returns the ratio of all tokens to unmasked tokens, summed over the ranks of `comm`, or 0 if all
// tokens are masked. With --eod-mask-loss or --sft it is collective; otherwise it returns 1.
static double token_factor(Run *run, const GPT *gpt, const BatchSource *source, MPI_Comm comm) {
    double sums[2] = {(double)source->parts * gpt->B * gpt->T, source->tokens};
    if (!run->config.eod_mask_loss && !run->config.sft) return 1.0;
    peers_all_reduce(run_peers(run, comm), sums, 2, MPI_DOUBLE, MPI_SUM);
    return sums[1] > 0 ? sums[0] / sums[1] : 0.0;
}

// ===== the micro-batch loop ======================================================================

// Runs micro-batches through this rank's pipeline stage in the order of the 1F1B schedule: forward
// and backward, or forward only. Without pipeline parallelism each micro-batch runs forward, then
// backward. Losses accumulate in zero_loss_sum. Gradients accumulate, and ZeRO reduces a layer's
// gradients as soon as they are complete, while backward continues.
static void run_micro_batches(Run *run, GPT *gpt, BatchSource *source, int count, bool training) {
    Pass pass;
    if (gpt_needs_warm_up(gpt, training, &pass)) {
        load_micro_batch(run, gpt, source, &pass);
        gpt_warm_up(gpt, &pass);
    }
    PassSchedule schedule = gpt_schedule(gpt, count, training);
    while (gpt_next_pass(&schedule, &pass)) {
        if (pass.direction == FORWARD) {
            double tokens = load_micro_batch(run, gpt, source, &pass);
            if (pass.chunk == 0) source->tokens += tokens;
            gpt_forward_pass(gpt, &pass);
        } else {
            gpt_backward_pass(gpt, &pass);
        }
    }
    if (training) gpt_end_backward(gpt);
}

// ===== the training step =========================================================================

// Launches one iteration. The device works asynchronously: the host reads the status of a step
// (norm, loss, whether the update was applied) while the next one runs.
static void train_step(Run *run, GPT *gpt) {
    const Config *c = &run->config;
    int batch = config_global_batch_size(c, run->consumed_train);
    int row = c->micro_batch_size * c->dp_size, micro_batches = batch / row;
    run->site.iteration = ++run->iteration;
    run->site.phase = "forward and backward";
    timer_start(run->timers, TIMER_FORWARD_BACKWARD, run->compute);
    zero_step_begins(run->zero, run->iteration);
    BatchSource source = {SPLIT_TRAIN, elastic_first_sample(run), row, micro_batches, 0};
    run_micro_batches(run, gpt, &source, micro_batches, true);
    double factor = token_factor(run, gpt, &source, mesh_status_group(&run->mesh)->mpi);
    zero_set_factors(run->zero, factor, c->calculate_per_token_loss ? factor : 1.0);
    timer_stop(run->timers, TIMER_FORWARD_BACKWARD, run->compute);

    run->site.phase = "update";
    // Skipped steps do not advance the learning-rate schedule. The host does not know yet whether
    // the previous step was skipped, so it passes both learning rates, and the device picks one.
    int64_t skipped_n = run->scheduled,
            applied_n = run->scheduled + (run->status_unread ? run->step_batch : 0);
    zero_update(run->zero, schedule_lr(&run->schedule, applied_n), schedule_lr(&run->schedule, skipped_n),
                schedule_weight_decay(&run->schedule, run->consumed_train));
    fp8_update_scales(gpt);
    read_step_status(run, 1, false);
    run->status_unread = true;
    run->step_batch = batch;
    run->consumed_train += batch;
    run->interval.iterations++;
    run->interval.samples += batch;
    run->flops_so_far += megatron_flops(c, batch);
}

// ===== evaluation ================================================================================

// Returns the mean loss over the data-parallel ranks, summed in rank order. Only the last pipeline
// stage has losses; they are identical on its tensor-parallel ranks.
static double mean_loss(Run *run) {
    float own = 0.0f;
    int T = run->mesh.tp.size, D = run->config.dp_size, world = run->mesh.world.size;
    copy_to_host(run->compute, &own, zero_loss_sum(run->zero), sizeof own);
    stream_synchronize(run->compute);
    float *all = xcalloc((size_t)world, sizeof(float), "losses");
    peers_all_gather(run_peers(run, run->launch.world), &own, all, 1, MPI_FLOAT);
    double sum = 0.0;
    for (int d = 0; d < D; d++) sum += all[world - T * D + T * d];
    free(all);
    return sum / D;
}

// Returns the mean loss over --eval-iters global batches starting at sample `at`. The status of the
// latest step must have been read, because evaluation overwrites the loss. Ends early if run->stop
// is set.
static double evaluate(Run *run, GPT *gpt, int split, int64_t at, bool verbose) {
    const Config *c = &run->config;
    int row = c->micro_batch_size * c->dp_size, micro_batches = c->global_batch_size / row;
    long long iters = run_eval_iters(run, split);
    BatchSource source = {split, at, row, iters * micro_batches, 0};
    set_zero(run->compute, zero_loss_sum(run->zero), sizeof(float));
    if (verbose) log_line(run->log, "Evaluating on %lld samples", iters * c->global_batch_size);
    for (long long i = 0; i < iters && !run->stop.reason; i++) {
        if (verbose) log_line(run->log, "Evaluating iter %lld/%lld", i + 1, iters);
        run_micro_batches(run, gpt, &source, micro_batches, false);
        source.first += c->global_batch_size;
        run_poll_stop(run);
    }
    return mean_loss(run) * token_factor(run, gpt, &source, run->launch.world);
}

static const char *why_stopped(const Run *run) {
    switch (run->stop.reason) {
        case STOP_DURATION: return "timelimit reached";
        case STOP_SIGNAL: return "signal received";
        default: return "corrupt data";
    }
}

// Evaluates and logs the loss. As in Megatron-LM, each validation continues where the previous one
// would have ended without an early stop, so a resumed run sees the same samples. Returns false if
// the data was corrupt; the run then ends.
static bool evaluate_and_log(Run *run, GPT *gpt, int split, const char *suffix, bool verbose) {
    const Config *c = &run->config;
    if (run_eval_iters(run, split) <= 0 || run->stop.reason) return true;
    bool restart = split == SPLIT_TEST || c->full_validation;
    int64_t from_start = 0, *consumed = restart ? &from_start : &run->consumed_valid, at = *consumed;
    *consumed += c->eval_iters * c->global_batch_size;
    run->site.phase = "evaluate";
    timer_start(run->timers, TIMER_EVALUATE, run->compute);
    zero_use_outer(run->zero, true);
    double loss = evaluate(run, gpt, split, at, verbose);
    zero_use_outer(run->zero, false);
    timer_stop(run->timers, TIMER_EVALUATE, run->compute);
    if (run->stop.reason) {
        log_line(run->log, "Exiting during evaluation, %s", why_stopped(run));
        return data_sound(run);
    }
    char where[80];
    snprintf(where, sizeof where, "iteration %lld%s", (long long)run->iteration, suffix);
    log_phase_timers(run->log, run->timers, TIMER_EVALUATE, 1, run_peers(run, run->launch.world));
    log_validation(run->log, where, run->iteration, run->consumed_train, loss);
    return true;
}

static bool final_evaluation(Run *run, GPT *gpt) {
    bool sound = evaluate_and_log(run, gpt, SPLIT_VALID, " on validation set", true) &&
                 evaluate_and_log(run, gpt, SPLIT_TEST, " on test set", true);
    if (sound) eval_tasks(run, gpt);
    return sound;
}

// ===== the training loop =========================================================================

// Returns true if the anomaly guard ends the run because of non-finite losses or gradients, too
// many skipped steps or a corrupted message. With local steps each replica group has its own guard.
// The groups exchange the result when run_poll_stop reports an anomaly, and whenever the status of
// the latest step has been read.
static bool guard_ends_run(Run *run, bool status_read) {
    bool collective = run->mesh.replica_groups.size > 1 && (status_read || run->stop.reason == STOP_ANOMALY);
    if (collective) return !run_agreed(run, !run->guard.ended_at);
    if (!run->guard.ended_at || run->mesh.replica_groups.size > 1) return false;
    run->exit_code = run->error.code;
    run->site.iteration = run->guard.ended_at;
    run->site.phase = "update";
    if (run->launch.rank == 0) error_print(&run->site, run->error.what);
    return true;
}

static void save_and_leave(Run *run, const char *why, int exit_code) {
    if (run->stop.reason == STOP_SIGNAL) stop_ignore_launcher_signal(run_peers(run, run->launch.world));
    read_step_status(run, 0, false);
    if (guard_ends_run(run, true)) return;
    run->exit_code = exit_code;
    elastic_stopping(run);
    if (!save_checkpoint(run) || !advance_save(run, true)) return;
    elastic_contribute(run);
    log_datetime(run->log, "%s", why);
}

// Saves and leaves the loop if a signal, a time limit or --exit-interval asks for it. Called twice
// after each step: before a regular save to handle signals, and after it for the other reasons.
static bool leave_loop(Run *run, bool after_save) {
    char why[96];
    int code = EXIT_DONE;
    if (!after_save) {
        if (run->stop.reason != STOP_SIGNAL) return false;
        snprintf(why, sizeof why, "exiting program after receiving %s.", stop_signal_name(&run->stop));
        code = EXIT_STOPPED;
    } else if (run->stop.reason == STOP_DURATION) {
        double minutes = (monotonic_seconds() - run->started) / 60.0;
        snprintf(why, sizeof why, "exiting program after %.1f minutes", minutes);
    } else if (due(run->iteration, run->config.exit_interval)) {
        snprintf(why, sizeof why, "exiting program at iteration %lld", (long long)run->iteration);
    } else {
        return false;
    }
    save_and_leave(run, why, code);
    return true;
}

// Runs everything that is due after an iteration, in Megatron-LM's order: evaluation, signal, save,
// time limit, exit interval. Returns true to leave the loop.
static bool after_step(Run *run, GPT *gpt) {
    const Config *c = &run->config;
    int64_t i = run->iteration;
    Interruption from = {monotonic_seconds(), zero_traffic(run->zero)};
    bool scoring = due(i, c->eval_interval) && config_scores(c);
    bool evaluating = due(i, c->eval_interval) && run_eval_iters(run, SPLIT_VALID) > 0;
    bool saving = c->save && due(i, c->save_interval), verifying = due(i, c->verify_replicas_interval);
    bool measuring = zero_stats_due(run->zero);
    bool sampling = due(i, c->sample_interval) &&
                    i < c->train_iters;  // the last sample is written after training
    // Repair replicas before anything else reads the weights.
    if (verifying && !replicas_sound(run)) return true;
    if (measuring) zero_stats_report(run->zero, run->log, run_peers(run, run->launch.world));
    if (evaluating && !evaluate_and_log(run, gpt, SPLIT_VALID, "", false)) return true;
    if (scoring) eval_tasks(run, gpt);
    if (sampling) write_sample(run, gpt);
    if (leave_loop(run, false)) return true;
    if (saving && !save_checkpoint(run)) return true;
    if (leave_loop(run, true)) return true;
    if (evaluating || scoring || saving || verifying || measuring || sampling) interval_exclude(run, &from);
    return false;
}

// Returns true if the status of the latest step is needed now: for the log, an evaluation, a save,
// or the decision to exit. Per-step records (JSON, TensorBoard) are written one step late.
static bool needs_status(const Run *run) {
    const Config *c = &run->config;
    int64_t i = run->iteration;
    return due(i, c->log_interval) || due(i, c->eval_interval) || due(i, c->save_interval) ||
           due(i, c->exit_interval) || c->log_params_norm || c->log_num_zeros_in_grad || i >= c->train_iters;
}

// Returns true if training reached its end, false if it ended early (see run->exit_code).
static bool train(Run *run, GPT *gpt) {
    const Config *c = &run->config;
    if (run->iteration >= c->train_iters) {
        log_line(run->log, "the checkpoint is at iteration %lld of %lld, so nothing is left to train",
                 (long long)run->iteration, (long long)c->train_iters);
    }
    log_datetime(run->log, "before the start of training step");
    interval_begin(run);
    arm_node_recovery(run);
    while (run->iteration < c->train_iters && !elastic_ended(run)) {
        train_step(run, gpt);
        elastic_step(run);
        run_poll_stop(run);
        if (!data_sound(run) || (!run->stop.busy && !advance_save(run, false))) return false;
        bool status_read = needs_status(run);
        if (status_read) read_step_status(run, 0, false);
        if (guard_ends_run(run, status_read)) return false;
        if (due(run->iteration, c->log_interval)) interval_end(run);
        if (after_step(run, gpt)) return false;
    }
    log_datetime(run->log, "after training is done");
    elastic_finish(run);
    return save_checkpoint(run);
}

// ===== the program ===============================================================================

static void run_training(Run *run, GPT *gpt) {
    if (!start_run(run, gpt)) return;
    if (!run->config.skip_train && !train(run, gpt)) return;
    elastic_leave(run);
    if (!final_evaluation(run, gpt)) return;
    // A signal during the final evaluation only ends the run: the model is already saved.
    if (run->stop.reason == STOP_SIGNAL) run->exit_code = EXIT_STOPPED;
    else write_sample(run, gpt);
}

// Times a few training steps with some of the model's layers on this device (--plan-measure).
// --plan-network uses the measured FLOP rate.
static bool measure_flops(Run *run) {
    Run measured;
    GPT gpt;
    bool ok = measurement_begin(run, &measured, &gpt);
    for (int i = 0; ok && i < MEASURE_WARM_UP_STEPS + MEASURE_STEPS; i++) {
        if (i == MEASURE_WARM_UP_STEPS) timer_take_seconds(measured.timers, TIMER_FORWARD_BACKWARD);
        train_step(&measured, &gpt);
    }
    measurement_end(run, &measured, &gpt, ok);
    return ok;
}

// Plans the run, then runs --plan, the data checks or training, depending on the flags.
static void plan_and_run(Run *run, GPT *gpt, double limit) {
    bool ok = run_agreed(run, plan_run(run, gpt));
    run->site.rank = run->launch.rank;
    set_thread_site(&run->site);
    Peers world = run_peers(run, run->launch.world);
    ok = ok && run_agreed(run, same_flags(&run->config, world, &run->error));
    if (!ok) return;
    watchdog_open(&run->site, run->launch.host, run->launch.size, limit);
    if (run->config.plan_measure && !run_agreed(run, measure_flops(run))) return;
    if (run->config.plan) {
        run_agreed(run, run->launch.rank != 0 || plan_report(&run->config, &run->mesh, stdout, &run->error));
    } else if (run->config.check_data || run->config.inspect_data >= 0) {
        run_look_at_data(run);
    } else {
        run_training(run, gpt);
        advance_save(run, true);  // finish an asynchronous save, for whatever reason the run ended
        node_recovery_disarm(&run->site);
    }
}

int train_gpt(int argc, char **argv) {
    Run run;
    GPT gpt;
    char notes[4096] = "";
    report_illegal_instructions();
    run_init(&run);
    memset(&gpt, 0, sizeof gpt);
    bool parsed = config_parse(&run.config, argc, argv, notes, sizeof notes, &run.error);
    if (parsed && (run.config.help || run.config.version)) return run_answer(&run.config, argv[0]);

    // --plan and the data checks have nothing to save: signals end the process as usual.
    bool trains = parsed && !run.config.plan && !run.config.check_data && run.config.inspect_data < 0;
    if (trains) stop_catch_signals();
    signal(SIGXFSZ, SIG_IGN);          // write(2) returns an error at the file size limit
    signal(SIGPIPE, SIG_IGN);          // a closed log pipe must not end the run
    setvbuf(stdout, NULL, _IOLBF, 0);  // write whole lines at once, even into a pipe or file
    double limit = trains ? 60.0 * run.config.distributed_timeout_minutes : 0.0;
    watchdog_mpi_starting(&run.site, limit);
    launch_init(&run.launch, &argc, &argv);
    if (run_agreed(&run, parsed)) {
        if (run.launch.rank == 0) fputs(notes, stdout);
        plan_and_run(&run, &gpt, limit);
    }
    int code = run.exit_code;
    tp_close(&gpt.tp);
    run_close(&run);
    gpt_free(&gpt);
    set_thread_site(NULL);
    watchdog_mpi_ending(&run.site, limit, code);
    launch_finalize(&run.launch);
    watchdog_close(&run.site);
    node_failure_free(run.site.node_failure);
    return code;
}
