// What one group knows about the rounds of a run: its own offers, the offers of the others that it
// holds, and the closed rounds that its trainer has not taken yet. A state machine without network
// or clock: the caller sets `now`. Its input is the messages of the rendezvous and the calls of the
// trainer; its output is messages to the rendezvous.
//
// A payload is kept as long as a round may need it: until the rendezvous has announced a newer
// offer of the same group (closed rounds are announced in order, so no later round contains it),
// and until the trainer has taken the closed rounds that contain it. Own payloads are kept for
// KEEP_ROUNDS more, because a slow group may still fetch them. After missed rounds they are kept
// until it is known whether they have counted.
#pragma once
#include "llmc/groups/frame.h"
#include "llmc/groups/rounds.h"
LLMC_BEGIN

enum { KEEP_ROUNDS = 2, MOST_UNTAKEN = 4 };

// A payload with a reference count. Not thread-safe.
typedef struct Payload {
    int references;
    int64_t bytes;
    uint8_t data[];
} Payload;

Payload *payload_create(int64_t bytes);
Payload *payload_keep(Payload *payload);
void payload_release(Payload *payload);  // NULL is allowed

// An offer of any group that a round may still need.
typedef struct Held {
    Offer offer;
    Payload *payload;      // NULL: not received yet
    bool past;             // no open round can contain it
    int64_t closed_round;  // 0: in no closed round
} Held;

typedef struct LedgerRound {
    int64_t round;
    uint64_t chain;
    int offers;
    Offer *offer;  // (offers) sorted by name
} LedgerRound;

typedef struct LedgerChunk {
    bool ready;                   // has state
    bool missed;                  // must fetch the state
    int64_t round, taken;         // last closed round, last round that the trainer took
    uint64_t chain;               // after `round`
    bool has_state;               // it has state, perhaps an outdated one
    uint64_t taken_chain;         // after `taken`
    LedgerRound log[LOG_ROUNDS];  // (logged) oldest first
    int logged;
    int64_t number;         // of the latest own offer
    int64_t counted;        // number of the last own offer in a closed round
    int64_t counted_taken;  // the same in a round that the trainer has taken
    int64_t withdrawn;      // own offers up to this number are in no round after the missed ones
    int64_t echoed;         // number of the latest own offer that the rendezvous has announced
    int64_t announced;      // number of the latest own offer that was sent to the rendezvous
    Offer *latest;          // (latests) that the state after `taken` contains: the last of each group
    int latests;            // at most MAX_GROUPS, by the round that counted them
    Held *pending;          // own offer that is not announced yet; NULL: none
    Held *held;             // (helds)
    int helds;
    // Start of the wait: the first offer since the last that counted, or a later round that left it
    // out. 0: no open offer.
    double since;
} LedgerChunk;

typedef void (*LedgerSend)(void *context, Message *message);

typedef struct Ledger {
    char name[NAME_BYTES];
    uint64_t incarnation;
    int chunks;
    LedgerChunk *chunk;  // (chunks)
    LedgerSend send;     // to the rendezvous; the message is lost if it is not connected
    void *context;
    bool joined;   // the rendezvous knows this process
    bool first;    // this group began the run
    bool changed;  // for the caller: offers to pull may have been added
    double now;    // monotonic seconds, set by the caller before the other calls
    int64_t rounds_late, tokens_counted;
} Ledger;

void ledger_init(Ledger *l, const char *name, uint64_t incarnation, int chunks, LedgerSend send,
                 void *context);
void ledger_free(Ledger *l);
// True if the group has state of a chunk.
bool ledger_has_state(const Ledger *l);
// Sends what the group knows, after a hello.
void ledger_report(Ledger *l);
// Handles a message of the rendezvous. Other kinds than welcome, offer, close and reset are
// ignored.
void ledger_receive(Ledger *l, const Message *message);
// Offers a payload (keeps a reference). Replaces one that is not announced yet. If an open offer
// has counted already, the new one is void, because it contains the same tokens.
void ledger_offer(Ledger *l, int c, int64_t tokens, Payload *payload, uint64_t hash);
// A payload has been received (keeps a reference), or its owner no longer has it (NULL).
void ledger_received(Ledger *l, int c, const Offer *offer, Payload *payload);
// A group has left or was lost: its open offers are in no later round, unless it reports them
// again.
void ledger_left(Ledger *l, const char *name, uint64_t incarnation);
// True if a payload that has not been received may still be needed.
bool ledger_wants(const Ledger *l, int c, const Offer *offer);
// True if a round that the trainer has not taken contains the offer.
bool ledger_closed(const Ledger *l, int c, const Offer *offer);
// Returns the payload of an offer, or NULL.
Payload *ledger_find(const Ledger *l, int c, const Offer *offer);
// Returns the next closed round with all payloads, or NULL. *missed: fetch the state instead.
const LedgerRound *ledger_next(Ledger *l, int c, bool *missed);
// The trainer has taken the next closed round.
void ledger_take(Ledger *l, int c);
// A fetched state contains these offers, the latest one of each group. Returns the own one if the
// trainer has not taken its round, or NULL. Valid until ledger_fetched, which must follow.
const Held *ledger_contains(Ledger *l, int c, const Offer *latest, int latests);
// The state of the chunk after this round was fetched. What it does not contain can still count.
void ledger_fetched(Ledger *l, int c, int64_t round, uint64_t chain);
// No group has newer state of the chunk: the own one becomes the state of the run.
void ledger_keep(Ledger *l, int c);
// Returns the chain after a round, 0 if it is not known.
uint64_t ledger_chain(const Ledger *l, int c, int64_t round);
// True for an own offer that no round that the trainer has taken contains.
bool ledger_own(const Ledger *l, int c, const Offer *offer);
// True if an own offer is announced or pending, and in no closed round.
bool ledger_open(const Ledger *l);

LLMC_END
