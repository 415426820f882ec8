// Samples the next token from logits with temperature, top-k and top-p. Used by sample.c and
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
    double temperature;  // divides the logits; 0: greedy
    int top_k;           // samples among the top_k most likely tokens; 0: no limit
    double top_p;        // nucleus sampling: fewest tokens with a total probability of top_p
    uint64_t seed;
    Candidate *candidates;  // (vocab) scratch; NULL if top_k is 0 and top_p is 1
} Sampling;

// Draws a token, using the uniform random number `index` of the seed (rng_uniform). Applies top-k
// before top-p, as Hugging Face's transformers does. Equal logits rank by token id.
int sampling_draw(const Sampling *sampling, const floatX *logits, uint64_t index);

LLMC_END
