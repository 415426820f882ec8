// Comparing and repairing the replicas: see replicas.h.
#include "llmc/state/replicas.h"

#include <stdio.h>
#include <stdlib.h>

#include "llmc/ranks/peers.h"
#include "llmc/state/zero_inside.h"

enum { PIECE = 1 << 22 };  // elements that travel at a time in a repair

// One call's view.
typedef struct Check {
    Zero *zero;
    Peers group;
    int rank, size, buckets;
    uint64_t *hash;   // (size, buckets) of all ranks
    floatX *weights;  // (PIECE) on the host
    float *masters;   // (PIECE)
} Check;

static const Bucket *bucket_of(const Check *c, int b) { return &c->zero->plan.bucket[b]; }

// All ranks' hashes of all buckets.
static void gather_hashes(Check *c) {
    Zero *zero = c->zero;
    uint64_t *own = (uint64_t *)xcalloc((size_t)c->buckets, sizeof *own, "replica hashes");
    zero_weights_wait_all(zero);
    set_zero(zero->compute, zero->hash, (size_t)c->buckets * sizeof(uint64_t));
    for (int b = 0; b < c->buckets; b++) {
        const Bucket *bucket = bucket_of(c, b);
        kernel_replica_hash(zero->compute, zero->hash + b, zero->weights + bucket->arena_start,
                            bucket->arena_start, bucket->matrix_elements + bucket->tail_elements);
    }
    copy_to_host(zero->compute, own, zero->hash, (size_t)c->buckets * sizeof(uint64_t));
    stream_synchronize(zero->compute);
    peers_gather(c->group, own, c->hash, c->buckets, MPI_UINT64_T);
    free(own);
}

static uint64_t hash_at(const Check *c, int rank, int b) { return c->hash[(int64_t)rank * c->buckets + b]; }

static int ranks_like(const Check *c, int rank, int b) {
    int count = 0;
    for (int r = 0; r < c->size; r++) count += hash_at(c, r, b) == hash_at(c, rank, b);
    return count;
}

// The lowest rank whose version more than half of the ranks have, or -1.
static int majority(const Check *c, int b) {
    for (int r = 0; r < c->size; r++) {
        if (2 * ranks_like(c, r, b) > c->size) return r;
    }
    return -1;
}

static void broadcast(const Check *c, int64_t n, int root) {
    peers_broadcast(c->group, c->weights, (size_t)n * sizeof(floatX), root);
}

// Everyone who differs takes root's version.
static void take_from(const Check *c, int b, int root) {
    const Bucket *bucket = bucket_of(c, b);
    Zero *zero = c->zero;
    int64_t all = bucket->matrix_elements + bucket->tail_elements;
    for (int64_t at = 0; at < all; at += PIECE) {
        int64_t n = all - at < PIECE ? all - at : PIECE;
        floatX *weights = zero->weights + bucket->arena_start + at;
        if (c->rank == root) copy_to_host(zero->compute, c->weights, weights, (size_t)n * sizeof(floatX));
        stream_synchronize(zero->compute);
        broadcast(c, n, root);
        if (hash_at(c, c->rank, b) != hash_at(c, root, b))
            copy_to_device(zero->compute, weights, c->weights, (size_t)n * sizeof(floatX));
        stream_synchronize(zero->compute);
    }
}

// n weights at arena position `arena` become owner's masters at `state`, rounded.
static void take_masters(const Check *c, int owner, int64_t arena, int64_t state, int64_t n) {
    Zero *zero = c->zero;
    for (int64_t at = 0; at < n; at += PIECE) {
        int64_t part = n - at < PIECE ? n - at : PIECE;
        if (c->rank == owner) {
            copy_to_host(zero->compute, c->masters, zero->master + state + at, (size_t)part * sizeof(float));
            stream_synchronize(zero->compute);
            for (int64_t i = 0; i < part; i++) c->weights[i] = floatX_from_float(c->masters[i]);
        }
        broadcast(c, part, owner);
        copy_to_device(zero->compute, zero->weights + arena + at, c->weights, (size_t)part * sizeof(floatX));
        stream_synchronize(zero->compute);
    }
}

static void refresh(const Check *c, int b) {
    const Bucket *bucket = bucket_of(c, b);
    for (int owner = 0; owner < c->size; owner++) {
        take_masters(c, owner, bucket->arena_start + owner * bucket->matrix_per_rank, bucket->state_start,
                     bucket->matrix_per_rank);
        take_masters(c, owner, bucket->arena_start + bucket->matrix_elements + owner * bucket->tail_per_rank,
                     bucket->state_start + bucket->matrix_per_rank, bucket->tail_per_rank);
    }
}

// "2, 5": the ranks that differ from root, or all when there is no majority. Cut where there are
// too many.
static void list_ranks(const Check *c, int b, int root, char *text, size_t bytes) {
    size_t used = 0;
    *text = '\0';
    for (int r = 0; r < c->size && used < bytes; r++) {
        if (root >= 0 && hash_at(c, r, b) == hash_at(c, root, b)) continue;
        used += (size_t)snprintf(text + used, bytes - used, "%s%d", used ? ", " : "", r);
    }
}

static void report(const Check *c, int b, int root, int64_t repairs, Log *log) {
    char ranks[256];
    long long iteration = c->zero->step;
    const Bucket *bucket = bucket_of(c, b);
    list_ranks(c, b, root, ranks, sizeof ranks);
    if (root >= 0) {
        log_line(log,
                 "WARNING: iteration %lld: the weights of rank %s differ from those of %d of %d ranks in "
                 "bucket %d (layers %d to %d): taken from rank %d (repair %lld of this run)",
                 iteration, ranks, ranks_like(c, root, b), c->size, b, bucket->first_unit,
                 bucket->end_unit - 1, root, (long long)repairs);
    } else {
        log_line(log,
                 "WARNING: iteration %lld: the weights of ranks %s differ in bucket %d (layers %d to %d), "
                 "and no version is that of most: all take the masters, rounded "
                 "(repair %lld of this run)",
                 iteration, ranks, b, bucket->first_unit, bucket->end_unit - 1, (long long)repairs);
    }
    Text json = json_begin("repair");
    json_integer(&json, "iteration", iteration);
    json_integer(&json, "bucket", b);
    json_text(&json, "ranks", ranks);
    if (root >= 0) {
        json_integer(&json, "from", root);
    } else {
        json_name(&json, "from");
        text_add(&json, "null");
    }
    log_json(log, &json);
}

static bool equal_everywhere(const Check *c, int b) { return ranks_like(c, 0, b) == c->size; }

// Repairs what differs; returns whether anything did.
static bool repair(Check *c, Log *log, int64_t *repairs) {
    bool any = false;
    for (int b = 0; b < c->buckets; b++) {
        if (equal_everywhere(c, b)) continue;
        int root = majority(c, b);
        report(c, b, root, ++*repairs, log);
        if (!any) {
            c->weights = (floatX *)xmalloc(PIECE * sizeof(floatX), "the repair of a replica");
            c->masters = (float *)xmalloc(PIECE * sizeof(float), "the repair of a replica");
        }
        any = true;
        if (root >= 0) take_from(c, b, root);
        else refresh(c, b);
    }
    return any;
}

bool replicas_verify(Zero *zero, Peers group, Log *log, int64_t *repairs, Error *err) {
    Check c = {zero, group, zero->mesh->dp.rank, zero->plan.dp, zero->plan.buckets, NULL, NULL, NULL};
    if (c.size == 1) return true;
    c.hash = (uint64_t *)xcalloc((size_t)c.size * (size_t)c.buckets, sizeof(uint64_t), "replica hashes");
    int bad = -1;
    gather_hashes(&c);
    if (repair(&c, log, repairs)) {
        gather_hashes(&c);
        for (int b = 0; b < c.buckets && bad < 0; b++) bad = equal_everywhere(&c, b) ? -1 : b;
    }
    free(c.hash);
    free(c.weights);
    free(c.masters);
    return bad < 0 || error_set(err, EXIT_COMMUNICATION,
                                "the ranks' weights in bucket %d differ even after their repair: the memory "
                                "of some rank cannot be trusted; look at the hosts, "
                                "and restart from the last checkpoint",
                                bad);
}
