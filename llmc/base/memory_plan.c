// The memory plan: see memory_plan.h.
#include "llmc/base/memory_plan.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static void add(MemoryPlan *plan, MemoryPlanEntry entry) {
    assert(plan && entry.group && entry.purpose);
    plan->entries = grow_array(plan->entries, plan->count, sizeof *plan->entries, "the memory plan");
    plan->entries[plan->count++] = entry;
    if (entry.target) *entry.target = NULL;
}

void memory_plan_reserve(MemoryPlan *plan, const char *group, const char *purpose, size_t bytes,
                         void **target) {
    assert(target);
    add(plan, (MemoryPlanEntry){group, purpose, bytes, target, NULL, ON_DEVICE});
}

void memory_plan_reserve_host(MemoryPlan *plan, const char *group, const char *purpose, size_t bytes,
                              void **target) {
    assert(target);
    add(plan, (MemoryPlanEntry){group, purpose, bytes, target, NULL, ON_HOST});
}

void memory_plan_reserve_disk(MemoryPlan *plan, const char *group, const char *purpose, size_t bytes) {
    add(plan, (MemoryPlanEntry){group, purpose, bytes, NULL, NULL, ON_DISK});
}

static size_t sum_of(const MemoryPlan *plan, MemoryPlace place) {
    size_t total = 0;
    for (int i = 0; i < plan->count; i++)
        total += plan->entries[i].place == place ? plan->entries[i].bytes : 0;
    return total;
}

size_t memory_plan_total(const MemoryPlan *plan) { return sum_of(plan, ON_DEVICE); }
size_t memory_plan_host(const MemoryPlan *plan) { return sum_of(plan, ON_HOST); }
size_t memory_plan_disk(const MemoryPlan *plan) { return sum_of(plan, ON_DISK); }

size_t memory_plan_needed(const MemoryPlan *plan) {
    return memory_plan_total(plan) + (device_kind()->own_memory ? 0 : memory_plan_host(plan));
}

bool memory_plan_allocate(MemoryPlan *plan, Device *device, int sharers, Error *err) {
    return memory_plan_allocate_within(plan, device, device_share(device, sharers), sharers, err);
}

bool memory_plan_allocate_within(MemoryPlan *plan, Device *device, size_t share, int sharers, Error *err) {
    assert(plan && sharers > 0);
    size_t wanted = memory_plan_needed(plan);
    if (wanted > share) {
        char whose[64] = "are free";
        if (sharers > 1)
            snprintf(whose, sizeof whose, "are free for each of the %d ranks of this machine", sharers);
        return system_error(
            err, "the memory plan needs %.1f MiB, but %.1f MiB %s, so it is %.1f MiB too much (see --plan)",
            (double)wanted / 0x1p20, (double)share / 0x1p20, whose, (double)(wanted - share) / 0x1p20);
    }
    for (int i = 0; i < plan->count; i++) {
        MemoryPlanEntry *entry = &plan->entries[i];
        if (entry->bytes == 0 || entry->place == ON_DISK) continue;
        entry->memory = entry->place == ON_HOST ? host_alloc(device, entry->bytes, entry->purpose, err)
                                                : device_alloc(device, entry->bytes, entry->purpose, err);
        if (!entry->memory) return false;
        *entry->target = entry->memory;
    }
    return true;
}

size_t memory_plan_group_bytes(const MemoryPlan *plan, int i) {
    assert(plan && i >= 0 && i < plan->count);
    size_t sum = 0;
    for (int j = 0; j < plan->count; j++) {
        if (strcmp(plan->entries[j].group, plan->entries[i].group)) continue;
        if (j < i) return 0;
        sum += plan->entries[j].bytes;
    }
    return sum;
}

// Sums the bytes of all entries with the purpose of entry i, such as one entry per layer, and
// counts them. Returns 0 if an earlier entry has that purpose.
static size_t purpose_bytes(const MemoryPlan *plan, int i, int *count) {
    size_t sum = 0;
    *count = 0;
    for (int j = 0; j < plan->count; j++) {
        if (strcmp(plan->entries[j].group, plan->entries[i].group) ||
            strcmp(plan->entries[j].purpose, plan->entries[i].purpose))
            continue;
        if (j < i) return 0;
        sum += plan->entries[j].bytes;
        ++*count;
    }
    return sum;
}

// Prints the entries of a place.
static void print_groups(const MemoryPlan *plan, MemoryPlace place, double parameters, FILE *out) {
    for (int i = 0; i < plan->count; i++) {
        size_t sum = memory_plan_group_bytes(plan, i);
        if (plan->entries[i].place != place || !sum) continue;
        const char *group = plan->entries[i].group;
        fprintf(out, "  %-38s %16zu bytes  %8.3f bytes/parameter\n", group, sum, (double)sum / parameters);
        for (int j = i; j < plan->count; j++) {
            int count;
            size_t bytes = strcmp(plan->entries[j].group, group) ? 0 : purpose_bytes(plan, j, &count);
            if (!bytes) continue;
            fprintf(out, "    %-36s %16zu", plan->entries[j].purpose, bytes);
            fprintf(out, count > 1 ? "  (%d buffers)\n" : "\n", count);
        }
    }
}

void memory_plan_print(const MemoryPlan *plan, int64_t parameters, FILE *out) {
    double n = (double)parameters;
    print_groups(plan, ON_DEVICE, n, out);
    fprintf(out, "  %-38s %16zu bytes  %8.3f bytes/parameter\n", "total", memory_plan_total(plan),
            (double)memory_plan_total(plan) / n);
    print_groups(plan, ON_HOST, n, out);
    print_groups(plan, ON_DISK, n, out);
}

void memory_plan_free(MemoryPlan *plan, Device *device) {
    for (int i = 0; i < plan->count; i++) {
        MemoryPlanEntry *entry = &plan->entries[i];
        if (!entry->memory) continue;  // never allocated (--plan), and the target may no longer exist
        if (entry->place == ON_HOST) host_free(device, entry->memory);
        else device_free(device, entry->memory);
        *entry->target = NULL;
    }
    free(plan->entries);
    *plan = (MemoryPlan){0};
}
