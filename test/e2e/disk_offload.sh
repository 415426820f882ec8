#!/usr/bin/env bash
# The files of --optimizer-disk-offload: nothing is left after a run or a kill, the folder belongs
# to one job, leftovers are removed, and a full or failing disk ends the run with one line and keeps
# the last checkpoint intact. Runs without io_uring, without O_DIRECT, on a slow disk and with short
# reads and writes are identical to runs without the flag. test/e2e/offload.sh and sharding.sh
# compare the flag with presets and strategies.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 12
data=$work/text_text_document
state=$work/state
disk=(--optimizer-disk-offload "$state")
several=(--gpus-per-node 1 "${paper[@]}" --wq-group-size 128 --ddp-bucket-size 1000)
host=$(hostname)

# with NAME=VALUE... -- COMMAND...: runs COMMAND with the shim and these variables on rank 0.
with() {
    local before=("${launcher[@]}") rc
    launcher+=(-x LD_PRELOAD="$shim" -x SHIM_FOLDER="$state/" -x SHIM_MARK="$work/mark" -x SHIM_AT=0)
    rm -f "$work/mark"
    while [ "$1" != -- ]; do
        launcher+=(-x "$1")
        shift
    done
    "${@:2}"
    rc=$?
    launcher=("${before[@]}")
    return $rc
}
is_empty() { # nothing is left except a lock file that no job holds
    [ -z "$(find "$state" -type f ! -name ".optimizer-$host.lock")" ] ||
        { why="left $(ls -A "$state")"; return 1; }
}
reference() {
    logged reference 2 "${several[@]}" --save "$work/reference" --save-interval 4 --async-save
}
check "reference run" reference
same_as_reference() { # NAME FLAGS...
    logged "$1" 2 "${several[@]}" "${disk[@]}" --save "$work/$1" --save-interval 4 "${@:2}" &&
        same_training reference "$1" && same_shards "$work/reference" "$work/$1" 12 && is_empty
}

# --- ways to read and write ---
check "identical to a run without the flag" same_as_reference direct
slower() { # WORDS NAME: the note is logged once
    [ "$(grep -c "^--optimizer-disk-offload: .*$1" "$work/out")" -eq 1 ] ||
        { why="$(grep -c '^--optimizer-disk-offload: ' "$work/out") notes"; return 1; }
}
without_uring() {
    with SHIM_NO_URING=1 -- same_as_reference threads --async-save &&
        slower "refuses io_uring (Operation not permitted)"
}
check "without io_uring" without_uring
without_direct() {
    with SHIM_NO_DIRECT=1 -- same_as_reference buffered && slower "does not support O_DIRECT"
}
check "without O_DIRECT" without_direct
sparse() { # ENOSYS: an old kernel; EOPNOTSUPP: the file system
    local errno
    for errno in 38 95; do
        with SHIM_NO_FALLOCATE=$errno -- same_as_reference "sparse$errno" || return 1
        grep -q '^fallocate ' "$work/mark" || { why="fallocate was not called"; return 1; }
    done
}
check "without fallocate" sparse
short() { with SHIM_NO_URING=1 SHIM_IO_SHORT=1 -- same_as_reference short; }
check "short reads and writes" short
slow() { with SHIM_NO_URING=1 SHIM_IO_MS=5 -- same_as_reference slow; }
check "a slow disk on one rank" slow
on_tmpfs() {
    local state=/dev/shm/sdp4bit_test_$$ disk
    disk=(--optimizer-disk-offload "$state")
    same_as_reference tmpfs
    local rc=$?
    rm -rf "$state"
    return $rc
}
if [ -w /dev/shm ]; then check "on tmpfs" on_tmpfs; else skip "on tmpfs" "/dev/shm is not writable"; fi

# --- the folder ---
private() {
    rm -rf "$state"
    SDP4BIT_FAULT=stall:0:3:0 in_background private 2 "${several[@]}" "${disk[@]}"
    wait_for_iteration private 2 || { say "no iteration 2"; return 1; }
    is_empty && [ "$(stat -c %a "$state/.optimizer-$host.lock")" = 600 ] ||
        { why="${why:-mode of the lock}"; return 1; }
    [ "$(find /proc/[0-9]*/fd -lname "$state/optimizer-$host-* (deleted)" 2>/dev/null | wc -l)" -eq 2 ] ||
        { why="not one open file per rank"; return 1; }
}
in_use() { # while the run of `private` is stopped
    refused 3 "another job has its optimizer state in $state; stop it, or choose" 2 "${several[@]}" "${disk[@]}" \
        --distributed-timeout-minutes 0.2
}
killed() {
    signal_rank KILL 1 || return 1
    job_ended private && { why="exit code 0"; return 1; }
    wait_until ranks_gone && is_empty
}
ranks_gone() { [ -z "$(rank_pids)" ]; }
check "files have no name while they are used, and nobody else may open the lock" private
check "a folder that another job uses is refused" in_use
check "a killed run leaves no file" killed
leftovers() {
    mkdir -p "$state" &&
        touch "$state/optimizer-$host-abcdef" "$state/optimizer-other-abcdef" "$state/mine" \
            "$state/optimizer-$host-2-abcdef" &&
        trains 2 "${several[@]}" "${disk[@]}" --train-iters 3 || return 1
    why=$(find "$state" -type f -printf '%f\n' | sort | tr '\n' ' ')
    [ "$why" = "$(printf '%s\n' mine "optimizer-$host-2-abcdef" optimizer-other-abcdef | sort | tr '\n' ' ')" ] ||
        return 1
    rm -r "$state"
}
check "leftovers of this host are removed, other files are kept" leftovers
unusable() {
    touch "$work/file"
    refused 3 "cannot make folder $work/file: " 2 "${several[@]}" --optimizer-disk-offload "$work/file/state"
}
check "a folder that cannot be created" unusable
check "a path that does not exist: every host has a folder of its own" refused 3 \
    "/proc/none/state: No such file or directory; check the path; every host needs a local folder" 2 \
    "${several[@]}" --optimizer-disk-offload /proc/none/state
forbidden() { # even root cannot create files there
    train 1 --optimizer-disk-offload /sys
    error_names 3 "cannot lock /sys: " $? && grep -q '; check the permissions, or choose another' "$work/err" ||
        { say "$why"; return 1; }
}
check "a folder without permission" forbidden

# --- full and failing disks ---
full() {
    local program=$trainer trainer=$work/limited
    printf '#!/bin/bash\nulimit -f 20000 && exec "%s" "$@"\n' "$program" >"$trainer" && chmod +x "$trainer" &&
        refused 3 "in $state: File too large; free space there" 1 --hidden-size 512 "${disk[@]}" &&
        grep -q 'cannot reserve 0.0[0-9]* GiB for the optimizer state of a rank' "$work/err" && is_empty
}
check "a full disk is found before training" full
intact() { # the checkpoint at iteration 4 is whole and resumes
    [ "$(cat "$work/broken/latest_checkpointed_iteration.txt")" = 4 ] || { why="no checkpoint 4"; return 1; }
    same_shards "$work/reference" "$work/broken" 4 &&
        logged resumed 2 "${several[@]}" "${disk[@]}" --save "$work/broken" --save-interval 4 \
            --load "$work/broken" &&
        same_training reference resumed 4 && same_shards "$work/reference" "$work/broken" 12
}
# Counts the transfers of rank 0 in 4 and in 8 iterations, then breaks some of those between.
transfers() { # ITERATIONS
    with SHIM_NO_URING=1 SHIM_COUNT="$work/count" -- trains 2 "${several[@]}" "${disk[@]}" \
        --lr-decay-iters 12 --train-iters "$1" --save "$work/counted" --save-interval 4 &&
        rm -rf "$work/counted" && cat "$work/count"
}
breaks() { # ERRNO CODE WORDS AT...
    local errno=$1 code=$2 words=$3 at rc
    for at in "${@:4}"; do
        rm -rf "$work/broken"
        with SHIM_NO_URING=1 SHIM_IO_AT="$at" SHIM_ERRNO="$errno" -- train 2 "${several[@]}" "${disk[@]}" \
            --save "$work/broken" --save-interval 4
        rc=$?
        [ -s "$work/mark" ] || { why="transfer $at was not reached"; return 1; }
        if [ "$errno" = 0 ]; then [ $rc -ne 0 ] || { why="exit code 0"; return 1; }; else
            error_names "$code" "$words" $rc || { why="transfer $at: $why"; return 1; }
        fi
        wait_until ranks_gone && is_empty && intact || { why="transfer $at: $why"; return 1; }
    done
}
four=$(transfers 4) eight=$(transfers 8)
span=$((${eight:-0} - ${four:-0}))
some=()
for quarter in 0 1 2 3; do some+=($((${four:-0} + 1 + quarter * span / 4))); done
check "failing reads and writes" breaks 5 3 "in $state: Input/output error; check the disk" "${some[@]}"
check "no space during training" breaks 28 3 "in $state: No space left on device; free space" "${some[1]}"
check "kill -9 at any transfer, resumed bit-exactly" breaks 0 0 "" "${some[@]}"

# --- plans ---
planned() {
    make_plan 4 --gpus-per-node 2 "${paper[@]}" "${disk[@]}" --plan-disk-bandwidth 2 || return 1
    grep -qE '^  GiB on disk: [0-9.]+ for each rank, [0-9.]+ for the 2 ranks of a node$' "$work/plan" &&
        grep -qE '^  disk: the update reads and writes .* at 2 GB/s per node \(--plan-disk-bandwidth\)$' "$work/plan" ||
        { why="$(grep disk "$work/plan")"; return 1; }
}
check "--plan shows disk, host and device bytes and the disk's time" planned
planned_alone() { # one rank of a node, with the default bandwidth
    make_plan 1 "${disk[@]}" --hidden-size 1024 &&
        grep -qE '^  GiB on disk: [0-9.]+ for each rank$' "$work/plan" &&
        grep -qE ' at 5 GB/s per node \(default of --plan-disk-bandwidth\)$' "$work/plan" ||
        { why="$(grep disk "$work/plan")"; return 1; }
}
check "--plan for one rank, with the default bandwidth" planned_alone
slower_disk() { # half the bandwidth takes twice the time; a slow disk takes longer than a fast one
    local speed ms=()
    for speed in 1 2 1000; do
        "$BUILD/train_gpt_cpu" @configs/gpt_1.3b.args --plan --plan-world-size 1 --plan-network 1 "${disk[@]}" \
            --plan-disk-bandwidth $speed >"$work/out" 2>"$work/err" || { say "--plan failed"; return 1; }
        ms+=("$(sed -n 's/.*which takes \([0-9.]*\) ms.*/\1/p' "$work/out")" \
            "$(awk '$1 == "this" && $2 == "run" && NF > 4 && $3 ~ /^[0-9]/ { print $4; exit }' "$work/out")")
    done
    why="${ms[*]}"
    awk -v a="${ms[0]}" -v b="${ms[2]}" -v slow="${ms[1]}" -v middle="${ms[3]}" -v fast="${ms[5]}" \
        'BEGIN { exit !(a > 1.99 * b && a < 2.01 * b && slow > middle && middle > fast) }'
}
check "--plan-network: a slower disk takes longer" slower_disk
measured() {
    train 1 --plan --plan-network 10 --plan-measure "${disk[@]}" || { say "--plan-measure failed"; return 1; }
    grep -qE '^  disk: .* at [0-9.e+]+ GB/s per node \(--plan-measure\)' "$work/out" && is_empty
}
check "--plan-measure measures the disk" measured
finish
