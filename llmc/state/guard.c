// The anomaly guard: see guard.h.
#include "llmc/state/guard.h"

#include <assert.h>
#include <math.h>

// Clears the sign of a NaN, so that messages show "nan" instead of "-nan".
static double shown(float x) { return isnan(x) ? NAN : (double)x; }

static void report_spike(const AnomalyGuard *s, const StepStatus *v, int64_t iteration, const char *what,
                         double value, double limit, double factor, Log *log) {
    log_line(log,
             "WARNING: iteration %lld: spike: %s %.6E is above %.6E, its running mean plus %g deviations; "
             "the step was %s (spike %lld)",
             (long long)iteration, what, value, limit, factor, v->applied ? "applied" : "skipped",
             (long long)s->spikes);
    Text json = json_begin("spike");
    json_integer(&json, "iteration", iteration);
    json_text(&json, "what", what);
    json_number(&json, "value", value);
    json_number(&json, "limit", limit);
    json_bool(&json, "skipped", !v->applied);
    log_json(log, &json);
}

static void report_spikes(AnomalyGuard *s, const StepStatus *v, int64_t iteration, Log *log) {
    const SpikeState *found = &v->spikes;
    const Config *c = s->config;
    if (!found->found) return;
    s->spikes++;
    if (found->found & SPIKE_LOSS)
        report_spike(s, v, iteration, "loss", v->loss, found->loss_limit, c->loss_spike_factor, log);
    if (found->found & SPIKE_NORM)
        report_spike(s, v, iteration, "gradient norm", v->grad_norm, found->norm_limit, c->norm_spike_factor,
                     log);
}

void guard_check(AnomalyGuard *s, const StepStatus *v, int64_t iteration, Log *log, Error *err) {
    assert(iteration >= 1);
    const Config *c = s->config;
    bool finite = isfinite(v->loss) && isfinite(v->grad_norm);
    s->skipped += !v->applied;
    s->nan += !finite;
    report_spikes(s, v, iteration, log);
    if (err->code) return;
    if (v->fault) {
        fault_error(v->fault, mesh_status_group(s->mesh)->first + v->fault_rank, s->mesh, err);
    } else if (!finite && c->check_for_nan_in_loss_and_grad && c->on_nan == ON_NAN_ABORT) {
        error_set(err, EXIT_DIVERGED,
                  "the loss (%g) or the gradient norm (%g) is not finite, so the step was not applied; lower "
                  "--lr, check the "
                  "data, or use --on-nan skip",
                  shown(v->loss), shown(v->grad_norm));
    } else if (!v->applied && c->max_skipped_in_a_row > 0 &&
               v->spikes.skipped_in_a_row >= c->max_skipped_in_a_row) {
        error_set(err, EXIT_DIVERGED,
                  "%lld steps in a row were skipped, the last with loss %g, gradient norm %g; lower --lr or "
                  "check the data (--max-skipped-in-a-row sets the limit)",
                  (long long)v->spikes.skipped_in_a_row, shown(v->loss), shown(v->grad_norm));
    }
    // A refused update is reported one step late, with the next step's record.
    bool before = v->fault && fault_origin(v->fault) == FAULT_OF_UPDATE;
    if (err->code) s->ended_at = before ? iteration - 1 : iteration;
}

void guard_save(const AnomalyGuard *s, const StepStatus *v, RunState *state) {
    state->skipped_iterations = s->skipped;
    state->nan_iterations = s->nan;
    state->spikes = s->spikes;
    state->repairs = s->repairs;
    state->spikes_seen = v->spikes.seen;
    state->skipped_in_a_row = v->spikes.skipped_in_a_row;
    state->loss_mean = v->spikes.loss.mean;
    state->loss_deviation = v->spikes.loss.deviation;
    state->norm_mean = v->spikes.norm.mean;
    state->norm_deviation = v->spikes.norm.deviation;
}

void guard_restore(AnomalyGuard *s, StepStatus *v, const RunState *state) {
    s->skipped = state->skipped_iterations;
    s->nan = state->nan_iterations;
    s->spikes = state->spikes;
    s->repairs = state->repairs;
    v->spikes.seen = state->spikes_seen;
    v->spikes.skipped_in_a_row = state->skipped_in_a_row;
    v->spikes.loss.mean = state->loss_mean;
    v->spikes.loss.deviation = state->loss_deviation;
    v->spikes.norm.mean = state->norm_mean;
    v->spikes.norm.deviation = state->norm_deviation;
}
