#!/usr/bin/env bash
# --plan of LoRA runs: the report separates trainable from frozen parameters, and --plan-network
# counts no frozen gradients, but the adapters and the dequantization of the frozen weights.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"

plan() { # FLAGS...
    "$BUILD/train_gpt_cpu" @configs/gpt_1.3b.args --plan --plan-world-size 1 --micro-batch-size 8 \
        --global-batch-size 8 --plan-network 10 --plan-gpu H100 "$@" >"$work/out" 2>"$work/err" </dev/null ||
        say "--plan $* failed"
}
passes() { # FLAGS...: prints the milliseconds of forward and backward
    plan "$@" && sed -n 's/^  forward and backward take \([0-9.]*\) ms.*/\1/p' "$work/out"
}
lora=(--lora-rank 16)
full=$(passes) adapted=$(passes "${lora[@]}") recomputed=$(passes --recompute-granularity full)
adapted_again=$(passes "${lora[@]}" --recompute-granularity full)
int8=$(passes "${lora[@]}" --lora-base-format int8) nf4=$(passes "${lora[@]}" --lora-base-format nf4)
nf4_again=$(passes "${lora[@]}" --lora-base-format nf4 --recompute-granularity full)

# holds CONDITION: of the times above. off(a, b) is |a - b|
holds() {
    awk -v full="$full" -v lora="$adapted" -v again="$recomputed" -v lora_again="$adapted_again" \
        -v int8="$int8" -v nf4="$nf4" -v nf4_again="$nf4_again" \
        "function off(a, b) { return a < b ? b - a : a - b } BEGIN { exit !($1) }" ||
        { why="full $full, LoRA $adapted; recomputed $recomputed, LoRA $adapted_again; int8 $int8, NF4 $nf4, \
NF4 recomputed $nf4_again"; return 1; }
}
# Weight gradients are a third of the matrix products. The adapters add memory traffic.
check "frozen gradients are not computed" holds "lora > 0.67 * full && lora < 0.97 * full"
# Recomputation repeats the forward pass, which LoRA does not shorten.
check "recomputation takes a forward pass" \
    holds "(lora_again - lora) / (again - full) > 1 && (lora_again - lora) / (again - full) < 1.3"
# 24 layers of 50331648 elements, twice per micro-batch: codes, bf16 scales of 64 values and bf16
# weights, at 79 % of 3350 GB/s.
check "frozen weights are dequantized for forward and backward" holds \
    "off(nf4 - lora, 48 * 50331648 * (0.5 + 2 / 64 + 2) / 2646500000) < 0.11 && \
     off(int8 - lora, 48 * 50331648 * (1 + 2 / 64 + 2) / 2646500000) < 0.11"
check "recomputation dequantizes again" holds \
    "off(nf4_again - lora_again, 72 * 50331648 * (0.5 + 2 / 64 + 2) / 2646500000) < 0.11"
# At a given rate, the time follows from the operations: of 1.3B with 4 for a frozen weight.
given() {
    local full adapted
    full=$(passes --plan-tflops 400) && adapted=$(passes "${lora[@]}" --plan-tflops 400) || return 1
    awk -v full="$full" -v lora="$adapted" 'BEGIN {
        frozen = 24 * 50331648 + 50304 * 2048; adapters = 24 * 16 * 2048 * (4 + 2 + 5 + 5)
        scores = 12 * 24 * 2048 * 2048; tokens = 8 * 2048
        a = tokens * (6 * frozen + scores) / 4e11; b = tokens * (4 * frozen + scores + 6 * adapters) / 4e11
        exit !(full > a - 0.1 && full < a + 0.1 && lora > b - 0.1 && lora < b + 0.1) }' ||
        { why="full $full ms, LoRA $adapted"; return 1; }
}
check "--plan-tflops: operations of LoRA" given

prints() { # LINES...: extended regular expressions
    local line
    for line in "$@"; do grep -qE "$line" "$work/out" || { why="no line '$line'"; return 1; }; done
}
# Rank 16: 24 layers of 32768 trainable parameters per rank. 1.3B: 1315819520 parameters.
counts() {
    plan "${lora[@]}" && prints '^  parameters +1328402432$' '^    trainable, in adapters +12582912$' \
        '^    frozen +1315819520$' &&
        ! grep -q '1-D' "$work/out" || { why=${why:-"1-D parameters of adapters"}; return 1; }
    plan && prints '^  parameters +1315819520$' '^    of which 1-D \(in tails\) +' &&
        ! grep 'frozen' "$work/out"
}
check "trainable and frozen parameters" counts
# A layer has 50358272 parameters, word embeddings and LM head have 103022592 each, positions have
# 4194304, and the last norm has 4096.
stage_counts() {
    plan "${lora[@]}" --plan-world-size 4 --gpus-per-node 2 --pipeline-model-parallel-size 2 \
        --global-batch-size 256 --untie-embeddings-and-output-weights &&
        prints '^  parameters +1431425024$' '^    frozen +1418842112$' \
            '^  stage  0, 12 layers, embeddings: 6291456 trainable and 711516160 frozen parameters, [0-9.]+ GiB' \
            '^  stage  1, 12 layers, LM head: 6291456 trainable and 707325952 frozen parameters, [0-9.]+ GiB' \
            'out of each node +0  = 0.0000 bytes per trainable parameter$'
}
check "trainable and frozen parameters of stages" stage_counts
# Bytes per parameter count all parameters of the model: 2 for frozen bf16 weights.
per_parameter() {
    plan "${lora[@]}" && prints '^  frozen weights +2631639040 bytes +1\.981 bytes/parameter$'
}
check "memory per parameter of the whole model" per_parameter
finish
