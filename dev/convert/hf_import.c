// Imports a Hugging Face folder as a checkpoint of iteration 0. See hf.h.
//
// imported.c requests the trainer's tensors in chunks. If the Hugging Face tensor is transposed, a
// chunk is a range of its columns and is read row by row.
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/base/json.h"
#include "dev/lib/saved_config.h"
#include "dev/convert/hf.h"
#include "dev/convert/hf_files.h"
#include "dev/convert/hf_map.h"
#include "dev/convert/hf_tokenizer.h"

enum { CONFIG_MAX_BYTES = 1 << 20 };

typedef struct Importing {
    const HfImport *options;
    HfConfig config;
    ImportedModel model;
    bool opened;
    HfMap map;
    HfFiles files;
    const HfTensorPlace **places;  // (map.count)
    HfTokenizer tokenizer;
    float *padding;  // (2, hidden): padding rows of the embedding and of the output layer
    float *chunk;    // fp32 chunk in Hugging Face order
    void *narrow;    // the same chunk before conversion to fp32
    int64_t room;    // capacity of both, elements
} Importing;

static void make_room(Importing *m, int64_t elements) {
    if (elements <= m->room) return;
    m->chunk = xrealloc(m->chunk, (size_t)elements * sizeof(float), "a chunk of a tensor");
    m->narrow = xrealloc(m->narrow, (size_t)elements * sizeof(float), "a chunk of a tensor");
    m->room = elements;
}

static int64_t hidden_of(const Importing *m) { return m->model.gpt.C; }

// Returns the number of embedding rows that fit in the buffer.
static int64_t words_at_once(const Importing *m) {
    return m->options->buffer_elements > hidden_of(m) ? m->options->buffer_elements / hidden_of(m) : 1;
}

// --- Reading the folder --------------------------------------------------------------------------

static bool read_config(Importing *m, Error *err) {
    char *path = text_format("%s/config.json", m->options->folder);
    m->opened = hf_config_read(&m->config, path, err) &&
                imported_model_open(&m->model, &m->config.flags, m->config.words, m->options->divisible, path,
                                    err);
    free(path);
    return m->opened;
}

static bool wrong_tensor(const Importing *m, Error *err, const HfTensor *t, const HfTensorPlace *place) {
    if (!place) {
        return ckpt_error(err,
                          "%s has no tensor '%s', which its config.json requires; save or download it again",
                          m->options->folder, t->name);
    }
    char columns[32] = "";
    if (t->columns) snprintf(columns, sizeof columns, ", %" PRId64, t->columns);
    return ckpt_error(err,
                      "%s: '%s' is not (%" PRId64
                      "%s) in F32, BF16 or F16, as its config.json requires; save or download it again",
                      place->file->path, t->name, t->rows, columns);
}

// *bare: the tensor names lack the family's prefix, as saved by older programs.
static const HfTensorPlace *find_tensor(const Importing *m, const char *name, bool bare) {
    const char *prefix = m->config.family->prefix;
    bool begins = prefix && strncmp(name, prefix, strlen(prefix)) == 0;
    return hf_files_find(&m->files, bare && begins ? name + strlen(prefix) : name);
}

// Returns true for constants that older programs save with the weights, such as a layer's causal
// mask.
static bool is_constant(const HfFamily *family, const char *name) {
    for (size_t i = 0; i < 2 && family->constants[i]; i++) {
        size_t length = strlen(name), ending = strlen(family->constants[i]);
        if (length > ending && strcmp(name + length - ending, family->constants[i]) == 0) return true;
    }
    return family->like && is_constant(family->like, name);
}

// Checks that the output layer equals the embedding if a tied model saves both.
static bool check_head(Importing *m, const HfTensorPlace *head, Error *err) {
    const HfTensorPlace *words = m->places[0];
    int64_t V = m->config.words, C = hidden_of(m), most = words_at_once(m);
    bool same = safe_entry_fits(head->entry, V, C);
    float *other = xmalloc((size_t)(most * C) * sizeof(float), "a chunk of a tensor");
    for (int64_t row = 0; same && row < V; row += most) {
        int64_t n = (V - row < most ? V - row : most) * C;
        if (!safe_file_read(words->file, words->entry, row * C, n, m->narrow, m->chunk, err) ||
            !safe_file_read(head->file, head->entry, row * C, n, m->narrow, other, err)) {
            free(other);
            return false;
        }
        same = memcmp(m->chunk, other, (size_t)n * sizeof(float)) == 0;
    }
    free(other);
    return same || ckpt_error(err,
                              "%s has a separate output layer, but its config.json says that it is tied to "
                              "the embedding; import another model",
                              head->file->path);
}

// Checks that all tensors of the model exist and no others.
static bool match_tensors(Importing *m, Error *err) {
    const HfFamily *family = m->config.family;
    hf_map_make(&m->map, family, &m->model, m->config.words);
    bool bare = !find_tensor(m, m->map.tensors[0].name, false);
    const HfTensorPlace *head = m->model.gpt.tied ? hf_files_find(&m->files, "lm_head.weight") : NULL;
    m->places = xcalloc((size_t)m->map.count, sizeof *m->places, "the parameter table");
    for (int i = 0; i < m->map.count; i++) {
        const HfTensor *t = &m->map.tensors[i];
        m->places[i] = find_tensor(m, t->name, bare);
        if (!m->places[i] || !safe_entry_fits(m->places[i]->entry, t->rows, t->columns))
            return wrong_tensor(m, err, t, m->places[i]);
    }
    int known = m->map.count + (head != NULL);
    for (int i = 0; i < m->files.count; i++) known += is_constant(family, m->files.tensors[i].name);
    if (known == m->files.count) return !head || check_head(m, head, err);
    return ckpt_error(
        err, "%s has %d tensors that do not belong to a %s with its config.json; import another model",
        m->options->folder, m->files.count - known, family->architecture);
}

// --- The tokenizer -------------------------------------------------------------------------------

// Returns true if vocab.json and merges.txt belong to GPT-2's tokenizer. Other families have such
// files too, but split text with a different pattern.
static bool cuts_as_gpt2(const Importing *m) {
    if (strcmp(m->config.family->type, "gpt2") == 0) return true;
    char *path = text_format("%s/" HF_TOKENIZER_CONFIG, m->options->folder);
    cJSON *config = json_read_object(path, CONFIG_MAX_BYTES, NULL);
    const char *class = json_member_string(config, "tokenizer_class");
    bool same = class && strncmp(class, "GPT2Tokenizer", strlen("GPT2Tokenizer")) == 0;
    cJSON_Delete(config);
    free(path);
    return same;
}

// Chooses the tokenizer: the one in the flags, or else the folder's; NullTokenizer if there is
// none. tokenizer.json is preferred because only it contains added tokens and the split pattern.
static TokenizerChoice choose_tokenizer(const Importing *m, Config *config) {
    TokenizerChoice choice = {.type = TOKENIZER_NULL};
    if (m->options->tokenizer.none || hf_tokenizer_given(&m->options->tokenizer, &choice)) return choice;
    config->tokenizer_eod = m->options->tokenizer.eod;
    config->tokenizer_type = TOKENIZER_HUGGING_FACE;
    if (config_use_tokenizer_in(config, m->options->folder)) return config_tokenizer(config);
    config->tokenizer_type = TOKENIZER_GPT2_BPE;
    if (cuts_as_gpt2(m) && config_use_tokenizer_in(config, m->options->folder))
        return config_tokenizer(config);
    config->tokenizer_type = TOKENIZER_NULL;
    return choice;
}

// Sets the tokenizer paths as named in the checkpoint's arguments.
static void name_tokenizer(Importing *m) {
    Config *config = &m->model.config;
    bool whole = m->tokenizer.type == TOKENIZER_HUGGING_FACE;
    const char *save = m->options->save;
    config->tokenizer_type = m->tokenizer.type;
    config->tokenizer_eod = m->options->tokenizer.eod;
    config->tokenizer_model = whole ? config_keep(config, text_format("%s/" HF_TOKENIZER, save)) : NULL;
    config->vocab_file = whole ? NULL : config_keep(config, text_format("%s/" HF_VOCAB, save));
    config->merge_file = whole ? NULL : config_keep(config, text_format("%s/" HF_MERGES, save));
}

// Without a tokenizer, the model only has token ids.
static bool read_tokenizer(Importing *m, HfReport *report, Error *err) {
    Config *config = &m->model.config;
    TokenizerChoice choice = choose_tokenizer(m, config);
    bool ok = hf_tokenizer_eod_used(&m->options->tokenizer, &choice, err) &&
              hf_tokenizer_add_configs(&m->tokenizer, &choice, m->options->folder, err) &&
              (choice.type == TOKENIZER_NULL || hf_tokenizer_read(&m->tokenizer, &choice, err)) &&
              hf_tokenizer_add_configs(&m->tokenizer, &choice, NULL, err);
    if (!ok) return false;
    if (choice.type == TOKENIZER_NULL) {
        snprintf(report->notes, sizeof report->notes, "The checkpoint has no tokenizer%s.\n",
                 m->options->tokenizer.none ? "" : ": the folder has none");
        bool last = m->config.eod == m->config.words - 1;
        config->tokenizer_eod = last ? NULL : config_keep(config, text_format("%" PRId64, m->config.eod));
        return true;
    }
    if (!hf_tokenizer_fits(m->tokenizer.size, m->config.words, err)) return false;
    config->vocab_size_unpadded = m->tokenizer.size;
    config->eod = m->tokenizer.eod;
    if (m->options->save) name_tokenizer(m);
    return true;
}

// --- Weights ------------------------------------------------------------------------------------

// Reads a part of a Hugging Face tensor into out. In a transposed tensor the outputs are columns,
// so out is a matrix with rows of `stride` elements.
static bool read_part(Importing *m, const HfPart *part, float *out, int64_t stride, Error *err) {
    const HfTensor *t = part->tensor;
    const HfTensorPlace *place = m->places[t - m->map.tensors];
    int64_t wide = t->columns ? t->columns : 1;
    if (!t->transposed || (part->count == wide && stride == wide)) {
        int64_t first = t->transposed ? 0 : part->first * wide;
        int64_t count = t->transposed ? t->rows * wide : part->count * wide;
        return safe_file_read(place->file, place->entry, first, count, m->narrow, out, err);
    }
    for (int64_t row = 0; row < t->rows; row++) {
        if (!safe_file_read(place->file, place->entry, row * wide + part->first, part->count, m->narrow,
                            out + row * stride, err))
            return false;
    }
    return true;
}

// Reads rows [row, row + rows) of the trainer's tensor i into m->chunk, in Hugging Face order.
// *there: number of these rows in the folder; the others are padding.
static bool read_parts(Importing *m, int i, int64_t row, int64_t rows, int64_t *there, Error *err) {
    HfPart parts[3];
    int count = hf_map_parts(&m->map, i, row, rows, parts);
    *there = 0;
    for (int k = 0; k < count; k++) {
        bool columns = parts[k].tensor->transposed;
        float *out = m->chunk + (columns ? *there : *there * m->map.whole[i].columns);
        if (!read_part(m, &parts[k], out, rows, err)) return false;
        *there += parts[k].count;
    }
    return true;
}

// Callback of ImportedWeights.
static bool read_rows(void *context, int i, int64_t lo, int64_t hi, float *out, Error *err) {
    Importing *m = (Importing *)context;
    const HfWhole *o = &m->map.whole[i];
    int64_t columns = o->columns, row = lo / columns, rows = (hi - lo) / columns, there;
    bool transposed = m->map.tensors[o->first].transposed;
    make_room(m, hi - lo);
    if (!read_parts(m, i, row, rows, &there, err)) return false;
    const float *padding = m->padding + (i == 0 ? 0 : columns);
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = hf_map_place(&m->map, i, r, rows);
        const float *from = at >= there ? padding : transposed ? m->chunk + at : m->chunk + at * columns;
        int64_t step = transposed ? rows : 1;
        for (int64_t c = 0; c < columns; c++) out[r * columns + c] = from[c * step];
    }
    return true;
}

// Computes the mean of a tensor's rows into row `which` of m->padding. By convexity, for any hidden
// state, the mean of e^logit over all tokens is at least e^(mean logit), which is e^logit of a
// padding row.
static bool make_padding(Importing *m, int which, const HfTensorPlace *place, Error *err) {
    int64_t V = m->config.words, C = hidden_of(m), most = words_at_once(m);
    double *sum = xcalloc((size_t)C, sizeof *sum, "the mean of the embedding");
    bool ok = true;
    for (int64_t row = 0; ok && row < V; row += most) {
        int64_t rows = V - row < most ? V - row : most;
        ok = safe_file_read(place->file, place->entry, row * C, rows * C, m->narrow, m->chunk, err);
        for (int64_t i = 0; ok && i < rows * C; i++) sum[i % C] += m->chunk[i];
    }
    for (int64_t c = 0; c < C; c++) m->padding[which * C + c] = (float)(sum[c] / (double)V);
    free(sum);
    return ok;
}

// Computes the padding rows of the embedding, and of the output layer if it is separate.
static bool make_paddings(Importing *m, Error *err) {
    m->padding = xcalloc(2 * (size_t)hidden_of(m), sizeof(float), "the mean of the embedding");
    for (int i = 0, which = 0; i < m->map.gpt->whole_tensors; i++) {
        if (m->map.whole[i].row->order != HF_WORDS) continue;
        if (!make_padding(m, which++, m->places[m->map.whole[i].first], err)) return false;
    }
    return true;
}

// --- Saving --------------------------------------------------------------------------------------

// Callback of ImportedWeights.
static bool write_tokenizer(void *context, Error *err) {
    Importing *m = (Importing *)context;
    return hf_tokenizer_write(&m->tokenizer, m->options->save, err);
}

static bool save(Importing *m, Error *err) {
    int tensors = m->map.gpt->whole_tensors;
    int64_t *units = xcalloc((size_t)tensors, sizeof *units, "the parameter table");
    for (int i = 0; i < tensors; i++) units[i] = hf_map_unit(&m->map, i) * m->map.whole[i].columns;
    ImportedWeights weights = {.save = m->options->save,
                               .source = m->options->folder,
                               .model = &m->model,
                               .units = units,
                               .no_optimizer = m->options->no_optimizer,
                               .buffer_elements = m->options->buffer_elements,
                               .read = read_rows,
                               .write_files = write_tokenizer,
                               .context = m,
                               .peers = m->options->peers};
    bool ok = imported_save(&weights, err);
    free(units);
    return ok;
}

static bool run(Importing *m, HfReport *report, Error *err) {
    if (m->options->save && !imported_save_check(m->options->save, err)) return false;
    if (!read_config(m, err) || !hf_files_open(&m->files, m->options->folder, err)) return false;
    m->model.config.eod = (int)m->config.eod;
    make_room(m, words_at_once(m) * hidden_of(m));
    if (!match_tensors(m, err) || !read_tokenizer(m, report, err) || !make_paddings(m, err)) return false;
    cJSON *source = hf_tokenizer_object(&m->tokenizer, HF_CONFIG);
    special_ids_note(source, HF_CONFIG, m->config.words, report->notes, sizeof report->notes);
    cJSON_Delete(source);
    report->parameters = imported_model_parameters(&m->model);
    report->files = 1;
    return save(m, err);
}

bool hf_import(const HfImport *options, HfReport *report, Error *err) {
    assert(options->buffer_elements > 0 && options->divisible > 0);
    Importing m = {.options = options};
    memset(report, 0, sizeof *report);
    bool ok = run(&m, report, err);
    hf_files_close(&m.files);
    hf_tokenizer_free(&m.tokenizer);
    hf_map_free(&m.map);
    model_flags_free(&m.config.flags);
    if (m.opened) imported_model_close(&m.model);
    void *all[] = {m.places, m.padding, m.chunk, m.narrow};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    return ok;
}
