// The memory plan: see arena.h.
#include "llmc/arena.h"

#include <stdlib.h>
#include <string.h>

void arena_reserve(Arena *arena, const char *group, const char *purpose, size_t bytes, void **target) {
    if (arena->count == arena->capacity) {
        arena->capacity = arena->capacity ? 2 * arena->capacity : 32;
        arena->entries = (ArenaEntry *)xrealloc(arena->entries, (size_t)arena->capacity * sizeof(ArenaEntry), "the memory plan");
    }
    ArenaEntry entry = {group, purpose, bytes, target, NULL};
    arena->entries[arena->count++] = entry;
    *target = NULL;
}

size_t arena_total(const Arena *arena) {
    size_t total = 0;
    for (int i = 0; i < arena->count; i++) total += arena->entries[i].bytes;
    return total;
}

bool arena_allocate(Arena *arena, Device *device, int sharers, Error *err) {
    size_t free_bytes, total_bytes, wanted = arena_total(arena) * (size_t)sharers;
    device_memory(device, &free_bytes, &total_bytes);
    if (wanted > free_bytes) {
        return error_set(err, EXIT_ENVIRONMENT, "the run needs %.2f GiB for %d rank(s) of this machine, the device has %.2f GiB free: %.2f GiB too much; use a smaller --micro-batch-size, "
                         "--recompute-granularity full or more ranks (--plan shows what takes how much)",
                         (double)wanted / 0x1p30, sharers, (double)free_bytes / 0x1p30, (double)(wanted - free_bytes) / 0x1p30);
    }
    for (int i = 0; i < arena->count; i++) {
        ArenaEntry *entry = &arena->entries[i];
        if (entry->bytes == 0) continue;
        entry->memory = device_alloc(device, entry->bytes, entry->purpose, err);
        if (!entry->memory) return false;
        *entry->target = entry->memory;
    }
    return true;
}

static size_t group_bytes(const Arena *arena, const char *group) {
    size_t sum = 0;
    for (int i = 0; i < arena->count; i++) {
        if (!strcmp(arena->entries[i].group, group)) sum += arena->entries[i].bytes;
    }
    return sum;
}

static bool first_of_group(const Arena *arena, int i) {
    for (int j = 0; j < i; j++) {
        if (!strcmp(arena->entries[j].group, arena->entries[i].group)) return false;
    }
    return true;
}

void arena_print(const Arena *arena, int64_t parameters, FILE *out) {
    double n = (double)parameters;
    for (int i = 0; i < arena->count; i++) {
        if (!first_of_group(arena, i)) continue;
        const char *group = arena->entries[i].group;
        size_t sum = group_bytes(arena, group);
        fprintf(out, "  %-38s %16zu bytes  %8.3f bytes/parameter\n", group, sum, (double)sum / n);
        for (int j = i; j < arena->count; j++) {
            const ArenaEntry *entry = &arena->entries[j];
            if (!strcmp(entry->group, group)) fprintf(out, "    %-36s %16zu\n", entry->purpose, entry->bytes);
        }
    }
    fprintf(out, "  %-38s %16zu bytes  %8.3f bytes/parameter\n", "total", arena_total(arena), (double)arena_total(arena) / n);
}

void arena_free(Arena *arena, Device *device) {
    for (int i = 0; i < arena->count; i++) {
        if (arena->entries[i].memory) device_free(device, arena->entries[i].memory);
        *arena->entries[i].target = NULL;
    }
    free(arena->entries);
    Arena empty = {0};
    *arena = empty;
}
