// A training run: configuration, ranks, device, data, counters, logs and checkpoints. train_gpt.c
// creates one and runs the steps; the model itself is a GPT (llmc/model/gpt.h).
//
//   run.c               creation, agreement among ranks, time limits, cleanup
//   setup.c             from flags to the first step: mesh, device, memory, groups, data
//   run_report.c        log lines: startup, steps, intervals
//   resume.c            saving, loading and restoring checkpoints
//   surviving_groups.c  recovery from a lost node with --local-steps
//   sample.c            --sample-prompt
//   eval_tasks.c        --eval-tasks
//   same_run.c          ranks must have the same program, flags and data
//   data_options.c      from flags to loader options
//   measure.c           --plan-measure
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/checkpoint/saver.h"
#include "llmc/comm.h"
#include "llmc/config/config.h"
#include "llmc/data/loader.h"
#include "llmc/data/tasks.h"
#include "llmc/data/tokenizer.h"
#include "llmc/log/log.h"
#include "llmc/log/progress.h"
#include "llmc/ranks/devices.h"
#include "llmc/ranks/stop.h"
#include "llmc/model/gpt.h"
#include "llmc/plan/memory_fit.h"
#include "llmc/state/stats.h"
#include "llmc/state/guard.h"
#include "llmc/state/zero.h"
LLMC_BEGIN

// Statistics since the last log line.
typedef struct Interval {
    int64_t iterations, samples, skipped, nan;
    double loss_sum;       // over applied steps
    double seconds_start;  // excludes evaluation and checkpoints
    Traffic traffic;       // counters at the start
} Interval;

typedef struct Run {
    Config config;
    Launch launch;
    Mesh mesh;          // placement of ranks, communication groups
    Pipeline pipeline;  // links to the neighboring stages
    OwnDevice own;      // this rank's device
    Site site;
    Error error;  // first error of this rank; why the run ends early
    int exit_code;
    Tokenizer *tokenizer;  // NULL if not needed
    Device *device;
    Stream *compute;
    Lanes lanes;  // communication streams
    Timers *timers;
    MemoryPlan memory_plan;
    Zero *zero;
    const Tensor *whole;  // (whole_count) tensors of the unsplit model, as in checkpoints
    int whole_count;
    Loader *loader;
    TaskSet tasks;            // --eval-tasks
    int64_t tasks_scored_at;  // latest iteration with scores; -1: none
    Log *log;
    Progress *progress;
    Schedule schedule;
    // counters of the whole run, saved in checkpoints
    int64_t iteration, consumed_train, consumed_valid;
    int64_t split_samples[2];  // size of SPLIT_TRAIN and SPLIT_VALID; 0: unknown
    int64_t scheduled;         // samples of applied steps; position in the learning-rate schedule
    AnomalyGuard guard;
    double flops_so_far;
    bool status_unread;  // the host has not read the status of the latest step yet
    int step_batch;      // samples of the latest step launched
    StepStatus last;     // latest status read
    StepReport report;   // its log record
    Interval interval;
    double started;            // time of process start
    int64_t last_saved;        // iteration
    int64_t resumed_from;      // iteration of the checkpoint in --save that this run resumed from; -1: none
    SaveLock save_lock;        // rank 0: lock on the --save folder
    int64_t outer_applied_at;  // from the loaded checkpoint (RunState)
    Saver saver;
    Stop stop;           // why the run stops early
    Memory memory;       // planned and available memory
    int64_t parameters;  // number of parameters of the whole model; set by report_start
} Run;

// --- run.c ---------------------------------------------------------------------------------------

// Prints the output of --help or --version and returns the exit code. Needs no MPI; under mpirun
// only the first rank prints.
int run_answer(const Config *config, const char *program);
// Initializes an empty run.
void run_init(Run *run);
// Frees everything that the run holds, even after a partial setup.
void run_close(Run *run);
// Returns the Peers of a communicator, with this run's time limit and site.
Peers run_peers(Run *run, MPI_Comm comm);
// Barrier over all ranks, with the run's time limit.
void run_barrier(Run *run);
// Returns true if `ok` is true on every rank. Otherwise copies the error of the first failing rank
// to every rank's run->error, sets run->exit_code, and that rank prints the error. Collective over
// the world.
bool run_agreed(Run *run, bool ok);
// Updates run->stop, with the same result on every rank. Called after each step and each batch of
// an evaluation. Collective.
void run_poll_stop(Run *run);

// --- setup.c, in calling order -------------------------------------------------------------------

// Builds the mesh, opens the tokenizer and completes the config. Needs no device. Errors:
// EXIT_USAGE, EXIT_DATA, EXIT_ENVIRONMENT.
bool run_place(Run *run);
// Opens device and log and allocates the memory plan. Returns false on every rank if one failed.
bool run_allocate(Run *run);
// Locks the --save folder, creates the communication groups and starts ZeRO. Returns false on every
// rank if one failed.
bool run_connect(Run *run);
// Opens the loader. Call after the checkpoint has been restored, because the order of the data
// depends on the total number of samples. Not collective over the world: the caller agrees on
// errors.
bool run_open_data(Run *run);
// run_open_data on all ranks, with consistency checks and log lines. Collective.
bool run_setup_data(Run *run);
// Returns the number of global batches of one evaluation: --eval-iters, or with --full-validation
// the whole validation split without an incomplete last batch. 0 if the split has no data.
int64_t run_eval_iters(const Run *run, int split);
// Sets up schedule, progress log and saver. Last step before training.
bool run_prepare_saves(Run *run);
// Handles --inspect-data and --check-data on rank 0.
void run_look_at_data(Run *run);

// Does everything that needs no device: mesh, this rank's part of the model, memory plan. gpt must
// be zeroed; free it with gpt_free. Errors: see run_place, gpt_check and zero_plan.
bool plan_run(Run *run, GPT *gpt);
// Opens the device, connects the ranks, loads weights and data. Returns false on every rank if one
// failed.
bool start_run(Run *run, GPT *gpt);

// Parts of start_run that measure.c uses too. gpt_connect attaches the GPT to the run's resources,
// after run_connect. draw_weights initializes the weights. Collective over the world.
void gpt_connect(GPT *gpt, Run *run);
void draw_weights(Run *run, GPT *gpt);

// --- data_options.c ------------------------------------------------------------------------------

// The loader does not know the Config. Used by setup.c and by tests of the loader.

// Returns the loader options of a config. Strings and arrays are borrowed from it.
LoaderOptions loader_options(const Config *config, int dp_rank, int dp_size);
// Adjusts the options of a resumed run. If batch sizes, training length or evaluation intervals
// have changed, each split gets as many more samples as the rest of the run needs. If nothing has
// changed, the numbers stay the same, and so does the order of the data. consumed_*: samples used
// so far.
void loader_options_resume(LoaderOptions *options, const Config *config, int64_t iteration,
                           int64_t consumed_train, int64_t consumed_valid);

// --- run_report.c --------------------------------------------------------------------------------

// Logs program, mesh, flags and sizes before training.
void report_start(Run *run);
void interval_begin(Run *run);
// Start of an interruption of training: an evaluation, a save.
typedef struct Interruption {
    double seconds;
    Traffic traffic;
} Interruption;
// Excludes time and traffic since `from` from the interval. Collective.
void interval_exclude(Run *run, const Interruption *from);
// Logs the interval. The status of its last step must have been read. Collective.
void interval_end(Run *run);
// Reads the status of a step and advances counters, guard and per-step log. which: 0 for the latest
// step launched, 1 for the one before. alone: without collective figures, after a node failure.
void read_step_status(Run *run, int which, bool alone);

// --- resume.c ------------------------------------------------------------------------------------

// Saves a checkpoint, in the background with --async-save. Returns false on every rank if one
// failed; the run then ends.
bool save_checkpoint(Run *run);
// Advances a background save by one part, or finishes it.
bool advance_save(Run *run, bool to_the_end);
// Saves the state of the surviving replica groups after a node failure and waits for the files.
// run->launch.world and the mesh must already exclude the lost node. Returns true without saving if
// the state is saved already.
bool save_surviving_groups(Run *run);
// Compares replicated weights across ranks and repairs differences. Returns false if that fails.
bool replicas_sound(Run *run);
// Loads from --load by Megatron-LM's rules. LOAD_FRESH: there is no checkpoint (no tracker file and
// no checkpoint folders), and the caller initializes the weights. The same command line therefore
// starts and resumes a run.
typedef enum Loaded { LOAD_FAILED, LOAD_FRESH, LOAD_RESTORED } Loaded;
Loaded load_checkpoint(Run *run);

// --- surviving_groups.c --------------------------------------------------------------------------

// Arms node-failure recovery: if a node is lost, the surviving replica groups save a checkpoint
// before the job ends. No-op unless --local-steps and --save are used. Collective.
void arm_node_recovery(Run *run);

// --- sample.c ------------------------------------------------------------------------------------

// --sample-prompt: generates text with the current weights and logs it on rank 0. Has no effect on
// training. Collective.
void write_sample(Run *run, GPT *gpt);

// --- measure.c: --plan-measure -------------------------------------------------------------------

// Measures the device's FLOP rate on a few of the model's layers. train_gpt.c runs the steps
// between measurement_begin and measurement_end.

// Warm-up steps select kernels and fill caches; they are not timed.
enum { MEASURE_WARM_UP_STEPS = 3, MEASURE_STEPS = 5 };

// Sets up a separate run `measured` and its model, with few layers and mock data. run must have
// been planned and have one rank. Errors: EXIT_USAGE with several ranks, otherwise see
// start_run. measurement_end must follow in any case.
bool measurement_begin(Run *run, Run *measured, GPT *gpt);
// Frees `measured` and gpt. Copies the error of the measured run to run->error. ok: sets
// run->config.plan_tflops to the TFLOP/s of forward and backward in the last MEASURE_STEPS steps.
void measurement_end(Run *run, Run *measured, GPT *gpt, bool ok);

// --- eval_tasks.c: --eval-tasks ------------------------------------------------------------------

// Scores multiple-choice and continuation tasks (llmc/data/tasks.h) at each evaluation and at the
// end of the run. acc, acc_norm and perplexity are defined as in EleutherAI's
// lm-evaluation-harness.
//
// Requests are batched and the batches distributed over the data-parallel ranks. A batch has as
// many tokens as a micro-batch, in sequences of one length: the sequence length, a half, a quarter,
// and so on. Batches depend only on the files, so log-likelihoods are bitwise identical for any
// number of data-parallel ranks. Metrics are summed in file order.

// Reads the files on rank 0 and broadcasts the samples. No-op unless --eval-tasks is given.
// Collective; the same error on every rank (EXIT_DATA).
bool eval_tasks_open(Run *run);
// Scores all samples with the current weights and logs the metrics, at most once per iteration.
// Ends early without logging if run->stop is set. Collective.
void eval_tasks(Run *run, GPT *gpt);

// --- same_run.c ----------------------------------------------------------------------------------

// Checks before the first step that all machines have the same program, flags, data and checkpoint
// folders. Otherwise a machine with an old copy would silently train with another learning rate or
// other data. Collective over world; every rank compares itself with rank 0 and returns its own
// result; the caller makes the ranks agree.

// Call after plan_run, before memory is allocated or data is read. Errors: EXIT_ENVIRONMENT for
// another version, commit or backend; EXIT_USAGE for the first flag that differs. Paths may differ
// between machines. The number of paths may not, except for outputs that only rank 0 writes.
bool same_flags(const Config *config, Peers world, Error *err);
// Compares the data shards of every split: sizes, first and last bytes of the files, weights.
// Error: EXIT_DATA. Always true for mock data.
bool same_data(const Loader *loader, Peers world, Error *err);
// Checks that every rank sees a temporary file that rank 0 creates in the folder, within 5 seconds
// to allow for slow network file systems. Error: EXIT_CHECKPOINT. Returns true if rank 0 cannot
// create the file; the first save reports why.
bool same_save_folder(const char *directory, Peers world, Error *err);
// Checks that this rank sees the checkpoint if rank 0 does. Error: EXIT_CHECKPOINT.
bool same_checkpoint(const char *directory, int64_t iteration, Peers world, Error *err);

LLMC_END
