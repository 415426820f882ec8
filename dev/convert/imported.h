// Saves another program's model as a checkpoint of iteration 0. The reader of the other program's
// files describes the model by the trainer's flags and supplies the weights. Used by hf_import.c
// and megatron.c; hf_export.c opens the model of a checkpoint through it.
#pragma once
#include <cjson/cJSON.h>

#include "llmc/model/gpt.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Flags of the trainer that define a model.
typedef struct ModelFlags {
    char *items[64];  // "--num-layers=2", "--swiglu"
    int count;
} ModelFlags;

// Adds a flag. name: as in a checkpoint's arguments, "num_layers". value: as on the command line;
// NULL for a flag without a value.
void model_flags_add(ModelFlags *flags, const char *name, const char *value);
void model_flags_free(ModelFlags *flags);
// Formats a JSON number, string or boolean as on the command line. bytes >= 40.
void model_flag_text(const cJSON *value, char *text, size_t bytes);

// The model as the trainer holds it on one rank. gpt.whole lists its tensors.
typedef struct ImportedModel {
    Config config;
    Mesh mesh;
    GPT gpt;
} ImportedModel;

// Builds the model. rows: number of embedding rows in the source, which is rounded up to a multiple
// of `divisible`. If the caller knows the tokenizer, it then sets config's tokenizer files,
// vocab_size_unpadded (default: rows) and eod (default: rows - 1). Error (EXIT_CHECKPOINT): names
// `source` and the flag that the trainer rejects.
bool imported_model_open(ImportedModel *model, const ModelFlags *flags, int64_t rows, int64_t divisible,
                         const char *source, Error *err);
// Builds the model from a checkpoint's arguments. Error: EXIT_CHECKPOINT.
bool imported_model_of_checkpoint(ImportedModel *model, const char *arguments_json, Error *err);
void imported_model_close(ImportedModel *model);
// Returns a config as JSON arguments, as checkpoints save it. The caller deletes it.
cJSON *imported_arguments(const Config *config);
// Number of parameters without padding rows.
int64_t imported_model_parameters(const ImportedModel *model);

typedef struct ImportedWeights {
    const char *save;    // a --save directory without checkpoints; NULL: read everything, write nothing
    const char *source;  // for error messages
    const ImportedModel *model;
    const int64_t *units;     // (tensors of gpt.whole) elements that must be read together; NULL: 1
    bool no_optimizer;        // weights only, for --finetune
    int64_t buffer_elements;  // buffer size in elements, unless a unit is larger
    // Reads elements [lo, hi) of gpt.whole[i] as fp32 in the trainer's order, including padding
    // rows. lo and hi are multiples of the unit, or the end of the tensor. Errors: EXIT_CHECKPOINT.
    bool (*read)(void *context, int i, int64_t lo, int64_t hi, float *out, Error *err);
    // Writes files next to the checkpoint, such as a tokenizer. May be NULL.
    bool (*write_files)(void *context, Error *err);
    void *context;
    Peers peers;  // single rank
} ImportedWeights;

// Checks that the directory contains no checkpoint. EXIT_USAGE.
bool imported_save_check(const char *save, Error *err);
// Saves master weights, zero moments, weights rounded to this build's precision, and model.args
// (the model as flags of the trainer). The checkpoint appears complete or not at all. Errors: any
// error of `read`, `write_files` and imported_save_check; EXIT_CHECKPOINT for a non-finite value or
// a failed write.
bool imported_save(const ImportedWeights *weights, Error *err);

LLMC_END
