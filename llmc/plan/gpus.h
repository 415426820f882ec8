// Performance and memory of GPUs by their data sheets. --plan-gpu selects one (plan_time.c).
#pragma once
#include "llmc/config/config.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

typedef struct Gpu {
    double tflops;  // peak of dense bf16 GEMMs, TFLOP/s
    double memory;  // memory bandwidth, GB/s
    double inside;  // NVLink or PCIe bandwidth to the other GPUs of a node, GB/s, one direction
    double gib;     // memory visible to programs
} Gpu;

// Sustained rates: data-sheet figures times the fractions that H200s were measured to reach
// (gpus.c).
typedef struct Rates {
    double matmul;           // floating-point operations per ms in GEMMs
    double memory;           // bytes per ms
    double inside, between;  // bytes per ms that a rank sends inside its node, and to other nodes
} Rates;

// Returns the rates of --plan-gpu, or of the --plan flags that override them. per_node: number of
// ranks that share a node's network.
Rates rates_of(const Config *config, int per_node);
// Returns the bytes available to the memory plan on a GPU with so many GiB: without the CUDA
// context and the libraries.
double gpu_room(double gib, const Config *config, const Mesh *mesh);
// gpu_room of the GPU given by --plan-gpu.
double planned_gpu_room(const Config *config, const Mesh *mesh);

LLMC_END
