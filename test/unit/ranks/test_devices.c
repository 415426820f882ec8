// Assignment of devices to ranks, and the names of emulated nodes for NCCL.
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "llmc/ranks/devices.h"

// NCCL reads node names from the environment. Other variables that the user has set are kept.
static void emulated_nodes_have_names(void **state) {
    int here[4] = {0, 0, 0, 0}, two_hosts[4] = {0, 0, 1, 1};
    Launch launch = {.size = 4, .host_of_rank = two_hosts, .host_name = "machine"};
    OwnDevice own = {.sharers = 1};
    Mesh mesh;
    assert_true(mesh_build(&mesh, 2, 4, two_hosts, 0, 1, 1, NULL));
    setenv("NCCL_HOSTID", "other", 1);
    setenv("NCCL_SOCKET_NTHREADS", "2", 1);
    unsetenv("NCCL_SOCKET_IFNAME");
    devices_emulate_nodes(&own, &mesh, &launch);
    assert_string_equal(getenv("NCCL_HOSTID"), "machine-node1");
    assert_string_equal(getenv("NCCL_SOCKET_NTHREADS"), "2");
    assert_string_equal(getenv("NCCL_NSOCKS_PERTHREAD"), "4");
    assert_string_equal(getenv("NCCL_P2P_NET_CHUNKSIZE"), "1048576");
    assert_null(getenv("NCCL_SOCKET_IFNAME"));
    launch.host_of_rank = here;
    assert_true(mesh_build(&mesh, 1, 4, here, 2, 1, 1, NULL));
    devices_emulate_nodes(&own, &mesh, &launch);
    assert_string_equal(getenv("NCCL_HOSTID"), "machine-node0");
    own.turn = 3;
    devices_emulate_nodes(&own, &mesh, &launch);
    assert_string_equal(getenv("NCCL_HOSTID"), "machine-node0-3");
    assert_string_equal(getenv("NCCL_SOCKET_IFNAME"), "lo");
    // All ranks of a node get the same name, in any parallel layout.
    own.turn = 0;
    assert_true(mesh_build(&mesh, 3, 4, here, 2, 2, 2, NULL));
    devices_emulate_nodes(&own, &mesh, &launch);
    assert_string_equal(getenv("NCCL_HOSTID"), "machine-node1");
}

// A job of `ranks` on one host with `devices` devices, in nodes of per_node ranks.
typedef struct Shared {
    int ranks, per_node, devices;
    bool emulate;
    const int *index, *sharers, *turn;  // (ranks) expected
} Shared;

static void emulated_nodes_share_devices(void **state) {
    static const int own[8] = {0, 1, 2, 3, 4, 5, 6, 7}, ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    static const int twos[8] = {2, 2, 2, 2, 2, 2, 2, 2}, fours[8] = {4, 4, 4, 4, 4, 4, 4, 4};
    static const int in_turn[8] = {0, 1, 0, 1, 0, 1, 0, 1}, zeros[8] = {0}, three[3] = {0, 1, 0};
    static const int uneven[3] = {2, 1, 2}, second[8] = {0, 0, 1, 1, 0, 0, 1, 1}, four[4] = {0, 1, 2, 3};
    static const Shared cases[] = {
        {4, 2, 2, true, in_turn, twos, zeros},
        {4, 1, 2, true, in_turn, twos, zeros},
        {8, 2, 2, true, in_turn, fours, zeros},
        {2, 1, 1, true, zeros, twos, zeros},
        {4, 1, 1, true, zeros, fours, zeros},
        {3, 1, 2, true, three, uneven, zeros},
        // Nodes of several ranks share devices.
        {4, 4, 2, true, in_turn, twos, second},
        {8, 4, 2, true, in_turn, fours, second},
        {4, 2, 1, true, zeros, fours, in_turn},
        {4, 4, 1, true, zeros, fours, four},
        // Without emulation ranks do not share devices, because NCCL refuses two ranks of one
        // machine on one device.
        {4, 2, 2, false, own, ones, zeros},
        // The number of devices does not fit the nodes.
        {4, 2, 3, true, own, ones, zeros},
        {6, 3, 2, true, own, ones, zeros},
        // There is no device, which device_open will report.
        {4, 2, 0, true, own, ones, zeros},
        {8, 4, 8, true, own, ones, zeros},
        // CPU ranks.
        {8, 4, INT_MAX, true, own, ones, zeros},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const Shared *c = &cases[i];
        for (int r = 0; r < c->ranks; r++) {
            Mesh mesh;
            OwnDevice device = {c->ranks, r, 1, 0};
            assert_true(mesh_build(&mesh, r, c->ranks, NULL, c->per_node, 1, 1, NULL));
            devices_share(&device, &mesh, c->devices, c->emulate);
            assert_int_equal(device.host_ranks, c->ranks);
            assert_int_equal(device.index, c->index[r]);
            assert_int_equal(device.sharers, c->sharers[r]);
            assert_int_equal(device.turn, c->turn[r]);
        }
    }
}

// If a launcher makes only one device visible to each rank, every rank uses device 0.
static void ranks_take_their_only_visible_device(void **state) {
    const VisibleDevices own[4] = {{1, "17:00.0"}, {1, "2A:00.0"}, {1, "3B:00.0"}, {1, "5D:00.0"}};
    const VisibleDevices all[4] = {{4, "a"}, {4, "a"}, {4, "a"}, {4, "a"}};
    const VisibleDevices same[4] = {{1, "a"}, {1, "b"}, {1, "c"}, {1, "a"}};
    const VisibleDevices unknown[4] = {{1, "a"}, {1, "b"}, {1, ""}, {1, "d"}};
    const VisibleDevices mixed[4] = {{1, "a"}, {2, "b"}, {1, "c"}, {1, "d"}};
    const VisibleDevices *const others[4] = {all, same, unknown, mixed};
    OwnDevice device = {4, 2, 1, 0};
    for (int i = 0; i < 4; i++) {
        devices_take_visible(&device, others[i]);
        assert_int_equal(device.index, 2);
    }
    devices_take_visible(&device, own);
    assert_int_equal(device.index, 0);
    // Emulated nodes of two ranks would share devices, but each rank sees one.
    Mesh mesh;
    OwnDevice shared = {4, 3, 1, 0};
    assert_true(mesh_build(&mesh, 3, 4, NULL, 2, 1, 1, NULL));
    devices_share(&shared, &mesh, 1, true);
    assert_int_equal(shared.sharers, 4);
    devices_take_visible(&shared, own);
    assert_int_equal(shared.index, 0);
    assert_int_equal(shared.sharers, 1);
    assert_int_equal(shared.turn, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(emulated_nodes_have_names),
        cmocka_unit_test(emulated_nodes_share_devices),
        cmocka_unit_test(ranks_take_their_only_visible_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
