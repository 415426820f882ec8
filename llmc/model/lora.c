// The frozen weights of a LoRA run: see lora.h. Called by adapters.c, gpt_init.c and llmc/run.
#include "llmc/model/lora.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void frozen_reserve(Frozen *f, FrozenFormat format, const Tensor *tensors, int count, int first,
                    MemoryPlan *plan) {
    const char *group = "frozen weights";
    int64_t largest = 0;
    f->format = format;
    f->tensors = count;
    f->tensor = xcalloc((size_t)count, sizeof *f->tensor, "the frozen weights");
    for (int i = 0; i < count; i++) {
        FrozenTensor *t = &f->tensor[i];
        int64_t n = t->elements = tensor_elements(&tensors[i]);
        t->quantized = format != FROZEN_BF16 && i >= first && tensors[i].dims > 1;
        if (!t->quantized) {
            memory_plan_reserve(plan, group, "bf16 model weights", (size_t)n * sizeof(floatX),
                                (void **)&t->weight);
            continue;
        }
        if (n > largest) largest = n;
        memory_plan_reserve(plan, group, "codes of matrices", (size_t)frozen_code_bytes(format, n),
                            (void **)&t->codes);
        memory_plan_reserve(plan, group, "scales of matrices",
                            (size_t)frozen_scales(format, n) * sizeof(floatX), (void **)&t->scales);
    }
    memory_plan_reserve(plan, group, "the matrix in use", (size_t)largest * sizeof(floatX),
                        (void **)&f->matrix);
}

void frozen_free(Frozen *frozen) { free(frozen->tensor); }

void lora_free(Lora *lora) {
    free(lora->tensor);
    free(lora->whole);
    frozen_free(&lora->frozen);
}

// Computes the codes of the levels nearest to n values, the lower one if two are equally near. The
// inner loop has no branch, so that the compiler can vectorize it.
static void nf4_codes(const float *x, int n, uint8_t codes[FROZEN_GROUP]) {
    int code[FROZEN_GROUP] = {0};
    for (int level = 0; level + 1 < NF4_LEVELS; level++) {
        float between = (nf4_level(level) + nf4_level(level + 1)) / 2;
        for (int i = 0; i < n; i++) code[i] += x[i] > between;
    }
    for (int i = 0; i < n; i++) codes[i] = (uint8_t)code[i];
}

static int int8_code(float x) {
    float rounded = rintf(x);
    return (int)(rounded > 127 ? 127 : rounded < -127 ? -127 : rounded);
}

// Returns the largest absolute value; NaN if a value is NaN or infinite.
static float largest_of(const floatX *values, int64_t n) {
    float largest = 0;
    for (int64_t i = 0; i < n; i++) {
        float size = fabsf(floatX_to_float(values[i]));
        if (!isfinite(size)) return NAN;
        if (size > largest) largest = size;
    }
    return largest;
}

void frozen_quantize(FrozenFormat format, const floatX *values, int64_t n, uint8_t *codes, floatX *scales) {
    memset(codes, 0, (size_t)frozen_code_bytes(format, n));
    for (int64_t first = 0; first < n; first += FROZEN_GROUP) {
        int64_t end = first + FROZEN_GROUP < n ? first + FROZEN_GROUP : n;
        float largest = largest_of(values + first, end - first);
        floatX stored = floatX_from_float(format == FROZEN_INT8 ? largest / 127 : largest);
        float scale = floatX_to_float(stored);
        scales[first / FROZEN_GROUP] = stored;
        int size = (int)(end - first);
        float x[FROZEN_GROUP];
        uint8_t code[FROZEN_GROUP];
        for (int i = 0; i < size; i++) x[i] = scale > 0 ? floatX_to_float(values[first + i]) / scale : 0.0f;
        if (format == FROZEN_NF4) nf4_codes(x, size, code);
        for (int i = 0; i < size; i++) {
            if (format == FROZEN_INT8) codes[first + i] = (uint8_t)int8_code(x[i]);
            else codes[(first + i) / 2] |= (uint8_t)(code[i] << ((first + i) % 2 ? 0 : 4));
        }
    }
}

void frozen_put(const Frozen *f, int tensor, const floatX *host, Stream *stream) {
    const FrozenTensor *t = &f->tensor[tensor];
    if (!t->quantized) {
        copy_to_device(stream, t->weight, host, (size_t)t->elements * sizeof *host);
        stream_synchronize(stream);
        return;
    }
    size_t code_bytes = (size_t)frozen_code_bytes(f->format, t->elements);
    size_t scale_bytes = (size_t)frozen_scales(f->format, t->elements) * sizeof(floatX);
    uint8_t *codes = xmalloc(code_bytes, "the codes of a matrix");
    floatX *scales = xmalloc(scale_bytes, "the scales of a matrix");
    frozen_quantize(f->format, host, t->elements, codes, scales);
    copy_to_device(stream, t->codes, codes, code_bytes);
    copy_to_device(stream, t->scales, scales, scale_bytes);
    stream_synchronize(stream);
    free(codes);
    free(scales);
}

void frozen_use(const Frozen *f, int tensor, Stream *stream) {
    const FrozenTensor *t = &f->tensor[tensor];
    if (!t->quantized) return;
    op_dequantize(stream, &(Dequantize){.n = t->elements,
                                        .format = f->format,
                                        .codes = t->codes,
                                        .scales = t->scales,
                                        .w = f->matrix});
}
