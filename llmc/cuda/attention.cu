// Attention on GPUs. Chooses cuDNN or this program's own kernels by the shape alone, so that
// forward and backward of a layer use the same kernels.
#include "llmc/cuda/attention.h"

#include <assert.h>

#include "llmc/cuda/limits.h"

size_t op_attention_saved_bytes(int B, int T, int NH, int HD) {
    return (size_t)B * (size_t)NH * (size_t)T * sizeof(float);
}

size_t op_attention_workspace_bytes(int B, int T, int NH, int HD, int groups, bool packed) {
    size_t plain = attention_plain_workspace_bytes(B, T, NH, HD),
           cudnn = attention_cudnn_workspace_bytes(B, T, NH, HD, groups, packed);
    return plain > cudnn ? plain : cudnn;
}

static bool has_rows(const Attention *a) {
    assert(a->HD % LIMIT_MULTIPLE == 0 && a->HD <= LIMIT_HEAD);
    return a->B > 0 && a->T > 0;
}

void op_attention_forward(Stream *s, const Attention *a) {
    if (has_rows(a) && !attention_cudnn_forward(s, a)) attention_plain_forward(s, a);
}

void op_attention_backward(Stream *s, const Attention *a) {
    if (has_rows(a) && !attention_cudnn_backward(s, a)) attention_plain_backward(s, a);
}
