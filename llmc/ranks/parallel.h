// Runs independent work on several CPU threads, such as drawing initial weights. Results must not
// depend on which thread does what.
#pragma once
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Processes [lo, hi). Called from several threads at once, for disjoint ranges.
typedef void (*RangeWork)(void *context, int64_t lo, int64_t hi);

// Returns the number of threads for this rank: the cores available to the ranks of its host,
// divided by their number. At least 1, at most this rank's own cores. Collective over group.
int parallel_share(Peers group);
// Runs work on [lo, hi) in ranges of `chunk` elements starting at lo, on up to `threads`
// threads including the caller. Continues with fewer threads if the system refuses some; returns
// the number used.
int parallel_ranges(int threads, int64_t lo, int64_t hi, int64_t chunk, RangeWork work, void *context);

LLMC_END
