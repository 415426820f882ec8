// Input of preprocess_data, which is read as JSON lines, as plain text, and as a list of files.
#include "dev/lib/corpus.h"
#include "test/fuzz/fuzz.h"

static void read_all(const char *path, bool plain_text, const uint8_t *data, size_t size) {
    Error err = {0};
    CorpusBlock block = {0};
    Corpus *corpus = corpus_open(&path, 1, NULL, plain_text, &err);
    PROMISE(corpus && corpus_bytes(corpus) == (int64_t)size);
    size_t read = 0;
    while (corpus_next(corpus, &block, &err)) {
        PROMISE(read + block.bytes <= size &&
                (block.bytes == 0 || !memcmp(block.text, data + read, block.bytes)));
        PROMISE(!plain_text || (block.file_count == 1 && block.files[0].bytes == size));
        read += block.bytes;
    }
    if (err.code) fuzz_check_error(&err);
    else PROMISE(read == size);
    corpus_block_free(&block);
    corpus_close(corpus);
}

// Only checks that the listed files exist.
static void read_list(const char *path) {
    Error err = {0};
    Corpus *corpus = corpus_open(NULL, 0, path, false, &err);
    if (!corpus) fuzz_check_error(&err);
    corpus_close(corpus);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *path = fuzz_file("corpus", data, size);
    read_all(path, false, data, size);
    read_all(path, true, data, size);
    read_list(path);
    return 0;
}
