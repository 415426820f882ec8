// Private state of the loader, shared by loader.c (batches), loader_report.c (summary,
// --inspect-data) and check.c (--check-data).
#pragma once
#include "llmc/data/loader_options.h"
#include "llmc/data/node_memory.h"
LLMC_BEGIN

enum { MOCK_SAMPLES = 32767 };  // length of Megatron's mock dataset; the samples repeat after it

typedef struct Loader Loader;
struct Loader {
    LoaderOptions options;        // without paths and split text
    NodeMemory *memory;           // holds the indices
    DataSource source[SPLITS];    // one per split; only the first with --data-path
    BlendedDataset data[SPLITS];  // empty for absent splits and mock data
    bool has[SPLITS];
    int eod;
    double open_seconds;
    int32_t *ids;           // (T + 1) scratch of loader_batch
    int32_t *mask, *start;  // (T + 1) with sft: see PackedSample
    Batch batch;
};

// Opens the shards of --data-path into source[0], or the shards of each split into its own entry.
// source must be zeroed, and the caller closes it even on failure. Errors: as data_source_open.
bool loader_open_sources(DataSource source[SPLITS], const LoaderOptions *options, Error *err);
// Reads the T + 1 ids of one sample, and with sft l->mask and l->start, and checks their range.
// Errors as loader_batch.
bool loader_sample(const Loader *l, int split, int64_t sample, int32_t *ids, Error *err);
// Sets the error (EXIT_DATA) for an id outside the vocabulary; offset is its position in the
// sequence. Always returns false.
bool loader_bad_id(const Shard *shard, int64_t sequence, int64_t offset, int32_t id, int vocab_size,
                   Error *err);

LLMC_END
