// Compares the exact regime on a GPT's own gradients, run through llmc/state/zero.c as in the
// trainer, bit for bit with the one-process simulator. Complements the synthetic tensors of
// test_sdp4bit_mpi.c (which calls this) with real layouts, real gradient magnitudes, and weights
// that affect the next step.
//
// With tensor or pipeline parallelism each data-parallel group is simulated by its first rank, from
// the group's parts of the model.
#pragma once
#include "llmc/comm.h"
#include "llmc/model/pipeline_schedule.h"
#include "llmc/ranks/devices.h"
#include "sdp4bit/lanes.h"
LLMC_BEGIN

// One rank of a shape, ready to run. All members belong to the caller.
typedef struct ModelRank {
    Device *device;
    Lanes *lanes;
    const Mesh *mesh;  // mesh of all ranks of MPI_COMM_WORLD, open
    OwnDevice own;
    Pipeline pipeline;  // pipeline with one chunk of layers
    bool sequence;      // --sequence-parallel
} ModelRank;

// Trains a small model for a few steps under every preset and prints ok / not ok for each on rank
// 0. Returns the number of failures, the same on all ranks. Collective over MPI_COMM_WORLD.
// Switches the device to deterministic mode. Ends the job if a model cannot be set up (EXIT_USAGE,
// EXIT_ENVIRONMENT).
int model_gradients_failures(const ModelRank *rank);

LLMC_END
