// Tests token shards: reading and writing Megatron-LM's bytes, random round trips in every dtype,
// appending, and damaged files.
#include <errno.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "dev/lib/shard_writer.h"
#include "llmc/data/shard.h"
#include "test/unit/folder.h"

// The documents [5,6,50256], [], [7,50256] as written by Megatron-LM in u16.
static const uint8_t GOLDEN_BIN[10] = {0x05, 0, 0x06, 0, 0x50, 0xc4, 0x07, 0, 0x50, 0xc4};
static const uint8_t GOLDEN_IDX[90] = {
    0x4d, 0x4d, 0x49, 0x44, 0x49, 0x44, 0x58, 0, 0,                       // magic
    1,    0,    0,    0,    0,    0,    0,    0, 8,                       // version, dtype
    2,    0,    0,    0,    0,    0,    0,    0, 4, 0, 0, 0, 0, 0, 0, 0,  // sequences, boundaries
    3,    0,    0,    0,    2,    0,    0,    0,                          // lengths
    0,    0,    0,    0,    0,    0,    0,    0, 6, 0, 0, 0, 0, 0, 0, 0,  // pointers
    0,    0,    0,    0,    0,    0,    0,    0, 1, 0, 0, 0, 0, 0, 0, 0,
    1,    0,    0,    0,    0,    0,    0,    0, 2, 0, 0, 0, 0, 0, 0, 0};

typedef struct Folder {
    char path[64], prefix[96];
} Folder;

static int make_folder(void **state) {
    Folder *f = (Folder *)calloc(1, sizeof *f);
    if (!f || folder_make(f->path, sizeof f->path, "test_shard")) return -1;
    snprintf(f->prefix, sizeof f->prefix, "%s/x", f->path);
    *state = f;
    return 0;
}

static int remove_folder(void **state) {
    Folder *f = (Folder *)*state;
    int rc = folder_remove(f->path);
    free(f);
    return rc;
}

static void put(const char *prefix, const char *suffix, const void *data, size_t bytes) {
    char path[160];
    snprintf(path, sizeof path, "%s%s", prefix, suffix);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    fclose(file);
}

static void assert_file(const char *prefix, const char *suffix, const void *data, size_t bytes) {
    char path[160];
    uint8_t found[256];
    snprintf(path, sizeof path, "%s%s", prefix, suffix);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fread(found, 1, sizeof found, file), bytes);
    assert_memory_equal(found, data, bytes);
    fclose(file);
}

static bool exists(const char *prefix, const char *suffix) {
    char path[160];
    snprintf(path, sizeof path, "%s%s", prefix, suffix);
    return access(path, F_OK) == 0;
}

// Makes write() return 0 without an error, as the standard allows. Retrying would never end.
static bool takes_nothing;
static const char *full;  // writes to paths that contain this text fail; NULL: none
ssize_t write(int fd, const void *data, size_t bytes) {
    char link[64], path[512] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (full && readlink(link, path, sizeof path - 1) > 0 && strstr(path, full)) {
        errno = ENOSPC;
        return -1;
    }
    return takes_nothing ? (errno = 0) : syscall(SYS_write, fd, data, bytes);
}

static void write_returning_zero(void **state) {
    Folder *f = (Folder *)*state;
    const int32_t tokens[] = {1, 2, 3};
    Error err = {0};
    ShardWriter *w = shard_writer_open(f->prefix, SHARD_U16, &err);
    assert_true(w && shard_writer_add_sequence(w, tokens, 3, &err));
    takes_nothing = true;
    bool closed = shard_writer_close(w, &err);
    takes_nothing = false;
    assert_false(closed);
    assert_int_equal(err.code, EXIT_ENVIRONMENT);
    assert_non_null(strstr(err.what, "No space left"));
    assert_false(exists(f->prefix, ".bin"));
}

static void golden_write(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    ShardWriter *w = shard_writer_open(f->prefix, SHARD_U16, &err);
    assert_non_null(w);
    const int32_t first[3] = {5, 6, 50256}, second[2] = {7, 50256};
    assert_true(shard_writer_add_sequence(w, first, 3, &err));
    shard_writer_end_document(w);
    shard_writer_end_document(w);
    assert_true(shard_writer_add_sequence(w, second, 2, &err));
    shard_writer_end_document(w);
    assert_true(exists(f->prefix, ".bin.tmp"));
    assert_false(exists(f->prefix, ".bin"));
    assert_true(shard_writer_close(w, &err));
    assert_file(f->prefix, ".bin", GOLDEN_BIN, sizeof GOLDEN_BIN);
    assert_file(f->prefix, ".idx", GOLDEN_IDX, sizeof GOLDEN_IDX);
    assert_false(exists(f->prefix, ".bin.tmp") || exists(f->prefix, ".idx.tmp"));
}

// In a shared folder, another user may have planted links to this user's files.
static void replaces_links(void **state) {
    Folder *f = (Folder *)*state;
    const char *suffix[2] = {".bin.tmp", ".idx.tmp"};
    const int32_t tokens[3] = {1, 2, 3};
    Error err = {0};
    char path[160];
    put(f->prefix, ".other", "precious", 8);
    for (int k = 0; k < 2; k++) {
        char target[160];
        snprintf(target, sizeof target, "%s.other", f->prefix);
        snprintf(path, sizeof path, "%s%s", f->prefix, suffix[k]);
        assert_int_equal(k == 0 ? symlink(target, path) : link(target, path), 0);
    }
    ShardWriter *w = shard_writer_open(f->prefix, SHARD_U16, &err);
    assert_non_null(w);
    assert_true(shard_writer_add_sequence(w, tokens, 3, &err));
    assert_true(shard_writer_close(w, &err));
    assert_file(f->prefix, ".other", "precious", 8);
    assert_true(exists(f->prefix, ".bin") && exists(f->prefix, ".idx"));
    snprintf(path, sizeof path, "%s.other", f->prefix);
    unlink(path);
}

static void golden_read(void **state) {
    Folder *f = (Folder *)*state;
    // The second time with a trailing array of modes, as in multimodal shards.
    for (size_t modes = 0; modes <= 2; modes += 2) {
        uint8_t idx[sizeof GOLDEN_IDX + 2] = {0};
        memcpy(idx, GOLDEN_IDX, sizeof GOLDEN_IDX);
        put(f->prefix, ".bin", GOLDEN_BIN, sizeof GOLDEN_BIN);
        put(f->prefix, ".idx", idx, sizeof GOLDEN_IDX + modes);
        Shard s;
        Error err = {0};
        assert_true(shard_open(&s, f->prefix, &err));
        assert_string_equal(s.prefix, f->prefix);
        assert_int_equal(s.dtype, SHARD_U16);
        assert_int_equal(s.sequences, 2);
        assert_int_equal(s.documents, 3);
        assert_int_equal(s.tokens, 5);
        assert_int_equal(shard_length(&s, 0), 3);
        assert_int_equal(shard_length(&s, 1), 2);
        assert_int_equal(shard_position(&s, 0), 0);
        assert_int_equal(shard_position(&s, 1), 3);
        const int64_t boundaries[4] = {0, 1, 1, 2};
        for (int d = 0; d < 4; d++) assert_int_equal(shard_boundary(&s, d), boundaries[d]);
        int32_t tokens[5];
        shard_read(&s, 0, 5, tokens);
        const int32_t expected[5] = {5, 6, 50256, 7, 50256};
        assert_memory_equal(tokens, expected, sizeof expected);
        shard_read(&s, 2, 2, tokens);
        assert_memory_equal(tokens, expected + 2, 2 * sizeof(int32_t));
        shard_close(&s);
    }
}

static void dtypes(void **state) {
    assert_int_equal(shard_dtype_for_vocab(50257), SHARD_U16);
    assert_int_equal(shard_dtype_for_vocab(65499), SHARD_U16);
    assert_int_equal(shard_dtype_for_vocab(65500), SHARD_I32);
    const int sizes[10] = {0, 1, 1, 2, 4, 8, 0, 0, 2, 0};
    for (int code = 0; code < 10; code++) assert_int_equal(shard_dtype_size(code), sizes[code]);
}

static uint32_t next(uint32_t *seed) { return (*seed = *seed * 1664525u + 1013904223u) >> 8; }

// Random sequences and documents fill the write buffer several times. Some are empty.
static void round_trip(void **state) {
    Folder *f = (Folder *)*state;
    const int dtype[6] = {SHARD_U8, SHARD_I8, SHARD_I16, SHARD_U16, SHARD_I32, SHARD_I64};
    const uint32_t limit[6] = {256, 128, 32768, 65536, 1u << 24, 1u << 24};
    enum { N = 40, LONGEST = 700000 };
    int32_t *tokens = (int32_t *)malloc(LONGEST * sizeof *tokens),
            *back = (int32_t *)malloc(LONGEST * sizeof *back);
    for (int k = 0; k < 6; k++) {
        Error err = {0};
        int64_t length[N], total = 0, documents = 0;
        ShardWriter *w = shard_writer_open(f->prefix, dtype[k], &err);
        uint32_t seed = 7;
        for (int i = 0; i < N; i++) {
            length[i] = i % 5 == 3 ? 0 : i == 11 ? LONGEST : (int64_t)(next(&seed) % 90000);
            for (int64_t t = 0; t < length[i]; t++) tokens[t] = (int32_t)(next(&seed) % limit[k]);
            assert_true(shard_writer_add_sequence(w, tokens, length[i], &err));
            total += length[i];
            for (uint32_t e = next(&seed) % 3; e > 0; e--, documents++) shard_writer_end_document(w);
        }
        shard_writer_end_document(w);
        assert_true(shard_writer_close(w, &err));
        Shard s;
        assert_true(shard_open(&s, f->prefix, &err));
        assert_int_equal(s.sequences, N);
        assert_int_equal(s.documents, documents + 1);
        assert_int_equal(s.tokens, total);
        seed = 7;
        for (int i = 0; i < N; i++) {
            if (i % 5 != 3 && i != 11) next(&seed);
            assert_int_equal(shard_length(&s, i), length[i]);
            shard_read(&s, shard_position(&s, i), length[i], back);
            for (int64_t t = 0; t < length[i]; t++) tokens[t] = (int32_t)(next(&seed) % limit[k]);
            assert_memory_equal(back, tokens, (size_t)length[i] * sizeof *back);
            next(&seed);
        }
        shard_close(&s);
    }
    free(tokens);
    free(back);
}

static void ids_above_int32(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    ShardWriter *w = shard_writer_open(f->prefix, SHARD_I64, &err);
    const int32_t tokens[3] = {1, 2, 3};
    assert_true(shard_writer_add_sequence(w, tokens, 3, &err) && shard_writer_close(w, &err));
    const int64_t raw[3] = {INT32_MAX, (int64_t)INT32_MAX + 1, -5};
    put(f->prefix, ".bin", raw, sizeof raw);
    Shard s;
    assert_true(shard_open(&s, f->prefix, &err));
    int32_t back[3];
    shard_read(&s, 0, 3, back);
    assert_int_equal(back[0], INT32_MAX);
    assert_int_equal(back[1], -1);
    assert_int_equal(back[2], -1);
    shard_close(&s);
}

// Appending two shards gives the same bytes as a single writer.
static void append(void **state) {
    Folder *f = (Folder *)*state;
    char part[128], whole[128];
    snprintf(part, sizeof part, "%s-part", f->prefix);
    snprintf(whole, sizeof whole, "%s-whole", f->prefix);
    put(part, ".bin", GOLDEN_BIN, sizeof GOLDEN_BIN);
    put(part, ".idx", GOLDEN_IDX, sizeof GOLDEN_IDX);
    Error err = {0};
    Shard s;
    assert_true(shard_open(&s, part, &err));
    ShardWriter *w = shard_writer_open(whole, SHARD_U16, &err);
    const int32_t open_document[1] = {9};
    assert_true(shard_writer_append(w, &s, &err) && shard_writer_add_sequence(w, open_document, 1, &err));
    assert_true(shard_writer_append(w, &s, &err) && shard_writer_close(w, &err));
    shard_close(&s);
    assert_true(shard_open(&s, whole, &err));
    const int64_t boundaries[8] = {0, 1, 1, 2, 3, 4, 4, 5}, lengths[5] = {3, 2, 1, 3, 2};
    const int32_t ids[11] = {5, 6, 50256, 7, 50256, 9, 5, 6, 50256, 7, 50256};
    int32_t back[11];
    assert_int_equal(s.sequences, 5);
    assert_int_equal(s.documents, 7);
    for (int d = 0; d < 8; d++) assert_int_equal(shard_boundary(&s, d), boundaries[d]);
    for (int i = 0; i < 5; i++) assert_int_equal(shard_length(&s, i), lengths[i]);
    shard_read(&s, 0, 11, back);
    assert_memory_equal(back, ids, sizeof ids);

    w = shard_writer_open(f->prefix, SHARD_I32, &err);
    assert_false(shard_writer_append(w, &s, &err));
    assert_int_equal(err.code, EXIT_DATA);
    shard_writer_discard(w);
    assert_false(exists(f->prefix, ".bin.tmp") || exists(f->prefix, ".idx.tmp"));
    shard_close(&s);
}

// Opens x.bin / x.idx with these bytes and expects a one-line error that contains `words`.
static void expect_damage(Folder *f, const uint8_t *idx, size_t idx_bytes, size_t bin_bytes,
                          const char *words) {
    uint8_t bin[64] = {0};
    memcpy(bin, GOLDEN_BIN, sizeof GOLDEN_BIN);
    put(f->prefix, ".idx", idx, idx_bytes);
    put(f->prefix, ".bin", bin, bin_bytes);
    Shard s;
    Error err = {0};
    if (shard_open(&s, f->prefix, &err)) fail_msg("opened despite: %s", words);
    assert_int_equal(err.code, EXIT_DATA);
    if (!strstr(err.what, words)) fail_msg("'%s' does not say '%s'", err.what, words);
    assert_non_null(strstr(err.what, f->prefix));
    assert_non_null(strchr(err.what, ';'));
    assert_null(strchr(err.what, '\n'));
}

static void damage(Folder *f, size_t at, int64_t value, size_t bytes, const char *words) {
    uint8_t idx[sizeof GOLDEN_IDX];
    memcpy(idx, GOLDEN_IDX, sizeof idx);
    memcpy(idx + at, &value, bytes);
    expect_damage(f, idx, sizeof idx, sizeof GOLDEN_BIN, words);
}

static void corrupt(void **state) {
    Folder *f = (Folder *)*state;
    damage(f, 0, 'X', 1, "MMIDIDX");
    damage(f, 8, 1, 1, "MMIDIDX");
    damage(f, 9, 2, 8, "version 2");
    for (int code = 0; code < 256; code++) {
        if (!shard_dtype_size(code)) damage(f, 17, code, 1, "dtype code");
    }
    damage(f, 17, SHARD_I32, 1, "truncated: sequence 0");
    damage(f, 18, 3, 8, "do not fit");
    damage(f, 18, INT64_MAX, 8, "do not fit");
    damage(f, 18, -1, 8, "do not fit");
    damage(f, 18, INT64_MAX / 12 + 2, 8, "do not fit");
    damage(f, 26, 5, 8, "do not fit");
    damage(f, 26, INT64_MIN, 8, "do not fit");
    damage(f, 26, (1ll << 61) + 4, 8, "do not fit");  // 8 * M overflows to the right size
    damage(f, 34, -3, 4, "negative length");
    damage(f, 34, 4, 4, "points to byte 6");
    damage(f, 34, INT32_MAX, 4, "truncated: sequence 0");
    damage(f, 38, 3, 4, "truncated: sequence 1");
    damage(f, 38, 1, 4, "do not match");
    damage(f, 42, 2, 8, "sequence 0 points to byte 2");
    damage(f, 50, 4, 8, "sequence 1 points to byte 4");
    damage(f, 50, -6, 8, "points to byte -6");
    damage(f, 50, INT64_MAX, 8, "points to byte");
    damage(f, 58, 1, 8, "boundary 0 is 1");
    damage(f, 58, -1, 8, "boundary 0 is -1");
    damage(f, 66, 2, 8, "boundary 2 is 1, less than");
    damage(f, 82, 1, 8, "must equal the number of sequences, 2");
    damage(f, 82, 3, 8, "must equal the number of sequences, 2");
    for (size_t bytes = 0; bytes < sizeof GOLDEN_IDX; bytes++) {
        expect_damage(f, GOLDEN_IDX, bytes, sizeof GOLDEN_BIN, bytes < 34 ? "truncated" : "do not fit");
    }
    for (size_t bytes = 0; bytes < sizeof GOLDEN_BIN; bytes++)
        expect_damage(f, GOLDEN_IDX, sizeof GOLDEN_IDX, bytes, ".bin: truncated");
    expect_damage(f, GOLDEN_IDX, sizeof GOLDEN_IDX, 12, "do not match");
    uint8_t none[34] = {0};  // no sequences and no boundaries
    memcpy(none, GOLDEN_IDX, 18);
    expect_damage(f, none, sizeof none, 0, "no document boundaries");
}

// A randomly damaged index is refused, or its sequences can be read. AddressSanitizer detects reads
// outside the files.
static void fuzz(void **state) {
    Folder *f = (Folder *)*state;
    uint32_t seed = 11;
    int refused = 0;
    put(f->prefix, ".bin", GOLDEN_BIN, sizeof GOLDEN_BIN);
    for (int round = 0; round < 1500; round++) {
        uint8_t idx[sizeof GOLDEN_IDX];
        memcpy(idx, GOLDEN_IDX, sizeof idx);
        for (uint32_t k = next(&seed) % 4 + 1; k > 0; k--)
            idx[next(&seed) % sizeof idx] ^= (uint8_t)(1u << next(&seed) % 8);
        put(f->prefix, ".idx", idx, next(&seed) % 4 ? sizeof idx : next(&seed) % (sizeof idx + 1));
        Shard s;
        Error err = {0};
        if (!shard_open(&s, f->prefix, &err)) {
            refused++;
            assert_int_equal(err.code, EXIT_DATA);
            continue;
        }
        int32_t tokens[10];
        assert_in_range(s.tokens, 0, 10);
        for (int64_t i = 0; i < s.sequences; i++) {
            assert_in_range(shard_position(&s, i) + shard_length(&s, i), 0, s.tokens);
            shard_read(&s, shard_position(&s, i), shard_length(&s, i), tokens);
        }
        shard_close(&s);
    }
    assert_true(refused > 1200 && refused < 1500);
}

static void missing(void **state) {
    Folder *f = (Folder *)*state;
    Shard s;
    Error err = {0};
    assert_false(shard_open(&s, f->prefix, &err));
    assert_int_equal(err.code, EXIT_DATA);
    assert_non_null(strstr(err.what, "x.idx"));
    put(f->prefix, ".jsonl", "{}", 2);
    char file[160];
    snprintf(file, sizeof file, "%s.jsonl", f->prefix);
    assert_false(shard_open(&s, file, &err));
    assert_int_equal(err.code, EXIT_DATA);
    assert_non_null(strstr(err.what, "x.jsonl is a file, not the prefix of a shard; tokenize it with "));
    put(f->prefix, ".idx", GOLDEN_IDX, sizeof GOLDEN_IDX);
    assert_false(shard_open(&s, f->prefix, &err));
    assert_non_null(strstr(err.what, "x.bin"));
    snprintf(file, sizeof file, "%s.idx", f->prefix);
    assert_false(shard_open(&s, file, &err));
    assert_non_null(
        strstr(err.what, "x.idx.idx: No such file or directory; pass the shard's prefix, without"));
    assert_false(shard_open(&s, f->path, &err));
    char nowhere[160];
    snprintf(nowhere, sizeof nowhere, "%s/no/such", f->path);
    assert_null(shard_writer_open(nowhere, SHARD_U16, &err));
    assert_int_equal(err.code, EXIT_ENVIRONMENT);
    assert_null(shard_writer_open(f->prefix, 7, &err));
    assert_int_equal(err.code, EXIT_USAGE);
}

static void empty_shard(void **state) {
    Folder *f = (Folder *)*state;
    Shard s;
    Error err = {0};
    ShardWriter *w = shard_writer_open(f->prefix, SHARD_U16, &err);
    assert_true(shard_writer_close(w, &err));
    assert_true(shard_open(&s, f->prefix, &err));
    assert_int_equal(s.sequences + s.documents + s.tokens, 0);
    shard_close(&s);
}

// Reads a file that is truncated while mapped, in a child process. Returns the exit code (-1 if a
// signal ended it) and the first message that it wrote.
static int read_and_end(const Shard *s, const Site *site, char *said, size_t bytes) {
    int ends[2], status;
    int32_t token;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);  // every write is a separate message
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]);  // later writes must fail when the parent has exited
        mapped_set_site(site);
        shard_read(s, s->tokens - 1, 1, &token);
        _exit(0);
    }
    close(ends[1]);
    ssize_t got = read(ends[0], said, bytes - 1);
    said[got > 0 ? got : 0] = 0;
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void truncated_while_mapped(void **state) {
    Folder *f = (Folder *)*state;
    enum { TOKENS = 50000 };
    static const int32_t tokens[TOKENS];
    char path[160], said[1024], expected[400];
    Shard s, other;
    Error err = {0};
    Site site = {.rank = 3, .node = 1, .gpu = 2, .iteration = 40, .phase = "forward"};
    ShardWriter *w = shard_writer_open(f->prefix, SHARD_U16, &err);
    assert_true(shard_writer_add_sequence(w, tokens, TOKENS, &err));
    assert_true(shard_writer_close(w, &err));
    assert_true(shard_open(&s, f->prefix, &err));
    assert_true(shard_open(&other, f->prefix, &err));  // closing it must not unguard the first mapping
    shard_close(&other);
    assert_int_equal(read_and_end(&s, &site, said, sizeof said), 0);
    snprintf(path, sizeof path, "%s.bin", f->prefix);
    assert_int_equal(truncate(path, 5000), 0);
    assert_int_equal(read_and_end(&s, &site, said, sizeof said), EXIT_DATA);
    snprintf(expected, sizeof expected,
             "error: rank 3 (node 1, gpu 2) iteration 40 read data: %s was truncated while it was read, from "
             "100000 bytes to 5000; ",
             path);
    assert_memory_equal(said, expected, strlen(expected));
    assert_ptr_equal(strchr(said, '\n'), said + strlen(said) - 1);
    assert_int_equal(read_and_end(&s, NULL, said, sizeof said), EXIT_DATA);
    assert_memory_equal(said, "error: read data: ", 18);
    mapped_release(s.data);  // unguarded ranges get the default signal action
    assert_int_not_equal(read_and_end(&s, &site, said, sizeof said), EXIT_DATA);
    shard_close(&s);
}

static void ids_outside_dtype(void **state) {
    Folder *f = (Folder *)*state;
    const int dtype[5] = {SHARD_U8, SHARD_I8, SHARD_I16, SHARD_U16, SHARD_I32};
    const int32_t bad[5] = {256, 128, 32768, 65536, -1};
    for (int k = 0; k < 5; k++) {
        Error err = {0};
        const int32_t tokens[2] = {1, bad[k]};
        ShardWriter *w = shard_writer_open(f->prefix, dtype[k], &err);
        assert_false(shard_writer_add_sequence(w, tokens, 2, &err));
        assert_int_equal(err.code, EXIT_DATA);
        assert_non_null(strstr(err.what, "position 1"));
        shard_writer_discard(w);
    }
}

static void full_disk(void **state) {
    Folder *f = (Folder *)*state;
    const char *suffix[2] = {".bin", ".idx"};
    const int32_t tokens[3] = {1, 2, 3};
    for (int k = 0; k < 2; k++) {
        Error err = {0};
        ShardWriter *w = shard_writer_open(f->prefix, SHARD_U16, &err);
        assert_non_null(w);
        assert_true(shard_writer_add_sequence(w, tokens, 3, &err));
        full = suffix[k];
        bool closed = shard_writer_close(w, &err);
        full = NULL;
        assert_false(closed);
        assert_int_equal(err.code, EXIT_ENVIRONMENT);
        assert_non_null(strstr(err.what, suffix[k]));
        assert_non_null(strstr(err.what, "free disk space"));
        for (int j = 0; j < 2; j++) assert_false(exists(f->prefix, suffix[j]));
        assert_false(exists(f->prefix, ".bin.tmp") || exists(f->prefix, ".idx.tmp"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dtypes),
        cmocka_unit_test_setup_teardown(write_returning_zero, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(golden_write, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(replaces_links, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(golden_read, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(round_trip, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(ids_above_int32, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(append, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(corrupt, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(fuzz, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(missing, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(empty_shard, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(truncated_while_mapped, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(ids_outside_dtype, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(full_disk, make_folder, remove_folder),
    };
    return cmocka_run_group_tests_name("shard", tests, NULL, NULL);
}
