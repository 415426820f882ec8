// Checks that the memory plan (memory_plan.h) fits into free memory, suggests settings that would
// fit, and reports memory used outside the plan (CUDA context, libraries). Called by llmc/run/.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/config/config.h"
#include "llmc/log/log.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

// Returns the size of the model's buffers in the memory plan (gpt_planned_bytes). The rest of the
// plan does not depend on the micro-batch size and recomputation.
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
    size_t disk;          // planned bytes of files
    int host_ranks;       // number of ranks on this machine
    size_t host_before;   // host memory available before any rank allocated; 0: unknown
    size_t reserved;      // device memory reserved for libraries
    size_t taken_before;  // device memory used before allocation by contexts and other processes
    size_t share_before;  // this rank's share of the free device memory before allocation
    bool reported;
} Memory;

// Returns true if ranks of a node communicate through NCCL. Model parallelism always does; data
// parallelism may use copy engines instead.
bool memory_nccl_in_node(const Config *config, const Mesh *mesh);
// Returns the GPU memory in bytes to reserve for cuBLAS, cuDNN and NCCL outside the plan.
// ranks: number of ranks of the job. nccl_in_node: result of memory_nccl_in_node.
size_t memory_reserve(int ranks, bool nccl_in_node);
// Measures free memory. Call before any rank allocates. sharers: number of ranks that share the
// device memory (ranks of a host on CPUs). host_ranks: number of ranks on the machine.
void memory_measure(Memory *memory, const MemoryPlan *memory_plan, Device *device, int sharers,
                    int host_ranks, int ranks, bool nccl_in_node);
// Checks that `bytes` of host memory are available for each of `ranks` ranks. available: total
// bytes available, or 0 if unknown. Error: EXIT_ENVIRONMENT.
bool memory_host_fits(size_t bytes, int ranks, size_t available, Error *err);
// Allocates the plan. The error (EXIT_ENVIRONMENT) says how much memory is missing and suggests
// settings that fit (memory_advice).
bool memory_allocate(Memory *memory, MemoryPlan *memory_plan, const Config *config, ModelPlan model,
                     Error *err);
// Writes advice on how to reduce a plan of `planned` bytes to `share` bytes: a smaller micro-batch,
// full recomputation, or both. Suggests only micro-batch sizes that are valid with the other flags.
// Returns false if neither is enough; the text then suggests other flags.
bool memory_advice(char *text, size_t bytes, const Config *config, size_t planned, size_t share,
                   ModelPlan model);
// Logs Megatron-LM's memory line, memory used outside the plan, host memory of the plan, and the
// JSON record "memory". Call after the first steps, when libraries are loaded; later calls do
// nothing.
void memory_report(Memory *memory, Log *log, int64_t iterations);

LLMC_END
