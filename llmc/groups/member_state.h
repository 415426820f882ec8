// State of a Member: the calls of the trainer (member_calls.c) and the network thread
// (member_net.c, member_links.c) share it under `lock`. Sockets are used by the network thread
// only.
#pragma once
#include <pthread.h>

#include "llmc/groups/fetches.h"
#include "llmc/groups/ledger.h"
#include "llmc/groups/member.h"
#include "llmc/groups/pulls.h"
#include "llmc/groups/refusals.h"
#include "llmc/groups/transport.h"
LLMC_BEGIN

enum { MOST_PATHS = 16 };  // connections per pair of groups

// A socket that this group has connected.
typedef struct Link {
    void *socket;
    FrameOrder order;
    double asked;  // last greeting
    double heard;  // last frame
    double made;   // last attempt to connect
    bool up;       // rendezvous: greeted and answered
} Link;

// A connection that another group has made.
typedef struct Path {
    Route route;
    FrameOrder order;
    double heard;
} Path;

// A group that the rendezvous has announced.
typedef struct Peer {
    char name[NAME_BYTES], key[KEY_TEXT], address[ADDRESS_BYTES];
    uint64_t incarnation;
    bool present;
    double announced;       // last time
    bool direct, relayed;   // said in the news
    double since;           // of the first attempt to connect
    unsigned next;          // connection for the next frame
    Link link[MOST_PATHS];  // to this group
    Path path[MOST_PATHS];  // from this group
} Peer;

// The state of a chunk that this group serves to others. payload NULL: none.
typedef struct Served {
    Payload *payload;
    int64_t round;
    uint64_t chain, hash;
    double used;
} Served;

// A piece that another group has asked for and that could not be sent yet.
typedef struct Get {
    char name[NAME_BYTES];
    int chunk;
    bool state;
    Offer offer;
    int64_t offset;
} Get;

enum { MOST_GETS = 4096 };

struct Member {
    MemberOptions options;
    char *identity, *rendezvous, *listen;
    int64_t *payload_bytes, *state_bytes;  // (chunks)
    uint64_t run;
    uint64_t sequence;  // of the last frame written, on any connection
    Keys keys;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;  // the trainer waits for it
    bool stopping, leave_sent;
    int wake;  // eventfd: the trainer has something to send

    Transport transport;
    Link control, bulk;
    void *listener;  // NULL: no direct connections to this group
    void *control_monitor, *bulk_monitor;
    Ledger ledger;
    Pulls pulls;
    Peer peer[MAX_GROUPS];
    Message **outbox;  // (outgoing) to the rendezvous
    int outgoing;
    Get *gets;  // (MOST_GETS) ring
    int first_get, waiting_gets;
    Served *served;  // (chunks)
    Fetch *fetch;    // (chunks)
    bool *wanted;    // (chunks) another group needs the state
    bool interrupt;  // member_take returns once, so that the trainer serves a state
    int64_t iteration, tokens;
    double tokens_per_second;
    uint64_t deal;  // number of the request for samples
    double deal_asked;
    int64_t deal_first;  // its answer, -1: none yet
    int64_t dealt;       // samples dealt to all groups, as far as known

    double said_hello, beat, heard;
    int events;  // of the control socket since the start
    char refused[TEXT_BYTES], waiting[TEXT_BYTES];
    bool welcomed;       // has joined before: member_join no longer reports refusals
    double welcomed_at;  // last time; 0: peers that were not announced since are forgotten
    bool unreachable;    // said in the news
    Refusals refusals;
    MemberStats stats;
    Payload *taken[MAX_GROUPS];  // of the round that the trainer has
    Contribution contribution[MAX_GROUPS];
    LedgerRound taken_round;
    Message in, out;
    uint8_t *frame_in, *frame_out;  // (FRAME_BYTES)
};

// ---- member_net.c ----

// The network thread. context: the Member.
void *member_network(void *context);
// Queues a message to the rendezvous. Called with the lock held, as the functions below.
void member_queue(Member *m, const Message *message);
// Queues a line of the log.
void member_say(Member *m, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Queues a line about a refused frame or connection, at most once a minute.
void member_refuse(Member *m, const char *who, const char *why);
// Encodes a message of this group to m->frame_out. Returns its length.
size_t member_write(Member *m, Message *message);
// Sends a message on a link. Returns errno of transport_send.
int member_send_on(Member *m, Link *link, Message *message);
// Connects a link again that has been silent for ten seconds.
void member_keep_link(Link *link, const char *address, double now);
// Handles m->in: a request for a piece, a piece, or that a payload is gone.
void member_receive_payload(Member *m, double now);
Peer *member_peer(Member *m, const char *name);

// ---- member_links.c: direct connections ----

// Starts ZeroMQ, and listens if the group has an address.
bool links_listen(Member *m, Error *err);
void links_close(Member *m);
void links_open_peer(Member *m, Peer *peer);
void links_close_peer(Peer *peer);
// Fills in poll items (zmq_pollitem_t) of all sockets. Returns their number.
int links_poll(Member *m, void *items, int most);
int links_send(Member *m, Peer *peer, Message *message, double now);
void links_keep(Member *m, double now);
void links_receive(Member *m, double now);

LLMC_END
