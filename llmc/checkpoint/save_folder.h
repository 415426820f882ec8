// What lies in a --save folder besides the checkpoint at hand: leftovers of killed saves, older checkpoints, free space. Called by checkpoint.c (before and
// after a save), lineage.c (which checkpoints are there), saver.c and train_gpt.cu (room for the run's checkpoints). checkpoint.h lists the names.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Keeps two jobs from saving into one folder, where one would remove what the other is writing and older checkpoints that the other still needs. Held by one
// rank of a job until save_folder_unlock or the end of the process. A killed rank may need some time to go: waits up to `seconds` for it. *lock: the folder's descriptor, -1 where the file system
// has no locks. Error: EXIT_CHECKPOINT when another process holds it.
bool save_folder_lock(const char *directory, double seconds, int *lock, Error *err);
// Lets another job save there; -1 is allowed.
void save_folder_unlock(int lock);
// Before each save: saves go by the folder's path, but the lock is on the folder itself, which may have been moved away or removed since, and another job may have
// begun in one that was made in its place. *moved: it is another folder now; it is made where it is missing, *lock is on it, and the old one is left. A lock of
// -1 follows nothing. Error: EXIT_CHECKPOINT when another process holds the new one (*lock is -1 then), or it cannot be made.
bool save_folder_follow(const char *directory, int *lock, bool *moved, Error *err);
// Removes what killed saves and killed deletions left, and puts back a checkpoint that was moved aside while it was being replaced.
bool save_folder_clear(const char *directory, Error *err);
// That no folder lies under a name that every save gives to a small file: the tracker's, the list's (lineage.h) and those under which they are written first. What
// else lies there a save replaces. Error: EXIT_CHECKPOINT.
bool save_folder_names_free(const char *directory, Error *err);
// That this process may write a file of this many bytes (ulimit -f). Error: EXIT_CHECKPOINT.
bool save_folder_allows_file(uint64_t bytes, Error *err);
// That a checkpoint of this many bytes fits. What killed saves left makes way if it must. True where the file system does not say.
bool save_folder_has_room(const char *directory, uint64_t bytes, Error *err);
// The iterations that this program saved here, sound or not, of whichever run, oldest first (malloc'ed; NULL when there are none).
int64_t *save_folder_list(const char *directory, int *count);
// That there is a folder of this iteration with this program's manifest.
bool save_folder_holds(const char *directory, int64_t iteration);
// That two paths lead to one folder.
bool save_folder_same(const char *a, const char *b);

// Which checkpoints stay: the newest `last` ones (0: all), and those whose iteration is a multiple of `interval` (0: none more).
typedef struct Retention {
    int64_t last, interval;
} Retention;
// Deletes those of a run's checkpoints that need not stay now that the last of them is durable and the tracker names it. iterations: (count), oldest first, all of
// them there (lineage.h); nothing else is touched. They are renamed out of the way first, so that a kill leaves whole checkpoints and leftovers only.
bool save_folder_prune(const char *directory, const int64_t *iterations, int count, const Retention *keep, Error *err);
// A line for the user when the checkpoints of a run will not all fit: `saves` more of `bytes` each beside the `there` it has, of which `keep` stay. Empty when
// they will.
void save_folder_forecast(const char *directory, uint64_t bytes, int64_t saves, int there, const Retention *keep, char *line, size_t line_bytes);

LLMC_END
