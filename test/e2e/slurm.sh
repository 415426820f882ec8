#!/usr/bin/env bash
# Runs on real Slurm if srun supports PMIx; skipped otherwise. An srun job trains like an mpirun
# job, a signal saves, and tasks that do not join MPI are refused. train_scripts.sh tests the batch
# files with stubs for Slurm.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2317 # check calls the functions
export TMPDIR=${BUILD:-build} # a directory visible to the nodes
case $TMPDIR in /*) ;; *) TMPDIR=$(cd "$(dirname "$0")/../.." && pwd)/$TMPDIR ;; esac
. "$(dirname "$0")/../lib.sh"
if ! timeout 30 srun --mpi=list 2>&1 | grep -qw pmix ||
    ! timeout 60 srun --quiet -n 4 --overcommit true >/dev/null 2>&1; then
    skip "training under srun" "needs Slurm with PMIx and four tasks"
    finish
fi
make_shard text 400 5
data=$work/text_text_document
run=(--gpus-per-node 2 "${paper[@]}")
tasks() { # SRUN-FLAGS... -- TRAINER-FLAGS...
    local flags=()
    while [ "$1" != -- ]; do flags+=("$1"); shift; done
    shift
    timeout -k 5 "$LIMIT" srun -N 1 -n 4 --overcommit "${flags[@]}" "$BUILD/train_gpt_cpu" "${model[@]}" \
        "${batch[@]}" --data-path "$data" "$@" >"$work/out" 2>"$work/err" </dev/null
}
trains_alike() {
    logged mpirun 4 "${run[@]}" || return 1
    tasks --mpi=pmix -- "${run[@]}" --log-jsonl "$work/srun.jsonl" ||
        { say "srun ended with exit code $?"; return 1; }
    same_training mpirun srun
}
check "srun trains like mpirun" trains_alike
signaled() {
    local rc=0 name=sdp4bit-test-$$
    tasks --mpi=pmix --job-name="$name" -- "${run[@]}" --train-iters 100000 --lr-decay-iters 100 \
        --log-jsonl "$work/signal.jsonl" --save "$work/save" --save-interval 50000 &
    job=$!
    wait_for_iteration signal 20
    scancel --signal=USR1 --name="$name"
    wait "$job" || rc=$?
    [ "$rc" = 75 ] && [ -s "$work/save/latest_checkpointed_iteration.txt" ] ||
        say "exit code $rc, or nothing saved"
}
check "SIGUSR1 to a task of srun saves" signaled
refused_once() {
    local rc=0
    tasks --mpi=none -- "${run[@]}" || rc=$?
    [ "$rc" = 3 ] && [ "$(grep -c '^error: srun started 4 tasks' "$work/err")" = 1 ] &&
        ! grep -qi 'PMI support\|OPAL' "$work/err" || say "exit code $rc"
}
check "tasks that do not join MPI are refused with one line" refused_once
finish
