// Fault injection: see fault.h. fault_flip is in fault_flip.c, because the heartbeat has no device.
#include "llmc/base/fault.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool parse_fault(const char *word, Fault *fault) {
    static const char *const names[FAULT_KINDS] = {"replica", "message", "stall", "hang"};
    for (int kind = 0; kind < FAULT_KINDS; kind++) {
        size_t length = strlen(names[kind]);
        int used = 0;
        if (strncmp(word, names[kind], length) != 0) continue;
        word += length;
        fault->kind = (FaultKind)kind;
        if (sscanf(word, ":%d:%" SCNd64 ":%" SCNd64 "%n", &fault->rank, &fault->iteration, &fault->at,
                   &used) != 3)
            return false;
        fault->bit = fault->rank % 8;
        word += used;
        if (kind <= FAULT_MESSAGE && sscanf(word, ":%" SCNd64 "%n", &fault->bit, &used) == 1) word += used;
        return *word == '\0';
    }
    return false;
}

bool faults_from_environment(Faults *faults, int rank, Error *err) {
    const char *wanted = getenv("SDP4BIT_FAULT");
    faults->count = 0;
    if (!wanted) return true;
    char *words = xstrdup(wanted), *rest = words, *word;
    bool ok = true;
    while (ok && (word = strsep(&rest, ",")) != NULL) {
        Fault fault;
        ok = faults->count < MOST_FAULTS && parse_fault(word, &fault);
        if (ok && fault.rank == rank) faults->fault[faults->count++] = fault;
    }
    free(words);
    return ok ||
           usage_error(err, "cannot parse SDP4BIT_FAULT=%.200s, which is for tests of this program; unset it",
                       wanted);
}

const Fault *fault_due(const Faults *faults, FaultKind kind, int64_t iteration, int64_t at) {
    for (int i = 0; i < faults->count; i++) {
        const Fault *f = &faults->fault[i];
        if (f->kind == kind && f->iteration == iteration && f->at == at) return f;
    }
    return NULL;
}
