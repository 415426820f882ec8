// Issues update, gather and apply to their lanes: see qwd.h.
#include "sdp4bit/qwd.h"

// Returns true if dp = 1 and AdamW runs on the device: then the update writes the model weights and
// nothing is sent. An update computed on the host must still be uploaded and applied.
static bool alone(const QwdStep *step) { return step->layout->dp == 1 && !step->host; }

static WeightFormat format_of(const BucketLayout *layout, const WeightFormat *format) {
    return layout->dp == 1 ? plain_weight_format() : *format;
}

MessageLayout qwd_message(const BucketLayout *layout, int b, const WeightFormat *format) {
    assert(b >= 0 && b < layout->buckets);
    WeightFormat used = format_of(layout, format);
    return layout_weight_message(&layout->bucket[b], &used);
}

MessageLayout qwd_plain_message(const BucketLayout *layout, int b) {
    assert(b >= 0 && b < layout->buckets);
    WeightFormat plain = plain_weight_format();
    return layout_weight_message(&layout->bucket[b], &plain);
}

// Layout of the messages of this step's gather.
static MessageLayout gathered_message(const QwdStep *step, int b) {
    if (step->lossless) return layout_lossless_message(&step->layout->bucket[b], step->lossless->slot[b]);
    return qwd_message(step->layout, b, &step->weight_format);
}

size_t qwd_buffer_bytes(const BucketLayout *layout, int b, const WeightFormat *format, bool host,
                        int messages) {
    assert(messages >= 0);
    if (layout->dp == 1 && !host) return 0;
    return (size_t)(qwd_message(layout, b, format).bytes * messages);
}

// Return the buffer slot of the first message in this rank's row, and of this rank's own message.
static int own_row(const Mesh *mesh, const GatherBuffer *buffer) {
    return buffer->per_node > 1 ? mesh->node.rank * buffer->nodes : 0;
}
static int own_slot(const Mesh *mesh, const GatherBuffer *buffer) {
    return own_row(mesh, buffer) + (buffer->nodes > 1 ? mesh->rail.rank : 0);
}

int qwd_slot(int b) { return b % LANE_SLOTS; }

// Describes the update, except where it writes the message (write_to).
static UpdateShard update_of(const QwdStep *step, int b, const BucketState *state) {
    const Bucket *bucket = &step->layout->bucket[b];
    WeightFormat format = format_of(step->layout, &step->weight_format);
    UpdateShard u = {0};
    u.control = step->control;
    u.beta1 = step->beta1;
    u.beta2 = step->beta2;
    u.epsilon = step->epsilon;
    u.weight_decay = step->weight_decay;
    u.rank = step->layout->dp > 1 ? step->mesh->dp.rank : 0;
    u.bucket = *bucket;
    u.table.segment = step->segments + bucket->first_segment;
    u.table.count = bucket->segments;
    u.matrix_grads = state->grads.matrix;
    u.tail_grads = state->grads.tail;
    u.matrix_weights = state->weights.matrix;
    u.master = state->master;
    u.exp_avg = state->exp_avg;
    u.exp_avg_sq = state->exp_avg_sq;
    u.momentum_bf16 = state->momentum_bf16;
    u.codec = format.codec;
    u.group = format.group;
    u.rounding = format.rounding;
    u.difference = format.difference && !step->lossless;
    u.key.seed = step->seed;
    u.key.step = step->step;
    u.key.purpose = PURPOSE_WEIGHT;
    u.fault = step->checks->fault;
    u.code = fault_code(FAULT_OF_UPDATE, (uint64_t)b);
    return u;
}

// Sets the message that the update writes.
static void write_to(UpdateShard *u, const MessageLayout *m, uint8_t *message) {
    MessageSections at = message_sections(m, 0);
    u->codes = message + at.codes;
    u->scales = (float *)(void *)(message + at.scales);
    u->tail = message + at.tail;
}

// Context of a bucket's update on the host.
typedef struct HostUpdate {
    UpdateShard shard;
    const QwdHost *host;
    int bucket;
    const Site *site;
} HostUpdate;

static void run_update(void *context) {
    const HostUpdate *update = (const HostUpdate *)context;
    const QwdHost *host = update->host;
    if (host->update) host->update(host->store, update->bucket, &update->shard, host->threads, update->site);
    else update_shard_host(&update->shard, host->threads, update->site);
}

// Updates on the host and lets lanes->last upload the message to `own`.
static void update_on_host(const QwdStep *step, int b, UpdateShard *u, const MessageLayout *m, uint8_t *own,
                           const Lanes *lanes) {
    const QwdHost *host = step->host;
    int slot = qwd_slot(b);
    u->control = host->control;
    u->table.segment = host->segments + u->bucket.first_segment;
    u->fault = host->fault;
    write_to(u, m, host->message[slot]);
    HostUpdate update = {*u, host, b, stream_site(host->stream)};
    stream_wait(host->stream, host->sent[slot]);
    if (host->queue && u->bucket.whole) host->queue(host->queue_context, b, u);
    else stream_host_call(host->stream, run_update, &update, sizeof update);
    event_record(host->made[slot], host->stream);
    stream_wait(lanes->last, host->made[slot]);
    lane_wait(lanes, LANE_APPLIED, slot, lanes->last);
    copy_from_pinned(lanes->last, own, host->message[slot], (size_t)message_content(m));
    event_record(host->sent[slot], lanes->last);
}

// --- lossless weights ---------------------------------------------------------------------------

// Returns this rank's row in the table of message sizes.
static uint32_t *own_bytes(const QwdStep *step) {
    const Mesh *mesh = step->mesh;
    int64_t slot = (int64_t)mesh->node.rank * mesh->rail.size + mesh->rail.rank;
    return step->lossless->bytes + slot * step->layout->buckets;
}

// Computes the bf16 message that would be sent without compression, then codes it.
static void update_lossless(const QwdStep *step, int b, UpdateShard *u, const BucketState *state,
                            const Lanes *lanes) {
    const QwdLossless *lossless = step->lossless;
    MessageLayout m = qwd_plain_message(step->layout, b);
    MessageSections at = message_sections(&m, 0);
    if (step->host) {
        update_on_host(step, b, u, &m, lossless->plain, lanes);
    } else {
        write_to(u, &m, lossless->plain);
        kernel_update_shard(lanes->last, u);
    }
    CodeWeights c = {0};
    c.control = step->control;
    c.layout = layout_lossless(&step->layout->bucket[b]);
    c.old = (const uint8_t *)state->replica;
    c.fresh = lossless->plain + at.codes;
    c.tail = lossless->plain + at.tail;
    c.coded = lossless->coded + lossless->coded_start[b];
    c.bytes = own_bytes(step) + b;
    kernel_code_weights(lanes->last, &c);
}

// Returns the slot size of the gather: the size of the longest message. Impossible sizes are
// clamped; the decoder detects such messages.
static int64_t longest_message(const QwdStep *step, int b) {
    int64_t most = layout_lossless(&step->layout->bucket[b]).most, longest = (int64_t)sizeof(LosslessHeader);
    for (int rank = 0; rank < step->layout->dp; rank++) {
        int64_t bytes = round_up64(step->lossless->landed[rank * step->layout->buckets + b], MESSAGE_ALIGN);
        if (bytes > longest) longest = bytes < most ? bytes : most;
    }
    return longest;
}

void qwd_agree_lengths(const QwdStep *step, const Lanes *lanes) {
    const QwdLossless *lossless = step->lossless;
    if (!lossless) return;
    const Mesh *mesh = step->mesh;
    int64_t row = step->layout->buckets * (int64_t)sizeof(uint32_t), nodes = mesh->rail.size;
    uint8_t *all = (uint8_t *)lossless->bytes;
    Stream *made = lanes->last;
    if (nodes > 1) {
        lanes_after(lanes, lanes->rail, made);
        comm_all_gather(&mesh->rail, all + mesh->node.rank * nodes * row, (size_t)row, lanes->rail);
        made = lanes->rail;
    }
    if (mesh->node.size > 1) {
        lanes_after(lanes, lanes->node, made);
        comm_all_gather(&mesh->node, all, (size_t)(nodes * row), lanes->node);
        made = lanes->node;
    }
    lanes_after(lanes, lanes->last, made);
    copy_to_host(lanes->last, lossless->landed, all, (size_t)(step->layout->dp * row));
    stream_synchronize(lanes->last);
    for (int b = 0; b < step->layout->buckets; b++) lossless->slot[b] = longest_message(step, b);
}

// Copies this rank's lossless message to its slot of the buffer, without gaps.
static void pack_own(const QwdStep *step, int b, const MessageLayout *m, const GatherBuffer *buffer,
                     const Lanes *lanes) {
    const QwdLossless *lossless = step->lossless;
    LosslessLayout coding = layout_lossless(&step->layout->bucket[b]);
    int slot = own_slot(step->mesh, buffer);
    lane_wait(lanes, LANE_APPLIED, qwd_slot(b), lanes->last);
    kernel_pack_weights(lanes->last, &coding, lossless->coded + lossless->coded_start[b],
                        buffer->messages + slot * m->bytes);
    wire_seal_own(step->checks, b, slot, m, buffer->messages, lanes->last);
}

static void decode(const QwdStep *step, int b, const MessageLayout *m, floatX *weights,
                   const GatherBuffer *buffer, const Lanes *lanes) {
    DecodeWeights d = {0};
    d.control = step->control;
    d.layout = layout_lossless(&step->layout->bucket[b]);
    d.messages = buffer->messages;
    d.stride = m->bytes;
    d.bytes = message_content(m);
    d.nodes = buffer->nodes;
    d.per_node = buffer->per_node;
    d.weights = (uint8_t *)weights;
    d.fault = step->checks->fault;
    d.code = wire_coding_fault(buffer->per_node > 1 ? HOP_WEIGHT_NODE : HOP_WEIGHT_RAIL, b);
    kernel_decode_weights(lanes->middle, &d);
}

// --- all weights --------------------------------------------------------------------------------

void qwd_update_bucket(const QwdStep *step, int b, const BucketState *state, const GatherBuffer *buffer,
                       const Lanes *lanes) {
    assert(b >= 0 && b < step->layout->buckets);
    const Mesh *mesh = step->mesh;
    MessageLayout m = qwd_message(step->layout, b, &step->weight_format);
    int slot = own_slot(mesh, buffer);
    UpdateShard u = update_of(step, b, state);
    if (alone(step)) {
        u.codes = (uint8_t *)state->weights.matrix;
        u.tail = (uint8_t *)state->weights.tail;
        kernel_update_shard(lanes->last, &u);
        return;
    }
    if (step->lossless) {
        update_lossless(step, b, &u, state, lanes);
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
    assert(b >= 0 && b < step->layout->buckets);
    if (alone(step)) return;
    const Mesh *mesh = step->mesh;
    MessageLayout m = gathered_message(step, b);
    int nodes = buffer->nodes, slot = qwd_slot(b);
    if (step->lossless) pack_own(step, b, &m, buffer, lanes);
    lane_done(lanes, LANE_UPDATED, slot, lanes->last);
    // First gather the shards of each rail into a row, then gather rows within the node.
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
    assert(b >= 0 && b < step->layout->buckets);
    if (alone(step)) return;
    const Mesh *mesh = step->mesh;
    const Bucket *bucket = &step->layout->bucket[b];
    WeightFormat format = format_of(step->layout, &step->weight_format);
    int nodes = buffer->nodes, slot = qwd_slot(b);
    bool node = buffer->per_node > 1;
    ApplyWeights a = {0};
    a.control = step->control;
    a.bucket = *bucket;
    a.bucket.matrix_elements = nodes * buffer->per_node * bucket->matrix_per_rank;  // only kept shards
    a.bucket.tail_elements = nodes * buffer->per_node * bucket->tail_per_rank;
    a.messages = buffer->messages;
    a.nodes = nodes;
    a.per_node = buffer->per_node;
    a.message = gathered_message(step, b);
    a.codec = format.codec;
    a.group = format.group;
    a.difference = format.difference;
    a.weights = weights;
    lane_wait(lanes,
              node        ? LANE_NODE_GATHERED
              : nodes > 1 ? LANE_RAIL_GATHERED
                          : LANE_UPDATED,
              slot, lanes->middle);
    // Check the first hop first, because the second hop forwards its corrupted messages.
    if (nodes > 1)
        wire_check_gathered(step->checks, HOP_WEIGHT_RAIL, b, own_row(mesh, buffer), 1, &a.message,
                            buffer->messages, lanes->middle);
    if (node)
        wire_check_gathered(step->checks, HOP_WEIGHT_NODE, b, 0, nodes, &a.message, buffer->messages,
                            lanes->middle);
    if (step->lossless) decode(step, b, &a.message, weights, buffer, lanes);
    else kernel_apply_weights(lanes->middle, &a);
    if (buffer->keep)
        kernel_keep_message(lanes->middle, step->control, buffer->keep, buffer->messages,
                            message_content(&a.message));
    lane_done(lanes, LANE_APPLIED, slot, lanes->middle);
}
