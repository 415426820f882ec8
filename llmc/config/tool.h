// The main of a program that is a table of flags and what it does with them: dev/data,
// dev/convert_checkpoint.c, dev/generate.c.
#pragma once
#include "llmc/config/options.h"
LLMC_BEGIN

typedef struct Tool {
    const Option *table;
    int rows;           // with a row "help"
    const char *usage;  // lines above the help
    void *settings;     // the table's, zeros
    // An error without a text has been said.
    bool (*run)(const void *settings, int *argc, char ***argv, Error *err);
    void (*version)(void);  // of a table with a row "version", else NULL
} Tool;

// Reads the command line. Prints the help or the version, or runs; then prints the error line.
// Returns the exit code.
int tool_main(const Tool *tool, int argc, char **argv);

LLMC_END
