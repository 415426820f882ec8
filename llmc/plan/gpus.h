// What GPUs can do, by their data sheets. --plan-gpu names one (plan_time.c).
#pragma once
#include "llmc/config/config.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

// Of one GPU. Data sheets' figures.
typedef struct Gpu {
    double tflops;  // peak in bf16 with dense matrices, TFLOP/s
    double memory;  // GB/s that its memory carries
    double inside;  // GB/s that it sends to other GPUs of its node, NVLink or PCIe, one direction
    double gib;     // of memory that programs see
} Gpu;

// How fast a run computes, moves memory and sends. What a GPU keeps up over whole steps is less
// than its data sheet says. The shares are those that H200s were measured to reach (gpus.c).
typedef struct Rates {
    double matmul;           // floating-point operations per ms of matrix products
    double memory;           // bytes per ms
    double inside, between;  // bytes per ms that a rank sends inside its node, and to other nodes
} Rates;

// The rates of a run's flags: --plan-gpu, and what other flags of --plan say instead. per_node:
// ranks that share a node's network.
Rates rates_of(const Config *config, int per_node);
// Bytes that a run may plan with on a GPU of so many GiB. The rest is its context's and NCCL's.
double gpu_room(double gib, const Config *config, const Mesh *mesh);
// The same of the GPU that --plan-gpu names.
double planned_gpu_room(const Config *config, const Mesh *mesh);

LLMC_END
