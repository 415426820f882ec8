// llmc/groups/ledger.c: offers that the trainer replaces after a round has closed with them, and
// offers that are announced again.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>

#include "llmc/groups/ledger.h"

static void no_network(void *context, Message *m) {}

static void offer(Ledger *l, int64_t tokens) {
    Payload *payload = payload_create(1);
    payload->data[0] = 1;
    ledger_offer(l, 0, tokens, payload, 1);
    payload_release(payload);
}

// A round closes with offer 1 while the trainer makes the next offer, which contains its tokens.
// The next is dropped, so that offer 1 remains the latest and counts once.
static void a_dropped_offer_has_no_number(void **state) {
    static Ledger l;
    static Message m;
    ledger_init(&l, "a", 3, 1, no_network, NULL);
    ledger_fetched(&l, 0, 0, 3);
    offer(&l, 100);
    const LedgerChunk *chunk = &l.chunk[0];
    assert_int_equal(chunk->number, 1);
    message_clear(&m, MESSAGE_CLOSE);
    m.round = 1;
    m.offers = 1;
    m.offer[0] = chunk->held[0].offer;
    m.chain = chain_next(chunk->chain, 1, m.offer, 1);
    ledger_receive(&l, &m);
    assert_int_equal(chunk->counted, 1);
    offer(&l, 200);
    assert_null(chunk->pending);
    assert_int_equal(chunk->number, 1);
    ledger_take(&l, 0);
    offer(&l, 100);
    assert_int_equal(chunk->number, 2);
    assert_int_equal(l.tokens_counted, 100);
    ledger_free(&l);
}

static void count_holds(void *context, Message *m) {
    if (m->kind == MESSAGE_HOLD) ++*(int *)context;
}

// A restarted rendezvous announces an offer when its owner has reported it. A group that has its
// payload already, and whose own report came before, must report it again; otherwise no round would
// contain the offer.
static void an_offer_that_is_announced_again_is_held(void **state) {
    static Ledger l;
    static Message m;
    int holds = 0;
    Payload *payload = payload_create(1);
    payload->data[0] = 1;
    ledger_init(&l, "a", 3, 1, count_holds, &holds);
    ledger_fetched(&l, 0, 0, 3);
    message_clear(&m, MESSAGE_OFFER);
    m.offers = 1;
    m.offer[0] = (Offer){.incarnation = 5, .number = 1, .tokens = 100, .bytes = 1, .hash = 1};
    message_name(m.offer[0].name, "b");
    ledger_receive(&l, &m);
    ledger_receive(&l, &m);
    assert_int_equal(holds, 0);  // nothing has arrived
    ledger_received(&l, 0, &m.offer[0], payload);
    assert_int_equal(holds, 1);
    ledger_receive(&l, &m);
    assert_int_equal(holds, 2);
    payload_release(payload);
    ledger_free(&l);
}

static void note_wait(void *context, Message *m) {
    if (m->kind == MESSAGE_OFFER) *(double *)context = m->rate;
}

static double reported_wait(Ledger *l, double now) {
    double *waited = (double *)l->context;
    *waited = -1;
    l->now = now;
    ledger_report(l);
    return *waited;
}

// An offer is reported with the seconds since the first one that has not counted, or since the last
// round without it.
static void waits_are_reported(void **state) {
    static Ledger l;
    static Message m;
    double waited = -1;
    ledger_init(&l, "a", 3, 1, note_wait, &waited);
    ledger_fetched(&l, 0, 0, 3);
    l.now = 100;
    offer(&l, 100);
    message_clear(&m, MESSAGE_OFFER);
    m.offers = 1;
    m.offer[0] = l.chunk[0].held[0].offer;
    ledger_receive(&l, &m);  // announced, so that another one can be
    l.now = 104;
    offer(&l, 200);
    assert_true(reported_wait(&l, 105) == 5);
    message_clear(&m, MESSAGE_CLOSE);
    m.round = 1;
    m.chain = chain_next(l.chunk[0].chain, 1, m.offer, 0);
    ledger_receive(&l, &m);  // without this group
    assert_true(reported_wait(&l, 107) == 2);
    const Held *own = &l.chunk[0].held[l.chunk[0].helds - 1];
    m.round = 2;
    m.offers = 1;
    m.offer[0] = own->offer;
    m.chain = chain_next(l.chunk[0].chain, 2, m.offer, 1);
    ledger_receive(&l, &m);
    ledger_take(&l, 0);
    ledger_take(&l, 0);
    l.now = 110;
    offer(&l, 50);
    assert_true(reported_wait(&l, 111) == 1);
    ledger_free(&l);
}

// Payloads of groups that have left are released, unless a closed round contains them. Otherwise
// memory would grow with every group that has been there.
static void offers_of_lost_groups_are_released(void **state) {
    static Ledger l;
    static Message m;
    Payload *payload = payload_create(1);
    payload->data[0] = 1;
    ledger_init(&l, "a", 3, 1, no_network, NULL);
    ledger_fetched(&l, 0, 0, 3);
    message_clear(&m, MESSAGE_OFFER);
    m.offers = 1;
    m.offer[0] = (Offer){.incarnation = 5, .number = 1, .tokens = 100, .bytes = 1, .hash = 1};
    for (int i = 0; i < 2; i++) {
        message_name(m.offer[0].name, i ? "c" : "b");
        ledger_receive(&l, &m);
        ledger_received(&l, 0, &m.offer[0], payload);
    }
    m.kind = MESSAGE_CLOSE;  // with the offer of c
    m.round = 1;
    m.chain = chain_next(3, 1, m.offer, 1);
    ledger_receive(&l, &m);
    assert_int_equal(l.chunk[0].helds, 2);
    ledger_left(&l, "b", 4);  // an earlier process
    assert_int_equal(l.chunk[0].helds, 2);
    ledger_left(&l, "b", 5);
    ledger_left(&l, "c", 5);
    assert_int_equal(l.chunk[0].helds, 1);
    bool missed;
    assert_non_null(ledger_next(&l, 0, &missed));
    ledger_take(&l, 0);
    assert_int_equal(l.chunk[0].helds, 0);
    assert_int_equal(payload->references, 1);
    payload_release(payload);
    ledger_free(&l);
}

static void announce(Ledger *l, Message *m) {
    message_clear(m, MESSAGE_OFFER);
    m->offers = 1;
    m->offer[0] = l->chunk[0].held[l->chunk[0].helds - 1].offer;
    ledger_receive(l, m);
}

static void reset(Ledger *l) {
    static Message m;
    message_clear(&m, MESSAGE_RESET);
    ledger_receive(l, &m);
}

// A group was frozen. Its first offer has counted in a round that it missed, while a newer one was
// open. The state that it fetches names the first one, so that only the rest is offered again.
static void a_fetched_state_says_what_has_counted(void **state) {
    static Ledger l;
    static Message m;
    ledger_init(&l, "a", 3, 1, no_network, NULL);
    ledger_fetched(&l, 0, 0, 3);
    offer(&l, 100);
    announce(&l, &m);
    Offer latest[2] = {{.incarnation = 5, .number = 7}, m.offer[0]};
    message_name(latest[0].name, "b");
    offer(&l, 200);
    reset(&l);
    Offer unknown = latest[1];
    unknown.number = INT64_MAX;  // would make all later offers void
    assert_null(ledger_contains(&l, 0, &unknown, 1));
    const Held *own = ledger_contains(&l, 0, latest, 2);
    assert_non_null(own);
    assert_int_equal(own->offer.number, 1);
    assert_int_equal(own->offer.tokens, 100);
    assert_non_null(own->payload);
    ledger_fetched(&l, 0, 9, 4);
    assert_int_equal(l.tokens_counted, 100);
    assert_int_equal(l.chunk[0].latests, 2);         // for groups that fetch the state from this one
    assert_null(ledger_contains(&l, 0, latest, 2));  // once
    ledger_fetched(&l, 0, 9, 4);
    offer(&l, 100);
    announce(&l, &m);
    assert_int_equal(m.offer[0].after, 1);
    assert_int_equal(l.chunk[0].helds, 1);  // earlier ones are not needed
    ledger_free(&l);
}

// The state is of a round before the one that counted the offer, which follows as a closed round.
static void an_offer_counts_after_the_fetched_state(void **state) {
    static Ledger l;
    static Message m, close;
    bool missed;
    ledger_init(&l, "a", 3, 1, no_network, NULL);
    ledger_fetched(&l, 0, 0, 3);
    offer(&l, 100);
    announce(&l, &m);
    reset(&l);
    assert_null(ledger_contains(&l, 0, NULL, 0));
    ledger_fetched(&l, 0, 9, 4);
    message_clear(&close, MESSAGE_CLOSE);
    close.round = 10;
    close.offers = 1;
    close.offer[0] = m.offer[0];
    close.chain = chain_next(4, 10, close.offer, 1);
    ledger_receive(&l, &close);
    assert_non_null(ledger_next(&l, 0, &missed));
    assert_true(ledger_own(&l, 0, &m.offer[0]));
    ledger_take(&l, 0);
    assert_false(ledger_own(&l, 0, &m.offer[0]));
    assert_int_equal(l.tokens_counted, 100);
    ledger_free(&l);
}

// The list of groups that have contributed is bounded. The one that did so first is left out.
static void many_groups_have_counted(void **state) {
    static Ledger l;
    static Offer latest[MAX_GROUPS + 2];
    ledger_init(&l, "a", 3, 1, no_network, NULL);
    for (int i = 0; i < MAX_GROUPS + 2; i++) {
        latest[i] = (Offer){.incarnation = 5, .number = i + 1};
        snprintf(latest[i].name, NAME_BYTES, "g%d", i % (MAX_GROUPS + 1));
    }
    ledger_contains(&l, 0, latest, MAX_GROUPS + 2);
    assert_int_equal(l.chunk[0].latests, MAX_GROUPS);
    assert_string_equal(l.chunk[0].latest[0].name, "g2");
    assert_string_equal(l.chunk[0].latest[MAX_GROUPS - 1].name, "g0");
    ledger_free(&l);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_dropped_offer_has_no_number),
                                       cmocka_unit_test(a_fetched_state_says_what_has_counted),
                                       cmocka_unit_test(an_offer_counts_after_the_fetched_state),
                                       cmocka_unit_test(many_groups_have_counted),
                                       cmocka_unit_test(offers_of_lost_groups_are_released),
                                       cmocka_unit_test(waits_are_reported),
                                       cmocka_unit_test(an_offer_that_is_announced_again_is_held)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
