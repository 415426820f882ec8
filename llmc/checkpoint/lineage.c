// Which checkpoints in a --save folder are a run's own: see lineage.h. Called by one rank.
#include "llmc/checkpoint/lineage.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/checkpoint/save_folder.h"

enum { OTHERS_SHOWN = 6 };

static void append(Lineage *l, int64_t iteration) {
    // Room doubles whenever the count is a power of two.
    if ((l->count & (l->count - 1)) == 0)
        l->iterations = (int64_t *)xrealloc(l->iterations, (size_t)(l->count ? 2 * l->count : 1) * sizeof *l->iterations, "the run's list of checkpoints");
    l->iterations[l->count++] = iteration;
}

void lineage_free(Lineage *l) {
    free(l->iterations);
    memset(l, 0, sizeof *l);
}

// ---------------------------------------------------------------------------------------------------------------------
// The file

// Lines of digits, ascending; the last newline may be missing.
static bool parse(Lineage *l, const char *text, uint64_t bytes) {
    const char *end = text + bytes;
    for (const char *p = text; p < end;) {
        int64_t iteration = 0;
        const char *digits = p;
        while (p < end && p - digits <= LINEAGE_DIGITS && isdigit((unsigned char)*p)) iteration = 10 * iteration + (*p++ - '0');
        bool number = p > digits && p - digits <= LINEAGE_DIGITS && (p == end || *p == '\n');
        if (!number || (l->count > 0 && iteration <= l->iterations[l->count - 1])) {
            snprintf(l->damage, sizeof l->damage, "its line %d is not an iteration after the one above it", l->count + 1);
            return false;
        }
        append(l, iteration);
        p++;
    }
    if (l->count == 0) snprintf(l->damage, sizeof l->damage, "it is empty");
    return l->count > 0;
}

static bool read_file(const char *path, Lineage *l, Error *err) {
    uint64_t bytes;
    if (!durable_exists(path)) return true;
    if (!durable_plain_file(path, LINEAGE_MAX_BYTES)) {
        snprintf(l->damage, sizeof l->damage, "it is not a plain file of at most %d bytes", LINEAGE_MAX_BYTES);
        return true;
    }
    char *text = durable_read_file(path, LINEAGE_MAX_BYTES, &bytes, err);
    if (!text) return false;
    l->listed = parse(l, text, bytes);
    free(text);
    return true;
}

bool lineage_read(const char *directory, Lineage *l, Error *err) {
    memset(l, 0, sizeof *l);
    char *path = text_format("%s/" LINEAGE_NAME, directory);
    bool ok = read_file(path, l, err);
    free(path);
    if (!ok || l->listed) return ok;
    free(l->iterations);
    l->iterations = save_folder_list(directory, &l->count);
    return true;
}

char *lineage_text(const Lineage *l, uint64_t *bytes) {
    char *text = (char *)xmalloc((size_t)l->count * (LINEAGE_DIGITS + 6) + 1, "the run's list of checkpoints");
    *bytes = 0;
    for (int i = l->count > LINEAGE_MOST ? l->count - LINEAGE_MOST : 0; i < l->count; i++)
        *bytes += (uint64_t)sprintf(text + *bytes, "%" PRId64 "\n", l->iterations[i]);
    return text;
}

// ---------------------------------------------------------------------------------------------------------------------
// The line

// Index of the first one that is not before `iteration`.
static int position(const Lineage *l, int64_t iteration) {
    int low = 0, high = l->count;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (l->iterations[middle] < iteration) low = middle + 1;
        else high = middle;
    }
    return low;
}

bool lineage_holds(const Lineage *l, int64_t iteration) {
    int i = position(l, iteration);
    return i < l->count && l->iterations[i] == iteration;
}

int64_t lineage_before(const Lineage *l, int64_t iteration) {
    int i = position(l, iteration);
    return i > 0 ? l->iterations[i - 1] : -1;
}

bool lineage_extend(const char *directory, int64_t before, int64_t iteration, Lineage *l, Error *err) {
    Lineage old;
    memset(l, 0, sizeof *l);
    if (!lineage_read(directory, &old, err)) return false;
    l->listed = old.listed;
    memcpy(l->damage, old.damage, sizeof l->damage);
    bool known = !old.listed || lineage_holds(&old, before);
    for (int i = 0; known && i < old.count && old.iterations[i] < before && old.iterations[i] < iteration; i++) {
        if (save_folder_holds(directory, old.iterations[i])) append(l, old.iterations[i]);
    }
    if (before >= 0 && before < iteration && save_folder_holds(directory, before)) append(l, before);
    append(l, iteration);
    lineage_free(&old);
    return true;
}

void lineage_others(const char *directory, const Lineage *l, char *text, size_t text_bytes) {
    Lineage others = {NULL, 0, false, ""};
    int there, used = 0;
    int64_t *list = save_folder_list(directory, &there);
    for (int i = 0; i < there; i++) {
        if (!lineage_holds(l, list[i])) append(&others, list[i]);
    }
    *text = 0;
    if (others.count > OTHERS_SHOWN) {
        snprintf(text, text_bytes, "%" PRId64 " to %" PRId64 ", %d in all", others.iterations[0], others.iterations[others.count - 1], others.count);
    } else {
        for (int i = 0; i < others.count; i++) {
            const char *between = i == 0 ? "" : i + 1 < others.count ? ", " : " and ";
            used += snprintf(text + used, text_bytes - (size_t)used, "%s%" PRId64, between, others.iterations[i]);
        }
    }
    free(list);
    lineage_free(&others);
}
