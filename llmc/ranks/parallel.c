// Work on several CPU threads: see parallel.h. Threads take ranges from a shared counter.
#include "llmc/ranks/parallel.h"

#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { MOST_THREADS = 256 };

typedef struct Ranges {
    int64_t lo, hi, chunk;
    RangeWork work;
    void *context;
    atomic_llong next;  // first element that no thread has taken
} Ranges;

static void *run_ranges(void *context) {
    Ranges *r = (Ranges *)context;
    for (;;) {
        int64_t from = atomic_fetch_add(&r->next, r->chunk);
        if (from >= r->hi) return NULL;
        r->work(r->context, from, r->hi - from > r->chunk ? from + r->chunk : r->hi);
    }
}

int parallel_ranges(int threads, int64_t lo, int64_t hi, int64_t chunk, RangeWork work, void *context) {
    assert(work && chunk > 0);
    Ranges ranges = {.lo = lo, .hi = hi, .chunk = chunk, .work = work, .context = context};
    atomic_init(&ranges.next, lo);
    int64_t chunks = hi > lo ? ceil_div64(hi - lo, chunk) : 0;
    int wanted = threads < MOST_THREADS ? threads : MOST_THREADS, started = 0;
    if (wanted > chunks) wanted = (int)chunks;
    pthread_t thread[MOST_THREADS];
    while (started + 1 < wanted && pthread_create(&thread[started], NULL, run_ranges, &ranges) == 0)
        started++;
    run_ranges(&ranges);
    for (int i = 0; i < started; i++) pthread_join(thread[i], NULL);
    return started + 1;
}

int parallel_share(Peers group) {
    cpu_set_t own, all;
    CPU_ZERO(&own);
    if (sched_getaffinity(0, sizeof own, &own) != 0)
        CPU_ZERO(&own);  // more CPUs than the set can hold: use one thread
    Peers host = group;
    int ranks = 1;
    host.comm = peers_of_host(group);
    MPI_Comm_size(host.comm, &ranks);
    // Ranks may be bound to separate cores or share all cores; the union handles both cases.
    all = own;
    peers_all_reduce(host, &all, (int)sizeof all, MPI_BYTE, MPI_BOR);
    MPI_Comm_free(&host.comm);
    int share = CPU_COUNT(&all) / ranks;
    if (share > CPU_COUNT(&own)) share = CPU_COUNT(&own);
    return share > 1 ? share : 1;
}
