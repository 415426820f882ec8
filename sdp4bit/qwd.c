// qWD and its siblings: see qwd.h. This file is the order of update, gather and apply and which
// lane each runs on; the numbers are in kernels.h.
#include "sdp4bit/qwd.h"

// With one replica there is nothing to send: weights are the rounded masters, and no difference may
// be lost.
static bool alone(const QwdStep *step) { return step->plan->dp == 1; }

size_t qwd_buffer_bytes(const Plan *plan, int b, const WeightWire *wire) {
    if (plan->dp == 1) return 0;
    return (size_t)(plan_weight_message(&plan->bucket[b], wire).bytes * plan->dp);
}

int qwd_slot(int b) { return b % LANE_SLOTS; }

void qwd_update_bucket(const QwdStep *step, int b, const BucketState *state, uint8_t *buffer,
                       const Lanes *lanes) {
    const Mesh *mesh = step->mesh;
    const Bucket *bucket = &step->plan->bucket[b];
    MessageLayout m = plan_weight_message(bucket, &step->weight_wire);
    MessageSections at = message_sections(&m, 0);
    int64_t slot = gather_slot(mesh->rail.size, mesh->node.size, mesh->dp.rank);
    uint8_t *own = alone(step) ? NULL : buffer + slot * m.bytes;
    UpdateShard u = {0};
    u.control = step->control;
    u.beta1 = step->beta1;
    u.beta2 = step->beta2;
    u.epsilon = step->epsilon;
    u.weight_decay = step->weight_decay;
    u.rank = mesh->dp.rank;
    u.bucket = *bucket;
    u.table.segment = step->segments + bucket->first_segment;
    u.table.count = bucket->segments;
    u.matrix_grads = state->grads.matrix;
    u.tail_grads = state->grads.tail;
    u.matrix_weights = state->weights.matrix;
    u.master = state->master;
    u.exp_avg = state->exp_avg;
    u.exp_avg_sq = state->exp_avg_sq;
    u.codec = alone(step) ? FLOATX_CODEC : step->weight_wire.codec;
    u.group = step->weight_wire.group;
    u.rounding = step->weight_wire.rounding;
    u.difference = step->weight_wire.difference;
    u.key.seed = step->seed;
    u.key.step = step->step;
    u.key.purpose = PURPOSE_WEIGHT;
    u.codes = alone(step) ? (uint8_t *)state->weights.matrix : own + at.codes;
    u.scales = alone(step) ? NULL : (float *)(void *)(own + at.scales);
    u.tail = alone(step) ? (uint8_t *)state->weights.tail : own + at.tail;
    u.fault = step->checks->fault;
    u.code = fault_code(FAULT_OF_UPDATE, (uint64_t)b);
    if (!alone(step)) lane_wait(lanes, LANE_APPLIED, qwd_slot(b), lanes->last);
    kernel_update_shard(lanes->last, &u);
    if (!alone(step)) wire_seal_own(step->checks, b, (int)slot, &m, buffer, lanes->last);
}

void qwd_gather_bucket(const QwdStep *step, int b, uint8_t *buffer, const Lanes *lanes) {
    if (alone(step)) return;
    const Mesh *mesh = step->mesh;
    MessageLayout m = plan_weight_message(&step->plan->bucket[b], &step->weight_wire);
    int nodes = mesh->rail.size, slot = qwd_slot(b);
    lane_done(lanes, LANE_UPDATED, slot, lanes->last);
    // Between nodes first: each rank fetches its rail's shards into its own row, then the rows
    // travel inside the node as they are.
    if (nodes > 1) {
        lane_wait(lanes, LANE_UPDATED, slot, lanes->rail);
        wire_all_gather(step->checks, HOP_WEIGHT_RAIL, mesh->node.rank * nodes, 1, &m, buffer, lanes->rail);
        lane_done(lanes, LANE_RAIL_GATHERED, slot, lanes->rail);
    }
    if (mesh->node.size > 1) {
        lane_wait(lanes, nodes > 1 ? LANE_RAIL_GATHERED : LANE_UPDATED, slot, lanes->node);
        wire_all_gather(step->checks, HOP_WEIGHT_NODE, 0, nodes, &m, buffer, lanes->node);
        lane_done(lanes, LANE_NODE_GATHERED, slot, lanes->node);
    }
}

void qwd_apply_bucket(const QwdStep *step, int b, floatX *weights, uint8_t *buffer, const Lanes *lanes) {
    if (alone(step)) return;
    const Mesh *mesh = step->mesh;
    ApplyWeights a = {0};
    a.control = step->control;
    a.bucket = step->plan->bucket[b];
    a.messages = buffer;
    a.nodes = mesh->rail.size;
    a.per_node = mesh->node.size;
    a.message = plan_weight_message(&a.bucket, &step->weight_wire);
    a.codec = step->weight_wire.codec;
    a.group = step->weight_wire.group;
    a.difference = step->weight_wire.difference;
    a.weights = weights;
    lane_wait(lanes, a.per_node > 1 ? LANE_NODE_GATHERED : LANE_RAIL_GATHERED, qwd_slot(b), lanes->middle);
    // The first hop's row first: what it brought wrong, the second has passed on.
    if (a.nodes > 1)
        wire_check_gathered(step->checks, HOP_WEIGHT_RAIL, b, mesh->node.rank * a.nodes, 1, &a.message,
                            buffer, lanes->middle);
    if (a.per_node > 1)
        wire_check_gathered(step->checks, HOP_WEIGHT_NODE, b, 0, a.nodes, &a.message, buffer, lanes->middle);
    kernel_apply_weights(lanes->middle, &a);
    lane_done(lanes, LANE_APPLIED, qwd_slot(b), lanes->middle);
}
