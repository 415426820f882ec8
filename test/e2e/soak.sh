#!/usr/bin/env bash
# Long runs whose ranks are killed, stopped and signaled, and which scripts/run_until_done.sh
# restarts. Losses and checkpoints are bitwise identical to an undisturbed run, and memory does not
# grow. Without arguments (as in scripts/test.sh) the test is short and uses CPU ranks; LONG=1 runs
# 1000 steps and three minutes. With arguments it runs for a given time, on CPU ranks or GPUs:
#
#   test/e2e/soak.sh [--gpu] [--ranks 4] [--minutes 10] [--kill-every 60] [--seed 1] [--apart]
#       [--flags "FLAGS"]
#
#   gpu         runs $BUILD/train_gpt, prebuilt or built by make gpu; needs nvidia-smi and as many
#               GPUs as ranks
#   ranks       number of ranks of each of the two jobs [4; on GPUs 2]
#   minutes     training time of both jobs; then the slower one catches up, which takes as long as
#               its restarts did (about 15 s each on GPUs)
#   kill-every  seconds between SIGKILLs to a random rank; each one waits until there is a new
#               checkpoint
#   seed        seed of the random choices
#   apart       runs the undisturbed job after the disturbed one instead of at the same time on the
#               same devices: takes up to twice as long and does not check memory
#   flags       additional flags of the trainer, for both jobs
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2034,SC2054,SC2317 # check calls the functions
gpu=0 np='' minutes='' kill_every=60 seed=1 apart=0 more=() timed=$(($# > 0))
wrong() { echo "error: $1; see the comment at the top of test/e2e/soak.sh" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in --gpu | --apart) ;; *) [ $# -ge 2 ] || wrong "$1 needs a value" ;; esac
    case $1 in
    --gpu) gpu=1 ;;
    --apart) apart=1 ;;
    --ranks) np=$2; shift ;;
    --minutes) minutes=$2; shift ;;
    --kill-every) kill_every=$2; shift ;;
    --seed) seed=$2; shift ;;
    --flags) read -ra more <<<"$2"; shift ;;
    *) wrong "unknown argument $1" ;;
    esac
    shift
done
if [ $gpu = 1 ]; then np=${np:-2} trainer=${BUILD:-build}/train_gpt; else np=${np:-4}; fi
if [ $timed = 1 ]; then minutes=${minutes:-10}; elif [ -n "${LONG:-}" ]; then minutes=3 kill_every=15; else \
    minutes=0.35 kill_every=6; fi
[[ $np =~ ^[1-9][0-9]*$ && $kill_every =~ ^[1-9][0-9]*$ && $seed =~ ^[0-9]+$ ]] ||
    wrong "--ranks, --kill-every and --seed need integers"
[[ $minutes =~ ^[0-9]*\.?[0-9]+$ ]] || wrong "--minutes needs a number"
. "$(dirname "$0")/../lib.sh"
# Cleanup must kill the restart script before the ranks, or the script would restart them.
hurt=''
trap '[ -z "$hurt" ] || kill -KILL "$hurt" 2>/dev/null; cleanup' EXIT

# --- by step: every kind of disturbance ------------------------------------------------------
if [ -n "${LONG:-}" ]; then steps=1000 every=50 LIMIT=3000; else steps=90 every=30; fi
run=(--gpus-per-node 2 --lr-decay-iters 2000 --hidden-dropout 0.1 --attention-dropout 0.1 --eval-interval 25 \
    --verify-replicas-interval 10)
# Slow steps, so that disturbances hit the run.
slow=(--hidden-size 128 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 \
    --global-batch-size 16)
# disturb NAME: kills, stops or signals one rank every $every iterations, with ranks and methods in
# turn. A stopped rank is detected after --distributed-timeout-minutes.
disturb() {
    local means=(KILL USR1 KILL STOP) at n=0 pid
    for ((at = every / 2; at < steps; at += every)); do
        wait_for_iteration "$1" "$at" || return 1
        pid=$(rank_pids $((n % 4)))
        [ -z "$pid" ] || kill -s "${means[n % 4]}" "$pid" 2>/dev/null
        n=$((n + 1))
        # Waits until the run has resumed before the next disturbance.
        while [ -n "$pid" ] && [ -e "/proc/$pid" ] && kill -0 "$job" 2>/dev/null; do sleep 0.1; done
    done
}
# every_line_once NAME: prints the job's train lines without repetitions and checks that repeated
# iterations have byte-identical lines.
every_line_once() {
    train_lines "$1" | sort -u | sort -s -t : -k 3,3n
}
# equal LEFT RIGHT ITERATION: checks that both jobs have the same lines up to this iteration and the
# same checkpoint at it.
equal() {
    every_line_once "$1" >"$work/left"
    every_line_once "$2" >"$work/right"
    [ "$(wc -l <"$work/right")" = "$3" ] ||
        { why="$(wc -l <"$work/right") different lines instead of $3"; return 1; }
    cmp -s "$work/left" "$work/right" ||
        { why="losses differ: $(diff "$work/left" "$work/right" | sed -n 2p)"; return 1; }
    same_shards "$work/$1" "$work/$2" "$3" "$np"
}
soak() { # NAME FLAGS...
    local name=$1 rc killer
    shift
    rm -rf "${work:?}/hurt.jsonl" "${work:?}/hurt"
    logged "$name" 4 "${run[@]}" "${slow[@]}" --train-iters $steps --save "$work/$name" \
        --save-interval $steps "$@" || return 1
    timeout -k 5 "$LIMIT" scripts/run_until_done.sh --pause 0 -- "${launcher[@]}" -np 4 "$trainer" \
        "${model[@]}" "${batch[@]}" --data-path "$data" \
        "${run[@]}" "${slow[@]}" --train-iters $steps --save "$work/hurt" --load "$work/hurt" \
        --save-interval 7 --async-save --keep-last-checkpoints 2 \
        --distributed-timeout-minutes 0.04 --log-jsonl "$work/hurt.jsonl" "$@" >"$work/out" 2>"$work/err" \
        </dev/null &
    job=$!
    disturb hurt &
    killer=$!
    wait "$job"
    rc=$?
    wait $killer
    [ $rc = 0 ] || { say "the disturbed run ended with $rc after: $(grep -c 'restart' "$work/err") restarts"; return 1; }
    [ "$(grep -c '; restart' "$work/err")" -ge $((steps / every)) ] ||
        { why="only $(grep -c '; restart' "$work/err") restarts, expected $((steps / every))"; return 1; }
    equal "$name" hurt $steps || return 1
    echo "# $name: $(grep -c '; restart' "$work/err") restarts, $(train_lines hurt | wc -l) iterations for $steps"
}
if [ $timed = 0 ]; then
    make_shard text 400 9
    data=$work/text_text_document
    check "SDP4Bit: killed, stopped and resumed, $steps bitwise identical steps" soak sdp4bit "${paper[@]}"
    [ -z "${LONG:-}" ] || check "baseline: killed, stopped and resumed, $steps bitwise identical steps" soak baseline
fi

# --- by time: two jobs, one of them killed repeatedly ----------------------------------------
long=("${model[@]}" "${batch[@]}" "${run[@]}" --train-iters 300000 --lr 3e-4 --min-lr 3e-5 \
    --lr-decay-iters 20000 --eval-interval 200 --verify-replicas-interval 50
    --timing-log-level 2 --log-interval 20 --mock-data --split 90,5,5 --save-interval 50 --async-save \
        --keep-last-checkpoints 2 "${paper[@]}")
every_seconds=1 # interval of memory samples
if [ $gpu = 1 ]; then
    # The jobs share the GPUs, and for each message the time slices of a job must coincide on all of
    # them. So the model has few layers, which means few messages.
    long+=(--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \
        --max-position-embeddings 256 --micro-batch-size 2 --global-batch-size $((4 * np))
        --tokenizer-type NullTokenizer --vocab-size 1000 --ddp-bucket-size 2000000 --deterministic-mode \
            --gpus-per-node "$np" --save-interval 300 --log-interval 100 --eval-interval 500)
    every_seconds=3
fi
[ -z "${LONG:-}" ] || every_seconds=3
# Both jobs share the machine's cores.
mpi=("${launcher[@]}" --bind-to none -np "$np")
command -v ssh rsh >/dev/null || export OMPI_MCA_plm="${OMPI_MCA_plm-isolated}"
export OMPI_MCA_btl_vader_single_copy_mechanism="${OMPI_MCA_btl_vader_single_copy_mechanism-none}"

start_job() { # NAME again|once FLAGS...: sets $job
    local name=$1 before=()
    [ "$2" = once ] || before=(scripts/run_until_done.sh --pause 0 --max-restarts 100000 --)
    shift 2
    SDP4BIT_TEST_JOB=$name ${before[@]+"${before[@]}"} "${mpi[@]}" "$trainer" "${long[@]}" \
        ${more[@]+"${more[@]}"} --save "$work/$name" --load "$work/$name" \
        --log-jsonl "$work/$name.jsonl" "$@" >>"$work/$name.out" 2>>"$work/$name.err" </dev/null &
    job=$!
}
job_pids() { # NAME [RANK]
    local ours=()
    mapfile -t ours < <(rank_pids ${2:+"$2"})
    [ ${#ours[@]} -eq 0 ] || grep -lzxF "SDP4BIT_TEST_JOB=$1" "${ours[@]/*/\/proc\/&\/environ}" 2>/dev/null |
        sed 's|/proc/||; s|/environ||'
}
saved() { cat "$work/$1/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }
# await PID SECONDS WHAT: waits for the process and sets $rc to its exit code. Kills the process
# after SECONDS and then fails.
await() {
    local until=$((SECONDS + $2))
    while kill -0 "$1" 2>/dev/null; do
        [ $SECONDS -lt $until ] ||
            { kill -KILL "$1"; wait "$1" 2>/dev/null; why="$3 did not end within $2 s"; return 1; }
        sleep 0.1
    done
    wait "$1"
    rc=$?
}
# resident NAME: prints the ranks' private memory in KiB and its peak. The first value excludes
# MPI's shared segment, whose fixed size becomes resident only gradually; the peak includes it.
resident() {
    local pid files=()
    for pid in $(job_pids "$1"); do files+=("/proc/$pid/status"); done
    [ ${#files[@]} = "$np" ] &&
        awk '/^Rss(Anon|File)/ { sum += $2 } /^VmHWM/ { peak += $2 } END { print sum + 0, peak + 0 }' \
        "${files[@]}" 2>/dev/null
}
# gpu_memory NAME: prints the MiB that the ranks use on the GPUs in CUDA_VISIBLE_DEVICES. Counts all
# processes if the driver does not know the ranks' process ids (in containers).
gpu_memory() {
    local sum mine=()
    [ $gpu = 0 ] && return
    [ -z "${CUDA_VISIBLE_DEVICES:-}" ] || mine=(-i "$CUDA_VISIBLE_DEVICES")
    sum=$(nvidia-smi ${mine[@]+"${mine[@]}"} --query-compute-apps=pid,used_gpu_memory \
        --format=csv,noheader,nounits |
        awk -F ', ' -v pids=" $(job_pids "$1" | tr '\n' ' ')" \
        'index(pids, " " $1 " ") { sum += $2 } END { print sum + 0 }')
    [ "$sum" -gt 0 ] || sum=$(nvidia-smi ${mine[@]+"${mine[@]}"} --query-gpu=memory.used \
        --format=csv,noheader,nounits | awk '{ sum += $1 } END { print sum + 0 }')
    echo "$sum"
}
enough() { [ $looks -ge 8 ] && [ $kills -ge 1 ] && [ $kills -ge $((seconds / kill_every / 2)) ]; }
# Samples the memory of job NAME and kills ranks of the disturbed job until the time is up. A slow
# machine gets more time, until there are enough samples and kills.
watch_and_kill() { # NAME PID SECONDS
    local name=$1 watched=$2 end=$((SECONDS + ($3 + 0))) next=$((SECONDS + kill_every)) before figures pid \
        looks=0
    before=$(saved hurt)
    RANDOM=$seed
    : >"$work/memory"
    while [ $SECONDS -lt $end ] || { [ $SECONDS -lt $((end + LIMIT)) ] && ! enough; }; do
        sleep $every_seconds
        kill -0 "$hurt" 2>/dev/null && kill -0 "$watched" 2>/dev/null ||
            { why="a job has ended early: $(grep -hm 1 '^error\|giving up' "$work"/{calm,hurt}.err "$work"/{calm,hurt}.out)"; return 1; }
        if figures=$(resident "$name") && [ "$(saved "$name")" != 0 ]; then
            echo "$figures $(gpu_memory "$name")" >>"$work/memory"
            looks=$((looks + 1))
        fi
        if [ $SECONDS -ge $next ] && [ "$(saved hurt)" != "$before" ]; then
            pid=$(job_pids hurt $((RANDOM % np)))
            if [ -n "$pid" ] && kill -KILL "$pid" 2>/dev/null; then
                kills=$((kills + 1)) next=$((SECONDS + kill_every)) before=$(saved hurt)
            fi
        fi
    done
    # The disturbed job must have resumed before it can be stopped.
    end=$((SECONDS + LIMIT))
    while [ "$(saved hurt)" = "$before" ]; do
        [ $SECONDS -lt $end ] || { why="no checkpoint within $LIMIT s after a kill"; return 1; }
        sleep 0.2
    done
}
# Both jobs are stopped. The slower one continues to the iteration of the faster one.
catch_up() { # CALM HURT: iterations
    local slower=hurt at=$1
    [ "$1" = "$2" ] && return
    [ "$1" -gt "$2" ] || slower=calm at=$2
    start_job $slower once --exit-interval "$at"
    await "$job" $((600 + ${minutes%.*}0 * 12)) "the job that catches up" || return 1
    [ $rc = 0 ] && [ "$(saved $slower)" = "$at" ] ||
        { why="catching up ended with $rc at $(saved $slower) instead of $at: $(grep -hm 1 '^error' "$work/$slower.err")"; return 1; }
}
by_the_clock() {
    local rc kills=0 calm='' seconds since=$SECONDS lines
    seconds=$(awk -v m="$minutes" 'BEGIN { printf "%d", 60 * m + 0.5 }')
    rm -rf "$work"/calm* "$work"/hurt*
    mkdir -p "$work/calm" "$work/hurt"
    start_job hurt again
    hurt=$job
    if [ $apart = 0 ]; then start_job calm once; calm=$job; fi
    if ! watch_and_kill "$([ $apart = 0 ] && echo calm || echo hurt)" "${calm:-$hurt}" "$seconds"; then
        kill -TERM $hurt ${calm:+"$calm"} 2>/dev/null
        return 1
    fi
    # Signals the script, which forwards the signal. Not every mpirun would.
    kill -TERM "$hurt"
    [ -z "$calm" ] || kill -USR1 "$(job_pids calm 0)"
    await "$hurt" "$LIMIT" "the disturbed job" || return 1
    hurt=
    [ "$rc" = 75 ] || { why="the disturbed job ended with $rc instead of 75: $(grep -hm 1 '^error' "$work/hurt.err")"; return 1; }
    if [ -n "$calm" ]; then
        await "$calm" "$LIMIT" "the undisturbed job" || return 1
        [ "$rc" = 75 ] || { why="the undisturbed job ended with $rc instead of 75: $(grep -hm 1 '^error' "$work/calm.err")"; return 1; }
    fi
    local stopped=$((SECONDS - since)) at_calm at_hurt restarts
    at_calm=$(saved calm) at_hurt=$(saved hurt)
    catch_up "$at_calm" "$at_hurt" || return 1
    restarts=$(grep -c '; restart' "$work/hurt.err") lines=$(train_lines hurt | wc -l)
    echo "# $kills kills, $restarts restarts; after $stopped s undisturbed at $at_calm, disturbed at $at_hurt; $(saved hurt) iterations compared, of which the disturbed job computed $((lines - $(saved hurt))) twice; $((SECONDS - since)) s in all"
    [ $kills -ge 1 ] && [ $kills -ge $((seconds / kill_every / 2)) ] && [ "$restarts" -ge $kills ] ||
        { why="$kills kills and $restarts restarts in $seconds s"; return 1; }
    equal calm hurt "$(saved calm)"
}
# Compares the maximum of the last quarter of the samples with the second quarter's. The margin of 1
# % covers pages that libraries touch late. On GPUs, where the memory of both jobs is counted in
# units of 2 MiB, it also covers the other job. A leak in every step would exceed it many times.
flat() {
    local n first last what unit
    n=$(wc -l <"$work/memory" 2>/dev/null)
    [ "${n:-0}" -ge 8 ] || { why="memory was sampled only ${n:-0} times"; return 1; }
    for what in 1:KiB 3:MiB; do
        unit=${what#*:} what=${what%:*}
        first=$(awk -v k="$what" -v n="$n" \
            'NR > n / 4 && NR <= n / 2 && $k > most { most = $k } END { print most + 0 }' "$work/memory")
        last=$(awk -v k="$what" -v n="$n" 'NR > n - n / 4 && $k > most { most = $k } END { print most + 0 }' \
            "$work/memory")
        if [ "$what" = 3 ] && [ $gpu = 0 ]; then continue; fi
        echo "# $([ "$what" = 1 ] && echo "resident memory of $np ranks" || echo "memory of the GPUs"): $first $unit, at the end $last $unit; $n samples"
        [ "$first" -gt 100 ] && [ $((last - first)) -le $((first / 100)) ] ||
            { why="it grew from $first to $last $unit"; return 1; }
    done
    echo "# peak of the ranks' resident memory, MPI's shared segment included: $(awk 'END { print $2 }' "$work/memory") KiB"
}
check "SDP4Bit: a rank killed every $kill_every s for $minutes minutes, bitwise identical losses and checkpoints" \
    by_the_clock
# Checks the undisturbed job, because every restart frees the memory of the other one.
[ $apart = 1 ] || check "the undisturbed job's memory stays flat" flat
finish
