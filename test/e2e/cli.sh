#!/usr/bin/env bash
# The command line: help, version, the paper's scripts verbatim, argument files, and one clear error
# line with exit code 2 for each invalid use.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 8
data=$work/text_text_document

answers() { # TEXT FLAGS...: exits with 0 and prints TEXT
    "$BUILD/train_gpt_cpu" "${@:2}" >"$work/out" 2>"$work/err" </dev/null || { say "exit code $?"; return 1; }
    grep -qF -- "$1" "$work/out" && [ ! -s "$work/err" ] ||
        { why="no '$1' in the answer, or something on stderr"; return 1; }
}
check "--help" answers "--quantized-weights" --help
check "-h" answers "--quantized-weights" -h
check "--help shows defaults" answers "[1234]" --help
check "--help wins over all other arguments" answers "Exit codes: 0 done" --num-layers x --help
check "--version" answers "sdp4bit.c " --version
once() {
    ranks 4 --version && [ "$(grep -c '^sdp4bit.c ' "$work/out")" -eq 1 ] ||
        { why="not one line under mpirun"; return 1; }
}
check "--version under mpirun prints once" once
first_rank() { # VARIABLE: the rank variable of another launcher
    local lines
    lines=$(for rank in 0 1 2; do env "$1=$rank" "$BUILD/train_gpt_cpu" --version ||
        echo "exit code $?"; done 2>&1 | wc -l)
    [ "$lines" -eq 1 ] || { why="three ranks printed $lines lines"; return 1; }
}
for variable in PMIX_RANK PMI_RANK; do check "--version under a launcher that sets $variable prints once" \
    first_rank $variable; done

usage() { # TEXT FLAGS...: refused with exit code 2 on one rank, without mpirun
    "$BUILD/train_gpt_cpu" "${model[@]}" "${batch[@]}" --data-path "$data" "${@:2}" >"$work/out" \
        2>"$work/err" </dev/null
    error_names 2 "$1" $?
}
nothing() {
    "$BUILD/train_gpt_cpu" >"$work/out" 2>"$work/err" </dev/null
    error_names 2 "--num-layers" $?
}
check "no flags" nothing
noted() { # TEXT FLAGS...: accepted with one line, which says that the flag has no effect
    trains 2 --train-iters 3 "${@:2}" || return 1
    [ "$(grep -c -- "$1.*no effect\|$1.*without" "$work/out")" -ge 1 ] || { why="no note on $1"; return 1; }
}
other_processor() {
    timeout --preserve-status -s ILL 2 "$BUILD/train_gpt_cpu" "${model[@]}" "${batch[@]}" \
        --data-path "$data" --train-iters 1000000 \
        >"$work/out" 2>"$work/err" </dev/null
    error_names 3 "this CPU lacks an instruction" $?
}
check "a CPU without a required instruction set" other_processor
without_optimizer() {
    "$BUILD/train_gpt_cpu" "${batch[@]}" "${model[@]:0:14}" --quantized-weights --data-path "$data" \
        >"$work/out" 2>"$work/err" </dev/null
    error_names 2 "--use-distributed-optimizer" $?
}
check "an unknown flag: suggests the nearest name" usage "did you mean --quantized-weights" --quantizd-weights
check "abbreviated flags are not accepted" usage "did you mean --num-layers" --num-layer 2
check "underscores instead of dashes" usage "did you mean --micro-batch-size" --micro_batch_size 2
check "an argument that is not a flag" usage "stray" --seed 1 stray
check "a missing value" usage "--seed" --seed
check "a value for a flag without one" usage "--bf16" --bf16=yes
check "not a number" usage "--lr fast" --lr fast
check "not a 64-bit integer" usage "--seq-length 3.5" --seq-length 3.5
check "a negative size" usage "--num-layers -1" --num-layers -1
check "an empty value" usage "--hidden-size" --hidden-size ""
check "a number that float32 rounds to an invalid value" usage \
    "--adam-beta2 0.99999999: becomes 1 in float32" --adam-beta2 0.99999999
check "a number that underflows in float32" usage "--adam-eps 1e-46: becomes 0 in float32" --adam-eps 1e-46
check "a number out of float32 range" usage "--lr 1e39: becomes inf in float32" --lr 1e39
check "a number that overflows" usage "--train-iters" --train-iters 99999999999999999999
check "an invalid choice" usage "cosine" --lr-decay-style sine
check "3 bits" usage "--weight-quantization-bits 3" --quantized-weights --weight-quantization-bits 3
check "a group size that is not a multiple of 32" usage "32" --quantized-weights --wq-group-size 100
check "group sizes with a huge least common multiple" usage "4096" --quantized-gradients \
    --gq-group-size-intra 1056 --gq-group-size-inter 128
check "a hidden size that the heads do not divide" usage "--num-attention-heads" --num-attention-heads 5
check "a sequence longer than the position embeddings" usage "--max-position-embeddings" --seq-length 64
check "quantization without the distributed optimizer" without_optimizer
check "--save without --save-interval" usage "--save-interval" --save "$work/x"
check "saving flags without --save are reported" noted "--keep-checkpoint-interval" \
    --keep-last-checkpoints 2 --keep-checkpoint-interval 4
alone() { # a warning on one rank, which has no peer, and none on two ranks
    trains 1 --train-iters 3 --verify-wire || return 1
    [ "$(grep -c '^WARNING: a single data-parallel rank .*--verify-wire has no effect$' "$work/out")" -eq 1 ] ||
        { why="not one warning"; return 1; }
    trains 2 --train-iters 3 --verify-wire && ! grep -q 'no effect' "$work/out"
}
check "--verify-wire on one rank is reported" alone
ends_in_warmup() { # succeeds if only the run with the longer warm-up warns
    local warning='^WARNING: the run ends before its learning-rate warm-up does'
    trains 1 --train-iters 2 --lr-decay-iters 100 --lr-warmup-iters 1 || return 1
    ! grep "$warning" "$work/out" || { why="a run whose warm-up ends warns"; return 1; }
    trains 1 --train-iters 2 --lr-decay-iters 100 --lr-warmup-iters 10 || return 1
    grep -q "$warning" "$work/out" || { why="no warning"; return 1; }
}
check "a run that ends before its warm-up does" ends_in_warmup
check "--hadamard-transform alone is reported" noted "--hadamard-transform" --hadamard-transform
check "min-lr above lr" usage "--min-lr" --min-lr 1
check "fp16" usage "--bf16" --fp16
check "mixture of experts" usage "experts" --num-experts 4
check "rotary positions" usage "rotary" --use-rotary-position-embeddings
check "a missing argument file" usage "nowhere.args" "@$work/nowhere.args"
for option in --nproc_per_node=4 --nproc-per-node=4 --nnodes=2 --node_rank=0 --master_addr=a --master_port=1 \
    --local_rank=0 --standalone; do
    check "torchrun's ${option%%=*} suggests mpirun" usage "mpirun" "$option"
done
check "an indivisible batch" refused 2 "--global-batch-size 6" 4 --global-batch-size 6
check "a batch smaller than the number of ranks" refused 2 "--global-batch-size 4" 4 --global-batch-size 4
check "ranks not a multiple of --gpus-per-node" refused 2 "--gpus-per-node" 4 --gpus-per-node 3

# --- the README example, in a directory that contains only a fresh clone and the programs ---
readme_example() { # the CPU recipe, shortened
    mkdir -p "$work/clone"
    ln -sfn "$BUILD" "$work/clone/build"
    for folder in llmc sdp4bit configs dev scripts; do ln -sfn "$PWD/$folder" "$work/clone/$folder"; done
    awk '/^### Compare SDP4Bit with bf16 gradients/ { inside = 1 }
        inside && /^    / { printed = 1; sub(/^    /, ""); if ($0 != "make") print; next }
        printed && NF { exit }' README.md |
        sed 's/--train-iters 100/--train-iters 10/' >"$work/clone/example.sh"
    grep -q '^run() { scripts/mpirun.sh .*train_gpt_cpu' "$work/clone/example.sh" ||
        { why="no mpirun.sh in the README's example"; return 1; }
    (cd "$work/clone" && OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout -k 5 "$LIMIT" \
        bash -e example.sh) >"$work/out" 2>"$work/err" </dev/null || { say "exit code $?"; return 1; }
    [ "$(grep -c '^ iteration       10/      10 .* lm loss: ' "$work/out")" = 2 ] &&
        [ -s "$work/clone/runs/bf16.jsonl" ] && [ -s "$work/clone/runs/sdp4bit.jsonl" ] ||
        { why="no losses"; return 1; }
    grep -q 'sdp4bit' <(tail -n 20 "$work/out") || { why="no comparison"; return 1; }
}
check "the README's example" readme_example

# --- argument files ---
argument_file() {
    mkdir -p "$work/args"
    printf '%s\n' '# a comment' '--train-iters 3   # another' '@more.args' "--split '90,5,5'" \
        >"$work/args/run.args"
    printf '%s\n' '--lr=1e-3' '--log-interval 1' >"$work/args/more.args"
    rm -f "$work/file.jsonl" "$work/flags.jsonl"
    trains 1 --log-jsonl "$work/file.jsonl" "@$work/args/run.args" &&
        trains 1 --log-jsonl "$work/flags.jsonl" --train-iters 3 --lr 1e-3 --log-interval 1 &&
        same_training file flags
}
check "an argument file that includes another" argument_file
last_wins() {
    logged last 1 --train-iters 9 --train-iters 3 && [ "$(train_lines last | wc -l)" -eq 3 ]
}
check "the last of a repeated flag wins" last_wins

# --- the paper's scripts: all their flags verbatim, at a size that runs here ---
scripts=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \
    --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 12
    --lr 0.0006 --min-lr 0.00006 --lr-decay-iters 10 --lr-decay-style cosine --lr-warmup-fraction 0.01 \
        --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-08
    --weight-decay .1 --clip-grad 1.0 --loss-scale 0 --loss-scale-window 1000 --hysteresis 2 \
        --min-loss-scale 1 --bf16 --use-distributed-optimizer
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --mock-data --log-interval 1 \
        --timing-log-level 2 --save-interval 5002 --eval-interval 6 --eval-iters 2
    --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard --log-throughput \
        --tensorboard-dir "$work/tensorboard" --tensorboard-log-interval 1
    --wandb-project sdp4bit --wandb-exp-name run --wandb-save-dir "$work/wandb" \
        --no-async-tensor-model-parallel-allreduce --recompute-activations
    --recompute-granularity selective --distributed-backend nccl --exit-duration-in-mins 1530 \
        --exit-interval 200 --overlap-grad-reduce)
quantization=(--quantized-weights --weight-quantization-bits 4 --wq-group-size 2048 --quantized-gradients \
    --gradient-quantization-bits-inter 4 --gq-group-size-inter 128
    --gradient-quantization-bits-intra 8 --gq-group-size-intra 128 --hadamard-transform \
        --gradient-alltoall-pipeline 8 --gradients-quantization-start-iteration 0)
paper_script() { # FLAGS...
    rm -rf "$work/tensorboard" "$work/wandb"
    ranks 4 "${scripts[@]}" --gpus-per-node 2 --save "$work/paper$1" --load "$work/paper$1" "${@:2}" ||
        { say "exit code $?"; return 1; }
    local line
    for line in '^ iteration       12/      12 | consumed samples:           48 | elapsed time per iteration (ms): [0-9.]* | throughput per GPU (TFLOP/s/GPU): [0-9.]* | learning rate: 6.000E-05 | global batch size:     4 | lm loss: [0-9.E+-]* | loss scale: 1.0 | grad norm: [0-9.]* | number of skipped iterations:   0 | number of nan iterations:   0 |' \
        '^(min, max) time across ranks (ms):$' '^    forward-compute \.*: ([0-9.]*, [0-9.]*)$' \
        '^    optimizer \.*: ([0-9.]*, [0-9.]*)$' \
        '^ validation loss at iteration 6 | lm loss value: [0-9.E+-]* | lm loss PPL: [0-9.E+-]* | $' \
        '^ validation loss at iteration 12 on validation set | ' \
        '^ validation loss at iteration 12 on test set | ' \
        '^using torch.bfloat16 for parameters ...$' \
        '^------------------------ arguments ------------------------$' \
        '^\[before the start of training step\] datetime: ' \
        'saving checkpoint at iteration      12 to '; do
        grep -q "$line" "$work/out" || { why="no line '$line'"; return 1; }
    done
    compgen -G "$work/tensorboard/events.out.tfevents.*" >/dev/null ||
        { why="no TensorBoard file"; return 1; }
    [ -s "$work/wandb/run.jsonl" ] || { why="no JSON lines in --wandb-save-dir"; return 1; }
}
vocabulary() { # stands in for GPT-2's vocabulary, which may not be installed; only the size matters
    printf '%s\n' --tokenizer-type NullTokenizer --vocab-size 255 --make-vocab-size-divisible-by 8
}
mapfile -t tokens < <(vocabulary | tr ' ' '\n')
check "the paper's baseline script" paper_script baseline "${tokens[@]}"
check "the paper's SDP4Bit script" paper_script sdp4bit "${tokens[@]}" "${quantization[@]}"
weights_line() {
    grep -q '^Weight Quantization: True, group size = 2048, bits = 4$' "$work/out" &&
        grep -q '^Gradient Quantization: True, gradient quantization intra-node group size = 128, bits = 8; inter-node group size = 128, bits = 4\.$' "$work/out"
}
check "the quantization flags of the paper's code" weights_line
check "the paper's script with tensor parallelism" paper_script cut "${tokens[@]}" "${quantization[@]}" \
    --tensor-model-parallel-size 2
layout_line() {
    grep -q '^using world size: 4, data-parallel size: 2, context-parallel size: 1 tensor-model-parallel size: 2, pipeline-model-parallel size: 1 $' "$work/out"
}
check "Megatron-LM's log line about the layout" layout_line
gpt2() {
    printf '{"text": "The quick brown fox jumps over the lazy dog. It counts gradients."}\n%.0s' {1..400} \
        >"$work/gpt2.jsonl"
    "$BUILD/preprocess_data" --input "$work/gpt2.jsonl" --vocab-file "$1/vocab.json" \
        --merge-file "$1/merges.txt" --append-eod --output-prefix "$work/gpt2" >/dev/null 2>"$work/err" ||
        { say "tokenizing failed"; return 1; }
    ranks 2 --vocab-file "$1/vocab.json" --merge-file "$1/merges.txt" --num-layers 2 --hidden-size 32 \
        --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 \
        --micro-batch-size 1 --lr 1e-3 --train-iters 2 --eval-iters 1 --split 90,5,5 --bf16 \
        --data-path "$work/gpt2_text_document" || { say "training failed"; return 1; }
    grep -qF ' > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)' "$work/out" ||
        { why="the vocabulary is not padded to 50304"; return 1; }
}
if [ -f ../shared/data/gpt2/vocab.json ] && [ -f ../shared/data/gpt2/merges.txt ]; then
    check "GPT-2's vocabulary, padded to 50304" gpt2 ../shared/data/gpt2
else
    skip "GPT-2's vocabulary, padded to 50304" "the vocabulary files are not available"
fi
finish
