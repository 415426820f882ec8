// Reads token shards, Megatron's IndexedDataset format: <prefix>.bin holds the token ids,
// <prefix>.idx the index. preprocess_data and merge_datasets write them (dev/lib/shard_writer.h).
//
// The index, little-endian and packed, for N sequences and M document boundaries:
//     at 0          9 bytes  SHARD_MAGIC
//     at 9          u64      version, 1
//     at 17         u8       dtype code
//     at 18, 26     u64      N, M
//     at 34         i32[N]   sequence lengths in tokens
//     at 34 + 4N    i64[N]   byte offset of each sequence in the .bin
//     at 34 + 12N   i64[M]   first sequence of each document; first 0, last N
//     then          i8[N]    "modes", only in multimodal shards; ignored
#pragma once
#include <stdio.h>

#include "llmc/base/base.h"
LLMC_BEGIN

#define SHARD_MAGIC "MMIDIDX\0"
enum { SHARD_MAGIC_BYTES = sizeof SHARD_MAGIC, SHARD_HEADER_BYTES = 34 };

// Loss masks of the shard <prefix>, written by preprocess_data --chat, are a shard of the same
// sequences: <prefix>_loss_mask. One byte per token: 1 if the loss counts it as a target, else 0.
#define SHARD_MASK_SUFFIX "_loss_mask"

// dtype codes that can hold token ids.
enum { SHARD_U8 = 1, SHARD_I8 = 2, SHARD_I16 = 3, SHARD_I32 = 4, SHARD_I64 = 5, SHARD_U16 = 8 };

// Bytes per token of a dtype code; 0 for codes that cannot hold token ids.
int shard_dtype_size(int dtype);
// dtype code that Megatron's writer picks: u16 below 65500 ids, else i32.
int shard_dtype_for_vocab(int64_t vocab_size);

typedef struct Shard {
    char *prefix;          // without .bin/.idx, for error messages
    int dtype;             // SHARD_*
    int64_t sequences;     // N
    int64_t documents;     // entries in the document-boundary array, minus 1
    int64_t tokens;        // sum of the sequence lengths
    const uint8_t *index;  // mapped .idx file, index_bytes long
    const uint8_t *data;   // mapped .bin file, data_bytes long
    size_t index_bytes, data_bytes;
    uint8_t last[8];  // last bytes of the .bin when it was opened; fewer if it is shorter
} Shard;

// Maps both files read-only and validates them in one pass:
// - magic, version and dtype
// - exact size of the .idx (a trailing N-byte mode array is accepted) and of the .bin
// - lengths >= 0, each pointer equal to the sum of the preceding lengths
// - document boundaries from 0 to N, non-decreasing
// Errors (EXIT_DATA) name the file, the fault and its position. Truncating a file while it is open
// ends the job (mapped.c).
bool shard_open(Shard *shard, const char *prefix, Error *err);
void shard_close(Shard *shard);
// First sequence of a document, 0 <= document <= shard->documents; the entry past the last document
// is the number of sequences.
int64_t shard_boundary(const Shard *shard, int64_t document);
// Number of tokens of a sequence | position of its first token in the .bin, in tokens.
int64_t shard_length(const Shard *shard, int64_t sequence);
int64_t shard_position(const Shard *shard, int64_t sequence);
// Ends the job (mapped.c) if one of the two files has been truncated. Call it after reads that must
// not silently return zeros: when a file is truncated, accesses to removed pages raise SIGBUS, but
// the rest of the last page reads as zeros. Compares the ends of both files with their contents at
// open time, in memory.
void shard_check_whole(const Shard *shard);
// Hash of the shard's sizes and of the first and last 64 KiB of both files. Equal for copies of a
// shard.
uint64_t shard_fingerprint(const Shard *shard);
// Prefetches the length of a sequence, for reading lengths in random order.
void shard_prefetch_length(const Shard *shard, int64_t sequence);
// Copies count tokens, starting at token `position` of the .bin, to out, widened to int32. Ids
// above INT32_MAX become -1, which the loader's range check reports.
void shard_read(const Shard *shard, int64_t position, int64_t count, int32_t *out);

// --- mapped.c: lost files ------------------------------------------------------------------------

// Handles SIGBUS from mapped files that are truncated, or whose disk fails, while they are read.
// Without it the process would die without a message; guarded ranges end the job with EXIT_DATA and
// one line that names the file. Called by shard.c (which maps) and loader.c (which sets the site).

// Guards [start, start + bytes): a failing read ends the job through fatal() with a message that
// starts with `path` (copied). No-op for 0 bytes.
void mapped_guard(const void *start, size_t bytes, const char *path);
// Ends the job in the same way, for callers that detect that a guarded file has changed. at: any
// address in its range.
void mapped_lost(const void *at) __attribute__((noreturn));
// Removes the guard; call it before munmap, because the addresses may be reused.
void mapped_release(const void *start);
// Sets the rank to name in the message; NULL (the default): a program without ranks.
void mapped_set_site(const Site *site);

LLMC_END
