// generate: generates text from a checkpoint and streams it token by token. This file has the
// flags, the prompt and the loop. The model is in dev/lib/text_model.c and uses the trainer's
// forward pass (gpt_continue). User documentation: docs/generate.md.
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dev/lib/text_model.h"
#include "llmc/base/durable.h"
#include "llmc/base/json.h"
#include "llmc/checkpoint/zero_slices.h"
#include "dev/lib/tool.h"
#include "llmc/ranks/launch.h"
#include "llmc/ranks/parallel.h"
#include "llmc/ranks/stop.h"
#include "llmc/run/sampling.h"
#include "dev/lib/saved_model.h"
#include "dev/lib/saved_weights.h"
#include "dev/lib/text_stream.h"

enum { PROMPT_MAX_BYTES = 64 << 20 };

typedef struct Settings {
    const char *load, *prompt, *prompt_file, *tokenizer_type, *tokenizer_model, *vocab_file, *merge_file;
    int64_t step, seed;
    int tokens, samples, top_k, weights;
    double temperature, top_p;
    bool greedy, ignore_eod, no_echo, help;
} Settings;

#define FIELD(name) offsetof(Settings, name)
static const Option table[] = {
    {.help = "The model"},
    {"load", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(load), .value = "FOLDER",
     .help = "A --save folder of the trainer. Its checkpoints contain the model's flags."},
    {"ckpt-step", .kind = OPTION_INT64, .high = 1e15, .low = -1, .initial = "-1", .offset = FIELD(step),
     .value = "N", .help = "Use the checkpoint of this iteration; -1: the latest."},
    {"weights", .kind = OPTION_CHOICE, .choices = WEIGHTS_CHOICES, .initial = "outer",
     .offset = FIELD(weights), .value = "WORD",
     .help = "With --local-steps H, outer selects the outer weights, which may be H - 1 iterations old, and "
             "mean selects the mean of all nodes' weights."},
    {"vocab-file", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(vocab_file), .value = "PATH",
     .help = "GPT-2's vocab.json; default: the one in the folder, or else the one used in training."},
    {"merge-file", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(merge_file), .value = "PATH",
     .help = "GPT-2's merges.txt."},
    {"tokenizer-type", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(tokenizer_type), .value = "WORD",
     .help = "Use another tokenizer with the same ids; same values as the trainer's flag."},
    {"tokenizer-model", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(tokenizer_model), .value = "PATH",
     .help = "The trainer's flag of this name; needed if the file has been moved."},
    {.help = "The prompt: one of these, else standard input"},
    {"prompt", .kind = OPTION_TEXT, .offset = FIELD(prompt), .value = "TEXT",
     .help = "The beginning of the text; empty: start a new document."},
    {"prompt-file", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(prompt_file), .value = "FILE",
     .help = "Read the prompt from a file. A trailing newline is removed, here and from standard input."},
    {.help = "The text"},
    {"num-tokens", .kind = OPTION_INT, .low = 1, .high = 1 << 24, .initial = "200", .offset = FIELD(tokens),
     .value = "N", .help = "Generate at most N tokens after the prompt."},
    {"num-samples", .kind = OPTION_INT, .low = 1, .high = 1 << 20, .initial = "1", .offset = FIELD(samples),
     .value = "N", .help = "Generate N texts, each with its own random numbers."},
    {"temperature", .kind = OPTION_REAL, .low = 0, .high = 1e6, .initial = "1.0",
     .offset = FIELD(temperature), .value = "X",
     .help = "Below 1 favors likely tokens; 0: always the most likely one."},
    {"top-k", .kind = OPTION_INT, .low = 0, .high = INT32_MAX, .initial = "0", .offset = FIELD(top_k),
     .value = "N", .help = "Sample from the N most likely tokens only; 0: from all."},
    {"top-p", .kind = OPTION_REAL, .low = OPTION_ABOVE_ZERO, .high = 1, .initial = "1.0",
     .offset = FIELD(top_p), .value = "X",
     .help = "Sample from the fewest tokens whose probabilities sum to X, after --top-k."},
    {"greedy", .kind = OPTION_FLAG, .offset = FIELD(greedy), .help = "Same as --temperature 0."},
    {"seed", .kind = OPTION_INT64, .low = 0, .high = 1e15, .initial = "1234", .offset = FIELD(seed),
     .value = "N", .help = "The same seed gives the same text."},
    {"ignore-eod", .kind = OPTION_FLAG, .offset = FIELD(ignore_eod),
     .help = "Continue past the end of a document instead of stopping there."},
    {"no-echo", .kind = OPTION_FLAG, .offset = FIELD(no_echo),
     .help = "Print only the new text, without the prompt."},
    {"help", .kind = OPTION_FLAG, .offset = FIELD(help), .help = "Print this and exit."},
};
enum { TABLE_ROWS = sizeof table / sizeof *table };

typedef struct Writing {
    const Settings *settings;
    Peers peers;  // a single rank
    SavedModel saved;
    TextModel model;
    TokenBuffer prompt;
    int64_t shown_from;  // first id of the prompt to print; the ids before are the tokenizer's prefix
    Sampling sampling;
    floatX *first, *logits;  // (padded vocabulary) logits after the prompt | of the next token
    Stop stop;
    int64_t written;    // tokens generated, over all samples
    double seconds;     // time they took
    bool full, unread;  // all positions are used | the reader has closed standard output
} Writing;

// --- settings and prompt -------------------------------------------------------------------------

static double temperature_of(const Settings *s) { return s->greedy ? 0.0 : s->temperature; }

static bool check(const Settings *s, Error *err) {
    if (!s->load) return usage_error(err, "--load is missing; pass the --save folder of a run");
    if (s->prompt && s->prompt_file)
        return usage_error(err, "--prompt and --prompt-file are mutually exclusive; use one of them");
    if (!s->vocab_file != !s->merge_file)
        return usage_error(err, "--vocab-file and --merge-file must be used together; add the other one");
    if (temperature_of(s) == 0 && s->samples > 1) {
        return usage_error(
            err, "all greedy samples are identical; remove --num-samples, or use a --temperature above 0");
    }
    return true;
}

// Reads standard input to its end. The caller frees the text.
static char *read_input(uint64_t *bytes, Error *err) {
    char *text = (char *)xmalloc(PROMPT_MAX_BYTES + 1, "the prompt");
    *bytes = fread(text, 1, PROMPT_MAX_BYTES + 1, stdin);
    if (!ferror(stdin) && *bytes <= PROMPT_MAX_BYTES) return text;
    free(text);
    if (ferror(stdin)) data_error(err, "cannot read standard input; use --prompt");
    else data_error(err, "standard input is longer than 64 MiB; use a shorter prompt");
    return NULL;
}

static char *read_file(const char *path, uint64_t *bytes, Error *err) {
    Error why;
    char *text = durable_read_file(path, PROMPT_MAX_BYTES, bytes, &why);
    if (text) return text;
    data_error(err, "--prompt-file: %.*s; pass a text file", (int)strcspn(why.what, ";"), why.what);
    return NULL;
}

// Returns the prompt; the caller frees it. Drops one trailing newline of a file or standard input.
static char *read_prompt(const Settings *s, uint64_t *bytes, Error *err) {
    if (s->prompt) {
        *bytes = strlen(s->prompt);
        return xstrdup(s->prompt);
    }
    if (!s->prompt_file && isatty(STDIN_FILENO)) fputs("Enter the prompt, end with Ctrl-D:\n", stderr);
    char *text = s->prompt_file ? read_file(s->prompt_file, bytes, err) : read_input(bytes, err);
    if (text && *bytes && text[*bytes - 1] == '\n') --*bytes;
    if (text && *bytes && text[*bytes - 1] == '\r') --*bytes;
    return text;
}

// Starts the prompt with the tokenizer's document prefix (Llama 3's begin_of_text). If that and the
// prompt are empty, encode_prompt starts with the end-of-document token.
static void begin_text(Writing *w) {
    int count;
    const int32_t *prefix = tokenizer_prefix(w->saved.tokenizer, &count);
    for (int i = 0; i < count; i++) token_buffer_append(&w->prompt, prefix[i]);
    w->shown_from = count;
}

static bool encode_prompt(Writing *w, Error *err) {
    uint64_t bytes;
    int64_t replaced = 0;
    char *text = read_prompt(w->settings, &bytes, err);
    if (!text) return false;
    begin_text(w);
    Encoder *encoder = encoder_create(w->saved.tokenizer);
    encoder_encode(encoder, text, (size_t)bytes, &w->prompt, &replaced);
    encoder_free(encoder);
    free(text);
    if (replaced) {
        fprintf(stderr,
                "warning: this tokenizer cannot encode %" PRId64
                " parts of the prompt; they are dropped or "
                "replaced\n",
                replaced);
    }
    if (w->prompt.count == 0) {
        token_buffer_append(&w->prompt, tokenizer_eod(w->saved.tokenizer));
        w->shown_from = 1;
    }
    int positions = w->saved.config.max_position_embeddings;
    if (w->prompt.count <= positions) return true;
    return usage_error(err,
                       "the prompt has %" PRId64
                       " tokens, but the model has %d positions; use a shorter prompt",
                       w->prompt.count, positions);
}

// Returns the tokenizer flags for the trainer's parser.
static Words tokenizer_flags(const Settings *s, const char *words[8]) {
    const char *const pairs[] = {"--tokenizer-type", s->tokenizer_type, "--tokenizer-model",
                                 s->tokenizer_model, "--vocab-file",    s->vocab_file,
                                 "--merge-file",     s->merge_file};
    Words flags = {words, 0};
    for (int i = 0; i < 8; i += 2) {
        if (!pairs[i + 1]) continue;
        words[flags.count++] = pairs[i];
        words[flags.count++] = pairs[i + 1];
    }
    return flags;
}

// --- the text ------------------------------------------------------------------------------------

// Returns false if writing failed. A closed pipe is not an error.
static bool check_output(Writing *w, bool ok, Error *err) {
    if (ok) return true;
    w->unread = errno == EPIPE;
    if (w->unread) return false;
    return system_error(err, "cannot write the text: %s; check standard output", strerror(errno));
}

static bool echo_prompt(Writing *w, TextStream *stream, Error *err) {
    bool ok = true;
    if (w->settings->no_echo) return true;
    for (int64_t i = w->shown_from; ok && i < w->prompt.count; i++)
        ok = text_stream_put(stream, w->prompt.ids[i]);
    return check_output(w, ok, err);
}

// Generates one text after the prompt, whose keys and values are in the KV cache.
static bool write_text(Writing *w, int sample, Error *err) {
    const Settings *s = w->settings;
    TextStream stream = {.tokenizer = w->saved.tokenizer, .out = stdout};
    if (!s->no_echo) stream.strip = tokenizer_stripped(w->saved.tokenizer);
    if (!echo_prompt(w, &stream, err)) return false;
    memcpy(w->logits, w->first, (size_t)w->model.gpt.V * sizeof(floatX));
    int64_t position = w->prompt.count;
    for (int i = 0; i < s->tokens && !w->stop.reason; i++, position++) {
        uint64_t number = (uint64_t)sample << 32 | (uint64_t)position;
        int32_t token = sampling_draw(&w->sampling, w->logits, number);
        if (token == w->saved.config.eod && !s->ignore_eod) break;
        w->written++;
        if (!check_output(w, text_stream_put(&stream, token), err)) return false;
        stop_poll(&w->stop, STOP_NONE, w->peers);
        w->full = i + 1 < s->tokens && position == w->saved.config.max_position_embeddings;
        if (i + 1 == s->tokens || w->full || w->stop.reason) break;
        gpt_continue(&w->model.gpt, &token, (int)position, 1, w->logits);
    }
    return check_output(w, text_stream_end(&stream) && putchar('\n') != EOF && fflush(stdout) == 0, err);
}

static bool write_texts(Writing *w, Error *err) {
    double began = monotonic_seconds();
    bool ok = true;
    for (int i = 0; ok && i < w->settings->samples && !w->stop.reason; i++) {
        if (w->settings->samples > 1) printf("--- sample %d ---\n", i + 1);
        ok = write_text(w, i, err);
    }
    w->seconds = monotonic_seconds() - began;
    return ok || w->unread;
}

// Runs the whole prompt in one forward pass and fills the KV cache.
static bool read_into_cache(Writing *w, Error *err) {
    size_t bytes = (size_t)w->model.gpt.V * sizeof(floatX);
    w->first = (floatX *)xmalloc(bytes, "the logits");
    w->logits = (floatX *)xmalloc(bytes, "the logits");
    gpt_continue(&w->model.gpt, w->prompt.ids, 0, (int)w->prompt.count, w->first);
    if (!isnan(floatX_to_float(w->first[0]))) return true;
    return ckpt_error(
        err,
        "the model's logits are NaN: training has diverged; load an earlier checkpoint with --ckpt-step");
}

static void prepare_sampling(Writing *w) {
    const Settings *s = w->settings;
    int vocab = w->saved.config.vocab_size_unpadded;
    w->sampling = (Sampling){.vocab = vocab,
                             .temperature = temperature_of(s),
                             .top_k = s->top_k,
                             .top_p = s->top_p,
                             .seed = (uint64_t)s->seed};
    if (s->top_k == 0 && s->top_p >= 1.0) return;
    w->sampling.candidates = (Candidate *)xmalloc((size_t)vocab * sizeof(Candidate), "the candidates");
}

// --- from a checkpoint to text -------------------------------------------------------------------

// Returns the number of positions that prompt and text need. The last token is not fed back.
static int positions_wanted(const Writing *w) {
    int64_t wanted = w->prompt.count + w->settings->tokens - 1;
    int most = w->saved.config.max_position_embeddings;
    return wanted < most ? (int)wanted : most;
}

static bool read_weights(Writing *w, Error *err) {
    SavedWeights weights;
    int count;
    const Tensor *tensors = zero_tensors(w->model.zero, &count);
    WeightsChoice choice = (WeightsChoice)w->settings->weights;
    bool ok = saved_weights_choose(&weights, w->saved.checkpoint, false, choice, err);
    for (int i = 0; ok && i < count; i++) {
        int64_t elements = tensor_elements(&tensors[i]);
        void *host = xmalloc((size_t)elements * sizeof(floatX), "a tensor");
        ok = saved_weights_read(&weights, slice_of_part(&tensors[i], SLICE_WEIGHT, 0, elements), host, err);
        if (ok) zero_put_weights(w->model.zero, i, host);
        free(host);
    }
    if (ok && *weights.note) fprintf(stderr, "%s\n", weights.note);
    return ok;
}

static bool open_model(Writing *w, const Site *site, Error *err) {
    const char *words[8];
    Words flags = tokenizer_flags(w->settings, words);
    SavedModelChoice choice = {w->settings->load, w->settings->step, &flags, w->peers};
    if (!saved_model_open(&w->saved, &choice, err)) return false;
    if (*w->saved.note) fprintf(stderr, "%s\n", w->saved.note);
    if (w->saved.config.lora_rank) {
        return ckpt_error(err,
                          "%s holds only LoRA adapters; merge them into the model with convert_checkpoint "
                          "--adapters, and import the result",
                          w->settings->load);
    }
    if (!encode_prompt(w, err)) return false;
    const Checkpoint *checkpoint = w->saved.checkpoint;
    int threads = parallel_share(w->peers);
    return text_model_open(&w->model, &w->saved.config, positions_wanted(w), threads, site, err) &&
           checkpoint_check_tensors(checkpoint, w->model.gpt.whole, w->model.gpt.whole_tensors, err) &&
           read_weights(w, err);
}

static void report(const Writing *w, double reading) {
    if (w->full) {
        fprintf(stderr, "The text ends here: prompt and text use all %d positions of the model.\n",
                w->saved.config.max_position_embeddings);
    }
    fprintf(stderr,
            "iteration %" PRId64 "; %" PRId64 " tokens read in %.2f s, %" PRId64
            " written in %.2f s: %.1f per second\n",
            w->saved.iteration, w->prompt.count, reading, w->written, w->seconds,
            w->seconds > 0 ? (double)w->written / w->seconds : 0.0);
}

static void close_writing(Writing *w) {
    text_model_close(&w->model);
    saved_model_close(&w->saved);
    token_buffer_free(&w->prompt);
    free(w->sampling.candidates);
    free(w->first);
    free(w->logits);
}

static bool generate(const Settings *settings, Peers peers, const Site *site, bool *stopped, Error *err) {
    Writing w;
    memset(&w, 0, sizeof w);
    w.settings = settings;
    w.peers = peers;
    bool ok = open_model(&w, site, err);
    double began = monotonic_seconds();
    if (ok) stop_catch_signals();  // before this, a signal ends the program at once
    ok = ok && read_into_cache(&w, err);
    double reading = monotonic_seconds() - began;
    if (ok) prepare_sampling(&w);
    ok = ok && write_texts(&w, err);
    if (ok) report(&w, reading);
    *stopped = w.stop.reason == STOP_SIGNAL;
    close_writing(&w);
    return ok;
}

// The functions of checkpoint.h are collective, so the program needs an MPI world of one rank.
static bool run(const void *context, int *argc, char ***argv, Error *err) {
    const Settings *settings = (const Settings *)context;
    Launch launch;
    Site site = {.rank = -1, .gpu = -1, .phase = "generate"};
    bool stopped = false;
    if (!check(settings, err)) return false;
    signal(SIGPIPE, SIG_IGN);  // a closed pipe becomes a write error
    launch_init(&launch, argc, argv);
    Peers peers = {launch.world, 0, &site};
    bool ok = launch.size == 1 || usage_error(err, "generate runs in one process; start it without mpirun");
    ok = ok && generate(settings, peers, &site, &stopped, err);
    if (!ok && launch.rank == 0) error_print(NULL, err->what);
    launch_finalize(&launch);
    err->what[0] = 0;  // already printed
    if (stopped) err->code = EXIT_STOPPED;
    return ok && !stopped;
}

int main(int argc, char **argv) {
    Settings settings = {0};
    const Tool tool = {table,
                       TABLE_ROWS,
                       "Usage: generate --load FOLDER [--prompt TEXT] [flags]\n"
                       "Generates text from a checkpoint of the trainer, token by token.\n",
                       &settings,
                       run,
                       NULL};
    json_use_checked_memory();
    return tool_main(&tool, argc, argv);
}
