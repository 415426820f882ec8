// The parameter table: one row per tensor, describing the whole tensor and this rank's part of it.
// llmc/model/gpt.c fills it, zero_plan assigns tensors to buckets, checkpoints look up names.
#pragma once
#include "llmc/base/base.h"
#include "sdp4bit/layout.h"
LLMC_BEGIN

// How Muon orthogonalizes a matrix. Its rows consist of `groups` equal groups, each with part[0] +
// part[1] + part[2] rows: queries, keys and values, or a single part. The rows of a part in all
// groups form one matrix.
enum { MUON_PARTS = 3 };
typedef struct MuonShape {
    int64_t columns;  // 0: AdamW updates the tensor
    int64_t groups, part[MUON_PARTS];
    int row_ranks, column_ranks;  // number of tensor-parallel ranks that share the rows or columns of
                                  // the whole matrix; 0: one
    bool duplicated;              // these ranks orthogonalize the whole matrix, not their parts of it
} MuonShape;

// A parameter tensor. The second dimension of a vector is 1.
typedef struct Tensor {
    char name[96];     // as in Megatron-LM: "encoder.layers.3.mlp.dense_h_to_4h.weight"
    int dims;          // 1 or 2
    int64_t whole[2];  // shape over all tensor-parallel ranks
    int64_t local[2];  // shape of this rank's part
    int split;         // dimension split by tensor parallelism; -1: every rank holds the whole tensor
    int64_t offset;    // first index of this rank's part along `split`; 0 if it holds the whole tensor
    int number;        // row in the table of the whole model; seeds the random initial weights
    int64_t logical;   // logical offset of the whole tensor's first element, for rounding bits (layout.h)
    int unit;          // 0: embeddings; l + 1: layer l. The final LayerNorm belongs to the last layer
    int chunk;         // model chunk of the pipeline stage that uses it; ANY_CHUNK: more than one
    MuonShape muon;    // of this rank's part
    double std;        // initial N(0, std); 0: zeros; -1: ones
    double bound;      // > 0: initial U(-bound, bound) instead
    bool counted;      // the elements count in this rank's norms and number of parameters. True on exactly
                       // one of the ranks that hold the same elements
} Tensor;

// Chunk of the embeddings, which are used at both ends of the model.
enum { ANY_CHUNK = -1 };

// Kinds of state per parameter element, in memory and in checkpoints. SLICE_WEIGHT is the bf16
// model weight; with quantized weight differences it is state that cannot be computed from the
// master weights. Kinds marked "per node" differ between nodes; nodes are ordered as in mesh->rail.
typedef enum SliceKind {
    SLICE_MASTER,
    SLICE_EXP_AVG,
    SLICE_EXP_AVG_SQ,
    SLICE_WEIGHT,
    SLICE_RESIDUAL,      // per node, only matrices: residual of error feedback of gradients
    SLICE_LOCAL_MASTER,  // per node, like the next three: state of a replica group (--local-steps)
    SLICE_LOCAL_EXP_AVG,
    SLICE_LOCAL_EXP_AVG_SQ,
    SLICE_LOCAL_WEIGHT,
    SLICE_OUTER_MOMENTUM,  // momentum of the outer optimizer
    SLICE_LOCAL_RESIDUAL,  // per node: residual of error feedback with local steps
    SLICE_KINDS,
    FIRST_KINDS = SLICE_RESIDUAL  // every run has all kinds before this one
} SliceKind;
const char *slice_kind_name(SliceKind kind);  // "master", "exp_avg", ...: name in checkpoints
int slice_kind_bytes(SliceKind kind);         // bytes per element
bool slice_kind_per_node(SliceKind kind);
// Returns true if the elements are floatX.
bool slice_kind_of_weights(SliceKind kind);
// Returns true if a tensor of `dims` dimensions has this kind of state.
bool slice_kind_holds(SliceKind kind, int dims);
// Returns true for second moments, which matrices updated by Muon do not have.
bool slice_kind_of_squares(SliceKind kind);

// Returns a row for a whole tensor: 1-D if columns is 0, else 2-D.
Tensor tensor_row(const char *name, int64_t rows, int64_t columns, int split, int unit, double std);
// Returns the row of a whole tensor for tensor-parallel rank `rank` of `ranks`. `ranks` must divide
// the split dimension. Rank 0 counts the elements of tensors that are not split.
Tensor tensor_part(const Tensor *whole, int rank, int ranks);
// Sets `number` and `logical` of all rows of a whole model. ranks: the tensor-parallel size. The
// logical offset of each part is a multiple of 32.
void tensors_number(Tensor *tensors, int count, int ranks);
// Return the number of elements of this rank's part, and of the whole tensor.
int64_t tensor_elements(const Tensor *tensor);
int64_t tensor_whole_elements(const Tensor *tensor);
// Returns true if a tensor of this run has this kind of state.
bool tensor_holds(const Tensor *tensor, SliceKind kind);
// Returns the shape that a rank orthogonalizes: the part, or if duplicated the whole matrix.
MuonShape muon_orthogonalized(const MuonShape *shape);
// Returns the input of layout_build: (count) rows, to be freed by the caller.
LayoutTensor *tensors_for_plan(const Tensor *tensors, int count);

LLMC_END
