// Startup, initial weights and batch upload: see gpt.h. Called by llmc/run/setup.c, train_gpt.c,
// dev/ and tests.
#include <assert.h>
#include <math.h>
#include <stdlib.h>

#include "llmc/model/gpt.h"
#include "llmc/ranks/parallel.h"

void gpt_start(GPT *gpt, Zero *zero, Device *device, Stream *stream, Timers *timers) {
    gpt->zero = zero;
    gpt->timers = timers;
    gpt->stream = gpt->tp.compute = stream;
    floatX *const shared[TP_SHARED] = {gpt->branch, gpt->dx, gpt->gathered};
    size_t bytes = (size_t)gpt->B * (size_t)gpt->T * (size_t)gpt->C * sizeof(floatX);
    for (int i = 0; i < TP_SHARED; i++) gpt->tp.shared[i] = (CommPiece){shared[i], shared[i] ? bytes : 0};
    op_set_scratch(device, gpt->scratch, gpt->scratch_bytes);
    if (gpt->rotary) gpt_upload_rope_table(gpt);
    fp8_start_scales(gpt);
    messages_start(gpt);
    tp_start_codes(&gpt->tp, (int64_t)gpt->B * gpt->T);
    // Generation has no backward pass, so all layers update the hidden states in one buffer.
    MicroBatch *m = &gpt->slot[0];
    for (int l = 0; gpt->cache && l <= gpt->stage.layers; l++) m->residual[l] = m->embedded;
}

// Draws this rank's part of a tensor. Values depend only on the seed, the tensor's index and the
// element, so every rank draws the weights that it holds. before: number of tensors of other
// tables, whose indices precede.
static void init_tensor(const GPT *gpt, const Tensor *t, floatX *weights, int before, uint64_t seed,
                        int threads) {
    InitWeights init = {.weights = weights,
                        .rows = t->local[0],
                        .columns = t->local[1],
                        .first_row = t->split == 0 ? t->offset : 0,
                        .first_column = t->split == 1 ? t->offset : 0,
                        .whole_columns = t->whole[1],
                        .std = t->std,
                        .bound = t->bound,
                        .seed = seed,
                        .tensor = (uint32_t)(t->number + before),
                        .threads = threads};
    op_init_weights(gpt->stream, &init);
}

// Quantizes a frozen tensor that has been drawn.
static void freeze_tensor(const GPT *gpt, int tensor) {
    const Frozen *frozen = &gpt->lora.frozen;
    if (!frozen->tensor[tensor].quantized) return;
    size_t bytes = (size_t)frozen->tensor[tensor].elements * sizeof(floatX);
    floatX *host = xmalloc(bytes, "a frozen matrix");
    copy_to_host(gpt->stream, host, frozen->matrix, bytes);
    stream_synchronize(gpt->stream);
    frozen_put(frozen, tensor, host, gpt->stream);
    free(host);
}

void gpt_init_weights(GPT *gpt, uint64_t seed, Peers group) {
    int threads = parallel_share(group);
    for (int i = 0; i < gpt->tensors && !gpt->lora.frozen.loaded; i++) {
        init_tensor(gpt, &gpt->tensor[i], gpt_weight(gpt, i), 0, seed, threads);
        if (gpt->lora.rank) freeze_tensor(gpt, i);
        else zero_keep_weights(gpt->zero, i);
    }
    for (int i = 0; i < gpt->lora.tensors; i++) {
        init_tensor(gpt, &gpt->lora.tensor[i], zero_weight(gpt->zero, i), gpt->whole_tensors, seed, threads);
        zero_keep_weights(gpt->zero, i);
    }
    stream_synchronize(gpt->stream);  // other streams may read the weights
}

void gpt_upload(GPT *gpt, int slot, const Batch *batch) {
    assert(slot >= 0 && slot < gpt->slots);
    size_t N = (size_t)gpt->B * (size_t)gpt->T, ids = N * sizeof(int32_t);
    MicroBatch *m = &gpt->slot[slot];
    const Attention sizes = {
        .B = gpt->B, .T = gpt->T, .NH = gpt->NH, .HD = gpt->HD, .groups = gpt->NG, .by_kind = gpt->by_kind};
    if (m->packed) m->sequences = op_attention_pack(gpt->stream, &sizes, batch->doc_start, m->packed);
    copy_to_device(gpt->stream, m->tokens, batch->tokens, ids);
    copy_to_device(gpt->stream, m->targets, batch->targets, ids);
    copy_to_device(gpt->stream, m->positions, batch->positions, ids);
    if (batch->doc_start) copy_to_device(gpt->stream, m->doc_start, batch->doc_start, ids);
    if (batch->loss_mask) copy_to_device(gpt->stream, m->loss_mask, batch->loss_mask, N * sizeof(float));
}

// --- rotary positions ----------------------------------------------------------------------------

// RoPE scaling of Llama 3.1 with the constants of Megatron-LM's --use-rope-scaling, for an original
// context of 8192 positions. Wavelengths longer than the context are multiplied by `stretch`,
// wavelengths shorter than a quarter of it do not change, and frequencies in between are
// interpolated.
static double stretched(double frequency, double stretch) {
    const double positions = 8192, least = 1, most = 4;
    double waves = positions * frequency / (2 * acos(-1));
    double share = fmin(1, fmax(0, (waves - least) / (most - least)));  // share of the unscaled frequency
    return share * frequency + (1 - share) * frequency / stretch;
}

// YaRN as in transformers (_compute_yarn_parameters): returns the column, a real number, whose
// frequency makes `turns` turns in the original context.
static double yarn_column(const GPT *gpt, double turns) {
    return gpt->rotary * log(gpt->yarn.positions / (2 * acos(-1) * turns)) / (2 * log(gpt->rotary_base));
}

// Keeps the frequencies of the first columns, divides the last ones by the factor, and interpolates
// in between.
static double yarn_frequency(const GPT *gpt, double frequency, double column) {
    const Yarn *y = &gpt->yarn;
    double low = yarn_column(gpt, y->fast), high = yarn_column(gpt, y->slow);
    if (y->rounded) low = floor(low), high = ceil(high);
    low = fmax(low, 0);
    high = fmin(high, gpt->rotary - 1);
    if (low == high) high += 0.001;
    double ramp = fmin(1, fmax(0, (column - low) / (high - low)));
    return frequency / y->factor * ramp + frequency * (1 - ramp);
}

static double scaled_frequency(const GPT *gpt, double column) {
    double frequency = pow(gpt->rotary_base, -2.0 * column / gpt->rotary);
    if (gpt->rotary_interpolation > 1) frequency /= gpt->rotary_interpolation;
    if (gpt->yarn.factor > 0) return yarn_frequency(gpt, frequency, column);
    return gpt->rotary_stretch > 1 ? stretched(frequency, gpt->rotary_stretch) : frequency;
}

// Computes the table in double on the host, so that all backends use the same values.
void gpt_upload_rope_table(GPT *gpt) {
    int half = gpt->rotary / 2;
    double gain = gpt->yarn.factor > 0 ? gpt->yarn.gain : 1;
    size_t bytes = (size_t)gpt->T * (size_t)gpt->rotary * sizeof(float);
    float *turns = xmalloc(bytes, "the rotary positions");
    for (int64_t i = 0; i < (int64_t)gpt->T * half; i++) {
        int64_t t = i / half, column = i % half;
        double angle = (double)t * scaled_frequency(gpt, (double)column);
        turns[t * gpt->rotary + column] = (float)(gain * cos(angle));
        turns[t * gpt->rotary + half + column] = (float)(gain * sin(angle));
    }
    copy_to_device(gpt->stream, gpt->rope_table, turns, bytes);
    stream_synchronize(gpt->stream);
    free(turns);
}
