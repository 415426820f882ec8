// The bf16 model weights of a rank, and the all-gather of a layer's weights.
//
// The store is chosen when the run is planned:
//   replicated  Every rank holds whole buckets (ZeRO-1 and 2). Always used for bucket 0, the
//               embeddings, which are needed at both ends of a pass.
//   node        Weights are sharded within a node (--shard-params-over node): a rank holds the
//               shards of the ranks on its rail.
//   world       Weights are sharded over all data-parallel ranks: a rank holds its own shard. The
//               gather sends the payloads of the latest update, between nodes first, then inside
//               the node, so passes see the same weights as with the replicated store. Initial or
//               loaded weights are sent unquantized. With --secondary-partition a node keeps the
//               weights gathered by the forward pass, so backward gathers inside the node.
// Gathered buckets alternate between two slots, so that the next layer's bucket can be prefetched.
//
// Called by the files of llmc/state.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/state/state_base.h"
#include "sdp4bit/qwd.h"
LLMC_BEGIN

enum { WEIGHT_SLOTS = 2 };

typedef struct Weights Weights;

typedef struct WeightStore {
    bool gathers;  // the bucket must be gathered before use
    // Returns the whole bucket (matrix_elements + tail_elements), valid after weights_wait.
    floatX *(*full)(const Base *base, const Weights *weights, int b);
    // Returns the weights that this rank holds between steps. *elements: their number.
    floatX *(*kept)(const Base *base, const Weights *weights, int b, int64_t *elements);
    // Returns shard `owner` (of Base.state) of these weights; NULL pointers if not on this rank.
    WeightShard (*shard)(const Base *base, const Weights *weights, int b, int owner);
    // Returns the data-parallel rank that owns shard i of these weights.
    int (*owner)(const Base *base, int i);
    // Gathers the bucket into its slot, on weights->stream.
    void (*gather)(const Base *base, Weights *weights, int b, bool backward);
    // Returns the buffer for the all-gather of an update.
    GatherBuffer (*buffer)(const Base *base, const Weights *weights, int b);
    // Returns the ranks that hold the same weights as this rank.
    const Group *(*holders)(const Mesh *mesh);
    // Returns the ranks that together hold all weights.
    const Group *(*sharers)(const Mesh *mesh);
} WeightStore;
extern const WeightStore weights_replicated, weights_node, weights_world;

// Shards of several ranks; per bucket (shards, matrix_per_rank), then (shards, tail_per_rank).
typedef struct WeightParts {
    int shards;
    floatX *memory;  // NULL if unused
    int64_t *start;  // (buckets) first element of a bucket
} WeightParts;

typedef struct WeightBucket {
    Event *done;            // the latest update's weights have been written
    bool pending;           // compute has not waited for `done` yet
    int64_t message_start;  // world store: offset of the bucket's payload in `message`
    bool filled;            // the secondary partition is valid
} WeightBucket;

struct Weights {
    WeightBucket *bucket;             // (buckets)
    const WeightStore *layers;        // store of all buckets except bucket 0
    floatX *arena;                    // replicated buckets: (layout.arena_elements), or only bucket 0
    uint8_t *gather[LANE_SLOTS];      // buffers of the update's all-gather; buckets alternate
    size_t gather_bytes[LANE_SLOTS];  // gather[0] ends with the payload lengths of lossless weights
    // stores that gather
    WeightParts kept;               // shards that this rank holds between steps
    floatX *slot[WEIGHT_SLOTS];     // bucket b is gathered into slot b % 2
    int held[WEIGHT_SLOTS];         // bucket that is, or is being, gathered into the slot; -1: none
    bool coming[WEIGHT_SLOTS];      // compute has not waited for `gathered` yet
    Stream *stream;                 // stream of the gathers
    Event *gathered[WEIGHT_SLOTS];  // the slot is filled
    Event *used;                    // recorded on compute when the latest gather was requested
    CommRow *row;                   // (2 * nodes) rows of the gather in progress
    // the world store
    uint8_t *buffer;        // (dp) payloads of the gather in progress
    StepStatus *always;     // device (1): constant status of an applied step, for the gathers
    uint8_t *message;       // this rank's payloads of the latest update; NULL: gathers send plain weights
    bool messages_valid;    // an update has written `message` since the weights were last replaced
    WeightParts secondary;  // --secondary-partition
};

// Returns the store of bucket b, which may be another rank's bucket: all ranks use the same stores.
static inline const WeightStore *weights_store(const Weights *weights, int64_t b) {
    return b == 0 ? &weights_replicated : weights->layers;
}
// Chooses the stores and reserves their memory.
void weights_reserve(const Base *base, Weights *weights, MemoryPlan *memory_plan);
void weights_start(const Base *base, Weights *weights);
void weights_free(const Base *base, Weights *weights);

static inline floatX *weights_full(const Base *base, const Weights *weights, int b) {
    return weights_store(weights, b)->full(base, weights, b);
}
static inline floatX *weights_kept(const Base *base, const Weights *weights, int b, int64_t *elements) {
    return weights_store(weights, b)->kept(base, weights, b, elements);
}
static inline WeightShard weights_shard(const Base *base, const Weights *weights, int b, int owner) {
    return weights_store(weights, b)->shard(base, weights, b, owner);
}
static inline GatherBuffer weights_buffer(const Base *base, const Weights *weights, int b) {
    return weights_store(weights, b)->buffer(base, weights, b);
}
// Returns this rank's shard of the bucket.
WeightShard weights_own(const Base *base, const Weights *weights, int b);
// Returns the first weight of a range of this rank's shard.
floatX *weights_of_range(const Base *base, const Weights *weights, const Range *range);
// Returns the elements of a tensor in the i-th shard that this rank holds (i <
// weights->kept.shards), or NULL if there are none. *first, *count: the range of these elements
// within the tensor. For a replicated tensor, i = 0 returns all elements.
floatX *weights_of_tensor(const Base *base, const Weights *weights, int tensor, int i, int64_t *first,
                          int64_t *count);
floatX *weights_tensor(const Base *base, const Weights *weights, int tensor);
// Copies this rank's shards out of weights_tensor, where the caller has written the whole tensor.
void weights_keep_tensor(const Base *base, Weights *weights, int tensor);

// Makes compute wait for the bucket of `unit`, which is gathered first if needed. next: see
// zero_weights_wait. Idempotent. Collective over mesh->shards and mesh->shard_rail.
void weights_wait(const Base *base, Weights *weights, int unit, int next, bool backward);
// Makes compute wait for the latest update of every bucket. Gathers nothing.
void weights_wait_all(const Base *base, Weights *weights);
// Called when the update of bucket b has been queued on `stream`.
void weights_updated(Weights *weights, int b, Stream *stream);
// Discards gathered weights. Called before the weights that this rank holds change.
void weights_invalidate(const Base *base, Weights *weights);
// Also discards the latest payloads. Called when weights are initialized, loaded or repaired.
void weights_replaced(const Base *base, Weights *weights);
// Makes lanes->last wait until the checksums of all gathers have been verified.
void weights_checked(const Base *base, Weights *weights);

LLMC_END
