// The order of work on a stage of the pipeline, and the messages between neighbors. Called by
// stages.c, setup.c and traffic.c.
//
// Forward, a stage hands the hidden state to the next one. Backward, it hands the gradient of that
// back. Each direction between two stages is a link of its own (llmc/comm.h). A stage may hold
// several chunks of layers: chunk c of stage s comes before chunk c of stage s + 1, and chunk c of
// the last stage before chunk c + 1 of the first one. The first and the last stage also exchange
// the gradient of the word embeddings, which both hold.
#pragma once
#include "llmc/comm.h"
LLMC_BEGIN

// Stage `stage` of `stages`, with `chunks` chunks of layers each.
typedef struct PipelineShape {
    int stages, stage, chunks;
} PipelineShape;

// A micro-batch passes through a chunk, forward or backward. The numbers of the places that it uses
// meanwhile: for activations (slot), for what the neighbors send: its input, and the gradient of
// its output.
typedef struct PipelineAction {
    int micro_batch, chunk;
    bool backward;
    int slot, input, gradient;
} PipelineAction;

// Gradients of hidden states that are there at the same time: one is worked on, one arrives and one
// leaves.
enum { GRADIENT_SLOTS = 3 };

// Megatron-LM's 1F1B: some forward passes, then one forward and one backward in turn, then the
// backward passes that are left. With several chunks micro-batches go through in groups of
// `stages`, which must divide their number. What an action receives may be expected when the action
// before it begins: its places are free by then. training: false for forward passes alone. actions:
// room for 2 * micro_batches * chunks. Returns how many there are.
int pipeline_actions(PipelineShape shape, int micro_batches, bool training, PipelineAction *actions);
// Slots of activations that a stage needs. It needs one more for inputs.
int pipeline_in_flight(PipelineShape shape, int micro_batches);

// A stage's links, NULL where there is no neighbor.
typedef struct Pipeline {
    Link *from_before, *to_next;  // the hidden state
    Link *from_next, *to_before;  // its gradient
    Link *words_to_first, *words_to_last;
    int64_t sent_ahead, sent_back;          // messages to the neighbors so far
    int64_t gradient_sent[GRADIENT_SLOTS];  // of those: the latest out of each place, from 1
} Pipeline;
// Collective over the world, after comm_open and before comm_connect.
Pipeline pipeline_open(const Mesh *mesh, int chunks, Device *device);

LLMC_END
