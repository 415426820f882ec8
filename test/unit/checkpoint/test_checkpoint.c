// Tests checkpoints with one rank. State loads in other slices and column ranges than it was saved
// in. Errors name the tensor that cannot be saved or loaded.
#include "llmc/base/version.h"
#include "llmc/checkpoint/zero_slices.h"
#include "test/unit/checkpoint/small_model.h"

static void saved_values_are_loaded(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    assert_int_equal(newest_checkpoint(f->save, &err), NO_CHECKPOINT);
    assert_true(save(f->save, 5, 77, &err));
    assert_loads(f->save, 5, 77);
    assert_int_equal(hidden_entries(f->save), 0);

    // Megatron-LM's tracker has no trailing newline.
    size_t bytes;
    char *tracker = read_bytes(f->tracker, &bytes);
    assert_true(bytes == 1 && tracker[0] == '5');
    free(tracker);

    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    RunState expected = state_of(5);
    assert_memory_equal(checkpoint_state(c), &expected, sizeof expected);  // doubles are bit-exact
    assert_string_equal(checkpoint_arguments(c), "{\"lr\":0.1,\"save\":\"a\\\"b\"}");
    for (int k = 0; k < FIRST_KINDS; k++) assert_true(checkpoint_nodes(c, (SliceKind)k));
    assert_true(checkpoint_check_tensors(c, MODEL, TENSORS, &err));
    checkpoint_close(c);
}

static void any_range_can_be_read(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    for (int piece = 1; piece <= 35; piece += piece < 9 ? 3 : 13) {
        Saved s;
        prepare(&s, f->save, 5, (uint64_t)piece, piece < 7 ? 7 : piece);
        assert_true(save_whole(&s.save, &err));
        Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
        assert_non_null(c);
        for (int t = 0; t < TENSORS; t++) {
            for (int64_t lo = 0; lo <= elements_of(t); lo++) {
                for (int64_t hi = lo; hi <= elements_of(t); hi++)
                    assert_int_equal(read_range(c, t, (SliceKind)((lo + hi) % FIRST_KINDS), lo, hi,
                                                (uint64_t)piece, &err),
                                     1);
            }
        }
        Slice outside[] = {{"wte", SLICE_MASTER, 0, 36, {0, 0}, 0}, {"wte", SLICE_MASTER, -1, 3, {0, 0}, 0},
                           {"wte", SLICE_MASTER, 3, 2, {0, 0}, 0},  {"wtf", SLICE_MASTER, 0, 1, {0, 0}, 0},
                           {"wte", SLICE_MASTER, 0, 1, {3, 3}, 0},  {"wte", SLICE_MASTER, 0, 15, {1, 2}, 0}};
        for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
            assert_false(checkpoint_read(c, &outside[i], NULL, &err));
            assert_one_line(&err);
            assert_non_null(strstr(err.what, outside[i].tensor));
        }
        checkpoint_close(c);
    }
}

// Ranges of columns as tensor parallelism splits them.
typedef struct Layout {
    int64_t width[TENSORS];  // columns per range; the last may have fewer; 0: all columns
    int piece;
} Layout;
static const Layout LAYOUTS[] = {
    {{0, 0, 0, 0}, 9}, {{3, 0, 4, 0}, 4}, {{1, 0, 1, 0}, 7}, {{2, 1, 0, 1}, 5}, {{0, 0, 10, 0}, 30},
};

static void save_layout(const Folder *f, const Layout *layout, uint64_t salt) {
    Saved s;
    Error err = {0};
    prepare_nothing(&s, f->save, 5, salt);
    for (int t = 0; t < TENSORS; t++) {
        int64_t all = MODEL[t].whole[1], width = layout->width[t] ? layout->width[t] : all;
        for (int64_t first = 0; first < all; first += width) {
            int64_t count = first + width < all ? width : all - first;
            add_columns(&s, t, count == all ? (Columns){0, 0} : (Columns){first, count}, layout->piece);
        }
    }
    if (!save_whole(&s.save, &err)) fail_msg("%s", err.what);
}

static void any_columns_can_be_read(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    for (size_t i = 0; i < sizeof LAYOUTS / sizeof *LAYOUTS; i++) {
        save_layout(f, &LAYOUTS[i], i);
        assert_loads(f->save, 5, i);
        Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
        for (int t = 0; t < TENSORS; t += 2) {
            int64_t rows = MODEL[t].whole[0], all = MODEL[t].whole[1];
            for (int64_t first = 0; first < all; first++) {
                for (int64_t count = 1; count <= all - first; count++) {
                    for (int64_t lo = 0; lo <= rows * count; lo += 1 + lo / 3) {
                        for (int64_t hi = lo; hi <= rows * count; hi += 1 + hi / 4) {
                            Slice s = {MODEL[t].name,
                                       (SliceKind)((lo + hi) % FIRST_KINDS),
                                       lo,
                                       hi,
                                       {first, count},
                                       0};
                            assert_int_equal(read_slice(c, &s, i, &err), 1);
                        }
                    }
                }
            }
        }
        checkpoint_close(c);
    }
}

// Saves the parts of two, three and four tensor-parallel ranks, each divided into two shards as by
// ZeRO. Unsplit tensors and each part can be read.
static void parts_of_ranks(void **state) {
    Folder *f = (Folder *)*state;
    static const int split[TENSORS] = {1, 0, 0, -1};  // wte by columns, ln and qkv by rows, b not at all
    for (int ranks = 2; ranks <= 4; ranks++) {
        Saved s;
        Error err = {0};
        prepare_nothing(&s, f->save, 5, 1);
        for (int i = 0; i < TENSORS * ranks; i++) {
            Tensor t = MODEL[i / ranks];
            int dimension = split[i / ranks], rank = i % ranks;
            memcpy(t.local, t.whole, sizeof t.local);
            t.split = dimension;
            if (dimension >= 0) t.offset = t.whole[dimension] * rank / ranks;
            if (dimension >= 0) t.local[dimension] = t.whole[dimension] * (rank + 1) / ranks - t.offset;
            int64_t elements = dimension < 0 && rank > 0 ? 0 : tensor_elements(&t);
            for (int k = 0; k < 2 * FIRST_KINDS; k++) {
                Slice slice = slice_of_part(&t, (SliceKind)(k / 2), elements * (k % 2) / 2,
                                            elements * (k % 2 + 1) / 2);
                slice.tensor = MODEL[i / ranks].name;
                s.slices[s.save.slice_count++] = slice;
            }
        }
        if (!save_whole(&s.save, &err)) fail_msg("%d ranks: %s", ranks, err.what);
        assert_loads(f->save, 5, 1);
        Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
        for (int i = 0; i < s.save.slice_count; i++)
            assert_int_equal(read_slice(c, &s.slices[i], 1, &err), 1);
        checkpoint_close(c);
    }
}

// Tensor names in the shard include the range of columns, unless it has all columns.
static void names_of_columns(void **state) {
    Folder *f = (Folder *)*state;
    size_t bytes;
    save_layout(f, &LAYOUTS[1], 1);
    char *shard = read_bytes(f->shard, &bytes);
    assert_non_null(memmem(shard, bytes, "\"wte|master|4|3+2\"", 18));
    assert_non_null(memmem(shard, bytes, "\"b|master|0\"", 12));
    free(shard);
}

// Some columns of one kind are in no slice or in two.
static void missing_columns(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    Saved s;
    static const struct {
        Columns blocks[2];
        const char *says;
    } cases[] = {
        {{{0, 2}, {3, 2}}, "exp_avg of 'wte' starting at element 2 of 35"},
        {{{1, 2}, {3, 2}}, "starting at element 0 of 35"},
        {{{0, 2}, {2, 2}}, "starting at element 4 of 35"},
        {{{0, 3}, {2, 3}}, "overlap"},
        {{{0, 3}, {0, 4}}, "overlap"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        prepare(&s, f->save, 5, 1, 9);
        int kept = 0;
        for (int k = 0; k < s.save.slice_count; k++) {
            bool dropped = s.slices[k].kind == SLICE_EXP_AVG && strcmp(s.slices[k].tensor, "wte") == 0;
            if (!dropped) s.slices[kept++] = s.slices[k];
        }
        for (int b = 0; b < 2; b++)
            s.slices[kept++] =
                (Slice){"wte", SLICE_EXP_AVG, 0, 7 * cases[i].blocks[b].count, cases[i].blocks[b], 0};
        s.save.slice_count = kept;
        assert_false(save_whole(&s.save, &err));
        assert_one_line(&err);
        if (!strstr(err.what, cases[i].says)) fail_msg("case %zu: %s", i, err.what);
    }
}

// The folders have Megatron-LM's names.
static void folders_of_ranks(void **state) {
    Folder *f = (Folder *)*state;
    static const struct {
        int tensor, pipeline, stages;
        const char *folder;
    } cases[] = {{0, 0, 0, "mp_rank_00"},
                 {3, 0, 1, "mp_rank_03"},
                 {1, 2, 4, "mp_rank_01_002"},
                 {0, 0, 2, "mp_rank_00_000"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Saved s;
        Error err = {0};
        prepare(&s, f->save, 5, i, 9);
        s.save.tensor_rank = cases[i].tensor;
        s.save.pipeline_rank = cases[i].pipeline;
        s.save.pipeline_ranks = cases[i].stages;
        assert_true(save_whole(&s.save, &err));
        char *shard = text_format("%s/iter_0000005/%s/shard_00000_of_00001.safetensors", f->save,
                                  cases[i].folder);
        assert_int_equal(access(shard, F_OK), 0);
        assert_loads(f->save, 5, i);
        free(shard);
    }
}

// Shards do not contain the commit of the build, because dev/experiments/study identifies base runs
// by the hashes of shards. Only the manifest names the build.
static void shards_do_not_name_the_build(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    assert_true(save(f->save, 5, 77, &err));
    const char *files[] = {"manifest.json", "mp_rank_00/shard_00000_of_00001.safetensors"};
    for (int i = 0; i < 2; i++) {
        char *path = text_format("%s/iter_0000005/%s", f->save, files[i]);
        size_t bytes;
        char *file = read_bytes(path, &bytes);
        bool version = memmem(file, bytes, version_number(), strlen(version_number())) != NULL;
        bool commit = memmem(file, bytes, version_commit(), strlen(version_commit())) != NULL;
        assert_true(version == (i == 0) && commit == (i == 0));
        free(file);
        free(path);
    }
}

static void kinds_may_be_missing(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    Saved s;
    prepare(&s, f->save, 5, 1, 9);
    int kept = 0;
    for (int i = 0; i < s.save.slice_count; i++) {
        if (s.slices[i].kind == SLICE_WEIGHT) s.slices[kept++] = s.slices[i];
    }
    s.save.slice_count = kept;
    assert_true(save_whole(&s.save, &err));
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    assert_true(checkpoint_nodes(c, SLICE_WEIGHT));
    assert_false(checkpoint_nodes(c, SLICE_MASTER));
    assert_int_equal(read_range(c, 0, SLICE_WEIGHT, 0, 35, 1, &err), 1);
    assert_int_equal(read_range(c, 0, SLICE_MASTER, 3, 35, 1, &err), 0);
    assert_non_null(strstr(err.what, "master of tensor 'wte' lacks element 3 of 3..35"));
    checkpoint_close(c);
}

// Adds slices of a per-node kind for all tensors that have it and for `nodes` nodes. Each tensor is
// split at element `split`.
static void add_kind(Saved *s, SliceKind kind, int nodes, int64_t split) {
    for (int t = 0; t < TENSORS; t++) {
        for (int node = 0; node < nodes && slice_kind_holds(kind, MODEL[t].dims); node++) {
            int64_t all = elements_of(t), at = split < all ? split : all;
            s->slices[s->save.slice_count++] = (Slice){MODEL[t].name, kind, at, all, {0, 0}, node};
            s->slices[s->save.slice_count++] = (Slice){MODEL[t].name, kind, 0, at, {0, 0}, node};
            assert_true(s->save.slice_count < MAX_SLICES);
        }
    }
}

static void assert_kind_reads(const Checkpoint *c, SliceKind kind, int nodes, uint64_t salt) {
    Error err = {0};
    assert_int_equal(checkpoint_nodes(c, kind), nodes);
    for (int t = 0; t < TENSORS; t++) {
        for (int node = 0; node <= nodes && slice_kind_holds(kind, MODEL[t].dims); node++) {
            for (int64_t lo = 0; lo < elements_of(t); lo += 3) {
                Slice s = {MODEL[t].name, kind, lo, elements_of(t), {0, 0}, node};
                bool there = node < nodes || !slice_kind_per_node(kind);
                assert_int_equal(read_slice(c, &s, salt, &err), there);
            }
        }
    }
}

// Per-node kinds are stored once per node; other kinds are stored once.
static void state_of_nodes(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    Saved s;
    size_t bytes;
    prepare(&s, f->save, 5, 3, 20);
    add_kind(&s, SLICE_RESIDUAL, 3, 4);
    add_kind(&s, SLICE_LOCAL_MASTER, 2, 17);
    add_kind(&s, SLICE_OUTER_MOMENTUM, 1, 9);
    add_kind(&s, SLICE_LOCAL_RESIDUAL, 2, 11);
    if (!save_whole(&s.save, &err)) fail_msg("%s", err.what);
    assert_loads(f->save, 5, 3);
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    assert_kind_reads(c, SLICE_RESIDUAL, 3, 3);
    assert_kind_reads(c, SLICE_LOCAL_MASTER, 2, 3);
    assert_kind_reads(c, SLICE_OUTER_MOMENTUM, 1, 3);
    assert_kind_reads(c, SLICE_LOCAL_RESIDUAL, 2, 3);
    assert_int_equal(checkpoint_nodes(c, SLICE_MASTER), 1);
    assert_int_equal(checkpoint_nodes(c, SLICE_LOCAL_EXP_AVG), 0);
    assert_false(checkpoint_nodes(c, SLICE_LOCAL_EXP_AVG));
    Slice absent = {"wte", SLICE_RESIDUAL, 2, 3, {0, 0}, 3};
    assert_int_equal(read_slice(c, &absent, 3, &err), 0);
    assert_non_null(strstr(err.what, "residual of tensor 'wte' of node 3 lacks element"));
    checkpoint_close(c);
    char *shard = read_bytes(f->shard, &bytes);
    assert_non_null(memmem(shard, bytes, "\"wte|residual|4|node 2\"", 23));
    free(shard);
    char *list = text_format("dev/checkpoint_info %s >%s/list", f->save, f->path);
    assert_int_equal(system(list), 0);
    free(list);
}

// Errors: a node lacks an element or all of its state, or two slices of one node overlap.
static void nodes_hold_equal_numbers_of_ranks(void **state) {
    Folder *f = (Folder *)*state;
    static const struct {
        Slice slice;  // replaces residual 4..35 of 'wte' on node 1
        const char *says;
    } cases[] = {
        {{"wte", SLICE_RESIDUAL, 5, 35, {0, 0}, 1},
         "residual of 'wte' of node 1 starting at element 4 of 35"},
        {{"wte", SLICE_RESIDUAL, 4, 35, {0, 0}, 4},
         "residual of 'wte' of node 1 starting at element 4 of 35"},
        {{"wte", SLICE_RESIDUAL, 3, 35, {0, 0}, 1}, "overlap"},
        {{"wte", SLICE_RESIDUAL, 4, 35, {0, 0}, 2}, "overlap"},
        {{"wte", SLICE_RESIDUAL, 4, 35, {0, 0}, -1}, "invalid node"},
        {{"wte", SLICE_RESIDUAL, 4, 35, {0, 0}, 1 << 20}, "invalid node"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Error err = {0};
        Saved s;
        prepare(&s, f->save, 5, 3, 20);
        int first = s.save.slice_count;
        add_kind(&s, SLICE_RESIDUAL, 3, 4);
        assert_int_equal(s.slices[first + 2].node, 1);
        s.slices[first + 2] = cases[i].slice;
        assert_false(save_whole(&s.save, &err));
        assert_one_line(&err);
        if (!strstr(err.what, cases[i].says)) fail_msg("case %zu: %s", i, err.what);
    }
    // Node 2 has only one tensor.
    Error err = {0};
    Saved s;
    prepare(&s, f->save, 5, 3, 20);
    add_kind(&s, SLICE_RESIDUAL, 2, 4);
    s.slices[s.save.slice_count++] = (Slice){"h.0|qkv", SLICE_RESIDUAL, 0, 33, {0, 0}, 2};
    assert_false(save_whole(&s.save, &err));
    assert_non_null(strstr(err.what, "residual of 'wte' of node 2 starting at element 0"));
    // Node 1 is missing.
    prepare(&s, f->save, 5, 3, 20);
    int first = s.save.slice_count;
    add_kind(&s, SLICE_RESIDUAL, 2, 4);
    for (int i = first; i < s.save.slice_count; i++) s.slices[i].node *= 2;
    assert_false(save_whole(&s.save, &err));
    assert_non_null(strstr(err.what, "residual of 'wte' of node 1 starting at element 0"));
}

// A save that could not be loaded fails before any file gets its final name.
static void slices_must_fit(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    assert_true(save(f->save, 5, 1, &err));
    static const struct {
        Slice slice;
        const char *says;
    } cases[] = {
        {{"wte", SLICE_MASTER, 0, 10, {0, 0}, 0}, "overlap"},
        {{"wte", SLICE_MASTER, 1, 9, {0, 0}, 0}, "starting at element 0 of 35"},
        {{"wte", SLICE_MASTER, 0, 36, {0, 0}, 0}, "this is a bug"},
        {{"wte", SLICE_MASTER, -1, 9, {0, 0}, 0}, "this is a bug"},
        {{"wte", SLICE_MASTER, 9, 8, {0, 0}, 0}, "this is a bug"},
        {{"none", SLICE_MASTER, 0, 9, {0, 0}, 0}, "this is a bug"},
        {{"wte", SLICE_KINDS, 0, 9, {0, 0}, 0}, "this is a bug"},
        {{"wte", SLICE_MASTER, 0, 9, {1, 3}, 0}, "overlap"},
        {{"wte", SLICE_MASTER, 0, 9, {0, 4}, 0}, "overlap"},
        {{"wte", SLICE_MASTER, 0, 9, {4, 2}, 0}, "this is a bug"},
        {{"wte", SLICE_MASTER, 0, 9, {-1, 2}, 0}, "this is a bug"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Saved s;
        prepare(&s, f->save, 6, 2, 9);
        assert_int_equal(s.slices[0].hi, 9);
        s.slices[0] = cases[i].slice;
        // The slice of a nonexistent tensor cannot be filled.
        if (strcmp(cases[i].slice.tensor, "none") != 0)
            assert_int_equal(strcmp(s.slices[0].tensor, "wte"), 0);
        assert_false(save_whole(&s.save, &err));
        assert_one_line(&err);
        if (!strstr(err.what, cases[i].says)) fail_msg("case %zu: %s", i, err.what);
        assert_int_equal(hidden_entries(f->save), 0);
        assert_loads(f->save, 5, 1);
    }
}

static void another_model_is_named(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    assert_true(save(f->save, 5, 1, &err));
    Checkpoint *c = open_exactly(f->save, 5, MPI_COMM_SELF, &err);
    Tensor other[TENSORS + 1];
    memcpy(other, MODEL, sizeof MODEL);
    other[1].whole[0] = 14;
    assert_false(checkpoint_check_tensors(c, other, TENSORS, &err));
    assert_non_null(strstr(err.what, "parameter 1 is 'ln \"w\"' (13), but this model's is 'ln \"w\"' (14)"));
    assert_null(strstr(err.what, "keep that product"));
    assert_one_line(&err);
    other[1] = MODEL[1];
    other[0].whole[0] += 128;
    assert_false(checkpoint_check_tensors(c, other, TENSORS, &err));
    assert_non_null(strstr(err.what, "--tensor-model-parallel-size: keep that product"));
    other[0] = MODEL[0];
    strcpy(other[3].name, "c");
    assert_false(checkpoint_check_tensors(c, other, TENSORS, &err));
    assert_non_null(strstr(err.what, "parameter 3 is 'b' (1), but this model's is 'c' (1)"));
    assert_false(checkpoint_check_tensors(c, MODEL, TENSORS - 1, &err));
    assert_non_null(strstr(err.what, "this model's is nothing"));
    other[3] = MODEL[3];
    other[4] = (Tensor){.name = "more", .dims = 1, .whole = {2, 1}};
    assert_false(checkpoint_check_tensors(c, other, TENSORS + 1, &err));
    assert_non_null(strstr(err.what, "is nothing, but this model's is 'more' (2)"));
    checkpoint_close(c);
}

static void trackers(void **state) {
    enum { BAD = CHECKPOINT_UNREADABLE };
    static const struct {
        const char *text;
        int64_t iteration;
    } cases[] = {{"5", 5},          {"0000012\n", 12},
                 {"release", 0},    {"release\n", 0},
                 {"0", 0},          {"", BAD},
                 {"\n", BAD},       {"-5", BAD},
                 {"5x", BAD},       {"5 6", BAD},
                 {"1e3", BAD},      {"+5", BAD},
                 {"releases", BAD}, {"99999999999999999999", BAD}};
    Folder *f = (Folder *)*state;
    Error err;
    assert_int_equal(mkdir(f->save, 0777), -1);
    snprintf(f->tracker, sizeof f->tracker, "%s/latest_checkpointed_iteration.txt", f->path);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memset(&err, 0, sizeof err);
        write_bytes(f->tracker, cases[i].text, strlen(cases[i].text));
        assert_int_equal(newest_checkpoint(f->path, &err), cases[i].iteration);
        if (cases[i].iteration == BAD) assert_one_line(&err);
    }
    write_bytes(f->tracker, "1\0", 2);
    assert_int_equal(newest_checkpoint(f->path, &err), CHECKPOINT_UNREADABLE);
    static char big[10000];
    write_bytes(f->tracker, big, sizeof big);
    assert_int_equal(newest_checkpoint(f->path, &err), CHECKPOINT_UNREADABLE);
    unlink(f->tracker);
    mkdir(f->tracker, 0777);
    assert_int_equal(newest_checkpoint(f->path, &err), CHECKPOINT_UNREADABLE);
    assert_one_line(&err);
}

static void release_and_renamed_folders(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    char from[160], to[160];
    assert_true(save(f->save, 5, 1, &err));
    snprintf(from, sizeof from, "%s/iter_0000005", f->save);
    snprintf(to, sizeof to, "%s/iter_0000006", f->save);
    assert_int_equal(rename(from, to), 0);
    assert_null(open_exactly(f->save, 5, MPI_COMM_SELF, &err));
    assert_non_null(strstr(err.what, "has no checkpoint of iteration 5 (existing iterations: 6); "));
    assert_null(open_exactly(f->save, 6, MPI_COMM_SELF, &err));
    assert_one_line(&err);
    assert_non_null(strstr(err.what, "iteration 5"));
    snprintf(from, sizeof from, "%s/release", f->save);
    assert_int_equal(rename(to, from), 0);
    write_bytes(f->tracker, "release", 7);
    assert_int_equal(newest_checkpoint(f->save, &err), 0);
    Checkpoint *c = open_exactly(f->save, 0, MPI_COMM_SELF, &err);
    assert_non_null(c);
    assert_int_equal(read_all(c, 1), 1);
    checkpoint_close(c);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(saved_values_are_loaded, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(any_range_can_be_read, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(any_columns_can_be_read, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(parts_of_ranks, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(names_of_columns, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(missing_columns, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(folders_of_ranks, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(shards_do_not_name_the_build, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(kinds_may_be_missing, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(state_of_nodes, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(nodes_hold_equal_numbers_of_ranks, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(slices_must_fit, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(another_model_is_named, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(trackers, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(release_and_renamed_folders, make_folder, remove_folder),
    };
    return run_group(&argc, &argv, "checkpoint", tests, sizeof tests / sizeof *tests);
}
