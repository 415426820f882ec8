// Histograms of fp32 values. The bins do not depend on the values, so that histograms of several
// ranks and tensors can be added. Used by probe.c.
#pragma once
#include <stdio.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// Bin i holds the values whose magnitude has the upper 11 bits i: the exponent and three bits of
// the fraction, so eight bins from one power of two to the next. Its lower edge is the float with
// the bits i << 20.
enum { HISTOGRAM_BINS = 2048, HISTOGRAM_SHIFT = 20 };

typedef struct Histogram {
    int64_t count, zeros, non_finite;  // count includes the other two
    double sum, squares, fourth;       // of x, x^2, x^4, finite values
    float largest;                     // magnitude
    int64_t bin[2][HISTOGRAM_BINS];    // [0] positive, [1] negative
} Histogram;

void histogram_add(Histogram *histogram, const float *values, int64_t n);
// The inside of a JSON object: count, zeros, non_finite, sum, squares, fourth, largest, and
// "positive" and "negative": [[bin, count], ...] of bins in use.
void histogram_write(const Histogram *histogram, FILE *out);

LLMC_END
