#!/usr/bin/env bash
# --optimizer-cpu-offload and --optimizer-disk-offload: master weights and moments are in host
# memory or in files, and AdamW runs on CPU cores. Runs with and without these flags have identical
# log lines and checkpoints, including after skipped steps, rejected updates, flipped bits and
# background saves, and each loads the others' checkpoints. test/e2e/sharding.sh combines the flags
# with sharded gradients and weights; disk_offload.sh tests the files.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 12
data=$work/text_text_document
offload=--optimizer-cpu-offload
disk=(--optimizer-disk-offload "$work/state")
several=("${paper[@]}" --wq-group-size 128 --ddp-bucket-size 1000)
# Features that read master weights, moments and gradients.
looks=(--log-params-norm --log-num-zeros-in-grad --log-quantization-error-interval 2
    --verify-replicas-interval 3)

# figures NAME: prints a run's log lines without times and memory.
figures() {
    sed -E 's/"timing":\{[^}]*\}//; /^\{"kind":"(start|memory|timers|phases)"/d; s/"(load|save)":"[^"]*"//' \
        "$work/$1.jsonl"
}
same_everything() {
    local file found=0
    same_training "$1" "$2" || return 1
    diff <(figures "$1") <(figures "$2") >"$work/differ" || { why=$(sed -n 2p "$work/differ"); return 1; }
    for file in "$work/$1"/iter_*/mp_rank_*/*.safetensors; do
        cmp -s "$file" "$work/$2/${file#"$work/$1/"}" || { why="${file#"$work/"} differs"; return 1; }
        found=$((found + 1))
    done
    [ "$found" -gt 0 ] || { why="$1 saved nothing"; return 1; }
}
# without_and_with NAME NP FLAGS...: runs NAME, NAME.offload and NAME.disk, which must be identical.
without_and_with() {
    local name=$1
    shift
    logged "$name" "$@" --save "$work/$name" &&
        logged "$name.offload" "$@" $offload --save "$work/$name.offload" &&
        same_everything "$name" "$name.offload" &&
        logged "$name.disk" "$@" "${disk[@]}" --save "$work/$name.disk" &&
        same_everything "$name" "$name.disk"
}
saves=(--train-iters 8 --lr-decay-iters 12 --save-interval 4)
check "one rank" without_and_with one 1 "${saves[@]}" "${looks[@]}"
check "baseline, two nodes of two" without_and_with baseline 4 --gpus-per-node 2 "${saves[@]}" "${looks[@]}" \
    --ddp-bucket-size 1000
check "SDP4Bit, background saves" without_and_with sdp4bit 4 --gpus-per-node 2 "${several[@]}" \
    "${saves[@]}" "${looks[@]}" --async-save
check "qW and bf16 gradients, --verify-wire, one stream" without_and_with qw 2 --gpus-per-node 1 \
    --quantized-weights --weight-quantization-method direct --grad-reduce-in-bf16 --verify-wire --no-overlap \
    "${saves[@]}" "${looks[@]}"
parts=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --make-vocab-size-divisible-by 16)
check "tensor parallel 2, pipeline 2" without_and_with parts 4 "${parts[@]}" "${several[@]}" "${saves[@]}"

# --- steps that are not applied ---
wild=(--lr 1e37 --min-lr 0 --lr-decay-style linear --lr-warmup-iters 0 --eval-iters 0)
skips() { # NAME NP FLAGS...
    without_and_with "$@" --on-nan skip --train-iters 4 --save-interval 2 &&
        [ "$(grep -c '"skipped":true' "$work/$1.offload.jsonl")" -eq 3 ] ||
        { why="${why:-not 3 skipped}"; return 1; }
}
check "--on-nan skip, one rank" skips skip_one 1 "${wild[@]}"
check "--on-nan skip, SDP4Bit" skips skip_four 4 "${wild[@]}" --gpus-per-node 2 "${several[@]}"
spikes() {
    without_and_with spikes 2 --gpus-per-node 1 "${several[@]}" --train-iters 64 --eval-iters 0 \
        --on-spike skip --loss-spike-factor 0.1 --norm-spike-factor 0.1 --max-skipped-in-a-row 0 \
        --save-interval 64 &&
        grep -q '"skipped":true' "$work/spikes.offload.jsonl" || { why="${why:-none skipped}"; return 1; }
}
check "--on-spike skip" spikes
refuses() { # NP FLAGS...: nothing is saved after a rejected update
    local np=$1
    shift
    LIMIT=60 train "$np" --lr 3.4e38 --min-lr 0 --lr-decay-style constant --lr-warmup-iters 0 --eval-iters 0 \
        --save "$work/refused$np" --save-interval 1 "$@"
    error_names 4 "iteration 1" $? && error_names 4 "the update on rank" 4 &&
        [ ! -e "$work/refused$np/latest_checkpointed_iteration.txt" ]
}
check "an update rejected on the host ends the run: one rank" refuses 1 $offload
check "an update rejected on the host ends the run: SDP4Bit" refuses 4 $offload --gpus-per-node 2 "${several[@]}"
check "an update rejected with the state on disk ends the run" refuses 4 "${disk[@]}" --gpus-per-node 2 \
    "${several[@]}"

# --- flipped bits ---
no_majority() { # all ranks restore from the master weights in host memory
    local flags=(2 --gpus-per-node 1 "${several[@]}" --train-iters 8 --save-interval 8
        --verify-replicas-interval 1)
    SDP4BIT_FAULT=replica:1:5:1 without_and_with flipped "${flags[@]}" &&
        grep -q '^{"kind":"repair".*"from":null' "$work/flipped.offload.jsonl" ||
        { why="${why:-no repair from the master weights}"; return 1; }
}
check "replicas are repaired from master weights on the host" no_majority

# --- checkpoints ---
loads() { # NAME FLAGS...: loads checkpoints of runs with and without the flag
    local name=$1
    shift
    logged "$name" 4 --gpus-per-node 2 "${several[@]}" --load "$work/sdp4bit.offload" \
        --lr-decay-iters 12 "$@" &&
        logged "$name.offload" 4 --gpus-per-node 2 "${several[@]}" --load "$work/sdp4bit" $offload \
            --lr-decay-iters 12 "$@" &&
        same_training "$name" "$name.offload" &&
        logged "$name.disk" 4 --gpus-per-node 2 "${several[@]}" --load "$work/sdp4bit.offload" \
            "${disk[@]}" --lr-decay-iters 12 "$@" &&
        same_training "$name" "$name.disk" &&
        logged "$name.from_disk" 4 --gpus-per-node 2 "${several[@]}" --load "$work/sdp4bit.disk" \
            --lr-decay-iters 12 "$@" &&
        same_training "$name" "$name.from_disk"
}
check "runs with and without offload resume from each other's checkpoints" loads continues --train-iters 12
check "--no-load-optim" loads no_optim --no-load-optim --train-iters 12
check "--finetune" loads finetune --finetune --train-iters 3

# --- memory ---
memory() {
    local total host logged
    make_plan 4 --gpus-per-node 2 "${several[@]}" "${looks[@]}" $offload --async-save --save "$work/none" \
        --save-interval 4 || return 1
    ! grep -q '^  optimizer state' "$work/plan" || { why="the optimizer's state is on the device"; return 1; }
    total=$(awk '$1 == "total" { print $2 }' "$work/plan")
    host=$(awk '/^  host memory / { print $3 }' "$work/plan")
    logged=$(sed -n 's/.*"allocated_bytes":\([0-9]*\),"host_bytes":\([0-9]*\),.*/\1 \2/p' \
        "$work/sdp4bit.offload.jsonl")
    [ "$logged" = "$total $host" ] || { why="planned $total and $host, allocated ${logged:-nothing}"; return 1; }
}
check "--plan and the log include host memory" memory
disk_memory() {
    local planned logged
    make_plan 4 --gpus-per-node 2 "${several[@]}" "${looks[@]}" "${disk[@]}" --async-save \
        --save "$work/none" --save-interval 4 || return 1
    planned=$(awk '/^  host memory / { host = $3 } /^  disk / { print host, $2 }' "$work/plan")
    logged=$(sed -n 's/.*"host_bytes":\([0-9]*\),"disk_bytes":\([0-9]*\),.*/\1 \2/p' "$work/sdp4bit.disk.jsonl")
    [ -n "$planned" ] && [ "$logged" = "$planned" ] ||
        { why="planned ${planned:-nothing}, logged ${logged:-nothing}"; return 1; }
}
check "--plan and the log include the files" disk_memory
finish
