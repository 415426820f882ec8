// The pipeline's schedule and links: see pipeline.h.
#include "llmc/model/pipeline.h"

#include <string.h>

int pipeline_in_flight(int stages, int stage, int micro_batches) {
    int most = stages - stage;
    return most < micro_batches ? most : micro_batches;
}

int pipeline_actions(int stages, int stage, int micro_batches, bool training, PipelineAction *actions) {
    int ahead = training ? pipeline_in_flight(stages, stage, micro_batches) - 1 : micro_batches, count = 0;
    for (int k = 0; k < ahead; k++) actions[count++] = (PipelineAction){k, false};
    for (int k = ahead; k < micro_batches; k++) {
        actions[count++] = (PipelineAction){k, false};
        actions[count++] = (PipelineAction){k - ahead, true};
    }
    for (int k = micro_batches - ahead; training && k < micro_batches; k++) {
        actions[count++] = (PipelineAction){k, true};
    }
    return count;
}

Pipeline pipeline_open(const Mesh *mesh, Device *device) {
    const Group *pp = &mesh->pp;
    Pipeline pipeline;
    memset(&pipeline, 0, sizeof pipeline);
    for (int border = 0; border + 1 < pp->size; border++) {
        Link *ahead = link_open(pp, border, border + 1, device, "hidden states");
        Link *back = link_open(pp, border + 1, border, device, "gradients of hidden states");
        if (pp->rank == border) {
            pipeline.to_next = ahead;
            pipeline.from_next = back;
        } else if (pp->rank == border + 1) {
            pipeline.from_before = ahead;
            pipeline.to_before = back;
        }
    }
    if (mesh->embedding.size > 1) {
        pipeline.words_to_first = link_open(&mesh->embedding, 1, 0, device, "gradients of the head's words");
        pipeline.words_to_last = link_open(&mesh->embedding, 0, 1, device, "gradients of all words");
    }
    return pipeline;
}

void pipeline_close(Pipeline *pipeline) {
    Link *all[] = {pipeline->from_before, pipeline->to_before, pipeline->to_next, pipeline->from_next,
                   pipeline->words_to_first, pipeline->words_to_last};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) link_close(all[i]);
    memset(pipeline, 0, sizeof *pipeline);
}
