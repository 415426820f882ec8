// The pipeline's schedule and links: see pipeline_schedule.h.
#include "llmc/model/pipeline_schedule.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// Returns the number of forward passes before the first backward pass.
static int warm_up(PipelineShape s, int micro_batches) {
    int later = s.stages - s.stage - 1, all = micro_batches * s.chunks;
    int ahead = s.chunks == 1 ? later : 2 * later + (s.chunks - 1) * s.stages;
    return ahead < all - 1 ? ahead : all - 1;
}

int pipeline_in_flight(PipelineShape shape, int micro_batches) { return warm_up(shape, micro_batches) + 1; }

// Returns the k-th pass in one direction. With several chunks, a group of `stages` micro-batches
// runs through all chunks before the next group starts.
static PipelineAction nth_pass(PipelineShape s, int k, bool backward) {
    int in_group = k % (s.stages * s.chunks), chunk = in_group / s.stages;
    PipelineAction action = {0};
    if (s.chunks == 1) {
        action.micro_batch = k;
    } else {
        action.micro_batch = k / (s.stages * s.chunks) * s.stages + in_group % s.stages;
        action.chunk = backward ? s.chunks - 1 - chunk : chunk;
    }
    action.backward = backward;
    return action;
}

static int take_free(bool *used) {
    int i = 0;
    while (used[i]) i++;
    used[i] = true;
    return i;
}

// Assigns buffers to every action. An input buffer is reserved one action early, when its receive
// is posted.
static void place_actions(PipelineShape s, int places, int micro_batches, PipelineAction *actions, int count,
                          bool training) {
    bool *slot_used = xcalloc(2 * (size_t)places + 2, sizeof(bool), "the order of a step");
    bool *input_used = slot_used + places;
    size_t pairs = (size_t)micro_batches * (size_t)s.chunks;
    PipelineAction *forward = xcalloc(pairs, sizeof *forward, "the order of a step");
    int backwards = 0;
    for (int i = -1; i < count; i++) {
        if (i + 1 < count && !actions[i + 1].backward) actions[i + 1].input = take_free(input_used);
        if (i < 0) continue;
        PipelineAction *a = &actions[i], *own = &forward[a->micro_batch * s.chunks + a->chunk];
        if (!a->backward) {
            a->slot = take_free(slot_used);
            *own = *a;
        } else {
            a->slot = own->slot;
            a->input = own->input;
            a->gradient = backwards++ % GRADIENT_SLOTS;
        }
        if (a->backward || !training) slot_used[a->slot] = input_used[a->input] = false;
    }
    free(forward);
    free(slot_used);
}

int pipeline_actions(PipelineShape s, int micro_batches, bool training, PipelineAction *actions) {
    assert(s.stage < s.stages && (s.chunks == 1 || micro_batches % s.stages == 0 || !training));
    int all = micro_batches * s.chunks, ahead = training ? warm_up(s, micro_batches) : all, count = 0;
    if (micro_batches == 0) return 0;
    for (int k = 0; k < ahead; k++) actions[count++] = nth_pass(s, k, false);
    for (int k = ahead; k < all; k++) {
        actions[count++] = nth_pass(s, k, false);
        actions[count++] = nth_pass(s, k - ahead, true);
    }
    for (int k = all - ahead; training && k < all; k++) actions[count++] = nth_pass(s, k, true);
    place_actions(s, pipeline_in_flight(s, micro_batches), micro_batches, actions, count, training);
    return count;
}

Pipeline pipeline_open(const Mesh *mesh, int chunks, Device *device) {
    const Group *pp = &mesh->pp;
    Pipeline pipeline;
    memset(&pipeline, 0, sizeof pipeline);
    // With several chunks the last stage sends to the first one.
    int boundaries = chunks > 1 ? pp->size : pp->size - 1;
    for (int boundary = 0; boundary < boundaries; boundary++) {
        int next = (boundary + 1) % pp->size;
        Link *ahead = link_open(pp, boundary, next, device, "hidden states");
        Link *back = link_open(pp, next, boundary, device, "gradients of hidden states");
        if (pp->rank == boundary) {
            pipeline.to_next = ahead;
            pipeline.from_next = back;
        }
        if (pp->rank == next) {
            pipeline.from_before = ahead;
            pipeline.to_before = back;
        }
    }
    if (mesh->embedding.size > 1) {
        pipeline.words_to_first = link_open(&mesh->embedding, 1, 0, device,
                                            "word embedding gradients of the LM head");
        pipeline.words_to_last = link_open(&mesh->embedding, 0, 1, device, "summed word embedding gradients");
    }
    return pipeline;
}
