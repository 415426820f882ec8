// Writes token shards in Megatron's format (llmc/data/shard.h). Called by preprocess_data,
// merge_datasets and the tests. Memory: 4 bytes per sequence and 8 bytes per document.
#pragma once
#include "llmc/data/shard.h"
LLMC_BEGIN

typedef struct ShardWriter ShardWriter;
// Opens <prefix>.bin.tmp and .idx.tmp. shard_writer_close writes the index and renames both, so
// that an interrupted run leaves no incomplete shard under the final name. Errors: EXIT_ENVIRONMENT
// if the files cannot be created, EXIT_USAGE for an invalid dtype.
ShardWriter *shard_writer_open(const char *prefix, int dtype, Error *err);
// Appends one sequence; count may be 0. Errors: EXIT_DATA for an id that the dtype cannot hold,
// EXIT_ENVIRONMENT if the disk is full.
bool shard_writer_add_sequence(ShardWriter *writer, const int32_t *tokens, int64_t count, Error *err);
// Ends a document. Calling it twice in a row records an empty document, as Megatron's writer does
// for an empty text. Sequences after the last end form a document of their own when the shard is
// closed or another one is appended.
void shard_writer_end_document(ShardWriter *writer);
// Appends a whole shard of the same dtype. Its document boundaries are shifted by the sequences
// written so far; its leading 0 is dropped.
bool shard_writer_append(ShardWriter *writer, const Shard *shard, Error *err);
// Writes the index, syncs and renames. Always frees the writer; removes the temporary files on
// failure.
bool shard_writer_close(ShardWriter *writer, Error *err);
// Removes the temporary files and frees the writer.
void shard_writer_discard(ShardWriter *writer);

LLMC_END
