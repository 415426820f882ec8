// Tests when tensor-parallel ranks use peer memory (tp_open): by default if each has its own GPU,
// and only with --tp-comm-backend peer if they share GPUs. Replaces both functions of comm.h.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "llmc/model/tensor_parallel.h"

static bool own_gpus, accessible;  // the backend's answers
static int opened;                 // calls of comm_open_direct

bool __wrap_comm_own_gpus(const Group *group, Error *err) {
    return own_gpus || system_error(err, "several ranks share GPU 1");
}
bool __wrap_comm_open_direct(const Group *group, void *flags, const CommPiece *piece, int pieces,
                             Error *err) {
    opened++;
    return accessible || system_error(err, "no access");
}

typedef struct Case {
    bool peer, may_share_gpu, own_gpus, accessible;
    bool opens, shares_gpu;
    const char *reason;  // "": peer memory is used
} Case;

static void peer_memory_is_used_as_requested(void **state) {
    static const char shared[] = "several ranks share GPU 1", no_access[] = "no access";
    const Case cases[] = {
        // --tp-comm-backend nccl
        {false, false, true, true, false, false, ""},
        // auto
        {true, false, true, true, true, false, ""},
        {true, false, true, false, true, false, no_access},
        {true, false, false, true, false, false, shared},
        // peer
        {true, true, true, true, true, false, ""},
        {true, true, true, false, true, false, no_access},
        {true, true, false, true, true, true, ""},
        {true, true, false, false, true, false, no_access},
    };
    Error err = {0};
    Device *device = device_open(0, NULL, &err);
    assert_non_null(device);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const Case *c = &cases[i];
        Group group = {.size = 2};
        TensorParallel tp = {.group = &group, .peer = c->peer, .may_share_gpu = c->may_share_gpu};
        own_gpus = c->own_gpus, accessible = c->accessible, opened = 0;
        tp.compute = stream_create(device, "compute");
        tp_open(&tp, device);
        assert_int_equal(opened, c->opens);
        assert_int_equal(tp.shares_gpu, c->shares_gpu);
        assert_string_equal(tp.not_direct.what, c->reason);
        assert_int_equal(tp.not_direct.code != 0, c->reason[0] != '\0');
        tp_close(&tp);
        stream_destroy(tp.compute);
    }
    device_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(peer_memory_is_used_as_requested)};
    return cmocka_run_group_tests_name("tp_open", tests, NULL, NULL);
}
