// Finds the fastest result of cuBLASLt's heuristic for every matrix product of a training step, on
// random data, for several GPTs and Llamas (see main). Prints a row of llmc/cuda/gemm_table.h for
// each product that becomes more than 1 % faster. Takes about a minute. An optional argument
// selects models whose names contain it.
//
//   build/dev/bench/gemm_search [Llama] > rows.txt
//
// Trials are short on purpose. In a training step, matrix products alternate with kernels that draw
// less power, so the clock is higher than if a product runs at the power limit for a long time.
// Results chosen in long trials were slower in the step.
#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/cuda/common.cuh"
#include "llmc/ops.h"

__global__ void fill_kernel(uint16_t *x, int64_t n, uint32_t seed) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
        Philox4 bits = philox4x32_10(seed, 0, (uint32_t)i, (uint32_t)(i >> 32), 0, 0);
        // Sum of two uniform numbers, with a standard deviation of about 0.4.
        x[i] = bf16_from_float(((float)bits.v[0] + (float)bits.v[1]) * 0x1p-32f - 1.0f);
    }
}

typedef struct Search {
    Device *device;
    Stream *stream;
    Event *start, *stop;
    void *buffer[4];  // a, b, d, aux
    void *bias, *workspace;
    double first_ms, best_ms;
} Search;
enum { BUFFER_BYTES = 1 << 30 };
#define COPY_RATE 4.0e12  // memory traffic of a separate elementwise pass, in bytes/s

enum { FINALISTS = 4, RUNS = 8 };

static double time_answer(Search *s, const Gemm *g, int answer, int runs, bool *exists) {
    *exists = gemm_by_answer(s->stream, g, answer);
    for (int i = 0; i < runs / 2; i++) gemm_by_answer(s->stream, g, answer);
    event_record(s->start, s->stream);
    for (int i = 0; i < runs; i++) gemm_by_answer(s->stream, g, answer);
    event_record(s->stop, s->stream);
    event_synchronize(s->stop);
    return event_elapsed_ms(s->start, s->stop) / runs;
}

typedef struct Trial {
    double ms;
    int answer;
} Trial;

static int by_time(const void *a, const void *b) {
    double difference = ((const Trial *)a)->ms - ((const Trial *)b)->ms;
    return difference < 0 ? -1 : difference > 0;
}

// Returns the index of the fastest result of the heuristic. A short trial selects candidates, which
// are then compared with the first result. *first_ms, *best_ms: times of the first and of the
// returned result.
static int best_answer(Search *s, const Gemm *g, double *first_ms, double *best_ms) {
    Trial trial[GEMM_ANSWERS];
    int count = 0;
    for (; count < GEMM_ANSWERS; count++) {
        bool exists;
        trial[count].ms = time_answer(s, g, count, 4, &exists);
        trial[count].answer = count;
        if (!exists) break;
    }
    qsort(trial, (size_t)count, sizeof *trial, by_time);
    int best = 0;
    bool exists;
    *first_ms = *best_ms = time_answer(s, g, 0, RUNS, &exists);
    for (int i = 0; i < count && i < FINALISTS; i++) {
        if (trial[i].answer == 0) continue;
        double ms = time_answer(s, g, trial[i].answer, RUNS, &exists);
        if (ms < *best_ms) *best_ms = ms, best = trial[i].answer;
    }
    // Measure the first result twice and use the shorter time, so that noise does not favor others.
    double again = time_answer(s, g, 0, RUNS, &exists);
    if (again < *first_ms) *first_ms = again;
    if (*best_ms < 0.99 * *first_ms) return best;
    *best_ms = *first_ms;
    return 0;
}

// Prints a row of the table, or a comment if `counts` is false.
static void print_row(const Gemm *g, const char *what, int answer, bool counts, double first, double best) {
    double flops = 2.0 * (double)g->m * (double)g->n * (double)g->k;
    printf("%s    {%lld, %lld, %lld, %d, %d},  // %s: %.0f -> %.0f us (%.0f -> %.0f TFLOP/s)\n",
           counts ? "" : "//", (long long)g->m, (long long)g->n, (long long)g->k, gemm_form(g), answer, what,
           1e3 * first, 1e3 * best, flops / first / 1e9, flops / best / 1e9);
    fflush(stdout);
}

typedef enum Form {
    FORWARD,
    FORWARD_GELU,
    LOGITS,
    DX,
    DX_GELU,
    DW,
    DW_MORE
} Form;  // DW_MORE: dw of all chunks except the first, which accumulates

static Gemm make_gemm(const Search *s, Form form, int64_t m, int64_t n, int64_t k) {
    Gemm g = {};
    g.a = (const floatX *)s->buffer[0], g.b = (const floatX *)s->buffer[1], g.d = s->buffer[2],
    g.workspace = s->workspace;
    g.m = m, g.n = n, g.k = k;
    g.transpose_b = form <= LOGITS;
    g.transpose_a = g.fp32 = form >= DW;
    g.accumulate = form == DW_MORE;
    g.epilogue = form == FORWARD_GELU   ? GEMM_BIAS_GELU
                 : form == DX_GELU      ? GEMM_DGELU
                 : form <= FORWARD_GELU ? GEMM_BIAS
                                        : GEMM_PLAIN;
    if (form <= FORWARD_GELU) g.bias = (const floatX *)s->bias;
    if (form == FORWARD_GELU || form == DX_GELU) g.aux = (floatX *)s->buffer[3];
    return g;
}

static void search(Search *s, const char *what, int times, Form form, int64_t m, int64_t n, int64_t k) {
    Gemm g = make_gemm(s, form, m, n, k);
    double first, best;
    int answer = best_answer(s, &g, &first, &best);
    print_row(&g, what, answer, answer != 0, first, best);
    s->first_ms += times * first;
    s->best_ms += times * best;
}

// Compares two ways to compute dx of fc2. With GELU' in the epilogue, a separate pass over dx
// computes the bias gradient. Without it, a pass with two reads and one write computes both. A row
// in the table means that the epilogue is faster.
static void search_dgelu(Search *s, int times, int64_t m, int64_t n, int64_t k) {
    Gemm fused = make_gemm(s, DX_GELU, m, n, k), plain = make_gemm(s, DX, m, n, k);
    double first, plain_first, with_epilogue, without, pass = 1e3 * 2.0 * (double)(m * n) / COPY_RATE;
    int fused_answer = best_answer(s, &fused, &first, &with_epilogue),
        plain_answer = best_answer(s, &plain, &plain_first, &without);
    bool pays = with_epilogue + pass < without + 3.0 * pass;
    if (pays) print_row(&fused, "dx of fc2 with GELU'", fused_answer, true, first, with_epilogue);
    else print_row(&plain, "dx of fc2 without GELU'", plain_answer, plain_answer != 0, plain_first, without);
    printf("    // with the epilogue %.0f us, without %.0f us, including the bias gradient\n",
           1e3 * (with_epilogue + pass), 1e3 * (without + 3.0 * pass));
    s->first_ms += times * (pays ? first : plain_first);
    s->best_ms += times * (pays ? with_epilogue : without);
}

static void search_head(Search *s, int64_t C, int64_t V, int64_t N) {
    int64_t R = op_head_chunk_rows(N, (int)V);
    int chunks = (int)ceil_div64(N, R);
    search(s, "logits", chunks, LOGITS, R, V, C);
    search(s, "dx of the head", chunks, DX, R, C, V);
    search(s, "dw of the head", chunks, R < N ? DW_MORE : DW, V, C, R);
}

// Searches the products of a Llama, whose linears have no bias and no fused epilogue.
static void search_llama(Search *s, int L, int64_t C, int64_t QKV, int64_t F, int64_t V, int64_t N) {
    const struct {
        const char *name;
        int64_t columns, rows;  // number of columns of x and of y
    } linear[] = {{"qkv", C, QKV}, {"projection", C, C}, {"fc1", C, 2 * F}, {"fc2", F, C}};
    for (int i = 0; i < 4; i++) {
        char what[32];
        search(s, linear[i].name, L, LOGITS, N, linear[i].rows, linear[i].columns);
        snprintf(what, sizeof what, "dx of %s", linear[i].name);
        search(s, what, L, DX, N, linear[i].columns, linear[i].rows);
        snprintf(what, sizeof what, "dw of %s", linear[i].name);
        search(s, what, L, DW, linear[i].rows, linear[i].columns, N);
    }
    search_head(s, C, V, N);
}

static void search_gpt(Search *s, int L, int64_t C, int64_t N) {
    int64_t F = 4 * C;
    search(s, "qkv", L, FORWARD, N, 3 * C, C);
    search(s, "projection", L, FORWARD, N, C, C);
    search(s, "fc1 with GELU", L, FORWARD_GELU, N, F, C);
    search(s, "fc2", L, FORWARD, N, C, F);
    search_dgelu(s, L, N, F, C);
    search(s, "dx of fc1", L, DX, N, C, F);
    search(s, "dx of projection", L, DX, N, C, C);
    search(s, "dx of qkv", L, DX, N, C, 3 * C);
    search(s, "dw of fc2", L, DW, C, F, N);
    search(s, "dw of fc1", L, DW, F, C, N);
    search(s, "dw of projection", L, DW, C, C, N);
    search(s, "dw of qkv", L, DW, 3 * C, C, N);
    search_head(s, C, 50304, N);
}

// A model to search. QKV is 0 for GPTs.
typedef struct Model {
    const char *name;
    int L, micro_batch;
    int64_t C, QKV, F, V;
} Model;

static void search_model(Search *s, const Model *m) {
    s->first_ms = s->best_ms = 0;
    printf("    // %s, micro-batch %d\n", m->name, m->micro_batch);
    if (m->QKV) search_llama(s, m->L, m->C, m->QKV, m->F, m->V, m->micro_batch * 2048);
    else search_gpt(s, m->L, m->C, m->micro_batch * 2048);
    printf("    // %s: %.2f -> %.2f ms per step\n", m->name, s->first_ms, s->best_ms);
}

int main(int argc, char **argv) {
    Site site = {-1, 0, 0, 0, "gemm search"};
    Error err;
    Search s = {};
    s.device = device_open(0, &site, &err);
    if (!s.device) {
        error_print(&site, err.what);
        return err.code;
    }
    s.stream = stream_create(s.device, "search");
    s.start = event_create_timed(s.device);
    s.stop = event_create_timed(s.device);
    for (int i = 0; i < 4; i++) {
        s.buffer[i] = device_alloc(s.device, BUFFER_BYTES, "matrices", &err);
        fill_kernel<<<1024, 256, 0, stream_handle(s.stream)>>>((uint16_t *)s.buffer[i], BUFFER_BYTES / 2,
                                                               (uint32_t)i);
    }
    s.bias = device_alloc(s.device, 1 << 20, "bias", &err);
    s.workspace = device_alloc(s.device, GEMM_WORKSPACE_BYTES, "workspace", &err);
    printf("    // cuBLASLt %zu on %s\n", cublasLtGetVersion(), device_name(s.device));
    static const Model models[] = {{"125M", 12, 32, 768, 0, 0, 0},
                                   {"350M", 24, 16, 1024, 0, 0, 0},
                                   {"1.3B", 24, 8, 2048, 0, 0, 0},
                                   {"Llama 1.1B", 22, 8, 2048, 2560, 5632, 32000},
                                   {"Llama 125M", 12, 32, 768, 2304, 2048, 50304}};
    for (const Model &m : models) {
        if (argc < 2 || strstr(m.name, argv[1])) search_model(&s, &m);
    }
    return 0;
}
