// Backend interface, part 1: devices, memory, streams and copies. The backend is chosen at link
// time: llmc/cuda/device.cu for GPUs, llmc/cpu/device.c for CPU ranks. On CPU ranks all work of a
// stream runs immediately on the calling thread, and an event is a time stamp.
#pragma once
#include "llmc/base/base.h"
LLMC_BEGIN

typedef struct Device Device;
// Work on one stream runs in order; only events order work on different streams.
typedef struct Stream Stream;
typedef struct Event Event;

// Properties of the backend's devices.
typedef struct DeviceKind {
    bool numbered;            // ranks select one of the host's devices by index; false: CPU ranks
    bool own_memory;          // devices have their own memory; false: the ranks of a host share its memory
    bool asynchronous;        // work on a stream runs while the caller continues
    const char *only_way;     // why there is only one transport, for messages; NULL: several
    const char *where;        // location of planned memory in reports, such as "on each GPU"
    const char *beside_plan;  // name of the memory that plans do not include, in reports
} DeviceKind;
const DeviceKind *device_kind(void);

// Returns the number of GPUs visible to the program, 0 without a driver; INT_MAX on CPU ranks. Must
// be the first call of the backend, because it prepares the environment. needed: the fewest
// hardware queues with which the program works; a user may set more (CUDA_DEVICE_MAX_CONNECTIONS).
int device_count(int needed);
// Writes the identity of device `index`, the same for every process of the host: a GPU's PCI
// address. Empty on CPU ranks and for missing devices.
void device_identity(int index, char *text, size_t bytes);
// Opens local device `index`; the CPU backend accepts any. Verifies the floating-point environment
// of the exact regime: round to nearest, denormals kept. site: reported by fatal errors; must
// outlive the device. Error: EXIT_ENVIRONMENT.
Device *device_open(int index, const Site *site, Error *err);
void device_close(Device *device);
// Selects deterministic kernels (--deterministic-mode). Only the backward pass of attention on GPUs
// has a faster non-deterministic one.
void device_set_deterministic(Device *device, bool deterministic);
const char *device_name(const Device *device);  // "CPU AMD EPYC ..." or the GPU's name
const char *device_backend(void);               // "cpu" or "cuda"
const Site *device_site(const Device *device);
// Lists the backend's libraries with their versions, for --version and logs.
void device_libraries(char *text, size_t bytes);
// Current free and total bytes of device memory.
void device_memory(const Device *device, size_t *free_bytes, size_t *total_bytes);
// Bytes that each of `sharers` ranks on this device or host may still allocate. CPU ranks share
// host memory; ulimit -v also limits each of them.
size_t device_share(const Device *device, int sharers);
// Bytes in use now: on GPUs by all processes and their CUDA contexts; on CPU ranks by this process.
size_t device_taken(const Device *device);
// Total of all device_alloc calls since device_open, freed or not. Equals the memory plan unless
// something was allocated outside it.
size_t device_allocated(const Device *device);
// Peak dense matmul rate of the device in FLOP/s for MFU, 0 if unknown.
double device_peak_flops(const Device *device);

// Allocates zeroed memory, 256-byte aligned. Out of memory: EXIT_ENVIRONMENT.
void *device_alloc(Device *device, size_t bytes, const char *purpose, Error *err);
void device_free(Device *device, void *memory);
// Allocates zeroed host memory, 256-byte aligned and page-locked on GPUs, so that copy_to_pinned
// and copy_from_pinned are asynchronous. Out of memory: EXIT_ENVIRONMENT.
void *host_alloc(Device *device, size_t bytes, const char *purpose, Error *err);
void host_free(Device *device, void *memory);

Stream *stream_create(Device *device, const char *name);
// Creates a high-priority stream, for communication that other streams wait for.
Stream *stream_create_urgent(Device *device, const char *name);
void stream_destroy(Stream *stream);
const Site *stream_site(const Stream *stream);
void stream_synchronize(Stream *stream);
// Creates an event for ordering only: stream_wait and event_synchronize.
Event *event_create(Device *device);
// Creates an event that also records its time, for event_elapsed_ms.
Event *event_create_timed(Device *device);
void event_destroy(Event *event);
void event_record(Event *event, Stream *stream);
// Runs work on the host in stream order: after all earlier and before all later work of the stream.
// work gets a copy of the context's bytes. On GPUs it runs on a driver thread. It must not call
// functions of this header, and it may delay host calls of other streams.
typedef void (*HostWork)(void *context);
void stream_host_call(Stream *stream, HostWork work, const void *context, size_t bytes);
void stream_wait(Stream *stream, Event *event);  // later work on stream waits for the event
void event_synchronize(Event *event);            // the host waits
// Returns the milliseconds between two recorded timed events, by the device's clock.
double event_elapsed_ms(Event *start, Event *stop);

// Marks a range of host work as an NVTX range; Nsight Systems also shows the GPU work launched
// within it. Ranges may overlap. name: a string literal. Returns a handle. No-op on CPU ranks.
uint64_t profile_range_start(const char *name);
void profile_range_end(uint64_t range);

// Asynchronous copies in stream order. The host source of an upload may be reused on return. A
// download is complete after stream_synchronize.
void copy_to_device(Stream *stream, void *device_memory, const void *host, size_t bytes);
void copy_to_host(Stream *stream, void *host, const void *device_memory, size_t bytes);
// The same for host memory of host_alloc, without blocking the host. An upload reads its source in
// stream order, so the source must not change before the copy is done.
void copy_from_pinned(Stream *stream, void *device_memory, const void *pinned, size_t bytes);
void copy_to_pinned(Stream *stream, void *pinned, const void *device_memory, size_t bytes);
void copy_on_device(Stream *stream, void *to, const void *from, size_t bytes);
void set_zero(Stream *stream, void *device_memory, size_t bytes);

LLMC_END
