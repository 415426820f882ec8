// Trains with several presets one after the other in the same process, so that MPI and the CUDA
// context are initialized only once. Calls train_gpt() with the flags of each preset. Started by
// dev/bench/comm.sh.
//
//   mpirun -np N build/dev/bench/train_presets [--loopback FILE] COMMON FLAGS
//       --preset NAME FLAGS --preset NAME FLAGS ...
//
// The common flags and the flags of a preset form a command line of train_gpt (@FILE is allowed).
// Results are written to its --log-jsonl. If a preset fails, its name is printed and the next one
// starts; the first failure sets the exit code. A signal ends all of them. --loopback appends to
// FILE the bytes that passed the loopback device for each preset, which is the traffic between
// emulated nodes.
#include <stdio.h>

#include "dev/bench/presets.h"
#include "llmc/ranks/launch.h"
#include "llmc/ranks/peers.h"
#include "llmc/ranks/stop.h"
#include "train_gpt.h"

// Returns the bytes received on the loopback device since boot, or -1.
static long long loopback_bytes(void) {
    FILE *file = fopen("/proc/net/dev", "r");
    if (!file) return -1;
    char line[512];
    long long bytes = -1;
    while (bytes < 0 && fgets(line, sizeof line, file)) {
        if (sscanf(line, " lo: %lld", &bytes) != 1) bytes = -1;
    }
    fclose(file);
    return bytes;
}

static void write_loopback(const char *path, const char *name, long long bytes) {
    FILE *file = fopen(path, "a");
    bool ok = file && fprintf(file, "{\"arm\":\"%s\",\"loopback_bytes\":%lld}\n", name, bytes) > 0;
    if ((file && fclose(file)) || !ok) fprintf(stderr, "warning: cannot write %s\n", path);
}

static int train(const Preset *preset, const Launch *launch, const char *loopback) {
    Peers all = {launch->world, 0, NULL};
    peers_barrier(all);
    long long before = loopback_bytes();
    int code = train_gpt(preset->argc, preset->argv);
    peers_all_reduce(all, &code, 1, MPI_INT, MPI_MAX);
    if (launch->rank == 0 && loopback) write_loopback(loopback, preset->name, loopback_bytes() - before);
    if (launch->rank == 0 && code)
        fprintf(stderr, "error: preset %s ended with exit code %d\n", preset->name, code);
    fflush(stdout);
    return code;
}

int main(int argc, char **argv) {
    Launch launch;
    Presets presets;
    Error err = {0};
    stop_catch_signals();  // before MPI starts threads: the trainer polls for them
    launch_init(&launch, &argc, &argv);
    const char *loopback = argc > 2 && !strcmp(argv[1], "--loopback") ? argv[2] : NULL;
    bool ok = presets_read(&presets, loopback ? 3 : 1, argc, argv, &err);
    int code = ok ? EXIT_DONE : err.code;
    if (!ok && launch.rank == 0) error_print(NULL, err.what);
    for (int i = 0; ok && i < presets.count; i++) {
        int ended = train(&presets.preset[i], &launch, loopback);
        if (!code) code = ended;
        if (ended == EXIT_STOPPED) break;
    }
    presets_free(&presets);
    launch_finalize(&launch);
    return code;
}
