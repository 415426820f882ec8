// Timers on a simulated device: sums, levels, reuse of events, start and stop without waiting, and
// misuse.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/log/timers.h"

// A device whose time the test sets. It replaces the backend at link time.
struct Device {
    double now_ms;
    int events, live_events, waits;
    Site site;
};
struct Stream {
    Device *device;
};
struct Event {
    Device *device;
    double ms;
};

const Site *device_site(const Device *device) { return &device->site; }
Event *event_create_timed(Device *device) {
    Event *event = (Event *)calloc(1, sizeof *event);
    event->device = device;
    device->events++;
    device->live_events++;
    return event;
}
void event_destroy(Event *event) {
    event->device->live_events--;
    free(event);
}
void event_record(Event *event, Stream *stream) { event->ms = stream->device->now_ms; }
void event_synchronize(Event *event) { event->device->waits++; }
double event_elapsed_ms(Event *start, Event *stop) { return stop->ms - start->ms; }

// A profiler that counts the starts of each range and the open ranges.
typedef struct Profile {
    int started[TIMERS], open[TIMERS];
} Profile;
static Profile profile;
uint64_t profile_range_start(const char *name) {
    int t = 0;
    while (strcmp(timer_name((Timer)t), name)) t++;
    profile.started[t]++;
    profile.open[t]++;
    return (uint64_t)t;
}
void profile_range_end(uint64_t range) { profile.open[range]--; }

static void run(Timers *timers, Timer timer, Stream *stream, double ms) {
    timer_start(timers, timer, stream);
    stream->device->now_ms += ms;
    timer_stop(timers, timer, stream);
}

static void sums_and_resets(void **state) {
    Device device = {.now_ms = 1000};
    Stream compute = {&device}, comm = {&device};
    Timers *timers = timers_create(&device, 2);
    run(timers, TIMER_FORWARD_COMPUTE, &compute, 3.5);
    device.now_ms += 100;  // time between spans is not counted
    run(timers, TIMER_FORWARD_COMPUTE, &compute, 4.5);
    timer_start(timers, TIMER_OPTIMIZER, &compute);  // different timers nest
    run(timers, TIMER_PARAMS_ALL_GATHER, &comm, 7);
    device.now_ms += 1;
    timer_stop(timers, TIMER_OPTIMIZER, &compute);
    assert_int_equal(device.waits, 0);
    assert_float_equal(timer_take_seconds(timers, TIMER_FORWARD_COMPUTE), 0.008, 1e-12);
    assert_int_equal(device.waits, 2);
    assert_float_equal(timer_take_seconds(timers, TIMER_FORWARD_COMPUTE), 0, 0);
    assert_float_equal(timer_take_seconds(timers, TIMER_PARAMS_ALL_GATHER), 0.007, 1e-12);
    assert_float_equal(timer_take_seconds(timers, TIMER_OPTIMIZER), 0.008, 1e-12);
    timers_destroy(timers);
    assert_int_equal(device.live_events, 0);
}

// Returns the lowest --timing-log-level at which a timer is on.
static int level_of(Timer timer) {
    switch (timer) {
        case TIMER_FORWARD_COMPUTE:
        case TIMER_BACKWARD_COMPUTE:
        case TIMER_BATCH_GENERATOR:
        case TIMER_FORWARD_RECV:
        case TIMER_BACKWARD_RECV: return 2;
        case TIMER_FORWARD_BACKWARD:
        case TIMER_ALL_GRADS_SYNC:
        case TIMER_PARAMS_ALL_GATHER:
        case TIMER_OPTIMIZER_CLIP_MAIN_GRAD:
        case TIMER_OPTIMIZER_INNER_STEP:
        case TIMER_OPTIMIZER: return 1;
        default: return 0;
    }
}

static void levels(void **state) {
    for (int level = 0; level <= 2; level++) {
        Device device = {0};
        Stream stream = {&device};
        Timers *timers = timers_create(&device, level);
        for (int t = 0; t < TIMERS; t++) {
            run(timers, (Timer)t, &stream, 2);
            assert_float_equal(timer_take_seconds(timers, (Timer)t), level_of((Timer)t) <= level ? 0.002 : 0,
                               1e-12);
        }
        timers_destroy(timers);
    }
    assert_string_equal(timer_name(TIMER_FORWARD_BACKWARD), "forward-backward");
    assert_string_equal(timer_name(TIMER_OPTIMIZER_INNER_STEP), "optimizer-inner-step");
    assert_string_equal(timer_name(TIMER_DATA_SETUP), "train/valid/test-data-iterators-setup");
}

// Ten intervals of 100 spans need no more events than the first.
static void events_are_reused(void **state) {
    Device device = {0};
    Stream stream = {&device};
    Timers *timers = timers_create(&device, 2);
    int after_first = 0;
    for (int interval = 0; interval < 10; interval++) {
        for (int i = 0; i < 100; i++) run(timers, TIMER_BACKWARD_COMPUTE, &stream, 1);
        assert_float_equal(timer_take_seconds(timers, TIMER_BACKWARD_COMPUTE), 0.1, 1e-9);
        if (interval == 0) after_first = device.events;
    }
    assert_int_equal(after_first, 200);
    assert_int_equal(device.events, after_first);
    timers_destroy(timers);
    assert_int_equal(device.live_events, 0);
}

// In a log interval with more spans than the queue holds, memory stays bounded and every span
// counts once with its own length.
static void long_interval(void **state) {
    Device device = {0};
    Stream stream = {&device};
    Timers *timers = timers_create(&device, 2);
    double expected = 0;
    for (int i = 0; i < 10000; i++) {
        run(timers, TIMER_BATCH_GENERATOR, &stream, i % 13);
        expected += 1e-3 * (i % 13);
    }
    assert_int_equal(device.events, 2048);
    assert_float_equal(timer_take_seconds(timers, TIMER_BATCH_GENERATOR), expected, 1e-6);
    timers_destroy(timers);
}

static void running_timer_is_split(void **state) {
    Device device = {0};
    Stream stream = {&device};
    Timers *timers = timers_create(&device, 0);
    timer_start(timers, TIMER_EVALUATE, &stream);
    device.now_ms += 5;
    assert_float_equal(timer_take_seconds(timers, TIMER_EVALUATE), 0.005, 1e-12);
    device.now_ms += 6;
    timer_stop(timers, TIMER_EVALUATE, &stream);
    assert_float_equal(timer_take_seconds(timers, TIMER_EVALUATE), 0.006, 1e-12);
    timers_destroy(timers);
}

static void host_clock(void **state) {
    Timers *timers = timers_create(NULL, 0);
    const struct timespec nap = {.tv_nsec = 20000000};
    timer_start(timers, TIMER_SETUP, NULL);
    nanosleep(&nap, NULL);
    timer_stop(timers, TIMER_SETUP, NULL);
    double seconds = timer_take_seconds(timers, TIMER_SETUP);
    assert_true(seconds >= 0.02 && seconds < 2);
    timers_destroy(timers);
}

// Runs `use` in a child process and returns its exit code.
static int exit_code_of(void (*use)(Timers *timers, Stream *stream)) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        Device device = {0};
        Stream stream = {&device};
        Timers *timers = timers_create(&device, 2);
        if (!freopen("/dev/null", "w", stderr)) _exit(99);
        use(timers, &stream);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void start_twice(Timers *timers, Stream *stream) {
    timer_start(timers, TIMER_OPTIMIZER, stream);
    timer_start(timers, TIMER_OPTIMIZER, stream);
}
static void stop_alone(Timers *timers, Stream *stream) { timer_stop(timers, TIMER_OPTIMIZER, stream); }
static void stop_elsewhere(Timers *timers, Stream *stream) {
    Stream other = *stream;
    timer_start(timers, TIMER_OPTIMIZER, stream);
    timer_stop(timers, TIMER_OPTIMIZER, &other);
}
static void right_use(Timers *timers, Stream *stream) {
    timer_start(timers, TIMER_OPTIMIZER, stream);
    timer_stop(timers, TIMER_OPTIMIZER, stream);
    timers_destroy(timers);
}

static void misuse_ends_the_program(void **state) {
    assert_int_equal(exit_code_of(right_use), 0);
    assert_int_equal(exit_code_of(start_twice), EXIT_ENVIRONMENT);
    assert_int_equal(exit_code_of(stop_alone), EXIT_ENVIRONMENT);
    assert_int_equal(exit_code_of(stop_elsewhere), EXIT_ENVIRONMENT);
}

// Profilers see one range per start at every level, even for timers that are off. Ranges may
// overlap.
static void profilers_see_every_phase(void **state) {
    for (int level = 0; level <= 2; level++) {
        Device device = {.now_ms = 5};
        Stream compute = {&device}, comm = {&device};
        Timers *timers = timers_create(&device, level);
        profile = (Profile){0};
        timer_start(timers, TIMER_FORWARD_BACKWARD, &compute);
        run(timers, TIMER_FORWARD_COMPUTE, &compute, 1);
        run(timers, TIMER_FORWARD_COMPUTE, &compute, 1);
        timer_start(timers, TIMER_ALL_GRADS_SYNC, &comm);
        assert_true(profile.open[TIMER_FORWARD_BACKWARD] == 1 && profile.open[TIMER_ALL_GRADS_SYNC] == 1 &&
                    profile.open[TIMER_FORWARD_COMPUTE] == 0);
        timer_stop(timers, TIMER_FORWARD_BACKWARD, &compute);
        timer_stop(timers, TIMER_ALL_GRADS_SYNC, &comm);
        run(timers, TIMER_EVALUATE, &compute, 1);
        assert_true(profile.started[TIMER_FORWARD_BACKWARD] == 1 &&
                    profile.started[TIMER_FORWARD_COMPUTE] == 2 && profile.started[TIMER_EVALUATE] == 1);
        for (int t = 0; t < TIMERS; t++) assert_int_equal(profile.open[t], 0);
        timers_destroy(timers);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_and_resets),         cmocka_unit_test(levels),
        cmocka_unit_test(events_are_reused),       cmocka_unit_test(long_interval),
        cmocka_unit_test(running_timer_is_split),  cmocka_unit_test(host_clock),
        cmocka_unit_test(misuse_ends_the_program), cmocka_unit_test(profilers_see_every_phase),
    };
    return cmocka_run_group_tests_name("timers", tests, NULL, NULL);
}
