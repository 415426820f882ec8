// The settings of a run as one plain struct. config_parse fills it from the command line;
// config_finish completes and checks it. Loading a checkpoint may still change the schedule and
// train_iters before the first step; after that it is read-only. Fields have the flags' names, with
// underscores. Checkpoints store all of it.
#pragma once
#include <stdio.h>

#include "llmc/base/base.h"
#include "llmc/config/options.h"
#include "llmc/data/data_args.h"
#include "llmc/data/tokenizer.h"
LLMC_BEGIN

// Enum values are in the order of the flag's choices (config_table.c), including TokenizerType.
typedef enum LrStyle { LR_CONSTANT, LR_LINEAR, LR_COSINE, LR_INVERSE_SQUARE_ROOT, LR_WSD } LrStyle;
typedef enum WsdStyle { WSD_EXPONENTIAL, WSD_LINEAR, WSD_COSINE, WSD_MINUS_SQRT } WsdStyle;
typedef enum WeightDecayStyle {
    WEIGHT_DECAY_CONSTANT,
    WEIGHT_DECAY_LINEAR,
    WEIGHT_DECAY_COSINE
} WeightDecayStyle;
typedef enum Normalization { LAYERNORM, RMSNORM } Normalization;
typedef enum PositionEmbedding { POSITIONS_LEARNED, POSITIONS_ROPE, POSITIONS_YARN } PositionEmbedding;
typedef enum Recompute { RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL } Recompute;
typedef enum Optimizing { OPTIMIZER_ADAM, OPTIMIZER_MUON } Optimizing;
typedef enum MuonTensorParallel { MUON_DUPLICATED, MUON_BLOCKWISE } MuonTensorParallel;
typedef enum MomentDtype { MOMENT_FP32, MOMENT_BF16 } MomentDtype;
typedef enum MuonScale { MUON_SPECTRAL, MUON_UNIT_RMS_NORM, MUON_SHAPE_SCALING } MuonScale;
typedef enum MuonCoefficients {
    MUON_SIMPLE,
    MUON_QUINTIC,
    MUON_POLAR_EXPRESS,
    MUON_CANS,
    MUON_AOL,
    MUON_DEEPSEEK_V4,
    MUON_CUBIC5
} MuonCoefficients;
enum { MOST_MUON_STEPS = 64 };
// qWD | qW | differences of bf16 weights, losslessly encoded
typedef enum WeightMethod { WEIGHT_DIFFERENCE, WEIGHT_DIRECT, WEIGHT_LOSSLESS } WeightMethod;
// Codec between nodes: uniform levels with a scale per group | EDEN
typedef enum GradientMethod { GRADIENT_UNIFORM, GRADIENT_EDEN } GradientMethod;
// Formats of FP8 linear layers: off | E4M3 | E4M3, and E5M2 for gradients of activations
typedef enum LoraBaseFormat { LORA_BASE_BF16, LORA_BASE_INT8, LORA_BASE_NF4 } LoraBaseFormat;
typedef enum Fp8Format { FP8_FORMAT_NONE, FP8_FORMAT_E4M3, FP8_FORMAT_HYBRID } Fp8Format;
typedef enum Fp8Recipe { FP8_TENSORWISE, FP8_DELAYED, FP8_BLOCKWISE } Fp8Recipe;
typedef enum Fp8AmaxAlgo { FP8_MOST_RECENT, FP8_MAX } Fp8AmaxAlgo;
typedef enum Detokenizer { DETOKENIZE_NONE, DETOKENIZE_WIKITEXT } Detokenizer;
typedef enum LogLine { LINE_MEGATRON, LINE_SHORT } LogLine;
// How tensor-parallel ranks communicate: peer memory if possible, else NCCL | NCCL | peer memory
typedef enum TpCommBackend { TP_COMM_AUTO, TP_COMM_NCCL, TP_COMM_PEER } TpCommBackend;
typedef enum NodeExchange { NODE_EXCHANGE_AUTO, NODE_EXCHANGE_NCCL, NODE_EXCHANGE_COPIES } NodeExchange;
// State that data-parallel ranks shard: nothing | optimizer state | also gradients | also weights.
// ShardScope: weights are sharded over the ranks of a node, or over all ranks.
typedef enum Sharding { SHARD_NOTHING, SHARD_OPTIMIZER, SHARD_GRADIENTS, SHARD_PARAMETERS } Sharding;
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
    GPU_RTX_4090,
    GPU_RTX_5090
} PlanGpu;
typedef enum TimingLogOption { TIMING_MAX, TIMING_MINMAX, TIMING_ALL } TimingLogOption;

typedef struct Config {
    // model
    int num_layers, hidden_size, ffn_hidden_size, num_attention_heads, kv_channels;
    int seq_length, max_position_embeddings, make_vocab_size_divisible_by;
    double init_method_std, norm_epsilon, attention_dropout, hidden_dropout;
    Normalization normalization;
    PositionEmbedding position_embedding_type;
    double rotary_base, rotary_percent;
    bool use_rope_scaling;  // as in Llama 3.1
    double rope_scaling_factor;
    double rotary_seq_len_interpolation_factor;
    const char *window_size, *window_attn_skip_freq;  // see config_window
    // with POSITIONS_YARN
    double rotary_scaling_factor, yarn_beta_fast, yarn_beta_slow;
    double yarn_attention_factor;  // 0: computed from rotary_scaling_factor
    int yarn_original_max_position_embeddings;
    bool no_yarn_correction_range_round_to_int;
    int num_query_groups;  // used with group_query_attention; see config_query_groups
    bool group_query_attention, swiglu, untie_embeddings_and_output_weights;
    bool disable_bias_linear, add_qkv_bias;
    bool qk_layernorm;
    // batch size and length of the run
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
    Optimizing optimizer;
    double muon_momentum, muon_extra_scale_factor;
    bool muon_nesterov, muon_no_split_qkv;
    MuonScale muon_scale_mode;
    MuonTensorParallel muon_tp_mode;
    MomentDtype exp_avg_dtype;
    MuonCoefficients muon_coefficient_type;
    int muon_num_ns_steps;
    bool override_opt_param_scheduler, use_checkpoint_opt_param_scheduler;
    // data
    Words data_path, train_data_path, valid_data_path, test_data_path;
    const char *data_args_path, *per_split_data_args_path;  // files from which the lists above were read
    double mid_level_dataset_surplus;  // 0: as in the paper's fork; see SplitRequest in data/dataset.h
    const char *split, *vocab_file, *merge_file, *tokenizer_model, *tokenizer_eod;
    TokenizerType tokenizer_type;
    int64_t vocab_size;  // NullTokenizer's --vocab-size
    bool mock_data, eod_mask_loss, calculate_per_token_loss, reset_position_ids, reset_attention_mask, sft,
        check_data;
    int64_t inspect_data;  // sample index, -1 = off
    // distributed
    int tensor_model_parallel_size, pipeline_model_parallel_size;  // T ranks per layer; P stages
    int num_layers_per_virtual_pipeline_stage;                     // 0: one chunk per stage
    bool sequence_parallel;  // LayerNorms and residuals are split by tokens; false with T = 1
    TpCommBackend tp_comm_backend;
    bool tp_comm_overlap;
    int gpus_per_node;   // ranks per node; 0: detect hosts
    bool emulate_nodes;  // treat groups of gpus_per_node ranks as separate machines
    NodeExchange node_exchange;
    bool use_distributed_optimizer, overlap_grad_reduce, overlap_param_gather, no_overlap,
        grad_reduce_in_bf16;
    Sharding sharding;                   // --data-parallel-sharding-strategy
    ShardScope shard_scope;              // with SHARD_PARAMETERS
    bool secondary_partition;            // with SHARD_IN_WORLD: backward gathers within the node
    bool optimizer_cpu_offload;          // master weights and moments in host memory, AdamW on the CPU
    const char *optimizer_disk_offload;  // folder of files with master weights and moments, AdamW on the CPU
    int64_t ddp_bucket_size;             // elements
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
    bool error_feedback;           // for gradients or pseudo-gradients between nodes
    bool quantized_activations;    // between pipeline stages
    int activation_quantization_bits_forward, activation_quantization_bits_backward;  // 16: not quantized
    bool quantized_tensor_parallel;
    int aq_group_size, aq_rounding;  // enum Rounding
    int64_t verify_replicas_interval;
    bool verify_wire;
    // local steps: nodes train independently and synchronize periodically. local_steps 1: off
    int local_steps, local_steps_delay;
    double outer_lr, outer_momentum, local_steps_mix;
    // elastic replica groups: the whole job is one group of a run (llmc/groups/member.h)
    const char *replica_group;  // name; NULL: the job is a run of its own
    const char *rendezvous, *rendezvous_keys, *rendezvous_listen;
    bool rendezvous_serve;
    int min_replica_groups, max_replica_groups;
    double sync_grace_seconds;
    // LoRA: lora_rank 0: off; see config_lora_targets
    int lora_rank;
    double lora_alpha, lora_dropout;
    const char *lora_targets, *pretrained_checkpoint;
    int64_t pretrained_checkpoint_step;  // -1: the tracker's iteration
    LoraBaseFormat lora_base_format;
    // FP8 linear layers; see config_layer_in_fp8
    Fp8Format fp8_format;
    Fp8Recipe fp8_recipe;
    int fp8_margin, fp8_amax_history_len;  // with FP8_DELAYED
    Fp8AmaxAlgo fp8_amax_compute_algo;
    bool first_last_layers_bf16;
    int num_layers_at_start_in_bf16, num_layers_at_end_in_bf16;  // used with first_last_layers_bf16
    // memory and determinism
    bool recompute_activations, deterministic_mode;
    Recompute recompute_granularity;
    // evaluation, logs
    int64_t log_interval, eval_interval, eval_iters;
    bool full_validation;
    Words eval_tasks, eval_text;
    int overlapping_eval;  // stride of --eval-text; longer than seq_length: seq_length
    Detokenizer eval_text_detokenizer;
    bool strict_lambada, log_eval_samples;
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
    const char *wandb_project, *wandb_exp_name,
        *wandb_save_dir;  // not supported; JSON lines are written instead
    // text generation during and after training
    const char *sample_prompt;
    int sample_tokens;
    int64_t sample_interval;  // 0: only after training
    double sample_temperature;
    // checkpoints and exit
    const char *save, *load;
    int64_t save_interval, exit_interval, ckpt_step;  // ckpt_step: -1: the tracker's iteration
    bool async_save;
    int64_t keep_last_checkpoints,
        keep_checkpoint_interval;  // number to keep, 0: all | also keep multiples of this, 0: none
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
    int plan_world_size;  // with --plan: number of ranks to plan for (0: those that were started)
    double plan_network, plan_network_inside;  // with --plan: Gb/s per node, and per GPU in it
    double plan_network_burst;                 // MB that a node sends at full speed after a pause
    PlanGpu plan_gpu;                          // GPU to plan for
    bool plan_measure;                         // measure the speed of this machine's device
    double plan_lossless_bits;                 // bits per lossless weight
    double plan_disk_bandwidth;                // GB/s of reads plus writes of a node
    double plan_tflops, plan_step_ms;          // override the speed of plan_gpu; 0: not given

    // --- derived by config_finish ---
    int vocab_size_unpadded, vocab_size_padded;  // V, Vp
    int eod;
    int world_size, dp_size;
    int micro_batches;                                       // per iteration, at the full global batch size
    int64_t rampup_start, rampup_increment, rampup_samples;  // 0: no ramp-up
    int64_t total_samples;     // whole run: --train-samples, or train_iters * global_batch_size
    double warmup_samples_wn;  // length of the warm-up, may be fractional
    int64_t decay_samples_dn;  // length of the schedule, including the warm-up
    int64_t wsd_samples;       // length of the WSD decay, within decay_samples_dn
    // Samples over which weight decay changes from start_weight_decay to end_weight_decay.
    int64_t weight_decay_samples;
    char **words;  // words of the command line and argument files; text fields point into them
    int words_count;
    DataWords data_words[SPLITS];  // memory of lists that were read from files
    char *wandb_jsonl;             // memory of log_jsonl if --wandb-project implied it
} Config;

// Parses argv and checks everything that depends only on the flags: syntax, ranges, required flags,
// and flags that exclude each other. "@file" is replaced by the words of that file (options.h). On
// failure nothing needs freeing.
// notes: one line per flag without effect that users should know about, for rank 0 to print. May be
// NULL.
// With --help or --version anywhere, only that field is set and nothing is checked.
// Error (EXIT_USAGE), naming the flag: unknown (with the nearest known name), missing, malformed,
// out of range, refused (with the reason), or a flag of torchrun.
bool config_parse(Config *config, int argc, char **argv, char *notes, size_t notes_bytes, Error *err);
// Computes derived fields, and checks what depends on the number of ranks and the vocabulary.
// world_size: --plan-world-size or the number of started ranks; must be a multiple of T x P
// (mesh_build). vocab_size, eod: from the tokenizer. If no tokenizer was opened, pass vocab_size 0;
// the tokenizer type then determines both (GPT-2: 50257 with eod 50256). Error: EXIT_USAGE.
bool config_finish(Config *config, int world_size, int vocab_size, int eod, Error *err);
// Returns the arguments of tokenizer_open for these flags.
TokenizerChoice config_tokenizer(const Config *config);
void config_free(Config *config);
// Returns true for a --check-data run. Then only the data flags are required and checked, and
// config_finish only computes the vocabulary.
bool config_only_checks_data(const Config *config);
// Prints --help: every flag in groups, with its default; for ignored and refused flags, the reason.
void config_help(const char *program, FILE *file);
// Prints Megatron's argument dump, "--- arguments ---": sorted, with dots to column 48.
void config_print(const Config *config, FILE *file);
// Returns all flags and derived fields as a JSON object (malloc'ed): Megatron's names with
// underscores, null if not given.
char *config_to_json(const Config *config);
// Compares the flags of this rank with rank 0's, both as config_to_json text. All flags with an
// effect must be equal, and so must the vocabulary sizes and the end-of-document token. Paths may
// differ between machines, but lists must have the same length. Flags that only rank 0 uses are not
// compared. Error (EXIT_USAGE): the first flag that differs, with both values.
bool config_same(const char *own_json, const char *first_json, Error *err);
// Compares a loaded checkpoint's arguments (config_to_json text), after config_finish. The layout
// may differ: number of ranks, T, P, sequence parallelism, quantization. Schedule flags (learning
// rates, warm-up and decay in samples, weight decay) may differ with
// --override-opt_param-scheduler, where the command line wins, or
// --use-checkpoint-opt_param-scheduler, which copies the saved schedule into config. With
// --finetune, only the model is compared. A model flag that the checkpoint lacks had its default.
// Windows of layers may be spelled differently. Optimizer and schedule may differ if they are not
// loaded (config_loads_optimizer). Differences that change the order of the data or the precision
// become notes. Error (EXIT_CHECKPOINT): not a JSON object, or a model or schedule flag that
// differs.
bool config_match_checkpoint(Config *config, const char *saved_json, char *notes, size_t notes_bytes,
                             Error *err);
// Compares the arguments of the checkpoint that --pretrained-checkpoint names: only the model,
// which must have no adapters. Errors as config_match_checkpoint.
bool config_match_base(const Config *config, const char *saved_json, Error *err);
// Returns --lora-rank of a checkpoint's arguments; 0: the checkpoint holds a whole model.
int config_saved_lora_rank(const char *saved_json);
// Returns true if a checkpoint's arguments have --optimizer muon. saved_json may be NULL.
bool config_saved_with_muon(const char *saved_json);
// Returns true if this run can use a checkpoint's error-feedback residual: the gradient transform,
// the seed and the tensor-parallel size are the same. Missing keys count as equal.
bool config_same_residual(const Config *config, const char *saved_json);
// Returns the global batch size of the iteration that starts after `consumed_samples`. Megatron's
// batch ramp-up: start + increment * floor(consumed / (ramp samples / steps)) while consumed <=
// ramp samples, then the full size. config_finish ensures that each size is a multiple of
// micro-batch size x data-parallel size.
int config_global_batch_size(const Config *config, int64_t consumed_samples);
int config_default_ffn(const Config *config);
// Number of key/value heads: --num-query-groups, or one per head.
int config_query_groups(const Config *config);
// --- config_window.c ---
// Number of keys that a query of a layer of the model sees, its own included; 0: all before it.
int config_window(const Config *config, int layer);
// Sum over the layers of the mean number of keys that a query sees. After config_finish.
double config_visible_keys(const Config *config);
// Checks the texts of both flags. Error: EXIT_USAGE.
bool config_check_window(const Config *config, Error *err);

// --- config_lora.c ---
// Widths of linear layers: inputs and outputs.
typedef struct LoraWidths {
    double inputs, outputs;
} LoraWidths;
// The linear layers of a transformer layer, as bits.
enum { LORA_QKV = 1 << 0, LORA_PROJ = 1 << 1, LORA_FC1 = 1 << 2, LORA_FC2 = 1 << 3, LORA_ALL = 15 };
// Parses --lora-targets. *targets: LORA_* bits. Error (EXIT_USAGE): an unknown name, or a part of a
// fused matrix without the others.
bool config_lora_targets(const Config *config, int *targets, Error *err);
// Returns the sums of the inputs and of the outputs of a layer's adapted linears; 0 without LoRA.
LoraWidths config_lora_widths(const Config *config);
// Returns the number of parameters of all adapters; 0 without LoRA. Needs config_finish.
double config_lora_parameters(const Config *config);
// Returns the folder of the frozen model's checkpoint: --pretrained-checkpoint, or --load with
// --finetune. NULL: none was given.
const char *config_lora_base(const Config *config);
// Returns its iteration; negative: the latest. *flag: the flag that selects it.
int64_t config_lora_base_step(const Config *config, const char **flag);
// Returns the folder with the adapters to continue from; NULL: none, so adapters are initialized.
const char *config_lora_adapters(const Config *config);
// Checks what excludes LoRA. Error: EXIT_USAGE.
bool config_check_lora(const Config *config, Error *err);

// Columns per head that rotary embeddings rotate; 0 with learned positions. After config_finish.
int config_rotary_columns(const Config *config);
// Returns true if --load restores the optimizer state and the schedule. Evaluation (--skip-train)
// needs neither.
bool config_loads_optimizer(const Config *config);
// Returns true with --eval-tasks or --eval-text.
bool config_scores(const Config *config);
int config_pipeline_chunks(const Config *config);
bool config_fp8_on(const Config *config);
// Returns true if the linear layers of this transformer layer run in FP8. layer: 0 .. num_layers -
// 1, over all pipeline stages.
bool config_layer_in_fp8(const Config *config, int layer);
// Number of layers for which config_layer_in_fp8 is true.
int config_fp8_layers(const Config *config);
// Recomputes train_iters when a checkpoint is loaded: --train-samples counts the samples of all
// runs, whatever their batch sizes. (Megatron-LM counts as if this run's batch sizes had always
// been used.) Adds a note if train_iters changes.
void config_resume_length(Config *config, int64_t iteration, int64_t consumed_samples, char *notes,
                          size_t notes_bytes);
// Returns the samples consumed once iteration train_iters is done, starting at `iteration` with
// `consumed_samples`.
int64_t config_samples_at_end(const Config *config, int64_t iteration, int64_t consumed_samples);
// Floating-point operations of an iteration by Megatron-LM's formula: forward plus twice that for
// backward, full attention, any MLP width and head size. With LoRA: with the adapters, and without
// the gradients of frozen weights.
double megatron_flops(const Config *config, double batch_sequences);
// Counts only the keys that queries see: with full attention, 6N + 6*L*C*T per token for N trained
// parameters, and 4 operations for each frozen one.
double causal_flops(const Config *config, double batch_sequences, double trained, double frozen);
// Copies the index-th choice of an option. Returns false if there are fewer.
bool config_choice(const char *option, int index, char *word, size_t bytes);
// The option table. Rows without a name are headings.
const Option *config_options(int *rows);

// --- schedule.c ----------------------------------------------------------------------------------

// Learning rate and weight decay as functions of consumed samples, as in Megatron-LM's
// OptimizerParamScheduler. Pure functions, called by the training step.

typedef struct Schedule {
    LrStyle style;
    double lr, min_lr, lr_init;
    double warmup_samples;  // length of the warm-up, may be fractional
    double decay_samples;   // length of the schedule, including the warm-up
    WsdStyle wsd_style;
    double wsd_samples;  // LR_WSD: length of the final decay, within decay_samples
    double start_weight_decay, end_weight_decay;
    WeightDecayStyle weight_decay_style;
    double weight_decay_samples;  // samples over which weight decay changes from start to end
} Schedule;

Schedule schedule_from_config(const Config *config);
// Returns the learning rate after n samples of successful steps. n = 0 gives lr_init, which the
// first step uses.
double schedule_lr(const Schedule *schedule, int64_t n);
// Returns the weight decay of the step after n samples.
double schedule_weight_decay(const Schedule *schedule, int64_t n);

LLMC_END
