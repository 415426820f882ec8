// The CUDA backend of device.h. The other files of this directory use it through internal.h.
//
// The driver copies pageable host memory synchronously. To keep small copies asynchronous, each
// stream has a ring of pinned slots. An upload is copied into a slot at once and transferred later.
// A download is transferred to a slot, from which a host function in stream order copies it to its
// destination. The host waits only if all slots are in use.
#include <cublasLt.h>
#include <cudnn.h>
#include <fenv.h>
#include <float.h>
#include <nccl.h>
#include <nvtx3/nvToolsExtCudaRt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/cuda/common.cuh"
#include "llmc/ranks/heartbeat.h"

// --- errors --------------------------------------------------------------------------------------

// cudaErrorContained, which older toolkits do not define. It reports a fault of the hardware or of
// a peer's memory that affects only this process.
enum { ERROR_CONTAINED = 226 };

// A hardware failure during training is EXIT_COMMUNICATION, because a restart may help. Before
// training it is EXIT_ENVIRONMENT, because the machine should not be used.
static int exit_code_of(const Site *site, cudaError_t status) {
    bool hardware = status == cudaErrorECCUncorrectable || status == cudaErrorNvlinkUncorrectable ||
                    status == cudaErrorHardwareStackError || status == cudaErrorLaunchFailure ||
                    status == cudaErrorUnknown || (int)status == ERROR_CONTAINED;
    return hardware && site && site->iteration > 0 ? EXIT_COMMUNICATION : EXIT_ENVIRONMENT;
}

void cuda_check(const Site *site, cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    fatal(site, exit_code_of(site, status),
          "%s failed: %s (%s); run again with CUDA_LAUNCH_BLOCKING=1 to find the cause", what,
          cudaGetErrorString(status), cudaGetErrorName(status));
}

void cuda_check_gpu(const Site *site) {
    cudaError_t status = cudaStreamQuery(cudaStreamLegacy);
    if (status != cudaErrorNotReady) cuda_check(site, status, "the GPU's work");
}

void check_launch(Stream *stream, const char *kernel) {
    cudaError_t status = cudaGetLastError();
    const Site *site = stream->device->site;
    if (status == cudaSuccess) return;
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
        status == cudaErrorUnsupportedPtxVersion)
        fatal(site, EXIT_ENVIRONMENT,
              "the GPU kernel %s on the %s stream could not be started: %s; build the program for this GPU "
              "(make gpu ARCH=...)",
              kernel, stream->name, cudaGetErrorString(status));
    if (status == cudaErrorInvalidConfiguration || status == cudaErrorLaunchOutOfResources ||
        status == cudaErrorMemoryAllocation)
        fatal(site, EXIT_ENVIRONMENT, "the GPU kernel %s on the %s stream could not be started: %s", kernel,
              stream->name, cudaGetErrorString(status));
    // A launch may return an error of earlier work on any stream.
    fatal(site, exit_code_of(site, status),
          "the GPU failed in or before kernel %s on the %s stream: %s (%s); check dmesg for "
          "GPU errors (Xid), or run again with CUDA_LAUNCH_BLOCKING=1 to find the cause",
          kernel, stream->name, cudaGetErrorString(status), cudaGetErrorName(status));
}

// --- properties ----------------------------------------------------------------------------------

enum { OLDEST_MAJOR = 8 };  // Ampere: bf16 tensor cores
enum { QUEUES = 32 };       // hardware queues: CUDA's maximum

static int version_major(int version) { return version / 1000; }
static int version_minor(int version) { return version % 1000 / 10; }

// A driver supports its own major version of CUDA and older ones.
static bool driver_is_new_enough(Error *err) {
    int driver = 0, runtime = 0;
    cudaError_t status = cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (status != cudaSuccess || driver == 0)
        return system_error(err, "no NVIDIA driver was found; install one, or use train_gpt_cpu");
    if (version_major(driver) >= version_major(runtime)) return true;
    return system_error(err,
                        "the NVIDIA driver supports CUDA %d.%d, but this program was built with CUDA %d.%d; "
                        "install a newer driver, or build with an older toolkit",
                        version_major(driver), version_minor(driver), version_major(runtime),
                        version_minor(runtime));
}

// Sets the number of hardware queues, which is 8 by default, before CUDA starts. Streams that share
// a queue wait for each other's kernels. A receive from another pipeline stage could then block
// work that the other stage waits for: a deadlock. (Megatron-LM's scripts set 1 to get a kernel
// order that is not needed here.) A user's number is kept if it is enough: under MPS, the ranks
// that share a GPU also share 96 queues.
static void ask_for_queues(int needed) {
    const char *queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    char number[16];
    if (queues && atoi(queues) >= needed) return;
    snprintf(number, sizeof number, "%d", QUEUES);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", number, 1);
}

int device_count(int needed) {
    int gpus = 0;
    ask_for_queues(needed);  // before the first call of CUDA
    if (cudaGetDeviceCount(&gpus) != cudaSuccess) gpus = 0;
    cudaGetLastError();  // device_open reports the error
    return gpus;
}

void device_identity(int index, char *text, size_t bytes) {
    if (cudaDeviceGetPCIBusId(text, (int)bytes, index) == cudaSuccess) return;
    cudaGetLastError();
    *text = '\0';
}

static bool gpu_exists(int index, Error *err) {
    int gpus = 0;
    cudaError_t status = cudaGetDeviceCount(&gpus);
    if (status != cudaSuccess || gpus == 0) {
        return system_error(
            err, "no GPU can be used: %s; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use train_gpt_cpu",
            status == cudaSuccess ? "none is visible" : cudaGetErrorString(status));
    }
    if (index >= 0 && index < gpus) return true;
    return system_error(
        err,
        "GPU %d does not exist: this rank sees only %d GPUs; start as many ranks per machine as it has GPUs, "
        "and let each rank see all of them or only its own (CUDA_VISIBLE_DEVICES)",
        index, gpus);
}

static bool device_describe(Device *device, Error *err) {
    cudaDeviceProp p;
    cudaError_t status = cudaGetDeviceProperties(&p, device->index);
    if (status != cudaSuccess) {
        return system_error(err, "cannot read the properties of GPU %d: %s; check nvidia-smi", device->index,
                            cudaGetErrorString(status));
    }
    snprintf(device->name, sizeof device->name, "%.127s", p.name);
    device->major = p.major;
    device->minor = p.minor;
    device->multiprocessors = p.multiProcessorCount;
    device->shared_bytes_block = p.sharedMemPerBlockOptin;
    device->l2_bytes = (size_t)p.l2CacheSize;
    if (p.major >= OLDEST_MAJOR) return true;
    return system_error(
        err,
        "GPU %d (%s) has compute capability %d.%d, but bf16 training needs 8.0 or newer; use another GPU",
        device->index, device->name, p.major, p.minor);
}

// --- the floating-point environment --------------------------------------------------------------

// Multiplies two floats. Whether it flushes denormals depends on the compiler flags.
static __global__ void multiply_kernel(float *product, float a, float b) { *product = a * b; }

// Checks that neither host nor device code flushes denormals to zero, and that the host rounds to
// nearest even, as GPUs do. Results must be bitwise identical on both.
static bool arithmetic_is_exact(const Device *device, Error *err) {
    volatile float smallest_normal = FLT_MIN, half = 0.5f;
    volatile float denormal = smallest_normal * half;
    if (fegetround() != FE_TONEAREST || !(denormal > 0.0f)) {
        return system_error(err,
                            "the CPU flushes denormal numbers to zero or does not round to nearest even, "
                            "which changes results; don't link libraries built with -ffast-math");
    }
    float *product = NULL, result = 0.0f;
    cudaError_t status = cudaMalloc((void **)&product, sizeof *product);
    if (status == cudaSuccess) {
        multiply_kernel<<<1, 1>>>(product, FLT_MIN, 0.5f);
        status = cudaGetLastError();
        if (status == cudaSuccess)
            status = cudaMemcpy(&result, product, sizeof result, cudaMemcpyDeviceToHost);
        cudaFree(product);
    }
    if (status != cudaSuccess) {
        return system_error(err,
                            "GPU %d (%s, compute capability %d.%d) cannot run this program: %s; build it for "
                            "this GPU (make gpu ARCH=native)",
                            device->index, device->name, device->major, device->minor,
                            cudaGetErrorString(status));
    }
    if (result == denormal) return true;
    return system_error(err,
                        "this program's GPU code flushes denormal numbers to zero, which changes results; "
                        "build it without -use_fast_math and -ftz=true");
}

// --- the device ----------------------------------------------------------------------------------

Device *device_open(int index, const Site *site, Error *err) {
    if (!driver_is_new_enough(err) || !gpu_exists(index, err)) return NULL;
    Device *device = (Device *)xcalloc(1, sizeof *device, "the device");
    device->index = index;
    device->site = site;
    if (device_describe(device, err)) {
        cudaError_t status = cudaSetDevice(index);
        if (status == cudaSuccess && arithmetic_is_exact(device, err)) return device;
        if (status != cudaSuccess) {
            system_error(
                err, "GPU %d (%s) cannot be opened: %s; check whether another program uses it (nvidia-smi)",
                index, device->name, cudaGetErrorString(status));
        }
    }
    free(device);
    return NULL;
}

static void slot_destroy(DeviceSlot *slot) {
    if (slot->state) slot->destroy(slot->state);
    slot->state = NULL;
}

void device_close(Device *device) {
    if (!device) return;
    cuda_check(device->site, cudaDeviceSynchronize(), "waiting for the GPU's work");
    slot_destroy(&device->attention);
    slot_destroy(&device->linear);
    free(device);
}

void device_set_deterministic(Device *device, bool deterministic) { device->deterministic = deterministic; }
const char *device_name(const Device *device) { return device->name; }
const char *device_backend(void) { return "cuda"; }

const DeviceKind *device_kind(void) {
    static const DeviceKind kind = {
        true, true, true, NULL, "on each GPU", "the CUDA context and the memory of cuBLAS, cuDNN and NCCL"};
    return &kind;
}

const Site *device_site(const Device *device) { return device->site; }

void device_libraries(char *text, size_t bytes) {
    int driver = 0, runtime = 0, nccl = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    ncclGetVersion(&nccl);
    size_t cublas = cublasLtGetVersion(), cudnn = cudnnGetVersion();
    snprintf(text, bytes, "CUDA %d.%d (driver %d.%d), cuBLASLt %zu.%zu.%zu, cuDNN %zu.%zu.%zu, NCCL %d.%d.%d",
             version_major(runtime), version_minor(runtime), version_major(driver), version_minor(driver),
             cublas / 10000, cublas / 100 % 100, cublas % 100, cudnn / 10000, cudnn / 100 % 100, cudnn % 100,
             nccl / 10000, nccl / 100 % 100, nccl % 100);
}

void device_memory(const Device *device, size_t *free_bytes, size_t *total_bytes) {
    cuda_check(device->site, cudaMemGetInfo(free_bytes, total_bytes), "querying the GPU's free memory");
}

size_t device_share(const Device *device, int sharers) {
    size_t available = 0, total = 0;
    device_memory(device, &available, &total);
    return available / (size_t)sharers;
}

size_t device_taken(const Device *device) {
    size_t available = 0, total = 0;
    device_memory(device, &available, &total);
    return total - available;
}

// Peak rates of dense bf16 GEMMs with fp32 accumulation, from data sheets. Uses the first row whose
// name is contained in the device name.
double device_peak_flops(const Device *device) {
    static const struct {
        const char *name;
        double flops;
    } table[] = {
        {"H100 PCIe", 756e12}, {"H100 NVL", 835e12}, {"GH200", 989.4e12}, {"H200", 989.4e12},
        {"H100", 989.4e12},    {"H800", 989.4e12},   {"GB200", 2500e12},  {"B200", 2250e12},
        {"A100", 312e12},      {"A800", 312e12},     {"L40S", 362e12},    {"RTX 4090", 165e12},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (strstr(device->name, table[i].name)) return table[i].flops;
    }
    return 0.0;
}

// --- memory --------------------------------------------------------------------------------------

void *device_alloc(Device *device, size_t bytes, const char *purpose, Error *err) {
    void *memory = NULL;
    // cudaMalloc aligns to 256 bytes; 0 bytes must return a pointer too.
    cudaError_t status = cudaMalloc(&memory, bytes ? bytes : 1);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // clears the error, which check_launch would report otherwise
        size_t available = 0, total = 0;
        device_memory(device, &available, &total);
        system_error(err,
                     "out of GPU memory: %zu bytes for %s, but only %zu of %zu are available; use a smaller "
                     "model, a smaller micro-batch or --recompute-granularity full",
                     bytes, purpose, available, total);
        return NULL;
    }
    cuda_check(device->site, status, "allocating GPU memory");
    cuda_check(device->site, cudaMemset(memory, 0, bytes), "clearing GPU memory");
    // Wait here, because the program's streams do not synchronize with the default stream.
    cuda_check(device->site, cudaStreamSynchronize(cudaStreamLegacy), "clearing GPU memory");
    device->allocated += bytes;
    return memory;
}

size_t device_allocated(const Device *device) { return device->allocated; }

void device_free(Device *device, void *memory) {
    cuda_check(device->site, cudaFree(memory), "freeing GPU memory");
}

void *host_alloc(Device *device, size_t bytes, const char *purpose, Error *err) {
    void *memory = NULL;
    cudaError_t status = cudaHostAlloc(&memory, bytes ? bytes : 1, cudaHostAllocDefault);  // whole pages
    if (status == cudaSuccess) return memset(memory, 0, bytes);
    cudaGetLastError();  // clears the error, which check_launch would report otherwise
    system_error(err, "out of page-locked host memory: %zu bytes for %s (%s); free memory or raise ulimit -l",
                 bytes, purpose, cudaGetErrorString(status));
    return NULL;
}

void host_free(Device *device, void *memory) {
    cuda_check(device->site, cudaFreeHost(memory), "freeing pinned memory");
}

// --- streams and events --------------------------------------------------------------------------

static Stream *create_stream(Device *device, const char *name, int priority) {
    Stream *stream = (Stream *)xcalloc(1, sizeof *stream, "a stream");
    stream->device = device;
    stream->name = name;
    cuda_check(device->site, cudaStreamCreateWithPriority(&stream->handle, cudaStreamNonBlocking, priority),
               "creating a stream");
    nvtxNameCudaStreamA(stream->handle, name);
    return stream;
}

Stream *stream_create(Device *device, const char *name) { return create_stream(device, name, 0); }

Stream *stream_create_urgent(Device *device, const char *name) {
    int lowest = 0, highest = 0;
    cuda_check(device->site, cudaDeviceGetStreamPriorityRange(&lowest, &highest),
               "querying the stream priorities");
    return create_stream(device, name, highest);
}

void stream_destroy(Stream *stream) {
    if (!stream) return;
    stream_synchronize(stream);
    for (int i = 0; i < STAGING_SLOTS && stream->staging[i].pinned; i++) {
        cuda_check(stream_site(stream), cudaEventDestroy(stream->staging[i].free), "freeing pinned memory");
        cuda_check(stream_site(stream), cudaFreeHost(stream->staging[i].pinned), "freeing pinned memory");
    }
    cuda_check(stream_site(stream), cudaStreamDestroy(stream->handle), "freeing a stream");
    free(stream);
}

const Site *stream_site(const Stream *stream) { return stream->device->site; }
// Reports to the watchdog that this rank waits, because the GPU may be waiting for other ranks.
void stream_synchronize(Stream *stream) {
    heartbeat_waiting(stream_site(stream), true);
    cuda_check(stream_site(stream), cudaStreamSynchronize(stream->handle), "the GPU's work");
    heartbeat_waiting(stream_site(stream), false);
}

static Event *create_event(Device *device, unsigned flags) {
    Event *event = (Event *)xcalloc(1, sizeof *event, "an event");
    event->device = device;
    cuda_check(device->site, cudaEventCreateWithFlags(&event->handle, flags), "creating an event");
    return event;
}

Event *event_create(Device *device) { return create_event(device, cudaEventDisableTiming); }
Event *event_create_timed(Device *device) { return create_event(device, cudaEventDefault); }

void event_destroy(Event *event) {
    if (!event) return;
    cuda_check(event->device->site, cudaEventDestroy(event->handle), "freeing an event");
    free(event);
}

void event_record(Event *event, Stream *stream) {
    cuda_check(stream_site(stream), cudaEventRecord(event->handle, stream->handle), "recording an event");
}
void stream_wait(Stream *stream, Event *event) {
    cuda_check(stream_site(stream), cudaStreamWaitEvent(stream->handle, event->handle, 0),
               "waiting for an event");
}

// A host function that a stream runs. Its context follows in the same allocation.
struct alignas(16) HostCall {
    HostWork work;
};

static void CUDART_CB run_host_call(void *argument) {
    HostCall *call = (HostCall *)argument;
    call->work(call + 1);
    free(call);
}

void stream_host_call(Stream *stream, HostWork work, const void *context, size_t bytes) {
    HostCall *call = (HostCall *)xmalloc(sizeof(HostCall) + bytes, "work of the host");
    call->work = work;
    memcpy(call + 1, context, bytes);
    cuda_check(stream_site(stream), cudaLaunchHostFunc(stream->handle, run_host_call, call),
               "starting a host function");
}

void event_synchronize(Event *event) {
    heartbeat_waiting(event->device->site, true);
    cuda_check(event->device->site, cudaEventSynchronize(event->handle), "the GPU's work");
    heartbeat_waiting(event->device->site, false);
}

double event_elapsed_ms(Event *start, Event *stop) {
    float ms = 0.0f;
    event_synchronize(start);
    event_synchronize(stop);
    cuda_check(stop->device->site, cudaEventElapsedTime(&ms, start->handle, stop->handle),
               "measuring the time between two events");
    return ms;
}

uint64_t profile_range_start(const char *name) { return nvtxRangeStartA(name); }
void profile_range_end(uint64_t range) { nvtxRangeEnd(range); }

// --- copies --------------------------------------------------------------------------------------

static void staging_create(Stream *stream) {
    for (int i = 0; i < STAGING_SLOTS; i++) {
        StagingSlot *slot = &stream->staging[i];
        cuda_check(stream_site(stream), cudaHostAlloc(&slot->pinned, STAGING_BYTES, cudaHostAllocDefault),
                   "allocating pinned memory");
        cuda_check(stream_site(stream), cudaEventCreateWithFlags(&slot->free, cudaEventDisableTiming),
                   "creating an event");
    }
}

// Returns the next slot of the ring, after its last copy is complete.
static StagingSlot *staging_take(Stream *stream) {
    if (!stream->staging[0].pinned) staging_create(stream);
    StagingSlot *slot = &stream->staging[stream->next_slot];
    stream->next_slot = (stream->next_slot + 1) % STAGING_SLOTS;
    heartbeat_waiting(stream_site(stream), true);
    // An event that has never been recorded counts as complete.
    cuda_check(stream_site(stream), cudaEventSynchronize(slot->free), "the GPU's work");
    heartbeat_waiting(stream_site(stream), false);
    return slot;
}

static void staging_give_back(Stream *stream, StagingSlot *slot) {
    cuda_check(stream_site(stream), cudaEventRecord(slot->free, stream->handle), "recording an event");
}

static size_t staging_piece(size_t left) { return left < STAGING_BYTES ? left : (size_t)STAGING_BYTES; }

static void copy_async(Stream *stream, void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    const char *what = kind == cudaMemcpyHostToDevice   ? "copying to the GPU"
                       : kind == cudaMemcpyDeviceToHost ? "copying from the GPU"
                                                        : "copying on the GPU";
    if (bytes == 0) return;
    cuda_check(stream_site(stream), cudaMemcpyAsync(to, from, bytes, kind, stream->handle), what);
}

void copy_to_device(Stream *stream, void *device_memory, const void *host, size_t bytes) {
    for (size_t at = 0; at < bytes; at += STAGING_BYTES) {
        StagingSlot *slot = staging_take(stream);
        size_t piece = staging_piece(bytes - at);
        memcpy(slot->pinned, (const uint8_t *)host + at, piece);
        copy_async(stream, (uint8_t *)device_memory + at, slot->pinned, piece, cudaMemcpyHostToDevice);
        staging_give_back(stream, slot);
    }
}

// Copies a download to its destination. Runs in stream order on a thread of the driver, where CUDA
// calls are not allowed.
static void CUDART_CB staging_deliver(void *argument) {
    const StagingSlot *slot = (const StagingSlot *)argument;
    memcpy(slot->destination, slot->pinned, slot->bytes);
}

void copy_to_host(Stream *stream, void *host, const void *device_memory, size_t bytes) {
    for (size_t at = 0; at < bytes; at += STAGING_BYTES) {
        StagingSlot *slot = staging_take(stream);
        slot->destination = (uint8_t *)host + at;
        slot->bytes = staging_piece(bytes - at);
        copy_async(stream, slot->pinned, (const uint8_t *)device_memory + at, slot->bytes,
                   cudaMemcpyDeviceToHost);
        cuda_check(stream_site(stream), cudaLaunchHostFunc(stream->handle, staging_deliver, slot),
                   "copying from the GPU");
        staging_give_back(stream, slot);
    }
}

void copy_from_pinned(Stream *stream, void *device_memory, const void *pinned, size_t bytes) {
    copy_async(stream, device_memory, pinned, bytes, cudaMemcpyHostToDevice);
}

void copy_to_pinned(Stream *stream, void *pinned, const void *device_memory, size_t bytes) {
    copy_async(stream, pinned, device_memory, bytes, cudaMemcpyDeviceToHost);
}

void copy_on_device(Stream *stream, void *to, const void *from, size_t bytes) {
    if (to == from) return;
    // A device copy between overlapping ranges is undefined, so copy parts that are not longer than
    // the distance between the ranges, starting at the safe end.
    bool upward = (uintptr_t)to > (uintptr_t)from;
    size_t distance = upward ? (uintptr_t)to - (uintptr_t)from : (uintptr_t)from - (uintptr_t)to;
    for (size_t done = 0; done < bytes;) {
        size_t piece = bytes - done < distance ? bytes - done : distance;
        size_t at = upward ? bytes - done - piece : done;
        copy_async(stream, (uint8_t *)to + at, (const uint8_t *)from + at, piece, cudaMemcpyDeviceToDevice);
        done += piece;
    }
}

void set_zero(Stream *stream, void *device_memory, size_t bytes) {
    if (bytes)
        cuda_check(stream_site(stream), cudaMemsetAsync(device_memory, 0, bytes, stream->handle),
                   "clearing GPU memory");
}
