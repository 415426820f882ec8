// The bf16 model weights of a rank, and how a layer's weights are gathered.
//
// The store is chosen when the run is planned:
//   replicated  every rank holds the whole bucket between steps (ZeRO-1 and 2; always bucket 0, the
//               embeddings, which forward and backward both begin or end with)
//   node        the ranks of a node share one replica (--shard-params-over node): a rank holds the
//               shards of the ranks with its place in every node
//   world       all data-parallel ranks share one replica: a rank holds its own shard. What is sent
//               is the payload of the latest update, between nodes first, then inside the node, so
//               that forward sees what the replicated store would hold. Weights that no update has
//               produced yet (drawn or loaded) are sent as they are. With --secondary-partition a
//               node keeps what forward has gathered, and backward gathers it there.
// Gathered buckets use two slots in turn: the next layer's bucket is prefetched into the other one.
//
// Called by the files of llmc/state.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/state/base.h"
#include "sdp4bit/qwd.h"
LLMC_BEGIN

enum { WEIGHT_SLOTS = 2 };

typedef struct Weights Weights;

// How the weights of a bucket are stored.
typedef struct WeightStore {
    const char *name;
    bool gathers;  // the bucket must be gathered before use
    // The whole bucket (matrix_elements + tail_elements): valid after weights_wait.
    floatX *(*full)(const Base *base, const Weights *weights, int b);
    // What this rank holds between steps, and its elements.
    floatX *(*kept)(const Base *base, const Weights *weights, int b, int64_t *elements);
    // Shard `owner` (of Base.state) in that; NULL pointers if this rank doesn't hold it.
    WeightShard (*shard)(const Base *base, const Weights *weights, int b, int owner);
    // The data-parallel rank whose shard is number i of those that this rank holds.
    int (*owner)(const Base *base, int i);
    // Gathers the bucket into its slot, on weights->stream.
    void (*gather)(const Base *base, Weights *weights, int b, bool backward);
    // Where the payloads of an update are gathered.
    GatherBuffer (*buffer)(const Base *base, const Weights *weights, int b);
    // Ranks that hold equal copies of what this rank holds.
    const Group *(*holders)(const Mesh *mesh);
    // Ranks whose parts add up to a replica.
    const Group *(*sharers)(const Mesh *mesh);
} WeightStore;
extern const WeightStore weights_replicated, weights_node, weights_world;

// Shards of several ranks, bucket by bucket: (shards) of matrix_per_rank, then (shards) of
// tail_per_rank.
typedef struct WeightParts {
    int shards;
    floatX *memory;  // NULL if unused
    int64_t *start;  // (buckets) first element of a bucket
} WeightParts;

struct Weights {
    const WeightStore *layers;        // of all buckets but bucket 0
    floatX *arena;                    // (plan.arena_elements), or bucket 0 alone: replicated buckets
    Event **done;                     // (buckets) the latest update's weights have been written
    bool *pending;                    // (buckets) compute has not waited for that yet
    uint8_t *gather[LANE_SLOTS];      // buffers of the update's all-gather, which buckets use in turn
    size_t gather_bytes[LANE_SLOTS];  // the first one ends with the payload lengths of lossless weights
    // stores that gather
    WeightParts kept;               // between steps
    floatX *slot[WEIGHT_SLOTS];     // bucket b is gathered into slot b % 2
    int held[WEIGHT_SLOTS];         // bucket in the slot or on its way, of the latest update; -1: none
    bool coming[WEIGHT_SLOTS];      // compute has not waited for it yet
    Stream *stream;                 // of the gathers
    Event *gathered[WEIGHT_SLOTS];  // the slot is filled
    Event *used;                    // compute's work when the latest gather was requested
    CommRow *row;                   // (2 * nodes) of the gather in progress
    // the world store
    uint8_t *buffer;         // (dp) payloads of the gather in progress
    StepStatus *always;      // device (1): the status of a step that was applied
    uint8_t *message;        // this rank's payloads of the latest update; NULL: plain weights are sent
    int64_t *message_start;  // (buckets)
    bool messages_valid;     // an update has written them since the weights were last set
    WeightParts secondary;   // --secondary-partition
    bool *filled;            // (buckets) the secondary partition is valid
};

// The store of bucket b, of this rank or of one with more buckets.
static inline const WeightStore *weights_store(const Weights *weights, int64_t b) {
    return b == 0 ? &weights_replicated : weights->layers;
}
// Reserves memory for the store that the configuration asks for. Before weights_start.
void weights_reserve(const Base *base, Weights *weights, MemoryPlan *memory_plan);
// For a rank that never trains: the replicated store, without events.
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
// This rank's own shard of the bucket.
WeightShard weights_own(const Base *base, const Weights *weights, int b);
// First weight of a range of this rank's shard.
floatX *weights_of_range(const Base *base, const Weights *weights, const Range *range);
// A tensor's elements in the i-th shard that this rank holds, as one range of its part of the
// tensor: *first and *count. NULL if there are none. i < weights->kept.shards. A replicated tensor
// is one range, with i = 0.
floatX *weights_of_tensor(const Base *base, const Weights *weights, int tensor, int i, int64_t *first,
                          int64_t *count);
floatX *weights_tensor(const Base *base, const Weights *weights, int tensor);
// The whole tensor has been written at weights_tensor: keeps this rank's part. On compute.
void weights_keep_tensor(const Base *base, Weights *weights, int tensor);

// Makes compute wait for the bucket of `unit`, gathering it first if needed. next: the unit wanted
// after it, whose bucket is prefetched; -1: none. Idempotent. Collective over mesh->shards and
// mesh->shard_rail.
void weights_wait(const Base *base, Weights *weights, int unit, int next, bool backward);
// Waits for the latest update of every bucket. Gathers nothing.
void weights_wait_all(const Base *base, Weights *weights);
// The update of bucket b has been queued on `stream`.
void weights_updated(Weights *weights, int b, Stream *stream);
// The kept weights change: gathered copies are stale.
void weights_invalidate(const Base *base, Weights *weights);
// The kept weights were drawn, loaded or repaired: the latest update's payloads are stale too.
void weights_replaced(const Base *base, Weights *weights);
// Later work of lanes->last sees what the checks of the gathers have found.
void weights_checked(const Base *base, Weights *weights);

LLMC_END
