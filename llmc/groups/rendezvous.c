// The server's thread: receives frames, hands control messages to rounds.h and relays payloads.
#include "llmc/groups/rendezvous.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <zmq.h>

#include "llmc/groups/refusals.h"
#include "llmc/groups/relay.h"
#include "llmc/groups/rounds.h"
#include "llmc/groups/transport.h"

// MOST_PENDING: frames queued per connection and direction. Enough for the pull windows of 32
// owners, and for the rounds and offers that a joining group is sent.
enum { MOST_CONNECTIONS = 1024, MOST_PENDING = 4096, TICK_MS = 50 };
static const double settle_seconds = 2, silent_seconds = 3, remove_seconds = 30;

typedef struct Connection {
    Route route;
    char name[NAME_BYTES];
    FrameOrder order;
    double used;
} Connection;

// Connections of a group: -1 or an index.
typedef struct Bound {
    char name[NAME_BYTES];
    int control, bulk;
} Bound;

struct Rendezvous {
    RendezvousOptions options;
    char *folder;
    Keys keys;
    KeyRing ring;  // of the groups
    Transport transport;
    void *socket, *monitor;
    pthread_t thread;
    atomic_int stop;
    uint64_t session;
    uint64_t sequence;  // of the last frame sent, on any connection
    uint64_t run;       // of the last group that was accepted; 0: none
    Rounds *rounds;
    Refusals refusals;
    Relay relay;
    Connection connection[MOST_CONNECTIONS];
    Bound bound[MAX_GROUPS];
    int from;                     // connection of the message in process
    char address[ADDRESS_BYTES];  // of the sender of the message in process
    Message message, reply;
    uint8_t in[FRAME_BYTES], out[FRAME_BYTES];
};

static void say(Rendezvous *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(Rendezvous *s, const char *format, ...) {
    char line[2048];
    va_list arguments;
    if (!s->options.log) return;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    s->options.log(s->options.context, line);
}

static void refuse(Rendezvous *s, const char *who, const char *why) {
    char line[512];
    if (refusal_line(&s->refusals, monotonic_seconds(), who, why, line, sizeof line)) say(s, "%s", line);
}

// ---- connections ----

static Bound *find_bound(Rendezvous *s, const char *name, bool add) {
    Bound *empty = NULL;
    for (int i = 0; i < MAX_GROUPS; i++) {
        if (strcmp(s->bound[i].name, name) == 0) return &s->bound[i];
        if (!*s->bound[i].name || !rounds_incarnation(s->rounds, s->bound[i].name)) empty = &s->bound[i];
    }
    if (!add || !empty) return NULL;
    *empty = (Bound){.control = -1, .bulk = -1};
    message_name(empty->name, name);
    return empty;
}

static void forget_connection(Rendezvous *s, int at) {
    for (int i = 0; i < MAX_GROUPS; i++) {
        if (s->bound[i].control == at) s->bound[i].control = -1;
        if (s->bound[i].bulk == at) s->bound[i].bulk = -1;
    }
    s->connection[at] = (Connection){.used = 0};
}

// Returns the connection's index; replaces the one that has been idle for longest if necessary.
static int find_connection(Rendezvous *s, const Route *route, const char *name) {
    int oldest = 0;
    for (int i = 0; i < MOST_CONNECTIONS; i++) {
        Connection *c = &s->connection[i];
        if (c->route.bytes == route->bytes && memcmp(c->route.id, route->id, route->bytes) == 0) {
            c->used = monotonic_seconds();
            return i;
        }
        if (c->used < s->connection[oldest].used) oldest = i;
    }
    forget_connection(s, oldest);
    Connection *c = &s->connection[oldest];
    c->route = *route;
    c->used = monotonic_seconds();
    message_name(c->name, name);
    return oldest;
}

// Sends to a connection. Forgets it if it is gone or its queue is full: the group then has to say
// hello and report again.
static void send_to(Rendezvous *s, int at, Message *message, bool relayed) {
    if (at < 0) return;
    Connection *c = &s->connection[at];
    bool named = relayed || message->kind == MESSAGE_PEER || message->kind == MESSAGE_SERVING ||
                 message->kind == MESSAGE_AGAIN;
    if (!named) message->from[0] = '\0';
    message->session = s->session;
    message->sequence = ++s->sequence;
    size_t bytes = frame_write(message, s->out);
    int failed = transport_send(s->socket, &c->route, s->out, bytes);
    if (failed && (failed != EAGAIN || !relayed)) forget_connection(s, at);
}

// Output of rounds_groups.c.
static void send_by_name(void *context, const char *name, const Message *message) {
    Rendezvous *s = (Rendezvous *)context;
    Message *copy = &s->reply;
    if (message->kind == MESSAGE_NEWS && !name) {
        say(s, "%s", message->text);
        return;
    }
    memcpy(copy, message, message_bytes(message));
    if (message->kind == MESSAGE_PEER && !(message->flags & FLAG_LEFT)) {
        Error err = {0};
        char key[KEY_TEXT];
        if (keys_load_public(s->folder, message->from, key, &err)) message_text(copy, key);
    }
    if (message->kind == MESSAGE_REFUSE) refuse(s, s->connection[s->from].name, message->text);
    const Bound *bound = name ? find_bound(s, name, false) : NULL;
    send_to(s, name ? (bound ? bound->control : -1) : s->from, copy, false);
}

// ---- messages ----

static void answer(Rendezvous *s, MessageKind kind) {
    message_clear(&s->reply, kind);
    send_to(s, s->from, &s->reply, false);
}

static void send_table(Rendezvous *s) {
    GroupStatus g;
    double now = monotonic_seconds();
    Message *m = &s->reply;
    message_clear(m, MESSAGE_TABLE);
    snprintf(m->text, sizeof m->text, "%-20s %-9s %10s %15s %10s %8s %6s %6s  %s\n", "group", "state",
             "iteration", "tokens", "tokens/s", "round", "stale", "late", "address");
    send_to(s, s->from, m, false);
    for (int i = 0; rounds_status(s->rounds, i, now, &g); i++) {
        message_clear(m, MESSAGE_TABLE);
        snprintf(m->text, sizeof m->text,
                 "%-20s %-9s %10" PRId64 " %15" PRId64 " %10.0f %8" PRId64 " %6" PRId64 " %6" PRId64 "  %s\n",
                 g.name, g.state, g.iteration, g.tokens, g.tokens_per_second, g.last_round, g.stale,
                 g.rounds_late, *g.address ? g.address : "relayed");
        send_to(s, s->from, m, false);
    }
    message_clear(m, MESSAGE_TABLE);
    m->flags = FLAG_LAST;
    send_to(s, s->from, m, false);
}

// Sends a piece of `owner`, or that it is gone, to the groups that have asked for it.
static void send_piece(Rendezvous *s, const char *owner, Message *m, uint64_t groups) {
    for (int i = 0; i < MAX_GROUPS; i++) {
        if (!(groups >> i & 1) || s->bound[i].bulk < 0) continue;
        message_name(m->from, owner);
        message_name(m->to, s->bound[i].name);
        send_to(s, s->bound[i].bulk, m, true);
    }
}

static void relay(Rendezvous *s, const char *name) {
    Message *m = &s->message;
    const RelayPiece *piece = NULL;
    Bound *to = find_bound(s, m->to, false), *from = find_bound(s, name, false);
    if (!from || !rounds_joined(s->rounds, name)) return;
    if (m->kind != MESSAGE_GET) {
        send_piece(s, name, m, relay_answer(&s->relay, m, name));
        return;
    }
    if (!to || to->bulk < 0) return;
    switch (relay_request(&s->relay, m, (int)(from - s->bound), monotonic_seconds(), &piece)) {
        case RELAY_WAIT: break;
        case RELAY_FORWARD:
            message_name(m->from, name);
            send_to(s, to->bulk, m, true);
            break;
        case RELAY_ANSWER:
            m->kind = MESSAGE_DATA;
            m->data = piece->data;
            m->data_bytes = piece->bytes;
            send_piece(s, to->name, m, UINT64_C(1) << (from - s->bound));
            break;
    }
}

// A group that listens at all addresses, tcp://*:port, is reached at the address that it comes
// from.
static void complete_address(Rendezvous *s) {
    const char *const all[] = {"tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"};
    const char *mapped = "::ffff:", *from = s->address, *rest = NULL;
    char port[32];
    for (int i = 0; i < 3; i++) {
        size_t length = strlen(all[i]);
        if (strncmp(s->message.address, all[i], length) == 0) rest = s->message.address + length;
    }
    if (!rest) return;
    snprintf(port, sizeof port, "%.16s", rest);
    if (strncmp(from, mapped, strlen(mapped)) == 0) from += strlen(mapped);
    bool six = strchr(from, ':') != NULL;
    snprintf(s->message.address, ADDRESS_BYTES, "tcp://%s%.64s%s:%s", six ? "[" : "", from, six ? "]" : "",
             port);
}

static void receive_control(Rendezvous *s, const char *name) {
    const Message *m = &s->message;
    Bound *bound = find_bound(s, name, false);
    if (m->kind != MESSAGE_HELLO && (!bound || bound->control != s->from)) {
        answer(s, MESSAGE_WHO);
        return;
    }
    if (m->kind == MESSAGE_HELLO) complete_address(s);
    rounds_receive(s->rounds, name, m, monotonic_seconds());
    if (m->kind != MESSAGE_HELLO || rounds_incarnation(s->rounds, name) != m->incarnation) return;
    s->run = m->run;
    bound = find_bound(s, name, true);
    if (bound) bound->control = s->from;
}

static void receive_link(Rendezvous *s, const char *name) {
    Bound *bound = find_bound(s, name, false);
    if (!bound || rounds_incarnation(s->rounds, name) != s->message.incarnation) return;
    answer(s, MESSAGE_LINK);
    if (bound->bulk == s->from) return;
    bound->bulk = s->from;
    for (int i = 0; i < MAX_GROUPS; i++) {  // requests to an earlier connection are lost
        const Bound *other = &s->bound[i];
        if (other == bound || !rounds_joined(s->rounds, other->name)) continue;
        message_clear(&s->reply, MESSAGE_AGAIN);
        message_name(s->reply.from, name);
        send_to(s, other->control, &s->reply, false);
    }
}

static void receive(Rendezvous *s, const char *name) {
    const Message *m = &s->message;
    bool server = strcmp(name, SERVER_NAME) == 0;
    bool any_run = m->kind == MESSAGE_HELLO || m->kind == MESSAGE_STATUS || !s->run;
    if (m->run != s->run && !any_run) {
        refuse(s, name, "a frame of another run");
        return;
    }
    switch (m->kind) {
        case MESSAGE_STATUS: send_table(s); break;
        case MESSAGE_LINK: receive_link(s, name); break;
        case MESSAGE_GET:
        case MESSAGE_DATA:
        case MESSAGE_GONE: relay(s, name); break;
        default:
            if (server) refuse(s, name, "the keys of the rendezvous cannot join a run; use a group's");
            else receive_control(s, name);
    }
}

static void receive_all(Rendezvous *s) {
    for (int i = 0; i < 256; i++) {
        Route route;
        char name[NAME_BYTES];
        const char *why = NULL;
        int64_t bytes = transport_receive(s->socket, s->in, &route, name, s->address);
        if (bytes < 0) return;
        if (!*name || route.bytes == 0) continue;
        s->from = find_connection(s, &route, name);
        FrameOrder *order = &s->connection[s->from].order;
        if (!frame_read(s->in, (size_t)bytes, &s->message, &why)) {
            char text[256];
            snprintf(text, sizeof text, "a frame that is %s", why);
            refuse(s, name, text);
        } else if (!frame_in_order(order, &s->message,
                                   order->session == 0 || s->message.kind == MESSAGE_HELLO)) {
            refuse(s, name, "a frame that was seen before or is of an earlier session");
        } else {
            receive(s, name);
        }
    }
}

// ---- thread ----

static bool check_key(void *context, const uint8_t key[KEY_RAW], const char *address, char name[NAME_BYTES]) {
    Rendezvous *s = (Rendezvous *)context;
    char who[ADDRESS_BYTES + 16];
    if (keys_find(&s->ring, s->folder, key, name)) return true;
    snprintf(who, sizeof who, "address %s", address);
    // Without the key: a new one at every attempt would print a line each time.
    refuse(s, who, "its key is not in the folder of keys");
    return false;
}

static void read_events(Rendezvous *s) {
    char address[ADDRESS_BYTES] = "";
    if (transport_events(s->monitor, address) & EVENT_BROKEN)
        refuse(s, *address ? address : "a connection",
               "no valid handshake (another program or another server.public)");
}

static void *serve(void *context) {
    Rendezvous *s = (Rendezvous *)context;
    double ticked = 0;
    while (!atomic_load(&s->stop)) {
        zmq_pollitem_t items[3] = {{s->socket, 0, ZMQ_POLLIN, 0},
                                   {s->transport.zap, 0, ZMQ_POLLIN, 0},
                                   {s->monitor, 0, ZMQ_POLLIN, 0}};
        zmq_poll(items, 3, TICK_MS);
        transport_answer_checks(&s->transport);
        receive_all(s);
        read_events(s);
        double now = monotonic_seconds();
        if (now >= ticked + 0.001 * TICK_MS) {
            rounds_tick(s->rounds, now);
            ticked = now;
        }
    }
    return NULL;
}

static void close_all(Rendezvous *s) {
    transport_close_socket(s->monitor);
    transport_close_socket(s->socket);
    transport_close(&s->transport);
    rounds_free(s->rounds);
    relay_free(&s->relay);
    refusal_free(&s->refusals);
    keys_free(&s->ring);
    free(s->folder);
    free(s);
}

Rendezvous *rendezvous_serve_start(const RendezvousOptions *options, Error *err) {
    Rendezvous *s = (Rendezvous *)xcalloc(1, sizeof *s, "the rendezvous");
    s->options = *options;
    s->folder = xstrdup(options->keys);
    const RoundsOptions rules = {settle_seconds, silent_seconds, remove_seconds, send_by_name, s};
    s->rounds = rounds_create(&rules, monotonic_seconds());
    for (int i = 0; i < MAX_GROUPS; i++) s->bound[i] = (Bound){.control = -1, .bulk = -1};
    bool good = getrandom(&s->session, sizeof s->session, 0) == sizeof s->session ||
                system_error(err, "cannot read random numbers: %s; check /dev/urandom", strerror(errno));
    good = good && keys_load(s->folder, SERVER_NAME, &s->keys, err) &&
           transport_open(&s->transport, check_key, s, err);
    s->socket = good ? transport_listen(&s->transport, &s->keys, options->listen, MOST_PENDING, err) : NULL;
    s->monitor = s->socket ? transport_monitor(&s->transport, s->socket, "rendezvous") : NULL;
    good = s->socket && (s->monitor || system_error(err, "cannot watch connections: %s; close other programs",
                                                    zmq_strerror(errno)));
    if (good && pthread_create(&s->thread, NULL, serve, s) == 0) return s;
    if (good) system_error(err, "cannot start a thread for the rendezvous; raise ulimit -u");
    close_all(s);
    return NULL;
}

void rendezvous_serve_stop(Rendezvous *s) {
    if (!s) return;
    atomic_store(&s->stop, 1);
    pthread_join(s->thread, NULL);
    close_all(s);
}
