// Error feedback: the residual of the hop between nodes (sdp4bit/README.md). Where it lies, and its
// pieces for checkpoints. Called by the files of this room; sdp4bit/tlq_hs.c uses the memory.
//
// A rank holds the residual of what it quantizes for the other nodes: of every bucket the matrix
// pieces of the ranks with its place in their nodes. So a node's ranks hold every element once.
#include <stdlib.h>

#include "llmc/state/zero_inside.h"

static int64_t windows_of_rank(const Zero *zero) { return zero->plan.options.nodes; }

// The data-parallel rank whose piece is window w here.
static int owner_of(const Zero *zero, int w) {
    return w * zero->plan.options.per_node + zero->mesh->node.rank;
}

// Of all windows of bucket b.
static void list_bucket(Zero *zero, int b) {
    Feedback *f = &zero->feedback;
    const Bucket *bucket = &zero->plan.bucket[b];
    for (int w = 0; w < windows_of_rank(zero); w++) {
        for (int i = 0; i < bucket->segments; i++) {
            Piece piece;
            int64_t in_window;
            if (!zero_cut_segment(&zero->plan, b, i, owner_of(zero, w), &piece, &in_window)) continue;
            piece.state_at = f->start[b] + w * bucket->matrix_per_rank + in_window;
            f->pieces[f->piece_count++] = piece;
        }
    }
}

void feedback_reserve(Zero *zero, MemoryPlan *memory_plan) {
    Feedback *f = &zero->feedback;
    const Config *c = zero->config;
    f->on = c->error_feedback && c->quantized_gradients && zero->mesh->rail.size > 1;
    if (!f->on) return;
    int64_t elements = 0, most = windows_of_rank(zero) * zero->plan.segments_total;
    f->start = (int64_t *)xcalloc((size_t)zero->plan.buckets, sizeof *f->start, "the bucket table");
    f->pieces = (Piece *)xcalloc((size_t)most, sizeof(Piece), "the residual's pieces");
    for (int b = 0; b < zero->plan.buckets; b++) {
        f->start[b] = elements;
        elements += windows_of_rank(zero) * zero->plan.bucket[b].matrix_per_rank;
        list_bucket(zero, b);
    }
    memory_plan_reserve(memory_plan, "gradients", "residual of error feedback",
                        (size_t)elements * sizeof(float), (void **)&f->memory);
}

void feedback_free(Zero *zero) {
    free(zero->feedback.start);
    free(zero->feedback.pieces);
}

// The first reduction of a step finds the residual of the step before. Where that was skipped, its
// gradients do not count, nor does what they have left.
void feedback_step(const Zero *zero, int b, TlqStep *step) {
    const Feedback *f = &zero->feedback;
    step->error_feedback = f->on && codec_grouped(step->grad_wire.inter_codec);
    if (!step->error_feedback) return;
    step->residual.values = f->memory + f->start[b];
    step->residual.control = step->micro_batch == 0 ? zero->control : NULL;
    step->residual.frozen = zero->gradients.rehearsal;
}
