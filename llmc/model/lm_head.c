// The LM head: logits, losses and, for --eval-tasks, log-likelihoods of targets. See gpt.h. Called
// by micro_batches.c and llmc/run/eval_tasks.c.
#include <assert.h>

#include "llmc/model/gpt.h"

// cuDNN's attention requires multiples of 64.
int gpt_shortest_length(const GPT *gpt) {
    int T = gpt->T;
    while (T % 128 == 0) T /= 2;
    return T;
}

// Computes pass->scores with the weights and targets in `head`. The scores are valid after the
// stream has been synchronized.
static void head_scores(const GPT *gpt, const Pass *pass, const Head *head) {
    assert(pass->scores && gpt->scores);
    Head h = *head;
    int ranks = gpt->mesh->tp.size;
    int64_t chunk = op_head_chunk_rows(h.N, h.rows);
    int left = gpt->words - h.first_row;  // excludes padding, which is at the end of the vocabulary
    h.columns = left < 0 ? 0 : left < h.rows ? left : h.rows;
    for (int64_t row = 0; row < h.N; row += chunk) {
        int64_t rows = h.N - row < chunk ? h.N - row : chunk;
        size_t bytes = (size_t)rows * sizeof(HeadScore);
        h.scores = gpt->scores + gpt->mesh->tp.rank * rows;
        op_head_scores(gpt->stream, &h, row, rows);
        tp_exchange(&gpt->tp, gpt->scores, bytes);
        for (int r = 0; r < ranks; r++) {
            copy_to_host(gpt->stream, pass->scores + r * h.N + row, gpt->scores + r * rows, bytes);
        }
    }
}

// Runs the vocabulary-parallel LM head, one chunk of rows at a time. Every rank computes the logits
// of its columns, and the ranks exchange the softmax statistics of each row (maximum and sum over
// their columns).
static void vocabulary_parallel_head(const GPT *gpt, Head *h) {
    int64_t chunk = op_head_chunk_rows(h->N, h->rows);
    h->all = gpt->statistics;
    h->ranks = gpt->mesh->tp.size;
    for (int64_t row = 0; row < h->N; row += chunk) {
        int64_t rows = h->N - row < chunk ? h->N - row : chunk;
        h->own = gpt->statistics + gpt->mesh->tp.rank * rows;
        op_head_logits(gpt->stream, h, row, rows);
        tp_exchange(&gpt->tp, gpt->statistics, (size_t)rows * sizeof(HeadStatistics));
        op_head_gradients(gpt->stream, h, row, rows);
    }
    op_loss_sum(gpt->stream, h);
    if (h->dx) tp_reduce(&gpt->tp, h->dx, NULL, h->dx, h->N);
}

void gpt_head(GPT *gpt, const Pass *p) {
    if (!gpt_heads(gpt, p)) return;
    const Tensor *words = &gpt->tensor[gpt->output];
    const MicroBatch *m = &gpt->slot[p->slot];
    zero_weights_wait(gpt->zero, 0, -1, false);
    Head h = {.N = pass_rows(p),
              .C = gpt->C,
              .first_row = (int)words->offset,
              .rows = (int)words->local[0],
              .x = tp_gather(&gpt->tp, gpt->lnf.y, gpt->gathered, pass_rows(p)),
              .wte = gpt_weight(gpt, gpt->output),
              .targets = m->targets,
              .loss_mask = p->has_loss_mask ? m->loss_mask : NULL,
              .loss_scale = p->loss_scale,
              .losses = gpt->losses,
              .loss_sum = zero_loss_sum(gpt->zero),
              .dx = p->backward ? gpt->dx : NULL,
              .dwte = p->backward ? gpt_grad(gpt, gpt->output) : NULL,
              .overwrite = p->first,
              .workspace = gpt->workspace,
              .report_scale = p->report_scale};
    if (p->scores) head_scores(gpt, p, &h);
    else if (gpt->mesh->tp.size > 1) vocabulary_parallel_head(gpt, &h);
    else op_head(gpt->stream, &h);
}
