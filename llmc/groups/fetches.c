// Order of fetched states: see fetches.h.
#include "llmc/groups/fetches.h"

#include <math.h>

// Seconds until a request is repeated: without an answer, and since the last piece of the state.
// While pieces arrive, another request would begin the transfer of a newer state.
static const double again_seconds = 5, quiet_seconds = 20;

// Returns true if the link would soon be idle, and memory suffices for another state.
static bool ahead_due(const Fetch *fetch, const int64_t *bytes, int chunks, int chunk, const Pulls *pulls,
                      double now) {
    int64_t missing = 0, held = 0;
    int states = 0;
    for (int c = 0; c < chunks; c++) {
        if (!fetch[c].active || !fetch[c].begun) continue;
        if (fetch[c].round < 0) missing += bytes[c] - pulls_received(pulls, c);
        if (!fetch[c].ahead) continue;
        held += bytes[c];
        states++;
    }
    bool fits = states < AHEAD_STATES || held + bytes[chunk] <= AHEAD_BYTES;
    return fits && (double)missing <= AHEAD_SECONDS * pulls_rate(pulls, now);
}

bool fetch_due(const Fetch *fetch, const int64_t *bytes, int chunks, int chunk, const Pulls *pulls,
               double now) {
    const Fetch *f = &fetch[chunk];
    if (!f->active || f->round >= 0) return false;
    if (!f->begun) return !f->ahead || ahead_due(fetch, bytes, chunks, chunk, pulls, now);
    double moved = pulls_moved(pulls, chunk);
    if (moved > 0) return now >= fmax(f->asked, moved) + quiet_seconds;
    return now >= f->asked + again_seconds;
}
