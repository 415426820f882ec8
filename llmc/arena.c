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

size_t arena_needed(const Arena *arena) { return arena_total(arena) + (device_is_host() ? sum_of(arena, true) : 0); }

bool arena_allocate(Arena *arena, Device *device, int sharers, Error *err) {
    return arena_allocate_within(arena, device, device_share(device, sharers), sharers, err);
}

bool arena_allocate_within(Arena *arena, Device *device, size_t share, int sharers, Error *err) {
    size_t wanted = arena_needed(arena);
    if (wanted > share) {
        char whose[64] = "are free";
        if (sharers > 1) snprintf(whose, sizeof whose, "are free for each of the %d ranks of this machine", sharers);
        return error_set(err, EXIT_ENVIRONMENT, "the memory plan takes %.1f MiB, %.1f MiB %s: %.1f MiB too much (--plan shows what takes how much)", (double)wanted / 0x1p20,
                         (double)share / 0x1p20, whose, (double)(wanted - share) / 0x1p20);
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

// Entry i and those after it of the same purpose, such as one per layer; *count of them. 0 bytes when an earlier entry began the sum.
static size_t purpose_bytes(const Arena *arena, int i, int *count) {
    size_t sum = 0;
    *count = 0;
    for (int j = 0; j < arena->count; j++) {
        if (strcmp(arena->entries[j].group, arena->entries[i].group) || strcmp(arena->entries[j].purpose, arena->entries[i].purpose)) continue;
        if (j < i) return 0;
        sum += arena->entries[j].bytes;
        ++*count;
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
            int count;
            size_t bytes = strcmp(arena->entries[j].group, group) ? 0 : purpose_bytes(arena, j, &count);
            if (!bytes) continue;
            fprintf(out, "    %-36s %16zu", arena->entries[j].purpose, bytes);
            fprintf(out, count > 1 ? "  (%d pieces)\n" : "\n", count);
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
