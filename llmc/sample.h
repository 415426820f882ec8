// Picks the next token from logits, and prints tokens as text. Called by train_gpt.cu when it writes with the trained model.
#pragma once
#include <stdio.h>

#include "llmc/dtype.h"
#include "llmc/tokenizer.h"
LLMC_BEGIN
// Draws from softmax(logits[0..vocab) / temperature) with uniform number (seed, position); temperature 0 takes the largest.
int sample_token(const floatX *logits, int vocab, double temperature, uint64_t seed, int64_t position);
// The n ids as one line of text or more; what is not UTF-8 (a model of bytes may write anything) shows as U+FFFD.
void sample_print(FILE *out, const Tokenizer *tokenizer, const int32_t *ids, int64_t n);
LLMC_END
