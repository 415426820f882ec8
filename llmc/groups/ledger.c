// Rounds as one group knows them: see ledger.h.
#include "llmc/groups/ledger.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// ---- payloads ----

Payload *payload_create(int64_t bytes) {
    Payload *payload = (Payload *)xmalloc(sizeof *payload + (size_t)bytes, "a pseudo-gradient");
    payload->references = 1;
    payload->bytes = bytes;
    return payload;
}

Payload *payload_keep(Payload *payload) {
    payload->references++;
    return payload;
}

void payload_release(Payload *payload) {
    if (payload && --payload->references == 0) free(payload);
}

// ---- offers that are kept ----

static bool same_offer(const Offer *a, const Offer *b) {
    return a->number == b->number && a->incarnation == b->incarnation && strcmp(a->name, b->name) == 0;
}

static bool own_offer(const Ledger *l, const Offer *offer) {
    return offer->incarnation == l->incarnation && strcmp(offer->name, l->name) == 0;
}

static Held *find_held(const LedgerChunk *chunk, const Offer *offer) {
    for (int i = 0; i < chunk->helds; i++) {
        if (same_offer(&chunk->held[i].offer, offer)) return &chunk->held[i];
    }
    return NULL;
}

static Held *add_held(Ledger *l, LedgerChunk *chunk, const Offer *offer) {
    chunk->held = (Held *)grow_array(chunk->held, chunk->helds, sizeof *chunk->held, "offers");
    Held *held = &chunk->held[chunk->helds++];
    *held = (Held){.offer = *offer};
    l->changed = true;
    return held;
}

// Returns true for an own offer that may be in a round that this group has missed. Once a newer one
// is announced, it is not.
static bool may_have_counted(const Ledger *l, const LedgerChunk *chunk, const Held *held) {
    if (!own_offer(l, &held->offer) || held->offer.number <= chunk->counted_taken) return false;
    return chunk->missed || (held->offer.number <= chunk->withdrawn && chunk->echoed <= chunk->withdrawn);
}

static bool needed(const Ledger *l, const LedgerChunk *chunk, const Held *held) {
    if (!held->past || may_have_counted(l, chunk, held)) return true;
    if (held->closed_round == 0) return false;
    if (held->closed_round > chunk->taken && !chunk->missed) return true;
    return own_offer(l, &held->offer) && held->closed_round + KEEP_ROUNDS > chunk->round;
}

static void drop_unneeded(Ledger *l, LedgerChunk *chunk) {
    int kept = 0;
    for (int i = 0; i < chunk->helds; i++) {
        Held *held = &chunk->held[i];
        if (needed(l, chunk, held)) chunk->held[kept++] = *held;
        else payload_release(held->payload);
    }
    chunk->helds = kept;
}

Payload *ledger_find(const Ledger *l, int c, const Offer *offer) {
    const Held *held = find_held(&l->chunk[c], offer);
    return held ? held->payload : NULL;
}

bool ledger_wants(const Ledger *l, int c, const Offer *offer) {
    const Held *held = find_held(&l->chunk[c], offer);
    return held && !held->payload;
}

bool ledger_closed(const Ledger *l, int c, const Offer *offer) {
    const Held *held = find_held(&l->chunk[c], offer);
    return held && held->closed_round > l->chunk[c].taken;
}

// ---- life ----

void ledger_init(Ledger *l, const char *name, uint64_t incarnation, int chunks, LedgerSend send,
                 void *context) {
    assert(chunks > 0 && incarnation != 0 && name_valid(name));
    *l = (Ledger){.incarnation = incarnation, .chunks = chunks, .send = send, .context = context};
    message_name(l->name, name);
    l->chunk = (LedgerChunk *)xcalloc((size_t)chunks, sizeof *l->chunk, "rounds");
}

static void drop_pending(LedgerChunk *chunk) {
    if (chunk->pending) payload_release(chunk->pending->payload);
    free(chunk->pending);
    chunk->pending = NULL;
}

static void clear_log(LedgerChunk *chunk) {
    for (int i = 0; i < chunk->logged; i++) free(chunk->log[i].offer);
    chunk->logged = 0;
}

void ledger_free(Ledger *l) {
    for (int c = 0; c < l->chunks; c++) {
        LedgerChunk *chunk = &l->chunk[c];
        clear_log(chunk);
        for (int i = 0; i < chunk->helds; i++) payload_release(chunk->held[i].payload);
        free(chunk->held);
        free(chunk->latest);
        drop_pending(chunk);
    }
    free(l->chunk);
    *l = (Ledger){0};
}

bool ledger_has_state(const Ledger *l) {
    for (int c = 0; c < l->chunks; c++) {
        if (l->chunk[c].ready) return true;
    }
    return false;
}

// ---- messages to the rendezvous ----

static void send(Ledger *l, Message *message, int c) {
    message->chunk = c;
    message->incarnation = l->incarnation;
    l->send(l->context, message);
}

static void send_state(Ledger *l, int c) {
    Message m;
    message_clear(&m, MESSAGE_STATE);
    m.round = l->chunk[c].round;
    m.chain = l->chunk[c].chain;
    send(l, &m, c);
}

static void send_offer(Ledger *l, int c, MessageKind kind, const Offer *offer) {
    Message m;
    message_clear(&m, kind);
    m.offers = 1;
    m.offer[0] = *offer;
    double since = l->chunk[c].since;
    if (kind == MESSAGE_OFFER && since > 0 && l->now > since) m.rate = l->now - since;
    send(l, &m, c);
}

void ledger_report(Ledger *l) {
    Message m;
    for (int c = 0; c < l->chunks; c++) {
        const LedgerChunk *chunk = &l->chunk[c];
        if (!chunk->ready) continue;
        for (int i = 0; i < chunk->logged; i++) {
            const LedgerRound *round = &chunk->log[i];
            message_clear(&m, MESSAGE_CLOSE);
            m.round = round->round;
            m.chain = round->chain;
            m.offers = round->offers;
            memcpy(m.offer, round->offer, (size_t)round->offers * sizeof *round->offer);
            send(l, &m, c);
        }
        send_state(l, c);
        for (int i = 0; i < chunk->helds; i++) {
            const Held *held = &chunk->held[i];
            if (held->past || !held->payload) continue;
            bool own = own_offer(l, &held->offer);
            send_offer(l, c, own ? MESSAGE_OFFER : MESSAGE_HOLD, &held->offer);
        }
    }
    message_clear(&m, MESSAGE_REPORTED);
    send(l, &m, 0);
}

// ---- offers ----

// Withdraws own offers that were made before it was known that an offer had counted.
static void drop_void(Ledger *l, LedgerChunk *chunk, int64_t counted) {
    for (int i = 0; i < chunk->helds; i++) {
        Held *held = &chunk->held[i];
        if (own_offer(l, &held->offer) && held->offer.after < counted) held->past = true;
    }
    if (chunk->pending && chunk->pending->offer.after < counted) drop_pending(chunk);
    chunk->echoed = chunk->announced;
}

static void announce(Ledger *l, int c) {
    LedgerChunk *chunk = &l->chunk[c];
    Held *held = chunk->pending;
    chunk->pending = NULL;
    chunk->announced = held->offer.number;
    *add_held(l, chunk, &held->offer) = *held;
    send_offer(l, c, MESSAGE_OFFER, &held->offer);
    free(held);
}

void ledger_offer(Ledger *l, int c, int64_t tokens, Payload *payload, uint64_t hash) {
    LedgerChunk *chunk = &l->chunk[c];
    Held *held = chunk->pending;
    if (chunk->counted > chunk->counted_taken) {  // the trainer will find the open offer in a closed round
        drop_pending(chunk);
        return;
    }
    if (held) payload_release(held->payload);
    else held = (Held *)xmalloc(sizeof *held, "an offer");
    *held = (Held){.offer = {.incarnation = l->incarnation,
                             .number = ++chunk->number,
                             .after = chunk->counted_taken,
                             .tokens = tokens,
                             .bytes = payload->bytes,
                             .hash = hash},
                   .payload = payload_keep(payload)};
    message_name(held->offer.name, l->name);
    chunk->pending = held;
    if (chunk->since == 0) chunk->since = l->now;
    // One unconfirmed offer at a time bounds the memory of all groups.
    if (chunk->announced == chunk->echoed) announce(l, c);
}

void ledger_received(Ledger *l, int c, const Offer *offer, Payload *payload) {
    LedgerChunk *chunk = &l->chunk[c];
    Held *held = find_held(chunk, offer);
    if (!held || held->payload) return;
    if (!payload) {
        held->past = true;
        if (held->closed_round > chunk->taken) chunk->missed = true;
        drop_unneeded(l, chunk);
        return;
    }
    held->payload = payload_keep(payload);
    if (!held->past) send_offer(l, c, MESSAGE_HOLD, &held->offer);
}

void ledger_left(Ledger *l, const char *name, uint64_t incarnation) {
    for (int c = 0; c < l->chunks; c++) {
        LedgerChunk *chunk = &l->chunk[c];
        for (int i = 0; i < chunk->helds; i++) {
            Held *held = &chunk->held[i];
            bool same = held->offer.incarnation == incarnation && strcmp(held->offer.name, name) == 0;
            held->past = held->past || same;
        }
        drop_unneeded(l, chunk);
    }
}

// The rendezvous announces an offer. Earlier offers of the same group are in no later round.
static void receive_offer(Ledger *l, int c, const Offer *offer) {
    LedgerChunk *chunk = &l->chunk[c];
    bool own = strcmp(offer->name, l->name) == 0;
    if (own && offer->incarnation != l->incarnation) return;
    for (int i = 0; i < chunk->helds; i++) {
        Held *held = &chunk->held[i];
        if (strcmp(held->offer.name, offer->name) != 0) continue;
        bool older = held->offer.incarnation != offer->incarnation || held->offer.number < offer->number;
        held->past = held->past || older;
    }
    if (own) {
        if (offer->number > chunk->echoed) chunk->echoed = offer->number;
        if (chunk->pending && chunk->announced == chunk->echoed) announce(l, c);
    } else {
        const Held *held = find_held(chunk, offer);
        if (!held) add_held(l, chunk, offer);
        // A restarted rendezvous learns of the offer from its owner, possibly after this group's
        // report said that it holds it.
        else if (held->payload && !held->past) send_offer(l, c, MESSAGE_HOLD, &held->offer);
    }
    drop_unneeded(l, chunk);
}

// ---- rounds ----

static LedgerRound *add_round(LedgerChunk *chunk, const Message *m) {
    if (chunk->logged == LOG_ROUNDS) {
        free(chunk->log[0].offer);
        memmove(chunk->log, chunk->log + 1, (LOG_ROUNDS - 1) * sizeof *chunk->log);
        chunk->logged--;
    }
    LedgerRound *round = &chunk->log[chunk->logged++];
    *round = (LedgerRound){m->round, m->chain, m->offers, NULL};
    round->offer = (Offer *)xcalloc((size_t)m->offers + 1, sizeof *round->offer, "a closed round");
    memcpy(round->offer, m->offer, (size_t)m->offers * sizeof *round->offer);
    chunk->round = m->round;
    chunk->chain = m->chain;
    return round;
}

static void receive_close(Ledger *l, int c, const Message *m) {
    LedgerChunk *chunk = &l->chunk[c];
    if (!chunk->ready || m->round <= chunk->round) return;
    if (m->round != chunk->round + 1 || chain_next(chunk->chain, m->round, m->offer, m->offers) != m->chain) {
        send_state(l, c);  // the rendezvous sends the rounds in between, or a reset
        return;
    }
    const LedgerRound *round = add_round(chunk, m);
    bool counted = false;
    for (int i = 0; i < round->offers; i++) {
        const Offer *offer = &round->offer[i];
        Held *held = find_held(chunk, offer);
        if (!held) held = add_held(l, chunk, offer);
        held->past = true;
        held->closed_round = round->round;
        if (!own_offer(l, offer)) continue;
        counted = true;
        l->tokens_counted += offer->tokens;
        if (offer->number > chunk->counted) chunk->counted = offer->number;
        drop_void(l, chunk, chunk->counted);
    }
    if (counted) chunk->since = 0;
    else if (chunk->since > 0) chunk->since = l->now;
    if (!counted) l->rounds_late++;
    if (chunk->round - chunk->taken > MOST_UNTAKEN) chunk->missed = true;
    drop_unneeded(l, chunk);
}

static void receive_reset(Ledger *l, int c) {
    LedgerChunk *chunk = &l->chunk[c];
    chunk->ready = false;
    chunk->missed = true;
    chunk->since = 0;
    chunk->withdrawn = chunk->number;
    clear_log(chunk);
    drop_void(l, chunk, INT64_MAX);
    drop_unneeded(l, chunk);
}

static void receive_welcome(Ledger *l, const Message *m) {
    l->joined = true;
    if (!(m->flags & FLAG_FIRST) || ledger_has_state(l)) return;
    l->first = true;
    for (int c = 0; c < l->chunks; c++) ledger_fetched(l, c, 0, l->incarnation);
}

void ledger_receive(Ledger *l, const Message *m) {
    if (m->chunk >= l->chunks) return;
    switch (m->kind) {
        case MESSAGE_WELCOME: receive_welcome(l, m); break;
        case MESSAGE_OFFER: receive_offer(l, m->chunk, &m->offer[0]); break;
        case MESSAGE_CLOSE: receive_close(l, m->chunk, m); break;
        case MESSAGE_RESET: receive_reset(l, m->chunk); break;
        default: break;
    }
}

// ---- the trainer ----

static const LedgerRound *find_round(const LedgerChunk *chunk, int64_t number) {
    for (int i = 0; i < chunk->logged; i++) {
        if (chunk->log[i].round == number) return &chunk->log[i];
    }
    return NULL;
}

const LedgerRound *ledger_next(Ledger *l, int c, bool *missed) {
    LedgerChunk *chunk = &l->chunk[c];
    *missed = chunk->missed;
    if (chunk->missed || !chunk->ready) return NULL;
    const LedgerRound *round = find_round(chunk, chunk->taken + 1);
    for (int i = 0; round && i < round->offers; i++) {
        if (!ledger_find(l, c, &round->offer[i])) return NULL;
    }
    return round;
}

// Replaces the group's last offer that has counted, or the oldest one of all groups.
static void note_latest(LedgerChunk *chunk, const Offer *offer) {
    int at = 0;
    if (!chunk->latest) chunk->latest = (Offer *)xcalloc(MAX_GROUPS, sizeof(Offer), "counted offers");
    while (at < chunk->latests && strcmp(chunk->latest[at].name, offer->name) != 0) at++;
    if (at == MAX_GROUPS) at = 0;
    if (at < chunk->latests) {
        chunk->latests--;
        memmove(chunk->latest + at, chunk->latest + at + 1, (size_t)(chunk->latests - at) * sizeof(Offer));
    }
    chunk->latest[chunk->latests++] = *offer;
}

void ledger_take(Ledger *l, int c) {
    LedgerChunk *chunk = &l->chunk[c];
    chunk->taken++;
    const LedgerRound *round = find_round(chunk, chunk->taken);
    chunk->taken_chain = round->chain;
    for (int i = 0; i < round->offers; i++) {
        if (ledger_own(l, c, &round->offer[i])) chunk->counted_taken = round->offer[i].number;
        note_latest(chunk, &round->offer[i]);
    }
    drop_unneeded(l, chunk);
}

const Held *ledger_contains(Ledger *l, int c, const Offer *latest, int latests) {
    LedgerChunk *chunk = &l->chunk[c];
    const Held *own = NULL;
    chunk->latests = 0;
    for (int i = 0; i < latests; i++) {
        note_latest(chunk, &latest[i]);
        if (!ledger_own(l, c, &latest[i])) continue;
        own = find_held(chunk, &latest[i]);
        if (latest[i].number > chunk->counted) l->tokens_counted += latest[i].tokens;
        chunk->counted_taken = latest[i].number;
    }
    return own;
}

void ledger_fetched(Ledger *l, int c, int64_t round, uint64_t chain) {
    LedgerChunk *chunk = &l->chunk[c];
    clear_log(chunk);
    drop_void(l, chunk, INT64_MAX);
    chunk->withdrawn = chunk->number;
    chunk->counted = chunk->counted_taken;
    chunk->ready = true;
    chunk->missed = false;
    chunk->since = 0;
    chunk->round = chunk->taken = round;
    chunk->chain = chunk->taken_chain = chain;
    chunk->has_state = true;
    drop_unneeded(l, chunk);
    send_state(l, c);
}

void ledger_keep(Ledger *l, int c) {
    const LedgerChunk *chunk = &l->chunk[c];
    if (chunk->has_state) ledger_fetched(l, c, chunk->taken, chunk->taken_chain);
    else ledger_fetched(l, c, 0, l->incarnation);
}

uint64_t ledger_chain(const Ledger *l, int c, int64_t round) {
    const LedgerChunk *chunk = &l->chunk[c];
    if (round == chunk->round) return chunk->chain;
    if (round == chunk->taken) return chunk->taken_chain;
    const LedgerRound *found = find_round(chunk, round);
    return found ? found->chain : 0;
}

bool ledger_own(const Ledger *l, int c, const Offer *offer) {
    const LedgerChunk *chunk = &l->chunk[c];
    return own_offer(l, offer) && offer->number > chunk->counted_taken && offer->number <= chunk->number;
}

bool ledger_open(const Ledger *l) {
    for (int c = 0; c < l->chunks; c++) {
        if (l->chunk[c].pending) return true;
        for (int i = 0; i < l->chunk[c].helds; i++) {
            const Held *held = &l->chunk[c].held[i];
            if (own_offer(l, &held->offer) && !held->past) return true;
        }
    }
    return false;
}
