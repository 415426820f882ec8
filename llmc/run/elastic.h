// Elastic replica groups: this job is one group of a run that other groups join and leave
// (--replica-group). See docs/elastic.md.
//
// Rank 0 holds the Member (llmc/groups/member.h), the connection to the other groups. After each
// step it takes what the network has brought and broadcasts it as events, so that all ranks take
// the same decisions. In the step t with t % H == slot of a chunk, the group offers the chunk's
// pseudo-gradient. It applies a closed round of the chunk whenever one arrives:
//
//   outer weights, momentum  the outer step with the mean of the contributions, weighted by tokens.
//                            Every group computes the same bits
//   master weights           move by the change of the outer weights. If the own offer has counted,
//                            its decoded value is added, because the outer weights now contain that
//                            progress. What the group has trained since the offer is kept, and so
//                            is the quantization error, which the next offer contains
//
// So the outer weights minus the master weights are always the progress that has not counted yet,
// whatever rounds the group takes part in. Training does not wait for the network, except to join,
// at the end of the run, and for at most a grace period if no samples are dealt because the
// rendezvous does not answer, or if rounds were missed and the state is fetched.
//
//   elastic.c         joining, samples, leaving, log
//   elastic_rounds.c  offers, closed rounds, state for other groups
//
// Included by these two files. run.h declares what the other files call.
#pragma once
#include "llmc/groups/member.h"
#include "llmc/groups/rendezvous.h"
#include "llmc/run/run.h"
#include "llmc/state/chunks.h"
LLMC_BEGIN

// At the start of a payload.
typedef struct OfferHeader {
    uint32_t key;       // of chunks_encode
    uint32_t last;      // 1: offered at the end of the run
    int64_t scheduled;  // position in the learning-rate schedule
} OfferHeader;

// At the start of a chunk's state.
typedef struct StateHeader {
    int64_t iteration, scheduled, consumed;
} StateHeader;

typedef struct ChunkSync {
    int64_t slot;        // due in steps t with t % H == slot
    int64_t round;       // latest round that the outer weights contain
    int64_t tokens;      // trained since the latest offer that has counted
    int64_t offered;     // tokens of the latest offer
    int64_t offered_at;  // its step
    double offered_time;
    uint32_t key;
    int64_t hashed;  // latest round whose hash has been reported
    bool queued;     // the offer is being encoded and not sent yet
    bool open;       // the offer has not counted yet
    bool again;      // offer as soon as possible
    bool fetching;   // rounds were missed, and the state has not arrived yet: no offers
    bool last;       // the last round of the run is done
    uint8_t *sent;   // rank 0: the offer's payload
} ChunkSync;

// Figures since the last log line.
typedef struct ElasticFigures {
    int64_t rounds, own_rounds;
    double sync_seconds;  // from offers to their rounds
    double stale_steps;   // the same in steps
    double busy_seconds;  // of the main thread
    int64_t sent, received;
} ElasticFigures;

// Samples dealt to this group: training uses [next, end), then [spare, spare + block).
typedef struct SampleLedger {
    int64_t next, end;
    int64_t spare;  // -1: not dealt yet
    int64_t block;
    int64_t dealt;   // samples dealt to any group, as far as known
    double asked;    // rank 0: time since which no block was dealt. 0: the last one was
    bool own;        // rank 0: this group chooses its samples because none are dealt
    bool left;       // the checkpoint was saved when the group left the run in order
    int64_t loaded;  // iteration of that checkpoint
} SampleLedger;

struct Elastic {
    Chunks *chunks;
    Member *member;                        // rank 0
    Rendezvous *server;                    // rank 0, with --rendezvous-serve
    char *listen;                          // its address
    ChunkSync *sync;                       // (chunks)
    int64_t *payload_bytes, *state_bytes;  // (chunks)
    uint8_t *state;                        // host memory (largest state_bytes)
    uint32_t source;                       // hash of the group's name
    SampleLedger ledger;
    bool joined;
    bool ending;            // this group or another has reached the end of the run
    bool last;              // offers are the last of the run
    bool leaving;           // this group stops early, after its last contribution
    double fetching_since;  // rank 0: time since which a chunk is fetched, 0: none is
    int64_t computed;       // tokens trained since the start
    double counted;         // tokens that have counted, averaged over the parameters
    MemberStats stats, reported;
    double waited;  // seconds that training waited for samples or state
    ElasticFigures figures;
};

// Applies all events that have arrived. Returns true if `until` (rank 0's monotonic_seconds) has
// passed; 0: no limit. Collective.
bool elastic_events(Run *run, double until);
// Starts to encode the offer of a chunk. elastic_send_offers waits for all offers and sends them.
void elastic_offer(Run *run, int chunk);
void elastic_send_offers(Run *run);
// Reports the hashes of the latest rounds. Collective.
void elastic_report_hashes(Run *run);
// Fetches a chunk's state from another group, and serves others meanwhile. Returns its round, -1 if
// stopped, MEMBER_KEEP, or MEMBER_BUSY after `patience` (rank 0's) seconds: call again later. own:
// as in member_fetch, with tokens -1 if there is none; the payload is on rank 0 only. Collective.
int64_t elastic_fetch(Run *run, int chunk, double patience, Contribution *own);

LLMC_END
