// Heartbeat and watchdog between real processes: the error names the right rank when a wait takes
// too long.
// ranks: 2 4
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/launch.h"
#include "llmc/ranks/peers.h"
#include "llmc/ranks/watchdog.h"

#define STALLS "stalls"
#define OUT_OF_STEP "out of step"
#define NO_MEMORY "no memory"
#define BREAKS "breaks"
#define NO_THREAD "no thread"
#define NO_TIMER "no timer"
#define NO_LIMIT "no limit"
#define ABORT_FILE "TEST_HEARTBEAT_ABORT_FILE"  // environment variable with the path

static int failures = 0;
static bool refuse_memory = false, refuse_threads = false;

// Replaces mmap (linker option --wrap) and fails on request.
void *__real_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    return refuse_memory ? MAP_FAILED : __real_mmap(at, bytes, protection, flags, fd, offset);
}
// Replaces pthread_create and fails on request.
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                          void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                          void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                          void *argument) {
    return refuse_threads ? EAGAIN : __real_pthread_create(thread, attributes, start, argument);
}

// Adds up what this thread asks nanosleep to wait: unlike the time that passes, it does not depend
// on the machine's load.
static _Thread_local double slept = 0;
int __real_nanosleep(const struct timespec *time, struct timespec *left);
int __wrap_nanosleep(const struct timespec *time, struct timespec *left);
int __wrap_nanosleep(const struct timespec *time, struct timespec *left) {
    slept += (double)time->tv_sec + 1e-9 * (double)time->tv_nsec;
    return __real_nanosleep(time, left);
}

static void report(int rank, const char *name, bool ok) {
    int all = ok;
    MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (rank == 0) printf("%sok %s\n", all ? "" : "not ", name);
    failures += !all;
}

// Marks all ranks except `busy` (-1: none) as waiting. Returns the result of heartbeat_find_busy on
// the first waiting rank.
static bool asked(Site *site, int size, int busy, char *text, size_t bytes) {
    int asks = busy == 0 ? 1 : 0;
    bool blames = false;
    heartbeat_waiting(site, site->rank != busy);
    MPI_Barrier(MPI_COMM_WORLD);
    *text = '\0';
    if (site->rank == asks) blames = heartbeat_find_busy(site, text, bytes);
    MPI_Bcast(text, (int)bytes, MPI_CHAR, asks, MPI_COMM_WORLD);
    MPI_Bcast(&blames, 1, MPI_C_BOOL, asks, MPI_COMM_WORLD);
    return blames;
}

static bool busy_rank_is_named(Site *site, int size, int busy) {
    char text[512], expected[128];
    site->iteration = 40 + busy;
    site->phase = "read data from a folder that is far away";  // is truncated
    bool blames = asked(site, size, busy, text, sizeof text);
    snprintf(expected, sizeof expected,
             "rank %d is still busy (last seen at iteration %d, read data from a folder that is)", busy,
             40 + busy);
    return blames && !strcmp(text, expected);
}

// After a wait within its limit, no rank is reported as busy.
static bool waits_end(Site *site) {
    Peers everyone = {MPI_COMM_WORLD, 60, site};
    char text[512];
    peers_barrier(everyone);
    bool busy = true;
    if (site->rank == 0) busy = heartbeat_find_busy(site, text, sizeof text);  // the others continued
    MPI_Barrier(MPI_COMM_WORLD);
    return busy;
}

// The watchdog does not end a single rank that reports progress, here for several times its limit
// of half a second. (test/fault/ranks.sh tests ranks without progress.)
static bool single_rank_watches_itself(const Site *site) {
    Site other = *site;
    char text[64];
    watchdog_open(&other, MPI_COMM_SELF, 1, 0.5);
    for (int i = 0; i < 100; i++) {
        usleep(20000);
        if (i % 2) heartbeat_progress(&other);
        else heartbeat_waiting(&other, false);
    }
    heartbeat_waiting(&other, true);
    bool ok = other.heartbeat && !heartbeat_find_busy(&other, text, sizeof text);
    watchdog_close(&other);
    return ok && !other.heartbeat;
}

// test_heartbeat STALLS: the device of a single rank hangs, so the rank's watchdog must end it.
static int stall(void) {
    Site site = {0, 0, 0, 3, "update", NULL, NULL};
    watchdog_open(&site, MPI_COMM_SELF, 1, 0.2);
    heartbeat_collective(&site, "all-to-all", "inside the node");
    heartbeat_collective(&site, "all-gather", "between nodes");
    heartbeat_waiting(&site, true);
    sleep(30);
    return 0;
}

// test_heartbeat NO_MEMORY: there is no memory for the heartbeat.
static int lack_memory(void) {
    Site site = {0, 0, 0, 0, "start", NULL, NULL};
    refuse_memory = true;
    watchdog_open(&site, MPI_COMM_SELF, 1, 10);
    return 0;
}

// test_heartbeat OUT_OF_STEP, started by test/fault/ranks.sh: the devices of all ranks hang, and
// two ranks have issued fewer collectives than the others.
static int issue_fewer(const Launch *launch) {
    Site site = {launch->rank, 0, 0, 3, "update", NULL, NULL};
    watchdog_open(&site, launch->host, launch->size, 3);
    for (int i = launch->rank == 7 ? 2 : launch->rank == 5 ? 1 : 0; i < 10; i++) {
        heartbeat_collective(&site, i % 2 ? "all-gather" : "all-to-all", "between nodes");
    }
    if (launch->rank == 2) heartbeat_collective(&site, "all-to-all", "inside the node");
    heartbeat_waiting(&site, true);
    sleep(30);
    return 0;
}

// State of `look`, a watchdog check that reports an error from its third call on.
typedef struct Looks {
    atomic_int asked;
    bool breaks;
} Looks;
static bool look(void *context, char *what, size_t bytes) {
    Looks *looks = (Looks *)context;
    if (atomic_fetch_add(&looks->asked, 1) < 2 || !looks->breaks) return false;
    snprintf(what, bytes, "a collective between nodes failed asynchronously: link lost");
    return true;
}

// test_heartbeat BREAKS: the device of a single rank waits for a message that never arrives. The
// check must report this long before the time limit. The abort flag is in a file, which outlives
// the process.
static int break_link(void) {
    Site site = {0, 0, 0, 3, "update", NULL, NULL};
    Looks looks = {0, true};
    int file = open(getenv(ABORT_FILE), O_RDWR), removed = 0;
    int *flag = (int *)mmap(NULL, sizeof *flag, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || flag == MAP_FAILED) return 1;
    heartbeat_set_abort(&site, flag);  // no effect before the heartbeat exists
    watchdog_open(&site, MPI_COMM_SELF, 1, 20);
    heartbeat_set_abort(&site, &removed);
    heartbeat_set_abort(&site, NULL);
    heartbeat_set_abort(&site, flag);
    heartbeat_set_check(&site, look, &looks);
    heartbeat_waiting(&site, true);
    sleep(15);
    return 0;
}

// Waits, up to a minute, until the watchdog has called the check n more times.
static bool asked_more(const Site *site, Looks *looks, int n) {
    int enough = atomic_load(&looks->asked) + n;
    for (int i = 0; i < 1200 && atomic_load(&looks->asked) < enough; i++) {
        heartbeat_progress(site);
        usleep(50000);
    }
    return atomic_load(&looks->asked) >= enough;
}

// As long as a check is set, the watchdog calls it, even without a time limit.
static bool check_runs_every_beat(void) {
    Site site = {0, 0, 0, 3, "update", NULL, NULL};
    Looks looks = {0}, others = {0};
    heartbeat_set_check(&site, look, &looks);  // before the heartbeat exists
    watchdog_open(&site, MPI_COMM_SELF, 1, 2);
    if (!site.heartbeat) return false;
    heartbeat_set_check(&site, look, &looks);
    bool ok = asked_more(&site, &looks, 3);
    heartbeat_set_check(&site, NULL, &others);  // no effect, because the context differs
    ok = ok && asked_more(&site, &looks, 2);
    heartbeat_set_check(&site, NULL, &looks);
    int asked = atomic_load(&looks.asked);
    usleep(400000);
    ok = ok && atomic_load(&looks.asked) == asked;
    watchdog_close(&site);
    return ok;
}

// test_heartbeat NO_THREAD, NO_TIMER or NO_LIMIT: no thread can be created for the watchdog, or for
// the timer during MPI_Init. With NO_LIMIT there is no time limit, so no thread is needed.
static int lack_threads(const char *which) {
    Site site = {0, 0, 0, 0, "start", NULL, NULL};
    refuse_threads = true;
    if (!strcmp(which, NO_TIMER)) watchdog_mpi_starting(&site, 10);
    watchdog_open(&site, MPI_COMM_SELF, 1, strcmp(which, NO_LIMIT) ? 10 : 0);
    watchdog_close(&site);
    watchdog_mpi_ending(&site, 10, 0);
    watchdog_close(&site);
    return 0;
}

// Returns the environment without the launcher's variables. The caller frees the array; the strings
// belong to environ.
static char **environment_of_one(void) {
    const char *ours[] = {"OMPI_COMM_", "OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix", "PMIX_",
                          "PMI_",       "MPI_LOCAL",    "PRTE_",         "SLURM_",        NULL};
    int count = 0, kept = 0;
    while (environ[count]) count++;
    char **words = (char **)xcalloc((size_t)count + 1, sizeof *words, "an environment");
    for (int i = 0; i < count; i++) {
        bool drop = false;
        for (int j = 0; ours[j]; j++) drop |= !strncmp(environ[i], ours[j], strlen(ours[j]));
        if (!drop) words[kept++] = environ[i];
    }
    return words;
}

// Runs this program as a single rank. Returns its exit code (-1 if it was killed) and its output.
// Uses exec, because the forked child of a multithreaded process must not start threads.
static int alone(char *argument, char *text, size_t bytes) {
    int ends[2], status = 0;
    size_t used = 0;
    *text = '\0';
    if (pipe(ends) != 0) return -1;
    char *arguments[] = {"test_heartbeat", argument, NULL}, **words = environment_of_one();
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        execve("/proc/self/exe", arguments, words);
        _exit(127);
    }
    free(words);
    close(ends[1]);
    for (ssize_t got;
         child > 0 && used < bytes - 1 && (got = read(ends[0], text + used, bytes - 1 - used)) > 0;) {
        used += (size_t)got;
    }
    text[used] = '\0';
    close(ends[0]);
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// If a device hangs, the watchdog lists the collectives that the rank has issued.
static bool collectives_are_listed(char *text, size_t bytes) {
    return alone(STALLS, text, bytes) == EXIT_COMMUNICATION && strstr(text, "iteration 3 update: waited ") &&
           strstr(text, "; collectives issued: rank 0: 2 (last: all-gather between nodes) (--distributed");
}

// An error that a check reports ends the job immediately, before the time limit. The watchdog sets
// the abort flag of kernels that wait for other ranks.
static bool failed_check_ends_the_job(char *text, size_t bytes) {
    char path[] = "/tmp/test_heartbeat_XXXXXX";
    int flag = 0, file = mkstemp(path);
    if (file < 0 || setenv(ABORT_FILE, path, 1) || write(file, &flag, sizeof flag) != sizeof flag)
        return false;
    bool ok = alone(BREAKS, text, bytes) == EXIT_COMMUNICATION &&
              strstr(text,
                     "iteration 3 update: a collective between nodes failed asynchronously: "
                     "link lost\n");
    ok = pread(file, &flag, sizeof flag, 0) == sizeof flag && flag == 1 && ok;
    close(file);
    unlink(path);
    return ok;
}

// A rank must not continue without a heartbeat, because other ranks of its host rely on it.
static bool ends_without_memory(char *text, size_t bytes) {
    return alone(NO_MEMORY, text, bytes) == EXIT_ENVIRONMENT && strstr(text, "out of memory: ") &&
           strstr(text, "for the heartbeat");
}

// With a time limit, a rank must not train without a watchdog. Without a limit it needs none.
static bool ends_without_threads(char *text, size_t bytes) {
    const char *says =
        "cannot start the watchdog thread: Resource temporarily unavailable; raise "
        "ulimit -u";
    return alone(NO_THREAD, text, bytes) == EXIT_ENVIRONMENT &&
           strstr(text, "error: rank 0 (node 0, gpu 0) start: ") && strstr(text, says) &&
           alone(NO_TIMER, text, bytes) == EXIT_ENVIRONMENT && strstr(text, says) &&
           alone(NO_LIMIT, text, bytes) == 0 && !*text;
}

// Each rank acts as a separate host. Hosts report an error one after the other; a single host does
// not wait.
static bool hosts_report_in_turn(int rank, int size) {
    if (rank > 1) return true;  // two hosts are enough
    Site site = {rank, rank, 0, 0, "test", NULL, NULL};
    double waited[2];
    for (int hosts = 1; hosts <= 2; hosts++) {
        watchdog_open(&site, MPI_COMM_SELF, hosts == 1 ? 1 : size, 10);
        if (!site.heartbeat) return false;
        slept = 0;
        heartbeat_claim_exit_in_turn(&site);
        waited[hosts - 1] = slept;
        watchdog_close(&site);
    }
    return waited[0] == 0 && waited[1] == (rank == 0 ? 0 : 2);
}

int main(int argc, char **argv) {
    Launch launch;
    launch_init(&launch, &argc, &argv);
    if (argc > 1 && !strcmp(argv[1], STALLS)) return stall();
    if (argc > 1 && !strcmp(argv[1], NO_MEMORY)) return lack_memory();
    if (argc > 1 && !strcmp(argv[1], BREAKS)) return break_link();
    if (argc > 1 && !strcmp(argv[1], OUT_OF_STEP)) return issue_fewer(&launch);
    if (argc > 1) return lack_threads(argv[1]);
    Site site = {launch.rank, 0, 0, 0, "test", NULL, NULL};
    watchdog_open(&site, launch.host, launch.size, 10);
    report(site.rank, "ranks of a host share memory", site.heartbeat != NULL);
    if (failures) return 1;
    char text[512];
    report(site.rank, "the last rank is busy", busy_rank_is_named(&site, launch.size, launch.size - 1));
    report(site.rank, "the first rank is busy", busy_rank_is_named(&site, launch.size, 0));
    report(site.rank, "no rank is busy", !asked(&site, launch.size, -1, text, sizeof text));
    report(site.rank, "a wait ends", waits_end(&site));
    report(site.rank, "a single rank watches itself", single_rank_watches_itself(&site));
    heartbeat_progress(&site);  // resets the time limit; the next tests take seconds
    report(site.rank, "hosts report one after the other", hosts_report_in_turn(launch.rank, launch.size));
    MPI_Barrier(MPI_COMM_WORLD);
    watchdog_close(&site);
    // The watchdog is closed, because starting an MPI program takes 10 s if the host name cannot be
    // resolved.
    char output[2000] = "";
    bool ok = site.rank > 0 || collectives_are_listed(output, sizeof output);
    if (!ok) printf("# %s\n", output);
    report(site.rank, "the watchdog lists the collectives", ok);
    ok = site.rank > 0 || failed_check_ends_the_job(output, sizeof output);
    if (!ok) printf("# %s\n", output);
    report(site.rank, "an error found by a check ends the job", ok);
    report(site.rank, "the check runs until it is removed", check_runs_every_beat());
    ok = site.rank > 0 || ends_without_memory(output, sizeof output);
    if (!ok) printf("# %s\n", output);
    report(site.rank, "without memory for the heartbeat the job ends", ok);
    ok = site.rank > 0 || ends_without_threads(output, sizeof output);
    if (!ok) printf("# %s\n", output);
    report(site.rank, "without a watchdog thread the job ends", ok);
    watchdog_open(&site, launch.host, launch.size, 0);  // without a time limit
    report(site.rank, "the watchdog opens again without a time limit",
           site.heartbeat != NULL && busy_rank_is_named(&site, launch.size, 1));
    watchdog_close(&site);
    launch_finalize(&launch);
    return failures > 0;
}
