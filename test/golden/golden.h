// Reads a golden file: tensors that dev/ref/make_goldens.py computed with PyTorch, by name. The
// format and the names are explained there. Included by tests only; little-endian hosts.
#pragma once
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Golden {
    char *bytes;  // the whole file, then a NUL
    size_t size;  // size of the file in bytes
    size_t text;  // size of the text part in bytes; the data follows it
} Golden;

// Reads the whole file. Returns false if it is missing or invalid. golden_close frees the memory.
static inline bool golden_open(Golden *g, const char *path) {
    *g = (Golden){0};
    FILE *file = fopen(path, "rb");
    if (!file) return false;
    if (fseek(file, 0, SEEK_END) == 0) g->size = (size_t)ftell(file);
    rewind(file);
    g->bytes = calloc(g->size + 1, 1);
    bool ok = g->bytes && fread(g->bytes, 1, g->size, file) == g->size &&
              sscanf(g->bytes, "golden 1 %zu", &g->text) == 1 && g->text <= g->size;
    fclose(file);
    if (!ok) free(g->bytes);
    return ok;
}
static inline void golden_close(Golden *g) { free(g->bytes); }

// Returns the data of tensor `name`, which must be of this type ("f32", "bf16", "i32"), and stores
// the number of elements in *count (may be NULL). Returns NULL and stores 0 if there is none.
static inline const void *golden_tensor(const Golden *g, const char *name, const char *type, int64_t *count) {
    size_t length = strlen(name);
    if (count) *count = 0;
    for (const char *line = g->bytes; line && line < g->bytes + g->text;
         line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
        char found[8], shape[64];
        size_t offset;
        if (strncmp(line, name, length) != 0 || line[length] != ' ') continue;
        if (sscanf(line + length, " %7s %63s %zu", found, shape, &offset) != 3 || strcmp(found, type) != 0)
            return NULL;
        int64_t elements = 1;
        for (char *at = shape; at; at = strchr(at, ','), at = at ? at + 1 : NULL)
            elements *= strtoll(at, NULL, 10);
        if (g->text + offset + (size_t)elements * (strcmp(type, "bf16") == 0 ? 2 : 4) > g->size) return NULL;
        if (count) *count = elements;
        return g->bytes + g->text + offset;
    }
    return NULL;
}
static inline const float *golden_f32(const Golden *g, const char *name, int64_t *count) {
    return golden_tensor(g, name, "f32", count);
}
static inline const uint16_t *golden_bf16(const Golden *g, const char *name, int64_t *count) {
    return golden_tensor(g, name, "bf16", count);
}
static inline const int32_t *golden_i32(const Golden *g, const char *name, int64_t *count) {
    return golden_tensor(g, name, "i32", count);
}
