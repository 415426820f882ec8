// Compares llmc/state/zero.c on a GPT's gradients bit for bit with the single-process simulator.
// test_sdp4bit_mpi.c, which calls this, uses synthetic tensors. The GPT adds real layouts, real
// gradient magnitudes, and weights that affect the gradients of the next step.
//
// With tensor or pipeline parallelism the first rank of each data-parallel group simulates the
// group, with the group's part of the model.
#pragma once
#include "llmc/comm.h"
#include "llmc/model/pipeline_schedule.h"
#include "llmc/ranks/devices.h"
#include "sdp4bit/lanes.h"
LLMC_BEGIN

// This rank in one parallel layout. All members belong to the caller.
typedef struct ModelRank {
    Device *device;
    Lanes *lanes;
    const Mesh *mesh;  // mesh of all ranks of MPI_COMM_WORLD, open
    OwnDevice own;
    Pipeline pipeline;  // pipeline with one chunk of layers
    bool sequence;      // --sequence-parallel
} ModelRank;

// Trains a small model for a few steps under every preset. Rank 0 prints ok / not ok for each.
// Returns the number of failures, the same on all ranks. Collective over MPI_COMM_WORLD. Switches
// the device to deterministic mode. Ends the job if a model cannot be set up (EXIT_USAGE,
// EXIT_ENVIRONMENT).
int model_gradients_failures(const ModelRank *rank);

LLMC_END
