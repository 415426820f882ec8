// Computes the gradients of a GPT of realistic size for comparison with PyTorch. Started by
// dev/ref/layer_gradients.py and llama_gradients.py, which write weights and tokens to a golden
// file. Writes the losses of one micro-batch and the gradient of every tensor to a file of the same
// format. Linked with the CPU backend and with the CUDA backend.
//
//   layer_dump INPUT OUTPUT [--deterministic] [FLAGS OF THE MODEL...]
#include "test/golden/golden.h"
#include "test/golden/golden_writer.h"
#include "test/unit/model_bench.h"

enum { MORE_FLAGS = 16 };

static void die(const char *what, const char *name) {
    fprintf(stderr, "error: %s %s\n", what, name);
    exit(EXIT_ENVIRONMENT);
}

// Opens the model that the file's "config" describes: L, C, NH, T, Vp, B; for Llamas also the
// number of query groups, F, whether queries and keys are normalized, and the head size.
// `more`: further flags.
static void open_model(Bench *b, const Golden *g, int more_flags, char **more) {
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
    const char *flags[31 + MORE_FLAGS] = {"--hidden-dropout", "0", "--attention-dropout", "0"};
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
    for (int i = 0; i < more_flags; i++) flags[count++] = more[i];
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

// Writes n fp32 elements of device memory.
static bool write_tensor(Bench *b, GoldenWriter *w, const char *name, const float *tensor, int64_t n) {
    float *host = xmalloc((size_t)n * sizeof *host, "a tensor");
    copy_to_host(b->compute, host, tensor, (size_t)n * sizeof *host);
    stream_synchronize(b->compute);
    bool ok = golden_add(w, name, "f32", n, host, sizeof *host);
    free(host);
    return ok;
}

// Writes the losses (B, T) and the gradients.
static bool write_file(Bench *b, const char *path) {
    GoldenWriter w;
    bool ok = golden_create(&w, path) &&
              write_tensor(b, &w, "losses", b->gpt.losses, (int64_t)b->gpt.B * b->gpt.T);
    for (int i = 0; i < b->gpt.tensors && ok; i++) {
        char name[160];
        snprintf(name, sizeof name, "gradient.%s", b->gpt.tensor[i].name);
        ok = write_tensor(b, &w, name, zero_grad(b->zero, i), bench_numel(b, i));
    }
    return golden_finish(&w) && ok;
}

int main(int argc, char **argv) {
    Launch launch;
    Golden g;
    Bench b;
    bool deterministic = argc > 3 && !strcmp(argv[3], "--deterministic");
    int first = deterministic ? 4 : 3;
    if (argc < 3 || argc - first > MORE_FLAGS)
        die("usage:", "layer_dump INPUT OUTPUT [--deterministic] [FLAGS OF THE MODEL...]");
    if (!golden_open(&g, argv[1])) die("cannot read", argv[1]);
    launch_init(&launch, &argc, &argv);
    open_model(&b, &g, argc - first, argv + first);
    device_set_deterministic(b.device, deterministic);
    upload_weights(&b, &g);
    const int32_t *tokens = golden_i32(&g, "tokens", NULL), *targets = golden_i32(&g, "targets", NULL);
    if (!tokens || !targets) die("no tokens or targets in", argv[1]);
    bench_upload(&b, tokens, targets);
    zero_step_begins(b.zero, 1);
    float loss = bench_pass(&b, 1.0f / (float)(b.gpt.B * b.gpt.T), true, true, true);
    if (!write_file(&b, argv[2])) die("cannot write", argv[2]);
    printf("%s: loss %.6f, %zu bytes allocated, %zu planned\n", device_name(b.device), loss,
           device_allocated(b.device), memory_plan_total(&b.memory_plan));
    bool planned = device_allocated(b.device) == memory_plan_total(&b.memory_plan);
    golden_close(&g);
    bench_close(&b);
    launch_finalize(&launch);
    return planned ? EXIT_DONE : EXIT_ENVIRONMENT;
}
