// Loading the frozen model of a LoRA run: see run.h. Called by setup.c.
#include <stdlib.h>
#include <string.h>

#include "llmc/checkpoint/zero_slices.h"
#include "llmc/run/run.h"

// Reads the weights of this rank's layers.
static bool read_base(Run *run, const Checkpoint *checkpoint) {
    GPT *gpt = run->gpt;
    Error *err = &run->error;
    if (!config_match_base(&run->config, checkpoint_arguments(checkpoint), err) ||
        !checkpoint_check_tensors(checkpoint, gpt->whole, gpt->whole_tensors, err))
        return false;
    for (int i = 0; i < gpt->tensors; i++) {
        void *host = checkpoint_read_tensor(checkpoint, &gpt->tensor[i], SLICE_WEIGHT, 0, err);
        if (!host) return false;
        frozen_put(&gpt->lora.frozen, i, host, gpt->stream);
        free(host);
    }
    return true;
}

// Returns the iteration to load on every rank; NO_CHECKPOINT after an error.
static int64_t find_base(Run *run, const char *folder, Peers world) {
    const Config *c = &run->config;
    char note[1400] = "";
    int64_t iteration = config_lora_adapters(c) ? -1 : c->ckpt_step;  // belongs to --load
    bool ok = true;
    if (run->launch.rank == 0 && iteration < 0) {
        iteration = checkpoint_find(folder, note, sizeof note, &run->error);
        if (iteration == NO_CHECKPOINT) {
            ckpt_error(&run->error, "%s holds no checkpoint of the model to freeze; name another folder",
                       folder);
        }
        ok = iteration >= 0;
    }
    if (!run_agreed(run, ok)) return NO_CHECKPOINT;
    peers_broadcast(world, &iteration, sizeof iteration, 0);
    if (*note) log_line(run->log, "%s", note);
    return iteration;
}

bool load_base(Run *run) {
    const char *folder = config_lora_base(&run->config);
    Peers world = run_peers(run, run->launch.world);
    char note[1400];
    run->site.phase = "load checkpoint";
    int64_t iteration = find_base(run, folder, world);
    if (iteration < 0 || !run_agreed(run, same_checkpoint(folder, iteration, world, &run->error)))
        return false;
    Checkpoint *checkpoint = checkpoint_open(folder, &iteration, world, note, sizeof note, &run->error);
    bool ok = run_agreed(run, checkpoint != NULL) && run_agreed(run, read_base(run, checkpoint));
    if (checkpoint) checkpoint_close(checkpoint);
    if (ok)
        log_line(run->log, "  loaded the frozen model from %s at iteration %lld", folder,
                 (long long)iteration);
    return ok;
}
