// Tests reading files of --eval-tasks and --eval-text: tokenization of contexts and continuations,
// windows of texts, and one-line errors for invalid files.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/base/durable.h"
#include "llmc/data/detokenize.h"
#include "llmc/data/tasks.h"
#include "test/unit/folder.h"

enum { SEQ = 8, EOD = 256 };

// A line of task "a" with these members: A has context "c", OWN has no other members.
#define A(members) "{\"task\":\"a\",\"context\":\"c\"," members "}"
#define OWN(members) "{\"task\":\"a\"," members "}"

typedef struct Fixture {
    char folder[64], path[80];
    Tokenizer *bytes, *ids;
} Fixture;

static int setup(void **state) {
    Fixture *f = calloc(1, sizeof *f);
    Error err;
    TokenizerChoice byte = {.type = TOKENIZER_BYTE}, null = {.type = TOKENIZER_NULL, .null_vocab_size = 50};
    if (!f || folder_make(f->folder, sizeof f->folder, "test_tasks")) return -1;
    snprintf(f->path, sizeof f->path, "%s/tasks.jsonl", f->folder);
    f->bytes = tokenizer_open(&byte, &err);
    f->ids = tokenizer_open(&null, &err);
    *state = f;
    return f->bytes && f->ids ? 0 : -1;
}

static int teardown(void **state) {
    Fixture *f = *state;
    tokenizer_close(f->bytes);
    tokenizer_close(f->ids);
    int result = folder_remove(f->folder);
    free(f);
    return result;
}

static bool read_bytes(const Fixture *f, const char *text, size_t bytes, TaskSet *set, Error *err) {
    TaskEncoding encoding = {.tokenizer = f->bytes, .seq_length = SEQ};
    assert_true(durable_write_file(f->path, text, bytes, err));
    return task_set_read(set, f->path, encoding, err);
}

static TaskSet reads(const Fixture *f, const char *text) {
    TaskSet set = {0};
    Error err;
    if (!read_bytes(f, text, strlen(text), &set, &err)) fail_msg("%s", err.what);
    return set;
}

// Formats the ids of request i: bytes as characters, EOD as '$'.
static const char *shown(const TaskSet *set, int64_t i) {
    static char text[64];
    const TaskRequest *r = &set->request[i];
    for (int t = 0; t < r->tokens; t++) {
        int32_t id = set->ids.ids[r->first + t];
        text[t] = id == EOD ? '$' : (char)id;
    }
    text[r->tokens] = 0;
    return text;
}

static void check_request(const TaskSet *set, int64_t i, const char *text, int scored, int characters) {
    assert_string_equal(shown(set, i), text);
    assert_int_equal(set->request[i].scored, scored);
    assert_int_equal(set->request[i].characters, characters);
}

static void forms(void **state) {
    TaskSet set = reads(*state,
                        "{\"task\":\"a\",\"context\":\"Q:\",\"choices\":[\"x\",\"yz\"],\"gold\":1}\n"
                        "\n \t\r\n"
                        "{\"task\":\"b\",\"context\":\"c\",\"continuation\":\" d\",\"id\":[1,{}]}\r\n" OWN(
                            "\"context\":\"Q\",\"choices\":[\"x\"],\"gold\":0,\"delimiter\":\"\""));
    assert_int_equal(set.tasks, 2);
    assert_int_equal(set.samples, 3);
    assert_int_equal(set.requests, 4);
    assert_string_equal(set.task[0].name, "a");
    assert_int_equal(set.task[0].form, TASK_CHOICES);
    assert_int_equal(set.task[0].samples, 2);
    assert_string_equal(set.task[1].name, "b");
    assert_int_equal(set.task[1].form, TASK_CONTINUATION);
    assert_int_equal(set.sample[0].right, 1);
    assert_int_equal(set.sample[0].choices, 2);
    assert_int_equal(set.sample[1].task, 1);
    assert_int_equal(set.sample[2].first, 3);
    check_request(&set, 0, "Q: x", 2, 1);
    check_request(&set, 1, "Q: yz", 3, 2);
    check_request(&set, 2, "c d", 2, 2);
    check_request(&set, 3, "Qx", 1, 1);
    task_set_free(&set);
}

// White space is the same as for Python's str.rstrip(): U+2003 and U+001F, but not U+200B.
static void trailing_white_space_moves_to_continuation(void **state) {
    TaskSet set = reads(*state,
                        "{\"task\":\"a\",\"context\":\"c \\n\",\"continuation\":\"d\"}\n"
                        "{\"task\":\"a\",\"context\":\"c\\u2003\",\"continuation\":\"d\"}\n"
                        "{\"task\":\"a\",\"context\":\"c\\u200b\",\"continuation\":\"d\"}\n"
                        "{\"task\":\"a\",\"context\":\"\\u001f c\\u001f\",\"continuation\":\"d\"}\n");
    check_request(&set, 0, "c \nd", 3, 1);
    check_request(&set, 1, "c\u2003d", 4, 1);
    check_request(&set, 2, "c\u200bd", 1, 1);
    check_request(&set, 3,
                  "\x1f c\x1f"
                  "d",
                  2, 1);
    task_set_free(&set);
}

static void length_is_in_characters(void **state) {
    TaskSet set = reads(*state, A("\"choices\":[\"\u65e5\u672c\",\"\\u00e9e\"],\"gold\":0"));
    assert_int_equal(set.request[0].characters, 2);
    assert_int_equal(set.request[0].scored, 7);
    assert_int_equal(set.request[1].characters, 2);
    assert_int_equal(set.request[1].scored, 4);
    task_set_free(&set);
}

// A request has at most SEQ input tokens, and one more token that is only predicted.
static void long_contexts_are_truncated_left(void **state) {
    TaskSet set = reads(*state,
                        "{\"task\":\"a\",\"context\":\"01234567\",\"continuation\":\"x\"}\n"
                        "{\"task\":\"a\",\"context\":\"0123456789\",\"continuation\":\"xy\"}\n"
                        "{\"task\":\"a\",\"context\":\"0123\",\"continuation\":\"stuvwxyz\"}\n");
    check_request(&set, 0, "01234567x", 1, 1);
    check_request(&set, 1, "3456789xy", 2, 2);
    check_request(&set, 2, "3stuvwxyz", 8, 8);
    task_set_free(&set);
}

static void empty_context(void **state) {
    TaskSet set = reads(*state,
                        "{\"task\":\"a\",\"context\":\"\",\"continuation\":\"stuvwxyz\"}\n"
                        "{\"task\":\"b\",\"context\":\"\",\"choices\":[\"x\"],\"gold\":0}\n");
    check_request(&set, 0, "$stuvwxyz", 8, 8);
    check_request(&set, 1, "$ x", 2, 1);
    task_set_free(&set);
}

static void several_files(void **state) {
    const Fixture *f = *state;
    TaskSet set = reads(f, A("\"continuation\":\"d\""));
    const char *more = "{\"task\":\"b\",\"context\":\"c\",\"continuation\":\"d\"}\n" A(
        "\"continuation\":\"e\"") "\n";
    Error err;
    assert_true(read_bytes(f, more, strlen(more), &set, &err));
    assert_int_equal(set.tasks, 2);
    assert_int_equal(set.task[0].samples, 2);
    assert_int_equal(set.sample[2].task, 0);
    assert_false(read_bytes(f, "", 0, &set, &err));  // the second file has no samples
    assert_int_equal(err.code, EXIT_DATA);
    task_set_free(&set);
}

// With NullTokenizer every word is an id. Other words are refused.
static void ids(void **state) {
    const Fixture *f = *state;
    TaskEncoding encoding = {.tokenizer = f->ids, .seq_length = SEQ};
    TaskSet set = {0};
    Error err;
    const char *good = "{\"task\":\"a\",\"context\":\"1 2\",\"choices\":[\"3 4\"],\"gold\":0}";
    const char *bad = "{\"task\":\"a\",\"context\":\"1 2\",\"choices\":[\"51\"],\"gold\":0}";
    assert_true(durable_write_file(f->path, good, strlen(good), &err));
    assert_true(task_set_read(&set, f->path, encoding, &err));
    assert_int_equal(set.request[0].tokens, 4);
    assert_int_equal(set.request[0].scored, 2);
    assert_true(durable_write_file(f->path, bad, strlen(bad), &err));
    assert_false(task_set_read(&set, f->path, encoding, &err));
    assert_non_null(strstr(err.what, "line 1: choice 0 contains text that the tokenizer cannot encode"));
    task_set_free(&set);
}

// The harness tokenizes the context separately, but counts the continuation's tokens in the joined
// text.
static void context_is_tokenized_alone(void **state) {
    const Fixture *f = *state;
    TokenizerChoice choice = {.type = TOKENIZER_HUGGING_FACE, .model = "test/golden/tokenizer_json/gpt2"};
    Error err;
    Tokenizer *gpt2 = tokenizer_open(&choice, &err);
    if (!gpt2) fail_msg("%s", err.what);
    TaskEncoding encoding = {.tokenizer = gpt2, .seq_length = SEQ};
    TaskSet set = {0};
    const char *text = OWN("\"context\":\" o\",\"continuation\":\"f x\"");
    assert_true(durable_write_file(f->path, text, strlen(text), &err));
    if (!task_set_read(&set, f->path, encoding, &err)) fail_msg("%s", err.what);
    const int32_t expected[] = {280, 220, 87};
    const TaskRequest *r = &set.request[0];
    assert_int_equal(r->tokens, sizeof expected / sizeof *expected);
    assert_memory_equal(set.ids.ids + r->first, expected, sizeof expected);
    assert_int_equal(r->scored, 2);
    task_set_free(&set);
    tokenizer_close(gpt2);
}

// Llama 3's tokenizer puts one <|begin_of_text|> before every text. This token is also the context
// if a request has none, and is dropped first if a request is too long.
static void prefix(void **state) {
    const Fixture *f = *state;
    Error err;
    TokenizerChoice choice = {.type = TOKENIZER_HUGGING_FACE, .model = "test/golden/tokenizer_json/llama3"};
    Tokenizer *llama = tokenizer_open(&choice, &err);
    if (!llama) fail_msg("%s", err.what);
    int count;
    int32_t begin = tokenizer_prefix(llama, &count)[0];
    TaskEncoding encoding = {.tokenizer = llama, .seq_length = SEQ};
    TaskSet set = {0};
    const char *text = A("\"continuation\":\"x\"") "\n" OWN("\"context\":\"\",\"continuation\":\"x\"") "\n"
        OWN("\"context\":\"<|begin_of_text|>c\",\"continuation\":\"x\"") "\n"
        OWN("\"context\":\"1!2!3!4!5!6!7!8!\",\"continuation\":\"x\"") "\n"
        OWN("\"context\":\"\",\"continuation\":\"<|begin_of_text|>x\"");
    assert_int_equal(count, 1);
    assert_true(durable_write_file(f->path, text, strlen(text), &err));
    if (!task_set_read(&set, f->path, encoding, &err)) fail_msg("%s", err.what);
    const int tokens[] = {3, 2, 3, SEQ + 1, 2};
    for (int i = 0; i < 5; i++) {
        const TaskRequest *r = &set.request[i];
        assert_int_equal(r->tokens, tokens[i]);
        assert_int_equal(r->scored, 1);
        for (int t = 0; t < r->tokens; t++)
            assert_int_equal(set.ids.ids[r->first + t] == begin, t == 0 && i != 3);
    }
    task_set_free(&set);
    tokenizer_close(llama);
}

static void refused(const Fixture *f, const char *text, size_t bytes, const char *what) {
    TaskSet set = {0};
    Error err = {0};
    assert_false(read_bytes(f, text, bytes, &set, &err));
    assert_int_equal(err.code, EXIT_DATA);
    if (!strstr(err.what, what)) fail_msg("\"%s\" does not contain \"%s\"", err.what, what);
    if (strchr(err.what, '\n')) fail_msg("more than a line: %s", err.what);
    task_set_free(&set);
}

// --- last words ----------------------------------------------------------------------------------

static TaskSet reads_cloze(const Fixture *f, bool strict, const char *text) {
    TaskEncoding encoding = {.tokenizer = f->bytes, .seq_length = SEQ, .strict_lambada = strict};
    TaskSet set = {0};
    Error err;
    assert_true(durable_write_file(f->path, text, strlen(text), &err));
    if (!task_set_read(&set, f->path, encoding, &err)) fail_msg("%s", err.what);
    return set;
}

#define CLOZES \
    "{\"text\":\" ab  cd\"}\n{\"text\":\"ab cd\\u2003\\n\"}\n{\"text\":\"abcd\"}\n" \
    "{\"text\":\"x\",\"task\":\"t\",\"domain\":\"d\"}\n{\"text\":\"0123456 78\",\"task\":\"t\"}"

// Without --strict-lambada, white space at the end of a text belongs to it.
static void last_token(void **state) {
    TaskSet set = reads_cloze(*state, false, CLOZES);
    assert_int_equal(set.tasks, 2);
    assert_string_equal(set.task[0].name, "lambada");
    assert_string_equal(set.task[1].name, "t");
    assert_int_equal(set.task[0].form, TASK_CONTINUATION);
    check_request(&set, 0, " ab  cd", 1, 2);
    check_request(&set, 1, "ab cd\u2003\n", 1, 4);
    check_request(&set, 2, "abcd", 1, 4);
    check_request(&set, 3, "$x", 1, 1);
    check_request(&set, 4, "123456 78", 1, 2);
    task_set_free(&set);
}

static void last_word(void **state) {
    TaskSet set = reads_cloze(*state, true, CLOZES);
    check_request(&set, 0, "ab cd", 3, 3);
    check_request(&set, 1, "ab cd", 3, 3);
    check_request(&set, 2, "$ abcd", 5, 5);
    check_request(&set, 3, "$ x", 2, 2);
    check_request(&set, 4, "123456 78", 3, 3);
    task_set_free(&set);
}

// A line with another form's members has an ordinary member "text".
static void text_of_other_forms(void **state) {
    TaskSet set = reads(*state, A("\"continuation\":\"d\",\"text\":\"ab cd\""));
    check_request(&set, 0, "cd", 1, 1);
    task_set_free(&set);
    refused(*state, "{\"text\":\" \\n\"}", 14, "line 1: \"text\" has no words");
    refused(*state, "{\"text\":\"\"}", 11, "line 1: \"text\" has no words");
    refused(*state, "{\"text\":1}", 10, "\"text\" is missing or not a string");
}

// --- texts ---------------------------------------------------------------------------------------

static bool read_text(const Fixture *f, const char *text, size_t bytes, TaskEncoding to, TaskSet *set,
                      Error *err) {
    assert_true(durable_write_file(f->path, text, bytes, err));
    return task_set_read_text(set, f->path, to, err);
}

static TaskSet reads_text(const Fixture *f, const char *text, int stride) {
    TaskEncoding to = {.tokenizer = f->bytes, .seq_length = SEQ, .stride = stride};
    TaskSet set = {0};
    Error err;
    if (!read_text(f, text, strlen(text), to, &set, &err)) fail_msg("%s", err.what);
    assert_int_equal(set.tasks, 1);
    assert_int_equal(set.task[0].form, TASK_TEXT);
    assert_int_equal(set.task[0].samples, set.requests);
    assert_int_equal(set.samples, set.requests);
    return set;
}

// The last window starts at the multiple of the stride that scores the last token.
static void windows_overlap(void **state) {
    TaskSet set = reads_text(*state, "0123 56789abcde\n", 3);
    assert_int_equal(set.task[0].tokens, 16);
    assert_int_equal(set.task[0].words, 2);
    assert_string_equal(set.task[0].name, "tasks.jsonl");
    assert_int_equal(set.requests, 4);
    check_request(&set, 0, "0123 5678", 8, 1);
    check_request(&set, 1, "3 56789ab", 3, 1);
    check_request(&set, 2, "6789abcde", 3, 1);
    check_request(&set, 3, "9abcde\n", 1, 1);
    task_set_free(&set);
}

static void windows_without_overlap(void **state) {
    TaskSet set = reads_text(*state, "0 23456789abcdefgh", SEQ);
    assert_int_equal(set.requests, 3);
    check_request(&set, 0, "0 2345678", 8, 1);
    check_request(&set, 1, "89abcdefg", 8, 1);
    check_request(&set, 2, "gh", 1, 1);
    task_set_free(&set);
}

// For every length and stride, each token but the first is scored once, with as much context as the
// stride allows.
static void each_token_is_scored_once(void **state) {
    const char *text = "a cdefghijklmnopqrstuvwxyz";
    for (int bytes = 3; bytes <= 26; bytes++) {
        for (int stride = 1; stride <= SEQ; stride++) {
            char part[32];
            snprintf(part, sizeof part, "%.*s", bytes, text);
            TaskSet set = reads_text(*state, part, stride);
            int64_t next = 1;
            for (int64_t i = 0; i < set.requests; i++) {
                const TaskRequest *r = &set.request[i];
                assert_int_equal(r->first, i * stride);
                assert_int_equal(r->first + r->tokens - r->scored, next);
                assert_true(r->scored >= 1 && r->tokens <= SEQ + 1);
                assert_true(r->tokens - r->scored >= (i ? SEQ - stride + 1 : 1));
                next += r->scored;
            }
            assert_int_equal(next, bytes);
            task_set_free(&set);
        }
    }
}

// As in Megatron-LM, words are separated by single spaces, after stripping the text.
static void words_of_texts(void **state) {
    const struct {
        const char *text;
        int words;
    } cases[] = {{"a b", 2}, {" a b \n", 2}, {"a  b", 3}, {"a\nb c", 2}, {" = a = \n \n b \n ", 6}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        TaskSet set = reads_text(*state, cases[i].text, 1);
        assert_int_equal(set.task[0].words, cases[i].words);
        task_set_free(&set);
    }
}

static void prefix_of_texts(void **state) {
    const Fixture *f = *state;
    Error err;
    TokenizerChoice choice = {.type = TOKENIZER_HUGGING_FACE, .model = "test/golden/tokenizer_json/llama3"};
    Tokenizer *llama = tokenizer_open(&choice, &err);
    if (!llama) fail_msg("%s", err.what);
    int count;
    TaskEncoding to = {.tokenizer = llama, .seq_length = SEQ, .stride = 2};
    TaskSet set = {0};
    if (!read_text(f, "1! 2!", 5, to, &set, &err)) fail_msg("%s", err.what);
    assert_int_equal(set.ids.ids[0], tokenizer_prefix(llama, &count)[0]);
    assert_int_equal(set.request[0].scored, set.task[0].tokens - 1);
    task_set_free(&set);
    tokenizer_close(llama);
}

static void refused_text(const Fixture *f, const char *text, size_t bytes, const char *what) {
    TaskEncoding to = {.tokenizer = f->bytes, .seq_length = SEQ, .stride = 2};
    TaskSet set = {0};
    Error err = {0};
    assert_false(read_text(f, text, bytes, to, &set, &err));
    assert_int_equal(err.code, EXIT_DATA);
    if (!strstr(err.what, what)) fail_msg("\"%s\" does not contain \"%s\"", err.what, what);
    if (strchr(err.what, '\n')) fail_msg("more than a line: %s", err.what);
    task_set_free(&set);
}

static void invalid_texts(void **state) {
    const Fixture *f = *state;
    TaskEncoding to = {.tokenizer = f->bytes, .seq_length = SEQ, .stride = 2};
    TaskEncoding ids_only = {.tokenizer = f->ids, .seq_length = SEQ, .stride = 2};
    TaskSet set = {0};
    Error err = {0};
    refused_text(f, "", 0, "has 0 words separated by spaces and 0 tokens");
    refused_text(f, "\n \n", 3, "has 0 words separated by spaces and 3 tokens");
    refused_text(f, "word\n", 5, "has 1 words separated by spaces and 5 tokens");
    refused_text(f, "a b\nc\xFF d", 8, "line 2: byte 6 of the file, 0xFF, is not valid UTF-8");
    refused_text(f, "a b \xE2\x82", 6, "line 1: byte 5 of the file, 0xE2, is not valid UTF-8");
    assert_false(task_set_read_text(&set, "/nowhere/text", to, &err));
    assert_int_equal(err.code, EXIT_DATA);
    assert_false(read_text(f, "1 x 2", 5, ids_only, &set, &err));
    assert_non_null(strstr(err.what, "contains text that the tokenizer cannot encode"));
    task_set_free(&set);
    assert_true(read_text(f, "a b", 3, to, &set, &err));
    assert_false(read_text(f, "a b", 3, to, &set, &err));
    assert_non_null(strstr(err.what, "--eval-text has two files named tasks.jsonl"));
    task_set_free(&set);
}

// --- WikiText ------------------------------------------------------------------------------------

static void wikitext(void **state) {
    const struct {
        const char *text, *plain;
    } cases[] = {
        {"", ""},
        {" \n = Title = \n \n Text . \n", "\n= Title =\n\nText.\n"},
        {"= = = = x = = = =\n= = = y = = =", "==== x ====\n=== y ==="},
        {"a @-@ b 1 @,@ 000 @.@ 5", "a-b 1,000.5"},
        {"a : b ; c . d ! e ? f , g ,", "a: b; c. d! e? f, g ,"},
        {"( a b ) [\u3000c] { } ( d", "(a b) [c] {} ( d"},
        {"( a ( b ) c )", "(a ( b) c )"},
        {"\" a \" b \" c", "\"a\" b \" c"},
        {"the boys ' tea , it 's 30 \u00b0 N of it", "the boys'tea, it's 30\u00b0N of it"},
        {"5 N 6", "5 1 6"},
        {"(\x1f\u00e9\u2003)", "(\u00e9)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[128];
        snprintf(text, sizeof text, "%s", cases[i].text);
        text[detokenize_wikitext(text, strlen(text))] = 0;
        assert_string_equal(text, cases[i].plain);
    }
}

#define GOOD A("\"choices\":[\"x\"],\"gold\":0") "\n"

static void invalid_lines(void **state) {
    const struct {
        const char *line, *what;
    } cases[] = {
        {"[]", "line 2: it is not a JSON object"},
        {"{\"task\":\"a\"", "line 2: it is not a JSON object"},
        {"{} {}", "line 2: it is not a JSON object"},
        {"{}", "line 2: \"task\" is missing or not a string"},
        {"{\"task\":1}", "\"task\" is missing or not a string"},
        {"{\"task\":\"a\"}", "\"context\" is missing or not a string"},
        {"{\"task\":\"\",\"context\":\"c\",\"continuation\":\"d\"}", "\"task\" must have 1 to 63 bytes"},
        {"{\"task\":\"\\n\",\"context\":\"c\",\"continuation\":\"d\"}", "no control characters"},
        {"{\"task\":\"0123456789012345678901234567890123456789012345678901234567890123\",\"context\":\"c\","
         "\"continuation\":\"d\"}",
         "\"task\" must have 1 to 63 bytes"},
        {"{\"task\":\"a\",\"context\":\"c\"}", "set either \"choices\" or \"continuation\""},
        {"{\"task\":\"z\",\"context\":\"c\",\"choices\":[\"x\"],\"gold\":0,\"continuation\":\"d\"}",
         "set either \"choices\" or \"continuation\""},
        {A("\"continuation\":\"d\""), "other lines of task a have \"choices\""},
        {"{\"task\":\"z\",\"context\":\"c\",\"continuation\":3}",
         "\"continuation\" is missing or not a string"},
        {"{\"task\":\"z\",\"context\":\"c\",\"continuation\":\"\"}", "choice 0 is empty"},
        {A("\"choices\":[],\"gold\":0"), "must be a list of 1 to 1000 strings"},
        {A("\"choices\":\"x\",\"gold\":0"), "must be a list of 1 to 1000 strings"},
        {A("\"choices\":[\"x\"]"), "\"gold\" must be the index"},
        {A("\"choices\":[\"x\"],\"gold\":1"), "0 to 0"},
        {A("\"choices\":[\"x\"],\"gold\":-1"), "0 to 0"},
        {A("\"choices\":[\"x\",\"y\"],\"gold\":0.5"), "0 to 1"},
        {A("\"choices\":[\"x\",\"y\"],\"gold\":\"1\""), "0 to 1"},
        {A("\"choices\":[\"x\",null],\"gold\":0"), "choice 1 is missing or not"},
        {A("\"choices\":[\"x\",\"\"],\"gold\":0"), "choice 1 is empty"},
        {A("\"choices\":[\"x\"],\"gold\":0,\"delimiter\":0"), "\"delimiter\" is"},
        {OWN("\"context\":\" \\t\",\"choices\":[\"x\"],\"gold\":0"), "the context is white space only"},
        {A("\"choices\":[\"01234567\"],\"gold\":0"), "choice 0 has 9 tokens, more than --seq-length 8"},
        {"{\"task\":\"a\",\"context\":\"\",\"choices\":[\"01234567\"],\"gold\":0}",
         "choice 0 has 9 tokens, more than --seq-length 8"},
        {"{\"task\":\"a\",\"context\":\"c\\u0000d\",\"choices\":[\"x\"],\"gold\":0}", "it contains U+0000"},
        {"{\"task\":\"a\",\"context\":\"\\ud800\",\"choices\":[\"x\"],\"gold\":0}",
         "it is not a JSON object"},
        {"{\"task\":\"a\",\"context\":\"\xC3\",\"choices\":[\"x\"],\"gold\":0}",
         "\"context\" is not valid UTF-8"},
        {A("\"choices\":[\"\xFF\"],\"gold\":0"), "choice 0 is not valid UTF-8"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[512];
        snprintf(text, sizeof text, GOOD "%s\n", cases[i].line);
        refused(*state, text, strlen(text), cases[i].what);
    }
    refused(*state, GOOD "{\0}", strlen(GOOD) + 3, "line 2: it contains U+0000");
}

static void invalid_files(void **state) {
    const Fixture *f = *state;
    TaskSet set = {0};
    TaskEncoding encoding = {.tokenizer = f->bytes, .seq_length = SEQ};
    Error err = {0};
    refused(f, "", 0, "has no samples");
    refused(f, "\n\n  \n", 5, "has no samples");
    assert_false(task_set_read(&set, "/nowhere/tasks.jsonl", encoding, &err));
    assert_int_equal(err.code, EXIT_DATA);
    assert_false(task_set_read(&set, f->folder, encoding, &err));
    assert_int_equal(err.code, EXIT_DATA);
}

static void limits(void **state) {
    const Fixture *f = *state;
    size_t room = 100 * (MAX_TASKS + 1), used = 0;
    char *text = malloc(room);
    for (int i = 0; i <= MAX_TASKS; i++) {
        used += (size_t)snprintf(text + used, room - used,
                                 "{\"task\":\"%d\",\"context\":\"c\",\"continuation\":\"d\"}\n", i);
    }
    refused(f, text, used, "line 1001: there are more than 1000 tasks");
    used = (size_t)snprintf(text, room, "{\"task\":\"a\",\"context\":\"c\",\"gold\":0,\"choices\":[\"x\"");
    for (int i = 0; i < MAX_CHOICES; i++) used += (size_t)snprintf(text + used, room - used, ",\"x\"");
    used += (size_t)snprintf(text + used, room - used, "]}");
    refused(f, text, used, "must be a list of 1 to 1000 strings");
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forms),
        cmocka_unit_test(trailing_white_space_moves_to_continuation),
        cmocka_unit_test(length_is_in_characters),
        cmocka_unit_test(long_contexts_are_truncated_left),
        cmocka_unit_test(empty_context),
        cmocka_unit_test(several_files),
        cmocka_unit_test(ids),
        cmocka_unit_test(context_is_tokenized_alone),
        cmocka_unit_test(prefix),
        cmocka_unit_test(last_token),
        cmocka_unit_test(last_word),
        cmocka_unit_test(text_of_other_forms),
        cmocka_unit_test(windows_overlap),
        cmocka_unit_test(windows_without_overlap),
        cmocka_unit_test(each_token_is_scored_once),
        cmocka_unit_test(words_of_texts),
        cmocka_unit_test(prefix_of_texts),
        cmocka_unit_test(invalid_texts),
        cmocka_unit_test(wikitext),
        cmocka_unit_test(invalid_lines),
        cmocka_unit_test(invalid_files),
        cmocka_unit_test(limits),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
