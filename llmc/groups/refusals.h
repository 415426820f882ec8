// Log lines of a network thread: refused frames, at most one line per minute for each sender and
// reason, and a queue of other news without repetition.
#pragma once
#include "llmc/groups/frame.h"
LLMC_BEGIN

enum { REFUSAL_KINDS = 32, NEWS_LINES = 32 };

typedef struct Refusals {
    struct {
        uint64_t key;
        double printed;
        int64_t more;  // since the last line
    } kind[REFUSAL_KINDS];
    char *news[NEWS_LINES];  // ring
    int first, count;
    char *shown;  // returned by refusal_next
} Refusals;

// Formats "refused WHO: WHY (N more)". Returns false if such a line was printed a short time ago.
bool refusal_line(Refusals *r, double now, const char *who, const char *why, char *line, size_t bytes);
// Queues a line, unless it is the last in the queue. The oldest is dropped if the queue is full.
void refusal_news(Refusals *r, const char *line);
// Returns the oldest line and removes it, NULL if there is none. Valid until the next call.
const char *refusal_next(Refusals *r);
void refusal_free(Refusals *r);

LLMC_END
