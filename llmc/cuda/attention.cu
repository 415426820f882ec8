// Attention on GPUs: uses cuDNN or this program's own kernels, depending only on the shape, so that
// forward and backward of a layer use the same ones.
#include "llmc/cuda/attention.h"

size_t op_attention_saved_bytes(int B, int T, int NH, int HD) {
    return (size_t)B * (size_t)NH * (size_t)T * sizeof(float);
}

size_t op_attention_workspace_bytes(int B, int T, int NH, int HD, int groups) {
    size_t plain = attention_plain_workspace_bytes(B, T, NH, HD),
           cudnn = attention_cudnn_workspace_bytes(B, T, NH, HD, groups);
    return plain > cudnn ? plain : cudnn;
}

// Returns false if there are no rows.
static bool has_rows(Stream *s, const Attention *a) {
    if (a->HD % 8 || a->HD > 256) {
        fatal(stream_site(s), EXIT_USAGE,
              "attention heads of %d: GPUs support multiples of 8 up to 256; choose another "
              "--num-attention-heads or --kv-channels",
              a->HD);
    }
    return a->B > 0 && a->T > 0;
}

void op_attention_forward(Stream *s, const Attention *a) {
    if (has_rows(s, a) && !attention_cudnn_forward(s, a)) attention_plain_forward(s, a);
}

void op_attention_backward(Stream *s, const Attention *a) {
    if (has_rows(s, a) && !attention_cudnn_backward(s, a)) attention_plain_backward(s, a);
}
