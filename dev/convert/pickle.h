// Parses pickles as plain data. Nothing is imported, called or constructed: a call in the pickle
// becomes an object that records the callable's name, its arguments and its state.
// torch_file.c and megatron_*.c interpret the names they know; all other objects are ignored.
//
// Pickles are untrusted input. Memory use is bounded by a few hundred bytes per byte of the pickle
// and per PICKLE_MOST_VALUES.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

enum {
    PICKLE_MAX_BYTES = 256 << 20,
    PICKLE_MOST_VALUES = 1 << 24,  // also limits the references to values
};

typedef enum PickleKind {
    PICKLE_NONE,
    PICKLE_BOOL,
    PICKLE_INT,  // within 64 bits
    PICKLE_REAL,
    PICKLE_TEXT,  // without NUL bytes
    PICKLE_LIST,  // lists, tuples and sets
    PICKLE_DICT,
    PICKLE_GLOBAL,  // the name of a class or function
    PICKLE_OBJECT,  // result of a call
    PICKLE_STORED,  // torch.save's reference to a storage
    PICKLE_OTHER    // bytes, large numbers
} PickleKind;

typedef struct PickleValue PickleValue;
struct PickleValue {
    PickleKind kind;
    union {
        bool truth;
        int64_t integer;
        double real;
        const char *text;  // TEXT; GLOBAL: "module name", such as "torch FloatStorage"
    };
    // LIST: its items. DICT and OBJECT: alternating keys and values (an OrderedDict is such an
    // OBJECT).
    PickleValue **items;
    size_t count;
    const PickleValue *made_by;    // OBJECT: the callable, usually a GLOBAL
    const PickleValue *arguments;  // OBJECT: arguments of the call, usually a LIST. STORED: the reference
    const PickleValue *state;      // OBJECT: state to restore, usually a DICT. NULL: none
};

typedef struct PickleBlock PickleBlock;
typedef struct Pickle {
    const PickleValue *root;
    PickleBlock *blocks;  // memory of all values
} Pickle;

// Returns NULL on success, else a description of the fault. Supports protocols 2 to 5 with all
// opcodes except out-of-band buffers and registered extensions. Values may contain themselves, so
// traversals must limit their depth. Texts are copied. On failure nothing needs freeing.
const char *pickle_read(Pickle *pickle, const void *data, size_t bytes);
void pickle_free(Pickle *pickle);

// --- Accessors. All accept NULL as value and return "not found" for it. -------------------------

// Returns the value of a text key in a DICT, an OBJECT, or an OBJECT's state; NULL: not found.
const PickleValue *pickle_member(const PickleValue *value, const char *key);
// Returns item i of a LIST | argument i of an OBJECT constructed by `made_by`; NULL: not found.
const PickleValue *pickle_item(const PickleValue *value, size_t i);
const PickleValue *pickle_argument(const PickleValue *value, const char *made_by, size_t i);
// Returns true for an OBJECT constructed by this callable, "module name".
bool pickle_made_by(const PickleValue *value, const char *made_by);
// Reads an INT within [least, most].
bool pickle_int(const PickleValue *value, int64_t least, int64_t most, int64_t *out);
// Returns the string of a TEXT, or NULL.
const char *pickle_text(const PickleValue *value);
// Reads a LIST or torch.Size of at most `most` non-negative sizes. Returns their number, or -1 if
// the value is something else.
int pickle_sizes(const PickleValue *value, int64_t *sizes, int most);

LLMC_END
