// The frozen weights of a LoRA run: see lora.h. Called by adapters.c.
#include "llmc/model/lora.h"

#include <stdlib.h>

#include "llmc/base/dtype.h"

void frozen_reserve(Frozen *frozen, const Tensor *tensors, int count, MemoryPlan *plan) {
    frozen->weight = xcalloc((size_t)count, sizeof *frozen->weight, "the frozen weights");
    for (int i = 0; i < count; i++) {
        memory_plan_reserve(plan, "frozen weights", "bf16 model weights",
                            (size_t)tensor_elements(&tensors[i]) * sizeof(floatX),
                            (void **)&frozen->weight[i]);
    }
}

void frozen_free(Frozen *frozen) { free(frozen->weight); }

void lora_free(Lora *lora) {
    free(lora->tensor);
    free(lora->whole);
    frozen_free(&lora->frozen);
}
