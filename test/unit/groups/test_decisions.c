// llmc/groups/rounds_groups.c, rounds_close.c, rounds_fetch.c: single decisions of the rendezvous.
// Groups are simulated by their messages.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "llmc/groups/rounds.h"

static const double grace = 3, silent = 3;

typedef struct Sent {
    char name[NAME_BYTES];
    Message message;
} Sent;
static Sent sent[256];
static int sents;
static void note_message(void *context, const char *name, const Message *m) {
    if (!name || m->kind == MESSAGE_NEWS || m->kind == MESSAGE_PULSE) return;
    assert_true(sents < 256);
    message_name(sent[sents].name, name);
    memcpy(&sent[sents++].message, m, message_bytes(m));
}

static const Message *last_sent(const char *name, MessageKind kind) {
    for (int i = sents - 1; i >= 0; i--) {
        if (strcmp(sent[i].name, name) == 0 && sent[i].message.kind == kind) return &sent[i].message;
    }
    return NULL;
}

static void tell(Rounds *r, const char *name, uint64_t incarnation, Message *m, double now) {
    m->incarnation = incarnation;
    rounds_receive(r, name, m, now);
}

// A hello and the reports that follow it. known: groups that it knows to take part.
static void begin_join(Rounds *r, const char *name, uint64_t incarnation, int64_t round, int known,
                       double now) {
    static Message m;
    message_clear(&m, MESSAGE_HELLO);
    message_text(&m, "a run");
    m.flags = round < 0 ? 0 : FLAG_STATE;
    m.iteration = m.groups = 1;
    m.rate = grace;
    m.bytes = known;
    tell(r, name, incarnation, &m, now);
    message_clear(&m, MESSAGE_STATE);
    m.round = round;
    m.chain = 5;
    if (round >= 0) tell(r, name, incarnation, &m, now);
}

static void end_join(Rounds *r, const char *name, uint64_t incarnation, double now) {
    static Message m;
    message_clear(&m, MESSAGE_REPORTED);
    tell(r, name, incarnation, &m, now);
}

static void join(Rounds *r, const char *name, uint64_t incarnation, int64_t round, double now) {
    begin_join(r, name, incarnation, round, 1, now);
    end_join(r, name, incarnation, now);
}

// waited: seconds since the group first offered
static void make_numbered_offer(Rounds *r, const char *name, uint64_t incarnation, int64_t number,
                                double waited, double now) {
    static Message m;
    message_clear(&m, MESSAGE_OFFER);
    m.offers = 1;
    m.rate = waited;
    m.offer[0] = (Offer){.incarnation = incarnation, .number = number, .tokens = 9, .bytes = 1, .hash = 1};
    message_name(m.offer[0].name, name);
    tell(r, name, incarnation, &m, now);
}

static void make_offer(Rounds *r, const char *name, uint64_t incarnation, double waited, double now) {
    make_numbered_offer(r, name, incarnation, 1, waited, now);
}

static void beat(Rounds *r, const char *name, uint64_t incarnation, double now) {
    static Message m;
    message_clear(&m, MESSAGE_BEAT);
    tell(r, name, incarnation, &m, now);
    rounds_tick(r, now);
}

// failed: hash of a state that did not arrive, 0: none
static void want_again(Rounds *r, const char *name, uint64_t incarnation, int64_t round, uint64_t failed,
                       double now) {
    static Message m;
    message_clear(&m, MESSAGE_FETCH);
    m.flags = round < 0 ? 0 : FLAG_STATE;
    m.round = round < 0 ? 0 : round;
    m.hash = failed;
    tell(r, name, incarnation, &m, now);
    rounds_tick(r, now);
}

static void want(Rounds *r, const char *name, uint64_t incarnation, int64_t round, double now) {
    want_again(r, name, incarnation, round, 0, now);
}

static void serve(Rounds *r, const char *name, int64_t round, uint64_t hash, double now) {
    static Message m;
    message_clear(&m, MESSAGE_SERVING);
    m.round = round;
    m.chain = 5;
    m.hash = hash;
    m.bytes = 1;
    tell(r, name, 1, &m, now);
}

static Rounds *quiet_rounds(void) {
    const RoundsOptions options = {0, silent, 30, note_message, NULL};
    Rounds *r = rounds_create(&options, 0);
    sents = 0;
    rounds_tick(r, 100);
    return r;
}

// Two groups offer, and one dies before the other has its payload. The round closes without it as
// soon as the dead group is silent, whichever of the two joined first.
static void test_a_round_needs_a_second_holder(void **state) {
    for (int first = 0; first < 2; first++) {
        Rounds *r = quiet_rounds();
        const char *lives = first ? "g1" : "g0", *dead = first ? "g0" : "g1";
        join(r, "g0", 1, 4, 100);
        join(r, "g1", 1, 4, 100);
        make_offer(r, "g0", 1, 0, 100);
        make_offer(r, "g1", 1, 0, 100);
        beat(r, dead, 1, 102);
        beat(r, lives, 1, 104);  // the grace period is over; the other group may be alive
        assert_null(last_sent(lives, MESSAGE_CLOSE));
        beat(r, lives, 1, 105.5);
        const Message *close = last_sent(lives, MESSAGE_CLOSE);
        assert_non_null(close);
        assert_int_equal(close->offers, 1);
        assert_string_equal(close->offer[0].name, lives);
        rounds_free(r);
    }
}

// A group's offer is held by the other one, so that a round with it can close.
static void hold(Rounds *r, const char *name, const char *owner, double now) {
    static Message m;
    message_clear(&m, MESSAGE_HOLD);
    m.offers = 1;
    m.offer[0] = (Offer){.incarnation = 1, .number = 1, .tokens = 9, .bytes = 1, .hash = 1};
    message_name(m.offer[0].name, owner);
    tell(r, name, 1, &m, now);
}

// Groups make new offers faster than their payloads are transferred. The round closes with the
// first ones, which the newer ones contain.
static void test_a_round_closes_while_offers_are_renewed(void **state) {
    Rounds *r = quiet_rounds();
    join(r, "g0", 1, 4, 100);
    join(r, "g1", 1, 4, 100);
    make_offer(r, "g0", 1, 0, 100);
    make_offer(r, "g1", 1, 0, 100);
    hold(r, "g0", "g1", 100.1);
    make_numbered_offer(r, "g0", 1, 2, 0.2, 100.2);
    make_numbered_offer(r, "g1", 1, 2, 0.2, 100.2);
    assert_int_equal(last_sent("g0", MESSAGE_OFFER)->offer[0].number, 1);
    hold(r, "g1", "g0", 100.3);
    const Message *close = last_sent("g0", MESSAGE_CLOSE);
    assert_non_null(close);
    assert_int_equal(close->offers, 2);
    for (int i = 0; i < 2; i++) assert_int_equal(close->offer[i].number, 1);
    beat(r, "g0", 1, 104);
    beat(r, "g1", 1, 104);
    beat(r, "g0", 1, 106);
    assert_int_equal(last_sent("g0", MESSAGE_CLOSE)->round, 5);  // the newer ones are void
    rounds_free(r);
}

// An offer that a round leaves out, because its transfer takes long, counts in the next round.
static void test_a_slow_offer_counts_later(void **state) {
    Rounds *r = quiet_rounds();
    join(r, "g0", 1, 4, 100);
    join(r, "g1", 1, 4, 100);
    make_offer(r, "g0", 1, 0, 100);
    make_offer(r, "g1", 1, 0, 100);
    hold(r, "g0", "g1", 100.1);
    make_numbered_offer(r, "g0", 1, 2, 0.2, 100.2);
    beat(r, "g1", 1, 102);
    beat(r, "g0", 1, 103.1);
    const Message *close = last_sent("g1", MESSAGE_CLOSE);
    assert_non_null(close);
    assert_int_equal(close->offers, 1);
    assert_string_equal(close->offer[0].name, "g1");
    hold(r, "g1", "g0", 104);
    beat(r, "g1", 1, 105);
    beat(r, "g0", 1, 106.5);
    close = last_sent("g1", MESSAGE_CLOSE);
    assert_int_equal(close->round, 6);
    assert_string_equal(close->offer[0].name, "g0");
    assert_int_equal(close->offer[0].number, 1);
    rounds_free(r);
}

// Starts a rendezvous at 100, and two groups rejoin that have waited for a third one for 1.5 s.
static Rounds *restarted_rounds(int known) {
    const RoundsOptions options = {0, silent, 30, note_message, NULL};
    Rounds *r = rounds_create(&options, 100);
    sents = 0;
    for (int g = 0; g < 2; g++) {
        const char *name = g ? "g1" : "g0";
        begin_join(r, name, 1, 4, known, 100.2);
        make_offer(r, name, 1, 1.5, 100.2);
        end_join(r, name, 1, 100.2);
    }
    hold(r, "g0", "g1", 100.2);
    hold(r, "g1", "g0", 100.2);
    return r;
}

// After a restart of the rendezvous, the grace period continues, in a round of the groups that
// rejoin.
static void test_a_restart_continues_the_grace_period(void **state) {
    Rounds *r = restarted_rounds(3);
    rounds_tick(r, 101.6);
    assert_null(last_sent("g0", MESSAGE_CLOSE));  // the third group may come back
    rounds_tick(r, 101.8);
    const Message *close = last_sent("g0", MESSAGE_CLOSE);
    assert_non_null(close);
    assert_int_equal(close->offers, 2);
    rounds_free(r);
}

// All groups are there again: the rounds close at once. Nothing else is waited for.
static void test_all_groups_rejoin(void **state) {
    Rounds *r = restarted_rounds(2);
    assert_int_equal(last_sent("g1", MESSAGE_CLOSE)->offers, 2);
    rounds_free(r);
    // The third group is late, but it rejoins within the grace period.
    r = restarted_rounds(3);
    begin_join(r, "g2", 1, 4, 3, 100.5);
    make_offer(r, "g2", 1, 0, 100.5);
    end_join(r, "g2", 1, 100.5);
    for (int g = 0; g < 2; g++) {
        const char *name = g ? "g1" : "g0";
        hold(r, "g2", name, 100.6);
        hold(r, name, "g2", 100.6);
    }
    assert_int_equal(last_sent("g2", MESSAGE_CLOSE)->offers, 3);
    rounds_free(r);
}

// A group that comes back to a rendezvous that did not restart has waited because it was cut off:
// the others have not, and get a grace period.
static int index_of(const char *name, MessageKind kind) {
    const Message *m = last_sent(name, kind);
    for (int i = 0; m && i < sents; i++) {
        if (&sent[i].message == m) return i;
    }
    return -1;
}

// A group ignores everything before the answer to its hello. So it learns after it that others have
// newer state, also if it says hello twice.
static void test_a_reset_follows_the_welcome(void **state) {
    Rounds *r = quiet_rounds();
    join(r, "one", 1, 5, 0);
    for (int hello = 0; hello < 2; hello++) {
        sents = 0;
        begin_join(r, "two", 2, 3, 1, 1 + hello);
        assert_null(last_sent("two", MESSAGE_RESET));
        end_join(r, "two", 2, 1 + hello);
        assert_true(index_of("two", MESSAGE_RESET) > index_of("two", MESSAGE_WELCOME));
    }
    rounds_free(r);
}

static void test_a_group_that_was_cut_off_waits(void **state) {
    Rounds *r = quiet_rounds();
    join(r, "g0", 1, 4, 100);
    join(r, "g1", 1, 4, 100);
    begin_join(r, "g1", 1, 4, 9, 150);
    make_offer(r, "g1", 1, 49, 150);
    end_join(r, "g1", 1, 150);
    hold(r, "g0", "g1", 150);
    beat(r, "g0", 1, 152.5);
    assert_null(last_sent("g1", MESSAGE_CLOSE));
    beat(r, "g0", 1, 153.5);
    assert_int_equal(last_sent("g1", MESSAGE_CLOSE)->offers, 1);
    rounds_free(r);
}

// No group has the newest state. The one with an earlier state keeps it, at once if the lost group
// has started again, in any order of the requests. A group that never had state does not win
// meanwhile.
static void test_trained_state_wins(void **state) {
    for (int newcomer_first = 0; newcomer_first < 2; newcomer_first++) {
        Rounds *r = quiet_rounds();
        join(r, "g0", 1, 4, 100);
        join(r, "g1", 1, 4, 100);
        beat(r, "g0", 1, 103);
        join(r, "g1", 2, -1, 104);  // was killed
        if (newcomer_first) want(r, "g1", 2, -1, 104);
        want(r, "g0", 1, 3, 104);
        if (!newcomer_first) want(r, "g1", 2, -1, 104);
        assert_non_null(last_sent("g0", MESSAGE_KEEP));
        assert_null(last_sent("g1", MESSAGE_KEEP));
        rounds_free(r);
    }
}

// A group that was silent for too long may come back with the newest state: others wait for it.
static void test_a_lost_group_may_come_back(void **state) {
    Rounds *r = quiet_rounds();
    join(r, "g0", 1, 4, 100);
    join(r, "g1", 1, 4, 100);
    want(r, "g0", 1, 3, 101);
    double now = 101;
    for (; now < 132; now += 1) beat(r, "g0", 1, now);
    assert_false(rounds_joined(r, "g1"));
    for (; now < 149; now += 1) beat(r, "g0", 1, now);
    assert_null(last_sent("g0", MESSAGE_KEEP));
    for (; now < 153; now += 1) beat(r, "g0", 1, now);
    assert_non_null(last_sent("g0", MESSAGE_KEEP));
    rounds_free(r);
}

// A copy of a state serves several groups, unless it cannot be fetched: its owner has released it
// after a while, or it is corrupt. Then another group is asked, or the same one again.
static void test_a_state_that_fails_is_served_again(void **state) {
    for (int others = 1; others < 3; others++) {
        Rounds *r = quiet_rounds();
        const char *second = others == 1 ? "g0" : "g1";
        join(r, "g0", 1, 4, 100);
        if (others == 2) join(r, "g1", 1, 4, 100);
        join(r, "g2", 1, -1, 100);
        want(r, "g2", 1, -1, 101);
        assert_non_null(last_sent("g0", MESSAGE_WANT));
        serve(r, "g0", 4, 77, 101);
        beat(r, "g0", 1, 125);
        if (others == 2) beat(r, "g1", 1, 125);
        sents = 0;
        want(r, "g2", 1, -1, 125);
        assert_int_equal(last_sent("g2", MESSAGE_SERVING)->hash, 77);
        want_again(r, "g2", 1, -1, 76, 125.1);  // of an earlier copy
        assert_null(last_sent(second, MESSAGE_WANT));
        want_again(r, "g2", 1, -1, 77, 125.1);
        assert_non_null(last_sent(second, MESSAGE_WANT));
        serve(r, second, 4, 77, 125.2);
        assert_string_equal(last_sent("g2", MESSAGE_SERVING)->from, second);
        sents = 0;
        want_again(r, "g2", 1, -1, 77, 125.3);  // not at any rate
        assert_null(last_sent("g0", MESSAGE_WANT));
        assert_null(last_sent("g1", MESSAGE_WANT));
        rounds_free(r);
    }
}

static void hello_with(Rounds *r, const char *name, double grace_seconds, const char *address, double now) {
    static Message m;
    message_clear(&m, MESSAGE_HELLO);
    message_text(&m, "a run");
    m.flags = FLAG_STATE;
    m.iteration = m.groups = 1;
    m.rate = grace_seconds;
    m.bytes = 1;
    snprintf(m.address, sizeof m.address, "%s", address);
    tell(r, name, 1, &m, now);
    message_clear(&m, MESSAGE_STATE);
    m.round = 4;
    m.chain = 5;
    tell(r, name, 1, &m, now);
    end_join(r, name, 1, now);
}

// Numbers of one group must not stop the rounds of all others for ever.
static void test_a_grace_period_has_an_end(void **state) {
    Rounds *r = quiet_rounds();
    hello_with(r, "g0", 1e300, "", 100);
    join(r, "g1", 1, 4, 100);
    make_offer(r, "g1", 1, 0, 100);
    make_offer(r, "g0", 1, 0, 100);
    hold(r, "g0", "g1", 100);
    const double day = 86400;
    for (double now = 100; now < 100 + day + 10; now += 2) {
        beat(r, "g0", 1, now);
        beat(r, "g1", 1, now);
    }
    assert_non_null(last_sent("g1", MESSAGE_CLOSE));
    for (double now = 100 + day + 10; now < 100 + 5 * day; now += 2) beat(r, "g1", 1, now);
    assert_false(rounds_joined(r, "g0"));
    rounds_free(r);
}

// After a restart, a group that has waited for long does not close rounds before the other groups
// could rejoin.
static void test_long_waits_leave_time_to_rejoin(void **state) {
    const double waits[] = {2.9, 50, 1e300};
    for (int i = 0; i < 3; i++) {
        const RoundsOptions options = {0, silent, 30, note_message, NULL};
        Rounds *r = rounds_create(&options, 100);
        sents = 0;
        for (int g = 0; g < 2; g++) {
            const char *name = g ? "g1" : "g0";
            begin_join(r, name, 1, 4, 3, 100.2);
            make_offer(r, name, 1, waits[i], 100.2);
            end_join(r, name, 1, 100.2);
        }
        hold(r, "g0", "g1", 100.2);
        hold(r, "g1", "g0", 100.2);
        rounds_tick(r, 100.9);
        assert_null(last_sent("g0", MESSAGE_CLOSE));
        rounds_tick(r, 101.1);
        assert_non_null(last_sent("g0", MESSAGE_CLOSE));
        rounds_free(r);
    }
}

// Trainers add up the tokens of a round.
static void test_tokens_are_bounded(void **state) {
    static Message m;
    Rounds *r = quiet_rounds();
    join(r, "g0", 1, 4, 100);
    message_clear(&m, MESSAGE_OFFER);
    m.offers = 1;
    m.offer[0] = (Offer){.incarnation = 1, .number = 1, .tokens = INT64_MAX / 4, .bytes = 1, .hash = 1};
    message_name(m.offer[0].name, "g0");
    tell(r, "g0", 1, &m, 100);
    assert_null(last_sent("g0", MESSAGE_CLOSE));
    begin_join(r, "g0", 1, 4, 1, 101);
    m.kind = MESSAGE_CLOSE;
    m.round = 5;
    m.chain = chain_next(5, 5, m.offer, 1);
    tell(r, "g0", 1, &m, 101);
    end_join(r, "g0", 1, 101);
    make_numbered_offer(r, "g0", 1, 2, 0, 101);
    const Message *close = last_sent("g0", MESSAGE_CLOSE);
    assert_int_equal(close->round, 5);
    assert_int_equal(close->offer[0].number, 2);
    rounds_free(r);
}

// Groups connect to the addresses of others, so these must not be files or sockets of theirs.
static void test_addresses_are_tcp(void **state) {
    const char *const addresses[] = {"tcp://10.0.0.1:5000", "ipc:///tmp/socket", "inproc://zeromq.zap.01"};
    for (int i = 0; i < 3; i++) {
        Rounds *r = quiet_rounds();
        join(r, "g1", 1, 4, 100);
        hello_with(r, "g0", grace, addresses[i], 100);
        assert_string_equal(last_sent("g1", MESSAGE_PEER)->address, i ? "" : addresses[0]);
        rounds_free(r);
    }
}

// The rendezvous itself was frozen, e.g. with the group whose process serves it. No group was
// silent.
static void test_a_frozen_rendezvous_removes_no_groups(void **state) {
    Rounds *r = quiet_rounds();
    join(r, "g0", 1, 4, 100);
    join(r, "g1", 1, 4, 100);
    for (int i = 0; i < 20; i++) rounds_tick(r, 100 + 0.05 * i);
    beat(r, "g0", 1, 200);
    assert_true(rounds_joined(r, "g1"));
    for (double now = 200; now < 229; now += 0.5) beat(r, "g0", 1, now);
    assert_true(rounds_joined(r, "g1"));
    for (double now = 229; now < 231; now += 0.5) beat(r, "g0", 1, now);
    assert_false(rounds_joined(r, "g1"));
    rounds_free(r);
}

// A round that counted an offer was lost with the groups that had taken it. The group offers the
// same progress again.
static void test_an_offer_of_a_lost_round_counts_again(void **state) {
    static Message m;
    Rounds *r = quiet_rounds();
    join(r, "g0", 1, 4, 100);
    make_offer(r, "g0", 1, 0, 100);
    assert_int_equal(last_sent("g0", MESSAGE_CLOSE)->round, 5);
    want(r, "g0", 1, 4, 101);
    assert_non_null(last_sent("g0", MESSAGE_KEEP));
    message_clear(&m, MESSAGE_STATE);
    m.round = 4;
    m.chain = 5;
    tell(r, "g0", 1, &m, 102);
    sents = 0;
    make_numbered_offer(r, "g0", 1, 2, 0, 102);
    assert_non_null(last_sent("g0", MESSAGE_CLOSE));
    assert_int_equal(last_sent("g0", MESSAGE_CLOSE)->offer[0].number, 2);
    rounds_free(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_round_needs_a_second_holder),
        cmocka_unit_test(test_a_round_closes_while_offers_are_renewed),
        cmocka_unit_test(test_a_slow_offer_counts_later),
        cmocka_unit_test(test_a_restart_continues_the_grace_period),
        cmocka_unit_test(test_all_groups_rejoin),
        cmocka_unit_test(test_a_reset_follows_the_welcome),
        cmocka_unit_test(test_a_group_that_was_cut_off_waits),
        cmocka_unit_test(test_trained_state_wins),
        cmocka_unit_test(test_a_lost_group_may_come_back),
        cmocka_unit_test(test_a_state_that_fails_is_served_again),
        cmocka_unit_test(test_a_grace_period_has_an_end),
        cmocka_unit_test(test_an_offer_of_a_lost_round_counts_again),
        cmocka_unit_test(test_long_waits_leave_time_to_rejoin),
        cmocka_unit_test(test_tokens_are_bounded),
        cmocka_unit_test(test_addresses_are_tcp),
        cmocka_unit_test(test_a_frozen_rendezvous_removes_no_groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
