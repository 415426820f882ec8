// Log-likelihoods of targets, for --eval-tasks: see gpt.h. Called by gpt_head and
// llmc/run/eval_tasks.c.
#include <assert.h>

#include "llmc/model/gpt.h"

// cuDNN's attention requires multiples of 64.
int gpt_shortest_length(const GPT *gpt) {
    int T = gpt->T;
    while (T % 128 == 0) T /= 2;
    return T;
}

void gpt_head_scores(const GPT *gpt, const Pass *pass, const Head *head) {
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
