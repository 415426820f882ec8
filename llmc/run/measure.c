// --plan-measure: see run.h.
#include "llmc/run/run.h"
#include "llmc/ranks/parallel.h"
#include "llmc/state/scratch_file.h"

#include <assert.h>
#include <string.h>

enum { MEASURED_LAYERS = 4 };

// Returns the config of a run on one rank that has mock data and a few of the model's layers, and
// saves and logs nothing. Strings are borrowed from `config`.
static Config config_to_measure(const Config *config) {
    Config c = *config;
    if (c.num_layers > MEASURED_LAYERS) c.num_layers = MEASURED_LAYERS;
    c.plan = c.quantized_weights = c.quantized_gradients = c.hadamard_transform = c.error_feedback = false;
    c.optimizer_disk_offload = NULL;
    c.optimizer_cpu_offload = c.sequence_parallel = c.emulate_nodes = false;
    c.plan_world_size = c.gpus_per_node = c.num_layers_per_virtual_pipeline_stage = 0;
    c.tensor_model_parallel_size = c.pipeline_model_parallel_size = c.local_steps = 1;
    c.local_steps_delay = 0;
    c.replica_group = NULL;
    c.sharding = SHARD_OPTIMIZER;
    c.recompute_granularity = RECOMPUTE_NONE;
    c.mock_data = true;
    c.reset_attention_mask |= c.sft;  // mock data has documents, but no conversations and loss masks
    c.sft = false;
    if (c.lora_rank) c.pretrained_checkpoint = "frozen weights";  // required, but not read
    // Use a schedule that is always valid: no warm-up, no batch ramp-up, no decay.
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
    c.words = NULL;  // owned by `config`
    c.words_count = 0;
    c.wandb_jsonl = NULL;
    memset(c.data_words, 0, sizeof c.data_words);
    return c;
}

// Measures the bandwidth of the disk for the optimizer state, if the run uses it.
static bool measure_disk(Run *run, Error *err) {
    enum { FILE_BYTES = 1 << 30 };
    Config *c = &run->config;
    if (!c->optimizer_disk_offload) return true;
    Peers self = run_peers(run, run->launch.world);
    double speed = scratch_bandwidth(c->optimizer_disk_offload, FILE_BYTES, parallel_share(self), self, err);
    c->plan_disk_bandwidth = speed / 1e9;
    return speed > 0;
}

bool measurement_begin(Run *run, Run *measured, GPT *gpt) {
    assert(run && measured && gpt && run != measured);
    run_init(measured);
    memset(gpt, 0, sizeof *gpt);
    if (run->launch.size > 1) {
        return usage_error(
            &measured->error,
            "--plan-measure times one rank; start it without mpirun and use --plan-world-size");
    }
    if (!measure_disk(run, &measured->error)) return false;
    measured->launch = run->launch;
    measured->config = config_to_measure(&run->config);
    // The steps of start_run, without checkpoints and log lines.
    if (!plan_run(measured, gpt) || !run_allocate(measured) || !run_connect(measured)) return false;
    gpt_connect(gpt, measured);
    draw_weights(measured, gpt);
    return run_open_data(measured) && run_prepare_saves(measured);
}

void measurement_end(Run *run, Run *measured, GPT *gpt, bool ok) {
    if (ok) {
        double samples = MEASURE_STEPS * measured->config.global_batch_size;
        double seconds = timer_take_seconds(measured->timers, TIMER_FORWARD_BACKWARD);
        run->config.plan_tflops = megatron_flops(&measured->config, samples) / seconds / 1e12;
    }
    run->error = measured->error;
    tp_close(&gpt->tp);
    run_close(measured);
    gpt_free(gpt);
}
