// Log lines: see refusals.h.
#include "llmc/groups/refusals.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

static const double quiet_seconds = 60;

bool refusal_line(Refusals *r, double now, const char *who, const char *why, char *line, size_t bytes) {
    uint64_t key = XXH3_64bits_withSeed(who, strlen(who), XXH3_64bits(why, strlen(why)));
    int at = 0;
    for (int i = 0; i < REFUSAL_KINDS; i++) {
        if (r->kind[i].key == key) {
            at = i;
            break;
        }
        if (r->kind[i].printed < r->kind[at].printed) at = i;
    }
    bool known = r->kind[at].key == key;
    if (known && now < r->kind[at].printed + quiet_seconds) {
        r->kind[at].more++;
        return false;
    }
    int used = snprintf(line, bytes, "refused %s: %s", who, why);
    if (known && r->kind[at].more && (size_t)used < bytes)
        snprintf(line + used, bytes - (size_t)used, " (%lld more)", (long long)r->kind[at].more);
    r->kind[at].key = key;
    r->kind[at].printed = now;
    r->kind[at].more = 0;
    return true;
}

void refusal_news(Refusals *r, const char *line) {
    int last = (r->first + r->count - 1) % NEWS_LINES;
    if (r->count && strcmp(r->news[last], line) == 0) return;
    if (r->count == NEWS_LINES) {
        free(r->news[r->first]);
        r->first = (r->first + 1) % NEWS_LINES;
        r->count--;
    }
    r->news[(r->first + r->count++) % NEWS_LINES] = xstrdup(line);
}

const char *refusal_next(Refusals *r) {
    free(r->shown);
    r->shown = NULL;
    if (r->count == 0) return NULL;
    r->shown = r->news[r->first];
    r->first = (r->first + 1) % NEWS_LINES;
    r->count--;
    return r->shown;
}

void refusal_free(Refusals *r) {
    while (refusal_next(r)) continue;
}
