// Scratch file of a rank for optimizer state (--optimizer-disk-offload): claims the folder, creates
// the file, and reads and writes it asynchronously. The file is not a checkpoint, and no run reads
// another run's file. It is unlinked as soon as it exists, so the kernel frees it when the process
// ends for any reason.
//
// Transfers use O_DIRECT, or the page cache if the file system does not support that, and io_uring,
// or threads if the system does not permit that. A failed transfer ends the job. Called by
// disk_state.c; only one thread may use a file at a time.
#pragma once
#include "llmc/ranks/peers.h"
LLMC_BEGIN

enum {
    SCRATCH_ALIGN = 4096,     // memory, offsets and lengths of transfers are multiples of this
    SCRATCH_BLOCK = 1 << 20,  // most bytes of a system call
    SCRATCH_TICKETS = 8
};

// A folder that this rank uses. Its ranks on this host have locked it against other jobs.
typedef struct ScratchFolder {
    const char *path;
    int folder, lock;  // descriptors; lock is -1 unless this rank holds the lock of its host
} ScratchFolder;

// Creates the folder, locks it against other jobs on this host and removes the files that a killed
// job left there. Waits up to `seconds` for a job that is ending. The ranks of a host may name
// different folders. host: the ranks of this host. Error: EXIT_ENVIRONMENT, on the failing rank
// only. Collective.
bool scratch_claim(ScratchFolder *folder, const char *path, double seconds, Peers host, Error *err);
// Releases the lock. No-op unless claimed.
void scratch_release(ScratchFolder *folder);

// A part of a transfer that is executed by one system call.
typedef struct ScratchBlock ScratchBlock;
struct ScratchBlock {
    bool write;
    uint8_t *memory;
    int64_t bytes, offset;  // not transferred yet
    int ticket;
    int result;  // set when complete: bytes transferred, or -errno
    ScratchBlock *next;
};

typedef struct ScratchFile ScratchFile;

// Executes blocks. The tests have an engine of their own.
typedef struct ScratchEngine {
    // Returns false with errno if the system does not permit this engine.
    bool (*open)(ScratchFile *file);
    void (*close)(ScratchFile *file);
    void (*submit)(ScratchFile *file, ScratchBlock *block);
    // Waits for a submitted block and returns it with its result.
    ScratchBlock *(*complete)(ScratchFile *file);
} ScratchEngine;
extern const ScratchEngine scratch_ring, scratch_threads;

enum { SCRATCH_BLOCKS = 256 };
struct ScratchFile {
    const char *folder;  // for messages
    int fd;
    bool direct;
    int threads;
    const Site *site;
    const ScratchEngine *engine;
    void *state;              // the engine's
    int refused;              // errno of io_uring if the file uses threads instead; 0: it uses io_uring
    ScratchBlock *submitted;  // scratch_threads: blocks that have not been executed
    ScratchBlock *executed;   // scratch_threads: blocks that have not been returned
    ScratchBlock *unused;
    int running[SCRATCH_TICKETS];  // blocks of each ticket that are not complete
    ScratchBlock block[SCRATCH_BLOCKS];
};

// Creates a zeroed file of this size, readable by its owner only, and reserves its disk space.
// threads: used without io_uring. site: reported by fatal errors; may be NULL. engine: NULL for
// io_uring or else threads. Error: EXIT_ENVIRONMENT.
bool scratch_open(ScratchFile *file, const ScratchFolder *folder, int64_t bytes, int threads,
                  const Site *site, const ScratchEngine *engine, Error *err);
void scratch_close(ScratchFile *file);
// Start a transfer of any length under a ticket. The memory must stay valid until scratch_wait.
void scratch_read(ScratchFile *file, void *memory, int64_t bytes, int64_t offset, int ticket);
void scratch_write(ScratchFile *file, const void *memory, int64_t bytes, int64_t offset, int ticket);
// Waits until all transfers of the ticket are complete. A transfer that fails ends the job
// (EXIT_ENVIRONMENT).
void scratch_wait(ScratchFile *file, int ticket);

// Returns the bandwidth in bytes per second of simultaneous reads and writes in a folder, measured
// on a file of `bytes` bytes in the way that the optimizer's update uses it. 0 with an Error if the
// folder is not usable.
double scratch_bandwidth(const char *path, int64_t bytes, int threads, Peers self, Error *err);

LLMC_END
