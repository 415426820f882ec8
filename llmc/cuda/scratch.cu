// GPU memory for two-stage reductions of ops without a workspace: the backward passes of LayerNorm
// and embedding. Part of the memory plan (ops.h) and set before the first op.
#include "llmc/cuda/internal.h"
#include "llmc/ops.h"

void op_set_scratch(Device *device, void *memory, size_t bytes) {
    device->scratch = memory;
    device->scratch_bytes = bytes;
    device->scratch_user = NULL;
}

void *op_scratch(Stream *stream, size_t bytes, const char *op) {
    Device *device = stream_device(stream);
    if (bytes > device->scratch_bytes) {
        fatal(stream_site(stream), EXIT_ENVIRONMENT,
              "%s needs %zu bytes of scratch, %zu were planned; this is a bug, please report it (a smaller "
              "--micro-batch-size avoids it)",
              op, bytes, device->scratch_bytes);
    }
    if (device->scratch_user && device->scratch_user != stream) {
        // Work on the old stream may still use it, and the stream may no longer exist: wait for
        // everything. A run uses one stream.
        cuda_check(stream_site(stream), cudaDeviceSynchronize(), "changing the stream of the ops");
    }
    device->scratch_user = stream;
    return device->scratch;
}
