// The memory plan: see arena.h.
#include "llmc/arena.h"

#include <stdlib.h>
#include <string.h>

void arena_reserve(Arena *arena, const char *group, const char *purpose, size_t bytes, void **target) {
    if (arena->count == arena->capacity) {
        arena->capacity = arena->capacity ? 2 * arena->capacity : 32;
        arena->entries = (ArenaEntry *)xrealloc(arena->entries, (size_t)arena->capacity * sizeof(ArenaEntry), "the memory plan");
    }
    ArenaEntry entry = {group, purpose, bytes, target, NULL, false};
    arena->entries[arena->count++] = entry;
    *target = NULL;
}

void arena_reserve_host(Arena *arena, const char *group, const char *purpose, size_t bytes, void **target) {
    arena_reserve(arena, group, purpose, bytes, target);
    arena->entries[arena->count - 1].host = true;
}

static size_t sum_of(const Arena *arena, bool host) {
    size_t total = 0;
    for (int i = 0; i < arena->count; i++) total += arena->entries[i].host == host ? arena->entries[i].bytes : 0;
    return total;
}

size_t arena_total(const Arena *arena) { return sum_of(arena, false); }

bool arena_allocate(Arena *arena, Device *device, int sharers, Error *err) {
    bool one_memory = !strcmp(device_backend(), "cpu");  // the device's is the host's
    size_t free_bytes, total_bytes, wanted = (arena_total(arena) + (one_memory ? sum_of(arena, true) : 0)) * (size_t)sharers;
    device_memory(device, &free_bytes, &total_bytes);
    if (wanted > free_bytes) {
        return error_set(err, EXIT_ENVIRONMENT, "the run needs %.2f GiB for %d rank(s) of this machine, the device has %.2f GiB free: %.2f GiB too much; use a smaller --micro-batch-size, "
                         "--recompute-granularity full or more ranks (--plan shows what takes how much)",
                         (double)wanted / 0x1p30, sharers, (double)free_bytes / 0x1p30, (double)(wanted - free_bytes) / 0x1p30);
    }
    for (int i = 0; i < arena->count; i++) {
        ArenaEntry *entry = &arena->entries[i];
        if (entry->bytes == 0) continue;
        entry->memory = entry->host ? host_alloc(device, entry->bytes, entry->purpose, err) : device_alloc(device, entry->bytes, entry->purpose, err);
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

// Groups and purposes of the entries on the device, or of those on the host.
static void print_groups(const Arena *arena, bool host, double parameters, FILE *out) {
    for (int i = 0; i < arena->count; i++) {
        if (arena->entries[i].host != host || !first_of_group(arena, i)) continue;
        const char *group = arena->entries[i].group;
        size_t sum = group_bytes(arena, group);
        fprintf(out, "  %-38s %16zu bytes  %8.3f bytes/parameter\n", group, sum, (double)sum / parameters);
        for (int j = i; j < arena->count; j++) {
            const ArenaEntry *entry = &arena->entries[j];
            if (!strcmp(entry->group, group)) fprintf(out, "    %-36s %16zu\n", entry->purpose, entry->bytes);
        }
    }
}

void arena_print(const Arena *arena, int64_t parameters, FILE *out) {
    double n = (double)parameters;
    print_groups(arena, false, n, out);
    fprintf(out, "  %-38s %16zu bytes  %8.3f bytes/parameter\n", "total", arena_total(arena), (double)arena_total(arena) / n);
    print_groups(arena, true, n, out);
}

void arena_free(Arena *arena, Device *device) {
    for (int i = 0; i < arena->count; i++) {
        ArenaEntry *entry = &arena->entries[i];
        if (entry->memory && entry->host) host_free(device, entry->memory);
        else if (entry->memory) device_free(device, entry->memory);
        *arena->entries[i].target = NULL;
    }
    free(arena->entries);
    Arena empty = {0};
    *arena = empty;
}
