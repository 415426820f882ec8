// Families of models that both the trainer and Hugging Face's transformers compute: GPT-2, Llama
// and their like. A family is a row of hf_family.c: what its config.json says, as flags of the
// trainer, and where its tensors come from. Called by hf_export.c and hf_import.c.
#pragma once
#include <stdio.h>

#include "dev/convert/imported.h"
LLMC_BEGIN

// A flag that every model of the family has. value: as in a checkpoint's arguments.
typedef struct HfBlock {
    const char *argument, *value;
    bool of_training;  // it changes training alone: a checkpoint may have another value
} HfBlock;

// A key of config.json ("rope_parameters.rope_theta": a member of a member) that is a flag.
typedef struct HfKey {
    const char *key, *argument;
    const char *missing;  // the flag's value where the key is missing; NULL: the trainer's default
    bool real;            // a number that config.json has with its decimal point
    bool negated;         // a truth value that is the flag's opposite
    bool written_only;
} HfKey;

// A key of config.json that may have some values alone.
typedef struct HfFixed {
    const char *key, *values;  // "first|second"; the first one is written
    const char *why;           // the trainer has no other
    bool written;
    bool needed;  // transformers' value of a missing key is another
} HfFixed;

// How the rows of one of our tensors lie in theirs.
typedef enum HfOrder {
    HF_SAME,
    HF_WORDS,  // a row for each word: padding is not there
    HF_HEADS,  // ours: of every group of heads its queries, its key, its value. Theirs: all queries,
               // all keys, all values
    HF_HALVES  // ours: SwiGLU's gate, then the other half. Theirs: two tensors
} HfOrder;

// One of our tensors, and its name, or names, there. "*" stands for the layer.
typedef struct HfRow {
    const char *ours, *theirs[3];
    HfOrder order;
    bool transposed;  // GPT-2's linear layers ("Conv1D") store the transposed matrix
} HfRow;

typedef struct HfFamily HfFamily;
struct HfFamily {
    const char *name, *type, *architecture;  // for messages; model_type; in "architectures"
    const HfFamily *like;                    // all lists of that one belong to this one too; NULL: none
    const HfBlock *blocks;
    int block_count;
    const HfKey *keys;
    int key_count;
    const HfFixed *fixed;
    int fixed_count;
    const HfRow *rows;
    int row_count;
    const char *prefix;        // of names, which older programs left out; NULL: none
    const char *constants[2];  // endings of names that are saved with the weights and are none
};

// The families, in the order in which an export tries them.
const HfFamily *hf_families(int *count);

// The family of a checkpoint's model, by its flags. Error (EXIT_CHECKPOINT): it has none; the line
// names the first flag that the family which is nearest has otherwise.
const HfFamily *hf_family_of(const ImportedModel *model, Error *err);

// What a folder says about its model.
typedef struct HfConfig {
    const HfFamily *family;
    ModelFlags flags;
    int64_t words;  // rows of its embedding
    int64_t eod;    // the end of a document: the end of a sequence there
} HfConfig;

// Reads a config.json; path is for messages. Errors (EXIT_CHECKPOINT): no JSON object, another
// family, what the trainer computes otherwise. On failure nothing needs freeing.
bool hf_config_read(HfConfig *config, const char *text, size_t bytes, const char *path, Error *err);
// Writes that of a model whose embedding has rows for the tokenizer's ids. dtype: "float32" or
// "bfloat16". bos: the token that begins a text.
void hf_config_write(const HfFamily *family, const ImportedModel *model, const char *dtype, int64_t bos,
                     FILE *out);

LLMC_END
