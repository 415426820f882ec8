// Pieces on their way through the rendezvous: see relay.h.
#include "llmc/groups/relay.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

// A request that has not been answered for so long is sent again for another group.
static const double patience_seconds = 5;

// Never 0. The owner's name and the fields that a group chooses are hashed one after the other, so
// that no group can choose fields that give the key of another owner's piece.
static uint64_t piece_key(const Message *m, const char *owner) {
    const Offer *offer = &m->offer[0];
    uint64_t parts[6] = {offer->incarnation, (uint64_t)offer->number, offer->hash,
                         (uint64_t)m->chunk, (uint64_t)m->bytes,      m->flags & FLAG_STATE};
    uint64_t name = XXH3_64bits(owner, strlen(owner));
    return XXH3_64bits_withSeed(parts, sizeof parts, name) | 1;
}

static RelayRequest *find_request(Relay *relay, uint64_t key) {
    for (int i = 0; i < RELAY_REQUESTS; i++) {
        if (relay->request[i].key == key) return &relay->request[i];
    }
    return NULL;
}

RelayAction relay_request(Relay *relay, const Message *get, int group, double now, const RelayPiece **piece) {
    uint64_t key = piece_key(get, get->to), bit = UINT64_C(1) << group;
    for (int i = 0; i < RELAY_PIECES; i++) {
        if (relay->piece[i].key != key) continue;
        *piece = &relay->piece[i];
        return RELAY_ANSWER;
    }
    RelayRequest *request = find_request(relay, key);
    // A group that asks again has lost its request or the answer.
    bool fresh = request && !(request->waiting & bit) && now < request->forwarded + patience_seconds;
    if (!request) {
        request = &relay->request[relay->next_request++ % RELAY_REQUESTS];
        relay->next_request %= RELAY_REQUESTS;
        *request = (RelayRequest){.key = key};
    }
    request->waiting |= bit;
    if (fresh) return RELAY_WAIT;
    request->forwarded = now;
    return RELAY_FORWARD;
}

uint64_t relay_answer(Relay *relay, const Message *data, const char *owner) {
    uint64_t key = piece_key(data, owner);
    RelayRequest *request = find_request(relay, key);
    if (!request) return 0;
    uint64_t waiting = request->waiting;
    *request = (RelayRequest){.key = 0};
    if (data->kind != MESSAGE_DATA) return waiting;
    RelayPiece *piece = &relay->piece[relay->next_piece];
    relay->next_piece = (relay->next_piece + 1) % RELAY_PIECES;
    free(piece->data);
    *piece = (RelayPiece){key, (uint8_t *)xmalloc(data->data_bytes + 1, "a piece"), data->data_bytes};
    if (data->data_bytes) memcpy(piece->data, data->data, data->data_bytes);
    return waiting;
}

void relay_free(Relay *relay) {
    for (int i = 0; i < RELAY_PIECES; i++) free(relay->piece[i].data);
}
