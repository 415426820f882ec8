// Predicted step time of each preset, for --plan: see plan_report.h.
#include "llmc/plan/plan_report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/config/config_roles.h"
#include "llmc/model/gpt.h"
#include "llmc/plan/step_time.h"
#include "llmc/plan/traffic.h"

// --- load of one step of one rank -----------------------------------------------------------

// Memory traffic in bytes per element: AdamW on the shard; gradient norm and new weights after
// backward; quantization, which overlaps with backward. The last two are fitted to measured step
// times (dev/bench/README.md).
enum { ADAMW_BYTES = 30, TAIL_BYTES = 12, QUANTIZE_BYTES = 12 };
// AdamW on the host with 16 cores per GPU: memory traffic in bytes per element, and rate in bytes
// per ms (dev/bench/results/strategies_1gpu.json).
enum { HOST_ADAMW_BYTES = 32 };
static const double HOST_MEMORY = 8.2e7;
// Bytes that AdamW and Muon read and write per element if the state is on disk.
enum { DISK_ADAMW_BYTES = 24, DISK_MUON_BYTES = 16, DISK_MUON_BF16_BYTES = 12 };
// Products of a Newton-Schulz step, and the time in ms by which each exceeds the rate of large
// products. Fitted to models of 125M to 1.3B parameters on H200s and an H100 (dev/bench/NOTES.md).
enum { PRODUCTS_PER_STEP = 3 };
static const double PRODUCT_IDLE = 0.0078;
// Latency in ms of a tensor-parallel reduction or gather, with one kernel over peer memory and with
// NCCL (dev/bench/NOTES.md).
static const double PEER_MESSAGE = 0.016, NCCL_MESSAGE = 0.042;
// Cost of forward and backward in addition to GEMMs at full rate: memory traffic in bytes per
// element of a layer's input and per logit, and ms per layer lost in small GEMMs. Fitted to models
// of 125M to 1.3B parameters on H200s (dev/bench/README.md).
enum { LAYER_BYTES = 180, LOGIT_BYTES = 6 };
static const double LAYER_IDLE = 0.26;
// Memory traffic of FP8 in bytes per element of the tensors that are quantized: one read in bf16
// and two writes (codes and their transpose). Most absolute maxima come from the op before.
enum { FP8_BYTES = 4 };
// Memory traffic of quantized activations in bytes per element, to encode and decode: bf16 to fp32
// to codes and back (sdp4bit/activations.h).
enum { ACTIVATION_BYTES = 22 };
// Slowdown of compute by overlapping communication, which uses some SMs and memory bandwidth.
static const double BESIDE_MESSAGES = 1.02;

// Rates of lossless weight coding and decoding on an H200, in bytes per ms (dev/bench/NOTES.md).
static const double CODE_SPEED = 5.1e8, DECODE_SPEED = 6.1e8;

// Returns the size of losslessly coded weights relative to bf16, which is their maximum size.
static double lossless_share(const Config *c) { return c->plan_lossless_bits / 16; }


// Returns the bytes that the update of a rank's shard of a bucket reads and writes on disk.
static double disk_bytes(const Config *c, const Bucket *bucket) {
    int muon = c->exp_avg_dtype == MOMENT_BF16 ? DISK_MUON_BF16_BYTES : DISK_MUON_BYTES;
    int matrix = bucket->whole ? muon : DISK_ADAMW_BYTES;
    return (double)bucket->matrix_per_rank * matrix + (double)bucket->tail_per_rank * DISK_ADAMW_BYTES;
}

// Returns the bytes per ms that a rank reads and writes on disk.
static double disk_rate(const Config *c, const Mesh *mesh) {
    return c->plan_disk_bandwidth * 1e6 / mesh->per_node;
}

double plan_newton_schulz(const Config *c, const Zero *zero, double *all) {
    const BucketLayout *layout = zero_layout(zero);
    double most = 0;
    *all = 0;
    for (int r = 0; r < layout->dp; r++) {
        double flops = (double)layout->rank_work[r] * c->muon_num_ns_steps;
        *all += flops;
        most = fmax(most, flops);
    }
    return zero_state_layout(zero)->dp == 1 ? *all : most;
}

// Returns the bytes per ms that a rank sends to the others of its tensor-parallel group.
static double tensor_rate(const Mesh *mesh, Rates rates) {
    return mesh->tp.size <= mesh->per_node ? rates.inside : rates.between;
}

// Returns a bucket's share of the elements of all matrices with one owner, which is also its share
// of Newton-Schulz, because layers are alike.
static double whole_share(const Zero *zero, int b) {
    const BucketLayout *layout = zero_layout(zero);
    double matrices = 0;
    if (!layout->bucket[b].whole) return 0;
    for (int i = 0; i < layout->buckets; i++)
        matrices += layout->bucket[i].whole ? (double)layout->bucket[i].matrix_elements : 0;
    return (double)layout->bucket[b].matrix_elements / matrices;
}

// Returns the time of the products of Newton-Schulz in bucket b, on the rank with the most work. A
// layer has the matrices of queries, keys and values (one matrix if they are not split), the
// projection, fc1 and fc2.
static double products_time(const Config *c, const Mesh *mesh, const Zero *zero, int b, Rates rates) {
    double share = whole_share(zero, b), all, most;
    if (share == 0) return 0;
    most = plan_newton_schulz(c, zero, &all);
    double matrices = (c->muon_no_split_qkv ? 4.0 : 6.0) * c->num_layers / mesh->pp.size;
    double idle = matrices * c->muon_num_ns_steps * PRODUCTS_PER_STEP * PRODUCT_IDLE;
    return share * (most / rates.matmul + most / all * idle);
}

// Returns the time in which Muon gathers the momentum of bucket b from tensor-parallel ranks.
static double momentum_time(const Mesh *mesh, const Zero *zero, int b, Rates rates) {
    if (mesh->tp.size == 1) return 0;
    return whole_share(zero, b) * parts_momentum_bytes(mesh, zero) / tensor_rate(mesh, rates);
}

static const double HOST_ADAMW = HOST_ADAMW_BYTES / HOST_MEMORY;  // in ms per element

// Returns the time of the optimizer step of bucket b. products: result of products_time. Muon's
// elementwise part takes about as much memory traffic as AdamW.
static double update_time(const Config *c, const Mesh *mesh, const Zero *zero, int b, double products,
                          Rates rates) {
    const Bucket *state = &zero_state_layout(zero)->bucket[b];
    double elements = (double)bucket_shard(state);
    double muon = products + momentum_time(mesh, zero, b, rates);
    if (c->optimizer_disk_offload)
        return fmax(elements * HOST_ADAMW + muon, disk_bytes(c, state) / disk_rate(c, mesh));
    return elements * (c->optimizer_cpu_offload ? HOST_ADAMW : ADAMW_BYTES / rates.memory) + muon;
}

// Sets the parts of a bucket's gradients whose chunks each layer completes, the last layer first.
static void parts_sent(const BucketLayout *plan, const Bucket *bucket, const GradFormat *format, int layers,
                       double *sent) {
    int chunks = layout_chunks(plan, bucket, format);
    int64_t lo, hi, left = bucket->matrix_per_rank;
    for (int i = 0; i < layers && bucket->matrix_per_rank > 0; i++) {
        int first = layout_first_complete(plan, bucket, chunks, bucket->end_unit - 1 - i);
        if (first < chunks) layout_chunk(plan, bucket, chunks, first, &lo, &hi);
        else lo = bucket->matrix_per_rank;
        sent[i] = (double)(left - lo) / (double)bucket->matrix_per_rank;
        left = lo;
    }
}

// sent: (layers of the bucket) receives the parts of its gradients.
static BucketLoad load_of_bucket(const StepTraffic *traffic, int b, const Mesh *mesh, const Zero *zero,
                                 Rates rates, double *sent) {
    const BucketLayout *plan = traffic->plan;
    const Bucket *bucket = &plan->bucket[b];
    const WeightFormat *weight = zero_weight_format(zero);
    WireBytes once = traffic_of_update(traffic, b, zero_grad_format(zero, true), weight);
    WireBytes forward = traffic_of_gather(traffic, b, false, weight);
    WireBytes backward = traffic_of_gather(traffic, b, true, weight);
    bool words = bucket->first_unit == 0 && traffic_has_words(traffic->config, mesh);
    double products = products_time(traffic->config, mesh, zero, b, rates);
    BucketLoad load = {
        .layers = bucket->end_unit - bucket->first_unit - words,
        .reductions = traffic->trips[b].reductions,
        .grad_inside = (double)once.grad_intra / rates.inside,
        .grad_between = (double)once.grad_inter / rates.between,
        .sent = sent,
        .weight_between = (double)once.weight_inter / rates.between,
        .weight_inside = (double)once.weight_intra / rates.inside,
        .gathered = traffic->trips[b].forward + traffic->trips[b].backward > 0,
        .update = update_time(traffic->config, mesh, zero, b, products, rates),
        .products = products,
        .exchange = (double)zero_exchange_bytes(zero, b, zero_grad_format(zero, true)) / rates.between,
    };
    parts_sent(plan, bucket, zero_grad_format(zero, true), load.layers, sent);
    load.forward_gather = (double)forward.weight_inter / rates.between +
                          (double)forward.weight_intra / rates.inside;
    load.backward_gather = (double)backward.weight_inter / rates.between +
                           (double)backward.weight_intra / rates.inside;
    return load;
}

// Adds the time of lossless weight coding. All buckets are updated and coded before the first one
// is sent, because the payload sizes are not known earlier.
static void code_weights(StepLoad *load, const BucketLayout *plan, double share) {
    double before = 0;
    for (int b = 0; b < load->buckets; b++) {
        BucketLoad *bucket = &load->bucket[b];
        double bytes = (double)(plan->bucket[b].matrix_elements * (int64_t)sizeof(floatX));
        before += bucket->update + bytes / plan->dp / CODE_SPEED;
        bucket->update = 0;
        bucket->weight_between *= share;
        bucket->weight_inside = bucket->weight_inside * share + bytes / DECODE_SPEED;
    }
    load->bucket[0].update = before;
}

// Compute times of one micro-batch in ms, forward and backward together, on a model-parallel rank.
// Full recomputation adds a second forward pass of the layers.
typedef struct PassTimes {
    double layers, head;
} PassTimes;

static bool recomputes(const Config *c) { return c->recompute_granularity == RECOMPUTE_FULL; }

// Widths of a layer's matrices beside the hidden size: rows of QKV, columns of the projection, rows
// of fc1, columns of fc2.
typedef struct LayerWidths {
    double QKV, A, up, F;
} LayerWidths;
static LayerWidths layer_widths(const Config *c) {
    double A = (double)c->num_attention_heads * c->kv_channels, F = c->ffn_hidden_size;
    double keys = (double)config_query_groups(c) * c->kv_channels;
    return (LayerWidths){.QKV = A + 2 * keys, .A = A, .up = c->swiglu ? 2 * F : F, .F = F};
}
// Returns the number of elements of a layer's matrices.
static double layer_weights(const Config *c) {
    LayerWidths w = layer_widths(c);
    return c->hidden_size * (w.QKV + w.A + w.up + w.F);
}

// Returns the floating-point operations of forward. Frozen weights only shorten backward.
static double forward_flops(const Config *c, double rows) {
    Config plain = *c;
    plain.lora_rank = 0;
    return megatron_flops(&plain, rows) / 3 + 2 * rows * c->seq_length * config_lora_parameters(c);
}

// Returns the bytes that the adapters and the dequantization of frozen weights read and write in
// one layer and micro-batch (not measured). An adapter's rank is small, so that its products take
// the time of reading and writing bf16 activations. Forward reads x for x A^T, writes the adapter's
// output, and reads it to add it. Backward computes x A^T again, reads dy for dx and dB and x for
// dA, writes its part of dx, and reads it to add it. Dropout of x is left out.
static double lora_bytes(const Config *c) {
    enum { FORWARD_IN = 2, FORWARD_OUT = 4, BACKWARD_IN = 8, BACKWARD_OUT = 4 };
    const double code_bytes[] = {
        [LORA_BASE_INT8] = 1 + 2.0 / FROZEN_GROUP, [LORA_BASE_NF4] = 0.5 + 2.0 / FROZEN_GROUP};
    LoraWidths w = config_lora_widths(c);
    double tokens = (double)c->micro_batch_size * c->seq_length, forwards = 1 + recomputes(c), bytes;
    if (!c->lora_rank) return 0;
    bytes = tokens * (forwards * (FORWARD_IN * w.inputs + FORWARD_OUT * w.outputs) + BACKWARD_IN * w.inputs +
                      BACKWARD_OUT * w.outputs);
    if (c->lora_base_format == LORA_BASE_BF16) return bytes;
    return bytes + (forwards + 1) * layer_weights(c) * (code_bytes[c->lora_base_format] + 2);
}

// Returns the time that FP8 saves in the linear layers of one micro-batch, of all layers and ranks
// together, less the time of quantization. x and dy are quantized for each micro-batch, and x once
// more by full recomputation; weights once per step.
static double saved_by_fp8(const Config *c, Rates rates) {
    if (!config_fp8_on(c)) return 0;
    int again = recomputes(c);
    LayerWidths w = layer_widths(c);
    double tokens = (double)c->micro_batch_size * c->seq_length, C = c->hidden_size,
           weights = layer_weights(c);
    double x = tokens * (C + w.A + C + w.F), dy = tokens * (w.QKV + C + w.up + C);
    double quantized = (1 + again) * x + dy + weights / c->micro_batches;
    double flops = (6 + 2 * again) * tokens * weights;
    return config_fp8_layers(c) *
           (flops / rates.matmul - flops / rates.fp8 - quantized * FP8_BYTES / rates.memory);
}

static PassTimes computed_passes(const Config *c, const Mesh *mesh) {
    Rates rates = rates_of(c, 1);
    double rows = c->micro_batch_size, tokens = rows * c->seq_length, L = c->num_layers;
    double ranks = (double)mesh->tp.size * mesh->pp.size;
    Config body = *c;
    body.vocab_size_padded = 0;
    // The causal mask skips half of the attention scores, and windows skip more.
    double skipped = L * c->seq_length - config_visible_keys(c);
    double masked = 12 * tokens * skipped * c->kv_channels * c->num_attention_heads;
    double products = megatron_flops(&body, rows), logits = megatron_flops(c, rows) - products;
    double executed = products - masked;
    if (recomputes(c)) executed += forward_flops(&body, rows) - masked / 3;
    double again = recomputes(c) ? 4.0 / 3 : 1;
    double bytes = L * (again * tokens * c->hidden_size * LAYER_BYTES + lora_bytes(c));
    return (PassTimes){
        .layers = (executed / rates.matmul + bytes / rates.memory - saved_by_fp8(c, rates)) / ranks +
                  again * L / mesh->pp.size * LAYER_IDLE,
        .head = (logits / rates.matmul + tokens * c->vocab_size_padded * LOGIT_BYTES / rates.memory) / ranks,
    };
}

// Returns computed_passes, scaled to --plan-step-ms or --plan-tflops if one is given.
static PassTimes pass_times(const Config *c, const Mesh *mesh) {
    PassTimes t = computed_passes(c, mesh);
    double ms = t.layers + t.head, given = ms;
    if (c->plan_step_ms > 0) given = c->plan_step_ms / c->micro_batches;
    else if (c->plan_tflops > 0) {
        double rows = c->global_batch_size, flops = megatron_flops(c, rows);
        if (recomputes(c)) flops += forward_flops(c, rows);
        given = flops / mesh->world.size / c->micro_batches / (c->plan_tflops * 1e9);
    }
    return (PassTimes){t.layers * given / ms, t.head * given / ms};
}

// Distributes the compute time over layers and LM head, and over forward and backward. Backward
// takes twice as long as forward, less with LoRA, and one forward pass more with full
// recomputation. The pipeline bubble stretches both.
static void distribute_compute(StepLoad *load, const Config *c, const Mesh *mesh, Rates rates) {
    Config body = *c;
    body.vocab_size_padded = 0;
    PassTimes one = pass_times(c, mesh);
    double layers = 0;
    double chunks = config_pipeline_chunks(c), idle = (mesh->pp.size - 1) / chunks;
    double stretch = c->plan_step_ms > 0 ? 1 : (load->micro_batches + idle) / load->micro_batches;
    for (int b = 0; b < load->buckets; b++) layers += load->bucket[b].layers;
    double layer = one.layers * stretch / layers;
    load->forward = layer / (megatron_flops(&body, 1) / forward_flops(&body, 1) + recomputes(c));
    load->backward = layer - load->forward;
    load->head = one.head * stretch;
}

// Returns the time to encode and decode the quantized messages of a micro-batch between stages.
static double coding_time(const Config *c, const Mesh *mesh, Rates rates) {
    double bytes = 0, elements = (double)c->micro_batch_size * c->seq_length * c->hidden_size;
    for (int direction = FORWARD; direction <= BACKWARD; direction++) {
        if (codec_grouped(messages_format(c, (PassDirection)direction).codec)) bytes += ACTIVATION_BYTES;
    }
    if (c->sequence_parallel) elements /= mesh->tp.size;
    return config_pipeline_chunks(c) * elements * bytes / rates.memory;
}

// Returns the time of the codes of a quantized reduction or gather. Both encode and decode (N, C).
static double tensor_coding_time(const Config *c, Rates rates) {
    double elements = (double)c->micro_batch_size * c->seq_length * c->hidden_size;
    return c->quantized_tensor_parallel ? elements * ACTIVATION_BYTES / rates.memory : 0;
}

// Returns the time of a micro-batch's tensor-parallel messages. All of it is exposed; the time that
// row blocks hide was not measured. Only messages in bf16 use peer memory, and only
// --quantized-tensor-parallel has to encode and decode them.
static double tensor_time(const Config *c, const Mesh *mesh, Rates rates) {
    bool peer = c->tp_comm_backend != TP_COMM_NCCL && mesh->tp.size <= mesh->per_node &&
                mesh->tp.size <= COMM_DIRECT_RANKS && !c->quantized_tensor_parallel;
    TensorMessages m = parts_tensor_messages(c, mesh);
    double row = (peer ? PEER_MESSAGE : NCCL_MESSAGE) + tensor_coding_time(c, rates);
    return parts_tensor_bytes(c, mesh) / tensor_rate(mesh, rates) + m.rows * row +
           (m.codes + m.maxima) * NCCL_MESSAGE;
}

// Adds exposed communication of tensor and pipeline parallelism, at the speed of the slowest link
// involved. Pipeline messages overlap with compute, except for the time by which they exceed it,
// and for one message through all stages in each direction while the pipeline fills and drains. The
// exchange of the tied embedding's gradient follows backward.
static void add_waits(StepLoad *load, const Config *c, const Mesh *mesh, Rates rates) {
    int stages = mesh->pp.size;
    double line = stages * mesh->pp.stride <= mesh->per_node ? rates.inside : rates.between;
    if (mesh->tp.size > 1) load->waits = tensor_time(c, mesh, rates);
    if (stages == 1) return;
    double forward = parts_hidden_bytes(c, mesh, FORWARD) / line, code = coding_time(c, mesh, rates);
    double backward = parts_hidden_bytes(c, mesh, BACKWARD) / line;
    double hops = config_pipeline_chunks(c) * fmax(forward, backward);
    double passes = step_compute(load) / load->micro_batches + load->waits;
    double once = (stages - 1) * (forward + backward) + parts_words_bytes(c, mesh) / line;
    load->waits += fmax(0, hops - passes) + once / load->micro_batches + code;
}

// Adds the slowdown by overlapping communication and the cost of quantization. elements: number of
// gradient elements of the rank.
static void slow_passes(StepLoad *load, double elements, Rates rates) {
    double layers = 0;
    for (int b = 0; b < load->buckets; b++) layers += load->bucket[b].layers;
    load->forward *= BESIDE_MESSAGES;
    load->backward *= BESIDE_MESSAGES;
    load->head *= BESIDE_MESSAGES;
    load->backward += elements / layers * QUANTIZE_BYTES / rates.memory / load->micro_batches;
}

// --- rows of the table ----------------------------------------------------------------------

typedef struct Row {
    double ms;          // step time; 0: the preset is incompatible with this run
    double compute_ms;  // forward and backward without communication
    double exposed_ms;  // exposed communication
    double gigabytes;   // GB that each node sends to other nodes
    double memory;      // planned GPU memory in bytes
    double error;       // relative error of the reduced gradient
} Row;

static Row row_of(const Config *c, const Mesh *mesh, const Zero *zero) {
    StepTraffic traffic = traffic_make(c, mesh, zero);
    const BucketLayout *plan = traffic.plan;
    const GradFormat *grad = zero_grad_format(zero, true);
    bool lossless = plan->dp > 1 && format_is_lossless(zero_weight_format(zero));
    Rates rates = rates_of(c, mesh->per_node);
    StepLoad load = {.buckets = plan->buckets,
                     .micro_batches = c->micro_batches,
                     .burst = c->plan_network_burst * 1e6 / (rates.between * mesh->per_node),
                     .memory = (double)plan->arena_elements * TAIL_BYTES / rates.memory,
                     .waits_for_update = parts_momentum_bytes(mesh, zero) > 0};
    load.bucket = xcalloc((size_t)load.buckets, sizeof(BucketLoad), "times of buckets");
    double *parts = xcalloc((size_t)plan->units, sizeof *parts, "times of buckets");
    for (int b = 0; b < load.buckets; b++)
        load.bucket[b] = load_of_bucket(&traffic, b, mesh, zero, rates, parts + plan->bucket[b].first_unit);
    distribute_compute(&load, c, mesh, rates);
    add_waits(&load, c, mesh, rates);
    double alone = step_compute(&load);
    if (plan->dp > 1) slow_passes(&load, (double)plan->arena_elements, rates);
    if (lossless) code_weights(&load, plan, lossless_share(c));
    WireBytes sent = traffic_of_step(&traffic, grad, zero_weight_format(zero));
    double weights = (double)sent.weight_inter * (lossless ? lossless_share(c) : 1);
    Row row = {
        .ms = step_time(&load),
        .compute_ms = alone,
        .gigabytes = ((double)sent.grad_inter + weights) * mesh->per_node / 1e9,
        .error = preset_gradient_error(grad, plan->options.per_node > 1, mesh->nodes > 1),
    };
    if (c->local_steps > 1) row.ms = step_time_local(&load, row.ms, c->local_steps, c->local_steps_delay);
    row.exposed_ms = fmax(0, row.ms - step_time_alone(&load));
    free(load.bucket);
    free(parts);
    traffic_free(&traffic);
    return row;
}

// Builds the mesh for a config, with replica groups if it uses local steps.
static bool place(Mesh *mesh, const Config *c, const Mesh *like) {
    Error err;
    if (config_conflict(c)) return false;
    if (!mesh_build(mesh, like->world.rank, like->world.size, NULL, like->per_node, like->tp.size,
                    like->pp.size, &err))
        return false;
    if (c->sharding == SHARD_PARAMETERS) mesh_shard_weights(mesh, c->shard_scope == SHARD_IN_WORLD);
    return c->local_steps == 1 || c->replica_group || mesh_make_replica_groups(mesh, &err);
}

static Row plan_row(const Config *c, const Mesh *like) {
    MemoryPlan memory_plan = {0};
    Mesh mesh;
    Error err;
    Row row = {0};
    if (!place(&mesh, c, like)) return row;
    Zero *zero = gpt_plan(NULL, c, &mesh, &memory_plan, &err);
    if (zero) row = row_of(c, &mesh, zero);
    row.memory = (double)memory_plan_total(&memory_plan);
    memory_plan_free(&memory_plan, NULL);
    zero_free(zero);
    return row;
}

static double tokens_per_second(const Config *c, const Row *row) {
    return (double)c->global_batch_size * c->seq_length / row->ms * 1e3;
}

static void print_row(const Config *c, const char *name, const Row *row, FILE *out) {
    fprintf(out, "  %-16s", name);
    if (row->ms == 0) {
        fprintf(out, " %10s\n", "incompatible with this run's flags");
        return;
    }
    fprintf(out, " %10.3f %11.1f %11.1f %12.0f %10.1f %%\n", row->gigabytes, row->ms, row->exposed_ms,
            tokens_per_second(c, row), 100 * row->error);
}

// Prints the run with one sharding strategy.
static void print_strategy(Config c, Sharding sharding, bool offload, const char *name, const Mesh *mesh,
                           FILE *out) {
    c.sharding = sharding;
    c.optimizer_cpu_offload = offload;
    c.optimizer_disk_offload = NULL;
    Row row = plan_row(&c, mesh);
    fprintf(out, "  %-27s", name);
    if (row.ms == 0) fprintf(out, " %11s\n", "incompatible with this run's flags");
    else
        fprintf(out, " %11.1f %11.1f %12.0f %12.2f\n", row.ms, row.exposed_ms, tokens_per_second(&c, &row),
                row.memory / 0x1p30);
}

static void print_strategies(const Config *config, const Mesh *mesh, FILE *out) {
    char name[32];
    fprintf(out, "  %-27s %11s %11s %12s %12s\n", "this run by strategy", "ms a step", "exposed ms",
            "tokens/s", "GiB a GPU");
    for (int i = 0; config_choice("data-parallel-sharding-strategy", i, name, sizeof name); i++)
        print_strategy(*config, (Sharding)i, false, name, mesh, out);
    print_strategy(*config, SHARD_PARAMETERS, true, "optim_grads_params, offload", mesh, out);
}

// Recommends one of the presets that fit into GPU memory. If none fits, chooses among all presets;
// the memory section of the report then gives advice.
static void print_choice(const Config *config, const Row *row, double room, FILE *out) {
    double ms[PRESETS], held[PRESETS];
    for (int i = 0; i < PRESETS; i++) {
        ms[i] = row[i].ms;
        held[i] = row[i].memory <= room ? ms[i] : 0;
    }
    int fastest = preset_choose(ms), best = preset_choose(held);
    if (best < 0) best = fastest;
    if (best < 0) return;
    Config c = preset_config(config, &presets[best]);
    bool direct = presets[best].weight_bits > 0 && c.weight_quantization_method == WEIGHT_DIRECT;
    fprintf(out, "  use PRESET=%s: %s%s\n", presets[best].name, presets[best].flags,
            direct ? " --weight-quantization-method direct" : "");
    fprintf(out, "    %s; %.1f times as fast as the baseline\n", presets[best].reason,
            row[0].ms / row[best].ms);
    if (fastest != best)
        fprintf(out, "    not %s, which needs %.1f of the GPU's %.1f GiB\n", presets[fastest].name,
                row[fastest].memory / 0x1p30, room / 0x1p30);
    if (best + 1 < PRESETS)
        fprintf(out, "    presets further down affect training more, but save too little time\n");
}

static void print_head(const Config *c, int world, const Row *run, FILE *out) {
    Rates rates = rates_of(c, 1);
    fprintf(out, "step time over %g Gb/s between nodes, %.0f Gb/s per GPU inside a node (predicted)\n",
            c->plan_network, 8 * rates.inside / 1e6);
    fprintf(out, "  forward and backward take %.1f ms per step", run->compute_ms);
    if (c->plan_step_ms > 0) fprintf(out, " (--plan-step-ms)\n");
    else
        fprintf(out, ": %.4g TFLOP/s per GPU (%s)\n",
                megatron_flops(c, c->global_batch_size) / world / run->compute_ms / 1e9,
                c->plan_measure      ? "--plan-measure"
                : c->plan_tflops > 0 ? "--plan-tflops"
                                     : "--plan-gpu");
    if (c->tensor_model_parallel_size > 1 || c->pipeline_model_parallel_size > 1)
        fprintf(out,
                "  GB of gradients and weights; exposed messages include tensor and pipeline parallelism\n");
    fprintf(out, "  %-16s %10s %11s %11s %12s %12s\n", "", "GB out of", "ms a step", "exposed", "tokens/s",
            "error of the");
    fprintf(out, "  %-16s %10s %11s %11s %12s %12s\n", "preset", "each node", "", "messages", "", "gradient");
}

// Returns where the bandwidth of the disk comes from.
static const char *disk_source(const Config *c) {
    int rows;
    const char *name = "plan-disk-bandwidth";
    const Option *table = config_options(&rows), *row = options_find(table, rows, name, strlen(name));
    if (c->plan_measure) return "--plan-measure";
    return c->plan_disk_bandwidth == atof(row->initial) ? "default of --plan-disk-bandwidth"
                                                        : "--plan-disk-bandwidth";
}

void plan_disk_report(const Config *config, const Mesh *mesh, const Zero *zero, FILE *out) {
    const BucketLayout *layout = zero_state_layout(zero);
    double bytes = 0, host = (double)layout->shard_elements * HOST_ADAMW;
    for (int b = 0; b < layout->buckets; b++) bytes += disk_bytes(config, &layout->bucket[b]);
    double disk = bytes / disk_rate(config, mesh);
    fprintf(out,
            "  disk: the update reads and writes %.2f GB per step and rank, which takes %.1f ms at %.4g GB/s "
            "per node (%s)\n",
            bytes / 1e9, disk, config->plan_disk_bandwidth, disk_source(config));
    fprintf(
        out,
        "    up to %.1f ms per step more than --optimizer-cpu-offload; overlaps with the next forward pass\n",
        fmax(0, disk - host));
}

void plan_time_report(const Config *config, const Mesh *mesh, FILE *out) {
    Row row[PRESETS], run = plan_row(config, mesh);
    for (int i = 0; i < PRESETS; i++) {
        Config other = preset_config(config, &presets[i]);
        row[i] = plan_row(&other, mesh);
    }
    print_head(config, mesh->world.size, &run, out);
    for (int i = 0; i < PRESETS; i++) print_row(config, presets[i].name, &row[i], out);
    print_row(config, "this run", &run, out);
    print_choice(config, row, gpu_room(config->plan_gpu, config, mesh), out);
    print_strategies(config, mesh, out);
}
