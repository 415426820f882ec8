// Prints Muon's part of the report of --plan: see plan_report.h.
#include <string.h>

#include "llmc/model/gpt.h"
#include "llmc/plan/plan_report.h"

// Returns the padding of buckets of whole matrices, relative to their elements.
static double whole_padding(const BucketLayout *plan) {
    double padded = 0, elements = 0;
    for (int b = 0; b < plan->buckets; b++) {
        const Bucket *bucket = &plan->bucket[b];
        for (int i = 0; bucket->whole && i < bucket->segments; i++)
            elements += (double)plan->segments[bucket->first_segment + i].numel;
        if (bucket->whole) padded += (double)bucket->matrix_elements;
    }
    return elements > 0 ? padded / elements - 1 : 0;
}

// Returns the bytes that --exp-avg-dtype bf16 saves in a rank's optimizer state.
static long long saved_by_bf16(const BucketLayout *state) {
    int64_t averages = state->shard_elements - layout_squares_start(state, state->buckets);
    return (long long)(4 * averages - 2 * layout_whole_start(state, state->buckets));
}

// Returns the bytes of the optimizer state on the device.
static double state_bytes(const MemoryPlan *plan) {
    double bytes = 0;
    for (int i = 0; i < plan->count; i++) {
        const MemoryPlanEntry *entry = &plan->entries[i];
        if (entry->place == ON_DEVICE && !strcmp(entry->group, "optimizer state"))
            bytes += (double)entry->bytes;
    }
    return bytes;
}

// Prints the memory of this run minus the memory of the same run with AdamW.
static void print_memory(const Config *c, const Mesh *mesh, const MemoryPlan *muon, FILE *out) {
    Config other = *c;
    MemoryPlan adam = {0};
    GPT gpt = {0};
    Error err;
    other.optimizer = OPTIMIZER_ADAM;
    other.exp_avg_dtype = MOMENT_FP32;
    Zero *zero = gpt_plan(&gpt, &other, mesh, &adam, &err);
    Chunks *chunks = zero && c->replica_group ? plan_chunks(&other, mesh, zero, &adam, &err) : NULL;
    if (zero && (chunks || !c->replica_group)) {
        double state = state_bytes(muon) - state_bytes(&adam);
        double host = (double)memory_plan_host(muon) - (double)memory_plan_host(&adam);
        double disk = (double)memory_plan_disk(muon) - (double)memory_plan_disk(&adam);
        fprintf(out, "  compared with AdamW, bytes per rank: total %+.0f",
                (double)memory_plan_total(muon) - (double)memory_plan_total(&adam));
        if (state != 0) fprintf(out, ", of which optimizer state %+.0f", state);
        if (host != 0) fprintf(out, ", in host memory %+.0f", host);
        if (disk != 0) fprintf(out, ", on disk %+.0f", disk);
        fputc('\n', out);
    }
    chunks_free(chunks);
    zero_free(zero);
    memory_plan_free(&adam, NULL);
    gpt_free(&gpt);
}

// Prints the work of Newton-Schulz on each rank. Neighbors with equal work share an entry.
static void print_work(const Config *c, const BucketLayout *plan, FILE *out) {
    fprintf(out, "    TFLOP by data-parallel rank:");
    for (int r = 0, first = 0; r < plan->dp; r++) {
        if (r + 1 < plan->dp && plan->rank_work[r + 1] == plan->rank_work[first]) continue;
        fprintf(out, "%s %.4g on ", first ? "," : "",
                1e-12 * (double)plan->rank_work[first] * c->muon_num_ns_steps);
        if (r > first) fprintf(out, "%d to ", first);
        fprintf(out, "%d", r);
        first = r + 1;
    }
    fputc('\n', out);
}

void plan_muon_report(const Config *c, const Mesh *mesh, const Zero *zero, const MemoryPlan *memory_plan,
                      FILE *out) {
    const BucketLayout *plan = zero_layout(zero), *state = zero_state_layout(zero);
    if (c->optimizer != OPTIMIZER_MUON) return;
    double all, most = plan_newton_schulz(c, zero, &all);
    fprintf(out, "  Newton-Schulz per step: %.4g TFLOP, at most %.4g on a rank (mean %.4g)\n", 1e-12 * all,
            1e-12 * most, 1e-12 * all / state->dp);
    if (state->dp > 1) print_work(c, plan, out);
    fprintf(out, "  every rank owns whole matrices, which takes %.1f %% of padding\n",
            100 * whole_padding(plan));
    print_memory(c, mesh, memory_plan, out);
    if (c->exp_avg_dtype == MOMENT_BF16)
        fprintf(out, "  momentum in bf16: %lld bytes per rank less than in fp32\n", saved_by_bf16(state));
}
