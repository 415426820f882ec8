// Order of fetched states: see fetches.h.
#include "llmc/groups/fetches.h"

// Seconds until a request is repeated: without an answer, and while the state arrives.
static const double again_seconds = 5, busy_again_seconds = 20;

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
    return now >= f->asked + (pulls_active(pulls, chunk, true) ? busy_again_seconds : again_seconds);
}
