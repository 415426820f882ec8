// The weights of a Megatron-LM checkpoint, which are spread over the files of its ranks. Holds the
// list of chunks of every tensor in the parameter table. megatron_dist.c and megatron_legacy.c fill
// the lists, and megatron.c reads the weights.
#pragma once
#include "dev/convert/imported.h"
#include "dev/convert/torch_file.h"
LLMC_BEGIN

// A file of the checkpoint.
typedef struct MegatronFile {
    SafeFile file;
    uint64_t bytes;
} MegatronFile;

// A block of a tensor's rows and columns, or a range of that block's elements in row-major order.
typedef struct MegatronPiece {
    int file;                            // index into the source's files
    SafeEntry entry;                     // row-major elements
    int64_t row, rows, column, columns;  // the block
    int64_t first, count;                // range of the block's elements
    int64_t at;                          // position of element `first` in the entry
} MegatronPiece;

typedef struct MegatronTensor {
    int64_t rows, columns;  // as in Megatron-LM; a vector has one column
    int dims, split;        // 1 or 2 dimensions; the one split by tensor parallelism, -1: none
    bool halves;            // two halves of rows, each split separately: SwiGLU's first matrix
    MegatronPiece *pieces;
    int count;
} MegatronTensor;

typedef enum MegatronKind { MEGATRON_WEIGHT, MEGATRON_MASTER, MEGATRON_KINDS } MegatronKind;

typedef struct MegatronSource {
    const char *folder;  // directory of one iteration
    const GPT *gpt;      // defines the tensors
    MegatronFile **files;
    int file_count;
    MegatronTensor *tensors[MEGATRON_KINDS];  // (gpt->whole_tensors)
    void *narrow;
    int64_t narrow_room;  // elements in `narrow`, the buffer of megatron_source_read
} MegatronSource;

void megatron_source_init(MegatronSource *source, const char *folder, const GPT *gpt);
void megatron_source_free(MegatronSource *source);
// Returns the index of this file of the directory, opening it on first use. -1 with EXIT_CHECKPOINT
// on failure.
int megatron_source_file(MegatronSource *source, const char *name, Error *err);

// Classification of a Megatron-LM tensor name.
typedef enum MegatronMeaning {
    MEGATRON_UNKNOWN,
    MEGATRON_IGNORED,  // not a weight: extra state, a copy of the embedding
    MEGATRON_WHOLE,    // one tensor
    MEGATRON_STACKED   // the same tensor of all layers, with the layers as first dimension
} MegatronMeaning;
// Parses a tensor name. *tensor: index into gpt->whole, for MEGATRON_STACKED the tensor of layer 0.
// first_layer: added to the layer number in the name. Accepts names of megatron-core
// (decoder.layers.0.mlp.linear_fc1.weight, including Transformer Engine's norms) and of the legacy
// GPT (language_model.encoder...).
MegatronMeaning megatron_name(const GPT *gpt, const char *name, int64_t first_layer, int *tensor);

// Adds a chunk. EXIT_CHECKPOINT if it exceeds the tensor; name is for the message.
bool megatron_source_add(MegatronSource *source, MegatronKind kind, int tensor, MegatronPiece piece,
                         const char *name, Error *err);
// Returns true if the chunks of every tensor have as many elements as the tensor; otherwise
// *missing is the first tensor that lacks some.
bool megatron_source_complete(const MegatronSource *source, MegatronKind kind, int *missing);
// Reads elements [lo, hi) of a tensor in row-major order as fp32. Errors (EXIT_CHECKPOINT): an
// unreadable file, an element that no chunk contains.
bool megatron_source_read(MegatronSource *source, MegatronKind kind, int tensor, int64_t lo, int64_t hi,
                          float *out, Error *err);

// Lists the chunks in an iteration's directory (torch_dist | legacy format). Errors:
// EXIT_CHECKPOINT.
bool megatron_dist_list(MegatronSource *source, Error *err);
// Tensor and pipeline parallel sizes, and virtual pipeline chunks per stage.
typedef struct MegatronRanks {
    int64_t tensor, stages, chunks;
} MegatronRanks;
bool megatron_legacy_list(MegatronSource *source, MegatronRanks ranks, Error *err);

LLMC_END
