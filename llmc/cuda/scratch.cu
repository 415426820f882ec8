// A fixed piece of GPU memory for ops that reduce in two stages but get no workspace from their caller: LayerNorm's and the embedding's backward.
// It comes from the memory plan (ops.h) and is handed over before the first op; ops that use it run on one stream, one after the other.
// Called by layernorm.cu and embedding.cu, and through ops.h by train_gpt.cu.
#include "llmc/cuda/scratch.h"

size_t op_scratch_bytes(void) { return OP_SCRATCH_BYTES; }

void op_set_scratch(Device *device, void *memory) {
    device->scratch = memory;
    device->scratch_user = NULL;
}

void *op_scratch(Stream *stream, size_t bytes, const char *op) {
    Device *device = stream_device(stream);
    if (!device->scratch) fatal(stream_site(stream), EXIT_ENVIRONMENT, "%s has no scratch memory: op_set_scratch was not called", op);
    if (bytes > OP_SCRATCH_BYTES) {
        fatal(stream_site(stream), EXIT_ENVIRONMENT, "%s needs %zu bytes of scratch, %zu are there; use a smaller micro-batch", op, bytes, (size_t)OP_SCRATCH_BYTES);
    }
    if (device->scratch_user && device->scratch_user != stream) {
        // Work on the old stream may still use it, and the stream itself may be gone: wait for everything, once per change. A run uses one stream.
        cuda_check(stream_site(stream), cudaDeviceSynchronize(), "changing the stream of the ops");
    }
    device->scratch_user = stream;
    return device->scratch;
}
