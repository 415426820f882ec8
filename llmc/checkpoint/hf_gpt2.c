// GPT2LMHeadModel: see hf_gpt2.h. llmc/model/gpt.c has our table of parameters;
// test/unit/checkpoint/test_hf.c compares the two.
#include "llmc/checkpoint/hf_gpt2.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/json.h"
#include "llmc/config/options.h"

// --- Tensors -------------------------------------------------------------------------------------

enum { LAYER_ROWS = 12, OTHER_ROWS = 4 };

typedef enum Form { PLAIN, TRANSPOSED, WORDS } Form;

static void add(HfTensor *list, int *count, const char *ours, const char *name, int64_t rows, int64_t columns,
                Form form, bool by_head) {
    HfTensor *t = &list[(*count)++];
    t->ours = tensor_row(ours, rows, columns, -1, 0, 0);
    snprintf(t->name, sizeof t->name, "%s", name);
    t->transposed = form == TRANSPOSED;
    t->words = form == WORDS;
    t->by_head = by_head;
    t->rows = t->transposed ? columns : rows;
    t->columns = t->transposed ? rows : columns;
}

static void add_layer(HfTensor *list, int *count, const HfGpt2 *m, int64_t l) {
    int64_t C = m->hidden, F = m->ffn;
    const struct {
        const char *ours, *name;
        int64_t rows, columns;
        Form form;
        bool by_head;
    } row[LAYER_ROWS] = {
        {"input_norm.weight", "ln_1.weight", C, 0, PLAIN, false},
        {"input_norm.bias", "ln_1.bias", C, 0, PLAIN, false},
        {"self_attention.query_key_value.weight", "attn.c_attn.weight", 3 * C, C, TRANSPOSED, true},
        {"self_attention.query_key_value.bias", "attn.c_attn.bias", 3 * C, 0, PLAIN, true},
        {"self_attention.dense.weight", "attn.c_proj.weight", C, C, TRANSPOSED, false},
        {"self_attention.dense.bias", "attn.c_proj.bias", C, 0, PLAIN, false},
        {"post_attention_norm.weight", "ln_2.weight", C, 0, PLAIN, false},
        {"post_attention_norm.bias", "ln_2.bias", C, 0, PLAIN, false},
        {"mlp.dense_h_to_4h.weight", "mlp.c_fc.weight", F, C, TRANSPOSED, false},
        {"mlp.dense_h_to_4h.bias", "mlp.c_fc.bias", F, 0, PLAIN, false},
        {"mlp.dense_4h_to_h.weight", "mlp.c_proj.weight", C, F, TRANSPOSED, false},
        {"mlp.dense_4h_to_h.bias", "mlp.c_proj.bias", C, 0, PLAIN, false},
    };
    for (int i = 0; i < LAYER_ROWS; i++) {
        char ours[96], name[64];
        snprintf(ours, sizeof ours, "encoder.layers.%" PRId64 ".%s", l, row[i].ours);
        snprintf(name, sizeof name, "h.%" PRId64 ".%s", l, row[i].name);
        add(list, count, ours, name, row[i].rows, row[i].columns, row[i].form, row[i].by_head);
    }
}

HfTensor *hf_gpt2_tensors(const HfGpt2 *m, int *count) {
    size_t most = (size_t)m->layers * LAYER_ROWS + OTHER_ROWS;
    HfTensor *list = (HfTensor *)xcalloc(most, sizeof *list, "the parameter table");
    *count = 0;
    add(list, count, "embedding.word_embeddings.weight", "wte.weight", m->padded, m->hidden, WORDS, false);
    list[0].rows = m->vocab;
    add(list, count, "embedding.position_embeddings.weight", "wpe.weight", m->positions, m->hidden, PLAIN,
        false);
    for (int64_t l = 0; l < m->layers; l++) add_layer(list, count, m, l);
    add(list, count, "encoder.final_norm.weight", "ln_f.weight", m->hidden, 0, PLAIN, false);
    add(list, count, "encoder.final_norm.bias", "ln_f.bias", m->hidden, 0, PLAIN, false);
    return list;
}

int64_t hf_place_of_row(const HfGpt2 *m, const HfTensor *t, int64_t row) {
    if (!t->by_head) return row;
    int64_t size = m->hidden / m->heads, head = row / (3 * size), which = row / size % 3;
    return which * m->hidden + head * size + row % size;
}

int64_t hf_gpt2_parameters(const HfGpt2 *m) {
    int64_t C = m->hidden, layer = 4 * C * C + 2 * C * m->ffn + 9 * C + m->ffn;
    return (m->vocab + m->positions) * C + m->layers * layer + 2 * C;
}

// --- Sizes ---------------------------------------------------------------------------------------

// The names of a size in a checkpoint's arguments and in config.json, and the trainer's range.
typedef struct Size {
    const char *argument, *key;
    size_t offset;
    int64_t least, most;
} Size;
#define SIZE(argument, key, field, least, most) \
    { argument, key, offsetof(HfGpt2, field), least, most }
static const Size SIZES[] = {
    SIZE("num_layers", "n_layer", layers, 1, 10000),
    SIZE("hidden_size", "n_embd", hidden, 8, 1 << 20),
    SIZE("num_attention_heads", "n_head", heads, 1, 1 << 16),
    SIZE("ffn_hidden_size", "n_inner", ffn, 8, 1 << 22),
    SIZE("max_position_embeddings", "n_positions", positions, 1, 1 << 24),
    SIZE("unpadded_vocab_size", "vocab_size", vocab, 1, 1 << 30),
    SIZE("padded_vocab_size", NULL, padded, 1, 1 << 30),
    SIZE("eod", NULL, eod, 0, 1 << 30),
};

// The same of numbers. missing: the value where config.json has none, GPT2Config's.
typedef struct Number {
    const char *argument, *key;
    size_t offset;
    double most, missing;
} Number;
#define NUMBER(argument, key, field, most, missing) \
    { argument, key, offsetof(HfGpt2, field), most, missing }
static const Number NUMBERS[] = {
    NUMBER("norm_epsilon", "layer_norm_epsilon", epsilon, 1, 1e-5),
    NUMBER("attention_dropout", "attn_pdrop", attention_dropout, 1, 0.1),
    NUMBER("hidden_dropout", "resid_pdrop", hidden_dropout, 1, 0.1),
    NUMBER("init_method_std", "initializer_range", init_std, 1e3, 0.02),
};
#define COUNT_OF(list) (sizeof(list) / sizeof(list)[0])

static int64_t *size_field(HfGpt2 *m, const Size *s) { return (int64_t *)((char *)m + s->offset); }

static double number_of(const HfGpt2 *m, const Number *n) {
    return *(const double *)((const char *)m + n->offset);
}

// NULL, or the name of what is missing or out of range. in_config: the text is a config.json.
static const char *read_sizes(HfGpt2 *m, const cJSON *object, bool in_config) {
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        const Size *s = &SIZES[i];
        const char *name = in_config ? s->key : s->argument;
        if (!name) continue;
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
        bool four_times = in_config && s->offset == offsetof(HfGpt2, ffn) && (!item || cJSON_IsNull(item));
        if (four_times) m->ffn = 4 * m->hidden;
        else if (!json_int64(item, s->least, s->most, size_field(m, s))) return name;
    }
    for (size_t i = 0; i < COUNT_OF(NUMBERS); i++) {
        const Number *n = &NUMBERS[i];
        const char *name = in_config ? n->key : n->argument;
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
        double value = item ? cJSON_GetNumberValue(item) : n->missing;
        if (!(value >= 0 && value <= n->most)) return name;
        *(double *)((char *)m + n->offset) = value;
    }
    return NULL;
}

// As the trainer wants them (llmc/config/config_check.c). NULL, or a text that says what does not
// fit.
static const char *check_fit(const HfGpt2 *m) {
    if (m->hidden % m->heads || m->hidden / m->heads % 8) return "heads whose size is no multiple of 8";
    return m->ffn % 8 ? "an MLP whose width is no multiple of 8" : NULL;
}

// --- A checkpoint's arguments --------------------------------------------------------------------

// What the model's blocks are made of, by the flags that say so, and GPT-2's way. Older checkpoints
// do not name the flags: they are all of GPT-2.
typedef struct Block {
    const char *argument, *way;
} Block;
static const Block BLOCKS[] = {
    {"normalization", "LayerNorm"}, {"position_embedding_type", "learned_absolute"},
    {"swiglu", "false"},            {"disable_bias_linear", "false"},
    {"untie_embeddings_and_output_weights", "false"}, {"qk_layernorm", "false"},
};

static const char *way_of(const cJSON *arguments, const Block *block) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(arguments, block->argument);
    if (!item) return block->way;
    if (cJSON_IsBool(item)) return cJSON_IsTrue(item) ? "true" : "false";
    return cJSON_IsString(item) ? item->valuestring : "";
}

// NULL: all are GPT-2's. Else the first flag that is not.
static const char *other_block(const cJSON *arguments) {
    for (size_t i = 0; i < COUNT_OF(BLOCKS); i++) {
        if (strcmp(way_of(arguments, &BLOCKS[i]), BLOCKS[i].way) != 0) return BLOCKS[i].argument;
    }
    return NULL;
}

bool hf_gpt2_from_arguments(HfGpt2 *m, const char *arguments, Error *err) {
    memset(m, 0, sizeof *m);
    cJSON *object = json_parse_object(arguments, strlen(arguments));
    const char *other = other_block(object), *fault = object ? read_sizes(m, object, false) : "everything";
    cJSON_Delete(object);
    if (other) {
        return error_set(err, EXIT_CHECKPOINT,
                         "the checkpoint's model has another %s than GPT-2, the one family that this"
                         " program takes to Hugging Face; load another checkpoint",
                         other);
    }
    if (!fault && check_fit(m)) fault = "num_attention_heads";
    if (!fault && m->padded < m->vocab) fault = "padded_vocab_size";
    if (!fault && m->eod >= m->vocab) fault = "eod";
    m->tokens = m->vocab;
    if (!fault) return true;
    return error_set(err, EXIT_CHECKPOINT,
                     "the checkpoint's arguments have no sound %s; load a checkpoint that the trainer saved",
                     fault);
}

static void add_text(cJSON *object, const char *name, const char *text) {
    if (text) cJSON_AddStringToObject(object, name, text);
}

static void add_number(cJSON *object, const char *name, double value) {
    char text[40];
    format_real(value, text, sizeof text);
    cJSON_AddRawToObject(object, name, text);
}

char *hf_gpt2_arguments(const HfGpt2 *m, const char *vocab_file, const char *merge_file) {
    HfGpt2 saved = *m;
    saved.vocab = m->tokens;
    cJSON *object = cJSON_CreateObject();
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        cJSON_AddNumberToObject(object, SIZES[i].argument, (double)*size_field(&saved, &SIZES[i]));
    for (size_t i = 0; i < COUNT_OF(NUMBERS); i++)
        add_number(object, NUMBERS[i].argument, number_of(m, &NUMBERS[i]));
    for (size_t i = 0; i < COUNT_OF(BLOCKS); i++) {
        bool truth = strcmp(BLOCKS[i].way, "false") == 0;
        if (truth) cJSON_AddFalseToObject(object, BLOCKS[i].argument);
        else add_text(object, BLOCKS[i].argument, BLOCKS[i].way);
    }
    add_text(object, "tokenizer_type", vocab_file ? "GPT2BPETokenizer" : "NullTokenizer");
    add_text(object, "vocab_file", vocab_file);
    add_text(object, "merge_file", merge_file);
    char *text = cJSON_PrintUnformatted(object);
    if (!text) fatal(NULL, EXIT_ENVIRONMENT, "out of memory for JSON; use a larger machine");
    char *copy = xstrdup(text);
    cJSON_free(text);
    cJSON_Delete(object);
    return copy;
}

// --- config.json ---------------------------------------------------------------------------------

// What the trainer computes in one way only. Absent: GPT2Config's default, which is that way.
typedef struct Choice {
    const char *key;
    bool truth;
    const char *why;
} Choice;
static const Choice CHOICES[] = {
    {"scale_attn_weights", true, "attention is always scaled by the root of the head's size"},
    {"scale_attn_by_inverse_layer_idx", false, "attention has the same scale in every layer"},
    {"add_cross_attention", false, "there is no cross-attention"},
    {"tie_word_embeddings", true, "the output layer shares the embedding's weights"},
    {"is_encoder_decoder", false, "there is no encoder"},
};
// All are GELU's tanh form.
static const char *const ACTIVATIONS[] = {"gelu_new", "gelu_pytorch_tanh", "gelu_fast"};

static bool check_activation(const cJSON *config, const char *path, Error *err) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(config, "activation_function");
    if (!item) return true;
    const char *word = cJSON_IsString(item) ? item->valuestring : "";
    for (size_t i = 0; i < COUNT_OF(ACTIVATIONS); i++) {
        if (strcmp(word, ACTIVATIONS[i]) == 0) return true;
    }
    return error_set(err, EXIT_CHECKPOINT,
                     "%s has activation_function '%.60s', this program's is GELU in its tanh form (gelu_new);"
                     " import another model",
                     path, word);
}

static bool check_kind(const cJSON *config, const char *path, Error *err) {
    const char *type = json_member_string(config, "model_type");
    if (!type || strcmp(type, "gpt2") != 0) {
        return error_set(err, EXIT_CHECKPOINT,
                         "%s is of model_type '%.60s', this program knows 'gpt2'; import another model", path,
                         type ? type : "");
    }
    for (size_t i = 0; i < COUNT_OF(CHOICES); i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(config, CHOICES[i].key);
        if (!item || (CHOICES[i].truth ? cJSON_IsTrue(item) : cJSON_IsFalse(item))) continue;
        return error_set(err, EXIT_CHECKPOINT,
                         "%s has another %s than this program: %s; import another model", path,
                         CHOICES[i].key, CHOICES[i].why);
    }
    if (cJSON_HasObjectItem(config, "quantization_config")) {
        return error_set(err, EXIT_CHECKPOINT,
                         "%s is of a quantised model; import the one it was made from", path);
    }
    return check_activation(config, path, err);
}

// The end of a document is the end of a sequence there. Where config.json names none, the last id.
static void read_eod(HfGpt2 *m, const cJSON *config) {
    m->eod = m->vocab - 1;
    json_member_int64(config, "eos_token_id", 0, m->vocab - 1, &m->eod);
}

static bool parse_config(HfGpt2 *m, const cJSON *config, int64_t divisible, const char *path, Error *err) {
    if (!check_kind(config, path, err)) return false;
    const char *fault = read_sizes(m, config, true);
    if (fault) {
        return error_set(err, EXIT_CHECKPOINT,
                         "%s has no %s, or one that this program cannot have; import another model", path,
                         fault);
    }
    fault = check_fit(m);
    if (fault) {
        return error_set(err, EXIT_CHECKPOINT, "%s is of a model with %s; import another model", path, fault);
    }
    read_eod(m, config);
    m->tokens = m->vocab;
    m->padded = round_up64(m->vocab, divisible);
    return true;
}

bool hf_gpt2_from_config(HfGpt2 *m, const char *text, size_t bytes, int64_t divisible, const char *path,
                         Error *err) {
    memset(m, 0, sizeof *m);
    cJSON *config = json_parse_object(text, bytes);
    bool ok = config ? parse_config(m, config, divisible, path, err)
                     : error_set(err, EXIT_CHECKPOINT,
                                 "%s is not a JSON object; save or download it again", path);
    cJSON_Delete(config);
    return ok;
}

static void write_number(FILE *out, const char *key, double value) {
    char text[40];
    format_real(value, text, sizeof text);
    fprintf(out, "  \"%s\": %s,\n", key, text);
}

void hf_gpt2_write_config(const HfGpt2 *m, const char *dtype, FILE *out) {
    fprintf(out, "{\n  \"activation_function\": \"%s\",\n", ACTIVATIONS[0]);
    fprintf(out, "  \"architectures\": [\n    \"GPT2LMHeadModel\"\n  ],\n");
    fprintf(out, "  \"bos_token_id\": %" PRId64 ",\n", m->eod);
    write_number(out, "embd_pdrop", m->hidden_dropout);
    fprintf(out, "  \"eos_token_id\": %" PRId64 ",\n", m->eod);
    for (size_t i = 0; i < COUNT_OF(NUMBERS); i++)
        write_number(out, NUMBERS[i].key, number_of(m, &NUMBERS[i]));
    fprintf(out, "  \"model_type\": \"gpt2\",\n");
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        const int64_t *value = (const int64_t *)((const char *)m + SIZES[i].offset);
        if (SIZES[i].key) fprintf(out, "  \"%s\": %" PRId64 ",\n", SIZES[i].key, *value);
    }
    fprintf(out, "  \"scale_attn_by_inverse_layer_idx\": false,\n  \"scale_attn_weights\": true,\n");
    fprintf(out, "  \"tie_word_embeddings\": true,\n  \"torch_dtype\": \"%s\",\n  \"use_cache\": true\n}\n",
            dtype);
}
