// Errors, allocation and integer helpers: see base.h.
#include "llmc/base/base.h"

#include <assert.h>
#include <mpi.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

bool error_set(Error *err, int code, const char *format, ...) {
    if (err) {
        va_list args;
        va_start(args, format);
        vsnprintf(err->what, sizeof err->what, format, args);
        va_end(args);
        err->code = code;
        err->rank = -1;
    }
    return false;
}

static bool mpi_is_up(void) {
    int up = 0, down = 0;
    MPI_Initialized(&up);
    if (up) MPI_Finalized(&down);
    return up && !down;
}

// Flushes stdout unless that would block or another thread is writing: a watchdog that blocks here
// could not end the job.
static void flush_log(void) {
    struct pollfd out = {STDOUT_FILENO, POLLOUT, 0};
    if (poll(&out, 1, 0) != 1 || out.revents != POLLOUT || ftrylockfile(stdout) != 0) return;
    fflush_unlocked(stdout);
    funlockfile(stdout);
}

// Makes an error appear after the log lines that led to it. Launchers read stdout and stderr
// separately, and stdout in blocks (4095 bytes in Open MPI), so an error could appear in the middle
// of a log line. Waits a moment for the launcher to catch up.
static void finish_log(bool logs) {
    const useconds_t moment = 200000;
    struct stat out, err;
    flush_log();
    if (!logs || !mpi_is_up() || fstat(STDOUT_FILENO, &out) != 0 || fstat(STDERR_FILENO, &err) != 0) return;
    bool together = out.st_dev == err.st_dev && out.st_ino == err.st_ino;
    if (!together && !S_ISREG(out.st_mode)) usleep(moment);
}

static void print_line(const char *kind, const Site *site, const char *what) {
    finish_log(!site || site->rank >= 0);  // no log exists before a rank knows its index
    char where[160] = "";
    if (site && site->rank >= 0) {
        char gpu[24] = "", iteration[40] = "";
        if (site->gpu >= 0) snprintf(gpu, sizeof gpu, ", gpu %d", site->gpu);
        if (site->iteration > 0)
            snprintf(iteration, sizeof iteration, " iteration %lld", (long long)site->iteration);
        snprintf(where, sizeof where, "rank %d (node %d%s)%s", site->rank, site->node, gpu, iteration);
    }
    const char *phase = site && site->phase ? site->phase : "";
    // Names read from damaged files may contain any byte. Control characters become '?', so that
    // the message stays on one line and cannot affect a terminal.
    char line[64 + sizeof where + sizeof(((Error *)0)->what)];
    int length = snprintf(line, sizeof line - 1, "%s: %s%s%s%s%.*s", kind, where, *where && *phase ? " " : "",
                          phase, (*where || *phase) ? ": " : "", (int)sizeof((Error *)0)->what - 1, what);
    if (length > (int)sizeof line - 2) length = (int)sizeof line - 2;
    for (int i = 0; i < length; i++) {
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7F) line[i] = '?';
    }
    line[length++] = '\n';
    // A single write, because newer C libraries split fprintf to an unbuffered stream into 128-byte
    // writes, so that lines of several ranks would interleave.
    fwrite(line, 1, (size_t)length, stderr);
    fflush(stderr);
}

void error_print(const Site *site, const char *what) { print_line("error", site, what); }

void warning_print(const Site *site, const char *format, ...) {
    char what[sizeof((Error *)0)->what];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    print_line("warning", site, what);
}

// Threads other than the main one must not call MPI or exit. Their process exits alone, and the
// launcher ends the others.
static void end_job(int code) {
    const useconds_t moment = 200000;
    bool in_job = mpi_is_up();
    if (in_job) usleep(moment);  // Open MPI 5's launcher often loses output written just before an abort
    if (gettid() != getpid()) _exit(code);
    if (in_job) MPI_Abort(MPI_COMM_WORLD, code);
    exit(code);
}

// If several threads fail at once, the first prints and ends the job; the others wait.
static void one_thread_only(int code) {
    static atomic_flag taken = ATOMIC_FLAG_INIT;
    static _Thread_local bool ours;
    if (ours) _exit(code);  // a second failure while exiting
    if (atomic_flag_test_and_set(&taken)) {
        for (;;) pause();
    }
    ours = true;
}

static _Thread_local const Site *thread_site;

// May run in several threads at once. Only async-signal-safe calls: write, _exit, atomics and
// pause.
static void on_illegal_instruction(int number) {
    static const char line[] =
        "error: this CPU lacks an instruction that the program uses; rebuild on this machine, or with make "
        "ARCH_CFLAGS=-march=x86-64\n";
    one_thread_only(EXIT_ENVIRONMENT);
    (void)!write(STDERR_FILENO, line, sizeof line - 1);
    _exit(EXIT_ENVIRONMENT);
}

void report_illegal_instructions(void) { signal(SIGILL, on_illegal_instruction); }

void set_thread_site(const Site *site) { thread_site = site; }

void fatal(const Site *site, int code, const char *format, ...) {
    one_thread_only(code);
    char what[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    error_print(site ? site : thread_site, what);
    end_job(code);
    abort();  // not reached; marks the function noreturn
}

static void *checked(void *p, size_t bytes, const char *purpose) {
    if (!p && bytes) {
        fatal(NULL, EXIT_ENVIRONMENT,
              "out of memory: cannot allocate %zu bytes for %s; use a smaller model or batch, or a machine "
              "with more memory",
              bytes, purpose);
    }
    return p;
}

void *xmalloc(size_t bytes, const char *purpose) { return checked(malloc(bytes), bytes, purpose); }

void *xcalloc(size_t count, size_t bytes, const char *purpose) {
    size_t total;
    if (__builtin_mul_overflow(count, bytes, &total)) total = SIZE_MAX;
    return checked(calloc(count, bytes), total, purpose);
}

void *xrealloc(void *old, size_t bytes, const char *purpose) {
    return checked(realloc(old, bytes), bytes, purpose);
}

void *grow_array(void *array, int64_t count, size_t element_bytes, const char *purpose) {
    assert(count >= 0 && (array || count == 0) && element_bytes > 0);
    if (count & (count - 1)) return array;
    return xrealloc(array, (count ? 2 * (size_t)count : 1) * element_bytes, purpose);
}

char *xstrdup(const char *text) {
    size_t bytes = strlen(text) + 1;
    return (char *)memcpy(xmalloc(bytes, "a string"), text, bytes);
}

char *text_format(const char *format, ...) {
    char *text = NULL;
    va_list args;
    va_start(args, format);
    int length = vasprintf(&text, format, args);
    va_end(args);
    if (length < 0)
        fatal(NULL, EXIT_ENVIRONMENT,
              "out of memory while formatting a line of text; use a machine with more memory");
    return text;
}

static double clock_seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

double monotonic_seconds(void) { return clock_seconds(CLOCK_MONOTONIC); }
double wall_seconds(void) { return clock_seconds(CLOCK_REALTIME); }

size_t machine_memory(const char *field) {
    FILE *file = fopen("/proc/meminfo", "r");
    if (!file) return 0;
    char line[256];
    unsigned long long kilobytes = 0;
    size_t length = strlen(field);
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, field, length) == 0 && line[length] == ':') {
            kilobytes = strtoull(line + length + 1, NULL, 10);
            break;
        }
    }
    fclose(file);
    return (size_t)kilobytes * 1024;
}

int64_t lcm64(int64_t a, int64_t b) {
    assert(a > 0 && b > 0);
    int64_t x = a, y = b;
    while (y) {
        int64_t r = x % y;
        x = y;
        y = r;
    }
    return a / x * b;
}

Deadline deadline_in(double seconds) {
    double now = monotonic_seconds();
    Deadline d = {now + seconds, now};
    return d;
}

bool deadline_passed(Deadline *d) {
    // A running rank polls far more often. Longer gaps mean that the process was stopped, and do
    // not count.
    const double pause = 5.0;
    double now = monotonic_seconds();
    if (now - d->polled > pause) d->at += now - d->polled;
    d->polled = now;
    return now > d->at;
}

bool due(int64_t iteration, int64_t interval) { return interval > 0 && iteration % interval == 0; }

int64_t round_up64(int64_t a, int64_t b) {
    assert(a >= 0 && b > 0);
    return (a + b - 1) / b * b;
}

int64_t ceil_div64(int64_t a, int64_t b) {
    assert(a >= 0 && b > 0);
    return (a + b - 1) / b;
}
