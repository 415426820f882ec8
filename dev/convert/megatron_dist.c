// Reads Megatron-LM's `torch_dist` checkpoints, which use PyTorch's distributed format. See
// megatron_source.h. Contents of the folder:
//
//   .metadata        a pickled torch.distributed.checkpoint.metadata.Metadata:
//                    state_dict_metadata   name -> TensorStorageMetadata(size, ...) and others
//                    storage_data          MetadataIndex(name, offset) -> _StorageInfo(
//                                          relative_path, offset, length): a chunk
//                                          written by torch.save
//   __R_S.distcp     chunks written by writer S of rank R
//   common.pt        the arguments (megatron_args.c)
//   metadata.json    {"sharded_backend": "torch_dist", ...}
//
// All layers of a kind are stored as one tensor with the layer as its first dimension. SwiGLU's
// gate and up halves are separate chunks. Master weights that the distributed optimizer saved as
// parts of parameters ("fully sharded, model space") are contiguous element ranges of blocks: their
// size lists the number of blocks along each dimension, then the number of elements per block.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "dev/convert/megatron_source.h"

#define METADATA ".metadata"
static const char MASTER[] = "optimizer.state.fp32_param.";

// An entry of state_dict_metadata and the trainer's tensor that it maps to.
typedef struct Item {
    const char *name;
    int dims;  // -1: not a tensor
    int64_t size[SAFE_MOST_DIMS];
    MegatronKind kind;
    MegatronMeaning meaning;
    int tensor;
} Item;

typedef struct Listing {
    MegatronSource *source;
    Item *items;
    int count;  // sorted by name
} Listing;

static bool malformed(const Listing *l, const char *fault, Error *err) {
    return ckpt_error(err, "%s/" METADATA " cannot be read: %s; save or copy it again", l->source->folder,
                      fault);
}

// --- Names -------------------------------------------------------------------------------------

static int by_name(const void *a, const void *b) {
    return strcmp(((const Item *)a)->name, ((const Item *)b)->name);
}

// Returns true for entries that are not model weights: other optimizer state, random state, run
// state.
static bool is_other_state(const char *name) {
    static const char *const beginnings[] = {"optimizer.", "chained_", "rng_state", "rerun_state",
                                             "opt_param_scheduler"};
    for (size_t i = 0; i < sizeof beginnings / sizeof *beginnings; i++) {
        if (strncmp(name, beginnings[i], strlen(beginnings[i])) == 0) return true;
    }
    return false;
}

static Item item_of(const GPT *gpt, const char *name, const PickleValue *storage) {
    Item item = {.name = name, .kind = MEGATRON_WEIGHT, .meaning = MEGATRON_IGNORED};
    item.dims = pickle_sizes(pickle_member(storage, "size"), item.size, SAFE_MOST_DIMS);
    if (item.dims < 0) return item;
    const char *master = strstr(name, MASTER);
    if (!master && is_other_state(name)) return item;
    if (master) item.kind = MEGATRON_MASTER;
    item.meaning = megatron_name(gpt, master ? master + strlen(MASTER) : name, 0, &item.tensor);
    // The format stores a tied embedding once, so an output layer contradicts the arguments.
    if (gpt->tied && strstr(name, "output_layer.weight")) item.meaning = MEGATRON_UNKNOWN;
    return item;
}

static bool list_items(Listing *l, const PickleValue *names, Error *err) {
    if (!names || names->kind != PICKLE_DICT) return malformed(l, "it has no state_dict_metadata", err);
    l->items = xcalloc(names->count / 2 + 1, sizeof *l->items, "the names of a checkpoint");
    for (size_t i = 0; i + 1 < names->count; i += 2) {
        const char *name = pickle_text(names->items[i]);
        if (!name) return malformed(l, "a name is not a string", err);
        Item *item = &l->items[l->count++];
        *item = item_of(l->source->gpt, name, names->items[i + 1]);
        if (item->meaning != MEGATRON_UNKNOWN) continue;
        return ckpt_error(err,
                          "%s has a tensor '%.200s', which does not belong to a model with its arguments; "
                          "import another checkpoint",
                          l->source->folder, name);
    }
    qsort(l->items, (size_t)l->count, sizeof *l->items, by_name);
    return true;
}

// --- Chunks ------------------------------------------------------------------------------------

// Offset of a chunk in its item, and its size.
typedef struct Place {
    int dims;
    int64_t begin[SAFE_MOST_DIMS], size[SAFE_MOST_DIMS];
} Place;

// Returns a block of layer `layer`'s tensor. `size` and `begin` refer to the tensor's dimensions
// starting at `from`.
static MegatronPiece block_of(const MegatronTensor *t, const Place *p, int from, int64_t layer) {
    int64_t columns = t->dims == 2 ? p->size[from + 1] : 1, all = p->size[from] * columns;
    return (MegatronPiece){.row = p->begin[from],
                           .rows = p->size[from],
                           .column = t->dims == 2 ? p->begin[from + 1] : 0,
                           .columns = columns,
                           .count = all,
                           .at = layer * all};
}

// Sets *piece to a range of elements of the block with index begin[from], begin[from + 1], ... The
// item's size gives the number of blocks.
static bool run_of(const MegatronTensor *t, const Item *item, const Place *p, int from,
                   MegatronPiece *piece) {
    int64_t parts[2] = {1, 1}, at[2] = {0, 0}, whole[2] = {t->rows, t->columns};
    for (int d = 0; d < t->dims; d++) {
        parts[d] = item->size[from + d];
        at[d] = p->begin[from + d];
        if (parts[d] < 1 || whole[d] % parts[d] || at[d] >= parts[d] || p->size[from + d] != 1) return false;
    }
    int64_t rows = whole[0] / parts[0], columns = whole[1] / parts[1];
    if (item->size[from + t->dims] != rows * columns) return false;
    *piece = (MegatronPiece){.row = at[0] * rows,
                             .rows = rows,
                             .column = at[1] * columns,
                             .columns = columns,
                             .first = p->begin[from + t->dims],
                             .count = p->size[from + t->dims]};
    return true;
}

// Adds the chunk to its tensor, or to each layer that it covers.
static bool add_place(Listing *l, const Item *item, const Place *p, MegatronPiece at, Error *err) {
    const GPT *gpt = l->source->gpt;
    int stacked = item->meaning == MEGATRON_STACKED;
    const MegatronTensor *t = &l->source->tensors[item->kind][item->tensor];
    bool runs = item->dims == stacked + t->dims + 1, fits = runs || item->dims == stacked + t->dims;
    int64_t layers = stacked ? p->size[0] : 1, first = stacked ? p->begin[0] : 0;
    fits = fits && (!stacked || (item->size[0] == gpt->L && layers <= gpt->L && first <= gpt->L - layers));
    fits = fits && (!runs || layers == 1);
    int64_t whole[2] = {t->rows, t->columns};
    for (int d = 0; fits && !runs && d < t->dims; d++)
        fits = item->size[stacked + d] == whole[d] && p->size[stacked + d] <= whole[d];
    for (int64_t layer = 0; fits && layer < layers; layer++) {
        MegatronPiece piece = {0};
        if (runs) fits = run_of(t, item, p, stacked, &piece);
        else piece = block_of(t, p, stacked, layer);
        piece.file = at.file;
        piece.entry = at.entry;
        int tensor = item->tensor + (int)(first + layer) * gpt->layer_tensors;
        if (fits && !megatron_source_add(l->source, item->kind, tensor, piece, item->name, err)) return false;
    }
    return fits || ckpt_error(err,
                              "%s: '%.200s' does not have the size that the checkpoint's arguments imply; "
                              "import another checkpoint",
                              l->source->folder, item->name);
}

static bool plain_name(const char *name) { return name && *name && *name != '.' && !strchr(name, '/'); }

// Reads the header of a chunk that torch.save wrote at [offset, offset + length) of its file.
static bool read_piece(Listing *l, const Item *item, const PickleValue *info, Place *p, Error *err) {
    const char *name = pickle_text(pickle_member(info, "relative_path"));
    const PickleValue *changed = pickle_member(info, "transform_descriptors");
    int64_t begin, bytes;
    TorchFile torch;
    MegatronPiece at = {0};
    if (!plain_name(name) || !pickle_int(pickle_member(info, "offset"), 0, INT64_MAX, &begin) ||
        !pickle_int(pickle_member(info, "length"), 0, INT64_MAX, &bytes))
        return malformed(l, "a chunk has no location", err);
    if (changed && changed->kind != PICKLE_NONE && changed->count)
        return malformed(l, "its chunks are compressed", err);
    at.file = megatron_source_file(l->source, name, err);
    if (at.file < 0) return false;
    const MegatronFile *file = l->source->files[at.file];
    if (!torch_file_read(&torch, &file->file, file->bytes, (uint64_t)begin, (uint64_t)bytes, err))
        return false;
    bool ok = torch_tensor(&torch, torch.pickle.root, item->name, &at.entry, err);
    torch_file_free(&torch);
    if (!ok) return false;
    memcpy(p->size, at.entry.shape, sizeof p->size);
    if (at.entry.dims == item->dims && p->dims == item->dims) return add_place(l, item, p, at, err);
    return malformed(l, "a chunk and its tensor differ in dimensions", err);
}

static bool list_pieces(Listing *l, const PickleValue *pieces, Error *err) {
    if (!pieces || pieces->kind != PICKLE_DICT) return malformed(l, "it has no storage_data", err);
    for (size_t i = 0; i + 1 < pieces->count; i += 2) {
        const PickleValue *index = pieces->items[i];
        Item key = {.name = pickle_text(pickle_member(index, "fqn"))};
        if (!key.name) return malformed(l, "a chunk has no name", err);
        const Item *item = (const Item *)bsearch(&key, l->items, (size_t)l->count, sizeof key, by_name);
        if (!item || item->meaning == MEGATRON_IGNORED) continue;
        Place place = {0};
        place.dims = pickle_sizes(pickle_member(index, "offset"), place.begin, SAFE_MOST_DIMS);
        if (!read_piece(l, item, pieces->items[i + 1], &place, err)) return false;
    }
    return true;
}

bool megatron_dist_list(MegatronSource *source, Error *err) {
    Listing l = {.source = source};
    Pickle pickle;
    uint64_t bytes;
    char *path = text_format("%s/" METADATA, source->folder);
    char *data = durable_read_file(path, PICKLE_MAX_BYTES, &bytes, err);
    free(path);
    if (!data) return false;
    const char *fault = pickle_read(&pickle, data, (size_t)bytes);
    free(data);
    if (fault) return malformed(&l, fault, err);
    bool ok = list_items(&l, pickle_member(pickle.root, "state_dict_metadata"), err) &&
              list_pieces(&l, pickle_member(pickle.root, "storage_data"), err);
    free(l.items);
    pickle_free(&pickle);
    return ok;
}
