// Records start and end of every kernel, copy and memset of a CUDA program, with little overhead.
// The driver loads this library into the program (CUDA_INJECTION64_PATH), where it collects CUPTI's
// activity records. kernel_table.py summarizes them.
//
//   make build/dev/bench/kernel_trace.so
//   export KERNEL_TRACE=trace.csv CUDA_INJECTION64_PATH=$PWD/build/dev/bench/kernel_trace.so
//   build/train_gpt ...
//
// Output: lines "start_ns,end_ns,stream,name", in the order in which CUPTI delivers them.
#include <cupti.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { BUFFER_BYTES = 8 << 20 };

// File scope, because CUPTI's callbacks get no context argument.
static FILE *out;

static void buffer_requested(uint8_t **buffer, size_t *bytes, size_t *max_records) {
    *buffer = aligned_alloc(8, BUFFER_BYTES);
    *bytes = *buffer ? BUFFER_BYTES : 0;
    *max_records = 0;
}

static void write_record(const CUpti_Activity *record) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
        const CUpti_ActivityKernel10 *k = (const CUpti_ActivityKernel10 *)record;
        fprintf(out, "%llu,%llu,%u,%s\n", (unsigned long long)k->start, (unsigned long long)k->end,
                k->streamId, k->name);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
        const CUpti_ActivityMemcpy6 *m = (const CUpti_ActivityMemcpy6 *)record;
        fprintf(out, "%llu,%llu,%u,memcpy kind %u\n", (unsigned long long)m->start,
                (unsigned long long)m->end, m->streamId, m->copyKind);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
        const CUpti_ActivityMemset4 *m = (const CUpti_ActivityMemset4 *)record;
        fprintf(out, "%llu,%llu,%u,memset\n", (unsigned long long)m->start, (unsigned long long)m->end,
                m->streamId);
    }
}

static void buffer_completed(CUcontext context, uint32_t stream, uint8_t *buffer, size_t bytes,
                             size_t valid) {
    CUpti_Activity *record = NULL;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) write_record(record);
    free(buffer);
}

static void at_exit(void) {
    cuptiActivityFlushAll(1);
    fflush(out);  // not closed: CUPTI may deliver more records after this
}

// Called once by the driver, before the program's first CUDA call returns.
int InitializeInjection(void);
int InitializeInjection(void) {
    const char *path = getenv("KERNEL_TRACE");
    out = fopen(path ? path : "kernel_trace.csv", "w");
    if (!out) {
        perror(path ? path : "kernel_trace.csv");
        return 0;
    }
    cuptiActivityRegisterCallbacks(buffer_requested, buffer_completed);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET);
    atexit(at_exit);
    return 1;
}
