// Looks at what quantization does while a run trains, without touching it.
// --log-quantization-error-interval   compares the reduced gradient with the exact reduction of the
//                                     same step, and the replica with the master weights
// --dump-distributions-interval       histograms of the own shard: weights, weight differences, and
//                                     gradients before and after Hadamard
// zero.c calls it at three places of a step that is due. train_gpt.c asks for the report
// afterward. Figures are computed on the host: a step that is due takes longer, the others cost
// nothing.
#pragma once
#include "llmc/comm.h"
#include "llmc/config/config.h"
#include "llmc/base/histogram.h"
#include "llmc/log/log.h"
#include "llmc/base/memory_plan.h"
#include "sdp4bit/tlq_hs.h"
LLMC_BEGIN

struct Zero;

enum ProbeKind {
    PROBE_WEIGHT,
    PROBE_DIFFERENCE,
    PROBE_GRADIENT,
    PROBE_HADAMARD,
    PROBE_ROTATION,
    PROBE_KINDS
};

// Bytes that this rank has handed to the transport: of data parallelism, inside its node and
// between nodes, and of tensor and pipeline parallelism, wherever they go.
typedef struct Traffic {
    uint64_t node, rail, model;
} Traffic;

typedef struct Probe {
    double error_squares, exact_squares;  // of the own shard, in the latest step that was due
    Traffic exact_traffic;                // of exact reductions: no part of what training sends
    Histogram *histograms;                // (tensors, PROBE_KINDS) of the step in progress; NULL: not due
    // device memory, reserved in the memory plan when errors are to be logged
    float *exact;  // (plan.shard_elements) the own shard, reduced in fp32
    TlqWorkspace workspace;
} Probe;

// Makes the folder of --dump-distributions, when there is one, and asks whether this process may
// write there: before a run, and not once per interval. On every rank. Error: EXIT_ENVIRONMENT.
bool probe_folder(const Config *config, Error *err);
// After zero_plan has built the layout. Reserves scratch, when the flags want it.
void probe_reserve(struct Zero *zero, MemoryPlan *memory_plan);
// In the order of zero->lanes->last: a bucket's local gradients are complete, before each reduction
// of them; the step's are reduced; its master weights are updated, and the replica is not yet.
void probe_gradients(struct Zero *zero, const TlqStep *step, int bucket);
void probe_reduced(struct Zero *zero, int bucket);
void probe_updated(struct Zero *zero, int bucket);
// True when the step in progress is to be reported on after zero_update.
bool probe_due(const struct Zero *zero);
// Collective over world, synchronizes. Every element counts once, also where several ranks hold it.
// Rank 0 logs a line, a JSON line and TensorBoard scalars. Every rank writes its histograms to a
// file of its own, FOLDER/iter_0000100.rank_003.jsonl, with a line per tensor and kind. A file that
// cannot be written then costs a warning, and not the run.
void probe_report(struct Zero *zero, Log *log, Peers world);
// What training has sent so far: all but the probe's.
Traffic probe_traffic(const struct Zero *zero);
void probe_free(Probe *probe);

LLMC_END
