// State of the rendezvous. Included by rounds_groups.c, rounds_fetch.c and rounds_close.c only.
#pragma once
#include "llmc/groups/rounds.h"
LLMC_BEGIN

typedef struct Group {
    char name[NAME_BYTES], address[ADDRESS_BYTES];
    uint64_t incarnation;
    bool used, joined;
    bool reporting;  // between hello and reported
    bool late;       // missed the end of a grace period: rounds don't wait for its offers
    bool lagging;    // did not hold the offers at the end of a grace period: rounds don't wait for it
    bool slow;       // others did not hold its offer at the end of a grace period: rounds don't wait for them
    bool silent;
    double heard;
    int quorum;
    double grace;
    int64_t iteration, tokens, last_round, rounds_late;
    double rate;
    uint64_t deal;  // latest request for samples
    int64_t dealt;  // its answer
} Group;

typedef struct Closed {
    int64_t round;
    uint64_t chain;
    int offers;
    Offer *offer;     // (offers) sorted by name
    uint64_t hashed;  // groups whose hash is in `hash`
    uint64_t hash[MAX_GROUPS];
} Closed;

typedef struct OpenOffer {
    bool open;
    uint64_t holders;  // groups that hold all of it, the owner included
    double since;      // time since which its group has waited for a round with it
    Offer offer;
} OpenOffer;

// What the rendezvous knows about a group's rounds of a chunk.
typedef struct Known {
    bool ready;  // has state
    bool wants;  // fetches state
    bool stale;  // has an earlier state, of this round
    bool had;    // has or had state, perhaps a newer one than the others
    int64_t stale_round;
    int64_t round;  // last round that it knows or was sent
    uint64_t chain;
    int64_t counted;  // number of its last offer in a closed round, since it fetched the state
    int64_t counted_round;
} Known;

typedef struct Chunk {
    int64_t round;  // last closed round; -1: no group has state
    uint64_t chain;
    Closed log[LOG_ROUNDS];  // (logged) oldest first
    int logged;
    OpenOffer open[MAX_GROUPS];
    Known known[MAX_GROUPS];
    int source;  // group that was asked to serve the state; -1: none
    double asked;
    bool served;  // `serving` is valid
    Message serving;
} Chunk;

struct Rounds {
    RoundsOptions options;
    double now, started, ticked;
    double lost_at;             // time since which no group with state has been lost that may come back
    char identity[TEXT_BYTES];  // cut off if it is too long; `run` is the hash of all of it
    uint64_t run;
    int chunks;  // 0: no run
    Chunk *chunk;
    Group group[MAX_GROUPS];
    int64_t dealt;  // training samples dealt to all groups
    int founder;    // group that was told to begin the run; -1: none
    // After a restart: number of earlier groups, as reported. Rounds wait until as many rejoin, at
    // most a grace period. -1: not waiting.
    int expected;
};

#define GROUP_BIT(g) (UINT64_C(1) << (g))

// Sends to one group, and to all groups that have joined.
void rounds_send(Rounds *r, int g, Message *message);
void rounds_send_all(Rounds *r, Message *message);
void rounds_news(Rounds *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
int rounds_present(const Rounds *r);

// Takes over a round that a group reports: a first one, or the next after the last closed round, or
// a longer history. Returns false if it contradicts the run's history.
bool rounds_adopt(Rounds *r, int c, int64_t round, uint64_t chain, const Offer *offer, int offers);
// Sends the closed rounds that the group does not know, or tells it to fetch the state.
void rounds_reconcile(Rounds *r, int c, int g);
// Closes the chunk's rounds that can be closed.
void rounds_close(Rounds *r, int c);
// Returns true if an offer, or one that it replaces, counted in a closed round.
bool rounds_counted(const Rounds *r, int c, int g, const Offer *offer);
void rounds_forget(Chunk *chunk);
// Compares the hash of a group's state after a round with the other groups'.
void rounds_compare(Rounds *r, int c, int g, int64_t round, uint64_t hash);

// A group needs the state of a chunk; a group serves it; asks a group to serve it if one is needed.
void rounds_fetch(Rounds *r, int c, int g, const Message *m);
void rounds_serving(Rounds *r, int c, int g, const Message *m);
void rounds_ask(Rounds *r, int c);

LLMC_END
