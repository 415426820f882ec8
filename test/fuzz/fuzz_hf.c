// A Hugging Face folder: config.json in front of the first 0xFF. Behind it, after a first byte I,
// an index of parts, beside a sound part a.safetensors. After R a file of weights as it is. Else
// the header of one, which gets its length in front and zeros behind. A folder that is taken is
// read to its last element, and another one is not; nothing is saved.
#include <unistd.h>

#include "llmc/checkpoint/hf.h"
#include "llmc/checkpoint/hf_gpt2.h"
#include "llmc/checkpoint/safetensors.h"
#include "test/fuzz/fuzz.h"

enum { DATA_BYTES = 8192 };

// The part of a model whose config.json the seeds have.
static void write_sound_part(void) {
    HfGpt2 model = {.layers = 1, .hidden = 8, .heads = 1, .ffn = 8, .positions = 4, .vocab = 8, .padded = 8};
    int count;
    uint64_t bytes, xxh3;
    char *path = xstrdup(fuzz_file("a.safetensors", "", 0)), zeros[DATA_BYTES] = {0};
    HfTensor *tensors = hf_gpt2_tensors(&model, &count);
    SafeTensor list[16];
    PROMISE(count == 16);
    for (int i = 0; i < count; i++) {
        int64_t columns = tensors[i].columns;
        list[i] = (SafeTensor){tensors[i].name, "F32", tensors[i].rows * (columns ? columns : 1), columns};
    }
    SafeWriter *writer = safe_writer_open(path, list, count, "{}", NULL);
    for (int i = 0; i < count; i++) safe_writer_append(writer, zeros, 4 * (uint64_t)list[i].elements, NULL);
    PROMISE(safe_writer_close(writer, &bytes, &xxh3, NULL));
    free(tensors);
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
    if (!sound) write_sound_part();
    sound = true;
    remove_files();
    fuzz_file("config.json", parts.first, parts.first_bytes);
    write_weights(parts.second, parts.second_bytes);
    HfImport import = {.folder = fuzz_folder(), .divisible = 16, .piece = 24};
    if (hf_import(&import, &report, &err)) PROMISE(report.parameters > 0);
    else fuzz_check_error(&err);
    return 0;
}
