// State transfers to groups that join or have missed rounds: the rendezvous asks one group to serve
// the chunk's state, and tells the others where it is.
#include <string.h>

#include "llmc/groups/rounds_state.h"

// A source that has not answered for ASK_SECONDS is not the only one asked. A lost group may come
// back with its state within RETURN_SECONDS.
enum { ASK_SECONDS = 10, RETURN_SECONDS = 20 };

static bool wanted(const Chunk *chunk) {
    for (int g = 0; g < MAX_GROUPS; g++) {
        if (chunk->known[g].wants) return true;
    }
    return false;
}

// Returns the group after `last` that has state and answers, if possible one that is not late.
static int find_source(const Rounds *r, const Chunk *chunk, int last) {
    for (int late = 0; late < 2; late++) {
        for (int i = 1; i <= MAX_GROUPS; i++) {
            int g = (last + i + MAX_GROUPS) % MAX_GROUPS;
            const Group *group = &r->group[g];
            if (!group->joined || group->silent || !chunk->known[g].ready) continue;
            if (late || !group->late) return g;
        }
    }
    return -1;
}

// Whether a group may still report a state, or an earlier one than it had: it was lost a short time
// ago, or it has not asked for the state yet.
static bool may_report(const Rounds *r, const Chunk *chunk) {
    if (r->now < r->lost_at + RETURN_SECONDS) return true;
    for (int g = 0; g < MAX_GROUPS; g++) {
        const Group *group = &r->group[g];
        if (!group->used || !chunk->known[g].had || chunk->known[g].wants) continue;
        if (!group->silent || r->now < group->heard + RETURN_SECONDS) return true;
    }
    return false;
}

// All groups with the state of a chunk were lost. Lets the group with the newest earlier state keep
// it, if no other one may come.
static void keep_newest(Rounds *r, int c) {
    Chunk *chunk = &r->chunk[c];
    int best = -1;
    if (may_report(r, chunk)) return;
    for (int g = 0; g < MAX_GROUPS; g++) {
        const Known *known = &chunk->known[g], *other = best < 0 ? NULL : &chunk->known[best];
        if (!r->group[g].joined || r->group[g].silent || !known->wants) continue;
        bool better = !other || (known->stale && (!other->stale || known->stale_round > other->stale_round));
        if (better) best = g;
    }
    if (best < 0) return;
    Message keep;
    message_clear(&keep, MESSAGE_KEEP);
    keep.chunk = c;
    rounds_forget(chunk);
    rounds_news(
        r, "the state of chunk %d was lost with the groups that had it; group %s continues from round %lld",
        c, r->group[best].name, (long long)(chunk->known[best].stale ? chunk->known[best].stale_round : 0));
    rounds_send(r, best, &keep);
}

static bool any_ready(const Rounds *r, const Chunk *chunk) {
    for (int g = 0; g < MAX_GROUPS; g++) {
        if (r->group[g].used && chunk->known[g].ready) return true;
    }
    return false;
}

void rounds_ask(Rounds *r, int c) {
    Chunk *chunk = &r->chunk[c];
    if (!wanted(chunk)) return;
    if (!any_ready(r, chunk)) {
        keep_newest(r, c);
        return;
    }
    bool waiting = chunk->source >= 0 && !r->group[chunk->source].silent;
    if (waiting && (chunk->served || r->now < chunk->asked + ASK_SECONDS)) return;
    int g = find_source(r, chunk, chunk->source);
    if (g < 0) return;
    Message want;
    message_clear(&want, MESSAGE_WANT);
    want.chunk = c;
    chunk->source = g;
    chunk->served = false;
    chunk->asked = r->now;
    rounds_send(r, g, &want);
}

void rounds_fetch(Rounds *r, int c, int g, const Message *m) {
    Chunk *chunk = &r->chunk[c];
    chunk->known[g].stale = (m->flags & FLAG_STATE) != 0;
    chunk->known[g].stale_round = m->round;
    chunk->known[g].wants = true;
    chunk->known[g].ready = false;
    chunk->known[g].counted = 0;  // the state that it fetches says what has counted
    chunk->open[g].open = false;  // the group starts again from the state that it fetches
    bool answers = chunk->served && chunk->source >= 0 && !r->group[chunk->source].silent;
    bool failed = m->hash != 0 && m->hash == chunk->serving.hash;
    if (answers && !failed && chunk->serving.round == chunk->round) {
        rounds_send(r, g, &chunk->serving);
        return;
    }
    // A copy of an earlier round is replaced at once, one that failed after ASK_SECONDS.
    if (chunk->served && !failed) chunk->source = -1;
    chunk->served = false;
    rounds_ask(r, c);
}

void rounds_serving(Rounds *r, int c, int g, const Message *m) {
    Chunk *chunk = &r->chunk[c];
    if (!chunk->known[g].ready) return;
    chunk->source = g;
    chunk->served = true;
    memcpy(&chunk->serving, m, message_bytes(m));
    chunk->serving.data = NULL;
    chunk->serving.data_bytes = 0;
    message_name(chunk->serving.from, r->group[g].name);
    for (int i = 0; i < MAX_GROUPS; i++) {
        if (chunk->known[i].wants) rounds_send(r, i, &chunk->serving);
    }
}
