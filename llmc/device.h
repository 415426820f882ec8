// The backend boundary, part 1: memory and streams, chosen at link time. llmc/cpu/device.c
// implements it for CPU ranks: a stream is the calling thread, an event a time. llmc/cuda/device.cu
// implements it for GPUs. Used wherever device memory or a stream is touched.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Device Device;
// Work on one stream happens in order; work on two streams is ordered by events only.
typedef struct Stream Stream;
typedef struct Event Event;

// What a backend's devices are like, for those who plan and report. Never changes.
typedef struct DeviceKind {
    bool numbered;            // a rank takes one of its host's; else every rank has one of its own
    bool own_memory;          // beside the host's; else the ranks of a host draw on its memory together
    bool asynchronous;        // work on a stream goes on while the caller does
    const char *only_way;     // why messages between ranks have one way only; NULL: they may have several
    const char *where;        // "on each GPU": whose memory a plan speaks of
    const char *beside_plan;  // what takes memory that no plan counts
} DeviceKind;
const DeviceKind *device_kind(void);

// GPUs of this machine that the program can see, 0 without a driver; INT_MAX for CPU ranks, which
// need none. Called before anything else of the backend: it prepares the environment.
int device_count(void);
// The name of device `index` on its host, the same for every process: a GPU's PCI address. Empty
// for CPU ranks, and where there is no such device.
void device_identity(int index, char *text, size_t bytes);
// Opens local device `index`; the CPU backend accepts any. Checks that the floating-point
// environment is the one the exact regime assumes: no flush-to-zero, round to nearest. site is kept
// for fatal errors. Error: EXIT_ENVIRONMENT.
Device *device_open(int index, const Site *site, Error *err);
void device_close(Device *device);
// --deterministic-mode: ops that have a faster form with unordered sums take the ordered one. That
// is attention's backward on a GPU. CPU ranks always do.
void device_set_deterministic(Device *device, bool deterministic);
const char *device_name(const Device *device);  // "CPU AMD EPYC ..." or the GPU's name
const char *device_backend(void);               // "cpu" or "cuda", for texts
const Site *device_site(const Device *device);
// Libraries of the backend with their versions, for --version and logs.
void device_libraries(char *text, size_t bytes);
// Bytes of device memory free and in all, as seen now.
void device_memory(const Device *device, size_t *free_bytes, size_t *total_bytes);
// Bytes that one of `sharers` ranks of this machine may still take. CPU ranks draw on the same
// memory, each within its own limit (ulimit -v).
size_t device_share(const Device *device, int sharers);
// Bytes taken now. Of a GPU's memory: by everyone, the CUDA context and other processes too. Of the
// CPU's: by this process.
size_t device_taken(const Device *device);
// Bytes that device_alloc has handed out since device_open, whether freed since or not. It is the
// memory plan, unless something was allocated beside it.
size_t device_allocated(const Device *device);
// Peak dense matmul rate of the device in FLOP/s for MFU, 0 when unknown.
double device_peak_flops(const Device *device);

// Zeroed memory, aligned to 256 bytes. Out of memory: err (EXIT_ENVIRONMENT).
void *device_alloc(Device *device, size_t bytes, const char *purpose, Error *err);
void device_free(Device *device, void *memory);
// Zeroed host memory that the device reaches by itself (page-locked on GPUs), so that
// copy_to_pinned and copy_from_pinned go on behind the caller's back. Aligned to 256 bytes. Out of
// memory: err (EXIT_ENVIRONMENT).
void *host_alloc(Device *device, size_t bytes, const char *purpose, Error *err);
void host_free(Device *device, void *memory);

Stream *stream_create(Device *device, const char *name);
// A stream whose waiting work goes before that of the others: for communication, which others wait
// for. CPU ranks know no precedence.
Stream *stream_create_urgent(Device *device, const char *name);
void stream_destroy(Stream *stream);
const Site *stream_site(const Stream *stream);
void stream_synchronize(Stream *stream);
// For order alone: stream_wait and event_synchronize.
Event *event_create(Device *device);
// One that tells the time too (event_elapsed_ms), for which a GPU writes down when it passed.
Event *event_create_timed(Device *device);
void event_destroy(Event *event);
void event_record(Event *event, Stream *stream);
// Work of the host in stream order: it begins once everything before it on the stream is done, and
// what comes after it on the stream waits for it. The context's bytes are copied: work gets the
// copy. On a GPU a thread of the driver runs it. It must not call this header, and other streams'
// work of this kind may wait for it.
typedef void (*HostWork)(void *context);
void stream_host_call(Stream *stream, HostWork work, const void *context, size_t bytes);
void stream_wait(Stream *stream, Event *event);  // later work on stream waits for the event
void event_synchronize(Event *event);            // the host waits
// Milliseconds between two recorded events of event_create_timed, on the device's clock.
double event_elapsed_ms(Event *start, Event *stop);

// A named span of the host's work for profilers. On GPUs it is NVTX: Nsight Systems shows it, also
// over what the host queued meanwhile, and streams bear their names there. Nothing on CPU ranks,
// next to nothing without a profiler. Spans may overlap. name must live as long as the program.
// Returns what ends the span.
uint64_t profile_range_start(const char *name);
void profile_range_end(uint64_t range);

// Asynchronous copies in stream order. The host side of an upload may be reused when the call
// returns. A download is complete after stream_synchronize.
void copy_to_device(Stream *stream, void *device_memory, const void *host, size_t bytes);
void copy_to_host(Stream *stream, void *host, const void *device_memory, size_t bytes);
// The same from and to memory of host_alloc: the host does not wait at all. An upload reads its
// source in stream order.
void copy_from_pinned(Stream *stream, void *device_memory, const void *pinned, size_t bytes);
void copy_to_pinned(Stream *stream, void *pinned, const void *device_memory, size_t bytes);
void copy_on_device(Stream *stream, void *to, const void *from, size_t bytes);
void set_zero(Stream *stream, void *device_memory, size_t bytes);

LLMC_END
