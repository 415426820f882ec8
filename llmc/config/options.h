// Long options from a table. Reads argv and argument files into words, and words into a settings
// struct; prints the table as help. Knows nothing of training: config_parse.c has the trainer's table,
// tools in dev/data have their own.
#pragma once
#include <stdio.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// A list of words (--data-path and its kin take several values). The words belong to whoever read
// them.
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
    OPTION_WORDS,  // Words: everything up to the next flag
    OPTION_CHOICE  // int or enum: the index of the word among the choices
} OptionKind;

typedef enum OptionUse {
    OPTION_USED,
    OPTION_NO_EFFECT,  // accepted, checked, and changes nothing: `help` says why
    OPTION_REFUSED     // a usage error: `help` says why and what to do
} OptionUse;

#define OPTION_NO_FIELD ((size_t)-1)               // offset of a row that stores nothing
#define OPTION_ANY 1e300                           // high (or -low) of a number without a bound
#define OPTION_ABOVE_ZERO 2.2250738585072014e-308  // low of a number that must be positive
#define OPTION_BELOW_ONE 0x1.fffffffffffffp-1      // high of a number that must be below 1

typedef struct Option {
    // Without the dashes. NULL: a heading. "moe-*" in a refused row stands for every name that
    // begins so.
    const char *name;
    const char *alias;  // a second spelling, or NULL
    OptionKind kind;
    OptionUse use;
    int roles;            // the program's own column; see config_roles.h for the trainer
    size_t offset;        // of the field in the settings struct, or OPTION_NO_FIELD
    const char *initial;  // the default, in the words of the command line; NULL: zero, printed as None
    // The allowed range of a number, inclusive. For OPTION_TEXT, low 1 refuses "". For
    // OPTION_WORDS, low is the least number of words.
    double low, high;
    bool single;           // an OPTION_REAL that is used in float32: its value there must be in the range
    int multiple;          // a whole number must be a multiple of this; 0: any
    const char *choices;   // "first|second"; for OPTION_INT, the only numbers of the range that are allowed
    const char *no_other;  // OPTION_CHOICE: why there is no other choice, for the error line; or NULL
    bool negative;         // an OPTION_FLAG that stores false
    bool note;             // a row without effect whose reason the user should be told when it is given
    const char *value;     // what the help calls the value
    const char *help;
} Option;

// Copies argv[1..argc) into *words (count in *count). Each "@file" is replaced by the words of that
// file:
// - White space separates them. "#" at the start of a word begins a comment.
// - Quotes and backslashes work as in a shell. A backslash at the end of a line joins lines.
// - "@other" in a file is relative to that file's folder and may nest 8 deep. A quoted "@" is no
//   file.
// Error: EXIT_USAGE, with file and line. On failure nothing needs freeing.
bool options_read_words(int argc, char *const *argv, char ***words, int *count, Error *err);
void options_free_words(char **words, int count);

// Writes every row's default into settings.
void options_defaults(const Option *table, int rows, void *settings);
// Stores the value of one row, as the command line does. OPTION_FLAG: the word is "true" or
// "false". Not for OPTION_WORDS. Error (EXIT_USAGE): malformed, out of range; settings are
// unchanged then.
bool options_set(const Option *row, const char *word, void *settings, Error *err);
// What options_parse tells beside the settings.
typedef struct OptionsFound {
    bool *given;  // (rows) set true for rows that occur; may be NULL
    char *notes;  // one line is appended for each row that asks for it; may be NULL
    size_t notes_bytes;
} OptionsFound;
// "--flag value" or "--flag=value", exact names, the last occurrence wins. Text fields point into
// words, which must outlive settings; the words themselves may be rewritten. found may be NULL.
// Error (EXIT_USAGE), naming the flag: unknown (with the nearest name, or that it is the default
// where only "no-" of it is known), refused, no value, malformed, out of range.
bool options_parse(const Option *table, int rows, char **words, int count, void *settings,
                   const OptionsFound *found, Error *err);
// Whether the words ask for the flag `name`, whatever else is wrong with them. -h asks for --help,
// except as the value of the flag before it.
bool options_ask(const Option *table, int rows, char *const *words, int count, const char *name);
// One block of lines per row, under the table's headings: defaults, choices, reasons. 100 columns
// wide.
void options_help(const Option *table, int rows, FILE *file);

// The row that a name (without dashes, length bytes) means; NULL when there is none.
const Option *options_find(const Option *table, int rows, const char *name, size_t length);
// Name of a row in dumps and checkpoints, as Megatron has it: underscores instead of dashes, and
// --no-check-... without "no-".
enum { OPTION_KEY_BYTES = 96 };
void option_key(const Option *row, char key[OPTION_KEY_BYTES]);
// Index of the word among a row's choices, "first|second"; -1 when it is none of them.
int options_choice(const char *choices, const char *word);

// Appends one line to notes, cut where the room ends; notes may be NULL.
void options_note(char *notes, size_t notes_bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
// A double in the fewest digits that read back equal, as Python prints it: 0.0006, 6e-05, 256.0.
// bytes >= 32.
void format_real(double x, char *text, size_t bytes);

LLMC_END
