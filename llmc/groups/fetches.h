// States of chunks that the trainer fetches from other groups: which ones to ask for now. Another
// group copies a state between two of its steps, so a group that joins asks for the next states
// while one is still arriving. Without network or clock.
#pragma once
#include "llmc/groups/pulls.h"
LLMC_BEGIN

enum {
    // Memory of the states that are fetched ahead, unless AHEAD_STATES are larger. Larger models
    // take longer steps, between which states are served.
    AHEAD_BYTES = 256 << 20,
    AHEAD_STATES = 2,
    // A state is requested once the pending ones need less than this. Earlier requests would be
    // stale on slow links.
    AHEAD_SECONDS = 10
};

typedef struct Fetch {
    bool active;
    bool ahead;     // the trainer waits for another chunk, or does not wait yet
    bool begun;     // has been asked for
    bool keep;      // no group has newer state
    int64_t round;  // -1: not complete
    uint64_t chain;
    Offer *latest;  // (latests) the last offer of each group that the state contains
    int latests;
    uint64_t failed;  // hash of a state that could not be fetched from the group that served it
    Payload *payload;
    double asked;
} Fetch;

// Returns true if the state of a chunk must be asked for now, for the first time or again. fetch,
// bytes: (chunks) all fetches, and the size of each state.
bool fetch_due(const Fetch *fetch, const int64_t *bytes, int chunks, int chunk, const Pulls *pulls,
               double now);

LLMC_END
