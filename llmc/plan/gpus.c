// Data-sheet figures of GPUs and sustained rates derived from them: see plan_report.h.
#include "llmc/plan/plan_report.h"

#include <assert.h>

#include "llmc/plan/memory_fit.h"

typedef struct Gpu {
    double tflops;  // peak of dense bf16 GEMMs, TFLOP/s
    double fp8;     // peak of dense FP8 GEMMs with sums in fp32, TFLOP/s; 0: no FP8 tensor cores
    bool blocks;    // cuBLASLt computes --fp8-recipe blockwise
    double memory;  // memory bandwidth, GB/s
    double inside;  // NVLink or PCIe bandwidth to other GPUs of the node in one direction, GB/s
    double gib;     // memory visible to programs, GiB
} Gpu;

static const Gpu gpus[] = {
    [GPU_A100] = {.tflops = 312, .memory = 2039, .inside = 300, .gib = 79.1},
    [GPU_A800] = {.tflops = 312, .memory = 2039, .inside = 200, .gib = 79.1},
    [GPU_H100] = {.tflops = 989, .fp8 = 1979, .blocks = true, .memory = 3350, .inside = 450, .gib = 79.1},
    [GPU_H200] = {.tflops = 989, .fp8 = 1979, .blocks = true, .memory = 4800, .inside = 450, .gib = 139.8},
    [GPU_H800] = {.tflops = 989, .fp8 = 1979, .blocks = true, .memory = 3350, .inside = 200, .gib = 79.1},
    [GPU_B200] = {.tflops = 2250, .fp8 = 4500, .memory = 8000, .inside = 900, .gib = 179},
    [GPU_MI300X] = {.tflops = 1307, .fp8 = 2615, .memory = 5300, .inside = 448, .gib = 191.9},
    [GPU_L40S] = {.tflops = 362, .fp8 = 733, .memory = 864, .inside = 32, .gib = 44.9},
    [GPU_RTX_4090] = {.tflops = 165, .fp8 = 330, .memory = 1008, .inside = 32, .gib = 23.6},
    [GPU_RTX_5090] = {.tflops = 209, .fp8 = 419, .memory = 1792, .inside = 64, .gib = 31.4},
};

// Fractions of the data-sheet figures that steps reach on H200s: GEMMs (fitted, see plan_time.c),
// memory traffic, and collectives over NVLink (dev/bench/results/comm_2gpu.json).
static const double MATMUL_SHARE = 0.75, MEMORY_SHARE = 0.79, INSIDE_SHARE = 0.78;
// Fraction of the data sheet's speedup by FP8 that GEMMs reach. On an H100, the linear layers of a
// transformer layer were 1.84 times as fast as in bf16 at 1.3B, 1.93 times at 6.7B and 1.70 times
// at 125M, instead of 2.
static const double FP8_SHARE = 0.91;

Rates rates_of(const Config *c, int per_node) {
    assert(per_node > 0);
    const double gigabyte_ms = 1e9 / 1e3, gigabit_ms = gigabyte_ms / 8, teraflop_ms = 1e12 / 1e3;
    const Gpu *gpu = &gpus[c->plan_gpu];
    Rates rates = {
        .matmul = gpu->tflops * MATMUL_SHARE * teraflop_ms,
        .fp8 = gpu->fp8 * FP8_SHARE * MATMUL_SHARE * teraflop_ms,
        .memory = gpu->memory * MEMORY_SHARE * gigabyte_ms,
        .inside = c->plan_network_inside > 0 ? c->plan_network_inside * gigabit_ms
                                             : gpu->inside * INSIDE_SHARE * gigabyte_ms,
        .between = c->plan_network * gigabit_ms / per_node,
    };
    return rates;
}

bool gpu_check_fp8(const Config *c, Error *err) {
    char name[16];
    const Gpu *gpu = &gpus[c->plan_gpu];
    if (!config_fp8_on(c) || c->plan_network <= 0) return true;
    config_choice("plan-gpu", (int)c->plan_gpu, name, sizeof name);
    if (gpu->fp8 == 0) {
        return usage_error(
            err, "--plan-gpu %s has no FP8 tensor cores; drop --fp8-format, or plan for another GPU", name);
    }
    if (c->fp8_recipe != FP8_BLOCKWISE || gpu->blocks) return true;
    return usage_error(err,
                       "--plan-gpu %s does not support --fp8-recipe blockwise, which cuBLASLt computes only "
                       "on Hopper GPUs; use --fp8-recipe tensorwise",
                       name);
}

// Memory of a process's CUDA context in GiB; 0.52 was measured on an H200.
static const double CONTEXT_GIB = 0.55;

double gpu_room(PlanGpu gpu, const Config *c, const Mesh *mesh) {
    assert(gpu >= 0 && gpu < (int)(sizeof gpus / sizeof *gpus));
    size_t reserved = memory_reserve(mesh->world.size, memory_nccl_in_node(c, mesh));
    return (gpus[gpu].gib - CONTEXT_GIB) * 0x1p30 - (double)reserved;
}
