// Batches for the training loop: opens the data, builds one dataset per split, and loads
// micro-batches in Megatron's order. See loader.h; loader_report.c has the summary and
// --inspect-data, check.c has --check-data.
#include "llmc/data/loader.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/data/loader_state.h"
#include "llmc/data/shard.h"
#include "llmc/base/rng.h"

// --- Opening -------------------------------------------------------------------------------------

static bool check_options(const LoaderOptions *o, Error *err) {
    if (o->seq_length < 1 || o->vocab_size < 1 || o->micro_batch_size < 1 || o->dp_size < 1 ||
        o->dp_rank < 0 || o->dp_rank >= o->dp_size) {
        return usage_error(err,
                           "invalid sizes: sequence length %d, vocabulary %d, micro-batch %d, data-parallel "
                           "rank %d of %d; use positive sizes",
                           o->seq_length, o->vocab_size, o->micro_batch_size, o->dp_rank, o->dp_size);
    }
    if (o->mock_data && o->vocab_size < 3) {
        return usage_error(err, "--mock-data needs a vocabulary of at least 3 ids, not %d", o->vocab_size);
    }
    bool needs_eod = o->eod_mask_loss || o->reset_position_ids || o->reset_attention_mask;
    if (needs_eod && !o->mock_data && (o->eod < 0 || o->eod >= o->vocab_size)) {
        return usage_error(err,
                           "--eod-mask-loss, --reset-position-ids and --reset-attention-mask need the "
                           "tokenizer's EOD id; pass the tokenizer");
    }
    return true;
}

static bool open_source(DataSource *source, const DataPath *path, bool masks, Error *err) {
    if (!data_source_open(source, path->words, path->count, err)) return false;
    return !masks || data_source_open_masks(source, err);
}

bool loader_open_sources(DataSource source[SPLITS], const LoaderOptions *o, Error *err) {
    if (o->mock_data) return true;
    if (o->data_path.count) return open_source(&source[0], &o->data_path, o->sft, err);
    for (int s = 0; s < SPLITS; s++) {
        const DataPath *path = &o->split_path[s];
        if (path->count && !open_source(&source[s], path, o->sft, err)) return false;
    }
    return true;
}

static bool check_all_ends(const Loader *l, const LoaderOptions *o, Error *err) {
    for (int s = 0; s < SPLITS && !o->sft; s++) {  // conversations end as their template says
        for (int i = 0; i < l->source[s].shards; i++) {
            if (!check_ends(&l->source[s].shard[i], o, CHECK_SOME_ENDS, NULL, err)) return false;
        }
    }
    return true;
}

// Determines which splits exist and, with --data-path, their bounds.
static bool choose_splits(Loader *l, const LoaderOptions *o, double bounds[SPLITS + 1], Error *err) {
    if (o->data_path.count && !o->mock_data &&
        !split_parse(o->split ? o->split : "969, 30, 1", bounds, err)) {
        return false;
    }
    for (int s = 0; s < SPLITS; s++) {
        bool present = o->mock_data ||
                       (o->data_path.count ? bounds[s + 1] > bounds[s] : o->split_path[s].count > 0);
        l->has[s] = present && o->samples[s] != 0;
    }
    if (o->samples[SPLIT_TRAIN] > 0 && !l->has[SPLIT_TRAIN]) {
        return usage_error(err, "--split '%s' leaves no training data; make the first weight positive",
                           o->split);
    }
    return true;
}

// Checks that a list without weights, which is read only once, has enough samples. Megatron-LM
// fails in the middle of the run instead.
static bool check_list_samples(const BlendedDataset *d, int split, Error *err) {
    if (d->samples >= d->requested) return true;
    return data_error(err,
                      "a list of prefixes without weights is read once: its %s split has %" PRId64
                      " samples but the run needs %" PRId64
                      "; use fewer (--train-iters, --eval-iters), or add a weight to each prefix to read it "
                      "as often as needed",
                      split_name(split), d->samples, d->requested);
}

static bool build_datasets(Loader *l, const LoaderOptions *o, Error *err) {
    double bounds[SPLITS + 1] = {0};
    bool ok = check_options(o, err) && choose_splits(l, o, bounds, err) &&
              loader_open_sources(l->source, o, err) && check_all_ends(l, o, err);
    if (!node_memory_agree(l->memory, ok, err)) return false;
    for (int s = 0; s < SPLITS && !o->mock_data; s++) {
        if (!l->has[s]) continue;
        const DataSource *source = &l->source[o->data_path.count ? 0 : s];
        uint32_t seed = s == SPLIT_TRAIN || !o->eval_seed ? o->seed : o->eval_seed;
        SplitRequest request = {
            s, o->data_path.count ? bounds : NULL, o->samples[s], o->seq_length, seed, o->surplus};
        if (!blended_dataset_build(&l->data[s], source, &request, l->memory, err)) return false;
        if (!check_list_samples(&l->data[s], s, err)) return false;  // the same result on every rank
    }
    return true;
}

static void allocate_batch(Loader *l) {
    const LoaderOptions *o = &l->options;
    size_t elements = (size_t)o->micro_batch_size * (size_t)o->seq_length;
    l->ids = xmalloc(((size_t)o->seq_length + 1) * sizeof(int32_t), "sample ids");
    if (o->sft) {
        l->mask = xmalloc(((size_t)o->seq_length + 1) * sizeof(int32_t), "sample masks");
        l->start = xmalloc(((size_t)o->seq_length + 1) * sizeof(int32_t), "sample conversations");
    }
    l->batch.tokens = xmalloc(elements * sizeof(int32_t), "batch tokens");
    l->batch.targets = xmalloc(elements * sizeof(int32_t), "batch targets");
    l->batch.positions = xmalloc(elements * sizeof(int32_t), "batch positions");
    if (o->eod_mask_loss || o->sft) l->batch.loss_mask = xmalloc(elements * sizeof(float), "loss mask");
    if (o->reset_attention_mask || o->sft) {
        l->batch.doc_start = xmalloc(elements * sizeof(int32_t), "document starts");
    }
}

Loader *loader_open(const LoaderOptions *options, Peers node, Error *err) {
    double start = monotonic_seconds();
    Error local = {0};
    Loader *l = xcalloc(1, sizeof *l, "the loader");
    mapped_set_site(node.site);
    l->memory = node_memory_open(node, true);
    if (!build_datasets(l, options, &local)) {
        if (err) *err = local;
        loader_close(l);
        return NULL;
    }
    l->options = *options;
    l->options.data_path = (DataPath){NULL, 0};
    memset(l->options.split_path, 0, sizeof l->options.split_path);
    l->options.split = NULL;
    l->eod = options->mock_data || options->eod < 0 ? 0 : options->eod;
    allocate_batch(l);
    l->open_seconds = monotonic_seconds() - start;
    return l;
}

void loader_close(Loader *loader) {
    if (!loader) return;
    mapped_set_site(NULL);
    for (int s = 0; s < SPLITS; s++) {
        if (loader->data[s].parts) blended_dataset_free(&loader->data[s]);
        data_source_close(&loader->source[s]);
    }
    node_memory_close(loader->memory);
    Batch *b = &loader->batch;
    free(b->tokens);
    free(b->targets);
    free(b->positions);
    free(b->loss_mask);
    free(b->doc_start);
    free(loader->ids);
    free(loader->mask);
    free(loader->start);
    free(loader);
}

bool loader_has_split(const Loader *loader, int split) { return loader->has[split]; }

int64_t loader_samples(const Loader *loader, int split) {
    if (!loader->has[split]) return 0;
    return loader->options.mock_data ? INT64_MAX : loader->data[split].samples;
}

uint64_t *loader_fingerprints(const Loader *loader, int *shards) {
    *shards = 0;
    for (int s = 0; s < SPLITS; s++) *shards += loader->source[s].shards;
    uint64_t *prints = xcalloc((size_t)*shards + 1, sizeof *prints, "the shards' fingerprints"),
             *next = prints;
    for (int s = 0; s < SPLITS; s++) {
        for (int i = 0; i < loader->source[s].shards; i++) {
            const DataSource *source = &loader->source[s];
            uint64_t weight = 0;
            if (source->weights) memcpy(&weight, &source->weights[i], sizeof weight);
            if (source->mask) weight += shard_fingerprint(&source->mask[i]);
            *next++ = shard_fingerprint(&source->shard[i]) + weight;
        }
    }
    return prints;
}

const char *loader_shard_prefix(const Loader *loader, int place) {
    assert(place >= 0);
    int s = 0;
    for (; place >= loader->source[s].shards; s++) place -= loader->source[s].shards;
    return loader->source[s].shard[place].prefix;
}

double loader_epoch(const Loader *loader, int64_t consumed) {
    const BlendedDataset *d = &loader->data[SPLIT_TRAIN];
    double tokens = 0;
    if (d->shards == 1 && d->parts[0].mask) {
        const GptDataset *part = &d->parts[0];
        int64_t samples = consumed < part->samples ? consumed : part->samples;
        return (double)packed_conversations(part, samples, NULL) /
               (double)(part->end_sequence - part->first_sequence);
    }
    for (int i = 0; i < d->shards; i++) {
        const GptDataset *part = &d->parts[i];
        tokens += part->mask ? (double)part->samples_per_epoch * loader->options.seq_length
                             : (double)part->tokens_per_epoch;
    }
    return tokens > 0 ? (double)consumed * loader->options.seq_length / tokens : -1;
}

// --- Samples -------------------------------------------------------------------------------------

// Generates Megatron's mock sample: a random length l, then l ones, one EOD (0), and twos. ids: (T
// + 1).
static void mock_sample(const LoaderOptions *o, int split, int64_t sample, int32_t *ids) {
    Mt19937 rng;
    int64_t index = sample % MOCK_SAMPLES;
    mt19937_seed(&rng, (uint32_t)(split * (MOCK_SAMPLES + 1) + index));
    int ones = (int)mt19937_bounded(&rng, (uint64_t)o->seq_length - 1);
    ids[0] = ones % o->vocab_size;
    for (int t = 1; t <= o->seq_length; t++) ids[t] = t <= ones ? 1 : t == ones + 1 ? 0 : 2;
}

bool loader_bad_id(const Shard *shard, int64_t sequence, int64_t offset, int32_t id, int vocab_size,
                   Error *err) {
    return data_error(err,
                      "%s: sequence %" PRId64 ", position %" PRId64
                      ": token id %d is outside the vocabulary of %d; preprocess the data with this "
                      "tokenizer, or pass the tokenizer it was preprocessed with",
                      shard->prefix, sequence, offset, id, vocab_size);
}

// Sets the error for the first invalid id of a sample.
static bool bad_id(const Loader *l, int split, int64_t sample, const int32_t *ids, Error *err) {
    int t = 0;
    while (ids[t] >= 0 && ids[t] < l->options.vocab_size) t++;
    int64_t part_sample;
    const GptDataset *part =
        &l->data[split].parts[blended_dataset_shard(&l->data[split], sample, &part_sample)];
    TokenPlace place = gpt_dataset_place(part, part_sample, t);
    return loader_bad_id(part->shard, place.sequence, place.offset, ids[t], l->options.vocab_size, err);
}

bool loader_sample(const Loader *l, int split, int64_t sample, int32_t *ids, Error *err) {
    assert(split >= 0 && split < SPLITS);
    const LoaderOptions *o = &l->options;
    if (!l->has[split]) {
        return usage_error(err, "sample %" PRId64 " was requested from a split without data", sample);
    }
    if (o->mock_data) {
        mock_sample(o, split, sample, ids);
        return true;
    }
    if (sample < 0 || sample >= l->data[split].samples) {
        return data_error(
            err,
            "sample %" PRId64 " is past the %" PRId64
            " samples of its split; raise --train-iters or --train-samples so that they cover the run",
            sample, l->data[split].samples);
    }
    uint32_t outside = 0, no_mask = 0;
    if (o->sft) {
        const PackedSample packed = {ids, l->mask, l->start};
        blended_dataset_packed(&l->data[split], sample, l->eod, &packed);
        for (int t = 0; t <= o->seq_length; t++) no_mask |= (uint32_t)l->mask[t] > 1;
    } else {
        blended_dataset_sample(&l->data[split], sample, ids);
    }
    for (int t = 0; t <= o->seq_length; t++) outside |= (uint32_t)ids[t] >= (uint32_t)o->vocab_size;
    if (no_mask) {
        return data_error(err,
                          "sample %" PRId64
                          " of the %s split has loss masks other than 0 and 1; run "
                          "preprocess_data --chat again",
                          sample, split_name(split));
    }
    return !outside || bad_id(l, split, sample, ids, err);
}

// --- Batches -------------------------------------------------------------------------------------

// Computes positions, loss mask and document starts of one row, each (T), from its input tokens.
static void describe_row(const LoaderOptions *o, int eod, const int32_t *tokens, int32_t *positions,
                         float *loss_mask, int32_t *doc_start) {
    int start = 0;  // first token after the last EOD
    for (int t = 0; t < o->seq_length; t++) {
        positions[t] = o->reset_position_ids ? t - start : t;
        if (doc_start) doc_start[t] = start;
        if (loss_mask) loss_mask[t] = tokens[t] == eod ? 0.0f : 1.0f;
        if (tokens[t] == eod) start = t + 1;  // EOD belongs to the document that it ends
    }
}

// The same for a sample of packed conversations. Padding counts as one conversation without loss.
static void describe_packed(const Loader *l, int32_t *positions, float *loss_mask, int32_t *doc_start) {
    for (int t = 0; t < l->options.seq_length; t++) {
        positions[t] = t - l->start[t];
        doc_start[t] = l->start[t];
        loss_mask[t] = l->mask[t + 1] ? 1.0f : 0.0f;
    }
}

static bool fill_batch(Loader *l, int split, int64_t first_sample, Error *err) {
    const LoaderOptions *o = &l->options;
    Batch *b = &l->batch;
    const size_t length = (size_t)o->seq_length;
    b->first_sample = first_sample;
    for (int j = 0; j < o->micro_batch_size; j++) {
        if (!loader_sample(l, split, first_sample + j, l->ids, err)) return false;
        size_t row = (size_t)j * length;
        memcpy(b->tokens + row, l->ids, length * sizeof(int32_t));
        memcpy(b->targets + row, l->ids + 1, length * sizeof(int32_t));
        float *loss_mask = b->loss_mask ? b->loss_mask + row : NULL;
        int32_t *doc_start = b->doc_start ? b->doc_start + row : NULL;
        if (o->sft) describe_packed(l, b->positions + row, loss_mask, doc_start);
        else describe_row(o, l->eod, b->tokens + row, b->positions + row, loss_mask, doc_start);
    }
    return true;
}

bool loader_batch(Loader *loader, int split, int64_t consumed, Batch *batch, Error *err) {
    const LoaderOptions *o = &loader->options;
    int64_t first_sample = consumed + (int64_t)o->dp_rank * o->micro_batch_size;
    if (!fill_batch(loader, split, first_sample, err)) return false;
    *batch = loader->batch;
    return true;
}
