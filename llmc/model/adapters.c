// The adapters of LoRA: see lora.h. Called by gpt.c, gpt_memory.c, transformer.c, llmc/run and
// dev/convert.
#include "llmc/model/gpt.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(LORA_QKV == 1 << LINEAR_QKV && LORA_PROJ == 1 << LINEAR_PROJ && LORA_FC1 == 1 << LINEAR_FC1 &&
                   LORA_FC2 == 1 << LINEAR_FC2,
               "bit i of the targets is linear i");
_Static_assert((int)FROZEN_INT8 == (int)LORA_BASE_INT8 && (int)FROZEN_NF4 == (int)LORA_BASE_NF4,
               "the flag's choices are the formats");
_Static_assert(LORA_LINEARS == (int)LAYER_LINEARS, "lora.h precedes LayerLinear");

static bool has_adapter(const GPT *gpt, int which) { return gpt->lora.targets >> which & 1; }

Parameters gpt_trained(const GPT *gpt) {
    const Lora *lora = &gpt->lora;
    if (lora->rank) return (Parameters){lora->tensor, lora->whole, lora->tensors, lora->whole_tensors};
    return (Parameters){gpt->tensor, gpt->whole, gpt->tensors, gpt->whole_tensors};
}

FrozenCount gpt_frozen_parameters(const GPT *gpt) {
    FrozenCount sum = {0, 0};
    if (!gpt->lora.rank) return sum;
    for (int i = 0; i < gpt->whole_tensors; i++) sum.whole += tensor_whole_elements(&gpt->whole[i]);
    for (int i = 0; i < gpt->tensors; i++) sum.own += tensor_elements(&gpt->tensor[i]);
    return sum;
}

// --- the table of adapters -----------------------------------------------------------------------

static enum LayerTensor matrix_of(int which) {
    const enum LayerTensor of[LAYER_LINEARS] = {
        [LINEAR_QKV] = QKV_W, [LINEAR_PROJ] = PROJ_W, [LINEAR_FC1] = FC1_W, [LINEAR_FC2] = FC2_W};
    return of[which];
}

// Returns the columns of a linear's matrix. The table has another shape for SwiGLU's first matrix
// (add_layer in gpt.c).
static int64_t columns_of(const GPT *gpt, const Tensor *matrix, int which) {
    return which == LINEAR_FC1 ? gpt->C : matrix->whole[1];
}

// Adds A or B of a matrix: "...dense.weight" has "...dense.lora_A.weight" and "...lora_B.weight".
static void add_adapter(Lora *lora, const Tensor *matrix, char letter, int64_t rows, int64_t columns,
                        int unit) {
    char name[sizeof matrix->name];
    size_t stem = strlen(matrix->name) - strlen("weight");
    snprintf(name, sizeof name, "%.*slora_%c.weight", (int)stem, matrix->name, letter);
    Tensor *t = &lora->whole[lora->whole_tensors++];
    *t = tensor_row(name, rows, columns, -1, unit, 0);
    if (letter == 'A') t->bound = 1 / sqrt((double)columns);
}

static void add_layer(GPT *gpt, const Tensor *layer, int l) {
    for (int which = 0; which < LAYER_LINEARS; which++) {
        if (!has_adapter(gpt, which)) continue;
        const Tensor *matrix = &layer[gpt->place[matrix_of(which)]];
        int64_t columns = columns_of(gpt, matrix, which);
        add_adapter(&gpt->lora, matrix, 'A', gpt->lora.rank, columns, l);
        add_adapter(&gpt->lora, matrix, 'B', tensor_whole_elements(matrix) / columns, gpt->lora.rank, l);
    }
}

// Units are layers, because no embeddings are trained.
static void keep_own(GPT *gpt) {
    Lora *lora = &gpt->lora;
    for (int l = 0; l < gpt->L; l++) {
        for (int i = 0; i < lora->layer_tensors; i++) {
            Tensor *part = &lora->tensor[lora->tensors++];
            *part = lora->whole[gpt_layer_number(gpt, l) * lora->layer_tensors + i];
            part->unit = gpt_layer_unit(gpt, l);
            part->chunk = l / gpt->stage.layers;
        }
    }
}

void lora_describe(GPT *gpt, const Config *config) {
    Lora *lora = &gpt->lora;
    lora->rank = config->lora_rank;
    if (!lora->rank) return;
    Error err;
    bool ok = config_lora_targets(config, &lora->targets, &err);  // checked by config_check_lora
    assert(ok && gpt->mesh->tp.size == 1);
    (void)ok;
    lora->scale = (float)(config->lora_alpha / lora->rank);
    lora->dropout = (float)config->lora_dropout;
    lora->frozen.format = (FrozenFormat)config->lora_base_format;
    for (int which = 0; which < LAYER_LINEARS; which++) {
        lora->place[which] = lora->layer_tensors;
        lora->layer_tensors += 2 * has_adapter(gpt, which);
    }
    int layers = config->num_layers;
    size_t most = (size_t)(layers * lora->layer_tensors);
    lora->whole = xcalloc(most, sizeof(Tensor), "the table of adapters");
    lora->tensor = xcalloc(most, sizeof(Tensor), "the table of adapters");
    const Tensor *first = &gpt->whole[1 + (gpt->P > 0) + !gpt->tied];
    for (int l = 0; l < layers; l++) add_layer(gpt, first + l * gpt->layer_tensors, l);
    tensors_number(lora->whole, lora->whole_tensors, 1);
    keep_own(gpt);
}

// --- memory --------------------------------------------------------------------------------------

void lora_reserve(GPT *gpt, MemoryPlan *plan) {
    Lora *lora = &gpt->lora;
    if (!lora->rank) return;
    int widest = gpt->FC1 > gpt->QKV ? gpt->FC1 : gpt->QKV;
    size_t N = (size_t)gpt->B * (size_t)gpt->T, row = (size_t)(widest > gpt->C ? widest : gpt->C);
    size_t low = N * (size_t)lora->rank * sizeof(floatX), wide = N * row * sizeof(floatX);
    frozen_reserve(&lora->frozen, lora->frozen.format, gpt->tensor, gpt->tensors, gpt->below, plan);
    memory_plan_reserve(plan, "scratch", "LoRA, inputs after dropout", lora->dropout > 0 ? wide : 0,
                        (void **)&lora->input);
    memory_plan_reserve(plan, "scratch", "LoRA, low-rank activations", low, (void **)&lora->low);
    memory_plan_reserve(plan, "scratch", "LoRA, low-rank activations", low, (void **)&lora->dlow);
    memory_plan_reserve(plan, "scratch", "LoRA, outputs of adapters", wide, (void **)&lora->sum);
}

// --- passes --------------------------------------------------------------------------------------

// Dropout sites of adapters. The sites of layers are below 4 x 10000.
enum { ADAPTER_SITES = 1 << 24 };

// Multiplies x (N, columns) by the dropout mask of a linear's input, in place.
static void drop(const GPT *gpt, const Pass *p, int l, int which, floatX *x, int columns) {
    uint32_t site = (uint32_t)(ADAPTER_SITES + gpt_layer_number(gpt, l) * LAYER_LINEARS + which);
    Embedding only_dropout = {.B = p->B,
                              .T = p->T,
                              .C = columns,
                              .dropout = {gpt->lora.dropout, gpt->seed, site, p->first_sample},
                              .x = x,
                              .x_rows = {0, pass_rows(p)}};
    op_embedding_forward(gpt->stream, &only_dropout);
}

static bool drops(const GPT *gpt, const Pass *p) { return p->training && gpt->lora.dropout > 0; }

// Returns the adapter's input: x, or a copy after dropout.
static const floatX *adapter_input(const GPT *gpt, const Pass *p, int l, int which, const Linear *a) {
    const Lora *lora = &gpt->lora;
    if (!drops(gpt, p)) return a->x;
    copy_on_device(gpt->stream, lora->input, a->x, (size_t)a->N * (size_t)a->C * sizeof(floatX));
    drop(gpt, p, l, which, lora->input, a->C);
    return lora->input;
}

// The two products of an adapter: low = x A^T (N, rank), and its output scale low B^T.
typedef struct Adapter {
    Linear a, b;
} Adapter;

static Adapter adapter_of(const GPT *gpt, const Pass *p, int l, int which, const Linear *linear) {
    const Lora *lora = &gpt->lora;
    int tensor = l * lora->layer_tensors + lora->place[which];
    bool overwrite = p->first || !zero_grads_accumulate(gpt->zero, gpt_layer_unit(gpt, l));
    Linear part = {.N = linear->N, .overwrite = overwrite, .workspace = linear->workspace};
    Adapter adapter = {part, part};
    Linear *a = &adapter.a, *b = &adapter.b;
    a->C = linear->C;
    a->OC = b->C = lora->rank;
    b->OC = linear->OC;
    a->x = adapter_input(gpt, p, l, which, linear);
    a->w = zero_weight(gpt->zero, tensor);
    b->w = zero_weight(gpt->zero, tensor + 1);
    a->y = lora->low;
    b->x = lora->low;
    b->scale = lora->scale;
    return adapter;
}

void lora_forward(const GPT *gpt, const Pass *p, int l, int which, Linear *linear) {
    if (!gpt->lora.rank) return;
    frozen_use(&gpt->lora.frozen, gpt_layer_tensor(gpt, l, matrix_of(which)), gpt->stream);
    if (!has_adapter(gpt, which)) return;
    Adapter adapter = adapter_of(gpt, p, l, which, linear);
    adapter.b.y = gpt->lora.sum;
    op_linear_forward(gpt->stream, &adapter.a);
    op_linear_forward(gpt->stream, &adapter.b);
    linear->add = gpt->lora.sum;
}

// Computes `low` again, which takes a small part of the time of dx, so that no layer has to save
// it.
void lora_backward(const GPT *gpt, const Pass *p, int l, int which, Linear *linear) {
    if (!gpt->lora.rank) return;
    frozen_use(&gpt->lora.frozen, gpt_layer_tensor(gpt, l, matrix_of(which)), gpt->stream);
    if (!has_adapter(gpt, which)) return;
    const Lora *lora = &gpt->lora;
    int tensor = l * lora->layer_tensors + lora->place[which];
    Adapter adapter = adapter_of(gpt, p, l, which, linear);
    Linear *a = &adapter.a, *b = &adapter.b;
    op_linear_forward(gpt->stream, a);
    b->dy = linear->dy;
    b->dx = lora->dlow;
    b->dw = zero_grad(gpt->zero, tensor + 1);
    op_linear_backward(gpt->stream, b);
    a->dy = lora->dlow;
    a->dx = lora->sum;
    a->dw = zero_grad(gpt->zero, tensor);
    op_linear_backward(gpt->stream, a);
    if (drops(gpt, p)) drop(gpt, p, l, which, lora->sum, linear->C);
    linear->dx_add = lora->sum;
}
