// Offers and closed rounds of elastic replica groups: see elastic.h.
#include "llmc/run/elastic.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(OfferHeader) <= CHUNK_HEADER_BYTES && sizeof(StateHeader) <= CHUNK_HEADER_BYTES,
               "headers fit");

static Peers world_of(Run *run) { return run_peers(run, run->launch.world); }

// --- offers --------------------------------------------------------------------------------------

void elastic_offer(Run *run, int chunk) {
    Elastic *e = run->elastic;
    ChunkSync *s = &e->sync[chunk];
    bool first = run->launch.rank == 0;
    if (s->fetching) return;
    s->key = (uint32_t)run->iteration;
    OfferHeader header = {.key = s->key, .last = e->last, .scheduled = run->scheduled};
    uint8_t *message = first ? s->sent + CHUNK_HEADER_BYTES : NULL;
    chunks_encode(e->chunks, chunk, s->key, e->source, message, world_of(run));
    s->offered = s->tokens;
    s->offered_at = run->iteration;
    s->offered_time = monotonic_seconds();
    s->open = s->queued = true;
    s->again = false;
    if (first) memcpy(s->sent, &header, sizeof header);
}

void elastic_send_offers(Run *run) {
    Elastic *e = run->elastic;
    bool waited = false;
    for (int i = 0; run->launch.rank == 0 && i < chunks_count(e->chunks); i++) {
        ChunkSync *s = &e->sync[i];
        if (!s->queued) continue;
        if (!waited) chunks_encoded(e->chunks);
        waited = true;
        s->queued = false;
        member_offer(e->member, i, s->offered, s->sent);
    }
}

void elastic_report_hashes(Run *run) {
    Elastic *e = run->elastic;
    bool any = false;
    for (int i = 0; i < chunks_count(e->chunks); i++) any = any || e->sync[i].hashed < e->sync[i].round;
    if (!any) return;
    const uint64_t *hashes = chunks_hashes(e->chunks, world_of(run));
    for (int i = 0; i < chunks_count(e->chunks); i++) {
        ChunkSync *s = &e->sync[i];
        if (e->member && s->hashed < s->round) member_hash(e->member, i, s->round, hashes[i]);
        s->hashed = s->round;
    }
}

// --- events --------------------------------------------------------------------------------------

// What rank 0 has found. All ranks handle it.
typedef enum EventKind { NOTHING_LEFT, ROUND_CLOSED, ROUNDS_MISSED, STATE_WANTED } EventKind;
typedef struct GroupEvent {
    EventKind kind;
    int chunk;
    int contributions;
    bool over;  // the time limit of elastic_events has passed
    int64_t round;
} GroupEvent;

// Rank 0: finds the next event. *chunk: the chunk at which to start, advanced.
static GroupEvent next_event(Run *run, int *chunk, ClosedRound *closed) {
    Elastic *e = run->elastic;
    for (; *chunk < chunks_count(e->chunks); (*chunk)++) {
        const ChunkSync *s = &e->sync[*chunk];
        // --local-steps-delay: a round does not change the master weights earlier.
        bool early = s->open && !e->last && !e->leaving &&
                     run->iteration < s->offered_at + run->config.local_steps_delay;
        if (early || !member_take(e->member, *chunk, false, closed)) continue;
        return (GroupEvent){.kind = closed->missed ? ROUNDS_MISSED : ROUND_CLOSED,
                            .chunk = *chunk,
                            .contributions = closed->contributions,
                            .round = closed->round};
    }
    int wanted = member_wanted(e->member);
    if (wanted < 0) return (GroupEvent){.kind = NOTHING_LEFT};
    return (GroupEvent){.kind = STATE_WANTED, .chunk = wanted};
}

// The contributions of a round, on all ranks.
typedef struct Contributions {
    int count, own;    // own: index of this group's, -1: none
    int64_t *tokens;   // (count)
    uint8_t *payload;  // (count) payload_bytes
} Contributions;

static Contributions broadcast_contributions(Run *run, const GroupEvent *event, const ClosedRound *closed) {
    Elastic *e = run->elastic;
    Contributions c = {.count = event->contributions, .own = -1};
    size_t bytes = (size_t)e->payload_bytes[event->chunk], count = (size_t)c.count;
    c.tokens = xcalloc(count, sizeof(int64_t), "contributions of replica groups");
    c.payload = xmalloc(count * bytes, "contributions of replica groups");
    for (int i = 0; run->launch.rank == 0 && i < c.count; i++) {
        c.tokens[i] = closed->contribution[i].tokens;
        memcpy(c.payload + (size_t)i * bytes, closed->contribution[i].payload, bytes);
        // Not the contribution of an earlier process of this name, or one that was credited.
        if (closed->own && strcmp(closed->contribution[i].name, run->config.replica_group) == 0) c.own = i;
    }
    peers_broadcast(world_of(run), &c.own, sizeof c.own, 0);
    peers_broadcast(world_of(run), c.tokens, count * sizeof(int64_t), 0);
    peers_broadcast(world_of(run), c.payload, count * bytes, 0);
    return c;
}

// Returns the contributions with their weights, for chunks_merge. *last: all of them are the last
// of their groups.
static ChunkPart *parts_of(Run *run, int chunk, const Contributions *c, bool *last) {
    Elastic *e = run->elastic;
    ChunkPart *parts = xcalloc((size_t)c->count, sizeof(ChunkPart), "contributions of replica groups");
    int64_t sum = 0;
    *last = true;
    for (int i = 0; i < c->count; i++) sum += c->tokens[i] > 0 ? c->tokens[i] : 0;
    for (int i = 0; i < c->count; i++) {
        OfferHeader header;
        const uint8_t *payload = c->payload + i * e->payload_bytes[chunk];
        memcpy(&header, payload, sizeof header);
        double tokens = c->tokens[i] > 0 ? (double)c->tokens[i] : 0.0;
        double weight = sum > 0 ? tokens / (double)sum : 1.0 / c->count;
        parts[i] = (ChunkPart){header.key, (float)weight, i == c->own, payload + CHUNK_HEADER_BYTES};
        *last = *last && header.last;
        e->ending = e->ending || header.last;
        // The learning-rate schedule follows the fastest group.
        if (header.scheduled > run->scheduled && header.scheduled <= run->config.total_samples)
            run->scheduled = header.scheduled;
    }
    return parts;
}

// Returns the parameters of a round's outer step, which are equal in all groups. last: at the end
// of the run, the outer weights become the mean of the groups' master weights.
//
// While a round is delayed by a late group, pseudo-gradients grow beyond H steps. Momentum would
// carry the weights far past what the groups have trained, so they enter it as if they had H steps.
static OuterRates rates_of_round(const Config *config, const Contributions *c, bool last) {
    OuterRates rates = {(float)config->outer_lr, (float)config->outer_momentum, 1.0f};
    double expected = (double)config->local_steps * config->global_batch_size * config->seq_length;
    double sum = 0, squares = 0;
    for (int i = 0; i < c->count; i++) {
        sum += (double)c->tokens[i];
        squares += (double)c->tokens[i] * (double)c->tokens[i];
    }
    double mean = sum > 0 ? squares / sum : 0;  // weighted like the pseudo-gradients
    if (mean > expected) rates.damping = (float)(expected / mean);
    return last ? (OuterRates){1.0f, 0.0f, 1.0f} : rates;
}

// Called when an offer of this group has counted.
static void count_offer(Run *run, int chunk, int64_t tokens) {
    Elastic *e = run->elastic;
    ChunkSync *s = &e->sync[chunk];
    double all = 0;  // not chunks_before of the last one, which includes alignment
    for (int i = 0; i < chunks_count(e->chunks); i++) all += (double)chunks_elements(e->chunks, i);
    s->tokens -= tokens;
    e->counted += (double)tokens * (double)chunks_elements(e->chunks, chunk) / all;
    e->figures.own_rounds++;
    e->figures.sync_seconds += monotonic_seconds() - s->offered_time;
    e->figures.stale_steps += (double)(run->iteration - s->offered_at);
}

static void merge_round(Run *run, const GroupEvent *event, const ClosedRound *closed) {
    Elastic *e = run->elastic;
    const Config *config = &run->config;
    ChunkSync *s = &e->sync[event->chunk];
    bool last;
    Contributions c = broadcast_contributions(run, event, closed);
    ChunkPart *parts = parts_of(run, event->chunk, &c, &last);
    if (s->hashed < s->round) elastic_report_hashes(run);
    chunks_merge(e->chunks, event->chunk, parts, c.count, rates_of_round(config, &c, last));
    s->round = event->round;
    e->figures.rounds++;
    if (c.own >= 0) {
        // If an earlier offer has counted, the latest, which contains its progress, is withdrawn.
        s->again = c.tokens[c.own] < s->offered;
        s->open = false;
        count_offer(run, event->chunk, c.tokens[c.own]);
    }
    if (e->last) {
        s->last = last && c.own >= 0;
        s->again = !s->last && c.own >= 0;
    }
    free(parts);
    free(c.payload);
    free(c.tokens);
}

// --- state ---------------------------------------------------------------------------------------

static void serve_state(Run *run, int chunk) {
    Elastic *e = run->elastic;
    bool first = run->launch.rank == 0;
    StateHeader header = {run->iteration, run->scheduled, run->consumed_train};
    memcpy(e->state, &header, sizeof header);
    float *state = (float *)(void *)(e->state + CHUNK_HEADER_BYTES);
    chunks_get_state(e->chunks, chunk, first ? state : NULL, world_of(run));
    if (first) member_serve(e->member, chunk, e->sync[chunk].round, e->state);
}

int64_t elastic_fetch(Run *run, int chunk, double patience, Contribution *own) {
    Elastic *e = run->elastic;
    struct {
        int64_t round, tokens;
        int wanted;
        bool over;
    } found = {0, 0, -1, false};
    *own = (Contribution){NULL, 0, NULL};
    double until = monotonic_seconds() + patience;
    for (;;) {
        if (run->launch.rank == 0) {
            double left = until - monotonic_seconds();
            found.over = left <= 0;
            found.round = member_fetch(e->member, chunk, left < 1.0 ? left : 1.0, e->state, own);
            found.tokens = own->payload ? own->tokens : -1;
            found.wanted = found.round == MEMBER_BUSY ? member_wanted(e->member) : -1;
        }
        peers_broadcast(world_of(run), &found, sizeof found, 0);
        if (found.round != MEMBER_BUSY) break;
        if (found.wanted >= 0) serve_state(run, found.wanted);
        if (found.over) return MEMBER_BUSY;
        run_poll_stop(run);
        if (run->stop.reason) return -1;
    }
    if (found.round >= 0) peers_broadcast(world_of(run), e->state, (size_t)e->state_bytes[chunk], 0);
    own->tokens = found.tokens;
    return found.round;
}

// Sets a chunk to a fetched state. own: this group's contribution that it contains.
static void set_state(Run *run, int chunk, int64_t round, const Contribution *own) {
    Elastic *e = run->elastic;
    ChunkSync *s = &e->sync[chunk];
    bool counts = own->tokens >= 0;
    size_t bytes = (size_t)e->payload_bytes[chunk];
    const float *state = (const float *)(const void *)(e->state + CHUNK_HEADER_BYTES);
    uint8_t *payload = counts ? xmalloc(bytes, "a contribution") : NULL;
    ChunkPart counted = {.weight = 1.0f, .own = true};
    if (counts) {
        OfferHeader header;
        if (own->payload) memcpy(payload, own->payload, bytes);
        peers_broadcast(world_of(run), payload, bytes, 0);
        memcpy(&header, payload, sizeof header);
        counted.key = header.key;
        counted.message = payload + CHUNK_HEADER_BYTES;
    }
    chunks_set_state(e->chunks, chunk, state, false, counts ? &counted : NULL);
    s->round = s->hashed = round;
    if (counts) {
        count_offer(run, chunk, own->tokens);
        s->open = false;
    }
    free(payload);
}

// Takes over the state of a chunk after missed rounds. The group keeps its own progress that the
// state does not contain. If the state does not arrive within a grace period, training continues,
// and the next step tries again. Returns false if the run stops.
static bool catch_up(Run *run, int chunk) {
    Elastic *e = run->elastic;
    ChunkSync *s = &e->sync[chunk];
    Contribution own;
    if (e->fetching_since == 0) e->fetching_since = monotonic_seconds();
    double until = e->fetching_since + run->config.sync_grace_seconds;
    int64_t round = elastic_fetch(run, chunk, until - monotonic_seconds(), &own);
    if (round == MEMBER_BUSY && !s->fetching)
        log_line(run->log, "missed rounds of chunk %d; training continues until its state arrives", chunk);
    s->fetching = round == MEMBER_BUSY;
    s->again = true;
    if (s->fetching) return true;
    if (round == MEMBER_KEEP) return true;  // the own state is the newest one left
    if (round < 0) return false;
    set_state(run, chunk, round, &own);
    return true;
}

// Returns true if the state of a chunk has not arrived yet.
static bool any_fetching(const Elastic *e) {
    for (int i = 0; i < chunks_count(e->chunks); i++)
        if (e->sync[i].fetching) return true;
    return false;
}

bool elastic_events(Run *run, double until) {
    Elastic *e = run->elastic;
    int chunk = 0;
    for (;;) {
        GroupEvent event = {0};
        ClosedRound closed = {0};
        if (run->launch.rank == 0) {
            event = next_event(run, &chunk, &closed);
            event.over = until > 0 && monotonic_seconds() > until;
        }
        peers_broadcast(world_of(run), &event, sizeof event, 0);
        switch (event.kind) {
            case ROUND_CLOSED: merge_round(run, &event, &closed); break;
            case ROUNDS_MISSED:
                if (!catch_up(run, event.chunk)) return event.over;
                chunk = event.chunk + e->sync[event.chunk].fetching;
                break;
            case STATE_WANTED: serve_state(run, event.chunk); break;
            case NOTHING_LEFT:
                if (!any_fetching(e)) e->fetching_since = 0;
                return event.over;
        }
    }
}
