// Everything a run is told, as one plain struct. config_parse fills it from the command line,
// config_finish completes and checks it. A loaded checkpoint may still change the schedule and
// train_iters before the first step; from then on it is read-only. Fields have the flags' names,
// with underscores. Every module that has settings reads it, and checkpoints hold all of it.
#pragma once
#include <stdio.h>

#include "llmc/base/base.h"
#include "llmc/config/options.h"
#include "llmc/data/data_args.h"
#include "llmc/data/tokenizer.h"
LLMC_BEGIN

// Enums whose values are in the order of their flag's words (config_table.c); TokenizerType is one
// of them.
typedef enum LrStyle { LR_CONSTANT, LR_LINEAR, LR_COSINE, LR_INVERSE_SQUARE_ROOT, LR_WSD } LrStyle;
typedef enum WsdStyle { WSD_EXPONENTIAL, WSD_LINEAR, WSD_COSINE, WSD_MINUS_SQRT } WsdStyle;
typedef enum WeightDecayStyle {
    WEIGHT_DECAY_CONSTANT,
    WEIGHT_DECAY_LINEAR,
    WEIGHT_DECAY_COSINE
} WeightDecayStyle;
typedef enum Normalization { LAYERNORM, RMSNORM } Normalization;
typedef enum PositionEmbedding { POSITIONS_LEARNED, POSITIONS_ROPE } PositionEmbedding;
typedef enum Recompute { RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL } Recompute;
// qWD | qW | bf16, its changes coded without loss
typedef enum WeightMethod { WEIGHT_DIFFERENCE, WEIGHT_DIRECT, WEIGHT_LOSSLESS } WeightMethod;
// Codecs of the hop between nodes: scales by the largest value of a group | EDEN
typedef enum GradientMethod { GRADIENT_UNIFORM, GRADIENT_EDEN } GradientMethod;
typedef enum LogLine { LINE_MEGATRON, LINE_SHORT } LogLine;
typedef enum NodeExchange { NODE_EXCHANGE_AUTO, NODE_EXCHANGE_NCCL, NODE_EXCHANGE_COPIES } NodeExchange;
// What data-parallel ranks share out (README, Memory): the optimizer's state alone; gradients too;
// weights as well. And whom the weights are shared among: the ranks of a node, or all.
typedef enum Sharding { SHARD_OPTIMIZER, SHARD_GRADIENTS, SHARD_PARAMETERS } Sharding;
typedef enum ShardScope { SHARD_IN_NODE, SHARD_IN_WORLD } ShardScope;
typedef enum OnNan { ON_NAN_ABORT, ON_NAN_SKIP } OnNan;
typedef enum OnSpike { ON_SPIKE_REPORT, ON_SPIKE_SKIP } OnSpike;
typedef enum PlanGpu {
    GPU_A100,
    GPU_A800,
    GPU_H100,
    GPU_H200,
    GPU_H800,
    GPU_B200,
    GPU_MI300X,
    GPU_L40S,
    GPU_RTX_4090
} PlanGpu;
typedef enum TimingLogOption { TIMING_MAX, TIMING_MINMAX, TIMING_ALL } TimingLogOption;

typedef struct Config {
    // model (Megatron's names)
    int num_layers, hidden_size, ffn_hidden_size, num_attention_heads, kv_channels;
    int seq_length, max_position_embeddings, make_vocab_size_divisible_by;
    double init_method_std, norm_epsilon, attention_dropout, hidden_dropout;
    Normalization normalization;
    PositionEmbedding position_embedding_type;
    double rotary_base, rotary_percent;
    bool use_rope_scaling;  // of Llama 3.1
    double rope_scaling_factor;
    int num_query_groups;  // with group_query_attention; else see config_query_groups
    bool group_query_attention, swiglu, disable_bias_linear, untie_embeddings_and_output_weights;
    bool qk_layernorm;
    // batch and length of the run
    int micro_batch_size, global_batch_size;
    int64_t train_iters, train_samples;
    Words rampup_batch_size;  // start, increment, samples
    bool skip_train;
    // optimizer and schedule
    double lr, min_lr, lr_warmup_fraction, lr_warmup_init;
    int64_t lr_decay_iters, lr_decay_samples, lr_warmup_iters, lr_warmup_samples;
    int64_t lr_wsd_decay_iters, lr_wsd_decay_samples;
    LrStyle lr_decay_style;
    WsdStyle lr_wsd_decay_style;
    double weight_decay, start_weight_decay, end_weight_decay;
    WeightDecayStyle weight_decay_incr_style;
    double adam_beta1, adam_beta2, adam_eps, clip_grad;
    bool override_opt_param_scheduler, use_checkpoint_opt_param_scheduler;
    // data
    Words data_path, train_data_path, valid_data_path, test_data_path;
    const char *data_args_path, *per_split_data_args_path;  // files that the lists above were read from
    double mid_level_dataset_surplus;  // 0: as the paper's fork; SplitRequest of data/dataset.h
    const char *split, *vocab_file, *merge_file, *tokenizer_model, *tokenizer_eod;
    TokenizerType tokenizer_type;
    int64_t vocab_size;  // NullTokenizer's --vocab-size
    bool mock_data, eod_mask_loss, reset_position_ids, reset_attention_mask, check_data;
    int64_t inspect_data;  // sample index, -1 = off
    // distributed
    int tensor_model_parallel_size, pipeline_model_parallel_size;  // T ranks share a layer; P stages
    int num_layers_per_virtual_pipeline_stage;                     // 0: a stage's layers are one chunk
    bool sequence_parallel;  // LayerNorms and residuals are shared by tokens; false with T = 1
    int gpus_per_node;       // ranks per node; 0 = the real hosts
    bool emulate_nodes;      // their borders are real for NCCL
    NodeExchange node_exchange;
    bool use_distributed_optimizer, overlap_grad_reduce, overlap_param_gather, no_overlap,
        grad_reduce_in_bf16;
    Sharding sharding;           // --data-parallel-sharding-strategy
    ShardScope shard_scope;      // of SHARD_PARAMETERS
    bool secondary_partition;    // of SHARD_IN_WORLD: backward gathers inside the node
    bool optimizer_cpu_offload;  // master weights and moments in host memory, AdamW by host threads
    int64_t ddp_bucket_size;     // elements
    double distributed_timeout_minutes;
    // SDP4Bit
    bool quantized_weights, quantized_gradients, hadamard_transform;
    int weight_quantization_bits, wq_group_size;
    WeightMethod weight_quantization_method;
    GradientMethod gradient_quantization_method;
    int gradient_quantization_bits_inter, gradient_quantization_bits_intra, gq_group_size_inter,
        gq_group_size_intra;
    int gradient_alltoall_pipeline;
    int64_t gradients_quantization_start_iteration;
    int gq_rounding, wq_rounding;  // enum Rounding of sdp4bit/codec.h
    bool error_feedback;           // of gradients between nodes
    int64_t verify_replicas_interval;
    bool verify_wire;
    // local steps: nodes train by themselves and exchange now and then. 1: they do not
    int local_steps, local_steps_delay;
    double outer_lr, outer_momentum, local_steps_mix;
    // memory and determinism
    bool recompute_activations, deterministic_mode;
    Recompute recompute_granularity;
    // evaluation, logs
    int64_t log_interval, eval_interval, eval_iters;
    bool full_validation;
    Words eval_tasks;
    bool log_eval_samples;
    int timing_log_level;
    TimingLogOption timing_log_option;
    LogLine log_line;
    bool log_throughput, log_timers_to_tensorboard, log_validation_ppl_to_tensorboard, log_params_norm,
        log_num_zeros_in_grad, log_batch_size_to_tensorboard, log_world_size_to_tensorboard,
        log_memory_to_tensorboard, log_progress;
    const char *tensorboard_dir, *log_jsonl;
    int64_t tensorboard_log_interval;
    const char *dump_distributions;
    int64_t dump_distributions_interval, log_quantization_error_interval;  // 0: off
    const char *wandb_project, *wandb_exp_name, *wandb_save_dir;  // accepted; JSON lines are written instead
    // sampling of text, during and after training
    const char *sample_prompt;
    int sample_tokens;
    int64_t sample_interval;  // 0: only after training
    double sample_temperature;
    // checkpoints and leaving
    const char *save, *load;
    int64_t save_interval, exit_interval;
    bool async_save;
    int64_t keep_last_checkpoints, keep_checkpoint_interval;  // 0: all; 0: none but the last
    double exit_duration_in_mins;
    bool exit_on_missing_checkpoint, finetune, no_load_optim, no_save_optim;
    OnNan on_nan;
    OnSpike on_spike;
    double loss_spike_factor, norm_spike_factor;
    int64_t max_skipped_in_a_row;
    bool check_for_nan_in_loss_and_grad;
    int64_t seed, eval_seed;  // eval_seed 0: seed
    // actions instead of training
    bool plan, help, version;
    int plan_world_size;  // with --plan only: the number of ranks to plan for (0: the real one)
    double plan_network, plan_network_inside;  // with --plan only: Gb/s of a node, of a GPU inside it
    double plan_network_burst;                 // MB that a node sends at once after a pause
    PlanGpu plan_gpu;                          // and how fast a GPU computes
    bool plan_measure;                         // or measure that here
    double plan_lossless_bits;                 // that a weight coded without loss takes
    double plan_tflops, plan_step_ms;          // instead of what it is said to do; 0: not given

    // --- derived by config_finish ---
    int vocab_size_unpadded, vocab_size_padded;  // V, Vp
    int eod;
    int world_size, dp_size;
    int micro_batches;                                       // per iteration at the full global batch size
    int64_t rampup_start, rampup_increment, rampup_samples;  // 0 when not ramping
    int64_t total_samples;     // of the whole run: --train-samples, or train_iters * global_batch_size
    double warmup_samples_wn;  // Wn, may be fractional
    int64_t decay_samples_dn;  // Dn
    int64_t wsd_samples;       // the last of them, over which WSD decays
    // Over which weight decay ramps from start_weight_decay to end_weight_decay.
    int64_t weight_decay_samples;
    char **words;  // every word of the command line and its argument files: the text fields point into them
    int words_count;
    DataWords data_words[SPLITS];  // backing store of lists that were read from files
    char *wandb_jsonl;             // backing store of log_jsonl when --wandb-project implied it
} Config;

// Parses argv and checks everything that depends on the flags alone: syntax, ranges, required
// flags, flags that exclude each other. "@file" anywhere stands for the file's words (options.h).
// On failure nothing needs freeing.
// notes: one line for each flag without effect that a user would want to know of, to be printed
// once by rank 0. May be NULL.
// --help or --version anywhere: only that field is set, and nothing is checked.
// Error (EXIT_USAGE), naming the flag: unknown (with the nearest known name), missing, malformed,
// out of range, refused on purpose (with the reason), an option of torchrun.
bool config_parse(Config *config, int argc, char **argv, char *notes, size_t notes_bytes, Error *err);
// Completes derived fields, and checks what depends on the number of ranks and on the vocabulary.
// world_size: ranks, as mesh_build has accepted them, so a multiple of T x P: --plan-world-size,
// else those that were started. vocab_size, eod: the tokenizer's. vocab_size 0, when no files were
// opened: what the tokenizer type implies, which is 50257 and 50256 for GPT-2. Error: EXIT_USAGE.
bool config_finish(Config *config, int world_size, int vocab_size, int eod, Error *err);
// What tokenizer_open is to open for these flags.
TokenizerChoice config_tokenizer(const Config *config);
void config_free(Config *config);
// Whether the run is --check-data and nothing else. Then only the data's flags are required and
// checked, and config_finish fills in the vocabulary alone.
bool config_only_checks_data(const Config *config);
// --help: every flag, in groups, with its default. What has no effect or is refused says why.
void config_help(const char *program, FILE *file);
// Megatron's argument dump, "--- arguments ---": sorted, names dotted to column 48.
void config_print(const Config *config, FILE *file);
// All flags and derived fields as one JSON object (malloc'ed text): Megatron's names with
// underscores, null for what was not given.
char *config_to_json(const Config *config);
// Whether two such texts, this rank's and rank 0's, are of one run. All flags that have an effect
// must be equal, and so must the vocabularies' sizes and ends of documents. Paths may differ from
// machine to machine: only their number counts. What only rank 0 writes does not count, nor do its
// flags.
// Error (EXIT_USAGE): the first flag that differs, with both values.
bool config_same(const char *own_json, const char *first_json, Error *err);
// Called when a checkpoint is loaded, after config_finish. saved_json: its config_to_json text. The
// layout may differ: number of ranks, T, P, sequence parallelism, and what travels. A schedule flag
// may differ (learning rates, warm-up and decay in samples, weight decay) with
// --override-opt_param-scheduler, where the command line wins, or
// --use-checkpoint-opt_param-scheduler, which copies the saved schedule into config. --finetune
// compares the model only. Differences that change the order of the data become notes.
// Error (EXIT_CHECKPOINT): text that is no JSON object; a model flag, or else a schedule flag, that
// differs.
bool config_match_checkpoint(Config *config, const char *saved_json, char *notes, size_t notes_bytes,
                             Error *err);
// The model of a checkpoint, for a program that trains nothing, on one rank: whole, with
// micro-batches of one sequence. saved_json: the checkpoint's config_to_json text, of
// which the model's flags and the tokenizer's are read. own: flags of the command line that come
// after them.
// What trains keeps its defaults. Call config_free afterward. Error (EXIT_CHECKPOINT): what is
// missing, or makes no model.
bool config_of_checkpoint(Config *config, const char *saved_json, const Words *own, Error *err);
// Whether a checkpoint's residual of error feedback means the same to this run: the transform of
// gradients and what keys it, and the parts of tensors. What the text does not say counts as equal.
bool config_same_residual(const Config *config, const char *saved_json);
// Global batch size of the iteration that starts after `consumed_samples`. Megatron's batch
// ramp-up: start + increment * floor(consumed / (ramp samples / steps)) while consumed <= ramp
// samples, then the full size. config_finish makes sure that each size is a multiple of micro-batch
// size x data-parallel size.
int config_global_batch_size(const Config *config, int64_t consumed_samples);
// Width of the MLP where --ffn-hidden-size does not say it.
int config_default_ffn(const Config *config);
// Groups of heads that share keys and values: --num-query-groups, or one for each head.
int config_query_groups(const Config *config);
// Columns of a head that rotary positions turn, 0 with learned positions. Not before
// config_finish.
int config_rotary_columns(const Config *config);
// Chunks of layers that a pipeline stage holds.
int config_pipeline_chunks(const Config *config);
// Called when a checkpoint is loaded. --train-samples counts the samples of all runs: what is left
// of them decides train_iters, whatever the batch sizes before were. (Megatron-LM counts as if they
// had been this run's.) A note says where that moves the end.
void config_go_on(Config *config, int64_t iteration, int64_t consumed_samples, char *notes,
                  size_t notes_bytes);
// Samples taken when iteration train_iters is done, by a run that stands at `iteration` with
// `consumed_samples` taken.
int64_t config_samples_at_end(const Config *config, int64_t iteration, int64_t consumed_samples);
// The option table, for tests and documentation. Rows without a name are headings.
const Option *config_options(int *rows);

LLMC_END
