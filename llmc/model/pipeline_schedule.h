// The pipeline schedule of a stage (1F1B, optionally interleaved) and its links to the neighboring
// stages. Called by micro_batches.c, llmc/run/setup.c and llmc/plan/traffic.c.
//
// In a forward pass a stage sends hidden states to the next stage, in a backward pass their
// gradients to the previous stage. Each direction between two stages has its own link
// (llmc/comm.h). With interleaving, a stage holds several chunks of layers: a micro-batch passes
// through chunk c of all stages in order, then returns to the first stage for chunk c + 1. If
// embeddings are tied, the first and last stage also exchange the gradient of the word embeddings.
#pragma once
#include "llmc/comm.h"
LLMC_BEGIN

// Stage `stage` of `stages`, with `chunks` chunks of layers each.
typedef struct PipelineShape {
    int stages, stage, chunks;
} PipelineShape;

// A pass of a micro-batch through a chunk, with the indices of its buffers.
typedef struct PipelineAction {
    int micro_batch, chunk;
    bool backward;
    int slot;      // activation slot
    int input;     // buffer of the hidden states from the previous stage
    int gradient;  // buffer of the gradient of the chunk's output
} PipelineAction;

// Buffers for gradients of hidden states: one used by the current backward pass, one being received
// and one being sent.
enum { GRADIENT_SLOTS = 3 };

// Fills in Megatron-LM's 1F1B schedule: warm-up forward passes, alternating forward and backward
// passes, remaining backward passes. Without training there are only forward passes. With several
// chunks, micro-batches run in groups of `stages`, which must divide micro_batches. Buffers are
// assigned such that the receive of an action may be posted as soon as the previous action starts.
// actions: (2 * micro_batches * chunks) out. Returns the number of actions.
int pipeline_actions(PipelineShape shape, int micro_batches, bool training, PipelineAction *actions);
// Returns the number of activation slots that a stage needs. It also needs that many input buffers
// plus one.
int pipeline_in_flight(PipelineShape shape, int micro_batches);

// A stage's links; NULL if there is no such neighbor.
typedef struct Pipeline {
    Link *from_before, *to_next;            // hidden states
    Link *from_next, *to_before;            // gradients of hidden states
    Link *words_to_first, *words_to_last;   // gradient of tied word embeddings
    int64_t sent_ahead, sent_back;          // number of messages sent to the next, previous stage
    int64_t gradient_sent[GRADIENT_SLOTS];  // value of sent_back after the latest send of a buffer
} Pipeline;
// Opens the links. Collective over the world; call between comm_open and comm_connect.
Pipeline pipeline_open(const Mesh *mesh, int chunks, Device *device);

LLMC_END
