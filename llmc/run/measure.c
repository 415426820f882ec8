// --plan-measure: see measure.h.
#include "llmc/run/measure.h"

#include <string.h>

#include "llmc/config/flops.h"
#include "llmc/run/start.h"

enum { MEASURED_LAYERS = 4 };

// A run of one rank with few of the model's layers. Tokens are made up, nothing is saved or logged.
// It borrows config's words.
static Config config_to_measure(const Config *config) {
    Config c = *config;
    if (c.num_layers > MEASURED_LAYERS) c.num_layers = MEASURED_LAYERS;
    c.plan = c.quantized_weights = c.quantized_gradients = c.hadamard_transform = c.error_feedback = false;
    c.optimizer_cpu_offload = c.sequence_parallel = c.emulate_nodes = false;
    c.plan_world_size = c.gpus_per_node = c.num_layers_per_virtual_pipeline_stage = 0;
    c.tensor_model_parallel_size = c.pipeline_model_parallel_size = c.local_steps = 1;
    c.local_steps_delay = 0;
    c.sharding = SHARD_OPTIMIZER;
    c.recompute_granularity = RECOMPUTE_NONE;
    c.mock_data = true;
    // A schedule that any run can have: no warm-up, no ramp, no other decay.
    c.global_batch_size = c.micro_batch_size;
    c.rampup_batch_size.count = 0;
    c.train_iters = c.lr_decay_iters = 1000;
    c.train_samples = c.lr_decay_samples = c.lr_warmup_samples = c.lr_warmup_iters = 0;
    c.lr_warmup_fraction = 0;
    c.lr_decay_style = LR_CONSTANT;
    c.save = c.load = c.log_jsonl = c.tensorboard_dir = c.wandb_project = c.dump_distributions = NULL;
    c.dump_distributions_interval = c.log_quantization_error_interval = 0;
    c.eval_iters = 0;
    c.timing_log_level = 2;
    // What the other configuration owns.
    c.words = NULL;
    c.words_count = 0;
    c.wandb_jsonl = NULL;
    memset(c.data_words, 0, sizeof c.data_words);
    return c;
}

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
