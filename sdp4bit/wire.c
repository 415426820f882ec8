// Message exchanges with checksums: see wire.h.
#include "sdp4bit/wire.h"

#include <assert.h>

// Identifies the messages of a hop and bucket in a fault code; the check adds the slot.
static uint64_t place_of(WireHop hop, int b) { return (uint64_t)hop << 56 | (uint64_t)(uint32_t)b << 24; }
static uint64_t mismatch(WireHop hop, int b) { return fault_code(FAULT_OF_MESSAGE, place_of(hop, b)); }
uint64_t wire_coding_fault(WireHop hop, int b) { return fault_code(FAULT_OF_CODING, place_of(hop, b)); }

// Returns the key of a checksum. It differs between steps, micro-batches, buckets and chunks, so a
// stale message of an earlier exchange is detected. k < MOST_CHUNKS = 2^12.
static uint64_t message_key(const WireChecks *checks, bool weights, int b, int k) {
    uint64_t micro_batch = weights ? 0 : (uint64_t)checks->micro_batch;
    return replica_mix((uint64_t)checks->step << 1 | weights, (uint32_t)b) ^ (uint64_t)k << 32 ^
           micro_batch << 44;
}

static bool between_stages(WireHop hop) { return hop == HOP_ACTIVATIONS || hop == HOP_ACTIVATION_GRADIENTS; }

static bool sealed(const WireChecks *checks, const MessageLayout *message) {
    return checks->sealed && message->check;
}

// For tests: flips a bit of a received message. bytes: message size without the checksum section,
// because a flip in its unused half would not be detected.
static void inject(WireChecks *checks, uint8_t *arrived, int64_t bytes, Stream *stream) {
    fault_flip(fault_due(checks->faults, FAULT_MESSAGE, checks->step, checks->exchange++), stream, arrived,
               bytes);
}

// Returns the ranks that a hop connects.
static const Group *level_of(const Mesh *mesh, WireHop hop) {
    if (hop == HOP_WEIGHT_LAYER || hop == HOP_LAYER_NODE) return &mesh->shards;
    if (hop == HOP_LAYER_RAIL) return &mesh->shard_rail;
    if (between_stages(hop)) return &mesh->pp;
    if (hop == HOP_OUTER || hop == HOP_OUTER_MEAN) return &mesh->replica_groups;
    bool node = hop == HOP_GRAD_NODE || hop == HOP_WEIGHT_NODE || hop == HOP_REDUCED_NODE;
    return node ? &mesh->node : &mesh->rail;
}

int wire_most_peers(const Mesh *mesh) {
    return mesh->dp.size > mesh->replica_groups.size ? mesh->dp.size : mesh->replica_groups.size;
}

static uint64_t *sums_of(const WireChecks *checks, WireHop hop) {
    return checks->sums + (int)hop * wire_most_peers(checks->mesh);
}

// Returns where the messages from the next rank of the group are received.
static uint8_t *from_next(const Group *group, uint8_t *slots, int64_t bytes) {
    return slots + (group->rank + 1) % group->size * bytes;
}

// Describes `count` messages for the checksum kernels. weights: they belong to an all-gather.
static SealMessages run_of(const WireChecks *checks, bool weights, int b, int k, const MessageLayout *message,
                           uint8_t *messages, int count) {
    SealMessages s = {0};
    s.messages = messages;
    s.count = count;
    s.skip = -1;
    s.bytes = message->bytes;
    s.key = message_key(checks, weights, b, k);
    s.stride = 1;
    return s;
}

void wire_seal(WireChecks *checks, WireHop hop, int b, int k, const MessageLayout *message, uint8_t *send,
               Stream *stream) {
    assert(hop < WIRE_HOPS && b >= 0 && k >= 0 && k < MOST_CHUNKS);
    if (!sealed(checks, message)) return;
    const Group *group = level_of(checks->mesh, hop);
    SealMessages s = run_of(checks, false, b, k, message, send, group->size);
    s.skip = group->rank;
    s.first = (uint32_t)group->rank << 16;  // message i goes from this rank to i
    kernel_seal_messages(stream, &s);
}

void wire_all_to_all(WireChecks *checks, WireHop hop, const MessageLayout *message, const uint8_t *send,
                     uint8_t *recv, Stream *stream) {
    assert(hop < WIRE_HOPS);
    const Group *group = level_of(checks->mesh, hop);
    comm_all_to_all(group, send, recv, (size_t)message->bytes, stream);
    inject(checks, from_next(group, recv, message->bytes), message_content(message), stream);
}

void wire_check(WireChecks *checks, WireHop hop, int b, int k, const MessageLayout *message, uint8_t *recv,
                Stream *stream) {
    assert(hop < WIRE_HOPS && b >= 0 && k >= 0 && k < MOST_CHUNKS);
    if (!sealed(checks, message)) return;
    const Group *group = level_of(checks->mesh, hop);
    SealMessages s = run_of(checks, false, b, k, message, recv, group->size);
    s.skip = group->rank;
    s.first = (uint32_t)group->rank;  // message i comes from i to this rank
    s.stride = 1u << 16;
    kernel_check_messages(stream, &s, sums_of(checks, hop), checks->fault, mismatch(hop, b));
}

void wire_seal_own(WireChecks *checks, int b, int slot, const MessageLayout *message, uint8_t *buffer,
                   Stream *stream) {
    assert(b >= 0 && slot >= 0);
    if (!sealed(checks, message)) return;
    SealMessages s = run_of(checks, true, b, 0, message, buffer + slot * message->bytes, 1);
    s.first = (uint32_t)slot;
    kernel_seal_messages(stream, &s);
}

void wire_all_gather(WireChecks *checks, WireHop hop, int first, int run, const MessageLayout *message,
                     uint8_t *buffer, Stream *stream) {
    assert(hop < WIRE_HOPS && first >= 0 && run >= 1);
    const Group *group = level_of(checks->mesh, hop);
    uint8_t *row = buffer + first * message->bytes;
    comm_all_gather(group, row, (size_t)(run * message->bytes), stream);
    inject(checks, from_next(group, row, run * message->bytes), message_content(message), stream);
}

void wire_check_gathered(WireChecks *checks, WireHop hop, int b, int first, int run,
                         const MessageLayout *message, uint8_t *buffer, Stream *stream) {
    assert(hop < WIRE_HOPS && b >= 0 && first >= 0 && run >= 1);
    if (!sealed(checks, message)) return;
    int count = level_of(checks->mesh, hop)->size * run;
    SealMessages s = run_of(checks, true, b, 0, message, buffer + first * message->bytes, count);
    s.first = (uint32_t)first;
    kernel_check_messages(stream, &s, sums_of(checks, hop), checks->fault, mismatch(hop, b) | s.first);
}

// Adds the member's parts of all rows to *hash.
static void hash_parts(const CommRow *row, int rows, int member, bool own, uint64_t *hash, Stream *stream) {
    for (int i = 0; i < rows; i++) {
        const uint8_t *part = own ? (const uint8_t *)row[i].own
                                  : (const uint8_t *)row[i].all + (size_t)member * row[i].bytes;
        kernel_replica_hash(stream, hash, (const floatX *)(const void *)part, (int64_t)i << 40,
                            (int64_t)(row[i].bytes / sizeof(floatX)));
    }
}

// Each rank sends a record: a hash of its parts, and a checksum of that hash. Receivers recompute
// the hash from the received parts and verify the checksum.
void wire_gather_rows(WireChecks *checks, int b, const CommRow *row, int rows, Stream *stream) {
    assert(b >= 0 && rows >= 1);
    const Group *group = &checks->mesh->shards;
    SealMessages s = {0};
    if (checks->parts) {
        s = run_of(checks, true, b, 0, &(MessageLayout){.bytes = WIRE_PART_BYTES},
                   checks->parts + group->rank * WIRE_PART_BYTES, 1);
        s.first = (uint32_t)group->rank;
        set_zero(stream, s.messages, WIRE_PART_BYTES);
        hash_parts(row, rows, group->rank, true, (uint64_t *)(void *)s.messages, stream);
        kernel_seal_messages(stream, &s);
    }
    comm_gather_rows(group, row, rows, stream);
    int next = (group->rank + 1) % group->size;
    inject(checks, (uint8_t *)row[0].all + (size_t)next * row[0].bytes, (int64_t)row[0].bytes, stream);
    if (!checks->parts) return;
    comm_all_gather(group, checks->parts, WIRE_PART_BYTES, stream);
    for (int i = 0; i < group->size; i++) {
        uint8_t *record = checks->parts + i * WIRE_PART_BYTES;
        if (i == group->rank) continue;
        set_zero(stream, record, MESSAGE_ALIGN);
        hash_parts(row, rows, i, false, (uint64_t *)(void *)record, stream);
    }
    s.messages = checks->parts;
    s.count = group->size;
    s.skip = group->rank;
    s.first = 0;
    kernel_check_messages(stream, &s, sums_of(checks, HOP_WEIGHT_LAYER), checks->fault,
                          mismatch(HOP_WEIGHT_LAYER, b));
}

// Describes one message for the checksum kernels. No two messages of a step share a key.
static SealMessages seal_of_stage(const WireChecks *checks, const StageMessage *which,
                                  const MessageLayout *message, uint8_t *memory) {
    SealMessages s = {0};
    s.messages = memory;
    s.count = 1;
    s.skip = -1;
    s.bytes = message->bytes;
    s.key = replica_mix((uint64_t)checks->step, (uint32_t)which->micro_batch) ^ (uint64_t)which->layer << 32 ^
            (uint64_t)which->hop << 56;
    s.first = (uint32_t)which->from << 16 | (uint32_t)which->to;
    return s;
}

void wire_seal_stage(WireChecks *checks, const StageMessage *which, const MessageLayout *message,
                     uint8_t *send, Stream *stream) {
    assert(between_stages(which->hop) && which->micro_batch >= 0);
    if (!sealed(checks, message)) return;
    SealMessages s = seal_of_stage(checks, which, message, send);
    kernel_seal_messages(stream, &s);
}

void wire_check_stage(WireChecks *checks, const StageMessage *which, const MessageLayout *message,
                      uint8_t *recv, Stream *stream) {
    assert(between_stages(which->hop) && which->micro_batch >= 0);
    inject(checks, recv, message_content(message), stream);
    if (!sealed(checks, message)) return;
    SealMessages s = seal_of_stage(checks, which, message, recv);
    kernel_check_messages(stream, &s, sums_of(checks, which->hop), checks->fault,
                          mismatch(which->hop, which->micro_batch) | (uint64_t)which->from);
}

static bool message_error(uint64_t fault, int receiver, const Mesh *mesh, Error *err) {
    static const char *const names[] = {"weights between nodes",
                                        "weights inside the node",
                                        "weights of a layer",
                                        "weights of a layer between nodes",
                                        "weights of a layer inside the node",
                                        "gradients inside the node",
                                        "gradients between nodes",
                                        "reduced gradients between nodes",
                                        "reduced gradients inside the node",
                                        "pseudo-gradients between nodes",
                                        "mean pseudo-gradients between nodes",
                                        "activations",
                                        "gradients of activations"};
    WireHop hop = (WireHop)(fault >> 56 & 15);
    int b = (int)(fault >> 24 & 0xFFFFFFFF), slot = (int)(fault & 0xFFFFFF);
    // In a reduction a slot is a peer. In a gather, slots are [local][node], and the second hop
    // gathers whole rows from the ranks of the node.
    bool node = hop == HOP_WEIGHT_NODE || hop == HOP_LAYER_NODE || hop == HOP_REDUCED_NODE;
    bool rail = hop == HOP_WEIGHT_RAIL || hop == HOP_LAYER_RAIL || hop == HOP_REDUCED_RAIL;
    if (node) slot /= mesh->rail.size;
    if (rail) slot %= mesh->rail.size;
    const char *what = fault_origin(fault) == FAULT_OF_MESSAGE
                           ? "it was corrupted in transit"
                           : "it is corrupt, or the weights of the two ranks already differed";
    return error_set(err, EXIT_COMMUNICATION,
                     "message from rank %d to rank %d, %s, %s %d: %s; restart from the last checkpoint "
                     "and check the network and the memory of both hosts",
                     group_peer(level_of(mesh, hop), receiver, slot), receiver, names[hop],
                     between_stages(hop) ? "micro-batch" : "bucket", b, what);
}

bool fault_error(uint64_t fault, int rank, const Mesh *mesh, Error *err) {
    assert(rank >= 0);
    switch (fault_origin(fault)) {
        case FAULT_OF_UPDATE:
            return error_set(
                err, EXIT_DIVERGED,
                "the update on rank %d, bucket %d, produced weights that are not finite or exceed "
                "8.5e37; they were not written, and nothing was saved; lower --lr, or "
                "check --weight-decay, the optimizer's other flags and the data",
                rank, (int)(fault & 0xFFFFFFFF));
        case FAULT_OF_MESSAGE:
        case FAULT_OF_CODING: return message_error(fault, rank, mesh, err);
    }
    return error_set(err, EXIT_COMMUNICATION, "rank %d reported an unknown fault: %llx", rank,
                     (unsigned long long)fault);
}
