// Sealed messages: see wire.h. The checksum itself is kernel_seal_messages' and kernel_check_messages'.
#include "sdp4bit/wire.h"

// A mismatch as 64 bits: a mark, the hop, the bucket, the message's slot. Lower ones are nearer to the cause.
static uint64_t fault_code(WireHop hop, int b) { return (uint64_t)1 << 63 | (uint64_t)hop << 56 | (uint64_t)(b & 0xFFFFFFFF) << 24; }

// What tells a message from all others: one that was never sent, and its slot still holds that of an earlier step, must not pass.
static uint64_t message_key(const WireChecks *checks, bool weights, int b, int k) {
    return replica_mix((uint64_t)checks->step << 1 | weights, (uint32_t)b) ^ (uint64_t)k << 32;
}

static bool sealed(const WireChecks *checks, const MessageLayout *message) { return checks->sealed && message->check; }

// For tests: a bit of what was sent in the message at `arrived` is wrong. The checksum is left alone: half of its section is unused.
static void inject(WireChecks *checks, uint8_t *arrived, const MessageLayout *message, Stream *stream) {
    fault_flip(fault_due(checks->faults, FAULT_MESSAGE, checks->step, checks->exchange++), stream, arrived, message->check ? message->check : message->bytes);
}

static CommScope scope_of(WireHop hop) { return hop == HOP_GRAD_NODE ? COMM_NODE : COMM_RAIL; }

static uint64_t *sums_of(const WireChecks *checks, WireHop hop, const Comm *comm) { return checks->sums + (int)hop * comm_size(comm, COMM_GROUP); }

void wire_seal(WireChecks *checks, WireHop hop, int b, int k, const MessageLayout *message, uint8_t *send, Comm *comm, Stream *stream) {
    if (!sealed(checks, message)) return;
    int size = comm_size(comm, scope_of(hop)), self = comm_rank(comm, scope_of(hop));
    SealMessages s = {send, size, self, message->bytes, message_key(checks, false, b, k), (uint32_t)self << 16, 1};  // from self to i
    kernel_seal_messages(stream, &s);
}

void wire_all_to_all(WireChecks *checks, WireHop hop, const MessageLayout *message, const uint8_t *send, uint8_t *recv, Comm *comm, Stream *stream) {
    CommScope scope = scope_of(hop);
    comm_all_to_all(comm, scope, send, recv, (size_t)message->bytes, stream);
    inject(checks, recv + (comm_rank(comm, scope) + 1) % comm_size(comm, scope) * message->bytes, message, stream);
}

void wire_check(WireChecks *checks, WireHop hop, int b, int k, const MessageLayout *message, uint8_t *recv, Comm *comm, Stream *stream) {
    if (!sealed(checks, message)) return;
    int size = comm_size(comm, scope_of(hop)), self = comm_rank(comm, scope_of(hop));
    SealMessages s = {recv, size, self, message->bytes, message_key(checks, false, b, k), (uint32_t)self, 1u << 16};  // from i to self
    kernel_check_messages(stream, &s, sums_of(checks, hop, comm), checks->fault, fault_code(hop, b));
}

void wire_seal_own(WireChecks *checks, int b, int slot, const MessageLayout *message, uint8_t *buffer, Stream *stream) {
    if (!sealed(checks, message)) return;
    SealMessages s = {buffer + slot * message->bytes, 1, -1, message->bytes, message_key(checks, true, b, 0), (uint32_t)slot, 1};
    kernel_seal_messages(stream, &s);
}

void wire_all_gather(WireChecks *checks, int first, int run, const MessageLayout *message, uint8_t *buffer, CommScope scope, Comm *comm, Stream *stream) {
    uint8_t *row = buffer + first * message->bytes;
    comm_all_gather(comm, scope, row, (size_t)(run * message->bytes), stream);
    inject(checks, row + (comm_rank(comm, scope) + 1) % comm_size(comm, scope) * run * message->bytes, message, stream);
}

void wire_check_gathered(WireChecks *checks, WireHop hop, int b, int first, int run, const MessageLayout *message, uint8_t *buffer, CommScope scope, Comm *comm, Stream *stream) {
    if (!sealed(checks, message)) return;
    SealMessages s = {buffer + first * message->bytes, comm_size(comm, scope) * run, -1, message->bytes, message_key(checks, true, b, 0), (uint32_t)first, 1};
    kernel_check_messages(stream, &s, sums_of(checks, hop, comm), checks->fault, fault_code(hop, b) | (uint64_t)first);
}

bool wire_error(uint64_t fault, int receiver, const Topology *t, Error *err) {
    static const char *const names[] = {"weights between nodes", "weights inside the node", "gradients inside the node", "gradients between nodes"};
    WireHop hop = (WireHop)(fault >> 56 & 3);
    int b = (int)(fault >> 24 & 0xFFFFFFFF), slot = (int)(fault & 0xFFFFFF), node = receiver / t->per_node, local = receiver % t->per_node;
    // Slots are peers for gradients; [local][node] for weights, whose second hop brings whole rows from the ranks of the node.
    if (hop == HOP_WEIGHT_NODE) local = slot / t->nodes;
    else if (hop == HOP_WEIGHT_RAIL) node = slot % t->nodes;
    else if (hop == HOP_GRAD_NODE) local = slot;
    else node = slot;
    return error_set(err, EXIT_COMMUNICATION, "message from rank %d to rank %d, %s, bucket %d: it did not arrive as it was sent; restart from the last checkpoint, and look at the "
                     "network and the memory of both", node * t->per_node + local, receiver, names[hop], b);
}
