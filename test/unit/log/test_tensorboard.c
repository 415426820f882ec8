// TensorBoard event files: golden bytes, an independent reader, and a full disk.
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/base/append.h"
#include "llmc/log/tensorboard.h"
#include "test/unit/folder.h"

typedef struct Folder {
    char path[256];
} Folder;

static int make_folder(void **state) {
    Folder *f = (Folder *)calloc(1, sizeof *f);
    if (!f) return -1;
    if (folder_make(f->path, sizeof f->path, "test_tensorboard")) return -1;
    *state = f;
    return 0;
}

static int remove_folder(void **state) {
    Folder *f = (Folder *)*state;
    int rc = folder_remove(f->path);
    free(f);
    return rc;
}

static void to_hex(char *hex, const uint8_t *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) snprintf(hex + 2 * i, 3, "%02x", data[i]);
}

// Bytes written by TensorFlow's record writer for these events.
static void golden_bytes(void **state) {
    uint8_t out[128];
    char hex[257];
    size_t n = tensorboard_encode(out, sizeof out, 1.5, 0, NULL, 0);
    to_hex(hex, out, n);
    assert_string_equal(hex,
                        "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c");
    n = tensorboard_encode(out, sizeof out, 2.5, 100, "lm loss", 10.75f);
    to_hex(hex, out, n);
    assert_string_equal(
        hex, "1d00000000000000602fdf2309000000000000044010642a100a0e0a076c6d206c6f73731500002c411ebe9ca9");
}

// Steps whose varints have different lengths, encoded by hand in the golden record.
static void varint_steps(void **state) {
    const struct {
        int64_t step;
        const char *hex;  // bytes of field 2, including its key; "": omitted
    } cases[] = {{0, ""},
                 {1, "1001"},
                 {127, "107f"},
                 {128, "108001"},
                 {300, "10ac02"},
                 {80000, "1080f104"},
                 {1LL << 40, "10808080808020"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t out[128];
        char hex[257], expected[128];
        size_t n = tensorboard_encode(out, sizeof out, 2.5, cases[i].step, "x", 1.0f);
        to_hex(hex, out + 12, n - 16);
        snprintf(expected, sizeof expected, "090000000000000440%s2a0a0a080a0178150000803f", cases[i].hex);
        assert_string_equal(hex, expected);
        assert_int_equal(out[0], strlen(expected) / 2);
    }
}

static void small_buffer(void **state) {
    uint8_t out[8];
    memset(out, 0xee, sizeof out);
    assert_int_equal(tensorboard_encode(out, sizeof out, 2.5, 100, "lm loss", 10.75f), 45);
    for (int i = 0; i < 8; i++) assert_int_equal(out[i], 0xee);
}

// Returns the only event file of a directory. The caller frees it.
static uint8_t *read_events(const char *folder, size_t *bytes, int *files) {
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    uint8_t *data = NULL;
    *files = 0;
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (strncmp(entry->d_name, "events.out.tfevents.", 20)) continue;
        char path[600];
        struct stat info;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        FILE *file = fopen(path, "rb");
        assert_non_null(file);
        assert_int_equal(fstat(fileno(file), &info), 0);
        free(data);
        data = (uint8_t *)malloc((size_t)info.st_size + 1);
        *bytes = fread(data, 1, (size_t)info.st_size, file);
        assert_int_equal(*bytes, info.st_size);
        fclose(file);
        ++*files;
    }
    closedir(dir);
    return data;
}

// CRC-32C by polynomial division bit by bit, independent of the writer. Its value for "123456789"
// is e3069283.
static uint32_t plain_crc(const uint8_t *data, size_t bytes) {
    uint32_t remainder = 0xffffffffu;  // most significant bit first, input and output reflected
    for (size_t i = 0; i < bytes * 8; i++) {
        uint32_t bit = data[i / 8] >> (i % 8) & 1, top = remainder >> 31;
        remainder = remainder << 1 ^ (bit ^ top ? 0x1edc6f41u : 0);
    }
    uint32_t reflected = 0;
    for (int i = 0; i < 32; i++) reflected |= (remainder >> i & 1) << (31 - i);
    return ~reflected;
}

static uint64_t little(const uint8_t *data, int bytes) {
    uint64_t value = 0;
    for (int i = bytes; i-- > 0;) value = value << 8 | data[i];
    return value;
}

// Returns the number of records. Checks the lengths and checksums of all frames.
static int count_records(const uint8_t *data, size_t bytes) {
    int records = 0;
    for (size_t at = 0; at < bytes; records++) {
        assert_true(at + 16 <= bytes);
        uint64_t length = little(data + at, 8);
        assert_true(at + 16 + length <= bytes);
        const uint8_t *parts[2] = {data + at, data + at + 12};
        const size_t sizes[2] = {8, (size_t)length};
        for (int k = 0; k < 2; k++) {
            uint32_t crc = plain_crc(parts[k], sizes[k]);
            assert_int_equal((uint32_t)little(parts[k] + sizes[k], 4), (crc >> 15 | crc << 17) + 0xa282ead8u);
        }
        at += 16 + (size_t)length;
    }
    return records;
}

static bool contains(const uint8_t *data, size_t bytes, const char *text) {
    return memmem(data, bytes, text, strlen(text)) != NULL;
}

static void file_of_records(void **state) {
    Folder *f = (Folder *)*state;
    char deep[300];
    snprintf(deep, sizeof deep, "%s/a/b/", f->path);
    assert_int_equal(plain_crc((const uint8_t *)"123456789", 9), 0xe3069283u);
    Error err = {0};
    Tensorboard *tb = tensorboard_open(deep, &err), *second = tensorboard_open(deep, &err);
    assert_non_null(tb);
    assert_non_null(second);  // same second, host and process: a different file
    tensorboard_close(second);
    for (int i = 1; i <= 200; i++) tensorboard_scalar(tb, "lm loss", i, i == 7 ? NAN : 10.0 / i);
    char *text = (char *)malloc(5001);  // longer than a one-byte varint
    memset(text, 'y', 5000);
    text[5000] = 0;
    tensorboard_text(tb, "note/text_summary", 0, text);
    free(text);
    tensorboard_close(tb);
    int files;
    size_t bytes;
    uint8_t *data = read_events(deep, &bytes, &files);
    assert_int_equal(files, 2);
    if (count_records(data, bytes) == 1) {  // the second file was read last
        free(data);
        char command[900];
        snprintf(command, sizeof command, "find '%s' -name '*.1' -delete", deep);
        assert_int_equal(system(command), 0);
        data = read_events(deep, &bytes, &files);
    }
    assert_int_equal(count_records(data, bytes), 202);
    assert_true(contains(data, bytes, "brain.Event:2"));
    assert_true(contains(data, bytes, "note/text_summary"));
    free(data);
}

static void no_folder(void **state) {
    Error err = {0};
    assert_null(tensorboard_open("/dev/null/x", &err));
    assert_int_equal(err.code, EXIT_ENVIRONMENT);
    assert_non_null(strstr(err.what, "/dev/null"));
    assert_non_null(strstr(err.what, "; a file is in the way"));
}

// A file size limit imitates a full disk. A record that does not fit must leave no bytes in the
// file. Later records that fit are written.
static void full_disk(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    struct rlimit old, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    Tensorboard *tb = tensorboard_open(f->path, &err);
    assert_non_null(tb);
    small = old;
    small.rlim_cur = 100;  // version record 40 + scalar 45 = 85, so 15 bytes of a second scalar fit
    fflush(stderr);
    int stderr_copy = dup(2), said_through[2];  // a pipe, because the limit applies to files
    char said[1000] = "";
    assert_int_equal(pipe(said_through), 0);
    dup2(said_through[1], 2);
    close(said_through[1]);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    for (int i = 0; i < 3; i++) tensorboard_scalar(tb, "lm loss", 100, 10.75);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    fflush(stderr);
    dup2(stderr_copy, 2);
    close(stderr_copy);
    tensorboard_scalar(tb, "lm loss", 100, 10.75);
    tensorboard_close(tb);
    signal(SIGXFSZ, handler);
    int files;
    size_t bytes;
    uint8_t *data = read_events(f->path, &bytes, &files);
    assert_int_equal(bytes, 40 + 2 * 45);
    assert_int_equal(count_records(data, bytes), 3);
    free(data);
    ssize_t n = read(said_through[0], said, sizeof said - 1);
    close(said_through[0]);
    assert_true(n > 0);
    assert_non_null(strstr(said, "warning: cannot write "));
    assert_ptr_equal(strchr(said, '\n'), said + n - 1);  // one line for two failures
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_bytes),
        cmocka_unit_test(varint_steps),
        cmocka_unit_test(small_buffer),
        cmocka_unit_test_setup_teardown(file_of_records, make_folder, remove_folder),
        cmocka_unit_test(no_folder),
        cmocka_unit_test_setup_teardown(full_disk, make_folder, remove_folder),
    };
    return cmocka_run_group_tests_name("tensorboard", tests, NULL, NULL);
}
