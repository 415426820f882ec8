// Writes token shards in Megatron-LM's format (llmc/data/shard.h). Needs 4 bytes of memory per
// sequence and 8 bytes per document. Called by preprocess_data, merge_datasets and tests.
#pragma once
#include "llmc/data/shard.h"
LLMC_BEGIN

typedef struct ShardWriter ShardWriter;
// Opens <prefix>.bin.tmp and <prefix>.idx.tmp. shard_writer_close renames both, so that an
// interrupted run leaves no incomplete shard under the final name. Errors: EXIT_ENVIRONMENT if the
// files cannot be created, EXIT_USAGE for an invalid dtype.
ShardWriter *shard_writer_open(const char *prefix, int dtype, Error *err);
// Appends one sequence; count may be 0. Errors: EXIT_DATA for an id that the dtype cannot hold,
// EXIT_ENVIRONMENT if the disk is full.
bool shard_writer_add_sequence(ShardWriter *writer, const int32_t *tokens, int64_t count, Error *err);
// Ends a document. Two calls in a row record an empty document, as Megatron-LM's writer does for an
// empty text. shard_writer_close and shard_writer_append end the current document too, if it has
// sequences.
void shard_writer_end_document(ShardWriter *writer);
// Appends all documents of a shard with the same dtype.
bool shard_writer_append(ShardWriter *writer, const Shard *shard, Error *err);
// Writes the index, syncs and renames the files. Always frees the writer. On failure removes the
// temporary files.
bool shard_writer_close(ShardWriter *writer, Error *err);
// Removes the temporary files and frees the writer.
void shard_writer_discard(ShardWriter *writer);

LLMC_END
