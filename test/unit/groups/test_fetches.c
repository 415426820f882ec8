// llmc/groups/fetches.c: the states of the next chunks are asked for while one arrives, as far as
// memory and the speed of the link allow.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/groups/fetches.h"

enum { CHUNKS = 5, PIECES = 100, STATE = PIECES * PIECE_BYTES };

static Pulls pulls;
static Fetch fetch[CHUNKS];
static int64_t bytes[CHUNKS];
static Message message;
static uint8_t piece[PIECE_BYTES];
static bool complete;

static bool get(void *context, const Pull *pull, int64_t offset) { return true; }
static void done(void *context, const Pull *pull, bool good) { complete = true; }

static int set_up(void **state) {
    pulls = (Pulls){.get = get, .done = done};
    for (int c = 0; c < CHUNKS; c++) {
        fetch[c] = (Fetch){.active = true, .ahead = true, .round = -1};
        bytes[c] = STATE;
    }
    fetch[0].ahead = complete = false;
    return 0;
}

static int tear_down(void **state) {
    pulls_free(&pulls);
    return 0;
}

static bool is_due(int chunk, double now) { return fetch_due(fetch, bytes, CHUNKS, chunk, &pulls, now); }

static void ask(int chunk, double now) {
    assert_true(is_due(chunk, now));
    fetch[chunk].begun = true;
    fetch[chunk].asked = now;
    assert_false(is_due(chunk, now));
}

static Offer state_of(int chunk) {
    Offer offer = {.number = 1, .bytes = bytes[chunk]};
    message_name(offer.name, "b");
    return offer;
}

static void serve(int chunk, double now) {
    Offer offer = state_of(chunk);
    pulls_begin(&pulls, chunk, true, &offer, now);
}

// Pieces [first, end) of a chunk's state arrive.
static void arrive(int chunk, int first, int end, double now) {
    for (int i = first; i < end; i++) {
        message_clear(&message, MESSAGE_DATA);
        message.chunk = chunk;
        message.flags = FLAG_STATE;
        message_name(message.from, "b");
        message.offers = 1;
        message.offer[0] = state_of(chunk);
        message.bytes = (int64_t)i * PIECE_BYTES;
        message.data = piece;
        message.data_bytes = PIECE_BYTES;
        pulls_receive(&pulls, &message, now);
    }
}

static void the_first_state_is_asked_for_at_once(void **state) {
    ask(0, 100);
    for (int c = 1; c < CHUNKS; c++) assert_false(is_due(c, 100));
}

// 10 pieces a second: the next state is asked for when 100 pieces are missing.
static void the_next_states_follow_while_one_arrives(void **state) {
    ask(0, 100);
    assert_false(is_due(1, 101));
    serve(0, 101);
    assert_false(is_due(1, 102));  // no pieces yet
    arrive(0, 0, 10, 102);
    assert_int_equal(pulls_received(&pulls, 0), 10 * PIECE_BYTES);
    ask(1, 102);
    assert_false(is_due(2, 102));  // it would have to wait
    arrive(0, 10, 90, 110);
    assert_false(is_due(2, 110));
    arrive(0, 90, 99, 111);
    assert_false(complete);
    assert_false(is_due(2, 111));
    arrive(0, 99, 100, 111);
    assert_true(complete);
    fetch[0].round = 1;
    ask(2, 111);
    assert_false(is_due(3, 111));
}

static void slow_links_wait_for_the_end_of_a_state(void **state) {
    ask(0, 100);
    serve(0, 100);
    arrive(0, 0, 50, 150);
    assert_false(is_due(1, 150));
    arrive(0, 50, 89, 189);
    assert_false(is_due(1, 189));
    arrive(0, 89, 90, 190);
    ask(1, 190);
}

// States that have arrived and that the trainer has not taken use memory, too.
static void memory_is_bounded(void **state) {
    for (int c = 1; c < CHUNKS; c++) bytes[c] = AHEAD_BYTES / 3;
    ask(0, 100);
    serve(0, 100);
    arrive(0, 0, 99, 100.001);
    for (int c = 1; c < 4; c++) ask(c, 100.001);
    assert_false(is_due(4, 100.001));
    fetch[1].round = 1;
    assert_false(is_due(4, 100.001));
    fetch[0].active = false;
    fetch[1] = (Fetch){.active = true, .begun = true, .round = 1};  // the trainer takes it
    ask(4, 100.001);
}

static void two_large_states_are_fetched_ahead(void **state) {
    for (int c = 1; c < CHUNKS; c++) bytes[c] = 2 * (int64_t)AHEAD_BYTES;
    ask(0, 100);
    serve(0, 100);
    arrive(0, 0, 99, 100.001);
    ask(1, 100.001);
    ask(2, 100.001);
    assert_false(is_due(3, 100.001));
}

static void requests_are_repeated(void **state) {
    ask(0, 100);
    assert_false(is_due(0, 104));
    assert_true(is_due(0, 105));
    serve(0, 104);
    assert_false(is_due(0, 123));
    assert_true(is_due(0, 124));
    fetch[0].round = 1;
    assert_false(is_due(0, 130));
    fetch[4].active = false;
    assert_false(is_due(4, 200));
}

// Another request would make the other group serve a newer state, and the transfer would begin
// again. Over slow links, large states would never be complete.
static void a_state_that_arrives_is_not_asked_for_again(void **state) {
    ask(0, 100);
    serve(0, 100);
    fetch[1].begun = true;  // the same group sends it after chunk 0
    fetch[1].asked = 100;
    serve(1, 100);
    for (int i = 0; i < 40; i++) {
        arrive(0, i, i + 1, 101 + 2 * i);
        assert_false(is_due(0, 102 + 2 * i));
        assert_false(is_due(1, 102 + 2 * i));
    }
    assert_false(is_due(0, 198));
    assert_true(is_due(0, 199));  // 20 s after the last piece
    assert_true(is_due(1, 199));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_first_state_is_asked_for_at_once, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_next_states_follow_while_one_arrives, set_up, tear_down),
        cmocka_unit_test_setup_teardown(slow_links_wait_for_the_end_of_a_state, set_up, tear_down),
        cmocka_unit_test_setup_teardown(memory_is_bounded, set_up, tear_down),
        cmocka_unit_test_setup_teardown(two_large_states_are_fetched_ahead, set_up, tear_down),
        cmocka_unit_test_setup_teardown(requests_are_repeated, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_state_that_arrives_is_not_asked_for_again, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
