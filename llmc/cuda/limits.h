// Supported sizes and scratch memory of the GPU ops. Plain C, so that tests run without a GPU.
// Included by files of this directory and by tests.
#pragma once
#include <limits.h>
#include <stdio.h>

#include "llmc/base/base.h"

// --- sizes of models -----------------------------------------------------------------------------

enum {
    LIMIT_MULTIPLE = 8,   // 16 bytes of floatX, for GEMMs and packed loads
    LIMIT_HEAD = 256,     // maximum head size of attention_plain.cu
    LIMIT_HIDDEN = 16384  // maximum hidden size of layernorm.cu
};

// See op_check_model.
static inline bool limits_check_model(int C, int NH, int HD, int F, int V, int64_t N, Error *err) {
    const int multiple = LIMIT_MULTIPLE;
    if (C % multiple || C > LIMIT_HIDDEN) {
        return usage_error(err,
                           "--hidden-size %d must be a multiple of %d and at most %d on GPUs; change it, or "
                           "use train_gpt_cpu",
                           C, multiple, LIMIT_HIDDEN);
    }
    if (HD % multiple || HD > LIMIT_HEAD) {
        return usage_error(err,
                           "%d attention heads of size %d: the size must be a multiple of %d and at most %d "
                           "on GPUs; choose another --num-attention-heads",
                           NH, HD, multiple, LIMIT_HEAD);
    }
    if (F % multiple) {
        return usage_error(err, "--ffn-hidden-size %d must be a multiple of %d on GPUs; change it", F,
                           multiple);
    }
    if (V % multiple) {
        return usage_error(err,
                           "the padded vocabulary of %d rows must be a multiple of %d on GPUs; use "
                           "--make-vocab-size-divisible-by 128 (the default) or another multiple of %d",
                           V, multiple, multiple);
    }
    if (N > INT_MAX) {  // row indices are 32-bit
        return usage_error(
            err,
            "a micro-batch has %lld tokens, but a GPU supports at most %d; use a smaller --micro-batch-size",
            (long long)N, INT_MAX);
    }
    return true;
}

// --- attention -----------------------------------------------------------------------------------

// Returns true if attention uses cuDNN's kernels for samples of equal length.
static inline bool limits_dense(int T, bool documents) { return !documents && T % 64 == 0; }

// Returns true if attention uses cuDNN's kernels for packed sequences of any length. In
// deterministic mode they store the (T, T) gradients of the scores for every sequence. They have no
// dropout in windows, and refuse batches of single tokens.
static inline bool limits_packed(int T, bool deterministic, bool dropout, bool window) {
    return T > 1 && !deterministic && !(dropout && window);
}

// See op_attention_notice.
static inline void limits_attention_notice(int T, bool documents, const char *unpacked, char *text,
                                           size_t bytes) {
    *text = '\0';
    if (limits_dense(T, documents) || !unpacked) return;
    snprintf(text, bytes,
             "attention uses this program's own kernels; compared with cuDNN, a step takes at least 5.6 %% "
             "(1.3B) or 11 %% (125M) longer, see dev/bench/NOTES.md; cuDNN is used without %s",
             unpacked);
}

// --- scratch memory ------------------------------------------------------------------------------

// Minimum size of the scratch memory in bytes; micro-batches of millions of rows need more. The
// backward pass of the embedding stores sorted keys, row indices and sorted row indices (N each),
// the sort's memory, and two fp32 rows per chunk of rows that a warp sums. LayerNorm's backward
// pass uses as much of it as is available.
#define SCRATCH_LEAST ((size_t)64 << 20)
enum { CHUNK_ROWS = 32, CHUNKS_LEAST = 256 };

static inline size_t scratch_aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }
static inline size_t scratch_ids_bytes(int64_t N) { return scratch_aligned((size_t)N * sizeof(int32_t)); }
static inline size_t scratch_chunk_bytes(int C) { return 2 * (size_t)C * sizeof(float); }
// Upper bound for the memory of CUB's radix sort of N pairs: a copy of the pairs, and counters.
static inline size_t scratch_sort_bytes(int64_t N) { return 10 * (size_t)N + ((size_t)4 << 20); }

// Returns the number of chunks of at least CHUNK_ROWS rows whose sums fit into SCRATCH_LEAST. The
// summation order depends on it, so changing it changes results.
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
