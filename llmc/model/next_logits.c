// Logits of the next token, from a forward pass and the LM head of its last row: see gpt.h. Called
// by llmc/run/sample.c and dev/generate.c.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/model/gpt.h"

// Uploads the ids and pads the batch with zeros; causal attention ignores tokens after `used`.
static void upload_ids(const GPT *gpt, const Pass *pass, const int32_t *ids, int used) {
    const MicroBatch *m = &gpt->slot[0];
    size_t bytes = (size_t)pass_rows(pass) * sizeof(int32_t);
    int32_t *words = xcalloc(2, bytes, "the next token"), *positions = words + pass_rows(pass);
    memcpy(words, ids, (size_t)used * sizeof(int32_t));
    for (int t = 0; t < used; t++) positions[t] = pass->start + t;
    copy_to_device(gpt->stream, m->tokens, words, bytes);
    copy_to_device(gpt->stream, m->positions, positions, bytes);
    free(words);
}

// Computes the logits of row `used` - 1. The pass must have run through all layers.
static void last_logits(GPT *gpt, const Pass *pass, int used, floatX *logits) {
    const floatX *x = tp_gather(&gpt->tp, gpt->lnf.y, gpt->gathered, pass_rows(pass));
    int rows = (int)gpt->tensor[gpt->output].local[0];
    Linear linear = {.N = 1,
                     .C = gpt->C,
                     .OC = rows,
                     .x = x + (int64_t)(used - 1) * gpt->C,
                     .w = gpt_weight(gpt, gpt->output),
                     .y = gpt->logits + (int64_t)gpt->mesh->tp.rank * rows,
                     .workspace = gpt->workspace,
                     .threads = gpt->threads};
    op_linear_forward(gpt->stream, &linear);
    tp_exchange(&gpt->tp, gpt->logits, (size_t)rows * sizeof(floatX));
    copy_to_host(gpt->stream, logits, gpt->logits, (size_t)gpt->V * sizeof(floatX));
}

static void forward_to_logits(GPT *gpt, Pass *pass, const int32_t *ids, int used, floatX *logits) {
    upload_ids(gpt, pass, ids, used);
    for (; pass->chunk < gpt->stage.shape.chunks; pass->chunk++) gpt_stage_forward(gpt, pass);
    pass->chunk--;
    if (gpt->stage.heads) last_logits(gpt, pass, used, logits);
    stream_synchronize(gpt->stream);
}

void gpt_next_logits(GPT *gpt, const int32_t *ids, int64_t n, floatX *logits) {
    assert(n >= 1);
    // With sequence parallelism, the number of rows must be a multiple of the tensor-parallel size.
    int used = (int)(n < gpt->T ? n : gpt->T), T = (int)round_up64(used, gpt->mesh->tp.size);
    Pass pass = {.B = 1, .T = T};
    if (T > gpt->T) pass.T = gpt->T, pass.B = gpt->B;
    forward_to_logits(gpt, &pass, ids + n - used, used, logits);
}

void gpt_continue(GPT *gpt, const int32_t *ids, int start, int n, floatX *logits) {
    assert(gpt->cache && n >= 1 && start >= 0 && start + n <= gpt->T);
    Pass pass = {.B = 1, .T = n, .start = start, .first = true};
    forward_to_logits(gpt, &pass, ids, n, logits);
}
