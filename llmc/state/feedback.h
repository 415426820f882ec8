// --error-feedback: the residual of the gradient hop between nodes (sdp4bit/README.md). Called by
// the files of llmc/state; sdp4bit/tlq_hs.c reads and writes the memory.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/state/base.h"
#include "sdp4bit/tlq_hs.h"
LLMC_BEGIN

// A rank holds the residual of the matrix shards it quantizes for the other nodes: the shards of
// the ranks on its rail. Together the ranks of a node hold each element once.
typedef struct Feedback {
    float *memory;   // device: bucket by bucket, (nodes, matrix_per_rank); NULL without error feedback
    int64_t *start;  // (buckets) first element of a bucket
    Range *ranges;   // (range_count) state_at: in `memory`
    int range_count;
} Feedback;

void feedback_reserve(const Base *base, Feedback *feedback, MemoryPlan *memory_plan);
void feedback_free(Feedback *feedback);
// Sets the residual in `step`, a reduction of bucket b whose grad_format and micro_batch are set.
// frozen: the reduction must not change the residual.
void feedback_step(const Base *base, const Feedback *feedback, int b, bool frozen, TlqStep *step);
static inline bool feedback_on(const Feedback *feedback) { return feedback->start != NULL; }

LLMC_END
