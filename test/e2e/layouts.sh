#!/usr/bin/env bash
# Tensor, sequence and pipeline parallelism: losses are the same in every layout (bitwise if only
# the pipeline differs), and a checkpoint of any layout loads in any other. Also tests resuming,
# signals, text generation, evaluation and consistent replicas. LONG=1 checks 1000 steps.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 4
data=$work/text_text_document
model+=(--num-layers 4)
dropout=(--hidden-dropout 0.1 --attention-dropout 0.1)

# layout_of T P [sequence]: sets $layout to the flags for tensor parallel size T and pipeline size
# P. All layouts pad the vocabulary to the same size.
layout_of() {
    layout=(--tensor-model-parallel-size "$1" --pipeline-model-parallel-size "$2" \
        --make-vocab-size-divisible-by $((32 / $1)))
    if [ -n "${3:-}" ]; then layout+=(--sequence-parallel); fi
}

# With one micro-batch and one bucket per layer, pipeline stages add in the same order as one rank.
stages_change_no_bit() {
    local stages run=(--train-iters 50 --global-batch-size 2 --ddp-bucket-size 1 --eval-interval 10 \
        --save-interval 50 "${dropout[@]}" "$@")
    rm -rf "$work"/stages?
    for stages in 1 2 4; do
        layout_of 1 $stages
        logged "stages$stages" $stages "${run[@]}" "${layout[@]}" --save "$work/stages$stages" || return 1
        same_training stages1 "stages$stages" || return 1
        [ "$(field stages1 loss valid)" = "$(field "stages$stages" loss valid)" ] ||
            { why="validation losses differ at P $stages"; return 1; }
    done
    # Weights and moments must match one rank.
    for stages in 1 2 4; do
        logged "on$stages" 1 "${run[@]}" --train-iters 54 --load "$work/stages$stages" \
            --make-vocab-size-divisible-by 32 --override-opt_param-scheduler || return 1
        same_training on1 "on$stages" || { why="after loading: $why"; return 1; }
    done
}
check "pipeline stages: 50 steps and the checkpoint are bitwise identical" stages_change_no_bit
check "the same with full recomputation" stages_change_no_bit --recompute-granularity full

# If a pipeline has several micro-batches in flight, the additions to the word embedding's gradient
# happen in a different order, so losses differ slightly.
close_losses() { # A B PART: maximum relative difference of each loss
    [ "$(field "$1" loss | wc -l)" -gt 5 ] || { why="too few losses"; return 1; }
    paste -d ' ' <(field "$1" loss) <(field "$2" loss) | awk -v part="$3" \
        '{ d = $2 / $4 - 1; if (!(d < part && d > -part)) { print; exit 1 } }' >"$work/far" ||
        { why="losses of $1 and $2: $(cat "$work/far")"; return 1; }
}
every_layout_learns_the_same() {
    local run=(--train-iters 20 --global-batch-size 12 "${dropout[@]}") spec name part
    logged one 1 "${run[@]}" --make-vocab-size-divisible-by 32 || return 1
    for spec in "1 2" "1 4" "2 1" "4 1" "2 1 sequence" "4 1 sequence" "2 2" "2 2 sequence" "2 4" \
        "4 2 sequence"; do
        # shellcheck disable=SC2086 # split on purpose
        layout_of $spec
        name=${spec// /-}
        # shellcheck disable=SC2086 # split on purpose
        set -- $spec
        logged "$name" $(($1 * $2)) "${run[@]}" "${layout[@]}" || return 1
        part=2e-3
        [ "$1" -gt 1 ] || part=1e-4
        close_losses one "$name" $part || return 1
    done
}
check "ten layouts on up to eight ranks match one rank" every_layout_learns_the_same

# Interleaved stages match one rank, and one rank loads their checkpoint.
interleaved_stages() {
    local run=(--train-iters 20 --global-batch-size 12 "${dropout[@]}" --eval-interval 10)
    layout_of 1 2
    logged chunks 2 "${run[@]}" "${layout[@]}" --num-layers-per-virtual-pipeline-stage 1 \
        --save "$work/chunks" --save-interval 10 && close_losses one chunks 1e-4 || return 1
    layout_of 2 2 sequence
    logged cut 4 "${run[@]}" "${layout[@]}" --num-layers-per-virtual-pipeline-stage 1 &&
        close_losses one cut 2e-3 || return 1
    logged whole 1 "${run[@]}" --train-iters 24 --load "$work/chunks" --make-vocab-size-divisible-by 32 \
        --override-opt_param-scheduler &&
        logged again 2 "${run[@]}" --train-iters 24 --load "$work/chunks" --override-opt_param-scheduler \
            --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 \
            --make-vocab-size-divisible-by 32 || return 1
    paste -d ' ' <(field whole loss) <(field again loss) | awk '{ d = $2 / $4 - 1; n++
        if (!(d < 1e-4 && d > -1e-4)) exit 1 } END { exit n != 4 }' ||
        { why="losses after loading differ"; return 1; }
}
check "interleaved stages match one rank, which loads their checkpoint" interleaved_stages

# Data parallel size 2 on two nodes, with weights and gradients quantized.
eight=(8 --gpus-per-node 2 --global-batch-size 16 --eval-interval 4 --save-interval 8 "${dropout[@]}" \
    "${paper[@]}")
layout_of 2 2 sequence
square=("${layout[@]}")
two_by_two_by_two() {
    local same=("${eight[@]:3}" --train-iters 16 --make-vocab-size-divisible-by 32) other
    logged square "${eight[@]}" "${square[@]}" --train-iters 16 --save "$work/square" &&
        logged two 2 --gpus-per-node 1 "${same[@]}" && logged eight 8 --gpus-per-node 2 "${same[@]}" &&
        logged alone 1 "${same[@]}" || return 1
    for other in two eight alone; do close_losses square $other 5e-3 || return 1; done
}
check "2 x 2 x 2 with SDP4Bit matches one, two and eight ranks" two_by_two_by_two

# Compares eight ranks with model parallelism to two ranks with the same preset. Both runs verify
# the checksums of all messages.
every_preset() {
    local preset name=0 few=(--train-iters 8 --eval-interval 100 --save-interval 100 --verify-wire)
    for preset in "" "--grad-reduce-in-bf16" "--quantized-weights" \
        "--quantized-weights --weight-quantization-method direct --weight-quantization-bits 8" \
        "--quantized-gradients" "--quantized-gradients --gradient-quantization-bits-intra 4 --hadamard-transform"; do
        name=$((name + 1))
        # shellcheck disable=SC2086 # split on purpose
        logged preset$name 8 --gpus-per-node 4 --global-batch-size 16 "${few[@]}" "${square[@]}" $preset ||
            return 1
        # shellcheck disable=SC2086 # split on purpose
        logged flat$name 2 --gpus-per-node 1 --global-batch-size 16 "${few[@]}" $preset \
            --make-vocab-size-divisible-by 32 || return 1
        close_losses preset$name flat$name 5e-3 || { why="$preset: $why"; return 1; }
    done
}
check "every preset trains with model parallelism and checksums" every_preset

# Only the last stage sees the non-finite loss, but all stages must end.
not_finite() {
    train 8 --gpus-per-node 4 --global-batch-size 16 "${square[@]}" --lr 1e37 --min-lr 0 \
        --lr-decay-style linear --lr-warmup-iters 0 --save "$work/wild" --save-interval 1
    error_names 4 "iteration 2 update: the loss" $? || return 1
    [ "$(cat "$work/wild/latest_checkpointed_iteration.txt")" = 1 ] || { why="the bad step was saved"; return 1; }
}
check "a non-finite loss ends all stages and is not saved" not_finite

resumes_bitwise() {
    logged first "${eight[@]}" "${square[@]}" --train-iters 16 --exit-interval 8 --save "$work/parts" "$@" &&
        logged second "${eight[@]}" "${square[@]}" --train-iters 16 --save "$work/parts" \
            --load "$work/parts" "$@" && same_training square second 8 || return 1
    local folder
    for folder in "$work"/square/iter_0000016/mp_rank_*; do
        cmp -s <(cat "$folder"/*.safetensors) <(cat "$work/parts/iter_0000016/${folder##*/}"/*.safetensors) ||
            { why="${folder##*/} differs"; return 1; }
    done
    [ "$(find "$work/square/iter_0000016" -mindepth 1 -maxdepth 1 | wc -l)" -eq 5 ] ||
        { why="there are not four folders and a manifest"; return 1; }
    rm -rf "$work/parts"
}
check "resumed bit-exactly, losses and checkpoints" resumes_bitwise
check "the same with background saves" resumes_bitwise --async-save

# loss_in T P D [sequence]: sets $found to the checkpoint's validation loss in this layout
loss_in() {
    local ranks=$(($1 * $2 * $3))
    layout_of "$1" "$2" "${4:-}"
    trains "$ranks" --gpus-per-node "$ranks" --global-batch-size 16 --train-iters 16 --skip-train \
        --load "$work/square" "${layout[@]}" --eval-iters 2 || return 1
    found=$(sed -n 's/.*on validation set | lm loss value: \([0-9.E+-]*\).*/\1/p' "$work/out")
}
any_layout_loads_any_other() {
    local spec expected=
    for spec in "1 1 1" "2 2 2 sequence" "4 1 2" "1 4 1" "1 1 4" "2 4 1"; do
        # shellcheck disable=SC2086 # split on purpose
        loss_in $spec || return 1
        awk -v a="$found" -v b="${expected:=$found}" 'BEGIN { d = b > 0 ? a / b - 1 : 1; exit !(d < 1e-3 && d > -1e-3) }' ||
            { why="T P D $spec: loss '$found', not $expected"; return 1; }
    done
}
check "a checkpoint has the same validation loss in every layout" any_layout_loads_any_other

# One layout saves, another one resumes and saves, and the first one resumes from that.
other_layouts_resume() {
    cp -r "$work/square" "$work/moved"
    layout_of 1 4
    logged moved 4 --global-batch-size 16 --train-iters 20 --save-interval 100 --save "$work/moved" \
        --load "$work/moved" "${layout[@]}" --override-opt_param-scheduler && layout_of 4 1 sequence &&
        logged again 8 --gpus-per-node 4 --global-batch-size 16 --train-iters 24 --save-interval 100 \
            --save "$work/moved" --load "$work/moved" "${layout[@]}" "${paper[@]}" \
            --override-opt_param-scheduler || return 1
    [ "$(field again loss | wc -l)" -eq 4 ] || { why="not four more steps"; return 1; }
}
check "another layout resumes a run, and the first layout resumes it again" other_layouts_resume

stopped_by_a_signal() {
    in_background stopped "${eight[@]}" "${square[@]}" --train-iters 4000 --save "$work/stopped"
    wait_for_iteration stopped 3 && signal_rank TERM 6 || return 1
    job_ended stopped
    local rc=$?
    [ $rc -eq 75 ] || { why="exit code $rc instead of 75"; return 1; }
    [ -s "$work/stopped/latest_checkpointed_iteration.txt" ] || { why="nothing was saved"; return 1; }
}
check "a signal to one rank of a stage saves and stops all" stopped_by_a_signal

# Killed without saving, then resumed in other layouts from the last checkpoint.
killed_and_resumed() {
    in_background killed "${eight[@]}" "${square[@]}" --train-iters 4000 --save "$work/killed"
    wait_for_iteration killed 11 && signal_rank KILL 3 || return 1
    job_ended killed
    local rc=$? saved
    [ $rc -ne 0 ] || { why="exit code 0"; return 1; }
    saved=$(cat "$work/killed/latest_checkpointed_iteration.txt")
    layout_of 4 1 sequence
    logged other 8 "${eight[@]:1}" --train-iters 4000 --exit-interval $((saved + 8)) "${layout[@]}" \
        --save "$work/killed" --load "$work/killed" || return 1
    layout_of 1 2
    logged last 4 "${eight[@]:1}" --train-iters 4000 --exit-interval $((saved + 12)) "${layout[@]}" \
        --save "$work/killed" --load "$work/killed" || return 1
    [ "$(field other loss | wc -l) $(field last loss | wc -l)" = "8 4" ] || { why="not 8 and 4 more steps"; return 1; }
    awk -v a="$(mean_loss killed 2 3)" -v b="$(mean_loss last $((saved + 9)) $((saved + 12)))" \
        'BEGIN { exit !(b > 0 && b < a) }' || { why="the loss did not fall"; return 1; }
}
check "killed, then resumed in two other layouts" killed_and_resumed

# After a rank is lost, the others end with one error line and code 7, or the launcher ends them.
lost_rank() {
    in_background lost "${eight[@]}" "${square[@]}" --train-iters 4000 --distributed-timeout-minutes 0.2
    wait_for_iteration lost 3 && signal_rank STOP 5 || return 1
    job_ended lost
    local rc=$?
    error_names 7 "rank 5" $rc
}
check "names the hung rank of a stage" lost_rank

# The model-parallel traffic of an evaluation is not counted as traffic of a training step.
traffic_of_steps() {
    layout_of 2 2
    logged traffic 4 --global-batch-size 8 --train-iters 8 --eval-interval 3 --eval-iters 4 "${layout[@]}" ||
        return 1
    field traffic model_parallel_bytes interval | awk '{ if (!first) first = $2; n++
        if ($2 != first) bad = 1 } END { exit bad || n != 8 || !first }' ||
        { why="bytes per step: $(field traffic model_parallel_bytes interval | tr '\n' ' ')"; return 1; }
}
check "model-parallel bytes count training steps only" traffic_of_steps

text_of() { sed -n '/^sample at iteration/,/^[[(-]/p' "$work/out" | sed -n 2p; }
one_text() {
    local text spec
    expected=
    for spec in "1 1" "1 2" "2 2 sequence" "4 1"; do
        # shellcheck disable=SC2086 # split on purpose
        layout_of $spec
        # shellcheck disable=SC2086 # split on purpose
        set -- $spec
        trains $(($1 * $2)) --global-batch-size 16 --train-iters 16 --skip-train --load "$work/square" \
            "${layout[@]}" --sample-prompt "the quick" --sample-tokens 20 --sample-temperature 0 || return 1
        text=$(text_of)
        [ -n "$text" ] || { why="no text at $spec"; return 1; }
        [ "${expected:=$text}" = "$text" ] || { why="T P $spec writes '$text', not '$expected'"; return 1; }
    done
}
check "every layout generates the same text" one_text

replicas_stay_equal() {
    local steps=60
    [ -z "${LONG:-}" ] || steps=1000
    logged equal "${eight[@]}" "$@" --train-iters $steps --save-interval 100000 --eval-interval 100000 \
        --verify-replicas-interval 20 || return 1
    if grep -q 'WARNING.*differ' "$work/out"; then why=$(grep -m 1 'WARNING.*differ' "$work/out"); return 1; fi
}
check "replicated tensors and tied embeddings stay equal" replicas_stay_equal "${square[@]}"
layout_of 2 2
check "the same without sequence parallelism" replicas_stay_equal "${layout[@]}"
finish
