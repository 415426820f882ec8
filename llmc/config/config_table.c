// The trainer's option table: every flag with its default, range, roles, and use (used, no effect,
// refused). Names, defaults and meanings are Megatron-LM's unless the text says otherwise.
//
// To add a flag: add a field to Config and a row here. The role column (config_roles.h) is
// mandatory.
#include "llmc/config/config_roles.h"

#include "sdp4bit/layout.h"

// Offset of a field. Doesn't compile if the field's type doesn't match the row's kind.
#define AT(type, field) \
    (offsetof(Config, field) + 0 * sizeof(char[_Generic(&((Config *)0)->field, type * : 1)]))

#define HEADING(text) \
    { .help = text }
#define USED(flag, role, type, of_kind, field, first, ...) \
    { .name = flag, .roles = role, .kind = of_kind, .offset = AT(type, field), .initial = first, __VA_ARGS__ }
#define FLAG(flag, role, field, text) USED(flag, role, bool, OPTION_FLAG, field, "false", .help = text)
#define NO_FLAG(flag, role, field, text) \
    USED(flag, role, bool, OPTION_FLAG, field, "true", .negative = true, .help = text)
#define INT(flag, role, field, first, least, most, text) \
    USED(flag, role, int, OPTION_INT, field, first, .low = least, .high = most, .value = "N", .help = text)
#define COUNT_TO(flag, role, field, first, least, most, text) \
    USED(flag, role, int64_t, OPTION_INT64, field, first, .low = least, .high = most, .value = "N", \
         .help = text)
#define COUNT(flag, role, field, first, least, text) COUNT_TO(flag, role, field, first, least, 1e15, text)
#define BITS(flag, role, field, first, text) \
    USED(flag, role, int, OPTION_INT, field, first, .low = 2, .high = 8, .choices = CODEC_BITS_CHOICES, \
         .value = "N", .help = text)
// Multiples of the Hadamard block size.
#define GROUP(flag, role, field, first, most, text) \
    USED(flag, role, int, OPTION_INT, field, first, .low = 32, .high = most, .multiple = 32, .value = "N", \
         .help = text)
#define REAL(flag, role, field, first, least, most, text) \
    USED(flag, role, double, OPTION_REAL, field, first, .low = least, .high = most, .value = "X", \
         .help = text)
// Used in float32, so its range is checked in float32.
#define SINGLE(flag, role, field, first, least, most, text) \
    USED(flag, role, double, OPTION_REAL, field, first, .low = least, .high = most, .single = true, \
         .value = "X", .help = text)
#define TEXT(flag, role, field, first, called, text) \
    USED(flag, role, const char *, OPTION_TEXT, field, first, .low = 1, .value = called, .help = text)
#define WORDS(flag, role, field, least, called, text) \
    USED(flag, role, Words, OPTION_WORDS, field, NULL, .low = least, .value = called, .help = text)
#define CHOICE(flag, role, type, field, first, words, text) \
    USED(flag, role, type, OPTION_CHOICE, field, first, .choices = words, .value = "WORD", .help = text)

// Accepted and checked, but ignored. The text says why.
#define IDLE(flag, of_kind, why, ...) \
    { \
        .name = flag, .kind = of_kind, .use = OPTION_NO_EFFECT, .offset = OPTION_NO_FIELD, .help = why, \
        .no_other = why, __VA_ARGS__ \
    }
#define IDLE_FLAG(flag, why) IDLE(flag, OPTION_FLAG, why, .value = NULL)
// Several flags with the same reason. others: separated by spaces.
#define IDLE_FLAGS(flag, others, why) IDLE(flag, OPTION_FLAG, why, .alias = others)
#define IDLE_REAL(flag, least, most, why) \
    IDLE(flag, OPTION_REAL, why, .low = least, .high = most, .value = "X")
#define IDLE_INT(flag, least, most, why) \
    IDLE(flag, OPTION_INT64, why, .low = least, .high = most, .value = "N")
#define IDLE_CHOICE(flag, words, why) IDLE(flag, OPTION_CHOICE, why, .choices = words, .value = "WORD")
// The same, but stored for the argument dump.
#define IDLE_STORED(flag, field, why) \
    USED(flag, FREE, bool, OPTION_FLAG, field, "false", .use = OPTION_NO_EFFECT, .help = why)
#define IDLE_TEXT(flag, field, called, why) \
    USED(flag, FREE, const char *, OPTION_TEXT, field, NULL, .use = OPTION_NO_EFFECT, .value = called, \
         .help = why)
// The same, but prints a note if the flag is given.
#define NOTED_FLAG(flag, why) IDLE(flag, OPTION_FLAG, why, .note = true)
#define NOTED(flag, of_kind, least, most, words, called, why) \
    IDLE(flag, of_kind, why, .low = least, .high = most, .choices = words, .note = true, .value = called)
#define REFUSED(flag, why) \
    { .name = flag, .use = OPTION_REFUSED, .offset = OPTION_NO_FIELD, .help = why }

static const Option table[] = {
    HEADING("Model"),
    INT("num-layers", MODEL | REQUIRED, num_layers, NULL, 1, 10000, "number of transformer layers; required"),
    INT("hidden-size", MODEL | REQUIRED, hidden_size, NULL, 8, 1 << 20,
        "width of the residual stream; required"),
    INT("ffn-hidden-size", MODEL, ffn_hidden_size, NULL, 8, 1 << 22,
        "MLP width; default: 4 x hidden-size, or 8/3 x hidden-size rounded down to a multiple "
        "of 64 with --swiglu"),
    INT("num-attention-heads", MODEL | REQUIRED, num_attention_heads, NULL, 1, 1 << 16,
        "number of attention heads; required"),
    FLAG("group-query-attention", MODEL, group_query_attention,
         "share keys and values within groups of heads; see --num-query-groups"),
    INT("num-query-groups", MODEL | NEEDS_QUERY_GROUPS, num_query_groups, "1", 1, 1 << 16,
        "number of key/value heads with --group-query-attention; must divide --num-attention-heads"),
    INT("kv-channels", MODEL, kv_channels, NULL, 8, 1 << 16,
        "size of an attention head; default: hidden-size / num-attention-heads"),
    INT("seq-length", LOADED | DATA | REQUIRED, seq_length, NULL, 1, 1 << 24,
        "tokens per sequence; required"),
    INT("max-position-embeddings", MODEL | REQUIRED, max_position_embeddings, NULL, 1, 1 << 24,
        "rows of the position embedding; required"),
    INT("make-vocab-size-divisible-by", LOADED, make_vocab_size_divisible_by, "128", 1, 1 << 20,
        "pad the vocabulary to a multiple of N x --tensor-model-parallel-size"),
    SINGLE("init-method-std", LOADED, init_method_std, "0.02", 0, 1e3,
           "standard deviation of the initial weights"),
    CHOICE("normalization", MODEL, Normalization, normalization, "LayerNorm", "LayerNorm|RMSNorm",
           "RMSNorm, as in Llama, subtracts no mean and has no bias"),
    SINGLE("norm-epsilon", MODEL, norm_epsilon, "1e-5", 0, 1, "epsilon of LayerNorm or RMSNorm"),
    CHOICE("position-embedding-type", MODEL, PositionEmbedding, position_embedding_type, "learned_absolute",
           "learned_absolute|rope",
           "learned_absolute: a learned table, as in GPT-2. rope: rotary embeddings of queries and keys, as "
           "in Llama"),
    REAL("rotary-base", MODEL | NEEDS_ROPE, rotary_base, "10000", 1, 1e12,
         "rope: base of the rotation frequencies"),
    REAL("rotary-percent", MODEL | NEEDS_ROPE, rotary_percent, "1.0", OPTION_ABOVE_ZERO, 1,
         "rope: fraction of each head that is rotated"),
    FLAG("use-rope-scaling", MODEL | NEEDS_ROPE, use_rope_scaling,
         "rope: scale long wavelengths for contexts beyond 8192 tokens, as in Llama 3.1"),
    REAL("rope-scaling-factor", MODEL | NEEDS_ROPE_SCALING, rope_scaling_factor, "8", 1, 1e6,
         "scaling factor of --use-rope-scaling"),
    FLAG("swiglu", MODEL, swiglu, "use SwiGLU in the MLP: silu(gate) x up, both of width ffn-hidden-size"),
    FLAG("disable-bias-linear", MODEL, disable_bias_linear, "no biases in linear layers"),
    FLAG("untie-embeddings-and-output-weights", MODEL, untie_embeddings_and_output_weights,
         "don't share the word embeddings with the output layer"),
    FLAG("qk-layernorm", MODEL, qk_layernorm,
         "normalize queries and keys per head before the rotary embedding, as in Qwen 3"),
    SINGLE("attention-dropout", LOADED, attention_dropout, "0.1", 0, OPTION_BELOW_ONE,
           "dropout of the attention probabilities"),
    SINGLE("hidden-dropout", LOADED, hidden_dropout, "0.1", 0, OPTION_BELOW_ONE,
           "dropout after the embeddings and in both residual branches"),

    HEADING("Batch and length of the run"),
    INT("micro-batch-size", FREE | REQUIRED, micro_batch_size, NULL, 1, 1 << 20,
        "sequences per micro-batch and rank; required"),
    INT("global-batch-size", FREE, global_batch_size, NULL, 1, 1 << 30,
        "sequences per iteration over all ranks; default: one micro-batch per data-parallel rank"),
    COUNT("train-iters", FREE | IN_ITERS, train_iters, NULL, 1,
          "iterations to train in total, including resumed runs; this or --train-samples is required"),
    COUNT("train-samples", FREE, train_samples, NULL, 1, "samples to train in total, including resumed runs"),
    WORDS("rampup-batch-size", FREE | IN_SAMPLES, rampup_batch_size, 1, "START INCREMENT SAMPLES",
          "increase the batch size from START to --global-batch-size in steps of INCREMENT over "
          "SAMPLES samples; needs --train-samples"),
    FLAG("skip-train", FREE, skip_train, "only evaluate"),

    HEADING("Optimizer and schedule"),
    SINGLE("lr", SCHEDULE, lr, NULL, 0, OPTION_ANY, "peak learning rate; required"),
    SINGLE("min-lr", SCHEDULE, min_lr, "0.0", 0, OPTION_ANY, "learning rate after the decay"),
    CHOICE("lr-decay-style", SCHEDULE, LrStyle, lr_decay_style, "linear",
           "constant|linear|cosine|inverse-square-root|WSD",
           "shape of the decay. WSD: constant, then a decay over the last --lr-wsd-decay-iters"),
    COUNT("lr-decay-iters", FREE | IN_ITERS, lr_decay_iters, NULL, 1,
          "iterations over which the learning rate decays to min-lr; default: train-iters"),
    COUNT("lr-decay-samples", FREE | IN_SAMPLES, lr_decay_samples, NULL, 1,
          "the same in samples, with --train-samples; default: train-samples"),
    COUNT("lr-wsd-decay-iters", FREE | IN_ITERS | NEEDS_WSD, lr_wsd_decay_iters, NULL, 1,
          "length of the final decay of WSD to min-lr, within --lr-decay-iters"),
    COUNT("lr-wsd-decay-samples", FREE | IN_SAMPLES | NEEDS_WSD, lr_wsd_decay_samples, NULL, 1,
          "the same in samples, with --train-samples"),
    CHOICE("lr-wsd-decay-style", SCHEDULE | NEEDS_WSD, WsdStyle, lr_wsd_decay_style, "exponential",
           "exponential|linear|cosine|minus_sqrt", "shape of the final decay of WSD"),
    REAL("lr-warmup-fraction", FREE, lr_warmup_fraction, NULL, 0, 1,
         "linear warm-up over this fraction of the decay"),
    COUNT("lr-warmup-iters", FREE | IN_ITERS, lr_warmup_iters, "0", 0, "linear warm-up in iterations"),
    COUNT("lr-warmup-samples", FREE | IN_SAMPLES, lr_warmup_samples, "0", 0,
          "linear warm-up in samples, with --train-samples"),
    SINGLE("lr-warmup-init", SCHEDULE, lr_warmup_init, "0.0", 0, OPTION_ANY,
           "learning rate at the start of the warm-up, used by the first step"),
    SINGLE("weight-decay", FREE, weight_decay, "0.01", 0, OPTION_ANY,
           "decoupled weight decay of all matrices, including embeddings"),
    SINGLE("start-weight-decay", SCHEDULE, start_weight_decay, NULL, 0, OPTION_ANY,
           "initial weight decay, with --weight-decay-incr-style linear or cosine"),
    SINGLE("end-weight-decay", SCHEDULE, end_weight_decay, NULL, 0, OPTION_ANY,
           "final weight decay, with --weight-decay-incr-style linear or cosine"),
    CHOICE("weight-decay-incr-style", SCHEDULE, WeightDecayStyle, weight_decay_incr_style, "constant",
           "constant|linear|cosine", "how weight decay grows over the run"),
    SINGLE("adam-beta1", FREE, adam_beta1, "0.9", 0, OPTION_BELOW_ONE, "decay rate of Adam's first moment"),
    SINGLE("adam-beta2", FREE, adam_beta2, "0.999", 0, OPTION_BELOW_ONE,
           "decay rate of Adam's second moment"),
    SINGLE("adam-eps", FREE, adam_eps, "1e-8", OPTION_ABOVE_ZERO, 1, "epsilon in Adam's denominator"),
    SINGLE("clip-grad", FREE, clip_grad, "1.0", 0, OPTION_ANY,
           "clip the gradient norm to X; 0: neither clip nor compute the norm"),
    USED("override-opt_param-scheduler", FREE, bool, OPTION_FLAG, override_opt_param_scheduler, "false",
         .alias = "override-opt-param-scheduler",
         .help = "on --load, use the command line's schedule instead of the checkpoint's"),
    USED("use-checkpoint-opt_param-scheduler", FREE, bool, OPTION_FLAG, use_checkpoint_opt_param_scheduler,
         "false", .alias = "use-checkpoint-opt-param-scheduler",
         .help = "on --load, use the checkpoint's schedule instead of the command line's"),

    HEADING("Data"),
    WORDS("data-path", DATA | PATH, data_path, 0, "PREFIX | WEIGHT PREFIX ... | PREFIX ...",
          "token shards PREFIX.bin and PREFIX.idx, divided by --split: one shard, a weighted blend (shards "
          "are repeated as needed), or a list (each shard is read once)"),
    WORDS("train-data-path", DATA | PATH, train_data_path, 0, "...",
          "shards for training only, used in full"),
    WORDS("valid-data-path", PATH, valid_data_path, 0, "...", "shards for validation only, used in full"),
    WORDS("test-data-path", PATH, test_data_path, 0, "...", "shards for testing only, used in full"),
    TEXT("data-args-path", PATH, data_args_path, NULL, "PATH", "file that contains the value of --data-path"),
    TEXT("per-split-data-args-path", PATH, per_split_data_args_path, NULL, "PATH",
         "JSON file with the shards for training, validation and testing, as members \"train\", \"valid\" "
         "and \"test\""),
    REAL("mid-level-dataset-surplus", DATA, mid_level_dataset_surplus, NULL, OPTION_ABOVE_ZERO, 1e3,
         "number of samples requested from each shard of a weighted blend: ceil(ceil(samples x "
         "weight) x (1 + X)), as in megatron-core since 0.11 with 0.005. Default: ceil(samples "
         "x weight x 1.005), as in the paper's fork"),
    TEXT("split", DATA, split, "969, 30, 1", "A,B,C", "weights of training, validation and test"),
    FLAG("mock-data", DATA, mock_data, "train on synthetic tokens, to measure speed; overrides --data-path"),
    CHOICE("tokenizer-type", LOADED | DATA, TokenizerType, tokenizer_type, "GPT2BPETokenizer",
           "GPT2BPETokenizer|Byte|HuggingFaceTokenizer|NullTokenizer",
           "determines the vocabulary. Byte needs no files; NullTokenizer needs --vocab-size"),
    TEXT("tokenizer-model", LOADED | PATH, tokenizer_model, NULL, "PATH",
         "HuggingFaceTokenizer: path of tokenizer.json or its directory; byte-level BPE, such as Llama 3's"),
    TEXT("tokenizer-eod", LOADED, tokenizer_eod, NULL, "TOKEN",
         "token that ends a document (default: eos_token of tokenizer_config.json); NullTokenizer: its id"),
    TEXT("vocab-file", LOADED | PATH, vocab_file, NULL, "PATH", "vocab.json of GPT2BPETokenizer"),
    TEXT("merge-file", LOADED | PATH, merge_file, NULL, "PATH", "merges.txt of GPT2BPETokenizer"),
    COUNT_TO("vocab-size", LOADED, vocab_size, NULL, 1, 1 << 30,
             "NullTokenizer: token ids are 0..N; N ends a document, unless --tokenizer-eod is set"),
    FLAG("eod-mask-loss", DATA, eod_mask_loss, "no loss where the input is an end-of-document token"),
    FLAG("calculate-per-token-loss", FREE, calculate_per_token_loss,
         "with masked tokens: average gradients over the whole step instead of per micro-batch"),
    FLAG("reset-position-ids", DATA | NEEDS_LEARNED_POSITIONS, reset_position_ids,
         "restart positions after each document"),
    FLAG("reset-attention-mask", DATA, reset_attention_mask, "no attention across documents"),
    USED("inspect-data", FREE, int64_t, OPTION_INT64, inspect_data, "-1", .low = -1, .high = 1e15,
         .value = "K", .help = "print training sample K (shards, tokens, text, epoch) and exit; -1: off"),
    FLAG("check-data", FREE, check_data,
         "read every token of every shard, report errors and exit; needs only the data flags"),

    HEADING("Ranks and communication"),
    INT("tensor-model-parallel-size", RESIDUAL, tensor_model_parallel_size, "1", 1, 1 << 16,
        "number of ranks T that split each layer. T must divide heads, MLP width and the number of ranks "
        "(Megatron-LM silently lowers a T above the number of ranks; here it is an error)"),
    FLAG("sequence-parallel", FREE | NEEDS_TENSOR_RANKS, sequence_parallel,
         "save memory: also split LayerNorms and residuals among the T ranks, by tokens"),
    INT("pipeline-model-parallel-size", FREE, pipeline_model_parallel_size, "1", 1, 10000,
        "number of pipeline stages P (1F1B schedule). P must divide layers and ranks"),
    INT("num-layers-per-virtual-pipeline-stage", FREE, num_layers_per_virtual_pipeline_stage, "0", 0, 10000,
        "layers per model chunk with interleaved pipelining: less idle time, more "
        "communication. 0: one chunk per stage"),
    FLAG("use-distributed-optimizer", FREE, use_distributed_optimizer,
         "shard the optimizer state (always on); required by the quantization flags"),
    INT("gpus-per-node", FREE, gpus_per_node, "0", 0, 1 << 20,
        "ranks per node, which must divide the number of ranks; 0: detect hosts"),
    FLAG("emulate-nodes", FREE, emulate_nodes,
         "GPUs only: treat groups of --gpus-per-node ranks on one machine as nodes that "
         "communicate through sockets; ranks may share GPUs"),
    CHOICE("node-exchange", FREE, NodeExchange, node_exchange, "auto", "auto|nccl|copies",
           "how GPUs of a node exchange gradients and weights. nccl: NCCL kernels. copies: copy engines, "
           "which leave the SMs to the model. auto: copies if possible. Results are bitwise identical"),
    USED("data-parallel-sharding-strategy", FREE, Sharding, OPTION_CHOICE, sharding, "optim",
         .choices = "no_shard|optim|optim_grads|optim_grads_params", .value = "WORD",
         .help = "what data-parallel ranks shard. no_shard: nothing (plain data parallelism). optim: "
                 "optimizer state (ZeRO-1). optim_grads: also gradients (ZeRO-2). optim_grads_params: "
                 "also weights (ZeRO-3)"),
    CHOICE(
        "shard-params-over", FREE | NEEDS_SHARDED_WEIGHTS, ShardScope, shard_scope, "node", "node|world",
        "the ranks over which the weights are sharded with optim_grads_params. node: the ranks of each node; "
        "quantized differences are sent between nodes. world: all ranks; weights are gathered in every "
        "forward and backward, as in ZeRO-3"),
    FLAG("secondary-partition", FREE | NEEDS_WORLD_SHARDS, secondary_partition,
         "with --shard-params-over world: each node keeps the weights gathered in forward, so "
         "that backward gathers within the node (ZeRO++'s hpZ)"),
    FLAG("optimizer-cpu-offload", FREE, optimizer_cpu_offload,
         "keep master weights and moments in host memory and run AdamW on the CPU. Results are "
         "bitwise identical"),
    COUNT("ddp-bucket-size", FREE, ddp_bucket_size, "25000000", 1,
          "approximate elements per communication bucket; buckets hold whole layers"),
    FLAG("grad-reduce-in-bf16", FREE, grad_reduce_in_bf16,
         "send unquantized gradients as bf16; sums are computed in fp32"),
    REAL("distributed-timeout-minutes", FREE, distributed_timeout_minutes, "10", OPTION_ABOVE_ZERO, 1e9,
         "end the job if a collective takes longer than X minutes, or if a rank makes no progress for that "
         "long"),
    FLAG("no-overlap", FREE, no_overlap,
         "for debugging: run communication and computation one after the other on one stream; "
         "overrides --overlap-*"),
    HEADING("SDP4Bit"),
    FLAG("quantized-weights", FREE, quantized_weights, "quantize weights for communication"),
    BITS("weight-quantization-bits", FREE | NEEDS_QUANTIZED_WEIGHTS | NEEDS_WEIGHT_CODEC,
         weight_quantization_bits, "4", "bits per weight"),
    GROUP("wq-group-size", FREE | NEEDS_QUANTIZED_WEIGHTS | NEEDS_WEIGHT_CODEC, wq_group_size, "2048",
          LARGEST_GROUP, "weights per scale, a multiple of 32"),
    CHOICE("weight-quantization-method", FREE | NEEDS_QUANTIZED_WEIGHTS, WeightMethod,
           weight_quantization_method, "difference", "difference|direct|lossless",
           "difference: quantize weight differences (qWD). direct: quantize the weights (qW). lossless: "
           "encode differences of bf16 weights exactly"),
    CHOICE("wq-rounding", FREE | NEEDS_QUANTIZED_WEIGHTS | NEEDS_WEIGHT_CODEC, int, wq_rounding, "nearest",
           "nearest|stochastic", "rounding of weights; the paper used stochastic"),
    FLAG("quantized-gradients", FREE, quantized_gradients,
         "quantize gradients for communication, in two levels (TLq)"),
    CHOICE("gradient-quantization-method", RESIDUAL | NEEDS_QUANTIZED_GRADIENTS, GradientMethod,
           gradient_quantization_method, "uniform", "uniform|eden",
           "codec between nodes. uniform: uniform levels. eden: random rotation and groups of 256; at "
           "4 bits a third of the error of uniform levels"),
    BITS("gradient-quantization-bits-intra", FREE | NEEDS_QUANTIZED_GRADIENTS,
         gradient_quantization_bits_intra, "8", "bits per gradient sent within a node; 4 is the paper's ULq"),
    GROUP("gq-group-size-intra", FREE | NEEDS_QUANTIZED_GRADIENTS, gq_group_size_intra, "512",
          LARGEST_GRAD_GROUP, "gradients per scale within a node, a multiple of 32; the paper used 128"),
    USED("gradient-quantization-bits-inter", FREE | NEEDS_QUANTIZED_GRADIENTS, int, OPTION_INT,
         gradient_quantization_bits_inter, "4", .low = 2, .high = 8, .choices = "2|3|4|8", .value = "N",
         .help = "bits per gradient sent between nodes; 2 and 3 need --gradient-quantization-method eden"),
    GROUP("gq-group-size-inter", FREE | NEEDS_QUANTIZED_GRADIENTS, gq_group_size_inter, "128",
          LARGEST_GRAD_GROUP, "gradients per scale between nodes, a multiple of 32"),
    CHOICE("gq-rounding", FREE | NEEDS_QUANTIZED_GRADIENTS, int, gq_rounding, "stochastic",
           "nearest|stochastic", "rounding of gradients; nearest is biased"),
    FLAG("hadamard-transform", RESIDUAL | NEEDS_QUANTIZED_GRADIENTS, hadamard_transform,
         "Hadamard-transform blocks of 32 gradients before quantization, to spread outliers (TLq-HS)"),
    FLAG("error-feedback", FREE | NEEDS_QUANTIZED_GRADIENTS, error_feedback,
         "add the quantization error of gradients sent between nodes to the next step. Takes 4 "
         "bytes per parameter, sharded over the ranks of a node"),
    INT("gradient-alltoall-pipeline", FREE, gradient_alltoall_pipeline, "0", 0, MOST_CHUNKS,
        "chunks per bucket in the gradient exchange: more chunks take less memory, with bitwise identical "
        "results. 0: only split embeddings, into chunks of about the bucket size"),
    COUNT("gradients-quantization-start-iteration", FREE | NEEDS_QUANTIZED_GRADIENTS,
          gradients_quantization_start_iteration, "0", 0, "first iteration with quantized gradients"),
    USED("verify-replicas-interval", FREE, int64_t, OPTION_INT64, verify_replicas_interval, "1000",
         .alias = "check-weight-hash-across-dp-replicas-interval", .high = 1e15, .value = "N",
         .help = "compare the weights of all ranks every N iterations and at each save, and repair "
                 "differences; 0: off"),
    FLAG("verify-wire", FREE, verify_wire,
         "add a checksum to every gradient and weight message; a mismatch ends the run (exit code 7)"),

    HEADING("Local steps"),
    INT("local-steps", FREE, local_steps, "1", 1, 1000000,
        "train nodes independently and synchronize each layer every N steps (Streaming "
        "DiLoCo). 1: all ranks take every step together"),
    SINGLE("outer-lr", FREE, outer_lr, "1", 0, 1e3,
           "learning rate of the outer step, which synchronizes nodes"),
    SINGLE("outer-momentum", FREE, outer_momentum, "0.5", 0, OPTION_BELOW_ONE,
           "Nesterov momentum of the outer step"),
    INT("local-steps-delay", FREE, local_steps_delay, "0", 0, 999999,
        "steps over which the exchange between nodes may overlap with training; less than --local-steps"),
    SINGLE("local-steps-mix", FREE, local_steps_mix, "0", 0, OPTION_BELOW_ONE,
           "fraction of a node's own master weights that it keeps at an outer step; 0: none"),
    HEADING("Memory and determinism"),
    FLAG("recompute-activations", FREE, recompute_activations, "same as --recompute-granularity selective"),
    CHOICE("recompute-granularity", FREE, Recompute, recompute_granularity, "none", "none|selective|full",
           "what backward recomputes: the attention core (selective, always on) or whole layers (full)"),
    COUNT_TO("seed", DATA | RESIDUAL, seed, "1234", 0, UINT32_MAX,
             "seed of data order, initial weights, dropout and rounding, below 2^32"),
    COUNT_TO("eval-seed", DATA, eval_seed, "0", 0, UINT32_MAX,
             "seed of the order of validation and test samples, so that runs with different seeds "
             "evaluate on the same samples; 0: --seed"),
    FLAG("deterministic-mode", FREE, deterministic_mode,
         "GPUs: sum in a fixed order, so that runs are bitwise reproducible; slower. CPU ranks "
         "are always deterministic"),

    HEADING("Evaluation and logs"),
    COUNT("eval-interval", FREE, eval_interval, "1000", 1, "iterations between evaluations"),
    COUNT("eval-iters", FREE, eval_iters, "100", 0, "global batches per evaluation; 0: no evaluation"),
    FLAG("full-validation", FREE, full_validation,
         "evaluate on the whole validation split; --eval-iters then applies to the test only"),
    WORDS("eval-tasks", PATH, eval_tasks, 1, "FILE ...",
          "JSON-lines files of multiple-choice or perplexity tasks to score at each evaluation; "
          "see docs/eval_tasks.md"),
    FLAG("log-eval-samples", FREE, log_eval_samples,
         "with --eval-tasks: write each sample's log-likelihoods to --log-jsonl"),
    COUNT("log-interval", FREE, log_interval, "100", 1, "iterations between log lines"),
    CHOICE("log-line", RANK_0, LogLine, log_line, "megatron", "megatron|short",
           "Megatron-LM's format, which tools can parse, or a short one"),
    FLAG("log-throughput", FREE, log_throughput, "log TFLOP/s per GPU"),
    FLAG("log-params-norm", FREE, log_params_norm, "log the norm of the weights"),
    FLAG("log-num-zeros-in-grad", FREE, log_num_zeros_in_grad, "log the number of zeros in the gradient"),
    INT("timing-log-level", FREE, timing_log_level, "0", 0, 2, "level of detail of the phase times, 0 to 2"),
    CHOICE("timing-log-option", FREE, TimingLogOption, timing_log_option, "minmax", "max|minmax|all",
           "print phase times as the maximum over ranks, as minimum and maximum, or of every rank"),
    COUNT("log-quantization-error-interval", FREE, log_quantization_error_interval, "0", 0,
          "measure the quantization error of gradients and weights every N iterations; takes "
          "memory (see --plan) and time; 0: off"),
    TEXT("dump-distributions", PATH, dump_distributions, NULL, "FOLDER",
         "directory for histograms of weights, weight differences and gradients"),
    COUNT("dump-distributions-interval", FREE, dump_distributions_interval, "0", 0,
          "iterations between histograms; plot them with dev/plot_distributions"),
    TEXT("log-jsonl", PATH | RANK_0, log_jsonl, NULL, "PATH", "append every log line as JSON to this file"),
    FLAG("log-progress", RANK_0 | NEEDS_SAVE, log_progress,
         "append starts and checkpoints to SAVE/progress.txt"),
    TEXT("tensorboard-dir", PATH | RANK_0, tensorboard_dir, NULL, "FOLDER",
         "directory for TensorBoard events"),
    COUNT("tensorboard-log-interval", RANK_0 | NEEDS_TENSORBOARD, tensorboard_log_interval, "1", 1,
          "iterations between TensorBoard events"),
    FLAG("log-timers-to-tensorboard", RANK_0 | NEEDS_TENSORBOARD, log_timers_to_tensorboard,
         "write phase times to TensorBoard"),
    FLAG("log-validation-ppl-to-tensorboard", RANK_0 | NEEDS_TENSORBOARD, log_validation_ppl_to_tensorboard,
         "write validation perplexity to TensorBoard"),
    FLAG("log-batch-size-to-tensorboard", RANK_0 | NEEDS_TENSORBOARD, log_batch_size_to_tensorboard,
         "write the batch size to TensorBoard"),
    FLAG("log-world-size-to-tensorboard", RANK_0 | NEEDS_TENSORBOARD, log_world_size_to_tensorboard,
         "write the number of ranks to TensorBoard"),
    FLAG("log-memory-to-tensorboard", RANK_0 | NEEDS_TENSORBOARD, log_memory_to_tensorboard,
         "write device memory to TensorBoard"),
    USED("sample-prompt", FREE, const char *, OPTION_TEXT, sample_prompt, NULL, .value = "TEXT",
         .help = "generate text from this prompt after training; \"\" starts a new document"),
    COUNT("sample-interval", FREE, sample_interval, "0", 0,
          "also generate text every N iterations; 0: only after training"),
    INT("sample-tokens", FREE | NEEDS_PROMPT, sample_tokens, "200", 1, 1 << 24,
        "number of tokens to generate"),
    REAL("sample-temperature", FREE | NEEDS_PROMPT, sample_temperature, "1.0", 0, 1e3,
         "sampling temperature; 0: always the most likely token"),

    HEADING("Checkpoints and exit"),
    TEXT("save", PATH, save, NULL, "FOLDER", "directory for checkpoints; needs --save-interval"),
    COUNT("save-interval", FREE | NEEDS_SAVE, save_interval, NULL, 1, "iterations between checkpoints"),
    FLAG("async-save", FREE | NEEDS_SAVE, async_save,
         "write checkpoints in the background from a copy in host memory (see --plan)"),
    COUNT("keep-last-checkpoints", FREE | NEEDS_SAVE, keep_last_checkpoints, "0", 0,
          "number of this run's checkpoints to keep; older ones are deleted once a newer one is "
          "on disk. With 2 or more, an older one can replace a damaged one. 0: keep all"),
    COUNT("keep-checkpoint-interval", FREE | NEEDS_SAVE, keep_checkpoint_interval, NULL, 1,
          "with --keep-last-checkpoints: also keep checkpoints whose iteration is a multiple of N"),
    TEXT("load", PATH, load, NULL, "FOLDER",
         "resume from the latest valid checkpoint in this directory; start from scratch if there is none"),
    COUNT("ckpt-step", FREE | NEEDS_LOAD, ckpt_step, "-1", -1, "load this iteration instead of the latest"),
    FLAG("exit-on-missing-checkpoint", FREE, exit_on_missing_checkpoint,
         "exit if --load finds no checkpoint"),
    FLAG("finetune", FREE, finetune, "load only the weights and start at iteration 0"),
    FLAG("no-load-optim", FREE | NEEDS_LOAD, no_load_optim, "don't load the optimizer state"),
    FLAG("no-save-optim", FREE | NEEDS_SAVE, no_save_optim, "don't save the optimizer state"),
    COUNT("exit-interval", FREE, exit_interval, NULL, 1,
          "save and exit when the iteration is a multiple of N"),
    REAL("exit-duration-in-mins", FREE, exit_duration_in_mins, NULL, OPTION_ABOVE_ZERO, 1e9,
         "save and exit after X minutes"),
    CHOICE("on-nan", FREE, OnNan, on_nan, "abort", "abort|skip",
           "end the run if the loss or gradient is not finite, or skip the step"),
    NO_FLAG("no-check-for-nan-in-loss-and-grad", FREE, check_for_nan_in_loss_and_grad,
            "don't check the loss and gradients for NaN"),
    CHOICE("on-spike", FREE, OnSpike, on_spike, "report", "report|skip",
           "report a spike of the loss or the gradient norm, or also skip the step"),
    SINGLE("loss-spike-factor", FREE, loss_spike_factor, "10", 0, 1e9,
           "a loss is a spike if it exceeds its running mean by X times its mean deviation, which counts "
           "as at least 1 % of the loss. 0: off"),
    SINGLE("norm-spike-factor", FREE, norm_spike_factor, "10", 0, 1e9, "the same for the gradient norm"),
    COUNT("max-skipped-in-a-row", FREE, max_skipped_in_a_row, "20", 0,
          "end the run after N consecutive skipped steps; 0: never"),

    HEADING("Instead of training"),
    FLAG("plan", FREE, plan,
         "print the memory and communication plan of the run and exit; needs neither data nor a GPU"),
    INT("plan-world-size", FREE, plan_world_size, "0", 0, 1 << 20,
        "number of ranks to plan for, on one node unless --gpus-per-node is given; 0: the ranks "
        "that were started"),
    REAL("plan-network", FREE, plan_network, "0", 0, 1e6,
         "with --plan: network bandwidth of a node in Gb/s. Estimates the step time of each "
         "preset and recommends one; 0: off"),
    REAL("plan-network-inside", FREE, plan_network_inside, "0", 0, 1e6,
         "bandwidth between the GPUs of a node in Gb/s per GPU; 0: the --plan-gpu value"),
    REAL("plan-network-burst", FREE, plan_network_burst, "0", 0, 1e9,
         "MB that a node can send at full speed after a pause, on networks with traffic shaping"),
    REAL("plan-lossless-bits", FREE, plan_lossless_bits, "3", 0.1, 16,
         "bits per lossless weight: 3.9 at the peak learning rate, 3 in the middle of a run, 1.4 at the end"),
    CHOICE("plan-gpu", FREE, PlanGpu, plan_gpu, "H200",
           "A100|A800|H100|H200|H800|B200|MI300X|L40S|RTX4090|RTX5090",
           "GPU to plan for; sets peak FLOP/s, memory size and link speeds"),
    REAL("plan-tflops", FREE, plan_tflops, "0", 0, 1e6,
         "TFLOP/s per GPU without communication, as --log-throughput prints on one GPU; 0: the --plan-gpu "
         "value"),
    FLAG("plan-measure", FREE, plan_measure,
         "measure the TFLOP/s of forward and backward on this machine's device, with one rank and a few of "
         "the model's layers"),
    REAL("plan-step-ms", FREE, plan_step_ms, "0", 0, 1e12,
         "instead of --plan-gpu: milliseconds of forward and backward per step without "
         "communication; 0: off"),
    FLAG("version", FREE, version, "print version, commit and libraries"),
    FLAG("help", FREE, help, "print this help"),

    HEADING("Accepted without effect"),
    IDLE_FLAG("bf16", "training is always in bf16, with fp32 master weights and sums"),
    IDLE_REAL("loss-scale", 0, 0, "bf16 needs no loss scaling"),
    IDLE_REAL("initial-loss-scale", 0, OPTION_ANY, "bf16 needs no loss scaling"),
    IDLE_REAL("min-loss-scale", 0, OPTION_ANY, "bf16 needs no loss scaling"),
    IDLE_REAL("loss-scale-window", 0, OPTION_ANY, "bf16 needs no loss scaling"),
    IDLE_INT("hysteresis", 0, 1e9, "bf16 needs no loss scaling"),
    IDLE_FLAG("accumulate-allreduce-grads-in-fp32", "gradients are always accumulated in fp32"),
    IDLE_FLAG("attention-softmax-in-fp32", "the softmax is always fp32"),
    IDLE_FLAGS("use-flash-attn", "no-masked-softmax-fusion", "attention is always fused"),
    IDLE_CHOICE("attention-backend", "auto|flash|fused", "attention is always fused"),
    IDLE_FLAGS("use-mcore-models", "use-legacy-models", "there is only one implementation"),
    IDLE_CHOICE("transformer-impl", "local|transformer_engine", "there is only one implementation"),
    IDLE_CHOICE("optimizer", "adam", "the optimizer is AdamW"),
    IDLE_FLAGS("no-bias-dropout-fusion",
               "no-bias-swiglu-fusion no-rope-fusion no-gradient-accumulation-fusion",
               "fusion doesn't change results"),
    IDLE_FLAG("no-persist-layer-norm", "there is one LayerNorm kernel"),
    IDLE_FLAGS("tp-comm-overlap", "no-async-tensor-model-parallel-allreduce no-overlap-p2p-communication",
               "only affects scheduling, not results"),
    IDLE_FLAG("distribute-saved-activations", "--sequence-parallel splits activations"),
    IDLE_FLAG("no-scatter-gather-tensors-in-pipeline",
              "--sequence-parallel splits the activations that stages send"),
    IDLE_FLAG("no-delay-grad-reduce", "a bucket is reduced as soon as its gradients are complete"),
    IDLE_FLAGS("align-grad-reduce", "no-align-grad-reduce",
               "every stage reduces as soon as its gradients are complete"),
    IDLE_FLAGS("align-param-gather", "no-align-param-gather",
               "every stage gathers its weights when it needs them"),
    IDLE_INT("num-distributed-optimizer-instances", 1, 1,
             "the optimizer is sharded over all data-parallel ranks"),
    IDLE_INT("train-sync-interval", 1, 1e15, "the CPU runs at most one step ahead of the GPU"),
    IDLE_INT("context-parallel-size", 1, 1, "context parallelism is not supported"),
    IDLE_INT("expert-model-parallel-size", 1, 1, "mixture of experts is not supported"),
    IDLE_CHOICE("distributed-backend", "nccl",
                "NCCL between GPUs, MPI between CPU ranks; gloo is not supported"),
    IDLE_CHOICE("DDP-impl", "local", "there is only one implementation"),
    IDLE_FLAG("use-cpu-initialization", "initial weights don't depend on the device"),
    IDLE_INT("num-workers", 0, 1e9, "the loader needs no worker processes"),
    IDLE_CHOICE("dataloader-type", "single",
                "samples are read in Megatron's sequential order; cyclic depends on torch's random "
                "generator and is not supported"),
    IDLE_CHOICE("data-impl", "mmap|infer",
                "shards are indexed files, and the loader chooses how to read them"),
    IDLE_FLAG("distributed-storage", "the sample index is built on every node"),
    IDLE_FLAG("no-mmap-bin-files", "the loader chooses how to read files"),
    IDLE_FLAG("no-create-attention-mask-in-dataloader", "masks are only created where needed"),
    IDLE_INT("num-dataset-builder-threads", 1, 1e9, "the sample index is built in seconds"),
    IDLE_INT("empty-unused-memory-level", 0, 2, "memory is allocated once, at startup"),
    IDLE_FLAG("manual-gc", "there is no garbage collector"),
    IDLE_INT("manual-gc-interval", 0, 1e15, "there is no garbage collector"),
    IDLE_FLAG("no-barrier-with-level-1-timing", "timers add no barriers"),
    IDLE_FLAG("no-log-learnig-rate-to-tensorboard", "the learning rate is always written"),
    IDLE_FLAGS("log-loss-scale-to-tensorboard", "no-log-loss-scale-to-tensorboard",
               "the loss scale is always written"),
    IDLE_INT("tensorboard-queue-size", 1, 1e9, "events are written immediately"),
    IDLE_INT("profile-step-start", 0, 1e15, "see --profile"),
    IDLE_INT("profile-step-end", 0, 1e15, "see --profile"),
    IDLE("ckpt-format", OPTION_CHOICE, "there is one checkpoint format: safetensors shards with a manifest",
         .alias = "dist-ckpt-format", .choices = "torch|torch_dist|zarr", .value = "WORD"),
    IDLE_FLAG("auto-detect-ckpt-format",
              "there is one checkpoint format: safetensors shards with a manifest"),
    IDLE_FLAGS("use-dist-ckpt",
               "ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load",
               "every rank always writes its own shard"),
    IDLE_FLAG("ckpt-assume-constant-structure", "nothing is cached between saves"),
    IDLE("dist-ckpt-strictness", OPTION_TEXT, "a checkpoint must have exactly the tensors of the model",
         .value = "WORD"),
    IDLE_FLAG("cross-entropy-loss-fusion", "the loss is always fused with the output layer"),
    IDLE_CHOICE("cross-entropy-fusion-impl", "native|te", "the loss is always fused with the output layer"),
    IDLE_FLAGS("enable-cuda-graph", "external-cuda-graph",
               "kernels are launched one by one, ahead of the GPU"),
    IDLE_CHOICE("rerun-mode", "disabled|validate_results|report_stats",
                "steps are not repeated; see --on-nan and --on-spike"),
    IDLE_INT("logging-level", 0, 50, "the log has one level"),
    IDLE_STORED("overlap-grad-reduce", overlap_grad_reduce,
                "gradients are always reduced during backward, unless --no-overlap"),
    IDLE_STORED("overlap-param-gather", overlap_param_gather,
                "weights are always gathered during forward, unless --no-overlap"),
    IDLE_FLAG("exit-signal-handler", "SIGTERM, SIGUSR1 and SIGINT always save and exit"),
    IDLE_FLAGS("no-load-rng", "no-save-rng", "random numbers depend only on the seed and the iteration"),
    NOTED("recompute-method", OPTION_CHOICE, 0, 0, "uniform|block", "WORD",
          "full recomputation covers every layer"),
    NOTED("recompute-num-layers", OPTION_INT, 1, 10000, NULL, "N", "full recomputation covers every layer"),
    IDLE("recompute-modules", OPTION_WORDS,
         "selective recomputation covers the attention core, and nothing else", .value = "WORD ...",
         .note = true),
    NOTED("data-cache-path", OPTION_TEXT, 1, 1, NULL, "FOLDER",
          "the sample index is built in memory, once per node"),
    NOTED_FLAG("log-straggler", "--timing-log-level 2 with --timing-log-option all prints each rank's times"),
    NOTED_FLAG("profile", "run the program under a profiler instead (nsys, ncu)"),
    IDLE("profile-ranks", OPTION_WORDS, "see --profile", .value = "N ..."),
    IDLE_TEXT("wandb-project", wandb_project, "NAME",
              "Weights & Biases is not supported; JSON lines are written to --log-jsonl, or to a "
              "file in --wandb-save-dir or SAVE/wandb"),
    IDLE("wandb-entity", OPTION_TEXT, "see --wandb-project", .value = "NAME"),
    IDLE_TEXT("wandb-exp-name", wandb_exp_name, "NAME", "name of that JSON-lines file"),
    IDLE_TEXT("wandb-save-dir", wandb_save_dir, "FOLDER", "directory of that JSON-lines file"),

    HEADING("Refused"),
    REFUSED("learning-rate", "use --lr"),
    REFUSED("batch-size",
            "use --micro-batch-size (sequences per rank and micro-batch) and --global-batch-size "
            "(per iteration)"),
    REFUSED("warmup", "use --lr-warmup-fraction or --lr-warmup-iters"),
    REFUSED("max-steps", "use --train-iters"),
    REFUSED("save-retain-interval", "use --keep-last-checkpoints 1 --keep-checkpoint-interval N"),
    REFUSED("use-torch-fsdp2", "use --data-parallel-sharding-strategy optim_grads_params"),
    REFUSED("decoupled-*", "all parameters use the same learning rate; drop the flag"),
    REFUSED("tiktoken-*", "use --tokenizer-type HuggingFaceTokenizer with the model's tokenizer.json"),
    REFUSED("fp16", "training is in bf16; use --bf16 or drop the flag"),
    REFUSED("fp16-lm-cross-entropy", "the loss is computed in fp32; drop the flag"),
    REFUSED("fp32-residual-connection", "the residual stream is bf16; drop the flag"),
    REFUSED("fp8-*", "fp8 is not supported; drop the flag to train in bf16"),
    REFUSED("apply-query-key-layer-scaling", "only needed for fp16; drop the flag"),
    REFUSED("num-experts", "mixture of experts is not supported; use a dense model"),
    REFUSED("moe-*", "mixture of experts is not supported; use a dense model"),
    REFUSED("use-rotary-position-embeddings", "use --position-embedding-type rope"),
    REFUSED("rotary-interleaved", "only the non-interleaved rotation is supported; drop the flag"),
    REFUSED("rotary-seq-len-interpolation-factor", "position interpolation is not supported; drop the flag"),
    REFUSED("no-position-embedding", "use --position-embedding-type rope, or learned positions"),
    REFUSED("squared-relu", "squared ReLU is not supported; use GELU (tanh approximation) or --swiglu"),
    REFUSED(
        "no-bias-gelu-fusion",
        "selects the exact GELU in Megatron-LM, but only the tanh approximation is supported; drop the flag"),
    REFUSED("apply-layernorm-1p", "LayerNorm gains are stored directly, not minus 1; drop the flag"),
    REFUSED("init-method-xavier-uniform", "initial weights are normal with --init-method-std; drop the flag"),
    REFUSED("data-parallel-random-init", "all ranks must start from the same weights; drop the flag"),
    REFUSED("use-checkpoint-args",
            "pass the model flags, for example @configs/gpt_125m.args; they are checked against "
            "the checkpoint's"),
    {.name = "nproc_per_node",
     .alias = "nproc-per-node nnodes node_rank node-rank master_addr master-addr master_port master-port "
              "local_rank local-rank rdzv_endpoint rdzv-endpoint rdzv_backend rdzv-backend rdzv_id rdzv-id "
              "standalone",
     .use = OPTION_REFUSED,
     .offset = OPTION_NO_FIELD,
     .help = "an option of torchrun; start this program with mpirun -np RANKS instead"},
};

// Derived values, under Megatron's names where they exist.
#define DERIVED(key, role, type, of_kind, field) USED(key, role, type, of_kind, field, "0", .help = "")
static const Option derived[] = {
    DERIVED("data_parallel_size", FREE, int, OPTION_INT, dp_size),
    DERIVED("padded_vocab_size", VOCABULARY, int, OPTION_INT, vocab_size_padded),
    DERIVED("unpadded_vocab_size", VOCABULARY | MODEL, int, OPTION_INT, vocab_size_unpadded),
    DERIVED("eod", VOCABULARY, int, OPTION_INT, eod),
    DERIVED("num_micro_batches", FREE, int, OPTION_INT, micro_batches),
    DERIVED("total_samples", FREE, int64_t, OPTION_INT64, total_samples),
    DERIVED("schedule_warmup_samples", SCHEDULE, double, OPTION_REAL, warmup_samples_wn),
    DERIVED("schedule_decay_samples", SCHEDULE, int64_t, OPTION_INT64, decay_samples_dn),
    DERIVED("schedule_wsd_samples", SCHEDULE, int64_t, OPTION_INT64, wsd_samples),
    DERIVED("schedule_weight_decay_samples", DECAY_RAMP, int64_t, OPTION_INT64, weight_decay_samples),
    DERIVED("world_size", FREE, int, OPTION_INT, world_size),
};

const Option *config_derived(int *rows) {
    *rows = (int)(sizeof derived / sizeof derived[0]);
    return derived;
}

const Option *config_options(int *rows) {
    *rows = (int)(sizeof table / sizeof table[0]);
    return table;
}
