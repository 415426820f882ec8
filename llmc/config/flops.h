// Floating-point operations per iteration, for throughput and MFU.
#pragma once
#include "llmc/config/config.h"
LLMC_BEGIN

// Megatron-LM's formula: forward plus twice that for backward, full attention, any MLP width and
// head size.
double megatron_flops(const Config *config, double batch_sequences);
// Counts causal attention half: 6N + 6*L*C*T per token.
double causal_flops(const Config *config, double batch_sequences, double parameters);

LLMC_END
