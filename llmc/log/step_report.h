// Figures of one iteration, or of an interval of iterations, for the log. llmc/run fills them in
// and log.c prints them. All figures are combined over the ranks.
#pragma once
#include <math.h>

#include "llmc/base/json_line.h"
LLMC_BEGIN

// One iteration.
typedef struct StepReport {
    int64_t iteration, consumed_samples;
    double learning_rate;  // of the next iteration, as in Megatron-LM's log
    int global_batch_size;
    double loss;
    bool skipped;                            // the update was not applied
    double grad_norm;                        // before clipping; < 0: not computed
    double num_zeros, params_norm;           // < 0: not computed
    double reserved_bytes, allocated_bytes;  // device memory, for --log-memory-to-tensorboard; 0: unknown
} StepReport;

// Means or sums over the iterations since the last report. Unknown values are not printed.
typedef struct IntervalReport {
    StepReport last;  // last iteration of the interval
    int64_t train_iters;
    int64_t iterations;        // number of iterations in the interval
    double elapsed_ms;         // mean time of an iteration
    double lm_loss;            // mean over the applied steps; see report_has_loss
    int64_t skipped, nan;      // numbers of skipped and of non-finite iterations
    double tflops_per_gpu;     // by Megatron-LM's FLOPs formula
    double mfu;                // model FLOPs utilization, 0..1; <= 0: unknown
    double tokens_per_second;  // of all ranks; <= 0: unknown
    // Bytes per step sent by the busiest node. The first two count gradients and weights of data
    // parallelism. model_bytes counts all messages of tensor and pipeline parallelism; 0: none.
    double inter_node_bytes, intra_node_bytes, model_bytes;
    double exposed_comm_ms;  // mean of a step, on the rank that waited least; < 0: not measured
    double exposed_gradients_ms, exposed_weights_ms;  // parts of exposed_comm_ms: reductions, gathers
    double exposed_most_ms;                           // exposed_comm_ms of the rank that waited most
    double seconds_left;                              // until the end of the run; < 0: unknown
    double epoch;  // position in the training data, in epochs; < 0: unknown
} IntervalReport;

// Returns true if there is a loss to print. As in Megatron-LM, there is none if all steps were
// skipped (lm_loss is 0). Unlike Megatron-LM, prints NaN.
static inline bool report_has_loss(const IntervalReport *r) {
    return r->lm_loss > 0 || !isfinite(r->lm_loss);
}

// Appends the line of --log-line short, without unknown values: "step   1200/80000 | loss 3.1234 |
// norm 0.512 | lr 5.98e-04 | 105,234 tokens/s | MFU 45.1 % | ..."
void short_line(Text *line, const IntervalReport *report);
// Formats a duration in its two largest units: "1h02m", "3d04h", "58s"; "" if unknown.
void short_duration(char *out, size_t bytes, double seconds);

LLMC_END
