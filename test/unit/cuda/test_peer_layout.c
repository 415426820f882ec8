// Tests how collectives over peer memory divide elements among ranks, blocks and streams. Needs no
// GPU.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "llmc/comm.h"
#include "llmc/cuda/peer_layout.h"

static const int64_t TOTALS[] = {0,   1,   7,    8,    9,     63,      64,          65,
                                 100, 127, 4096, 4097, 99991, 1 << 20, 2048 * 5120, ((int64_t)1 << 33) + 5};
enum { TOTAL_COUNT = sizeof TOTALS / sizeof *TOTALS };

// The ranges of an all-reduce cover all elements once, in rank order. They start at multiples of 16
// bytes. Rank 0 has the longest range, from which all ranks compute the launch size.
static void all_reduce_ranges(void **state) {
    for (int t = 0; t < TOTAL_COUNT; t++) {
        for (int ranks = 1; ranks <= PEER_RANKS; ranks++) {
            for (size_t element = 2; element <= 4; element += 2) {
                int64_t next = 0, longest = peer_range(TOTALS[t], ranks, 0, false, element).count;
                for (int r = 0; r < ranks; r++) {
                    PeerRange range = peer_range(TOTALS[t], ranks, r, false, element);
                    assert_int_equal(range.first, next);
                    assert_in_range(range.count, 0, longest);
                    if (range.count) assert_int_equal((size_t)range.first * element % PEER_VECTOR, 0);
                    next += range.count;
                }
                assert_int_equal(next, TOTALS[t]);
                assert_true(longest <= (TOTALS[t] + ranks - 1) / ranks + PEER_VECTOR / (int64_t)element);
            }
        }
    }
}

// The ranges of a reduce-scatter are equal, without any rounding.
static void reduce_scatter_ranges(void **state) {
    for (int t = 0; t < TOTAL_COUNT; t++) {
        for (int ranks = 1; ranks <= PEER_RANKS; ranks++) {
            for (int r = 0; r < ranks; r++) {
                PeerRange range = peer_range(TOTALS[t] * ranks, ranks, r, true, 2);
                assert_int_equal(range.first, r * TOTALS[t]);
                assert_int_equal(range.count, TOTALS[t]);
            }
        }
    }
}

static void blocks(void **state) {
    const int64_t one = PEER_THREADS * PEER_VECTOR;
    assert_int_equal(peer_blocks(0, one, 24), 1);
    assert_int_equal(peer_blocks(1, one, 24), 1);
    assert_int_equal(peer_blocks(one, one, 24), 1);
    assert_int_equal(peer_blocks(one + 1, one, 24), 2);
    assert_int_equal(peer_blocks(24 * one, one, 24), 24);
    assert_int_equal(peer_blocks((int64_t)1 << 40, one, 24), 24);
    // At most a quarter of the SMs, so that matrix products can run at the same time.
    assert_int_equal(peer_most_blocks(COMM_BESIDE_GEMM, 132, 3), PEER_BLOCKS);
    assert_int_equal(peer_most_blocks(COMM_BESIDE_GEMM, 108, 1), PEER_BLOCKS);
    assert_int_equal(peer_most_blocks(COMM_BESIDE_GEMM, 14, 1), 3);
    assert_int_equal(peer_most_blocks(COMM_BESIDE_GEMM, 1, 1), 1);
    assert_true(PEER_BLOCKS <= PEER_BLOCKS_MOST);
}

static void blocks_without_a_gemm(void **state) {
    assert_int_equal(peer_blocks(0, 4, 64), 1);
    assert_int_equal(peer_blocks(4, 4, 64), 1);
    assert_int_equal(peer_blocks(5, 4, 64), 2);
    assert_int_equal(peer_blocks((int64_t)1 << 40, 1, 64), 64);
    // At most half of the SMs, and NCCL's kernels find room.
    const int nccl = NCCL_LINK_BLOCKS + NCCL_BLOCKS;
    assert_int_equal(peer_most_blocks(COMM_WITHOUT_GEMM, 132, 0), PEER_BLOCKS_MOST);
    assert_int_equal(peer_most_blocks(COMM_WITHOUT_GEMM, 132, 1), PEER_BLOCKS_MOST);
    assert_int_equal(peer_most_blocks(COMM_WITHOUT_GEMM, 132, 2), 132 - nccl - NCCL_BLOCKS);
    assert_int_equal(peer_most_blocks(COMM_WITHOUT_GEMM, 132, 3), 132 - nccl - 2 * NCCL_BLOCKS);
    assert_int_equal(peer_most_blocks(COMM_WITHOUT_GEMM, 108, 1), 54);
    assert_int_equal(peer_most_blocks(COMM_WITHOUT_GEMM, 84, 1), 84 - nccl);
    assert_true(peer_normalizes_all(2, PEER_BLOCKS_NORM));
    assert_false(peer_normalizes_all(2, PEER_BLOCKS_NORM - 1));
    assert_false(peer_normalizes_all(4, PEER_BLOCKS_MOST));
    // Never fewer than beside a GEMM.
    assert_int_equal(peer_most_blocks(COMM_WITHOUT_GEMM, 108, 3), PEER_BLOCKS);
    assert_int_equal(peer_most_blocks(COMM_WITHOUT_GEMM, 1, 1), 1);
}

// Kernels that wait for other ranks fit on the GPU at the same time.
static void waiting_kernels_fit(void **state) {
    for (int sms = 24; sms <= 160; sms++) {
        for (int collectives = 0; collectives <= 4; collectives++) {
            int nccl = peer_nccl_blocks(sms, collectives);
            int most = peer_most_blocks(COMM_WITHOUT_GEMM, sms, collectives);
            assert_true(nccl >= 1 && nccl <= NCCL_BLOCKS);
            assert_true(most >= peer_most_blocks(COMM_BESIDE_GEMM, sms, collectives));
            assert_true(most + NCCL_LINK_BLOCKS + collectives * nccl <= sms);
        }
    }
    assert_int_equal(peer_nccl_blocks(132, 3), NCCL_BLOCKS);
    assert_int_equal(peer_nccl_blocks(132, 4), 24);
    assert_int_equal(peer_nccl_blocks(108, 3), 24);
}

// Flags of lanes overlap neither each other nor the flags of peer_memory.cu, and fit into the
// memory for flags.
static void flags(void **state) {
    const size_t bytes = PEER_LANE_FLAGS * sizeof(uint32_t);
    for (int lane = 0; lane < PEER_LANES; lane++) {
        assert_int_equal(peer_lane_offset(lane), PEER_FLAGS_START + (size_t)lane * bytes);
        assert_true(peer_lane_offset(lane) + bytes <= COMM_FLAG_BYTES);
    }
}

static void lanes(void **state) {
    const void *user[PEER_LANES] = {NULL};
    const char streams[PEER_LANES + 1] = "";
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < PEER_LANES; i++) assert_int_equal(peer_lane(user, &streams[i]), i);
        assert_int_equal(peer_lane(user, &streams[PEER_LANES]), -1);
    }
}

static void overlaps(void **state) {
    const char memory[100] = "";
    assert_true(peer_overlap(memory, 10, memory, 10));
    assert_true(peer_overlap(memory, 10, memory + 9, 1));
    assert_true(peer_overlap(memory + 9, 1, memory, 10));
    assert_true(peer_overlap(memory + 2, 3, memory, 100));
    assert_false(peer_overlap(memory, 10, memory + 10, 10));
    assert_false(peer_overlap(memory + 10, 10, memory, 10));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_reduce_ranges),
        cmocka_unit_test(reduce_scatter_ranges),
        cmocka_unit_test(blocks),
        cmocka_unit_test(blocks_without_a_gemm),
        cmocka_unit_test(waiting_kernels_fit),
        cmocka_unit_test(flags),
        cmocka_unit_test(lanes),
        cmocka_unit_test(overlaps),
    };
    return cmocka_run_group_tests_name("collectives over peer memory", tests, NULL, NULL);
}
