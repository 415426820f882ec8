// Applies normalizers of tokenizer.json. See normalize.h.
#include "llmc/data/normalize.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

char *text_buffer_reserve(TextBuffer *buffer, size_t bytes, const char *purpose) {
    if (buffer->bytes < bytes) {
        free(buffer->text);
        buffer->bytes = bytes;
        buffer->text = xmalloc(bytes, purpose);
    }
    return buffer->text;
}

void normalizer_free(Normalizer *normalizer) {
    for (int i = 0; i < normalizer->count; i++) {
        nfc_free(normalizer->step[i].nfc);
        free(normalizer->step[i].from);
        free(normalizer->step[i].to);
    }
    *normalizer = (Normalizer){0};
}

bool normalizer_bounded(const Normalizer *normalizer) {
    double growth = 1;
    for (int i = 0; i < normalizer->count; i++) {
        const NormalizerStep *step = &normalizer->step[i];
        if (step->nfc) growth *= NFC_MOST_GROWTH;
        if (step->from && strlen(step->to) > strlen(step->from))
            growth *= (double)strlen(step->to) / (double)strlen(step->from);
    }
    return growth <= NORMALIZER_MOST_GROWTH;
}

size_t replace_text(const char *text, size_t bytes, const char *from, const char *to, char *out) {
    const size_t from_bytes = strlen(from), to_bytes = strlen(to);
    const char *end = text + bytes;
    size_t used = 0;
    assert(from_bytes);
    for (const char *found; text < end; text = found + from_bytes) {
        found = memmem(text, (size_t)(end - text), from, from_bytes);
        size_t kept = (size_t)((found ? found : end) - text);
        if (out) memcpy(out + used, text, kept);
        used += kept;
        if (!found) break;
        if (out) memcpy(out + used, to, to_bytes);
        used += to_bytes;
    }
    return used;
}

static const char *apply_nfc(const Nfc *nfc, const char *text, size_t *bytes, TextBuffer *buffer) {
    size_t normal = nfc_normal_prefix(nfc, text, *bytes);
    if (normal == *bytes) return text;
    char *copy = text_buffer_reserve(buffer, NFC_MOST_GROWTH * *bytes, "normalizing text");
    memcpy(copy, text, normal);
    *bytes = normal + nfc_normalize(nfc, text + normal, *bytes - normal, copy + normal);
    return copy;
}

static const char *prepend(const char *prefix, const char *text, size_t *bytes, TextBuffer *buffer) {
    size_t length = strlen(prefix);
    if (!*bytes) return text;
    char *copy = text_buffer_reserve(buffer, length + *bytes, "normalizing text");
    memcpy(copy, prefix, length);
    memcpy(copy + length, text, *bytes);
    *bytes += length;
    return copy;
}

static const char *replace(const NormalizerStep *step, const char *text, size_t *bytes, TextBuffer *buffer) {
    if (!memmem(text, *bytes, step->from, strlen(step->from))) return text;
    size_t length = replace_text(text, *bytes, step->from, step->to, NULL);
    char *copy = text_buffer_reserve(buffer, length + 1, "normalizing text");
    *bytes = replace_text(text, *bytes, step->from, step->to, copy);
    return copy;
}

const char *normalizer_apply(const Normalizer *normalizer, const char *text, size_t *bytes,
                             TextBuffer buffers[2]) {
    for (int i = 0; i < normalizer->count; i++) {
        const NormalizerStep *step = &normalizer->step[i];
        TextBuffer *free_one = &buffers[text == buffers[0].text];
        text = step->nfc    ? apply_nfc(step->nfc, text, bytes, free_one)
               : step->from ? replace(step, text, bytes, free_one)
                            : prepend(step->to, text, bytes, free_one);
    }
    return text;
}
