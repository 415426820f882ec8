// Transfers of payloads from other groups, in pieces that this group asks for. At most PULL_WINDOW
// pieces per sender are outstanding, so that a slow receiver bounds the memory of all that send
// to it, and a transfer resumes after a lost connection.
#pragma once
#include "llmc/groups/ledger.h"
LLMC_BEGIN

enum { PULL_WINDOW = 128 };

typedef struct Pull {
    int chunk;
    bool state;   // the state of the chunk after round offer.number, otherwise an offer
    Offer offer;  // owner, bytes and hash
    Payload *payload;
    uint8_t *piece;  // (pieces) missing, asked or received
    int64_t pieces, received, outstanding;
    double progress;  // time of the last piece or request
    double moved;     // time of the last piece, or the start
} Pull;

typedef struct Pulls {
    Pull **pull;  // (count) oldest first
    int count;
    // Sends a request for a piece. Returns false if it cannot be sent now.
    bool (*get)(void *context, const Pull *pull, int64_t offset);
    // A transfer has ended. complete: its payload has the right hash.
    void (*done)(void *context, const Pull *pull, bool complete);
    // True if training waits for the payload: it is given up if nothing arrives from its owner.
    bool (*urgent)(void *context, const Pull *pull);
    void *context;
    int64_t bytes;        // received
    int64_t state_bytes;  // of them, of states
    double state_since;   // first transfer of a state; 0: none yet
} Pulls;

// Begins a transfer. No-op if it has begun. The state of the same round with the same hash resumes
// from another group.
void pulls_begin(Pulls *pulls, int chunk, bool state, const Offer *offer, double now);
// Asks for further pieces. Call often.
void pulls_step(Pulls *pulls, double now);
// Handles a piece, or that the sender no longer has the payload.
void pulls_receive(Pulls *pulls, const Message *message, double now);
// Asks for outstanding pieces again, after a connection was lost. name NULL: of all groups.
void pulls_again(Pulls *pulls, const char *name);
// Ends all transfers of a chunk's state, or from a group.
void pulls_end_state(Pulls *pulls, int chunk);
void pulls_end_group(Pulls *pulls, const char *name);
// Ends the transfers of offers for which needed() is false, without calling done().
void pulls_keep(Pulls *pulls, bool (*needed)(void *context, const Pull *pull));
// Time of the last piece from the group that sends a chunk's state. 0: there is no transfer.
double pulls_moved(const Pulls *pulls, int chunk);
// Bytes of a chunk's state that have arrived in the present transfer. 0: there is none.
int64_t pulls_received(const Pulls *pulls, int chunk);
// Mean rate at which states have arrived, in bytes per second.
double pulls_rate(const Pulls *pulls, double now);
void pulls_free(Pulls *pulls);

LLMC_END
