// A training run: configuration, ranks, device, data, counters, logs and checkpoints. train_gpt.c
// creates one and runs the steps; the model itself is a GPT (llmc/model/gpt.h).
//
//   run.c               creation, agreement among ranks, time limits, cleanup
//   setup.c             setup before the first step: mesh, device, memory, groups, data
//   run_report.c        log lines of startup, steps and intervals
//   resume.c            saving, loading and restoring checkpoints
//   surviving_groups.c  recovery from a lost node with --local-steps
//   elastic.c           --replica-group: the whole job is one group of a larger run (elastic.h)
//   sample.c            --sample-prompt
//   eval_tasks.c        --eval-tasks, --eval-text
//   same_run.c          checks that all ranks have the same program, flags and data
//   data_options.c      translates flags to loader options
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
    double seconds_start;  // start time, moved forward by the time of evaluations and saves
    Traffic traffic;       // counters at the start of the interval
} Interval;

typedef struct Elastic Elastic;  // elastic.h

typedef struct Run {
    Config config;
    Launch launch;
    Mesh mesh;          // placement of ranks, communication groups
    Pipeline pipeline;  // links to the neighboring stages
    OwnDevice own;      // this rank's device
    Site site;
    Error error;  // first error of this rank, which ends the run
    int exit_code;
    Tokenizer *tokenizer;  // NULL if not needed
    Device *device;
    Stream *compute;
    Lanes lanes;  // communication streams
    Timers *timers;
    MemoryPlan memory_plan;
    Zero *zero;
    GPT *gpt;             // set by gpt_connect; owned by the caller
    const Tensor *whole;  // (whole_count) tensors of the unsplit model, which checkpoints contain
    int whole_count;
    BaseModel base;  // with LoRA: the frozen model, once loaded
    Loader *loader;
    TaskSet tasks;            // --eval-tasks, --eval-text
    int64_t tasks_scored_at;  // latest iteration with scores; -1: none
    Log *log;
    Progress *progress;
    Schedule schedule;
    // Counters of the whole run, saved in checkpoints:
    int64_t iteration, consumed_train, consumed_valid;
    int64_t split_samples[2];  // size of SPLIT_TRAIN and SPLIT_VALID; 0: unknown
    int64_t scheduled;         // position in the learning-rate schedule: samples of applied steps
    AnomalyGuard guard;
    double flops_so_far;
    bool status_unread;  // the host has not read the status of the latest step yet
    int step_batch;      // number of samples of the latest step launched; 0: none
    StepStatus last;     // latest status read
    StepReport report;   // log record of that step
    Interval interval;
    double started;            // time at which the process started
    int64_t last_saved;        // iteration of the latest checkpoint
    int64_t resumed_from;      // iteration of the checkpoint in --save that was loaded; -1: none
    SaveLock save_lock;        // rank 0: lock on the --save folder
    int64_t outer_applied_at;  // RunState.outer_applied_at of the loaded checkpoint
    Saver saver;
    Elastic *elastic;    // NULL without --replica-group
    Stop stop;           // why the run stops early
    Memory memory;       // planned and available memory
    int64_t parameters;  // number of parameters of the whole model; set by report_start
} Run;

// --- run.c ---------------------------------------------------------------------------------------

// Prints the output of --help or --version and returns the exit code. Does not initialize MPI.
// Under mpirun only the first rank prints.
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
// to run->error of all ranks, sets run->exit_code, and prints the error on the rank that failed.
// Collective over the world.
bool run_agreed(Run *run, bool ok);
// Updates run->stop, with the same result on every rank. Called after each step and each batch of
// an evaluation. Collective.
void run_poll_stop(Run *run);

// --- setup.c, in calling order -------------------------------------------------------------------

// Builds the mesh, opens the tokenizer and completes the config. Needs no device. Errors:
// EXIT_USAGE, EXIT_DATA, EXIT_ENVIRONMENT.
bool run_place(Run *run);
// Opens device and log and allocates the memory plan. Returns false on all ranks if any rank fails.
bool run_allocate(Run *run);
// Locks the --save folder, creates the communication groups and starts ZeRO. Returns false on all
// ranks if any rank fails.
bool run_connect(Run *run);
// Opens the loader. Call after the checkpoint has been restored, because the order of the data
// depends on the total number of samples. Returns this rank's own result.
bool run_open_data(Run *run);
// Calls run_open_data, checks that all ranks have the same data, and logs its size. Collective.
bool run_setup_data(Run *run);
// Returns the number of global batches of one evaluation: --eval-iters, or with --full-validation
// all complete batches of the validation split. 0 if the split has no data.
int64_t run_eval_iters(const Run *run, int split);
// Sets up schedule, progress log and saver. Last step before training.
bool run_prepare_saves(Run *run);
// Handles --inspect-data and --check-data on rank 0.
void run_look_at_data(Run *run);

// Plans the run without a device: mesh, this rank's part of the model, memory plan. gpt must be
// zeroed; free it with gpt_free. Errors: see run_place, gpt_check and zero_plan.
bool plan_run(Run *run, GPT *gpt);
// Opens the device, connects the ranks, loads weights and data. Returns false on all ranks if any
// rank fails.
bool start_run(Run *run, GPT *gpt);

// Parts of start_run that measure.c also calls. gpt_connect attaches the GPT to the run's resources
// after run_connect. draw_weights initializes the weights. Collective over the world.
void gpt_connect(GPT *gpt, Run *run);
void draw_weights(Run *run, GPT *gpt);

// --- data_options.c ------------------------------------------------------------------------------

// Returns the loader options of a config. Strings and arrays are borrowed from it.
LoaderOptions loader_options(const Config *config, int dp_rank, int dp_size);
// Adjusts the options of a resumed run: each split gets the samples used so far (consumed_*) plus
// the samples that the rest of the run needs. If batch sizes, training length and evaluation
// intervals have not changed, this does not change the options.
void loader_options_resume(LoaderOptions *options, const Config *config, int64_t iteration,
                           int64_t consumed_train, int64_t consumed_valid);

// --- run_report.c --------------------------------------------------------------------------------

// Logs program, mesh, flags and sizes before training.
void report_start(Run *run);
void interval_begin(Run *run);
// Clock and traffic counters at the start of an evaluation or a save, which interrupts training.
typedef struct Interruption {
    double seconds;
    Traffic traffic;
} Interruption;
// Excludes time and traffic since `from` from the interval. Collective.
void interval_exclude(Run *run, const Interruption *from);
// Logs the interval. The status of its last step must have been read. Collective.
void interval_end(Run *run);
// Reads the status of a step, advances the counters and the anomaly guard, and logs the step.
// which: 0 for the latest step launched, 1 for the previous one. alone: true after a node failure;
// leaves out log values that need a collective.
void read_step_status(Run *run, int which, bool alone);

// --- resume.c ------------------------------------------------------------------------------------

// Saves a checkpoint, in the background with --async-save. Returns false on all ranks if any rank
// fails; the run then ends.
bool save_checkpoint(Run *run);
// Writes the next part of a background save, or all remaining parts if to_the_end is set.
bool advance_save(Run *run, bool to_the_end);
// Saves the state of the surviving replica groups after a node failure and waits for the files.
// run->launch.world and the mesh must already exclude the lost node. If this state has already been
// saved, returns true without saving it again.
bool save_surviving_groups(Run *run);
// Compares replicated weights across ranks and repairs differences. Returns false if that fails.
bool replicas_sound(Run *run);
// Loads the checkpoint that the tracker file in --load names, as in Megatron-LM. With LoRA, that is
// a checkpoint of adapters, and there is none if --load names the frozen model. Returns LOAD_FRESH
// if the folder has no tracker file and no checkpoints; the caller then initializes the weights. So
// the same command line can start and resume a run.
typedef enum Loaded { LOAD_FAILED, LOAD_FRESH, LOAD_RESTORED } Loaded;
Loaded load_checkpoint(Run *run);

// --- load_base.c ---------------------------------------------------------------------------------

// Loads the frozen model of a LoRA run from the folder of config_lora_base. Sets run->base, with
// which load_checkpoint compares the base model of the adapters.
bool load_base(Run *run);

// --- surviving_groups.c --------------------------------------------------------------------------

// Enables node-failure recovery: if a node is lost, the surviving replica groups save a checkpoint
// before the job ends. No-op unless --local-steps and --save are given. Collective.
void arm_node_recovery(Run *run);

// --- elastic.c: no-ops unless --replica-group is given -------------------------------------------

// Lists the chunks and reserves memory. Called by plan_run. Error: EXIT_USAGE.
bool elastic_plan(Run *run);
// Joins the run: takes over the state of the other groups, or starts the run. Called when weights
// and data are loaded. Returns false on all ranks on failure.
bool elastic_join(Run *run);
// Returns the first sample of the step that starts now.
int64_t elastic_first_sample(Run *run);
// Returns the position in the training samples that all groups share, for the log.
int64_t elastic_position(const Run *run);
// Applies closed rounds and offers the chunks that are due. Called after each training step.
void elastic_step(Run *run);
// Returns true if other groups have reached the end of the run, so that this group ends too.
bool elastic_ended(const Run *run);
// Last sync of all chunks, at the end of training. Waits for the other groups, but not forever.
void elastic_finish(Run *run);
// Called before the save of a group that stops early: its checkpoint continues where it left.
void elastic_stopping(Run *run);
// Contributes what a group that stops early has trained since the last sync. Takes at most
// --sync-grace-seconds. Called after its save, because a signal may leave it little time.
void elastic_contribute(Run *run);
// Leaves the run. Also called after errors.
void elastic_leave(Run *run);
// Called after the memory plan has been freed.
void elastic_free(Run *run);
// Copies the ledger of samples to or from a checkpoint's state.
void elastic_save(const Run *run, RunState *state);
void elastic_load(Run *run, const RunState *state);

// --- sample.c ------------------------------------------------------------------------------------

// Generates text from --sample-prompt with the current weights and logs it on rank 0. Does not
// affect training. Collective.
void write_sample(Run *run, GPT *gpt);

// --- measure.c: --plan-measure -------------------------------------------------------------------

// Measures the device's throughput on a few of the model's layers. train_gpt.c runs the steps
// between measurement_begin and measurement_end.

enum { MEASURE_WARM_UP_STEPS = 3, MEASURE_STEPS = 5 };  // warm-up steps are not timed

// Sets up a separate run `measured` and its model, with few layers and mock data. run must have
// been planned and have one rank. Errors: EXIT_USAGE with several ranks, otherwise see start_run.
// Call measurement_end even after an error.
bool measurement_begin(Run *run, Run *measured, GPT *gpt);
// Frees `measured` and gpt. If ok is set, sets run->config.plan_tflops to the TFLOP/s of forward
// and backward passes in the last MEASURE_STEPS steps. Otherwise copies the error to run->error.
void measurement_end(Run *run, Run *measured, GPT *gpt, bool ok);

// --- eval_tasks.c: --eval-tasks and --eval-text --------------------------------------------------

// Scores multiple-choice and continuation tasks (llmc/data/tasks.h) at each evaluation and at the
// end of the run. acc, acc_norm and perplexity are defined as in EleutherAI's
// lm-evaluation-harness. The windows of texts are samples too; their metrics are Megatron-LM's.
//
// Requests are grouped into batches, which are distributed over the data-parallel ranks. All
// batches have as many tokens as a micro-batch. The sequences of a batch have the same length: the
// model's sequence length, half of it, a quarter, and so on. Batches depend only on the files and
// metrics are summed in file order, so results are bitwise identical for any number of
// data-parallel ranks.

// Reads the files on rank 0 and broadcasts the samples. No-op without --eval-tasks and --eval-text.
// Collective. All ranks return the same error (EXIT_DATA).
bool eval_tasks_open(Run *run);
// Scores all samples with the current weights and logs the metrics, at most once per iteration.
// Ends early without logging if run->stop is set. Collective.
void eval_tasks(Run *run, GPT *gpt);

// --- same_run.c ----------------------------------------------------------------------------------

// Checks before the first step that all machines have the same program, flags, data and checkpoint
// folders. Otherwise a machine with an outdated copy would silently train with another learning
// rate or on other data. Each rank compares itself with rank 0 and returns its own result.
// Collective over world.

// Compares program and flags. Call after plan_run, before memory is allocated or data is read.
// Paths may differ between machines, but their number may not, except for outputs that only rank 0
// writes.
// Errors: EXIT_ENVIRONMENT for another version, commit or backend; EXIT_USAGE for a flag.
bool same_flags(const Config *config, Peers world, Error *err);
// Compares the data shards of every split: their weights, file sizes, first and last bytes. Always
// true for mock data. Error: EXIT_DATA.
bool same_data(const Loader *loader, Peers world, Error *err);
// Checks that every rank sees a temporary file that rank 0 creates in the folder. Waits up to 5
// seconds for slow network file systems. Returns true if rank 0 cannot create the file; the first
// save then reports why. Error: EXIT_CHECKPOINT.
bool same_save_folder(const char *directory, Peers world, Error *err);
// Returns false if rank 0 sees the checkpoint but this rank does not. Error: EXIT_CHECKPOINT.
bool same_checkpoint(const char *directory, int64_t iteration, Peers world, Error *err);

LLMC_END
