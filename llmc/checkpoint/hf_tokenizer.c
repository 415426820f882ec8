// GPT-2's tokenizer files: see hf_tokenizer.h.
#include "llmc/checkpoint/hf_tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/durable.h"
#include "llmc/base/json.h"
#include "llmc/base/utf8.h"
#include "llmc/data/tokenizer.h"

// As llmc/data/vocabulary.c: larger files are no vocabulary.
enum { MOST_BYTES = 1 << 28, BYTES = 256 };
#define VERSION_LINE "#version: 0.2\n"

bool hf_tokenizer_read(HfTokenizer *t, const char *vocab_file, const char *merge_file, Error *err) {
    *t = (HfTokenizer){0};
    TokenizerChoice choice = {.type = TOKENIZER_GPT2_BPE, .vocab_file = vocab_file, .merge_file = merge_file};
    Tokenizer *tokenizer = tokenizer_open(&choice, err);
    if (!tokenizer) return false;
    t->size = tokenizer_vocab_size(tokenizer);
    t->eod = tokenizer_eod(tokenizer);
    tokenizer_close(tokenizer);
    t->vocab = durable_read_file(vocab_file, MOST_BYTES, &t->vocab_bytes, err);
    if (t->vocab) t->merges = durable_read_file(merge_file, MOST_BYTES, &t->merges_bytes, err);
    if (t->merges) return true;
    hf_tokenizer_free(t);
    return false;
}

// GPT-2's printable character for a byte. *shifted: the next one for bytes that are not printable.
static uint32_t symbol_of(uint32_t byte, uint32_t *shifted) {
    bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    return printable ? byte : (*shifted)++;
}

void hf_tokenizer_of_bytes(HfTokenizer *t) {
    size_t bytes;
    uint32_t shifted = BYTES;
    *t = (HfTokenizer){.size = BYTES + 1, .eod = BYTES, .merges = xstrdup(VERSION_LINE)};
    t->merges_bytes = strlen(t->merges);
    FILE *out = open_memstream(&t->vocab, &bytes);
    if (!out) fatal(NULL, EXIT_ENVIRONMENT, "out of memory for a vocabulary; use a larger machine");
    fputc('{', out);
    for (uint32_t byte = 0; byte < BYTES; byte++) {
        char symbol[5];
        symbol[utf8_write(symbol_of(byte, &shifted), symbol)] = 0;
        json_write_string(out, symbol);
        fprintf(out, ": %u, ", byte);
    }
    fprintf(out, "\"<|endoftext|>\": %d}\n", BYTES);
    if (fclose(out) != 0)
        fatal(NULL, EXIT_ENVIRONMENT, "out of memory for a vocabulary; use a larger machine");
    t->vocab_bytes = bytes;
}

bool hf_tokenizer_write(const HfTokenizer *t, const char *folder, Error *err) {
    if (!t->vocab) return true;
    char *vocab = text_format("%s/" HF_VOCAB, folder), *merges = text_format("%s/" HF_MERGES, folder);
    bool ok = durable_write_file(vocab, t->vocab, t->vocab_bytes, err) &&
              durable_write_file(merges, t->merges, t->merges_bytes, err);
    free(vocab);
    free(merges);
    return ok;
}

void hf_tokenizer_free(HfTokenizer *t) {
    free(t->vocab);
    free(t->merges);
    *t = (HfTokenizer){0};
}
