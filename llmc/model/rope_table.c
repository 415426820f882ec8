// Cosines and sines of rotary positions, for op_rope: see gpt.h. Called once, at startup.
#include <math.h>
#include <stdlib.h>

#include "llmc/model/gpt.h"

// RoPE scaling of Llama 3.1, with the constants of Megatron-LM's --use-rope-scaling. The original
// context was 8192 positions. Wavelengths longer than that are stretched by the full factor, those
// shorter than a quarter of it stay, and frequencies in between are interpolated.
static double stretched(double frequency, double stretch) {
    const double positions = 8192, least = 1, most = 4;
    double waves = positions * frequency / (2 * acos(-1));
    double share = fmin(1, fmax(0, (waves - least) / (most - least)));  // share of the unscaled frequency
    return share * frequency + (1 - share) * frequency / stretch;
}

// Computed in double on the host, so that all backends use the same numbers.
void gpt_upload_rope_table(GPT *gpt) {
    int half = gpt->rotary / 2;
    size_t bytes = (size_t)gpt->T * (size_t)gpt->rotary * sizeof(float);
    float *turns = (float *)xmalloc(bytes, "the rotary positions");
    for (int64_t i = 0; i < (int64_t)gpt->T * half; i++) {
        int64_t t = i / half, column = i % half;
        double frequency = pow(gpt->rotary_base, -2.0 * (double)column / gpt->rotary);
        if (gpt->rotary_stretch > 1) frequency = stretched(frequency, gpt->rotary_stretch);
        double angle = (double)t * frequency;
        turns[t * gpt->rotary + column] = (float)cos(angle);
        turns[t * gpt->rotary + half + column] = (float)sin(angle);
    }
    copy_to_device(gpt->stream, gpt->rope_table, turns, bytes);
    stream_synchronize(gpt->stream);
    free(turns);
}
