// The log: Megatron-LM's lines with this program's fields appended, JSON lines, and TensorBoard
// events. Rank 0 prints; in Megatron-LM, the last rank prints the loss lines. The Log
// of any other rank prints nothing.
//
// JSON lines (--log-jsonl, built by json_line.h): one object per line, "kind" first.
// - Numbers read back bit-exactly. NaN and infinity, which JSON lacks, are null, with their name in
//   "<name>_text".
// - Everything that depends on the clock or the machine's speed is in the object "timing". Two runs
//   that computed the same have equal lines once "timing" is removed.
// - A resumed run appends. The last line of an iteration is the valid one.
//
// start     version, commit, libraries, device, world_size, nodes, parameters, arguments {...};
//           timing {datetime, unix_s, host, pid}
// train     every iteration: iteration, consumed_samples, loss, grad_norm, lr,
//           global_batch_size, skipped
// interval  every --log-interval: iteration, iterations, consumed_samples, loss (mean over applied
//           steps; omitted if there are none, unless it is not finite), grad_norm, lr,
//           global_batch_size, skipped, nan, inter_node_bytes, intra_node_bytes (per step),
//           model_parallel_bytes (with tensor or pipeline parallelism), epoch;
//           timing {elapsed_ms, tokens_per_second, tflops_per_gpu, mfu, exposed_comm_ms and its
//           parts exposed_gradients_ms and exposed_weights_ms (on the rank that waited least),
//           exposed_most_ms (on the rank that waited most), seconds_left}
// timers    iteration; timing {"<timer>": [min ms, max ms], ...} per iteration, over ranks
// phases    the same, in total, for phases outside the loop (setup, evaluate, checkpoints)
// memory    once: iteration, planned_bytes and allocated_bytes of the device, planned host_bytes;
//           timing {free_before_bytes, taken_before_bytes, taken_bytes, beside_plan_bytes} of
//           rank 0
// quantization_error   iteration, gradient_error, exact_gradient_norm, replica_error
// sample    iteration, text: --sample-prompt
// spike     iteration, what ("loss" | "gradient norm"), value, limit, skipped: the anomaly guard
// repair    iteration, bucket, ranks, from (rank; null: the master weights): replicas.c
// valid     iteration, consumed_samples, split ("valid" | "test"), where, loss, ppl
// task      iteration, consumed_samples, task, n, acc, acc_stderr; acc_norm and acc_norm_stderr of
//           multiple-choice tasks, else perplexity: --eval-tasks
// eval_sample  iteration, task, sample (index in the task), log_likelihoods of its choices, gold
//           (index of the correct one) or greedy: --log-eval-samples
#pragma once
#include <stdio.h>

#include "llmc/config/config.h"
#include "llmc/base/json_line.h"
#include "llmc/log/step_report.h"
#include "llmc/log/timers.h"
LLMC_BEGIN

typedef struct Log Log;

// active: rank 0. Opens config->tensorboard_dir and config->log_jsonl (appending) if set, and
// creates their directories. Keeps config and site (may be NULL), and reports writes to standard
// output to the site's heartbeat. Error: NULL and EXIT_ENVIRONMENT. If a file cannot be written
// later, one warning is printed and training continues (append.h).
Log *log_open(const Config *config, int world_size, bool active, const Site *site, Error *err);
void log_close(Log *log);
// Prints a line to stdout on rank 0, flushed.
void log_line(Log *log, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Prints lines between two rules of this width.
void log_framed(Log *log, const char *lines, size_t columns);
// Prints Megatron-LM's "[<what>] datetime: YYYY-MM-DD HH:MM:SS ". what: "before the start of
// training step", "exiting program at iteration 200", ...
void log_datetime(Log *log, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Prints Megatron-LM's memory line, once after the first iteration line, in MB (2^20). Its four
// values (allocated, reserved, and their maxima) are equal here, because the memory plan is
// allocated once.
void log_memory(Log *log, int64_t iterations, double bytes);
// Writes the JSON line "start", and every argument as a TensorBoard text. parameters: trainable
// parameters of the whole model. device: its name.
void log_start(Log *log, int64_t parameters, int nodes, const char *device);
// Prints Megatron-LM's iteration line with this program's fields, or the short one (--log-line),
// and a note when an epoch begins. Writes the JSON line "interval" and TensorBoard scalars of the
// interval.
void log_iteration(Log *log, const IntervalReport *report);
// Writes TensorBoard scalars (every --tensorboard-log-interval) and the JSON line "train" (always)
// of an iteration. Warns if a step was skipped because its loss or norm is not finite. (The anomaly
// guard reports spikes.)
void log_step_scalars(Log *log, const StepReport *report);
// Prints the timer table after the iteration line as Megatron-LM does, per iteration. Collective
// over peers; prints on rank 0. Also writes it to TensorBoard with --log-timers-to-tensorboard.
void log_timers(Log *log, Timers *timers, int64_t iteration, int64_t iterations, Peers peers);
// The same in total, for `count` phases outside the loop (evaluate, save-checkpoint, setup).
// Collective over peers.
void log_phase_timers(Log *log, Timers *timers, Timer first, int count, Peers peers);
// Prints Megatron-LM's framed validation lines. where: "iteration 100", "iteration 100 on
// validation set", "... on test set". Also writes TensorBoard's "lm loss validation". Test results
// are "lm loss test", which Megatron-LM mixes up with the former.
void log_validation(Log *log, const char *where, int64_t iteration, int64_t consumed_samples, double loss);
// Writes a TensorBoard text (its tag ends in "/text_summary") and a scalar.
void log_text(Log *log, const char *tag, int64_t step, const char *text);
void log_scalar(Log *log, const char *tag, int64_t step, double value);
// Writes a scalar by iteration, and by samples as "<tag> vs samples", as Megatron-LM does.
void log_scalar_twice(Log *log, const char *tag, int64_t iteration, int64_t samples, double value);
// Closes a JSON line started by json_begin (json_line.h), appends it to the file (rank 0, with
// --log-jsonl) and frees it. For kinds owned by other modules ("memory", "sample", ...). Values
// that depend on the clock belong in a "timing" object.
void log_json(Log *log, Text *json);

// --- task_lines.c: results of --eval-tasks -------------------------------------------------------

// Result of a task.
typedef struct TaskFigures {
    const char *task;
    int64_t samples;
    bool choices;            // multiple choice: has acc_norm, else perplexity
    double acc, acc_stderr;  // fraction of correct samples and its standard error
    double acc_norm, acc_norm_stderr;
    double perplexity;  // exp(-(mean log-likelihood of the continuations))
} TaskFigures;

// Prints framed lines, and writes for each task the JSON line "task" and scalars such as "task
// arc_easy acc".
void log_tasks(Log *log, int64_t iteration, int64_t consumed_samples, const TaskFigures *tasks, int count);

LLMC_END
