// Canonical chunks of the parameters: see chunks.h.
#include "llmc/state/chunks.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/state/zero_parts.h"

// A range of this rank's optimizer state and its position in a chunk.
typedef struct Place {
    int chunk, range;
    bool counted;  // this rank sends its pseudo-gradient
    ChunkPlace at;
} Place;

struct Chunks {
    Zero *zero;
    Tensor *tensors;      // whole tensors, in the order of Tensor.number
    BucketLayout layout;  // one bucket per chunk, for one rank
    OuterLayout outer;
    OuterStep step;  // format and buffers
    Place *place;    // (places) ranges that this rank holds
    int places;
    Place *all;  // rank 0: places of all ranks, rank by rank
    int *first;  // rank 0: (world size + 1) first place of a rank in `all`
    // device memory
    float *gradient, *mean, *own;  // (largest chunk)
    uint8_t *message;              // (largest message)
    uint64_t *hash;                // (chunks) of the latest merges
    Segment *segments;
    uint8_t *payload, *state;  // host memory: chunks_payload (rank 0), chunks_state
    Event *encoded;            // the latest message has been copied
    Event *merged;             // the latest hash has been copied
    uint64_t *host_hash;       // host memory (chunks)
    uint64_t *summed;          // (chunks) the same over all ranks
};

// --- layout --------------------------------------------------------------------------------------

// Chunks are single layers, unless they have very few elements.
static bool build_layout(Chunks *c, const GradFormat *format, Error *err) {
    int count = c->layout.tensors;
    bool grouped = codec_grouped(format->inter_codec);
    int64_t alignment = layout_alignment(grouped ? format->inter_group : 0, 0, 0);
    LayoutOptions options = {.nodes = 1,
                             .per_node = 1,
                             .alignment = alignment,
                             .chunk_alignment = alignment,
                             .bucket_elements = 1,
                             .pieces = 1};
    LayoutTensor *rows = tensors_for_plan(c->tensors, count);
    bool ok = layout_build(&c->layout, rows, count, &options, err);
    free(rows);
    return ok;
}

// Returns the position of a range of a rank's part of a tensor.
static ChunkPlace place_of(const Chunks *c, const Tensor *part, const Range *range) {
    const Tensor *whole = &c->tensors[part->number];
    assert(strcmp(whole->name, part->name) == 0);
    const Bucket *bucket = &c->layout.bucket[c->layout.tensor_bucket[part->number]];
    ChunkPlace at = {.n = range->hi - range->lo,
                     .first = range->lo,
                     .width = part->local[1],
                     .pitch = whole->whole[1],
                     .base = c->layout.tensor_arena[part->number] - bucket->arena_start};
    if (part->split == 0) at.base += part->offset * at.pitch;
    if (part->split == 1) at.base += part->offset;
    return at;
}

static void list_places(Chunks *c) {
    const Base *base = &c->zero->base;
    c->place = xcalloc((size_t)base->held_count + 1, sizeof(Place), "the ranges of chunks");
    for (int i = 0; i < base->held_count; i++) {
        const Range *range = &base->ranges[i];
        const Tensor *part = &base->tensors[range->tensor];
        c->place[c->places++] = (Place){.chunk = c->layout.tensor_bucket[part->number],
                                        .range = i,
                                        .counted = part->counted && i < base->range_count,
                                        .at = place_of(c, part, range)};
    }
}

static void reserve(Chunks *c, MemoryPlan *plan) {
    const char *group = "elastic replica groups";
    size_t most = (size_t)outer_largest_shard(&c->outer) * sizeof(float);
    memory_plan_reserve(plan, group, "pseudo-gradient of a chunk", most, (void **)&c->gradient);
    memory_plan_reserve(plan, group, "mean of the replica groups", most, (void **)&c->mean);
    memory_plan_reserve(plan, group, "own contribution", most, (void **)&c->own);
    memory_plan_reserve(plan, group, "message of a chunk",
                        (size_t)outer_largest_message(&c->outer, &c->step.format), (void **)&c->message);
    memory_plan_reserve(plan, group, "partial sums of the norm", most / HADAMARD_ORDER + 2 * sizeof(float),
                        (void **)&c->step.partials);
    size_t hashes = (size_t)c->layout.buckets * sizeof(uint64_t);
    memory_plan_reserve(plan, group, "hashes of the outer weights", hashes, (void **)&c->hash);
    memory_plan_reserve_host(plan, "host memory", "hashes of the outer weights", hashes,
                             (void **)&c->host_hash);
    int64_t payloads = 0, state = 0;
    for (int i = 0; i < c->layout.buckets; i++) {
        payloads += chunks_payload_bytes(c, i);
        if (chunks_state_bytes(c, i) > state) state = chunks_state_bytes(c, i);
    }
    memory_plan_reserve_host(plan, "host memory", "outer state of a chunk, for other replica groups",
                             (size_t)state, (void **)&c->state);
    if (c->zero->base.mesh->world.rank == 0)
        memory_plan_reserve_host(plan, "host memory", "offers to other replica groups", (size_t)payloads,
                                 (void **)&c->payload);
    memory_plan_reserve(plan, group, "segment table", (size_t)c->outer.segments_total * sizeof(Segment),
                        (void **)&c->segments);
}

Chunks *chunks_plan(Zero *zero, const Tensor *whole, int count, MemoryPlan *plan, Error *err) {
    assert(zero && whole && count > 0);
    Chunks *c = xcalloc(1, sizeof *c, "the chunks");
    c->zero = zero;
    c->tensors = xcalloc((size_t)count, sizeof(Tensor), "the parameter table");
    memcpy(c->tensors, whole, (size_t)count * sizeof(Tensor));
    // As for a rank that holds whole tensors, without Muon's requirements on shards.
    for (int i = 0; i < count; i++) c->tensors[i].muon.columns = 0;
    tensors_number(c->tensors, count, 1);
    c->layout.tensors = count;
    c->step.format = zero->base.config->quantized_gradients ? zero->base.grad_format
                                                            : zero->base.plain_grad_format;
    if (!build_layout(c, &c->step.format, err)) {
        free(c->tensors);
        free(c);
        return NULL;
    }
    outer_layout(&c->outer, &c->layout, 0, 1, 0);
    c->summed = xcalloc((size_t)c->layout.buckets, sizeof(uint64_t), "the chunks");
    list_places(c);
    reserve(c, plan);
    return c;
}

void chunks_free(Chunks *c) {
    if (!c) return;
    if (c->encoded) {
        event_destroy(c->encoded);
        event_destroy(c->merged);
    }
    outer_layout_free(&c->outer);
    layout_free(&c->layout);
    free(c->summed);
    free(c->tensors);
    free(c->place);
    free(c->all);
    free(c->first);
    free(c);
}

// Gathers the places of all ranks on rank 0.
static void gather_places(Chunks *c, Peers world) {
    int ranks = peers_size(world), rank = peers_rank(world);
    int own = c->places * (int)sizeof(Place);
    int *length = xcalloc((size_t)ranks, sizeof(int), "the ranges of chunks"),
        *start = xcalloc((size_t)ranks + 1, sizeof(int), "the ranges of chunks");
    peers_all_gather(world, &own, length, 1, MPI_INT);
    for (int r = 0; r < ranks; r++) start[r + 1] = start[r] + length[r];
    if (rank == 0) c->all = xmalloc((size_t)start[ranks] + 1, "the ranges of chunks");
    peers_gather_bytes(world, c->place, own, c->all, length, start);
    for (int r = 0; r <= ranks; r++) start[r] /= (int)sizeof(Place);
    c->first = start;
    free(length);
}

void chunks_start(Chunks *c, Peers world) {
    const Base *base = &c->zero->base;
    c->step.layout = &c->outer;
    c->step.segments = c->segments;
    c->step.seed = (uint32_t)base->config->seed;
    c->step.checks = base->checks;
    c->step.stream = base->lanes->last;
    c->encoded = event_create(base->device);
    c->merged = event_create(base->device);
    copy_to_device(base->compute, c->segments, c->outer.segments,
                   (size_t)c->outer.segments_total * sizeof(Segment));
    stream_synchronize(base->compute);
    gather_places(c, world);
}

int chunks_count(const Chunks *c) { return c->layout.buckets; }
int64_t chunks_elements(const Chunks *c, int chunk) { return bucket_elements(&c->layout.bucket[chunk]); }
int64_t chunks_before(const Chunks *c, int chunk) { return c->layout.bucket[chunk].arena_start; }
int64_t chunks_message_bytes(const Chunks *c, int chunk) {
    return outer_message(&c->outer, chunk, &c->step.format).bytes;
}

int64_t chunks_payload_bytes(const Chunks *c, int chunk) {
    return CHUNK_HEADER_BYTES + chunks_message_bytes(c, chunk);
}
int64_t chunks_state_bytes(const Chunks *c, int chunk) {
    return CHUNK_HEADER_BYTES + 2 * (int64_t)sizeof(float) * chunks_elements(c, chunk);
}
uint8_t *chunks_state(const Chunks *c) { return c->state; }
const GradFormat *chunks_format(const Chunks *c) { return &c->step.format; }

uint8_t *chunks_payload(const Chunks *c, int chunk) {
    uint8_t *payload = c->payload;
    for (int i = 0; payload && i < chunk; i++) payload += chunks_payload_bytes(c, i);
    return payload;
}

static uint64_t mix_bytes(uint64_t hash, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) hash = replica_mix(hash, ((const uint8_t *)bytes)[i]);
    return hash;
}

uint64_t chunks_layout_hash(const Chunks *c) {
    const GradFormat *f = &c->step.format;
    int64_t codec[] = {f->inter_codec, f->inter_group, f->tail_codec, f->transform, f->rounding};
    uint64_t hash = mix_bytes(0, codec, sizeof codec);
    for (int i = 0; i < c->layout.tensors; i++) {
        hash = mix_bytes(hash, c->tensors[i].name, strlen(c->tensors[i].name));
        hash = mix_bytes(hash, c->tensors[i].whole, sizeof c->tensors[i].whole);
        hash = mix_bytes(hash, &c->layout.tensor_arena[i], sizeof(int64_t));
    }
    return hash;
}

// --- copies between a rank's ranges and whole chunks ---------------------------------------------

// Copies a range out of a whole chunk, or into it.
static void copy_out(const ChunkPlace *at, float *part, const float *whole) {
    if (at->width == at->pitch) {
        memcpy(part, whole + at->base + at->first, (size_t)at->n * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < at->n; i++) part[i] = whole[chunk_position(at, i)];
}

static void copy_in(const ChunkPlace *at, const float *part, float *whole) {
    if (at->width == at->pitch) {
        memcpy(whole + at->base + at->first, part, (size_t)at->n * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < at->n; i++) whole[chunk_position(at, i)] = part[i];
}

// Returns the elements of the counted places of a chunk.
static int64_t counted_elements(const Place *place, int count, int chunk) {
    int64_t elements = 0;
    for (int i = 0; i < count; i++)
        if (place[i].chunk == chunk && place[i].counted) elements += place[i].at.n;
    return elements;
}

// Rank 0: copies the counted ranges of a rank, which are one after the other in `packed`.
static void unpack(const Chunks *c, int rank, int chunk, const float *packed, float *whole) {
    for (int i = c->first[rank]; i < c->first[rank + 1]; i++) {
        const Place *p = &c->all[i];
        if (p->chunk != chunk || !p->counted) continue;
        copy_in(&p->at, packed, whole);
        packed += p->at.n;
    }
}

// Gathers the counted ranges of all ranks on rank 0, in several parts, because MPI counts bytes in
// int. packed: this rank's ranges, one after the other. whole: (chunks_elements) zeroed, on rank 0.
static void gather(const Chunks *c, int chunk, const float *packed, float *whole, Peers world) {
    int ranks = peers_size(world), rank = peers_rank(world);
    int64_t most = 0, own = counted_elements(c->place, c->places, chunk), part = (1 << 26) / ranks;
    if (ranks == 1) {
        unpack(c, 0, chunk, packed, whole);
        return;
    }
    int64_t *elements = xcalloc((size_t)ranks, sizeof(int64_t), "a gathered chunk");
    int *length = xcalloc((size_t)ranks, sizeof(int), "a gathered chunk"),
        *start = xcalloc((size_t)ranks, sizeof(int), "a gathered chunk");
    float **of_rank = xcalloc((size_t)ranks, sizeof *of_rank, "a gathered chunk");
    peers_all_gather(world, &own, elements, 1, MPI_INT64_T);
    for (int r = 0; r < ranks; r++) most = elements[r] > most ? elements[r] : most;
    if (part > most) part = most;
    for (int r = 0; rank == 0 && r < ranks; r++)
        of_rank[r] = xmalloc((size_t)elements[r] * sizeof(float) + 1, "a gathered chunk");
    float *received = rank == 0 ? xmalloc((size_t)(ranks * part) * sizeof(float) + 1, "a gathered chunk")
                                : NULL;
    for (int64_t at = 0; at < most; at += part) {
        for (int r = 0; r < ranks; r++) {
            int64_t n = elements[r] - at < part ? elements[r] - at : part;
            length[r] = n > 0 ? (int)(n * (int64_t)sizeof(float)) : 0;
            start[r] = (int)(r * part * (int64_t)sizeof(float));
        }
        peers_gather_bytes(world, packed + (at < own ? at : 0), length[rank], received, length, start);
        for (int r = 0; rank == 0 && r < ranks; r++)
            memcpy(of_rank[r] + at, received + r * part, (size_t)length[r]);
    }
    for (int r = 0; rank == 0 && r < ranks; r++) {
        unpack(c, r, chunk, of_rank[r], whole);
        free(of_rank[r]);
    }
    free(received);
    free(of_rank);
    free(start);
    free(length);
    free(elements);
}

// Copies the counted ranges of a chunk from device memory that is laid out like the optimizer
// state, and gathers them.
static void gather_state(Chunks *c, int chunk, const float *state, float *whole, Peers world) {
    const Base *base = &c->zero->base;
    int64_t n = counted_elements(c->place, c->places, chunk), at = 0;
    float *packed = xmalloc((size_t)n * sizeof(float) + 1, "a chunk's ranges");
    for (int i = 0; i < c->places; i++) {
        const Place *p = &c->place[i];
        if (p->chunk != chunk || !p->counted) continue;
        copy_to_host(base->lanes->last, packed + at, state + base->ranges[p->range].state_at,
                     (size_t)p->at.n * sizeof(float));
        at += p->at.n;
    }
    stream_synchronize(base->lanes->last);
    gather(c, chunk, packed, whole, world);
    free(packed);
}

// --- pseudo-gradients ----------------------------------------------------------------------------

// Writes the pseudo-gradient of the counted ranges to c->gradient: at their places in the chunk, or
// packed. Returns the number of elements.
static int64_t pseudo_gradient(Chunks *c, int chunk, bool packed) {
    const Base *base = &c->zero->base;
    int64_t n = 0;
    for (int i = 0; i < c->places; i++) {
        const Place *p = &c->place[i];
        if (p->chunk != chunk || !p->counted) continue;
        int64_t at = base->ranges[p->range].state_at, to = packed ? n : p->at.base + p->at.first;
        kernel_pseudo_gradient(base->lanes->last, c->gradient + to, c->zero->outer.outer + at,
                               c->zero->optimizer.master + at, p->at.n);
        n += p->at.n;
    }
    return n;
}

void chunks_encode(Chunks *c, int chunk, uint32_t key, uint32_t source, uint8_t *message, Peers world) {
    assert(chunk >= 0 && chunk < c->layout.buckets);
    Stream *last = c->zero->base.lanes->last;
    size_t bytes = (size_t)chunks_elements(c, chunk) * sizeof(float);
    bool alone = peers_size(world) == 1, first = peers_rank(world) == 0;
    if (alone) {
        set_zero(last, c->gradient, bytes);
        pseudo_gradient(c, chunk, false);
    } else {
        int64_t n = pseudo_gradient(c, chunk, true);
        float *packed = xmalloc((size_t)n * sizeof(float) + 1, "a chunk's ranges");
        float *whole = first ? xcalloc(1, bytes, "a chunk") : NULL;
        copy_to_host(last, packed, c->gradient, (size_t)n * sizeof(float));
        stream_synchronize(last);
        gather(c, chunk, packed, whole, world);
        if (first) copy_to_device(last, c->gradient, whole, bytes);
        free(whole);
        free(packed);
    }
    if (!first) return;
    c->step.step = key;
    outer_encode(&c->step, chunk, c->gradient, source, c->message);
    copy_to_pinned(last, message, c->message, (size_t)chunks_message_bytes(c, chunk));
    event_record(c->encoded, last);
}

void chunks_encoded(Chunks *c) { event_synchronize(c->encoded); }

// Decodes a contribution to `to`.
static void decode(Chunks *c, int chunk, const ChunkPart *part, float *to) {
    copy_to_device(c->step.stream, c->message, part->message, (size_t)chunks_message_bytes(c, chunk));
    c->step.step = part->key;
    outer_decode(&c->step, chunk, c->message, to);
}

void chunks_merge(Chunks *c, int chunk, const ChunkPart *parts, int count, OuterRates rates) {
    assert(chunk >= 0 && chunk < c->layout.buckets && count >= 1);
    const Base *base = &c->zero->base;
    Outer *outer = &c->zero->outer;
    Stream *last = base->lanes->last;
    bool own = false;
    for (int i = 0; i < count; i++) {
        float *decoded = parts[i].own ? c->own : c->gradient;
        decode(c, chunk, &parts[i], decoded);
        kernel_add_weighted(last, c->mean, decoded, parts[i].weight, i == 0, chunks_elements(c, chunk));
        own = own || parts[i].own;
    }
    set_zero(last, c->hash + chunk, sizeof(uint64_t));
    for (int i = 0; i < c->places; i++) {
        const Place *p = &c->place[i];
        if (p->chunk != chunk) continue;
        int64_t at = base->ranges[p->range].state_at;
        MergeOuter merge = {.outer = outer->outer + at,
                            .momentum = outer->momentum + at,
                            .master = c->zero->optimizer.master + at,
                            .mean = c->mean,
                            .own = own ? c->own : NULL,
                            .place = p->at,
                            .rate = rates.rate,
                            .decay = rates.momentum,
                            .damping = rates.damping,
                            .share = 1.0f - (float)base->config->local_steps_mix,
                            .hash = p->counted ? c->hash + chunk : NULL};
        kernel_merge_outer(last, &merge);
    }
    outer->finished_since = false;
    copy_to_pinned(last, c->host_hash + chunk, c->hash + chunk, sizeof(uint64_t));
    event_record(c->merged, last);
}

const uint64_t *chunks_hashes(Chunks *c, Peers world) {
    event_synchronize(c->merged);
    memcpy(c->summed, c->host_hash, (size_t)c->layout.buckets * sizeof(uint64_t));
    peers_all_reduce(world, c->summed, c->layout.buckets, MPI_UINT64_T, MPI_SUM);
    return c->summed;
}

// --- state of another group ----------------------------------------------------------------------

void chunks_get_state(Chunks *c, int chunk, float *state, Peers world) {
    int64_t n = chunks_elements(c, chunk);
    if (state) memset(state, 0, 2 * (size_t)n * sizeof(float));
    gather_state(c, chunk, c->zero->outer.outer, state, world);
    gather_state(c, chunk, c->zero->outer.momentum, state ? state + n : NULL, world);
}

// Sets outer weights, momentum and master weights of one range. own: the decoded contribution, or
// NULL.
static void set_range(Chunks *c, const Place *p, const float *state, int64_t n, bool join, const float *own) {
    Zero *zero = c->zero;
    size_t bytes = (size_t)p->at.n * sizeof(float);
    float *fresh = xmalloc(bytes, "a range of a chunk"), *old = xmalloc(bytes, "a range of a chunk"),
          *master = xmalloc(bytes, "a range of a chunk"), *counted = xcalloc(1, bytes, "a range of a chunk");
    copy_out(&p->at, fresh, state + n);
    zero_put(zero, p->range, SLICE_OUTER_MOMENTUM, fresh);
    copy_out(&p->at, fresh, state);
    zero_fetch(zero, p->range, SLICE_MASTER, old);
    zero_fetch(zero, p->range, SLICE_LOCAL_MASTER, master);
    if (own) copy_out(&p->at, counted, own);
    float share = 1.0f - (float)zero->base.config->local_steps_mix;
    for (int64_t i = 0; i < p->at.n; i++)
        master[i] = join ? fresh[i]
                         : f32_add(master[i], f32_mul(share, f32_add(f32_sub(fresh[i], old[i]), counted[i])));
    zero_put(zero, p->range, SLICE_MASTER, fresh);
    zero_put(zero, p->range, SLICE_LOCAL_MASTER, master);
    free(counted);
    free(master);
    free(old);
    free(fresh);
}

// Sets the model weights of this rank's part of a tensor to the outer weights of its chunk.
static void set_weights(Chunks *c, int tensor, const float *outer) {
    const Tensor *part = &c->zero->base.tensors[tensor];
    const Range all = {.hi = tensor_elements(part)};
    ChunkPlace at = place_of(c, part, &all);
    float *values = xmalloc((size_t)at.n * sizeof(float), "weights of a chunk");
    floatX *weights = xmalloc((size_t)at.n * sizeof(floatX), "weights of a chunk");
    copy_out(&at, values, outer);
    for (int64_t i = 0; i < at.n; i++) weights[i] = floatX_from_float(values[i]);
    zero_put_weights(c->zero, tensor, weights);
    free(weights);
    free(values);
}

void chunks_set_state(Chunks *c, int chunk, const float *state, bool join, const ChunkPart *counted) {
    assert(chunk >= 0 && chunk < c->layout.buckets && state);
    int64_t n = chunks_elements(c, chunk);
    const Base *base = &c->zero->base;
    float *own = NULL;
    zero_synchronize(c->zero);
    if (counted) {
        own = xmalloc((size_t)n * sizeof(float), "a chunk");
        decode(c, chunk, counted, c->own);
        copy_to_host(c->step.stream, own, c->own, (size_t)n * sizeof(float));
        stream_synchronize(c->step.stream);
    }
    for (int i = 0; i < c->places; i++)
        if (c->place[i].chunk == chunk) set_range(c, &c->place[i], state, n, join, own);
    for (int t = 0; join && t < base->layout.tensors; t++)
        if (c->layout.tensor_bucket[base->tensors[t].number] == chunk) set_weights(c, t, state);
    c->zero->outer.finished_since = false;
    free(own);
}
