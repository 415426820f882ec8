// Reports of the loader: start-up summary and --inspect-data. See loader.h.
#include <inttypes.h>
#include <stdlib.h>

#include "llmc/data/loader.h"
#include "llmc/data/loader_state.h"

static void print_part(const BlendedDataset *d, int i, FILE *out) {
    const GptDataset *p = &d->parts[i];
    fprintf(out, "    %s:", p->shard->prefix);
    if (d->weights) fprintf(out, " weight %.4f,", d->weights[i]);
    fprintf(out, " %" PRId64 " sequences, %" PRId64 " tokens, %" PRId64 " epoch%s, %" PRId64 " samples",
            p->end_sequence - p->first_sequence, p->tokens_per_epoch, p->epochs, p->epochs == 1 ? "" : "s",
            p->samples);
    if (p->mask) {
        if (p->epochs > 1) {
            fprintf(out, " (about %" PRId64 " per epoch)", (p->samples + p->epochs / 2) / p->epochs);
        }
        fprintf(out, " of packed conversations");
        if (p->cut_sequences) {
            fprintf(out, "; %" PRId64 " conversations have more than %d tokens and are cut", p->cut_sequences,
                    p->seq_length + 1);
        }
    } else if (p->epochs > 1) {
        fprintf(out, ", last epoch %s",
                p->separate_final_epoch ? "shuffled separately" : "shuffled with the others");
    }
    fprintf(out, "\n");
}

// Warns of conversations that are cut before their first answer.
static void print_unanswered(const GptDataset *p, FILE *out) {
    if (!p->unanswered_sequences) return;
    fprintf(out,
            " > WARNING: %s: %" PRId64 " of %" PRId64
            " conversations of the %s split are cut before their first answer and add nothing to the loss; "
            "shorten their prompts or use --seq-length %" PRId64 "\n",
            p->shard->prefix, p->unanswered_sequences, p->end_sequence - p->first_sequence,
            split_name(p->split), p->answered_length);
}

void loader_print_summary(const Loader *loader, FILE *out) {
    const LoaderOptions *o = &loader->options;
    static const char *const targets[SPLITS] = {"train:      ", "validation: ", "test:       "};
    fprintf(out, " > datasets target sizes (minimum size):\n");
    for (int s = 0; s < SPLITS; s++) {
        if (o->samples[s] == ONE_EPOCH) fprintf(out, "    %sNone\n", targets[s]);
        else fprintf(out, "    %s%" PRId64 "\n", targets[s], o->samples[s]);
    }
    for (int s = 0; s < SPLITS; s++) {
        const BlendedDataset *d = &loader->data[s];
        if (!loader->has[s]) {
            fprintf(out, " > %s: no data\n", split_name(s));
        } else if (o->mock_data) {
            fprintf(out, " > %s: mock data, %d samples of %d tokens, repeated\n", split_name(s), MOCK_SAMPLES,
                    o->seq_length);
        } else {
            fprintf(out, " > %s: %" PRId64 " samples of %d tokens from %d shard%s\n", split_name(s),
                    d->samples, o->seq_length, d->shards, d->shards == 1 ? "" : "s");
            for (int i = 0; i < d->shards; i++) print_part(d, i, out);
            for (int i = 0; i < d->shards; i++) print_unanswered(&d->parts[i], out);
        }
    }
    for (int s = 0; s < SPLITS && !o->sft; s++) {
        for (int i = 0; i < loader->source[s].shards; i++) {
            check_ends(&loader->source[s].shard[i], o, CHECK_SOME_ENDS, out, NULL);
        }
    }
    bool copied;
    double megabytes = (double)node_memory_bytes(loader->memory, &copied) / 1e6;
    fprintf(out, " > sample index: %.1f MB per %s, built in %.2f s\n", megabytes,
            copied ? "rank (the ranks of this node cannot share memory)" : "node", loader->open_seconds);
}

static void print_spans(const GptDataset *p, int64_t part_sample, FILE *out) {
    for (int64_t t = 0; t <= p->seq_length;) {
        TokenPlace at = gpt_dataset_place(p, part_sample, t);
        if (at.sequence == PADDING) {
            fprintf(out, "    tokens %" PRId64 "..%d: padding\n", t, p->seq_length);
            return;
        }
        int64_t length = shard_length(p->shard, at.sequence), take = length - at.offset,
                left = p->seq_length + 1 - t;
        if (take > left) take = left;
        fprintf(out,
                "    tokens %" PRId64 "..%" PRId64 ": sequence %" PRId64 " (%" PRId64
                " tokens), from %" PRId64 " to %" PRId64 "\n",
                t, t + take - 1, at.sequence, length, at.offset, at.offset + take - 1);
        t += take;
    }
}

static void print_epoch(const GptDataset *p, int64_t part_sample, FILE *out) {
    int64_t sequences = p->end_sequence - p->first_sequence,
            epoch = gpt_dataset_place(p, part_sample, 0).position / sequences + 1;
    if (p->mask) {
        fprintf(out, "  epoch: %" PRId64 " of %" PRId64 "\n", epoch, p->epochs);
    } else if (p->epochs > 1 && !p->separate_final_epoch) {
        fprintf(out, "  epoch: one of %" PRId64 ", all shuffled together\n", p->epochs);
    } else if (p->epochs > 2 && epoch < p->epochs) {
        fprintf(out, "  epoch: one of the first %" PRId64 " of %" PRId64 ", shuffled together\n",
                p->epochs - 1, p->epochs);
    } else {
        fprintf(out, "  epoch: %" PRId64 " of %" PRId64 "\n", epoch, p->epochs);
    }
}

// Prints what the first `drawn` samples of a part read.
static void print_drawn(const GptDataset *p, int64_t drawn, FILE *out) {
    fprintf(out, "    %s: %" PRId64 " samples, ", p->shard->prefix, drawn);
    if (p->mask) {
        int64_t tokens, sequences = p->end_sequence - p->first_sequence,
                        conversations = packed_conversations(p, drawn, &tokens);
        fprintf(out,
                "%" PRId64 " conversations, %" PRId64 " tokens, %.3f epochs of %" PRId64 " conversations\n",
                conversations, tokens, (double)conversations / (double)sequences, sequences);
        return;
    }
    fprintf(out, "%" PRId64 " tokens, %.3f epochs of %" PRId64 " tokens\n", drawn * p->seq_length,
            (double)drawn * p->seq_length / (double)p->tokens_per_epoch, p->tokens_per_epoch);
}

static void print_origin(const BlendedDataset *d, int64_t k, FILE *out) {
    int64_t part_sample;
    int i = blended_dataset_shard(d, k, &part_sample);
    const GptDataset *p = &d->parts[i];
    fprintf(out, "  shard: %s (part %d of %d), its sample %" PRId64 " of %" PRId64 "\n", p->shard->prefix,
            i + 1, d->shards, part_sample, p->samples);
    print_epoch(p, part_sample, out);
    print_spans(p, part_sample, out);
    int64_t *drawn = xcalloc((size_t)d->shards, sizeof(int64_t), "draws per part");
    int64_t run = d->requested < d->samples ? d->requested : d->samples;
    for (int64_t j = 0; j < run; j++) drawn[blended_dataset_shard(d, j, &part_sample)]++;
    fprintf(out, "  the run's %" PRId64 " samples by part:\n", run);
    for (i = 0; i < d->shards; i++) print_drawn(&d->parts[i], drawn[i], out);
    free(drawn);
}

static void print_text(const int32_t *ids, int count, FILE *out, DecodeToken decode, const void *context) {
    fprintf(out, "  text:\n");
    for (int t = 0; t < count; t++) {
        size_t bytes = 0;
        const char *text = decode(context, ids[t], &bytes);
        if (text) {
            fwrite(text, 1, bytes, out);
        } else {
            fprintf(out, "<%d>", ids[t]);
        }
    }
    fprintf(out, "\n");
}

bool loader_inspect(const Loader *loader, int64_t k, FILE *out, DecodeToken decode, const void *context,
                    Error *err) {
    int64_t samples = loader_samples(loader, SPLIT_TRAIN);
    if (samples == 0) {
        return usage_error(err, "--inspect-data %" PRId64 ": no training split; provide data and samples", k);
    }
    if (k < 0 || k >= samples) {
        return usage_error(err,
                           "--inspect-data %" PRId64 ": the training split has samples 0 to %" PRId64
                           "; choose one of them",
                           k, samples - 1);
    }
    int count = loader->options.seq_length + 1;
    int32_t *ids = xmalloc((size_t)count * sizeof *ids, "sample ids");
    bool mock = loader->options.mock_data, ok = loader_sample(loader, SPLIT_TRAIN, k, ids, err);
    fprintf(out,
            "sample %" PRId64
            " of the training split: %d ids; all but the last are inputs, all but the first are targets\n",
            k, count);
    if (mock) {
        fprintf(out, "  mock data\n");
    } else {
        print_origin(&loader->data[SPLIT_TRAIN], k, out);
    }
    if (ok) {
        fprintf(out, "  ids:");
        for (int t = 0; t < count; t++) fprintf(out, " %d", ids[t]);
        fprintf(out, "\n");
        if (loader->mask) {
            fprintf(out, "  loss masks:");
            for (int t = 0; t < count; t++) fprintf(out, " %d", loader->mask[t]);
            fprintf(out, "\n");
        }
        if (decode && !mock) print_text(ids, count, out, decode, context);
    }
    free(ids);
    return ok;
}
