// safetensors: a golden file both ways, hashes, hostile headers, every flipped byte and every truncation, a write that does not fit, and the
// Python package's opinion when it is installed.
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
    return left;  // fails when a test left a file
}

static void write_bytes(const char *path, const void *data, size_t bytes) {
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, bytes, out), bytes);
    assert_int_equal(fclose(out), 0);
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

// A file of this header and so many bytes of data counting up from 0. length: what the first 8 bytes say, -1 for the truth.
static void write_with_header(const char *path, const char *header, int64_t length, size_t data_bytes) {
    static char file[4096];
    uint64_t said = length < 0 ? strlen(header) : (uint64_t)length;
    memcpy(file, &said, 8);
    memcpy(file + 8, header, strlen(header));
    for (size_t i = 0; i < data_bytes; i++) file[8 + strlen(header) + i] = (char)i;
    write_bytes(path, file, 8 + strlen(header) + data_bytes);
}

static void assert_one_line(const Error *err) {
    assert_int_equal(err->code, EXIT_CHECKPOINT);
    assert_null(strchr(err->what, '\n'));
    assert_non_null(strchr(err->what, ';'));
}

// Two tensors, written by hand after the format's description.
#define GOLDEN_HEADER                                                                                   \
    "{\"__metadata__\":{\"k\":\"v\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]}," \
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
    SafeTensor tensors[2] = {{.name = a, .dtype = "F32", .dims = 2, .shape = {2, 1}}, {.name = b, .dtype = "BF16", .dims = 1, .shape = {3}}};
    SafeWriter *w = safe_writer_open(path, tensors, 2, "{\"k\":\"v\"}", err);
    if (!w) return false;
    // Pieces need not be whole tensors.
    bool ok = safe_writer_append(w, GOLDEN_A, 3, err) && safe_writer_append(w, (const char *)GOLDEN_A + 3, 5, err) &&
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

static void golden_is_read(void **state) {
    Folder *f = (Folder *)*state;
    char golden[512];
    write_bytes(f->file, golden, golden_file(golden));
    SafeFile file;
    Error err = {0};
    assert_true(safe_open(&file, f->file, &err));
    assert_int_equal(file.count, 2);
    assert_string_equal(file.metadata, "{\"k\":\"v\"}");
    const SafeTensor *a = &file.tensors[0], *b = &file.tensors[1];
    assert_string_equal(a->name, "a");
    assert_string_equal(b->name, "b\"c");
    assert_string_equal(a->dtype, "F32");
    assert_int_equal(a->dims, 2);
    assert_int_equal(a->shape[0], 2);
    assert_int_equal(a->shape[1], 1);
    float whole[2];
    uint16_t last;
    assert_true(safe_read(&file, a, 0, whole, 8, &err));
    assert_memory_equal(whole, GOLDEN_A, 8);
    assert_true(safe_read(&file, b, 4, &last, 2, &err));
    assert_int_equal(last, 0xffff);
    assert_true(safe_read(&file, b, 6, &last, 0, &err));
    assert_false(safe_read(&file, b, 4, whole, 3, &err));
    assert_one_line(&err);
    assert_false(safe_read(&file, b, UINT64_MAX, whole, 2, &err));

    // Closed and opened again without the table: the ranges are the caller's to remember.
    SafeTensor where = *b;
    safe_drop_tensors(&file);
    safe_suspend(&file);
    assert_true(safe_resume(&file, &err));
    assert_true(safe_read(&file, &where, 2, &last, 2, &err));
    assert_int_equal(last, 0x4000);
    safe_suspend(&file);
    assert_int_equal(truncate(f->file, 100), 0);
    assert_false(safe_resume(&file, &err));
    assert_one_line(&err);
    safe_close(&file);
}

static void no_tensors_and_empty_tensors(void **state) {
    Folder *f = (Folder *)*state;
    Error err = {0};
    uint64_t bytes, xxh3;
    SafeFile file;
    assert_true(safe_writer_close(safe_writer_open(f->file, NULL, 0, NULL, &err), &bytes, &xxh3, &err));
    assert_int_equal(bytes, 16);
    assert_true(safe_open(&file, f->file, &err));
    assert_int_equal(file.count, 0);
    assert_null(file.metadata);
    safe_close(&file);

    char scalar[] = "scalar", none[] = "none";
    SafeTensor tensors[2] = {{.name = none, .dtype = "F32", .dims = 2, .shape = {0, 7}}, {.name = scalar, .dtype = "I64", .dims = 0}};
    SafeWriter *w = safe_writer_open(f->file, tensors, 2, "{}", &err);
    assert_non_null(w);
    int64_t value = -5, got = 0;
    assert_true(safe_writer_append(w, &value, 8, &err));
    assert_true(safe_writer_close(w, &bytes, &xxh3, &err));
    assert_true(safe_open(&file, f->file, &err));
    assert_true(safe_read(&file, &file.tensors[1], 0, &got, 8, &err));
    assert_int_equal(got, -5);
    safe_close(&file);
}

static void wrong_use_of_the_writer(void **state) {
    Folder *f = (Folder *)*state;
    char a[] = "a", b[] = "a";
    SafeTensor tensors[2] = {{.name = a, .dtype = "F32", .dims = 1, .shape = {1}}, {.name = b, .dtype = "F32", .dims = 1, .shape = {1}}};
    Error err = {0};
    uint64_t bytes, xxh3;
    assert_null(safe_writer_open(f->file, tensors, 2, NULL, &err));
    assert_one_line(&err);
    strcpy(tensors[0].dtype, "F31");
    assert_null(safe_writer_open(f->file, tensors, 1, NULL, &err));
    strcpy(tensors[0].dtype, "F32");
    SafeWriter *w = safe_writer_open(f->file, tensors, 1, NULL, &err);  // less data than declared
    assert_false(safe_writer_close(w, &bytes, &xxh3, &err));
    assert_one_line(&err);
    assert_int_not_equal(access(f->file, F_OK), 0);
    w = safe_writer_open(f->file, tensors, 1, NULL, &err);  // more data than declared
    assert_false(safe_writer_append(w, "12345", 5, &err));
    assert_false(safe_writer_append(w, "1234", 4, &err));
    assert_false(safe_writer_close(w, &bytes, &xxh3, &err));
    assert_int_not_equal(access(f->file, F_OK), 0);
    assert_null(safe_writer_open("/nonexistent/x", tensors, 1, NULL, &err));
    assert_non_null(strstr(err.what, "No such file"));
}

typedef struct Hostile {
    const char *header;
    int64_t length;  // -1: right
    size_t data;
    const char *says;
} Hostile;

static void hostile_headers(void **state) {
    static const Hostile cases[] = {
        {"{}", 3, 0, "longer than the file"},
        {"{}", 1LL << 40, 0, "longer than the file"},
        {"{}", -1, 1, "size is not what"},
        {"", -1, 0, "not JSON"},
        {"[]", -1, 0, "not JSON"},
        {"{} x", -1, 0, "not JSON"},
        {"{\"a\":", -1, 0, "not JSON"},
        {"{\"a\":3}", -1, 0, "dtype"},
        {"{\"a\":{\"dtype\":\"Q4\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, "dtype"},
        {"{\"a\":{\"dtype\":\"F32_and_a_very_long_name\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, "dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", -1, 4, "no shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", -1, 4, "list of sizes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]}}", -1, 4, "list of sizes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1e300],\"data_offsets\":[0,4]}}", -1, 4, "list of sizes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[\"1\"],\"data_offsets\":[0,4]}}", -1, 4, "list of sizes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1],\"data_offsets\":[0,4]}}", -1, 4, "four dimensions"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", -1, 0, "fit its shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", -1, 4, "fit its shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", -1, 4, "no data offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", -1, 4, "no data offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", -1, 4, "not a range"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", -1, 4, "not a range"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", -1, 4, "beyond the end"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", -1, 8, "leaves a hole"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4,
         "overlaps"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[2,4]}}", -1, 4,
         "overlaps"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", -1, 2,
         "twice"},
        {"{\"__metadata__\":3}", -1, 0, "__metadata__"},
        {"{\"__metadata__\":{\"a\":3}}", -1, 0, "__metadata__"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", -1, 0, "__metadata__"},
    };
    Folder *f = (Folder *)*state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SafeFile file;
        Error err = {0};
        write_with_header(f->file, cases[i].header, cases[i].length, cases[i].data);
        assert_false(safe_open(&file, f->file, &err));
        assert_one_line(&err);
        assert_non_null(strstr(err.what, f->file));
        if (!strstr(err.what, cases[i].says)) fail_msg("case %zu: '%s' does not say '%s'", i, err.what, cases[i].says);
    }
    // Nesting beyond any sense is refused, not followed down the stack.
    static char deep[4000];
    memset(deep, '[', sizeof deep - 1);
    memcpy(deep, "{\"a\":", 5);
    SafeFile file;
    Error err = {0};
    write_with_header(f->file, deep, -1, 0);
    assert_false(safe_open(&file, f->file, &err));
    // Not a file at all.
    assert_false(safe_open(&file, f->path, &err));
    assert_one_line(&err);
    assert_false(safe_open(&file, "/nonexistent/x", &err));
    assert_non_null(strstr(err.what, "/nonexistent/x"));
}

// Whatever byte is changed: either the file is refused, or all that the header then says can be read.
static void every_flipped_byte(void **state) {
    Folder *f = (Folder *)*state;
    char golden[512], buffer[64];
    size_t bytes = golden_file(golden);
    int refused = 0;
    for (size_t i = 0; i < bytes - 14; i++) {
        for (int bit = 0; bit < 8; bit++) {
            SafeFile file;
            Error err = {0};
            golden[i] ^= (char)(1 << bit);
            write_bytes(f->file, golden, bytes);
            golden[i] ^= (char)(1 << bit);
            if (!safe_open(&file, f->file, &err)) {
                assert_one_line(&err);
                refused++;
                continue;
            }
            for (int t = 0; t < file.count; t++)
                assert_true(safe_read(&file, &file.tensors[t], 0, buffer, file.tensors[t].end - file.tensors[t].begin, &err));
            safe_close(&file);
        }
    }
    assert_true(refused > (int)bytes);
    for (size_t i = 0; i < bytes; i++) {
        SafeFile file;
        Error err = {0};
        write_bytes(f->file, golden, i);
        assert_false(safe_open(&file, f->file, &err));
        assert_one_line(&err);
    }
}

static void a_write_that_does_not_fit(void **state) {
    Folder *f = (Folder *)*state;
    char a[] = "a";
    SafeTensor tensor = {.name = a, .dtype = "F32", .dims = 1, .shape = {100000}};
    struct rlimit before, small;
    Error err = {0};
    float *data = (float *)calloc(100000, 4);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = 200000;
    signal(SIGXFSZ, SIG_IGN);
    SafeWriter *w = safe_writer_open(f->file, &tensor, 1, NULL, &err);
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

// Any tool can read our files. Only where the Python package is installed.
static void python_reads_it(void **state) {
    Folder *f = (Folder *)*state;
    if (system("python3 -c 'import safetensors, numpy' 2>/dev/null") != 0) skip();
    Error err = {0};
    uint64_t bytes, xxh3;
    char command[512];
    assert_true(write_golden(f->file, &bytes, &xxh3, &err));
    snprintf(command, sizeof command,
             "python3 -c \"import safetensors; f = dict(safetensors.deserialize(open('%s', 'rb').read())); a = f['a']; b = f['b\\\"c']; "
             "assert a['dtype'] == 'F32' and list(a['shape']) == [2, 1] and bytes(a['data']).hex() == '0000c03f000000c0'; "
             "assert b['dtype'] == 'BF16' and list(b['shape']) == [3] and bytes(b['data']).hex() == '803f0040ffff'\"",
             f->file);
    assert_int_equal(system(command), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(golden_is_written, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(golden_is_read, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(no_tensors_and_empty_tensors, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(wrong_use_of_the_writer, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(hostile_headers, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(every_flipped_byte, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(a_write_that_does_not_fit, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(python_reads_it, make_folder, remove_folder),
    };
    return cmocka_run_group_tests_name("safetensors", tests, NULL, NULL);
}
