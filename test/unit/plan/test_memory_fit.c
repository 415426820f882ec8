// The memory plan at run time: a training step allocates exactly the planned memory. If a plan does
// not fit into artificial limits, a one-line error says how much is missing and which settings
// would fit.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <sys/resource.h>
#include <unistd.h>

#include "llmc/ranks/launch.h"
#include "llmc/plan/memory_fit.h"
#include "test/unit/model_bench.h"

#define COUNT(list) ((int)(sizeof(list) / sizeof((list)[0])))
#define MODEL \
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16", \
        "--max-position-embeddings", "16"

static void upload_something(Bench *b) {
    int N = b->gpt.B * b->gpt.T;
    int32_t *ids = calloc((size_t)N, sizeof *ids);
    for (int i = 0; i < N; i++) ids[i] = (i * 7 + 3) % 31;
    bench_upload(b, ids, ids);
    free(ids);
}

// --- what a step allocates ------------------------------------------------------------------

static void expect_plan(int count, const char *const *flags) {
    Bench b;
    assert_true(bench_open(&b, count, flags, 31));
    gpt_init_weights(&b.gpt, 7, (Peers){MPI_COMM_SELF, 0, NULL});
    zero_init_master_weights(b.zero);
    upload_something(&b);
    for (int step = 1; step <= 2; step++) {
        zero_step_begins(b.zero, step);
        bench_pass(&b, 0.1f, true, true, true);
        zero_update(b.zero, 1e-3, 1e-3, 0.0);
        assert_int_equal(zero_step_status(b.zero, 0).applied, 1);
    }
    bench_pass(&b, 0.1f, false, false, true);  // evaluation
    assert_int_equal(device_allocated(b.device), memory_plan_total(&b.memory_plan));
    bench_close(&b);
}

static void test_run_allocates_exactly_its_plan(void **state) {
    static const char *const plain[] = {MODEL, "--micro-batch-size", "2"};
    static const char *const dropping[] = {MODEL, "--micro-batch-size",  "3",  "--hidden-dropout",
                                           "0.1", "--attention-dropout", "0.1"};
    static const char *const full[] = {MODEL, "--micro-batch-size", "2", "--recompute-granularity", "full"};
    static const char *const quantized[] = {MODEL,
                                            "--micro-batch-size",
                                            "2",
                                            "--quantized-weights",
                                            "--quantized-gradients",
                                            "--hadamard-transform"};
    expect_plan(COUNT(plain), plain);
    expect_plan(COUNT(dropping), dropping);
    expect_plan(COUNT(full), full);
    expect_plan(COUNT(quantized), quantized);
}

// device_alloc counts all allocations, even freed ones, so a buffer outside the plan is detected.
static void test_allocations_are_counted(void **state) {
    Error err = {0};
    Device *device = device_open(0, NULL, &err);
    assert_int_equal(device_allocated(device), 0);
    for (int i = 0; i < 3; i++) device_free(device, device_alloc(device, 1000, "a test", &err));
    assert_int_equal(device_allocated(device), 3000);
    assert_null(device_alloc(device, (size_t)1 << 60, "a test", &err));
    assert_int_equal(device_allocated(device), 3000);
    device_close(device);
}

// --- what would fit -------------------------------------------------------------------------

enum { FIXED = 1000, PER_SEQUENCE = 100, PER_SEQUENCE_FULL = 20, KEPT_FULL = 50 };

static size_t made_up_bytes(const Config *c, const Mesh *mesh) {
    if (c->recompute_granularity == RECOMPUTE_FULL)
        return (size_t)(KEPT_FULL + PER_SEQUENCE_FULL * c->micro_batch_size);
    return (size_t)(PER_SEQUENCE * c->micro_batch_size);
}

static Config batch_of(int micro_batch, int global_batch, int dp_size) {
    Config c;
    memset(&c, 0, sizeof c);
    c.micro_batch_size = micro_batch;
    c.global_batch_size = global_batch;
    c.dp_size = dp_size;
    return c;
}

static void expect_advice(const Config *config, size_t share, const char *expected) {
    char text[512];
    size_t planned = FIXED + made_up_bytes(config, NULL);
    assert_true(planned > share);
    memory_advice(text, sizeof text, config, planned, share, (ModelPlan){made_up_bytes, NULL});
    assert_string_equal(text, expected);
}

static void test_advice(void **state) {
    Config c = batch_of(12, 48, 2);  // 24 sequences per rank; divisors below 12: 8, 6, 4, 3, 2, 1
    expect_advice(&c, 2199, "--micro-batch-size 8 fits, and so does --recompute-granularity full");
    expect_advice(&c, 1800, "--micro-batch-size 8 fits, and so does --recompute-granularity full");
    expect_advice(&c, 1799, "--micro-batch-size 6 fits, and so does --recompute-granularity full");
    expect_advice(&c, 1290, "--micro-batch-size 2 fits, and so does --recompute-granularity full");
    expect_advice(&c, 1289, "--micro-batch-size 2 fits");
    expect_advice(&c, 1100, "--micro-batch-size 1 fits");
    expect_advice(&c, 1099, "--micro-batch-size 2 with --recompute-granularity full fits");
    expect_advice(&c, 1070, "--micro-batch-size 1 with --recompute-granularity full fits");
    expect_advice(&c, 1069,
                  "no setting fits: --micro-batch-size 1 with --recompute-granularity full needs 0.0 MiB "
                  "more; try --data-parallel-sharding-strategy optim_grads_params, --optimizer-cpu-offload, "
                  "--tensor-model-parallel-size, --pipeline-model-parallel-size, more GPUs, or a smaller "
                  "model");
    c.recompute_granularity = RECOMPUTE_SELECTIVE;
    c.recompute_activations = true;
    expect_advice(&c, 1290,
                  "--micro-batch-size 2 fits, and so does --recompute-granularity full instead of "
                  "--recompute-activations");
    c.recompute_activations = false;
    c.recompute_granularity = RECOMPUTE_FULL;
    expect_advice(&c, 1289, "--micro-batch-size 8 fits");
    c = batch_of(1, 2, 2);
    expect_advice(&c, 1080, "--recompute-granularity full fits");
    c = batch_of(3, 12, 2);  // the next smaller size divides too
    expect_advice(&c, 1200, "--micro-batch-size 2 fits, and so does --recompute-granularity full");
    // With a batch ramp-up the micro-batch size must divide every batch size: 4 divides the 24
    // sequences per rank, but not the 6 sequences at the start and per step of the ramp-up.
    c = batch_of(6, 48, 2);
    expect_advice(&c, 1450, "--micro-batch-size 4 fits, and so does --recompute-granularity full");
    c.rampup_start = 12;
    c.rampup_increment = 24;
    expect_advice(&c, 1450, "--micro-batch-size 3 fits, and so does --recompute-granularity full");
    c.rampup_start = 24;
    c.rampup_increment = 12;
    expect_advice(&c, 1450, "--micro-batch-size 3 fits, and so does --recompute-granularity full");
}

// Returns the bytes of a stage's activations. Smaller micro-batches: more of them are in flight.
static size_t bytes_in_flight(const Config *c, const Mesh *mesh) {
    return made_up_bytes(c, mesh) * (size_t)(c->micro_batches < 2 ? c->micro_batches : 2);
}

static void test_advice_for_a_pipeline(void **state) {
    Config c = batch_of(2, 4, 2);
    c.micro_batches = 1;
    char text[512];
    size_t planned = FIXED + bytes_in_flight(&c, NULL);
    memory_advice(text, sizeof text, &c, planned, planned - 1, (ModelPlan){bytes_in_flight, NULL});
    assert_string_equal(text, "--recompute-granularity full fits");
}

// Checks the advice against the plan: the suggested micro-batch size fits, and the next larger one
// does not.
static void test_advice_on_a_model(void **state) {
    static const char *const flags[] = {MODEL, "--micro-batch-size", "12", "--global-batch-size", "24"};
    static const int divisors[] = {12, 8, 6, 4, 3, 2, 1};
    Bench b;
    assert_true(bench_open(&b, COUNT(flags), flags, 31));
    size_t planned = memory_plan_total(&b.memory_plan), total[COUNT(divisors)];
    for (int i = 0; i < COUNT(divisors); i++) {
        Bench smaller;
        char size[8];
        snprintf(size, sizeof size, "%d", divisors[i]);
        const char *other[] = {MODEL, "--micro-batch-size", size, "--global-batch-size", "24"};
        assert_true(bench_open(&smaller, COUNT(other), other, 31));
        total[i] = memory_plan_total(&smaller.memory_plan);
        assert_int_equal(planned - total[i],
                         gpt_planned_bytes(&b.config, &b.mesh) - gpt_planned_bytes(&smaller.config, &b.mesh));
        bench_close(&smaller);
    }
    for (int i = 1; i < COUNT(divisors); i++) {
        char text[512], expected[64];
        for (int less = 0; less < 2; less++) {
            memory_advice(text, sizeof text, &b.config, planned, less ? total[i - 1] - 1 : total[i],
                          (ModelPlan){gpt_planned_bytes, &b.mesh});
            snprintf(expected, sizeof expected, "--micro-batch-size %d fits", divisors[i]);
            assert_memory_equal(text, expected, strlen(expected));
        }
    }
    bench_close(&b);
}

// --- limits ---------------------------------------------------------------------------------

// A limit on the address space applies to each rank, but ranks share the machine's memory.
static void test_shared_memory_limits(void **state) {
    Error err = {0};
    Device *device = device_open(0, NULL, &err);
    size_t available, total, one = device_share(device, 1);
    device_memory(device, &available, &total);
    assert_true(one > 0 && one <= total);
    size_t taken = device_taken(device), pages = 0, GiB = (size_t)1 << 30;
    assert_true(taken > 0 && taken < total);
    struct rlimit old;
    assert_int_equal(getrlimit(RLIMIT_AS, &old), 0);
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && old.rlim_cur == RLIM_INFINITY) {
        assert_true(device_share(device, 8) <= total / 8);
        assert_int_equal(fscanf(file, "%zu", &pages), 1);
        struct rlimit limit = {pages * (size_t)sysconf(_SC_PAGESIZE) + GiB, old.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_AS, &limit), 0);
        size_t alone = device_share(device, 1), among_two = device_share(device, 2);
        setrlimit(RLIMIT_AS, &old);
        assert_true(alone <= GiB && (one < GiB || alone > GiB - GiB / 16));
        assert_true(one < 3 * GiB || among_two > GiB - GiB / 16);  // not halved
    }
    if (file) fclose(file);
    device_close(device);
}

static void test_plan_that_does_not_fit(void **state) {
    static const char *const flags[] = {MODEL, "--micro-batch-size", "4", "--global-batch-size", "8"};
    Bench b;
    assert_true(bench_open(&b, COUNT(flags), flags, 31));
    Memory memory = {0};
    MemoryPlan memory_plan = {0};
    Error err = {0};
    void *target;
    const ModelPlan model = {gpt_planned_bytes, &b.mesh};
    // Reserves half of the free memory, which fits one rank, but not each of four.
    memory_plan_reserve(&memory_plan, "test", "half of what is free", device_share(b.device, 1) / 2, &target);
    memory_measure(&memory, &memory_plan, b.device, 4, 4, 4, false);
    assert_false(memory_allocate(&memory, &memory_plan, &b.config, model, &err));
    assert_int_equal(err.code, EXIT_ENVIRONMENT);
    assert_non_null(strstr(err.what, "MiB too much (see --plan)"));
    assert_non_null(strstr(err.what, "for each of the 4 ranks of this machine"));
    assert_non_null(
        strstr(err.what, "no setting fits: --micro-batch-size 1 with --recompute-granularity full needs"));
    assert_null(target);
    memory_plan_free(&memory_plan, b.device);
    // The plan would fit without the reserve for libraries.
    memory_plan_reserve(&memory_plan, "test", "a page", 4096, &target);
    memory_measure(&memory, &memory_plan, b.device, 1, 1, 4, true);
    assert_int_equal(memory.reserved, 0);  // CPU ranks have no reserve
    memory.reserved = memory.share_before - 1024;
    assert_false(memory_allocate(&memory, &memory_plan, &b.config, model, &err));
    assert_int_equal(err.code, EXIT_ENVIRONMENT);
    assert_non_null(strstr(err.what, "MiB reserved for libraries; "));
    memory.reserved = memory.share_before - 4096;
    assert_true(memory_allocate(&memory, &memory_plan, &b.config, model, &err));
    memory_plan_free(&memory_plan, b.device);
    bench_close(&b);
}

// All ranks of a machine share its host memory.
static void test_host_memory(void **state) {
    const size_t GiB = (size_t)1 << 30;
    Error err = {0};
    assert_true(memory_host_fits(8 * GiB, 8, 64 * GiB, &err));
    assert_true(memory_host_fits(8 * GiB, 8, 0, &err));  // available memory is unknown
    assert_true(memory_host_fits(0, 8, GiB, &err));
    assert_false(memory_host_fits(8 * GiB, 8, 64 * GiB - 1, &err));
    assert_int_equal(err.code, EXIT_ENVIRONMENT);
    assert_non_null(strstr(err.what,
                           "8.00 GiB of host memory for each of the 8 ranks of this machine, "
                           "64.00 GiB in total, but only 64.00 GiB are available; "));
    assert_null(strchr(err.what, '\n'));
    // memory_measure must set the fields for host memory.
    Memory memory = {0};
    MemoryPlan memory_plan = {0};
    Device *device = device_open(0, NULL, &err);
    void *target;
    memory_plan_reserve_host(&memory_plan, "test", "host memory", 4096, &target);
    memory_measure(&memory, &memory_plan, device, 1, 3, 4, false);
    assert_int_equal(memory.host, 4096);
    assert_int_equal(memory.host_ranks, 3);
    size_t now = machine_memory("MemAvailable"), all = machine_memory("MemTotal");
    assert_true(memory.host_before > 0 && memory.host_before <= all && now <= all);
    assert_int_equal(machine_memory("NoSuchField"), 0);
    memory_plan_free(&memory_plan, device);
    device_close(device);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_run_allocates_exactly_its_plan),
        cmocka_unit_test(test_allocations_are_counted),
        cmocka_unit_test(test_advice),
        cmocka_unit_test(test_advice_for_a_pipeline),
        cmocka_unit_test(test_advice_on_a_model),
        cmocka_unit_test(test_shared_memory_limits),
        cmocka_unit_test(test_plan_that_does_not_fit),
        cmocka_unit_test(test_host_memory),
    };
    Launch launch;
    launch_init(&launch, &argc, &argv);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    launch_finalize(&launch);
    return failed;
}
