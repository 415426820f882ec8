// Startup of a run and its model: see startup.h.
#include "llmc/run/startup.h"

#include "llmc/plan/rank_plan.h"
#include "llmc/run/eval_tasks.h"

bool plan_run(Run *run, GPT *gpt) {
    const Config *c = &run->config;
    if (!run_place(run)) return false;
    if (config_only_checks_data(c)) return true;
    run->zero = rank_plan(gpt, c, &run->mesh, &run->memory_plan, &run->error);
    run->whole = gpt->whole;
    run->whole_count = gpt->whole_tensors;
    return run->zero != NULL;
}

void gpt_connect(GPT *gpt, Run *run) {
    gpt_start(gpt, run->zero, run->device, run->compute, run->timers);
    gpt->pipeline = run->pipeline;
    tp_open(&gpt->tp, run->device);
}

void draw_weights(Run *run, GPT *gpt) {
    gpt_init_weights(gpt, (uint64_t)run->config.seed, run_peers(run, run->launch.world));
    zero_masters_from_weights(run->zero);
}

// Loads the weights from a checkpoint or initializes them.
static bool fill_weights(Run *run, GPT *gpt) {
    Loaded loaded = load_checkpoint(run);
    if (loaded != LOAD_FRESH) return loaded == LOAD_RESTORED;
    draw_weights(run, gpt);
    return true;
}

bool start_run(Run *run, GPT *gpt) {
    if (!eval_tasks_open(run) || !run_allocate(run) || !run_connect(run)) return false;
    gpt_connect(gpt, run);
    report_start(run);
    timer_start(run->timers, TIMER_SETUP, NULL);
    if (!fill_weights(run, gpt)) return false;
    timer_stop(run->timers, TIMER_SETUP, NULL);
    if (!run_setup_data(run)) return false;
    timer_start(run->timers, TIMER_SETUP, NULL);
    if (!run_prepare_saves(run)) return false;
    timer_stop(run->timers, TIMER_SETUP, NULL);
    log_phase_timers(run->log, run->timers, TIMER_SETUP, 2, run_peers(run, run->launch.world));
    return true;
}
