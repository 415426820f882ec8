// llmc/groups/keys.c: the rendezvous finds keys without reading its folder at every connection.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "llmc/base/durable.h"
#include "llmc/groups/keys.h"

static char folder[] = "/tmp/test_keys.XXXXXX";

static bool find(KeyRing *ring, const char *key, const char *expected) {
    char name[NAME_BYTES] = "";
    uint8_t raw[KEY_RAW];
    assert_non_null(zmq_z85_decode(raw, key));
    bool found = keys_find(ring, folder, raw, name);
    if (found) assert_string_equal(name, expected);
    return found;
}

static void read_key(const char *name, char key[KEY_TEXT]) {
    Error err = {0};
    assert_true(keys_generate(folder, name, &err) && keys_load_public(folder, name, key, &err));
}

static void remove_key(const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s.public", folder, name);
    assert_int_equal(unlink(path), 0);
}

static void test_folder_is_read_once(void **unused) {
    KeyRing ring = {0};
    char a[KEY_TEXT], b[KEY_TEXT], stranger[KEY_TEXT], secret[KEY_TEXT];
    read_key("a", a);
    assert_int_equal(zmq_curve_keypair(stranger, secret), 0);
    double began = monotonic_seconds();
    for (int i = 0; i < 1000; i++) assert_true(find(&ring, a, "a"));
    for (int i = 0; i < 1000; i++) assert_false(find(&ring, stranger, ""));
    assert_true((double)ring.reads <= 2 + monotonic_seconds() - began);

    usleep(20000);  // file systems have times of a few milliseconds
    read_key("b", b);
    assert_true(find(&ring, b, "b") && find(&ring, a, "a"));
    usleep(20000);
    remove_key("a");
    assert_false(find(&ring, a, ""));
    assert_true(find(&ring, b, "b"));
    keys_free(&ring);
}

// A file that is overwritten does not change the folder.
static void test_changed_file_is_noticed(void **unused) {
    KeyRing ring = {0};
    char old[KEY_TEXT], key[KEY_TEXT], secret[KEY_TEXT], path[256];
    read_key("c", old);
    assert_true(find(&ring, old, "c"));
    assert_int_equal(zmq_curve_keypair(key, secret), 0);
    snprintf(path, sizeof path, "%s/c.public", folder);
    FILE *file = fopen(path, "r+");
    assert_non_null(file);
    fprintf(file, "%s\n", key);
    fclose(file);
    ring.read_at -= 1.5;
    assert_true(find(&ring, key, "c"));
    assert_false(find(&ring, old, ""));
    keys_free(&ring);
}

static int make_folder(void **unused) { return mkdtemp(folder) ? 0 : -1; }
static int remove_folder(void **unused) {
    Error err = {0};
    return durable_remove_tree(folder, &err) ? 0 : -1;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_folder_is_read_once),
        cmocka_unit_test(test_changed_file_is_noticed),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
