// The network thread of a Member: joins the run, moves messages between the ledger and the
// rendezvous, and transfers payloads.
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "llmc/groups/member_state.h"

enum { IDLE_MS = 50, BUSY_MS = 2, FRAMES_AT_ONCE = 256, MOST_ITEMS = 5 + 2 + MAX_GROUPS * MOST_PATHS };
static const double hello_seconds = 0.25, beat_seconds = 0.5, link_seconds = 1, lost_seconds = 5,
                    silent_seconds = 10;
static const double served_seconds = 120;

void member_say(Member *m, const char *format, ...) {
    char line[TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    refusal_news(&m->refusals, line);
}

void member_refuse(Member *m, const char *who, const char *why) {
    char line[512];
    if (refusal_line(&m->refusals, monotonic_seconds(), who, why, line, sizeof line))
        member_say(m, "%s", line);
}

// ---- sending ----

size_t member_write(Member *m, Message *message) {
    message_name(message->from, m->ledger.name);
    message->run = m->run;
    message->session = m->ledger.incarnation;
    message->incarnation = m->ledger.incarnation;
    message->sequence = ++m->sequence;
    return frame_write(message, m->frame_out);
}

int member_send_on(Member *m, Link *link, Message *message) {
    size_t bytes = member_write(m, message);
    return transport_send(link->socket, NULL, m->frame_out, bytes);
}

void member_keep_link(Link *link, const char *address, double now) {
    if (now < fmax(link->heard, link->made) + silent_seconds) return;
    transport_reconnect(link->socket, address);
    link->made = now;
}

void member_queue(Member *m, const Message *message) {
    m->outbox = (Message **)grow_array(m->outbox, m->outgoing, sizeof *m->outbox, "messages");
    Message *copy = (Message *)xmalloc(message_bytes(message), "a message");
    memcpy(copy, message, message_bytes(message));
    m->outbox[m->outgoing++] = copy;
}

// Sends the queued messages. If one cannot be sent, the rendezvous lacks something: the group has
// to join again and report.
static void flush_outbox(Member *m) {
    for (int i = 0; i < m->outgoing; i++) {
        memcpy(&m->out, m->outbox[i], message_bytes(m->outbox[i]));
        if (member_send_on(m, &m->control, &m->out) != 0) m->ledger.joined = false;
        free(m->outbox[i]);
    }
    m->outgoing = 0;
}

static void say_hello(Member *m, double now) {
    if (now < m->said_hello + hello_seconds) return;
    m->said_hello = now;
    Message *hello = &m->out;
    message_clear(hello, MESSAGE_HELLO);
    message_text(hello, m->identity);
    if (m->listen) snprintf(hello->address, sizeof hello->address, "%s", m->listen);
    hello->flags = ledger_has_state(&m->ledger) ? FLAG_STATE : 0;
    hello->iteration = m->ledger.chunks;
    hello->groups = (uint32_t)m->options.min_groups;
    hello->rate = m->options.grace_seconds;
    hello->round = m->dealt;
    hello->bytes = 1;
    for (int i = 0; i < MAX_GROUPS; i++) hello->bytes += m->peer[i].present;
    if (member_send_on(m, &m->control, hello) != 0) return;
    ledger_report(&m->ledger);
    flush_outbox(m);
}

static void send_beat(Member *m) {
    Message *beat = &m->out;
    message_clear(beat, MESSAGE_BEAT);
    beat->iteration = m->iteration;
    beat->tokens = m->tokens;
    beat->round = m->dealt;
    beat->rate = m->tokens_per_second;
    member_send_on(m, &m->control, beat);
}

// ---- payloads ----

Peer *member_peer(Member *m, const char *name) {
    for (int i = 0; i < MAX_GROUPS; i++) {
        if (*name && strcmp(m->peer[i].name, name) == 0) return &m->peer[i];
    }
    return NULL;
}

// Sends to another group, directly or through the rendezvous. Returns 0, or errno: EAGAIN to try
// again later.
static int send_payload(Member *m, const char *to, Message *message) {
    Peer *peer = member_peer(m, to);
    if (!peer || !peer->present) return EHOSTUNREACH;
    message_name(message->to, to);
    int failed = links_send(m, peer, message, monotonic_seconds());
    if (failed != ENOTCONN) return failed;
    return m->bulk.up ? member_send_on(m, &m->bulk, message) : ENOTCONN;
}

static bool send_get(void *context, const Pull *pull, int64_t offset) {
    Member *m = (Member *)context;
    Message *get = &m->out;
    message_clear(get, MESSAGE_GET);
    get->chunk = pull->chunk;
    get->flags = pull->state ? FLAG_STATE : 0;
    get->bytes = offset;
    get->offers = 1;
    get->offer[0] = pull->offer;
    return send_payload(m, pull->offer.name, get) == 0;
}

static void pull_done(void *context, const Pull *pull, bool complete) {
    Member *m = (Member *)context;
    if (!complete && pull->received == pull->pieces)
        member_refuse(m, pull->offer.name, "a payload with another hash");
    if (!pull->state) {
        ledger_received(&m->ledger, pull->chunk, &pull->offer, complete ? pull->payload : NULL);
        return;
    }
    Fetch *fetch = &m->fetch[pull->chunk];
    fetch->asked = 0;
    if (!complete) fetch->failed = pull->offer.hash;
    if (!complete || !fetch->active) return;
    fetch->payload = payload_keep(pull->payload);
    fetch->round = pull->offer.number;
}

static bool still_needed(void *context, const Pull *pull) {
    return ledger_wants(&((Member *)context)->ledger, pull->chunk, &pull->offer);
}

static bool round_waits(void *context, const Pull *pull) {
    return ledger_closed(&((Member *)context)->ledger, pull->chunk, &pull->offer);
}

// Begins transfers of the offers that the ledger lacks, and ends the ones that are not needed.
static void begin_pulls(Member *m, double now) {
    if (!m->ledger.changed) return;
    m->ledger.changed = false;
    pulls_keep(&m->pulls, still_needed);
    for (int c = 0; c < m->ledger.chunks; c++) {
        for (int i = 0; i < m->ledger.chunk[c].helds; i++) {
            const Held *held = &m->ledger.chunk[c].held[i];
            if (held->payload) continue;
            const Offer offer = held->offer;
            const Peer *peer = member_peer(m, offer.name);
            bool usable = peer && peer->present && offer.bytes == m->payload_bytes[c];
            if (usable) {
                pulls_begin(&m->pulls, c, false, &offer, now);
                continue;
            }
            const int helds = m->ledger.chunk[c].helds;
            ledger_received(&m->ledger, c, &offer, NULL);
            if (m->ledger.chunk[c].helds < helds) i = -1;  // the others have moved
        }
    }
}

// Answers a request for a piece. Returns false if it cannot be sent now.
static bool answer_get(Member *m, const Get *get) {
    Message *data = &m->out;
    const Served *served = &m->served[get->chunk];
    const Payload *payload = get->state ? served->payload : ledger_find(&m->ledger, get->chunk, &get->offer);
    if (get->state && payload && (served->round != get->offer.number || served->hash != get->offer.hash))
        payload = NULL;
    message_clear(data, payload ? MESSAGE_DATA : MESSAGE_GONE);
    data->chunk = get->chunk;
    data->flags = get->state ? FLAG_STATE : 0;
    data->offers = 1;
    data->offer[0] = get->offer;
    data->bytes = get->offset;
    if (payload) {
        if (get->offset >= payload->bytes) return true;
        int64_t left = payload->bytes - get->offset;
        data->data = payload->data + get->offset;
        data->data_bytes = (uint32_t)(left < PIECE_BYTES ? left : PIECE_BYTES);
        if (get->state) m->served[get->chunk].used = monotonic_seconds();
    }
    int64_t bytes = data->data_bytes;
    int failed = send_payload(m, get->name, data);
    if (!failed) m->stats.sent += bytes;
    return failed != EAGAIN;
}

// Answers the waiting requests. The ones that cannot be answered now go to the end of the queue, so
// that a slow group does not delay the others.
static void answer_gets(Member *m) {
    for (int n = m->waiting_gets; n > 0; n--) {
        const Get get = m->gets[m->first_get];
        m->first_get = (m->first_get + 1) % MOST_GETS;
        m->waiting_gets--;
        if (answer_get(m, &get)) continue;
        m->gets[(m->first_get + m->waiting_gets++) % MOST_GETS] = get;
    }
}

static void receive_get(Member *m, const Message *message) {
    if (message->chunk >= m->ledger.chunks || m->waiting_gets == MOST_GETS) return;
    Get *get = &m->gets[(m->first_get + m->waiting_gets++) % MOST_GETS];
    *get = (Get){.chunk = message->chunk,
                 .state = (message->flags & FLAG_STATE) != 0,
                 .offer = message->offer[0],
                 .offset = message->bytes};
    message_name(get->name, message->from);
}

static void expire_served(Member *m, double now) {
    for (int c = 0; c < m->ledger.chunks; c++) {
        Served *served = &m->served[c];
        if (!served->payload || now < served->used + served_seconds) continue;
        payload_release(served->payload);
        *served = (Served){NULL, 0, 0, 0, 0};
    }
}

// ---- states of chunks ----

static void ask_states(Member *m, double now) {
    if (!m->ledger.joined) return;
    for (int c = 0; c < m->ledger.chunks; c++) {
        Fetch *fetch = &m->fetch[c];
        if (!fetch_due(m->fetch, m->state_bytes, m->ledger.chunks, c, &m->pulls, now)) continue;
        fetch->begun = true;
        fetch->asked = now;
        message_clear(&m->out, MESSAGE_FETCH);
        m->out.chunk = c;
        m->out.round = m->ledger.chunk[c].taken;
        m->out.flags = m->ledger.chunk[c].has_state ? FLAG_STATE : 0;
        m->out.hash = fetch->failed;
        fetch->failed = 0;
        member_queue(m, &m->out);
    }
}

static void receive_serving(Member *m, const Message *message, double now) {
    if (message->chunk >= m->ledger.chunks) return;
    Fetch *fetch = &m->fetch[message->chunk];
    if (!fetch->active || fetch->round >= 0 || !*message->from) return;
    if (message->bytes != m->state_bytes[message->chunk]) {
        member_refuse(m, message->from, "a state of another size");
        fetch->failed = message->hash;
        return;
    }
    Offer offer = {.incarnation = message->incarnation,
                   .number = message->round,
                   .bytes = message->bytes,
                   .hash = message->hash};
    message_name(offer.name, message->from);
    size_t bytes = (size_t)message->offers * sizeof(Offer);
    free(fetch->latest);
    fetch->latest = (Offer *)xmalloc(bytes + 1, "counted offers");
    fetch->latests = message->offers;
    memcpy(fetch->latest, message->offer, bytes);
    fetch->chain = message->chain;
    fetch->asked = now;
    pulls_begin(&m->pulls, message->chunk, true, &offer, now);
}

// ---- receiving ----

// Ends transfers from a group that is lost, and releases its offers.
static void drop_payloads(Member *m, const Peer *peer) {
    pulls_end_group(&m->pulls, peer->name);
    ledger_left(&m->ledger, peer->name, peer->incarnation);
}

static void receive_peer(Member *m, const Message *message) {
    Peer *peer = member_peer(m, message->from);
    for (int i = 0; i < MAX_GROUPS && !peer; i++) {
        if (!m->peer[i].present) peer = &m->peer[i];
    }
    if (!peer || !name_valid(message->from)) return;
    bool left = message->flags & FLAG_LEFT;
    if (left && peer->incarnation != message->incarnation) return;
    bool same = strcmp(peer->name, message->from) == 0 && strcmp(peer->key, message->text) == 0 &&
                strcmp(peer->address, message->address) == 0;
    if (left || !same) {
        links_close_peer(peer);
        *peer = (Peer){.present = false};
        message_name(peer->name, message->from);
        snprintf(peer->key, sizeof peer->key, "%.*s", KEY_TEXT - 1, message->text);
        memcpy(peer->address, message->address, sizeof peer->address);
    }
    peer->incarnation = message->incarnation;
    peer->present = !left;
    peer->announced = m->ledger.now;
    if (left) drop_payloads(m, peer);
    else links_open_peer(m, peer);
}

// Forgets the groups that a restarted rendezvous has not announced for a grace period: they are
// lost, and it does not know them.
static void forget_peers(Member *m, double now) {
    if (!m->ledger.joined || m->welcomed_at == 0) return;
    if (now < m->welcomed_at + fmax(m->options.grace_seconds, silent_seconds)) return;
    for (int i = 0; i < MAX_GROUPS; i++) {
        Peer *peer = &m->peer[i];
        if (!peer->present || peer->announced >= m->welcomed_at) continue;
        links_close_peer(peer);
        peer->present = false;
        drop_payloads(m, peer);
    }
    m->welcomed_at = 0;
}

// The rendezvous refuses a group that has joined before, e.g. because its name is used by another
// process or it was restarted for another run.
static void say_refusal(Member *m, const char *who, double now) {
    char line[TEXT_BYTES];
    if (m->welcomed && refusal_line(&m->refusals, now, who, m->in.text, line, sizeof line))
        member_say(m, "the rendezvous %s", line);
}

static void receive_control(Member *m, double now) {
    const Message *in = &m->in;
    m->heard = now;
    if (m->unreachable) {
        m->unreachable = false;
        member_say(m, "the rendezvous can be reached again");
    }
    switch (in->kind) {
        case MESSAGE_PEER: receive_peer(m, in); break;
        case MESSAGE_SERVING: receive_serving(m, in, now); break;
        case MESSAGE_AGAIN: pulls_again(&m->pulls, in->from); break;
        case MESSAGE_NEWS: member_say(m, "%s", in->text); break;
        case MESSAGE_REFUSE:
            if (m->ledger.joined || !*m->refused) memcpy(m->refused, in->text, sizeof m->refused);
            say_refusal(m, "this group", now);
            break;
        case MESSAGE_WAIT:
            memcpy(m->waiting, in->text, sizeof m->waiting);
            say_refusal(m, "this group for now", now);
            break;
        case MESSAGE_WHO: m->ledger.joined = false; break;
        case MESSAGE_PULSE:
        case MESSAGE_DEAL:
            if (in->tokens > m->dealt) m->dealt = in->tokens;
            if (in->kind == MESSAGE_DEAL && in->hash == m->deal) m->deal_first = in->round;
            break;
        case MESSAGE_KEEP:
            if (in->chunk < m->ledger.chunks && m->fetch[in->chunk].active) m->fetch[in->chunk].keep = true;
            break;
        case MESSAGE_WANT:
            if (in->chunk < m->ledger.chunks) m->wanted[in->chunk] = m->interrupt = true;
            break;
        case MESSAGE_WELCOME:
            *m->waiting = '\0';
            m->welcomed = true;
            m->welcomed_at = now;
            ledger_receive(&m->ledger, in);
            break;
        default: ledger_receive(&m->ledger, in);
    }
}

void member_receive_payload(Member *m, double now) {
    switch (m->in.kind) {
        case MESSAGE_GET: receive_get(m, &m->in); break;
        case MESSAGE_DATA:
        case MESSAGE_GONE: pulls_receive(&m->pulls, &m->in, now); break;
        default: break;
    }
}

static bool greeting(MessageKind kind) {
    return kind == MESSAGE_WELCOME || kind == MESSAGE_WHO || kind == MESSAGE_WAIT || kind == MESSAGE_REFUSE ||
           kind == MESSAGE_LINK;
}

static void receive_link(Member *m, Link *link, double now) {
    for (int i = 0; i < FRAMES_AT_ONCE; i++) {
        const char *why = NULL;
        int64_t bytes = transport_receive(link->socket, m->frame_in, NULL, NULL, NULL);
        if (bytes < 0) return;
        if (!frame_read(m->frame_in, (size_t)bytes, &m->in, &why)) {
            member_refuse(m, "the rendezvous", why);
        } else if (frame_in_order(&link->order, &m->in, greeting(m->in.kind))) {
            link->heard = now;
            if (link == &m->bulk && m->in.kind == MESSAGE_LINK) m->bulk.up = true;
            else if (link == &m->bulk) member_receive_payload(m, now);
            else receive_control(m, now);
        } else if (m->in.session == link->order.session) {
            member_refuse(m, "the rendezvous", "a frame that was seen before");
        }
    }
}

// ---- time ----

static void keep_connections(Member *m, double now) {
    char address[ADDRESS_BYTES];
    int events = transport_events(m->control_monitor, address);
    m->events |= events;
    if (events & EVENT_READY) {  // a new connection: the rendezvous, perhaps a new one, asks for a hello
        m->ledger.joined = false;
        m->said_hello = 0;
    }
    if (transport_events(m->bulk_monitor, address) & (EVENT_LOST | EVENT_READY)) {
        m->bulk.up = false;
        m->bulk.asked = 0;
        pulls_again(&m->pulls, NULL);
    }
    if (now > m->heard + lost_seconds) {
        if (m->ledger.joined || ledger_has_state(&m->ledger)) {
            if (!m->unreachable)
                member_say(m,
                           "the rendezvous at %s cannot be reached; training continues with "
                           "this group alone until it can",
                           m->rendezvous);
            m->unreachable = true;
        }
        m->ledger.joined = false;
    }
    if (m->stopping) return;
    member_keep_link(&m->control, m->rendezvous, now);
    member_keep_link(&m->bulk, m->rendezvous, now);
    if (!m->ledger.joined) say_hello(m, now);
    else if (now > m->beat + beat_seconds) {
        m->beat = now;
        send_beat(m);
    }
    if (m->ledger.joined && now > m->bulk.asked + (m->bulk.up ? link_seconds : hello_seconds)) {
        m->bulk.asked = now;
        message_clear(&m->out, MESSAGE_LINK);
        m->out.flags = FLAG_BULK;
        member_send_on(m, &m->bulk, &m->out);
    }
}

// One pass of the loop, with the lock held. Returns whether work is waiting for a socket.
static bool step(Member *m) {
    double now = m->ledger.now = monotonic_seconds();
    receive_link(m, &m->control, now);
    receive_link(m, &m->bulk, now);
    links_receive(m, now);
    links_keep(m, now);
    keep_connections(m, now);
    forget_peers(m, now);
    ask_states(m, now);
    begin_pulls(m, now);
    pulls_step(&m->pulls, now);
    answer_gets(m);
    expire_served(m, now);
    m->stats.received = m->pulls.bytes;
    flush_outbox(m);
    pthread_cond_broadcast(&m->changed);
    return m->waiting_gets > 0;
}

void *member_network(void *context) {
    Member *m = (Member *)context;
    m->pulls.get = send_get;
    m->pulls.done = pull_done;
    m->pulls.urgent = round_waits;
    m->pulls.context = m;
    bool busy = false;
    for (;;) {
        zmq_pollitem_t items[MOST_ITEMS] = {{m->control.socket, 0, ZMQ_POLLIN, 0},
                                            {m->bulk.socket, 0, ZMQ_POLLIN, 0},
                                            {m->control_monitor, 0, ZMQ_POLLIN, 0},
                                            {m->bulk_monitor, 0, ZMQ_POLLIN, 0},
                                            {NULL, m->wake, ZMQ_POLLIN, 0}};
        int count_items = 5 + links_poll(m, items + 5, MOST_ITEMS - 5);
        zmq_poll(items, count_items, busy ? BUSY_MS : IDLE_MS);
        uint64_t count;
        if ((items[4].revents & ZMQ_POLLIN) && read(m->wake, &count, sizeof count) < 0) continue;
        pthread_mutex_lock(&m->lock);
        busy = step(m);
        bool stop = m->stopping && m->outgoing == 0;
        pthread_mutex_unlock(&m->lock);
        if (stop) return NULL;
    }
}
