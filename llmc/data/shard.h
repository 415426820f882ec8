// Megatron's token shards: <prefix>.idx (lengths, pointers, document boundaries) and <prefix>.bin
// (token ids, little-endian), as its IndexedDataset writes them. Written by preprocess_data and
// merge_datasets, read by dataset.c, check.c and loader.c.
#pragma once
#include <stdio.h>

#include "llmc/base/base.h"
LLMC_BEGIN

// dtype codes of the .idx header that hold token ids.
enum { SHARD_U8 = 1, SHARD_I8 = 2, SHARD_I16 = 3, SHARD_I32 = 4, SHARD_I64 = 5, SHARD_U16 = 8 };

// Bytes per token of a dtype code, 0 for a code that cannot hold token ids.
int shard_dtype_size(int dtype);
// The code Megatron's writer picks: u16 below 65500 ids, else i32.
int shard_dtype_for_vocab(int64_t vocab_size);

typedef struct Shard {
    char *prefix;          // without .bin/.idx, for messages
    int dtype;             // SHARD_*
    int64_t sequences;     // N
    int64_t documents;     // entries in the document-boundary array, minus 1
    int64_t tokens;        // sum of the sequence lengths
    const uint8_t *index;  // mapped .idx file, index_bytes long
    const uint8_t *data;   // mapped .bin file, data_bytes long
    size_t index_bytes, data_bytes;
    uint8_t last[8];  // of the .bin's bytes, as they were when it was opened; fewer when it is shorter
} Shard;

// Maps both files read-only and checks them in one pass: magic, version, dtype; that the .idx has
// exactly its size (a trailing N-byte mode array is tolerated); lengths >= 0, every pointer the sum
// of the lengths before it; that the .bin has exactly its size; boundaries from 0 to N, none below
// the one before it. Errors (EXIT_DATA) name the file, what is wrong and where. A file that is cut
// short while it is open ends the job (mapped.h).
bool shard_open(Shard *shard, const char *prefix, Error *err);
void shard_close(Shard *shard);
// First sequence of a document, 0 <= document <= shard->documents; the last one gives the number of
// sequences.
int64_t shard_boundary(const Shard *shard, int64_t document);
// Number of tokens of sequence i, and its first token's position in the .bin, in tokens.
int64_t shard_length(const Shard *shard, int64_t sequence);
int64_t shard_position(const Shard *shard, int64_t sequence);
// Ends the job (mapped.h) when one of the two files is no longer what was opened. Called after
// reads that must not go unnoticed. Of a file that is cut short whole pages vanish, which is a
// SIGBUS, but the rest of its last page reads as zeros. So this looks at the ends of both files, in
// memory.
void shard_check_whole(const Shard *shard);
// A number that copies of one shard have in common and, most likely, no other shard has: of its
// sizes, and of the first and last 64 KiB of both files.
uint64_t shard_fingerprint(const Shard *shard);
// Asks for the cache line of that length: for those who read lengths in random order.
void shard_prefetch_length(const Shard *shard, int64_t sequence);
// Copies count tokens from token position `position` of the .bin to out, widened to int32. Ids
// above INT32_MAX become -1, which the loader's range check then names.
void shard_read(const Shard *shard, int64_t position, int64_t count, int32_t *out);

// Writer. Memory: one 4-byte length per sequence and one 8-byte boundary per document.
typedef struct ShardWriter ShardWriter;
// Opens <prefix>.bin.tmp and .idx.tmp. shard_writer_close writes the index and renames both, so
// that a run that is torn leaves no half shard under the final name. Errors: EXIT_ENVIRONMENT for
// files that cannot be created, EXIT_USAGE for a dtype that is none.
ShardWriter *shard_writer_open(const char *prefix, int dtype, Error *err);
// Adds one sequence; count 0 is legal. Errors: EXIT_DATA for an id that the dtype cannot hold,
// EXIT_ENVIRONMENT for a full disk.
bool shard_writer_add_sequence(ShardWriter *writer, const int32_t *tokens, int64_t count, Error *err);
// Ends a document. Twice in a row records an empty document, as Megatron's writer does for an empty
// text. Sequences left open when the shard is closed or appended to become a document of their own.
void shard_writer_end_document(ShardWriter *writer);
// Appends a whole shard of the same dtype: its boundaries are shifted by the sequences so far, its
// first 0 is dropped.
bool shard_writer_append(ShardWriter *writer, const Shard *shard, Error *err);
// Writes the index, syncs, renames. Frees the writer whatever the result; on failure the temporary
// files are removed.
bool shard_writer_close(ShardWriter *writer, Error *err);
// Removes the temporary files and frees the writer.
void shard_writer_discard(ShardWriter *writer);

LLMC_END
