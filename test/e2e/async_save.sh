#!/usr/bin/env bash
# --async-save: training continues while a checkpoint is written, with bitwise identical results.
# The next save, a signal and the end of the run wait for the pending save. Failures end the run
# with the same errors as in a foreground save; a hung rank is detected within
# --distributed-timeout-minutes. Also tests --keep-last-checkpoints and --keep-checkpoint-interval.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 6
data=$work/text_text_document
run=(--gpus-per-node 2 --train-iters 12 --save-interval 4 "${paper[@]}")
there() { # DIR ITERATIONS...: checks that exactly these checkpoints exist
    local wanted
    wanted=$(printf 'iter_%07d\n' "${@:2}")
    [ "$(find "$1" -mindepth 1 -maxdepth 1 ! -name '*.txt' -printf '%f\n' | sort)" = "$wanted" ] &&
        [ "$(cat "$1/latest_checkpointed_iteration.txt")" = "${*: -1}" ] ||
        { why="left $(ls -A "$1" | tr '\n' ' ')"; return 1; }
}
# log_order TEXT...: checks that lines with these texts appear in this order.
log_order() {
    local at=0 text line
    for text in "$@"; do
        line=$(tail -n +$((at + 1)) "$work/out" | grep -nF -- "$text" | head -n 1 | cut -d : -f 1)
        [ -n "$line" ] || { why="'$text' is missing or out of order"; return 1; }
        at=$((at + line))
    done
}

reference() { logged reference 4 "${run[@]}" --save "$work/reference" && there "$work/reference" 4 8 12; }
check "foreground saves" reference
background() {
    logged background 4 "${run[@]}" --save "$work/background" --async-save &&
        same_training reference background && there "$work/background" 4 8 12 || return 1
    local i
    for i in 4 8 12; do same_shards "$work/reference" "$work/background" $i 4 || return 1; done
    [ "$(grep -c 'scheduled an async checkpoint save at iteration' "$work/out")" -eq 3 ] &&
        [ "$(grep -c 'successfully saved checkpoint at iteration' "$work/out")" -eq 3 ] ||
        { why="not three lines of each kind"; return 1; }
}
check "background saves: bitwise identical log and checkpoints" background
if [ -e "$shim" ]; then
    continues_during_save() { # the next save and the end of the run wait for the previous save
        slow_disk 150 0 logged slow 4 "${run[@]}" --save "$work/slow" --async-save || return 1
        same_training reference slow && same_shards "$work/reference" "$work/slow" 12 4 &&
            there "$work/slow" 4 8 12 &&
            log_order 'scheduled an async checkpoint save at iteration       4' ' iteration        8/' \
                'successfully saved checkpoint at iteration       4' \
                'saving checkpoint at iteration       8' ' iteration       12/' \
                    'successfully saved checkpoint at iteration       8' \
                    'successfully saved checkpoint at iteration      12'
    }
    check "training continues during a slow save, and the next save waits for it" continues_during_save
    stopped() {
        mkdir "$work/stopped"
        slow_disk 200 1 in_background stopped 4 "${run[@]}" --train-iters 20000 --lr-decay-iters 100 --save \
            "$work/stopped" --save-interval 20 --async-save
        wait_for_iteration stopped 22 || { say "no iteration 22"; return 1; }
        signal_rank TERM 2 || return 1
        job_ended stopped
        local rc=$? last
        [ $rc -eq 75 ] || { say "exit code $rc"; return 1; }
        last=$(cat "$work/stopped/latest_checkpointed_iteration.txt")
        [ "$last" = "$(field stopped loss | tail -n 1 | cut -d ' ' -f 1)" ] && [ "$last" -gt 20 ] &&
            [ -e "$work/stopped/iter_0000020" ] || { why="saved $last"; return 1; }
        ! compgen -G "$work/stopped/.iter_*" >/dev/null ||
            { why="left $(echo "$work/stopped"/.iter_*)"; return 1; }
    }
    check "SIGTERM during a slow save: finishes it, then saves again" stopped
    # The first step corrupts the weights; the second detects it while the first step's save is
    # still running.
    diverges() {
        slow_disk 200 0 train 4 "${run[@]}" --save "$work/diverges" --async-save --save-interval 1 --lr 1e37 \
            --min-lr 1e37 --lr-warmup-iters 0 --lr-decay-style constant
        error_names 4 "not finite" $? && there "$work/diverges" 1 &&
            log_order 'scheduled an async checkpoint save at iteration       1' \
            'successfully saved checkpoint at iteration       1'
    }
    check "a training error leaves no partial checkpoint" diverges
    # The time limit applies to ranks waiting for others, both in a foreground save and when the
    # next save waits for a background one.
    hangs() { # NAME FLAGS...
        slow_disk 30000 3 train 4 "${run[@]}" --save "$work/$1" --distributed-timeout-minutes 0.05 "${@:2}"
        local rc=$?  # on a busy machine a second rank may also print its error
        local busy='^error: rank 0 .* save checkpoint: .*rank 3 is still busy' own='^error: rank 3 .* save checkpoint: no progress'
        [ $rc -eq 7 ] && grep -q -e "$busy" -e "$own" "$work/err" || { say "exit code $rc"; return 1; }
        [ ! -e "$work/$1/latest_checkpointed_iteration.txt" ] || { why="a checkpoint was saved"; return 1; }
    }
    check "rank hangs in a foreground save: exit code 7 within the limit" hangs hangs
    check "rank hangs in a background save: exit code 7 within the limit" hangs hangs_async --async-save
else
    skip "slow disk" "$shim is not built"
fi
failing() { # limits the file size of a rank in mid-run, so that its background write fails
    local pid
    in_background failing 4 "${run[@]}" --train-iters 20000 --lr-decay-iters 100 --log-interval 1000 --save \
        "$work/failing" --save-interval 100 --async-save
    wait_for_iteration failing 5 || { say "no iteration 5"; return 1; }
    for pid in $(rank_pids 2); do prlimit --pid "$pid" --fsize=20000 ||
        { why="prlimit failed"; return 1; }; done
    wait "$job"
    error_names 6 "$work/failing" $? && grep -q 'scheduled an async' "$work/out" || return 1
    [ ! -e "$work/failing/latest_checkpointed_iteration.txt" ] && [ -z "$(ls -A "$work/failing")" ] ||
        { why="left $(ls -A "$work/failing")"; return 1; }
}
if command -v prlimit >/dev/null; then
    check "background write fails: exit code 6, one error line, no partial checkpoint" failing
else
    skip "background write fails" "no prlimit"
fi
planned() {
    ranks 1 "${model[@]}" "${batch[@]}" --data-path "$data" --plan --plan-world-size 4 "${run[@]}" --save \
        "$work/x" --async-save || { say "--plan failed"; return 1; }
    local bytes parameters
    bytes=$(awk '/copy of a checkpoint/ { print $NF }' "$work/out")
    parameters=$(awk '$1 == "parameters" { print $2 }' "$work/out")
    # One rank copies a quarter of the master weights, moments and model weights (14 bytes per
    # parameter). The bounds allow for the uneven split into groups.
    awk -v b="$bytes" -v p="$parameters" 'BEGIN { r = b / (p * 14 / 4); exit !(r > 0.5 && r < 1.5) }' ||
        { why="$bytes bytes for $parameters parameters"; return 1; }
}
check "--plan shows the host copy" planned

# --- old checkpoints ---
keeps() { # NAME ITERATIONS -- FLAGS...
    local name=$1 wanted=()
    shift
    while [ "$1" != -- ]; do wanted+=("$1"); shift; done
    trains 2 --train-iters 12 --save "$work/$name" --save-interval 2 "${@:2}" &&
        there "$work/$name" "${wanted[@]}"
}
check "--keep-last-checkpoints 1" keeps one 12 -- --keep-last-checkpoints 1
check "--keep-last-checkpoints 3, in the background" keeps three 8 10 12 -- --keep-last-checkpoints 3 \
    --async-save
check "--keep-last-checkpoints 2 --keep-checkpoint-interval 6" keeps major 6 10 12 -- \
    --keep-last-checkpoints 2 --keep-checkpoint-interval 6
others() { # foreign files and later iterations are kept
    mkdir -p "$work/others/iter_0000003" "$work/others/iter_0000099" "$work/others/iter_5" \
        "$work/others/iter_0000001.bak" "$work/others/.iter_0000002.del/mp_rank_00"
    touch "$work/others/iter_0000003/model_optim_rng.pt" "$work/others/iter_0000099/manifest.json" \
        "$work/others/iter_5/manifest.json"
    trains 2 --train-iters 4 --save "$work/others" --save-interval 2 --keep-last-checkpoints 1 || return 1
    local tracker=latest_checkpointed_iteration.txt
    [ "$(ls -A "$work/others" | tr '\n' ' ')" = \
        "checkpoints_of_run.txt iter_0000001.bak iter_0000003 iter_0000004 iter_0000099 iter_5 $tracker " ] ||
        { why="left $(ls -A "$work/others" | tr '\n' ' ')"; return 1; }
}
check "deletes only its own older checkpoints, and leftovers of a killed deletion" others
check "--keep-checkpoint-interval alone is refused" refused 2 "--keep-last-checkpoints" 2 --save \
    "$work/refused" --save-interval 2 --keep-checkpoint-interval 4
finish
