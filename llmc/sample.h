// Picks the next token from logits. Called by train_gpt.cu when it writes text with the trained model.
#pragma once
#include "llmc/dtype.h"
#include "llmc/base.h"
LLMC_BEGIN
// Draws from softmax(logits[0..vocab) / temperature) with uniform number (seed, position); temperature 0 takes the largest.
int sample_token(const floatX *logits, int vocab, double temperature, uint64_t seed, int64_t position);
LLMC_END
