// Text generation during training (--sample-prompt): see run.h.
#include "llmc/run/run.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/base/utf8.h"
#include "llmc/run/sampling.h"

// Decodes n ids. Replaces invalid UTF-8, which byte-level models may produce, by U+FFFD. The caller
// frees the text.
static char *text_of(const Tokenizer *tokenizer, const int32_t *ids, int64_t n) {
    size_t total = 0, at = 0, bytes;
    for (int64_t i = 0; i < n; i++) {
        tokenizer_decode(tokenizer, ids[i], &bytes);
        total += bytes;
    }
    // Characters may span tokens, so the whole text is repaired at once. The result has at most
    // three bytes per raw byte.
    char *text = xmalloc(4 * total + 1, "the sample"), *raw = text + 3 * total + 1;
    for (int64_t i = 0; i < n; i++) {
        const char *piece = tokenizer_decode(tokenizer, ids[i], &bytes);
        memcpy(raw + at, piece, bytes);
        at += bytes;
    }
    int64_t replaced = 0;
    for (int i = tokenizer_stripped(tokenizer); i > 0 && total && *raw == ' '; i--, total--) raw++;
    size_t length = utf8_repair(raw, total, text, &replaced);
    for (size_t i = 0; i < length; i++) {
        if (!text[i]) text[i] = ' ';  // byte-level models may produce zero bytes
    }
    text[length] = 0;
    return text;
}

static void log_sample(Log *log, int64_t iteration, const Tokenizer *tokenizer, const int32_t *ids,
                       int64_t n) {
    char *text = text_of(tokenizer, ids, n);
    log_line(log, "sample at iteration %lld:\n%s", (long long)iteration, text);
    log_text(log, "sample/text_summary", iteration, text);
    Text json = json_begin("sample");
    json_integer(&json, "iteration", iteration);
    json_text(&json, "text", text);
    log_json(log, &json);
    free(text);
}

// Returns the ids of the tokenizer's document prefix and the prompt, or a single EOD if both are
// empty.
static TokenBuffer prompt_ids(const Run *run) {
    const char *prompt = run->config.sample_prompt;
    TokenBuffer ids = {NULL, 0, 0};
    int64_t replaced = 0;
    int before;
    const int32_t *prefix = tokenizer_prefix(run->tokenizer, &before);
    for (int i = 0; i < before; i++) token_buffer_append(&ids, prefix[i]);
    Encoder *encoder = encoder_create(run->tokenizer);
    encoder_encode(encoder, prompt, strlen(prompt), &ids, &replaced);
    encoder_free(encoder);
    if (replaced) {
        log_line(run->log,
                 "WARNING: this tokenizer cannot encode %lld parts of --sample-prompt; they are dropped or "
                 "replaced",
                 (long long)replaced);
    }
    if (ids.count == 0) token_buffer_append(&ids, tokenizer_eod(run->tokenizer));
    return ids;
}

void write_sample(Run *run, GPT *gpt) {
    const Config *c = &run->config;
    if (!c->sample_prompt || !run->tokenizer) return;
    zero_use_outer(run->zero, true);
    zero_weights_wait_all(run->zero);
    run->site.phase = "sample";
    TokenBuffer prompt = prompt_ids(run);
    int64_t total = prompt.count + c->sample_tokens, n = prompt.count;
    int32_t *ids = xcalloc((size_t)total + 1, sizeof(int32_t), "the sample");
    floatX *logits = xcalloc((size_t)c->vocab_size_padded, sizeof(floatX), "the sample");
    for (int64_t i = 0; i < n; i++) ids[i] = prompt.ids[i];
    const Mesh *mesh = &run->mesh;
    const Sampling all = {.vocab = c->vocab_size_unpadded,
                          .temperature = c->sample_temperature,
                          .top_p = 1.0,
                          .seed = (uint64_t)c->seed};
    int root = mesh->tp.size * mesh->dp.size * (mesh->pp.size - 1);  // first rank of the last stage
    for (; n < total; n++) {
        // The forward pass gathers sharded weights, in which all ranks must take part.
        if (mesh->dp.rank == 0 || mesh->shards.size * mesh->shard_rail.size > 1)
            gpt_next_logits(gpt, ids, n, logits);
        if (mesh->world.rank == root) ids[n] = sampling_draw(&all, logits, (uint64_t)n);
        // Broadcast after every token, so that no rank waits longer than the collective timeout.
        peers_broadcast(run_peers(run, run->launch.world), &ids[n], sizeof ids[n], root);
    }
    zero_use_outer(run->zero, false);
    if (run->launch.rank == 0) log_sample(run->log, run->iteration, run->tokenizer, ids, n);
    free(ids);
    free(logits);
    token_buffer_free(&prompt);
}
