// Reads GPT-2's vocab.json and merges.txt: see vocabulary.h. Both write a token as text in which
// every byte is one printable character.
#include "llmc/data/vocabulary.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/base/utf8.h"

// Larger files are no vocabulary (GPT-2's two have 1.0 and 0.5 MB).
enum { MAX_VOCABULARY_BYTES = 1 << 28 };

void token_table_init(TokenTable *table, int size, size_t total_bytes) {
    table->bytes = xmalloc(total_bytes + 1, "the bytes of the vocabulary");
    table->start = xcalloc((size_t)size + 1, sizeof *table->start, "the vocabulary");
    table->size = size;
    table->eod = -1;
}

void token_table_append(TokenTable *table, int next, const char *bytes, size_t length) {
    memcpy(table->bytes + table->start[next], bytes, length);
    table->start[next + 1] = table->start[next] + length;
}

void token_table_free(TokenTable *table) {
    free(table->bytes);
    free(table->start);
    *table = (TokenTable){0};
}

// ---- the byte alphabet: bytes 21..7E, A1..AC, AE..FF stand for themselves, the other 68 in order

static bool stands_for_itself(uint32_t byte) {
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

enum { ALPHABET_END = 0x144 };

typedef struct Alphabet {
    uint32_t code_point[256];    // of every byte
    int16_t byte[ALPHABET_END];  // of every code point, -1 where it is none of the alphabet
} Alphabet;

static Alphabet byte_alphabet(void) {
    Alphabet alphabet;
    memset(alphabet.byte, -1, sizeof alphabet.byte);
    uint32_t shifted = 0x100;
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t code_point = stands_for_itself(byte) ? byte : shifted++;
        alphabet.code_point[byte] = code_point;
        alphabet.byte[code_point] = (int16_t)byte;
    }
    return alphabet;
}

// Bytes of a token as the files write it. A token with characters outside the alphabet (an added
// one, such as a name with spaces) keeps its UTF-8.
static size_t symbol_bytes(const Alphabet *alphabet, const char *symbol, size_t length, char *out) {
    size_t count = 0;
    for (size_t i = 0; i < length;) {
        uint32_t code_point;
        i += utf8_next(symbol + i, length - i, &code_point);
        int byte = code_point < ALPHABET_END ? alphabet->byte[code_point] : -1;
        if (byte < 0) {
            memcpy(out, symbol, length);
            return length;
        }
        out[count++] = (char)byte;
    }
    return count;
}

// ---- a hash map from a token's text to its id, needed only while the files are read ----

typedef struct SymbolMap {
    const char **symbols;  // open addressing; NULL is empty. The text belongs to the JSON tree
    size_t *lengths;
    int *ids;
    size_t slots;
} SymbolMap;

static void symbol_map_init(SymbolMap *map, size_t count) {
    map->slots = 64;
    while (map->slots < 2 * count + 1) map->slots *= 2;
    map->symbols = xcalloc(map->slots, sizeof *map->symbols, "reading the vocabulary");
    map->lengths = xmalloc(map->slots * sizeof *map->lengths, "reading the vocabulary");
    map->ids = xmalloc(map->slots * sizeof *map->ids, "reading the vocabulary");
}

static void symbol_map_free(SymbolMap *map) {
    free(map->symbols);
    free(map->lengths);
    free(map->ids);
}

// The slot that holds this text, or the empty one where it belongs.
static size_t symbol_slot(const SymbolMap *map, const char *symbol, size_t length) {
    uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
    for (size_t i = 0; i < length; i++) hash = (hash ^ (uint8_t)symbol[i]) * 0x100000001B3u;
    size_t slot = (size_t)hash & (map->slots - 1);
    while (map->symbols[slot] &&
           (map->lengths[slot] != length || memcmp(map->symbols[slot], symbol, length))) {
        slot = (slot + 1) & (map->slots - 1);
    }
    return slot;
}

// The id of a token's text, -1 when it is not in the vocabulary.
static int symbol_id(const SymbolMap *map, const char *symbol, size_t length) {
    size_t slot = symbol_slot(map, symbol, length);
    return map->symbols[slot] ? map->ids[slot] : -1;
}

// ---- files ----

static int64_t line_of(const char *text, const char *where) {
    int64_t line = 1;
    for (const char *p = text; p < where; p++) line += *p == '\n';
    return line;
}

// The whole file, NUL-terminated; NULL and err on failure.
static char *read_file(const char *path, size_t *bytes, Error *err) {
    if (!durable_exists(path)) {
        error_set(err, EXIT_DATA, "cannot open %s: %s; dev/data/get_gpt2_vocab.sh downloads GPT-2's files",
                  path, strerror(errno));
        return NULL;
    }
    uint64_t size = 0;
    char *text = durable_read_file(path, MAX_VOCABULARY_BYTES, &size, err);
    if (!text && err) err->code = EXIT_DATA;
    *bytes = (size_t)size;
    return text;
}

// ---- vocab.json ----

// Every entry's id, checked to be 0 .. count-1 each once; entries[id] = its JSON node. Also fills
// the map.
static bool index_entries(const cJSON *root, const cJSON **entries, int count, SymbolMap *map,
                          const char *path, Error *err) {
    for (const cJSON *entry = root->child; entry; entry = entry->next) {
        double value = cJSON_IsNumber(entry) ? entry->valuedouble : -1;
        int id = value >= 0 && value < count ? (int)value : -1;
        if (id < 0 || (double)id != value) {
            return error_set(err, EXIT_DATA,
                             "%s: the id of \"%.80s\" is not a whole number from 0 to %d; use a vocabulary "
                             "with ids 0..n-1",
                             path, entry->string, count - 1);
        }
        if (entries[id]) {
            return error_set(err, EXIT_DATA,
                             "%s: \"%.80s\" and \"%.80s\" have the same id %d; every token needs its own",
                             path, entries[id]->string, entry->string, id);
        }
        size_t length = strlen(entry->string), slot = symbol_slot(map, entry->string, length);
        if (map->symbols[slot]) {
            return error_set(err, EXIT_DATA, "%s: \"%.80s\" is there twice (ids %d and %d); remove one", path,
                             entry->string, map->ids[slot], id);
        }
        map->symbols[slot] = entry->string;
        map->lengths[slot] = length;
        map->ids[slot] = id;
        entries[id] = entry;
    }
    return true;
}

static bool find_byte_symbols(const SymbolMap *map, const Alphabet *alphabet, int32_t byte_id[256],
                              const char *path, Error *err) {
    for (int byte = 0; byte < 256; byte++) {
        char symbol[4];
        size_t length = utf8_write(alphabet->code_point[byte], symbol);
        byte_id[byte] = symbol_id(map, symbol, length);
        if (byte_id[byte] < 0) {
            return error_set(err, EXIT_DATA,
                             "%s: no entry for byte 0x%02X (\"%.*s\"); a byte-level vocabulary holds all 256",
                             path, (unsigned)byte, (int)length, symbol);
        }
    }
    return true;
}

static void fill_table(TokenTable *table, const cJSON **entries, int count, const Alphabet *alphabet,
                       size_t text_bytes) {
    token_table_init(table, count, text_bytes);
    for (int id = 0; id < count; id++) {
        // A token's bytes are never more than its text's.
        char *out = table->bytes + table->start[id];
        size_t length = symbol_bytes(alphabet, entries[id]->string, strlen(entries[id]->string), out);
        table->start[id + 1] = table->start[id] + length;
    }
}

static bool parse_vocab(const cJSON *root, size_t text_bytes, TokenTable *table, int32_t byte_id[256],
                        SymbolMap *map, const char *path, Error *err) {
    int count = cJSON_IsObject(root) ? cJSON_GetArraySize(root) : 0;
    if (!count) {
        return error_set(err, EXIT_DATA,
                         "%s is not a JSON object of tokens and ids; is it GPT-2's vocab.json?", path);
    }
    Alphabet alphabet = byte_alphabet();
    symbol_map_init(map, (size_t)count);
    const cJSON **entries = xcalloc((size_t)count, sizeof *entries, "reading the vocabulary");
    bool good = index_entries(root, entries, count, map, path, err) &&
                find_byte_symbols(map, &alphabet, byte_id, path, err);
    int eod = good ? symbol_id(map, END_OF_TEXT, strlen(END_OF_TEXT)) : -1;
    if (good && eod < 0) {
        good = error_set(err, EXIT_DATA, "%s has no " END_OF_TEXT ", the end-of-document token; add it",
                         path);
    }
    if (good) {
        fill_table(table, entries, count, &alphabet, text_bytes);
        table->eod = eod;
    } else {
        symbol_map_free(map);
    }
    free(entries);
    return good;
}

// ---- merges.txt ----

// One line "left right": both parts and their concatenation must be tokens.
static bool parse_merge(const SymbolMap *map, const char *line, size_t length, BpeMerge *merge,
                        const char **why) {
    const char *space = memchr(line, ' ', length);
    size_t left = space ? (size_t)(space - line) : 0, right = space ? length - left - 1 : 0;
    *why = "is not two symbols with one space between them";
    if (!left || !right || memchr(space + 1, ' ', right)) return false;
    char joined[4096];
    *why = "is longer than any token";
    if (left + right > sizeof joined) return false;
    memcpy(joined, line, left);
    memcpy(joined + left, space + 1, right);
    merge->left = symbol_id(map, line, left);
    merge->right = symbol_id(map, space + 1, right);
    merge->merged = symbol_id(map, joined, left + right);
    *why = "has a symbol, or makes one, that is not in the vocabulary";
    return merge->left >= 0 && merge->right >= 0 && merge->merged >= 0;
}

static bool parse_merges(const SymbolMap *map, const char *text, size_t bytes, Bpe *bpe, const char *path,
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
        if (!length && stop + 1 >= end) break;  // an empty last line
        BpeMerge merge = {.rank = rank++};
        const char *why;
        if (!parse_merge(map, p, length, &merge, &why)) {
            bpe_free(bpe);
            return error_set(err, EXIT_DATA, "%s line %lld \"%.*s\" %s; check that it belongs to %s", path,
                             (long long)line, (int)(length < 80 ? length : 80), p, why, vocab_file);
        }
        bpe_add(bpe, merge);
    }
    return true;
}

static bool read_merges(const SymbolMap *map, Bpe *bpe, const char *vocab_file, const char *merge_file,
                        Error *err) {
    size_t bytes;
    char *text = read_file(merge_file, &bytes, err);
    bool good = text && parse_merges(map, text, bytes, bpe, merge_file, vocab_file, err);
    free(text);
    return good;
}

bool vocabulary_read(TokenTable *table, Bpe *bpe, const char *vocab_file, const char *merge_file,
                     Error *err) {
    size_t bytes;
    char *text = read_file(vocab_file, &bytes, err);
    if (!text) return false;
    const char *stop = text;
    cJSON *root = cJSON_ParseWithLengthOpts(text, bytes + 1, &stop, 1);
    SymbolMap map;
    bool good;
    if (!root) {
        good = error_set(err, EXIT_DATA,
                         "%s line %lld is not valid JSON; give vocab.json, and merges.txt as --merge-file, "
                         "or download it again",
                         vocab_file, (long long)line_of(text, stop));
    } else {
        good = parse_vocab(root, bytes, table, bpe->byte_id, &map, vocab_file, err);
        if (good && !read_merges(&map, bpe, vocab_file, merge_file, err)) {
            token_table_free(table);
            symbol_map_free(&map);
            good = false;
        } else if (good) {
            symbol_map_free(&map);
        }
    }
    cJSON_Delete(root);
    free(text);
    return good;
}
