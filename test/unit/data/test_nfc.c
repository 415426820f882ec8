// Tests Unicode normalization: the rules of form C, and hashes of the results for every code point
// and for random sequences, which dev/ref/make_nfc_golden.py computed with Hugging Face's
// `tokenizers`. The results must not depend on the version of utf8proc.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <xxhash.h>

#include "llmc/base/utf8.h"
#include "llmc/data/nfc.h"
#include "test/random.h"

static void check_nfc(const Nfc *nfc, const char *text, const char *expected) {
    char out[300];
    size_t bytes = strlen(text), normal = nfc_normal_prefix(nfc, text, bytes);
    memcpy(out, text, normal);
    size_t written = normal + nfc_normalize(nfc, text + normal, bytes - normal, out + normal);
    assert_int_equal(written, strlen(expected));
    assert_memory_equal(out, expected, written);
    assert_int_equal(nfc_normalize(nfc, expected, written, out), written);
    assert_memory_equal(out, expected, written);
}

static void form_c(void **state) {
    Nfc *nfc = nfc_create();
    check_nfc(nfc, "", "");
    check_nfc(nfc, "plain \u00e9", "plain \u00e9");
    check_nfc(nfc, "cafe\u0301s", "caf\u00e9s");
    check_nfc(nfc, "q\u0307\u0323", "q\u0323\u0307");  // sorts marks by class
    check_nfc(nfc, "a\u0327\u0301", "\u00e1\u0327");   // composes across a mark of another class
    check_nfc(nfc, "a\u0301\u0301", "\u00e1\u0301");   // does not compose across the same class
    check_nfc(nfc, "\u1e9b\u0323", "\u1e9b\u0323");
    check_nfc(nfc, "\u0344", "\u0308\u0301");                    // decomposes, but is never composed
    check_nfc(nfc, "\u212b\u2126\uf900", "\u00c5\u03a9\u8c48");  // singleton decompositions
    check_nfc(nfc, "\u0958", "\u0915\u093c");
    check_nfc(nfc, "\u1112\u1161\u11ab\u1100\u1173\u11af", "\ud55c\uae00");
    check_nfc(nfc, "\uac00\u11a8\u11a8", "\uac01\u11a8");
    check_nfc(nfc, "\u0301a", "\u0301a");
    nfc_free(nfc);
}

// utf8proc sorts and composes these characters, but Unicode 9 did not assign them, so they must not
// change.
static void newer_characters_stay(void **state) {
    Nfc *nfc = nfc_create();
    check_nfc(nfc, "a\u0301\u1df6\u0323", "\u00e1\u1df6\u0323");                             // Unicode 10
    check_nfc(nfc, "a\u0898\u0323\u0301", "a\u0898\u0323\u0301");                            // Unicode 14
    check_nfc(nfc, "\U00011935\U00011930", "\U00011935\U00011930");                          // Unicode 13
    check_nfc(nfc, "\U00011938\u0307\u0323", "\U00011938\u0323\u0307");                      // Unicode 13
    check_nfc(nfc, "\U000105d2\u0307\U000105da\u0307", "\U000105d2\u0307\U000105da\u0307");  // Unicode 16
    nfc_free(nfc);
}

// ---- hashes of many results ----

enum { MOST_CHARACTERS = 16 };

typedef struct Digest {
    const Nfc *nfc;
    XXH3_state_t *hash;
} Digest;

static void add_result(Digest *d, const uint32_t *characters, int count) {
    char text[4 * MOST_CHARACTERS], out[NFC_MOST_GROWTH * sizeof text + 1], again[sizeof out];
    size_t bytes = 0;
    for (int i = 0; i < count; i++) bytes += utf8_write(characters[i], text + bytes);
    size_t written = nfc_normalize(d->nfc, text, bytes, out), normal = nfc_normal_prefix(d->nfc, text, bytes);
    memcpy(again, text, normal);
    assert_int_equal(normal + nfc_normalize(d->nfc, text + normal, bytes - normal, again + normal), written);
    assert_memory_equal(again, out, written);
    out[written++] = '\n';
    XXH3_64bits_update(d->hash, out, written);
}

static void add_code_point(Digest *d, uint32_t c) {
    const uint32_t lists[][6] = {{c},
                                 {'a', c, 0x301},
                                 {c, 0x327, 0x301, 0x328},
                                 {0x301, c, 0x327, c},
                                 {c, 0x1161, 0x11A8, c, 0x338, 0x307}};
    const int counts[] = {1, 3, 4, 4, 6};
    for (int i = 0; i < 5; i++) add_result(d, lists[i], counts[i]);
}

static void every_code_point(void **state) {
    static const uint64_t expected[17] = {0x0098218C7393A954, 0x74BA632B0A81ED5B, 0xEE02ACB93C1B790A,
                                          0x88B199BE43540D1B, 0x64BF3C6739D282EB, 0x8413DB5EDD80A442,
                                          0xE1B0A630A93E944C, 0xFD1E4C69983014D3, 0x6B59332FA411EFCD,
                                          0x9AF6D17372D2BAB0, 0x7D0AB766D7DB470D, 0xF7F2D5A4212288D6,
                                          0xAFDECCC2AE6777E7, 0x486E92FA43FE583B, 0x7901A4A54FB06FE0,
                                          0x401505B03602DB8A, 0x85A49DD08C0C44A4};
    Nfc *nfc = nfc_create();
    Digest d = {nfc, XXH3_createState()};
    for (uint32_t plane = 0; plane < 17; plane++) {
        XXH3_64bits_reset(d.hash);
        for (uint32_t c = plane << 16; c < (plane + 1) << 16; c++) {
            if (c < 0xD800 || c > 0xDFFF) add_code_point(&d, c);
        }
        uint64_t found = XXH3_64bits_digest(d.hash);
        if (found != expected[plane]) fail_msg("plane %u: 0x%016llX", plane, (unsigned long long)found);
    }
    XXH3_freeState(d.hash);
    nfc_free(nfc);
}

// Sequences of characters from blocks with many compositions and marks.
static void random_sequences(void **state) {
    static const uint32_t blocks[][2] = {{0x20, 0x17F},      {0x1A0, 0x233},    {0x300, 0x36F},
                                         {0x300, 0x345},     {0x591, 0x5C7},    {0x610, 0x6ED},
                                         {0x900, 0xDFF},     {0xF00, 0xFC6},    {0x1025, 0x103A},
                                         {0x1100, 0x11FF},   {0x1AB0, 0x1B44},  {0x1DC0, 0x1FFF},
                                         {0x20D0, 0x2130},   {0x3040, 0x30FF},  {0xAC00, 0xAC40},
                                         {0xF900, 0xFB4F},   {0xFE20, 0xFE2F},  {0x10A0D, 0x10A3F},
                                         {0x11080, 0x11740}, {0x1D157, 0x1D1AD}};
    Nfc *nfc = nfc_create();
    Digest d = {nfc, XXH3_createState()};
    XXH3_64bits_reset(d.hash);
    Random random = {1};
    for (int i = 0; i < 300000; i++) {
        uint32_t characters[MOST_CHARACTERS];
        int count = 2 + (int)(random_u64(&random) % (MOST_CHARACTERS - 1));
        for (int k = 0; k < count; k++) {
            const uint32_t *block = blocks[random_u64(&random) % (sizeof blocks / sizeof *blocks)];
            characters[k] = block[0] + (uint32_t)(random_u64(&random) % (block[1] - block[0] + 1));
        }
        add_result(&d, characters, count);
    }
    uint64_t found = XXH3_64bits_digest(d.hash);
    if (found != 0x9D55BBAA0F9171B4) fail_msg("0x%016llX", (unsigned long long)found);
    XXH3_freeState(d.hash);
    nfc_free(nfc);
}

// Sorting a megabyte of marks in descending order of class must not take quadratic time.
static void long_run_of_marks(void **state) {
    enum { MARKS = 1 << 18, BYTES = 4 * MARKS };
    char *text = malloc(BYTES), *out = malloc(NFC_MOST_GROWTH * BYTES), *expected = malloc(BYTES);
    for (int i = 0; i < MARKS; i++) {
        memcpy(text + 4 * i, "\u0301\u0323", 4);
        memcpy(expected + 2 * i, "\u0323", 2);
        memcpy(expected + 2 * (MARKS + i), "\u0301", 2);
    }
    Nfc *nfc = nfc_create();
    assert_int_equal(nfc_normalize(nfc, text, BYTES, out), BYTES);
    assert_memory_equal(out, expected, BYTES);
    nfc_free(nfc);
    free(text);
    free(out);
    free(expected);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(form_c),
        cmocka_unit_test(newer_characters_stay),
        cmocka_unit_test(every_code_point),
        cmocka_unit_test(random_sequences),
        cmocka_unit_test(long_run_of_marks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
