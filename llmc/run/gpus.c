// The table of GPUs: see gpus.h.
#include "llmc/run/gpus.h"

static const Gpu gpus[] = {
    [GPU_A100] = {.tflops = 312, .memory = 2039, .inside = 300},
    [GPU_A800] = {.tflops = 312, .memory = 2039, .inside = 200},
    [GPU_H100] = {.tflops = 989, .memory = 3350, .inside = 450},
    [GPU_H200] = {.tflops = 989, .memory = 4800, .inside = 450},
    [GPU_H800] = {.tflops = 989, .memory = 3350, .inside = 200},
    [GPU_B200] = {.tflops = 2250, .memory = 8000, .inside = 900},
    [GPU_MI300X] = {.tflops = 1307, .memory = 5300, .inside = 448},
    [GPU_L40S] = {.tflops = 362, .memory = 864, .inside = 32},
    [GPU_RTX_4090] = {.tflops = 165, .memory = 1008, .inside = 32},
};

// On H200s. Passes: 47 to 53 % of the peak at 125M and 1.3B. Copies: 4.2 TB/s at best, 3.8 in
// whole steps. Plain collectives: 350 GB/s (dev/bench/results/comm_2gpu.json).
static const double TFLOPS_SHARE = 0.5, MEMORY_SHARE = 0.79, INSIDE_SHARE = 0.78;

Rates rates_of(const Config *c, int per_node) {
    const double gigabyte_ms = 1e9 / 1e3, gigabit_ms = gigabyte_ms / 8;
    const Gpu *gpu = &gpus[c->plan_gpu];
    Rates rates = {
        .tflops = c->plan_tflops > 0 ? c->plan_tflops : gpu->tflops * TFLOPS_SHARE,
        .memory = gpu->memory * MEMORY_SHARE * gigabyte_ms,
        .inside = c->plan_network_inside > 0 ? c->plan_network_inside * gigabit_ms
                                             : gpu->inside * INSIDE_SHARE * gigabyte_ms,
        .between = c->plan_network * gigabit_ms / per_node,
    };
    return rates;
}
