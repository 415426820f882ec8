// Muon's kernels on CPUs: see muon.h.
#include "sdp4bit/muon.h"

#include "llmc/ranks/heartbeat.h"

static const Site *site_of(const Stream *s) { return s ? stream_site(s) : NULL; }

void kernel_muon_momentum(Stream *s, const MuonPart *a, int64_t elements, float *direction) {
    muon_momentum_host(a, elements, direction, 1, site_of(s));
}

static float direction_of(const MuonPart *a, int64_t i) {
    int64_t at = muon_index(a, i);
    return muon_direction(a, a->control->clip_coefficient, muon_load(a, at), a->grads[at]);
}

void kernel_muon_squares(Stream *s, const MuonPart *a, float *partials) {
    int64_t n = a->rows * a->columns;
    for (int64_t first = 0; first < n; first += HADAMARD_ORDER) {
        float squares[HADAMARD_ORDER] = {0};
        for (int64_t i = first; i < n && i < first + HADAMARD_ORDER; i++) {
            float u = direction_of(a, i);
            squares[i - first] = f32_mul(u, u);
        }
        partials[first / HADAMARD_ORDER] = tree_sum(squares, HADAMARD_ORDER);
    }
    if (s) heartbeat_waiting(stream_site(s), false);
}

void kernel_muon_normalize(Stream *s, const MuonPart *a, const float *sum, floatX *x) {
    float norm = muon_norm(*sum);
    for (int64_t i = 0; i < a->rows * a->columns; i++)
        x[i] = floatX_from_float(f32_div(direction_of(a, i), norm));
}

void kernel_muon_apply(Stream *s, const MuonPart *a, const floatX *o) {
    muon_apply_host(a, o, 1, site_of(s));
}
