// merge_datasets: concatenates token shards, like Megatron-LM's tools/merge_datasets.py. Used after
// preprocessing a corpus in parts, for example on several machines.
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "dev/lib/prefix_lock.h"
#include "dev/lib/shard_writer.h"
#include "dev/lib/tool.h"

typedef struct Settings {
    Words input;
    const char *output_prefix;
    bool help;
} Settings;

#define FIELD(name) offsetof(Settings, name)
static const Option table[] = {
    {.help = "flags"},
    {"input", .kind = OPTION_WORDS, .offset = FIELD(input), .value = "PREFIX...|FOLDER",
     .help = "Shards without .bin/.idx, merged in this order; a directory adds all its shards, sorted by "
             "name."},
    {"output-prefix", .kind = OPTION_TEXT, .low = 1, .offset = FIELD(output_prefix), .value = "PATH",
     .help = "The merged shard, without .bin/.idx. Its directory is created."},
    {"help", .kind = OPTION_FLAG, .offset = FIELD(help), .help = "Print this and exit."},
};
enum { TABLE_ROWS = sizeof table / sizeof *table };

// ---- the list of shards ----

typedef struct Prefixes {
    char **items;
    int count, capacity;
} Prefixes;

static void add_prefix(Prefixes *list, const char *folder, const char *name, size_t length) {
    if (list->count == list->capacity) {
        list->capacity = list->capacity ? 2 * list->capacity : 64;
        list->items = xrealloc(list->items, (size_t)list->capacity * sizeof *list->items,
                               "the list of shards");
    }
    list->items[list->count++] = text_format("%s%s%.*s", folder, *folder ? "/" : "", (int)length, name);
}

static void free_prefixes(Prefixes *list) {
    for (int i = 0; i < list->count; i++) free(list->items[i]);
    free(list->items);
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

// Adds the shard of every .idx file in the directory.
static bool add_folder(Prefixes *list, const char *folder, Error *err) {
    DIR *dir = opendir(folder);
    if (!dir) {
        return data_error(err, "cannot open directory %s: %s; check the path", folder, strerror(errno));
    }
    int before = list->count;
    for (struct dirent *entry; (entry = readdir(dir));) {
        size_t length = strlen(entry->d_name);
        if (length > 4 && !strcmp(entry->d_name + length - 4, ".idx")) {
            add_prefix(list, folder, entry->d_name, length - 4);
        }
    }
    closedir(dir);
    if (list->count == before) {
        return data_error(err, "directory %s has no .idx file; pass the directory of the shards", folder);
    }
    qsort(list->items + before, (size_t)(list->count - before), sizeof *list->items, by_name);
    return true;
}

static bool list_shards(const Words *input, Prefixes *list, Error *err) {
    for (int i = 0; i < input->count; i++) {
        struct stat status;
        const char *word = input->items[i];
        bool folder = stat(word, &status) == 0 && S_ISDIR(status.st_mode);
        if (!folder) add_prefix(list, "", word, strlen(word));
        else if (!add_folder(list, word, err)) return false;
    }
    return true;
}

// ---- merging ----

static bool stat_index(const char *prefix, struct stat *status) {
    char *path = text_format("%s.idx", prefix);
    bool exists = stat(path, status) == 0;
    free(path);
    return exists;
}

// Refuses an output that is also an input: it would overwrite the input, or a second run on the
// same directory would include the result of the first one.
static bool refuse_output_among_inputs(const Prefixes *list, const char *output, Error *err) {
    struct stat out, in;
    if (!stat_index(output, &out)) return true;
    for (int i = 0; i < list->count; i++) {
        if (stat_index(list->items[i], &in) && in.st_dev == out.st_dev && in.st_ino == out.st_ino) {
            return usage_error(err,
                               "--output-prefix %s is one of the inputs; choose another name or directory",
                               output);
        }
    }
    return true;
}

static bool append_shard(ShardWriter **writer, const char *prefix, const char *output, Error *err) {
    Shard shard;
    if (!shard_open(&shard, prefix, err)) return false;
    if (!*writer) *writer = shard_writer_open(output, shard.dtype, err);
    bool good = *writer && shard_writer_append(*writer, &shard, err);
    if (good) {
        fprintf(stderr, "Added %s: %" PRId64 " documents, %" PRId64 " sequences, %" PRId64 " tokens.\n",
                prefix, shard.documents, shard.sequences, shard.tokens);
    }
    shard_close(&shard);
    return good;
}

static bool merge(const Prefixes *list, const char *output, Error *err) {
    ShardWriter *writer = NULL;
    for (int i = 0; i < list->count; i++) {
        if (append_shard(&writer, list->items[i], output, err)) continue;
        shard_writer_discard(writer);
        return false;
    }
    if (!shard_writer_close(writer, err)) return false;
    fprintf(stderr, "Wrote %s.bin and .idx from %d shards.\n", output, list->count);
    return true;
}

static bool run(const void *flags, int *argc, char ***argv, Error *err) {
    const Settings *settings = (const Settings *)flags;
    if (!settings->input.count) {
        return usage_error(err, "--input is missing; --help lists the flags");
    }
    if (!settings->output_prefix) {
        return usage_error(err, "--output-prefix is missing; --help lists the flags");
    }
    const char *output = settings->output_prefix;
    if (output[strlen(output) - 1] == '/') {
        return usage_error(err, "--output-prefix %s ends in '/'; append the start of the file names", output);
    }
    Prefixes list = {0};
    int lock = -1;
    bool good = list_shards(&settings->input, &list, err) && refuse_output_among_inputs(&list, output, err) &&
                prefix_lock(output, &lock, err) && merge(&list, output, err);
    prefix_unlock(output, lock);
    free_prefixes(&list);
    return good;
}

int main(int argc, char **argv) {
    Settings settings = {0};
    const Tool tool = {table,
                       TABLE_ROWS,
                       "Usage: merge_datasets --input PREFIX... --output-prefix PATH\n"
                       "Concatenates Megatron token shards of the same dtype.\n",
                       &settings,
                       run,
                       NULL};
    return tool_main(&tool, argc, argv);
}
