// Command-line options from a table: see options.h.
#include "llmc/config/options.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"

// --- words: argv and argument files --------------------------------------------------------------

enum { MAX_DEPTH = 8, MAX_FILES = 64, MAX_FILE_BYTES = 1 << 20, MAX_WORDS = 1 << 16 };

typedef struct Reader {
    char **words;
    int count;
    int files;  // read so far: bounds the cost of files that include each other
} Reader;

static bool add_word(Reader *reader, const char *text, size_t length, Error *err) {
    if (reader->count == MAX_WORDS) {
        return usage_error(err, "more than %d words on the command line; shorten it", (int)MAX_WORDS);
    }
    reader->words = grow_array(reader->words, reader->count, sizeof *reader->words, "command line");
    char *word = xmalloc(length + 1, "command line");
    memcpy(word, text, length);
    word[length] = 0;
    reader->words[reader->count++] = word;
    return true;
}

static char *read_text(const char *path, size_t *bytes, Error *err) {
    FILE *file = durable_open_plain(path);
    if (!file) {
        usage_error(err, "@%s: %s; pass the path of an argument file", path,
                    errno ? strerror(errno) : "not a plain file");
        return NULL;
    }
    char *text = xmalloc(MAX_FILE_BYTES + 2, "argument file");
    *bytes = fread(text, 1, MAX_FILE_BYTES + 1, file);
    const char *fault = ferror(file)              ? strerror(errno)
                        : *bytes > MAX_FILE_BYTES ? "larger than 1 MiB"
                        : memchr(text, 0, *bytes) ? "contains zero bytes"
                                                  : NULL;
    fclose(file);
    text[fault ? 0 : *bytes] = 0;
    if (!fault) return text;
    free(text);
    usage_error(err, "@%s: %s; pass the path of an argument file", path, fault);
    return NULL;
}

typedef struct Cursor {     // position in the text of an argument file
    const char *path, *at;  // at: position in the NUL-terminated text
    int line;
} Cursor;

static bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

static void skip_blanks_and_comments(Cursor *cursor) {
    for (;; cursor->at++) {
        if (*cursor->at == '#') cursor->at += strcspn(cursor->at, "\n");
        bool joined_line = cursor->at[0] == '\\' && (!cursor->at[1] || cursor->at[1] == '\n' ||
                                                     (cursor->at[1] == '\r' && cursor->at[2] == '\n'));
        if (*cursor->at == '\n') cursor->line++;
        if (!is_space(*cursor->at) && !joined_line) return;
    }
}

// Appends the quoted text at the cursor to word. Returns false if the quote is not closed.
static bool read_quoted(Cursor *cursor, char *word, size_t *length, Error *err) {
    char quote = *cursor->at++;
    int first_line = cursor->line;
    for (; *cursor->at != quote; cursor->at++) {
        if (!*cursor->at) {
            return usage_error(err, "@%s line %d: unterminated quote; add the closing %c", cursor->path,
                               first_line, quote);
        }
        if (quote == '"' && cursor->at[0] == '\\' && (cursor->at[1] == '"' || cursor->at[1] == '\\'))
            cursor->at++;
        if (*cursor->at == '\n') cursor->line++;
        word[(*length)++] = *cursor->at;
    }
    cursor->at++;
    return true;
}

// Reads the word at the cursor, which must not be at white space, into `word`, which can hold the
// whole file. quoted_first: the word starts with a quote or a backslash.
static bool read_word(Cursor *cursor, char *word, size_t *length, bool *quoted_first, Error *err) {
    *length = 0;
    *quoted_first = *cursor->at == '"' || *cursor->at == '\'' || *cursor->at == '\\';
    while (*cursor->at && !is_space(*cursor->at)) {
        if (*cursor->at == '"' || *cursor->at == '\'') {
            if (!read_quoted(cursor, word, length, err)) return false;
            continue;
        }
        if (*cursor->at == '\\') {
            cursor->at++;
            if (*cursor->at == '\r' && cursor->at[1] == '\n') cursor->at++;
            if (*cursor->at == '\n') break;  // joined lines: skip_blanks_and_comments continues after it
            if (!*cursor->at) break;
        }
        word[(*length)++] = *cursor->at++;
    }
    return true;
}

static bool add_file(Reader *reader, const char *path, int depth, Error *err);

static bool no_name(Error *err) {
    return usage_error(err,
                       "@ without a file name; write @path, or --flag=@value for a value that starts with @");
}

// Reads "@name" in the file `from`, relative to its directory.
static bool add_nested_file(Reader *reader, const char *from, const char *name, int depth, Error *err) {
    if (!*name) return no_name(err);
    const char *slash = strrchr(from, '/');
    size_t folder = slash && name[0] != '/' ? (size_t)(slash - from) + 1 : 0;
    size_t length = strlen(name);
    char *path = xmalloc(folder + length + 1, "argument file");
    memcpy(path, from, folder);
    memcpy(path + folder, name, length + 1);
    bool ok = add_file(reader, path, depth, err);
    free(path);
    return ok;
}

static bool add_text(Reader *reader, const char *path, const char *text, char *word, int depth, Error *err) {
    Cursor cursor = {path, text, 1};
    if (strncmp(text, "\xEF\xBB\xBF", 3) == 0) cursor.at += 3;  // byte-order mark
    for (;;) {
        skip_blanks_and_comments(&cursor);
        if (!*cursor.at) return true;
        size_t length;
        bool quoted_first;
        if (!read_word(&cursor, word, &length, &quoted_first, err)) return false;
        if (word[0] == '@' && length && !quoted_first) {
            word[length] = 0;
            if (!add_nested_file(reader, path, word + 1, depth + 1, err)) return false;
        } else if (!add_word(reader, word, length, err)) {
            return false;
        }
    }
}

static bool add_file(Reader *reader, const char *path, int depth, Error *err) {
    if (!*path) return no_name(err);
    if (depth > MAX_DEPTH || reader->files == MAX_FILES) {
        return usage_error(err,
                           "@%s: argument files are nested more than %d deep, or there are more than %d; "
                           "check whether a file includes itself",
                           path, (int)MAX_DEPTH, (int)MAX_FILES);
    }
    reader->files++;
    size_t bytes;
    char *text = read_text(path, &bytes, err);
    if (!text) return false;
    char *word = xcalloc(bytes + 1, 1, "argument file");
    bool ok = add_text(reader, path, text, word, depth, err);
    free(word);
    free(text);
    return ok;
}

bool options_read_words(int argc, char *const *argv, char ***words, int *count, Error *err) {
    Reader reader = {NULL, 0, 0};
    bool ok = true;
    for (int i = 1; ok && i < argc; i++) {
        ok = argv[i][0] == '@' ? add_file(&reader, argv[i] + 1, 1, err)
                               : add_word(&reader, argv[i], strlen(argv[i]), err);
    }
    if (!ok) {
        options_free_words(reader.words, reader.count);
        reader.words = NULL;
        reader.count = 0;
    }
    *words = reader.words;
    *count = reader.count;
    return ok;
}

void options_free_words(char **words, int count) {
    for (int i = 0; i < count; i++) free(words[i]);
    free(words);
}

// --- names ---------------------------------------------------------------------------------------

// Returns true if the list, separated by spaces, contains this name. The list may be NULL.
static bool lists(const char *names, const char *name, size_t length) {
    for (const char *at = names; at; at = strchr(at, ' ')) {
        at += *at == ' ';
        if (strcspn(at, " ") == length && memcmp(at, name, length) == 0) return true;
    }
    return false;
}

static bool is_pattern(const char *known) { return known[strlen(known) - 1] == '*'; }

const Option *options_find(const Option *table, int rows, const char *name, size_t length) {
    assert(table && name);
    for (int i = 0; i < rows; i++) {
        if (!table[i].name || is_pattern(table[i].name)) continue;
        if (lists(table[i].name, name, length) || lists(table[i].alias, name, length)) return &table[i];
    }
    for (int i = 0; i < rows; i++) {
        if (!table[i].name || !is_pattern(table[i].name)) continue;
        size_t stem = strlen(table[i].name) - 1;
        if (length > stem && memcmp(table[i].name, name, stem) == 0) return &table[i];
    }
    return NULL;
}

void option_key(const Option *row, char key[OPTION_KEY_BYTES]) {
    assert(row && row->name && strlen(row->name) < OPTION_KEY_BYTES);
    snprintf(key, OPTION_KEY_BYTES, "%s", row->name + (row->negative ? strlen("no-") : 0));
    for (char *c = key; *c; c++) {
        if (*c == '-') *c = '_';
    }
}

static int min3(int a, int b, int c) { return a < b ? (a < c ? a : c) : (b < c ? b : c); }

// Levenshtein distance of the first length (at most 64) bytes of name to known.
static int edit_distance(const char *known, const char *name, size_t length) {
    enum { LONGEST = 64 };
    int row[LONGEST + 1];
    size_t columns = length < LONGEST ? length : LONGEST;
    for (size_t j = 0; j <= columns; j++) row[j] = (int)j;
    for (size_t i = 1; known[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= columns; j++) {
            int replace = diagonal + (known[i - 1] != name[j - 1]);
            diagonal = row[j];
            row[j] = min3(replace, row[j] + 1, row[j - 1] + 1);
        }
    }
    return row[columns];
}

// Returns the name in the table that is nearest to an unknown name by edit distance, preferring
// names that start with it. NULL if the distance is more than a third of the longer name's length.
static const char *nearest_name(const Option *table, int rows, const char *name, size_t length) {
    const char *best = NULL;
    int least = 0;
    for (int i = 0; i < rows; i++) {
        if (!table[i].name || is_pattern(table[i].name) || table[i].use == OPTION_REFUSED) continue;
        bool abbreviated = length >= 3 && strncmp(table[i].name, name, length) == 0;
        int distance = abbreviated ? 0 : edit_distance(table[i].name, name, length),
            known = (int)strlen(table[i].name);
        bool alike = 3 * distance <= (known > (int)length ? known : (int)length);
        if (alike && (!best || distance < least)) {
            best = table[i].name;
            least = distance;
        }
    }
    return best;
}

// --- values --------------------------------------------------------------------------------------

int options_choice(const char *choices, const char *word) {
    assert(choices && word);
    size_t length = strlen(word);
    for (int index = 0;; index++) {
        size_t choice = strcspn(choices, "|");
        if (choice == length && memcmp(choices, word, length) == 0) return index;
        if (!choices[choice]) return -1;
        choices += choice + 1;
    }
}

static bool read_integer(const char *word, int64_t *value) {
    const char *digits = word + (*word == '-' || *word == '+');
    if (!*digits || digits[strspn(digits, "0123456789")]) return false;
    errno = 0;
    *value = strtoll(word, NULL, 10);
    return errno == 0;
}

// Accepts only finite decimal numbers: no blanks, hexadecimal, inf or nan.
static bool read_real(const char *word, double *value) {
    if (!*word || word[strspn(word, "0123456789+-.eE")]) return false;
    char *end;
    *value = strtod(word, &end);
    return !*end && isfinite(*value);
}

static void describe_choices(const char *choices, char *text, size_t bytes) {  // "first or second"
    *text = 0;
    while (*choices) {
        size_t length = strcspn(choices, "|"), used = strlen(text);
        snprintf(text + used, bytes - used, "%.*s%s", (int)length, choices, choices[length] ? " or " : "");
        choices += length + (choices[length] != 0);
    }
}

// Describes the range of a row, to follow "must be".
static void describe_range(const Option *row, char *text, size_t bytes) {
    char low[96] = "", high[48];
    if (row->choices) {
        describe_choices(row->choices, text, bytes);
        return;
    }
    int used = row->multiple ? snprintf(low, sizeof low, "a multiple of %d, ", row->multiple) : 0;
    if (row->low == OPTION_ABOVE_ZERO) snprintf(low + used, sizeof low - (size_t)used, "above 0");
    else snprintf(low + used, sizeof low - (size_t)used, "at least %.10g", row->low);
    if (row->high == OPTION_BELOW_ONE) snprintf(high, sizeof high, "below 1");
    else snprintf(high, sizeof high, "at most %.10g", row->high);
    if (row->low == row->high) snprintf(text, bytes, "%.10g", row->low);
    else if (row->high >= OPTION_ANY) snprintf(text, bytes, "%s", low);
    else if (row->low <= -OPTION_ANY) snprintf(text, bytes, "%s", high);
    else snprintf(text, bytes, "%s and %s", low, high);
}

static bool out_of_range(const Option *row, const char *word, Error *err) {
    char range[176];
    describe_range(row, range, sizeof range);
    bool say_why = row->use == OPTION_NO_EFFECT;
    return usage_error(err, "--%s %s: must be %s%s%s", row->name, word, range, say_why ? "; " : "",
                       say_why ? row->help : "");
}

// Sets the error for a number that is out of range once it is rounded to float32.
static bool unusable_single(const Option *row, const char *word, double used, Error *err) {
    char range[176];
    describe_range(row, range, sizeof range);
    bool allowed = used >= row->low && used <= row->high;
    const char *advice = isinf(used) ? "use a smaller number"
                         : allowed   ? "use 0 or a larger number"
                                     : "it must be ";
    return usage_error(err, "--%s %s: becomes %g in float32, the type it is used in; %s%s", row->name, word,
                       used, advice, allowed || isinf(used) ? "" : range);
}

static void put(const Option *row, void *settings, const void *value, size_t bytes) {
    if (row->offset != OPTION_NO_FIELD) memcpy((char *)settings + row->offset, value, bytes);
}

static bool store_integer(const Option *row, const char *word, void *settings, Error *err) {
    int64_t value;
    if (!read_integer(word, &value)) {
        return usage_error(err, "--%s %s: not a 64-bit integer; use digits only, as in --%s %s", row->name,
                           word, row->name, row->initial ? row->initial : "1");
    }
    int narrow = (int)value;
    bool fits = row->kind == OPTION_INT64 || narrow == value;
    if (!fits || (double)value < row->low || (double)value > row->high ||
        (row->multiple && value % row->multiple))
        return out_of_range(row, word, err);
    char digits[24];
    snprintf(digits, sizeof digits, "%d", narrow);
    if (row->choices && options_choice(row->choices, digits) < 0) return out_of_range(row, word, err);
    if (row->kind == OPTION_INT) put(row, settings, &narrow, sizeof narrow);
    else put(row, settings, &value, sizeof value);
    return true;
}

static bool store_real(const Option *row, const char *word, void *settings, Error *err) {
    double value;
    if (!read_real(word, &value)) {
        return usage_error(err, "--%s %s: not a finite number; use a number such as %s", row->name, word,
                           row->initial ? row->initial : "0.5");
    }
    if (value < row->low || value > row->high) return out_of_range(row, word, err);
    double used = row->single ? (double)(float)value : value;
    bool vanished = used == 0 && value != 0, outside = used < row->low || used > row->high;
    if (vanished || outside) return unusable_single(row, word, used, err);
    put(row, settings, &value, sizeof value);
    return true;
}

static bool store_choice(const Option *row, const char *word, void *settings, Error *err) {
    int index = options_choice(row->choices, word);
    if (index < 0) {
        const char *why = row->no_other;
        return usage_error(err, "--%s %s: not one of %s%s%s", row->name, word, row->choices, why ? "; " : "",
                           why ? why : "");
    }
    put(row, settings, &index, sizeof index);
    return true;
}

static bool empty_value(const Option *row, Error *err) {
    return usage_error(err, "--%s: the value is empty; set one or drop the flag", row->name);
}

static bool no_value(const Option *row, Error *err) {
    return usage_error(err, "--%s needs a value (%s); write --%s=VALUE if the value starts with --",
                       row->name, row->value, row->name);
}

bool options_set(const Option *row, const char *word, void *settings, Error *err) {
    assert(row && row->kind != OPTION_WORDS && word && settings);
    switch (row->kind) {
        case OPTION_FLAG: {
            bool on = strcmp(word, "true") == 0;
            put(row, settings, &on, sizeof on);
            return true;
        }
        case OPTION_INT:
        case OPTION_INT64: return store_integer(row, word, settings, err);
        case OPTION_REAL: return store_real(row, word, settings, err);
        case OPTION_CHOICE: return store_choice(row, word, settings, err);
        case OPTION_TEXT:
            if (row->low >= 1 && !*word) return empty_value(row, err);
            put(row, settings, &word, sizeof word);
            return true;
        case OPTION_WORDS: break;
    }
    return true;
}

static bool store_words(const Option *row, char **words, int count, void *settings, Error *err) {
    Words list = {(const char **)words, count};
    if (count < row->low) return no_value(row, err);
    for (int i = 0; i < count; i++) {
        if (!*words[i]) return empty_value(row, err);
    }
    put(row, settings, &list, sizeof list);
    return true;
}

void options_defaults(const Option *table, int rows, void *settings) {
    Error err;
    for (int i = 0; i < rows; i++) {
        if (!table[i].name || !table[i].initial || table[i].offset == OPTION_NO_FIELD) continue;
        if (!options_set(&table[i], table[i].initial, settings, &err)) {
            fatal(NULL, EXIT_USAGE, "option table: default of %s", err.what);
        }
    }
}

// --- the command line ----------------------------------------------------------------------------

static bool is_flag(const char *word) { return word[0] == '-' && word[1] == '-'; }
// Returns true for a mistyped flag such as -lr, which also ends a list of words.
static bool is_short_flag(const char *word) { return word[0] == '-' && isalpha((unsigned char)word[1]); }

// Returns true if the table has "no-<name>".
static bool is_default(const Option *table, int rows, const char *name, size_t length) {
    char *no = text_format("no-%.*s", (int)length, name);
    bool found = options_find(table, rows, no, strlen(no)) != NULL;
    free(no);
    return found;
}

static bool unknown(const Option *table, int rows, const char *word, size_t length, Error *err) {
    if (!is_flag(word)) {
        return usage_error(err,
                           "unexpected argument '%s'; flags start with --, @FILE reads flags from a file, "
                           "--help lists all flags",
                           word);
    }
    if (is_default(table, rows, word + 2, length - 2)) {
        return usage_error(err, "unknown flag %.*s: %.*s is the default, drop it (only --no-%.*s exists)",
                           (int)length, word, (int)length, word, (int)length - 2, word + 2);
    }
    const char *near = nearest_name(table, rows, word + 2, length - 2);
    if (!near) return usage_error(err, "unknown flag %.*s; --help lists all flags", (int)length, word);
    return usage_error(err, "unknown flag %.*s; did you mean --%s? --help lists all flags", (int)length, word,
                       near);
}

bool options_ask(const Option *table, int rows, char *const *words, int count, const char *name) {
    for (int i = 0; i < count; i++) {
        if (is_flag(words[i]) && !strcmp(words[i] + 2, name)) return true;
        if (strcmp(words[i], "-h") || strcmp(name, "help")) continue;
        bool follows = i > 0 && is_flag(words[i - 1]) && !strchr(words[i - 1], '=');
        const Option *before = follows ? options_find(table, rows, words[i - 1] + 2, strlen(words[i - 1]) - 2)
                                       : NULL;
        if (!before || before->kind == OPTION_FLAG) return true;
    }
    return false;
}

// Parses the flag at words[*at] and its values, and advances *at past them.
static bool parse_one(const Option *table, int rows, char **words, int count, int *at, void *settings,
                      const Option **found, Error *err) {
    char *word = words[*at];
    size_t length = strcspn(word, "=");
    const Option *row = is_flag(word) ? options_find(table, rows, word + 2, length - 2) : NULL;
    if (!row) return unknown(table, rows, word, length, err);
    *found = row;
    if (row->use == OPTION_REFUSED) {
        return usage_error(err, "%.*s is refused: %s", (int)length, word, row->help);
    }
    char *inline_value = word[length] == '=' ? word + length + 1 : NULL;
    ++*at;
    if (row->kind == OPTION_FLAG) {
        if (inline_value) {
            return usage_error(err, "%.*s takes no value; drop '=%s'", (int)length, word, inline_value);
        }
        return options_set(row, row->negative ? "false" : "true", settings, err);
    }
    if (row->kind == OPTION_WORDS && inline_value) {
        // Overwrites the word with its value, so that the list can point to it.
        memmove(word, inline_value, strlen(inline_value) + 1);
        return store_words(row, &words[*at - 1], 1, settings, err);
    }
    if (row->kind == OPTION_WORDS) {
        int first = *at;
        while (*at < count && !is_flag(words[*at]) && !is_short_flag(words[*at])) ++*at;
        return store_words(row, &words[first], *at - first, settings, err);
    }
    if (inline_value) return options_set(row, inline_value, settings, err);
    if (*at == count || is_flag(words[*at])) return no_value(row, err);
    return options_set(row, words[(*at)++], settings, err);
}

// All faults of a command line, as one error: "(1) first; (2) second; and 3 more".
typedef struct ParseFaults {
    Error all;
    int count, listed;
} ParseFaults;

static void add_fault(ParseFaults *f, const Error *fault) {
    Error before = f->all;
    const size_t room = 40;  // for numbers and the count of the others
    if (!f->count++) f->all = *fault;
    else if (strlen(before.what) + strlen(fault->what) + room > sizeof before.what) return;
    else
        error_set(&f->all, fault->code, "%s%s; (%d) %s", f->listed == 1 ? "(1) " : "", before.what, f->count,
                  fault->what);
    f->listed++;
}

// Fills err with all faults. Returns true if there are none.
static bool report_faults(const ParseFaults *f, Error *err) {
    if (f->count > f->listed)
        error_set(err, f->all.code, "%s; and %d more", f->all.what, f->count - f->listed);
    else if (f->count && err) *err = f->all;
    return !f->count;
}

bool options_parse(const Option *table, int rows, char **words, int count, void *settings,
                   const OptionsFound *found, Error *err) {
    assert(table && (words || !count) && settings);
    OptionsFound f = found ? *found : (OptionsFound){NULL, NULL, 0};
    bool *seen = f.given ? f.given : xcalloc((size_t)rows, sizeof *seen, "options");
    ParseFaults faults = {0};
    Error fault;
    for (int at = 0; at < count;) {
        const Option *row = NULL;
        int first = at;
        if (!parse_one(table, rows, words, count, &at, settings, &row, &fault)) {
            add_fault(&faults, &fault);
            // Continues with the next flag, to report all faults at once.
            if (at == first) at++;
            while (at < count && !is_flag(words[at])) at++;
            continue;
        }
        if (row->note && !seen[row - table]) {
            options_note(f.notes, f.notes_bytes, "--%s has no effect: %s", row->name, row->help);
        }
        seen[row - table] = true;
    }
    if (!f.given) free(seen);
    return report_faults(&faults, err);
}

// --- text ----------------------------------------------------------------------------------------

void options_note(char *notes, size_t notes_bytes, const char *format, ...) {
    if (!notes || !notes_bytes) return;
    size_t used = strlen(notes);
    if (used + 2 > notes_bytes) return;
    va_list args;
    va_start(args, format);
    vsnprintf(notes + used, notes_bytes - used - 1, format, args);  // leaves one byte for the newline
    va_end(args);
    used += strlen(notes + used);
    notes[used] = '\n';
    notes[used + 1] = 0;
}

void format_real(double x, char *text, size_t bytes) {
    assert(text && bytes >= 32);
    char digits[40];
    int precision = 1;
    do snprintf(digits, sizeof digits, "%.*e", precision - 1, x);
    while (precision++ < 17 && strtod(digits, NULL) != x);
    precision--;
    const char *mark = strchr(digits, 'e');
    int exponent = mark ? atoi(mark + 1) : 0;
    if (!mark) snprintf(text, bytes, "%s", digits);  // inf or nan
    else if (exponent < -4 || exponent >= 16) snprintf(text, bytes, "%s", digits);
    else if (precision - 1 <= exponent) snprintf(text, bytes, "%.1f", x);
    else snprintf(text, bytes, "%.*f", precision - 1 - exponent, x);
}
