// The exact regime on a GPT's own gradients: llmc/state/zero.c as the trainer drives it against the
// one-process simulator, to the bit. The synthetic tensors of test_sdp4bit_mpi.c, which calls this,
// know nothing of real layouts, of the sizes that real gradients have, and of what follows from a
// weight a step later.
//
// With tensor or pipeline parallelism each data-parallel group is simulated from its own parts of
// the model, by its first rank.
#pragma once
#include "llmc/comm.h"
#include "llmc/model/pipeline_schedule.h"
#include "llmc/ranks/devices.h"
#include "sdp4bit/lanes.h"
LLMC_BEGIN

// One rank of a shape, ready to run; all belong to the caller.
typedef struct ModelRank {
    Device *device;
    Lanes *lanes;
    const Mesh *mesh;  // of all ranks of MPI_COMM_WORLD, open
    OwnDevice own;
    Pipeline pipeline;  // of one chunk of layers
    bool sequence;      // --sequence-parallel
} ModelRank;

// Trains a small model for a few steps under every preset, prints ok / not ok for each on rank 0
// and returns how many failed, the same on all ranks. Collective over MPI_COMM_WORLD. Switches the
// device to deterministic mode. A model that cannot be set up ends the job (EXIT_USAGE,
// EXIT_ENVIRONMENT).
int model_gradients_failures(const ModelRank *rank);

LLMC_END
