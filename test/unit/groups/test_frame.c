// llmc/groups/frame.c, pulls.c and refusals.c: frames survive a round trip, every altered or cut
// frame is refused, replays are detected, and transfers in pieces resume.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "llmc/groups/frame.h"
#include "llmc/groups/pulls.h"
#include "llmc/groups/refusals.h"

static uint8_t frame[FRAME_BYTES + 1], piece[PIECE_BYTES];
static Message sent, received;

static void fill(void) {
    message_clear(&sent, MESSAGE_CLOSE);
    message_name(sent.from, "berlin");
    message_name(sent.to, "a");
    sent.run = 1;
    sent.session = 2;
    sent.sequence = 3;
    sent.chunk = 4;
    sent.round = 5;
    sent.incarnation = UINT64_MAX;
    sent.chain = 6;
    sent.hash = 7;
    sent.bytes = INT64_MAX;
    sent.tokens = 8;
    sent.iteration = 9;
    sent.rate = 0.1;
    sent.flags = 10;
    sent.groups = 11;
    message_text(&sent, "two\nlines\x7f");
    sent.offers = 2;
    for (int i = 0; i < 2; i++) {
        message_name(sent.offer[i].name, i ? "tokyo" : "berlin");
        sent.offer[i].incarnation = (uint64_t)(12 + i);
        sent.offer[i].number = 13 + i;
        sent.offer[i].after = 12 + i;
        sent.offer[i].tokens = 14 + i;
        sent.offer[i].bytes = 15 + i;
        sent.offer[i].hash = (uint64_t)(16 + i);
    }
    memset(piece, 0xA5, sizeof piece);
    sent.data = piece;
    sent.data_bytes = 3;
}

static void frames_survive_a_round_trip(void **state) {
    const char *why = NULL;
    fill();
    size_t bytes = frame_write(&sent, frame);
    assert_true(frame_read(frame, bytes, &received, &why));
    assert_null(why);
    assert_int_equal(received.kind, MESSAGE_CLOSE);
    assert_string_equal(received.from, "berlin");
    assert_string_equal(received.to, "a");
    assert_true(received.run == 1 && received.session == 2 && received.sequence == 3 && received.chunk == 4);
    assert_true(received.round == 5 && received.incarnation == UINT64_MAX && received.chain == 6);
    assert_true(received.hash == 7 && received.bytes == INT64_MAX && received.tokens == 8);
    assert_true(received.iteration == 9 && received.rate == 0.1 && received.flags == 10 &&
                received.groups == 11);
    assert_string_equal(received.text, "two?lines?");  // always one line of a log
    assert_int_equal(received.offers, 2);
    assert_memory_equal(received.offer, sent.offer, 2 * sizeof(Offer));
    assert_int_equal(received.data_bytes, 3);
    assert_memory_equal(received.data, piece, 3);
    sent.data_bytes = PIECE_BYTES;  // the largest frame
    sent.offers = MAX_GROUPS;
    for (int i = 0; i < MAX_GROUPS; i++) sent.offer[i] = sent.offer[1];
    memset(sent.text, 'x', TEXT_BYTES - 1);
    memset(sent.address, 'y', ADDRESS_BYTES - 1);
    bytes = frame_write(&sent, frame);
    assert_true(bytes <= FRAME_BYTES && frame_read(frame, bytes, &received, &why));
}

static void altered_frames_are_refused(void **state) {
    const char *why;
    fill();
    size_t bytes = frame_write(&sent, frame);
    for (size_t i = 0; i < bytes; i++) {
        for (int bit = 0; bit < 8; bit++) {
            frame[i] ^= (uint8_t)(1 << bit);
            assert_false(frame_read(frame, bytes, &received, &why));
            assert_non_null(why);
            assert_int_equal(received.kind, MESSAGE_KINDS);
            frame[i] ^= (uint8_t)(1 << bit);
        }
    }
    for (size_t cut = 0; cut < bytes; cut++) assert_false(frame_read(frame, cut, &received, &why));
    assert_false(frame_read(frame, bytes + 1, &received, &why));
    assert_false(frame_read(frame, FRAME_BYTES + 1, &received, &why));
    assert_string_equal(why, "too long");
    assert_true(frame_read(frame, bytes, &received, &why));
}

// Fields with a valid hash and invalid contents.
static void invalid_contents_are_refused(void **state) {
    const struct {
        size_t at;
        uint8_t value;
        const char *why;
    } cases[] = {
        {4, 9, "another version of the protocol"},
        {6, 0, "an unknown kind"},
        {6, MESSAGE_KINDS, "an unknown kind"},
        {35, 1, "an invalid chunk"},
        {48, ' ', "an invalid name"},
        {48, '.', "an invalid name"},
        {60, 'x', "an invalid name"},
        {83, 1, "not padded with zeros"},
        {FRAME_HEADER_BYTES + 7, 0x80, "a negative count"},
        {FRAME_HEADER_BYTES + 63, 0xFF, "an invalid number"},
        {FRAME_HEADER_BYTES + 73, 0xFF, "a text that is too long"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *why = NULL;
        fill();
        size_t bytes = frame_write(&sent, frame);
        frame[cases[i].at] = cases[i].value;
        frame_seal(frame, bytes);
        assert_false(frame_read(frame, bytes, &received, &why));
        assert_string_equal(why, cases[i].why);
    }
    const char *why = NULL;
    fill();
    sent.kind = MESSAGE_GET;  // needs exactly one offer
    assert_false(frame_read(frame, frame_write(&sent, frame), &received, &why));
    assert_string_equal(why, "without its offer");
}

static void names(void **state) {
    assert_true(name_valid("a") && name_valid("site-1_b.C") &&
                name_valid("12345678901234567890123456789012"));
    const char *bad[] = {"",        ".",   "../x", "-x",
                         "a/b",     "a b", "a\n",  "123456789012345678901234567890123",
                         "\xc3\xa4"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) assert_false(name_valid(bad[i]));
}

static void replays_are_detected(void **state) {
    FrameOrder order = {0, 0};
    message_clear(&sent, MESSAGE_BEAT);
    sent.session = 5;
    sent.sequence = 1;
    assert_false(frame_in_order(&order, &sent, false));  // no greeting yet
    assert_true(frame_in_order(&order, &sent, true));
    assert_false(frame_in_order(&order, &sent, true));
    sent.sequence = 3;
    assert_true(frame_in_order(&order, &sent, false));
    sent.sequence = 2;
    assert_false(frame_in_order(&order, &sent, false));
    sent.session = 6;
    assert_false(frame_in_order(&order, &sent, false));
    assert_true(frame_in_order(&order, &sent, true));
}

static void refusals_are_printed_once_a_minute(void **state) {
    Refusals r = {0};
    char line[200];
    assert_true(refusal_line(&r, 100, "a", "why", line, sizeof line));
    assert_string_equal(line, "refused a: why");
    for (int i = 0; i < 1000; i++) assert_false(refusal_line(&r, 101, "a", "why", line, sizeof line));
    assert_true(refusal_line(&r, 102, "b", "why", line, sizeof line));
    assert_true(refusal_line(&r, 161, "a", "why", line, sizeof line));
    assert_string_equal(line, "refused a: why (1000 more)");
    for (int i = 0; i < 100; i++) {
        refusal_news(&r, i % 2 ? "one" : "two");
        refusal_news(&r, i % 2 ? "one" : "two");
    }
    int lines = 0;
    while (refusal_next(&r)) lines++;
    assert_int_equal(lines, NEWS_LINES);
    refusal_free(&r);
}

// ---- transfers ----

static struct {
    int64_t asked[1000], done, complete;
    int count;
    bool refuse, urgent;
    uint64_t hash;
} transfer;

static bool get(void *context, const Pull *pull, int64_t offset) {
    if (transfer.refuse) return false;
    transfer.asked[transfer.count++] = offset;
    return true;
}

static void done(void *context, const Pull *pull, bool complete) {
    transfer.done++;
    transfer.complete += complete;
    transfer.hash = complete ? XXH3_64bits(pull->payload->data, (size_t)pull->payload->bytes) : 0;
}

static bool urgent(void *context, const Pull *pull) { return transfer.urgent; }

static Pulls pulls;
static uint8_t *content;
enum { CONTENT = 200 * PIECE_BYTES + 5 };

static Offer begin(const char *owner, bool is_state) {
    Offer offer = {.incarnation = 1, .number = 2, .bytes = CONTENT, .hash = XXH3_64bits(content, CONTENT)};
    message_name(offer.name, owner);
    pulls_begin(&pulls, 0, is_state, &offer, 0);
    return offer;
}

static void answer(const Offer *offer, bool is_state, int64_t offset, double now) {
    int64_t left = CONTENT - offset;
    message_clear(&received, MESSAGE_DATA);
    message_name(received.from, offer->name);
    received.flags = is_state ? FLAG_STATE : 0;
    received.offers = 1;
    received.offer[0] = *offer;
    received.bytes = offset;
    received.data = content + offset;
    received.data_bytes = (uint32_t)(left < PIECE_BYTES ? left : PIECE_BYTES);
    pulls_receive(&pulls, &received, now);
}

static int set_up(void **state) {
    memset(&transfer, 0, sizeof transfer);
    pulls = (Pulls){.get = get, .done = done, .urgent = urgent};
    content = (uint8_t *)xmalloc(CONTENT, "content");
    for (int64_t i = 0; i < CONTENT; i++) content[i] = (uint8_t)(i * 7 + i / PIECE_BYTES);
    return 0;
}

static int tear_down(void **state) {
    pulls_free(&pulls);
    free(content);
    return 0;
}

static void transfers_have_a_window(void **state) {
    Offer offer = begin("a", false);
    pulls_step(&pulls, 0);
    assert_int_equal(transfer.count, PULL_WINDOW);  // a frozen sender costs no more
    pulls_step(&pulls, 1);
    assert_int_equal(transfer.count, PULL_WINDOW);
    for (int i = 0; i < transfer.count; i++) {
        answer(&offer, false, transfer.asked[i], 2);
        answer(&offer, false, transfer.asked[i], 2);  // twice: ignored
        pulls_step(&pulls, 2);
    }
    assert_int_equal(transfer.complete, 1);
    assert_true(transfer.hash == offer.hash && transfer.count == 201 && pulls.count == 0);
    assert_int_equal(pulls.bytes, CONTENT);
}

// Pieces are asked for again after 10 s, or 60 s while the owner sends pieces of other payloads.
static void pieces_are_asked_for_again(void **state) {
    begin("a", false);
    pulls_step(&pulls, 0);
    Offer other = begin("a", true);
    for (int second = 1; second < 60; second++) {
        answer(&other, true, second * (int64_t)PIECE_BYTES, second);
        pulls_step(&pulls, second);
    }
    assert_int_equal(transfer.count, PULL_WINDOW);
    pulls_step(&pulls, 61);
    assert_int_equal(transfer.count, 2 * PULL_WINDOW);
    pulls_step(&pulls, 70);
    assert_int_equal(transfer.count, 2 * PULL_WINDOW);
    pulls_step(&pulls, 72);
    assert_int_equal(transfer.count, 3 * PULL_WINDOW);
}

static void transfers_resume(void **state) {
    Offer offer = begin("a", true);
    pulls_step(&pulls, 0);
    for (int i = 0; i < 50; i++) answer(&offer, true, transfer.asked[i], 0);
    Offer other = begin("b", true);  // the same state from another group
    transfer.count = 0;
    for (int step = 0; step < 300 && !transfer.done; step++) {
        pulls_step(&pulls, 1);
        for (int i = 0; i < transfer.count; i++) answer(&other, true, transfer.asked[i], 1);
        assert_true(transfer.done || transfer.asked[0] >= 50 * PIECE_BYTES);
        transfer.count = 0;
    }
    assert_true(transfer.complete == 1 && transfer.hash == other.hash);
}

static void transfers_end(void **state) {
    Offer offer = begin("a", false);
    pulls_step(&pulls, 0);
    content[CONTENT / 2] ^= 1;  // corrupted at the sender
    int count = transfer.count;
    for (int i = 0; i < count; i++) answer(&offer, false, transfer.asked[i], 0);
    pulls_step(&pulls, 0);
    for (int i = count; i < transfer.count; i++) answer(&offer, false, transfer.asked[i], 0);
    assert_true(transfer.done == 1 && transfer.complete == 0 && pulls.count == 0);
    content[CONTENT / 2] ^= 1;
    begin("a", false);
    transfer.count = 0;
    pulls_step(&pulls, 0);
    pulls_step(&pulls, 11);  // asked again
    assert_int_equal(transfer.count, 2 * PULL_WINDOW);
    message_clear(&received, MESSAGE_GONE);
    message_name(received.from, "b");  // not the owner
    received.offers = 1;
    received.offer[0] = offer;
    pulls_receive(&pulls, &received, 12);
    assert_int_equal(transfer.done, 1);
    message_name(received.from, "a");
    pulls_receive(&pulls, &received, 12);
    assert_true(transfer.done == 2 && transfer.complete == 0);
    begin("a", false);
    pulls_step(&pulls, 1);
    transfer.urgent = true;
    pulls_step(&pulls, 2);
    assert_int_equal(pulls.count, 1);
    pulls_step(&pulls, 4);  // a closed round waits for it
    assert_true(transfer.done == 3 && pulls.count == 0);
}

static void invalid_pieces_are_ignored(void **state) {
    Offer offer = begin("a", false);
    pulls_step(&pulls, 0);
    answer(&offer, false, 0, 0);
    message_clear(&received, MESSAGE_DATA);
    message_name(received.from, "a");
    received.offers = 1;
    received.offer[0] = offer;
    received.data = content;
    const struct {
        int64_t offset;
        uint32_t bytes;
    } bad[] = {{1, PIECE_BYTES},
               {PIECE_BYTES, 1},
               {201 * (int64_t)PIECE_BYTES, 5},
               {INT64_MAX, 5},
               {200 * (int64_t)PIECE_BYTES, 6}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        received.bytes = bad[i].offset;
        received.data_bytes = bad[i].bytes;
        pulls_receive(&pulls, &received, 0);
    }
    assert_int_equal(pulls.pull[0]->received, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frames_survive_a_round_trip),
        cmocka_unit_test(altered_frames_are_refused),
        cmocka_unit_test(invalid_contents_are_refused),
        cmocka_unit_test(names),
        cmocka_unit_test(replays_are_detected),
        cmocka_unit_test(refusals_are_printed_once_a_minute),
        cmocka_unit_test_setup_teardown(transfers_have_a_window, set_up, tear_down),
        cmocka_unit_test_setup_teardown(pieces_are_asked_for_again, set_up, tear_down),
        cmocka_unit_test_setup_teardown(transfers_resume, set_up, tear_down),
        cmocka_unit_test_setup_teardown(transfers_end, set_up, tear_down),
        cmocka_unit_test_setup_teardown(invalid_pieces_are_ignored, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
