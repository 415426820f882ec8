// A GPT for text generation on one rank: weights, buffers and KV cache for one sequence. Used by
// dev/generate.c, dev/bench/generate.c and a test.
#pragma once
#include "llmc/model/gpt.h"
LLMC_BEGIN

typedef struct TextModel {
    Config config;  // with seq_length set to the number of positions
    Mesh mesh;      // a single rank
    Device *device;
    Stream *stream;
    MemoryPlan memory_plan;
    Zero *zero;  // weights only
    GPT gpt;
} TextModel;

// Opens the device and allocates all memory; the caller then fills in the weights. config: from
// config_of_checkpoint or similar. positions: of prompt and text together, at least 1. threads:
// host threads (parallel_share). model and site must not move. Errors: EXIT_ENVIRONMENT if memory
// is missing; EXIT_USAGE for a model that the backend does not support. On failure there is nothing
// to close.
bool text_model_open(TextModel *model, const Config *config, int positions, int threads, const Site *site,
                     Error *err);
void text_model_close(TextModel *model);
// Returns the bytes of weights that one token reads: a lower bound of its memory traffic.
int64_t text_model_bytes_per_token(const TextModel *model);

LLMC_END
