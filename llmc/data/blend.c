// Weighted mixtures of several shards (Megatron-LM's BlendedDataset), and the parser of
// --data-path. See dataset.h. Called by loader.c.
#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/data/dataset.h"

// --- --data-path ---------------------------------------------------------------------------------

// Parses a word if all of it is a number. Accepts "nan" and "inf", so that they are refused as
// weights instead of being opened as files.
static bool parse_number(const char *word, double *value) {
    char *end;
    *value = strtod(word, &end);
    return end != word && *end == 0;
}

static bool has_numbers(const char *const *words, int count) {
    double ignored;
    for (int i = 0; i < count; i++) {
        if (parse_number(words[i], &ignored)) return true;
    }
    return false;
}

static bool read_weights(DataSource *source, const char *const *words, int count, Error *err) {
    if (count % 2) {
        return usage_error(err,
                           "--data-path: %d arguments are not \"weight prefix\" pairs; pass one prefix, or a "
                           "weight before every prefix, or prefixes only",
                           count);
    }
    source->weights = xcalloc((size_t)count / 2, sizeof(double), "blend weights");
    for (int i = 0; i < count; i += 2) {
        double *w = &source->weights[i / 2];
        if (parse_number(words[i], w) && isfinite(*w) && *w > 0) continue;
        return usage_error(
            err,
            "--data-path: weight '%s' of '%s' is not a positive number; put a weight before every prefix",
            words[i], words[i + 1]);
    }
    return true;
}

bool data_source_open(DataSource *source, const char *const *words, int count, Error *err) {
    *source = (DataSource){0};
    if (count < 1) return usage_error(err, "--data-path is empty; pass the prefix of a shard");
    bool pairs = count > 1 && has_numbers(words, count);
    int shards = pairs ? count / 2 : count;
    if (shards > INT16_MAX) {
        return usage_error(err, "--data-path has more than %d shards; merge some with merge_datasets",
                           INT16_MAX);
    }
    source->shard = xcalloc((size_t)count, sizeof(Shard), "shards");
    bool ok = !pairs || read_weights(source, words, count, err);
    for (; ok && source->shards < shards; source->shards += ok) {
        ok = shard_open(&source->shard[source->shards],
                        words[pairs ? 2 * source->shards + 1 : source->shards], err);
    }
    if (!ok) data_source_close(source);
    return ok;
}

bool data_source_open_masks(DataSource *source, Error *err) {
    source->mask = xcalloc((size_t)source->shards, sizeof(Shard), "shards of loss masks");
    for (int i = 0; i < source->shards; i++) {
        if (!masks_open(&source->mask[i], &source->shard[i], err)) return false;
    }
    return true;
}

void data_source_close(DataSource *source) {
    for (int i = 0; i < source->shards; i++) shard_close(&source->shard[i]);
    for (int i = 0; source->mask && i < source->shards; i++) shard_close(&source->mask[i]);
    free(source->mask);
    free(source->shard);
    free(source->weights);
    *source = (DataSource){0};
}

// --- Weights and draws ---------------------------------------------------------------------------

double numpy_sum(const double *x, int64_t n) {
    if (n > 128) {
        int64_t half = n / 2 / 8 * 8;
        return numpy_sum(x, half) + numpy_sum(x + half, n - half);
    }
    double sum = 0;
    int64_t i = 0;
    if (n >= 8) {
        double r[8];
        for (int k = 0; k < 8; k++) r[k] = x[k];
        for (i = 8; i + 8 <= n; i += 8) {
            for (int k = 0; k < 8; k++) r[k] += x[i + k];
        }
        sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    }
    for (; i < n; i++) sum += x[i];
    return sum;
}

static void normalize(double *weights, int n) {
    double sum = numpy_sum(weights, n);
    for (int i = 0; i < n; i++) weights[i] /= sum;
}

void blend_indices(const double *weights, const int64_t *limits, int shards, int64_t length,
                   int16_t *blend_shard, int64_t *blend_sample) {
    assert(shards >= 1 && shards <= INT16_MAX && length >= 0);
    // integers, exact below 2^53
    double *drawn = xcalloc((size_t)shards, sizeof(double), "blend counters");
    for (int64_t k = 0; k < length; k++) {
        double draws = k > 1 ? (double)k : 1.0, most = -INFINITY;
        int chosen = 0;
        for (int i = 0; i < shards; i++) {
            double lag = weights[i] * draws - drawn[i];
            if (lag > most && !(limits && drawn[i] >= (double)limits[i])) {
                most = lag;
                chosen = i;
            }
        }
        blend_shard[k] = (int16_t)chosen;
        blend_sample[k] = (int64_t)drawn[chosen];
        drawn[chosen] += 1;
    }
    free(drawn);
}

// --- The blend -----------------------------------------------------------------------------------

static bool build_part(BlendedDataset *d, int i, const DataSource *source, const SplitRequest *r,
                       int64_t samples, Error *err) {
    const Shard *shard = &source->shard[i];
    PartRequest part = {.split = r->split,
                        .end = shard->sequences,
                        .samples = samples,
                        .seq_length = r->seq_length,
                        .seed = r->seed,
                        .mask = source->mask ? &source->mask[i] : NULL};
    if (r->bounds) split_range(r->bounds, r->split, shard->sequences, &part.first, &part.end);
    return gpt_dataset_build(&d->parts[i], shard, &part, d->memory, err);
}

// Rounds a sample count up. gpt_dataset_build refuses counts that are too large.
static int64_t whole_samples(double x) { return x < 0x1p62 ? (int64_t)ceil(x) : INT64_MAX; }

// Follows Megatron's order: normalize, request more samples than each shard's portion, normalize
// again, draw.
static bool build_weighted(BlendedDataset *d, const DataSource *source, const SplitRequest *r, Error *err) {
    if (r->samples == ONE_EPOCH) {
        return usage_error(err,
                           "a weighted blend cannot read its %s split exactly once; pass the prefixes "
                           "without weights, or drop --full-validation",
                           split_name(r->split));
    }
    memcpy(d->weights, source->weights, (size_t)d->shards * sizeof(double));
    normalize(d->weights, d->shards);
    for (int i = 0; i < d->shards; i++) {
        double share = (double)r->samples * d->weights[i];
        int64_t built = r->surplus > 0 ? whole_samples(ceil(share) * (1 + r->surplus))
                                       : whole_samples(share * 1.005);
        if (!build_part(d, i, source, r, built, err)) return false;
        d->samples += r->surplus > 0 ? whole_samples(share) : built;
    }
    normalize(d->weights, d->shards);
    return true;
}

static bool build_list(BlendedDataset *d, const DataSource *source, const SplitRequest *r, Error *err) {
    for (int i = 0; i < d->shards; i++) {
        const GptDataset *part = &d->parts[i];
        if (!build_part(d, i, source, r, ONE_EPOCH, err)) return false;
        if (part->samples == 0) {
            return data_error(err,
                              "%s: the %" PRId64
                              " tokens of its %s split are too few for one sample of %d tokens; remove the "
                              "shard, or add weights to the list",
                              part->shard->prefix, part->tokens_per_epoch, split_name(r->split),
                              r->seq_length);
        }
        d->weights[i] = (double)part->samples;
        d->samples += part->samples;
    }
    if (r->samples != ONE_EPOCH && r->samples < d->samples) d->samples = r->samples;
    normalize(d->weights, d->shards);
    return true;
}

static bool build_parts(BlendedDataset *d, const DataSource *source, const SplitRequest *r, Error *err) {
    // A single "weight prefix" pair of a --train-data-path etc. is a blend in the paper's fork, but
    // not in later versions.
    bool single = d->shards == 1 && (!source->weights || (!r->bounds && r->surplus > 0));
    if (single) {
        bool ok = build_part(d, 0, source, r, r->samples, err);
        d->samples = d->parts[0].samples;
        return ok;
    }
    d->weights = xcalloc((size_t)d->shards, sizeof(double), "blend weights");
    return source->weights ? build_weighted(d, source, r, err) : build_list(d, source, r, err);
}

// A shard of weight w needs at most ceil(1.005 w n) samples for the first n draws. Each draw takes
// the shard that is furthest below its weight; these deficits sum to 0, so the largest one is not
// negative. Hence at most floor(w k) + 1 of the first k < n draws come from this shard.
// After n draws, the table can need one sample more than a shard has. Megatron-LM fails there; here
// the blend ends before that draw. The error below guards against rounding.
static bool check_draws(BlendedDataset *d, Error *err) {
    for (int64_t k = 0; k < d->samples; k++) {
        const GptDataset *part = &d->parts[d->blend_shard[k]];
        if (d->blend_sample[k] < part->samples) continue;
        if (k >= d->requested) {
            d->samples = k;
            return true;
        }
        return data_error(err,
                          "%s: the blend needs sample %" PRId64 " of this shard, which has %" PRId64
                          "; request more samples, reduce its weight or add data",
                          part->shard->prefix, d->blend_sample[k], part->samples);
    }
    return true;
}

static void fill_draws(const BlendedDataset *d, bool exhaust) {
    int64_t *limits = exhaust ? xcalloc((size_t)d->shards, sizeof *limits, "samples per part") : NULL;
    for (int i = 0; exhaust && i < d->shards; i++) limits[i] = d->parts[i].samples;
    blend_indices(d->weights, limits, d->shards, d->samples, d->blend_shard, d->blend_sample);
    free(limits);
}

static bool build_draws(BlendedDataset *d, bool exhaust, Error *err) {
    size_t n = (size_t)d->samples;
    d->blend_shard = (int16_t *)node_memory_alloc(d->memory, n * sizeof(int16_t));
    if (d->blend_shard) d->blend_sample = (int64_t *)node_memory_alloc(d->memory, n * sizeof(int64_t));
    if (!d->blend_sample) {
        return system_error(err,
                            "out of memory for a blend of %" PRId64
                            " samples; request fewer or use a machine with more memory",
                            d->samples);
    }
    if (node_memory_fills(d->memory)) fill_draws(d, exhaust);
    node_memory_publish(d->memory);
    return check_draws(d, err);  // the same result on every rank
}

bool blended_dataset_build(BlendedDataset *dataset, const DataSource *source, const SplitRequest *request,
                           NodeMemory *memory, Error *err) {
    const SplitRequest *r = request;
    assert(r->split >= 0 && r->split < SPLITS && r->surplus >= 0);
    *dataset = (BlendedDataset){.shards = source->shards, .requested = r->samples, .memory = memory};
    if (r->bounds && r->bounds[r->split + 1] <= r->bounds[r->split]) {
        return usage_error(err, "--split gives no weight to a split that needs samples; set its weight");
    }
    dataset->parts = xcalloc((size_t)source->shards, sizeof(GptDataset), "blend parts");
    bool exhaust = r->samples == ONE_EPOCH, ok = build_parts(dataset, source, r, err);
    if (exhaust) dataset->requested = dataset->samples;
    if (ok && dataset->weights) ok = build_draws(dataset, exhaust, err);
    if (!ok) blended_dataset_free(dataset);
    return ok;
}

void blended_dataset_free(BlendedDataset *dataset) {
    node_memory_free(dataset->memory, dataset->blend_sample);
    node_memory_free(dataset->memory, dataset->blend_shard);
    for (int i = 0; dataset->parts && i < dataset->shards; i++) gpt_dataset_free(&dataset->parts[i]);
    free(dataset->parts);
    free(dataset->weights);
    *dataset = (BlendedDataset){0};
}

int blended_dataset_shard(const BlendedDataset *dataset, int64_t i, int64_t *part_sample) {
    assert(i >= 0 && i < dataset->samples);
    *part_sample = dataset->blend_shard ? dataset->blend_sample[i] : i;
    return dataset->blend_shard ? dataset->blend_shard[i] : 0;
}

void blended_dataset_sample(const BlendedDataset *dataset, int64_t i, int32_t *tokens) {
    int64_t part_sample;
    int part = blended_dataset_shard(dataset, i, &part_sample);
    gpt_dataset_sample(&dataset->parts[part], part_sample, tokens);
}

void blended_dataset_packed(const BlendedDataset *dataset, int64_t i, int32_t pad, const PackedSample *out) {
    int64_t part_sample;
    int part = blended_dataset_shard(dataset, i, &part_sample);
    packed_sample(&dataset->parts[part], part_sample, pad, out);
}
