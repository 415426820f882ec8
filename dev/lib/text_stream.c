// Streaming text output: see text_stream.h.
#include "dev/lib/text_stream.h"

#include <stdlib.h>
#include <string.h>

#include "llmc/base/utf8.h"

// Returns the number of bytes at the end of the text that form an incomplete UTF-8 character.
static size_t unfinished(const char *text, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        uint32_t code_point;
        unsigned char lead = (unsigned char)text[at];
        size_t taken = utf8_next(text + at, bytes - at, &code_point);
        bool incomplete = lead >= 0xC2 && lead <= 0xF4 && taken <= TEXT_HELD_BYTES;
        if (code_point == UTF8_INVALID && at + taken == bytes && incomplete) return taken;
        at += taken;
    }
    return 0;
}

static bool write_text(FILE *out, const char *text, size_t bytes) {
    int64_t replaced = 0;
    char *repaired = (char *)xmalloc(3 * bytes + 1, "text");
    size_t length = utf8_repair(text, bytes, repaired, &replaced);
    for (size_t i = 0; i < length; i++) {
        if (!repaired[i]) repaired[i] = ' ';
    }
    bool ok = fwrite(repaired, 1, length, out) == length && fflush(out) == 0;
    free(repaired);
    return ok;
}

bool text_stream_put(TextStream *stream, int token) {
    size_t bytes, before = stream->held_bytes;
    const char *piece = tokenizer_decode(stream->tokenizer, token, &bytes);
    for (; stream->strip > 0 && bytes && *piece == ' '; stream->strip--, bytes--) piece++;
    if (bytes) stream->strip = 0;
    char *text = (char *)xmalloc(before + bytes + 1, "text");
    memcpy(text, stream->held, before);
    memcpy(text + before, piece, bytes);
    bytes += before;
    stream->held_bytes = unfinished(text, bytes);
    bytes -= stream->held_bytes;
    memcpy(stream->held, text + bytes, stream->held_bytes);
    bool ok = write_text(stream->out, text, bytes);
    free(text);
    return ok;
}

bool text_stream_end(TextStream *stream) {
    size_t bytes = stream->held_bytes;
    stream->held_bytes = 0;
    return write_text(stream->out, stream->held, bytes);
}
