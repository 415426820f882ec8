// Ranks, buffers and inputs of the tests of peer memory (test_peer_*_gpu.cu). Options of the
// programs:
//
//   rounds      consecutive collectives with random sizes and delays [1000]
//   group       ranks of a group, a divisor of all ranks [all]; the groups run at the same time
//   share-gpus  allows several ranks per GPU, to test more ranks than GPUs. Their kernels run in
//               turns, so use few rounds. Skips the tests through NCCL
#pragma once
#include <mpi.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "llmc/comm.h"
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/peer_layout.h"
#include "llmc/cuda/peer_reduce.h"
#include "llmc/ranks/devices.h"
#include "test/gpu/check.h"

enum { GUARD = 64, POISON = 0xFF, MOST_BIAS = 3 << 14, STREAMS = 2 };
#define MOST_ELEMENTS ((int64_t)20 << 20)  // in a buffer
#define BUFFER_BYTES (4 * (size_t)MOST_ELEMENTS)

// Buffers of one stream. input and output are in shared memory.
typedef struct Buffers {
    uint8_t *input, *output, *local, *scratch;  // (BUFFER_BYTES)
    Stream *stream;
} Buffers;

typedef struct Lab {
    Checks *checks;
    Device *device;
    Mesh mesh;
    int rank, size, rounds;
    bool share_gpus;
    void *flags;
    float *bias_fp32;  // (MOST_BIAS)
    floatX *bias;      // (MOST_BIAS)
    Buffers buffers[STREAMS];
    uint32_t *wrong;  // (1) on the device: number of wrong elements
    Stream *busy;
    PeerReduce *peers;
} Lab;

// --- inputs --------------------------------------------------------------------------------------

// Element i of a rank's input. Magnitudes differ by up to 2^15, so that the order of addends
// matters.
static __device__ float value_of(int64_t i, uint32_t seed, int rank) {
    uint32_t x = ((uint32_t)i * 0x9E3779B1u + (uint32_t)(i >> 32)) ^
                 (seed * 16u + (uint32_t)rank) * 0x85EBCA77u;
    x = (x ^ x >> 15) * 0x2C1B3C6Du;
    x = (x ^ x >> 12) * 0x297A2D39u;
    x ^= x >> 15;
    return ldexpf((float)(int32_t)(x & 0xFFFFFF00u) * 0x1p-31f, (int)(x & 15u) - 8);
}
static __device__ float value_as(float *, int64_t i, uint32_t seed, int rank) {
    return value_of(i, seed, rank);
}
static __device__ floatX value_as(floatX *, int64_t i, uint32_t seed, int rank) {
    return floatX_from_float(value_of(i, seed, rank));
}

enum { BIAS = 15 };  // "rank" of the bias values
template <class T> static __global__ void fill_kernel(T *p, int64_t n, uint32_t seed, int rank) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll)
        p[i] = value_as(p, i, seed, rank);
}
static __global__ void count_different(uint32_t *wrong, const uint8_t *p, uint8_t byte, int64_t n) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll)
        if (p[i] != byte) atomicAdd(wrong, 1u);
}
static __global__ void delay_kernel(long long cycles) {
    for (long long start = clock64(); clock64() - start < cycles;) continue;
}

static uint32_t take_wrong(const Lab *lab, Stream *stream) {
    uint32_t wrong = 0;
    stream_synchronize(lab->buffers[0].stream);
    stream_synchronize(lab->buffers[1].stream);
    copy_to_host(stream, &wrong, lab->wrong, sizeof wrong);
    set_zero(stream, lab->wrong, sizeof wrong);
    stream_synchronize(stream);
    return wrong;
}

static uint32_t draw(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

// Waits until the stream is idle, up to `seconds`.
static bool idle_within(Stream *stream, double seconds) {
    for (double until = monotonic_seconds() + seconds; monotonic_seconds() < until; usleep(1000))
        if (cudaStreamQuery(stream_handle(stream)) == cudaSuccess) return true;
    cudaGetLastError();
    return false;
}

// The stream's kernels wait for a rank that never arrives. Checks that they end once the abort word
// is set.
static void check_abort(const Lab *lab, Stream *stream) {
    volatile int *abort = peer_reduce_abort_word(lab->peers);
    check(lab->checks, !idle_within(stream, 0.5), "a kernel did not wait for the missing rank");
    *abort = 1;
    if (!check(lab->checks, idle_within(stream, 5), "a kernel ignores the abort word")) {
        fprintf(stderr, "FAILED: the kernel hangs\n");
        _exit(1);
    }
    *abort = 0;
}

// --- start and end -------------------------------------------------------------------------------

static bool open_peers(Lab *lab) {
    Error err = {};
    CommPiece piece[2 * STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        piece[2 * i] = {lab->buffers[i].input, BUFFER_BYTES};
        piece[2 * i + 1] = {lab->buffers[i].output, BUFFER_BYTES};
    }
    lab->peers = peer_reduce_open(lab->device, lab->mesh.tp.mpi, lab->flags, piece, 2 * STREAMS, 1, &err);
    return check(lab->checks, lab->peers != NULL, "not opened: %s", err.what);
}

static void *allocate(const Lab *lab, size_t bytes) {
    Error err = {};
    void *memory = device_alloc(lab->device, bytes, "the test", &err);
    if (!memory) fatal(NULL, err.code, "%s", err.what);
    return memory;
}

static void open_lab(Lab *lab) {
    lab->flags = allocate(lab, COMM_FLAG_BYTES);
    lab->bias = (floatX *)allocate(lab, MOST_BIAS * sizeof(floatX));
    lab->bias_fp32 = (float *)allocate(lab, MOST_BIAS * sizeof(float));
    lab->wrong = (uint32_t *)allocate(lab, sizeof(uint32_t));
    lab->busy = stream_create(lab->device, "busy");
    fill_kernel<<<16, 256, 0, stream_handle(lab->busy)>>>(lab->bias, MOST_BIAS, 1, BIAS);
    fill_kernel<<<16, 256, 0, stream_handle(lab->busy)>>>(lab->bias_fp32, MOST_BIAS, 1, BIAS);
    check_launch(lab->busy, "fill");
    stream_synchronize(lab->busy);
    for (int i = 0; i < STREAMS; i++) {
        Buffers *m = &lab->buffers[i];
        uint8_t **memory[] = {&m->input, &m->output, &m->local, &m->scratch};
        for (int j = 0; j < 4; j++) *memory[j] = (uint8_t *)allocate(lab, BUFFER_BYTES);
        m->stream = stream_create_urgent(lab->device, "collectives");
    }
}

static void usage(void) {
    fatal(NULL, EXIT_USAGE, "usage: PROGRAM [--rounds N] [--group N] [--share-gpus], 2 to 8 ranks");
}

// Builds the groups and opens this rank's GPU.
static void place(Lab *lab, int group) {
    Error err = {};
    // The streams of the lab, of a test, and one while buffers are shared.
    int rank = 0, size = 1, gpus = device_count(STREAMS + 1 + PEER_LANES + 2);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int *host_of_rank = (int *)calloc((size_t)size, sizeof(int));
    if (!mesh_build(&lab->mesh, rank, size, host_of_rank, size, group ? group : size, 1, &err) ||
        lab->mesh.tp.size < 2)
        usage();
    free(host_of_rank);
    lab->rank = lab->mesh.tp.rank;
    lab->size = lab->mesh.tp.size;
    lab->device = device_open(lab->share_gpus && gpus > 0 ? rank % gpus : rank, NULL, &err);
    if (!lab->device || !mesh_open(&lab->mesh, {MPI_COMM_WORLD, 60, NULL}, &err))
        fatal(NULL, err.code, "%s", err.what);
}

// Runs a test program. seconds: a program that takes longer is killed, because a kernel hangs.
static int lab_main(const char *program, unsigned seconds, int argc, char **argv, void (*test)(Lab *)) {
    Checks checks = {program, 0, 0};
    Lab lab = {};
    int group = 0;
    MPI_Init(&argc, &argv);
    lab.checks = &checks;
    lab.rounds = 1000;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--share-gpus")) lab.share_gpus = true;
        else if (!strcmp(argv[i], "--rounds") && i + 1 < argc) lab.rounds = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--group") && i + 1 < argc) group = atoi(argv[++i]);
        else usage();
    }
    alarm(seconds);
    place(&lab, group);
    open_lab(&lab);
    comm_open(&lab.mesh, lab.device, 60);
    if (!lab.share_gpus) comm_connect(&lab.mesh, lab.buffers[0].local);
    test(&lab);
    comm_close(&lab.mesh);
    int failed = checks.failed, rank = lab.mesh.world.rank;
    mesh_close(&lab.mesh);
    MPI_Allreduce(&failed, &checks.failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    int rc = rank == 0 ? checks_end(&checks) : checks.failed != 0;
    MPI_Finalize();
    return rc;
}
