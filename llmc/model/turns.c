// The angles of rotary positions, as op_rope wants them: see gpt.h. Called once, at the start.
#include <math.h>
#include <stdlib.h>

#include "llmc/model/gpt.h"

// Angles are computed in double: the same numbers on every backend.
void gpt_upload_turns(GPT *gpt) {
    int half = gpt->rotary / 2;
    size_t bytes = (size_t)gpt->T * (size_t)gpt->rotary * sizeof(float);
    float *turns = (float *)xmalloc(bytes, "the rotary positions");
    for (int64_t i = 0; i < (int64_t)gpt->T * half; i++) {
        int64_t t = i / half, column = i % half;
        double angle = (double)t * pow(gpt->rotary_base, -2.0 * (double)column / gpt->rotary);
        turns[t * gpt->rotary + column] = (float)cos(angle);
        turns[t * gpt->rotary + half + column] = (float)sin(angle);
    }
    copy_to_device(gpt->stream, gpt->turns, turns, bytes);
    stream_synchronize(gpt->stream);
    free(turns);
}
