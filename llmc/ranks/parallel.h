// Runs independent work on several CPU threads, such as drawing initial weights. Results must not
// depend on how work is distributed.
#pragma once
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Processes [lo, hi). Called from several threads at once, for disjoint ranges.
typedef void (*RangeWork)(void *context, int64_t lo, int64_t hi);

// Returns the number of threads for this rank: the cores available to all ranks of its host,
// divided by their number. Between 1 and the cores available to this rank. Collective.
int parallel_share(Peers group);
// Runs work on [lo, hi) in ranges of `chunk` elements, on up to `threads` threads including the
// caller. Returns the number of threads used, which is lower if the system refuses some.
int parallel_ranges(int threads, int64_t lo, int64_t hi, int64_t chunk, RangeWork work, void *context);

LLMC_END
