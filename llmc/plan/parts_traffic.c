// Bytes between the parts of a model that is cut: see parts_traffic.h.
#include "llmc/plan/parts_traffic.h"

#include "llmc/ops.h"

// What crosses a border between two chunks of layers with a micro-batch, each way: the hidden state
// forward, its gradient backward. Bytes per rank.
double parts_hidden_bytes(const Config *c, const Mesh *mesh) {
    double bytes = (double)c->micro_batch_size * c->seq_length * c->hidden_size * (double)sizeof(floatX);
    return c->sequence_parallel ? bytes / mesh->tp.size : bytes;
}

// Sums and gathers of a tensor-parallel group with a micro-batch. A layer adds up the ranks' parts
// twice forward and twice backward, and so do embedding and head, once each. Without sequence
// parallelism every sum is gathered. With it, what enters and leaves a layer's products is: twice
// forward, four times backward. Full recomputation repeats one sum and two gathers.
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

// With sequence parallelism each rank has the gradients of LayerNorms for its own tokens. It has
// those of queries and keys for its own heads always.
double parts_norms_bytes(const Config *c, const Mesh *mesh) {
    int layers = c->num_layers / mesh->pp.size, final = mesh->pp.rank == mesh->pp.size - 1;
    double of_rows = c->sequence_parallel ? (double)(2 * layers + final) * c->hidden_size : 0;
    double of_heads = c->qk_layernorm ? 2.0 * layers * c->kv_channels : 0;
    double vectors = c->normalization == RMSNORM ? 1.0 : 2.0;  // of each norm
    return vectors * (of_rows + of_heads) * (double)sizeof(float) * (mesh->tp.size - 1);
}

// The gradient of tied word embeddings that a rank of the first or last stage sends to the other.
double parts_words_bytes(const Config *c, const Mesh *mesh) {
    if (c->untie_embeddings_and_output_weights) return 0;
    return (double)c->vocab_size_padded / mesh->tp.size * c->hidden_size * (double)sizeof(float);
}
