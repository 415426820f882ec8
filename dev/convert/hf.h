// From a checkpoint to a Hugging Face folder of a GPT-2, a Llama or their like, and back. Weights
// stream through buffers of some megabytes, whatever the model's size. dev/convert_checkpoint.c and
// the tests call it.
//
// Exporting, importing and exporting again gives the same bytes.
#pragma once
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Elements that a buffer holds. A test gives less.
#define HF_PIECE ((int64_t)4 << 20)

// What came of a conversion, for the user.
typedef struct HfReport {
    int64_t iteration, parameters;
    int files;         // of weights
    char notes[2048];  // lines, each with its line end; empty: there is nothing to say
} HfReport;

// Which tokenizer the user wants, in the words of the trainer's flags.
typedef struct HfTokenizerWish {
    const char *vocab_file, *merge_file;
    const char *model, *eod;  // --tokenizer-model, --tokenizer-eod
    bool none;                // leave it out
} HfTokenizerWish;

typedef struct HfExport {
    const char *load;    // a --save folder
    int64_t iteration;   // -1: the latest
    const char *output;  // the folder to make; one that holds something is refused
    bool fp32;           // the master weights; else the weights that the model computes with, in bf16
    int64_t part_bytes;  // of weights in one file; more make parts with an index
    // Where it is not that of the files beside the checkpoint, else of those its arguments name.
    HfTokenizerWish tokenizer;
    int64_t piece;  // HF_PIECE
    Peers peers;    // of one rank
} HfExport;
// The folder appears whole or not at all. Errors: EXIT_CHECKPOINT; EXIT_DATA of the tokenizer's
// files; EXIT_USAGE for an output that holds something.
bool hf_export(const HfExport *wish, HfReport *report, Error *err);

typedef struct HfImport {
    const char *folder;         // what save_pretrained wrote
    const char *save;           // a --save folder without checkpoints; NULL: see whether it could be made
    int64_t divisible;          // the embedding gets this multiple of rows
    bool no_optimizer;          // the weights alone, for --finetune
    HfTokenizerWish tokenizer;  // where it is not the folder's
    int64_t piece;              // HF_PIECE
    Peers peers;                // of one rank
} HfImport;
// Makes a checkpoint of iteration 0: master weights, moments of zero, weights rounded to this
// build's precision. Rows of padding become the mean of the others: such a row's logit adds to the
// sum of a softmax at most what a word adds on average. The folder's files are hostile input.
// Errors: EXIT_CHECKPOINT; EXIT_DATA of the tokenizer's files; EXIT_USAGE for a `save` with
// checkpoints.
bool hf_import(const HfImport *wish, HfReport *report, Error *err);

LLMC_END
