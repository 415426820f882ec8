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
// The trainer's main() where it was compiled with -Dmain=train_gpt_main. May be called again and
// again: every call is a run of its own. MPI is started and ended by the call, unless it runs
// already.
int train_gpt_main(int argc, char **argv);

LLMC_END
