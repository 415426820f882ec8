// The angles of rotary positions, as op_rope wants them: see gpt.h. Called once, at the start.
#include <math.h>
#include <stdlib.h>

#include "llmc/model/gpt.h"

// Llama 3.1 was trained with 8192 positions before its wavelengths were stretched. Those of which
// these positions hold fewer than one are stretched whole, those with four or more not at all.
// Between them frequencies are mixed. The same numbers as Megatron-LM's --use-rope-scaling.
static double stretched(double frequency, double stretch) {
    const double positions = 8192, least = 1, most = 4;
    double waves = positions * frequency / (2 * acos(-1));
    double share = fmin(1, fmax(0, (waves - least) / (most - least)));  // of the frequency as it was
    return share * frequency + (1 - share) * frequency / stretch;
}

// Angles are computed in double: the same numbers on every backend.
void gpt_upload_turns(GPT *gpt) {
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
    copy_to_device(gpt->stream, gpt->turns, turns, bytes);
    stream_synchronize(gpt->stream);
    free(turns);
}
