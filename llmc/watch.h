// Watches a series of losses or gradient norms for values far above the recent ones, and says so; it decides nothing. Called by log.c for every iteration.
#pragma once
#include "llmc/base.h"
LLMC_BEGIN

enum { WATCH_WINDOW = 128, WATCH_LEAST = 32 };  // values that a new one is compared with; from how many on

typedef struct Watch {
    double value[WATCH_WINDOW];
    int64_t count;   // finite values seen
    int64_t silent;  // values until the next warning may come
} Watch;

// Adds the value; true when it lies more than `deviations` standard deviations above the mean of the window before it, and no other did among the last
// WATCH_LEAST. *above and *mean are then the distance, in standard deviations, and that mean. A value that is not finite is left out.
bool watch_add(Watch *watch, double value, double deviations, double *above, double *mean);

LLMC_END
