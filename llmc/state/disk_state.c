// Optimizer state in a scratch file: see disk_state.h.
#include "llmc/state/disk_state.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// Slot s of memory has ticket s.
enum { BOUNCE_TICKET = DISK_SLOTS, FLOATS_ALIGN = SCRATCH_ALIGN / (int)sizeof(float) };

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// --- chunks --------------------------------------------------------------------------------------

// Returns true if the first moments of the chunk are in bf16.
static bool is_narrow(const DiskState *d, const DiskChunk *chunk) {
    return d->momentum_bf16 && chunk->parts != STATE_PARTS;
}

static int64_t chunk_bytes(const DiskState *d, const DiskChunk *chunk) {
    if (!is_narrow(d, chunk)) return chunk->parts * chunk->padded;
    return chunk->padded + round_up64(chunk->count * (int64_t)sizeof(uint16_t), SCRATCH_ALIGN);
}

// Appends a chunk of elements [first, end) of bucket b.
static void add_chunk(DiskState *d, int b, int64_t first, int64_t end, int parts, int tensor) {
    DiskChunk chunk = {b, parts, tensor, first, end - first, d->file_bytes, 0};
    chunk.padded = round_up64(chunk.count, FLOATS_ALIGN) * (int64_t)sizeof(float);
    d->chunk = grow_array(d->chunk, d->chunks, sizeof *d->chunk, "the chunks of the state");
    d->chunk[d->chunks++] = chunk;
    d->file_bytes += chunk_bytes(d, &chunk);
    d->bounce_bytes = larger(d->bounce_bytes, chunk.padded);
    d->slot_bytes = larger(d->slot_bytes, chunk_bytes(d, &chunk));
}

static void cut(DiskState *d, int b, int64_t first, int64_t end, int parts) {
    for (; first < end; first += d->chunk_elements)
        add_chunk(d, b, first, smaller(first + d->chunk_elements, end), parts, -1);
}

// Cuts the matrices of a shard, with the padding between and after them.
static void cut_matrices(DiskState *d, int b, int shard, int group) {
    const Bucket *bucket = &d->layout->bucket[b];
    int64_t at = 0;
    for (int i = 0; i < bucket->segments; i++) {
        const Segment *segment = &d->layout->segments[bucket->first_segment + i];
        int64_t start = segment->start - shard * bucket->matrix_per_rank;
        if (start < 0 || start >= bucket->matrix_per_rank) continue;
        cut(d, b, at, start, STATE_EXP_AVG_SQ);
        at = round_up64(start + segment->numel, group);
        add_chunk(d, b, start, at, STATE_EXP_AVG_SQ, (int)segment->tensor);
    }
    cut(d, b, at, bucket->matrix_per_rank, STATE_EXP_AVG_SQ);
}

void disk_plan(DiskState *d, const BucketLayout *layout, int shard, int group, int64_t chunk_elements) {
    assert(d && layout && shard >= 0 && group > 0 && chunk_elements > 0);
    d->layout = layout;
    d->chunk_elements = round_up64(chunk_elements, lcm64(group, FLOATS_ALIGN));
    d->bucket_chunk = xcalloc((size_t)layout->buckets + 1, sizeof(int64_t), "the chunks of the state");
    d->squares = xcalloc((size_t)layout->buckets, sizeof(int64_t), "the chunks of the state");
    for (int b = 0; b < layout->buckets; b++) {
        const Bucket *bucket = &layout->bucket[b];
        if (bucket->whole) cut_matrices(d, b, shard, group);
        cut(d, b, bucket->whole ? bucket->matrix_per_rank : 0, bucket_shard(bucket), STATE_PARTS);
        d->bucket_chunk[b + 1] = d->chunks;
        d->squares[b] = layout_squares_start(layout, b);
    }
}

// One unit more than the buffers, to align them.
int64_t disk_memory_bytes(const DiskState *d) {
    return DISK_SLOTS * d->slot_bytes + d->bounce_bytes + SCRATCH_ALIGN;
}

bool disk_start(DiskState *d, void *memory, int threads, const Site *site, const ScratchEngine *engine,
                Error *err) {
    assert(!d->file && memory);
    d->file = xcalloc(1, sizeof *d->file, "the file of the state");
    pthread_mutex_init(&d->mutex, NULL);
    d->slots = (uint8_t *)memory + (-(uintptr_t)memory & (SCRATCH_ALIGN - 1));
    d->bounce = d->slots + DISK_SLOTS * d->slot_bytes;
    return scratch_open(d->file, &d->folder, d->file_bytes, threads, site, engine, err);
}

static void wait_for_slots(DiskState *d) {
    for (int slot = 0; slot < DISK_SLOTS; slot++) scratch_wait(d->file, slot);
}

void disk_stop(DiskState *d) {
    if (d->file) wait_for_slots(d);
}

void disk_free(DiskState *d) {
    if (d->file) {
        scratch_close(d->file);
        pthread_mutex_destroy(&d->mutex);
    }
    scratch_release(&d->folder);
    free(d->file);
    free(d->chunk);
    free(d->bucket_chunk);
    free(d->squares);
    *d = (DiskState){0};
}

// --- the update ----------------------------------------------------------------------------------

// Chunk numbers count over all steps. Chunk number i is chunk i modulo `chunks` and uses slot i
// modulo DISK_SLOTS.
static const DiskChunk *chunk_of(const DiskState *d, int64_t i) { return &d->chunk[i % d->chunks]; }
static int slot_of(int64_t i) { return (int)(i % DISK_SLOTS); }
static uint8_t *slot_memory(const DiskState *d, int64_t i) { return d->slots + slot_of(i) * d->slot_bytes; }

// Starts to read the chunks up to DISK_AHEAD after the next update. A slot may be reused when its
// write is complete. A chunk may be read when its write in the previous step is complete, which
// matters only if a step has fewer chunks than slots.
static void read_ahead(DiskState *d) {
    while (d->read <= d->updated + DISK_AHEAD && d->read - d->chunks < d->updated) {
        const DiskChunk *chunk = chunk_of(d, d->read);
        if (d->chunks < DISK_SLOTS && d->read >= d->chunks)
            scratch_wait(d->file, slot_of(d->read - d->chunks));
        scratch_wait(d->file, slot_of(d->read));
        scratch_read(d->file, slot_memory(d, d->read), chunk_bytes(d, chunk), chunk->offset,
                     slot_of(d->read));
        d->read++;
    }
}

static UpdateShard open_chunk(DiskState *d, const UpdateShard *shard) {
    UpdateShard own = *shard;
    const DiskChunk *chunk = chunk_of(d, d->updated);
    uint8_t *memory = slot_memory(d, d->updated);
    read_ahead(d);
    scratch_wait(d->file, slot_of(d->updated));
    own.master = (float *)(void *)memory;
    if (is_narrow(d, chunk)) own.momentum_bf16 = (uint16_t *)(void *)(memory + chunk->padded);
    else own.exp_avg = (float *)(void *)(memory + chunk->padded);
    own.exp_avg_sq = chunk->parts == STATE_PARTS ? (float *)(void *)(memory + 2 * chunk->padded) : NULL;
    return own;
}

UpdateShard disk_open_chunk(DiskState *d, const UpdateShard *shard) {
    pthread_mutex_lock(&d->mutex);
    UpdateShard own = open_chunk(d, shard);
    pthread_mutex_unlock(&d->mutex);
    return own;
}

void disk_update_chunk(DiskState *d, const UpdateShard *shard, int threads, const Site *site) {
    const DiskChunk *chunk = chunk_of(d, d->updated);
    pthread_mutex_lock(&d->mutex);
    UpdateShard own = open_chunk(d, shard);
    assert(own.exp_avg_sq || !own.matrix_grads);
    update_range_host(&own, chunk->first, chunk->first + chunk->count, threads, site);
    // A skipped step changes nothing.
    if (shard->control->applied)
        scratch_write(d->file, slot_memory(d, d->updated), chunk_bytes(d, chunk), chunk->offset,
                      slot_of(d->updated));
    d->updated++;
    pthread_mutex_unlock(&d->mutex);
}

void disk_update(void *store, int b, const UpdateShard *shard, int threads, const Site *site) {
    DiskState *d = (DiskState *)store;
    assert(b >= 0 && b < d->layout->buckets && d->file);
    int64_t count = d->bucket_chunk[b + 1] - d->bucket_chunk[b];
    assert(count == 0 || d->updated % d->chunks == d->bucket_chunk[b]);
    for (int64_t i = 0; i < count; i++) disk_update_chunk(d, shard, threads, site);
}

// --- copies --------------------------------------------------------------------------------------

void widen_bf16(float *wide, const uint16_t *narrow, int64_t n) {
    for (int64_t i = 0; i < n; i++) {  // never overwrites a value before it is read
        uint16_t value;
        memcpy(&value, narrow + i, sizeof value);
        wide[i] = bf16_to_float(value);
    }
}

void narrow_bf16(uint16_t *narrow, const float *wide, int64_t n) {
    for (int64_t i = 0; i < n; i++) narrow[i] = bf16_from_float(wide[i]);
}

// Returns the index of the first element of bucket b in a part of the state.
static int64_t part_start(const DiskState *d, StatePart part, int b) {
    return part == STATE_EXP_AVG_SQ ? d->squares[b] : d->layout->bucket[b].state_start;
}

static int bucket_at(const DiskState *d, StatePart part, int64_t at) {
    int lo = 0, hi = d->layout->buckets - 1;
    while (lo < hi) {
        int middle = (lo + hi + 1) / 2;
        if (part_start(d, part, middle) <= at) lo = middle;
        else hi = middle - 1;
    }
    return lo;
}

// A range of one part within a chunk, with the aligned range of the file that contains it.
typedef struct Span {
    int64_t unit;             // bytes of an element
    int64_t bytes, inside;    // of the range; its position in the aligned range
    int64_t offset, aligned;  // position and length of the aligned range
} Span;

// Returns the range from element `at` on, at most n elements long.
static Span span_at(const DiskState *d, StatePart part, int64_t at, int64_t n) {
    int b = bucket_at(d, part, at);
    const Bucket *bucket = &d->layout->bucket[b];
    int64_t element = at - part_start(d, part, b);
    if (bucket->whole && part == STATE_EXP_AVG_SQ) element += bucket->matrix_per_rank;
    assert(element >= 0 && element < bucket_shard(bucket));
    const DiskChunk *chunk = &d->chunk[d->bucket_chunk[b]];
    while (element >= chunk->first + chunk->count) chunk++;
    assert((int)part < chunk->parts);
    bool narrow = part == STATE_EXP_AVG && is_narrow(d, chunk);
    int64_t unit = narrow ? (int64_t)sizeof(uint16_t) : (int64_t)sizeof(float);
    int64_t first = (element - chunk->first) * unit;
    int64_t start = first / SCRATCH_ALIGN * SCRATCH_ALIGN;
    Span span = {.unit = unit,
                 .bytes = smaller(n, chunk->first + chunk->count - element) * unit,
                 .inside = first - start,
                 .offset = chunk->offset + (int)part * chunk->padded + start};
    span.aligned = round_up64(span.inside + span.bytes, SCRATCH_ALIGN);
    return span;
}

void disk_read(DiskState *d, StatePart part, int64_t at, float *host, int64_t n) {
    pthread_mutex_lock(&d->mutex);
    wait_for_slots(d);
    for (int64_t done = 0; done < n;) {
        Span span = span_at(d, part, at + done, n - done);
        scratch_read(d->file, d->bounce, span.aligned, span.offset, BOUNCE_TICKET);
        scratch_wait(d->file, BOUNCE_TICKET);
        const uint8_t *found = d->bounce + span.inside;
        int64_t count = span.bytes / span.unit;
        if (span.unit == sizeof(float)) memcpy(host + done, found, (size_t)span.bytes);
        else widen_bf16(host + done, (const uint16_t *)(const void *)found, count);
        done += count;
    }
    pthread_mutex_unlock(&d->mutex);
}

void disk_write(DiskState *d, StatePart part, int64_t at, const float *host, int64_t n) {
    pthread_mutex_lock(&d->mutex);
    wait_for_slots(d);
    d->read = d->updated;  // chunks that were read ahead may be outdated
    for (int64_t done = 0; done < n;) {
        Span span = span_at(d, part, at + done, n - done);
        if (span.aligned != span.bytes) {
            scratch_read(d->file, d->bounce, span.aligned, span.offset, BOUNCE_TICKET);
            scratch_wait(d->file, BOUNCE_TICKET);
        }
        uint8_t *range = d->bounce + span.inside;
        int64_t count = span.bytes / span.unit;
        if (span.unit == sizeof(float)) memcpy(range, host + done, (size_t)span.bytes);
        else narrow_bf16((uint16_t *)(void *)range, host + done, count);
        scratch_write(d->file, d->bounce, span.aligned, span.offset, BOUNCE_TICKET);
        scratch_wait(d->file, BOUNCE_TICKET);
        done += count;
    }
    pthread_mutex_unlock(&d->mutex);
}
