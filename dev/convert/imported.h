// The model of another program becomes a checkpoint of iteration 0. Whoever reads the other
// program's files says which model it is, as the trainer's own flags, and hands over the weights.
// hf_import.c does so for Hugging Face folders; hf_export.c reads the model of a checkpoint here.
#pragma once
#include <cjson/cJSON.h>

#include "llmc/model/gpt.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// --- which model ---------------------------------------------------------------------------------

// Flags of the trainer that say what a model is.
typedef struct ModelFlags {
    char *items[48];  // "--num-layers=2", "--swiglu"
    int count;
} ModelFlags;

// name: the flag's, in a checkpoint's arguments: "num_layers". value: as on the command line; NULL
// of a flag without one.
void model_flags_add(ModelFlags *flags, const char *name, const char *value);
void model_flags_free(ModelFlags *flags);
// A number, a text or a truth value of JSON as the command line has it. bytes >= 40.
void model_flag_text(const cJSON *value, char *text, size_t bytes);

// The model as the trainer holds it on one rank. gpt.whole is the table of its tensors.
typedef struct ImportedModel {
    Config config;
    Mesh mesh;
    GPT gpt;
} ImportedModel;

// rows: of the source's embedding. Ours gets the next multiple of `divisible`. Who knows the
// tokenizer then sets config's vocab_size_unpadded and eod (here: all rows, the last one), and its
// files. Error (EXIT_CHECKPOINT): `source`, for messages, and what the trainer says of the flags.
bool imported_model_open(ImportedModel *model, const ModelFlags *flags, int64_t rows, int64_t divisible,
                         const char *source, Error *err);
// The model of a checkpoint's arguments. Error: EXIT_CHECKPOINT.
bool imported_model_of_checkpoint(ImportedModel *model, const char *arguments_json, Error *err);
void imported_model_close(ImportedModel *model);
// Parameters as users count them: without rows of padding.
int64_t imported_model_parameters(const ImportedModel *model);

// --- its weights ---------------------------------------------------------------------------------

typedef struct ImportedWeights {
    const char *save;    // a --save folder without checkpoints; NULL: all is read, nothing written
    const char *source;  // for messages
    const ImportedModel *model;
    const int64_t *units;  // (tensors of gpt.whole) elements that are read together
    bool no_optimizer;     // the weights alone, for --finetune
    int64_t piece;         // elements that a buffer holds, where a unit is not more
    // Elements [lo, hi) of row i of gpt.whole as fp32, in the trainer's order, rows of padding too.
    // Both ends are multiples of the unit, or the tensor's end. Errors: EXIT_CHECKPOINT.
    bool (*read)(void *context, int i, int64_t lo, int64_t hi, float *out, Error *err);
    // Writes what lies beside the checkpoint, such as a tokenizer. NULL: nothing does.
    bool (*beside)(void *context, Error *err);
    void *context;
    Peers peers;  // of one rank
} ImportedWeights;

// That no checkpoint lies in the folder. EXIT_USAGE.
bool imported_save_check(const char *save, Error *err);
// Saves master weights, moments of zero, and weights rounded to this build's precision; and
// model.args, the model as flags of the trainer. The checkpoint appears whole or not at all.
// Errors: those of `read`, `beside` and imported_save_check; EXIT_CHECKPOINT of a value that is not
// finite, and of what cannot be written.
bool imported_save(const ImportedWeights *weights, Error *err);

LLMC_END
