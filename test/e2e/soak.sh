#!/usr/bin/env bash
# Runs that last: many steps with ranks killed, stopped and asked to leave, restarted by scripts/run_until_done.sh, against one that nobody disturbed: the same
# losses to the bit, and memory that does not grow. Short by default, 1000 steps under LONG=1.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 9
data=$work/text_text_document
if [ -n "${LONG:-}" ]; then steps=1000 every=50 first=200 last=8000 LIMIT=1500 TRIES=12000; else steps=90 every=30 first=100 last=700 LIMIT=120; fi
run=(--gpus-per-node 2 --lr-decay-iters 2000 --hidden-dropout 0.1 --attention-dropout 0.1 --eval-interval 25 --verify-replicas-interval 10)

# --- the same losses ---
# Steps that take long enough to be hit.
slow=(--hidden-size 128 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 16)
# disturb NAME: at every `every` iterations one rank in turn, by one means in turn; a rank that is stopped is seen after --distributed-timeout-minutes.
disturb() {
    local means=(KILL USR1 KILL STOP) at n=0 pid
    for ((at = every / 2; at < steps; at += every)); do
        wait_for_iteration "$1" "$at" || return 1
        pid=$(rank_pids $((n % 4)))
        [ -z "$pid" ] || kill -s "${means[n % 4]}" "$pid" 2>/dev/null
        n=$((n + 1))
        # The next one only when the run has gone on.
        while [ -n "$pid" ] && [ -e "/proc/$pid" ] && kill -0 "$job" 2>/dev/null; do sleep 0.1; done
    done
    echo $n >"$work/disturbed"
}
every_line_once() { # NAME: its train lines, repeated ones removed: what was computed twice must be the same to the byte
    train_lines "$1" | sort -u -t : -k 3n
}
soak() { # NAME FLAGS...
    local name=$1 rc killer
    shift
    logged "$name" 4 "${run[@]}" "${slow[@]}" --train-iters $steps "$@" || return 1
    rm -rf "${work:?}/hurt.jsonl" "${work:?}/hurt"
    SDP4BIT_TEST_FOLDER=$work timeout -k 5 "$LIMIT" scripts/run_until_done.sh --pause 0 -- "${launcher[@]}" -np 4 "$BUILD/train_gpt_cpu" "${model[@]}" "${batch[@]}" --data-path "$data" \
        "${run[@]}" "${slow[@]}" --train-iters $steps --save "$work/hurt" --load "$work/hurt" --save-interval 7 --distributed-timeout-minutes 0.04 --log-jsonl "$work/hurt.jsonl" "$@" \
        >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    disturb hurt &
    killer=$!
    wait "$job"
    rc=$?
    wait $killer
    [ $rc = 0 ] || { say "the disturbed run ended with $rc after: $(grep -c 'restart' "$work/err") restarts"; return 1; }
    [ "$(grep -c '; restart' "$work/err")" -ge $((steps / every)) ] || { why="only $(grep -c '; restart' "$work/err") restarts of $((steps / every))"; return 1; }
    every_line_once hurt >"$work/right"
    [ "$(wc -l <"$work/right")" = $steps ] || { why="$(wc -l <"$work/right") different lines instead of $steps"; return 1; }
    every_line_once "$name" | cmp -s - "$work/right" || { why="losses differ: $(every_line_once "$name" | diff - "$work/right" | sed -n 2p)"; return 1; }
    echo "# $name: $(grep -c '; restart' "$work/err") restarts, $(train_lines hurt | wc -l) iterations for $steps"
}
check "SDP4Bit: killed, stopped and resumed, $steps steps to the bit" soak sdp4bit "${paper[@]}" --wq-rounding stochastic
[ -z "${LONG:-}" ] || check "baseline: the same" soak baseline

# --- memory ---
resident() { # the ranks' own memory in KiB; not the segment that MPI shares among them, which has a fixed size and is touched little by little
    local pid sum=0
    for pid in $(rank_pids); do sum=$((sum + $(awk '/^Rss(Anon|File)/ { sum += $2 } END { print sum }' "/proc/$pid/status"))); done
    echo $sum
}
flat() { # with evaluations, checkpoints, replica checks, and logs of every step
    local before after
    mkdir -p "$work/flat"
    in_background flat 4 "${run[@]}" "${paper[@]}" --train-iters 1000000 --save "$work/flat" --save-interval 50 --tensorboard-dir "$work/board" --timing-log-level 2
    wait_for_iteration flat $first || { say "no iteration $first"; return 1; }
    before=$(resident)
    wait_for_iteration flat $last || { say "no iteration $last"; return 1; }
    after=$(resident)
    kill -s USR1 "$(rank_pids 0)"
    wait "$job"
    echo "# resident memory of 4 ranks: $before KiB after $first iterations, $after KiB after $last"
    [ "$before" -gt 10000 ] && [ $((after - before)) -le $((before / 100)) ] || { why="resident memory grew from $before to $after KiB"; return 1; }
}
check "memory stays flat from iteration $first to $last" flat
finish
