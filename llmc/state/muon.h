// The Muon optimizer (--optimizer muon) for matrices of transformer layers. A rank updates the
// matrices that it owns whole (LayoutTensor.work). AdamW updates the rest.
//
// State: master weights, and one momentum, in the memory of AdamW's first moment. Matrices have no
// second moment.
//
// Called by zero.c and zero_plan.c.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/ops.h"
#include "llmc/state/state_base.h"
#include "sdp4bit/qwd.h"
LLMC_BEGIN

typedef struct Muon {
    NewtonSchulzStep step[MOST_MUON_STEPS];
    int steps;
    // device memory, for the largest part of a matrix
    floatX *x;        // (rows, columns)
    float *partials;  // sums of 32 squares
    float *sum;       // (1)
    void *workspace;  // of op_newton_schulz
} Muon;

// Sets step[0 .. steps - 1] to the coefficients of --muon-coefficient-type.
void muon_coefficients(MuonCoefficients type, NewtonSchulzStep *step, int steps);
// Returns the factor of --muon-scale-mode for a matrix.
double muon_scale(MuonScale mode, int64_t rows, int64_t columns);
// Reserves the buffers. No-op with AdamW.
void muon_reserve(const Base *base, Muon *muon, MemoryPlan *memory_plan);
// Updates momentum and master weights of the matrices of bucket b. Then clears state->grads.matrix,
// so that qwd_update_bucket only codes them. No-op for buckets of AdamW. Runs on lanes->last.
void muon_update(const Base *base, const Muon *muon, int b, BucketState *state, double weight_decay);

LLMC_END
