#!/usr/bin/env bash
# --quantized-tensor-parallel: sums and gathers of tensor-parallel ranks in 8 bits. Tests that runs
# repeat and resume bit-exactly, that ranks stay equal, the bytes of plan and log, the loss next to
# a run in bf16, and combinations with other features.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 4
data=$work/text_text_document
run=(--tensor-model-parallel-size 2 --train-iters 8 --aq-group-size 32 --verify-replicas-interval 1)
coded=(--quantized-tensor-parallel)

differs() { ! same_training "$@" || { why="$1 and $2 train alike"; return 1; }; }
near() { # A B: compares the mean loss of the last iterations
    local a b
    a=$(mean_loss "$1" 5 8) b=$(mean_loss "$2" 5 8)
    awk -v a="$a" -v b="$b" 'BEGIN { d = a / b - 1; exit !(d < 0.002 && d > -0.002) }' ||
        { why="mean loss $a instead of $b"; return 1; }
}
check "bf16" logged bf16 2 "${run[@]}"
repeats() {
    logged eight 2 "${run[@]}" "${coded[@]}" && equal_ranks && logged again 2 "${run[@]}" "${coded[@]}" &&
        same_training eight again && differs bf16 eight && near eight bf16
}
check "runs repeat bit by bit, and the loss is close to bf16" repeats
announced() {
    grep -q 'sums and gathers of tensor parallelism: int8, groups of 32' "$work/out" || { why="no line"; return 1; }
}
check "the log names the format" announced
# With sequence parallelism, each rank sums and gathers the same rows as without it.
sequence() {
    logged sequence 2 "${run[@]}" "${coded[@]}" --sequence-parallel && equal_ranks && differs sequence bf16 &&
        near sequence bf16
}
check "sequence parallelism" sequence
four() {
    local four=("${run[@]}" --tensor-model-parallel-size 4 --sequence-parallel)
    logged bf16.four 4 "${four[@]}" && logged four 4 "${four[@]}" "${coded[@]}" && equal_ranks &&
        near four bf16.four
}
check "four ranks" four
evaluates() {
    logged eval.bf16 2 "${run[@]}" --skip-train &&
        logged eval.eight 2 "${run[@]}" "${coded[@]}" --skip-train &&
        [ -n "$(field eval.bf16 loss valid)" ] || { why="no validation loss"; return 1; }
    [ "$(field eval.bf16 loss valid)" = "$(field eval.eight loss valid)" ] ||
        { why="validation losses differ"; return 1; }
}
check "evaluation sends bf16" evaluates

# sends NP FLAGS...: compares the bytes in --plan with the log, and with bf16.
sends() {
    local np=$1 plain
    shift
    make_plan "$np" "${run[@]}" "$@" &&
        plain=$(awk '/^  tensor parallelism / { print $NF }' "$work/plan") &&
        make_plan "$np" "${run[@]}" "${coded[@]}" "$@" &&
        logged sends "$np" "${run[@]}" "${coded[@]}" --train-iters 3 "$@" && parts_as_planned sends "$np" ||
        return 1
    awk -v plain="$plain" '/^  tensor parallelism / { exit !($NF < 0.6 * plain) }' "$work/plan" ||
        { why="as many bytes as bf16"; return 1; }
}
check "bytes" sends 2
check "bytes with sequence parallelism" sends 2 --sequence-parallel
check "bytes with full recomputation" sends 4 --sequence-parallel --recompute-granularity full
check "memory as planned" memory_as_planned 2 "${run[@]}" "${coded[@]}" --sequence-parallel
predicted() { # FLAGS...: prints the milliseconds of a step over a slow network
    ranks 1 @configs/gpt_125m.args --micro-batch-size 8 --global-batch-size 64 --plan --plan-world-size 2 \
        --gpus-per-node 1 --plan-network 1 --tensor-model-parallel-size 2 "$@" || return 1
    awk '/^  this run  / { print $4 }' "$work/out"
}
predicts() {
    local plain less
    plain=$(predicted) && less=$(predicted "${coded[@]}") &&
        awk -v a="$plain" -v b="$less" 'BEGIN { exit !(b > 0 && b < 0.9 * a) }' ||
        { why="${less:-none} ms instead of ${plain:-none}"; return 1; }
}
check "--plan-network" predicts

# resumes NAME NP FLAGS...: compares 8 iterations in one run with 4, a save and 4 more.
resumes() {
    local name=$1 np=$2
    shift 2
    logged "$name" "$np" "${run[@]}" "${coded[@]}" --save-interval 4 --save "$work/$name" "$@" &&
        equal_ranks && mkdir "$work/$name.4" && cp -r "$work/$name/iter_0000004" "$work/$name.4/" &&
        echo 4 >"$work/$name.4/latest_checkpointed_iteration.txt" &&
        logged "$name.on" "$np" "${run[@]}" "${coded[@]}" --load "$work/$name.4" "$@" &&
        same_training "$name" "$name.on" 4
}
check "SDP4Bit on two nodes" resumes sdp4bit 4 --gpus-per-node 2 "${paper[@]}"
check "quantized stages, full recomputation" resumes stages 4 --pipeline-model-parallel-size 2 \
    --quantized-activations --sequence-parallel --recompute-granularity full --verify-wire
check "ZeRO-3, Muon" resumes sharded 4 --optimizer muon --muon-tp-mode blockwise \
    --data-parallel-sharding-strategy optim_grads_params
check "FP8" resumes fp8 2 --fp8-format hybrid
check "FP8 with sequence parallelism" resumes fp8.rows 2 --fp8-format hybrid --fp8-recipe tensorwise \
    --sequence-parallel
check "Llama with local steps" resumes llama 4 --normalization RMSNorm --position-embedding-type rope \
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --gpus-per-node 2 --local-steps 2
recomputes() { # recomputation repeats the codes of the first forward pass
    logged again 2 "${run[@]}" "${coded[@]}" --recompute-granularity full --sequence-parallel &&
        same_training again sequence
}
check "full recomputation trains alike" recomputes
check "one rank is refused" refused 2 '--quantized-tensor-parallel needs --tensor-model-parallel-size 2' 1 \
    "${coded[@]}"
check "groups across tokens are refused" refused 2 '--aq-group-size 64 does not divide --hidden-size 32' 2 \
    "${run[@]}" "${coded[@]}" --aq-group-size 64
finish
