// A piece of GPU memory for ops that reduce in two stages but get no workspace from their caller:
// LayerNorm's and the embedding's backward. It comes from the memory plan (ops.h) and is handed
// over before the first op. Ops that use it run on one stream, one after the other. Called by
// layernorm.cu and embedding.cu, and where memory is planned and handed out.
#include "llmc/cuda/scratch.h"

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
              "%s needs %zu bytes of scratch, %zu were planned; this is a fault of "
              "the program, please report it (a smaller --micro-batch-size helps)",
              op, bytes, device->scratch_bytes);
    }
    if (device->scratch_user && device->scratch_user != stream) {
        // Work on the old stream may still use it, and the stream itself may be gone: wait for
        // everything, once per change. A run uses one stream.
        cuda_check(stream_site(stream), cudaDeviceSynchronize(), "changing the stream of the ops");
    }
    device->scratch_user = stream;
    return device->scratch;
}
