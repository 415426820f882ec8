// Sets up a run from its flags: mesh, device, memory, groups, weights and data. See run.h.
#include <assert.h>
#include <math.h>
#include <stdlib.h>

#include "llmc/base/durable.h"
#include "llmc/checkpoint/save_folder.h"
#include "llmc/run/run.h"
#include "llmc/state/stats.h"

// Gets the vocabulary size and the end-of-document id from the tokenizer. Leaves them 0 for GPT-2
// BPE without files or with --plan; config_finish then uses GPT-2's sizes.
static bool open_tokenizer(Run *run, int *vocab, int *eod) {
    const Config *c = &run->config;
    if (c->tokenizer_type == TOKENIZER_GPT2_BPE && (!c->vocab_file || c->plan)) return true;
    TokenizerChoice choice = config_tokenizer(c);
    run->tokenizer = tokenizer_open(&choice, &run->error);
    if (!run->tokenizer) return false;
    *vocab = tokenizer_vocab_size(run->tokenizer);
    *eod = tokenizer_eod(run->tokenizer);
    return true;
}

// Makes each node a replica group (--local-steps). An outer step of a single group would only
// change that group's own training, so training needs two nodes. A plan may not know the hosts.
static bool make_replica_groups(Run *run) {
    const Config *c = &run->config;
    bool trains = !c->plan && !c->skip_train && !c->check_data && c->inspect_data < 0;
    if (trains && run->mesh.nodes == 1) {
        return usage_error(&run->error,
                           "--local-steps needs two or more nodes, or replica groups (--replica-group), but "
                           "this run has one node; add nodes, set --gpus-per-node, or drop --local-steps");
    }
    return mesh_make_replica_groups(&run->mesh, &run->error);
}

bool run_place(Run *run) {
    Config *c = &run->config;
    int vocab = 0, eod = 0, ranks = c->plan_world_size ? c->plan_world_size : run->launch.size;
    int rank = ranks == run->launch.size ? run->launch.rank : 0, *made_up = NULL;
    if (c->plan_world_size) made_up = xcalloc((size_t)ranks, sizeof(int), "the host table");
    const int *hosts = made_up ? made_up : run->launch.host_of_rank;
    bool ok = mesh_build(&run->mesh, rank, ranks, hosts, c->gpus_per_node, c->tensor_model_parallel_size,
                         c->pipeline_model_parallel_size, &run->error);
    free(made_up);
    if (ok && c->sharding == SHARD_PARAMETERS)
        mesh_shard_weights(&run->mesh, c->shard_scope == SHARD_IN_WORLD);
    if (ok && c->local_steps > 1 && !c->replica_group) ok = make_replica_groups(run);
    if (!ok || !open_tokenizer(run, &vocab, &eod) || !config_finish(c, ranks, vocab, eod, &run->error))
        return false;
    run->own = devices_in_order(run->launch.host);
    run->site.node = run->mesh.world.rank / run->mesh.per_node;
    run->site.gpu = device_kind()->numbered ? run->own.index : -1;
    run->guard.config = c;
    run->guard.mesh = &run->mesh;
    return true;
}

static bool open_device(Run *run) {
    run->site.phase = "setup";
    run->own = devices_choose(run_peers(run, run->launch.host), &run->mesh, run->config.emulate_nodes);
    // Error messages name a GPU by the rank's index on its host, because a rank that sees only one
    // GPU always has device index 0. If ranks share GPUs, messages use the device index.
    if (run->own.sharers > 1 && device_kind()->numbered) run->site.gpu = run->own.index;
    run->device = device_open(run->own.index, &run->site, &run->error);
    if (!run->device) return false;
    Fp8Blocks blocks = run->config.fp8_recipe == FP8_BLOCKWISE ? FP8_ROWS : FP8_WHOLE;
    if (config_fp8_on(&run->config) && !op_check_fp8(run->device, blocks, &run->error)) return false;
    device_set_deterministic(run->device, run->config.deterministic_mode);
    run->compute = stream_create(run->device, "compute");
    lanes_open(&run->lanes, run->device, run->mesh.dp.size > 1 && !run->config.no_overlap);
    run->timers = timers_create(run->device, run->config.timing_log_level);
    run->log = log_open(&run->config, run->launch.size, run->launch.rank == 0, &run->site, &run->error);
    return run->log != NULL && stats_folder(&run->config, &run->error);
}

// Ranks that share a device, or a host on CPUs, all measure free memory before any of them
// allocates.
bool run_allocate(Run *run) {
    if (!run_agreed(run, open_device(run))) return false;
    const Config *c = &run->config;
    const ModelPlan model = {gpt_planned_bytes, &run->mesh};
    memory_measure(&run->memory, &run->memory_plan, run->device, devices_memory_sharers(&run->own),
                   run->own.host_ranks, run->launch.size, memory_nccl_in_node(c, &run->mesh));
    return run_agreed(run, true) &&
           run_agreed(run, memory_allocate(&run->memory, &run->memory_plan, c, model, &run->error));
}

// Checks that --save is writable and visible to all ranks, and locks it for this job.
static bool claim_save_folder(Run *run) {
    const char *save = run->config.save;
    Peers world = run_peers(run, run->launch.world);
    bool ok = true;
    if (!save) return true;
    if (run->launch.rank == 0) {
        double patience = peers_patience(world);
        ok = durable_writable_folder(save, &run->error) &&
             save_folder_lock(save, patience, &run->save_lock, &run->error);
    }
    return run_agreed(run, ok) && run_agreed(run, same_save_folder(save, world, &run->error));
}

bool run_connect(Run *run) {
    assert(run->zero && run->device);
    Peers world = run_peers(run, run->launch.world);
    if (!claim_save_folder(run)) return false;
    if (!run_agreed(run, mesh_open(&run->mesh, world, &run->error))) return false;
    if (run->config.emulate_nodes) devices_emulate_nodes(&run->own, &run->mesh, &run->launch);
    if (!run_agreed(run, zero_open_disk(run->zero, world, run_peers(run, run->launch.host), run->log,
                                        &run->error)))
        return false;
    comm_open(&run->mesh, run->device, world.limit);
    run->pipeline = pipeline_open(&run->mesh, config_pipeline_chunks(&run->config), run->device);
    zero_start(run->zero, run->device, run->compute, &run->lanes, run->timers);
    return true;
}

bool run_open_data(Run *run) {
    assert(!run->loader);
    const Config *c = &run->config;
    LoaderOptions o = loader_options(c, mesh_data_rank(&run->mesh), mesh_data_ranks(&run->mesh));
    loader_options_resume(&o, c, run->iteration, run->consumed_train, run->consumed_valid);
    run->site.phase = "load data";
    run->loader = loader_open(&o, run_peers(run, run->launch.host), &run->error);
    if (!run->loader || !c->full_validation || !loader_has_split(run->loader, SPLIT_VALID))
        return run->loader != NULL;
    if (run_eval_iters(run, SPLIT_VALID) > 0) return true;
    return data_error(&run->error,
                      "the validation split has %lld samples, fewer than a global batch of %d; increase its "
                      "weight with --split, or drop --full-validation",
                      (long long)loader_samples(run->loader, SPLIT_VALID), c->global_batch_size);
}

int64_t run_eval_iters(const Run *run, int split) {
    assert(split >= 0 && split < SPLITS);
    const Config *c = &run->config;
    if (!loader_has_split(run->loader, split)) return 0;
    if (split != SPLIT_VALID || !c->full_validation) return c->eval_iters;
    return loader_samples(run->loader, split) / c->global_batch_size;
}

// Logs a note if the split has a different number of samples than in the checkpoint.
static void compare_split(Run *run, int split) {
    int64_t samples = loader_samples(run->loader, split), before = run->split_samples[split];
    if (!samples) return;
    if (before && samples != before) {
        log_line(run->log,
                 "the %s split has %lld samples, but had %lld at the last save, so training continues with "
                 "the data in a different order",
                 split_name(split), (long long)samples, (long long)before);
    }
    run->split_samples[split] = samples;
}

bool run_setup_data(Run *run) {
    timer_start(run->timers, TIMER_DATA_SETUP, NULL);
    if (!run_agreed(run, run_open_data(run))) return false;
    if (!run_agreed(run, same_data(run->loader, run_peers(run, run->launch.world), &run->error)))
        return false;
    if (run->launch.rank == 0) loader_print_summary(run->loader, stdout);
    for (int split = SPLIT_TRAIN; split <= SPLIT_VALID && !run->config.mock_data; split++)
        compare_split(run, split);
    if (run->config.full_validation && !loader_has_split(run->loader, SPLIT_VALID)) {
        log_line(run->log, "WARNING: --full-validation has no effect: there is no validation data");
    }
    run->site.phase = "setup";
    timer_stop(run->timers, TIMER_DATA_SETUP, NULL);
    return true;
}

bool run_prepare_saves(Run *run) {
    const Config *c = &run->config;
    bool writes = run->launch.rank == 0 && c->log_progress && c->save;
    run->schedule = schedule_from_config(c);  // a loaded checkpoint may have changed it
    run->progress = progress_open(c->save, run->launch.size, run->flops_so_far, writes, &run->error);
    if (!run_agreed(run, run->progress != NULL)) return false;
    run->saver = (Saver){.config = c,
                         .mesh = &run->mesh,
                         .zero = run->zero,
                         .whole = run->whole,
                         .whole_count = run->whole_count,
                         .base = run->base,
                         .log = run->log,
                         .progress = run->progress,
                         .peers = run_peers(run, run->launch.world),
                         .before = run->resumed_from,
                         .lock = &run->save_lock};
    return !c->save || run_agreed(run, saver_has_room(&run->saver, run->iteration, &run->error));
}

static const char *decode_token(const void *tokenizer, int id, size_t *bytes) {
    return tokenizer_decode((const Tokenizer *)tokenizer, id, bytes);
}

void run_look_at_data(Run *run) {
    const Config *c = &run->config;
    bool first = run->launch.rank == 0;
    LoaderOptions o = loader_options(c, mesh_data_rank(&run->mesh), mesh_data_ranks(&run->mesh));
    if (!run_agreed(run, !first || !c->check_data || check_data(&o, stdout, &run->error))) return;
    if (c->inspect_data < 0 || !run_agreed(run, run_open_data(run))) return;
    run_agreed(run,
               !first || loader_inspect(run->loader, c->inspect_data, stdout,
                                        run->tokenizer ? decode_token : NULL, run->tokenizer, &run->error));
}

// --- the startup sequence ------------------------------------------------------------------------

// LoRA needs a model to freeze.
static bool has_base(Run *run) {
    const Config *c = &run->config;
    if (!c->lora_rank || c->plan) return true;
    if (c->save && config_lora_base(c) && save_folder_same(c->save, config_lora_base(c))) {
        return usage_error(&run->error,
                           "--save %s is the folder of the frozen model, which its adapters would hide; "
                           "choose another folder",
                           c->save);
    }
    if (config_lora_base(c)) return true;
    return usage_error(&run->error,
                       "--lora-rank needs the model to freeze; name its checkpoints with "
                       "--pretrained-checkpoint FOLDER, or with --load FOLDER --finetune");
}

bool plan_run(Run *run, GPT *gpt) {
    assert(!run->zero && gpt);
    const Config *c = &run->config;
    if (!run_place(run)) return false;
    if (config_only_checks_data(c)) return true;
    run->zero = gpt_plan(gpt, c, &run->mesh, &run->memory_plan, &run->error);
    run->whole = gpt_trained(gpt).whole;
    run->whole_count = gpt_trained(gpt).whole_tensors;
    return run->zero && has_base(run) && elastic_plan(run);
}

void gpt_connect(GPT *gpt, Run *run) {
    gpt_start(gpt, run->zero, run->device, run->compute, run->timers);
    run->gpt = gpt;
    gpt->pipeline = run->pipeline;
    tp_open(&gpt->tp, run->device);
}

void draw_weights(Run *run, GPT *gpt) {
    gpt_init_weights(gpt, (uint64_t)run->config.seed, run_peers(run, run->launch.world));
    zero_init_master_weights(run->zero);
}

// Loads the weights from a checkpoint or initializes them.
static bool fill_weights(Run *run, GPT *gpt) {
    if (run->config.lora_rank && !load_base(run)) return false;
    Loaded loaded = load_checkpoint(run);
    if (loaded == LOAD_FRESH) draw_weights(run, gpt);
    return loaded != LOAD_FAILED;
}

bool start_run(Run *run, GPT *gpt) {
    assert(run->zero && gpt);
    if (!eval_tasks_open(run) || !run_allocate(run) || !run_connect(run)) return false;
    gpt_connect(gpt, run);
    report_start(run);
    timer_start(run->timers, TIMER_SETUP, NULL);
    if (!fill_weights(run, gpt)) return false;
    timer_stop(run->timers, TIMER_SETUP, NULL);
    if (!run_setup_data(run)) return false;
    timer_start(run->timers, TIMER_SETUP, NULL);
    if (!run_prepare_saves(run) || !elastic_join(run)) return false;
    timer_stop(run->timers, TIMER_SETUP, NULL);
    log_phase_timers(run->log, run->timers, TIMER_SETUP, 2, run_peers(run, run->launch.world));
    return true;
}
