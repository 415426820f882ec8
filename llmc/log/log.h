// The log: Megatron-LM's lines with additional fields, JSON lines, and TensorBoard events. Only
// rank 0 prints. (In Megatron-LM, the last rank prints the loss lines.)
//
// JSON lines (--log-jsonl, built by json_line.h) have one object per line, with "kind" first.
// - Numbers read back bit-exactly. NaN and infinity, which JSON lacks, are written as null, with
//   their name in an additional field "<name>_text".
// - Values that depend on the clock or the machine's speed are in the object "timing". Without
//   "timing", two runs with the same results have identical lines.
// - A resumed run appends. If an iteration has several lines, the last one is valid.
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
//           timing, of rank 0 {free_before_bytes, taken_before_bytes, taken_bytes,
//           beside_plan_bytes}
// quantization_error   iteration, gradient_error, exact_gradient_norm, replica_error
// groups    --replica-group, every --log-interval: iteration; timing {groups, rounds, own_rounds,
//           sync_seconds and stale_steps (means from offers to their rounds), busy_seconds (of the
//           main thread), waited_seconds, sent_mb, received_mb, goodput}
// sample    iteration, text: --sample-prompt
// spike     iteration, what ("loss" | "gradient norm"), value, limit, skipped: the anomaly guard
// repair    iteration, bucket, ranks (repaired), from (source rank; null: the master weights):
//           replicas.c
// valid     iteration, consumed_samples, split ("valid" | "test"), where, loss, ppl
// task      iteration, consumed_samples, task, n, acc, acc_stderr; acc_norm and acc_norm_stderr of
//           multiple-choice tasks, else perplexity: --eval-tasks
// eval_text  iteration, consumed_samples, text (file name), tokens, words, loss (mean over
//           tokens - 1 targets), ppl, adjusted_ppl, token_ratio: --eval-text
// eval_sample  iteration, task, sample (index in the task), log_likelihoods of its choices, gold
//           (index of the correct one) or greedy; the windows of texts only have the likelihood:
//           --log-eval-samples
#pragma once
#include <stdio.h>

#include "llmc/config/config.h"
#include "llmc/base/json_line.h"
#include "llmc/log/step_report.h"
#include "llmc/log/timers.h"
LLMC_BEGIN

typedef struct Log Log;

// Opens config->tensorboard_dir and config->log_jsonl (appending) if set, and creates their
// directories. Keeps pointers to config and site. active: true on rank 0. Unless site is NULL,
// writes to standard output, which may block, are reported to its watchdog. Returns NULL on error
// (EXIT_ENVIRONMENT). If a write fails later, prints one warning, and training continues
// (append.h).
Log *log_open(const Config *config, int world_size, bool active, const Site *site, Error *err);
void log_close(Log *log);
// Prints a line to stdout on rank 0 and flushes it.
void log_line(Log *log, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Returns exp(loss). Caps the loss at 20, as Megatron-LM does; NaN stays NaN.
double log_perplexity(double loss);
// Prints lines between two horizontal rules of `columns` characters.
void log_framed(Log *log, const char *lines, size_t columns);
// Prints Megatron-LM's "[<what>] datetime: YYYY-MM-DD HH:MM:SS ". what: "before the start of
// training step", "exiting program at iteration 200", ...
void log_datetime(Log *log, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Prints Megatron-LM's memory line, in MB (2^20). Call once, after the first iteration line. Its
// four values (allocated, reserved, and their maxima) are equal here, because the memory plan is
// allocated once.
void log_memory(Log *log, int64_t iterations, double bytes);
// Writes the JSON line "start", and every argument as a TensorBoard text. parameters: number of
// trainable parameters of the whole model. device: name of the device.
void log_start(Log *log, int64_t parameters, int nodes, const char *device);
// Prints Megatron-LM's iteration line with additional fields, or the short line (--log-line), and a
// note when an epoch begins. Writes the JSON line "interval" and TensorBoard scalars.
void log_iteration(Log *log, const IntervalReport *report);
// Writes an iteration's JSON line "train", and its TensorBoard scalars every
// --tensorboard-log-interval. Warns if the step was skipped because its loss or norm is not finite.
void log_step_scalars(Log *log, const StepReport *report);
// Prints the timer table with times per iteration, like Megatron-LM, after the iteration line.
// Writes it to TensorBoard with --log-timers-to-tensorboard. Prints on rank 0. Collective over
// peers.
void log_timers(Log *log, Timers *timers, int64_t iteration, int64_t iterations, Peers peers);
// Prints a table with total times of `count` phases outside the loop (evaluate, save-checkpoint,
// setup). Collective over peers.
void log_phase_timers(Log *log, Timers *timers, Timer first, int count, Peers peers);
// Prints Megatron-LM's framed validation lines and writes TensorBoard scalars. where: "iteration
// 100", "iteration 100 on validation set" or "iteration 100 on test set". Scalars of the test set
// are named "lm loss test"; Megatron-LM calls them "lm loss validation" too.
void log_validation(Log *log, const char *where, int64_t iteration, int64_t consumed_samples, double loss);
// Write a TensorBoard text, whose tag must end in "/text_summary", and a scalar.
void log_text(Log *log, const char *tag, int64_t step, const char *text);
void log_scalar(Log *log, const char *tag, int64_t step, double value);
// Writes a scalar twice, like Megatron-LM: over iterations, and over samples as "<tag> vs samples".
void log_scalar_twice(Log *log, const char *tag, int64_t iteration, int64_t samples, double value);
// Closes a JSON line started by json_begin (json_line.h), appends it to the file (rank 0, with
// --log-jsonl) and frees it. For kinds that other modules write ("memory", "sample", ...).
void log_json(Log *log, Text *json);

// --- task_lines.c: results of --eval-tasks and --eval-text ---------------------------------------

// Result of an evaluation task.
typedef struct TaskFigures {
    const char *task;
    int64_t samples;
    bool choices;            // multiple choice, which has acc_norm; other tasks have perplexity
    double acc, acc_stderr;  // fraction of correct samples and its standard error
    double acc_norm, acc_norm_stderr;
    double perplexity;  // exp(-(mean log-likelihood of the continuations))
} TaskFigures;

// Prints the results in a frame. Writes a JSON line "task" and scalars such as "task arc_easy acc"
// for each task. No-op if count is 0.
void log_tasks(Log *log, int64_t iteration, int64_t consumed_samples, const TaskFigures *tasks, int count);

// Result of a text, as in Megatron-LM's tasks/zeroshot_gpt.
typedef struct TextFigures {
    const char *text;
    int64_t tokens, words;
    double loss;         // mean over the tokens - 1 targets
    double token_ratio;  // (tokens - 1) / (words - 1)
} TextFigures;

// Does the same for texts: a JSON line "eval_text" and scalars such as "text wiki.txt loss". The
// perplexity is exp(loss), the adjusted perplexity exp(loss * token_ratio); see log_perplexity.
void log_texts(Log *log, int64_t iteration, int64_t consumed_samples, const TextFigures *texts, int count);

LLMC_END
