// Rank arithmetic: Megatron's order, nodes from hosts or from --gpus-per-node, and what is refused.
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/ranks/emulate.h"

static void nodes_follow_hosts(void **state) {
    const int hosts[8] = {0, 0, 0, 0, 4, 4, 4, 4};
    for (int r = 0; r < 8; r++) {
        Topology t;
        Error err = {0};
        assert_true(topology_build(&t, r, 8, hosts, 0, 1, 1, &err));
        assert_int_equal(t.nodes, 2);
        assert_int_equal(t.per_node, 4);
        assert_int_equal(t.node, r / 4);
        assert_int_equal(t.local, r % 4);
        assert_int_equal(t.device, r % 4);
        assert_int_equal(t.dp_rank, r);
        assert_false(t.borders_by_flag);
    }
}

static void gpus_per_node_sets_the_borders(void **state) {
    const int hosts[8] = {0};
    const int shapes[][2] = {{1, 8}, {2, 4}, {4, 2}, {8, 1}};  // per node, nodes
    for (int s = 0; s < 4; s++) {
        for (int r = 0; r < 8; r++) {
            Topology t;
            assert_true(topology_build(&t, r, 8, hosts, shapes[s][0], 1, 1, NULL));
            assert_int_equal(t.per_node, shapes[s][0]);
            assert_int_equal(t.nodes, shapes[s][1]);
            assert_int_equal(t.node * t.per_node + t.local, t.dp_rank);
            assert_int_equal(t.device, r);  // one real host holds them all
            assert_true(t.borders_by_flag);
        }
    }
}

// Megatron's example: world 16, T = 2, P = 4, so D = 2: the data-parallel groups are {0, 2}, {1, 3}, {4, 6}, ...
static void megatron_rank_order(void **state) {
    const int hosts[16] = {0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8};
    for (int r = 0; r < 16; r++) {
        Topology t;
        assert_true(topology_build(&t, r, 16, hosts, 0, 2, 4, NULL));
        assert_int_equal(t.tp_rank, r % 2);
        assert_int_equal(t.dp_rank, r / 2 % 2);
        assert_int_equal(t.pp_rank, r / 4);
        assert_int_equal(t.pp_rank * 4 + t.dp_rank * 2 + t.tp_rank, r);
    }
}

// T = 8 on nodes of 8: every node holds one data-parallel rank, so only the hop between nodes is left.
static void tensor_parallel_fills_a_node(void **state) {
    int hosts[32];
    for (int r = 0; r < 32; r++) hosts[r] = r / 8;
    Topology t;
    assert_true(topology_build(&t, 17, 32, hosts, 0, 8, 1, NULL));
    assert_int_equal(t.per_node, 1);
    assert_int_equal(t.nodes, 4);
    assert_int_equal(t.node, 2);
}

static void expect_refusal(int size, const int *hosts, int gpus_per_node, int tp, int code, const char *part) {
    Topology t;
    Error err = {0};
    assert_false(topology_build(&t, 0, size, hosts, gpus_per_node, tp, 1, &err));
    assert_int_equal(err.code, code);
    assert_non_null(strstr(err.what, part));
}

static void what_does_not_fit_is_refused(void **state) {
    const int uneven[5] = {0, 0, 0, 3, 3}, scattered[4] = {0, 1, 0, 1}, one[6] = {0};
    expect_refusal(5, uneven, 0, 1, EXIT_ENVIRONMENT, "same number of ranks on every node");
    expect_refusal(4, scattered, 0, 1, EXIT_ENVIRONMENT, "consecutive");
    expect_refusal(6, one, 4, 1, EXIT_USAGE, "--gpus-per-node");
    expect_refusal(6, one, -1, 1, EXIT_USAGE, "--gpus-per-node");
    expect_refusal(6, one, 0, 4, EXIT_USAGE, "tensor parallel");
}

// NCCL is told of nodes by the environment; what the user has set stays, but for the name of the node.
static void emulated_nodes_have_names(void **state) {
    int here[4] = {0, 0, 0, 0}, two_hosts[4] = {0, 0, 1, 1};
    Topology t = {0};
    Launch launch = {0};
    launch.size = 4;
    launch.host_of_rank = two_hosts;
    snprintf(launch.host_name, sizeof launch.host_name, "machine");
    t.node = 1;
    setenv("NCCL_HOSTID", "other", 1);
    setenv("NCCL_SOCKET_NTHREADS", "2", 1);
    unsetenv("NCCL_SOCKET_IFNAME");
    emulate_nodes(&t, &launch);
    assert_string_equal(getenv("NCCL_HOSTID"), "machine-node1");
    assert_string_equal(getenv("NCCL_SOCKET_NTHREADS"), "2");
    assert_string_equal(getenv("NCCL_NSOCKS_PERTHREAD"), "4");
    assert_string_equal(getenv("NCCL_P2P_NET_CHUNKSIZE"), "1048576");
    assert_null(getenv("NCCL_SOCKET_IFNAME"));
    launch.host_of_rank = here;
    t.node = 0;
    emulate_nodes(&t, &launch);
    assert_string_equal(getenv("NCCL_HOSTID"), "machine-node0");
    t.device_turn = 3;
    emulate_nodes(&t, &launch);
    assert_string_equal(getenv("NCCL_HOSTID"), "machine-node0-3");
    assert_string_equal(getenv("NCCL_SOCKET_IFNAME"), "lo");
}

// Ranks r of `ranks` on one host with this many devices, in nodes of per_node: which device each takes, how many share it, and which of its own node's ranks there
// it is.
static void check_devices(int ranks, int per_node, int devices, bool emulate, const int *expected, const int *sharers, const int *turns) {
    int *hosts = calloc((size_t)ranks, sizeof *hosts);
    for (int r = 0; r < ranks; r++) {
        Topology t;
        assert_true(topology_build(&t, r, ranks, hosts, per_node, 1, 1, NULL));
        topology_share_devices(&t, devices, emulate);
        assert_int_equal(t.host_ranks, ranks);
        assert_int_equal(t.device, expected[r]);
        assert_int_equal(t.device_sharers, sharers[r]);
        assert_int_equal(t.device_turn, turns[r]);
    }
    free(hosts);
}

static void emulated_nodes_share_devices(void **state) {
    static const int own[8] = {0, 1, 2, 3, 4, 5, 6, 7}, ones[8] = {1, 1, 1, 1, 1, 1, 1, 1}, twos[8] = {2, 2, 2, 2, 2, 2, 2, 2}, fours[8] = {4, 4, 4, 4, 4, 4, 4, 4};
    static const int in_turn[8] = {0, 1, 0, 1, 0, 1, 0, 1}, zeros[8] = {0}, three[3] = {0, 1, 0}, uneven[3] = {2, 1, 2};
    static const int second[8] = {0, 0, 1, 1, 0, 0, 1, 1}, four[4] = {0, 1, 2, 3};
    check_devices(4, 2, 2, true, in_turn, twos, zeros);   // 2 x 2
    check_devices(4, 1, 2, true, in_turn, twos, zeros);   // 4 x 1
    check_devices(8, 2, 2, true, in_turn, fours, zeros);  // 4 x 2
    check_devices(2, 1, 1, true, zeros, twos, zeros);
    check_devices(4, 1, 1, true, zeros, fours, zeros);
    check_devices(3, 1, 2, true, three, uneven, zeros);
    check_devices(4, 4, 2, true, in_turn, twos, second);  // 1 x 4: a node's ranks meet on a device
    check_devices(8, 4, 2, true, in_turn, fours, second); // 2 x 4
    check_devices(4, 2, 1, true, zeros, fours, in_turn);
    check_devices(4, 4, 1, true, zeros, fours, four);
    check_devices(4, 2, 2, false, own, ones, zeros);      // not emulated: NCCL refuses two ranks of one machine on one device
    check_devices(4, 2, 3, true, own, ones, zeros);       // nodes would not fill the devices
    check_devices(6, 3, 2, true, own, ones, zeros);
    check_devices(4, 2, 0, true, own, ones, zeros);       // no device: device_open says so
    check_devices(8, 4, 8, true, own, ones, zeros);
    check_devices(8, 4, INT_MAX, true, own, ones, zeros); // CPU ranks
}

// A launcher may show each rank one device only, which is that rank's device 0; anything else stays as it was.
static void ranks_that_see_one_device_take_it(void **state) {
    const int hosts[4] = {0, 0, 0, 0};
    const VisibleDevices own[4] = {{1, "0000:17:00.0"}, {1, "0000:2A:00.0"}, {1, "0000:3B:00.0"}, {1, "0000:5D:00.0"}}, all[4] = {{4, "a"}, {4, "a"}, {4, "a"}, {4, "a"}};
    const VisibleDevices same[4] = {{1, "a"}, {1, "b"}, {1, "c"}, {1, "a"}}, unknown[4] = {{1, "a"}, {1, "b"}, {1, ""}, {1, "d"}}, mixed[4] = {{1, "a"}, {2, "b"}, {1, "c"}, {1, "d"}};
    const VisibleDevices *const others[4] = {all, same, unknown, mixed};
    Topology t;
    assert_true(topology_build(&t, 2, 4, hosts, 0, 1, 1, NULL));
    for (int i = 0; i < 4; i++) {
        topology_take_own_device(&t, others[i]);
        assert_int_equal(t.device, 2);
    }
    topology_take_own_device(&t, own);
    assert_int_equal(t.device, 0);
    // Emulated nodes of two, which would share the one device that each rank sees.
    assert_true(topology_build(&t, 3, 4, hosts, 2, 1, 1, NULL));
    topology_share_devices(&t, 1, true);
    assert_int_equal(t.device_sharers, 4);
    topology_take_own_device(&t, own);
    assert_int_equal(t.device, 0);
    assert_int_equal(t.device_sharers, 1);
    assert_int_equal(t.device_turn, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(emulated_nodes_share_devices), cmocka_unit_test(ranks_that_see_one_device_take_it),
        cmocka_unit_test(nodes_follow_hosts), cmocka_unit_test(gpus_per_node_sets_the_borders), cmocka_unit_test(megatron_rank_order),
        cmocka_unit_test(tensor_parallel_fills_a_node), cmocka_unit_test(what_does_not_fit_is_refused),
        cmocka_unit_test(emulated_nodes_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
