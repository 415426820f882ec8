// Tests the special token ids of a Hugging Face folder after an import and an export without a
// tokenizer.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "dev/convert/hf.h"
#include "llmc/base/durable.h"
#include "llmc/base/json.h"
#include "test/leaks.h"
#include "test/unit/convert/hf_forward.h"
#include "test/unit/folder.h"

static const Peers ALONE = {MPI_COMM_SELF, 0, NULL};

static void put(const char *folder, const char *name, const char *text, size_t bytes) {
    Error err = {0};
    char *path = text_format("%s/%s", folder, name);
    assert_true(durable_make_folders(folder, &err) && durable_write_file(path, text, bytes, &err));
    free(path);
}

// Exports what was imported, and compares config.json and generation_config.json.
static void compare(const char *golden, const char *ids) {
    static const char *const keys[] = {"bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"};
    static const char generation[] = "{\"eos_token_id\": [3, 7], \"temperature\": 0.6}";
    char path[64];
    size_t bytes = 0, model_bytes = 0;
    Error err = {0};
    HfReport report;
    assert_int_equal(folder_make(path, sizeof path, "test_hf_ids"), 0);
    char *in = text_format("%s/in", path), *run = text_format("%s/run", path),
         *out = text_format("%s/out", path);
    char *config = hf_slurp(golden, "config.json", &bytes),
         *model = hf_slurp(golden, "model.safetensors", &model_bytes);
    cJSON *source = cJSON_Parse(config), *replaced = cJSON_Parse(ids);
    for (int k = 0; k < 3; k++) {
        cJSON_DeleteItemFromObject(source, keys[k]);
        cJSON *item = cJSON_DetachItemFromObject(replaced, keys[k]);
        if (item) cJSON_AddItemToObject(source, keys[k], item);
    }
    char *text = cJSON_Print(source);
    put(in, "config.json", text, strlen(text));
    put(in, "generation_config.json", generation, strlen(generation));
    put(in, "model.safetensors", model, model_bytes);
    HfImport import = {.folder = in, .save = run, .divisible = 8, .buffer_elements = 4096, .peers = ALONE};
    HfExport export = {.load = run,
                       .iteration = -1,
                       .output = out,
                       .part_bytes = 1 << 30,
                       .buffer_elements = 4096,
                       .peers = ALONE};
    if (!hf_import(&import, &report, &err) || !hf_export(&export, &report, &err)) fail_msg("%s", err.what);
    char *written = hf_slurp(out, "config.json", &bytes),
         *copied = hf_slurp(out, "generation_config.json", &bytes);
    cJSON *target = cJSON_Parse(written);
    for (int k = 0; k < 4; k++) {
        const cJSON *a = cJSON_GetObjectItem(source, keys[k]), *b = cJSON_GetObjectItem(target, keys[k]);
        if (a ? !cJSON_Compare(a, b, true) : b != NULL) fail_msg("%s of %s in %s", keys[k], text, written);
    }
    assert_true(bytes == strlen(generation) && memcmp(copied, generation, bytes) == 0);
    assert_int_equal(folder_remove(path), 0);
    cJSON_Delete(source);
    cJSON_Delete(replaced);
    cJSON_Delete(target);
    void *all[] = {in, run, out, config, model, written, copied};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    cJSON_free(text);
}

// Lists, null and 0 stay as they are, and missing ids stay missing.
static void special_ids_round_trip(void **state) {
    (void)state;
    static const char *const ids[] = {
        "{\"bos_token_id\": null, \"eos_token_id\": [49, 0], \"pad_token_id\": 0}",
        "{\"bos_token_id\": 0, \"eos_token_id\": 3, \"pad_token_id\": null}",
        "{\"eos_token_id\": null, \"pad_token_id\": -1}", "{}"};
    for (int i = 0; i < 4; i++) {
        compare("test/golden/hf", ids[i]);
        compare("test/golden/hf_llama", ids[i]);
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(special_ids_round_trip)};
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    failed += leaks_found();
    launch_finalize(&launch);
    return failed;
}
