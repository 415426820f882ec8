// llmc/groups/relay.c: a piece that several groups need is requested once, kept for the others, and
// requested again by a group that asks again. Memory is bounded.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "llmc/groups/relay.h"

static Relay relay;
static Message message;
static uint8_t bytes[PIECE_BYTES];

static int tear_down(void **state) {
    relay_free(&relay);
    memset(&relay, 0, sizeof relay);
    return 0;
}

// A request to group a, or its answer.
static const Message *piece(MessageKind kind, int64_t offset) {
    message_clear(&message, kind);
    message_name(message.to, "a");
    message.offers = 1;
    message.offer[0] = (Offer){.number = 3};
    message_name(message.offer[0].name, "a");
    message.bytes = offset;
    bytes[0] = (uint8_t)(offset / PIECE_BYTES);
    message.data = bytes;
    message.data_bytes = kind == MESSAGE_DATA ? 10 : 0;
    return &message;
}

static RelayAction ask(int64_t offset, int group, double now) {
    const RelayPiece *found = NULL;
    RelayAction action = relay_request(&relay, piece(MESSAGE_GET, offset), group, now, &found);
    if (action == RELAY_ANSWER) {
        assert_int_equal(found->bytes, 10);
        assert_int_equal(found->data[0], (uint8_t)(offset / PIECE_BYTES));
    }
    return action;
}

static void pieces_are_requested_once(void **state) {
    assert_int_equal(ask(0, 1, 0), RELAY_FORWARD);
    assert_int_equal(ask(0, 2, 0), RELAY_WAIT);
    assert_int_equal(ask(PIECE_BYTES, 2, 0), RELAY_FORWARD);
    assert_int_equal(ask(0, 1, 1), RELAY_FORWARD);  // asks again
    assert_int_equal(ask(0, 3, 9), RELAY_FORWARD);  // no answer for too long
    assert_true(relay_answer(&relay, piece(MESSAGE_DATA, 0), "a") == 0xE);
    assert_true(relay_answer(&relay, piece(MESSAGE_DATA, 0), "a") == 0);  // nobody asks for it
    assert_int_equal(ask(0, 4, 9), RELAY_ANSWER);
    assert_true(relay_answer(&relay, piece(MESSAGE_DATA, PIECE_BYTES), "b") == 0);  // not its owner
    assert_true(relay_answer(&relay, piece(MESSAGE_GONE, PIECE_BYTES), "a") == 4);
    assert_int_equal(ask(PIECE_BYTES, 2, 10), RELAY_FORWARD);
}

// Group b sends a piece whose hash makes up for the difference of the owners' names.
static void owners_differ(void **state) {
    assert_int_equal(ask(0, 1, 0), RELAY_FORWARD);
    piece(MESSAGE_DATA, 0);
    message.offer[0].hash ^= XXH3_64bits("a", 1) ^ XXH3_64bits("b", 1);
    assert_true(relay_answer(&relay, &message, "b") == 0);
    assert_int_equal(ask(0, 2, 0), RELAY_WAIT);
}

static void memory_is_bounded(void **state) {
    for (int64_t i = 0; i < 2 * RELAY_PIECES; i++) {
        assert_int_equal(ask(i * PIECE_BYTES, 0, 0), RELAY_FORWARD);
        assert_true(relay_answer(&relay, piece(MESSAGE_DATA, i * PIECE_BYTES), "a") == 1);
    }
    assert_int_equal(ask(0, 1, 0), RELAY_FORWARD);  // no longer kept
    assert_int_equal(ask((2 * RELAY_PIECES - 1) * (int64_t)PIECE_BYTES, 1, 0), RELAY_ANSWER);
    for (int64_t i = 0; i < 2 * RELAY_REQUESTS; i++) ask((4 * RELAY_PIECES + i) * PIECE_BYTES, 0, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(pieces_are_requested_once, tear_down),
        cmocka_unit_test_teardown(owners_differ, tear_down),
        cmocka_unit_test_teardown(memory_is_bounded, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
