// A --save folder: one job at a time in it, what killed saves left, room for the checkpoints that
// are to come, which of those there are the run's own, and which of them stay. Called by
// checkpoint.c (before and after a save), checkpoint_load.c (what to load), saver.c and llmc/run/
// (room). checkpoint.h lists the names.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// --- one job at a time ---------------------------------------------------------------------------

// Keeps two jobs from saving into one folder, where one would remove what the other is writing, and
// older checkpoints that the other still needs. Held by one rank of a job until save_folder_unlock
// or the end of the process. A killed rank may need some time to go: waits up to `seconds` for it.
// *lock: the folder's descriptor, -1 where the file system has no locks. EXIT_CHECKPOINT when
// another process holds it.
bool save_folder_lock(const char *directory, double seconds, int *lock, Error *err);
// Lets another job save there. -1 is allowed.
void save_folder_unlock(int lock);
// A save of this iteration, or of the one before or behind it, is under way in the folder. Or one
// of this iteration or the next is done.
bool save_folder_in_use(const char *directory, int64_t iteration);
// Before each save. Saves go by the folder's path, but the lock is on the folder itself: it may
// have been moved away or removed since, and another job may have begun in one that was made in its
// place. *moved: it is another folder now. Then it is made where it is missing, *lock is on it, and
// the old one is left. A lock of -1 follows nothing. EXIT_CHECKPOINT when another process holds the
// new one (*lock is -1 then), or when it cannot be made.
bool save_folder_follow(const char *directory, int *lock, bool *moved, Error *err);
// That two paths lead to one folder.
bool save_folder_same(const char *a, const char *b);

// --- room for a save -----------------------------------------------------------------------------

// Removes what killed saves and killed deletions left, and puts back a checkpoint that was moved
// aside while it was being replaced.
bool save_folder_clear(const char *directory, Error *err);
// That no folder lies under a name that every save gives to a small file: the tracker's, the
// list's, and those under which they are written first. What else lies there a save replaces.
// EXIT_CHECKPOINT.
bool save_folder_names_free(const char *directory, Error *err);
// That this process may write a file of this many bytes (ulimit -f). EXIT_CHECKPOINT.
bool save_folder_allows_file(uint64_t bytes, Error *err);
// That a checkpoint of this many bytes fits. What killed saves left makes way if it must. True
// where the file system does not say. EXIT_CHECKPOINT.
bool save_folder_has_room(const char *directory, uint64_t bytes, Error *err);

// --- checkpoints there ---------------------------------------------------------------------------

// The iterations that this program saved here, sound or not, of whichever run, oldest first
// (malloc'ed; NULL when there are none).
int64_t *save_folder_list(const char *directory, int *count);
// That there is a folder of this iteration with this program's manifest.
bool save_folder_holds(const char *directory, int64_t iteration);

// Which checkpoints are a run's own: a small file in the folder, one iteration per line, oldest
// first. The folder may hold others: of an earlier run that was not loaded, or of a branch that was
// left when a run went back. Those do not count among the ones to keep, are not deleted, and are
// not gone back to when the newest is damaged. The file is read as hostile input.
//
// It is a file and not a parent's name in each manifest, because it must tell what the manifests
// that are left cannot: the line of a checkpoint whose manifest is damaged, the older ones behind
// one that was deleted, and that what is there is another run's when the run's own checkpoints and
// the tracker are gone.
#define LINEAGE_NAME "checkpoints_of_run.txt"
enum { LINEAGE_DIGITS = 15, LINEAGE_MOST = 1 << 16, LINEAGE_MAX_BYTES = (LINEAGE_DIGITS + 1) * LINEAGE_MOST };

typedef struct Lineage {
    int64_t *iterations;  // (count), oldest first; malloc'ed
    int count;
    bool listed;       // in the file; else these are all checkpoints in the folder
    char damage[200];  // what is wrong with the file; empty when it is sound or not there
} Lineage;

// What the file says. When it is damaged or not there: all checkpoints in the folder. False with
// EXIT_CHECKPOINT when a sound file cannot be read.
bool lineage_read(const char *directory, Lineage *lineage, Error *err);
void lineage_free(Lineage *lineage);
bool lineage_holds(const Lineage *lineage, int64_t iteration);
// The newest one before `iteration`, whether its folder is there or not; -1: none.
int64_t lineage_before(const Lineage *lineage, int64_t iteration);
// What the file is to say once `iteration` is saved by a run that went on from the checkpoint of
// iteration `before` in this folder (-1: from none). That is what is listed before it, that one, as
// far as they are still there, and the new one. Where the file does not list `before`, what came
// earlier is not known and left out.
bool lineage_extend(const char *directory, int64_t before, int64_t iteration, Lineage *lineage, Error *err);
// The file's text (malloc'ed).
char *lineage_text(const Lineage *lineage, uint64_t *bytes);
// "3, 7 and 12": the checkpoints in the folder that are not of this line. More than a few: the
// first, the last and how many. Empty: none.
void lineage_others(const char *directory, const Lineage *lineage, char *text, size_t text_bytes);

// --- which stay ----------------------------------------------------------------------------------

// The newest `last` ones (0: all), and those whose iteration is a multiple of `interval` (0: none
// more).
typedef struct Retention {
    int64_t last, interval;
} Retention;
// Deletes those of a run's checkpoints that need not stay, once the last of them is durable and the
// tracker names it. Nothing else is touched. They are renamed out of the way first: a kill leaves
// whole checkpoints and leftovers only. EXIT_CHECKPOINT.
bool save_folder_prune(const char *directory, const Lineage *line, const Retention *keep, Error *err);
// A line for the user when the checkpoints of a run will not all fit: `saves` more of `bytes` each
// beside the `there` it has, of which `keep` stay. Empty when they will.
typedef struct Forecast {
    uint64_t bytes;
    int64_t saves;
    int there;
    Retention keep;
} Forecast;
void save_folder_forecast(const char *directory, const Forecast *forecast, char *line, size_t line_bytes);

LLMC_END
