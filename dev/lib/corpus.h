// Reads a text corpus (JSON lines or plain text files) in order, in blocks of complete lines or
// files. Needs constant memory. Called by the reader thread of preprocess_data.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Corpus Corpus;

// A plain text file within a block.
typedef struct CorpusFile {
    const char *path;  // owned by the corpus
    size_t offset, bytes;
} CorpusFile;

// About 1 MB of text: lines of one file, or several plain text files. A longer line or file makes
// the buffer grow. The caller reuses the object for all blocks.
typedef struct CorpusBlock {
    char *text;
    size_t bytes, capacity;
    const char *path;    // JSON lines: the source file of all lines
    bool first_of_path;  // JSON lines: the block starts at line 1
    CorpusFile *files;   // plain text files, (file_count)
    int file_count, file_capacity;
} CorpusBlock;

// Opens a corpus of the files `paths` and those listed in list_file (may be NULL). "-" is standard
// input, for JSON lines only. Checks that all files exist, so that a missing file is reported
// before any work starts. Does not copy the strings in paths. Error: EXIT_DATA.
Corpus *corpus_open(const char *const *paths, int count, const char *list_file, bool plain_text, Error *err);
void corpus_close(Corpus *corpus);
// Returns the total size of all inputs in bytes; -1 if one is a pipe, whose size is unknown.
int64_t corpus_bytes(const Corpus *corpus);

// Reads the next block. Returns false at the end of the corpus (err->code is 0) or on an error
// (EXIT_DATA), for example if a file is compressed.
bool corpus_next(Corpus *corpus, CorpusBlock *block, Error *err);
void corpus_block_free(CorpusBlock *block);

LLMC_END
