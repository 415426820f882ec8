// Tests --load of folders without a checkpoint. If a folder has another program's checkpoint, or
// any file that a run does not write before its first checkpoint, the error names the file.
// Otherwise training starts from scratch.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/base/durable.h"
#include "llmc/checkpoint/checkpoint.h"
#include "test/unit/folder.h"

typedef struct Case {
    const char *names;    // files to create, separated by spaces; a trailing '/' makes a folder
    const char *tracker;  // contents of latest_checkpointed_iteration.txt; NULL: no such file
    const char *says;     // part of the error; NULL: training starts from scratch
} Case;

static const Case CASES[] = {
    // Folders that a run leaves before its first checkpoint.
    {"", NULL, NULL},
    {"progress.txt log.jsonl run.log slurm-12.out nohup.out out log run.err flags.args train.sh", NULL, NULL},
    {"tensorboard/ tensorboard/events.out.tfevents.1.host.2.0 logs/ logs/today/ logs/today/log.1.jsonl", NULL,
     NULL},
    {"distributions/ distributions/iter_0000010.rank_000.jsonl lost+found/ losses.svg .nfs0001 core.12", NULL,
     NULL},
    {".iter_0000005.tmp/ .iter_0000005.tmp/mp_rank_00/ "
     ".iter_0000005.tmp/mp_rank_00/shard_00000_of_00002.safetensors"
     " .iter_0000003.del/ .iter_0000003.del/manifest.json .latest_checkpointed_iteration.txt.tmp",
     NULL, NULL},
    {"empty/", NULL, NULL},
    // Contents of hidden folders and files that users and tools add to a run are ignored.
    {".snapshot/ .snapshot/iter_0000005/ .snapshot/iter_0000005/manifest.json .git/ .git/HEAD .git/x.pt",
     NULL, NULL},
    {"log.json hosts train.sbatch job.yaml job.sh~ run.log.1.gz trace.nsys-rep run.pid", NULL, NULL},
    // Megatron-LM: the torch and torch_dist formats, for the parent folder and the iteration's
    // folder.
    {"iter_0000100/ iter_0000100/mp_rank_00/ iter_0000100/mp_rank_00/model_optim_rng.pt", "100",
     "iter_0000100 holds a Megatron-LM checkpoint (mp_rank_00/model_optim_rng.pt)"},
    {"iter_0000100/ iter_0000100/mp_rank_00/ iter_0000100/mp_rank_00/model_optim_rng.pt", NULL,
     "Megatron-LM"},
    {"iter_0000100/ iter_0000100/mp_rank_00_000/ iter_0000100/mp_rank_00_000/distrib_optim.pt", "100",
     "Megatron-LM"},
    {"release/ release/mp_rank_00/ release/mp_rank_00/model_optim_rng.pt", "release",
     "release holds a Megatron-LM checkpoint (mp_rank_00/model_optim_rng.pt)"},
    {"mp_rank_00/ mp_rank_00/model_optim_rng.pt", NULL,
     "Megatron-LM checkpoint (mp_rank_00/model_optim_rng.pt)"},
    {"iter_0000100/ iter_0000100/.metadata iter_0000100/__0_0.distcp iter_0000100/common.pt "
     "iter_0000100/metadata.json",
     "100", "Megatron-LM or PyTorch distributed checkpoint (__0_0.distcp)"},
    {"__0_0.distcp .metadata common.pt metadata.json", NULL, "(__0_0.distcp)"},
    {"iter_0000100/ iter_0000100/common.pt iter_0000100/metadata.json", "100", "Megatron-LM"},
    // Hugging Face: one file, several files, and Trainer output.
    {"config.json generation_config.json merges.txt model.safetensors tokenizer.json vocab.json", NULL,
     "Hugging Face model (config.json)"},
    {"model-00001-of-00002.safetensors model-00002-of-00002.safetensors", NULL, "Hugging Face model"},
    {"pytorch_model.bin", NULL, "Hugging Face model (pytorch_model.bin)"},
    {"checkpoint-500/ checkpoint-500/model.safetensors checkpoint-500/trainer_state.json", NULL,
     "Hugging Face model (checkpoint-500/model.safetensors)"},
    // DeepSpeed.
    {"latest global_step100/ global_step100/mp_rank_00_model_states.pt zero_to_fp32.py", NULL,
     "DeepSpeed checkpoint (global_step100/mp_rank_00_model_states.pt)"},
    {"global_step9/ global_step9/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", NULL,
     "DeepSpeed checkpoint"},
    // Other programs.
    {"epoch3.pth", NULL, "PyTorch file (epoch3.pth)"},
    {"model_00019560.bin state_00019560_00000.bin main.log", NULL, "llm.c checkpoint (model_00019560.bin)"},
    {"pile_text_document.bin pile_text_document.idx", NULL,
     "corpus of token shards (pile_text_document.idx)"},
    // Partial copies and interrupted replacements of this program's checkpoints.
    {"iter_0000005/ iter_0000005/mp_rank_00/ iter_0000005/mp_rank_00/shard_00000_of_00002.safetensors", NULL,
     "checkpoint of this program that lacks its manifest.json (iter_0000005/mp_rank_00/shard_00000"},
    {"mp_rank_00/ mp_rank_00/shard_00000_of_00002.safetensors", NULL, "lacks its manifest.json"},
    {".iter_0000005.old/ .iter_0000005.old/manifest.json", NULL,
     "that a killed save was replacing (.iter_0000005.old)"},
    {"manifest.json", NULL, "is a single checkpoint; use its parent folder"},
    // Unknown files.
    {"photo.jpg run.log", NULL, "holds no checkpoint, but other files, such as photo.jpg"},
    {"thesis/ thesis/chapter1.tex", NULL, "such as thesis/chapter1.tex;"},
    {"photo.jpg model_optim_rng.pt", NULL, "Megatron-LM"},  // known files are reported first
    // This program's checkpoint without manifest.json: opening it will report the error and fall
    // back to the previous checkpoint.
    {"iter_0000007/ iter_0000007/mp_rank_00/ iter_0000007/mp_rank_00/shard_00000_of_00002.safetensors", "7",
     NULL},
    {"strange", "7", NULL},  // the tracker names a missing checkpoint; opening it will report the error
};

static void put(const char *folder, const char *name, const char *text) {
    char *path = text_format("%s/%s", folder, name);
    size_t length = strlen(path);
    if (path[length - 1] == '/') {
        assert_int_equal(mkdir(path, 0777), 0);
    } else {
        assert_true(durable_write_file(path, text, strlen(text), NULL));
    }
    free(path);
}

static void build(const char *folder, const Case *c) {
    char *names = xstrdup(c->names), *rest = NULL;
    for (char *name = strtok_r(names, " ", &rest); name; name = strtok_r(NULL, " ", &rest))
        put(folder, name, "x");
    if (c->tracker) put(folder, "latest_checkpointed_iteration.txt", c->tracker);
    free(names);
}

static void folders(void **state) {
    char above[64], note[1400];
    assert_int_equal(folder_make(above, sizeof above, "test_foreign"), 0);
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        const Case *c = &CASES[i];
        Error err = {0};
        char *folder = text_format("%s/%zu", above, i);
        assert_int_equal(mkdir(folder, 0777), 0);
        build(folder, c);
        int64_t found = checkpoint_find(folder, note, sizeof note, &err);
        int64_t wanted = c->says ? CHECKPOINT_UNREADABLE : c->tracker ? 7 : NO_CHECKPOINT;
        if (found != wanted) fail_msg("case %zu (%s): %d, %s", i, c->names, (int)found, err.what);
        if (c->says &&
            (err.code != EXIT_CHECKPOINT || !strstr(err.what, c->says) || !strstr(err.what, folder)))
            fail_msg("case %zu: %d, %s", i, err.code, err.what);
        if (c->says && (strchr(err.what, '\n') || !strchr(err.what, ';')))
            fail_msg("case %zu: %s", i, err.what);
        free(folder);
    }
    assert_int_equal(folder_remove(above), 0);
}

// Symbolic links are treated like the folders to which they refer.
static void links(void **state) {
    char above[64], note[1400];
    Error err = {0};
    assert_int_equal(folder_make(above, sizeof above, "test_foreign"), 0);
    char *target = text_format("%s/target", above), *link = text_format("%s/link", above);
    assert_int_equal(mkdir(target, 0777), 0);
    assert_int_equal(symlink(target, link), 0);
    put(target, "run.log", "x");
    assert_int_equal(checkpoint_find(link, note, sizeof note, &err), NO_CHECKPOINT);
    put(target, "config.json", "x");
    assert_int_equal(checkpoint_find(link, note, sizeof note, &err), CHECKPOINT_UNREADABLE);
    free(target);
    free(link);
    assert_int_equal(folder_remove(above), 0);
}

// Opens iteration 7 in the folder, which must fail with this cause.
static void opens_with(const char *folder, const char *says) {
    char note[1400];
    Error err = {0};
    int64_t iteration = 7;
    Peers peers = {MPI_COMM_SELF, 0, NULL};
    assert_null(checkpoint_open(folder, &iteration, "--ckpt-step", peers, note, sizeof note, &err));
    if (err.code != EXIT_CHECKPOINT || !strstr(err.what, says) || !strstr(err.what, folder))
        fail_msg("%d, %s", err.code, err.what);
    if (strstr(err.what, "another iteration") || strchr(err.what, '\n') || !strchr(err.what, ';'))
        fail_msg("%s", err.what);
}

// If an iteration is requested from a folder without checkpoints, the error names the cause.
static void requested_iterations(void **state) {
    char above[64];
    assert_int_equal(folder_make(above, sizeof above, "test_foreign"), 0);
    opens_with(above, "holds no checkpoint; use a folder that a run saved into");
    put(above, "run.log", "x");
    char *file = text_format("%s/run.log", above), *missing = text_format("%s/missing", above);
    opens_with(file, "is not a folder");
    opens_with(missing, "holds no checkpoint; use");
    put(above, "config.json", "x");
    opens_with(above, "holds a Hugging Face model (config.json)");
    if (geteuid() != 0) {
        assert_int_equal(chmod(above, 0), 0);
        opens_with(above, "Permission denied");
        assert_int_equal(chmod(above, 0700), 0);
    }
    free(file);
    free(missing);
    assert_int_equal(folder_remove(above), 0);
}

// An unreadable folder is refused, because it may contain checkpoints.
static void locked_folder(void **state) {
    char above[64], note[1400];
    Error err = {0};
    if (geteuid() == 0) skip();
    assert_int_equal(folder_make(above, sizeof above, "test_foreign"), 0);
    assert_int_equal(chmod(above, 0), 0);
    assert_int_equal(checkpoint_find(above, note, sizeof note, &err), CHECKPOINT_UNREADABLE);
    assert_int_equal(chmod(above, 0700), 0);
    assert_int_equal(folder_remove(above), 0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(folders),
        cmocka_unit_test(requested_iterations),
        cmocka_unit_test(links),
        cmocka_unit_test(locked_folder),
    };
    MPI_Init(&argc, &argv);
    int failed = cmocka_run_group_tests_name("foreign", tests, NULL, NULL);
    MPI_Finalize();
    return failed;
}
