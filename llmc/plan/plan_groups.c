// Elastic replica groups in the report of --plan: see plan_report.h.
#include "llmc/model/gpt.h"
#include "llmc/plan/plan_report.h"

Chunks *plan_chunks(const Config *config, const Mesh *mesh, Zero *zero, MemoryPlan *memory_plan, Error *err) {
    GPT gpt = {0};
    gpt_describe(&gpt, config, mesh);
    Chunks *chunks = chunks_plan(zero, gpt.whole, gpt.whole_tensors, memory_plan, err);
    gpt_free(&gpt);
    return chunks;
}

void plan_groups_report(const Config *config, const Chunks *chunks, FILE *out) {
    int count = chunks_count(chunks);
    int64_t bytes = 0, largest = 0, state = 0;
    for (int i = 0; i < count; i++) {
        int64_t payload = chunks_payload_bytes(chunks, i);
        bytes += payload;
        if (payload > largest) largest = payload;
        state += chunks_state_bytes(chunks, i);
    }
    fprintf(out, "  between replica groups, per group\n");
    fprintf(out, "    %d chunks, %s, largest %.2f MB; every %d steps each\n", count,
            codec_info(chunks_format(chunks)->inter_codec).name, (double)largest / 1e6, config->local_steps);
    fprintf(out, "    %-30s %8.2f MB sent, and received from each other group\n", "sync of all chunks",
            (double)bytes / 1e6);
    fprintf(out, "    %-30s %8.2f MB\n", "mean of a step", (double)bytes / 1e6 / config->local_steps);
    fprintf(out, "    %-30s %8.2f MB received once\n", "to join", (double)state / 1e6);
}
