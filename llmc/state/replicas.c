// Comparison and repair of replicas: see zero.h. Every rank gathers the hashes of all ranks, so all
// ranks make the same decisions without further communication. Rank 0 logs the repairs.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/ranks/peers.h"
#include "llmc/state/zero.h"
#include "llmc/state/zero_parts.h"

enum { PIECE = 1 << 22 };  // elements that a repair sends at a time

// Hash of a tensor part. Parts with the same number and offset are copies of each other.
typedef struct Copy {
    int64_t number, offset;  // Tensor.number + 1 and Tensor.offset; number 0 marks an unused row
    int64_t bucket;
    uint64_t hash;  // replica hash, with positions counted within the part
} Copy;
enum { COPY_WORDS = 4 };
_Static_assert(sizeof(Copy) == COPY_WORDS * sizeof(int64_t), "copies are sent as words");

// Ranks that may hold copies of the same tensors: first + i * stride for i < size.
typedef struct Holders {
    int first, stride, size;
} Holders;

// State of one call of replicas_verify.
typedef struct Check {
    Zero *zero;
    const Mesh *mesh;
    Peers world;
    Log *log;
    int64_t *repairs;
    int buckets, tensors;  // maximum over all ranks
    uint64_t *hash;        // (world, buckets); 0 for buckets that a rank does not have
    Copy *copy;            // (world, tensors); NULL if no rank holds copies
    Holders *holders;      // (holder_count)
    int holder_count;
    bool *stale;      // (stages or replica groups, buckets) buckets to be set to the master weights
    floatX *weights;  // host (PIECE)
    float *master;    // host (PIECE)
} Check;

// --- ranks ---------------------------------------------------------------------------------------

static int stage_ranks(const Check *c) { return c->mesh->tp.size * c->mesh->dp.size; }
static int stage_of(const Check *c, int rank) { return rank / stage_ranks(c); }
static bool *stale_at(const Check *c, int rank, int64_t b) {
    return &c->stale[(int64_t)stage_of(c, rank) * c->buckets + b];
}
// Returns the ranks that hold the same weights of bucket b: all data-parallel ranks if it is
// replicated, a rail if it is sharded within nodes, one rank if it is sharded over all ranks.
static const Group *holders_of(const Check *c, int b) {
    return weights_store(&c->zero->weights, b)->holders(c->mesh);
}
// Returns replica i of the weights that `rank` holds of bucket b.
static int replica(const Check *c, int rank, int b, int i) { return group_peer(holders_of(c, b), rank, i); }

// Lists the tensor-parallel groups, and the pairs of ranks at the two ends of a pipeline.
static void list_holders(Check *c) {
    int T = c->mesh->tp.size, P = c->mesh->pp.size, world = c->mesh->world.size, ends = stage_ranks(c);
    c->holders = xcalloc((size_t)(world + ends), sizeof *c->holders, "replica hashes");
    for (int r = 0; T > 1 && r < world; r += T) c->holders[c->holder_count++] = (Holders){r, 1, T};
    for (int r = 0; P > 1 && r < ends; r++) c->holders[c->holder_count++] = (Holders){r, (P - 1) * ends, 2};
}

// --- hashes of all ranks -------------------------------------------------------------------------

static void gather_hashes(Check *c) {
    Zero *zero = c->zero;
    const BucketLayout *layout = &zero->base.layout;
    uint64_t *own = xcalloc((size_t)c->buckets, sizeof *own, "replica hashes");
    size_t bytes = (size_t)layout->buckets * sizeof(uint64_t);
    zero_weights_wait_all(zero);
    weights_invalidate(&zero->base, &zero->weights);
    set_zero(zero->base.compute, zero->hash, bytes);
    for (int b = 0; b < layout->buckets; b++) {
        int64_t elements;
        const floatX *weights = weights_kept(&zero->base, &zero->weights, b, &elements);
        kernel_replica_hash(zero->base.compute, zero->hash + b, weights, layout->bucket[b].arena_start,
                            elements);
    }
    copy_to_host(zero->base.compute, own, zero->hash, bytes);
    stream_synchronize(zero->base.compute);
    peers_all_gather(c->world, own, c->hash, c->buckets, MPI_UINT64_T);
    free(own);
}

// Sets the hash of a sharded tensor to the sum of its parts' hashes.
static void add_parts(Check *c) {
    const Group *sharers = c->zero->weights.layers->sharers(c->mesh);
    for (int rank = 0; rank < c->mesh->world.size; rank++) {
        if (group_peer(sharers, rank, 0) != rank) continue;
        for (int i = 0; i < c->tensors; i++) {
            uint64_t sum = 0;
            int64_t at[2] = {(int64_t)rank * c->tensors + i, (int64_t)sharers->stride * c->tensors};
            if (!weights_store(&c->zero->weights, c->copy[at[0]].bucket)->gathers) continue;
            for (int d = 0; d < sharers->size; d++) sum += c->copy[at[0] + d * at[1]].hash;
            for (int d = 0; d < sharers->size; d++) c->copy[at[0] + d * at[1]].hash = sum;
        }
    }
}

// Hashes the elements of a tensor that this rank keeps.
static void hash_tensor(Zero *zero, int tensor) {
    for (int i = 0; i < zero->weights.kept.shards; i++) {
        int64_t first, count;
        const floatX *kept = weights_of_tensor(&zero->base, &zero->weights, tensor, i, &first, &count);
        if (kept) kernel_replica_hash(zero->base.compute, zero->hash + tensor, kept, first, count);
    }
}

static void gather_copies(Check *c) {
    Zero *zero = c->zero;
    const BucketLayout *layout = &zero->base.layout;
    if (!c->copy) return;
    Copy *own = xcalloc((size_t)c->tensors, sizeof *own, "replica hashes");
    uint64_t *hash = xcalloc((size_t)layout->tensors, sizeof *hash, "replica hashes");
    size_t bytes = (size_t)layout->tensors * sizeof *hash;
    set_zero(zero->base.compute, zero->hash, bytes);
    for (int i = 0; i < layout->tensors; i++) hash_tensor(zero, i);
    copy_to_host(zero->base.compute, hash, zero->hash, bytes);
    stream_synchronize(zero->base.compute);
    for (int i = 0; i < layout->tensors; i++) {
        const Tensor *t = &zero->base.tensors[i];
        own[i] = (Copy){t->number + 1, t->offset, layout->tensor_bucket[i], hash[i]};
    }
    peers_all_gather(c->world, own, c->copy, c->tensors * COPY_WORDS, MPI_INT64_T);
    add_parts(c);
    free(hash);
    free(own);
}

static uint64_t hash_at(const Check *c, int rank, int b) { return c->hash[(int64_t)rank * c->buckets + b]; }

static int holder_rank(const Holders *h, int m) { return h->first + m * h->stride; }

static const Copy *copies_of(const Check *c, int rank) { return &c->copy[(int64_t)rank * c->tensors]; }

// Returns holder m's copy of the tensor in row i of the first holder's table, or NULL. Starts the
// search at row i, where the copy most likely is.
static const Copy *copy_of(const Check *c, const Holders *h, int m, int i) {
    const Copy *wanted = &copies_of(c, h->first)[i], *table = copies_of(c, holder_rank(h, m));
    for (int k = 0; wanted->number && k < c->tensors; k++) {
        const Copy *found = &table[(i + k) % c->tensors];
        if (found->number == wanted->number && found->offset == wanted->offset) return found;
    }
    return NULL;
}

// --- comparison ----------------------------------------------------------------------------------

static int ranks_like(const Check *c, int rank, int b) {
    int count = 0;
    for (int i = 0; i < holders_of(c, b)->size; i++)
        count += hash_at(c, replica(c, rank, b, i), b) == hash_at(c, rank, b);
    return count;
}

static bool equal_everywhere(const Check *c, int rank, int b) {
    return ranks_like(c, rank, b) == holders_of(c, b)->size;
}

// Returns the lowest rank whose weights more than half of the replicas have, or -1.
static int majority(const Check *c, int rank, int b) {
    int holders = holders_of(c, b)->size;
    for (int i = 0; i < holders; i++) {
        int candidate = replica(c, rank, b, i);
        if (2 * ranks_like(c, candidate, b) > holders) return candidate;
    }
    return -1;
}

// Returns true if a holder's copy of the tensor in row i of the first holder's table differs.
static bool copies_differ(const Check *c, const Holders *h, int i) {
    const Copy *first = &copies_of(c, h->first)[i];
    for (int m = 1; m < h->size; m++) {
        const Copy *other = copy_of(c, h, m, i);
        if (other && other->hash != first->hash) return true;
    }
    return false;
}

// --- repair --------------------------------------------------------------------------------------

static void make_buffers(Check *c) {
    if (c->weights) return;
    c->weights = xmalloc(PIECE * sizeof(floatX), "the repair of a replica");
    c->master = xmalloc(PIECE * sizeof(float), "the repair of a replica");
}

// Broadcasts n weights on the host. root: a member of the group.
static void broadcast(const Check *c, const Group *group, int64_t n, int root) {
    Peers peers = {group->mpi, c->world.limit, c->world.site};
    peers_broadcast(peers, c->weights, (size_t)n * sizeof(floatX), root);
}

// Copies the weights of world rank `root` to the replicas in this rank's group that differ from it.
static void copy_from(Check *c, int b, int root) {
    Zero *zero = c->zero;
    const Group *group = holders_of(c, b);
    int self = c->mesh->world.rank, member = root / group->stride % group->size;
    int64_t all;
    floatX *kept = weights_kept(&zero->base, &zero->weights, b, &all);
    make_buffers(c);
    for (int64_t at = 0; at < all; at += PIECE) {
        int64_t n = all - at < PIECE ? all - at : PIECE;
        if (self == root) copy_to_host(zero->base.compute, c->weights, kept + at, (size_t)n * sizeof(floatX));
        stream_synchronize(zero->base.compute);
        broadcast(c, group, n, member);
        if (hash_at(c, self, b) != hash_at(c, root, b))
            copy_to_device(zero->base.compute, kept + at, c->weights, (size_t)n * sizeof(floatX));
        stream_synchronize(zero->base.compute);
    }
}

// Sets n weights of a shard to the owner's master weights, rounded. state: index of the first one
// in the owner's optimizer state. weights: NULL on ranks that do not hold the shard.
static void round_master(const Check *c, int owner, floatX *weights, int64_t state, int64_t n) {
    Zero *zero = c->zero;
    for (int64_t at = 0; at < n; at += PIECE) {
        int64_t part = n - at < PIECE ? n - at : PIECE;
        if (c->mesh->dp.rank == owner) {
            zero->optimizer.store->read(&zero->optimizer, zero->base.compute, c->master, STATE_MASTER,
                                        state + at, part);
            for (int64_t i = 0; i < part; i++) c->weights[i] = floatX_from_float(c->master[i]);
        }
        broadcast(c, &c->mesh->dp, part, owner);
        if (weights)
            copy_to_device(zero->base.compute, weights + at, c->weights, (size_t)part * sizeof(floatX));
        stream_synchronize(zero->base.compute);
    }
}

static void refresh(Check *c, int b) {
    const Bucket *bucket = &c->zero->base.state->bucket[b];
    make_buffers(c);
    for (int owner = 0; owner < c->zero->base.state->dp; owner++) {
        WeightShard kept = weights_shard(&c->zero->base, &c->zero->weights, b, owner);
        round_master(c, owner, kept.matrix, bucket->state_start, bucket->matrix_per_rank);
        round_master(c, owner, kept.tail, bucket->state_start + bucket->matrix_per_rank,
                     bucket->tail_per_rank);
    }
}

// --- reports -------------------------------------------------------------------------------------

// A list of ranks for messages, "2, 5"; truncated if too long.
typedef struct RankList {
    char text[256];
    size_t used;
} RankList;
static void list_rank(RankList *list, int rank) {
    if (list->used >= sizeof list->text) return;
    list->used += (size_t)snprintf(list->text + list->used, sizeof list->text - list->used, "%s%d",
                                   list->used ? ", " : "", rank);
}

// Lists the replicas that differ from root, or all replicas if there is no majority (root = -1).
static RankList list_replicas(const Check *c, int rank, int b, int root) {
    RankList list = {"", 0};
    for (int i = 0; i < holders_of(c, b)->size; i++) {
        int r = replica(c, rank, b, i);
        if (root < 0 || hash_at(c, r, b) != hash_at(c, root, b)) list_rank(&list, r);
    }
    return list;
}

static RankList list_copies(const Check *c, const Holders *h, int i) {
    RankList list = {"", 0};
    for (int m = 0; m < h->size; m++) {
        if (copy_of(c, h, m, i)) list_rank(&list, holder_rank(h, m));
    }
    return list;
}

// Writes "3 (layers 4 to 5)", or with a pipeline "3 of stage 1", because rank 0 does not know the
// layers of other stages.
static void describe_bucket(const Check *c, int rank, int b, char *text, size_t bytes) {
    const Bucket *bucket = &c->zero->base.layout.bucket[b];
    if (c->mesh->pp.size > 1) snprintf(text, bytes, "%d of stage %d", b, stage_of(c, rank));
    else snprintf(text, bytes, "%d (layers %d to %d)", b, bucket->first_unit, bucket->end_unit - 1);
}

static void report_json(const Check *c, int rank, int64_t b, const RankList *ranks, const char *tensor,
                        int root) {
    Text json = json_begin("repair");
    json_integer(&json, "iteration", c->zero->base.step);
    if (c->mesh->pp.size > 1) json_integer(&json, "stage", stage_of(c, rank));
    json_integer(&json, "bucket", b);
    if (tensor) json_text(&json, "tensor", tensor);
    json_text(&json, "ranks", ranks->text);
    if (root >= 0) {
        json_integer(&json, "from", root);
    } else {
        json_name(&json, "from");
        text_add(&json, "null");
    }
    log_json(c->log, &json);
}

// rank: any member of the data-parallel group. root: source of the repair, -1: the master weights.
static void report_replicas(const Check *c, int rank, int b, int root) {
    char where[64];
    long long iteration = c->zero->base.step, repair = ++*c->repairs;
    RankList ranks = list_replicas(c, rank, b, root);
    describe_bucket(c, rank, b, where, sizeof where);
    if (root >= 0) {
        log_line(c->log,
                 "WARNING: iteration %lld: the weights of rank %s differ from %d of %d ranks in "
                 "bucket %s; copied from rank %d (repair %lld of this run)",
                 iteration, ranks.text, ranks_like(c, root, b), holders_of(c, b)->size, where, root, repair);
    } else {
        log_line(c->log,
                 "WARNING: iteration %lld: the weights of ranks %s differ in bucket %s "
                 "without a majority; all were set to the rounded master weights "
                 "(repair %lld of this run)",
                 iteration, ranks.text, where, repair);
    }
    report_json(c, rank, b, &ranks, NULL, root);
}

// Broadcasts the name of the tensor in row i of rank's table, because rank 0 may not have the
// tensor. Collective over world.
static void name_of(const Check *c, int rank, int i, char name[96]) {
    if (c->mesh->world.rank == rank) memcpy(name, c->zero->base.tensors[i].name, 96);
    peers_broadcast(c->world, name, 96, rank);
}

static void report_copies(const Check *c, const Holders *h, int i) {
    char name[96];
    RankList ranks = list_copies(c, h, i);
    name_of(c, h->first, i, name);
    log_line(
        c->log,
        "WARNING: iteration %lld: the copies of %s on ranks %s differ; all were set to the rounded master "
        "weights (repair %lld of this run)",
        (long long)c->zero->base.step, name, ranks.text, (long long)++*c->repairs);
    report_json(c, h->first, copies_of(c, h->first)[i].bucket, &ranks, name, -1);
}

// --- the check -----------------------------------------------------------------------------------

// Compares the replicas of all buckets. Repairs a bucket at once if there is a majority, else marks
// it as stale. Returns true if any replica differs.
static bool repair_replicas(Check *c) {
    bool any = false;
    for (int rank = 0; rank < c->mesh->world.size; rank++) {
        for (int b = 0; b < c->buckets; b++) {
            if (replica(c, rank, b, 0) != rank || equal_everywhere(c, rank, b)) continue;
            int root = majority(c, rank, b);
            bool own = replica(c, c->mesh->world.rank, b, 0) == rank;
            any = true;
            report_replicas(c, rank, b, root);
            if (root < 0) *stale_at(c, rank, b) = true;
            else if (own) copy_from(c, b, root);
        }
    }
    return any;
}

// Returns true if a bucket with a copy of row i of the first holder's table is stale.
static bool copies_are_stale(const Check *c, const Holders *h, int i) {
    for (int m = 0; m < h->size; m++) {
        const Copy *copy = copy_of(c, h, m, i);
        if (copy && *stale_at(c, holder_rank(h, m), copy->bucket)) return true;
    }
    return false;
}

static void mark(const Check *c, const Holders *h, int i) {
    for (int m = 0; m < h->size; m++) {
        const Copy *copy = copy_of(c, h, m, i);
        if (copy) *stale_at(c, holder_rank(h, m), copy->bucket) = true;
    }
}

// Marks buckets with differing copies as stale. Also marks the buckets that hold copies of a stale
// bucket's tensors, because a repair from the master weights may change correct weights too.
// Returns true if any copies differ.
static bool mark_copies(Check *c) {
    bool any = false;
    for (const Holders *h = c->holders; h < c->holders + c->holder_count; h++) {
        for (int i = 0; i < c->tensors; i++) {
            bool differ = copies_differ(c, h, i), stale = copies_are_stale(c, h, i);
            if (differ && !stale) report_copies(c, h, i);
            if (differ || stale) mark(c, h, i);
            any = any || differ;
        }
    }
    return any;
}

static bool replicas_agree(const Check *c, Error *err) {
    for (int rank = 0; rank < c->mesh->world.size; rank++) {
        for (int b = 0; b < c->buckets; b++) {
            if (equal_everywhere(c, rank, b)) continue;
            return error_set(err, EXIT_COMMUNICATION,
                             "the weights in bucket %d still differ after the repair: the memory of a "
                             "rank is faulty; check the hosts and restart from the last checkpoint",
                             b);
        }
    }
    return true;
}

static bool copies_agree(const Check *c, Error *err) {
    for (const Holders *h = c->holders; h < c->holders + c->holder_count; h++) {
        for (int i = 0; i < c->tensors; i++) {
            char name[96];
            if (!copies_differ(c, h, i)) continue;
            RankList ranks = list_copies(c, h, i);
            name_of(c, h->first, i, name);
            return error_set(
                err, EXIT_COMMUNICATION,
                "the copies of %s on ranks %s still differ after the repair: their master weights "
                "differ; check the hosts and restart from the last checkpoint",
                name, ranks.text);
        }
    }
    return true;
}

static bool verify(Check *c, Error *err) {
    gather_hashes(c);
    bool any = repair_replicas(c);
    gather_copies(c);
    any = mark_copies(c) || any;
    if (!any) return true;
    weights_replaced(&c->zero->base, &c->zero->weights);
    for (int b = 0; b < c->zero->base.layout.buckets; b++) {
        if (*stale_at(c, c->mesh->world.rank, b)) refresh(c, b);
    }
    gather_hashes(c);
    gather_copies(c);
    return replicas_agree(c, err) && copies_agree(c, err);
}

// Checks that outer weights and momentum are equal in all replica groups. A difference cannot be
// repaired, because it is unknown which group is correct.
static bool outer_agree(Zero *zero, Peers world, Error *err) {
    const Mesh *mesh = zero->base.mesh;
    int ranks = mesh->world.size;
    uint64_t own, *all = xcalloc((size_t)ranks, sizeof *all, "hashes of outer weights");
    outer_finish(&zero->base, &zero->outer, &zero->optimizer);
    set_zero(zero->base.compute, zero->hash, sizeof own);
    outer_hash(&zero->base, &zero->outer, zero->hash);
    copy_to_host(zero->base.compute, &own, zero->hash, sizeof own);
    stream_synchronize(zero->base.compute);
    peers_all_gather(world, &own, all, 1, MPI_UINT64_T);
    int wrong = 0;
    while (wrong < ranks && all[wrong] == all[group_peer(&mesh->replica_groups, wrong, 0)]) wrong++;
    free(all);
    return wrong == ranks ||
           error_set(err, EXIT_COMMUNICATION,
                     "the outer weights of ranks %d and %d differ, but must be equal on all nodes; check the "
                     "memory of both hosts and restart from the last checkpoint",
                     group_peer(&mesh->replica_groups, wrong, 0), wrong);
}

bool replicas_verify(Zero *zero, Peers world, Log *log, int64_t *repairs, Error *err) {
    assert(zero && repairs && *repairs >= 0);
    const Mesh *mesh = zero->base.mesh;
    if (mesh->world.size == 1) return true;
    if (mesh->replica_groups.size > 1 && !outer_agree(zero, world, err)) return false;
    Check c = {.zero = zero, .mesh = mesh, .world = world, .log = log, .repairs = repairs};
    int most[2] = {zero->base.layout.buckets, zero->base.layout.tensors};
    peers_all_reduce(world, most, 2, MPI_INT, MPI_MAX);
    c.buckets = most[0];
    c.tensors = most[1];
    size_t ranks = (size_t)mesh->world.size;
    c.hash = xcalloc(ranks * (size_t)c.buckets, sizeof(uint64_t), "replica hashes");
    size_t stages = (size_t)(mesh->pp.size * mesh->replica_groups.size);
    c.stale = xcalloc(stages * (size_t)c.buckets, sizeof(bool), "replica hashes");
    list_holders(&c);
    if (c.holder_count) c.copy = xcalloc(ranks * (size_t)c.tensors, sizeof(Copy), "replica hashes");
    bool ok = verify(&c, err);
    free(c.hash);
    free(c.copy);
    free(c.holders);
    free(c.stale);
    free(c.weights);
    free(c.master);
    return ok;
}
