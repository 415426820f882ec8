// Tests the CPU device: required rounding mode, memory, copies, events and host calls.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fenv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "llmc/device.h"

static void test_open(void **state) {
    Site site = {.rank = 3};
    Error err = {0};
    Device *device = device_open(0, &site, &err);
    assert_non_null(device);
    assert_ptr_equal(device_site(device), &site);
    assert_string_equal(device_backend(), "cpu");
    assert_false(device_kind()->own_memory || device_kind()->numbered);
    assert_int_equal(strncmp(device_name(device), "CPU ", 4), 0);
    char text[256];
    device_libraries(text, sizeof text);
    assert_non_null(strstr(text, "OpenBLAS"));
    size_t available = 0, total = 0;
    device_memory(device, &available, &total);
    assert_true(available > 0 && available <= total);
    device_close(device);
}

// Rounding modes other than to-nearest are refused with a message.
static void test_rounding_modes(void **state) {
    const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        Error err = {0};
        assert_int_equal(fesetround(modes[i]), 0);
        Device *device = device_open(0, NULL, &err);
        fesetround(FE_TONEAREST);
        assert_null(device);
        assert_int_equal(err.code, EXIT_ENVIRONMENT);
        assert_non_null(strstr(err.what, "round"));
    }
}

static void test_memory(void **state) {
    Error err = {0};
    Device *device = device_open(0, NULL, &err);
    const size_t sizes[] = {0, 1, 255, 256, 257, 1000003};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        unsigned char *memory = device_alloc(device, sizes[i], "a test", &err);
        assert_non_null(memory);
        assert_int_equal((uintptr_t)memory % 256, 0);
        for (size_t j = 0; j < sizes[i]; j++) assert_int_equal(memory[j], 0);
        memset(memory, 0xAB, sizes[i]);  // reused memory must be zeroed again
        device_free(device, memory);
    }
    // Requests beyond the machine's memory fail with an error that names the purpose.
    const size_t impossible[] = {SIZE_MAX, SIZE_MAX - 255, (size_t)1 << 60};
    for (size_t i = 0; i < sizeof impossible / sizeof impossible[0]; i++) {
        err = (Error){0};
        assert_null(device_alloc(device, impossible[i], "the weight arena", &err));
        assert_int_equal(err.code, EXIT_ENVIRONMENT);
        assert_non_null(strstr(err.what, "the weight arena"));
    }
    device_close(device);
}

static void test_copies(void **state) {
    Error err = {0};
    Device *device = device_open(0, NULL, &err);
    Stream *stream = stream_create(device, "compute");
    assert_null(stream_site(stream));
    char host[8] = "1234567", *memory = device_alloc(device, 16, "a test", &err), back[8];
    copy_to_device(stream, memory, host, 8);
    host[0] = 'x';                                  // the copy is already complete
    copy_on_device(stream, memory + 4, memory, 8);  // overlapping
    copy_to_host(stream, back, memory + 4, 8);
    stream_synchronize(stream);
    assert_string_equal(back, "1234567");
    set_zero(stream, memory + 5, 2);
    assert_memory_equal(memory,
                        "12341\0\0"
                        "4567",
                        11);
    copy_to_device(stream, memory, NULL, 0);
    device_free(device, memory);
    stream_destroy(stream);
    device_close(device);
}

static void test_events(void **state) {
    Error err = {0};
    Device *device = device_open(0, NULL, &err);
    Stream *stream = stream_create(device, "compute");
    Event *start = event_create_timed(device), *stop = event_create_timed(device);
    event_record(start, stream);
    nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    event_record(stop, stream);
    stream_wait(stream, stop);
    event_synchronize(stop);
    assert_true(event_elapsed_ms(start, stop) >= 4.9);
    assert_true(event_elapsed_ms(stop, start) < 0);
    event_destroy(start);
    event_destroy(stop);
    stream_destroy(stream);
    device_close(device);
}

// Requesting the elapsed time of an untimed event ends the program, as on a GPU.
static void test_untimed_events(void **state) {
    Error err = {0};
    Device *device = device_open(0, NULL, &err);
    Stream *stream = stream_create(device, "compute");
    Event *order = event_create(device), *timed = event_create_timed(device),
          *pairs[][2] = {{timed, timed}, {order, timed}, {timed, order}};
    event_record(order, stream);
    event_record(timed, stream);
    stream_wait(stream, order);
    event_synchronize(order);
    for (int i = 0; i < 3; i++) {
        int status;
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            if (!freopen("/dev/null", "w", stderr)) _exit(99);
            event_elapsed_ms(pairs[i][0], pairs[i][1]);
            _exit(0);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), i ? EXIT_ENVIRONMENT : 0);
    }
    event_destroy(order);
    event_destroy(timed);
    stream_destroy(stream);
    device_close(device);
}

// A host call gets a copy of its context and runs in stream order.
typedef struct Doubling {
    int *from, *to, count;
} Doubling;
static void double_all(void *context) {
    const Doubling *d = (const Doubling *)context;
    for (int i = 0; i < d->count; i++) d->to[i] = 2 * d->from[i];
}

static void test_host_calls(void **state) {
    Error err = {0};
    Device *device = device_open(0, NULL, &err);
    Stream *stream = stream_create(device, "compute");
    int values[4] = {1, -2, 3, 40}, back[4] = {0};
    int *memory = (int *)device_alloc(device, sizeof values, "a test", &err);
    int *pinned = (int *)host_alloc(device, 2 * sizeof values, "a test", &err);
    size_t counted = device_allocated(device);
    assert_int_equal(counted, sizeof values);  // uses no device memory
    for (int i = 0; i < 8; i++) assert_int_equal(pinned[i], 0);
    copy_to_device(stream, memory, values, sizeof values);
    copy_to_pinned(stream, pinned, memory, sizeof values);
    Doubling doubling = {pinned, pinned + 4, 4};
    stream_host_call(stream, double_all, &doubling, sizeof doubling);
    memset(&doubling, 0, sizeof doubling);
    copy_from_pinned(stream, memory, pinned + 4, sizeof values);
    copy_to_host(stream, back, memory, sizeof back);
    stream_synchronize(stream);
    for (int i = 0; i < 4; i++) assert_int_equal(back[i], 2 * values[i]);
    device_free(device, memory);
    host_free(device, pinned);
    stream_destroy(stream);
    device_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open),       cmocka_unit_test(test_rounding_modes),
        cmocka_unit_test(test_memory),     cmocka_unit_test(test_copies),
        cmocka_unit_test(test_events),     cmocka_unit_test(test_untimed_events),
        cmocka_unit_test(test_host_calls),
    };
    return cmocka_run_group_tests_name("the CPU device", tests, NULL, NULL);
}
