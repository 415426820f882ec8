// Which models the GPU's ops can compute: asked once, before anything is planned or allocated, so that a size that does not suit ends in one line instead of
// in the middle of the first step. The ops check again what they are given. Called by train_gpt.cu through ops.h.
#include "llmc/cuda/internal.h"
#include "llmc/ops.h"

enum { MULTIPLE = 8, LARGEST_HEAD = 256, LARGEST_HIDDEN = 16384 };  // 16 bytes of floatX, as GEMMs and packed loads want; attention_plain.cu; layernorm.cu

bool op_check_model(int C, int NH, int HD, int F, int Vp, Error *err) {
    if (C % MULTIPLE || C > LARGEST_HIDDEN) {
        return error_set(err, EXIT_USAGE, "--hidden-size %d: a GPU computes multiples of %d up to %d; choose one, or use train_gpt_cpu", C, MULTIPLE, LARGEST_HIDDEN);
    }
    if (HD % MULTIPLE || HD > LARGEST_HEAD) {
        return error_set(err, EXIT_USAGE, "%d attention heads of size %d: a GPU computes sizes that are multiples of %d up to %d; choose another --num-attention-heads", NH, HD, MULTIPLE,
                         LARGEST_HEAD);
    }
    if (F % MULTIPLE) return error_set(err, EXIT_USAGE, "--ffn-hidden-size %d: a GPU computes multiples of %d; choose one", F, MULTIPLE);
    if (Vp % MULTIPLE) {
        return error_set(err, EXIT_USAGE, "the padded vocabulary of %d rows is no multiple of %d, as a GPU wants; use --make-vocab-size-divisible-by 128 (the default) or another multiple of %d",
                         Vp, MULTIPLE, MULTIPLE);
    }
    return true;
}
