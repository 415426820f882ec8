#!/usr/bin/env bash
# Llama models: every layout and sharding strategy matches one rank, and checkpoints load in any
# layout and resume bit-exactly. Also tests text generation. A checkpoint of another model is
# refused with a message that names the differing flag.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
same_kernels
make_shard text 400 4
data=$work/text_text_document
gpt2=("${model[@]}")
model+=(--num-layers 4 --normalization RMSNorm --position-embedding-type rope --swiglu \
    --ffn-hidden-size 64 --disable-bias-linear --untie-embeddings-and-output-weights \
    --group-query-attention --num-query-groups 2)

# All layouts pad the vocabulary to the same size.
layout_of() { # T P [sequence]: sets $layout to its flags
    layout=(--tensor-model-parallel-size "$1" --pipeline-model-parallel-size "$2" \
        --make-vocab-size-divisible-by $((32 / $1)))
    if [ -n "${3:-}" ]; then layout+=(--sequence-parallel); fi
}
close_losses() { # A B PART: maximum relative difference of each loss
    [ "$(field "$1" loss | wc -l)" -gt 5 ] || { why="too few losses"; return 1; }
    paste -d ' ' <(field "$1" loss) <(field "$2" loss) | awk -v part="$3" \
        '{ d = $2 / $4 - 1; if (!(d < part && d > -part)) { print; exit 1 } }' >"$work/far" ||
        { why="losses of $1 and $2: $(cat "$work/far")"; return 1; }
}

# With the vocabulary of the published model of the same size, each model config has the published
# parameter count.
config() { # NAME VOCABULARY PARAMETERS
    "$trainer" "@configs/llama_$1.args" --plan --plan-world-size 16 --gpus-per-node 8 \
        --tokenizer-type NullTokenizer --vocab-size $(($2 - 1)) >"$work/out" 2>"$work/err" ||
        { say "--plan of $1 failed"; return 1; }
    grep -q "^  parameters  *$3\$" "$work/out" || { why="not $3 parameters"; return 1; }
}
check "config of 125M" config 125m 50304 123587328
check "config of 1.1B has TinyLlama's parameter count" config 1.1b 32000 1100048384
check "config of 3B has Llama 3.2's parameter count" config 3b 128256 3212749824
check "config of 8B has Llama 3's parameter count" config 8b 128256 8030261248

layout_of 1 1
learns() {
    logged one 1 "${layout[@]}" --train-iters 30 --save "$work/one" --save-interval 15 || return 1
    awk -v a="$(mean_loss one 1 2)" -v b="$(mean_loss one 29 30)" 'BEGIN { exit !(b > 0 && b < a - 1) }' ||
        { why="the loss did not fall"; return 1; }
}
check "the loss falls" learns

layouts_agree() {
    local spec part
    for spec in "1 2" "2 1" "2 1 sequence" "2 2 sequence"; do
        # shellcheck disable=SC2086 # split on purpose
        layout_of $spec
        # shellcheck disable=SC2086 # split on purpose
        set -- $spec
        logged other $(($1 * $2)) "${layout[@]}" --train-iters 30 --recompute-granularity full || return 1
        part=5e-3
        [ "$1" -gt 1 ] || part=1e-4
        close_losses one other $part || { why="T P $spec: $why"; return 1; }
    done
}
check "four layouts match one rank" layouts_agree

layout_of 1 1
sharding_agrees() {
    local how
    logged two 2 "${layout[@]}" --gpus-per-node 2 || return 1
    for how in optim_grads optim_grads_params; do
        logged other 2 "${layout[@]}" --gpus-per-node 2 --data-parallel-sharding-strategy $how &&
            close_losses two other 1e-4 || { why="$how: $why"; return 1; }
    done
}
check "sharded gradients and weights change nothing" sharding_agrees

resumes_bitwise() {
    local run=(2 --gpus-per-node 1 "${layout[@]}" --train-iters 16 --save-interval 8 "${paper[@]}")
    logged whole "${run[@]}" --save "$work/whole" &&
        logged first "${run[@]}" --exit-interval 8 --save "$work/halves" &&
        logged second "${run[@]}" --save "$work/halves" --load "$work/halves" &&
        same_training whole second 8 && same_shards "$work/whole" "$work/halves" 16
}
check "resumes bit-exactly with 4-bit quantization" resumes_bitwise

loads_anywhere() {
    local spec expected="" found
    for spec in "1 1" "2 1 sequence" "1 4" "2 2"; do
        # shellcheck disable=SC2086 # split on purpose
        layout_of $spec
        # shellcheck disable=SC2086 # split on purpose
        set -- $spec
        trains $(($1 * $2)) --train-iters 30 --skip-train --load "$work/one" "${layout[@]}" --eval-iters 2 ||
            return 1
        found=$(sed -n 's/.*on validation set | lm loss value: \([0-9.E+-]*\).*/\1/p' "$work/out")
        awk -v a="$found" -v b="${expected:=$found}" \
            'BEGIN { d = b > 0 ? a / b - 1 : 1; exit !(d < 1e-3 && d > -1e-3) }' ||
            { why="T P $spec: loss '$found', not $expected"; return 1; }
    done
}
check "a checkpoint has the same validation loss in every layout" loads_anywhere

layout_of 1 1
# Query/key norms combined with other features of GPT-2 and Llama.
query_key_norms() {
    local blocks
    for blocks in "--group-query-attention --num-query-groups 2" "--swiglu --disable-bias-linear"; do
        # shellcheck disable=SC2086 # split on purpose
        set -- --qk-layernorm $blocks
        model=("${gpt2[@]}" --num-layers 4 --position-embedding-type rope "$@")
        layout_of 1 1
        logged one_of 1 "${layout[@]}" --train-iters 16 || return 1
        layout_of 2 2 sequence
        logged other 4 "${layout[@]}" --train-iters 16 --exit-interval 8 --save "$work/heads" \
            --save-interval 16 || return 1
        layout_of 1 1
        logged after 1 "${layout[@]}" --train-iters 16 --load "$work/heads" || return 1
        cat "$work/other.jsonl" "$work/after.jsonl" >"$work/joined.jsonl"
        close_losses one_of joined 5e-3 || { why="$blocks: $why"; return 1; }
        rm -r "$work/heads"
    done
}
llama=("${model[@]}")
check "with query/key norms, layouts match and load each other's checkpoints" \
    query_key_norms
model=("${llama[@]}")

layout_of 1 1
writes_text() {
    trains 1 "${layout[@]}" --train-iters 30 --skip-train --load "$work/one" --sample-prompt "the quick " \
        --sample-tokens 60 --sample-temperature 0 &&
        grep -q "the quick [a-z ]*" "$work/out" || { why="no text"; return 1; }
}
check "generates text" writes_text

another_model() { # FLAG FLAGS...: the checkpoint is refused, naming the flag
    local flag=$1
    shift
    train 1 "${layout[@]}" --train-iters 30 --load "$work/one" "$@"
    error_names 6 "$flag" $?
}
check "another rotary base is refused" another_model rotary_base --rotary-base 500
check "scaled rotary positions are refused" another_model use_rope_scaling --use-rope-scaling
check "divided rotary positions are refused" another_model rotary_seq_len_interpolation_factor \
    --rotary-seq-len-interpolation-factor 2
check "a sliding window is refused" another_model window_size --window-size 7,0
check "a different number of query groups is refused" another_model num_query_groups --num-query-groups 4
check "query/key norms are refused" another_model qk_layernorm --qk-layernorm
check "learned positions are refused" another_model position_embedding_type \
    --position-embedding-type learned_absolute
model=("${gpt2[@]}" --num-layers 4 --ffn-hidden-size 64)
check "a GPT-2 configuration is refused" another_model group_query_attention
finish
