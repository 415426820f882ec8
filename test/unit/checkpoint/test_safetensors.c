// Tests the safetensors writer: a golden file and its hash, incorrect use, and full disks. If the
// Python package is installed, it must read the file.
#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <cmocka.h>

#include "llmc/base/durable.h"
#include "llmc/checkpoint/safetensors.h"
#include "test/unit/folder.h"

typedef struct Folder {
    char path[64], file[96];
} Folder;

static int make_folder(void **state) {
    Folder *f = (Folder *)calloc(1, sizeof *f);
    if (!f) return -1;
    if (folder_make(f->path, sizeof f->path, "test_safetensors")) return -1;
    snprintf(f->file, sizeof f->file, "%s/x.safetensors", f->path);
    *state = f;
    return 0;
}

static int remove_folder(void **state) {
    Folder *f = (Folder *)*state;
    unlink(f->file);
    int left = rmdir(f->path);
    free(f);
    return left;  // nonzero if the test left a file
}

static char *read_bytes(const char *path, size_t *bytes) {
    FILE *in = fopen(path, "rb");
    assert_non_null(in);
    char *data = (char *)malloc(1 << 20);
    assert_non_null(data);
    *bytes = fread(data, 1, 1 << 20, in);
    fclose(in);
    return data;
}

// Another user of a shared folder may have placed a link with the name of a temporary file.
static void replaces_links(void **state) {
    Folder *f = (Folder *)*state;
    const float values[2] = {1, 2};
    char name[] = "a", other[96];
    SafeTensor tensor = {name, "F32", 2, 0};
    size_t bytes;
    Error err = {0};
    snprintf(other, sizeof other, "%s/other", f->path);
    assert_true(durable_write_file(other, "precious", 8, &err));
    assert_int_equal(symlink(other, f->file), 0);
    SafeWriter *writer = safe_writer_open(f->file, &tensor, 1, NULL, &err);
    assert_true(writer && safe_writer_append(writer, values, sizeof values, &err));
    uint64_t written, hash;
    assert_true(safe_writer_close(writer, &written, &hash, &err));
    char *left = read_bytes(other, &bytes);
    assert_int_equal(bytes, 8);
    assert_memory_equal(left, "precious", 8);
    free(left);
    unlink(other);
}

static void assert_one_line(const Error *err) {
    assert_int_equal(err->code, EXIT_CHECKPOINT);
    assert_null(strchr(err->what, '\n'));
    assert_non_null(strchr(err->what, ';'));
}

// Two tensors, encoded by hand from the format's specification.
#define GOLDEN_HEADER \
    "{\"__metadata__\":{\"k\":\"v\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}," \
    "\"b\\\"c\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[8,14]}}"
static const float GOLDEN_A[2] = {1.5f, -2.0f};
static const uint16_t GOLDEN_B[3] = {0x3f80, 0x4000, 0xffff};

static size_t golden_file(char *out) {
    uint64_t padded = (strlen(GOLDEN_HEADER) + 7) / 8 * 8;
    memset(out, ' ', 8 + padded);
    memcpy(out, &padded, 8);
    memcpy(out + 8, GOLDEN_HEADER, strlen(GOLDEN_HEADER));
    memcpy(out + 8 + padded, GOLDEN_A, 8);
    memcpy(out + 8 + padded + 8, GOLDEN_B, 6);
    return 8 + padded + 14;
}

static bool write_golden(const char *path, uint64_t *bytes, uint64_t *xxh3, Error *err) {
    char a[] = "a", b[] = "b\"c";
    SafeTensor tensors[2] = {{a, "F32", 2, 0}, {b, "BF16", 3, 0}};
    SafeWriter *w = safe_writer_open(path, tensors, 2, "{\"k\":\"v\"}", err);
    if (!w) return false;
    // A call may append parts of several tensors.
    bool ok = safe_writer_append(w, GOLDEN_A, 3, err) &&
              safe_writer_append(w, (const char *)GOLDEN_A + 3, 5, err) &&
              safe_writer_append(w, GOLDEN_B, 6, err);
    if (ok) return safe_writer_close(w, bytes, xxh3, err);
    safe_writer_discard(w);
    return false;
}

static void golden_is_written(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    char golden[512];
    uint64_t bytes, xxh3;
    size_t golden_bytes = golden_file(golden), got_bytes;
    assert_true(write_golden(f->file, &bytes, &xxh3, &err));
    char *got = read_bytes(f->file, &got_bytes);
    assert_int_equal(got_bytes, golden_bytes);
    assert_memory_equal(got, golden, golden_bytes);
    assert_int_equal(bytes, golden_bytes);
    assert_true(xxh3 == XXH3_64bits(golden, golden_bytes));
    free(got);
}

static void no_tensors(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    uint64_t bytes, xxh3;
    size_t got;
    assert_true(safe_writer_close(safe_writer_open(f->file, NULL, 0, "{}", &err), &bytes, &xxh3, &err));
    char *text = read_bytes(f->file, &got);
    assert_true(got == bytes && bytes == 8 + 24 && memcmp(text + 8, "{\"__metadata__\":{}}     ", 24) == 0);
    free(text);
}

static void wrong_use_of_the_writer(void **state) {
    Folder *f = (Folder *)*state;
    char a[] = "a";
    SafeTensor tensor = {a, "F32", 1, 0};
    Error err = {0};
    uint64_t bytes, xxh3;
    SafeWriter *w = safe_writer_open(f->file, &tensor, 1, "{}", &err);  // less data than declared
    assert_false(safe_writer_close(w, &bytes, &xxh3, &err));
    assert_one_line(&err);
    assert_int_not_equal(access(f->file, F_OK), 0);
    w = safe_writer_open(f->file, &tensor, 1, "{}", &err);  // more data than declared
    assert_false(safe_writer_append(w, "12345", 5, &err));
    assert_false(safe_writer_append(w, "1234", 4, &err));
    assert_false(safe_writer_close(w, &bytes, &xxh3, &err));
    assert_int_not_equal(access(f->file, F_OK), 0);
    assert_null(safe_writer_open("/nonexistent/x", &tensor, 1, "{}", &err));
    assert_non_null(strstr(err.what, "No such file"));
    assert_true(safe_dtype_bytes("F32") == 4 && safe_dtype_bytes("BF16") == 2 &&
                safe_dtype_bytes("F31") == 0);
}

static void a_write_that_does_not_fit(void **state) {
    Folder *f = (Folder *)*state;
    char a[] = "a";
    SafeTensor tensor = {a, "F32", 100000, 0};
    struct rlimit before, small;
    Error err = {0};
    float *data = (float *)calloc(100000, 4);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = 200000;
    signal(SIGXFSZ, SIG_IGN);
    SafeWriter *w = safe_writer_open(f->file, &tensor, 1, "{}", &err);
    assert_non_null(w);
    setrlimit(RLIMIT_FSIZE, &small);
    bool ok = safe_writer_append(w, data, 400000, &err);
    setrlimit(RLIMIT_FSIZE, &before);
    assert_false(ok);
    assert_one_line(&err);
    assert_non_null(strstr(err.what, "too large"));
    safe_writer_discard(w);
    assert_int_not_equal(access(f->file, F_OK), 0);
    free(data);
}

// Runs only if the Python package is installed.
static void python_reads_it(void **state) {
    Folder *f = (Folder *)*state;
    if (system("python3 -c 'import safetensors, numpy' 2>/dev/null") != 0) skip();
    Error err = {0};
    uint64_t bytes, xxh3;
    char command[512];
    assert_true(write_golden(f->file, &bytes, &xxh3, &err));
    snprintf(command, sizeof command,
             "python3 -c \"import safetensors; f = dict(safetensors.deserialize(open('%s', 'rb').read())); a "
             "= f['a']; b = f['b\\\"c']; "
             "assert a['dtype'] == 'F32' and list(a['shape']) == [2] and bytes(a['data']).hex() == "
             "'0000c03f000000c0'; "
             "assert b['dtype'] == 'BF16' and list(b['shape']) == [3] and bytes(b['data']).hex() == "
             "'803f0040ffff'\"",
             f->file);
    assert_int_equal(system(command), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(golden_is_written, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(replaces_links, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(no_tensors, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(wrong_use_of_the_writer, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(a_write_that_does_not_fit, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(python_reads_it, make_folder, remove_folder),
    };
    return cmocka_run_group_tests_name("safetensors", tests, NULL, NULL);
}
