// Checks that the memory plan fits, and reports memory used outside the plan: see memory_fit.h.
#include "llmc/plan/memory_fit.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>


typedef struct Setting {
    int micro_batch;
    Recompute recompute;
} Setting;

// Returns the size of the plan with another micro-batch size and recomputation setting.
static size_t bytes_with(const Config *config, size_t planned, Setting setting, ModelPlan model) {
    Config other = *config;
    other.micro_batch_size = setting.micro_batch;
    other.recompute_granularity = setting.recompute;
    // With smaller micro-batches there are more of them, and a pipeline may have more in flight.
    other.micro_batches = (int)(config->global_batch_size / ((int64_t)setting.micro_batch * config->dp_size));
    return planned - model.bytes(config, model.mesh) + model.bytes(&other, model.mesh);
}

// Returns true if this micro-batch size is valid with all other flags unchanged.
static bool divides(const Config *config, int micro_batch) {
    int64_t unit = (int64_t)micro_batch * config->dp_size;
    if (config_pipeline_chunks(config) > 1) unit *= config->pipeline_model_parallel_size;
    return config->global_batch_size % unit == 0 && config->rampup_start % unit == 0 &&
           config->rampup_increment % unit == 0;
}

// Returns the largest micro-batch size below `limit` that fits with this recomputation setting, or
// 0.
static int largest_micro_batch(const Config *config, size_t planned, size_t share, int limit,
                               Recompute recompute, ModelPlan model) {
    for (int m = limit - 1; m > 0; m--) {
        Setting setting = {m, recompute};
        if (divides(config, m) && bytes_with(config, planned, setting, model) <= share) return m;
    }
    return 0;
}

// Returns true if the configured micro-batch fits with full recomputation. Selective recomputation
// would not save memory, because attention is always recomputed.
static bool full_fits(const Config *config, size_t planned, size_t share, ModelPlan model) {
    Setting setting = {config->micro_batch_size, RECOMPUTE_FULL};
    return config->recompute_granularity != RECOMPUTE_FULL &&
           bytes_with(config, planned, setting, model) <= share;
}

// Suggests more sharding, offload and model parallelism if no micro-batch or recomputation fits.
static bool no_setting_fits(char *text, size_t bytes, const Config *config, double missing) {
    bool shared = config->sharding == SHARD_PARAMETERS || config->dp_size == 1;
    const char *share = shared ? "" : "--data-parallel-sharding-strategy optim_grads_params, ";
    bool offloads = config->optimizer_cpu_offload || config->optimizer_disk_offload;
    const char *offload = offloads ? "" : "--optimizer-cpu-offload, ";
    snprintf(text, bytes,
             "no setting fits: --micro-batch-size 1 with --recompute-granularity full needs %.1f MiB more; "
             "try %s%s--tensor-model-parallel-size, --pipeline-model-parallel-size, more GPUs, or a smaller "
             "model",
             missing / 0x1p20, share, offload);
    return false;
}

bool memory_advice(char *text, size_t bytes, const Config *config, size_t planned, size_t share,
                   ModelPlan model) {
    assert(text && bytes > 0 && config->micro_batch_size > 0 && model.bytes);
    Recompute now = config->recompute_granularity;
    bool full = full_fits(config, planned, share, model);
    int smaller = largest_micro_batch(config, planned, share, config->micro_batch_size, now, model);
    const char *flag = config->recompute_activations
                           ? "--recompute-granularity full instead of --recompute-activations"
                           : "--recompute-granularity full";
    if (smaller && full) {
        snprintf(text, bytes, "--micro-batch-size %d fits, and so does %s", smaller, flag);
    } else if (smaller) {
        snprintf(text, bytes, "--micro-batch-size %d fits", smaller);
    } else if (full) {
        snprintf(text, bytes, "%s fits", flag);
    } else {
        int both = now == RECOMPUTE_FULL
                       ? 0
                       : largest_micro_batch(config, planned, share, config->micro_batch_size, RECOMPUTE_FULL,
                                             model);
        Setting least = {1, RECOMPUTE_FULL};
        double missing = (double)bytes_with(config, planned, least, model) - (double)share;
        if (!both) return no_setting_fits(text, bytes, config, missing);
        snprintf(text, bytes, "--micro-batch-size %d with %s fits", both, flag);
    }
    return true;
}

// Returns true if a host allocation failed and the device has its own memory. Smaller micro-batches
// do not help then.
static bool host_failed(const MemoryPlan *memory_plan) {
    for (int i = 0; i < memory_plan->count; i++) {
        const MemoryPlanEntry *entry = &memory_plan->entries[i];
        if (entry->bytes && !entry->memory && entry->place != ON_DISK)
            return entry->place == ON_HOST && device_kind()->own_memory;
    }
    return false;
}

// GPU memory reserved for cuBLAS, cuDNN, kernel code and NCCL, which allocate outside the plan. It
// depends on whether ranks communicate through NCCL, and whether they do so inside a node; the
// measurements are in dev/bench/NOTES.md. Without this reserve the libraries would run out of
// memory later, with less helpful messages.
enum { LIBRARIES_MIB = 512, AND_NCCL_MIB = 1280, AND_NCCL_IN_NODE_MIB = 2048 };

bool memory_nccl_in_node(const Config *config, const Mesh *mesh) {
    if (mesh->tp.size > 1 || mesh->pp.size > 1) return true;
    bool nccl = config->node_exchange == NODE_EXCHANGE_NCCL || config->sharding == SHARD_PARAMETERS;
    return nccl && mesh->node.size > 1;
}

size_t memory_reserve(int ranks, bool nccl_in_node) {
    int mib = ranks == 1 ? LIBRARIES_MIB : nccl_in_node ? AND_NCCL_IN_NODE_MIB : AND_NCCL_MIB;
    return (size_t)mib << 20;
}

void memory_measure(Memory *memory, const MemoryPlan *memory_plan, Device *device, int sharers,
                    int host_ranks, int ranks, bool nccl_in_node) {
    assert(sharers > 0 && host_ranks > 0 && ranks > 0);
    memory->reserved = device_kind()->own_memory ? memory_reserve(ranks, nccl_in_node) : 0;
    memory->device = device;
    memory->sharers = sharers;
    memory->planned = memory_plan_needed(memory_plan);
    memory->host = memory_plan_host(memory_plan);
    memory->disk = memory_plan_disk(memory_plan);
    memory->host_ranks = host_ranks;
    memory->host_before = machine_memory("MemAvailable");
    memory->taken_before = device_taken(device);
    memory->share_before = device_share(device, sharers);
}

bool memory_host_fits(size_t bytes, int ranks, size_t available, Error *err) {
    assert(ranks > 0);
    if (available == 0 || bytes <= available / (size_t)ranks) return true;
    double each = (double)bytes / 0x1p30;
    return system_error(err,
                        "the memory plan needs %.2f GiB of host memory for each of the %d ranks of this "
                        "machine, %.2f GiB in total, but only %.2f GiB are available; run fewer ranks per "
                        "machine, use --optimizer-disk-offload instead of --optimizer-cpu-offload, or drop "
                        "--async-save",
                        each, ranks, each * ranks, (double)available / 0x1p30);
}

bool memory_allocate(Memory *memory, MemoryPlan *memory_plan, const Config *config, ModelPlan model,
                     Error *err) {
    size_t share = memory->share_before > memory->reserved ? memory->share_before - memory->reserved : 0;
    // Check host memory before page-locking fails on some rank or the OOM killer ends one. On CPU
    // ranks it is part of the device memory, which is checked below.
    bool apart = memory->host && device_kind()->own_memory;
    if (apart && !memory_host_fits(memory->host, memory->host_ranks, memory->host_before, err)) return false;
    if (memory_plan_allocate_within(memory_plan, memory->device, share, memory->sharers, err)) return true;
    if (memory_plan->count > 0 && memory_plan->entries[0].memory && host_failed(memory_plan)) return false;
    size_t length = strlen(err->what);
    if (memory->reserved)
        snprintf(err->what + length, sizeof err->what - length, " with %zu MiB reserved for libraries; ",
                 memory->reserved >> 20);
    else snprintf(err->what + length, sizeof err->what - length, "; ");
    length = strlen(err->what);
    // If fragmentation made the allocation fail although enough memory is free, suggest a smaller
    // plan too.
    if (share >= memory->planned) share = memory->planned - 1;
    memory_advice(err->what + length, sizeof err->what - length, config, memory->planned, share, model);
    return false;
}

void memory_report(Memory *memory, Log *log, int64_t iterations) {
    if (memory->reported) return;
    memory->reported = true;
    const double MB = 0x1p20;
    double allocated = (double)device_allocated(memory->device), before = (double)memory->taken_before,
           taken = (double)device_taken(memory->device);
    // device_taken includes all ranks that share the GPU, which have equal plans. On CPUs it
    // includes only this process.
    bool own_memory = device_kind()->own_memory;
    double plans = own_memory ? allocated * memory->sharers : allocated + (double)memory->host;
    double outside = taken - before - plans;
    log_memory(log, iterations, allocated);
    log_line(log,
             "memory outside the plan (MB) | before allocation (context, other processes): %.1f | since then "
             "(libraries, host buffers): %.1f",
             before / MB, outside / MB);
    if (memory->host) log_line(log, "host memory of the plan (MB): %.1f", (double)memory->host / MB);
    if (memory->disk) log_line(log, "optimizer state on disk (MB): %.1f", (double)memory->disk / MB);
    Text json = json_begin("memory");
    json_integer(&json, "iteration", iterations);
    json_integer(&json, "planned_bytes", (int64_t)(memory->planned - (own_memory ? 0 : memory->host)));
    json_integer(&json, "allocated_bytes", (int64_t)allocated);
    json_integer(&json, "host_bytes", (int64_t)memory->host);
    if (memory->disk) json_integer(&json, "disk_bytes", (int64_t)memory->disk);
    json_open(&json, "timing");
    json_integer(&json, "free_before_bytes", (int64_t)memory->share_before);
    json_integer(&json, "taken_before_bytes", (int64_t)before);
    json_integer(&json, "taken_bytes", (int64_t)taken);
    json_integer(&json, "beside_plan_bytes", (int64_t)outside);
    json_close(&json);
    log_json(log, &json);
}
