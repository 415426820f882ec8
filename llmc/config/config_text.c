// A Config as text: Megatron's argument dump, and JSON for checkpoints and JSON lines. See
// config.h.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/config/config.h"
#include "llmc/config/config_roles.h"
#include "llmc/base/json_line.h"

// --- one value -----------------------------------------------------------------------------------

bool config_is_setting(const Option *row) {
    return row->name && row->offset != OPTION_NO_FIELD && strcmp(row->name, "help") != 0 &&
           strcmp(row->name, "version") != 0;
}

// Formats the value of a numeric row. Returns false if it has none.
static bool row_number(const Option *row, const void *field, char *text, size_t bytes) {
    if (row->kind == OPTION_REAL) {
        double value;
        memcpy(&value, field, sizeof value);
        format_real(value, text, bytes);
        return value != 0 || row->initial;
    }
    int narrow = 0;
    int64_t wide = 0;
    if (row->kind == OPTION_INT) memcpy(&narrow, field, sizeof narrow);
    else memcpy(&wide, field, sizeof wide);
    if (row->kind == OPTION_INT) wide = narrow;
    snprintf(text, bytes, "%lld", (long long)wide);
    return wide || row->initial;
}

// Copies choice `index` of a choice row. Returns false if there are fewer.
static bool choice_word(const Option *row, int index, char *word, size_t bytes) {
    const char *at = row->choices;
    for (; index > 0; index--) {
        at += strcspn(at, "|");
        if (!*at++) return false;
    }
    snprintf(word, bytes, "%.*s", (int)strcspn(at, "|"), at);
    return true;
}

bool config_choice(const char *option, int index, char *word, size_t bytes) {
    int rows;
    const Option *table = config_options(&rows), *row = options_find(table, rows, option, strlen(option));
    assert(row && row->kind == OPTION_CHOICE && index >= 0);
    return choice_word(row, index, word, bytes);
}

// Gets the value of a text or choice row. Returns false if it has none.
static bool row_text(const Option *row, const void *field, const char **text, char *buffer, size_t bytes) {
    if (row->kind != OPTION_CHOICE) {
        memcpy(text, field, sizeof *text);
        return *text != NULL;
    }
    int index;
    memcpy(&index, field, sizeof index);
    *text = buffer;
    return choice_word(row, index, buffer, bytes);
}

// --- Megatron's argument dump --------------------------------------------------------------------

// Returns "  name ....... value" with dots to column 48, malloc'ed. Lists are printed as in Python.
static char *row_line(const Option *row, const Config *config) {
    const void *field = (const char *)config + row->offset;
    char name[OPTION_KEY_BYTES], buffer[96];
    const char *value = buffer;
    Text line = {0};
    option_key(row, name);
    text_add(&line, "  %s ", name);
    for (size_t column = strlen(name); column < 48; column++) text_add(&line, ".");
    Words words;
    switch (row->kind) {
        case OPTION_FLAG: value = *(const bool *)field ? "True" : "False"; break;
        case OPTION_INT:
        case OPTION_INT64:
        case OPTION_REAL:
            if (!row_number(row, field, buffer, sizeof buffer)) value = "None";
            break;
        case OPTION_WORDS:
            memcpy(&words, field, sizeof words);
            value = words.items ? "[" : "None";
            break;
        default:
            if (!row_text(row, field, &value, buffer, sizeof buffer)) value = "None";
    }
    text_add(&line, " %s", value);
    if (row->kind != OPTION_WORDS || !words.items) return line.data;
    for (int i = 0; i < words.count; i++) text_add(&line, "%s'%s'", i ? ", " : "", words.items[i]);
    text_add(&line, "]");
    return line.data;
}

static int compare_lines(const void *a, const void *b) {
    return strcasecmp(*(char *const *)a, *(char *const *)b);
}

void config_print(const Config *config, FILE *file) {
    assert(config && file);
    int rows, derived, count = 0;
    const Option *table = config_options(&rows), *values = config_derived(&derived);
    char **lines = xcalloc((size_t)(rows + derived), sizeof *lines, "argument dump");
    for (int i = 0; i < rows; i++) {
        if (config_is_setting(&table[i])) lines[count++] = row_line(&table[i], config);
    }
    for (int i = 0; i < derived; i++) lines[count++] = row_line(&values[i], config);
    qsort(lines, (size_t)count, sizeof *lines, compare_lines);
    fprintf(file, "------------------------ arguments ------------------------\n");
    for (int i = 0; i < count; i++) {
        fprintf(file, "%s\n", lines[i]);
        free(lines[i]);
    }
    fprintf(file, "-------------------- end of arguments ---------------------\n");
    free(lines);
}

// --- JSON ----------------------------------------------------------------------------------------

// Adds the value of a row as a member. Numbers read back bit-exactly.
static void add_member(Text *json, const Option *row, const Config *config) {
    const void *field = (const char *)config + row->offset;
    char name[OPTION_KEY_BYTES], buffer[96];
    const char *text = buffer;
    Words words;
    option_key(row, name);
    json_name(json, name);
    switch (row->kind) {
        case OPTION_FLAG: text_add(json, *(const bool *)field ? "true" : "false"); break;
        case OPTION_INT:
        case OPTION_INT64:
        case OPTION_REAL:
            text_add(json, "%s", row_number(row, field, buffer, sizeof buffer) ? buffer : "null");
            break;
        case OPTION_WORDS:
            memcpy(&words, field, sizeof words);
            text_add(json, words.items ? "[" : "null");
            for (int i = 0; words.items && i < words.count; i++) {
                if (i) text_add(json, ",");
                text_add_quoted(json, words.items[i]);
            }
            if (words.items) text_add(json, "]");
            break;
        default:
            if (row_text(row, field, &text, buffer, sizeof buffer)) text_add_quoted(json, text);
            else text_add(json, "null");
    }
}

char *config_to_json(const Config *config) {
    assert(config);
    int rows, derived;
    const Option *table = config_options(&rows), *values = config_derived(&derived);
    Text json = {0};
    text_add(&json, "{");
    for (int i = 0; i < rows; i++) {
        if (config_is_setting(&table[i])) add_member(&json, &table[i], config);
    }
    for (int i = 0; i < derived; i++) add_member(&json, &values[i], config);
    text_add(&json, "}");
    return json.data;
}
