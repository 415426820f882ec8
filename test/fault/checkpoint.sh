#!/usr/bin/env bash
# Damaged checkpoints on 4 ranks: exit code 6 and one line with the name of the file. After a killed
# save, the last complete checkpoint loads. Also tests directories that are shared with another job,
# moved or removed.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 1
data=$work/text_text_document
run=(4 --gpus-per-node 2 --train-iters 12 "${paper[@]}")
saves() { trains "${run[@]}" --save "$work/good" --save-interval 4; }
check "checkpoints to damage" saves
latest=iter_0000012
bad=$work/bad

# damaged NAME TEXT COMMAND...: COMMAND damages the copy in $bad. Loading it must fail with exit
# code 6 and an error line that contains TEXT.
damaged() {
    rm -rf "$bad"
    mkdir "$bad"
    cp -r "$work/good/$latest" "$bad/"
    cp "$work/good/latest_checkpointed_iteration.txt" "$bad/"
    "${@:3}"
    check "$1" refused 6 "$2" "${run[@]}" --load "$bad"
}
# flip FILE OFFSET: flips one bit of the byte at OFFSET (negative: from the end).
flip() {
    local offset=$2 byte
    [ "$offset" -ge 0 ] || offset=$(($(wc -c <"$1") + offset))
    byte=$(od -An -t u1 -j "$offset" -N 1 "$1" | tr -d ' ')
    # shellcheck disable=SC2059 # the format is the escape
    printf "\\$(printf %03o $((byte ^ 4)))" | dd of="$1" bs=1 seek="$offset" conv=notrunc status=none
}
shard=mp_rank_00/shard_00002_of_00004.safetensors
tracker=$bad/latest_checkpointed_iteration.txt
middle=$(($(wc -c <"$work/good/$latest/$shard") / 2))
damaged "a flipped bit in a shard's tensors" shard_00002_of_00004 flip "$bad/$latest/$shard" "$middle"
damaged "a flipped bit in a shard's last byte" shard_00002_of_00004 flip "$bad/$latest/$shard" -1
damaged "a flipped bit in a shard's header" shard_00002_of_00004 flip "$bad/$latest/$shard" 60
damaged "a flipped bit in a shard's header length" shard_00002_of_00004 flip "$bad/$latest/$shard" 3
damaged "a truncated shard" shard_00002_of_00004 truncate -s "$middle" "$bad/$latest/$shard"
damaged "a shard with extra bytes at the end" shard_00002_of_00004 truncate -s +1 "$bad/$latest/$shard"
damaged "an empty shard" shard_00002_of_00004 truncate -s 0 "$bad/$latest/$shard"
damaged "a missing shard" shard_00002_of_00004 rm "$bad/$latest/$shard"
damaged "a shard of an older checkpoint" shard_00002_of_00004 cp "$work/good/iter_0000004/$shard" \
    "$bad/$latest/$shard"
damaged "a missing manifest" manifest.json rm "$bad/$latest/manifest.json"
damaged "an empty manifest" manifest.json truncate -s 0 "$bad/$latest/manifest.json"
damaged "a truncated manifest" manifest.json truncate -s -20 "$bad/$latest/manifest.json"
damaged "the manifest of an older checkpoint" "$bad" cp "$work/good/iter_0000004/manifest.json" \
    "$bad/$latest/manifest.json"
# Single bits throughout the manifest, in numbers, names and structure.
size=$(wc -c <"$work/good/$latest/manifest.json")
places=3
[ "${LONG:-0}" = 1 ] && places=40
for ((i = 0; i < places; i++)); do
    at=$((size * (2 * i + 1) / (2 * places)))
    damaged "a flipped bit in the manifest, byte $at" "manifest.json" flip "$bad/$latest/manifest.json" $at
done
put() { printf '%s' "$2" >"$1"; }
pipe() { rm "$1" && mkfifo "$1"; }
# The tracker has no valid iteration, and there is no checkpoint to fall back to.
# test/e2e/lineage.sh tests the fallback.
nothing_to_find() { rm "$bad/$latest/manifest.json" && put "$tracker" "$1"; }
damaged "a tracker without a number" latest_checkpointed_iteration.txt nothing_to_find "twelve"
damaged "an empty tracker" latest_checkpointed_iteration.txt nothing_to_find ""
damaged "a negative tracker" latest_checkpointed_iteration.txt nothing_to_find "-4"
damaged "a pipe as the manifest" manifest.json pipe "$bad/$latest/manifest.json"
damaged "a pipe as a shard" shard_00002_of_00004 pipe "$bad/$latest/$shard"

# --- fallback to the newest intact checkpoint before the damaged one ------------------------------
# falls_back NAME ITERATION TEXT COMMAND...: after COMMAND has damaged checkpoints, a run loads
# ITERATION, prints a warning that contains TEXT, and ends like the undisturbed run.
falls_back() {
    check "$1" falls_back_to "${@:2}"
}
falls_back_to() {
    local iteration=$1 text=$2
    rm -rf "$bad"
    cp -r "$work/good" "$bad"
    "${@:3}"
    rm -f "$work/back.jsonl"
    trains "${run[@]}" --load "$bad" --save "$bad" --save-interval 4 --log-jsonl "$work/back.jsonl" ||
        return 1
    [ "$(grep -c '^WARNING: .*; resuming from ' "$work/out")" -eq 1 ] &&
        grep '^WARNING: .*; resuming from ' "$work/out" | grep -qF -- "$text" ||
        { why="not one warning with '$text'"; return 1; }
    grep -q "successfully loaded checkpoint from $bad at iteration $iteration" "$work/out" ||
        { why="not loaded at $iteration"; return 1; }
    [ "$iteration" = 12 ] || [ "$(train_lines back | wc -l)" -eq $((12 - iteration)) ] ||
        { why="trained $(train_lines back | wc -l) iterations"; return 1; }
    [ "$(cat "$bad/latest_checkpointed_iteration.txt")" = 12 ] &&
        cmp -s "$work/good/$latest/$shard" "$bad/$latest/$shard" ||
        { why="the end of the run differs"; return 1; }
}
two_damaged() {
    flip "$bad/$latest/$shard" "$middle"
    truncate -s -20 "$bad/iter_0000008/manifest.json"
}
falls_back "loads the previous checkpoint: a flipped bit in a shard" 8 \
    "shard_00002_of_00004.safetensors is damaged" flip "$bad/$latest/$shard" "$middle"
falls_back "loads the previous checkpoint: no manifest" 8 "$latest/manifest.json" rm "$bad/$latest/manifest.json"
falls_back "loads the second previous checkpoint: two are damaged" 4 "shard_00002_of_00004.safetensors is damaged" \
    two_damaged
# A tracker that names a missing checkpoint counts as damaged, for any iteration number.
for named in "52 52" "99 99" "3 3" "0 0" "release 0"; do
    falls_back "loads the newest checkpoint: the tracker says ${named% *}" 12 \
        "names iteration ${named#* }, which has no checkpoint (existing iterations: 4, 8 and 12); resuming from the newest" put \
        "$bad/latest_checkpointed_iteration.txt" "${named% *}"
done
falls_back "loads the newest checkpoint: a truncated tracker" 12 "names iteration 1, which has no checkpoint" truncate -s 1 \
    "$bad/latest_checkpointed_iteration.txt"
falls_back "loads the previous checkpoint: a missing directory" 8 "names iteration 12, which has no checkpoint" rm -r "$bad/$latest"
all_damaged() {
    local i
    rm -rf "$bad"
    cp -r "$work/good" "$bad"
    for i in 4 8 12; do truncate -s 100 "$bad/$(printf 'iter_%07d' $i)/$shard"; done
    refused 6 "$latest/$shard" "${run[@]}" --load "$bad"
}
check "all damaged: reports the error of the newest" all_damaged

# --- one rank reads files for longer than --distributed-timeout-minutes ---------------------------
slow_reads() { # RANK FOLDER COMMAND...: each read() of RANK in FOLDER takes 2 s longer
    local shim=$BUILD/test/fault/shim.so launcher=("${launcher[@]}")
    launcher+=(-x LD_PRELOAD="$shim" -x SHIM_FOLDER="$2/" -x SHIM_RANK="$1" -x SHIM_AT=0 -x
        SHIM_SLOW_READ_MS=2000)
    "${@:3}" --distributed-timeout-minutes 0.06
}
check "a slow disk does not abort a load" slow_reads 2 "$work/good" trains "${run[@]}" --load "$work/good"
damaged_elsewhere() { # an error on one rank stops a slow rank that is still hashing
    rm -rf "$bad"
    cp -r "$work/good" "$bad"
    find "$bad" -name 'shard_00001_of_00004*' -exec truncate -s -1 {} +
    slow_reads 2 "$bad" refused 6 "$latest/mp_rank_00/shard_00001_of_00004.safetensors is damaged" \
        "${run[@]}" --load "$bad"
}
check "a damaged file is named while a slow disk is read" damaged_elsewhere

# --- killed saves: the directory still loads, and the next save removes leftovers -----------------
killed_saving() {
    local pid last rounds=3 round
    [ "${LONG:-0}" = 1 ] && rounds=15
    local long=(4 --gpus-per-node 2 --train-iters 100000 --lr-decay-iters 100 "${paper[@]}" --save
        "$work/torn" --load "$work/torn" --save-interval 1 --log-interval 1000)
    for ((round = 1; round <= rounds; round++)); do
        in_background torn "${long[@]}"
        wait_for_iteration torn $((${last:-0} + 2 + round)) ||
            { say "round $round: no further iteration"; return 1; }
        for pid in $(rank_pids); do kill -KILL "$pid"; done
        wait "$job"
        last=$(cat "$work/torn/latest_checkpointed_iteration.txt")
        logged loads "${long[@]}" --save "$work/unused" --save-interval 100000 --exit-interval $((last + 1)) \
            || return 1
        [ "$(train_lines loads | wc -l)" -eq 1 ] ||
            { why="round $round: did not resume after iteration $last"; return 1; }
        # Remove older checkpoints; --save-interval 1 writes many.
        find "$work/torn" -maxdepth 1 -name 'iter_*' ! -name "$(printf 'iter_%07d' "$last")" -exec rm -rf {} +
    done
    trains "${long[@]}" --exit-interval $((last + 1)) || return 1
    ! compgen -G "$work/torn/.iter_*" >/dev/null || { why="left $(echo "$work/torn"/.iter_*)"; return 1; }
}
check "saves killed with kill -9" killed_saving
# --- two jobs in one directory would remove each other's unfinished saves, so the second is refused
two_jobs() {
    local shared=(--gpus-per-node 1 --train-iters 100000 --lr-decay-iters 100 --save "$work/shared"
        --save-interval 3)
    in_background first 2 "${shared[@]}"
    wait_for_iteration first 4 || { say "no iteration 4"; return 1; }
    refused 6 "another job is saving into $work/shared" 2 "${shared[@]}" --distributed-timeout-minutes 0.05 \
        || { kill "$job"; return 1; }
    kill -s USR1 "$(running_pids 1)"
    wait "$job"
    [ $? = 75 ] && trains 2 "${shared[@]}" --load "$work/shared" --exit-interval \
        $(($(cat "$work/shared/latest_checkpointed_iteration.txt") + 1))
}
check "a second job in the same folder" two_jobs
# --- the directory is moved or removed during a run, and another job may use its path -------------
moving=(2 --gpus-per-node 1 --num-layers 1 --train-iters 100000 --lr-decay-iters 100 --log-interval 10000
    --save-interval 1500 --save "$work/moving")
begin_moving() { # FLAGS...: starts a run and waits for the first of its two saves
    rm -rf "$work"/moving "$work"/moved "$work"/next
    in_background moving "${moving[@]}" "$@"
    wait_until grep -q 'successfully saved checkpoint' "$work/out" || say "no checkpoint"
}
end_moving() { # CODE: waits for the run; sends SIGUSR1 first if CODE is 75
    local pid rc
    [ "$1" != 75 ] || for pid in $(running_pids); do kill -s USR1 "$pid"; done
    wait "$job"
    rc=$?
    [ $rc = "$1" ] || say "exit code $rc instead of $1"
}
moved_away() { # FLAGS...: a directory that another job has locked replaces the --save directory
    begin_moving "$@" || return 1
    mkdir "$work/next"
    exec 9>"$work/next/.lock"
    flock -x 9
    python3 -c 'import os, sys; os.rename(sys.argv[1], sys.argv[2]); os.rename(sys.argv[3], sys.argv[1])' \
        "$work/moving" "$work/moved" "$work/next"
    end_moving 6 || { exec 9>&-; return 1; }
    exec 9>&-
    error_names 6 "another job is saving into $work/moving" 6 || return 1
    [ "$(ls -A "$work/moving")" = .lock ] ||
        { why="the folder holds $(ls -A "$work/moving" | tr '\n' ' ')"; return 1; }
}
saved_in_new_directory() { # checks that there was one warning
    [ "$(grep -c "^WARNING: $work/moving was moved or removed" "$work/out")" = 1 ] &&
        [ "$(grep -c "^WARNING: $work" "$work/out")" = 1 ] || { why="$(grep WARNING "$work/out")"; return 1; }
    [ -e "$work/moving/$(printf 'iter_%07d' "$(cat "$work/moving/latest_checkpointed_iteration.txt")")" ] ||
        { why="nothing was saved"; return 1; }
    grep -q 'Saved checkpoint' "$work/moving/progress.txt" || { why="no progress.txt there"; return 1; }
}
removed() { # FLAGS...
    begin_moving --log-progress "$@" || return 1
    mv "$work/moving" "$work/moved"
    wait_until test -e "$work/moving/latest_checkpointed_iteration.txt" ||
        { say "no new checkpoint"; return 1; }
    ! flock -n "$work/moving/.lock" true || { why="the new folder is not locked"; kill "$job"; return 1; }
    flock -n "$work/moved/.lock" true || { why="the old folder is still locked"; kill "$job"; return 1; }
    end_moving 75 && saved_in_new_directory
}
foreign_checkpoint() { # another run's checkpoints are not overwritten
    begin_moving || return 1
    mkdir -p "$work/next/iter_0100000"
    touch "$work/next/iter_0100000/manifest.json"
    mv "$work/moving" "$work/moved" && mv "$work/next" "$work/moving"
    end_moving 6 && error_names 6 "holds a checkpoint of iteration 100000, which this run would overwrite" 6
}
if command -v flock >/dev/null; then
    check "another job at the path of a moved directory" moved_away
    check "another job at the path of a moved directory, async save" moved_away --async-save
    check "a moved directory: saves in a new one" removed
    check "a moved directory: saves in a new one, async save" removed --async-save
else
    skip "directories moved during a run" "no flock"
fi
check "another run's checkpoint at the path of a moved directory" foreign_checkpoint
elsewhere() { # without a shared file system only rank 0 finds the checkpoint
    local flags=("${model[@]}" "${batch[@]}" --data-path "$data" --gpus-per-node 1 --load good)
    mkdir -p "$work/elsewhere"
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np 2 bash -c \
        'if [ "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}" = 0 ]; then cd "$0"; else cd "$0/elsewhere"; fi; exec "$@"' \
        "$work" "$BUILD/train_gpt_cpu" "${flags[@]}" >"$work/out" 2>"$work/err" </dev/null
    error_names 6 "is not in good on this machine" $?
}
check "ranks without a shared directory" elsewhere
finish
