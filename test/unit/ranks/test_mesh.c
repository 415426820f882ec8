// Process groups without MPI: Megatron-LM's order, nodes from hosts or from --gpus-per-node,
// members of the groups, and errors. test/mpi/test_mesh_mpi.c tests the communicators.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "llmc/ranks/mesh.h"

static void nodes_follow_hosts(void **state) {
    const int hosts[8] = {0, 0, 0, 0, 4, 4, 4, 4};
    for (int r = 0; r < 8; r++) {
        Mesh m;
        Error err = {0};
        assert_true(mesh_build(&m, r, 8, hosts, 0, 1, 1, &err));
        assert_int_equal(m.nodes, 2);
        assert_int_equal(m.per_node, 4);
        assert_int_equal(m.rail.size, 2);
        assert_int_equal(m.node.size, 4);
        assert_int_equal(m.rail.rank, r / 4);
        assert_int_equal(m.node.rank, r % 4);
        assert_int_equal(m.dp.rank, r);
    }
}

static void gpus_per_node_defines_nodes(void **state) {
    for (int per_node = 1; per_node <= 8; per_node *= 2) {
        for (int r = 0; r < 8; r++) {
            Mesh m;
            assert_true(mesh_build(&m, r, 8, NULL, per_node, 1, 1, NULL));
            assert_int_equal(m.node.size, per_node);
            assert_int_equal(m.rail.size, 8 / per_node);
            assert_int_equal(m.rail.rank * m.node.size + m.node.rank, m.dp.rank);
        }
    }
}

// --plan builds the mesh of any rank.
static void mesh_of_any_rank(void **state) {
    Mesh first;
    assert_true(mesh_build(&first, 0, 48, NULL, 8, 2, 3, NULL));
    for (int r = 0; r < 48; r++) {
        Mesh built, seen = mesh_of_rank(&first, r);
        assert_true(mesh_build(&built, r, 48, NULL, 8, 2, 3, NULL));
        assert_int_equal(seen.nodes, built.nodes);
        assert_int_equal(seen.per_node, built.per_node);
        for (int g = 0; g < MESH_GROUPS; g++) {
            const Group *a = &seen.group[g], *b = &built.group[g];
            assert_string_equal(a->name, b->name);
            assert_true(a->rank == b->rank && a->size == b->size);
            assert_true(a->first == b->first && a->stride == b->stride);
        }
    }
}

// Megatron-LM's example in parallel_state.py: 16 ranks, T = 2, P = 4, so D = 2.
static void megatron_rank_order(void **state) {
    static const int tp[][2] = {{0, 1}, {2, 3}, {14, 15}}, dp[][2] = {{0, 2}, {1, 3}, {4, 6}, {13, 15}};
    static const int pp[][4] = {{0, 4, 8, 12}, {3, 7, 11, 15}}, embedding[][2] = {{0, 12}, {1, 13}, {3, 15}};
    Mesh m[16];
    for (int r = 0; r < 16; r++) {
        assert_true(mesh_build(&m[r], r, 16, NULL, 8, 2, 4, NULL));
        assert_int_equal(m[r].pp.rank * 4 + m[r].dp.rank * 2 + m[r].tp.rank, r);
    }
    for (int i = 0; i < 2; i++) {
        for (int g = 0; g < 3; g++) {
            int other = tp[g][1 - i];
            assert_int_equal(group_peer(&m[other].tp, other, i), tp[g][i]);
        }
        for (int g = 0; g < 4; g++) {
            int other = dp[g][1 - i];
            assert_int_equal(group_peer(&m[other].dp, other, i), dp[g][i]);
        }
        for (int g = 0; g < 3; g++) {
            int other = embedding[g][1 - i];
            assert_int_equal(m[other].embedding.size, 2);
            assert_int_equal(group_peer(&m[other].embedding, other, i), embedding[g][i]);
        }
    }
    for (int i = 0; i < 4; i++) {
        for (int g = 0; g < 2; g++) {
            int other = pp[g][3 - i];
            assert_int_equal(group_peer(&m[other].pp, other, i), pp[g][i]);
        }
    }
    assert_int_equal(m[4].embedding.size, 1);
    assert_int_equal(m[11].embedding.size, 1);
}

// Returns true if ranks a and b are in the same group. Every rank must list the members in the same
// order.
typedef bool (*Together)(const Mesh *a, const Mesh *b);

static bool one_world(const Mesh *a, const Mesh *b) { return true; }
static bool same(const Group *a, const Group *b) { return a->rank == b->rank; }
static bool one_tp(const Mesh *a, const Mesh *b) { return same(&a->pp, &b->pp) && same(&a->dp, &b->dp); }
static bool one_pp(const Mesh *a, const Mesh *b) { return same(&a->tp, &b->tp) && same(&a->dp, &b->dp); }
static bool one_dp(const Mesh *a, const Mesh *b) { return same(&a->tp, &b->tp) && same(&a->pp, &b->pp); }
static bool one_machine(const Mesh *a, const Mesh *b) {
    return a->world.rank / a->per_node == b->world.rank / b->per_node;
}
static bool one_node(const Mesh *a, const Mesh *b) {
    return one_dp(a, b) && (one_machine(a, b) || same(&a->world, &b->world));
}
static bool one_rail(const Mesh *a, const Mesh *b) {
    return one_dp(a, b) && same(&a->node, &b->node) && (!one_machine(a, b) || same(&a->world, &b->world));
}
static bool alone(const Mesh *a, const Mesh *b) { return same(&a->world, &b->world); }
static bool at_an_end(const Mesh *m) { return m->pp.rank == 0 || m->pp.rank == m->pp.size - 1; }
static bool one_embedding(const Mesh *a, const Mesh *b) {
    return same(&a->world, &b->world) || (one_pp(a, b) && at_an_end(a) && at_an_end(b));
}

static void check_group(const Mesh *mesh, int ranks, int kind, Together together) {
    for (int r = 0; r < ranks; r++) {
        const Group *own = &mesh[r].group[kind];
        int place = 0;
        for (int other = 0; other < ranks; other++) {
            if (!together(&mesh[r], &mesh[other])) continue;
            assert_int_equal(group_peer(own, r, place), other);
            assert_int_equal(own->first + place * own->stride, other);
            if (other == r) assert_int_equal(own->rank, place);
            place++;
        }
        assert_int_equal(own->size, place);
    }
}

// Checks many layouts of T, P and nodes against the definitions of the groups.
static void groups_are_as_defined(void **state) {
    static const Together together[MESH_GROUPS] = {one_world,     one_tp, one_pp, one_dp, one_node, one_rail,
                                                   one_embedding, alone,  alone,  alone,  alone};
    enum { SHARDS = MESH_GROUPS - 4 };
    enum { MOST = 48 };
    int shapes = 0;
    for (int size = 1; size <= MOST; size++) {
        for (int per_node = 1; per_node <= size; per_node++) {
            for (int shape = 0; shape < 64; shape++) {
                Mesh mesh[MOST];
                bool fits = true;
                for (int r = 0; fits && r < size; r++) {
                    fits = mesh_build(&mesh[r], r, size, NULL, per_node, 1 + shape % 8, 1 + shape / 8, NULL);
                }
                if (!fits) continue;
                shapes++;
                assert_int_equal(mesh[0].node.size * mesh[0].rail.size, mesh[0].dp.size);
                for (int kind = 0; kind < MESH_GROUPS; kind++) check_group(mesh, size, kind, together[kind]);
                for (int all = 0; all < 2; all++) {
                    for (int r = 0; r < size; r++) mesh_shard_weights(&mesh[r], all);
                    for (int kind = 0; kind < SHARDS; kind++) check_group(mesh, size, kind, together[kind]);
                    check_group(mesh, size, SHARDS, one_node);
                    check_group(mesh, size, SHARDS + 1, all ? one_rail : alone);
                }
            }
        }
    }
    assert_true(shapes > 500);
}

static bool one_replica_group(const Mesh *a, const Mesh *b) { return one_machine(a, b); }
static bool same_place(const Mesh *a, const Mesh *b) {
    return a->world.rank % a->per_node == b->world.rank % b->per_node;
}

// With replica groups, data-parallel groups are inside a node, and the data are distributed over
// the replica groups.
static void replica_groups_are_nodes(void **state) {
    // NULL: checked below
    static const Together together[MESH_GROUPS] = {one_world, NULL,  alone, NULL,  NULL,
                                                   alone,     alone, alone, alone, one_replica_group,
                                                   same_place};
    enum { MOST = 24 };
    int shapes = 0;
    for (int size = 2; size <= MOST; size++) {
        for (int shape = 0; shape < 4 * size; shape++) {
            int per_node = 1 + shape / 4, tp = 1 + shape % 4;
            Mesh mesh[MOST];
            bool fits = per_node < size;
            for (int r = 0; fits && r < size; r++) {
                fits = mesh_build(&mesh[r], r, size, NULL, per_node, tp, 1, NULL) && tp <= per_node;
                if (fits) assert_true(mesh_make_replica_groups(&mesh[r], NULL));
            }
            if (!fits) continue;
            shapes++;
            // Ranks read different samples, except the tensor-parallel ranks of a replica.
            for (int r = 0; r < size; r++) {
                assert_int_equal(mesh_data_ranks(&mesh[r]), size / tp);
                assert_int_equal(mesh_data_rank(&mesh[r]), r / tp);
                assert_int_equal(mesh_status_group(&mesh[r])->size, per_node);
            }
            for (int kind = 0; kind < MESH_GROUPS; kind++) {
                if (together[kind]) check_group(mesh, size, kind, together[kind]);
            }
            for (int r = 0; r < size; r++) {
                assert_int_equal(mesh[r].dp.first, r / per_node * per_node + r % tp);
                assert_int_equal(mesh[r].dp.size, per_node / tp);
                assert_int_equal(mesh[r].node.size, per_node / tp);
                assert_int_equal(mesh[r].tp.first, r / tp * tp);
            }
        }
    }
    assert_true(shapes > 50);
}

static void same_group(const Group *a, const Group *b) {
    assert_int_equal(a->rank, b->rank);
    assert_int_equal(a->size, b->size);
    assert_int_equal(a->first, b->first);
    assert_int_equal(a->stride, b->stride);
}

// After a node is removed, each remaining rank's mesh equals the mesh of a job with only the
// remaining ranks. Communicators inside nodes are kept.
static void removing_a_node(void **state) {
    static char inside, between;
    for (int nodes = 2; nodes <= 4; nodes++) {
        for (int lost = 0; lost < nodes; lost++) {
            for (int rank = 0; rank < 4 * nodes; rank++) {
                Mesh left, fresh;
                int place = rank - (rank / 4 > lost ? 4 : 0);
                if (rank / 4 == lost) continue;
                assert_true(mesh_build(&left, rank, 4 * nodes, NULL, 4, 2, 1, NULL));
                assert_true(mesh_make_replica_groups(&left, NULL));
                left.node.comm = (Comm *)&inside;
                left.replica_groups.comm = (Comm *)&between;
                mesh_remove_node(&left, lost);
                assert_true(mesh_build(&fresh, place, 4 * (nodes - 1), NULL, 4, 2, 1, NULL));
                assert_true(mesh_make_replica_groups(&fresh, NULL));
                for (int i = 0; i < MESH_GROUPS; i++) same_group(&left.group[i], &fresh.group[i]);
                assert_int_equal(left.nodes, nodes - 1);
                assert_ptr_equal(left.node.comm, &inside);
                assert_null(left.replica_groups.comm);
            }
        }
    }
}

static void replica_groups_hold_whole_models(void **state) {
    Mesh m;
    Error err = {0};
    assert_true(mesh_build(&m, 0, 8, NULL, 2, 4, 1, NULL));
    assert_false(mesh_make_replica_groups(&m, &err));
    assert_int_equal(err.code, EXIT_USAGE);
    assert_non_null(strstr(err.what, "--tensor-model-parallel-size 4"));
    assert_true(mesh_build(&m, 0, 8, NULL, 4, 1, 2, NULL));
    assert_false(mesh_make_replica_groups(&m, &err));
    assert_non_null(strstr(err.what, "--pipeline-model-parallel-size 2"));
    // A single node is one replica group with all ranks.
    assert_true(mesh_build(&m, 3, 4, NULL, 4, 1, 1, NULL));
    assert_true(mesh_make_replica_groups(&m, NULL));
    assert_ptr_equal(mesh_status_group(&m), &m.world);
    assert_int_equal(mesh_data_rank(&m), 3);
}

// With T = 8 on nodes of 8, every node has one data-parallel rank, so data-parallel communication
// is only between nodes.
static void tensor_parallel_fills_a_node(void **state) {
    int hosts[32];
    for (int r = 0; r < 32; r++) hosts[r] = r / 8;
    Mesh m;
    assert_true(mesh_build(&m, 17, 32, hosts, 0, 8, 1, NULL));
    assert_int_equal(m.node.size, 1);
    assert_int_equal(m.rail.size, 4);
    assert_int_equal(m.rail.rank, 2);
}

typedef struct Refused {
    int size;
    const int *hosts;
    int gpus_per_node, tp, pp, code;
    const char *part;
} Refused;

static void invalid_shapes_are_refused(void **state) {
    static const int uneven[5] = {0, 0, 0, 3, 3}, scattered[4] = {0, 1, 0, 1}, again[6] = {0, 0, 2, 2, 0, 0};
    static const int one[24] = {0};
    static const Refused refused[] = {
        {5, uneven, 0, 1, 1, EXIT_ENVIRONMENT, "same number of ranks on every node"},
        {4, scattered, 0, 1, 1, EXIT_ENVIRONMENT, "consecutive"},
        {6, again, 0, 1, 1, EXIT_ENVIRONMENT, "same number of ranks on every node"},
        {6, one, 4, 1, 1, EXIT_USAGE, "--gpus-per-node"},
        {6, one, -1, 1, 1, EXIT_USAGE, "--gpus-per-node"},
        {6, one, 0, 4, 1, EXIT_USAGE, "--tensor-model-parallel-size 4 x --pipeline-model-parallel-size 1"},
        {6, one, 0, 2, 2, EXIT_USAGE, "start a multiple of 4 ranks"},
        {6, one, 0, 0, 1, EXIT_USAGE, "--tensor-model-parallel-size 0 x"},
        {6, one, 0, 65536, 65536, EXIT_USAGE, "--tensor-model-parallel-size"},
        {12, one, 4, 6, 1, EXIT_USAGE, "--tensor-model-parallel-size 6 does not fit nodes of 4"},
        {12, one, 4, 1, 2, EXIT_USAGE, "a data-parallel group of 6 ranks cannot be split into nodes of 4"},
        {24, one, 8, 1, 4, EXIT_USAGE, "a data-parallel group of 6 ranks cannot be split into nodes of 8"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const Refused *c = &refused[i];
        Mesh m;
        Error err = {0};
        assert_false(mesh_build(&m, 0, c->size, c->hosts, c->gpus_per_node, c->tp, c->pp, &err));
        assert_int_equal(err.code, c->code);
        assert_non_null(strstr(err.what, c->part));
    }
}

// --plan accepts huge worlds. Quadratic work would take minutes here.
static void a_million_ranks_are_fast(void **state) {
    enum { RANKS = 1 << 20 };
    int *hosts = malloc(RANKS * sizeof *hosts);
    for (int r = 0; r < RANKS; r++) hosts[r] = r / 2 * 2;
    clock_t start = clock();
    Mesh m;
    assert_true(mesh_build(&m, 77, RANKS, hosts, 0, 1, 1, NULL));
    assert_int_equal(m.rail.size, RANKS / 2);
    memset(hosts, 0, RANKS * sizeof *hosts);
    assert_true(mesh_build(&m, 77, RANKS, hosts, 0, 8, 4, NULL));
    assert_int_equal(m.node.size, RANKS / 32);
    assert_true((double)(clock() - start) / CLOCKS_PER_SEC < 1.0);
    free(hosts);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nodes_follow_hosts),
        cmocka_unit_test(gpus_per_node_defines_nodes),
        cmocka_unit_test(mesh_of_any_rank),
        cmocka_unit_test(megatron_rank_order),
        cmocka_unit_test(groups_are_as_defined),
        cmocka_unit_test(replica_groups_are_nodes),
        cmocka_unit_test(removing_a_node),
        cmocka_unit_test(replica_groups_hold_whole_models),
        cmocka_unit_test(tensor_parallel_fills_a_node),
        cmocka_unit_test(invalid_shapes_are_refused),
        cmocka_unit_test(a_million_ranks_are_fast),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
