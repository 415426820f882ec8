// Writes a file in the format of golden.h: results that a script of dev/ref/ compares with PyTorch.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { GOLDEN_TEXT = 8192 };

typedef struct GoldenWriter {
    FILE *file;
    char text[GOLDEN_TEXT + 1];  // written last
    int length;                  // of the text so far
    int64_t offset;              // of the next tensor, from the end of the text
} GoldenWriter;

static inline bool golden_create(GoldenWriter *w, const char *path) {
    *w = (GoldenWriter){.file = fopen(path, "wb")};
    w->length = snprintf(w->text, sizeof w->text, "golden 1 %08d\n", (int)GOLDEN_TEXT);
    return w->file && fseek(w->file, GOLDEN_TEXT, SEEK_SET) == 0;
}

// Adds a tensor of `count` elements of `size` bytes. type: as in golden.h, or "u8".
static inline bool golden_add(GoldenWriter *w, const char *name, const char *type, int64_t count,
                              const void *elements, size_t size) {
    static const char zeros[64];
    size_t bytes = (size_t)count * size, padding = (64 - bytes % 64) % 64;
    w->length += snprintf(w->text + w->length, sizeof w->text - (size_t)w->length, "%s %s %lld %lld\n", name,
                          type, (long long)count, (long long)w->offset);
    w->offset += (int64_t)(bytes + padding);
    return w->length < GOLDEN_TEXT && fwrite(elements, 1, bytes, w->file) == bytes &&
           fwrite(zeros, 1, padding, w->file) == padding;
}

// Writes the text and closes the file.
static inline bool golden_finish(GoldenWriter *w) {
    if (!w->file) return false;
    bool ok = w->length < GOLDEN_TEXT;
    if (ok) {
        memset(w->text + w->length, '\n', (size_t)(GOLDEN_TEXT - w->length));
        ok = fseek(w->file, 0, SEEK_SET) == 0 && fwrite(w->text, 1, GOLDEN_TEXT, w->file) == GOLDEN_TEXT;
    }
    return fclose(w->file) == 0 && ok;
}
