// Translates flags to loader options: see run.h.
#include "llmc/run/run.h"

#include <assert.h>
#include <string.h>

LoaderOptions loader_options(const Config *c, int dp_rank, int dp_size) {
    assert(c && dp_size > 0 && dp_rank >= 0 && dp_rank < dp_size);
    LoaderOptions o;
    memset(&o, 0, sizeof o);
    const Words *splits[SPLITS] = {&c->train_data_path, &c->valid_data_path, &c->test_data_path};
    o.data_path = (DataPath){c->data_path.items, c->data_path.count};
    for (int i = 0; i < SPLITS; i++) o.split_path[i] = (DataPath){splits[i]->items, splits[i]->count};
    o.split = c->split;
    o.mock_data = c->mock_data;
    o.samples[SPLIT_TRAIN] = c->skip_train ? 0 : c->total_samples;
    // Replica groups share one order of the samples.
    if (c->replica_group) o.samples[SPLIT_TRAIN] *= c->max_replica_groups;
    int64_t evaluations = c->eval_interval > 0 ? c->train_iters / c->eval_interval + 1 : 0;
    o.samples[SPLIT_VALID] = c->full_validation ? ONE_EPOCH
                                                : evaluations * c->eval_iters * c->global_batch_size;
    o.samples[SPLIT_TEST] = c->eval_iters * c->global_batch_size;
    o.surplus = c->mid_level_dataset_surplus;
    o.seq_length = c->seq_length;
    o.vocab_size = c->vocab_size_unpadded;
    o.eod = c->eod;
    o.known_ids = c->tokenizer_type == TOKENIZER_GPT2_BPE || c->tokenizer_type == TOKENIZER_HUGGING_FACE;
    o.eod_mask_loss = c->eod_mask_loss;
    o.reset_position_ids = c->reset_position_ids;
    o.reset_attention_mask = c->reset_attention_mask;
    o.sft = c->sft;
    o.seed = (uint32_t)c->seed;
    o.eval_seed = (uint32_t)c->eval_seed;
    o.micro_batch_size = c->micro_batch_size;
    o.dp_rank = dp_rank;
    o.dp_size = dp_size;
    return o;
}

void loader_options_resume(LoaderOptions *o, const Config *c, int64_t iteration, int64_t consumed_train,
                           int64_t consumed_valid) {
    assert(o && c && iteration >= 0 && consumed_train >= 0 && consumed_valid >= 0);
    int64_t train = config_samples_at_end(c, iteration, consumed_train);
    if (o->samples[SPLIT_TRAIN] > 0 && train > o->samples[SPLIT_TRAIN]) o->samples[SPLIT_TRAIN] = train;
    // Evaluations during training, plus one at the end.
    int64_t evaluations = iteration < c->train_iters && !c->skip_train
                              ? c->train_iters / c->eval_interval - iteration / c->eval_interval + 1
                              : 1;
    int64_t valid = consumed_valid + evaluations * c->eval_iters * c->global_batch_size;
    if (o->samples[SPLIT_VALID] > 0 && valid > o->samples[SPLIT_VALID]) o->samples[SPLIT_VALID] = valid;
}
