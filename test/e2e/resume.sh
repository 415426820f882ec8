#!/usr/bin/env bash
# A run that saves after k steps and resumes in a new process has the same log and final checkpoint,
# bit for bit, as an uninterrupted run. Also tests --load and --save with another number of ranks,
# fine-tuning, different schedules, batch size ramp-up and training lengths in samples.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 4
data=$work/text_text_document
dropout=(--hidden-dropout 0.1 --attention-dropout 0.1)

# same_checkpoint DIR DIR ITERATION: compares all shards byte by byte. Manifests are not compared,
# because times, directory names and library versions differ.
same_checkpoint() {
    same_shards "$@" && [ "$(cat "$1/latest_checkpointed_iteration.txt")" = \
        "$(cat "$2/latest_checkpointed_iteration.txt")" ] || { why=${why:-trackers differ}; return 1; }
}
lines_match() { # KIND A B FROM: compares log lines of this kind after iteration FROM
    grep "^{\"kind\":\"$1\"" "$work/$2.jsonl" | awk -v from="$4" \
        '{ split($0, p, /[:,]/); if (p[4] > from) print }' >"$work/left"
    grep "^{\"kind\":\"$1\"" "$work/$3.jsonl" >"$work/right"
    [ -s "$work/right" ] && cmp -s "$work/left" "$work/right" || { why="$1 lines differ"; return 1; }
}
# continues NAME FLAGS...: compares 16 iterations in one run with 8, a save and 8 more.
continues() {
    local name=$1
    shift
    local run=(4 --gpus-per-node 2 --train-iters 16 --eval-interval 4 --save-interval 8 "${dropout[@]}" "$@")
    logged "$name" "${run[@]}" --save "$work/$name" &&
        logged "$name.1" "${run[@]}" --save "$work/$name.parts" --exit-interval 8 &&
        same_checkpoint_8 "$name" &&
        logged "$name.2" "${run[@]}" --save "$work/$name.parts" --load "$work/$name.parts" || return 1
    train_lines "$name" | awk 'NR <= 8' | cmp -s - <(train_lines "$name.1") ||
        { why="the first part differs"; return 1; }
    same_training "$name" "$name.2" 8 && lines_match valid "$name" "$name.2" 8 &&
        same_checkpoint "$work/$name" "$work/$name.parts" 16
}
same_checkpoint_8() {
    local file
    for file in "$work/$1"/iter_0000008/mp_rank_00/*.safetensors; do
        cmp -s "$file" "$work/$1.parts/iter_0000008/mp_rank_00/${file##*/}" ||
            { why="the checkpoint of iteration 8 differs"; return 1; }
    done
}
check "baseline, resumed bit-exactly" continues baseline
check "SDP4Bit, resumed bit-exactly" continues sdp4bit "${paper[@]}"
check "full recomputation and several buckets, resumed bit-exactly" continues odd "${paper[@]}" \
    --wq-group-size 128 --ddp-bucket-size 1000 --recompute-granularity full
half=(--gpus-per-node 2 --train-iters 16 --eval-interval 4 --save-interval 8)

# A directory with only the checkpoint of iteration 8, to load from.
at_eight() {
    rm -rf "${work:?}/$2"
    mkdir "$work/$2"
    cp -r "$work/$1/iter_0000008" "$work/$2/" && echo 8 >"$work/$2/latest_checkpointed_iteration.txt"
}
at_eight baseline load
at_eight sdp4bit load4
close_to() { # NAME REFERENCE PERCENT: compares the mean losses of iterations 9 to 16
    awk -v a="$(mean_loss "$1" 9 16)" -v b="$(mean_loss "$2" 9 16)" -v p="$3" \
        'BEGIN { d = a / b - 1; exit !(a + 0 > 0 && d < p / 100 && d > -p / 100) }' ||
        { why="mean loss $(mean_loss "$1" 9 16), at the same size $(mean_loss "$2" 9 16)"; return 1; }
}
# resize NAME REFERENCE DIR NP PERCENT FLAGS...: resumes with other ranks or flags. The first step
# has the same weights and samples, so its loss must be equal; later steps round differently.
resize() {
    local name=$1 reference=$2 folder=$3 np=$4 percent=$5
    shift 5
    logged "$name" "$np" --train-iters 16 --eval-interval 4 "${dropout[@]}" --load "$work/$folder" "$@" &&
        [ "$(train_lines "$name" | wc -l)" -eq 8 ] && same_loss "$name" "$reference" 9 &&
        close_to "$name" "$reference" "$percent"
}
check "baseline, from 4 ranks to 1" resize to1 baseline load 1 0.1
check "baseline, from 4 ranks to 2" resize to2 baseline load 2 0.1 --gpus-per-node 1
check "baseline, other buckets" resize buckets baseline load 4 0.1 --gpus-per-node 4 --ddp-bucket-size 1000
check "SDP4Bit, from 2 x 2 ranks to 1 x 2" resize to1x2 sdp4bit load4 2 1 --gpus-per-node 2 "${paper[@]}" \
    --verify-replicas-interval 1
check "SDP4Bit, from 2 x 2 ranks to 4 x 1" resize to4x1 sdp4bit load4 4 1 --gpus-per-node 1 "${paper[@]}" \
    --verify-replicas-interval 1
check "a baseline's checkpoint resumes with SDP4Bit" resize switched baseline load 4 2 --gpus-per-node 2 \
    "${paper[@]}" --verify-replicas-interval 1

first_iteration() { train_lines "$1" | head -n 1 | sed 's/.*"iteration":\([0-9]*\),.*/\1/'; }
finetune() {
    logged finetune 4 "${half[@]}" --load "$work/load" --finetune --lr 1e-3 --train-iters 4 &&
        logged scratch 4 "${half[@]}" --lr 1e-3 --train-iters 4 || return 1
    [ "$(first_iteration finetune)" = 1 ] &&
        awk -v a="$(mean_loss finetune 1 1)" -v b="$(mean_loss scratch 1 1)" \
        'BEGIN { exit !(a < 0.95 * b) }' ||
        { why="iteration $(first_iteration finetune), $(mean_loss finetune 1 1), not $(mean_loss scratch 1 1)"; return 1; }
}
check "--finetune takes the weights and starts at iteration 1" finetune
no_load_optim() {
    logged no_load_optim 4 "${half[@]}" "${dropout[@]}" --load "$work/load" --no-load-optim --no-load-rng &&
        [ "$(first_iteration no_load_optim)" = 9 ] || return 1
    ! same_training baseline no_load_optim 8 && why= && same_loss no_load_optim baseline 9 &&
        close_to no_load_optim baseline 15
}
check "--no-load-optim resumes with fresh moments" no_load_optim
no_save_optim() {
    trains 4 "${half[@]}" --save "$work/light" --no-save-optim --no-save-rng --exit-interval 8 || return 1
    local full light
    full=$(cat "$work"/load/iter_0000008/mp_rank_00/*.safetensors | wc -c)
    light=$(cat "$work"/light/iter_0000008/mp_rank_00/*.safetensors | wc -c)
    [ "$light" -lt $((full / 3)) ] || { why="$light bytes, with optimizer $full"; return 1; }
    refused 6 "--no-load-optim" 4 "${half[@]}" --load "$work/light" &&
        logged light 4 "${half[@]}" --load "$work/light" --no-load-optim && [ "$(first_iteration light)" = 9 ]
}
check "--no-save-optim saves only weights, which load only without optimizer state" no_save_optim
not_saved_again() { # a run that trains nothing keeps the checkpoint that it loaded
    local folder=$work/kept flag
    cp -r "$work/baseline" "$folder"
    for flag in --no-save-optim --no-load-optim; do
        trains 4 "${half[@]}" "${dropout[@]}" --save "$folder" --load "$folder" --ckpt-step 16 $flag &&
            same_checkpoint "$work/baseline" "$folder" 16 &&
            trains 4 "${half[@]}" "${dropout[@]}" --save "$folder" --load "$folder" --ckpt-step 8 $flag \
                --train-iters 8 --override-opt_param-scheduler && same_shards "$work/baseline" "$folder" 8 ||
            return 1
        [ "$(cat "$folder/latest_checkpointed_iteration.txt")" = 8 ] || { why="the tracker is not 8"; return 1; }
        echo 16 >"$folder/latest_checkpointed_iteration.txt"
    done
    # Without its tracker, the newest checkpoint is loaded and the tracker restored.
    rm "$folder/latest_checkpointed_iteration.txt"
    trains 4 "${half[@]}" "${dropout[@]}" --save "$folder" --load "$folder" --no-save-optim &&
        same_checkpoint "$work/baseline" "$folder" 16
}
check "a run that trains nothing does not save the loaded checkpoint again" not_saved_again

# --- schedules ---
check "another --lr is refused" refused 6 "schedule has lr 0.003" 4 "${half[@]}" --load "$work/load" --lr 1e-3
check "another batch size, which changes the schedule's length, is refused" refused 6 "scheduler" 4 \
    "${half[@]}" \
    --load "$work/load" --global-batch-size 16
override() {
    logged override 4 "${half[@]}" "${dropout[@]}" --load "$work/load" --lr 1e-3 --min-lr 1e-4 \
        --override-opt_param-scheduler || return 1
    logged smaller 4 "${half[@]}" "${dropout[@]}" --lr 1e-3 --min-lr 1e-4 || return 1
    [ "$(field override lr)" = "$(field smaller lr | tail -n 8)" ] ||
        { why="learning rates are not the command line's"; return 1; }
}
check "--override-opt_param-scheduler: the command line wins" override
use_checkpoint() {
    logged use_checkpoint 4 "${half[@]}" "${dropout[@]}" --load "$work/load" --lr 1e-3 --min-lr 1e-4 \
        --use-checkpoint-opt_param-scheduler && same_training baseline use_checkpoint 8
}
check "--use-checkpoint-opt_param-scheduler: the checkpoint wins, bitwise" use_checkpoint
check "another model is refused" refused 6 "hidden" 4 "${half[@]}" --load "$work/load" --hidden-size 64

# --- nothing to load ---
missing() {
    trains 4 "${half[@]}" --load "$work/nowhere" --exit-on-missing-checkpoint || return 1
    ! grep -q '^ iteration ' "$work/out" || { why="trained anyway"; return 1; }
}
check "--exit-on-missing-checkpoint exits with 0" missing
from_scratch() {
    logged from_scratch 4 "${half[@]}" "${dropout[@]}" --load "$work/nowhere" &&
        grep -q 'WARNING: could not find the metadata file' "$work/out" && same_training baseline from_scratch
}
check "--load without a checkpoint starts from scratch" from_scratch
only_logs() { # the logs of a run that ended before its first checkpoint
    mkdir -p "$work/young/tensorboard" &&
        touch "$work/young/run.log" "$work/young/tensorboard/events.out.tfevents.1"
    trains 2 --load "$work/young" --save "$work/young" --save-interval 100 --log-progress --train-iters 4 \
        --lr-decay-iters 4 || return 1
    grep -q 'starting from scratch' "$work/out" || { why="no line reports it"; return 1; }
}
check "--load of a directory with only logs starts from scratch" only_logs
another_program() { # TEXT FILES...
    rm -rf "$work/foreign" && mkdir -p "$work/foreign/mp_rank_00" &&
        (cd "$work/foreign" && touch "${@:2}") || return 1
    refused 6 "$1" 2 --load "$work/foreign" && ! grep -q '^ iteration ' "$work/out"
}
check "--load of a Hugging Face model is refused" another_program "holds a Hugging Face model (config.json)" \
    config.json model.safetensors
check "--load of a Megatron-LM checkpoint is refused" another_program "holds a Megatron-LM checkpoint" \
    mp_rank_00/model_optim_rng.pt
finished_evaluates() {
    logged finished 4 "${half[@]}" "${dropout[@]}" --load "$work/baseline" || return 1
    [ "$(train_lines finished | wc -l)" -eq 0 ] &&
        grep -q 'validation loss at iteration 16 on validation set' "$work/out" ||
        why="it trained, or did not evaluate"
    [ -z "$why" ]
}
check "a run that loads its last checkpoint does not train" finished_evaluates

# --- lengths in samples ---
samples=("${model[@]}" --micro-batch-size 2 --global-batch-size 24 --train-samples 160 --lr 3e-3 --min-lr
    3e-4 --lr-decay-style cosine --lr-warmup-samples 16
    --log-interval 1 --eval-interval 1000 --eval-iters 1 --split 90,5,5 --rampup-batch-size 8 8 64 \
        --data-path "$data" "${dropout[@]}")
ramped() { # NAME FLAGS...
    local log=$work/$1.jsonl
    shift
    rm -f "$log"
    ranks 2 "${samples[@]}" --log-jsonl "$log" "$@" || say "ended with an error"
}
rampup() {
    ramped ramp || return 1
    # The batch size is 8 for the first 32 samples, 16 up to 64 samples, then 24. 96 samples remain
    # for full batches.
    local sizes
    sizes=$(field ramp global_batch_size | awk '{ printf "%s ", $2 }')
    [ "$sizes" = "8 8 8 8 16 16 24 24 24 24 " ] &&
        [ "$(field ramp consumed_samples | tail -n 1)" = "10 160" ] || { why="batches $sizes"; return 1; }
}
check "--rampup-batch-size" rampup
ramp_resumes() {
    ramped ramp.1 --save "$work/ramp" --save-interval 100 --exit-interval 5 &&
        ramped ramp.2 --load "$work/ramp" --save "$work/ramp" --save-interval 100 &&
        same_training ramp ramp.2 5
}
check "a run resumed during ramp-up, bitwise" ramp_resumes
in_samples() {
    logged iterations 2 || return 1
    rm -f "$work/samples.jsonl"
    ranks 2 "${model[@]}" --micro-batch-size 2 --global-batch-size 8 --train-samples 96 --lr 3e-3 --min-lr \
        3e-4 --lr-decay-style cosine --lr-warmup-samples 16 --log-interval 1 \
        --eval-interval 1000 --eval-iters 1 --split 90,5,5 --hidden-dropout 0 --attention-dropout 0 \
            --data-path "$data" --log-jsonl "$work/samples.jsonl" || { say "failed"; return 1; }
    same_training iterations samples
}
check "--train-samples matches --train-iters" in_samples

# --- killed without warning ---
crash() {
    local run=(--train-iters 20000 --lr-decay-iters 100 --save "$work/crash" --save-interval 10
        "${dropout[@]}" "${paper[@]}" --gpus-per-node 2) pid last
    in_background crash 4 "${run[@]}"
    wait_for_iteration crash 25 || { say "no iteration 25"; return 1; }
    for pid in $(rank_pids); do kill -KILL "$pid"; done
    wait "$job"
    last=$(cat "$work/crash/latest_checkpointed_iteration.txt")
    [ "${last:-0}" -ge 10 ] || { why="the last save is '$last'"; return 1; }
    logged after 4 "${run[@]}" --load "$work/crash" --exit-interval $((last + 15)) || return 1
    [ "$(first_iteration after)" -eq $((last + 1)) ] ||
        { why="resumes at $(first_iteration after) after $last"; return 1; }
    logged whole 4 "${run[@]}" --save "$work/whole" --save-interval 100000 --exit-interval $((last + 15)) &&
        same_training whole after "$last"
}
check "kill -9 in mid-run, resumed bit-exactly from the last save" crash
finish
