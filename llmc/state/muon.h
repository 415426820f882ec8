// The Muon optimizer (--optimizer muon) for matrices of transformer layers. A rank updates the
// matrices that it owns whole (LayoutTensor.work). AdamW updates the rest.
//
// State: master weights, and one momentum, in the memory of AdamW's first moment. Matrices have no
// second moment.
//
// With --optimizer-cpu-offload and --optimizer-disk-offload, the state of a matrix is updated on
// host cores, and the device orthogonalizes the momentum, so the results are bitwise identical:
//
//   host    momentum (muon_momentum_host)            update (muon_apply_host), codes
//   copies               direction ->      -> orthogonal
//   device                       orthogonalize
//
// All of it runs in order on QwdHost.stream.
//
// With tensor parallelism and --muon-tp-mode duplicated, the ranks all-gather U, orthogonalize the
// whole matrix, and update their slices of it. Rank i of each tensor-parallel group owns slices of
// the same matrices, in the same order. With blockwise, they orthogonalize their slices.
//
// Called by zero.c and zero_plan.c.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/ops.h"
#include "llmc/state/disk_state.h"
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
    // U of sdp4bit/muon.h, uploaded or gathered; NULL if it is computed from momentum and gradients
    float *directions;
    // page-locked memory, if the state is on the host or on disk
    float *direction;    // (largest matrix) U
    floatX *orthogonal;  // (largest part) copy of the result
    Event *gathered;     // -> compute: the gathers of this step are complete; NULL if there are none
    const Base *base;
    const QwdHost *host;
    DiskState *disk;  // NULL: the state is in host memory
} Muon;

// Sets step[0 .. steps - 1] to the coefficients of --muon-coefficient-type.
void muon_coefficients(MuonCoefficients type, NewtonSchulzStep *step, int steps);
// Returns the factor of --muon-scale-mode for a matrix.
double muon_scale(MuonScale mode, int64_t rows, int64_t columns);
// Reserves the buffers. on_host: the state is not on the device. No-op with AdamW.
void muon_reserve(const Base *base, Muon *muon, bool on_host, MemoryPlan *memory_plan);
// Creates and destroys the event. Call muon_start before muon_start_on_host.
void muon_start(const Base *base, Muon *muon);
void muon_free(Muon *muon);
// Lets qwd_update_bucket queue the updates of buckets of matrices, if the state is not on the
// device. disk: NULL unless it is on disk. Call it once the host store has started.
void muon_start_on_host(const Base *base, Muon *muon, QwdHost *host, DiskState *disk);
// Updates momentum and master weights of the matrices of bucket b. Then clears state->grads.matrix,
// so that qwd_update_bucket only codes them. No-op for buckets of AdamW. Runs on lanes->last. Only
// if the state is on the device.
void muon_update(const Base *base, const Muon *muon, int b, BucketState *state, double weight_decay);
// Makes compute wait for the gathers of the step, because forward and backward use the same
// communicator. Call it when the updates of all buckets have been queued.
void muon_updated(const Base *base, const Muon *muon);

LLMC_END
