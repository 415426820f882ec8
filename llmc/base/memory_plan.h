// One plan before any allocation: every device buffer of a run is reserved by name first. So --plan
// prints exactly what the program allocates, and a run that does not fit ends before anything is
// allocated. gpt_memory.c, the zero_*.c files and probe.c reserve, memory.c allocates,
// plan_report.c prints.
#pragma once
#include <stdio.h>

#include "llmc/device.h"
LLMC_BEGIN

typedef struct MemoryPlanEntry {
    const char *group;    // "weights", "gradients", "activations", ...: summed in --plan
    const char *purpose;  // "bf16 replica", ... a string literal
    size_t bytes;
    void **target;  // receives the address on allocation
    void *memory;
    bool host;  // not on the device: host_alloc
} MemoryPlanEntry;

typedef struct MemoryPlan {
    MemoryPlanEntry *entries;
    int count, capacity;
} MemoryPlan;

// Reserves bytes (0 is allowed: the target becomes NULL).
void memory_plan_reserve(MemoryPlan *plan, const char *group, const char *purpose, size_t bytes,
                         void **target);
// The same in host memory that the device copies to by itself (device.h, host_alloc): not part of
// the total.
void memory_plan_reserve_host(MemoryPlan *plan, const char *group, const char *purpose, size_t bytes,
                              void **target);
size_t memory_plan_total(const MemoryPlan *plan);  // on the device
size_t memory_plan_host(const MemoryPlan *plan);   // in host memory
// Bytes of entry i's group when i is its first entry, else 0: for loops over groups.
size_t memory_plan_group_bytes(const MemoryPlan *plan, int i);
// What the plan takes of the device's memory: on CPU ranks, where that is the host's, the host's
// entries too.
size_t memory_plan_needed(const MemoryPlan *plan);
// Allocates everything, zeroed. sharers: how many ranks with the same needs draw on the same
// memory. That is all CPU ranks of a host, and 1 for a GPU of one's own. Error (EXIT_ENVIRONMENT)
// says how much is missing; memory.h says what to change.
bool memory_plan_allocate(MemoryPlan *plan, Device *device, int sharers, Error *err);
// The same with each one's share (bytes) as it was found before any of them took its own.
bool memory_plan_allocate_within(MemoryPlan *plan, Device *device, size_t share, int sharers, Error *err);
// Prints groups and purposes with bytes and bytes per parameter. Entries of one purpose are one
// line. Empty entries are left out.
void memory_plan_print(const MemoryPlan *plan, int64_t parameters, FILE *out);
void memory_plan_free(MemoryPlan *plan, Device *device);

LLMC_END
