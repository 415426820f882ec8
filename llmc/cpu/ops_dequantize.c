// CPU ops, part 7: frozen weights of QLoRA: see ops.h.
#include "llmc/cpu/ops_internal.h"

void op_dequantize(Stream *s, const Dequantize *a) {
    for (int64_t i = 0; i < a->n; i++) {
        float scale = floatX_to_float(a->scales[i / FROZEN_GROUP]);
        a->w[i] = floatX_from_float(frozen_value(a->format, a->codes, i) * scale);
    }
    show_progress(s);
}
