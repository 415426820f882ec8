// Searches added tokens. See bpe_parts.h. The sorted list doubles as a prefix tree: a binary
// search finds the last token that does not sort after the text. The longest match at this position
// is that token or one of its prefixes.
#include "llmc/data/bpe_parts.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/utf8.h"

// Orders like memcmp; a prefix comes first.
static int compare(const char *a, size_t a_bytes, const char *b, size_t b_bytes) {
    int order = memcmp(a, b, a_bytes < b_bytes ? a_bytes : b_bytes);
    return order ? order : (a_bytes > b_bytes) - (a_bytes < b_bytes);
}

static int by_text(const void *a, const void *b) {
    const AddedToken *x = a, *y = b;
    return compare(x->text, x->bytes, y->text, y->bytes);
}

void added_tokens_add(AddedTokens *t, AddedToken token) {
    assert(token.text && token.bytes > 0);
    t->tokens = grow_array(t->tokens, t->count, sizeof *t->tokens, "added tokens");
    char *text = xmalloc(token.bytes + 1, "added tokens");
    memcpy(text, token.text, token.bytes);
    text[token.bytes] = 0;  // for error messages
    token.text = text;
    t->tokens[t->count++] = token;
}

static bool starts_with(const char *text, size_t bytes, const AddedToken *token) {
    return token->bytes <= bytes && !memcmp(text, token->text, token->bytes);
}

static void set_pair(AddedTokens *t, uint8_t first, uint8_t second) {
    unsigned pair = (unsigned)first << 8 | second;
    t->pairs[pair >> 3] |= (uint8_t)(1 << (pair & 7));
}

bool added_tokens_complete(AddedTokens *t, const char **twice) {
    if (t->count) qsort(t->tokens, (size_t)t->count, sizeof *t->tokens, by_text);
    for (int i = 0; i < t->count; i++) {
        AddedToken *token = &t->tokens[i];
        if (i && !by_text(token - 1, token)) {
            *twice = token->text;
            return false;
        }
        token->shorter = i - 1;
        while (token->shorter >= 0 && !starts_with(token->text, token->bytes, &t->tokens[token->shorter]))
            token->shorter = t->tokens[token->shorter].shorter;
        uint8_t first = (uint8_t)token->text[0];
        if (token->bytes > 1) set_pair(t, first, (uint8_t)token->text[1]);
        for (int second = 0; second < 256 && token->bytes == 1; second++) set_pair(t, first, (uint8_t)second);
    }
    return true;
}

void added_tokens_free(AddedTokens *t) {
    for (int i = 0; i < t->count; i++) free(t->tokens[i].text);
    free(t->tokens);
    *t = (AddedTokens){0};
}

// Returns the longest token that is a prefix of the text, or NULL.
static const AddedToken *longest(const AddedTokens *t, const char *text, size_t bytes) {
    int low = 0, high = t->count;  // tokens before `low` do not sort after the text
    while (low < high) {
        int middle = (low + high) / 2;
        const AddedToken *token = &t->tokens[middle];
        if (compare(token->text, token->bytes, text, bytes) <= 0) low = middle + 1;
        else high = middle;
    }
    for (int i = low - 1; i >= 0; i = t->tokens[i].shorter) {
        if (starts_with(text, bytes, &t->tokens[i])) return &t->tokens[i];
    }
    return NULL;
}

static bool may_match(const AddedTokens *t, const char *text, size_t bytes) {
    if (bytes < 2) return true;
    unsigned pair = (unsigned)(uint8_t)text[0] << 8 | (uint8_t)text[1];
    return t->pairs[pair >> 3] >> (pair & 7) & 1;
}

bool added_tokens_find(const AddedTokens *t, const char *text, size_t bytes, size_t from, AddedMatch *match) {
    assert(from <= bytes);
    for (size_t i = from; t->count && i < bytes; i++) {
        const AddedToken *token = may_match(t, text + i, bytes - i) ? longest(t, text + i, bytes - i) : NULL;
        if (!token) continue;
        *match = (AddedMatch){i, i + token->bytes, token};
        return true;
    }
    return false;
}

AddedMatch added_match_strip(AddedMatch match, const char *text, size_t bytes, size_t from) {
    uint32_t c;
    if (match.token->left && match.start < from) match.start = from;
    while (match.token->left && match.start > from) {
        size_t i = match.start - 1;
        while (i > from && utf8_continues(text[i])) i--;
        utf8_next(text + i, match.start - i, &c);
        if (!utf8_white_space(c)) break;
        match.start = i;
    }
    while (match.token->right && match.end < bytes) {
        size_t length = utf8_next(text + match.end, bytes - match.end, &c);
        if (!utf8_white_space(c)) break;
        match.end += length;
    }
    return match;
}
