// Picks the next token from logits, and prints tokens as text. Called by write_sample, when the
// model writes.
#pragma once
#include "llmc/base/dtype.h"
#include "llmc/log/log.h"
#include "llmc/data/tokenizer.h"
LLMC_BEGIN
// Draws from softmax(logits[0..vocab) / temperature) with uniform number (seed, position).
// Temperature 0 takes the largest.
int sample_token(const floatX *logits, int vocab, double temperature, uint64_t seed, int64_t position);
// The n ids as text, to be freed. What is not UTF-8 shows as U+FFFD: a model of bytes may write
// anything.
char *sample_text(const Tokenizer *tokenizer, const int32_t *ids, int64_t n);
// Prints that text, and writes it as a JSON line and a TensorBoard text.
void sample_log(Log *log, int64_t iteration, const Tokenizer *tokenizer, const int32_t *ids, int64_t n);
LLMC_END
