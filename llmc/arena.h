// One plan before any allocation: every device buffer of a run is reserved by name first, so that --plan prints exactly what the program
// allocates, and what does not fit is known before anything is allocated. Used by train_gpt.cu and zero_plan.c.
#pragma once
#include <stdio.h>

#include "llmc/device.h"
LLMC_BEGIN

typedef struct ArenaEntry {
    const char *group;    // "weights", "gradients", "optimizer state", "activations", "communication", ...: summed in --plan
    const char *purpose;  // "bf16 replica", ... a string literal
    size_t bytes;
    void **target;        // receives the address on allocation
    void *memory;
    bool host;            // not on the device: host_alloc
} ArenaEntry;

typedef struct Arena {
    ArenaEntry *entries;
    int count, capacity;
} Arena;

// Reserves bytes (0 is allowed: the target becomes NULL).
void arena_reserve(Arena *arena, const char *group, const char *purpose, size_t bytes, void **target);
// The same in host memory that the device copies to by itself (device.h, host_alloc): not part of the total.
void arena_reserve_host(Arena *arena, const char *group, const char *purpose, size_t bytes, void **target);
size_t arena_total(const Arena *arena);  // on the device
// What the plan takes of the device's memory: on CPU ranks, where that is the host's, the host's entries too.
size_t arena_needed(const Arena *arena);
// Allocates everything, zeroed. sharers: how many ranks with the same needs draw on the same memory (CPU ranks of a host; 1 for a GPU of one's own).
// Error (EXIT_ENVIRONMENT): says how much is missing (what to change: memory.h).
bool arena_allocate(Arena *arena, Device *device, int sharers, Error *err);
// The same with each one's share (bytes) as it was found before any of them took its own.
bool arena_allocate_within(Arena *arena, Device *device, size_t share, int sharers, Error *err);
// Table of groups and purposes with bytes and bytes per parameter; entries of one purpose are one line, empty ones none.
void arena_print(const Arena *arena, int64_t parameters, FILE *out);
void arena_free(Arena *arena, Device *device);

LLMC_END
