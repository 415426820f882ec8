// Tests extracting a string from a JSON line: values and errors agree with Python's json.loads, and
// damaged lines cause no memory errors (checked by sanitizers).
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dev/lib/jsonl.h"

typedef struct Found {
    JsonlResult result;
    JsonlText is;
} Found;

static Found find(JsonText *json, const char *line, size_t bytes) {
    Found f = {0};
    // Copies the line to a block of exactly its size, so sanitizers detect reads past the end.
    char *copy = malloc(bytes ? bytes : 1);
    memcpy(copy, line, bytes);
    static char text[4096];
    f.result = jsonl_find(json, copy, bytes, "text", &f.is);
    if (f.result == JSONL_FOUND) {
        assert_true(f.is.bytes <= sizeof text);
        memcpy(text, f.is.text, f.is.bytes);
        f.is.text = text;
    }
    free(copy);
    return f;
}

static void check_text(JsonText *json, const char *line, const char *expected, size_t bytes,
                       int64_t replaced) {
    Found f = find(json, line, strlen(line));
    if (f.result != JSONL_FOUND) fail_msg("%s: result %d", line, (int)f.result);
    assert_int_equal(f.is.bytes, bytes);
    assert_memory_equal(f.is.text, expected, bytes);
    assert_int_equal(f.is.replaced, replaced);
}

#define TEXT(line, expected) check_text(&json, line, expected, sizeof expected - 1, 0)

static void strings_are_extracted(void **state) {
    JsonText json = {0};
    TEXT("{\"text\":\"abc\"}", "abc");
    TEXT(" \t{ \"text\" : \"\" } \r", "");
    TEXT("{\"a\":1,\"text\":\"x\",\"b\":[]}", "x");
    TEXT("{\"meta\":{\"text\":\"inner\"},\"text\":\"outer\"}", "outer");
    TEXT("{\"text\":\"outer\",\"meta\":{\"text\":\"inner\"}}", "outer");
    TEXT("{\"meta\":[{\"text\":\"inner\"}, \"text\"],\"text\":\"outer\"}", "outer");
    TEXT("{\"text\":\"first\",\"text\":\"last\"}", "last");
    TEXT("{\"text\":null,\"text\":\"last\"}", "last");
    TEXT("{\"te\\u0078t\":\"by escaped key\"}", "by escaped key");
    TEXT("{\"text\\u0000\":1,\"text\":\"y\"}", "y");
    TEXT("{\"n\":[0,-0,1.5,-2e10,3E-7,4e+2,true,false,null,NaN,Infinity,-Infinity],\"text\":\"z\"}", "z");
    json_text_free(&json);
}

static void escapes_are_decoded(void **state) {
    JsonText json = {0};
    TEXT("{\"text\":\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"}", "\"\\/\b\f\n\r\t");
    TEXT("{\"text\":\"a\\u0041\\u00e9\\u4E2d\\u0000b\"}", "aA\u00e9\u4e2d\0b");
    TEXT("{\"text\":\"\\ud83d\\ude00 \\uD83D\\uDE00\"}", "\U0001F600 \U0001F600");
    TEXT("{\"text\":\"\u00e9 raw \\n\"}", "\u00e9 raw \n");
    check_text(&json, "{\"text\":\"\\ud83d\"}", "\ufffd", 3, 1);
    check_text(&json, "{\"text\":\"\\ude00x\"}", "\ufffdx", 4, 1);
    check_text(&json, "{\"text\":\"\\ud83d\\n\"}", "\ufffd\n", 4, 1);
    check_text(&json, "{\"text\":\"\\ud83d\\u0041\"}", "\ufffdA", 4, 1);
    check_text(&json, "{\"text\":\"\\ude00\\ud83d\"}", "\ufffd\ufffd", 6, 2);
    check_text(&json, "{\"text\":\"\\ud83d\\ud83d\\ude00\"}", "\ufffd\U0001F600", 7, 1);
    json_text_free(&json);
}

static void other_lines_are_classified(void **state) {
    JsonText json = {0};
    static const struct {
        const char *line;
        JsonlResult result;
    } cases[] = {
        {"{}", JSONL_NO_KEY},
        {"{\"Text\":\"x\"}", JSONL_NO_KEY},
        {"{\"a\":{\"text\":\"x\"}}", JSONL_NO_KEY},
        {"{\"text\":1}", JSONL_NOT_STRING},
        {"{\"text\":\"x\",\"text\":[]}", JSONL_NOT_STRING},
        {"", JSONL_INVALID},
        {"   ", JSONL_INVALID},
        {"null", JSONL_INVALID},
        {"[]", JSONL_INVALID},
        {"\"text\"", JSONL_INVALID},
        {"{", JSONL_INVALID},
        {"{\"text\"}", JSONL_INVALID},
        {"{\"text\":}", JSONL_INVALID},
        {"{\"text\":\"x\"", JSONL_INVALID},
        {"{\"text\":\"x}", JSONL_INVALID},
        {"{\"text\":\"x\"}}", JSONL_INVALID},
        {"{\"text\":\"x\"} {}", JSONL_INVALID},
        {"{\"text\":\"x\",}", JSONL_INVALID},
        {"{,\"text\":\"x\"}", JSONL_INVALID},
        {"{\"text\":\"x\" \"b\":1}", JSONL_INVALID},
        {"{'text':'x'}", JSONL_INVALID},
        {"{text:\"x\"}", JSONL_INVALID},
        {"{\"text\":\"\\x\"}", JSONL_INVALID},
        {"{\"text\":\"\\u12g4\"}", JSONL_INVALID},
        {"{\"text\":\"\\u123\"}", JSONL_INVALID},
        {"{\"text\":\"a\tb\"}", JSONL_INVALID},
        {"{\"a\":01,\"text\":\"x\"}", JSONL_INVALID},
        {"{\"a\":1.,\"text\":\"x\"}", JSONL_INVALID},
        {"{\"a\":.5,\"text\":\"x\"}", JSONL_INVALID},
        {"{\"a\":+1,\"text\":\"x\"}", JSONL_INVALID},
        {"{\"a\":1e,\"text\":\"x\"}", JSONL_INVALID},
        {"{\"a\":-,\"text\":\"x\"}", JSONL_INVALID},
        {"{\"a\":[1,],\"text\":\"x\"}", JSONL_INVALID},
        {"{\"a\":[1 2],\"text\":\"x\"}", JSONL_INVALID},
        {"{\"a\":[1},\"text\":\"x\"}", JSONL_INVALID},
        {"{\"a\":tru,\"text\":\"x\"}", JSONL_INVALID},
        {"\xef\xbb\xbf{\"text\":\"x\"}", JSONL_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Found f = find(&json, cases[i].line, strlen(cases[i].line));
        if (f.result != cases[i].result) fail_msg("%s: result %d", cases[i].line, (int)f.result);
        if (f.result == JSONL_INVALID) assert_in_range(f.is.column, 1, strlen(cases[i].line) + 1);
    }
    Found f = find(&json, "{\"text\":\"a\tb\"}", 14);
    assert_int_equal(f.is.column, 11);
    assert_string_equal(f.is.why, "control character in a string");
    json_text_free(&json);
}

// Reads {"a":[[...]],"text":"x"} with `depth` nested brackets.
static JsonlResult nested(JsonText *json, size_t depth) {
    char *line = malloc(2 * depth + 32);
    strcpy(line, "{\"a\":");
    memset(line + 5, '[', depth);
    memset(line + 5 + depth, ']', depth);
    strcpy(line + 5 + 2 * depth, ",\"text\":\"x\"}");
    JsonlResult result = find(json, line, strlen(line)).result;
    free(line);
    return result;
}

static void nesting_is_limited(void **state) {
    JsonText json = {0};
    assert_int_equal(nested(&json, 1000), JSONL_FOUND);
    assert_int_equal(nested(&json, 1001), JSONL_INVALID);
    assert_int_equal(nested(&json, 1000000), JSONL_INVALID);
    json_text_free(&json);
}

static void damaged_lines_are_safe(void **state) {
    JsonText json = {0};
    const char *line =
        "{\"id\": -12.5e+3, \"meta\": {\"a\": [true, null, \"\\u00e9\\n\"], \"text\": "
        "\"no\"}, \"te\\u0078t\": \"\\ud83d\\ude00 caf\\u00e9\", \"z\": {}}";
    size_t length = strlen(line);
    for (size_t cut = 0; cut < length; cut++) assert_int_equal(find(&json, line, cut).result, JSONL_INVALID);
    uint64_t seed = 1;
    for (int n = 0; n < 100000; n++) {
        char damaged[256];
        memcpy(damaged, line, length);
        for (int hit = 0; hit < 1 + n % 3; hit++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            damaged[(seed >> 40) % length] = "\"\\{}[],:u0e-. \n\xff"[(seed >> 33) % 17];
        }
        Found f = find(&json, damaged, length);
        assert_true(f.result == JSONL_INVALID || f.is.bytes <= length);
    }
    json_text_free(&json);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strings_are_extracted),      cmocka_unit_test(escapes_are_decoded),
        cmocka_unit_test(other_lines_are_classified), cmocka_unit_test(nesting_is_limited),
        cmocka_unit_test(damaged_lines_are_safe),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
