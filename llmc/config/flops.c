// Floating-point operations of an iteration: see flops.h.
#include "llmc/config/flops.h"

double megatron_flops(const Config *config, double batch_sequences) {
    double L = config->num_layers, S = config->seq_length, h = config->hidden_size,
           F = config->ffn_hidden_size * (config->swiglu ? 1.5 : 1.0);  // SwiGLU has three matrices
    // Width of the attention, h in these models.
    double a = (double)config->kv_channels * config->num_attention_heads;
    // The width of keys, and of values, in that of queries.
    double shared = (double)config_query_groups(config) / config->num_attention_heads;
    double attention = (1 + shared + S / h) * a / h;  // projections, scores and their product with V
    return 12 * batch_sequences * S * L * h * h *
           (attention + F / h + config->vocab_size_padded / (2 * L * h));
}

double causal_flops(const Config *config, double batch_sequences, double parameters) {
    double T = config->seq_length, a = (double)config->kv_channels * config->num_attention_heads;
    // Word embeddings that are not the output layer too are looked up, and multiply nothing.
    if (config->untie_embeddings_and_output_weights) {
        parameters -= (double)config->vocab_size_padded * config->hidden_size;
    }
    return batch_sequences * T * (6 * parameters + 6.0 * config->num_layers * a * T);
}
