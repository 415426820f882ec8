// Runs every kernel of sdp4bit/kernels.h, and FP8 quantization, on fixed pseudo-random inputs and
// prints one line per result: name, bytes, 64-bit hash. Linked with the CPU kernels and with the
// CUDA kernels; both programs must print the same lines.
//
//   kernels_dump [--values N] [--case I] [--full FILE]
//
//   N     number of gradient values, distributed over the configurations [3 million]
//   I     run only this configuration, from 0; with a large N each thread block of a GPU processes
//         many tiles
//   FILE  receives the bytes of all results; cmp finds the first difference
//
// Payloads must have identical bytes. In fp32, fp64 and bf16 results all NaNs have the same hash,
// because IEEE 754 does not define their sign and payload. Inputs contain zeros, denormals,
// infinities, NaN, and values near 2^-126, 2^-100 and FLT_MAX.
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/base.h"
#include "llmc/device.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/layout.h"
#include "test/gpu/dump.h"
#include "test/gpu/dump_activations.h"
#include "test/gpu/dump_fp8.h"
#include "test/gpu/dump_lossless.h"
#include "test/gpu/dump_outer.h"

// A tensor without model-parallel split.
#define MATRIX(NUMEL, UNIT) \
    { .numel = (NUMEL), .matrix = true, .unit = (UNIT) }
#define VECTOR(NUMEL, UNIT) \
    { .numel = (NUMEL), .matrix = false, .unit = (UNIT) }

static const SpikeState UNSPIKED;

// --- one configuration --------------------------------------------------------------------------

typedef struct Case {
    int nodes, per_node, rank;  // rank: the receiving rank
    Codec intra, inter, tail;
    int group_intra, group_inter;
    Transform transform;
    Rounding rounding;
    int chunks;
    Codec weight;
    int group_weight;
    bool difference;
    Rounding weight_rounding;
} Case;

typedef struct Run {
    Dump *d;
    Case c;
    BucketLayout layout;
    Bucket bucket;
    GradFormat format;
    WeightFormat weight_format;
    Segment *segments;  // device
    int64_t elements;   // elements of the bucket: matrix, then tail
    uint32_t inputs;    // selects the random streams of the inputs
} Run;

// Creates a bucket of tensors with odd sizes: some tiny, some ending just before or after a
// multiple of the alignment.
static void build_plan(Run *r, int64_t values) {
    LayoutTensor tensor[] = {MATRIX(values * 3 / 8 + 5, 0),
                             MATRIX(33, 0),
                             MATRIX(1, 0),
                             VECTOR(9, 0),
                             MATRIX(values / 4, 0),
                             MATRIX(4095, 0),
                             VECTOR(768, 0),
                             VECTOR(3071, 0),
                             VECTOR(1, 0),
                             MATRIX(values / 4 + 1, 0)};
    const Case *c = &r->c;
    bool quantized = codec_info(c->intra).levels || codec_info(c->inter).levels;
    LayoutOptions o = {c->nodes, c->per_node, 0, 0, INT64_MAX / 4, 1};
    o.chunk_alignment = quantized ? layout_alignment(c->group_intra, c->group_inter, 0)
                                  : layout_alignment(0, 0, 0);
    o.alignment = layout_alignment((int)o.chunk_alignment, codec_info(c->weight).levels ? c->group_weight : 0,
                                   0);
    Error err;
    if (!layout_build(&r->layout, tensor, (int)(sizeof tensor / sizeof *tensor), &o, &err)) stop(&err);
    r->bucket = r->layout.bucket[0];
    r->elements = r->bucket.matrix_elements + r->bucket.tail_elements;
    GradFormat format = {c->intra, c->inter,     c->group_intra, c->group_inter,
                         c->tail,  c->transform, c->rounding,    c->chunks};
    WeightFormat weight = {c->weight, c->group_weight, c->difference, c->weight_rounding};
    r->format = format;
    r->weight_format = weight;
    r->segments = (Segment *)upload(r->d, r->layout.segments,
                                    r->layout.segments_total * (int64_t)sizeof(Segment));
}

static const RoundingKey ROTATION = {SEED, 7, PURPOSE_ROTATION, 0};

static SegmentTable table_of(const Run *r) {
    SegmentTable table = {r->segments + r->bucket.first_segment, r->bucket.segments};
    return table;
}

// Quantizes chunk k of rank (node, local) for its first hop. Writes all payloads to `send`, and the
// one for itself to `self`. Returns the kernel's arguments.
static QuantizePartitions quantize_rank(Run *r, const float *grads, int k, int node, int local, bool node_hop,
                                        const MessageLayout *m, uint8_t *send, uint8_t *self) {
    QuantizePartitions q = {0};
    q.grads = grads;
    q.bucket = r->bucket;
    q.table = table_of(r);
    layout_chunk(&r->layout, &r->bucket, r->c.chunks, k, &q.lo, &q.hi);
    q.scale = 1.0f / (float)r->layout.dp;
    q.transform = r->c.transform;
    q.rotation = ROTATION;
    q.codec = node_hop ? r->c.intra : r->c.inter;
    q.group = node_hop ? r->c.group_intra : r->c.group_inter;
    q.tail_codec = r->c.tail;
    q.rounding = r->c.rounding;
    RoundingKey key = {SEED, 7, node_hop ? PURPOSE_GRAD_LEVEL1 : PURPOSE_GRAD_LEVEL2,
                       (uint32_t)(node_hop ? node * r->c.per_node + local : node)};
    q.key = key;
    q.slots = node_hop ? r->c.per_node : r->c.nodes;
    q.self = node_hop ? local : node;
    q.send = send;
    q.self_slot = self;
    q.message = *m;
    kernel_quantize_partitions(r->d->stream, &q);
    return q;
}

// Kind of the level 1 payloads. With plain codecs, transformed values are compared as numbers,
// because the sign and payload of a NaN sum differ between machines.
static Kind kind_of_messages(const Case *c) {
    if (c->transform == TRANSFORM_NONE || codec_grouped(c->intra)) return RAW;
    return c->intra == CODEC_FP32 ? FP32 : BF16;
}

// Level 1 of one node: every rank quantizes, and its payload for the receiving local rank is
// written to `received`.
static void first_level(Run *r, int node, int k, const MessageLayout *m, uint8_t *received) {
    Dump *d = r->d;
    int slots = r->c.per_node, local = r->c.rank % r->c.per_node;
    uint8_t *send = (uint8_t *)reserve(d, m->bytes * slots), *self = (uint8_t *)reserve(d, m->bytes);
    for (int source = 0; source < slots; source++) {
        float *grads = uploaded_values(d, r->elements, r->inputs + (uint32_t)(node * slots + source), false);
        set_zero(d->stream, send, (size_t)(m->bytes * slots));
        quantize_rank(r, grads, k, node, source, true, m, send, self);
        Kind kind = kind_of_messages(&r->c);
        result(d, kind, send, m->bytes * slots, "chunk%d rank%d level1.send", k, node * slots + source);
        result(d, kind, self, m->bytes, "chunk%d rank%d level1.self", k, node * slots + source);
        copy_on_device(d->stream, received + source * m->bytes,
                       source == local ? self : send + local * m->bytes, (size_t)m->bytes);
        release(d, grads);
    }
    release(d, send);
    release(d, self);
}

// Quantizes q->grads, or the sums of `sums`, with error feedback between nodes. Dumps the residual
// after gradients are added, the payload and the remaining residual, then the same after a skipped
// step.
static void feed_back(Run *r, int k, int node, const QuantizePartitions *q, const SumRequantize *sums) {
    Dump *d = r->d;
    int64_t values = q->slots * r->bucket.matrix_per_rank, bytes = q->message.bytes;
    if (!codec_grouped(q->codec)) return;
    StepStatus skipped = {0};
    float *memory = uploaded_values(d, values, r->inputs + 500 + (uint32_t)node, false);
    Residual residual = {memory, NULL, false};
    QuantizePartitions own = *q;
    own.grads = memory;
    own.scale = 1.0f;
    own.transform = TRANSFORM_NONE;
    own.message.tail_elements = 0;
    own.send = (uint8_t *)reserve(d, bytes * q->slots);
    own.self_slot = (uint8_t *)reserve(d, bytes);
    void *control = upload(d, &skipped, sizeof skipped);
    for (int step = 0; step < 2; step++) {
        set_zero(d->stream, own.send, (size_t)(bytes * q->slots));
        set_zero(d->stream, own.self_slot, (size_t)bytes);
        if (sums) kernel_feed_sums(d->stream, sums, &residual);
        else kernel_feed_grads(d->stream, q, &residual);
        result(d, FP32, memory, values * 4, "chunk%d node%d step%d residual.fed", k, node, step);
        kernel_quantize_partitions(d->stream, &own);
        result(d, RAW, own.send, bytes * q->slots, "chunk%d node%d step%d residual.send", k, node, step);
        result(d, RAW, own.self_slot, bytes, "chunk%d node%d step%d residual.self", k, node, step);
        kernel_keep_residual(d->stream, &own, &residual);
        result(d, FP32, memory, values * 4, "chunk%d node%d step%d residual.kept", k, node, step);
        residual.control = (const StepStatus *)control;
    }
    release(d, memory);
    release(d, own.send);
    release(d, own.self_slot);
    release(d, control);
}

// Level 2 of rank (node, local): sums the payloads of its node and quantizes for all nodes. Writes
// the payload for the receiving node to `message`.
static void second_level(Run *r, int node, int k, const MessageLayout *in, const MessageLayout *out,
                         const uint8_t *received, uint8_t *message) {
    Dump *d = r->d;
    int nodes = r->c.nodes, own = r->c.rank / r->c.per_node;
    uint8_t *send = (uint8_t *)reserve(d, out->bytes * nodes), *self = (uint8_t *)reserve(d, out->bytes);
    SumRequantize s = {0};
    s.received = received;
    s.sources = r->c.per_node;
    s.in = *in;
    s.in_codec = r->c.intra;
    s.in_group = r->c.group_intra;
    QuantizePartitions *q = &s.out;
    q->first = r->c.rank % r->c.per_node;
    q->between = r->c.per_node - 1;
    q->bucket = r->bucket;
    q->table = table_of(r);
    layout_chunk(&r->layout, &r->bucket, r->c.chunks, k, &q->lo, &q->hi);
    q->codec = r->c.inter;
    q->group = r->c.group_inter;
    q->tail_codec = r->c.tail;
    q->rounding = r->c.rounding;
    RoundingKey key = {SEED, 7, PURPOSE_GRAD_LEVEL2, (uint32_t)node};
    q->key = key;
    q->slots = nodes;
    q->self = node;
    q->send = send;
    q->self_slot = self;
    q->message = *out;
    kernel_sum_requantize(d->stream, &s);
    result(d, RAW, send, out->bytes * nodes, "chunk%d node%d level2.send", k, node);
    result(d, RAW, self, out->bytes, "chunk%d node%d level2.self", k, node);
    copy_on_device(d->stream, message, own == node ? self : send + own * out->bytes, (size_t)out->bytes);
    feed_back(r, k, node, q, &s);
    release(d, send);
    release(d, self);
}

// The only level of a reduction with one rank per node.
static void only_level(Run *r, int k, const MessageLayout *m, uint8_t *received) {
    Dump *d = r->d;
    uint8_t *send = (uint8_t *)reserve(d, m->bytes * r->c.nodes), *self = (uint8_t *)reserve(d, m->bytes);
    for (int node = 0; node < r->c.nodes; node++) {
        float *grads = uploaded_values(d, r->elements, r->inputs + (uint32_t)node, false);
        set_zero(d->stream, send, (size_t)(m->bytes * r->c.nodes));
        QuantizePartitions q = quantize_rank(r, grads, k, node, 0, false, m, send, self);
        result(d, RAW, send, m->bytes * r->c.nodes, "chunk%d node%d level2.send", k, node);
        result(d, RAW, self, m->bytes, "chunk%d node%d level2.self", k, node);
        copy_on_device(d->stream, received + node * m->bytes,
                       node == r->c.rank ? self : send + r->c.rank * m->bytes, (size_t)m->bytes);
        feed_back(r, k, node, &q, NULL);
        release(d, grads);
    }
    release(d, send);
    release(d, self);
}

// Buffers for the results of a reduction: the rank's shard, partial sums of the norm, sums.
typedef struct Reduced {
    bool add;  // adds to the previous contents of `grads`
    int64_t partial_count;
    float *grads, *partials, *sums;
} Reduced;

static Reduced reserve_reduced(Run *r, bool add) {
    Dump *d = r->d;
    int64_t partial_count = r->bucket.matrix_per_rank / HADAMARD_ORDER +
                            ceil_div64(r->bucket.tail_per_rank, HADAMARD_ORDER);
    float *grads = add ? uploaded_values(d, r->elements, r->inputs + 77, false)
                       : (float *)reserve(d, r->elements * 4);
    Reduced reduced = {add, partial_count, grads, (float *)reserve(d, partial_count * 4),
                       (float *)reserve(d, 8)};
    return reduced;
}

static void show_reduced(Run *r, const Reduced *a, const char *name) {
    Dump *d = r->d;
    int64_t matrix_partials = r->bucket.matrix_per_rank / HADAMARD_ORDER;
    result(d, FP32, a->grads, r->elements * 4, "%s", name);
    result(d, FP32, a->partials, a->partial_count * 4, "%s: partial sums", name);
    kernel_tree_sum(d->stream, a->sums, a->partials, matrix_partials);
    kernel_tree_sum(d->stream, a->sums + 1, a->partials + matrix_partials,
                    a->partial_count - matrix_partials);
    result(d, FP32, a->sums, 8, "%s: sums", name);
    release(d, a->grads);
    release(d, a->partials);
    release(d, a->sums);
}

static void final_sum(Run *r, int k, const MessageLayout *m, bool node_hop, const uint8_t *received,
                      const Reduced *to) {
    SumFinal f = {0};
    f.received = received;
    f.sources = node_hop ? r->c.per_node : r->c.nodes;
    f.in = *m;
    f.codec = node_hop ? r->c.intra : r->c.inter;
    f.group = node_hop ? r->c.group_intra : r->c.group_inter;
    f.tail_codec = r->c.tail;
    f.transform = r->c.transform;
    f.rotation = ROTATION;
    f.rank = r->c.rank;
    f.bucket = r->bucket;
    f.table = table_of(r);
    layout_chunk(&r->layout, &r->bucket, r->c.chunks, k, &f.lo, &f.hi);
    f.own = grad_shard_of(&r->bucket, to->grads, r->c.rank);
    f.add = to->add;
    f.matrix_partials = to->partials;
    f.tail_partials = to->partials + r->bucket.matrix_per_rank / HADAMARD_ORDER;
    kernel_sum_final(r->d->stream, &f);
}

// Reduces one bucket: dumps the payloads of every hop, and the results of storing and of adding.
static void reduce(Run *r) {
    Dump *d = r->d;
    const Case *c = &r->c;
    Reduced to[2] = {reserve_reduced(r, false), reserve_reduced(r, true)};
    for (int k = 0; k < c->chunks; k++) {
        MessageLayout level1, level2;
        layout_grad_messages(&r->layout, &r->bucket, &r->format, k, &level1, &level2);
        if (level1.bytes + level2.bytes == 0) continue;
        uint8_t *received1 = (uint8_t *)reserve(d, level1.bytes * c->per_node),
                *received2 = (uint8_t *)reserve(d, level2.bytes * c->nodes);
        for (int node = 0; c->per_node > 1 && node < c->nodes; node++) {
            first_level(r, node, k, &level1, received1);
            if (c->nodes > 1)
                second_level(r, node, k, &level1, &level2, received1, received2 + node * level2.bytes);
        }
        if (c->per_node == 1) only_level(r, k, &level2, received2);
        for (int i = 0; i < 2; i++) {
            if (c->nodes > 1) final_sum(r, k, &level2, false, received2, &to[i]);
            else final_sum(r, k, &level1, true, received1, &to[i]);
        }
        release(d, received1);
        release(d, received2);
    }
    show_reduced(r, &to[0], "reduced");
    show_reduced(r, &to[1], "added");
}

// --- weights ------------------------------------------------------------------------------------

typedef struct Weights {
    float *grads;           // (elements) reduced gradients of all ranks' shards
    floatX *weights;        // (elements)
    float *master, *m, *v;  // (dp, shard) states of all ranks
    uint8_t *messages;      // [local][node]
    StepStatus *control;
    uint64_t *fault;
    MessageLayout message;
} Weights;

// Initializes model weights with the distribution of GPT weights, and master weights near them.
static void start_weights(Run *r, Weights *w, bool finite) {
    Dump *d = r->d;
    int64_t shard = r->bucket.matrix_per_rank + r->bucket.tail_per_rank, states = shard * r->layout.dp;
    floatX *host = (floatX *)xmalloc((size_t)r->elements * sizeof *host, "test data");
    float *values = (float *)xmalloc((size_t)(states > r->elements ? states : r->elements) * sizeof *values,
                                     "test data");
    fill(values, r->elements, r->inputs + 900, true);
    for (int64_t i = 0; i < r->elements; i++) host[i] = floatX_from_float(values[i]);
    w->weights = (floatX *)upload(d, host, r->elements * (int64_t)sizeof *host);
    w->message = layout_weight_message(&r->bucket, &r->weight_format);
    w->messages = (uint8_t *)reserve(d, w->message.bytes * r->layout.dp);
    w->grads = uploaded_values(d, r->elements, r->inputs + 901, finite);
    for (int64_t i = 0; i < states; i++) {
        // Master weights within one percent of the model weights, and exactly equal at some
        // positions.
        int64_t rank = i / shard, at = i % shard;
        int64_t position = at < r->bucket.matrix_per_rank
                               ? rank * r->bucket.matrix_per_rank + at
                               : r->bucket.matrix_elements + rank * r->bucket.tail_per_rank + at -
                                     r->bucket.matrix_per_rank;
        float near = floatX_to_float(host[position]);
        uint32_t random = philox4x32_10(SEED, PURPOSE_DATA, (uint32_t)i, 3, 0, 0).v[0];
        values[i] = random % 8 ? near * (1.0f + 0.01f * (float)(random >> 8) / 16777216.0f) : near;
    }
    w->master = (float *)upload(d, values, states * 4);
    for (int64_t i = 0; i < states; i++) values[i] *= 0.125f;
    w->m = (float *)upload(d, values, states * 4);
    for (int64_t i = 0; i < states; i++) values[i] = values[i] * values[i];
    w->v = (float *)upload(d, values, states * 4);
    StepStatus control = {0.9,         0.95,         1, 2.5f, 3.0f,     0.875f, 6e-4f,
                          1.0f - 0.9f, 1.0f - 0.95f, 1, 0,    UNSPIKED, 0};
    w->control = (StepStatus *)upload(d, &control, sizeof control);
    w->fault = (uint64_t *)upload(d, &control.fault, sizeof control.fault);
    stream_synchronize(d->stream);
    free(host);
    free(values);
}

static void free_weights(Run *r, Weights *w) {
    release(r->d, w->grads);
    release(r->d, w->weights);
    release(r->d, w->master);
    release(r->d, w->m);
    release(r->d, w->v);
    release(r->d, w->messages);
    release(r->d, w->control);
    release(r->d, w->fault);
}

static void set_learning_rate(Run *r, Weights *w, float learning_rate) {
    copy_to_device(r->d->stream, &w->control->learning_rate, &learning_rate, sizeof learning_rate);
    stream_synchronize(r->d->stream);
}

static void set_applied(Run *r, Weights *w, int applied) {
    StepStatus control;
    copy_to_host(r->d->stream, &control, w->control, sizeof control);
    stream_synchronize(r->d->stream);
    control.applied = applied;
    control.clip_coefficient = applied ? control.clip_coefficient : (float)NAN;  // as after a skipped step
    copy_to_device(r->d->stream, w->control, &control, sizeof control);
}

static uint8_t *message_of(const Run *r, const Weights *w, int rank) {
    return w->messages + gather_slot(r->c.nodes, r->c.per_node, rank) * w->message.bytes;
}

// One step: AdamW, quantization and gather of every rank, one after the other. Then applies all
// shards.
static void weight_step(Run *r, Weights *w, const char *name) {
    Dump *d = r->d;
    int64_t shard = r->bucket.matrix_per_rank + r->bucket.tail_per_rank;
    set_zero(d->stream, w->messages, (size_t)(w->message.bytes * r->layout.dp));
    for (int rank = 0; rank < r->layout.dp; rank++) {
        UpdateShard u = {0};
        uint8_t *message = message_of(r, w, rank);
        u.control = w->control;
        u.beta1 = 0.9f, u.beta2 = 0.95f, u.epsilon = 1e-8f, u.weight_decay = 0.1f;
        u.rank = rank;
        u.bucket = r->bucket;
        u.table = table_of(r);
        GradShard own = grad_shard_of(&r->bucket, w->grads, rank);
        u.matrix_grads = own.matrix;
        u.tail_grads = own.tail;
        u.matrix_weights = w->weights + rank * r->bucket.matrix_per_rank;
        u.master = w->master + rank * shard, u.exp_avg = w->m + rank * shard,
        u.exp_avg_sq = w->v + rank * shard;
        u.codec = r->c.weight;
        u.group = r->c.group_weight;
        u.rounding = r->c.weight_rounding;
        u.difference = r->c.difference;
        RoundingKey key = {SEED, 7, PURPOSE_WEIGHT, 0};
        u.key = key;
        u.codes = message;
        MessageSections at = message_sections(&w->message, 0);
        u.scales = (float *)(void *)(message + at.scales);
        u.tail = message + at.tail;
        u.fault = w->fault;
        u.code = fault_code(FAULT_OF_UPDATE, (uint64_t)rank);
        kernel_update_shard(d->stream, &u);
        const MessageLayout *m = &w->message;
        result(d, codec_info(r->c.weight).levels ? RAW : BF16, message, m->codes_stride, "%s rank%d codes",
               name, rank);
        result(d, RAW, message + m->scales, m->scales_stride, "%s rank%d scales", name, rank);
        result(d, BF16, message + m->tail, m->tail_stride, "%s rank%d tail", name, rank);
    }
    ApplyWeights a = {w->control, r->bucket,   w->messages,       r->c.nodes,      r->c.per_node,
                      w->message, r->c.weight, r->c.group_weight, r->c.difference, w->weights};
    kernel_apply_weights(d->stream, &a);
    result(d, RAW, w->fault, sizeof *w->fault, "%s fault", name);
    result(d, FP32, w->master, shard * r->layout.dp * 4, "%s master weights", name);
    result(d, FP32, w->m, shard * r->layout.dp * 4, "%s exp_avg", name);
    result(d, FP32, w->v, shard * r->layout.dp * 4, "%s exp_avg_sq", name);
    result(d, sizeof(floatX) == 2 ? BF16 : FP32, w->weights, r->elements * (int64_t)sizeof(floatX),
           "%s weights", name);
}

// Five steps: two ordinary ones, a skipped one, one on gradients with infinities and NaN while the
// check is off, and one whose learning rate moves some master weights over their limit.
static void weights(Run *r) {
    Weights w;
    start_weights(r, &w, true);
    weight_step(r, &w, "step1");
    weight_step(r, &w, "step2");
    set_applied(r, &w, 0);
    weight_step(r, &w, "skipped");
    free_weights(r, &w);
    start_weights(r, &w, false);
    weight_step(r, &w, "unchecked");
    free_weights(r, &w);
    start_weights(r, &w, true);
    set_learning_rate(r, &w, 6e37f);
    weight_step(r, &w, "wild");
    free_weights(r, &w);
}

// A single rank: the rounded master weights become the model weights directly.
static void weights_alone(Run *r) {
    Dump *d = r->d;
    Weights w;
    start_weights(r, &w, true);
    UpdateShard u = {0};
    u.control = w.control;
    u.beta1 = 0.9f, u.beta2 = 0.95f, u.epsilon = 1e-8f, u.weight_decay = 0.1f;
    u.bucket = r->bucket;
    u.table = table_of(r);
    u.matrix_grads = w.grads;
    u.tail_grads = w.grads + r->bucket.matrix_elements;
    u.matrix_weights = w.weights;
    u.master = w.master, u.exp_avg = w.m, u.exp_avg_sq = w.v;
    u.codec = FLOATX_CODEC;
    u.group = r->c.group_weight;
    u.difference = true;
    u.codes = (uint8_t *)w.weights;
    u.tail = (uint8_t *)(w.weights + r->bucket.matrix_elements);
    u.fault = w.fault;
    u.code = fault_code(FAULT_OF_UPDATE, 0);
    kernel_update_shard(d->stream, &u);
    result(d, RAW, w.weights, r->elements * (int64_t)sizeof(floatX), "alone weights");
    result(d, RAW, w.fault, sizeof *w.fault, "alone fault");
    set_applied(r, &w, 0);
    kernel_update_shard(d->stream, &u);
    result(d, RAW, w.weights, r->elements * (int64_t)sizeof(floatX), "alone, skipped, weights");
    free_weights(r, &w);
}

static void run_case(Dump *d, const Case *c, int64_t values, int index) {
    Run r = {0};
    r.d = d;
    r.c = *c;
    r.inputs = (uint32_t)index * 1000;
    build_plan(&r, values);
    const char *transform = c->transform == TRANSFORM_HADAMARD ? " H" : c->transform ? " R" : "";
    snprintf(d->prefix, sizeof d->prefix, "case%d %dx%d %s/%d %s/%d%s%s k%d %s/%d%s%s", index, c->nodes,
             c->per_node, codec_info(c->intra).name, c->group_intra, codec_info(c->inter).name,
             c->group_inter, transform, c->rounding == ROUND_STOCHASTIC ? " stochastic" : "", c->chunks,
             codec_info(c->weight).name, c->group_weight, c->difference ? " difference" : "",
             c->weight_rounding == ROUND_STOCHASTIC ? " stochastic" : "");
    if (r.layout.dp > 1) reduce(&r);
    if (r.layout.dp > 1) weights(&r);
    else weights_alone(&r);
    release(d, r.segments);
    layout_free(&r.layout);
}

// --- kernels without a bucket -------------------------------------------------------------------

static void norms(Dump *d) {
    const int64_t sizes[] = {0,  1,   2,    3,    5,    31,     32,     33,    63,
                             64, 100, 4095, 4096, 4097, 131072, 131073, 300007};
    float *x = uploaded_values(d, 400000, 5001, true), *partials = (float *)reserve(d, 400000 * 4),
          *sum = (float *)reserve(d, 4);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int shift = 0; shift < 4; shift++) {
            int64_t count = ceil_div64(sizes[i], HADAMARD_ORDER);
            kernel_square_partials(d->stream, partials + shift, x + shift, sizes[i]);
            result(d, FP32, partials + shift, count * 4, "square partial sums %" PRId64 " shift %d", sizes[i],
                   shift);
            kernel_tree_sum(d->stream, sum, partials + shift, count);
            result(d, FP32, sum, 4, "tree of partial sums %" PRId64 " shift %d", sizes[i], shift);
        }
        copy_on_device(d->stream, partials, x, 400000 * 4);
        kernel_tree_sum(d->stream, sum, partials, sizes[i]);
        result(d, FP32, sum, 4, "tree sum %" PRId64, sizes[i]);
    }
    // A partial sum without a neighbor must stay as it is: adding 0 would turn -0 into 0.
    for (int64_t n = 1; n < 10; n++) {
        const float negative_zeros[10] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f,
                                          -0.0f, -0.0f, -0.0f, -0.0f, -0.0f};
        copy_to_device(d->stream, partials, negative_zeros, sizeof negative_zeros);
        kernel_tree_sum(d->stream, sum, partials, n);
        result(d, FP32, sum, 4, "tree sum of %" PRId64 " negative zeros", n);
    }
    release(d, x);
    release(d, partials);
    release(d, sum);
}

static void dump_control(Dump *d, const StepStatus *control, int index) {
    StepStatus host;
    copy_to_host(d->stream, &host, control, sizeof host);
    stream_synchronize(d->stream);
    result(d, FP64, control, 2 * sizeof(double), "step status %d powers", index);
    result(d, FP32, &control->loss, 6 * sizeof(float), "step status %d floats", index);
    printf("%s step status %d steps %" PRId64 " applied %d\n", d->prefix, index, host.adam_steps,
           (int)host.applied);
}

static void step_statuses(Dump *d) {
    float sums_host[] = {0.1f, 1e-30f, 3.0f, 1e10f, FLT_MIN, 7.7f, 1e38f}, loss_host[] = {2.345f, NAN};
    float *sums = (float *)upload(d, sums_host, sizeof sums_host),
          *loss = (float *)upload(d, loss_host, sizeof loss_host);
    StepRecord *records = (StepRecord *)reserve(d, 8 * sizeof(StepRecord));
    uint64_t *fault = (uint64_t *)reserve(d, sizeof *fault);
    for (int pieces = 0; pieces <= 7; pieces++) {
        kernel_step_record(d->stream, records + pieces, sums, pieces, loss, fault);
    }
    result(d, FP64, records, 8 * sizeof(StepRecord), "records");
    const uint64_t found_host[] = {0, 7, 0, 9};  // faults of four ranks, 0: none
    uint64_t *found = (uint64_t *)upload(d, found_host, sizeof found_host), marked = 0;
    for (int i = 0; i < 4; i++) {
        kernel_mark_fault(d->stream, fault, found + i, NULL);
        copy_to_host(d->stream, &marked, fault, sizeof marked);
        stream_synchronize(d->stream);
        printf("%s fault %d is %" PRIu64 "\n", d->prefix, i, marked);
    }
    release(d, found);
    set_zero(d->stream, fault, sizeof *fault);
    StepStatus start = {1.0, 1.0, 0, 0, 0, 0, 0, 0, 0, 1, 0, UNSPIKED, 0};
    StepStatus *control = (StepStatus *)upload(d, &start, sizeof start);
    StatusInputs j = {records, 1, 1, 1.0f, 0.9f, 0.95f, 1e-3f, 2e-3f, true, false, 0, 0, 1, 1};
    for (int step = 0; step < 12; step++) {
        j.ranks = 1 + step % 6;
        j.losses = 1 + step % j.ranks;
        j.clip_grad = step % 4 == 1 ? 0.0f : 0.75f;
        // In some steps the last rank's loss is NaN. The step is skipped, or applied if the check
        // is off.
        kernel_step_record(d->stream, records + j.ranks - 1, sums, step % 7, loss + (step % 5 == 3), fault);
        j.skip_non_finite = step != 8;
        kernel_step_status(d->stream, control, &j);
        dump_control(d, control, step);
    }
    release(d, sums);
    release(d, loss);
    release(d, records);
    release(d, fault);
    release(d, control);
}

// Computes and verifies checksums of payloads of several sizes, one of which is skipped, and then
// again after a bit flip.
static void seals(Dump *d) {
    enum { COUNT = 5 };
    static const int64_t sizes[] = {16, 32, 48, 4112, 1000016};
    for (int size = 0; size < 5; size++) {
        int64_t bytes = COUNT * sizes[size];
        uint8_t *host = (uint8_t *)xmalloc((size_t)bytes, "test data"), *memory;
        for (int64_t i = 0; i < bytes; i++) host[i] = (uint8_t)(i * 2654435761u >> 13);
        memory = (uint8_t *)upload(d, host, bytes);
        uint64_t *found = (uint64_t *)reserve(d, (2 + COUNT) * (int64_t)sizeof *found);
        SealMessages a = {memory, COUNT, 2, sizes[size], 123456789 + (uint64_t)size, 3u << 16, 1};
        kernel_seal_messages(d->stream, &a);
        result(d, RAW, memory, bytes, "sealed %d", size);
        kernel_check_messages(d->stream, &a, found + 2, found, (uint64_t)1 << 63);
        int64_t at = 3 * sizes[size] + sizes[size] / 3;
        uint8_t flipped;
        copy_to_host(d->stream, &flipped, memory + at, 1);
        stream_synchronize(d->stream);
        flipped ^= 16;
        copy_to_device(d->stream, memory + at, &flipped, 1);
        kernel_check_messages(d->stream, &a, found + 2, found + 1, (uint64_t)1 << 63);
        result(d, RAW, found, 16, "seals checked %d", size);
        free(host);
        release(d, memory);
        release(d, found);
    }
}

// A long series of losses and norms with spikes and NaNs, which are alternately reported and
// skipped. The running means must be bitwise identical.
static void spikes(Dump *d) {
    enum { STEPS = 150 };
    float loss_host[STEPS], sums_host[STEPS];
    for (int i = 0; i < STEPS; i++) {
        loss_host[i] = i % 41 == 40 ? 9.0f : i % 57 == 50 ? NAN : 2.0f + 0.003f * (float)(i * 37 % 101);
        sums_host[i] = i % 37 == 36 ? 400.0f : 1.0f + 0.01f * (float)(i * 53 % 97);
    }
    float *sums = (float *)upload(d, sums_host, sizeof sums_host),
          *loss = (float *)upload(d, loss_host, sizeof loss_host);
    StepRecord *records = (StepRecord *)reserve(d, sizeof(StepRecord));
    uint64_t *fault = (uint64_t *)reserve(d, sizeof *fault);
    StepStatus start = {1.0, 1.0, 0, 0, 0, 0, 0, 0, 0, 1, 0, UNSPIKED, 0}, host;
    StepStatus *control = (StepStatus *)upload(d, &start, sizeof start);
    StatusInputs j = {records, 1, 1, 1.0f, 0.9f, 0.95f, 1e-3f, 2e-3f, true, false, 6.0f, 8.0f, 1, 1};
    for (int step = 0; step < STEPS; step++) {
        j.skip_spikes = step > 80;
        kernel_step_record(d->stream, records, sums + step, 1, loss + step, fault);
        kernel_step_status(d->stream, control, &j);
        copy_to_host(d->stream, &host, control, sizeof host);
        stream_synchronize(d->stream);
        result(d, FP64, &control->spikes.loss, 4 * sizeof(double), "spikes %d means", step);
        result(d, FP32, &control->spikes.loss_limit, 2 * sizeof(float), "spikes %d limits", step);
        printf("%s spikes %d found %d seen %" PRId64 " in a row %" PRId64 " applied %d\n", d->prefix, step,
               (int)host.spikes.found, host.spikes.seen, host.spikes.skipped_in_a_row, (int)host.applied);
    }
    release(d, sums);
    release(d, loss);
    release(d, records);
    release(d, fault);
    release(d, control);
}

static void replicas(Dump *d) {
    enum { COUNT = 100003 };
    float *values = (float *)xmalloc(COUNT * sizeof *values, "test data");
    floatX *host = (floatX *)xmalloc(COUNT * sizeof *host, "test data");
    fill(values, COUNT, 5002, false);
    for (int i = 0; i < COUNT; i++) host[i] = floatX_from_float(values[i]);
    floatX *weights_copy = (floatX *)upload(d, host, COUNT * (int64_t)sizeof *host);
    float *x = (float *)upload(d, values, COUNT * 4), *wide = (float *)reserve(d, COUNT * 4);
    uint64_t *counts = (uint64_t *)reserve(d, 2 * sizeof *counts);
    for (int shift = 0; shift < 3; shift++) {
        kernel_replica_hash(d->stream, counts, weights_copy + shift, 123456789012 + shift, COUNT - 3 * shift);
        kernel_count_zeros(d->stream, (int64_t *)counts + 1, x + shift, COUNT - 3 * shift);
        kernel_square_weights(d->stream, wide, weights_copy + shift, COUNT - 3 * shift);
        result(d, FP32, wide, ceil_div64(COUNT - 3 * shift, HADAMARD_ORDER) * 4, "square weights shift %d",
               shift);
        kernel_widen(d->stream, wide, weights_copy + shift, COUNT - 3 * shift);
        result(d, RAW, counts, 16, "replica hash and zeros %d", shift);
        result(d, FP32, wide, (COUNT - 3 * shift) * 4, "widened %d", shift);
    }
    free(values);
    free(host);
    release(d, weights_copy);
    release(d, x);
    release(d, wide);
    release(d, counts);
}

// Local steps: pseudo-gradients, outer steps, and the reset of master weights to the outer weights,
// with special and ordinary values and for ranges of many lengths and offsets.
static void local_steps(Dump *d) {
    enum { COUNT = 100003, SHIFTS = 3 };
    static const int64_t lengths[] = {0, 1, 31, 1000, COUNT - SHIFTS};
    static const float momenta[] = {0.0f, 0.9f}, mixes[] = {0.0f, 0.5f, 1.0f};
    float *start[3], *now[3];  // master weights, outer weights, momentum
    for (uint32_t i = 0; i < 3; i++) {
        start[i] = uploaded_values(d, COUNT, 5010 + i, i == 1);
        now[i] = (float *)reserve(d, COUNT * 4);
    }
    float *gradient = (float *)reserve(d, COUNT * 4);
    floatX *weights = (floatX *)reserve(d, COUNT * (int64_t)sizeof *weights);
    for (int i = 0; i < 5 * SHIFTS; i++) {
        int64_t n = lengths[i / SHIFTS], shift = i % SHIFTS, bytes = n * 4;
        for (int k = 0; k < 3; k++) copy_on_device(d->stream, now[k], start[k], COUNT * 4);
        float *master = now[0] + shift, *outer = now[1] + shift, *m = now[2] + shift;
        kernel_pseudo_gradient(d->stream, gradient, outer, master, n);
        result(d, FP32, gradient, bytes, "pseudo-gradient %" PRId64 " shift %" PRId64, n, shift);
        kernel_outer_step(d->stream, outer, m, gradient, 0.7f, momenta[i % 2], n, NULL);
        result(d, FP32, now[1], COUNT * 4, "outer weights %" PRId64 " shift %" PRId64, n, shift);
        result(d, FP32, now[2], COUNT * 4, "outer momentum %" PRId64 " shift %" PRId64, n, shift);
        kernel_mix_outer(d->stream, master, outer, mixes[i % 3], n, NULL);
        result(d, FP32, now[0], COUNT * 4, "synced master weights %" PRId64 " shift %" PRId64, n, shift);
        kernel_narrow(d->stream, weights, master, n);
        result(d, sizeof *weights == 2 ? BF16 : FP32, weights, n * (int64_t)sizeof *weights,
               "rounded master weights %" PRId64 " shift %" PRId64, n, shift);
    }
    for (int k = 0; k < 3; k++) {
        release(d, start[k]);
        release(d, now[k]);
    }
    release(d, gradient);
    release(d, weights);
}

// Stored payloads are replaced after an applied step and unchanged after a skipped one.
static void kept_messages(Dump *d) {
    enum { BYTES = 40016 };  // more than one thread block copies
    uint8_t *host = (uint8_t *)xmalloc(BYTES, "test data");
    for (int i = 0; i < BYTES; i++) host[i] = (uint8_t)(i * 7 + i / 256);
    uint8_t *from = (uint8_t *)upload(d, host, BYTES), *to = (uint8_t *)reserve(d, BYTES);
    StepStatus *control = (StepStatus *)reserve(d, sizeof *control);
    for (int applied = 0; applied < 2; applied++) {
        StepStatus now = {0};
        now.applied = applied;
        copy_to_device(d->stream, control, &now, sizeof now);
        kernel_keep_message(d->stream, control, to, from, BYTES);
        result(d, RAW, to, BYTES, "kept message, applied %d", applied);
    }
    free(host);
    release(d, from);
    release(d, to);
    release(d, control);
}

// NaNs with any sign and payload in unquantized parts of the first hop keep their sign and become
// quiet.
static void odd_nans(Dump *d, Codec codec, Codec tail) {
    Case c = {2,
              1,
              0,
              codec,
              codec,
              tail,
              32,
              32,
              TRANSFORM_NONE,
              ROUND_NEAREST,
              1,
              FLOATX_CODEC,
              32,
              false,
              ROUND_NEAREST};
    Run r = {0};
    r.d = d;
    r.c = c;
    build_plan(&r, 20000);
    MessageLayout none, message;
    layout_grad_messages(&r.layout, &r.bucket, &r.format, 0, &none, &message);
    float *host = (float *)xmalloc((size_t)r.elements * sizeof *host, "test data");
    fill(host, r.elements, 5003, true);
    for (int64_t i = 0; i < r.elements; i += 7)
        host[i] = f32_from_bits(0x7F800001u | (uint32_t)(i * 2654435761u));
    float *grads = (float *)upload(d, host, r.elements * 4);
    uint8_t *send = (uint8_t *)reserve(d, 2 * message.bytes), *self = (uint8_t *)reserve(d, message.bytes);
    quantize_rank(&r, grads, 0, 0, 0, false, &message, send, self);
    result(d, RAW, send, 2 * message.bytes, "odd NaN %s tail %s send", codec_info(codec).name,
           codec_info(tail).name);
    result(d, RAW, self, message.bytes, "odd NaN %s tail %s self", codec_info(codec).name,
           codec_info(tail).name);
    free(host);
    release(d, grads);
    release(d, send);
    release(d, self);
    release(d, r.segments);
    layout_free(&r.layout);
}

// --- all cases ----------------------------------------------------------------------------------

#define F32 CODEC_FP32
#define B16 CODEC_BF16
#define I8 CODEC_INT8
#define I4 CODEC_INT4
#define E4 CODEC_EDEN4
#define E3 CODEC_EDEN3
#define E2 CODEC_EDEN2
#define PLAIN TRANSFORM_NONE
#define HADAMARD TRANSFORM_HADAMARD
#define ROTATE TRANSFORM_ROTATION
#define FX FLOATX_CODEC
#define NEAREST ROUND_NEAREST
#define RANDOM ROUND_STOCHASTIC

static const Case CASES[] = {
    // nodes, ranks per node, receiving rank; codecs inside nodes, between nodes and of 1-D tensors;
    // two group sizes, transform, rounding, chunks; for weights: codec, group size, differences,
    // rounding
    {2, 2, 1, I8, I4, B16, 128, 128, HADAMARD, RANDOM, 1, I4, 2048, true, NEAREST},
    {2, 2, 2, I8, I4, B16, 512, 128, HADAMARD, RANDOM, 3, I4, 2048, true, RANDOM},
    {2, 4, 5, I8, I4, B16, 512, 128, HADAMARD, NEAREST, 2, I4, 128, true, NEAREST},
    {4, 2, 3, I8, I4, B16, 128, 512, PLAIN, RANDOM, 2, I8, 512, true, RANDOM},
    {2, 3, 4, I8, I4, B16, 32, 64, HADAMARD, RANDOM, 2, I4, 96, true, RANDOM},
    {3, 2, 0, I4, I4, B16, 64, 32, PLAIN, RANDOM, 1, I4, 32, false, NEAREST},
    {2, 2, 3, I4, I4, B16, 96, 96, HADAMARD, RANDOM, 5, I8, 96, false, RANDOM},
    {2, 2, 0, I8, I8, B16, 256, 1024, HADAMARD, RANDOM, 1, I4, 1024, true, RANDOM},
    {1, 8, 7, I8, I4, B16, 1024, 1024, HADAMARD, RANDOM, 2, I8, 256, true, NEAREST},
    {8, 1, 5, I8, I4, B16, 1024, 2048, HADAMARD, RANDOM, 2, I4, 4096, true, RANDOM},
    {2, 2, 1, I8, I4, B16, 2048, 4096, HADAMARD, RANDOM, 1, I4, 8192, true, RANDOM},
    {2, 2, 2, I4, I8, B16, 4096, 2048, PLAIN, NEAREST, 1, I8, 16384, true, NEAREST},
    {1, 3, 2, I4, I4, B16, 160, 160, HADAMARD, RANDOM, 1, I4, 4160, true, RANDOM},
    {3, 1, 1, I8, I8, B16, 96, 768, PLAIN, NEAREST, 2, I4, 768, true, NEAREST},
    {2, 2, 1, F32, F32, F32, 32, 32, PLAIN, NEAREST, 2, FX, 32, false, NEAREST},
    {2, 4, 6, B16, B16, B16, 32, 32, PLAIN, NEAREST, 1, FX, 32, false, NEAREST},
    {1, 2, 1, B16, B16, B16, 32, 32, PLAIN, NEAREST, 3, I4, 2048, true, NEAREST},
    {2, 1, 0, F32, F32, F32, 32, 32, PLAIN, NEAREST, 1, I8, 2048, false, RANDOM},
    {1, 1, 0, F32, F32, F32, 32, 32, PLAIN, NEAREST, 1, FX, 32, false, NEAREST},
    // Sums of 5, 7 and 9 sources, which kernels load in batches of 4, 2 and 1, with groups of 32,
    // 64 and more values.
    {2, 5, 7, I8, I4, B16, 128, 64, HADAMARD, RANDOM, 1, I4, 64, true, RANDOM},
    {2, 7, 3, I4, I8, B16, 64, 512, HADAMARD, RANDOM, 2, I8, 128, true, RANDOM},
    {2, 9, 11, I4, I4, B16, 32, 256, PLAIN, NEAREST, 1, I8, 64, false, RANDOM},
    {7, 1, 2, I4, I4, B16, 32, 32, HADAMARD, RANDOM, 1, I4, 256, true, NEAREST},
    {2, 1, 1, I8, I8, B16, 32, 2048, HADAMARD, RANDOM, 1, I4, 512, true, RANDOM},
    // EDEN after first hops of every codec and group size, and as the only hop, with 1 to 9
    // sources.
    {2, 2, 1, I8, E4, B16, 128, 256, ROTATE, RANDOM, 1, FX, 32, false, NEAREST},
    {3, 4, 5, I8, E3, B16, 512, 256, ROTATE, RANDOM, 3, FX, 32, false, NEAREST},
    {2, 3, 4, I4, E2, B16, 32, 256, ROTATE, NEAREST, 2, FX, 32, false, NEAREST},
    {5, 2, 0, I8, E4, B16, 256, 256, ROTATE, RANDOM, 1, FX, 32, false, NEAREST},
    {2, 9, 3, I8, E3, B16, 1024, 256, ROTATE, RANDOM, 1, FX, 32, false, NEAREST},
    {2, 2, 3, I8, E2, B16, 2048, 256, ROTATE, RANDOM, 1, FX, 32, false, NEAREST},
    {2, 2, 2, I8, E4, B16, 4096, 256, ROTATE, RANDOM, 1, FX, 32, false, NEAREST},
    {2, 2, 0, I4, E3, B16, 768, 256, ROTATE, RANDOM, 2, FX, 32, false, NEAREST},
    {2, 2, 1, I8, E4, B16, 64, 256, ROTATE, RANDOM, 1, FX, 32, false, NEAREST},
    {2, 2, 3, F32, E4, B16, 32, 256, ROTATE, NEAREST, 2, FX, 32, false, NEAREST},
    {2, 2, 0, B16, E3, B16, 32, 256, ROTATE, NEAREST, 1, FX, 32, false, NEAREST},
    {4, 1, 2, I8, E4, B16, 128, 256, ROTATE, RANDOM, 2, FX, 32, false, NEAREST},
    {3, 1, 1, I8, E3, B16, 128, 256, ROTATE, RANDOM, 1, FX, 32, false, NEAREST},
    {9, 1, 8, I8, E2, B16, 128, 256, ROTATE, RANDOM, 1, FX, 32, false, NEAREST},
    {2, 1, 0, I8, E4, B16, 128, 256, PLAIN, RANDOM, 1, FX, 32, false, NEAREST},
    {1, 4, 3, I8, E4, B16, 128, 256, ROTATE, RANDOM, 2, FX, 32, false, NEAREST},
};
enum { CASE_COUNT = sizeof CASES / sizeof *CASES };

static int ranks_of(const Case *c) { return c->nodes * c->per_node; }

static void run_all(Dump *d, int64_t values) {
    int ranks = 0;
    for (int i = 0; i < CASE_COUNT; i++) ranks += ranks_of(&CASES[i]);
    for (int i = 0; i < CASE_COUNT; i++) run_case(d, &CASES[i], values / ranks, i);
    snprintf(d->prefix, sizeof d->prefix, "general");
    norms(d);
    step_statuses(d);
    spikes(d);
    seals(d);
    replicas(d);
    local_steps(d);
    merged_rounds(d);
    kept_messages(d);
    lossless(d);
    fp8_codes(d);
    activations(d);
    snprintf(d->prefix, sizeof d->prefix, "general");
    odd_nans(d, CODEC_INT8, CODEC_BF16);
    odd_nans(d, CODEC_BF16, CODEC_BF16);
    odd_nans(d, CODEC_FP32, CODEC_FP32);
}

int main(int argc, char **argv) {
    Dump d = {0};
    int64_t values = 3000000, only = -1;
    Error err;
    for (int i = 1; i < argc; i += 2) {
        bool known = i + 1 < argc;
        if (known && !strcmp(argv[i], "--values")) values = strtoll(argv[i + 1], NULL, 10);
        else if (known && !strcmp(argv[i], "--case")) only = strtoll(argv[i + 1], NULL, 10);
        else if (known && !strcmp(argv[i], "--full")) d.full = fopen(argv[i + 1], "wb");
        else known = false;
        if (!known || values < 1 || only >= CASE_COUNT || (!strcmp(argv[i], "--full") && !d.full)) {
            fprintf(stderr, "usage: kernels_dump [--values N] [--case I] [--full FILE]\n");
            return EXIT_USAGE;
        }
    }
    static const Site SITE = {.rank = -1, .phase = "kernels_dump"};
    d.device = device_open(0, &SITE, &err);
    if (!d.device) stop(&err);
    d.stream = stream_create(d.device, "dump");
    if (only >= 0) run_case(&d, &CASES[only], values / ranks_of(&CASES[only]), (int)only);
    else run_all(&d, values);
    stream_destroy(d.stream);
    device_close(d.device);
    if (d.full && fclose(d.full)) {
        perror("kernels_dump");
        return EXIT_ENVIRONMENT;
    }
    return EXIT_DONE;
}
