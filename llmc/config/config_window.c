// Sliding-window attention: --window-size and --window-attn-skip-freq, with the meaning that they
// have in Megatron-LM. See config.h.
#include "llmc/config/config.h"

#include <stdlib.h>
#include <string.h>

// Moves *text past spaces and the brackets of tuples and lists.
static void skip_brackets(const char **text) { *text += strspn(*text, " ()[]"); }

// Reads an integer and the comma after it, if there is one. Returns false if there is no integer.
static bool next_integer(const char **text, long *value) {
    char *end;
    skip_brackets(text);
    *value = strtol(*text, &end, 10);
    if (end == *text || *value < -1 || *value > INT32_MAX - 1) return false;
    *text = end;
    skip_brackets(text);
    if (**text == ',') ++*text;
    else return !**text;
    return true;
}

// Reads "L,R". Returns the number of keys that a query sees, 0: all, or -1 if the text is invalid.
static long window_of(const char *text) {
    long left, right;
    bool good = next_integer(&text, &left) && *text && next_integer(&text, &right) && !*text && right == 0;
    return good ? left + 1 : -1;
}

// Reads the entries of layers 0 .. `layer`. Returns the last one, or -1 if one of them is missing
// or neither 0 nor 1. *rest: the text after it.
static long entry_of(const char *list, int layer, const char **rest) {
    long value = -1;
    for (int i = 0; i <= layer; i++) {
        if (!*list || !next_integer(&list, &value) || value < 0 || value > 1) return -1;
    }
    skip_brackets(&list);
    *rest = list;
    return value;
}

static bool is_list(const char *text) { return strpbrk(text, ",[]()") != NULL; }

int config_window(const Config *c, int layer) {
    const char *skip = c->window_attn_skip_freq, *rest;
    if (!c->window_size) return 0;
    long window = window_of(c->window_size);
    bool full = skip && (is_list(skip) ? !entry_of(skip, layer, &rest) : (layer + 1) % atol(skip) == 0);
    return full ? 0 : (int)window;
}

bool config_check_window(const Config *c, Error *err) {
    const char *skip = c->window_attn_skip_freq;
    long every;
    if (c->window_size && window_of(c->window_size) < 0)
        return usage_error(
            err,
            "--window-size '%.80s' is invalid; use L,0 with L >= 0 earlier keys, or -1,0 for all (the "
            "second number is 0, because attention is causal)",
            c->window_size);
    if (!skip || !c->window_size) return true;
    const char *rest = skip;
    if (is_list(skip))
        return (entry_of(skip, c->num_layers - 1, &rest) >= 0 && !*rest) ||
               usage_error(err,
                           "--window-attn-skip-freq '%.80s' is not a list of --num-layers %d values 0 or 1; "
                           "correct it",
                           skip, c->num_layers);
    return (next_integer(&rest, &every) && every >= 1) ||
           usage_error(err, "--window-attn-skip-freq '%.80s' is not a positive integer or a list of 0 and 1",
                       skip);
}
