// AdamW on host cores, fused with packing the message: the reference of kernel_update_shard
// (kernels.h), bitwise identical to it. CPU ranks run it as that kernel; with
// --optimizer-cpu-offload qwd.c runs it on several threads while the GPU computes.
#pragma once
#include "sdp4bit/kernels.h"
LLMC_BEGIN

// Same as kernel_update_shard, with host pointers. Divides the shard at group boundaries among
// `threads` threads; their number does not change the result. Each part counts as progress for the
// watchdog of `site` (or NULL).
void update_shard_host(const UpdateShard *a, int threads, const Site *site);

LLMC_END
