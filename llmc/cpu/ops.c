// The CPU backend of ops.h, part 1: embedding, dropout, LayerNorm, linear layers, GELU. The reference for the GPU's ops, and what CPU ranks
// train with: loops over rows that the compiler vectorises, GEMM in fp32 from OpenBLAS. Called by train_gpt.cu through ops.h.
#include "llmc/cpu/internal.h"

// Elements handled at once by loops that need a multiplier per element: small enough for the stack and the L1 cache.
enum { ROW_CHUNK = 512 };

// --- dropout ---------------------------------------------------------------------------------------------------------------------

// Philox blocks drawn at once: straight-line code per block, word by word in arrays, is what the compiler can vectorise.
enum { DRAW_BLOCKS = 64, DRAW_ELEMENTS = 8 * DRAW_BLOCKS };

// The multipliers of the 8 * blocks elements that start at element 8 * block; blocks <= DRAW_BLOCKS.
static void draw_multipliers(float *multiplier, Dropout dropout, int64_t sample, int64_t block, int blocks) {
    uint32_t words[4][DRAW_BLOCKS];
    uint32_t low = (uint32_t)sample, high = (uint32_t)((uint64_t)sample >> 32), first = (uint32_t)block;
    for (int i = 0; i < blocks; i++) {
        Philox4 bits = philox4x32_10(dropout.seed, PURPOSE_DROPOUT, first + (uint32_t)i, dropout.site, low, high);
        for (int w = 0; w < 4; w++) words[w][i] = bits.v[w];
    }
    uint32_t threshold = (uint32_t)rintf(dropout.p * 65536.0f);
    float kept = 1.0f / (1.0f - dropout.p);
    for (int i = 0; i < blocks; i++) {
        Philox4 bits = {{words[0][i], words[1][i], words[2][i], words[3][i]}};
        for (int e = 0; e < 8; e++) multiplier[8 * i + e] = philox_half(bits, e) >= threshold ? kept : 0.0f;
    }
}

void dropout_multipliers(float *multiplier, Dropout dropout, int64_t sample, int64_t first, int64_t n) {
    if (!(dropout.p > 0.0f)) {
        for (int64_t i = 0; i < n; i++) multiplier[i] = 1.0f;
        return;
    }
    float drawn[DRAW_ELEMENTS];
    for (int64_t done = 0; done < n;) {
        int64_t block = (first + done) / 8, skipped = (first + done) % 8;  // the range need not begin on a block
        int64_t wanted = min64(DRAW_ELEMENTS - skipped, n - done);
        draw_multipliers(drawn, dropout, sample, block, (int)ceil_div64(skipped + wanted, 8));
        memcpy(multiplier + done, drawn + skipped, (size_t)wanted * sizeof(float));
        done += wanted;
    }
}

// --- embedding -------------------------------------------------------------------------------------------------------------------

void op_embedding_forward(Stream *s, floatX *x, const int32_t *tokens, const int32_t *positions, const floatX *wte, const floatX *wpe,
                          int B, int T, int C, Dropout dropout) {
    float keep[ROW_CHUNK];
    for (int64_t row = 0; row < (int64_t)B * T; row++) {
        int64_t b = row / T, t = row % T;
        const floatX *word = wte + (int64_t)tokens[row] * C;
        const floatX *position = wpe + (int64_t)positions[row] * C;
        floatX *x_row = x + row * C;
        for (int64_t c0 = 0; c0 < C; c0 += ROW_CHUNK) {
            int64_t n = min64(ROW_CHUNK, C - c0);
            dropout_multipliers(keep, dropout, dropout.first_sample + b, t * C + c0, n);
            for (int64_t c = 0; c < n; c++) {
                x_row[c0 + c] = floatX_from_float((floatX_to_float(word[c0 + c]) + floatX_to_float(position[c0 + c])) * keep[c]);
            }
        }
    }
}

void op_embedding_backward(Stream *s, float *dwte, float *dwpe, const floatX *dx, const int32_t *tokens, const int32_t *positions,
                           int B, int T, int C, Dropout dropout) {
    float keep[ROW_CHUNK];
    for (int64_t row = 0; row < (int64_t)B * T; row++) {
        int64_t b = row / T, t = row % T;
        float *dword = dwte + (int64_t)tokens[row] * C;
        float *dposition = dwpe + (int64_t)positions[row] * C;
        const floatX *dx_row = dx + row * C;
        for (int64_t c0 = 0; c0 < C; c0 += ROW_CHUNK) {
            int64_t n = min64(ROW_CHUNK, C - c0);
            dropout_multipliers(keep, dropout, dropout.first_sample + b, t * C + c0, n);
            for (int64_t c = 0; c < n; c++) dword[c0 + c] += floatX_to_float(dx_row[c0 + c]) * keep[c];
            for (int64_t c = 0; c < n; c++) dposition[c0 + c] += floatX_to_float(dx_row[c0 + c]) * keep[c];
        }
    }
}

// --- LayerNorm -------------------------------------------------------------------------------------------------------------------

// Mean and reciprocal standard deviation of one row, in two passes: the variance from differences keeps its digits when the mean is large.
static void row_statistics(const floatX *x, int C, float epsilon, float *mean, float *rstd) {
    float sum[LANES] = {0}, squares[LANES] = {0};
    int c = 0;
    for (; c + LANES <= C; c += LANES) {
        for (int l = 0; l < LANES; l++) sum[l] += floatX_to_float(x[c + l]);
    }
    for (; c < C; c++) sum[c % LANES] += floatX_to_float(x[c]);
    float m = join_lanes(sum) / (float)C;
    for (c = 0; c + LANES <= C; c += LANES) {
        for (int l = 0; l < LANES; l++) {
            float d = floatX_to_float(x[c + l]) - m;
            squares[l] += d * d;
        }
    }
    for (; c < C; c++) squares[c % LANES] += (floatX_to_float(x[c]) - m) * (floatX_to_float(x[c]) - m);
    *mean = m;
    *rstd = 1.0f / sqrtf(join_lanes(squares) / (float)C + epsilon);
}

void op_layernorm_forward(Stream *s, floatX *y, float *mean, float *rstd, const floatX *x, const floatX *gamma, const floatX *beta,
                          int64_t N, int C, float epsilon) {
    for (int64_t row = 0; row < N; row++) {
        const floatX *x_row = x + row * C;
        floatX *y_row = y + row * C;
        float m, r;
        row_statistics(x_row, C, epsilon, &m, &r);
        for (int c = 0; c < C; c++) {
            y_row[c] = floatX_from_float((floatX_to_float(x_row[c]) - m) * r * floatX_to_float(gamma[c]) + floatX_to_float(beta[c]));
        }
        mean[row] = m;
        rstd[row] = r;
    }
}

void op_residual_layernorm_forward(Stream *s, floatX *residual_out, floatX *y, float *mean, float *rstd, const floatX *residual,
                                   const floatX *branch, const floatX *gamma, const floatX *beta, int B, int T, int C, float epsilon,
                                   Dropout dropout) {
    float keep[ROW_CHUNK];
    for (int64_t row = 0; row < (int64_t)B * T; row++) {
        int64_t b = row / T, t = row % T;
        for (int64_t c0 = 0; c0 < C; c0 += ROW_CHUNK) {
            int64_t n = min64(ROW_CHUNK, C - c0), at = row * C + c0;
            dropout_multipliers(keep, dropout, dropout.first_sample + b, t * C + c0, n);
            for (int64_t c = 0; c < n; c++) {
                float sum = floatX_to_float(residual[at + c]) + floatX_to_float(branch[at + c]) * keep[c];
                residual_out[at + c] = floatX_from_float(sum);
            }
        }
    }
    op_layernorm_forward(s, y, mean, rstd, residual_out, gamma, beta, (int64_t)B * T, C, epsilon);
}

// One row's two means over the normalised gradient g = dy gamma: of g and of g xhat. Every element of dx needs both.
static void layernorm_backward_means(const floatX *dy, const floatX *x, const floatX *gamma, float mean, float rstd, int C,
                                     float *mean_g, float *mean_g_xhat) {
    float sum_g[LANES] = {0}, sum_g_xhat[LANES] = {0};
    int c = 0;
    for (; c + LANES <= C; c += LANES) {
        for (int l = 0; l < LANES; l++) {
            float g = floatX_to_float(dy[c + l]) * floatX_to_float(gamma[c + l]);
            sum_g[l] += g;
            sum_g_xhat[l] += g * ((floatX_to_float(x[c + l]) - mean) * rstd);
        }
    }
    for (; c < C; c++) {
        float g = floatX_to_float(dy[c]) * floatX_to_float(gamma[c]);
        sum_g[c % LANES] += g;
        sum_g_xhat[c % LANES] += g * ((floatX_to_float(x[c]) - mean) * rstd);
    }
    *mean_g = join_lanes(sum_g) / (float)C;
    *mean_g_xhat = join_lanes(sum_g_xhat) / (float)C;
}

void op_layernorm_backward(Stream *s, floatX *dresidual, floatX *dbranch, float *dgamma, float *dbeta, float *dbias, const floatX *dy, const floatX *x,
                           const floatX *gamma, const float *mean, const float *rstd, int B, int T, int C, Dropout dropout) {
    float keep[ROW_CHUNK];
    for (int64_t row = 0; row < (int64_t)B * T; row++) {
        const floatX *dy_row = dy + row * C, *x_row = x + row * C;
        floatX *dresidual_row = dresidual + row * C;
        float m = mean[row], r = rstd[row], mean_g, mean_g_xhat;
        layernorm_backward_means(dy_row, x_row, gamma, m, r, C, &mean_g, &mean_g_xhat);
        for (int c = 0; c < C; c++) {
            float xhat = (floatX_to_float(x_row[c]) - m) * r;
            float g = floatX_to_float(dy_row[c]) * floatX_to_float(gamma[c]);
            float dx = (g - mean_g - xhat * mean_g_xhat) * r;
            dresidual_row[c] = floatX_from_float(floatX_to_float(dresidual_row[c]) + dx);
        }
        for (int c = 0; c < C; c++) dgamma[c] += floatX_to_float(dy_row[c]) * ((floatX_to_float(x_row[c]) - m) * r);
        for (int c = 0; c < C; c++) dbeta[c] += floatX_to_float(dy_row[c]);
        for (int64_t c0 = 0; dbranch && c0 < C; c0 += ROW_CHUNK) {
            int64_t n = min64(ROW_CHUNK, C - c0);
            dropout_multipliers(keep, dropout, dropout.first_sample + row / T, row % T * C + c0, n);
            for (int64_t c = 0; c < n; c++) {
                dbranch[row * C + c0 + c] = floatX_from_float(floatX_to_float(dresidual_row[c0 + c]) * keep[c]);
            }
        }
        const floatX *branch_row = dbranch ? dbranch + row * C : dresidual_row;
        for (int c = 0; dbias && c < C; c++) dbias[c] += floatX_to_float(branch_row[c]);
    }
}

// --- linear layers ---------------------------------------------------------------------------------------------------------------

// Rows per GEMM: bounds the workspace for any N, and leaves the product in the cache for what follows it.
enum { LINEAR_ROWS = 512 };

size_t op_scratch_bytes(void) { return 0; }
void op_set_scratch(Device *device, void *memory) {}
bool op_check_model(int C, int NH, int HD, int F, int Vp, Error *err) { return true; }

size_t op_linear_workspace_bytes(int64_t max_N, int max_C, int max_OC) {
    int64_t rows = min64(max_N, LINEAR_ROWS);
    int64_t weights = slice_floats((int64_t)max_OC * max_C);
    int64_t inputs = slice_floats(rows * max_C), outputs = slice_floats(rows * max_OC);
    return (size_t)(weights + 2 * inputs + outputs) * sizeof(float);  // backward wants x and dx
}

// One row after its GEMM: adds the bias, rounds, and applies GELU to the rounded value when pre is wanted.
static void linear_epilogue_row(floatX *y, floatX *pre, const float *product, const floatX *bias, int OC) {
    floatX *sum = pre ? pre : y;
    if (bias) {
        for (int o = 0; o < OC; o++) sum[o] = floatX_from_float(product[o] + floatX_to_float(bias[o]));
    } else {
        narrow(sum, product, OC);
    }
    if (pre) op_gelu_forward(NULL, y, pre, OC);
}

void op_linear_forward(Stream *s, floatX *y, floatX *pre, const floatX *x, const floatX *w, const floatX *bias, int64_t N, int C, int OC,
                       void *workspace) {
    float *cursor = workspace;
    int64_t max_rows = min64(N, LINEAR_ROWS);
    const float *w32 = widen(w, (int64_t)OC * C, take_slice(&cursor, (int64_t)OC * C));  // (OC, C)
    float *x_buffer = take_slice(&cursor, max_rows * C);
    float *product = take_slice(&cursor, max_rows * OC);  // (rows, OC)
    for (int64_t row = 0; row < N; row += LINEAR_ROWS) {
        int64_t rows = min64(LINEAR_ROWS, N - row);
        show_progress(s);
        const float *x32 = widen(x + row * C, rows * C, x_buffer);  // (rows, C)
        matmul_nt(rows, OC, C, 1.0f, x32, w32, 0.0f, product);
        for (int64_t i = 0; i < rows; i++) {
            int64_t at = (row + i) * OC;
            linear_epilogue_row(y + at, pre ? pre + at : NULL, product + i * OC, bias, OC);
        }
    }
}

void op_linear_backward(Stream *s, floatX *dx, float *dw, float *dbias, const floatX *dy, const floatX *x, const floatX *w,
                        const floatX *pre, float *dpre_bias, int64_t N, int C, int OC, bool overwrite, void *workspace) {
    float *cursor = workspace;
    int64_t max_rows = min64(N, LINEAR_ROWS);
    float *w_buffer = take_slice(&cursor, (int64_t)OC * C);
    const float *w32 = dx ? widen(w, (int64_t)OC * C, w_buffer) : NULL;  // (OC, C)
    float *x_buffer = take_slice(&cursor, max_rows * C);
    float *dx32 = take_slice(&cursor, max_rows * C);  // (rows, C)
    float *dy_buffer = take_slice(&cursor, max_rows * OC);
    for (int64_t row = 0; row < N; row += LINEAR_ROWS) {
        int64_t rows = min64(LINEAR_ROWS, N - row);
        show_progress(s);
        const float *dy32 = widen(dy + row * OC, rows * OC, dy_buffer);  // (rows, OC)
        const float *x32 = widen(x + row * C, rows * C, x_buffer);       // (rows, C)
        matmul_tn(OC, C, rows, dy32, x32, overwrite && row == 0 ? 0.0f : 1.0f, dw);
        for (int64_t i = 0; dbias && i < rows; i++) {
            for (int o = 0; o < OC; o++) dbias[o] += dy32[i * OC + o];
        }
        if (!dx) continue;
        matmul_nn(rows, C, OC, dy32, w32, 0.0f, dx32);
        if (pre) {
            for (int64_t i = 0; i < rows * C; i++) dx32[i] *= gelu_derivative(floatX_to_float(pre[row * C + i]));
        }
        narrow(dx + row * C, dx32, rows * C);
        for (int64_t i = 0; pre && dpre_bias && i < rows * C; i++) dpre_bias[i % C] += floatX_to_float(dx[row * C + i]);
    }
}

void op_gelu_forward(Stream *s, floatX *y, const floatX *pre, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = floatX_from_float(gelu(floatX_to_float(pre[i])));
}
