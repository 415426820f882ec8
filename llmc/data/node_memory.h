// Memory for the indices of the datasets, shared by the ranks of a node. Rank 0 of the node fills
// it, the others map it read-only. If sharing is not possible (host_memory_map), every rank holds a
// copy that rank 0 broadcasts. Created by loader.c.
#pragma once
#include <mpi.h>

#include "llmc/ranks/peers.h"
LLMC_BEGIN

// All functions except open and close accept NULL, which means memory of this process alone,
// without MPI.
typedef struct NodeMemory NodeMemory;

// Collective over node; duplicates its communicator. If a rank does not take part in a collective
// call, the job ends (peers.h). share false forces one copy per rank, for tests.
NodeMemory *node_memory_open(Peers node, bool share);
// Collective. All allocations must have been freed.
void node_memory_close(NodeMemory *memory);
// Collective. Returns the same zeroed memory to every rank of the node, or NULL to all on failure.
void *node_memory_alloc(NodeMemory *m, size_t bytes);
void node_memory_free(NodeMemory *m, void *memory);
// Returns true on the one rank that fills the memory.
bool node_memory_fills(const NodeMemory *memory);
// Collective. Makes the memory that was filled visible to every rank of the node.
void node_memory_publish(NodeMemory *memory);
// Collective. Returns true if ok is true on every rank; otherwise returns false on every rank, with
// the error of the lowest failing rank in err (may be NULL).
bool node_memory_agree(NodeMemory *memory, bool ok, Error *err);
// Bytes currently allocated per node (shared) or per rank (copied). *copied: true if any of it is
// copied.
size_t node_memory_bytes(const NodeMemory *memory, bool *copied);

LLMC_END
