// ZeroMQ sockets with CURVE encryption: both sides are authenticated by their keys, and replayed or
// altered packets end a connection. All calls of a context's sockets are made by one thread.
#pragma once
#include "llmc/groups/frame.h"
#include "llmc/groups/keys.h"
LLMC_BEGIN

enum { ROUTE_BYTES = 16 };  // longest routing id that a ROUTER socket makes

// A connection as a ROUTER socket names it.
typedef struct Route {
    uint8_t id[ROUTE_BYTES];
    size_t bytes;  // 0: none
} Route;

// Checks the key of a connecting program and sets its name. address: where it comes from.
typedef bool (*CheckKey)(void *context, const uint8_t key[KEY_RAW], const char *address,
                         char name[NAME_BYTES]);

typedef struct Transport {
    void *zmq;  // context
    void *zap;  // requests of listening sockets to check a key
    CheckKey check;
    void *context;
} Transport;

// check NULL: the process listens nowhere.
bool transport_open(Transport *t, CheckKey check, void *context, Error *err);
// Closes the context. All sockets must be closed.
void transport_close(Transport *t);
// Answers the pending requests of listening sockets. Call when `zap` is readable.
void transport_answer_checks(Transport *t);

// Opens a ROUTER socket that listens at tcp://address:port. pending: messages that are queued at
// most in each direction of a connection. Error: EXIT_ENVIRONMENT or EXIT_USAGE.
void *transport_listen(Transport *t, const Keys *keys, const char *address, int pending, Error *err);
// Opens a DEALER socket that connects to a program with this public key, again and again if
// necessary. pending: messages that are queued at most in each direction.
void *transport_connect(Transport *t, const Keys *keys, const char *server_key, const char *address,
                        int pending, Error *err);
// Makes the connection of a DEALER socket again. libzmq itself gives up after a refused key, which
// the other side may know by now. Messages in the socket's queues may be lost.
void transport_reconnect(void *socket, const char *address);
void transport_close_socket(void *socket);

// Events of a socket since the last call. Bits:
enum { EVENT_CONNECTED = 1, EVENT_READY = 2, EVENT_LOST = 4, EVENT_REFUSED = 8, EVENT_BROKEN = 16 };
// Opens a monitor. Returns NULL on failure.
void *transport_monitor(Transport *t, void *socket, const char *name);
// address: of the last event, may be NULL.
int transport_events(void *monitor, char address[ADDRESS_BYTES]);

// Receives one message without waiting: a frame of at most FRAME_BYTES into `frame`. Returns its
// length, -1 if there is none. For ROUTER sockets also the route and the sender's name.
// address: IP address of the sender; may be NULL, like route and name.
int64_t transport_receive(void *socket, uint8_t *frame, Route *route, char name[NAME_BYTES],
                          char address[ADDRESS_BYTES]);
// Sends a frame without waiting. route: NULL for DEALER sockets. Returns 0, or errno: EAGAIN if the
// queue is full or not connected, EHOSTUNREACH if the connection is gone.
int transport_send(void *socket, const Route *route, const uint8_t *frame, size_t bytes);

LLMC_END
