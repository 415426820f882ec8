// Where a rank's weights lie, and how a layer's come together. Called by the files of this room, and
// by train_gpt.cu through zero.h.
//
// Under --data-parallel-sharding-strategy optim_grads_params the ranks of a node hold one replica
// together. Bucket 0, with the embeddings, is whole on every rank. Of every other bucket a rank
// keeps the windows of its rail: those that the ranks with its place in their nodes own. They are
// 1 / per_node of it. Whoever wants to use a layer calls zero_weights_wait, which gathers the
// layer's bucket inside the node, into one of two slots. The next layer's is gathered ahead into
// the other.
#include <stdlib.h>

#include "llmc/state/zero_inside.h"

// --- memory --------------------------------------------------------------------------------------

static int64_t bucket_elements(const Bucket *bucket) {
    return bucket->matrix_elements + bucket->tail_elements;
}

static int64_t part_elements(const Zero *zero, int b) {
    const Bucket *bucket = &zero->plan.bucket[b];
    return zero->shared.windows * (bucket->matrix_per_rank + bucket->tail_per_rank);
}

void zero_plan_weights(Zero *zero, MemoryPlan *memory_plan) {
    enum { GRAIN = 128 };  // elements: parts begin on 256 bytes, as memory does
    const Plan *plan = &zero->plan;
    SharedWeights *shared = &zero->shared;
    const char *group = "weights";
    int64_t part = 0, slot[2] = {0, 0};
    shared->on = zero->config->sharding == SHARD_PARAMETERS && zero->mesh->node.size > 1;
    shared->windows = zero->mesh->rail.size;
    shared->held[0] = shared->held[1] = -1;
    shared->start = (int64_t *)xcalloc((size_t)plan->buckets, sizeof(int64_t), "the bucket table");
    shared->row = (CommRow *)xcalloc(2 * (size_t)shared->windows, sizeof(CommRow), "the bucket table");
    for (int b = 0; b < plan->buckets; b++) {
        int64_t elements = bucket_elements(&plan->bucket[b]);
        shared->start[b] = part;
        if (zero_weights_resident(zero, b)) continue;
        part += round_up64(part_elements(zero, b), GRAIN);
        if (elements > slot[b % 2]) slot[b % 2] = elements;
    }
    int64_t whole = shared->on ? bucket_elements(&plan->bucket[0]) : plan->arena_elements;
    memory_plan_reserve(memory_plan, group,
                        shared->on ? FLOATX_NAME " of the embeddings' bucket" : FLOATX_NAME " replica",
                        (size_t)whole * sizeof(floatX), (void **)&zero->weights);
    if (!shared->on) return;
    memory_plan_reserve(memory_plan, group, FLOATX_NAME " part of the node's replica",
                        (size_t)part * sizeof(floatX), (void **)&shared->part);
    for (int i = 0; i < 2; i++) {
        memory_plan_reserve(memory_plan, group, FLOATX_NAME " of a layer, gathered",
                            (size_t)slot[i] * sizeof(floatX), (void **)&shared->slot[i]);
    }
}

void zero_start_weights(Zero *zero) {
    SharedWeights *shared = &zero->shared;
    if (!shared->on) return;
    shared->stream =
        zero->lanes->apart ? stream_create_urgent(zero->device, "layers' weights") : zero->lanes->last;
    shared->used = event_create(zero->device);
    for (int i = 0; i < 2; i++) shared->gathered[i] = event_create(zero->device);
}

void zero_free_weights(Zero *zero) {
    SharedWeights *shared = &zero->shared;
    for (int i = 0; i < 2 && shared->used; i++) event_destroy(shared->gathered[i]);
    if (shared->used) event_destroy(shared->used);
    if (shared->stream && shared->stream != zero->lanes->last) stream_destroy(shared->stream);
    free(shared->start);
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
    *elements = resident ? bucket_elements(&zero->plan.bucket[b]) : part_elements(zero, b);
    return resident ? whole_bucket(zero, b) : zero->shared.part + zero->shared.start[b];
}

// Window w of the part's: whose it is, and where it lies.
static int window_rank(const Zero *zero, int w) { return w * zero->mesh->node.size + zero->mesh->node.rank; }
static WeightWindows window_of(const Zero *zero, int b, int w) {
    const Bucket *bucket = &zero->plan.bucket[b];
    floatX *part = zero->shared.part + zero->shared.start[b];
    WeightWindows own = {part + w * bucket->matrix_per_rank,
                         part + zero->shared.windows * bucket->matrix_per_rank + w * bucket->tail_per_rank};
    return own;
}

WeightWindows zero_kept_windows(const Zero *zero, int b, int owner) {
    int D = zero->mesh->node.size;
    WeightWindows none = {NULL, NULL};
    if (zero_weights_resident(zero, b))
        return weight_windows_of(&zero->plan.bucket[b], whole_bucket(zero, b), owner);
    return owner % D == zero->mesh->node.rank ? window_of(zero, b, owner / D) : none;
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
    int64_t window = window_rank(zero, w) * size, lo = from > window ? from : window;
    int64_t hi = from + n < window + size ? from + n : window + size;
    WeightWindows own = window_of(zero, b, w);
    *run = (KeptRun){(tail ? own.tail : own.matrix) + (lo - window), lo - from, hi - lo};
    return lo < hi;
}

void zero_keep_weights(Zero *zero, int tensor) {
    KeptRun run;
    if (zero_weights_resident(zero, zero->plan.tensor_bucket[tensor])) return;
    for (int w = 0; w < zero->shared.windows; w++) {
        if (!zero_kept_run(zero, tensor, w, &run)) continue;
        copy_on_device(zero->compute, run.memory, zero_weight(zero, tensor) + run.first,
                       (size_t)run.count * sizeof(floatX));
    }
}

// --- a layer's weights ---------------------------------------------------------------------------

// The replica's windows that the ranks of the node keep, side by side in the slot.
static int list_rows(const Zero *zero, int b) {
    const Bucket *bucket = &zero->plan.bucket[b];
    int D = zero->mesh->node.size, rows = 0;
    for (int w = 0; w < zero->shared.windows; w++) {
        WeightWindows own = window_of(zero, b, w), all = weight_windows_of(bucket, whole_bucket(zero, b), w * D);
        const CommRow both[] = {{own.matrix, all.matrix, (size_t)bucket->matrix_per_rank * sizeof(floatX)},
                                {own.tail, all.tail, (size_t)bucket->tail_per_rank * sizeof(floatX)}};
        for (int i = 0; i < 2; i++) {
            if (both[i].bytes) zero->shared.row[rows++] = both[i];
        }
    }
    return rows;
}

// Into the bucket's slot, behind the layers that have used the slot so far, and behind the bucket's
// latest update.
static void gather_bucket(Zero *zero, int b) {
    SharedWeights *shared = &zero->shared;
    timer_start(zero->timers, TIMER_EXPOSED_WEIGHTS, zero->compute);
    event_record(shared->used, zero->compute);
    stream_wait(shared->stream, shared->used);
    if (zero->pending[b]) stream_wait(shared->stream, zero->done[b]);
    zero->pending[b] = false;
    wire_gather_rows(&zero->wire_checks, b, shared->row, list_rows(zero, b), shared->stream);
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

void zero_weights_wait(Zero *zero, int unit, int next) {
    SharedWeights *shared = &zero->shared;
    int b = zero->plan.unit_bucket[unit], slot = b % 2, ahead = next < 0 ? b : zero->plan.unit_bucket[next];
    if (zero_weights_resident(zero, b)) {
        wait_for(zero, zero->done[b], &zero->pending[b]);
    } else {
        if (shared->held[slot] != b) gather_bucket(zero, b);
        wait_for(zero, shared->gathered[slot], &shared->coming[slot]);
    }
    if (!zero->lanes->apart || zero_weights_resident(zero, ahead) || shared->held[ahead % 2] == ahead) return;
    if (ahead % 2 != slot || zero_weights_resident(zero, b)) gather_bucket(zero, ahead);
}

void zero_weights_wait_all(Zero *zero) {
    for (int b = 0; b < zero->plan.buckets; b++) wait_for(zero, zero->done[b], &zero->pending[b]);
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
}
