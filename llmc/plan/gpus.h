// Performance and memory of GPUs from their data sheets. --plan-gpu selects one (plan_time.c).
#pragma once
#include "llmc/config/config.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

// Sustained rates: data-sheet figures times the efficiency measured on H200s (gpus.c).
typedef struct Rates {
    double matmul;           // floating-point operations per ms in GEMMs
    double memory;           // bytes per ms
    double inside, between;  // bytes per ms that a rank sends inside its node, and to other nodes
} Rates;

// Returns the rates of --plan-gpu, or of the --plan flags that override them. per_node: number of
// ranks that share a node's network.
Rates rates_of(const Config *config, int per_node);
// Returns the bytes of GPU memory available to the memory plan, excluding the CUDA context and
// libraries.
double gpu_room(PlanGpu gpu, const Config *config, const Mesh *mesh);

LLMC_END
