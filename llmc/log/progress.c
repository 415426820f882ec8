// progress.txt: see progress.h.
#include "llmc/log/progress.h"

#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "llmc/base/append.h"

struct Progress {
    bool active;
    Append file;
    int world_size;
    double job_start_s, job_start_flops;  // time and FLOPs at the start of this process
    double run_start_s,
        run_start_flops;  // at the start of the first job since the last change of world size
};

#define TIME_FORMAT "%Y-%m-%d %H:%M:%S"

static void append_line(Progress *p, const char *what) {
    char when[32], line[512];
    time_t now = time(NULL);
    struct tm parts;
    localtime_r(&now, &parts);
    strftime(when, sizeof when, TIME_FORMAT, &parts);
    const char *job = getenv("SLURM_JOB_ID");
    int n = snprintf(line, sizeof line, "%s\tJob ID: %s\t# GPUs: %d\t%s\n", when, job ? job : "",
                     p->world_size, what);
    append_record(&p->file, line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
}

// Parses a line of an earlier job; ignores unknown lines. flops: value of the latest checkpoint.
static void read_line(Progress *p, const char *line, double *flops) {
    struct tm parts = {.tm_isdst = -1};
    const char *rest = strptime(line, TIME_FORMAT, &parts), *gpus = strstr(line, "\t# GPUs: ");
    const char *saved = strstr(line, "Floating-point operations: ");
    if (!rest || *rest != '\t' || !gpus) return;
    if (saved) *flops = strtod(strchr(saved, ':') + 1, NULL);
    if (atoi(gpus + 9) != p->world_size) {
        p->run_start_s = 0;
    } else if (p->run_start_s == 0 && strstr(line, "\tStarting job")) {
        p->run_start_s = (double)mktime(&parts);
        p->run_start_flops = *flops;
    }
}

static void read_earlier_jobs(Progress *p, const char *path) {
    FILE *file = fopen(path, "r");
    char *line = NULL;
    size_t room = 0;
    double flops = 0;
    while (file && getline(&line, &room, file) >= 0) read_line(p, line, &flops);
    free(line);
    if (file) fclose(file);
}

static char *path_in(const char *save) { return text_format("%s/progress.txt", save); }

Progress *progress_open(const char *save, int world_size, double flops_so_far, bool active, Error *err) {
    assert((save || !active) && world_size > 0);
    Progress *p = xcalloc(1, sizeof *p, "progress log");
    double now = wall_seconds();
    *p = (Progress){.active = active,
                    .file = {.fd = -1},
                    .world_size = world_size,
                    .job_start_s = now,
                    .job_start_flops = flops_so_far};
    if (!active) return p;
    char *path = path_in(save);
    bool opened = append_make_folders(save, err) && append_open(&p->file, path, O_NOFOLLOW, err);
    if (opened) {
        read_earlier_jobs(p, path);
        append_end_line(&p->file);
        append_line(p, "Starting job");
    }
    if (p->run_start_s == 0) {
        p->run_start_s = now;
        p->run_start_flops = flops_so_far;
    }
    free(path);
    if (opened) return p;
    progress_close(p);
    return NULL;
}

bool progress_follow(Progress *progress, const char *save, Error *err) {
    if (!progress->active) return true;
    char *path = path_in(save);
    append_close(&progress->file);
    bool opened = append_open(&progress->file, path, O_NOFOLLOW, err);
    if (opened) append_end_line(&progress->file);
    free(path);
    return opened;
}

static double throughput(const Progress *p, double flops, double seconds) {
    return seconds > 0 ? flops / seconds / 1e12 / p->world_size : 0;
}

void progress_checkpoint(Progress *progress, int64_t iteration, double flops_so_far, double tokens_so_far) {
    if (!progress->active) return;
    double now = wall_seconds();
    char what[400];
    snprintf(what, sizeof what,
             "Saved checkpoint\tIteration: %lld\tJob throughput: %.1f TFLOP/s/GPU\tCumulative throughput: "
             "%.1f TFLOP/s/GPU\tFloating-point operations: %.2e\tTokens (in billions): %.2f",
             (long long)iteration,
             throughput(progress, flops_so_far - progress->job_start_flops, now - progress->job_start_s),
             throughput(progress, flops_so_far - progress->run_start_flops, now - progress->run_start_s),
             flops_so_far, tokens_so_far / 1e9);
    append_line(progress, what);
}

void progress_close(Progress *progress) {
    if (!progress) return;
    append_close(&progress->file);
    free(progress);
}
