#!/usr/bin/env bash
# Faults at the start and end of a job: ranks that stop before the heartbeat starts or after it
# ends, pipes instead of files, too little address space, and logs without a reader. The job must
# end with the documented exit code and one line, at most a few seconds after the time limit.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 1
data=$work/text_text_document
says() { grep '^error: ' "$work/err" | grep -qF -- "$1" || say "the error line does not say '$1'"; }

# --- ranks stopped while MPI starts or ends; the jobs mostly wait, so all run at the same time ---
shim=$BUILD/test/fault/mpi_shim.so
# begin CALL RANK [slow]: runs three ranks, of which RANK stops before CALL. With "slow", mpirun is
# suspended until each of the other ranks has had time to report the error.
begin() {
    local folder=$work/$1.$2${3:+.$3} launcher_id
    mkdir "$folder"
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np 3 env LD_PRELOAD="$shim" MPI_FAULT_RANK="$2" \
        MPI_FAULT_CALL="$1" MPI_FAULT_STOP=1 "$trainer" "${model[@]}" "${batch[@]}" --data-path "$data" \
        --global-batch-size 6 --gpus-per-node 1 --train-iters 3 --distributed-timeout-minutes 0.04 \
        >"$folder/out" 2>"$folder/err" </dev/null &
    job=$!
    if [ -n "${3:-}" ]; then
        wait_until grep -qs 'after training is done' "$folder/out"
        launcher_id=$(launcher_pid)
        kill -STOP "$launcher_id"
        sleep 20
        kill -CONT "$launcher_id"
    fi
    wait "$job"
    echo $? >"$folder/rc"
}
ends() { # FOLDER TEXT
    cp "$work/$1/out" "$work/$1/err" "$work"
    error_names 7 "$2" "$(cat "$work/$1/rc")" && says "(--distributed-timeout-minutes sets the limit)" ||
        return 1
    [[ $1 != MPI_Finalize* ]] || grep -q 'after training is done' "$work/out" ||
        { why="training did not complete"; return 1; }
}
if [ ! -e "$shim" ]; then
    not_ok "$shim" "not built; run make BUILD=$BUILD test-programs"
elif ldd "$BUILD/train_gpt_cpu" | grep -q libasan; then
    skip "ranks stopped while MPI starts or ends" "sanitizer libraries must be loaded first"
else
    jobs=()
    for place in MPI_Init_thread:2 MPI_Init_thread:0 MPI_Comm_dup:1 MPI_Finalize:2 MPI_Finalize:0 \
        MPI_Finalize:2:slow; do
        IFS=: read -r call rank slow <<<"$place"
        begin "$call" "$rank" "$slow" &
        jobs+=($!)
    done
    wait "${jobs[@]}"
    check "rank 2 stops before MPI_Init_thread" ends MPI_Init_thread.2 "for all ranks to start"
    check "rank 0 stops before MPI_Init_thread" ends MPI_Init_thread.0 "for all ranks to start"
    check "a rank stops right after MPI_Init_thread" ends MPI_Comm_dup.1 "for all ranks to start"
    check "rank 2 stops before MPI_Finalize" ends MPI_Finalize.2 "for all ranks to shut down"
    check "rank 0 stops before MPI_Finalize" ends MPI_Finalize.0 "for all ranks to shut down"
    check "rank 2 stops before MPI_Finalize, slow mpirun" ends MPI_Finalize.2.slow \
        "for all ranks to shut down"
    gone() { [ -z "$(rank_pids)" ] || { why="ranks still run"; return 1; }; }
    check "no rank is still running" gone
fi

# --- pipes instead of files ---
mkfifo "$work/pipe"
touch "$work/empty"
bpe=(--tokenizer-type GPT2BPETokenizer)
check "a vocabulary that is a pipe" refused 5 "$work/pipe is not a plain file" 2 "${bpe[@]}" \
    --vocab-file "$work/pipe" --merge-file "$work/empty"
check "merges that are a pipe" refused 5 "$work/pipe is not a plain file" 2 "${bpe[@]}" \
    --vocab-file test/golden/tokenizer/vocab.json --merge-file "$work/pipe"
check "an argument file that is a pipe" refused 2 "@$work/pipe: not a plain file" 2 "@$work/pipe"

# --- too little address space: the run succeeds or ends with one line ---
within() { # KIB: limit on the address space
    timeout -k 5 "$LIMIT" bash -c 'ulimit -v "$0" && exec "$@"' "$1" env OMPI_MCA_plm=isolated "$trainer" \
        "${model[@]}" "${batch[@]}" --data-path "$data" --train-iters 2 --lr-warmup-iters 0 \
        --distributed-timeout-minutes 0.2 >"$work/out" 2>"$work/err" </dev/null
}
little_space() { # smaller limits than these make MPI itself fail
    local kib rc found=0
    for kib in 220000 250000 280000 310000 340000; do
        within $kib
        rc=$?
        [ $rc -ne 124 ] && [ $rc -ne 137 ] || { say "$kib KiB: the run hangs"; return 1; }
        # Open MPI may also run out of memory while it shuts down.
        if grep -q '^error: ' "$work/err" && ! grep -q 'out of dynamic memory' "$work/err"; then
            [ $rc -eq 3 ] && [ "$(grep -c '^error: ' "$work/err")" -eq 1 ] &&
                grep -qE '^error: .*(out of memory|cannot start the watchdog)' "$work/err" ||
                { say "$kib KiB: exit code $rc"; return 1; }
        fi
        if grep -q '^error: .*OpenBLAS' "$work/err"; then found=$((found + 1)); fi
    done
    [ $found -gt 0 ] || { why="OpenBLAS's buffer fit at every limit"; return 1; }
}
if [ "$trainer" != "$BUILD/train_gpt_cpu" ] || ldd "$trainer" | grep -qE 'lib[at]san'; then
    skip "too little address space" "the limits fit only the CPU program without sanitizers"
else
    check "too little address space for OpenBLAS's buffer" little_space
fi

# --- logs without a reader ---
mkfifo "$work/json"
unread_json() { # the log is larger than the 60 kB that a pipe buffers
    trains 2 --gpus-per-node 1 --train-iters 600 --lr-decay-iters 100 --log-interval 100 \
        --log-jsonl "$work/json" --distributed-timeout-minutes 0.05 || return 1
    [ "$(grep -c "^warning: cannot write $work/json: its reader is too slow; " "$work/err")" -eq 1 ] ||
        { say "expected one warning"; return 1; }
    grep -q 'after training is done' "$work/out" || say "training did not complete"
}
check "JSON lines to a pipe without a reader: one warning, training continues" unread_json
unread_log() {
    { timeout -k 5 "$LIMIT" env OMPI_MCA_plm=isolated "$trainer" "${model[@]}" "${batch[@]}" \
        --data-path "$data" --train-iters 1000000 --lr-decay-iters 100 --distributed-timeout-minutes 0.05 \
        2>"$work/err"
        echo $? >"$work/rc"; } | until [ -s "$work/rc" ]; do sleep 0.1; done
    error_names 7 "write log: " "$(cat "$work/rc")" && says "nothing is reading this rank's log"
}
check "standard output whose reader has exited: the error line says so" unread_log
finish
