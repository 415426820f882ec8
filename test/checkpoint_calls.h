// Test helpers that combine the checkpoint.h calls which saver.c and train_gpt.c make. Each is
// collective if the calls that it makes are.
#pragma once
#include <stdlib.h>

#include "llmc/checkpoint/checkpoint.h"

// Saves a checkpoint.
static inline bool save_whole(const CheckpointSave *save, Error *err) {
    CheckpointJob *job = checkpoint_begin(save, err);
    bool done = false, ok = job != NULL;
    while (ok && !done) ok = checkpoint_advance(job, &done, err);
    checkpoint_job_free(job);
    return ok;
}

// Allocates staging memory in host memory, exactly large enough for the slices. The caller frees
// it.
static inline void take_staging(CheckpointSave *save) {
    save->staging_bytes = 0;
    for (int i = 0; i < save->slice_count; i++) {
        const Slice *s = &save->slices[i];
        save->staging_bytes += (uint64_t)(s->hi - s->lo) * (uint64_t)slice_kind_bytes(s->kind);
    }
    save->staging = xmalloc((size_t)save->staging_bytes + 1, "a test");
}

// Converts index e in a range of columns to the index in the unsplit tensor.
static inline int64_t whole_element(const Tensor *tensor, Columns columns, int64_t e) {
    int64_t all = tensor->whole[1], count = columns.count ? columns.count : all;
    return e / count * all + columns.first + e % count;
}

// Opens the requested checkpoint, without falling back to an older one.
static inline Checkpoint *open_exactly(const char *directory, int64_t iteration, MPI_Comm comm, Error *err) {
    Peers peers = {comm, 0, NULL};
    char note[1400];
    int64_t opened = iteration;
    Checkpoint *c = checkpoint_open_or_fall_back(directory, &opened, peers, note, sizeof note, err);
    if (c && opened != iteration) {
        checkpoint_close(c);
        error_set(err, EXIT_CHECKPOINT, "%s", note);
        return NULL;
    }
    return c;
}

// Returns the iteration that a run would resume from, NO_CHECKPOINT or CHECKPOINT_UNREADABLE. Not
// collective.
static inline int64_t newest_checkpoint(const char *directory, Error *err) {
    char note[1400];
    return checkpoint_find(directory, note, sizeof note, err);
}
