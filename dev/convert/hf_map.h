// Maps elements between the trainer's tensors and a Hugging Face family's tensors. Called by
// hf_export.c, which iterates over the Hugging Face tensors, and by hf_import.c, which iterates
// over the trainer's.
//
// The trainer's tensors are treated as matrices of rows: outputs of a linear layer, tokens, or
// elements of a vector. SwiGLU's first matrix, (2, F*C) in the parameter table, has 2*F rows.
#pragma once
#include "dev/convert/hf_family.h"
LLMC_BEGIN

// A Hugging Face tensor. Its outputs are rows, or columns if transposed.
typedef struct HfTensor {
    char name[96];
    int whole;              // index of the trainer's tensor in gpt.whole
    int part;               // which part of that tensor; 0 if it has one part
    int64_t rows, columns;  // as in the file; columns 0: a vector
    bool transposed;
} HfTensor;

// A tensor of the trainer, made of one to three Hugging Face tensors.
typedef struct HfWhole {
    const HfRow *row;
    int first, count;       // range in map->tensors
    int64_t rows, columns;  // a vector has 1 column
} HfWhole;

typedef struct HfMap {
    const HfFamily *family;
    const GPT *gpt;
    int64_t words;      // rows of the Hugging Face embedding
    HfWhole *whole;     // (gpt->whole_tensors)
    HfTensor *tensors;  // (count), in the order of the parameter table
    int count;
} HfMap;

// Builds the map. model must outlive it. Every tensor of the model must have a row in the family's
// table.
void hf_map_make(HfMap *map, const HfFamily *family, const ImportedModel *model, int64_t words);
void hf_map_free(HfMap *map);

// Returns how many consecutive outputs of a Hugging Face tensor, starting at `output`, are
// consecutive rows of the trainer's tensor, and the first of these rows in *row.
int64_t hf_map_run(const HfMap *map, const HfTensor *tensor, int64_t output, int64_t *row);

// Outputs first .. first + count - 1 of a Hugging Face tensor.
typedef struct HfPart {
    const HfTensor *tensor;
    int64_t first, count;
} HfPart;
// Maps rows [row, row + rows) of the trainer's tensor `whole` to up to three consecutive parts of
// Hugging Face tensors and returns the number of parts. For fused heads, rows must be a multiple of
// hf_map_unit (entire query groups). Padding rows belong to no part.
int hf_map_parts(const HfMap *map, int whole, int64_t row, int64_t rows, HfPart parts[3]);
// Returns the position of row `row + r` among the outputs that hf_map_parts(row, rows) returns.
int64_t hf_map_place(const HfMap *map, int whole, int64_t r, int64_t rows);
// Returns the number of rows that must be converted together.
int64_t hf_map_unit(const HfMap *map, int whole);

LLMC_END
