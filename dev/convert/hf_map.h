// Maps elements between the tensors of the trainer and of a Hugging Face family. Called by
// hf_export.c, which iterates over their tensors, and by hf_import.c, which iterates over ours.
//
// Our tensors are treated as matrices of rows: outputs of a linear layer, tokens, or elements of a
// vector. SwiGLU's first matrix, (2, F*C) in the trainer's table, has 2*F rows.
#pragma once
#include "dev/convert/hf_family.h"
LLMC_BEGIN

// One of their tensors. Its outputs are rows, or columns if transposed.
typedef struct HfTensor {
    char name[96];
    int ours;               // index in gpt.whole of the tensor that this is, or is part of
    int part;               // index of the part
    int64_t rows, columns;  // as in the file; columns 0: a vector
    bool transposed;
} HfTensor;

// One of our tensors.
typedef struct HfOurs {
    const HfRow *row;
    int first, count;       // range of their tensors
    int64_t rows, columns;  // a vector has 1 column
} HfOurs;

typedef struct HfMap {
    const HfFamily *family;
    const GPT *gpt;
    int64_t words;  // rows of their embedding
    HfOurs *ours;   // (gpt->whole_tensors)
    HfTensor *theirs;
    int count;  // in our order
} HfMap;

// Builds the map. model must outlive it. Every tensor of the model must have a row in the family's
// table.
void hf_map_make(HfMap *map, const HfFamily *family, const ImportedModel *model, int64_t words);
void hf_map_free(HfMap *map);

// Returns how many consecutive outputs of their tensor, starting at `output`, are consecutive rows
// of ours, and the first of these in *row.
int64_t hf_map_run(const HfMap *map, const HfTensor *tensor, int64_t output, int64_t *row);

// Outputs first .. first + count - 1 of their tensor.
typedef struct HfPart {
    const HfTensor *tensor;
    int64_t first, count;
} HfPart;
// Translates our rows [row, row + rows) into up to three consecutive parts of their tensors and
// returns the number of parts. Fused heads must be requested in whole query groups (hf_map_unit).
// Padding rows belong to no part.
int hf_map_parts(const HfMap *map, int ours, int64_t row, int64_t rows, HfPart parts[3]);
// Position of our row `row + r` among the outputs of these parts.
int64_t hf_map_place(const HfMap *map, int ours, int64_t r, int64_t rows);
// Number of rows that must be converted together.
int64_t hf_map_unit(const HfMap *map, int ours);

LLMC_END
