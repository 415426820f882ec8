// The table of presets: see plan_report.h.
#include "llmc/plan/plan_report.h"

#include <math.h>

// A preset with fewer bits must be 10 % faster, or more if its error is larger. Local steps, which
// are a different algorithm, must be 50 % faster.
#define FEWER_BITS 1.1
const Preset presets[PRESETS] = {
    {"baseline", 1, "no flags", "nothing is quantized", .gradient_bits = 0},
    {"lossless", FEWER_BITS, "@configs/lossless.args",
     "lossless weight coding: training is bitwise identical", .lossless = true},
    {"baseline-bf16", FEWER_BITS, "--grad-reduce-in-bf16", "gradients in bf16", .bf16_gradients = true},
    {"eden-lossless", FEWER_BITS, "@configs/eden-lossless.args",
     "gradients between nodes in EDEN's 4 bits, lossless weights", .eden = true, .lossless = true,
     .gradient_bits = 4},
    {"eden", FEWER_BITS, "@configs/eden.args", "gradients between nodes in EDEN's 4 bits, weights in 4 bits",
     .eden = true, .gradient_bits = 4, .weight_bits = 4},
    {"sdp4bit", FEWER_BITS, "@configs/sdp4bit.args", "gradients between nodes and weights in 4 bits",
     .gradient_bits = 4, .weight_bits = 4},
    {"eden3", 1.25, "@configs/eden3.args", "gradients between nodes in EDEN's 3 bits, weights in 4 bits",
     .eden = true, .gradient_bits = 3, .weight_bits = 4},
    {"eden2-ef", 1.4, "@configs/eden2-ef.args",
     "gradients between nodes in EDEN's 2 bits with error feedback, weights in 4 bits", .eden = true,
     .error_feedback = true, .gradient_bits = 2, .weight_bits = 4},
    {"local", 1.5, "@configs/local.args",
     "nodes train independently, with an outer sync every 30 steps in EDEN's 4 bits; this is another "
     "algorithm, so compare its loss with the baseline's first",
     .eden = true, .gradient_bits = 4, .weight_bits = 4, .local_steps = 30}};

static void quantize_gradients(Config *c, const Preset *preset) {
    c->quantized_gradients = preset->gradient_bits > 0;
    if (!c->quantized_gradients) return;
    c->gradient_quantization_method = preset->eden ? GRADIENT_EDEN : GRADIENT_UNIFORM;
    c->hadamard_transform = !preset->eden;
    c->gradient_quantization_bits_inter = preset->gradient_bits;
    c->gradient_quantization_bits_intra = 8;
    c->gq_group_size_intra = 128;
    c->gq_group_size_inter = preset->eden ? EDEN_GROUP : 128;
    c->gq_rounding = ROUND_STOCHASTIC;
    c->gradients_quantization_start_iteration = 0;
}

static void quantize_weights(Config *c, const Preset *preset) {
    c->quantized_weights = preset->weight_bits > 0 || preset->lossless;
    // Runs that shard the weights over all ranks need --weight-quantization-method direct.
    bool world = c->sharding == SHARD_PARAMETERS && c->shard_scope == SHARD_IN_WORLD;
    c->weight_quantization_method = preset->lossless ? WEIGHT_LOSSLESS
                                    : world          ? WEIGHT_DIRECT
                                                     : WEIGHT_DIFFERENCE;
    if (!preset->weight_bits) return;
    c->weight_quantization_bits = preset->weight_bits;
    c->wq_group_size = 2048;
    c->wq_rounding = ROUND_STOCHASTIC;
}

Config preset_config(const Config *run, const Preset *preset) {
    Config c = *run;
    c.use_distributed_optimizer = true;
    c.grad_reduce_in_bf16 = preset->bf16_gradients;
    c.hadamard_transform = false;
    c.error_feedback = preset->error_feedback;
    c.local_steps = preset->local_steps ? preset->local_steps : 1;
    c.local_steps_delay = preset->local_steps ? 1 : 0;
    c.outer_lr = 1;
    c.outer_momentum = 0.5;
    c.local_steps_mix = 0;
    quantize_gradients(&c, preset);
    quantize_weights(&c, preset);
    return c;
}

// Returns the error of a uniform codec, assuming that values are uniformly distributed between two
// levels. The step size is the group's maximum divided by the number of levels, and E[max^2] is the
// integral of 2x P(max > x).
static double uniform_error(int levels, int group, Rounding rounding) {
    const double end = 9, width = 1e-3;
    double square = 0;
    for (double x = width / 2; x < end; x += width) {
        square += 2 * x * (1 - pow(erf(x / sqrt(2)), group)) * width;
    }
    return square / levels / levels / (rounding == ROUND_NEAREST ? 12 : 6);
}

static double density(double x) { return isinf(x) ? 0 : exp(-x * x / 2) / sqrt(2 * acos(-1)); }
static double below(double x) { return isinf(x) ? 1 : erfc(-x / sqrt(2)) / 2; }

// Returns the error of EDEN: E[q^2] / E[zq]^2 - 1, where q is the level of z, because the scale
// makes the decoded vector exact along z. Groups of 256 have fewer outliers than a Gaussian vector,
// which reduces the error by about 6 %.
static double eden_error(int bits) {
    int levels = 1 << (bits - 1);
    double squares = 0, product = 0, low = 0;
    for (int k = 0; k < levels; k++) {
        double level = (double)eden_level(bits, k);
        double high = k + 1 < levels ? (double)eden_threshold(bits, k) : INFINITY;
        squares += 2 * level * level * (below(high) - below(low));
        product += 2 * level * (density(low) - density(high));
        low = high;
    }
    return squares / (product * product) - 1;
}

// Rounding m * 2^e (m in [1, 2)) to bf16 has an error of at most 2^-8 * 2^e. The mean square of the
// error is 2^-14 / 12 * 2^2e; relative to the mean square of the value it is about half of this.
static const double BF16_ERROR = 0x1p-14 / 12 / 2;

double codec_gaussian_error(Codec codec, int group, Rounding rounding) {
    CodecInfo info = codec_info(codec);
    if (codec == CODEC_FP32) return 0;
    if (codec_eden(codec)) return eden_error(info.bits);
    return codec_grouped(codec) ? uniform_error(info.levels, group, rounding) : BF16_ERROR;
}

double preset_gradient_error(const GradFormat *format, bool inside, bool between) {
    double sum = 0;
    if (inside) sum += codec_gaussian_error(format->intra_codec, format->intra_group, format->rounding);
    if (between) sum += codec_gaussian_error(format->inter_codec, format->inter_group, format->rounding);
    return sqrt(sum);
}

int preset_choose(const double ms[PRESETS]) {
    int best = -1;
    for (int i = 0; i < PRESETS; i++) {
        if (ms[i] > 0 && (best < 0 || ms[best] >= presets[i].gain * ms[i])) best = i;
    }
    return best;
}
