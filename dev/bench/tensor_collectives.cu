// Compares ways to exchange the activations of tensor parallelism within one NVLink node:
//
//   steps   --tp-comm-backend nccl: an all-to-all through NCCL, a copy, a sum kernel and an
//           all-gather through NCCL
//   peer N  --tp-comm-backend peer: one kernel over peer memory, with up to N blocks
//   nccl    ncclAllReduce, ncclReduceScatter or ncclAllGather, whose sums have another order and
//           more roundings
//
// Built by make gpu-bench. Start one rank per GPU on one machine:
//
//   mpirun --bind-to none -np 2 build/dev/bench/tensor_collectives [--mb 1 2 4 8 16 32 64]
//
//   mb   MiB of bf16 activations (B*T, C), before or after the collective
//
// Also times a reduction with the residual addition and RMSNorm of rows of 2048 elements: *steps*
// through the collectives of `peer`, and *peer N* as one kernel (peer_reduce_norm). With two ranks
// every rank normalizes all rows; "norm, sequence" splits the rows and gathers the result.
//
// Prints microseconds per collective: medians over runs of the slowest rank, each averaged over
// consecutive collectives. The results of `steps` and `peer` are compared bit for bit. NVLink
// multicast is off, because no other way uses it.
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/version.h"
#include "llmc/comm.h"
#include "llmc/cuda/internal.h"
#include "llmc/cuda/peer_layout.h"
#include "llmc/cuda/peer_reduce.h"
#include "llmc/ops.h"
#include "llmc/ranks/launch.h"
#include "llmc/ranks/peers.h"
#include "llmc/ranks/watchdog.h"

enum { RUNS = 15, TOGETHER = 20, MOST_SIZES = 8 };
enum { DELAY_CYCLES = 4000000 };  // 2 ms
#define PATIENCE_SECONDS 60

typedef enum Kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, NORM, NORM_SEQUENCE, KINDS } Kind;
static const char *const KIND[KINDS] = {"all-reduce", "reduce-scatter", "all-gather", "norm",
                                        "norm, sequence"};
enum { ROW = 2048 };  // elements of a row of the norms

static const int BLOCKS[] = {8, 16, 24, 32, 48, 64};
enum { PEER_WAYS = sizeof BLOCKS / sizeof *BLOCKS, WAYS = PEER_WAYS + 2, STEPS = PEER_WAYS, NCCL };

typedef struct Bench {
    Launch launch;
    Site site;
    Error error;
    Mesh mesh;
    Device *device;
    Stream *stream;
    Event *start, *stop;
    uint8_t *input, *output, *parts, *want;  // (most bytes); input and output are shared
    uint8_t *x, *sum;                        // (most bytes) of the norms
    float *statistics;                       // (2, rows)
    void *flags;
    uint32_t *wrong;  // (1) on the device
    PeerReduce *peers;
    ncclComm_t nccl;
    int mb[MOST_SIZES], sizes;
} Bench;

static Peers everyone(const Bench *b) { return {b->launch.world, 0, &b->site}; }
static bool agreed(Bench *b, bool ok) { return peers_agree(everyone(b), ok, &b->error, NULL); }

static void nccl_check(const Bench *b, ncclResult_t result, const char *what) {
    if (result != ncclSuccess)
        fatal(&b->site, EXIT_COMMUNICATION, "%s failed: %s (%s)", what, ncclGetErrorString(result),
              ncclGetLastError(b->nccl));
}

// --- ways ----------------------------------------------------------------------------------------

// Fills with bf16 values of magnitude 0.5 to 1.
static __global__ void fill_kernel(uint32_t *p, int64_t words, uint32_t seed) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < words; i += gridDim.x * 256ll) {
        uint32_t x = (uint32_t)i * 0x9E3779B1u + seed * 0x85EBCA77u;
        x = (x ^ x >> 15) * 0x2C1B3C6Du;
        p[i] = ((x ^ x >> 13) & 0x807F807Fu) | 0x3F003F00u;
    }
}
static __global__ void compare_kernel(uint32_t *wrong, const uint32_t *a, const uint32_t *b, int64_t words) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < words; i += gridDim.x * 256ll)
        if (a[i] != b[i]) atomicAdd(wrong, 1u);
}

// The same calls as reduce_in_steps and tp_gather_bytes_begin (llmc/model/tensor_parallel.c).
static void run_steps(const Bench *b, Kind kind, size_t bytes) {
    const Group *tp = &b->mesh.tp;
    size_t block = bytes / (size_t)tp->size, own = (size_t)tp->rank * block;
    uint8_t *sums = kind == ALL_REDUCE ? b->output + own : b->output;
    if (kind == ALL_GATHER) {
        copy_on_device(b->stream, b->output + own, b->input, block);
        comm_all_gather(tp, b->output, block, b->stream);
        return;
    }
    comm_all_to_all(tp, b->input, b->parts, block, b->stream);
    copy_on_device(b->stream, b->parts + own, b->input + own, block);
    SumParts sum = {
        (floatX *)sums, (const floatX *)b->parts, (int64_t)(block / sizeof(floatX)), tp->size, NULL, 0};
    op_sum_parts(b->stream, &sum);
    if (kind == ALL_REDUCE) comm_all_gather(tp, b->output, block, b->stream);
}

static void run_peer(const Bench *b, Kind kind, size_t bytes) {
    CommReduce a = {};
    a.partial = b->input;
    a.out = b->output;
    a.total = (int64_t)(bytes / sizeof(floatX));
    a.scatter = kind == REDUCE_SCATTER;
    CommGather gather = {b->input, b->output, bytes / (size_t)b->launch.size, COMM_BESIDE_GEMM};
    bool ran = kind == ALL_GATHER ? peer_reduce_gather(b->peers, &gather, b->stream)
                                  : peer_reduce_sum(b->peers, &a, b->stream);
    if (!ran) fatal(&b->site, EXIT_ENVIRONMENT, "the buffers are not in peer memory");
}

// Returns the norm of `bytes` bytes, or of this rank's part. x is added to and overwritten.
static LayerNorm norm_of(const Bench *b, Kind kind, size_t bytes) {
    int64_t N = (int64_t)(bytes / ROW / sizeof(floatX)), own = N / b->launch.size;
    LayerNorm n = {};
    n.B = 1, n.T = (int)N, n.C = ROW;
    n.epsilon = 1e-5f;
    n.rms = true;
    n.x = (floatX *)b->x, n.residual = n.x;
    n.branch = (const floatX *)b->sum;
    n.gamma = (const floatX *)b->want;  // any values
    n.y = (floatX *)b->parts;
    n.mean = b->statistics, n.rstd = b->statistics + N;
    n.rows = {0, N};
    if (kind == NORM_SEQUENCE) n.rows = {b->launch.rank * own, own};
    return n;
}

// The same as tp_norm (llmc/model/tensor_parallel.c), as one kernel or in steps over peer memory.
static void run_norm(const Bench *b, Kind kind, size_t bytes, bool fused) {
    LayerNorm n = norm_of(b, kind, bytes);
    bool split = kind == NORM_SEQUENCE;
    size_t own = bytes / (size_t)b->launch.size;
    CommNorm a = {(const floatX *)b->input, NULL, &n, split ? (floatX *)b->output : NULL};
    CommReduce sum = {};
    sum.partial = b->input;
    sum.out = split ? b->sum : b->output;
    sum.total = (int64_t)(bytes / sizeof(floatX));
    sum.scatter = split;
    if (!split) n.branch = (const floatX *)b->output;
    bool ran = fused ? peer_reduce_norm(b->peers, &a, b->stream) : peer_reduce_sum(b->peers, &sum, b->stream);
    if (!ran) fatal(&b->site, EXIT_ENVIRONMENT, "the norm cannot be computed over peer memory");
    if (fused) return;
    op_layernorm_forward(b->stream, &n);
    CommGather gather = {n.y, b->output, own, COMM_BESIDE_GEMM};
    if (split) peer_reduce_gather(b->peers, &gather, b->stream);
}

static void run_nccl(const Bench *b, Kind kind, size_t bytes) {
    size_t count = bytes / sizeof(floatX), block = count / (size_t)b->launch.size;
    cudaStream_t stream = stream_handle(b->stream);
    ncclResult_t result =
        kind == ALL_REDUCE ? ncclAllReduce(b->input, b->output, count, ncclBfloat16, ncclSum, b->nccl, stream)
        : kind == REDUCE_SCATTER
            ? ncclReduceScatter(b->input, b->output, block, ncclBfloat16, ncclSum, b->nccl, stream)
            : ncclAllGather(b->input, b->output, block, ncclBfloat16, b->nccl, stream);
    nccl_check(b, result, KIND[kind]);
}

static void run(const Bench *b, int way, Kind kind, size_t bytes) {
    if (kind >= NORM) run_norm(b, kind, bytes, way != STEPS);
    else if (way == STEPS) run_steps(b, kind, bytes);
    else if (way == NCCL) run_nccl(b, kind, bytes);
    else run_peer(b, kind, bytes);
}

// --- times ---------------------------------------------------------------------------------------

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static __global__ void delay_kernel(long long cycles) {
    for (long long start = clock64(); clock64() - start < cycles;) continue;
}

static double time_way(Bench *b, int way, Kind kind, size_t bytes) {
    double us[RUNS];
    peer_reduce_use_blocks(b->peers, way < PEER_WAYS ? BLOCKS[way] : PEER_BLOCKS);
    for (int i = -2; i < RUNS; i++) {
        stream_synchronize(b->stream);
        peers_barrier(everyone(b));
        // Keeps the stream busy until all calls are queued, as a training step does.
        delay_kernel<<<1, 1, 0, stream_handle(b->stream)>>>(DELAY_CYCLES);
        check_launch(b->stream, "delay");
        event_record(b->start, b->stream);
        for (int j = 0; j < TOGETHER; j++) run(b, way, kind, bytes);
        event_record(b->stop, b->stream);
        double ms = event_elapsed_ms(b->start, b->stop);
        peers_all_reduce(everyone(b), &ms, 1, MPI_DOUBLE, MPI_MAX);
        if (i >= 0) us[i] = 1e3 * ms / TOGETHER;
    }
    qsort(us, RUNS, sizeof *us, ascending);
    return us[RUNS / 2];
}

// Compares the results of `steps` and `peer`. Ends the job if they differ.
static void verify(Bench *b, Kind kind, size_t bytes) {
    uint32_t wrong = 0;
    size_t result = kind == REDUCE_SCATTER ? bytes / (size_t)b->launch.size : bytes;
    run_steps(b, kind, bytes);
    copy_on_device(b->stream, b->want, b->output, result);
    set_zero(b->stream, b->output, bytes);
    run_peer(b, kind, bytes);
    compare_kernel<<<512, 256, 0, stream_handle(b->stream)>>>(b->wrong, (const uint32_t *)b->output,
                                                              (const uint32_t *)b->want,
                                                              (int64_t)(result / 4));
    check_launch(b->stream, "compare");
    copy_to_host(b->stream, &wrong, b->wrong, sizeof wrong);
    stream_synchronize(b->stream);
    if (wrong)
        fatal(&b->site, EXIT_COMMUNICATION, "%s of %zu bytes: %u wrong words", KIND[kind], bytes, wrong);
}

// Returns true if peer_reduce_norm supports norms of all rows on every rank.
static bool normalizes_all(const Bench *b) {
    int most = peer_most_blocks(COMM_WITHOUT_GEMM, b->device->multiprocessors, 1);
    return peer_normalizes_all(b->launch.size, most);
}

static void measure(Bench *b) {
    bool first = b->launch.rank == 0;
    if (first) {
        printf("%s, %d GPUs, commit %s; microseconds\n", device_name(b->device), b->launch.size,
               version_commit());
        printf("%-15s %4s %9s", "collective", "MiB", "steps");
        for (int i = 0; i < PEER_WAYS; i++) printf("   peer %2d", BLOCKS[i]);
        printf(" %9s\n", "nccl");
    }
    for (int k = 0; k < KINDS; k++) {
        for (int s = 0; s < b->sizes; s++) {
            size_t unit = (size_t)b->launch.size * 4096, bytes = ((size_t)b->mb[s] << 20) / unit * unit;
            double us[WAYS];
            if (k < NORM) verify(b, (Kind)k, bytes);
            if (k == NORM && !normalizes_all(b)) continue;
            for (int w = 0; w < WAYS; w++)
                us[w] = k >= NORM && w == NCCL ? 0 : time_way(b, w, (Kind)k, bytes);
            if (!first) continue;
            printf("%-15s %4d %9.1f", KIND[k], b->mb[s], us[STEPS]);
            for (int i = 0; i < PEER_WAYS; i++) printf(" %9.1f", us[i]);
            if (k < NORM) printf(" %9.1f", us[NCCL]);
            printf("\n");
            fflush(stdout);
        }
    }
}

// --- main ----------------------------------------------------------------------------------------

static bool read_options(Bench *b, int argc, char **argv) {
    static const int usual[] = {1, 2, 4, 8, 16, 32, 64};
    int host = 0;
    bool ok = argc == 1 || !strcmp(argv[1], "--mb");
    for (int i = 2; ok && i < argc; i++) {
        ok = b->sizes < MOST_SIZES && atoi(argv[i]) >= 1 && atoi(argv[i]) <= 1024;
        if (ok) b->mb[b->sizes++] = atoi(argv[i]);
    }
    if (!ok)
        return usage_error(&b->error, "usage: tensor_collectives [--mb 1 2 4 (up to %d sizes of 1 to 1024)]",
                           MOST_SIZES);
    for (int i = 0; argc <= 2 && i < 7; i++) b->mb[b->sizes++] = usual[i];
    MPI_Comm_size(b->launch.host, &host);
    return (host == b->launch.size && host >= 2 && host <= 8) ||
           usage_error(&b->error, "start 2 to 8 ranks on one machine, one per GPU");
}

static bool allocate(Bench *b, size_t bytes) {
    uint8_t **memory[] = {&b->input, &b->output, &b->parts, &b->want, &b->x, &b->sum};
    for (int i = 0; i < 6; i++) {
        *memory[i] = (uint8_t *)device_alloc(b->device, bytes, "activations", &b->error);
        if (!*memory[i]) return false;
    }
    b->flags = device_alloc(b->device, COMM_FLAG_BYTES, "flags", &b->error);
    size_t rows = bytes / ROW / sizeof(floatX);
    b->statistics = (float *)device_alloc(b->device, 2 * rows * sizeof(float), "statistics", &b->error);
    b->wrong = (uint32_t *)device_alloc(b->device, sizeof(uint32_t), "a counter", &b->error);
    return b->flags && b->statistics && b->wrong;
}

static bool open_device(Bench *b) {
    int size = b->launch.size, most = 0;
    for (int i = 0; i < b->sizes; i++) most = b->mb[i] > most ? b->mb[i] : most;
    MPI_Comm_rank(b->launch.host, &b->site.gpu);
    b->device = device_open(b->site.gpu, &b->site, &b->error);
    if (!b->device) return false;
    b->stream = stream_create_urgent(b->device, "tensor parallel");
    b->start = event_create_timed(b->device), b->stop = event_create_timed(b->device);
    return allocate(b, (size_t)most << 20) &&
           mesh_build(&b->mesh, b->launch.rank, size, b->launch.host_of_rank, size, size, 1, &b->error);
}

// Opens the three ways. Collective.
static bool open_ways(Bench *b) {
    size_t bytes = 0;
    ncclUniqueId id = {};
    for (int i = 0; i < b->sizes; i++)
        bytes = (size_t)b->mb[i] << 20 > bytes ? (size_t)b->mb[i] << 20 : bytes;
    if (!agreed(b, mesh_open(&b->mesh, everyone(b), &b->error))) return false;
    comm_open(&b->mesh, b->device, PATIENCE_SECONDS);
    comm_connect(&b->mesh, b->parts);
    if (b->launch.rank == 0) nccl_check(b, ncclGetUniqueId(&id), "ncclGetUniqueId");
    peers_broadcast(everyone(b), &id, sizeof id, 0);
    nccl_check(b, ncclCommInitRank(&b->nccl, b->launch.size, id, b->launch.rank), "ncclCommInitRank");
    CommPiece piece[] = {{b->input, bytes}, {b->output, bytes}};
    b->peers = peer_reduce_open(b->device, b->mesh.tp.mpi, b->flags, piece, 2, 1, &b->error);
    if (!b->peers) return false;
    fill_kernel<<<512, 256, 0, stream_handle(b->stream)>>>((uint32_t *)b->input, (int64_t)(bytes / 4),
                                                           (uint32_t)b->launch.rank);
    check_launch(b->stream, "fill");
    return true;
}

static void close_ways(Bench *b) {
    if (b->peers) peer_reduce_close(b->peers);
    if (b->nccl) {
        ncclCommFinalize(b->nccl);
        ncclCommDestroy(b->nccl);
    }
    comm_close(&b->mesh);
}

int main(int argc, char **argv) {
    static Bench b;
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    b.site.phase = "benchmark";
    launch_init(&b.launch, &argc, &argv);
    b.site.rank = b.launch.rank;
    bool ok = agreed(&b, read_options(&b, argc, argv)) && agreed(&b, open_device(&b));
    if (ok) {
        watchdog_open(&b.site, b.launch.host, b.launch.size, PATIENCE_SECONDS);
        ok = open_ways(&b);
        if (ok) measure(&b);
        close_ways(&b);
        watchdog_close(&b.site);
    }
    if (!ok && b.launch.rank == 0) error_print(NULL, b.error.what);
    launch_finalize(&b.launch);
    return ok ? EXIT_DONE : b.error.code;
}
