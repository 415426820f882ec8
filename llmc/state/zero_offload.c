// --optimizer-cpu-offload: master weights and moments lie in page-locked host memory, and AdamW
// runs on the host's cores (sdp4bit/update_host.h), with the same bits. Called by the files of this
// room.
//
// A bucket's way, with the streams: `host` is this file's, the others are zero.c's.
//
//   last   the bucket is reduced
//   host   its own windows go down: gradients, and weights where differences are sent. Backward and
//          the next reductions go on meanwhile. Where gradients are shared out (zero_grads.c), two
//          own windows serve all buckets, and a further micro-batch's sum comes up again first
//   last   the verdict
//   host   the verdict goes down, then, bucket by bucket: AdamW and the message
//   last   the message goes up into the gather buffer
//   ...    gather and apply as without offload (qwd.c): forward begins with the first bucket's
#include <stdlib.h>
#include <string.h>

#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/parallel.h"
#include "llmc/state/zero_inside.h"

// --- memory --------------------------------------------------------------------------------------

static bool sends_differences(const Zero *zero) {
    return zero->plan.dp > 1 && zero->weight_wire.difference && codec_grouped(zero->weight_wire.codec);
}

static int64_t largest_message(const Zero *zero, int slot) {
    int64_t largest = 0;
    for (int b = slot; b < zero->plan.buckets; b += LANE_SLOTS) {
        int64_t bytes = qwd_message(&zero->plan, b, &zero->weight_wire).bytes;
        if (bytes > largest) largest = bytes;
    }
    return largest;
}

void offload_reserve(Zero *zero, MemoryPlan *memory_plan) {
    Offload *offload = &zero->offload;
    QwdHost *host = &offload->host;
    const char *group = "host memory";
    size_t shard = (size_t)zero->plan.shard_elements;
    memory_plan_reserve_host(memory_plan, group, "fp32 master weights, own shard", shard * sizeof(float),
                             (void **)&zero->master);
    memory_plan_reserve_host(memory_plan, group, "first moments, own shard", shard * sizeof(float),
                             (void **)&zero->exp_avg);
    memory_plan_reserve_host(memory_plan, group, "second moments, own shard", shard * sizeof(float),
                             (void **)&zero->exp_avg_sq);
    memory_plan_reserve_host(memory_plan, group, "reduced gradients, own shard", shard * sizeof(float),
                             (void **)&offload->grads);
    if (sends_differences(zero))
        memory_plan_reserve_host(memory_plan, group, "weights to compare with", shard * sizeof(floatX),
                                 (void **)&offload->weights);
    for (int slot = 0; slot < LANE_SLOTS; slot++)
        memory_plan_reserve_host(memory_plan, group, "weights, sent", (size_t)largest_message(zero, slot),
                                 (void **)&host->message[slot]);
    memory_plan_reserve_host(memory_plan, group, "verdict", sizeof(StepControl), (void **)&host->control);
    memory_plan_reserve_host(memory_plan, group, "verdict", sizeof(uint64_t), (void **)&host->fault);
    memory_plan_reserve_host(memory_plan, group, "verdict", 2 * sizeof(StepControl), (void **)&zero->landed);
    memory_plan_reserve(memory_plan, "norm and verdict", "first fault of the host", sizeof(uint64_t),
                        (void **)&offload->found);
}

// --- start and end -------------------------------------------------------------------------------

void offload_start(Zero *zero) {
    Offload *offload = &zero->offload;
    QwdHost *host = &offload->host;
    if (!zero_offloads(zero)) return;
    Peers world = {zero->mesh->world.mpi, 60.0 * zero->config->distributed_timeout_minutes,
                   device_site(zero->device)};
    host->threads = parallel_share(world);
    host->segments = zero->plan.segments;
    host->stream = zero->config->no_overlap ? zero->lanes->last
                                            : stream_create(zero->device, "update on the host");
    offload->reduced = event_create(zero->device);
    offload->judged = event_create(zero->device);
    for (int slot = 0; slot < GRAD_SLOTS; slot++) offload->window_free[slot] = event_create(zero->device);
    for (int slot = 0; slot < LANE_SLOTS; slot++) {
        host->made[slot] = event_create(zero->device);
        host->sent[slot] = event_create(zero->device);
    }
}

void offload_free(Zero *zero) {
    QwdHost *host = &zero->offload.host;
    if (!host->stream) return;
    event_destroy(zero->offload.reduced);
    event_destroy(zero->offload.judged);
    for (int slot = 0; slot < GRAD_SLOTS; slot++) event_destroy(zero->offload.window_free[slot]);
    for (int slot = 0; slot < LANE_SLOTS; slot++) {
        event_destroy(host->made[slot]);
        event_destroy(host->sent[slot]);
    }
    if (host->stream != zero->lanes->last) stream_destroy(host->stream);
}

// --- the step ------------------------------------------------------------------------------------

// The host's part of bucket b's own windows of gradients.
static Windows host_grads(const Zero *zero, int b) {
    const Bucket *bucket = &zero->plan.bucket[b];
    float *grads = zero->offload.grads + bucket->state_start;
    Windows own = {grads, grads + bucket->matrix_per_rank};
    return own;
}

void offload_expect(Zero *zero, int b, bool add) {
    Stream *stream = zero->offload.host.stream;
    const Bucket *bucket = &zero->plan.bucket[b];
    Windows own = zero_own_grads(zero, b), host = host_grads(zero, b);
    if (!stream || zero->gradients.stays[b]) return;
    Event *window_free = zero->offload.window_free[b % GRAD_SLOTS];
    if (add) {
        copy_from_pinned(stream, own.matrix, host.matrix, (size_t)bucket->matrix_per_rank * sizeof(float));
        copy_from_pinned(stream, own.tail, host.tail, (size_t)bucket->tail_per_rank * sizeof(float));
        event_record(window_free, stream);
    }
    stream_wait(zero->lanes->last, window_free);
}

void offload_reduced(Zero *zero, int b, bool last) {
    Offload *offload = &zero->offload;
    Stream *stream = offload->host.stream;
    const Bucket *bucket = &zero->plan.bucket[b];
    Windows own = zero_own_grads(zero, b), down = host_grads(zero, b);
    if (!stream) return;
    event_record(offload->reduced, zero->lanes->last);
    stream_wait(stream, offload->reduced);
    copy_to_pinned(stream, down.matrix, own.matrix, (size_t)bucket->matrix_per_rank * sizeof(float));
    copy_to_pinned(stream, down.tail, own.tail, (size_t)bucket->tail_per_rank * sizeof(float));
    if (!zero->gradients.stays[b]) event_record(offload->window_free[b % GRAD_SLOTS], stream);
    if (last && offload->weights)
        copy_to_pinned(stream, offload->weights + bucket->state_start, zero_own_weights(zero, b).matrix,
                       (size_t)bucket->matrix_per_rank * sizeof(floatX));
}

void offload_judged(Zero *zero) {
    Offload *offload = &zero->offload;
    Stream *stream = offload->host.stream;
    if (!stream) return;
    event_record(offload->judged, zero->lanes->last);
    stream_wait(stream, offload->judged);
    copy_to_pinned(stream, offload->host.control, zero->control, sizeof(StepControl));
}

BucketState offload_state(const Zero *zero, int b) {
    const Offload *offload = &zero->offload;
    const Bucket *bucket = &zero->plan.bucket[b];
    int64_t at = bucket->state_start;
    BucketState state = {host_grads(zero, b),   {offload->weights ? offload->weights + at : NULL, NULL},
                         zero->master + at,     zero->exp_avg + at,
                         zero->exp_avg_sq + at, zero_own_weights(zero, b).matrix};
    return state;
}

void offload_updated(Zero *zero) {
    Offload *offload = &zero->offload;
    Stream *last = zero->lanes->last;
    if (!offload->host.stream) return;
    copy_from_pinned(last, offload->found, offload->host.fault, sizeof(uint64_t));
    kernel_mark_fault(last, zero->wire_checks.fault, offload->found, NULL);
}

// --- master weights and moments beside the step --------------------------------------------------

static void copy_range(void *context, int64_t lo, int64_t hi) {
    const HostCopy *copy = (const HostCopy *)context;
    memcpy(copy->to + lo, copy->from + lo, (size_t)(hi - lo));
    heartbeat_progress(copy->site);
}

static void run_copy(void *context) {
    HostCopy *copy = (HostCopy *)context;
    parallel_ranges(copy->threads, 0, (int64_t)copy->bytes, 1 << 20, copy_range, copy);
}

void offload_copy(Zero *zero, Stream *stream, void *to, const void *from, size_t bytes) {
    HostCopy copy = {(uint8_t *)to, (const uint8_t *)from, bytes, zero->offload.host.threads,
                     device_site(zero->device)};
    stream_host_call(stream, run_copy, &copy, sizeof copy);
}

void offload_widen(Zero *zero, float *masters, const floatX *weights, int64_t n) {
    enum { AT_A_TIME = 1 << 20 };
    floatX *buffer = (floatX *)xmalloc(AT_A_TIME * sizeof(floatX), "the first master weights");
    for (int64_t at = 0; at < n; at += AT_A_TIME) {
        int64_t count = n - at < AT_A_TIME ? n - at : AT_A_TIME;
        copy_to_host(zero->compute, buffer, weights + at, (size_t)count * sizeof(floatX));
        stream_synchronize(zero->compute);
        for (int64_t i = 0; i < count; i++) masters[at + i] = floatX_to_float(buffer[i]);
    }
    free(buffer);
}

void zero_read_masters(Zero *zero, Stream *stream, int64_t at, int64_t n, float *to) {
    size_t bytes = (size_t)n * sizeof(float);
    if (!zero_offloads(zero)) copy_to_host(stream, to, zero->master + at, bytes);
    stream_synchronize(stream);
    if (zero_offloads(zero)) memcpy(to, zero->master + at, bytes);
}
