// The --save directory: locking, cleanup after killed saves, disk space, the list of the run's own
// checkpoints, and retention. Called by checkpoint.c (before and after a save), checkpoint_load.c
// (choice of the checkpoint), saver.c and llmc/run/ (disk space). checkpoint.h lists the file
// names.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// --- locking -------------------------------------------------------------------------------------

// The lock on a save directory: flock on a file in it that only the user who created it can open.
typedef struct SaveLock {
    int folder, file;  // descriptors, both -1 if not locked
} SaveLock;
static const SaveLock NO_SAVE_LOCK = {-1, -1};

// Locks the directory so that no other job saves into it; two jobs would remove each other's
// temporary files and old checkpoints. Held by one rank until save_folder_unlock or process exit.
// Waits up to `seconds`, since a killed rank may take a while to exit. *lock is NO_SAVE_LOCK if the
// file system does not support locks. EXIT_CHECKPOINT if another process holds the lock, or if the
// lock file belongs to another user.
bool save_folder_lock(const char *directory, double seconds, SaveLock *lock, Error *err);
// Releases the lock and resets *lock; no-op for NO_SAVE_LOCK.
void save_folder_unlock(SaveLock *lock);
// Returns true if a save of this iteration, the previous or the next one is in progress in the
// directory, or if this or the next iteration has been saved.
bool save_folder_in_use(const char *directory, int64_t iteration);
// Call before each save. Saves use the directory's path, but the lock follows the directory itself,
// which may have been moved or removed since; another job may have started in a new one at the same
// path. If the path now leads to another directory, sets *moved, creates it if it is missing, and
// moves *lock to it. No-op for NO_SAVE_LOCK. EXIT_CHECKPOINT if another process holds the new one
// (*lock is then NO_SAVE_LOCK) or it cannot be created.
bool save_folder_follow(const char *directory, SaveLock *lock, bool *moved, Error *err);
bool save_folder_same(const char *a, const char *b);

// --- before a save -------------------------------------------------------------------------------

// Removes files left by killed saves and deletions, and restores a checkpoint that was moved aside
// by a replacement that did not finish.
bool save_folder_clear(const char *directory, Error *err);
// Checks that no directory has a name that every save uses for a file: the tracker, the list of
// checkpoints, and their temporary files. Anything else under such a name is overwritten.
// EXIT_CHECKPOINT.
bool save_folder_names_free(const char *directory, Error *err);
// Checks that this process may write a file of this size (ulimit -f). EXIT_CHECKPOINT.
bool save_folder_allows_file(uint64_t bytes, Error *err);
// Checks that a checkpoint of this size fits on the disk, after removing leftovers of killed saves
// if necessary. Returns true if the file system does not report free space. EXIT_CHECKPOINT.
bool save_folder_has_room(const char *directory, uint64_t bytes, Error *err);

// --- existing checkpoints ------------------------------------------------------------------------

// Iterations saved here by this program, intact or not, by any run, oldest first (malloc'ed; NULL
// if none).
int64_t *save_folder_list(const char *directory, int *count);
// Returns true if there is a directory of this iteration with a manifest of this program.
bool save_folder_holds(const char *directory, int64_t iteration);

// The run's own checkpoints (its lineage), stored in a small file in the directory: one iteration
// per line, oldest first. The directory may also hold checkpoints of an earlier run that was not
// loaded, or of a branch that was abandoned when a run resumed from an older checkpoint. Those do
// not count for retention, are never deleted, and are never used as a fallback for a damaged
// checkpoint. The file is treated as untrusted input.
//
// The lineage is a separate file, because it must survive damaged and deleted manifests. If each
// manifest named its parent instead, a missing one would hide all earlier checkpoints of the run.
#define LINEAGE_NAME "checkpoints_of_run.txt"
enum { LINEAGE_DIGITS = 15, LINEAGE_MOST = 1 << 16, LINEAGE_MAX_BYTES = (LINEAGE_DIGITS + 1) * LINEAGE_MOST };

typedef struct Lineage {
    int64_t *iterations;  // (count), oldest first; malloc'ed
    int count;
    bool listed;       // read from the file; false: all checkpoints in the directory
    char damage[200];  // what is wrong with the file; empty if it is intact or missing
} Lineage;

// Reads the file; falls back to all checkpoints in the directory if it is damaged or missing. Fails
// with EXIT_CHECKPOINT if the file exists but cannot be read.
bool lineage_read(const char *directory, Lineage *lineage, Error *err);
void lineage_free(Lineage *lineage);
bool lineage_holds(const Lineage *lineage, int64_t iteration);
// Newest iteration of the lineage before `iteration`, whether its directory exists or not; -1:
// none.
int64_t lineage_before(const Lineage *lineage, int64_t iteration);
// Computes the lineage after saving `iteration` in a run that resumed from the checkpoint of
// iteration `before` in this directory (-1: none): the existing listed iterations up to `before`,
// then the new one. If the file does not list `before`, its ancestors are unknown and omitted.
bool lineage_extend(const char *directory, int64_t before, int64_t iteration, Lineage *lineage, Error *err);
// The file's text (malloc'ed).
char *lineage_text(const Lineage *lineage, uint64_t *bytes);
// Formats the checkpoints in the directory that are not in this lineage: "3, 7 and 12". If there
// are many: the first, the last and their number. Empty if none.
void lineage_others(const char *directory, const Lineage *lineage, char *text, size_t text_bytes);

// --- retention -----------------------------------------------------------------------------------

// Keep the newest `last` checkpoints (0: all), and those whose iteration is a multiple of
// `interval` (0: no others).
typedef struct Retention {
    int64_t last, interval;
} Retention;
// Deletes the lineage's checkpoints that need not be kept, once the newest is durable and the
// tracker names it. Other files are not touched. Checkpoints are renamed before deletion, so that a
// kill leaves only complete checkpoints and leftovers. EXIT_CHECKPOINT.
bool save_folder_prune(const char *directory, const Lineage *line, const Retention *keep, Error *err);
// Formats a warning if the checkpoints of the run will not all fit on the disk: `saves` more of
// `bytes` each, in addition to the `there` existing ones, with retention `keep`. Empty if they fit.
typedef struct Forecast {
    uint64_t bytes;
    int64_t saves;
    int there;
    Retention keep;
} Forecast;
void save_folder_forecast(const char *directory, const Forecast *forecast, char *line, size_t line_bytes);

// --- foreign.c -----------------------------------------------------------------------------------

// Inspects a --load directory without a checkpoint of this program. If it only has files that a run
// writes before its first checkpoint, training starts from scratch. Anything else is a user error:
// the run would silently train from random weights.

// Fails with EXIT_CHECKPOINT if the directory contains another program's files; the message names
// the program and the file. unless_fresh: also fails for any file that no run writes before its
// first checkpoint. Checks names only, a few levels deep. Returns true if the directory does not
// exist.
bool foreign_refuse(const char *folder, bool unless_fresh, Error *err);

LLMC_END
