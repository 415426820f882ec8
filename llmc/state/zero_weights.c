// Where a rank's weights lie, and how a layer's come together. Called by the files of this room,
// and by train_gpt.c through zero.h.
//
// Under --data-parallel-sharding-strategy optim_grads_params the ranks of a node hold one replica
// together. Bucket 0, with the embeddings, is whole on every rank. Of every other bucket a rank
// keeps the windows of its rail: those that the ranks with its place in their nodes own. They are
// 1 / per_node of it. Whoever wants to use a layer calls zero_weights_wait, which gathers the
// layer's bucket inside the node, into one of two slots. The next layer's is gathered ahead into
// the other.
//
// With --shard-params-over world all ranks hold one replica together, and a rank keeps its own
// windows alone. What travels is the message of its latest update, between nodes first, then inside
// the node. So quantized weights travel as codes, and forward sees what the presets of optim apply
// to their replicas. Weights that no update has made yet, drawn or loaded ones, travel as they are.
// With --secondary-partition a node keeps what forward has gathered, and backward gathers it there.
#include <stdlib.h>

#include "llmc/state/zero_inside.h"

// --- memory --------------------------------------------------------------------------------------

static int64_t part_elements(const Bucket *bucket, const WeightParts *parts) {
    return parts->windows * bucket_shard(bucket);
}

// With one replica among all ranks messages are made anew for each gather. Before the first update
// they are the weights themselves.
static WeightWire wire_of_gather(const Zero *zero) {
    WeightWire plain = plain_weight_wire();
    return zero->shared.messages_stand ? zero->weight_wire : plain;
}

// Parts of `windows` windows, of all buckets that are shared out.
static void reserve_parts(Zero *zero, WeightParts *parts, int windows, const char *purpose,
                          MemoryPlan *plan) {
    enum { GRAIN = 128 };  // elements: parts begin on 256 bytes, as memory does
    int64_t at = 0;
    parts->windows = windows;
    parts->start = (int64_t *)xcalloc((size_t)zero->plan.buckets, sizeof(int64_t), "the bucket table");
    for (int b = 1; b < zero->plan.buckets; b++) {
        parts->start[b] = at;
        at += round_up64(part_elements(&zero->plan.bucket[b], parts), GRAIN);
    }
    if (zero->shared.on)
        memory_plan_reserve(plan, "weights", purpose, (size_t)at * sizeof(floatX), (void **)&parts->memory);
}

// What passes gather into.
static void reserve_slots(Zero *zero, MemoryPlan *plan) {
    SharedWeights *shared = &zero->shared;
    int64_t slot[2] = {0, 0};
    for (int b = 1; b < zero->plan.buckets; b++) {
        int64_t elements = bucket_elements(&zero->plan.bucket[b]);
        if (elements > slot[b % 2]) slot[b % 2] = elements;
    }
    for (int i = 0; i < 2; i++) {
        memory_plan_reserve(plan, "weights", FLOATX_NAME " of a layer, gathered",
                            (size_t)slot[i] * sizeof(floatX), (void **)&shared->slot[i]);
    }
}

// Where messages come together, the own ones of quantized weights, and the secondary partition.
static void reserve_world(Zero *zero, MemoryPlan *plan) {
    SharedWeights *shared = &zero->shared;
    int64_t kept = 0, largest = 0;
    WeightWire plain = wire_of_gather(zero);
    shared->message_start = (int64_t *)xcalloc((size_t)zero->plan.buckets, sizeof(int64_t),
                                               "the bucket table");
    shared->filled = (bool *)xcalloc((size_t)zero->plan.buckets, sizeof(bool), "the bucket table");
    for (int b = 1; b < zero->plan.buckets; b++) {
        int64_t bytes = plan_weight_message(&zero->plan.bucket[b], &zero->weight_wire).bytes;
        int64_t whole = plan_weight_message(&zero->plan.bucket[b], &plain).bytes;
        shared->message_start[b] = kept;
        kept += round_up64(bytes, 256);
        if (bytes > largest) largest = bytes;
        if (whole > largest) largest = whole;
    }
    memory_plan_reserve(plan, "weights", "messages of a layer, gathered", (size_t)(largest * zero->plan.dp),
                        (void **)&shared->buffer);
    memory_plan_reserve(plan, "weights", "a verdict to apply", sizeof(StepControl), (void **)&shared->always);
    if (codec_grouped(zero->weight_wire.codec))
        memory_plan_reserve(plan, "weights", "own messages", (size_t)kept, (void **)&shared->message);
    // One rank to a node would gather from nobody there.
    if (zero->config->secondary_partition && zero->mesh->node.size > 1)
        reserve_parts(zero, &shared->second, zero->mesh->rail.size, FLOATX_NAME " secondary partition", plan);
}

void zero_plan_weights(Zero *zero, MemoryPlan *memory_plan) {
    const Mesh *mesh = zero->mesh;
    SharedWeights *shared = &zero->shared;
    const Config *c = zero->config;
    bool shares = c->sharding == SHARD_PARAMETERS, world = c->shard_scope == SHARD_IN_WORLD;
    shared->on = shares && (world ? mesh->dp.size : mesh->node.size) > 1;
    shared->over_all = shared->on && world;
    shared->held[0] = shared->held[1] = -1;
    shared->row = (CommRow *)xcalloc(2 * (size_t)mesh->rail.size, sizeof(CommRow), "the bucket table");
    int64_t whole = shared->on ? bucket_elements(&zero->plan.bucket[0]) : zero->plan.arena_elements;
    memory_plan_reserve(memory_plan, "weights",
                        shared->on ? FLOATX_NAME " of the embeddings' bucket" : FLOATX_NAME " replica",
                        (size_t)whole * sizeof(floatX), (void **)&zero->weights);
    reserve_parts(zero, &shared->kept, shared->over_all ? 1 : mesh->rail.size,
                  shared->over_all ? FLOATX_NAME " own windows" : FLOATX_NAME " part of the node's replica",
                  memory_plan);
    if (shared->on) reserve_slots(zero, memory_plan);
    if (shared->over_all) reserve_world(zero, memory_plan);
}

void zero_start_weights(Zero *zero) {
    SharedWeights *shared = &zero->shared;
    StepControl always = {0};
    if (!shared->on) return;
    shared->stream = zero->lanes->apart ? stream_create_urgent(zero->device, "layers' weights")
                                        : zero->lanes->last;
    shared->used = event_create(zero->device);
    for (int i = 0; i < 2; i++) shared->gathered[i] = event_create(zero->device);
    always.applied = 1;
    if (shared->over_all) copy_to_device(zero->compute, shared->always, &always, sizeof always);
}

void zero_free_weights(Zero *zero) {
    SharedWeights *shared = &zero->shared;
    for (int i = 0; i < 2 && shared->used; i++) event_destroy(shared->gathered[i]);
    if (shared->used) event_destroy(shared->used);
    if (shared->stream && shared->stream != zero->lanes->last) stream_destroy(shared->stream);
    free(shared->kept.start);
    free(shared->second.start);
    free(shared->message_start);
    free(shared->filled);
    free(shared->row);
}

// --- where things lie ----------------------------------------------------------------------------

// Whole bucket b: in the arena, or in its slot, where it is once zero_weights_wait has been called.
static floatX *whole_bucket(const Zero *zero, int b) {
    return zero_weights_resident(zero, b) ? zero->weights + zero->plan.bucket[b].arena_start
                                          : zero->shared.slot[b % 2];
}

floatX *zero_kept_weights(const Zero *zero, int b, int64_t *elements) {
    bool resident = zero_weights_resident(zero, b);
    *elements = resident ? bucket_elements(&zero->plan.bucket[b])
                         : part_elements(&zero->plan.bucket[b], &zero->shared.kept);
    return resident ? whole_bucket(zero, b) : zero->shared.kept.memory + zero->shared.kept.start[b];
}

// Window w of this rank's part of bucket b.
static WeightWindows window_of(const Zero *zero, const WeightParts *parts, int b, int w) {
    const Bucket *bucket = &zero->plan.bucket[b];
    floatX *part = parts->memory + parts->start[b];
    WeightWindows own = {part + w * bucket->matrix_per_rank,
                         part + parts->windows * bucket->matrix_per_rank + w * bucket->tail_per_rank};
    return own;
}

// Whose windows this rank keeps: its own, or those of its rail.
static int kept_rank(const Zero *zero, int w) {
    const Mesh *mesh = zero->mesh;
    return zero->shared.over_all ? mesh->dp.rank : w * mesh->node.size + mesh->node.rank;
}

WeightWindows zero_kept_windows(const Zero *zero, int b, int owner) {
    WeightWindows none = {NULL, NULL};
    if (zero_weights_resident(zero, b))
        return weight_windows_of(&zero->plan.bucket[b], whole_bucket(zero, b), owner);
    int w = zero->shared.over_all ? 0 : owner / zero->mesh->node.size;
    return kept_rank(zero, w) == owner ? window_of(zero, &zero->shared.kept, b, w) : none;
}

GatherBuffer zero_gather_buffer(const Zero *zero, int b) {
    const SharedWeights *shared = &zero->shared;
    bool resident = zero_weights_resident(zero, b), alone = !resident && shared->over_all;
    GatherBuffer buffer = {zero->gather[qwd_slot(b)], alone ? 1 : zero->mesh->rail.size,
                           resident ? zero->mesh->node.size : 1,
                           alone && shared->message ? shared->message + shared->message_start[b] : NULL};
    return buffer;
}

floatX *zero_weight(const Zero *zero, int tensor) {
    int b = zero->plan.tensor_bucket[tensor];
    return whole_bucket(zero, b) + (zero->plan.tensor_arena[tensor] - zero->plan.bucket[b].arena_start);
}

WeightWindows zero_own_weights(const Zero *zero, int b) {
    return zero_kept_windows(zero, b, zero->mesh->dp.rank);
}

floatX *zero_piece_weights(const Zero *zero, const Piece *piece) {
    int b = zero->plan.tensor_bucket[piece->tensor];
    const Bucket *bucket = &zero->plan.bucket[b];
    int64_t at = piece->state_at - bucket->state_start;  // in the own shard: matrix window, then tail's
    WeightWindows own = zero_own_weights(zero, b);
    return at < bucket->matrix_per_rank ? own.matrix + at : own.tail + (at - bucket->matrix_per_rank);
}

bool zero_kept_run(const Zero *zero, int tensor, int w, KeptRun *run) {
    int b = zero->plan.tensor_bucket[tensor];
    const Bucket *bucket = &zero->plan.bucket[b];
    int64_t n = tensor_elements(&zero->tensors[tensor]);
    int64_t from = zero->plan.tensor_arena[tensor] - bucket->arena_start;
    if (zero_weights_resident(zero, b)) {
        *run = (KeptRun){zero_weight(zero, tensor), 0, n};
        return w == 0;
    }
    bool tail = from >= bucket->matrix_elements;
    int64_t size = tail ? bucket->tail_per_rank : bucket->matrix_per_rank;
    if (tail) from -= bucket->matrix_elements;
    int64_t window = kept_rank(zero, w) * size, lo = from > window ? from : window;
    int64_t hi = from + n < window + size ? from + n : window + size;
    WeightWindows own = window_of(zero, &zero->shared.kept, b, w);
    *run = (KeptRun){(tail ? own.tail : own.matrix) + (lo - window), lo - from, hi - lo};
    return lo < hi;
}

void zero_keep_weights(Zero *zero, int tensor) {
    KeptRun run;
    if (zero_weights_resident(zero, zero->plan.tensor_bucket[tensor])) return;
    zero_weights_given(zero);
    for (int w = 0; w < zero->shared.kept.windows; w++) {
        if (!zero_kept_run(zero, tensor, w, &run)) continue;
        copy_on_device(zero->compute, run.memory, zero_weight(zero, tensor) + run.first,
                       (size_t)run.count * sizeof(floatX));
    }
}

// --- a layer's weights ---------------------------------------------------------------------------

// The parts of bucket b that the ranks of a node hold together.
static const WeightParts *node_parts(const Zero *zero) {
    return zero->shared.over_all ? &zero->shared.second : &zero->shared.kept;
}

// Their windows side by side in the slot, as rows of a gather.
static int list_rows(const Zero *zero, int b) {
    const Bucket *bucket = &zero->plan.bucket[b];
    int rows = 0;
    for (int w = 0; w < zero->mesh->rail.size; w++) {
        WeightWindows own = window_of(zero, node_parts(zero), b, w);
        WeightWindows all = weight_windows_of(bucket, whole_bucket(zero, b), w * zero->mesh->node.size);
        const CommRow both[] = {{own.matrix, all.matrix, (size_t)bucket->matrix_per_rank * sizeof(floatX)},
                                {own.tail, all.tail, (size_t)bucket->tail_per_rank * sizeof(floatX)}};
        for (int i = 0; i < 2; i++) {
            if (both[i].bytes) zero->shared.row[rows++] = both[i];
        }
    }
    return rows;
}

// This rank's part of the node's, out of the slot.
static void fill_second(Zero *zero, int b) {
    const Group *node = &zero->mesh->node;
    int rows = list_rows(zero, b);
    for (int i = 0; i < rows; i++) {
        const CommRow *row = &zero->shared.row[i];
        copy_on_device(zero->shared.stream, (void *)row->own,
                       (const uint8_t *)row->all + (size_t)node->rank * row->bytes, row->bytes);
    }
    zero->shared.filled[b] = true;
}

// The own message into its slot of the buffer.
static void write_message(Zero *zero, int b, const MessageLayout *m, uint8_t *own) {
    const SharedWeights *shared = &zero->shared;
    const Bucket *bucket = &zero->plan.bucket[b];
    MessageSections at = message_sections(m, 0);
    WeightWindows kept = window_of(zero, &shared->kept, b, 0);
    if (shared->messages_stand) {
        copy_on_device(shared->stream, own, shared->message + shared->message_start[b],
                       (size_t)message_content(m));
        return;
    }
    copy_on_device(shared->stream, own + at.codes, kept.matrix,
                   (size_t)bucket->matrix_per_rank * sizeof(floatX));
    copy_on_device(shared->stream, own + at.tail, kept.tail, (size_t)bucket->tail_per_rank * sizeof(floatX));
}

// From all ranks, as the hops of qwd.c go, but on one stream.
static void gather_over_all(Zero *zero, int b) {
    SharedWeights *shared = &zero->shared;
    WireChecks *checks = &zero->wire_checks;
    WeightWire wire = wire_of_gather(zero);
    const Mesh *mesh = zero->mesh;
    int nodes = mesh->rail.size, row = mesh->node.rank * nodes, slot = row + mesh->rail.rank;
    ApplyWeights a = {0};
    a.control = shared->always;
    a.bucket = zero->plan.bucket[b];
    a.messages = shared->buffer;
    a.nodes = nodes;
    a.per_node = mesh->node.size;
    a.message = plan_weight_message(&a.bucket, &wire);
    a.codec = wire.codec;
    a.group = wire.group;
    a.weights = whole_bucket(zero, b);
    write_message(zero, b, &a.message, shared->buffer + slot * a.message.bytes);
    wire_seal_own(checks, b, slot, &a.message, shared->buffer, shared->stream);
    if (nodes > 1) {
        wire_all_gather(checks, HOP_LAYER_RAIL, row, 1, &a.message, shared->buffer, shared->stream);
        wire_check_gathered(checks, HOP_LAYER_RAIL, b, row, 1, &a.message, shared->buffer, shared->stream);
    }
    if (a.per_node > 1) {
        wire_all_gather(checks, HOP_LAYER_NODE, 0, nodes, &a.message, shared->buffer, shared->stream);
        wire_check_gathered(checks, HOP_LAYER_NODE, b, 0, nodes, &a.message, shared->buffer, shared->stream);
    }
    kernel_apply_weights(shared->stream, &a);
    if (shared->second.memory && !shared->filled[b]) fill_second(zero, b);
}

// Into the bucket's slot, behind the layers that have used the slot so far, and behind the bucket's
// latest update.
static void gather_bucket(Zero *zero, int b, bool backward) {
    SharedWeights *shared = &zero->shared;
    bool over_all = shared->over_all && !(backward && shared->filled[b]);
    timer_start(zero->timers, TIMER_EXPOSED_WEIGHTS, zero->compute);
    event_record(shared->used, zero->compute);
    stream_wait(shared->stream, shared->used);
    if (zero->pending[b]) stream_wait(shared->stream, zero->done[b]);
    zero->pending[b] = false;
    if (over_all) gather_over_all(zero, b);
    else wire_gather_rows(&zero->wire_checks, b, shared->row, list_rows(zero, b), shared->stream);
    event_record(shared->gathered[b % 2], shared->stream);
    shared->held[b % 2] = b;
    shared->coming[b % 2] = true;
    if (zero->config->no_overlap) lanes_synchronize(zero->lanes);
    timer_stop(zero->timers, TIMER_EXPOSED_WEIGHTS, zero->compute);
}

// Compute waits, and says how long.
static void wait_for(Zero *zero, Event *event, bool *under_way) {
    if (!*under_way) return;
    timer_start(zero->timers, TIMER_EXPOSED_WEIGHTS, zero->compute);
    stream_wait(zero->compute, event);
    timer_stop(zero->timers, TIMER_EXPOSED_WEIGHTS, zero->compute);
    *under_way = false;
}

void zero_weights_wait(Zero *zero, int unit, int next, bool backward) {
    SharedWeights *shared = &zero->shared;
    int b = zero->plan.unit_bucket[unit], slot = b % 2, ahead = next < 0 ? b : zero->plan.unit_bucket[next];
    if (zero_weights_resident(zero, b)) {
        wait_for(zero, zero->done[b], &zero->pending[b]);
    } else {
        if (shared->held[slot] != b) gather_bucket(zero, b, backward);
        wait_for(zero, shared->gathered[slot], &shared->coming[slot]);
    }
    if (zero_weights_resident(zero, ahead) || !zero->lanes->apart || shared->held[ahead % 2] == ahead) return;
    if (ahead % 2 != slot || zero_weights_resident(zero, b)) gather_bucket(zero, ahead, backward);
}

// Buckets are applied in their order, on one stream: the last one's event speaks for all.
void zero_weights_wait_all(Zero *zero) {
    for (int b = zero->plan.buckets - 1; b >= 0; b--) {
        if (!zero->pending[b]) continue;
        wait_for(zero, zero->done[b], &zero->pending[b]);
        for (int earlier = 0; earlier < b; earlier++) zero->pending[earlier] = false;
    }
    for (int i = 0; i < 2; i++) wait_for(zero, zero->shared.gathered[i], &zero->shared.coming[i]);
}

void zero_weights_checked(Zero *zero) {
    if (!zero->wire_checks.parts || !zero->lanes->apart) return;
    event_record(zero->shared.used, zero->shared.stream);
    stream_wait(zero->lanes->last, zero->shared.used);
}

void zero_weights_change(Zero *zero) {
    SharedWeights *shared = &zero->shared;
    for (int i = 0; i < 2; i++) {
        wait_for(zero, shared->gathered[i], &shared->coming[i]);
        shared->held[i] = -1;
    }
    for (int b = 0; shared->filled && b < zero->plan.buckets; b++) shared->filled[b] = false;
}

void zero_weights_given(Zero *zero) {
    zero_weights_change(zero);
    zero->shared.messages_stand = false;
}

void zero_weights_updated(Zero *zero) {
    SharedWeights *shared = &zero->shared;
    if (shared->message && !shared->messages_stand) shared->messages_stand = zero_verdict(zero, 0).applied;
}
