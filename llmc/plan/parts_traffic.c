// Traffic of tensor and pipeline parallelism: see parts_traffic.h.
#include "llmc/plan/parts_traffic.h"

#include "llmc/ops.h"

// Hidden states forward, their gradients backward.
double parts_hidden_bytes(const Config *c, const Mesh *mesh) {
    double bytes = (double)c->micro_batch_size * c->seq_length * c->hidden_size * (double)sizeof(floatX);
    return c->sequence_parallel ? bytes / mesh->tp.size : bytes;
}

// Per layer, 2 reductions forward and 2 backward; the embedding and the LM head have one each.
// Without sequence parallelism every reduction includes a gather. With it, a layer has 2 gathers
// forward and 4 backward. Full recomputation repeats 1 reduction and 2 gathers.
int parts_tensor_messages(const Config *c, const Mesh *mesh) {
    int layers = c->num_layers / mesh->pp.size, again = c->recompute_granularity == RECOMPUTE_FULL;
    bool embeds = mesh->pp.rank == 0, heads = mesh->pp.rank == mesh->pp.size - 1;
    int sums = layers * (4 + again) + embeds + heads;
    return sums + (c->sequence_parallel ? layers * (6 + 2 * again) + embeds + heads : sums);
}

double parts_tensor_bytes(const Config *c, const Mesh *mesh) {
    double T = mesh->tp.size, tokens = (double)c->micro_batch_size * c->seq_length;
    double one = tokens * c->hidden_size * (double)sizeof(floatX) * (T - 1) / T;
    bool heads = mesh->pp.rank == mesh->pp.size - 1;
    double head = heads ? tokens * (double)sizeof(HeadStatistics) * (T - 1) : 0;
    return one * parts_tensor_messages(c, mesh) + head;
}

// Gradients of LayerNorms are per-rank partial sums with sequence parallelism (own tokens), and
// gradients of query and key norms always are (own heads).
double parts_norms_bytes(const Config *c, const Mesh *mesh) {
    int layers = c->num_layers / mesh->pp.size, final = mesh->pp.rank == mesh->pp.size - 1;
    double of_rows = c->sequence_parallel ? (double)(2 * layers + final) * c->hidden_size : 0;
    double of_heads = c->qk_layernorm ? 2.0 * layers * c->kv_channels : 0;
    double vectors = c->normalization == RMSNORM ? 1.0 : 2.0;  // per norm
    return vectors * (of_rows + of_heads) * (double)sizeof(float) * (mesh->tp.size - 1);
}


double parts_words_bytes(const Config *c, const Mesh *mesh) {
    if (c->untie_embeddings_and_output_weights) return 0;
    return (double)c->vocab_size_padded / mesh->tp.size * c->hidden_size * (double)sizeof(float);
}
