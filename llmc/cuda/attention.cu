// The CUDA backend of ops.h: attention. Chooses between cuDNN's fused kernels and our own, by the call's shape alone, so that forward and backward of a
// layer take the same one. Called by train_gpt.cu through ops.h.
#include "llmc/cuda/attention.h"

#include <math.h>

size_t op_attention_saved_bytes(int B, int T, int NH, int HD) { return (size_t)B * (size_t)NH * (size_t)T * sizeof(float); }

size_t op_attention_workspace_bytes(int B, int T, int NH, int HD) {
    size_t plain = attention_plain_workspace_bytes(B, T, NH, HD), cudnn = attention_cudnn_workspace_bytes(B, T, NH, HD);
    return plain > cudnn ? plain : cudnn;
}

static Attention attention_of(Stream *s, const int32_t *doc_start, int B, int T, int NH, int HD, Dropout dropout) {
    if (HD % 8 || HD > 256) {
        fatal(stream_site(s), EXIT_USAGE, "attention heads of %d: the GPU handles multiples of 8 up to 256; choose another --num-attention-heads or --kv-channels", HD);
    }
    Attention a = {B, T, NH, HD, 1.0f / sqrtf((float)HD), doc_start, dropout};
    return a;
}

void op_attention_forward(Stream *s, floatX *out, void *saved, const floatX *qkv, const int32_t *doc_start, int B, int T, int NH, int HD, Dropout dropout,
                          void *workspace) {
    Attention a = attention_of(s, doc_start, B, T, NH, HD, dropout);
    if (B == 0 || T == 0) return;
    if (attention_cudnn_forward(s, &a, out, (float *)saved, qkv, workspace)) return;
    attention_plain_forward(s, &a, out, (float *)saved, qkv);
}

void op_attention_backward(Stream *s, floatX *dqkv, const floatX *dout, const floatX *out, const void *saved, const floatX *qkv, const int32_t *doc_start, int B,
                           int T, int NH, int HD, Dropout dropout, void *workspace) {
    Attention a = attention_of(s, doc_start, B, T, NH, HD, dropout);
    if (B == 0 || T == 0) return;
    if (attention_cudnn_backward(s, &a, dqkv, dout, out, (const float *)saved, qkv, workspace)) return;
    attention_plain_backward(s, &a, dqkv, dout, out, (const float *)saved, qkv, workspace);
}
