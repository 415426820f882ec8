// AdamW on the cores of the host, fused with what the gather sends. The bits are those of
// kernel_update_shard (kernels.h): this is its reference. CPU ranks run it as that kernel. With
// --optimizer-cpu-offload qwd.c runs it beside a GPU, on several threads.
#pragma once
#include "sdp4bit/kernels.h"
LLMC_BEGIN

// As kernel_update_shard, with all pointers to host memory. Pieces of the shard are spread over
// `threads` threads, cut between groups, so their number changes no bit. To the watchdog of `site`
// (NULL: none) each piece is progress.
void update_shard_host(const UpdateShard *a, int threads, const Site *site);

LLMC_END
