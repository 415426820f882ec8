// Tests blends of shards against megatron-core's rules. dev/ref/make_blend_golden.py computed the
// expected samples in test/golden/blend/core.jsonl with numpy. Also tests lists without weights and
// errors.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dev/lib/shard_writer.h"
#include "llmc/base/json.h"
#include "llmc/data/dataset.h"
#include "test/unit/folder.h"

enum { MOST_SHARDS = 16 };

static char folder[64];
static int make_folder(void **state) { return folder_make(folder, sizeof folder, "test_blend"); }
static int remove_folder(void **state) { return folder_remove(folder); }

// Writes shard k with sequences of these lengths. Token p is (7919 k + 31 p) mod 60000.
static void write_shard(const char *prefix, int k, const cJSON *lengths) {
    Error err = {0};
    int32_t tokens[64];
    int64_t p = 0;
    ShardWriter *w = shard_writer_open(prefix, SHARD_U16, &err);
    assert_non_null(w);
    const cJSON *length;
    cJSON_ArrayForEach(length, lengths) {
        assert_true(length->valueint <= 64);
        for (int i = 0; i < length->valueint; i++) tokens[i] = (int32_t)((7919 * k + 31 * p++) % 60000);
        assert_true(shard_writer_add_sequence(w, tokens, length->valueint, &err));
        shard_writer_end_document(w);
    }
    assert_true(shard_writer_close(w, &err));
}

typedef struct Blend {
    char prefix[MOST_SHARDS][96], weight[MOST_SHARDS][32];
    const char *words[2 * MOST_SHARDS];
    int count;
} Blend;

// Writes the shards of a case and sets their --data-path.
static void write_blend(Blend *b, const cJSON *shards, const cJSON *weights) {
    b->count = 0;
    for (int k = 0; k < cJSON_GetArraySize(shards); k++) {
        snprintf(b->prefix[k], sizeof b->prefix[k], "%s/s%d", folder, k);
        write_shard(b->prefix[k], k, cJSON_GetArrayItem(shards, k));
        if (cJSON_IsArray(weights)) {
            snprintf(b->weight[k], sizeof b->weight[k], "%.17g", cJSON_GetArrayItem(weights, k)->valuedouble);
            b->words[b->count++] = b->weight[k];
        }
        b->words[b->count++] = b->prefix[k];
    }
}

static uint64_t hash_samples(const BlendedDataset *d, int seq) {
    uint64_t value = 0xCBF29CE484222325u;
    int32_t ids[64];
    for (int64_t i = 0; i < d->samples; i++) {
        blended_dataset_sample(d, i, ids);
        for (int t = 0; t <= seq; t++) {
            for (int byte = 0; byte < 4; byte++)
                value = (value ^ ((uint32_t)ids[t] >> 8 * byte & 255)) * 0x100000001B3u;
        }
    }
    return value;
}

static int number(const cJSON *c, const char *name) { return cJSON_GetObjectItem(c, name)->valueint; }

static void check_case(const cJSON *c, int line) {
    Blend b;
    DataSource source;
    BlendedDataset d;
    Error err = {0};
    double bounds[SPLITS + 1];
    const cJSON *target = cJSON_GetObjectItem(c, "target"), *surplus = cJSON_GetObjectItem(c, "surplus");
    write_blend(&b, cJSON_GetObjectItem(c, "shards"), cJSON_GetObjectItem(c, "weights"));
    assert_true(data_source_open(&source, b.words, b.count, &err));
    assert_true(split_parse(cJSON_GetObjectItem(c, "split")->valuestring, bounds, &err));
    SplitRequest r = {.split = number(c, "index"),
                      .bounds = bounds,
                      .samples = cJSON_IsNull(target) ? ONE_EPOCH : target->valueint,
                      .seq_length = number(c, "seq"),
                      .seed = (uint32_t)number(c, "seed"),
                      .surplus = cJSON_IsNull(surplus) ? 0 : surplus->valuedouble};
    if (!blended_dataset_build(&d, &source, &r, NULL, &err)) fail_msg("line %d: %s", line, err.what);
    assert_int_equal(d.samples, number(c, "samples"));
    const cJSON *draws = cJSON_GetObjectItem(c, "draws");
    for (int i = 0; i < cJSON_GetArraySize(draws); i++) {
        int64_t sample;
        const cJSON *draw = cJSON_GetArrayItem(draws, i);
        int shard = blended_dataset_shard(&d, i, &sample);
        if (shard != cJSON_GetArrayItem(draw, 0)->valueint ||
            sample != cJSON_GetArrayItem(draw, 1)->valueint) {
            fail_msg("line %d, draw %d: sample %d of shard %d", line, i, (int)sample, shard);
        }
    }
    char fnv[20];
    snprintf(fnv, sizeof fnv, "%016llx", (unsigned long long)hash_samples(&d, r.seq_length));
    assert_string_equal(fnv, cJSON_GetObjectItem(c, "fnv")->valuestring);
    blended_dataset_free(&d);
    data_source_close(&source);
}

static void matches_megatron_core(void **state) {
    FILE *file = fopen("test/golden/blend/core.jsonl", "r");
    assert_non_null(file);
    char *text = NULL;
    size_t room = 0;
    int lines = 0;
    for (ssize_t bytes; (bytes = getline(&text, &room, file)) > 0; lines++) {
        cJSON *c = json_parse_object(text, (size_t)bytes);
        assert_non_null(c);
        check_case(c, lines + 1);
        cJSON_Delete(c);
    }
    assert_int_equal(lines, 60);
    free(text);
    fclose(file);
}

// Expects an error for a list of two shards with 9 tokens, which have one sample of 8 per epoch.
static void refuse(const char *const *words, int count, const SplitRequest *r, int code, const char *what) {
    DataSource source;
    BlendedDataset d;
    Error err = {0};
    assert_true(data_source_open(&source, words, count, &err));
    assert_false(blended_dataset_build(&d, &source, r, NULL, &err));
    assert_int_equal(err.code, code);
    if (!strstr(err.what, what)) fail_msg("'%s' does not say '%s'", err.what, what);
    data_source_close(&source);
}

static void invalid_blends(void **state) {
    Blend list, pairs;
    cJSON *shards = cJSON_Parse("[[9],[8]]"), *good = cJSON_Parse("[[9],[9]]"),
          *weights = cJSON_Parse("[1,1]");
    write_blend(&list, shards, NULL);
    refuse(list.words, 2, &(SplitRequest){SPLIT_TRAIN, NULL, 5, 8, 1, 0}, EXIT_DATA,
           "s1: the 8 tokens of its training split are too few for one sample of 8 tokens; remove the shard, "
           "or "
           "add weights to the list");
    write_blend(&pairs, good, weights);
    refuse(pairs.words, 4, &(SplitRequest){SPLIT_VALID, NULL, ONE_EPOCH, 8, 1, 0}, EXIT_USAGE,
           "a weighted blend cannot read its validation split exactly once");
    cJSON_Delete(shards);
    cJSON_Delete(good);
    cJSON_Delete(weights);
}

// A single "weight prefix" pair for one split is a blend (which requests 0.5 % more samples) in the
// paper's fork of Megatron-LM, but not in later versions.
static void single_pair_per_split(void **state) {
    Blend b;
    Error err = {0};
    DataSource source;
    cJSON *shards = cJSON_Parse("[[60,21]]"), *weights = cJSON_Parse("[0.5]");
    write_blend(&b, shards, weights);
    assert_true(data_source_open(&source, b.words, 2, &err));
    for (int core = 0; core < 2; core++) {
        BlendedDataset d;
        SplitRequest r = {SPLIT_TRAIN, NULL, 10, 8, 1, core ? 0.005 : 0};
        assert_true(blended_dataset_build(&d, &source, &r, NULL, &err));
        assert_int_equal(d.weights == NULL, core);
        assert_int_equal(d.parts[0].epochs, core ? 1 : 2);
        blended_dataset_free(&d);
    }
    data_source_close(&source);
    cJSON_Delete(shards);
    cJSON_Delete(weights);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(matches_megatron_core, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(invalid_blends, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(single_pair_per_split, make_folder, remove_folder),
    };
    return cmocka_run_group_tests_name("blend", tests, NULL, NULL);
}
