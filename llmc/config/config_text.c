// A Config as text: Megatron's argument dump, and JSON for checkpoints and JSON lines. See
// config.h.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/config/config.h"
#include "llmc/config/config_roles.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"

// --- one value -----------------------------------------------------------------------------------

bool config_is_setting(const Option *row) {
    return row->name && row->offset != OPTION_NO_FIELD && strcmp(row->name, "help") != 0 &&
           strcmp(row->name, "version") != 0;
}

// Formats an integer. Returns false if it has neither a default nor a value.
static bool number_text(const Option *row, int64_t value, char *text, size_t bytes) {
    snprintf(text, bytes, "%lld", (long long)value);
    return value || row->initial;
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
    return number_text(row, row->kind == OPTION_INT ? narrow : wide, text, bytes);
}

// Gets the value of a text or choice row. Returns false if it has none.
static bool row_text(const Option *row, const void *field, const char **text, char *buffer, size_t bytes) {
    if (row->kind != OPTION_CHOICE) {
        memcpy(text, field, sizeof *text);
        return *text != NULL;
    }
    int index;
    memcpy(&index, field, sizeof index);
    const char *word = row->choices;
    for (; index > 0; index--) word += strcspn(word, "|") + 1;
    snprintf(buffer, bytes, "%.*s", (int)strcspn(word, "|"), word);
    *text = buffer;
    return true;
}

// --- Megatron's argument dump --------------------------------------------------------------------

// Returns "  name ....... value" with dots to column 48, malloc'ed.
static char *dump_line(const char *name, const char *value) {
    int dots = 48 - (int)strlen(name);
    size_t bytes = strlen(name) + strlen(value) + 64;
    char *line = (char *)xmalloc(bytes, "argument dump");
    snprintf(line, bytes, "  %s %.*s %s", name, dots > 0 ? dots : 0,
             "................................................", value);
    return line;
}

// Returns a list as Python prints it, ['a', 'b'], malloc'ed.
static char *list_text(const Words *words) {
    size_t bytes = 8;
    for (int i = 0; i < words->count; i++) bytes += strlen(words->items[i]) + 4;
    char *text = (char *)xmalloc(bytes, "argument dump");
    size_t used = (size_t)snprintf(text, bytes, "[");
    for (int i = 0; i < words->count; i++) {
        used += (size_t)snprintf(text + used, bytes - used, "%s'%s'", i ? ", " : "", words->items[i]);
    }
    snprintf(text + used, bytes - used, "]");
    return text;
}

static char *row_line(const Option *row, const Config *config) {
    const void *field = (const char *)config + row->offset;
    char name[OPTION_KEY_BYTES], buffer[96];
    const char *value = buffer;
    option_key(row, name);
    Words words;
    char *list = NULL;
    switch (row->kind) {
        case OPTION_FLAG: value = *(const bool *)field ? "True" : "False"; break;
        case OPTION_INT:
        case OPTION_INT64:
        case OPTION_REAL:
            if (!row_number(row, field, buffer, sizeof buffer)) value = "None";
            break;
        case OPTION_WORDS:
            memcpy(&words, field, sizeof words);
            list = words.items ? list_text(&words) : NULL;
            value = list ? list : "None";
            break;
        default:
            if (!row_text(row, field, &value, buffer, sizeof buffer)) value = "None";
    }
    char *line = dump_line(name, value);
    free(list);
    return line;
}

static int compare_lines(const void *a, const void *b) {
    return strcasecmp(*(char *const *)a, *(char *const *)b);
}

void config_print(const Config *config, FILE *file) {
    assert(config && file);
    int rows, derived, count = 0;
    const Option *table = config_options(&rows), *values = config_derived(&derived);
    char **lines = (char **)xcalloc((size_t)(rows + derived), sizeof *lines, "argument dump");
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

// cJSON returns NULL only if out of memory.
static void add_item(cJSON *object, const char *name, cJSON *item) {
    if (!item || !cJSON_AddItemToObject(object, name, item)) {
        fatal(NULL, EXIT_ENVIRONMENT, "out of memory for JSON; use a larger machine");
    }
}

// Flags may contain any bytes, such as directory names, but JSON needs UTF-8.
static cJSON *text_item(const char *text) {
    size_t bytes = strlen(text);
    int64_t replaced = 0;
    char *repaired = (char *)xmalloc(3 * bytes + 1, "JSON");
    repaired[utf8_repair(text, bytes, repaired, &replaced)] = '\0';
    cJSON *item = cJSON_CreateString(repaired);
    free(repaired);
    return item;
}

static cJSON *words_item(const Words *words) {
    cJSON *array = words->items ? cJSON_CreateArray() : cJSON_CreateNull();
    for (int i = 0; array && words->items && i < words->count; i++) {
        if (!cJSON_AddItemToArray(array, text_item(words->items[i]))) {
            fatal(NULL, EXIT_ENVIRONMENT, "out of memory for JSON; use a larger machine");
        }
    }
    return array;
}

// Writes numbers as text, so that they read back bit-exactly.
static cJSON *row_item(const Option *row, const Config *config) {
    const void *field = (const char *)config + row->offset;
    char buffer[96];
    const char *text;
    Words words;
    switch (row->kind) {
        case OPTION_FLAG: return cJSON_CreateBool(*(const bool *)field);
        case OPTION_INT:
        case OPTION_INT64:
        case OPTION_REAL:
            return row_number(row, field, buffer, sizeof buffer) ? cJSON_CreateRaw(buffer)
                                                                 : cJSON_CreateNull();
        case OPTION_WORDS: memcpy(&words, field, sizeof words); return words_item(&words);
        default:
            return row_text(row, field, &text, buffer, sizeof buffer) ? text_item(text) : cJSON_CreateNull();
    }
}

char *config_to_json(const Config *config) {
    assert(config);
    int rows, derived;
    const Option *table = config_options(&rows), *values = config_derived(&derived);
    cJSON *object = cJSON_CreateObject();
    if (!object) fatal(NULL, EXIT_ENVIRONMENT, "out of memory for JSON; use a larger machine");
    for (int i = 0; i < rows; i++) {
        char name[OPTION_KEY_BYTES];
        if (!config_is_setting(&table[i])) continue;
        option_key(&table[i], name);
        add_item(object, name, row_item(&table[i], config));
    }
    for (int i = 0; i < derived; i++) add_item(object, values[i].name, row_item(&values[i], config));
    char *text = cJSON_PrintUnformatted(object);
    cJSON_Delete(object);
    if (!text) fatal(NULL, EXIT_ENVIRONMENT, "out of memory for JSON; use a larger machine");
    return text;
}
