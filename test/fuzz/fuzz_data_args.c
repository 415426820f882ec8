// Files that list token shards: --data-args-path (words) and --per-split-data-args-path (JSON).
#include "llmc/data/data_args.h"
#include "test/fuzz/fuzz.h"

static void check_words(const DataWords *words) {
    for (int i = 0; i < words->count; i++) {
        PROMISE(*words->items[i] && !strpbrk(words->items[i], " \t\r\n\v\f"));
        PROMISE(words->items[i] >= words->text);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *path = fuzz_file("list", data, size);
    DataWords words = {0}, splits[SPLITS];
    Error err = {0};
    if (data_args_read(&words, path, &err)) {
        PROMISE(words.count > 0);
        check_words(&words);
        data_words_free(&words);
    } else {
        PROMISE(err.code == EXIT_USAGE);
        fuzz_check_error(&err);
    }
    if (data_args_read_splits(splits, path, &err)) {
        for (int s = 0; s < SPLITS; s++) {
            check_words(&splits[s]);
            data_words_free(&splits[s]);
        }
    } else {
        PROMISE(err.code == EXIT_USAGE);
        fuzz_check_error(&err);
    }
    return 0;
}
