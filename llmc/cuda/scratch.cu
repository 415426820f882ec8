// GPU memory for ops that reduce in two stages and have no workspace: the backward passes of norms
// and of the embedding. See op_set_scratch in ops.h.
#include "llmc/cuda/internal.h"
#include "llmc/cuda/limits.h"
#include "llmc/ops.h"

void op_set_scratch(Device *device, void *memory, size_t bytes) {
    device->scratch = memory;
    device->scratch_bytes = bytes;
    device->scratch_user = NULL;
}

void *op_scratch(Stream *stream, size_t bytes, const char *op) {
    Device *device = stream_device(stream);
    if (bytes > device->scratch_bytes) {
        fatal(
            stream_site(stream), EXIT_ENVIRONMENT,
            "%s needs %zu bytes of scratch, but %zu were planned; this is a bug, please report it (a smaller "
            "--micro-batch-size avoids it)",
            op, bytes, device->scratch_bytes);
    }
    if (device->scratch_user && device->scratch_user != stream) {
        // Work on the previous stream, which may no longer exist, may still use the memory. A run
        // uses only one stream.
        cuda_check(stream_site(stream), cudaDeviceSynchronize(), "changing the stream of the ops");
    }
    device->scratch_user = stream;
    return device->scratch;
}

// --- sizes: from limits.h ------------------------------------------------------------------------

bool op_check_model(int C, int NH, int HD, int F, int V, int64_t N, Error *err) {
    return limits_check_model(C, NH, HD, F, V, N, err);
}

size_t op_scratch_bytes(int64_t N, int C) { return scratch_bytes(N, C); }

void op_attention_notice(int T, bool documents, const char *unpacked, char *text, size_t bytes) {
    limits_attention_notice(T, documents, unpacked, text, bytes);
}
