// A reference forward pass of GPT2LMHeadModel in double, computed from a Hugging Face folder with a
// single weight file, without any code of llmc/. Included by test_hf.c.
#pragma once
#include <cjson/cJSON.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct HfFolder {
    char *bytes;  // model.safetensors
    cJSON *header, *config;
    const char *data;
    int L, C, NH, F, P, V;
    double epsilon;
} HfFolder;

static inline char *hf_slurp(const char *folder, const char *name, size_t *bytes) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *in = fopen(path, "rb");
    if (!in) return NULL;
    char *text = (char *)calloc(1, 1 << 22);
    *bytes = fread(text, 1, (1 << 22) - 1, in);
    fclose(in);
    return text;
}

static inline int hf_size(const HfFolder *m, const char *key) {
    return cJSON_GetObjectItem(m->config, key)->valueint;
}

// Opens the weight file of any family.
static inline bool hf_open_weights(HfFolder *m, const char *folder) {
    size_t bytes;
    uint64_t length;
    char *config = hf_slurp(folder, "config.json", &bytes);
    m->bytes = hf_slurp(folder, "model.safetensors", &bytes);
    if (!config || !m->bytes) return false;
    memcpy(&length, m->bytes, 8);
    m->header = cJSON_ParseWithLength(m->bytes + 8, length);
    m->data = m->bytes + 8 + length;
    m->config = cJSON_Parse(config);
    free(config);
    return true;
}

static inline bool hf_open(HfFolder *m, const char *folder) {
    if (!hf_open_weights(m, folder)) return false;
    m->L = hf_size(m, "n_layer");
    m->C = hf_size(m, "n_embd");
    m->NH = hf_size(m, "n_head");
    m->F = hf_size(m, "n_inner");
    m->P = hf_size(m, "n_positions");
    m->V = hf_size(m, "vocab_size");
    m->epsilon = cJSON_GetObjectItem(m->config, "layer_norm_epsilon")->valuedouble;
    return true;
}

static inline void hf_close(HfFolder *m) {
    cJSON_Delete(m->header);
    cJSON_Delete(m->config);
    free(m->bytes);
}

// A tensor as a matrix. `rows` is the first dimension.
typedef struct HfMatrix {
    const char *data;
    bool wide;
} HfMatrix;

static inline HfMatrix hf_tensor(const HfFolder *m, int layer, const char *name, int rows) {
    char full[96];
    if (layer < 0) snprintf(full, sizeof full, "transformer.%s", name);
    else snprintf(full, sizeof full, "transformer.h.%d.%s", layer, name);
    const cJSON *entry = cJSON_GetObjectItemCaseSensitive(m->header, full);
    const cJSON *shape = cJSON_GetObjectItem(entry, "shape"), *dtype = cJSON_GetObjectItem(entry, "dtype");
    const cJSON *offsets = cJSON_GetObjectItem(entry, "data_offsets");
    if (!entry || shape->child->valueint != rows) abort();
    return (HfMatrix){m->data + offsets->child->valueint, strcmp(dtype->valuestring, "F32") == 0};
}

static inline double hf_at(HfMatrix a, int64_t i) {
    uint32_t bits;
    uint16_t half;
    float value;
    if (a.wide) {
        memcpy(&bits, a.data + 4 * i, 4);
    } else {
        memcpy(&half, a.data + 2 * i, 2);
        bits = (uint32_t)half << 16;
    }
    memcpy(&value, &bits, 4);
    return value;
}

// y = LayerNorm(x) for one row.
static inline void hf_norm(const HfFolder *m, int layer, const char *name, const double *x, double *y) {
    char text[32];
    double mean = 0, variance = 0;
    snprintf(text, sizeof text, "%s.weight", name);
    HfMatrix gain = hf_tensor(m, layer, text, m->C);
    snprintf(text, sizeof text, "%s.bias", name);
    HfMatrix bias = hf_tensor(m, layer, text, m->C);
    for (int c = 0; c < m->C; c++) mean += x[c] / m->C;
    for (int c = 0; c < m->C; c++) variance += (x[c] - mean) * (x[c] - mean) / m->C;
    for (int c = 0; c < m->C; c++)
        y[c] = (x[c] - mean) / sqrt(variance + m->epsilon) * hf_at(gain, c) + hf_at(bias, c);
}

// Conv1D for one row: y = x W + b, with W of shape (in, out).
static inline void hf_conv1d(const HfFolder *m, int layer, const char *name, int in, int out, const double *x,
                             double *y) {
    char text[32];
    snprintf(text, sizeof text, "%s.weight", name);
    HfMatrix weight = hf_tensor(m, layer, text, in);
    snprintf(text, sizeof text, "%s.bias", name);
    HfMatrix bias = hf_tensor(m, layer, text, out);
    for (int o = 0; o < out; o++) {
        y[o] = hf_at(bias, o);
        for (int i = 0; i < in; i++) y[o] += x[i] * hf_at(weight, (int64_t)i * out + o);
    }
}

// Attention of one head at position t. out: (HD); qkv: rows of 3C for all positions.
static inline void hf_head(const HfFolder *m, const double *qkv, int t, int head, double *out) {
    int C = m->C, HD = C / m->NH;
    const double *q = qkv + (int64_t)t * 3 * C + head * HD;
    double *score = (double *)calloc((size_t)t + 1, sizeof *score), most = -INFINITY, sum = 0;
    for (int s = 0; s <= t; s++) {
        const double *k = qkv + (int64_t)s * 3 * C + C + head * HD;
        for (int d = 0; d < HD; d++) score[s] += q[d] * k[d] / sqrt(HD);
        most = fmax(most, score[s]);
    }
    for (int s = 0; s <= t; s++) sum += exp(score[s] - most);
    for (int d = 0; d < HD; d++) out[d] = 0;
    for (int s = 0; s <= t; s++) {
        const double *v = qkv + (int64_t)s * 3 * C + 2 * C + head * HD;
        for (int d = 0; d < HD; d++) out[d] += exp(score[s] - most) / sum * v[d];
    }
    free(score);
}

static inline double hf_gelu_new(double x) {
    return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x)));
}

static inline void hf_layer(const HfFolder *m, int l, int T, double *x) {
    int C = m->C, F = m->F;
    double *qkv = (double *)calloc((size_t)T * 3 * (size_t)C, sizeof(double));
    double *wide = (double *)calloc((size_t)(F > C ? F : C), sizeof(double));
    double *row = (double *)calloc((size_t)C, sizeof(double));
    for (int t = 0; t < T; t++) {
        hf_norm(m, l, "ln_1", x + t * C, row);
        hf_conv1d(m, l, "attn.c_attn", C, 3 * C, row, qkv + t * 3 * C);
    }
    for (int t = 0; t < T; t++) {
        for (int h = 0; h < m->NH; h++) hf_head(m, qkv, t, h, wide + h * (C / m->NH));
        hf_conv1d(m, l, "attn.c_proj", C, C, wide, row);
        for (int c = 0; c < C; c++) x[t * C + c] += row[c];
        hf_norm(m, l, "ln_2", x + t * C, row);
        hf_conv1d(m, l, "mlp.c_fc", C, F, row, wide);
        for (int f = 0; f < F; f++) wide[f] = hf_gelu_new(wide[f]);
        hf_conv1d(m, l, "mlp.c_proj", F, C, wide, row);
        for (int c = 0; c < C; c++) x[t * C + c] += row[c];
    }
    free(qkv);
    free(wide);
    free(row);
}

// Computes the logits (T, V) of one sequence.
static inline void hf_logits(const HfFolder *m, const int32_t *tokens, int T, double *logits) {
    int C = m->C;
    HfMatrix words = hf_tensor(m, -1, "wte.weight", m->V), places = hf_tensor(m, -1, "wpe.weight", m->P);
    double *x = (double *)calloc((size_t)(T * C), sizeof(double));
    double *row = (double *)calloc((size_t)C, sizeof(double));
    for (int i = 0; i < T * C; i++)
        x[i] = hf_at(words, (int64_t)tokens[i / C] * C + i % C) + hf_at(places, i);
    for (int l = 0; l < m->L; l++) hf_layer(m, l, T, x);
    for (int t = 0; t < T; t++) {
        hf_norm(m, -1, "ln_f", x + t * C, row);
        for (int v = 0; v < m->V; v++) {
            logits[t * m->V + v] = 0;
            for (int c = 0; c < C; c++) logits[t * m->V + v] += row[c] * hf_at(words, (int64_t)v * C + c);
        }
    }
    free(x);
    free(row);
}
