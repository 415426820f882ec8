// Elastic replica groups: joining, samples, leaving and the log. See elastic.h.
#include "llmc/run/elastic.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "llmc/base/version.h"
#include "llmc/ranks/heartbeat.h"

enum { CONNECTIONS = 4 };

// Samples are dealt in blocks of this many global batches, which last for a while if the rendezvous
// is away. A crash loses at most two blocks.
static int batches_per_block(const Config *c) { return c->local_steps < 4 ? 16 : 4 * c->local_steps; }

static bool is_on(const Run *run) { return run->elastic != NULL; }

static void pause_ms(int ms) {
    const struct timespec pause = {0, ms * 1000000L};
    nanosleep(&pause, NULL);
}

// --- memory --------------------------------------------------------------------------------------

// Spreads the sync slots over H steps like the slots of buckets (local_steps.c).
static void choose_slots(Run *run, Elastic *e) {
    int chunks = chunks_count(e->chunks);
    int64_t all = chunks_before(e->chunks, chunks - 1) + chunks_elements(e->chunks, chunks - 1);
    for (int i = 0; i < chunks; i++)
        e->sync[i].slot = run->config.local_steps * chunks_before(e->chunks, i) / all;
}

static uint32_t hash_of_name(const char *name) {
    uint64_t hash = 0;
    for (; *name; name++) hash = replica_mix(hash, (uint8_t)*name);
    return (uint32_t)hash;
}

bool elastic_plan(Run *run) {
    const Config *c = &run->config;
    if (!c->replica_group || c->skip_train || config_only_checks_data(c)) return true;
    Chunks *chunks = chunks_plan(run->zero, run->whole, run->whole_count, &run->memory_plan, &run->error);
    if (!chunks) return false;
    Elastic *e = run->elastic = xcalloc(1, sizeof *e, "the replica group");
    e->chunks = chunks;
    size_t count = (size_t)chunks_count(chunks);
    e->sync = xcalloc(count, sizeof *e->sync, "the replica group");
    e->payload_bytes = xcalloc(count, sizeof(int64_t), "the replica group");
    e->state_bytes = xcalloc(count, sizeof(int64_t), "the replica group");
    for (int i = 0; i < (int)count; i++) {
        e->payload_bytes[i] = chunks_payload_bytes(chunks, i);
        e->state_bytes[i] = chunks_state_bytes(chunks, i);
    }
    e->source = hash_of_name(c->replica_group);
    e->ledger = (SampleLedger){.spare = -1, .block = (int64_t)batches_per_block(c) * c->global_batch_size};
    choose_slots(run, e);
    return true;
}

// --- samples -------------------------------------------------------------------------------------

// Returns true if the next step has samples.
static bool has_samples(const SampleLedger *l, int batch) {
    return l->next + batch <= l->end || l->spare >= 0;
}

// Rank 0: returns the first sample of the next block, or -1. If none are left, and the rendezvous
// has dealt none for a grace period, the group chooses them.
static int64_t next_block(Run *run) {
    Elastic *e = run->elastic;
    SampleLedger *l = &e->ledger;
    double now = monotonic_seconds();
    int64_t first = member_samples(e->member, l->block, l->dealt);
    if (first >= 0) {
        l->asked = 0;
        l->own = false;
        return first;
    }
    if (l->asked == 0) l->asked = now;
    bool patient = now < l->asked + run->config.sync_grace_seconds;
    if (!e->joined || patient || l->next + run->config.global_batch_size <= l->end) return -1;
    if (!l->own)
        log_line(run->log,
                 "the rendezvous has dealt no training samples for %.1f s; continues with samples that "
                 "another group may use, too",
                 now - l->asked);
    l->own = true;
    return member_own_samples(e->member, l->block, l->dealt);
}

// Asks for the next block. Collective.
static void ask_for_samples(Run *run) {
    SampleLedger *l = &run->elastic->ledger;
    if (l->spare >= 0) return;
    if (run->launch.rank == 0) l->spare = next_block(run);
    peers_broadcast(run_peers(run, run->launch.world), &l->spare, sizeof l->spare, 0);
    if (l->spare >= 0 && l->spare + l->block > l->dealt) l->dealt = l->spare + l->block;
}

static void log_news(Run *run) {
    Elastic *e = run->elastic;
    const char *news;
    while (e->member && (news = member_news(e->member, &e->stats))) log_line(run->log, "%s", news);
}

// Waits until the next step has samples or the run stops. The rendezvous deals them long before
// they are needed, so this takes time only when the group joins or the rendezvous is away, and then
// at most a grace period since it was asked.
static void wait_for_samples(Run *run) {
    Elastic *e = run->elastic;
    double began = monotonic_seconds();
    bool said = false;
    ask_for_samples(run);
    while (!has_samples(&e->ledger, run->config.global_batch_size) && !run->stop.reason) {
        pause_ms(5);
        // Other groups may need state meanwhile. An offer must be sent before the round of an
        // earlier one is merged, whose progress it contains.
        elastic_send_offers(run);
        elastic_events(run, 0);
        log_news(run);
        ask_for_samples(run);
        run_poll_stop(run);
        if (said || monotonic_seconds() - began < 10) continue;
        log_line(run->log, "waiting for training samples, which the rendezvous at %s deals",
                 run->config.rendezvous);
        said = true;
    }
    if (e->joined) e->waited += monotonic_seconds() - began;
}

int64_t elastic_first_sample(Run *run) {
    if (!is_on(run)) return run->consumed_train;
    SampleLedger *l = &run->elastic->ledger;
    int batch = run->config.global_batch_size;
    if (l->next + batch > l->end) {
        assert(l->spare >= 0);
        l->next = l->spare;
        l->end = l->spare + l->block;
        l->spare = -1;
    }
    int64_t first = l->next, samples = loader_samples(run->loader, SPLIT_TRAIN) / batch * batch;
    l->next += batch;
    return first % samples;
}

int64_t elastic_position(const Run *run) {
    return is_on(run) ? run->elastic->ledger.next : run->consumed_train;
}

void elastic_save(const Run *run, RunState *state) {
    if (!is_on(run)) return;
    const SampleLedger *l = &run->elastic->ledger;
    state->samples_next = l->next;
    state->samples_end = l->end;
    state->samples_spare = l->spare + 1;
    state->samples_dealt = l->dealt;
    state->left = l->left;
}

// All indices are multiples of the batch size, which may have changed. A checkpoint of a run
// without replica groups has no ledger, but has used samples.
void elastic_load(Run *run, const RunState *state) {
    if (!is_on(run)) return;
    SampleLedger *l = &run->elastic->ledger;
    int64_t batch = run->config.global_batch_size;
    int64_t dealt = state->samples_dealt ? state->samples_dealt : state->consumed_train_samples;
    l->next = round_up64(state->samples_next, batch);
    l->end = state->samples_end;
    int64_t spare = state->samples_spare - 1;
    l->spare = spare >= 0 && spare % batch == 0 ? spare : -1;
    l->dealt = round_up64(dealt, batch);
    l->left = state->left != 0;
    l->loaded = state->iteration;
}

// --- joining -------------------------------------------------------------------------------------

// Returns a hash of the exact learning rates and their schedule, of which the line below shows only
// some digits.
static uint64_t hash_of_schedule(const Config *c) {
    const double values[] = {c->lr,
                             c->min_lr,
                             c->outer_lr,
                             c->outer_momentum,
                             c->lr_warmup_init,
                             c->warmup_samples_wn,
                             (double)c->decay_samples_dn,
                             (double)c->wsd_samples,
                             (double)c->lr_decay_style};
    uint64_t hash = 0;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        uint64_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        hash = replica_mix(replica_mix(hash, (uint32_t)bits), (uint32_t)(bits >> 32));
    }
    return hash;
}

// Returns one line that is equal in all groups of a run (for free()).
static char *identity_of(const Run *run) {
    const Config *c = &run->config;
    int shards;
    uint64_t *prints = loader_fingerprints(run->loader, &shards), data = 0;
    for (int i = 0; i < shards; i++) data = replica_mix(data, (uint32_t)(prints[i] ^ prints[i] >> 32));
    free(prints);
    return text_format(
        "sdp4bit.c %s, layers %d, hidden size %d, padded vocabulary %d, sequence %d, "
        "parameters and codec %016llx, data %016llx, samples %lld, seed %lld, "
        "global batch %d, iterations %lld, lr %g to %g, local steps %d, "
        "outer lr %g, outer momentum %g, rates and schedule %016llx",
        version_number(), c->num_layers, c->hidden_size, c->vocab_size_padded, c->seq_length,
        (unsigned long long)chunks_layout_hash(run->elastic->chunks), (unsigned long long)data,
        (long long)loader_samples(run->loader, SPLIT_TRAIN), (long long)c->seed, c->global_batch_size,
        (long long)c->train_iters, c->lr, c->min_lr, c->local_steps, c->outer_lr, c->outer_momentum,
        (unsigned long long)hash_of_schedule(c));
}

// Called from the server's thread, so it does not use the Log.
static void print_server_line(void *context, const char *line) { printf("rendezvous: %s\n", line); }

// Rank 0: starts the rendezvous of --rendezvous-serve at the port of --rendezvous, on all addresses
// of this machine.
static bool serve_rendezvous(Run *run) {
    const Config *c = &run->config;
    const char *port = strrchr(c->rendezvous, ':');
    run->elastic->listen = text_format("tcp://*%s", port);
    RendezvousOptions options = {run->elastic->listen, c->rendezvous_keys, print_server_line, NULL};
    run->elastic->server = rendezvous_serve_start(&options, &run->error);
    return run->elastic->server != NULL;
}

// Rank 0: connects to the rendezvous.
static bool open_member(Run *run) {
    if (run->config.rendezvous_serve && !serve_rendezvous(run)) return false;
    Elastic *e = run->elastic;
    const Config *c = &run->config;
    char *identity = identity_of(run);
    MemberOptions options = {.name = c->replica_group,
                             .rendezvous = c->rendezvous,
                             .keys = c->rendezvous_keys,
                             .listen = c->rendezvous_listen,
                             .identity = identity,
                             .min_groups = c->min_replica_groups,
                             .grace_seconds = c->sync_grace_seconds,
                             .connections = CONNECTIONS,
                             .chunks = chunks_count(e->chunks),
                             .payload_bytes = e->payload_bytes,
                             .state_bytes = e->state_bytes,
                             .stopped = stop_signal_waits};
    e->member = member_join(&options, &run->error);
    free(identity);
    return e->member != NULL;
}

// Takes over the state of all chunks, and the position in the run.
static bool take_over(Run *run) {
    Elastic *e = run->elastic;
    StateHeader header = {0};
    double began = monotonic_seconds(), bytes = 0;
    for (int i = 0; e->member && i < chunks_count(e->chunks); i++) member_fetch_ahead(e->member, i);
    for (int i = 0; i < chunks_count(e->chunks); i++) {
        Contribution none;  // a group that has just started has not contributed
        int64_t round = elastic_fetch(run, i, INFINITY, &none);
        if (round == MEMBER_KEEP) continue;  // all groups with newer state were lost
        if (round < 0)
            return run_agreed(run, error_set(&run->error, EXIT_STOPPED, "stopped while joining the run at %s",
                                             run->config.rendezvous));
        StateHeader found;
        memcpy(&found, e->state, sizeof found);
        if (found.iteration >= header.iteration) {
            header = found;
            run->iteration = header.iteration;  // others may fetch this chunk while the next one comes
            run->scheduled = header.scheduled;
            run->consumed_train = header.consumed;
        }
        chunks_set_state(e->chunks, i, (const float *)(const void *)(e->state + CHUNK_HEADER_BYTES), true,
                         NULL);
        e->sync[i].round = e->sync[i].hashed = round;
        bytes += (double)e->state_bytes[i];
    }
    if (bytes == 0) return true;
    log_line(run->log, "joined at iteration %lld: fetched %.1f MB of outer weights and momentum in %.1f s",
             (long long)run->iteration, bytes / 1e6, monotonic_seconds() - began);
    return true;
}

// Keeps the samples of a checkpoint if the group left in order and nothing else has continued from
// this checkpoint. Otherwise they may have been used already. A group that starts the run repeats
// them, because the training with them is lost. Collective.
static void keep_own_samples(Run *run, bool starts) {
    SampleLedger *l = &run->elastic->ledger;
    bool keep = l->left;
    if (l->left && run->launch.rank == 0) keep = checkpoint_claim(run->config.load, l->loaded);
    peers_broadcast(run_peers(run, run->launch.world), &keep, sizeof keep, 0);
    l->left = false;
    int64_t samples = l->end - l->next + (l->spare >= 0 ? l->block : 0);
    if (starts || samples <= 0) return;
    log_line(run->log, "%s %lld samples that were assigned to this group before it %s",
             keep ? "continues with" : "skips", (long long)samples, keep ? "left" : "ended");
    if (keep) return;
    l->next = l->end;
    l->spare = -1;
}

bool elastic_join(Run *run) {
    if (!is_on(run)) return true;
    Elastic *e = run->elastic;
    SampleLedger *l = &e->ledger;
    Peers world = run_peers(run, run->launch.world);
    bool starts = false;
    run->site.phase = "join the replica groups";
    e->state = chunks_state(e->chunks);
    for (int i = 0; i < chunks_count(e->chunks); i++) e->sync[i].sent = chunks_payload(e->chunks, i);
    chunks_start(e->chunks, world);
    if (!run_agreed(run, run->launch.rank != 0 || open_member(run))) return false;
    if (e->member) starts = member_is_first(e->member);
    peers_broadcast(world, &starts, sizeof starts, 0);
    if (starts) log_line(run->log, "replica group %s starts the run", run->config.replica_group);
    else if (!take_over(run)) return false;
    keep_own_samples(run, starts);
    wait_for_samples(run);
    if (!has_samples(l, run->config.global_batch_size))
        return run_agreed(run, error_set(&run->error, EXIT_STOPPED, "stopped before the first step"));
    e->joined = true;
    return true;
}

// --- the log -------------------------------------------------------------------------------------

static double mean_of(double sum, int64_t count) { return count > 0 ? sum / (double)count : 0.0; }

static void log_figures(Run *run) {
    Elastic *e = run->elastic;
    const ElasticFigures *f = &e->figures;
    int64_t i = run->iteration;
    double goodput = e->computed > 0 ? e->counted / (double)e->computed : 0.0;
    double sync = mean_of(f->sync_seconds, f->own_rounds), stale = mean_of(f->stale_steps, f->own_rounds);
    double sent = (double)(e->stats.sent - e->reported.sent) / 1e6,
           received = (double)(e->stats.received - e->reported.received) / 1e6;
    log_line(run->log,
             "replica groups: %d present | %lld chunk syncs, %lld with this group | sync time %.2f s, %.1f "
             "steps | %.2f MB sent, %.2f MB received | goodput %.1f %%",
             e->stats.groups, (long long)f->rounds, (long long)f->own_rounds, sync, stale, sent, received,
             100 * goodput);
    Text json = json_begin("groups");
    json_integer(&json, "iteration", i);
    json_open(&json, "timing");
    json_integer(&json, "groups", e->stats.groups);
    json_integer(&json, "rounds", f->rounds);
    json_integer(&json, "own_rounds", f->own_rounds);
    json_number(&json, "sync_seconds", sync);
    json_number(&json, "stale_steps", stale);
    json_number(&json, "busy_seconds", f->busy_seconds);
    json_number(&json, "waited_seconds", e->stats.waited + e->waited);
    json_number(&json, "sent_mb", sent);
    json_number(&json, "received_mb", received);
    json_number(&json, "goodput", goodput);
    json_close(&json);
    log_json(run->log, &json);
    log_scalar(run->log, "replica groups/present", i, e->stats.groups);
    log_scalar(run->log, "replica groups/sync seconds", i, sync);
    log_scalar(run->log, "replica groups/stale steps", i, stale);
    log_scalar(run->log, "replica groups/sent MB", i, sent);
    log_scalar(run->log, "replica groups/received MB", i, received);
    log_scalar(run->log, "replica groups/goodput", i, goodput);
    e->reported = e->stats;
    memset(&e->figures, 0, sizeof e->figures);
}

// --- the step ------------------------------------------------------------------------------------

void elastic_step(Run *run) {
    if (!is_on(run)) return;
    Elastic *e = run->elastic;
    int64_t t = run->iteration, tokens = (int64_t)run->step_batch * run->config.seq_length;
    double began = monotonic_seconds();
    run->site.phase = "sync replica groups";
    e->computed += tokens;
    for (int i = 0; i < chunks_count(e->chunks); i++) e->sync[i].tokens += tokens;
    elastic_send_offers(run);
    elastic_report_hashes(run);
    elastic_events(run, 0);
    for (int i = 0; i < chunks_count(e->chunks); i++) {
        const ChunkSync *s = &e->sync[i];
        if (s->again || t % run->config.local_steps == s->slot) elastic_offer(run, i);
    }
    // On GPUs messages are sent after the next step, so that the host does not wait for the device.
    if (!device_kind()->asynchronous) elastic_send_offers(run);
    if (e->member) {
        double seconds = monotonic_seconds() - run->interval.seconds_start;
        double rate = seconds > 0 ? (double)run->interval.samples * run->config.seq_length / seconds : 0;
        member_report(e->member, t, e->computed, rate);
    }
    log_news(run);
    if (t < run->config.train_iters) wait_for_samples(run);
    e->figures.busy_seconds += monotonic_seconds() - began;
    if (due(t, run->config.log_interval)) log_figures(run);
}

bool elastic_ended(const Run *run) { return is_on(run) && run->elastic->ending; }

static bool all_done(const Elastic *e) {
    for (int i = 0; i < chunks_count(e->chunks); i++)
        if (!e->sync[i].last) return false;
    return true;
}

// Returns how long the last sync may take: other groups offer every chunk within H steps.
static double patience(const Run *run) {
    double seconds = monotonic_seconds() - run->interval.seconds_start;
    double step = run->interval.iterations > 0 ? seconds / (double)run->interval.iterations : 1.0;
    return 10.0 + 2.0 * run->config.sync_grace_seconds + 3.0 * step * run->config.local_steps;
}

void elastic_finish(Run *run) {
    if (!is_on(run)) return;
    Elastic *e = run->elastic;
    double began = monotonic_seconds();
    double until = began + patience(run);
    run->site.phase = "sync replica groups";
    e->last = e->ending = true;
    // A group that ends because others have reached the end has finished the run, too.
    read_step_status(run, 0, false);
    run->iteration = run->config.train_iters;
    elastic_send_offers(run);
    elastic_events(run, 0);
    for (int i = 0; i < chunks_count(e->chunks); i++) elastic_offer(run, i);
    bool over = false;
    while (!over && !all_done(e) && run->stop.reason < STOP_SIGNAL) {
        elastic_send_offers(run);
        over = elastic_events(run, until);
        for (int i = 0; i < chunks_count(e->chunks); i++)
            if (e->sync[i].again && !e->sync[i].last) elastic_offer(run, i);
        log_news(run);
        run_poll_stop(run);
        pause_ms(5);
    }
    elastic_report_hashes(run);
    if (over)
        log_line(run->log,
                 "WARNING: the last sync of all replica groups is not complete after %.1f s; the weights "
                 "contain the syncs so far",
                 monotonic_seconds() - began);
    e->ledger.left = true;
    log_figures(run);
}

void elastic_stopping(Run *run) {
    if (is_on(run)) run->elastic->ledger.left = true;
}

// Returns true if everything that this group has trained has counted.
static bool all_counted(const Elastic *e) {
    for (int i = 0; i < chunks_count(e->chunks); i++)
        if (e->sync[i].tokens > 0) return false;
    return true;
}

// Returns true if a contribution can count: other groups are present, and the rendezvous answers.
// Collective.
static bool can_contribute(Run *run) {
    Elastic *e = run->elastic;
    bool can = e->stats.groups > 1 && e->stats.connected;
    peers_broadcast(run_peers(run, run->launch.world), &can, sizeof can, 0);
    return can;
}

void elastic_contribute(Run *run) {
    if (!is_on(run)) return;
    Elastic *e = run->elastic;
    double began = monotonic_seconds();
    bool over = false;
    run->site.phase = "sync replica groups";
    elastic_send_offers(run);
    elastic_events(run, 0);
    log_news(run);
    if (all_counted(e) || !can_contribute(run)) return;
    e->leaving = true;
    for (int i = 0; i < chunks_count(e->chunks); i++)
        e->sync[i].open = e->sync[i].open && e->sync[i].offered == e->sync[i].tokens;
    while (!over && !all_counted(e) && can_contribute(run)) {
        for (int i = 0; i < chunks_count(e->chunks); i++)
            if (!e->sync[i].open && e->sync[i].tokens > 0) elastic_offer(run, i);
        elastic_send_offers(run);
        pause_ms(5);
        over = elastic_events(run, began + run->config.sync_grace_seconds);
        log_news(run);
    }
    elastic_report_hashes(run);
    if (all_counted(e)) {
        log_line(run->log, "contributed the training since the last sync before leaving, in %.1f s",
                 monotonic_seconds() - began);
    } else {
        log_line(run->log,
                 "WARNING: left after %.1f s, before all training since the last sync has counted; "
                 "--sync-grace-seconds is the limit",
                 monotonic_seconds() - began);
    }
    log_figures(run);
}

void elastic_leave(Run *run) {
    Elastic *e = run->elastic;
    if (!is_on(run)) return;
    if (e->member) {
        log_news(run);
        member_leave(e->member, 10.0);
    }
    rendezvous_serve_stop(e->server);
    e->member = NULL;
    e->server = NULL;
}

void elastic_free(Run *run) {
    Elastic *e = run->elastic;
    if (!is_on(run)) return;
    chunks_free(e->chunks);
    free(e->listen);
    free(e->state_bytes);
    free(e->payload_bytes);
    free(e->sync);
    free(e);
    run->elastic = NULL;
}
