#!/usr/bin/env bash
# Non-finite losses and gradients: exit code 4 and one error line, or with --on-nan skip a skipped
# step that leaves the weights unchanged. An absurd learning rate causes them: the first step is
# finite and is applied, and the matrix products of the second step overflow.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 6
data=$work/text_text_document
wild=(--lr 1e37 --min-lr 0 --lr-decay-style linear --lr-warmup-iters 0 --gpus-per-node 2)
# The shards of a checkpoint without the iteration number in their headers.
shards() { cat "$1/$(printf 'iter_%07d' "$2")"/mp_rank_00/*.safetensors | sed 's/"iteration":"[0-9]*"//'; }

aborts() { # NAME FLAGS...
    local name=$1
    shift
    train 4 "${wild[@]}" --save "$work/$name" --save-interval 1 --log-jsonl "$work/$name.jsonl" "$@"
    error_names 4 "iteration 2 update: the loss" $? || return 1
    grep -q 'not finite.*lower --lr' "$work/err" || { say "no advice to lower --lr"; return 1; }
    [ "$(cat "$work/$name/latest_checkpointed_iteration.txt")" = 1 ] && [ ! -e "$work/$name/iter_0000002" ] ||
        { why="the bad step was saved"; return 1; }
}
check "baseline: exit code 4" aborts baseline
check "SDP4Bit: exit code 4" aborts sdp4bit "${paper[@]}"
check "qW: exit code 4" aborts qw --quantized-weights --weight-quantization-method direct
check "without clipping: exit code 4" aborts noclip --clip-grad 0
# If stdout and stderr go to one file, the error line must start on a new line, after the log lines
# that were printed before it. This must hold on a busy machine too.
one_file() {
    local round i jobs=()
    for round in 1 2 3; do
        for i in 1 2 3 4 5; do
            timeout -k 5 "$LIMIT" "${launcher[@]}" -np 2 "$trainer" ${device[@]+"${device[@]}"} \
                "${model[@]}" "${batch[@]}" --data-path "$data" "${wild[@]}" --gpus-per-node 1 \
                >"$work/both$i" 2>&1 </dev/null &
            jobs[i]=$!
        done
        for i in 1 2 3 4 5; do
            wait "${jobs[i]}"
            awk '/^ iteration +1\// { logged = 1 } /error: / { found += logged && /^error: / ? 1 : 2 } END { exit found != 1 }' "$work/both$i" || {
                why="round $round: $(grep -m 1 'error: ' "$work/both$i" || echo no error line)"
                return 1
            }
        done
    done
}
check "both streams in one file: the error starts a new line" one_file
late() { # the step status is read one step late if nothing is logged or saved in between
    train 4 "${wild[@]}" --log-interval 1000 --save "$work/late" --save-interval 1000
    error_names 4 "iteration 2 update: the loss" $? && [ ! -e "$work/late/latest_checkpointed_iteration.txt" ] ||
        return 1
}
check "without log lines in between: exit code 4" late
# Only one rank sees the non-finite value: the fault corrupts an exponent in its gradient shard
# after the last reduction. All ranks must use that rank's step status; otherwise its weights would
# become non-finite or the replicas would diverge.
one_rank() { # RANK FLAGS...
    local rank=$1 name=one$1$#
    shift
    local fault=message:$rank:3:1:-2 \
        run=(4 --gpus-per-node 2 --gradient-alltoall-pipeline 1 --save "$work/$name" --save-interval 1 \
        --eval-iters 0 --train-iters 5 "$@")
    SDP4BIT_FAULT=$fault train "${run[@]}"
    error_names 4 "iteration 3 update: the loss" $? || return 1
    [ "$(cat "$work/$name/latest_checkpointed_iteration.txt")" = 2 ] && [ ! -e "$work/$name/iter_0000003" ] ||
        { why="the bad step was saved"; return 1; }
    rm -r "${work:?}/$name"
    SDP4BIT_FAULT=$fault logged "$name" "${run[@]}" --on-nan skip --verify-replicas-interval 1 || return 1
    [ "$(field "$name" skipped | tr '\n' ' ')" = "1 false 2 false 3 true 4 false 5 false " ] ||
        { why="skipped: $(field "$name" skipped | tr '\n' ' ')"; return 1; }
    shards "$work/$name" 2 | cmp -s - <(shards "$work/$name" 3) ||
        { why="the skipped step changed weights or moments"; return 1; }
    ! grep -q '^{"kind":"repair"' "$work/$name.jsonl" || { why="replicas differ"; return 1; }
}
check "only rank 1, baseline: all ranks end, or skip" one_rank 1
check "only rank 3, SDP4Bit: all ranks end, or skip" one_rank 3 "${paper[@]}"
last_good() { # earlier checkpoints still load
    trains 4 --gpus-per-node 2 "${paper[@]}" --load "$work/sdp4bit" --finetune --lr 0 --min-lr 0 \
        --lr-warmup-iters 0 --on-nan skip --train-iters 1 --eval-iters 0
}
check "the last good checkpoint loads" last_good

skips() { # NAME FLAGS...
    local name=$1
    shift
    logged "$name" 4 "${wild[@]}" --on-nan skip --train-iters 7 --log-interval 3 --save "$work/$name" \
        --save-interval 3 --eval-iters 0 "$@" || return 1
    grep -q 'iteration        3/ .* number of skipped iterations:   2 | number of nan iterations:   2 |' \
        "$work/out" && \
        grep -q 'iteration        6/ .* number of skipped iterations:   3 | number of nan iterations:   3 |' \
        "$work/out" || { why="not 2, then 3 skipped iterations"; return 1; }
    grep -q 'iteration        6/ .* lm loss: nan |' "$work/out" &&
        grep -q '^{"kind":"interval","iteration":6,.*"loss":null,"loss_text":"nan"' "$work/$name.jsonl" || {
        why="a line of skipped steps alone does not show nan"
        return 1
    }
    [ "$(grep -c '"skipped":true' "$work/$name.jsonl")" -eq 6 ] &&
        [ "$(grep -c '"skipped":false' "$work/$name.jsonl")" -eq 1 ] ||
        { why="the JSON lines lack the skipped step"; return 1; }
    shards "$work/$name" 3 | cmp -s - <(shards "$work/$name" 6) ||
        { why="skipped steps changed weights or moments"; return 1; }
    [ "$(field "$name" lr | tail -n 6 | cut -d ' ' -f 2 | sort -u | wc -l)" -eq 1 ] ||
        { why="skipped steps advanced the schedule"; return 1; }
}
check "--on-nan skip, baseline" skips skip
check "--on-nan skip, SDP4Bit" skips skip4 "${paper[@]}" --verify-replicas-interval 1
check "--on-nan skip, weights rounded to nearest" skips skip_nearest "${paper[@]}" --wq-rounding nearest \
    --verify-replicas-interval 1
check "--on-nan skip, several buckets" skips skip_buckets "${paper[@]}" --wq-group-size 128 \
    --ddp-bucket-size 1000
counted() { # the checkpoint has the counters of skipped steps
    logged more 4 "${wild[@]}" --on-nan skip --train-iters 9 --lr-decay-iters 7 --log-interval 1 \
        --eval-iters 0 --load "$work/skip" --override-opt_param-scheduler || return 1
    [ "$(train_lines more | wc -l)" -eq 2 ] && [ "$(grep -c '"skipped":true' "$work/more.jsonl")" -eq 2 ] ||
        { why="$(train_lines more | wc -l) iterations instead of 2"; return 1; }
    grep -q '"skipped_iterations": *6' "$work"/skip/iter_0000007/manifest.json ||
        why="the manifest does not count 6 skipped iterations"
    [ -z "$why" ]
}
check "resumed after skipped steps" counted
# An update that would produce non-finite weights ends the run with any flags. Its step status is
# checked after the update, and nothing is saved in between.
refused() { # RANKS NAME ITERATION FLAGS...: the last checkpoint precedes the failed ITERATION
    local ranks=$1 name=$2 iteration=$3 saved
    shift 3
    LIMIT=30 train "$ranks" --gpus-per-node $(((ranks + 1) / 2)) --save "$work/$name" --save-interval 1 \
        --eval-iters 0 "$@"
    error_names 4 "the update on rank" $? || return 1
    grep -q 'not finite or exceed 8.5e37.*lower --lr' "$work/err" ||
       { say "no advice to lower --lr"; return 1; }
    [ "$(grep -c 'error: ' "$work/err")" -eq 1 ] || { say "expected one error line"; return 1; }
    saved=$(cat "$work/$name/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
    [ "$saved" = $((iteration - 1)) ] ||
        { why="iteration $saved was saved last, not $((iteration - 1))"; return 1; }
}
high=(--lr 3.4e38 --min-lr 0 --lr-decay-style constant --lr-warmup-iters 0)
check "an update beyond the fp32 range, baseline" refused 4 high 1 "${high[@]}"
check "an update beyond the fp32 range, SDP4Bit" refused 4 high4 1 "${high[@]}" "${paper[@]}"
check "an update beyond the fp32 range, one rank" refused 1 high1 1 "${high[@]}"
check "an update beyond the fp32 range, --on-nan skip" refused 4 high_skip 1 "${high[@]}" --on-nan skip
unchecked() {
    refused 4 unchecked 2 "${wild[@]}" --no-check-for-nan-in-loss-and-grad || return 1
    grep -q 'lm loss: nan' "$work/out" || { why="the loss is not shown as nan"; return 1; }
}
check "--no-check-for-nan-in-loss-and-grad logs nan, and the update rejects it" unchecked
late_refusal() { # without saves the failed step is reported later, at the latest at the end of the run
    LIMIT=30 train 4 --gpus-per-node 2 "${high[@]}" "${paper[@]}" --eval-iters 0 --log-interval 1000
    error_names 4 "iteration 1 update: the update on rank" $? || return 1
    LIMIT=30 train 4 --gpus-per-node 2 "${high[@]}" "${paper[@]}" --eval-iters 0 --train-iters 1
    error_names 4 "the update on rank" $?
}
check "without saves in between: exit code 4" late_refusal
finish
