// Several shards mixed by weights (Megatron-LM's BlendedDataset), and the words of --data-path: see dataset.h. Called by loader.c.
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/data/dataset.h"

// ---------------------------------------------------------------------------------------------------------------------
// --data-path

// A word that is a number as a whole. "nan" and "inf" count: they are refused as weights rather than looked for as files.
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

static bool open_pairs(DataSource *source, const char *const *words, int count, Error *err) {
    if (count % 2) {
        return error_set(err, EXIT_USAGE,
                         "--data-path: %d words are not pairs; give one prefix, or a weight before every prefix, or prefixes only", count);
    }
    source->weights = (double *)xcalloc((size_t)count / 2, sizeof(double), "blend weights");
    for (int i = 0; i < count / 2; i++) {
        double *w = &source->weights[i];
        if (!parse_number(words[2 * i], w) || !isfinite(*w) || *w <= 0) {
            return error_set(err, EXIT_USAGE,
                             "--data-path: weight '%s' of '%s' is not a positive number; give a weight before every prefix", words[2 * i],
                             words[2 * i + 1]);
        }
    }
    for (; source->shards < count / 2; source->shards++) {
        if (!shard_open(&source->shard[source->shards], words[2 * source->shards + 1], err)) return false;
    }
    return true;
}

static bool open_list(DataSource *source, const char *const *words, int count, Error *err) {
    for (; source->shards < count; source->shards++) {
        if (!shard_open(&source->shard[source->shards], words[source->shards], err)) return false;
    }
    if (count == 1) return true;
    source->weights = (double *)xcalloc((size_t)count, sizeof(double), "blend weights");
    for (int i = 0; i < count; i++) {
        source->weights[i] = (double)source->shard[i].tokens;
        if (source->weights[i] <= 0) return error_set(err, EXIT_DATA, "%s: holds no token; leave it out of --data-path", words[i]);
    }
    return true;
}

bool data_source_open(DataSource *source, const char *const *words, int count, Error *err) {
    *source = (DataSource){0};
    if (count < 1) return error_set(err, EXIT_USAGE, "--data-path: no shard; give a prefix");
    if (count > 2 * INT16_MAX) return error_set(err, EXIT_USAGE, "--data-path: more than %d shards; merge some with merge_datasets", INT16_MAX);
    source->shard = (Shard *)xcalloc((size_t)count, sizeof(Shard), "shards");
    bool pairs = count > 1 && has_numbers(words, count);
    bool ok = pairs ? open_pairs(source, words, count, err) : open_list(source, words, count, err);
    if (ok && source->shards > INT16_MAX) {
        ok = error_set(err, EXIT_USAGE, "--data-path: more than %d shards; merge some with merge_datasets", INT16_MAX);
    }
    if (!ok) data_source_close(source);
    return ok;
}

void data_source_close(DataSource *source) {
    for (int i = 0; i < source->shards; i++) shard_close(&source->shard[i]);
    free(source->shard);
    free(source->weights);
    *source = (DataSource){0};
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights and draws

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

static void normalise(double *weights, int n) {
    double sum = numpy_sum(weights, n);
    for (int i = 0; i < n; i++) weights[i] /= sum;
}

void blend_indices(const double *weights, int shards, int64_t length, int16_t *blend_shard, int64_t *blend_sample) {
    double *drawn = (double *)xcalloc((size_t)shards, sizeof(double), "blend counters");  // whole numbers, exact below 2^53
    for (int64_t k = 0; k < length; k++) {
        double draws = k > 1 ? (double)k : 1.0, most = weights[0] * draws - drawn[0];
        int chosen = 0;
        for (int i = 1; i < shards; i++) {
            double lag = weights[i] * draws - drawn[i];
            if (lag > most) {
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

// ---------------------------------------------------------------------------------------------------------------------
// The blend

static bool build_part(BlendedDataset *d, int i, const Shard *shard, int split, const double *bounds, int64_t samples, int seq_length,
                       uint32_t seed, Error *err) {
    int64_t first = 0, end = shard->sequences;
    if (bounds) split_range(bounds, split, shard->sequences, &first, &end);
    return gpt_dataset_build(&d->parts[i], shard, split, first, end, samples, seq_length, seed, &d->memory, err);
}

// Megatron's order: normalise, ask every shard for 0.5 % more than its share, normalise again, then draw.
static bool build_parts(BlendedDataset *d, const DataSource *source, int split, const double *bounds, int seq_length, uint32_t seed, Error *err) {
    if (!source->weights) {
        bool ok = build_part(d, 0, &source->shard[0], split, bounds, d->requested, seq_length, seed, err);
        d->samples = d->parts[0].samples;
        return ok;
    }
    d->weights = (double *)xmalloc((size_t)d->shards * sizeof(double), "blend weights");
    memcpy(d->weights, source->weights, (size_t)d->shards * sizeof(double));
    normalise(d->weights, d->shards);
    for (int i = 0; i < d->shards; i++) {
        double share = ceil((double)d->requested * d->weights[i] * 1.005);
        int64_t samples = share < 0x1p62 ? (int64_t)share : INT64_MAX;  // the part refuses what it cannot index
        if (!build_part(d, i, &source->shard[i], split, bounds, samples, seq_length, seed, err)) return false;
        d->samples += samples;
    }
    normalise(d->weights, d->shards);
    return true;
}

// A part asked for ceil(1.005 w n) samples serves the first n draws: the lags add up to 0, so the chosen one is not negative, so
// draw k < n leaves at most floor(w k) + 1 draws on it. The tail of the table, beyond n, can outrun a part by a draw (Megatron-LM
// fails there): the blend ends before that draw. The error guards against rounding.
static bool check_draws(BlendedDataset *d, Error *err) {
    for (int64_t k = 0; k < d->samples; k++) {
        const GptDataset *part = &d->parts[d->blend_shard[k]];
        if (d->blend_sample[k] < part->samples) continue;
        if (k >= d->requested) {
            d->samples = k;
            return true;
        }
        return error_set(err, EXIT_DATA,
                         "%s: the blend asks for sample %" PRId64 " of this shard, which has %" PRId64 "; ask for more samples, give it "
                         "less weight or more data",
                         part->shard->prefix, d->blend_sample[k], part->samples);
    }
    return true;
}

static bool build_draws(BlendedDataset *d, Error *err) {
    const IndexMemory *m = &d->memory;
    d->blend_shard = (int16_t *)m->alloc(m->context, (size_t)d->samples * sizeof(int16_t), "blend shards");
    if (d->blend_shard) d->blend_sample = (int64_t *)m->alloc(m->context, (size_t)d->samples * sizeof(int64_t), "blend samples");
    if (!d->blend_sample) {
        return error_set(err, EXIT_ENVIRONMENT, "no memory for a blend of %" PRId64 " samples; ask for fewer or use a larger machine", d->samples);
    }
    if (m->builder(m->context)) blend_indices(d->weights, d->shards, d->samples, d->blend_shard, d->blend_sample);
    m->ready(m->context);
    return check_draws(d, err);  // the same on every rank
}

bool blended_dataset_build(BlendedDataset *dataset, const DataSource *source, int split, const double bounds[SPLITS + 1],
                           int64_t samples, int seq_length, uint32_t seed, const IndexMemory *memory, Error *err) {
    *dataset = (BlendedDataset){.shards = source->shards, .requested = samples};
    dataset->memory = index_memory_or_own(memory);
    if (bounds && bounds[split + 1] <= bounds[split]) {
        return error_set(err, EXIT_USAGE, "--split gives no weight to a split that is asked for %" PRId64 " samples; give it a weight", samples);
    }
    dataset->parts = (GptDataset *)xcalloc((size_t)source->shards, sizeof(GptDataset), "blend parts");
    bool ok = build_parts(dataset, source, split, bounds, seq_length, seed, err);
    if (ok && dataset->weights) ok = build_draws(dataset, err);
    if (!ok) blended_dataset_free(dataset);
    return ok;
}

void blended_dataset_free(BlendedDataset *dataset) {
    const IndexMemory *m = &dataset->memory;
    if (dataset->blend_sample) m->free(m->context, dataset->blend_sample);
    if (dataset->blend_shard) m->free(m->context, dataset->blend_shard);
    for (int i = 0; dataset->parts && i < dataset->shards; i++) gpt_dataset_free(&dataset->parts[i]);
    free(dataset->parts);
    free(dataset->weights);
    *dataset = (BlendedDataset){0};
}

int blended_dataset_shard(const BlendedDataset *dataset, int64_t i, int64_t *part_sample) {
    *part_sample = dataset->blend_shard ? dataset->blend_sample[i] : i;
    return dataset->blend_shard ? dataset->blend_shard[i] : 0;
}

void blended_dataset_sample(const BlendedDataset *dataset, int64_t i, int32_t *tokens) {
    int64_t part_sample;
    int part = blended_dataset_shard(dataset, i, &part_sample);
    gpt_dataset_sample(&dataset->parts[part], part_sample, tokens);
}
