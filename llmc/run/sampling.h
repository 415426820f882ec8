// Picks the next token from logits: temperature, top-k, top-p. Called by sample.c, when the trainer
// writes a sample, and by dev/generate.c.
#pragma once
#include "llmc/base/base.h"
#include "llmc/base/dtype.h"
LLMC_BEGIN

// A token that may be next, and its logit.
typedef struct Candidate {
    float logit;
    int32_t token;
} Candidate;

typedef struct Sampling {
    int vocab;           // logits that count: without the padded rows
    double temperature;  // logits are divided by it; 0 takes the largest
    int top_k;           // of the so many likeliest tokens alone; 0: of all
    double top_p;        // of the fewest likeliest tokens whose probabilities make top_p; 1: of all
    uint64_t seed;
    Candidate *candidates;  // (vocab) scratch; NULL where top_k is 0 and top_p 1
} Sampling;

// Draws a token with uniform number `index` of the seed (rng_uniform). Top-p is applied to what
// top-k has left, as in Hugging Face's transformers. Of equal logits the smaller token comes first.
int sampling_draw(const Sampling *sampling, const floatX *logits, uint64_t index);

LLMC_END
