// Checks of data shards, see loader.h: --check-data, and a test that the documents end with the
// vocabulary's EOD.
#include "llmc/data/loader.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "llmc/data/loader_state.h"

// Sets the error for the id at this position of the .bin, naming its sequence.
static bool bad_token(const Shard *shard, int64_t position, int32_t id, int vocab_size, Error *err) {
    // last sequence that starts at or before position (empty sequences may share the position)
    int64_t low = 0, high = shard->sequences;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (shard_position(shard, middle) <= position) low = middle;
        else high = middle;
    }
    return loader_bad_id(shard, low, position - shard_position(shard, low), id, vocab_size, err);
}

static bool check_tokens(const Shard *shard, int vocab_size, int32_t *largest, Error *err) {
    enum { CHUNK = 1 << 16 };
    int32_t *ids = xmalloc(CHUNK * sizeof *ids, "ids to check");
    bool ok = true;
    *largest = -1;
    for (int64_t at = 0; ok && at < shard->tokens; at += CHUNK) {
        int64_t count = shard->tokens - at < CHUNK ? shard->tokens - at : CHUNK;
        shard_read(shard, at, count, ids);
        uint32_t most = 0;  // as unsigned, a negative id is larger than any valid one
        for (int64_t i = 0; i < count; i++) most = (uint32_t)ids[i] > most ? (uint32_t)ids[i] : most;
        if (most >= (uint32_t)vocab_size) {
            int64_t i = 0;
            while ((uint32_t)ids[i] < (uint32_t)vocab_size) i++;
            ok = bad_token(shard, at + i, ids[i], vocab_size, err);
        } else if ((int32_t)most > *largest) {
            *largest = (int32_t)most;
        }
    }
    free(ids);
    return ok;
}

typedef struct Ends {
    int64_t seen;     // sequences of at least two tokens
    int32_t last;     // last id of the most recent sequence
    bool alike;       // all sequences end with the same id
    int32_t largest;  // largest id other than the last ones
    bool elsewhere;   // the last id also occurs before the end
} Ends;

// Adds the last `count` ids of a sequence.
static void add_tail(Ends *e, const int32_t *ids, int count) {
    int32_t last = ids[count - 1];
    e->alike = e->seen == 0 || (e->alike && last == e->last);
    e->last = last;
    e->seen++;
    for (int t = 0; t < count - 1; t++) {
        if (ids[t] > e->largest) e->largest = ids[t];
        e->elsewhere |= ids[t] == last;
    }
}

bool check_ends(const Shard *shard, const LoaderOptions *options, int64_t most, FILE *out, Error *err) {
    assert(most >= 1);
    enum { TAIL = 256, ENOUGH = 8 };
    int32_t ids[TAIL];
    Ends e = {.alike = true, .largest = -1};
    int64_t looks = shard->sequences < most ? shard->sequences : most;
    for (int64_t k = 0; k < looks && e.alike; k++) {
        int64_t i = looks == shard->sequences ? k : shard->sequences / looks * k,
                length = shard_length(shard, i);
        int count = length < TAIL ? (int)length : TAIL;
        if (count < 2) continue;
        shard_read(shard, shard_position(shard, i) + length - count, count, ids);
        add_tail(&e, ids, count);
    }
    if (options->eod < 0 || e.seen < 2 || !e.alike || e.last == options->eod) return true;
    bool certain = e.seen >= ENOUGH && !e.elsewhere && e.last > e.largest;
    if (certain && options->known_ids) {
        return data_error(
            err,
            "%s: its documents end with id %d, which occurs nowhere else, instead of %d, this vocabulary's "
            "EOD; pass the --tokenizer-type that the shard was made with, or NullTokenizer",
            shard->prefix, e.last, options->eod);
    }
    if (!out) return true;
    fprintf(out,
            " > WARNING: every sampled sequence of %s ends with id %d instead of %d, this vocabulary's EOD; "
            "--append-eod may have been omitted, or the shard was made with a different vocabulary\n",
            shard->prefix, e.last, options->eod);
    return true;
}

static bool check_shard(const Shard *shard, int vocab_size, FILE *out, Error *err) {
    int64_t empty = 0, shortest = INT64_MAX, longest = 0;
    for (int64_t i = 0; i < shard->sequences; i++) {
        int64_t length = shard_length(shard, i);
        empty += length == 0;
        if (length < shortest) shortest = length;
        if (length > longest) longest = length;
    }
    int32_t largest;
    if (!check_tokens(shard, vocab_size, &largest, err)) return false;
    fprintf(out, " > %s: %" PRId64 " sequences, %" PRId64 " documents, %" PRId64 " tokens of %d bytes, ",
            shard->prefix, shard->sequences, shard->documents, shard->tokens, shard_dtype_size(shard->dtype));
    fprintf(out, "lengths %" PRId64 " to %" PRId64 " (%" PRId64 " empty), largest id %d of %d: OK\n",
            shard->sequences ? shortest : 0, longest, empty, largest, vocab_size);
    return true;
}

// Reads all loss masks of a shard.
static bool check_masks(const Shard *mask, FILE *out, Error *err) {
    int32_t largest;
    int64_t counted = 0, without = 0;
    if (!check_tokens(mask, 2, &largest, err)) return false;
    for (int64_t i = 0; i < mask->sequences; i++) {
        int64_t ones = 0, first = shard_position(mask, i);
        for (int64_t t = 0; t < shard_length(mask, i); t++) {
            int32_t value;
            shard_read(mask, first + t, 1, &value);
            ones += value;
        }
        counted += ones;
        without += !ones;
    }
    fprintf(out, " > %s: the loss counts %" PRId64 " tokens; %" PRId64 " sequences have none: OK\n",
            mask->prefix, counted, without);
    return true;
}

bool check_data(const LoaderOptions *options, FILE *out, Error *err) {
    if (options->mock_data) fprintf(out, " > mock data: nothing to check\n");
    DataSource source[SPLITS] = {{0}};
    bool ok = loader_open_sources(source, options, err);
    for (int s = 0; s < SPLITS; s++) {
        for (int i = 0; ok && i < source[s].shards; i++) {
            const Shard *shard = &source[s].shard[i];
            ok = check_shard(shard, options->vocab_size, out, err) &&
                 (options->sft ? check_masks(&source[s].mask[i], out, err)
                               : check_ends(shard, options, shard->sequences, out, err));
            fflush(out);
        }
        data_source_close(&source[s]);
    }
    return ok;
}
