// What every module shares: C linkage, exit codes, the Error that a fallible call fills, the Site
// that a fatal error names. Every other header of the host library stands on it.
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

// Exit codes, as documented in docs/exit_codes.md. 75 is sysexits' EX_TEMPFAIL: "requeue me".
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

// Filled by a fallible call that returned false: the exit code it deserves, and one line "<what>;
// <what to do>".
typedef struct Error {
    int code;
    int rank;  // of the world: whose error it is, once ranks have agreed on one; -1: this rank's own
    char what[1024];
} Error;

// Fills err (which may be NULL) and returns false, so that callers write
// `return error_set(err, EXIT_DATA, "...", ...)`.
bool error_set(Error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

typedef struct Heartbeat Heartbeat;      // llmc/ranks/heartbeat.h
typedef struct NodeFailure NodeFailure;  // llmc/ranks/node_failure.h

// Where in the job an error happens. One per process, made by main. Whatever can fail at run time
// points to it.
typedef struct Site {
    int rank;                   // -1 before MPI is up: no "rank" in the message
    int node;                   // node index inside the data-parallel group
    int gpu;                    // local device index, -1 on a rank that computes on processors
    int64_t iteration;          // 0 before training
    const char *phase;          // "load data", "reduce gradients", ... a string literal
    Heartbeat *heartbeat;       // signs of life between the ranks of this host; NULL: none
    NodeFailure *node_failure;  // what happens when another node is lost; NULL: nothing but the end
} Site;

// Prints "error: rank 3 (node 1, gpu 2) iteration 1841 reduce gradients: <what>; <what to do>" to
// stderr, after what was printed to stdout before. A rank whose streams a launcher reads waits 0.2
// s in between. site may be NULL. From any thread. Does not wait for a stdout that nobody reads.
void error_print(const Site *site, const char *what);

// The same line with "warning: " in front, for what training goes on without, such as a log's file
// on a full disk. For those who know no Log.
void warning_print(const Site *site, const char *format, ...) __attribute__((format(printf, 2, 3)));

// error_print, then ends the whole job with this code. For failures that all ranks cannot agree on:
// a failed collective, a device error, out of memory in mid-step. From any thread. The main one
// calls MPI_Abort when MPI is up, else exit. Another calls _exit, because MPI and what exit runs
// belong to the main thread (MPI_THREAD_FUNNELED); a process that leaves with a code of its own
// makes the launcher end the other ranks. site may be NULL: the thread's is taken.
void fatal(const Site *site, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4), noreturn));

// From here on an instruction that this processor lacks ends the process with one line and
// EXIT_ENVIRONMENT: the program was built for another processor (ARCH_CFLAGS in the Makefile).
// First in main.
void name_illegal_instructions(void);

// Where this thread is, for those who know no site, such as xmalloc. Must stay until the thread
// ends or another is given. NULL (the default): nowhere.
void site_of_thread(const Site *site);

// malloc and calloc that end the process with one clear line when memory runs out. purpose: what it
// was for, as in "token index".
void *xmalloc(size_t bytes, const char *purpose);
void *xcalloc(size_t count, size_t bytes, const char *purpose);
void *xrealloc(void *old, size_t bytes, const char *purpose);
char *xstrdup(const char *text);
// printf into malloc'ed text; ends the process likewise.
char *text_format(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Seconds of a clock that never jumps, for durations.
double monotonic_seconds(void);
// Seconds since 1970, for dates.
double wall_seconds(void);

// A limit on a wait that is polled. Time in which nobody polled does not count: the job was stopped
// as a whole and goes on.
typedef struct Deadline {
    double at, polled;
} Deadline;
Deadline deadline_in(double seconds);
bool deadline_passed(Deadline *deadline);

// Is this one of the iterations that something is done at, every `interval` of them? 0: never.
bool due(int64_t iteration, int64_t interval);

// Integer helpers used by every layout: least common multiple, a rounded up to a multiple of b, a /
// b rounded up.
int64_t lcm64(int64_t a, int64_t b);
int64_t round_up64(int64_t a, int64_t b);
int64_t ceil_div64(int64_t a, int64_t b);

LLMC_END
