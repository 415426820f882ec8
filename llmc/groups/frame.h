// Messages between replica groups and the rendezvous, and their encoding as frames. A frame is one
// ZeroMQ message: a header of FRAME_HEADER_BYTES and a body, all little-endian. README.md of this
// folder lists the kinds and who sends them.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

enum {
    FRAME_VERSION = 2,
    FRAME_HEADER_BYTES = 120,
    NAME_BYTES = 33,        // 32 characters and a zero
    MAX_GROUPS = 64,        // of a run
    MAX_CHUNKS = 4096,      // of a model
    PIECE_BYTES = 1 << 18,  // payloads are sent in pieces of at most this size
    TEXT_BYTES = 1024,      // longest text, with its zero
    ADDRESS_BYTES = 256,    // longest address, with its zero
    FRAME_BODY_BYTES = PIECE_BYTES + 16384,
    FRAME_BYTES = FRAME_HEADER_BYTES + FRAME_BODY_BYTES  // ZMQ_MAXMSGSIZE
};

typedef enum MessageKind {
    // group -> rendezvous
    // begins to join: incarnation, identity, quorum, grace period, address; bytes = groups that it
    // knows to take part, itself included; round = samples that it knows to be dealt
    MESSAGE_HELLO = 1,
    MESSAGE_REPORTED,  // ends the reports that follow a hello
    MESSAGE_BEAT,      // heartbeat, with iteration, tokens and tokens per second
    MESSAGE_HOLD,      // holds all of an offer
    MESSAGE_STATE,     // has the state of a chunk after a round
    MESSAGE_HASH,      // hash of the state of a chunk after a round
    MESSAGE_FETCH,     // needs the state of a chunk; hash = of a copy that could not be fetched
    MESSAGE_LEAVE,     // leaves the run
    MESSAGE_STATUS,    // asks for the status table (any known key)
    // both directions
    // an offer to the open round of a chunk; the rendezvous forwards it to all. rate = seconds that
    // the group has waited for a round with it
    MESSAGE_OFFER,
    MESSAGE_CLOSE,  // a closed round, with its offers; a group reports the rounds that it knows
    // a group serves the state of a chunk, with the last offer of each group that it contains;
    // forwarded to the groups that need it
    MESSAGE_SERVING,
    // asks for training samples: hash = number of the request, bytes = samples, round = samples
    // that are known to be dealt; the answer has the first sample in `round`
    MESSAGE_DEAL,
    // rendezvous -> group
    MESSAGE_WELCOME,  // joined
    MESSAGE_WAIT,     // cannot join yet; text: why
    MESSAGE_REFUSE,   // cannot join; text: why
    MESSAGE_WHO,      // unknown connection: send a hello
    MESSAGE_PULSE,    // answer to a heartbeat
    MESSAGE_PEER,     // a group of the run: incarnation, public key, address; or that it has left
    MESSAGE_RESET,    // the group's history of this chunk is not the run's: fetch its state
    MESSAGE_KEEP,     // no group has newer state of a chunk: keep the own one
    MESSAGE_WANT,     // another group needs the state of a chunk
    MESSAGE_AGAIN,    // the connection for payloads of a group is new: ask for its pieces again
    MESSAGE_NEWS,     // one line for the log
    MESSAGE_TABLE,    // part of the status table
    // group -> group, directly or relayed by the rendezvous
    MESSAGE_LINK,  // greets on a connection; answered with the same kind
    MESSAGE_GET,   // asks for a piece of a payload
    MESSAGE_DATA,  // a piece
    MESSAGE_GONE,  // the payload is no longer kept
    MESSAGE_KINDS
} MessageKind;

// An encoded pseudo-gradient that a group offers to the rounds of a chunk. Name, incarnation and
// number identify it; numbers grow by one per chunk.
typedef struct Offer {
    char name[NAME_BYTES];
    uint64_t incarnation;  // random number of the process, so that a restarted group is another one
    int64_t number;
    int64_t after;  // the group's last offer that has counted; void if a later one has counted too
    int64_t tokens;
    int64_t bytes;
    uint64_t hash;  // xxh3-64 of the payload
} Offer;

enum {
    // hello: the group knows rounds of this run; fetch: it has an earlier state; pieces: of a state
    FLAG_STATE = 1,
    FLAG_FIRST = 2,  // welcome: no group has state
    FLAG_LEFT = 4,   // peer: has left
    FLAG_BULK = 8,   // link: this connection is for payloads
    FLAG_LAST = 16   // table: the last part
};

// All kinds share these fields; the unused ones are zero.
typedef struct Message {
    MessageKind kind;
    char from[NAME_BYTES], to[NAME_BYTES];
    uint64_t run;       // xxh3-64 of the identity
    uint64_t session;   // random number of the sending process
    uint64_t sequence;  // grows with every frame that the process sends; starts at 1
    int32_t chunk;
    int64_t round;
    uint64_t incarnation;
    uint64_t chain;  // hash of the chunk's closed rounds up to `round`
    uint64_t hash;
    int64_t bytes;  // size of a payload; offset of a piece
    int64_t tokens;
    int64_t iteration;  // hello: chunks of the model
    double rate;        // tokens per second; seconds of the grace period or of a wait
    uint32_t flags;
    uint32_t groups;  // quorum; number of groups
    char text[TEXT_BYTES];
    char address[ADDRESS_BYTES];
    const uint8_t *data;  // (data_bytes) points into the frame
    uint32_t data_bytes;
    int offers;
    Offer offer[MAX_GROUPS];  // (offers)
} Message;

// Fills the fields that have a default: zero.
void message_clear(Message *message, MessageKind kind);
// Copies text, truncated if it is too long.
void message_text(Message *message, const char *text);
// Copies a valid name.
void message_name(char name[NAME_BYTES], const char *text);

// Size of a message without the unused offers, for copies.
size_t message_bytes(const Message *message);
// Extends a chain, the hash of all closed rounds of a chunk, by a round.
uint64_t chain_next(uint64_t chain, int64_t round, const Offer *offer, int offers);

// True for 1 to 32 letters, digits, '-', '_' or '.' that don't begin with '.' or '-'.
bool name_valid(const char *name);

// Encodes a message. frame has space for FRAME_BYTES. Returns its length.
size_t frame_write(const Message *message, uint8_t *frame);
// Fills in the length of the body and the hash of a frame of this size.
void frame_seal(uint8_t *frame, size_t bytes);
// Decodes a frame. Returns false with a reason (a constant text) if anything in it is malformed.
bool frame_read(const uint8_t *frame, size_t bytes, Message *message, const char **why);

// Replay check of one socket. It survives reconnections, so the sequence must not restart.
typedef struct FrameOrder {
    uint64_t session, sequence;
} FrameOrder;
// Returns false for a frame that was seen before or is older than one that was seen. A new session
// is accepted if `greeting`.
bool frame_in_order(FrameOrder *order, const Message *message, bool greeting);

LLMC_END
