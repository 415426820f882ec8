// Memory at run time. Does the plan fit what is free, and if not, what would? What did the program
// then take beside the plan (CUDA context, libraries)? The plan itself is memory_plan.h. Called by
// llmc/run/.
#pragma once
#include "llmc/base/memory_plan.h"
#include "llmc/config/config.h"
#include "llmc/log/log.h"
#include "llmc/ranks/mesh.h"
LLMC_BEGIN

// Bytes of the model's part of the memory plan on this rank of the mesh, under this configuration.
// A micro-batch's size and recomputation change nothing else.
typedef size_t (*ModelBytes)(const Config *config, const Mesh *mesh);
typedef struct ModelPlan {
    ModelBytes bytes;
    const Mesh *mesh;
} ModelPlan;

typedef struct Memory {
    Device *device;
    int sharers;
    size_t planned;       // of the device's memory
    size_t host;          // of the plan, in host memory: on CPU ranks a part of `planned`
    int host_ranks;       // of this rank's machine
    size_t host_before;   // available of its memory before any of them allocated; 0: unknown
    size_t beside;        // kept for libraries
    size_t taken_before;  // of the device when the plan was still to be allocated: context, other processes
    size_t share_before;  // free for this rank then
    bool reported;
} Memory;

// Do ranks of a node send to each other through NCCL's kernels? What is shared inside a node they
// may fetch. Parts of the model always go through NCCL.
bool memory_nccl_in_node(const Config *config, const Mesh *mesh);
// Bytes of a GPU that a run of `ranks` keeps beside its plan, for what cuBLAS, cuDNN and NCCL will
// take. nccl_in_node: ranks of a node send to each other through NCCL, which then takes most.
size_t memory_beside_plan(int ranks, bool nccl_in_node);
// Looks at what is free for each of `sharers` ranks that draw on the same memory: CPU ranks of a
// host, or ranks that share a GPU. host_ranks: of the machine. Before any of them allocates. ranks,
// nccl_in_node: see above.
void memory_measure(Memory *memory, const MemoryPlan *memory_plan, Device *device, int sharers,
                    int host_ranks, int ranks, bool nccl_in_node);
// That `ranks` ranks of a machine, each of which takes so many bytes of its memory, find them
// there. available: 0 where it is not known. Error (EXIT_ENVIRONMENT): by how much not, and what to
// do.
bool memory_host_fits(size_t bytes, int ranks, size_t available, Error *err);
// Allocates the plan. Error (EXIT_ENVIRONMENT): by how much it does not fit, and the micro-batch or
// recompute setting that does (memory_advice).
bool memory_allocate(Memory *memory, MemoryPlan *memory_plan, const Config *config, ModelPlan model,
                     Error *err);
// What to change so that a run, whose plan takes `planned` bytes under config, fits `share` bytes:
// the largest smaller micro-batch, full recomputation, or both. A micro-batch divides the sequences
// per rank and step, and the steps of a batch ramp-up. False when none of these is enough, and the
// text says what else could be.
bool memory_advice(char *text, size_t bytes, const Config *config, size_t planned, size_t share,
                   ModelPlan model);
// Once, when libraries have been loaded and used: Megatron-LM's memory line, lines of what was
// taken beside the plan and of what the plan takes in host memory, and the JSON line "memory".
void memory_report(Memory *memory, Log *log, int64_t iterations);

LLMC_END
