// A tool's main: see tool.h.
#include "dev/lib/tool.h"

#include <assert.h>
#include <signal.h>

static bool parse_and_run(const Tool *tool, char **words, int count, int *argc, char ***argv, Error *err) {
    if (options_ask(tool->table, tool->rows, words, count, "help")) {
        fputs(tool->usage, stdout);
        options_help(tool->table, tool->rows, stdout);
        return true;
    }
    if (tool->version && options_ask(tool->table, tool->rows, words, count, "version")) {
        tool->version();
        return true;
    }
    return options_parse(tool->table, tool->rows, words, count, tool->settings, NULL, err) &&
           tool->run(tool->settings, argc, argv, err);
}

int tool_main(const Tool *tool, int argc, char **argv) {
    assert(tool && tool->table && tool->settings && tool->run);
    Error err = {0};
    char **words = NULL;
    int count = 0;
    report_illegal_instructions();
    signal(SIGXFSZ, SIG_IGN);  // makes write() fail at a file-size limit, as on a full disk
    options_defaults(tool->table, tool->rows, tool->settings);
    bool good = options_read_words(argc, argv, &words, &count, &err) &&
                parse_and_run(tool, words, count, &argc, &argv, &err);
    if (!good && *err.what) error_print(NULL, err.what);
    options_free_words(words, count);
    return good ? EXIT_DONE : err.code;
}
