// Results of the kernels of elastic replica groups, for kernels_dump.c.
#pragma once
#include "sdp4bit/kernels.h"
#include "test/gpu/dump_values.h"

// Elastic replica groups: weighted sums of contributions, and the outer step of a range that is a
// block of columns of a chunk or contiguous, with and without an own contribution.
static inline void merged_rounds(Dump *d) {
    enum { COUNT = 90000, CHUNK = 300000 };
    static const ChunkPlace places[] = {{COUNT, 0, 100, 300, 200},
                                        {COUNT - 7, 5, 1, 1, 1001},
                                        {33, 64, 32, 96, 0}};
    float *start[3], *now[3];  // outer weights, momentum, master weights
    for (uint32_t i = 0; i < 3; i++) {
        start[i] = uploaded_values(d, COUNT, 5020 + i, i == 0);
        now[i] = (float *)reserve(d, COUNT * 4);
    }
    float *first = uploaded_values(d, CHUNK, 5030, true), *second = uploaded_values(d, CHUNK, 5031, false);
    float *mean = (float *)reserve(d, CHUNK * 4);
    uint64_t *hash = (uint64_t *)reserve(d, sizeof *hash);
    kernel_add_weighted(d->stream, mean, first, 0.25f, true, CHUNK);
    kernel_add_weighted(d->stream, mean, second, 0.75f, false, CHUNK);
    result(d, FP32, mean, CHUNK * 4, "weighted sum of contributions");
    for (int i = 0; i < 6; i++) {
        for (int k = 0; k < 3; k++) copy_on_device(d->stream, now[k], start[k], COUNT * 4);
        set_zero(d->stream, hash, sizeof *hash);
        MergeOuter merge = {.outer = now[0],
                            .momentum = now[1],
                            .master = now[2],
                            .mean = mean,
                            .own = i % 2 ? second : NULL,
                            .place = places[i / 2],
                            .rate = 0.7f,
                            .decay = 0.9f,
                            .share = i % 2 ? 1.0f : 0.6f,
                            .damping = i % 2 ? 1.0f : 0.3f,
                            .hash = hash};
        kernel_merge_outer(d->stream, &merge);
        for (int k = 0; k < 3; k++) result(d, FP32, now[k], COUNT * 4, "merged round %d, part %d", i, k);
        result(d, RAW, hash, sizeof *hash, "hash of merged round %d", i);
    }
    for (int k = 0; k < 3; k++) {
        release(d, start[k]);
        release(d, now[k]);
    }
    release(d, first);
    release(d, second);
    release(d, mean);
    release(d, hash);
}
