// Against silent corruption. With quantised differences every rank keeps weights of its own, and
// nothing else would ever notice that one of them drifted. The replicas are compared bucket by
// bucket through their position-keyed hash, and repaired. Called every --verify-replicas-interval
// steps and before saves, through llmc/run/resume.c.
#pragma once
#include "llmc/log/log.h"
#include "llmc/state/zero.h"
LLMC_BEGIN

// Collective over group (the dp ranks). Buckets that differ take the version of the majority of
// ranks. Without a majority all ranks take their owners' masters, rounded to bf16. Each repair is a
// line in the log, which names iteration, bucket and ranks, and adds 1 to *repairs. Error
// (EXIT_COMMUNICATION): a bucket that still differs afterwards.
bool replicas_verify(Zero *zero, Peers group, Log *log, int64_t *repairs, Error *err);

LLMC_END
