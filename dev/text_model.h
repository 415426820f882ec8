// A GPT on one rank that trains nothing, ready to write text: weights, one sequence's buffers and
// its cache of keys and values. Made by dev/generate.c, dev/bench/generate.c and a test.
#pragma once
#include "llmc/model/gpt.h"
LLMC_BEGIN

typedef struct TextModel {
    Config config;  // the model's, for a sequence of so many positions
    Mesh mesh;      // of one rank
    Device *device;
    Stream *stream;
    MemoryPlan memory_plan;
    Zero *zero;  // the weights alone
    GPT gpt;
} TextModel;

// config: config_of_checkpoint's, or one like it. positions: of prompt and text together, at least
// 1. threads: of the host (parallel_share). Opens the device and takes all memory; the weights are
// to be filled next. model and site must stay where they are. Errors: EXIT_ENVIRONMENT, by how much
// memory is missing; EXIT_USAGE for a model that this backend cannot compute. On failure nothing is
// left to close.
bool text_model_open(TextModel *model, const Config *config, int positions, int threads, const Site *site,
                     Error *err);
void text_model_close(TextModel *model);
// Bytes of weights that a token's pass reads: the least that it takes from memory.
int64_t text_model_bytes_per_token(const TextModel *model);

LLMC_END
