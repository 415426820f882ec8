// Which checkpoints in a --save folder are a run's own, in a small file there: checkpoints_of_run.txt, one iteration per line, oldest first. The folder may hold
// others besides: of an earlier run that was not loaded, or of a branch that was left when a run went back. Those are not counted among the ones to keep, not
// deleted, and not gone back to when the newest is damaged. Called by checkpoint.c (a save), checkpoint_load.c (what to load), saver.c (room). Read as hostile input.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

#define LINEAGE_NAME "checkpoints_of_run.txt"
enum { LINEAGE_DIGITS = 15, LINEAGE_MOST = 1 << 16, LINEAGE_MAX_BYTES = (LINEAGE_DIGITS + 1) * LINEAGE_MOST };

typedef struct Lineage {
    int64_t *iterations;  // (count), oldest first; malloc'ed
    int count;
    bool listed;          // in the file; else these are all checkpoints in the folder, by their names, as before there was such a file
    char damage[200];     // what is wrong with the file; empty when it is sound or not there
} Lineage;

// What the file says, or when it is damaged or not there what the folders' names say. False with err (EXIT_CHECKPOINT) when a sound file cannot be read.
bool lineage_read(const char *directory, Lineage *lineage, Error *err);
void lineage_free(Lineage *lineage);
bool lineage_holds(const Lineage *lineage, int64_t iteration);
// The newest one before `iteration`, whether its folder is there or not; -1: none.
int64_t lineage_before(const Lineage *lineage, int64_t iteration);
// What the file is to say once `iteration` is saved by a run that went on from the checkpoint of iteration `before` in this folder (-1: from none): that one and
// what is listed before it, as far as it is still there, and the new one. Where the file does not list `before`, what came before that is not known and left out.
bool lineage_extend(const char *directory, int64_t before, int64_t iteration, Lineage *lineage, Error *err);
// The file's text (malloc'ed).
char *lineage_text(const Lineage *lineage, uint64_t *bytes);
// "3, 7 and 12": the checkpoints in the folder that are not of this line; with more than a few of them the first, the last and how many. Empty: none.
void lineage_others(const char *directory, const Lineage *lineage, char *text, size_t text_bytes);

LLMC_END
