// Reads the value of "text" from a JSON line.
#include "dev/lib/jsonl.h"
#include "test/fuzz/fuzz.h"

static void try_key(JsonText *json, const char *line, size_t bytes, const char *key) {
    JsonlText found;
    switch (jsonl_find(json, line, bytes, key, &found)) {
        case JSONL_FOUND: {
            PROMISE(found.bytes <= bytes && found.replaced >= 0);
            free(fuzz_copy(found.text, found.bytes));  // reads every byte
            break;
        }
        case JSONL_INVALID: PROMISE(found.column >= 1 && found.column <= bytes + 1 && *found.why); break;
        case JSONL_NO_KEY:
        case JSONL_NOT_STRING: break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    JsonText json = {0};
    char *line = (char *)fuzz_copy(data, size);
    try_key(&json, line, size, "text");
    try_key(&json, line, size, "\xC3\xA9");
    try_key(&json, line, size, "");
    free(line);
    json_text_free(&json);
    return 0;
}
