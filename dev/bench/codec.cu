// Measures the bandwidth of every kernel between the local gradients and the new model weights,
// relative to a plain device copy on the same GPU (Table 5 of the paper, and more). Built and run
// by dev/bench/codec.sh. Prints a table and writes the same data to FILE as JSON.
//
//   codec_bench [--min-mb 8] [--max-mb 2048] [--runs 15] [--only TEXT] [--out FILE.json]
//
// Sizes are the number of input values x 4 bytes, for any codec. --only selects kernels whose row
// contains TEXT (for ncu).
//
// Bandwidth counts every input once and every output once. Times are medians over the runs,
// measured with events. Launch latency matters in short runs, so each row also shows a kernel that
// moves the same number of bytes without arithmetic. Before each run, the L2 cache is flushed by
// reading a larger buffer. Writing that buffer would leave dirty lines, which the measured kernel
// would have to write back.
#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include "llmc/cuda/internal.h"
#include "llmc/base/version.h"
#include "sdp4bit/kernels.h"
#include "sdp4bit/layout.h"

typedef struct Bench {
    Device *device;
    Stream *stream;
    int runs;
    const char *only;
    FILE *json;
    bool first_row;
    uint4 *flush;
    int64_t flush_bytes;
    double copy_rate;  // bytes per second that a copy reads and writes
} Bench;

// --- memory and time ----------------------------------------------------------------------------

static void stop(const Error *err) {
    error_print(NULL, err->what);
    exit(err->code);
}

// Fills memory with random values around 2^-10, the magnitude of gradients, which are valid both as
// fp32 and as pairs of bf16. signs: 0x80008000 for random signs, or 0 for nonnegative values such
// as second moments.
__global__ void fill_kernel(uint32_t *word, int64_t n, uint32_t seed, uint32_t signs) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t bits = replica_mix((uint64_t)i, seed);
        uint32_t exponents = (114u + (uint32_t)(bits >> 40) % 6u) << 23 | (114u + (uint32_t)(bits >> 50) % 6u)
                                                                              << 7;
        word[i] = ((uint32_t)bits & (signs | 0x007F007Fu)) | exponents;
    }
}

static void *filled(Bench *b, int64_t bytes, uint32_t seed, bool positive = false) {
    Error err;
    void *memory = device_alloc(b->device, (size_t)bytes + 16, "a benchmark", &err);
    if (!memory) stop(&err);
    fill_kernel<<<1024, 256, 0, stream_handle(b->stream)>>>((uint32_t *)memory, bytes / 4, seed,
                                                            positive ? 0 : 0x80008000u);
    check_launch(b->stream, "fill");
    stream_synchronize(b->stream);
    return memory;
}

// Reads `in` and writes `out`, in units of 16 bytes. Each block processes one of `pieces` parts at
// a time. If nothing is written, a store to out[0], whose condition is practically never true,
// prevents the compiler from removing the reads.
__global__ void __launch_bounds__(512) move_kernel(const uint4 *__restrict__ in, int64_t reads,
                                                   uint4 *__restrict__ out, int64_t writes, int64_t pieces) {
    uint4 sum = {};
    for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
#pragma unroll 4
        for (int64_t i = piece * reads / pieces + threadIdx.x; i < (piece + 1) * reads / pieces; i += 512) {
            uint4 x = __ldg(in + i);
            sum.x ^= x.x, sum.y ^= x.y, sum.z ^= x.z, sum.w ^= x.w;
        }
#pragma unroll 4
        for (int64_t i = piece * writes / pieces + threadIdx.x; i < (piece + 1) * writes / pieces; i += 512)
            out[i] = sum;
    }
    if (!writes && (sum.x & sum.y & sum.z & sum.w) == 0xFFFFFFFFu) out[0] = sum;
}
static void move_plainly(Bench *b, const void *in, int64_t read, void *out, int64_t written) {
    int64_t pieces = (read > written ? read : written) / (4 * 512 * 16) + 1,
            most = 8 * b->device->multiprocessors;
    move_kernel<<<(unsigned)(pieces < most ? pieces : most), 512, 0, stream_handle(b->stream)>>>(
        (const uint4 *)in, read / 16, (uint4 *)out, written / 16, pieces);
    check_launch(b->stream, "move");
}

// Returns the median time of launch() in ms.
template <class Launch> static double median_ms(Bench *b, Launch launch) {
    Event *start = event_create_timed(b->device), *end = event_create_timed(b->device);
    std::vector<double> ms;
    for (int run = -3; run < b->runs; run++) {
        move_plainly(b, b->flush, b->flush_bytes, b->flush, 0);
        event_record(start, b->stream);
        launch();
        event_record(end, b->stream);
        event_synchronize(end);
        if (run >= 0) ms.push_back(event_elapsed_ms(start, end));
    }
    event_destroy(start);
    event_destroy(end);
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
}

static bool wanted(const Bench *b, const char *kernel) { return !b->only || strstr(kernel, b->only); }

// Prints and stores one row. ms: time of one run. read, written: bytes that the kernel must move.
static void report(Bench *b, const char *kernel, int64_t elements, int64_t read, int64_t written, double ms) {
    void *in = filled(b, read, 30), *out = filled(b, written, 31);
    double bytes = (double)(read + written), rate = bytes / (ms * 1e-3),
           plain = bytes / (1e-3 * median_ms(b, [&] { move_plainly(b, in, read, out, written); }));
    device_free(b->device, in);
    device_free(b->device, out);
    printf("%-44s %7.0f MB %9.1f us %8.0f GB/s %6.1f %%; without arithmetic %6.1f %%\n", kernel,
           (double)elements * 4 / 1048576, ms * 1e3, rate * 1e-9, 100.0 * rate / b->copy_rate,
           100.0 * plain / b->copy_rate);
    fflush(stdout);
    if (b->json) {
        fprintf(b->json,
                "%s\n    {\"kernel\": \"%s\", \"fp32_bytes\": %lld, \"bytes_moved\": %.0f, \"microseconds\": "
                "%.2f, \"gb_per_s\": %.1f, \"share_of_copy\": %.4f, "
                "\"share_without_arithmetic\": %.4f}",
                b->first_row ? "" : ",", kernel, (long long)elements * 4, bytes, ms * 1e3, rate * 1e-9,
                rate / b->copy_rate, plain / b->copy_rate);
        b->first_row = false;
    }
}

// Writes the fields at the start of the JSON file.
static void start_json(const Bench *b) {
    const char *command = getenv("COMMAND_LINE");
    fprintf(b->json,
            "{\n  \"command\": \"%s\",\n  \"commit\": \"%s\",\n  \"device\": \"%s\",\n  \"copy_gb_per_s\": "
            "%.1f,\n  \"kernels\": [",
            command ? command : "codec", version_commit(), device_name(b->device), b->copy_rate * 1e-9);
}

static void measure_copy(Bench *b) {
    const int64_t bytes = (int64_t)1 << 30;
    void *from = filled(b, bytes, 1), *to = filled(b, bytes, 2);
    b->copy_rate = 2.0 * (double)bytes /
                   (1e-3 * median_ms(b, [&] { copy_on_device(b->stream, to, from, (size_t)bytes); }));
    device_free(b->device, from);
    device_free(b->device, to);
}

// --- one bucket ---------------------------------------------------------------------------------

enum { TENSORS = 24 };

// A bucket of 24 matrices with n elements in total, for nodes x per_node ranks. It has no
// unquantized tensors, because their kernels are not measured.
typedef struct Layout {
    BucketLayout plan;
    Bucket bucket;
    SegmentTable table;
    Segment *segments;
} Layout;

static Layout make_layout(Bench *b, int64_t n, int nodes, int per_node, int border) {
    LayoutTensor tensor[TENSORS];
    for (int i = 0; i < TENSORS; i++) tensor[i] = LayoutTensor{n / TENSORS / border * border, true, 0};
    LayoutOptions options = {nodes, per_node, border, border, INT64_MAX / 4, 1};
    Layout l = {};
    Error err;
    if (!layout_build(&l.plan, tensor, TENSORS, &options, &err)) stop(&err);
    l.bucket = l.plan.bucket[0];
    l.segments = (Segment *)device_alloc(b->device, TENSORS * sizeof(Segment), "a benchmark", &err);
    if (!l.segments) stop(&err);
    copy_to_device(b->stream, l.segments, l.plan.segments, TENSORS * sizeof(Segment));
    stream_synchronize(b->stream);
    l.table.segment = l.segments;
    l.table.count = TENSORS;
    return l;
}
static void free_layout(Bench *b, Layout *l) {
    device_free(b->device, l->segments);
    layout_free(&l->plan);
}

static const RoundingKey KEY = {1234, 1, PURPOSE_GRAD_LEVEL1, 0}, ROTATION = {1234, 1, PURPOSE_ROTATION, 0};

static int64_t coded_bytes(Codec codec, int group, int64_t n) {
    CodecInfo info = codec_info(codec);
    return n * info.bits / 8 + (info.levels ? n / group * 4 : 0);
}

// --- the kernels --------------------------------------------------------------------------------

static const char *transform_name(Transform transform) {
    static const char *const names[] = {"", " Hadamard", " rotation"};
    return names[transform];
}

static void bench_quantize(Bench *b, int64_t n, Codec codec, int group, Transform transform,
                           Rounding rounding) {
    char name[96];
    snprintf(name, sizeof name, "quantize %s/%d%s %s", codec_info(codec).name, group,
             transform_name(transform), rounding == ROUND_STOCHASTIC ? "stochastic" : "nearest");
    if (!wanted(b, name)) return;
    Layout l = make_layout(b, n, 2, 4, 2048);
    QuantizePartitions q = {};
    q.bucket = l.bucket;
    q.table = l.table;
    q.hi = l.bucket.matrix_per_rank;
    q.scale = 0.125f;
    q.transform = transform;
    q.rotation = ROTATION;
    q.codec = codec, q.group = group, q.tail_codec = CODEC_BF16, q.rounding = rounding;
    q.key = KEY;
    q.slots = 4;
    q.message = message_layout(codec, group, l.bucket.matrix_per_rank, 2, CODEC_BF16, 0);
    float *grads = (float *)filled(b, l.bucket.matrix_elements * 4, 3);
    q.grads = grads;
    q.send = (uint8_t *)filled(b, q.message.bytes * 4, 4);
    q.self_slot = q.send;
    double ms = median_ms(b, [&] { kernel_quantize_partitions(b->stream, &q); });
    report(b, name, l.bucket.matrix_elements, l.bucket.matrix_elements * 4,
           coded_bytes(codec, group, l.bucket.matrix_elements), ms);
    device_free(b->device, grads);
    device_free(b->device, q.send);
    free_layout(b, &l);
}

static void bench_requantize(Bench *b, int64_t n, int sources, Codec in_codec, int in_group, Codec codec,
                             int group) {
    char name[96];
    snprintf(name, sizeof name, "sum %d x %s/%d, requantize %s/%d", sources, codec_info(in_codec).name,
             in_group, codec_info(codec).name, group);
    if (!wanted(b, name)) return;
    Layout l = make_layout(b, n, 2, sources, 2048);
    SumRequantize r = {};
    r.sources = sources;
    r.in = message_layout(in_codec, in_group, l.bucket.matrix_per_rank, 2, CODEC_BF16, 0);
    r.in_codec = in_codec, r.in_group = in_group;
    QuantizePartitions &q = r.out;
    q.bucket = l.bucket;
    q.table = l.table;
    q.hi = l.bucket.matrix_per_rank;
    q.codec = codec, q.group = group, q.tail_codec = CODEC_BF16, q.rounding = ROUND_STOCHASTIC;
    q.key = KEY;
    q.slots = 2, q.between = sources - 1;
    q.message = message_layout(codec, group, l.bucket.matrix_per_rank, 1, CODEC_BF16, 0);
    uint8_t *received = (uint8_t *)filled(b, r.in.bytes * sources, 5);
    r.received = received;
    q.send = (uint8_t *)filled(b, q.message.bytes * 2, 6);
    q.self_slot = q.send;
    double ms = median_ms(b, [&] { kernel_sum_requantize(b->stream, &r); });
    int64_t sums = 2 * l.bucket.matrix_per_rank;
    report(b, name, l.bucket.matrix_elements, coded_bytes(in_codec, in_group, sums) * sources,
           coded_bytes(codec, group, sums), ms);
    device_free(b->device, received);
    device_free(b->device, q.send);
    free_layout(b, &l);
}

// Measures summing and requantizing with error feedback, which takes three kernels. Counts the
// bytes that a single fused kernel would move.
static void bench_feedback(Bench *b, int64_t n, int sources, Codec in_codec, int in_group, Codec codec,
                           int group) {
    char name[96];
    snprintf(name, sizeof name, "sum %d x %s/%d, error feedback, quantize %s/%d", sources,
             codec_info(in_codec).name, in_group, codec_info(codec).name, group);
    if (!wanted(b, name)) return;
    Layout l = make_layout(b, n, 2, sources, 2048);
    int64_t shard = l.bucket.matrix_per_rank, sums = 2 * shard;
    SumRequantize r = {};
    r.sources = sources;
    r.in = message_layout(in_codec, in_group, shard, 2, CODEC_BF16, 0);
    r.in_codec = in_codec, r.in_group = in_group;
    QuantizePartitions &q = r.out;
    q.bucket = l.bucket;
    q.table = l.table;
    q.hi = shard;
    q.scale = 1.0f;
    q.codec = codec, q.group = group, q.tail_codec = CODEC_BF16, q.rounding = ROUND_STOCHASTIC;
    q.key = KEY;
    q.slots = 2, q.between = sources - 1;
    q.message = message_layout(codec, group, shard, 1, CODEC_BF16, 0);
    uint8_t *received = (uint8_t *)filled(b, r.in.bytes * sources, 5);
    float *values = (float *)filled(b, sums * 4, 11);
    Residual residual = {values, nullptr, false};
    r.received = received;
    q.grads = values;
    q.send = (uint8_t *)filled(b, q.message.bytes * 2, 6);
    q.self_slot = q.send;
    double ms = median_ms(b, [&] {
        kernel_feed_sums(b->stream, &r, &residual);
        kernel_quantize_partitions(b->stream, &q);
        kernel_keep_residual(b->stream, &q, &residual);
    });
    report(b, name, l.bucket.matrix_elements, coded_bytes(in_codec, in_group, sums) * sources + sums * 4,
           coded_bytes(codec, group, sums) + sums * 4, ms);
    device_free(b->device, received);
    device_free(b->device, values);
    device_free(b->device, q.send);
    free_layout(b, &l);
}

static void bench_final(Bench *b, int64_t n, int sources, Codec codec, int group, Transform transform) {
    char name[96];
    snprintf(name, sizeof name, "final sum %d x %s/%d%s", sources, codec_info(codec).name, group,
             transform_name(transform));
    if (!wanted(b, name)) return;
    Layout l = make_layout(b, n, sources, 1, 2048);
    SumFinal f = {};
    int64_t shard = l.bucket.matrix_per_rank;
    f.sources = sources;
    f.in = message_layout(codec, group, shard, 1, CODEC_BF16, 0);
    f.codec = codec, f.group = group, f.tail_codec = CODEC_BF16;
    f.transform = transform;
    f.rotation = ROTATION;
    f.bucket = l.bucket;
    f.table = l.table;
    f.hi = shard;
    uint8_t *received = (uint8_t *)filled(b, f.in.bytes * sources, 7);
    f.received = received;
    f.own.matrix = (float *)filled(b, shard * 4, 8);
    f.matrix_partials = (float *)filled(b, shard / HADAMARD_ORDER * 4, 9);
    double ms = median_ms(b, [&] { kernel_sum_final(b->stream, &f); });
    report(b, name, l.bucket.matrix_elements, coded_bytes(codec, group, shard) * sources,
           shard * 4 + shard / HADAMARD_ORDER * 4, ms);
    device_free(b->device, received);
    device_free(b->device, f.own.matrix);
    device_free(b->device, f.matrix_partials);
    free_layout(b, &l);
}

static StepStatus *applied_step(Bench *b) {
    StepStatus control = {0.9, 0.95, 1, 2.5f, 3.0f, 0.875f, 6e-4f, 0.1f, 0.05f, 1, 0, {}};
    StepStatus *memory = (StepStatus *)filled(b, sizeof control, 10);
    copy_to_device(b->stream, memory, &control, sizeof control);
    stream_synchronize(b->stream);
    return memory;
}

static void bench_update(Bench *b, int64_t n, Codec codec, int group, Rounding rounding) {
    bool quantized = codec_info(codec).levels != 0;
    char name[96];
    if (quantized)
        snprintf(name, sizeof name, "AdamW, difference, %s/%d %s", codec_info(codec).name, group,
                 rounding == ROUND_STOCHASTIC ? "stochastic" : "nearest");
    else snprintf(name, sizeof name, "AdamW, %s", codec_info(codec).name);
    if (!wanted(b, name)) return;
    Layout l = make_layout(b, n, 1, 1, 2048);
    int64_t shard = l.bucket.matrix_per_rank;
    MessageLayout m = message_layout(codec, group, shard, 1, FLOATX_CODEC, 0);
    UpdateShard u = {};
    StepStatus *control = applied_step(b);
    float *grads = (float *)filled(b, shard * 4, 11);
    floatX *weights = (floatX *)filled(b, shard * (int64_t)sizeof(floatX), 12);
    uint8_t *message = (uint8_t *)filled(b, m.bytes, 13);
    uint64_t *fault = (uint64_t *)filled(b, sizeof *fault, 17);
    u.control = control;
    u.beta1 = 0.9f, u.beta2 = 0.95f, u.epsilon = 1e-8f, u.weight_decay = 0.1f;
    u.bucket = l.bucket;
    u.table = l.table;
    u.matrix_grads = grads;
    u.matrix_weights = weights;
    u.master = (float *)filled(b, shard * 4, 14);
    u.exp_avg = (float *)filled(b, shard * 4, 15);
    u.exp_avg_sq = (float *)filled(b, shard * 4, 16, true);
    u.codec = codec, u.group = group, u.rounding = rounding;
    u.difference = true;
    u.key = KEY;
    u.codes = message;
    u.scales = (float *)(message + m.scales);
    u.tail = message + m.tail;
    u.fault = fault;
    u.code = fault_code(FAULT_OF_UPDATE, 0);
    kernel_update_shard(b->stream, &u);
    double ms = median_ms(b, [&] { kernel_update_shard(b->stream, &u); });
    report(b, name, shard, shard * (4 * 4 + (quantized ? (int64_t)sizeof(floatX) : 0)),
           shard * 3 * 4 + coded_bytes(codec, group, shard), ms);
    device_free(b->device, control);
    device_free(b->device, grads);
    device_free(b->device, weights);
    device_free(b->device, message);
    device_free(b->device, u.master);
    device_free(b->device, u.exp_avg);
    device_free(b->device, u.exp_avg_sq);
    free_layout(b, &l);
}

static void bench_apply(Bench *b, int64_t n, Codec codec, int group) {
    bool quantized = codec_info(codec).levels != 0;
    char name[96];
    snprintf(name, sizeof name, quantized ? "apply %s/%d differences" : "apply %s", codec_info(codec).name,
             group);
    if (!wanted(b, name)) return;
    Layout l = make_layout(b, n, 2, 2, 2048);
    ApplyWeights a = {};
    a.message = message_layout(codec, group, l.bucket.matrix_per_rank, 1, FLOATX_CODEC, 0);
    StepStatus *control = applied_step(b);
    uint8_t *messages = (uint8_t *)filled(b, a.message.bytes * 4, 17);
    a.control = control;
    a.bucket = l.bucket;
    a.messages = messages;
    a.nodes = 2, a.per_node = 2;
    a.codec = codec, a.group = group;
    a.difference = true;
    a.weights = (floatX *)filled(b, l.bucket.matrix_elements * (int64_t)sizeof(floatX), 18);
    double ms = median_ms(b, [&] { kernel_apply_weights(b->stream, &a); });
    report(b, name, l.bucket.matrix_elements,
           l.bucket.matrix_elements * (quantized ? 2 : 0) +
               coded_bytes(codec, group, l.bucket.matrix_elements),
           l.bucket.matrix_elements * 2, ms);
    device_free(b->device, control);
    device_free(b->device, messages);
    device_free(b->device, a.weights);
    free_layout(b, &l);
}

// Simulates an update: changes each weight by a random amount in [-change, change].
__global__ void move_kernel(uint16_t *fresh, const uint16_t *old, int64_t n, float change) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        float draw = (float)(int)(replica_mix((uint64_t)i, 77) >> 40) / 8388608.0f - 1.0f;
        fresh[i] = bf16_from_float(bf16_to_float(old[i]) + change * draw);
    }
}

// Measures lossless weight coding. Weights are around 2^-10, and their changes take about 3 bits
// per weight. Two payloads are decoded alternately: one applies the changes, the other reverts
// them.
static void bench_lossless(Bench *b, int64_t n) {
    const char *names[] = {"lossless weights, encode", "lossless weights, pack", "lossless weights, decode"};
    if (!wanted(b, names[0]) && !wanted(b, names[1]) && !wanted(b, names[2])) return;
    n = n / 32 * 32;
    LosslessLayout m = lossless_layout(n, 0);
    StepStatus *control = applied_step(b);
    uint8_t *weights[2] = {(uint8_t *)filled(b, 2 * n, 12), (uint8_t *)filled(b, 2 * n, 13)};
    uint8_t *coded = (uint8_t *)filled(b, m.most, 14), *message[2];
    uint64_t *fault = (uint64_t *)filled(b, sizeof *fault, 17);
    uint32_t *length = (uint32_t *)filled(b, sizeof *length, 18), bytes = 0;
    move_kernel<<<1024, 256, 0, stream_handle(b->stream)>>>((uint16_t *)weights[1], (uint16_t *)weights[0], n,
                                                            1e-5f);
    for (int way = 1; way >= 0; way--) {
        message[way] = (uint8_t *)filled(b, m.most, 15);
        CodeWeights c = {control, m, weights[way], weights[1 - way], weights[way], coded, length};
        double ms = median_ms(b, [&] { kernel_code_weights(b->stream, &c); });
        copy_to_host(b->stream, &bytes, length, sizeof bytes);
        stream_synchronize(b->stream);
        if (way == 0 && wanted(b, names[0])) report(b, names[0], n, 4 * n, bytes, ms);
        ms = median_ms(b, [&] { kernel_pack_weights(b->stream, &m, coded, message[way]); });
        if (way == 0 && wanted(b, names[1])) report(b, names[1], n, bytes, bytes, ms);
    }
    printf("lossless weights: %.3f bits per weight\n", 8.0 * bytes / (double)n);
    set_zero(b->stream, fault, sizeof *fault);
    DecodeWeights d = {control, m, message[0], m.most, m.most, 1, 1, weights[0], fault, 1};
    int way = 0;
    double ms = median_ms(b, [&] {
        d.messages = message[way];
        kernel_decode_weights(b->stream, &d);
        way = 1 - way;
    });
    if (wanted(b, names[2])) report(b, names[2], n, 2 * n + bytes, 2 * n, ms);
    uint64_t found;
    copy_to_host(b->stream, &found, fault, sizeof found);
    stream_synchronize(b->stream);
    if (found) fatal(NULL, EXIT_COMMUNICATION, "lossless weights could not be decoded");
    void *memory[] = {control, weights[0], weights[1], coded, message[0], message[1], fault, length};
    for (void *each : memory) device_free(b->device, each);
}

// Measures the kernels of an outer sync of one bucket (local steps).
static void bench_local(Bench *b, int64_t n) {
    const char *names[] = {"local steps, pseudo-gradient", "local steps, outer step", "local steps, mix",
                           "local steps, round"};
    bool any = false;
    for (const char *name : names) any |= wanted(b, name);
    if (!any) return;
    float *master = (float *)filled(b, n * 4, 22), *outer = (float *)filled(b, n * 4, 23),
          *momentum = (float *)filled(b, n * 4, 24), *gradient = (float *)filled(b, n * 4, 25);
    floatX *weights = (floatX *)gradient;
    report(b, names[0], n, n * 8, n * 4,
           median_ms(b, [&] { kernel_pseudo_gradient(b->stream, gradient, outer, master, n); }));
    report(b, names[1], n, n * 12, n * 8, median_ms(b, [&] {
               kernel_outer_step(b->stream, outer, momentum, gradient, 0.7f, 0.9f, n, NULL);
           }));
    report(b, names[2], n, n * 8, n * 4,
           median_ms(b, [&] { kernel_mix_outer(b->stream, master, outer, 0.5f, n, NULL); }));
    report(b, names[3], n, n * 4, n * (int64_t)sizeof(floatX),
           median_ms(b, [&] { kernel_narrow(b->stream, weights, master, n); }));
    for (float *each : {master, outer, momentum, gradient}) device_free(b->device, each);
}

static void bench_norm(Bench *b, int64_t n) {
    if (!wanted(b, "square partial sums, tree of partial sums")) return;
    float *x = (float *)filled(b, n * 4, 19), *partials = (float *)filled(b, n / HADAMARD_ORDER * 4, 20),
          *sum = (float *)filled(b, 4, 21);
    report(b, "square partial sums", n, n * 4, n / HADAMARD_ORDER * 4,
           median_ms(b, [&] { kernel_square_partials(b->stream, partials, x, n); }));
    report(b, "tree of partial sums", n, n / HADAMARD_ORDER * 4, 0,
           median_ms(b, [&] { kernel_tree_sum(b->stream, sum, partials, n / HADAMARD_ORDER); }));
    device_free(b->device, x);
    device_free(b->device, partials);
    device_free(b->device, sum);
}

static void bench_size(Bench *b, int64_t n) {
    const Transform NONE = TRANSFORM_NONE, HADAMARD = TRANSFORM_HADAMARD, ROTATE = TRANSFORM_ROTATION;
    bench_quantize(b, n, CODEC_INT8, 128, NONE, ROUND_STOCHASTIC);
    bench_quantize(b, n, CODEC_INT8, 128, HADAMARD, ROUND_STOCHASTIC);
    bench_quantize(b, n, CODEC_INT8, 512, HADAMARD, ROUND_STOCHASTIC);
    bench_quantize(b, n, CODEC_INT8, 2048, HADAMARD, ROUND_STOCHASTIC);
    bench_quantize(b, n, CODEC_INT4, 128, HADAMARD, ROUND_STOCHASTIC);
    bench_quantize(b, n, CODEC_INT4, 128, HADAMARD, ROUND_NEAREST);
    bench_quantize(b, n, CODEC_BF16, 32, NONE, ROUND_NEAREST);
    bench_requantize(b, n, 2, CODEC_INT8, 128, CODEC_INT4, 128);
    bench_requantize(b, n, 4, CODEC_INT8, 128, CODEC_INT4, 128);
    bench_requantize(b, n, 8, CODEC_INT8, 512, CODEC_INT4, 128);
    bench_requantize(b, n, 4, CODEC_BF16, 32, CODEC_BF16, 32);
    bench_final(b, n, 2, CODEC_INT4, 128, NONE);
    bench_final(b, n, 2, CODEC_INT4, 128, HADAMARD);
    bench_final(b, n, 4, CODEC_INT8, 128, HADAMARD);
    bench_final(b, n, 4, CODEC_BF16, 32, NONE);
    bench_quantize(b, n, CODEC_INT8, 128, ROTATE, ROUND_STOCHASTIC);
    bench_quantize(b, n, CODEC_INT8, 512, ROTATE, ROUND_STOCHASTIC);
    bench_quantize(b, n, CODEC_EDEN4, EDEN_GROUP, ROTATE, ROUND_NEAREST);
    bench_quantize(b, n, CODEC_EDEN3, EDEN_GROUP, ROTATE, ROUND_NEAREST);
    bench_requantize(b, n, 4, CODEC_INT8, 128, CODEC_EDEN4, EDEN_GROUP);
    bench_requantize(b, n, 8, CODEC_INT8, 512, CODEC_EDEN4, EDEN_GROUP);
    bench_requantize(b, n, 8, CODEC_INT8, 512, CODEC_EDEN3, EDEN_GROUP);
    bench_requantize(b, n, 8, CODEC_INT8, 512, CODEC_EDEN2, EDEN_GROUP);
    bench_feedback(b, n, 8, CODEC_INT8, 512, CODEC_EDEN2, EDEN_GROUP);
    bench_feedback(b, n, 8, CODEC_INT8, 512, CODEC_INT4, 128);
    bench_final(b, n, 2, CODEC_EDEN4, EDEN_GROUP, ROTATE);
    bench_final(b, n, 4, CODEC_EDEN4, EDEN_GROUP, ROTATE);
    bench_final(b, n, 2, CODEC_EDEN3, EDEN_GROUP, ROTATE);
    bench_final(b, n, 2, CODEC_EDEN2, EDEN_GROUP, ROTATE);
    bench_update(b, n, CODEC_INT4, 2048, ROUND_NEAREST);
    bench_update(b, n, CODEC_INT4, 128, ROUND_STOCHASTIC);
    bench_update(b, n, FLOATX_CODEC, 32, ROUND_NEAREST);
    bench_apply(b, n, CODEC_INT4, 2048);
    bench_apply(b, n, FLOATX_CODEC, 32);
    bench_lossless(b, n);
    bench_local(b, n);
    bench_norm(b, n);
}

int main(int argc, char **argv) {
    Bench b = {};
    int64_t smallest = 8, largest = 2048;
    const char *out = NULL;
    b.runs = 15;
    for (int i = 1; i < argc; i += 2) {
        bool known = i + 1 < argc;
        if (known && !strcmp(argv[i], "--min-mb")) smallest = atoll(argv[i + 1]);
        else if (known && !strcmp(argv[i], "--max-mb")) largest = atoll(argv[i + 1]);
        else if (known && !strcmp(argv[i], "--runs")) b.runs = atoi(argv[i + 1]);
        else if (known && !strcmp(argv[i], "--only")) b.only = argv[i + 1];
        else if (known && !strcmp(argv[i], "--out")) out = argv[i + 1];
        else known = false;
        if (!known || smallest < 1 || b.runs < 1) {
            fprintf(stderr,
                    "usage: codec_bench [--min-mb 8] [--max-mb 2048] [--runs 15] [--only TEXT] [--out "
                    "FILE.json]\n");
            return EXIT_USAGE;
        }
    }
    static const Site SITE = {-1, 0, 0, 0, "codec benchmark"};
    Error err;
    b.device = device_open(0, &SITE, &err);
    if (!b.device) stop(&err);
    b.stream = stream_create(b.device, "benchmark");
    b.flush_bytes = 4 * (int64_t)b.device->l2_bytes;
    b.flush = (uint4 *)filled(&b, b.flush_bytes, 0);
    measure_copy(&b);
    printf("%s: a copy of 1 GB reads and writes %.0f GB/s\n", device_name(b.device), b.copy_rate * 1e-9);
    if (out && !(b.json = fopen(out, "w"))) {
        perror(out);
        return EXIT_ENVIRONMENT;
    }
    b.first_row = true;
    if (b.json) start_json(&b);
    // Sizes grow by a factor of 4 up to 128 MB, then by 2.
    for (int64_t mb = smallest; mb <= largest; mb *= mb < 128 ? 4 : 2) bench_size(&b, mb * 262144);
    if (b.json) fprintf(b.json, "\n  ]\n}\n");
    if (b.json && fclose(b.json)) {
        perror(out);
        return EXIT_ENVIRONMENT;
    }
    device_free(b.device, b.flush);
    stream_destroy(b.stream);
    device_close(b.device);
    return EXIT_DONE;
}
