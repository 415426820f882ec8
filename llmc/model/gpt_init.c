// Startup after the memory plan is allocated, initial weights and batch upload: see gpt.h. Called
// by llmc/run/setup.c, train_gpt.c, dev/ and tests.
#include <assert.h>

#include "llmc/model/gpt.h"
#include "llmc/ranks/parallel.h"

void gpt_start(GPT *gpt, Zero *zero, Device *device, Stream *stream, Timers *timers) {
    gpt->zero = zero;
    gpt->timers = timers;
    gpt->stream = gpt->tp.compute = stream;
    op_set_scratch(device, gpt->scratch, gpt->scratch_bytes);
    if (gpt->rotary) gpt_upload_rope_table(gpt);
    // Inference: no backward needs the hidden states, so every layer updates the same buffer in
    // place.
    MicroBatch *m = &gpt->slot[0];
    for (int l = 0; gpt->cache && l <= gpt->stage.layers; l++) m->residual[l] = m->embedded;
}

void gpt_init_weights(GPT *gpt, uint64_t seed, Peers group) {
    int threads = parallel_share(group);
    // Every rank draws all weights that it holds: values depend only on the seed, the tensor's
    // index and the element.
    for (int i = 0; i < gpt->tensors; i++) {
        const Tensor *t = &gpt->tensor[i];
        InitWeights init = {.weights = zero_weight(gpt->zero, i),
                            .rows = t->local[0],
                            .columns = t->local[1],
                            .first_row = t->split == 0 ? t->offset : 0,
                            .first_column = t->split == 1 ? t->offset : 0,
                            .whole_columns = t->whole[1],
                            .std = t->std,
                            .seed = seed,
                            .tensor = (uint32_t)t->number,
                            .threads = threads};
        op_init_weights(gpt->stream, &init);
        zero_keep_weights(gpt->zero, i);
    }
    stream_synchronize(gpt->stream);  // other streams may read the weights
}

void gpt_upload(GPT *gpt, int slot, const Batch *batch) {
    assert(slot >= 0 && slot < gpt->slots);
    size_t N = (size_t)gpt->B * (size_t)gpt->T, ids = N * sizeof(int32_t);
    const MicroBatch *m = &gpt->slot[slot];
    copy_to_device(gpt->stream, m->tokens, batch->tokens, ids);
    copy_to_device(gpt->stream, m->targets, batch->targets, ids);
    copy_to_device(gpt->stream, m->positions, batch->positions, ids);
    if (batch->doc_start) copy_to_device(gpt->stream, m->doc_start, batch->doc_start, ids);
    if (batch->loss_mask) copy_to_device(gpt->stream, m->loss_mask, batch->loss_mask, N * sizeof(float));
}
