// Memory that the ranks of one node share, as IndexMemory for the datasets (dataset.h). Rank 0 of
// the node fills it, the others map it read-only. Where they cannot share any (host_memory.h) every
// rank holds a copy, which rank 0 broadcasts. Made by loader.c.
#pragma once
#include <mpi.h>

#include "llmc/data/dataset.h"
#include "llmc/ranks/peers.h"
LLMC_BEGIN

typedef struct NodeMemory NodeMemory;

// Collective over node, whose communicator is duplicated. Here and later a rank that does not come
// ends the job (peers.h). share false: a copy per rank from the start, for tests.
NodeMemory *node_memory_open(Peers node, bool share);
// All memory must have been freed before. Collective.
void node_memory_close(NodeMemory *memory);
// Hooks for the dataset builders; valid until node_memory_close.
IndexMemory node_memory_hooks(NodeMemory *memory);
// Collective: true everywhere when ok everywhere. Else false everywhere, with the lowest failing
// rank's error in err (may be NULL).
bool node_memory_agree(NodeMemory *memory, bool ok, Error *err);
// Bytes now held per node (shared) or per rank (copied), and whether any of it is copied.
size_t node_memory_bytes(const NodeMemory *memory, bool *copied);

LLMC_END
