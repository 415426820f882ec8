// Tests tokenizer.json: golden ids of Hugging Face's `tokenizers` for small tokenizers of several
// styles (dev/ref/make_tokenizer_json_golden.py), the fast paths of pre-tokenization against PCRE2,
// patterns, the end-of-document token, and refused files.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include <cjson/cJSON.h>

#include "llmc/base/durable.h"
#include "llmc/base/json_line.h"
#include "llmc/base/utf8.h"
#include "llmc/data/pretokenize.h"
#include "llmc/data/tokenizer.h"

#define GOLDEN "test/golden/tokenizer_json/"

static Tokenizer *open_model(const char *model, const char *eod, Error *err) {
    TokenizerChoice choice = {.type = TOKENIZER_HUGGING_FACE, .model = model, .eod_token = eod};
    memset(err, 0, sizeof *err);
    return tokenizer_open(&choice, err);
}

static char *read_text(const char *path) {
    uint64_t bytes;
    Error err = {0};
    char *text = durable_read_file(path, 1 << 24, &bytes, &err);
    if (!text) fail_msg("%s (run from the repository root)", err.what);
    char *ended = malloc(bytes + 1);
    memcpy(ended, text, bytes);
    ended[bytes] = 0;
    free(text);
    return ended;
}

static cJSON *read_json(const char *path) {
    char *text = read_text(path);
    cJSON *root = cJSON_Parse(text);
    free(text);
    assert_non_null(root);
    return root;
}

static uint32_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

// ---- golden ids ----

static void check_ids(const TokenBuffer *out, const cJSON *ids, const char *style, const char *text) {
    int64_t i = 0;
    for (const cJSON *id = ids->child; id; id = id->next, i++) {
        if (i >= out->count || out->ids[i] != id->valueint)
            fail_msg("%s, token %lld of '%s'", style, (long long)i, text);
    }
    if (i != out->count)
        fail_msg("%s produces %lld ids too many for '%s'", style, (long long)(out->count - i), text);
}

// Compares the decoded text, if the golden file has one.
static void check_text(const Tokenizer *tokenizer, const TokenBuffer *ids, const cJSON *expected) {
    Text text = {0};
    size_t length;
    if (!expected) return;
    for (int64_t i = 0; i < ids->count; i++) {
        const char *piece = tokenizer_decode(tokenizer, ids->ids[i], &length);
        text_add(&text, "%.*s", (int)length, piece);
    }
    const char *start = text.data ? text.data : "";
    for (int i = tokenizer_stripped(tokenizer); i > 0 && *start == ' '; i--) start++;
    assert_string_equal(start, expected->valuestring);
    text_free(&text);
}

static void check_style(const char *style, int prefix_count, const char *eod) {
    char *folder = text_format(GOLDEN "%s", style), *ids_path = text_format("%s/ids.json", folder);
    Error err;
    Tokenizer *tokenizer = open_model(folder, NULL, &err);
    if (!tokenizer) fail_msg("%s", err.what);
    cJSON *golden = read_json(ids_path), *texts = read_json(GOLDEN "texts.json");
    assert_int_equal(tokenizer_vocab_size(tokenizer), cJSON_GetObjectItem(golden, "size")->valueint);
    size_t length;
    const char *end = tokenizer_decode(tokenizer, tokenizer_eod(tokenizer), &length);
    assert_true(length == strlen(eod) && !memcmp(end, eod, length));
    Encoder *encoder = encoder_create(tokenizer);
    TokenBuffer out = {0};
    int64_t replaced = 0;
    // In the second pass most pieces are in the cache.
    for (int pass = 0; pass < 2; pass++) {
        const cJSON *text = texts->child, *ids = cJSON_GetObjectItem(golden, "ids")->child;
        const cJSON *decoded = cJSON_GetObjectItem(golden, "decoded");
        if (decoded) decoded = decoded->child;
        for (; text && ids; text = text->next, ids = ids->next, decoded = decoded ? decoded->next : NULL) {
            out.count = 0;
            encoder_encode(encoder, text->valuestring, strlen(text->valuestring), &out, &replaced);
            check_ids(&out, ids, style, text->valuestring);
            check_text(tokenizer, &out, decoded);
        }
        assert_true(!text && !ids);
    }
    int before, after;
    out.count = 0;
    const int32_t *prefix = tokenizer_prefix(tokenizer, &before);
    tokenizer_suffix(tokenizer, &after);
    assert_true(before == prefix_count && after == 0);
    for (int i = 0; i < before; i++) token_buffer_append(&out, prefix[i]);
    encoder_encode(encoder, "hello", 5, &out, &replaced);
    check_ids(&out, cJSON_GetObjectItem(golden, "with_special"), style, "hello");
    assert_int_equal(replaced, 0);
    token_buffer_free(&out);
    encoder_free(encoder);
    tokenizer_close(tokenizer);
    cJSON_Delete(golden);
    cJSON_Delete(texts);
    free(folder);
    free(ids_path);
}

static void golden_ids(void **state) {
    check_style("gpt2", 0, "<|endoftext|>");
    check_style("llama3", 1, "<|end_of_text|>");
    check_style("qwen2", 0, "<|im_end|>");
    check_style("o200k", 0, "<|endoftext|>");
    check_style("digits", 0, "</s>");
    check_style("whole", 0, "<|endoftext|>");
    check_style("llama2", 1, "</s>");
    check_style("mistral", 1, "</s>");
    check_style("crossing", 1, "</s>");
    check_style("metaspace", 1, "</s>");
}

// ---- pieces ----

static PieceSplitter *splitter_of(const char *regex, PiecePattern **pattern) {
    Error err = {0};
    *pattern = piece_pattern_compile(regex, "a test", &err);
    if (!*pattern) fail_msg("%s", err.what);
    return piece_splitter_create(*pattern);
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

static void fast_paths_match_pcre2(void **state) {
    static const char *const regexes[] = {LLAMA3_PATTERN, QWEN2_PATTERN};
    // All texts of five symbols, with at least one symbol for each class of the patterns.
    static const char *const symbols[] = {" ", "\n", "\r", "\t",     "'",      "S",      "l",     "x",
                                          "7", "-",  "e",  "\u00a0", "\u00e9", "\u0663", "\u017f"};
    enum { SYMBOLS = sizeof symbols / sizeof *symbols, LENGTH = 5 };
    int all = 1;
    for (int i = 0; i < LENGTH; i++) all *= SYMBOLS;
    for (size_t k = 0; k < sizeof regexes / sizeof *regexes; k++) {
        PiecePattern *pattern;
        PieceSplitter *splitter = splitter_of(regexes[k], &pattern);
        for (int n = 0; n < all; n += k ? 7 : 1) {
            char text[4 * LENGTH];
            size_t bytes = 0;
            for (int i = 0, rest = n; i < LENGTH; i++, rest /= SYMBOLS) {
                const char *symbol = symbols[rest % SYMBOLS];
                memcpy(text + bytes, symbol, strlen(symbol));
                bytes += strlen(symbol);
            }
            check_against_pcre2(splitter, text, bytes);
        }
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
        piece_splitter_free(splitter);
        piece_pattern_free(pattern);
    }
}

// pieces: the expected pieces, separated by '|'.
static void check_pieces(const char *regex, const char *text, const char *pieces) {
    PiecePattern *pattern;
    PieceSplitter *splitter = splitter_of(regex, &pattern);
    size_t bytes = strlen(text);
    for (size_t start = 0, end; start < bytes; start = end) {
        size_t length = strcspn(pieces, "|");
        end = piece_end(splitter, text, bytes, start);
        if (end - start != length || memcmp(text + start, pieces, length))
            fail_msg("'%s' at %zu: '%.*s', not '%s'", text, start, (int)(end - start), text + start, pieces);
        pieces += length + (pieces[length] == '|');
    }
    assert_string_equal(pieces, "");
    piece_splitter_free(splitter);
    piece_pattern_free(pattern);
}

static void pieces_of_patterns(void **state) {
    check_pieces(LLAMA3_PATTERN, "It'S 12345 x\r\n\r\n  y!\n", "It|'S| |123|45| x|\r\n\r\n| | y|!\n");
    check_pieces(QWEN2_PATTERN, "a 123\u0663", "a| |1|2|3|\u0663");
    // Text between matches is a piece too.
    check_pieces("\\p{N}", "ab12c", "ab|1|2|c");
    check_pieces("\\p{N}+", "ab12c", "ab|12|c");
    check_pieces("[\\x61-\\x63]+|\\s", "abz\u180e\u00a0c", "ab|z\u180e|\u00a0|c");
    check_pieces("(?<=a)b|\\u0063", "abcab", "a|b|c|a|b");
}

static void long_texts_are_fast(void **state) {
    static const char *const folders[] = {"llama3", "qwen2", "o200k", "digits", "llama2", "crossing"};
    static const char *const units[] = {"a",      " ", "A",       "7",  "\n",   " \u4e2d",
                                        "\u4e2d", "-", "e\u0301", "<|", "\r\n "};
    enum { LENGTH = 1 << 19 };
    char *text = malloc(LENGTH + 8);
    for (size_t k = 0; k < sizeof folders / sizeof *folders; k++) {
        char *folder = text_format(GOLDEN "%s", folders[k]);
        Error err;
        Tokenizer *tokenizer = open_model(folder, NULL, &err);
        assert_non_null(tokenizer);
        Encoder *encoder = encoder_create(tokenizer);
        for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
            size_t bytes = 0, unit = strlen(units[u]);
            for (; bytes + unit <= LENGTH; bytes += unit) memcpy(text + bytes, units[u], unit);
            memcpy(text + bytes, " x", 2);  // the match before it must end one space earlier
            TokenBuffer out = {0};
            int64_t replaced = 0;
            struct timespec a, b;
            clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
            encoder_encode(encoder, text, bytes + 2, &out, &replaced);
            clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
            // A quadratic algorithm would take minutes. This takes 0.05 s, and several times that
            // with sanitizers.
            if (b.tv_sec - a.tv_sec > 5) fail_msg("%s takes too long for '%s'", folders[k], units[u]);
            assert_int_equal(replaced, 0);
            token_buffer_free(&out);
        }
        encoder_free(encoder);
        tokenizer_close(tokenizer);
        free(folder);
    }
    free(text);
}

static void patterns_are_translated_or_refused(void **state) {
    static const struct {
        const char *regex, *result;  // NULL: refused
    } cases[] = {
        {"a|[^\\r\\n]+\\p{L}{1,3}?", "a|[^\\r\\n]+\\p{L}{1,3}?"},
        {"\\u0041\\x{42}\\x43", "\\x{0041}\\x{42}\\x{43}"},
        {".", "[^\\n]"},
        {"(?i:'s|'re)", "(?i:'s|'re)"},
        {"(?i:ss)", NULL},  // Oniguruma also matches the single character U+00DF
        {"(?i:\\w)", NULL},
        {"(?i)a", NULL},
        {"\\w", NULL},
        {"\\h", NULL},
        {"\\R", NULL},
        {"\\p{Han}", NULL},
        {"\\p{^L}", NULL},
        {"[a&&b]", NULL},
        {"[a[b]]", NULL},
        {"[[:alpha:]]", NULL},
        {"[^\\S]", NULL},
        {"[]", NULL},
        {"[a", NULL},
        {"^a", NULL},
        {"a{2}+", NULL},
        {"a{,2}", NULL},
        {"a{2}?", NULL},  // optional for Oniguruma, lazy for PCRE2
        {"a{2,3}?", "a{2,3}?"},
        {"\\xC3\\xA9", NULL},  // bytes for Oniguruma, characters for PCRE2
        {"[\\x80-\\x{ff}]", NULL},
        {"\\x7f", "\\x{7f}"},
        {"(*UTF)a", NULL},
        {"(?<n>a)", NULL},
        {"\\", NULL},
        {"\\x{110000000}", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *why = NULL;
        size_t where;
        char *text = pattern_for_pcre2(cases[i].regex, &why, &where);
        if (!cases[i].result != !text) fail_msg("'%s': %s", cases[i].regex, text ? text : why);
        if (text) assert_string_equal(text, cases[i].result);
        else assert_true(why && *why && where <= strlen(cases[i].regex));
        free(text);
    }
    Error err = {0};
    assert_null(piece_pattern_compile("a*", "here", &err));
    assert_true(err.code == EXIT_DATA && strstr(err.what, "matches the empty string"));
    assert_null(piece_pattern_compile("a)", "here", &err));
    assert_true(err.code == EXIT_DATA && strstr(err.what, "here"));
}

// ---- end-of-document token ----

static void check_eod(const char *config, const char *name, const char *expected, const char *message) {
    char folder[] = P_tmpdir "/test_tokenizer_XXXXXX";
    assert_non_null(mkdtemp(folder));
    char *model = text_format("%s/tokenizer.json", folder),
         *companion = text_format("%s/tokenizer_config.json", folder);
    char *text = read_text(GOLDEN "llama3/tokenizer.json");
    Error err = {0};
    assert_true(durable_write_file(model, text, strlen(text), &err));
    if (config) assert_true(durable_write_file(companion, config, strlen(config), &err));
    Tokenizer *tokenizer = open_model(folder, name, &err);
    if (!tokenizer != !expected) fail_msg("%s: %s", config ? config : "no config", err.what);
    if (tokenizer) {
        size_t length;
        const char *end = tokenizer_decode(tokenizer, tokenizer_eod(tokenizer), &length);
        assert_true(length == strlen(expected) && !memcmp(end, expected, length));
    } else {
        assert_int_equal(err.code, EXIT_DATA);
        if (!strstr(err.what, message)) fail_msg("'%s' lacks '%s'", err.what, message);
    }
    tokenizer_close(tokenizer);
    unlink(model);
    unlink(companion);
    rmdir(folder);
    free(text);
    free(model);
    free(companion);
}

static void end_of_document_token(void **state) {
    check_eod(NULL, NULL, "<|end_of_text|>", NULL);
    check_eod("{\"eos_token\": \"<|eot_id|>\"}", NULL, "<|eot_id|>", NULL);
    check_eod("{\"eos_token\": {\"content\": \"<|eot_id|>\"}}", NULL, "<|eot_id|>", NULL);
    check_eod("{\"eos_token\": null}", NULL, "<|end_of_text|>", NULL);
    check_eod("{\"eos_token\": \"<|eot_id|>\"}", "<|begin_of_text|>", "<|begin_of_text|>", NULL);
    check_eod("{\"eos_token\": \"</s>\"}", NULL, NULL, "\"</s>\"");
    check_eod("{", NULL, NULL, "tokenizer_config.json is not a JSON object");
    check_eod(NULL, "<none>", NULL, "--tokenizer-eod");
}

// ---- refused files ----

// Opens a copy of a golden tokenizer.json after replacing `from` by `to`.
static Tokenizer *open_changed(const char *style, const char *from, const char *to, Error *err) {
    char path[] = P_tmpdir "/test_tokenizer_XXXXXX";
    char *golden = text_format(GOLDEN "%s/tokenizer.json", style), *text = read_text(golden);
    char *at = strstr(text, from);
    if (!at) fail_msg("%s has no %s", golden, from);
    char *changed = text_format("%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    close(mkstemp(path));
    assert_true(durable_write_file(path, changed, strlen(changed), err));
    Tokenizer *tokenizer = open_model(path, NULL, err);
    if (!tokenizer && !strstr(err->what, path)) fail_msg("'%s' does not name the file", err->what);
    unlink(path);
    free(golden);
    free(text);
    free(changed);
    return tokenizer;
}

static void check_refused(const char *style, const char *from, const char *to, const char *message) {
    Error err = {0};
    Tokenizer *tokenizer = open_changed(style, from, to, &err);
    if (tokenizer) fail_msg("%s with %s for %s is not refused", style, to, from);
    assert_int_equal(err.code, EXIT_DATA);
    if (!strstr(err.what, message)) fail_msg("'%s' lacks '%s'", err.what, message);
    assert_null(strchr(err.what, '\n'));
}

static void check_taken(const char *style, const char *from, const char *to) {
    Error err = {0};
    Tokenizer *tokenizer = open_changed(style, from, to, &err);
    if (!tokenizer) fail_msg("%s", err.what);
    tokenizer_close(tokenizer);
}

// Compares the ids and the decoded bytes with the output of `tokenizers` for the changed file.
static void check_changed(const char *style, const char *from, const char *to, const char *text,
                          const char *ids, const char *decoded) {
    Error err = {0};
    Tokenizer *tokenizer = open_changed(style, from, to, &err);
    if (!tokenizer) fail_msg("%s", err.what);
    Encoder *encoder = encoder_create(tokenizer);
    TokenBuffer out = {0};
    int64_t replaced = 0;
    char found[200] = "", bytes[200] = "";
    encoder_encode(encoder, text, strlen(text), &out, &replaced);
    for (int64_t i = 0; i < out.count; i++) {
        size_t length;
        const char *piece = tokenizer_decode(tokenizer, out.ids[i], &length);
        snprintf(found + strlen(found), sizeof found - strlen(found), "%s%d", i ? " " : "", out.ids[i]);
        strncat(bytes, piece, length);
    }
    assert_string_equal(found, ids);
    assert_string_equal(bytes, decoded);
    token_buffer_free(&out);
    encoder_free(encoder);
    tokenizer_close(tokenizer);
}

#define ADDED(id, content, left, right) \
    "{\"id\":" #id ",\"content\":\"" content "\",\"single_word\":false,\"lstrip\":" #left \
    ",\"rstrip\":" #right ",\"normalized\":false,\"special\":true}"

static void added_tokens_of_the_vocabulary(void **state) {
    const char *list = "\"added_tokens\":[";
    // The vocabulary's token "é" is the byte E9, which is a part of other characters too.
    check_changed("gpt2", list, "\"added_tokens\":[" ADDED(165, "\u00e9", false, false) ",", "\u00e9\u939f",
                  "165 165 236 253", "\xe9\u939f");
    // This word is a single token only with ignore_merges.
    check_changed("llama3", list, "\"added_tokens\":[" ADDED(556, "\u0120world", false, false) ",",
                  "the world \u0120world", "461 556 220 556", "the world  world");
}

static void added_tokens_that_absorb_white_space(void **state) {
    const char *end = "\"special\":true}],\"normalizer\"";
    const char *two = "\"special\":true}," ADDED(557, "<r>", false, true) "," ADDED(558, "\\n\\n", true,
                                                                                    false) "],\"normalizer\"";
    check_changed("gpt2", end, two, "<r>x \n\n", "557 87 558", "<r>x\n\n");
    // The token before it has absorbed this token completely.
    check_changed("gpt2", end, two, "<r>\n\nx", "557 87", "<r>x");
    const char *stays = "\"special\":true}," ADDED(557, "<r>", false,
                                                   true) "," ADDED(558, "\\n\\n", false,
                                                                   false) "],\"normalizer\"";
    check_changed("gpt2", end, stays, "<r>\n\nx", "557 558 87", "<r>\n\nx");
}

static void other_tokenizers_are_refused(void **state) {
    check_refused("gpt2", "{", "", "not a JSON object");
    check_refused("gpt2", "{", "{\"\xff\":1,", "not a JSON object in UTF-8");
    check_refused("gpt2", "\"model\":", "\"modell\":", "no \"model\"");
    check_refused("gpt2", "\"type\":\"BPE\"", "\"type\":\"Unigram\"", "a Unigram tokenizer is not supported");
    check_refused("gpt2", "\"type\":\"BPE\"", "\"type\":\"WordPiece\"", "a WordPiece tokenizer");
    check_refused("gpt2", "\"dropout\":null", "\"dropout\":0.1", "dropout");
    check_refused("gpt2", "\"continuing_subword_prefix\":null", "\"continuing_subword_prefix\":\"##\"",
                  "continuing_subword_prefix");
    check_refused("gpt2", "\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"</w>\"",
                  "end_of_word_suffix");
    check_refused("gpt2", "\"byte_fallback\":false", "\"byte_fallback\":true", "byte_fallback");
    check_refused("gpt2", "\"ignore_merges\":false", "\"ignore_merges\":1", "ignore_merges");
    check_refused("gpt2", "\"normalizer\":null", "\"normalizer\":{\"type\":\"Lowercase\"}",
                  "normalizer Lowercase");
    check_refused("gpt2", "\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\"}", "Sequence");
    check_refused("gpt2", "\"pre_tokenizer\":{\"type\":\"ByteLevel\"",
                  "\"pre_tokenizer\":{\"type\":\"Whitespace\"", "pre_tokenizer Whitespace");
    check_refused("gpt2", "\"pre_tokenizer\":{", "\"pre_tokenizer\":null,\"x\":{",
                  "does not end in ByteLevel");
    check_refused("gpt2", "\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"WordPiece\"",
                  "decoder WordPiece");
    check_refused("gpt2", "\"post_processor\":{\"type\":\"ByteLevel\"",
                  "\"post_processor\":{\"type\":\"BertProcessing\"", "post_processor BertProcessing");
    check_refused("llama3", "\"Isolated\"", "\"Removed\"", "Isolated");
    check_refused("llama3", "\"invert\":false", "\"invert\":true", "invert");
    check_refused("llama3", "(?i:'s", "\\\\w|(?i:'s", "an unknown escape");
    check_refused("llama3", "(?i:'s", "(?i:'s)|(", "PCRE2 cannot split");
    check_refused("llama3", "{\"type\":\"Split\"", "{\"type\":\"ByteLevel\"},{\"type\":\"Split\"",
                  "after ByteLevel");
    check_refused("llama3", "\"ids\":[", "\"ids\":[99999,", "unknown or too many ids");
    check_refused("llama3", "\"ids\":[", "\"ids\":\"\",\"x\":[", "does not define the ids");
    check_refused("llama3", "\"single\":[", "\"single\":[{\"Sequence\":{}},", "exactly one text");
}

static void other_tokenizers_of_characters_are_refused(void **state) {
    const char *space = "\"replacement\":\"\u2581\"", *strip = "\"type\":\"Strip\"";
    const char *prepend = "\"type\":\"Prepend\"", *decoder = "\"decoder\":{\"type\":\"Sequence\"";
    check_refused("llama2", "\"type\":\"BPE\"", "\"type\":\"Unigram\"", "a Unigram tokenizer");
    check_refused("llama2", "\"byte_fallback\":true", "\"byte_fallback\":false", "BPE with byte_fallback");
    check_refused("llama2", "\"byte_fallback\":true", "\"byte_fallback\":1", "byte_fallback");
    check_refused("llama2", "\"fuse_unk\":true", "\"fuse_unk\":2", "fuse_unk");
    check_refused("llama2", "\"unk_token\":\"<unk>\"", "\"unk_token\":\"<nil>\"", "<nil>");
    check_refused("crossing", "\"unk_token\":\"<unk>\"", "\"unk_token\":null", "text would be lost");
    check_refused("llama2", prepend, "\"type\":\"Strip\"", "normalizer Strip");
    check_refused("llama2", "\"prepend\":\"", "\"prepend\":\"1234", "normalizer Prepend");
    check_refused("llama2", "{\"String\":\" \"}", "{\"Regex\":\" \"}", "\"pattern\" of a \"String\"");
    check_refused("llama2", "{\"String\":\" \"}", "{\"String\":\"\"}", "\"pattern\" of a \"String\"");
    check_refused("llama2", "\"content\":\"\u2581\"", "\"content\":\"1234\"", "3 times longer");
    check_refused("llama2", "\"content\":\"the end\"", "\"content\":\"\"", "no \"content\"");
    check_refused("mistral", space, "\"replacement\":\"ab\"", "one character");
    check_refused("mistral", space, "\"x\":0", "one character");
    check_refused("mistral", "\"first\"", "\"second\"", "prepend_scheme");
    check_refused("mistral", "\"split\":false", "\"split\":0", "\"split\"");
    check_refused("mistral", "\"split\":false", "\"split\":false,\"add_prefix_space\":false", "contradicts");
    check_refused("mistral", "\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}",
                  "Metaspace with a normalizer");
    check_refused("mistral", decoder, "\"decoder\":null,\"x\":{\"type\":\"Sequence\"", "no decoder");
    check_refused("mistral", strip, "\"type\":\"Metaspace\"", "decoder Metaspace");
    check_refused("mistral", "\"type\":\"ByteFallback\"", "\"type\":\"Strip\"", "after Fuse");
    check_refused("mistral", "\"stop\":0", "\"stop\":1", "at the start");
}

static void malformed_vocabularies_are_refused(void **state) {
    check_refused("gpt2", "\"Ġno\":300,", "", "no token has the id 300");
    check_refused("gpt2", "\"!\":0,", "\"!\":1,", "same id 1");
    check_refused("gpt2", "\"!\":0,", "\"!\":-1,", "not an integer");
    check_refused("gpt2", "\"!\":0,", "\"!\":1e300,", "not an integer");
    check_refused("gpt2", "\"!\":0,", "\"!!!\":0,", "byte 0x21");
    check_refused("gpt2", "\"merges\":[", "\"merges\":[\"a b c\",", "merge 1 \"a b c\" is not two symbols");
    check_refused("gpt2", "\"merges\":[", "\"merges\":[\"q z\",", "not in the vocabulary");
    check_refused("gpt2", "\"merges\":[", "\"merges\":[7,", "merge 1");
    check_refused("qwen2", "\"merges\":[", "\"merges\":[[\"a\"],", "merge 1");
    check_refused("gpt2", "\"merges\":[", "\"merges\":{},\"x\":[", "no list of \"merges\"");
    check_refused("gpt2", "\"vocab\":{", "\"vocab\":[],\"x\":{", "no \"vocab\"");
    check_refused("gpt2", "\"content\":\"<|endoftext|>\"", "\"content\":\"<|end|>\"", "same id");
    check_refused("gpt2", "\"content\":\"<|endoftext|>\"", "\"content\":\"\"", "no \"content\"");
    check_refused("qwen2", "\"content\":\"<|im_start|>\"", "\"content\":\"<|endoftext|>\"", "occurs twice");
    check_refused("qwen2", "\"added_tokens\":[", "\"added_tokens\":[" ADDED(557, "<x>", false, false) ",",
                  "has id 557, but the next id is 556");
    check_refused("qwen2", "\"content\":\"<|im_start|>\"", "\"content\":\"\u2581\\u0000\"", "U+0000");
    check_refused("qwen2", "\"content\":\"<|im_start|>\"", "\"content\":\"a\"", "but 64 in the vocabulary");
    check_refused("qwen2", "\"single_word\":false", "\"single_word\":true", "single_word");
    check_refused("qwen2", "\"lstrip\":false", "\"lstrip\":0", "a flag that is not true or false");
    check_refused("qwen2", "\"added_tokens\":[{", "\"added_tokens\":[7,{", "no \"content\"");
    Error err;
    assert_null(open_model("no/such/tokenizer.json", NULL, &err));
    assert_true(err.code == EXIT_DATA && strstr(err.what, "no/such/tokenizer.json"));
    assert_null(open_model(NULL, NULL, &err));
    assert_int_equal(err.code, EXIT_USAGE);
}

static void harmless_differences_are_accepted(void **state) {
    check_taken("gpt2", "\"type\":\"BPE\",", "");
    check_taken("gpt2", "\"dropout\":null", "\"dropout\":0.0");
    check_taken("gpt2", "\"continuing_subword_prefix\":null", "\"continuing_subword_prefix\":\"\"");
    check_taken("gpt2", "\"truncation\":null", "\"truncation\":{\"max_length\":5}");
    check_taken("mistral", "\"fuse_unk\":true", "\"fuse_unk\":null");
    check_taken("mistral", "\"split\":false", "\"split\":false,\"add_prefix_space\":true");
    check_taken("gpt2", "\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[]}");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_ids),
        cmocka_unit_test(fast_paths_match_pcre2),
        cmocka_unit_test(pieces_of_patterns),
        cmocka_unit_test(long_texts_are_fast),
        cmocka_unit_test(patterns_are_translated_or_refused),
        cmocka_unit_test(end_of_document_token),
        cmocka_unit_test(added_tokens_of_the_vocabulary),
        cmocka_unit_test(added_tokens_that_absorb_white_space),
        cmocka_unit_test(other_tokenizers_are_refused),
        cmocka_unit_test(other_tokenizers_of_characters_are_refused),
        cmocka_unit_test(malformed_vocabularies_are_refused),
        cmocka_unit_test(harmless_differences_are_accepted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
