// Host copy of the state of delayed scaling: see fp8_state.h. Called by llmc/model/fp8_scaling.c
// and llmc/checkpoint.
#include "llmc/state/fp8_state.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

Fp8State fp8_state_new(int scales, int length) {
    assert(scales >= 0 && length >= 0);
    size_t entries = (size_t)scales * (size_t)length;
    return (Fp8State){.scales = scales,
                      .length = length,
                      .scale = xcalloc((size_t)scales + 1, sizeof(float), "FP8 scales"),
                      .history = xcalloc(entries + 1, sizeof(float), "FP8 histories")};
}

Fp8State fp8_state_copy(const Fp8State *state) {
    Fp8State copy = fp8_state_new(state->scales, state->length);
    size_t scales = (size_t)state->scales;
    if (scales == 0) return copy;
    memcpy(copy.scale, state->scale, scales * sizeof(float));
    memcpy(copy.history, state->history, scales * (size_t)state->length * sizeof(float));
    return copy;
}

void fp8_state_free(Fp8State *state) {
    free(state->scale);
    free(state->history);
    memset(state, 0, sizeof *state);
}
