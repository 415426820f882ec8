// A stand-in for llmc/groups: replica groups of one machine that exchange files in the folder of
// --rendezvous-keys, under a lock. For tests of the trainer without a network. It closes rounds by
// the same rules as the rendezvous and keeps the latest KEPT rounds of a chunk. A group is present
// while it has called a function within the last grace period.
#include "llmc/groups/member.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { KEPT = 4, MOST_GROUPS = 16, NAME_BYTES = 33 };

struct Member {
    MemberOptions o;
    bool first;
    int64_t *seen, *counted;  // (chunks) last round taken, last own offer that has counted in one
    int64_t numbers, samples_asked;
    MemberStats stats;
    int lock;
    char news[256];
    bool has_news;
    int groups;
    // the round taken last
    Contribution part[MOST_GROUPS];
    char name[MOST_GROUPS][NAME_BYTES];
    uint8_t *bytes;
    uint8_t *own;  // the own contribution that a fetched state contains
};

typedef struct Head {
    int64_t number, after, tokens;  // after: the last offer that has counted; void if a later one has
    int64_t round;                  // in which it has counted
    int64_t sum;                    // tokens of all that have counted
    double time;
    char name[NAME_BYTES];
} Head;

static void lock(Member *m) { flock(m->lock, LOCK_EX); }
static void unlock(Member *m) { flock(m->lock, LOCK_UN); }

static char *at(const Member *m, const char *kind, int chunk, int64_t round, const char *name) {
    return text_format("%s/%s.%d.%lld.%s", m->o.keys, kind, chunk, (long long)round, name);
}

static void put(char *path, const void *a, size_t bytes_a, const void *b, size_t bytes_b) {
    char *temporary = text_format("%s~", path);
    FILE *file = fopen(temporary, "wb");
    if (file) {
        fwrite(a, 1, bytes_a, file);
        if (b) fwrite(b, 1, bytes_b, file);
        fclose(file);
        rename(temporary, path);
    }
    free(temporary);
    free(path);
}

// Returns the bytes read, or 0.
static size_t get(char *path, void *to, size_t most) {
    FILE *file = fopen(path, "rb");
    size_t bytes = file ? fread(to, 1, most, file) : 0;
    if (file) fclose(file);
    free(path);
    return bytes;
}

static void drop(char *path) {
    unlink(path);
    free(path);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Lists the groups present, sorted by name. Marks this one as present.
static int present(Member *m, char name[MOST_GROUPS][NAME_BYTES]) {
    int count = 0;
    double time = now();
    put(at(m, "member", 0, 0, m->o.name), &time, sizeof time, NULL, 0);
    DIR *folder = opendir(m->o.keys);
    for (struct dirent *e; folder && (e = readdir(folder)) && count < MOST_GROUPS;) {
        double last = 0;
        if (strncmp(e->d_name, "member.0.0.", 11) != 0 || strchr(e->d_name, '~')) continue;
        if (!get(text_format("%s/%s", m->o.keys, e->d_name), &last, sizeof last)) continue;
        if (time - last > m->o.grace_seconds + 2) continue;
        snprintf(name[count++], NAME_BYTES, "%s", e->d_name + 11);
    }
    if (folder) closedir(folder);
    qsort(name, (size_t)count, NAME_BYTES, (int (*)(const void *, const void *))strcmp);
    if (count != m->groups) {
        snprintf(m->news, sizeof m->news, "replica groups present: %d", count);
        m->has_news = true;
        m->groups = m->stats.groups = count;
    }
    return count;
}

static int64_t closed_rounds(const Member *m, int chunk) {
    int64_t round = 0;
    get(at(m, "closed", chunk, 0, ""), &round, sizeof round);
    return round;
}

// Reads the last offer of a group that has counted. Returns false if there is none.
static bool last_counted(const Member *m, int chunk, const char *name, void *to, size_t bytes) {
    return get(at(m, "counted", chunk, 0, name), to, bytes) == bytes;
}

// Notes an offer of a closed round as the last of its group. `counted` files are for tests, too:
// the sum is the fifth number.
static void note_counted(Member *m, int chunk, int64_t round, const uint8_t *offer) {
    Head head, before = {.sum = 0};
    memcpy(&head, offer, sizeof head);
    last_counted(m, chunk, head.name, &before, sizeof before);
    head.round = round;
    head.sum = before.sum + head.tokens;
    put(at(m, "counted", chunk, 0, head.name), &head, sizeof head, offer + sizeof head,
        (size_t)m->o.payload_bytes[chunk]);
}

// Closes the open round of a chunk if it is due.
static void close_round(Member *m, int chunk) {
    char name[MOST_GROUPS][NAME_BYTES];
    int groups = present(m, name), offers = 0;
    size_t bytes = (size_t)m->o.payload_bytes[chunk], record = sizeof(Head) + bytes;
    uint8_t *all = xmalloc(record * MOST_GROUPS, "offers");
    double last = 0;
    for (int i = 0; i < groups; i++) {
        uint8_t *to = all + record * (size_t)offers;
        if (get(at(m, "offer", chunk, 0, name[i]), to, record) != record) continue;
        Head head, before = {.number = 0};
        memcpy(&head, to, sizeof head);
        last_counted(m, chunk, name[i], &before, sizeof before);
        if (head.after < before.number) continue;
        if (head.time > last) last = head.time;
        offers++;
    }
    bool late = offers >= m->o.min_groups && now() - last > m->o.grace_seconds;
    if (offers > 0 && offers >= m->o.min_groups && (offers == groups || late)) {
        int64_t round = closed_rounds(m, chunk) + 1;
        put(at(m, "round", chunk, round, ""), all, record * (size_t)offers, NULL, 0);
        put(at(m, "closed", chunk, 0, ""), &round, sizeof round, NULL, 0);
        drop(at(m, "round", chunk, round - KEPT, ""));
        for (int i = 0; i < groups; i++) drop(at(m, "offer", chunk, 0, name[i]));
        for (int i = 0; i < offers; i++) note_counted(m, chunk, round, all + record * (size_t)i);
    }
    free(all);
}

Member *member_join(const MemberOptions *options, Error *err) {
    Member *m = xcalloc(1, sizeof *m, "a member");
    m->o = *options;
    char *path = text_format("%s/lock", options->keys);
    m->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    free(path);
    char identity[2048] = "", name[MOST_GROUPS][NAME_BYTES];
    if (m->lock < 0) {
        system_error(err, "cannot open %s; create the folder", options->keys);
        free(m);
        return NULL;
    }
    lock(m);
    m->first = present(m, name) == 1;
    get(at(m, "identity", 0, 0, ""), identity, sizeof identity - 1);
    bool other = !m->first && strcmp(identity, options->identity) != 0;
    if (m->first) put(at(m, "identity", 0, 0, ""), options->identity, strlen(options->identity) + 1, NULL, 0);
    m->seen = xcalloc((size_t)options->chunks, sizeof(int64_t), "a member");
    m->counted = xcalloc((size_t)options->chunks, sizeof(int64_t), "a member");
    for (int i = 0; i < options->chunks; i++) {
        drop(at(m, "offer", i, 0, options->name));
        drop(at(m, "state", i, 0, options->name));
        drop(at(m, "counted", i, 0, options->name));
        int64_t none = 0;
        if (m->first) put(at(m, "closed", i, 0, ""), &none, sizeof none, NULL, 0);
    }
    unlock(m);
    if (other) {
        usage_error(err, "the run at %s has other flags: %s, not %s; use the same flags", options->rendezvous,
                    identity, options->identity);
        member_leave(m, 0);
        return NULL;
    }
    return m;
}

bool member_is_first(const Member *m) { return m->first; }

// While the folder has a file "hold" with the name of a group, the group takes no rounds until it
// has missed some, and then no state arrives.
static bool held(const Member *m) {
    char *path = at(m, "hold", 0, 0, m->o.name);
    bool found = access(path, F_OK) == 0;
    free(path);
    return found;
}

// Finds the own contribution that the state after a round contains and that was not taken.
static void find_own(Member *m, int chunk, int64_t round, Contribution *own) {
    size_t bytes = (size_t)m->o.payload_bytes[chunk];
    Head head;
    m->own = xrealloc(m->own, sizeof head + bytes, "an own contribution");
    if (!last_counted(m, chunk, m->o.name, m->own, sizeof head + bytes)) return;
    memcpy(&head, m->own, sizeof head);
    if (head.number <= m->counted[chunk] || head.round > round) return;
    m->counted[chunk] = head.number;
    *own = (Contribution){m->o.name, head.tokens, m->own + sizeof head};
}

int64_t member_fetch(Member *m, int chunk, double seconds, uint8_t *state, Contribution *own) {
    *own = (Contribution){NULL, 0, NULL};
    double start = now();
    size_t bytes = (size_t)m->o.state_bytes[chunk];
    uint8_t *read = xmalloc(bytes + 8, "a state");
    char name[MOST_GROUPS][NAME_BYTES];
    int64_t round = -1;
    lock(m);
    put(at(m, "want", chunk, 0, m->o.name), "", 0, NULL, 0);
    unlock(m);
    while (!m->o.stopped || !m->o.stopped()) {
        lock(m);
        bool got = !held(m) && get(at(m, "state", chunk, 0, m->o.name), read, bytes + 8) == bytes + 8;
        bool alone = present(m, name) == 1;
        unlock(m);
        if (got) {
            drop(at(m, "state", chunk, 0, m->o.name));
            memcpy(&round, read, 8);
            memcpy(state, read + 8, bytes);
            break;
        }
        if (alone) break;
        if (now() >= start + seconds) {
            round = MEMBER_BUSY;
            break;
        }
        usleep(2000);
    }
    if (round >= 0) m->seen[chunk] = round;
    if (round >= 0) find_own(m, chunk, round, own);
    if (round >= 0) drop(at(m, "want", chunk, 0, m->o.name));
    free(read);
    return round;
}

void member_fetch_ahead(Member *m, int chunk) {}

int member_wanted(Member *m) {
    int chunk = -1;
    DIR *folder = opendir(m->o.keys);
    for (struct dirent *e; folder && (e = readdir(folder)) && chunk < 0;)
        if (strncmp(e->d_name, "want.", 5) == 0 && !strchr(e->d_name, '~')) chunk = atoi(e->d_name + 5);
    if (folder) closedir(folder);
    return chunk;
}

void member_serve(Member *m, int chunk, int64_t round, const uint8_t *state) {
    char prefix[40];
    lock(m);
    snprintf(prefix, sizeof prefix, "want.%d.0.", chunk);
    DIR *folder = opendir(m->o.keys);
    for (struct dirent *e; folder && (e = readdir(folder));) {
        if (strncmp(e->d_name, prefix, strlen(prefix)) != 0 || strchr(e->d_name, '~')) continue;
        put(at(m, "state", chunk, 0, e->d_name + strlen(prefix)), &round, 8, state,
            (size_t)m->o.state_bytes[chunk]);
        drop(text_format("%s/%s", m->o.keys, e->d_name));
    }
    if (folder) closedir(folder);
    unlock(m);
}

void member_offer(Member *m, int chunk, int64_t tokens, const uint8_t *payload) {
    Head head = {.number = ++m->numbers, .after = m->counted[chunk], .tokens = tokens, .time = now()};
    Head before;
    snprintf(head.name, sizeof head.name, "%s", m->o.name);
    lock(m);
    if (get(at(m, "offer", chunk, 0, m->o.name), &before, sizeof before)) head.time = before.time;  // waits
    put(at(m, "offer", chunk, 0, m->o.name), &head, sizeof head, payload, (size_t)m->o.payload_bytes[chunk]);
    close_round(m, chunk);
    unlock(m);
    m->stats.sent += m->o.payload_bytes[chunk];
}

static bool take(Member *m, int chunk, ClosedRound *closed) {
    size_t record = sizeof(Head) + (size_t)m->o.payload_bytes[chunk];
    close_round(m, chunk);
    int64_t newest = closed_rounds(m, chunk), round = m->seen[chunk] + 1;
    *closed = (ClosedRound){.round = round};
    if (round > newest) return false;
    m->bytes = xrealloc(m->bytes, record * MOST_GROUPS, "a round");
    size_t got = get(at(m, "round", chunk, round, ""), m->bytes, record * MOST_GROUPS);
    closed->missed = got == 0;
    if (held(m) && !closed->missed) return false;
    for (size_t i = 0; i < got / record; i++) {
        Head head;
        memcpy(&head, m->bytes + i * record, sizeof head);
        memcpy(m->name[i], head.name, NAME_BYTES);
        m->part[i] = (Contribution){m->name[i], head.tokens, m->bytes + i * record + sizeof head};
        bool own = strcmp(head.name, m->o.name) == 0;
        closed->own = closed->own || (own && head.number > m->counted[chunk]);
        if (own && head.number > m->counted[chunk]) m->counted[chunk] = head.number;
        if (own) m->stats.tokens_counted += head.tokens;
        else m->stats.received += m->o.payload_bytes[chunk];
    }
    closed->contributions = (int)(got / record);
    closed->contribution = m->part;
    if (!closed->missed) m->seen[chunk] = round;
    return true;
}

bool member_take(Member *m, int chunk, bool wait, ClosedRound *closed) {
    for (;;) {
        lock(m);
        bool taken = take(m, chunk, closed);
        unlock(m);
        if (taken || !wait || (m->o.stopped && m->o.stopped())) return taken;
        usleep(2000);
    }
}

int64_t member_samples(Member *m, int64_t count, int64_t least) {
    int64_t dealt = 0;
    if (m->samples_asked++ % 2 == 0) return -1;  // the answer takes a while
    lock(m);
    get(at(m, "dealt", 0, 0, ""), &dealt, sizeof dealt);
    if (dealt < least) dealt = least;
    int64_t end = dealt + count;
    put(at(m, "dealt", 0, 0, ""), &end, sizeof end, NULL, 0);
    unlock(m);
    return dealt;
}

int64_t member_own_samples(Member *m, int64_t count, int64_t least) { return -1; }

void member_hash(Member *m, int chunk, int64_t round, uint64_t hash) {
    uint64_t other = hash;
    lock(m);
    if (!get(at(m, "hash", chunk, round, ""), &other, sizeof other))
        put(at(m, "hash", chunk, round, ""), &hash, sizeof hash, NULL, 0);
    unlock(m);
    if (other == hash) return;
    snprintf(m->news, sizeof m->news, "WARNING: hashes differ: chunk %d, round %lld", chunk,
             (long long)round);
    m->has_news = true;
}

void member_report(Member *m, int64_t iteration, int64_t tokens, double tokens_per_second) {}

const char *member_news(Member *m, MemberStats *stats) {
    m->stats.connected = true;
    *stats = m->stats;
    bool news = m->has_news;
    m->has_news = false;
    return news ? m->news : NULL;
}

void member_leave(Member *m, double seconds) {
    lock(m);
    for (int i = 0; i < m->o.chunks; i++) drop(at(m, "offer", i, 0, m->o.name));
    drop(at(m, "member", 0, 0, m->o.name));
    unlock(m);
    close(m->lock);
    free(m->seen);
    free(m->counted);
    free(m->bytes);
    free(m->own);
    free(m);
}
