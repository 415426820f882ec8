// Division of whole matrices among shards. Some optimizers need all elements of a matrix
// (LayoutTensor.work). Then a shard holds whole matrices, and a bucket is padded to dp times the
// fullest shard. A bucket of more units can be divided more evenly. Called by layout.c.
#pragma once
#include "sdp4bit/layout_tensor.h"

// Matrices to divide: all matrices of units [first, end).
typedef struct WholeUnits {
    const LayoutTensor *tensors;
    int count, first, end;
    int64_t alignment;  // of each matrix
    int64_t multiple;   // shards are multiples of it
    int dp;
} WholeUnits;

// Divides the matrices into dp shards, with small shards: each to the shard with the fewest
// elements, unless a search for the lowest capacity into which they fit finds smaller shards
// (multifit). Returns the shard size. shard: (count) receives the shard of each matrix of these
// units, and -1 for other tensors; may be NULL.
int64_t whole_divide(const WholeUnits *units, int *shard);

// Exchanges matrices of equal size and work between shards, so that every shard fills up with the
// layers: each matrix, in order of units, goes to the shard with the fewest elements so far, among
// those that hold such a matrix. Then the end of all shards belongs to late layers, whose gradients
// are complete first. shard: of whole_divide; size and work of the shards do not change.
void whole_spread(const WholeUnits *units, int *shard);

// Returns the number of buckets, at most `most`, into which the units should be divided as evenly
// as possible. Padding is sent, but small buckets overlap better with backward. So it minimizes the
// padded elements plus a quarter of a mean bucket, among the numbers that need at most 1/12 of
// padding; if there are none, the padded elements. On a tie it returns the larger number.
// Bucket i gets units first + n i / buckets .. first + n (i + 1) / buckets - 1 of n.
int whole_buckets(const WholeUnits *units, int most);

// Gives the shards of a bucket to ranks: the shard with the most work to the rank with the least
// work so far. Rank 0 gets matrices, because the first segment of a bucket must start at 0.
// work: (dp) work of all earlier buckets; adds the work of this one. rank_of: (dp) receives the
// rank of each shard.
void whole_assign(const WholeUnits *units, const int *shard, int64_t *work, int *rank_of);
