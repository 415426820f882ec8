// Membership and rounds of a run, as the rendezvous keeps them: a state machine without network,
// clock or training state. Its input is the messages of authenticated groups and the time; its
// output is messages to groups. After a restart it learns the rounds from the groups' reports.
//
// - A round of a chunk closes when all groups that are expected have offered and hold all offers,
//   or a grace period after the quorum's last offer. Then offers that are not held by the remaining
//   groups stay open, and groups that don't hold the remaining offers are no longer waited for.
// - A group that missed the end of a grace period is late: no round waits for it until it offers
//   again. A group that has been silent for several grace periods is removed.
// - Every closed round extends the chunk's chain, a hash of all its rounds. It tells whether a
//   group's rounds are the run's. If two histories of a chunk meet (after a partition and a restart
//   of the rendezvous), the longer one wins, and groups with the other one fetch the state.
#pragma once
#include "llmc/groups/frame.h"
LLMC_BEGIN

enum { LOG_ROUNDS = 8 };  // closed rounds of a chunk that are remembered

// Sends a message to a group that has joined. name NULL: answers the message in process; news are
// for the log of the rendezvous.
typedef void (*RoundsSend)(void *context, const char *name, const Message *message);

typedef struct RoundsOptions {
    double settle;  // seconds after the start in which only groups that know the run may join
    double silent;  // seconds without a message after which a group is called silent
    double remove;  // seconds of silence, at least, after which a group is removed
    RoundsSend send;
    void *context;
} RoundsOptions;

typedef struct Rounds Rounds;

Rounds *rounds_create(const RoundsOptions *options, double now);
void rounds_free(Rounds *rounds);
// Handles a message of the group with this (authenticated) name.
void rounds_receive(Rounds *rounds, const char *name, const Message *message, double now);
// Closes rounds whose grace period is over and removes silent groups. Call every 0.1 s or so.
void rounds_tick(Rounds *rounds, double now);

// Returns the incarnation of a group that has joined or is joining, 0 if there is none.
uint64_t rounds_incarnation(const Rounds *rounds, const char *name);
// True if a group of this name has joined.
bool rounds_joined(const Rounds *rounds, const char *name);

// A row of the status table.
typedef struct GroupStatus {
    char name[NAME_BYTES], address[ADDRESS_BYTES];
    const char *state;  // "training", "joining", "late", "silent"
    int64_t iteration, tokens, last_round, rounds_late;
    double tokens_per_second;
    int64_t stale;  // rounds closed since the last one with this group, of the chunk with the most
} GroupStatus;
// Fills the row of the index-th group. Returns false past the last one.
bool rounds_status(const Rounds *rounds, int index, double now, GroupStatus *status);

LLMC_END
