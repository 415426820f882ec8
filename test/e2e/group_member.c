// A replica group without a trainer, for test/e2e/rendezvous.sh: its weights are words that every
// closed round changes. Prints one line per round that it takes, with a hash of the weights.
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

#include "dev/lib/tool.h"
#include "llmc/groups/frame.h"
#include "llmc/groups/member.h"
#include "llmc/groups/transport.h"

typedef struct Settings {
    const char *name, *rendezvous, *keys, *listen, *identity;
    int chunks, min_groups, connections;
    int64_t rounds, words;
    double grace, step;
    bool attack, help;
} Settings;

#define FIELD(name) offsetof(Settings, name)
static const Option table[] = {
    {"name", .kind = OPTION_TEXT, .offset = FIELD(name), .value = "NAME", .help = "Name of the group."},
    {"rendezvous", .kind = OPTION_TEXT, .offset = FIELD(rendezvous), .value = "ADDRESS",
     .help = "tcp://host:port."},
    {"keys", .kind = OPTION_TEXT, .offset = FIELD(keys), .value = "FOLDER", .help = "Folder with keys."},
    {"listen", .kind = OPTION_TEXT, .offset = FIELD(listen), .value = "ADDRESS", .help = "For direct links."},
    {"identity", .kind = OPTION_TEXT, .offset = FIELD(identity), .initial = "test", .value = "TEXT",
     .help = "The run."},
    {"chunks", .kind = OPTION_INT, .offset = FIELD(chunks), .initial = "2", .low = 1, .high = 100,
     .value = "N", .help = "Chunks."},
    {"min-groups", .kind = OPTION_INT, .offset = FIELD(min_groups), .initial = "1", .low = 1, .high = 64,
     .value = "N", .help = "Quorum."},
    {"connections", .kind = OPTION_INT, .offset = FIELD(connections), .initial = "1", .low = 1, .high = 16,
     .value = "N", .help = "TCP connections per pair."},
    {"rounds", .kind = OPTION_INT64, .offset = FIELD(rounds), .initial = "10", .low = 0, .high = OPTION_ANY,
     .value = "N", .help = "Leave after this round."},
    {"words", .kind = OPTION_INT64, .offset = FIELD(words), .initial = "1000", .low = 1, .high = 1e9,
     .value = "N", .help = "8-byte words of a chunk."},
    {"grace", .kind = OPTION_REAL, .offset = FIELD(grace), .initial = "1", .high = 1000, .value = "S",
     .help = "Grace period."},
    {"step", .kind = OPTION_REAL, .offset = FIELD(step), .initial = "0.05", .high = 1000, .value = "S",
     .help = "Seconds of training between two offers."},
    {"attack", .kind = OPTION_FLAG, .offset = FIELD(attack), .help = "Send what no group sends, and exit."},
    {"help", .kind = OPTION_FLAG, .offset = FIELD(help), .help = "Print this and exit."},
};
enum { TABLE_ROWS = sizeof table / sizeof *table };

// Weights and payload of a chunk: (words) each
typedef struct Weights {
    int64_t words, round;
    uint64_t *weight, *payload;
} Weights;

static void print_news(Member *m) {
    MemberStats stats;
    const char *line;
    while ((line = member_news(m, &stats))) printf("news: %s\n", line);
}

static void serve(Member *m, Weights *w) {
    int c = member_wanted(m);
    if (c < 0) return;
    member_serve(m, c, w[c].round, (const uint8_t *)w[c].weight);
    printf("served %d %" PRId64 "\n", c, w[c].round);
}

static void fetch(Member *m, int c, Weights *all) {
    Weights *w = &all[c];
    int64_t round;
    Contribution own;
    while ((round = member_fetch(m, c, 1.0, (uint8_t *)w->weight, &own)) == MEMBER_BUSY) serve(m, all);
    if (round != MEMBER_KEEP) w->round = round;
    printf("fetched %d %" PRId64 " %016" PRIx64 "\n", c, w->round,
           (uint64_t)XXH3_64bits(w->weight, (size_t)w->words * 8));
}

static void train(Member *m, const Settings *s, Weights *w) {
    for (double end = monotonic_seconds() + s->step; monotonic_seconds() < end;) {
        struct timespec nap = {0, 5000000};
        nanosleep(&nap, NULL);
        serve(m, w);
    }
}

// Applies a closed round to the weights.
static void apply(Member *m, int c, Weights *w, const ClosedRound *closed) {
    printf("round %d %" PRId64, c, closed->round);
    for (int i = 0; i < closed->contributions; i++) {
        const Contribution *part = &closed->contribution[i];
        for (int64_t k = 0; k < w->words; k++) {
            uint64_t word;
            memcpy(&word, part->payload + 8 * k, 8);
            w->weight[k] = w->weight[k] * 3 + word * (uint64_t)part->tokens;
        }
        printf("%c%s", i ? ',' : ' ', part->name);
    }
    uint64_t hash = XXH3_64bits(w->weight, (size_t)w->words * 8);
    printf(" %016" PRIx64 "\n", hash);
    w->round = closed->round;
    member_hash(m, c, closed->round, hash);
}

// Takes closed rounds of a chunk until one contains the own offer. Gives up after two grace
// periods: with a quorum of two, another group may wait in the same way for another chunk.
static void take(Member *m, const Settings *s, int c, Weights *w) {
    ClosedRound closed;
    struct timespec nap = {0, 5000000};
    for (double end = monotonic_seconds() + 2 * s->grace;;) {
        bool found = member_take(m, c, false, &closed);
        serve(m, w);
        if (!found) {
            if (monotonic_seconds() > end) return;
            nanosleep(&nap, NULL);
            continue;
        }
        if (closed.missed) {
            printf("missed %d\n", c);
            fetch(m, c, w);
            return;
        }
        apply(m, c, &w[c], &closed);
        if (closed.own) return;
    }
}

static void loop(Member *m, const Settings *s, Weights *w) {
    double start = monotonic_seconds();
    int64_t offers = 0;
    while (w[s->chunks - 1].round < s->rounds) {
        for (int c = 0; c < s->chunks; c++) {
            train(m, s, w);
            offers++;
            for (int64_t k = 0; k < s->words; k++) {
                w[c].payload[k] = (uint64_t)(k + 1) * (uint64_t)offers *
                                  XXH3_64bits(s->name, strlen(s->name));
            }
            member_offer(m, c, 100 + offers % 3, (const uint8_t *)w[c].payload);
            take(m, s, c, w);
            member_report(m, offers, 100 * offers, 100 * (double)offers / (monotonic_seconds() - start));
            print_news(m);
        }
    }
}

// Sends frames that the rendezvous must refuse, with a key that it knows.
static bool attack(const Settings *s, Error *err) {
    Keys keys;
    Transport t;
    static uint8_t frame[FRAME_BYTES + 100];
    static Message m;
    if (!keys_load(s->keys, s->name, &keys, err) || !transport_open(&t, NULL, NULL, err)) return false;
    void *socket = transport_connect(&t, &keys, keys.server_key, s->rendezvous, 100, err);
    if (!socket) return false;
    struct timespec nap = {0, 300000000};
    nanosleep(&nap, NULL);
    message_clear(&m, MESSAGE_BEAT);
    m.session = 1;
    m.sequence = 1;
    size_t bytes = frame_write(&m, frame);
    for (int i = 0; i < 2; i++) transport_send(socket, NULL, frame, bytes);  // the second is a replay
    frame[30] ^= 1;
    transport_send(socket, NULL, frame, bytes);  // its hash differs
    transport_send(socket, NULL, frame, bytes - 7);
    transport_send(socket, NULL, frame, 0);
    for (int i = 0; i < 1000; i++) {
        for (size_t k = 0; k < 200; k++) frame[k] = (uint8_t)(i * 31 + (int)k * 7);
        transport_send(socket, NULL, frame, (size_t)(i % 200));
    }
    for (int kind = 1; kind < MESSAGE_KINDS; kind++) {  // valid frames out of order
        message_clear(&m, (MessageKind)kind);
        m.session = 1;
        m.sequence = (uint64_t)kind + 1;
        m.chunk = 77;
        m.offers = 1;
        message_name(m.offer[0].name, "a");
        message_name(m.to, "a");
        bytes = frame_write(&m, frame);
        transport_send(socket, NULL, frame, bytes);
    }
    nanosleep(&nap, NULL);
    transport_send(socket, NULL, frame, sizeof frame);  // longer than any frame: ends the connection
    nanosleep(&nap, NULL);
    transport_close_socket(socket);
    transport_close(&t);
    return true;
}

static bool run(const void *settings, int *argc, char ***argv, Error *err) {
    const Settings *s = (const Settings *)settings;
    int64_t sizes[100];
    Weights w[100];
    if (!s->name || !s->rendezvous || !s->keys)
        return usage_error(err, "--name, --rendezvous, --keys are needed");
    if (s->attack) return attack(s, err);
    for (int c = 0; c < s->chunks; c++) {
        sizes[c] = 8 * s->words;
        w[c] = (Weights){s->words, 0, NULL, NULL};
        w[c].weight = (uint64_t *)xcalloc((size_t)s->words, 8, "weights");
        w[c].payload = (uint64_t *)xcalloc((size_t)s->words, 8, "a payload");
    }
    const MemberOptions options = {.name = s->name,
                                   .rendezvous = s->rendezvous,
                                   .keys = s->keys,
                                   .listen = s->listen,
                                   .identity = s->identity,
                                   .min_groups = s->min_groups,
                                   .grace_seconds = s->grace,
                                   .connections = s->connections,
                                   .chunks = s->chunks,
                                   .payload_bytes = sizes,
                                   .state_bytes = sizes};
    Member *m = member_join(&options, err);
    if (!m) return false;
    printf("joined %s\n", member_is_first(m) ? "first" : "later");
    for (int c = 0; c < s->chunks && !member_is_first(m); c++) fetch(m, c, w);
    loop(m, s, w);
    MemberStats stats;
    member_news(m, &stats);
    printf("done: waited %.3f late %" PRId64 " counted %" PRId64 " sent %" PRId64 " received %" PRId64 "\n",
           stats.waited, stats.rounds_late, stats.tokens_counted, stats.sent, stats.received);
    for (double end = monotonic_seconds() + 1; monotonic_seconds() < end;) train(m, s, w);
    member_leave(m, 1);
    for (int c = 0; c < s->chunks; c++) {
        free(w[c].weight);
        free(w[c].payload);
    }
    return true;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);  // the test reads it while groups run
    Settings settings = {0};
    const Tool tool = {
        table,     TABLE_ROWS, "Usage: group_member --name NAME --rendezvous ADDRESS --keys FOLDER\n",
        &settings, run,        NULL};
    return tool_main(&tool, argc, argv);
}
