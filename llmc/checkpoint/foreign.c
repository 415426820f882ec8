// Recognizes folders without a checkpoint of this program. See save_folder.h.
#include "llmc/checkpoint/save_folder.h"

#include <errno.h>
#include <fnmatch.h>
#include <fts.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"

enum { MOST_LEVELS = 4, MOST_ENTRIES = 100000 };

typedef struct Row {
    const char *pattern, *what;
    const char *tool;  // tool that converts it; NULL: none
} Row;

// File name patterns, matched at any level of the folder, and what such a file indicates. The first
// match counts.
static const Row OURS[] = {
    {"shard_*_of_*.safetensors", "a checkpoint of this program that lacks its manifest.json", NULL},
    {".iter_*.old", "a checkpoint of this program that a killed save was replacing", NULL},
};
#define CONVERT "build/convert_checkpoint --from-hf"
#define CONVERT_MEGATRON "build/convert_checkpoint --from-megatron"
static const Row OTHERS[] = {
    {"model_optim_rng.pt", "a Megatron-LM checkpoint", CONVERT_MEGATRON},
    {"distrib_optim.pt", "a Megatron-LM checkpoint", CONVERT_MEGATRON},
    {"*.distcp", "a Megatron-LM or PyTorch distributed checkpoint", CONVERT_MEGATRON},
    {"common.pt", "a Megatron-LM checkpoint", CONVERT_MEGATRON},
    {"mp_rank_*_model_states.pt", "a DeepSpeed checkpoint", NULL},
    {"*zero_pp_rank_*.pt", "a DeepSpeed checkpoint", NULL},
    {"config.json", "a Hugging Face model", CONVERT},
    {"model.safetensors", "a Hugging Face model", CONVERT},
    {"model-*-of-*.safetensors", "a Hugging Face model", CONVERT},
    {"pytorch_model*.bin", "a Hugging Face model", NULL},
    {"model_[0-9]*.bin", "an llm.c checkpoint", NULL},
    {"*.idx", "a corpus of token shards", NULL},
    {"*.pt", "a PyTorch file", NULL},
    {"*.pth", "a PyTorch file", NULL},
    {"*.ckpt", "a PyTorch file", NULL},
};

// Names that a run, its scripts and the file system create before the first checkpoint.
static const char FRESH[] =
    "@(.*|*~|#*#|log|out|err|hosts|hostfile|core*|events.out.tfevents.*|"
    "*.@(txt|log|out|err|json|jsonl|args|sh|sbatch|yaml|yml|py|pid|csv|svg|png|html|md|gz|nsys-rep|ncu-rep))";

static const Row *known(const Row *rows, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++) {
        if (fnmatch(rows[i].pattern, name, 0) == 0) return &rows[i];
    }
    return NULL;
}

static int by_name(const FTSENT **a, const FTSENT **b) { return strcmp((*a)->fts_name, (*b)->fts_name); }

// Returns true for folders to skip: lost+found and hidden ones (file system snapshots, leftovers of
// killed saves and deletions).
static bool is_skipped(const char *name) { return name[0] == '.' || strcmp(name, "lost+found") == 0; }

// Searches the tree for a known file. Sets *what to its row and *path to its path. If there is
// none, *what is NULL and *path the first file that no run writes before its first checkpoint
// (NULL: none).
static bool look(FTS *tree, bool also_ours, const Row **what, char **path, Error *err) {
    size_t above = 0;
    int entries = 0;
    while (!*what && entries++ < MOST_ENTRIES) {
        errno = 0;
        FTSENT *e = fts_read(tree);
        if (!e) return errno == 0 || durable_error(err, "search", "the folder of --load");
        if (e->fts_level == 0) above = e->fts_pathlen;
        if (e->fts_info == FTS_DNR && e->fts_level > 0 && is_skipped(e->fts_name)) continue;
        if (e->fts_info == FTS_DNR || e->fts_info == FTS_ERR) {
            errno = e->fts_errno;
            return durable_error(err, "search", e->fts_path);
        }
        if (e->fts_info == FTS_DP || e->fts_level == 0) continue;
        bool folder = e->fts_info == FTS_D;
        if (folder && (is_skipped(e->fts_name) || e->fts_level >= MOST_LEVELS)) fts_set(tree, e, FTS_SKIP);
        *what = also_ours ? known(OURS, sizeof OURS / sizeof *OURS, e->fts_name) : NULL;
        if (!*what) *what = known(OTHERS, sizeof OTHERS / sizeof *OTHERS, e->fts_name);
        if (!*what && (*path || folder || fnmatch(FRESH, e->fts_name, FNM_EXTMATCH) == 0)) continue;
        const char *below = e->fts_path + above;
        free(*path);
        *path = xstrdup(below + strspn(below, "/"));
    }
    return true;
}

#define OTHER_FOLDER "use a folder with checkpoints of this program, or a new folder to start from scratch"

bool foreign_refuse(const char *folder, bool unless_fresh, Error *err) {
    char *roots[] = {(char *)folder, NULL}, *path = NULL;
    const Row *what = NULL;
    if (!durable_exists(folder)) return true;
    FTS *tree = fts_open(roots, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR, by_name);
    if (!tree) return durable_error(err, "search", folder);
    bool ok = look(tree, unless_fresh, &what, &path, err);
    fts_close(tree);
    if (ok && what && what->tool) {
        ok = ckpt_error(err, "--load %s holds %s (%s), which this program cannot load; convert it with %s",
                        folder, what->what, path, what->tool);
    } else if (ok && what) {
        ok = ckpt_error(err, "--load %s holds %s (%s), which this program cannot load; " OTHER_FOLDER, folder,
                        what->what, path);
    } else if (ok && path && unless_fresh) {
        ok = ckpt_error(err, "--load %s holds no checkpoint, but other files, such as %s; " OTHER_FOLDER,
                        folder, path);
    }
    free(path);
    return ok;
}
