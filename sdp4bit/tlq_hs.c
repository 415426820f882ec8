// Issues the stages of the gradient reduction to their lanes: see tlq_hs.h.
#include "sdp4bit/tlq_hs.h"

enum { SLOT_ALIGN = 256 };  // bytes, for vector loads and NCCL

void tlq_workspace(TlqWorkspace *w, const BucketLayout *layout, const GradFormat *format) {
    assert(layout->buckets > 0 && layout->options.nodes > 0 && layout->options.per_node > 0);
    int64_t largest1 = 0, largest2 = 0;
    for (int b = 0; b < layout->buckets; b++) {
        for (int k = 0; k < layout_chunks(layout, &layout->bucket[b], format); k++) {
            MessageLayout level1, level2;
            layout_grad_messages(layout, &layout->bucket[b], format, k, &level1, &level2);
            if (level1.bytes > largest1) largest1 = level1.bytes;
            if (level2.bytes > largest2) largest2 = level2.bytes;
        }
    }
    w->send1_bytes = w->recv1_bytes = LANE_SLOTS *
                                      (size_t)round_up64(largest1 * layout->options.per_node, SLOT_ALIGN);
    w->send2_bytes = w->recv2_bytes = LANE_SLOTS *
                                      (size_t)round_up64(largest2 * layout->options.nodes, SLOT_ALIGN);
}

void tlq_reserve(MemoryPlan *memory_plan, const char *group, TlqWorkspace *w, int64_t alignment) {
    assert(alignment >= 1);
    memory_plan_reserve(memory_plan, group, "gradients, sent inside the node",
                        (size_t)round_up64((int64_t)w->send1_bytes, alignment), (void **)&w->send1);
    memory_plan_reserve(memory_plan, group, "gradients, received inside the node", w->recv1_bytes,
                        (void **)&w->recv1);
    memory_plan_reserve(memory_plan, group, "gradients, sent between nodes", w->send2_bytes,
                        (void **)&w->send2);
    memory_plan_reserve(memory_plan, group, "gradients, received between nodes", w->recv2_bytes,
                        (void **)&w->recv2);
}

// Chunk k of bucket b with its messages and buffer slot.
typedef struct Chunk {
    const TlqStep *step;
    const Bucket *bucket;
    SegmentTable table;
    int b, k, slot;
    int64_t lo, hi;
    bool node_hop, rail_hop;
    MessageLayout level1, level2;
    uint8_t *send1, *recv1, *send2, *recv2;
    const Lanes *lanes;
} Chunk;

static Chunk chunk_at(const TlqStep *step, int b, int k, const Lanes *lanes) {
    const TlqWorkspace *w = &step->workspace;
    Chunk c = {0};
    c.step = step;
    c.bucket = &step->layout->bucket[b];
    c.table.segment = step->segments + c.bucket->first_segment;
    c.table.count = c.bucket->segments;
    c.b = b;
    c.k = k;
    c.slot = (int)(lanes->chunks % LANE_SLOTS);
    layout_chunk(step->layout, c.bucket, layout_chunks(step->layout, c.bucket, &step->grad_format), k, &c.lo,
                 &c.hi);
    c.node_hop = step->layout->options.per_node > 1;
    c.rail_hop = step->layout->options.nodes > 1;
    layout_grad_messages(step->layout, c.bucket, &step->grad_format, k, &c.level1, &c.level2);
    size_t slot = (size_t)c.slot;
    if (c.node_hop) c.send1 = w->send1 + slot * (w->send1_bytes / LANE_SLOTS);
    if (c.node_hop) c.recv1 = w->recv1 + slot * (w->recv1_bytes / LANE_SLOTS);
    if (c.rail_hop) c.send2 = w->send2 + slot * (w->send2_bytes / LANE_SLOTS);
    if (c.rail_hop) c.recv2 = w->recv2 + slot * (w->recv2_bytes / LANE_SLOTS);
    c.lanes = lanes;
    return c;
}

// Includes the micro-batch, so that the rounding errors of separate reductions are independent.
static RoundingKey rounding_key(const TlqStep *step, uint32_t purpose, int source) {
    RoundingKey key = {step->seed, step->step, purpose | (uint32_t)step->micro_batch << 8, (uint32_t)source};
    return key;
}

// With error feedback all reductions use the same rotation, because the residual is rotated too.
RoundingKey tlq_rotation(const TlqStep *step) {
    if (!step->error_feedback) return rounding_key(step, PURPOSE_ROTATION, 0);
    return (RoundingKey){step->seed, 0, PURPOSE_ROTATION, 0};
}

// Writes the message between nodes from the residual, to which this step's values have been added,
// and keeps the new residual. Tails have no residual and are already written.
static void quantize_residual(const Chunk *c, QuantizePartitions *q, Stream *stream) {
    q->grads = c->step->residual.values;
    q->scale = 1.0f;
    q->transform = TRANSFORM_NONE;
    q->message.tail_elements = 0;
    kernel_quantize_partitions(stream, q);
    kernel_keep_residual(stream, q, &c->step->residual);
}

static void feed_and_quantize(const Chunk *c, QuantizePartitions *q, Stream *stream) {
    QuantizePartitions tails = *q;
    tails.hi = tails.lo;
    kernel_quantize_partitions(stream, &tails);
    kernel_feed_grads(stream, q, &c->step->residual);
    quantize_residual(c, q, stream);
}

static void feed_and_requantize(const Chunk *c, SumRequantize *r, Stream *stream) {
    SumRequantize tails = *r;
    tails.out.hi = tails.out.lo;
    kernel_sum_requantize(stream, &tails);
    kernel_feed_sums(stream, r, &c->step->residual);
    quantize_residual(c, &r->out, stream);
}

// Describes the quantization of the messages of one hop: inside the node or between nodes.
static QuantizePartitions hop_quantization(const Chunk *c, bool node_hop) {
    const TlqStep *step = c->step;
    const GradFormat *format = &step->grad_format;
    const Group *group = node_hop ? &step->mesh->node : &step->mesh->rail;
    QuantizePartitions q = {0};
    q.bucket = *c->bucket;
    q.table = c->table;
    q.lo = c->lo;
    q.hi = c->hi;
    q.codec = node_hop ? format->intra_codec : format->inter_codec;
    q.group = node_hop ? format->intra_group : format->inter_group;
    q.tail_codec = format->tail_codec;
    q.rounding = format->rounding;
    // At level 2 the source is the node. Its D ranks quantize disjoint shards, so their random bits
    // differ by the logical offset.
    q.key = node_hop ? rounding_key(step, PURPOSE_GRAD_LEVEL1, step->mesh->dp.rank)
                     : rounding_key(step, PURPOSE_GRAD_LEVEL2, group->rank);
    q.slots = group->size;
    q.self = group->rank;
    q.message = node_hop ? c->level1 : c->level2;
    q.send = node_hop ? c->send1 : c->send2;
    q.self_slot = (node_hop ? c->recv1 : c->recv2) + q.self * q.message.bytes;
    return q;
}

// First lane: writes the messages of the first hop, which is level 2 if every node has one rank.
static void quantize(const Chunk *c, const float *grads) {
    const TlqStep *step = c->step;
    Stream *stream = c->lanes->first;
    QuantizePartitions q = hop_quantization(c, c->node_hop);
    q.grads = grads;
    q.scale = 1.0f / (float)step->layout->dp;
    q.transform = step->grad_format.transform;
    q.rotation = tlq_rotation(step);
    lane_wait(c->lanes, c->node_hop ? LANE_NODE_FREE : LANE_RAIL_FREE, c->slot, stream);
    if (step->error_feedback && !c->node_hop) feed_and_quantize(c, &q, stream);
    else kernel_quantize_partitions(stream, &q);
    wire_seal(step->checks, c->node_hop ? HOP_GRAD_NODE : HOP_GRAD_RAIL, c->b, c->k, &q.message, q.send,
              stream);
    lane_done(c->lanes, LANE_QUANTIZED, c->slot, stream);
}

static void cross_node(const Chunk *c) {
    Stream *stream = c->lanes->node;
    lane_wait(c->lanes, LANE_QUANTIZED, c->slot, stream);
    wire_all_to_all(c->step->checks, HOP_GRAD_NODE, &c->level1, c->send1, c->recv1, stream);
    lane_done(c->lanes, LANE_NODE_ARRIVED, c->slot, stream);
}

// Middle lane: runs between the two hops.
static void requantize(const Chunk *c) {
    const TlqStep *step = c->step;
    Stream *stream = c->lanes->middle;
    SumRequantize r = {0};
    r.received = c->recv1;
    r.sources = step->mesh->node.size;
    r.in = c->level1;
    r.in_codec = step->grad_format.intra_codec;
    r.in_group = step->grad_format.intra_group;
    r.out = hop_quantization(c, false);
    r.out.first = step->mesh->node.rank;
    r.out.between = step->mesh->node.size - 1;
    lane_wait(c->lanes, LANE_NODE_ARRIVED, c->slot, stream);
    lane_wait(c->lanes, LANE_RAIL_FREE, c->slot, stream);
    wire_check(step->checks, HOP_GRAD_NODE, c->b, c->k, &c->level1, c->recv1, stream);
    if (step->error_feedback) feed_and_requantize(c, &r, stream);
    else kernel_sum_requantize(stream, &r);
    lane_done(c->lanes, LANE_NODE_FREE, c->slot, stream);
    wire_seal(step->checks, HOP_GRAD_RAIL, c->b, c->k, &c->level2, c->send2, stream);
    lane_done(c->lanes, LANE_REQUANTIZED, c->slot, stream);
}

static void cross_rail(const Chunk *c) {
    Stream *stream = c->lanes->rail;
    lane_wait(c->lanes, c->node_hop ? LANE_REQUANTIZED : LANE_QUANTIZED, c->slot, stream);
    wire_all_to_all(c->step->checks, HOP_GRAD_RAIL, &c->level2, c->send2, c->recv2, stream);
    lane_done(c->lanes, LANE_RAIL_ARRIVED, c->slot, stream);
}

// Last lane: sums the messages of the last hop into this rank's shard.
static void sum_shard(const Chunk *c, GradShard own, float *matrix_partials, float *tail_partials) {
    const TlqStep *step = c->step;
    Stream *stream = c->lanes->last;
    uint8_t *received = c->rail_hop ? c->recv2 : c->recv1;
    SumFinal f = {0};
    f.received = received;
    f.sources = c->rail_hop ? step->mesh->rail.size : step->mesh->node.size;
    f.in = c->rail_hop ? c->level2 : c->level1;
    f.codec = c->rail_hop ? step->grad_format.inter_codec : step->grad_format.intra_codec;
    f.group = c->rail_hop ? step->grad_format.inter_group : step->grad_format.intra_group;
    f.tail_codec = step->grad_format.tail_codec;
    f.transform = step->grad_format.transform;
    f.rotation = tlq_rotation(step);
    f.rank = step->mesh->dp.rank;
    f.bucket = *c->bucket;
    f.table = c->table;
    f.lo = c->lo;
    f.hi = c->hi;
    f.own = own;
    f.add = step->add;
    f.matrix_partials = matrix_partials;
    f.tail_partials = tail_partials;
    lane_wait(c->lanes, c->rail_hop ? LANE_RAIL_ARRIVED : LANE_NODE_ARRIVED, c->slot, stream);
    wire_check(step->checks, c->rail_hop ? HOP_GRAD_RAIL : HOP_GRAD_NODE, c->b, c->k, &f.in, received,
               stream);
    kernel_sum_final(stream, &f);
    lane_done(c->lanes, c->rail_hop ? LANE_RAIL_FREE : LANE_NODE_FREE, c->slot, stream);
}

void tlq_reduce_bucket(const TlqStep *step, int b, ChunkRange chunks, const float *grads, GradShard own,
                       float *matrix_partials, float *tail_partials, Lanes *lanes) {
    assert(b >= 0 && b < step->layout->buckets);
    assert(step->layout->dp > 1 || own.matrix == grads);
    const Bucket *bucket = &step->layout->bucket[b];
    if (step->layout->dp == 1) {
        kernel_square_partials(lanes->last, matrix_partials, own.matrix, bucket->matrix_per_rank);
        kernel_square_partials(lanes->last, tail_partials, own.tail, bucket->tail_per_rank);
        return;
    }
    step->checks->micro_batch = step->micro_batch;
    assert(chunks.first >= 0 && chunks.end <= layout_chunks(step->layout, bucket, &step->grad_format));
    for (int k = chunks.end - 1; k >= chunks.first; k--) {
        Chunk c = chunk_at(step, b, k, lanes);
        if (c.level1.bytes + c.level2.bytes == 0) continue;  // an empty chunk
        quantize(&c, grads);
        if (c.node_hop) cross_node(&c);
        if (c.node_hop && c.rail_hop) requantize(&c);
        if (c.rail_hop) cross_rail(&c);
        sum_shard(&c, own, matrix_partials, tail_partials);
        lanes->chunks++;
    }
}

// Copies a rank's shard from grads to a message, or from the message to grads if `out`.
static void copy_shard(const Bucket *bucket, float *grads, int64_t rank, const MessageLayout *m,
                       uint8_t *message, bool out, Stream *stream) {
    GradShard shard = grad_shard_of(bucket, grads, rank);
    MessageSections at = message_sections(m, 0);
    float *part[2] = {shard.matrix, shard.tail};
    uint8_t *section[2] = {message + at.codes, message + at.tail};
    int64_t elements[2] = {bucket->matrix_per_rank, bucket->tail_per_rank};
    for (int i = 0; i < 2; i++) {
        size_t bytes = (size_t)elements[i] * sizeof(float);
        if (out) copy_on_device(stream, part[i], section[i], bytes);
        else copy_on_device(stream, section[i], part[i], bytes);
    }
}

void tlq_gather_bucket(const TlqStep *step, int b, float *grads, uint8_t *buffer, const Lanes *lanes) {
    assert(b >= 0 && b < step->layout->buckets);
    const Bucket *bucket = &step->layout->bucket[b];
    const Mesh *mesh = step->mesh;
    Stream *last = lanes->last, *ready = last;
    int nodes = mesh->rail.size, per_node = mesh->node.size;
    int own = (int)gather_slot(nodes, per_node, mesh->dp.rank);
    MessageLayout m = layout_reduced_message(bucket);
    const struct {
        WireHop hop;
        const Group *group;
        int first, run;
        Stream *stream;
    } hop[2] = {{HOP_REDUCED_RAIL, &mesh->rail, mesh->node.rank * nodes, 1, lanes->rail},
                {HOP_REDUCED_NODE, &mesh->node, 0, nodes, lanes->node}};
    copy_shard(bucket, grads, mesh->dp.rank, &m, buffer + own * m.bytes, false, last);
    wire_seal_own(step->checks, b, own, &m, buffer, last);
    for (int i = 0; i < 2; i++) {
        if (hop[i].group->size == 1) continue;
        lanes_after(lanes, hop[i].stream, ready);
        ready = hop[i].stream;
        wire_all_gather(step->checks, hop[i].hop, hop[i].first, hop[i].run, &m, buffer, ready);
    }
    lanes_after(lanes, last, ready);
    for (int i = 0; i < 2; i++) {
        if (hop[i].group->size > 1)
            wire_check_gathered(step->checks, hop[i].hop, b, hop[i].first, hop[i].run, &m, buffer, last);
    }
    for (int slot = 0; slot < step->layout->dp; slot++) {
        if (slot != own)
            copy_shard(bucket, grads, gather_rank(nodes, per_node, slot), &m, buffer + slot * m.bytes, true,
                       last);
    }
}

void tlq_sum_squares(const TlqStep *step, int b, GradShard own, float *matrix_partials, float *tail_partials,
                     float *sums, const Lanes *lanes) {
    assert(b >= 0 && b < step->layout->buckets);
    const Bucket *bucket = &step->layout->bucket[b];
    int64_t rank = step->mesh->dp.rank, tail = layout_counted(bucket, false, rank);
    // The last partial sum of the tail may include uncounted elements, so recompute the sums. In
    // matrices, uncounted tensors start at multiples of 32.
    if (tail % HADAMARD_ORDER && tail < bucket->tail_per_rank)
        kernel_square_partials(lanes->last, tail_partials, own.tail, tail);
    kernel_tree_sum(lanes->last, &sums[0], matrix_partials,
                    layout_counted(bucket, true, rank) / HADAMARD_ORDER);
    kernel_tree_sum(lanes->last, &sums[1], tail_partials, ceil_div64(tail, HADAMARD_ORDER));
}
