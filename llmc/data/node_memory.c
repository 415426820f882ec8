// Memory shared by the ranks of a node, see node_memory.h.
#include "llmc/data/node_memory.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "llmc/ranks/host_memory.h"

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
    NodeMemory *m = (NodeMemory *)xcalloc(1, sizeof *m, "node memory");
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

static bool everywhere(const NodeMemory *m, bool ok) { return peers_agree(m->node, ok, NULL, NULL); }

bool node_memory_agree(NodeMemory *memory, bool ok, Error *err) {
    return peers_agree(memory->node, ok, err, NULL);
}

static void *map_private(const NodeMemory *m, size_t bytes) {
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (everywhere(m, map != MAP_FAILED)) return map;
    if (map != MAP_FAILED) munmap(map, bytes);
    return NULL;
}

static void *hook_alloc(void *context, size_t bytes, const char *purpose) {
    NodeMemory *m = (NodeMemory *)context;
    if (bytes == 0) bytes = 1;
    void *memory = m->share ? host_memory_map(m->node, bytes, false) : NULL;
    bool shared = memory != NULL;
    if (!memory) memory = map_private(m, bytes);
    if (!memory) return NULL;
    madvise(memory, bytes, MADV_HUGEPAGE);  // the index is read in random order; failure is harmless
    Block *block = (Block *)xmalloc(sizeof *block, "a node memory block");
    *block = (Block){memory, bytes, shared, false, m->blocks};
    m->blocks = block;
    return memory;
}

static void hook_free(void *context, void *memory) {
    for (Block **link = &((NodeMemory *)context)->blocks; *link; link = &(*link)->next) {
        Block *block = *link;
        if (block->memory != memory) continue;
        *link = block->next;
        munmap(block->memory, block->bytes);
        free(block);
        return;
    }
}

static bool hook_builder(void *context) { return ((NodeMemory *)context)->rank == 0; }

static void hook_ready(void *context) {
    NodeMemory *m = (NodeMemory *)context;
    for (Block *b = m->blocks; b; b = b->next) {  // same order on every rank
        if (!b->shared && !b->filled) peers_broadcast(m->node, b->memory, b->bytes, 0);
        b->filled = true;
    }
    peers_barrier(m->node);
}

static bool hook_agree(void *context, bool ok, Error *err) {
    return node_memory_agree((NodeMemory *)context, ok, err);
}

IndexMemory node_memory_hooks(NodeMemory *memory) {
    return (IndexMemory){hook_alloc, hook_free, hook_builder, hook_ready, hook_agree, memory};
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
