#!/usr/bin/env bash
# After SIGTERM, SIGUSR1 or SIGINT to a rank, SIGUSR1 to mpirun, or Ctrl-C under run_until_done.sh,
# the run finishes the step, saves and exits with 75. It then resumes bit-exactly.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 5
data=$work/text_text_document
# As on users' machines, OpenBLAS starts its threads before main (lib.sh disables them). The kernel
# may deliver a signal to any thread of the process.
unset OPENBLAS_NUM_THREADS
launcher+=(--bind-to none)
run=(--gpus-per-node 2 --train-iters 20000 --lr-decay-iters 100 --hidden-dropout 0.1 --attention-dropout 0.1 \
    "${paper[@]}")

# Looks like a rank of an earlier run that mpirun did not wait for. It must not be signaled.
(trap '' TERM USR1 INT; OMPI_COMM_WORLD_RANK=0 exec sleep 3600) & disown

saved_last() { # NAME: checks that the tracker names the last logged iteration
    local last
    last=$(cat "$work/$1/latest_checkpointed_iteration.txt" 2>/dev/null)
    [ "$last" = "$(field "$1" loss | tail -n 1 | cut -d ' ' -f 1)" ] ||
        { why="saved iteration ${last:-none}, logged $(field "$1" loss | tail -n 1)"; return 1; }
}
stopped() { # NAME SIGNAL RC: checks that the background run saved and exited
    [ "$3" -eq 75 ] || { say "exit code $3"; return 1; }
    grep -q "exiting program after receiving SIG$2" "$work/out" || { why="no line names SIG$2"; return 1; }
    ! grep -q '^error: ' "$work/err" || { say "an error was printed"; return 1; }
    [ ! -d "$work/$1" ] || saved_last "$1"
}
signaled() { # NAME SIGNAL [RANK]: signals one rank, mpirun, or all ranks
    local pids
    mkdir "$work/$1"
    in_background "$1" 4 "${run[@]}" --save "$work/$1" --save-interval 100000
    wait_for_iteration "$1" 5 || { say "no iteration 5"; return 1; }
    if [ -n "${3:-}" ]; then
        signal_rank "$2" "$3" || return 1
    else
        mapfile -t pids < <(running_pids)
        kill -s "$2" "${pids[@]}"
    fi
    job_ended "$1"
    stopped "$1" "$2" $? && { [ -n "${3:-}" ] || [ ${#pids[@]} -eq 4 ] ||
        { why="${#pids[@]} ranks instead of 4"; return 1; }; }
}
resumes() { # NAME
    local last
    last=$(cat "$work/$1/latest_checkpointed_iteration.txt") || return 1
    logged "$1.2" 4 "${run[@]}" --load "$work/$1" --exit-interval $((last + 10)) &&
        logged "$1.whole" 4 "${run[@]}" --exit-interval $((last + 10)) &&
        same_training "$1.whole" "$1.2" "$last"
}
check "SIGTERM to rank 1" signaled term TERM 1
check "SIGUSR1 to rank 0" signaled usr1 USR1 0
check "SIGINT to rank 3" signaled int INT 3
check "SIGTERM to all ranks" signaled term_all TERM
check "SIGUSR1 to all ranks" signaled usr1_all USR1
check "SIGINT to all ranks" signaled int_all INT
single_threaded() { OPENBLAS_NUM_THREADS=1 signaled "$@"; } # all threads except main block in poll
check "SIGTERM to rank 1, single-threaded OpenBLAS" single_threaded term_single TERM 1
check "SIGUSR1 to all ranks, single-threaded OpenBLAS" single_threaded usr1_single USR1
check "resumed bit-exactly after SIGTERM" resumes term
check "resumed bit-exactly after SIGINT to all ranks" resumes int_all
check "resumed bit-exactly after SIGUSR1" resumes usr1
without_save() {
    in_background nosave 4 "${run[@]}"
    wait_for_iteration nosave 5 || { say "no iteration 5"; return 1; }
    signal_rank TERM 2 || return 1
    job_ended nosave
    stopped nosave TERM $?
}
check "SIGTERM without --save" without_save
flagged() { # accepts Megatron-LM's flag, although its feature is always enabled here
    mkdir "$work/flagged"
    in_background flagged 2 "${run[@]}" --gpus-per-node 1 --save "$work/flagged" --save-interval 100000 \
        --exit-signal-handler
    wait_for_iteration flagged 5 || { say "no iteration 5"; return 1; }
    signal_rank TERM 0 || return 1
    job_ended flagged
    stopped flagged TERM $?
}
check "--exit-signal-handler" flagged
# Batch systems can send SIGUSR1 to mpirun. Tests whether this build of Open MPI forwards it to the
# ranks. (SIGTERM would not show this: mpirun stops reading the ranks' output at once and kills them
# a second later.)
mpirun_forwards() {
    local pid
    # shellcheck disable=SC2016 # expanded by the rank
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np 1 bash \
        -c 'trap "exit 75" USR1; touch "$0"; for _ in $(seq 100); do sleep 0.1; done' "$work/listens" \
        </dev/null 2>/dev/null &
    pid=$! job=$!
    wait_until test -e "$work/listens"
    kill -s USR1 "$(launcher_pid)"
    wait $pid
    [ $? = 75 ]
}
if mpirun_forwards; then check "SIGUSR1 to mpirun" signaled mpirun USR1 mpirun; else skip "SIGUSR1 to mpirun" \
    "this mpirun keeps it to itself"; fi
alone() { # one rank, started without mpirun
    "$trainer" ${device[@]+"${device[@]}"} "${model[@]}" "${batch[@]}" --data-path "$data" \
        --log-jsonl "$work/alone.jsonl" "${run[@]}" --gpus-per-node 1 --save "$work/alone" \
        --save-interval 100000 \
        >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    wait_for_iteration alone 5 || { say "no iteration 5"; kill -KILL "$job"; return 1; }
    kill -s TERM "$job"
    wait "$job"
    stopped alone TERM $?
}
check "SIGTERM to a single process" alone
# run_until_done.sh starts this script, which has no signal handlers and starts mpirun.
# shellcheck disable=SC2016 # expanded by the script
echo 'trap "touch $0.ended" EXIT; "$@" | cat; exit ${PIPESTATUS[0]}' >"$work/wrapper.sh"
trainers() { # prints the process ids of this script's trainers
    local pid
    for pid in $(rank_pids); do [ "$(readlink "/proc/$pid/exe")" != "$trainer" ] || echo "$pid"; done
}
none_left() { [ -z "$(trainers)" ]; }
under_a_script() { # SIGNAL
    local rc
    rm -rf "$work/wrapped"*
    # Background commands of a script ignore SIGINT unless job control is on.
    env --default-signal=INT scripts/run_until_done.sh --pause 0 -- bash "$work/wrapper.sh" "${launcher[@]}" \
        -np 4 \
        "$trainer" ${device[@]+"${device[@]}"} "${model[@]}" "${batch[@]}" --data-path "$data" "${run[@]}" \
        --log-jsonl "$work/wrapped.jsonl" --save "$work/wrapped" --load "$work/wrapped" \
        --save-interval 100000 \
        >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    wait_for_iteration wrapped 5 || { say "no iteration 5"; kill "$job"; return 1; }
    kill -s "$1" "$job"
    wait "$job"
    rc=$?
    job=
    wait_until none_left || { why="trainers are left running"; trainers | xargs kill -KILL; return 1; }
    stopped wrapped USR1 $rc && [ -e "$work/wrapper.sh.ended" ] ||
        { why=${why:-the script was killed}; return 1; }
}
check "Ctrl-C to run_until_done.sh with a script that runs mpirun" under_a_script INT
check "SIGTERM to run_until_done.sh with a script that runs mpirun" under_a_script TERM
unread() { # standard output is closed in mid-run; the run must continue
    local rc
    "$trainer" ${device[@]+"${device[@]}"} "${model[@]}" "${batch[@]}" --data-path "$data" "${run[@]}" \
        --gpus-per-node 1 --save "$work/unread" --save-interval 100000 --exit-interval 30 \
        2>"$work/err" </dev/null | head -n 1 >"$work/out"
    rc=${PIPESTATUS[0]}
    [ "$rc" = 0 ] && [ "$(cat "$work/unread/latest_checkpointed_iteration.txt")" = 30 ] || say "exit code $rc"
}
check "standard output is closed" unread
finish
