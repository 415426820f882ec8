// Values of flags: real numbers are checked in the precision in which they are used. Also -h,
// data checks with few flags, and lists of shards from files.
#include "test/unit/config/command_line.h"

#include "test/unit/folder.h"

// The check applies to the value rounded to float32.
static void reals_are_checked_in_float32(void **state) {
    static const struct {
        const char *words, *what;
    } bad[] = {
        {"--adam-beta2 0.99999999",
         "--adam-beta2 0.99999999: becomes 1 in float32, the type it is used in; it "
         "must be at least 0 and below 1"},
        {"--adam-beta1 0.999999999", "becomes 1 in float32"},
        {"--adam-eps 1e-46",
         "--adam-eps 1e-46: becomes 0 in float32, the type it is used in; it must be above 0 and at most 1"},
        {"--lr 1e39", "--lr 1e39: becomes inf in float32, the type it is used in; use a smaller number"},
        {"--lr 1e-46", "--lr 1e-46: becomes 0 in float32, the type it is used in; use 0 or a larger number"},
        {"--lr 1 --min-lr 1e-60", "--min-lr 1e-60: becomes 0"},
        {"--lr 1 --lr-warmup-init 1e-60", "--lr-warmup-init 1e-60: becomes 0"},
        {"--weight-decay 1e39", "--weight-decay 1e39: becomes inf"},
        {"--start-weight-decay 1e39", "becomes inf"},
        {"--end-weight-decay 1e39", "becomes inf"},
        {"--clip-grad 1e39", "becomes inf"},
        {"--clip-grad 1e-50", "becomes 0"},
        {"--init-method-std 1e-50", "becomes 0"},
        {"--norm-epsilon 1e-50", "becomes 0"},
        {"--attention-dropout 0.99999999", "becomes 1"},
        {"--hidden-dropout 0.99999999", "becomes 1"},
        {"--hidden-dropout 1e-50", "becomes 0"},
        {"--loss-spike-factor 1e-50", "becomes 0"},
        {"--norm-spike-factor 1e-50", "becomes 0"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char line[1024];
        snprintf(line, sizeof line, "%s%s", SMALL, bad[i].words);
        must_fail(line, 0, bad[i].what);
    }
    static const char *const good[] = {
        "--adam-beta2 0.9999999",
        "--adam-eps 1e-45",
        "--lr 3.4028234e38",
        "--lr 0",
        "--clip-grad 0",
        "--min-lr 0",
        // These flags are used in double precision.
        "--hidden-dropout 0.9999999",
        "--sample-temperature 1e-60 --sample-prompt a",
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        Run run;
        char line[1024];
        snprintf(line, sizeof line, "%s%s", SMALL, good[i]);
        must_run(&run, line, 1);
        config_free(&run.config);
    }
}

// The config stores the value as given, because it is compared with checkpoints of older runs.
static void stored_values_keep_their_digits(void **state) {
    Run run;
    must_run(&run, SMALL "--adam-beta2 0.95 --lr 6e-4", 1);
    json_has(&run.config, "\"adam_beta2\":0.95");
    json_has(&run.config, "\"lr\":0.0006");
    config_free(&run.config);
}

// Only times, temperatures, schedule fractions and parameters of rotary angles are used in double
// precision.
static void flags_used_in_double_precision(void **state) {
    static const char *const in_double[] = {"lr-warmup-fraction",
                                            "distributed-timeout-minutes",
                                            "sample-temperature",
                                            "exit-duration-in-mins",
                                            "mid-level-dataset-surplus",
                                            "rotary-base",
                                            "rotary-percent",
                                            "rope-scaling-factor",
                                            "rotary-seq-len-interpolation-factor",
                                            "rotary-scaling-factor",
                                            "yarn-beta-fast",
                                            "yarn-beta-slow",
                                            "yarn-attention-factor",
                                            "plan-network",
                                            "plan-network-inside",
                                            "plan-network-burst",
                                            "plan-lossless-bits",
                                            "plan-disk-bandwidth",
                                            "plan-tflops",
                                            "plan-step-ms",
                                            "sync-grace-seconds"};
    int rows, found = 0;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows; i++) {
        if (!table[i].name || table[i].kind != OPTION_REAL || table[i].use != OPTION_USED || table[i].single)
            continue;
        bool known = false;
        for (size_t k = 0; k < sizeof in_double / sizeof *in_double; k++)
            known |= !strcmp(table[i].name, in_double[k]);
        if (!known) fail_msg("--%s: say whether it is used in float32", table[i].name);
        found++;
    }
    assert_int_equal(found, sizeof in_double / sizeof *in_double);
}

static void short_help(void **state) {
    static const struct {
        const char *line;
        bool help;
    } lines[] = {
        {"-h", true},
        {"--lr x -h", true},
        {"--data-path a -h", true},
        {SMALL "--bf16 -h", true},
        {SMALL "--sample-prompt -h", false},
        {SMALL "--sample-prompt=-h", false},
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        Run run;
        must_run(&run, lines[i].line, 1);
        if (run.config.help != lines[i].help) fail_msg("%s", lines[i].line);
        config_free(&run.config);
    }
}

// --check-data needs only the shards and their vocabulary. --inspect-data also needs the flags that
// determine the order of samples.
static void data_checks_need_few_flags(void **state) {
    Run run;
    must_run(&run, "--check-data --data-path a --tokenizer-type Byte", 3);
    assert_int_equal(run.config.vocab_size_unpadded, 257);
    assert_int_equal(run.config.eod, 256);
    config_free(&run.config);
    must_run(&run, "--check-data --valid-data-path a --tokenizer-type NullTokenizer --vocab-size 9", 1);
    config_free(&run.config);
    must_fail("--check-data --tokenizer-type Byte", 0, "no training data; add --data-path");
    must_fail("--check-data --data-path a", 0, "needs --vocab-file and --merge-file");
    must_fail("--check-data --data-path a --train-data-path b --tokenizer-type Byte", 0,
              "exclude each other");
    must_fail("--check-data --seed x", 0, "--seed x: not a 64-bit integer");
    must_fail("--inspect-data 3 --data-path a --tokenizer-type Byte", 0, "missing --num-layers");
    must_fail("--inspect-data 3 --check-data --data-path a --tokenizer-type Byte", 0, "missing --num-layers");
    must_run(&run,
             "--inspect-data 3 --data-path a --tokenizer-type Byte --num-layers 2 --hidden-size 64 "
             "--num-attention-heads 4 "
             "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --train-iters 10",
             1);
    config_free(&run.config);
}

// --- lists of shards from files -------------------------------------------------------------

static char folder[64];
static int make_folder(void **state) { return folder_make(folder, sizeof folder, "test_values"); }
static int remove_folder(void **state) { return folder_remove(folder); }

#define NO_DATA \
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 " \
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --tokenizer-type Byte --use-distributed-optimizer "

// Returns the line with " FLAG FILE" appended. The file contains the text.
static char *with_file(const char *line, const char *flag, const char *text) {
    static char whole[1024];
    char path[96];
    snprintf(path, sizeof path, "%s/list", folder);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    snprintf(whole, sizeof whole, "%s %s %s", line, flag, path);
    return whole;
}

static void words_are(const Words *words, const char *joined) {
    char text[256] = "";
    for (int i = 0; i < words->count; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", i ? " " : "", words->items[i]);
    assert_string_equal(text, joined);
}

static void lists_from_files(void **state) {
    Run run;
    must_run(&run, with_file(NO_DATA, "--data-args-path", "0.3 a\n\t0.7  b/c\n"), 1);
    words_are(&run.config.data_path, "0.3 a 0.7 b/c");
    json_has(&run.config, "\"data_path\":[\"0.3\",\"a\",\"0.7\",\"b/c\"]");
    config_free(&run.config);
    const char *splits =
        "{\"train\": [\"2\", \"a\", 0.5, \"b\"], \"valid\": \"c d\", \"test\": null, \"more\": 1}";
    must_run(&run, with_file(NO_DATA, "--per-split-data-args-path", splits), 1);
    words_are(&run.config.train_data_path, "2 a 0.5 b");
    words_are(&run.config.valid_data_path, "c d");
    assert_int_equal(run.config.test_data_path.count, 0);
    config_free(&run.config);
    must_run(&run, with_file("--check-data --tokenizer-type Byte", "--data-args-path", "a"), 1);
    config_free(&run.config);
    must_run(&run, SMALL "--data-args-path /no/such/file", 1);  // not read with --mock-data
    config_free(&run.config);
}

static void bad_lists_from_files(void **state) {
    static const struct {
        const char *line, *flag, *text, *what;
    } bad[] = {
        {NO_DATA, "--data-args-path", " \n", "is empty"},
        {NO_DATA "--data-path x", "--data-args-path", "a",
         "--data-path and --data-args-path both list shards"},
        {NO_DATA "--train-data-path x", "--data-args-path", "a", "exclude each other"},
        {NO_DATA "--data-path x", "--per-split-data-args-path",
         "{\"train\":\"a\",\"valid\":null,\"test\":null}", "exclude each other"},
        {NO_DATA "--test-data-path x", "--per-split-data-args-path", "{}", "both list shards; keep one"},
        {NO_DATA "--split 1", "--per-split-data-args-path", "{\"train\":\"a\",\"valid\":null,\"test\":null}",
         "drop --split"},
        {NO_DATA, "--per-split-data-args-path", "a b", "is not a JSON object"},
        {NO_DATA, "--per-split-data-args-path", "{\"train\":\"a\"}", "\"valid\" is missing"},
        {NO_DATA, "--per-split-data-args-path", "{\"train\":[\"a b\"]}", "\"train\" is not a list of words"},
        {NO_DATA, "--per-split-data-args-path", "{\"train\":{}}", "\"train\" is not a list of words"},
        {NO_DATA, "--per-split-data-args-path", "{\"train\":[\"\"]}", "\"train\" is not a list of words"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        must_fail(with_file(bad[i].line, bad[i].flag, bad[i].text), 0, bad[i].what);
    must_fail(NO_DATA "--data-args-path /no/such/file", 0, "/no/such/file");
    must_fail(NO_DATA "--per-split-data-args-path /", 0, "/ is not a plain file");
}

// A WSD decay that differs from the checkpoint's is an error, like other flags of the schedule.
static void wsd_is_part_of_the_schedule(void **state) {
    Run run, other;
    must_run(&run, SMALL "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style linear", 1);
    assert_int_equal(run.config.wsd_samples, 8);
    char *json = config_to_json(&run.config);
    must_run(&other, SMALL "--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style linear", 1);
    assert_false(config_match_checkpoint(&other.config, json, other.notes, sizeof other.notes, &other.err));
    assert_non_null(strstr(other.err.what, "schedule_wsd_samples 8, but this run's has 10"));
    other.config.use_checkpoint_opt_param_scheduler = true;
    assert_true(config_match_checkpoint(&other.config, json, other.notes, sizeof other.notes, &other.err));
    assert_int_equal(other.config.wsd_samples, 8);
    free(json);
    config_free(&run.config);
    config_free(&other.config);
}

// --sft excludes the flags that it replaces, and averages gradients over tokens.
static void supervised_fine_tuning(void **state) {
    Run run;
    must_run(&run, NO_DATA "--sft --data-path a", 1);
    assert_true(run.config.sft && run.config.calculate_per_token_loss);
    config_free(&run.config);
    must_run(&run, "--check-data --sft --data-path a --tokenizer-type Byte", 1);
    config_free(&run.config);
    must_fail(SMALL "--sft", 0, "--sft needs loss masks, which --mock-data lacks");
    must_fail(NO_DATA "--sft --data-path a --reset-attention-mask", 0, "drop --reset-position-ids and");
    must_fail(NO_DATA "--sft --data-path a --reset-position-ids", 0, "drop --reset-position-ids and");
    must_fail(NO_DATA "--sft --data-path a --eod-mask-loss", 0, "drop --eod-mask-loss");
    // Megatron-LM's other flags for conversations.
    must_fail(SMALL "--sft-tokenizer-prompt-format default", 0, "use preprocess_data --chat TEMPLATE");
    must_fail(SMALL "--tokenizer-type SFTTokenizer", 0, "and preprocess_data --chat applies chat templates");
    must_fail(SMALL "--sft-sequence-packing", 0, "--sft always packs conversations; drop the flag");
    must_fail(SMALL "--sft-mock-dataset-config-json {}", 0, "reads shards of preprocess_data --chat; drop");
    must_fail(SMALL "--sft-of-a-fork", 0, "is refused: --sft reads shards");
    must_fail(SMALL "--dataloader-inter-document-masking", 0, "use --reset-attention-mask, or --sft");
    must_fail(SMALL "--max-seqlen-per-dp-cp-rank 4096", 0, "context parallelism is not supported; drop");
    must_fail(SMALL "--sequence-packing-scheduler dp_balanced", 0, "context parallelism is not supported");
    must_run(&run, NO_DATA "--sft --data-path a --legacy-tokenizer", 1);
    config_free(&run.config);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reals_are_checked_in_float32),   cmocka_unit_test(stored_values_keep_their_digits),
        cmocka_unit_test(flags_used_in_double_precision), cmocka_unit_test(short_help),
        cmocka_unit_test(data_checks_need_few_flags),     cmocka_unit_test(lists_from_files),
        cmocka_unit_test(supervised_fine_tuning),         cmocka_unit_test(bad_lists_from_files),
        cmocka_unit_test(wsd_is_part_of_the_schedule),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
