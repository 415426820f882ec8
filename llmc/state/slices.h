// Copies of the training state to and from the host, for checkpoints: the end of zero.h. Included
// by zero_parts.h.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/state/base.h"
LLMC_BEGIN

// A copy to page-locked memory that has been requested.
typedef struct StagedCopy {
    void *pinned;
    const void *memory;
    size_t bytes;
    bool on_host;  // memory
} StagedCopy;

// --async-save: this rank's part of a checkpoint in host memory.
typedef struct Slices {
    void *staging;           // page-locked; NULL without --async-save
    uint64_t staging_bytes;  // of this rank's part
    StagedCopy *copy;        // (count of room) requested and not started
    int count, room;
    Stream *stream;  // of the copies
    Event *staged;   // the copies have arrived
    bool copying;    // copies have been started since the latest update, which waits for them
} Slices;

LLMC_END
