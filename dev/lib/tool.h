// Implements main() for programs that consist of an option table and a function: the programs in
// dev/data, dev/convert_checkpoint.c and dev/generate.c.
#pragma once
#include "llmc/config/options.h"
LLMC_BEGIN

typedef struct Tool {
    const Option *table;
    int rows;           // number of rows, including one named "help"
    const char *usage;  // lines printed above the help
    void *settings;     // zeroed struct for the parsed values
    // Runs the program. May return an error without text if it has already printed a message.
    bool (*run)(const void *settings, int *argc, char ***argv, Error *err);
    void (*version)(void);  // prints the version; NULL if the table has no row "version"
} Tool;

// Parses the command line, prints help or version, or calls run and prints its error. Returns the
// exit code.
int tool_main(const Tool *tool, int argc, char **argv);

LLMC_END
