// Parses pickles without executing them. See pickle.h. A pickle is a program for a machine with a
// stack, marks on the stack, and a memo of values to reuse. Python's Lib/pickletools.py describes
// the opcodes.
#include "dev/convert/pickle.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// CLASS_NAME_BYTES bounds the copies of names that many opcodes take from the memo.
enum { BLOCK_VALUES = 512, CLASS_NAME_BYTES = 512 };

struct PickleBlock {
    PickleBlock *next;
    int used;
    PickleValue values[BLOCK_VALUES];
};

typedef struct Machine {
    Pickle *pickle;
    const uint8_t *at, *end;
    PickleValue **stack;
    size_t depth;
    size_t *marks, mark_count;  // stack depths
    PickleValue **memo;
    size_t memo_count;
    size_t values, places;  // values, and references to them, so far; limit of each: PICKLE_MOST_VALUES
    bool done;
} Machine;

// Argument of an opcode: a fixed number of bytes, bytes with a length prefix of 1, 4 or 8 bytes, or
// two lines.
enum { LENGTH_1 = -1, LENGTH_4 = -4, LENGTH_8 = -8, TWO_LINES = -2 };

typedef struct Argument {
    const uint8_t *data;
    size_t bytes;
} Argument;

// Returns NULL or an error text.
typedef const char *(*Handler)(Machine *m, Argument argument, int which);

static const char TOO_SHORT[] = "its pickle is truncated", EMPTY[] = "its pickle pops from an empty stack",
                  TOO_LARGE[] = "its pickle holds too many values";

// --- Values --------------------------------------------------------------------------------------

static PickleValue *new_value(Machine *m, PickleKind kind) {
    PickleBlock *block = m->pickle->blocks;
    if (!block || block->used == BLOCK_VALUES) {
        block = xcalloc(1, sizeof *block, "a pickle's values");
        block->next = m->pickle->blocks;
        m->pickle->blocks = block;
    }
    PickleValue *value = &block->values[block->used++];
    value->kind = kind;
    m->values++;
    return value;
}

static PickleValue **room_for_value(PickleValue **list, size_t count) {
    return grow_array(list, (int64_t)count, sizeof *list, "a pickle's values");
}

static const char *push(Machine *m, PickleValue *value) {
    if (m->values > PICKLE_MOST_VALUES || ++m->places > PICKLE_MOST_VALUES) return TOO_LARGE;
    m->stack = room_for_value(m->stack, m->depth);
    m->stack[m->depth++] = value;
    return NULL;
}

// Returns the number of values above the last mark, or on the entire stack.
static size_t above_mark(const Machine *m) {
    return m->depth - (m->mark_count ? m->marks[m->mark_count - 1] : 0);
}

// Returns NULL if there is no value above the mark.
static PickleValue *pop(Machine *m) { return above_mark(m) ? m->stack[--m->depth] : NULL; }

static void append(PickleValue *list, PickleValue *value) {
    list->items = room_for_value(list->items, list->count);
    list->items[list->count++] = value;
}

// Creates a NUL-terminated copy of the bytes as a value of the given kind.
static PickleValue *new_text(Machine *m, PickleKind kind, const uint8_t *data, size_t bytes) {
    char *copy = xmalloc(bytes + 1, "a pickle's text");
    if (bytes) memcpy(copy, data, bytes);
    copy[bytes] = 0;
    PickleValue *value = new_value(m, kind);
    value->text = copy;
    return value;
}

static void free_value(PickleValue *value) {
    if (value->kind == PICKLE_TEXT || value->kind == PICKLE_GLOBAL) free((void *)value->text);
    free(value->items);
}

void pickle_free(Pickle *pickle) {
    while (pickle->blocks) {
        PickleBlock *block = pickle->blocks;
        pickle->blocks = block->next;
        for (int i = 0; i < block->used; i++) free_value(&block->values[i]);
        free(block);
    }
    pickle->root = NULL;
}

// --- Opcodes: constants --------------------------------------------------------------------------

static const char *op_protocol(Machine *m, Argument a, int which) {
    return *a.data >= 2 && *a.data <= 5 ? NULL : "its pickle has a protocol other than 2 to 5";
}

static const char *op_frame(Machine *m, Argument a, int which) { return NULL; }

static const char *op_none(Machine *m, Argument a, int kind) {
    return push(m, new_value(m, (PickleKind)kind));
}

static const char *op_bool(Machine *m, Argument a, int truth) {
    PickleValue *value = new_value(m, PICKLE_BOOL);
    value->truth = truth != 0;
    return push(m, value);
}

// Parses a little-endian integer. is_signed: two's complement.
static const char *op_int(Machine *m, Argument a, int is_signed) {
    if (a.bytes > 8) return op_none(m, a, PICKLE_OTHER);
    uint64_t bits = is_signed && a.bytes && a.data[a.bytes - 1] >= 128 ? UINT64_MAX : 0;
    for (size_t i = a.bytes; i-- > 0;) bits = bits << 8 | a.data[i];
    PickleValue *value = new_value(m, PICKLE_INT);
    value->integer = (int64_t)bits;
    return push(m, value);
}

static const char *op_real(Machine *m, Argument a, int which) {
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) bits = bits << 8 | a.data[i];
    PickleValue *value = new_value(m, PICKLE_REAL);
    memcpy(&value->real, &bits, sizeof bits);
    return push(m, value);
}

static const char *op_text(Machine *m, Argument a, int which) {
    bool plain = !a.bytes || !memchr(a.data, 0, a.bytes);
    return push(m, plain ? new_text(m, PICKLE_TEXT, a.data, a.bytes) : new_value(m, PICKLE_OTHER));
}

// --- Opcodes: lists and dicts --------------------------------------------------------------------

static const char *op_mark(Machine *m, Argument a, int which) {
    if (m->mark_count >= PICKLE_MOST_VALUES) return TOO_LARGE;
    m->marks = grow_array(m->marks, (int64_t)m->mark_count, sizeof *m->marks, "a pickle's marks");
    m->marks[m->mark_count++] = m->depth;
    return NULL;
}

// Pops the last mark and everything above it: *count values from m->stack[m->depth].
static const char *take_marked(Machine *m, size_t *count) {
    if (!m->mark_count) return "its pickle needs a mark, but the stack has none";
    *count = above_mark(m);
    m->depth = m->marks[--m->mark_count];
    return NULL;
}

// Creates a list or dict of the values above the mark.
static const char *op_collect(Machine *m, Argument a, int kind) {
    size_t count;
    const char *fault = take_marked(m, &count);
    if (fault) return fault;
    if (kind == PICKLE_DICT && count % 2) return "its pickle has a key without a value";
    PickleValue *value = new_value(m, (PickleKind)kind);
    for (size_t i = 0; i < count; i++) append(value, m->stack[m->depth + i]);
    return push(m, value);
}

static const char *op_tuple(Machine *m, Argument a, int count) {
    if (above_mark(m) < (size_t)count) return EMPTY;
    PickleValue *value = new_value(m, PICKLE_LIST);
    m->depth -= (size_t)count;
    for (int i = 0; i < count; i++) append(value, m->stack[m->depth + (size_t)i]);
    return push(m, value);
}

// Appends the `count` values from m->stack[m->depth] to the list or dict below them. Additions to
// other objects are ignored, because nothing reads them.
static const char *add_taken(Machine *m, size_t count, bool pairs) {
    if (pairs && count % 2) return "its pickle has a key without a value";
    if (!above_mark(m)) return EMPTY;
    PickleValue *target = m->stack[m->depth - 1];
    bool fits = pairs ? target->kind == PICKLE_DICT || target->kind == PICKLE_OBJECT
                      : target->kind == PICKLE_LIST;
    if (!fits && target->kind != PICKLE_OBJECT && target->kind != PICKLE_OTHER)
        return "its pickle adds to a value that is not a list or dict";
    for (size_t i = 0; fits && i < count; i++) append(target, m->stack[m->depth + i]);
    return NULL;
}

static const char *op_add_marked(Machine *m, Argument a, int pairs) {
    size_t count;
    const char *fault = take_marked(m, &count);
    return fault ? fault : add_taken(m, count, pairs != 0);
}

static const char *op_add(Machine *m, Argument a, int pairs) {
    size_t count = pairs ? 2 : 1;
    if (above_mark(m) < count) return EMPTY;
    m->depth -= count;
    return add_taken(m, count, pairs != 0);
}

// --- Opcodes: stack and memo ---------------------------------------------------------------------

static const char *op_pop(Machine *m, Argument a, int which) {
    size_t count;
    if (m->mark_count && !above_mark(m)) return take_marked(m, &count);
    return pop(m) ? NULL : EMPTY;
}

static const char *op_pop_mark(Machine *m, Argument a, int which) {
    size_t count;
    return take_marked(m, &count);
}

static const char *op_again(Machine *m, Argument a, int which) {
    return above_mark(m) ? push(m, m->stack[m->depth - 1]) : EMPTY;
}

static size_t index_of(Argument a) {
    size_t index = 0;
    for (size_t i = a.bytes; i-- > 0;) index = index << 8 | a.data[i];
    return index;
}

// Stores the top value in the memo. Indices have no gaps. `next`: use the next index.
static const char *op_keep(Machine *m, Argument a, int next) {
    size_t index = next ? m->memo_count : index_of(a);
    if (!above_mark(m)) return EMPTY;
    if (index > m->memo_count || index >= PICKLE_MOST_VALUES) return "its pickle's memo has gaps";
    if (index == m->memo_count) m->memo = room_for_value(m->memo, m->memo_count++);
    m->memo[index] = m->stack[m->depth - 1];
    return NULL;
}

static const char *op_recall(Machine *m, Argument a, int which) {
    size_t index = index_of(a);
    return index < m->memo_count ? push(m, m->memo[index]) : "its pickle reads an unset memo entry";
}

// --- Opcodes: imports, calls and objects ---------------------------------------------------------

static PickleValue *new_global(Machine *m, const char *module, size_t module_bytes, const char *name,
                               size_t name_bytes) {
    PickleValue *value = new_value(m, PICKLE_GLOBAL);
    value->text = text_format("%.*s %.*s", (int)module_bytes, module, (int)name_bytes, name);
    return value;
}

static const char *op_global(Machine *m, Argument a, int which) {
    const char *text = (const char *)a.data, *line = (const char *)memchr(text, '\n', a.bytes);
    size_t module = (size_t)(line - text);
    return push(m, new_global(m, text, module, line + 1, a.bytes - module - 2));
}

static const char *op_global_of_stack(Machine *m, Argument a, int which) {
    const char *name = pickle_text(pop(m)), *module = pickle_text(pop(m));
    if (!name || !module) return "its pickle has a class name that is not a string";
    if (strlen(name) + strlen(module) > CLASS_NAME_BYTES)
        return "its pickle has a class name of more than 512 bytes";
    return push(m, new_global(m, module, strlen(module), name, strlen(name)));
}

// named: keyword arguments are on top of the stack; they are dropped.
static const char *op_call(Machine *m, Argument a, int named) {
    if (named && !pop(m)) return EMPTY;
    PickleValue *arguments = pop(m), *made_by = pop(m);
    if (!arguments || !made_by) return EMPTY;
    PickleValue *value = new_value(m, PICKLE_OBJECT);
    value->made_by = made_by;
    value->arguments = arguments;
    return push(m, value);
}

static const char *op_build(Machine *m, Argument a, int which) {
    PickleValue *state = pop(m);
    if (!state || !above_mark(m)) return EMPTY;
    if (m->stack[m->depth - 1]->kind == PICKLE_OBJECT) m->stack[m->depth - 1]->state = state;
    return NULL;
}

static const char *op_stored(Machine *m, Argument a, int which) {
    PickleValue *reference = pop(m);
    if (!reference) return EMPTY;
    PickleValue *value = new_value(m, PICKLE_STORED);
    value->arguments = reference;
    return push(m, value);
}

static const char *op_stop(Machine *m, Argument a, int which) {
    m->done = true;
    m->pickle->root = pop(m);
    return m->pickle->root ? NULL : EMPTY;
}

// --- The machine ---------------------------------------------------------------------------------

typedef struct Opcode {
    Handler run;
    int form;   // argument bytes, or one of the forms above
    int which;  // distinguishes opcodes that share a handler
} Opcode;
static const Opcode OPCODES[256] = {
    [0x80] = {op_protocol, 1, 0},
    [0x95] = {op_frame, 8, 0},
    ['.'] = {op_stop, 0, 0},
    ['N'] = {op_none, 0, PICKLE_NONE},
    [0x88] = {op_bool, 0, 1},
    [0x89] = {op_bool, 0, 0},
    ['J'] = {op_int, 4, 1},
    ['K'] = {op_int, 1, 0},
    ['M'] = {op_int, 2, 0},
    [0x8A] = {op_int, LENGTH_1, 1},
    [0x8B] = {op_int, LENGTH_4, 1},
    ['G'] = {op_real, 8, 0},
    ['X'] = {op_text, LENGTH_4, 0},
    [0x8C] = {op_text, LENGTH_1, 0},
    [0x8D] = {op_text, LENGTH_8, 0},
    ['T'] = {op_text, LENGTH_4, 0},
    ['U'] = {op_text, LENGTH_1, 0},
    ['B'] = {op_none, LENGTH_4, PICKLE_OTHER},
    ['C'] = {op_none, LENGTH_1, PICKLE_OTHER},
    [0x8E] = {op_none, LENGTH_8, PICKLE_OTHER},
    [0x96] = {op_none, LENGTH_8, PICKLE_OTHER},
    ['('] = {op_mark, 0, 0},
    [']'] = {op_none, 0, PICKLE_LIST},
    ['l'] = {op_collect, 0, PICKLE_LIST},
    ['t'] = {op_collect, 0, PICKLE_LIST},
    ['d'] = {op_collect, 0, PICKLE_DICT},
    [0x91] = {op_collect, 0, PICKLE_LIST},
    [')'] = {op_tuple, 0, 0},
    [0x85] = {op_tuple, 0, 1},
    [0x86] = {op_tuple, 0, 2},
    [0x87] = {op_tuple, 0, 3},
    ['}'] = {op_none, 0, PICKLE_DICT},
    [0x8F] = {op_none, 0, PICKLE_LIST},
    ['a'] = {op_add, 0, 0},
    ['s'] = {op_add, 0, 1},
    ['e'] = {op_add_marked, 0, 0},
    ['u'] = {op_add_marked, 0, 1},
    [0x90] = {op_add_marked, 0, 0},
    ['0'] = {op_pop, 0, 0},
    ['1'] = {op_pop_mark, 0, 0},
    ['2'] = {op_again, 0, 0},
    ['q'] = {op_keep, 1, 0},
    ['r'] = {op_keep, 4, 0},
    [0x94] = {op_keep, 0, 1},
    ['h'] = {op_recall, 1, 0},
    ['j'] = {op_recall, 4, 0},
    ['c'] = {op_global, TWO_LINES, 0},
    [0x93] = {op_global_of_stack, 0, 0},
    ['R'] = {op_call, 0, 0},
    [0x81] = {op_call, 0, 0},
    [0x92] = {op_call, 0, 1},
    ['b'] = {op_build, 0, 0},
    ['Q'] = {op_stored, 0, 0},
};

// Reads two lines including their newlines.
static const char *take_lines(Machine *m, Argument *a) {
    const uint8_t *line = m->at;
    for (int i = 0; i < 2; i++) {
        line = line < m->end ? (const uint8_t *)memchr(line, '\n', (size_t)(m->end - line)) : NULL;
        if (!line) return TOO_SHORT;
        line++;
    }
    *a = (Argument){m->at, (size_t)(line - m->at)};
    m->at = line;
    return memchr(a->data, 0, a->bytes) ? "its pickle has a class name with a NUL byte" : NULL;
}

static const char *take_argument(Machine *m, int form, Argument *a) {
    if (form == TWO_LINES) return take_lines(m, a);
    uint64_t bytes = form < 0 ? 0 : (uint64_t)form, left = (uint64_t)(m->end - m->at);
    if (form < 0) {
        if (left < (uint64_t)-form) return TOO_SHORT;
        for (int i = -form; i-- > 0;) bytes = bytes << 8 | m->at[i];
        m->at -= form;
        left = (uint64_t)(m->end - m->at);
    }
    if (left < bytes) return TOO_SHORT;
    *a = (Argument){m->at, (size_t)bytes};
    m->at += bytes;
    return NULL;
}

static const char *run(Machine *m) {
    while (!m->done) {
        Argument argument = {NULL, 0};
        if (m->at == m->end) return TOO_SHORT;
        const Opcode *opcode = &OPCODES[*m->at++];
        if (!opcode->run) return "its pickle has an opcode that is not in protocols 2 to 5";
        const char *fault = take_argument(m, opcode->form, &argument);
        if (!fault) fault = opcode->run(m, argument, opcode->which);
        if (fault) return fault;
    }
    return NULL;
}

const char *pickle_read(Pickle *pickle, const void *data, size_t bytes) {
    assert(data || bytes == 0);
    *pickle = (Pickle){0};
    if (bytes > PICKLE_MAX_BYTES) return "its pickle is larger than 256 MiB";
    const uint8_t *begin = (const uint8_t *)data;
    Machine m = {.pickle = pickle, .at = begin, .end = begin + bytes};
    const char *fault = run(&m);
    free(m.stack);
    free(m.marks);
    free(m.memo);
    if (fault) pickle_free(pickle);
    return fault;
}

// --- Access to values ---------------------------------------------------------------------------

static const PickleValue *in_pairs(const PickleValue *value, const char *key) {
    for (size_t i = 0; i + 1 < value->count; i += 2) {
        const char *text = pickle_text(value->items[i]);
        if (text && strcmp(text, key) == 0) return value->items[i + 1];
    }
    return NULL;
}

const PickleValue *pickle_member(const PickleValue *value, const char *key) {
    if (!value || (value->kind != PICKLE_DICT && value->kind != PICKLE_OBJECT)) return NULL;
    const PickleValue *found = in_pairs(value, key);
    if (found || !value->state || value->state->kind != PICKLE_DICT) return found;
    return in_pairs(value->state, key);
}

const PickleValue *pickle_item(const PickleValue *value, size_t i) {
    return value && value->kind == PICKLE_LIST && i < value->count ? value->items[i] : NULL;
}

bool pickle_made_by(const PickleValue *value, const char *name) {
    return value && value->kind == PICKLE_OBJECT && value->made_by->kind == PICKLE_GLOBAL &&
           strcmp(value->made_by->text, name) == 0;
}

const PickleValue *pickle_argument(const PickleValue *value, const char *made_by, size_t i) {
    return pickle_made_by(value, made_by) ? pickle_item(value->arguments, i) : NULL;
}

bool pickle_int(const PickleValue *value, int64_t least, int64_t most, int64_t *out) {
    if (!value || value->kind != PICKLE_INT || value->integer < least || value->integer > most) return false;
    *out = value->integer;
    return true;
}

const char *pickle_text(const PickleValue *value) {
    return value && value->kind == PICKLE_TEXT ? value->text : NULL;
}

int pickle_sizes(const PickleValue *value, int64_t *sizes, int most) {
    const PickleValue *inner = pickle_argument(value, "torch Size", 0);
    const PickleValue *list = inner ? inner : value;
    if (!list || list->kind != PICKLE_LIST || list->count > (size_t)most) return -1;
    for (size_t i = 0; i < list->count; i++) {
        if (!pickle_int(list->items[i], 0, INT64_MAX, &sizes[i])) return -1;
    }
    return (int)list->count;
}
