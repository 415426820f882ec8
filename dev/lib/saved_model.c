// Opens a checkpoint for inference: see saved_model.h.
#include "dev/lib/saved_model.h"

#include <stdlib.h>
#include <string.h>

#include "dev/lib/saved_config.h"

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
    return config_check_tokenizer(c, tokenizer_vocab_size(model->tokenizer), tokenizer_eod(model->tokenizer),
                                  err);
}

bool saved_model_open(SavedModel *model, const SavedModelChoice *choice, Error *err) {
    memset(model, 0, sizeof *model);
    model->iteration = choice->iteration;
    model->checkpoint = checkpoint_open(choice->load, &model->iteration, "--ckpt-step", choice->peers,
                                        model->note, sizeof model->note, err);
    bool ok = model->checkpoint != NULL;
    if (ok) {
        const char *arguments = checkpoint_arguments(model->checkpoint);
        ok = config_of_checkpoint(&model->config, arguments, choice->flags, err);
    }
    // Files in the checkpoint folder, unless flags name other files.
    if (ok && !choice->flags->count) config_use_tokenizer_in(&model->config, choice->load);
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
