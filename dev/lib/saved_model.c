// Opens a checkpoint for inference: see saved_model.h.
#include "dev/lib/saved_model.h"

#include <stdlib.h>
#include <string.h>

#include "dev/lib/saved_config.h"
#include "llmc/base/durable.h"

// Returns the path of a file in the checkpoint folder, or NULL if it does not exist. c->words owns
// the string.
static const char *file_beside(Config *c, const char *folder, const char *name) {
    char *path = text_format("%s/%s", folder, name);
    if (!durable_exists(path)) {
        free(path);
        return NULL;
    }
    c->words = (char **)xrealloc(c->words, ((size_t)c->words_count + 1) * sizeof *c->words, "options");
    return c->words[c->words_count++] = path;
}

// Uses tokenizer files in the checkpoint folder, unless flags name other files.
static void prefer_own_files(Config *c, const SavedModelChoice *choice) {
    if (choice->flags->count) return;
    if (c->tokenizer_type == TOKENIZER_HUGGING_FACE) {
        const char *model = file_beside(c, choice->load, "tokenizer.json");
        if (model) c->tokenizer_model = model;
    }
    if (c->tokenizer_type != TOKENIZER_GPT2_BPE) return;
    const char *vocab = file_beside(c, choice->load, "vocab.json");
    const char *merges = file_beside(c, choice->load, "merges.txt");
    if (!vocab || !merges) return;
    c->vocab_file = vocab;
    c->merge_file = merges;
}

static bool open_tokenizer(SavedModel *model, Error *err) {
    const Config *c = &model->config;
    TokenizerChoice choice = config_tokenizer(c);
    Error why;
    model->tokenizer = tokenizer_open(&choice, &why);
    if (!model->tokenizer) {
        return data_error(err, "cannot open the model's tokenizer: %.*s; pass %s",
                          (int)strcspn(why.what, ";"), why.what,
                          c->tokenizer_type == TOKENIZER_HUGGING_FACE ? "--tokenizer-model"
                                                                      : "--vocab-file and --merge-file");
    }
    int size = tokenizer_vocab_size(model->tokenizer), eod = tokenizer_eod(model->tokenizer);
    if (size == c->vocab_size_unpadded && eod == c->eod) return true;
    return data_error(err,
                      "the tokenizer has %d ids and end-of-document id %d, but the checkpoint has %d and %d; "
                      "pass the tokenizer files used in training",
                      size, eod, c->vocab_size_unpadded, c->eod);
}

bool saved_model_open(SavedModel *model, const SavedModelChoice *choice, Error *err) {
    memset(model, 0, sizeof *model);
    model->iteration = choice->iteration;
    model->checkpoint = checkpoint_open(choice->load, &model->iteration, choice->peers, model->note,
                                        sizeof model->note, err);
    bool ok = model->checkpoint != NULL;
    if (ok) {
        const char *arguments = checkpoint_arguments(model->checkpoint);
        ok = config_of_checkpoint(&model->config, arguments, choice->flags, err);
    }
    if (ok) prefer_own_files(&model->config, choice);
    if (ok) {  // inference only
        model->config.attention_dropout = model->config.hidden_dropout = 0;
        model->config.recompute_granularity = RECOMPUTE_FULL;
    }
    if (ok && open_tokenizer(model, err)) return true;
    saved_model_close(model);
    return false;
}

void saved_model_close(SavedModel *model) {
    checkpoint_close(model->checkpoint);
    if (model->tokenizer) tokenizer_close(model->tokenizer);
    config_free(&model->config);
    memset(model, 0, sizeof *model);
}
