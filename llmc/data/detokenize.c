// See detokenize.h. All replacements are at most as long as the text they replace.
#include "llmc/data/detokenize.h"

#include <assert.h>
#include <string.h>

#include "llmc/base/utf8.h"

typedef struct Replacement {
    const char *from, *to;
} Replacement;

// Applied before the brackets are closed up. Megatron-LM's list also has a regular expression for
// an apostrophe between two slashes, which is omitted because it inserts the text "[0-9]".
static const Replacement before_brackets[] = {
    {"s '", "s'"}, {" @-@ ", "-"}, {" @,@ ", ","}, {" @.@ ", "."}, {" : ", ": "}, {" ; ", "; "},
    {" . ", ". "}, {" ! ", "! "},  {" ? ", "? "},  {" , ", ", "},  {NULL, NULL},
};

static const Replacement after_brackets[] = {
    {"= = = =", "===="}, {"= = =", "==="}, {"= =", "=="},  {" \xC2\xB0 ", "\xC2\xB0"},  // degree sign
    {" \n", "\n"},       {"\n ", "\n"},    {" N ", " 1 "}, {" 's", "'s"},
    {NULL, NULL},
};

// Replaces every occurrence, from left to right, without rescanning the result.
static size_t replace_all(char *text, size_t bytes, Replacement r) {
    size_t from = strlen(r.from), to = strlen(r.to), length = 0;
    assert(to <= from);
    for (size_t at = 0; at < bytes;) {
        if (bytes - at >= from && !memcmp(text + at, r.from, from)) {
            memcpy(text + length, r.to, to);
            length += to;
            at += from;
        } else {
            text[length++] = text[at++];
        }
    }
    return length;
}

// Removes white space after `open` and before the next `close`: "( a )" becomes "(a)".
static size_t close_up(char *text, size_t bytes, char open, char close) {
    size_t length = 0;
    for (size_t at = 0; at < bytes;) {
        char c = text[length++] = text[at++];
        const char *end = c == open ? memchr(text + at, close, bytes - at) : NULL;
        if (!end) continue;
        size_t inside = (size_t)(end - (text + at)), start = utf8_leading_space(text + at, inside);
        size_t kept = utf8_stripped(text + at + start, inside - start);
        memmove(text + length, text + at + start, kept);
        length += kept;
        text[length++] = close;
        at += inside + 1;
    }
    return length;
}

size_t detokenize_wikitext(char *text, size_t bytes) {
    assert(text);
    for (const Replacement *r = before_brackets; r->from; r++) bytes = replace_all(text, bytes, *r);
    for (const char *pair = "()[]{}\"\"''"; *pair; pair += 2) bytes = close_up(text, bytes, pair[0], pair[1]);
    for (const Replacement *r = after_brackets; r->from; r++) bytes = replace_all(text, bytes, *r);
    return bytes;
}
