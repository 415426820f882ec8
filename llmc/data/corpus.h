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

// About a megabyte of text: lines of one file, or several files. Reused from block to block; larger
// only where one line or file is.
typedef struct CorpusBlock {
    char *text;
    size_t bytes, capacity;
    const char *path;   // JSON lines: the file that all lines of the block come from
    bool first_of_path; // JSON lines: the block begins at line 1
    CorpusFile *files;  // plain text: (file_count)
    int file_count, file_capacity;
} CorpusBlock;

// paths and, when list_file is not NULL, the lines of list_file; "-" is standard input (JSON lines
// only). Every file is looked up now, so that a missing one is reported before the work begins.
// Errors: EXIT_DATA naming the path. The strings of paths must outlive the corpus.
Corpus *corpus_open(const char *const *paths, int count, const char *list_file, bool plain_text, Error *err);
void corpus_close(Corpus *corpus);
// Bytes of all inputs, -1 when one of them has no known size (a pipe).
int64_t corpus_bytes(const Corpus *corpus);

// Fills the block. Returns false at the end (err->code == 0) or on an error (EXIT_DATA, naming the
// file; compressed files are named as such).
bool corpus_next(Corpus *corpus, CorpusBlock *block, Error *err);
void corpus_block_free(CorpusBlock *block);

LLMC_END
