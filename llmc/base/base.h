// Shared by every module: C linkage, exit codes, errors, allocation, clocks,
// memory of the machine, and integer helpers.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define LLMC_BEGIN extern "C" {
#define LLMC_END }
#else
#define LLMC_BEGIN
#define LLMC_END
#endif

LLMC_BEGIN

// Exit codes, documented in docs/exit_codes.md. 75 is EX_TEMPFAIL of sysexits.h: "requeue me".
enum {
    EXIT_DONE = 0,
    EXIT_USAGE = 2,
    EXIT_ENVIRONMENT = 3,
    EXIT_DIVERGED = 4,
    EXIT_DATA = 5,
    EXIT_CHECKPOINT = 6,
    EXIT_COMMUNICATION = 7,
    EXIT_STOPPED = 75
};

// Filled by a fallible call that returned false: the exit code and one line "<what>; <what to do>".
typedef struct Error {
    int code;
    int rank;  // world rank that failed, once the ranks have agreed on an error; -1: this rank
    char what[1024];
} Error;

// Fills err (may be NULL) and returns false, so that callers can write `return error_set(...)`.
bool error_set(Error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
// error_set with the exit code of bad flags, of the machine, of bad data or of checkpoints.
#define usage_error(err, ...) error_set(err, EXIT_USAGE, __VA_ARGS__)
#define system_error(err, ...) error_set(err, EXIT_ENVIRONMENT, __VA_ARGS__)
#define data_error(err, ...) error_set(err, EXIT_DATA, __VA_ARGS__)
#define ckpt_error(err, ...) error_set(err, EXIT_CHECKPOINT, __VA_ARGS__)

typedef struct Heartbeat Heartbeat;      // llmc/ranks/heartbeat.h
typedef struct NodeFailure NodeFailure;  // llmc/ranks/node_failure.h

// Context of an error. One per process, created by main; everything that can fail at run time has a
// pointer to it.
typedef struct Site {
    int rank;                   // -1 before MPI starts: not printed
    int node;                   // node index within the data-parallel group
    int gpu;                    // local device index; -1 on CPU ranks
    int64_t iteration;          // 0 before training
    const char *phase;          // "load data", "reduce gradients", ...; a string literal
    Heartbeat *heartbeat;       // watchdog of this host; NULL: none
    NodeFailure *node_failure;  // node-failure recovery; NULL: none
} Site;

// Prints "error: rank 3 (node 1, gpu 2) iteration 1841 reduce gradients: <what>; <what to do>" to
// stderr, after flushing stdout. If a launcher reads this rank's streams, waits 0.2 s in between.
// site may be NULL. Callable from any thread. Never blocks on a stdout that nobody reads.
void error_print(const Site *site, const char *what);

// Prints the same line with "warning: " instead, for failures that training survives, such as a log
// file on a full disk. For callers without a Log.
void warning_print(const Site *site, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Calls error_print and ends the whole job with this code. For failures that ranks cannot agree on:
// a failed collective, a device error, out of memory. Callable from any thread. The main thread
// calls MPI_Abort if MPI is running, else exit. Other threads call _exit, because MPI and atexit
// handlers belong to the main thread (MPI_THREAD_FUNNELED); the exit code makes the launcher end
// the other ranks. site NULL: uses the thread's (set_thread_site).
void fatal(const Site *site, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4), noreturn));

// Installs a SIGILL handler that prints one line and exits with EXIT_ENVIRONMENT if the program was
// built for another CPU (ARCH_CFLAGS in the Makefile). Call first in main.
void report_illegal_instructions(void);

// Sets this thread's error context for functions without a site, such as xmalloc. It must stay
// valid until the thread ends or sets another one. NULL (default): none.
void set_thread_site(const Site *site);

// Allocate, or end the process with one clear line if out of memory. purpose names the data in that
// line, such as "token index".
void *xmalloc(size_t bytes, const char *purpose);
void *xcalloc(size_t count, size_t bytes, const char *purpose);
void *xrealloc(void *old, size_t bytes, const char *purpose);
char *xstrdup(const char *text);
// Returns an array of `count` elements with space for one more. Reallocates it to twice the size
// whenever count is 0 or a power of two, so call it for every element, starting with NULL.
void *grow_array(void *array, int64_t count, size_t element_bytes, const char *purpose);
// printf into malloc'ed text; ends the process if out of memory.
char *text_format(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Monotonic time in seconds, for durations.
double monotonic_seconds(void);
// Seconds since 1970, for dates.
double wall_seconds(void);

// Returns a field of /proc/meminfo in bytes, such as "MemAvailable", or 0 if it cannot be read.
size_t machine_memory(const char *field);

// Time limit of a polled wait. Long gaps between polls don't count, because they mean that the
// job was suspended.
typedef struct Deadline {
    double at, polled;
} Deadline;
Deadline deadline_in(double seconds);
bool deadline_passed(Deadline *deadline);

// Returns true every `interval` iterations; never if interval is 0.
bool due(int64_t iteration, int64_t interval);

// Least common multiple, a rounded up to a multiple of b, a / b rounded up.
int64_t lcm64(int64_t a, int64_t b);
int64_t round_up64(int64_t a, int64_t b);
int64_t ceil_div64(int64_t a, int64_t b);

LLMC_END
