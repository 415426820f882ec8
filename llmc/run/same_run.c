// Consistency checks among the ranks of a run: see run.h. Called by train_gpt.c and setup.c.
#include "llmc/run/run.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "llmc/device.h"
#include "llmc/base/durable.h"
#include "llmc/checkpoint/save_folder.h"
#include "llmc/base/version.h"

// Returns rank 0's text on every rank. The caller frees it.
static char *text_of_first(const char *own, Peers world) {
    int64_t bytes = (int64_t)strlen(own) + 1;
    peers_broadcast(world, &bytes, sizeof bytes, 0);
    char *text = xcalloc(1, (size_t)bytes, "rank 0's flags");
    if (peers_rank(world) == 0) memcpy(text, own, (size_t)bytes);
    peers_broadcast(world, text, (size_t)bytes, 0);
    return text;
}

bool same_flags(const Config *config, Peers world, Error *err) {
    char program[512];
    snprintf(program, sizeof program, "%s commit %s (%s)", version_number(), version_commit(),
             device_backend());
    char *arguments = config_to_json(config), *first_program = text_of_first(program, world),
         *first_arguments = text_of_first(arguments, world);
    bool ok = true;
    if (strcmp(program, first_program) != 0) {
        ok = system_error(
            err, "this rank runs sdp4bit.c %s, but rank 0 runs %s; install the same build on all machines",
            program, first_program);
    } else {
        ok = config_same(arguments, first_arguments, err);
    }
    free(first_arguments);
    free(first_program);
    free(arguments);
    return ok;
}

bool same_data(const Loader *loader, Peers world, Error *err) {
    assert(loader);
    int count;
    uint64_t *own = loader_fingerprints(loader, &count);
    int64_t first_count = count;
    peers_broadcast(world, &first_count, sizeof first_count, 0);
    uint64_t *first = xcalloc((size_t)first_count + 1, sizeof *first, "rank 0 data");
    if (peers_rank(world) == 0) memcpy(first, own, (size_t)count * sizeof *own);
    peers_broadcast(world, first, (size_t)first_count * sizeof *first, 0);
    bool ok = count == first_count;
    if (!ok)
        data_error(err,
                   "this rank has %d data shards, but rank 0 has %lld; copy the same data to all machines",
                   count, (long long)first_count);
    for (int i = 0; i < count && ok; i++) {
        if (own[i] == first[i]) continue;
        ok = data_error(err, "%s differs from rank 0's copy; copy the same file to all machines",
                        loader_shard_prefix(loader, i));
    }
    free(first);
    free(own);
    return ok;
}

bool same_save_folder(const char *directory, Peers world, Error *err) {
    assert(directory && *directory);
    enum { TRIES = 50 };
    const struct timespec pause = {0, 100000000};
    char name[96];
    bool made = false;
    // The name is unique, because network file systems cache failed lookups. It looks like the
    // temporary folder of an interrupted save, which the next save removes.
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(name, sizeof name, ".iter_%lld%09ld%d.tmp", (long long)now.tv_sec, now.tv_nsec, (int)getpid());
    peers_broadcast(world, name, sizeof name, 0);
    char *marker = text_format("%s/%s", directory, name);
    if (peers_rank(world) == 0) {
        int fd = open(marker, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd >= 0) made = close(fd) == 0;
    }
    peers_broadcast(world, &made, sizeof made, 0);
    bool seen = !made;
    for (int i = 0; i < TRIES && !seen; i++) {
        if (i > 0) nanosleep(&pause, NULL);
        seen = access(marker, F_OK) == 0;
    }
    bool all = peers_agree(world, seen, NULL, NULL);
    if (peers_rank(world) == 0 && made) unlink(marker);
    free(marker);
    return all || seen ||
           ckpt_error(err,
                      "the --save folder %s is not the one that rank 0 sees, but all ranks write their part "
                      "of a checkpoint there; use a folder on a shared file system",
                      directory);
}

bool same_checkpoint(const char *directory, int64_t iteration, Peers world, Error *err) {
    assert(directory && iteration >= 0);
    bool here = save_folder_holds(directory, iteration), first = here;
    peers_broadcast(world, &first, sizeof first, 0);
    return here || !first ||
           ckpt_error(err,
                      "the checkpoint of iteration %lld, which rank 0 loads, is not in %s on this machine; "
                      "use a --load folder on a shared file system",
                      (long long)iteration, directory);
}
