// Tokenizers and encoders. See tokenizer.h. An encoder repairs invalid UTF-8, extracts added tokens
// (added_tokens.c), normalizes the rest (normalize.c), pre-tokenizes it (pretokenize.c) and merges
// the bytes or characters of each piece (bpe.c). Recent pieces are cached.
#include "llmc/data/tokenizer.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/utf8.h"
#include "llmc/data/tokenizer_json.h"

struct Tokenizer {
    TokenizerType type;
    BpeParts parts;  // BPE types: all parts; others: only the table
};

static void fill_byte_table(TokenTable *table) {
    token_table_init(table, 257, 256 + strlen(END_OF_TEXT));
    for (int id = 0; id < 256; id++) token_table_append(table, id, (char[]){(char)id}, 1);
    token_table_append(table, 256, END_OF_TEXT, strlen(END_OF_TEXT));
    table->eod = 256;
}

// Parses a word of decimal digits; returns -1 if it is not an id of the vocabulary.
static int64_t number_id(const char *word, size_t length, int vocab_size) {
    int64_t id = 0;
    for (size_t i = 0; i < length; i++) {
        if (word[i] < '0' || word[i] > '9') return -1;
        id = 10 * id + (word[i] - '0');
        if (id >= vocab_size) return -1;
    }
    return id;
}

static bool fill_null_table(TokenTable *table, const TokenizerChoice *choice, Error *err) {
    int64_t last = choice->null_vocab_size;
    const char *word = choice->eod_token;
    if (last < 1 || last >= INT32_MAX - 1) {
        return usage_error(err,
                           "NullTokenizer cannot have %" PRId64 " ids; set --vocab-size to a positive number",
                           last);
    }
    int64_t eod = word ? number_id(word, strlen(word), (int)last + 1) : last;
    if (eod < 0)
        return usage_error(err, "--tokenizer-eod '%.80s' is not a token id; use 0 to %" PRId64, word, last);
    token_table_init(table, (int)last + 1, 11 * (size_t)last + strlen(END_OF_TEXT));
    for (int id = 0; id <= last; id++) {
        char text[16] = END_OF_TEXT;
        if (id != eod) snprintf(text, sizeof text, " %d", id);
        token_table_append(table, id, text, strlen(text));
    }
    table->eod = (int)eod;
    return true;
}

static bool open_bpe(Tokenizer *tokenizer, const TokenizerChoice *choice, Error *err) {
    const char *vocab_file = choice->vocab_file, *merge_file = choice->merge_file;
    if (!vocab_file || !merge_file) {
        return usage_error(err,
                           "GPT2BPETokenizer needs --vocab-file and --merge-file; dev/data/get_gpt2_vocab.sh "
                           "downloads GPT-2's");
    }
    BpeParts *parts = &tokenizer->parts;
    if (!vocabulary_read(&parts->table, &parts->bpe, vocab_file, merge_file, err)) return false;
    parts->steps.step[0].pattern = piece_pattern_compile(GPT2_PATTERN, vocab_file, err);
    parts->steps.count = 1;
    return parts->steps.step[0].pattern != NULL;
}

static bool open_json(Tokenizer *tokenizer, const TokenizerChoice *choice, Error *err) {
    if (!choice->model) {
        return usage_error(err,
                           "HuggingFaceTokenizer needs --tokenizer-model, a tokenizer.json or its directory");
    }
    return tokenizer_json_read(&tokenizer->parts, choice->model, choice->eod_token, err);
}

Tokenizer *tokenizer_open(const TokenizerChoice *choice, Error *err) {
    Tokenizer *tokenizer = xcalloc(1, sizeof *tokenizer, "the tokenizer");
    tokenizer->type = choice->type;
    bool good = true;
    switch (choice->type) {
        case TOKENIZER_GPT2_BPE: good = open_bpe(tokenizer, choice, err); break;
        case TOKENIZER_BYTE: fill_byte_table(&tokenizer->parts.table); break;
        case TOKENIZER_HUGGING_FACE: good = open_json(tokenizer, choice, err); break;
        case TOKENIZER_NULL: good = fill_null_table(&tokenizer->parts.table, choice, err); break;
    }
    if (good) return tokenizer;
    free(tokenizer);
    return NULL;
}

void tokenizer_close(Tokenizer *tokenizer) {
    if (!tokenizer) return;
    bpe_parts_free(&tokenizer->parts);
    free(tokenizer);
}

int tokenizer_vocab_size(const Tokenizer *tokenizer) { return tokenizer->parts.table.size; }

int tokenizer_eod(const Tokenizer *tokenizer) { return tokenizer->parts.table.eod; }

const int32_t *tokenizer_prefix(const Tokenizer *tokenizer, int *count) {
    *count = tokenizer->parts.around.before;
    return tokenizer->parts.around.id;
}

const int32_t *tokenizer_suffix(const Tokenizer *tokenizer, int *count) {
    *count = tokenizer->parts.around.after;
    return tokenizer->parts.around.id + tokenizer->parts.around.before;
}

const char *tokenizer_decode(const Tokenizer *tokenizer, int id, size_t *bytes) {
    const TokenTable *table = &tokenizer->parts.table;
    *bytes = 0;
    if (id < 0 || id >= table->size) return "";
    *bytes = table->start[id + 1] - table->start[id];
    return table->bytes + table->start[id];
}

int tokenizer_stripped(const Tokenizer *tokenizer) { return tokenizer->parts.stripped; }

// ---- word cache: direct-mapped ----

// Most pieces of running text have at most 16 bytes and 3 ids; an entry is half a cache line.
enum { CACHED_BYTES = 16, CACHED_IDS = 3, CACHE_SLOTS = 1 << 15 };

typedef struct CachedPiece {
    uint64_t head, tail;  // the piece's bytes, see piece_key
    uint8_t bytes, count;
    int32_t ids[CACHED_IDS];
} CachedPiece;

// Packs the bytes of a piece of 1..16 bytes into two words, unique for each length. They overlap
// for short pieces.
static void piece_key(const char *piece, size_t bytes, uint64_t *head, uint64_t *tail) {
    if (bytes >= 8) {
        memcpy(head, piece, 8);
        memcpy(tail, piece + bytes - 8, 8);
    } else if (bytes >= 4) {
        uint32_t first, last;
        memcpy(&first, piece, 4);
        memcpy(&last, piece + bytes - 4, 4);
        *head = first;
        *tail = last;
    } else {
        *head = (uint8_t)piece[0] | (uint64_t)(uint8_t)piece[bytes / 2] << 8;
        *tail = (uint8_t)piece[bytes - 1];
    }
}

static size_t cache_slot(uint64_t head, uint64_t tail, size_t bytes) {
    uint64_t hash = (head ^ tail << 29 ^ tail >> 35 ^ bytes) * 0x9E3779B97F4A7C15u;
    hash = (hash ^ hash >> 32) * 0xD6E8FEB86659FD93u;
    return (size_t)(hash >> 40) & (CACHE_SLOTS - 1);
}

// ---- encoding ----

struct Encoder {
    const Tokenizer *tokenizer;
    PieceSplitter *splitter[MOST_PIECE_STEPS];  // for steps that have a pattern
    CachedPiece *cache;                         // (CACHE_SLOTS), BPE types only
    BpeScratch scratch;
    TextBuffer repaired;                    // text with invalid UTF-8 replaced by U+FFFD
    TextBuffer normalized[2];               // a part of the text before and after a normalizer
    TextBuffer prefixed[MOST_PIECE_STEPS];  // a piece with a leading space
    TextBuffer spaced;                      // a part of the text with Metaspace's character for spaces
};

Encoder *encoder_create(const Tokenizer *tokenizer) {
    Encoder *encoder = xcalloc(1, sizeof *encoder, "an encoder");
    encoder->tokenizer = tokenizer;
    const PieceSteps *steps = &tokenizer->parts.steps;
    for (int i = 0; i < steps->count; i++) {
        if (steps->step[i].pattern) encoder->splitter[i] = piece_splitter_create(steps->step[i].pattern);
    }
    if (tokenizer->parts.bpe.merges) {
        encoder->cache = xcalloc(CACHE_SLOTS, sizeof *encoder->cache, "the cache of words");
    }
    return encoder;
}

void encoder_free(Encoder *encoder) {
    if (!encoder) return;
    for (int i = 0; i < MOST_PIECE_STEPS; i++) {
        piece_splitter_free(encoder->splitter[i]);
        free(encoder->prefixed[i].text);
    }
    bpe_scratch_free(&encoder->scratch);
    free(encoder->cache);
    free(encoder->repaired.text);
    free(encoder->spaced.text);
    for (int i = 0; i < 2; i++) free(encoder->normalized[i].text);
    free(encoder);
}

// Reserves space for `more` ids after those in the buffer.
static int32_t *reserve(TokenBuffer *buffer, size_t more) {
    if (!buffer->ids || buffer->capacity - buffer->count < (int64_t)more) {
        int64_t grown = buffer->capacity + buffer->capacity / 2 + 1024;
        buffer->capacity = grown > buffer->count + (int64_t)more ? grown : buffer->count + (int64_t)more;
        buffer->ids = xrealloc(buffer->ids, (size_t)buffer->capacity * sizeof *buffer->ids, "token ids");
    }
    return buffer->ids + buffer->count;
}

void token_buffer_append(TokenBuffer *buffer, int32_t id) {
    *reserve(buffer, 1) = id;
    buffer->count++;
}

void token_buffer_free(TokenBuffer *buffer) {
    free(buffer->ids);
    *buffer = (TokenBuffer){0};
}

static void encode_piece(Encoder *encoder, const char *piece, size_t bytes, TokenBuffer *out) {
    const Bpe *bpe = &encoder->tokenizer->parts.bpe;
    int32_t *ids = reserve(out, bytes > CACHED_IDS ? bytes : CACHED_IDS);
    if (bytes > CACHED_BYTES) {
        out->count += (int64_t)bpe_encode(bpe, &encoder->scratch, piece, bytes, ids);
        return;
    }
    uint64_t head, tail;
    piece_key(piece, bytes, &head, &tail);
    CachedPiece *cached = &encoder->cache[cache_slot(head, tail, bytes)];
    if (cached->head == head && cached->tail == tail && cached->bytes == bytes) {
        memcpy(ids, cached->ids, sizeof cached->ids);  // copying all of them is a single move of
                                                       // constant size
        out->count += cached->count;
        return;
    }
    size_t count = bpe_encode(bpe, &encoder->scratch, piece, bytes, ids);
    out->count += (int64_t)count;
    if (count > CACHED_IDS) return;
    *cached = (CachedPiece){head, tail, (uint8_t)bytes, (uint8_t)count, {0}};
    memcpy(cached->ids, ids, count * sizeof *ids);
}

// Returns the piece with a leading space, added if missing.
static const char *with_space(Encoder *encoder, int step, const char *text, size_t *bytes) {
    if (*bytes && *text == ' ') return text;
    char *copy = text_buffer_reserve(&encoder->prefixed[step], *bytes + 1, "a piece with a space");
    *copy = ' ';
    memcpy(copy + 1, text, (*bytes)++);
    return copy;
}

// Encodes one piece of the previous step: splits it by this step and passes its pieces to the next.
static void encode_step(Encoder *encoder, int step, const char *text, size_t bytes, TokenBuffer *out) {
    const PieceSteps *steps = &encoder->tokenizer->parts.steps;
    const PieceSplitter *splitter = encoder->splitter[step];
    bool last = step + 1 == steps->count;
    if (steps->step[step].prefix_space) text = with_space(encoder, step, text, &bytes);
    for (size_t start = 0, end; start < bytes; start = end) {
        end = splitter ? piece_end(splitter, text, bytes, start) : bytes;
        if (last) encode_piece(encoder, text + start, end - start, out);
        else encode_step(encoder, step + 1, text + start, end - start, out);
    }
}

// first: the text is the start of the encoder's text.
typedef void (*EncodeRest)(Encoder *encoder, const char *text, size_t bytes, bool first, TokenBuffer *out);

// Encodes the added tokens in the text, and the text between them with encode_rest.
static void encode_around(Encoder *encoder, const AddedTokens *tokens, const char *text, size_t bytes,
                          bool first, EncodeRest encode_rest, TokenBuffer *out) {
    size_t done = 0, from = 0;
    for (AddedMatch match; added_tokens_find(tokens, text, bytes, from, &match);) {
        from = match.end;
        match = added_match_strip(match, text, bytes, done);
        if (match.start > done) encode_rest(encoder, text + done, match.start - done, first && !done, out);
        if (match.start < match.end) token_buffer_append(out, match.token->id);
        done = match.end;
    }
    if (done < bytes) encode_rest(encoder, text + done, bytes - done, first && !done, out);
}

// Returns the text with Metaspace's character for its spaces, and before it.
static const char *with_metaspace(Encoder *encoder, const char *text, size_t *bytes, bool first) {
    const Metaspace *metaspace = &encoder->tokenizer->parts.metaspace;
    const size_t length = strlen(metaspace->space);
    if (!metaspace->replace) return text;
    char *copy = text_buffer_reserve(&encoder->spaced, length * (*bytes + 1), "a text without spaces");
    bool prepend = metaspace->prepend == PREPEND_ALWAYS || (metaspace->prepend == PREPEND_FIRST && first);
    bool present = *text == ' ' || (*bytes >= length && !memcmp(text, metaspace->space, length));
    size_t used = prepend && !present ? length : 0;
    memcpy(copy, metaspace->space, used);
    *bytes = used + replace_text(text, *bytes, " ", metaspace->space, copy + used);
    return copy;
}

static void encode_pieces(Encoder *encoder, const char *text, size_t bytes, bool first, TokenBuffer *out) {
    const BpeParts *parts = &encoder->tokenizer->parts;
    if (parts->steps.count) {
        encode_step(encoder, 0, text, bytes, out);
        return;
    }
    text = with_metaspace(encoder, text, &bytes, first);
    for (size_t start = 0, end; start < bytes; start = end) {
        end = metaspace_end(&parts->metaspace, text, bytes, start);
        encode_piece(encoder, text + start, end - start, out);
    }
}

static void encode_part(Encoder *encoder, const char *text, size_t bytes, bool first, TokenBuffer *out) {
    const BpeParts *parts = &encoder->tokenizer->parts;
    text = normalizer_apply(&parts->normalizer, text, &bytes, encoder->normalized);
    encode_around(encoder, &parts->normalized, text, bytes, first, encode_pieces, out);
}

static void encode_bytes(const char *text, size_t bytes, TokenBuffer *out) {
    int32_t *ids = reserve(out, bytes);
    for (size_t i = 0; i < bytes; i++) ids[i] = (uint8_t)text[i];
    out->count += (int64_t)bytes;
}

static bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// NullTokenizer. Returns the number of words that are not ids.
static int64_t encode_numbers(int vocab_size, const char *text, size_t bytes, TokenBuffer *out) {
    int64_t refused = 0;
    for (size_t start = 0, end; start < bytes; start = end) {
        while (start < bytes && is_space(text[start])) start++;
        for (end = start; end < bytes && !is_space(text[end]); end++) {
        }
        if (end == start) break;
        int64_t id = number_id(text + start, end - start, vocab_size);
        if (id < 0) {
            refused++;
            continue;
        }
        token_buffer_append(out, (int32_t)id);
    }
    return refused;
}

// Returns the text if it is well-formed, else a repaired copy that is valid until the next call.
static const char *well_formed(Encoder *encoder, const char *text, size_t *bytes, int64_t *replaced) {
    if (utf8_valid_prefix(text, *bytes) == *bytes) return text;
    char *repaired = text_buffer_reserve(&encoder->repaired, UTF8_REPLACEMENT_BYTES * *bytes,
                                         "repairing invalid UTF-8");
    *bytes = utf8_repair(text, *bytes, repaired, replaced);
    return repaired;
}

// first: the text does not continue another one.
static void encode_text(Encoder *encoder, const char *text, size_t bytes, bool first, TokenBuffer *out,
                        int64_t *replaced) {
    assert(bytes <= ENCODER_MAX_BYTES);
    text = well_formed(encoder, text, &bytes, replaced);
    switch (encoder->tokenizer->type) {
        case TOKENIZER_GPT2_BPE:
        case TOKENIZER_HUGGING_FACE:
            encode_around(encoder, &encoder->tokenizer->parts.raw, text, bytes, first, encode_part, out);
            break;
        case TOKENIZER_BYTE: encode_bytes(text, bytes, out); break;
        case TOKENIZER_NULL:
            *replaced += encode_numbers(encoder->tokenizer->parts.table.size, text, bytes, out);
            break;
    }
}

void encoder_encode(Encoder *encoder, const char *text, size_t bytes, TokenBuffer *out, int64_t *replaced) {
    encode_text(encoder, text, bytes, true, out, replaced);
}

void encoder_encode_more(Encoder *encoder, const char *text, size_t bytes, TokenBuffer *out,
                         int64_t *replaced) {
    encode_text(encoder, text, bytes, false, out, replaced);
}
