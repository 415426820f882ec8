// Log lines in Megatron-LM's format, JSON lines, FLOPs against published values, inactive ranks,
// full disks.
#include <cjson/cJSON.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/base/append.h"
#include "llmc/base/json.h"
#include "llmc/log/log.h"
#include "test/unit/folder.h"

// Replaces the options module. Returns a JSON object of several lines.
char *config_to_json(const Config *config) {
    char text[128];
    snprintf(text, sizeof text,
             "{\n\t\"seq-length\":\t%d,\n\t\"split\":\t\"969, 30, 1\",\n\t\"bf16\":\ttrue\n}",
             config->seq_length);
    return xstrdup(text);
}

typedef struct Folder {
    char path[256], json[300], events[300], printed[300];
    int stdout_copy;
} Folder;

static int make_folder(void **state) {
    Folder *f = (Folder *)calloc(1, sizeof *f);
    if (!f) return -1;
    if (folder_make(f->path, sizeof f->path, "test_log")) return -1;
    snprintf(f->json, sizeof f->json, "%s/runs/a.jsonl", f->path);
    snprintf(f->events, sizeof f->events, "%s/tb", f->path);
    snprintf(f->printed, sizeof f->printed, "%s/stdout", f->path);
    f->stdout_copy = -1;
    *state = f;
    return 0;
}

// The log prints to stdout. capture redirects it to a file.
static void capture(Folder *f) {
    fflush(stdout);
    f->stdout_copy = dup(1);
    assert_non_null(freopen(f->printed, "w", stdout));
}

static void release(Folder *f) {
    if (f->stdout_copy < 0) return;
    fflush(stdout);
    dup2(f->stdout_copy, 1);
    close(f->stdout_copy);
    f->stdout_copy = -1;
}

static int remove_folder(void **state) {
    Folder *f = (Folder *)*state;
    release(f);
    int rc = folder_remove(f->path);
    free(f);
    return rc;
}

// Returns the contents of a file, or "" if it does not exist. The caller frees it.
static char *slurp(const char *path) {
    char *text = (char *)calloc(1, 1 << 16);
    FILE *file = fopen(path, "r");
    if (file) {
        size_t n = fread(text, 1, (1 << 16) - 1, file);
        text[n] = 0;
        fclose(file);
    }
    return text;
}

static void assert_printed(Folder *f, const char *expected) {
    release(f);
    char *text = slurp(f->printed);
    assert_string_equal(text, expected);
    free(text);
}

// The example in Megatron-LM's documentation: iteration 100 of a 125M run.
static IntervalReport example(void) {
    return (IntervalReport){
        .last = {.iteration = 100,
                 .consumed_samples = 25600,
                 .learning_rate = 8.5714e-5,
                 .global_batch_size = 256,
                 .loss = 9.1,
                 .grad_norm = 1.2341,
                 .num_zeros = -1,
                 .params_norm = -1},
        .train_iters = 80000,
        .iterations = 100,
        .elapsed_ms = 512.34,
        .lm_loss = 9.123456,
        .tflops_per_gpu = 98.71,
        .mfu = -1,
        .exposed_comm_ms = -1,
        .seconds_left = -1,
        .epoch = -1,
    };
}

static Log *open_plain(const Config *config) {
    Error err = {0};
    Log *log = log_open(config, 8, true, NULL, &err);
    assert_non_null(log);
    return log;
}

#define EXAMPLE \
    " iteration      100/   80000 | consumed samples:        25600 | elapsed time per iteration (ms): " \
    "512.3 | throughput per GPU " \
    "(TFLOP/s/GPU): 98.7 | learning rate: 8.571E-05 | global batch size:   256 | lm loss: 9.123456E+00 | " \
    "loss scale: 1.0 | grad " \
    "norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |"

static void megatron_line(void **state) {
    Folder *f = (Folder *)*state;
    Config config = {.log_throughput = true};
    Log *log = open_plain(&config);
    IntervalReport r = example();
    capture(f);
    log_iteration(log, &r);
    log_close(log);
    assert_printed(f, EXAMPLE " inter-node MB/step: 0.000 | intra-node MB/step: 0.000 |\n");
}

// A line of a real 1.3B run on 4 GPUs.
static void real_line(void **state) {
    Folder *f = (Folder *)*state;
    Config config = {.log_throughput = true};
    Log *log = open_plain(&config);
    IntervalReport r = example();
    r.last.iteration = 200, r.last.consumed_samples = 800, r.elapsed_ms = 733.7,
    r.last.learning_rate = 200 / 700.0 * 2e-4, r.last.global_batch_size = 4;
    r.lm_loss = 8.118460e-3, r.last.grad_norm = 0.053, r.tflops_per_gpu = 25.3;
    capture(f);
    log_iteration(log, &r);
    log_close(log);
    assert_printed(f,
                   " iteration      200/   80000 | consumed samples:          800 | elapsed time per "
                   "iteration (ms): 733.7 | throughput per "
                   "GPU (TFLOP/s/GPU): 25.3 | learning rate: 5.714E-05 | global batch size:     4 | lm "
                   "loss: 8.118460E-03 | loss scale: 1.0 | "
                   "grad norm: 0.053 | number of skipped iterations:   0 | number of nan iterations:   0 |"
                   " inter-node MB/step: 0.000 | intra-node MB/step: 0.000 |\n");
}

static void appended_fields(void **state) {
    Folder *f = (Folder *)*state;
    Config config = {.log_throughput = true};
    Log *log = open_plain(&config);
    IntervalReport r = example();
    r.tokens_per_second = 1023345.6, r.mfu = 0.4987, r.inter_node_bytes = 128.5e6,
    r.intra_node_bytes = 257.0625e6, r.model_bytes = 3.25e6;
    r.exposed_comm_ms = 12.34, r.seconds_left = 3725, r.epoch = 0.8125;
    capture(f);
    log_iteration(log, &r);
    log_close(log);
    assert_printed(
        f, EXAMPLE
        " tokens/s: 1023346 | MFU: 49.9% | inter-node MB/step: 128.500 | intra-node MB/step: 257.062 |"
        " model-parallel MB/step: 3.250 | exposed comm (ms): 12.3 | ETA: 1h02m | epoch: 0.812 |\n");
}

static void optional_fields(void **state) {
    Folder *f = (Folder *)*state;
    Config config = {.log_num_zeros_in_grad = true, .log_params_norm = true};
    Log *log = open_plain(&config);
    IntervalReport r = example();
    r.lm_loss = -NAN, r.last.grad_norm = -1, r.last.num_zeros = 17, r.last.params_norm = 123.4567,
    r.skipped = 3, r.nan = 2;
    capture(f);
    log_iteration(log, &r);
    // All steps were skipped, so there is no mean loss.
    r.lm_loss = 0, r.last.grad_norm = -NAN, r.last.num_zeros = r.last.params_norm = -1;
    log_iteration(log, &r);
    r.lm_loss = INFINITY, r.last.grad_norm = INFINITY;
    log_iteration(log, &r);
    log_close(log);
#define HEAD \
    " iteration      100/   80000 | consumed samples:        25600 | elapsed time per iteration (ms): " \
    "512.3 | learning rate: 8.571E-05 | global batch size:   256 |"
#define TAIL \
    " number of skipped iterations:   3 | number of nan iterations:   2 | inter-node MB/step: 0.000 | " \
    "intra-node MB/step: 0.000 |\n"
    assert_printed(f,
                   HEAD " lm loss: nan | loss scale: 1.0 | num zeros: 17.0 | params norm: 123.457 |" TAIL HEAD
                        " loss scale: 1.0 | grad norm: nan |" TAIL HEAD
                        " lm loss: inf | loss scale: 1.0 | grad norm: inf |" TAIL);
}

static void eta_forms(void **state) {
    Folder *f = (Folder *)*state;
    const struct {
        double seconds;
        const char *form;  // NULL: omitted
    } cases[] = {{0, "0s"},         {59.4, "59s"},     {59.6, "1m00s"}, {754, "12m34s"}, {3599.9, "1h00m"},
                 {86399, "23h59m"}, {200000, "2d07h"}, {-1, NULL},      {NAN, NULL},     {INFINITY, NULL}};
    Config config = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Log *log = open_plain(&config);
        IntervalReport r = example();
        r.seconds_left = cases[i].seconds;
        capture(f);
        log_iteration(log, &r);
        release(f);
        log_close(log);
        char *text = slurp(f->printed), expected[40];
        snprintf(expected, sizeof expected, " ETA: %s |\n", cases[i].form ? cases[i].form : "");
        assert_true(cases[i].form ? strstr(text, expected) != NULL : strstr(text, "ETA") == NULL);
        free(text);
    }
}

// Perplexities of untrained models can exceed 1e10; they are printed in scientific notation.
static void task_lines(void **state) {
    Folder *f = (Folder *)*state;
    Config config = {0};
    Log *log = open_plain(&config);
    const TaskFigures tasks[] = {
        {.task = "low", .samples = 2, .acc = 0.5, .acc_stderr = 0.5, .perplexity = 9999999999.5},
        {.task = "high", .samples = 2, .acc = 0.5, .acc_stderr = 0.5, .perplexity = 1.5e10},
        {.task = "over", .samples = 2, .acc = 0, .acc_stderr = 0, .perplexity = INFINITY},
    };
    capture(f);
    log_tasks(log, 7, 28, tasks, 3);
    log_close(log);
    release(f);
    char *text = slurp(f->printed);
    assert_non_null(strstr(text,
                           " low at iteration 7 | n: 2 | acc: 0.5000 | acc stderr: 0.5000 | perplexity: "
                           "9999999999.5000 |"));
    assert_non_null(strstr(text, "| perplexity: 1.500000E+10 |"));
    assert_non_null(strstr(text, "| perplexity: inf |"));
    free(text);
}

static void validation_lines(void **state) {
    Folder *f = (Folder *)*state;
    Config config = {0};
    Log *log = open_plain(&config);
    capture(f);
    log_validation(log, "iteration 200", 200, 800, 8.013795e-3);
    log_validation(log, "iteration 5 on test set", 5, 20, 25);  // the perplexity is at most exp(20)
    log_validation(log, "iteration 6", 6, 24, NAN);
    log_close(log);
    assert_printed(
        f,
        "-----------------------------------------------------------------------------------------------\n"
        " validation loss at iteration 200 | lm loss value: 8.013795E-03 | lm loss PPL: 1.008046E+00 | \n"
        "-----------------------------------------------------------------------------------------------\n"
        "-------------------------------------------------------------------------------------------------"
        "--------\n"
        " validation loss at iteration 5 on test set | lm loss value: 2.500000E+01 | lm loss PPL: "
        "4.851652E+08 | \n"
        "-------------------------------------------------------------------------------------------------"
        "--------\n"
        "---------------------------------------------------------------------------\n"
        " validation loss at iteration 6 | lm loss value: nan | lm loss PPL: nan | \n"
        "---------------------------------------------------------------------------\n");
}

// Parses line n, which must be valid JSON. The caller deletes the result.
static cJSON *nth_line(const char *text, int n) {
    for (; n > 0; n--) {
        text = strchr(text, '\n');
        assert_non_null(text);
        text++;
    }
    const char *end = strchr(text, '\n');
    assert_non_null(end);
    cJSON *json = cJSON_ParseWithLength(text, (size_t)(end - text));
    assert_non_null(json);
    return json;
}

static const cJSON *member(const cJSON *json, const char *name) {
    const cJSON *found = cJSON_GetObjectItemCaseSensitive(json, name);
    assert_non_null(found);
    return found;
}

static void assert_number(const cJSON *json, const char *name, double expected) {
    assert_true(member(json, name)->valuedouble == expected);  // bit-exact
}

// Writes a line of another module's kind. iteration = 0: the line has no iteration.
static void write_line(Log *log, const char *kind, int64_t iteration) {
    Text json = json_begin(kind);
    if (iteration) json_integer(&json, "iteration", iteration);
    log_json(log, &json);
    assert_null(json.data);  // freed, whether written or not
}

static void json_lines(void **state) {
    Folder *f = (Folder *)*state;
    Config config = {.log_jsonl = f->json, .seq_length = 2048};
    const Site site = {.rank = -1};
    Error err = {0};
    Device *device = device_open(0, &site, &err);
    assert_non_null(device);
    Log *log = open_plain(&config);
    IntervalReport r = example();
    r.last.loss = 10.0 / 3, r.last.grad_norm = (double)0.1f, r.last.learning_rate = 0.1 + 0.2,
    r.last.skipped = true, r.exposed_comm_ms = 1.5, r.exposed_gradients_ms = 1.0, r.exposed_weights_ms = 0.5;
    r.exposed_most_ms = 2.5;
    capture(f);
    log_start(log, 124475904, 2, device_name(device));
    log_step_scalars(log, &r.last);
    r.last.loss = -NAN, r.last.grad_norm = -1, r.last.skipped = false;
    log_step_scalars(log, &r.last);
    r.mfu = 0.5, r.inter_node_bytes = 1e6 + 1, r.model_bytes = 777;
    log_iteration(log, &r);
    log_validation(log, "iteration 100", 100, 25600, 7.25);
    write_line(log, "checkpoint", 100);
    write_line(log, "end", 0);
    log_close(log);
    release(f);
    char *text = slurp(f->json);

    cJSON *start = nth_line(text, 0);
    assert_string_equal(member(start, "kind")->valuestring, "start");
    assert_string_equal(member(start, "device")->valuestring, device_name(device));
    char libraries[512];
    device_libraries(libraries, sizeof libraries);
    assert_non_null(strstr(member(start, "libraries")->valuestring, libraries));
    assert_number(start, "parameters", 124475904);
    assert_number(start, "world_size", 8);
    assert_number(start, "nodes", 2);
    assert_number(member(start, "arguments"), "seq-length", 2048);
    assert_true(strlen(member(start, "commit")->valuestring) > 0 &&
                strlen(member(start, "version")->valuestring) > 0);
    assert_true(member(member(start, "timing"), "unix_s")->valuedouble > 1.7e9);
    cJSON_Delete(start);
    device_close(device);

    cJSON *train = nth_line(text, 1);
    assert_string_equal(member(train, "kind")->valuestring, "train");
    assert_number(train, "iteration", 100);
    assert_number(train, "consumed_samples", 25600);
    assert_number(train, "loss", 10.0 / 3);
    assert_number(train, "grad_norm", (double)0.1f);
    assert_number(train, "lr", 0.1 + 0.2);
    assert_true(cJSON_IsTrue(member(train, "skipped")));
    assert_null(cJSON_GetObjectItem(train, "timing"));  // equal runs must write equal train lines
    cJSON_Delete(train);

    cJSON *nan_line = nth_line(text, 2);
    assert_true(cJSON_IsNull(member(nan_line, "loss")));
    assert_string_equal(member(nan_line, "loss_text")->valuestring, "nan");
    assert_null(cJSON_GetObjectItem(nan_line, "grad_norm"));
    assert_true(cJSON_IsFalse(member(nan_line, "skipped")));
    cJSON_Delete(nan_line);

    cJSON *interval = nth_line(text, 3);
    const cJSON *timing = member(interval, "timing");
    assert_string_equal(member(interval, "kind")->valuestring, "interval");
    assert_number(interval, "iterations", 100);
    assert_number(interval, "loss", 9.123456);
    assert_number(interval, "inter_node_bytes", 1000001);
    assert_number(interval, "model_parallel_bytes", 777);
    assert_number(timing, "elapsed_ms", 512.34);
    assert_number(timing, "tflops_per_gpu", 98.71);
    assert_number(timing, "mfu", 0.5);
    assert_number(timing, "exposed_comm_ms", 1.5);
    assert_number(timing, "exposed_gradients_ms", 1.0);
    assert_number(timing, "exposed_weights_ms", 0.5);
    assert_number(timing, "exposed_most_ms", 2.5);
    assert_null(cJSON_GetObjectItem(timing, "seconds_left"));  // unknown
    cJSON_Delete(interval);

    cJSON *valid = nth_line(text, 4);
    assert_string_equal(member(valid, "kind")->valuestring, "valid");
    assert_string_equal(member(valid, "split")->valuestring, "valid");
    assert_string_equal(member(valid, "where")->valuestring, "iteration 100");
    assert_number(valid, "loss", 7.25);
    assert_number(valid, "ppl", exp(7.25));
    cJSON_Delete(valid);
    const char *end = strstr(text, "{\"kind\":\"checkpoint\",\"iteration\":100}\n{\"kind\":\"end\"}\n");
    assert_non_null(end);
    free(text);
}

static void torn_line_is_ended(void **state) {
    Folder *f = (Folder *)*state;
    Config config = {.log_jsonl = f->json};
    for (int run = 0; run < 2; run++) {
        Log *log = open_plain(&config);
        write_line(log, "x", 1);
        log_close(log);
        FILE *file = fopen(f->json, "a");
        assert_true(fputs("{\"kind\":\"tr", file) > 0);
        fclose(file);
    }
    char *text = slurp(f->json);
    assert_string_equal(
        text,
        "{\"kind\":\"x\",\"iteration\":1}\n{\"kind\":\"tr\n{\"kind\":\"x\",\"iteration\":1}\n{\"kind\":\"tr");
    free(text);
}

static void escapes(void **state) {
    Text out = {0};
    text_add_quoted(&out, "a\"\\\n\t\x01 \xc3\xa9 \xff \xe2\x82");
    assert_string_equal(out.data, "\"a\\\"\\\\\\n\\t\\u0001 \xc3\xa9 \xef\xbf\xbd \xef\xbf\xbd\"");
    cJSON *json = cJSON_Parse(out.data);
    assert_true(cJSON_IsString(json));
    assert_string_equal(json->valuestring, "a\"\\\n\t\x01 \xc3\xa9 \xef\xbf\xbd \xef\xbf\xbd");
    cJSON_Delete(json);
    text_free(&out);
}

static void inactive_rank(void **state) {
    Folder *f = (Folder *)*state;
    Config config = {.log_jsonl = f->json, .tensorboard_dir = f->events};
    Error err = {0};
    Log *log = log_open(&config, 8, false, NULL, &err);
    assert_non_null(log);
    IntervalReport r = example();
    capture(f);
    log_line(log, "%s", "x");
    log_datetime(log, "%s", "x");
    log_memory(log, 1, 1);
    log_start(log, 1, 1, "x");
    log_iteration(log, &r);
    log_step_scalars(log, &r.last);
    log_validation(log, "iteration 1", 1, 1, 1);
    write_line(log, "x", 0);
    log_close(log);
    assert_printed(f, "");
    assert_int_not_equal(access(f->json, F_OK), 0);
    assert_int_not_equal(access(f->events, F_OK), 0);
}

static void bad_paths(void **state) {
    Config json = {.log_jsonl = "/dev/null/x.jsonl"}, events = {.tensorboard_dir = "/dev/null/y"};
    Error err = {0};
    assert_null(log_open(&json, 1, true, NULL, &err));
    assert_int_equal(err.code, EXIT_ENVIRONMENT);
    assert_non_null(strstr(err.what, "/dev/null"));
    memset(&err, 0, sizeof err);
    assert_null(log_open(&events, 1, true, NULL, &err));
    assert_int_equal(err.code, EXIT_ENVIRONMENT);
}

// Reads at most `room` bytes that are in a pipe.
static size_t drain(int fd, char *text, size_t room) {
    size_t used = 0;
    for (ssize_t got; used < room && (got = read(fd, text + used, room - used)) > 0;) used += (size_t)got;
    return used;
}

// Without a reader, records are dropped without long waits. When the reader continues, it gets
// complete records, each on its own line.
static void unread_pipe(void **state) {
    Folder *f = (Folder *)*state;
    enum { RECORD = 5000, ROOM = 4 << 20 };  // longer than an atomic write to a pipe
    char record[RECORD], path[300], *text = (char *)calloc(1, ROOM);
    Append file = {.fd = -1};
    Error err = {0};
    memset(record, 'a', RECORD);
    record[RECORD - 1] = '\n';
    snprintf(path, sizeof path, "%s/pipe", f->path);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_true(append_open(&file, path, 0, &err));
    double start = monotonic_seconds();
    int written = 0;
    while (written < ROOM / RECORD && append_record(&file, record, RECORD)) written++;
    for (int i = 0; i < 20; i++) assert_false(append_record(&file, record, RECORD));
    assert_true(written > 0 && written < ROOM / RECORD && monotonic_seconds() - start < 5);
    int reader = open(path, O_RDONLY | O_NONBLOCK);
    size_t bytes = drain(reader, text, ROOM);
    assert_true(bytes >= (size_t)written * RECORD);
    assert_true(append_record(&file, "{}\n", 3));
    assert_true(append_record(&file, record, RECORD));
    bytes += drain(reader, text + bytes, ROOM - bytes);
    const char *last = text + bytes - RECORD - 4;
    assert_int_equal(memcmp(last, "\n{}\n", 4), 0);
    assert_int_equal(memcmp(last + 4, record, RECORD), 0);
    // If the reader is slow again, the log soon stops waiting for it, although some records fit.
    start = monotonic_seconds();
    for (int i = 0; i < 4; i++) {
        while (append_record(&file, record, RECORD)) continue;
        drain(reader, text, ROOM);
    }
    assert_true(monotonic_seconds() - start < 1);
    close(reader);
    append_close(&file);
    free(text);
}

static void other_lines(void **state) {
    Folder *f = (Folder *)*state;
    Config config = {0};
    Log *log = open_plain(&config);
    capture(f);
    log_line(log, "> %s: %d", "x", 7);
    log_memory(log, 1, 1572864);
    log_datetime(log, "exiting program at iteration %d", 200);
    log_close(log);
    release(f);
    char *text = slurp(f->printed);
    const char *head =
        "> x: 7\n[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.500000 | max "
        "allocated: 1.500000 | reserved: 1.500000 | max "
        "reserved: 1.500000\n[exiting program at iteration 200] datetime: 20";
    assert_int_equal(strncmp(text, head, strlen(head)), 0);
    int parts[6], used = 0;
    assert_int_equal(sscanf(strstr(text, "datetime:"), "datetime: %4d-%2d-%2d %2d:%2d:%2d \n%n", &parts[0],
                            &parts[1], &parts[2], &parts[3], &parts[4], &parts[5], &used),
                     6);
    assert_int_equal(strlen(strstr(text, "datetime:")), 31);
    free(text);
}

// Returns the contents of the folder's event files, which contain zero bytes, and their size. The
// caller frees them.
static char *slurp_events(const char *folder, size_t *bytes) {
    char command[800], joined[340];
    snprintf(joined, sizeof joined, "%s.all", folder);
    snprintf(command, sizeof command, "cat '%s'/* > '%s'", folder, joined);
    assert_int_equal(system(command), 0);
    char *data = (char *)calloc(1, 1 << 16);
    FILE *file = fopen(joined, "rb");
    assert_non_null(file);
    *bytes = fread(data, 1, 1 << 16, file);
    fclose(file);
    return data;
}

// Writes all TensorBoard values once, with or without the optional ones.
static void write_all_scalars(Folder *f, const char *events, bool on) {
    Config config = {.tensorboard_dir = events,
                     .log_batch_size_to_tensorboard = on,
                     .log_world_size_to_tensorboard = on,
                     .log_num_zeros_in_grad = on,
                     .log_params_norm = on,
                     .log_memory_to_tensorboard = on,
                     .log_timers_to_tensorboard = on,
                     .log_throughput = on,
                     .log_validation_ppl_to_tensorboard = on,
                     .tensorboard_log_interval = 10};
    Log *log = open_plain(&config);
    IntervalReport r = example();
    r.last.num_zeros = 1, r.last.params_norm = 2, r.last.reserved_bytes = 4096, r.last.allocated_bytes = 2048;
    capture(f);
    log_start(log, 1, 1, "x");
    log_step_scalars(log, &r.last);
    size_t before, after;
    free(slurp_events(events, &before));
    r.last.iteration = 101;  // not due
    log_step_scalars(log, &r.last);
    free(slurp_events(events, &after));
    assert_int_equal(before, after);
    log_iteration(log, &r);
    log_validation(log, "iteration 101", 101, 1, 3);
    log_validation(log, "iteration 101 on test set", 101, 1, 3);
    log_close(log);
    release(f);
}

// Returns true if the events contain the tag as in a protobuf: its length, the tag, then the key of
// a value (0x15) or of a tensor (0x42).
static bool has_tag(const char *data, size_t bytes, const char *tag) {
    char framed[64];
    snprintf(framed, sizeof framed, "%c%s%c", (int)strlen(tag), tag, strstr(tag, "/text") ? 0x42 : 0x15);
    return memmem(data, bytes, framed, strlen(framed)) != NULL;
}

// Flags determine which of Megatron-LM's tags are in the event file.
static void tensorboard_tags(void **state) {
    Folder *f = (Folder *)*state;
    const char *always[] = {
        "learning-rate",      "learning-rate vs samples",      "lm loss",      "lm loss vs samples",
        "loss-scale",         "loss-scale vs samples",         "grad-norm",    "grad-norm vs samples",
        "lm loss validation", "lm loss validation vs samples", "lm loss test", "seq-length/text_summary"};
    const char *by_flag[] = {"batch-size",
                             "batch-size vs samples",
                             "world-size",
                             "world-size vs samples",
                             "num-zeros",
                             "num-zeros vs samples",
                             "params-norm",
                             "params-norm vs samples",
                             "mem-reserved-bytes",
                             "mem-allocated-bytes",
                             "iteration-time",
                             "throughput",
                             "lm loss validation ppl",
                             "lm loss validation ppl vs samples"};
    for (int on = 0; on < 2; on++) {
        char events[320];
        size_t bytes;
        snprintf(events, sizeof events, "%s%d", f->events, on);
        write_all_scalars(f, events, on);
        char *data = slurp_events(events, &bytes);
        for (size_t i = 0; i < sizeof always / sizeof *always; i++)
            assert_true(has_tag(data, bytes, always[i]));
        for (size_t i = 0; i < sizeof by_flag / sizeof *by_flag; i++)
            assert_int_equal(has_tag(data, bytes, by_flag[i]), on);
        free(data);
    }
}

// Published values with 7 digits, for sequence length 2048 and a vocabulary padded to 50304.
static void golden_flops(void **state) {
    const struct {
        int layers, width, heads, vocab;
        double sequence, batch256;
    } models[] = {
        {12, 768, 12, 50304, 1.982262e12, 5.074590e14},  {24, 1024, 16, 50304, 5.580773e12, 1.428678e15},
        {24, 2048, 16, 50304, 1.858325e13, 4.757312e15}, {32, 2560, 32, 50304, 3.662936e13, 9.377116e15},
        {32, 4096, 32, 50304, 8.829379e13, 2.260321e16}, {40, 5120, 40, 50304, 1.680916e14, 4.303145e16},
        {40, 6144, 48, 50304, 2.388184e14, 6.113752e16}, {32, 4096, 32, 50688, 8.831312e13, 0},
        {40, 5120, 40, 51200, 1.681480e14, 0},           {40, 6144, 48, 51200, 2.388861e14, 0},
    };
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        Config c = {.num_layers = models[i].layers,
                    .hidden_size = models[i].width,
                    .num_attention_heads = models[i].heads,
                    .kv_channels = models[i].width / models[i].heads,
                    .ffn_hidden_size = 4 * models[i].width,
                    .seq_length = 2048,
                    .vocab_size_padded = models[i].vocab};
        assert_float_equal(megatron_flops(&c, 1) / models[i].sequence, 1, 5e-7);
        if (models[i].batch256 > 0) assert_float_equal(megatron_flops(&c, 256) / models[i].batch256, 1, 5e-7);
        c.ffn_hidden_size *= 2;  // another 48 B S L h h
        assert_float_equal((megatron_flops(&c, 1) - models[i].sequence) /
                               (48.0 * 2048 * c.num_layers * c.hidden_size * c.hidden_size),
                           1, 1e-4);
    }
    // A measurement: 1.3B on 4 GPUs with a batch of 4 and 733.7 ms has 25.3 TFLOP/s per GPU.
    Config c = {.num_layers = 24,
                .hidden_size = 2048,
                .num_attention_heads = 16,
                .kv_channels = 128,
                .ffn_hidden_size = 8192,
                .seq_length = 2048,
                .vocab_size_padded = 50304};
    assert_float_equal(megatron_flops(&c, 4) / (0.7337 * 1e12 * 4), 25.3, 0.05);
    // Llama 1.3B by hand: SwiGLU has three matrices of width 5504 instead of two of 8192.
    c.ffn_hidden_size = 5504, c.swiglu = true;
    double layer = 4.0 * 2048 * 2048 + 2.0 * 2048 * 2048 + 3.0 * 2048 * 5504;  // multiplications per token
    assert_float_equal(megatron_flops(&c, 1), 6.0 * 2048 * (24 * layer + 2048.0 * 50304), 1e6);
    // 16 heads in 4 groups: keys and values have 512 columns instead of 2048.
    c.group_query_attention = true, c.num_query_groups = 4;
    layer -= 2.0 * 2048 * (2048 - 512);
    assert_float_equal(megatron_flops(&c, 1), 6.0 * 2048 * (24 * layer + 2048.0 * 50304), 1e6);
    // 125M by hand: 2048 * (6 * 124475904 + 6 * 12 * 768 * 2048)
    Config small = {.num_layers = 12,
                    .hidden_size = 768,
                    .num_attention_heads = 12,
                    .kv_channels = 64,
                    .seq_length = 2048};
    assert_float_equal(causal_flops(&small, 1, 124475904, 0), 2048.0 * (746855424.0 + 113246208.0), 1);
    // If embeddings are untied, the 50304 x 768 word embeddings are looked up, not multiplied.
    small.untie_embeddings_and_output_weights = true, small.vocab_size_padded = 50304;
    assert_float_equal(causal_flops(&small, 1, 124475904 + 50304 * 768, 0),
                       2048.0 * (746855424.0 + 113246208.0), 1);
}

// LoRA on the 125M model by hand. Gradients of frozen weights are not computed, so a frozen weight
// costs 4 operations per token and an adapter's 6. Attention scores cost the same.
static void lora_flops(void **state) {
    Config c = {.num_layers = 12,
                .hidden_size = 768,
                .num_attention_heads = 12,
                .kv_channels = 64,
                .ffn_hidden_size = 3072,
                .seq_length = 2048,
                .vocab_size_padded = 50304,
                .lora_rank = 16,
                .lora_targets = "all-linear"};
    double words = 50304.0 * 768, frozen = 12 * 12.0 * 768 * 768 + words;
    double adapters = 12 * 16.0 * ((768 + 2304) + (768 + 768) + 2 * (768 + 3072));
    double scores = 12 * 12.0 * 768 * 2048;
    assert_float_equal(config_lora_parameters(&c), adapters, 0.1);
    assert_float_equal(megatron_flops(&c, 1) / (2048 * (4 * frozen + 6 * adapters + scores)), 1, 1e-12);
    double causal = 2048 * (4 * frozen + 6 * adapters + scores / 2);
    assert_float_equal(causal_flops(&c, 1, adapters, frozen) / causal, 1, 1e-12);
    c.untie_embeddings_and_output_weights = true;
    assert_float_equal(causal_flops(&c, 1, adapters, frozen + words) / causal, 1, 1e-12);
    c.lora_targets = "dense,dense_4h_to_h";
    assert_float_equal(config_lora_parameters(&c), 12 * 16.0 * ((768 + 768) + (3072 + 768)), 0.1);
    c.lora_rank = 0;
    assert_float_equal(config_lora_parameters(&c), 0, 0);
}

static int occurrences(const char *text, const char *what) {
    int n = 0;
    for (const char *at = text; (at = strstr(at, what)); at++) n++;
    return n;
}

// Warnings about skipped steps (only the 1st, 2nd and 4th of five; the anomaly guard reports
// spikes), and notes about the second and third epoch.
static void warnings(void **state) {
    Folder *f = (Folder *)*state;
    Config config = {0};
    Log *log = open_plain(&config);
    IntervalReport r = example();
    capture(f);
    r.last.iteration = 150;
    log_step_scalars(log, &r.last);
    r.last.skipped = true;
    log_step_scalars(log, &r.last);
    r.last.loss = NAN;
    for (int i = 0; i < 5; i++) {
        r.last.iteration++;
        log_step_scalars(log, &r.last);
    }
    for (int i = 0; i < 6; i++) {
        r.epoch = 0.5 * i;
        log_iteration(log, &r);
    }
    log_close(log);
    release(f);
    char *text = slurp(f->printed);
    assert_int_equal(occurrences(text, "was skipped"), 3);
    assert_non_null(
        strstr(text,
               "WARNING: iteration 154 was skipped: loss or gradient norm is not finite (4 skipped since"));
    assert_int_equal(occurrences(text, "NOTE: all training data has been seen"), 2);
    assert_non_null(strstr(text, "epoch 2 begins"));
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(megatron_line, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(real_line, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(appended_fields, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(optional_fields, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(eta_forms, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(task_lines, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(validation_lines, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(json_lines, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(torn_line_is_ended, make_folder, remove_folder),
        cmocka_unit_test(escapes),
        cmocka_unit_test_setup_teardown(inactive_rank, make_folder, remove_folder),
        cmocka_unit_test(bad_paths),
        cmocka_unit_test_setup_teardown(unread_pipe, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(other_lines, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(tensorboard_tags, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(warnings, make_folder, remove_folder),
        cmocka_unit_test(golden_flops),
        cmocka_unit_test(lora_flops),
    };
    return cmocka_run_group_tests_name("log", tests, NULL, NULL);
}
