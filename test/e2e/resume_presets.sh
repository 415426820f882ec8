#!/usr/bin/env bash
# Kills runs of the baselines and of every preset at a random step, with and without --async-save.
# The same command resumes from the last complete checkpoint, and loss lines and final checkpoint
# are byte-identical to an undisturbed run. LONG=1 repeats this 20 times per preset. Also resumes
# with other ranks, nodes, groups, buckets, presets, batch sizes or data and checks that the data
# continue in the same order. SECTION=presets or SECTION=settings runs only one half.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 9
make_shard other 400 10
data=$work/text_text_document
rounds=1
[ "${LONG:-0}" = 1 ] && rounds=20
# Runs save every 7 iterations and at the end. They are long enough to be killed in between.
last=60
run=(--gpus-per-node 2 --train-iters "$last" --save-interval 7 --eval-interval 1000 --hidden-dropout 0.1
    --attention-dropout 0.1 --wq-group-size 128)

# stitched FILE...: prints one line per iteration, the newest one if an iteration was repeated.
stitched() { cat "$@" | awk \
    '/^{"kind":"train"/ { split($0, p, /[:,]/); line[p[4] + 0] = $0; if (p[4] > most) most = p[4] }
     END { for (i = 1; i <= most; i++) print line[i] }'; }
# killed_once NAME: starts the run, kills it at a random iteration and restarts it. It must resume
# from the newest checkpoint; in the first round the kill is late enough for one to exist.
# SDP4BIT_FAULT makes a rank hang shortly before the end, so that the run cannot finish before it is
# killed late.
killed_once() {
    local name=$1 at pid pids saved
    shift
    rm -rf "${work:?}/$name.saved" "$work/$name".first.jsonl "$work/$name".rest.jsonl
    at=$(((round ? 1 : 15) + RANDOM % (last - 25)))
    SDP4BIT_FAULT=stall:3:$((last - 3)):0 in_background "$name.first" 4 "${run[@]}" "$@" --save \
        "$work/$name.saved" --load "$work/$name.saved"
    wait_for_iteration "$name.first" 1 && mapfile -t pids < <(rank_pids) &&
        wait_for_iteration "$name.first" $at || { say "killed before iteration $at"; return 1; }
    for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null; done
    wait "$job" 2>/dev/null
    saved=$(cat "$work/$name.saved/latest_checkpointed_iteration.txt" 2>/dev/null)
    [ "$round" -gt 0 ] || [ "${saved:-0}" -gt 0 ] ||
        { why="killed after iteration $at: nothing was saved"; return 1; }
    # Ignores an incomplete line.
    sed -i -n '/}$/p' "$work/$name.first.jsonl"
    logged "$name.rest" 4 "${run[@]}" "$@" --save "$work/$name.saved" --load "$work/$name.saved" || return 1
    # If the run was killed after the rename of the first checkpoint's directory and before the
    # rename of the tracker, the checkpoint is complete and is found without a tracker.
    [ -n "$saved" ] || saved=$(sed -n \
        "s|^WARNING: $work/$name.saved/latest_checkpointed_iteration.txt is missing although there are checkpoints;.*|7|p" "$work/out")
    [ -z "$saved" ] || grep -q "successfully loaded checkpoint from $work/$name.saved at iteration $saved\$" \
        "$work/out" || { why="iteration $saved was saved, but not loaded"; return 1; }
    [ "$(field "$name.rest" loss | head -n 1 | cut -d ' ' -f 1)" = $((${saved:-0} + 1)) ] ||
        { why="resumes at $(field "$name.rest" loss | head -n 1) after $saved"; return 1; }
    [ "$(field "$name.first" loss | tail -n 1 | cut -d ' ' -f 1)" -lt $last ] ||
        { why="the run ended before it was killed"; return 1; }
    stitched "$work/$name.first.jsonl" "$work/$name.rest.jsonl" >"$work/left"
    train_lines "$name" >"$work/right"
    [ "$(wc -l <"$work/right")" -eq $last ] && cmp -s "$work/left" "$work/right" ||
        { why="killed after iteration $at: $(diff "$work/left" "$work/right" | sed -n 2p)"; return 1; }
    same_shards "$work/$name" "$work/$name.saved" $last 4 ||
        { why="killed after iteration $at: $why"; return 1; }
}
preset() { # NAME FLAGS...
    local name=$1 round
    shift
    logged "$name" 4 "${run[@]}" "$@" --save "$work/$name" --keep-last-checkpoints 1 || return 1
    for ((round = 0; round < rounds; round++)); do
        killed_once "$name" "$@" || return 1
        [ $((round % 2)) = 0 ] || continue
        [ $rounds = 1 ] || killed_once "$name" "$@" --async-save --keep-last-checkpoints 2 || return 1
    done
}
tlq=(--quantized-gradients --gq-group-size-intra 128)
every_preset() {
    check "baseline, fp32 gradients: kill -9, resumed bit-exactly" preset fp32
    check "baseline, bf16 gradients: kill -9, resumed bit-exactly" preset bf16 --grad-reduce-in-bf16
    check "qWD: kill -9, resumed bit-exactly" preset qwd --quantized-weights
    check "qW: kill -9, resumed bit-exactly" preset qw --quantized-weights \
        --weight-quantization-method direct --async-save
    check "TLq: kill -9, resumed bit-exactly" preset tlq "${tlq[@]}"
    check "TLq-HS: kill -9, resumed bit-exactly" preset tlq_hs "${tlq[@]}" --hadamard-transform --async-save
    check "ULq: kill -9, resumed bit-exactly" preset ulq "${tlq[@]}" --hadamard-transform \
        --gradient-quantization-bits-intra 4
    check "SDP4Bit: kill -9, resumed bit-exactly" preset sdp4bit "${tlq[@]}" --hadamard-transform \
        --quantized-weights \
        --wq-rounding stochastic --async-save
    check "EDEN, lossless: kill -9, resumed bit-exactly" preset eden_lossless @configs/eden-lossless.args
    check "EDEN, 2 bits, error feedback: kill -9, resumed bit-exactly" preset eden2_ef @configs/eden2-ef.args \
        --wq-group-size 128 --async-save
    check "local steps: kill -9, resumed bit-exactly" preset local @configs/local.args --wq-group-size 128 \
        --local-steps 5
    check "Muon, SDP4Bit, bf16 momentum: kill -9, resumed bit-exactly" preset muon --optimizer muon \
        --exp-avg-dtype bf16 "${tlq[@]}" --hadamard-transform --quantized-weights --async-save
    check "Muon, local steps, error feedback: kill -9, resumed bit-exactly" preset muon_local \
        @configs/local.args --optimizer muon --error-feedback --wq-group-size 128 --local-steps 5
}
[ "${SECTION:-presets}" != presets ] || every_preset
[ "${SECTION:-}" != presets ] || finish

# --- changed settings: state is found by parameter name, and the data continue ---
half=(--gpus-per-node 2 --train-iters 16 --save-interval 8 --eval-interval 1000)
sdp=("${tlq[@]}" --hadamard-transform --quantized-weights)
whole() { logged whole 4 "${half[@]}" "${sdp[@]}" --save "$work/half"; }
check "16 iterations of SDP4Bit" whole
echo 8 >"$work/half/latest_checkpointed_iteration.txt"
# changed NAME NP PERCENT FLAGS...: resumes at iteration 9 with the same samples as the full run.
# The first loss is the same; later ones are close.
changed() {
    local name=$1 np=$2 percent=$3
    shift 3
    logged "$name" "$np" "${half[@]}" --load "$work/half" --save "$work/$name.saved" "$@" || return 1
    [ "$(field "$name" consumed_samples)" = "$(field whole consumed_samples | tail -n 8)" ] ||
        { why="samples $(field "$name" consumed_samples | tr '\n' ' ')"; return 1; }
    same_loss "$name" whole 9 || return 1
    awk -v a="$(mean_loss "$name" 9 16)" -v b="$(mean_loss whole 9 16)" -v p="$percent" \
        'BEGIN { d = a / b - 1; exit !(a + 0 > 0 && d < p / 100 && d > -p / 100) }' ||
        { why="mean loss $(mean_loss "$name" 9 16), undisturbed $(mean_loss whole 9 16)"; return 1; }
}
check "other groups" changed groups 4 1 "${sdp[@]}" --gq-group-size-intra 512 --gq-group-size-inter 256 \
    --wq-group-size 512 --verify-replicas-interval 1
check "1 rank" changed one 1 1 "${sdp[@]}" --gpus-per-node 1
check "2 ranks, other groups and buckets" changed two 2 1 "${sdp[@]}" --gpus-per-node 1 \
    --gq-group-size-intra 64 --ddp-bucket-size 1000 --verify-replicas-interval 1
eight() { # resumes on eight ranks, and from their checkpoint on four again
    changed eight 4 1 "${sdp[@]}" --gpus-per-node 4 --global-batch-size 8 &&
        changed eight8 8 1 "${sdp[@]}" --gpus-per-node 4 --micro-batch-size 1
}
check "8 ranks" eight
check "SDP4Bit's checkpoint resumes as the baseline" changed to_baseline 4 1
check "SDP4Bit's checkpoint resumes with direct weights and ULq" changed to_ulq 4 1 "${tlq[@]}" \
    --gradient-quantization-bits-intra 4 --quantized-weights --weight-quantization-method direct \
    --verify-replicas-interval 1
# A checkpoint saved with other ranks and groups has the complete state, so the original settings
# resume from it.
back_again() {
    local folder=$work/there
    cp -r "$work/half" "$folder" && rm -r "$folder/iter_0000016" &&
        trains 2 "${half[@]}" "${sdp[@]}" --gpus-per-node 1 --gq-group-size-inter 32 --load "$folder" --save \
        "$folder" --save-interval 4 --exit-interval 12 || return 1
    logged back_again 4 "${half[@]}" "${sdp[@]}" --load "$folder" &&
        [ "$(field back_again consumed_samples | head -n 1)" = "13 104" ] ||
        { why="${why:-resumes with $(field back_again consumed_samples | head -n 1)}"; return 1; }
}
check "resumes on 2 ranks, saves, and resumes on 4 again" back_again
# As in Megatron-LM, the schedule counts samples, so another batch size changes its length in
# iterations. The counters of iterations and samples continue.
larger_batch() { # FLAG
    logged "batch$1" 4 "${half[@]}" "${sdp[@]}" --load "$work/half" --global-batch-size 16 "$1" || return 1
    [ "$(field "batch$1" consumed_samples | tr '\n' ' ')" = \
        "9 80 10 96 11 112 12 128 13 144 14 160 15 176 16 192 " ] ||
        { why="samples $(field "batch$1" consumed_samples | tr '\n' ' ')"; return 1; }
}
check "another batch size with --override-opt_param-scheduler" larger_batch --override-opt_param-scheduler
adopted() { # a step with twice the batch size advances the checkpoint's schedule by two steps
    larger_batch --use-checkpoint-opt_param-scheduler &&
        [ "$(field batch--use-checkpoint-opt_param-scheduler lr | awk 'NR <= 4 { print $2 }')" = \
        "$(field whole lr | awk '$1 > 8 && $1 % 2 == 0 { print $2 }')" ] ||
        { why="${why:-learning rates $(field batch--use-checkpoint-opt_param-scheduler lr | tr '\n' ' ')}"; \
            return 1; }
}
check "another batch size with --use-checkpoint-opt_param-scheduler" adopted
other_data() {
    logged other_data 4 "${half[@]}" "${sdp[@]}" --load "$work/half" --data-path "$work/other_text_document" \
        || return 1
    grep -q 'data_path was .*, so training continues with the data in a different order' "$work/out" &&
        [ "$(field other_data consumed_samples | head -n 1)" = "9 72" ] ||
        { why="no note about data_path, or iteration and samples $(field other_data consumed_samples | head -n 1)"; return 1; }
}
check "other data: reported, and the sample counter continues" other_data
tuned() { # loads only weights; data, schedule, length, batch size and number of ranks differ
    logged tuned 2 "${half[@]}" --gpus-per-node 1 --load "$work/half" --finetune --data-path \
        "$work/other_text_document" --lr 1e-3 --global-batch-size 4 --train-iters 4 || return 1
    [ "$(field tuned consumed_samples | tr '\n' ' ')" = "1 4 2 8 3 12 4 16 " ] &&
        awk -v a="$(mean_loss tuned 1 1)" -v b="$(mean_loss whole 1 1)" 'BEGIN { exit !(a < 0.95 * b) }' ||
        { why="${why:-starts with loss $(mean_loss tuned 1 1)}"; return 1; }
}
check "--finetune with everything else changed" tuned
finish
