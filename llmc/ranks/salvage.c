// A lost node is noticed, and the others find each other: see salvage.h.
//
// MPI knows no lost ranks. It goes on between those that are left, as long as none of them waits
// for a lost one without end. So the survivors tell each other in messages that nobody waits for.
#include "llmc/ranks/salvage.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/stop.h"

// Seconds that a wait may take after the launcher's signal. It kills half a minute later or more,
// where it was told to leave so much time (docs/checkpoints.md).
enum { AFTER_SIGNAL = 5 };
// Seconds for others to answer.
enum { FOR_OTHERS = 20 };
// Seconds for them to save.
enum { FOR_SAVES = 60 };

struct Salvage {
    atomic_bool armed, noticed, begun;
    MPI_Comm world;  // for the survivors' messages alone
    double limit;    // seconds that one waits for another; 0: none
    int rank, size, per_node;
    SalvageSave save;
    void *context;
};

Salvage *salvage_create(void) {
    Salvage *salvage = (Salvage *)xcalloc(1, sizeof *salvage, "the salvage");
    salvage->world = MPI_COMM_NULL;
    return salvage;
}

void salvage_free(Salvage *salvage) { free(salvage); }

void salvage_arm(const Site *site, Peers world, int per_node, SalvageSave save, void *context) {
    Salvage *s = site->salvage;
    s->world = peers_duplicate(world);
    MPI_Comm_set_errhandler(s->world, MPI_ERRORS_RETURN);
    MPI_Comm_rank(s->world, &s->rank);
    MPI_Comm_size(s->world, &s->size);
    s->limit = world.limit;
    s->per_node = per_node;
    s->save = save;
    s->context = context;
    stop_watch_launcher();
    atomic_store(&s->armed, true);
}

void salvage_disarm(const Site *site) {
    Salvage *s = site->salvage;
    atomic_store(&s->armed, false);
    if (s->world != MPI_COMM_NULL) MPI_Comm_free(&s->world);
}

static Salvage *armed(const Site *site) {
    Salvage *s = site ? site->salvage : NULL;
    return s && atomic_load(&s->armed) ? s : NULL;
}

bool salvage_covers(const Site *site) { return armed(site) != NULL; }

double salvage_patience(const Site *site, double limit) { return armed(site) ? limit + FOR_SAVES : 0; }

bool salvage_spares(const Site *site, int rank) {
    const Salvage *s = armed(site);
    return s && rank / s->per_node != s->rank / s->per_node;
}

void salvage_notice(const Site *site) {
    Salvage *s = armed(site);
    if (s) atomic_store(&s->noticed, true);
}

bool salvage_noticed(const Site *site) {
    Salvage *s = armed(site);
    return s && atomic_load(&s->noticed);
}

bool salvage_due(const Site *site, double seconds) {
    Salvage *s = armed(site);
    if (!s || atomic_load(&s->begun)) return false;
    double since = stop_seconds_since_launcher();
    return atomic_load(&s->noticed) || (since > AFTER_SIGNAL && seconds > AFTER_SIGNAL);
}

bool salvage_asked(const Site *site) {
    Salvage *s = armed(site);
    int there = 0;
    if (!s || atomic_load(&s->begun)) return false;
    return MPI_Iprobe(MPI_ANY_SOURCE, 0, s->world, &there, MPI_STATUS_IGNORE) == MPI_SUCCESS && there;
}

void salvage_begin(const Site *site, const char *why) {
    Salvage *s = armed(site);
    if (!s || atomic_exchange(&s->begun, true)) return;
    atomic_store(&s->noticed, true);
    s->save(s->context, why);
}

// --- who is left ---------------------------------------------------------------------------------

// Nodes of which all ranks have answered. lost: one of the others; -1: there is none.
static int whole_nodes(const Salvage *s, const MPI_Request *answer, int *lost) {
    int whole = 0;
    *lost = -1;
    for (int node = 0; node < s->size / s->per_node; node++) {
        int there = 0;
        for (int r = node * s->per_node; r < (node + 1) * s->per_node; r++)
            there += answer[r] == MPI_REQUEST_NULL;
        if (there == s->per_node) whole++;
        else *lost = node;
    }
    return whole;
}

// The communicator of the survivors. Only they take part in making it. lost -1: all.
static MPI_Comm without_node(const Salvage *s, int lost) {
    MPI_Comm made = MPI_COMM_NULL;
    MPI_Group all, rest;
    int range[1][3] = {{lost * s->per_node, (lost + 1) * s->per_node - 1, 1}};
    MPI_Comm_group(s->world, &all);
    MPI_Group_range_excl(all, lost < 0 ? 0 : 1, range, &rest);
    if (MPI_Comm_create_group(s->world, rest, 1, &made) != MPI_SUCCESS) return MPI_COMM_NULL;
    MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
    return made;
}

// Every survivor tells all others that it is one. All are waited for: one that is only late is not
// lost. What goes to a lost rank, or comes from it, stays under way until the process ends.
MPI_Comm salvage_survivors(const Site *site, int *lost) {
    const Salvage *s = site->salvage;
    size_t ranks = (size_t)s->size;
    static const char here = 1;
    char *there = (char *)xcalloc(ranks, 1, "the survivors");
    MPI_Request *answer = (MPI_Request *)xcalloc(ranks, sizeof *answer, "the survivors");
    int nodes = s->size / s->per_node, whole = 0;
    for (int r = 0; r < s->size; r++) {
        MPI_Request sent;
        answer[r] = MPI_REQUEST_NULL;
        if (r == s->rank) continue;
        MPI_Irecv(&there[r], 1, MPI_CHAR, r, 0, s->world, &answer[r]);
        MPI_Isend(&here, 1, MPI_CHAR, r, 0, s->world, &sent);
    }
    double patience = s->limit > 0 && s->limit < FOR_OTHERS ? s->limit : FOR_OTHERS;
    double until = monotonic_seconds() + patience;
    while ((whole = whole_nodes(s, answer, lost)) < nodes && monotonic_seconds() < until) {
        for (int r = 0, done; r < s->size; r++) {
            if (answer[r] != MPI_REQUEST_NULL) MPI_Test(&answer[r], &done, MPI_STATUS_IGNORE);
        }
        heartbeat_moves(site);
        usleep(1000);
    }
    if (whole < nodes - 1 || *lost == s->rank / s->per_node) return MPI_COMM_NULL;
    return without_node(s, *lost);
}
