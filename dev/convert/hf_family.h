// Model families supported by both the trainer and Hugging Face's transformers: GPT-2, Llama and
// similar. A family is a row of hf_family.c that maps config.json to the trainer's flags, and
// Hugging Face tensor names to the trainer's. Called by hf_export.c and hf_import.c.
#pragma once
#include "dev/convert/imported.h"
#include "dev/lib/special_ids.h"
#include "llmc/base/json_line.h"
LLMC_BEGIN

// A flag with a fixed value in this family, as in a checkpoint's arguments.
typedef struct HfBlock {
    const char *argument, *value;
    bool of_training;  // affects only training: a checkpoint may have a different value
} HfBlock;

// A key of config.json ("rope_parameters.rope_theta": a nested member) that maps to a flag.
typedef struct HfKey {
    const char *key, *argument;
    const char *missing;  // value of the flag if the key is missing; NULL: the trainer's default
    bool real;            // a number that config.json writes with a decimal point
    bool negated;         // a boolean with the opposite meaning of the flag
    bool written_only;
} HfKey;

// A key of config.json with a fixed set of supported values.
typedef struct HfFixed {
    const char *key, *values;  // "first|second"; exports write the first
    const char *why;           // why the trainer supports no other value
    bool written;
    bool needed;  // required, because transformers has another default
} HfFixed;

// Row order of the trainer's tensor relative to the Hugging Face tensors.
typedef enum HfOrder {
    HF_SAME,
    HF_WORDS,  // one row per token, without padding rows
    HF_HEADS,  // trainer: queries, key and value of each query group. Hugging Face: all queries, all
               // keys, all values
    HF_HALVES  // trainer: SwiGLU's gate, then the up projection. Hugging Face: two tensors
} HfOrder;

// A tensor's name in the trainer and its names in Hugging Face files. "*" is the layer number.
typedef struct HfRow {
    const char *trainer, *hf[3];
    HfOrder order;
    bool transposed;  // GPT-2's linear layers ("Conv1D") store transposed matrices
} HfRow;

// How config.json describes sliding windows of attention.
typedef enum HfWindow {
    HF_NO_WINDOW,
    HF_WINDOW_ALWAYS,   // Mistral: "sliding_window" applies to all layers
    HF_WINDOW_SWITCHED  // Qwen: from layer "max_window_layers" on, if "use_sliding_window" is true
} HfWindow;

typedef struct HfFamily HfFamily;
struct HfFamily {
    const char *name, *type, *architecture;  // for messages; model_type; entry of "architectures"
    const HfFamily *like;                    // inherits all lists of this family; NULL: none
    const HfBlock *blocks;
    int block_count;
    const HfKey *keys;
    int key_count;
    const HfFixed *fixed;
    int fixed_count;
    const HfRow *rows;
    int row_count;
    const char *prefix;        // name prefix that older programs omitted; NULL: none
    const char *constants[2];  // suffixes of saved tensors that are not weights
    HfWindow window;
};

// All families, in the order in which an export tries them.
const HfFamily *hf_families(int *count);

// Finds the family of a checkpoint's model by its flags. Error (EXIT_CHECKPOINT): none matches; the
// message names the first differing flag of the closest family.
const HfFamily *hf_family_of(const ImportedModel *model, Error *err);

// Model description of a Hugging Face directory.
typedef struct HfConfig {
    const HfFamily *family;
    ModelFlags flags;
    int64_t words;  // rows of the embedding
    int64_t eod;    // end-of-document id: Hugging Face's end-of-sequence id
} HfConfig;

// Reads a config.json. Errors (EXIT_CHECKPOINT): an unreadable file, not a JSON object, an
// unknown family, or a setting that the trainer does not support. On failure nothing needs freeing.
bool hf_config_read(HfConfig *config, const char *path, Error *err);
// Writes the config.json of a model whose embedding has one row per token id. dtype: "float32" or
// "bfloat16". ids: object whose special token ids are copied.
void hf_config_write(const HfFamily *family, const ImportedModel *model, const char *dtype, const cJSON *ids,
                     Text *out);

LLMC_END
