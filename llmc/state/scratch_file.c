// Scratch file for optimizer state: see scratch_file.h.
#include "llmc/state/scratch_file.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "llmc/base/durable.h"
#include "llmc/ranks/heartbeat.h"
#include "llmc/ranks/parallel.h"

// --- the folder ----------------------------------------------------------------------------------

#define RANDOM_PART "XXXXXX"  // replaced by mkostemp

// Names include the host, because hosts may share a folder, and locks are per host.
typedef struct Names {
    char lock[128], prefix[128];
} Names;

static Names names_of_host(void) {
    char host[65] = "";
    Names names;
    gethostname(host, sizeof host - 1);
    snprintf(names.lock, sizeof names.lock, ".optimizer-%s.lock", host);
    snprintf(names.prefix, sizeof names.prefix, "optimizer-%s-", host);
    return names;
}

// Removes files that a job created but could not unlink. The folder must be locked. Compares the
// length too, because another host's name may begin with this host's name and a dash.
static void remove_leftovers(int folder, const char *prefix) {
    int fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = fd >= 0 ? fdopendir(fd) : NULL;
    if (!list && fd >= 0) close(fd);
    if (!list) return;
    for (const struct dirent *entry; (entry = readdir(list));)
        if (strncmp(entry->d_name, prefix, strlen(prefix)) == 0 &&
            strlen(entry->d_name) == strlen(prefix) + strlen(RANDOM_PART))
            unlinkat(folder, entry->d_name, 0);
    closedir(list);
}

// Returns what to do if the folder cannot be used.
static const char *folder_advice(int reason) {
    switch (reason) {
        case EACCES:
        case EPERM:
        case EROFS: return "check the permissions, or choose another --optimizer-disk-offload folder";
        case ENOENT: return "check the path; every host needs a local folder of this name";
        case ENOSPC:
        case EDQUOT: return "free space there, or choose another --optimizer-disk-offload folder";
        default: return "choose a --optimizer-disk-offload folder on a local disk";
    }
}

static bool lock_folder(ScratchFolder *f, double seconds, Error *err) {
    const struct timespec pause = {0, 100000000};
    Names names = names_of_host();
    int reason = 0;
    for (double waited = 0;; waited += 0.1) {
        f->lock = lock_file(f->folder, names.lock);
        reason = errno;
        if (f->lock >= 0 || reason != EWOULDBLOCK || waited >= seconds) break;
        nanosleep(&pause, NULL);
    }
    if (f->lock >= 0) remove_leftovers(f->folder, names.prefix);
    if (f->lock >= 0) return true;
    if (reason == EWOULDBLOCK)
        return system_error(err,
                            "another job has its optimizer state in %s; stop it, or choose another "
                            "--optimizer-disk-offload folder for this job",
                            f->path);
    if (reason == EEXIST)
        return system_error(
            err,
            "%s/%s belongs to another user or is a link; remove it if no job uses the folder, "
            "or choose another --optimizer-disk-offload folder",
            f->path, names.lock);
    return system_error(err, "cannot lock %s: %s; %s", f->path, strerror(reason), folder_advice(reason));
}

static bool open_folder(ScratchFolder *f, Error *err) {
    if (!durable_make_folders(f->path, err)) {
        err->code = EXIT_ENVIRONMENT;
        // durable.c advises to check that all ranks see the same file system.
        return errno == ENOENT && system_error(err, "cannot make folder %s: %s; %s", f->path,
                                               strerror(ENOENT), folder_advice(ENOENT));
    }
    f->folder = open(f->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return f->folder >= 0 ||
           system_error(err, "cannot open %s: %s; %s", f->path, strerror(errno), folder_advice(errno));
}

bool scratch_claim(ScratchFolder *f, const char *path, double seconds, Peers host, Error *err) {
    assert(f && path);
    int ranks = peers_size(host), rank = peers_rank(host), first = 0;
    struct stat status = {0};
    *f = (ScratchFolder){path, -1, -1};
    bool ok = open_folder(f, err);
    if (ok) fstat(f->folder, &status);
    uint64_t own[2] = {(uint64_t)status.st_dev, (uint64_t)status.st_ino};
    uint64_t(*all)[2] = xcalloc((size_t)ranks, sizeof *all, "the folders of all ranks");
    peers_all_gather(host, own, all, 2, MPI_UINT64_T);
    // The first rank of a folder locks it. The others must not create files before leftovers have
    // been removed.
    while (first < rank && memcmp(all[first], own, sizeof own) != 0) first++;
    free(all);
    if (ok && first == rank) ok = lock_folder(f, seconds, err);
    peers_barrier(host);
    return ok;
}

void scratch_release(ScratchFolder *f) {
    if (!f->path) return;
    Names names = names_of_host();
    unlock_file(f->folder, names.lock, f->lock);
    if (f->folder >= 0) close(f->folder);
    *f = (ScratchFolder){NULL, -1, -1};
}

// --- io_uring ------------------------------------------------------------------------------------

static bool ring_open(ScratchFile *f) {
    struct io_uring *ring = xcalloc(1, sizeof *ring, "the queue of the disk");
    int error = -io_uring_queue_init(SCRATCH_BLOCKS, ring, 0);
    f->state = ring;
    if (error == 0) return true;
    free(ring);
    f->state = NULL;
    errno = error;
    return false;
}

static void ring_close(ScratchFile *f) {
    io_uring_queue_exit((struct io_uring *)f->state);
    free(f->state);
}

static void ring_submit(ScratchFile *f, ScratchBlock *block) {
    struct io_uring *ring = (struct io_uring *)f->state;
    // An entry is free, because every block is submitted at once.
    struct io_uring_sqe *entry = io_uring_get_sqe(ring);
    if (block->write)
        io_uring_prep_write(entry, f->fd, block->memory, (unsigned)block->bytes, (uint64_t)block->offset);
    else io_uring_prep_read(entry, f->fd, block->memory, (unsigned)block->bytes, (uint64_t)block->offset);
    io_uring_sqe_set_data(entry, block);
    int result;
    do result = io_uring_submit(ring);
    while (result == -EINTR || result == -EAGAIN || result == -EBUSY);
    if (result < 0) {
        heartbeat_claim_exit(f->site);
        fatal(f->site, EXIT_ENVIRONMENT, "cannot submit transfers of optimizer state in %s: %s; start again",
              f->folder, strerror(-result));
    }
}

static ScratchBlock *ring_complete(ScratchFile *f) {
    struct io_uring *ring = (struct io_uring *)f->state;
    struct io_uring_cqe *entry;
    int result;
    do result = io_uring_wait_cqe(ring, &entry);
    while (result == -EINTR || result == -EAGAIN);
    if (result < 0) {
        heartbeat_claim_exit(f->site);
        fatal(f->site, EXIT_ENVIRONMENT, "cannot wait for optimizer state in %s: %s; start again", f->folder,
              strerror(-result));
    }
    ScratchBlock *block = (ScratchBlock *)io_uring_cqe_get_data(entry);
    block->result = entry->res;
    io_uring_cqe_seen(ring, entry);
    return block;
}

const ScratchEngine scratch_ring = {ring_open, ring_close, ring_submit, ring_complete};

// --- threads -------------------------------------------------------------------------------------

// Executes the submitted blocks when the caller waits for one of them, so they do not overlap with
// the caller's other work.

static bool threads_open(ScratchFile *f) { return true; }
static void threads_close(ScratchFile *f) {}

static void threads_submit(ScratchFile *f, ScratchBlock *block) {
    block->next = f->submitted;
    f->submitted = block;
}

// Arguments of execute_blocks.
typedef struct Batch {
    int fd, count;
    ScratchBlock *block[SCRATCH_BLOCKS];
} Batch;

static void execute_blocks(void *context, int64_t lo, int64_t hi) {
    const Batch *batch = (const Batch *)context;
    for (int64_t i = lo; i < hi; i++) {
        ScratchBlock *b = batch->block[i];
        ssize_t result = b->write ? pwrite(batch->fd, b->memory, (size_t)b->bytes, b->offset)
                                  : pread(batch->fd, b->memory, (size_t)b->bytes, b->offset);
        b->result = result < 0 ? -errno : (int)result;
    }
}

static ScratchBlock *threads_complete(ScratchFile *f) {
    if (!f->executed) {
        Batch batch = {f->fd, 0, {NULL}};
        for (ScratchBlock *b = f->submitted; b; b = b->next) batch.block[batch.count++] = b;
        parallel_ranges(f->threads, 0, batch.count, 1, execute_blocks, &batch);
        f->executed = f->submitted;
        f->submitted = NULL;
    }
    ScratchBlock *block = f->executed;
    f->executed = block->next;
    return block;
}

const ScratchEngine scratch_threads = {threads_open, threads_close, threads_submit, threads_complete};

// --- transfers -----------------------------------------------------------------------------------

static void transfer_failed(const ScratchFile *f, const ScratchBlock *block, int error) {
    bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
    heartbeat_claim_exit(f->site);  // other ranks wait for this one and must not report it as dead
    fatal(f->site, EXIT_ENVIRONMENT,
          "cannot %s optimizer state in %s: %s; %s, then resume from the last checkpoint",
          block->write ? "write" : "read", f->folder, error ? strerror(error) : "the file is too short",
          full ? "free space there or choose another --optimizer-disk-offload folder" : "check the disk");
}

// Waits for a block and submits the rest of a short transfer.
static void complete_block(ScratchFile *f) {
    ScratchBlock *block = f->engine->complete(f);
    int64_t moved = block->result;
    heartbeat_progress(f->site);
    if (moved == -EINTR || moved == -EAGAIN) {
        f->engine->submit(f, block);
        return;
    }
    if (moved < 0) transfer_failed(f, block, (int)-moved);
    if (moved < block->bytes) moved -= moved % SCRATCH_ALIGN;  // O_DIRECT needs an aligned rest
    if (moved == 0) transfer_failed(f, block, block->result ? EIO : 0);
    block->memory += moved;
    block->offset += moved;
    block->bytes -= moved;
    if (block->bytes > 0) {
        f->engine->submit(f, block);
        return;
    }
    f->running[block->ticket]--;
    block->next = f->unused;
    f->unused = block;
}

static void start(ScratchFile *f, bool write, uint8_t *memory, int64_t bytes, int64_t offset, int ticket) {
    assert(ticket >= 0 && ticket < SCRATCH_TICKETS);
    assert((uintptr_t)memory % SCRATCH_ALIGN == 0 && bytes % SCRATCH_ALIGN == 0 &&
           offset % SCRATCH_ALIGN == 0);
    for (int64_t at = 0; at < bytes; at += SCRATCH_BLOCK) {
        while (!f->unused) complete_block(f);
        ScratchBlock *block = f->unused;
        f->unused = block->next;
        int64_t rest = bytes - at;
        *block = (ScratchBlock){write,       memory + at, rest < SCRATCH_BLOCK ? rest : SCRATCH_BLOCK,
                                offset + at, ticket,      0,
                                NULL};
        f->running[ticket]++;
        f->engine->submit(f, block);
    }
}

void scratch_read(ScratchFile *f, void *memory, int64_t bytes, int64_t offset, int ticket) {
    start(f, false, (uint8_t *)memory, bytes, offset, ticket);
}

void scratch_write(ScratchFile *f, const void *memory, int64_t bytes, int64_t offset, int ticket) {
    start(f, true, (uint8_t *)(uintptr_t)memory, bytes, offset, ticket);
}

void scratch_wait(ScratchFile *f, int ticket) {
    assert(ticket >= 0 && ticket < SCRATCH_TICKETS);
    while (f->running[ticket] > 0) complete_block(f);
}

// --- the file ------------------------------------------------------------------------------------

// Creates a file without a name. Returns its descriptor, or -1 with errno.
static int create_unnamed(const ScratchFolder *folder) {
    Names names = names_of_host();
    char *path = text_format("%s/%s" RANDOM_PART, folder->path, names.prefix);
    int fd = mkostemp(path, O_CLOEXEC);  // mode 0600
    if (fd >= 0 && unlink(path) != 0) {
        int reason = errno;
        close(fd);
        fd = -1;
        errno = reason;
    }
    free(path);
    return fd;
}

// Switches to O_DIRECT. Some file systems accept the flag but not the transfers, so this tries one.
static bool use_direct(int fd) {
    if (fcntl(fd, F_SETFL, O_RDWR | O_DIRECT) != 0) return false;
    void *zeros = aligned_alloc(SCRATCH_ALIGN, SCRATCH_ALIGN);
    bool works = zeros && pwrite(fd, memset(zeros, 0, SCRATCH_ALIGN), SCRATCH_ALIGN, 0) == SCRATCH_ALIGN;
    free(zeros);
    return works || fcntl(fd, F_SETFL, O_RDWR) != 0;
}

// Reserves the space. File systems (EOPNOTSUPP) and kernels (ENOSYS) without fallocate get a sparse
// file.
static bool reserve_space(int fd, int64_t bytes) {
    int result;
    do result = fallocate(fd, 0, 0, bytes);
    while (result != 0 && errno == EINTR);
    return result == 0 || ((errno == EOPNOTSUPP || errno == ENOSYS) && ftruncate(fd, bytes) == 0);
}

bool scratch_open(ScratchFile *f, const ScratchFolder *folder, int64_t bytes, int threads, const Site *site,
                  const ScratchEngine *engine, Error *err) {
    assert(f && folder->path && bytes >= 0 && threads > 0);
    memset(f, 0, sizeof *f);
    f->folder = folder->path;
    f->site = site;
    f->threads = threads;
    for (int i = 0; i < SCRATCH_BLOCKS; i++) {
        f->block[i].next = f->unused;
        f->unused = &f->block[i];
    }
    bytes = round_up64(bytes > 0 ? bytes : 1, SCRATCH_ALIGN);
    f->fd = create_unnamed(folder);
    if (f->fd < 0 || !reserve_space(f->fd, bytes)) {
        int reason = errno;
        if (f->fd >= 0) close(f->fd);
        f->fd = -1;
        return system_error(err,
                            "cannot reserve %.2f GiB for the optimizer state of a rank in %s: %s; free space "
                            "there or choose another --optimizer-disk-offload folder (see --plan)",
                            (double)bytes / 0x1p30, folder->path, strerror(reason));
    }
    f->direct = use_direct(f->fd);
    f->engine = engine ? engine : &scratch_ring;
    if (f->engine->open(f)) return true;
    f->refused = errno;
    f->engine = &scratch_threads;
    return true;
}

void scratch_close(ScratchFile *f) {
    if (!f->engine) return;
    for (int ticket = 0; ticket < SCRATCH_TICKETS; ticket++) scratch_wait(f, ticket);
    f->engine->close(f);
    close(f->fd);
    f->engine = NULL;
}

// --- bandwidth -----------------------------------------------------------------------------------

enum { PIECE = 48 << 20, PIECES = 4 };

// Reads and rewrites the whole file. Half of the pieces are being read and half written. Pieces
// have the size of the chunks of an update (disk_state.h). Returns the seconds that it took.
static double rewrite(ScratchFile *f, uint8_t *memory, int64_t pieces) {
    double begin = monotonic_seconds();
    for (int64_t next = 0; next < pieces + PIECES / 2; next++) {
        int64_t last = next - PIECES / 2;
        uint8_t *fresh = memory + next % PIECES * PIECE, *full = memory + (last + PIECES) % PIECES * PIECE;
        scratch_wait(f, (int)(next % PIECES));
        if (next < pieces) scratch_read(f, fresh, PIECE, next * PIECE, (int)(next % PIECES));
        if (last < 0) continue;
        scratch_wait(f, (int)(last % PIECES));
        scratch_write(f, full, PIECE, last * PIECE, (int)(last % PIECES));
    }
    for (int ticket = 0; ticket < PIECES; ticket++) scratch_wait(f, ticket);
    return monotonic_seconds() - begin;
}

double scratch_bandwidth(const char *path, int64_t bytes, int threads, Peers self, Error *err) {
    ScratchFolder folder;
    ScratchFile *file = xcalloc(1, sizeof *file, "the disk's speed");
    int64_t pieces = ceil_div64(bytes, PIECE);
    double speed = 0;
    if (scratch_claim(&folder, path, 0, self, err) &&
        scratch_open(file, &folder, pieces * PIECE, threads, NULL, NULL, err)) {
        uint8_t *memory = aligned_alloc(SCRATCH_ALIGN, (size_t)PIECES * PIECE);
        if (!memory) system_error(err, "out of memory: measuring the disk needs 192 MiB");
        else {
            memset(memory, 0x5A, (size_t)PIECES * PIECE);
            rewrite(file, memory, pieces);  // the first writes of a file's blocks take longer
            speed = 2.0 * (double)(pieces * PIECE) / rewrite(file, memory, pieces);
        }
        free(memory);
        scratch_close(file);
    }
    scratch_release(&folder);
    free(file);
    return speed;
}
