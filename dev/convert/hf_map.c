// Maps elements between the trainer's tensors and Hugging Face's. See hf_map.h.
#include "dev/convert/hf_map.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// --- Construction -------------------------------------------------------------------------------

// Replaces the layer number with "*" and returns it in *layer: "encoder.layers.3.mlp" becomes
// "encoder.layers.*.mlp".
static void pattern_of(const char *name, char pattern[96], int *layer) {
    static const char begin[] = "encoder.layers.";
    size_t before = strlen(begin);
    *layer = 0;
    snprintf(pattern, 96, "%s", name);
    if (strncmp(name, begin, before) != 0) return;
    char *end;
    *layer = (int)strtol(name + before, &end, 10);
    snprintf(pattern, 96, "%s*%s", begin, end);
}

static const HfRow *row_of(const HfFamily *family, const char *pattern) {
    for (int i = 0; i < family->row_count; i++) {
        if (strcmp(family->rows[i].trainer, pattern) == 0) return &family->rows[i];
    }
    return family->like ? row_of(family->like, pattern) : NULL;
}

static void name_tensor(char name[96], const char *pattern, int layer) {
    const char *star = strchr(pattern, '*');
    if (!star) snprintf(name, 96, "%s", pattern);
    else snprintf(name, 96, "%.*s%d%s", (int)(star - pattern), pattern, layer, star + 1);
}

// Returns the number of outputs of a part: queries (part 0), keys or values.
static int64_t head_outputs(const GPT *gpt, int part) { return part == 0 ? gpt->A : gpt->NG * gpt->HD; }

static void add_tensor(HfMap *map, int whole, int part, int layer) {
    const HfWhole *o = &map->whole[whole];
    bool vector = map->gpt->whole[whole].dims == 1;
    int64_t outputs = o->row->order == HF_WORDS    ? map->words
                      : o->row->order == HF_HALVES ? o->rows / 2
                      : o->count == 1              ? o->rows
                                                   : head_outputs(map->gpt, part);
    HfTensor *t = &map->tensors[map->count++];
    *t = (HfTensor){.whole = whole, .part = part, .rows = outputs, .columns = vector ? 0 : o->columns};
    name_tensor(t->name, o->row->hf[part], layer);
    t->transposed = o->row->transposed;
    if (!t->transposed) return;
    t->rows = o->columns;
    t->columns = outputs;
}

static void add_whole(HfMap *map, int i) {
    const Tensor *tensor = &map->gpt->whole[i];
    HfWhole *o = &map->whole[i];
    char pattern[96];
    int layer;
    pattern_of(tensor->name, pattern, &layer);
    o->row = row_of(map->family, pattern);
    if (!o->row) fatal(NULL, EXIT_CHECKPOINT, "%s has no name for %s", map->family->name, tensor->name);
    while (o->count < 3 && o->row->hf[o->count]) o->count++;
    o->rows = o->row->order == HF_HALVES ? 2 * (int64_t)map->gpt->F : tensor->whole[0];
    o->columns = tensor_whole_elements(tensor) / o->rows;
    o->first = map->count;
    for (int part = 0; part < o->count; part++) add_tensor(map, i, part, layer);
}

void hf_map_make(HfMap *map, const HfFamily *family, const ImportedModel *model, int64_t words) {
    int tensors = model->gpt.whole_tensors;
    *map = (HfMap){.family = family, .gpt = &model->gpt, .words = words};
    map->whole = xcalloc((size_t)tensors, sizeof *map->whole, "the parameter table");
    map->tensors = xcalloc(3 * (size_t)tensors, sizeof *map->tensors, "the parameter table");
    for (int i = 0; i < tensors; i++) add_whole(map, i);
}

void hf_map_free(HfMap *map) {
    free(map->whole);
    free(map->tensors);
    *map = (HfMap){0};
}

// --- Heads ---------------------------------------------------------------------------------------

// Returns the rows of a query group: its queries, its key and its value.
static int64_t group_rows(const GPT *gpt) { return (gpt->NH / gpt->NG + 2) * (int64_t)gpt->HD; }

// Returns the trainer's row for output `output` of the queries (part 0), keys or values.
static int64_t row_of_head(const GPT *gpt, int part, int64_t output) {
    int64_t heads = gpt->NH / gpt->NG, head = output / gpt->HD, at = output % gpt->HD;
    if (part > 0) return head * group_rows(gpt) + (heads + part - 1) * gpt->HD + at;
    return head / heads * group_rows(gpt) + head % heads * gpt->HD + at;
}

// Returns the part that contains output `output` of the fused QKV tensor, and makes *output
// relative to that part.
static int part_of_output(const GPT *gpt, int64_t *output) {
    int part = 0;
    while (part < 2 && *output >= head_outputs(gpt, part)) *output -= head_outputs(gpt, part++);
    return part;
}

// --- Mapping ------------------------------------------------------------------------------------

int64_t hf_map_run(const HfMap *map, const HfTensor *t, int64_t output, int64_t *row) {
    assert(output >= 0 && output < (t->transposed ? t->columns : t->rows));
    const HfWhole *o = &map->whole[t->whole];
    int64_t outputs = t->transposed ? t->columns : t->rows;
    *row = o->row->order == HF_HALVES ? t->part * (o->rows / 2) + output : output;
    if (o->row->order != HF_HEADS) return outputs - output;
    int part = t->part;
    if (o->count == 1) part = part_of_output(map->gpt, &output);
    *row = row_of_head(map->gpt, part, output);
    return map->gpt->HD - output % map->gpt->HD;
}

int64_t hf_map_unit(const HfMap *map, int whole) {
    return map->whole[whole].row->order == HF_HEADS ? group_rows(map->gpt) : 1;
}

// Appends outputs [begin, end) to the list unless the range is empty.
static int add_part(HfPart *parts, int count, const HfTensor *t, int64_t begin, int64_t end) {
    if (begin >= end) return count;
    parts[count] = (HfPart){t, begin, end - begin};
    return count + 1;
}

static int parts_of_heads(const HfMap *map, const HfWhole *o, int64_t row, int64_t rows, HfPart parts[3]) {
    const GPT *gpt = map->gpt;
    int64_t before = 0, group = row / group_rows(gpt), groups = rows / group_rows(gpt);
    int count = 0;
    for (int part = 0; part < 3; part++) {
        int64_t each = head_outputs(gpt, part) / gpt->NG, begin = before + group * each;
        const HfTensor *t = &map->tensors[o->first + (o->count == 1 ? 0 : part)];
        count = add_part(parts, count, t, begin, begin + groups * each);
        if (o->count == 1) before += head_outputs(gpt, part);
    }
    return count;
}

int hf_map_parts(const HfMap *map, int whole, int64_t row, int64_t rows, HfPart parts[3]) {
    assert(row >= 0 && rows >= 0 && row + rows <= map->whole[whole].rows);
    const HfWhole *o = &map->whole[whole];
    const HfTensor *t = &map->tensors[o->first];
    int64_t end = row + rows, half = o->rows / 2;
    if (o->row->order == HF_HEADS) return parts_of_heads(map, o, row, rows, parts);
    if (o->row->order == HF_HALVES) {
        int count = add_part(parts, 0, t, row, end < half ? end : half);
        return add_part(parts, count, t + 1, row > half ? row - half : 0, end - half);
    }
    bool cut = o->row->order == HF_WORDS && end > map->words;
    return add_part(parts, 0, t, row, cut ? map->words : end);
}

int64_t hf_map_place(const HfMap *map, int whole, int64_t r, int64_t rows) {
    assert(r >= 0 && r < rows);
    const GPT *gpt = map->gpt;
    if (map->whole[whole].row->order != HF_HEADS) return r;
    int64_t heads = gpt->NH / gpt->NG, groups = rows / group_rows(gpt);
    int64_t group = r / group_rows(gpt), head = r % group_rows(gpt) / gpt->HD, at = r % gpt->HD;
    if (head < heads) return (group * heads + head) * gpt->HD + at;
    return (groups * head + group) * gpt->HD + at;
}
