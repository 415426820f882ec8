// progress.txt: line format, cumulative throughput over earlier jobs, a change of world size,
// truncated lines.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/base/durable.h"
#include "llmc/log/progress.h"
#include "test/unit/folder.h"

typedef struct Folder {
    char path[256], save[280], file[300];
} Folder;

static int make_folder(void **state) {
    Folder *f = (Folder *)calloc(1, sizeof *f);
    if (!f) return -1;
    if (folder_make(f->path, sizeof f->path, "test_progress")) return -1;
    snprintf(f->save, sizeof f->save, "%s/a/b", f->path);
    snprintf(f->file, sizeof f->file, "%s/progress.txt", f->save);
    unsetenv("SLURM_JOB_ID");
    *state = f;
    return 0;
}

static int remove_folder(void **state) {
    Folder *f = (Folder *)*state;
    int rc = folder_remove(f->path);
    free(f);
    return rc;
}

static void slurp(const Folder *f, char *text, size_t bytes) {
    FILE *file = fopen(f->file, "r");
    assert_non_null(file);
    text[fread(text, 1, bytes - 1, file)] = 0;
    fclose(file);
}

static const char *last_line(const char *text) {
    const char *line = text;
    for (const char *c = text; *c; c++) {
        if (*c == '\n' && c[1]) line = c + 1;
    }
    return line;
}

static void forms(void **state) {
    Folder *f = (Folder *)*state;
    char text[4096];
    setenv("SLURM_JOB_ID", "4711", 1);
    Progress *p = progress_open(f->save, 8, 0, true, NULL);
    assert_non_null(p);
    progress_checkpoint(p, 5002, 2.5383e18, 2.6225e9);
    progress_close(p);
    slurp(f, text, sizeof text);
    int used = 0, year, month, day, hour, minute, second;
    assert_int_equal(sscanf(text, "%4d-%2d-%2d %2d:%2d:%2d%n", &year, &month, &day, &hour, &minute, &second,
                            &used),
                     6);
    assert_int_equal(used, 19);
    const char *start = "\tJob ID: 4711\t# GPUs: 8\tStarting job\n";
    assert_int_equal(strncmp(text + 19, start, strlen(start)), 0);
    const char *second_line = last_line(text) + 19,
               *middle = "\tJob ID: 4711\t# GPUs: 8\tSaved checkpoint\tIteration: 5002\tJob throughput: ";
    assert_int_equal(strncmp(second_line, middle, strlen(middle)), 0);
    assert_non_null(
        strstr(second_line,
               " TFLOP/s/GPU\tFloating-point operations: 2.54e+18\tTokens (in billions): 2.62\n"));
}

// Writes a line of an earlier job with a time `ago` seconds in the past.
static void earlier(const Folder *f, int ago, int gpus, const char *what) {
    char when[32];
    time_t then = time(NULL) - ago;
    struct tm parts;
    localtime_r(&then, &parts);
    strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", &parts);
    FILE *file = fopen(f->file, "a");
    assert_non_null(file);
    fprintf(file, "%s\tJob ID: \t# GPUs: %d\t%s\n", when, gpus, what);
    fclose(file);
}

static double cumulative(const Folder *f, double flops) {
    char text[8192];
    Progress *p = progress_open(f->save, 4, flops - 1, true, NULL);
    assert_non_null(p);
    progress_checkpoint(p, 1, flops, 0);
    progress_close(p);
    slurp(f, text, sizeof text);
    const char *field = strstr(last_line(text), "Cumulative throughput: ");
    assert_non_null(field);
    return atof(strchr(field, ':') + 1);
}

static void earlier_jobs(void **state) {
    Folder *f = (Folder *)*state;
    char command[400];
    snprintf(command, sizeof command, "mkdir -p '%s'", f->save);
    assert_int_equal(system(command), 0);
    earlier(f, 9000, 4, "Starting job");  // ignored, because the world size then changed
    earlier(f, 8000, 2, "Starting job");
    earlier(f, 7000, 2,
            "Saved checkpoint\tIteration: 10\tJob throughput: 1.0 TFLOP/s/GPU\tCumulative throughput: 1.0 "
            "TFLOP/s/GPU\tFloating-point operations: 1.00e+17\tTokens (in billions): 0.10");
    earlier(f, 5000, 4, "Starting job");
    earlier(f, 4000, 4,
            "Saved checkpoint\tIteration: 20\tJob throughput: 1.0 TFLOP/s/GPU\tCumulative throughput: 1.0 "
            "TFLOP/s/GPU\tFloating-point operations: 3.00e+17\tTokens (in billions): 0.10");
    earlier(f, 3000, 4, "Starting job");
    FILE *file = fopen(f->file, "a");
    fputs("2024-01-0", file);  // truncated line of a killed job
    fclose(file);
    // 5000 s on 4 GPUs: (2.1e18 - 1e17) / 5000 / 4 = 100 TFLOP/s
    assert_float_equal(cumulative(f, 2.1e18), 100.0, 0.15);
}

static void inactive_and_errors(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    Progress *p = progress_open(NULL, 1, 0, false, &err);
    assert_non_null(p);
    progress_checkpoint(p, 1, 1, 1);
    progress_close(p);
    assert_int_not_equal(access(f->file, F_OK), 0);
    assert_null(progress_open("/dev/null/x", 1, 0, true, &err));
    assert_int_equal(err.code, EXIT_ENVIRONMENT);
    // Another user of a shared folder may have placed a link.
    char *other = text_format("%s.other", f->save);
    assert_true(durable_make_folders(f->save, NULL) && symlink(other, f->file) == 0);
    assert_null(progress_open(f->save, 1, 0, true, &err));
    assert_non_null(strstr(err.what, "this name is a link: remove it"));
    assert_int_not_equal(access(other, F_OK), 0);
    free(other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(forms, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(earlier_jobs, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(inactive_and_errors, make_folder, remove_folder),
    };
    return cmocka_run_group_tests_name("progress", tests, NULL, NULL);
}
