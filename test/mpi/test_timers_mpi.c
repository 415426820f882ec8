// Timers over ranks: minimum and maximum over ranks with a nonzero time, and the tables for all
// three values of --timing-log-option. Runs on any number of ranks.
#include <mpi.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/log/log.h"
#include "test/leaks.h"

// A device whose time is set by the test; replaces the backend's device at link time.
struct Device {
    double now_ms;
    Site site;
};
struct Stream {
    Device *device;
};
struct Event {
    double ms;
};
const Site *device_site(const Device *device) { return &device->site; }
void device_libraries(char *text, size_t bytes) { snprintf(text, bytes, "none"); }
Event *event_create_timed(Device *device) { return (Event *)calloc(1, sizeof(Event)); }
void event_destroy(Event *event) { free(event); }
void event_record(Event *event, Stream *stream) { event->ms = stream->device->now_ms; }
void event_synchronize(Event *event) {}
double event_elapsed_ms(Event *start, Event *stop) { return stop->ms - start->ms; }
uint64_t profile_range_start(const char *name) { return 0; }
void profile_range_end(uint64_t range) {}
char *config_to_json(const Config *config) { return xstrdup("{}"); }

static const Peers everyone = {MPI_COMM_WORLD, 0, NULL};

static void check(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "failed: %s\n", what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}
#define CHECK(condition) check(condition, #condition)

static void spend(Timers *timers, Timer timer, Stream *stream, double ms) {
    timer_start(timers, timer, stream);
    stream->device->now_ms += ms;
    timer_stop(timers, timer, stream);
}

// Times by rank: forward-backward 10, 20, 30, ... ms; optimizer 0 on rank 0 and 5 ms on other
// ranks; params-all-gather 0.
static void spend_all(Timers *timers, Stream *stream, int rank) {
    spend(timers, TIMER_FORWARD_BACKWARD, stream, 4.0 * (rank + 1));
    spend(timers, TIMER_FORWARD_BACKWARD, stream, 6.0 * (rank + 1));
    if (rank > 0) spend(timers, TIMER_OPTIMIZER, stream, 5);
}

static void test_collect(Timers *timers, Stream *stream, int rank, int world) {
    enum { COUNT = TIMER_OPTIMIZER + 1 };  // from TIMER_FORWARD_BACKWARD on
    TimerStats stats[COUNT], *late = &stats[TIMER_OPTIMIZER], *all = &stats[TIMER_FORWARD_BACKWARD];
    double *rank_ms = (double *)calloc(COUNT * (size_t)world, sizeof *rank_ms);
    spend_all(timers, stream, rank);
    timers_collect(timers, TIMER_FORWARD_BACKWARD, COUNT, 2.0, everyone, stats, rank_ms);
    CHECK(late->recorded == (world > 1));
    if (world > 1) CHECK(fabs(late->min_ms - 2.5) < 1e-9 && fabs(late->max_ms - 2.5) < 1e-9);
    CHECK(all->recorded && fabs(all->min_ms - 5) < 1e-9 && fabs(all->max_ms - 5.0 * world) < 1e-9);
    CHECK(!stats[TIMER_PARAMS_ALL_GATHER].recorded);
    CHECK(all->rank_ms == rank_ms && late->rank_ms == rank_ms + TIMER_OPTIMIZER * world);
    for (int r = 0; r < world; r++) CHECK(fabs(all->rank_ms[r] - 5.0 * (r + 1)) < 1e-9);
    for (int r = 0; r < world; r++) CHECK(fabs(late->rank_ms[r] - (r ? 2.5 : 0)) < 1e-9);
    timers_collect(timers, TIMER_FORWARD_BACKWARD, COUNT, 1.0, everyone, stats, NULL);  // all were reset
    for (int i = 0; i < COUNT; i++) CHECK(!stats[i].recorded && !stats[i].rank_ms);
    free(rank_ms);
}

// Expected output for spend_all after ten iterations.
static void expected_table(char *text, size_t bytes, TimingLogOption option, int world) {
    const char *head = option == TIMING_ALL ? "times" : "(min, max) time";
    size_t n = (size_t)snprintf(text, bytes, "%s across ranks (ms):\n", head);
    if (option == TIMING_MAX) {
        n += (size_t)snprintf(text + n, bytes - n,
                              "    forward-backward ...............................: %.2f\n", 1.0 * world);
        if (world > 1) {
            snprintf(text + n, bytes - n, "    optimizer ......................................: 0.50\n");
        }
    } else if (option == TIMING_MINMAX) {
        n += (size_t)snprintf(text + n, bytes - n,
                              "    forward-backward ...............................: (1.00, %.2f)\n",
                              1.0 * world);
        if (world > 1) {
            snprintf(text + n, bytes - n,
                     "    optimizer ......................................: (0.50, 0.50)\n");
        }
    } else {
        n += (size_t)snprintf(text + n, bytes - n, "  forward-backward:\n");
        for (int r = 0; r < world; r++) {
            n += (size_t)snprintf(text + n, bytes - n, "     rank %2d: %.2f\n", r, r + 1.0);
        }
        if (world > 1) n += (size_t)snprintf(text + n, bytes - n, "  optimizer:\n");
        for (int r = 1; r < world; r++) {
            n += (size_t)snprintf(text + n, bytes - n, "     rank %2d: 0.50\n", r);
        }
    }
}

// Redirects rank 0's stdout to a file and compares it with the expected text.
static void test_table(Timers *timers, Stream *stream, int rank, int world, TimingLogOption option) {
    char path[] = P_tmpdir "/test_timers_XXXXXX", expected[8192], found[8192] = "";
    int file = mkstemp(path), kept = dup(1);
    CHECK(file >= 0 && kept >= 0);
    const Config config = {.timing_log_option = option};
    Log *log = log_open(&config, world, rank == 0, NULL, NULL);
    spend_all(timers, stream, rank);
    fflush(stdout);
    dup2(file, 1);
    log_timers(log, timers, 10, 10, everyone);
    log_timers(log, timers, 20, 10, everyone);  // prints nothing, because no times were recorded since
    dup2(kept, 1);
    log_close(log);
    CHECK(pread(file, found, sizeof found - 1, 0) >= 0);
    expected_table(expected, sizeof expected, option, world);
    CHECK(strcmp(found, rank == 0 ? expected : "") == 0);
    close(file);
    close(kept);
    unlink(path);
}

// Timers of phases are not averaged over iterations, and JSON lines contain them too.
static void test_phases(Timers *timers, Stream *stream, int rank, int world) {
    char path[] = P_tmpdir "/test_timers_XXXXXX", json[4096] = "";
    int file = mkstemp(path), kept = dup(1);
    CHECK(file >= 0 && kept >= 0);
    const Config config = {.timing_log_option = TIMING_MINMAX, .log_jsonl = path};
    FILE *null = fopen("/dev/null", "w");
    Log *log = log_open(&config, world, rank == 0, NULL, NULL);
    spend(timers, TIMER_EVALUATE, stream, 3.0009765625 + rank);  // JSON has all digits
    fflush(stdout);
    dup2(fileno(null), 1);
    log_phase_timers(log, timers, TIMER_EVALUATE, TIMER_SETUP + 1 - TIMER_EVALUATE, everyone);
    dup2(kept, 1);
    log_close(log);
    double least = 0, most = 0;
    int used = 0;
    CHECK(pread(file, json, sizeof json - 1, 0) >= 0);
    CHECK(sscanf(json, "{\"kind\":\"phases\",\"timing\":{\"evaluate\":[%lf,%lf]}}\n%n", &least, &most,
                 &used) == (rank == 0 ? 2 : EOF) &&
          used == (int)strlen(json));
    CHECK(rank > 0 || (fabs(least - 3.0009765625) < 1e-9 && fabs(most - (2.0009765625 + world)) < 1e-9));
    fclose(null);
    close(file);
    close(kept);
    unlink(path);
}

int main(int argc, char **argv) {
    int rank, world;
    leaks_start_mpi(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    Device device = {0};
    Stream stream = {&device};
    Timers *timers = timers_create(&device, 2);
    test_collect(timers, &stream, rank, world);
    for (int option = TIMING_MAX; option <= TIMING_ALL; option++) {
        test_table(timers, &stream, rank, world, (TimingLogOption)option);
    }
    test_phases(timers, &stream, rank, world);
    timers_destroy(timers);
    if (rank == 0) printf("timers: all checks passed on %d ranks\n", world);
    int leaks = leaks_found();
    MPI_Finalize();
    return leaks;
}
