// JSON lines: commas, escapes, numbers that parse to the same bits, names of non-finite values.
#include <cjson/cJSON.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/base/json_line.h"

static void assert_text(Text *text, const char *expected) {
    assert_string_equal(text->data, expected);
    assert_int_equal(text->length, strlen(expected));
    text_free(text);
    assert_null(text->data);
}

static void members(void **state) {
    Text json = json_begin("a\"b");
    json_integer(&json, "whole", -9007199254740993);  // not representable as a double
    json_bool(&json, "yes", true);
    json_open(&json, "timing");
    json_bool(&json, "no", false);
    json_text(&json, "text", "x\n\"y\"");
    json_close(&json);
    json_open(&json, "empty");
    json_close(&json);
    json_name(&json, "pair");
    text_add(&json, "[");
    json_value(&json, 1);
    text_add(&json, ",");
    json_value(&json, NAN);
    text_add(&json, "]");
    json_number(&json, "last", 0.5);
    assert_text(&json,
                "{\"kind\":\"a\\\"b\",\"whole\":-9007199254740993,\"yes\":true,\"timing\":{\"no\":"
                "false,\"text\":\"x\\n\\\"y\\\"\"},\"empty\":{},\"pair\":[1,null],\"last\":0.5");
}

static void not_finite(void **state) {
    Text json = json_begin("x");
    json_number(&json, "a", -NAN);
    json_number(&json, "b", INFINITY);
    json_number(&json, "c", -INFINITY);
    assert_text(&json,
                "{\"kind\":\"x\",\"a\":null,\"a_text\":\"nan\",\"b\":null,\"b_text\":\"inf\",\"c\":"
                "null,\"c_text\":\"-inf\"");
}

// Every finite value is printed in the shortest form that parses to the same bits.
static void same_bits(void **state) {
    const double values[] = {
        0.1,          0.1 + 0.2,          1.0 / 3, 1e23, 5e-324, 1.7976931348623157e308, -0.0, 1e6 + 1,
        (double)0.1f, 4503599627370497.5, 2.5e-5};
    for (size_t i = 0; i < 20000; i++) {
        double value;
        uint64_t bits = (i + 1) * 0x9E3779B97F4A7C15u;
        memcpy(&value, &bits, sizeof value);
        if (i < sizeof values / sizeof *values) value = values[i];
        if (!isfinite(value)) continue;
        Text json = {0};
        json_value(&json, value);
        double back = strtod(json.data, NULL);
        assert_memory_equal(&back, &value, sizeof value);
        cJSON *parsed = cJSON_Parse(json.data);
        assert_true(cJSON_IsNumber(parsed));
        cJSON_Delete(parsed);
        text_free(&json);
    }
    Text json = {0};
    json_value(&json, 0.1);
    text_add(&json, " ");
    json_value(&json, 512.34);
    assert_text(&json, "0.1 512.34");
}

// Appends text that exceeds the buffer's capacity, byte by byte and in one call.
static void text_grows(void **state) {
    Text text = {0}, twice = {0};
    for (int i = 0; i < 5000; i++) text_add(&text, "%c", 'a' + i % 26);
    assert_int_equal(text.length, 5000);
    for (int i = 0; i < 5000; i++) assert_int_equal(text.data[i], 'a' + i % 26);
    text_add(&twice, "%s%s", text.data, text.data);
    assert_int_equal(twice.length, 10000);
    assert_memory_equal(twice.data + 5000, text.data, 5001);
    text_free(&text);
    text_free(&twice);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(members), cmocka_unit_test(not_finite),
                                       cmocka_unit_test(same_bits), cmocka_unit_test(text_grows)};
    return cmocka_run_group_tests_name("json_line", tests, NULL, NULL);
}
