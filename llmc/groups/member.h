// Elastic replica groups: what the trainer of one replica group sees of the others.
//
// A replica group is an MPI job of its own. Its rank 0 holds a Member, which joins the run at the
// rendezvous and exchanges pseudo-gradients with the other groups. The model's parameters are
// divided into chunks, which are the same in all groups whatever their number of ranks. Every chunk
// is synchronized on its own, in rounds 1, 2, 3, ...:
//
//   member_offer   A group offers its encoded pseudo-gradient to the chunk's open round.
//   closing        The rendezvous closes the round when all groups present have offered, or the
//                  grace period after the quorum's offer is over. The contributions of a closed
//                  round are those that every remaining group holds: a group that has not sent all
//                  of its offer counts in a later round.
//   member_take    Every group takes the closed rounds of a chunk in order, with all contributions
//                  sorted by name, and computes the same new outer weights from them.
//   member_hash    Reports a hash of the outer weights after the round. The rendezvous compares it.
//
// A group that joins or has missed rounds fetches the chunk's outer weights and momentum from
// another group (member_fetch). The other group's trainer serves it between two steps, or while it
// waits itself.
//
// All functions are called from one thread; the Member has a thread of its own for the network.
// Blocking functions return early when MemberOptions.stopped returns true.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct MemberOptions {
    const char *name;        // --replica-group: unique in the run, 1 to 32 letters, digits, '-', '_' or '.'
    const char *rendezvous;  // tcp://host:port
    const char *keys;        // folder with this group's keys (build/rendezvous keygen)
    const char *listen;      // tcp://address:port for direct links; NULL: all messages are relayed
    const char *identity;    // one line that describes model, data, codec and version; equal in all groups
    int min_groups;          // quorum: groups that a round needs at least
    double grace_seconds;    // a round closes this long after the quorum's last offer
    int connections;         // TCP connections per direct link
    int chunks;
    const int64_t *payload_bytes;  // (chunks) bytes of an encoded pseudo-gradient
    const int64_t *state_bytes;    // (chunks) bytes of outer weights and momentum
    bool (*stopped)(void);         // true: blocking calls return at once; may be NULL
} MemberOptions;

typedef struct Member Member;

// One group's part of a closed round.
typedef struct Contribution {
    const char *name;
    int64_t tokens;  // tokens trained since the group's last contribution to this chunk
    const uint8_t *payload;
} Contribution;

typedef struct ClosedRound {
    int64_t round;
    int contributions;
    const Contribution *contribution;  // (contributions) sorted by name; valid until the next take or fetch
    // An offer of this group is among them; otherwise the latest one stays in the next open round.
    // If its tokens are fewer than the latest offer's, it is an earlier one that the round closed
    // with; the latest offer, which contains it, is then withdrawn.
    bool own;
    // Rounds are no longer kept: fetch the chunk's state (member_fetch) instead. There are no
    // contributions.
    bool missed;
} ClosedRound;

typedef struct MemberStats {
    int groups;              // groups present, this one included
    bool connected;          // the rendezvous answers
    int64_t sent, received;  // payload and state bytes since the start
    double waited;           // seconds that blocking calls waited since the start
    int64_t rounds_late;     // closed rounds without this group
    int64_t tokens_counted;  // tokens of this group that counted in a closed round
} MemberStats;

// Joins the run. Returns NULL with an error: another run, a name in use (EXIT_USAGE), unusable keys
// or sockets (EXIT_ENVIRONMENT), no answer (EXIT_COMMUNICATION), stopped (EXIT_STOPPED). err must
// be empty.
Member *member_join(const MemberOptions *options, Error *err);
// True: no group of this run has state. The own weights become the outer weights of round 0.
// Otherwise the trainer fetches every chunk before it offers or takes.
bool member_is_first(const Member *member);
// Announces that member_fetch will be called for the chunk. Its state is asked for while earlier
// ones arrive. A group fetches at most 256 MiB ahead, or two states if they are larger. Until
// member_fetch has returned the state, the group does not serve this chunk.
void member_fetch_ahead(Member *member, int chunk);
// Fetches the state of a chunk from another group. Returns its round, or -1 if stopped. Resumes
// with the same or another group after a lost connection. Returns MEMBER_KEEP if all groups with
// newer state were lost: the group's own state becomes the run's. `state` is then unchanged, and
// the group continues from the last round that it took (0: it has just started). Returns
// MEMBER_BUSY after `seconds`, or if another group wants state: serve it (member_wanted) and call
// again. The transfer continues.
//
// own: this group's contribution that the state contains and that it has not taken, because the
// round was missed. payload NULL: there is none. Valid until the next member_take or member_fetch.
enum { MEMBER_KEEP = -2, MEMBER_BUSY = -3 };
int64_t member_fetch(Member *member, int chunk, double seconds, uint8_t *state, Contribution *own);
// Returns a chunk that this group has and another one wants, or -1. Answer with member_serve.
int member_wanted(Member *member);
// Sends the state of a chunk after `round`. Copies it.
void member_serve(Member *member, int chunk, int64_t round, const uint8_t *state);
// Offers a pseudo-gradient. Copies it. While an earlier offer is open, rounds close with that one;
// once it counts, this one, which contains its progress, is void: offer again.
void member_offer(Member *member, int chunk, int64_t tokens, const uint8_t *payload);
// Takes the next closed round of the chunk. wait: blocks until there is one. Returns false if there
// is none, the Member was stopped, or another group wants state while it waits: serve it
// (member_wanted) and call again, because the round may need that group.
bool member_take(Member *member, int chunk, bool wait, ClosedRound *closed);
// Deals training samples. Returns the first of `count` consecutive sample indices that no other
// group gets, or -1 if the rendezvous has not answered yet: call again with the same count. floor:
// samples below it have been dealt, as known from a checkpoint. The rendezvous deals upwards from
// the largest floor; after a restart, from the largest index that any group knows to be dealt.
int64_t member_samples(Member *member, int64_t count, int64_t floor);
// Chooses samples without the rendezvous, if it does not answer for too long. Returns the first of
// `count` samples past those that are known to be dealt. Groups that know of each other choose
// different ones, but the rendezvous may have dealt them to a group since it was heard last.
int64_t member_own_samples(Member *member, int64_t count, int64_t floor);
// Reports the hash of the chunk's state after the round.
void member_hash(Member *member, int chunk, int64_t round, uint64_t hash);
// Reports progress for the rendezvous's status table.
void member_report(Member *member, int64_t iteration, int64_t tokens, double tokens_per_second);
// Copies the statistics. Returns a line for the log about what happened since the last call (a
// group joined, left or is late; the rendezvous cannot be reached; hashes differ), or NULL.
const char *member_news(Member *member, MemberStats *stats);
// Leaves the run and frees the Member. Sends what is queued first, for at most `seconds`.
void member_leave(Member *member, double seconds);

LLMC_END
