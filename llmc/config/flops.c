// Floating-point operations of an iteration: see flops.h.
#include "llmc/config/flops.h"

double megatron_flops(const Config *config, double batch_sequences) {
    double L = config->num_layers, S = config->seq_length, h = config->hidden_size,
           F = config->ffn_hidden_size * (config->swiglu ? 1.5 : 1.0);  // SwiGLU has three matrices
    // Width of the attention; usually h.
    double a = (double)config->kv_channels * config->num_attention_heads;
    // Width of keys (or values) relative to queries.
    double shared = (double)config_query_groups(config) / config->num_attention_heads;
    double attention = (1 + shared + S / h) * a / h;  // projections, scores and score-value product
    return 12 * batch_sequences * S * L * h * h *
           (attention + F / h + config->vocab_size_padded / (2 * L * h));
}

double causal_flops(const Config *config, double batch_sequences, double parameters) {
    double T = config->seq_length, a = (double)config->kv_channels * config->num_attention_heads;
    // Untied word embeddings are looked up, not multiplied.
    if (config->untie_embeddings_and_output_weights) {
        parameters -= (double)config->vocab_size_padded * config->hidden_size;
    }
    return batch_sequences * T * (6 * parameters + 6.0 * config->num_layers * a * T);
}
