// The parameter table: one row per tensor, with this rank's part of it. llmc/model/gpt.c fills the
// table, zero_plan arranges its rows in buckets, and checkpoints look up rows by name.
#pragma once
#include "llmc/base/base.h"
#include "sdp4bit/layout.h"
LLMC_BEGIN

// One parameter. A vector has 1 as its second size.
typedef struct Tensor {
    char name[96];     // as in Megatron-LM: "encoder.layers.3.mlp.dense_h_to_4h.weight"
    int dims;          // 1 or 2
    int64_t whole[2];  // shape over all tensor-parallel ranks
    int64_t local[2];  // shape of this rank's part
    int split;         // dimension split by tensor parallelism; -1: every rank holds the whole tensor
    int64_t offset;    // first index of this rank's part along `split`; 0 if it holds the whole tensor
    int number;        // row in the whole model's table; keys the random initial weights
    int64_t logical;   // position of the whole tensor's first element; keys the rounding bits (layout.h)
    int unit;          // 0: embeddings; l + 1: layer l. The final LayerNorm belongs to the last layer
    int chunk;         // model chunk of the pipeline stage that uses it; ANY_CHUNK: more than one
    double std;        // initial N(0, std); 0: zeros; -1: ones
    bool counted;      // this rank counts the elements in norms and in the number of parameters. True on
                       // one of the ranks that hold the same elements
} Tensor;

// Chunk of the embeddings, which forward and backward use at both ends.
enum { ANY_CHUNK = -1 };

// Kinds of state per parameter element, in memory and in checkpoints. WEIGHT is the bf16 model
// weight. With quantized weight differences it is independent state, not the rounded master weight.
// For kinds per node, every node has its own values of the same elements; nodes are numbered as in
// the mesh's rail.
typedef enum SliceKind {
    SLICE_MASTER,
    SLICE_EXP_AVG,
    SLICE_EXP_AVG_SQ,
    SLICE_WEIGHT,
    SLICE_RESIDUAL,      // per node, matrices only: quantization error that error feedback carries over
    SLICE_LOCAL_MASTER,  // per node: --local-steps, the node's own state between outer steps
    SLICE_LOCAL_EXP_AVG,
    SLICE_LOCAL_EXP_AVG_SQ,
    SLICE_LOCAL_WEIGHT,    // its model weights
    SLICE_OUTER_MOMENTUM,  // the outer optimizer's momentum
    SLICE_KINDS,
    FIRST_KINDS = SLICE_RESIDUAL  // every run has the kinds before it
} SliceKind;
const char *slice_kind_name(SliceKind kind);  // "master", "exp_avg", ...: in files
int slice_kind_bytes(SliceKind kind);         // per element: 4, or sizeof(floatX) of weights
bool slice_kind_per_node(SliceKind kind);
// Returns true if its elements are floatX.
bool slice_kind_of_weights(SliceKind kind);
// Returns true if a tensor of `dims` dimensions has this kind of state.
bool slice_kind_holds(SliceKind kind, int dims);

// Returns a row for a whole tensor: 1-D if columns is 0, else 2-D.
Tensor tensor_row(const char *name, int64_t rows, int64_t columns, int split, int unit, double std);
// Returns the row of tensor-parallel rank `rank` of `ranks` for a whole tensor. `ranks` must divide
// the split dimension. Rank 0 counts the elements of rows that are not split.
Tensor tensor_part(const Tensor *whole, int rank, int ranks);
// Sets `number` and `logical` in the rows of a whole model, in order. ranks: the tensor-parallel
// size. Each part starts at a multiple of 32.
void tensors_number(Tensor *tensors, int count, int ranks);
// Elements of this rank's part, and of the whole tensor.
int64_t tensor_elements(const Tensor *tensor);
int64_t tensor_whole_elements(const Tensor *tensor);
// Converts the rows for sdp4bit/layout.h: (count), to be freed with free().
LayoutTensor *tensors_for_plan(const Tensor *tensors, int count);

LLMC_END
