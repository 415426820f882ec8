// Spikes of losses and norms: see watch.h.
#include "llmc/watch.h"

#include <math.h>

// Afresh from the window each time: running sums would carry a spike's rounding for ever.
static double window_mean(const Watch *watch, int n) {
    double sum = 0.0;
    for (int i = 0; i < n; i++) sum += watch->value[i];
    return sum / n;
}

static double window_deviation(const Watch *watch, int n, double mean) {
    double squares = 0.0;
    for (int i = 0; i < n; i++) squares += (watch->value[i] - mean) * (watch->value[i] - mean);
    return sqrt(squares / (n - 1));
}

bool watch_add(Watch *watch, double value, double deviations, double *above, double *mean) {
    if (!isfinite(value)) return false;
    int n = watch->count < WATCH_WINDOW ? (int)watch->count : WATCH_WINDOW;
    bool spike = false;
    if (watch->silent > 0) watch->silent--;
    else if (n >= WATCH_LEAST) {
        *mean = window_mean(watch, n);
        double deviation = window_deviation(watch, n, *mean);
        *above = (value - *mean) / deviation;
        spike = deviation > 0.0 && *above > deviations;
        if (spike) watch->silent = WATCH_LEAST;
    }
    watch->value[watch->count++ % WATCH_WINDOW] = value;
    return spike;
}
