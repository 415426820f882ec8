// Log lines of startup, steps and intervals: see run.h. Called by train_gpt.c.
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/version.h"
#include "llmc/ops.h"
#include "llmc/run/run.h"
#include "llmc/state/stats.h"

// --- the start -----------------------------------------------------------------------------------

static const char *truth(bool yes) { return yes ? "True" : "False"; }

static const char *plural(int count) { return count == 1 ? "" : "s"; }

// Logs how the ranks are divided into nodes and replica groups.
static void report_nodes(Run *run) {
    const Mesh *mesh = &run->mesh;
    const char *by_flag = run->config.gpus_per_node ? " (--gpus-per-node)" : "";
    char each[32] = "one node", shape[80];
    if (mesh->rail.size > 1) snprintf(each, sizeof each, "each of %d nodes", mesh->rail.size);
    snprintf(shape, sizeof shape, "%d node%s x %d data-parallel rank%s", mesh->rail.size,
             plural(mesh->rail.size), mesh->node.size, plural(mesh->node.size));
    if (mesh->replica_groups.size > 1) {
        log_line(run->log,
                 "using %d nodes x %d data-parallel rank%s%s; nodes train independently, with an outer sync "
                 "of each bucket every %d steps",
                 mesh->replica_groups.size, mesh->dp.size, plural(mesh->dp.size), by_flag,
                 run->config.local_steps);
    } else if (run->config.replica_group) {
        log_line(run->log,
                 "replica group %s: %s%s, independent of other groups, with an outer sync of each chunk "
                 "every %d steps",
                 run->config.replica_group, shape, by_flag, run->config.local_steps);
    } else if (mesh->dp.size == mesh->world.size) {
        log_line(run->log, "using %s%s", shape, by_flag);
    } else {
        log_line(run->log, "using %d node%s%s; a data-parallel group has %d rank%s on %s", mesh->nodes,
                 plural(mesh->nodes), by_flag, mesh->node.size, plural(mesh->node.size), each);
    }
}

static void report_program(Run *run) {
    char libraries[512], backend[512];
    const Mesh *mesh = &run->mesh;
    version_libraries(libraries, sizeof libraries);
    device_libraries(backend, sizeof backend);
    log_line(run->log, "sdp4bit.c %s commit %s on %s (%s); %s", version_number(), version_commit(),
             device_name(run->device), backend, libraries);
    log_line(run->log,
             "using world size: %d, data-parallel size: %d, context-parallel size: 1 "
             "tensor-model-parallel size: %d, pipeline-model-parallel size: %d ",
             run->launch.size, mesh_data_ranks(mesh), mesh->tp.size, mesh->pp.size);
    report_nodes(run);
}

// Logs whether intra-node messages use copy engines or NCCL (--node-exchange). Warns if some ranks
// must use NCCL, because they slow down the whole job.
static void report_exchange(Run *run) {
    Error why;
    bool shared = zero_node_shares(run->zero, &why);
    int without = why.code != 0, ranks = run->launch.size;
    Peers world = run_peers(run, run->launch.world);
    const char *only_way = device_kind()->only_way;
    if (run->config.emulate_nodes && only_way) {
        log_line(run->log, "WARNING: --emulate-nodes has no effect: %s", only_way);
    }
    peers_all_reduce(world, &without, 1, MPI_INT, MPI_SUM);
    peers_agree(world, !why.code, &why, NULL);
    if (without == 0) {
        if (shared) log_line(run->log, "intra-node messages are fetched by the GPUs' copy engines");
    } else if (without < ranks) {
        log_line(run->log,
                 "WARNING: intra-node messages are fetched by the GPUs' copy engines, but %d of %d ranks use "
                 "NCCL: %s",
                 without, ranks, why.what);
    } else if (run->config.node_exchange == NODE_EXCHANGE_COPIES) {
        log_line(run->log, "WARNING: --node-exchange copies has no effect: %s", why.what);
    } else if (!only_way) {
        log_line(run->log, "intra-node messages use NCCL: %s", why.what);
    }
}

// Logs how tensor-parallel ranks communicate (--tp-comm-backend).
static void report_tensor_parallel(Run *run) {
    Error why = run->gpt->tp.not_direct;
    int without = why.code != 0, sharing = run->gpt->tp.shares_gpu;
    Peers world = run_peers(run, run->launch.world);
    if (!run->gpt->tp.peer) return;
    peers_all_reduce(world, &without, 1, MPI_INT, MPI_SUM);
    peers_all_reduce(world, &sharing, 1, MPI_INT, MPI_SUM);
    peers_agree(world, !why.code, &why, NULL);
    if (without == 0) {
        log_line(run->log, "tensor-parallel collectives%s use peer memory",
                 run->gpt->tp.coded ? " of evaluation" : "");
    } else if (without < run->launch.size) {
        log_line(run->log, "WARNING: tensor-parallel collectives of %d of %d ranks use NCCL: %s", without,
                 run->launch.size, why.what);
    } else if (run->config.tp_comm_backend == TP_COMM_PEER) {
        log_line(run->log, "WARNING: --tp-comm-backend peer has no effect: %s", why.what);
    } else if (!device_kind()->only_way) {
        log_line(run->log, "tensor-parallel collectives use NCCL: %s", why.what);
    }
    if (sharing > 0)
        log_line(run->log,
                 "WARNING: --tp-comm-backend peer is slow, because ranks share a GPU; use it only for tests");
}

static void report_batch(Run *run) {
    const Config *c = &run->config;
    if (!c->rampup_samples) {
        log_line(run->log, "setting number of micro-batches to constant %d", c->micro_batches);
        return;
    }
    log_line(run->log,
             "will use batch size rampup starting from global batch size %lld to global batch size %d "
             "with batch size increments %lld over %lld samples.",
             (long long)c->rampup_start, c->global_batch_size, (long long)c->rampup_increment,
             (long long)c->rampup_samples);
}

// Logs the number of parameters of each tensor- and pipeline-parallel rank, as Megatron-LM does,
// and sets run->parameters to the number of distinct parameters. With LoRA, also logs the numbers
// of trainable and frozen parameters.
static void report_parameters(Run *run) {
    const Mesh *mesh = &run->mesh;
    const BucketLayout *plan = zero_layout(run->zero);
    int64_t own[2] = {plan->parameters, plan->counted_parameters};
    int64_t *all = xcalloc(2 * (size_t)mesh->world.size, sizeof *all, "numbers of parameters");
    peers_all_gather(run_peers(run, run->launch.world), own, all, 2, MPI_INT64_T);
    run->parameters = 0;
    for (int i = 0; i < mesh->pp.size * mesh->tp.size; i++) {
        int t = i % mesh->tp.size, p = i / mesh->tp.size;
        const int64_t *of_rank = &all[2 * (p * mesh->tp.size * mesh->dp.size + t)];
        log_line(run->log, " > number of parameters on (tensor, pipeline) model parallel rank (%d, %d): %lld",
                 t, p, (long long)of_rank[0]);
        run->parameters += of_rank[1];
    }
    free(all);
    if (run->config.lora_rank) {
        log_line(run->log, "LoRA: %lld trainable parameters in adapters, %lld frozen parameters",
                 (long long)run->parameters, (long long)gpt_frozen_parameters(run->gpt).whole);
    }
}

static void report_fp8(Run *run) {
    const Config *c = &run->config;
    char format[16], recipe[16];
    if (!config_fp8_on(c)) return;
    config_choice("fp8-format", (int)c->fp8_format, format, sizeof format);
    config_choice("fp8-recipe", (int)c->fp8_recipe, recipe, sizeof recipe);
    log_line(run->log, "FP8: %s, %s scaling, linear layers of %d of %d transformer layers", format, recipe,
             config_fp8_layers(c), c->num_layers);
}

// Returns true if pipeline stages quantize messages in a direction.
static bool stages_send_codes(const Config *c) {
    return codec_grouped(messages_format(c, FORWARD).codec) ||
           codec_grouped(messages_format(c, BACKWARD).codec);
}

static void report_activations(Run *run) {
    const Config *c = &run->config;
    ActivationFormat forward = messages_format(c, FORWARD), backward = messages_format(c, BACKWARD);
    ActivationFormat tensor = tp_format(c);
    if (c->quantized_tensor_parallel) {
        log_line(run->log, "sums and gathers of tensor parallelism: %s, groups of %d",
                 codec_info(tensor.codec).name, tensor.group);
    }
    if (!c->quantized_activations) return;
    char groups[64] = "";
    if (stages_send_codes(c)) {
        snprintf(groups, sizeof groups, ", groups of %d, rounded %s", forward.group,
                 forward.rounding == ROUND_STOCHASTIC ? "stochastically" : "to nearest");
    }
    log_line(run->log, "activations between pipeline stages: %s, their gradients: %s%s",
             codec_info(forward.codec).name, codec_info(backward.codec).name, groups);
}

void report_start(Run *run) {
    const Config *c = &run->config;
    const Memory *memory = &run->memory;
    report_program(run);
    report_exchange(run);
    report_tensor_parallel(run);
    char notice[512];  // warning if attention uses a slower kernel
    op_attention_notice(c->seq_length, run->gpt->documents, gpt_unpacked(run->gpt, c), notice, sizeof notice);
    if (*notice) log_line(run->log, "%s", notice);
    log_line(run->log, "using torch.bfloat16 for parameters ...");
    if (run->launch.rank == 0) config_print(c, stdout);
    log_line(run->log, "Weight Quantization: %s, group size = %d, bits = %d", truth(c->quantized_weights),
             c->wq_group_size, c->weight_quantization_bits);
    log_line(run->log,
             "Gradient Quantization: %s, gradient quantization intra-node group size = %d, bits = %d; "
             "inter-node group size = %d, bits = %d%s.",
             truth(c->quantized_gradients), c->gq_group_size_intra, c->gradient_quantization_bits_intra,
             c->gq_group_size_inter, c->gradient_quantization_bits_inter,
             c->gradient_quantization_method == GRADIENT_EDEN ? " (EDEN)" : "");
    report_fp8(run);
    report_activations(run);
    const char *idle = "WARNING: a single data-parallel rank sends no weights and gradients, so";
    bool one = mesh_data_ranks(&run->mesh) == 1 && !c->replica_group;
    if (one && (c->quantized_weights || c->quantized_gradients))
        log_line(run->log, "%s their quantization flags have no effect", idle);
    if (one && c->verify_wire && !stages_send_codes(c))
        log_line(run->log, "%s --verify-wire has no effect", idle);
    if (!c->skip_train && c->warmup_samples_wn >= (double)c->total_samples)
        log_line(run->log,
                 "WARNING: the run ends before its learning-rate warm-up does; set --lr-warmup-* "
                 "and --lr-decay-* to the length of the run");
    report_batch(run);
    log_line(run->log, " > padded vocab (size: %d) with %d dummy tokens (new size: %d)",
             c->vocab_size_unpadded, c->vocab_size_padded - c->vocab_size_unpadded, c->vocab_size_padded);
    report_parameters(run);
    log_line(run->log, "memory plan: %.1f MiB per rank, %.1f MiB were free", (double)memory->planned / 0x1p20,
             (double)memory->share_before / 0x1p20);
    log_start(run->log, run->parameters, run->mesh.nodes, device_name(run->device));
}

// --- a step --------------------------------------------------------------------------------------

// Logs a step. --log-num-zeros-in-grad and --log-params-norm need a collective, which also
// synchronizes the device. `alone` leaves these two values out.
static void report_step(Run *run, int64_t iteration, bool alone) {
    const Config *c = &run->config;
    // Replica groups have different master weights. The log shows rank 0's group.
    Peers peers = run_peers(run, mesh_status_group(&run->mesh)->mpi);
    StepReport *r = &run->report;
    r->iteration = iteration;
    r->consumed_samples = run->consumed_train;
    r->learning_rate = schedule_lr(&run->schedule, run->scheduled);
    r->global_batch_size = run->step_batch;
    r->loss = run->last.loss;
    r->skipped = !run->last.applied;
    r->grad_norm = c->clip_grad > 0 ? run->last.grad_norm : -1.0;
    r->num_zeros = c->log_num_zeros_in_grad && !alone ? (double)zero_zeros(run->zero, peers) : -1.0;
    r->params_norm = c->log_params_norm && !alone ? zero_params_norm(run->zero, peers) : -1.0;
    r->reserved_bytes = r->allocated_bytes = (double)memory_plan_total(&run->memory_plan);
    log_step_scalars(run->log, r);
}

void read_step_status(Run *run, int which, bool alone) {
    assert(which == 0 || which == 1);
    if (!run->status_unread) return;
    run->last = zero_step_status(run->zero, which);
    run->status_unread = false;
    if (run->last.applied) {
        run->scheduled += run->step_batch;
        run->interval.loss_sum += run->last.loss;
    }
    int64_t iteration = run->iteration - which, nan = run->guard.nan;
    guard_check(&run->guard, &run->last, iteration, run->log, &run->error);
    run->interval.skipped += !run->last.applied;
    run->interval.nan += run->guard.nan - nan;
    report_step(run, iteration, alone);
}

// --- an interval ---------------------------------------------------------------------------------

void interval_begin(Run *run) {
    memset(&run->interval, 0, sizeof run->interval);
    run->interval.traffic = zero_traffic(run->zero);
    stream_synchronize(run->compute);
    run_barrier(run);
    run->interval.seconds_start = monotonic_seconds();
}

void interval_exclude(Run *run, const Interruption *from) {
    stream_synchronize(run->compute);
    run_barrier(run);
    Traffic now = zero_traffic(run->zero), *start = &run->interval.traffic;
    start->node += now.node - from->traffic.node;
    start->rail += now.rail - from->traffic.rail;
    start->model += now.model - from->traffic.model;
    run->interval.seconds_start += monotonic_seconds() - from->seconds;
}

// Returns the maximum over nodes of the bytes that all ranks of the node sent. sent: one column of
// a (world, 3) array.
static double busiest_node(const Mesh *mesh, const double *sent) {
    double most = 0;
    for (int node = 0; node < mesh->nodes; node++) {
        double sum = 0;
        for (int i = 0; i < mesh->per_node; i++) sum += sent[3 * (node * mesh->per_node + i)];
        if (sum > most) most = sum;
    }
    return most;
}

// Fills in the bytes per step that the busiest node sent: to other nodes and within the node for
// data parallelism, and in total for tensor and pipeline parallelism.
static void node_traffic(Run *run, IntervalReport *r) {
    const Mesh *mesh = &run->mesh;
    Traffic now = zero_traffic(run->zero), then = run->interval.traffic;
    double own[3] = {(double)(now.rail - then.rail), (double)(now.node - then.node),
                     (double)(now.model - then.model)};
    double steps = (double)(run->interval.iterations > 0 ? run->interval.iterations : 1);
    double *all = xcalloc(3 * (size_t)mesh->world.size, sizeof *all, "bytes that ranks sent");
    peers_all_gather(run_peers(run, run->launch.world), own, all, 3, MPI_DOUBLE);
    r->inter_node_bytes = busiest_node(mesh, all) / steps;
    r->intra_node_bytes = busiest_node(mesh, all + 1) / steps;
    r->model_bytes = busiest_node(mesh, all + 2) / steps;
    free(all);
}

// Fills in throughput, computed from the interval's mean batch size, which --rampup-batch-size may
// change.
static void fill_rates(Run *run, IntervalReport *r, double seconds) {
    const Config *c = &run->config;
    double batch = (double)run->interval.samples / (double)r->iterations, ranks = run->launch.size;
    double peak = device_peak_flops(run->device), trained = (double)run->parameters;
    double frozen = (double)gpt_frozen_parameters(run->gpt).whole;
    r->elapsed_ms = 1000.0 * seconds;
    r->tflops_per_gpu = megatron_flops(c, batch) / (seconds * 1e12 * ranks);
    r->mfu = peak > 0 ? causal_flops(c, batch, trained, frozen) / (seconds * ranks * peak) : -1.0;
    r->tokens_per_second = batch * c->seq_length / seconds;
    r->seconds_left = seconds * (double)(c->train_iters - run->iteration);
}

static void fill_communication(Run *run, IntervalReport *r) {
    node_traffic(run, r);
    Exposed exposed = timers_take_exposed(run->timers, (double)r->iterations,
                                          run_peers(run, run->launch.world));
    r->exposed_gradients_ms = exposed.gradients_ms;
    r->exposed_weights_ms = exposed.weights_ms;
    r->exposed_comm_ms = r->exposed_gradients_ms + r->exposed_weights_ms;
    r->exposed_most_ms = exposed.most_ms;
}

// Averages loss and norm over replica groups and sums their skipped steps.
static void mean_of_replica_groups(Run *run, IntervalReport *r) {
    const Mesh *mesh = &run->mesh;
    double sum[4] = {r->lm_loss, r->last.grad_norm, (double)r->skipped, (double)r->nan};
    if (mesh->replica_groups.size == 1) return;
    peers_all_reduce(run_peers(run, run->launch.world), sum, 4, MPI_DOUBLE, MPI_SUM);
    r->lm_loss = sum[0] / mesh->world.size;
    r->last.grad_norm = sum[1] / mesh->world.size;
    r->skipped = (int64_t)(sum[2] / mesh->per_node);
    r->nan = (int64_t)(sum[3] / mesh->per_node);
}

void interval_end(Run *run) {
    assert(run->interval.iterations > 0 && !run->status_unread);
    Peers world = run_peers(run, run->launch.world);
    stream_synchronize(run->compute);
    run_barrier(run);
    int64_t n = run->interval.iterations;
    double seconds = (monotonic_seconds() - run->interval.seconds_start) / (double)n;
    IntervalReport r;
    memset(&r, 0, sizeof r);
    r.last = run->report;
    r.train_iters = run->config.train_iters;
    r.iterations = n;
    int64_t applied = n - run->interval.skipped;
    r.lm_loss = applied > 0                ? run->interval.loss_sum / (double)applied
                : isfinite(run->last.loss) ? 0.0
                                           : run->last.loss;
    r.skipped = run->interval.skipped;
    r.nan = run->interval.nan;
    mean_of_replica_groups(run, &r);
    r.epoch = loader_epoch(run->loader, elastic_position(run));
    fill_rates(run, &r, seconds);
    fill_communication(run, &r);
    log_iteration(run->log, &r);
    run_barrier(run);  // times out if rank 0 hangs while writing
    log_timers(run->log, run->timers, run->iteration, n, world);
    memory_report(&run->memory, run->log, run->iteration);
    interval_begin(run);
}
