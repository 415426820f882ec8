// Delayed scaling of FP8 linear layers, with the semantics of Transformer Engine: see gpt.h. Called
// by gpt_init.c, micro_batches.c, transformer.c, train_gpt.c and llmc/run/resume.c.
#include <stdlib.h>

#include "llmc/model/gpt.h"

static bool delayed(const Fp8 *f) { return f->on && f->recipe == FP8_DELAYED; }
static size_t scale_bytes(const Fp8 *f) { return (size_t)f->scales * sizeof(Fp8Scale); }
static size_t history_bytes(const Fp8 *f) {
    return (size_t)f->scales * (size_t)f->history_length * sizeof(float);
}

// This rank's part of Fp8.all.
static Fp8Scale *own_part(const GPT *gpt) {
    return gpt->fp8.all + (size_t)mesh_status_group(gpt->mesh)->rank * (size_t)gpt->fp8.scales;
}

void fp8_reserve_scales(GPT *gpt, MemoryPlan *plan) {
    Fp8 *f = &gpt->fp8;
    size_t ranks = (size_t)mesh_status_group(gpt->mesh)->size, used = delayed(f);
    memory_plan_reserve(plan, "model", "FP8 scales", scale_bytes(f), (void **)&f->scale);
    memory_plan_reserve(plan, "model", "FP8 scales of all ranks", used * ranks * scale_bytes(f),
                        (void **)&f->all);
    memory_plan_reserve(plan, "model", "FP8 histories", used * history_bytes(f), (void **)&f->history);
    memory_plan_reserve(plan, "model", "FP8 formats", used * (size_t)f->scales, (void **)&f->format);
}

// Uploads host memory and waits, so that the caller may free it.
static void upload(const GPT *gpt, void *to, const void *host, size_t bytes) {
    copy_to_device(gpt->stream, to, host, bytes);
    stream_synchronize(gpt->stream);
}

static Fp8Scale scale_of_value(float scale) {
    return (Fp8Scale){.scale = scale, .inverse = f32_div(1.0f, scale)};
}

void fp8_start_scales(GPT *gpt) {
    Fp8 *f = &gpt->fp8;
    if (!f->on) return;
    Fp8Scale *scale = xmalloc(scale_bytes(f), "FP8 scales");
    uint8_t *format = xmalloc((size_t)f->scales, "FP8 formats");
    for (int i = 0; i < f->scales; i++) {
        scale[i] = scale_of_value(1.0f);
        format[i] = (uint8_t)f->type[i % FP8_OPERANDS];
    }
    upload(gpt, f->scale, scale, scale_bytes(f));
    if (delayed(f)) {
        set_zero(gpt->stream, f->history, history_bytes(f));
        upload(gpt, f->format, format, (size_t)f->scales);
        f->calibrates = true;
    }
    free(scale);
    free(format);
}

// The step status is computed later, and zero.c orders it: it runs after the work on `compute`, and
// `compute` waits for it. So all ranks use the group's communicator in the same order.
void fp8_gather_maxima(GPT *gpt) {
    const Fp8 *f = &gpt->fp8;
    if (!delayed(f)) return;
    copy_on_device(gpt->stream, own_part(gpt), f->scale, scale_bytes(f));
    comm_all_gather(mesh_status_group(gpt->mesh), f->all, scale_bytes(f), gpt->stream);
}

void fp8_update_scales(GPT *gpt) {
    Fp8 *f = &gpt->fp8;
    if (!delayed(f)) return;
    f->calibrates = false;
    Fp8Update update = {.tensors = f->scales,
                        .scale = f->scale,
                        .all = f->all,
                        .ranks = mesh_status_group(gpt->mesh)->size,
                        .type = f->format,
                        .history = f->history,
                        .length = f->history_length,
                        .most_recent = f->most_recent,
                        .margin = f->margin,
                        .applied = &zero_status_on_device(gpt->zero)->applied};
    op_fp8_update_scales(gpt->stream, &update);
}

void fp8_warm_up(GPT *gpt, bool begins) {
    const Fp8 *f = &gpt->fp8;
    if (!delayed(f)) return;
    Fp8Scale *kept = own_part(gpt);
    copy_on_device(gpt->stream, begins ? kept : f->scale, begins ? f->scale : kept, scale_bytes(f));
}

// --- checkpoints ---------------------------------------------------------------------------------

Fp8State fp8_get_state(const GPT *gpt) {
    const Fp8 *f = &gpt->fp8;
    if (!delayed(f)) return (Fp8State){0};
    Fp8State state = fp8_state_new(f->scales, f->history_length);
    Fp8Scale *scale = xmalloc(scale_bytes(f), "FP8 scales");
    copy_to_host(gpt->stream, scale, f->scale, scale_bytes(f));
    copy_to_host(gpt->stream, state.history, f->history, history_bytes(f));
    stream_synchronize(gpt->stream);
    for (int i = 0; i < f->scales; i++) state.scale[i] = scale[i].scale;
    free(scale);
    return state;
}

// Copies the newest entries of a history and returns the absolute maximum that its scale follows.
static uint32_t copy_history(const Fp8 *f, float *to, const float *from, int length) {
    uint32_t largest = 0;
    for (int i = 1; i <= f->history_length && i <= length; i++) {
        float value = from[length - i];
        uint32_t bits = fp8_absolute(value);
        to[f->history_length - i] = value;
        if (bits > largest && (i == 1 || !f->most_recent)) largest = bits;
    }
    return largest;
}

bool fp8_set_state(GPT *gpt, const Fp8State *state) {
    Fp8 *f = &gpt->fp8;
    if (!delayed(f) || state->scales != f->scales) return false;
    Fp8Scale *scale = xmalloc(scale_bytes(f), "FP8 scales");
    float *history = xcalloc((size_t)f->scales, (size_t)f->history_length * sizeof(float), "FP8 histories");
    for (int i = 0; i < f->scales; i++) {
        uint32_t absmax = copy_history(f, history + (int64_t)i * f->history_length,
                                       state->history + (int64_t)i * state->length, state->length);
        Fp8Type type = f->type[i % FP8_OPERANDS];
        scale[i] = scale_of_value(fp8_scale(absmax, type, f->margin, state->scale[i]));
    }
    upload(gpt, f->scale, scale, scale_bytes(f));
    upload(gpt, f->history, history, history_bytes(f));
    f->calibrates = false;
    free(scale);
    free(history);
    return true;
}
