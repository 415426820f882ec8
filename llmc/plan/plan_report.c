// Prints the report of --plan: see plan_report.h. Details, which scripts parse, come first, then a
// summary for readers.
#include "llmc/plan/plan_report.h"

#include <assert.h>
#include <math.h>

#include "llmc/log/log.h"
#include "llmc/ops.h"
#include "llmc/plan/memory_fit.h"
#include "llmc/model/gpt.h"
#include "llmc/plan/traffic.h"

// --- the stages of a pipeline ---------------------------------------------------------------

// Plan of one rank, which represents the pipeline stages [first, end). The first of the middle
// stages represents all of them, because it has the most micro-batches in flight.
typedef struct StagePlan {
    int first, end;
    Mesh mesh;
    Zero *zero;
    FrozenCount frozen;
    Chunks *chunks;  // with --replica-group
    MemoryPlan memory_plan;
    StepTraffic traffic;
} StagePlan;

enum { MOST_STAGES = 3 };  // first, middle and last stages
typedef struct Stages {
    StagePlan stage[MOST_STAGES];
    int count;
    const StagePlan *fullest;  // the rank that needs the most memory
} Stages;

static const BucketLayout *layout_of(const StagePlan *s) { return zero_layout(s->zero); }

static void stages_free(Stages *stages) {
    for (int i = 0; i < stages->count; i++) {
        memory_plan_free(&stages->stage[i].memory_plan, NULL);
        traffic_free(&stages->stage[i].traffic);
        chunks_free(stages->stage[i].chunks);
        zero_free(stages->stage[i].zero);
    }
}

static bool plan_stages(Stages *stages, const Config *c, const Mesh *mesh, Error *err) {
    int P = mesh->pp.size, first[MOST_STAGES + 1] = {0, 1, P > 2 ? P - 1 : P, P};
    memset(stages, 0, sizeof *stages);
    for (int i = 0; i < MOST_STAGES && first[i] < P; i++) {
        StagePlan *s = &stages->stage[stages->count++];
        s->first = first[i];
        s->end = first[i + 1];
        s->mesh = mesh_of_rank(mesh, s->first * mesh->pp.stride);
        GPT gpt = {0};
        s->zero = gpt_plan(&gpt, c, &s->mesh, &s->memory_plan, err);
        s->frozen = gpt_frozen_parameters(&gpt);
        gpt_free(&gpt);
        if (!s->zero) return false;
        if (c->replica_group) s->chunks = plan_chunks(c, &s->mesh, s->zero, &s->memory_plan, err);
        if (c->replica_group && !s->chunks) return false;
        s->traffic = traffic_make(c, &s->mesh, s->zero);
        size_t bytes = memory_plan_total(&s->memory_plan);
        if (!stages->fullest || bytes > memory_plan_total(&stages->fullest->memory_plan)) stages->fullest = s;
    }
    return true;
}

// Counts the trained parameters of the whole model, and how many of them are in vectors. The
// planned ranks have tensor-parallel rank 0, which counts the tensors that are replicated in the
// group.
static void count_parameters(const Stages *stages, int64_t *all, int64_t *vectors) {
    *all = *vectors = 0;
    for (const StagePlan *s = stages->stage; s < stages->stage + stages->count; s++) {
        int count;
        const Tensor *tensor = zero_tensors(s->zero, &count);
        for (const Tensor *t = tensor; t < tensor + count; t++) {
            int64_t elements = t->counted ? (s->end - s->first) * tensor_whole_elements(t) : 0;
            *all += elements;
            *vectors += t->dims == 1 ? elements : 0;
        }
    }
}

// --- model and layout -----------------------------------------------------------------------

static void print_model(const Config *c, const Stages *stages, FILE *out) {
    int64_t trained, vectors, frozen = stages->fullest->frozen.whole;
    count_parameters(stages, &trained, &vectors);
    fprintf(out, "model\n");
    fprintf(out, "  layers %d, hidden size %d, heads %d x %d, ffn %d, ", c->num_layers, c->hidden_size,
            c->num_attention_heads, c->kv_channels, c->ffn_hidden_size);
    if (c->group_query_attention) fprintf(out, "query groups %d, ", c->num_query_groups);
    fprintf(out, "sequence length %d, padded vocabulary %d\n", c->seq_length, c->vocab_size_padded);
    fprintf(out, "  parameters                 %16lld\n", (long long)(trained + frozen));
    if (frozen) {
        fprintf(out, "    trainable, in adapters   %16lld\n", (long long)trained);
        fprintf(out, "    frozen                   %16lld\n", (long long)frozen);
    } else {
        fprintf(out, "    of which 1-D (in tails)  %16lld\n", (long long)vectors);
    }
    if (config_fp8_on(c)) fprintf(out, "  layers in FP8              %16d\n", config_fp8_layers(c));
    int batch = c->global_batch_size;
    double flops = megatron_flops(c, batch);
    fprintf(out, "  FLOPs per iteration        %16.6e  (Megatron-LM's formula%s, batch %d)\n", flops,
            c->lora_rank ? " without frozen gradients" : "", batch);
}

static bool is_model_parallel(const Mesh *mesh) { return mesh->tp.size > 1 || mesh->pp.size > 1; }

static void print_parts(const Config *c, const Stages *stages, FILE *out) {
    const Mesh *mesh = &stages->fullest->mesh;
    int layers = c->num_layers / mesh->pp.size, chunks = config_pipeline_chunks(c);
    if (!is_model_parallel(mesh)) return;
    fprintf(out, "parts of the model\n");
    fprintf(out, "  %d ranks = pipeline %d x data parallel %d x tensor parallel %d%s, on %d nodes of %d\n",
            mesh->world.size, mesh->pp.size, mesh->dp.size, mesh->tp.size,
            c->sequence_parallel ? " with sequence parallelism" : "", mesh->nodes, mesh->per_node);
    for (const StagePlan *s = stages->stage; s < stages->stage + stages->count; s++) {
        fprintf(out, "  stage %2d", s->first);
        if (s->end > s->first + 1) fprintf(out, " to %2d", s->end - 1);
        fprintf(out, ", %d layers", layers);
        if (chunks > 1) fprintf(out, " in %d chunks", chunks);
        fprintf(out, "%s%s: %lld ", s->first == 0 ? ", embeddings" : "",
                s->end == mesh->pp.size ? ", LM head" : "", (long long)layout_of(s)->parameters);
        if (s->frozen.own) fprintf(out, "trainable and %lld frozen ", (long long)s->frozen.own);
        fprintf(out, "parameters, %.2f GiB per rank\n", (double)memory_plan_total(&s->memory_plan) / 0x1p30);
    }
}

// Appends the stage to a title if there are several stages.
static void print_whose(const StagePlan *s, FILE *out) {
    if (s->mesh.pp.size > 1) fprintf(out, " of stage %d, which needs the most memory", s->first);
    fputc('\n', out);
}

static void print_layout(const Config *c, const StagePlan *s, FILE *out) {
    const BucketLayout *plan = layout_of(s);
    const GradFormat *grad = zero_grad_format(s->zero, true);
    fprintf(out, "data parallelism");
    print_whose(s, out);
    fprintf(out, "  %d ranks = %d nodes x %d; quantization groups start at multiples of %lld elements\n",
            plan->dp, plan->options.nodes, plan->options.per_node, (long long)plan->options.alignment);
    long long elements = plan->arena_elements, padding = elements - plan->parameters;
    fprintf(out, "  %d buckets, %lld elements with padding (%lld of padding), ", plan->buckets, elements,
            padding);
    fprintf(out, "%lld per rank in the optimizer state\n",
            (long long)zero_state_layout(s->zero)->shard_elements);
    plan_muon_report(c, &s->mesh, s->zero, &s->memory_plan, out);
    for (int b = 0; b < plan->buckets; b++) {
        const Bucket *bucket = &plan->bucket[b];
        fprintf(out, "    bucket %3d: layers %3d..%3d  matrices %12lld  tail %8lld", b, bucket->first_unit,
                bucket->end_unit - 1, (long long)bucket->matrix_elements, (long long)bucket->tail_elements);
        if (plan->dp > 1) fprintf(out, "  chunks of gradients %3d", layout_chunks(plan, bucket, grad));
        fputc('\n', out);
    }
}

// --- traffic --------------------------------------------------------------------------------

static const char *codec_name(int codec) { return codec_info(codec).name; }

// Prints the codecs in use, such as "gradients inside a node: int8, between nodes: int4; weights:
// int4 differences".
static void print_codecs(const BucketLayout *plan, const GradFormat *grad, const WeightFormat *weight,
                         FILE *out) {
    bool inside = plan->options.per_node > 1, between = plan->options.nodes > 1;
    fprintf(out, "  ");
    if (inside) fprintf(out, "gradients inside a node: %s", codec_name(grad->intra_codec));
    if (inside && between) fprintf(out, ", between nodes: %s", codec_name(grad->inter_codec));
    if (!inside) fprintf(out, "gradients between nodes: %s", codec_name(grad->inter_codec));
    const char *how = weight->difference ? " differences" : " direct";
    if (format_is_lossless(weight)) how = ", lossless: at most the bytes below, typically a fifth of them";
    else if (!codec_grouped(weight->codec)) how = "";
    fprintf(out, "; weights: %s%s\n", codec_name(weight->codec), how);
}

static void print_hop(FILE *out, const char *name, double formula, int64_t bytes) {
    double rest = (double)bytes - formula;
    fprintf(out, "  %-34s %16lld  = %16.0f by formula + %10.0f tails and padding\n", name, (long long)bytes,
            formula, rest);
}

// Prints one line per bucket. dev/bench/comm_bound.py computes the best possible schedule from
// these lines.
static void print_bucket_wire(const StepTraffic *traffic, const GradFormat *grad, const WeightFormat *weight,
                              FILE *out) {
    for (int b = 0; b < traffic->plan->buckets; b++) {
        WireBytes bytes = traffic_of_bucket(traffic, b, grad, weight);
        fprintf(out, "    bucket %3d: gradients inside %12lld between %12lld  ", b,
                (long long)bytes.grad_intra, (long long)bytes.grad_inter);
        fprintf(out, "weights inside %12lld between %12lld\n", (long long)bytes.weight_intra,
                (long long)bytes.weight_inter);
    }
}

// Returns the bytes of gradients and weights that a node sends to other nodes per step.
static double node_egress(const Mesh *mesh, const WireBytes *bytes) {
    return (double)(bytes->grad_inter + bytes->weight_inter) * mesh->per_node;
}

// Prints the codec of the outer all-reduce between replica groups.
static void print_exchange(const Config *c, const Mesh *mesh, const GradFormat *grad, FILE *out) {
    if (mesh->replica_groups.size == 1) return;
    fprintf(out,
            "  pseudo-gradients between %d replica groups: %s, every %d steps; the lines below are means per "
            "step\n",
            mesh->replica_groups.size, codec_name(grad->inter_codec), c->local_steps);
}

static void print_wire_of(const StagePlan *s, const GradFormat *grad, FILE *out) {
    const BucketLayout *plan = layout_of(s);
    const WeightFormat *weight = zero_weight_format(s->zero);
    WireBytes bytes = traffic_of_step(&s->traffic, grad, weight);
    WireFormula formula = traffic_formula(&s->traffic, grad, weight);
    if (plan->dp > 1) print_codecs(plan, grad, weight, out);
    print_exchange(s->traffic.config, &s->mesh, grad, out);
    print_hop(out, "gradients, inside a node", formula.grad_intra, bytes.grad_intra);
    print_hop(out, "gradients, between nodes", formula.grad_inter, bytes.grad_inter);
    print_hop(out, "weights, inside a node", formula.weight_intra, bytes.weight_intra);
    print_hop(out, "weights, between nodes", formula.weight_inter, bytes.weight_inter);
    print_bucket_wire(&s->traffic, grad, weight, out);
    double egress = node_egress(&s->mesh, &bytes);
    // Number of distinct parameters in a node, which may hold several model-parallel shards.
    double parameters = (double)plan->parameters * s->mesh.per_node / plan->options.per_node;
    fprintf(out, "  between nodes, out of each node    %16.0f  = %.4f bytes per %sparameter\n", egress,
            egress / parameters, s->frozen.own ? "trainable " : "");
}

static void print_wire(const Config *c, const StagePlan *s, FILE *out) {
    const char *title = "bytes sent per step and rank";
    if (c->quantized_gradients && c->gradients_quantization_start_iteration > 0) {
        fprintf(out, "%s, before gradients are quantized\n", title);
        print_wire_of(s, zero_grad_format(s->zero, false), out);
        fprintf(out, "%s, once gradients are quantized\n", title);
    } else {
        fprintf(out, "%s\n", title);
    }
    print_wire_of(s, zero_grad_format(s->zero, true), out);
}

// Prints the codecs of messages between stages, and their bytes in both directions.
static void print_stage_wire(const Config *c, const Mesh *mesh, FILE *out) {
    Codec forward = messages_format(c, FORWARD).codec, backward = messages_format(c, BACKWARD).codec;
    double bytes[2] = {parts_hidden_bytes(c, mesh, FORWARD), parts_hidden_bytes(c, mesh, BACKWARD)};
    char times[32] = "";
    int chunks = config_pipeline_chunks(c);
    if (chunks > 1) snprintf(times, sizeof times, ", %d times", chunks);
    if (c->quantized_activations) {
        fprintf(out,
                "  activations between stages: %s, their gradients: %s, groups of %d; evaluation sends %s\n",
                codec_name(forward), codec_name(backward), c->aq_group_size, FLOATX_NAME);
    }
    if (bytes[FORWARD] == bytes[BACKWARD]) {
        fprintf(out, "  %-34s %16.0f  each way%s\n", "to a neighboring stage", bytes[FORWARD], times);
    } else {
        fprintf(out, "  %-34s %16.0f  activations%s\n", "to the next stage", bytes[FORWARD], times);
        fprintf(out, "  %-34s %16.0f  gradients%s\n", "to the previous stage", bytes[BACKWARD], times);
    }
}

static void print_parts_wire(const Config *c, const StagePlan *s, FILE *out) {
    const Mesh *mesh = &s->mesh;
    if (!is_model_parallel(mesh)) return;
    fprintf(out, "bytes sent per micro-batch and rank, between parts of the model\n");
    if (mesh->tp.size > 1) {
        if (c->quantized_tensor_parallel) {
            fprintf(out, "  sums and gathers of tensor parallelism: %s, groups of %d\n",
                    codec_name(tp_format(c).codec), c->aq_group_size);
        }
        fprintf(out, "  %-34s %16.0f\n", "tensor parallelism", parts_tensor_bytes(c, mesh));
    }
    if (mesh->pp.size > 1) print_stage_wire(c, mesh, out);
    double words = mesh->pp.size > 1 ? parts_words_bytes(c, mesh) : 0;
    double norms = parts_norms_bytes(c, mesh), momentum = parts_momentum_bytes(mesh, s->zero);
    if (norms == 0 && words == 0 && momentum == 0) return;
    fprintf(out, "bytes sent per step and rank, between parts of the model\n");
    if (norms > 0) fprintf(out, "  %-34s %16.0f\n", "gradients of LayerNorms", norms);
    if (momentum > 0) fprintf(out, "  %-34s %16.0f\n", "momentum of whole matrices, at most", momentum);
    if (words > 0) {
        fprintf(out, "  %-34s %16.0f  each way\n", "gradients of the tied embedding", words);
    }
}

// --- summary: memory ----------------------------------------------------------------------------

static const double GIB = 0x1p30;

// Returns true if every stage fits into `share` bytes with this micro-batch size.
static bool all_fit(const Config *config, const Stages *stages, int micro_batch, double share) {
    Config other = *config;
    other.micro_batch_size = micro_batch;
    for (const StagePlan *s = stages->stage; s < stages->stage + stages->count; s++) {
        double others = (double)memory_plan_total(&s->memory_plan) -
                        (double)gpt_planned_bytes(config, &s->mesh);
        if (others + (double)gpt_planned_bytes(&other, &s->mesh) > share) return false;
    }
    return true;
}

// Returns the largest micro-batch size, up to MOST_SEQUENCES, with which all stages fit into
// `share` bytes. It need not divide the global batch size, which the user can change.
enum { MOST_SEQUENCES = 4096 };
static int largest_micro_batch(const Config *config, const Stages *stages, double share) {
    int fits = 0;
    for (int step = MOST_SEQUENCES; step > 0; step /= 2) {
        if (fits + step > MOST_SEQUENCES) continue;
        if (all_fit(config, stages, fits + step, share)) fits += step;
    }
    return fits;
}

// Appends the sum over the ranks of a node, if there are several.
static void print_node(double gib, const Mesh *mesh, FILE *out) {
    if (mesh->per_node > 1)
        fprintf(out, ", %.2f for the %d ranks of a node", gib * mesh->per_node, mesh->per_node);
}

// Prints device memory by purpose, the page-locked host memory of the offload flags and
// --async-save, and the files of --optimizer-disk-offload.
static void print_gib(const StagePlan *s, FILE *out) {
    const MemoryPlan *memory_plan = &s->memory_plan;
    double host = 0, disk = 0, here = (double)machine_memory("MemTotal") / GIB;
    fprintf(out, "  GiB %s\n", device_kind()->where);
    for (int i = 0; i < memory_plan->count; i++) {
        size_t bytes = memory_plan_group_bytes(memory_plan, i);
        const MemoryPlanEntry *entry = &memory_plan->entries[i];
        if (entry->place == ON_HOST) host += (double)entry->bytes / GIB;
        else if (entry->place == ON_DISK) disk += (double)entry->bytes / GIB;
        else if (bytes) fprintf(out, "    %-30s %8.2f\n", entry->group, (double)bytes / GIB);
    }
    fprintf(out, "    %-30s %8.2f\n", "all", (double)memory_plan_total(memory_plan) / GIB);
    if (disk > 0) {
        fprintf(out, "  GiB on disk: %.2f for each rank", disk);
        print_node(disk, &s->mesh, out);
        fputc('\n', out);
    }
    if (host < 0.01) return;
    fprintf(out, "  GiB of page-locked host memory: %.2f for each rank", host);
    print_node(host, &s->mesh, out);
    if (here > 0) fprintf(out, "; this machine has %.2f", here);
    fprintf(out, "\n");
}

// Returns the largest micro-batch size with which this config fits into `share` bytes, or 0.
static int fits_with(const Config *c, const Mesh *mesh, double share) {
    Stages stages;
    Error err;
    bool ok = plan_stages(&stages, c, mesh, &err);
    int most = ok ? largest_micro_batch(c, &stages, share) : 0;
    stages_free(&stages);
    return most;
}

// Suggests the first sharding strategy that fits with full recomputation, if no micro-batch does.
static void print_strategy(const Config *c, const Mesh *mesh, double share, FILE *out) {
    static const struct {
        Sharding sharding;
        bool offload;
        const char *words;
    } more[] = {
        {SHARD_GRADIENTS, false, "optim_grads"},
        {SHARD_PARAMETERS, false, "optim_grads_params"},
        {SHARD_PARAMETERS, true, "optim_grads_params --optimizer-cpu-offload"},
    };
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
        Config other = *c;
        bool offload = c->optimizer_cpu_offload || c->optimizer_disk_offload;
        if (more[i].sharding < c->sharding || more[i].offload < offload) continue;
        other.sharding = more[i].sharding;
        other.optimizer_cpu_offload = more[i].offload;
        other.optimizer_disk_offload = NULL;  // needs the same memory of the device
        other.recompute_granularity = RECOMPUTE_FULL;
        int most = fits_with(&other, mesh, share);
        if (!most) continue;
        fprintf(out,
                "    --data-parallel-sharding-strategy %s with --recompute-granularity full fits, up to "
                "--micro-batch-size %d\n",
                more[i].words, most);
        return;
    }
}

static void print_fit(const Config *c, const Stages *stages, double share, FILE *out) {
    const StagePlan *fullest = stages->fullest;
    size_t planned = memory_plan_total(&fullest->memory_plan);
    if ((double)planned <= share) {
        int most = largest_micro_batch(c, stages, share);
        const char *at_least = most == MOST_SEQUENCES ? " at least" : "";
        fprintf(out, "fits, up to --micro-batch-size %d%s\n", most, at_least);
    } else {
        char advice[512];
        const ModelPlan model = {gpt_planned_bytes, &fullest->mesh};
        bool some = memory_advice(advice, sizeof advice, c, planned, (size_t)share, model);
        fprintf(out, "does not fit\n    %s\n", advice);
        if (!some) print_strategy(c, &fullest->mesh, share, out);
    }
}

static void print_fits(const Config *c, const Stages *stages, FILE *out) {
    static const struct {
        PlanGpu gpu;
        int gigabytes;
    } common[] = {{GPU_H100, 80}, {GPU_H200, 141}};
    const Mesh *mesh = &stages->fullest->mesh;
    char name[32];
    if (c->plan_gpu != GPU_H100 && c->plan_gpu != GPU_H200 &&
        config_choice("plan-gpu", (int)c->plan_gpu, name, sizeof name)) {
        double share = gpu_room(c->plan_gpu, c, mesh);
        fprintf(out, "  %s (%.1f GiB for the plan): ", name, share / GIB);
        print_fit(c, stages, share, out);
    } else {
        for (size_t i = 0; i < sizeof common / sizeof *common; i++) {
            double share = gpu_room(common[i].gpu, c, mesh);
            fprintf(out, "  a GPU of %3d GB (%.1f GiB for the plan): ", common[i].gigabytes, share / GIB);
            print_fit(c, stages, share, out);
        }
    }
    if (device_kind()->own_memory) return;
    fprintf(out, "    (approximate: only build/train_gpt --plan includes the workspaces of GPU ops)\n");
}

// --- summary: bytes between nodes ---------------------------------------------------------------

// Returns the GB that a node sends to other nodes per step, without padding. Assumes that stages on
// the same node have equal sizes.
static double preset_egress(const StagePlan *s, const GradFormat *grad, const WeightFormat *weight) {
    const BucketLayout *plan = layout_of(s);
    WireFormula formula = traffic_formula(&s->traffic, grad, weight);
    double matrices = (formula.grad_inter + formula.weight_inter) * plan->options.per_node;
    double tail_bytes = (codec_info(grad->tail_codec).bits + codec_info(CODEC_BF16).bits) / 8.0;
    double nodes = plan->options.nodes, parts = (double)s->mesh.per_node / plan->options.per_node;
    return parts * (matrices + (double)plan->tail_parameters * tail_bytes * (nodes - 1) / nodes) / 1e9;
}

static void print_presets(const StagePlan *s, FILE *out) {
    const GradFormat fp32 = {.intra_codec = CODEC_FP32, .inter_codec = CODEC_FP32, .tail_codec = CODEC_FP32};
    const GradFormat bf16 = {.intra_codec = CODEC_BF16, .inter_codec = CODEC_BF16, .tail_codec = CODEC_BF16};
    // The same as configs/sdp4bit.args.
    const GradFormat four = {.intra_codec = CODEC_INT8,
                             .inter_codec = CODEC_INT4,
                             .intra_group = 128,
                             .inter_group = 128,
                             .tail_codec = CODEC_BF16,
                             .transform = TRANSFORM_HADAMARD};
    const WeightFormat plain = {.codec = CODEC_BF16};
    const WeightFormat differences = {.codec = CODEC_INT4, .group = 2048, .difference = true};
    double most = preset_egress(s, &fp32, &plain), less = preset_egress(s, &bf16, &plain);
    double least = preset_egress(s, &four, &differences);
    fprintf(out, "    %-30s %8.2f\n", "fp32 gradients, bf16 weights", most);
    fprintf(out, "    %-30s %8.2f\n", "bf16 gradients, bf16 weights", less);
    fprintf(out, "    %-30s %8.2f  (%.1f and %.1f times less)\n", "SDP4Bit", least, most / least,
            less / least);
}

// Returns the maximum over nodes of the bytes sent per step to pipeline stages on other nodes. With
// several chunks per stage, the last stage also sends to the first.
static double pipeline_egress(const Config *c, const Mesh *mesh) {
    int stage = mesh->pp.stride, ranks = stage < mesh->per_node ? stage : mesh->per_node;
    int nodes_in_line = stage < mesh->per_node ? mesh->nodes : mesh->pp.size;
    int chunks = config_pipeline_chunks(c);
    double forward = parts_hidden_bytes(c, mesh, FORWARD), backward = parts_hidden_bytes(c, mesh, BACKWARD);
    // Of two nodes, one sends a chunk less in one direction.
    double most = chunks * (forward + backward), fewer = fmin(forward, backward);
    if (mesh->pp.size == 1 || nodes_in_line == 1) return 0;
    return (nodes_in_line > 2 ? most : most - fewer) * ranks * c->micro_batches;
}

static void print_egress(const char *what, double bytes, FILE *out) {
    if (bytes > 0) fprintf(out, "    %-30s %8.2f\n", what, bytes / 1e9);
}

static void print_data_parallel(const Config *c, const StagePlan *s, FILE *out) {
    const BucketLayout *plan = layout_of(s);
    const GradFormat *grad = zero_grad_format(s->zero, true);
    const char *whose = is_model_parallel(&s->mesh) ? "data-parallel " : "";
    WireBytes bytes = traffic_of_step(&s->traffic, grad, zero_weight_format(s->zero));
    if (c->local_steps > 1 && !c->replica_group && s->mesh.nodes == 1)
        fprintf(out, "  --local-steps needs two or more nodes to train, but this plan has one\n");
    if (s->mesh.replica_groups.size > 1) {
        fprintf(out, "  GB out of each node per step, mean of %d steps\n", c->local_steps);
        print_egress("this run", node_egress(&s->mesh, &bytes), out);
    } else if (plan->dp == 1 && !c->replica_group) {
        fprintf(out, "  a single %srank sends nothing and quantizes nothing\n", whose);
    } else if (plan->options.nodes == 1) {
        if (plan->dp == 1) return;
        fprintf(out, "  no %straffic between nodes: the %d %sranks are on one node\n", whose, plan->dp,
                whose);
        if (c->quantized_gradients) {
            int inside = codec_info(grad->intra_codec).bits;
            int between = codec_info(grad->inter_codec).bits;
            fprintf(out, "    gradients are sent in %d bits inside the node; ", inside);
            fprintf(out, "%d bits are used only between nodes\n", between);
        }
    } else {
        fprintf(out, "  GB out of each node per step\n");
        print_presets(s, out);
        print_egress("this run", node_egress(&s->mesh, &bytes), out);
    }
}

static void print_between(const Config *c, const StagePlan *s, FILE *out) {
    const Mesh *mesh = &s->mesh;
    int T = mesh->tp.size, per_node = mesh->per_node;
    int ranks = mesh->pp.stride < per_node ? mesh->pp.stride : per_node;
    double pipeline = pipeline_egress(c, mesh), tied = pipeline > 0 ? parts_words_bytes(c, mesh) * ranks : 0;
    double tensor = 0;
    if (T > per_node)
        tensor = (parts_tensor_bytes(c, mesh) * c->micro_batches + parts_momentum_bytes(mesh, s->zero)) *
                 (T - per_node) / (T - 1) * per_node;
    print_data_parallel(c, s, out);
    if (pipeline + tensor > 0) fprintf(out, "  GB out of a node per step, between parts of the model\n");
    print_egress("pipeline", pipeline, out);
    print_egress("tied embedding", tied, out);
    print_egress("tensor parallelism", tensor, out);
    if (tensor > 0) {
        fprintf(out,
                "    tensor parallelism needs fast links; --tensor-model-parallel-size %d keeps it "
                "inside a node\n",
                s->mesh.per_node);
    }
}

bool plan_report(const Config *config, const Mesh *mesh, FILE *out, Error *err) {
    assert(config && mesh && out);
    Stages stages;
    if (!gpu_check_fp8(config, err)) return false;
    bool ok = plan_stages(&stages, config, mesh, err);
    if (ok) {
        const StagePlan *s = stages.fullest;
        print_model(config, &stages, out);
        print_parts(config, &stages, out);
        print_layout(config, s, out);
        fprintf(out, "memory per rank");
        print_whose(s, out);
        memory_plan_print(&s->memory_plan, layout_of(s)->parameters + s->frozen.own, out);
        fprintf(out, "  not in the plan, but reported in the log of a run: %s\n", device_kind()->beside_plan);
        print_wire(config, s, out);
        print_parts_wire(config, s, out);
        fprintf(out, "summary\n");
        print_gib(s, out);
        print_fits(config, &stages, out);
        if (config->optimizer_disk_offload) plan_disk_report(config, &s->mesh, s->zero, out);
        print_between(config, s, out);
        if (s->chunks) plan_groups_report(config, s->chunks, out);
        if (config->plan_network > 0) plan_time_report(config, &s->mesh, out);
    }
    stages_free(&stages);
    return ok;
}
