// Translates Oniguruma regular expressions to PCRE2. Unknown constructs are refused,
// so that no tokenizer is silently misinterpreted.
#include "llmc/data/pretokenize.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The characters of utf8_white_space, for a character class.
#define WHITE_SPACE \
    "\\x{09}-\\x{0D}\\x{20}\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}" \
    "\\x{2029}\\x{202F}\\x{205F}\\x{3000}"

typedef struct Translation {
    const char *at;
    FILE *out;
    const char *why;  // NULL: no error so far
} Translation;

static bool refuse(Translation *t, const char *why) {
    t->why = why;
    return false;
}

static bool copy(Translation *t, size_t count) {
    fwrite(t->at, 1, count, t->out);
    t->at += count;
    return true;
}

static bool starts_with(const char *text, const char *with) { return !strncmp(text, with, strlen(with)); }

// Translates \p{L} or \P{Lu}: a general category.
static bool property(Translation *t) {
    static const char *const categories[] = {"L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me",
                                             "N",  "Nd", "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi",
                                             "Pf", "Po", "S",  "Sm", "Sc", "Sk", "So", "Z",  "Zs", "Zl",
                                             "Zp", "C",  "Cc", "Cf", "Co", "Cs", "Cn"};
    for (size_t i = 0; i < sizeof categories / sizeof *categories; i++) {
        size_t length = strlen(categories[i]);
        if (t->at[2] == '{' && starts_with(t->at + 3, categories[i]) && t->at[3 + length] == '}')
            return copy(t, length + 4);
    }
    return refuse(t, "a property that is not a general category");
}

// Translates \x41, \x{41} or \u0041. In Oniguruma, \x80 to \xff are raw bytes, which are refused.
static bool code_point(Translation *t) {
    bool braces = t->at[2] == '{', u = t->at[1] == 'u';
    size_t digits = strspn(t->at + 2 + braces, "0123456789abcdefABCDEF"), most = u ? 4 : 2;
    if (braces && !u && digits && digits <= 6 && t->at[3 + digits] == '}') return copy(t, digits + 4);
    if (braces || digits < most) return refuse(t, "a malformed code point");
    if (!u && strchr("89abcdefABCDEF", t->at[2])) return refuse(t, "a byte that is not an ASCII character");
    fprintf(t->out, "\\x{%.*s}", (int)most, t->at + 2);
    t->at += 2 + most;
    return true;
}

static bool escape(Translation *t, bool in_class) {
    char c = t->at[1];
    if (c == 'p' || c == 'P') return property(t);
    if (c == 'x' || c == 'u') return code_point(t);
    if (c && (strchr("rntfdD", c) || ispunct((unsigned char)c))) return copy(t, 2);
    if (c == 's' || (c == 'S' && !in_class)) {
        fprintf(t->out, in_class ? "%s" : c == 's' ? "[%s]" : "[^%s]", WHITE_SPACE);
        t->at += 2;
        return true;
    }
    return refuse(t, "an unknown escape");
}

static bool class(Translation *t) {
    copy(t, starts_with(t->at, "[^") ? 2 : 1);
    if (*t->at == ']') return refuse(t, "an empty class");
    while (*t->at && *t->at != ']') {
        if (*t->at == '[' || starts_with(t->at, "&&")) return refuse(t, "a class within a class");
        if (*t->at == '\\' ? !escape(t, true) : !copy(t, 1)) return false;
    }
    return *t->at ? copy(t, 1) : refuse(t, "an unterminated class");
}

// With case folding, Oniguruma lets some pairs of letters match one character.
static bool caseless(Translation *t) {
    static const char *const folded[] = {"ss", "st", "ff", "fi", "fl"};
    size_t length = strcspn(t->at, ")");
    copy(t, 4);
    for (size_t i = 4; i < length; i++) {
        if (!isalpha((unsigned char)*t->at) && *t->at != '\'' && *t->at != '|')
            return refuse(t, "(?i:...) around more than letters and apostrophes");
        for (size_t k = 0; k < sizeof folded / sizeof *folded; k++) {
            if (!strncasecmp(t->at, folded[k], 2))
                return refuse(t, "letters that case-fold to one character");
        }
        copy(t, 1);
    }
    return true;
}

static bool group(Translation *t) {
    static const char *const known[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
    if (starts_with(t->at, "(?i:")) return caseless(t);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (starts_with(t->at, known[i])) return copy(t, strlen(known[i]));
    }
    return t->at[1] == '?' || t->at[1] == '*' ? refuse(t, "an unknown kind of group") : copy(t, 1);
}

// Translates {n}, {n,} or {n,m}. The engines disagree on a following + (possessive, or another
// repetition) and on a ? after {n} (lazy, or optional).
static bool repetition(Translation *t) {
    size_t first = strspn(t->at + 1, "0123456789"), length = 1 + first;
    bool range = t->at[length] == ',';
    if (range) length += 1 + strspn(t->at + length + 1, "0123456789");
    if (!first || t->at[length] != '}') return refuse(t, "a malformed repetition");
    char next = t->at[length + 1];
    bool other = next == '+' || (next == '?' && !range);
    return other ? refuse(t, "a repetition of a repetition") : copy(t, length + 1);
}

static bool element(Translation *t) {
    switch (*t->at) {
        case '\\': return escape(t, false);
        case '[': return class(t);
        case '(': return group(t);
        case '{': return repetition(t);
        case '^':
        case '$': return refuse(t, "an anchor");
        case '.': t->at++; return fputs("[^\\n]", t->out) >= 0;
        default: return copy(t, 1);
    }
}

char *pattern_for_pcre2(const char *regex, const char **why, size_t *where) {
    char *text = NULL;
    size_t bytes;
    Translation t = {regex, open_memstream(&text, &bytes), NULL};
    if (!t.out) fatal(NULL, EXIT_ENVIRONMENT, "out of memory for a pattern; use a machine with more memory");
    while (*t.at && element(&t)) {
    }
    if (fclose(t.out) != 0)
        fatal(NULL, EXIT_ENVIRONMENT, "out of memory for a pattern; use a machine with more memory");
    if (!t.why) return text;
    *why = t.why;
    *where = (size_t)(t.at - regex);
    free(text);
    return NULL;
}
