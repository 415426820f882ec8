// Imports a Megatron-LM checkpoint. See megatron.h. Tensor names, row order and the shape of
// SwiGLU's first matrix are the same as here, so elements are copied in order.
#include "dev/convert/megatron.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/base/json.h"
#include "dev/convert/megatron_args.h"
#include "dev/lib/saved_config.h"
#include "llmc/data/tokenizer.h"

enum { TRACKER_MAX_BYTES = 4096, JSON_MAX_BYTES = 1 << 20 };
#define TRACKER "latest_checkpointed_iteration.txt"
#define COMMON "common.pt"

// The files that distinguish the two formats and hold the arguments.
typedef struct Form {
    const char *file, *args;
    bool dist;
} Form;
static const Form FORMS[] = {
    {".metadata", COMMON, true},
    {"mp_rank_00/model_optim_rng.pt", "mp_rank_00/model_optim_rng.pt", false},
    {"mp_rank_00_000/model_optim_rng.pt", "mp_rank_00_000/model_optim_rng.pt", false},
};

typedef struct Import {
    const MegatronImport *options;
    char *folder;  // iteration folder
    const Form *form;
    MegatronArgs args;
    ImportedModel model;
    bool opened;  // the model is open
    MegatronSource source;
    MegatronKind kind;  // source of the master weights
} Import;

// --- Which folder --------------------------------------------------------------------------------

static bool exists_in(const char *folder, const char *name) {
    char *path = text_format("%s/%s", folder, name);
    bool there = durable_exists(path);
    free(path);
    return there;
}

static const Form *form_of(const char *folder) {
    for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS; i++) {
        if (exists_in(folder, FORMS[i].file)) return &FORMS[i];
    }
    return NULL;
}

// Reads the tracker: an iteration, or "release" (-1).
static bool read_tracker(const char *folder, int64_t *iteration, Error *err) {
    uint64_t bytes;
    char *path = text_format("%s/" TRACKER, folder), *end;
    char *text = durable_read_file(path, TRACKER_MAX_BYTES, &bytes, err);
    bool ok = text != NULL;
    *iteration = -1;
    if (ok && strncmp(text, "release", 7) != 0) {
        *iteration = strtoll(text, &end, 10);
        ok = (end > text && *iteration >= 0 && strspn(end, " \n\r\t") == strlen(end)) ||
             ckpt_error(err, "%s does not contain an iteration; pass --ckpt-step", path);
    }
    free(text);
    free(path);
    return ok;
}

static bool find_folder(Import *m, Error *err) {
    const char *given = m->options->folder;
    int64_t iteration = m->options->iteration;
    m->form = form_of(given);
    m->folder = xstrdup(given);
    if (m->form) return true;
    if (iteration >= 0 || exists_in(given, TRACKER)) {
        if (iteration < 0 && !read_tracker(given, &iteration, err)) return false;
        free(m->folder);
        m->folder = iteration < 0 ? text_format("%s/release", given)
                                  : text_format("%s/iter_%07" PRId64, given, iteration);
        m->form = form_of(m->folder);
    }
    return m->form || ckpt_error(err,
                                 "%s holds no Megatron-LM checkpoint (neither .metadata nor "
                                 "mp_rank_00/model_optim_rng.pt); use another folder, or --ckpt-step",
                                 m->folder);
}

// metadata.json, if it exists, names the format of a folder with .metadata.
static bool check_backend(const Import *m, Error *err) {
    if (!m->form->dist || !exists_in(m->folder, "metadata.json")) return true;
    char *path = text_format("%s/metadata.json", m->folder);
    cJSON *object = json_read_object(path, JSON_MAX_BYTES, err);
    const char *backend = json_member_string(object, "sharded_backend");
    bool ok = object && ((backend && strcmp(backend, "torch_dist") == 0) ||
                         ckpt_error(err,
                                    "%s has sharded_backend '%.60s', but this program supports only "
                                    "'torch_dist'; convert it with Megatron-LM first",
                                    path, backend ? backend : ""));
    cJSON_Delete(object);
    free(path);
    return ok;
}

// --- The model -----------------------------------------------------------------------------------

static bool read_args(Import *m, Error *err) {
    SafeFile file;
    TorchFile torch;
    uint64_t bytes;
    char *path = text_format("%s/%s", m->folder, m->form->args);
    bool ok = safe_open_plain(&file, path, &bytes, err);
    if (ok) {
        ok = torch_file_read(&torch, &file, bytes, 0, bytes, err);
        if (ok) {
            ok = megatron_args_read(&m->args, torch.pickle.root, !m->form->dist, path, err);
            torch_file_free(&torch);
        }
        safe_file_close(&file);
    }
    free(path);
    return ok;
}

// Gets the tokenizer of the saved arguments. Returns false if its files are missing or its type is
// unsupported.
static bool saved_tokenizer(const MegatronArgs *args, TokenizerChoice *choice) {
    int type = args->tokenizer_type ? options_choice("GPT2BPETokenizer||HuggingFaceTokenizer|NullTokenizer",
                                                     args->tokenizer_type)
                                    : -1;
    if (type < 0) return false;
    *choice = (TokenizerChoice){.type = (TokenizerType)type};
    if (choice->type == TOKENIZER_NULL) {
        choice->null_vocab_size = args->vocab_size;
        return args->vocab_size > 0;
    }
    choice->vocab_file = args->vocab_file;
    choice->merge_file = args->merge_file;
    choice->model = args->tokenizer_model;
    return tokenizer_files_exist(choice);
}

static void note(HfReport *report, const char *text) {
    size_t used = strlen(report->notes);
    snprintf(report->notes + used, sizeof report->notes - used, "%s\n", text);
}

// Stores the tokenizer's paths unchanged in the checkpoint's arguments. The config only points to
// them.
static bool name_tokenizer(Import *m, HfReport *report, Error *err) {
    TokenizerChoice choice = {.type = TOKENIZER_NULL};
    Config *config = &m->model.config;
    bool given = hf_tokenizer_given(&m->options->tokenizer, &choice);
    if (m->options->tokenizer.none) return true;
    if (!given && !saved_tokenizer(&m->args, &choice)) {
        note(report,
             "No tokenizer files were given, and the original ones were not found: the checkpoint has no "
             "tokenizer.");
        return true;
    }
    Tokenizer *tokenizer = tokenizer_open(&choice, err);
    if (!tokenizer) return false;
    int size = tokenizer_vocab_size(tokenizer), eod = tokenizer_eod(tokenizer);
    tokenizer_close(tokenizer);
    if (!hf_tokenizer_fits(size, m->args.rows, err)) return false;
    config->tokenizer_type = choice.type;
    config->vocab_file = choice.vocab_file;
    config->merge_file = choice.merge_file;
    config->tokenizer_model = choice.model;
    config->tokenizer_eod = choice.eod_token;
    config->vocab_size = choice.null_vocab_size;
    config->vocab_size_unpadded = size;
    config->eod = eod;
    return true;
}

// The embedding keeps its number of rows, so model.args gets the --make-vocab-size-divisible-by
// that gives this number.
static bool open_model(Import *m, HfReport *report, Error *err) {
    int64_t divisible = m->args.divisible * m->args.ranks.tensor;
    if (m->args.rows % divisible) divisible = 1;
    m->opened = imported_model_open(&m->model, &m->args.flags, m->args.rows, divisible, m->folder, err);
    return m->opened && name_tokenizer(m, report, err);
}

// --- Weights -------------------------------------------------------------------------------------

static bool list_weights(Import *m, HfReport *report, Error *err) {
    int missing;
    megatron_source_init(&m->source, m->folder, &m->model.gpt);
    if (!(m->form->dist ? megatron_dist_list(&m->source, err)
                        : megatron_legacy_list(&m->source, m->args.ranks, err)))
        return false;
    if (!megatron_source_complete(&m->source, MEGATRON_WEIGHT, &missing)) {
        return ckpt_error(err,
                          "%s is not a valid Megatron-LM checkpoint: parts of '%s' are missing; save or copy "
                          "it again, or import another checkpoint",
                          m->folder, m->model.gpt.whole[missing].name);
    }
    bool has_master = megatron_source_complete(&m->source, MEGATRON_MASTER, &missing);
    m->kind = has_master && !m->options->no_optimizer ? MEGATRON_MASTER : MEGATRON_WEIGHT;
    if (m->options->no_optimizer) return true;
    note(report,
         has_master
             ? "Master weights are the optimizer's fp32 weights. Moments are initialized with zeros."
             : "Master weights are the model weights, because the optimizer's are not read from this format."
               " Moments are initialized with zeros.");
    return true;
}

static bool read_elements(void *context, int tensor, int64_t lo, int64_t hi, float *out, Error *err) {
    Import *m = (Import *)context;
    return megatron_source_read(&m->source, m->kind, tensor, lo, hi, out, err);
}

static bool save(Import *m, Error *err) {
    ImportedWeights weights = {.save = m->options->save,
                               .source = m->folder,
                               .model = &m->model,
                               .no_optimizer = m->options->no_optimizer,
                               .buffer_elements = m->options->buffer_elements,
                               .read = read_elements,
                               .context = m,
                               .peers = m->options->peers};
    return imported_save(&weights, err);
}

static bool run(Import *m, HfReport *report, Error *err) {
    if (m->options->save && !imported_save_check(m->options->save, err)) return false;
    if (!find_folder(m, err) || !check_backend(m, err) || !read_args(m, err) || !open_model(m, report, err) ||
        !list_weights(m, report, err))
        return false;
    report->iteration = m->args.iteration;
    report->parameters = imported_model_parameters(&m->model);
    report->files = m->source.file_count;
    return save(m, err);
}

bool megatron_import(const MegatronImport *options, HfReport *report, Error *err) {
    assert(options->buffer_elements > 0);
    Import m = {.options = options};
    memset(report, 0, sizeof *report);
    bool ok = run(&m, report, err);
    megatron_source_free(&m.source);
    if (m.opened) imported_model_close(&m.model);
    megatron_args_free(&m.args);
    free(m.folder);
    return ok;
}
