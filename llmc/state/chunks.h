// Canonical chunks of the parameters, for elastic replica groups (llmc/groups/member.h).
//
// Replica groups may have different numbers of ranks, tensor- and pipeline-parallel sizes and
// sharding strategies. They exchange chunks: the embeddings, then one or several whole layers each.
// A chunk's layout depends on the model and the codec only:
//
//   chunk = [ matrices, each padded to the group size | 1-D tensors ]
//
// Rank 0 encodes and sends the pseudo-gradient of a whole chunk, which it gathers from the ranks
// that count the elements (Tensor.counted). Every rank decodes the contributions of a closed round
// and runs the outer step on the ranges that it holds. The results do not depend on the layout, so
// outer weights and momentum are bitwise identical in all groups. They are in the shards of
// local_steps.h.
//
// Functions are collective over the group's ranks and called between two steps. Called by
// llmc/run/elastic.c.
#pragma once
#include "llmc/state/zero.h"
LLMC_BEGIN

typedef struct Chunks Chunks;

// Bytes before a message and before a chunk's state, for the caller's headers.
enum { CHUNK_HEADER_BYTES = 64 };

// Lists the chunks and reserves their buffers. whole: (count) tensors of the whole model. Error:
// EXIT_USAGE.
Chunks *chunks_plan(Zero *zero, const Tensor *whole, int count, MemoryPlan *plan, Error *err);
// Uploads tables and gathers the ranges of all ranks on rank 0. Call it after zero_start.
void chunks_start(Chunks *chunks, Peers world);
// NULL is allowed.
void chunks_free(Chunks *chunks);

int chunks_count(const Chunks *chunks);
// Returns the number of elements of a chunk with padding, and in total before `chunk`.
int64_t chunks_elements(const Chunks *chunks, int chunk);
int64_t chunks_before(const Chunks *chunks, int chunk);
// Returns the bytes of an encoded pseudo-gradient.
int64_t chunks_message_bytes(const Chunks *chunks, int chunk);
// Return the bytes of a header with a message, and of a header with a chunk's state.
int64_t chunks_payload_bytes(const Chunks *chunks, int chunk);
int64_t chunks_state_bytes(const Chunks *chunks, int chunk);
// Return host memory for the payload of a chunk (NULL except on rank 0), and for the state of any
// chunk.
uint8_t *chunks_payload(const Chunks *chunks, int chunk);
uint8_t *chunks_state(const Chunks *chunks);
// Returns the format of messages.
const GradFormat *chunks_format(const Chunks *chunks);
// Returns a hash of the names and sizes of all tensors, the chunks and the codec.
uint64_t chunks_layout_hash(const Chunks *chunks);

// Encodes outer weights minus master weights. key, source: select the rounding bits. message:
// (chunks_message_bytes) of host_alloc on rank 0, else ignored. It is complete after
// chunks_encoded.
void chunks_encode(Chunks *chunks, int chunk, uint32_t key, uint32_t source, uint8_t *message, Peers world);
// Blocks the host until the message of the latest chunks_encode is complete.
void chunks_encoded(Chunks *chunks);

// A contribution to a round.
typedef struct ChunkPart {
    uint32_t key;            // of chunks_encode
    float weight;            // all weights of a round add up to 1
    bool own;                // of this group
    const uint8_t *message;  // (chunks_message_bytes)
} ChunkPart;
// Parameters of an outer step. damping: factor of the mean pseudo-gradient in the momentum.
typedef struct OuterRates {
    float rate, momentum, damping;
} OuterRates;
// Runs the outer step with the weighted mean of the contributions, in this order. The master
// weights move by the change of the outer weights, plus the decoded own contribution: see
// MergeOuter in kernels.h. Asynchronous.
void chunks_merge(Chunks *chunks, int chunk, const ChunkPart *parts, int count, OuterRates rates);
// Returns the hash of every chunk's outer weights and momentum after its latest merge, which is
// equal in all groups. Valid until the next call.
const uint64_t *chunks_hashes(Chunks *chunks, Peers world);

// Copies outer weights, then momentum, of a whole chunk to rank 0. state: (2 * chunks_elements) on
// rank 0; padding is 0.
void chunks_get_state(Chunks *chunks, int chunk, float *state, Peers world);
// Sets outer weights and momentum to another group's. state: on all ranks.
// join: also sets the master weights and the model weights to the outer weights. Otherwise the
// master weights move by the change of the outer weights, and by the decoded contribution `counted`
// that other groups have already merged; NULL: none.
void chunks_set_state(Chunks *chunks, int chunk, const float *state, bool join, const ChunkPart *counted);

LLMC_END
