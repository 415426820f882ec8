// Computes bytes sent: see traffic.h.
#include "llmc/plan/traffic.h"

#include <assert.h>
#include <stdlib.h>

#include "llmc/ops.h"
#include "sdp4bit/wire.h"

// Returns true if every rank gathers all reduced gradients and updates all weights.
static bool gradients_gathered(const StepTraffic *traffic) {
    return zero_state_layout(traffic->zero)->dp < traffic->plan->dp;
}

static bool weights_sharded(const Config *c, const BucketLayout *plan, int b) {
    return c->sharding == SHARD_PARAMETERS && plan->dp > 1 && b > 0;
}

// --- gathers -------------------------------------------------------------------------------------

// Simulation of the two slots for gathered weights during a step.
typedef struct Walk {
    const Config *config;
    const BucketLayout *plan;
    Trips *trips;
    int held[2];  // bucket in each slot; -1: none
} Walk;

static void visit(Walk *walk, int unit, bool backward) {
    int b = walk->plan->unit_bucket[unit];
    if (!weights_sharded(walk->config, walk->plan, b) || walk->held[b % 2] == b) return;
    walk->held[b % 2] = b;
    if (backward) walk->trips[b].backward++;
    else walk->trips[b].forward++;
}

bool traffic_has_words(const Config *c, const Mesh *mesh) {
    return !c->lora_rank && (mesh->pp.rank == 0 || mesh->pp.rank == mesh->pp.size - 1);
}

// Counts the gathers of a step in the order of the stage's schedule. A slot keeps its bucket until
// another bucket needs it or the optimizer updates the weights.
static void count_gathers(Walk *walk, const Mesh *mesh) {
    const Config *c = walk->config;
    PipelineShape shape = {mesh->pp.size, mesh->pp.rank, config_pipeline_chunks(c)};
    int layers = c->num_layers / (shape.stages * shape.chunks);
    int words = traffic_has_words(c, mesh);
    size_t most = 2 * (size_t)c->micro_batches * (size_t)shape.chunks;
    PipelineAction *action = xcalloc(most + 1, sizeof *action, "the order of a step");
    int actions = pipeline_actions(shape, c->micro_batches, true, action);
    for (int i = 0; i < actions; i++) {
        int first = words + action[i].chunk * layers;
        for (int l = 0; l < layers; l++) {
            visit(walk, action[i].backward ? first + layers - 1 - l : first + l, action[i].backward);
        }
    }
    free(action);
}

StepTraffic traffic_make(const Config *config, const Mesh *mesh, const Zero *zero) {
    const BucketLayout *plan = zero_layout(zero);
    Trips *trips = xcalloc((size_t)plan->buckets, sizeof *trips, "gathers of a step");
    StepTraffic traffic = {config, zero, plan, mesh->replica_groups.size, trips};
    for (int b = 0; b < plan->buckets; b++) {
        trips[b].reductions = zero_reductions(zero, b, config->micro_batches);
    }
    Walk walk = {config, plan, trips, {-1, -1}};
    if (config->sharding == SHARD_PARAMETERS) count_gathers(&walk, mesh);
    return traffic;
}

void traffic_free(StepTraffic *traffic) {
    free(traffic->trips);
    traffic->trips = NULL;
}

// --- bytes ---------------------------------------------------------------------------------------

// Number of times that this rank sends weights of a bucket: as payloads to other nodes and inside
// its node, and in bf16 inside its node if the node's ranks share one replica.
typedef struct Ways {
    int between, inside, parts;
} Ways;

// Returns how often this rank sends weights in the gather after an update.
static Ways update_ways(const StepTraffic *traffic, int b) {
    Ways replica = {1, 1, 0}, node = {1, 0, 0}, none = {0, 0, 0};
    if (gradients_gathered(traffic)) return none;
    if (!weights_sharded(traffic->config, traffic->plan, b)) return replica;
    return traffic->config->shard_scope == SHARD_IN_NODE ? node : none;
}

// Returns how often this rank sends weights in a gather during forward or backward.
static Ways gather_ways(const StepTraffic *traffic, int b, bool backward) {
    const Config *c = traffic->config;
    Ways none = {0, 0, 0}, part = {0, 0, 1}, message = {1, 1, 0};
    if (!weights_sharded(c, traffic->plan, b)) return none;
    bool second = c->secondary_partition && traffic->plan->options.per_node > 1;
    return c->shard_scope == SHARD_IN_NODE || (second && backward) ? part : message;
}

static Ways ways_of_step(const StepTraffic *traffic, int b) {
    Ways sum = update_ways(traffic, b);
    const Trips *trips = &traffic->trips[b];
    for (int backward = 0; backward < 2; backward++) {
        Ways once = gather_ways(traffic, b, backward);
        int times = backward ? trips->backward : trips->forward;
        sum.between += times * once.between;
        sum.inside += times * once.inside;
        sum.parts += times * once.parts;
    }
    return sum;
}

// Returns the bytes that this rank sends when the node's ranks gather the node's replica.
static int64_t part_bytes(const BucketLayout *plan, int b) {
    const Bucket *bucket = &plan->bucket[b];
    int64_t own = bucket_shard(bucket);
    int64_t bytes = plan->options.nodes * own * (int64_t)sizeof(floatX);
    return (plan->options.per_node - 1) * (bytes + (bucket->sealed ? WIRE_PART_BYTES : 0));
}

// Multiplies the weight bytes of ZeRO-1 (`optim`) by the number of sends.
static void scale_weights(WireBytes *once, Ways ways, const BucketLayout *plan, int b) {
    once->weight_inter *= ways.between;
    once->weight_intra = ways.inside * once->weight_intra + ways.parts * part_bytes(plan, b);
}

// Adds the bytes of the gather of reduced gradients.
static void add_gradient_gather(WireBytes *bytes, const StepTraffic *traffic, int b) {
    int64_t nodes = traffic->plan->options.nodes, others = traffic->plan->options.per_node - 1;
    int64_t message = layout_reduced_message(&traffic->plan->bucket[b]).bytes;
    if (!gradients_gathered(traffic)) return;
    bytes->grad_inter += (nodes - 1) * message;
    bytes->grad_intra += others * nodes * message;
}

WireBytes traffic_of_update(const StepTraffic *traffic, int b, const GradFormat *grad,
                            const WeightFormat *weight) {
    assert(b >= 0 && b < traffic->plan->buckets);
    WireBytes bytes = layout_bucket_wire_bytes(traffic->plan, b, grad, weight);
    scale_weights(&bytes, update_ways(traffic, b), traffic->plan, b);
    add_gradient_gather(&bytes, traffic, b);
    return bytes;
}

WireBytes traffic_of_gather(const StepTraffic *traffic, int b, bool backward, const WeightFormat *weight) {
    assert(b >= 0 && b < traffic->plan->buckets);
    const GradFormat nothing = {.intra_codec = CODEC_FP32, .inter_codec = CODEC_FP32, .chunks = 1};
    WireBytes bytes = layout_bucket_wire_bytes(traffic->plan, b, &nothing, weight);
    bytes.grad_intra = bytes.grad_inter = 0;
    scale_weights(&bytes, gather_ways(traffic, b, backward), traffic->plan, b);
    return bytes;
}

WireBytes traffic_of_bucket(const StepTraffic *traffic, int b, const GradFormat *grad,
                            const WeightFormat *weight) {
    assert(b >= 0 && b < traffic->plan->buckets);
    WireBytes bytes = layout_bucket_wire_bytes(traffic->plan, b, grad, weight);
    bytes.grad_intra *= traffic->trips[b].reductions;
    bytes.grad_inter *= traffic->trips[b].reductions;
    bytes.grad_inter += zero_exchange_bytes(traffic->zero, b, grad) / traffic->config->local_steps;
    scale_weights(&bytes, ways_of_step(traffic, b), traffic->plan, b);
    add_gradient_gather(&bytes, traffic, b);
    return bytes;
}

WireBytes traffic_of_step(const StepTraffic *traffic, const GradFormat *grad, const WeightFormat *weight) {
    WireBytes sum = {0};
    for (int b = 0; b < traffic->plan->buckets; b++) {
        WireBytes bucket = traffic_of_bucket(traffic, b, grad, weight);
        sum.grad_intra += bucket.grad_intra;
        sum.grad_inter += bucket.grad_inter;
        sum.weight_intra += bucket.weight_intra;
        sum.weight_inter += bucket.weight_inter;
    }
    return sum;
}

// Returns the number of elements of a bucket's matrices, without padding.
static double matrix_elements(const BucketLayout *plan, int b) {
    const Bucket *bucket = &plan->bucket[b];
    double sum = 0;
    for (int i = 0; i < bucket->segments; i++) sum += (double)plan->segments[bucket->first_segment + i].numel;
    return sum;
}

// Returns the bytes of an outer all-reduce between replica groups, which has two hops with the
// inter-node codec, divided by the number of steps between outer syncs.
static double exchange_formula(const StepTraffic *traffic, const GradFormat *grad) {
    const BucketLayout *plan = traffic->plan;
    double own = (double)(plan->parameters - plan->tail_parameters) / plan->dp, N = traffic->replica_groups;
    CodecInfo codec = codec_info(grad->inter_codec);
    double bits = codec.bits + (codec.levels ? 32.0 / grad->inter_group : 0);
    return 2 * own * (N - 1) / N * bits / 8 / traffic->config->local_steps;
}

WireFormula traffic_formula(const StepTraffic *traffic, const GradFormat *grad, const WeightFormat *weight) {
    const BucketLayout *plan = traffic->plan;
    const WeightFormat plain = {.codec = FLOATX_CODEC}, exact = {.codec = CODEC_FP32};
    WireFormula all = layout_wire_formula(plan, grad, weight),
                parts = layout_wire_formula(plan, grad, &plain),
                reduced = layout_wire_formula(plan, grad, &exact);
    WireFormula sum = {0};
    double numbers = (double)(plan->parameters - plan->tail_parameters);
    for (int b = 0; b < plan->buckets; b++) {
        double share = matrix_elements(plan, b) / numbers;
        Ways ways = ways_of_step(traffic, b);
        sum.grad_intra += share * traffic->trips[b].reductions * all.grad_intra;
        sum.grad_inter += share * traffic->trips[b].reductions * all.grad_inter;
        sum.weight_inter += share * ways.between * all.weight_inter;
        sum.weight_intra += share * (ways.inside * all.weight_intra + ways.parts * parts.weight_intra);
    }
    sum.grad_inter += exchange_formula(traffic, grad);
    if (gradients_gathered(traffic)) {
        sum.grad_inter += reduced.weight_inter;
        sum.grad_intra += reduced.weight_intra;
    }
    return sum;
}

// --- tensor, sequence and pipeline parallelism ---------------------------------------------------

double parts_hidden_bytes(const Config *c, const Mesh *mesh, PassDirection direction) {
    int64_t rows = (int64_t)c->micro_batch_size * c->seq_length;
    return (double)messages_bytes(c, direction, c->sequence_parallel ? rows / mesh->tp.size : rows);
}

// Number of this stage's layers that run in FP8.
static int fp8_layers(const Config *c, const Mesh *mesh) {
    int chunks = config_pipeline_chunks(c), layers = c->num_layers / (mesh->pp.size * chunks), fp8 = 0;
    for (int chunk = 0; chunk < chunks; chunk++) {
        int first = (chunk * mesh->pp.size + mesh->pp.rank) * layers;
        for (int l = first; l < first + layers; l++) fp8 += config_layer_in_fp8(c, l);
    }
    return fp8;
}

// Returns true if FP8 layers gather codes. See fp8_gathers.
static bool codes_gathered(const Config *c) {
    return config_fp8_on(c) && c->sequence_parallel && c->fp8_recipe != FP8_BLOCKWISE;
}

// A layer has 2 reductions in forward and 2 in backward; the embedding and the LM head have one
// each. Row blocks (tp_row_blocks) divide a reduction into two with the same total of bytes. They
// overlap with GEMMs, so they count as one. Without sequence parallelism every reduction includes a
// gather. With it, a layer has 2 gathers in forward and 4 in backward. Full recomputation repeats 1
// reduction and 2 gathers. FP8 layers gather codes. Backward quantizes the 2 gradients that it
// gathers and gathers 2 inputs as forward has quantized them; the blockwise recipe has kept these
// inputs whole.
TensorMessages parts_tensor_messages(const Config *c, const Mesh *mesh) {
    int layers = c->num_layers / mesh->pp.size, again = c->recompute_granularity == RECOMPUTE_FULL;
    bool embeds = mesh->pp.rank == 0, heads = mesh->pp.rank == mesh->pp.size - 1;
    int sums = layers * (4 + again) + embeds + heads, quantized = 4 + 2 * again;
    if (!c->sequence_parallel) return (TensorMessages){.rows = 2 * sums};
    int fp8 = fp8_layers(c, mesh);
    TensorMessages m = {.rows = sums + (layers - fp8) * (quantized + 2) + embeds + heads};
    if (!codes_gathered(c)) m.rows += fp8 * quantized;
    else m.codes = fp8 * (quantized + 2);
    if (codes_gathered(c) && c->fp8_recipe == FP8_TENSORWISE) m.maxima = fp8 * quantized;
    return m;
}

double parts_tensor_bytes(const Config *c, const Mesh *mesh) {
    double T = mesh->tp.size, tokens = (double)c->micro_batch_size * c->seq_length;
    int64_t elements = (int64_t)c->micro_batch_size * c->seq_length / mesh->tp.size * c->hidden_size;
    ActivationFormat format = tp_format(c);
    double rows = (double)elements * (double)sizeof(floatX);
    if (c->quantized_tensor_parallel) rows = (double)activations_message(&format, elements, false).bytes;
    TensorMessages m = parts_tensor_messages(c, mesh);
    bool heads = mesh->pp.rank == mesh->pp.size - 1;
    double head = heads ? tokens * (double)sizeof(HeadStatistics) : 0;
    return (T - 1) * (m.rows * rows + m.codes * (double)elements + m.maxima * (double)sizeof(float) + head);
}

// Gradients of norms must be summed over the ranks if these process different tokens (sequence
// parallelism). Gradients of query and key norms always must be, because ranks have different
// heads. FP8 layers that gather codes also sum the gradients of 2 biases.
double parts_norms_bytes(const Config *c, const Mesh *mesh) {
    int layers = c->num_layers / mesh->pp.size, final = mesh->pp.rank == mesh->pp.size - 1;
    double of_rows = c->sequence_parallel ? (double)(2 * layers + final) * c->hidden_size : 0;
    double of_heads = c->qk_layernorm ? 2.0 * layers * c->kv_channels : 0;
    double vectors = c->normalization == RMSNORM ? 1.0 : 2.0;  // weight and bias of a norm
    double biases = codes_gathered(c) && !c->disable_bias_linear ? 2.0 * fp8_layers(c, mesh) : 0;
    double elements = vectors * (of_rows + of_heads) + biases * c->hidden_size;
    return elements * (double)sizeof(float) * (mesh->tp.size - 1);
}

double parts_momentum_bytes(const Mesh *mesh, const Zero *zero) {
    int count;
    const BucketLayout *layout = zero_state_layout(zero);
    const Tensor *tensors = zero_tensors(zero, &count);
    int64_t most = 0;
    for (int rank = 0; rank < layout->dp; rank++) {
        int64_t elements = 0;
        for (const Bucket *b = layout->bucket; b < layout->bucket + layout->buckets; b++) {
            for (int i = 0; b->whole && i < b->segments; i++) {
                const Segment *segment = &layout->segments[b->first_segment + i];
                bool owned = segment->start / b->matrix_per_rank == rank;
                if (owned && tensors[segment->tensor].muon.duplicated) elements += segment->numel;
            }
        }
        if (elements > most) most = elements;
    }
    return (double)most * (double)sizeof(float) * (mesh->tp.size - 1);
}

double parts_words_bytes(const Config *c, const Mesh *mesh) {
    if (c->untie_embeddings_and_output_weights || c->lora_rank) return 0;
    return (double)c->vocab_size_padded / mesh->tp.size * c->hidden_size * (double)sizeof(float);
}
