// AdamW on host cores, fused with packing the message: the reference of kernel_update_shard
// (kernels.h), with the same bits. CPU ranks run it as that kernel, qwd.c on several threads beside
// a GPU with --optimizer-cpu-offload.
#pragma once
#include "sdp4bit/kernels.h"
LLMC_BEGIN

// As kernel_update_shard, with host pointers. Divides the shard between groups among `threads`
// threads; their number does not change the result. Each part counts as progress for the watchdog
// of `site` (or NULL).
void update_shard_host(const UpdateShard *a, int threads, const Site *site);

LLMC_END
