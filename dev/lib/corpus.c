// Reads a corpus in blocks: see corpus.h.
#include "dev/lib/corpus.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/data/tokenizer.h"

enum { BLOCK_BYTES = 1 << 20, BLOCK_FILES = 4096 };

struct Corpus {
    const char **paths;
    int path_count, path_capacity;
    char *list_text;  // contents of list_file, which the paths point into
    bool plain_text;
    int64_t bytes;  // -1: unknown
    int next_path;
    int fd;         // JSON lines: current file, or -1
    bool at_start;  // no block of the current file has been returned yet
    char *rest;     // JSON lines: incomplete line at the end of the latest block
    size_t rest_bytes, rest_capacity;
};

// ---- opening ----

static void add_path(Corpus *corpus, const char *path) {
    if (corpus->path_count == corpus->path_capacity) {
        corpus->path_capacity = corpus->path_capacity ? 2 * corpus->path_capacity : 64;
        corpus->paths = xrealloc(corpus->paths, (size_t)corpus->path_capacity * sizeof *corpus->paths,
                                 "the list of inputs");
    }
    corpus->paths[corpus->path_count++] = path;
}

static bool is_standard_input(const char *path) { return !strcmp(path, "-"); }

static bool read_failed(const char *path, Error *err) {
    return data_error(err, "cannot read %s: %s; check the path", path, strerror(errno));
}

// Reads list_file, one path per line; skips empty lines. Lines may end in CR LF, as on Windows.
static bool read_list(Corpus *corpus, const char *list_file, Error *err) {
    FILE *file = fopen(list_file, "rb");
    if (!file) return read_failed(list_file, err);
    size_t used = 0, capacity = 1 << 16, got;
    char *text = xmalloc(capacity + 1, "the list of inputs");
    while ((got = fread(text + used, 1, capacity - used, file)) > 0) {
        used += got;
        if (used == capacity) text = xrealloc(text, (capacity *= 2) + 1, "the list of inputs");
    }
    bool failed = ferror(file);
    fclose(file);
    text[used] = 0;
    corpus->list_text = text;
    if (failed) return read_failed(list_file, err);
    if (!strncmp(text, "\xEF\xBB\xBF", 3)) text += 3;  // byte-order mark
    for (char *rest = text, *path; (path = strsep(&rest, "\n"));) {
        size_t length = strlen(path);
        if (length && path[length - 1] == '\r') path[length - 1] = 0;
        if (*path) add_path(corpus, path);
    }
    return true;
}

static bool look_up(Corpus *corpus, const char *path, Error *err) {
    if (is_standard_input(path)) {
        if (corpus->plain_text) {
            return usage_error(
                err, "--text reads one document per file and cannot read standard input; list the files");
        }
        corpus->bytes = -1;
        return true;
    }
    struct stat status;
    if (stat(path, &status)) return read_failed(path, err);
    if (S_ISDIR(status.st_mode)) {
        return data_error(err, "%s is a directory; list the files in it", path);
    }
    if (!S_ISREG(status.st_mode)) corpus->bytes = -1;
    else if (corpus->bytes >= 0) corpus->bytes += status.st_size;
    return true;
}

Corpus *corpus_open(const char *const *paths, int count, const char *list_file, bool plain_text, Error *err) {
    Corpus *corpus = xcalloc(1, sizeof *corpus, "the corpus");
    corpus->plain_text = plain_text;
    corpus->fd = -1;
    for (int i = 0; i < count; i++) add_path(corpus, paths[i]);
    bool good = !list_file || read_list(corpus, list_file, err);
    if (good && !corpus->path_count) {
        good = data_error(err, "no input: %s lists no files", list_file ? list_file : "--input");
    }
    for (int i = 0; good && i < corpus->path_count; i++) good = look_up(corpus, corpus->paths[i], err);
    if (good) return corpus;
    corpus_close(corpus);
    return NULL;
}

void corpus_close(Corpus *corpus) {
    if (!corpus) return;
    if (corpus->fd > 0) close(corpus->fd);
    free(corpus->paths);
    free(corpus->list_text);
    free(corpus->rest);
    free(corpus);
}

int64_t corpus_bytes(const Corpus *corpus) { return corpus->bytes; }

void corpus_block_free(CorpusBlock *block) {
    free(block->text);
    free(block->files);
    *block = (CorpusBlock){0};
}

// ---- reading ----

static void reserve(CorpusBlock *block, size_t capacity) {
    if (block->capacity >= capacity) return;
    block->capacity = capacity;
    block->text = xrealloc(block->text, capacity, "a block of the corpus");
}

static int open_input(const char *path, Error *err) {
    int fd = is_standard_input(path) ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) read_failed(path, err);
    return fd;
}

// Fills the block up to `capacity` bytes; sets *ended at the end of the input.
static bool read_up_to(int fd, CorpusBlock *block, size_t capacity, bool *ended, const char *path,
                       Error *err) {
    reserve(block, capacity);
    *ended = false;
    while (block->bytes < capacity) {
        ssize_t got = read(fd, block->text + block->bytes, capacity - block->bytes);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return read_failed(path, err);
        if (got == 0) {
            *ended = true;
            break;
        }
        block->bytes += (size_t)got;
    }
    return true;
}

// Refuses compressed and binary formats, which would otherwise be reported as invalid JSON or be
// tokenized as plain text.
static bool refuse_foreign(const char *text, size_t bytes, const char *path, Error *err) {
    static const struct {
        const char *magic;
        size_t length;
        const char *name;
        const char *tool;  // program that unpacks the format; NULL: pandas' read_feather
    } kinds[] = {{"\x1f\x8b", 2, "compressed with gzip", "zcat"},
                 {"\x28\xb5\x2f\xfd", 4, "compressed with zstd", "zstdcat"},
                 {"\xfd"
                  "7zXZ",
                  5, "compressed with xz", "xzcat"},
                 {"BZh", 3, "compressed with bzip2", "bzcat"},
                 {"PAR1", 4, "a parquet file", "dev/data/parquet_to_jsonl"},
                 {"ARROW1", 6, "an arrow file", NULL}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (bytes < kinds[i].length + 1 || memcmp(text, kinds[i].magic, kinds[i].length)) continue;
        if (kinds[i].tool) {
            return data_error(err, "%s is %s; use a pipe: %s %s | preprocess_data --input - ...", path,
                              kinds[i].name, kinds[i].tool, path);
        }
        return data_error(err,
                          "%s is %s; write its rows as JSON lines first, for instance with pandas: "
                          "read_feather(FILE).to_json(OUT, orient='records', lines=True)",
                          path, kinds[i].name);
    }
    return true;
}

// ---- JSON lines ----

static void keep_rest(Corpus *corpus, const char *text, size_t bytes) {
    if (corpus->rest_capacity < bytes) {
        corpus->rest_capacity = bytes;
        corpus->rest = xrealloc(corpus->rest, bytes, "a block of the corpus");
    }
    memcpy(corpus->rest, text, bytes);
    corpus->rest_bytes = bytes;
}

// Fills a block: starts with the rest of the previous block and reads until there is at least one
// complete line, or until the input ends.
static bool read_lines(Corpus *corpus, CorpusBlock *block, bool *ended, Error *err) {
    reserve(block, corpus->rest_bytes);
    if (corpus->rest_bytes) memcpy(block->text, corpus->rest, corpus->rest_bytes);
    block->bytes = corpus->rest_bytes;
    corpus->rest_bytes = 0;
    size_t searched = block->bytes;  // the rest contains no newline
    for (size_t capacity = BLOCK_BYTES;; capacity *= 2) {
        if (capacity <= block->bytes) continue;
        if (!read_up_to(corpus->fd, block, capacity, ended, block->path, err)) return false;
        if (*ended) return true;
        const char *newline = memrchr(block->text + searched, '\n', block->bytes - searched);
        if (newline) {
            size_t whole = (size_t)(newline + 1 - block->text);
            keep_rest(corpus, block->text + whole, block->bytes - whole);
            block->bytes = whole;
            return true;
        }
        searched = block->bytes;
        if (block->bytes >= ENCODER_MAX_BYTES) {
            return data_error(err, "%s has a line longer than %d MiB; split that document", block->path,
                              ENCODER_MAX_BYTES >> 20);
        }
    }
}

static bool next_lines(Corpus *corpus, CorpusBlock *block, Error *err) {
    for (;;) {
        if (corpus->fd < 0) {
            if (corpus->next_path == corpus->path_count) return false;
            corpus->fd = open_input(corpus->paths[corpus->next_path++], err);
            if (corpus->fd < 0) return false;
            corpus->at_start = true;
        }
        bool ended;
        block->path = corpus->paths[corpus->next_path - 1];
        block->first_of_path = corpus->at_start;
        if (!read_lines(corpus, block, &ended, err)) return false;
        if (corpus->at_start && !refuse_foreign(block->text, block->bytes, block->path, err)) return false;
        corpus->at_start = false;
        if (ended) {
            close(corpus->fd);
            corpus->fd = -1;
        }
        if (block->bytes) return true;
    }
}

// ---- plain text ----

static CorpusFile *add_file(CorpusBlock *block, const char *path) {
    if (block->file_count == block->file_capacity) {
        block->file_capacity = block->file_capacity ? 2 * block->file_capacity : 64;
        block->files = xrealloc(block->files, (size_t)block->file_capacity * sizeof *block->files,
                                "a block of the corpus");
    }
    CorpusFile *file = &block->files[block->file_count++];
    *file = (CorpusFile){path, block->bytes, 0};
    return file;
}

// Appends a whole file to the block.
static bool read_file(CorpusBlock *block, const char *path, Error *err) {
    int fd = open_input(path, err);
    if (fd < 0) return false;
    CorpusFile *file = add_file(block, path);
    bool ended = false, good = true;
    struct stat status;
    // Reading one byte more than the file size detects the end of the file without growing the
    // block.
    size_t expected = fstat(fd, &status) == 0 && status.st_size > 0 ? (size_t)status.st_size : 0;
    for (size_t more = expected + 1; good && !ended; more *= 2) {
        if (block->bytes - file->offset > ENCODER_MAX_BYTES) {
            good = data_error(err, "%s is larger than %d MiB, the limit for one document; split it", path,
                              ENCODER_MAX_BYTES >> 20);
        } else {
            size_t limit = file->offset + ENCODER_MAX_BYTES + 1,
                   want = block->bytes + (more < 4096 ? 4096 : more);
            good = read_up_to(fd, block, want < limit ? want : limit, &ended, path, err);
        }
    }
    close(fd);
    file->bytes = block->bytes - file->offset;
    return good && refuse_foreign(block->text + file->offset, file->bytes, path, err);
}

static bool next_files(Corpus *corpus, CorpusBlock *block, Error *err) {
    block->bytes = 0;
    block->file_count = 0;
    while (corpus->next_path < corpus->path_count && block->bytes < BLOCK_BYTES &&
           block->file_count < BLOCK_FILES) {
        if (!read_file(block, corpus->paths[corpus->next_path++], err)) return false;
    }
    return block->file_count > 0;
}

bool corpus_next(Corpus *corpus, CorpusBlock *block, Error *err) {
    err->code = 0;
    return corpus->plain_text ? next_files(corpus, block, err) : next_lines(corpus, block, err);
}
