// Weights of a checkpoint for inference and export. With --local-steps a checkpoint holds the outer
// weights and the weights of every node. Called by dev/generate.c and dev/convert/hf_export.c.
#pragma once
#include "llmc/checkpoint/checkpoint.h"
LLMC_BEGIN

typedef enum WeightsChoice { WEIGHTS_OUTER, WEIGHTS_MEAN } WeightsChoice;
#define WEIGHTS_CHOICES "outer|mean"

typedef struct SavedWeights {
    const Checkpoint *checkpoint;
    bool fp32;       // master weights, else model weights (floatX)
    int nodes;       // mean over the master weights of these nodes; 0: outer weights
    char note[240];  // line for the user about the iterations of the weights; may be empty
} SavedWeights;

// Chooses the weights that saved_weights_read reads. WEIGHTS_MEAN: the mean over the nodes of their
// fp32 master weights. Without --local-steps, and after the last iteration, that is the same as
// WEIGHTS_OUTER. Errors: EXIT_CHECKPOINT if the checkpoint was saved without the optimizer and so
// lacks them.
bool saved_weights_choose(SavedWeights *weights, const Checkpoint *checkpoint, bool fp32,
                          WeightsChoice choice, Error *err);
// Like checkpoint_read; slice.kind and slice.node are ignored. host: (hi - lo) of float or floatX.
bool saved_weights_read(const SavedWeights *weights, Slice slice, void *host, Error *err);

LLMC_END
