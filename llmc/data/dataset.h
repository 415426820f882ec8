// From shards to training samples, in Megatron-LM's exact order (its GPTDataset and
// BlendedDataset): splits, epochs with a separate final epoch, the document, sample and shuffle
// index, blends. Host code only. Called by loader.c and its reports.
#pragma once
#include "llmc/base/base.h"
#include "llmc/data/shard.h"
LLMC_BEGIN

enum { SPLIT_TRAIN = 0, SPLIT_VALID = 1, SPLIT_TEST = 2, SPLITS = 3 };
enum { ONE_EPOCH = -1 };  // a number of samples: as many as one pass over the split gives

// Where the index arrays live. Ranks of one node share one copy: the builder rank fills the memory
// that alloc gave, the others read it. A NULL IndexMemory means malloc in this process.
// node_memory.h provides memory shared by the ranks of a node.
typedef struct IndexMemory {
    // Collective over the node. Returns the same zeroed bytes to every rank of the node; NULL on
    // every rank when there are none.
    void *(*alloc)(void *context, size_t bytes, const char *purpose);
    void (*free)(void *context, void *memory);
    bool (*builder)(void *context);  // true on the one rank of the node that fills the memory
    void (*ready)(void *context);    // after filling: every rank of the node sees what the builder wrote
    // Collective over the node: true everywhere when ok everywhere. Else false everywhere, with the
    // lowest failing rank's error.
    bool (*agree)(void *context, bool ok, Error *err);
    void *context;
} IndexMemory;
// *memory, or the malloc of this process when memory is NULL.
IndexMemory index_memory_or_own(const IndexMemory *memory);

// One split of one shard. Memory: 4 bytes per document and epoch, 12 per sample (10^8 samples: 1.2
// GB).
typedef struct GptDataset {
    const Shard *shard;
    int split;
    int seq_length;
    int64_t first_sequence, end_sequence;  // this split's sequences [first, end)
    int64_t tokens_per_epoch;
    int64_t epochs;
    bool separate_final_epoch;
    int64_t samples_before_final;  // with a separate final epoch: samples [0, this) are shuffled on their own
    int64_t documents;             // (end - first) * epochs
    int64_t samples;               // all whole samples of the epochs, at least as many as requested
    int32_t *document_index;       // (documents) sequence ids
    uint64_t *sample_index;        // (samples + 1) position in document_index << 31 | offset in that sequence
    uint32_t *shuffle_index;       // (samples)
    IndexMemory memory;
} GptDataset;

// What gpt_dataset_build is asked for.
typedef struct PartRequest {
    int split;           // SPLIT_*, for messages
    int64_t first, end;  // sequences of the shard
    int64_t samples;     // at least so many, or ONE_EPOCH
    int seq_length;      // each sample reads seq_length + 1 tokens
    uint32_t seed;
} PartRequest;

// Where a token of a sample lies.
typedef struct TokenPlace {
    int64_t position;  // in document_index
    int64_t sequence;  // of the shard
    int64_t offset;    // in that sequence
} TokenPlace;

// "training", "validation" or "test".
const char *split_name(int split);
// Parses --split ("969, 30, 1": any separators) into cumulative bounds 0..1. Error (EXIT_USAGE)
// when no weight is positive, a weight is not a number or there are more than three.
bool split_parse(const char *text, double bounds[SPLITS + 1], Error *err);
// False (and *first = *end = 0) when the split is absent, i.e. has no weight. A present split can
// be empty all the same when the shard has few sequences; gpt_dataset_build refuses it.
bool split_range(const double bounds[SPLITS + 1], int split, int64_t sequences, int64_t *first, int64_t *end);

// Builds the three indices. Collective over the ranks of `memory`; the shard must outlive the
// dataset. Errors: EXIT_DATA when the split holds no sequence or fewer than 2 tokens, or more than
// the index can count (2^31 sequences, 2^33 documents x epochs, 2^32 samples); EXIT_ENVIRONMENT
// when there is no memory.
bool gpt_dataset_build(GptDataset *dataset, const Shard *shard, const PartRequest *request,
                       const IndexMemory *memory, Error *err);
void gpt_dataset_free(GptDataset *dataset);
// Megatron's sample index entry k, 0 <= k <= dataset->samples, in stream (unshuffled) order.
void gpt_dataset_sample_entry(const GptDataset *dataset, int64_t k, int64_t *position, int64_t *offset);
// The seq_length + 1 token ids of sample i, 0 <= i < dataset->samples.
void gpt_dataset_sample(const GptDataset *dataset, int64_t i, int32_t *tokens);
// Where token t, 0 <= t <= seq_length, of sample i comes from.
TokenPlace gpt_dataset_place(const GptDataset *dataset, int64_t i, int64_t t);

// One split over all shards of the run: one shard, or a blend.
typedef struct BlendedDataset {
    int shards;
    GptDataset *parts;      // (shards)
    double *weights;        // (shards) normalized; NULL for a single shard
    int64_t samples;        // length of the blend, or of the single part
    int16_t *blend_shard;   // (samples) NULL for a single shard
    int64_t *blend_sample;  // (samples) NULL for a single shard
    int64_t requested;      // what was asked for; the length where that was ONE_EPOCH
    IndexMemory memory;
} BlendedDataset;

// The shards of one --data-path.
typedef struct DataSource {
    int shards;
    Shard *shard;     // (shards)
    double *weights;  // (shards) as given; NULL where none were given
} DataSource;
// words: Megatron's --data-path: one prefix, or "weight prefix" pairs, or a list of prefixes
// without weights. Errors: EXIT_USAGE for a weight that is not a positive number, EXIT_DATA from
// shard_open.
bool data_source_open(DataSource *source, const char *const *words, int count, Error *err);
void data_source_close(DataSource *source);

// What blended_dataset_build is asked for.
typedef struct SplitRequest {
    int split;             // SPLIT_*
    const double *bounds;  // (SPLITS + 1) from --split; NULL: whole shards (--train-data-path and its kin)
    int64_t samples;       // or ONE_EPOCH, which weights exclude
    int seq_length;
    uint32_t seed;
    double surplus;  // 0: as the paper's fork; above: as megatron-core from 0.11, see below
} SplitRequest;

// A single shard gives `samples` samples, in as many epochs as that takes. Weights w: the paper's
// fork asks each shard for ceil(samples * w * 1.005), and the blend is as long as their sum.
// megatron-core from 0.11 asks for ceil(ceil(samples * w) * (1 + surplus)), and its blend is the
// sum of ceil(samples * w). Which samples a shard draws from depends on what it is asked for, so
// the order may differ. A list without weights is megatron-core's: each shard is read once, the
// weights are their numbers of samples, and the blend has `samples` samples or all there are, if
// those are fewer. The source must outlive the dataset. Collective over the ranks of `memory`.
// Errors: those of gpt_dataset_build; EXIT_USAGE for an absent split, or weights with ONE_EPOCH;
// EXIT_DATA when the first `samples` draws ask a shard for more samples than it has, or a shard of
// a list holds not one.
bool blended_dataset_build(BlendedDataset *dataset, const DataSource *source, const SplitRequest *request,
                           const IndexMemory *memory, Error *err);
void blended_dataset_free(BlendedDataset *dataset);
void blended_dataset_sample(const BlendedDataset *dataset, int64_t i, int32_t *tokens);
// Which shard sample i comes from (0 for a single shard), and which sample of that part it is.
int blended_dataset_shard(const BlendedDataset *dataset, int64_t i, int64_t *part_sample);

// numpy's double sum of a contiguous array (pairwise, eight accumulators): blend weights are
// normalized with it.
double numpy_sum(const double *x, int64_t n);
// Fills the blending tables for `length` draws: draw k takes the shard whose share lags most, and
// that shard's next sample. limits (may be NULL): a shard of which so many are drawn is passed
// over.
void blend_indices(const double *weights, const int64_t *limits, int shards, int64_t length,
                   int16_t *blend_shard, int64_t *blend_sample);

LLMC_END
