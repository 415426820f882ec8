// Error feedback: see feedback.h.
#include "llmc/state/feedback.h"

#include <assert.h>
#include <stdlib.h>

static int64_t shards_of_rank(const Base *base) { return base->plan.options.nodes; }

// Returns the data-parallel rank that owns shard i of the residual.
static int owner_of(const Base *base, int i) {
    return i * base->plan.options.per_node + base->mesh->node.rank;
}

static void list_bucket(const Base *base, Feedback *f, int b) {
    const Bucket *bucket = &base->plan.bucket[b];
    for (int k = 0; k < shards_of_rank(base); k++) {
        for (int i = 0; i < bucket->segments; i++) {
            Range range;
            int64_t in_shard;
            if (!base_cut_segment(&base->plan, b, i, owner_of(base, k), &range, &in_shard)) continue;
            range.state_at = f->start[b] + k * bucket->matrix_per_rank + in_shard;
            f->ranges[f->range_count++] = range;
        }
    }
}

void feedback_reserve(const Base *base, Feedback *f, MemoryPlan *memory_plan) {
    const Config *c = base->config;
    if (!c->error_feedback || !c->quantized_gradients || base->mesh->rail.size == 1) return;
    int64_t elements = 0, most = shards_of_rank(base) * base->plan.segments_total;
    f->start = (int64_t *)xcalloc((size_t)base->plan.buckets, sizeof *f->start, "the bucket table");
    f->ranges = (Range *)xcalloc((size_t)most, sizeof(Range), "the residual's ranges");
    for (int b = 0; b < base->plan.buckets; b++) {
        f->start[b] = elements;
        elements += shards_of_rank(base) * base->plan.bucket[b].matrix_per_rank;
        list_bucket(base, f, b);
    }
    memory_plan_reserve(memory_plan, "gradients", "residual of error feedback",
                        (size_t)elements * sizeof(float), (void **)&f->memory);
}

void feedback_free(Feedback *f) {
    free(f->start);
    free(f->ranges);
}

// The first reduction of a step reads the previous step's status: if that step was skipped, the
// residual it left is discarded with its gradients.
void feedback_step(const Base *base, const Feedback *f, int b, bool frozen, TlqStep *step) {
    assert(b >= 0 && b < base->plan.buckets);
    step->error_feedback = feedback_on(f) && codec_grouped(step->grad_format.inter_codec);
    if (!step->error_feedback) return;
    step->residual.values = f->memory + f->start[b];
    step->residual.control = step->micro_batch == 0 ? base->control : NULL;
    step->residual.frozen = frozen;
}
