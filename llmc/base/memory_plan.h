// The memory plan: every device buffer of a run is reserved by name before anything is allocated.
// So --plan prints exactly what the program allocates, and a run that does not fit ends before it
// starts.
#pragma once
#include <stdio.h>

#include "llmc/device.h"
LLMC_BEGIN

typedef enum MemoryPlace {
    ON_DEVICE,
    ON_HOST,  // host_alloc
    ON_DISK   // in a file; only reported
} MemoryPlace;

typedef struct MemoryPlanEntry {
    const char *group;    // "weights", "gradients", "activations", ...: summed in --plan
    const char *purpose;  // "bf16 model weights", ...; a string literal
    size_t bytes;
    void **target;  // receives the address on allocation
    void *memory;
    MemoryPlace place;
} MemoryPlanEntry;

typedef struct MemoryPlan {
    MemoryPlanEntry *entries;
    int count;
} MemoryPlan;

// Reserves bytes (0 is allowed: the target becomes NULL).
void memory_plan_reserve(MemoryPlan *plan, const char *group, const char *purpose, size_t bytes,
                         void **target);
// Reserves host memory that the device copies to (device.h, host_alloc). Not part of the total.
void memory_plan_reserve_host(MemoryPlan *plan, const char *group, const char *purpose, size_t bytes,
                              void **target);
// Reports bytes of a file. Not part of the total, and not allocated.
void memory_plan_reserve_disk(MemoryPlan *plan, const char *group, const char *purpose, size_t bytes);
size_t memory_plan_total(const MemoryPlan *plan);  // on the device
size_t memory_plan_host(const MemoryPlan *plan);   // in host memory
size_t memory_plan_disk(const MemoryPlan *plan);
// For loops over groups: returns the bytes of entry i's group if i is its first entry, else 0.
size_t memory_plan_group_bytes(const MemoryPlan *plan, int i);
// Returns the device memory needed. On CPU ranks, whose device memory is host memory, includes host
// entries.
size_t memory_plan_needed(const MemoryPlan *plan);
// Allocates everything, zeroed. sharers: number of ranks that divide the memory equally: all
// CPU ranks of a host, or 1 if each rank has its own GPU. Error (EXIT_ENVIRONMENT) says
// how much is missing.
bool memory_plan_allocate(MemoryPlan *plan, Device *device, int sharers, Error *err);
// The same, but with each rank's share in bytes, measured before any rank allocated memory.
bool memory_plan_allocate_within(MemoryPlan *plan, Device *device, size_t share, int sharers, Error *err);
// Prints groups and purposes with bytes and bytes per parameter. Entries of one purpose are summed;
// empty ones are omitted.
void memory_plan_print(const MemoryPlan *plan, int64_t parameters, FILE *out);
void memory_plan_free(MemoryPlan *plan, Device *device);

LLMC_END
