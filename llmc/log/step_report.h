// Figures of one iteration, or of an interval of iterations, for the log. Filled by
// llmc/run, printed by log.c. All numbers are combined over the ranks.
#pragma once
#include <math.h>

#include "llmc/base/json_line.h"
LLMC_BEGIN

// One iteration.
typedef struct StepReport {
    int64_t iteration, consumed_samples;
    double learning_rate;  // rate of the next iteration, as Megatron prints it
    int global_batch_size;
    double loss;
    bool skipped;                            // the update was not applied
    double grad_norm;                        // before clipping; < 0: not computed, omitted
    double num_zeros, params_norm;           // < 0: omitted
    double reserved_bytes, allocated_bytes;  // device memory, for --log-memory-to-tensorboard; 0: unknown
} StepReport;

// Means or sums over the iterations since the last report.
typedef struct IntervalReport {
    StepReport last;  // the interval's last iteration
    int64_t train_iters;
    int64_t iterations;        // number in this interval
    double elapsed_ms;         // per iteration
    double lm_loss;            // mean over the applied steps; see report_has_loss
    int64_t skipped, nan;      // iterations not applied, not finite
    double tflops_per_gpu;     // Megatron's formula
    double mfu;                // 0..1; <= 0: peak unknown, omitted
    double tokens_per_second;  // whole job; <= 0: omitted
    double inter_node_bytes;   // per step, sent by one node to others (the maximum over nodes)
    double intra_node_bytes;   // per step, sent within one node. Both: gradients and weights between
                               // data-parallel ranks
    double model_bytes;        // per step, sent by one node's ranks (the maximum) for tensor and
                               // pipeline parallelism, including within the node; 0: omitted
    double exposed_comm_ms;    // per step, on the rank that waited least; < 0: not measured, omitted
    double exposed_gradients_ms, exposed_weights_ms;  // its parts: reductions, gathers
    double exposed_most_ms;                           // on the rank that waited most
    double seconds_left;                              // < 0: unknown, omitted
    double epoch;                                     // epoch of the training data, fractional; < 0: unknown
} IntervalReport;

// Returns true if there is a loss to print. As in Megatron-LM there is none if every step was
// skipped (lm_loss is 0). Megatron-LM also omits a NaN, because NaN > 0 is false; here it is
// printed.
static inline bool report_has_loss(const IntervalReport *r) {
    return r->lm_loss > 0 || !isfinite(r->lm_loss);
}

// Appends the line of --log-line short: "step   1200/80000 | loss 3.1234 | norm 0.512 | lr 5.98e-04
// | 105,234 tokens/s | MFU 45.1 % | ETA 1h02m". Unknown values and a zero count of skipped
// iterations are omitted.
void short_line(Text *line, const IntervalReport *report);
// Formats a duration as "1h02m", "3d04h" or "58s": the two largest units; "" if unknown.
void short_duration(char *out, size_t bytes, double seconds);

LLMC_END
