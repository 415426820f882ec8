// Maps shards to training samples in exactly Megatron-LM's order (its GPTDataset and
// BlendedDataset): splits, epochs with a separate final epoch, document, sample and shuffle
// indices, blends. Host code only. Called by loader.c and its reports.
#pragma once
#include "llmc/data/node_memory.h"
#include "llmc/data/shard.h"
LLMC_BEGIN

enum { SPLIT_TRAIN = 0, SPLIT_VALID = 1, SPLIT_TEST = 2, SPLITS = 3 };
enum { ONE_EPOCH = -1 };           // sample count: one pass over the split
enum { SAMPLE_OFFSET_BITS = 31 };  // a sequence has at most 2^31 - 1 tokens

// One split of one shard. Memory: 4 bytes per document and epoch, 12 bytes per sample (1.2 GB for
// 10^8 samples).
//
// With loss masks, samples are packed conversations instead (packed.c): whole sequences of the
// shard, in shuffled order and not shuffled again, then padding. There is no shuffle_index.
typedef struct GptDataset {
    const Shard *shard;
    const Shard *mask;  // loss masks of the shard; NULL: continuous text
    int split;
    int seq_length;
    int64_t first_sequence, end_sequence;  // sequences [first, end) of this split
    int64_t tokens_per_epoch;
    int64_t epochs;
    bool separate_final_epoch;
    int64_t samples_before_final;  // number of samples before a separate final epoch; shuffled separately
    int64_t documents;             // (end - first) * epochs
    int64_t samples;               // all complete samples of the epochs, at least as many as requested
    int64_t samples_per_epoch;     // with masks: of the first epoch; others differ slightly
    int64_t cut_sequences;         // with masks: longer than a sample, so their ends are not read
    int64_t unanswered_sequences;  // cut before the first token that the loss counts
    int64_t answered_length;       // smallest seq_length without unanswered sequences; 0: there are none
    int32_t *document_index;       // (documents) sequence ids
    uint64_t *sample_index;        // (samples + 1) position in document_index << 31 | offset in that sequence
    uint32_t *shuffle_index;       // (samples)
    NodeMemory *memory;
} GptDataset;

// Arguments of gpt_dataset_build.
typedef struct PartRequest {
    int split;           // SPLIT_*, for error messages
    int64_t first, end;  // range of sequences in the shard
    int64_t samples;     // minimum number of samples, or ONE_EPOCH
    int seq_length;      // each sample has seq_length + 1 tokens
    uint32_t seed;
    const Shard *mask;  // loss masks, or NULL
} PartRequest;

enum { PADDING = -1 };
// Origin of a token of a sample.
typedef struct TokenPlace {
    int64_t position;  // in document_index
    int64_t sequence;  // in the shard; PADDING: none
    int64_t offset;    // within the sequence
} TokenPlace;

// "training", "validation" or "test".
const char *split_name(int split);
// Parses --split ("969, 30, 1", with any separators) into cumulative bounds from 0 to 1. Error
// (EXIT_USAGE): no positive weight, a weight that is not a number, or more than three weights.
bool split_parse(const char *text, double bounds[SPLITS + 1], Error *err);
// Returns false and *first = *end = 0 if the split has no weight. A split with a weight can still
// be empty if the shard has few sequences; gpt_dataset_build refuses it.
bool split_range(const double bounds[SPLITS + 1], int split, int64_t sequences, int64_t *first, int64_t *end);

// Builds the three indices in `memory`. See node_memory.h. The shard must outlive the
// dataset. Errors: EXIT_DATA if the split has no sequence or fewer than 2 tokens, or exceeds the
// index limits (2^31 sequences, 2^33 documents x epochs, 2^32 samples); EXIT_ENVIRONMENT if out of
// memory.
bool gpt_dataset_build(GptDataset *dataset, const Shard *shard, const PartRequest *request,
                       NodeMemory *memory, Error *err);
void gpt_dataset_free(GptDataset *dataset);
// Entry k of Megatron's sample index in stream (unshuffled) order, 0 <= k <= dataset->samples.
void gpt_dataset_sample_entry(const GptDataset *dataset, int64_t k, int64_t *position, int64_t *offset);
// Reads the seq_length + 1 token ids of sample i, 0 <= i < dataset->samples.
void gpt_dataset_sample(const GptDataset *dataset, int64_t i, int32_t *tokens);
// One sample of packed conversations, (seq_length + 1) each.
typedef struct PackedSample {
    int32_t *ids;    // padding: the given id
    int32_t *mask;   // value of the mask shard; 0 for padding and the first token of a conversation
    int32_t *start;  // place of the first token of the same conversation, or of the padding
} PackedSample;
// Reads sample i of a dataset with masks.
void packed_sample(const GptDataset *dataset, int64_t i, int32_t pad, const PackedSample *out);
// Returns the number of conversations in the first samples of a dataset with masks. Sets the number
// of their tokens, without padding, unless tokens is NULL.
int64_t packed_conversations(const GptDataset *dataset, int64_t samples, int64_t *tokens);
// Returns the origin of token t of sample i, 0 <= t <= seq_length.
TokenPlace gpt_dataset_place(const GptDataset *dataset, int64_t i, int64_t t);

// One split over all shards of the run: a single shard or a blend.
typedef struct BlendedDataset {
    int shards;
    GptDataset *parts;      // (shards)
    double *weights;        // (shards) normalized; NULL for a single shard
    int64_t samples;        // length of the blend or of the single shard's dataset
    int16_t *blend_shard;   // (samples) NULL for a single shard
    int64_t *blend_sample;  // (samples) NULL for a single shard
    int64_t requested;      // requested samples; the actual length for ONE_EPOCH
    NodeMemory *memory;
} BlendedDataset;

// The shards of one --data-path.
typedef struct DataSource {
    int shards;
    Shard *shard;     // (shards)
    Shard *mask;      // (shards) their loss masks; NULL: not opened
    double *weights;  // (shards) as given; NULL if none were given
} DataSource;
// Opens the shards of a --data-path, given as in Megatron-LM: one prefix, "weight prefix" pairs, or
// a list of prefixes without weights. Errors: EXIT_USAGE for a weight that is not a positive
// number; EXIT_DATA from shard_open.
bool data_source_open(DataSource *source, const char *const *words, int count, Error *err);
// Opens the loss masks of all shards. Errors (EXIT_DATA): of shard_open, or a mask whose sequences
// do not have the lengths of the shard's. On failure data_source_close frees what was opened.
bool data_source_open_masks(DataSource *source, Error *err);
void data_source_close(DataSource *source);

// Arguments of blended_dataset_build.
typedef struct SplitRequest {
    int split;             // SPLIT_*
    const double *bounds;  // (SPLITS + 1) from --split; NULL: whole shards (--train-data-path etc.)
    int64_t samples;       // or ONE_EPOCH, not allowed with weights
    int seq_length;
    uint32_t seed;
    double surplus;  // 0: as the paper's fork; > 0: as megatron-core 0.11 and later, see below
} SplitRequest;

// Builds one split over all shards of the source. The number of samples requested from each shard
// affects its shuffle order, so it follows Megatron-LM exactly:
// - Single shard: `samples`, in as many epochs as needed.
// - Weights w, surplus = 0 (the paper's fork): each shard gets ceil(samples * w * 1.005); the
//   length of the blend is the sum.
// - Weights w, surplus > 0 (megatron-core 0.11 and later): each shard gets ceil(ceil(samples * w) *
//   (1 + surplus)); the length of the blend is the sum of ceil(samples * w).
// - List without weights (megatron-core): each shard is read once and weighted by its number of
//   samples. The blend has `samples` samples, or all available ones if fewer.
// The source must outlive the dataset. Collective over the ranks of `memory`. Errors: as
// gpt_dataset_build; EXIT_USAGE for a split without weight, or weights with ONE_EPOCH; EXIT_DATA if
// the first `samples` draws exceed a shard's samples, or if a shard of a list has no sample.
bool blended_dataset_build(BlendedDataset *dataset, const DataSource *source, const SplitRequest *request,
                           NodeMemory *memory, Error *err);
void blended_dataset_free(BlendedDataset *dataset);
void blended_dataset_sample(const BlendedDataset *dataset, int64_t i, int32_t *tokens);
// The same for samples of packed conversations.
void blended_dataset_packed(const BlendedDataset *dataset, int64_t i, int32_t pad, const PackedSample *out);
// Returns the shard that sample i comes from (0 for a single shard) and its sample index in that
// shard's dataset.
int blended_dataset_shard(const BlendedDataset *dataset, int64_t i, int64_t *part_sample);

// Sums a contiguous array bit-exactly as numpy does (pairwise, eight accumulators). Blend weights
// are normalized with it.
double numpy_sum(const double *x, int64_t n);
// Fills the blending tables for `length` draws. Each draw takes the next sample of the shard that
// is furthest below its weight. limits (may be NULL): a shard with that many draws is skipped.
void blend_indices(const double *weights, const int64_t *limits, int shards, int64_t length,
                   int16_t *blend_shard, int64_t *blend_sample);

// --- packed.c: datasets with masks. Called by dataset.c and blend.c ------------------------------

// Sets the numbers of epochs (an upper bound), of cut and of unanswered conversations. Errors
// (EXIT_DATA): the index is too small, or all conversations are unanswered.
bool packed_plan(GptDataset *dataset, int64_t requested, Error *err);
// Builds document_index and sample_index and sets the numbers of samples, and of the epochs that
// the requested number needs. Collective. Error: EXIT_ENVIRONMENT if out of memory; the caller
// frees the dataset.
bool packed_build(GptDataset *dataset, int64_t requested, uint32_t seed, Error *err);
// As gpt_dataset_place. sequence PADDING: after the conversations.
TokenPlace packed_place(const GptDataset *dataset, int64_t i, int64_t t);
// Opens the loss masks of a shard. Errors (EXIT_DATA): of shard_open, or if a length differs.
bool masks_open(Shard *mask, const Shard *shard, Error *err);

LLMC_END
