// The parameters of the model as this rank holds them, one row each, and which part of the whole
// that is. llmc/model/gpt.c fills the table. ZeRO lays its rows out in buckets, checkpoints find
// them by name.
#pragma once
#include "llmc/base/base.h"
#include "sdp4bit/layout.h"
LLMC_BEGIN

// One parameter. A vector has 1 as its second size.
typedef struct Tensor {
    char name[96];     // Megatron-LM's: "encoder.layers.3.mlp.dense_h_to_4h.weight"
    int dims;          // 1 or 2
    int64_t whole[2];  // shape over all tensor-parallel ranks
    int64_t local[2];  // shape of this rank's part
    int split;         // the dimension that tensor parallelism cuts; -1: every rank holds the whole
    int64_t offset;    // of this rank's part along `split`; 0 where it holds the whole
    int number;        // in the whole model's table: it keys the first weights
    int64_t logical;   // of the whole's first element: it keys the rounding bits (sdp4bit/layout.h)
    int unit;          // 0 the embeddings, l + 1 layer l; the final LayerNorm shares the last layer's
    int chunk;         // of the stage's layers: where a pass works with it; ANY_CHUNK: in more than one place
    double std;        // initial N(0, std); 0: zeros; -1: ones
    bool counted;      // by this rank, in the norm and in the number of parameters: one of those that
                       // hold the same elements counts them
} Tensor;

// The embeddings': a pass begins and ends with them.
enum { ANY_CHUNK = -1 };

// What a rank keeps of a parameter's elements, and what a slice of a checkpoint holds. WEIGHT is
// the replica: under quantized differences it is state of its own, and not the rounded master.
//
// Some kinds belong to a node: every node has values of its own for the same elements. Nodes are
// counted as Mesh's rail counts them.
typedef enum SliceKind {
    SLICE_MASTER,
    SLICE_EXP_AVG,
    SLICE_EXP_AVG_SQ,
    SLICE_WEIGHT,
    SLICE_RESIDUAL,      // per node, of matrices: what error feedback carries to the next message
    SLICE_LOCAL_MASTER,  // per node: what a node trains on between two exchanges of local steps
    SLICE_LOCAL_EXP_AVG,
    SLICE_LOCAL_EXP_AVG_SQ,
    SLICE_LOCAL_WEIGHT,    // its replica
    SLICE_OUTER_MOMENTUM,  // of the outer step of local steps
    SLICE_KINDS,
    FIRST_KINDS = SLICE_RESIDUAL  // those above it: every run has them, and every program knows them
} SliceKind;
const char *slice_kind_name(SliceKind kind);  // "master", "exp_avg", ...: in files
int slice_kind_bytes(SliceKind kind);         // per element: 4, or sizeof(floatX) of weights
bool slice_kind_per_node(SliceKind kind);
// Whether its elements are floatX.
bool slice_kind_of_weights(SliceKind kind);
// Whether a tensor of so many dimensions has elements of this kind.
bool slice_kind_holds(SliceKind kind, int dims);

// A row of dims 1 (columns 0) or 2 that this rank holds whole.
Tensor tensor_row(const char *name, int64_t rows, int64_t columns, int split, int unit, double std);
// Rank `rank`'s part of a whole row, of `ranks` that share the model by tensor parallelism. `ranks`
// divides the dimension that is cut. Of a row that is not cut rank 0 counts the elements.
Tensor tensor_part(const Tensor *whole, int rank, int ranks);
// Numbers the rows of a whole model, in order: number and logical. ranks: of tensor parallelism,
// which will cut them. Each part begins on a multiple of 32.
void tensors_number(Tensor *tensors, int count, int ranks);
// Elements of this rank's part, and of the whole.
int64_t tensor_elements(const Tensor *tensor);
int64_t tensor_whole_elements(const Tensor *tensor);
// The rows as sdp4bit/layout.h wants them; (count), for free().
LayoutTensor *tensors_for_plan(const Tensor *tensors, int count);

LLMC_END
