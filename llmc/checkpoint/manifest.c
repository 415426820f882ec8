// Writes and parses manifest.json. See manifest.h. Called by checkpoint.c and checkpoint_load.c.
#include "llmc/checkpoint/manifest.h"

#include <assert.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "llmc/base/dtype.h"
#include "llmc/base/json.h"
#include "llmc/base/json_line.h"
#include "llmc/base/numerics.h"
#include "llmc/checkpoint/safetensors.h"
#include "llmc/base/version.h"
#include "llmc/config/config.h"

#define FORMAT "sdp4bit.c checkpoint"
enum { FORMAT_VERSION = 3, VERSION_OF_FIRST_KINDS = 2, TAIL_BYTES = 29, MOST_NODES = 1 << 20 };
#define MAX_ELEMENTS ((int64_t)1 << 48)

// The fields of the state, for writing and reading. A field missing here would be lost on resume;
// the static assert below checks the number of fields.
typedef struct StateField {
    const char *name;
    size_t offset;
    bool real;
    bool optional;  // added after format version 1: 0 in checkpoints without it
} StateField;
#define INTEGER(field) \
    { #field, offsetof(RunState, field), false, false }
#define OPTIONAL_INTEGER(name, field) \
    { name, offsetof(RunState, field), false, true }
#define REAL(field) \
    { #field, offsetof(RunState, field), true, false }
static const StateField STATE[] = {
    INTEGER(iteration),
    INTEGER(consumed_train_samples),
    INTEGER(consumed_valid_samples),
    INTEGER(scheduler_samples),
    INTEGER(adam_steps),
    REAL(beta1_power),
    REAL(beta2_power),
    INTEGER(skipped_iterations),
    INTEGER(nan_iterations),
    REAL(flops_so_far),
    INTEGER(spikes),
    INTEGER(spikes_seen),
    INTEGER(skipped_in_a_row),
    INTEGER(repairs),
    OPTIONAL_INTEGER("met_at", outer_applied_at),
    OPTIONAL_INTEGER("train_split_samples", train_split_samples),
    OPTIONAL_INTEGER("valid_split_samples", valid_split_samples),
    OPTIONAL_INTEGER("samples_next", samples_next),
    OPTIONAL_INTEGER("samples_end", samples_end),
    OPTIONAL_INTEGER("samples_spare", samples_spare),
    OPTIONAL_INTEGER("samples_dealt", samples_dealt),
    OPTIONAL_INTEGER("left", left),
    REAL(loss_mean),
    REAL(loss_deviation),
    REAL(norm_mean),
    REAL(norm_deviation),
};
enum { STATE_FIELDS = sizeof STATE / sizeof *STATE };
_Static_assert(sizeof(RunState) == 8 * STATE_FIELDS, "every field of RunState must be in STATE");

const char *slice_kind_dtype(SliceKind kind) { return slice_kind_bytes(kind) == 4 ? "F32" : "BF16"; }

Columns slice_block(const Tensor *t, Columns columns) {
    return columns.count ? columns : (Columns){0, t->whole[1]};
}

bool slice_fits(const Tensor *t, Columns block, int64_t lo, int64_t hi) {
    return block.count >= 1 && block.count <= t->whole[1] && block.first >= 0 &&
           block.first <= t->whole[1] - block.count && lo >= 0 && lo <= hi && hi <= t->whole[0] * block.count;
}

char *slice_name(const Tensor *t, SliceKind kind, int64_t lo, Columns block, int node) {
    char columns[64] = "", of[32] = "";
    if (block.count < t->whole[1])
        snprintf(columns, sizeof columns, "|%" PRId64 "+%" PRId64, block.first, block.count);
    if (slice_kind_per_node(kind)) snprintf(of, sizeof of, "|node %d", node);
    return text_format("%s|%s|%" PRId64 "%s%s", t->name, slice_kind_name(kind), lo, columns, of);
}

// --- Writing -------------------------------------------------------------------------------------

char *manifest_file_entry(const Tensor *tensors, const ManifestFile *file, const ManifestSlice *slices,
                          size_t *bytes) {
    Text out = {0};
    text_add(&out,
             "{\"folder\": \"%s\", \"name\": \"%s\", \"bytes\": %" PRIu64 ", \"xxh3\": \"%016" PRIx64
             "\", \"slices\": [",
             file->folder, file->name, file->bytes, file->xxh3);
    for (int i = 0; i < file->count; i++) {
        const ManifestSlice *s = &slices[i];
        text_add(&out, "%s[%d,%d,%" PRId64 ",%" PRId64, i ? "," : "", s->tensor, s->kind, s->lo, s->hi);
        if (s->block.count < tensors[s->tensor].whole[1])
            text_add(&out, ",%" PRId64 ",%" PRId64, s->block.first, s->block.count);
        if (slice_kind_per_node(s->kind)) text_add(&out, ",%d", s->node);
        text_add(&out, "]");
    }
    text_add(&out, "]}");
    *bytes = out.length;
    return out.data;
}

static void write_state(Text *out, const RunState *state) {
    text_add(out, "{");
    for (int i = 0; i < STATE_FIELDS; i++) {
        const void *field = (const char *)state + STATE[i].offset;
        text_add(out, "%s\"%s\": ", i ? ", " : "", STATE[i].name);
        if (STATE[i].real) {
            text_add(out, "\"%a\"", *(const double *)field);
        } else {
            text_add(out, "%" PRId64, *(const int64_t *)field);
        }
    }
    text_add(out, "}");
}

// Writes the run's state and, if nodes train independently, the nodes' states.
static void write_states(Text *out, const ManifestRun *run) {
    text_add(out, "\"state\": ");
    write_state(out, run->state);
    text_add(out, ",\n");
    if (run->node_state_count == 0) return;
    text_add(out, "\"nodes\": [\n");
    for (int i = 0; i < run->node_state_count; i++) {
        write_state(out, &run->node_states[i]);
        text_add(out, "%s\n", i + 1 < run->node_state_count ? "," : "");
    }
    text_add(out, "],\n");
}

static void write_floats(Text *out, const char *name, const float *value, int64_t count) {
    text_add(out, "\"%s\": \"", name);
    for (int64_t i = 0; i < count; i++) text_add(out, "%08" PRIx32, f32_bits(value[i]));
    text_add(out, "\"");
}

static void write_fp8(Text *out, const Fp8State *fp8) {
    if (!fp8 || fp8->scales == 0) return;
    text_add(out, "\"fp8_scaling\": {\"history_length\": %d, ", fp8->length);
    write_floats(out, "scales", fp8->scale, fp8->scales);
    text_add(out, ",\n");
    write_floats(out, "history", fp8->history, (int64_t)fp8->scales * fp8->length);
    text_add(out, "},\n");
}

static void write_tensors(Text *out, const ManifestRun *run, int kinds) {
    text_add(out, "\"tensors\": [\n");
    for (int i = 0; i < run->tensor_count; i++) {
        const Tensor *t = &run->tensors[i];
        text_add(out, "{\"name\": ");
        text_add_quoted(out, t->name);
        text_add(out, ", \"shape\": [");
        for (int d = 0; d < t->dims; d++) text_add(out, "%s%" PRId64, d ? ", " : "", t->whole[d]);
        text_add(out, "]}%s\n", i + 1 < run->tensor_count ? "," : "");
    }
    text_add(out, "],\n\"kinds\": [");
    for (int k = 0; k < kinds; k++) text_add(out, "%s\"%s\"", k ? ", " : "", slice_kind_name((SliceKind)k));
    text_add(out, "],\n");
}

// Formats the last line: exactly TAIL_BYTES characters.
static void tail_text(char tail[TAIL_BYTES + 1], const void *text, size_t bytes) {
    snprintf(tail, TAIL_BYTES + 1, "\"xxh3\": \"%016" PRIx64 "\"\n}\n", XXH3_64bits(text, bytes));
}

char *manifest_text(const ManifestRun *run, int world_size, int kinds, const char *entries,
                    size_t entries_bytes, size_t *bytes) {
    assert(kinds >= 0 && kinds <= SLICE_KINDS);
    char libraries[512], tail[TAIL_BYTES + 1];
    Text out = {0};
    version_libraries(libraries, sizeof libraries);
    text_add(&out,
             "{\n\"format\": \"%s\", \"version\": %d,\n\"program\": \"sdp4bit.c %s\", \"commit\": ", FORMAT,
             kinds > (int)FIRST_KINDS ? FORMAT_VERSION : VERSION_OF_FIRST_KINDS, version_number());
    text_add_quoted(&out, version_commit());
    text_add(&out, ", \"libraries\": ");
    text_add_quoted(&out, libraries);
    text_add(&out, ",\n\"world_size\": %d, \"weight_dtype\": \"%s\",\n", world_size,
             slice_kind_dtype(SLICE_WEIGHT));
    write_states(&out, run);
    write_fp8(&out, run->fp8);
    base_model_write(&out, run->base);
    text_add(&out, "\"arguments\": %s,\n", run->arguments_json ? run->arguments_json : "{}");
    write_tensors(&out, run, kinds > (int)FIRST_KINDS ? kinds : (int)FIRST_KINDS);
    text_add(&out, "\"files\": [\n");
    text_add_bytes(&out, entries, entries_bytes);
    text_add(&out, "\n],\n");
    tail_text(tail, out.data, out.length);
    text_add_bytes(&out, tail, TAIL_BYTES);
    *bytes = out.length;
    return out.data;
}

// --- Reading -------------------------------------------------------------------------------------

static bool damaged(Error *err, const char *path, const char *fault) {
    return ckpt_error(err, "%s is damaged: %s; restore it from a copy or load another checkpoint", path,
                      fault);
}

static const char *parse_state(const cJSON *state, RunState *out) {
    for (int i = 0; i < STATE_FIELDS; i++) {
        void *field = (char *)out + STATE[i].offset;
        char *end = NULL;
        if (STATE[i].optional && !cJSON_HasObjectItem(state, STATE[i].name)) {
            *(int64_t *)field = 0;
            continue;
        }
        if (!STATE[i].real) {
            if (!json_member_int64(state, STATE[i].name, 0, JSON_INT_MAX, field))
                return "a counter in \"state\" is missing or out of range";
            continue;
        }
        const char *text = json_member_string(state, STATE[i].name);
        double value = text ? strtod(text, &end) : 0;
        if (!text || !*text || *end || !isfinite(value))
            return "a number in \"state\" is missing or malformed";
        *(double *)field = value;
    }
    return NULL;
}

// Parses the states of the nodes, if there are any.
static const char *parse_node_states(const cJSON *list, Manifest *m) {
    int count = list ? cJSON_GetArraySize(list) : 0;
    if (!list) return NULL;
    if (!cJSON_IsArray(list) || count > MOST_NODES) return "its \"nodes\" is not a valid list";
    m->node_states = xcalloc((size_t)count + 1, sizeof(RunState), "a checkpoint's nodes");
    for (const cJSON *item = list->child; item; item = item->next) {
        const char *fault = parse_state(item, &m->node_states[m->node_state_count++]);
        if (fault) return fault;
    }
    return NULL;
}

// Parses `count` numbers that are finite and at least 0.
static bool parse_floats(const char *text, float *value, int64_t count) {
    const uint32_t infinity = 0x7F800000u;
    for (int64_t i = 0; i < count; i++, text += 8) {
        char digits[9] = "", *end;
        memcpy(digits, text, 8);
        if (strspn(digits, "0123456789abcdef") != 8) return false;
        value[i] = f32_from_bits((uint32_t)strtoul(digits, &end, 16));
        if (f32_bits(value[i]) >= infinity) return false;
    }
    return true;
}

// Parses the state of delayed FP8 scaling, if there is one.
static const char *parse_fp8(const cJSON *object, Fp8State *fp8) {
    static const char *const malformed = "its \"fp8_scaling\" is malformed";
    int64_t length;
    if (!object) return NULL;
    const char *scales = json_member_string(object, "scales"),
               *history = json_member_string(object, "history");
    if (!scales || !history || !json_member_int64(object, "history_length", 1, MANIFEST_MAX_BYTES, &length))
        return malformed;
    size_t count = strlen(scales) / 8;
    if (count == 0 || strlen(scales) != 8 * count || strlen(history) != 8 * count * (size_t)length)
        return malformed;
    *fp8 = fp8_state_new((int)count, (int)length);
    bool ok = parse_floats(scales, fp8->scale, fp8->scales) &&
              parse_floats(history, fp8->history, (int64_t)fp8->scales * fp8->length);
    for (int i = 0; ok && i < fp8->scales; i++) ok = fp8->scale[i] >= FLT_MIN;  // as fp8_scale
    return ok ? NULL : malformed;
}

static int compare_tensor_names(const void *a, const void *b) {
    return strcmp((*(const Tensor *const *)a)->name, (*(const Tensor *const *)b)->name);
}

static bool tensor_names_differ(const Manifest *m) {
    const Tensor **sorted = xcalloc((size_t)m->tensor_count + 1, sizeof *sorted, "parameter names");
    for (int i = 0; i < m->tensor_count; i++) sorted[i] = &m->tensors[i];
    qsort(sorted, (size_t)m->tensor_count, sizeof *sorted, compare_tensor_names);
    bool differ = true;
    for (int i = 1; i < m->tensor_count && differ; i++)
        differ = compare_tensor_names(&sorted[i - 1], &sorted[i]) != 0;
    free(sorted);
    return differ;
}

static const char *parse_tensor(const cJSON *item, Tensor *t) {
    const char *name = json_member_string(item, "name");
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(item, "shape"), *size;
    if (!name || !cJSON_IsArray(shape)) return "a tensor has no name or shape";
    if (strlen(name) >= sizeof t->name) return "a tensor's name is too long";
    strcpy(t->name, name);
    int64_t elements = 1;
    t->whole[0] = t->whole[1] = 1;
    cJSON_ArrayForEach(size, shape) {
        if (t->dims == 2 || !json_int64(size, 1, JSON_INT_MAX, &t->whole[t->dims]))
            return "a tensor's shape is malformed";
        bool too_many = __builtin_mul_overflow(elements, t->whole[t->dims++], &elements);
        if (too_many || elements > MAX_ELEMENTS) return "a tensor's shape is invalid";
    }
    return t->dims ? NULL : "a tensor's shape is invalid";
}

static const char *parse_tensors(const cJSON *list, Manifest *m) {
    if (!cJSON_IsArray(list)) return "it has no list of tensors";
    m->tensors = xcalloc((size_t)cJSON_GetArraySize(list) + 1, sizeof *m->tensors,
                         "a checkpoint's parameter table");
    for (const cJSON *item = list->child; item; item = item->next) {
        const char *fault = parse_tensor(item, &m->tensors[m->tensor_count++]);
        if (fault) return fault;
    }
    return tensor_names_differ(m) ? NULL : "two tensors have the same name";
}

static const char *parse_kinds(const cJSON *list, Manifest *m) {
    static const char *const unknown = "it has slice kinds that this program does not know";
    bool seen[SLICE_KINDS] = {false};
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) > SLICE_KINDS) return unknown;
    for (const cJSON *item = list->child; item; item = item->next) {
        int k = 0;
        while (k < SLICE_KINDS && cJSON_IsString(item) &&
               strcmp(item->valuestring, slice_kind_name((SliceKind)k)) != 0)
            k++;
        if (!cJSON_IsString(item) || k == SLICE_KINDS) return unknown;
        if (seen[k]) return "its list of slice kinds has a duplicate";
        seen[k] = true;
        m->kinds[m->kind_count++] = (SliceKind)k;
    }
    return NULL;
}

// Returns true if the name cannot lead out of the checkpoint's folder.
static bool plain_name(const char *name) {
    return name && *name && *name != '.' && !strchr(name, '/') && strlen(name) <= 200;
}

// Parses tensor, kind, lo and hi, then the columns of a block that is not the whole tensor, then
// the node of a per-node kind.
static const char *parse_slice(const cJSON *item, Manifest *m, ManifestSlice *s) {
    static const char *const malformed = "a slice is not [tensor, kind, lo, hi]";
    int64_t number[7];
    int count = cJSON_GetArraySize(item);
    if (!cJSON_IsArray(item) || count < 4 || count > 7) return malformed;
    const cJSON *value = item->child;
    for (int i = 0; i < count; i++, value = value->next) {
        if (!json_int64(value, 0, JSON_INT_MAX, &number[i])) number[i] = -1;
    }
    if (number[0] < 0 || number[0] >= m->tensor_count) return "a slice names an unknown tensor";
    if (number[1] < 0 || number[1] >= m->kind_count) return "a slice names an unknown kind";
    const Tensor *t = &m->tensors[number[0]];
    s->tensor = (int)number[0];
    s->kind = m->kinds[number[1]];
    s->lo = number[2];
    s->hi = number[3];
    int64_t node = slice_kind_per_node(s->kind) ? number[--count] : 0;
    if (count != 4 && count != 6) return malformed;
    if (node < 0 || node >= MOST_NODES) return "a slice names an invalid node";
    s->node = (int)node;
    if (s->node >= m->nodes[s->kind]) m->nodes[s->kind] = s->node + 1;
    s->block = count == 6 ? (Columns){number[4], number[5]} : slice_block(t, (Columns){0, 0});
    return s->lo < s->hi && slice_fits(t, s->block, s->lo, s->hi) ? NULL
                                                                  : "a slice's range is outside its tensor";
}

static const char *parse_slices(const cJSON *list, Manifest *m, int file, int weight_bytes) {
    ManifestFile *f = &m->files[file];
    uint64_t begin = 0;
    f->first = m->slice_count;
    for (const cJSON *item = list->child; item; item = item->next) {
        ManifestSlice *s = &m->slices[m->slice_count++];
        const char *fault = parse_slice(item, m, s);
        if (fault) return fault;
        s->file = file;
        s->begin = begin;
        begin += (uint64_t)(s->hi - s->lo) * (uint64_t)(slice_kind_of_weights(s->kind) ? weight_bytes : 4);
        if (begin > f->bytes) return "a file is too small for its slices";
    }
    f->count = m->slice_count - f->first;
    f->data_bytes = begin;
    return NULL;
}

static const char *parse_file(const cJSON *item, Manifest *m, int weight_bytes) {
    const char *folder = json_member_string(item, "folder"), *name = json_member_string(item, "name");
    const cJSON *slices = cJSON_GetObjectItemCaseSensitive(item, "slices");
    ManifestFile *f = &m->files[m->file_count];
    int64_t bytes;
    if (!plain_name(folder) || !plain_name(name)) return "a file's name is not a plain name";
    f->folder = xstrdup(folder);
    f->name = xstrdup(name);
    m->file_count++;
    if (!json_member_int64(item, "bytes", 0, JSON_INT_MAX, &bytes)) return "a file has no size";
    if (!json_member_hash(item, "xxh3", &f->xxh3)) return "a file has no hash";
    f->bytes = (uint64_t)bytes;
    return cJSON_IsArray(slices) ? parse_slices(slices, m, m->file_count - 1, weight_bytes)
                                 : "a file has no slices";
}

static const char *parse_files(const cJSON *list, Manifest *m) {
    int weight_bytes = safe_dtype_bytes(m->weight_dtype);
    if (!cJSON_IsArray(list)) return "it has no list of files";
    int64_t slices = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, list)
        slices += cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(item, "slices"));
    m->files = xcalloc((size_t)cJSON_GetArraySize(list) + 1, sizeof *m->files, "a checkpoint's file table");
    m->slices = xcalloc((size_t)slices + 1, sizeof *m->slices, "a checkpoint's slice table");
    cJSON_ArrayForEach(item, list) {
        const char *fault = parse_file(item, m, weight_bytes);
        if (fault) return fault;
    }
    return NULL;
}

static int compare_slices(const void *a, const void *b, void *context) {
    const ManifestSlice *slices = (const ManifestSlice *)context, *x = &slices[*(const int *)a],
                        *y = &slices[*(const int *)b];
    if (x->tensor != y->tensor) return x->tensor < y->tensor ? -1 : 1;
    if (x->kind != y->kind) return x->kind < y->kind ? -1 : 1;
    if (x->node != y->node) return x->node < y->node ? -1 : 1;
    if (x->block.first != y->block.first) return x->block.first < y->block.first ? -1 : 1;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

// Returns true if x, which is sorted before y, overlaps it: ranges of the same block that
// intersect, or blocks that intersect.
static bool overlap(const ManifestSlice *x, const ManifestSlice *y) {
    if (x->tensor != y->tensor || x->kind != y->kind || x->node != y->node) return false;
    bool same_block = x->block.first == y->block.first && x->block.count == y->block.count;
    return same_block ? y->lo < x->hi : y->block.first < x->block.first + x->block.count;
}

static const char *sort_slices(Manifest *m) {
    m->order = xcalloc((size_t)m->slice_count + 1, sizeof *m->order, "a checkpoint's slice order");
    for (int i = 0; i < m->slice_count; i++) m->order[i] = i;
    qsort_r(m->order, (size_t)m->slice_count, sizeof *m->order, compare_slices, m->slices);
    for (int i = 1; i < m->slice_count; i++) {
        if (overlap(&m->slices[m->order[i - 1]], &m->slices[m->order[i]])) return "two slices overlap";
    }
    return NULL;
}

static const char *parse_members(Manifest *m, const cJSON *object) {
    const char *dtype = json_member_string(object, "weight_dtype");
    const cJSON *arguments = cJSON_GetObjectItemCaseSensitive(object, "arguments");
    if (!dtype || (strcmp(dtype, "BF16") != 0 && strcmp(dtype, "F32") != 0))
        return "its weight_dtype is neither BF16 nor F32";
    strcpy(m->weight_dtype, dtype);
    if (!cJSON_IsObject(arguments)) return "it has no arguments";
    m->arguments = cJSON_PrintUnformatted(arguments);
    const char *fault = parse_state(cJSON_GetObjectItemCaseSensitive(object, "state"), &m->state);
    if (!fault) fault = parse_node_states(cJSON_GetObjectItemCaseSensitive(object, "nodes"), m);
    if (!fault) fault = parse_fp8(cJSON_GetObjectItemCaseSensitive(object, "fp8_scaling"), &m->fp8);
    if (!fault) fault = base_model_parse(cJSON_GetObjectItemCaseSensitive(object, "base"), &m->base);
    if (!fault) fault = parse_tensors(cJSON_GetObjectItemCaseSensitive(object, "tensors"), m);
    if (!fault) fault = parse_kinds(cJSON_GetObjectItemCaseSensitive(object, "kinds"), m);
    if (!fault) fault = parse_files(cJSON_GetObjectItemCaseSensitive(object, "files"), m);
    return fault ? fault : sort_slices(m);
}

// Distinguishes manifests of newer programs from damaged ones, because the user must act
// differently.
static bool check_format(const cJSON *object, const char *path, Error *err) {
    const char *format = json_member_string(object, "format");
    int64_t version;
    if (!format || strcmp(format, FORMAT) != 0 ||
        !json_member_int64(object, "version", 1, JSON_INT_MAX, &version))
        return damaged(err, path, "it is not a manifest of this program");
    if (version <= FORMAT_VERSION) return true;
    return ckpt_error(err,
                      "%s has format version %" PRId64
                      ", but this program reads only versions up to %d; use the newer program that wrote it",
                      path, version, FORMAT_VERSION);
}

bool manifest_parse(Manifest *manifest, const char *text, size_t bytes, const char *path, Error *err) {
    char tail[TAIL_BYTES + 1];
    memset(manifest, 0, sizeof *manifest);
    if (bytes < TAIL_BYTES) return damaged(err, path, "it is truncated");
    tail_text(tail, text, bytes - TAIL_BYTES);
    if (memcmp(tail, text + bytes - TAIL_BYTES, TAIL_BYTES) != 0)
        return damaged(err, path, "its text does not match its own hash");
    cJSON *object = json_parse_object(text, bytes);
    if (!object) return damaged(err, path, "it is not a JSON object");
    bool ok = check_format(object, path, err);
    const char *fault = ok ? parse_members(manifest, object) : NULL;
    cJSON_Delete(object);
    if (ok && !fault) return true;
    if (fault) damaged(err, path, fault);
    manifest_free(manifest);
    return false;
}

void manifest_free(Manifest *m) {
    for (int i = 0; i < m->file_count; i++) {
        free(m->files[i].folder);
        free(m->files[i].name);
    }
    free(m->tensors);
    free(m->files);
    free(m->slices);
    free(m->order);
    free(m->arguments);
    free(m->node_states);
    fp8_state_free(&m->fp8);
    free((char *)m->base.path);
    memset(m, 0, sizeof *m);
}

// --- Looking up ----------------------------------------------------------------------------------

int manifest_find_tensor(const Manifest *m, const char *name) {
    for (int i = 0; i < m->tensor_count; i++) {
        if (strcmp(m->tensors[i].name, name) == 0) return i;
    }
    return -1;
}

int manifest_first_slice(const Manifest *m, int tensor, SliceKind kind, int node, int64_t row,
                         int64_t column) {
    assert(tensor >= 0 && row >= 0 && column >= 0);
    int low = 0, high = m->slice_count;
    while (low < high) {
        int middle = low + (high - low) / 2;
        const ManifestSlice *s = &m->slices[m->order[middle]];
        int64_t in_block = column - s->block.first;  // only valid if the block has this column
        bool before = s->tensor != tensor          ? s->tensor < tensor
                      : s->kind != kind            ? s->kind < kind
                      : s->node != node            ? s->node < node
                      : in_block >= s->block.count ? true
                      : in_block < 0               ? false
                                                   : s->hi <= row * s->block.count + in_block;
        if (before) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Returns the first element of the whole tensor that no slice of the kind and node contains, or the
// number of elements if none is missing.
static int64_t first_hole(const Manifest *m, int tensor, SliceKind kind, int node) {
    const Tensor *t = &m->tensors[tensor];
    Columns block = {0, t->whole[1]};
    int64_t next = 0;  // index in the block
    for (int i = manifest_first_slice(m, tensor, kind, node, 0, 0);
         i < m->slice_count && block.first < t->whole[1]; i++) {
        const ManifestSlice *s = &m->slices[m->order[i]];
        if (s->tensor != tensor || s->kind != kind || s->node != node) break;
        if (s->block.first != block.first || s->lo != next) break;
        block = s->block;
        next = s->hi;
        if (next < t->whole[0] * block.count) continue;
        block.first += block.count;
        next = 0;
    }
    if (block.first == t->whole[1]) return tensor_whole_elements(t);
    return next / block.count * t->whole[1] + block.first + next % block.count;
}

// Checks one tensor and kind on all nodes. Stops at the first incomplete node, so that a damaged
// manifest with a huge node number costs no time.
static bool complete_on_nodes(const Manifest *m, int t, SliceKind kind, const char *path, Error *err) {
    int64_t elements = tensor_whole_elements(&m->tensors[t]);
    for (int node = 0; node < m->nodes[kind]; node++) {
        int64_t hole = first_hole(m, t, kind, node);
        if (hole == elements) continue;
        char of[32] = "";
        if (slice_kind_per_node(kind)) snprintf(of, sizeof of, " of node %d", node);
        return ckpt_error(err,
                          "%s: no rank saves %s of '%s'%s starting at element %" PRId64 " of %" PRId64
                          "; this is a bug, please report it",
                          path, slice_kind_name(kind), m->tensors[t].name, of, hole, elements);
    }
    return true;
}

static bool has_slices(const Manifest *m, int tensor, SliceKind kind) {
    for (int i = 0; i < m->slice_count; i++) {
        if (m->slices[i].tensor == tensor && m->slices[i].kind == kind) return true;
    }
    return false;
}

bool manifest_check_complete(const Manifest *m, const char *path, Error *err) {
    bool muon = config_saved_with_muon(m->arguments);
    for (int t = 0; t < m->tensor_count; t++) {
        for (int k = 0; k < SLICE_KINDS; k++) {
            SliceKind kind = (SliceKind)k;
            // Muon updates the matrices of layers, which then have no second moments.
            bool optional = muon && m->tensors[t].dims > 1 && slice_kind_of_squares(kind) &&
                            strncmp(m->tensors[t].name, "encoder.layers.", 15) == 0;
            if (!slice_kind_holds(kind, m->tensors[t].dims)) continue;
            if (optional && !has_slices(m, t, kind)) continue;
            if (!complete_on_nodes(m, t, kind, path, err)) return false;
        }
    }
    return true;
}

uint64_t manifest_content(const Manifest *m) {
    uint64_t *hash = xcalloc((size_t)m->file_count + 1, sizeof *hash, "the hashes of a checkpoint");
    for (int i = 0; i < m->file_count; i++) hash[i] = m->files[i].xxh3;
    uint64_t all = XXH3_64bits(hash, (size_t)m->file_count * sizeof *hash);
    free(hash);
    return all;
}
