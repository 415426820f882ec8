// The passes of the GPT as train_gpt.cu makes them, for the tests that link the same file without
// its main().
#pragma once
#include "llmc/data/loader.h"
#include "llmc/model/gpt.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

// Once the memory plan is allocated: what the GPT works with. All must outlive it.
void gpt_start(GPT *gpt, Zero *zero, Device *device, Stream *stream, Timers *timers);
// Megatron's initialisation, drawn by the counter RNG: the same weights for any number of ranks and
// on every backend. The ranks of group, which call it together, share their hosts' cores where the
// host draws.
void gpt_init_weights(GPT *gpt, uint64_t seed, Peers group);
// Uploads a micro-batch of B rows of T tokens (B, T at most the planned ones) into a slot.
void gpt_upload(GPT *gpt, int slot, const Batch *batch);
// Runs the stage's layers on the uploaded tokens, or on the slot's input. The final LayerNorm's
// output is in gpt->lnf.y; of a stage without a head the stream's new state is in residual[L].
void gpt_forward(GPT *gpt, const Pass *pass);
// Loss of the uploaded targets; *zero_loss_sum += loss_scale * sum. pass->backward: also the
// gradients of the head. Nothing on a stage without it.
void gpt_head(GPT *gpt, const Pass *pass);
// Gradients of everything below the head, in the gradient arena. A stage without a head takes the
// gradient of its output from dresidual, and every stage leaves that of its input there.
void gpt_backward(GPT *gpt, const Pass *pass);
// Uploads micro-batch k into pass->slot (gpt_upload), and completes the pass: its samples, masks
// and scale.
typedef void (*LoadMicroBatch)(void *context, GPT *gpt, int k, Pass *pass);
// `count` micro-batches through this rank's stage, in the order of the pipeline: a training step's
// forward and backward passes, or forward alone. Collective over the ranks of a replica.
void gpt_micro_batches(GPT *gpt, int count, bool training, LoadMicroBatch load, void *context);
// Part of it: after the step's last backward pass. Gives the tied embedding's copies one gradient,
// and hands the embeddings' to ZeRO. Collective over mesh->embedding.
void gpt_end_backward(GPT *gpt);
// The trainer's main() where it was compiled with -Dmain=train_gpt_main. May be called again and
// again: every call is a run of its own. MPI is started and ended by the call, unless it runs
// already.
int train_gpt_main(int argc, char **argv);

LLMC_END
