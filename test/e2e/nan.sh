#!/usr/bin/env bash
# Losses and gradients that are not finite: exit code 4 and one line, or with --on-nan skip a skipped step that leaves no trace in the weights.
. "$(dirname "$0")/../lib.sh"
make_shard text 400 6
data=$work/text_text_document
wild=(--init-method-std 1e30 --gpus-per-node 2) # products of such weights overflow in the first forward pass
shards() { cat "$1/$(printf 'iter_%07d' "$2")"/mp_rank_00/*.safetensors; }

aborts() { # NAME FLAGS...
    local name=$1
    shift
    LIMIT=30 train 4 "${wild[@]}" --save "$work/$name" --save-interval 1 --log-jsonl "$work/$name.jsonl" "$@"
    error_names 4 "not finite" $? || return 1
    [ ! -e "$work/$name/latest_checkpointed_iteration.txt" ] || { why="a checkpoint was saved"; return 1; }
}
check "baseline: exit code 4" aborts baseline
check "SDP4Bit: exit code 4" aborts sdp4bit "${paper[@]}"
check "without clipping: exit code 4" aborts noclip --clip-grad 0
check "verdict read late, nothing logged in between: exit code 4" aborts late --log-interval 1000 --save-interval 1000

# Weights that blow up after a while: the last good checkpoint stays the last one, and can be loaded.
diverges() {
    local last
    LIMIT=30 train 4 --gpus-per-node 2 "${paper[@]}" --lr 1e37 --lr-decay-style constant --lr-warmup-iters 1 --clip-grad 0 --save "$work/diverge" --save-interval 1 --log-jsonl "$work/diverge.jsonl"
    error_names 4 "iteration" $? || return 1
    last=$(cat "$work/diverge/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
    [ "$(field diverge loss | awk '$2 != "null"' | wc -l)" -ge "$last" ] || { why="iteration $last was saved after it had diverged"; return 1; }
}
check "a huge --lr: exit code 4, nothing poisoned is saved" diverges

skips() { # NAME FLAGS...
    local name=$1
    shift
    logged "$name" 4 "${wild[@]}" --on-nan skip --train-iters 6 --log-interval 3 --save "$work/$name" --save-interval 3 --eval-iters 0 "$@" || return 1
    [ "$(grep -c 'number of skipped iterations:   3 | number of nan iterations:   3 ' "$work/out")" -eq 2 ] || { why="not 3 skipped and nan iterations in each interval of 3"; return 1; }
    [ "$(grep -c '"skipped":true' "$work/$name.jsonl")" -eq 6 ] || { why="the JSON lines do not say skipped"; return 1; }
    shards "$work/$name" 3 | cmp -s - <(shards "$work/$name" 6) || { why="skipped steps changed the weights"; return 1; }
    # Skipped steps do not advance the schedule.
    [ "$(field "$name" lr | cut -d ' ' -f 2 | sort -u | wc -l)" -eq 1 ] || { why="the learning rate moved"; return 1; }
}
check "--on-nan skip, baseline" skips skip
check "--on-nan skip, SDP4Bit" skips skip4 "${paper[@]}" --verify-replicas-interval 1
check "--on-nan skip, one bucket after the other" skips skip_buckets "${paper[@]}" --wq-group-size 128 --ddp-bucket-size 1000
counted() { # the counters go on in the next run
    logged more 4 "${wild[@]}" --on-nan skip --train-iters 8 --log-interval 1 --eval-iters 0 --load "$work/skip" --override-opt_param-scheduler || return 1
    [ "$(train_lines more | wc -l)" -eq 2 ] || { why="$(train_lines more | wc -l) iterations instead of 2"; return 1; }
}
check "resumed after skipped steps" counted
unchecked() {
    trains 4 "${wild[@]}" --no-check-for-nan-in-loss-and-grad --train-iters 3 --eval-iters 0 || return 1
    [ "$(grep -c 'lm loss: nan' "$work/out")" -eq 3 ] || { why="the loss is not shown as nan"; return 1; }
}
check "--no-check-for-nan-in-loss-and-grad goes on, and shows nan" unchecked
finish
