// Reads pickles as plain data. Nothing is imported, called or built: where a pickle asks for a
// call, there is an object that says of what, with which arguments and which state. Who knows the
// name reads them (torch_file.c, megatron_*.c). All else stays an object that nobody looks into.
//
// Pickles are hostile input. Memory is at most some hundred bytes for each byte of the pickle, and
// for each of PICKLE_MOST_VALUES.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

enum {
    PICKLE_MAX_BYTES = 256 << 20,
    PICKLE_MOST_VALUES = 1 << 24,  // and the same number of places that hold one
};

typedef enum PickleKind {
    PICKLE_NONE,
    PICKLE_BOOL,
    PICKLE_INT,  // within 64 bits
    PICKLE_REAL,
    PICKLE_TEXT,  // without a 0 within
    PICKLE_LIST,  // lists, tuples and sets
    PICKLE_DICT,
    PICKLE_GLOBAL,  // the name of a class or function
    PICKLE_OBJECT,  // what a call was to make
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
        const char *text;  // TEXT; of GLOBAL "module name": "torch FloatStorage"
    };
    // Of a LIST its items. Of a DICT and an OBJECT keys and values in turn: of an OrderedDict, say.
    PickleValue **items;
    size_t count, room;
    const PickleValue *made_by;    // OBJECT: what was to be called, mostly a GLOBAL
    const PickleValue *arguments;  // OBJECT: of the call, mostly a LIST. STORED: the reference
    const PickleValue *state;      // OBJECT: what it was to be filled with, mostly a DICT. NULL: nothing
};

typedef struct PickleBlock PickleBlock;
typedef struct Pickle {
    const PickleValue *root;
    PickleBlock *blocks;  // of values
} Pickle;

// NULL, or what is wrong with the pickle. Protocols 2 to 5, with all their opcodes but buffers
// outside the pickle and registered extensions. Values may contain themselves: whoever follows them
// bounds how deep. Texts are copies. On failure nothing is left to free.
const char *pickle_read(Pickle *pickle, const void *data, size_t bytes);
void pickle_free(Pickle *pickle);

// --- Looking into values. Each takes NULL as a value and finds nothing there. --------------------

// The value of a text key in a DICT, in an OBJECT, or in an OBJECT's state. NULL: there is none.
const PickleValue *pickle_member(const PickleValue *value, const char *key);
// Item i of a LIST, or of the arguments of an OBJECT that `made_by` was to make. NULL: none.
const PickleValue *pickle_item(const PickleValue *value, size_t i);
const PickleValue *pickle_argument(const PickleValue *value, const char *made_by, size_t i);
// Whether it is an OBJECT of this name, "module name".
bool pickle_made_by(const PickleValue *value, const char *made_by);
// An INT in [least, most].
bool pickle_int(const PickleValue *value, int64_t least, int64_t most, int64_t *out);
// The text of a TEXT, or NULL.
const char *pickle_text(const PickleValue *value);
// A LIST, or a torch.Size, of at most `most` sizes that are not negative: how many; -1: it is none.
int pickle_sizes(const PickleValue *value, int64_t *sizes, int most);

LLMC_END
