// Delayed scaling of FP8 linear layers (--fp8-recipe delayed), as checkpoints save it. Equal on all
// ranks. llmc/model/fp8_scaling.c fills and restores it.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

// Owns its arrays. All zeros: no state.
typedef struct Fp8State {
    int scales, length;
    float *scale;    // (scales) finite, above 0
    float *history;  // (scales, length) largest absolute values of past steps, oldest first; finite
} Fp8State;

// Allocates the arrays.
Fp8State fp8_state_new(int scales, int length);
Fp8State fp8_state_copy(const Fp8State *state);
// Leaves the state empty.
void fp8_state_free(Fp8State *state);

LLMC_END
