// Against silent corruption. With quantized differences every rank keeps weights of its own, and
// nothing else would ever notice that one of them drifted. Two things are compared through
// position-keyed hashes: the buckets of data-parallel replicas, and tensors that ranks of a
// tensor-parallel group or both ends of a pipeline hold copies of. Called every
// --verify-replicas-interval steps and before saves, through llmc/run/resume.c.
#pragma once
#include "llmc/log/log.h"
#include "llmc/state/zero.h"
LLMC_BEGIN

// Collective over world. A bucket that differs takes the version of the majority of its replicas.
// Without a majority, and where copies of a tensor differ, all who hold the bucket or a copy take
// the master weights, rounded to bf16: equal master weights make equal weights again. Each repair
// is a line in the log, which names iteration, bucket or tensor, and ranks, and adds 1 to *repairs
// on every rank. Error (EXIT_COMMUNICATION), the same on every rank: what still differs afterward.
// For copies that means that their master weights differ, and nobody knows which are right. With
// --local-steps replicas are those of a node. The outer weights are compared over all nodes, and
// not repaired: where they differ the run ends.
bool replicas_verify(Zero *zero, Peers world, Log *log, int64_t *repairs, Error *err);

LLMC_END
