// Quantizes matrices in FP8 and multiplies them, for comparison with PyTorch. Started by
// dev/ref/fp8_products.py, which writes the matrices to a golden file. Writes codes, scales and
// products to a file of the same format. Linked with the CPU backend and with the CUDA backend.
//
//   fp8_dump INPUT OUTPUT
//
// Input:
//   cases                i32   (cases, 7): m, n, k, Fp8Type of a, Fp8Type of b, 1 if the result is
//                              fp32 (else bf16), 1 for fast accumulation
//   a.I  b.I  bias.I     bf16  (m, k), (n, k), (n) of case I; bias.I may be missing
// Output:
//   scales.I             f32   (4): scale and inverse of a, scale and inverse of b
//   a.I  b.I             u8    codes
//   d.I                  f32   (m, n)
#include "llmc/ops_fp8.h"
#include "test/golden/golden.h"
#include "test/golden/golden_writer.h"

typedef struct Dump {
    Device *device;
    Stream *stream;
    Golden input;
    GoldenWriter output;
    int number;  // of the case
} Dump;
enum { CASE_FIELDS = 7 };

static void die(const char *what, const char *name) {
    fprintf(stderr, "error: %s %s\n", what, name);
    exit(EXIT_ENVIRONMENT);
}

static void *new_memory(Dump *d, size_t bytes) {
    Error err = {0};
    void *memory = device_alloc(d->device, bytes, "a test", &err);
    if (!memory) die(err.what, "");
    return memory;
}

// Uploads tensor `kind`.I. Returns NULL if there is none.
static floatX *upload(Dump *d, const char *kind, int64_t expected) {
    char name[32];
    int64_t n;
    snprintf(name, sizeof name, "%s.%d", kind, d->number);
    const uint16_t *stored = golden_bf16(&d->input, name, &n);
    if (!stored) return NULL;
    if (n != expected) die("wrong size of", name);
    floatX *host = xmalloc((size_t)n * sizeof *host, "a matrix");
    for (int64_t i = 0; i < n; i++) host[i] = floatX_from_float(bf16_to_float(stored[i]));
    floatX *device = new_memory(d, (size_t)n * sizeof *host);
    copy_to_device(d->stream, device, host, (size_t)n * sizeof *host);
    stream_synchronize(d->stream);
    free(host);
    return device;
}

// Adds tensor `kind`.I from device memory.
static void add(Dump *d, const char *kind, const char *type, int64_t count, const void *device, size_t size) {
    char name[32];
    snprintf(name, sizeof name, "%s.%d", kind, d->number);
    void *host = xmalloc((size_t)count * size, name);
    copy_to_host(d->stream, host, device, (size_t)count * size);
    stream_synchronize(d->stream);
    if (!golden_add(&d->output, name, type, count, host, size)) die("cannot write", name);
    free(host);
}

// Quantizes matrix `kind`.I (rows, columns) with one scale. Adds its codes.
static Fp8Matrix quantize(Dump *d, const char *kind, int64_t rows, int64_t columns, Fp8Type type) {
    floatX *x = upload(d, kind, rows * columns);
    if (!x) die("the input has no matrix", kind);
    uint8_t *codes = new_memory(d, (size_t)(rows * columns));
    Fp8Scale *scale = new_memory(d, sizeof *scale);
    Fp8Quantize q = {.N = rows, .C = (int)columns, .x = x, .type = type, .codes = codes, .scale = scale};
    op_fp8_absmax(d->stream, &q);
    op_fp8_scale(d->stream, scale, type, NULL, 0, 0);
    op_fp8_quantize(d->stream, &q);
    add(d, kind, "u8", rows * columns, codes, 1);
    device_free(d->device, x);
    return (Fp8Matrix){.codes = codes, .type = type, .scale = scale};
}

static void add_scales(Dump *d, const Fp8Scale *a, const Fp8Scale *b) {
    Fp8Scale scales[2];
    char name[32];
    snprintf(name, sizeof name, "scales.%d", d->number);
    copy_to_host(d->stream, &scales[0], a, sizeof *a);
    copy_to_host(d->stream, &scales[1], b, sizeof *b);
    stream_synchronize(d->stream);
    const float values[] = {scales[0].scale, scales[0].inverse, scales[1].scale, scales[1].inverse};
    if (!golden_add(&d->output, name, "f32", 4, values, sizeof *values)) die("cannot write", name);
}

static void add_product(Dump *d, const Fp8Product *p) {
    int64_t count = p->m * p->n;
    if (p->sum) {
        add(d, "d", "f32", count, p->sum, sizeof *p->sum);
        return;
    }
    floatX *stored = xmalloc((size_t)count * sizeof *stored, "a product");
    float *wide = xmalloc((size_t)count * sizeof *wide, "a product");
    char name[32];
    snprintf(name, sizeof name, "d.%d", d->number);
    copy_to_host(d->stream, stored, p->d, (size_t)count * sizeof *stored);
    stream_synchronize(d->stream);
    for (int64_t i = 0; i < count; i++) wide[i] = floatX_to_float(stored[i]);
    if (!golden_add(&d->output, name, "f32", count, wide, sizeof *wide)) die("cannot write", name);
    free(stored), free(wide);
}

static void run_case(Dump *d, const int32_t *c) {
    Fp8Product p = {.m = c[0], .n = c[1], .k = c[2], .overwrite = true, .fast = c[6]};
    p.a = quantize(d, "a", p.m, p.k, (Fp8Type)c[3]);
    p.b = quantize(d, "b", p.n, p.k, (Fp8Type)c[4]);
    add_scales(d, p.a.scale, p.b.scale);
    size_t count = (size_t)(p.m * p.n);
    void *result = new_memory(d, count * (c[5] ? sizeof *p.sum : sizeof *p.d));
    *(c[5] ? (void **)&p.sum : (void **)&p.d) = result;
    floatX *bias = upload(d, "bias", p.n);
    p.bias = bias;
    p.workspace = new_memory(d, op_linear_workspace_bytes(p.m, (int)p.n, (int)p.k));
    op_fp8_product(d->stream, &p);
    add_product(d, &p);
    void *memory[] = {(void *)p.a.codes,
                      (void *)p.a.scale,
                      (void *)p.b.codes,
                      (void *)p.b.scale,
                      result,
                      p.workspace,
                      bias};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        if (memory[i]) device_free(d->device, memory[i]);
}

int main(int argc, char **argv) {
    Dump d = {0};
    Error err = {0};
    int64_t n;
    if (argc != 3) die("usage:", "fp8_dump INPUT OUTPUT");
    if (!golden_open(&d.input, argv[1])) die("cannot read", argv[1]);
    if (!golden_create(&d.output, argv[2])) die("cannot write", argv[2]);
    const int32_t *cases = golden_i32(&d.input, "cases", &n);
    if (!cases || n % CASE_FIELDS != 0) die("no valid cases in", argv[1]);
    d.device = device_open(0, NULL, &err);
    if (!d.device || !op_check_fp8(d.device, FP8_WHOLE, &err)) die(err.what, "");
    d.stream = stream_create(d.device, "compute");
    for (; d.number < n / CASE_FIELDS; d.number++) run_case(&d, cases + (int64_t)CASE_FIELDS * d.number);
    if (!golden_finish(&d.output)) die("cannot write", argv[2]);
    printf("%s: %d products\n", device_name(d.device), d.number);
    stream_destroy(d.stream);
    device_close(d.device);
    golden_close(&d.input);
    return EXIT_DONE;
}
