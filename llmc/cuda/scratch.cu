// A fixed piece of GPU memory for ops that reduce in two stages but get no workspace from their caller: LayerNorm's and the embedding's backward.
// Made at the first use, which is before or in the first step, and kept; ops that use it run on one stream, one after the other.
// Called by layernorm.cu and embedding.cu.
#include "llmc/cuda/scratch.h"

#include <stdlib.h>

typedef struct Scratch {
    void *memory;        // (OP_SCRATCH_BYTES)
    const Stream *user;  // the stream of the last op that used it
} Scratch;

static void scratch_destroy(void *state) {
    cudaFree(((Scratch *)state)->memory);
    free(state);
}

static Scratch *scratch_create(Stream *stream) {
    Scratch *scratch = (Scratch *)xcalloc(1, sizeof *scratch, "the ops' scratch");
    scratch->user = stream;
    cuda_check(stream_site(stream), cudaMalloc(&scratch->memory, OP_SCRATCH_BYTES), "allocating the ops' scratch (64 MiB)");
    return scratch;
}

void *op_scratch(Stream *stream, size_t bytes, const char *op) {
    DeviceSlot *slot = &stream_device(stream)->scratch;
    if (!slot->state) {
        slot->state = scratch_create(stream);
        slot->destroy = scratch_destroy;
    }
    Scratch *scratch = (Scratch *)slot->state;
    if (bytes > OP_SCRATCH_BYTES) {
        fatal(stream_site(stream), EXIT_ENVIRONMENT, "%s needs %zu bytes of scratch, %zu are there; use a smaller micro-batch", op, bytes, (size_t)OP_SCRATCH_BYTES);
    }
    if (scratch->user != stream) {
        // Work on the old stream may still use it, and the stream itself may be gone: wait for everything, once per change. A run uses one stream.
        cuda_check(stream_site(stream), cudaDeviceSynchronize(), "changing the stream of the ops");
        scratch->user = stream;
    }
    return scratch->memory;
}
