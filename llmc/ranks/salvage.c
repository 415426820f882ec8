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

// Seconds that a wait may take after the launcher's signal. The launcher must leave this, the time
// for others to answer, and the time to save (docs/checkpoints.md).
enum { AFTER_SIGNAL = 5 };
// Seconds for others to answer, and more of them for what they make of it.
enum { FOR_OTHERS = 20, AND_VERDICTS = 5 };
// Seconds for them to save, beyond a second time limit.
enum { FOR_SAVES = 60 };
// Messages between those that look for each other.
enum { TAG_HERE, TAG_LOST, TAG_GROUP };
// Instead of a node: none is lost; this rank gives up.
enum { NOBODY = -1, NOTHING_TO_DO = -2 };

struct Salvage {
    atomic_bool armed, noticed, begun, failed;
    MPI_Comm world;   // for the survivors' messages alone
    double patience;  // seconds for the others to answer: the same on all ranks
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

void salvage_preset(const Site *site, Peers world, int per_node, SalvageSave save, void *context) {
    Salvage *s = site->salvage;
    s->world = peers_duplicate(world);
    MPI_Comm_set_errhandler(s->world, MPI_ERRORS_RETURN);
    MPI_Comm_rank(s->world, &s->rank);
    MPI_Comm_size(s->world, &s->size);
    double limit = world.limit > 0 ? world.limit : FOR_OTHERS;
    peers_reduce(world, &limit, 1, MPI_DOUBLE, MPI_MIN);
    s->patience = limit < FOR_OTHERS ? limit : FOR_OTHERS;
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

static int node_of(const Salvage *s, int rank) { return rank / s->per_node; }

static Salvage *armed(const Site *site) {
    Salvage *s = site ? site->salvage : NULL;
    return s && atomic_load(&s->armed) ? s : NULL;
}

bool salvage_covers(const Site *site) { return armed(site) != NULL; }

double salvage_patience(const Site *site, double limit) { return armed(site) ? limit + FOR_SAVES : 0; }

bool salvage_spares(const Site *site, int rank) {
    const Salvage *s = armed(site);
    return s && node_of(s, rank) != node_of(s, s->rank);
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
    return MPI_Iprobe(MPI_ANY_SOURCE, TAG_HERE, s->world, &there, MPI_STATUS_IGNORE) == MPI_SUCCESS && there;
}

void salvage_begin(const Site *site, const char *why) {
    Salvage *s = armed(site);
    if (!s || atomic_exchange(&s->begun, true)) return;
    atomic_store(&s->noticed, true);
    s->save(s->context, why);
    atomic_store(&s->failed, true);
}

bool salvage_failed(const Site *site) {
    Salvage *s = armed(site);
    return s && atomic_load(&s->failed);
}

// --- who is left ---------------------------------------------------------------------------------

// What this rank has heard of each rank of the world, (size) each.
typedef struct Hearing {
    const Salvage *salvage;
    MPI_Request *request;
    int *heard;   // the message
    bool *there;  // it has arrived
} Hearing;

static Hearing hearing_make(const Salvage *s) {
    size_t ranks = (size_t)s->size;
    const char *purpose = "the survivors";  // never freed: messages that do not come stay under way
    Hearing h = {s, (MPI_Request *)xcalloc(ranks, sizeof(MPI_Request), purpose),
                 (int *)xcalloc(ranks, sizeof(int), purpose), (bool *)xcalloc(ranks, sizeof(bool), purpose)};
    for (int r = 0; r < s->size; r++) h.request[r] = MPI_REQUEST_NULL;
    return h;
}

// Sends `word` to rank r and listens for its word. word must stay.
static void speak_with(Hearing *h, int r, int tag, const int *word) {
    const Salvage *s = h->salvage;
    MPI_Request sent;
    if (MPI_Irecv(&h->heard[r], 1, MPI_INT, r, tag, s->world, &h->request[r]) != MPI_SUCCESS)
        h->request[r] = MPI_REQUEST_NULL;
    MPI_Isend(word, 1, MPI_INT, r, tag, s->world, &sent);
}

// How many ranks have been heard by now.
static int listen(Hearing *h) {
    int count = 0;
    for (int r = 0; r < h->salvage->size; r++) {
        int done = 0;
        bool open = !h->there[r] && h->request[r] != MPI_REQUEST_NULL;
        if (open && MPI_Test(&h->request[r], &done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            h->request[r] = MPI_REQUEST_NULL;
        else if (done) h->there[r] = true;
        count += h->there[r];
    }
    return count;
}

// Until `wanted` ranks have been heard, or so many seconds have passed.
static void listen_for(const Site *site, Hearing *h, int wanted, double seconds) {
    double until = monotonic_seconds() + seconds;
    while (listen(h) < wanted && monotonic_seconds() < until) {
        heartbeat_moves(site);
        usleep(1000);
    }
}

// The one node of which not all ranks are there; NOBODY; or NOTHING_TO_DO where it is this rank's,
// or more than one.
static int missing_node(const Hearing *h) {
    const Salvage *s = h->salvage;
    int missing = NOBODY;
    for (int r = 0; r < s->size; r++) {
        int node = node_of(s, r);
        if (h->there[r] || node == missing) continue;
        if (missing != NOBODY || node == node_of(s, s->rank)) return NOTHING_TO_DO;
        missing = node;
    }
    return missing;
}

// What the ranks that are there make of it together. A node that one of them misses is lost to all.
// Of different ones the lowest rank's counts.
static int common_verdict(const Hearing *said) {
    const Salvage *s = said->salvage;
    int lost = NOBODY;
    for (int r = 0; r < s->size; r++) {
        if (lost == NOBODY && said->there[r] && said->heard[r] >= 0) lost = said->heard[r];
    }
    for (int r = 0; r < s->size; r++) {
        bool in = lost == NOBODY || node_of(s, r) != lost;
        if (in && (!said->there[r] || said->heard[r] == NOTHING_TO_DO)) return NOTHING_TO_DO;
    }
    return lost == node_of(s, s->rank) ? NOTHING_TO_DO : lost;
}

// The communicator of the survivors. Only they take part in making it.
static MPI_Comm without_node(const Salvage *s, int lost) {
    MPI_Comm made = MPI_COMM_NULL;
    MPI_Group all, rest;
    int range[1][3] = {{lost * s->per_node, (lost + 1) * s->per_node - 1, 1}};
    MPI_Comm_group(s->world, &all);
    MPI_Group_range_excl(all, lost == NOBODY ? 0 : 1, range, &rest);
    if (MPI_Comm_create_group(s->world, rest, TAG_GROUP, &made) != MPI_SUCCESS) return MPI_COMM_NULL;
    MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
    return made;
}

// First every survivor tells all others that it is one. All are waited for: one that is only late
// is not lost. Then those that are there tell each other whom they miss, so that all do the same.
MPI_Comm salvage_survivors(const Site *site, int *lost) {
    static const int here = 1;
    const Salvage *s = site->salvage;
    Hearing present = hearing_make(s), said = hearing_make(s);
    int speaking = 1;
    present.there[s->rank] = said.there[s->rank] = true;
    for (int r = 0; r < s->size; r++) {
        if (r != s->rank) speak_with(&present, r, TAG_HERE, &here);
    }
    listen_for(site, &present, s->size, s->patience);
    int *verdict = &said.heard[s->rank];
    *verdict = missing_node(&present);
    for (int r = 0; r < s->size; r++) {
        if (r == s->rank || !present.there[r]) continue;
        speak_with(&said, r, TAG_LOST, verdict);
        speaking++;
    }
    // Who was heard last may have begun so much later, and listens as long.
    listen_for(site, &said, speaking, s->patience + AND_VERDICTS);
    *lost = common_verdict(&said);
    return *lost == NOTHING_TO_DO ? MPI_COMM_NULL : without_node(s, *lost);
}
