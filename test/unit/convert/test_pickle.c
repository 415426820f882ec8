// Tests the pickle parser: it reads values that Python's pickler wrote in protocols 2 to 5,
// represents calls as objects without executing them, and returns an error text for invalid
// pickles.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dev/convert/pickle.h"

// Parses a pickle given as a string literal that may contain NUL bytes.
#define READ(pickle, text) pickle_read(pickle, text, sizeof(text) - 1)

static void constants(void **state) {
    Pickle p;
    int64_t value;
    // [None, True, 300, -2, 1 << 40, 1 << 80, 0.5, "text", b"ab"]
    assert_null(READ(&p,
                     "\x80\x04\x95\x2d\0\0\0\0\0\0\0](N\x88M\x2c\x01J\xfe\xff\xff\xff"
                     "\x8a\x06\0\0\0\0\0\x01\x8a\x0b\0\0\0\0\0\0\0\0\0\0\x01"
                     "G?\xe0\0\0\0\0\0\0\x8c\x04textC\x02"
                     "abe."));
    const PickleValue *list = p.root;
    assert_int_equal(list->kind, PICKLE_LIST);
    assert_int_equal(list->count, 9);
    assert_int_equal(list->items[0]->kind, PICKLE_NONE);
    assert_true(list->items[1]->kind == PICKLE_BOOL && list->items[1]->truth);
    assert_true(pickle_int(pickle_item(list, 2), 0, 300, &value) && value == 300);
    assert_false(pickle_int(pickle_item(list, 2), 0, 299, &value));
    assert_true(pickle_int(pickle_item(list, 3), -2, 0, &value) && value == -2);
    assert_true(pickle_int(pickle_item(list, 4), 0, INT64_MAX, &value) && value == INT64_C(1) << 40);
    assert_int_equal(list->items[5]->kind, PICKLE_OTHER);
    assert_true(list->items[6]->kind == PICKLE_REAL && list->items[6]->real == 0.5);
    assert_string_equal(pickle_text(list->items[7]), "text");
    assert_int_equal(list->items[8]->kind, PICKLE_OTHER);
    assert_null(pickle_item(list, 9));
    pickle_free(&p);
}

static void dicts(void **state) {
    Pickle p;
    // {"a": {"b": (1, 2)}, "c": "a"}: the second "a" comes from the memo.
    assert_null(READ(&p, "\x80\x02}q\0(X\x01\0\0\0aq\x01}X\x01\0\0\0bK\x01K\x02\x86sX\x01\0\0\0ch\x01u."));
    const PickleValue *pair = pickle_member(pickle_member(p.root, "a"), "b");
    int64_t sizes[2];
    assert_int_equal(pickle_sizes(pair, sizes, 2), 2);
    assert_true(sizes[0] == 1 && sizes[1] == 2);
    assert_int_equal(pickle_sizes(pair, sizes, 1), -1);
    assert_string_equal(pickle_text(pickle_member(p.root, "c")), "a");
    assert_null(pickle_member(p.root, "d"));
    assert_null(pickle_member(NULL, "a"));
    assert_null(pickle_item(p.root, 0));
    pickle_free(&p);
}

// A pickle that calls os.system("true") when Python loads it.
static void calls_are_data(void **state) {
    Pickle p;
    assert_null(READ(&p,
                     "\x80\x02"
                     "cos\nsystem\nX\x04\0\0\0trueq\0\x85R."));
    assert_true(pickle_made_by(p.root, "os system"));
    assert_false(pickle_made_by(p.root, "os"));
    assert_string_equal(pickle_text(pickle_argument(p.root, "os system", 0)), "true");
    assert_null(pickle_argument(p.root, "os system", 1));
    assert_null(pickle_argument(p.root, "torch Size", 0));
    pickle_free(&p);
}

// argparse.Namespace(a=7), in protocols 2 and 4; an OrderedDict; a torch.Size; a storage.
static void objects(void **state) {
    Pickle p;
    int64_t value, sizes[4];
    assert_null(READ(&p,
                     "\x80\x02"
                     "cargparse\nNamespace\n)\x81}X\x01\0\0\0aK\x07sb."));
    assert_true(pickle_int(pickle_member(p.root, "a"), 7, 7, &value));
    pickle_free(&p);
    assert_null(READ(&p,
                     "\x80\x04\x8c\x08"
                     "argparse\x94\x8c\x09"
                     "Namespace\x94\x93\x94)\x81\x94}\x94"
                     "\x8c\x01"
                     "aK\x07sb."));
    assert_true(pickle_made_by(p.root, "argparse Namespace"));
    assert_true(pickle_int(pickle_member(p.root, "a"), 7, 7, &value));
    pickle_free(&p);
    assert_null(READ(&p,
                     "\x80\x02"
                     "ccollections\nOrderedDict\n)RX\x01\0\0\0aK\x05s."));
    assert_true(pickle_int(pickle_member(p.root, "a"), 5, 5, &value));
    pickle_free(&p);
    assert_null(READ(&p,
                     "\x80\x02"
                     "ctorch\nSize\nK\x03K\x04\x86\x85R."));
    assert_int_equal(pickle_sizes(p.root, sizes, 4), 2);
    assert_true(sizes[0] == 3 && sizes[1] == 4);
    pickle_free(&p);
    assert_null(READ(&p,
                     "\x80\x02X\x07\0\0\0storageX\x01\0\0\0"
                     "0\x86Q."));
    assert_int_equal(p.root->kind, PICKLE_STORED);
    assert_string_equal(pickle_text(pickle_item(p.root->arguments, 1)), "0");
    pickle_free(&p);
}

static void a_list_may_hold_itself(void **state) {
    Pickle p;
    assert_null(READ(&p, "\x80\x02]q\0h\0a."));
    assert_ptr_equal(p.root->items[0], p.root);
    pickle_free(&p);
}

typedef struct Bad {
    const char *text;
    size_t bytes;
    const char *fault;
} Bad;
#define BAD(text, fault) \
    { text, sizeof(text) - 1, fault }

static void bad_pickles(void **state) {
    static const Bad bad[] = {
        BAD("", "is truncated"),
        BAD("\x80\x02N", "is truncated"),
        BAD("\x80\x02J\x01", "is truncated"),
        BAD("\x80\x02X\xff\xff\xff\x7f", "is truncated"),
        BAD("\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "is truncated"),
        BAD("\x80\x02"
            "cos\nsystem",
            "is truncated"),
        BAD("\x80\x01N.", "protocol"),
        BAD("\x80\x06N.", "protocol"),
        BAD("\x80\x02I1\n.", "opcode"),
        BAD("\x80\x05\x97.", "opcode"),
        BAD("\x80\x02.", "empty stack"),
        BAD("\x80\x02\x85.", "empty stack"),
        BAD("\x80\x02R.", "empty stack"),
        BAD("\x80\x02(N(\x86.", "empty stack"),
        BAD("\x80\x02t.", "needs a mark"),
        BAD("\x80\x02u.", "needs a mark"),
        BAD("\x80\x02](Nu.", "key without a value"),
        BAD("\x80\x02K\x01K\x01"
            "a.",
            "not a list or dict"),
        BAD("\x80\x02h\0.", "unset memo entry"),
        BAD("\x80\x02Nr\xff\xff\xff\xff.", "memo has gaps"),
        BAD("\x80\x02q\0.", "empty stack"),
        BAD("\x80\x04K\x01K\x02\x93.", "not a string"),
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Pickle p;
        const char *fault = pickle_read(&p, bad[i].text, bad[i].bytes);
        if (!fault) fail_msg("%zu: accepted instead of refused with '%s'", i, bad[i].fault);
        if (!strstr(fault, bad[i].fault)) fail_msg("%zu: '%s', not '%s'", i, fault, bad[i].fault);
    }
}

// Many copies of one list, and many marks, exceed the limit on the number of values.
static void values_are_counted(void **state) {
    const size_t bytes = (size_t)PICKLE_MOST_VALUES + 16;
    char *text = (char *)malloc(bytes);
    Pickle p;
    assert_non_null(text);
    memset(text, '2', bytes);
    memcpy(text, "\x80\x02N", 3);
    assert_string_equal(pickle_read(&p, text, bytes), "its pickle holds too many values");
    memset(text + 2, '(', bytes - 2);
    assert_string_equal(pickle_read(&p, text, bytes), "its pickle holds too many values");
    free(text);
}

// Every STACK_GLOBAL copies two strings, which may be references to the same long strings.
static void class_names_are_short(void **state) {
    enum { NAME = 600 };
    char text[NAME + 16] = "\x80\x04X\x58\x02\0\0";  // a string of NAME bytes
    Pickle p;
    memset(text + 7, 'a', NAME);
    memcpy(text + 7 + NAME, "2\x93.", 3);
    assert_string_equal(pickle_read(&p, text, NAME + 10),
                        "its pickle has a class name of more than 512 bytes");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(constants),
        cmocka_unit_test(dicts),
        cmocka_unit_test(calls_are_data),
        cmocka_unit_test(objects),
        cmocka_unit_test(a_list_may_hold_itself),
        cmocka_unit_test(bad_pickles),
        cmocka_unit_test(values_are_counted),
        cmocka_unit_test(class_names_are_short),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
