// Saves another program's model as a checkpoint of iteration 0. See imported.h.
#include "dev/convert/imported.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dev/lib/saved_config.h"
#include "llmc/base/durable.h"
#include "llmc/base/dtype.h"
#include "llmc/base/json_line.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/checkpoint/manifest.h"
#include "llmc/config/config_roles.h"

#define COUNT_OF(list) (sizeof(list) / sizeof(list)[0])
#define MODEL_ARGS "model.args"

// --- Flags ---------------------------------------------------------------------------------------

void model_flags_add(ModelFlags *flags, const char *name, const char *value) {
    if (flags->count == (int)COUNT_OF(flags->items))
        fatal(NULL, EXIT_USAGE, "the model needs more than %d flags", flags->count);
    char *flag = value ? text_format("--%s=%s", name, value) : text_format("--%s", name);
    size_t end = 2 + strlen(name);
    for (size_t i = 2; i < end; i++) {
        if (flag[i] == '_') flag[i] = '-';
    }
    flags->items[flags->count++] = flag;
}

void model_flag_text(const cJSON *value, char *text, size_t bytes) {
    assert(bytes >= 40);
    double number = cJSON_GetNumberValue(value);
    if (cJSON_IsBool(value)) snprintf(text, bytes, "%s", cJSON_IsTrue(value) ? "true" : "false");
    else if (cJSON_IsString(value)) snprintf(text, bytes, "%s", value->valuestring);
    else if (!cJSON_IsNumber(value)) snprintf(text, bytes, "%s", cJSON_IsNull(value) ? "null" : "?");
    else if (fabs(number) < 1e15 && number == floor(number)) snprintf(text, bytes, "%.0f", number);
    else format_real(number, text, bytes);
}

// Model flags that do not affect the meaning of the weights.
static const char *const OTHER_ARGUMENTS[] = {"kv_channels", "init_method_std", "attention_dropout",
                                              "hidden_dropout"};

void model_flags_free(ModelFlags *flags) {
    for (int i = 0; i < flags->count; i++) free(flags->items[i]);
    flags->count = 0;
}

// --- The model -----------------------------------------------------------------------------------

// Flags that a run needs in addition to its model. They do not affect the model.
static const char *const PLACEHOLDERS[] = {
    "convert_checkpoint",   "--bf16",         "--use-distributed-optimizer",
    "--mock-data",          "--lr=1",         "--train-iters=1",
    "--micro-batch-size=1", "--seq-length=1", "--tokenizer-type=NullTokenizer",
    "--vocab-size=1"};

static bool configure(Config *config, const ModelFlags *flags, int64_t rows, int64_t divisible, Error *err) {
    enum { FIXED = COUNT_OF(PLACEHOLDERS) };
    char *words[FIXED + COUNT_OF(flags->items) + 2] = {0};
    char *multiple = text_format("--make-vocab-size-divisible-by=%" PRId64, divisible);
    memcpy(words, PLACEHOLDERS, sizeof PLACEHOLDERS);
    for (int i = 0; i < flags->count; i++) words[FIXED + i] = flags->items[i];
    words[FIXED + flags->count] = multiple;
    bool ok = config_parse(config, FIXED + flags->count + 1, words, NULL, 0, err);
    if (ok && !config_finish(config, 1, (int)rows, (int)rows - 1, err)) {
        config_free(config);
        ok = false;
    }
    free(multiple);
    return ok;
}

// Derives the parameter table and layout from config.
static bool describe(ImportedModel *m, Error *err) {
    const int host = 0;
    bool ok = mesh_build(&m->mesh, 0, 1, &host, 0, 1, 1, err);
    if (ok) gpt_describe(&m->gpt, &m->config, &m->mesh);
    else config_free(&m->config);
    return ok;
}

bool imported_model_of_checkpoint(ImportedModel *m, const char *arguments_json, Error *err) {
    const Words none = {0};
    memset(m, 0, sizeof *m);
    return config_of_checkpoint(&m->config, arguments_json, &none, err) && describe(m, err);
}

bool imported_model_open(ImportedModel *m, const ModelFlags *flags, int64_t rows, int64_t divisible,
                         const char *source, Error *err) {
    Error why = {0};
    memset(m, 0, sizeof *m);
    if (rows < 1 || rows > 1 << 30)
        snprintf(why.what, sizeof why.what, "its vocabulary has %" PRId64 " words", rows);
    else if (configure(&m->config, flags, rows, divisible, &why)) return describe(m, err);
    // Drops the advice after the semicolon: it names trainer flags, which the user of the converter
    // did not pass.
    return ckpt_error(err, "%s has a model that the trainer does not support: %.*s; use another model",
                      source, (int)strcspn(why.what, ";"), why.what);
}

void imported_model_close(ImportedModel *m) {
    gpt_free(&m->gpt);
    config_free(&m->config);
}

int64_t imported_model_parameters(const ImportedModel *m) {
    int64_t sum = 0, padding = m->config.vocab_size_padded - m->config.vocab_size_unpadded;
    for (int i = 0; i < m->gpt.whole_tensors; i++) sum += tensor_whole_elements(&m->gpt.whole[i]);
    return sum - padding * m->gpt.C * (m->gpt.tied ? 1 : 2);
}

cJSON *imported_arguments(const Config *config) {
    char *text = config_to_json(config);
    cJSON *arguments = cJSON_Parse(text);
    free(text);
    return arguments;
}

static void move_item(cJSON *from, cJSON *to, const char *key) {
    cJSON *item = cJSON_DetachItemFromObjectCaseSensitive(from, key);
    if (item) cJSON_AddItemToObject(to, key, item);
}

// Returns the checkpoint's arguments: the flags that --load compares and the flags that identify
// the tokenizer. The run that loads the checkpoint sets all others.
static cJSON *arguments_of(const Config *config) {
    static const char *const more[] = {"padded_vocab_size", "eod",        "tokenizer_type",
                                       "vocab_file",        "merge_file", "tokenizer_model",
                                       "tokenizer_eod"};
    int at = 0;
    char key[OPTION_KEY_BYTES];
    cJSON *all = imported_arguments(config), *kept = cJSON_CreateObject();
    while (config_next_key(MODEL, &at, key)) move_item(all, kept, key);
    for (size_t i = 0; i < COUNT_OF(OTHER_ARGUMENTS); i++) move_item(all, kept, OTHER_ARGUMENTS[i]);
    for (size_t i = 0; i < COUNT_OF(more); i++) move_item(all, kept, more[i]);
    cJSON_Delete(all);
    return kept;
}

// --- model.args ----------------------------------------------------------------------------------

static void write_flag(Text *out, const char *name, const char *value) {
    text_add(out, "--");
    for (const char *c = name; *c; c++) text_add(out, "%c", *c == '_' ? '-' : *c);
    // Quotes the path, which may contain spaces.
    if (*value) text_add(out, " ");
    for (const char *c = value; *c; c++) text_add(out, strchr(" \t#@'\"\\", *c) ? "\\%c" : "%c", *c);
    text_add(out, "\n");
}

static void write_args(const ImportedModel *m, const char *source, Text *out) {
    char value[40];
    const Config *c = &m->config;
    cJSON *arguments = arguments_of(c);
    bool turns = m->gpt.rotary > 0, yarn = m->gpt.yarn.factor > 0, groups = m->config.group_query_attention;
    text_add(out, "# The model of %s as trainer flags.\n", source);
    for (const cJSON *item = arguments->child; item; item = item->next) {
        bool of_yarn = strncmp(item->string, "yarn_", 5) == 0 ||
                       !strcmp(item->string, "rotary_scaling_factor");
        bool idle = (!turns && strncmp(item->string, "rotary_", 7) == 0) || (!yarn && of_yarn) ||
                    (!groups && strcmp(item->string, "num_query_groups") == 0);
        bool derived = strcmp(item->string, "eod") == 0 || strstr(item->string, "padded_vocab_size");
        if (idle || derived || cJSON_IsNull(item) || cJSON_IsFalse(item)) continue;
        model_flag_text(item, value, sizeof value);
        const char *text_value = cJSON_IsString(item) ? item->valuestring : value;
        // Absolute, because the file may be used from any directory.
        bool is_path = strstr(item->string, "_file") || strcmp(item->string, "tokenizer_model") == 0;
        char *absolute = is_path ? realpath(text_value, NULL) : NULL;
        write_flag(out, item->string, cJSON_IsTrue(item) ? "" : absolute ? absolute : text_value);
        free(absolute);
    }
    if (m->config.tokenizer_type == TOKENIZER_NULL)
        text_add(out, "--vocab-size %d\n", m->config.vocab_size_unpadded - 1);
    text_add(out, "# With --tensor-model-parallel-size T, divide this by T.\n");
    // A value that pads the tokenizer's ids to the number of embedding rows.
    int divisor = c->make_vocab_size_divisible_by;
    if (round_up64(c->vocab_size_unpadded, divisor) != c->vocab_size_padded) divisor = c->vocab_size_padded;
    text_add(out, "--make-vocab-size-divisible-by %d\n", divisor);
    cJSON_Delete(arguments);
}

static bool save_args(const ImportedWeights *w, Error *err) {
    char *path = text_format("%s/" MODEL_ARGS, w->save);
    Text text = {0};
    write_args(w->model, w->source, &text);
    bool ok = durable_write_file(path, text.data, text.length, err);
    text_free(&text);
    free(path);
    return ok;
}

// --- Slices --------------------------------------------------------------------------------------

// State of the conversion. checkpoint.c requests the slices one by one.
typedef struct Job {
    const ImportedWeights *weights;
    Slice *slices;
    int slice_count;
    int *tensor_of;  // (slice_count)
    float *chunk;    // buffer for one slice
    bool failed;     // a fetch failed to read its data
    Error error;
} Job;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static const Tensor *tensor_at(const Job *job, int i) { return &job->weights->model->gpt.whole[i]; }

// Returns the number of elements per slice of the tensor; the last slice may be shorter.
static int64_t step_of(const Job *job, int i) {
    int64_t unit = job->weights->units ? job->weights->units[i] : 1,
            most = job->weights->buffer_elements / unit * unit;
    int64_t all = tensor_whole_elements(tensor_at(job, i));
    return smaller(all, most < unit ? unit : most);
}

static void add_slices(Job *job, int i, SliceKind kind) {
    int64_t step = step_of(job, i), all = tensor_whole_elements(tensor_at(job, i));
    for (int64_t lo = 0; lo < all; lo += step) {
        job->tensor_of[job->slice_count] = i;
        job->slices[job->slice_count++] =
            (Slice){.tensor = tensor_at(job, i)->name, .kind = kind, .lo = lo, .hi = smaller(all, lo + step)};
    }
}

static void list_slices(Job *job) {
    static const SliceKind kinds[] = {SLICE_WEIGHT, SLICE_MASTER, SLICE_EXP_AVG, SLICE_EXP_AVG_SQ};
    int tensors = job->weights->model->gpt.whole_tensors, wanted = job->weights->no_optimizer ? 1 : 4;
    int64_t pieces = 0, room = 0;
    for (int i = 0; i < tensors; i++) {
        int64_t step = step_of(job, i);
        pieces += ceil_div64(tensor_whole_elements(tensor_at(job, i)), step);
        if (step > room) room = step;
    }
    job->slices = xcalloc((size_t)(pieces * wanted), sizeof(Slice), "the checkpoint's slices");
    job->tensor_of = xcalloc((size_t)(pieces * wanted), sizeof(int), "the checkpoint's slices");
    job->chunk = xmalloc((size_t)room * sizeof(float), "a chunk of a tensor");
    for (int k = 0; k < wanted; k++) {
        for (int i = 0; i < tensors; i++) add_slices(job, i, kinds[k]);
    }
}

static bool fetch_chunk(Job *job, const Slice *s, int tensor, void *host) {
    const ImportedWeights *w = job->weights;
    int64_t count = s->hi - s->lo;
    if (!w->read(w->context, tensor, s->lo, s->hi, job->chunk, &job->error)) return false;
    for (int64_t i = 0; i < count; i++) {
        floatX rounded = floatX_from_float(job->chunk[i]);
        if (!isfinite(floatX_to_float(rounded))) {
            return ckpt_error(&job->error, "%s: '%s' contains a non-finite value; save or download it again",
                              w->source, s->tensor);
        }
        if (s->kind == SLICE_WEIGHT) ((floatX *)host)[i] = rounded;
        else ((float *)host)[i] = job->chunk[i];
    }
    return true;
}

// Callback of CheckpointSave. It cannot return an error; run_save() checks `failed` before anything
// is published.
static void fetch(void *context, int i, void *host) {
    Job *job = (Job *)context;
    const Slice *s = &job->slices[i];
    bool zero = s->kind == SLICE_EXP_AVG || s->kind == SLICE_EXP_AVG_SQ || job->failed;
    if (zero) memset(host, 0, (size_t)(s->hi - s->lo) * (size_t)slice_kind_bytes(s->kind));
    else job->failed = !fetch_chunk(job, s, job->tensor_of[i], host);
}

// --- Saving --------------------------------------------------------------------------------------

bool imported_save_check(const char *save, Error *err) {
    char *tracker = text_format("%s/" CHECKPOINT_TRACKER, save);
    int count;
    free(save_folder_list(save, &count));
    bool taken = count > 0 || durable_exists(tracker);
    free(tracker);
    return !taken || usage_error(err, "--save %s already holds checkpoints; choose a new folder", save);
}

// Runs the phases of a save. If a fetch failed, stops while all files still have temporary names.
static bool run_save(Job *job, const CheckpointSave *save, Error *err) {
    Error ignored;  // the first error is reported already
    bool done = false;
    CheckpointJob *parts = checkpoint_begin(save, err);
    bool ok = parts != NULL;
    while (ok && !done && !job->failed) ok = checkpoint_advance(parts, &done, err);
    checkpoint_job_free(parts);
    if (!job->failed) return ok;
    save_folder_clear(save->directory, &ignored);
    if (err) *err = job->error;
    return false;
}

static bool save(Job *job, Error *err) {
    const ImportedWeights *w = job->weights;
    cJSON *kept = arguments_of(&w->model->config);
    char *arguments = cJSON_PrintUnformatted(kept);
    cJSON_Delete(kept);
    CheckpointSave wanted = {.directory = w->save,
                             .state = {.beta1_power = 1, .beta2_power = 1},
                             .arguments_json = arguments,
                             .tensors = w->model->gpt.whole,
                             .tensor_count = w->model->gpt.whole_tensors,
                             .slices = job->slices,
                             .slice_count = job->slice_count,
                             .fetch = fetch,
                             .context = job,
                             .before = -1,
                             .peers = w->peers};
    bool ok = (!w->write_files || w->write_files(w->context, err)) && save_args(w, err) &&
              run_save(job, &wanted, err);
    free(arguments);
    return ok;
}

// Removes the folder after a failure if it did not exist before.
static bool save_alone(Job *job, Error *err) {
    const char *folder = job->weights->save;
    Error ignored;  // the first error is reported already
    SaveLock lock = NO_SAVE_LOCK;
    bool fresh = !durable_exists(folder);
    bool ok = durable_make_folders(folder, err) && save_folder_lock(folder, 0, &lock, err) &&
              imported_save_check(folder, err) && save(job, err);
    if (!ok && fresh && lock.file >= 0) durable_remove_tree(folder, &ignored);
    save_folder_unlock(&lock);
    return ok;
}

// Reads everything that a save would read, without saving.
static bool read_all(Job *job, Error *err) {
    for (int i = 0; i < job->slice_count && !job->failed; i++) {
        const Slice *s = &job->slices[i];
        void *host = xmalloc((size_t)(s->hi - s->lo) * (size_t)slice_kind_bytes(s->kind),
                             "a chunk of a tensor");
        fetch(job, i, host);
        free(host);
    }
    if (job->failed && err) *err = job->error;
    return !job->failed;
}

bool imported_save(const ImportedWeights *weights, Error *err) {
    assert(weights->buffer_elements > 0);
    Job job = {.weights = weights};
    list_slices(&job);
    bool ok = weights->save ? save_alone(&job, err) : read_all(&job, err);
    free(job.slices);
    free(job.tensor_of);
    free(job.chunk);
    return ok;
}
