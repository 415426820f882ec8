// Tests the tokenizers: golden ids of Hugging Face's `tokenizers`
// (dev/ref/make_tokenizer_golden.py), pre-tokenization against PCRE2 and examples of the
// specification, merging against its definition, decoding, invalid UTF-8, long words, malformed
// vocabularies.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include <cjson/cJSON.h>

#include "llmc/data/bpe.h"
#include "llmc/data/pretokenize.h"
#include "llmc/data/tokenizer.h"
#include "llmc/base/utf8.h"

#define GOLDEN "test/golden/tokenizer/"
#define GPT2 "../shared/data/gpt2/"

static Tokenizer *open_gpt2(const char *vocab_file, const char *merge_file, Error *err) {
    TokenizerChoice choice = {.type = TOKENIZER_GPT2_BPE, .vocab_file = vocab_file, .merge_file = merge_file};
    return tokenizer_open(&choice, err);
}

typedef struct Fixture {
    Tokenizer *small;
    Encoder *encoder;
    PiecePattern *pattern;
    PieceSplitter *splitter;
} Fixture;

static int setup(void **state) {
    Fixture *f = calloc(1, sizeof *f);
    Error err = {0};
    f->small = open_gpt2(GOLDEN "vocab.json", GOLDEN "merges.txt", &err);
    if (!f->small) {
        fprintf(stderr, "%s (run from the repository root)\n", err.what);
        return -1;
    }
    f->encoder = encoder_create(f->small);
    f->pattern = piece_pattern_compile(GPT2_PATTERN, "GPT-2", &err);
    f->splitter = piece_splitter_create(f->pattern);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    Fixture *f = *state;
    piece_splitter_free(f->splitter);
    piece_pattern_free(f->pattern);
    encoder_free(f->encoder);
    tokenizer_close(f->small);
    free(f);
    return 0;
}

// A deterministic generator, for reproducible failures.
static uint32_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---- golden ids ----

static char *read_text(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    char *text = malloc(1 << 20);
    *bytes = fread(text, 1, (1 << 20) - 1, file);
    text[*bytes] = 0;
    fclose(file);
    return text;
}

static cJSON *read_json(const char *path) {
    size_t bytes;
    char *text = read_text(path, &bytes);
    cJSON *root = cJSON_Parse(text);
    free(text);
    assert_non_null(root);
    return root;
}

// Returns the text of a case. The caller frees it.
static char *case_text(const cJSON *item, size_t *bytes) {
    const cJSON *hex = cJSON_GetObjectItem(item, "hex");
    const char *plain = hex ? hex->valuestring : cJSON_GetObjectItem(item, "text")->valuestring;
    char *text = malloc(strlen(plain) + 1);
    *bytes = hex ? strlen(plain) / 2 : strlen(plain);
    memcpy(text, plain, strlen(plain) + 1);
    for (size_t i = 0; hex && i < *bytes; i++) {
        unsigned byte;
        assert_int_equal(sscanf(plain + 2 * i, "%2x", &byte), 1);
        text[i] = (char)byte;
    }
    return text;
}

static void check_case(Encoder *encoder, const cJSON *item, const cJSON *ids, int number) {
    size_t bytes;
    char *text = case_text(item, &bytes);
    TokenBuffer out = {0};
    int64_t replaced = 0, i = 0;
    encoder_encode(encoder, text, bytes, &out, &replaced);
    for (const cJSON *id = ids->child; id; id = id->next, i++) {
        if (i >= out.count || out.ids[i] != id->valueint)
            fail_msg("case %d, token %lld of text '%s'", number, (long long)i, text);
    }
    assert_int_equal(i, out.count);
    assert_int_equal(replaced, 0);
    token_buffer_free(&out);
    free(text);
}

static void golden_ids_small_vocabulary(void **state) {
    Fixture *f = *state;
    cJSON *root = read_json(GOLDEN "cases.json");
    int number = 0;
    // In the second pass most pieces are in the cache.
    for (int pass = 0; pass < 2; pass++) {
        for (const cJSON *item = cJSON_GetObjectItem(root, "cases")->child; item; item = item->next) {
            check_case(f->encoder, item, cJSON_GetObjectItem(item, "ids"), number++);
        }
    }
    assert_true(number > 300);
    cJSON_Delete(root);
}

static void golden_ids_gpt2(void **state) {
    if (access(GPT2 "vocab.json", R_OK) || access(GPT2 "merges.txt", R_OK)) {
        print_message("GPT-2's vocabulary is not available\n");
        skip();
    }
    Error err = {0};
    Tokenizer *gpt2 = open_gpt2(GPT2 "vocab.json", GPT2 "merges.txt", &err);
    assert_non_null(gpt2);
    assert_int_equal(tokenizer_vocab_size(gpt2), 50257);
    assert_int_equal(tokenizer_eod(gpt2), 50256);
    Encoder *encoder = encoder_create(gpt2);
    cJSON *texts = read_json(GOLDEN "cases.json"), *ids = read_json(GOLDEN "gpt2_ids.json");
    const cJSON *text = cJSON_GetObjectItem(texts, "cases")->child,
                *id = cJSON_GetObjectItem(ids, "cases")->child;
    int number = 0;
    for (; text && id; text = text->next, id = id->next) check_case(encoder, text, id, number++);
    assert_null(text);
    assert_null(id);
    cJSON_Delete(texts);
    cJSON_Delete(ids);
    encoder_free(encoder);
    tokenizer_close(gpt2);
}

// ---- pre-tokenization ----

// pieces: the expected pieces, separated by '|'.
static void check_pieces(const PieceSplitter *splitter, const char *text, const char *pieces) {
    size_t bytes = strlen(text), start = 0;
    for (const char *piece = pieces; start < bytes;) {
        size_t length = strcspn(piece, "|"), end = piece_end(splitter, text, bytes, start);
        assert_int_equal(end - start, length);
        assert_memory_equal(text + start, piece, length);
        start = end;
        piece += length + (piece[length] == '|');
        if (start == bytes) assert_string_equal(piece, "");
    }
}

static void pre_tokens_of_specification(void **state) {
    const PieceSplitter *splitter = ((Fixture *)*state)->splitter;
    check_pieces(splitter, "Hello  world\n\n  It's  I'LL 123abc\t\tx ",
                 "Hello| | world|\n\n | It|'s| | I|'|LL| 123|abc|\t|\t|x| ");
    check_pieces(splitter, "\n\n\nfoo", "\n\n|\n|foo");
    check_pieces(splitter, "foo 'm", "foo| '|m");
    check_pieces(splitter, "we've they'll I'd''re", "we|'ve| they|'ll| I|'d|''|re");
    check_pieces(splitter, "a\u180eb \u180e c", "a|\u180e|b| \u180e| c");
    check_pieces(splitter, "na\u00efve 12\u0663x\u3000\u3000y", "na\u00efve| 12\u0663|x|\u3000|\u3000|y");
    check_pieces(splitter, "a\u0301 b", "a|\u0301| b");
}

// Two equal white space characters before an exclamation mark are in different pieces. Two other
// equal characters are in one piece, which may include the mark.
static void white_space_matches_unicode(void **state) {
    const PieceSplitter *splitter = ((Fixture *)*state)->splitter;
    for (uint32_t c = 0; c < 0x110000; c++) {
        if (c >= 0xD800 && c < 0xE000) continue;
        bool white = (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
                     (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
                     c == 0x205F || c == 0x3000;
        char text[12];
        size_t one = utf8_write(c, text), two = one + utf8_write(c, text + one);
        text[two] = '!';
        size_t end = piece_end(splitter, text, two + 1, 0);
        if (white != (end == one)) fail_msg("U+%04X ends at %zu", c, end);
    }
}

static void check_against_pcre2(const PieceSplitter *splitter, const char *text, size_t bytes) {
    for (size_t start = 0; start < bytes;) {
        size_t end = piece_end(splitter, text, bytes, start),
               expected = piece_end_pcre2(splitter, text, bytes, start);
        if (end != expected)
            fail_msg("'%.*s' at %zu: %zu, PCRE2 says %zu", (int)bytes, text, start, end, expected);
        assert_true(end > start);
        start = end;
    }
}

static void fast_path_matches_pcre2(void **state) {
    const PieceSplitter *splitter = ((Fixture *)*state)->splitter;
    // All texts of five symbols, with at least one symbol for each class of the pattern.
    static const char *const symbols[] = {" ", "\n", "'", "s",      "l",      "e",     "r",
                                          "A", "7",  "-", "\u00a0", "\u00e9", "\u180e"};
    enum { SYMBOLS = sizeof symbols / sizeof *symbols, LENGTH = 5 };
    int all = SYMBOLS * SYMBOLS * SYMBOLS * SYMBOLS * SYMBOLS;
    for (int n = 0; n < all; n++) {
        char text[4 * LENGTH];
        size_t bytes = 0;
        for (int i = 0, rest = n; i < LENGTH; i++, rest /= SYMBOLS) {
            const char *symbol = symbols[rest % SYMBOLS];
            memcpy(text + bytes, symbol, strlen(symbol));
            bytes += strlen(symbol);
        }
        check_against_pcre2(splitter, text, bytes);
    }
    // Long random texts of ASCII bytes with some other characters.
    uint64_t seed = 7;
    for (int n = 0; n < 2000; n++) {
        char text[600];
        size_t bytes = 0;
        for (int i = 0; i < 120; i++)
            bytes += utf8_write(next_random(&seed) % 16 ? next_random(&seed) % 128
                                                        : next_random(&seed) % 0xD800,
                                text + bytes);
        check_against_pcre2(splitter, text, bytes);
    }
}

// ---- merging ----

// Reference: repeatedly merges all occurrences of the lowest-ranked pair from left to right.
static size_t merge_by_definition(const BpeMerge *merges, int count, const int32_t byte_id[256],
                                  const char *piece, size_t bytes, int32_t *ids) {
    for (size_t i = 0; i < bytes; i++) ids[i] = byte_id[(uint8_t)piece[i]];
    for (int rank = 0; rank < count;) {
        size_t kept = 0;
        for (size_t i = 0; i < bytes; kept++) {
            bool pair = i + 1 < bytes && ids[i] == merges[rank].left && ids[i + 1] == merges[rank].right;
            ids[kept] = pair ? merges[rank].merged : ids[i];
            i += pair ? 2 : 1;
        }
        rank = kept < bytes ? 0 : rank + 1;
        bytes = kept;
    }
    return bytes;
}

static void merging_matches_definition(void **state) {
    // Ids 0 to 2 are the bytes a, b, c. As in training, each merge combines two earlier ids.
    enum { MERGES = 60 };
    BpeMerge merges[MERGES];
    Bpe bpe;
    BpeScratch scratch = {0};
    uint64_t seed = 11;
    for (int vocabulary = 0; vocabulary < 20; vocabulary++) {
        bpe_init(&bpe, MERGES);
        for (int byte = 0; byte < 256; byte++) bpe.byte_id[byte] = byte % 3;
        for (int i = 0; i < MERGES; i++) {
            bool fresh;
            do {
                int reach = i < 20 ? i + 3 : 20;
                merges[i] = (BpeMerge){(int32_t)(next_random(&seed) % (uint32_t)reach),
                                       (int32_t)(next_random(&seed) % (uint32_t)reach), i, i + 3};
                fresh = true;
                for (int j = 0; j < i; j++)
                    fresh = fresh && (merges[j].left != merges[i].left || merges[j].right != merges[i].right);
            } while (!fresh);
            bpe_add(&bpe, merges[i]);
        }
        for (int n = 0; n < 60; n++) {
            char piece[400];
            int32_t ids[400], expected[400];
            // Lengths below and above the limit between the two algorithms.
            size_t bytes = 1 + next_random(&seed) % (n % 2 ? 60 : 399);
            for (size_t i = 0; i < bytes; i++) piece[i] = (char)(n % 5 ? next_random(&seed) % 3 : 0);
            size_t count = bpe_encode(&bpe, &scratch, piece, bytes, ids);
            assert_int_equal(count, merge_by_definition(merges, MERGES, bpe.byte_id, piece, bytes, expected));
            assert_memory_equal(ids, expected, count * sizeof *ids);
        }
        bpe_free(&bpe);
    }
    bpe_scratch_free(&scratch);
}

static void last_duplicate_merge_wins(void **state) {
    Bpe bpe;
    BpeScratch scratch = {0};
    bpe_init(&bpe, 3);
    for (int byte = 0; byte < 256; byte++) bpe.byte_id[byte] = byte;
    bpe_add(&bpe, (BpeMerge){'a', 'b', 0, 300});
    bpe_add(&bpe, (BpeMerge){'b', 'c', 1, 301});
    bpe_add(&bpe, (BpeMerge){'a', 'b', 2, 300});
    int32_t ids[3];
    assert_int_equal(bpe_encode(&bpe, &scratch, "abc", 3, ids), 2);
    assert_int_equal(ids[0], 'a');
    assert_int_equal(ids[1], 301);
    bpe_free(&bpe);
}

static void long_words_are_fast(void **state) {
    Fixture *f = *state;
    enum { LENGTH = 1 << 20 };
    char *text = malloc(LENGTH);
    uint64_t seed = 5;
    for (int kind = 0; kind < 5; kind++) {
        for (size_t i = 0; i < LENGTH; i++) {
            // The last two kinds: one long non-ASCII word, and one-character words in non-ASCII
            // text.
            text[i] = kind == 0   ? 'a'
                      : kind == 1 ? ' '
                      : kind == 2
                          ? "aehlnort"[next_random(&seed) % 8]
                          : (kind == 3 ? "\xe4\xb8\xad\xe4\xb8\xad" : "\xe4\xb8\xad\xef\xbc\x8c")[i % 6];
        }
        TokenBuffer out = {0};
        int64_t replaced = 0;
        double start = seconds();
        encoder_encode(f->encoder, text, LENGTH - LENGTH % 3, &out, &replaced);
        // Quadratic merging or splitting would take minutes to hours. This takes about 0.1 s, and
        // several times that with sanitizers.
        assert_true(seconds() - start < 5);
        assert_int_equal(replaced, 0);
        assert_in_range(out.count, 1000, LENGTH);
        token_buffer_free(&out);
    }
    free(text);
}

// ---- decoding ----

static void check_round_trip(const Tokenizer *tokenizer, Encoder *encoder, const char *text, size_t bytes) {
    TokenBuffer out = {0};
    int64_t replaced = 0;
    size_t at = 0;
    encoder_encode(encoder, text, bytes, &out, &replaced);
    for (int64_t i = 0; i < out.count; i++) {
        size_t length;
        const char *token = tokenizer_decode(tokenizer, out.ids[i], &length);
        assert_true(length > 0 && at + length <= bytes);
        assert_memory_equal(text + at, token, length);
        at += length;
    }
    assert_int_equal(at, bytes);
    assert_int_equal(replaced, 0);
    token_buffer_free(&out);
}

static void decoding_restores_text(void **state) {
    Fixture *f = *state;
    Tokenizer *byte = tokenizer_open(&(TokenizerChoice){.type = TOKENIZER_BYTE}, NULL);
    Encoder *byte_encoder = encoder_create(byte);
    uint64_t seed = 3;
    for (int n = 0; n < 500; n++) {
        char text[800];
        size_t bytes = 0;
        for (int i = 0; i < 150; i++) {
            uint32_t limit = n % 3 == 0   ? 0x80
                             : n % 3 == 1 ? 0xD800
                                          : 0x110000,
                     c = next_random(&seed) % limit;
            bytes += utf8_write(c >= 0xD800 && c < 0xE000 ? ' ' : c, text + bytes);
        }
        check_round_trip(f->small, f->encoder, text, bytes);
        check_round_trip(byte, byte_encoder, text, bytes);
    }
    encoder_free(byte_encoder);
    tokenizer_close(byte);
}

static void decoding_special_and_invalid_ids(void **state) {
    Fixture *f = *state;
    size_t bytes;
    const char *eod = tokenizer_decode(f->small, tokenizer_eod(f->small), &bytes);
    assert_int_equal(bytes, 13);
    assert_memory_equal(eod, "<|endoftext|>", 13);
    tokenizer_decode(f->small, tokenizer_vocab_size(f->small), &bytes);
    assert_int_equal(bytes, 0);
    tokenizer_decode(f->small, -1, &bytes);
    assert_int_equal(bytes, 0);
}

// ---- the other tokenizers ----

static void byte_tokenizer(void **state) {
    Tokenizer *byte = tokenizer_open(&(TokenizerChoice){.type = TOKENIZER_BYTE}, NULL);
    assert_int_equal(tokenizer_vocab_size(byte), 257);
    assert_int_equal(tokenizer_eod(byte), 256);
    Encoder *encoder = encoder_create(byte);
    TokenBuffer out = {0};
    int64_t replaced = 0;
    encoder_encode(encoder, "a\0\xc3\xa9\xff", 5, &out, &replaced);
    const int32_t expected[] = {'a', 0, 0xc3, 0xa9, 0xef, 0xbf, 0xbd};
    assert_int_equal(out.count, 7);
    assert_memory_equal(out.ids, expected, sizeof expected);
    assert_int_equal(replaced, 1);
    token_buffer_free(&out);
    encoder_free(encoder);
    tokenizer_close(byte);
}

static void null_tokenizer(void **state) {
    Error err = {0};
    assert_null(tokenizer_open(&(TokenizerChoice){.type = TOKENIZER_NULL, .null_vocab_size = 0}, &err));
    assert_int_equal(err.code, EXIT_USAGE);
    TokenizerChoice choice = {.type = TOKENIZER_NULL, .null_vocab_size = 1000};
    Tokenizer *null = tokenizer_open(&choice, &err);
    assert_int_equal(tokenizer_vocab_size(null), 1001);
    assert_int_equal(tokenizer_eod(null), 1000);
    Encoder *encoder = encoder_create(null);
    TokenBuffer out = {0};
    int64_t replaced = 0;
    const char *text = " 5 0  1000\n1001 x 99999999999999999999 12";
    encoder_encode(encoder, text, strlen(text), &out, &replaced);
    const int32_t expected[] = {5, 0, 1000, 12};
    assert_int_equal(out.count, 4);
    assert_memory_equal(out.ids, expected, sizeof expected);
    assert_int_equal(replaced, 3);
    size_t bytes;
    const char *word = tokenizer_decode(null, 12, &bytes);
    assert_int_equal(bytes, 3);
    assert_memory_equal(word, " 12", 3);
    token_buffer_free(&out);
    encoder_free(encoder);
    tokenizer_close(null);
    choice.eod_token = "7";
    null = tokenizer_open(&choice, &err);
    assert_int_equal(tokenizer_vocab_size(null), 1001);
    assert_int_equal(tokenizer_eod(null), 7);
    word = tokenizer_decode(null, 7, &bytes);
    assert_true(bytes == 13 && memcmp(word, "<|endoftext|>", bytes) == 0);
    word = tokenizer_decode(null, 1000, &bytes);
    assert_true(bytes == 5 && memcmp(word, " 1000", 5) == 0);
    tokenizer_close(null);
    static const char *const wrong[] = {"1001", "-1", "</s>"};
    for (int i = 0; i < 3; i++) {
        choice.eod_token = wrong[i];
        assert_null(tokenizer_open(&choice, &err));
        assert_non_null(strstr(err.what, "use 0 to 1000"));
        assert_int_equal(err.code, EXIT_USAGE);
    }
}

// ---- invalid UTF-8 ----

static void check_repair(const char *text, size_t bytes, const char *expected, int64_t expected_count) {
    char out[128];
    int64_t replaced = 0;
    size_t written = utf8_repair(text, bytes, out, &replaced);
    assert_int_equal(written, strlen(expected));
    assert_memory_equal(out, expected, written);
    assert_int_equal(replaced, expected_count);
}

#define R "\ufffd"
static void invalid_utf8_is_replaced_per_maximal_subpart(void **state) {
    // Examples of the Unicode standard, chapter 3, tables 3-8 to 3-11.
    check_repair("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", 9, R R R R R R R R "A", 8);
    check_repair("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", 9, R R R R R R R R "A", 8);
    check_repair("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", 9, R R R R R "A" R R "B", 7);
    check_repair("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", 9, R R R R "A", 4);
    check_repair("abc\xE4\xB8", 5, "abc" R, 1);
    check_repair("\xF0\x9F\x98\x80\x80", 5, "\xF0\x9F\x98\x80" R, 1);
    check_repair(
        "12345678\xFF"
        "12345678",
        17, "12345678" R "12345678", 1);
    assert_int_equal(utf8_valid_prefix("\xF4\x8F\xBF\xBF\xEE\x80\x80", 7), 7);
    assert_int_equal(utf8_valid_prefix("0123456789\xC2", 11), 10);
}

static void encoding_counts_replacements(void **state) {
    Fixture *f = *state;
    TokenBuffer broken = {0}, mended = {0};
    int64_t replaced = 0, none = 0;
    encoder_encode(f->encoder,
                   "gr\xF6\xDF"
                   "e \xE4\xB8 end",
                   12, &broken, &replaced);
    const char *text = "gr" R R "e " R " end";
    encoder_encode(f->encoder, text, strlen(text), &mended, &none);
    assert_int_equal(replaced, 3);
    assert_int_equal(none, 0);
    assert_int_equal(broken.count, mended.count);
    assert_memory_equal(broken.ids, mended.ids, (size_t)mended.count * sizeof *mended.ids);
    token_buffer_free(&broken);
    token_buffer_free(&mended);
}

// ---- malformed vocabularies ----

static void write_text(const char *path, const char *text, size_t bytes) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, bytes, file), bytes);
    fclose(file);
}

// Opens copies of the small vocabulary's files after replacing `from` by `to` in one of them.
static Tokenizer *open_changed(bool in_merges, const char *from, const char *to, Error *err) {
    char vocab_path[] = P_tmpdir "/test_vocab_XXXXXX", merge_path[] = P_tmpdir "/test_merge_XXXXXX";
    close(mkstemp(vocab_path));
    close(mkstemp(merge_path));
    size_t bytes[2];
    char *texts[2] = {read_text(GOLDEN "vocab.json", &bytes[0]), read_text(GOLDEN "merges.txt", &bytes[1])};
    char *text = texts[in_merges], *at = strstr(text, from);
    assert_non_null(at);
    char *changed = malloc(strlen(text) + strlen(to) + 1);
    sprintf(changed, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    write_text(vocab_path, in_merges ? texts[0] : changed, strlen(in_merges ? texts[0] : changed));
    write_text(merge_path, in_merges ? changed : texts[1], strlen(in_merges ? changed : texts[1]));
    memset(err, 0, sizeof *err);
    Tokenizer *tokenizer = open_gpt2(vocab_path, merge_path, err);
    if (!tokenizer) assert_non_null(strstr(err->what, in_merges ? merge_path : vocab_path));
    unlink(vocab_path);
    unlink(merge_path);
    free(changed);
    free(texts[0]);
    free(texts[1]);
    return tokenizer;
}

static void check_refused(bool in_merges, const char *from, const char *to, const char *message) {
    Error err;
    assert_null(open_changed(in_merges, from, to, &err));
    assert_int_equal(err.code, EXIT_DATA);
    if (!strstr(err.what, message)) fail_msg("'%s' lacks '%s'", err.what, message);
}

static void malformed_vocabularies_are_refused(void **state) {
    check_refused(false, "{", "", "line 1 is not valid JSON");
    check_refused(false, "\"!\": 0,", "", "0 to");
    check_refused(false, "\"!\": 0,", "\"!\": 1,", "same id 1");
    check_refused(false, "\"!\": 0,", "\"!\": -1,", "not an integer");
    check_refused(false, "\"!\": 0,", "\"!\": 0.5,", "not an integer");
    check_refused(false, "\"!\": 0,", "\"!\": \"0\",", "not an integer");
    check_refused(false, "\"!\": 0,", "\"!!!\": 0,", "byte 0x21");
    check_refused(false, "<|endoftext|>", "<|end|>", "<|endoftext|>");
    check_refused(false, "\"!\": 0, \"\\\"\": 1,", "\"#\": 0, \"!\": 1,", "twice");
    check_refused(true, "#version: 0.2\n", "#version: 0.2\nabc\n", "line 2 \"abc\" is not two symbols");
    check_refused(true, "#version: 0.2\n", "#version: 0.2\na b c\n", "line 2 \"a b c\" is not two symbols");
    check_refused(true, "#version: 0.2\n", "#version: 0.2\n\n", "line 2 \"\" is not two symbols");
    check_refused(true, "#version: 0.2\n", "#version: 0.2\nq z\n", "not in the vocabulary");
    Error err = {0};
    assert_null(open_gpt2("no/such/vocab.json", GOLDEN "merges.txt", &err));
    assert_true(err.code == EXIT_DATA && strstr(err.what, "no/such/vocab.json"));
    assert_null(open_gpt2(GOLDEN "vocab.json", "no/such/merges.txt", &err));
    assert_true(err.code == EXIT_DATA && strstr(err.what, "no/such/merges.txt"));
    assert_null(open_gpt2(NULL, NULL, &err));
    assert_int_equal(err.code, EXIT_USAGE);
}

static int64_t count_tokens(const Tokenizer *tokenizer, const char *text) {
    Encoder *encoder = encoder_create(tokenizer);
    TokenBuffer out = {0};
    int64_t replaced = 0, count;
    encoder_encode(encoder, text, strlen(text), &out, &replaced);
    count = out.count;
    token_buffer_free(&out);
    encoder_free(encoder);
    return count;
}

static void last_merge_needs_no_newline(void **state) {
    // The last merge of the small vocabulary makes a Korean word one token. It must also be read if
    // the file has no final newline. Without this merge the word has several tokens.
    const char *last = "\u0120\u00ed\u0137\u013e\u00ea\u00b5\u0143 \u00ec\u0138\u00b4",
               *text = " \ud55c\uad6d\uc5b4";
    char line[64];
    Error err;
    snprintf(line, sizeof line, "%s\n", last);
    Tokenizer *cut = open_changed(true, line, last, &err), *without = open_changed(true, line, "", &err);
    assert_non_null(cut);
    assert_non_null(without);
    assert_int_equal(count_tokens(cut, text), 1);
    assert_int_equal(count_tokens(without, text), 2);
    tokenizer_close(cut);
    tokenizer_close(without);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_ids_small_vocabulary),
        cmocka_unit_test(golden_ids_gpt2),
        cmocka_unit_test(pre_tokens_of_specification),
        cmocka_unit_test(white_space_matches_unicode),
        cmocka_unit_test(fast_path_matches_pcre2),
        cmocka_unit_test(merging_matches_definition),
        cmocka_unit_test(last_duplicate_merge_wins),
        cmocka_unit_test(long_words_are_fast),
        cmocka_unit_test(decoding_restores_text),
        cmocka_unit_test(decoding_special_and_invalid_ids),
        cmocka_unit_test(byte_tokenizer),
        cmocka_unit_test(null_tokenizer),
        cmocka_unit_test(invalid_utf8_is_replaced_per_maximal_subpart),
        cmocka_unit_test(encoding_counts_replacements),
        cmocka_unit_test(malformed_vocabularies_are_refused),
        cmocka_unit_test(last_merge_needs_no_newline),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
