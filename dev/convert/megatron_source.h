// The weights of a Megatron-LM checkpoint, wherever its ranks have left them: for each tensor of
// our table the pieces of it that lie in files. megatron_dist.c and megatron_legacy.c list the
// pieces, megatron.c reads through them.
#pragma once
#include "dev/convert/imported.h"
#include "dev/convert/torch_file.h"
LLMC_BEGIN

// A file of the checkpoint.
typedef struct MegatronFile {
    SafeFile file;
    uint64_t bytes;
} MegatronFile;

// A block of a tensor's rows and columns, or a run of such a block's elements, row by row.
typedef struct MegatronPiece {
    int file;                            // place in the source's list
    SafeEntry entry;                     // elements row by row
    int64_t row, rows, column, columns;  // the block
    int64_t first, count;                // elements of the block that the piece has
    int64_t at;                          // of the entry: the first of them
} MegatronPiece;

typedef struct MegatronTensor {
    int64_t rows, columns;  // as Megatron-LM has it; a vector has one column
    int dims, split;        // 1 or 2; which dimension tensor parallelism cuts, -1: none
    bool halves;            // of rows, each of which is cut: SwiGLU's first matrix
    MegatronPiece *pieces;
    int count, room;
} MegatronTensor;

typedef enum MegatronKind { MEGATRON_WEIGHT, MEGATRON_MASTER, MEGATRON_KINDS } MegatronKind;

typedef struct MegatronSource {
    const char *folder;  // of one iteration
    const GPT *gpt;      // whose table is wanted
    MegatronFile **files;
    int file_count, file_room;
    MegatronTensor *tensors[MEGATRON_KINDS];  // (gpt->whole_tensors)
    void *narrow;
    int64_t narrow_room;  // buffer of megatron_source_read
} MegatronSource;

void megatron_source_init(MegatronSource *source, const char *folder, const GPT *gpt);
void megatron_source_free(MegatronSource *source);
// The file of this name in the folder, opened when it is asked for first: its place. -1 with
// EXIT_CHECKPOINT.
int megatron_source_file(MegatronSource *source, const char *name, Error *err);

// What a name of Megatron-LM's means here.
typedef enum MegatronMeaning {
    MEGATRON_UNKNOWN,
    MEGATRON_NOTHING,  // no weight: extra state, a copy of the embedding
    MEGATRON_WHOLE,    // one tensor
    MEGATRON_STACKED   // the same tensor of all layers, with the layers as first dimension
} MegatronMeaning;
// *tensor: place in gpt->whole; of MEGATRON_STACKED that of layer 0. first_layer: what the name's
// layer 0 is. Names of megatron-core (decoder.layers.0.mlp.linear_fc1.weight, also with
// Transformer Engine's norms) and of Megatron-LM's older GPT (language_model.encoder...).
MegatronMeaning megatron_name(const GPT *gpt, const char *name, int64_t first_layer, int *tensor);
// The place of layer `layer`'s tensor, where that of layer 0 is `tensor`.
int megatron_of_layer(const GPT *gpt, int tensor, int64_t layer);

// Adds a piece that lies within the tensor: else EXIT_CHECKPOINT, name is for the message.
bool megatron_source_add(MegatronSource *source, MegatronKind kind, int tensor, MegatronPiece piece,
                         const char *name, Error *err);
// Whether the pieces of all tensors have as many elements as these.
bool megatron_source_complete(const MegatronSource *source, MegatronKind kind, int *missing);
// Elements [lo, hi) of a tensor, row by row, as fp32. Errors (EXIT_CHECKPOINT): a file that cannot
// be read, an element that is in no piece.
bool megatron_source_read(MegatronSource *source, MegatronKind kind, int tensor, int64_t lo, int64_t hi,
                          float *out, Error *err);

// List the pieces of an iteration's folder. Errors: EXIT_CHECKPOINT.
bool megatron_dist_list(MegatronSource *source, Error *err);
// tensor, stages: parallel sizes. chunks: of a stage's layers (virtual pipeline stages).
typedef struct MegatronRanks {
    int64_t tensor, stages, chunks;
} MegatronRanks;
bool megatron_legacy_list(MegatronSource *source, MegatronRanks ranks, Error *err);

LLMC_END
