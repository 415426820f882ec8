// Memory shared by the ranks of a host: see peers.h.
#include "llmc/ranks/peers.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// The first rank's file. The inode identifies it, because the path may differ in PID namespaces.
typedef struct FileName {
    long pid;
    int fd;
    dev_t device;
    ino_t inode;
} FileName;

static int create_file(size_t bytes, FileName *name) {
    struct stat status;
    int fd = memfd_create("shared memory", MFD_CLOEXEC);
    if (fd < 0) return -1;
    if (ftruncate(fd, (off_t)bytes) != 0 || fstat(fd, &status) != 0) {
        close(fd);
        return -1;
    }
    *name = (FileName){(long)getpid(), fd, status.st_dev, status.st_ino};
    return fd;
}

static int open_file(const FileName *name, bool write) {
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", name->pid, name->fd);
    int fd = open(path, (write ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (fd < 0) return -1;
    if (fstat(fd, &status) == 0 && status.st_dev == name->device && status.st_ino == name->inode) return fd;
    close(fd);
    return -1;
}

void *host_memory_map(Peers host, size_t bytes, bool all_write) {
    assert(bytes > 0);
    int rank, fd = -1;
    FileName name = {0, -1, 0, 0};
    MPI_Comm_rank(host.comm, &rank);
    bool write = all_write || rank == 0;
    if (rank == 0) fd = create_file(bytes, &name);
    peers_broadcast(host, &name, sizeof name, 0);
    if (rank != 0 && name.fd >= 0) fd = open_file(&name, write);
    void *map = fd >= 0 ? mmap(NULL, bytes, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0)
                        : MAP_FAILED;
    // Also waits until all ranks have opened the file, so the first rank may close it.
    bool ok = peers_agree(host, map != MAP_FAILED, NULL, NULL);
    if (fd >= 0) close(fd);
    if (ok) return map;
    if (map != MAP_FAILED) munmap(map, bytes);
    return NULL;
}
