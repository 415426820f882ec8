// Results of --eval-tasks and --eval-text: see log.h.
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

// kind: "task" or "text".
static void write_scalar(Log *log, int64_t iteration, int64_t consumed_samples, const char *kind,
                         const char *name, const char *figure, double value) {
    char tag[160];
    snprintf(tag, sizeof tag, "%s %.80s %s", kind, name, figure);
    log_scalar_twice(log, tag, iteration, consumed_samples, value);
}

// Adds a line to lines that will be framed.
static void add_line(Text *lines, size_t *longest, Text *line) {
    text_add(lines, "%s%s", lines->length ? "\n" : "", line->data);
    if (line->length > *longest) *longest = line->length;
    text_free(line);
}

void log_tasks(Log *log, int64_t iteration, int64_t consumed_samples, const TaskFigures *tasks, int count) {
    assert(tasks || !count);
    Text lines = {0};
    size_t longest = 0;
    if (!count) return;
    for (int i = 0; i < count; i++) {
        Text line = task_line(iteration, &tasks[i]);
        add_line(&lines, &longest, &line);
    }
    log_framed(log, lines.data, longest + 1);
    text_free(&lines);
    for (const TaskFigures *t = tasks; t < tasks + count; t++) {
        const char *last = t->choices ? "acc_norm" : "perplexity";
        write_json(log, iteration, consumed_samples, t);
        write_scalar(log, iteration, consumed_samples, "task", t->task, "acc", t->acc);
        write_scalar(log, iteration, consumed_samples, "task", t->task, last,
                     t->choices ? t->acc_norm : t->perplexity);
    }
}

// --- texts ---------------------------------------------------------------------------------------

static Text text_line(int64_t iteration, const TextFigures *t) {
    Text line = {0};
    text_add(&line, " text %s at iteration %lld | tokens: %lld |", t->text, (long long)iteration,
             (long long)t->tokens);
    text_add_figure(&line, "avg loss", "%.6E", t->loss);
    text_add_figure(&line, "ppl", "%.6E", log_perplexity(t->loss));
    text_add_figure(&line, "adjusted ppl", "%.6E", log_perplexity(t->loss * t->token_ratio));
    text_add_figure(&line, "token ratio", "%.6f", t->token_ratio);
    text_add(&line, " ");
    return line;
}

static void write_text_json(Log *log, int64_t iteration, int64_t consumed_samples, const TextFigures *t) {
    Text json = json_begin("eval_text");
    json_integer(&json, "iteration", iteration);
    json_integer(&json, "consumed_samples", consumed_samples);
    json_text(&json, "text", t->text);
    json_integer(&json, "tokens", t->tokens);
    json_integer(&json, "words", t->words);
    json_number(&json, "loss", t->loss);
    json_number(&json, "ppl", log_perplexity(t->loss));
    json_number(&json, "adjusted_ppl", log_perplexity(t->loss * t->token_ratio));
    json_number(&json, "token_ratio", t->token_ratio);
    log_json(log, &json);
}

void log_texts(Log *log, int64_t iteration, int64_t consumed_samples, const TextFigures *texts, int count) {
    assert(texts || !count);
    Text lines = {0};
    size_t longest = 0;
    if (!count) return;
    for (int i = 0; i < count; i++) {
        Text line = text_line(iteration, &texts[i]);
        add_line(&lines, &longest, &line);
    }
    log_framed(log, lines.data, longest + 1);
    text_free(&lines);
    for (const TextFigures *t = texts; t < texts + count; t++) {
        write_text_json(log, iteration, consumed_samples, t);
        write_scalar(log, iteration, consumed_samples, "text", t->text, "loss", t->loss);
        write_scalar(log, iteration, consumed_samples, "text", t->text, "adjusted ppl",
                     log_perplexity(t->loss * t->token_ratio));
    }
}
