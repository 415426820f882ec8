// Streamed text: a character is written when all of its bytes are known.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "dev/lib/text_stream.h"

// Returns the text written so far.
static void expect_written(FILE *out, const char *expected) {
    char text[256] = {0};
    long at = ftell(out);
    rewind(out);
    size_t bytes = fread(text, 1, sizeof text - 1, out);
    fseek(out, at, SEEK_SET);
    assert_string_equal(text, expected);
    assert_int_equal(bytes, strlen(expected));
}

static void characters_are_written_whole(void **state) {
    // Input bytes, and the output after each of them.
    static const struct {
        const char *bytes, *after[12];
    } texts[] = {
        {"a\xC3\xA4z", {"a", "a", "a\xC3\xA4", "a\xC3\xA4z"}},
        {"\xF0\x9F\x98\x80!", {"", "", "", "\xF0\x9F\x98\x80", "\xF0\x9F\x98\x80!"}},
        {"\xE2\x82z", {"", "", "\xEF\xBF\xBDz"}},      // interrupted by a letter
        {"\xFFz", {"\xEF\xBF\xBD", "\xEF\xBF\xBDz"}},  // not a lead byte
        {"\xC3\xC3\xA4", {"", "\xEF\xBF\xBD", "\xEF\xBF\xBD\xC3\xA4"}},
    };
    Error err;
    Tokenizer *bytes = tokenizer_open(&(TokenizerChoice){.type = TOKENIZER_BYTE}, &err);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        FILE *out = tmpfile();
        TextStream stream = {.tokenizer = bytes, .out = out};
        for (size_t at = 0; texts[i].bytes[at]; at++) {
            assert_true(text_stream_put(&stream, (unsigned char)texts[i].bytes[at]));
            expect_written(out, texts[i].after[at]);
        }
        fclose(out);
    }
    FILE *out = tmpfile();
    TextStream stream = {.tokenizer = bytes, .out = out};
    text_stream_put(&stream, 0);     // a zero byte
    text_stream_put(&stream, 0xE2);  // never completed
    text_stream_put(&stream, 0x82);
    expect_written(out, " ");
    assert_true(text_stream_end(&stream));
    expect_written(out, " \xEF\xBF\xBD");
    fclose(out);
    tokenizer_close(bytes);
}

static void spaces_at_the_start_are_dropped(void **state) {
    static const struct {
        const char *bytes, *text;
    } texts[] = {{" a b", "a b"}, {"  a", " a"}, {"a b", "a b"}, {"\xC3\xA4 b", "\xC3\xA4 b"}};
    Error err;
    Tokenizer *bytes = tokenizer_open(&(TokenizerChoice){.type = TOKENIZER_BYTE}, &err);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        FILE *out = tmpfile();
        TextStream stream = {.tokenizer = bytes, .out = out, .strip = 1};
        for (size_t at = 0; texts[i].bytes[at]; at++)
            assert_true(text_stream_put(&stream, (unsigned char)texts[i].bytes[at]));
        expect_written(out, texts[i].text);
        fclose(out);
    }
    tokenizer_close(bytes);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(characters_are_written_whole),
                                       cmocka_unit_test(spaces_at_the_start_are_dropped)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
