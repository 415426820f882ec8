// qWD and its siblings: see qwd.h. This file is the order of update, gather and apply; the numbers are in kernels.h.
#include "sdp4bit/qwd.h"

// With one replica there is nothing to send: weights are the rounded masters, and no difference may be lost.
static bool alone(const QwdStep *step) { return step->plan->dp == 1; }

size_t qwd_buffer_bytes(const Plan *plan, int b, const WeightWire *wire) {
    if (plan->dp == 1) return 0;
    return (size_t)(plan_weight_message(&plan->bucket[b], wire).bytes * plan->dp);
}

void qwd_update_bucket(const QwdStep *step, int b, const float *grads, floatX *weights, float *master, float *exp_avg, float *exp_avg_sq,
                       uint8_t *buffer, Stream *stream) {
    const Topology *topology = step->topology;
    const Bucket *bucket = &step->plan->bucket[b];
    MessageLayout m = plan_weight_message(bucket, &step->wire);
    int64_t row = (int64_t)topology->local * topology->nodes + topology->node;
    uint8_t *own = alone(step) ? NULL : buffer + row * m.bytes;
    UpdateShard u = {0};
    u.control = step->control;
    u.beta1 = step->beta1;
    u.beta2 = step->beta2;
    u.epsilon = step->epsilon;
    u.weight_decay = step->weight_decay;
    u.rank = topology->dp_rank;
    u.bucket = *bucket;
    u.table.segment = step->segments + bucket->first_segment;
    u.table.count = bucket->segments;
    u.grads = grads;
    u.weights = weights;
    u.master = master;
    u.exp_avg = exp_avg;
    u.exp_avg_sq = exp_avg_sq;
    u.codec = alone(step) ? FLOATX_CODEC : step->wire.codec;
    u.group = step->wire.group;
    u.rounding = step->wire.rounding;
    u.difference = step->wire.difference;
    u.key.seed = step->seed;
    u.key.step = step->step;
    u.key.purpose = PURPOSE_WEIGHT;
    u.codes = alone(step) ? (uint8_t *)weights : own;
    u.scales = alone(step) ? NULL : (float *)(void *)(own + m.scales);
    u.tail = alone(step) ? (uint8_t *)(weights + bucket->matrix) : own + m.tail;
    kernel_update_shard(stream, &u);
}

void qwd_gather_bucket(const QwdStep *step, int b, uint8_t *buffer, Comm *comm, Stream *stream) {
    if (alone(step)) return;
    const Topology *topology = step->topology;
    size_t bytes = (size_t)plan_weight_message(&step->plan->bucket[b], &step->wire).bytes;
    // Between nodes first: each rank fetches its rail's shards into its own row, then the rows travel inside the node as they are.
    uint8_t *row = buffer + (size_t)topology->local * (size_t)topology->nodes * bytes;
    if (topology->nodes > 1) comm_all_gather(comm, COMM_RAIL, row, bytes, stream);
    if (topology->per_node > 1) comm_all_gather(comm, COMM_NODE, buffer, bytes * (size_t)topology->nodes, stream);
}

void qwd_apply_bucket(const QwdStep *step, int b, floatX *weights, const uint8_t *buffer, Stream *stream) {
    if (alone(step)) return;
    ApplyWeights a = {0};
    a.control = step->control;
    a.bucket = step->plan->bucket[b];
    a.messages = buffer;
    a.nodes = step->topology->nodes;
    a.per_node = step->topology->per_node;
    a.message = plan_weight_message(&a.bucket, &step->wire);
    a.codec = step->wire.codec;
    a.group = step->wire.group;
    a.difference = step->wire.difference;
    a.weights = weights;
    kernel_apply_weights(stream, &a);
}
