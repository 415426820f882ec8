// The saves of a run, as its flags say: room for them, one at a time, in the background or not,
// their log lines. Called by llmc/run. checkpoint.h does the work on files.
#pragma once
#include "llmc/checkpoint/zero_slices.h"
#include "llmc/log/log.h"
#include "llmc/log/progress.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

// Whoever makes one fills in the fields up to `lock`, the others with zeros. What they point to
// must live as long as the saves.
typedef struct Saver {
    const Config *config;
    const Mesh *mesh;
    Zero *zero;
    const Tensor *whole;  // (whole_count) the parameters of the whole model
    int whole_count;
    Log *log;
    Progress *progress;
    Peers peers;         // all ranks
    int64_t before;      // the checkpoint in the folder that this run went on from, or saved last; -1: none
    int *lock;           // on the folder (save_folder.h), of rank 0; elsewhere -1
    CheckpointJob *job;  // on its way to the disk; NULL: none
    bool saved;          // by this process, into the folder as it is
} Saver;

// The following are collective, but for saver_busy and saver_abandon, and give the same result, and
// the same error, on every rank.

// Asked before the first step. Errors (EXIT_CHECKPOINT): the disk does not hold one checkpoint; a
// rank's limit on the size of files is below its shard; a folder lies where every save puts a file;
// the run goes on from no checkpoint of the folder, and would replace one there at its save or exit
// interval or its end. Log lines: the run goes on from one and will replace one that its list does
// not name; the disk will not hold all that are to come after `iteration`.
bool saver_has_room(const Saver *saver, int64_t iteration, Error *err);
// Saves. With --async-save it only begins to, once the save before is done. A folder that was moved
// or removed since the last one was complete is made again, with a log line, and the run begins a
// line of checkpoints there. EXIT_CHECKPOINT where another job saves there by now, or a checkpoint
// of others would be replaced.
bool saver_save(Saver *saver, const RunState *state, Error *err);
// Whether this rank still writes in the background.
bool saver_busy(const Saver *saver);
// Takes a save in the background one part further, or waits for its end.
bool saver_advance(Saver *saver, bool to_the_end, Error *err);
// For a save that cannot end because a rank is lost. Waits until this rank's file is written, then
// forgets the save. The next one deletes what is there of it. False: there was none.
bool saver_abandon(Saver *saver);

LLMC_END
