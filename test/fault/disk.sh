#!/usr/bin/env bash
# Full disks and directories without write permission: the run ends with one clear line and the
# documented exit code, and earlier checkpoints stay intact.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 1
data=$work/text_text_document
four=(4 --gpus-per-node 2 --train-iters 12)
mounted=()
unmount() {
    local folder
    for folder in "${mounted[@]}"; do umount "$folder" 2>/dev/null; done
    cleanup
}
trap unmount EXIT
# small_disk NAME SIZE: mounts a file system of SIZE bytes at $work/NAME. Fails without permission.
small_disk() {
    mkdir -p "$work/$1"
    mount -t tmpfs -o "size=$2" none "$work/$1" 2>/dev/null || return 1
    mounted+=("$work/$1")
}
shards() { cat "$1/$(printf 'iter_%07d' "$2")"/mp_rank_00/*.safetensors; }

# Disk sizes below are multiples of $bytes, the size of a checkpoint.
measure() { trains "${four[@]}" --save "$work/reference" --save-interval 4; }
check "reference run" measure
bytes=$(shards "$work/reference" 4 | wc -c)

disk_full_at() { # TRACKER DISK: checks that the save after iteration TRACKER does not fit
    refused 6 "$work/$2" "${four[@]}" --save "$work/$2/run" --save-interval 4 || return 1
    [ "$(cat "$work/$2/run/latest_checkpointed_iteration.txt" 2>/dev/null || echo none)" = "$1" ] ||
        { why="the tracker names $(cat "$work/$2/run/latest_checkpointed_iteration.txt")"; return 1; }
    ! compgen -G "$work/$2/run/.iter_*" >/dev/null || { why="left $(echo "$work/$2"/run/.iter_*)"; return 1; }
}
first() { # detected before training, because the size of a checkpoint is known
    disk_full_at none first && ! grep -q '^ iteration' "$work/out" ||
        { why="${why:-it was not detected before training}"; return 1; }
    grep -q 'does not fit in' "$work/err" || { why="$(cat "$work/err")"; return 1; }
}
second() {
    disk_full_at 4 second || return 1
    grep -q "^WARNING: $work/second/run has .* enough for 1 more checkpoints .* this run will write 3; " \
        "$work/out" || { why="no warning before training"; return 1; }
    shards "$work/second/run" 4 | cmp -s - <(shards "$work/reference" 4) ||
        { why="the previous checkpoint is damaged"; return 1; }
    rm -f "$work/rest.jsonl"
    logged rest "${four[@]}" --load "$work/second/run" && [ "$(train_lines rest | wc -l)" -eq 8 ] || return 1
}
# With --keep-last-checkpoints 1, space for two checkpoints is enough for any number of saves.
enough() {
    trains "${four[@]}" --save "$work/third/run" --save-interval 2 --keep-last-checkpoints 1 || return 1
    ! grep -q WARNING "$work/out" && shards "$work/third/run" 12 >/dev/null ||
        { why="a warning, or no checkpoint"; return 1; }
}
# Leftovers of a killed save do not count as used space: they are removed before the check.
leftover() {
    mkdir -p "$work/fourth/run/.iter_0000004.tmp"
    head -c $((bytes + 1000000)) /dev/zero >"$work/fourth/run/.iter_0000004.tmp/rubbish"
    trains "${four[@]}" --save "$work/fourth/run" --save-interval 12 &&
        [ ! -e "$work/fourth/run/.iter_0000004.tmp" ]
}
if small_disk first $((bytes / 2)) && small_disk second $((bytes + bytes / 2 + 1200000)); then
    check "the first checkpoint does not fit" first
    check "the second checkpoint does not fit; training resumes from the first" second
    if small_disk third $((3 * bytes + 1200000)); then check "--keep-last-checkpoints 1 on a small disk" \
        enough; fi
    if small_disk fourth $((bytes + bytes / 2 + 1200000)); then check "leftovers of a killed save are removed to make space" \
        leftover; fi
else
    skip "full disks" "needs permission to mount a file system"
fi
# A file size limit that is set during the run makes a write fail in the middle of a shard, which
# the check of free space cannot foresee.
limited() {
    local pid
    in_background limited "${four[@]}" --train-iters 2000 --lr-decay-iters 100 --log-interval 1000 --save \
        "$work/limited" --save-interval 500
    wait_for_iteration limited 5 || { say "no iteration 5"; return 1; }
    for pid in $(rank_pids); do prlimit --pid "$pid" --fsize=$((bytes / 5)) ||
        { why="prlimit failed"; return 1; }; done
    wait "$job"
    error_names 6 "$work/limited" $? || return 1
    [ ! -e "$work/limited/latest_checkpointed_iteration.txt" ] || { why="a tracker was written"; return 1; }
    ! compgen -G "$work/limited/.iter_*" >/dev/null ||
        { why="left $(echo "$work/limited"/.iter_*)"; return 1; }
}
if command -v prlimit >/dev/null; then
    check "a shard that cannot be written completely" limited
else
    skip "a shard that cannot be written completely" "no prlimit"
fi

# --- directories: errors are detected before training, not at the first checkpoint hours later ---
: >"$work/file"
before_training() { # CODE FOLDER FLAGS...
    refused "$1" "$2" "${four[@]}" "${@:3}" || return 1
    ! grep -q '^ iteration' "$work/out" || { why="it trained first"; return 1; }
}
check "a file instead of the --save directory" before_training 6 "$work/file" --save "$work/file" \
    --save-interval 4
# It is an error if a directory has the name of a file that every save writes, or of its temporary
# file. Anything else with the name of a temporary file, such as leftovers of a killed save, is
# replaced.
in_the_way() { # NAME
    rm -rf "$work/way" && mkdir -p "$work/way/$1"
    before_training 6 "$work/way/$1 is a folder" --save "$work/way" --save-interval 4
}
for name in latest_checkpointed_iteration.txt checkpoints_of_run.txt .latest_checkpointed_iteration.txt.tmp \
    .checkpoints_of_run.txt.tmp; do check "a directory instead of $name" in_the_way $name; done
replaces() { # NAME COMMAND...
    rm -rf "$work/way" && mkdir "$work/way" && : >"$work/untouched"
    "${@:2}" "$work/way/$1"
    trains "${four[@]}" --save "$work/way" --save-interval 6 || return 1
    [ "$(ls -A "$work/way" | tr '\n' ' ')" = \
        "checkpoints_of_run.txt iter_0000006 iter_0000012 latest_checkpointed_iteration.txt " ] &&
        [ ! -s "$work/untouched" ] || { why="left $(ls -A "$work/way" | tr '\n' ' ')"; return 1; }
}
check "a pipe instead of a temporary file" replaces .latest_checkpointed_iteration.txt.tmp mkfifo
check "a link instead of a temporary file" replaces .checkpoints_of_run.txt.tmp ln -s "$work/untouched"
limited() { # FLAGS...: rank 2 of 4 may write files of at most 8 KiB
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np 4 bash -c \
        '[ "$OMPI_COMM_WORLD_RANK" != 2 ] || ulimit -f 8; exec "$0" "$@"' "$trainer" "${model[@]}" \
        "${batch[@]}" --data-path "$data" "${four[@]:1}" \
        "$@" >"$work/out" 2>"$work/err" </dev/null
}
file_limit() {
    limited --save "$work/small" --save-interval 4
    error_names 6 "raise the limit (ulimit -f)" $? || return 1
    ! grep -q '^ iteration' "$work/out" && [ ! -e "$work/small/latest_checkpointed_iteration.txt" ] ||
        { why="it trained first"; return 1; }
}
if limited || grep -q '^error: ' "$work/err"; then check "a file size limit smaller than a shard" file_limit
else skip "a file size limit smaller than a shard" \
    "MPI does not start under it: its own shared files are longer"; fi
check "a file instead of the --tensorboard-dir" before_training 3 "$work/file" --tensorboard-dir \
    "$work/file/logs"
check "a file instead of the directory of --log-jsonl" before_training 3 "$work/file" --log-jsonl \
    "$work/file/run.jsonl"
read_only() {
    mkdir -p "$work/locked"
    if [ "$(id -u)" -eq 0 ]; then
        mount -t tmpfs -o ro none "$work/locked" 2>/dev/null || return 1
        mounted+=("$work/locked")
    else
        chmod 500 "$work/locked"
    fi
}
if read_only; then
    check "a read-only --save directory" before_training 6 "$work/locked" --save "$work/locked" \
        --save-interval 4
    check "a --save directory inside a read-only one" before_training 6 "$work/locked" --save \
        "$work/locked/deeper/run" --save-interval 4
else
    skip "a read-only --save directory" "runs as root without permission to mount"
fi

# --- logs that cannot be written: training continues ---
if [ -c /dev/full ]; then
    full_log() {
        trains "${four[@]}" --log-jsonl /dev/full || return 1
        [ "$(grep -c '^warning: cannot write /dev/full' "$work/err")" -eq 1 ] &&
            [ "$(grep -c '^ iteration' "$work/out")" -eq 12 ] ||
            { why="not one warning and 12 iterations"; return 1; }
    }
    check "a full disk under --log-jsonl: one warning, training continues" full_log
else
    skip "a full disk under --log-jsonl" "no /dev/full"
fi

# --- preprocess_data ---
preprocess_full() { # CODE FOLDER
    local rc
    "$BUILD/preprocess_data" --input "$work/big.jsonl" --tokenizer-type Byte --append-eod --output-prefix \
        "$2/out" >"$work/out" 2>"$work/err"
    rc=$?
    error_names "$1" "$2" "$rc" || return 1
    [ -z "$(ls -A "$2")" ] || { why="left $(ls -A "$2")"; return 1; }
}
make_text "$work/big.jsonl" 20000 5
if small_disk shards 1000k; then
    check "preprocess_data on a full disk" preprocess_full 3 "$work/shards"
else
    skip "preprocess_data on a full disk" "needs permission to mount a file system"
fi
if [ -d "$work/locked" ]; then check "preprocess_data into a read-only folder" preprocess_full 3 \
    "$work/locked"; fi
finish
