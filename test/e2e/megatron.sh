#!/usr/bin/env bash
# convert_checkpoint --from-megatron: imports checkpoints saved by megatron-core and torch, from
# which the trainer then resumes. Inputs that cannot be imported cause one error line and leave no
# output. test/unit/convert/test_megatron.c compares the values of the tensors.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
mock=(--mock-data --bf16 --use-distributed-optimizer --micro-batch-size 2 --global-batch-size 4 --lr 1e-3
    --seq-length 16 --train-iters 3 --log-interval 1 --eval-iters 0)
for form in dist legacy; do tar -xzf "test/golden/megatron/$form.tar.gz" -C "$work" || exit 1; done

convert() { timeout -k 5 "$LIMIT" "$BUILD/convert_checkpoint" "$@" >"$work/out" 2>"$work/err" </dev/null; }

# imports FORM NOTE: imports the checkpoint directory FORM. NOTE is the expected line about master
# weights.
imports() {
    convert --from-megatron "$work/$1" --save "$work/$1.run" || say "exit code $?: $(cat "$work/err")"
    grep -q "$2" "$work/err" && grep -q "from iteration 7 in 4 files" "$work/err" &&
        [ -s "$work/$1.run/model.args" ]
}
check "the torch_dist format" imports dist "Master weights are the optimizer's"
check "the legacy format with one file per rank" imports legacy "Master weights are the model weights"

# continues FORM RANKS FLAGS...: trains three iterations and checks that losses are finite.
continues() {
    local form=$1 ranks=$2
    shift 2
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np "$ranks" "$BUILD/train_gpt_cpu" "@$work/$form.run/model.args" \
        "${mock[@]}" --load "$work/$form.run" "$@" >"$work/out" 2>"$work/err" </dev/null ||
        { why=$(tail -n 2 "$work/err"); return 1; }
    [ "$(grep -c 'lm loss: [0-9]' "$work/out")" -eq 3 ]
}
check "training continues from torch_dist, with master weights" continues dist 1
check "the same with a different layout" continues dist 2 --finetune --tensor-model-parallel-size 2
check "training continues from one file per rank" continues legacy 2 --finetune \
    --pipeline-model-parallel-size 2

# no_convert CODE TEXT FLAGS...: checks that there is one error line and no output.
no_convert() {
    local code=$1 text=$2
    shift 2
    convert "$@" --save "$work/none"
    error_names "$code" "$text" $? && { [ ! -e "$work/none" ] || { why="output was left"; return 1; }; }
}
taken() {
    convert --from-megatron "$work/dist" --save "$work/legacy.run"
    error_names 2 "holds checkpoints" $?
}
check "an existing --save directory" taken
check "another iteration" no_convert 6 "iter_0000008" --from-megatron "$work/dist" --ckpt-step 8
check "not a Megatron-LM checkpoint" no_convert 6 "neither .metadata" --from-megatron "$work"
check "two sources" no_convert 2 "--from-megatron" --from-megatron "$work/dist" --from-hf "$work"
mv "$work/legacy/iter_0000007/mp_rank_01_001" "$work/elsewhere"
check "a missing rank file" no_convert 6 "mp_rank_01_001" --from-megatron "$work/legacy"
trainer_says() {
    timeout -k 5 "$LIMIT" "$BUILD/train_gpt_cpu" "@$work/dist.run/model.args" "${mock[@]}" \
        --load "$work/dist" >"$work/out" 2>"$work/err" </dev/null
    error_names 6 "--from-megatron" $?
}
check "the trainer suggests convert_checkpoint" trainer_says
finish
