// Shared by config_check.c and config_check_model.c.
#pragma once
#include "llmc/config/config_roles.h"
LLMC_BEGIN

typedef struct Parsed {
    const Config *config;
    const bool *given;  // (rows of the table)
    char *notes;
    size_t notes_bytes;
    Error *err;
} Parsed;

#define COUNT_OF(list) (sizeof(list) / sizeof((list)[0]))
// Report a usage error, or add a note. For functions with a parameter `const Parsed *p`.
#define REFUSE(...) usage_error(p->err, __VA_ARGS__)
#define NOTE(...) options_note(p->notes, p->notes_bytes, __VA_ARGS__)
#define GIVEN(parsed, field) ((parsed)->given[config_row_of(offsetof(Config, field))])

// Returns the row of the option table that stores the field at this offset of Config.
int config_row_of(size_t offset);

// Checks the sizes, positions and windows of the model.
bool config_check_model(const Parsed *p);
// Checks that T divides what tensor parallelism splits: heads, MLP width, and the tokens of a
// micro-batch, which are summed in T blocks. config_finish pads the vocabulary.
bool config_check_tensor_parallel(const Parsed *p);
bool config_check_pipeline(const Parsed *p);

LLMC_END
