// The checkpoints of a run: disk space checks, one save at a time, synchronous or in the
// background, and log lines. Called by llmc/run. checkpoint.h does the file work.
#pragma once
#include "llmc/checkpoint/zero_slices.h"
#include "llmc/log/log.h"
#include "llmc/log/progress.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

// The caller sets the fields up to `lock` and zeroes the others. Pointers must stay valid for the
// saver's lifetime.
typedef struct Saver {
    const Config *config;
    const Mesh *mesh;
    Zero *zero;
    const Tensor *whole;  // (whole_count) parameters of the whole model
    int whole_count;
    BaseModel base;  // with LoRA: the frozen model
    Log *log;
    Progress *progress;
    Peers peers;         // all ranks
    int64_t before;      // checkpoint in the directory that this run resumed from or saved last; -1: none
    SaveLock *lock;      // lock on the directory on rank 0; NO_SAVE_LOCK on other ranks
    CheckpointJob *job;  // save in progress; NULL: none
    bool saved;          // this process has saved into the directory
    bool synchronous;    // a save was abandoned: later ones don't use the staging buffer
} Saver;

// All functions except saver_busy and saver_abandon are collective and return the same result and
// error on every rank.

// Checks before the first step that the run can save. Errors (EXIT_CHECKPOINT): not enough disk
// space for one checkpoint; a rank's file size limit is below its shard's size; a directory has the
// name of a file that every save writes; the run does not resume from a checkpoint of the directory
// but would replace one there at its save or exit interval or at the end. Logs a line if the run
// resumes and will replace a checkpoint outside its lineage, or if the disk cannot hold all
// checkpoints after `iteration`.
bool saver_has_room(const Saver *saver, int64_t iteration, Error *err);
// Saves a checkpoint. With --async-save, finishes the previous save and only starts this one. If
// the directory was moved or removed since the last save, recreates it, logs a line and starts a
// new lineage there. EXIT_CHECKPOINT if another job now saves there, or another run's checkpoint
// would be replaced. fp8: state of delayed FP8 scaling, used on rank 0; NULL: none.
bool saver_save(Saver *saver, const RunState *state, const Fp8State *fp8, Error *err);
// Returns true while this rank writes in the background.
bool saver_busy(const Saver *saver);
// Advances a background save by one stage, or finishes it.
bool saver_advance(Saver *saver, bool to_the_end, Error *err);
// Called once a rank is lost: waits for this rank's writes of a save, then forgets the save, whose
// files the next save deletes. Returns false if there was none. Later saves are synchronous,
// because the staging buffer is sized for the slices that this rank saved before the loss.
bool saver_abandon(Saver *saver);

LLMC_END
