// What the GPU's ops can compute and what scratch memory they want, as functions of sizes alone.
// Plain C, so that a test without a GPU can ask them. Included by limits.cu, embedding.cu,
// layernorm.cu, attention_cudnn.cpp, test_limits.c
// and test_device_gpu.cu.
#pragma once
#include <limits.h>
#include <stdio.h>

#include "llmc/base/base.h"

// --- sizes of models -----------------------------------------------------------------------------

// MULTIPLE: 16 bytes of floatX, as GEMMs and packed loads want. The largest head is
// attention_plain.cu's, the largest hidden size layernorm.cu's.
enum { LIMIT_MULTIPLE = 8, LIMIT_HEAD = 256, LIMIT_HIDDEN = 16384 };

// See op_check_model.
static inline bool limits_check_model(int C, int NH, int HD, int F, int V, int64_t N, Error *err) {
    const int multiple = LIMIT_MULTIPLE;
    if (C % multiple || C > LIMIT_HIDDEN) {
        return error_set(err, EXIT_USAGE,
                         "--hidden-size %d: a GPU computes multiples of %d up to %d; choose one, "
                         "or use train_gpt_cpu",
                         C, multiple, LIMIT_HIDDEN);
    }
    if (HD % multiple || HD > LIMIT_HEAD) {
        return error_set(err, EXIT_USAGE,
                         "%d attention heads of size %d: a GPU computes sizes that are multiples "
                         "of %d up to %d; choose another --num-attention-heads",
                         NH, HD, multiple, LIMIT_HEAD);
    }
    if (F % multiple) {
        return error_set(err, EXIT_USAGE, "--ffn-hidden-size %d: a GPU computes multiples of %d; choose one",
                         F, multiple);
    }
    if (V % multiple) {
        return error_set(err, EXIT_USAGE,
                         "the padded vocabulary of %d rows is no multiple of %d, as a GPU wants; use "
                         "--make-vocab-size-divisible-by 128 (the default) or another multiple of %d",
                         V, multiple, multiple);
    }
    if (N > INT_MAX) {  // rows are sorted by 32-bit numbers
        return error_set(err, EXIT_USAGE,
                         "a micro-batch of %lld tokens: a GPU computes at most %d; use a smaller "
                         "--micro-batch-size",
                         (long long)N, INT_MAX);
    }
    return true;
}

// --- attention -----------------------------------------------------------------------------------

// Is this call one for cuDNN? Not with document starts, which it does not know. Not with a length
// that is no multiple of 64 either: sampling has such lengths. They grow by one with every token,
// and a plan for each would cost more than it saves.
static inline bool limits_for_cudnn(int T, bool documents) { return !documents && T % 64 == 0; }

// See op_attention_notice.
static inline void limits_attention_notice(int T, bool documents, char *text, size_t bytes) {
    const char *when = documents ? "where attention passes the borders of documents"
                                 : "for sequence lengths that are multiples of 64";
    *text = '\0';
    if (limits_for_cudnn(T, documents)) return;
    snprintf(text, bytes,
             "attention runs on this program's own kernels: they make 10 matrix products where "
             "cuDNN's make 7, so a step takes at least 5 to 11 %% longer (dev/bench/NOTES.md); "
             "cuDNN is used %s",
             when);
}

// --- scratch memory ------------------------------------------------------------------------------

// The scratch is at least SCRATCH_LEAST bytes, and more where a micro-batch has millions of rows.
// LayerNorm's backward takes what there is. The embedding's backward wants, one after the other:
// sorted keys, row numbers and sorted row numbers (N each), the sort's own memory, and two rows of
// fp32 for each chunk of rows that a warp sums.
#define SCRATCH_LEAST ((size_t)64 << 20)
enum { CHUNK_ROWS = 32, CHUNKS_LEAST = 256 };

static inline size_t scratch_aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }
static inline size_t scratch_ids_bytes(int64_t N) { return scratch_aligned((size_t)N * sizeof(int32_t)); }
static inline size_t scratch_chunk_bytes(int C) { return 2 * (size_t)C * sizeof(float); }
// The most that CUB's radix sort of N pairs wants: a second copy of the pairs, and counters.
static inline size_t scratch_sort_bytes(int64_t N) { return 10 * (size_t)N + ((size_t)4 << 20); }

// Chunks of at least CHUNK_ROWS rows, fewer where their sums would not fit SCRATCH_LEAST.
// The sums' order, and so their last bits, depend on this number.
static inline int64_t scratch_chunks(int64_t N, int C, size_t sort_bytes) {
    size_t used = 3 * scratch_ids_bytes(N) + scratch_aligned(sort_bytes);
    size_t fits = used < SCRATCH_LEAST ? (SCRATCH_LEAST - used) / scratch_chunk_bytes(C) : 0;
    int64_t most = fits < CHUNKS_LEAST ? (int64_t)CHUNKS_LEAST : (int64_t)fits;
    int64_t wanted = ceil_div64(N, CHUNK_ROWS);
    return wanted < most ? wanted : most;
}

// See op_scratch_bytes.
static inline size_t scratch_bytes(int64_t N, int C) {
    size_t sort = scratch_aligned(scratch_sort_bytes(N));
    size_t wanted = 3 * scratch_ids_bytes(N) + sort + CHUNKS_LEAST * scratch_chunk_bytes(C);
    return wanted > SCRATCH_LEAST ? wanted : SCRATCH_LEAST;
}
