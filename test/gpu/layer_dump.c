// Computes the gradients of a GPT of realistic size for comparison with PyTorch. Started by
// dev/ref/layer_gradients.py and llama_gradients.py, which write weights and tokens to a golden
// file. Writes the losses of one micro-batch and the gradient of every tensor to a file of the same
// format. Linked with the CPU backend and with the CUDA backend.
//
//   layer_dump INPUT OUTPUT [--deterministic]
#include "test/golden/golden.h"
#include "test/unit/model_bench.h"

static void die(const char *what, const char *name) {
    fprintf(stderr, "error: %s %s\n", what, name);
    exit(EXIT_ENVIRONMENT);
}

// Opens the model that the file's "config" describes: L, C, NH, T, Vp, B; for Llamas also the
// number of query groups, F, whether queries and keys are normalized, and the head size.
static void open_model(Bench *b, const Golden *g) {
    static const char *const llama[] = {"--normalization",
                                        "RMSNorm",
                                        "--position-embedding-type",
                                        "rope",
                                        "--swiglu",
                                        "--disable-bias-linear",
                                        "--untie-embeddings-and-output-weights",
                                        "--group-query-attention"};
    static const char *const names[] = {"--num-layers",
                                        "--hidden-size",
                                        "--num-attention-heads",
                                        "--seq-length",
                                        "--max-position-embeddings",
                                        "--micro-batch-size"};
    const char *flags[31] = {"--hidden-dropout", "0", "--attention-dropout", "0"};
    char values[6][16], groups[16], width[16], head[16];
    int count = 16;
    int64_t n;
    const int32_t *c = golden_i32(g, "config", &n);
    if (!c || n < 6) die("no valid config in", "the input");
    const int32_t numbers[] = {c[0], c[1], c[2], c[3], c[3], c[5]};
    for (int i = 0; i < 6; i++) {
        snprintf(values[i], sizeof values[i], "%d", numbers[i]);
        flags[4 + 2 * i] = names[i];
        flags[5 + 2 * i] = values[i];
    }
    if (n >= 8) {
        snprintf(groups, sizeof groups, "%d", c[6]);
        snprintf(width, sizeof width, "%d", c[7]);
        memcpy(flags + count, llama, sizeof llama);
        count += (int)(sizeof llama / sizeof *llama);
        const char *sizes[] = {"--num-query-groups", groups, "--ffn-hidden-size", width};
        memcpy(flags + count, sizes, sizeof sizes);
        count += 4;
        if (n >= 9 && c[8]) flags[count++] = "--qk-layernorm";
        snprintf(head, sizeof head, "%d", n >= 10 ? c[9] : c[1] / c[2]);
        flags[count++] = "--kv-channels";
        flags[count++] = head;
    }
    if (!bench_open(b, count, flags, c[4])) die("cannot create a model of", "the input's sizes");
}

static void upload_weights(Bench *b, const Golden *g) {
    for (int i = 0; i < b->gpt.tensors; i++) {
        char key[160];
        int64_t n;
        snprintf(key, sizeof key, "weight.%s", b->gpt.tensor[i].name);
        const uint16_t *stored = golden_bf16(g, key, &n);
        if (!stored || n != bench_numel(b, i)) die("missing or of the wrong size:", key);
        floatX *host = xmalloc((size_t)n * sizeof *host, "weights");
        for (int64_t j = 0; j < n; j++) host[j] = floatX_from_float(bf16_to_float(stored[j]));
        copy_to_device(b->compute, zero_weight(b->zero, i), host, (size_t)n * sizeof *host);
        free(host);
    }
}

// Writes a tensor's fp32 elements, padded to 64 bytes.
static bool write_tensor(Bench *b, const float *tensor, int64_t n, FILE *file) {
    size_t bytes = (size_t)n * sizeof(float), padded = (size_t)round_up64((int64_t)bytes, 64);
    char *host = xcalloc(1, padded, "a tensor");
    copy_to_host(b->compute, host, tensor, bytes);
    stream_synchronize(b->compute);
    bool ok = fwrite(host, 1, padded, file) == padded;
    free(host);
    return ok;
}

// Writes the text header, the losses (B, T) and the gradients.
static bool write_file(Bench *b, FILE *file) {
    enum { TEXT = 8192 };
    char text[TEXT + 1];
    int64_t N = (int64_t)b->gpt.B * b->gpt.T, offset = round_up64(4 * N, 64);
    int length = snprintf(text, sizeof text, "golden 1 %08d\nlosses f32 %lld 0\n", (int)TEXT, (long long)N);
    for (int i = 0; i < b->gpt.tensors; i++) {
        length += snprintf(text + length, sizeof text - (size_t)length, "gradient.%s f32 %lld %lld\n",
                           b->gpt.tensor[i].name, (long long)bench_numel(b, i), (long long)offset);
        if (length >= TEXT) return false;
        offset = round_up64(offset + 4 * bench_numel(b, i), 64);
    }
    memset(text + length, '\n', (size_t)(TEXT - length));
    bool ok = fwrite(text, 1, TEXT, file) == TEXT && write_tensor(b, b->gpt.losses, N, file);
    for (int i = 0; i < b->gpt.tensors && ok; i++)
        ok = write_tensor(b, zero_grad(b->zero, i), bench_numel(b, i), file);
    return ok;
}

int main(int argc, char **argv) {
    Launch launch;
    Golden g;
    Bench b;
    bool deterministic = argc == 4 && !strcmp(argv[3], "--deterministic");
    if (argc < 3 || argc > 4 || (argc == 4 && !deterministic))
        die("usage:", "layer_dump INPUT OUTPUT [--deterministic]");
    if (!golden_open(&g, argv[1])) die("cannot read", argv[1]);
    launch_init(&launch, &argc, &argv);
    open_model(&b, &g);
    device_set_deterministic(b.device, deterministic);
    upload_weights(&b, &g);
    const int32_t *tokens = golden_i32(&g, "tokens", NULL), *targets = golden_i32(&g, "targets", NULL);
    if (!tokens || !targets) die("no tokens or targets in", argv[1]);
    bench_upload(&b, tokens, targets);
    zero_step_begins(b.zero, 1);
    float loss = bench_pass(&b, 1.0f / (float)(b.gpt.B * b.gpt.T), true, true, true);
    FILE *file = fopen(argv[2], "wb");
    if (!file || !write_file(&b, file) || fclose(file) != 0) die("cannot write", argv[2]);
    printf("%s: loss %.6f, %zu bytes allocated, %zu planned\n", device_name(b.device), loss,
           device_allocated(b.device), memory_plan_total(&b.memory_plan));
    bool planned = device_allocated(b.device) == memory_plan_total(&b.memory_plan);
    golden_close(&g);
    bench_close(&b);
    launch_finalize(&launch);
    return planned ? EXIT_DONE : EXIT_ENVIRONMENT;
}
