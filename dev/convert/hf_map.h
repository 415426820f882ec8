// Where each element of the trainer's tensors stands in those of a Hugging Face family. Called by
// hf_export.c, which goes through their tensors, and by hf_import.c, which goes through ours.
//
// A tensor of ours is looked at as rows: outputs of a linear layer, words, or elements of a vector.
// SwiGLU's first matrix, which the trainer's table has as (2, F*C), has 2*F of them.
#pragma once
#include "dev/convert/hf_family.h"
LLMC_BEGIN

// One tensor of theirs. Its outputs are rows, or columns where it is transposed.
typedef struct HfTensor {
    char name[96];
    int ours;               // the row of gpt.whole that it is, or is a part of
    int part;               // which part, from 0
    int64_t rows, columns;  // as its file has it; columns 0: a vector
    bool transposed;
} HfTensor;

// One tensor of ours.
typedef struct HfOurs {
    const HfRow *row;
    int first, count;       // of their tensors
    int64_t rows, columns;  // of a vector: 1 column
} HfOurs;

typedef struct HfMap {
    const HfFamily *family;
    const GPT *gpt;
    int64_t words;  // rows that their embedding has
    HfOurs *ours;   // (gpt->whole_tensors)
    HfTensor *theirs;
    int count;  // in our order
} HfMap;

// model must outlive the map. A tensor that the family has no name for is a fault of its table.
void hf_map_make(HfMap *map, const HfFamily *family, const ImportedModel *model, int64_t words);
void hf_map_free(HfMap *map);

// How many outputs of their tensor, from `output` on, are successive rows of ours, and *row, the
// first of these.
int64_t hf_map_run(const HfMap *map, const HfTensor *tensor, int64_t output, int64_t *row);

// Outputs first .. first + count - 1 of their tensor.
typedef struct HfPart {
    const HfTensor *tensor;
    int64_t first, count;
} HfPart;
// Our rows [row, row + rows) as theirs: up to three parts, one after the other. Where heads are
// fused the rows are those of whole groups (hf_map_unit). Rows of padding have no part. Returns how
// many there are.
int hf_map_parts(const HfMap *map, int ours, int64_t row, int64_t rows, HfPart parts[3]);
// Where our row `row + r` stands among the outputs of these parts.
int64_t hf_map_place(const HfMap *map, int ours, int64_t r, int64_t rows);
// Rows that belong together.
int64_t hf_map_unit(const HfMap *map, int ours);

LLMC_END
