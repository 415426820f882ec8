// The report of --plan: see plan_report.h. Figures first, for programs too; then a verdict to read.
#include "llmc/run/plan_report.h"

#include "llmc/log/log.h"

static void print_model(const Config *c, const Plan *plan, FILE *out) {
    fprintf(out, "model\n");
    fprintf(out, "  layers %d, hidden size %d, heads %d x %d, ffn %d, ", c->num_layers, c->hidden_size,
            c->num_attention_heads, c->kv_channels, c->ffn_hidden_size);
    fprintf(out, "sequence length %d, padded vocabulary %d\n", c->seq_length, c->vocab_size_padded);
    fprintf(out, "  parameters                 %16lld\n", (long long)plan->parameters);
    fprintf(out, "    of which 1-D (in tails)  %16lld\n", (long long)plan->tail_parameters);
    int batch = c->global_batch_size;
    double flops = megatron_flops(c, batch);
    fprintf(out, "  FLOPs per iteration        %16.6e  (Megatron's formula, batch %d)\n", flops, batch);
}

static void print_layout(const Plan *plan, const GradWire *grad, FILE *out) {
    fprintf(out, "data parallelism\n");
    fprintf(out, "  %d ranks = %d nodes x %d; groups start on multiples of %lld elements\n", plan->dp,
            plan->options.nodes, plan->options.per_node, (long long)plan->options.border);
    long long elements = plan->arena_elements, padding = elements - plan->parameters;
    fprintf(out, "  %d buckets, %lld elements with padding (%lld of padding), ", plan->buckets, elements,
            padding);
    fprintf(out, "%lld per rank in the optimizer state\n", (long long)plan->shard_elements);
    for (int b = 0; b < plan->buckets; b++) {
        const Bucket *bucket = &plan->bucket[b];
        fprintf(out, "    bucket %3d: layers %3d..%3d  matrices %12lld  tail %8lld", b, bucket->first_unit,
                bucket->end_unit - 1, (long long)bucket->matrix_elements, (long long)bucket->tail_elements);
        if (plan->dp > 1) fprintf(out, "  chunks of gradients %3d", plan_chunks(plan, bucket, grad));
        fputc('\n', out);
    }
}

// --- what travels ---------------------------------------------------------------------------

static const char *codec_name(int codec) { return codec_info(codec).name; }

// "int8 inside a node, int4 between nodes; weights: int4 differences", of the hops that the ranks
// make.
static void print_codecs(const Plan *plan, const GradWire *grad, const WeightWire *weight, FILE *out) {
    bool inside = plan->options.per_node > 1, between = plan->options.nodes > 1;
    fprintf(out, "  ");
    if (inside) fprintf(out, "gradients inside a node: %s", codec_name(grad->intra_codec));
    if (inside && between) fprintf(out, ", between nodes: %s", codec_name(grad->inter_codec));
    if (!inside) fprintf(out, "gradients between nodes: %s", codec_name(grad->inter_codec));
    const char *how = weight->difference ? " differences" : " direct";
    fprintf(out, "; weights: %s%s\n", codec_name(weight->codec), codec_info(weight->codec).levels ? how : "");
}

static void print_hop(FILE *out, const char *name, double formula, int64_t bytes) {
    double rest = (double)bytes - formula;
    fprintf(out, "  %-34s %16lld  = %16.0f by formula + %10.0f tails and padding\n", name, (long long)bytes,
            formula, rest);
}

// One line per bucket: dev/bench computes the best possible schedule from them.
static void print_bucket_wire(const Plan *plan, const GradWire *grad, const WeightWire *weight, FILE *out) {
    for (int b = 0; b < plan->buckets; b++) {
        WireBytes bytes = plan_bucket_wire_bytes(plan, b, grad, weight);
        fprintf(out, "    bucket %3d: gradients inside %12lld between %12lld  ", b,
                (long long)bytes.grad_intra, (long long)bytes.grad_inter);
        fprintf(out, "weights inside %12lld between %12lld\n", (long long)bytes.weight_intra,
                (long long)bytes.weight_inter);
    }
}

// Bytes that a node's ranks together send to other nodes in a step.
static double node_egress(const Plan *plan, const WireBytes *bytes) {
    return (double)(bytes->grad_inter + bytes->weight_inter) * plan->options.per_node;
}

static void print_wire_of(const Plan *plan, const GradWire *grad, const WeightWire *weight, FILE *out) {
    WireBytes bytes = plan_wire_bytes(plan, grad, weight);
    WireFormula formula = plan_wire_formula(plan, grad, weight);
    if (plan->dp > 1) print_codecs(plan, grad, weight, out);
    print_hop(out, "gradients, inside a node", formula.grad_intra, bytes.grad_intra);
    print_hop(out, "gradients, between nodes", formula.grad_inter, bytes.grad_inter);
    print_hop(out, "weights, inside a node", formula.weight_intra, bytes.weight_intra);
    print_hop(out, "weights, between nodes", formula.weight_inter, bytes.weight_inter);
    print_bucket_wire(plan, grad, weight, out);
    double egress = node_egress(plan, &bytes);
    fprintf(out, "  between nodes, out of each node    %16.0f  = %.4f bytes per parameter\n", egress,
            egress / (double)plan->parameters);
}

static void print_wire(const Config *c, const Zero *zero, FILE *out) {
    const Plan *plan = zero_layout(zero);
    const WeightWire *weight = zero_weight_wire(zero);
    const char *title = "bytes sent per step and rank";
    if (c->quantized_gradients && c->gradients_quantization_start_iteration > 0) {
        fprintf(out, "%s, before gradients are quantised\n", title);
        print_wire_of(plan, zero_grad_wire(zero, false), weight, out);
        fprintf(out, "%s, once gradients are quantised\n", title);
    } else {
        fprintf(out, "%s\n", title);
    }
    print_wire_of(plan, zero_grad_wire(zero, true), weight, out);
}

// --- the verdict: memory --------------------------------------------------------------------

static const double GIB = 0x1p30;

// GPUs as they are sold, and the GiB that CUDA reports for them.
typedef struct Card {
    int gigabytes;
    double gib;
} Card;
static const Card cards[] = {{80, 79.1}, {141, 139.8}};
// GiB that a process's CUDA context takes before the plan (measured on H200: 0.52).
static const double CONTEXT_GIB = 0.55;

// The largest micro-batch whose plan fits `share` bytes, up to MOST_SEQUENCES. Whether it divides
// the global batch is not asked: that can be chosen.
enum { MOST_SEQUENCES = 4096 };
static int largest_micro_batch(const Config *config, size_t planned, double share, ModelPlan model) {
    double others = (double)planned - (double)model.bytes(config, model.mesh);  // what does not depend on it
    Config other = *config;
    int fits = 0;
    for (int step = MOST_SEQUENCES; step > 0; step /= 2) {
        other.micro_batch_size = fits + step;
        if (other.micro_batch_size > MOST_SEQUENCES) continue;
        if (others + (double)model.bytes(&other, model.mesh) <= share) fits = other.micro_batch_size;
    }
    return fits;
}

static void print_gib(const MemoryPlan *memory_plan, FILE *out) {
    fprintf(out, "  GiB %s\n", device_kind()->where);
    for (int i = 0; i < memory_plan->count; i++) {
        size_t bytes = memory_plan_group_bytes(memory_plan, i);
        const MemoryPlanEntry *entry = &memory_plan->entries[i];
        if (bytes && !entry->host) fprintf(out, "    %-30s %8.2f\n", entry->group, (double)bytes / GIB);
    }
    fprintf(out, "    %-30s %8.2f\n", "all", (double)memory_plan_total(memory_plan) / GIB);
}

// Bytes of a card that a run of this layout may plan with.
static double share_of(Card card, const Config *c, const Plan *plan) {
    bool nccl_in_node = c->node_exchange == NODE_EXCHANGE_NCCL && plan->options.per_node > 1;
    return (card.gib - CONTEXT_GIB) * GIB - (double)memory_beside_plan(plan->dp, nccl_in_node);
}

static void print_fit(const Config *c, size_t planned, double share, ModelPlan model, FILE *out) {
    if ((double)planned <= share) {
        int most = largest_micro_batch(c, planned, share, model);
        const char *at_least = most == MOST_SEQUENCES ? " at least" : "";
        fprintf(out, "fits, up to --micro-batch-size %d%s\n", most, at_least);
    } else {
        char advice[512];
        memory_advice(advice, sizeof advice, c, planned, (size_t)share, model);
        fprintf(out, "does not fit\n    %s\n", advice);
    }
}

static void print_fits(const Config *c, const Plan *plan, size_t planned, ModelPlan model, FILE *out) {
    for (size_t i = 0; i < sizeof cards / sizeof *cards; i++) {
        double share = share_of(cards[i], c, plan);
        fprintf(out, "  a GPU of %3d GB (%.1f GiB for the plan): ", cards[i].gigabytes, share / GIB);
        print_fit(c, planned, share, model, out);
    }
    if (device_kind()->own_memory) return;
    fprintf(out, "    (about: only build/train_gpt --plan knows the workspaces of a GPU's ops)\n");
}

// --- the verdict: bytes between nodes -------------------------------------------------------

// What a node sends to the others in a step, padding aside, in GB: matrices by the formula, and
// tails.
static double arm_egress(const Plan *plan, const GradWire *grad, const WeightWire *weight) {
    WireFormula formula = plan_wire_formula(plan, grad, weight);
    double matrices = (formula.grad_inter + formula.weight_inter) * plan->options.per_node;
    double tail_bytes = (codec_info(grad->tail_codec).bits + codec_info(CODEC_BF16).bits) / 8.0;
    double nodes = plan->options.nodes;
    return (matrices + (double)plan->tail_parameters * tail_bytes * (nodes - 1) / nodes) / 1e9;
}

static void print_arms(const Plan *plan, FILE *out) {
    const GradWire fp32 = {.intra_codec = CODEC_FP32, .inter_codec = CODEC_FP32, .tail_codec = CODEC_FP32};
    const GradWire bf16 = {.intra_codec = CODEC_BF16, .inter_codec = CODEC_BF16, .tail_codec = CODEC_BF16};
    // The paper's arm, as in configs/sdp4bit.args.
    const GradWire four = {.intra_codec = CODEC_INT8, .inter_codec = CODEC_INT4, .intra_group = 128,
                           .inter_group = 128, .tail_codec = CODEC_BF16, .hadamard = true};
    const WeightWire plain = {.codec = CODEC_BF16};
    const WeightWire differences = {.codec = CODEC_INT4, .group = 2048, .difference = true};
    double most = arm_egress(plan, &fp32, &plain), less = arm_egress(plan, &bf16, &plain);
    double least = arm_egress(plan, &four, &differences);
    fprintf(out, "    %-30s %8.2f\n", "fp32 gradients, bf16 weights", most);
    fprintf(out, "    %-30s %8.2f\n", "bf16 gradients, bf16 weights", less);
    fprintf(out, "    %-30s %8.2f  (%.1f and %.1f times less)\n", "SDP4Bit", least, most / least,
            less / least);
}

static void print_between(const Config *c, const Zero *zero, FILE *out) {
    const Plan *plan = zero_layout(zero);
    const GradWire *grad = zero_grad_wire(zero, true);
    if (plan->dp == 1) {
        fprintf(out, "  one rank sends nothing, and quantises nothing\n");
        return;
    }
    if (plan->options.nodes == 1) {
        fprintf(out, "  nothing travels between nodes: the %d ranks are one node\n", plan->dp);
        if (c->quantized_gradients) {
            int inside = codec_info(grad->intra_codec).bits;
            int between = codec_info(grad->inter_codec).bits;
            fprintf(out, "    inside it gradients travel in %d bits; ", inside);
            fprintf(out, "those of %d bits need a second node\n", between);
        }
        return;
    }
    WireBytes bytes = plan_wire_bytes(plan, grad, zero_weight_wire(zero));
    fprintf(out, "  GB out of each node per step\n");
    print_arms(plan, out);
    fprintf(out, "    %-30s %8.2f\n", "this run", node_egress(plan, &bytes) / 1e9);
}

void plan_report(const Config *config, const Zero *zero, const MemoryPlan *memory_plan,
                 ModelPlan model, FILE *out) {
    const Plan *plan = zero_layout(zero);
    print_model(config, plan, out);
    print_layout(plan, zero_grad_wire(zero, true), out);
    fprintf(out, "memory per rank\n");
    memory_plan_print(memory_plan, plan->parameters, out);
    fprintf(out, "  on top, told by a run's log: %s\n",
            device_kind()->beside_plan);
    print_wire(config, zero, out);
    fprintf(out, "verdict\n");
    print_gib(memory_plan, out);
    print_fits(config, plan, memory_plan_total(memory_plan), model, out);
    print_between(config, zero, out);
}
