// The short iteration line: see short_line.h.
#include "llmc/log/short_line.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

void short_duration(char *out, size_t bytes, double seconds) {
    int64_t s = seconds >= 0 && seconds <= 1e10 ? (int64_t)(seconds + 0.5) : -1;
    if (s < 0) snprintf(out, bytes, "%s", "");
    else if (s >= 86400) snprintf(out, bytes, "%lldd%02dh", (long long)(s / 86400), (int)(s % 86400 / 3600));
    else if (s >= 3600) snprintf(out, bytes, "%dh%02dm", (int)(s / 3600), (int)(s % 3600 / 60));
    else if (s >= 60) snprintf(out, bytes, "%dm%02ds", (int)(s / 60), (int)(s % 60));
    else snprintf(out, bytes, "%ds", (int)s);
}

static void append(char *out, size_t bytes, size_t *at, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static void append(char *out, size_t bytes, size_t *at, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(out + *at, bytes - *at, format, args);
    va_end(args);
    if (n > 0) *at = *at + (size_t)n < bytes ? *at + (size_t)n : bytes - 1;
}

// Formats an integer with commas between thousands.
static void with_commas(char *out, size_t bytes, double value) {
    char digits[32];
    int n = snprintf(digits, sizeof digits, "%.0f", value);
    size_t at = 0;
    for (int i = 0; i < n; i++) append(out, bytes, &at, i && (n - i) % 3 == 0 ? ",%c" : "%c", digits[i]);
}

void short_line(char *out, size_t bytes, const IntervalReport *r) {
    assert(out && bytes > 0 && r);
    char text[64];
    size_t at = 0;
    append(out, bytes, &at, "step %6lld/%lld", (long long)r->last.iteration, (long long)r->train_iters);
    if (report_has_loss(r)) append(out, bytes, &at, " | loss %.4f", isnan(r->lm_loss) ? NAN : r->lm_loss);
    if (!(r->last.grad_norm < 0))
        append(out, bytes, &at, " | norm %.3f", isnan(r->last.grad_norm) ? NAN : r->last.grad_norm);
    append(out, bytes, &at, " | lr %.2e", r->last.learning_rate);
    if (r->tokens_per_second > 0) {
        with_commas(text, sizeof text, r->tokens_per_second);
        append(out, bytes, &at, " | %s tokens/s", text);
    }
    if (r->mfu > 0) append(out, bytes, &at, " | MFU %.1f %%", 100 * r->mfu);
    short_duration(text, sizeof text, r->seconds_left);
    if (*text) append(out, bytes, &at, " | ETA %s", text);
    if (r->skipped > 0) append(out, bytes, &at, " | %lld skipped", (long long)r->skipped);
}
