// Host work spread over threads. What is independent of its neighbors, such as drawing initial
// weights, takes the cores that this rank may use. Results must not depend on who does what. Called
// by gpt_init_weights, llmc/cpu/ops_init.c, and for generation by ops.c.
#pragma once
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Works on [lo, hi); called from several threads at once, for pieces that do not overlap.
typedef void (*RangeWork)(void *context, int64_t lo, int64_t hi);

// Threads for this rank: the cores that it and its neighbors of the same host may use, divided
// among them. At least 1, and no more than its own cores. Collective over group.
int parallel_share(Peers group);
// Runs work on all of [lo, hi) in pieces whose borders lie at lo + multiples of `grain`, on
// `threads` threads, the calling one among them. Returns when all is done. Threads that the system
// refuses are done without; returns how many took part.
int parallel_ranges(int threads, int64_t lo, int64_t hi, int64_t grain, RangeWork work, void *context);

LLMC_END
