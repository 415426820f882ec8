// The model weights of a rank: see weights.h.
#include "llmc/state/weights.h"

#include <assert.h>
#include <stdlib.h>

// --- memory --------------------------------------------------------------------------------------

static int64_t part_elements(const Bucket *bucket, const WeightParts *parts) {
    return parts->shards * bucket_shard(bucket);
}

// Returns the format in which the world store gathers: plain until an update has written payloads.
static WeightFormat gather_format(const Base *base, const Weights *weights) {
    return weights->messages_valid ? base->weight_format : plain_weight_format();
}

// Lays out `shards` shards of every gathered bucket. used: also reserves their memory.
static void reserve_parts(const Base *base, WeightParts *parts, int shards, bool used, const char *purpose,
                          MemoryPlan *plan) {
    enum { ALIGNMENT = 128 };  // elements: 256 bytes, the alignment of device memory
    int64_t at = 0;
    parts->shards = shards;
    parts->start = xcalloc((size_t)base->layout.buckets, sizeof(int64_t), "the bucket table");
    for (int b = 1; b < base->layout.buckets; b++) {
        parts->start[b] = at;
        at += round_up64(part_elements(&base->layout.bucket[b], parts), ALIGNMENT);
    }
    if (used)
        memory_plan_reserve(plan, "weights", purpose, (size_t)at * sizeof(floatX), (void **)&parts->memory);
}

static void reserve_slots(const Base *base, Weights *weights, MemoryPlan *plan) {
    int64_t slot[WEIGHT_SLOTS] = {0, 0};
    for (int b = 1; b < base->layout.buckets; b++) {
        int64_t elements = bucket_elements(&base->layout.bucket[b]);
        if (elements > slot[b % 2]) slot[b % 2] = elements;
    }
    for (int i = 0; i < WEIGHT_SLOTS; i++) {
        memory_plan_reserve(plan, "weights", FLOATX_NAME " of a layer, gathered",
                            (size_t)slot[i] * sizeof(floatX), (void **)&weights->slot[i]);
    }
}

// Reserves memory of the world store: gather buffer, this rank's payloads, secondary partition.
static void reserve_world(const Base *base, Weights *weights, MemoryPlan *plan) {
    int64_t kept = 0, largest = 0;
    WeightFormat plain = gather_format(base, weights);
    for (int b = 1; b < base->layout.buckets; b++) {
        int64_t bytes = layout_weight_message(&base->layout.bucket[b], &base->weight_format).bytes;
        int64_t whole = layout_weight_message(&base->layout.bucket[b], &plain).bytes;
        weights->bucket[b].message_start = kept;
        kept += round_up64(bytes, 256);
        if (bytes > largest) largest = bytes;
        if (whole > largest) largest = whole;
    }
    memory_plan_reserve(plan, "weights", "payloads of a layer, gathered", (size_t)(largest * base->layout.dp),
                        (void **)&weights->buffer);
    memory_plan_reserve(plan, "weights", "status of an applied step", sizeof(StepStatus),
                        (void **)&weights->always);
    if (codec_grouped(base->weight_format.codec))
        memory_plan_reserve(plan, "weights", "own payloads", (size_t)kept, (void **)&weights->message);
    // With one rank per node the partition would only duplicate the gathered bucket.
    if (base->config->secondary_partition && base->mesh->node.size > 1)
        reserve_parts(base, &weights->secondary, base->mesh->rail.size, true,
                      FLOATX_NAME " secondary partition", plan);
}

static const WeightStore *chosen_store(const Base *base) {
    const Config *c = base->config;
    bool world = c->shard_scope == SHARD_IN_WORLD;
    int sharers = world ? base->mesh->dp.size : base->mesh->node.size;
    if (c->sharding != SHARD_PARAMETERS || sharers == 1) return &weights_replicated;
    return world ? &weights_world : &weights_node;
}

void weights_reserve(const Base *base, Weights *weights, MemoryPlan *memory_plan) {
    const WeightStore *store = chosen_store(base);
    bool world = store == &weights_world;
    size_t buckets = (size_t)base->layout.buckets;
    weights->layers = store;
    weights->bucket = xcalloc(buckets, sizeof *weights->bucket, "the bucket table");
    weights->row = xcalloc(2 * (size_t)base->mesh->rail.size, sizeof(CommRow), "the bucket table");
    weights->held[0] = weights->held[1] = -1;
    int64_t whole = store->gathers ? bucket_elements(&base->layout.bucket[0]) : base->layout.arena_elements;
    memory_plan_reserve(memory_plan, "weights",
                        store->gathers ? FLOATX_NAME " of the embeddings' bucket"
                                       : FLOATX_NAME " model weights",
                        (size_t)whole * sizeof(floatX), (void **)&weights->arena);
    reserve_parts(base, &weights->kept, world ? 1 : base->mesh->rail.size, store->gathers,
                  world ? FLOATX_NAME " own shard" : FLOATX_NAME " shard of the node's weights", memory_plan);
    if (store->gathers) reserve_slots(base, weights, memory_plan);
    if (world) reserve_world(base, weights, memory_plan);
}

void weights_start(const Base *base, Weights *weights) {
    StepStatus always = {0};
    for (int b = 0; b < base->layout.buckets; b++) weights->bucket[b].done = event_create(base->device);
    if (!weights->layers->gathers) return;
    weights->stream = base->lanes->apart ? stream_create_urgent(base->device, "layers' weights")
                                         : base->lanes->last;
    weights->used = event_create(base->device);
    for (int i = 0; i < WEIGHT_SLOTS; i++) weights->gathered[i] = event_create(base->device);
    always.applied = 1;
    if (weights->always) copy_to_device(base->compute, weights->always, &always, sizeof always);
}

void weights_free(const Base *base, Weights *weights) {
    for (int b = 0; base->device && weights->bucket && b < base->layout.buckets; b++)
        event_destroy(weights->bucket[b].done);
    for (int i = 0; i < WEIGHT_SLOTS && weights->used; i++) event_destroy(weights->gathered[i]);
    if (weights->used) event_destroy(weights->used);
    if (weights->stream && weights->stream != base->lanes->last) stream_destroy(weights->stream);
    free(weights->bucket);
    free(weights->kept.start);
    free(weights->secondary.start);
    free(weights->row);
}

// --- the replicated store ------------------------------------------------------------------------

static floatX *full_in_arena(const Base *base, const Weights *weights, int b) {
    return weights->arena + base->layout.bucket[b].arena_start;
}

static floatX *kept_in_arena(const Base *base, const Weights *weights, int b, int64_t *elements) {
    *elements = bucket_elements(&base->layout.bucket[b]);
    return full_in_arena(base, weights, b);
}

static WeightShard shard_in_arena(const Base *base, const Weights *weights, int b, int owner) {
    return weight_shard_of(&base->state->bucket[b], full_in_arena(base, weights, b), owner);
}

static GatherBuffer buffer_for_all(const Base *base, const Weights *weights, int b) {
    const LayoutOptions *ranks = &base->state->options;
    GatherBuffer buffer = {weights->gather[qwd_slot(b)], ranks->nodes, ranks->per_node, NULL};
    return buffer;
}

static const Group *data_parallel_group(const Mesh *mesh) { return &mesh->dp; }

const WeightStore weights_replicated = {.full = full_in_arena,
                                        .kept = kept_in_arena,
                                        .shard = shard_in_arena,
                                        .buffer = buffer_for_all,
                                        .holders = data_parallel_group,
                                        .sharers = data_parallel_group};

// --- stores that gather --------------------------------------------------------------------------

static floatX *full_in_slot(const Base *base, const Weights *weights, int b) { return weights->slot[b % 2]; }

static floatX *kept_parts(const Base *base, const Weights *weights, int b, int64_t *elements) {
    *elements = part_elements(&base->layout.bucket[b], &weights->kept);
    return weights->kept.memory + weights->kept.start[b];
}

// Returns shard i of bucket b.
static WeightShard part(const Base *base, const WeightParts *parts, int b, int i) {
    const Bucket *bucket = &base->layout.bucket[b];
    floatX *memory = parts->memory + parts->start[b];
    WeightShard shard = {memory + i * bucket->matrix_per_rank,
                         memory + parts->shards * bucket->matrix_per_rank + i * bucket->tail_per_rank};
    return shard;
}

// Lists the rows of a gather inside the node. parts: this rank's shards. Returns their number.
static int list_rows(const Base *base, Weights *weights, const WeightParts *parts, int b) {
    const Bucket *bucket = &base->layout.bucket[b];
    int rows = 0;
    for (int node = 0; node < base->mesh->rail.size; node++) {
        WeightShard own = part(base, parts, b, node);
        WeightShard all = weight_shard_of(bucket, full_in_slot(base, weights, b),
                                          node * base->mesh->node.size);
        const CommRow both[] = {{own.matrix, all.matrix, (size_t)bucket->matrix_per_rank * sizeof(floatX)},
                                {own.tail, all.tail, (size_t)bucket->tail_per_rank * sizeof(floatX)}};
        for (int i = 0; i < 2; i++) {
            if (both[i].bytes) weights->row[rows++] = both[i];
        }
    }
    return rows;
}

static void gather_in_node(const Base *base, Weights *weights, const WeightParts *parts, int b) {
    int rows = list_rows(base, weights, parts, b);
    wire_gather_rows(base->checks, b, weights->row, rows, weights->stream);
}

// --- the node store ------------------------------------------------------------------------------

static int rail_owner(const Base *base, int i) { return i * base->mesh->node.size + base->mesh->node.rank; }

static WeightShard shard_of_rail(const Base *base, const Weights *weights, int b, int owner) {
    WeightShard none = {NULL, NULL};
    int i = owner / base->mesh->node.size;
    return rail_owner(base, i) == owner ? part(base, &weights->kept, b, i) : none;
}

static void gather_node(const Base *base, Weights *weights, int b, bool backward) {
    gather_in_node(base, weights, &weights->kept, b);
}

static GatherBuffer buffer_for_rail(const Base *base, const Weights *weights, int b) {
    GatherBuffer buffer = {weights->gather[qwd_slot(b)], base->mesh->rail.size, 1, NULL};
    return buffer;
}

static const Group *rail_group(const Mesh *mesh) { return &mesh->rail; }
static const Group *node_group(const Mesh *mesh) { return &mesh->node; }

const WeightStore weights_node = {.gathers = true,
                                  .full = full_in_slot,
                                  .kept = kept_parts,
                                  .shard = shard_of_rail,
                                  .owner = rail_owner,
                                  .gather = gather_node,
                                  .buffer = buffer_for_rail,
                                  .holders = rail_group,
                                  .sharers = node_group};

// --- the world store -----------------------------------------------------------------------------

static int own_rank(const Base *base, int i) { return base->mesh->dp.rank; }

static WeightShard shard_of_self(const Base *base, const Weights *weights, int b, int owner) {
    WeightShard none = {NULL, NULL};
    return owner == base->mesh->dp.rank ? part(base, &weights->kept, b, 0) : none;
}

static GatherBuffer buffer_for_self(const Base *base, const Weights *weights, int b) {
    uint8_t *message = weights->message ? weights->message + weights->bucket[b].message_start : NULL;
    GatherBuffer buffer = {weights->gather[qwd_slot(b)], 1, 1, message};
    return buffer;
}

// Copies this rank's payload to its slot in the buffer.
static void write_message(const Base *base, const Weights *weights, int b, const MessageLayout *m,
                          uint8_t *own) {
    const Bucket *bucket = &base->layout.bucket[b];
    MessageSections at = message_sections(m, 0);
    WeightShard kept = part(base, &weights->kept, b, 0);
    if (weights->messages_valid) {
        copy_on_device(weights->stream, own, weights->message + weights->bucket[b].message_start,
                       (size_t)message_content(m));
        return;
    }
    copy_on_device(weights->stream, own + at.codes, kept.matrix,
                   (size_t)bucket->matrix_per_rank * sizeof(floatX));
    copy_on_device(weights->stream, own + at.tail, kept.tail, (size_t)bucket->tail_per_rank * sizeof(floatX));
}

// Copies this rank's part of the secondary partition out of the gathered bucket.
static void fill_secondary(const Base *base, Weights *weights, int b) {
    const Group *node = &base->mesh->node;
    int rows = list_rows(base, weights, &weights->secondary, b);
    for (int i = 0; i < rows; i++) {
        const CommRow *row = &weights->row[i];
        copy_on_device(weights->stream, (void *)row->own,
                       (const uint8_t *)row->all + (size_t)node->rank * row->bytes, row->bytes);
    }
    weights->bucket[b].filled = true;
}

// Gathers from all ranks in two hops, like qwd.c but on one stream.
static void gather_world(const Base *base, Weights *weights, int b, bool backward) {
    WireChecks *checks = base->checks;
    Stream *stream = weights->stream;
    WeightFormat format = gather_format(base, weights);
    const Mesh *mesh = base->mesh;
    int nodes = mesh->rail.size, row = mesh->node.rank * nodes, slot = row + mesh->rail.rank;
    if (backward && weights->bucket[b].filled) {
        gather_in_node(base, weights, &weights->secondary, b);
        return;
    }
    ApplyWeights a = {0};
    a.control = weights->always;
    a.bucket = base->layout.bucket[b];
    a.messages = weights->buffer;
    a.nodes = nodes;
    a.per_node = mesh->node.size;
    a.message = layout_weight_message(&a.bucket, &format);
    a.codec = format.codec;
    a.group = format.group;
    a.weights = full_in_slot(base, weights, b);
    write_message(base, weights, b, &a.message, weights->buffer + slot * a.message.bytes);
    wire_seal_own(checks, b, slot, &a.message, weights->buffer, stream);
    if (nodes > 1) {
        wire_all_gather(checks, HOP_LAYER_RAIL, row, 1, &a.message, weights->buffer, stream);
        wire_check_gathered(checks, HOP_LAYER_RAIL, b, row, 1, &a.message, weights->buffer, stream);
    }
    if (a.per_node > 1) {
        wire_all_gather(checks, HOP_LAYER_NODE, 0, nodes, &a.message, weights->buffer, stream);
        wire_check_gathered(checks, HOP_LAYER_NODE, b, 0, nodes, &a.message, weights->buffer, stream);
    }
    kernel_apply_weights(stream, &a);
    if (weights->secondary.memory && !weights->bucket[b].filled) fill_secondary(base, weights, b);
}

static const Group *own_group(const Mesh *mesh) {
    static const Group alone = {.size = 1, .stride = 1};
    return &alone;
}

const WeightStore weights_world = {.gathers = true,
                                   .full = full_in_slot,
                                   .kept = kept_parts,
                                   .shard = shard_of_self,
                                   .owner = own_rank,
                                   .gather = gather_world,
                                   .buffer = buffer_for_self,
                                   .holders = own_group,
                                   .sharers = data_parallel_group};

// --- addresses -----------------------------------------------------------------------------------

WeightShard weights_own(const Base *base, const Weights *weights, int b) {
    return weights_shard(base, weights, b, base_state_shard(base));
}

floatX *weights_tensor(const Base *base, const Weights *weights, int tensor) {
    assert(tensor >= 0 && tensor < base->layout.tensors);
    int b = base->layout.tensor_bucket[tensor];
    return weights_full(base, weights, b) + base->layout.tensor_arena[tensor] -
           base->layout.bucket[b].arena_start;
}

floatX *weights_of_range(const Base *base, const Weights *weights, const Range *range) {
    const Bucket *bucket = &base->state->bucket[range->bucket];
    int64_t at = range->state_at - bucket->state_start;  // in the shard: matrix part, then tail part
    WeightShard own = weights_own(base, weights, range->bucket);
    return at < bucket->matrix_per_rank ? own.matrix + at : own.tail + (at - bucket->matrix_per_rank);
}

floatX *weights_of_tensor(const Base *base, const Weights *weights, int tensor, int i, int64_t *first,
                          int64_t *count) {
    assert(tensor >= 0 && tensor < base->layout.tensors && i >= 0 && i < weights->kept.shards);
    int b = base->layout.tensor_bucket[tensor];
    const Bucket *bucket = &base->layout.bucket[b];
    int64_t n = tensor_elements(&base->tensors[tensor]);
    int64_t from = base->layout.tensor_arena[tensor] - bucket->arena_start;
    if (!weights_store(weights, b)->gathers) {
        *first = 0;
        *count = n;
        return i == 0 ? weights_tensor(base, weights, tensor) : NULL;
    }
    bool tail = from >= bucket->matrix_elements;
    int64_t size = tail ? bucket->tail_per_rank : bucket->matrix_per_rank;
    if (tail) from -= bucket->matrix_elements;
    int64_t shard = weights_store(weights, b)->owner(base, i) * size, lo = from > shard ? from : shard;
    int64_t hi = from + n < shard + size ? from + n : shard + size;
    WeightShard own = part(base, &weights->kept, b, i);
    *first = lo - from;
    *count = hi - lo;
    return lo < hi ? (tail ? own.tail : own.matrix) + (lo - shard) : NULL;
}

void weights_keep_tensor(const Base *base, Weights *weights, int tensor) {
    assert(tensor >= 0 && tensor < base->layout.tensors);
    if (!weights_store(weights, base->layout.tensor_bucket[tensor])->gathers) return;
    weights_replaced(base, weights);
    for (int i = 0; i < weights->kept.shards; i++) {
        int64_t first, count;
        floatX *kept = weights_of_tensor(base, weights, tensor, i, &first, &count);
        if (kept)
            copy_on_device(base->compute, kept, weights_tensor(base, weights, tensor) + first,
                           (size_t)count * sizeof(floatX));
    }
}

// --- waiting for a layer's weights ---------------------------------------------------------------

// Starts the gather of bucket b into its slot. The gather waits for the layers that use the slot's
// previous bucket, and for bucket b's latest update.
static void start_gather(const Base *base, Weights *weights, int b, bool backward) {
    timer_start(base->timers, TIMER_EXPOSED_WEIGHTS, base->compute);
    event_record(weights->used, base->compute);
    stream_wait(weights->stream, weights->used);
    if (weights->bucket[b].pending) stream_wait(weights->stream, weights->bucket[b].done);
    weights->bucket[b].pending = false;
    weights_store(weights, b)->gather(base, weights, b, backward);
    event_record(weights->gathered[b % 2], weights->stream);
    weights->held[b % 2] = b;
    weights->coming[b % 2] = true;
    if (base->config->no_overlap) lanes_synchronize(base->lanes);
    timer_stop(base->timers, TIMER_EXPOSED_WEIGHTS, base->compute);
}

// Makes compute wait for an event. The wait counts as exposed communication.
static void wait_for(const Base *base, Event *event, bool *outstanding) {
    if (!*outstanding) return;
    timer_start(base->timers, TIMER_EXPOSED_WEIGHTS, base->compute);
    stream_wait(base->compute, event);
    timer_stop(base->timers, TIMER_EXPOSED_WEIGHTS, base->compute);
    *outstanding = false;
}

void weights_wait(const Base *base, Weights *weights, int unit, int next, bool backward) {
    assert(unit >= 0 && unit < base->layout.units && next < base->layout.units);
    int b = base->layout.unit_bucket[unit], slot = b % 2,
        ahead = next < 0 ? b : base->layout.unit_bucket[next];
    bool gathers = weights_store(weights, b)->gathers;
    if (!gathers) {
        wait_for(base, weights->bucket[b].done, &weights->bucket[b].pending);
    } else {
        if (weights->held[slot] != b) start_gather(base, weights, b, backward);
        wait_for(base, weights->gathered[slot], &weights->coming[slot]);
    }
    if (!weights_store(weights, ahead)->gathers || !base->lanes->apart || weights->held[ahead % 2] == ahead)
        return;
    if (ahead % 2 != slot || !gathers) start_gather(base, weights, ahead, backward);
}

// Updates are applied in bucket order on one stream, so waiting for the last bucket is enough.
void weights_wait_all(const Base *base, Weights *weights) {
    for (int b = base->layout.buckets - 1; b >= 0; b--) {
        if (!weights->bucket[b].pending) continue;
        wait_for(base, weights->bucket[b].done, &weights->bucket[b].pending);
        for (int earlier = 0; earlier < b; earlier++) weights->bucket[earlier].pending = false;
    }
    for (int i = 0; i < WEIGHT_SLOTS; i++) wait_for(base, weights->gathered[i], &weights->coming[i]);
}

void weights_updated(Weights *weights, int b, Stream *stream) {
    assert(b >= 0);
    event_record(weights->bucket[b].done, stream);
    weights->bucket[b].pending = true;
}

void weights_checked(const Base *base, Weights *weights) {
    if (!base->checks->parts || !base->lanes->apart) return;
    event_record(weights->used, weights->stream);
    stream_wait(base->lanes->last, weights->used);
}

void weights_invalidate(const Base *base, Weights *weights) {
    for (int i = 0; i < WEIGHT_SLOTS; i++) {
        wait_for(base, weights->gathered[i], &weights->coming[i]);
        weights->held[i] = -1;
    }
    for (int b = 0; b < base->layout.buckets; b++) weights->bucket[b].filled = false;
}

void weights_replaced(const Base *base, Weights *weights) {
    weights_invalidate(base, weights);
    weights->messages_valid = false;
}
