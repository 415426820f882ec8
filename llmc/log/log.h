// What the user sees: Megatron-LM's log lines with this program's fields appended, JSON lines, and
// TensorBoard events. Rank 0 prints. (In Megatron-LM the last rank prints the loss lines.) Every
// other rank holds a Log that prints nothing. Called by train_gpt.c, llmc/run/, and those who get
// the Log.
//
// JSON lines (--log-jsonl, built by json_line.h): one object per line, "kind" first.
// - Numbers are written so that reading them back gives the same bits. NaN and infinity, which JSON
//   lacks, are null, with the word in "<name>_text".
// - What depends on the clock or the machine's speed stands inside the object "timing", and nowhere
//   else. Two runs that computed the same have equal lines once "timing" is removed.
// - A resumed run appends. The later line of an iteration is the valid one.
//
// start     version, commit, libraries, device, world_size, nodes, parameters, arguments {...};
//           timing {datetime, unix_s, host, pid}
// train     every iteration: iteration, consumed_samples, loss, grad_norm, lr,
//           global_batch_size, skipped
// interval  every --log-interval: iteration, iterations, consumed_samples, loss (mean over applied
//           steps; without any it is left out, unless it is not finite), grad_norm, lr,
//           global_batch_size, skipped, nan, inter_node_bytes, intra_node_bytes (per step),
//           model_parallel_bytes (with tensor or pipeline parallelism), epoch;
//           timing {elapsed_ms, tokens_per_second, tflops_per_gpu, mfu, exposed_comm_ms and its
//           parts exposed_gradients_ms and exposed_weights_ms (on the rank that waited least),
//           exposed_most_ms (on the one that waited most), seconds_left}
// timers    iteration; timing {"<timer>": [min ms, max ms], ...} of one iteration, over ranks
// phases    the same for phases outside the loop (setup, evaluate, checkpoints), in all
// memory    once: iteration, planned_bytes and allocated_bytes of the device, host_bytes planned;
//           timing {free_before_bytes, taken_before_bytes, taken_bytes, beside_plan_bytes} of
//           rank 0
// quantization_error   iteration, gradient_error, exact_gradient_norm, replica_error (probe.h)
// sample    iteration, text: --sample-prompt
// spike     iteration, what ("loss" | "gradient norm"), value, limit, skipped: sentry.h
// repair    iteration, bucket, ranks, from (rank, null: the master weights): replicas.h
// valid     iteration, consumed_samples, split ("valid" | "test"), where, loss, ppl
// task      iteration, consumed_samples, task, n, acc, acc_stderr, acc_norm and acc_norm_stderr of
//           choices, else perplexity: --eval-tasks
// eval_sample  iteration, task, sample (in the task, from 0), log_likelihoods of its choices, gold
//           (the right one's number) or greedy: --log-eval-samples
#pragma once
#include <stdio.h>

#include "llmc/config/config.h"
#include "llmc/config/flops.h"
#include "llmc/base/json_line.h"
#include "llmc/log/report.h"
#include "llmc/log/timers.h"
LLMC_BEGIN

typedef struct Log Log;

// active: rank 0. Opens config->tensorboard_dir and config->log_jsonl (append) when set, and makes
// their folders. config is kept. So is site (may be NULL), whose heartbeat is told while standard
// output is written. Error: NULL and EXIT_ENVIRONMENT. When a file cannot be written later, one
// warning is printed and training goes on (append.h).
Log *log_open(const Config *config, int world_size, bool active, const Site *site, Error *err);
void log_close(Log *log);
// printf and a newline to stdout by rank 0 only, flushed.
void log_line(Log *log, const char *format, ...) __attribute__((format(printf, 2, 3)));
// One warning per kind of flag that does nothing where there is one data-parallel rank.
void log_idle_flags(Log *log);
// Megatron-LM's "[<what>] datetime: YYYY-MM-DD HH:MM:SS ". what: "before the start of training
// step", "exiting program at iteration 200", ...
void log_datetime(Log *log, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Megatron-LM's memory line, printed once after the first iteration line, in MB (2^20). Its four
// figures (allocated, reserved, and the most of both so far) are one here: the plan is allocated
// once, before training.
void log_memory(Log *log, int64_t iterations, double bytes);
// The "start" JSON line, and every argument as a TensorBoard text. parameters: trainable ones of
// the whole model. device: its name.
void log_start(Log *log, int64_t parameters, int nodes, const char *device);
// Megatron-LM's iteration line with this program's fields, or the short one (--log-line). A note
// when the data begin again. The JSON line "interval", and TensorBoard scalars of the interval.
void log_iteration(Log *log, const IntervalReport *report);
// TensorBoard scalars and the JSON line "train" of a single iteration, when due by
// --tensorboard-log-interval (JSON: every iteration). Warns when a step was skipped for a loss or
// norm that is not finite. (Of spikes the sentry tells.)
void log_step_scalars(Log *log, const StepReport *report);
// The timer table after the iteration line, as Megatron-LM prints it: times per iteration.
// Collective over peers; prints on rank 0; TensorBoard with --log-timers-to-tensorboard.
void log_timers(Log *log, Timers *timers, int64_t iteration, int64_t iterations, Peers peers);
// The same table for phases outside the loop (evaluate, save-checkpoint, setup), undivided.
// Collective over peers.
void log_phase_timers(Log *log, Timers *timers, const Timer *which, int count, Peers peers);
// Megatron-LM's framed validation lines. where: "iteration 100", "iteration 100 on validation set",
// "... on test set". TensorBoard's "lm loss validation". Results on the test set go to "lm loss
// test", which Megatron-LM mixes up with the former.
void log_validation(Log *log, const char *where, int64_t iteration, int64_t consumed_samples, double loss);
// A TensorBoard text (its tag ends in "/text_summary") and a scalar of any name.
void log_text(Log *log, const char *tag, int64_t step, const char *text);
void log_scalar(Log *log, const char *tag, int64_t step, double value);
// Closes a JSON line that json_begin (json_line.h) began, appends it to the file (rank 0, with
// --log-jsonl) and frees it. For the kinds that the caller's module owns ("memory", "sample", ...).
// Values that depend on the clock belong into a "timing" object.
void log_json(Log *log, Text *json);

LLMC_END
