// qWD and its siblings: see qwd.h. This file is the order of update, gather and apply and which
// lane each runs on; the numbers are in kernels.h.
#include "sdp4bit/qwd.h"

#include "sdp4bit/update_host.h"

// With one replica there is nothing to send: weights are the rounded masters, and no difference may
// be lost. Only what the host has made must still be brought up and applied.
static bool alone(const QwdStep *step) { return step->plan->dp == 1 && !step->host; }

static WeightWire wire_of(const Plan *plan, const WeightWire *wire) {
    WeightWire plain = {FLOATX_CODEC, HADAMARD_ORDER, false, ROUND_NEAREST};
    return plan->dp == 1 ? plain : *wire;
}

MessageLayout qwd_message(const Plan *plan, int b, const WeightWire *wire) {
    WeightWire used = wire_of(plan, wire);
    return plan_weight_message(&plan->bucket[b], &used);
}

size_t qwd_buffer_bytes(const Plan *plan, int b, const WeightWire *wire, bool host, int messages) {
    if (plan->dp == 1 && !host) return 0;
    return (size_t)(qwd_message(plan, b, wire).bytes * messages);
}

// Where the own row of a buffer begins, in messages, and where the own message lies.
static int own_row(const Mesh *mesh, const GatherBuffer *buffer) {
    return buffer->per_node > 1 ? mesh->node.rank * buffer->nodes : 0;
}
static int own_slot(const Mesh *mesh, const GatherBuffer *buffer) {
    return own_row(mesh, buffer) + (buffer->nodes > 1 ? mesh->rail.rank : 0);
}

int qwd_slot(int b) { return b % LANE_SLOTS; }

// The update without the places that it writes to.
static UpdateShard update_of(const QwdStep *step, int b, const BucketState *state) {
    const Bucket *bucket = &step->plan->bucket[b];
    WeightWire wire = wire_of(step->plan, &step->weight_wire);
    UpdateShard u = {0};
    u.control = step->control;
    u.beta1 = step->beta1;
    u.beta2 = step->beta2;
    u.epsilon = step->epsilon;
    u.weight_decay = step->weight_decay;
    u.rank = step->mesh->dp.rank;
    u.bucket = *bucket;
    u.table.segment = step->segments + bucket->first_segment;
    u.table.count = bucket->segments;
    u.matrix_grads = state->grads.matrix;
    u.tail_grads = state->grads.tail;
    u.matrix_weights = state->weights.matrix;
    u.master = state->master;
    u.exp_avg = state->exp_avg;
    u.exp_avg_sq = state->exp_avg_sq;
    u.codec = wire.codec;
    u.group = wire.group;
    u.rounding = wire.rounding;
    u.difference = wire.difference;
    u.key.seed = step->seed;
    u.key.step = step->step;
    u.key.purpose = PURPOSE_WEIGHT;
    u.fault = step->checks->fault;
    u.code = fault_code(FAULT_OF_UPDATE, (uint64_t)b);
    return u;
}

// The update writes this message.
static void write_to(UpdateShard *u, const MessageLayout *m, uint8_t *message) {
    MessageSections at = message_sections(m, 0);
    u->codes = message + at.codes;
    u->scales = (float *)(void *)(message + at.scales);
    u->tail = message + at.tail;
}

// One bucket's update on its way to the host.
typedef struct HostUpdate {
    UpdateShard shard;
    int threads;
    const Site *site;
} HostUpdate;

static void run_update(void *context) {
    const HostUpdate *update = (const HostUpdate *)context;
    update_shard_host(&update->shard, update->threads, update->site);
}

// The host makes the message in its own memory, and lanes->last takes it up to `own`.
static void update_on_host(const QwdStep *step, int b, UpdateShard *u, const MessageLayout *m, uint8_t *own,
                           const Lanes *lanes) {
    const QwdHost *host = step->host;
    int slot = qwd_slot(b);
    u->control = host->control;
    u->table.segment = host->segments + u->bucket.first_segment;
    u->fault = host->fault;
    write_to(u, m, host->message[slot]);
    HostUpdate update = {*u, host->threads, stream_site(host->stream)};
    stream_wait(host->stream, host->sent[slot]);
    stream_host_call(host->stream, run_update, &update, sizeof update);
    event_record(host->made[slot], host->stream);
    stream_wait(lanes->last, host->made[slot]);
    lane_wait(lanes, LANE_APPLIED, slot, lanes->last);
    copy_from_pinned(lanes->last, own, host->message[slot], (size_t)(m->check ? m->check : m->bytes));
    event_record(host->sent[slot], lanes->last);
}

void qwd_update_bucket(const QwdStep *step, int b, const BucketState *state, const GatherBuffer *buffer,
                       const Lanes *lanes) {
    const Mesh *mesh = step->mesh;
    MessageLayout m = qwd_message(step->plan, b, &step->weight_wire);
    int slot = own_slot(mesh, buffer);
    UpdateShard u = update_of(step, b, state);
    if (alone(step)) {
        u.codes = (uint8_t *)state->weights.matrix;
        u.tail = (uint8_t *)state->weights.tail;
        kernel_update_shard(lanes->last, &u);
        return;
    }
    uint8_t *own = buffer->messages + slot * m.bytes;
    if (step->host) {
        update_on_host(step, b, &u, &m, own, lanes);
    } else {
        lane_wait(lanes, LANE_APPLIED, qwd_slot(b), lanes->last);
        write_to(&u, &m, own);
        kernel_update_shard(lanes->last, &u);
    }
    wire_seal_own(step->checks, b, slot, &m, buffer->messages, lanes->last);
}

void qwd_gather_bucket(const QwdStep *step, int b, const GatherBuffer *buffer, const Lanes *lanes) {
    if (alone(step)) return;
    const Mesh *mesh = step->mesh;
    MessageLayout m = qwd_message(step->plan, b, &step->weight_wire);
    int nodes = buffer->nodes, slot = qwd_slot(b);
    lane_done(lanes, LANE_UPDATED, slot, lanes->last);
    // Between nodes first: each rank fetches its rail's shards into its own row, then the rows
    // travel inside the node as they are.
    if (nodes > 1) {
        lane_wait(lanes, LANE_UPDATED, slot, lanes->rail);
        wire_all_gather(step->checks, HOP_WEIGHT_RAIL, own_row(mesh, buffer), 1, &m, buffer->messages,
                        lanes->rail);
        lane_done(lanes, LANE_RAIL_GATHERED, slot, lanes->rail);
    }
    if (buffer->per_node > 1) {
        lane_wait(lanes, nodes > 1 ? LANE_RAIL_GATHERED : LANE_UPDATED, slot, lanes->node);
        wire_all_gather(step->checks, HOP_WEIGHT_NODE, 0, nodes, &m, buffer->messages, lanes->node);
        lane_done(lanes, LANE_NODE_GATHERED, slot, lanes->node);
    }
}

void qwd_apply_bucket(const QwdStep *step, int b, floatX *weights, const GatherBuffer *buffer,
                      const Lanes *lanes) {
    if (alone(step)) return;
    const Mesh *mesh = step->mesh;
    const Bucket *bucket = &step->plan->bucket[b];
    WeightWire wire = wire_of(step->plan, &step->weight_wire);
    int nodes = buffer->nodes, slot = qwd_slot(b);
    bool node = buffer->per_node > 1;
    ApplyWeights a = {0};
    a.control = step->control;
    a.bucket = *bucket;
    a.bucket.matrix_elements = nodes * buffer->per_node * bucket->matrix_per_rank;  // the kept windows
    a.bucket.tail_elements = nodes * buffer->per_node * bucket->tail_per_rank;
    a.messages = buffer->messages;
    a.nodes = nodes;
    a.per_node = buffer->per_node;
    a.message = qwd_message(step->plan, b, &step->weight_wire);
    a.codec = wire.codec;
    a.group = wire.group;
    a.difference = wire.difference;
    a.weights = weights;
    lane_wait(lanes, node ? LANE_NODE_GATHERED : nodes > 1 ? LANE_RAIL_GATHERED : LANE_UPDATED, slot,
              lanes->middle);
    // The first hop's row first: what it brought wrong, the second has passed on.
    if (nodes > 1)
        wire_check_gathered(step->checks, HOP_WEIGHT_RAIL, b, own_row(mesh, buffer), 1, &a.message,
                            buffer->messages, lanes->middle);
    if (node)
        wire_check_gathered(step->checks, HOP_WEIGHT_NODE, b, 0, nodes, &a.message, buffer->messages,
                            lanes->middle);
    kernel_apply_weights(lanes->middle, &a);
    if (buffer->keep)
        kernel_keep_message(lanes->middle, step->control, buffer->keep, buffer->messages,
                            a.message.check ? a.message.check : a.message.bytes);
    lane_done(lanes, LANE_APPLIED, slot, lanes->middle);
}
