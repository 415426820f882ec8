// The order of work on a stage of the pipeline, and the messages between neighbours. Called by
// train_gpt.cu.
//
// Forward, a stage hands the hidden state to the next one. Backward, it hands the gradient of that
// back. Each direction between two stages is a link of its own (llmc/comm.h). The first and the
// last stage also exchange the gradient of the word embeddings, which both hold.
#pragma once
#include "llmc/comm.h"
LLMC_BEGIN

// A micro-batch passes forward or backward.
typedef struct PipelineAction {
    int micro_batch;
    bool backward;
} PipelineAction;

// Megatron-LM's non-interleaved 1F1B: P - p - 1 forward passes, then one forward and one backward
// in turn, then the backward passes that are left. training: false for forward passes alone.
// actions: room for 2 * micro_batches. Returns how many there are.
int pipeline_actions(int stages, int stage, int micro_batches, bool training, PipelineAction *actions);
// Micro-batches that a stage holds activations of at the same time, at most.
int pipeline_in_flight(int stages, int stage, int micro_batches);

// A stage's links, NULL where there is no neighbour.
typedef struct Pipeline {
    Link *from_before, *to_next;  // the hidden state
    Link *from_next, *to_before;  // its gradient
    Link *words_to_first, *words_to_last;
} Pipeline;
// Collective over the world, after comm_open and before comm_connect.
Pipeline pipeline_open(const Mesh *mesh, Device *device);
// Before comm_close.
void pipeline_close(Pipeline *pipeline);

LLMC_END
