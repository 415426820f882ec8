// Muon's kernels on CPUs: see muon.h.
#include "sdp4bit/muon.h"

#include <assert.h>

#include "llmc/ranks/heartbeat.h"

static void mark_refused(const MuonPart *a, bool refused) {
    if (refused && !*a->fault) *a->fault = a->code;
}

void kernel_muon_momentum(Stream *s, const MuonPart *a, int64_t elements) {
    assert(elements >= 1);
    float clip = a->control->clip_coefficient;
    bool refused = false;
    if (!a->control->applied) return;
    for (int64_t i = 0; i < elements; i++) {
        float next = muon_momentum(a, clip, a->momentum[i], a->grads[i]);
        if (muon_finite(next)) a->momentum[i] = next;
        else refused = true;
    }
    mark_refused(a, refused);
}

static float direction(const MuonPart *a, int64_t i) {
    int64_t at = muon_index(a, i);
    return muon_direction(a, a->control->clip_coefficient, a->momentum[at], a->grads[at]);
}

void kernel_muon_squares(Stream *s, const MuonPart *a, float *partials) {
    int64_t n = a->rows * a->columns;
    for (int64_t first = 0; first < n; first += HADAMARD_ORDER) {
        float squares[HADAMARD_ORDER] = {0};
        for (int64_t i = first; i < n && i < first + HADAMARD_ORDER; i++) {
            float u = direction(a, i);
            squares[i - first] = f32_mul(u, u);
        }
        partials[first / HADAMARD_ORDER] = tree_sum(squares, HADAMARD_ORDER);
    }
    if (s) heartbeat_waiting(stream_site(s), false);
}

void kernel_muon_normalize(Stream *s, const MuonPart *a, const float *sum, floatX *x) {
    float norm = muon_norm(*sum);
    for (int64_t i = 0; i < a->rows * a->columns; i++)
        x[i] = floatX_from_float(f32_div(direction(a, i), norm));
}

void kernel_muon_apply(Stream *s, const MuonPart *a, const floatX *o) {
    bool refused = false;
    if (!a->control->applied) return;
    for (int64_t i = 0; i < a->rows * a->columns; i++) {
        float *p = &a->master[muon_index(a, i)];
        refused |= !muon_element(a, a->control->learning_rate, p, floatX_to_float(o[i]));
    }
    mark_refused(a, refused);
}
