// The CPU backend of ops.h, part 3: the language-model head, logits to loss to gradients in one pass over chunks of rows, so that the
// (N, Vp) logits never exist whole. Called by train_gpt.cu through ops.h, in training and in evaluation.
#include "llmc/cpu/internal.h"

// Logits per chunk: 4 MiB of fp32, about what the caches hold; with a large vocabulary at least the rows that keep GEMM efficient.
enum { CHUNK_LOGITS = 1 << 20, CHUNK_MIN_ROWS = 128 };

int64_t op_head_chunk_rows(int64_t N, int Vp) {
    int64_t rows = CHUNK_LOGITS / Vp;
    return min64(N, rows > CHUNK_MIN_ROWS ? rows : CHUNK_MIN_ROWS);
}

size_t op_head_workspace_bytes(int64_t N, int C, int Vp) {
    int64_t rows = op_head_chunk_rows(N, Vp);
    return (size_t)(slice_floats((int64_t)Vp * C) + 2 * slice_floats(rows * C) + slice_floats(rows * Vp)) * sizeof(float);
}

// Rounds one row of logits to floatX in place and returns the largest.
static float round_and_max(float *logits, int Vp) {
    float lane[LANES];
    for (int l = 0; l < LANES; l++) lane[l] = -INFINITY;
    int v = 0;
    for (; v + LANES <= Vp; v += LANES) {
        for (int l = 0; l < LANES; l++) {
            float logit = floatX_to_float(floatX_from_float(logits[v + l]));
            logits[v + l] = logit;
            lane[l] = logit > lane[l] ? logit : lane[l];
        }
    }
    for (; v < Vp; v++) {
        logits[v] = floatX_to_float(floatX_from_float(logits[v]));
        lane[0] = logits[v] > lane[0] ? logits[v] : lane[0];
    }
    float max = lane[0];
    for (int l = 1; l < LANES; l++) max = lane[l] > max ? lane[l] : max;
    return max;
}

// Logits become exp(logit - max) in place; returns their sum.
static float exponentiate(float *logits, float max, int Vp) {
    float lane[LANES] = {0};
    int v = 0;
    for (; v + LANES <= Vp; v += LANES) {
        for (int l = 0; l < LANES; l++) {
            logits[v + l] = exp_approx(logits[v + l] - max);
            lane[l] += logits[v + l];
        }
    }
    for (; v < Vp; v++) {
        logits[v] = exp_approx(logits[v] - max);
        lane[v % LANES] += logits[v];
    }
    return join_lanes(lane);
}

// Cross-entropy of one row; the logits become dlogits = weight (softmax - onehot), rounded to floatX, when a gradient is wanted.
static float cross_entropy_row(float *logits, int32_t target, float weight, bool gradient, int Vp) {
    float max = round_and_max(logits, Vp);
    float target_logit = logits[target];
    float sum = exponentiate(logits, max, Vp);
    if (gradient) {
        float inverse = 1.0f / sum, at_target = logits[target] * inverse - 1.0f;
        for (int v = 0; v < Vp; v++) logits[v] = floatX_to_float(floatX_from_float(weight * (logits[v] * inverse)));
        logits[target] = floatX_to_float(floatX_from_float(weight * at_target));
    }
    return logf(sum) + (max - target_logit);
}

void op_head(Stream *s, float *losses, float *loss_sum, floatX *dx, float *dwte, const floatX *x, const floatX *wte, const int32_t *targets,
             const float *loss_mask, float loss_scale, int64_t N, int C, int Vp, bool overwrite, void *workspace) {
    float *cursor = workspace;
    int64_t chunk = op_head_chunk_rows(N, Vp);
    const float *wte32 = widen(wte, (int64_t)Vp * C, take_slice(&cursor, (int64_t)Vp * C));  // (Vp, C)
    float *x_buffer = take_slice(&cursor, chunk * C), *dx32 = take_slice(&cursor, chunk * C);
    float *logits = take_slice(&cursor, chunk * Vp);  // (rows, Vp)
    float sum = 0.0f;
    for (int64_t row = 0; row < N; row += chunk) {
        int64_t rows = min64(chunk, N - row);
        show_progress(s);
        const float *x32 = widen(x + row * C, rows * C, x_buffer);  // (rows, C)
        matmul_nt(rows, Vp, C, 1.0f, x32, wte32, 0.0f, logits);
        for (int64_t i = row; i < row + rows; i++) {
            float weight = loss_mask ? loss_mask[i] * loss_scale : loss_scale;
            losses[i] = cross_entropy_row(logits + (i - row) * Vp, targets[i], weight, dx || dwte, Vp);
            sum += losses[i] * weight;
        }
        if (dwte) matmul_tn(Vp, C, rows, logits, x32, overwrite && row == 0 ? 0.0f : 1.0f, dwte);
        if (!dx) continue;
        matmul_nn(rows, C, Vp, logits, wte32, 0.0f, dx32);
        narrow(dx + row * C, dx32, rows * C);
    }
    *loss_sum += sum;
}
