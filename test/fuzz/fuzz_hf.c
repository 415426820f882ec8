// A Hugging Face directory. The input is config.json, 0xFF, and a byte that says what follows:
//   I  an index of weight files; valid files a.safetensors (GPT-2) and l.safetensors (Llama) exist
//   R  a complete weights file
//   otherwise the header of a weights file, to which the target adds its length and zeros
// If the model is accepted, reads all of its tensors.
#include <unistd.h>

#include "dev/convert/hf.h"
#include "dev/convert/hf_map.h"
#include "llmc/checkpoint/safetensors.h"
#include "test/fuzz/fuzz.h"

enum { DATA_BYTES = 8192, MOST_TENSORS = 16 };

// Models of the seeds and the names of their valid weight files.
static const char GPT2[] =
    "{\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_embd\": 8, \"n_head\": 1, \"n_inner\": 8,"
    " \"n_positions\": 4, \"vocab_size\": 8}";
static const char LLAMA[] =
    "{\"model_type\": \"llama\", \"num_hidden_layers\": 1, \"hidden_size\": 16, \"num_attention_heads\": 2,"
    " \"num_key_value_heads\": 1, \"intermediate_size\": 8, \"max_position_embeddings\": 4,"
    " \"vocab_size\": 8}";

static void write_sound_part(const char *name, const char *config_text) {
    HfConfig config;
    ImportedModel model;
    HfMap map;
    uint64_t bytes, xxh3;
    char *path = xstrdup(fuzz_file(name, "", 0)), zeros[DATA_BYTES] = {0};
    SafeTensor list[MOST_TENSORS];
    PROMISE(hf_config_read(&config, fuzz_file("config.json", config_text, strlen(config_text)), NULL));
    PROMISE(imported_model_open(&model, &config.flags, config.words, 8, "", NULL));
    hf_map_make(&map, config.family, &model, config.words);
    PROMISE(map.count <= MOST_TENSORS);
    for (int i = 0; i < map.count; i++) {
        int64_t columns = map.tensors[i].columns;
        int64_t elements = map.tensors[i].rows * (columns ? columns : 1);
        list[i] = (SafeTensor){map.tensors[i].name, "F32", elements, columns};
    }
    SafeWriter *writer = safe_writer_open(path, list, map.count, "{}", NULL);
    for (int i = 0; i < map.count; i++)
        safe_writer_append(writer, zeros, 4 * (uint64_t)list[i].elements, NULL);
    PROMISE(safe_writer_close(writer, &bytes, &xxh3, NULL));
    hf_map_free(&map);
    imported_model_close(&model);
    model_flags_free(&config.flags);
    free(path);
}

static void remove_files(void) {
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
    for (int i = 0; i < 2; i++) unlink(fuzz_file(names[i], "", 0));
}

static void write_weights(const uint8_t *data, size_t size) {
    if (size && (*data == 'I' || *data == 'R')) {
        fuzz_file(*data == 'I' ? "model.safetensors.index.json" : "model.safetensors", data + 1, size - 1);
        return;
    }
    uint64_t length = size;
    uint8_t *file = (uint8_t *)xcalloc(1, 8 + size + DATA_BYTES, "an input");
    memcpy(file, &length, 8);
    if (size) memcpy(file + 8, data, size);
    fuzz_file("model.safetensors", file, 8 + size + DATA_BYTES);
    free(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static bool sound;
    FuzzParts parts = fuzz_parts(data, size);
    HfReport report;
    Error err = {0};
    if (!sound) write_sound_part("a.safetensors", GPT2);
    if (!sound) write_sound_part("l.safetensors", LLAMA);
    sound = true;
    remove_files();
    fuzz_file("config.json", parts.first, parts.first_bytes);
    write_weights(parts.second, parts.second_bytes);
    HfImport import = {.folder = fuzz_folder(), .divisible = 16, .buffer_elements = 24};
    if (hf_import(&import, &report, &err)) PROMISE(report.parameters > 0);
    else fuzz_check_error(&err);
    return 0;
}
