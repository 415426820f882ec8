#!/usr/bin/env bash
# --fp8-recipe delayed: the histories and scales are training state. Tests that they do not depend
# on the layout, bit-exact resumes, checkpoints of runs with other FP8 flags, and refused flags.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
# shellcheck source-path=SCRIPTDIR source=../convert_lib.sh
. test/convert_lib.sh
make_shard text 400 4
data=$work/text_text_document
fp8=(--fp8-format hybrid --fp8-amax-history-len 5 --fp8-amax-compute-algo max --fp8-margin 1)
run=(--num-layers 4 --train-iters 12 --eval-interval 3 --save-interval 6
    --make-vocab-size-divisible-by 16)

# state DIR ITERATION: prints the saved history and scales.
state() {
    python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["fp8_scaling"])' \
        "$work/$1/$(printf 'iter_%07d' "$2")/manifest.json"
}
same_state() { # A B ITERATION
    [ -n "$(state "$1" "$3")" ] && [ "$(state "$1" "$3")" = "$(state "$2" "$3")" ] ||
        { why="the FP8 scales of $1 and $2 differ"; return 1; }
}
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
# rewind FROM TO: copies the checkpoint of iteration 6.
rewind() {
    rm -rf "${work:?}/$2"
    mkdir "$work/$2"
    cp -r "$work/$1/iter_0000006" "$work/$2/" && echo 6 >"$work/$2/latest_checkpointed_iteration.txt"
}
# resumes NAME NP FLAGS...: compares 12 iterations in one run with 6, a save and 6 more. Rank 0
# saves the scales for all ranks, so the resumed run would differ if the ranks' scales did.
resumes() {
    local name=$1 np=$2
    shift 2
    logged "$name" "$np" "${run[@]}" "${fp8[@]}" --save "$work/$name" "$@" && rewind "$name" "$name.6" &&
        logged "$name.on" "$np" "${run[@]}" "${fp8[@]}" --save "$work/$name.6" --load "$work/$name.6" "$@" &&
        same_training "$name" "$name.on" 6 && same_files "$name" "$name.6" 12 &&
        same_state "$name" "$name.6" 12
}
check "one rank, resumed bit-exactly" resumes one 1
check "two nodes with SDP4Bit, resumed bit-exactly" resumes sdp4bit 4 --gpus-per-node 2 "${paper[@]}" \
    --verify-replicas-interval 2
check "tensor and sequence parallelism, resumed bit-exactly" resumes tensor 2 \
    --tensor-model-parallel-size 2 --sequence-parallel
check "two pipeline stages, resumed bit-exactly" resumes pipeline 2 --pipeline-model-parallel-size 2
check "interleaved stages, resumed bit-exactly" resumes interleaved 2 --pipeline-model-parallel-size 2 \
    --num-layers-per-virtual-pipeline-stage 1
check "ZeRO-3 with recomputation, resumed bit-exactly" resumes sharded 2 \
    --data-parallel-sharding-strategy optim_grads_params --recompute-granularity full
check "background saves, resumed bit-exactly" resumes background 2 --async-save

# first_step NAME NP FLAGS...: one step; after it, layouts may differ in the last places.
first_step() {
    local name=$1 np=$2
    shift 2
    logged "$name" "$np" "${run[@]}" "${fp8[@]}" --exit-interval 1 --save "$work/$name" "$@"
}
stages() {
    local name=$1
    shift
    first_step "$name" "$@" && same_state first "$name" 1
}
check "one step" first_step first 1
check "two stages have the scales of one rank" stages stages 2 --pipeline-model-parallel-size 2
check "interleaved stages have the scales of one rank" stages chunks 2 --pipeline-model-parallel-size 2 \
    --num-layers-per-virtual-pipeline-stage 1
# close_state A B KINDS: compares the scales of these operands after one step. The first micro-batch
# sets the scales of this step, and it differs between A and B, so maxima agree except for rounding.
close_state() {
    python3 -c '
import json, struct, sys
a, b = ([value for value, in struct.iter_unpack(">f", bytes.fromhex(state["scales"]))]
        for state in (json.load(open(path))["fp8_scaling"] for path in sys.argv[1:3]))
most = [0.1, 0, 0.1]  # scales of inputs, weights and gradients; weights do not depend on data
far = [i for i, (x, y) in enumerate(zip(a, b)) if str(i % 3) in sys.argv[3] and abs(x / y - 1) > most[i % 3]]
sys.exit(f"scales {far[:5]} differ: {[a[i] / b[i] for i in far[:5]]}" if far or len(a) != len(b) else 0)
' "$work/$1/iter_0000001/manifest.json" "$work/$2/iter_0000001/manifest.json" "$3" 2>"$work/err" ||
        { why=$(tail -n 1 "$work/err"); return 1; }
}
# Data-parallel ranks average gradients later than micro-batches do, so their gradients are larger.
data_parallel() { first_step data 4 && close_state first data 01; }
check "data-parallel ranks have the scales of one rank, except of gradients" data_parallel
whole() { first_step whole 1 --micro-batch-size 8 && close_state first whole 012; }
check "a step has one entry, however many micro-batches it has" whole
evaluations() {
    logged silent 1 "${run[@]}" "${fp8[@]}" --eval-interval 1000 --save "$work/silent" &&
        same_training one silent && same_state one silent 12
}
check "evaluations do not change the scales" evaluations
skipped() { # a corrupted gradient makes the norm infinite in step 3
    SDP4BIT_FAULT=message:1:3:0:-2 logged skipped 4 "${run[@]}" "${fp8[@]}" --gradient-alltoall-pipeline 1 \
        --gpus-per-node 2 --on-nan skip --exit-interval 4 --save "$work/skipped" --save-interval 1 || return 1
    [ "$(field skipped skipped | tr '\n' ' ')" = "1 false 2 false 3 true 4 false " ] ||
        { why="skipped: $(field skipped skipped | tr '\n' ' ')"; return 1; }
    [ -n "$(state skipped 2)" ] && [ "$(state skipped 2)" = "$(state skipped 3)" ] &&
        [ "$(state skipped 3)" != "$(state skipped 4)" ] || { why="scales of the skipped step"; return 1; }
}
check "a skipped step does not change the scales" skipped

# extends FROM NAME: iteration 7 of NAME has the histories of iteration 6 of FROM and a new entry.
extends() {
    python3 -c '
import json, sys
a, b = (json.load(open(path))["fp8_scaling"]["history"] for path in sys.argv[1:])
sys.exit(len(a) != len(b) or any(a[i + 8:i + 40] != b[i:i + 32] for i in range(0, len(a), 40)))
' "$work/$1/iter_0000006/manifest.json" "$work/$2/iter_0000007/manifest.json" ||
        { why="the history of $2 does not continue $1"; return 1; }
}
# moves FROM NAME NP FLAGS...: resumes at iteration 6 in another layout.
moves() {
    local from=$1 name=$2 np=$3
    shift 3
    rewind "$from" "$name.6"
    logged "$name" "$np" "${run[@]}" "${fp8[@]}" --load "$work/$name.6" --save "$work/$name.6" \
        --exit-interval 7 "$@" && extends "$from" "$name.6"
}
check "from one rank to two stages" moves one to_stages 2 --pipeline-model-parallel-size 2
check "from stages to data parallelism" moves interleaved to_data 4
check "from data parallelism to tensor parallelism" moves sdp4bit to_tensor 2 \
    --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 8

says() { grep -q "$1" "$work/out" || { why="no line '$1'"; return 1; }; }
other_length() { # a longer history starts with the saved entries, a shorter one with the newest
    rewind one length.6
    logged longer 1 "${run[@]}" "${fp8[@]}" --fp8-amax-history-len 8 --load "$work/length.6" &&
        [ "$(train_lines longer | wc -l)" -eq 6 ] && same_loss longer one 7 &&
        logged shorter 1 "${run[@]}" "${fp8[@]}" --fp8-amax-history-len 2 --load "$work/length.6" &&
        ! grep -q 'no delayed FP8 scales' "$work/out"
}
check "another history length" other_length
leaves_fp8() {
    rewind one bf16.6
    logged bf16 1 "${run[@]}" --load "$work/bf16.6" --save "$work/bf16.6" &&
        [ "$(train_lines bf16 | wc -l)" -eq 6 ] &&
        ! grep -q fp8_scaling "$work/bf16.6/iter_0000012/manifest.json"
}
check "an FP8 checkpoint resumes in bf16" leaves_fp8
enters_fp8() {
    rewind bf16.12 empty.6
    logged empty 1 "${run[@]}" "${fp8[@]}" --load "$work/empty.6" &&
        says 'WARNING: the checkpoint has no delayed FP8 scales that fit this run, so histories are empty'
}
bf16_run() { logged bf16.12 1 "${run[@]}" --save "$work/bf16.12" && enters_fp8; }
check "a bf16 checkpoint resumes in FP8 with an empty history" bf16_run
tensorwise() {
    rewind one tensorwise.6
    logged tensorwise 1 "${run[@]}" --fp8-format hybrid --fp8-recipe tensorwise --load "$work/tensorwise.6" &&
        [ "$(train_lines tensorwise | wc -l)" -eq 6 ]
}
check "a delayed checkpoint resumes with tensorwise scales" tensorwise
finetunes() {
    rewind one finetune.6
    logged finetune 1 "${run[@]}" "${fp8[@]}" --finetune --load "$work/finetune.6" &&
        ! grep -q 'no delayed FP8 scales' "$work/out"
}
check "--finetune keeps the scales" finetunes
shows() {
    dev/checkpoint_info "$work/one" | grep -q '48 delayed FP8 scales with histories of 5' ||
        { why="no line"; return 1; }
}
check "checkpoint_info shows the state" shows
exports() {
    converts --load "$work/pipeline" --to-hf "$work/exported" && [ -s "$work/exported/config.json" ]
}
check "convert_checkpoint ignores the state" exports
damaged() {
    rewind one damaged.6
    sed -i 's/"history": "......../"history": "7fc00000/' "$work/damaged.6/iter_0000006/manifest.json"
    refused 6 'manifest.json is damaged' 1 "${run[@]}" "${fp8[@]}" --load "$work/damaged.6"
}
check "a damaged history is refused" damaged

check "--local-steps is refused" refused 2 '--local-steps cannot be combined with --fp8-recipe delayed' 2 \
    --gpus-per-node 1 --local-steps 4 "${fp8[@]}"
plans() {
    train 1 --plan "${run[@]}" "${fp8[@]}" && says 'FP8 histories' && says 'FP8 scales of all ranks'
}
check "--plan lists the memory" plans
finish
