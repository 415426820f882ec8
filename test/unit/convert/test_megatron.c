// Tests import of Megatron-LM checkpoints: all elements are preserved, including the master weights
// of torch_dist. The golden checkpoints were saved with megatron-core and torch
// (dev/ref/make_megatron_golden.py). Damaged and hostile checkpoints cause a one-line error and
// leave no files.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/base/dtype.h"
#include "llmc/base/durable.h"
#include "dev/convert/imported.h"
#include "dev/convert/megatron.h"
#include "dev/convert/megatron_args.h"
#include "test/checkpoint_calls.h"
#include "test/leaks.h"
#include "test/unit/folder.h"

enum { ROOM = 1 << 14 };

static const Peers ALONE = {MPI_COMM_SELF, 0, NULL};
static int64_t buffer_elements;  // buffer size in elements

typedef struct Work {
    char path[64], dist[128], legacy[128], flat[128], save[80];
} Work;

static void unpack(const char *path, const char *name) {
    char command[300];
    snprintf(command, sizeof command, "tar -xzf test/golden/megatron/%s.tar.gz -C '%s'", name, path);
    if (system(command) != 0) fail_msg("cannot unpack the golden %s", name);
}

static int make_work(void **state) {
    Work *w = (Work *)calloc(1, sizeof *w);
    if (!w || folder_make(w->path, sizeof w->path, "test_megatron")) return -1;
    snprintf(w->dist, sizeof w->dist, "%s/dist/iter_0000007", w->path);
    snprintf(w->legacy, sizeof w->legacy, "%s/legacy/iter_0000007", w->path);
    snprintf(w->flat, sizeof w->flat, "%s/flat/iter_0000007", w->path);
    snprintf(w->save, sizeof w->save, "%s/save", w->path);
    *state = w;
    buffer_elements = HF_BUFFER_ELEMENTS;
    unpack(w->path, "dist");
    unpack(w->path, "legacy");
    unpack(w->path, "flat");
    return 0;
}

static int remove_work(void **state) {
    int result = folder_remove(((Work *)*state)->path);
    free(*state);
    return result;
}

static bool import(const char *folder, const char *save, bool weights_alone, HfReport *report, Error *err) {
    MegatronImport options = {.folder = folder,
                              .iteration = -1,
                              .save = save,
                              .no_optimizer = weights_alone,
                              .buffer_elements = buffer_elements,
                              .peers = ALONE};
    return megatron_import(&options, report, err);
}

// --- Elements ---------------------------------------------------------------------------------

// Returns element e of a golden tensor, as in make_megatron_golden.py.
static float golden(const char *name, int64_t e) {
    uint32_t hash = 0;
    for (const char *c = name; *c; c++) hash = hash * 31 + (uint32_t)*c;
    return (float)((int)((hash + 7 * (uint64_t)e) % 251) - 125) / 64;
}

static void compare_tensor(const Checkpoint *c, const Tensor *t, SliceKind kind, float above) {
    static float masters[ROOM];
    static floatX weights[ROOM];
    Error err = {0};
    bool weight = kind == SLICE_WEIGHT;
    int64_t count = tensor_whole_elements(t);
    assert_true(count <= ROOM);
    Slice slice = {.tensor = t->name, .kind = kind, .hi = count};
    if (!checkpoint_read(c, &slice, weight ? (void *)weights : masters, &err)) fail_msg("%s", err.what);
    for (int64_t e = 0; e < count; e++) {
        float value = weight ? floatX_to_float(weights[e]) : masters[e], wanted = golden(t->name, e) + above;
        if (weight) wanted = floatX_to_float(floatX_from_float(wanted));
        if (value != wanted) fail_msg("%s: element %lld is %g, not %g", t->name, (long long)e, value, wanted);
    }
}

static Checkpoint *open_saved(const char *save) {
    Error err = {0};
    Checkpoint *c = open_exactly(save, 0, MPI_COMM_SELF, &err);
    if (!c) fail_msg("%s", err.what);
    return c;
}

// Compares all tensors of a checkpoint with the golden values plus `above`.
static void compare_all(const char *save, bool masters, float above, int tensors) {
    Error err = {0};
    ImportedModel model;
    Checkpoint *c = open_saved(save);
    if (!imported_model_of_checkpoint(&model, checkpoint_arguments(c), &err)) fail_msg("%s", err.what);
    assert_int_equal(model.gpt.whole_tensors, tensors);
    assert_true(checkpoint_check_tensors(c, model.gpt.whole, tensors, &err));
    assert_int_equal(checkpoint_nodes(c, SLICE_MASTER), masters);
    for (int i = 0; i < tensors; i++) {
        compare_tensor(c, &model.gpt.whole[i], SLICE_WEIGHT, above);
        if (masters) compare_tensor(c, &model.gpt.whole[i], SLICE_MASTER, above);
    }
    checkpoint_close(c);
    imported_model_close(&model);
}

static void check_import(const char *folder, const char *save, bool weights_alone, float above, int tensors) {
    HfReport report;
    Error err = {0};
    if (!import(folder, save, weights_alone, &report, &err)) fail_msg("%s", err.what);
    assert_int_equal(report.iteration, 7);
    compare_all(save, !weights_alone, above, tensors);
}

enum { LLAMA_TENSORS = 2 + 2 * 8 + 1, GPT_TENSORS = 2 + 2 * 12 + 2, FLAT_TENSORS = 2 + 4 * 8 + 1 };
static const float MASTER = 1 / 1024.0f;

static void master_weights_of_torch_dist(void **state) {
    const Work *w = (const Work *)*state;
    check_import(w->dist, w->save, false, MASTER, LLAMA_TENSORS);
}

static void weights_of_torch_dist(void **state) {
    const Work *w = (const Work *)*state;
    check_import(w->dist, w->save, true, 0, LLAMA_TENSORS);
}

static void ranks_of_legacy(void **state) {
    const Work *w = (const Work *)*state;
    check_import(w->legacy, w->save, false, 0, GPT_TENSORS);
}

// Split SwiGLU matrices, virtual stages, and Transformer Engine's names.
static void virtual_stages(void **state) {
    const Work *w = (const Work *)*state;
    check_import(w->flat, w->save, true, 0, FLAT_TENSORS);
}

static void arguments_become_flags(void **state) {
    const Work *w = (const Work *)*state;
    static const char *const wanted[] = {"\"num_layers\":2",
                                         "\"hidden_size\":32",
                                         "\"num_query_groups\":2",
                                         "\"normalization\":\"RMSNorm\"",
                                         "\"position_embedding_type\":\"rope\"",
                                         "\"rotary_base\":500000",
                                         "\"swiglu\":true",
                                         "\"disable_bias_linear\":true",
                                         "\"untie_embeddings_and_output_weights\":true",
                                         "\"qk_layernorm\":true",
                                         "\"norm_epsilon\":0.001",
                                         "\"padded_vocab_size\":64",
                                         "\"eod\":63",
                                         "\"tokenizer_type\":\"NullTokenizer\""};
    HfReport report;
    assert_true(import(w->dist, w->save, true, &report, NULL));
    Checkpoint *c = open_saved(w->save);
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        if (!strstr(checkpoint_arguments(c), wanted[i])) fail_msg("%s is missing", wanted[i]);
    }
    checkpoint_close(c);
}

// Small buffers, with which reads start and end at any element.
static void buffer_size_does_not_matter(void **state) {
    const Work *w = (const Work *)*state;
    static const int64_t sizes[] = {37, 100};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char *a = text_format("%s/a%zu", w->path, i), *b = text_format("%s/b%zu", w->path, i);
        buffer_elements = sizes[i];
        check_import(w->dist, a, false, MASTER, LLAMA_TENSORS);
        check_import(i ? w->flat : w->legacy, b, true, 0, i ? FLAT_TENSORS : GPT_TENSORS);
        free(a);
        free(b);
    }
}

static void folder_of_all_iterations(void **state) {
    Work *w = (Work *)*state;
    char *above = text_format("%s/legacy", w->path), *tracker;
    HfReport report;
    Error err = {0};
    assert_true(import(above, NULL, true, &report, &err));
    MegatronImport options = {.folder = above,
                              .iteration = 8,
                              .buffer_elements = buffer_elements,
                              .peers = ALONE};
    assert_false(megatron_import(&options, &report, &err));
    assert_non_null(strstr(err.what, "iter_0000008"));
    options.iteration = 7;
    assert_true(megatron_import(&options, &report, &err));
    tracker = text_format("%s/latest_checkpointed_iteration.txt", above);
    assert_true(durable_write_file(tracker, "soon", 4, &err));
    assert_false(import(above, NULL, true, &report, &err));
    assert_non_null(strstr(err.what, "does not contain an iteration"));
    free(tracker);
    free(above);
}

// --- Rejected checkpoints ---------------------------------------------------------------------

static void refused(const char *folder, const char *text) {
    HfReport report;
    Error err = {0};
    if (import(folder, NULL, false, &report, &err)) fail_msg("imported, not refused for: %s", text);
    assert_int_equal(err.code, EXIT_CHECKPOINT);
    if (!strstr(err.what, text)) fail_msg("'%s' lacks '%s'", err.what, text);
}

static char *slurp(const char *folder, const char *name, uint64_t *bytes) {
    char *path = text_format("%s/%s", folder, name);
    char *text = durable_read_file(path, 1 << 20, bytes, NULL);
    assert_non_null(text);
    free(path);
    return text;
}

static void spill(const char *folder, const char *name, const void *data, uint64_t bytes) {
    char *path = text_format("%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, (size_t)bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
    free(path);
}

// Replaces all occurrences of a text in the file with one of the same length.
static void replace_text(const char *folder, const char *name, const char *from, const char *to) {
    uint64_t bytes, length = strlen(from);
    int found = 0;
    char *text = slurp(folder, name, &bytes);
    assert_int_equal(strlen(to), length);
    for (uint64_t i = 0; i + length <= bytes; i++) {
        if (memcmp(text + i, from, (size_t)length) != 0) continue;
        memcpy(text + i, to, (size_t)length);
        found++;
    }
    if (!found) fail_msg("%s has no '%s'", name, from);
    spill(folder, name, text, bytes);
    free(text);
}

#define RANK "mp_rank_01_000/model_optim_rng.pt"
#define FIRST "mp_rank_00_000/model_optim_rng.pt"

static void other_names_are_refused(void **state) {
    const Work *w = (const Work *)*state;
    replace_text(w->legacy, RANK, "layers.0.input_norm.bias", "layers.0.input_norm.bars");
    refused(w->legacy, "a tensor 'language_model.encoder.layers.0.input_norm.bars'");
    replace_text(w->dist, ".metadata", "decoder.final_layernorm.weight", "decoder.final_layernorm.height");
    refused(w->dist, "a tensor 'decoder.final_layernorm.height'");
}

// Unknown names leave a tensor incomplete.
static void missing_tensors_are_refused(void **state) {
    const Work *w = (const Work *)*state;
    replace_text(w->legacy, RANK, "layers.0.mlp.dense_h_to_4h.bias", "layers.0.mlp.x_extra_state.bias");
    refused(w->legacy, "parts of 'encoder.layers.0.mlp.dense_h_to_4h.bias' are missing");
    replace_text(w->dist, ".metadata", "decoder.final_layernorm.weight", "decoder.final_x_extra_state.wt");
    refused(w->dist, "parts of 'encoder.final_norm.weight' are missing");
}

static void other_models_are_refused(void **state) {
    const Work *w = (const Work *)*state;
    replace_text(w->dist, "common.pt", "qk_layernorm", "squared_relu");
    refused(w->dist, "squared ReLU");
    // A tied model with a separate output layer.
    replace_text(w->dist, "common.pt", "squared_relu", "qk_layernorm");
    replace_text(w->dist, "common.pt", "untie_embeddings_and_output_weights",
                 "other_embeddings_and_output_weights");
    refused(w->dist, "a tensor 'output_layer.weight'");
}

// --- Arguments -----------------------------------------------------------------------------------

typedef struct Setting {
    const char *name, *value;  // a number, "True", "False", or a string
} Setting;

static void put_text(FILE *out, const char *text) {
    uint32_t length = (uint32_t)strlen(text);
    fputc('X', out);
    fwrite(&length, 4, 1, out);
    fputs(text, out);
}

static void put_value(FILE *out, const char *value) {
    int32_t number = atoi(value);
    if (strcmp(value, "True") == 0 || strcmp(value, "False") == 0) fputc(*value == 'T' ? 0x88 : 0x89, out);
    else if (*value < '0' || *value > '9') put_text(out, value);
    else fputc('J', out), fwrite(&number, 4, 1, out);
}

static bool has_flag(const ModelFlags *flags, const char *flag) {
    for (int i = 0; i < flags->count; i++) {
        if (strcmp(flags->items[i], flag) == 0) return true;
    }
    return false;
}

#define MORE 2
// Returns the error for a GPT-2 model with up to MORE additional arguments. NULL: accepted.
static const char *said_of(const Setting *more, bool by_rank, ModelFlags *flags) {
    static const Setting plain[] = {{"num_layers", "2"},
                                    {"hidden_size", "32"},
                                    {"num_attention_heads", "4"},
                                    {"max_position_embeddings", "16"},
                                    {"padded_vocab_size", "64"}};
    static Error err;
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    fputs("\x80\x02}", out);
    put_text(out, "checkpoint_version");
    put_value(out, "3");
    fputc('s', out);
    put_text(out, "args");
    fputc('}', out);
    for (size_t i = 0; i < MORE + sizeof plain / sizeof *plain; i++) {
        const Setting *s = i < MORE ? &more[i] : &plain[i - MORE];
        if (!s->name) continue;
        put_text(out, s->name);
        put_value(out, s->value);
        fputc('s', out);
    }
    fputs("s.", out);
    fclose(out);
    Pickle pickle;
    MegatronArgs args;
    assert_null(pickle_read(&pickle, text, bytes));
    bool ok = megatron_args_read(&args, pickle.root, by_rank, "a test", &err);
    if (ok) {
        *flags = args.flags;
        args.flags.count = 0;
        megatron_args_free(&args);
    }
    pickle_free(&pickle);
    free(text);
    return ok ? NULL : err.what;
}

static void refused_arguments(void **state) {
    static const struct {
        Setting more[MORE];
        const char *text;
    } rows[] = {
        {{{"num_experts", "8"}}, "experts"},
        {{{"bias_gelu_fusion", "False"}}, "erf form"},
        {{{"rotary_interleaved", "True"}}, "neighboring columns"},
        {{{"position_embedding_type", "yarn"}}, "YaRN"},
        {{{"window_size", "128"}}, "window"},
        {{{"apply_layernorm_1p", "True"}}, "relative to 1"},
        {{{"softmax_type", "off-by-one"}}, "unsupported attention softmax"},
        {{{"multi_latent_attention", "True"}}, "latent"},
        {{{"tensor_model_parallel_size", "0"}}, "no valid tensor_model_parallel_size"},
        {{{"padded_vocab_size", "many"}}, "no valid padded_vocab_size"},
        {{{"num_layers", "False"}}, "lack num_layers"},
        {{{"decoder_first_pipeline_num_layers", "1"}}, "first stage of a different size"},
        {{{"num_layers_in_last_pipeline_stage", "1"}}, "last stage of a different size"},
        {{{"glu_linear_offset", "1"}}, "offset to the linear half"},
        {{{"activation_func_clamp_value", "7"}}, "clamps"},
        {{{"softmax_scale", "1"}}, "scale of attention scores"},
        {{{"head_wise_attn_gate", "True"}}, "gates the attention output"},
        {{{"use_mup", "True"}}, "maximal update"},
        {{{"enable_hyper_connections", "True"}}, "residual streams"},
        {{{"hybrid_layer_pattern", "M*-"}}, "heterogeneous layers"},
        {{{"linear_attention_freq", "4"}}, "linear attention"},
    };
    ModelFlags flags;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *said = said_of(rows[i].more, true, &flags);
        if (!said) fail_msg("%s was accepted", rows[i].more[0].name);
        if (!strstr(said, rows[i].text)) fail_msg("%s: %s", rows[i].more[0].name, said);
    }
}

static void accepted_arguments(void **state) {
    static const struct {
        Setting more[MORE];
        const char *flag;
    } rows[] = {
        {{{"num_experts", "0"}}, "--num-layers=2"},
        {{{"softmax_type", "vanilla"}}, "--hidden-size=32"},
        {{{"rotary_seq_len_interpolation_factor", "1"}}, "--num-attention-heads=4"},
        {{{"rotary_seq_len_interpolation_factor", "4"}, {"position_embedding_type", "rope"}},
         "--rotary-seq-len-interpolation-factor=4"},
        {{{"add_bias_linear", "False"}, {"add_qkv_bias", "True"}}, "--add-qkv-bias"},
        {{{"decoder_first_pipeline_num_layers", "1"}}, "--max-position-embeddings=16"},
        {{{"add_bias_linear", "False"}}, "--disable-bias-linear"},
        {{{"layernorm_epsilon", "1"}}, "--norm-epsilon=1"},
        {{{"use_rotary_position_embeddings", "True"}}, "--position-embedding-type=rope"},
        {{{"normalization", "RMSNorm"}}, "--normalization=RMSNorm"},
        {{{"add_qkv_bias", "True"}}, "--num-layers=2"},
        {{{"use_rope_scaling", "True"}, {"position_embedding_type", "rope"}}, "--use-rope-scaling"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ModelFlags flags = {0};
        const char *said = said_of(rows[i].more, false, &flags);
        if (said) fail_msg("%s: %s", rows[i].more[0].name, said);
        if (!has_flag(&flags, rows[i].flag)) fail_msg("%s is missing", rows[i].flag);
        model_flags_free(&flags);
    }
}

// Megatron-LM saves the factor of its --rope-scaling-factor even if scaling is off.
static void factor_without_scaling_is_dropped(void **state) {
    const Setting more[MORE] = {{"position_embedding_type", "rope"}, {"rope_scaling_factor", "8"}};
    ModelFlags flags = {0};
    assert_null(said_of(more, false, &flags));
    assert_false(has_flag(&flags, "--rope-scaling-factor=8"));
    model_flags_free(&flags);
}

static void wrong_sizes_are_refused(void **state) {
    const Work *w = (const Work *)*state;
    replace_text(w->legacy, FIRST, "ffn_hidden_size", "XXn_hidden_size");
    refused(w->legacy, "does not have the size that the checkpoint's arguments imply");
    replace_text(w->legacy, FIRST, "padded_vocab_size", "Xadded_vocab_size");
    refused(w->legacy, "no valid padded_vocab_size");
    replace_text(w->legacy, FIRST, "checkpoint_version", "checkpoint_Xersion");
    refused(w->legacy, "checkpoint_version is not 2 or 3");
}

static void other_backends_are_refused(void **state) {
    const Work *w = (const Work *)*state;
    replace_text(w->dist, "metadata.json", "torch_dist", "zarr_tests");
    refused(w->dist, "sharded_backend 'zarr_tests'");
}

static void missing_files_are_refused(void **state) {
    const Work *w = (const Work *)*state;
    char *path = text_format("%s/" RANK, w->legacy);
    assert_int_equal(unlink(path), 0);
    refused(w->legacy, RANK);
    free(path);
    path = text_format("%s/__0_0.distcp", w->dist);
    assert_int_equal(truncate(path, 3000), 0);
    refused(w->dist, "is shorter than its tensors");
    free(path);
    refused(w->path, "holds no Megatron-LM checkpoint");
}

// File names in a checkpoint must not refer to files outside its folder.
static void names_stay_in_the_folder(void **state) {
    const Work *w = (const Work *)*state;
    replace_text(w->dist, ".metadata", "__0_0.distcp", "../../x.dist");
    refused(w->dist, "a chunk has no location");
}

// Changes every `step`-th byte of a file, one at a time. The import must succeed or return a
// one-line error.
static void changed_bytes(const char *folder, const char *name, uint64_t step) {
    uint64_t bytes;
    char *text = slurp(folder, name, &bytes);
    for (uint64_t i = 0; i < bytes; i += step) {
        HfReport report;
        Error err = {0};
        char old = text[i];
        text[i] = (char)(old ^ (1 << i % 8));
        spill(folder, name, text, bytes);
        text[i] = old;
        bool ok = import(folder, NULL, true, &report, &err);
        if (!ok) assert_true((err.code == EXIT_CHECKPOINT || err.code == EXIT_DATA) && *err.what);
    }
    spill(folder, name, text, bytes);
    free(text);
}

static void damaged_files_give_one_error_line(void **state) {
    const Work *w = (const Work *)*state;
    changed_bytes(w->dist, ".metadata", 211);
    changed_bytes(w->dist, "common.pt", 13);
    changed_bytes(w->legacy, FIRST, 101);
}

static void failed_import_leaves_nothing(void **state) {
    Work *w = (Work *)*state;
    HfReport report;
    Error err = {0};
    uint64_t bytes;
    char *text = slurp(w->dist, "__0_0.distcp", &bytes);
    const uint16_t some = 0xBF78, nan = 0x7FC0;  // a value that occurs in the weights
    for (uint64_t i = 0; i + 1 < bytes; i++) {
        if (memcmp(text + i, &some, 2) == 0) memcpy(text + i, &nan, 2);
    }
    spill(w->dist, "__0_0.distcp", text, bytes);
    free(text);
    assert_false(import(w->dist, w->save, true, &report, &err));
    assert_non_null(strstr(err.what, "non-finite"));
    assert_int_equal(newest_checkpoint(w->save, &err), NO_CHECKPOINT);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_work, remove_work)

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        TEST(master_weights_of_torch_dist),
        TEST(weights_of_torch_dist),
        TEST(ranks_of_legacy),
        TEST(virtual_stages),
        TEST(arguments_become_flags),
        TEST(buffer_size_does_not_matter),
        TEST(folder_of_all_iterations),
        TEST(other_names_are_refused),
        TEST(missing_tensors_are_refused),
        TEST(other_models_are_refused),
        cmocka_unit_test(refused_arguments),
        cmocka_unit_test(accepted_arguments),
        cmocka_unit_test(factor_without_scaling_is_dropped),
        TEST(wrong_sizes_are_refused),
        TEST(other_backends_are_refused),
        TEST(missing_files_are_refused),
        TEST(names_stay_in_the_folder),
        TEST(damaged_files_give_one_error_line),
        TEST(failed_import_leaves_nothing),
    };
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    failed += leaks_found();
    launch_finalize(&launch);
    return failed;
}
