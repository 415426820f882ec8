// The loader on 1, 2 or 4 ranks of one node: indices in shared memory give the same batches as
// private ones, the ranks together read every sample once and in order, and an error on one rank is
// reported on all. Exit code 0 or 1.
#include <mpi.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dev/lib/shard_writer.h"
#include "llmc/data/loader.h"
#include "llmc/data/node_memory.h"
#include "test/leaks.h"

static int rank, ranks;
static char folder[64], prefix[2][96];

// Ends the whole job and prints the place of the failure.
#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "rank %d: %s:%d: %s\n", rank, __FILE__, __LINE__, #condition); \
            MPI_Abort(MPI_COMM_WORLD, 1); \
        } \
    } while (0)

static void ok(const char *what) {
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) printf("ok %s (%d ranks)\n", what, ranks);
    fflush(stdout);
}

static void write_shard(const char *path, uint32_t seed) {
    Error err = {0};
    ShardWriter *w = shard_writer_open(path, SHARD_U16, &err);
    CHECK(w);
    for (int i = 0; i < 200; i++) {
        int32_t tokens[64];
        for (int t = 0; t < 64; t++) {
            tokens[t] = (int32_t)((seed = seed * 1664525u + 1013904223u) >> 8) % 1000;
        }
        CHECK(shard_writer_add_sequence(w, tokens, (int)(seed >> 8) % 64, &err));
        shard_writer_end_document(w);
    }
    CHECK(shard_writer_close(w, &err));
}

static void make_data(void) {
    strcpy(folder, "/tmp/test_loader_mpi_XXXXXX");
    if (rank == 0) CHECK(mkdtemp(folder));
    MPI_Bcast(folder, sizeof folder, MPI_CHAR, 0, MPI_COMM_WORLD);
    for (int k = 0; k < 2; k++) {
        snprintf(prefix[k], sizeof prefix[k], "%s/%d", folder, k);
        if (rank == 0) write_shard(prefix[k], (uint32_t)k + 1);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

static LoaderOptions options_of(const char *const *words, int count) {
    return (LoaderOptions){.data_path = {words, count},
                           .split = "80,15,5",
                           .samples = {1200, 96, 48},
                           .seq_length = 16,
                           .vocab_size = 1000,
                           .eod = 999,
                           .seed = 1234,
                           .micro_batch_size = 2,
                           .dp_rank = rank,
                           .dp_size = ranks};
}

// Rank r of the node must read the same samples as a single process with data-parallel rank r. The
// rows of all ranks, in rank order, are samples 0, 1, 2, ...
static void batches(const char *const *words, int count) {
    LoaderOptions o = options_of(words, count), alone = o;
    alone.dp_rank = 0;
    alone.dp_size = 1;
    alone.micro_batch_size = 2 * ranks;
    Error err = {0};
    Loader *shared = loader_open(&o, (Peers){MPI_COMM_WORLD, 0, NULL}, &err);
    CHECK(shared);
    Loader *lone = loader_open(&alone, (Peers){MPI_COMM_SELF, 0, NULL}, &err);
    CHECK(lone);
    for (int split = 0; split < SPLITS; split++) {
        CHECK(loader_samples(shared, split) == loader_samples(lone, split));
        for (int64_t c = 0; c + 2 * ranks <= o.samples[split]; c += 2 * ranks) {
            Batch mine, all;
            CHECK(loader_batch(shared, split, c, &mine, &err) && loader_batch(lone, split, c, &all, &err));
            size_t row = 2 * (size_t)rank * 16, bytes = 2 * 16 * sizeof(int32_t);
            CHECK(mine.first_sample == c + 2 * rank);
            CHECK(memcmp(mine.tokens, all.tokens + row, bytes) == 0);
            CHECK(memcmp(mine.targets, all.targets + row, bytes) == 0);
        }
    }
    loader_close(shared);
    loader_close(lone);
}

// If and only if the memory is shared, other ranks see what rank 0 writes after
// node_memory_publish.
static void memory(bool share) {
    NodeMemory *m = node_memory_open((Peers){MPI_COMM_WORLD, 0, NULL}, share);
    int32_t *a = (int32_t *)node_memory_alloc(m, 4000);
    int32_t *b = (int32_t *)node_memory_alloc(m, 0);
    CHECK(a && b && a[0] == 0 && a[999] == 0);
    MPI_Barrier(MPI_COMM_WORLD);
    CHECK(node_memory_fills(m) == (rank == 0));
    for (int i = 0; rank == 0 && i < 1000; i++) a[i] = i * i;
    node_memory_publish(m);
    for (int i = 0; i < 1000; i++) CHECK(a[i] == i * i);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) a[7] = -1;
    MPI_Barrier(MPI_COMM_WORLD);
    CHECK(a[7] == (rank == 0 || share ? -1 : 49));
    bool copied;
    CHECK(node_memory_bytes(m, &copied) == 4001);
    CHECK(copied == (!share && ranks > 1));
    node_memory_free(m, a);
    node_memory_free(m, b);
    node_memory_close(m);
}

static void expect_error(const LoaderOptions *o, int code, const char *words) {
    Error err = {0}, first;
    CHECK(!loader_open(o, (Peers){MPI_COMM_WORLD, 0, NULL}, &err));
    CHECK(err.code == code && strstr(err.what, words));
    first = err;
    MPI_Bcast(&first, sizeof first, MPI_BYTE, 0, MPI_COMM_WORLD);
    CHECK(memcmp(&first, &err, sizeof err) == 0);
}

static void errors(void) {
    const char *good = prefix[0], *bad = "/no/such/shard";
    LoaderOptions o = options_of(&good, 1);
    if (rank == ranks - 1) o.data_path.words = &bad;  // only on one rank
    expect_error(&o, EXIT_DATA, bad);
    o = options_of(&good, 1);
    o.split = "99999,1,0";
    expect_error(&o, EXIT_DATA, "validation split has none");
    o = options_of(&good, 1);
    if (rank == 0) o.samples[SPLIT_TEST] = INT64_MAX;
    else o.samples[SPLIT_TEST] = 1;
    expect_error(&o, EXIT_DATA, "exceed the limits of the index");
}

int main(int argc, char **argv) {
    leaks_start_mpi(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    make_data();
    const char *single[1] = {prefix[0]}, *blend[4] = {"0.6", prefix[0], "0.4", prefix[1]};
    batches(single, 1);
    ok("batches of one shard");
    batches(blend, 4);
    ok("batches of a blend");
    memory(true);
    ok("memory shared by the node");
    memory(false);
    ok("memory copied to every rank");
    errors();
    ok("errors reach every rank");
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        char command[128];
        snprintf(command, sizeof command, "rm -rf '%s'", folder);
        CHECK(system(command) == 0);
    }
    int leaks = leaks_found();
    MPI_Finalize();
    return leaks;
}
