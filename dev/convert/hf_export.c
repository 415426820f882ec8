// Exports a checkpoint as a Hugging Face folder. See hf.h.
//
// Tensors are written one after another, in chunks of rows. For a transposed matrix, a
// chunk of its rows is a range of the trainer's columns, which checkpoint_read gathers from the
// shards.
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/base/dtype.h"
#include "llmc/base/json.h"
#include "dev/lib/saved_config.h"
#include "llmc/checkpoint/checkpoint.h"
#include "dev/convert/adapters.h"
#include "dev/convert/hf.h"
#include "dev/convert/hf_folder.h"
#include "dev/convert/hf_map.h"
#include "dev/convert/hf_tokenizer.h"
#include "llmc/checkpoint/safetensors.h"

#define INDEX_NAME "model.safetensors.index.json"

typedef struct Exporting {
    const HfExport *options;
    Checkpoint *checkpoint;
    SavedWeights weights;
    ImportedModel model;
    bool opened;
    const HfFamily *family;
    HfMap map;
    int *part;  // (map.count) weight file of each tensor
    int parts;  // number of weight files
    HfTokenizer tokenizer;
    cJSON *source, *ids;  // config.json of the imported model or NULL; object with its special token ids
    HfFolder folder;
    Adapters adapters;  // --adapters, which are merged
    void *in;           // chunk as stored in the checkpoint: fp32, or this build's floatX. With
                        // adapters: fp32
    void *out;          // chunk as written to the file
} Exporting;

static int64_t columns_of(const HfTensor *t) { return t->columns ? t->columns : 1; }
static int width_of(const Exporting *e) { return e->options->fp32 ? 4 : 2; }
static const char *dtype_of(const Exporting *e) { return e->options->fp32 ? "F32" : "BF16"; }
static uint64_t bytes_of(const Exporting *e, const HfTensor *t) {
    return (uint64_t)(t->rows * columns_of(t)) * (uint64_t)width_of(e);
}

// --- Opening -------------------------------------------------------------------------------------

static void add_note(HfReport *report, const char *note) {
    size_t used = strlen(report->notes);
    if (*note) snprintf(report->notes + used, sizeof report->notes - used, "%s\n", note);
}

static bool open_checkpoint(Exporting *e, HfReport *report, Error *err) {
    char note[1400];
    report->iteration = e->options->iteration;
    e->checkpoint = checkpoint_open(e->options->load, &report->iteration, "--ckpt-step", e->options->peers,
                                    note, sizeof note, err);
    if (e->checkpoint) add_note(report, note);
    return e->checkpoint != NULL;
}

// Reads the model from the checkpoint's arguments.
static bool read_model(Exporting *e, Error *err) {
    e->opened = imported_model_of_checkpoint(&e->model, checkpoint_arguments(e->checkpoint), err);
    e->family = e->opened ? hf_family_of(&e->model, err) : NULL;
    return e->family != NULL;
}

// Checks that the parameters match the model that the arguments describe, and that the requested
// dtype is available.
static bool check_parameters(Exporting *e, Error *err) {
    if (e->model.config.lora_rank) {
        return ckpt_error(
            err,
            "%s holds only LoRA adapters; export them with --to-peft, or --load the frozen model "
            "and add --adapters %s",
            e->options->load, e->options->load);
    }
    bool ok = checkpoint_check_tensors(e->checkpoint, e->model.gpt.whole, e->model.gpt.whole_tensors, err);
    bool fp32 = e->options->fp32 && !e->options->adapters;  // adapters belong to the bf16 weights
    if (ok && fp32 && !checkpoint_nodes(e->checkpoint, SLICE_MASTER)) {
        ok = ckpt_error(err,
                        "the checkpoint in %s was saved without the optimizer, so it has no fp32 weights; "
                        "use --dtype bf16",
                        e->options->load);
    }
    return ok && saved_weights_choose(&e->weights, e->checkpoint, fp32, e->options->weights, err);
}

// --- Tokenizer -----------------------------------------------------------------------------------

// Reads the tokenizer given by flags, or else the run's.
static bool read_tokenizer(Exporting *e, const TokenizerChoice *choice, bool given, HfReport *report,
                           Error *err) {
    if (given || tokenizer_files_exist(choice)) return hf_tokenizer_read(&e->tokenizer, choice, err);
    if (choice->type == TOKENIZER_BYTE) {
        hf_tokenizer_of_bytes(&e->tokenizer);
        return true;
    }
    if (choice->type == TOKENIZER_NULL) {
        add_note(report, "The model has no tokenizer (NullTokenizer): none is exported.");
        return true;
    }
    return data_error(err,
                      "the checkpoint's tokenizer was not found; pass --vocab-file and --merge-file, or "
                      "--tokenizer-model, or --no-tokenizer");
}

// Reads the tokenizer, and config.json and generation_config.json of the folder that the model or
// its tokenizer came from. A tokenizer given by flags takes precedence over the --load folder.
static bool read_small_files(Exporting *e, HfReport *report, Error *err) {
    HfTokenizer *t = &e->tokenizer;
    const char *load = e->options->load;
    config_use_tokenizer_in(&e->model.config, load);
    TokenizerChoice choice = config_tokenizer(&e->model.config);
    bool given = hf_tokenizer_given(&e->options->tokenizer, &choice);
    return hf_tokenizer_add_configs(t, &choice, given ? NULL : load, err) &&
           hf_tokenizer_eod_used(&e->options->tokenizer, &choice, err) &&
           (e->options->tokenizer.none || read_tokenizer(e, &choice, given, report, err)) &&
           (!t->size || config_check_tokenizer(&e->model.config, t->size, t->eod, err)) &&
           hf_tokenizer_add_configs(t, &choice, given ? load : NULL, err);
}

// The exported config.json keeps the token ids of the source's config.json, if it exists. Missing
// ids stay missing, because transformers then uses the family's. Otherwise the ids come from
// generation_config.json or the tokenizer, and are null if unknown. The run's end-of-document id
// replaces an eos_token_id that lacks it, which is another model's.
static void find_ids(Exporting *e, HfReport *report) {
    HfTokenizer *t = &e->tokenizer;
    int known[HF_SPECIAL_IDS] = {e->model.config.eod, t->size ? t->bos : -1, t->size ? t->pad : -1};
    int64_t words = e->model.config.vocab_size_unpadded;
    cJSON *generation = hf_tokenizer_object(t, HF_GENERATION_CONFIG);
    e->source = hf_tokenizer_object(t, HF_CONFIG);
    bool replaced = special_ids_set_eos(e->source, known[0]);
    if (replaced || !e->source) replaced |= special_ids_set_eos(generation, known[0]);
    if (replaced) add_note(report, "The source's eos_token_id lacks the run's EOD, which replaces it.");
    char *text = replaced && generation ? cJSON_Print(generation) : NULL;
    if (text) hf_tokenizer_put(t, HF_GENERATION_CONFIG, &(Text){.data = text, .length = strlen(text)});
    e->ids = e->source ? e->source : generation ? generation : cJSON_CreateObject();
    if (e->source) cJSON_Delete(generation);
    for (int i = 0; i < HF_SPECIAL_IDS && !e->source; i++) {
        if (cJSON_GetObjectItemCaseSensitive(e->ids, HF_SPECIAL_ID[i])) continue;
        cJSON_AddItemToObject(e->ids, HF_SPECIAL_ID[i],
                              known[i] < 0 ? cJSON_CreateNull() : cJSON_CreateNumber(known[i]));
    }
    // Keeps the rows of the source that no token of the tokenizer uses.
    json_member_int64(e->source, "vocab_size", words, e->model.config.vocab_size_padded, &words);
    e->model.config.vocab_size_unpadded = (int)words;
    special_ids_note(e->ids, HF_CONFIG, words, report->notes, sizeof report->notes);
}

// --- Chunks of tensors ------------------------------------------------------------------------

// Converts `count` elements of e->in, starting at `from` with stride `step`, to contiguous elements
// of e->out, starting at `to`.
static void put(const Exporting *e, int64_t to, int64_t from, int64_t step, int64_t count) {
    for (int64_t i = 0; i < count; i++, from += step) {
        bool wide = e->weights.fp32 || e->adapters.value;
        float value = wide ? ((const float *)e->in)[from] : floatX_to_float(((const floatX *)e->in)[from]);
        if (e->options->fp32) ((float *)e->out)[to + i] = value;
        else ((uint16_t *)e->out)[to + i] = bf16_from_float(value);
    }
}

static Slice slice_of(const Exporting *e, const HfTensor *t) {
    return (Slice){.tensor = e->model.gpt.whole[t->whole].name};
}

// Reads rows [row, row + rows), columns [column, column + columns) of the trainer's matrix into
// e->in, and adds the adapters.
static bool read_block(const Exporting *e, Slice slice, int64_t row, int64_t rows, int64_t column,
                       int64_t columns, Error *err) {
    if (!saved_weights_read(&e->weights, slice, e->in, err)) return false;
    if (!e->adapters.value) return true;
    float *wide = (float *)e->in;
    for (int64_t i = rows * columns - 1; i >= 0 && !e->weights.fp32; i--)  // in place, so from the end
        wide[i] = floatX_to_float(((const floatX *)e->in)[i]);
    int a = adapters_of(&e->adapters, slice.tensor);
    if (a >= 0) adapters_add(&e->adapters, a, row, rows, column, columns, wide);
    return true;
}

// Reads rows [row, row + rows) of a Hugging Face tensor, which are contiguous ranges of the
// trainer's rows, into e->out.
static bool read_runs(const Exporting *e, const HfTensor *t, int64_t row, int64_t rows, Error *err) {
    int64_t columns = columns_of(t), start, run;
    for (int64_t r = 0; r < rows; r += run) {
        run = hf_map_run(&e->map, t, row + r, &start);
        if (run > rows - r) run = rows - r;
        Slice slice = slice_of(e, t);
        slice.lo = start * columns;
        slice.hi = (start + run) * columns;
        if (!read_block(e, slice, start, run, 0, columns, err)) return false;
        put(e, r * columns, 0, 1, run * columns);
    }
    return true;
}

// Same for a transposed tensor, whose rows are the trainer's columns.
static bool read_columns(const Exporting *e, const HfTensor *t, int64_t row, int64_t rows, Error *err) {
    Slice slice = slice_of(e, t);
    slice.columns = (Columns){row, rows};
    slice.hi = t->columns * rows;
    if (!read_block(e, slice, 0, t->columns, row, rows, err)) return false;
    for (int64_t c = 0; c < t->columns; c++) {
        int64_t start;
        hf_map_run(&e->map, t, c, &start);
        for (int64_t r = 0; r < rows; r++) put(e, r * t->columns + c, start * rows + r, 1, 1);
    }
    return true;
}

static int64_t rows_of_chunk(const Exporting *e, const HfTensor *t) {
    int64_t rows = e->options->buffer_elements / columns_of(t);
    return rows > t->rows ? t->rows : rows < 1 ? 1 : rows;
}

static bool write_tensor(const Exporting *e, SafeWriter *writer, const HfTensor *t, Error *err) {
    int64_t most = rows_of_chunk(e, t);
    for (int64_t row = 0; row < t->rows; row += most) {
        int64_t rows = t->rows - row < most ? t->rows - row : most;
        uint64_t bytes = (uint64_t)(rows * columns_of(t)) * (uint64_t)width_of(e);
        if (!(t->transposed ? read_columns : read_runs)(e, t, row, rows, err) ||
            !safe_writer_append(writer, e->out, bytes, err))
            return false;
    }
    return true;
}

// --- Weight files -----------------------------------------------------------------------------

// Assigns tensors to files in order. A tensor larger than the file limit gets its own file.
static void divide(Exporting *e) {
    uint64_t used = 0, most = (uint64_t)e->options->part_bytes;
    e->part = xcalloc((size_t)e->map.count, sizeof(int), "the parameter table");
    e->parts = 1;
    for (int i = 0; i < e->map.count; i++) {
        uint64_t bytes = bytes_of(e, &e->map.tensors[i]);
        if (used > 0 && used + bytes > most) {
            e->parts++;
            used = 0;
        }
        used += bytes;
        e->part[i] = e->parts - 1;
    }
}

// Returns the name of a weight file. malloc'ed.
static char *part_name(const Exporting *e, int part) {
    if (e->parts == 1) return xstrdup("model.safetensors");
    return text_format("model-%05d-of-%05d.safetensors", part + 1, e->parts);
}

static SafeWriter *open_part(const Exporting *e, int part, Error *err) {
    SafeTensor *list = xcalloc((size_t)e->map.count, sizeof *list, "the parameter table");
    int n = 0;
    for (int i = 0; i < e->map.count; i++) {
        const HfTensor *t = &e->map.tensors[i];
        if (e->part[i] != part) continue;
        list[n++] = (SafeTensor){.name = text_format("%s", t->name),
                                 .dtype = dtype_of(e),
                                 .elements = t->rows * columns_of(t),
                                 .columns = t->columns};
    }
    char *name = part_name(e, part), *path = text_format("%s/%s", e->folder.fresh, name);
    SafeWriter *writer = safe_writer_open(path, list, n, "{\"format\":\"pt\"}", err);
    for (int i = 0; i < n; i++) free(list[i].name);
    free(list);
    free(name);
    free(path);
    return writer;
}

static bool write_part(const Exporting *e, int part, Error *err) {
    uint64_t bytes, xxh3;
    SafeWriter *writer = open_part(e, part, err);
    if (!writer) return false;
    for (int i = 0; i < e->map.count; i++) {
        if (e->part[i] != part || write_tensor(e, writer, &e->map.tensors[i], err)) continue;
        safe_writer_discard(writer);
        return false;
    }
    return safe_writer_close(writer, &bytes, &xxh3, err);
}

static bool write_parts(Exporting *e, Error *err) {
    // A single row of a very wide matrix may exceed the chunk size, and a vector is converted as a
    // whole.
    int64_t room = 0;
    for (int i = 0; i < e->map.count; i++) {
        int64_t elements = rows_of_chunk(e, &e->map.tensors[i]) * columns_of(&e->map.tensors[i]);
        if (elements > room) room = elements;
    }
    e->in = xmalloc((size_t)room * sizeof(float), "a chunk of a tensor");
    e->out = xmalloc((size_t)room * sizeof(float), "a chunk of a tensor");
    for (int part = 0; part < e->parts; part++) {
        if (!write_part(e, part, err)) return false;
    }
    return true;
}

// --- Small files ---------------------------------------------------------------------------------

static void write_index(const Exporting *e, Text *out) {
    uint64_t total = 0;
    for (int i = 0; i < e->map.count; i++) total += bytes_of(e, &e->map.tensors[i]);
    text_add(out, "{\n  \"metadata\": {\n    \"total_size\": %" PRIu64 "\n  },\n  \"weight_map\": {\n",
             total);
    for (int i = 0; i < e->map.count; i++) {
        char *name = part_name(e, e->part[i]);
        text_add(out, "    \"%s\": \"%s\"%s\n", e->map.tensors[i].name, name,
                 i + 1 < e->map.count ? "," : "");
        free(name);
    }
    text_add(out, "  }\n}\n");
}

// Names the tokenizer's class in tokenizer_config.json, unless the source has the same model_type.
// Without a name, transformers chooses the class by the model_type.
static void complete_tokenizer_config(Exporting *e) {
    HfTokenizer *t = &e->tokenizer;
    const char *type = json_member_string(e->source, "model_type");
    bool same = type && strcmp(type, e->family->type) == 0, whole = t->type == TOKENIZER_HUGGING_FACE;
    cJSON *config = hf_tokenizer_object(t, HF_TOKENIZER_CONFIG);
    if (t->size && !same && !cJSON_HasObjectItem(config, "tokenizer_class")) {
        bool alone = !config && !e->source;
        if (!config) config = cJSON_CreateObject();
        if (alone) {
            cJSON_AddStringToObject(config, "eos_token", t->eod_text);
            cJSON_AddNumberToObject(config, "model_max_length", e->model.config.max_position_embeddings);
        }
        cJSON_AddStringToObject(config, "tokenizer_class",
                                whole ? "PreTrainedTokenizerFast" : "GPT2Tokenizer");
        char *text = cJSON_Print(config);
        hf_tokenizer_put(t, HF_TOKENIZER_CONFIG, &(Text){.data = text, .length = strlen(text)});
    }
    cJSON_Delete(config);
}

static bool write_small_files(Exporting *e, Error *err) {
    HfTokenizer *t = &e->tokenizer;
    Text text = {0};
    hf_config_write(e->family, &e->model, e->options->fp32 ? "float32" : "bfloat16", e->ids, &text);
    hf_tokenizer_put(t, HF_CONFIG, &text);
    complete_tokenizer_config(e);
    if (e->parts > 1) {
        write_index(e, &text);
        hf_tokenizer_put(t, INDEX_NAME, &text);
    }
    return hf_tokenizer_write(t, e->folder.fresh, err);
}

// --- The folder ----------------------------------------------------------------------------------

static bool write_folder(Exporting *e, Error *err) {
    bool ok = hf_folder_open(&e->folder, e->options->output, err) && write_parts(e, err) &&
              write_small_files(e, err) && hf_folder_publish(&e->folder, err);
    hf_folder_close(&e->folder, !ok);
    return ok;
}

// Checks that the adapters were trained on the model of --load.
static bool match_base(const Exporting *e, HfReport *report, Error *err) {
    BaseModel loaded = checkpoint_as_base(e->checkpoint, e->options->load);
    Error why;
    BaseMatch match = base_model_compare(checkpoint_base(e->adapters.checkpoint), &loaded, "--ckpt-step",
                                         &why);
    if (match == BASE_DIFFERS) {
        *err = why;
        return false;
    }
    if (match == BASE_UNKNOWN) {
        char note[sizeof why.what + 16];
        snprintf(note, sizeof note, "WARNING: %s", why.what);
        add_note(report, note);
    }
    return true;
}

// Reads the adapters to merge.
static bool read_adapters(Exporting *e, HfReport *report, Error *err) {
    const HfExport *o = e->options;
    int64_t iteration;
    if (!o->adapters) return true;
    AdaptersChoice choice = {o->adapters, -1, o->fp32, o->weights, o->peers};
    bool ok = adapters_open(&e->adapters, &choice, &iteration, err) &&
              checkpoint_check_tensors(e->checkpoint, e->adapters.model.gpt.whole,
                                       e->adapters.model.gpt.whole_tensors, err) &&
              match_base(e, report, err);
    size_t used = strlen(report->notes);
    snprintf(report->notes + used, sizeof report->notes - used, "%s", e->adapters.note);
    return ok;
}

static bool run(Exporting *e, HfReport *report, Error *err) {
    if (!hf_folder_check(e->options->output, err) || !open_checkpoint(e, report, err) ||
        !read_model(e, err) || !check_parameters(e, err) || !read_adapters(e, report, err) ||
        !read_small_files(e, report, err))
        return false;
    add_note(report, e->weights.note);
    find_ids(e, report);
    hf_map_make(&e->map, e->family, &e->model, e->model.config.vocab_size_unpadded);
    divide(e);
    report->parameters = imported_model_parameters(&e->model);
    report->files = e->parts;
    return write_folder(e, err);
}

bool hf_export(const HfExport *options, HfReport *report, Error *err) {
    assert(options->buffer_elements > 0 && options->part_bytes > 0);
    Exporting e = {.options = options};
    memset(report, 0, sizeof *report);
    bool ok = run(&e, report, err);
    checkpoint_close(e.checkpoint);
    hf_tokenizer_free(&e.tokenizer);
    cJSON_Delete(e.ids);
    hf_map_free(&e.map);
    if (e.opened) imported_model_close(&e.model);
    adapters_close(&e.adapters);
    free(e.part);
    free(e.in);
    free(e.out);
    return ok;
}
