// The report of --plan: see plan_report.h.
#include "llmc/run/plan_report.h"


#include "llmc/log/log.h"

static void print_model(const Config *c, const Plan *plan, FILE *out) {
    fprintf(out, "model\n");
    fprintf(out, "  layers %d, hidden size %d, heads %d x %d, ffn %d, sequence length %d, padded vocabulary %d\n", c->num_layers, c->hidden_size,
            c->num_attention_heads, c->kv_channels, c->ffn_hidden_size, c->seq_length, c->vocab_size_padded);
    fprintf(out, "  parameters                 %16lld\n", (long long)plan->parameters);
    fprintf(out, "    of which 1-D (in tails)  %16lld\n", (long long)plan->tail_parameters);
    double flops = megatron_flops(c, c->global_batch_size);
    fprintf(out, "  FLOPs per iteration        %16.6e  (Megatron's formula, batch %d)\n", flops, c->global_batch_size);
}

static void print_layout(const Plan *plan, const GradWire *grad, FILE *out) {
    fprintf(out, "data parallelism\n");
    fprintf(out, "  %d ranks = %d nodes x %d; groups start on multiples of %lld elements\n", plan->dp, plan->options.nodes, plan->options.per_node,
            (long long)plan->options.border);
    fprintf(out, "  %d buckets, %lld elements with padding (%lld of padding), %lld per rank in the optimizer state\n", plan->buckets,
            (long long)plan->arena_elements, (long long)(plan->arena_elements - plan->parameters), (long long)plan->shard_elements);
    for (int b = 0; b < plan->buckets; b++) {
        const Bucket *bucket = &plan->bucket[b];
        fprintf(out, "    bucket %3d: layers %3d..%3d  matrices %12lld  tail %8lld", b, bucket->first_unit, bucket->end_unit - 1,
                (long long)bucket->matrix_elements, (long long)bucket->tail_elements);
        if (plan->dp > 1) fprintf(out, "  chunks of gradients %3d", plan_chunks(plan, bucket, grad));
        fputc('\n', out);
    }
}

static void print_hop(FILE *out, const char *name, double formula, int64_t bytes) {
    fprintf(out, "  %-34s %16lld  = %16.0f by formula + %10.0f tails and padding\n", name, (long long)bytes, formula, (double)bytes - formula);
}

// One line per bucket, for programs too: dev/bench computes the best possible schedule from such figures.
static void print_bucket_wire(const Plan *plan, const GradWire *grad, const WeightWire *weight, FILE *out) {
    for (int b = 0; b < plan->buckets; b++) {
        WireBytes bytes = plan_bucket_wire_bytes(plan, b, grad, weight);
        fprintf(out, "    bucket %3d: gradients inside %12lld between %12lld  weights inside %12lld between %12lld\n", b, (long long)bytes.grad_intra,
                (long long)bytes.grad_inter, (long long)bytes.weight_intra, (long long)bytes.weight_inter);
    }
}

static void print_wire(const Config *config, const Zero *zero, FILE *out) {
    const Plan *plan = zero_layout(zero);
    const WeightWire *weight = zero_weight_wire(zero);
    bool late = config->quantized_gradients && config->gradients_quantization_start_iteration > 0;
    for (int pass = late ? 0 : 1; pass < 2; pass++) {
        const GradWire *grad = zero_grad_wire(zero, pass);
        WireBytes bytes = plan_wire_bytes(plan, grad, weight);
        WireFormula formula = plan_wire_formula(plan, grad, weight);
        fprintf(out, "bytes sent per step and rank%s\n", late ? (pass ? ", once gradients are quantised" : ", before gradients are quantised") : "");
        if (plan->options.per_node > 1) fprintf(out, "  gradients inside a node: %s, between nodes: ", codec_info(grad->intra_codec).name);
        else fprintf(out, "  gradients between nodes: ");
        fprintf(out, "%s; weights: %s%s\n", codec_info(grad->inter_codec).name, codec_info(weight->codec).name,
                codec_info(weight->codec).levels ? (weight->difference ? " differences" : " direct") : "");
        print_hop(out, "gradients, inside a node", formula.grad_intra, bytes.grad_intra);
        print_hop(out, "gradients, between nodes", formula.grad_inter, bytes.grad_inter);
        print_hop(out, "weights, inside a node", formula.weight_intra, bytes.weight_intra);
        print_hop(out, "weights, between nodes", formula.weight_inter, bytes.weight_inter);
        print_bucket_wire(plan, grad, weight, out);
        int64_t egress = (bytes.grad_inter + bytes.weight_inter) * plan->options.per_node;
        fprintf(out, "  between nodes, out of each node    %16lld  = %.4f bytes per parameter\n", (long long)egress, (double)egress / (double)plan->parameters);
    }
}

void plan_report(const Config *config, const Zero *zero, const MemoryPlan *memory_plan, FILE *out) {
    const Plan *plan = zero_layout(zero);
    print_model(config, plan, out);
    print_layout(plan, zero_grad_wire(zero, true), out);
    fprintf(out, "memory per rank\n");
    memory_plan_print(memory_plan, plan->parameters, out);
    bool host = device_is_host();
    fprintf(out, "  on top, told by a run's log: %s\n", host ? "the program, MPI's buffers and the data at hand" : "the CUDA context and what cuBLAS, cuDNN and NCCL take");
    if (host) fprintf(out, "  (for CPU ranks; build/train_gpt --plan tells what GPUs need, whose ops want other workspaces)\n");
    print_wire(config, zero, out);
}
