// Pieces of payloads on their way through the rendezvous. Several groups usually need the same
// piece at the same time. It is requested from its owner once and kept for a short time for the
// others, so that the owner's upload does not grow with the number of groups. Pieces that nobody
// has asked for are not relayed.
#pragma once
#include "llmc/groups/frame.h"
LLMC_BEGIN

enum { RELAY_PIECES = 512, RELAY_REQUESTS = 8192 };  // kept pieces (128 MiB), open requests

typedef struct RelayRequest {
    uint64_t key;      // hash of owner, offer, chunk and offset; 0: unused
    uint64_t waiting;  // groups that have asked (bit i: index of the group at the rendezvous)
    double forwarded;  // time of the last request to the owner
} RelayRequest;

typedef struct RelayPiece {
    uint64_t key;
    uint8_t *data;  // (bytes)
    uint32_t bytes;
} RelayPiece;

typedef struct Relay {
    RelayRequest request[RELAY_REQUESTS];  // ring
    RelayPiece piece[RELAY_PIECES];        // ring
    int next_request, next_piece;
} Relay;

typedef enum RelayAction {
    RELAY_FORWARD,  // send the request to the owner
    RELAY_WAIT,     // it was sent for another group
    RELAY_ANSWER    // *piece has the data
} RelayAction;

// A group with this index requests a piece from `get->to`.
RelayAction relay_request(Relay *relay, const Message *get, int group, double now, const RelayPiece **piece);
// `owner` sends a piece, or says that it is gone. Keeps it, and returns the groups that have asked
// for it.
uint64_t relay_answer(Relay *relay, const Message *data, const char *owner);
void relay_free(Relay *relay);

LLMC_END
