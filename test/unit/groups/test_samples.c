// llmc/groups/rounds.c: training samples are dealt without overlap to groups whose messages are
// lost or repeated, and after the rendezvous has restarted.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "llmc/groups/rounds.h"

enum { GROUPS = 3, BLOCK = 10, SETTLE = 2 };

static struct {
    uint64_t incarnation, request;
    int64_t first;  // answer to the request, -1: none
    int64_t dealt;  // from the latest pulse or answer
} group[GROUPS];
static Rounds *rounds;
static double now;
static const char *const NAMES[GROUPS] = {"a", "b", "c"};
static int speaking;  // group whose message is handled

static void receive(void *context, const char *name, const Message *m) {
    int g = speaking;
    for (int i = 0; name && i < GROUPS; i++)
        if (strcmp(name, NAMES[i]) == 0) g = i;
    if (m->kind != MESSAGE_DEAL && m->kind != MESSAGE_PULSE) return;
    if (m->tokens > group[g].dealt) group[g].dealt = m->tokens;
    if (m->kind == MESSAGE_DEAL && m->hash == group[g].request) group[g].first = m->round;
}

static void send(int g, Message *m) {
    speaking = g;
    m->incarnation = group[g].incarnation;
    rounds_receive(rounds, NAMES[g], m, now += 0.01);
}

static void start(void) {
    RoundsOptions options = {SETTLE, 3, 30, receive, NULL};
    if (rounds) rounds_free(rounds);
    rounds = rounds_create(&options, now);
}

// knows: how many groups it knows to take part; 0: it knows nothing of the run.
static void join(int g, int knows) {
    Message m;
    message_clear(&m, MESSAGE_HELLO);
    message_text(&m, "a run");
    m.iteration = 1;
    m.groups = 1;
    m.rate = 1;
    m.flags = knows ? FLAG_STATE : 0;
    m.bytes = knows;
    m.round = group[g].dealt;
    send(g, &m);
    message_clear(&m, MESSAGE_REPORTED);
    send(g, &m);
}

static void beat(int g) {
    Message m;
    message_clear(&m, MESSAGE_BEAT);
    m.round = group[g].dealt;
    send(g, &m);
}

static void ask(int g) {
    Message m;
    message_clear(&m, MESSAGE_DEAL);
    m.hash = group[g].request;
    m.bytes = BLOCK;
    m.round = group[g].dealt;
    send(g, &m);
}

static int64_t deal(int g) {
    group[g].request++;
    group[g].first = -1;
    ask(g);
    return group[g].first;
}

static void test_no_overlap(void **state) {
    int64_t next = 0;
    memset(group, 0, sizeof group);
    now = 0;
    start();
    now += SETTLE + 1;
    for (int g = 0; g < GROUPS; g++) {
        group[g].incarnation = (uint64_t)(100 + g);
        join(g, 0);
    }
    for (int i = 0; i < 20; i++) {
        int g = i * 7 % GROUPS;
        assert_int_equal(deal(g), next);
        next += BLOCK;
        // The answer was lost: the same request gets the same samples.
        if (i % 3 == 0) {
            group[g].first = -1;
            ask(g);
            assert_int_equal(group[g].first, next - BLOCK);
        }
    }
    // A restart of the rendezvous, after which it first listens to the groups.
    beat(2);
    start();
    join(0, 3);
    join(2, 3);
    assert_int_equal(deal(0), -1);
    beat(2);
    now += SETTLE;
    ask(0);
    assert_int_equal(group[0].first, next);
    // A group that knows from a checkpoint that more was dealt.
    group[2].dealt = next + 5 * BLOCK;
    assert_int_equal(deal(2), next + 5 * BLOCK);
    next += 6 * BLOCK;
    // Another restart. Once all groups have reported, it deals at once.
    start();
    join(0, 3);
    join(1, 3);
    assert_int_equal(deal(0), -1);
    join(2, 3);
    ask(0);
    assert_int_equal(group[0].first, next);
    rounds_free(rounds);
    rounds = NULL;
}

static void test_nonsense(void **state) {
    memset(group, 0, sizeof group);
    now = 0;
    start();
    now += SETTLE + 1;
    group[0].incarnation = 1;
    join(0, 0);
    group[0].dealt = INT64_MAX - 1;
    assert_int_equal(deal(0), -1);
    // Absurd numbers of one group are not dealt to the others.
    group[1].incarnation = 2;
    group[1].dealt = INT64_MAX / 2;
    join(1, 0);
    beat(1);
    assert_int_equal(deal(1), 0);
    Message m;
    message_clear(&m, MESSAGE_DEAL);
    m.hash = ++group[1].request;
    m.bytes = INT64_MAX - 100;
    group[1].first = -1;
    send(1, &m);
    assert_int_equal(group[1].first, -1);
    group[0].dealt = 0;
    assert_int_equal(deal(0), BLOCK);
    rounds_free(rounds);
    rounds = NULL;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_no_overlap), cmocka_unit_test(test_nonsense)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
