// Linear layers in FP8: see gpt.h.
//
// Recipes, as in Transformer Engine:
//   tensorwise  one scale per tensor, from its own largest value: the tensor is read twice
//   delayed     one scale per tensor, from the largest values of earlier steps (fp8_scaling.c)
//   blockwise   a scale per 1 x 128 elements of inputs and gradients and 128 x 128 of weights
//
// Only training runs in FP8. Evaluation and text samples measure the bf16 weights, which are the
// weights that are saved, so their passes run in bf16 and leave the histories alone.
//
// Weights are quantized in the first forward pass of a step. If they are sharded (ZeRO-3), every
// pass gathers and quantizes them again, so that quantized weights of only one layer are kept.
#include <assert.h>
#include <stdlib.h>

#include "llmc/model/gpt.h"

// Sizes of a linear on this rank: y (N, rows) = x (N, columns) w^T.
typedef struct LinearShape {
    int rows, columns;
} LinearShape;
static LinearShape shape_of(const GPT *gpt, int which) {
    const LinearShape shapes[LAYER_LINEARS] = {[LINEAR_QKV] = {gpt->QKV, gpt->C},
                                               [LINEAR_PROJ] = {gpt->C, gpt->A},
                                               [LINEAR_FC1] = {gpt->FC1, gpt->C},
                                               [LINEAR_FC2] = {gpt->C, gpt->F}};
    return shapes[which];
}

void fp8_describe(GPT *gpt, const Config *config) {
    Fp8 *f = &gpt->fp8;
    f->on = config_fp8_on(config);
    f->recipe = config->fp8_recipe;
    f->weight_shared = config->sharding == SHARD_PARAMETERS;
    f->scales = config->num_layers * LAYER_LINEARS * FP8_OPERANDS;
    f->history_length = config->fp8_amax_history_len;
    f->most_recent = config->fp8_amax_compute_algo == FP8_MOST_RECENT;
    f->margin = config->fp8_margin;
    bool hybrid = config->fp8_format == FP8_FORMAT_HYBRID, blockwise = f->recipe == FP8_BLOCKWISE;
    for (int i = 0; i < FP8_OPERANDS; i++) {
        f->type[i] = i == FP8_GRADIENT && hybrid ? FP8_E5M2 : FP8_E4M3;
        f->blocks[i] = !blockwise ? FP8_WHOLE : i == FP8_WEIGHT ? FP8_SQUARES : FP8_ROWS;
    }
    while (f->first < config->num_layers && !config_layer_in_fp8(config, f->first)) f->first++;
    for (f->end = f->first; f->end < config->num_layers && config_layer_in_fp8(config, f->end);) f->end++;
}

bool fp8_planned(const GPT *gpt, int l) {
    const Fp8 *f = &gpt->fp8;
    if (!f->on || l >= gpt->L) return false;
    int number = gpt_layer_number(gpt, l);
    return number >= f->first && number < f->end;
}
bool fp8_layer(const GPT *gpt, const Pass *pass, int l) { return pass->training && fp8_planned(gpt, l); }

bool fp8_gathers(const GPT *gpt, const Pass *pass, int l) {
    return fp8_layer(gpt, pass, l) && gpt->tp.sequence && gpt->fp8.recipe != FP8_BLOCKWISE;
}
// Returns true if the linear's input is all-gathered as codes.
static bool is_gathered(const GPT *gpt, int which) {
    return gpt->tp.sequence && gpt->fp8.recipe != FP8_BLOCKWISE &&
           (which == LINEAR_QKV || which == LINEAR_FC1);
}

// --- memory --------------------------------------------------------------------------------------

// Reserves a quantized (rows, columns) matrix, with block scales along the columns if `blocks`
// has any.
static void reserve_codes(Fp8Codes *codes, Fp8Blocks blocks, int64_t rows, int64_t columns, const char *group,
                          const char *purpose, MemoryPlan *plan) {
    int64_t scales = blocks == FP8_WHOLE ? 0 : fp8_block_scales(blocks, rows, columns);
    memory_plan_reserve(plan, group, purpose, (size_t)(rows * columns), (void **)&codes->codes);
    memory_plan_reserve(plan, group, "FP8 block scales", (size_t)scales * sizeof(float),
                        (void **)&codes->block_scales);
}

void fp8_reserve_layer(const GPT *gpt, LayerActs *acts, MemoryPlan *plan) {
    static const char *const purpose[LAYER_LINEARS] = {"FP8 inputs of QKV", "FP8 inputs of the projection",
                                                       "FP8 inputs of FC1", "FP8 inputs of FC2"};
    const Fp8 *f = &gpt->fp8;
    int64_t N = (int64_t)gpt->B * gpt->T;
    for (int i = 0; i < LAYER_LINEARS; i++) {
        int64_t rows = is_gathered(gpt, i) ? tp_rows(&gpt->tp, N).count : N;
        reserve_codes(&acts->input[i], f->blocks[FP8_INPUT], shape_of(gpt, i).columns, rows, "activations",
                      purpose[i], plan);
    }
    size_t scales = f->recipe == FP8_TENSORWISE ? LAYER_LINEARS : 0;
    memory_plan_reserve(plan, "activations", "FP8 scales", scales * sizeof(Fp8Scale),
                        (void **)&acts->input_scale);
}

static void reserve_weights(GPT *gpt, MemoryPlan *plan) {
    Fp8 *f = &gpt->fp8;
    int layers = f->weight_shared ? 1 : gpt->L;
    f->weight = xcalloc((size_t)layers * LAYER_LINEARS, sizeof *f->weight, "the FP8 weights");
    for (int i = 0; i < layers * LAYER_LINEARS; i++) {
        if (!f->weight_shared && !fp8_planned(gpt, i / LAYER_LINEARS)) continue;
        LinearShape shape = shape_of(gpt, i % LAYER_LINEARS);
        Fp8Blocks blocks = f->blocks[FP8_WEIGHT];
        Fp8Weight *w = &f->weight[i];
        reserve_codes(&w->w, blocks, shape.rows, shape.columns, "model", "FP8 weights", plan);
        reserve_codes(&w->transposed, blocks, shape.columns, shape.rows, "model", "FP8 weights, transposed",
                      plan);
    }
}

void fp8_reserve(GPT *gpt, MemoryPlan *plan) {
    Fp8 *f = &gpt->fp8;
    if (!f->on) return;
    int64_t N = (int64_t)gpt->B * gpt->T;
    int rows = 0, columns = 0;
    for (int i = 0; i < LAYER_LINEARS; i++) {
        LinearShape shape = shape_of(gpt, i);
        rows = shape.rows > rows ? shape.rows : rows;
        columns = shape.columns > columns ? shape.columns : columns;
    }
    reserve_weights(gpt, plan);
    fp8_reserve_scales(gpt, plan);
    reserve_codes(&f->input, f->blocks[FP8_INPUT], N, columns, "scratch", "FP8 input of a linear", plan);
    if (is_gathered(gpt, LINEAR_QKV)) {
        reserve_codes(&f->input_t, FP8_WHOLE, gpt->C, N, "scratch", "FP8 input of a linear", plan);
        memory_plan_reserve(plan, "scratch", "FP8 maxima", (size_t)gpt->tp.group->size * sizeof(uint32_t),
                            (void **)&f->maxima);
    }
    Fp8Blocks blocks = f->blocks[FP8_GRADIENT];
    reserve_codes(&f->gradient, blocks, N, rows, "scratch", "FP8 gradient of a linear", plan);
    reserve_codes(&f->gradient_t, blocks, rows, N, "scratch", "FP8 gradient of a linear", plan);
    size_t norm = (size_t)tp_rows(&gpt->tp, N).count * (size_t)gpt->C * sizeof(floatX);
    memory_plan_reserve(plan, "scratch", "LayerNorm of an FP8 layer", norm, (void **)&gpt->norm_output);
}

// --- quantization --------------------------------------------------------------------------------

static const LayerActs *acts_of(const GPT *gpt, const Pass *p, int l) {
    return &gpt->slot[p->slot].acts[gpt->recompute_full ? 0 : l - gpt_first_layer(gpt, p)];
}

// Returns the scale of an operand. A tensorwise scale of an input is part of the activations,
// because several micro-batches can be in flight.
static Fp8Scale *scale_of(const GPT *gpt, const Pass *p, int l, LayerLinear which, Fp8Operand operand) {
    if (operand == FP8_INPUT && gpt->fp8.recipe == FP8_TENSORWISE) {
        return &acts_of(gpt, p, l)->input_scale[which];
    }
    return &gpt->fp8.scale[fp8_scale_index(gpt_layer_number(gpt, l), which, operand)];
}

uint32_t *fp8_absmax(const GPT *gpt, const Pass *p, int l, LayerLinear which, Fp8Operand operand) {
    if (!fp8_layer(gpt, p, l) || gpt->fp8.recipe != FP8_TENSORWISE) return NULL;
    return &scale_of(gpt, p, l, which, operand)->absmax;
}

// Returns true if the op that computes the operand has accumulated fp8_absmax: a norm, GELU' or
// SwiGLU', and for the gradient of QKV the bias gradient or RoPE.
static bool knows_absmax(const GPT *gpt, LayerLinear which, Fp8Operand operand) {
    if (operand == FP8_WEIGHT) return false;
    if (operand == FP8_INPUT) return which == LINEAR_QKV || which == LINEAR_FC1;
    return which != LINEAR_QKV || gpt->qkv_biased || (gpt->rotary && !gpt->qk_norm);
}

static Fp8Matrix matrix_of(const GPT *gpt, Fp8Operand operand, Fp8Codes codes, const Fp8Scale *scale) {
    return (Fp8Matrix){.codes = codes.codes,
                       .type = gpt->fp8.type[operand],
                       .blocks = gpt->fp8.blocks[operand],
                       .scale = scale,
                       .block_scales = codes.block_scales};
}

// Returns true if the scale is computed from the operand's own maximum: always with tensorwise
// scaling; with delayed scaling only in the first micro-batch of a run without histories, because
// gradients could underflow with a fixed scale. Backward leaves the scales of inputs and weights
// alone: micro-batches in flight were quantized with them.
static bool scales_itself(const GPT *gpt, const Pass *p, Fp8Operand operand) {
    const Fp8 *f = &gpt->fp8;
    bool begins = f->calibrates && p->first && (p->direction == BACKWARD) == (operand == FP8_GRADIENT);
    return f->recipe == FP8_TENSORWISE || begins;
}

// Quantizes x (N, C) into codes (N, C) and transposed (C, N), both optional.
static void quantize(const GPT *gpt, const Pass *p, LayerLinear which, Fp8Operand operand, Fp8Scale *scale,
                     Fp8Codes codes, Fp8Codes transposed, Fp8Quantize q) {
    q.type = gpt->fp8.type[operand];
    q.blocks = gpt->fp8.blocks[operand];
    q.scale = scale;
    q.codes = codes.codes, q.block_scales = codes.block_scales;
    q.transposed = transposed.codes, q.transposed_block_scales = transposed.block_scales;
    q.accumulate = gpt->fp8.recipe == FP8_DELAYED;
    if (scales_itself(gpt, p, operand)) {
        if (q.accumulate || !knows_absmax(gpt, which, operand)) op_fp8_absmax(gpt->stream, &q);
        op_fp8_scale(gpt->stream, scale, q.type, NULL, 0, q.accumulate ? gpt->fp8.margin : 0);
    }
    op_fp8_quantize(gpt->stream, &q);
}

void fp8_quantize_input(const GPT *gpt, const Pass *p, int l, LayerLinear which, const Linear *a,
                        const floatX *x, Fp8Source source) {
    if (!fp8_layer(gpt, p, l)) return;
    Fp8Quantize q = {.N = a->N, .C = a->C, .x = x, .source = source};
    Fp8Codes none = {0}, saved = acts_of(gpt, p, l)->input[which];
    quantize(gpt, p, which, FP8_INPUT, scale_of(gpt, p, l, which, FP8_INPUT), gpt->fp8.input,
             p->backward ? saved : none, q);
}

void fp8_quantize_gradient(const GPT *gpt, const Pass *p, int l, LayerLinear which, const Linear *a) {
    if (!fp8_layer(gpt, p, l)) return;
    Fp8Quantize q = {.N = a->N, .C = a->OC, .x = a->dy};
    quantize(gpt, p, which, FP8_GRADIENT, scale_of(gpt, p, l, which, FP8_GRADIENT), gpt->fp8.gradient,
             gpt->fp8.gradient_t, q);
}

// Quantizes this rank's rows, which a norm has computed, into `codes` (R, C).
static void quantize_rows(const GPT *gpt, const Pass *p, Fp8Operand operand, Fp8Scale *scale, uint8_t *codes,
                          Fp8Quantize q) {
    const Fp8 *f = &gpt->fp8;
    const Group *group = gpt->tp.group;
    q.type = f->type[operand];
    q.scale = scale;
    q.codes = codes;
    q.accumulate = f->recipe == FP8_DELAYED;
    if (scales_itself(gpt, p, operand)) {
        if (q.accumulate) op_fp8_absmax(gpt->stream, &q);
        copy_on_device(gpt->stream, f->maxima + group->rank, &scale->absmax, sizeof scale->absmax);
        tp_exchange(&gpt->tp, f->maxima, sizeof *f->maxima);
        op_fp8_scale(gpt->stream, scale, q.type, f->maxima, group->size, q.accumulate ? f->margin : 0);
    }
    op_fp8_quantize(gpt->stream, &q);
}

void fp8_gather_input(const GPT *gpt, const Pass *p, int l, LayerLinear which, const Linear *a,
                      const floatX *own) {
    uint8_t *codes = acts_of(gpt, p, l)->input[which].codes;
    Fp8Quantize q = {.N = gpt_own_rows(gpt, p).count, .C = a->C, .x = own};
    quantize_rows(gpt, p, FP8_INPUT, scale_of(gpt, p, l, which, FP8_INPUT), codes, q);
    fp8_gather_saved_begin(gpt, p, l, which, a);
    tp_gather_wait(&gpt->tp);
}

void fp8_gather_saved_begin(const GPT *gpt, const Pass *p, int l, LayerLinear which, const Linear *a) {
    tp_gather_bytes_begin(&gpt->tp, acts_of(gpt, p, l)->input[which].codes, gpt->fp8.input.codes,
                          (size_t)(gpt_own_rows(gpt, p).count * a->C));
}

void fp8_gather_gradient(const GPT *gpt, const Pass *p, int l, LayerLinear which, const Linear *a,
                         const floatX *own) {
    const Fp8 *f = &gpt->fp8;
    Rows rows = gpt_own_rows(gpt, p);
    Fp8Quantize q = {.N = rows.count, .C = a->OC, .x = own};
    quantize_rows(gpt, p, FP8_GRADIENT, scale_of(gpt, p, l, which, FP8_GRADIENT),
                  f->gradient.codes + rows.first * a->OC, q);
    tp_exchange(&gpt->tp, f->gradient.codes, (size_t)(rows.count * a->OC));
    op_fp8_transpose(gpt->stream, f->gradient_t.codes, f->gradient.codes, a->N, a->OC);
}

// Returns the quantized weights for y, or for dx with `backward`.
static Fp8Matrix weights_of(const GPT *gpt, const Pass *p, int l, LayerLinear which, const Linear *a,
                            bool backward) {
    const Fp8 *f = &gpt->fp8;
    const Fp8Weight *w = &f->weight[(f->weight_shared ? 0 : l) * LAYER_LINEARS + which];
    const Fp8Codes none = {0};
    Fp8Scale *scale = scale_of(gpt, p, l, which, FP8_WEIGHT);
    Fp8Quantize q = {.N = a->OC, .C = a->C, .x = a->w};
    if (f->weight_shared) {
        quantize(gpt, p, which, FP8_WEIGHT, scale, backward ? none : w->w, backward ? w->transposed : none,
                 q);
    } else if (p->first && p->direction == FORWARD && !backward) {
        quantize(gpt, p, which, FP8_WEIGHT, scale, w->w, p->backward ? w->transposed : none, q);
    }
    return matrix_of(gpt, FP8_WEIGHT, backward ? w->transposed : w->w, scale);
}

// --- products ------------------------------------------------------------------------------------

void fp8_linear_forward(const GPT *gpt, const Pass *p, int l, LayerLinear which, const Linear *a) {
    Fp8Product product = {.m = a->N,
                          .n = a->OC,
                          .k = a->C,
                          .a = matrix_of(gpt, FP8_INPUT, gpt->fp8.input,
                                         scale_of(gpt, p, l, which, FP8_INPUT)),
                          .b = weights_of(gpt, p, l, which, a, false),
                          .d = a->y,
                          .bias = a->bias,
                          .fast = gpt->fp8.recipe != FP8_BLOCKWISE,
                          .workspace = a->workspace};
    op_fp8_product(gpt->stream, &product);
}

void fp8_linear_backward(const GPT *gpt, const Pass *p, int l, LayerLinear which, const Linear *a) {
    const Fp8Scale *dy_scale = scale_of(gpt, p, l, which, FP8_GRADIENT);
    const Fp8Scale *x_scale = scale_of(gpt, p, l, which, FP8_INPUT);
    if (a->dx) {
        Fp8Product product = {.m = a->N,
                              .n = a->C,
                              .k = a->OC,
                              .a = matrix_of(gpt, FP8_GRADIENT, gpt->fp8.gradient, dy_scale),
                              .b = weights_of(gpt, p, l, which, a, true),
                              .d = a->dx,
                              .workspace = a->workspace};
        op_fp8_product(gpt->stream, &product);
        if (a->x_pre) {
            op_gelu_backward(gpt->stream, a->dx, a->x_pre, a->dpre_bias, a->N, a->C, a->workspace,
                             fp8_absmax(gpt, p, l, LINEAR_FC1, FP8_GRADIENT));
        }
    }
    if (!a->dw) return;
    Fp8Codes saved = acts_of(gpt, p, l)->input[which];
    if (is_gathered(gpt, which)) {
        saved = gpt->fp8.input_t;
        op_fp8_transpose(gpt->stream, saved.codes, gpt->fp8.input.codes, a->N, a->C);
    }
    Fp8Product product = {.m = a->OC,
                          .n = a->C,
                          .k = a->N,
                          .a = matrix_of(gpt, FP8_GRADIENT, gpt->fp8.gradient_t, dy_scale),
                          .b = matrix_of(gpt, FP8_INPUT, saved, x_scale),
                          .sum = a->dw,
                          .overwrite = a->overwrite,
                          .workspace = a->workspace};
    op_fp8_product(gpt->stream, &product);
}
