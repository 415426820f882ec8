// Closing of rounds, and the history of a chunk: see rounds.h.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/groups/rounds_state.h"

// ---- history ----

void rounds_forget(Chunk *chunk) {
    for (int i = 0; i < chunk->logged; i++) free(chunk->log[i].offer);
    chunk->logged = 0;
    chunk->served = false;
    chunk->round = -1;
    chunk->chain = 0;
}

static const Closed *find_closed(const Chunk *chunk, int64_t round) {
    for (int i = 0; i < chunk->logged; i++) {
        if (chunk->log[i].round == round) return &chunk->log[i];
    }
    return NULL;
}

static bool same_offer(const Offer *a, const Offer *b) {
    return a->incarnation == b->incarnation && strcmp(a->name, b->name) == 0;
}

bool rounds_counted(const Rounds *r, int c, int g, const Offer *offer) {
    const Chunk *chunk = &r->chunk[c];
    if (offer->after < chunk->known[g].counted) return true;
    for (int i = 0; i < chunk->logged; i++) {
        for (int k = 0; k < chunk->log[i].offers; k++) {
            const Offer *counted = &chunk->log[i].offer[k];
            if (same_offer(counted, offer) && offer->after < counted->number) return true;
        }
    }
    return false;
}

// Removes the counted offers from the open ones.
static void count_offers(Rounds *r, int c, const Closed *closed) {
    Chunk *chunk = &r->chunk[c];
    for (int i = 0; i < closed->offers; i++) {
        const Offer *offer = &closed->offer[i];
        for (int g = 0; g < MAX_GROUPS; g++) {
            Group *group = &r->group[g];
            if (!group->used || group->incarnation != offer->incarnation) continue;
            if (strcmp(group->name, offer->name) != 0) continue;
            Known *known = &chunk->known[g];
            if (offer->number > known->counted) known->counted = offer->number;
            known->counted_round = closed->round;
            if (closed->round > group->last_round) group->last_round = closed->round;
            OpenOffer *open = &chunk->open[g];
            if (open->open && open->offer.after < known->counted) open->open = false;
        }
    }
}

static void append(Rounds *r, int c, int64_t round, uint64_t chain, const Offer *offer, int offers) {
    Chunk *chunk = &r->chunk[c];
    if (chunk->logged == LOG_ROUNDS) {
        free(chunk->log[0].offer);
        memmove(chunk->log, chunk->log + 1, (LOG_ROUNDS - 1) * sizeof *chunk->log);
        chunk->logged--;
    }
    Closed *closed = &chunk->log[chunk->logged++];
    *closed = (Closed){.round = round, .chain = chain, .offers = offers};
    closed->offer = (Offer *)xcalloc((size_t)offers + 1, sizeof *offer, "a closed round");
    for (int i = 0; i < offers; i++) closed->offer[i] = offer[i];
    chunk->round = round;
    chunk->chain = chain;
    count_offers(r, c, closed);
}

// Makes a group fetch the chunk's state. Its open offer is dropped: it may have counted in a round
// that is no longer in the log.
static void reset_group(Rounds *r, int c, int g) {
    Message reset;
    message_clear(&reset, MESSAGE_RESET);
    reset.chunk = c;
    r->chunk[c].known[g].ready = false;
    r->chunk[c].open[g].open = false;
    rounds_send(r, g, &reset);
}

void rounds_reconcile(Rounds *r, int c, int g) {
    Chunk *chunk = &r->chunk[c];
    Known *known = &chunk->known[g];
    if (r->group[g].reporting) return;  // it ignores everything before its welcome
    int next = chunk->logged;           // index of the first round that the group does not know
    while (next > 0 && chunk->log[next - 1].round > known->round) next--;
    bool same;
    if (known->round == chunk->round) same = known->chain == chunk->chain;
    else if (next > 0)
        same = chunk->log[next - 1].round == known->round && chunk->log[next - 1].chain == known->chain;
    else {
        const Closed *first = &chunk->log[0];
        same = chunk->logged && first->round == known->round + 1 &&
               chain_next(known->chain, first->round, first->offer, first->offers) == first->chain;
    }
    if (!same) {
        reset_group(r, c, g);
        return;
    }
    for (; next < chunk->logged; next++) {
        const Closed *closed = &chunk->log[next];
        Message close;
        message_clear(&close, MESSAGE_CLOSE);
        close.chunk = c;
        close.round = closed->round;
        close.chain = closed->chain;
        close.offers = closed->offers;
        memcpy(close.offer, closed->offer, (size_t)closed->offers * sizeof *closed->offer);
        rounds_send(r, g, &close);
        known->round = closed->round;
        known->chain = closed->chain;
    }
}

// Sends the last rounds to all groups.
static void reconcile_all(Rounds *r, int c) {
    for (int g = 0; g < MAX_GROUPS; g++) {
        if (r->group[g].joined && r->chunk[c].known[g].ready) rounds_reconcile(r, c, g);
    }
}

bool rounds_adopt(Rounds *r, int c, int64_t round, uint64_t chain, const Offer *offer, int offers) {
    Chunk *chunk = &r->chunk[c];
    if (round <= chunk->round) {
        const Closed *known = find_closed(chunk, round);
        return round == chunk->round ? chain == chunk->chain : !known || known->chain == chain;
    }
    bool next = round == chunk->round + 1 && offers &&
                chain_next(chunk->chain, round, offer, offers) == chain;
    if (!next) rounds_forget(chunk);  // a longer history, or the first
    if (offers) append(r, c, round, chain, offer, offers);
    chunk->round = round;
    chunk->chain = chain;
    reconcile_all(r, c);
    return true;
}

void rounds_compare(Rounds *r, int c, int g, int64_t round, uint64_t hash) {
    Chunk *chunk = &r->chunk[c];
    Closed *closed = (Closed *)find_closed(chunk, round);
    if (!closed || !chunk->known[g].ready) return;
    closed->hashed |= GROUP_BIT(g);
    closed->hash[g] = hash;
    int same = 0, other = -1, others = 0;
    for (int i = 0; i < MAX_GROUPS; i++) {
        if (!(closed->hashed & GROUP_BIT(i)) || !r->group[i].joined) continue;
        if (closed->hash[i] == hash) same++;
        else if (!others++) other = i;
    }
    if (!others) return;
    // The group that differs from the majority, or came later, has to fetch the state.
    int wrong = same > others ? other : g;
    rounds_news(r,
                "hashes differ: outer weights of chunk %d after round %lld are %016llx at %s, %016llx at %s; "
                "%s fetches them again",
                c, (long long)round, (unsigned long long)closed->hash[other], r->group[other].name,
                (unsigned long long)hash, r->group[g].name, r->group[wrong].name);
    closed->hashed &= ~GROUP_BIT(wrong);
    reset_group(r, c, wrong);
}

// ---- closing ----

typedef struct Choice {
    uint64_t offers, groups;  // owners of the offers that count; groups that hold all of them
} Choice;

static int members(uint64_t mask) { return __builtin_popcountll(mask); }

static int quorum(const Rounds *r) {
    int most = 1;
    for (int g = 0; g < MAX_GROUPS; g++) {
        if (r->group[g].joined && r->group[g].quorum > most) most = r->group[g].quorum;
    }
    return most;
}

static double grace(const Rounds *r) {
    double most = 0;
    for (int g = 0; g < MAX_GROUPS; g++) {
        if (r->group[g].joined && r->group[g].grace > most) most = r->group[g].grace;
    }
    return most;
}

// Returns the time at which the quorum's last offer was made.
static double quorum_since(const Chunk *chunk, int least) {
    double since = INFINITY;
    for (int g = 0; g < MAX_GROUPS; g++) {
        int earlier = 0;
        for (int i = 0; i < MAX_GROUPS; i++)
            earlier += chunk->open[i].open && chunk->open[i].since <= chunk->open[g].since;
        if (chunk->open[g].open && earlier >= least) since = fmin(since, chunk->open[g].since);
    }
    return since;
}

static uint64_t held(const Chunk *chunk, int g, uint64_t offers) {
    uint64_t found = 0;
    for (int o = 0; o < MAX_GROUPS; o++) {
        if ((offers & GROUP_BIT(o)) && (chunk->open[o].holders & GROUP_BIT(g))) found |= GROUP_BIT(o);
    }
    return found;
}

// Leaves out the offers of slow groups that others don't hold yet.
static void drop_slow(const Rounds *r, const Chunk *chunk, Choice *choice) {
    uint64_t needed = 0;
    for (int g = 0; g < MAX_GROUPS; g++) {
        if (r->group[g].joined && chunk->known[g].ready && !r->group[g].lagging) needed |= GROUP_BIT(g);
    }
    for (int g = 0; g < MAX_GROUPS; g++) {
        if (r->group[g].slow && (needed & ~chunk->open[g].holders)) choice->offers &= ~GROUP_BIT(g);
    }
}

// Groups that have state and answer.
static uint64_t live_groups(const Rounds *r, const Chunk *chunk) {
    uint64_t live = 0;
    for (int g = 0; g < MAX_GROUPS; g++) {
        if (r->group[g].joined && chunk->known[g].ready && !r->group[g].silent) live |= GROUP_BIT(g);
    }
    return live;
}

// How many of the live groups have to hold a round: if there is another group, the round must not
// be lost with its only holder.
static int fewest_holders(uint64_t live) { return members(live) < 2 ? members(live) : 2; }

// All open offers, and the groups that rounds wait for, if all of them have offered and hold all.
static bool complete(const Rounds *r, const Chunk *chunk, Choice *choice) {
    if (rounds_present(r) < r->expected) return false;
    drop_slow(r, chunk, choice);
    for (int g = 0; g < MAX_GROUPS; g++) {
        if (!r->group[g].joined || !chunk->known[g].ready) continue;
        if (!r->group[g].late && !chunk->open[g].open) return false;
        if (held(chunk, g, choice->offers) == choice->offers) choice->groups |= GROUP_BIT(g);
        else if (!r->group[g].lagging) return false;
    }
    uint64_t live = live_groups(r, chunk);
    return members(choice->groups & live) >= fewest_holders(live);
}

// At the end of a grace period: leaves out groups and offers until every group holds every offer.
// Prefers to leave out whichever lacks more, then offers, because they count in a later round.
static bool partial(const Rounds *r, const Chunk *chunk, int least, Choice *choice) {
    choice->groups = live_groups(r, chunk);
    int fewest = fewest_holders(choice->groups);
    if (fewest < least) fewest = least;
    while (members(choice->offers) >= least && members(choice->groups) >= fewest) {
        int group = -1, offer = -1, group_lacks = 0, offer_lacks = 0;
        for (int i = 0; i < MAX_GROUPS; i++) {
            int lacks = members(choice->offers & ~held(chunk, i, choice->offers));
            if ((choice->groups & GROUP_BIT(i)) && lacks > group_lacks) group = i, group_lacks = lacks;
            lacks = members(choice->groups & ~chunk->open[i].holders);
            if ((choice->offers & GROUP_BIT(i)) && lacks > offer_lacks) offer = i, offer_lacks = lacks;
        }
        if (group < 0) return true;
        bool drop_offer = offer_lacks * members(choice->offers) >= group_lacks * members(choice->groups);
        if (members(choice->offers) <= least) drop_offer = false;
        else if (members(choice->groups) <= fewest) drop_offer = true;
        if (drop_offer) choice->offers &= ~GROUP_BIT(offer);
        else choice->groups &= ~GROUP_BIT(group);
    }
    return false;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const Offer *)a)->name, ((const Offer *)b)->name);
}

// Marks the groups that are late or lag, so that the next rounds don't wait for them.
static void mark_groups(Rounds *r, int c, const Choice *choice) {
    Chunk *chunk = &r->chunk[c];
    for (int g = 0; g < MAX_GROUPS; g++) {
        Group *group = &r->group[g];
        if (!group->joined || !chunk->known[g].ready) continue;
        group->lagging = !(choice->groups & GROUP_BIT(g));
        if (choice->offers & GROUP_BIT(g)) {
            group->slow = false;
            continue;
        }
        group->rounds_late++;
        group->slow = group->slow || chunk->open[g].open;
        if (chunk->open[g].open || group->late) continue;
        group->late = true;
        rounds_news(r, "group %s is late: round %lld of chunk %d closed without it", group->name,
                    (long long)chunk->round + 1, c);
    }
}

static void close_round(Rounds *r, int c, const Choice *choice) {
    Chunk *chunk = &r->chunk[c];
    Offer offer[MAX_GROUPS] = {{.name = ""}};
    int offers = 0;
    mark_groups(r, c, choice);
    for (int g = 0; g < MAX_GROUPS; g++) {
        if (choice->offers & GROUP_BIT(g)) offer[offers++] = chunk->open[g].offer;
    }
    qsort(offer, (size_t)offers, sizeof *offer, by_name);
    append(r, c, chunk->round + 1, chain_next(chunk->chain, chunk->round + 1, offer, offers), offer, offers);
    for (int g = 0; g < MAX_GROUPS; g++) chunk->open[g].since = r->now;
    reconcile_all(r, c);
}

void rounds_close(Rounds *r, int c) {
    Chunk *chunk = &r->chunk[c];
    for (;;) {
        Choice choice = {0, 0};
        int least = quorum(r);
        for (int g = 0; g < MAX_GROUPS; g++) choice.offers |= chunk->open[g].open ? GROUP_BIT(g) : 0;
        if (chunk->round < 0 || members(choice.offers) < least) return;
        Choice all = choice;
        if (!complete(r, chunk, &all) || members(all.groups) < least || members(all.offers) < least) {
            if (r->now < quorum_since(chunk, least) + grace(r) || !partial(r, chunk, least, &choice)) return;
            r->expected = -1;
            all = choice;
        }
        close_round(r, c, &all);
    }
}
