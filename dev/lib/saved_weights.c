// Weights of a checkpoint: see saved_weights.h.
#include "dev/lib/saved_weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/dtype.h"
#include "llmc/base/json.h"

enum { PART_ELEMENTS = 1 << 20 };

bool saved_weights_choose(SavedWeights *w, const Checkpoint *checkpoint, bool fp32, WeightsChoice choice,
                          Error *err) {
    *w = (SavedWeights){.checkpoint = checkpoint, .fp32 = fp32};
    const RunState *state = checkpoint_state(checkpoint);
    int64_t local_steps = 1, last = state->iteration;
    const char *arguments = checkpoint_arguments(checkpoint);
    cJSON *object = json_parse_object(arguments, strlen(arguments));
    json_member_int64(object, "local_steps", 1, INT32_MAX, &local_steps);
    json_member_int64(object, "train_iters", 0, INT64_MAX, &last);
    cJSON_Delete(object);
    if (local_steps == 1 || outer_weights_synced(state, last)) return true;

    int nodes = checkpoint_nodes(checkpoint, SLICE_LOCAL_MASTER);
    if (choice == WEIGHTS_MEAN) {
        if (!nodes)
            return ckpt_error(err,
                              "the checkpoint was saved without the optimizer, so it has no weights per "
                              "node; use --weights outer");
        w->nodes = nodes;
        snprintf(w->note, sizeof w->note,
                 "The weights are the mean of the %d nodes at iteration %" PRId64 ".", nodes,
                 state->iteration);
        return true;
    }
    int length = snprintf(w->note, sizeof w->note,
                          "The weights are the outer weights, each synchronized in one of iterations %" PRId64
                          " to %" PRId64 " (--local-steps %" PRId64 ")",
                          oldest_outer_weights(state, local_steps), state->iteration, local_steps);
    if (nodes)
        snprintf(w->note + length, sizeof w->note - (size_t)length,
                 "; --weights mean takes the mean of the %d nodes at iteration %" PRId64, nodes,
                 state->iteration);
    return true;
}

// Sums in double, so that the mean of a few nodes is correctly rounded.
static bool read_part_of_mean(const SavedWeights *w, Slice slice, float *own, double *sum, Error *err) {
    int64_t n = slice.hi - slice.lo;
    memset(sum, 0, (size_t)n * sizeof *sum);
    slice.kind = SLICE_LOCAL_MASTER;
    for (slice.node = 0; slice.node < w->nodes; slice.node++) {
        if (!checkpoint_read(w->checkpoint, &slice, own, err)) return false;
        for (int64_t i = 0; i < n; i++) sum[i] += (double)own[i];
    }
    return true;
}

static bool read_mean(const SavedWeights *w, Slice slice, void *host, Error *err) {
    float *own = xmalloc(PART_ELEMENTS * sizeof *own, "the weights of a node");
    double *sum = xmalloc(PART_ELEMENTS * sizeof *sum, "the mean of the nodes");
    bool ok = true;
    Slice part = slice;
    for (part.lo = slice.lo; ok && part.lo < slice.hi; part.lo = part.hi) {
        part.hi = slice.hi - part.lo < PART_ELEMENTS ? slice.hi : part.lo + PART_ELEMENTS;
        ok = read_part_of_mean(w, part, own, sum, err);
        for (int64_t i = part.lo; ok && i < part.hi; i++) {
            float mean = (float)(sum[i - part.lo] / w->nodes);
            if (w->fp32) ((float *)host)[i - slice.lo] = mean;
            else ((floatX *)host)[i - slice.lo] = floatX_from_float(mean);
        }
    }
    free(own);
    free(sum);
    return ok;
}

bool saved_weights_read(const SavedWeights *w, Slice slice, void *host, Error *err) {
    if (w->nodes) return read_mean(w, slice, host, err);
    slice.kind = w->fp32 ? SLICE_MASTER : SLICE_WEIGHT;
    return checkpoint_read(w->checkpoint, &slice, host, err);
}
