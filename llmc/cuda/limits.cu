// Size-dependent functions of ops.h, from limits.h. Unsupported models are refused before anything
// is planned, not in the first step.
#include "llmc/cuda/limits.h"

#include "llmc/ops.h"

bool op_check_model(int C, int NH, int HD, int F, int V, int64_t N, Error *err) {
    return limits_check_model(C, NH, HD, F, V, N, err);
}

size_t op_scratch_bytes(int64_t N, int C) { return scratch_bytes(N, C); }

void op_attention_notice(int T, bool documents, char *text, size_t bytes) {
    limits_attention_notice(T, documents, text, bytes);
}
