// The pipeline schedule of a stage (1F1B, optionally interleaved) and its links to the neighboring
// stages. Called by micro_batches.c, llmc/run/setup.c and llmc/plan/traffic.c.
//
// A stage sends hidden states to the next stage in forward, and their gradients to the previous
// stage in backward. Each direction between two stages has its own link (llmc/comm.h). With
// interleaving a stage holds several chunks of layers: chunk c runs through all stages in order,
// then chunk c + 1 starts on the first stage. If embeddings are tied, the first and last stage also
// exchange the gradient of the word embeddings.
#pragma once
#include "llmc/comm.h"
LLMC_BEGIN

// Stage `stage` of `stages`, with `chunks` chunks of layers each.
typedef struct PipelineShape {
    int stages, stage, chunks;
} PipelineShape;

// One pass of a micro-batch through a chunk, and the indices of its buffers: activations (slot),
// received input, and gradient of the output.
typedef struct PipelineAction {
    int micro_batch, chunk;
    bool backward;
    int slot, input, gradient;
} PipelineAction;

// Buffers for gradients of hidden states: one is computed on, one is being received and one is
// being sent.
enum { GRADIENT_SLOTS = 3 };

// Fills in Megatron-LM's 1F1B schedule: warm-up forward passes, alternating forward and backward
// passes, remaining backward passes. With several chunks, micro-batches run in groups of `stages`,
// which must divide micro_batches. The receive of an action may be posted as soon as the previous
// action starts: its buffers are free by then. training: false for forward passes only. actions has
// room for 2 * micro_batches * chunks. Returns the number of actions.
int pipeline_actions(PipelineShape shape, int micro_batches, bool training, PipelineAction *actions);
// Returns the number of activation slots that a stage needs. Inputs need one slot more.
int pipeline_in_flight(PipelineShape shape, int micro_batches);

// A stage's links; NULL if there is no such neighbor.
typedef struct Pipeline {
    Link *from_before, *to_next;  // the hidden state
    Link *from_next, *to_before;  // its gradient
    Link *words_to_first, *words_to_last;
    int64_t sent_ahead, sent_back;          // messages sent to the next and the previous stage
    int64_t gradient_sent[GRADIENT_SLOTS];  // value of sent_back after the latest send from each buffer
} Pipeline;
// Opens the links. Collective over the world; call between comm_open and comm_connect.
Pipeline pipeline_open(const Mesh *mesh, int chunks, Device *device);

LLMC_END
