// A GPT for text generation: see text_model.h.
#include "dev/lib/text_model.h"

#include <string.h>

static bool open_parts(TextModel *m, const Site *site, Error *err) {
    const int one_host[1] = {0};
    if (!mesh_build(&m->mesh, 0, 1, one_host, 0, 1, 1, err)) return false;
    gpt_describe(&m->gpt, &m->config, &m->mesh);
    if (!gpt_check(&m->gpt, err)) return false;
    m->zero = zero_plan_weights_alone(&m->config, &m->mesh, m->gpt.tensor, m->gpt.tensors, &m->memory_plan,
                                      err);
    if (!m->zero) return false;
    gpt_reserve_inference(&m->gpt, &m->memory_plan);
    m->device = device_open(0, site, err);
    if (!m->device || !memory_plan_allocate(&m->memory_plan, m->device, 1, err)) return false;
    m->stream = stream_create(m->device, "compute");
    zero_start_weights_alone(m->zero, m->stream);
    gpt_start(&m->gpt, m->zero, m->device, m->stream, NULL);
    return true;
}

bool text_model_open(TextModel *model, const Config *config, int positions, int threads, const Site *site,
                     Error *err) {
    memset(model, 0, sizeof *model);
    model->config = *config;
    model->config.micro_batch_size = model->config.micro_batches = 1;
    model->config.seq_length = positions;
    bool ok = open_parts(model, site, err);
    model->gpt.threads = threads;
    if (ok) return true;
    text_model_close(model);
    return false;
}

void text_model_close(TextModel *model) {
    memory_plan_free(&model->memory_plan, model->device);
    zero_free(model->zero);
    gpt_free(&model->gpt);
    if (model->stream) stream_destroy(model->stream);
    if (model->device) device_close(model->device);
    memset(model, 0, sizeof *model);
}

int64_t text_model_bytes_per_token(const TextModel *model) {
    const GPT *gpt = &model->gpt;
    int64_t elements = 0;
    for (int i = 0; i < gpt->tensors; i++) {
        // A token reads one row of an embedding table, except of a tied table: the LM head reads
        // all of it.
        bool looked_up = (i == GPT_WTE && !gpt->tied) || (gpt->P && i == GPT_WPE);
        if (!looked_up) elements += tensor_elements(&gpt->tensor[i]);
    }
    return elements * (int64_t)sizeof(floatX);
}
