// LoRA adapters of a checkpoint, in host memory. Called by hf_export.c, which merges them into the
// frozen model, and by hf_peft.c, which writes them in PEFT's format.
#pragma once
#include "dev/convert/imported.h"
#include "dev/lib/saved_weights.h"
LLMC_BEGIN

typedef struct Adapters {
    Checkpoint *checkpoint;
    ImportedModel model;  // model.gpt.lora.whole lists the adapters
    bool opened;          // model is described
    float **value;        // (whole_tensors)
    char note[1700];      // lines for the user; may be empty
} Adapters;

typedef struct AdaptersChoice {
    const char *load;   // a --save directory of a LoRA run
    int64_t iteration;  // -1: latest
    bool fp32;          // the fp32 master weights, else the bf16 weights
    WeightsChoice weights;
    Peers peers;  // single rank
} AdaptersChoice;

// Reads the adapters. Errors: EXIT_CHECKPOINT. Call adapters_close even after an error.
bool adapters_open(Adapters *adapters, const AdaptersChoice *choice, int64_t *iteration, Error *err);
void adapters_close(Adapters *adapters);
// Returns the index of A in gpt.lora.whole for a tensor of gpt.whole; B follows. -1: no adapter.
int adapters_of(const Adapters *adapters, const char *tensor);
// Adds (alpha / rank) B A to w (rows, columns), a part of a matrix that starts at (row, column).
// index: see adapters_of.
void adapters_add(const Adapters *adapters, int index, int64_t row, int64_t rows, int64_t column,
                  int64_t columns, float *w);

LLMC_END
