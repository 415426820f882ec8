// Tensors stored in chunks. See megatron_source.h.
#include "dev/convert/megatron_source.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/numerics.h"

// --- Tensors and files ---------------------------------------------------------------------------

static bool ends_with(const char *text, const char *ending) {
    size_t length = strlen(text), n = strlen(ending);
    return length >= n && strcmp(text + length - n, ending) == 0;
}

// SwiGLU's first matrix is (2, F*C) in the parameter table and (2F, C) in Megatron-LM: the same
// elements in the same order.
static MegatronTensor describe(const GPT *gpt, const Tensor *t) {
    MegatronTensor tensor = {.rows = t->whole[0], .columns = t->whole[1], .dims = t->dims, .split = t->split};
    bool weight = ends_with(t->name, "mlp.dense_h_to_4h.weight");
    if (gpt->swiglu && (weight || ends_with(t->name, "mlp.dense_h_to_4h.bias"))) {
        int64_t columns = weight ? gpt->C : 1, all = tensor_whole_elements(t);
        tensor = (MegatronTensor){.rows = all / columns,
                                  .columns = columns,
                                  .dims = weight ? 2 : 1,
                                  .halves = true};
    }
    if (tensor.dims == 1) tensor.columns = 1;
    return tensor;
}

void megatron_source_init(MegatronSource *source, const char *folder, const GPT *gpt) {
    *source = (MegatronSource){.folder = folder, .gpt = gpt};
    for (int kind = 0; kind < MEGATRON_KINDS; kind++) {
        source->tensors[kind] = xcalloc((size_t)gpt->whole_tensors, sizeof(MegatronTensor),
                                        "the parameter table");
        for (int i = 0; i < gpt->whole_tensors; i++) source->tensors[kind][i] = describe(gpt, &gpt->whole[i]);
    }
}

void megatron_source_free(MegatronSource *source) {
    for (int kind = 0; kind < MEGATRON_KINDS; kind++) {
        for (int i = 0; source->tensors[kind] && i < source->gpt->whole_tensors; i++)
            free(source->tensors[kind][i].pieces);
        free(source->tensors[kind]);
    }
    for (int i = 0; i < source->file_count; i++) {
        safe_file_close(&source->files[i]->file);
        free(source->files[i]);
    }
    free(source->files);
    free(source->narrow);
    *source = (MegatronSource){0};
}

int megatron_source_file(MegatronSource *source, const char *name, Error *err) {
    char *path = text_format("%s/%s", source->folder, name);
    int found = source->file_count - 1;
    while (found >= 0 && strcmp(source->files[found]->file.path, path) != 0) found--;
    if (found < 0) {
        MegatronFile *file = xcalloc(1, sizeof *file, "a file of a checkpoint");
        if (safe_open_plain(&file->file, path, &file->bytes, err)) {
            source->files = grow_array(source->files, source->file_count, sizeof *source->files,
                                       "the files of a checkpoint");
            found = source->file_count++;
            source->files[found] = file;
        } else {
            free(file);
        }
    }
    free(path);
    return found;
}

// --- Names ---------------------------------------------------------------------------------------

// Megatron-LM's name prefixes within a layer, and the trainer's. The first match counts.
typedef struct Name {
    const char *megatron, *trainer;
} Name;
static const Name IN_LAYER[] = {
    {"input_layernorm.", "input_norm."},
    {"self_attention.linear_qkv.layer_norm_", "input_norm."},
    {"self_attention.linear_qkv.", "self_attention.query_key_value."},
    {"self_attention.linear_proj.", "self_attention.dense."},
    {"attention.", "self_attention."},
    {"pre_mlp_layernorm.", "post_attention_norm."},
    {"mlp.linear_fc1.layer_norm_", "post_attention_norm."},
    {"post_attention_layernorm.", "post_attention_norm."},
    {"mlp.linear_fc1.", "mlp.dense_h_to_4h."},
    {"mlp.linear_fc2.", "mlp.dense_4h_to_h."},
};
static const Name OUTSIDE[] = {
    {"decoder.", "encoder."},
    {"transformer.", "encoder."},
};
static const Name FINAL[] = {{"final_layernorm.", "final_norm."}};
// Prefixes of all names of a model.
static const char *const MODEL_PREFIXES[] = {"module.", "language_model."};

// Returns the text after the prefix, or NULL.
static const char *after(const char *text, const char *beginning) {
    size_t n = strlen(beginning);
    return strncmp(text, beginning, n) == 0 ? text + n : NULL;
}

// Returns the trainer's name. malloc'ed.
static char *rename_by(const Name *rows, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++) {
        const char *rest = after(name, rows[i].megatron);
        if (rest) return text_format("%s%s", rows[i].trainer, rest);
    }
    return xstrdup(name);
}
#define RENAME(rows, name) rename_by(rows, sizeof(rows) / sizeof *(rows), name)

static int find_tensor(const GPT *gpt, const char *name) {
    for (int i = 0; i < gpt->whole_tensors; i++) {
        if (strcmp(gpt->whole[i].name, name) == 0) return i;
    }
    return -1;
}

// Returns true for entries without weights: extra state of modules, rotary position constants, and
// copies of the embedding on the last stage.
static bool is_ignored(const GPT *gpt, const char *name) {
    return strstr(name, "_extra_state") || ends_with(name, "inv_freq") ||
           after(name, "word_embeddings_for_head.") ||
           (gpt->tied && strcmp(name, "output_layer.weight") == 0);
}

// Parses layers.3.REST or layers.REST, after "encoder.".
static MegatronMeaning in_layer(const GPT *gpt, const char *name, int64_t first_layer, int *tensor) {
    MegatronMeaning meaning = MEGATRON_STACKED;
    int64_t layer = 0;
    if (*name >= '0' && *name <= '9') {
        char *end;
        layer = strtoll(name, &end, 10);
        if (*end != '.' || layer >= gpt->L) return MEGATRON_UNKNOWN;
        layer += first_layer;
        name = end + 1;
        meaning = MEGATRON_WHOLE;
    }
    char *rest = RENAME(IN_LAYER, name), *full = text_format("encoder.layers.%" PRId64 ".%s", layer, rest);
    *tensor = find_tensor(gpt, full);
    free(rest);
    free(full);
    return *tensor < 0 ? MEGATRON_UNKNOWN : meaning;
}

static MegatronMeaning outside_layers(const GPT *gpt, const char *name, int *tensor) {
    const char *of_blocks = after(name, "encoder.");
    char *rest = of_blocks ? RENAME(FINAL, of_blocks) : xstrdup(name);
    char *full = text_format("%s%s", of_blocks ? "encoder." : "", rest);
    *tensor = find_tensor(gpt, full);
    free(rest);
    free(full);
    return *tensor < 0 ? MEGATRON_UNKNOWN : MEGATRON_WHOLE;
}

MegatronMeaning megatron_name(const GPT *gpt, const char *name, int64_t first_layer, int *tensor) {
    for (size_t i = 0; i < sizeof MODEL_PREFIXES / sizeof *MODEL_PREFIXES; i++) {
        while (after(name, MODEL_PREFIXES[i])) name = after(name, MODEL_PREFIXES[i]);
    }
    if (is_ignored(gpt, name)) return MEGATRON_IGNORED;
    char *renamed = RENAME(OUTSIDE, name);
    const char *layer = after(renamed, "encoder.layers.");
    MegatronMeaning meaning = layer ? in_layer(gpt, layer, first_layer, tensor)
                                    : outside_layers(gpt, renamed, tensor);
    free(renamed);
    return meaning;
}

// --- Chunks -------------------------------------------------------------------------------------

static bool within(int64_t first, int64_t count, int64_t all) {
    return first >= 0 && count >= 0 && first <= all && count <= all - first;
}

bool megatron_source_add(MegatronSource *source, MegatronKind kind, int tensor, MegatronPiece piece,
                         const char *name, Error *err) {
    MegatronTensor *t = &source->tensors[kind][tensor];
    int width = safe_float_bytes(piece.entry.dtype);
    const char *path = source->files[piece.file]->file.path;
    if (!width) {
        return ckpt_error(
            err, "%s: '%.200s' has a dtype other than fp32, bf16 and fp16; import another checkpoint", path,
            name);
    }
    if (!within(piece.row, piece.rows, t->rows) || !within(piece.column, piece.columns, t->columns) ||
        !within(piece.first, piece.count, piece.rows * piece.columns) ||
        !within(piece.at, piece.count, (int64_t)(piece.entry.bytes / (uint64_t)width))) {
        return ckpt_error(err,
                          "%s: '%.200s' does not have the size that the checkpoint's arguments imply; import "
                          "another checkpoint",
                          path, name);
    }
    t->pieces = grow_array(t->pieces, t->count, sizeof *t->pieces, "a tensor's chunks");
    t->pieces[t->count++] = piece;
    return true;
}

bool megatron_source_complete(const MegatronSource *source, MegatronKind kind, int *missing) {
    for (int i = 0; i < source->gpt->whole_tensors; i++) {
        const MegatronTensor *t = &source->tensors[kind][i];
        int64_t left = t->rows * t->columns;
        for (int p = 0; p < t->count && left >= 0; p++) left -= t->pieces[p].count;
        *missing = i;
        if (left != 0) return false;
    }
    return true;
}

// --- Elements -----------------------------------------------------------------------------------

// Marker for elements that no chunk has filled: a NaN that valid checkpoints do not contain.
#define HOLE 0x7FB00B1Eu

typedef struct Interval {
    int64_t lo, hi;
    float *out;
} Interval;

// Reads the intersection of `want`, the chunk, and a run of `count` elements. The run starts at
// element `element` of the chunk's block, which is element `begin` of the tensor.
static bool read_run(MegatronSource *source, const MegatronPiece *p, Interval want, int64_t begin,
                     int64_t element, int64_t count, Error *err) {
    int64_t skip = want.lo > begin ? want.lo - begin : 0;
    int64_t end = want.hi - begin < count ? want.hi - begin : count;
    if (p->first - element > skip) skip = p->first - element;
    if (p->first + p->count - element < end) end = p->first + p->count - element;
    if (skip >= end) return true;
    int64_t from = p->at + element + skip - p->first;
    return safe_file_read(&source->files[p->file]->file, &p->entry, from, end - skip, source->narrow,
                          want.out + (begin + skip - want.lo), err);
}

// Reads a block of whole rows as one contiguous range, and any other block row by row.
static bool read_piece(MegatronSource *source, const MegatronTensor *t, const MegatronPiece *p, Interval want,
                       Error *err) {
    if (p->columns == t->columns)
        return read_run(source, p, want, p->row * t->columns, 0, p->rows * t->columns, err);
    int64_t first = want.lo / t->columns - p->row, end = ceil_div64(want.hi, t->columns) - p->row;
    if (first < 0) first = 0;
    if (end > p->rows) end = p->rows;
    for (int64_t row = first; row < end; row++) {
        int64_t begin = (p->row + row) * t->columns + p->column;
        if (!read_run(source, p, want, begin, row * p->columns, p->columns, err)) return false;
    }
    return true;
}

bool megatron_source_read(MegatronSource *source, MegatronKind kind, int tensor, int64_t lo, int64_t hi,
                          float *out, Error *err) {
    assert(lo >= 0 && lo <= hi);
    const MegatronTensor *t = &source->tensors[kind][tensor];
    const float hole = f32_from_bits(HOLE);
    if (hi - lo > source->narrow_room) {
        source->narrow_room = hi - lo;
        source->narrow = xrealloc(source->narrow, (size_t)(hi - lo) * sizeof(float), "a chunk of a tensor");
    }
    for (int64_t i = 0; i < hi - lo; i++) memcpy(&out[i], &hole, sizeof hole);
    for (int i = 0; i < t->count; i++) {
        if (!read_piece(source, t, &t->pieces[i], (Interval){lo, hi, out}, err)) return false;
    }
    for (int64_t i = 0; i < hi - lo; i++) {
        if (memcmp(&out[i], &hole, sizeof hole) == 0)
            return ckpt_error(err,
                              "%s is not a valid Megatron-LM checkpoint: some elements of '%s' are in two "
                              "chunks, others in none; save or copy it again",
                              source->folder, source->gpt->whole[tensor].name);
    }
    return true;
}
