#!/usr/bin/env bash
# Ranks that die or hang: the job ends with a nonzero exit code and leaves no process.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 1
data=$work/text_text_document
run=(4 --gpus-per-node 2 --train-iters 1000000 --lr-decay-iters 100 --log-interval 1000)

# ends_after NAME COMMAND... -- FLAGS...: starts training, runs COMMAND and waits until the job
# ends. Sets $rc. The test's time limit is shorter than the default --distributed-timeout-minutes.
ends_after() {
    local name=$1 command=()
    shift
    while [ "$1" != -- ]; do command+=("$1"); shift; done
    shift
    in_background "$name" "${run[@]}" "$@"
    wait_for_iteration "$name" 10 || { say "no iteration 10"; return 1; }
    "${command[@]}" || return 1
    job_ended "$name"
    rc=$?
    job=
    wait_until no_ranks || { why="ranks still run"; return 1; }
    [ "$rc" -ne 0 ] && [ "$rc" -ne 124 ] || { why="exit code $rc"; return 1; }
}
no_ranks() { [ -z "$(rank_pids)" ]; }
killed() { ends_after "killed$1$2" signal_rank "$1" "$2" -- "${@:3}"; } # SIGNAL RANK FLAGS...
check "kill -9 of rank 0" killed KILL 0
check "kill -9 of rank 3" killed KILL 3
check "kill -9 of a rank with SDP4Bit" killed KILL 2 "${paper[@]}"
check "a rank that crashes" killed SEGV 1
launcher_reports() { # mpirun notices the death first and prints the rank
    local launcher=(mpirun --oversubscribe)
    [ "$(id -u)" -ne 0 ] || launcher+=(--allow-run-as-root)
    killed KILL 1 && { tr '\n' ' ' <"$work/err" | grep -qi 'rank 1 .*signal 9' ||
        { why="rank 1 is not named: $(tail -n 3 "$work/err" | tr '\n' ' ')"; return 1; }; }
}
if mpirun --version 2>/dev/null |
    grep -q 'Open MPI'; then check "kill -9: the launcher names the rank" launcher_reports; fi

phases="(read data|forward and backward|update|evaluate|save checkpoint|sample)"
# says REGEX: checks that the error line matches.
says() { grep '^error: ' "$work/err" | grep -qE -- "$1" || say "the error line does not say '$1'"; }
# A rank hangs, and the others end the job after the time limit. The error line names the hanging
# rank (not one that waits for it), its step and phase.
hanging() { # RANK FLAGS...
    ends_after "hanging$1" signal_rank STOP "$1" -- --distributed-timeout-minutes 0.05 "${@:2}" || return 1
    error_names 7 "rank $1 has shown no sign of life for" "$rc" &&
        error_names 7 "(--distributed-timeout-minutes sets the limit)" "$rc" &&
        says "last seen at iteration [0-9]+, $phases\\)" || return 1
    local seen logged_last
    seen=$(sed -n 's/.*last seen at iteration \([0-9]*\),.*/\1/p' "$work/err") \
        logged_last=$(field "hanging$1" loss | tail -n 1 | cut -d ' ' -f 1)
    [ "$seen" -ge $((logged_last - 1)) ] && [ "$seen" -le $((logged_last + 2)) ] ||
        { why="last seen at iteration $seen, the log ends at $logged_last"; return 1; }
}
check "rank 0 hangs: exit code 7 and one line with its name after --distributed-timeout-minutes" hanging 0
check "rank 2 hangs with SDP4Bit: the same" hanging 2 "${paper[@]}"
[ -z "${LONG:-}" ] || for rank in 1 3; do
    for flags in "" "--no-overlap" "--log-interval 1" "--eval-interval 1 --eval-iters 4"; do
        # shellcheck disable=SC2086 # split on purpose
        check "rank $rank hangs, $flags" hanging $rank $flags
    done
done
# stuck FAULT RANK ITERATION WAIT RANKS PHASE FLAGS...: RANK is alive but stuck before (FAULT stall)
# or in (FAULT hang, like a device call that never returns) its WAIT-th wait of ITERATION. Its
# watchdog or the waiting ranks end the job, and the error line names the rank and PHASE (a regular
# expression).
stuck() {
    rm -rf "$work/stuck"
    SDP4BIT_FAULT=$1:$2:$3:$4 train "$5" --distributed-timeout-minutes 0.04 "${busy[@]}" "${@:7}"
    local rc=$?
    [ "$rc" -ne 0 ] || return 75  # the iteration has fewer waits
    error_names 7 "rank $2 " "$rc" && error_names 7 "(--distributed-timeout-minutes sets the limit)" "$rc" &&
        if [ "$3" -gt 0 ]; then says "iteration $3,? $6[:)]"; else says " $6[:)]"; fi
}
# Uses all features that wait, in one iteration.
busy=(--train-iters 6 --gpus-per-node 2 --log-interval 2 --log-params-norm --log-num-zeros-in-grad \
    --log-quantization-error-interval 2 --verify-replicas-interval 2
    --timing-log-level 2 --eval-interval 2 --eval-iters 1 --sample-prompt "the quick" --sample-tokens 3 \
        --sample-interval 2 --save "$work/stuck" --save-interval 2)
check "a rank is stuck before its first wait" stuck stall 2 0 0 4 start
check "a rank is stuck in setup: exit code 7 and one line with its name" stuck stall 2 0 3 4 setup
check "a rank is stuck while loading" stuck stall 0 0 28 4 "load data"
check "a rank is stuck in a step" stuck stall 3 2 2 4 "forward and backward" "${paper[@]}"
check "a rank is stuck after a step" stuck stall 1 2 40 4 sample
check "a rank is stuck in a wait" stuck hang 2 3 2 4 update
check "a pipeline stage is stuck" stuck stall 3 2 4 4 "forward and backward" --pipeline-model-parallel-size 2
check "a pipeline stage is stuck in a message" stuck hang 2 2 2 4 "forward and backward" \
    --pipeline-model-parallel-size 2 --gpus-per-node 1
check "a single rank is stuck in a wait" stuck hang 0 3 1 1 update --gpus-per-node 1
check "a single rank is stuck" stuck stall 0 3 1 1 update --gpus-per-node 1
# With many ranks the error line shows only the progress of the reporting rank and the slowest
# ranks.
stuck_of_eight() {
    SDP4BIT_FAULT=stall:6:3:6 train 8 --gpus-per-node 8 --global-batch-size 16 \
        --distributed-timeout-minutes 0.1 --train-iters 6
    error_names 7 "rank 6 " $? &&
        says "; collectives issued: rank 6: [0-9]+ \(last: [^;]*; rank [0-7]: [^;]*; rank [0-7]: [^;]*; rank [0-7]: [^;]*; 4 others: [0-9]+( to [0-9]+)? \("
}
check "one of eight ranks is stuck: the line has its progress" stuck_of_eight
slowest() {
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np 8 "$BUILD/test/mpi/test_heartbeat" "out of step" >"$work/out" \
        2>"$work/err" </dev/null
    error_names 7 "; collectives issued: rank 0: 10 (last: all-gather between nodes); rank 7: 8 (last: all-gather between nodes); rank 5: 9 " $? &&
        says "; rank 1: 10 \(last: all-gather between nodes\); 4 others: 10 to 11 \("
}
check "the line names the slowest ranks" slowest
nowhere_else() { stuck stall 2 2 100000 4 ""; [ $? -eq 75 ] ||
    { why="a fault that is never reached stopped the run: $why"; return 1; }; }
check "a fault that is never reached" nowhere_else
everywhere() { # RANK ITERATION STRIDE: a stall at every STRIDE-th wait
    local wait=0 rc
    while :; do
        stuck stall "$1" "$2" "$wait" 4 \
            "$([ "$2" = 0 ] && echo "(start|setup|load checkpoint|load data)" || echo "$phases")"
        rc=$?
        [ $rc -ne 75 ] || break
        [ $rc -eq 0 ] || { why="wait $wait: $why"; return 1; }
        echo "# wait $wait: $(grep -m 1 '^error: ' "$work/err")"
        wait=$((wait + $3))
    done
    [ "$wait" -ge 20 ] || { why="only $wait waits"; return 1; }
}
[ -z "${LONG:-}" ] || for rank in 0 2; do
    check "rank $rank is stuck at any wait of setup" everywhere $rank 0 7
    check "rank $rank is stuck at any wait of an iteration" everywhere $rank 2 7
done

evaluating() { # the time limit applies to waits, not to computation between them
    trains 4 --gpus-per-node 2 --distributed-timeout-minutes 0.05 --eval-interval 4 --eval-iters 3
}
check "a short time limit does not end a healthy run" evaluating

# --- invalid rank counts and environments ---
check "4 ranks, 3 per node" refused 2 "nodes of 3; --gpus-per-node" 4 --gpus-per-node 3
check "more ranks per node than ranks" refused 2 "nodes of 8; --gpus-per-node" 4 --gpus-per-node 8
check "3 ranks and a batch of 8" refused 2 "--global-batch-size 8" 3
three() { trains 3 --global-batch-size 6 --train-iters 4 "${paper[@]}" --verify-replicas-interval 1; }
check "3 ranks and a batch of 6" three
# task VARIABLES...: runs the trainer like a task of srun without MPI support, which starts every
# task as a separate job. If SLURM_JOB_ID is set, Open MPI would end the task with its own
# message. With PMI_RANK, MPI starts a world of one rank.
task() {
    env SLURM_NTASKS=4 SLURM_STEP_ID=0 "$@" timeout "$LIMIT" "$BUILD/train_gpt_cpu" "${model[@]}" \
        "${batch[@]}" --data-path "$data" >"$work/out" 2>"$work/err" </dev/null
}
first_task() { task SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0 "$@"; error_names 3 "srun --mpi=pmix" $? &&
    [ "$(wc -l <"$work/err")" -eq 1 ] || say "expected one line"; }
other_task() {
    task SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=1 "$@"
    [ $? -eq 3 ] && [ ! -s "$work/err" ] || say "task 1 printed a message or has a different exit code"
}
check "a task of srun that MPI does not recognize" first_task SLURM_JOB_ID=5 SLURM_JOBID=5 SLURM_STEPID=0
check "a task of srun that MPI starts as a single rank" first_task PMI_RANK=0
check "the other tasks print nothing" other_task SLURM_JOB_ID=5 SLURM_JOBID=5 SLURM_STEPID=0
check "other tasks that MPI starts as single ranks print nothing" other_task PMI_RANK=1
check "a shell inside an allocation may train on one rank" task SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0
# torchrun and the mpiexec of another MPI library start processes that this MPI library cannot
# connect.
alone() { # TEXT VARIABLES...
    task "${@:2}"
    error_names 3 "$1" $? && [ "$(wc -l <"$work/err")" -eq 1 ] || say "expected one line"
}
silent() {
    task "$@"
    [ $? -eq 3 ] && [ ! -s "$work/err" ] || say "process 1 printed a message or has a different exit code"
}
check "a process of torchrun" alone "torchrun started 4 processes" TORCHELASTIC_RUN_ID=none WORLD_SIZE=4 \
    RANK=0
check "other processes of torchrun print nothing" silent TORCHELASTIC_RUN_ID=none WORLD_SIZE=4 RANK=3
check "a single process of torchrun may train" task TORCHELASTIC_RUN_ID=none WORLD_SIZE=1 RANK=0
check "WORLD_SIZE alone does not imply torchrun" task WORLD_SIZE=4 RANK=0
check "a process of mpiexec of another MPI library" alone "mpiexec started 4 processes" PMI_RANK=0 PMI_SIZE=4
check "other processes of mpiexec print nothing" silent PMI_RANK=1 PMI_SIZE=4
check "a single process of mpiexec may train" task PMI_RANK=0 PMI_SIZE=1
inside() { TORCHELASTIC_RUN_ID=none WORLD_SIZE=4 RANK=0 PMI_RANK=0 PMI_SIZE=4 trains 1 --train-iters 3; }
check "an mpirun inside such a process may train" inside
finish
