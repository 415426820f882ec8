// Asks a running rendezvous for its status table: see rendezvous.h.
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <zmq.h>

#include "llmc/groups/rendezvous.h"
#include "llmc/groups/transport.h"

static const double answer_seconds = 5;

// Collects the parts of the table. Returns true when it is complete.
static bool receive_table(void *socket, uint8_t *frame, Message *m, Text *table, double until) {
    while (monotonic_seconds() < until) {
        zmq_pollitem_t item = {socket, 0, ZMQ_POLLIN, 0};
        const char *why = NULL;
        zmq_poll(&item, 1, 50);
        int64_t bytes = transport_receive(socket, frame, NULL, NULL, NULL);
        if (bytes < 0 || !frame_read(frame, (size_t)bytes, m, &why) || m->kind != MESSAGE_TABLE) continue;
        text_add(table, "%s", m->text);
        if (m->flags & FLAG_LAST) return true;
    }
    return false;
}

static bool ask(Transport *t, const Keys *keys, const char *address, Text *table, Error *err) {
    void *socket = transport_connect(t, keys, keys->server_key, address, 1024, err);
    if (!socket) return false;
    double until = monotonic_seconds() + answer_seconds;
    uint8_t *frame = (uint8_t *)xmalloc(FRAME_BYTES, "a frame");
    Message *m = (Message *)xmalloc(sizeof *m, "a message");
    message_clear(m, MESSAGE_STATUS);
    m->sequence = 1;
    bool good = getrandom(&m->session, sizeof m->session, 0) == sizeof m->session;
    size_t bytes = frame_write(m, frame);
    while (good && transport_send(socket, NULL, frame, bytes) != 0) {  // not connected yet
        zmq_poll(NULL, 0, 20);
        good = monotonic_seconds() < until;
    }
    good = good && receive_table(socket, frame, m, table, until);
    free(m);
    free(frame);
    transport_close_socket(socket);
    return good || error_set(err, EXIT_COMMUNICATION,
                             "the rendezvous at %s does not answer; check the address, the "
                             "network and the keys",
                             address);
}

bool rendezvous_status(const char *address, const char *keys, Text *table, Error *err) {
    Transport t = {0};
    Keys pair;
    char name[NAME_BYTES];
    if (!keys_find_pair(keys, name, err) || !keys_load(keys, name, &pair, err)) return false;
    if (!transport_open(&t, NULL, NULL, err)) return false;
    bool good = ask(&t, &pair, address, table, err);
    transport_close(&t);
    return good;
}
