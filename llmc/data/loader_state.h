// Inside of the loader, shared by loader.c (batches), loader_report.c (summary,
// --inspect-data) and check.c (--check-data) only.
#pragma once
#include "llmc/data/loader_options.h"
#include "llmc/data/node_memory.h"
LLMC_BEGIN

enum { MOCK_SAMPLES = 32767 };  // length of Megatron's mock dataset; ours begins again after it

typedef struct Loader Loader;
struct Loader {
    LoaderOptions options;        // without the paths and the split text
    NodeMemory *memory;           // where the indices live
    DataSource source[SPLITS];    // one per split; with --data-path only the first
    BlendedDataset data[SPLITS];  // empty without the split and for mock data
    bool has[SPLITS];
    int eod;
    double open_seconds;
    int32_t *ids;  // (T + 1) scratch of loader_batch
    Batch batch;
};

// Opens the shards of --data-path into source[0], or those of each split into its own. source:
// zeroed, to be closed whatever the result. Errors: those of data_source_open.
bool loader_open_sources(DataSource source[SPLITS], const LoaderOptions *options, Error *err);
// The T + 1 checked ids of one sample. Errors as loader_batch.
bool loader_sample(const Loader *l, int split, int64_t sample, int32_t *ids, Error *err);
// Fills the error (EXIT_DATA) for an id outside the vocabulary: offset is its position in the
// sequence. Returns false.
bool loader_bad_id(const Shard *shard, int64_t sequence, int64_t offset, int32_t id, int vocab_size,
                   Error *err);

LLMC_END
