// Results of --eval-tasks: see log.h.
#include "llmc/log/log.h"

#include <assert.h>

static Text task_line(int64_t iteration, const TaskFigures *t) {
    Text line = {0};
    text_add(&line, " task %s at iteration %lld | n: %lld |", t->task, (long long)iteration,
             (long long)t->samples);
    text_add_figure(&line, "acc", "%.4f", t->acc);
    text_add_figure(&line, "acc stderr", "%.4f", t->acc_stderr);
    if (t->choices) {
        text_add_figure(&line, "acc_norm", "%.4f", t->acc_norm);
        text_add_figure(&line, "acc_norm stderr", "%.4f", t->acc_norm_stderr);
    } else {
        text_add_figure(&line, "perplexity", t->perplexity < 1e10 ? "%.4f" : "%.6E", t->perplexity);
    }
    text_add(&line, " ");
    return line;
}

static void write_json(Log *log, int64_t iteration, int64_t consumed_samples, const TaskFigures *t) {
    Text json = json_begin("task");
    json_integer(&json, "iteration", iteration);
    json_integer(&json, "consumed_samples", consumed_samples);
    json_text(&json, "task", t->task);
    json_integer(&json, "n", t->samples);
    json_number(&json, "acc", t->acc);
    json_number(&json, "acc_stderr", t->acc_stderr);
    if (t->choices) {
        json_number(&json, "acc_norm", t->acc_norm);
        json_number(&json, "acc_norm_stderr", t->acc_norm_stderr);
    } else {
        json_number(&json, "perplexity", t->perplexity);
    }
    log_json(log, &json);
}

static void write_scalar(Log *log, int64_t iteration, int64_t consumed_samples, const char *task,
                         const char *figure, double value) {
    char tag[160];
    snprintf(tag, sizeof tag, "task %.80s %s", task, figure);
    log_scalar_twice(log, tag, iteration, consumed_samples, value);
}

void log_tasks(Log *log, int64_t iteration, int64_t consumed_samples, const TaskFigures *tasks, int count) {
    assert(tasks && count > 0);
    Text lines = {0};
    size_t longest = 0;
    for (int i = 0; i < count; i++) {
        Text line = task_line(iteration, &tasks[i]);
        text_add(&lines, "%s%s", i ? "\n" : "", line.data);
        longest = line.length > longest ? line.length : longest;
        text_free(&line);
    }
    log_framed(log, lines.data, longest + 1);
    text_free(&lines);
    for (const TaskFigures *t = tasks; t < tasks + count; t++) {
        write_json(log, iteration, consumed_samples, t);
        write_scalar(log, iteration, consumed_samples, t->task, "acc", t->acc);
        if (t->choices) write_scalar(log, iteration, consumed_samples, t->task, "acc_norm", t->acc_norm);
        else write_scalar(log, iteration, consumed_samples, t->task, "perplexity", t->perplexity);
    }
}
