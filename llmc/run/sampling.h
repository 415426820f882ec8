// Samples the next token from logits with temperature, top-k and top-p. Called by sample.c and
// dev/generate.c.
#pragma once
#include "llmc/base/base.h"
#include "llmc/base/dtype.h"
LLMC_BEGIN

typedef struct Candidate {
    float logit;
    int32_t token;
} Candidate;

typedef struct Sampling {
    int vocab;           // number of logits, without padding
    double temperature;  // divides the logits; 0 means greedy
    int top_k;           // sample among the top_k most likely tokens; 0: no limit
    double top_p;        // nucleus sampling: among the fewest tokens whose probabilities sum to top_p
    uint64_t seed;
    Candidate *candidates;  // (vocab) scratch; NULL if top_k is 0 and top_p is 1
} Sampling;

// Draws a token with the index-th uniform number of the seed (rng_uniform). Top-k is applied before
// top-p, as in Hugging Face's transformers. Ties rank by token id.
int sampling_draw(const Sampling *sampling, const floatX *logits, uint64_t index);

LLMC_END
