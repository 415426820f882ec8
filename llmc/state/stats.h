// Quantization statistics: measure how quantization affects gradients and weights during a run,
// without changing its results.
//   --log-quantization-error-interval   compares the reduced gradient with an exact reduction of
//                                       the same step, and the model weights with the master
//                                       weights
//   --dump-distributions-interval       histograms of this rank's shard: weights, weight
//                                       differences, gradients before and after the Hadamard
//                                       transform
// The hooks called by zero.c compute on the host, so steps whose statistics are reported take
// longer. In other steps they are no-ops.
#pragma once
#include "llmc/base/histogram.h"
#include "llmc/base/memory_plan.h"
#include "llmc/log/log.h"
#include "llmc/state/state_base.h"
#include "llmc/state/optimizer.h"
#include "llmc/state/weights.h"
#include "sdp4bit/tlq_hs.h"
LLMC_BEGIN

enum StatsKind {
    STATS_WEIGHT,
    STATS_DIFFERENCE,
    STATS_GRADIENT,
    STATS_HADAMARD,
    STATS_ROTATION,
    STATS_KINDS
};

// Bytes that this rank has sent. Data parallelism: within its node (node) and between nodes (rail).
// Tensor and pipeline parallelism: model.
typedef struct Traffic {
    uint64_t node, rail, model;
} Traffic;

typedef struct Stats {
    double error_squares, exact_squares;  // sums over this rank's shard in the step in progress
    Traffic exact_traffic;                // bytes of all exact reductions, which are not training traffic
    Histogram *histograms;                // (tensors, STATS_KINDS) of the step in progress, or NULL
    // device memory, reserved with --log-quantization-error-interval
    float *exact;  // (layout.shard_elements) this rank's shard, reduced in fp32
    TlqWorkspace workspace;
} Stats;

// Creates the folder of --dump-distributions and checks that it is writable. Called on every rank
// before training. Error: EXIT_ENVIRONMENT.
bool stats_folder(const Config *config, Error *err);
// Reserves memory if --log-quantization-error-interval is set. Requires the bucket layout.
void stats_reserve(const Base *base, Stats *stats, MemoryPlan *memory_plan);
void stats_free(Stats *stats);
// Returns true if the statistics of the step in progress are reported.
bool stats_due(const Base *base);
// The hooks; they wait for earlier work on lanes->last. Called before every reduction of a bucket,
// when all of it is complete. grads: this rank's local gradients.
void stats_before_reduction(const Base *base, Stats *stats, const TlqStep *step, int b, const float *grads);
// Called after the step's last reduction of a bucket. own: this rank's reduced gradients.
void stats_after_reduction(const Base *base, Stats *stats, int b, GradShard own);
// Called after the AdamW update of a bucket, before its payload is applied.
void stats_after_update(const Base *base, Stats *stats, const Optimizer *optimizer, const Weights *weights,
                        int b);
// Reports the statistics of the step in progress. Every element counts once, even if several ranks
// hold it. Rank 0 logs quantization errors as a line, a JSON line and TensorBoard scalars. Every
// rank writes its histograms to FOLDER/iter_0000100.rank_003.jsonl with one line per tensor and
// kind, and warns if it cannot. Collective over world; waits for the device.
void stats_report(const Base *base, Stats *stats, const Optimizer *optimizer, Weights *weights, Log *log,
                  Peers world);
// Returns the bytes that training has sent so far, without the exact reductions.
Traffic stats_traffic(const Base *base, const Stats *stats);

LLMC_END
