// Elementwise part of Muon on CPU cores: see muon.h.
#include <assert.h>
#include <stdatomic.h>

#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/parallel.h"
#include "sdp4bit/muon.h"

enum { PIECE = 1 << 16 };  // elements per task

// Arguments of a task.
typedef struct Task {
    const MuonPart *part;
    float *direction;
    const floatX *o;
    const Site *site;
} Task;

// Sets the fault unless another thread did.
static void mark_refused(const MuonPart *a) {
    uint64_t nothing = 0;
    atomic_compare_exchange_strong((_Atomic uint64_t *)a->fault, &nothing, a->code);
}

static void update_momentum(void *context, int64_t lo, int64_t hi) {
    const Task *task = (const Task *)context;
    const MuonPart part = *task->part, *a = &part;  // a copy, so that stores do not alias it
    float clip = a->control->clip_coefficient;
    int refused = 0;
    for (int64_t i = lo; i < hi; i++) refused |= !muon_update_momentum(a, clip, i);
    for (int64_t i = lo; task->direction && i < hi; i++)
        task->direction[i] = muon_direction(a, clip, muon_load(a, i), a->grads[i]);
    if (refused) mark_refused(a);
    heartbeat_progress(task->site);
}

void muon_momentum_host(const MuonPart *a, int64_t elements, float *direction, int threads,
                        const Site *site) {
    assert(elements >= 1 && threads >= 1);
    Task task = {.part = a, .direction = direction, .site = site};
    if (a->control->applied) parallel_ranges(threads, 0, elements, PIECE, update_momentum, &task);
}

static void update_weights(void *context, int64_t lo, int64_t hi) {
    const Task *task = (const Task *)context;
    const MuonPart part = *task->part, *a = &part;  // a copy, so that stores do not alias it
    bool refused = false;
    for (int64_t i = lo; i < hi; i++) {
        float *p = &a->master[muon_index(a, i)];
        refused |= !muon_element(a, a->control->learning_rate, p,
                                 floatX_to_float(task->o[muon_output_index(a, i)]));
    }
    if (refused) mark_refused(a);
    heartbeat_progress(task->site);
}

void muon_apply_host(const MuonPart *a, const floatX *o, int threads, const Site *site) {
    assert(threads >= 1);
    Task task = {.part = a, .o = o, .site = site};
    if (a->control->applied) parallel_ranges(threads, 0, a->rows * a->columns, PIECE, update_weights, &task);
}
