// The trainer's option table: every flag with its default, its range and its use (used, no effect,
// refused). Read by config_parse.c, config_text.c and config_match.c.
// Names, defaults and meanings are Megatron-LM's unless the text says otherwise.
#include "llmc/config/config_roles.h"

#include "sdp4bit/plan.h"

// Offset of a field; does not compile when the field has another type than the row's kind stores.
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
// Multiples of the Hadamard transform's order.
#define GROUP(flag, role, field, first, most, text) \
    USED(flag, role, int, OPTION_INT, field, first, .low = 32, .high = most, .multiple = 32, .value = "N", \
         .help = text)
#define REAL(flag, role, field, first, least, most, text) \
    USED(flag, role, double, OPTION_REAL, field, first, .low = least, .high = most, .value = "X", \
         .help = text)
// Used in float32, and judged there.
#define SINGLE(flag, role, field, first, least, most, text) \
    USED(flag, role, double, OPTION_REAL, field, first, .low = least, .high = most, .single = true, \
         .value = "X", .help = text)
#define TEXT(flag, role, field, first, called, text) \
    USED(flag, role, const char *, OPTION_TEXT, field, first, .low = 1, .value = called, .help = text)
#define WORDS(flag, role, field, least, called, text) \
    USED(flag, role, Words, OPTION_WORDS, field, NULL, .low = least, .value = called, .help = text)
#define CHOICE(flag, role, type, field, first, words, text) \
    USED(flag, role, type, OPTION_CHOICE, field, first, .choices = words, .value = "WORD", .help = text)

// Accepted without effect: the text says why. Values are still checked.
#define IDLE(flag, of_kind, why, ...) \
    { \
        .name = flag, .kind = of_kind, .use = OPTION_NO_EFFECT, .offset = OPTION_NO_FIELD, .help = why, \
        .no_other = why, __VA_ARGS__ \
    }
#define IDLE_FLAG(flag, why) IDLE(flag, OPTION_FLAG, why, .value = NULL)
#define IDLE_REAL(flag, least, most, why) \
    IDLE(flag, OPTION_REAL, why, .low = least, .high = most, .value = "X")
#define IDLE_INT(flag, least, most, why) \
    IDLE(flag, OPTION_INT64, why, .low = least, .high = most, .value = "N")
#define IDLE_CHOICE(flag, words, why) IDLE(flag, OPTION_CHOICE, why, .choices = words, .value = "WORD")
// The same, kept for the argument dump.
#define IDLE_STORED(flag, field, why) \
    USED(flag, FREE, bool, OPTION_FLAG, field, "false", .use = OPTION_NO_EFFECT, .help = why)
#define IDLE_TEXT(flag, field, called, why) \
    USED(flag, FREE, const char *, OPTION_TEXT, field, NULL, .use = OPTION_NO_EFFECT, .value = called, \
         .help = why)
// The same, and the user is told.
#define NOTED_FLAG(flag, why) IDLE(flag, OPTION_FLAG, why, .note = true)
#define NOTED(flag, of_kind, least, most, words, called, why) \
    IDLE(flag, of_kind, why, .low = least, .high = most, .choices = words, .note = true, .value = called)
#define REFUSED(flag, why) \
    { .name = flag, .use = OPTION_REFUSED, .offset = OPTION_NO_FIELD, .help = why }
#define LAUNCHER(flag, other) \
    { .name = flag, .alias = other, .use = OPTION_REFUSED, .offset = OPTION_NO_FIELD, .help = LAUNCHER_HELP }
#define LAUNCHER_HELP "an option of torchrun; start this program with mpirun -np RANKS instead"

static const Option table[] = {
    HEADING("Model"),
    INT("num-layers", MODEL, num_layers, NULL, 1, 10000, "transformer layers; required"),
    INT("hidden-size", MODEL, hidden_size, NULL, 8, 1 << 20, "width of the residual stream; required"),
    INT("ffn-hidden-size", MODEL, ffn_hidden_size, NULL, 8, 1 << 22,
        "width of the MLP; default 4 x hidden-size, with --swiglu 8/3 of it in steps of 64"),
    INT("num-attention-heads", MODEL, num_attention_heads, NULL, 1, 1 << 16, "attention heads; required"),
    FLAG("group-query-attention", MODEL, group_query_attention,
         "groups of heads share keys and values; see --num-query-groups"),
    INT("num-query-groups", MODEL, num_query_groups, "1", 1, 1 << 16,
        "with --group-query-attention: so many groups, a divisor of the heads"),
    INT("kv-channels", MODEL, kv_channels, NULL, 8, 1 << 16,
        "size of a head; default hidden-size / num-attention-heads"),
    INT("seq-length", LOADED | DATA, seq_length, NULL, 1, 1 << 24, "tokens per sequence; required"),
    INT("max-position-embeddings", MODEL, max_position_embeddings, NULL, 1, 1 << 24,
        "rows of the position embedding; required"),
    INT("make-vocab-size-divisible-by", LOADED, make_vocab_size_divisible_by, "128", 1, 1 << 20,
        "the embedding gets this multiple of rows"),
    SINGLE("init-method-std", LOADED, init_method_std, "0.02", 0, 1e3,
           "standard deviation of the initial weights"),
    CHOICE("normalization", MODEL, Normalization, normalization, "LayerNorm", "LayerNorm|RMSNorm",
           "RMSNorm, as in Llama, subtracts no mean and has no bias"),
    SINGLE("norm-epsilon", MODEL, norm_epsilon, "1e-5", 0, 1, "epsilon of LayerNorm or RMSNorm"),
    CHOICE("position-embedding-type", MODEL, PositionEmbedding, position_embedding_type, "learned_absolute",
           "learned_absolute|rope",
           "positions as a table, as in GPT-2, or as rotations of queries and keys, as in Llama"),
    REAL("rotary-base", MODEL, rotary_base, "10000", 1, 1e12, "rope: base of the rotations' wavelengths"),
    REAL("rotary-percent", MODEL, rotary_percent, "1.0", OPTION_ABOVE_ZERO, 1,
         "rope: part of each head that is turned, from its front"),
    FLAG("use-rope-scaling", MODEL, use_rope_scaling,
         "rope: stretch wavelengths beyond what 8192 positions tell apart, as Llama 3.1 and later do"),
    REAL("rope-scaling-factor", MODEL, rope_scaling_factor, "8", 1, 1e6,
         "how far --use-rope-scaling stretches"),
    FLAG("swiglu", MODEL, swiglu, "the MLP is SwiGLU: silu(gate) x up, both of width ffn-hidden-size"),
    FLAG("disable-bias-linear", MODEL, disable_bias_linear, "linear layers have no biases"),
    FLAG("untie-embeddings-and-output-weights", MODEL, untie_embeddings_and_output_weights,
         "the output layer has weights of its own"),
    FLAG("qk-layernorm", MODEL, qk_layernorm,
         "queries and keys of each head are normalized before they are turned, as in Qwen 3"),
    SINGLE("attention-dropout", LOADED, attention_dropout, "0.1", 0, OPTION_BELOW_ONE,
           "dropout of the attention probabilities"),
    SINGLE("hidden-dropout", LOADED, hidden_dropout, "0.1", 0, OPTION_BELOW_ONE,
           "dropout of embeddings and of both residual branches"),

    HEADING("Batch and length of the run"),
    INT("micro-batch-size", FREE, micro_batch_size, NULL, 1, 1 << 20,
        "sequences per rank and micro-batch; required"),
    INT("global-batch-size", FREE, global_batch_size, NULL, 1, 1 << 30,
        "sequences per iteration over all ranks; default one micro-batch per rank"),
    COUNT("train-iters", FREE, train_iters, NULL, 1,
          "iterations over all runs; this or --train-samples is required"),
    COUNT("train-samples", FREE, train_samples, NULL, 1, "samples over all runs"),
    WORDS("rampup-batch-size", FREE, rampup_batch_size, 1, "START INCREMENT SAMPLES",
          "grow the batch from START to --global-batch-size by INCREMENT, over SAMPLES samples; needs "
          "--train-samples"),
    FLAG("skip-train", FREE, skip_train, "only evaluate"),

    HEADING("Optimizer and schedule"),
    SINGLE("lr", SCHEDULE, lr, NULL, 0, OPTION_ANY, "peak learning rate; required"),
    SINGLE("min-lr", SCHEDULE, min_lr, "0.0", 0, OPTION_ANY, "learning rate after the decay"),
    CHOICE("lr-decay-style", SCHEDULE, LrStyle, lr_decay_style, "linear",
           "constant|linear|cosine|inverse-square-root|WSD",
           "form of the decay; WSD: constant, then down over --lr-wsd-decay-iters"),
    COUNT("lr-decay-iters", FREE, lr_decay_iters, NULL, 1, "iterations until min-lr; default train-iters"),
    COUNT("lr-decay-samples", FREE, lr_decay_samples, NULL, 1,
          "the same in samples, with --train-samples; default train-samples"),
    COUNT("lr-wsd-decay-iters", FREE, lr_wsd_decay_iters, NULL, 1,
          "WSD: the last iterations of --lr-decay-iters, which go down to min-lr"),
    COUNT("lr-wsd-decay-samples", FREE, lr_wsd_decay_samples, NULL, 1,
          "the same in samples, with --train-samples"),
    CHOICE("lr-wsd-decay-style", SCHEDULE, WsdStyle, lr_wsd_decay_style, "exponential",
           "exponential|linear|cosine|minus_sqrt", "WSD: how they go down"),
    REAL("lr-warmup-fraction", FREE, lr_warmup_fraction, NULL, 0, 1,
         "linear warm-up over this fraction of the decay"),
    COUNT("lr-warmup-iters", FREE, lr_warmup_iters, "0", 0, "linear warm-up in iterations"),
    COUNT("lr-warmup-samples", FREE, lr_warmup_samples, "0", 0,
          "linear warm-up in samples, with --train-samples"),
    SINGLE("lr-warmup-init", SCHEDULE, lr_warmup_init, "0.0", 0, OPTION_ANY,
           "learning rate at the start of the warm-up: the first step uses it"),
    SINGLE("weight-decay", FREE, weight_decay, "0.01", 0, OPTION_ANY,
           "decoupled weight decay of all matrices, embeddings included"),
    SINGLE("start-weight-decay", SCHEDULE, start_weight_decay, NULL, 0, OPTION_ANY,
           "weight decay at the start, when it changes over the run"),
    SINGLE("end-weight-decay", SCHEDULE, end_weight_decay, NULL, 0, OPTION_ANY,
           "weight decay at the end, when it changes over the run"),
    CHOICE("weight-decay-incr-style", SCHEDULE, WeightDecayStyle, weight_decay_incr_style, "constant",
           "constant|linear|cosine", "how it changes"),
    SINGLE("adam-beta1", FREE, adam_beta1, "0.9", 0, OPTION_BELOW_ONE, "decay of Adam's first moment"),
    SINGLE("adam-beta2", FREE, adam_beta2, "0.999", 0, OPTION_BELOW_ONE, "decay of Adam's second moment"),
    SINGLE("adam-eps", FREE, adam_eps, "1e-8", OPTION_ABOVE_ZERO, 1,
           "added to the root of the second moment"),
    SINGLE("clip-grad", FREE, clip_grad, "1.0", 0, OPTION_ANY,
           "gradient norm to clip to; 0 turns clipping and the norm off"),
    USED("override-opt_param-scheduler", FREE, bool, OPTION_FLAG, override_opt_param_scheduler, "false",
         .alias = "override-opt-param-scheduler",
         .help = "on --load the schedule of the command line wins over the checkpoint's"),
    USED("use-checkpoint-opt_param-scheduler", FREE, bool, OPTION_FLAG, use_checkpoint_opt_param_scheduler,
         "false", .alias = "use-checkpoint-opt-param-scheduler",
         .help = "on --load the checkpoint's schedule wins over the command line's"),

    HEADING("Data"),
    WORDS("data-path", DATA | PATH, data_path, 0, "PREFIX | WEIGHT PREFIX ... | PREFIX ...",
          "token shards, PREFIX.bin and .idx, cut by --split. One, or a weighted blend: read as often as "
          "needed. "
          "A list: each read once"),
    WORDS("train-data-path", DATA | PATH, train_data_path, 0, "...",
          "the same for training alone, used whole"),
    WORDS("valid-data-path", PATH, valid_data_path, 0, "...", "the same for validation"),
    WORDS("test-data-path", PATH, test_data_path, 0, "...", "the same for the test"),
    TEXT("data-args-path", PATH, data_args_path, NULL, "PATH", "a file with the words of --data-path"),
    TEXT("per-split-data-args-path", PATH, per_split_data_args_path, NULL, "PATH",
         "a JSON file with the words of the three flags above: members \"train\", \"valid\" and \"test\""),
    REAL("mid-level-dataset-surplus", DATA, mid_level_dataset_surplus, NULL, OPTION_ABOVE_ZERO, 1e3,
         "ask each shard of a weighted blend for ceil(ceil(samples x weight) x (1 + X)) samples, as "
         "megatron-core "
         "from 0.11 with 0.005. Without the flag: ceil(samples x weight x 1.005), as the paper's fork"),
    TEXT("split", DATA, split, "969, 30, 1", "A,B,C", "weights of training, validation and test"),
    FLAG("mock-data", DATA, mock_data, "synthetic tokens, for measuring speed; wins over --data-path"),
    CHOICE("tokenizer-type", LOADED | DATA, TokenizerType, tokenizer_type, "GPT2BPETokenizer",
           "GPT2BPETokenizer|Byte|HuggingFaceTokenizer|NullTokenizer",
           "gives the vocabulary; Byte needs no files, NullTokenizer takes --vocab-size"),
    TEXT("tokenizer-model", LOADED | PATH, tokenizer_model, NULL, "PATH",
         "tokenizer.json of HuggingFaceTokenizer, or its folder; byte-level BPE, such as Llama 3's"),
    TEXT("tokenizer-eod", LOADED, tokenizer_eod, NULL, "TOKEN",
         "the token of HuggingFaceTokenizer that ends a document; else eos_token of tokenizer_config.json"),
    TEXT("vocab-file", LOADED | PATH, vocab_file, NULL, "PATH", "vocab.json of GPT2BPETokenizer"),
    TEXT("merge-file", LOADED | PATH, merge_file, NULL, "PATH", "merges.txt of GPT2BPETokenizer"),
    COUNT_TO("vocab-size", LOADED, vocab_size, NULL, 1, 1 << 30,
             "n of NullTokenizer: ids 0..n, of which n ends a document"),
    FLAG("eod-mask-loss", DATA, eod_mask_loss, "no loss where the input is the end of a document"),
    FLAG("reset-position-ids", DATA, reset_position_ids, "positions restart after the end of a document"),
    FLAG("reset-attention-mask", DATA, reset_attention_mask, "no attention across the end of a document"),
    USED("inspect-data", FREE, int64_t, OPTION_INT64, inspect_data, "-1", .low = -1, .high = 1e15,
         .value = "K", .help = "show training sample K (shards, tokens, text, epoch) and leave; -1: off"),
    FLAG("check-data", FREE, check_data,
         "read every token of every shard, report, and leave; needs only the data's flags"),

    HEADING("Ranks and communication"),
    INT("tensor-model-parallel-size", RESIDUAL, tensor_model_parallel_size, "1", 1, 1 << 16,
        "T ranks share each layer. T must divide heads, MLP width and ranks: Megatron-LM lowers one that is "
        "larger than the number of ranks, here that is an error"),
    FLAG("sequence-parallel", FREE, sequence_parallel,
         "the T ranks also share LayerNorms and residuals, by tokens, which takes less memory"),
    INT("pipeline-model-parallel-size", FREE, pipeline_model_parallel_size, "1", 1, 10000,
        "P stages of equally many layers follow each other (1F1B). P must divide layers and ranks"),
    INT("num-layers-per-virtual-pipeline-stage", FREE, num_layers_per_virtual_pipeline_stage, "0", 0, 10000,
        "N layers are a chunk, and the stages take chunks in turn: they wait less and send more. 0: a stage "
        "is one chunk"),
    FLAG("use-distributed-optimizer", FREE, use_distributed_optimizer,
         "shard the optimizer (always so here); the quantization flags ask for it"),
    INT("gpus-per-node", FREE, gpus_per_node, "0", 0, 1 << 20,
        "ranks per node, which must divide the number of ranks; 0: the real hosts"),
    FLAG("emulate-nodes", FREE, emulate_nodes,
         "GPUs only: nodes of one machine talk through sockets, as nodes apart do, and ranks may share GPUs"),
    CHOICE("node-exchange", FREE, NodeExchange, node_exchange, "auto", "auto|nccl|copies",
           "GPUs only: inside a node messages go through NCCL's kernels, or are fetched by the copy engines, "
           "which "
           "leave the multiprocessors to the model. auto: copies where they can be had. The same bits"),
    USED("data-parallel-sharding-strategy", FREE, Sharding, OPTION_CHOICE, sharding, "optim",
         .choices = "optim|optim_grads|optim_grads_params", .value = "WORD",
         .no_other = "the optimizer's state is always shared",
         .help = "what data-parallel ranks share out. optim: the optimizer's state (ZeRO-1). optim_grads: "
                 "gradients too (ZeRO-2). optim_grads_params: weights as well (ZeRO-3)"),
    CHOICE("shard-params-over", FREE, ShardScope, shard_scope, "node", "node|world",
           "with optim_grads_params. node: each node holds one replica, and quantized differences travel "
           "between nodes. world: all ranks hold one replica, and every pass gathers it, as ZeRO-3 does"),
    FLAG("secondary-partition", FREE, secondary_partition,
         "with --shard-params-over world: each node keeps what forward has gathered, and backward gathers "
         "inside the node (ZeRO++'s hpZ)"),
    FLAG("optimizer-cpu-offload", FREE, optimizer_cpu_offload,
         "keep master weights and moments in host memory, and run AdamW on the host's cores. The same bits"),
    COUNT("ddp-bucket-size", FREE, ddp_bucket_size, "25000000", 1,
          "elements per communication bucket, about: buckets hold whole layers"),
    FLAG("grad-reduce-in-bf16", FREE, grad_reduce_in_bf16,
         "gradients travel as bf16 where they are not quantized; sums stay fp32"),
    REAL("distributed-timeout-minutes", FREE, distributed_timeout_minutes, "10", OPTION_ABOVE_ZERO, 1e9,
         "a collective that takes longer ends the job, and so does a rank without progress for so long"),
    FLAG("no-overlap", FREE, no_overlap,
         "for debugging: one thing after the other on one stream; wins over --overlap-*"),
    HEADING("SDP4Bit"),
    FLAG("quantized-weights", FREE, quantized_weights, "weights travel quantized"),
    BITS("weight-quantization-bits", FREE, weight_quantization_bits, "4", "bits per weight"),
    GROUP("wq-group-size", FREE, wq_group_size, "2048", LARGEST_GROUP, "weights per scale, a multiple of 32"),
    CHOICE("weight-quantization-method", FREE, WeightMethod, weight_quantization_method, "difference",
           "difference|direct|lossless",
           "quantize the change of the weights (qWD) or the weights themselves (qW); lossless: code how bf16 "
           "weights change, so that replicas keep every bit"),
    CHOICE("wq-rounding", FREE, int, wq_rounding, "nearest", "nearest|stochastic",
           "rounding of weights; the paper's runs: stochastic"),
    FLAG("quantized-gradients", FREE, quantized_gradients, "gradients travel quantized, in two levels (TLq)"),
    CHOICE("gradient-quantization-method", RESIDUAL, GradientMethod, gradient_quantization_method, "uniform",
           "uniform|eden",
           "between nodes: levels at equal distances, or EDEN's (a third of the error at 4 bits), with "
           "groups of 256 and a random rotation"),
    BITS("gradient-quantization-bits-intra", FREE, gradient_quantization_bits_intra, "8",
         "bits inside a node; 4 is ULq"),
    GROUP("gq-group-size-intra", FREE, gq_group_size_intra, "512", LARGEST_GRAD_GROUP,
          "gradients per scale inside a node, a multiple of 32; the paper's runs: 128"),
    USED("gradient-quantization-bits-inter", FREE, int, OPTION_INT, gradient_quantization_bits_inter, "4",
         .low = 2, .high = 8, .choices = "2|3|4|8", .value = "N",
         .help = "bits between nodes; 3 and 2 with --gradient-quantization-method eden"),
    GROUP("gq-group-size-inter", FREE, gq_group_size_inter, "128", LARGEST_GRAD_GROUP,
          "gradients per scale between nodes, a multiple of 32"),
    CHOICE("gq-rounding", FREE, int, gq_rounding, "stochastic", "nearest|stochastic",
           "rounding of gradients; nearest is biased"),
    FLAG("hadamard-transform", RESIDUAL, hadamard_transform,
         "spread outliers over 32 gradients before quantizing (TLq-HS)"),
    FLAG("error-feedback", FREE, error_feedback,
         "what quantizing gradients between nodes rounds away is added to the next message. Takes 4 bytes "
         "per parameter, shared out over a node's ranks"),
    INT("gradient-alltoall-pipeline", FREE, gradient_alltoall_pipeline, "0", 0, MOST_CHUNKS,
        "chunks in which a bucket travels: more take less memory, the bits are the same. 0: embeddings in "
        "chunks of "
        "about a bucket's size, other buckets whole"),
    COUNT("gradients-quantization-start-iteration", FREE, gradients_quantization_start_iteration, "0", 0,
          "unquantized gradients before this iteration"),
    USED("verify-replicas-interval", FREE, int64_t, OPTION_INT64, verify_replicas_interval, "1000",
         .alias = "check-weight-hash-across-dp-replicas-interval", .high = 1e15, .value = "N",
         .help = "compare all ranks' weights every N iterations and at each save, and repair them; 0: off"),
    FLAG("verify-wire", FREE, verify_wire,
         "a checksum on every message of gradients and weights; a wrong one ends the run (exit code 7)"),

    HEADING("Local steps"),
    INT("local-steps", FREE, local_steps, "1", 1, 1000000,
        "every node trains by itself, and its layers meet the other nodes' every H steps, as in Streaming "
        "DiLoCo. 1: all ranks take every step together"),
    SINGLE("outer-lr", FREE, outer_lr, "1", 0, 1e3, "learning rate of the outer step, where nodes meet"),
    SINGLE("outer-momentum", FREE, outer_momentum, "0.5", 0, OPTION_BELOW_ONE, "its Nesterov momentum"),
    INT("local-steps-delay", FREE, local_steps_delay, "0", 0, 999999,
        "steps that an exchange between nodes may take; less than H"),
    SINGLE("local-steps-mix", FREE, local_steps_mix, "0", 0, OPTION_BELOW_ONE,
           "what a node keeps of its own master weights when they meet the others'; 0: nothing"),
    HEADING("Memory and determinism"),
    FLAG("recompute-activations", FREE, recompute_activations,
         "the same as --recompute-granularity selective"),
    CHOICE("recompute-granularity", FREE, Recompute, recompute_granularity, "none", "none|selective|full",
           "what backward computes again: the attention core (selective, always so here) or whole layers "
           "(full)"),
    COUNT_TO("seed", DATA | RESIDUAL, seed, "1234", 0, UINT32_MAX,
             "of data order, initial weights, dropout and rounding, below 2^32"),
    COUNT_TO("eval-seed", DATA, eval_seed, "0", 0, UINT32_MAX,
             "of the order of validation and test samples, so that several seeds are evaluated on the "
             "same; 0: --seed"),
    FLAG("deterministic-mode", FREE, deterministic_mode,
         "GPUs: sums in a fixed order, so that runs repeat to the bit; slower. CPU ranks always do so"),

    HEADING("Evaluation and logs"),
    COUNT("eval-interval", FREE, eval_interval, "1000", 1, "iterations between evaluations"),
    COUNT("eval-iters", FREE, eval_iters, "100", 0, "global batches per evaluation; 0: none"),
    FLAG("full-validation", FREE, full_validation,
         "each evaluation takes the whole validation split; --eval-iters counts for the test alone"),
    WORDS("eval-tasks", PATH, eval_tasks, 1, "FILE ...",
          "each evaluation also scores the choices in these files of JSON lines by their likelihood; see "
          "docs/eval_tasks.md"),
    FLAG("log-eval-samples", FREE, log_eval_samples,
         "with --eval-tasks: each sample's log-likelihoods as a line of --log-jsonl"),
    COUNT("log-interval", FREE, log_interval, "100", 1, "iterations between log lines"),
    CHOICE("log-line", RANK_0, LogLine, log_line, "megatron", "megatron|short",
           "Megatron-LM's line, which tools read, or a short one for people"),
    FLAG("log-throughput", FREE, log_throughput, "TFLOP/s per GPU in the log line"),
    FLAG("log-params-norm", FREE, log_params_norm, "norm of the weights in the log line"),
    FLAG("log-num-zeros-in-grad", FREE, log_num_zeros_in_grad, "zero gradients in the log line"),
    INT("timing-log-level", FREE, timing_log_level, "0", 0, 2, "0, 1 or 2: how many phases are timed"),
    CHOICE("timing-log-option", FREE, TimingLogOption, timing_log_option, "minmax", "max|minmax|all",
           "over the ranks"),
    COUNT("log-quantization-error-interval", FREE, log_quantization_error_interval, "0", 0,
          "every N iterations measure what quantization does to the gradient and the weights; takes memory "
          "(see --plan) "
          "and time; 0: off"),
    TEXT("dump-distributions", PATH, dump_distributions, NULL, "FOLDER",
         "write histograms of weights, their differences and gradients"),
    COUNT("dump-distributions-interval", FREE, dump_distributions_interval, "0", 0,
          "every N iterations; dev/plot_distributions draws them"),
    TEXT("log-jsonl", PATH | RANK_0, log_jsonl, NULL, "PATH", "append every log line as JSON"),
    FLAG("log-progress", RANK_0, log_progress, "append starts and checkpoints to SAVE/progress.txt"),
    TEXT("tensorboard-dir", PATH | RANK_0, tensorboard_dir, NULL, "FOLDER", "write TensorBoard events"),
    COUNT("tensorboard-log-interval", RANK_0, tensorboard_log_interval, "1", 1, "iterations between events"),
    FLAG("log-timers-to-tensorboard", RANK_0, log_timers_to_tensorboard, "phase times as events"),
    FLAG("log-validation-ppl-to-tensorboard", RANK_0, log_validation_ppl_to_tensorboard,
         "validation perplexity as events"),
    FLAG("log-batch-size-to-tensorboard", RANK_0, log_batch_size_to_tensorboard, "batch size as events"),
    FLAG("log-world-size-to-tensorboard", RANK_0, log_world_size_to_tensorboard, "number of ranks as events"),
    FLAG("log-memory-to-tensorboard", RANK_0, log_memory_to_tensorboard, "device memory as events"),
    USED("sample-prompt", FREE, const char *, OPTION_TEXT, sample_prompt, NULL, .value = "TEXT",
         .help = "after training, print text that continues this; \"\" starts from the end of a document"),
    COUNT("sample-interval", FREE, sample_interval, "0", 0,
          "also every N iterations of training; 0: only after it"),
    INT("sample-tokens", FREE, sample_tokens, "200", 1, 1 << 24, "tokens of that text"),
    REAL("sample-temperature", FREE, sample_temperature, "1.0", 0, 1e3, "0 always takes the likeliest token"),

    HEADING("Checkpoints and leaving"),
    TEXT("save", PATH, save, NULL, "FOLDER", "write checkpoints; needs --save-interval"),
    COUNT("save-interval", FREE, save_interval, NULL, 1, "iterations between checkpoints"),
    FLAG("async-save", FREE, async_save,
         "train on while checkpoints are written, from a copy in host memory (see --plan)"),
    COUNT("keep-last-checkpoints", FREE, keep_last_checkpoints, "0", 0,
          "delete this run's older checkpoints once a newer one is on the disk; 2 leave one to fall back to; "
          "0 keeps all"),
    COUNT("keep-checkpoint-interval", FREE, keep_checkpoint_interval, NULL, 1,
          "with --keep-last-checkpoints: keep those of iterations that are multiples of this too"),
    TEXT("load", PATH, load, NULL, "FOLDER",
         "go on from the latest sound checkpoint; start from scratch when there is none"),
    FLAG("exit-on-missing-checkpoint", FREE, exit_on_missing_checkpoint, "leave when --load finds none"),
    FLAG("finetune", FREE, finetune, "load the weights only and start at iteration 0"),
    FLAG("no-load-optim", FREE, no_load_optim, "do not load the optimizer's state"),
    FLAG("no-save-optim", FREE, no_save_optim, "do not save the optimizer's state"),
    COUNT("exit-interval", FREE, exit_interval, NULL, 1,
          "leave, saving, when the iteration is a multiple of this"),
    REAL("exit-duration-in-mins", FREE, exit_duration_in_mins, NULL, OPTION_ABOVE_ZERO, 1e9,
         "leave, saving, after this many minutes"),
    CHOICE("on-nan", FREE, OnNan, on_nan, "abort", "abort|skip",
           "a loss or gradient that is not finite ends the run, or its step is skipped"),
    NO_FLAG("no-check-for-nan-in-loss-and-grad", FREE, check_for_nan_in_loss_and_grad,
            "do not look for them"),
    CHOICE("on-spike", FREE, OnSpike, on_spike, "report", "report|skip",
           "a spike of the loss or the gradient norm is reported, or its step is skipped too"),
    SINGLE("loss-spike-factor", FREE, loss_spike_factor, "10", 0, 1e9,
           "a spike lies more than X mean deviations (each at least 1 % of the loss) above the running mean; "
           "0: off"),
    SINGLE("norm-spike-factor", FREE, norm_spike_factor, "10", 0, 1e9, "the same for the gradient norm"),
    COUNT("max-skipped-in-a-row", FREE, max_skipped_in_a_row, "20", 0,
          "end the run after this many skipped steps in a row; 0: never"),

    HEADING("Instead of training"),
    FLAG("plan", FREE, plan,
         "print the memory and communication plan of the run and leave; needs no data and no GPU"),
    INT("plan-world-size", FREE, plan_world_size, "0", 0, 1 << 20,
        "plan for so many ranks without starting them; one node without --gpus-per-node; 0: the real number"),
    REAL("plan-network", FREE, plan_network, "0", 0, 1e6,
         "with --plan: Gb/s that a node sends to others. Tells how long a step takes with each preset, and "
         "which preset to take; 0: off"),
    REAL("plan-network-inside", FREE, plan_network_inside, "0", 0, 1e6,
         "Gb/s that a GPU sends to others of its node; 0: what --plan-gpu does"),
    REAL("plan-network-burst", FREE, plan_network_burst, "0", 0, 1e9,
         "MB that a node's network lets pass at once after a pause, as shaped networks do"),
    REAL("plan-lossless-bits", FREE, plan_lossless_bits, "3", 0.1, 16,
         "bits that lossless weights take: 3.9 at the highest learning rate, 3 in mid-run, 1.4 at the end"),
    CHOICE("plan-gpu", FREE, PlanGpu, plan_gpu, "H200", "A100|A800|H100|H200|H800|B200|MI300X|L40S|RTX4090",
           "the GPU to plan for: its peak, its memory and its links"),
    REAL("plan-tflops", FREE, plan_tflops, "0", 0, 1e6,
         "TFLOP/s of each GPU without messages, as --log-throughput tells them of one GPU; 0: --plan-gpu's"),
    FLAG("plan-measure", FREE, plan_measure,
         "measure the TFLOP/s of passes on this machine's device: one rank, a few of the model's layers"),
    REAL("plan-step-ms", FREE, plan_step_ms, "0", 0, 1e12,
         "instead of --plan-gpu: ms of a step's forward and backward passes without messages; 0: off"),
    FLAG("version", FREE, version, "print the version, the commit and the libraries"),
    FLAG("help", FREE, help, "print this"),

    HEADING("Accepted without effect"),
    IDLE_FLAG("bf16", "training is always in bf16, with fp32 master weights and sums"),
    IDLE_REAL("loss-scale", 0, 0, "bf16 needs no loss scaling"),
    IDLE_REAL("initial-loss-scale", 0, OPTION_ANY, "bf16 needs no loss scaling"),
    IDLE_REAL("min-loss-scale", 0, OPTION_ANY, "bf16 needs no loss scaling"),
    IDLE_REAL("loss-scale-window", 0, OPTION_ANY, "bf16 needs no loss scaling"),
    IDLE_INT("hysteresis", 0, 1e9, "bf16 needs no loss scaling"),
    IDLE_FLAG("accumulate-allreduce-grads-in-fp32", "gradients are always accumulated in fp32"),
    IDLE_FLAG("attention-softmax-in-fp32", "the softmax is always fp32"),
    IDLE_FLAG("use-flash-attn", "attention is always fused"),
    IDLE_CHOICE("attention-backend", "auto|flash|fused", "attention is always fused"),
    IDLE_FLAG("use-mcore-models", "the same mathematics"),
    IDLE_FLAG("use-legacy-models", "the same mathematics"),
    IDLE_CHOICE("transformer-impl", "local|transformer_engine", "one implementation"),
    IDLE_CHOICE("optimizer", "adam", "only AdamW"),
    IDLE_FLAG("no-masked-softmax-fusion", "one fused attention"),
    IDLE_FLAG("no-bias-dropout-fusion", "the same mathematics"),
    IDLE_FLAG("no-bias-swiglu-fusion", "the same mathematics"),
    IDLE_FLAG("no-rope-fusion", "the same mathematics"),
    IDLE_FLAG("no-gradient-accumulation-fusion", "the same mathematics"),
    IDLE_FLAG("no-persist-layer-norm", "one LayerNorm kernel"),
    IDLE_FLAG("no-async-tensor-model-parallel-allreduce",
              "a hint for the order of work; the sums are the same"),
    IDLE_FLAG("tp-comm-overlap", "a hint for the order of work; the sums are the same"),
    IDLE_FLAG("distribute-saved-activations", "--sequence-parallel splits them"),
    IDLE_FLAG("no-scatter-gather-tensors-in-pipeline", "--sequence-parallel splits what stages send"),
    IDLE_FLAG("no-overlap-p2p-communication", "a hint for the order of work; the messages are the same"),
    IDLE_FLAG("no-delay-grad-reduce", "a bucket is reduced as soon as its gradients are complete"),
    IDLE_FLAG("align-grad-reduce", "every stage reduces as soon as its gradients are complete"),
    IDLE_FLAG("no-align-grad-reduce", "every stage reduces as soon as its gradients are complete"),
    IDLE_FLAG("align-param-gather", "every stage gathers its weights when it needs them"),
    IDLE_FLAG("no-align-param-gather", "every stage gathers its weights when it needs them"),
    IDLE_INT("num-distributed-optimizer-instances", 1, 1,
             "the optimizer is sharded over all data-parallel ranks"),
    IDLE_INT("train-sync-interval", 1, 1e15, "the processor runs at most one step ahead"),
    IDLE_INT("context-parallel-size", 1, 1, "context parallelism is not supported"),
    IDLE_INT("expert-model-parallel-size", 1, 1, "mixture of experts is not supported"),
    IDLE_CHOICE("distributed-backend", "nccl",
                "NCCL between GPUs, MPI between CPU ranks; gloo is not supported"),
    IDLE_CHOICE("DDP-impl", "local", "one implementation"),
    IDLE_FLAG("use-cpu-initialization", "the initial weights do not depend on the device"),
    IDLE_INT("num-workers", 0, 1e9, "reading needs no workers"),
    IDLE_CHOICE("dataloader-type", "single",
                "samples come in Megatron's sequential order; cyclic follows torch's generator and is not "
                "supported"),
    IDLE_CHOICE("data-impl", "mmap|infer", "shards are indexed files, and the loader decides how it reads"),
    IDLE_FLAG("distributed-storage", "the sample index is built on every node"),
    IDLE_FLAG("no-mmap-bin-files", "the loader decides how it reads"),
    IDLE_FLAG("no-create-attention-mask-in-dataloader", "no mask is made where none is needed"),
    IDLE_INT("num-dataset-builder-threads", 1, 1e9, "the sample index is built in seconds"),
    IDLE_INT("empty-unused-memory-level", 0, 2, "memory is allocated once"),
    IDLE_FLAG("manual-gc", "no garbage collector"),
    IDLE_INT("manual-gc-interval", 0, 1e15, "no garbage collector"),
    IDLE_FLAG("no-barrier-with-level-1-timing", "timers add no barriers"),
    IDLE_FLAG("no-log-learnig-rate-to-tensorboard", "the learning rate is always written"),
    IDLE_FLAG("no-log-loss-scale-to-tensorboard", "the loss scale is always written"),
    IDLE_FLAG("log-loss-scale-to-tensorboard", "the loss scale is always written"),
    IDLE_INT("tensorboard-queue-size", 1, 1e9, "events are written at once"),
    IDLE_INT("profile-step-start", 0, 1e15, "see --profile"),
    IDLE_INT("profile-step-end", 0, 1e15, "see --profile"),
    IDLE_CHOICE("ckpt-format", "torch|torch_dist|zarr",
                "one checkpoint format: safetensors shards with a manifest"),
    IDLE_CHOICE("dist-ckpt-format", "torch|torch_dist|zarr",
                "one checkpoint format: safetensors shards with a manifest"),
    IDLE_FLAG("auto-detect-ckpt-format", "one checkpoint format: safetensors shards with a manifest"),
    IDLE_FLAG("use-dist-ckpt", "every rank always writes its own shard"),
    IDLE_FLAG("ckpt-fully-parallel-save", "every rank always writes its own shard"),
    IDLE_FLAG("no-ckpt-fully-parallel-save", "every rank always writes its own shard"),
    IDLE_FLAG("ckpt-assume-constant-structure", "nothing to keep between saves"),
    IDLE_STORED("overlap-grad-reduce", overlap_grad_reduce,
                "gradients are reduced during the backward pass anyway, unless --no-overlap"),
    IDLE_STORED("overlap-param-gather", overlap_param_gather,
                "weights are gathered during the forward pass anyway, unless --no-overlap"),
    IDLE_FLAG("exit-signal-handler", "SIGTERM, SIGUSR1 and SIGINT always save and leave"),
    IDLE_FLAG("no-load-rng", "random numbers follow from the seed and the iteration; there is no state"),
    IDLE_FLAG("no-save-rng", "random numbers follow from the seed and the iteration; there is no state"),
    NOTED("recompute-method", OPTION_CHOICE, 0, 0, "uniform|block", "WORD",
          "full recomputation goes layer by layer"),
    NOTED("recompute-num-layers", OPTION_INT, 1, 10000, NULL, "N", "full recomputation goes layer by layer"),
    NOTED("data-cache-path", OPTION_TEXT, 1, 1, NULL, "FOLDER",
          "the sample index is built in memory, once per node"),
    NOTED_FLAG("log-straggler",
               "--timing-log-level 2 with --timing-log-option all shows how long each rank takes"),
    NOTED_FLAG("profile", "start the program under a profiler instead"),
    IDLE("profile-ranks", OPTION_WORDS, "see --profile", .value = "N ..."),
    IDLE_TEXT("wandb-project", wandb_project, "NAME",
              "Weights & Biases is not used; JSON lines are written instead, to --log-jsonl or to a file in "
              "--wandb-save-dir or SAVE/wandb"),
    IDLE_TEXT("wandb-exp-name", wandb_exp_name, "NAME", "names that file of JSON lines"),
    IDLE_TEXT("wandb-save-dir", wandb_save_dir, "FOLDER", "holds that file of JSON lines"),

    HEADING("Refused"),
    REFUSED("learning-rate", "here it is --lr"),
    REFUSED("batch-size",
            "give --micro-batch-size (sequences per rank and micro-batch) and --global-batch-size (per "
            "iteration)"),
    REFUSED("warmup", "give --lr-warmup-fraction or --lr-warmup-iters"),
    REFUSED("max-steps", "here it is --train-iters"),
    REFUSED("fp16", "training is in bf16; use --bf16 or drop the flag"),
    REFUSED("fp16-lm-cross-entropy", "the loss is computed in fp32; drop the flag"),
    REFUSED("fp32-residual-connection", "the residual stream is bf16; drop the flag"),
    REFUSED("fp8-*", "fp8 is not supported; drop the flag to train in bf16"),
    REFUSED("apply-query-key-layer-scaling", "it is for fp16; drop the flag"),
    REFUSED("num-experts", "mixture of experts is not supported; use a dense model"),
    REFUSED("moe-*", "mixture of experts is not supported; use a dense model"),
    REFUSED("use-rotary-position-embeddings", "here it is --position-embedding-type rope"),
    REFUSED("rotary-interleaved", "the halves of a head are turned against each other; drop the flag"),
    REFUSED("rotary-seq-len-interpolation-factor", "positions are not interpolated; drop the flag"),
    REFUSED("no-position-embedding", "here it is --position-embedding-type rope, or learned positions"),
    REFUSED("squared-relu", "squared ReLU is not supported; the MLP is GELU (tanh form) or --swiglu"),
    REFUSED("no-bias-gelu-fusion",
            "in Megatron-LM it changes GELU from the tanh to the erf form; this program has the tanh form: "
            "drop the flag"),
    REFUSED("apply-layernorm-1p", "gains are stored as they are, not minus 1; drop the flag"),
    REFUSED("init-method-xavier-uniform", "initial weights are normal with --init-method-std; drop the flag"),
    REFUSED("data-parallel-random-init", "all ranks must start from the same weights; drop the flag"),
    REFUSED("use-checkpoint-args",
            "give the model's flags, for instance @configs/gpt_125m.args; they are compared with the "
            "checkpoint's"),
    LAUNCHER("nproc_per_node", "nproc-per-node"),
    LAUNCHER("nnodes", NULL),
    LAUNCHER("node_rank", "node-rank"),
    LAUNCHER("master_addr", "master-addr"),
    LAUNCHER("master_port", "master-port"),
    LAUNCHER("local_rank", "local-rank"),
    LAUNCHER("rdzv_endpoint", "rdzv-endpoint"),
    LAUNCHER("rdzv_backend", "rdzv-backend"),
    LAUNCHER("rdzv_id", "rdzv-id"),
    LAUNCHER("standalone", NULL),
};

// Megatron's names where it has them.
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
