// --eval-tasks against EleutherAI's lm-evaluation-harness: the trainer scores samples with the
// model in test/golden/eval_tasks. dev/ref/make_eval_golden.py computed the expected
// log-likelihoods and metrics with the harness. --eval-text and cloze samples against
// dev/ref/make_eval_text_golden.py, which computes the same model with numpy. Tolerances are
// tightest with PRECISION=fp32.
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/base/durable.h"
#include "llmc/base/dtype.h"
#include "llmc/base/json.h"
#include "dev/convert/hf.h"
#include "test/leaks.h"
#include "test/unit/folder.h"
#include "train_gpt.h"

#define GOLDEN "test/golden/eval_tasks"
#define TEXTS "test/golden/eval_text"
#define VOCABULARY "test/golden/tokenizer"

static bool fp32_build(void) { return sizeof(floatX) == sizeof(float); }

// --- files ---------------------------------------------------------------------------------------

static char *read_text(const char *path) {
    Error err;
    uint64_t bytes;
    char *text = durable_read_file(path, 1 << 24, &bytes, &err);
    if (!text) fail_msg("%s", err.what);
    return text;
}

// Returns the records of this kind and task, or text, in a JSON lines file as an array.
static cJSON *lines_of(const char *text, const char *kind, const char *task) {
    cJSON *lines = cJSON_CreateArray();
    for (const char *at = text; *at; at += strcspn(at, "\n") + 1) {
        cJSON *line = json_parse_object(at, strcspn(at, "\n"));
        assert_non_null(line);
        const char *is = json_member_string(line, "kind"), *of = json_member_string(line, "task");
        if (!of) of = json_member_string(line, "text");
        if (is && of && !strcmp(is, kind) && !strcmp(of, task)) cJSON_AddItemToArray(lines, line);
        else cJSON_Delete(line);
    }
    return lines;
}

static double number(const cJSON *object, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (!cJSON_IsNumber(item)) fail_msg("no number \"%s\"", name);
    return item->valuedouble;
}

// --- a run ---------------------------------------------------------------------------------------

// Runs the trainer with these flags and discards its standard output.
static int run_trainer(int count, char **flags) {
    fflush(stdout);
    int kept = dup(STDOUT_FILENO), nowhere = open("/dev/null", O_WRONLY);
    assert_true(kept >= 0 && nowhere >= 0 && dup2(nowhere, STDOUT_FILENO) >= 0);
    int code = train_gpt(count, flags);
    fflush(stdout);
    assert_true(dup2(kept, STDOUT_FILENO) >= 0);
    close(kept);
    close(nowhere);
    return code;
}

// Scores files with the golden model and returns the JSON log. more: flags, NULL at the end.
static char *scores_of_trainer(const char *micro_batch, const char *const *more) {
    char folder[64], save[80], log[80];
    Error err = {0};
    HfReport report;
    assert_int_equal(folder_make(folder, sizeof folder, "test_eval_tasks"), 0);
    snprintf(save, sizeof save, "%s/run", folder);
    snprintf(log, sizeof log, "%s/log.jsonl", folder);
    HfImport options = {.folder = GOLDEN,
                        .save = save,
                        .divisible = 8,
                        .buffer_elements = HF_BUFFER_ELEMENTS,
                        .tokenizer = {.vocab_file = VOCABULARY "/vocab.json",
                                      .merge_file = VOCABULARY "/merges.txt"},
                        .peers = {MPI_COMM_SELF, 0, NULL}};
    if (!hf_import(&options, &report, &err)) fail_msg("import: %s", err.what);
    const char *flags[48] = {"train_gpt",
                             "--num-layers",
                             "2",
                             "--hidden-size",
                             "16",
                             "--num-attention-heads",
                             "2",
                             "--seq-length",
                             "128",
                             "--max-position-embeddings",
                             "128",
                             "--make-vocab-size-divisible-by",
                             "8",
                             "--bf16",
                             "--vocab-file",
                             VOCABULARY "/vocab.json",
                             "--merge-file",
                             VOCABULARY "/merges.txt",
                             "--lr",
                             "1",
                             "--train-iters",
                             "1",
                             "--use-distributed-optimizer",
                             "--micro-batch-size",
                             micro_batch,
                             "--load",
                             save,
                             "--skip-train",
                             "--log-jsonl",
                             log,
                             "--log-eval-samples"};
    int count = 0;
    while (flags[count]) count++;
    for (; *more; more++) flags[count++] = *more;
    assert_true(count < (int)(sizeof flags / sizeof *flags));
    assert_int_equal(run_trainer(count, (char **)flags), EXIT_DONE);
    char *text = read_text(log);
    assert_int_equal(folder_remove(folder), 0);
    return text;
}

static char *scores_of_tasks(const char *micro_batch) {
    const char *const files[] = {"--eval-tasks", GOLDEN "/tasks.jsonl", NULL};
    return scores_of_trainer(micro_batch, files);
}

// --- the harness ---------------------------------------------------------------------------------

// Log-likelihoods must match within 1e-4 in fp32, and in bf16 within twice the harness's error in
// bf16.
static void check_samples(const cJSON *ours, const cJSON *theirs, double limit) {
    assert_int_equal(cJSON_GetArraySize(ours), cJSON_GetArraySize(theirs));
    for (int i = 0; i < cJSON_GetArraySize(ours); i++) {
        const cJSON *own = cJSON_GetArrayItem(ours, i), *other = cJSON_GetArrayItem(theirs, i);
        const cJSON *values = cJSON_GetObjectItemCaseSensitive(own, "log_likelihoods");
        const cJSON *expected = cJSON_GetObjectItemCaseSensitive(other, "log_likelihoods");
        const cJSON *greedy = cJSON_GetObjectItemCaseSensitive(own, "greedy");
        bool was_greedy = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(other, "greedy"));
        assert_int_equal(number(own, "sample"), i);
        assert_int_equal(cJSON_GetArraySize(values), cJSON_GetArraySize(expected));
        for (int k = 0; k < cJSON_GetArraySize(values); k++) {
            double value = cJSON_GetArrayItem(values, k)->valuedouble,
                   right = cJSON_GetArrayItem(expected, k)->valuedouble;
            if (!(fabs(value - right) <= limit)) fail_msg("sample %d: %.9g, not %.9g", i, value, right);
        }
        if (greedy) assert_int_equal(cJSON_IsTrue(greedy), was_greedy);
    }
}

// last: name of the task's metric besides acc.
static void check_task(const char *text, const cJSON *tasks, const char *name, const char *last,
                       double limit) {
    cJSON *samples = lines_of(text, "eval_sample", name), *records = lines_of(text, "task", name);
    const cJSON *golden = cJSON_GetObjectItemCaseSensitive(tasks, name);
    assert_int_equal(cJSON_GetArraySize(records), 1);
    const cJSON *figures = cJSON_GetArrayItem(records, 0);
    check_samples(samples, cJSON_GetObjectItemCaseSensitive(golden, "samples"), limit);
    assert_int_equal(number(figures, "n"), cJSON_GetArraySize(samples));
    const char *const exact[] = {"acc", "acc_stderr", last};
    for (int i = 0; i < 3; i++) {
        double own = number(figures, exact[i]), other = number(golden, exact[i]);
        double part = strcmp(exact[i], "perplexity") == 0 ? limit * other : 1e-12;
        if (!(fabs(own - other) <= part)) fail_msg("%s of %s: %.12g, not %.12g", exact[i], name, own, other);
    }
    cJSON_Delete(samples);
    cJSON_Delete(records);
}

static void scores_match_the_harness(void **state) {
    char *text = scores_of_tasks("2"), *golden_text = read_text(GOLDEN "/scores.json");
    cJSON *golden = json_parse_object(golden_text, strlen(golden_text));
    assert_non_null(golden);
    const cJSON *tasks = cJSON_GetObjectItemCaseSensitive(golden, "tasks");
    double limit = fp32_build() ? 1e-4 : 2 * number(golden, "bf16_error");
    check_task(text, tasks, "choose", "acc_norm", limit);
    check_task(text, tasks, "complete", "perplexity", limit);
    cJSON_Delete(golden);
    free(golden_text);
    free(text);
}

// A sample's likelihood does not depend on the other rows of its batch. It may only differ by
// rounding, because OpenBLAS may sum in a different order if the batch size changes GEMM shapes.
static void scores_are_independent_of_the_batch(void **state) {
    char *few = scores_of_tasks("1"), *many = scores_of_tasks("3");
    char *golden_text = read_text(GOLDEN "/scores.json");
    cJSON *golden = json_parse_object(golden_text, strlen(golden_text));
    assert_non_null(golden);
    double rounding = fp32_build() ? 1e-5 : number(golden, "bf16_error");
    const char *const tasks[] = {"choose", "complete"};
    for (int t = 0; t < 2; t++) {
        cJSON *one = lines_of(few, "eval_sample", tasks[t]), *other = lines_of(many, "eval_sample", tasks[t]);
        assert_true(cJSON_GetArraySize(one) > 30);
        check_samples(one, other, rounding);
        cJSON_Delete(one);
        cJSON_Delete(other);
    }
    cJSON_Delete(golden);
    free(golden_text);
    free(few);
    free(many);
}

// --- texts and last words against numpy ----------------------------------------------------------

static cJSON *reference(void) {
    char *text = read_text(TEXTS "/results.json");
    cJSON *results = json_parse_object(text, strlen(text));
    assert_non_null(results);
    free(text);
    return results;
}

static void check_near(const cJSON *own, const cJSON *other, const char *name, double relative) {
    double value = number(own, name), right = number(other, name);
    if (!(fabs(value - right) <= relative * fabs(right)))
        fail_msg("%s: %.12g, not %.12g", name, value, right);
}

// The mean loss over thousands of tokens is more precise than one log-likelihood. adjusted_ppl is
// exp of a loss of about 14, so its relative error is 14 times the relative error of the loss.
static void check_text(const cJSON *expected) {
    char stride[16];
    snprintf(stride, sizeof stride, "%d", (int)number(expected, "stride"));
    bool wikitext = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(expected, "wikitext"));
    const char *const flags[] = {"--eval-text", TEXTS "/text.txt",         "--overlapping-eval",
                                 stride,        "--eval-text-detokenizer", wikitext ? "wikitext" : "none",
                                 NULL};
    char *text = scores_of_trainer("3", flags);
    cJSON *records = lines_of(text, "eval_text", "text.txt"), *own = cJSON_GetArrayItem(records, 0);
    double limit = fp32_build() ? 1e-6 : 1e-3;
    assert_int_equal(cJSON_GetArraySize(records), 1);
    assert_int_equal(number(own, "tokens"), number(expected, "tokens"));
    assert_int_equal(number(own, "words"), number(expected, "words"));
    check_near(own, expected, "token_ratio", 1e-12);
    check_near(own, expected, "loss", limit);
    check_near(own, expected, "ppl", 6 * limit);
    check_near(own, expected, "adjusted_ppl", 15 * limit);
    cJSON_Delete(records);
    free(text);
}

static void texts_match_the_reference(void **state) {
    cJSON *results = reference();
    const cJSON *expected;
    cJSON_ArrayForEach(expected, cJSON_GetObjectItemCaseSensitive(results, "texts")) check_text(expected);
    cJSON_Delete(results);
}

static void check_last_words(const cJSON *expected, const char *strict, double limit) {
    const char *const flags[] = {"--eval-tasks", TEXTS "/cloze.jsonl", strict, NULL};
    char *text = scores_of_trainer("2", flags);
    cJSON *samples = lines_of(text, "eval_sample", "lambada"), *records = lines_of(text, "task", "lambada");
    int n = cJSON_GetArraySize(samples), greedy = 0;
    assert_int_equal(n, cJSON_GetArraySize(expected));
    for (int i = 0; i < n; i++) {
        const cJSON *own = cJSON_GetArrayItem(samples, i), *other = cJSON_GetArrayItem(expected, i);
        const cJSON *log = cJSON_GetObjectItemCaseSensitive(own, "log_likelihoods");
        double value = cJSON_GetArrayItem(log, 0)->valuedouble, right = number(other, "log_likelihood");
        bool was_greedy = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(other, "greedy"));
        if (!(fabs(value - right) <= limit)) fail_msg("sample %d: %.9g, not %.9g", i, value, right);
        assert_int_equal(cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(own, "greedy")), was_greedy);
        greedy += was_greedy;
    }
    double acc = number(cJSON_GetArrayItem(records, 0), "acc");
    assert_true(fabs(acc - (double)greedy / n) < 1e-12 && greedy > 0 && greedy < n);
    cJSON_Delete(samples);
    cJSON_Delete(records);
    free(text);
}

static void last_words_match_the_reference(void **state) {
    cJSON *results = reference();
    char *golden_text = read_text(GOLDEN "/scores.json");
    cJSON *golden = json_parse_object(golden_text, strlen(golden_text));
    assert_non_null(golden);
    double limit = fp32_build() ? 1e-4 : 2 * number(golden, "bf16_error");
    check_last_words(cJSON_GetObjectItemCaseSensitive(results, "last_token"), NULL, limit);
    check_last_words(cJSON_GetObjectItemCaseSensitive(results, "strict"), "--strict-lambada", limit);
    cJSON_Delete(golden);
    free(golden_text);
    cJSON_Delete(results);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_match_the_harness),
        cmocka_unit_test(scores_are_independent_of_the_batch),
        cmocka_unit_test(texts_match_the_reference),
        cmocka_unit_test(last_words_match_the_reference),
    };
    Launch launch;
    leaks_launch(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    failed += leaks_found();
    launch_finalize(&launch);
    return failed;
}
