// What of ops.h depends on sizes alone (limits.h). Whether the GPU's ops can compute a model is
// asked once, before anything is planned: a size that does not suit ends in one line, and not in
// the middle of the first step. Called by llmc/model/gpt.c and report.c.
#include "llmc/cuda/limits.h"

#include "llmc/ops.h"

bool op_check_model(int C, int NH, int HD, int F, int V, int64_t N, Error *err) {
    return limits_check_model(C, NH, HD, F, V, N, err);
}

size_t op_scratch_bytes(int64_t N, int C) { return scratch_bytes(N, C); }

void op_attention_notice(int T, bool documents, char *text, size_t bytes) {
    limits_attention_notice(T, documents, text, bytes);
}
