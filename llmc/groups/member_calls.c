// The trainer's calls: see member.h.
#include "llmc/groups/member.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "llmc/groups/member_state.h"

// How long a group tries to join: a rendezvous that does not answer, and a name that is in use.
static const double reach_seconds = 30, wait_seconds = 15;

// ---- waiting ----

static bool stopped(const Member *m) { return m->options.stopped && m->options.stopped(); }

static void wake(Member *m) {
    uint64_t one = 1;
    if (write(m->wake, &one, sizeof one) < 0) return;  // full: the thread is awake anyway
}

// Waits for the network thread, for a tenth of a second at most.
static void wait_change(Member *m) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += 100000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    pthread_cond_timedwait(&m->changed, &m->lock, &until);
}

static void lock(Member *m) { pthread_mutex_lock(&m->lock); }

// Also wakes the network thread, which has something to send.
static void unlock(Member *m) {
    pthread_mutex_unlock(&m->lock);
    wake(m);
}

// ---- joining ----

// Messages of the ledger. They are sent before the rendezvous has answered a hello, too, because
// they follow its reports. If they cannot be sent, they are not needed: another hello follows.
static void send_message(void *context, Message *message) { member_queue((Member *)context, message); }

static void release_taken(Member *m) {
    for (int i = 0; i < MAX_GROUPS; i++) {
        payload_release(m->taken[i]);
        m->taken[i] = NULL;
    }
    free(m->taken_round.offer);
    m->taken_round.offer = NULL;
}

static void end_fetch(Fetch *fetch) {
    payload_release(fetch->payload);
    free(fetch->latest);
    *fetch = (Fetch){.round = -1};
}

static void free_member(Member *m) {
    transport_close_socket(m->control_monitor);
    transport_close_socket(m->bulk_monitor);
    transport_close_socket(m->control.socket);
    transport_close_socket(m->bulk.socket);
    links_close(m);
    transport_close(&m->transport);
    for (int i = 0; i < m->outgoing; i++) free(m->outbox[i]);
    free(m->outbox);
    for (int c = 0; c < m->ledger.chunks; c++) {
        payload_release(m->served[c].payload);
        end_fetch(&m->fetch[c]);
    }
    release_taken(m);
    pulls_free(&m->pulls);
    ledger_free(&m->ledger);
    refusal_free(&m->refusals);
    if (m->wake >= 0) close(m->wake);
    pthread_mutex_destroy(&m->lock);
    pthread_cond_destroy(&m->changed);
    free(m->identity);
    free(m->rendezvous);
    free(m->listen);
    free(m->gets);
    free(m->served);
    free(m->fetch);
    free(m->wanted);
    free(m->payload_bytes);
    free(m->state_bytes);
    free(m->frame_in);
    free(m->frame_out);
    free(m);
}

static Member *create(const MemberOptions *options) {
    Member *m = (Member *)xcalloc(1, sizeof *m, "a member of a run");
    pthread_condattr_t monotonic;
    size_t chunks = (size_t)options->chunks;
    m->options = *options;
    m->identity = xstrdup(options->identity);
    m->rendezvous = xstrdup(options->rendezvous);
    m->listen = options->listen ? xstrdup(options->listen) : NULL;
    m->run = XXH3_64bits(m->identity, strlen(m->identity));
    pthread_mutex_init(&m->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&m->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    m->gets = (Get *)xcalloc(MOST_GETS, sizeof *m->gets, "requests");
    m->served = (Served *)xcalloc(chunks, sizeof *m->served, "served states");
    m->fetch = (Fetch *)xcalloc(chunks, sizeof *m->fetch, "fetched states");
    m->wanted = (bool *)xcalloc(chunks, sizeof *m->wanted, "wanted states");
    m->frame_in = (uint8_t *)xmalloc(FRAME_BYTES, "a frame");
    m->frame_out = (uint8_t *)xmalloc(FRAME_BYTES, "a frame");
    m->payload_bytes = (int64_t *)xcalloc(chunks, sizeof *m->payload_bytes, "sizes");
    m->state_bytes = (int64_t *)xcalloc(chunks, sizeof *m->state_bytes, "sizes");
    memcpy(m->payload_bytes, options->payload_bytes, chunks * sizeof *m->payload_bytes);
    memcpy(m->state_bytes, options->state_bytes, chunks * sizeof *m->state_bytes);
    m->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    m->heard = m->control.made = m->bulk.made = monotonic_seconds();
    m->deal = 1;
    m->deal_first = -1;
    return m;
}

static bool connect_sockets(Member *m, Error *err) {
    Transport *t = &m->transport;
    uint64_t incarnation = 0;
    while (incarnation == 0) {
        if (getrandom(&incarnation, sizeof incarnation, 0) != sizeof incarnation)
            return system_error(err, "cannot read random numbers: %s; check /dev/urandom", strerror(errno));
    }
    if (!keys_load(m->options.keys, m->options.name, &m->keys, err)) return false;
    ledger_init(&m->ledger, m->options.name, incarnation, m->options.chunks, send_message, m);
    if (!links_listen(m, err)) return false;
    m->control.socket = transport_connect(t, &m->keys, m->keys.server_key, m->rendezvous, 65536, err);
    if (!m->control.socket) return false;
    m->bulk.socket = transport_connect(t, &m->keys, m->keys.server_key, m->rendezvous, PULL_WINDOW, err);
    if (!m->bulk.socket) return false;
    m->control_monitor = transport_monitor(t, m->control.socket, "control");
    m->bulk_monitor = transport_monitor(t, m->bulk.socket, "bulk");
    return (m->control_monitor && m->bulk_monitor && m->wake >= 0) ||
           system_error(err, "cannot watch connections: %s; raise ulimit -n", strerror(errno));
}

// Waits until the rendezvous has accepted the group. Called with the lock held.
static bool wait_joined(Member *m, Error *err) {
    double start = monotonic_seconds(), refused_at = 0;
    for (;;) {
        double now = monotonic_seconds();
        if (m->ledger.joined) return true;
        if (*m->refused)
            return usage_error(err, "the rendezvous at %s refuses this group: %s", m->rendezvous, m->refused);
        if (stopped(m))
            return error_set(err, EXIT_STOPPED, "stopped while joining the run at %s", m->rendezvous);
        bool bad_keys = (m->events & (EVENT_REFUSED | EVENT_BROKEN)) && !(m->events & EVENT_READY);
        if (bad_keys && refused_at == 0) refused_at = now;
        if (bad_keys && now > refused_at + 1) {
            return system_error(
                err,
                "the rendezvous at %s refuses the keys in %s; its folder needs %s.public, and "
                "this one its server.public",
                m->rendezvous, m->options.keys, m->options.name);
        }
        if (*m->waiting && now > start + wait_seconds)
            return usage_error(err, "cannot join the run at %s as %s: %s", m->rendezvous, m->options.name,
                               m->waiting);
        if (now > start + reach_seconds) {
            return error_set(err, EXIT_COMMUNICATION,
                             "cannot reach the rendezvous at %s: no answer for %.0f s; "
                             "check the address, the network and the keys",
                             m->rendezvous, reach_seconds);
        }
        wait_change(m);
    }
}

Member *member_join(const MemberOptions *options, Error *err) {
    assert(options && options->name && options->rendezvous && options->keys && options->identity);
    assert(options->chunks > 0 && options->chunks < MAX_CHUNKS && options->payload_bytes &&
           options->state_bytes);
    Member *m = create(options);
    if (!connect_sockets(m, err) || pthread_create(&m->thread, NULL, member_network, m) != 0) {
        if (err->code == EXIT_DONE)
            system_error(err, "cannot start a thread for the network; raise ulimit -u");
        free_member(m);
        return NULL;
    }
    lock(m);
    bool joined = wait_joined(m, err);
    if (joined) {
        member_say(m, "joined the run at %s as group %s; %s", m->rendezvous, m->ledger.name,
                   m->listen ? "other groups may connect directly"
                             : "payloads are relayed by the rendezvous");
    }
    unlock(m);
    if (joined) return m;
    member_leave(m, 0);
    return NULL;
}

bool member_is_first(const Member *m) {
    lock((Member *)m);
    bool first = m->ledger.first;
    unlock((Member *)m);
    return first;
}

void member_leave(Member *m, double seconds) {
    double end = monotonic_seconds() + seconds;
    lock(m);
    while (m->ledger.joined && ledger_open(&m->ledger) && monotonic_seconds() < end) wait_change(m);
    if (m->ledger.joined) {
        Message leave;
        message_clear(&leave, MESSAGE_LEAVE);
        member_queue(m, &leave);
    }
    m->stopping = true;
    unlock(m);
    pthread_join(m->thread, NULL);
    free_member(m);
}

// ---- states of chunks ----

// Returns a chunk that another group wants and this one can serve, or -1.
static int find_wanted(const Member *m) {
    for (int c = 0; c < m->ledger.chunks; c++) {
        if (m->wanted[c] && m->ledger.chunk[c].has_state && !m->fetch[c].active) return c;
    }
    return -1;
}

// Takes over a state that has arrived.
static void take_state(Member *m, int chunk, const Fetch *fetch, uint8_t *state, Contribution *own) {
    memcpy(state, fetch->payload->data, (size_t)fetch->payload->bytes);
    const Held *held = ledger_contains(&m->ledger, chunk, fetch->latest, fetch->latests);
    release_taken(m);
    if (held && held->payload) {
        m->taken[0] = payload_keep(held->payload);
        *own = (Contribution){m->ledger.name, held->offer.tokens, held->payload->data};
    }
    ledger_fetched(&m->ledger, chunk, fetch->round, fetch->chain);
}

int64_t member_fetch(Member *m, int chunk, double seconds, uint8_t *state, Contribution *own) {
    assert(chunk >= 0 && chunk < m->ledger.chunks && state && own);
    double start = monotonic_seconds();
    int64_t round = -1;
    *own = (Contribution){NULL, 0, NULL};
    lock(m);
    Fetch *fetch = &m->fetch[chunk];
    if (!fetch->active) *fetch = (Fetch){.active = true, .round = -1};
    fetch->ahead = false;
    wake(m);
    while (fetch->round < 0 && !fetch->keep && !stopped(m) && find_wanted(m) < 0 &&
           monotonic_seconds() < start + seconds)
        wait_change(m);
    bool busy = fetch->round < 0 && !fetch->keep && !stopped(m);
    if (fetch->round >= 0) {
        round = fetch->round;
        take_state(m, chunk, fetch, state, own);
    } else if (fetch->keep) {
        round = MEMBER_KEEP;
        ledger_keep(&m->ledger, chunk);
    }
    if (busy) {
        round = MEMBER_BUSY;
        m->interrupt = false;
    } else {
        pulls_end_state(&m->pulls, chunk);
        end_fetch(fetch);
    }
    m->stats.waited += monotonic_seconds() - start;
    unlock(m);
    return round;
}

void member_fetch_ahead(Member *m, int chunk) {
    assert(chunk >= 0 && chunk < m->ledger.chunks);
    lock(m);
    if (!m->fetch[chunk].active) m->fetch[chunk] = (Fetch){.active = true, .ahead = true, .round = -1};
    unlock(m);
}

int member_wanted(Member *m) {
    lock(m);
    int chunk = find_wanted(m);
    pthread_mutex_unlock(&m->lock);
    return chunk;
}

void member_serve(Member *m, int chunk, int64_t round, const uint8_t *state) {
    assert(chunk >= 0 && chunk < m->ledger.chunks && state);
    int64_t bytes = m->state_bytes[chunk];
    Payload *payload = payload_create(bytes);
    memcpy(payload->data, state, (size_t)bytes);
    uint64_t hash = XXH3_64bits(payload->data, (size_t)bytes);
    lock(m);
    m->wanted[chunk] = false;
    uint64_t chain = ledger_chain(&m->ledger, chunk, round);
    Served *served = &m->served[chunk];
    payload_release(served->payload);
    *served = (Served){payload, round, chain, hash, monotonic_seconds()};
    Message serving;
    message_clear(&serving, MESSAGE_SERVING);
    serving.chunk = chunk;
    serving.round = round;
    serving.chain = chain;
    serving.hash = hash;
    serving.bytes = bytes;
    serving.offers = m->ledger.chunk[chunk].latests;
    for (int i = 0; i < serving.offers; i++) serving.offer[i] = m->ledger.chunk[chunk].latest[i];
    if (m->ledger.joined) member_queue(m, &serving);
    unlock(m);
}

// ---- rounds ----

void member_offer(Member *m, int chunk, int64_t tokens, const uint8_t *bytes) {
    assert(chunk >= 0 && chunk < m->ledger.chunks && bytes && tokens >= 0);
    Payload *payload = payload_create(m->payload_bytes[chunk]);
    memcpy(payload->data, bytes, (size_t)payload->bytes);
    uint64_t hash = XXH3_64bits(payload->data, (size_t)payload->bytes);
    lock(m);
    m->ledger.now = monotonic_seconds();
    ledger_offer(&m->ledger, chunk, tokens, payload, hash);
    payload_release(payload);
    unlock(m);
}

static void fill_round(Member *m, int chunk, const LedgerRound *round, ClosedRound *closed) {
    m->taken_round = *round;
    m->taken_round.offer = (Offer *)xcalloc((size_t)round->offers + 1, sizeof(Offer), "a closed round");
    *closed =
        (ClosedRound){.round = round->round, .contributions = round->offers, .contribution = m->contribution};
    for (int i = 0; i < round->offers; i++) {
        Offer *offer = &m->taken_round.offer[i];
        *offer = round->offer[i];
        m->taken[i] = payload_keep(ledger_find(&m->ledger, chunk, offer));
        m->contribution[i] = (Contribution){offer->name, offer->tokens, m->taken[i]->data};
        if (ledger_own(&m->ledger, chunk, offer)) closed->own = true;
    }
}

bool member_take(Member *m, int chunk, bool wait, ClosedRound *closed) {
    assert(chunk >= 0 && chunk < m->ledger.chunks && closed);
    double start = monotonic_seconds();
    bool found = false;
    lock(m);
    release_taken(m);
    for (;;) {
        bool missed = false;
        const LedgerRound *round = ledger_next(&m->ledger, chunk, &missed);
        found = missed || round;
        if (missed) *closed = (ClosedRound){.round = m->ledger.chunk[chunk].round, .missed = true};
        else if (round) fill_round(m, chunk, round, closed);
        if (round) ledger_take(&m->ledger, chunk);
        if (found || !wait || stopped(m) || m->interrupt) break;
        wait_change(m);
    }
    m->interrupt = m->interrupt && found;
    if (wait) m->stats.waited += monotonic_seconds() - start;
    pthread_mutex_unlock(&m->lock);
    return found;
}

int64_t member_samples(Member *m, int64_t count, int64_t floor) {
    enum { PATIENCE_MS = 500 };  // before the request is repeated
    assert(count > 0 && floor >= 0);
    double now = monotonic_seconds();
    lock(m);
    int64_t first = m->deal_first;
    if (floor > m->dealt) m->dealt = floor;
    if (first >= 0) {
        m->deal++;
        m->deal_first = -1;
        m->deal_asked = 0;
    } else if (m->ledger.joined && now > m->deal_asked + PATIENCE_MS / 1e3) {
        Message deal;
        message_clear(&deal, MESSAGE_DEAL);
        deal.hash = m->deal;
        deal.bytes = count;
        deal.round = m->dealt;
        member_queue(m, &deal);
        m->deal_asked = now;
    }
    unlock(m);
    return first;
}

// Of blocks of `count` samples, each of n groups takes every n-th.
int64_t member_own_samples(Member *m, int64_t count, int64_t floor) {
    assert(count > 0 && floor >= 0);
    int64_t groups = 1, index = 0;
    lock(m);
    for (int i = 0; i < MAX_GROUPS; i++) {
        if (!m->peer[i].present) continue;
        groups++;
        index += strcmp(m->peer[i].name, m->ledger.name) < 0;
    }
    if (floor > m->dealt) m->dealt = floor;
    int64_t block = m->dealt / count + (m->dealt % count > 0);
    block += ((index - block) % groups + groups) % groups;
    m->dealt = (block + 1) * count;
    unlock(m);
    return block * count;
}

void member_hash(Member *m, int chunk, int64_t round, uint64_t hash) {
    assert(chunk >= 0 && chunk < m->ledger.chunks);
    Message message;
    message_clear(&message, MESSAGE_HASH);
    message.chunk = chunk;
    message.round = round;
    message.hash = hash;
    lock(m);
    if (m->ledger.joined) member_queue(m, &message);
    unlock(m);
}

// ---- reports ----

void member_report(Member *m, int64_t iteration, int64_t tokens, double tokens_per_second) {
    lock(m);
    m->iteration = iteration;
    m->tokens = tokens;
    m->tokens_per_second = tokens_per_second > 0 ? tokens_per_second : 0;
    pthread_mutex_unlock(&m->lock);
}

const char *member_news(Member *m, MemberStats *stats) {
    lock(m);
    m->stats.groups = 1;
    for (int i = 0; i < MAX_GROUPS; i++) m->stats.groups += m->peer[i].present;
    m->stats.connected = m->ledger.joined && !m->unreachable;
    m->stats.rounds_late = m->ledger.rounds_late;
    m->stats.tokens_counted = m->ledger.tokens_counted;
    if (stats) *stats = m->stats;
    const char *line = refusal_next(&m->refusals);
    pthread_mutex_unlock(&m->lock);
    return line;
}
