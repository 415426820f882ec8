// Joining, leaving, reports and time of the rendezvous: see rounds.h.
#include "llmc/groups/rounds.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/groups/rounds_state.h"

// Largest numbers that are taken over from a group. A wrong one would stop the run for all groups.
static const double longest_grace = 86400;  // as --sync-grace-seconds
static const int64_t most_samples = INT64_C(1) << 52, most_dealt = INT64_C(1) << 40,
                     most_tokens = INT64_C(1) << 52;  // of an offer; trainers add up MAX_GROUPS

// After a start, no grace period ends earlier. Groups reconnect within half a second.
static const double rejoin_seconds = 1;

Rounds *rounds_create(const RoundsOptions *options, double now) {
    Rounds *r = (Rounds *)xcalloc(1, sizeof *r, "the rounds of a run");
    r->options = *options;
    r->now = r->started = r->ticked = r->lost_at = now;
    r->founder = -1;
    return r;
}

static void forget_run(Rounds *r) {
    for (int c = 0; c < r->chunks; c++) rounds_forget(&r->chunk[c]);
    free(r->chunk);
    r->chunk = NULL;
    r->chunks = 0;
    r->dealt = 0;
    r->founder = -1;
    r->expected = 0;
}

void rounds_free(Rounds *r) {
    if (!r) return;
    forget_run(r);
    free(r);
}

// ---- messages ----

void rounds_send(Rounds *r, int g, Message *message) {
    r->options.send(r->options.context, r->group[g].name, message);
}

void rounds_send_all(Rounds *r, Message *message) {
    for (int g = 0; g < MAX_GROUPS; g++) {
        if (r->group[g].joined) rounds_send(r, g, message);
    }
}

void rounds_news(Rounds *r, const char *format, ...) {
    Message news;
    va_list arguments;
    message_clear(&news, MESSAGE_NEWS);
    va_start(arguments, format);
    vsnprintf(news.text, sizeof news.text, format, arguments);
    va_end(arguments);
    rounds_send_all(r, &news);
    r->options.send(r->options.context, NULL, &news);
}

static void answer(Rounds *r, MessageKind kind, const char *text) {
    Message message;
    message_clear(&message, kind);
    message_text(&message, text);
    r->options.send(r->options.context, NULL, &message);
}

static void send_peer(Rounds *r, int to, int g, bool left) {
    Message peer;
    message_clear(&peer, MESSAGE_PEER);
    message_name(peer.from, r->group[g].name);
    memcpy(peer.address, r->group[g].address, sizeof peer.address);
    peer.incarnation = r->group[g].incarnation;
    peer.flags = left ? FLAG_LEFT : 0;
    if (to >= 0) rounds_send(r, to, &peer);
    else rounds_send_all(r, &peer);
}

// ---- membership ----

static int find_group(const Rounds *r, const char *name) {
    for (int g = 0; g < MAX_GROUPS; g++) {
        if (r->group[g].used && strcmp(r->group[g].name, name) == 0) return g;
    }
    return -1;
}

int rounds_present(const Rounds *r) {
    int count = 0;
    for (int g = 0; g < MAX_GROUPS; g++) count += r->group[g].joined;
    return count;
}

uint64_t rounds_incarnation(const Rounds *r, const char *name) {
    int g = find_group(r, name);
    return g < 0 ? 0 : r->group[g].incarnation;
}

bool rounds_joined(const Rounds *r, const char *name) {
    int g = find_group(r, name);
    return g >= 0 && r->group[g].joined;
}

// Drops what the rendezvous knows about the group's offers, holdings and state.
static void clear_chunks(Rounds *r, int g) {
    for (int c = 0; c < r->chunks; c++) {
        Chunk *chunk = &r->chunk[c];
        chunk->open[g].open = false;
        for (int o = 0; o < MAX_GROUPS; o++) chunk->open[o].holders &= ~GROUP_BIT(g);
        for (int i = 0; i < chunk->logged; i++) chunk->log[i].hashed &= ~GROUP_BIT(g);
        chunk->known[g] = (Known){.round = -1};
        if (chunk->source == g) {
            chunk->source = -1;
            chunk->served = false;
        }
    }
}

static void remove_group(Rounds *r, int g, const char *why) {
    bool joined = r->group[g].joined;
    clear_chunks(r, g);
    r->group[g].joined = false;
    if (joined && r->expected > 0) r->expected--;
    if (r->founder == g) r->founder = -1;
    if (joined) {
        send_peer(r, -1, g, true);
        rounds_news(r, "group %s %s (%d groups)", r->group[g].name, why, rounds_present(r));
    }
    r->group[g].used = false;
    int used = 0;
    for (int i = 0; i < MAX_GROUPS; i++) used += r->group[i].used;
    if (used == 0) forget_run(r);
    for (int c = 0; c < r->chunks; c++) rounds_close(r, c);
}

static bool any_state(const Rounds *r) {
    for (int c = 0; c < r->chunks; c++) {
        for (int g = 0; g < MAX_GROUPS; g++) {
            if (r->group[g].used && r->chunk[c].known[g].ready) return true;
        }
    }
    return false;
}

// Length of the first item of a list with ", " between its items, 350 at most.
static int item_length(const char *list) {
    const char *end = strstr(list, ", ");
    size_t length = end ? (size_t)(end - list) : strlen(list);
    return length > 350 ? 350 : (int)length;
}

// Skips the items that two lists begin with.
static void skip_equal_items(const char **a, const char **b) {
    for (;;) {
        int length = item_length(*a);
        bool more = (*a)[length] == ',' && (*b)[length] == ',';
        if (!more || length != item_length(*b) || memcmp(*a, *b, (size_t)length) != 0) return;
        *a += length + 2;
        *b += length + 2;
    }
}

// Returns whether a hello fits the run; answers it if not. The first hello defines the run.
static bool fits_run(Rounds *r, const Message *m) {
    char text[TEXT_BYTES];
    if (m->iteration < 1 || m->iteration >= MAX_CHUNKS || m->incarnation == 0 || !*m->text) {
        answer(r, MESSAGE_REFUSE,
               "the rendezvous cannot read the group's hello; use the same version on both");
        return false;
    }
    bool same = strcmp(r->identity, m->text) == 0 && r->run == m->run && r->chunks == m->iteration;
    if (r->chunks && !same) {
        const char *run = r->identity, *own = m->text;
        skip_equal_items(&run, &own);
        snprintf(text, sizeof text,
                 "another run: the rendezvous has '%.*s', this group '%.*s'; use the same flags and data, or "
                 "another rendezvous",
                 item_length(run), run, item_length(own), own);
        answer(r, MESSAGE_REFUSE, text);
        return false;
    }
    if (r->chunks) return true;
    memcpy(r->identity, m->text, sizeof r->identity);
    r->run = m->run;
    r->chunks = (int)m->iteration;
    r->chunk = (Chunk *)xcalloc((size_t)r->chunks, sizeof *r->chunk, "the rounds of a run");
    for (int c = 0; c < r->chunks; c++) {
        r->chunk[c].round = r->chunk[c].source = -1;
        for (int g = 0; g < MAX_GROUPS; g++) r->chunk[c].known[g].round = -1;
    }
    return true;
}

// Takes over how many samples a group knows to be dealt.
static void know_dealt(Rounds *r, int64_t samples) {
    if (samples <= most_samples && samples > r->dealt) r->dealt = samples;
}

// Other groups connect to the address.
static void take_address(Group *group, const Message *m) {
    memcpy(group->address, m->address, sizeof group->address);
    if (strncmp(group->address, "tcp://", 6) != 0) group->address[0] = '\0';
}

static void receive_hello(Rounds *r, const char *name, const Message *m) {
    int g = find_group(r, name);
    if (g >= 0 && r->group[g].incarnation != m->incarnation) {
        if (r->now - r->group[g].heard < r->options.silent) {
            answer(r, MESSAGE_WAIT, "the name is in use by another process; stop it, or choose another name");
            return;
        }
        remove_group(r, g, "was lost and starts again");
        g = -1;
    }
    if (!(m->flags & FLAG_STATE) && r->now < r->started + r->options.settle) {
        answer(r, MESSAGE_WAIT, "the rendezvous has just started");
        return;
    }
    if (!fits_run(r, m)) return;
    for (int i = 0; i < MAX_GROUPS && g < 0; i++) {
        if (r->group[i].used) continue;
        g = i;
        r->group[g] = (Group){.used = true};
        message_name(r->group[g].name, name);
    }
    if (g < 0) {
        answer(r, MESSAGE_REFUSE, "the run has 64 groups, which is the most");
        return;
    }
    clear_chunks(r, g);
    for (int c = 0; c < r->chunks; c++) r->chunk[c].known[g].had = m->flags & FLAG_STATE;
    Group *group = &r->group[g];
    group->incarnation = m->incarnation;
    take_address(group, m);
    group->quorum = (int)(m->groups > MAX_GROUPS ? MAX_GROUPS : m->groups);
    group->grace = fmin(m->rate, longest_grace);
    group->heard = r->now;
    group->silent = group->lagging = false;
    group->reporting = true;
    know_dealt(r, m->round);
    // Later, a group that was cut off may know groups that have left since.
    if (r->expected >= 0 && m->bytes > r->expected && r->now < r->started + group->grace)
        r->expected = (int)(m->bytes > MAX_GROUPS ? MAX_GROUPS : m->bytes);
}

static void forward_offer(Rounds *r, int c, int g, int to) {
    Message message;
    message_clear(&message, MESSAGE_OFFER);
    message.chunk = c;
    message.offers = 1;
    message.offer[0] = r->chunk[c].open[g].offer;
    if (to >= 0) rounds_send(r, to, &message);
    else rounds_send_all(r, &message);
}

// Ends a group's reports: from here on it is a member of the run.
static void receive_reported(Rounds *r, int g) {
    Group *group = &r->group[g];
    bool again = group->joined;
    Message welcome;
    message_clear(&welcome, MESSAGE_WELCOME);
    if (!any_state(r) && (r->founder < 0 || r->founder == g)) {
        r->founder = g;
        welcome.flags = FLAG_FIRST;
    }
    welcome.incarnation = group->incarnation;
    group->joined = true;
    group->reporting = false;
    welcome.groups = (uint32_t)rounds_present(r);
    rounds_send(r, g, &welcome);
    for (int i = 0; i < MAX_GROUPS; i++) {
        if (r->group[i].joined && i != g) send_peer(r, g, i, false);
    }
    if (!again) {
        for (int i = 0; i < MAX_GROUPS; i++) {
            if (r->group[i].joined && i != g) send_peer(r, i, g, false);
        }
        rounds_news(r, "group %s joined (%d groups)", group->name, rounds_present(r));
        if (group->quorum > rounds_present(r))
            rounds_news(r, "rounds wait for more groups: group %s needs %d", group->name, group->quorum);
    }
    for (int c = 0; c < r->chunks; c++) {
        for (int i = 0; i < MAX_GROUPS; i++) {
            if (r->chunk[c].open[i].open && i != g) forward_offer(r, c, i, g);
        }
        if (r->chunk[c].open[g].open) forward_offer(r, c, g, -1);
        if (r->chunk[c].known[g].ready) rounds_reconcile(r, c, g);
        rounds_close(r, c);
    }
}

// ---- rounds ----

static void receive_offer(Rounds *r, int g, const Message *m) {
    Chunk *chunk = &r->chunk[m->chunk];
    const Offer *offer = &m->offer[0];
    OpenOffer *open = &chunk->open[g];
    if (offer->incarnation != r->group[g].incarnation || strcmp(offer->name, r->group[g].name) != 0) return;
    if (offer->after >= offer->number) return;  // it would stay open when it has counted
    if (offer->tokens > most_tokens) return;
    if (!chunk->known[g].ready || rounds_counted(r, m->chunk, g, offer)) return;
    r->group[g].late = false;
    // Until the open offer counts, newer ones are ignored: groups make one every H steps, and if
    // transfers take as long, all groups would never hold all offers at the same time.
    if (open->open) return;
    // The wait of a group that was cut off counts from now. One that began before this rendezvous
    // started continues, but other groups get time to rejoin.
    double longest = r->group[g].grace - rejoin_seconds;
    double since = r->now - m->rate < r->started ? r->now - m->rate : r->now;
    if (since < r->started - longest) since = fmin(r->started - longest, r->now);
    *open = (OpenOffer){.open = true, .holders = GROUP_BIT(g), .since = since, .offer = *offer};
    if (!r->group[g].joined) return;
    forward_offer(r, m->chunk, g, -1);
    rounds_close(r, m->chunk);
}

static void receive_hold(Rounds *r, int g, const Message *m) {
    const Offer *offer = &m->offer[0];
    int owner = find_group(r, offer->name);
    if (owner < 0 || r->group[owner].incarnation != offer->incarnation) return;
    OpenOffer *open = &r->chunk[m->chunk].open[owner];
    if (!open->open || open->offer.number != offer->number || open->offer.hash != offer->hash) return;
    open->holders |= GROUP_BIT(g);
    rounds_close(r, m->chunk);
}

static void receive_state(Rounds *r, int g, const Message *m) {
    Chunk *chunk = &r->chunk[m->chunk];
    Known *known = &chunk->known[g];
    if (m->round > chunk->round) rounds_adopt(r, m->chunk, m->round, m->chain, NULL, 0);
    *known = (Known){.ready = true,
                     .had = true,
                     .round = m->round,
                     .chain = m->chain,
                     .counted = known->counted,
                     .counted_round = known->counted_round};
    rounds_reconcile(r, m->chunk, g);
    rounds_close(r, m->chunk);
}

// A group reports a closed round that it knows.
static void receive_closed(Rounds *r, int g, const Message *m) {
    for (int i = 0; i < m->offers; i++) {
        if (m->offer[i].tokens > most_tokens) return;
    }
    if (m->offers && r->group[g].reporting) {
        rounds_adopt(r, m->chunk, m->round, m->chain, m->offer, m->offers);
    }
}

// Deals samples. A repeated request gets the same answer. After a start, all groups first report
// how many samples have been dealt.
static void receive_deal(Rounds *r, int g, const Message *m) {
    Group *group = &r->group[g];
    bool all = r->expected > 0 && rounds_present(r) >= r->expected;
    if (!group->joined || m->bytes < 1 || m->bytes > most_dealt) return;
    if (!all && r->now < r->started + r->options.settle) return;
    know_dealt(r, m->round);
    if (m->hash != group->deal) {
        if (r->dealt > INT64_MAX - m->bytes) return;
        group->deal = m->hash;
        group->dealt = r->dealt;
        r->dealt += m->bytes;
    }
    Message deal;
    message_clear(&deal, MESSAGE_DEAL);
    deal.hash = group->deal;
    deal.round = group->dealt;
    deal.tokens = r->dealt;
    rounds_send(r, g, &deal);
}

// Answers a heartbeat with the number of samples dealt, so that all groups know it if the
// rendezvous restarts.
static void receive_beat(Rounds *r, int g, const Message *m) {
    Group *group = &r->group[g];
    Message pulse;
    group->iteration = m->iteration;
    group->tokens = m->tokens;
    group->rate = m->rate;
    if (group->joined) know_dealt(r, m->round);
    message_clear(&pulse, group->joined ? MESSAGE_PULSE : MESSAGE_WHO);
    pulse.tokens = r->dealt;
    r->options.send(r->options.context, NULL, &pulse);
}

static void dispatch(Rounds *r, int g, const Message *m) {
    switch (m->kind) {
        case MESSAGE_REPORTED: receive_reported(r, g); break;
        case MESSAGE_BEAT: receive_beat(r, g, m); break;
        case MESSAGE_DEAL: receive_deal(r, g, m); break;
        case MESSAGE_OFFER: receive_offer(r, g, m); break;
        case MESSAGE_HOLD: receive_hold(r, g, m); break;
        case MESSAGE_STATE: receive_state(r, g, m); break;
        case MESSAGE_CLOSE: receive_closed(r, g, m); break;
        case MESSAGE_HASH: rounds_compare(r, m->chunk, g, m->round, m->hash); break;
        case MESSAGE_FETCH: rounds_fetch(r, m->chunk, g, m); break;
        case MESSAGE_SERVING: rounds_serving(r, m->chunk, g, m); break;
        case MESSAGE_LEAVE: remove_group(r, g, "left"); break;
        default: break;
    }
}

void rounds_receive(Rounds *r, const char *name, const Message *m, double now) {
    if (now > r->now) r->now = now;
    if (m->kind == MESSAGE_HELLO) {
        receive_hello(r, name, m);
        return;
    }
    int g = find_group(r, name);
    if (m->round > INT64_MAX / 2) return;
    if (g < 0 || m->chunk >= r->chunks || m->incarnation != r->group[g].incarnation) {
        answer(r, MESSAGE_WHO, "");
        return;
    }
    r->group[g].heard = r->now;
    r->group[g].silent = false;
    dispatch(r, g, m);
}

// A time in which the rendezvous itself was frozen is no silence of the groups, whose messages may
// still be on their way.
static void forgive_pause(Rounds *r) {
    double pause = r->now - r->ticked;
    r->ticked = r->now;
    if (pause <= r->options.silent) return;
    for (int g = 0; g < MAX_GROUPS; g++) r->group[g].heard = fmin(r->group[g].heard + pause, r->now);
}

void rounds_tick(Rounds *r, double now) {
    if (now > r->now) r->now = now;
    forgive_pause(r);
    for (int g = 0; g < MAX_GROUPS; g++) {
        Group *group = &r->group[g];
        if (!group->used) continue;
        double quiet = r->now - group->heard, most = 3 * group->grace;
        group->silent = quiet > r->options.silent;
        if (quiet > (most > r->options.remove ? most : r->options.remove)) {
            r->lost_at = r->now;
            remove_group(r, g, "was silent for too long and is no longer part of the run");
        }
    }
    for (int c = 0; c < r->chunks; c++) {
        rounds_close(r, c);
        rounds_ask(r, c);
    }
}

// ---- status ----

bool rounds_status(const Rounds *r, int index, double now, GroupStatus *status) {
    for (int g = 0; g < MAX_GROUPS; g++) {
        const Group *group = &r->group[g];
        if (!group->used || index-- > 0) continue;
        *status = (GroupStatus){.iteration = group->iteration,
                                .tokens = group->tokens,
                                .last_round = group->last_round,
                                .rounds_late = group->rounds_late,
                                .tokens_per_second = group->rate};
        memcpy(status->name, group->name, NAME_BYTES);
        memcpy(status->address, group->address, ADDRESS_BYTES);
        bool ready = group->joined;
        for (int c = 0; c < r->chunks; c++) {
            const Chunk *chunk = &r->chunk[c];
            ready = ready && chunk->known[g].ready;
            int64_t stale = chunk->round - chunk->known[g].counted_round;
            if (chunk->round >= 0 && stale > status->stale) status->stale = stale;
        }
        status->state = now - group->heard > r->options.silent ? "silent"
                        : !ready                               ? "joining"
                        : group->late || group->lagging        ? "late"
                                                               : "training";
        return true;
    }
    return false;
}
