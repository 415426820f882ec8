// Samples of packed conversations, for supervised fine-tuning: see dataset.h. Each epoch shuffles
// the conversations. A sample takes the next ones as long as they fit into seq_length + 1 tokens;
// the rest is padding. Longer conversations are cut. Epochs don't share samples, so the first
// samples do not depend on how many are requested. Called by dataset.c.
#include "llmc/data/dataset.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/rng.h"

static int64_t room_of(const GptDataset *d) { return (int64_t)d->seq_length + 1; }

// Tokens of a conversation that a sample holds.
static int64_t kept(const GptDataset *d, int64_t sequence) {
    int64_t length = shard_length(d->shard, sequence), room = room_of(d);
    return length < 0 ? 0 : length < room ? length : room;
}

static int64_t first_position(const GptDataset *d, int64_t sample) {
    return (int64_t)(d->sample_index[sample] >> SAMPLE_OFFSET_BITS);
}

// Returns the first token after token 0 of a conversation that the loss counts, or its length if
// there is none.
static int64_t first_counted(const GptDataset *d, int64_t sequence) {
    enum { CHUNK = 256 };
    int32_t mask[CHUNK];
    int64_t length = shard_length(d->mask, sequence), position = shard_position(d->mask, sequence);
    for (int64_t at = 1; at < length; at += CHUNK) {
        int64_t count = length - at < CHUNK ? length - at : CHUNK;
        shard_read(d->mask, position + at, count, mask);
        for (int64_t t = 0; t < count; t++) {
            if (mask[t]) return at + t;
        }
    }
    return length;
}

// Counts a conversation that is longer than a sample.
static void add_cut(GptDataset *d, int64_t sequence) {
    int64_t first = first_counted(d, sequence);
    d->cut_sequences++;
    if (first < room_of(d) || first == shard_length(d->mask, sequence)) return;
    d->unanswered_sequences++;
    if (first > d->answered_length) d->answered_length = first;
}

bool packed_plan(GptDataset *d, int64_t requested, Error *err) {
    const int64_t sequences = d->end_sequence - d->first_sequence;
    int64_t tokens = 0;
    for (int64_t i = d->first_sequence; i < d->end_sequence; i++) {
        tokens += kept(d, i);
        if (shard_length(d->shard, i) > room_of(d)) add_cut(d, i);
    }
    if (d->unanswered_sequences == sequences) {
        return data_error(err,
                          "%s: all %" PRId64
                          " conversations of the %s split are cut before their first "
                          "answer; shorten their prompts or use --seq-length %" PRId64,
                          d->shard->prefix, sequences, split_name(d->split), d->answered_length);
    }
    int64_t fewest = ceil_div64(tokens, room_of(d));  // samples of an epoch without any padding
    d->epochs = requested > 0 ? ceil_div64(requested, fewest) : 1;
    if (!__builtin_mul_overflow(d->epochs, sequences, &d->documents) && d->documents < UINT32_MAX)
        return true;
    return data_error(err,
                      "%s: %" PRId64 " samples of %d tokens need %" PRId64 " epochs of %" PRId64
                      " conversations, more than the index holds (2^32); request fewer or add data",
                      d->shard->prefix, requested, d->seq_length, d->epochs, sequences);
}

static void shuffle(const GptDataset *d, uint32_t seed) {
    const int64_t sequences = d->end_sequence - d->first_sequence;
    Mt19937 rng;
    mt19937_seed(&rng, seed);
    for (int64_t e = 0; e < d->epochs; e++) {
        int32_t *epoch = d->document_index + e * sequences;
        for (int64_t i = 0; i < sequences; i++) epoch[i] = (int32_t)(d->first_sequence + i);
        mt19937_shuffle_i32(&rng, epoch, sequences);
    }
}

// Counts the samples of an epoch, and stores their entries unless entries is NULL.
static int64_t pack_epoch(const GptDataset *d, int64_t epoch, uint64_t *entries) {
    enum { PREFETCH_DISTANCE = 24 };  // lengths are read in random order: prefetch them
    const int64_t sequences = d->end_sequence - d->first_sequence, room = room_of(d),
                  end = (epoch + 1) * sequences;
    int64_t samples = 0, used = 0;
    for (int64_t p = epoch * sequences; p < end; p++) {
        if (p + PREFETCH_DISTANCE < end)
            shard_prefetch_length(d->shard, d->document_index[p + PREFETCH_DISTANCE]);
        int64_t length = kept(d, d->document_index[p]);
        if (samples == 0 || used + length > room) {
            if (entries) entries[samples] = (uint64_t)p << SAMPLE_OFFSET_BITS;
            samples++;
            used = 0;
        }
        used += length;
    }
    shard_check_whole(d->shard);
    return samples;
}

// Counts the samples, and drops the epochs that the requested number does not need: packed_plan
// assumed samples without padding.
static void count_samples(GptDataset *d, int64_t requested) {
    int64_t epochs = 1;
    d->samples = d->samples_per_epoch = pack_epoch(d, 0, NULL);
    while (epochs < d->epochs && d->samples < requested) d->samples += pack_epoch(d, epochs++, NULL);
    d->samples_before_final = d->samples;
    d->documents = d->documents / d->epochs * epochs;
    d->epochs = epochs;
}

static void fill_sample_index(const GptDataset *d) {
    int64_t samples = 0;
    for (int64_t e = 0; e < d->epochs; e++) samples += pack_epoch(d, e, d->sample_index + samples);
    d->sample_index[samples] = (uint64_t)d->documents << SAMPLE_OFFSET_BITS;
}

bool packed_build(GptDataset *d, int64_t requested, uint32_t seed, Error *err) {
    size_t documents = 4 * (size_t)d->documents, entries = 0;
    bool fills = node_memory_fills(d->memory);
    d->document_index = (int32_t *)node_memory_alloc(d->memory, documents);
    if (d->document_index) {
        if (fills) shuffle(d, seed);
        node_memory_publish(d->memory);
        count_samples(d, requested);
        entries = 8 * (size_t)(d->samples + 1);
        d->sample_index = (uint64_t *)node_memory_alloc(d->memory, entries);
    }
    if (!d->sample_index) {
        return system_error(err,
                            "%s: out of memory for the index of the %s split (%zu MB); request fewer samples "
                            "or use a machine with more memory",
                            d->shard->prefix, split_name(d->split), (documents + entries) >> 20);
    }
    if (fills) fill_sample_index(d);
    node_memory_publish(d->memory);
    return true;
}

int64_t packed_conversations(const GptDataset *d, int64_t samples, int64_t *tokens) {
    assert(samples >= 0 && samples <= d->samples);
    int64_t conversations = first_position(d, samples);
    if (tokens) *tokens = 0;
    for (int64_t p = 0; tokens && p < conversations; p++) *tokens += kept(d, d->document_index[p]);
    return conversations;
}

void packed_sample(const GptDataset *d, int64_t i, int32_t pad, const PackedSample *out) {
    assert(i >= 0 && i < d->samples);
    int64_t at = 0;
    for (int64_t p = first_position(d, i); p < first_position(d, i + 1); p++) {
        int64_t sequence = d->document_index[p], take = kept(d, sequence);
        if (take > room_of(d) - at) take = 0;  // only if the index was truncated; detected below
        shard_read(d->shard, shard_position(d->shard, sequence), take, out->ids + at);
        shard_read(d->mask, shard_position(d->mask, sequence), take, out->mask + at);
        if (take) out->mask[at] = 0;  // the conversation before does not predict its first token
        for (int64_t t = at; t < at + take; t++) out->start[t] = (int32_t)at;
        at += take;
    }
    for (int64_t t = at; t < room_of(d); t++) {
        out->ids[t] = pad;
        out->mask[t] = 0;
        out->start[t] = (int32_t)at;
    }
    shard_check_whole(d->shard);
    shard_check_whole(d->mask);
}

TokenPlace packed_place(const GptDataset *d, int64_t i, int64_t t) {
    TokenPlace place = {.position = first_position(d, i), .offset = t};
    for (; place.position < first_position(d, i + 1); place.position++) {
        place.sequence = d->document_index[place.position];
        if (place.offset < kept(d, place.sequence)) return place;
        place.offset -= kept(d, place.sequence);
    }
    place.sequence = PADDING;
    return place;
}

bool masks_open(Shard *mask, const Shard *shard, Error *err) {
    char *prefix = text_format("%s" SHARD_MASK_SUFFIX, shard->prefix);
    bool ok = shard_open(mask, prefix, err);
    if (!ok && err) {
        size_t used = strlen(err->what);
        snprintf(err->what + used, sizeof err->what - used,
                 "; --sft reads the loss masks of preprocess_data --chat");
    }
    free(prefix);
    if (!ok) return false;
    int64_t differs = 0, common = mask->sequences < shard->sequences ? mask->sequences : shard->sequences;
    while (differs < common && shard_length(mask, differs) == shard_length(shard, differs)) differs++;
    if (differs == shard->sequences && differs == mask->sequences) return true;
    data_error(err,
               "%s has %" PRId64 " sequences and %s has %" PRId64 ", and sequence %" PRId64
               " differs in length; run preprocess_data --chat again",
               shard->prefix, shard->sequences, mask->prefix, mask->sequences, differs);
    shard_close(mask);
    return false;
}
