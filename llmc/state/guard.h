// The anomaly guard reads each step status, counts skipped steps, reports spikes of the loss and
// the gradient norm, and ends runs that diverge. The device computes the status
// (sdp4bit/step_status.h), which is the same on all ranks. Called by llmc/run/run_report.c.
#pragma once
#include "llmc/log/log.h"
#include "llmc/state/run_state.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

typedef struct AnomalyGuard {
    const Config *config;
    const Mesh *mesh;
    int64_t skipped, nan, spikes;  // numbers of skipped steps, non-finite steps and spikes so far
    int64_t repairs;               // repairs of replicas (replicas.c)
    int64_t ended_at;              // iteration whose status ends the run; 0: none
} AnomalyGuard;

// Checks the step status of an iteration. If the run must end, sets err unless it is already set.
//   EXIT_DIVERGED       non-finite loss or norm without --on-nan skip, --max-skipped-in-a-row
//                       skipped steps in a row, or a refused update
//   EXIT_COMMUNICATION  a corrupted payload (--verify-wire)
void guard_check(AnomalyGuard *guard, const StepStatus *status, int64_t iteration, Log *log, Error *err);
// Save and restore the guard's counters and the step status's running means.
void guard_save(const AnomalyGuard *guard, const StepStatus *status, RunState *state);
void guard_restore(AnomalyGuard *guard, StepStatus *status, const RunState *state);

LLMC_END
