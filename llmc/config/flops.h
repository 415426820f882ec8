// Floating-point operations of an iteration, for throughput and MFU. Used by log.h's callers and
// plan_report.c.
#pragma once
#include "llmc/config/config.h"
LLMC_BEGIN

// Megatron-LM's FLOPs of one iteration: forward + 2x backward, whole attention, any feed-forward
// width and head size.
double megatron_flops(const Config *config, double batch_sequences);
// The same with causal attention halved and 6N + 6*L*C*T per token.
double causal_flops(const Config *config, double batch_sequences, double parameters);

LLMC_END
