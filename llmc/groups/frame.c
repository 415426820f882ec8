// Encoding and decoding of frames: see frame.h.
#include "llmc/groups/frame.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

enum { MAGIC = 0x47504453, LENGTH_AT = 36, HASH_AT = 40, FROM_AT = 48 };  // "SDPG"; byte offsets

void message_clear(Message *message, MessageKind kind) {
    memset(message, 0, offsetof(Message, offer));
    message->kind = kind;
}

size_t message_bytes(const Message *message) {
    return offsetof(Message, offer) + (size_t)message->offers * sizeof(Offer);
}

void message_text(Message *message, const char *text) {
    snprintf(message->text, sizeof message->text, "%s", text);
}

void message_name(char name[NAME_BYTES], const char *text) {
    assert(strlen(text) < NAME_BYTES);
    memset(name, 0, NAME_BYTES);
    memcpy(name, text, strlen(text));
}

uint64_t chain_next(uint64_t chain, int64_t round, const Offer *offer, int offers) {
    uint64_t hash = XXH3_64bits_withSeed(&round, sizeof round, chain);
    for (int i = 0; i < offers; i++) {
        uint64_t ids[3] = {offer[i].incarnation, (uint64_t)offer[i].number, offer[i].hash};
        hash = XXH3_64bits_withSeed(offer[i].name, NAME_BYTES, hash);
        hash = XXH3_64bits_withSeed(ids, sizeof ids, hash);
    }
    return hash;
}

static bool name_character(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.';
}

bool name_valid(const char *name) {
    size_t length = 0;
    for (; name[length]; length++) {
        if (length + 1 == NAME_BYTES || !name_character(name[length])) return false;
    }
    return length > 0 && *name != '.' && *name != '-';
}

// ---- writing ----

typedef struct Writer {
    uint8_t *at;
} Writer;

static void put(Writer *w, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) *w->at++ = (uint8_t)(value >> (8 * i));
}

static void put_real(Writer *w, double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    put(w, bits, 8);
}

static void put_bytes(Writer *w, const void *data, size_t bytes) {
    if (bytes) memcpy(w->at, data, bytes);
    w->at += bytes;
}

static void put_text(Writer *w, const char *text) {
    size_t length = strlen(text);
    put(w, length, 2);
    put_bytes(w, text, length);
}

static void put_offer(Writer *w, const Offer *offer) {
    put_bytes(w, offer->name, NAME_BYTES);
    put(w, offer->incarnation, 8);
    put(w, (uint64_t)offer->number, 8);
    put(w, (uint64_t)offer->after, 8);
    put(w, (uint64_t)offer->tokens, 8);
    put(w, (uint64_t)offer->bytes, 8);
    put(w, offer->hash, 8);
}

static void put_body(Writer *w, const Message *m) {
    put(w, (uint64_t)m->round, 8);
    put(w, m->incarnation, 8);
    put(w, m->chain, 8);
    put(w, m->hash, 8);
    put(w, (uint64_t)m->bytes, 8);
    put(w, (uint64_t)m->tokens, 8);
    put(w, (uint64_t)m->iteration, 8);
    put_real(w, m->rate);
    put(w, m->flags, 4);
    put(w, m->groups, 4);
    put_text(w, m->text);
    put_text(w, m->address);
    put(w, (uint64_t)m->offers, 2);
    for (int i = 0; i < m->offers; i++) put_offer(w, &m->offer[i]);
    put(w, m->data_bytes, 4);
    put_bytes(w, m->data, m->data_bytes);
}

// Hashes the frame without its hash.
static uint64_t frame_hash(const uint8_t *frame, size_t bytes) {
    uint64_t header = XXH3_64bits(frame, HASH_AT);
    return XXH3_64bits_withSeed(frame + FROM_AT, bytes - FROM_AT, header);
}

void frame_seal(uint8_t *frame, size_t bytes) {
    assert(bytes >= FRAME_HEADER_BYTES && bytes <= FRAME_BYTES);
    Writer w = {frame + LENGTH_AT};
    put(&w, bytes - FRAME_HEADER_BYTES, 4);
    put(&w, frame_hash(frame, bytes), 8);
}

size_t frame_write(const Message *message, uint8_t *frame) {
    assert(message->data_bytes <= PIECE_BYTES && message->offers <= MAX_GROUPS);
    Writer w = {frame + FRAME_HEADER_BYTES};
    put_body(&w, message);
    size_t body = (size_t)(w.at - frame) - FRAME_HEADER_BYTES;
    assert(body <= FRAME_BODY_BYTES);
    w.at = frame;
    put(&w, MAGIC, 4);
    put(&w, FRAME_VERSION, 2);
    put(&w, (uint64_t)message->kind, 2);
    put(&w, message->run, 8);
    put(&w, message->session, 8);
    put(&w, message->sequence, 8);
    put(&w, (uint64_t)(uint32_t)message->chunk, 4);
    put(&w, 0, 4);  // frame_seal fills in length and hash
    put(&w, 0, 8);
    put_bytes(&w, message->from, NAME_BYTES);
    put(&w, 0, 3);
    put_bytes(&w, message->to, NAME_BYTES);
    put(&w, 0, 3);
    assert(w.at == frame + FRAME_HEADER_BYTES);
    frame_seal(frame, FRAME_HEADER_BYTES + body);
    return FRAME_HEADER_BYTES + body;
}

// ---- reading ----

typedef struct Reader {
    const uint8_t *at, *end;
    const char *why;  // not NULL: what is wrong; further reads return zeros
} Reader;

static const uint8_t *take(Reader *r, size_t bytes) {
    if (!r->why && (size_t)(r->end - r->at) < bytes) r->why = "too short";
    if (r->why) return NULL;
    r->at += bytes;
    return r->at - bytes;
}

static uint64_t get(Reader *r, int bytes) {
    const uint8_t *from = take(r, (size_t)bytes);
    uint64_t value = 0;
    for (int i = 0; from && i < bytes; i++) value |= (uint64_t)from[i] << (8 * i);
    return value;
}

// Reads an integer that must not be negative.
static int64_t get_count(Reader *r) {
    uint64_t value = get(r, 8);
    if (!r->why && value > INT64_MAX) r->why = "a negative count";
    return r->why ? 0 : (int64_t)value;
}

static double get_real(Reader *r) {
    uint64_t bits = get(r, 8);
    double value;
    memcpy(&value, &bits, 8);
    if (!r->why && !(isfinite(value) && value >= 0)) r->why = "an invalid number";
    return r->why ? 0 : value;
}

// A name that is padded with zeros. Empty names are allowed if `empty`.
static void get_name(Reader *r, char name[NAME_BYTES], bool empty) {
    const uint8_t *from = take(r, NAME_BYTES);
    memset(name, 0, NAME_BYTES);
    if (!from) return;
    memcpy(name, from, NAME_BYTES - 1);
    for (size_t i = strlen(name); i < NAME_BYTES; i++) {
        if (from[i]) r->why = "an invalid name";
    }
    if (!name_valid(name) && !(empty && !*name)) r->why = "an invalid name";
    if (r->why) memset(name, 0, NAME_BYTES);
}

// Control characters become '?', so that a text is always one line of a log.
static void get_text(Reader *r, char *text, size_t most, bool lines) {
    size_t length = get(r, 2);
    if (!r->why && length >= most) r->why = "a text that is too long";
    const uint8_t *from = take(r, length);
    for (size_t i = 0; from && i < length; i++) {
        bool control = from[i] < 32 || from[i] == 127;
        text[i] = control && !(lines && from[i] == '\n') ? '?' : (char)from[i];
    }
    text[from ? length : 0] = '\0';
}

static void get_offer(Reader *r, Offer *offer) {
    get_name(r, offer->name, false);
    offer->incarnation = get(r, 8);
    offer->number = get_count(r);
    offer->after = get_count(r);
    offer->tokens = get_count(r);
    offer->bytes = get_count(r);
    offer->hash = get(r, 8);
}

static void get_body(Reader *r, Message *m) {
    m->round = get_count(r);
    m->incarnation = get(r, 8);
    m->chain = get(r, 8);
    m->hash = get(r, 8);
    m->bytes = get_count(r);
    m->tokens = get_count(r);
    m->iteration = get_count(r);
    m->rate = get_real(r);
    m->flags = (uint32_t)get(r, 4);
    m->groups = (uint32_t)get(r, 4);
    get_text(r, m->text, sizeof m->text, m->kind == MESSAGE_TABLE);
    get_text(r, m->address, sizeof m->address, false);
    m->offers = (int)get(r, 2);
    if (m->offers > MAX_GROUPS) r->why = "too many offers";
    if (r->why) m->offers = 0;
    for (int i = 0; i < m->offers; i++) get_offer(r, &m->offer[i]);
    m->data_bytes = (uint32_t)get(r, 4);
    if (m->data_bytes > PIECE_BYTES) r->why = "a piece that is too large";
    m->data = take(r, m->data_bytes);
    if (!r->why && r->at != r->end) r->why = "bytes after its end";
}

// Kinds whose handlers use offer[0].
static bool needs_offer(MessageKind kind) {
    return kind == MESSAGE_OFFER || kind == MESSAGE_HOLD || kind == MESSAGE_GET || kind == MESSAGE_DATA ||
           kind == MESSAGE_GONE;
}

bool frame_read(const uint8_t *frame, size_t bytes, Message *message, const char **why) {
    Reader r = {frame, frame + bytes, NULL};
    message_clear(message, MESSAGE_KINDS);
    if (bytes > FRAME_BYTES) r.why = "too long";
    if (get(&r, 4) != MAGIC && !r.why) r.why = "not a frame of this program";
    if (get(&r, 2) != FRAME_VERSION && !r.why) r.why = "another version of the protocol";
    uint64_t kind = get(&r, 2);
    if (!r.why && (kind < 1 || kind >= MESSAGE_KINDS)) r.why = "an unknown kind";
    message->kind = (MessageKind)(r.why ? MESSAGE_KINDS : kind);
    message->run = get(&r, 8);
    message->session = get(&r, 8);
    message->sequence = get(&r, 8);
    uint64_t chunk = get(&r, 4), body = get(&r, 4), hash = get(&r, 8);
    if (!r.why && bytes < FRAME_HEADER_BYTES) r.why = "too short";
    if (!r.why && body != bytes - FRAME_HEADER_BYTES) r.why = "not of the length that it names";
    if (!r.why && hash != frame_hash(frame, bytes)) r.why = "corrupted (its hash differs)";
    if (!r.why && chunk >= MAX_CHUNKS) r.why = "an invalid chunk";
    message->chunk = (int32_t)(r.why ? 0 : chunk);
    get_name(&r, message->from, true);
    if (get(&r, 3) && !r.why) r.why = "not padded with zeros";
    get_name(&r, message->to, true);
    if (get(&r, 3) && !r.why) r.why = "not padded with zeros";
    get_body(&r, message);
    if (!r.why && needs_offer(message->kind) && message->offers != 1) r.why = "without its offer";
    *why = r.why;
    if (r.why) message_clear(message, MESSAGE_KINDS);
    return !r.why;
}

bool frame_in_order(FrameOrder *order, const Message *message, bool greeting) {
    if (message->session != order->session) {
        if (!greeting) return false;
        *order = (FrameOrder){message->session, 0};
    }
    if (message->sequence <= order->sequence) return false;
    order->sequence = message->sequence;
    return true;
}
