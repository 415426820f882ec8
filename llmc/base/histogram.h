// Histograms of fp32 values with fixed bins, so that histograms of several ranks and tensors can be
// added.
#pragma once
#include <stdio.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// Bin i holds values whose magnitude has i as its upper 11 bits: exponent and three fraction bits,
// so eight bins per power of two. Its lower edge is the float with bits i << 20.
enum { HISTOGRAM_BINS = 2048, HISTOGRAM_SHIFT = 20 };

typedef struct Histogram {
    int64_t count, zeros, non_finite;  // count includes zeros and non_finite
    double sum, squares, fourth;       // sums of x, x^2 and x^4 over the finite values
    float largest;                     // magnitude
    int64_t bin[2][HISTOGRAM_BINS];    // [0] positive, [1] negative
} Histogram;

void histogram_add(Histogram *histogram, const float *values, int64_t n);
// Writes the members of a JSON object: count, zeros, non_finite, sum, squares, fourth, largest, and
// "positive" and "negative": [[bin, count], ...] of non-empty bins.
void histogram_write(const Histogram *histogram, FILE *out);

LLMC_END
