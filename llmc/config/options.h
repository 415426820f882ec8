// Command-line options from a table. Reads argv and argument files into words, stores their values
// in a settings struct, and prints the table as help. Independent of training: config_table.c has
// the trainer's table, and tools in dev/ have their own.
#pragma once
#include <stdio.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// A list of words, for --data-path and other flags with several values. The code
// that read the words owns them.
typedef struct Words {
    const char **items;
    int count;
} Words;

typedef enum OptionKind {
    OPTION_FLAG,   // bool, takes no value
    OPTION_INT,    // int
    OPTION_INT64,  // int64_t
    OPTION_REAL,   // double
    OPTION_TEXT,   // const char *
    OPTION_WORDS,  // Words: all words up to the next flag
    OPTION_CHOICE  // int or enum: the index of the word among the choices
} OptionKind;

typedef enum OptionUse {
    OPTION_USED,
    OPTION_NO_EFFECT,  // accepted and checked, but ignored: `help` says why
    OPTION_REFUSED     // a usage error: `help` says why and what to do instead
} OptionUse;

#define OPTION_NO_FIELD ((size_t)-1)               // offset of a row that stores nothing
#define OPTION_ANY 1e300                           // high (or -low) of an unbounded number
#define OPTION_ABOVE_ZERO 2.2250738585072014e-308  // low of a number that must be positive
#define OPTION_BELOW_ONE 0x1.fffffffffffffp-1      // high of a number that must be below 1

typedef struct Option {
    // Without dashes. NULL: a heading. "moe-*" in a refused row matches every name with that
    // prefix.
    const char *name;
    const char *alias;  // other names with the same meaning, separated by spaces; NULL: none
    OptionKind kind;
    OptionUse use;
    int roles;            // the program's own column; see config_roles.h for the trainer
    size_t offset;        // offset of the field in the settings struct, or OPTION_NO_FIELD
    const char *initial;  // default, as on the command line; NULL: zero, printed as None
    // Allowed range of a number, inclusive. OPTION_TEXT: low 1 refuses "". OPTION_WORDS: low is the
    // minimum number of words.
    double low, high;
    bool single;           // OPTION_REAL used in float32: the rounded value must be in range, too
    int multiple;          // an integer must be a multiple of this; 0: any
    const char *choices;   // "first|second"; for OPTION_INT, the allowed numbers
    const char *no_other;  // OPTION_CHOICE: why there is no other choice, for the error message; or NULL
    bool negative;         // OPTION_FLAG that stores false
    bool note;             // add a note when this ignored flag is given
    const char *value;     // placeholder of the value in --help
    const char *help;
} Option;

// Copies argv[1..argc) into *words (count in *count). Replaces each "@file" with the words of that
// file:
// - Words are separated by white space. "#" at the start of a word begins a comment.
// - Quotes and backslashes work as in a shell. A backslash at the end of a line joins lines.
// - "@other" in a file is relative to that file's directory and may nest 8 deep. A quoted "@" is
//   literal.
// Error: EXIT_USAGE, with file and line. On failure nothing needs freeing.
bool options_read_words(int argc, char *const *argv, char ***words, int *count, Error *err);
void options_free_words(char **words, int count);

// Stores every row's default.
void options_defaults(const Option *table, int rows, void *settings);
// Parses a word as the value of this row, as on the command line, and stores it. OPTION_FLAG: the
// word is "true" or "false". Not for OPTION_WORDS. Error (EXIT_USAGE): malformed or out of range;
// settings are then unchanged.
bool options_set(const Option *row, const char *word, void *settings, Error *err);
// Further results of options_parse.
typedef struct OptionsFound {
    bool *given;  // (rows) set to true for rows that occur; may be NULL
    char *notes;  // one line is appended for each given row with `note`; may be NULL
    size_t notes_bytes;
} OptionsFound;
// Parses "--flag value" and "--flag=value": exact names, the last occurrence wins. Text fields
// point into words, which must outlive settings and may be modified. found may be NULL. Error
// (EXIT_USAGE), naming all faulty flags: unknown (with the nearest name, or a hint that only "no-"
// of it exists), refused, missing value, malformed, out of range.
bool options_parse(const Option *table, int rows, char **words, int count, void *settings,
                   const OptionsFound *found, Error *err);
// Returns true if the words contain the flag `name`, even if others are invalid. -h means --help,
// unless it is the value of the flag before it.
bool options_ask(const Option *table, int rows, char *const *words, int count, const char *name);
// Prints each row's name, default, choices and help under its heading, 100 columns wide.
void options_help(const Option *table, int rows, FILE *file);

// Returns the row with this name (length bytes, without dashes), or NULL.
const Option *options_find(const Option *table, int rows, const char *name, size_t length);
// Name of a row in dumps and checkpoints, as Megatron has it: underscores instead of dashes, and
// --no-check-... without "no-".
enum { OPTION_KEY_BYTES = 96 };
void option_key(const Option *row, char key[OPTION_KEY_BYTES]);
// Returns the index of the word among a row's choices, "first|second", or -1.
int options_choice(const char *choices, const char *word);

// Appends one line to notes, truncated if it does not fit; notes may be NULL.
void options_note(char *notes, size_t notes_bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
// Writes a double with the fewest digits that read back equal, as Python does: 0.0006, 6e-05,
// 256.0. bytes >= 32.
void format_real(double x, char *text, size_t bytes);

LLMC_END
