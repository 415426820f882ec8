// The anomaly guard reads each step's verdict, which the device has reached (kernel_step_status,
// sdp4bit/spikes.h) and all ranks share. It counts what was skipped, reports spikes of the loss and
// of the gradient norm, and says when the run must end. Called by llmc/run/report.c as it learns of
// step statuses, at most a step late.
#pragma once
#include "llmc/log/log.h"
#include "llmc/state/run_state.h"
#include "sdp4bit/wire.h"
LLMC_BEGIN

typedef struct AnomalyGuard {
    const Config *config;
    const Mesh *mesh;
    int64_t skipped, nan, spikes;  // steps of the whole run: not applied, not finite, reported as a spike
    int64_t repairs;               // replicas.h counts here
    int64_t ended_at;              // iteration of the step status that ends the run
} AnomalyGuard;

// Takes the step status of an iteration. When it ends the run, err (unless it holds an error
// already) says why. EXIT_DIVERGED: a loss or norm that is not finite without --on-nan skip,
// --max-skipped-in-a-row, or an update that was refused. EXIT_COMMUNICATION: a message that arrived
// wrong (--verify-wire).
void guard_check(AnomalyGuard *guard, const StepStatus *verdict, int64_t iteration, Log *log, Error *err);
// The anomaly guard's part of a checkpoint: its counters, and the means in the latest verdict,
// which the next step is measured by.
void guard_save(const AnomalyGuard *guard, const StepStatus *verdict, RunState *state);
void guard_restore(AnomalyGuard *guard, StepStatus *verdict, const RunState *state);

LLMC_END
