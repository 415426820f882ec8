// The short iteration line: see step_report.h.
#include "llmc/log/step_report.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>

void short_duration(char *out, size_t bytes, double seconds) {
    assert(out && bytes > 0);
    int64_t s = seconds >= 0 && seconds <= 1e10 ? (int64_t)(seconds + 0.5) : -1;
    if (s < 0) snprintf(out, bytes, "%s", "");
    else if (s >= 86400) snprintf(out, bytes, "%lldd%02dh", (long long)(s / 86400), (int)(s % 86400 / 3600));
    else if (s >= 3600) snprintf(out, bytes, "%dh%02dm", (int)(s / 3600), (int)(s % 3600 / 60));
    else if (s >= 60) snprintf(out, bytes, "%dm%02ds", (int)(s / 60), (int)(s % 60));
    else snprintf(out, bytes, "%ds", (int)s);
}

void short_line(Text *line, const IntervalReport *r) {
    assert(line && r);
    char left[32], digits[32];
    text_add(line, "step %6lld/%lld", (long long)r->last.iteration, (long long)r->train_iters);
    if (report_has_loss(r)) text_add(line, " | loss %.4f", isnan(r->lm_loss) ? NAN : r->lm_loss);
    if (!(r->last.grad_norm < 0))
        text_add(line, " | norm %.3f", isnan(r->last.grad_norm) ? NAN : r->last.grad_norm);
    text_add(line, " | lr %.2e", r->last.learning_rate);
    if (r->tokens_per_second > 0) {
        int n = snprintf(digits, sizeof digits, "%.0f", r->tokens_per_second);
        text_add(line, " | ");
        for (int i = 0; i < n; i++) text_add(line, i && (n - i) % 3 == 0 ? ",%c" : "%c", digits[i]);
        text_add(line, " tokens/s");
    }
    if (r->mfu > 0) text_add(line, " | MFU %.1f %%", 100 * r->mfu);
    short_duration(left, sizeof left, r->seconds_left);
    if (*left) text_add(line, " | ETA %s", left);
    if (r->skipped > 0) text_add(line, " | %lld skipped", (long long)r->skipped);
}
