// CPU backend of device.h. A Stream runs its work in the calling thread, so work is complete when a
// call returns. An Event records the monotonic clock. Linked into train_gpt_cpu and the tests.
#include "llmc/device.h"

#include <cblas.h>
#include <float.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "llmc/ranks/heartbeat.h"

struct Device {
    int index;
    const Site *site;
    char name[128];
    size_t allocated;  // total bytes of device_alloc
};
struct Stream {
    Device *device;
    const char *name;
};
struct Event {
    Device *device;
    bool timed;
    double recorded_ms;  // monotonic clock; 0 before the first record
};

enum { ALIGNMENT = 256 };

// --- the floating-point environment --------------------------------------------------------------

// Returns true if the CPU computes with denormals. Tests this by arithmetic instead of reading a
// control register, so that the test works on all CPUs. volatile prevents constant folding.
static bool denormals_are_kept(void) {
    volatile float smallest_normal = FLT_MIN, half = 0.5f, two_to_24 = 16777216.0f;
    volatile float denormal = smallest_normal * half;  // 0 under flush-to-zero
    uint32_t bits = 0x00400000u;                       // the same number, without arithmetic
    float made;
    memcpy(&made, &bits, sizeof made);
    volatile float input = made;
    volatile float scaled = input * two_to_24;  // 0 under denormals-are-zero
    return denormal > 0.0f && scaled > 0.0f;
}

static bool rounds_to_nearest_even(void) {
    volatile float one = 1.0f, tie = 0x1p-24f, above_tie = 0x1.8p-24f;
    volatile float from_tie = one + tie;          // rounding up gives 1 + 2^-23
    volatile float from_above = one + above_tie;  // rounding down or toward zero gives 1
    return from_tie == 1.0f && from_above == 1.0f + 0x1p-23f;
}

// --- properties ----------------------------------------------------------------------------------

// Writes the CPU name from /proc/cpuinfo, or "CPU unknown processor".
static void read_cpu_name(char *name, size_t bytes) {
    snprintf(name, bytes, "CPU unknown processor");
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (!file) return;
    char line[256];
    while (fgets(line, sizeof line, file)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        line[strcspn(line, "\n")] = '\0';
        snprintf(name, bytes, "CPU %.100s", colon + 1 + strspn(colon + 1, " \t"));
        break;
    }
    fclose(file);
}

// OpenBLAS maps its buffer at the first large matrix product, and hangs if that fails. So this
// function checks that there is memory for the buffer, then runs the first product. It is called
// before free memory is measured.
static bool warm_up_blas(Error *err) {
    enum { N = 128 };
    const size_t buffer = (size_t)(128 + 16) << 20;  // mapped per thread on x86-64, plus a margin
    void *space = mmap(NULL, buffer, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (space == MAP_FAILED)
        return system_error(err,
                            "out of memory: OpenBLAS needs %zu bytes of workspace; raise ulimit -v or use a "
                            "machine with more memory",
                            buffer);
    munmap(space, buffer);
    float *matrices = xcalloc(3 * N * N, sizeof *matrices, "a first matrix product");
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, N, N, N, 1.0f, matrices, N, matrices + N * N, N,
                0.0f, matrices + 2 * N * N, N);
    free(matrices);
    return true;
}

int device_count(int needed) { return INT_MAX; }
void device_identity(int index, char *text, size_t bytes) { *text = '\0'; }

Device *device_open(int index, const Site *site, Error *err) {
    if (!denormals_are_kept()) {
        system_error(err,
                     "the CPU flushes denormal numbers to zero, which changes results; don't link libraries "
                     "built with -ffast-math, and don't set FTZ or DAZ mode");
        return NULL;
    }
    if (!rounds_to_nearest_even()) {
        system_error(err,
                     "the CPU does not round to nearest even, which changes results; restore the default "
                     "rounding mode");
        return NULL;
    }
    Device *device = xcalloc(1, sizeof *device, "the device");
    device->index = index;
    device->site = site;
    read_cpu_name(device->name, sizeof device->name);
    // One thread per rank fixes the summation order of GEMMs. Use more ranks to use more cores.
    openblas_set_num_threads(1);
    if (warm_up_blas(err)) return device;
    free(device);
    return NULL;
}

void device_close(Device *device) { free(device); }

void device_set_deterministic(Device *device, bool deterministic) {}
const char *device_name(const Device *device) { return device->name; }
const char *device_backend(void) { return "cpu"; }

const DeviceKind *device_kind(void) {
    static const DeviceKind kind = {.only_way = "CPU ranks send everything through MPI",
                                    .where = "of each rank",
                                    .beside_plan = "the program, MPI's buffers and loaded data"};
    return &kind;
}

const Site *device_site(const Device *device) { return device->site; }

void device_libraries(char *text, size_t bytes) {
    snprintf(text, bytes, "%s, kernels %s", openblas_get_config(), openblas_get_corename());
}

void device_memory(const Device *device, size_t *free_bytes, size_t *total_bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    *free_bytes = machine_memory("MemAvailable");
    *total_bytes = machine_memory("MemTotal");
    // Without /proc, use the number of free pages: an underestimate, as it excludes caches.
    if (!*free_bytes) *free_bytes = (size_t)sysconf(_SC_AVPHYS_PAGES) * page;
    if (!*total_bytes) *total_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * page;
}

// Gets the numbers of virtual and resident pages of this process. Both are 0 without /proc.
static void process_pages(size_t *virtual_pages, size_t *resident_pages) {
    *virtual_pages = *resident_pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file) return;
    if (fscanf(file, "%zu %zu", virtual_pages, resident_pages) != 2) *virtual_pages = *resident_pages = 0;
    fclose(file);
}

size_t device_share(const Device *device, int sharers) {
    size_t available, total, page = (size_t)sysconf(_SC_PAGESIZE), used, resident;
    device_memory(device, &available, &total);
    size_t share = available / (size_t)sharers;
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return share;
    process_pages(&used, &resident);
    size_t left = limit.rlim_cur > used * page ? (size_t)limit.rlim_cur - used * page : 0;
    return left < share ? left : share;
}

size_t device_taken(const Device *device) {
    size_t used, resident;
    process_pages(&used, &resident);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

double device_peak_flops(const Device *device) { return 0.0; }

// --- memory --------------------------------------------------------------------------------------

static void *take_memory(size_t bytes, const char *purpose, Error *err) {
    // Linux overcommits memory and kills the process later, so check first to fail with a message.
    size_t available = machine_memory("MemAvailable");
    bool fits = bytes <= SIZE_MAX - ALIGNMENT && (available == 0 || bytes <= available);
    size_t rounded = fits ? (bytes / ALIGNMENT + 1) * ALIGNMENT : 0;
    void *memory = fits ? aligned_alloc(ALIGNMENT, rounded) : NULL;
    if (!memory) {
        system_error(err,
                     "out of memory: %zu bytes for %s, but only %zu are available; use a smaller model, a "
                     "smaller micro-batch or fewer ranks per machine",
                     bytes, purpose, available);
        return NULL;
    }
    return memset(memory, 0, rounded);
}

void *device_alloc(Device *device, size_t bytes, const char *purpose, Error *err) {
    void *memory = take_memory(bytes, purpose, err);
    if (memory) device->allocated += bytes;
    return memory;
}

size_t device_allocated(const Device *device) { return device->allocated; }

void device_free(Device *device, void *memory) { free(memory); }

void *host_alloc(Device *device, size_t bytes, const char *purpose, Error *err) {
    return take_memory(bytes, purpose, err);
}
void host_free(Device *device, void *memory) { device_free(device, memory); }

// --- streams and events --------------------------------------------------------------------------

Stream *stream_create(Device *device, const char *name) {
    Stream *stream = xcalloc(1, sizeof *stream, "a stream");
    stream->device = device;
    stream->name = name;
    return stream;
}
Stream *stream_create_urgent(Device *device, const char *name) { return stream_create(device, name); }
void stream_destroy(Stream *stream) { free(stream); }
const Site *stream_site(const Stream *stream) { return stream->device->site; }
// All work is already complete. Reports progress to the watchdog, because long loops call this.
void stream_synchronize(Stream *stream) { heartbeat_waiting(stream_site(stream), false); }

static Event *create_event(Device *device, bool timed) {
    Event *event = xcalloc(1, sizeof *event, "an event");
    event->device = device;
    event->timed = timed;
    return event;
}
Event *event_create(Device *device) { return create_event(device, false); }
Event *event_create_timed(Device *device) { return create_event(device, true); }
void event_destroy(Event *event) { free(event); }

void event_record(Event *event, Stream *stream) { event->recorded_ms = 1e3 * monotonic_seconds(); }
void stream_wait(Stream *stream, Event *event) {}
void event_synchronize(Event *event) {}

// Copies the context, as the GPU backend does, so that memory checkers find invalid uses of it.
void stream_host_call(Stream *stream, HostWork work, const void *context, size_t bytes) {
    void *copy = memcpy(xmalloc(bytes, "work of the host"), context, bytes);
    work(copy);
    free(copy);
}

double event_elapsed_ms(Event *start, Event *stop) {
    if (!start->timed || !stop->timed) {  // this also fails on a GPU
        fatal(start->device->site, EXIT_ENVIRONMENT,
              "event_elapsed_ms needs events created by event_create_timed; this is a bug, please report it");
    }
    return stop->recorded_ms - start->recorded_ms;
}

uint64_t profile_range_start(const char *name) { return 0; }
void profile_range_end(uint64_t range) {}

// --- copies --------------------------------------------------------------------------------------

void copy_to_device(Stream *stream, void *device_memory, const void *host, size_t bytes) {
    if (bytes) memcpy(device_memory, host, bytes);
}
void copy_to_host(Stream *stream, void *host, const void *device_memory, size_t bytes) {
    if (bytes) memcpy(host, device_memory, bytes);
}
void copy_from_pinned(Stream *stream, void *device_memory, const void *pinned, size_t bytes) {
    copy_to_device(stream, device_memory, pinned, bytes);
}
void copy_to_pinned(Stream *stream, void *pinned, const void *device_memory, size_t bytes) {
    copy_to_host(stream, pinned, device_memory, bytes);
}
void copy_on_device(Stream *stream, void *to, const void *from, size_t bytes) {
    if (bytes) memmove(to, from, bytes);
}
void set_zero(Stream *stream, void *device_memory, size_t bytes) {
    if (bytes) memset(device_memory, 0, bytes);
}
