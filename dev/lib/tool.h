// main() for programs that consist of an option table and a function: dev/data,
// dev/convert_checkpoint.c, dev/generate.c.
#pragma once
#include "llmc/config/options.h"
LLMC_BEGIN

typedef struct Tool {
    const Option *table;
    int rows;           // with a row "help"
    const char *usage;  // lines above the help
    void *settings;     // zeroed struct that the table stores into
    // May return an error without text if it has already printed one.
    bool (*run)(const void *settings, int *argc, char ***argv, Error *err);
    void (*version)(void);  // if the table has a row "version", else NULL
} Tool;

// Parses the command line, prints help or version, or calls run and prints its error. Returns the
// exit code.
int tool_main(const Tool *tool, int argc, char **argv);

LLMC_END
