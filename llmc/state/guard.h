// The anomaly guard: reads each step status, which the device computes (sdp4bit/step_status.h) and
// which is the same on all ranks. Counts skipped steps, reports spikes of the loss and the gradient
// norm, and ends runs that diverge. Called by llmc/run/run_report.c, at most one step late.
#pragma once
#include "llmc/log/log.h"
#include "llmc/state/run_state.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

typedef struct AnomalyGuard {
    const Config *config;
    const Mesh *mesh;
    int64_t skipped, nan, spikes;  // steps of the whole run: not applied, not finite, reported as a spike
    int64_t repairs;               // repaired replicas (replicas.c)
    int64_t ended_at;              // iteration of the step status that ends the run
} AnomalyGuard;

// Checks the step status of an iteration. Sets err (unless it already holds an error) if the run
// must end. EXIT_DIVERGED: non-finite loss or norm without --on-nan skip, --max-skipped-in-a-row,
// or a refused update. EXIT_COMMUNICATION: a corrupted payload (--verify-wire).
void guard_check(AnomalyGuard *guard, const StepStatus *status, int64_t iteration, Log *log, Error *err);
// Saves and restores the guard's counters and the running means in the latest step status. The next
// step is compared with these means.
void guard_save(const AnomalyGuard *guard, const StepStatus *status, RunState *state);
void guard_restore(AnomalyGuard *guard, StepStatus *status, const RunState *state);

LLMC_END
