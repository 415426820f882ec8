// Reads a text corpus (JSON lines or plain text files) in order, in blocks of whole lines or whole
// files, using constant memory. Called by the reader thread of preprocess_data.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Corpus Corpus;

// A plain text file within a block.
typedef struct CorpusFile {
    const char *path;  // owned by the corpus
    size_t offset, bytes;
} CorpusFile;

// About 1 MB of text: lines from one file, or several plain text files. Grows only for a larger
// line or file. Reused for every block.
typedef struct CorpusBlock {
    char *text;
    size_t bytes, capacity;
    const char *path;    // JSON lines: the source file of all lines
    bool first_of_path;  // JSON lines: the block starts at line 1
    CorpusFile *files;   // plain text files, (file_count)
    int file_count, file_capacity;
} CorpusBlock;

// Opens a corpus made of `paths` and the paths listed in list_file (may be NULL). "-" is standard
// input, for JSON lines only. Checks that every file exists, so that a missing one is reported
// before any work starts. Does not copy the strings in paths. Errors: EXIT_DATA with the path.
Corpus *corpus_open(const char *const *paths, int count, const char *list_file, bool plain_text, Error *err);
void corpus_close(Corpus *corpus);
// Total bytes of all inputs; -1 if the size of one is unknown (a pipe).
int64_t corpus_bytes(const Corpus *corpus);

// Reads the next block. Returns false at the end (err->code == 0) or on an error: EXIT_DATA with
// the file name, for instance if the file is compressed or has another format.
bool corpus_next(Corpus *corpus, CorpusBlock *block, Error *err);
void corpus_block_free(CorpusBlock *block);

LLMC_END
