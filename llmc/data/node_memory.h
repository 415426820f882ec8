// Memory shared by the ranks of a node, as IndexMemory for the datasets (dataset.h). Rank 0 of the
// node fills it, the others map it read-only. If sharing is not possible (host_memory.h), every
// rank holds a copy that rank 0 broadcasts. Created by loader.c.
#pragma once
#include <mpi.h>

#include "llmc/data/dataset.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

typedef struct NodeMemory NodeMemory;

// Collective over node; duplicates its communicator. If a rank does not take part in a collective
// call, the job ends (peers.h). share false forces one copy per rank, for tests.
NodeMemory *node_memory_open(Peers node, bool share);
// Collective. All allocations must have been freed.
void node_memory_close(NodeMemory *memory);
// Allocator hooks for the datasets, valid until node_memory_close.
IndexMemory node_memory_hooks(NodeMemory *memory);
// Collective. Returns true if ok is true on every rank; otherwise returns false on every rank, with
// the error of the lowest failing rank in err (may be NULL).
bool node_memory_agree(NodeMemory *memory, bool ok, Error *err);
// Bytes currently allocated per node (shared) or per rank (copied). *copied: true if any of it is
// copied.
size_t node_memory_bytes(const NodeMemory *memory, bool *copied);

LLMC_END
