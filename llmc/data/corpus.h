// Reads a corpus (JSON lines, or plain text files) in blocks of whole lines or whole files, in
// order, in constant memory. Called by preprocess_data's reader thread.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Corpus Corpus;

// A plain text file inside a block.
typedef struct CorpusFile {
    const char *path;  // owned by the corpus
    size_t offset, bytes;
} CorpusFile;

// About a megabyte of text: lines of one file, or several files. Larger only where one line or file
// is larger. Reused from block to block.
typedef struct CorpusBlock {
    char *text;
    size_t bytes, capacity;
    const char *path;    // JSON lines: the file that all lines of the block come from
    bool first_of_path;  // JSON lines: the block begins at line 1
    CorpusFile *files;   // plain text: (file_count)
    int file_count, file_capacity;
} CorpusBlock;

// Inputs: paths, and the lines of list_file (NULL: none). "-" is standard input, for JSON lines
// only. Every file is looked up now, so that a missing one is reported before the work begins. The
// strings of paths must outlive the corpus. Errors: EXIT_DATA with the path.
Corpus *corpus_open(const char *const *paths, int count, const char *list_file, bool plain_text, Error *err);
void corpus_close(Corpus *corpus);
// Bytes of all inputs, -1 when one of them has no known size (a pipe).
int64_t corpus_bytes(const Corpus *corpus);

// Fills the block. False at the end (err->code == 0) or on an error: EXIT_DATA with the file, which
// may be compressed or of another format.
bool corpus_next(Corpus *corpus, CorpusBlock *block, Error *err);
void corpus_block_free(CorpusBlock *block);

LLMC_END
