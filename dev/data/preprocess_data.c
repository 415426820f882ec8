// preprocess_data: converts text to token shards, like Megatron-LM's tools/preprocess_data.py.
// Reads JSON lines or plain text files and writes <output-prefix>_<key>_document.bin and .idx for
// the trainer's --data-path. With --chat, reads conversations and also writes their loss masks, for
// the trainer's --sft.
//
// A reader thread splits the input into blocks of about 1 MB, --workers threads tokenize them, and
// the main thread writes them in input order, so the output does not depend on the number of
// workers. Memory is constant, except for 12 bytes per document for the index.
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "dev/lib/chat.h"
#include "dev/lib/corpus.h"
#include "dev/lib/jsonl.h"
#include "dev/lib/pipeline.h"
#include "dev/lib/prefix_lock.h"
#include "dev/lib/shard_writer.h"
#include "dev/lib/tool.h"
#include "llmc/base/json.h"
#include "llmc/base/version.h"
#include "llmc/data/tokenizer.h"

// ---- command line ----

typedef struct Settings {
    Words input, json_keys;
    const char *input_list, *output_prefix, *vocab_file, *merge_file, *tokenizer_model, *tokenizer_eod;
    const char *chat;  // name of a chat template or CHAT_RENDERED; NULL: text
    TokenizerType tokenizer_type;
    bool text, append_eod, no_special, help, version;
    int workers;  // 0: one per CPU
    int64_t log_interval;
} Settings;

#define FIELD(name) offsetof(Settings, name)
static const Option table[] = {
    {.help = "input"},
    {"input", .kind = OPTION_WORDS, .offset = FIELD(input), .value = "FILE...",
     .help = "JSON-lines files, one object per line; - is standard input. With --text: plain text files, one "
             "document each."},
    {"input-list", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(input_list), .value = "FILE",
     .help = "A file with one input path per line, read after the --input files."},
    {"text", .kind = OPTION_FLAG, .offset = FIELD(text),
     .help = "The inputs are plain text files, one document each."},
    {"json-keys", .kind = OPTION_WORDS, .offset = FIELD(json_keys), .low = 1, .value = "KEY",
     .help = "The JSON key of the text. Only one key per run; default: text, or messages with --chat."},
    {"chat", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(chat), .value = "TEMPLATE",
     .help = "The lines are conversations, for supervised fine-tuning: a list of messages with role and "
             "content. TEMPLATE is one of " CHAT_NAMES ". Also writes their loss masks."},
    {.help = "tokens"},
    {"tokenizer-type", .kind = OPTION_CHOICE, .offset = FIELD(tokenizer_type), .initial = "GPT2BPETokenizer",
     .choices = "GPT2BPETokenizer|Byte|HuggingFaceTokenizer", .value = "TYPE",
     .no_other = "HuggingFaceTokenizer reads a model's tokenizer.json, and --chat applies chat templates",
     .help = "GPT-2's byte-level BPE; bytes as ids (EOD 256, needs no files); the byte-level BPE of a "
             "tokenizer.json."},
    {"vocab-file", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(vocab_file), .value = "FILE",
     .help = "GPT-2's vocab.json."},
    {"merge-file", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(merge_file), .value = "FILE",
     .help = "GPT-2's merges.txt."},
    {"tokenizer-model", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(tokenizer_model), .value = "PATH",
     .help = "tokenizer.json of HuggingFaceTokenizer, or its directory."},
    {"tokenizer-eod", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(tokenizer_eod), .value = "TOKEN",
     .help = "End-of-document token of HuggingFaceTokenizer (default: eos_token of tokenizer_config.json "
             "in the same directory)."},
    {"tokenizer-hf-no-include-special-tokens", .kind = OPTION_FLAG, .offset = FIELD(no_special),
     .help = "Omit the tokens that the file's post_processor adds to every document, such as Llama 3's "
             "<|begin_of_text|>."},
    {"append-eod", .kind = OPTION_FLAG, .offset = FIELD(append_eod),
     .help = "Append the end-of-document token to every non-empty document."},
    {.help = "output and speed"},
    {"output-prefix", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(output_prefix), .value = "PATH",
     .help = "Prefix of the output files PATH_KEY_document.bin and .idx (PATH_text_document with --text), "
             "and of PATH_KEY_document_loss_mask.bin and .idx with --chat. "
             "Its directory is created."},
    {"workers", .kind = OPTION_INT, .offset = FIELD(workers), .low = 1, .high = 4096, .value = "N",
     .help = "Number of tokenizer threads (default: one per CPU). Does not affect the output."},
    {"log-interval", .kind = OPTION_INT64, .offset = FIELD(log_interval), .initial = "1000", .low = 1,
     .high = OPTION_ANY, .value = "N", .help = "Report progress every N documents."},
    {"help", .kind = OPTION_FLAG, .offset = FIELD(help), .help = "Print this and exit."},
    {"version", .kind = OPTION_FLAG, .offset = FIELD(version),
     .help = "Print the version and the Unicode tables in use, and exit."},
    {.help = "Megatron-LM's other flags, accepted without effect"},
    {"keep-newlines", .kind = OPTION_FLAG, .use = OPTION_NO_EFFECT, .offset = OPTION_NO_FIELD,
     .help = "Newlines are always kept."},
    {"partitions", .kind = OPTION_INT, .use = OPTION_NO_EFFECT, .offset = OPTION_NO_FIELD, .initial = "1",
     .low = 1, .high = 1, .value = "1",
     .help = "a single run uses all --workers in constant memory; partitions would only change the order "
             "of the documents."},
    {"keep-sequential-samples", .kind = OPTION_FLAG, .use = OPTION_NO_EFFECT, .offset = OPTION_NO_FIELD,
     .help = "The order is always kept."},
    {"dataset-impl", .kind = OPTION_CHOICE, .use = OPTION_NO_EFFECT, .offset = OPTION_NO_FIELD,
     .initial = "mmap", .choices = "mmap", .no_other = "mmap is the only format.", .value = "mmap",
     .help = "mmap is the only format."},
    {.help = "Refused"},
    {"split-sentences", .kind = OPTION_FLAG, .use = OPTION_REFUSED, .offset = OPTION_NO_FIELD,
     .help = "GPT is trained on whole documents; omit it."},
    {"lang", .kind = OPTION_TEXT, .use = OPTION_REFUSED, .offset = OPTION_NO_FIELD, .value = "LANG",
     .help = "it is only used by --split-sentences; omit it."},
    {"columns", .kind = OPTION_WORDS, .use = OPTION_REFUSED, .offset = OPTION_NO_FIELD, .value = "NAME",
     .help = "use --json-keys to name the key of the text."},
    {"split", .kind = OPTION_TEXT, .use = OPTION_REFUSED, .offset = OPTION_NO_FIELD, .value = "NAME",
     .help = "the entire input is tokenized; the trainer's --split divides it."},
    {"torch-backend", .kind = OPTION_TEXT, .use = OPTION_REFUSED, .offset = OPTION_NO_FIELD, .value = "NAME",
     .help = "no distributed job is needed; use --workers."},
};
enum { TABLE_ROWS = sizeof table / sizeof *table };

// Flags of text documents, which --chat excludes.
static bool check_chat(const Settings *s, Error *err) {
    if (!s->chat) return true;
    bool rendered = !strcmp(s->chat, CHAT_RENDERED);
    if (!rendered && !chat_template(s->chat)) {
        return usage_error(err, "--chat %s is not a template; use one of " CHAT_NAMES, s->chat);
    }
    const char *flag = s->text                              ? "--text"
                       : s->append_eod                      ? "--append-eod"
                       : s->no_special                      ? "--tokenizer-hf-no-include-special-tokens"
                       : rendered && s->json_keys.count > 0 ? "--json-keys"
                                                            : NULL;
    return !flag || usage_error(err,
                                "%s cannot be combined with --chat %s, which defines all tokens; remove one "
                                "of them",
                                flag, s->chat);
}

static bool check_settings(Settings *s, Error *err) {
    if (!s->input.count && !s->input_list) {
        return usage_error(err, "--input or --input-list is missing; --help lists the flags");
    }
    if (!s->output_prefix) {
        return usage_error(err, "--output-prefix is missing; --help lists the flags");
    }
    if (s->output_prefix[strlen(s->output_prefix) - 1] == '/') {
        return usage_error(err, "--output-prefix %s ends in '/'; append the start of the file names",
                           s->output_prefix);
    }
    if (s->text && s->json_keys.count) {
        return usage_error(err, "--json-keys cannot be combined with --text; remove one of them");
    }
    if (s->json_keys.count > 1) {
        return usage_error(err, "--json-keys has %d keys; run once for each", s->json_keys.count);
    }
    if (!s->workers) s->workers = (int)sysconf(_SC_NPROCESSORS_ONLN);
    return check_chat(s, err);
}

static void print_version(void) {
    char unicode[64];
    version_unicode(unicode, sizeof unicode);
    printf("preprocess_data %s (commit %s), %s\n", version_number(), version_commit(), unicode);
}

// ---- a block of text, passed from the reader via a worker to the writer ----

typedef struct Block {
    CorpusBlock input;
    ChatTokens tokens;  // the documents: masks only with --chat; length 0 for an empty document
    int64_t lines;      // JSON lines: number of lines
    int64_t bad_line;   // 1-based index of an invalid line in the block; 0: none
} Block;

typedef struct Job {
    const char *key;
    int eod;                   // id to append to every document; -1: none
    bool around;               // add the tokenizer's prefix and suffix to every document
    bool chats;                // the lines are conversations
    const ChatTemplate *chat;  // NULL with chats: CHAT_RENDERED
    const Tokenizer *tokenizer;
    Corpus *corpus;
    Pipeline *pipeline;
    Block *blocks;
    int block_count;
    const char *prefix;  // output prefix, while it is locked
    int lock;
    Error read_error;  // error of the reader, which the writer reads after joining it; code 0: none
} Job;

static void add_document(const Job *job, Block *block, Encoder *encoder, const char *text, size_t bytes) {
    TokenBuffer *out = &block->tokens.ids;
    int64_t before = out->count;
    int many = 0;
    const int32_t *ids = tokenizer_prefix(job->tokenizer, &many);
    for (int i = 0; job->around && i < many; i++) token_buffer_append(out, ids[i]);
    encoder_encode(encoder, text, bytes, out, &block->tokens.replaced);
    ids = tokenizer_suffix(job->tokenizer, &many);
    for (int i = 0; job->around && i < many; i++) token_buffer_append(out, ids[i]);
    if (out->count > before && job->eod >= 0) token_buffer_append(out, job->eod);
    token_buffer_append(&block->tokens.lengths, (int32_t)(out->count - before));
}

static const char *advice_for(const char *line, size_t bytes) {
    if (bytes && *line == '[') return "write one object per line, for a JSON array with: jq -c '.[]'";
    return bytes && *line != '{' ? "for plain text files, one document each, add --text"
                                 : "fix or remove the line";
}

// Returns false and sets why if the line is not valid JSON, has no string under job->key, or is not
// a conversation of a chat. Skips blank lines.
static bool add_json_line(const Job *job, Block *block, Encoder *encoder, JsonText *json, const char *line,
                          size_t bytes) {
    JsonlText found;
    static const char byte_order_mark[3] = {'\xEF', '\xBB', '\xBF'};
    if (bytes >= 3 && !memcmp(line, byte_order_mark, 3)) line += 3, bytes -= 3;
    size_t blanks = 0;
    while (blanks < bytes && memchr(" \t\r", line[blanks], 3)) blanks++;
    if (blanks == bytes) return true;
    ChatTokens *tokens = &block->tokens;
    if (job->chat) return chat_encode(job->chat, job->tokenizer, encoder, job->key, line, bytes, tokens);
    if (job->chats) return chat_read_rendered(job->tokenizer, line, bytes, tokens);
    char *why = tokens->why;
    const size_t capacity = sizeof tokens->why;
    JsonlResult result = jsonl_find(json, line, bytes, job->key, &found);
    tokens->replaced += found.replaced;
    switch (result) {
        case JSONL_FOUND: add_document(job, block, encoder, found.text, found.bytes); return true;
        case JSONL_INVALID:
            snprintf(why, capacity, "is not valid JSON (byte %zu: %s); %s", found.column, found.why,
                     advice_for(line, bytes));
            break;
        case JSONL_NO_KEY:
            snprintf(why, capacity, "lacks the key \"%s\"; use --json-keys to name the key", job->key);
            break;
        case JSONL_NOT_STRING:
            snprintf(why, capacity, "has a \"%s\" that is not a string; fix or remove the line", job->key);
            break;
    }
    return false;
}

static void encode_lines(const Job *job, Block *block, Encoder *encoder, JsonText *json) {
    const char *line = block->input.text, *end = line + block->input.bytes;
    for (block->lines = 0; line < end;) {
        const char *newline = memchr(line, '\n', (size_t)(end - line));
        const char *stop = newline ? newline : end;
        block->lines++;
        if (!add_json_line(job, block, encoder, json, line, (size_t)(stop - line))) {
            block->bad_line = block->lines;
            return;
        }
        line = newline ? newline + 1 : end;
    }
}

static void encode_files(const Job *job, Block *block, Encoder *encoder) {
    for (int i = 0; i < block->input.file_count; i++) {
        const CorpusFile *file = &block->input.files[i];
        add_document(job, block, encoder, block->input.text + file->offset, file->bytes);
    }
}

// ---- threads ----

static void *read_blocks(void *argument) {
    Job *job = argument;
    while (
        corpus_next(job->corpus, &job->blocks[pipeline_read_begin(job->pipeline)].input, &job->read_error)) {
        pipeline_read_end(job->pipeline);
    }
    pipeline_no_more_input(job->pipeline);
    return NULL;
}

static void *encode_blocks(void *argument) {
    Job *job = argument;
    Encoder *encoder = encoder_create(job->tokenizer);
    JsonText json = {0};
    for (int slot; (slot = pipeline_work_begin(job->pipeline)) >= 0; pipeline_work_end(job->pipeline, slot)) {
        Block *block = &job->blocks[slot];
        ChatTokens *tokens = &block->tokens;
        tokens->ids.count = tokens->mask.count = tokens->lengths.count = 0;
        tokens->replaced = block->bad_line = 0;
        if (job->key) encode_lines(job, block, encoder, &json);
        else encode_files(job, block, encoder);
    }
    json_text_free(&json);
    encoder_free(encoder);
    return NULL;
}

static pthread_t start_thread(void *(*body)(void *), Job *job) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, body, job)) {
        fatal(NULL, EXIT_ENVIRONMENT, "cannot start a thread; use fewer --workers");
    }
    return thread;
}

// Returns the termination signals. They are blocked; the writer polls for them and removes the
// temporary files before exiting.
static void ending_signals(sigset_t *set) {
    sigemptyset(set);
    sigaddset(set, SIGINT);
    sigaddset(set, SIGTERM);
    sigaddset(set, SIGHUP);
}

static bool asked_to_end(void) {
    sigset_t ending, pending;
    ending_signals(&ending);
    sigpending(&pending);
    return sigismember(&pending, SIGINT) || sigismember(&pending, SIGTERM) || sigismember(&pending, SIGHUP);
}

// ---- writing and progress ----

typedef struct Totals {
    int64_t documents, empty, tokens, bytes, replaced;
    int64_t counted;  // tokens with a loss mask of 1
    int64_t line;     // JSON lines: number of lines of the current file before the current block
    int64_t log_interval, all_bytes;
    struct timespec start;
} Totals;

static double seconds_since(struct timespec start) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec);
}

// Prints Megatron-LM's progress line, plus the remaining time if the input size is known. 1 MB is
// 10^6 bytes of input.
static void print_progress(const Totals *t) {
    double seconds = seconds_since(t->start), rate = (double)t->bytes / seconds;
    char eta[48] = "";
    if (t->all_bytes >= t->bytes && rate > 0) {
        int64_t left = (int64_t)((double)(t->all_bytes - t->bytes) / rate);
        snprintf(eta, sizeof eta, " ETA %" PRId64 ":%02d:%02d", left / 3600, (int)(left / 60 % 60),
                 (int)(left % 60));
    }
    fprintf(stderr, "Processed %" PRId64 " documents (%.2f docs/s, %.2f MB/s).%s\n", t->documents,
            (double)t->documents / seconds, rate / 1e6, eta);
}

// Output of a job. Shards hold one sequence and document per document or conversation.
typedef struct Output {
    ShardWriter *ids, *mask;  // mask: with --chat, else NULL
} Output;

static bool write_document(const Output *out, const ChatTokens *tokens, int64_t at, int64_t length,
                           Error *err) {
    if (length && !shard_writer_add_sequence(out->ids, tokens->ids.ids + at, length, err)) return false;
    shard_writer_end_document(out->ids);
    if (!out->mask) return true;
    if (!shard_writer_add_sequence(out->mask, tokens->mask.ids + at, length, err)) return false;
    shard_writer_end_document(out->mask);
    return true;
}

static bool write_block(const Output *out, const Block *block, Totals *t, Error *err) {
    const ChatTokens *tokens = &block->tokens;
    int64_t before = t->documents, at = 0;
    for (int64_t i = 0; i < tokens->lengths.count; i++) {
        int32_t length = tokens->lengths.ids[i];
        if (!write_document(out, tokens, at, length, err)) return false;
        at += length;
        t->empty += !length;
    }
    if (block->input.first_of_path) t->line = 0;
    if (block->bad_line) {
        return data_error(err, "%s line %" PRId64 " %s", block->input.path, t->line + block->bad_line,
                          tokens->why);
    }
    for (int64_t i = 0; i < tokens->mask.count; i++) t->counted += tokens->mask.ids[i];
    t->documents += tokens->lengths.count;
    t->tokens += tokens->ids.count;
    t->bytes += (int64_t)block->input.bytes;
    t->replaced += tokens->replaced;
    t->line += block->lines;
    if (t->documents / t->log_interval > before / t->log_interval) print_progress(t);
    return true;
}

// Writes blocks until the input ends, a signal arrives (EXIT_STOPPED) or an error occurs.
static bool write_blocks(Job *job, const Output *out, Totals *totals, Error *err) {
    for (;;) {
        if (asked_to_end())
            return error_set(err, EXIT_STOPPED, "interrupted by a signal; nothing was written");
        int slot = pipeline_write_begin(job->pipeline, 200);
        if (slot == PIPELINE_END) return true;
        if (slot == PIPELINE_TIMEOUT) continue;
        if (!write_block(out, &job->blocks[slot], totals, err)) return false;
        pipeline_write_end(job->pipeline);
    }
}

static void print_totals(const Totals *t, const char *prefix, int dtype, bool chats) {
    fprintf(stderr,
            "Wrote %s.bin and .idx: %" PRId64 " documents (%" PRId64 " empty), %" PRId64
            " tokens of %d bytes, from %.2f MB in %.2f s (%.2f MB/s).\n",
            prefix, t->documents, t->empty, t->tokens, shard_dtype_size(dtype), (double)t->bytes / 1e6,
            seconds_since(t->start), (double)t->bytes / 1e6 / seconds_since(t->start));
    if (chats) {
        fprintf(stderr, "Wrote %s_loss_mask.bin and .idx: the loss counts %" PRId64 " tokens (%.1f%%).\n",
                prefix, t->counted, 100.0 * (double)t->counted / (double)t->tokens);
    }
    if (t->replaced) {
        fprintf(stderr, "Replaced %" PRId64 " invalid UTF-8 sequences or lone surrogates with U+FFFD.\n",
                t->replaced);
    }
}

// ---- the job ----

static void discard(const Output *out) {
    shard_writer_discard(out->ids);
    if (out->mask) shard_writer_discard(out->mask);
}

// Exits after an error without joining the threads, because the reader may be blocked on a pipe.
static _Noreturn void give_up(const Job *job, const Output *out, const Error *err) {
    discard(out);
    prefix_unlock(job->prefix, job->lock);
    error_print(NULL, err->what);
    sigset_t ending;
    ending_signals(&ending);
    // A pending signal terminates the program here, which gives the right exit status.
    pthread_sigmask(SIG_UNBLOCK, &ending, NULL);
    exit(err->code);
}

// Starts the reader and the workers, runs write_blocks, and joins the threads.
static void run_threads(Job *job, int workers, const Output *out, Totals *totals) {
    Error err;
    job->block_count = 2 * workers + 2;
    job->blocks = xcalloc((size_t)job->block_count, sizeof *job->blocks, "blocks of text");
    job->pipeline = pipeline_create(job->block_count);
    pthread_t reader = start_thread(read_blocks, job);
    pthread_t *threads = xcalloc((size_t)workers, sizeof *threads, "threads");
    for (int i = 0; i < workers; i++) threads[i] = start_thread(encode_blocks, job);
    if (!write_blocks(job, out, totals, &err)) give_up(job, out, &err);
    pthread_join(reader, NULL);
    for (int i = 0; i < workers; i++) pthread_join(threads[i], NULL);
    if (job->read_error.code) give_up(job, out, &job->read_error);
    for (int i = 0; i < job->block_count; i++) {
        corpus_block_free(&job->blocks[i].input);
        chat_tokens_free(&job->blocks[i].tokens);
    }
    free(job->blocks);
    free(threads);
    pipeline_free(job->pipeline);
}

// Returns <output-prefix>_<key>_document.
static char *output_name(const Settings *s, const char *key) {
    return text_format("%s_%s_document", s->output_prefix, key);
}

// Refuses an empty input, because the program that writes to the pipe may have failed. Frees the
// writers.
static bool no_document(const Output *out, Error *err) {
    discard(out);
    return data_error(err, "the input has no documents; nothing was written");
}

static bool open_output(Output *out, const Job *job, const char *prefix, int dtype, Error *err) {
    out->ids = shard_writer_open(prefix, dtype, err);
    if (!out->ids || !job->chats) return out->ids != NULL;
    char *masks = text_format("%s" SHARD_MASK_SUFFIX, prefix);
    out->mask = shard_writer_open(masks, SHARD_U8, err);
    free(masks);
    if (!out->mask) shard_writer_discard(out->ids);
    return out->mask != NULL;
}

// The masks come first: a shard of ids that exists has its masks.
static bool close_output(const Output *out, Error *err) {
    if (!out->mask || shard_writer_close(out->mask, err)) return shard_writer_close(out->ids, err);
    shard_writer_discard(out->ids);
    return false;
}

static bool write_shard(const Settings *s, Job *job, Error *err) {
    char *prefix = output_name(s, job->key ? job->key : "text");
    int dtype = shard_dtype_for_vocab(tokenizer_vocab_size(job->tokenizer));
    Totals totals = {.log_interval = s->log_interval, .all_bytes = corpus_bytes(job->corpus)};
    clock_gettime(CLOCK_MONOTONIC, &totals.start);
    sigset_t ending;
    ending_signals(&ending);
    // Block signals before temporary files exist. The threads inherit the signal mask.
    pthread_sigmask(SIG_BLOCK, &ending, NULL);
    job->prefix = prefix;
    Output out = {0};
    bool good = prefix_lock(prefix, &job->lock, err) && open_output(&out, job, prefix, dtype, err);
    if (good) run_threads(job, s->workers, &out, &totals);
    good = good && (totals.documents || no_document(&out, err)) && close_output(&out, err);
    prefix_unlock(prefix, job->lock);
    pthread_sigmask(SIG_UNBLOCK, &ending, NULL);
    if (good) print_totals(&totals, prefix, dtype, job->chats);
    free(prefix);
    return good;
}

static bool preprocess(const Settings *s, Error *err) {
    bool json = s->tokenizer_type == TOKENIZER_HUGGING_FACE;
    if (!json && (s->tokenizer_model || s->tokenizer_eod)) {
        fprintf(stderr,
                "--tokenizer-model and --tokenizer-eod have no effect: only HuggingFaceTokenizer reads "
                "them\n");
    }
    if (s->tokenizer_type != TOKENIZER_GPT2_BPE && (s->vocab_file || s->merge_file)) {
        fprintf(stderr, "--vocab-file and --merge-file have no effect: only GPT2BPETokenizer uses them\n");
    }
    const char *key = s->chat ? "messages" : "text";
    Job job = {.key = s->text ? NULL : s->json_keys.count ? s->json_keys.items[0] : key};
    job.chats = s->chat != NULL;
    job.chat = s->chat ? chat_template(s->chat) : NULL;
    job.corpus = corpus_open(s->input.items, s->input.count, s->input_list, s->text, err);
    if (!job.corpus) return false;
    TokenizerChoice choice = {.type = s->tokenizer_type,
                              .vocab_file = s->vocab_file,
                              .merge_file = s->merge_file,
                              .model = s->tokenizer_model,
                              .eod_token = s->tokenizer_eod};
    Tokenizer *tokenizer = tokenizer_open(&choice, err);
    bool good = false;
    if (tokenizer && (!job.chat || chat_check_tokens(job.chat, tokenizer, err))) {
        job.tokenizer = tokenizer;
        job.around = !s->no_special;
        job.eod = s->append_eod ? tokenizer_eod(tokenizer) : -1;
        good = write_shard(s, &job, err);
    }
    tokenizer_close(tokenizer);
    corpus_close(job.corpus);
    return good;
}

static bool run(const void *flags, int *argc, char ***argv, Error *err) {
    Settings settings = *(const Settings *)flags;
    return check_settings(&settings, err) && preprocess(&settings, err);
}

int main(int argc, char **argv) {
    Settings settings = {0};
    const Tool tool = {table,
                       TABLE_ROWS,
                       "Usage: preprocess_data --input FILE... --output-prefix PATH [flags]\n"
                       "Converts text to Megatron token shards.\n",
                       &settings,
                       run,
                       print_version};
    json_use_checked_memory();
    return tool_main(&tool, argc, argv);
}
