// Memory shared by the ranks of a node. See node_memory.h.
#include "llmc/data/node_memory.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "llmc/ranks/peers.h"

// One allocation, identified by its address.
typedef struct Block {
    void *memory;
    size_t bytes;
    bool shared;  // one copy per node; false: one per rank
    bool filled;  // for copies: already broadcast
    struct Block *next;
} Block;

struct NodeMemory {
    Peers node;
    int rank, ranks;
    bool share;
    Block *blocks;
};

NodeMemory *node_memory_open(Peers node, bool share) {
    NodeMemory *m = xcalloc(1, sizeof *m, "node memory");
    m->node = node;
    m->node.comm = peers_duplicate(node);
    MPI_Comm_rank(m->node.comm, &m->rank);
    MPI_Comm_size(m->node.comm, &m->ranks);
    m->share = share && m->ranks > 1;
    return m;
}

void node_memory_close(NodeMemory *memory) {
    if (!memory) return;
    MPI_Comm_free(&memory->node.comm);
    free(memory);
}

bool node_memory_agree(NodeMemory *memory, bool ok, Error *err) {
    return memory ? peers_agree(memory->node, ok, err, NULL) : ok;
}

static void *map_private(const NodeMemory *m, size_t bytes) {
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (peers_agree(m->node, map != MAP_FAILED, NULL, NULL)) return map;
    if (map != MAP_FAILED) munmap(map, bytes);
    return NULL;
}

void *node_memory_alloc(NodeMemory *m, size_t bytes) {
    if (bytes == 0) bytes = 1;
    if (!m) return calloc(bytes, 1);
    void *memory = m->share ? host_memory_map(m->node, bytes, false) : NULL;
    bool shared = memory != NULL;
    if (!memory) memory = map_private(m, bytes);
    if (!memory) return NULL;
    madvise(memory, bytes, MADV_HUGEPAGE);  // the index is read in random order; failure is harmless
    Block *block = xmalloc(sizeof *block, "a node memory block");
    *block = (Block){memory, bytes, shared, false, m->blocks};
    m->blocks = block;
    return memory;
}

void node_memory_free(NodeMemory *m, void *memory) {
    if (!m) free(memory);
    for (Block **link = m ? &m->blocks : NULL; link && *link; link = &(*link)->next) {
        Block *block = *link;
        if (block->memory != memory) continue;
        *link = block->next;
        munmap(block->memory, block->bytes);
        free(block);
        return;
    }
}

bool node_memory_fills(const NodeMemory *m) { return !m || m->rank == 0; }

void node_memory_publish(NodeMemory *m) {
    if (!m) return;
    for (Block *b = m->blocks; b; b = b->next) {  // same order on every rank
        if (!b->shared && !b->filled) peers_broadcast(m->node, b->memory, b->bytes, 0);
        b->filled = true;
    }
    peers_barrier(m->node);
}

size_t node_memory_bytes(const NodeMemory *memory, bool *copied) {
    size_t bytes = 0;
    *copied = false;
    for (const Block *b = memory->blocks; b; b = b->next) {
        bytes += b->bytes;
        *copied |= !b->shared && memory->ranks > 1;
    }
    return bytes;
}
