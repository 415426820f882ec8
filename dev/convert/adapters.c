// LoRA adapters of a checkpoint: see adapters.h.
#include "dev/convert/adapters.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/base/dtype.h"

static bool read_adapter(Adapters *a, const SavedWeights *weights, int i, Error *err) {
    const Tensor *t = &a->model.gpt.lora.whole[i];
    int64_t n = tensor_whole_elements(t);
    float *value = a->value[i] = xmalloc((size_t)n * sizeof *value, "an adapter");
    void *stored = xmalloc((size_t)n * sizeof(float), "an adapter");
    bool ok = saved_weights_read(weights, (Slice){.tensor = t->name, .hi = n}, stored, err);
    for (int64_t e = 0; ok && e < n; e++)
        value[e] = weights->fp32 ? ((const float *)stored)[e] : floatX_to_float(((const floatX *)stored)[e]);
    free(stored);
    return ok;
}

bool adapters_open(Adapters *a, const AdaptersChoice *choice, int64_t *iteration, Error *err) {
    SavedWeights weights;
    char note[1400];
    memset(a, 0, sizeof *a);
    *iteration = choice->iteration;
    a->checkpoint = checkpoint_open(choice->load, iteration, "--ckpt-step", choice->peers, note, sizeof note,
                                    err);
    if (!a->checkpoint) return false;
    const char *arguments = checkpoint_arguments(a->checkpoint);
    if (!config_saved_lora_rank(arguments)) {
        return ckpt_error(err,
                          "%s holds a whole model and no LoRA adapters; use the --save folder of a LoRA run",
                          choice->load);
    }
    a->opened = imported_model_of_checkpoint(&a->model, arguments, err);
    if (!a->opened) return false;
    const Lora *lora = &a->model.gpt.lora;
    if (!checkpoint_check_tensors(a->checkpoint, lora->whole, lora->whole_tensors, err) ||
        !saved_weights_choose(&weights, a->checkpoint, choice->fp32, choice->weights, err))
        return false;
    snprintf(a->note, sizeof a->note, "%s%s%s%s", note, *note ? "\n" : "", weights.note,
             *weights.note ? "\n" : "");
    a->value = xcalloc((size_t)lora->whole_tensors, sizeof *a->value, "the adapters");
    bool ok = true;
    for (int i = 0; ok && i < lora->whole_tensors; i++) ok = read_adapter(a, &weights, i, err);
    return ok;
}

void adapters_close(Adapters *a) {
    for (int i = 0; a->value && i < a->model.gpt.lora.whole_tensors; i++) free(a->value[i]);
    free(a->value);
    checkpoint_close(a->checkpoint);
    if (a->opened) imported_model_close(&a->model);
    memset(a, 0, sizeof *a);
}

int adapters_of(const Adapters *a, const char *tensor) {
    const Lora *lora = &a->model.gpt.lora;
    size_t stem = strlen(tensor) - strlen("weight");
    for (int i = 0; i < lora->whole_tensors; i += 2) {
        const char *name = lora->whole[i].name;
        if (strncmp(name, tensor, stem) == 0 && strcmp(name + stem, "lora_A.weight") == 0) return i;
    }
    return -1;
}

void adapters_add(const Adapters *adapters, int index, int64_t row, int64_t rows, int64_t column,
                  int64_t columns, float *w) {
    const Lora *lora = &adapters->model.gpt.lora;
    int64_t rank = lora->rank, width = lora->whole[index].whole[1];
    const float *A = adapters->value[index], *B = adapters->value[index + 1];
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < columns; c++) {
            float sum = 0;
            for (int64_t k = 0; k < rank; k++) sum += B[(row + r) * rank + k] * A[k * width + column + c];
            w[r * columns + c] += lora->scale * sum;
        }
    }
}
