// Memory at run time: checks that the memory plan (memory_plan.h) fits into free memory, suggests
// settings that would fit, and reports memory used outside the plan (CUDA context, libraries).
// Called by llmc/run/.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/config/config.h"
#include "llmc/log/log.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

// Returns the bytes of the model's buffers in the memory plan (gpt_planned_bytes). The rest of the
// plan does not depend on micro-batch size and recomputation.
typedef size_t (*ModelBytes)(const Config *config, const Mesh *mesh);
typedef struct ModelPlan {
    ModelBytes bytes;
    const Mesh *mesh;
} ModelPlan;

typedef struct Memory {
    Device *device;
    int sharers;
    size_t planned;       // planned device memory
    size_t host;          // planned host memory; on CPU ranks it is part of `planned`
    int host_ranks;       // ranks on this machine
    size_t host_before;   // host memory available before any rank allocated; 0: unknown
    size_t reserved;      // reserved for libraries
    size_t taken_before;  // device memory in use before allocation: context, other processes
    size_t share_before;  // this rank's share of the free device memory before allocation
    bool reported;
} Memory;

// Returns true if ranks of a node communicate through NCCL. Model parallelism always does; data
// parallelism may use copy engines instead.
bool memory_nccl_in_node(const Config *config, const Mesh *mesh);
// Returns the bytes of GPU memory to reserve for cuBLAS, cuDNN and NCCL outside the plan.
// nccl_in_node: result of memory_nccl_in_node.
size_t memory_reserve(int ranks, bool nccl_in_node);
// Measures free memory, before any rank allocates. sharers: ranks that share the device memory
// (ranks of a host on CPUs, ranks of a GPU). host_ranks: ranks of the machine. ranks, nccl_in_node:
// see memory_reserve.
void memory_measure(Memory *memory, const MemoryPlan *memory_plan, Device *device, int sharers,
                    int host_ranks, int ranks, bool nccl_in_node);
// Checks that `ranks` ranks with `bytes` each fit into the available host memory. available: 0 if
// unknown. Error: EXIT_ENVIRONMENT.
bool memory_host_fits(size_t bytes, int ranks, size_t available, Error *err);
// Allocates the plan. The error (EXIT_ENVIRONMENT) says how much is missing and which setting fits
// (memory_advice).
bool memory_allocate(Memory *memory, MemoryPlan *memory_plan, const Config *config, ModelPlan model,
                     Error *err);
// Writes advice on how to reduce a plan of `planned` bytes to `share` bytes: the largest smaller
// micro-batch, full recomputation, or both. The micro-batch must divide the batch per rank and the
// steps of a batch ramp-up. Returns false if none of these is enough; the text then suggests other
// flags.
bool memory_advice(char *text, size_t bytes, const Config *config, size_t planned, size_t share,
                   ModelPlan model);
// Logs Megatron-LM's memory line, memory outside the plan, host memory of the plan, and the JSON
// record "memory". Call after the first steps, when libraries are loaded; later calls do nothing.
void memory_report(Memory *memory, Log *log, int64_t iterations);

LLMC_END
