#!/usr/bin/env bash
# --quantized-activations: messages between pipeline stages in 8 or 4 bits. Tests that runs repeat
# and resume bit-exactly, the bytes of plan and log, the loss next to a run in bf16, checksums, and
# combinations with other features.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 4
data=$work/text_text_document
run=(--num-layers 4 --pipeline-model-parallel-size 2 --train-iters 8 --aq-group-size 32)
quantized=(--quantized-activations)
forward=--activation-quantization-bits-forward
backward=--activation-quantization-bits-backward
four=("${quantized[@]}" "$forward" 4 "$backward" 4)

# same_files A B ITERATION: compares all shards.
same_files() {
    local folder found=0
    for folder in "$work/$1/$(printf 'iter_%07d' "$3")"/mp_rank_*; do
        diff -rq "$folder" "$work/$2/${folder#"$work/$1/"}" >"$work/differing" ||
            { why=$(head -n 1 "$work/differing"); return 1; }
        found=$((found + 1))
    done
    [ "$found" -gt 0 ]
}
differs() { ! same_training "$@" || { why="$1 and $2 train alike"; return 1; }; }

# ---- one boundary -------------------------------------------------------------------------------
check "bf16" logged bf16 2 "${run[@]}"
exact() {
    logged exact 2 "${run[@]}" "${quantized[@]}" "$forward" 16 "$backward" 16 && same_training bf16 exact
}
check "16 bits in both directions: bitwise identical to a run without the flag" exact
repeats() {
    logged eight 2 "${run[@]}" "${quantized[@]}" && logged again 2 "${run[@]}" "${quantized[@]}" &&
        same_training eight again && differs bf16 eight
}
check "8 bits: runs repeat bit by bit" repeats
near() { # NAME LIMIT: compares the mean loss of the last iterations with bf16
    local a b
    a=$(mean_loss "$1" 5 8) b=$(mean_loss bf16 5 8)
    awk -v a="$a" -v b="$b" -v limit="$2" 'BEGIN { d = a / b - 1; exit !(d < limit && d > -limit) }' ||
        { why="mean loss $a instead of $b"; return 1; }
}
check "8 bits: the loss is close to bf16" near eight 0.0005
four_bits() { logged four 2 "${run[@]}" "${four[@]}" && differs four eight && near four 0.01; }
check "4 bits: the loss is near bf16" four_bits
nearest() {
    logged nearest 2 "${run[@]}" "${quantized[@]}" --aq-rounding nearest && differs nearest eight &&
        near nearest 0.0005
}
check "8 bits, rounded to nearest" nearest
one_direction() { # only gradients are quantized: the first forward pass is exact
    logged one 2 "${run[@]}" "${quantized[@]}" "$forward" 16 && same_loss one bf16 1 && differs one bf16
}
check "unquantized in forward only" one_direction
announced() {
    grep -q 'activations between pipeline stages: bf16, their gradients: int8, groups of 32, rounded stoch' \
        "$work/out" || { why="no line"; return 1; }
}
check "the log names the formats" announced

# ---- evaluation ---------------------------------------------------------------------------------
# The initial weights are the same, and evaluation sends bf16.
evaluates() {
    logged eval.bf16 2 "${run[@]}" --skip-train && logged eval.four 2 "${run[@]}" "${four[@]}" --skip-train &&
        [ -n "$(field eval.bf16 loss valid)" ] || { why="no validation loss"; return 1; }
    [ "$(field eval.bf16 loss valid)" = "$(field eval.four loss valid)" ] ||
        { why="validation losses differ"; return 1; }
}
check "evaluation sends bf16" evaluates

# ---- bytes --------------------------------------------------------------------------------------
# sends NP BYTES FLAGS...: compares the bytes between stages in --plan with the log. The embedding
# is untied, so that nothing else is sent. A step has two micro-batches.
sends() {
    local np=$1 bytes=$2 said logged
    shift 2
    make_plan "$np" "${run[@]}" --untie-embeddings-and-output-weights "$@" &&
        logged sends "$np" "${run[@]}" --untie-embeddings-and-output-weights --train-iters 3 "$@" || return 1
    said=$(awk -v np="$np" '/^  to (the next|the previous) stage/ { sum += $5 }
        /^  to a neighboring stage/ { sum += 2 * $5 }
        END { print sum * np }' "$work/plan")
    logged=$(sed -n 's/.*"model_parallel_bytes": *\([0-9.]*\).*/\1/p' "$work/sends.jsonl" | tail -n 1)
    [ "$said" = "$bytes" ] && [ "${logged%.*}" = "$bytes" ] ||
        { why="planned ${said:-none}, sent ${logged:-none}, expected $bytes"; return 1; }
}
# A micro-batch has 2 x 32 tokens of 32 channels: 2048 values with 64 scales.
check "bytes of bf16" sends 4 $((4 * 2 * 4096))
check "bytes of 8 bits" sends 4 $((4 * 2 * (2048 + 256))) "${quantized[@]}"
check "bytes of 4 bits" sends 4 $((4 * 2 * (1024 + 256))) "${four[@]}"
check "bytes of two formats" sends 4 $((4 * (4096 + 1024 + 256))) "${quantized[@]}" "$forward" 16 \
    "$backward" 4
check "bytes with checksums" sends 4 $((4 * 2 * (2048 + 256 + 16))) "${quantized[@]}" --verify-wire
check "memory as planned" memory_as_planned 2 "${run[@]}" "${quantized[@]}"
check "memory as planned, interleaved with checksums" memory_as_planned 2 "${run[@]}" "${four[@]}" \
    --num-layers-per-virtual-pipeline-stage 1 --verify-wire
predicted() { # FLAGS...: prints the milliseconds of a step over a slow network
    ranks 1 @configs/gpt_125m.args --micro-batch-size 8 --global-batch-size 64 --plan --plan-world-size 2 \
        --gpus-per-node 1 --plan-network 1 --pipeline-model-parallel-size 2 "$@" || return 1
    awk '/^  this run  / { print $4 }' "$work/out"
}
predicts() {
    local plain less
    plain=$(predicted) && less=$(predicted "${four[@]}") &&
        awk -v a="$plain" -v b="$less" 'BEGIN { exit !(b > 0 && b < 0.9 * a) }' ||
        { why="${less:-none} ms instead of ${plain:-none}"; return 1; }
}
check "--plan-network" predicts
waits() {
    trains 2 "${run[@]}" "${four[@]}" --timing-log-level 2 &&
        grep -qE '^ +forward-recv \.+: \([0-9.]+, [0-9.]+\)$' "$work/out" &&
        grep -qE '^ +backward-recv \.+: \([0-9.]+, [0-9.]+\)$' "$work/out" || { why="no times"; return 1; }
}
check "the log has the time that stages waited" waits

# ---- checksums ----------------------------------------------------------------------------------
sound() { logged sound 2 "${run[@]}" "${quantized[@]}" --verify-wire && same_training eight sound; }
check "checksums do not change training" sound
# Exchange 0 of rank 1 is the first forward message, exchange 0 of rank 0 the first gradient.
flipped() { # RANK FLAGS...
    local from=$((1 - $1)) what=activations
    [ "$1" -eq 1 ] || what="gradients of activations"
    SDP4BIT_FAULT=message:$1:3:0:9 train 2 "${run[@]}" "${quantized[@]}" --verify-wire "${@:2}"
    error_names 7 "message from rank $from to rank $1, $what, micro-batch 0: it was corrupted in transit" $?
}
check "a damaged message ends the run" flipped 1
check "a damaged gradient ends the run" flipped 0

unverified() { # without a checksum, a flipped bit changes the run and nobody notices
    rm -f "$work/unverified.jsonl"
    SDP4BIT_FAULT=message:1:3:0:9 logged unverified 2 "${run[@]}" "${quantized[@]}" &&
        same_loss unverified eight 2 && differs unverified eight
}
check "without checksums damage is not noticed" unverified

# ---- resuming and combinations ------------------------------------------------------------------
rewind() { # FROM TO: copies the checkpoint of iteration 4
    mkdir "$work/$2"
    cp -r "$work/$1/iter_0000004" "$work/$2/" && echo 4 >"$work/$2/latest_checkpointed_iteration.txt"
}
# resumes NAME NP FLAGS...: compares 8 iterations in one run with 4, a save and 4 more.
resumes() {
    local name=$1 np=$2
    shift 2
    logged "$name" "$np" "${run[@]}" "${four[@]}" --save-interval 4 --save "$work/$name" "$@" &&
        rewind "$name" "$name.4" && logged "$name.on" "$np" "${run[@]}" "${four[@]}" --save-interval 4 \
        --save "$work/$name.4" --load "$work/$name.4" "$@" &&
        same_training "$name" "$name.on" 4 && same_files "$name" "$name.4" 8
}
check "resumed bit-exactly" resumes plain 2
check "SDP4Bit on two nodes" resumes sdp4bit 4 --gpus-per-node 2 "${paper[@]}" --verify-wire \
    --verify-replicas-interval 2
check "interleaved stages with dropout" resumes interleaved 2 --num-layers-per-virtual-pipeline-stage 1 \
    --hidden-dropout 0.1
check "tensor and sequence parallelism" resumes tensor 4 --tensor-model-parallel-size 2 --sequence-parallel
check "tensor parallelism" resumes parts 4 --tensor-model-parallel-size 2 --verify-replicas-interval 2
check "ZeRO-3, recomputation, Muon" resumes sharded 4 --recompute-granularity full --optimizer muon \
    --data-parallel-sharding-strategy optim_grads_params
check "ZeRO-2, FP8, four stages" resumes fp8 4 --pipeline-model-parallel-size 4 --fp8-format hybrid \
    --data-parallel-sharding-strategy optim_grads
check "Llama" resumes llama 2 --normalization RMSNorm --position-embedding-type rope --swiglu \
    --disable-bias-linear --untie-embeddings-and-output-weights
# The random bits belong to micro-batches and layers. Data-parallel ranks sum gradients in another
# order.
layouts() { logged wide 4 "${run[@]}" "${four[@]}" && same_loss wide four 1 && same_loss wide four 2; }
check "other ranks have the same random bits" layouts
chunks() {
    logged chunks 2 "${run[@]}" "${four[@]}" --micro-batch-size 1 &&
        logged more 4 "${run[@]}" "${four[@]}" --micro-batch-size 1 && same_loss chunks more 1
}
check "other ranks have the same random bits, micro-batch 1" chunks

# ---- refused flags ------------------------------------------------------------------------------
check "one stage is refused" refused 2 '--quantized-activations needs --pipeline-model-parallel-size 2' 1 \
    "${quantized[@]}"
check "groups across tokens are refused" refused 2 '--aq-group-size 64 does not divide --hidden-size 32' 2 \
    "${run[@]}" "${quantized[@]}" --aq-group-size 64
finish
