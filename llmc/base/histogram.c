// Histograms of fp32 values: see histogram.h.
#include "llmc/base/histogram.h"

#include <assert.h>
#include <math.h>
#include <string.h>

void histogram_add(Histogram *h, const float *values, int64_t n) {
    assert(h && (values || n == 0) && n >= 0);
    h->count += n;
    for (int64_t i = 0; i < n; i++) {
        double x = values[i];
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        if (!isfinite(values[i])) {
            h->non_finite++;
            continue;
        }
        h->sum += x;
        h->squares += x * x;
        h->fourth += x * x * x * x;
        if (fabsf(values[i]) > h->largest) h->largest = fabsf(values[i]);
        if (x == 0.0) h->zeros++;
        else h->bin[bits >> 31][(bits & 0x7FFFFFFFu) >> HISTOGRAM_SHIFT]++;
    }
}

static void write_bins(const int64_t *bin, FILE *out) {
    const char *comma = "";
    for (int i = 0; i < HISTOGRAM_BINS; i++) {
        if (!bin[i]) continue;
        fprintf(out, "%s[%d,%lld]", comma, i, (long long)bin[i]);
        comma = ",";
    }
}

void histogram_write(const Histogram *h, FILE *out) {
    assert(h && out);
    fprintf(out,
            "\"count\":%lld,\"zeros\":%lld,\"non_finite\":%lld,\"sum\":%.17g,\"squares\":%.17g,\"fourth\":%."
            "17g,\"largest\":%.9g,\"positive\":[",
            (long long)h->count, (long long)h->zeros, (long long)h->non_finite, h->sum, h->squares, h->fourth,
            (double)h->largest);
    write_bins(h->bin[0], out);
    fprintf(out, "],\"negative\":[");
    write_bins(h->bin[1], out);
    fprintf(out, "]");
}
