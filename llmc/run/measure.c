// --plan-measure: see measure.h.
#include "llmc/run/measure.h"

#include <string.h>

#include "llmc/config/flops.h"
#include "llmc/run/plan_time.h"
#include "llmc/run/start.h"

// A start without checkpoints, log lines and other ranks.
static bool start_probe(Run *probe, GPT *gpt) {
    if (!plan_run(probe, gpt) || !run_allocate(probe) || !run_connect(probe)) return false;
    gpt_connect(gpt, probe);
    draw_weights(probe, gpt);
    return run_open_data(probe) && run_prepare_saves(probe);
}

// TFLOP/s of the passes. The first steps choose kernels and fill caches.
static double timed_tflops(Run *probe, GPT *gpt, TrainStep train_step) {
    const int warm = 3, timed = 5;
    for (int i = 0; i < warm; i++) train_step(probe, gpt);
    timer_take_seconds(probe->timers, TIMER_FORWARD_BACKWARD);
    for (int i = 0; i < timed; i++) train_step(probe, gpt);
    double seconds = timer_take_seconds(probe->timers, TIMER_FORWARD_BACKWARD);
    return megatron_flops(&probe->config, timed * probe->config.global_batch_size) / seconds / 1e12;
}

bool measure_passes(Run *run, TrainStep train_step) {
    Run probe;
    GPT gpt;
    if (run->launch.size > 1) {
        return error_set(&run->error, EXIT_USAGE,
                         "--plan-measure times one rank; start it without mpirun, and say --plan-world-size");
    }
    run_init(&probe);
    memset(&gpt, 0, sizeof gpt);
    probe.launch = run->launch;
    probe.config = config_to_measure(&run->config);
    bool ok = start_probe(&probe, &gpt);
    if (ok) run->config.plan_tflops = timed_tflops(&probe, &gpt, train_step);
    run->error = probe.error;
    tp_close(&gpt.tp);
    run_close(&probe);
    gpt_free(&gpt);
    return ok;
}
