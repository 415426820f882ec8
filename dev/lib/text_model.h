// A GPT for text generation on one rank, with weights, buffers and a KV cache for one sequence.
// Used by dev/generate.c, dev/bench/generate.c and a test.
#pragma once
#include "llmc/model/gpt.h"
LLMC_BEGIN

typedef struct TextModel {
    Config config;  // seq_length is the number of positions
    Mesh mesh;      // a single rank
    Device *device;
    Stream *stream;
    MemoryPlan memory_plan;
    Zero *zero;  // weights only
    GPT gpt;
} TextModel;

// Opens the device and allocates all memory; the caller then fills in the weights. config: from
// config_of_checkpoint, for instance. positions: maximum length of prompt and text together, at
// least 1. threads: number of host threads (parallel_share). model and site must not move until
// text_model_close. Errors: EXIT_ENVIRONMENT if there is too little memory, EXIT_USAGE if the
// backend does not support the model. On failure there is nothing to close.
bool text_model_open(TextModel *model, const Config *config, int positions, int threads, const Site *site,
                     Error *err);
void text_model_close(TextModel *model);
// Returns the bytes of weights read for one token, which is a lower bound of its memory traffic.
int64_t text_model_bytes_per_token(const TextModel *model);

LLMC_END
