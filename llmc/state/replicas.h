// Detects and repairs model weights that differ between ranks (silent data corruption). With
// quantized weight differences every rank updates its own copy of the weights, so a copy that
// drifted would otherwise go unnoticed. Position-keyed hashes compare the buckets of data-parallel
// replicas, and tensors replicated in a tensor-parallel group or at both ends of a pipeline. Called
// every --verify-replicas-interval steps and before saves, through llmc/run/resume.c.
#pragma once
#include "llmc/log/log.h"
#include "llmc/state/zero.h"
LLMC_BEGIN

// Compares all replicas and repairs those that differ. Collective over world.
//   bucket with a majority             the other replicas copy the majority's version
//   bucket without one, or a tensor    all replicas are set to the master weights, rounded to bf16
// Each repair logs iteration, bucket or tensor, and ranks, and adds 1 to *repairs on every rank.
// Error (EXIT_COMMUNICATION), the same on every rank: differences remain; for tensors this means
// that their master weights differ. With --local-steps the replicas of a node are compared. Outer
// weights are compared over all nodes, and a difference is an error without repair.
bool replicas_verify(Zero *zero, Peers world, Log *log, int64_t *repairs, Error *err);

LLMC_END
