// Stores of the optimizer state: see optimizer.h.
#include "llmc/state/optimizer.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/parallel.h"

// --- memory --------------------------------------------------------------------------------------

typedef void (*Reserve)(MemoryPlan *memory_plan, const char *group, const char *name, size_t bytes,
                        void **address);

static void reserve_state(const Base *base, Optimizer *o, MemoryPlan *memory_plan, const char *group,
                          Reserve reserve) {
    int buckets = base->layout.buckets;
    size_t bytes = (size_t)base->state->shard_elements * sizeof(float);
    size_t squares = (size_t)base_squares_start(base, buckets) * sizeof(float);
    size_t momentum = (size_t)layout_whole_start(base->state, buckets) * sizeof(uint16_t);
    bool narrow = base->config->exp_avg_dtype == MOMENT_BF16 && momentum > 0;
    o->layout = base->state;
    reserve(memory_plan, group, "fp32 master weights, own shard", bytes, (void **)&o->master);
    reserve(memory_plan, group, "first moments, own shard", narrow ? squares : bytes, (void **)&o->exp_avg);
    if (narrow)
        reserve(memory_plan, group, "momentum of matrices in bf16, own shard", momentum,
                (void **)&o->momentum_bf16);
    reserve(memory_plan, group, "second moments, own shard", squares, (void **)&o->exp_avg_sq);
}

// Sets the state of bucket b in memory.
static void set_state(const Optimizer *o, int b, BucketState *state) {
    int64_t at = o->layout->bucket[b].state_start, squares = layout_squares_start(o->layout, b);
    state->master = o->master + at;
    state->exp_avg = o->exp_avg + (o->momentum_bf16 ? squares : at);
    state->exp_avg_sq = o->exp_avg_sq + squares;
    if (o->momentum_bf16 && o->layout->bucket[b].whole)
        state->momentum_bf16 = o->momentum_bf16 + layout_whole_start(o->layout, b);
}

// Elements of the state: exactly one pointer is not NULL.
typedef struct StateAt {
    float *wide;
    uint16_t *bf16;
} StateAt;

static StateAt momentum_at(const Optimizer *o, int64_t at) {
    int b = o->layout->buckets - 1;
    while (at < o->layout->bucket[b].state_start) b--;
    const Bucket *bucket = &o->layout->bucket[b];
    int64_t element = at - bucket->state_start, matrices = bucket->whole ? bucket->matrix_per_rank : 0;
    if (element < matrices)
        return (StateAt){.bf16 = o->momentum_bf16 + layout_whole_start(o->layout, b) + element};
    return (StateAt){.wide = o->exp_avg + layout_squares_start(o->layout, b) + element - matrices};
}

// Returns the address of element `at` of a part of the state in memory.
static StateAt state_at(const Optimizer *o, StatePart part, int64_t at) {
    if (part == STATE_EXP_AVG && o->momentum_bf16) return momentum_at(o, at);
    float *const state[STATE_PARTS] = {o->master, o->exp_avg, o->exp_avg_sq};
    return (StateAt){.wide = state[part] + at};
}

// --- the device store ----------------------------------------------------------------------------

static void reserve_on_device(const Base *base, Optimizer *o, MemoryPlan *memory_plan) {
    reserve_state(base, o, memory_plan, "optimizer state", memory_plan_reserve);
    o->landed = xcalloc(2, sizeof(StepStatus), "the step status");
}

static void free_on_device(const Base *base, Optimizer *o) { free(o->landed); }

static BucketState state_on_device(const Base *base, const Optimizer *o, int b, GradShard grads,
                                   WeightShard weights) {
    assert(b >= 0 && b < base->layout.buckets);
    BucketState state = {.grads = grads, .weights = weights, .replica = weights.matrix};
    set_state(o, b, &state);
    return state;
}

static void widen_on_device(const Base *base, const Optimizer *o, int64_t at, const floatX *weights,
                            int64_t n) {
    assert(n >= 0);
    kernel_widen(base->compute, o->master + at, weights, n);
}

// Where bf16 values are copied that widen_bf16 then converts in place: the end of (n) floats.
static uint16_t *end_of(float *wide, int64_t n) { return (uint16_t *)(void *)wide + n; }

typedef struct Widening {
    float *wide;
    const uint16_t *narrow;
    int64_t n;
} Widening;

static void run_widening(void *context) {
    const Widening *w = (const Widening *)context;
    widen_bf16(w->wide, w->narrow, w->n);
}

static void read_device(const Optimizer *o, Stream *stream, float *host, StatePart part, int64_t at,
                        int64_t n) {
    StateAt from = state_at(o, part, at);
    if (from.wide) copy_to_host(stream, host, from.wide, (size_t)n * sizeof(float));
    else copy_to_host(stream, end_of(host, n), from.bf16, (size_t)n * sizeof(uint16_t));
    stream_synchronize(stream);
    if (from.bf16) widen_bf16(host, end_of(host, n), n);
}

static void write_device(const Optimizer *o, Stream *stream, StatePart part, int64_t at, const float *host,
                         int64_t n) {
    StateAt to = state_at(o, part, at);
    uint16_t *narrow = to.bf16 ? xmalloc((size_t)n * sizeof *narrow, "momentum in bf16") : NULL;
    if (narrow) narrow_bf16(narrow, host, n);
    if (narrow) copy_to_device(stream, to.bf16, narrow, (size_t)n * sizeof *narrow);
    else copy_to_device(stream, to.wide, host, (size_t)n * sizeof(float));
    stream_synchronize(stream);
    free(narrow);
}

static void queue_device(const Base *base, const Optimizer *o, Stream *stream, void *pinned, StatePart part,
                         int64_t at, int64_t n) {
    StateAt from = state_at(o, part, at);
    if (from.wide) {
        copy_to_pinned(stream, pinned, from.wide, (size_t)n * sizeof(float));
        return;
    }
    Widening widening = {(float *)pinned, end_of((float *)pinned, n), n};
    copy_to_pinned(stream, end_of((float *)pinned, n), from.bf16, (size_t)n * sizeof(uint16_t));
    stream_host_call(stream, run_widening, &widening, sizeof widening);
}

static void copy_status_to_host(const Base *base, StepStatus *landed) {
    copy_to_host(base->compute, landed, base->control, sizeof *landed);
}

const OptimizerStore optimizer_device = {.reserve = reserve_on_device,
                                         .free = free_on_device,
                                         .state = state_on_device,
                                         .widen = widen_on_device,
                                         .read = read_device,
                                         .write = write_device,
                                         .queue = queue_device,
                                         .copy_status = copy_status_to_host};

// --- the host store: memory ----------------------------------------------------------------------

static bool sends_differences(const Base *base) {
    return base->state->dp > 1 && base->weight_format.difference && codec_grouped(base->weight_format.codec);
}

static int64_t largest_message(const Base *base, int slot) {
    int64_t largest = 0;
    for (int b = slot; b < base->layout.buckets; b += LANE_SLOTS) {
        int64_t bytes = qwd_message(base->state, b, &base->weight_format).bytes;
        if (bytes > largest) largest = bytes;
    }
    return largest;
}

// Reserves everything except the state, for the host and disk stores.
static void reserve_update(const Base *base, Optimizer *o, MemoryPlan *memory_plan) {
    QwdHost *host = &o->host;
    const char *group = "host memory";
    size_t shard = (size_t)base->state->shard_elements;
    memory_plan_reserve_host(memory_plan, group, "reduced gradients, own shard", shard * sizeof(float),
                             (void **)&o->grads);
    if (sends_differences(base))
        memory_plan_reserve_host(memory_plan, group, "weights before the update", shard * sizeof(floatX),
                                 (void **)&o->weights);
    for (int slot = 0; slot < LANE_SLOTS; slot++)
        memory_plan_reserve_host(memory_plan, group, "weight payloads", (size_t)largest_message(base, slot),
                                 (void **)&host->message[slot]);
    memory_plan_reserve_host(memory_plan, group, "step status", sizeof(StepStatus), (void **)&host->control);
    memory_plan_reserve_host(memory_plan, group, "step status", sizeof(uint64_t), (void **)&host->fault);
    memory_plan_reserve_host(memory_plan, group, "step status", 2 * sizeof(StepStatus), (void **)&o->landed);
    memory_plan_reserve(memory_plan, "norm and step status", "first fault of the host", sizeof(uint64_t),
                        (void **)&o->found);
}

static void reserve_on_host(const Base *base, Optimizer *o, MemoryPlan *memory_plan) {
    reserve_state(base, o, memory_plan, "host memory", memory_plan_reserve_host);
    reserve_update(base, o, memory_plan);
}

static void start_on_host(const Base *base, Optimizer *o) {
    assert(base->device && !o->host.stream);
    QwdHost *host = &o->host;
    Peers world = {base->mesh->world.mpi, 60.0 * base->config->distributed_timeout_minutes,
                   device_site(base->device)};
    host->threads = parallel_share(world);
    host->segments = base->layout.segments;
    host->stream = base->config->no_overlap ? base->lanes->last
                                            : stream_create(base->device, "update on the host");
    o->reduced = event_create(base->device);
    o->status = event_create(base->device);
    for (int slot = 0; slot < GRAD_SLOTS; slot++) o->window_free[slot] = event_create(base->device);
    for (int slot = 0; slot < LANE_SLOTS; slot++) {
        host->made[slot] = event_create(base->device);
        host->sent[slot] = event_create(base->device);
    }
}

static void free_on_host(const Base *base, Optimizer *o) {
    QwdHost *host = &o->host;
    if (!host->stream) return;
    event_destroy(o->reduced);
    event_destroy(o->status);
    for (int slot = 0; slot < GRAD_SLOTS; slot++) event_destroy(o->window_free[slot]);
    for (int slot = 0; slot < LANE_SLOTS; slot++) {
        event_destroy(host->made[slot]);
        event_destroy(host->sent[slot]);
    }
    if (host->stream != base->lanes->last) stream_destroy(host->stream);
}

// --- the host store: the step --------------------------------------------------------------------

static GradShard host_grads(const Base *base, const Optimizer *o, int b) {
    float *grads = o->grads + base_state_start(base, b);
    GradShard own = {grads, grads + base->state->bucket[b].matrix_per_rank};
    return own;
}

static void before_reduction(const Base *base, Optimizer *o, int b, GradShard own, bool slots, bool add) {
    assert(b >= 0 && b < base->layout.buckets);
    const Bucket *bucket = &base->state->bucket[b];
    GradShard host = host_grads(base, o, b);
    Event *window_free = o->window_free[b % GRAD_SLOTS];
    if (!slots) return;
    if (add) {
        copy_from_pinned(o->host.stream, own.matrix, host.matrix,
                         (size_t)bucket->matrix_per_rank * sizeof(float));
        copy_from_pinned(o->host.stream, own.tail, host.tail, (size_t)bucket->tail_per_rank * sizeof(float));
        event_record(window_free, o->host.stream);
    }
    stream_wait(base->lanes->last, window_free);
}

static void after_reduction(const Base *base, Optimizer *o, int b, GradShard own, bool slots,
                            const floatX *weights, bool last) {
    assert(b >= 0 && b < base->layout.buckets);
    Stream *stream = o->host.stream;
    const Bucket *bucket = &base->state->bucket[b];
    GradShard host = host_grads(base, o, b);
    event_record(o->reduced, base->lanes->last);
    stream_wait(stream, o->reduced);
    copy_to_pinned(stream, host.matrix, own.matrix, (size_t)bucket->matrix_per_rank * sizeof(float));
    copy_to_pinned(stream, host.tail, own.tail, (size_t)bucket->tail_per_rank * sizeof(float));
    if (slots) event_record(o->window_free[b % GRAD_SLOTS], stream);
    if (last && o->weights)
        copy_to_pinned(stream, o->weights + bucket->state_start, weights,
                       (size_t)bucket->matrix_per_rank * sizeof(floatX));
}

static void status_known(const Base *base, Optimizer *o) {
    assert(o->host.stream && o->host.control);
    event_record(o->status, base->lanes->last);
    stream_wait(o->host.stream, o->status);
    copy_to_pinned(o->host.stream, o->host.control, base->control, sizeof(StepStatus));
}

// The disk store adds master weights and moments chunk by chunk.
static BucketState state_on_disk(const Base *base, const Optimizer *o, int b, GradShard grads,
                                 WeightShard weights) {
    assert(b >= 0 && b < base->layout.buckets);
    BucketState state = {.grads = host_grads(base, o, b), .replica = weights.matrix};
    if (o->weights) state.weights.matrix = o->weights + base_state_start(base, b);
    return state;
}

static BucketState state_on_host(const Base *base, const Optimizer *o, int b, GradShard grads,
                                 WeightShard weights) {
    BucketState state = state_on_disk(base, o, b, grads, weights);
    set_state(o, b, &state);
    return state;
}

static void updated_on_host(const Base *base, Optimizer *o) {
    assert(o->found && o->host.fault);
    copy_from_pinned(base->lanes->last, o->found, o->host.fault, sizeof(uint64_t));
    kernel_mark_fault(base->lanes->last, base->checks->fault, o->found, NULL);
}

// --- the host store: copies ----------------------------------------------------------------------

static void copy_range(void *context, int64_t lo, int64_t hi) {
    const HostCopy *copy = (const HostCopy *)context;
    memcpy(copy->to + lo, copy->from + lo, (size_t)(hi - lo));
    heartbeat_progress(copy->site);
}

static void run_copy(void *context) {
    HostCopy *copy = (HostCopy *)context;
    parallel_ranges(copy->threads, 0, (int64_t)copy->bytes, 1 << 20, copy_range, copy);
}

static void queue_host(const Base *base, const Optimizer *o, Stream *stream, void *pinned, StatePart part,
                       int64_t at, int64_t n) {
    StateAt from = state_at(o, part, at);
    HostCopy copy = {(uint8_t *)pinned, (const uint8_t *)from.wide, (size_t)n * sizeof(float),
                     o->host.threads, device_site(base->device)};
    Widening widening = {(float *)pinned, from.bf16, n};
    if (from.wide) stream_host_call(stream, run_copy, &copy, sizeof copy);
    else stream_host_call(stream, run_widening, &widening, sizeof widening);
}

// Sets master weights through the store's `write`.
static void widen_on_host(const Base *base, const Optimizer *o, int64_t first, const floatX *weights,
                          int64_t n) {
    assert(n >= 0);
    enum { AT_A_TIME = 1 << 20 };
    floatX *narrow = xmalloc(AT_A_TIME * sizeof(floatX), "the first master weights");
    float *master = xmalloc(AT_A_TIME * sizeof(float), "the first master weights");
    for (int64_t at = 0; at < n; at += AT_A_TIME) {
        int64_t count = n - at < AT_A_TIME ? n - at : AT_A_TIME;
        copy_to_host(base->compute, narrow, weights + at, (size_t)count * sizeof(floatX));
        stream_synchronize(base->compute);
        for (int64_t i = 0; i < count; i++) master[i] = floatX_to_float(narrow[i]);
        o->store->write(o, base->compute, STATE_MASTER, first + at, master, count);
    }
    free(narrow);
    free(master);
}

static void read_host(const Optimizer *o, Stream *stream, float *host, StatePart part, int64_t at,
                      int64_t n) {
    StateAt from = state_at(o, part, at);
    stream_synchronize(stream);
    if (from.wide) memcpy(host, from.wide, (size_t)n * sizeof(float));
    else widen_bf16(host, from.bf16, n);
}

static void write_host(const Optimizer *o, Stream *stream, StatePart part, int64_t at, const float *host,
                       int64_t n) {
    StateAt to = state_at(o, part, at);
    if (to.wide) memcpy(to.wide, host, (size_t)n * sizeof(float));
    else narrow_bf16(to.bf16, host, n);
    stream_synchronize(stream);
}

// Uses page-locked memory, because pageable copies need the driver thread that AdamW occupies.
static void copy_status_to_pinned(const Base *base, StepStatus *landed) {
    copy_to_pinned(base->compute, landed, base->control, sizeof *landed);
}

const OptimizerStore optimizer_host = {.on_host = true,
                                       .reserve = reserve_on_host,
                                       .start = start_on_host,
                                       .free = free_on_host,
                                       .before_reduction = before_reduction,
                                       .after_reduction = after_reduction,
                                       .status_known = status_known,
                                       .state = state_on_host,
                                       .updated = updated_on_host,
                                       .widen = widen_on_host,
                                       .read = read_host,
                                       .write = write_host,
                                       .queue = queue_host,
                                       .copy_status = copy_status_to_pinned};

// --- the disk store ------------------------------------------------------------------------------

static void reserve_on_disk(const Base *base, Optimizer *o, MemoryPlan *memory_plan) {
    const WeightFormat *format = &base->weight_format;
    // Without other ranks nothing is quantized, and buckets are not aligned to groups.
    int group = base->state->dp > 1 && codec_grouped(format->codec) ? format->group : HADAMARD_ORDER;
    o->disk = xcalloc(1, sizeof *o->disk, "the optimizer's file");
    o->disk->momentum_bf16 = base->config->exp_avg_dtype == MOMENT_BF16;
    disk_plan(o->disk, base->state, base_state_shard(base), group, DISK_CHUNK_ELEMENTS);
    memory_plan_reserve_disk(memory_plan, "disk", "master weights and moments, own shard",
                             (size_t)o->disk->file_bytes);
    memory_plan_reserve_host(memory_plan, "host memory", "chunks that are read, updated and written",
                             (size_t)disk_memory_bytes(o->disk), &o->disk_memory);
    reserve_update(base, o, memory_plan);
}

static void start_on_disk(const Base *base, Optimizer *o) {
    start_on_host(base, o);
    o->host.update = disk_update;
    o->host.store = o->disk;
}

static void free_on_disk(const Base *base, Optimizer *o) {
    free_on_host(base, o);
    if (o->disk) disk_free(o->disk);
    free(o->disk);
}

// The state is accessed on the host, so all updates must be complete: `stream` waits for them.
static void read_disk(const Optimizer *o, Stream *stream, float *host, StatePart part, int64_t at,
                      int64_t n) {
    stream_synchronize(stream);
    disk_read(o->disk, part, at, host, n);
}

static void write_disk(const Optimizer *o, Stream *stream, StatePart part, int64_t at, const float *host,
                       int64_t n) {
    stream_synchronize(stream);
    disk_write(o->disk, part, at, host, n);
}

// A copy from the file to host memory in stream order.
typedef struct DiskCopy {
    DiskState *disk;
    float *to;
    StatePart part;
    int64_t at, n;
} DiskCopy;

static void run_read(void *context) {
    const DiskCopy *copy = (const DiskCopy *)context;
    disk_read(copy->disk, copy->part, copy->at, copy->to, copy->n);
}

static void queue_disk(const Base *base, const Optimizer *o, Stream *stream, void *pinned, StatePart part,
                       int64_t at, int64_t n) {
    DiskCopy copy = {o->disk, (float *)pinned, part, at, n};
    stream_host_call(stream, run_read, &copy, sizeof copy);
}

const OptimizerStore optimizer_disk = {.on_host = true,
                                       .reserve = reserve_on_disk,
                                       .start = start_on_disk,
                                       .free = free_on_disk,
                                       .before_reduction = before_reduction,
                                       .after_reduction = after_reduction,
                                       .status_known = status_known,
                                       .state = state_on_disk,
                                       .updated = updated_on_host,
                                       .widen = widen_on_host,
                                       .read = read_disk,
                                       .write = write_disk,
                                       .queue = queue_disk,
                                       .copy_status = copy_status_to_pinned};
