// Tests export to and import from Hugging Face folders: the trainer's logits match transformers in
// both directions, a round trip preserves all bytes, and hostile folders cause a one-line error.
// There is a golden folder for each family, with logits that transformers computed
// (dev/ref/make_hf_golden.py). Tolerances are tightest in the PRECISION=fp32 build.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/base/durable.h"
#include "dev/convert/hf.h"
#include "dev/convert/hf_family.h"
#include "dev/convert/hf_tokenizer.h"
#include "llmc/checkpoint/zero_slices.h"
#include "test/checkpoint_calls.h"
#include "test/golden/golden.h"
#include "test/leaks.h"
#include "test/unit/convert/hf_forward.h"
#include "test/unit/folder.h"
#include "test/unit/model_bench.h"

#define GOLDEN_FOLDER "test/golden/hf"
enum { T = 12, B = 2, VOCABULARY = 50 };

// A model family and the model in its golden folder.
typedef struct Family {
    const char *folder;
    int tensors;  // number of tensors
    const char *flags[60];
} Family;
#define SIZES \
    "--num-layers", "2", "--seq-length", "12", "--max-position-embeddings", "12", "--norm-epsilon", "1e-3", \
        "--micro-batch-size", "2", "--hidden-dropout", "0", "--attention-dropout", "0", \
        "--make-vocab-size-divisible-by", "8", "--ffn-hidden-size", "40"
#define LLAMA_SIZES \
    SIZES, "--hidden-size", "32", "--num-attention-heads", "4", "--group-query-attention", \
        "--num-query-groups", "2", "--normalization", "RMSNorm", "--position-embedding-type", "rope", \
        "--rotary-base", "500", "--swiglu"
static const Family FAMILIES[] = {
    {GOLDEN_FOLDER, 28, {SIZES, "--hidden-size", "24", "--num-attention-heads", "3"}},
    {GOLDEN_FOLDER "_llama", 35, {LLAMA_SIZES, "--untie-embeddings-and-output-weights"}},
    {GOLDEN_FOLDER "_qwen3",
     24,
     {LLAMA_SIZES, "--disable-bias-linear", "--qk-layernorm", "--kv-channels", "16"}},
    {GOLDEN_FOLDER "_mistral",
     21,
     {LLAMA_SIZES, "--untie-embeddings-and-output-weights", "--disable-bias-linear", "--window-size", "4,0"}},
    {GOLDEN_FOLDER "_qwen2",
     27,
     {LLAMA_SIZES, "--untie-embeddings-and-output-weights", "--disable-bias-linear", "--add-qkv-bias",
      "--position-embedding-type", "yarn", "--rotary-scaling-factor", "4",
      "--yarn-original-max-position-embeddings", "12", "--yarn-beta-fast", "0.9", "--yarn-beta-slow",
      "0.05"}},
};
enum { FAMILY_COUNT = sizeof FAMILIES / sizeof *FAMILIES };
static const Family *family = FAMILIES;  // the family under test

static bool open_bench(Bench *b) {
    int count = 0;
    while (family->flags[count]) count++;
    return bench_open(b, count, family->flags, VOCABULARY);
}

static const Peers ALONE = {MPI_COMM_SELF, 0, NULL};
static int64_t buffer_elements;  // buffer size in elements
static bool fp32_build(void) { return sizeof(floatX) == sizeof(float); }

// --- Test folder ------------------------------------------------------------------------------

typedef struct Work {
    char path[64];
    char run[80], hf[80], back[80], again[80];
} Work;

static int make_work(void **state) {
    Work *w = (Work *)calloc(1, sizeof *w);
    if (!w || folder_make(w->path, sizeof w->path, "test_hf")) return -1;
    snprintf(w->run, sizeof w->run, "%s/run", w->path);
    snprintf(w->hf, sizeof w->hf, "%s/hf", w->path);
    snprintf(w->back, sizeof w->back, "%s/back", w->path);
    snprintf(w->again, sizeof w->again, "%s/again", w->path);
    *state = w;
    buffer_elements = HF_BUFFER_ELEMENTS;
    family = FAMILIES;
    return 0;
}

// Runs a test for every family, each in its own folder.
static void for_families(void **state, void (*test)(const Work *w)) {
    for (family = FAMILIES; family < FAMILIES + FAMILY_COUNT; family++) {
        const Work *all = (const Work *)*state;
        Work w = *all;
        int number = (int)(family - FAMILIES);
        snprintf(w.path, sizeof w.path, "%.50s/%d", all->path, number);
        snprintf(w.run, sizeof w.run, "%s.run", w.path);
        snprintf(w.hf, sizeof w.hf, "%s.hf", w.path);
        snprintf(w.back, sizeof w.back, "%s.back", w.path);
        snprintf(w.again, sizeof w.again, "%s.again", w.path);
        test(&w);
    }
    family = FAMILIES;
}

static int remove_work(void **state) {
    int result = folder_remove(((Work *)*state)->path);
    free(*state);
    return result;
}

static void export(const char *load, const char *output, bool fp32, int64_t part_bytes, HfReport *report) {
    Error err = {0};
    HfExport options = {.load = load,
                        .iteration = -1,
                        .output = output,
                        .fp32 = fp32,
                        .part_bytes = part_bytes,
                        .buffer_elements = buffer_elements,
                        .peers = ALONE};
    if (!hf_export(&options, report, &err)) fail_msg("export: %s", err.what);
}

static bool import(const char *folder, const char *save, Error *err) {
    HfReport report;
    HfImport options = {
        .folder = folder, .save = save, .divisible = 8, .buffer_elements = buffer_elements, .peers = ALONE};
    return hf_import(&options, &report, err);
}

static void imports(const char *folder, const char *save) {
    Error err = {0};
    if (!import(folder, save, &err)) fail_msg("import: %s", err.what);
}

static bool same_file(const char *a, const char *b, const char *name) {
    size_t bytes_a = 0, bytes_b = 0;
    char *x = hf_slurp(a, name, &bytes_a), *y = hf_slurp(b, name, &bytes_b);
    bool same = x && y && bytes_a == bytes_b && memcmp(x, y, bytes_a) == 0;
    free(x);
    free(y);
    return same;
}

// --- The trainer ---------------------------------------------------------------------------------

// Returns logits (B*T, V) of the uploaded tokens, without the vocabulary's padding.
static float *trainer_logits(Bench *b, const int32_t *tokens) {
    int N = b->gpt.B * b->gpt.T, padded = b->gpt.V;
    bench_upload(b, tokens, tokens);
    zero_step_begins(b->zero, 1);
    bench_pass(b, 1.0f / (float)N, false, false, false);
    floatX *logits = (floatX *)calloc((size_t)(N * padded), sizeof *logits);
    float *wide = (float *)calloc((size_t)(N * VOCABULARY), sizeof *wide);
    op_linear_forward(b->compute, &(Linear){.N = N,
                                            .C = b->gpt.C,
                                            .OC = padded,
                                            .x = b->gpt.lnf.y,
                                            .w = zero_weight(b->zero, b->gpt.output),
                                            .y = logits,
                                            .workspace = b->gpt.workspace});
    for (int i = 0; i < N * VOCABULARY; i++)
        wide[i] = floatX_to_float(logits[i / VOCABULARY * padded + i % VOCABULARY]);
    free(logits);
    return wide;
}

static void load_bench(Bench *b, const char *folder) {
    Error err = {0};
    assert_true(open_bench(b));
    Checkpoint *c = open_exactly(folder, 0, MPI_COMM_SELF, &err);
    if (!c) fail_msg("%s", err.what);
    char notes[2048] = "";
    if (!config_match_checkpoint(&b->config, checkpoint_arguments(c), notes, sizeof notes, &err) ||
        !checkpoint_check_tensors(c, b->gpt.whole, b->gpt.whole_tensors, &err) ||
        !zero_restore(b->zero, c, true, &err))
        fail_msg("%s", err.what);
    checkpoint_close(c);
}

// Sets weights that reveal a missing term: gains differ from 1, biases from 0, and master weights
// from their bf16 values.
static void fill_bench(Bench *b) {
    uint32_t state = 12345;
    int pieces;
    const Range *held = zero_ranges(b->zero, SLICE_MASTER, &pieces);
    for (int i = 0; i < pieces; i++) {
        const Tensor *t = &zero_tensors(b->zero, NULL)[held[i].tensor];
        int64_t n = held[i].hi - held[i].lo;
        float *values = (float *)calloc((size_t)n, sizeof *values);
        floatX *rounded = (floatX *)calloc((size_t)n, sizeof *rounded);
        for (int64_t e = 0; e < n; e++) {
            state = state * 1664525u + 1013904223u;
            float noise = (float)(state >> 8) / (float)(1 << 24) - 0.5f;
            values[e] = t->dims == 2                     ? 0.6f * noise
                        : strstr(t->name, "norm.weight") ? 1 + 0.3f * noise
                                                         : 0.3f * noise;
            rounded[e] = floatX_from_float(values[e]);
        }
        zero_put(b->zero, i, SLICE_MASTER, values);
        if (held[i].lo == 0 && n == tensor_elements(t)) zero_put_weights(b->zero, held[i].tensor, rounded);
        else fail_msg("a parameter is split");
        free(values);
        free(rounded);
    }
}

static void save_bench(Bench *b, const char *folder) {
    Error err = {0};
    char *arguments = config_to_json(&b->config);
    ZeroSlices slices = zero_slices(b->zero, true);
    CheckpointSave save = {.directory = folder,
                           .state = {.iteration = 7, .beta1_power = 1, .beta2_power = 1},
                           .arguments_json = arguments,
                           .tensors = b->gpt.whole,
                           .tensor_count = b->gpt.whole_tensors,
                           .slices = slices.slices,
                           .slice_count = slices.count,
                           .fetch = zero_fetch_slice,
                           .context = b->zero,
                           .before = -1,
                           .peers = ALONE};
    if (!save_whole(&save, &err)) fail_msg("%s", err.what);
    free(slices.slices);
    free(arguments);
}

// Saves a checkpoint of a model with the weights of fill_bench.
static void make_run(const char *folder) {
    Bench b;
    assert_true(open_bench(&b));
    fill_bench(&b);
    save_bench(&b, folder);
    bench_close(&b);
}

// --- Tests: the same model -----------------------------------------------------------------------

static double largest_difference(const float *a, const float *b, int64_t n) {
    double most = 0;
    for (int64_t i = 0; i < n; i++) most = fmax(most, fabs((double)a[i] - b[i]));
    return most;
}

static void compare_imported(const Work *w) {
    Golden g;
    Bench b;
    int64_t n;
    char *path = text_format("%s/logits.golden", family->folder);
    assert_true(golden_open(&g, path));
    free(path);
    imports(family->folder, w->back);
    load_bench(&b, w->back);
    float *logits = trainer_logits(&b, golden_i32(&g, "tokens", NULL));
    const float *wanted = golden_f32(&g, "logits", &n), *error = golden_f32(&g, "error.logits", NULL);
    assert_int_equal(n, B * T * VOCABULARY);
    double difference = largest_difference(logits, wanted, n), allowed = fp32_build() ? 1e-4 : 2.0 * error[1];
    if (!(difference <= allowed))
        fail_msg("%s: logits differ by %g, allowed are %g", family->folder, difference, allowed);
    free(logits);
    golden_close(&g);
    bench_close(&b);
}
static void imported_logits_are_transformers(void **state) { for_families(state, compare_imported); }

// A padding row is the mean of all words' embeddings, so its probability is at most the mean
// probability of a word.
static void padding_is_harmless(void **state) {
    Work *w = (Work *)*state;
    Bench b;
    imports(GOLDEN_FOLDER, w->back);
    load_bench(&b, w->back);
    const floatX *words = zero_weight(b.zero, GPT_WTE);
    for (int c = 0; c < 24; c++) {
        double mean = 0;
        for (int v = 0; v < VOCABULARY; v++) mean += floatX_to_float(words[v * 24 + c]) / VOCABULARY;
        for (int v = VOCABULARY; v < b.gpt.V; v++)
            assert_true(fabs(floatX_to_float(words[v * 24 + c]) - mean) < (fp32_build() ? 1e-6 : 2e-3));
    }
    assert_int_equal(b.gpt.V, 56);
    bench_close(&b);
}

static void compare_exported(const Work *w, bool fp32, double allowed) {
    Bench b;
    HfReport report;
    HfFolder folder = {0};
    int32_t tokens[B * T];
    double *logits = (double *)calloc(T * VOCABULARY, sizeof *logits), worst = 0;
    for (int i = 0; i < B * T; i++) tokens[i] = (i * 17 + 5) % VOCABULARY;
    assert_true(open_bench(&b));
    fill_bench(&b);
    save_bench(&b, w->run);
    export(w->run, w->hf, fp32, 1 << 30, &report);
    assert_int_equal(report.iteration, 7);
    float *ours = trainer_logits(&b, tokens);
    assert_true(hf_open(&folder, w->hf));
    for (int row = 0; row < B; row++) {
        hf_logits(&folder, tokens + row * T, T, logits);
        for (int i = 0; i < T * VOCABULARY; i++)
            worst = fmax(worst, fabs(logits[i] - ours[row * T * VOCABULARY + i]));
    }
    if (!(worst <= allowed)) fail_msg("logits differ by %g, allowed are %g", worst, allowed);
    hf_close(&folder);
    free(logits);
    free(ours);
    bench_close(&b);
}

// Logits are below 4 and bf16 sums round in steps of 2^-9 of that, so the bf16 tolerance is about
// ten such steps.
static void exported_master_weights_compute_the_same(void **state) {
    compare_exported((Work *)*state, true, fp32_build() ? 1e-4 : 0.08);
}
static void exported_weights_compute_the_same(void **state) {
    compare_exported((Work *)*state, false, fp32_build() ? 0.05 : 0.08);
}

// --- Tests: the same bytes -----------------------------------------------------------------------

static void compare_round(const Work *w, bool fp32, int64_t part_bytes, int parts) {
    HfReport report;
    make_run(w->run);
    export(w->run, w->hf, fp32, part_bytes, &report);
    assert_int_equal(report.files, parts);
    imports(w->hf, w->back);
    export(w->back, w->again, fp32, part_bytes, &report);
    assert_true(same_file(w->hf, w->again, "config.json"));
    for (int part = 1; parts > 1 && part <= parts; part++) {
        char name[64];
        snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", part, parts);
        assert_true(same_file(w->hf, w->again, name));
    }
    assert_true(same_file(w->hf, w->again, parts > 1 ? "model.safetensors.index.json" : "model.safetensors"));
}

static void compare_masters(const Work *w) { compare_round(w, true, 1 << 30, 1); }
static void compare_weights(const Work *w) { compare_round(w, false, 1 << 30, 1); }
static void master_weights_round_trip(void **state) { for_families(state, compare_masters); }
static void weights_round_trip(void **state) { for_families(state, compare_weights); }
// Converts with buffers for one row, several rows, a head, and a vector. The files must be
// identical.
static void compare_pieces(const Work *w) {
    static const int64_t sizes[] = {1, 60, 100, 3 * 8 * 24, 1000};
    HfReport report;
    make_run(w->run);
    export(w->run, w->hf, true, 1 << 30, &report);
    for (int i = 0; i < 5; i++) {
        char *save = text_format("%s/%d", w->path, i), *out = text_format("%s/%d.hf", w->path, i);
        buffer_elements = sizes[i];
        imports(w->hf, save);
        buffer_elements = HF_BUFFER_ELEMENTS;
        export(save, w->again, true, 1 << 30, &report);
        assert_true(same_file(w->hf, w->again, "model.safetensors"));
        assert_int_equal(folder_remove(w->again), 0);
        buffer_elements = sizes[i];
        export(w->run, out, true, 1 << 30, &report);
        assert_true(same_file(w->hf, out, "model.safetensors"));
        free(save);
        free(out);
    }
}

static void buffer_size_does_not_matter(void **state) { for_families(state, compare_pieces); }

static void shards_round_trip(void **state) { compare_round((Work *)*state, true, 15000, 4); }

// A folder that transformers saved has a different order of tensors, but the same elements.
static void compare_golden(const Work *w) {
    HfReport report;
    HfFolder a = {0}, b = {0};
    imports(family->folder, w->back);
    export(w->back, w->hf, true, 1 << 30, &report);
    assert_true(hf_open_weights(&a, family->folder) && hf_open_weights(&b, w->hf));
    int tensors = 0;
    int64_t bytes = 0;
    for (const cJSON *item = a.header->child; item; item = item->next) {
        const cJSON *other = cJSON_GetObjectItemCaseSensitive(b.header, item->string);
        if (strcmp(item->string, "__metadata__") == 0) continue;
        assert_non_null(other);
        const cJSON *x = cJSON_GetObjectItem(item, "data_offsets")->child;
        const cJSON *y = cJSON_GetObjectItem(other, "data_offsets")->child;
        assert_true(
            cJSON_Compare(cJSON_GetObjectItem(item, "shape"), cJSON_GetObjectItem(other, "shape"), true));
        assert_memory_equal(a.data + x->valueint, b.data + y->valueint, x->next->valueint - x->valueint);
        bytes += x->next->valueint - x->valueint;
        tensors++;
    }
    assert_int_equal(tensors, family->tensors);
    assert_int_equal(cJSON_GetArraySize(b.header), tensors + 1);  // "__metadata__"
    assert_int_equal(report.parameters, bytes / 4);
    hf_close(&a);
    hf_close(&b);
}
static void golden_round_trips(void **state) { for_families(state, compare_golden); }

static void without_master_weights(void **state) {
    Work *w = (Work *)*state;
    Error err = {0};
    HfReport report;
    HfImport options = {.folder = GOLDEN_FOLDER,
                        .save = w->back,
                        .divisible = 8,
                        .no_optimizer = true,
                        .buffer_elements = HF_BUFFER_ELEMENTS,
                        .peers = ALONE};
    assert_true(hf_import(&options, &report, &err));
    HfExport fp32 = {.load = w->back,
                     .iteration = -1,
                     .output = w->hf,
                     .fp32 = true,
                     .part_bytes = 1 << 30,
                     .buffer_elements = HF_BUFFER_ELEMENTS,
                     .peers = ALONE};
    assert_false(hf_export(&fp32, &report, &err));
    assert_int_equal(err.code, EXIT_CHECKPOINT);
    assert_non_null(strstr(err.what, "--dtype bf16"));
    assert_false(durable_exists(w->hf));
    if (!fp32_build()) export(w->back, w->hf, false, 1 << 30, &report);
}

static void byte_vocabulary(void **state) {
    Work *w = (Work *)*state;
    Error err = {0};
    HfTokenizer bytes = {0}, read = {0};
    hf_tokenizer_of_bytes(&bytes);
    assert_true(hf_tokenizer_write(&bytes, w->path, &err));
    char *vocab = text_format("%s/vocab.json", w->path), *merges = text_format("%s/merges.txt", w->path);
    TokenizerChoice choice = {.type = TOKENIZER_GPT2_BPE, .vocab_file = vocab, .merge_file = merges};
    if (!hf_tokenizer_read(&read, &choice, &err)) fail_msg("%s", err.what);
    assert_true(read.size == 257 && read.eod == 256);
    Tokenizer *t = tokenizer_open(&choice, &err);
    for (int byte = 0; byte < 256; byte++) {
        size_t length;
        const char *text = tokenizer_decode(t, byte, &length);
        assert_true(length == 1 && (unsigned char)*text == byte);
    }
    tokenizer_close(t);
    hf_tokenizer_free(&bytes);
    hf_tokenizer_free(&read);
    free(vocab);
    free(merges);
}

// --- Tests: folders of other programs, hostile folders ----------------------------------------

static void put(const char *folder, const char *name, const void *data, size_t bytes) {
    Error err = {0};
    char *path = text_format("%s/%s", folder, name);
    assert_true(durable_make_folders(folder, &err) && durable_write_file(path, data, bytes, &err));
    free(path);
}

// Writes a weight file with this header and the data of the family's golden folder.
static void put_model(const char *folder, const char *name, const char *header) {
    size_t bytes;
    uint64_t old, length = strlen(header);
    char *model = hf_slurp(family->folder, "model.safetensors", &bytes);
    memcpy(&old, model, 8);
    size_t data = bytes - 8 - old;
    char *fresh = (char *)calloc(1, 8 + length + data);
    memcpy(fresh, &length, 8);
    memcpy(fresh + 8, header, length);
    memcpy(fresh + 8 + length, model + 8 + old, data);
    put(folder, name, fresh, 8 + length + data);
    free(fresh);
    free(model);
}

// Returns text with every `from` replaced by `to`. The caller frees it.
static char *replaced(const char *text, const char *from, const char *to) {
    char *out = (char *)calloc(1, 3 * strlen(text) + 4 * strlen(to) + 1000);
    for (char *end = out; *text; end += strlen(end)) {
        bool here = *from && strncmp(text, from, strlen(from)) == 0;
        if (here) strcpy(end, to);
        else *end = *text;
        text += here ? strlen(from) : 1;
    }
    return out;
}

static char *golden_header(void) {
    size_t bytes;
    uint64_t length;
    char *model = hf_slurp(family->folder, "model.safetensors", &bytes);
    memcpy(&length, model, 8);
    char *header = (char *)calloc(1, length + 1);
    memcpy(header, model + 8, length);
    free(model);
    return header;
}

// Copies the golden folder with one replacement in config.json and one in the header.
static void put_changed(const char *folder, const char *config_from, const char *config_to, const char *from,
                        const char *to) {
    size_t bytes;
    char *config = hf_slurp(family->folder, "config.json", &bytes), *header = golden_header();
    char *new_config = replaced(config, config_from, config_to), *new_header = replaced(header, from, to);
    put(folder, "config.json", new_config, strlen(new_config));
    put_model(folder, "model.safetensors", new_header);
    free(config);
    free(header);
    free(new_config);
    free(new_header);
}

static void refuses(const Work *w, const char *says) {
    Error err = {0};
    if (import(w->hf, w->back, &err)) fail_msg("accepted instead of refused with '%s'", says);
    if (err.code != EXIT_CHECKPOINT || !strstr(err.what, says) || !strchr(err.what, ';'))
        fail_msg("code %d, '%s' instead of '%s'", err.code, err.what, says);
    assert_false(durable_exists(w->back));
}

typedef struct Case {
    const char *config_from, *config_to, *from, *to, *says;
} Case;

#define WTE "\"transformer.wte.weight\":{\"dtype\":\"F32\",\"shape\":[50,24]"
static const Case CASES[] = {
    {"gpt2", "bert", "", "", "model_type 'bert'"},
    {"\"gelu_new\"", "\"gelu\"", "", "", "activation_function 'gelu'"},
    {"\"gelu_new\"", "7", "", "", "activation_function '7'"},
    {"\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false", "", "", "tie_word_embeddings"},
    {"\"scale_attn_by_inverse_layer_idx\": false", "\"scale_attn_by_inverse_layer_idx\": true", "", "",
     "layer"},
    {"\"n_layer\": 2", "\"n_layer\": 1e9", "", "", "--num-layers"},
    {"\"n_layer\": 2", "\"n_layer\": 10000", "", "", "no tensor"},
    {"\"n_layer\": 2", "\"n_layer\": 1", "", "", "12 tensors that"},
    {"\"n_layer\": 2", "\"n_layer\": -2", "", "", "--num-layers"},
    {"\"n_layer\": 2,", "", "", "", "--num-layers"},
    {"\"n_embd\": 24", "\"n_embd\": 1048576", "", "", "--num-attention-heads"},
    {"\"n_embd\": 24", "\"n_embd\": 48", "", "", "is not (50, 48)"},
    {"\"n_head\": 3", "\"n_head\": 2", "", "", "--num-attention-heads"},
    {"\"n_head\": 3", "\"n_head\": 5", "", "", "--num-attention-heads"},
    {"\"n_inner\": 40", "\"n_inner\": null", "", "", "is not (24, 96)"},
    {"\"vocab_size\": 50", "\"vocab_size\": 1073741824", "", "", "is not (1073741824, 24)"},
    {"\"layer_norm_epsilon\": 0.001", "\"layer_norm_epsilon\": \"x\"", "", "", "layer_norm_epsilon"},
    {"{", "[", "", "", "not a JSON object"},
    {"", "", "{\"__meta", "[\"__meta", "its header is not a JSON object"},
    {"", "", "transformer.wte.weight", "transformer.wte.height", "no tensor 'transformer.wte.weight'"},
    {"", "", "transformer.h.1.ln_2.bias", "transformer.h.2.ln_2.bias",
     "no tensor 'transformer.h.1.ln_2.bias'"},
    {"", "", "transformer.h.1.ln_2.bias", "transformer.h.1.ln_1.bias", "the same name"},
    {"", "", WTE, "\"transformer.wte.weight\":{\"dtype\":\"F32\",\"shape\":[24,50]", "is not (50, 24)"},
    {"", "", WTE, "\"transformer.wte.weight\":{\"dtype\":\"F32\",\"shape\":[1200]", "is not (50, 24)"},
    {"", "", WTE, "\"transformer.wte.weight\":{\"dtype\":\"BF16\",\"shape\":[50,24]", "is not (50, 24)"},
    {"", "", WTE, "\"transformer.wte.weight\":{\"dtype\":\"F64\",\"shape\":[50,24]", "in F32, BF16 or F16"},
    {"", "", WTE, "\"transformer.wte.weight\":{\"dtype\":7,\"shape\":[50,24]", "dtype is malformed"},
    {"", "", WTE, "\"transformer.wte.weight\":{\"dtype\":\"F32\",\"shape\":[-50,24]", "shape is malformed"},
    {"", "", WTE, "\"transformer.wte.weight\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,50,24]", "shape"},
    {"", "", "\"data_offsets\":[0,288]", "\"data_offsets\":[-288,0]", "offsets are malformed"},
    {"", "", "\"data_offsets\":[0,288]", "\"data_offsets\":[288,0]", "offsets are malformed"},
    {"", "", "\"data_offsets\":[0,288]", "\"data_offsets\":[0,9007199254740992]",
     "is shorter than its tensors"},
    {"", "", "\"data_offsets\":[0,288]", "\"data_offsets\":[0,284]", "bytes that belong to no tensor"},
    {"", "", "\"data_offsets\":[0,288]", "\"data_offsets\":[0,292]", "tensors overlap"},
    {"", "", "{\"__metadata__\"", "{\"x\\u0000y\":{},\"__metadata__\"", "its header is not a JSON object"},
    {"", "", "{\"__metadata__\"",
     "{\"lora\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}"
     ",\"__metadata__\"",
     "1 tensors that"},
};

#define LLAMA3(factor) \
    "\"factor\": " #factor \
    ",\n    \"high_freq_factor\": 4.0,\n    \"low_freq_factor\": 1.0,\n" \
    "    \"original_max_position_embeddings\": 8192,\n    \"rope_type\": \"llama3\""
#define EMBEDDING "\"model.embed_tokens.weight\":{\"dtype\":\"F32\",\"shape\":[50,32]"
static const Case LLAMA_CASES[] = {
    {"\"rope_type\": \"default\"", "\"rope_type\": \"llama3\", \"factor\": 8.0", "", "",
     "rope_parameters.low_freq_factor '(none)'"},
    {"\"rope_type\": \"default\"", "\"rope_type\": \"dynamic\", \"factor\": 8.0", "", "",
     "rope_parameters.rope_type 'dynamic'"},
    {"\"rope_type\": \"default\"", "\"rope_type\": 7", "", "", "rope_parameters.rope_type '7'"},
    {"\"rope_type\": \"default\"", "\"rope_type\": \"default\", \"factor\": 8.0", "", "",
     "rope_parameters.factor '8'"},
    {"\"rope_type\": \"default\"", LLAMA3("8"), "", "", "rope_parameters.factor '8'"},
    {"\"rope_type\": \"default\"", LLAMA3(0.5), "", "", "--rope-scaling-factor"},
    {"\"rope_type\": \"default\"", "\"rope_type\": \"default\", \"partial_rotary_factor\": 0.5", "", "",
     "partial_rotary_factor '0.5'"},
    {"\"use_cache\"", "\"rope_scaling\": {\"type\": \"linear\"}, \"use_cache\"", "", "",
     "rope_scaling.factor '(none)'"},
    {"\"use_cache\"", "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 0.5}, \"use_cache\"", "", "",
     "--rotary-seq-len-interpolation-factor"},
    {"\"use_cache\"", "\"rope_scaling\": [2], \"use_cache\"", "", "", "rope_scaling '"},
    {"\"use_cache\"", "\"rope_theta\": 10000.0, \"use_cache\"", "", "", "rope_theta 10000"},
    {"\"rope_theta\": 500.0", "\"rope_theta\": \"big\"", "", "", "rope_theta 'big'"},
    {"\"rope_theta\": 500.0", "\"rope_theta\": 0.5", "", "", "--rotary-base"},
    {"\"mlp_bias\": true", "\"mlp_bias\": false", "", "", "mlp_bias false, but other keys imply true"},
    {"\"mlp_bias\": true", "\"mlp_bias\": 1", "", "", "not a boolean"},
    {"\"attention_bias\": true,", "", "", "", "mlp_bias true, but other keys imply false"},
    {"\"silu\"", "\"gelu\"", "", "", "hidden_act 'gelu'"},
    {"\"head_dim\": 8", "\"head_dim\": 16", "", "", "is not (64, 32)"},
    {"\"head_dim\": 8", "\"head_dim\": 12", "", "", "12"},
    {"\"head_dim\": 8", "\"head_dim\": 65536, \"num_attention_heads\": 65536", "", "", "too wide"},
    {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", "", "", "--num-query-groups 3"},
    {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 0", "", "", "--num-query-groups"},
    {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4", "", "", "is not (32, 32)"},
    {"\"num_key_value_heads\": 2,", "", "", "", "is not (32, 32)"},
    {"\"max_position_embeddings\": 12,", "", "", "", "--max-position-embeddings"},
    {"\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true", "", "", "a separate output layer"},
    {"\"llama\"", "\"qwen3\"", "", "", "attention_bias 'true'"},
    {"\"llama\"", "\"mistral\"", "", "", "do not belong to a MistralForCausalLM"},
    {"\"use_cache\"", "\"quantization_config\": {}, \"use_cache\"", "", "", "quantized"},
    {"\"intermediate_size\": 40", "\"intermediate_size\": 48", "", "", "is not (48, 32)"},
    {"", "", EMBEDDING, "\"model.embed_tokens.weight\":{\"dtype\":\"F32\",\"shape\":[32,50]",
     "is not (50, 32)"},
    {"", "", "self_attn.k_proj.weight", "self_attn.key.weight", "self_attn.k_proj.weight"},
};

// Nested objects in a list. A naive comparison would double its time with every level.
static void deep_lists(void **state) {
    enum { LEVELS = 60 };
    Work *w = (Work *)*state;
    char *object = text_format("1");
    for (int i = 0; i < LEVELS; i++) {
        char *outer = text_format("{\"a\": %s}", object);
        free(object);
        object = outer;
    }
    char *list = text_format("\"activation_function\": [%s, %s]", object, object);
    put_changed(w->hf, "\"activation_function\": \"gelu_new\"", list, "", "");
    refuses(w, "activation_function '?'");
    free(object);
    free(list);
}

static void hostile_llamas(void **state) {
    Work *w = (Work *)*state;
    family = &FAMILIES[1];
    for (size_t i = 0; i < sizeof LLAMA_CASES / sizeof *LLAMA_CASES; i++) {
        const Case *c = &LLAMA_CASES[i];
        put_changed(w->hf, c->config_from, c->config_to, c->from, c->to);
        refuses(w, c->says);
    }
}

// Accepts redundant or older forms of keys: the former key of the rotary base, sizes that follow
// from others.
static void same_llamas(void **state) {
    static const Case same[] = {
        {"\"rope_parameters\": {\n    \"rope_theta\": 500.0,\n    \"rope_type\": \"default\"\n  }",
         "\"rope_theta\": 500, \"rope_scaling\": null", "", "", ""},
        {"\"head_dim\": 8,", "", "", "", ""},
    };
    Work *w = (Work *)*state;
    HfReport report;
    char *first = text_format("%s/first", w->path), *first_hf = text_format("%s/first.hf", w->path);
    family = &FAMILIES[1];
    imports(family->folder, first);
    export(first, first_hf, true, 1 << 30, &report);
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        put_changed(w->hf, same[i].config_from, same[i].config_to, "", "");
        imports(w->hf, w->back);
        export(w->back, w->again, true, 1 << 30, &report);
        assert_true(same_file(first_hf, w->again, "model.safetensors"));
        assert_true(same_file(first_hf, w->again, "config.json"));
        assert_int_equal(folder_remove(w->back) || folder_remove(w->again), 0);
    }
    free(first);
    free(first_hf);
}

// Llama 3.1's RoPE scaling under the new key, the old key, or both gives the same model.
static void scaled_llamas(void **state) {
    static const Case scaled[] = {
        {"\"rope_type\": \"default\"", LLAMA3(8.0), "", "", ""},
        {"\"use_cache\"", "\"rope_scaling\": {" LLAMA3(8) "}, \"use_cache\"", "", "", ""},
        {"\"rope_parameters\": {\n    \"rope_theta\": 500.0,\n    \"rope_type\": \"default\"\n  }",
         "\"rope_theta\": 500, \"rope_scaling\": {" LLAMA3(8.0) "}", "", "", ""},
    };
    Work *w = (Work *)*state;
    HfReport report;
    size_t bytes;
    family = &FAMILIES[1];
    for (size_t i = 0; i < sizeof scaled / sizeof *scaled; i++) {
        put_changed(w->hf, scaled[i].config_from, scaled[i].config_to, "", "");
        imports(w->hf, w->back);
        export(w->back, w->again, true, 1 << 30, &report);
        char *flags = hf_slurp(w->back, "model.args", &bytes);
        char *config = hf_slurp(w->again, "config.json", &bytes);
        assert_non_null(strstr(flags, "--use-rope-scaling"));
        assert_non_null(strstr(flags, "--rope-scaling-factor 8"));
        const char *older = strstr(config, "\"rope_scaling\"");
        assert_non_null(older);
        assert_non_null(strstr(older, "\"rope_type\": \"llama3\""));
        assert_non_null(strstr(config, "\"rope_parameters\": {\n    \"factor\": 8.0"));
        free(flags);
        free(config);
        assert_int_equal(folder_remove(w->back) || folder_remove(w->again), 0);
    }
}

static void hostile_headers(void **state) {
    Work *w = (Work *)*state;
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        const Case *c = &CASES[i];
        put_changed(w->hf, c->config_from, c->config_to, c->from, c->to);
        refuses(w, c->says);
    }
}

static void hostile_files(void **state) {
    Work *w = (Work *)*state;
    size_t bytes;
    put_changed(w->hf, "", "", "", "");
    char *model = hf_slurp(w->hf, "model.safetensors", &bytes);
    put(w->hf, "model.safetensors", model, bytes - 1);
    refuses(w, "is shorter than its tensors");
    put(w->hf, "model.safetensors", model, 500);
    refuses(w, "is shorter than its header");
    put(w->hf, "model.safetensors", model, 7);
    refuses(w, "too short");
    memset(model, 0xff, 8);
    put(w->hf, "model.safetensors", model, bytes);
    refuses(w, "more than 16 MiB");
    char *path = text_format("%s/model.safetensors", w->hf);
    assert_int_equal(unlink(path), 0);
    refuses(w, "has neither model.safetensors");
    put(w->hf, "pytorch_model.bin", "x", 1);
    refuses(w, "pickled weights");
    assert_int_equal(mkfifo(path, 0600), 0);
    refuses(w, "not a regular file");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    refuses(w, "not a regular file");
    free(path);
    free(model);
    path = text_format("%s/config.json", w->hf);
    assert_int_equal(unlink(path), 0);
    refuses(w, "config.json");
    free(path);
}

static void not_finite(void **state) {
    Work *w = (Work *)*state;
    size_t bytes;
    uint64_t header;
    const float values[] = {NAN, INFINITY, 3.4028e38f};  // the last one rounds to infinity in bf16
    put_changed(w->hf, "", "", "", "");
    char *model = hf_slurp(w->hf, "model.safetensors", &bytes);
    memcpy(&header, model, 8);
    for (int i = 0; i < (fp32_build() ? 2 : 3); i++) {
        Error err = {0};
        memcpy(model + 8 + header + 7000, &values[i], 4);
        put(w->hf, "model.safetensors", model, bytes);
        assert_false(import(w->hf, w->back, &err));
        assert_non_null(strstr(err.what, "non-finite"));
        assert_false(durable_exists(w->back));
    }
    Error err = {0};
    put(w->back, "notes", "x", 1);  // an existing folder must be kept
    assert_false(import(w->hf, w->back, &err));
    assert_true(newest_checkpoint(w->back, &err) < 0);
    assert_true(same_file(w->back, w->back, "notes"));
    free(model);
}

static void put_index(const Work *w, const char *file) {
    char *header = golden_header(), *index = text_format("{\"weight_map\": {");
    cJSON *tensors = cJSON_Parse(header);
    for (const cJSON *item = tensors->child->next; item; item = item->next) {
        char *longer = text_format("%s\"%s\": \"%s\"%s", index, item->string, file, item->next ? "," : "}}");
        free(index);
        index = longer;
    }
    put(w->hf, "model.safetensors.index.json", index, strlen(index));
    cJSON_Delete(tensors);
    free(header);
    free(index);
}

static void hostile_indices(void **state) {
    Work *w = (Work *)*state;
    static const char *const names[] = {"../a.safetensors",
                                        "/tmp/a.safetensors",
                                        ".a.safetensors",
                                        "a.bin",
                                        "x/../a.safetensors",
                                        ".safetensors",
                                        ""};
    char *header = golden_header();
    put_changed(w->hf, "", "", "", "");
    put_model(w->path, "a.safetensors", header);
    put_model(w->hf, "a.safetensors", header);
    char *path = text_format("%s/model.safetensors", w->hf);
    assert_int_equal(unlink(path), 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        put_index(w, names[i]);
        refuses(w, "not the name of a safetensors file");
    }
    put_index(w, "b.safetensors");
    refuses(w, "b.safetensors");
    static const char *const texts[] = {"{\"weight_map\": []}", "{}", "{\"weight_map\": {\"a\": 7}}", "[]",
                                        ""};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        put(w->hf, "model.safetensors.index.json", texts[i], strlen(texts[i]));
        refuses(w, "model.safetensors.index.json");
    }
    static const char zero[] = "{\"weight_map\": {\"a\": \"a.safetensors\\u0000x\"}}";
    put(w->hf, "model.safetensors.index.json", zero, strlen(zero));
    refuses(w, "is not a JSON object");
    static const char absent[] = "{\"weight_map\": {\"a\": \"a.safetensors\"}}";
    put(w->hf, "model.safetensors.index.json", absent, strlen(absent));
    refuses(w, "has no 'a'");
    put_index(w, "a.safetensors");
    imports(w->hf, w->back);
    free(path);
    free(header);
}

// OpenAI's original tensor names, with saved masks and a copy of the tied output layer.
static void older_folders(void **state) {
    Work *w = (Work *)*state;
    HfReport report;
    size_t bytes = 0;
    long begin, end;
    char *header = golden_header(), *bare = replaced(header, "\"transformer.", "\"");
    char *model = hf_slurp(GOLDEN_FOLDER, "model.safetensors", &bytes);
    char *data = model + 8 + strlen(header);
    long size = (long)(bytes - 8 - strlen(header));
    const char *embedding = strstr(strstr(bare, "\"wte.weight\""), "data_offsets\":[");
    assert_int_equal(sscanf(embedding, "data_offsets\":[%ld,%ld]", &begin, &end), 2);
    long copied = size + end - begin, masked = copied + 144, total = masked + 4;
    char *extra = text_format(
        "{\"lm_head.weight\":{\"dtype\":\"F32\",\"shape\":[50,24],\"data_offsets\":[%ld,%ld]},"
        "\"h.0.attn.bias\":{\"dtype\":\"U8\",\"shape\":[1,1,12,12],\"data_offsets\":[%ld,%ld]},"
        "\"h.1.attn.masked_bias\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[%ld,%ld]},"
        "\"__metadata__\"",
        size, copied, copied, masked, masked, total);
    char *old = replaced(bare, "{\"__metadata__\"", extra);
    uint64_t length = strlen(old);
    char *file = (char *)calloc(1, 8 + length + (size_t)total);
    memcpy(file, &length, 8);
    memcpy(file + 8, old, length);
    memcpy(file + 8 + length, data, (size_t)size);
    memcpy(file + 8 + length + size, data + begin, (size_t)(end - begin));
    put_changed(w->hf, "", "", "", "");
    put(w->hf, "model.safetensors", file, 8 + length + (size_t)total);
    imports(w->hf, w->back);
    export(w->back, w->again, true, 1 << 30, &report);
    imports(GOLDEN_FOLDER, w->run);
    char *golden = text_format("%s/golden", w->path);
    export(w->run, golden, true, 1 << 30, &report);
    assert_true(same_file(w->again, golden, "model.safetensors"));
    // The copy of the output layer must equal the embedding.
    file[8 + length + (uint64_t)size] ^= 1;
    put(w->hf, "model.safetensors", file, 8 + length + (size_t)total);
    char *refused = text_format("%s/refused", w->path);
    Error err = {0};
    assert_false(import(w->hf, refused, &err));
    assert_non_null(strstr(err.what, "a separate output layer"));
    free(refused);
    free(golden);
    free(file);
    free(old);
    free(extra);
    free(model);
    free(bare);
    free(header);
}

// In the golden folder, replaces layer 0's c_attn.bias by 72 fp16 values.
static void halves_are_read(void **state) {
    Work *w = (Work *)*state;
    static const uint16_t halves[8] = {0x3C00, 0xC000, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0x3555, 0x0000};
    static const float values[8] = {1, -2, 0x1p-24f, -0x1p-24f, 0x3FFp-24f, 65504, 0x1.554p-2f, 0};
    HfReport report;
    HfFolder folder = {0};
    size_t bytes;
    uint64_t length;
    put_changed(w->hf, "", "", "\"F32\",\"shape\":[72],\"data_offsets\":[0,288]",
                "\"F16\",\"shape\":[72],\"data_offsets\":[0,144]},\"transformer.h.0.attn.bias\":"
                "{\"dtype\":\"U8\",\"shape\":[144],\"data_offsets\":[144,288]");
    char *model = hf_slurp(w->hf, "model.safetensors", &bytes);
    memcpy(&length, model, 8);
    for (int i = 0; i < 72; i++) memcpy(model + 8 + length + 2 * i, &halves[i % 8], 2);
    put(w->hf, "model.safetensors", model, bytes);
    imports(w->hf, w->back);
    export(w->back, w->again, true, 1 << 30, &report);
    assert_true(hf_open(&folder, w->again));
    HfMatrix bias = hf_tensor(&folder, 0, "attn.c_attn.bias", 72);
    for (int i = 0; i < 72; i++) assert_true(hf_at(bias, i) == values[i % 8]);
    hf_close(&folder);
    free(model);
}

// --- Tests: existing outputs ------------------------------------------------------------------

static void taken_folders(void **state) {
    Work *w = (Work *)*state;
    Error err = {0};
    HfReport report;
    make_run(w->run);
    put(w->hf, "notes", "x", 1);
    HfExport options = {.load = w->run,
                        .iteration = -1,
                        .output = w->hf,
                        .part_bytes = 1,
                        .buffer_elements = HF_BUFFER_ELEMENTS,
                        .peers = ALONE};
    assert_false(hf_export(&options, &report, &err));
    assert_int_equal(err.code, EXIT_USAGE);
    assert_false(import(GOLDEN_FOLDER, w->run, &err));
    assert_int_equal(err.code, EXIT_USAGE);
    options.output = w->again;
    options.iteration = 3;
    assert_false(hf_export(&options, &report, &err));
    assert_int_equal(err.code, EXIT_CHECKPOINT);
    options.load = w->path;
    options.iteration = -1;
    assert_false(hf_export(&options, &report, &err));
    assert_int_equal(err.code, EXIT_CHECKPOINT);
    assert_false(durable_exists(w->again));
}

// Finds the family that matches a model's flags, or names the flag that no family supports.
static void families_by_flags(void **state) {
    static const struct {
        const char *flags[8], *family;  // or the error text
    } cases[] = {
        {{0}, "gpt2"},
        {{"--normalization", "RMSNorm"}, "normalization RMSNorm"},
        {{"--swiglu"}, "swiglu true"},
        {{"--disable-bias-linear"}, "disable_bias_linear true"},
        {{"--untie-embeddings-and-output-weights"}, "untie_embeddings_and_output_weights true"},
        {{"--group-query-attention"}, "group_query_attention true"},
        {{"--qk-layernorm"}, "qk_layernorm true"},
        {{"--kv-channels", "16"}, "kv_channels 16"},
        {{"--position-embedding-type", "rope"}, "position_embedding_type rope"},
        {{"--normalization", "RMSNorm", "--swiglu", "--position-embedding-type", "rope"}, "llama"},
        {{"--normalization", "RMSNorm", "--swiglu", "--position-embedding-type", "rope", "--qk-layernorm",
          "--disable-bias-linear"},
         "qwen3"},
        {{"--normalization", "RMSNorm", "--position-embedding-type", "rope"}, "swiglu false"},
        {{"--normalization", "RMSNorm", "--swiglu"}, "position_embedding_type learned_absolute"},
        {{"--normalization", "RMSNorm", "--swiglu", "--position-embedding-type", "rope", "--rotary-percent",
          "0.5"},
         "rotary_percent 0.5"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *flags[40];
        int count = 0;
        ImportedModel model = {0};
        Error err = {0};
        for (; FAMILIES[0].flags[count]; count++) flags[count] = FAMILIES[0].flags[count];
        for (int k = 0; k < 8 && cases[i].flags[k]; k++) flags[count++] = cases[i].flags[k];
        assert_true(bench_configure(&model.config, count, flags, VOCABULARY, &err));
        const HfFamily *found = hf_family_of(&model, &err);
        if (found) {
            assert_string_equal(found->type, cases[i].family);
        } else {
            assert_int_equal(err.code, EXIT_CHECKPOINT);
            if (!strstr(err.what, cases[i].family)) fail_msg("'%s' without %s", err.what, cases[i].family);
        }
        config_free(&model.config);
    }
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, make_work, remove_work)

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(families_by_flags),
        IN_FOLDER(imported_logits_are_transformers),
        IN_FOLDER(padding_is_harmless),
        IN_FOLDER(exported_master_weights_compute_the_same),
        IN_FOLDER(exported_weights_compute_the_same),
        IN_FOLDER(master_weights_round_trip),
        IN_FOLDER(weights_round_trip),
        IN_FOLDER(shards_round_trip),
        IN_FOLDER(buffer_size_does_not_matter),
        IN_FOLDER(golden_round_trips),
        IN_FOLDER(without_master_weights),
        IN_FOLDER(byte_vocabulary),
        IN_FOLDER(hostile_headers),
        IN_FOLDER(deep_lists),
        IN_FOLDER(hostile_llamas),
        IN_FOLDER(same_llamas),
        IN_FOLDER(scaled_llamas),
        IN_FOLDER(hostile_files),
        IN_FOLDER(not_finite),
        IN_FOLDER(hostile_indices),
        IN_FOLDER(older_folders),
        IN_FOLDER(halves_are_read),
        IN_FOLDER(taken_folders),
    };
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    failed += leaks_found();
    launch_finalize(&launch);
    return failed;
}
