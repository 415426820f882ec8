// Optimizer state of a rank in a scratch file (--optimizer-disk-offload). A bucket's state is cut
// into chunks. The update of a chunk takes place in one of four slots of page-locked memory:
//
//   chunk      k-2      k-1      k        k+1      k+2
//              written  written  updated  read     read
//
// Chunks are in the order of the updates. The first two chunks of a step are read after the last
// update of the previous step, and the last two are written meanwhile, so both overlap with forward
// and backward. In the file the master weights, first and second moments of a chunk are adjacent,
// each padded to SCRATCH_ALIGN bytes. Buckets of whole matrices (Muon) have a chunk per matrix, so
// that it is in memory as a whole; these have no second moments, and with momentum_bf16 their first
// moments are in bf16.
//
// Called by optimizer.c, on the thread that runs the update or the main thread; a mutex orders
// them.
#pragma once
#include <pthread.h>

#include "llmc/state/scratch_file.h"
#include "sdp4bit/kernels.h"
LLMC_BEGIN

typedef enum StatePart { STATE_MASTER, STATE_EXP_AVG, STATE_EXP_AVG_SQ, STATE_PARTS } StatePart;

enum { DISK_SLOTS = 4, DISK_AHEAD = 2, DISK_CHUNK_ELEMENTS = 4 << 20 };

// A position in the list of a step's chunks.
typedef struct DiskChunk {
    int bucket, parts;       // parts: STATE_PARTS, or 2 without second moments
    int tensor;              // whole matrix in this chunk, which starts with it; -1: none
    int64_t first, count;    // elements of the bucket's state
    int64_t offset, padded;  // position in the file; bytes of an fp32 part with padding
} DiskChunk;

typedef struct DiskState {
    bool momentum_bf16;  // set by the caller of disk_plan
    const BucketLayout *layout;
    DiskChunk *chunk;       // (chunks)
    int64_t *bucket_chunk;  // (buckets + 1) index of a bucket's first chunk
    int64_t *squares;       // (buckets) index of a bucket's first second moment
    int64_t chunks, chunk_elements, file_bytes;
    int64_t slot_bytes, bounce_bytes;  // of the largest chunk: all parts, one part
    ScratchFolder folder;              // set by the caller of disk_start
    // set by disk_start
    ScratchFile *file;  // NULL: not started
    uint8_t *slots;     // (DISK_SLOTS, slot_bytes), SCRATCH_ALIGN-byte aligned
    uint8_t *bounce;    // (bounce_bytes) for reads and writes of the main thread
    pthread_mutex_t mutex;
    int64_t updated, read;  // chunks of all steps so far: updated, reads started
} DiskState;

// Cuts the state of a shard into chunks of about chunk_elements elements, or of a whole matrix.
// They hold whole groups of `group` weights.
void disk_plan(DiskState *disk, const BucketLayout *layout, int shard, int group, int64_t chunk_elements);
// Bytes of page-locked memory that disk_start needs.
int64_t disk_memory_bytes(const DiskState *disk);
// Creates the zeroed file in disk->folder, which has been claimed. memory: (disk_memory_bytes). See
// scratch_open. Error: EXIT_ENVIRONMENT.
bool disk_start(DiskState *disk, void *memory, int threads, const Site *site, const ScratchEngine *engine,
                Error *err);
// Waits for all transfers. Call it before the memory is freed. No-op unless started.
void disk_stop(DiskState *disk);
// Closes the file, releases the folder and frees the chunk list.
void disk_free(DiskState *disk);
// Updates bucket b (HostUpdater of qwd.h); store: a DiskState. The buckets of a step in order.
void disk_update(void *store, int b, const UpdateShard *shard, int threads, const Site *site);
// Waits until the chunk that is updated next is in memory. Returns the shard with pointers to it.
UpdateShard disk_open_chunk(DiskState *disk, const UpdateShard *shard);
// Updates this chunk, or only codes it without shard->matrix_grads, and starts to write it.
void disk_update_chunk(DiskState *disk, const UpdateShard *shard, int threads, const Site *site);
// Convert between bf16 and fp32. `narrow` may be the second half of `wide` (n).
void widen_bf16(float *wide, const uint16_t *narrow, int64_t n);
void narrow_bf16(uint16_t *narrow, const float *wide, int64_t n);
// Copy n elements of a part of the state from element `at` on, which are in one bucket. Second
// moments count separately (base_squares_start), because matrices may have none.
void disk_read(DiskState *disk, StatePart part, int64_t at, float *host, int64_t n);
void disk_write(DiskState *disk, StatePart part, int64_t at, const float *host, int64_t n);

LLMC_END
