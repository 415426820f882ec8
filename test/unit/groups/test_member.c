// llmc/groups/member_net.c: a group that has joined a rendezvous, which is a thread of this test.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>
#include <zmq.h>

#include "llmc/groups/keys.h"
#include "llmc/groups/member.h"
#include "llmc/groups/transport.h"
#include "test/unit/folder.h"

enum { PAYLOAD = 8 };

// What the rendezvous sends once the group has both of its connections.
typedef void (*Script)(void);

static struct {
    char folder[64], address[64], listen[64], listen_b[64];  // listen: addresses of the groups
    char key_b[KEY_TEXT];                                    // public key of group b
    Transport transport;
    void *socket;
    Script script;
    Route control;
    uint64_t sequence;
    atomic_int stop, asked;  // asked: requests for pieces of b's offer
    atomic_int failed;       // requests for the state after group b no longer had it
    atomic_int leaving;      // whether group a leaves, so that messages to it may fail
    int error;               // errno of a message that could not be sent
} server;
static Member *member;
static Message message, received;
static uint8_t frame[FRAME_BYTES];

static bool any_key(void *context, const uint8_t key[KEY_RAW], const char *address, char name[NAME_BYTES]) {
    message_name(name, "a");
    return true;
}

// Keeps errors for the main thread, because assertions of cmocka work there only.
static void send_to(const Route *route) {
    message.session = 7;
    message.sequence = ++server.sequence;
    int error = transport_send(server.socket, route, frame, frame_write(&message, frame));
    if (error && !(server.leaving && error == EHOSTUNREACH)) server.error = error;
}

static void say(MessageKind kind, const char *text) {
    message_clear(&message, kind);
    message_text(&message, text);
    send_to(&server.control);
}

static void offer(const char *name) {
    message_clear(&message, MESSAGE_OFFER);
    message.offers = 1;
    message.offer[0] = (Offer){.incarnation = 5, .number = 1, .bytes = PAYLOAD, .hash = 1};
    message_name(message.offer[0].name, name);
    send_to(&server.control);
}

static void refuse_twice(void) {
    for (int i = 0; i < 2; i++) {
        say(MESSAGE_REFUSE, "another run");
        say(MESSAGE_WAIT, "the name is in use");
    }
    say(MESSAGE_NEWS, "the last line");
}

// address: where b listens, or "".
static void announce(const char *address) {
    message_clear(&message, MESSAGE_PEER);
    message_name(message.from, "b");
    message_text(&message, server.key_b);
    message.incarnation = 5;
    snprintf(message.address, sizeof message.address, "%s", address);
    send_to(&server.control);
}

static void announce_b(void) { announce(""); }
static void announce_listening_b(void) { announce(server.listen_b); }

// Groups x and y are not in the run, so their offers are dropped while b's is pulled.
static void offer_of_strangers(void) {
    announce_b();
    offer("x");
    offer("b");
    offer("y");
}

// Group b serves a state that it no longer has.
static void serve_and_drop(const Route *route) {
    if (received.hash == 9) server.failed++;
    message_clear(&message, MESSAGE_SERVING);
    message_name(message.from, "b");
    message.incarnation = 5;
    message.bytes = PAYLOAD;
    message.round = 3;
    message.hash = 9;
    send_to(route);
}

static void drop_state(const Route *route) {
    message_clear(&message, MESSAGE_GONE);
    message.flags = FLAG_STATE;
    message.offers = 1;
    message.offer[0] = received.offer[0];
    message_name(message.from, "b");
    send_to(route);
}

static void answer(const Route *route) {
    switch (received.kind) {
        case MESSAGE_HELLO:
            server.control = *route;
            message_clear(&message, MESSAGE_WELCOME);
            message.flags = FLAG_FIRST;
            send_to(route);
            break;
        case MESSAGE_LINK:
            message_clear(&message, MESSAGE_LINK);
            send_to(route);
            if (server.script) server.script();
            server.script = NULL;
            break;
        case MESSAGE_BEAT:
            message_clear(&message, MESSAGE_PULSE);
            send_to(route);
            break;
        case MESSAGE_FETCH: serve_and_drop(route); break;
        case MESSAGE_GET:
            server.asked += strcmp(received.offer[0].name, "b") == 0;
            if (received.flags & FLAG_STATE) drop_state(route);
            break;
        default: break;
    }
}

static void *serve(void *context) {
    static uint8_t in[FRAME_BYTES];
    const char *why;
    Route route;
    while (!server.stop) {
        struct timespec nap = {0, 1000000};
        transport_answer_checks(&server.transport);
        int64_t bytes = transport_receive(server.socket, in, &route, NULL, NULL);
        if (bytes < 0) nanosleep(&nap, NULL);
        else if (frame_read(in, (size_t)bytes, &received, &why)) answer(&route);
    }
    return NULL;
}

// Writes the address of a port that is free. Returns the socket that holds the port.
static int free_address(char address[64]) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &bytes), 0);
    snprintf(address, 64, "tcp://127.0.0.1:%d", ntohs(at.sin_port));
    return fd;
}

// Chooses three different free ports.
static void choose_addresses(void) {
    int held[] = {free_address(server.address), free_address(server.listen), free_address(server.listen_b)};
    for (int i = 0; i < 3; i++) close(held[i]);
}

// Makes keys of the rendezvous and of groups a and b, and listens.
static void open_server(int pending) {
    Error err = {0};
    Keys keys;
    memset(&server, 0, sizeof server);
    assert_int_equal(folder_make(server.folder, sizeof server.folder, "test_member"), 0);
    const char *const names[] = {SERVER_NAME, "a", "b"};
    for (int i = 0; i < 3; i++) assert_true(keys_generate(server.folder, names[i], &err));
    assert_true(keys_load(server.folder, SERVER_NAME, &keys, &err));
    assert_true(keys_load_public(server.folder, "b", server.key_b, &err));
    assert_true(transport_open(&server.transport, any_key, NULL, &err));
    choose_addresses();
    server.socket = transport_listen(&server.transport, &keys, server.address, pending, &err);
    assert_non_null(server.socket);
}

static void close_server(void) {
    transport_close_socket(server.socket);
    transport_close(&server.transport);
    assert_int_equal(folder_remove(server.folder), 0);
}

static void run_member(Script script, void (*check)(void)) {
    Error err = {0};
    int64_t size = PAYLOAD;
    pthread_t thread;
    open_server(100);
    server.script = script;
    assert_int_equal(pthread_create(&thread, NULL, serve, NULL), 0);
    const MemberOptions options = {.name = "a",
                                   .rendezvous = server.address,
                                   .keys = server.folder,
                                   .listen = server.listen,
                                   .identity = "test",
                                   .min_groups = 1,
                                   .grace_seconds = 1,
                                   .connections = 1,
                                   .chunks = 1,
                                   .payload_bytes = &size,
                                   .state_bytes = &size};
    member = member_join(&options, &err);
    if (!member) fail_msg("%s", err.what);
    check();
    server.leaving = 1;
    member_leave(member, 1);
    server.stop = 1;
    pthread_join(thread, NULL);
    assert_int_equal(server.error, 0);
    close_server();
}

// A repeated refusal is reported once. The line that says that the group has joined may come before
// or after the others.
static void check_refusals(void) {
    int joined = 0, refused = 0, waits = 0, last = 0, lines = 0;
    for (double end = monotonic_seconds() + 20; monotonic_seconds() < end && !(joined && last);) {
        const char *line = member_news(member, NULL);
        if (!line) {
            usleep(1000);
            continue;
        }
        lines++;
        joined += strncmp(line, "joined the run", 14) == 0;
        refused += strcmp(line, "the rendezvous refused this group: another run") == 0;
        waits += strcmp(line, "the rendezvous refused this group for now: the name is in use") == 0;
        last += strcmp(line, "the last line") == 0;
    }
    assert_int_equal(joined, 1);
    assert_int_equal(refused, 1);
    assert_int_equal(waits, 1);
    assert_int_equal(last, 1);
    assert_int_equal(lines, 4);
    assert_null(member_news(member, NULL));
}

static void refusals_of_a_member_are_news(void **state) { run_member(refuse_twice, check_refusals); }

static void check_requests(void) {
    for (double end = monotonic_seconds() + 20; monotonic_seconds() < end && !server.asked;) usleep(1000);
    assert_int_equal(server.asked, 1);
}

static void offers_after_a_dropped_one_are_pulled(void **state) {
    run_member(offer_of_strangers, check_requests);
}

// Without the rendezvous, groups a and b take blocks of samples in turn.
static void check_own_samples(void) {
    MemberStats stats = {0};
    for (double end = monotonic_seconds() + 20; monotonic_seconds() < end && stats.groups < 2; usleep(1000))
        member_news(member, &stats);
    assert_int_equal(stats.groups, 2);
    assert_int_equal(member_own_samples(member, 10, 30), 40);
    assert_int_equal(member_own_samples(member, 10, 50), 60);
    assert_int_equal(member_own_samples(member, 10, 75), 80);
}

static void samples_without_the_rendezvous(void **state) { run_member(announce_b, check_own_samples); }

// A group tells the rendezvous which copy of a state it could not fetch.
static void check_failed_state(void) {
    uint8_t state[PAYLOAD];
    Contribution own;
    for (double end = monotonic_seconds() + 20; monotonic_seconds() < end && !server.failed;)
        assert_int_equal(member_fetch(member, 0, 0.1, state, &own), MEMBER_BUSY);
    assert_true(server.failed > 0);
}

static void failed_states_are_reported(void **state) { run_member(announce_b, check_failed_state); }

// Greets group a as b until it answers. Connects again if there is no answer, because a refuses b
// until it hears of b. Returns the sequence number of the answer.
static uint64_t greet(void *socket, uint64_t *sequence) {
    static Message greeting, reply;
    static uint8_t out[FRAME_BYTES];
    const char *why;
    double connected = monotonic_seconds();
    for (double end = connected + 20; monotonic_seconds() < end; usleep(10000)) {
        if (monotonic_seconds() > connected + 1) {
            transport_reconnect(socket, server.listen);
            connected = monotonic_seconds();
        }
        message_clear(&greeting, MESSAGE_LINK);
        greeting.run = XXH3_64bits("test", 4);
        greeting.session = 5;
        greeting.sequence = ++*sequence;
        transport_send(socket, NULL, out, frame_write(&greeting, out));
        int64_t bytes = transport_receive(socket, out, NULL, NULL, NULL);
        if (bytes > 0 && frame_read(out, (size_t)bytes, &reply, &why)) return reply.sequence;
    }
    return 0;
}

// The socket of b survives a lost connection, and so does its replay check.
static void check_reconnection(void) {
    Error err = {0};
    Transport transport;
    Keys b;
    char a[KEY_TEXT];
    static uint8_t in[FRAME_BYTES];
    uint64_t sequence = 0;
    assert_true(keys_load(server.folder, "b", &b, &err) && keys_load_public(server.folder, "a", a, &err));
    assert_true(transport_open(&transport, NULL, NULL, &err));
    void *socket = transport_connect(&transport, &b, a, server.listen, 100, &err);
    assert_non_null(socket);
    uint64_t before = greet(socket, &sequence);
    assert_true(before > 0);
    while (transport_receive(socket, in, NULL, NULL, NULL) >= 0) continue;
    transport_reconnect(socket, server.listen);
    assert_true(greet(socket, &sequence) > before);
    transport_close_socket(socket);
    transport_close(&transport);
}

static bool key_after_refusal(void *context, const uint8_t key[KEY_RAW], const char *address,
                              char name[NAME_BYTES]) {
    int *checks = (int *)context;
    message_name(name, "a");
    return (*checks)++ > 0;
}

// Group b refuses the first connection of a, as if it had not yet heard of a. Then a tries again.
static void check_retry(void) {
    Error err = {0};
    Transport transport;
    Keys b;
    int checks = 0;
    static uint8_t in[FRAME_BYTES];
    static Message greeting;
    const char *why;
    assert_true(keys_load(server.folder, "b", &b, &err));
    assert_true(transport_open(&transport, key_after_refusal, &checks, &err));
    void *socket = transport_listen(&transport, &b, server.listen_b, 100, &err);
    assert_non_null(socket);
    bool greeted = false;
    for (double end = monotonic_seconds() + 40; monotonic_seconds() < end && !greeted; usleep(1000)) {
        Route route;
        transport_answer_checks(&transport);
        int64_t bytes = transport_receive(socket, in, &route, NULL, NULL);
        greeted = bytes > 0 && frame_read(in, (size_t)bytes, &greeting, &why) &&
                  greeting.kind == MESSAGE_LINK;
    }
    assert_true(greeted);
    assert_true(checks >= 2);
    transport_close_socket(socket);
    transport_close(&transport);
}

static void refused_connections_are_made_again(void **state) {
    run_member(announce_listening_b, check_retry);
}

static void direct_connections_reconnect(void **state) { run_member(announce_b, check_reconnection); }

// A group that does not read makes the queue of its connection full, whose length is bounded.
static void queues_are_bounded(void **state) {
    enum { PENDING = 10, MOST = 400 };  // MOST: 100 MiB, more than the queues and buffers of TCP
    Error err = {0};
    Keys keys;
    Route route = {.bytes = 0};
    open_server(PENDING);
    assert_true(keys_load(server.folder, "a", &keys, &err));
    void *group = transport_connect(&server.transport, &keys, keys.server_key, server.address, PENDING, &err);
    assert_non_null(group);
    for (double end = monotonic_seconds() + 20; monotonic_seconds() < end && !route.bytes; usleep(1000)) {
        transport_answer_checks(&server.transport);
        transport_send(group, NULL, frame, 1);
        if (transport_receive(server.socket, frame, &route, NULL, NULL) < 0) route.bytes = 0;
    }
    assert_true(route.bytes > 0);
    int sent = 0;
    // Pauses let the connection send what it can.
    while (sent < MOST && transport_send(server.socket, &route, frame, PIECE_BYTES) == 0) {
        sent++;
        usleep(1000);
    }
    assert_in_range(sent, 1, MOST - 1);
    transport_close_socket(group);
    close_server();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refusals_of_a_member_are_news),
        cmocka_unit_test(direct_connections_reconnect),
        cmocka_unit_test(refused_connections_are_made_again),
        cmocka_unit_test(queues_are_bounded),
        cmocka_unit_test(offers_after_a_dropped_one_are_pulled),
        cmocka_unit_test(samples_without_the_rendezvous),
        cmocka_unit_test(failed_states_are_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
