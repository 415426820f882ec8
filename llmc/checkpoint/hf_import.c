// A Hugging Face folder becomes a checkpoint of iteration 0: see hf.h.
//
// checkpoint.c asks for slices one by one, each a piece of our rows. A piece of a transposed matrix
// is some columns of the folder's, which are read row by row.
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/base/dtype.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/checkpoint/hf.h"
#include "llmc/checkpoint/hf_files.h"
#include "llmc/checkpoint/hf_gpt2.h"
#include "llmc/checkpoint/hf_tokenizer.h"
#include "llmc/checkpoint/manifest.h"

enum { CONFIG_MAX_BYTES = 1 << 20 };

typedef struct Importing {
    const HfImport *wish;
    HfGpt2 model;
    HfTensor *tensors; int count;
    HfFiles files;
    const HfTensorPlace **places;  // (count)
    HfTokenizer tokenizer;
    char *vocab_file, *merge_file;  // as the checkpoint's arguments name them; NULL: none
    Slice *slices; int slice_count;
    int *tensor_of;           // (slice_count)
    float *padding;           // (hidden): a row of padding
    float *piece;             // as the folder has it, fp32
    void *narrow;             // the same before it is widened
    bool failed;              // a fetch could not read what it was asked for
    Error error;
} Importing;

static int64_t columns_of(const HfTensor *t) { return t->ours.whole[1]; }

static void make_buffers(Importing *m, int64_t elements) {
    m->piece = (float *)xrealloc(m->piece, (size_t)elements * sizeof(float), "a tensor's piece");
    m->narrow = xrealloc(m->narrow, (size_t)elements * sizeof(float), "a tensor's piece");
}

// Rows of the embedding that a buffer holds.
static int64_t words_at_once(const Importing *m) {
    return m->wish->piece > m->model.hidden ? m->wish->piece / m->model.hidden : 1;
}

// --- Reading the folder --------------------------------------------------------------------------

static bool read_config(Importing *m, Error *err) {
    uint64_t bytes;
    char *path = text_format("%s/config.json", m->wish->folder);
    char *text = durable_read_file(path, CONFIG_MAX_BYTES, &bytes, err);
    bool ok = text && hf_gpt2_from_config(&m->model, text, (size_t)bytes, m->wish->divisible, path, err);
    free(text);
    free(path);
    return ok;
}

static bool wrong_tensor(const Importing *m, Error *err, const HfTensor *t, const HfTensorPlace *place) {
    if (!place) {
        return error_set(err, EXIT_CHECKPOINT,
                         "%s has no tensor '%s', which a model of its config.json has; save or download it "
                         "again",
                         m->wish->folder, t->name);
    }
    char columns[32] = "";
    if (t->columns) snprintf(columns, sizeof columns, ", %" PRId64, t->columns);
    return error_set(err, EXIT_CHECKPOINT,
                     "%s: '%s' is not (%" PRId64 "%s) in F32, BF16 or F16, as its config.json wants; save or"
                     " download it again",
                     place->file->path, t->name, t->rows, columns);
}

// Older programs save the model without the prefix "transformer.".
static const HfTensorPlace *find_tensor(const Importing *m, const char *name, bool prefixed) {
    char full[96];
    snprintf(full, sizeof full, "%s%s", prefixed ? "transformer." : "", name);
    return hf_files_find(&m->files, full);
}

// Constants that older programs save with the weights: the causal mask of a layer.
static bool is_constant(const char *name) {
    static const char *const endings[] = {".attn.bias", ".attn.masked_bias"};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        size_t length = strlen(name), ending = strlen(endings[i]);
        if (length > ending && strcmp(name + length - ending, endings[i]) == 0) return true;
    }
    return false;
}

// That the output layer, where it is saved by itself, is the embedding.
static bool check_head(Importing *m, const HfTensorPlace *head, Error *err) {
    const HfTensorPlace *words = m->places[0];
    int64_t V = m->model.vocab, C = m->model.hidden, most = words_at_once(m);
    bool same = safe_entry_fits(head->entry, V, C);
    float *other = (float *)xmalloc((size_t)(most * C) * sizeof(float), "a tensor's piece");
    for (int64_t row = 0; same && row < V; row += most) {
        int64_t n = (V - row < most ? V - row : most) * C;
        if (!safe_file_read(words->file, words->entry, row * C, n, m->narrow, m->piece, err) ||
            !safe_file_read(head->file, head->entry, row * C, n, m->narrow, other, err)) {
            free(other);
            return false;
        }
        same = memcmp(m->piece, other, (size_t)n * sizeof(float)) == 0;
    }
    free(other);
    return same || error_set(err, EXIT_CHECKPOINT,
                             "%s has an output layer of its own, this program's is the embedding; import"
                             " another model",
                             head->file->path);
}

// Every tensor of the model is there, and no other.
static bool match_tensors(Importing *m, Error *err) {
    bool prefixed = find_tensor(m, "wte.weight", true) != NULL;
    const HfTensorPlace *head = find_tensor(m, "lm_head.weight", false);
    m->tensors = hf_gpt2_tensors(&m->model, &m->count);
    m->places = (const HfTensorPlace **)xcalloc((size_t)m->count, sizeof *m->places, "the parameter table");
    for (int i = 0; i < m->count; i++) {
        const HfTensor *t = &m->tensors[i];
        m->places[i] = find_tensor(m, t->name, prefixed);
        if (!m->places[i] || !safe_entry_fits(m->places[i]->entry, t->rows, t->columns))
            return wrong_tensor(m, err, t, m->places[i]);
    }
    int known = m->count + (head != NULL);
    for (int i = 0; i < m->files.count; i++) known += is_constant(m->files.tensors[i].name);
    if (known == m->files.count) return !head || check_head(m, head, err);
    return error_set(err, EXIT_CHECKPOINT,
                     "%s has %d tensors that a GPT2LMHeadModel of its config.json does not have; import"
                     " another model",
                     m->wish->folder, m->files.count - known);
}

// --- The tokenizer -------------------------------------------------------------------------------

// The folder's, else that of the flags. Where there is none the model has its ids alone.
static bool read_tokenizer(Importing *m, HfReport *report, Error *err) {
    const HfImport *wish = m->wish;
    char *vocab = text_format("%s/" HF_VOCAB, wish->folder),
         *merges = text_format("%s/" HF_MERGES, wish->folder);
    bool given = wish->vocab_file || wish->merge_file, ok = true;
    if (given) {
        ok = hf_tokenizer_read(&m->tokenizer, wish->vocab_file, wish->merge_file, err);
    } else if (durable_exists(vocab) && durable_exists(merges)) {
        ok = hf_tokenizer_read(&m->tokenizer, vocab, merges, err);
    } else {
        snprintf(report->notes, sizeof report->notes,
                 "The folder has no " HF_VOCAB " and " HF_MERGES ": the checkpoint gets no tokenizer.\n");
    }
    free(vocab);
    free(merges);
    if (!ok || !m->tokenizer.vocab) return ok;
    if (m->tokenizer.size > m->model.vocab) {
        return error_set(err, EXIT_DATA,
                         "the vocabulary has %d ids, the model's embedding %" PRId64
                         " rows; give its own --vocab-file and --merge-file",
                         m->tokenizer.size, m->model.vocab);
    }
    m->model.tokens = m->tokenizer.size;
    m->model.eod = m->tokenizer.eod;
    if (!wish->save) return true;
    m->vocab_file = text_format("%s/" HF_VOCAB, wish->save);
    m->merge_file = text_format("%s/" HF_MERGES, wish->save);
    return true;
}

// --- Slices --------------------------------------------------------------------------------------

// Our rows of a piece. Vectors go as a whole, and so does what belongs to a head.
static int64_t rows_of_piece(const Importing *m, const HfTensor *t) {
    int64_t unit = t->by_head ? 3 * (m->model.hidden / m->model.heads) : 1;
    int64_t rows = m->wish->piece / columns_of(t) / unit * unit, all = t->ours.whole[0];
    return t->ours.dims == 1 || rows > all ? all : rows < unit ? unit : rows;
}

static void add_slices(Importing *m, int tensor, SliceKind kind) {
    const HfTensor *t = &m->tensors[tensor];
    int64_t columns = columns_of(t), most = rows_of_piece(m, t), all = t->ours.whole[0];
    for (int64_t row = 0; row < all; row += most) {
        int64_t end = row + most < all ? row + most : all;
        m->tensor_of[m->slice_count] = tensor;
        m->slices[m->slice_count++] = (Slice){
            .tensor = t->ours.name, .kind = kind, .lo = row * columns, .hi = end * columns};
    }
}

static void list_slices(Importing *m) {
    static const SliceKind kinds[] = {SLICE_WEIGHT, SLICE_MASTER, SLICE_EXP_AVG, SLICE_EXP_AVG_SQ};
    int64_t pieces = 0, room = 0;
    int wanted = m->wish->no_optimizer ? 1 : 4;
    for (int i = 0; i < m->count; i++) {
        int64_t rows = rows_of_piece(m, &m->tensors[i]);
        pieces += ceil_div64(m->tensors[i].ours.whole[0], rows);
        if (rows * columns_of(&m->tensors[i]) > room) room = rows * columns_of(&m->tensors[i]);
    }
    m->slices = (Slice *)xcalloc((size_t)(pieces * wanted), sizeof *m->slices, "the checkpoint's slices");
    m->tensor_of = (int *)xcalloc((size_t)(pieces * wanted), sizeof(int), "the checkpoint's slices");
    make_buffers(m, room);
    for (int k = 0; k < wanted; k++) {
        for (int i = 0; i < m->count; i++) add_slices(m, i, kinds[k]);
    }
}

// --- Elements ------------------------------------------------------------------------------------

// Elements of the piece `rows` x `columns` of the folder's tensor that begins there, into m->piece.
typedef struct Block {
    int64_t row, rows, column, columns;
} Block;

static bool read_block(Importing *m, const HfTensorPlace *place, int64_t all_columns, Block b, float *out,
                       int64_t stride) {
    bool whole = b.columns == all_columns && stride == all_columns;
    int64_t times = whole ? 1 : b.rows, count = whole ? b.rows * b.columns : b.columns;
    for (int64_t i = 0; i < times; i++) {
        int64_t first = (b.row + i) * all_columns + b.column;
        if (!safe_file_read(place->file, place->entry, first, count, m->narrow, out + i * stride, &m->error))
            return false;
    }
    return true;
}

// Our rows [row, row + rows) of a transposed tensor: m->piece gets those columns of the folder's,
// for each of its rows: q of these heads, k, v. Without heads: one run.
static bool read_columns(Importing *m, const HfTensor *t, const HfTensorPlace *place, int64_t row,
                         int64_t rows) {
    int64_t runs = t->by_head ? 3 : 1, each = rows / runs;
    for (int64_t k = 0; k < runs; k++) {
        Block block = {0, t->rows, k * m->model.hidden + row / runs, each};
        if (rows == t->columns) block = (Block){0, t->rows, 0, rows};
        if (!read_block(m, place, t->columns, block, m->piece + k * each, rows)) return false;
        if (rows == t->columns) return true;
    }
    return true;
}

// Our rows of another tensor. Of a vector m->piece gets the whole. The embedding ends before its
// padding.
static bool read_rows(Importing *m, const HfTensor *t, const HfTensorPlace *place, int64_t row,
                      int64_t rows) {
    int64_t columns = columns_of(t), there = t->rows - row < rows ? t->rows - row : rows;
    for (int64_t r = there > 0 ? there : 0; r < rows; r++)
        memcpy(m->piece + r * columns, m->padding, (size_t)columns * sizeof(float));
    return there <= 0 || read_block(m, place, columns, (Block){row, there, 0, columns}, m->piece, columns);
}

// Which row of m->piece, or column where the tensor is transposed, our row `r` of a piece of `rows`
// is.
static int64_t place_in_piece(const Importing *m, const HfTensor *t, int64_t r, int64_t rows) {
    int64_t size = m->model.hidden / m->model.heads;
    return t->by_head ? r / size % 3 * (rows / 3) + r / (3 * size) * size + r % size : r;
}

static bool put(Importing *m, const HfTensor *t, SliceKind kind, float value, void *host, int64_t at) {
    floatX rounded = floatX_from_float(value);
    if (kind == SLICE_WEIGHT) ((floatX *)host)[at] = rounded;
    else ((float *)host)[at] = value;
    if (isfinite(floatX_to_float(rounded))) return true;
    return error_set(&m->error, EXIT_CHECKPOINT,
                     "%s: '%s' has a value that is not finite; save or download it again", m->wish->folder,
                     t->name);
}

static bool fetch_piece(Importing *m, const Slice *s, const HfTensor *t, const HfTensorPlace *place,
                        void *host) {
    int64_t columns = columns_of(t), row = s->lo / columns, rows = s->hi / columns - row;
    if (!(t->transposed ? read_columns(m, t, place, row, rows) : read_rows(m, t, place, row, rows)))
        return false;
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = place_in_piece(m, t, r, rows);
        const float *from = m->piece + (t->transposed ? at : at * columns);
        for (int64_t c = 0; c < columns; c++) {
            if (!put(m, t, s->kind, from[t->transposed ? c * rows : c], host, r * columns + c)) return false;
        }
    }
    return true;
}

// CheckpointSave's. It cannot fail there: save() looks at `failed` before anything is published.
static void fetch(void *context, int i, void *host) {
    Importing *m = (Importing *)context;
    const Slice *s = &m->slices[i];
    bool zero = s->kind == SLICE_EXP_AVG || s->kind == SLICE_EXP_AVG_SQ || m->failed;
    if (zero) memset(host, 0, (size_t)(s->hi - s->lo) * (size_t)slice_kind_bytes(s->kind));
    else m->failed = !fetch_piece(m, s, &m->tensors[m->tensor_of[i]], m->places[m->tensor_of[i]], host);
}

// The mean of the embedding's rows. By convexity the mean of e^logit over the words is at least e
// to the mean logit, whatever the hidden state.
static bool make_padding(Importing *m, Error *err) {
    int64_t V = m->model.vocab, C = m->model.hidden, most = words_at_once(m);
    double *sum = (double *)xcalloc((size_t)C, sizeof *sum, "the mean of the embedding");
    bool ok = true;
    for (int64_t row = 0; ok && row < V; row += most) {
        int64_t rows = V - row < most ? V - row : most;
        ok = safe_file_read(m->places[0]->file, m->places[0]->entry, row * C, rows * C, m->narrow, m->piece,
                            err);
        for (int64_t i = 0; ok && i < rows * C; i++) sum[i % C] += m->piece[i];
    }
    m->padding = (float *)xmalloc((size_t)C * sizeof(float), "the mean of the embedding");
    for (int64_t c = 0; c < C; c++) m->padding[c] = (float)(sum[c] / (double)V);
    free(sum);
    return ok;
}

// --- Saving --------------------------------------------------------------------------------------

static bool check_save(const char *directory, Error *err) {
    char *tracker = text_format("%s/" CHECKPOINT_TRACKER, directory);
    int count;
    free(save_folder_list(directory, &count));
    bool taken = count > 0 || durable_exists(tracker);
    free(tracker);
    return !taken || error_set(err, EXIT_USAGE, "--save %s holds checkpoints; give a new folder", directory);
}

// The job's parts one by one. A fetch that failed ends it while all is under a temporary name.
static bool run_job(Importing *m, const CheckpointSave *save, Error *err) {
    Error ignored;  // there is an error to report already
    bool done = false;
    CheckpointJob *job = checkpoint_begin(save, err);
    bool ok = job != NULL;
    while (ok && !done && !m->failed) ok = checkpoint_advance(job, &done, err);
    checkpoint_job_free(job);
    if (!m->failed) return ok;
    save_folder_clear(m->wish->save, &ignored);
    if (err) *err = m->error;
    return false;
}

static bool save(Importing *m, Error *err) {
    Tensor *ours = (Tensor *)xcalloc((size_t)m->count, sizeof *ours, "the parameter table");
    for (int i = 0; i < m->count; i++) ours[i] = m->tensors[i].ours;
    char *arguments = hf_gpt2_arguments(&m->model, m->vocab_file, m->merge_file);
    CheckpointSave wanted = {.directory = m->wish->save,
                             .state = {.beta1_power = 1, .beta2_power = 1},
                             .arguments_json = arguments,
                             .tensors = ours,
                             .tensor_count = m->count,
                             .slices = m->slices,
                             .slice_count = m->slice_count,
                             .fetch = fetch,
                             .context = m,
                             .before = -1,
                             .peers = m->wish->peers};
    bool ok = hf_tokenizer_write(&m->tokenizer, m->wish->save, err) && run_job(m, &wanted, err);
    free(arguments);
    free(ours);
    return ok;
}

// What a save would read, without one.
static bool read_all(Importing *m, Error *err) {
    for (int i = 0; i < m->slice_count && !m->failed; i++) {
        const Slice *s = &m->slices[i];
        void *host = xmalloc((size_t)(s->hi - s->lo) * (size_t)slice_kind_bytes(s->kind), "a tensor's piece");
        fetch(m, i, host);
        free(host);
    }
    if (m->failed && err) *err = m->error;
    return !m->failed;
}

static bool save_alone(Importing *m, Error *err) {
    int lock = -1;
    bool ok = durable_make_folders(m->wish->save, err) && save_folder_lock(m->wish->save, 0, &lock, err) &&
              check_save(m->wish->save, err) && save(m, err);
    save_folder_unlock(lock);
    return ok;
}

static bool run(Importing *m, HfReport *report, Error *err) {
    if (m->wish->save && !check_save(m->wish->save, err)) return false;
    if (!read_config(m, err) || !hf_files_open(&m->files, m->wish->folder, err)) return false;
    make_buffers(m, words_at_once(m) * m->model.hidden);
    if (!match_tensors(m, err) || !read_tokenizer(m, report, err) || !make_padding(m, err)) return false;
    list_slices(m);
    report->parameters = hf_gpt2_parameters(&m->model);
    report->files = 1;
    return m->wish->save ? save_alone(m, err) : read_all(m, err);
}

bool hf_import(const HfImport *wish, HfReport *report, Error *err) {
    Importing m = {.wish = wish};
    memset(report, 0, sizeof *report);
    bool ok = run(&m, report, err);
    hf_files_close(&m.files);
    hf_tokenizer_free(&m.tokenizer);
    void *all[] = {m.tensors, m.places, m.vocab_file, m.merge_file, m.slices,
                   m.tensor_of, m.padding, m.piece, m.narrow};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    return ok;
}
