// Gradient of tied embeddings on two pipeline stages: see gpt.h. Called by transformer.c.
//
// After its last backward pass, the last stage sends the LM head's gradient to the first stage. The
// first stage adds it before it adds the embedding gradients of its last micro-batch, so that with
// one micro-batch the summation order is the same as in an unsplit model. The first stage then
// sends the sum to the last stage, so both copies are bitwise identical.
#include "llmc/model/gpt.h"

// Returns the number of elements per message. A received message occupies half of dwide.
static int64_t words_at_a_time(const GPT *gpt) { return (int64_t)(gpt->dwide_bytes / sizeof(float) / 2); }

static void send_head_words(const GPT *gpt) {
    int64_t n = tensor_elements(&gpt->tensor[GPT_WTE]), most = words_at_a_time(gpt);
    float *words = gpt_grad(gpt, GPT_WTE);
    for (int64_t at = 0; at < n; at += most) {
        int64_t count = n - at < most ? n - at : most;
        link_send(gpt->pipeline.words_to_first, words + at, (size_t)count * sizeof(float), gpt->stream);
    }
}

void gpt_add_head_words(const GPT *gpt) {
    int64_t n = tensor_elements(&gpt->tensor[GPT_WTE]), most = words_at_a_time(gpt);
    float *words = gpt_grad(gpt, GPT_WTE), *parts = (float *)(void *)gpt->dwide;
    for (int64_t at = 0; at < n; at += most) {
        int64_t count = n - at < most ? n - at : most;
        size_t bytes = (size_t)count * sizeof(float);
        link_expect(gpt->pipeline.words_to_first, parts + count, bytes, gpt->stream);
        copy_on_device(gpt->stream, parts, words + at, bytes);
        link_arrived(gpt->pipeline.words_to_first, gpt->stream);
        op_add_parts(gpt->stream, words + at, parts, count, 2);
    }
}

void gpt_exchange_words(const GPT *gpt) {
    const Pipeline *pipeline = &gpt->pipeline;
    float *words = gpt_grad(gpt, GPT_WTE);
    size_t bytes = (size_t)tensor_elements(&gpt->tensor[GPT_WTE]) * sizeof(float);
    if (!gpt->stage.heads) {
        link_send(pipeline->words_to_last, words, bytes, gpt->stream);
        link_sent(pipeline->words_to_last, 0, gpt->stream);
    } else if (!gpt->stage.embeds) {
        send_head_words(gpt);
        link_sent(pipeline->words_to_first, 0, gpt->stream);
        link_expect(pipeline->words_to_last, words, bytes, gpt->stream);
        link_arrived(pipeline->words_to_last, gpt->stream);
    }
}
