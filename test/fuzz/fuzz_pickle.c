// A pickle, which is read without executing code. Accepted values are traversed to a bounded depth,
// as in the checkpoint readers.
#include "dev/convert/pickle.h"
#include "test/fuzz/fuzz.h"

enum { DEPTH = 6, MOST_SEEN = 20000 };

static void look(const PickleValue *value, int depth, int *seen) {
    int64_t sizes[8], number;
    if (!value || depth > DEPTH || ++*seen > MOST_SEEN) return;
    PROMISE(value->kind >= PICKLE_NONE && value->kind <= PICKLE_OTHER);
    if (value->kind == PICKLE_TEXT || value->kind == PICKLE_GLOBAL) PROMISE(strlen(value->text) < 1 << 20);
    if (value->kind == PICKLE_OBJECT) PROMISE(value->made_by && value->arguments);
    if (value->kind == PICKLE_DICT) PROMISE(value->count % 2 == 0);
    pickle_member(value, "size");
    pickle_argument(value, "torch Size", 0);
    PROMISE(pickle_sizes(value, sizes, 8) <= 8);
    if (pickle_int(value, 0, 9, &number)) PROMISE(number >= 0 && number <= 9);
    for (size_t i = 0; i < value->count; i++) look(value->items[i], depth + 1, seen);
    look(value->made_by, depth + 1, seen);
    look(value->arguments, depth + 1, seen);
    look(value->state, depth + 1, seen);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Pickle pickle;
    int seen = 0;
    void *copy = fuzz_copy(data, size);
    const char *fault = pickle_read(&pickle, copy, size);
    free(copy);
    if (fault) {
        PROMISE(*fault);
        return 0;
    }
    look(pickle.root, 0, &seen);
    pickle_free(&pickle);
    return 0;
}
