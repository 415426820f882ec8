// Scores the samples of --eval-tasks and the texts of --eval-text: see run.h.
#include "llmc/run/run.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>


// --- the files -----------------------------------------------------------------------------------

static bool read_files(Run *run, TaskSet *set) {
    const Config *c = &run->config;
    TaskEncoding encoding = {.tokenizer = run->tokenizer,
                             .seq_length = c->seq_length,
                             .strict_lambada = c->strict_lambada,
                             .stride = c->overlapping_eval < c->seq_length ? c->overlapping_eval
                                                                           : c->seq_length,
                             .wikitext = c->eval_text_detokenizer == DETOKENIZE_WIKITEXT};
    bool ok = true;
    for (int i = 0; i < c->eval_tasks.count && ok; i++)
        ok = task_set_read(set, c->eval_tasks.items[i], encoding, &run->error);
    for (int i = 0; i < c->eval_text.count && ok; i++)
        ok = task_set_read_text(set, c->eval_text.items[i], encoding, &run->error);
    return ok;
}

// Broadcasts rank 0's array, which is allocated on the other ranks.
static void broadcast_array(Peers world, bool first, void **array, int64_t count, size_t size) {
    if (!first) *array = xcalloc((size_t)count, size, "the samples of --eval-tasks");
    peers_broadcast(world, *array, (size_t)count * size, 0);
}

bool eval_tasks_open(Run *run) {
    assert(run->tasks.tasks == 0);
    bool first = run->launch.rank == 0;
    TaskSet *set = &run->tasks;
    Peers world = run_peers(run, run->launch.world);
    if (!config_scores(&run->config)) return true;
    run->site.phase = "read --eval-tasks and --eval-text";
    if (!run_agreed(run, !first || read_files(run, set))) return false;
    int64_t counts[] = {set->tasks, set->samples, set->requests, set->ids.count};
    peers_broadcast(world, counts, sizeof counts, 0);
    set->tasks = counts[0], set->samples = counts[1], set->requests = counts[2], set->ids.count = counts[3];
    broadcast_array(world, first, (void **)&set->task, set->tasks, sizeof *set->task);
    broadcast_array(world, first, (void **)&set->sample, set->samples, sizeof *set->sample);
    broadcast_array(world, first, (void **)&set->request, set->requests, sizeof *set->request);
    broadcast_array(world, first, (void **)&set->ids.ids, set->ids.count, sizeof *set->ids.ids);
    return true;
}

// --- batches -------------------------------------------------------------------------------------

// Results of all requests.
typedef struct Likelihoods {
    double *log;      // (requests) log-likelihood of the continuation
    int32_t *likely;  // (requests) 1 if greedy decoding gives the continuation, else 0
} Likelihoods;

// All requests of one sequence length, in batches.
typedef struct Batches {
    Run *run;
    const GPT *gpt;
    int T, B;          // a batch has B sequences of length T
    int64_t *request;  // (requests) indices of the requests, in file order
    int64_t requests;
    int64_t first_pass;  // first pass in flight; pass p on data-parallel rank d of D is batch p * D + d
    int32_t *ids;        // (3, B, T) tokens, targets and positions of a batch
    HeadScore *scores;   // (passes in flight, TP ranks, B * T)
} Batches;

// Selects the requests that fit into length b->T but not into the next shorter one.
static void choose_requests(Batches *b) {
    const TaskSet *set = &b->run->tasks;
    int least = b->T > gpt_shortest_length(b->gpt) ? b->T / 2 : 0;
    b->requests = 0;
    for (int64_t i = 0; i < set->requests; i++) {
        int length = set->request[i].tokens - 1;
        if (length > least && length <= b->T) b->request[b->requests++] = i;
    }
}

// Returns the request in row `row` of this rank's pass, or NULL. *number: its index in the set.
static const TaskRequest *request_at(const Batches *b, int64_t pass, int row, int64_t *number) {
    const Mesh *mesh = &b->run->mesh;
    int64_t batch = pass * mesh_data_ranks(mesh) + mesh_data_rank(mesh), i = batch * b->B + row;
    if (i >= b->requests) return NULL;
    *number = b->request[i];
    return &b->run->tasks.request[*number];
}

// Fills a row with the request's ids, padded with zeros at the end. Only tokens of the continuation
// have targets; the other targets are -1.
static void fill_row(const Batches *b, int64_t pass, int row) {
    int64_t N = (int64_t)b->B * b->T, number;
    int32_t *tokens = b->ids + (int64_t)row * b->T, *targets = tokens + N, *positions = targets + N;
    const TaskRequest *request = request_at(b, pass, row, &number);
    const int32_t *ids = request ? b->run->tasks.ids.ids + request->first : NULL;
    int length = request ? request->tokens - 1 : 0, context = request ? length - request->scored : 0;
    for (int t = 0; t < b->T; t++) {
        tokens[t] = t < length ? ids[t] : 0;
        targets[t] = t < length && t >= context ? ids[t + 1] : -1;
        positions[t] = t;
    }
}

static int64_t scores_of_pass(const Batches *b) { return (int64_t)b->run->mesh.tp.size * b->B * b->T; }

static void load_batch(const Batches *b, GPT *gpt, Pass *pass) {
    int k = pass->micro_batch;
    const MicroBatch *m = &gpt->slot[pass->slot];
    int64_t N = (int64_t)b->B * b->T;
    size_t bytes = (size_t)N * sizeof(int32_t);
    for (int row = 0; row < b->B; row++) fill_row(b, b->first_pass + k, row);
    copy_to_device(gpt->stream, m->tokens, b->ids, bytes);
    copy_to_device(gpt->stream, m->targets, b->ids + N, bytes);
    copy_to_device(gpt->stream, m->positions, b->ids + 2 * N, bytes);
    pass->B = b->B;
    pass->T = b->T;
    pass->scores = b->scores + k * scores_of_pass(b);
}

// --- likelihoods ---------------------------------------------------------------------------------

// Combines the tensor-parallel ranks' partial results for one row. Returns the log-probability of
// the target; *best is the most likely id.
static double log_probability(const HeadScore *parts, int ranks, int64_t N, int32_t *best) {
    double sum = 0.0, target = 0.0;
    float max = parts[0].max;
    *best = parts[0].best;
    for (int r = 1; r < ranks; r++) {
        if (!(parts[r * N].max > max)) continue;  // on ties keeps the smaller id, on the lower rank
        max = parts[r * N].max;
        *best = parts[r * N].best;
    }
    for (int r = 0; r < ranks; r++) {
        const HeadScore *part = &parts[r * N];
        if (part->best == INT32_MAX && part->sum == 0.0f) continue;  // a shard of vocabulary padding only
        sum += (double)part->sum * exp((double)part->max - (double)max);
        target += (double)part->target;
    }
    return target - (double)max - log(sum);
}

static void read_row(const Batches *b, const TaskRequest *request, const HeadScore *row, int64_t number,
                     Likelihoods *out) {
    const int32_t *ids = b->run->tasks.ids.ids + request->first;
    int length = request->tokens - 1, likely = 1;
    double sum = 0.0;
    for (int t = length - request->scored; t < length; t++) {
        int32_t best;
        sum += log_probability(row + t, b->run->mesh.tp.size, (int64_t)b->B * b->T, &best);
        likely = likely && best == ids[t + 1];
    }
    out->log[number] = sum;
    out->likely[number] = likely;
}

// Reads the scores of `passes` passes starting at b->first_pass. Only the first tensor-parallel
// rank of the last stage stores them, because the results are then summed over all ranks.
static void read_passes(const Batches *b, int passes, Likelihoods *out) {
    const Mesh *mesh = &b->run->mesh;
    if (!b->gpt->stage.heads || mesh->tp.rank != 0) return;
    for (int k = 0; k < passes; k++) {
        for (int row = 0; row < b->B; row++) {
            int64_t number;
            const TaskRequest *request = request_at(b, b->first_pass + k, row, &number);
            const HeadScore *scores = b->scores + k * scores_of_pass(b) + (int64_t)row * b->T;
            if (request) read_row(b, request, scores, number, out);
        }
    }
}

// Returns the number of passes to launch together: enough to fill the pipeline, and a multiple of
// the number of stages, as interleaved schedules require.
static int passes_together(const GPT *gpt) { return 4 * gpt->stage.shape.stages; }

// Runs the forward passes of `count` batches.
static void run_batches(const Batches *b, GPT *gpt, int count) {
    Pass pass;
    if (gpt_needs_warm_up(gpt, false, &pass)) {
        load_batch(b, gpt, &pass);
        gpt_warm_up(gpt, &pass);
    }
    PassSchedule schedule = gpt_schedule(gpt, count, false);
    while (gpt_next_pass(&schedule, &pass)) {
        load_batch(b, gpt, &pass);
        gpt_forward_pass(gpt, &pass);
    }
}

// Scores the requests of length T. All ranks run the same number of batches, because gathering
// sharded weights is collective.
static void score_length(Batches *b, GPT *gpt, int T, Likelihoods *out) {
    b->T = T;
    b->B = gpt->B * (gpt->T / T);
    choose_requests(b);
    int64_t passes = ceil_div64(ceil_div64(b->requests, b->B), mesh_data_ranks(&b->run->mesh));
    passes = round_up64(passes, gpt->stage.shape.stages);
    gpt->evaluation_warm = false;  // new shapes may use kernels that have not been launched yet
    for (b->first_pass = 0; b->first_pass < passes && !b->run->stop.reason;) {
        int64_t left = passes - b->first_pass;
        int together = left < passes_together(gpt) ? (int)left : passes_together(gpt);
        run_batches(b, gpt, together);
        stream_synchronize(gpt->stream);
        read_passes(b, together, out);
        b->first_pass += together;
        run_poll_stop(b->run);
    }
    gpt->evaluation_warm = false;  // the next evaluation of the loss has other shapes again
}

static void score_requests(Run *run, GPT *gpt, Likelihoods *out) {
    size_t N = (size_t)gpt->B * (size_t)gpt->T, passes = (size_t)passes_together(gpt);
    Batches b = {.run = run, .gpt = gpt};
    b.request = xcalloc((size_t)run->tasks.requests, sizeof *b.request, "batches of --eval-tasks");
    b.ids = xcalloc(3 * N, sizeof *b.ids, "batches of --eval-tasks");
    b.scores = xcalloc(passes * (size_t)run->mesh.tp.size * N, sizeof *b.scores, "scores of --eval-tasks");
    for (int T = gpt_shortest_length(gpt); T <= gpt->T; T *= 2) score_length(&b, gpt, T, out);
    free(b.request);
    free(b.ids);
    free(b.scores);
}

// --- metrics -------------------------------------------------------------------------------------

// Returns the choice of a sample with the largest log-likelihood (per character if by_length), the
// first one on ties, or -1 if all are NaN.
static int best_choice(const TaskSet *set, const TaskSample *sample, const Likelihoods *l, bool by_length) {
    int best = -1;
    double most = -INFINITY;
    for (int i = 0; i < sample->choices; i++) {
        double value = l->log[sample->first + i];
        if (by_length) value /= set->request[sample->first + i].characters;
        if (value > most) most = value, best = i;
    }
    return best;
}

// Returns the standard error of the mean of n binary values, `ones` of which are 1.
static double standard_error(int64_t ones, int64_t n) {
    double mean = (double)ones / (double)n;
    double squares = (double)ones * (1 - mean) * (1 - mean) + (double)(n - ones) * mean * mean;
    return sqrt(squares / (double)(n - 1)) / sqrt((double)n);
}

static TextFigures text_figures_of(const TaskSet *set, int32_t text, const Likelihoods *l) {
    const Task *task = &set->task[text];
    double sum = 0.0;
    for (int64_t i = 0; i < set->samples; i++) {
        if (set->sample[i].task == text) sum += l->log[set->sample[i].first];
    }
    TextFigures figures = {.text = task->name,
                           .tokens = task->tokens,
                           .words = task->words,
                           .loss = -sum / (double)(task->tokens - 1),
                           .token_ratio = (double)(task->tokens - 1) / (double)(task->words - 1)};
    return figures;
}

static TaskFigures figures_of(const TaskSet *set, int32_t task, const Likelihoods *l) {
    int64_t n = set->task[task].samples, right = 0, right_by_length = 0;
    bool choices = set->task[task].form == TASK_CHOICES;
    double sum = 0.0;
    for (int64_t i = 0; i < set->samples; i++) {
        const TaskSample *sample = &set->sample[i];
        if (sample->task != task) continue;
        sum += l->log[sample->first];
        right += choices ? best_choice(set, sample, l, false) == sample->right : l->likely[sample->first];
        right_by_length += best_choice(set, sample, l, true) == sample->right;
    }
    TaskFigures figures = {.task = set->task[task].name,
                           .samples = n,
                           .choices = choices,
                           .acc = (double)right / (double)n,
                           .acc_stderr = standard_error(right, n),
                           .acc_norm = (double)right_by_length / (double)n,
                           .acc_norm_stderr = standard_error(right_by_length, n),
                           .perplexity = exp(-sum / (double)n)};
    return figures;
}

// Writes the record of a sample for --log-eval-samples.
static void log_sample(Run *run, const TaskSample *sample, int64_t number, const Likelihoods *l) {
    const Task *task = &run->tasks.task[sample->task];
    Text json = json_begin("eval_sample");
    json_integer(&json, "iteration", run->iteration);
    json_text(&json, "task", task->name);
    json_integer(&json, "sample", number);
    json_name(&json, "log_likelihoods");
    for (int i = 0; i < sample->choices; i++) {
        text_add(&json, i ? "," : "[");
        json_value(&json, l->log[sample->first + i]);
    }
    text_add(&json, "]");
    if (task->form == TASK_CHOICES) json_integer(&json, "gold", sample->right);
    if (task->form == TASK_CONTINUATION) json_bool(&json, "greedy", l->likely[sample->first]);
    log_json(run->log, &json);
}

static void log_samples(Run *run, const Likelihoods *l) {
    const TaskSet *set = &run->tasks;
    int64_t *seen = xcalloc((size_t)set->tasks, sizeof *seen, "samples of tasks");
    for (int64_t i = 0; i < set->samples; i++) {
        log_sample(run, &set->sample[i], seen[set->sample[i].task]++, l);
    }
    free(seen);
}

static void log_figures(Run *run, const Likelihoods *l) {
    const TaskSet *set = &run->tasks;
    TaskFigures *figures = xcalloc((size_t)set->tasks, sizeof *figures, "figures of tasks");
    TextFigures *texts = xcalloc((size_t)set->tasks, sizeof *texts, "figures of texts");
    int figure_count = 0, text_count = 0;
    for (int32_t t = 0; t < set->tasks; t++) {
        if (set->task[t].form == TASK_TEXT) texts[text_count++] = text_figures_of(set, t, l);
        else figures[figure_count++] = figures_of(set, t, l);
    }
    log_tasks(run->log, run->iteration, run->consumed_train, figures, figure_count);
    log_texts(run->log, run->iteration, run->consumed_train, texts, text_count);
    if (run->config.log_eval_samples) log_samples(run, l);
    free(figures);
    free(texts);
}

void eval_tasks(Run *run, GPT *gpt) {
    size_t requests = (size_t)run->tasks.requests;
    Peers world = run_peers(run, run->launch.world);
    if (!requests || run->stop.reason || run->tasks_scored_at == run->iteration) return;
    Likelihoods l = {xcalloc(requests, sizeof(double), "likelihoods"),
                     xcalloc(requests, sizeof(int32_t), "likelihoods")};
    run->site.phase = "evaluate";
    timer_start(run->timers, TIMER_EVALUATE, run->compute);
    zero_use_outer(run->zero, true);
    score_requests(run, gpt, &l);
    zero_use_outer(run->zero, false);
    timer_stop(run->timers, TIMER_EVALUATE, run->compute);
    if (!run->stop.reason) {
        peers_all_reduce(world, l.log, (int)requests, MPI_DOUBLE, MPI_SUM);
        peers_all_reduce(world, l.likely, (int)requests, MPI_INT32_T, MPI_SUM);
        log_phase_timers(run->log, run->timers, TIMER_EVALUATE, 1, world);
        if (run->launch.rank == 0) log_figures(run, &l);
        run->tasks_scored_at = run->iteration;
    }
    free(l.log);
    free(l.likely);
}
