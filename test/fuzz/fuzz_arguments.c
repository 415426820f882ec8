// Arguments that a checkpoint stores as JSON. Compares them with this run's flags, under every flag
// that controls the comparison, and builds the model that they describe.
#include "dev/lib/saved_config.h"
#include "test/fuzz/fuzz.h"

static void match(const char *json, const char *choice) {
    char notes[256];
    Error err = {0};
    Config config;
    const char *words[] = {"train",
                           "--load",
                           "folder",
                           "--num-layers",
                           "2",
                           "--hidden-size",
                           "32",
                           "--num-attention-heads",
                           "4",
                           "--seq-length",
                           "32",
                           "--max-position-embeddings",
                           "32",
                           "--micro-batch-size",
                           "2",
                           "--lr",
                           "1e-3",
                           "--train-iters",
                           "10",
                           "--mock-data",
                           "--tokenizer-type",
                           "Byte",
                           choice};
    int count = (int)(sizeof words / sizeof *words);
    PROMISE(config_parse(&config, choice ? count : count - 1, (char **)words, notes, sizeof notes, &err));
    PROMISE(config_finish(&config, 1, 257, 256, &err));
    if (!config_match_checkpoint(&config, json, notes, sizeof notes, &err)) fuzz_check_error(&err);
    PROMISE(strlen(notes) < sizeof notes);
    free(config_to_json(&config));  // even after --use-checkpoint-opt_param-scheduler has copied values
    config_free(&config);
}

// Builds the model like the program generate.
static void use(const char *json) {
    Config config;
    Error err = {0};
    const Words none = {NULL, 0};
    if (config_of_checkpoint(&config, json, &none, &err)) config_free(&config);
    else fuzz_check_error(&err);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *json = fuzz_text(data, size);
    use(json);
    match(json, NULL);
    match(json, "--override-opt_param-scheduler");
    match(json, "--use-checkpoint-opt_param-scheduler");
    match(json, "--finetune");
    free(json);
    return 0;
}
