// A run: everything that training holds beside the model itself. main makes one, the files of this
// room set it up, tell of it, save it and close it; train_gpt.c makes the steps.
//
//   run.c       agreement of the ranks, limits, the end
//   setup.c     from flags to a device, memory, groups and data
//   start.c     the model's part of that
//   report.c    log lines: the steps, the intervals, the start
//   resume.c    checkpoints: saving, restoring, loading
//   survivors.c what becomes of a run whose nodes train alone when one is lost
//   sample.c    text from the model
//   eval_tasks.c  --eval-tasks: how likely the model finds choices
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/checkpoint/saver.h"
#include "llmc/comm.h"
#include "llmc/config/config.h"
#include "llmc/config/schedule.h"
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

// What happened since the last log line.
typedef struct Interval {
    int64_t iterations, samples, skipped, nan;
    double loss_sum;       // over applied steps
    double seconds_start;  // moved forward by what is not training: evaluation, checkpoints
    Traffic traffic;       // at the start
} Interval;

typedef struct Run {
    Config config;
    Launch launch;
    Mesh mesh;          // who is where, and the groups that communicate
    Pipeline pipeline;  // links to the neighboring stages
    OwnDevice own;      // the device that this rank takes
    Site site;
    Error error;  // why the run ends early
    int exit_code;
    Tokenizer *tokenizer;  // NULL: not needed
    Device *device;
    Stream *compute;
    Lanes lanes;  // of communication
    Timers *timers;
    MemoryPlan memory_plan;
    Zero *zero;
    const Tensor *whole;  // (whole_count) the parameters of the whole model, as checkpoints have them
    int whole_count;
    Loader *loader;
    TaskSet tasks;            // --eval-tasks
    int64_t tasks_scored_at;  // the latest iteration that they were scored at; -1: none
    Log *log;
    Progress *progress;
    Schedule schedule;
    // counters of the whole run, saved in checkpoints
    int64_t iteration, consumed_train, consumed_valid;
    int64_t split_samples[2];  // of SPLIT_TRAIN and SPLIT_VALID as built; 0: not known
    int64_t scheduled;         // samples of applied steps: what the schedule counts
    AnomalyGuard guard;
    double flops_so_far;
    // the step whose verdict the host has not read yet
    bool unsettled;
    int step_batch;     // samples of the latest step launched: the one that is settled next, or was last
    StepStatus last;    // the newest verdict read
    StepReport report;  // what was told of it
    Interval interval;
    double started;  // wall clock of the process's start
    int64_t last_saved;
    int64_t went_on_from;  // the checkpoint in the --save folder that this run went on from; -1: none
    int save_lock;         // of rank 0 on the folder of --save
    int64_t met_at;        // of the checkpoint that was loaded: RunState
    Saver saver;
    Stop stop;           // why the run is to be left early
    Memory memory;       // the plan against what was there
    int64_t parameters;  // of the whole model; report_start finds it
} Run;

// --- run.c ---------------------------------------------------------------------------------------

// Answers --help or --version on standard output. Neither needs MPI or ranks. Under mpirun the
// first rank answers for all. Returns the exit code.
int run_answer(const Config *config, const char *program);
// A run that holds nothing yet.
void run_init(Run *run);
// Gives back all that the run holds, whatever part of it there is.
void run_close(Run *run);
// Ranks that act together, with the run's limit and place.
Peers run_peers(Run *run, MPI_Comm comm);
// A barrier of all ranks, with that limit.
void run_meet(Run *run);
// True when ok on every rank. Else run->error holds the first failing rank's error on every rank,
// that rank prints it, and run->exit_code is the error's. Collective over the world.
bool run_agreed(Run *run, bool ok);
// After each step and each part of an evaluation: run->stop, the same on every rank. Collective.
void run_poll_stop(Run *run);

// --- setup.c: in this order ----------------------------------------------------------------------

// Places this rank, opens the tokenizer, completes the config. Needs no device. Errors: EXIT_USAGE,
// EXIT_DATA, EXIT_ENVIRONMENT.
bool run_place(Run *run);
// Opens device and log, and allocates the memory plan. False on every rank where one failed.
bool run_allocate(Run *run);
// The folder of --save, the groups, the Zero: ready to step once it has weights. The same errors on
// every rank.
bool run_connect(Run *run);
// Opens the loader, once it is known where the run goes on: the order of the data depends on how
// often they are read in all. Not collective over the world; the caller lets the ranks agree.
bool run_open_data(Run *run);
// The same on every rank, with log lines.
bool run_setup_data(Run *run);
// Global batches of one evaluation of a split: --eval-iters, or the whole validation split with
// --full-validation; its last samples that do not fill a batch are left out. 0 without data.
int64_t run_eval_iters(const Run *run, int split);
// Schedule, progress and saver. The last step before training.
bool run_prepare_saves(Run *run);
// --inspect-data and --check-data: rank 0 looks at the data, nobody trains.
void run_look_at_data(Run *run);

// --- report.c ------------------------------------------------------------------------------------

// The lines before training: program, mesh, flags, sizes.
void report_start(Run *run);
void interval_begin(Run *run);
// Where an interval is interrupted by what is not training: an evaluation, a save.
typedef struct Interruption {
    double seconds;
    Traffic traffic;
} Interruption;
Interruption interval_interrupt(const Run *run);
// Takes the time since then, and what was sent since then, out of the interval. Collective.
void interval_exclude(Run *run, const Interruption *from);
// Prints the interval's lines after the step status of its last iteration. Collective.
void interval_end(Run *run);
// Reads the step status of a step. which: 0 the latest one launched, 1 the one before.
void settle(Run *run, int which);
// The latest one's, where other ranks may not come: without figures that ranks make together.
void settle_alone(Run *run);

// --- resume.c ------------------------------------------------------------------------------------

// False on every rank when one failed: the run ends.
bool save_checkpoint(Run *run);
// The save in the background one part further, or to its end.
bool advance_save(Run *run, bool to_the_end);
// Of the nodes that are left: run->launch.world is theirs, and so is the mesh. Waits for the files.
// True where there was nothing new to save.
bool save_surviving_groups(Run *run);
// Compares all ranks' weights and repairs what differs.
bool replicas_sound(Run *run);
// --load, by Megatron-LM's rules. LOAD_FRESH: there is nothing to load, and the caller fills the
// weights. Without a tracker and without checkpoints a run starts afresh, so that the same script
// starts and resumes it.
typedef enum Loaded { LOAD_FAILED, LOAD_FRESH, LOAD_RESTORED } Loaded;
Loaded load_checkpoint(Run *run);

// --- survivors.c ---------------------------------------------------------------------------------

// While the run trains with --local-steps and --save a lost node ends it only after the others have
// saved what they have. Collective.
void arm_node_recovery(Run *run);

// --- sample.c ------------------------------------------------------------------------------------

// --sample-prompt: rank 0 writes text with the model as it is; every replica could, they are equal.
// Needs no random state and no batch: training goes on as without. Collective.
void write_sample(Run *run, GPT *gpt);

LLMC_END
