// Samples of one split of one shard in exactly the order of Megatron-LM's GPTDataset: document,
// sample and shuffle index. See dataset.h; blend.c has blends of several shards. Called by blend.c
// and loader.c.
#include "llmc/data/dataset.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/rng.h"

// --- Splits --------------------------------------------------------------------------------------

const char *split_name(int split) {
    assert(split >= 0 && split < SPLITS);
    static const char *const names[SPLITS] = {"training", "validation", "test"};
    return names[split];
}

// Parses the numbers of "969, 30, 1": maximal runs of digits and dots, like Megatron's regex
// [.0-9]+, which would also find numbers in "-5,1,0" and "nan,1,1".
static bool parse_weights(const char *text, double weight[SPLITS], Error *err) {
    int count = 0;
    if (text[strspn(text, ".0123456789,;/ \t")]) {
        return usage_error(err, "--split '%s': not a list of numbers; use three weights such as 969, 30, 1",
                           text);
    }
    for (const char *p = text + strcspn(text, ".0123456789"); *p; p += strcspn(p, ".0123456789")) {
        size_t length = strspn(p, ".0123456789");
        char number[64], *end;
        if (length >= sizeof number) {
            return usage_error(err, "--split '%s': number too long; use three weights such as 969, 30, 1",
                               text);
        }
        memcpy(number, p, length);
        number[length] = 0;
        double value = strtod(number, &end);
        if (*end || end == number || !isfinite(value)) {
            return usage_error(err,
                               "--split '%s': '%s' is not a number; use three weights such as 969, 30, 1",
                               text, number);
        }
        if (count == SPLITS) {
            return usage_error(err, "--split '%s': more than three weights; use three such as 969, 30, 1",
                               text);
        }
        weight[count++] = value;
        p += length;
    }
    return true;
}

bool split_parse(const char *text, double bounds[SPLITS + 1], Error *err) {
    double weight[SPLITS] = {0, 0, 0};
    if (!parse_weights(text, weight, err)) return false;
    double sum = weight[0] + weight[1] + weight[2];
    if (!(sum > 0) || !isfinite(sum)) {
        return usage_error(err, "--split '%s': no positive weight; use three such as 969, 30, 1", text);
    }
    bounds[0] = 0;
    for (int i = 0; i < SPLITS; i++) bounds[i + 1] = bounds[i] + weight[i] / sum;
    return true;
}

bool split_range(const double bounds[SPLITS + 1], int split, int64_t sequences, int64_t *first,
                 int64_t *end) {
    assert(split >= 0 && split < SPLITS && sequences >= 0);
    *first = *end = 0;
    if (bounds[split + 1] <= bounds[split]) return false;
    // Rounds half to even, as numpy does. The weights may sum to slightly more than 1.
    *first = (int64_t)nearbyint(bounds[split] * (double)sequences);
    *end = (int64_t)nearbyint(bounds[split + 1] * (double)sequences);
    if (*end > sequences) *end = sequences;
    return true;
}

// --- Sizes ---------------------------------------------------------------------------------------

static const int64_t MAX_DOCUMENTS = (int64_t)1 << (64 - SAMPLE_OFFSET_BITS), MAX_SAMPLES = (int64_t)1 << 32;

static int64_t tokens_between(const Shard *shard, int64_t first, int64_t end) {
    if (first >= end) return 0;
    int64_t stop = end < shard->sequences ? shard_position(shard, end) : shard->tokens;
    return stop - shard_position(shard, first);
}

// Computes the number of epochs, and whether the last one is shuffled separately. This
// is the case if less than 80% of it is needed, so that the samples of a partial epoch come last.
static bool plan_epochs(GptDataset *d, int64_t requested, Error *err) {
    const int64_t s = d->seq_length, per_epoch = d->tokens_per_epoch,
                  sequences = d->end_sequence - d->first_sequence;
    int64_t needed, all;
    bool fits = !__builtin_mul_overflow(requested, s, &needed) && needed < INT64_MAX - per_epoch;
    if (fits) {
        d->epochs = requested > 0 ? ceil_div64(needed + 1, per_epoch) : 1;  // ONE_EPOCH is negative
        fits = !__builtin_mul_overflow(d->epochs, per_epoch, &all) &&
               !__builtin_mul_overflow(d->epochs, sequences, &d->documents) &&
               d->documents <= MAX_DOCUMENTS && (all - 1) / s < MAX_SAMPLES;
    }
    if (!fits) {
        return data_error(err,
                          "%s: %" PRId64 " samples of %d tokens from the %" PRId64
                          " tokens of the %s split exceed the limits of the index (2^33 documents, 2^32 "
                          "samples); request fewer or add data",
                          d->shard->prefix, requested, d->seq_length, per_epoch, split_name(d->split));
    }
    d->samples = (all - 1) / s;
    d->samples_before_final = d->samples;
    if (d->epochs > 1) {
        int64_t before = ((d->epochs - 1) * per_epoch - 1) / s, last = requested - before,
                whole = (per_epoch - 1) / s;
        d->separate_final_epoch = last < (int64_t)(0.80 * (double)whole);
        if (d->separate_final_epoch) d->samples_before_final = before;
    }
    return true;
}

static bool plan(GptDataset *d, int64_t requested, Error *err) {
    const char *prefix = d->shard->prefix, *name = split_name(d->split);
    if (d->seq_length < 1 || requested < ONE_EPOCH) {
        return usage_error(err, "%s: %" PRId64 " samples of %d tokens requested; use positive sizes", prefix,
                           requested, d->seq_length);
    }
    if (d->end_sequence > INT32_MAX) {
        return data_error(err, "%s: more than 2^31 sequences; split the shard into several and blend them",
                          prefix);
    }
    if (d->first_sequence >= d->end_sequence) {
        const char *advice = d->shard->sequences < SPLITS
                                 ? "each split needs whole documents, so preprocess the text as several"
                                 : "increase its --split weight";
        return data_error(err,
                          "%s: the %s split has none of the %" PRId64
                          " sequences (documents); %s, or set its weight to 0",
                          prefix, name, d->shard->sequences, advice);
    }
    d->tokens_per_epoch = tokens_between(d->shard, d->first_sequence, d->end_sequence);
    if (d->tokens_per_epoch < 2) {
        return data_error(err,
                          "%s: the %s split has %" PRId64
                          " tokens but needs at least 2; increase its --split weight or add data",
                          prefix, name, d->tokens_per_epoch);
    }
    return d->mask ? packed_plan(d, requested, err) : plan_epochs(d, requested, err);
}

// -------------------------------------------------------------------------------------------------
// The document, sample and shuffle index are filled in this order with one random generator, which
// is reseeded for every split and every shard of a blend.

static void fill_document_index(const GptDataset *d, Mt19937 *rng) {
    const int64_t sequences = d->end_sequence - d->first_sequence;
    int32_t *out = d->document_index;
    for (int64_t e = 0; e < d->epochs; e++) {
        for (int64_t i = 0; i < sequences; i++) *out++ = (int32_t)(d->first_sequence + i);
    }
    int64_t together = d->separate_final_epoch ? d->documents - sequences : d->documents;
    mt19937_shuffle_i32(rng, d->document_index, together);
    mt19937_shuffle_i32(rng, d->document_index + together, d->documents - together);
}

// The stream is the concatenation of sequences in document index order. Entry k locates stream
// token k * S, S = seq_length. Sample k covers stream tokens k*S .. k*S+S, so its last token is
// also the first one of sample k + 1.
static void fill_sample_index(const GptDataset *d) {
    enum { PREFETCH_DISTANCE = 24 };  // lengths are read in random order: prefetch them
    uint64_t *out = d->sample_index, *end = out + d->samples + 1;
    *out++ = 0;                    // by definition, even if the first sequence is empty
    int64_t next = d->seq_length;  // offset of the wanted token from the start of this sequence
    // `p < documents` only ends the loop if the file is truncated meanwhile.
    for (int64_t p = 0; out < end && p < d->documents; p++) {
        if (p + PREFETCH_DISTANCE < d->documents)
            shard_prefetch_length(d->shard, d->document_index[p + PREFETCH_DISTANCE]);
        int64_t length = shard_length(d->shard, d->document_index[p]);
        for (; next < length && out < end; next += d->seq_length) {
            *out++ = (uint64_t)p << SAMPLE_OFFSET_BITS | (uint64_t)next;
        }
        next -= length;
    }
    shard_check_whole(d->shard);
}

static void fill_shuffle_index(const GptDataset *d, Mt19937 *rng) {
    for (int64_t i = 0; i < d->samples; i++) d->shuffle_index[i] = (uint32_t)i;
    mt19937_shuffle_u32(rng, d->shuffle_index, d->samples_before_final);
    mt19937_shuffle_u32(rng, d->shuffle_index + d->samples_before_final,
                        d->samples - d->samples_before_final);
}

static bool allocate(GptDataset *d, Error *err) {
    size_t documents = 4 * (size_t)d->documents, entries = 8 * (size_t)(d->samples + 1),
           shuffled = 4 * (size_t)d->samples;
    d->document_index = (int32_t *)node_memory_alloc(d->memory, documents);
    if (d->document_index) d->sample_index = (uint64_t *)node_memory_alloc(d->memory, entries);
    if (d->sample_index) d->shuffle_index = (uint32_t *)node_memory_alloc(d->memory, shuffled);
    if (d->shuffle_index) return true;
    return system_error(err,
                        "%s: out of memory for the index of the %s split (%zu MB); request fewer samples or "
                        "use a machine with more memory",
                        d->shard->prefix, split_name(d->split), (documents + entries + shuffled) >> 20);
}

bool gpt_dataset_build(GptDataset *dataset, const Shard *shard, const PartRequest *request,
                       NodeMemory *memory, Error *err) {
    assert(request->first >= 0 && request->end <= shard->sequences);
    *dataset = (GptDataset){.shard = shard,
                            .split = request->split,
                            .seq_length = request->seq_length,
                            .first_sequence = request->first,
                            .end_sequence = request->end,
                            .mask = request->mask,
                            .memory = memory};
    if (!node_memory_agree(memory, plan(dataset, request->samples, err), err)) return false;
    bool built = dataset->mask ? packed_build(dataset, request->samples, request->seed, err)
                               : allocate(dataset, err);
    if (!built) {
        gpt_dataset_free(dataset);
        return false;
    }
    if (dataset->mask) return true;
    Mt19937 rng;
    bool fills = node_memory_fills(memory);
    if (fills) {
        mt19937_seed(&rng, request->seed);
        fill_document_index(dataset, &rng);
    }
    // A single wait for the builder could exceed the timeout of collectives: use one barrier per
    // index.
    node_memory_agree(memory, true, NULL);
    if (fills) fill_sample_index(dataset);
    node_memory_agree(memory, true, NULL);
    if (fills) fill_shuffle_index(dataset, &rng);
    node_memory_publish(memory);
    return true;
}

void gpt_dataset_free(GptDataset *dataset) {
    node_memory_free(dataset->memory, dataset->shuffle_index);
    node_memory_free(dataset->memory, dataset->sample_index);
    node_memory_free(dataset->memory, dataset->document_index);
    memset(dataset, 0, sizeof *dataset);
}

// --- Samples -------------------------------------------------------------------------------------

void gpt_dataset_sample_entry(const GptDataset *dataset, int64_t k, int64_t *position, int64_t *offset) {
    assert(k >= 0 && k <= dataset->samples);
    uint64_t entry = dataset->sample_index[k];
    *position = (int64_t)(entry >> SAMPLE_OFFSET_BITS);
    *offset = (int64_t)(entry & (((uint64_t)1 << SAMPLE_OFFSET_BITS) - 1));
}

void gpt_dataset_sample(const GptDataset *dataset, int64_t i, int32_t *tokens) {
    assert(i >= 0 && i < dataset->samples);
    const Shard *shard = dataset->shard;
    int64_t position, offset, left = (int64_t)dataset->seq_length + 1;
    gpt_dataset_sample_entry(dataset, dataset->shuffle_index[i], &position, &offset);
    for (; left > 0 && position < dataset->documents; position++, offset = 0) {
        int64_t sequence = dataset->document_index[position], take = shard_length(shard, sequence) - offset;
        if (take > left) take = left;
        if (take < 0) take = 0;  // only if the index was truncated; detected below
        shard_read(shard, shard_position(shard, sequence) + offset, take, tokens);
        tokens += take;
        left -= take;
    }
    shard_check_whole(shard);
}

TokenPlace gpt_dataset_place(const GptDataset *dataset, int64_t i, int64_t t) {
    assert(i >= 0 && i < dataset->samples && t >= 0 && t <= dataset->seq_length);
    if (dataset->mask) return packed_place(dataset, i, t);
    TokenPlace place;
    gpt_dataset_sample_entry(dataset, dataset->shuffle_index[i], &place.position, &place.offset);
    for (place.offset += t;; place.position++) {
        place.sequence = dataset->document_index[place.position];
        int64_t length = shard_length(dataset->shard, place.sequence);
        if (place.offset < length) return place;
        place.offset -= length;
    }
}
