# shellcheck shell=bash
# Scripts use the variables set here, some functions take an optional argument, and in "A && B || C"
# B cannot fail.
# shellcheck disable=SC2034,SC2054,SC2119,SC2120,SC2015
# Shared by test/e2e/*.sh and test/fault/*.sh, which run the real programs on small shards of
# generated text. BUILD (default: build) is the directory of the programs; LONG=1 enables the longer
# tests. DEVICE=gpu runs build/train_gpt on this machine's GPUs, with emulated nodes, in the scripts
# listed in test/gpu.sh. For result lines see test/results.sh.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source-path=SCRIPTDIR source=results.sh
. test/results.sh
BUILD=${BUILD:-build}
case $BUILD in /*) ;; *) BUILD=$PWD/$BUILD ;; esac
export LC_ALL=C OPENBLAS_NUM_THREADS=1
work=$(mktemp -d) || exit 1
data= # prefix of the shard used by train

# Kills ranks that a test left running (their environment contains this script's directory) and
# removes the directory.
export SDP4BIT_TEST_FOLDER=$work
cleanup() {
    local pid
    for pid in $(rank_pids); do kill -KILL "$pid" 2>/dev/null; done
    if [ "${KEEP:-0}" = 1 ]; then echo "# kept $work"; else rm -rf "$work"; fi
}
trap cleanup EXIT
trap 'exit 1' HUP INT TERM

grep() { command grep -a "$@"; }  # mpirun of Open MPI 5 writes NUL bytes between its lines

# ---- results --------------------------------------------------------------------------------
# same_shards DIR DIR ITERATION [RANKS]: compares the shards of one iteration's checkpoint in two
# directories byte by byte, and checks the number of shards.
same_shards() {
    local name file found=0
    name=$(printf 'iter_%07d' "$3")
    for file in "$1/$name"/mp_rank_00/*.safetensors; do
        cmp -s "$file" "$2/$name/mp_rank_00/${file##*/}" || { why="$name: ${file##*/} differs"; return 1; }
        found=$((found + 1))
    done
    [ "$found" -gt 0 ] && [ "$found" -eq "${4:-$found}" ] || { why="$found shards"; return 1; }
}
say() { # failure reason plus the first error line of the last run
    why="$1; $(grep -m 1 '^error: ' "$work/err" 2>/dev/null || tail -n 1 "$work/err" 2>/dev/null)"
    return 1
}

# A script that runs another trainer (on data that needs no preprocessing) sets $trainer before it
# sources this file. GPU runs are reproducible only in deterministic mode. Emulated nodes need their
# size: all ranks are one node unless later flags say otherwise.
device=()
if [ "${DEVICE:-cpu}" = gpu ]; then trainer=$BUILD/train_gpt device=(--deterministic-mode --emulate-nodes); fi
trainer=${trainer:-$BUILD/train_gpt_cpu}
if [ ! -x "$trainer" ] || { [ "$trainer" = "$BUILD/train_gpt_cpu" ] &&
    [ ! -x "$BUILD/preprocess_data" ]; }; then
    not_ok "programs in $BUILD" "not built; run make BUILD=$BUILD"
    finish
fi

# ---- data -----------------------------------------------------------------------------------
# make_text FILE DOCUMENTS SEED: writes JSON lines, identical on every machine. Words follow a loose
# order, so that a small model learns quickly.
make_text() {
    awk -v documents="$2" -v seed="$3" 'BEGIN {
        count = split("the quick brown fox jumps over a lazy dog while seven wizards brew tea and count gradients by node", word, " ")
        for (i = 0; i < documents; i++) {
            text = ""
            length_of_text = 5 + draw(40)
            for (j = 0; j < length_of_text; j++) text = text word[1 + draw(count)] " "
            print "{\"text\": \"" text "\"}"
        }
    }
    # A small linear congruential generator, because srand() differs between awk implementations.
    function draw(n) { seed = (seed * 1103 + 12345) % 65536; return int(seed * n / 65536) }' >"$1"
}
# make_shard NAME DOCUMENTS SEED: writes $work/NAME_text_document.bin and .idx with byte tokens.
make_shard() {
    make_text "$work/$1.jsonl" "$2" "$3"
    "$BUILD/preprocess_data" --input "$work/$1.jsonl" --tokenizer-type Byte --append-eod --workers 1 \
        --output-prefix "$work/$1" >/dev/null 2>"$work/err" && return
    not_ok "make shard $1" "$(tail -n 1 "$work/err")"
    finish
}

# ---- running --------------------------------------------------------------------------------
# A model small enough that start-up dominates a run. Later flags win, so tests append their own.
model=(--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 \
    --make-vocab-size-divisible-by 8
    --tokenizer-type Byte --bf16 --use-distributed-optimizer)
batch=(--micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine \
    --lr-warmup-iters 2 --train-iters 12
    --log-interval 1 --eval-interval 1000 --eval-iters 1 --split 90,5,5 --hidden-dropout 0 \
        --attention-dropout 0)
# SDP4Bit as in the paper. Unlike the default flags it uses groups of 128 inside a node and rounds
# weights stochastically.
paper=(--quantized-weights --weight-quantization-bits 4 --wq-group-size 2048 --wq-rounding stochastic
    --quantized-gradients --gradient-quantization-bits-inter 4 --gq-group-size-inter 128
    --gradient-quantization-bits-intra 8 --gq-group-size-intra 128 --hadamard-transform)
launcher=(mpirun --oversubscribe)
# Suppresses the banner about failed ranks. Open MPI 5 does not have the flag.
mpirun --version 2>/dev/null | grep -q 'Open MPI) 4' && launcher+=(-q)
[ "$(id -u)" -eq 0 ] && launcher+=(--allow-run-as-root)

# A run that takes longer than LIMIT seconds is considered hung and ends with 124. Most take less
# than a second, but no test may depend on an idle machine.
LIMIT=${LIMIT:-300}

# wait_until COMMAND...: retries the command until it succeeds. Fails if the background run ($job,
# if set) has ended or the time limit has passed.
wait_until() {
    local end=$((SECONDS + LIMIT))
    until "$@"; do
        [ $SECONDS -lt $end ] && kill -0 "${job:-$$}" 2>/dev/null || return 1
        sleep 0.02
    done
}

# ranks NP FLAGS...: runs the trainer with exactly these flags. Output goes to $work/out and
# $work/err; returns its exit code.
ranks() {
    local np=$1
    shift
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np "$np" "$trainer" \
        ${device[@]+"${device[@]}" --gpus-per-node "$np"} "$@" \
        >"$work/out" 2>"$work/err" </dev/null
}
# train NP FLAGS...: trains the small model on $data.
train() {
    local np=$1
    shift
    ranks "$np" "${model[@]}" "${batch[@]}" --data-path "$data" "$@"
}
# trains NP FLAGS...: like train, and sets $why if the exit code is not 0.
trains() {
    train "$@"
    local rc=$?
    [ $rc -eq 0 ] || say "np $* ended with exit code $rc"
}
# logged NAME NP FLAGS...: trains and logs JSON lines to a fresh $work/NAME.jsonl.
logged() {
    local log=$work/$1.jsonl
    shift
    rm -f "$log"
    trains "$@" --log-jsonl "$log"
}
# equal_ranks: checks that --verify-replicas-interval repaired nothing in the last run of trains.
equal_ranks() { ! grep -q 'repaired' "$work/out" || { why=$(grep -m 1 repaired "$work/out"); return 1; }; }
# same_kernels: makes CPU ranks use the same matrix kernels on every machine. OpenBLAS selects
# kernels by CPU model, and kernels differ in rounding. Haswell is the oldest CPU the programs
# support.
same_kernels() { export OPENBLAS_CORETYPE=Haswell; }
# in_background NAME NP FLAGS...: starts a run that logs to $work/NAME.jsonl, and sets $job to its
# process id, for which the caller waits.
in_background() {
    local log=$work/$1.jsonl np=$2
    shift 2
    rm -f "$log"
    : >"$work/out"  # truncated before the job starts, so that wait_until cannot match old lines
    : >"$work/err"
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np "$np" "$trainer" \
        ${device[@]+"${device[@]}" --gpus-per-node "$np"} "${model[@]}" "${batch[@]}" \
        --data-path "$data" --log-jsonl "$log" "$@" >"$work/out" 2>"$work/err" </dev/null &
    job=$!
}
shim=$BUILD/test/fault/shim.so
# slow_disk: runs COMMAND with a delay of MILLISECONDS before every fsync of rank RANK.
slow_disk() { # MILLISECONDS RANK COMMAND...
    local before=("${launcher[@]}") rc
    launcher+=(-x LD_PRELOAD="$shim" -x SHIM_SLOW_MS="$1" -x SHIM_RANK="$2" -x SHIM_FOLDER="$work/" -x
        SHIM_AT=0)
    "${@:3}"
    rc=$?
    launcher=("${before[@]}")
    return $rc
}
# rank_pids [RANK]: prints the process ids of this script's running ranks, or of one rank.
rank_pids() {
    local ours=()
    mapfile -t ours < <(grep -lzxF "SDP4BIT_TEST_FOLDER=$work" /proc/[0-9]*/environ 2>/dev/null)
    [ ${#ours[@]} -eq 0 ] || grep -lzx "OMPI_COMM_WORLD_RANK=${1:-[0-9]*}" "${ours[@]}" 2>/dev/null |
        sed 's|/proc/||; s|/environ||'
}
# wait_for_iteration NAME ITERATION: waits until $work/NAME.jsonl contains the iteration.
wait_for_iteration() { wait_until grep -qs "\"kind\":\"train\",\"iteration\":$2," "$work/$1.jsonl"; }
# launcher_pid: prints the process id of the mpirun that in_background started (the only child of
# timeout).
launcher_pid() { grep -lsx "PPid:[[:space:]]*$job" /proc/[0-9]*/status | sed 's|/proc/||; s|/status||'; }
# running_pids [RANK]: like rank_pids, but only ranks of the background run (children of its
# mpirun). Processes of an earlier run may still exist with the same environment: mpirun does not
# wait for ranks it has killed, and a driver can delay their exit.
running_pids() {
    local launcher pid
    launcher=$(launcher_pid)
    for pid in $(rank_pids "${1:-}"); do
        if grep -qsx "PPid:[[:space:]]*${launcher:-none}" "/proc/$pid/status"; then echo "$pid"; fi
    done
}
# signal_rank SIGNAL RANK: signals one rank of the background run, or mpirun if RANK is "mpirun".
# Ends the run and fails unless there is exactly one such process.
signal_rank() {
    local pids
    mapfile -t pids < <(if [ "$2" = mpirun ]; then launcher_pid; else running_pids "$2"; fi)
    if [ ${#pids[@]} -eq 1 ] && kill -s "$1" "${pids[0]}"; then return; fi
    why="SIG$1 could not be sent: ${#pids[@]} processes are ${2/#[0-9]/rank &}"
    kill "$job"
    wait "$job"
    return 1
}
# job_ended NAME: waits for the background run and returns its exit code. Calls describe once half
# of the time limit has passed, because timeout may soon kill the run.
job_ended() {
    local until=$((SECONDS + LIMIT / 2))
    while kill -0 "$job" 2>/dev/null && [ $SECONDS -lt $until ]; do sleep 0.05; done
    if kill -0 "$job" 2>/dev/null; then describe "$1"; fi
    wait "$job"
}
# describe NAME: prints "# ..." lines that show what mpirun and the ranks are waiting for, their
# pending signals (mask 200: SIGUSR1, 2: SIGINT, 4000: SIGTERM), and whether iterations advance.
describe() {
    local pid before
    before=$(field "$1" loss | tail -n 1 | cut -d ' ' -f 1)
    echo "# $1 has not ended after $((LIMIT / 2)) s; mpirun is ${job:+$(launcher_pid)}"
    for pid in $(launcher_pid) $(rank_pids); do
        echo "# $pid $({ grep -E '^(Name|State|PPid|Threads|SigPnd|ShdPnd|SigBlk|SigIgn|SigCgt):' "/proc/$pid/status"; tr '\0' '\n' <"/proc/$pid/environ" | grep '^OMPI_COMM_WORLD_RANK='; } 2>/dev/null |
            tr -s '\t\n' '  ') in $(cat "/proc/$pid/wchan" 2>/dev/null)"
    done
    sleep 1
    echo "# last iteration ${before:-none}, a second later $(field "$1" loss | tail -n 1 | cut -d ' ' -f 1)"
    tail -n 3 "$work/out" "$work/err" | cut -c 1-160 | sed 's/^/# /'
}

# ---- looking at results ---------------------------------------------------------------------
# train_lines NAME [FROM]: prints the JSON lines of iterations after FROM.
train_lines() {
    awk -v from="${2:-0}" '/^{"kind":"train"/ { split($0, part, /[:,]/); if (part[4] > from) print }' \
        "$work/$1.jsonl"
}
# field NAME FIELD [KIND]: prints "iteration value" for each line of this kind (default: train).
field() {
    sed -n "s/^{\"kind\":\"${3:-train}\",\"iteration\":\([0-9]*\),.*\"$2\":\([^,}]*\)[,}].*/\1 \2/p" \
        "$work/$1.jsonl"
}
# same_training A B [FROM]: checks that the train lines are byte-identical and that there are some.
same_training() {
    train_lines "$1" "${3:-0}" >"$work/left"
    train_lines "$2" "${3:-0}" >"$work/right"
    [ -s "$work/left" ] || { why="no train lines in $1"; return 1; }
    cmp -s "$work/left" "$work/right" ||
        { why="train lines differ: $(diff "$work/left" "$work/right" | sed -n '2p')"; return 1; }
}
# same_loss A B ITERATION: compares the loss of one iteration with a tolerance for summation order.
# Different samples would change the loss by 1e-4 or more. On GPUs the tolerance is larger, because
# other shapes can select kernels that round to bf16 at other points.
same_loss() {
    local a b limit=1e-6
    [ "${DEVICE:-cpu}" = cpu ] || limit=1e-4
    a=$(field "$1" loss | sed -n "s/^$3 //p") b=$(field "$2" loss | sed -n "s/^$3 //p")
    awk -v a="$a" -v b="$b" -v limit=$limit \
        'BEGIN { d = b > 0 ? a / b - 1 : 1; exit !(d <= limit && d >= -limit) }' ||
        { why="loss of iteration $3: $a in $1, $b in $2"; return 1; }
}
# mean_loss NAME FIRST LAST: prints the mean loss of these iterations.
mean_loss() {
    field "$1" loss | awk -v first="$2" -v last="$3" \
        '$1 >= first && $1 <= last { sum += $2; n++ } END { if (n) printf "%.6f", sum / n; else print "none" }'
}
# error_names CODE TEXT RC: checks that the run ended with CODE and printed exactly one error line,
# which contains TEXT.
error_names() {
    local lines
    lines=$(grep -c '^error: ' "$work/err")
    [ "$3" -eq "$1" ] || { say "exit code $3 instead of $1"; return 1; }
    [ "$lines" -eq 1 ] ||
        { say "$lines error lines instead of one, the last: $(grep '^error: ' "$work/err" | tail -n 1)"; return 1; }
    grep '^error: ' "$work/err" | grep -qF -- "$2" || say "the error line does not contain '$2'"
}
# refused CODE TEXT NP FLAGS...: checks that the small model's run is refused with this code and
# text.
refused() {
    local code=$1 text=$2
    shift 2
    train "$@"
    error_names "$code" "$text" $?
}

# ---- plans and actual runs ----------------------------------------------------------------------
# planned ROW [RANKS_PER_NODE]: prints "inter intra", the bytes per step and node from the ROW-th
# traffic table of the --plan output in $work/plan. Default: 2 ranks per node.
planned() {
    awk -v row="$1" -v per_node="${2:-2}" '/^bytes sent per step and rank/ { table++ }
        table == row && /^  (gradients|weights), inside a node/ { intra += $5 }
        table == row && /^  between nodes, out of each node/ { inter = $7 }
        END { printf "%.0f %.0f\n", inter, per_node * intra }' "$work/plan"
}
# make_plan NP FLAGS...: writes the --plan output to $work/plan.
make_plan() {
    ranks 1 ${device[@]+--gpus-per-node "$1"} "${model[@]}" "${batch[@]}" --data-path "$data" \
        --plan --plan-world-size "$@" ||
        { say "--plan failed"; return 1; }
    cp "$work/out" "$work/plan"
}
# sent NAME FROM TO: prints the distinct "inter intra" values of interval lines in this range of
# iterations.
sent() {
    awk -v from="$2" -v to="$3" '/^{"kind":"interval"/ {
        split($0, part, /[:,]/)
        inter = intra = $0
        sub(/.*"inter_node_bytes":/, "", inter); sub(/[,}].*/, "", inter)
        sub(/.*"intra_node_bytes":/, "", intra); sub(/[,}].*/, "", intra)
        if (part[4] >= from && part[4] <= to) print inter, intra }' "$work/$1.jsonl" | sort -u
}
# sends_as_planned NAME ROW FROM TO [RANKS_PER_NODE]: checks that every interval in this range of
# iterations sent exactly the bytes in the ROW-th traffic table of $work/plan.
sends_as_planned() {
    local planned
    planned=$(planned "$2" "${5:-2}")
    [ "$(sent "$1" "$3" "$4")" = "$planned" ] && [ "$planned" != "0 0" ] ||
        { why="sent $(sent "$1" "$3" "$4" | tr '\n' ' '), planned $planned"; return 1; }
}
# parts_as_planned NAME NP: checks that run NAME sent exactly the bytes of tensor parallelism that
# $work/plan predicts. For the default batch sizes and pairs of tensor-parallel ranks.
parts_as_planned() {
    local said logged
    # A step has 4 micro-batches for two ranks, and 2 for four. Norm gradients are sent once.
    said=$(awk -v np="$2" '/^  tensor parallelism / { sum += 8 / np * $NF }
        /^  gradients of LayerNorms/ { sum += $NF } END { print np * sum }' "$work/plan")
    logged=$(sed -n 's/.*"model_parallel_bytes": *\([0-9.e+]*\).*/\1/p' "$work/$1.jsonl" |
        awk '{ bytes = $1 } END { printf "%.0f", bytes }')
    [ "${said:-0}" -gt 0 ] && [ "$said" = "$logged" ] ||
        { why="planned ${said:-none}, sent ${logged:-none}"; return 1; }
}
# memory_as_planned NP FLAGS...: checks that a run allocates exactly what --plan predicts.
memory_as_planned() {
    make_plan "$@" && trains "$@" --train-iters 3 && allocated_as_planned
}
# Compares the total in $work/plan with the allocated memory that the last run logged after its
# first interval.
allocated_as_planned() {
    local planned logged
    planned=$(awk '$1 == "total" { printf "%.6f", $2 / 1048576 }' "$work/plan")
    logged=$(sed -n 's/^\[Rank 0\] (after [0-9]* iterations) memory (MB) | allocated: \([0-9.]*\) .*/\1/p' \
        "$work/out")
    [ -n "$planned" ] && [ "$planned" = "$logged" ] ||
        { why="planned ${planned:-none}, allocated ${logged:-none} MB"; return 1; }
}
