// Tests the CUDA device: refused devices, memory, asynchronous copies, and the order of streams and
// events.
#include <cub/device/device_radix_sort.cuh>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "llmc/cuda/internal.h"
#include "llmc/cuda/limits.h"
#include "test/gpu/check.h"

// Keeps a stream busy for some milliseconds, then writes `value`.
static __global__ void busy_kernel(int *out, int value, int milliseconds) {
    uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < (uint64_t)milliseconds * 1000000);
    *out = value;
}
static void busy(Stream *stream, int *out, int value, int milliseconds) {
    busy_kernel<<<1, 1, 0, stream_handle(stream)>>>(out, value, milliseconds);
    check_launch(stream, "busy");
}

static uint8_t pattern(size_t i, int seed) {
    return (uint8_t)((i * 2654435761u + (size_t)seed * 40503u) >> 13);
}

static void test_open(Checks *c, Device *device) {
    char text[256];
    size_t available = 0, total = 0;
    device_libraries(text, sizeof text);
    device_memory(device, &available, &total);
    printf("%s, %d multiprocessors, %.1f GB, peak %.1f TFLOP/s, %s\n", device_name(device),
           device->multiprocessors, 1e-9 * (double)total, 1e-12 * device_peak_flops(device), text);
    check(c, strcmp(device_backend(), "cuda") == 0 && device_kind()->own_memory, "the backend is %s",
          device_backend());
    check(c, strstr(text, "cuBLASLt") && strstr(text, "cuDNN") && strstr(text, "NCCL"),
          "the libraries are %s", text);
    check(c, available > 0 && available <= total, "%zu of %zu bytes free", available, total);
    check(c, device_site(device)->rank == 3, "the device has another site");
    if (strstr(device_name(device), "H100 80GB HBM3") || strstr(device_name(device), "H200")) {
        check(c, device_peak_flops(device) == 989.4e12, "peak of %s is %g", device_name(device),
              device_peak_flops(device));
    }
    int gpus = device_count(2);
    check(c, gpus > 0 && gpus < 1000, "%d GPUs", gpus);
    const int missing[] = {-1, 1000};
    for (int i = 0; i < 2; i++) {
        Error err = {};
        check(c,
              device_open(missing[i], NULL, &err) == NULL && err.code == EXIT_ENVIRONMENT &&
                  strstr(err.what, "does not exist"),
              "GPU %d: %s", missing[i], err.what);
    }
    check(c, !device->deterministic, "deterministic mode is on by default");
    device_set_deterministic(device, true);
    check(c, device->deterministic, "deterministic mode is not on");
}

static void test_memory(Checks *c, Device *device) {
    Error err = {};
    Stream *stream = stream_create(device, "compute");
    const size_t sizes[] = {0, 1, 255, 256, 257, 1000003};
    uint8_t *back = (uint8_t *)malloc(1000003);
    for (int round = 0; round < 2; round++) {  // the second round reuses the memory of the first
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            uint8_t *memory = (uint8_t *)device_alloc(device, sizes[i], "a test", &err);
            check(c, memory && (uintptr_t)memory % 256 == 0, "%zu bytes at %p", sizes[i], (void *)memory);
            memset(back, 0xEE, sizes[i]);
            copy_to_host(stream, back, memory, sizes[i]);
            stream_synchronize(stream);
            bool zero = true;
            for (size_t j = 0; j < sizes[i]; j++) zero = zero && back[j] == 0;
            check(c, zero, "%zu new bytes are not zero", sizes[i]);
            memset(back, 0xAB, sizes[i]);
            copy_to_device(stream, memory, back, sizes[i]);
            stream_synchronize(stream);
            device_free(device, memory);
        }
    }
    free(back);
    check(c,
          device_alloc(device, (size_t)1 << 50, "the weight arena", &err) == NULL &&
              err.code == EXIT_ENVIRONMENT && strstr(err.what, "the weight arena"),
          "a petabyte: %s", err.what);
    int *word = (int *)device_alloc(device, sizeof(int), "a test", &err);
    busy(stream, word, 1, 0);  // the refused allocation must not be reported as this launch's error
    stream_destroy(stream);
    device_free(device, word);
}

// The program's count of allocated bytes agrees with the driver's, except for the driver's
// granularity of 2 MiB per allocation.
static void test_count(Checks *c, Device *device) {
    Error err = {};
    size_t before = device_allocated(device), taken = device_taken(device), share = device_share(device, 1),
           size = (size_t)300 << 20, slack = (size_t)4 << 20;
    void *memory = device_alloc(device, size, "a test", &err);
    size_t now = device_taken(device);
    check(c, device_allocated(device) - before == size, "%zu bytes counted instead of %zu",
          device_allocated(device) - before, size);
    check(c, now >= taken + size && now <= taken + size + slack, "%zu bytes are gone after allocating %zu",
          now - taken, size);
    check(c, device_share(device, 1) + (now - taken) <= share + slack, "%zu bytes free, before %zu",
          device_share(device, 1), share);
    check(c, device_share(device, 2) <= share / 2, "half of %zu bytes is %zu", share,
          device_share(device, 2));
    device_free(device, memory);
    check(c, device_allocated(device) - before == size, "freed memory is still counted");
}

// Uploads data smaller and much larger than the ring buffer, from host memory that is overwritten
// immediately, and downloads them again.
static void test_copies(Checks *c, Device *device) {
    Error err = {};
    const size_t sizes[] = {
        1, 7, 4096, STAGING_BYTES, STAGING_BYTES + 1, (size_t)STAGING_BYTES * STAGING_SLOTS * 3 + 12345};
    size_t most = sizes[5];
    Stream *stream = stream_create(device, "compute");
    uint8_t *memory = (uint8_t *)device_alloc(device, most, "a test", &err), *host = (uint8_t *)malloc(most),
            *back = (uint8_t *)malloc(most);
    for (int i = 0; i < 6; i++) {
        for (size_t j = 0; j < sizes[i]; j++) host[j] = pattern(j, i);
        copy_to_device(stream, memory, host, sizes[i]);
        memset(host, 0x5A, sizes[i]);
        copy_to_host(stream, back, memory, sizes[i]);
        stream_synchronize(stream);
        size_t wrong = 0;
        for (size_t j = 0; j < sizes[i]; j++) wrong += back[j] != pattern(j, i);
        check(c, wrong == 0, "%zu of %zu bytes are wrong after the round trip", wrong, sizes[i]);
    }
    copy_to_device(stream, memory, NULL, 0);
    copy_to_host(stream, NULL, memory, 0);
    // {to, from} of 1000-byte moves; most ranges overlap.
    const int moves[][2] = {{0, 3}, {3, 0}, {0, 500}, {500, 0}, {0, 1000}, {17, 17}};
    for (int i = 0; i < 6; i++) {
        for (size_t j = 0; j < 2000; j++) host[j] = pattern(j, 9);
        copy_to_device(stream, memory, host, 2000);
        copy_on_device(stream, memory + moves[i][0], memory + moves[i][1], 1000);
        memmove(host + moves[i][0], host + moves[i][1], 1000);
        set_zero(stream, memory + 1501, 3);
        memset(host + 1501, 0, 3);
        copy_to_host(stream, back, memory, 2000);
        stream_synchronize(stream);
        check(c, memcmp(back, host, 2000) == 0, "moving from %d to %d on the device", moves[i][1],
              moves[i][0]);
    }
    stream_destroy(stream);
    device_free(device, memory);
    free(host);
    free(back);
}

// Copies in both directions return immediately while the stream is busy. Data are copied in stream
// order.
static void test_asynchrony(Checks *c, Device *device) {
    Error err = {};
    const int milliseconds = 200;
    Stream *stream = stream_create(device, "compute");
    Event *landed = event_create(device);
    int *word = (int *)device_alloc(device, 2 * sizeof(int), "a test", &err), sent = 41, back[2] = {-1, -1};
    copy_to_host(stream, back, word, sizeof back);  // the first copy creates the ring buffer
    stream_synchronize(stream);
    double start = monotonic_seconds();
    busy(stream, word, 7, milliseconds);
    copy_to_device(stream, word + 1, &sent, sizeof sent);
    sent = 99;
    copy_to_host(stream, back, word, sizeof back);
    event_record(landed, stream);
    double issued = monotonic_seconds() - start;
    check(c, issued < 0.5e-3 * milliseconds, "three calls took %.1f ms while the stream was busy",
          1e3 * issued);
    event_synchronize(landed);
    double waited = monotonic_seconds() - start;
    check(c, waited > 0.9e-3 * milliseconds, "the event was waited for only %.1f ms", 1e3 * waited);
    check(c, back[0] == 7 && back[1] == 41, "%d and %d arrived, not 7 and 41", back[0], back[1]);
    stream_destroy(stream);
    event_destroy(landed);
    device_free(device, word);
}

// A host function runs in stream order: it reads data that were downloaded before it, and later
// uploads see its results. None of the calls blocks.
typedef struct Doubling {
    const int *from;
    int *to;
} Doubling;
static void double_it(void *context) {
    const Doubling *d = (const Doubling *)context;
    *d->to = 2 * *d->from;
}

static void test_host_calls(Checks *c, Device *device) {
    Error err = {};
    const int milliseconds = 200;
    Stream *stream = stream_create(device, "compute");
    int *word = (int *)device_alloc(device, 2 * sizeof(int), "a test", &err), back = -1;
    int *pinned = (int *)host_alloc(device, 2 * sizeof(int), "a test", &err);
    check(c, pinned[0] == 0 && pinned[1] == 0, "new host memory is not zero");
    double start = monotonic_seconds();
    busy(stream, word, 21, milliseconds);
    copy_to_pinned(stream, pinned, word, sizeof(int));
    Doubling doubling = {pinned, pinned + 1};
    stream_host_call(stream, double_it, &doubling, sizeof doubling);
    memset(&doubling, 0, sizeof doubling);
    copy_from_pinned(stream, word + 1, pinned + 1, sizeof(int));
    double issued = monotonic_seconds() - start;
    check(c, issued < 0.5e-3 * milliseconds, "the calls took %.1f ms while the stream was busy",
          1e3 * issued);
    stream_synchronize(stream);
    copy_to_host(stream, &back, word + 1, sizeof back);
    stream_synchronize(stream);
    check(c, back == 42, "%d was uploaded, not 42", back);
    stream_destroy(stream);
    device_free(device, word);
    host_free(device, pinned);
}

static void test_events(Checks *c, Device *device) {
    Error err = {};
    Stream *first = stream_create(device, "compute"), *second = stream_create(device, "communication");
    Event *start = event_create_timed(device), *stop = event_create_timed(device),
          *order = event_create(device);
    int *word = (int *)device_alloc(device, 2 * sizeof(int), "a test", &err), back[2] = {-1, -1};
    event_record(start, first);
    busy(first, word, 5, 100);
    event_record(stop, first);
    copy_on_device(second, word + 1, word, sizeof(int));  // without an event: the other stream is still busy
    copy_to_host(second, back, word + 1, sizeof(int));
    stream_synchronize(second);
    event_record(order, first);
    stream_wait(second, order);
    copy_on_device(second, word + 1, word, sizeof(int));  // ordered by the event
    copy_to_host(second, back + 1, word + 1, sizeof(int));
    stream_synchronize(second);
    check(c, back[0] == 0, "a stream waited for another stream without an event");
    check(c, back[1] == 5, "a stream did not wait for an event: %d", back[1]);
    double ms = event_elapsed_ms(start, stop);
    check(c, ms >= 99 && ms < 150, "100 ms of work took %.2f ms by the events", ms);
    check(c, event_elapsed_ms(stop, start) < 0, "elapsed time from stop to start is negative");
    Stream *urgent = stream_create_urgent(device, "communication");
    int usual = 0, priority = 0;
    cudaStreamGetPriority(stream_handle(first), &usual);
    cudaStreamGetPriority(stream_handle(urgent), &priority);
    // A lower number is a higher priority.
    check(c, usual == 0 && priority < usual, "priority %d of an urgent stream, %d of another", priority,
          usual);
    stream_destroy(urgent);
    stream_destroy(first);
    stream_destroy(second);
    event_destroy(start);
    event_destroy(stop);
    event_destroy(order);
    device_free(device, word);
}

// limits.h reserves enough memory for the sort in the embedding's backward.
static void test_sort(Checks *c) {
    const int rows[] = {1, 31, 5000, 65536, 1 << 20, 3400000, 1 << 26};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        size_t bytes = 0, planned = scratch_sort_bytes(rows[i]);
        int32_t *none = NULL;
        cudaError_t status = cub::DeviceRadixSort::SortPairs(NULL, bytes, none, none, none, none, rows[i], 0,
                                                             32);
        check(c, status == cudaSuccess && bytes <= planned,
              "the sort of %d rows needs %zu bytes, reserved %zu", rows[i], bytes, planned);
    }
}

int main(void) {
    Checks checks = {"test_device_gpu", 0, 0};
    Site site = {};
    site.rank = 3;
    site.phase = "a test";
    Error err = {};
    Device *device = device_open(0, &site, &err);
    if (!device) fatal(NULL, err.code, "%s", err.what);
    test_open(&checks, device);
    test_memory(&checks, device);
    test_count(&checks, device);
    test_copies(&checks, device);
    test_asynchrony(&checks, device);
    test_host_calls(&checks, device);
    test_events(&checks, device);
    test_sort(&checks);
    device_close(device);
    return checks_end(&checks);
}
