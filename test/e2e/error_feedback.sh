#!/usr/bin/env bash
# --error-feedback: stopped or killed runs resume bit-exactly, in several layouts and strategies and
# after a skipped step. If saved residuals do not fit a changed layout, residuals start at 0 and a
# log line says so. --plan includes the memory of the residuals.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 12
data=$work/text_text_document

# Two bits between nodes make residuals large. With small buckets there are several residuals.
two_bits=(--quantized-gradients --gq-group-size-intra 128 --gradient-quantization-method eden
    --gradient-quantization-bits-inter 2)
four_bits=(--quantized-gradients --gq-group-size-intra 64 --gq-group-size-inter 64 --hadamard-transform)
unsealed=(--error-feedback --ddp-bucket-size 1 --eval-interval 1000 --save-interval 4
    --verify-replicas-interval 1 --make-vocab-size-divisible-by 32)
run=("${unsealed[@]}" --verify-wire)

lost="WARNING: the checkpoint has no error-feedback residual that fits this run, so the residual starts at 0"

# resumed NAME FLAGS...: resumes from iteration 4 of $work/NAME and saves to another directory.
resumed() {
    local name=$1
    rm -rf "$work/$name.rest"
    mkdir "$work/$name.rest" && cp -r "$work/$name/iter_0000004" "$work/$name.rest" &&
        printf 4 >"$work/$name.rest/latest_checkpointed_iteration.txt" &&
        logged "$name.rest" "${@:2}" --load "$work/$name.rest" --save "$work/$name.rest"
}
same_end() { # NAME RANKS: compares training and the last checkpoint with the uninterrupted run
    same_training "$1" "$1.rest" 4 || return 1
    local file found=0
    for file in "$work/$1"/iter_0000012/mp_rank_*/*.safetensors; do
        cmp -s "$file" "$work/$1.rest/${file#"$work/$1/"}" || { why="${file##*/} differs"; return 1; }
        found=$((found + 1))
    done
    [ "$found" -eq "$2" ] || { why="$found shards"; return 1; }
}
resumes() { # NAME NP FLAGS...
    local flags=("$2" "${run[@]}" "${@:3}")
    logged "$1" "${flags[@]}" --save "$work/$1" || return 1
    dev/checkpoint_info "$work/$1" | grep -q 'holds .*residual' || { why="no residual is saved"; return 1; }
    resumed "$1" "${flags[@]}" && same_end "$1" "$2" || return 1
    ! grep -qF "$lost" "$work/out" || { why="the residual was not loaded"; return 1; }
}
check "2 nodes of 2" resumes square 4 --gpus-per-node 2 "${two_bits[@]}" --quantized-weights
check "4 nodes of 1, 4 bits, background saves" resumes row 4 --gpus-per-node 1 "${four_bits[@]}" \
    --async-save
check "tensor parallel 2, 2 nodes" resumes parts 4 --gpus-per-node 2 --tensor-model-parallel-size 2 \
    --sequence-parallel "${two_bits[@]}"
check "pipeline stages, 2 nodes each" resumes stages 4 --gpus-per-node 1 --pipeline-model-parallel-size 2 \
    "${two_bits[@]}"
check "optim_grads, 2 micro-batches" resumes grads 4 --gpus-per-node 2 "${two_bits[@]}" \
    --data-parallel-sharding-strategy optim_grads --global-batch-size 16 --async-save
check "optim_grads_params, offload" resumes params 4 --gpus-per-node 2 "${four_bits[@]}" \
    --data-parallel-sharding-strategy optim_grads_params --global-batch-size 16 --optimizer-cpu-offload

# The flag must change the result.
differs() {
    logged plain 4 "${run[@]:1}" --gpus-per-node 2 "${two_bits[@]}" --quantized-weights || return 1
    [ "$(train_lines plain 1)" != "$(train_lines square 1)" ] || { why="the flag changes nothing"; return 1; }
}
check "the flag changes training" differs

killed() {
    local flags=(4 "${run[@]}" --gpus-per-node 2 "${two_bits[@]}" --quantized-weights --async-save)
    SDP4BIT_FAULT=stall:3:11:0 in_background killed "${flags[@]}" --save "$work/killed"
    wait_for_iteration killed 9 && signal_rank KILL 1 || return 1
    job_ended killed && { why="exit code 0"; return 1; }
    ln -sfn "$work/killed" "$work/square.rest" && logged square.rest "${flags[@]}" --load "$work/killed" \
        --save "$work/killed" || return 1
    local from
    from=$(field square.rest loss | head -n 1 | cut -d ' ' -f 1)
    [ "$from" -gt 4 ] || { why="nothing was saved"; return 1; }
    same_training square square.rest $((from - 1)) &&
        same_end_of square killed
}
same_end_of() { # NAME NAME: compares the last checkpoints
    local file
    for file in "$work/$1"/iter_0000012/mp_rank_00/*.safetensors; do
        cmp -s "$file" "$work/$2/${file#"$work/$1/"}" || { why="${file##*/} differs"; return 1; }
    done
}
rm -rf "$work/square.rest"
check "kill -9, resumed bit-exactly" killed

# A skipped step must not change the residual, neither in memory nor in the checkpoint saved after
# it. The fault corrupts the tail in a message of the fourth step. Without chunks, the first message
# between nodes has one.
skipped() {
    local flags=(4 "${unsealed[@]}" --gpus-per-node 2 "${two_bits[@]}" --on-nan skip \
        --gradient-alltoall-pipeline 1)
    SDP4BIT_FAULT=message:1:4:1:-2 logged skip "${flags[@]}" --save "$work/skip" || return 1
    [ "$(field skip skipped | grep -c true)" = 1 ] && [ "$(field skip skipped | sed -n 4p)" = "4 true" ] ||
        { why="skipped: $(field skip skipped | tr '\n' ' ')"; return 1; }
    resumed skip "${flags[@]}" && same_end skip 4
}
check "resumed after a skipped step" skipped

# --- changes across a resume -------------------------------------------------------------------
taken() { # yes|no NP FLAGS...: checks whether a resumed run uses the residuals saved by run `square`
    resumed square "${@:2}" --exit-interval 6 || return 1
    if [ "$1" = yes ]; then ! grep -qF "$lost" "$work/out"; else grep -qF "$lost" "$work/out"; fi ||
        { why="the line about the residual: $(grep -c "$lost" "$work/out")"; return 1; }
    [ "$(field square.rest loss | head -n 1 | cut -d ' ' -f 1)" = 5 ] || { why="does not continue"; return 1; }
}
rm -rf "$work/square.rest"
check "two nodes of 1 rank, other buckets: kept" taken yes 2 "${run[@]}" --gpus-per-node 1 "${two_bits[@]}" \
    --ddp-bucket-size 10000
check "another bit width: kept" taken yes 4 "${run[@]}" --gpus-per-node 2 "${two_bits[@]}" \
    --gradient-quantization-bits-inter 4
check "a different number of nodes: starts at 0" taken no 4 "${run[@]}" --gpus-per-node 1 "${two_bits[@]}"
check "another transform: starts at 0" taken no 4 "${run[@]}" --gpus-per-node 2 "${four_bits[@]}"
check "other tensor parallelism: starts at 0" taken no 4 "${run[@]}" --gpus-per-node 2 \
    --tensor-model-parallel-size 2 \
    --make-vocab-size-divisible-by 16 "${two_bits[@]}"
check "without error feedback: not mentioned" taken yes 4 "${run[@]:1}" --gpus-per-node 2 "${two_bits[@]}"
began() { # from a checkpoint without residuals
    rm -rf "$work/plain"
    logged plain 4 "${run[@]:1}" --gpus-per-node 2 "${two_bits[@]}" --save "$work/plain" --train-iters 4 &&
        trains 4 "${run[@]}" --gpus-per-node 2 "${two_bits[@]}" --load "$work/plain" --train-iters 6 \
            --override-opt_param-scheduler || return 1
    grep -qF "$lost" "$work/out" || { why="no line about the residual"; return 1; }
}
check "from a checkpoint without residuals: starts at 0" began

# --- runs without residuals --------------------------------------------------------------------
one_node() {
    logged alone 2 --gpus-per-node 2 "${two_bits[@]}" --train-iters 3 || return 1
    logged alone_fed 2 --gpus-per-node 2 "${two_bits[@]}" --train-iters 3 --error-feedback || return 1
    grep -q "WARNING: one node: .*--error-feedback has no effect" "$work/out" || { why="no line"; return 1; }
    same_training alone alone_fed
}
check "one node: reported, and bitwise identical" one_node
no_codes() {
    trains 4 --gpus-per-node 2 --train-iters 3 --error-feedback || return 1
    grep -q -- "--error-feedback has no effect without --quantized-gradients" "$work/out" "$work/err" ||
        { why="no line"; return 1; }
}
check "fp32 gradients: reported" no_codes

# The residual takes 4 bytes per matrix element and is sharded across the 8 ranks of a node; the
# master weights are sharded across all 16 ranks.
planned() {
    "$BUILD/train_gpt_cpu" @configs/gpt_1.3b.args @configs/sdp4bit.args --plan --plan-world-size 16 \
        --gpus-per-node 8 --error-feedback >"$work/plan" 2>"$work/err" || { say "--plan failed"; return 1; }
    awk '/fp32 master weights, own shard/ { master = $NF } /residual of error feedback/ { residual = $NF }
        END { print residual / master; exit !(residual > 1.99 * master && residual < 2 * master) }' \
        "$work/plan" >"$work/ratio" ||
        { why="$(cat "$work/ratio") of the master weights instead of 2"; return 1; }
}
check "--plan shows its memory" planned
finish
