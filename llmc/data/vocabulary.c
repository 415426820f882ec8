// Reads GPT-2's vocab.json and merges.txt. See vocabulary.h. Both spell tokens in the byte
// alphabet, one printable character per byte.
#include "llmc/data/vocabulary.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/data/symbols.h"

// Larger files cannot be vocabularies: GPT-2's two have 1.0 and 0.5 MB, Llama 3's has 17 MB.
enum { MAX_VOCABULARY_BYTES = 1 << 28 };
#define HINT "dev/data/get_gpt2_vocab.sh downloads GPT-2's files"

void token_table_init(TokenTable *table, int size, size_t total_bytes) {
    assert(size >= 0);
    table->bytes = xmalloc(total_bytes + 1, "the bytes of the vocabulary");
    table->start = xcalloc((size_t)size + 1, sizeof *table->start, "the vocabulary");
    table->size = size;
    table->eod = -1;
}

void token_table_append(TokenTable *table, int next, const char *bytes, size_t length) {
    assert(next >= 0 && next < table->size);
    memcpy(table->bytes + table->start[next], bytes, length);
    table->start[next + 1] = table->start[next] + length;
}

void token_table_free(TokenTable *table) {
    free(table->bytes);
    free(table->start);
    *table = (TokenTable){0};
}

static int64_t line_of(const char *text, const char *where) {
    int64_t line = 1;
    for (const char *p = text; p < where; p++) line += *p == '\n';
    return line;
}

char *vocabulary_file(const char *path, const char *hint, size_t *bytes, Error *err) {
    uint64_t size = 0;
    if (!durable_exists(path)) {
        data_error(err, "cannot open %s: %s; %s", path, strerror(errno), hint);
        return NULL;
    }
    char *text = durable_read_file(path, MAX_VOCABULARY_BYTES, &size, err);
    if (!text && err) err->code = EXIT_DATA;
    *bytes = (size_t)size;
    return text;
}

static void fill_table(TokenTable *table, const Symbols *symbols, const Alphabet *alphabet,
                       size_t text_bytes) {
    bool foreign;
    token_table_init(table, symbols->count, text_bytes);
    for (int id = 0; id < symbols->count; id++) {
        // a token never has more bytes than its text
        const char *text = symbols->of_id[id];
        char *out = table->bytes + table->start[id];
        table->start[id + 1] = table->start[id] + symbol_bytes(alphabet, text, strlen(text), out, &foreign);
    }
}

// The ids of vocab.json must be 0 .. count-1, each used once.
static bool parse_vocab(const cJSON *root, size_t text_bytes, TokenTable *table, int32_t byte_id[256],
                        Symbols *symbols, const char *path, Error *err) {
    int count = cJSON_IsObject(root) ? cJSON_GetArraySize(root) : 0;
    if (!count) {
        return data_error(err, "%s is not a JSON object of tokens and ids; use GPT-2's vocab.json", path);
    }
    Alphabet alphabet = byte_alphabet();
    symbols_init(symbols, count);
    for (const cJSON *entry = root->child; entry; entry = entry->next) {
        if (!symbols_add(symbols, entry->string, entry, path, err)) return false;
    }
    if (!symbols_of_bytes(symbols, &alphabet, byte_id, path, err)) return false;
    int eod = symbols_find(symbols, END_OF_TEXT, strlen(END_OF_TEXT));
    if (eod < 0) {
        return data_error(err, "%s has no " END_OF_TEXT ", the end-of-document token; add it", path);
    }
    fill_table(table, symbols, &alphabet, text_bytes);
    table->eod = eod;
    return true;
}

static bool parse_merges(const Symbols *symbols, const char *text, size_t bytes, Bpe *bpe, const char *path,
                         const char *vocab_file, Error *err) {
    bpe_init(bpe, line_of(text, text + bytes));
    const char *end = text + bytes;
    int64_t line = 1;
    int32_t rank = 0;
    for (const char *p = text, *stop; p < end; p = stop + 1, line++) {
        stop = memchr(p, '\n', (size_t)(end - p));
        if (!stop) stop = end;
        size_t length = (size_t)(stop - p);
        if (length && p[length - 1] == '\r') length--;
        if (line == 1 && length >= 8 && !memcmp(p, "#version", 8)) continue;
        if (!length && stop + 1 >= end) break;  // empty last line
        BpeMerge merge = {.rank = rank};
        const char *why;
        if (!symbols_merge_line(symbols, p, length, &merge, &why)) {
            return data_error(err, "%s line %lld \"%.*s\" %s; check that it belongs to %s", path,
                              (long long)line, (int)(length < 80 ? length : 80), p, why, vocab_file);
        }
        bpe_add(bpe, merge);
        rank++;
    }
    return true;
}

static bool read_merges(const Symbols *symbols, Bpe *bpe, const char *vocab_file, const char *merge_file,
                        Error *err) {
    size_t bytes;
    char *text = vocabulary_file(merge_file, HINT, &bytes, err);
    bool good = text && parse_merges(symbols, text, bytes, bpe, merge_file, vocab_file, err);
    free(text);
    return good;
}

bool vocabulary_read(TokenTable *table, Bpe *bpe, const char *vocab_file, const char *merge_file,
                     Error *err) {
    size_t bytes;
    Symbols symbols = {0};
    *table = (TokenTable){0};
    *bpe = (Bpe){0};
    char *text = vocabulary_file(vocab_file, HINT, &bytes, err);
    if (!text) return false;
    const char *stop = text;
    cJSON *root = cJSON_ParseWithLengthOpts(text, bytes + 1, &stop, 1);
    bool good = root || data_error(err,
                                   "%s line %lld is not valid JSON; use vocab.json, and merges.txt as "
                                   "--merge-file, or download it again",
                                   vocab_file, (long long)line_of(text, stop));
    good = good && parse_vocab(root, bytes, table, bpe->byte_id, &symbols, vocab_file, err) &&
           read_merges(&symbols, bpe, vocab_file, merge_file, err);
    symbols_free(&symbols);
    cJSON_Delete(root);
    free(text);
    if (good) return true;
    token_table_free(table);
    bpe_free(bpe);
    return false;
}
