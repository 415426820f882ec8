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
    gpt->lora.frozen.loaded = true;
    return true;
}

// Returns the iteration to load on every rank: `iteration`, or the latest if it is negative.
// NO_CHECKPOINT after an error.
static int64_t find_base(Run *run, const char *folder, int64_t iteration, Peers world) {
    char note[1400] = "";
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
    const char *folder = config_lora_base(&run->config), *step_flag;
    int64_t step = config_lora_base_step(&run->config, &step_flag);
    Peers world = run_peers(run, run->launch.world);
    char note[1400];
    run->site.phase = "load checkpoint";
    int64_t iteration = find_base(run, folder, step, world);
    if (iteration < 0 || !run_agreed(run, same_checkpoint(folder, iteration, world, &run->error)))
        return false;
    Checkpoint *checkpoint = checkpoint_open(folder, &iteration, step_flag, world, note, sizeof note,
                                             &run->error);
    bool ok = run_agreed(run, checkpoint != NULL) && run_agreed(run, read_base(run, checkpoint));
    if (ok) run->base = checkpoint_as_base(checkpoint, folder);
    if (checkpoint) checkpoint_close(checkpoint);
    if (ok)
        log_line(run->log, "  loaded the frozen model from %s at iteration %lld", folder,
                 (long long)iteration);
    return ok;
}
