// Direct connections between groups. Of two groups, the one without an address to listen at
// connects to the other; if both listen, the one whose name sorts first. Every connection is
// greeted once a second. Payloads to a group without a live connection are relayed by the
// rendezvous.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#include "llmc/groups/member_state.h"

static const double greet_seconds = 1, dead_seconds = 5, relay_seconds = 10;

static int connections(const Member *m) {
    int wanted = m->options.connections;
    return wanted < 1 ? 1 : wanted > MOST_PATHS ? (int)MOST_PATHS : wanted;
}

// ---- listening ----

// Accepts the keys of the groups that the rendezvous has announced.
static bool check_peer(void *context, const uint8_t key[KEY_RAW], const char *address,
                       char name[NAME_BYTES]) {
    Member *m = (Member *)context;
    char text[KEY_TEXT];
    zmq_z85_encode(text, key, KEY_RAW);
    for (int i = 0; i < MAX_GROUPS; i++) {
        const Peer *peer = &m->peer[i];
        if (!peer->present || strcmp(peer->key, text) != 0) continue;
        message_name(name, peer->name);
        return true;
    }
    member_refuse(m, address, "a direct connection with a key that is not a group's");
    return false;
}

bool links_listen(Member *m, Error *err) {
    if (!transport_open(&m->transport, m->listen ? check_peer : NULL, m, err)) return false;
    if (!m->listen) return true;
    m->listener = transport_listen(&m->transport, &m->keys, m->listen, 4 * PULL_WINDOW, err);
    return m->listener != NULL;
}

void links_close(Member *m) {
    for (int i = 0; i < MAX_GROUPS; i++) links_close_peer(&m->peer[i]);
    transport_close_socket(m->listener);
}

void links_close_peer(Peer *peer) {
    for (int k = 0; k < MOST_PATHS; k++) {
        transport_close_socket(peer->link[k].socket);
        peer->link[k] = (Link){.socket = NULL};
        peer->path[k] = (Path){.heard = 0};
    }
    peer->direct = false;
}

void links_open_peer(Member *m, Peer *peer) {
    bool dial = *peer->address && (!m->listen || strcmp(m->ledger.name, peer->name) < 0);
    if (!dial || peer->link[0].socket) return;
    double now = monotonic_seconds();
    for (int k = 0; k < connections(m); k++) {
        Error err = {0};
        peer->link[k].socket = transport_connect(&m->transport, &m->keys, peer->key, peer->address,
                                                 PULL_WINDOW, &err);
        if (!peer->link[k].socket) member_say(m, "%s", err.what);
        peer->link[k].made = now;
    }
    peer->since = now;
}

int links_poll(Member *m, void *items, int most) {
    zmq_pollitem_t *item = (zmq_pollitem_t *)items;
    int count = 0;
    if (m->listener) {
        item[count++] = (zmq_pollitem_t){m->transport.zap, 0, ZMQ_POLLIN, 0};
        item[count++] = (zmq_pollitem_t){m->listener, 0, ZMQ_POLLIN, 0};
    }
    for (int i = 0; i < MAX_GROUPS; i++) {
        for (int k = 0; k < MOST_PATHS && count < most; k++) {
            void *socket = m->peer[i].link[k].socket;
            if (socket) item[count++] = (zmq_pollitem_t){socket, 0, ZMQ_POLLIN, 0};
        }
    }
    return count;
}

// ---- sending ----

// Sends to a group over the next of its live connections. Returns 0, or errno: ENOTCONN if it has
// none.
int links_send(Member *m, Peer *peer, Message *message, double now) {
    for (int n = 0; n < MOST_PATHS; n++) {
        int k = peer->next++ % MOST_PATHS;
        Link *link = &peer->link[k];
        Path *path = &peer->path[k];
        if (link->socket && now < link->heard + dead_seconds) return member_send_on(m, link, message);
        if (path->route.bytes == 0 || now >= path->heard + dead_seconds) continue;
        size_t bytes = member_write(m, message);
        int failed = transport_send(m->listener, &path->route, m->frame_out, bytes);
        if (failed && failed != EAGAIN) *path = (Path){.heard = 0};
        if (failed == 0 || failed == EAGAIN) return failed;
    }
    return ENOTCONN;
}

static int live(const Peer *peer, double now) {
    int count = 0;
    for (int k = 0; k < MOST_PATHS; k++) {
        count += peer->link[k].socket && now < peer->link[k].heard + dead_seconds;
        count += peer->path[k].route.bytes && now < peer->path[k].heard + dead_seconds;
    }
    return count;
}

// Greets on all connections, and reports whether groups are connected directly.
void links_keep(Member *m, double now) {
    for (int i = 0; i < MAX_GROUPS; i++) {
        Peer *peer = &m->peer[i];
        if (!peer->present) continue;
        for (int k = 0; k < MOST_PATHS; k++) {
            Link *link = &peer->link[k];
            if (!link->socket) continue;
            member_keep_link(link, peer->address, now);
            if (now < link->asked + greet_seconds) continue;
            message_clear(&m->out, MESSAGE_LINK);
            message_name(m->out.to, peer->name);
            if (member_send_on(m, link, &m->out) == 0) link->asked = now;  // not connected yet: again soon
        }
        int count = live(peer, now);
        bool expected = peer->link[0].socket != NULL;
        if (count == (expected ? connections(m) : count) && count && !peer->direct) {
            peer->direct = true;
            member_say(m, "group %s is connected directly", peer->name);
        } else if (!count &&
                   (peer->direct || (expected && !peer->relayed && now > peer->since + relay_seconds))) {
            peer->direct = false;
            peer->relayed = true;
            pulls_again(&m->pulls, peer->name);
            member_say(m, "group %s has no direct connection; payloads are relayed by the rendezvous",
                       peer->name);
        }
    }
}

// ---- receiving ----

static void receive_on_link(Member *m, Peer *peer, Link *link, double now) {
    const char *why = NULL;
    int64_t bytes;
    for (int i = 0; i < PULL_WINDOW; i++) {
        bytes = transport_receive(link->socket, m->frame_in, NULL, NULL, NULL);
        if (bytes < 0) return;
        if (!frame_read(m->frame_in, (size_t)bytes, &m->in, &why)) {
            member_refuse(m, peer->name, why);
        } else if (m->in.run == m->run && frame_in_order(&link->order, &m->in, m->in.kind == MESSAGE_LINK)) {
            link->heard = now;
            message_name(m->in.from, peer->name);
            if (m->in.kind != MESSAGE_LINK) member_receive_payload(m, now);
        }
    }
}

// Returns the path of a route, a new one for a greeting, or NULL.
static Path *find_path(Peer *peer, const Route *route, bool greeting) {
    Path *oldest = &peer->path[0];
    for (int k = 0; k < MOST_PATHS; k++) {
        Path *path = &peer->path[k];
        if (path->route.bytes == route->bytes && memcmp(path->route.id, route->id, route->bytes) == 0)
            return path;
        if (path->heard < oldest->heard) oldest = path;
    }
    if (!greeting) return NULL;
    *oldest = (Path){.route = *route};
    return oldest;
}

static void receive_on_listener(Member *m, double now) {
    for (int i = 0; i < 4 * PULL_WINDOW; i++) {
        Route route;
        char name[NAME_BYTES];
        const char *why = NULL;
        int64_t bytes = transport_receive(m->listener, m->frame_in, &route, name, NULL);
        if (bytes < 0) return;
        Peer *peer = member_peer(m, name);
        if (!peer || !peer->present || route.bytes == 0) continue;
        if (!frame_read(m->frame_in, (size_t)bytes, &m->in, &why)) {
            member_refuse(m, name, why);
            continue;
        }
        bool greeting = m->in.kind == MESSAGE_LINK;
        Path *path = m->in.run == m->run ? find_path(peer, &route, greeting) : NULL;
        if (!path || !frame_in_order(&path->order, &m->in, greeting)) continue;
        path->heard = now;
        message_name(m->in.from, name);
        if (!greeting) {
            member_receive_payload(m, now);
            continue;
        }
        message_clear(&m->out, MESSAGE_LINK);
        bytes = (int64_t)member_write(m, &m->out);
        transport_send(m->listener, &path->route, m->frame_out, (size_t)bytes);
    }
}

void links_receive(Member *m, double now) {
    if (m->listener) {
        transport_answer_checks(&m->transport);
        receive_on_listener(m, now);
    }
    for (int i = 0; i < MAX_GROUPS; i++) {
        for (int k = 0; k < MOST_PATHS; k++) {
            if (m->peer[i].link[k].socket) receive_on_link(m, &m->peer[i], &m->peer[i].link[k], now);
        }
    }
}
