// Converts checkpoints to Hugging Face directories of GPT-2, Llama and similar models, and back.
// Weights stream through buffers of a few megabytes, independent of the model size. Called by
// dev/convert_checkpoint.c and the tests.
//
// Export, import and export again gives identical bytes.
#pragma once
#include "dev/convert/hf_tokenizer.h"
#include "dev/lib/saved_weights.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Buffer size in elements. Tests use smaller buffers.
#define HF_BUFFER_ELEMENTS ((int64_t)4 << 20)

// Result of a conversion, for the user.
typedef struct HfReport {
    int64_t iteration, parameters;
    int files;         // number of weight files
    char notes[2048];  // newline-terminated lines; may be empty
} HfReport;

typedef struct HfExport {
    const char *load;    // a --save directory
    int64_t iteration;   // -1: latest
    const char *output;  // directory to create; must be missing or empty
    bool fp32;           // export the fp32 master weights; else the bf16 model weights
    WeightsChoice weights;
    const char *adapters;  // a --save directory of a LoRA run, whose adapters are merged; NULL: none
    int64_t part_bytes;    // maximum bytes of weights per file; larger models get several files and an index
    // Overrides the files next to the checkpoint and the files named in its arguments.
    HfTokenizerOptions tokenizer;
    int64_t buffer_elements;  // HF_BUFFER_ELEMENTS
    Peers peers;              // single rank
} HfExport;
// Exports a checkpoint. The output directory appears complete or not at all. Errors:
// EXIT_CHECKPOINT; EXIT_DATA for the tokenizer's files; EXIT_USAGE for a non-empty output.
//
// Merging adds (alpha / rank) B A to the bf16 weights in fp32 and rounds once. fp32 then selects
// the adapters' master weights.
bool hf_export(const HfExport *options, HfReport *report, Error *err);
// Exports the adapters of a LoRA run as adapter_config.json and adapter_model.safetensors of PEFT.
// Uses no options for tokenizers and files. Errors as hf_export.
bool hf_export_adapters(const HfExport *options, HfReport *report, Error *err);

typedef struct HfImport {
    const char *folder;            // directory written by save_pretrained
    const char *save;              // a --save directory without checkpoints; NULL: dry run
    int64_t divisible;             // embedding rows are padded to a multiple of it
    bool no_optimizer;             // weights only, for --finetune
    HfTokenizerOptions tokenizer;  // overrides the tokenizer in the directory
    int64_t buffer_elements;       // HF_BUFFER_ELEMENTS
    Peers peers;                   // single rank
} HfImport;
// Imports a model as a checkpoint of iteration 0: master weights, zero moments, and weights rounded
// to this build's precision. Padding rows of the embedding are set to the mean of the other rows,
// so that the logit of such a row adds no more to the softmax sum than an average token. The
// directory's files are untrusted input. Errors: EXIT_CHECKPOINT; EXIT_DATA for the tokenizer's
// files; EXIT_USAGE if `save` has checkpoints.
bool hf_import(const HfImport *options, HfReport *report, Error *err);

LLMC_END
