// Transfers in pieces: see pulls.h.
#include "llmc/groups/pulls.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { PIECE_MISSING, PIECE_ASKED, PIECE_RECEIVED };
// Pieces are asked for again after so long without one. Connections are reliable, so this is only
// needed when a peer or the rendezvous dropped requests.
static const double again_seconds = 10;
// The same while pieces of other payloads arrive: the owner answers in order and is only slow.
static const double busy_again_seconds = 60;
// An urgent payload is given up after so long without a piece from its owner: the state is fetched
// instead, from another group.
static const double stuck_seconds = 3;

static bool same_offer(const Offer *a, const Offer *b) {
    return a->number == b->number && a->incarnation == b->incarnation && strcmp(a->name, b->name) == 0;
}

static void free_pull(Pull *pull) {
    payload_release(pull->payload);
    free(pull->piece);
    free(pull);
}

static void remove_pull(Pulls *pulls, int i) {
    free_pull(pulls->pull[i]);
    memmove(pulls->pull + i, pulls->pull + i + 1, (size_t)(pulls->count - i - 1) * sizeof *pulls->pull);
    pulls->count--;
}

static void ask_again(Pull *pull) {
    for (int64_t i = 0; i < pull->pieces; i++) {
        if (pull->piece[i] == PIECE_ASKED) pull->piece[i] = PIECE_MISSING;
    }
    pull->outstanding = 0;
}

void pulls_begin(Pulls *pulls, int chunk, bool state, const Offer *offer, double now) {
    for (int i = 0; i < pulls->count; i++) {
        Pull *pull = pulls->pull[i];
        if (pull->chunk != chunk || pull->state != state) continue;
        if (same_offer(&pull->offer, offer)) return;
        if (!state) continue;
        if (pull->offer.number == offer->number && pull->offer.hash == offer->hash) {
            pull->offer = *offer;
            ask_again(pull);
            return;
        }
        remove_pull(pulls, i);
        break;
    }
    pulls->pull = (Pull **)grow_array(pulls->pull, pulls->count, sizeof *pulls->pull, "transfers");
    Pull *pull = (Pull *)xcalloc(1, sizeof *pull, "a transfer");
    *pull = (Pull){.chunk = chunk, .state = state, .offer = *offer, .progress = now, .moved = now};
    pull->payload = payload_create(offer->bytes);
    pull->pieces = ceil_div64(offer->bytes, PIECE_BYTES);
    pull->piece = (uint8_t *)xcalloc((size_t)pull->pieces + 1, 1, "a transfer");
    pulls->pull[pulls->count++] = pull;
    if (state && pulls->state_since <= 0) pulls->state_since = now;
}

static int64_t outstanding(const Pulls *pulls, const char *name) {
    int64_t sum = 0;
    for (int i = 0; i < pulls->count; i++) {
        if (strcmp(pulls->pull[i]->offer.name, name) == 0) sum += pulls->pull[i]->outstanding;
    }
    return sum;
}

static void finish(Pulls *pulls, int i, bool complete) {
    Pull *pull = pulls->pull[i];
    memmove(pulls->pull + i, pulls->pull + i + 1, (size_t)(pulls->count - i - 1) * sizeof *pulls->pull);
    pulls->count--;
    pulls->done(pulls->context, pull, complete);
    free_pull(pull);
}

// Returns the time of the last piece from the owner of a transfer.
static double owner_moved(const Pulls *pulls, const Pull *pull) {
    double moved = pull->moved;
    for (int i = 0; i < pulls->count; i++) {
        const Pull *other = pulls->pull[i];
        if (strcmp(other->offer.name, pull->offer.name) == 0 && other->moved > moved) moved = other->moved;
    }
    return moved;
}

void pulls_step(Pulls *pulls, double now) {
    for (int i = 0; i < pulls->count; i++) {
        Pull *pull = pulls->pull[i];
        if (!pull->state && pulls->urgent(pulls->context, pull) &&
            now > owner_moved(pulls, pull) + stuck_seconds) {
            finish(pulls, i--, false);
            continue;
        }
        double quiet = now - pull->progress;
        bool busy = now <= owner_moved(pulls, pull) + again_seconds;
        if (pull->outstanding && quiet > (busy ? busy_again_seconds : again_seconds)) ask_again(pull);
        if (pull->received + pull->outstanding == pull->pieces) continue;
        int64_t most = PULL_WINDOW - outstanding(pulls, pull->offer.name);
        for (int64_t k = 0; k < pull->pieces && most > 0; k++) {
            if (pull->piece[k] != PIECE_MISSING) continue;
            if (!pulls->get(pulls->context, pull, k * PIECE_BYTES)) break;
            pull->piece[k] = PIECE_ASKED;
            pull->outstanding++;
            pull->progress = now;
            most--;
        }
    }
}

void pulls_receive(Pulls *pulls, const Message *m, double now) {
    for (int i = 0; i < pulls->count; i++) {
        Pull *pull = pulls->pull[i];
        bool state = (m->flags & FLAG_STATE) != 0;
        if (pull->chunk != m->chunk || pull->state != state || !same_offer(&pull->offer, &m->offer[0]))
            continue;
        if (strcmp(m->from, pull->offer.name) != 0) return;
        if (m->kind == MESSAGE_GONE) {
            finish(pulls, i, false);
            return;
        }
        int64_t k = m->bytes / PIECE_BYTES, left = pull->offer.bytes - m->bytes;
        int64_t length = left < PIECE_BYTES ? left : PIECE_BYTES;
        if (m->bytes % PIECE_BYTES || k >= pull->pieces || m->data_bytes != length) return;
        if (pull->piece[k] == PIECE_RECEIVED) return;
        if (pull->piece[k] == PIECE_ASKED) pull->outstanding--;
        memcpy(pull->payload->data + m->bytes, m->data, m->data_bytes);
        pull->piece[k] = PIECE_RECEIVED;
        pull->progress = pull->moved = now;
        pulls->bytes += m->data_bytes;
        if (state) pulls->state_bytes += m->data_bytes;
        if (++pull->received < pull->pieces) return;
        finish(pulls, i, XXH3_64bits(pull->payload->data, (size_t)pull->offer.bytes) == pull->offer.hash);
        return;
    }
}

void pulls_again(Pulls *pulls, const char *name) {
    for (int i = 0; i < pulls->count; i++) {
        if (!name || strcmp(pulls->pull[i]->offer.name, name) == 0) ask_again(pulls->pull[i]);
    }
}

void pulls_end_state(Pulls *pulls, int chunk) {
    for (int i = pulls->count - 1; i >= 0; i--) {
        if (pulls->pull[i]->state && pulls->pull[i]->chunk == chunk) remove_pull(pulls, i);
    }
}

void pulls_end_group(Pulls *pulls, const char *name) {
    for (int i = pulls->count - 1; i >= 0; i--) {
        if (strcmp(pulls->pull[i]->offer.name, name) == 0) finish(pulls, i, false);
    }
}

void pulls_keep(Pulls *pulls, bool (*needed)(void *context, const Pull *pull)) {
    for (int i = pulls->count - 1; i >= 0; i--) {
        if (!pulls->pull[i]->state && !needed(pulls->context, pulls->pull[i])) remove_pull(pulls, i);
    }
}

static const Pull *find_state(const Pulls *pulls, int chunk) {
    for (int i = 0; i < pulls->count; i++) {
        if (pulls->pull[i]->chunk == chunk && pulls->pull[i]->state) return pulls->pull[i];
    }
    return NULL;
}

double pulls_moved(const Pulls *pulls, int chunk) {
    const Pull *pull = find_state(pulls, chunk);
    return pull ? owner_moved(pulls, pull) : 0;
}

int64_t pulls_received(const Pulls *pulls, int chunk) {
    const Pull *pull = find_state(pulls, chunk);
    if (!pull) return 0;
    return pull->received < pull->pieces ? pull->received * PIECE_BYTES : pull->offer.bytes;
}

double pulls_rate(const Pulls *pulls, double now) {
    double seconds = now - pulls->state_since;
    return pulls->state_since > 0 && seconds > 0 ? (double)pulls->state_bytes / seconds : 0;
}

void pulls_free(Pulls *pulls) {
    for (int i = 0; i < pulls->count; i++) free_pull(pulls->pull[i]);
    free(pulls->pull);
    *pulls = (Pulls){0};
}
