// A device, collectives and kernels that only record the memory that they read and write on each
// stream. Streams, events and the host have vector clocks. They replace the CPU backend at link
// time. Included by test_overlap.c and model/recorded_ops.h.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "llmc/ranks/parallel.h"
#include "llmc/state/zero_parts.h"
#include "sdp4bit/muon.h"

// --- clocks and accesses -------------------------------------------------------------------------

enum { HOST, MOST_STREAMS = 24, MOST_EVENTS = 1024 };
typedef struct Clock {
    int at[MOST_STREAMS];
} Clock;

typedef enum Access { READ, WRITE, ATOMIC } Access;  // concurrent atomic updates of one word are not a race

typedef struct Use {
    uintptr_t lo, hi;
    Access access;
    int op;
} Use;

typedef struct Op {
    const char *name;
    int stream;
    Clock clock;  // includes the time of the stream itself
} Op;

struct Device {
    Clock host, stream_clock[MOST_STREAMS];
    Stream *stream[MOST_STREAMS];
    int streams, events;
    Op *ops;
    Use *uses;
    int op_count, op_room, use_room;
    int use_count;                         // kept uses, see use()
    int all_uses;                          // including those that are no longer kept
    int waits[MOST_STREAMS][MOST_EVENTS];  // number of recorded waits
    int dropped_stream, dropped_event;     // the omitted wait, if any
    int dropped_call;                      // 0: every wait is omitted; else only this one, from 1
    int races, misplaced;                  // found races (at most 1), and kernels on streams for collectives
    char first_race[300];
};
struct Stream {
    Device *device;
    int id;
    const char *name;
};
struct Event {
    Device *device;
    int id;
    Clock clock;
};
struct Comm {
    char order;                     // written by all collectives of the communicator, which must be ordered
    char exchange[40], gather[40];  // names, such as "exchange between nodes"
};

static void join(Clock *clock, const Clock *other) {
    for (int i = 0; i < MOST_STREAMS; i++) {
        clock->at[i] = clock->at[i] > other->at[i] ? clock->at[i] : other->at[i];
    }
}

static bool before(const Op *a, const Op *b) { return b->clock.at[a->stream] >= a->clock.at[a->stream]; }

static void begin(Device *d, int stream, const char *name) {
    if (d->op_count == d->op_room) {
        d->op_room = 2 * d->op_room + 64;
        d->ops = (Op *)xrealloc(d->ops, (size_t)d->op_room * sizeof(Op), "ops");
    }
    Clock *clock = stream == HOST ? &d->host : &d->stream_clock[stream];
    join(clock, &d->host);  // work for which the host has waited precedes the work that it enqueues
    clock->at[stream]++;
    Op op = {name, stream, *clock};
    d->ops[d->op_count++] = op;
}

static void report_race(Device *d, const Use *old, const Use *u) {
    const Op *was = &d->ops[old->op], *now = &d->ops[u->op];
    snprintf(d->first_race, sizeof d->first_race,
             "%s (op %d, stream %d) and %s (op %d, stream %d) are not ordered", was->name, old->op,
             was->stream, now->name, u->op, now->stream);
    d->races = 1;
}

// Returns true if every later use that is not ordered with `old` is not ordered with `u` either, or
// does not conflict with `old`.
static bool replaces(const Device *d, const Use *u, const Use *old) {
    return u->lo <= old->lo && old->hi <= u->hi && (u->access == WRITE || u->access == old->access) &&
           before(&d->ops[old->op], &d->ops[u->op]);
}

// Records a use by the latest operation and compares it with all earlier ones. Drops uses that it
// replaces, so that their number does not grow with the number of steps. No-op if memory is NULL.
static void use(Device *d, Access access, const void *memory, int64_t bytes) {
    if (!memory || bytes <= 0 || d->races) return;  // the first race is enough
    Use u = {(uintptr_t)memory, (uintptr_t)memory + (uintptr_t)bytes, access, d->op_count - 1};
    int kept = 0;
    for (int i = 0; i < d->use_count; i++) {
        const Use old = d->uses[i];
        bool conflicts = old.lo < u.hi && u.lo < old.hi && (old.access != u.access || u.access == WRITE);
        if (conflicts && !before(&d->ops[old.op], &d->ops[u.op])) {
            report_race(d, &old, &u);
            return;
        }
        if (!replaces(d, &u, &old)) d->uses[kept++] = old;
    }
    d->use_count = kept;
    d->all_uses++;
    if (d->use_count == d->use_room) {
        d->use_room = 2 * d->use_room + 256;
        d->uses = (Use *)xrealloc(d->uses, (size_t)d->use_room * sizeof(Use), "uses");
    }
    d->uses[d->use_count++] = u;
}

static void begin_on(Stream *s, const char *name) {
    begin(s->device, s->id, name);
    if (strstr(s->name, " hop")) s->device->misplaced++;  // these streams are only for collectives
}
static void reads(Stream *s, const void *memory, int64_t bytes) { use(s->device, READ, memory, bytes); }
static void writes(Stream *s, const void *memory, int64_t bytes) { use(s->device, WRITE, memory, bytes); }

// --- device.h ------------------------------------------------------------------------------------

static const Site site;
const DeviceKind *device_kind(void) {
    static const DeviceKind kind = {.numbered = true, .own_memory = true, .asynchronous = true};
    return &kind;
}
const Site *device_site(const Device *device) { return &site; }
void device_identity(int index, char *text, size_t bytes) { *text = '\0'; }
void device_libraries(char *text, size_t bytes) { snprintf(text, bytes, "none"); }
size_t device_share(const Device *device, int sharers) { return SIZE_MAX; }
size_t device_taken(const Device *device) { return 0; }
size_t device_allocated(const Device *device) { return 0; }
void *device_alloc(Device *device, size_t bytes, const char *purpose, Error *err) {
    return xcalloc(bytes + 1, 1, purpose);
}
void device_free(Device *device, void *memory) { free(memory); }
void *host_alloc(Device *device, size_t bytes, const char *purpose, Error *err) {
    return xcalloc(bytes + 1, 1, purpose);
}
void host_free(Device *device, void *memory) { free(memory); }

Stream *stream_create(Device *device, const char *name) {
    Stream *s = (Stream *)xcalloc(1, sizeof *s, "a stream");
    s->device = device;
    s->id = ++device->streams;
    if (s->id >= MOST_STREAMS) fail_msg("more than %d streams", MOST_STREAMS - 1);
    s->name = name;
    device->stream[s->id] = s;
    return s;
}
Stream *stream_create_urgent(Device *device, const char *name) { return stream_create(device, name); }
void stream_destroy(Stream *stream) { free(stream); }
const Site *stream_site(const Stream *stream) { return &site; }
void stream_synchronize(Stream *s) { join(&s->device->host, &s->device->stream_clock[s->id]); }
Event *event_create(Device *device) {
    Event *e = (Event *)xcalloc(1, sizeof *e, "an event");
    e->device = device;
    e->id = device->events++;
    if (e->id >= MOST_EVENTS) fail_msg("more than %d events", MOST_EVENTS);
    return e;
}
Event *event_create_timed(Device *device) { return event_create(device); }
void event_destroy(Event *event) { free(event); }
uint64_t profile_range_start(const char *name) { return 0; }
void profile_range_end(uint64_t range) {}
void event_record(Event *e, Stream *s) { e->clock = s->device->stream_clock[s->id]; }
void event_synchronize(Event *e) { join(&e->device->host, &e->clock); }
double event_elapsed_ms(Event *start, Event *stop) { return 0.0; }
// As on a GPU, a wait refers to the latest record of the event, and an event that was never
// recorded is complete.
void stream_wait(Stream *s, Event *e) {
    Device *d = s->device;
    int call = ++d->waits[s->id][e->id];
    bool dropped = s->id == d->dropped_stream && e->id == d->dropped_event;
    if (dropped && (!d->dropped_call || d->dropped_call == call)) return;
    join(&d->stream_clock[s->id], &e->clock);
}

void copy_to_device(Stream *s, void *device_memory, const void *host, size_t bytes) {
    begin_on(s, "upload");
    writes(s, device_memory, (int64_t)bytes);
}
void copy_to_host(Stream *s, void *host, const void *device_memory, size_t bytes) {
    begin_on(s, "download");
    reads(s, device_memory, (int64_t)bytes);
    writes(s, host, (int64_t)bytes);
    memset(host, 0, bytes);
}
void copy_from_pinned(Stream *s, void *device_memory, const void *pinned, size_t bytes) {
    begin_on(s, "copy up");
    reads(s, pinned, (int64_t)bytes);
    writes(s, device_memory, (int64_t)bytes);
}
void copy_to_pinned(Stream *s, void *pinned, const void *device_memory, size_t bytes) {
    begin_on(s, strcmp(s->name, "checkpoint copies") ? "copy down" : "checkpoint copy");
    reads(s, device_memory, (int64_t)bytes);
    writes(s, pinned, (int64_t)bytes);
}
void copy_on_device(Stream *s, void *to, const void *from, size_t bytes) {
    begin_on(s, "copy");
    reads(s, from, (int64_t)bytes);
    writes(s, to, (int64_t)bytes);
}
void set_zero(Stream *s, void *device_memory, size_t bytes) {
    begin_on(s, "set_zero");
    writes(s, device_memory, (int64_t)bytes);
}

// The stream of the host call that is running. Work inside the call is recorded on this stream.
static Stream *host_stream;
void stream_host_call(Stream *s, HostWork work, const void *context, size_t bytes) {
    void *copy = memcpy(xmalloc(bytes, "work of the host"), context, bytes);
    host_stream = s;
    work(copy);
    host_stream = NULL;
    free(copy);
}

// --- parallel.h: copies in host memory -----------------------------------------------------------

int parallel_share(Peers group) { return 1; }
int parallel_ranges(int threads, int64_t lo, int64_t hi, int64_t chunk, RangeWork work, void *context) {
    const HostCopy *copy = (const HostCopy *)context;
    begin_on(host_stream, "checkpoint copy");
    reads(host_stream, copy->from + lo, hi - lo);
    writes(host_stream, copy->to + lo, hi - lo);
    return 1;
}

// --- comm.h --------------------------------------------------------------------------------------

void comm_may_lose(const Group *group, int *lost) {}
uint64_t comm_sent(const Group *group) { return 0; }
bool comm_share(const Group *node, void *flags, const CommPiece *piece, int pieces, Error *err) {
    return true;
}
void comm_unshare(const Group *node) {}
void comm_connect(const Mesh *mesh, void *memory) {}

// Gives every group of the mesh a communicator, named after the group.
enum { MOST_GROUPS = 8 };
static void connect_groups(Mesh *mesh, Comm comm[MOST_GROUPS]) {
    Group *const groups[MOST_GROUPS] = {&mesh->replica_group, &mesh->replica_groups,
                                        &mesh->world,         &mesh->node,
                                        &mesh->rail,          &mesh->shards,
                                        &mesh->shard_rail,    &mesh->tp};
    for (int i = 0; i < MOST_GROUPS; i++) {
        groups[i]->comm = &comm[i];
        snprintf(comm[i].exchange, sizeof comm[i].exchange, "exchange %s", groups[i]->name);
        snprintf(comm[i].gather, sizeof comm[i].gather, "gather %s", groups[i]->name);
    }
}
void comm_gather_rows(const Group *group, const CommRow *row, int rows, Stream *s) {
    if (!group->comm) return;
    begin(s->device, s->id, group->comm->gather);
    writes(s, &group->comm->order, 1);
    for (int i = 0; i < rows; i++) {
        reads(s, row[i].own, (int64_t)row[i].bytes);
        writes(s, row[i].all, group->size * (int64_t)row[i].bytes);
    }
}

void comm_all_to_all(const Group *group, const void *send, void *recv, size_t bytes, Stream *s) {
    if (!group->comm) return;
    begin(s->device, s->id, group->comm->exchange);
    writes(s, &group->comm->order, 1);
    for (int i = 0; i < group->size; i++) {
        if (i == group->rank) continue;
        reads(s, (const uint8_t *)send + (size_t)i * bytes, (int64_t)bytes);
        writes(s, (uint8_t *)recv + (size_t)i * bytes, (int64_t)bytes);
    }
}

void comm_all_gather(const Group *group, void *buffer, size_t bytes, Stream *s) {
    if (!group->comm) return;
    begin(s->device, s->id, group->comm->gather);
    writes(s, &group->comm->order, 1);
    for (int i = 0; i < group->size; i++) {
        use(s->device, i == group->rank ? READ : WRITE, (uint8_t *)buffer + (size_t)i * bytes,
            (int64_t)bytes);
    }
}

// --- kernels.h -----------------------------------------------------------------------------------

enum { X = sizeof(floatX) };

static void reads_table(Stream *s, SegmentTable t) {
    reads(s, t.segment, t.count * (int64_t)sizeof(Segment));
}

void kernel_quantize_partitions(Stream *s, const QuantizePartitions *a) {
    begin_on(s, "quantize");
    reads_table(s, a->table);
    for (int p = 0; p < a->slots * a->message.partitions; p++) {
        reads(s, a->grads + p * a->bucket.matrix_per_rank + a->lo, 4 * (a->hi - a->lo));
        reads(s, a->grads + a->bucket.matrix_elements + p * a->bucket.tail_per_rank,
              4 * a->message.tail_elements);
    }
    for (int slot = 0; slot < a->slots; slot++) {
        writes(s, slot == a->self ? a->self_slot : a->send + slot * a->message.bytes, a->message.bytes);
    }
}

void kernel_sum_requantize(Stream *s, const SumRequantize *a) {
    begin_on(s, "sum and requantize");
    const QuantizePartitions *q = &a->out;
    reads_table(s, q->table);
    reads(s, a->received, a->sources * a->in.bytes);
    for (int node = 0; node < q->slots; node++) {
        writes(s, node == q->self ? q->self_slot : q->send + node * q->message.bytes, q->message.bytes);
    }
}

// Records that a kernel reads and writes the residuals of a chunk in every partition.
static void uses_residual(Stream *s, const Residual *r, int partitions, const Bucket *bucket, int64_t lo,
                          int64_t hi) {
    if (r->control) reads(s, r->control, sizeof *r->control);
    for (int p = 0; p < partitions; p++) {
        writes(s, r->values + p * bucket->matrix_per_rank + lo, 4 * (hi - lo));
    }
}

void kernel_feed_sums(Stream *s, const SumRequantize *a, const Residual *r) {
    begin_on(s, "feed sums");
    reads(s, a->received, a->sources * a->in.bytes);
    uses_residual(s, r, a->in.partitions, &a->out.bucket, a->out.lo, a->out.hi);
}

void kernel_feed_grads(Stream *s, const QuantizePartitions *a, const Residual *r) {
    begin_on(s, "feed gradients");
    reads_table(s, a->table);
    for (int p = 0; p < a->slots; p++)
        reads(s, a->grads + p * a->bucket.matrix_per_rank + a->lo, 4 * (a->hi - a->lo));
    uses_residual(s, r, a->slots, &a->bucket, a->lo, a->hi);
}

void kernel_keep_residual(Stream *s, const QuantizePartitions *a, const Residual *r) {
    begin_on(s, "keep the residual");
    reads_table(s, a->table);
    for (int slot = 0; slot < a->slots; slot++)
        reads(s, slot == a->self ? a->self_slot : a->send + slot * a->message.bytes, a->message.bytes);
    uses_residual(s, r, a->slots, &a->bucket, a->lo, a->hi);
}

void kernel_sum_final(Stream *s, const SumFinal *a) {
    begin_on(s, "final sum");
    reads_table(s, a->table);
    reads(s, a->received, a->sources * a->in.bytes);
    writes(s, a->own.matrix + a->lo, 4 * (a->hi - a->lo));
    writes(s, a->matrix_partials + a->lo / 32, (a->hi - a->lo) / 8);
    writes(s, a->own.tail, 4 * a->in.tail_elements);
    writes(s, a->tail_partials, 4 * ceil_div64(a->in.tail_elements, 32));
}

void kernel_square_partials(Stream *s, float *partials, const float *x, int64_t n) {
    begin_on(s, "squares");
    reads(s, x, 4 * n);
    writes(s, partials, 4 * ceil_div64(n, 32));
}
void kernel_square_weights(Stream *s, float *partials, const floatX *weights, int64_t n) {
    begin_on(s, "squares of weights");
    reads(s, weights, (int64_t)X * n);
    writes(s, partials, 4 * ceil_div64(n, 32));
}
void kernel_tree_sum(Stream *s, float *sum, float *partials, int64_t n) {
    begin_on(s, "tree sum");
    writes(s, partials, 4 * n);
    writes(s, sum, 4);
}

// --- Muon ----------------------------------------------------------------------------------------

void kernel_muon_momentum(Stream *s, const MuonPart *a, int64_t elements, float *direction) {
    begin_on(s, "momentum");
    reads(s, a->control, sizeof *a->control);
    reads(s, a->grads, 4 * elements);
    writes(s, a->momentum, 4 * elements);
    if (direction) writes(s, direction, 4 * elements);
    use(s->device, ATOMIC, a->fault, 8);
}
void muon_momentum_host(const MuonPart *a, int64_t elements, float *direction, int threads,
                        const Site *unused) {
    kernel_muon_momentum(host_stream, a, elements, direction);
}
static void begin_direction(Stream *s, const MuonPart *a, const char *name) {
    begin_on(s, name);
    reads(s, a->control, sizeof *a->control);
    reads(s, a->grads, 4 * a->rows * a->columns);
    reads(s, a->momentum, 4 * a->rows * a->columns);
}
void kernel_muon_squares(Stream *s, const MuonPart *a, float *partials) {
    begin_direction(s, a, "squares of momentum");
    writes(s, partials, 4 * ceil_div64(a->rows * a->columns, 32));
}
void kernel_muon_normalize(Stream *s, const MuonPart *a, const float *sum, floatX *x) {
    begin_direction(s, a, "normalize");
    reads(s, sum, 4);
    writes(s, x, X * a->rows * a->columns);
}
size_t op_newton_schulz_bytes(int64_t rows, int64_t columns) { return (size_t)(X * rows * columns); }
const floatX *op_newton_schulz(Stream *s, const NewtonSchulz *a) {
    begin_on(s, "Newton-Schulz");
    writes(s, a->x, X * a->rows * a->columns);
    writes(s, a->workspace, X * a->rows * a->columns);
    return a->x;
}
void kernel_muon_apply(Stream *s, const MuonPart *a, const floatX *o) {
    begin_on(s, "Muon's update");
    reads(s, a->control, sizeof *a->control);
    reads(s, o, X * a->rows * a->columns);
    writes(s, a->master, 4 * a->rows * a->columns);
    use(s->device, ATOMIC, a->fault, 8);
}
void muon_apply_host(const MuonPart *a, const floatX *o, int threads, const Site *unused) {
    kernel_muon_apply(host_stream, a, o);
}

void kernel_step_record(Stream *s, StepRecord *record, const float *piece_sums, int pieces, const float *loss,
                        const uint64_t *fault) {
    begin_on(s, "step record");
    reads(s, piece_sums, 4 * pieces);
    reads(s, loss, 4);
    reads(s, fault, 8);
    writes(s, record, sizeof *record);
}
void kernel_mark_fault(Stream *s, uint64_t *fault, const uint64_t *found, const int *lost) {
    begin_on(s, "mark a fault");
    reads(s, found, 8);
    use(s->device, ATOMIC, fault, 8);
}
void kernel_step_status(Stream *s, StepStatus *control, const StatusInputs *a) {
    begin_on(s, "judge");
    reads(s, a->records, a->ranks * (int64_t)sizeof(StepRecord));
    writes(s, control, sizeof *control);
}

void kernel_update_shard(Stream *s, const UpdateShard *a) {
    int64_t matrix = a->bucket.matrix_per_rank, tail = a->bucket.tail_per_rank;
    begin_on(s, "AdamW");
    reads_table(s, a->table);
    reads(s, a->control, sizeof *a->control);
    if (a->matrix_grads) reads(s, a->matrix_grads, 4 * matrix);
    reads(s, a->tail_grads, 4 * tail);
    if (a->difference) reads(s, a->matrix_weights, X * matrix);
    writes(s, a->master, 4 * (matrix + tail));
    writes(s, a->exp_avg, 4 * (update_tail_averages(a) + tail));
    writes(s, a->exp_avg_sq, 4 * (update_tail_squares(a) + tail));
    // The scales follow the codes.
    writes(s, a->codes, a->scales ? (uint8_t *)a->scales - a->codes : X * matrix);
    if (a->scales) writes(s, a->scales, 4 * (codec_info(a->codec).levels ? matrix / a->group : 0));
    writes(s, a->tail, X * tail);
    use(s->device, ATOMIC, a->fault, 8);
}

void update_shard_host(const UpdateShard *a, int threads, const Site *unused) {
    kernel_update_shard(host_stream, a);
}
void update_range_host(const UpdateShard *a, int64_t lo, int64_t hi, int threads, const Site *unused) {
    fail_msg("update_range_host is only called by disk_update, which is replaced");
}

// --- disk_state.h: the file is memory at `bounce`, (STATE_PARTS, shard_elements) -----------------

static float *in_file(const DiskState *d, int part, int64_t at) {
    return (float *)(void *)d->bounce + part * d->layout->shard_elements + at;
}
static UpdateShard shard_in_file(const DiskState *d, int b, int64_t first, const UpdateShard *a) {
    UpdateShard own = *a;
    int64_t at = d->layout->bucket[b].state_start + first;
    own.master = in_file(d, STATE_MASTER, at);
    own.exp_avg = in_file(d, STATE_EXP_AVG, at);
    own.exp_avg_sq = in_file(d, STATE_EXP_AVG_SQ, d->squares[b] + first);
    return own;
}
void __wrap_disk_update(void *store, int b, const UpdateShard *a, int threads, const Site *unused) {
    DiskState *d = (DiskState *)store;
    UpdateShard own = shard_in_file(d, b, 0, a);
    d->updated += d->bucket_chunk[b + 1] - d->bucket_chunk[b];
    kernel_update_shard(host_stream, &own);
}
UpdateShard __wrap_disk_open_chunk(DiskState *d, const UpdateShard *a) {
    const DiskChunk *chunk = &d->chunk[d->updated % d->chunks];
    return shard_in_file(d, chunk->bucket, chunk->first, a);
}
// Uses the state of the whole bucket.
void __wrap_disk_update_chunk(DiskState *d, const UpdateShard *a, int threads, const Site *unused) {
    UpdateShard own = shard_in_file(d, d->chunk[d->updated++ % d->chunks].bucket, 0, a);
    kernel_update_shard(host_stream, &own);
}
void __wrap_disk_read(DiskState *d, StatePart part, int64_t at, float *host, int64_t n) {
    if (!host_stream) return;  // the main thread, which has waited
    begin_on(host_stream, "checkpoint copy");
    reads(host_stream, in_file(d, part, at), 4 * n);
    writes(host_stream, host, 4 * n);
}
void __wrap_disk_write(DiskState *d, StatePart part, int64_t at, const float *host, int64_t n) {}

void kernel_apply_weights(Stream *s, const ApplyWeights *a) {
    begin_on(s, "apply");
    reads(s, a->control, sizeof *a->control);
    reads(s, a->messages, a->nodes * a->per_node * a->message.bytes);
    writes(s, a->weights, X * (a->bucket.matrix_elements + a->bucket.tail_elements));
}

void kernel_code_weights(Stream *s, const CodeWeights *a) {
    begin_on(s, "code");
    reads(s, a->control, sizeof *a->control);
    reads(s, a->old, 2 * a->layout.elements);
    reads(s, a->fresh, 2 * a->layout.elements);
    reads(s, a->tail, 2 * a->layout.tail_elements);
    writes(s, a->coded, a->layout.most);
    writes(s, a->bytes, 4);
}
void kernel_pack_weights(Stream *s, const LosslessLayout *layout, const uint8_t *coded, uint8_t *message) {
    begin_on(s, "pack");
    reads(s, coded, layout->most);
    writes(s, message, 16);  // all lengths are zero, so a message is only its header
}
void kernel_decode_weights(Stream *s, const DecodeWeights *a) {
    begin_on(s, "decode");
    reads(s, a->control, sizeof *a->control);
    reads(s, a->messages, a->nodes * a->per_node * a->stride);
    writes(s, a->weights, 2 * a->nodes * a->per_node * (a->layout.elements + a->layout.tail_elements));
    use(s->device, ATOMIC, a->fault, 8);
}

void kernel_keep_message(Stream *s, const StepStatus *control, uint8_t *to, const uint8_t *from, int64_t n) {
    begin_on(s, "keep a message");
    reads(s, control, sizeof *control);
    reads(s, from, n);
    writes(s, to, n);
}
void kernel_seal_messages(Stream *s, const SealMessages *a) {
    begin_on(s, "seal");
    for (int i = 0; i < a->count; i++) {
        if (i != a->skip) writes(s, a->messages + i * a->bytes, a->bytes);
    }
}
void kernel_check_messages(Stream *s, const SealMessages *a, uint64_t *sums, uint64_t *fault, uint64_t code) {
    begin_on(s, "check");
    for (int i = 0; i < a->count; i++) {
        if (i != a->skip) reads(s, a->messages + i * a->bytes, a->bytes);
    }
    writes(s, sums, 8 * a->count);
    use(s->device, ATOMIC, fault, 8);
}
void kernel_replica_hash(Stream *s, uint64_t *hash, const floatX *weights, int64_t first, int64_t n) {
    begin_on(s, "replica hash");
    reads(s, weights, X * n);
    writes(s, hash, 8);
}
void kernel_widen(Stream *s, float *master, const floatX *weights, int64_t n) {
    begin_on(s, "widen");
    reads(s, weights, X * n);
    writes(s, master, 4 * n);
}
void kernel_pseudo_gradient(Stream *s, float *gradient, const float *outer, const float *master, int64_t n) {
    begin_on(s, "pseudo-gradient");
    reads(s, outer, 4 * n);
    reads(s, master, 4 * n);
    writes(s, gradient, 4 * n);
}
void kernel_outer_step(Stream *s, float *outer, float *m, const float *gradient, float rate, float momentum,
                       int64_t n, const int *lost) {
    begin_on(s, "outer step");
    reads(s, gradient, 4 * n);
    writes(s, outer, 4 * n);
    writes(s, m, 4 * n);
}
void kernel_mix_outer(Stream *s, float *master, const float *outer, float mix, int64_t n, const int *lost) {
    begin_on(s, "mix of outer weights");
    reads(s, outer, 4 * n);
    writes(s, master, 4 * n);
}
void kernel_add_weighted(Stream *s, float *sum, const float *x, float weight, bool first, int64_t n) {
    begin_on(s, "weighted sum");
    reads(s, x, 4 * n);
    writes(s, sum, 4 * n);
}
void kernel_narrow(Stream *s, floatX *weights, const float *master, int64_t n) {
    begin_on(s, "narrow");
    reads(s, master, 4 * n);
    writes(s, weights, X * n);
}
void kernel_count_zeros(Stream *s, int64_t *count, const float *x, int64_t n) {
    begin_on(s, "count zeros");
    reads(s, x, 4 * n);
    writes(s, count, 8);
}
