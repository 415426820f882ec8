// Reads Megatron-LM's older checkpoints with one torch.save file per tensor and pipeline rank. See
// megatron_source.h. The original SDP4Bit implementation uses this format.
//
//   mp_rank_TT/model_optim_rng.pt        tensor rank TT
//   mp_rank_TT_PPP/model_optim_rng.pt    tensor rank TT, pipeline rank PPP
//
// Each file is a dict. "model" holds the rank's weights by name in nested dicts; layers are
// numbered from 0 within the rank. With virtual stages there are "model0", "model1" and so on.
#include <inttypes.h>
#include <stdlib.h>

#include "dev/convert/megatron_source.h"

enum { MOST_LEVELS = 8, MOST_VISITED = 1 << 20 };

typedef struct Rank {
    MegatronSource *source;
    const TorchFile *torch;
    int file;
    MegatronRanks ranks;
    int64_t tensor_rank, stage, chunk;
    int visited;  // values visited
} Rank;

// Adds the part of a tensor that this rank holds.
static bool add_part(const Rank *r, int tensor, const PickleValue *value, const char *name, Error *err) {
    const MegatronTensor *t = &r->source->tensors[MEGATRON_WEIGHT][tensor];
    int64_t T = r->ranks.tensor, rank = r->tensor_rank;
    bool cut = t->halves || t->split >= 0, by_columns = !t->halves && t->split == 1;
    if (!cut && rank > 0) return true;  // identical on all ranks
    MegatronPiece piece = {.file = r->file, .rows = t->rows, .columns = t->columns};
    if (!torch_tensor(r->torch, value, name, &piece.entry, err)) return false;
    if (cut && by_columns) piece.columns /= T;
    else if (cut) piece.rows /= T;
    const int64_t *shape = piece.entry.shape;
    if (piece.entry.dims != t->dims || shape[0] != piece.rows ||
        (t->dims == 2 && shape[1] != piece.columns)) {
        return ckpt_error(err,
                          "%s: '%.200s' does not have the size that the checkpoint's arguments imply; import "
                          "another checkpoint",
                          r->torch->file->path, name);
    }
    int64_t parts = t->halves ? 2 : 1;
    piece.rows /= parts;
    piece.count = piece.rows * piece.columns;
    if (cut && by_columns) piece.column = rank * piece.columns;
    else if (cut) piece.row = rank * piece.rows;
    for (int64_t i = 0; i < parts; i++) {
        if (!megatron_source_add(r->source, MEGATRON_WEIGHT, tensor, piece, name, err)) return false;
        piece.row += t->rows / 2;
        piece.at += piece.count;
    }
    return true;
}

static bool add_tensor(const Rank *r, const PickleValue *value, const char *name, Error *err) {
    int64_t per = r->source->gpt->L / (r->ranks.stages * r->ranks.chunks);
    int64_t first = (r->chunk * r->ranks.stages + r->stage) * per;
    int tensor;
    MegatronMeaning meaning = megatron_name(r->source->gpt, name, first, &tensor);
    if (meaning == MEGATRON_IGNORED) return true;
    if (meaning == MEGATRON_WHOLE) return add_part(r, tensor, value, name, err);
    return ckpt_error(err,
                      "%s has a tensor '%.200s', which does not belong to a model with its arguments; import "
                      "another checkpoint",
                      r->torch->file->path, name);
}

// Adds all tensors of a dict and its nested dicts. name: the dict's name, with a trailing dot.
static bool add_dict(Rank *r, const PickleValue *dict, const char *name, int level, Error *err) {
    bool holds = dict->kind == PICKLE_DICT || dict->kind == PICKLE_OBJECT;
    if (!holds || torch_is_tensor(dict)) return true;
    if (level > MOST_LEVELS) {
        return ckpt_error(err,
                          "%s is not a valid Megatron-LM checkpoint: its dicts are nested more than %d "
                          "levels deep; save or copy it again",
                          r->torch->file->path, MOST_LEVELS);
    }
    for (size_t i = 0; i + 1 < dict->count; i += 2) {
        const char *key = pickle_text(dict->items[i]);
        const PickleValue *value = dict->items[i + 1];
        if (++r->visited > MOST_VISITED)
            return ckpt_error(
                err,
                "%s is not a valid Megatron-LM checkpoint: it has too many values; save or copy it again",
                r->torch->file->path);
        if (!key) continue;
        bool tensor = torch_is_tensor(value);
        char *full = text_format("%s%s%s", name, key, tensor ? "" : ".");
        bool ok = tensor ? add_tensor(r, value, full, err) : add_dict(r, value, full, level + 1, err);
        free(full);
        if (!ok) return false;
    }
    return true;
}

static bool add_chunks(Rank *r, Error *err) {
    for (r->chunk = 0; r->chunk < r->ranks.chunks; r->chunk++) {
        char key[32] = "model";
        if (r->ranks.chunks > 1) snprintf(key, sizeof key, "model%" PRId64, r->chunk);
        const PickleValue *model = pickle_member(r->torch->pickle.root, key);
        if (!model)
            return ckpt_error(
                err, "%s is not a valid Megatron-LM checkpoint: it has no '%s'; save or copy it again",
                r->torch->file->path, key);
        if (!add_dict(r, model, "", 0, err)) return false;
    }
    return true;
}

static bool add_rank(MegatronSource *source, MegatronRanks ranks, int64_t tensor_rank, int64_t stage,
                     Error *err) {
    char name[80];
    TorchFile torch;
    if (ranks.stages == 1) {
        snprintf(name, sizeof name, "mp_rank_%02" PRId64 "/model_optim_rng.pt", tensor_rank);
    } else {
        snprintf(name, sizeof name, "mp_rank_%02" PRId64 "_%03" PRId64 "/model_optim_rng.pt", tensor_rank,
                 stage);
    }
    int place = megatron_source_file(source, name, err);
    if (place < 0) return false;
    const MegatronFile *file = source->files[place];
    if (!torch_file_read(&torch, &file->file, file->bytes, 0, file->bytes, err)) return false;
    Rank rank = {.source = source,
                 .torch = &torch,
                 .file = place,
                 .ranks = ranks,
                 .tensor_rank = tensor_rank,
                 .stage = stage};
    bool ok = add_chunks(&rank, err);
    torch_file_free(&torch);
    return ok;
}

bool megatron_legacy_list(MegatronSource *source, MegatronRanks ranks, Error *err) {
    if (source->gpt->L % (ranks.stages * ranks.chunks)) {
        return ckpt_error(err,
                          "%s has %d layers, which cannot be divided equally among its %" PRId64
                          " stages; import another checkpoint",
                          source->folder, source->gpt->L, ranks.stages * ranks.chunks);
    }
    for (int64_t stage = 0; stage < ranks.stages; stage++) {
        for (int64_t t = 0; t < ranks.tensor; t++) {
            if (!add_rank(source, ranks, t, stage, err)) return false;
        }
    }
    return true;
}
