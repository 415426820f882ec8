// Compares ways to run an all-to-all of bucket-sized payloads within one NVLink node (node_hop.h).
// Measures the time of each way alone, and how much it slows down concurrent matrix products. Built
// by make gpu-bench. Start one rank per GPU on one machine:
//
//   mpirun -np 4 build/dev/bench/node_hop [--mb 13 26 52 104] [--only TEXT] [--out FILE.json]
//
//   mb     MiB in the send buffer of each rank, including the rank's own slot
//   only   selects ways whose name contains TEXT, for example to continue after a way that hung
//
// If the machine does not support a way, its row says so. If a way hangs, the run ends after half a
// minute (heartbeat.h); earlier rows are printed and in FILE. NVLink multicast is off, because no
// way needs it. All times are medians of the slowest rank:
//
//   alone_us           time of one exchange, averaged over ten consecutive ones, including the
//                      synchronization of the ranks
//   gb_per_s           GB/s that a rank sends in that time
//   host_us            host time to issue one exchange
//   products_ms        matrix products of a step of the 1.3B model with micro-batch 1
//   beside_ms          the same products with concurrent exchanges on a high-priority stream
//   gb_per_s_beside    GB/s that the slowest rank sends in that time
//   ms_per_gb          increase of the time of the products per GB that a rank sends. Use this to
//                      compare ways, because a faster way sends more in the same time
//
// Received data is verified in consecutive exchanges with different payloads, and again after the
// measurement with concurrent products.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dev/bench/node_hop.h"
#include "llmc/ranks/watchdog.h"
#include "llmc/base/json_line.h"
#include "llmc/ranks/launch.h"
#include "llmc/ranks/peers.h"
#include "llmc/base/version.h"

static const WayForm FORMS[] = {{"nccl", WAY_NCCL, 0},
                                {"nccl, 8 blocks", WAY_NCCL, 8},
                                {"nccl, 16 blocks", WAY_NCCL, 16},
                                {"symmetric", WAY_SYMMETRIC, 0},
                                {"symmetric, engines", WAY_ENGINES, 0},
                                {"copies", WAY_COPIES, 0}};
enum {
    WAYS = sizeof FORMS / sizeof *FORMS,
    MOST_SIZES = 8,
    MOST_ROWS = WAYS * MOST_SIZES,
    MOST_MARKS = 2048
};
enum { CHECKS = 4, RUNS = 11, TOGETHER = 10, RUNS_BESIDE = 5, LAYERS = 24, TOKENS = 2048, HIDDEN = 2048 };
#define PATIENCE_SECONDS 20
#define LEAD_MS 3.0  // exchanges of this duration are issued before the products start

typedef enum Figure {
    ALONE_US,
    RATE,
    HOST_US,
    PRODUCTS_MS,
    BESIDE_MS,
    RATIO,
    RATE_BESIDE,
    MS_PER_GB,
    FIGURES
} Figure;
static const char *const FIGURE[FIGURES] = {"alone_us",  "gb_per_s", "host_us",         "products_ms",
                                            "beside_ms", "ratio",    "gb_per_s_beside", "ms_per_gb"};

typedef struct Row {
    const char *way;
    int mb;
    Error failed;  // why the way could not be measured; code 0 if it was
    double figure[FIGURES];
} Row;

typedef struct Bench {
    Launch launch;
    Site site;
    Error error;
    Device *device;
    Stream *compute, *traffic;
    Event *start, *stop, *base, *mark[MOST_MARKS];
    floatX *x, *w, *dy;  // (TOKENS, 4 HIDDEN), (4 HIDDEN, HIDDEN), (TOKENS, 4 HIDDEN) random
    void *product, *workspace;
    uint32_t *wrong;  // (1) on the device: number of wrong words received
    uint32_t seed;    // of the latest payloads
    int mb[MOST_SIZES], sizes;
    const char *only, *path;
    char command[512];
    Row row[MOST_ROWS];
    int rows;
} Bench;

static Peers everyone(const Bench *b) { return {b->launch.world, 0, &b->site}; }

static bool agreed(Bench *b, bool ok) { return peers_agree(everyone(b), ok, &b->error, NULL); }

// Returns the maximum over all ranks.
static double largest(const Bench *b, double x) {
    peers_all_reduce(everyone(b), &x, 1, MPI_DOUBLE, MPI_MAX);
    return x;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double median(double *x, int count) {
    qsort(x, (size_t)count, sizeof *x, ascending);
    return x[count / 2];
}

// Waits until the devices of all ranks are idle.
static void synchronize(const Bench *b) {
    stream_synchronize(b->compute);
    stream_synchronize(b->traffic);
    peers_barrier(everyone(b));
}

// --- messages ------------------------------------------------------------------------------------

// Returns word i of the payload from rank `from` to rank `to`: two bf16 values with a magnitude of
// 0.5 to 1. Matrices are filled with these values too, because zeros would draw less power.
static __device__ uint32_t word_of(int64_t i, uint32_t seed, int from, int to) {
    uint32_t x = (uint32_t)i * 0x9E3779B1u + (seed * 64 + (uint32_t)(from * 8 + to)) * 0x85EBCA77u;
    x = (x ^ x >> 15) * 0x2C1B3C6Du;
    return ((x ^ x >> 13) & 0x807F807Fu) | 0x3F003F00u;
}
// Fills send (size, words) with this rank's payloads.
static __global__ void fill_kernel(uint32_t *send, int64_t words, int size, int rank, uint32_t seed) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < size * words; i += gridDim.x * 256ll)
        send[i] = word_of(i % words, seed, rank, (int)(i / words));
}
// Adds the number of wrong words in recv (size, words) to *wrong. Ignores this rank's own slot.
static __global__ void verify_kernel(uint32_t *wrong, const uint32_t *recv, int64_t words, int size, int rank,
                                     uint32_t seed) {
    uint32_t found = 0;
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < size * words; i += gridDim.x * 256ll) {
        int from = (int)(i / words);
        found += from != rank && recv[i] != word_of(i % words, seed, from, rank);
    }
    if (found) atomicAdd(wrong, found);
}
static void new_messages(Bench *b, const Way *way, size_t slot) {
    fill_kernel<<<1024, 256, 0, stream_handle(b->traffic)>>>((uint32_t *)way_send(way), (int64_t)(slot / 4),
                                                             b->launch.size, b->launch.rank, ++b->seed);
    check_launch(b->traffic, "fill");
}
static void verify(Bench *b, const Way *way, size_t bytes, size_t slot) {
    const uint32_t *recv = (const uint32_t *)(way_send(way) + bytes);
    verify_kernel<<<1024, 256, 0, stream_handle(b->traffic)>>>(b->wrong, recv, (int64_t)(slot / 4),
                                                               b->launch.size, b->launch.rank, b->seed);
    check_launch(b->traffic, "verify");
}
// Returns false if any rank has received wrong words since the last call. Collective.
static bool all_right(Bench *b) {
    uint32_t wrong = 0;
    copy_to_host(b->traffic, &wrong, b->wrong, sizeof wrong);
    set_zero(b->traffic, b->wrong, sizeof wrong);
    stream_synchronize(b->traffic);
    return agreed(b, !wrong || error_set(&b->error, EXIT_COMMUNICATION, "%u wrong words received by rank %d",
                                         wrong, b->launch.rank));
}

static void exchange(Bench *b, Way *way, size_t slot) {
    if (!way_exchange(way, slot, b->traffic, &b->error))
        fatal(&b->site, EXIT_COMMUNICATION, "%s", b->error.what);
}

// Verifies consecutive exchanges with different payloads, without host synchronization between
// them. This detects ranks that read too early or overwrite data that others still read.
static bool check_way(Bench *b, Way *way, size_t bytes, size_t slot, bool *broken) {
    for (int i = 0; i < CHECKS; i++) {
        new_messages(b, way, slot);
        if (i > 0) exchange(b, way, slot);
        else *broken = !agreed(b, way_exchange(way, slot, b->traffic, &b->error));
        if (*broken) return false;
        verify(b, way, bytes, slot);
    }
    return all_right(b);
}

// --- times ---------------------------------------------------------------------------------------

// Issues y = x w^T, dx = dy w and dw = dy^T x for the four matrices (outputs, inputs) of each
// layer.
static void issue_products(Bench *b) {
    static const int64_t matrix[][2] = {{3 * HIDDEN, HIDDEN},
                                        {HIDDEN, HIDDEN},
                                        {4 * HIDDEN, HIDDEN},
                                        {HIDDEN, 4 * HIDDEN}};
    for (int i = 0; i < 4 * LAYERS; i++) {
        int64_t out = matrix[i % 4][0], in = matrix[i % 4][1];
        matmul_nt(b->compute, (floatX *)b->product, b->x, b->w, TOKENS, out, in, b->workspace);
        matmul_nn(b->compute, (floatX *)b->product, b->dy, b->w, TOKENS, in, out, b->workspace);
        matmul_tn(b->compute, (float *)b->product, b->dy, b->x, out, in, TOKENS, true, b->workspace);
    }
}

static double time_products(Bench *b) {
    synchronize(b);
    event_record(b->start, b->compute);
    issue_products(b);
    event_record(b->stop, b->compute);
    return largest(b, event_elapsed_ms(b->start, b->stop));
}

static void time_alone(Bench *b, Way *way, size_t slot, Row *row) {
    double us[RUNS], host_us[RUNS];
    for (int run = -1; run < RUNS; run++) {
        synchronize(b);
        event_record(b->start, b->traffic);
        double since = monotonic_seconds();
        for (int i = 0; i < TOGETHER; i++) exchange(b, way, slot);
        double issued = monotonic_seconds() - since;
        event_record(b->stop, b->traffic);
        double ms = largest(b, event_elapsed_ms(b->start, b->stop));
        issued = largest(b, issued);
        if (run >= 0) us[run] = 1e3 * ms / TOGETHER, host_us[run] = 1e6 * issued / TOGETHER;
    }
    row->figure[ALONE_US] = median(us, RUNS);
    row->figure[HOST_US] = median(host_us, RUNS);
}

// Returns the time in ms of the matrix products while exchanges run on another stream. Issues
// enough exchanges to last longer than the products. *per_second: number of exchanges per second
// that the slowest rank completes in that time.
static double time_beside(Bench *b, Way *way, size_t slot, double alone_ms, double products_ms,
                          double *per_second) {
    int count = (int)(1.7 * products_ms / alone_ms) + 2, lead = (int)(LEAD_MS / alone_ms) + 1, within = 0;
    if (count > MOST_MARKS) count = MOST_MARKS;
    if (lead >= count) lead = count - 1;
    synchronize(b);
    event_record(b->base, b->traffic);
    for (int i = 0; i < count; i++) {
        if (i == lead) {
            event_record(b->start, b->compute);
            issue_products(b);
            event_record(b->stop, b->compute);
        }
        exchange(b, way, slot);
        event_record(b->mark[i], b->traffic);
    }
    synchronize(b);
    double begin = event_elapsed_ms(b->base, b->start), end = event_elapsed_ms(b->base, b->stop);
    for (int i = 0; i < count; i++) {
        double at = event_elapsed_ms(b->base, b->mark[i]);
        within += at > begin && at <= end;
    }
    *per_second = -largest(b, -within / (1e-3 * (end - begin)));
    return largest(b, end - begin);
}

// Measures the products alternately without and with exchanges, so that the GPU has the same
// temperature in both measurements. sent: bytes that a rank sends per exchange.
static void time_products_beside(Bench *b, Way *way, size_t slot, double sent, Row *row) {
    double alone[RUNS_BESIDE], beside[RUNS_BESIDE], per_second[RUNS_BESIDE];
    for (int run = 0; run < RUNS_BESIDE; run++) {
        alone[run] = time_products(b);
        beside[run] = time_beside(b, way, slot, 1e-3 * row->figure[ALONE_US], alone[run], &per_second[run]);
    }
    double *f = row->figure;
    f[PRODUCTS_MS] = median(alone, RUNS_BESIDE);
    f[BESIDE_MS] = median(beside, RUNS_BESIDE);
    f[RATIO] = f[BESIDE_MS] / f[PRODUCTS_MS];
    f[RATE] = 1e-3 * sent / f[ALONE_US];
    f[RATE_BESIDE] = 1e-9 * sent * median(per_second, RUNS_BESIDE);
    f[MS_PER_GB] = f[RATE_BESIDE] > 0
                       ? (f[BESIDE_MS] - f[PRODUCTS_MS]) / (1e-3 * f[RATE_BESIDE] * f[BESIDE_MS])
                       : 0;
}

// --- output --------------------------------------------------------------------------------------

static void print_head(void) {
    printf("%-20s %4s", "way", "MiB");
    for (int f = 0; f < FIGURES; f++) printf(" %15s", FIGURE[f]);
    printf("\n");
}
static void print_row(const Row *r) {
    printf("%-20s %4d", r->way, r->mb);
    if (r->failed.code) printf("  %s", r->failed.what);
    for (int f = 0; f < FIGURES && !r->failed.code; f++) printf(" %15.3f", r->figure[f]);
    printf("\n");
    fflush(stdout);
}

static void write_quoted(FILE *out, const char *text) {
    Text quoted = {};
    text_add_quoted(&quoted, text);
    fputs(quoted.data, out);
    text_free(&quoted);
}

// Rewrites the whole file after every row, so that it is valid JSON even if a later way hangs.
static bool write_file(const Bench *b, Error *err) {
    char libraries[256];
    FILE *out = fopen(b->path, "w");
    if (!out) return system_error(err, "cannot write %s", b->path);
    device_libraries(libraries, sizeof libraries);
    fprintf(out,
            "{\n \"what\": \"all-to-all within one node, alone and concurrent with matrix products\",\n "
            "\"command\": ");
    write_quoted(out, b->command);
    fprintf(out, ",\n \"commit\": \"%s\",\n \"device\": \"%s\",\n \"gpus\": %d,\n", version_commit(),
            device_name(b->device), b->launch.size);
    fprintf(out, " \"libraries\": \"%s\",\n \"rows\": [\n", libraries);
    for (int i = 0; i < b->rows; i++) {
        const Row *r = &b->row[i];
        fprintf(out, "  {\"way\": \"%s\", \"mib\": %d", r->way, r->mb);
        for (int f = 0; f < FIGURES && !r->failed.code; f++)
            fprintf(out, ", \"%s\": %.4f", FIGURE[f], r->figure[f]);
        if (r->failed.code) fprintf(out, ", \"failed\": "), write_quoted(out, r->failed.what);
        fprintf(out, "}%s\n", i + 1 < b->rows ? "," : "");
    }
    fprintf(out, " ]\n}\n");
    bool ok = !ferror(out);
    return (fclose(out) == 0 && ok) ||
           system_error(err, "cannot write %s; check whether the disk is full", b->path);
}

static void add_row(Bench *b, const Row *row) {
    b->row[b->rows++] = *row;
    if (b->launch.rank != 0) return;
    print_row(row);
    if (b->path && !write_file(b, &b->error)) fatal(&b->site, b->error.code, "%s", b->error.what);
}

// Prints all rows sorted by size, to compare the ways.
static void print_table(const Bench *b) {
    printf("\n");
    print_head();
    for (int s = 0; s < b->sizes; s++) {
        for (int i = 0; i < b->rows; i++) {
            if (b->row[i].mb == b->mb[s]) print_row(&b->row[i]);
        }
    }
}

// --- main ----------------------------------------------------------------------------------------

static bool measure(Bench *b, Way *way, size_t bytes, Row *row, bool *broken) {
    size_t slot = ((size_t)row->mb << 20) / (size_t)b->launch.size / 256 * 256;
    if (!check_way(b, way, bytes, slot, broken)) return false;
    new_messages(b, way, slot);
    time_alone(b, way, slot, row);
    time_products_beside(b, way, slot, (double)slot * (b->launch.size - 1), row);
    verify(b, way, bytes, slot);
    return all_right(b);
}

static void run_way(Bench *b, const WayForm *form) {
    size_t bytes = 0;
    for (int s = 0; s < b->sizes; s++)
        bytes = (size_t)b->mb[s] << 20 > bytes ? (size_t)b->mb[s] << 20 : bytes;
    b->site.phase = form->name;
    Way *way = way_open(form, b->device, b->launch.world, bytes, &b->error);
    bool broken = false;
    for (int s = 0; s < b->sizes && !broken; s++) {
        Row row = {form->name, b->mb[s], {}, {}};
        if (!way || !measure(b, way, bytes, &row, &broken)) row.failed = b->error;
        add_row(b, &row);
        broken = broken || !way;
    }
    if (way) way_close(way, broken);
}

static bool read_options(Bench *b, int argc, char **argv) {
    static const int usual[] = {13, 26, 52, 104};
    const char *flag = "";
    int host = 0, used = snprintf(b->command, sizeof b->command, "mpirun -np %d", b->launch.size);
    bool ok = true;
    for (int i = 0; i < argc && used < (int)sizeof b->command; i++)
        used += snprintf(b->command + used, sizeof b->command - (size_t)used, " %s", argv[i]);
    for (int i = 1; ok && i < argc; i++) {
        if (!strncmp(argv[i], "--", 2))
            flag = argv[i], ok = !strcmp(flag, "--mb") || !strcmp(flag, "--only") || !strcmp(flag, "--out");
        else if (!strcmp(flag, "--only")) b->only = argv[i];
        else if (!strcmp(flag, "--out")) b->path = argv[i];
        else if ((ok = !strcmp(flag, "--mb") && b->sizes < MOST_SIZES && atoi(argv[i]) >= 1 &&
                       atoi(argv[i]) <= 4096))
            b->mb[b->sizes++] = atoi(argv[i]);
    }
    if (!ok)
        return usage_error(&b->error,
                           "usage: node_hop [--mb 13 26 52 104 (up to %d sizes of 1 to 4096)] [--only TEXT] "
                           "[--out FILE.json]",
                           MOST_SIZES);
    for (int i = 0; b->mb[i] == 0 && i < 4; i++) b->mb[i] = usual[i], b->sizes = 4;
    MPI_Comm_size(b->launch.host, &host);
    return (host == b->launch.size && host >= 2 && host <= 8) ||
           usage_error(&b->error, "start 2 to 8 ranks on one machine, one per GPU");
}

static bool open_bench(Bench *b) {
    const int64_t most = 4ll * HIDDEN *
                         (HIDDEN > TOKENS ? HIDDEN : TOKENS);  // number of elements of the largest matrix
    MPI_Comm_rank(b->launch.host, &b->site.gpu);
    b->device = device_open(b->site.gpu, &b->site, &b->error);
    if (!b->device) return false;
    b->compute = stream_create(b->device, "compute");
    b->traffic = stream_create_urgent(b->device, "communication");
    b->start = event_create_timed(b->device), b->stop = event_create_timed(b->device),
    b->base = event_create_timed(b->device);
    for (int i = 0; i < MOST_MARKS; i++) b->mark[i] = event_create_timed(b->device);
    // One allocation: workspace, fp32 products, x, w, dy, number of wrong words.
    b->workspace = device_alloc(b->device,
                                GEMM_WORKSPACE_BYTES + (size_t)most * (sizeof(float) + 3 * sizeof(floatX)) +
                                    256,
                                "matrices", &b->error);
    if (!b->workspace) return false;
    b->product = (uint8_t *)b->workspace + GEMM_WORKSPACE_BYTES;
    b->x = (floatX *)b->product + 2 * most;
    b->w = b->x + most;
    b->dy = b->w + most;
    b->wrong = (uint32_t *)(b->dy + most);
    fill_kernel<<<1024, 256, 0, stream_handle(b->compute)>>>((uint32_t *)b->x, 3 * most / 2, 1, 0, 0);
    check_launch(b->compute, "fill");
    return true;
}

int main(int argc, char **argv) {
    static Bench b;
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    b.site.phase = "benchmark";
    launch_init(&b.launch, &argc, &argv);
    b.site.rank = b.launch.rank;
    bool ok = agreed(&b, read_options(&b, argc, argv)) && agreed(&b, open_bench(&b));
    if (!ok && b.launch.rank == 0) error_print(NULL, b.error.what);
    if (ok) {
        for (int i = 0; i < 20; i++)
            issue_products(&b);  // for half a second, to load libraries and warm up the GPU
        synchronize(&b);
        watchdog_open(&b.site, b.launch.host, b.launch.size, PATIENCE_SECONDS);
        if (b.launch.rank == 0) print_head();
        for (int w = 0; w < WAYS; w++) {
            if (!b.only || strstr(FORMS[w].name, b.only)) run_way(&b, &FORMS[w]);
        }
        if (b.launch.rank == 0) print_table(&b);
        watchdog_close(&b.site);
    }
    launch_finalize(&b.launch);
    return ok ? EXIT_DONE : b.error.code;
}
