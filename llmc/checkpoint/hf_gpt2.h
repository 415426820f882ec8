// The GPT as Hugging Face's GPT2LMHeadModel: sizes, names of tensors, where each element stands.
// Called by hf_export.c and hf_import.c.
//
// Two differences matter. GPT-2's linear layers ("Conv1D") store the transposed matrix. And its
// query_key_value rows are all heads' queries, then all keys, then all values, where ours are a
// head's queries, keys and values, head by head, as Megatron-LM has them.
#pragma once
#include <stdio.h>

#include "llmc/state/tensor.h"
LLMC_BEGIN

typedef struct HfGpt2 {
    int64_t layers, hidden, heads, ffn, positions;
    int64_t vocab;   // rows of the folder's embedding
    int64_t tokens;  // ids of the tokenizer: ours is padded from here on
    int64_t padded;  // rows of our embedding, at least `vocab`
    int64_t eod;
    double epsilon, attention_dropout, hidden_dropout, init_std;
} HfGpt2;

// One parameter on both sides. HF's tensor has `rows` rows and `columns` columns, a vector 0.
typedef struct HfTensor {
    Tensor ours;       // its name and whole shape here
    char name[64];     // there, without "transformer." before it
    int64_t rows, columns;
    bool transposed;   // its rows are our columns
    bool by_head;      // our rows are q, k and v of head after head; there all q, all k, all v
    bool words;        // the embedding, whose padding is not there
} HfTensor;

// All parameters, in our order (malloc'ed).
HfTensor *hf_gpt2_tensors(const HfGpt2 *model, int *count);
// Where our row stands there: its row, or its column where the tensor is transposed.
int64_t hf_place_of_row(const HfGpt2 *model, const HfTensor *tensor, int64_t row);
int64_t hf_gpt2_parameters(const HfGpt2 *model);  // without padding; the tied embedding once

// The model of a checkpoint's arguments, with vocab = tokens. Error (EXIT_CHECKPOINT): a size is
// missing or impossible.
bool hf_gpt2_from_arguments(HfGpt2 *model, const char *arguments_json, Error *err);
// The model of a config.json: path is for messages. tokens = vocab, and padded a multiple of
// `divisible`. Errors (EXIT_CHECKPOINT): text that is no GPT-2's, a size that is missing or
// impossible, what the trainer computes otherwise (another activation or scale of attention, an
// output layer of its own).
bool hf_gpt2_from_config(HfGpt2 *model, const char *text, size_t bytes, int64_t divisible, const char *path,
                         Error *err);
// That config.json. dtype: "float32" or "bfloat16".
void hf_gpt2_write_config(const HfGpt2 *model, const char *dtype, FILE *out);
// The arguments of a checkpoint of this model (malloc'ed JSON): those that --load compares.
// vocab_file, merge_file: NULL where there are none.
char *hf_gpt2_arguments(const HfGpt2 *model, const char *vocab_file, const char *merge_file);

LLMC_END
