// --help: see options.h.
#include "llmc/config/options.h"

#include <stdio.h>
#include <string.h>

enum { HELP_COLUMNS = 100 };

// Prints text wrapped to start at column `indent`; the line already has `used` columns.
static void print_wrapped(const char *text, int indent, int used, FILE *file) {
    int column = used;
    while (*text) {
        int word = (int)strcspn(text, " ");
        if (column > indent && column + 1 + word > HELP_COLUMNS) {
            fputc('\n', file);
            column = 0;
        }
        if (column < indent) column += fprintf(file, "%*s", indent - column, "");
        else if (column > indent) column += fprintf(file, " ");
        column += fprintf(file, "%.*s", word, text);
        text += word;
        text += strspn(text, " ");
    }
    fputc('\n', file);
}

static void print_row(const Option *row, FILE *file) {
    enum { INDENT = 34 };
    int used = fprintf(file, "  --%s", row->name);
    if (row->value) used += fprintf(file, " %s", row->value);
    if (used >= INDENT - 1) {
        fputc('\n', file);
        used = 0;
    }
    char text[1024];
    int n = 0;
    if (row->alias) n += snprintf(text + n, sizeof text - (size_t)n, "(or --%s) ", row->alias);
    if (row->choices) n += snprintf(text + n, sizeof text - (size_t)n, "%s: ", row->choices);
    n += snprintf(text + n, sizeof text - (size_t)n, "%s", row->help);
    bool show_default = row->initial && row->kind != OPTION_FLAG;
    if (show_default && n < (int)sizeof text) {
        snprintf(text + n, sizeof text - (size_t)n, " [%s]", row->initial);
    }
    print_wrapped(text, INDENT, used, file);
}

void options_help(const Option *table, int rows, FILE *file) {
    for (int i = 0; i < rows; i++) {
        if (table[i].name) print_row(&table[i], file);
        else fprintf(file, "\n%s\n", table[i].help);
    }
}
