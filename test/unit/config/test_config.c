// The command line: defaults, valid and invalid lines with their messages, argument files, notes,
// help, the argument dump, JSON, comparison with checkpoints, the paper's scripts and the model
// configs.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/config/config_roles.h"
#include "llmc/base/json.h"
#include "test/unit/config/command_line.h"
#include "test/unit/folder.h"

// --- valid lines -----------------------------------------------------------------------------

static void defaults_match_megatron(void **state) {
    static const char *const fragments[] = {
        "\"make_vocab_size_divisible_by\":128", "\"init_method_std\":0.02", "\"norm_epsilon\":1e-05",
        "\"attention_dropout\":0.1", "\"hidden_dropout\":0.1", "\"min_lr\":0.0",
        "\"lr_decay_style\":\"linear\"", "\"weight_decay\":0.01", "\"adam_beta1\":0.9",
        "\"adam_beta2\":0.999", "\"adam_eps\":1e-08", "\"clip_grad\":1.0", "\"split\":\"969, 30, 1\"",
        "\"seed\":1234", "\"ddp_bucket_size\":25000000", "\"weight_quantization_bits\":4",
        "\"wq_group_size\":2048", "\"weight_quantization_method\":\"difference\"",
        "\"wq_rounding\":\"nearest\"", "\"gradient_quantization_bits_intra\":8",
        "\"gradient_quantization_bits_inter\":4", "\"gq_group_size_intra\":512",
        "\"gq_group_size_inter\":128", "\"gq_rounding\":\"stochastic\"", "\"gradient_alltoall_pipeline\":0",
        "\"gradients_quantization_start_iteration\":0", "\"verify_replicas_interval\":1000",
        "\"eval_interval\":1000", "\"eval_iters\":100", "\"log_interval\":100", "\"timing_log_level\":0",
        "\"timing_log_option\":\"minmax\"", "\"tensorboard_log_interval\":1", "\"on_nan\":\"abort\"",
        "\"check_for_nan_in_loss_and_grad\":true", "\"quantized_weights\":false",
        "\"quantized_gradients\":false", "\"hadamard_transform\":false", "\"save\":null",
        "\"save_interval\":null", "\"data_path\":null", "\"sample_tokens\":200", "\"sample_temperature\":1.0",
        "\"inspect_data\":-1", "\"tensor_model_parallel_size\":1", "\"sequence_parallel\":false",
        // set by config_finish
        "\"ffn_hidden_size\":256", "\"kv_channels\":16", "\"global_batch_size\":6", "\"lr_decay_iters\":10",
        "\"padded_vocab_size\":384", "\"unpadded_vocab_size\":257", "\"eod\":256", "\"data_parallel_size\":3",
        "\"num_micro_batches\":1", "\"total_samples\":60"};
    Run run;
    must_run(&run, SMALL, 3);
    for (size_t i = 0; i < sizeof fragments / sizeof fragments[0]; i++) json_has(&run.config, fragments[i]);
    assert_string_equal(run.notes, "");
    config_free(&run.config);
}

static void good_lines(void **state) {
    static const struct {
        const char *line, *fragment;
    } good[] = {
        {SMALL "--lr=2e-3", "\"lr\":0.002"},
        {SMALL "--lr 2e-3 --lr .5 --min-lr +.25", "\"lr\":0.5"},
        {SMALL "--adam-eps 1e-08", "\"adam_eps\":1e-08"},
        {SMALL "--seed 4294967295", "\"seed\":4294967295"},
        {SMALL "--train-iters 0010", "\"train_iters\":10"},
        {SMALL,
         "\"data_parallel_sharding_strategy\":\"optim\",\"shard_params_over\":\"node\","
         "\"secondary_partition\":false,\"optimizer_cpu_offload\":false"},
        {SMALL "--data-parallel-sharding-strategy no_shard", "_strategy\":\"no_shard\""},
        {SMALL "--data-parallel-sharding-strategy optim_grads", "_strategy\":\"optim_grads\""},
        {SMALL "--data-parallel-sharding-strategy=optim_grads_params --shard-params-over world",
         "_strategy\":\"optim_grads_params\",\"shard_params_over\":\"world\""},
        {SMALL "--optimizer-cpu-offload", "\"optimizer_cpu_offload\":true"},
        {SMALL "--optimizer-disk-offload a/b", "\"optimizer_disk_offload\":\"a/b\""},
        {SMALL "--data-path .3 a .7 b/c --seed 1", "\"data_path\":[\".3\",\"a\",\".7\",\"b/c\"]"},
        {SMALL "--data-path=a --seed 1", "\"data_path\":[\"a\"]"},
        {SMALL "--data-path a b --data-path c", "\"data_path\":[\"c\"]"},
        {SMALL "--data-path --seed 7", "\"seed\":7"},  // an empty list, as from an unset shell variable
        {SMALL "--no-check-for-nan-in-loss-and-grad", "\"check_for_nan_in_loss_and_grad\":false"},
        {SMALL "--lr-decay-style inverse-square-root", "\"lr_decay_style\":\"inverse-square-root\""},
        {SMALL "--recompute-activations --recompute-granularity selective",
         "\"recompute_granularity\":\"selective\""},
        {SMALL "--recompute-granularity full", "\"recompute_granularity\":\"full\""},
        {SMALL "--override-opt-param-scheduler", "\"override_opt_param_scheduler\":true"},
        {SMALL "--override-opt_param-scheduler", "\"override_opt_param_scheduler\":true"},
        {SMALL "--global-batch-size 24 --gpus-per-node 2", "\"num_micro_batches\":3"},
        {SMALL "--lr-warmup-fraction 0.25", "\"schedule_warmup_samples\":20.0"},
        {SMALL "--lr-warmup-iters 3 --lr-decay-iters 8",
         "\"schedule_warmup_samples\":24.0,\"schedule_decay_samples\":64"},
        {SMALL "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.2",
         "\"end_weight_decay\":0.2"},
        {SMALL "--quantized-gradients --gq-group-size-intra 32 --gq-group-size-inter 4096 "
               "--gradient-quantization-bits-intra 4",
         "\"gq_group_size_inter\":4096"},
        {SMALL "--quantized-gradients --gradient-quantization-method eden", "\"gq_group_size_inter\":256"},
        {SMALL "--tokenizer-type NullTokenizer --vocab-size 127",
         "\"padded_vocab_size\":128,\"unpadded_vocab_size\":128,\"eod\":127"},
        {SMALL "--wandb-project p --wandb-exp-name e --wandb-save-dir d", "\"log_jsonl\":\"d/e.jsonl\""},
        {SMALL "--check-weight-hash-across-dp-replicas-interval 50", "\"verify_replicas_interval\":50"},
        {SMALL "--wandb-project p --wandb-exp-name e --save s --save-interval 5",
         "\"log_jsonl\":\"s/wandb/e.jsonl\""},
        {SMALL "--wandb-project p --wandb-exp-name e --log-jsonl mine", "\"log_jsonl\":\"mine\""},
        {SMALL "--sample-prompt=--seed --sample-tokens 5", "\"sample_prompt\":\"--seed\""},
        {SMALL "--sample-prompt=@home", "\"sample_prompt\":\"@home\""},
        {SMALL "--sample-temperature 0 --sample-prompt -", "\"sample_temperature\":0.0"},
        {"--plan --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
         "--max-position-embeddings 32 --micro-batch-size 2",
         "\"padded_vocab_size\":50304"},
        {SMALL "--plan --plan-world-size 64", "\"data_parallel_size\":64"},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        Run run;
        must_run(&run, good[i].line, 4);
        json_has(&run.config, good[i].fragment);
        config_free(&run.config);
    }
}

// The flags of the paper's scripts, unmodified.
#define PAPER_125M \
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 2048 " \
    "--max-position-embeddings 2048 " \
    "--lr 6e-4 --lr-decay-iters 70000 --lr-decay-style cosine --min-lr 6e-5 --adam-beta1 0.9 --adam-beta2 " \
    "0.95 --adam-eps 1e-08 " \
    "--weight-decay .1 --lr-warmup-fraction 0.01 --clip-grad 1.0 --loss-scale 0 --loss-scale-window 1000 " \
    "--hysteresis 2 --min-loss-scale 1 " \
    "--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 1 --micro-batch-size 8 " \
    "--global-batch-size 256 " \
    "--train-iters 80000 --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --log-interval 100 " \
    "--timing-log-level 2 " \
    "--save-interval 5002 --eval-interval 100 --eval-iters 10 --log-timers-to-tensorboard " \
    "--log-validation-ppl-to-tensorboard " \
    "--log-throughput --tensorboard-dir tb --tensorboard-log-interval 1 --wandb-project NeurIPS " \
    "--wandb-save-dir wandb " \
    "--wandb-exp-name run --no-async-tensor-model-parallel-allreduce --recompute-activations " \
    "--recompute-granularity selective " \
    "--distributed-backend nccl "
#define LOSSLESS "--weight-quantization-method lossless"
#define PAPER_WEIGHTS "--quantized-weights --weight-quantization-bits 4 --wq-group-size 2048 "
#define PAPER_GRADIENTS \
    "--quantized-gradients --gq-group-size-inter 128 --gradient-quantization-bits-inter 4 " \
    "--gq-group-size-intra 128 " \
    "--gradient-quantization-bits-intra 8 "

static void paper_scripts_work_unchanged(void **state) {
    static const char *const lines[] = {
        PAPER_125M
        "--tensor-model-parallel-size 1 --data-path pile --save c --load c --exit-duration-in-mins 1530",
        PAPER_125M
        "--tensor-model-parallel-size 1 --data-path pile --save c --load c "
        "--exit-duration-in-mins 2840 " PAPER_WEIGHTS,
        PAPER_125M "--tensor-model-parallel-size 1 --data-path pile --save c --load c " PAPER_GRADIENTS
                   "--overlap-grad-reduce --hadamard-transform",
        PAPER_125M
        "--tensor-model-parallel-size 1 --data-path pile --mock-data --exit-interval 200 "
        "--log-interval 1 " PAPER_WEIGHTS PAPER_GRADIENTS
        "--hadamard-transform --gradient-alltoall-pipeline 8",
        PAPER_125M
        "--tensor-model-parallel-size 1 --data-path --mock-data --exit-interval 200 " PAPER_WEIGHTS,
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        Run run;
        must_run(&run, lines[i], 32);
        assert_non_null(
            strstr(run.notes, "Weights & Biases is not used; JSON lines go to wandb/run.jsonl\n"));
        assert_true((strstr(run.notes, "--mock-data overrides") != NULL) == (i == 3));
        json_has(&run.config, "\"schedule_warmup_samples\":179200.0,\"schedule_decay_samples\":17920000");
        config_free(&run.config);
    }
    must_fail("--nproc_per_node 8 " PAPER_125M, 0, "mpirun");
}

// --- invalid lines ---------------------------------------------------------------------------

static void malformed_words(void **state) {
    static const struct {
        const char *words, *what;
    } bad[] = {
        {"--micro-batch 2", "did you mean --micro-batch-size?"},
        {"--num_layers 2", "did you mean --num-layers?"},
        {"--quantizd-weights", "did you mean --quantized-weights?"},
        {"--hadamard", "did you mean --hadamard-transform?"},
        {"--weight-quant-bits 4", "did you mean --weight-quantization-bits?"},
        {"--qqqqqqqq=1", "unknown flag --qqqqqqqq; --help lists all"},
        {"--gradient-clipping 1", "unknown flag --gradient-clipping; --help lists all"},
        {"--learning-rate 1e-3", "--learning-rate is refused: use --lr"},
        {"--batch-size 8", "--global-batch-size"},
        {"--warmup 8", "--lr-warmup-iters"},
        {"--max-steps 8", "--train-iters"},
        {"--check-for-nan-in-loss-and-grad", "--check-for-nan-in-loss-and-grad is the default, drop it"},
        {"--delay-grad-reduce", "--delay-grad-reduce is the default, drop it"},
        {"--gradient-accumulation-fusion", "--gradient-accumulation-fusion is the default, drop it"},
        {"--", "unknown flag --;"},
        {"--=", "unknown flag --;"},
        {"-x", "unexpected argument '-x'"},
        {"--data-path a -lr 10", "unexpected argument '-lr'"},
        {"--qqqqqqqq 1 --seed x --bf16 --fp16", "(1) unknown flag --qqqqqqqq"},
        {"--qqqqqqqq 1 --seed x --bf16 --fp16", "(2) --seed x: not a 64-bit integer"},
        {"--qqqqqqqq 1 --seed x --bf16 --fp16", "(3) --fp16 is refused"},
        {"--seed 1 2", "unexpected argument '2'"},
        {"--bf16 true", "unexpected argument 'true'"},
        {"--bf16=true", "--bf16 takes no value; drop '=true'"},
        {"--quantized-weights=1", "takes no value"},
        {"--seed", "--seed needs a value"},
        {"--seed --bf16", "--seed needs a value"},
        {"--seed=", "not a 64-bit integer"},
        {"--seed 1x", "--seed 1x: not a 64-bit integer"},
        {"--seed 1.0", "not a 64-bit integer"},
        {"--seed 0x10", "not a 64-bit integer"},
        {"--seed 1e3", "not a 64-bit integer"},
        {"--seed -1", "--seed -1: must be at least 0 and at most 4294967295"},
        {"--seed 4294967296", "at most 4294967295"},
        {"--eval-seed -1", "at least 0 and at most 4294967295"},
        {"--seed 99999999999999999999", "64-bit integer"},
        {"--num-layers 4294967297", "--num-layers 4294967297: must be at least 1 and at most 10000"},
        {"--num-layers 0", "must be at least 1"},
        {"--lr nan", "--lr nan: not a finite number"},
        {"--lr inf", "not a finite number"},
        {"--lr 1e999", "not a finite number"},
        {"--lr 1e", "not a finite number"},
        {"--lr 0x1p3", "not a finite number"},
        {"--lr 1e-3x", "not a finite number"},
        {"--lr=", "not a finite number"},
        {"--lr -1e-3", "--lr -1e-3: must be at least 0"},
        {"--hidden-dropout 1", "must be at least 0 and below 1"},
        {"--adam-beta2 1.0", "below 1"},
        {"--adam-eps 0", "above 0"},
        {"--local-steps 2 --outer-lr 0", "--outer-lr 0: must be above 0"},
        {"--lr-decay-style wsd",
         "--lr-decay-style wsd: not one of constant|linear|cosine|inverse-square-root|WSD"},
        {"--lr-wsd-decay-style quadratic", "not one of exponential|linear|cosine|minus_sqrt"},
        {"--mid-level-dataset-surplus 0", "above 0"},
        {"--lr-decay-style cos", "not one of"},
        {"--gq-rounding random", "not one of nearest|stochastic"},
        {"--save=", "the value is empty"},
        {"--data-path=", "--data-path: the value is empty"},
        {"--eval-tasks", "--eval-tasks needs a value"},
        {"--fp16", "--fp16 is refused: training is in bf16"},
        {"--fp4-format e2m1", "--fp4-format is refused: FP4 is not supported"},
        {"--num-experts 8", "mixture of experts"},
        {"--moe-router-topk 2", "mixture of experts"},
        {"--attention-backend unfused", "not one of auto|flash|fused"},
        {"--data-parallel-sharding-strategy fsdp",
         "fsdp: not one of no_shard|optim|optim_grads|optim_grads_params"},
        {"--shard-params-over rack", "--shard-params-over rack: not one of node|world"},
        {"--secondary-partition 1", "unexpected argument '1'"},
        {"--num-distributed-optimizer-instances 2", "must be 1; "},
        {"--context-parallel-size 2", "--context-parallel-size 2: must be 1; context parallelism"},
        {"--expert-model-parallel-size 2", "must be 1"},
        {"--no-bias-gelu-fusion", "exact GELU"},
        {"--distributed-backend gloo", "gloo is not supported"},
        {"--dataloader-type cyclic", "cyclic depends on torch's random generator"},
        {"--loss-scale 1024", "--loss-scale 1024: must be 0; bf16 needs no loss scaling"},
        {"--nproc_per_node=8", "--nproc_per_node is refused: an option of torchrun"},
        {"--nproc-per-node 8", "--nproc-per-node is refused: an option of torchrun"},
        {"--nnodes 2", "mpirun"},
        {"--node_rank 0", "mpirun"},
        {"--node-rank 0", "mpirun"},
        {"--master_addr h", "mpirun"},
        {"--master-port 1", "mpirun"},
        {"@", "@ without a file name"},
        {"@no/such/file.args", "@no/such/file.args: No such file"},
        {"@configs", "Is a directory"},
        {"@/dev/zero", "not a plain file"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char line[2048];
        snprintf(line, sizeof line, "%s%s", SMALL, bad[i].words);
        must_fail(line, 0, bad[i].what);
        snprintf(line, sizeof line, "%s %s", bad[i].words, SMALL);  // at the start of the line
        if (strncmp(bad[i].words, "--lr", 4) == 0 || strchr(bad[i].words, '=') || bad[i].words[0] == '@')
            must_fail(line, 0, bad[i].what);
    }
}

#define EDEN "--quantized-gradients --gradient-quantization-method eden "

static void bad_combinations(void **state) {
    static const struct {
        const char *words;
        int world;
        const char *what;
    } bad[] = {
        {"--hidden-size 100 --num-attention-heads 3", 0,
         "--hidden-size 100 is not divisible by --num-attention-heads 3"},
        {"--hidden-size 48 --num-attention-heads 4", 0,
         "gives heads of size 12, which must be a multiple of 8"},
        {"--ffn-hidden-size 100", 0, "must be a multiple of 8"},
        {"--seq-length 64", 0, "--seq-length 64 is larger than --max-position-embeddings 32"},
        {"--global-batch-size 30", 4,
         "--global-batch-size 30 is not divisible by --micro-batch-size 2 x data-parallel size 4 = 8"},
        {"--train-samples 100", 0, "--train-iters cannot be combined with --train-samples"},
        {"--lr-decay-style WSD", 0, "--lr-decay-style WSD needs --lr-wsd-decay-iters N"},
        {"--lr-decay-style WSD --lr-wsd-decay-iters 11", 1,
         "--lr-wsd-decay-* lasts 11 iterations, longer than the whole decay of 10;"},
        {"--lr-wsd-decay-samples 100", 0, "--lr-wsd-decay-samples cannot be combined with --train-iters"},
        {"--full-validation", 0, "--full-validation needs a validation split"},
        {"--lr-decay-samples 100", 0, "--lr-decay-samples cannot be combined with --train-iters"},
        {"--rampup-batch-size 2 2 100", 0, "--rampup-batch-size cannot be combined with --train-iters"},
        {"--min-lr 1", 0, "--min-lr 1 is larger than --lr 0.001"},
        {"--lr-warmup-init 1", 0, "--lr-warmup-init 1 is larger"},
        {"--lr-warmup-fraction 0.1 --lr-warmup-iters 3", 0, "keep one"},
        {"--lr-warmup-fraction 1", 1, "not shorter than the decay"},
        {"--lr-warmup-iters 10", 1, "the warm-up of 10 iterations is not shorter than the decay of 10;"},
        {"--start-weight-decay 0.1", 0, "--weight-decay-incr-style"},
        {"--weight-decay-incr-style cosine", 0, "needs --start-weight-decay"},
        {"--weight-decay-incr-style cosine --start-weight-decay 1 --end-weight-decay .5", 0,
         "can only increase"},
        {"--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler", 0, "contradict"},
        {"--data-parallel-sharding-strategy no_shard --quantized-weights", 0,
         "--quantized-weights has no effect with --data-parallel-sharding-strategy no_shard"},
        {"--data-parallel-sharding-strategy no_shard --local-steps 4", 0,
         "drop --data-parallel-sharding-strategy no_shard"},
        {"--data-parallel-sharding-strategy optim_grads_params --shard-params-over world "
         "--quantized-weights " LOSSLESS,
         0, "keeps no full weights to add differences to"},
        {"--data-parallel-sharding-strategy optim_grads_params --shard-params-over world "
         "--quantized-weights",
         0, "keeps no full weights to add differences to; add --weight-quantization-method direct"},
        {"--train-iters 999999999999999 --global-batch-size 1000000000", 5, "too large"},
        {"--hidden-size 1048576 --seq-length 16777216 --max-position-embeddings 16777216 --micro-batch-size "
         "1048576",
         1, "too large to plan"},
        {"--hidden-size 1048576 --ffn-hidden-size 4194304 --num-layers 10000", 1, "too large to plan"},
        {"--eval-iters 999999999999999 --train-iters 999999999999 --eval-interval 1", 1, "too many samples"},
        {"--wq-group-size 100", 0, "--wq-group-size 100: must be a multiple of 32"},
        {"--wq-group-size 32768", 0, "at most 16384"},
        {"--gq-group-size-intra 130", 0, "multiple of 32"},
        {"--gq-group-size-intra 8192", 0, "at most 4096"},
        {"--gq-group-size-inter 16", 0,
         "--gq-group-size-inter 16: must be a multiple of 32, at least 32 and at most 4096"},
        {"--gq-group-size-intra 4064 --gq-group-size-inter 128", 0, "least common multiple 16256"},
        {"--weight-quantization-bits 5", 0, "--weight-quantization-bits 5: must be 4 or 8"},
        {"--gradient-quantization-bits-inter 6", 0, "must be 2 or 3 or 4 or 8"},
        {"--gradient-quantization-bits-inter 3", 0,
         "--gradient-quantization-method uniform needs --gradient-quantization-bits-inter 4|8, not 3"},
        {EDEN "--gradient-quantization-bits-inter 8", 0,
         "--gradient-quantization-method eden needs --gradient-quantization-bits-inter 4|3|2, not 8"},
        {EDEN "--gq-group-size-inter 128", 0, "eden uses groups of 256 between nodes"},
        {EDEN "--gq-group-size-intra 96", 0, "--gq-group-size-intra 96 must divide 256"},
        {EDEN "--gq-group-size-intra 384", 0, "--gq-group-size-intra 384 must divide 256"},
        {"--gradient-quantization-bits-intra 2", 0, "must be 4 or 8"},
        {"--weight-quantization-bits 3", 0, "--weight-quantization-bits 3: must be 4 or 8"},
        {"--weight-quantization-bits 9999999999", 0, "must be 4 or 8"},
        {"--gradient-alltoall-pipeline -1", 0, "at least 0"},
        {"--save c", 0, "--save needs --save-interval"},
        {"--finetune", 0, "--finetune needs --load FOLDER"},
        {"--exit-on-missing-checkpoint", 0, "--exit-on-missing-checkpoint needs --load FOLDER"},
        {"--emulate-nodes", 0, "--emulate-nodes needs --gpus-per-node"},
        {"--on-nan skip --no-check-for-nan-in-loss-and-grad", 0, "keep one"},
        {"--plan-world-size 8", 0, "--plan-world-size needs --plan"},
        {"--plan-network 10", 0, "--plan-network needs --plan; add it"},
        {"--optimizer-cpu-offload --optimizer-disk-offload a", 0, "both move the optimizer state; keep one"},
        {"--optimizer-disk-offload a --local-steps 4", 0, "drop --optimizer-disk-offload"},
        {"--optimizer-disk-offload a --plan-disk-bandwidth 5", 0,
         "--plan-disk-bandwidth needs --plan and --optimizer-disk-offload"},
        {"--plan --plan-disk-bandwidth 5", 0, "--plan-disk-bandwidth needs --plan and --optimizer-disk-"},
        {"--plan --optimizer-disk-offload a --plan-disk-bandwidth 5 --plan-network 1 --plan-measure", 0,
         "--plan-measure measures the speed that --plan-disk-bandwidth sets; keep one"},
        {"--recompute-granularity full --recompute-activations", 0, "contradicts full"},
        {"--wandb-project p", 0, "--wandb-exp-name"},
        {"--tokenizer-type NullTokenizer", 0, "needs --vocab-size"},
        {"--tokenizer-type GPT2BPETokenizer --vocab-file v", 0, "--vocab-file needs --merge-file"},
        {"--tokenizer-type SentencePieceTokenizer", 0,
         "not one of GPT2BPETokenizer|Byte|HuggingFaceTokenizer|NullTokenizer"},
        {"--tokenizer-type NullTokenizer --vocab-size 1073741825", 0, "at most 1073741824"},
        {"--tokenizer-type NullTokenizer --vocab-size 0", 0, "at most 1073741824"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char line[2048];
        snprintf(line, sizeof line, "%s%s", SMALL, bad[i].words);
        must_fail(line, bad[i].world, bad[i].what);
    }
}

// Required flags are missing.
static void incomplete_lines(void **state) {
#define SHAPE \
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 " \
    "--micro-batch-size 2 "
    must_fail("", 0,
              "missing --num-layers, --hidden-size, --num-attention-heads, --seq-length, "
              "--max-position-embeddings, --micro-batch-size, --lr, --train-iters");
    must_fail("--plan", 0, "missing --num-layers");
    must_fail(SHAPE "--mock-data --tokenizer-type Byte --train-iters 3", 0, "missing --lr;");
    must_fail(SHAPE "--lr 1 --train-iters 3 --tokenizer-type Byte", 0, "no training data; add --data-path");
    must_fail(SHAPE "--lr 1 --train-iters 3 --data-path a", 0, "needs --vocab-file and --merge-file");
    Run mock;
    must_run(&mock, SHAPE "--lr 1 --train-iters 3 --mock-data",
             1);  // synthetic tokens need only GPT-2's vocabulary size
    assert_int_equal(mock.config.vocab_size_padded, 50304);
    config_free(&mock.config);
    must_fail(SHAPE "--lr 1 --train-iters 3 --tokenizer-type Byte --data-path a --train-data-path b", 0,
              "exclude each other");
    must_fail(SHAPE "--lr 1 --train-iters 3 --tokenizer-type Byte --train-data-path b --split 1,0,0", 0,
              "drop --split");
    must_fail(SHAPE "--lr 1 --train-iters 3 --tokenizer-type Byte --valid-data-path b", 0,
              "--valid-data-path and --test-data-path need --train-data-path");
    must_fail(SHAPE "--lr 1 --train-iters 3 --tokenizer-type Byte --data-path a --quantized-weights", 0,
              "--quantized-weights needs --use-distributed-optimizer");
    must_fail(SHAPE "--lr 1 --train-iters 3 --tokenizer-type Byte --data-path a --quantized-gradients", 0,
              "--quantized-gradients needs");
    must_fail(SHAPE "--lr 1 --train-samples 3 --tokenizer-type Byte --data-path a", 2,
              "less than --global-batch-size 4");
    must_fail(SHAPE "--lr 1 --train-samples 99 --lr-warmup-iters 3 --tokenizer-type Byte --data-path a", 0,
              "--lr-warmup-iters cannot be combined with --train-samples");
    must_fail(SHAPE "--lr 1 --train-samples 99 --tokenizer-type Byte --data-path a --rampup-batch-size 2 2",
              0, "got 2 values");
}

#define STRATEGY "--data-parallel-sharding-strategy "

static void notes_name_what_has_no_effect(void **state) {
    static const struct {
        const char *words, *note;
    } notes[] = {
        {"--hadamard-transform", "--hadamard-transform has no effect without --quantized-gradients\n"},
        {"--quantized-gradients --hadamard-transform", NULL},
        {EDEN "--gq-group-size-intra 1024 --gq-group-size-inter 256", NULL},
        {EDEN "--hadamard-transform", "--hadamard-transform has no effect with "},
        {EDEN "--error-feedback --local-steps 5", NULL},
        {EDEN "--error-feedback --local-steps 5 --replica-group a --plan",
         "--error-feedback has no effect with --replica-group, whose offers"},
        {"--gradient-quantization-method eden",
         "--gradient-quantization-method has no effect without --quantized-gradients\n"},
        {"--lr-wsd-decay-iters 4", "--lr-wsd-decay-iters has no effect without --lr-decay-style WSD\n"},
        {"--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style cosine", NULL},
        {"--gradient-alltoall-pipeline 4", NULL},  // applies to unquantized gradients too
        {"--wq-group-size 64", "--wq-group-size has no effect without --quantized-weights\n"},
        {"--shard-params-over world",
         "--shard-params-over has no effect without "
         "--data-parallel-sharding-strategy optim_grads_params\n"},
        {"--shard-params-over world " STRATEGY "optim_grads", "--shard-params-over has no effect without "},
        {"--shard-params-over world " STRATEGY "no_shard", "--shard-params-over has no effect without "},
        {"--secondary-partition " STRATEGY "optim_grads_params",
         "--secondary-partition has no effect without --shard-params-over world\n"},
        {STRATEGY "optim_grads_params --shard-params-over world --secondary-partition "
                  "--optimizer-cpu-offload --quantized-weights --weight-quantization-method direct",
         NULL},
        {STRATEGY "optim_grads_params --quantized-weights", NULL},  // weight differences within the node
        {"--quantized-weights " LOSSLESS, NULL},
        {LOSSLESS, "--weight-quantization-method has no effect without --quantized-weights\n"},
        {"--quantized-weights --wq-group-size 128 " LOSSLESS,
         "has no effect without --weight-quantization-method difference"},
        {STRATEGY "optim_grads --optimizer-cpu-offload", NULL},
        {STRATEGY "optim_grads --optimizer-disk-offload a", NULL},
        {"--async-save", "--async-save has no effect without --save\n"},
        {"--keep-last-checkpoints 2", "--keep-last-checkpoints has no effect without --save\n"},
        {"--no-save-optim", "--no-save-optim has no effect without --save\n"},
        {"--save-interval 5", "--save-interval has no effect without --save\n"},
        {"--log-progress", "--log-progress has no effect without --save\n"},
        {"--no-load-optim", "--no-load-optim has no effect without --load\n"},
        {"--load c --no-load-optim --finetune --exit-on-missing-checkpoint", NULL},
        {"--log-timers-to-tensorboard",
         "--log-timers-to-tensorboard has no effect without --tensorboard-dir\n"},
        {"--log-memory-to-tensorboard",
         "--log-memory-to-tensorboard has no effect without --tensorboard-dir\n"},
        {"--tensorboard-log-interval 5",
         "--tensorboard-log-interval has no effect without --tensorboard-dir\n"},
        {"--tensorboard-dir t --log-timers-to-tensorboard --tensorboard-log-interval 5", NULL},
        {"--sample-tokens 5", "--sample-tokens has no effect without --sample-prompt\n"},
        {"--profile --profile-ranks 0 1 --profile-step-start 3 --profile",
         "--profile has no effect: run the program under a profiler instead (nsys, ncu)"},
        {"--recompute-granularity full --recompute-method block",
         "--recompute-method has no effect: full recomputation covers every layer"},
        {"--data-cache-path c", "--data-cache-path has no effect: the sample index is built in memory"},
        {"--data-path a", "--mock-data overrides"},
        {"--vocab-size 5", "only NullTokenizer uses it"},
        {"--vocab-file v", "only GPT2BPETokenizer uses them"},
        {"--tokenizer-eod 2", "only HuggingFaceTokenizer and NullTokenizer use it"},
        {"--tokenizer-model m", "only HuggingFaceTokenizer uses it"},
        {"--bf16 --use-flash-attn --use-mcore-models --num-workers 2 --dataloader-type "
         "single --hysteresis 2 --loss-scale 0.0",
         NULL},
        // flags of Megatron-LM in late 2024
        {"--attention-backend flash --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save "
         "--auto-detect-ckpt-format --dist-ckpt-format torch_dist --no-rope-fusion "
         "--no-bias-swiglu-fusion --num-distributed-optimizer-instances 1 --no-align-grad-reduce "
         "--align-grad-reduce --align-param-gather --no-align-param-gather "
         "--data-impl mmap --log-loss-scale-to-tensorboard --train-sync-interval 5 "
         "--ckpt-assume-constant-structure --check-weight-hash-across-dp-replicas-interval 50",
         NULL},
        {"--log-straggler", "--log-straggler has no effect: "},
    };
    for (size_t i = 0; i < sizeof notes / sizeof notes[0]; i++) {
        char line[2048];
        Run run;
        snprintf(line, sizeof line, "%s%s", SMALL, notes[i].words);
        must_run(&run, line, 1);
        if (!notes[i].note) assert_string_equal(run.notes, "");
        else if (!strstr(run.notes, notes[i].note)) fail_msg("%s: notes are: %s", notes[i].words, run.notes);
        const char *newline = strchr(run.notes, '\n');
        assert_true(!notes[i].note || (newline && !newline[1]));  // one line, once
        config_free(&run.config);
    }
    // Notes are truncated without overflow, and may be NULL.
    char small[8];
    memset(small, 'x', sizeof small);
    small[0] = 0;
    options_note(small, sizeof small, "%s", "0123456789");
    assert_string_equal(small, "012345\n");
    options_note(small, sizeof small, "more");
    assert_string_equal(small, "012345\n");
    options_note(NULL, 0, "nothing");
}

// --- argument files -------------------------------------------------------------------------

static char folder[64];

static void write_file(const char *name, const char *text, size_t bytes) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static void write_text(const char *name, const char *text) { write_file(name, text, strlen(text)); }

static bool read_words(const char *name, char ***words, int *count, Error *err) {
    char at[160];
    snprintf(at, sizeof at, "@%s/%s", folder, name);
    char *argv[] = {"program", at, NULL};
    return options_read_words(2, argv, words, count, err);
}

static void words_are(const char *text, int count, const char *const *want) {
    char **words;
    int got;
    Error err;
    write_text("f.args", text);
    if (!read_words("f.args", &words, &got, &err)) fail_msg("%s: %s", text, err.what);
    assert_int_equal(got, count);
    for (int i = 0; i < count; i++) assert_string_equal(words[i], want[i]);
    options_free_words(words, got);
}

static void file_fails(const char *text, size_t bytes, const char *what) {
    char **words;
    int count;
    Error err;
    write_file("f.args", text, bytes);
    assert_false(read_words("f.args", &words, &count, &err));
    assert_int_equal(err.code, EXIT_USAGE);
    assert_null(words);
    if (!strstr(err.what, what)) fail_msg("says: %s\nwithout: %s", err.what, what);
}

static void argument_files(void **state) {
#define WANT(...) ((const char *const[]){__VA_ARGS__})
    words_are("", 0, NULL);
    words_are("# nothing\n\n   \t# here", 0, NULL);
    words_are("--lr 1e-3 # peak\r\n--seed\t7", 4, WANT("--lr", "1e-3", "--seed", "7"));
    words_are("--a b#c \\\n  --d \\\r\n e \\", 4, WANT("--a", "b#c", "--d", "e"));
    words_are("\xEF\xBB\xBF--bf16", 1, WANT("--bf16"));
    words_are("--p 'a b' \"c \\\"d\\\\\" e\\ f '' g\"h i\"'j'", 6,
              WANT("--p", "a b", "c \"d\\", "e f", "", "gh ij"));
    words_are("--p '@x' \"@y\" \\@z a@b 'two\nlines'", 6, WANT("--p", "@x", "@y", "@z", "a@b", "two\nlines"));
    file_fails("--a\n\n--p 'open\nmore", 18, "line 3: unterminated quote; add the closing '");
    file_fails("--a \"open\\\"", 11, "line 1: unterminated quote");
    file_fails("--a\0b", 5, "zero bytes");
    file_fails("@f.args", 7, "check whether a file includes itself");
    file_fails("--a @f.args @f.args", 19, "check whether a file includes itself");
    file_fails("@missing.args", 13, "missing.args: No such file");
    file_fails("@", 1, "@ without a file name");
    size_t many = 200000, large = (1 << 20) + 1;
    char *text = malloc(large);
    memset(text, ' ', large);
    file_fails(text, large, "larger than 1 MiB");
    for (size_t i = 0; i < many; i++) memcpy(text + 2 * i, "a ", 2);
    file_fails(text, 2 * many, "more than 65536 words");
    free(text);
}

static void argument_files_nest_and_the_last_word_wins(void **state) {
    char line[2048];
    Run run;
    write_text("inner.args", "--seed 5 --sample-prompt 'Once upon # a time'\n");
    write_text("outer.args", "--seed 4\n@inner.args\n--lr 2e-3");
    snprintf(line, sizeof line, "%s@%s/outer.args --lr 3e-3", SMALL, folder);
    must_run(&run, line, 1);
    assert_int_equal(run.config.seed, 5);
    assert_true(run.config.lr == 3e-3);
    assert_string_equal(run.config.sample_prompt, "Once upon # a time");
    config_free(&run.config);
    // A nesting depth of 8 is accepted, 9 is not.
    for (int i = 1; i <= 9; i++) {
        char name[32], text[32];
        snprintf(name, sizeof name, "n%d.args", i);
        snprintf(text, sizeof text, "@n%d.args", i + 1);
        write_text(name, i == 9 ? "--seed 9" : text);
    }
    char **words;
    int count;
    Error err;
    assert_true(read_words("n2.args", &words, &count, &err));
    assert_int_equal(count, 2);
    options_free_words(words, count);
    assert_false(read_words("n1.args", &words, &count, &err));
    assert_non_null(strstr(err.what, "are nested more than 8 deep"));
}

static int make_folder(void **state) { return folder_make(folder, sizeof folder, "test_config"); }
static int remove_folder(void **state) { return folder_remove(folder); }

// --- help, dump, JSON -----------------------------------------------------------------------

static char *text_of(void (*print)(FILE *, const void *), const void *what) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    assert_non_null(file);
    print(file, what);
    fclose(file);
    return text;
}

static void print_help(FILE *file, const void *program) { config_help(program, file); }
static void print_dump(FILE *file, const void *config) { config_print(config, file); }

// Counts the lines of the help that start with two spaces and the flag.
static int entries(const char *help, const char *name) {
    char head[96];
    int count = 0;
    size_t length = (size_t)snprintf(head, sizeof head, "\n  --%s", name);
    for (const char *at = help; (at = strstr(at, head)); at++)
        count += at[length] == ' ' || at[length] == '\n';
    return count;
}

static void help_lists_every_option_once(void **state) {
    int rows, options = 0, lines = 0;
    const Option *table = config_options(&rows);
    char *help = text_of(print_help, "build/train_gpt");
    for (int i = 0; i < rows; i++) {
        if (!table[i].name) continue;
        options++;
        if (entries(help, table[i].name) != 1)
            fail_msg("--%s has %d entries", table[i].name, entries(help, table[i].name));
        assert_non_null(table[i].help);
        // every used flag has a field
        assert_true(table[i].use != OPTION_USED || table[i].offset != OPTION_NO_FIELD);
    }
    for (const char *at = help; (at = strstr(at, "\n  --")); at++) lines++;
    assert_int_equal(lines, options);
    assert_non_null(strstr(help, "build/train_gpt"));
    assert_non_null(strstr(help, "[2048]"));
    assert_non_null(strstr(help, "selects the exact GELU in Megatron-LM"));
    for (char *line = help, *end; (end = strchr(line, '\n')); line = end + 1) {
        if (end - line > 100) fail_msg("long help line: %.*s", (int)(end - line), line);
    }
    free(help);
}

// No two rows of the table share a name or a field.
static void table_is_unambiguous(void **state) {
    int rows;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < i && table[i].name; j++) {
            if (!table[j].name) continue;
            assert_string_not_equal(table[i].name, table[j].name);
            if (table[i].offset != OPTION_NO_FIELD && table[i].offset == table[j].offset)
                fail_msg("--%s and --%s share a field", table[i].name, table[j].name);
            if (table[i].alias) assert_string_not_equal(table[i].alias, table[j].name);
        }
    }
}

static void help_and_version_need_nothing_else(void **state) {
    Run run;
    must_run(&run, "--version", 0);
    assert_true(run.config.version && !run.config.help);
    config_free(&run.config);
    must_run(&run, "--lr nonsense --unknown --help", 0);
    assert_true(run.config.help);
    config_free(&run.config);
}

static void dump_matches_megatron(void **state) {
    Run run;
    must_run(&run, SMALL "--data-path .5 a .5 b --lr 6e-4 --min-lr 6e-5 --adam-eps 1e-08", 2);
    char *dump = text_of(print_dump, &run.config);
    static const char *const lines[] = {
        "------------------------ arguments ------------------------\n  "
        "activation_quantization_bits_backward ........... 8\n",
        "\n  adam_beta1 ...................................... 0.9\n",
        "\n  adam_eps ........................................ 1e-08\n",
        "\n  data_path ....................................... ['.5', 'a', '.5', 'b']\n",
        "\n  lr .............................................. 0.0006\n",
        "\n  min_lr .......................................... 6e-05\n",
        "\n  clip_grad ....................................... 1.0\n",
        "\n  save ............................................ None\n",
        "\n  quantized_weights ............................... False\n",
        "\n  use_distributed_optimizer ....................... True\n",
        "\n  lr_decay_style .................................. linear\n",
        "\n  check_for_nan_in_loss_and_grad .................. True\n",
        "\n  padded_vocab_size ............................... 384\n",
        "\n-------------------- end of arguments ---------------------\n"};
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        if (!strstr(dump, lines[i])) fail_msg("no %s in\n%s", lines[i], dump);
    }
    char last[512] = "", *save = NULL;
    for (char *line = strtok_r(dump, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (line[0] == '-') continue;
        assert_true(strcasecmp(last, line) <= 0);
        snprintf(last, sizeof last, "%s", line);
    }
    free(dump);
    config_free(&run.config);
}

static void reals_print_as_in_python(void **state) {
    static const struct {
        double x;
        const char *text;
    } golden[] = {{0, "0.0"},           {1, "1.0"},
                  {256, "256.0"},       {0.1, "0.1"},
                  {6e-4, "0.0006"},     {1e-4, "0.0001"},
                  {6e-5, "6e-05"},      {1e-8, "1e-08"},
                  {1.5e-5, "1.5e-05"},  {1.0 / 3, "0.3333333333333333"},
                  {179200, "179200.0"}, {1e15, "1000000000000000.0"},
                  {1e16, "1e+16"},      {123456.789, "123456.789"},
                  {-2.5, "-2.5"},       {0.1 + 0.2, "0.30000000000000004"},
                  {5e-324, "5e-324"},   {1.7976931348623157e308, "1.7976931348623157e+308"}};
    for (size_t i = 0; i < sizeof golden / sizeof golden[0]; i++) {
        char text[40];
        format_real(golden[i].x, text, sizeof text);
        assert_string_equal(text, golden[i].text);
    }
}

static void json_has_every_setting(void **state) {
    Run run;
    must_run(&run, SMALL "--seed 77 --data-path=\"quote", 2);
    char *json = config_to_json(&run.config);
    cJSON *object = json_parse_object(json, strlen(json));
    assert_non_null(object);
    int rows;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows; i++) {
        if (!table[i].name || table[i].offset == OPTION_NO_FIELD || !strcmp(table[i].name, "help") ||
            !strcmp(table[i].name, "version"))
            continue;
        char name[96];
        snprintf(name, sizeof name, "%s", table[i].name + (table[i].negative ? 3 : 0));
        for (char *c = name; *c; c++) *c = *c == '-' ? '_' : *c;
        if (!cJSON_HasObjectItem(object, name)) fail_msg("no %s in %s", name, json);
    }
    assert_string_equal(cJSON_GetArrayItem(cJSON_GetObjectItem(object, "data_path"), 0)->valuestring,
                        "\"quote");
    cJSON_Delete(object);
    free(json);
    config_free(&run.config);
}

// --- resuming -------------------------------------------------------------------------------

static void checkpoints_must_match(void **state) {
    Run run;
    assert_true(resume(&run, SMALL,
                       SMALL
                       "--quantized-weights --ddp-bucket-size 1000 --train-iters 20 --lr-decay-iters 10"));
    assert_string_equal(run.notes, "");
    config_free(&run.config);
    // A checkpoint of any strategy loads in any other.
    assert_true(resume(&run, SMALL,
                       SMALL "--data-parallel-sharding-strategy optim_grads_params --optimizer-cpu-offload"));
    assert_string_equal(run.notes, "");
    config_free(&run.config);
    assert_true(resume(&run, SMALL "--optimizer-disk-offload a", SMALL "--optimizer-disk-offload b"));
    assert_string_equal(run.notes, "");
    config_free(&run.config);
    assert_false(resume(&run, SMALL, SMALL "--num-layers 3"));
    assert_int_equal(run.err.code, EXIT_CHECKPOINT);
    assert_non_null(strstr(run.err.what, "num_layers 2, but this run has 3"));
    assert_false(resume(&run, SMALL, SMALL "--num-layers 3 --load c --finetune"));
    assert_true(resume(&run, SMALL, SMALL "--lr 2e-3 --load c --finetune"));
    config_free(&run.config);
    assert_false(resume(&run, SMALL, SMALL "--lr 2e-3"));
    assert_non_null(
        strstr(run.err.what, "lr 0.001, but this run's has 0.002; add --override-opt_param-scheduler"));
    assert_false(resume(&run, SMALL, SMALL "--global-batch-size 8"));  // the schedule is in samples
    assert_non_null(strstr(run.err.what, "schedule_decay_samples 40, but this run's has 80"));
    assert_true(resume(&run, SMALL, SMALL "--lr 2e-3 --override-opt_param-scheduler"));
    assert_true(run.config.lr == 2e-3);
    config_free(&run.config);
    assert_true(resume(&run, SMALL "--lr 3e-3 --lr-decay-style cosine --lr-warmup-iters 2",
                       SMALL "--lr 2e-3 --use-checkpoint-opt_param-scheduler"));
    assert_true(run.config.lr == 3e-3 && run.config.lr_decay_style == LR_COSINE &&
                run.config.warmup_samples_wn == 8);
    config_free(&run.config);
    assert_true(resume(&run,
                       SMALL "--lr-decay-style inverse-square-root --weight-decay-incr-style cosine "
                             "--start-weight-decay 0 --end-weight-decay 1",
                       SMALL "--use-checkpoint-opt_param-scheduler"));
    assert_true(run.config.lr_decay_style == LR_INVERSE_SQUARE_ROOT &&
                run.config.weight_decay_incr_style == WEIGHT_DECAY_COSINE &&
                run.config.end_weight_decay == 1);
    config_free(&run.config);
    assert_true(resume(&run, SMALL, SMALL "--seed 5"));
    assert_string_equal(
        run.notes,
        "seed was 1234 in the checkpoint and is now 5, so training continues with the data in "
        "a different order\n");
    config_free(&run.config);
    assert_false(resume(&run,
                        SMALL "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
                        SMALL "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1 "
                              "--train-iters 20 --lr-decay-iters 10"));
    assert_non_null(strstr(run.err.what, "schedule_weight_decay_samples 40, but this run's has 80"));
}

// All flags of the first section describe the model. Programs that load a model read them from the
// checkpoint. A resumed run cannot change flags with role MODEL.
static void every_model_flag_must_match(void **state) {
    int rows, models = 0;
    const Option *table = config_options(&rows);
    Run run;
    must_run(&run, SMALL, 2);
    char *json = config_to_json(&run.config);
    for (int i = 1; i < rows && table[i].name; i++) {
        char key[OPTION_KEY_BYTES];
        if (!(table[i].roles & (MODEL | LOADED))) fail_msg("--%s is neither MODEL nor LOADED", table[i].name);
        cJSON *other = json_parse_object(json, strlen(json));
        option_key(&table[i], key);
        cJSON_ReplaceItemInObjectCaseSensitive(other, key, cJSON_CreateString("a different value"));
        char *saved = cJSON_PrintUnformatted(other);
        bool same = config_match_checkpoint(&run.config, saved, NULL, 0, &run.err);
        if (same != !(table[i].roles & MODEL)) fail_msg("--%s", table[i].name);
        if (!same && !strstr(run.err.what, key)) fail_msg("%s without %s", run.err.what, key);
        models += !same;
        cJSON_free(saved);
        cJSON_Delete(other);
    }
    assert_int_equal(models, 29);
    free(json);
    config_free(&run.config);
}

// Paths may differ between ranks, but all ranks must have one, or lists of the same length.
static void every_path_has_its_role(void **state) {
    int rows;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows; i++) {
        const Option *row = &table[i];
        if (!row->name || row->use != OPTION_USED || row->kind != OPTION_TEXT) continue;
        bool path = !strcmp(row->value, "PATH") || !strcmp(row->value, "FOLDER");
        if (path != !!(row->roles & PATH)) fail_msg("--%s", row->name);
    }
}

static void damaged_checkpoint_arguments(void **state) {
    static const char *const damaged[] = {"", "{", "[]", "null", "{\"lr\":1} x"};
    Run run;
    must_run(&run, SMALL, 2);
    for (size_t i = 0; i < sizeof damaged / sizeof damaged[0]; i++) {
        assert_false(config_match_checkpoint(&run.config, damaged[i], NULL, 0, &run.err));
        assert_int_equal(run.err.code, EXIT_CHECKPOINT);
    }
    config_free(&run.config);
    must_run(&run, SMALL "--use-checkpoint-opt_param-scheduler", 2);
    assert_true(config_match_checkpoint(&run.config,
                                        "{\"lr\":1e39,\"min_lr\":\"x\",\"lr_decay_style\":7,"
                                        "\"schedule_decay_samples\":-1,"
                                        "\"weight_decay_incr_style\":\"no\"}",
                                        NULL, 0, &run.err));
    assert_true(run.config.lr == 1e-3 && run.config.lr_decay_style == LR_LINEAR &&
                run.config.decay_samples_dn == 40);
    assert_true(run.config.weight_decay_incr_style == WEIGHT_DECAY_CONSTANT);
    config_free(&run.config);
}

// --- model configs ---------------------------------------------------------------------------

static void model_configs(void **state) {
    static const struct {
        const char *name;
        int layers, hidden, heads, head, micro, global;
        double lr;
        int64_t parameters;
    } configs[] = {{"125m", 12, 768, 12, 64, 8, 256, 6e-4, 125262336},
                   {"350m", 24, 1024, 16, 64, 8, 256, 3e-4, 355919872},
                   {"1.3b", 24, 2048, 16, 128, 4, 256, 2e-4, 1315819520},
                   {"2.7b", 32, 2560, 32, 80, 1, 16, 1.6e-4, 2651673600},
                   {"6.7b", 32, 4096, 32, 128, 2, 256, 1.2e-4, 6658596864},
                   {"13b", 40, 5120, 40, 128, 1, 16, 1e-4, 12853626880},
                   {"18b", 40, 6144, 48, 128, 1, 16, 1e-4, 18444251136}};
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        char line[128];
        Run run;
        snprintf(line, sizeof line, "@configs/gpt_%s.args --plan --plan-world-size 16", configs[i].name);
        must_run(&run, line, 1);
        const Config *c = &run.config;
        assert_string_equal(run.notes, "");
        assert_true(c->num_layers == configs[i].layers && c->hidden_size == configs[i].hidden &&
                    c->num_attention_heads == configs[i].heads);
        assert_true(c->kv_channels == configs[i].head && c->ffn_hidden_size == 4 * c->hidden_size);
        assert_true(c->micro_batch_size == configs[i].micro && c->global_batch_size == configs[i].global);
        assert_true(c->lr == configs[i].lr && fabs(c->min_lr - configs[i].lr / 10) < 1e-18 &&
                    c->lr_decay_style == LR_COSINE);
        assert_true(c->seq_length == 2048 && c->max_position_embeddings == 2048 && c->train_iters == 80000 &&
                    c->lr_decay_iters == 70000);
        assert_true(c->adam_beta1 == 0.9 && c->adam_beta2 == 0.95 && c->adam_eps == 1e-8 &&
                    c->weight_decay == 0.1 && c->clip_grad == 1);
        assert_true(c->warmup_samples_wn == 700.0 * c->global_batch_size && c->hidden_dropout == 0.1 &&
                    c->attention_dropout == 0.1);
        assert_true(c->use_distributed_optimizer && c->eval_interval == 100 && c->eval_iters == 10 &&
                    c->vocab_size_padded == 50304 && c->eod == 50256);
        int64_t h = c->hidden_size;
        int64_t parameters = c->vocab_size_padded * h + c->max_position_embeddings * h +
                             c->num_layers * (12 * h * h + 13 * h) + 2 * h;
        assert_int_equal(parameters, configs[i].parameters);
        config_free(&run.config);
    }
}

// --- fuzzing ---------------------------------------------------------------------------------

// Random lines of known names, fragments of names and odd values are accepted or refused with a
// one-line error. Sanitizers detect memory errors.
static void random_lines(void **state) {
    static const char *const odd[] = {"",     "-",   "--",      "---",
                                      "=",    "--=", "@",       "1",
                                      "-1",   "1e9", "0",       "0.5",
                                      "nan",  "a",   "--a=b=c", "99999999999999999999",
                                      "\xff", "'",   "#"};
    int rows;
    const Option *table = config_options(&rows);
    uint32_t random = 2463534242u;
    for (int round = 0; round < 20000; round++) {
        char words[14][96], *argv[15] = {"train_gpt"};
        int argc = 1;
        for (; argc < 14; argc++) {
            random ^= random << 13, random ^= random >> 17, random ^= random << 5;
            const char *name = table[random % (uint32_t)rows].name,
                       *value = odd[(random >> 8) % (sizeof odd / sizeof odd[0])];
            if (!name || random >> 30 == 0) snprintf(words[argc], sizeof words[argc], "%s", value);
            else
                snprintf(words[argc], sizeof words[argc], "--%.*s%s%s",
                         (int)(strlen(name) - (random >> 28 == 15)), name, random >> 29 == 5 ? "=" : "",
                         random >> 29 == 5 ? value : "");
            argv[argc] = words[argc];
            if (strcmp(words[argc], "--help") == 0 || strcmp(words[argc], "--version") == 0)
                argv[argc] = "--bf16";
        }
        Run run;
        if (config_parse(&run.config, argc, argv, run.notes, sizeof run.notes, &run.err))
            config_free(&run.config);
        else if (run.err.code != EXIT_USAGE || !*run.err.what ||
                 strlen(run.err.what) >= sizeof run.err.what - 1)
            fail_msg("%s", run.err.what);
    }
}

// Appends every row of the table with every odd value to a complete line.
static void every_flag_takes_or_refuses_every_value(void **state) {
    static const char *const values[] = {
        "",      "0",      "1",    "-1",    "7", "2147483648", "9223372036854775807", "9223372036854775808",
        "1e308", "-1e308", "word", "1e-320"};
    int rows;
    const Option *table = config_options(&rows);
    for (int i = 0; i < rows; i++) {
        for (size_t v = 0; table[i].name && v < sizeof values / sizeof values[0]; v++) {
            char line[1024];
            Run run;
            snprintf(line, sizeof line, "%s--%s%s%s", SMALL, table[i].name, *values[v] ? " " : "", values[v]);
            run_line(&run, line, 2);
            if (run.ok) {
                free(config_to_json(&run.config));
                config_free(&run.config);
            } else {
                assert_int_equal(run.err.code, EXIT_USAGE);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_match_megatron),
        cmocka_unit_test(good_lines),
        cmocka_unit_test(paper_scripts_work_unchanged),
        cmocka_unit_test(malformed_words),
        cmocka_unit_test(bad_combinations),
        cmocka_unit_test(incomplete_lines),
        cmocka_unit_test(notes_name_what_has_no_effect),
        cmocka_unit_test(argument_files),
        cmocka_unit_test(argument_files_nest_and_the_last_word_wins),
        cmocka_unit_test(help_lists_every_option_once),
        cmocka_unit_test(table_is_unambiguous),
        cmocka_unit_test(help_and_version_need_nothing_else),
        cmocka_unit_test(dump_matches_megatron),
        cmocka_unit_test(reals_print_as_in_python),
        cmocka_unit_test(json_has_every_setting),
        cmocka_unit_test(checkpoints_must_match),
        cmocka_unit_test(every_model_flag_must_match),
        cmocka_unit_test(every_path_has_its_role),
        cmocka_unit_test(damaged_checkpoint_arguments),
        cmocka_unit_test(model_configs),
        cmocka_unit_test(random_lines),
        cmocka_unit_test(every_flag_takes_or_refuses_every_value),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
