// Tests damaged checkpoint files and hostile manifests. Each causes a one-line error, and wrong
// data is never returned.
#include "test/unit/checkpoint/small_model.h"

static void flip_bit(const char *path, size_t at, int bit) {
    unsigned char byte;
    FILE *file = fopen(path, "rb+");
    assert_non_null(file);
    assert_int_equal(fseek(file, (long)at, SEEK_SET), 0);
    assert_int_equal(fread(&byte, 1, 1, file), 1);
    byte ^= (unsigned char)(1 << bit);
    assert_int_equal(fseek(file, (long)at, SEEK_SET), 0);
    assert_int_equal(fwrite(&byte, 1, 1, file), 1);
    assert_int_equal(fclose(file), 0);
}

static void damaged_manifest(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    size_t bytes;
    assert_true(save(f->save, 5, 1, &err));
    char *text = read_bytes(f->manifest, &bytes);
    for (size_t i = 0; i < bytes; i++) {
        flip_bit(f->manifest, i, i % 8);
        assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
        flip_bit(f->manifest, i, i % 8);
        assert_one_line(&err);
        assert_non_null(strstr(err.what, "manifest.json"));
    }
    for (size_t i = bytes; i-- > 0; i -= i / 8) {
        assert_int_equal(truncate(f->manifest, (off_t)i), 0);
        assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
        assert_one_line(&err);
    }
    unlink(f->manifest);
    assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
    assert_non_null(strstr(err.what, "No such file"));
    write_bytes(f->manifest, text, bytes);
    assert_loads(f->save, 5, 1);
    free(text);
}

// Replaces the first `from` in the manifest with `to` and updates the hash.
static void edit_manifest(const char *path, const char *original, size_t bytes, const char *from,
                          const char *to) {
    enum { TAIL = 29 };  // "xxh3": "0123456789abcdef"\n}\n
    const char *at = (const char *)memmem(original, bytes, from, strlen(from));
    assert_non_null(at);
    size_t before = (size_t)(at - original), after = bytes - TAIL - before - strlen(from),
           length = before + strlen(to) + after;
    char *text = (char *)malloc(length + TAIL + 1);
    memcpy(text, original, before);
    memcpy(text + before, to, strlen(to));
    memcpy(text + before + strlen(to), at + strlen(from), after);
    snprintf(text + length, TAIL + 1, "\"xxh3\": \"%016" PRIx64 "\"\n}\n", XXH3_64bits(text, length));
    write_bytes(path, text, length + TAIL);
    free(text);
}

// --- delayed FP8 scaling -------------------------------------------------------------------------

enum { FP8_SCALES = 5 };
static float fp8_scale_values[FP8_SCALES] = {1, 0x1.fffffep127f, 0x1p-126f, 0x1.5p-3f, 64};
static float fp8_histories[3 * FP8_SCALES] = {0, 0x1.fffffep127f, 0x1p-149f, 3, 1.1f, 7};

static void fp8_scaling_is_saved(void **state) {
    Folder *f = (Folder *)*state;
    for (int length = 0; length <= 3; length++) {  // 0: no state
        const Fp8State fp8 = {length ? FP8_SCALES : 0, length, fp8_scale_values, fp8_histories};
        Error err = {0};
        manner.fp8 = &fp8;
        manner.background = length == 3;
        assert_true(save(f->save, 5, 1, &err));
        assert_loads(f->save, 5, 1);
        Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
        const Fp8State *loaded = checkpoint_fp8(c);
        assert_int_equal(loaded->scales, fp8.scales);
        assert_int_equal(loaded->length, length);
        size_t bytes = (size_t)fp8.scales * sizeof(float);
        if (length > 0) assert_memory_equal(loaded->scale, fp8.scale, bytes);
        if (length > 0) assert_memory_equal(loaded->history, fp8.history, bytes * (size_t)length);
        checkpoint_close(c);
    }
}

static void damaged_fp8_scaling(void **state) {
    static const struct {
        const char *from, *to;
    } edits[] = {
        {"\"history_length\": 3", "\"history_length\": 2"},  // wrong number of entries
        {"\"history_length\": 3", "\"history_length\": 0"},
        {"\"history_length\": 3", "\"history_length\": -1"},
        {"\"history_length\": 3", "\"history_length\": 4611686018427387904"},
        {"\"history_length\": 3, ", ""},
        {"{\"history_length\": 3, \"scales\": \"3f800000", "{\"history_length\": 3, \"scales\": \""},
        {"\"scales\": \"3f800000", "\"scales\": \"00000000"},  // 0
        {"\"scales\": \"3f800000", "\"scales\": \"bf800000"},  // negative
        {"\"scales\": \"3f800000", "\"scales\": \"007fffff"},  // its inverse could be infinite
        {"\"scales\": \"3f800000", "\"scales\": \"7f800000"},  // infinite
        {"\"scales\": \"3f800000", "\"scales\": \"0x800000"},
        {"\"scales\": \"3f800000", "\"scales\": \"3f80000"},
        {"\"scales\":", "\"scale\":"},
        {"\"history\": \"00000000", "\"history\": \"7fc00000"},  // NaN
        {"\"history\": \"00000000", "\"history\": \"80000000"},
        {"\"history\": \"00000000", "\"history\": \""},
        {"\"history\":", "\"past\":"},
        {"\"fp8_scaling\": {", "\"fp8_scaling\": 7, \"other\": {"},
    };
    Folder *f = (Folder *)*state;
    const Fp8State fp8 = {FP8_SCALES, 3, fp8_scale_values, fp8_histories};
    Error err = {0};
    size_t bytes;
    manner.fp8 = &fp8;
    assert_true(save(f->save, 5, 1, &err));
    char *text = read_bytes(f->manifest, &bytes);
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        edit_manifest(f->manifest, text, bytes, edits[i].from, edits[i].to);
        assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
        assert_one_line(&err);
        assert_non_null(strstr(err.what, "its \"fp8_scaling\" is malformed"));
    }
    free(text);
}

// --- base model of LoRA adapters -----------------------------------------------------------------

static void base_is_saved(void **state) {
    static const BaseModel bases[] = {{"a \"base\"/", 0, 0xfedcba9876543210u},
                                      {"b", 123456789, 1},
                                      {NULL, 0, 0}};
    Folder *f = (Folder *)*state;
    for (size_t i = 0; i < sizeof bases / sizeof *bases; i++) {
        Error err = {0};
        manner.base = bases[i];
        manner.background = i == 1;
        assert_true(save(f->save, 5, 1, &err));
        assert_loads(f->save, 5, 1);
        Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
        const BaseModel *loaded = checkpoint_base(c);
        assert_int_equal(loaded->path != NULL, bases[i].path != NULL);
        if (loaded->path) assert_string_equal(loaded->path, bases[i].path);
        assert_int_equal(loaded->iteration, bases[i].iteration);
        assert_int_equal(loaded->xxh3, bases[i].xxh3);
        checkpoint_close(c);
    }
}

static void damaged_base(void **state) {
    static const char *const edits[][2] = {
        {"\"path\": \"base\"", "\"path\": 7"},
        {"\"path\": \"base\", ", ""},
        {"\"iteration\": 40", "\"iteration\": -1"},
        {"\"iteration\": 40", "\"iteration\": \"40\""},
        {"\"xxh3\": \"00000000000000ff\"", "\"xxh3\": \"ff\""},
        {"\"xxh3\": \"00000000000000ff\"", "\"xxh3\": 255"},
        {"\"xxh3\": \"00000000000000ff\"", "\"xxh3\": \"00000000000000FF\""},
        {"\"base\": {", "\"base\": 7, \"other\": {"},
    };
    Folder *f = (Folder *)*state;
    Error err = {0};
    size_t bytes;
    manner.base = (BaseModel){"base", 40, 255};
    assert_true(save(f->save, 5, 1, &err));
    char *text = read_bytes(f->manifest, &bytes);
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        edit_manifest(f->manifest, text, bytes, edits[i][0], edits[i][1]);
        assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
        assert_one_line(&err);
        assert_non_null(strstr(err.what, "its \"base\" is malformed"));
    }
    free(text);
}

static BaseModel as_base(const char *folder, int64_t iteration) {
    Error err = {0};
    Checkpoint *c = open_exactly(folder, iteration, MPI_COMM_SELF, &err);
    if (!c) fail_msg("%s", err.what);
    BaseModel base = checkpoint_as_base(c, folder);
    checkpoint_close(c);
    return base;
}

// Equal files are the same base, whatever the folder and the arguments. Other weights or another
// iteration are another base.
static void bases_compared(void **state) {
    Folder *f = (Folder *)*state;
    char copy[100], other[100];
    Error err = {0};
    size_t bytes;
    snprintf(copy, sizeof copy, "%s/copy", f->path);
    snprintf(other, sizeof other, "%s/other", f->path);
    assert_true(save(f->save, 5, 1, &err) && save(copy, 5, 1, &err) && save(copy, 7, 1, &err) &&
                save(other, 5, 2, &err));
    char *text = read_bytes(f->manifest, &bytes);
    edit_manifest(f->manifest, text, bytes, "\"lr\": 0.1", "\"lr\": 0.2");
    free(text);
    BaseModel base = as_base(f->save, 5), same = as_base(copy, 5), later = as_base(copy, 7),
              weights = as_base(other, 5), none = {0};
    assert_int_equal(base_model_compare(&base, &same, "--step", &err), BASE_SAME);
    assert_int_equal(base_model_compare(&base, &later, "--step", &err), BASE_DIFFERS);
    assert_one_line(&err);
    assert_non_null(strstr(err.what, "load the original base, for example with --step 5"));
    assert_int_equal(base_model_compare(&base, &weights, "--step", &err), BASE_DIFFERS);
    assert_one_line(&err);
    assert_non_null(strstr(err.what, "load the original base model"));
    assert_int_equal(base_model_compare(&none, &base, "--step", &err), BASE_UNKNOWN);
    assert_one_line(&err);
}

#define NAME_OF_32 "abcdefghijklmnopqrstuvwxyz012345"
#define NAME_OF_96 NAME_OF_32 NAME_OF_32 NAME_OF_32

static void hostile_manifest(void **state) {
    static const char *cases[][3] = {
        {"\"version\": 2", "\"version\": 4", "newer program"},
        {"\"version\": 2", "\"version\": 0", "not a manifest"},
        {"sdp4bit.c checkpoint", "another", "not a manifest"},
        {"\"format\":", "\"format\" ", "not a JSON object"},
        {"\"iteration\": 5", "\"iteration\": -5", "counter"},
        {"\"iteration\": 5", "\"iteration\": 5.5", "counter"},
        {"\"iteration\": 5", "\"iteration\": 1e300", "counter"},
        {"\"adam_steps\": 4", "\"other\": 4", "counter"},
        {"\"0x1.999999999999ap-4\"", "\"0x1.9z\"", "malformed"},
        {"\"0x1.999999999999ap-4\"", "\"nan\"", "malformed"},
        {"\"0x1.999999999999ap-4\"", "0.1", "malformed"},
        {"\"arguments\": {", "\"argument\": {", "arguments"},
        {"\"weight_dtype\": \"", "\"weight_dtype\": \"X", "weight_dtype"},
        {"\"master\"", "\"slave\"", "kinds"},
        {"\"shape\": [7, 5]", "\"shape\": [7, 5, 1]", "malformed"},
        {"\"shape\": [7, 5]", "\"shape\": [7, 0]", "malformed"},
        {"\"shape\": [7, 5]", "\"shape\": []", "invalid"},
        {"\"shape\": [7, 5]", "\"shape\": [4294967296, 4294967296]", "invalid"},
        {"\"name\": \"b\"", "\"name\": \"wte\"", "same name"},
        {"\"folder\": \"mp_rank_00\"", "\"folder\": \"..\"", "plain name"},
        {"\"folder\": \"mp_rank_00\"", "\"folder\": \"\"", "plain name"},
        {"\"name\": \"shard_00000", "\"name\": \"../../shard_00000", "plain name"},
        {"\"name\": \"shard_00000", "\"name\": \"/etc/shard_00000", "plain name"},
        {"\"bytes\": ", "\"bytes\": -", "size"},
        {"\"bytes\": ", "\"bytes\": 1", "instead of"},
        {"\"bytes\": ", "\"bytes\": 0, \"b\": ", "too small"},
        {"\", \"slices\"", "0\", \"slices\"", "hash"},
        {"[0,0,0,20]", "[0,0,0,9,9]", "not [tensor"},
        {"[0,0,0,20]", "[0,0,0]", "not [tensor"},
        {"[0,0,0,20]", "{}", "not [tensor"},
        {"[0,0,0,20]", "[4,0,0,9]", "unknown tensor"},
        {"[0,0,0,20]", "[-1,0,0,9]", "unknown tensor"},
        {"[0,0,0,20]", "[0,4,0,9]", "unknown kind"},
        {"[0,0,0,20]", "[0,0,-1,9]", "outside"},
        {"[0,0,0,20]", "[0,0,0,36]", "outside"},
        {"[0,0,0,20]", "[0,0,9,9]", "outside"},
        {"[0,0,0,20]", "[0,0,0,21]", "overlap"},
        {"[0,0,0,20]", "[0,0,0,9,0,4]", "overlap"},
        {"[0,0,0,20]", "[0,0,0,9,0]", "not [tensor"},
        {"[0,0,0,20]", "[0,0,0,9,0,4,1]", "not [tensor"},
        {"[0,0,0,20]", "[0,0,0,29,0,4]", "outside"},
        {"[0,0,0,20]", "[0,0,0,9,0,6]", "outside"},
        {"[0,0,0,20]", "[0,0,0,9,0,0]", "outside"},
        {"[0,0,0,20]", "[0,0,0,9,-1,2]", "outside"},
        {"[0,0,0,20]", "[0,0,0,9,4,2]", "outside"},
        {"[0,0,0,20]", "[0,0,0,9,4,9223372036854775807]", "outside"},
        {"\"name\": \"wte\"", "\"name\": \"" NAME_OF_96 "\"", "too long"},
        {"\"kinds\": [", "\"kinds\": [\"weight\", ", "kinds"},
        {"\"kinds\": [", "\"kinds\": [7, ", "kinds"},
        {"\"slices\": [", "\"slices\": 3, \"s\": [", "no slices"},
        {"\"files\": [", "\"files\": 3, \"f\": [", "list of files"},
        {"\"tensors\": [", "\"tensors\": {}, \"t\": [", "list of tensors"},
    };
    Folder *f = (Folder *)*state;
    Error err = {0};
    size_t bytes;
    assert_true(save(f->save, 5, 1, &err));
    char *text = read_bytes(f->manifest, &bytes);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        edit_manifest(f->manifest, text, bytes, cases[i][0], cases[i][1]);
        assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
        assert_one_line(&err);
        if (!strstr(err.what, cases[i][2]))
            fail_msg("case %zu: '%s' does not say '%s'", i, err.what, cases[i][2]);
    }
    free(text);
}

// The manifest lacks a slice, or its offsets differ from the shard's header. Reading reports the
// missing elements or the file.
static void manifest_against_shard(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    size_t bytes;
    assert_true(save(f->save, 5, 1, &err));
    char *text = read_bytes(f->manifest, &bytes);
    edit_manifest(f->manifest, text, bytes, "[0,0,20,35],", "");
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    assert_non_null(c);
    assert_int_equal(read_range(c, 0, SLICE_MASTER, 21, 25, 1, &err), 0);
    assert_non_null(strstr(err.what, "master of tensor 'wte' lacks element 21 of 21..25"));
    assert_int_equal(read_range(c, 0, SLICE_MASTER, 2, 9, 1, &err), 0);
    assert_non_null(strstr(err.what, "its header does not match"));
    checkpoint_close(c);
    edit_manifest(f->manifest, text, bytes, "\"weight_dtype\": \"", "\"weight_dtype\": \"BF16\", \"w\": \"");
    c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    int expected = slice_kind_bytes(SLICE_WEIGHT) == 2;
    assert_int_equal(read_range(c, 0, SLICE_WEIGHT, 0, 3, 1, &err), expected);
    checkpoint_close(c);
    edit_manifest(f->manifest, text, bytes, "\"weight_dtype\": \"", "\"weight_dtype\": \"F32\", \"w\": \"");
    c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    // With F32 the slices have another size than in the shard, and in a bf16 build another type.
    if (c) assert_int_equal(read_range(c, 0, SLICE_WEIGHT, 0, 3, 1, &err), !expected);
    checkpoint_close(c);
    assert_one_line(&err);
    free(text);
}

static void state_without_a_newer_field(void **state) {  // written by a program without this field
    Folder *f = (Folder *)*state;
    Error err = {0};
    size_t bytes;
    assert_true(save(f->save, 5, 1, &err));
    char *text = read_bytes(f->manifest, &bytes);
    edit_manifest(f->manifest, text, bytes, ", \"train_split_samples\": 77", "");
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    free(text);
    assert_true(c && checkpoint_state(c)->train_split_samples == 0 &&
                checkpoint_state(c)->consumed_valid_samples == 33);
    checkpoint_close(c);
}

static void damaged_shard(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    size_t bytes;
    assert_true(save(f->save, 5, 1, &err));
    char *data = read_bytes(f->shard, &bytes);
    uint64_t header;
    memcpy(&header, data, 8);
    for (size_t i = 0; i < bytes; i += i < 8 + header ? 1 : 5) {
        Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
        assert_non_null(c);
        flip_bit(f->shard, i, i % 8);
        if (i % 7 == 0) {
            assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
            assert_one_line(&err);
            assert_non_null(strstr(err.what, f->shard));
        }
        // If the hashes are updated too, a flipped byte in the header is an error or has no effect,
        // and a flipped byte in the data cannot be detected.
        int got = read_all(c, 1);
        checkpoint_close(c);
        flip_bit(f->shard, i, i % 8);
        if (i < 8 + header) {
            assert_int_not_equal(got, -1);
        } else {
            assert_int_equal(got, -1);
        }
    }
    for (size_t i = bytes; i-- > 0; i -= i / 8) {
        assert_int_equal(truncate(f->shard, (off_t)i), 0);
        assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
        assert_one_line(&err);
        assert_non_null(strstr(err.what, f->shard));
    }
    unlink(f->shard);
    assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
    assert_non_null(strstr(err.what, f->shard));
    free(data);
}

// A shard is truncated after the checkpoint was opened.
static void shard_truncated_while_open(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    struct stat status;
    assert_true(save(f->save, 5, 1, &err));
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    assert_int_equal(read_range(c, 0, SLICE_MASTER, 0, 35, 1, &err), 1);
    assert_int_equal(stat(f->shard, &status), 0);
    assert_int_equal(truncate(f->shard, status.st_size - 2), 0);
    assert_int_equal(read_all(c, 1), 0);
    checkpoint_close(c);
}

// The manifest lacks a range of columns. Its elements must be reported as missing in every row, and
// must not be read from the neighboring range.
static void manifest_without_columns(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    Saved s;
    size_t bytes;
    prepare_nothing(&s, f->save, 5, 1);
    add_columns(&s, 0, (Columns){0, 2}, 14);
    add_columns(&s, 0, (Columns){2, 3}, 21);
    for (int t = 1; t < TENSORS; t++) add_columns(&s, t, (Columns){0, 0}, 35);
    assert_true(save_whole(&s.save, &err));
    char *text = read_bytes(f->manifest, &bytes);
    edit_manifest(f->manifest, text, bytes, "[0,0,0,14,0,2],", "");
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    assert_non_null(c);
    for (int64_t row = 0; row < 7; row++) {
        char says[80];
        assert_int_equal(read_range(c, 0, SLICE_MASTER, row * 5, row * 5 + 1, 1, &err), 0);
        snprintf(says, sizeof says, "lacks element %d of", (int)row * 5);
        assert_non_null(strstr(err.what, says));
    }
    checkpoint_close(c);
    free(text);
}

// Kinds are found by name, because older programs had fewer kinds in a different order.
static void kinds_by_name(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    size_t bytes;
    assert_true(save(f->save, 5, 1, &err));
    char *text = read_bytes(f->manifest, &bytes);
    edit_manifest(f->manifest, text, bytes, "[\"master\", \"exp_avg\"", "[\"exp_avg\", \"master\"");
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    // The first kind in the file is the second one in the program.
    Slice asked = {"wte", SLICE_MASTER, 3, 17, {0, 0}, 0};
    Slice saved_as = {"wte", SLICE_EXP_AVG, 3, 17, {0, 0}, 0};
    unsigned char got[14 * 4], expected[14 * 4];
    assert_true(checkpoint_read(c, &asked, got, &err));
    fill(&saved_as, 1, expected);
    assert_memory_equal(got, expected, sizeof got);
    checkpoint_close(c);
    edit_manifest(f->manifest, text, bytes, ", \"weight\"]", "]");
    assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
    assert_non_null(strstr(err.what, "unknown kind"));
    free(text);
}

// The manifest has invalid slices of a per-node kind.
static void hostile_nodes(void **state) {
    static const char *cases[][2] = {
        {"[0,4,0,35]", "not [tensor"},     {"[0,4,0,35,0,5]", "not [tensor"},
        {"[0,4,0,35,-1]", "invalid"},      {"[0,4,0,35,0.5]", "invalid"},
        {"[0,4,0,35,1048576]", "invalid"}, {"[0,4,0,35,9223372036854775807]", "invalid"},
        {"[0,4,0,36,0]", "outside"},       {"[0,4,0,35,0,6,0]", "outside"},
        {"[0,3,0,35,0]", "not [tensor"},   {"[0,5,0,35,0]", "unknown kind"},
    };
    Folder *f = (Folder *)*state;
    Error err = {0};
    Saved s;
    size_t bytes;
    prepare(&s, f->save, 5, 1, 20);
    s.slices[s.save.slice_count++] = (Slice){"wte", SLICE_RESIDUAL, 0, 35, {0, 0}, 0};
    s.slices[s.save.slice_count++] = (Slice){"h.0|qkv", SLICE_RESIDUAL, 0, 33, {0, 0}, 0};
    assert_true(save_whole(&s.save, &err));
    char *text = read_bytes(f->manifest, &bytes);
    assert_non_null(memmem(text, bytes, "\"version\": 3", 12));
    assert_loads(f->save, 5, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        edit_manifest(f->manifest, text, bytes, "[0,4,0,35,0]", cases[i][0]);
        assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
        assert_one_line(&err);
        if (!strstr(err.what, cases[i][1]))
            fail_msg("case %zu: '%s' does not say '%s'", i, err.what, cases[i][1]);
    }
    free(text);
}

// A version 1 manifest differs only in its version number.
// --- Muon ----------------------------------------------------------------------------------------

static const Tensor MUON_MODEL[] = {
    {.name = "word_embeddings.weight", .dims = 2, .whole = {7, 5}},
    {.name = "encoder.layers.0.mlp.dense_h_to_4h.weight", .dims = 2, .whole = {3, 11}},
};

static void fetch_zeros(void *context, int i, void *host) {
    const Slice *s = &((const Saved *)context)->slices[i];
    memset(host, 0, (size_t)(s->hi - s->lo) * (size_t)slice_kind_bytes(s->kind));
}

// Saves the model without elements [lo, hi) of a tensor's second moments.
static bool save_without(const char *directory, const char *optimizer, int tensor, int64_t lo, int64_t hi,
                         Error *err) {
    Saved s;
    prepare_nothing(&s, directory, 5, 1);
    s.save.arguments_json = optimizer;
    s.save.tensors = MUON_MODEL;
    s.save.tensor_count = 2;
    s.save.fetch = fetch_zeros;
    for (int t = 0; t < 2; t++) {
        int64_t elements = tensor_whole_elements(&MUON_MODEL[t]);
        for (int k = 0; k < FIRST_KINDS; k++) {
            bool all = t != tensor || k != SLICE_EXP_AVG_SQ;
            Slice first = {MUON_MODEL[t].name, (SliceKind)k, 0, all ? elements : lo, {0, 0}, 0};
            Slice second = {MUON_MODEL[t].name, (SliceKind)k, all ? elements : hi, elements, {0, 0}, 0};
            s.slices[s.save.slice_count++] = first;
            s.slices[s.save.slice_count++] = second;
        }
    }
    return save_whole(&s.save, err);
}

// Only the matrices of layers may lack second moments, and only all of them.
static void second_moments_of_muon(void **state) {
    static const char muon[] = "{\"optimizer\": \"muon\"}", adam[] = "{\"optimizer\": \"adam\"}";
    Folder *f = (Folder *)*state;
    Error err = {0};
    assert_true(save_without(f->save, muon, 1, 0, 33, &err));
    assert_false(save_without(f->save, adam, 1, 0, 33, &err));
    assert_non_null(strstr(err.what, "no rank saves exp_avg_sq of 'encoder"));
    assert_false(save_without(f->save, muon, 1, 0, 20, &err));
    assert_non_null(strstr(err.what, "no rank saves exp_avg_sq of 'encoder"));
    assert_false(save_without(f->save, muon, 1, 20, 33, &err));
    assert_false(save_without(f->save, muon, 0, 0, 35, &err));
    assert_non_null(strstr(err.what, "no rank saves exp_avg_sq of 'word_embeddings.weight'"));
}

static void version_one(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    size_t bytes;
    assert_true(save(f->save, 5, 1, &err));
    char *text = read_bytes(f->manifest, &bytes);
    edit_manifest(f->manifest, text, bytes, "\"version\": 2", "\"version\": 1");
    assert_loads(f->save, 5, 1);
    free(text);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(damaged_manifest, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(hostile_manifest, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(manifest_against_shard, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(state_without_a_newer_field, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(damaged_shard, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(shard_truncated_while_open, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(manifest_without_columns, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(kinds_by_name, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(hostile_nodes, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(second_moments_of_muon, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(version_one, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(fp8_scaling_is_saved, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(damaged_fp8_scaling, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(base_is_saved, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(damaged_base, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(bases_compared, make_folder, remove_folder),
    };
    return run_group(&argc, &argv, "manifest", tests, sizeof tests / sizeof *tests);
}
