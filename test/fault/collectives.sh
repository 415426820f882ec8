#!/usr/bin/env bash
# MPI calls that fail on one rank (mpi_shim.c): the run ends with exit code 7 and one line, never
# with a wrong result. By default tests failures of the first, the middle and the last call of each
# function, with LONG=1 of every call.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the
# functions
. "$(dirname "$0")/../lib.sh"
shim=$BUILD/test/fault/mpi_shim.so
if [ ! -e "$shim" ]; then
    not_ok "$shim" "not built; run make BUILD=$BUILD test-programs"
    finish
fi
if ldd "$BUILD/train_gpt_cpu" | grep -q libasan; then
    skip "collectives that fail" "sanitizer libraries must be loaded first"
    finish
fi
make_shard text 400 1
data=$work/text_text_document
# Uses all features that call collectives in a few iterations.
busy=(--gpus-per-node 1 --train-iters 4 --log-interval 2 --log-params-norm --log-num-zeros-in-grad \
    --log-quantization-error-interval 2 --verify-replicas-interval 2
    --verify-wire --timing-log-level 2 --eval-interval 2 --eval-iters 1 --save "$work/save" \
        --save-interval 2 --load "$work/save" "${paper[@]}")

# with_fault CALL AT [FLAGS...]: runs with a failure of rank 1's AT-th call of this function.
with_fault() {
    rm -rf "$work/save" "$work/count"
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np 2 env LD_PRELOAD="$shim" MPI_FAULT_RANK=1 MPI_FAULT_CALL="$1" \
        MPI_FAULT_AT="$2" MPI_FAULT_COUNT="$work/count" \
        "$BUILD/train_gpt_cpu" "${model[@]}" "${batch[@]}" --data-path "$data" "${busy[@]}" "${@:3}" \
        >"$work/out" 2>"$work/err" </dev/null
}
undisturbed() { with_fault none 0 && [ -s "$work/count" ] ||
    say "a run without failures ends with $?"; }
check "a run without failures" undisturbed
cp "$work/count" "$work/calls" 2>/dev/null || finish

ends() { # CALL AT
    with_fault "$1" "$2"
    error_names 7 "over MPI failed: " $? || { why="$1 $2: $why"; return 1; }
    [ "$2" != 1 ] || echo "# $1: $(grep -m 1 '^error: ' "$work/err")"
}
each() { # CALL COUNT
    local at places
    if [ -n "${LONG:-}" ]; then mapfile -t places < <(seq "$2"); else mapfile -t places < \
        <(printf '%d\n' 1 $((($2 + 1) / 2)) "$2" | sort -nu); fi
    for at in "${places[@]}"; do ends "$1" "$at" || return 1; done
}
while read -r call count <&3; do
    # The number of polls varies between runs, so a run may not reach the last one.
    if [ "$call" = MPI_Test ]; then count=$((count < 200 ? count / 2 : 100)); fi
    check "$call fails on one of two ranks" each "$call" "$count"
done 3<"$work/calls"
# Ranks in separate PID namespaces imitate two hosts, whose process ids cannot be compared. A
# waiting rank must still notice that the other one is stopped. (An inner shell starts the trainer,
# because the first process of a namespace cannot stop itself.)
on_two_hosts() { # CALL AT FLAGS...: rank 1 stops at call AT
    OMPI_MCA_btl=tcp,self MPI_FAULT_RANK=1 MPI_FAULT_CALL="$1" MPI_FAULT_AT="$2" MPI_FAULT_STOP=1 timeout \
        -k 5 "$LIMIT" "${launcher[@]}" -np 2 \
        sh -c 'if [ "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}" = 0 ]; then exec "$@"; fi; exec unshare -p -f --mount-proc sh -c '"'"'LD_PRELOAD=$0 "$@"; exit $?'"'"' "$0" "$@"' \
        "$shim" "$BUILD/train_gpt_cpu" "${model[@]}" "${batch[@]}" --data-path "$data" "${@:3}" >"$work/out" \
        2>"$work/err" </dev/null
}
stopped_on_another_host() { # CALL AT FLAGS...
    on_two_hosts "$1" 0 --train-iters 4 "${@:3}" ||
        { say "a run without a stop ends with $?"; return 1; }
    on_two_hosts "$1" "$2" --train-iters 4 --distributed-timeout-minutes 0.05 "${@:3}"
    error_names 7 "waited" $?
}
# Stops a rank while checkpoint files are hashed, when ranks that have finished wait for slower
# ones.
stopped_in_loading() {
    local at
    rm -rf "$work/save"
    on_two_hosts none 0 --train-iters 4 --save "$work/save" --save-interval 4 ||
        { say "the run that saves ends with $?"; return 1; }
    for at in 11 12 13; do
        on_two_hosts MPI_Iallreduce "$at" --train-iters 4 --distributed-timeout-minutes 0.05 \
            --load "$work/save"
        # The message varies with the time of the stop, but always says that a rank waited.
        error_names 7 "waited" $? || { why="call $at: $why"; return 1; }
    done
}
if unshare -p -f --mount-proc true 2>/dev/null; then
    check "a rank on another host stops while communicators are created" stopped_on_another_host MPI_Comm_idup 1
    check "a rank on another host stops while a checkpoint is opened" stopped_in_loading
else skip "a rank on another host stops" "no PID namespaces for this user"; fi
for call in MPI_Comm_split MPI_Comm_split_type MPI_Comm_idup MPI_Ibarrier MPI_Ibcast MPI_Iallreduce \
    MPI_Iallgather MPI_Igatherv MPI_Test; do
    check "the run calls $call" grep -q "^$call " "$work/calls"
done
finish
