#!/usr/bin/env bash
# Runs all GPU tests on this machine:
#   - device layer, GEMMs and collectives
#   - every op against the CPU backend, and every kernel of the exact regime bit for bit
#   - whole training runs against the CPU program and against each other
#   - with mpirun, several ranks (up to four per GPU) in every node layout that the GPUs allow:
#     against the single-process simulator, with and without overlap, tensor and pipeline
#     parallelism against one rank, and every sharding strategy against optim
#   - a short run under compute-sanitizer
#
# Builds first, unless --no-build is given (for programs in $BUILD and $CPU_BUILD that were copied
# from another machine). Prints each result with the seconds since the previous one, and at the end
# "N passed, N failed, N skipped".
#
#   test/gpu.sh [--no-build] [--no-sanitizer] [--part PART]...
#
#   part   runs only this part; may be repeated [all]
#          ops        ops and kernels against the CPU
#          runs       runs of one rank
#          shapes     two ranks in every node layout, and ranks that are killed or stopped
#          shapes4    four ranks in every node layout
#          shapes8    eight ranks in every node layout
#          layouts    tensor, sequence and pipeline parallelism against one rank
#          peer       collectives over peer memory, training with --tp-comm-backend peer
#          sharding   sharding strategies and optimizer offload against optim, two ranks
#          sharding4  the same on four ranks
#          resume     runs of every preset that are killed and resume (test/e2e/resume_presets.sh)
#          changed    runs that resume with other settings (the same script)
#          nan        losses that are not finite (test/e2e/nan.sh)
#          spikes     loss spikes (test/e2e/spikes.sh)
#          signals    signals (test/e2e/signals.sh)
#          offload    optimizer in host memory or on disk (test/e2e/offload.sh)
#          disk       files of the optimizer (test/e2e/disk_offload.sh)
#          muon       Muon (test/e2e/muon.sh)
#          fp8        linear layers in FP8 (test/e2e/fp8.sh and fp8_delayed.sh)
#          lossless   lossless weights (test/e2e/lossless.sh)
#          local      local steps (test/e2e/local_steps.sh)
#          bits       bit flips (test/fault/bits.sh)
#          exact      the exact regime and collectives on one and two ranks
#          exact4     the same on four ranks
#          exact8     the same on eight ranks
#          sanitizer  compute-sanitizer
# shellcheck source-path=SCRIPTDIR source=../scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/common.sh"
help_if_asked test/gpu.sh "$@"
set -uo pipefail
BUILD=${BUILD:-build} CPU_BUILD=${CPU_BUILD:-${BUILD:-build}}
wrong() { echo "error: $1; see test/gpu.sh --help" >&2; exit 2; }
build=1 sanitizer=1 parts=''
while [ $# -gt 0 ]; do
    case $1 in
    --no-build) build=0 ;;
    --no-sanitizer) sanitizer=0 ;;
    --part)
        case ${2:-} in
        ops | runs | shapes | shapes4 | shapes8 | layouts | peer | sharding | sharding4 | resume | \
            changed | nan | spikes | signals | offload | disk | muon | fp8 | lossless | local | bits | \
            exact | exact4 | exact8 | sanitizer)
            parts+=" $2" ;;
        *) wrong "--part ${2:-} is unknown" ;;
        esac
        shift ;;
    *) wrong "unknown argument $1" ;;
    esac
    shift
done
part() { [ -z "$parts" ] || [[ " $parts " == *" $1 "* ]]; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0 skipped=0 last_row=$SECONDS

# row TEXT: prints TEXT and the seconds since the previous row.
row() { echo "$1 ($((SECONDS - last_row)) s)"; last_row=$SECONDS; }
ok() { row "ok $1"; passed=$((passed + 1)); }
not_ok() { row "not ok $1: $2"; failed=$((failed + 1)); }
skip() { row "skip $1: $2"; skipped=$((skipped + 1)); }
# rows FILE: copies standard input to FILE and prints result lines as they arrive.
rows() {
    local line
    while IFS= read -r line; do
        echo "$line" >>"$1"
        case $line in "ok "* | "not ok "* | "skip "* | "# "*) row "$line" ;; esac
    done
}
finish() { echo "$passed passed, $failed failed, $skipped skipped"; [ $failed -eq 0 ]; exit $?; }

if ! nvidia-smi >/dev/null 2>&1; then
    skip "all GPU tests" "no NVIDIA GPU or driver on this machine"
    finish
fi
if [ $build = 1 ]; then
    jobs=$(nproc)
    if ! { make -j "$jobs" WERROR=1 BUILD="$BUILD" cpu tools \
        "$BUILD"/test/{ops_dump,kernels_dump,fault/shim.so} &&
        make -j "$jobs" WERROR=1 PRECISION=fp32 BUILD="$BUILD/fp32" "$BUILD"/fp32/test/ops_dump &&
        make -j "$jobs" WERROR=1 ARCH=native BUILD="$BUILD" gpu gpu-test-programs; } >"$work/make" 2>&1; then
        tail -n 20 "$work/make"
        not_ok build "see above"
        finish
    fi
fi

# counted NAME PROGRAM ARGS...: runs a program that ends with a line "name: N passed, N failed".
counted() {
    local name=$1
    shift
    timeout 300 "$@" >"$work/log" 2>&1
    local rc=$?
    grep -E '^(FAILED|not ok)' "$work/log"
    read -r p f < <(sed -n 's/.*[ ,]\([0-9]*\) passed, \([0-9]*\) failed.*/\1 \2/p' "$work/log" | tail -n 1)
    passed=$((passed + ${p:-0})) failed=$((failed + ${f:-0}))
    if [ $rc -ne 0 ] && [ "${f:-0}" -eq 0 ]; then not_ok "$name" "exit code $rc: $(tail -n 1 "$work/log")"; \
        else row "$name: ${p:-0} passed, ${f:-0} failed"; fi
}

# like_cpu FILE WHAT FLAGS...: runs kernels_dump with these flags on both backends and compares the
# hashes of all results. Reads the CPU's results from $CPU_BUILD/FILE if it exists.
like_cpu() {
    local file=$1 what=$2 lines differ
    shift 2
    if [ -f "$CPU_BUILD/$file" ]; then cp "$CPU_BUILD/$file" "$work/kernels_cpu"; else \
        "$CPU_BUILD/test/kernels_dump" "$@" >"$work/kernels_cpu"; fi ||
        { not_ok "$what on the CPU" "kernels_dump ended with exit code $?"; return; }
    "$BUILD/test/gpu/kernels_dump" "$@" >"$work/kernels_gpu" 2>"$work/err" ||
        not_ok "$what" "kernels_dump ended with exit code $?: $(tail -n 1 "$work/err")"
    lines=$(wc -l <"$work/kernels_cpu") \
        differ=$(diff "$work/kernels_cpu" "$work/kernels_gpu" |
        awk '/^</ { left++ } /^>/ { right++ } END { print (left > right ? left : right) + 0 }')
    [ "$differ" -le "$lines" ] || differ=$lines
    passed=$((passed + lines - differ)) failed=$((failed + differ))
    if [ "$lines" -eq 0 ]; then not_ok "$what" "the CPU's results are empty"; fi
    row "$what bit for bit against the CPU: $((lines - differ)) passed, $differ failed"
    [ $differ = 0 ] || diff "$work/kernels_cpu" "$work/kernels_gpu" | grep '^<' | head -n 5
}

# Compares FP8 codes, products, and the gradients of layers in FP8 with PyTorch. The error bound is
# the error of PyTorch in FP8.
check_fp8_against_torch() {
    local python=${PYTHON:-python3} format missing
    if ! "$python" -c 'import torch, numpy' 2>/dev/null; then skip "FP8 against PyTorch" \
        "no PyTorch for $python"; return; fi
    if ! missing=$("$python" dev/ref/fp8.py 2>&1); then skip "FP8 against PyTorch" \
        "$(tail -n 1 <<<"$missing")"; return; fi
    counted "FP8 codes and products against PyTorch" "$python" dev/ref/fp8_products.py \
        "$BUILD/test/gpu/fp8_dump"
    for format in hybrid e4m3; do
        counted "gradients of a real layer in FP8 against PyTorch, $format" "$python" \
            dev/ref/layer_gradients.py "$BUILD/test/gpu/layer_dump" --seq-length 2048 --rows 2 \
            --fp8-format $format
    done
    if "$python" -c 'import transformers' 2>/dev/null; then
        for format in hybrid e4m3; do
            counted "gradients of a Llama in FP8 against Hugging Face's, $format" "$python" \
                dev/ref/llama_gradients.py "$BUILD/test/gpu/layer_dump" --fp8-format $format
        done
    else
        skip "gradients of a Llama in FP8 against Hugging Face" "no transformers for $python"
    fi
}

check_ops() {
    local kind program mode case
    counted test_device_gpu "$BUILD/test/gpu/test_device_gpu"
    counted test_normal_gpu "$BUILD/test/gpu/test_normal_gpu"
    counted test_linear_gpu "$BUILD/test/gpu/test_linear_gpu"
    counted test_fp8_gpu "$BUILD/test/gpu/test_fp8_gpu"
    counted test_comm_gpu "$BUILD/test/gpu/test_comm_gpu"
    counted ops_invariants "$BUILD/test/gpu/ops_invariants"

    # Compares every op with the CPU backend in fp32. The error bound is the error of the CPU
    # backend in bf16. Reads the CPU's results from $CPU_BUILD if they were copied there.
    for kind in bf16 fp32; do
        program=$CPU_BUILD/test/ops_dump
        [ $kind = fp32 ] && program=$CPU_BUILD/fp32/test/ops_dump
        if [ -f "$CPU_BUILD/ops_$kind.dump" ]; then cp "$CPU_BUILD/ops_$kind.dump" "$work/$kind"; else \
            "$program" "$work/$kind" >/dev/null; fi
    done
    for mode in "" --deterministic; do
        rm -f "$work/gpu"
        "$BUILD/test/gpu/ops_dump" "$work/gpu" $mode >"$work/log" 2>&1 ||
            not_ok "ops_dump $mode" "exit code $?: $(tail -n 1 "$work/log")"
        if grep -q 'slower attention kernels' "$work/log"; then not_ok "cuDNN has all plans $mode" \
            "$(grep -m 1 'slower attention kernels' "$work/log")"; fi
        counted "ops against the CPU $mode" python3 test/gpu/compare_dumps.py "$work/fp32" "$work/bf16" \
            "$work/gpu"
    done

    # Compares forward and backward of one layer of the 125M model with PyTorch in fp32. The error
    # bound is the error of PyTorch in bf16.
    if "${PYTHON:-python3}" -c 'import torch, numpy' 2>/dev/null; then
        for mode in "" --deterministic; do
            counted "gradients of a real layer against PyTorch $mode" "${PYTHON:-python3}" \
                dev/ref/layer_gradients.py "$BUILD/test/gpu/layer_dump" --seq-length 2048 --rows 2 $mode
        done
    else
        skip "gradients of a real layer against PyTorch" "no PyTorch for ${PYTHON:-python3}"
    fi
    if "${PYTHON:-python3}" -c 'import torch, numpy, transformers' 2>/dev/null; then
        for mode in "" --deterministic --qk-layernorm; do
            counted "gradients of a Llama against Hugging Face's $mode" "${PYTHON:-python3}" \
                dev/ref/llama_gradients.py "$BUILD/test/gpu/layer_dump" $mode
        done
    else
        skip "gradients of a Llama against Hugging Face" "no transformers for ${PYTHON:-python3}"
    fi
    check_fp8_against_torch

    like_cpu kernels.txt "kernels"
    # The buckets are so large that each thread block of a large GPU processes several tiles.
    # Configurations:
    #   0        SDP4Bit in groups of 128
    #   4        sums over three source ranks
    #   1, 5, 16 the paper's groups with stochastic rounding, 4 bits on both hops without Hadamard,
    #            bf16 gradients with weight differences
    like_cpu kernels_large.txt "kernels on a large bucket" --case 0 --values 300000000
    like_cpu kernels_large_4.txt "kernels on a large bucket, configuration 4" --case 4 --values 300000000
    for case in 1 5 16; do like_cpu kernels_large_$case.txt "kernels on a large bucket, configuration $case" \
        --case $case --values 100000000; done
}

# --- whole runs ------------------------------------------------------------------------------
model=(--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \
    --max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 8
    --lr 1e-3 --lr-warmup-iters 2 --train-iters 20 --log-interval 5 --eval-iters 0 --bf16 \
        --use-distributed-optimizer --mock-data
    --tokenizer-type NullTokenizer --vocab-size 1000 --hidden-dropout 0 --attention-dropout 0)
# run NAME PROGRAM FLAGS...: trains and writes losses and norms to $work/NAME.
run() {
    local name=$1 program=$2
    shift 2
    rm -f "$work/jsonl"
    timeout 300 "$program" "${model[@]}" "$@" --log-jsonl "$work/jsonl" >"$work/log" 2>&1 ||
        { not_ok "$name" "$(tail -n 1 "$work/log")"; return 1; }
    grep '"kind":"train"' "$work/jsonl" >"$work/$name"
    grep '"kind":"memory"' "$work/jsonl" >"$work/$name.memory"
}
# planned NAME FLAGS...: checks that run NAME allocated what --plan predicts.
planned() {
    local name=$1 bytes
    shift
    bytes=$("$gpu" "${model[@]}" "$@" --plan 2>/dev/null | awk '$1 == "total" { print $2 }')
    if grep -q "\"planned_bytes\":${bytes:-none},\"allocated_bytes\":${bytes:-none}," "$work/$name.memory"; \
        then
        ok "memory as planned: $name; $(sed -n 's/.*"timing":{\(.*\)}}/\1/p' "$work/$name.memory")"
    else
        not_ok "memory as planned: $name" "planned ${bytes:-none}, logged $(cat "$work/$name.memory")"
    fi
}
gpu=$BUILD/train_gpt
same() { if cmp -s "$work/$2" "$work/$3"; then ok "$1"; else not_ok "$1" "the losses differ"; fi; }
# near NAME RUN RUN: checks that losses of 20 steps are close. They differ slightly, because some
# kernels round to bf16 elsewhere, and 20 steps at a high learning rate amplify the differences. The
# norm of the first step shows whether the gradients agree.
near() {
    if python3 - "$work/$2" "$work/$3" <<'END'
import json, sys
one, two = ([json.loads(line) for line in open(path)] for path in sys.argv[1:])
first = tuple(abs(one[0][k] - two[0][k]) / one[0][k] for k in ("loss", "grad_norm"))
worst = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(one, two))
print("first loss %.1e, first norm %.1e, worst loss of %d steps %.1e (relative)" % (*first, len(two), worst))
sys.exit(0 if len(one) == len(two) == 20 and first[0] < 1e-4 and first[1] < 1e-3 and worst < 1e-2 else 1)
END
    then ok "$1"; else not_ok "$1" "see the line above"; fi
}

check_runs() {
    if [ -f "$CPU_BUILD/train_cpu.jsonl" ]; then grep '"kind":"train"' "$CPU_BUILD/train_cpu.jsonl" \
        >"$work/cpu"; else run cpu "$CPU_BUILD/train_gpt_cpu"; fi
    run once "$gpu" --deterministic-mode
    run twice "$gpu" --deterministic-mode
    run recomputed "$gpu" --deterministic-mode --recompute-granularity full
    run selective "$gpu" --deterministic-mode --recompute-activations
    run dropped "$gpu" --deterministic-mode --hidden-dropout 0.1 --attention-dropout 0.1
    run dropped_again "$gpu" --deterministic-mode --hidden-dropout 0.1 --attention-dropout 0.1
    run quantized "$gpu" --deterministic-mode --quantized-weights --quantized-gradients
    documents=(--vocab-size 64 --reset-attention-mask --reset-position-ids)
    run documents "$gpu" "${documents[@]}" --deterministic-mode
    run packed "$gpu" "${documents[@]}"
    planned packed "${documents[@]}"
    if grep -q 'own kernels' "$work/log"; then not_ok "packed documents" "$(grep -m 1 'own kernels' "$work/log")"; fi
    planned once --deterministic-mode
    planned recomputed --deterministic-mode --recompute-granularity full
    planned dropped --deterministic-mode --hidden-dropout 0.1 --attention-dropout 0.1
    same "deterministic mode is bitwise reproducible" once twice
    # A profiler must see a range for every phase in each step, the end of each range, and the names
    # of streams.
    rm -f "$work/names"
    NVTX_INJECTION64_PATH=$(realpath "$BUILD/test/gpu/profile_names.so") PROFILE_NAMES=$work/names run \
        profiled "$gpu" --deterministic-mode
    if [ "$(grep -cx 'start forward-compute' "$work/names")" -ge 20 ] &&
        [ "$(grep -cx 'start optimizer' "$work/names")" -ge 20 ] && grep -qx 'stream compute' "$work/names" &&
        cmp -s <(sed -n 's/^start //p' "$work/names" | sort) <(sed -n 's/^end //p' "$work/names" | sort); \
        then ok "phases and streams have their names in a profile"
    else not_ok "phases and streams have their names in a profile" \
        "$(sort "$work/names" 2>/dev/null | uniq -c | tr '\n' ';' | head -c 300)"; fi
    same "full recomputation is bitwise identical" once recomputed
    same "selective recomputation is bitwise identical" once selective
    same "dropout is reproducible bitwise" dropped dropped_again
    same "quantization flags change nothing on one GPU" once quantized
    near "20 steps against the CPU program" cpu once
    near "packed documents against the program's own attention" documents packed
}

# --- ranks -----------------------------------------------------------------------------------
gpus=$(if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" |
    grep -c .; else nvidia-smi --list-gpus | wc -l; fi)
mpi=(mpirun --oversubscribe --bind-to none)
mpirun --version 2>/dev/null | grep -q 'Open MPI) 4' && mpi+=(-q)
# fits NODES PER_NODE: succeeds if every rank gets a GPU or ranks can share GPUs (devices_share).
fits() {
    [ $(($1 * $2)) -le "$gpus" ] || { [ $(($1 * $2)) -le $((4 * gpus)) ] && { [ $((gpus % $2)) -eq 0 ] ||
        [ $(($2 % gpus)) -eq 0 ]; }; }
}
# trained NAME NODES PER_NODE FLAGS...: trains and writes iteration, loss and norm of every step to
# $work/NAME. Fails if a replica was repaired or if rank 0's memory does not match the plan.
trained() {
    local name=$1 nodes=$2 per_node=$3 emulate=()
    shift 3
    if [ "$nodes" -gt 1 ] || [ "$per_node" -gt "$gpus" ]; then emulate=(--emulate-nodes); fi
    rm -f "$work/jsonl" "$work/$name"
    timeout -k 5 300 "${mpi[@]}" -np $((nodes * per_node)) "$gpu" "${model[@]}" --micro-batch-size 1 \
        --global-batch-size 16 --log-interval 1 --ddp-bucket-size 500000 \
        --gpus-per-node "$per_node" ${emulate[@]+"${emulate[@]}"} --distributed-timeout-minutes 2 "$@" \
        --log-jsonl "$work/jsonl" >"$work/log" 2>&1 </dev/null ||
        { not_ok "$name" "$(grep -m 1 '^error' "$work/log" || tail -n 1 "$work/log")"; return 1; }
    sed -n 's/^{"kind":"train","iteration":\([0-9]*\),.*"loss":\([^,}]*\)[,}].*"grad_norm":\([^,}]*\)[,}].*/\1 \2 \3/p' "$work/jsonl" >"$work/$name"
    if grep -q '"kind":"repair"' "$work/jsonl"; then not_ok "$name" \
        "replicas differed: $(grep -m 1 WARNING "$work/log")"; return 1; fi
    grep -qE '"kind":"memory".*"planned_bytes":([0-9]+),"allocated_bytes":\1,' "$work/jsonl" ||
        { not_ok "$name" "memory is not as planned: $(grep -m 1 '"kind":"memory"' "$work/jsonl")"; return 1; }
}
# overlapped NAME NODES PER_NODE FLAGS...: checks that --no-overlap changes no loss or norm. Returns
# an error only if a run failed; the caller then has no losses to compare.
overlapped() {
    local name=$1 nodes=$2 per_node=$3
    shift 3
    trained overlap "$nodes" "$per_node" --train-iters 40 --deterministic-mode --verify-replicas-interval 1 \
        "$@" || return
    trained serial "$nodes" "$per_node" --train-iters 40 --deterministic-mode --verify-replicas-interval 1 \
        --no-overlap "$@" || return
    if [ "$(wc -l <"$work/overlap")" -ne 40 ]; then not_ok "$nodes x $per_node ranks, $name" \
        "$(wc -l <"$work/overlap") of 40 steps in the log"
    elif cmp -s "$work/overlap" "$work/serial"; then ok \
        "$nodes x $per_node ranks, $name: overlap changes no bit of 40 steps"
    else not_ok "$nodes x $per_node ranks, $name" \
        "with and without overlap differ: $(diff "$work/overlap" "$work/serial" | sed -n '2p')"; fi
}
# through_nccl NODES PER_NODE: checks that NCCL inside nodes gives the same losses as peer copies,
# which the last run of `overlapped` used.
through_nccl() {
    if ! grep -q "fetched by the GPUs' copy engines" "$work/log"; then skip "$1 x $2 ranks, copies" \
        "$(grep -m 1 -o 'intra-node messages use NCCL.*' "$work/log")"; return; fi
    cp "$work/serial" "$work/fetched"
    overlapped "SDP4Bit through NCCL" "$1" "$2" "${sdp4bit[@]}" --node-exchange nccl || return
    if cmp -s "$work/serial" "$work/fetched"; then ok "$1 x $2 ranks: copies and NCCL are bitwise identical"
    else not_ok "$1 x $2 ranks: copies and NCCL are bitwise identical" "the losses differ"; fi
}
# on_ranks NAME RANKS PROGRAM FLAGS...: runs a program whose first rank prints "ok" and "not ok"
# lines.
on_ranks() {
    local name=$1 rc p f
    shift
    : >"$work/log"
    timeout -k 5 500 "${mpi[@]}" -np "$1" stdbuf -oL "${@:2}" 2>&1 </dev/null | rows "$work/log"
    rc=${PIPESTATUS[0]} p=$(grep -c '^ok ' "$work/log") f=$(grep -c '^not ok ' "$work/log") last_row=$SECONDS
    passed=$((passed + p)) failed=$((failed + f))
    if [ $rc -ne 0 ] && [ "$f" -eq 0 ]; then not_ok "$name" "exit code $rc: $(tail -n 1 "$work/log")"; \
        else echo "$name: $p passed, $f failed"; fi
}
# promised SCRIPT: runs test/SCRIPT.sh on GPUs. (scripts/test.sh runs it on CPU ranks.)
promised() {
    local rc p f s
    : >"$work/promised"
    DEVICE=gpu BUILD=$BUILD timeout -k 5 900 bash "test/$1.sh" 2>&1 </dev/null | rows "$work/promised"
    rc=${PIPESTATUS[0]} last_row=$SECONDS
    p=$(grep -c '^ok ' "$work/promised") f=$(grep -c '^not ok ' "$work/promised") \
        s=$(grep -c '^skip ' "$work/promised")
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    if [ $rc -ne 0 ] && [ "$f" -eq 0 ]; then not_ok "test/$1.sh on GPUs" \
        "exit code $rc after $p checks: $(tail -n 1 "$work/promised")"; else echo \
        "test/$1.sh on GPUs: $p passed, $f failed, $s skipped"; fi
}
# ended NAME SIGNAL CODE WORDS FLAGS...: sends SIGNAL to one of two ranks during training. The job
# must end within the time limit with exit code CODE and a line that contains WORDS.
ended() {
    local name=$1 signal=$2 code=$3 said=$4 shape=(--gpus-per-node 2) job rc ours pid=''
    shift 4
    [ "$gpus" -ge 2 ] || shape=(--gpus-per-node 1 --emulate-nodes)
    : >"$work/log"  # the lines of an earlier job must not be taken for this one's
    SDP4BIT_TEST_FOLDER=$work timeout -k 5 200 mpirun --oversubscribe --bind-to none -np 2 "$gpu" \
        "${model[@]}" --train-iters 1000000 --lr-decay-iters 100 \
        --quantized-weights --quantized-gradients "${shape[@]}" --distributed-timeout-minutes 0.4 \
        "$@" >"$work/log" 2>&1 </dev/null &
    job=$!
    for ((i = 0; i < 600; i++)); do
        if grep -q '^ iteration  *10/' "$work/log" || ! kill -0 $job 2>/dev/null; then break; fi
        sleep 0.1
    done
    # Finds the rank by an environment variable of this job, because other runs of the program may
    # be training on this machine.
    mapfile -t ours < <(grep -lzxF "SDP4BIT_TEST_FOLDER=$work" /proc/[0-9]*/environ 2>/dev/null)
    [ ${#ours[@]} -eq 0 ] ||
        pid=$(grep -lzx OMPI_COMM_WORLD_RANK=1 "${ours[@]}" 2>/dev/null | cut -d / -f 3 | head -n 1)
    [ -z "$pid" ] || kill -s "$signal" "$pid"
    local since=$SECONDS
    wait $job
    rc=$?
    [ -z "$pid" ] || kill -s KILL "$pid" 2>/dev/null
    if [ $rc -eq "$code" ] && [ $((SECONDS - since)) -le 60 ] && grep -q "$said" "$work/log"; then ok "$name"
    else not_ok "$name" "exit code $rc after $((SECONDS - since)) s: $(grep -m 1 '^error' "$work/log" || tail -n 1 "$work/log")"; fi
}

sdp4bit=(--quantized-weights --quantized-gradients --hadamard-transform --gradient-alltoall-pipeline 3)
check_shapes() { # "NODES PER_NODE"...
    local shape nodes per_node last=
    for shape in "$@"; do
        # shellcheck disable=SC2086 # split on purpose
        fits $shape || { skip "${shape/ / x } ranks" "$gpus GPUs"; continue; }
        read -r nodes per_node <<<"$shape"
        if overlapped SDP4Bit "$nodes" "$per_node" "${sdp4bit[@]}" &&
            [ "$per_node" -gt 1 ]; then through_nccl "$nodes" "$per_node"; fi
        # Tests other gradient formats on one shape with both hops and on shapes with a single hop.
        case $shape in "1 2" | "2 1" | "2 2") overlapped "bf16 gradients" "$nodes" "$per_node" \
            --grad-reduce-in-bf16 --gradient-alltoall-pipeline 3 ;; esac
        case $shape in
        "2 2")
            overlapped "SDP4Bit with checksums" "$nodes" "$per_node" "${sdp4bit[@]}" --verify-wire
            overlapped "fp32 gradients" "$nodes" "$per_node" --gradient-alltoall-pipeline 3 ;;
        esac
        last=$shape
    done
    if [ -n "$last" ]; then
        read -r nodes per_node <<<"$last"
        trained "a thousand steps" "$nodes" "$per_node" --num-layers 2 --hidden-size 64 \
            --num-attention-heads 1 --seq-length 64 --max-position-embeddings 64 --vocab-size 200 \
            --train-iters 1000 --log-interval 100 --ddp-bucket-size 1 --verify-replicas-interval 100 \
            "${sdp4bit[@]}" && ok "replicas of $nodes x $per_node ranks are equal for 1000 steps"
    fi
}
check_ends() {
    ended "a rank that is killed ends the job" KILL 137 "rank 1 .*signal 9"
    ended "a rank that is stopped ends the job within the limit and is named" STOP 7 \
        "rank 1 has shown no sign of life for"
}

# learned NAME NODES PER_NODE FLAGS...: checks that every loss is within 1 % of the run "one rank"
# and the first norm within 5 %. At a higher learning rate 4-bit noise alone would exceed 1 %.
slowly=(--train-iters 20 --lr 3e-4)
learned() {
    local name=$1 far
    fits "$2" "$3" || { skip "$name" "$gpus GPUs"; return; }
    trained "$@" "${slowly[@]}" || return
    far=$(paste -d ' ' "$work/one rank" "$work/$name" | awk '
        function close_to(a, b, part) { return a - b < part * b && b - a < part * b }
        NF == 6 && close_to($5, $2, 0.01) && (NR > 1 || close_to($6, $3, 0.05)) { same++; next }
        !told++ { printf "iteration, loss and norm of both: %s; ", $0 }
        END { if (same != 20) print same + 0 " of 20 steps agree" }')
    if [ -z "$far" ]; then ok "$name: losses match one rank"; else not_ok "$name: losses match one rank" \
        "$far"; fi
}

check_layouts() {
    local ranks share tp2=(--tensor-model-parallel-size 2) pp2=(--pipeline-model-parallel-size 2)
    for ranks in 2 4; do
        share=()
        [ $ranks -le "$gpus" ] || share=(--emulate-nodes "$ranks")
        if fits 1 $ranks; then on_ranks "every layout of $ranks ranks" $ranks "$BUILD/test/gpu/test_layout" \
            ${share[@]+"${share[@]}"}; else skip "every layout of $ranks ranks" "$gpus GPUs"; fi
    done
    trained "one rank" 1 1 "${slowly[@]}" || return
    learned "T 2" 1 2 "${tp2[@]}"
    learned "T 2, sequence parallel" 1 2 "${tp2[@]}" --sequence-parallel
    learned "P 2" 1 2 "${pp2[@]}"
    learned "P 2 in chunks" 1 2 "${pp2[@]}" --num-layers-per-virtual-pipeline-stage 1
    learned "T 2, P 2, sequence parallel" 1 4 "${tp2[@]}" "${pp2[@]}" --sequence-parallel
    learned "P 2, quantized activations" 1 2 "${pp2[@]}" --quantized-activations --verify-wire
    learned "T 2, quantized sums" 1 2 "${tp2[@]}" --quantized-tensor-parallel
    learned "T 2, sequence parallel, quantized gathers" 1 2 "${tp2[@]}" --sequence-parallel \
        --quantized-tensor-parallel
    # With two data-parallel ranks, gradients and weights are quantized.
    learned "T 2 on two nodes, SDP4Bit" 2 2 "${tp2[@]}" --sequence-parallel "${sdp4bit[@]}"
    learned "P 2 on two nodes, SDP4Bit" 2 2 "${pp2[@]}" "${sdp4bit[@]}"
    learned "T 2, P 2 on two nodes, SDP4Bit" 2 4 "${tp2[@]}" "${pp2[@]}" --sequence-parallel "${sdp4bit[@]}"
    trained "one rank" 1 1 "${slowly[@]}" --window-size 99,0 || return
    learned "P 2, windows" 1 2 "${pp2[@]}" --window-size 99,0
    learned "T 2, windows" 1 2 "${tp2[@]}" --window-size 99,0
    # Hidden states of 8 MiB, so that forward reduces them in two row blocks (tp_row_blocks).
    fits 1 4 || { skip "T 2, sharded, in row blocks" "$gpus GPUs"; return; }
    same_sharded 1 4 optim "node" "${tp2[@]}" --tp-comm-overlap --ddp-bucket-size 1 --hidden-size 1024 \
        --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 8
}

# as_nccl RANKS NAME FLAGS...: checks that collectives over peer memory give the bits of NCCL. Ranks
# that share a GPU run fewer steps, because each collective takes several of its time slices.
as_nccl() {
    local ranks=$1 what="$2 in peer memory" steps=20 backend=auto
    shift 2
    fits 1 "$ranks" || { skip "$what" "$gpus GPUs"; return; }
    if [ "$ranks" -gt "$gpus" ]; then steps=5 backend=peer; fi
    set -- --train-iters $steps --deterministic-mode "$@"
    trained nccl 1 "$ranks" "$@" --tp-comm-backend nccl &&
        trained peer 1 "$ranks" "$@" --tp-comm-backend $backend || return
    if grep -q 'collectives use peer memory' "$work/log"; then
        same "$what: identical to NCCL" nccl peer
    else not_ok "$what" "not used: $(grep -m 1 "tensor-parallel collectives" "$work/log")"; fi
}
# By default, ranks that share a GPU use NCCL, because peer memory would be slow. Each GPU has two
# ranks or more, which may belong to different tensor-parallel groups.
auto_shares_no_gpu() {
    local what="ranks that share a GPU use NCCL by default"
    trained auto 2 $((gpus > 2 ? gpus : 2)) --train-iters 3 "$@" || return
    if grep -q 'tensor-parallel collectives use NCCL: several ranks share GPU' "$work/log"; then ok "$what"
    else not_ok "$what" "$(grep -m 1 'tensor-parallel collectives' "$work/log")"; fi
}
# Tensor parallelism over peer memory.
check_peer() {
    local ranks program share tp2=(--tensor-model-parallel-size 2) pp2=(--pipeline-model-parallel-size 2)
    for ranks in 2 4 8; do
        what="peer memory of $ranks ranks"
        fits 1 $ranks || { skip "$what" "$gpus GPUs"; continue; }
        share=()
        [ $ranks -le "$gpus" ] || share=(--share-gpus --rounds 100)
        for program in test_peer_reduce_gpu test_peer_norm_gpu; do
            counted "$what, $program" "${mpi[@]}" -np $ranks "$BUILD/test/gpu/$program" \
                ${share[@]+"${share[@]}"}
            [ $ranks = 2 ] || counted "$what in pairs, $program" "${mpi[@]}" -np $ranks \
                "$BUILD/test/gpu/$program" --group 2 ${share[@]+"${share[@]}"}
        done
    done
    auto_shares_no_gpu "${tp2[@]}"
    as_nccl 2 "T 2" "${tp2[@]}"
    as_nccl 2 "T 2, sequence parallel" "${tp2[@]}" --sequence-parallel
    as_nccl 4 "T 4" --tensor-model-parallel-size 4
    as_nccl 4 "T 2, P 2, sequence parallel" "${tp2[@]}" "${pp2[@]}" --sequence-parallel
    as_nccl 4 "T 2 on two data-parallel ranks, SDP4Bit" "${tp2[@]}" "${sdp4bit[@]}"
    ended "a rank that is killed ends a job in peer memory" KILL 137 "rank 1 .*signal 9" "${tp2[@]}" \
        --tp-comm-backend peer --gpus-per-node 2
    ended "a rank that is stopped ends a job in peer memory and is named" STOP 7 \
        "rank 1 has shown no sign of life for" "${tp2[@]}" --tp-comm-backend peer --gpus-per-node 2
}

# same_sharded: sharding and offload must not change any bit of the losses and norms of 20 steps.
# With one micro-batch per step the reference is optim. With several it is optim_grads, which
# reduces and rounds after each micro-batch.
direct=(--quantized-weights --weight-quantization-method direct --quantized-gradients
    --gradient-quantization-bits-intra 4)
same_sharded() { # NODES PER_NODE REFERENCE STRATEGIES FLAGS...
    local nodes=$1 per_node=$2 reference=$3 strategies=$4 name way
    local -A strategy=([optim]='optim' [grads]='optim_grads' [node]='optim_grads_params'
        [world]='optim_grads_params --shard-params-over world'
        [second]='optim_grads_params --shard-params-over world --secondary-partition')
    shift 4
    for name in $reference $strategies; do
        way="--data-parallel-sharding-strategy ${strategy[${name%+*}]}"
        [[ $name != *+offload ]] || way+=" --optimizer-cpu-offload"
        [[ $name != *+disk ]] || way+=" --optimizer-disk-offload $work/state"
        # shellcheck disable=SC2086 # split on purpose
        trained "$name" "$nodes" "$per_node" --train-iters 20 --deterministic-mode \
            --verify-replicas-interval 5 "$@" $way || return
        [ "$name" = "$reference" ] || same "$nodes x $per_node ranks, $name: identical to $reference" \
            "$reference" "$name"
    done
}
check_sharding() { # "NODES PER_NODE"...
    local shape nodes per_node one
    for shape in "$@"; do
        # shellcheck disable=SC2086 # split on purpose
        fits $shape || { skip "${shape/ / x } ranks, sharded" "$gpus GPUs"; continue; }
        read -r nodes per_node <<<"$shape"
        one=(--global-batch-size $((nodes * per_node)))
        same_sharded "$nodes" "$per_node" optim "optim+offload optim+disk grads node node+offload node+disk" "${one[@]}" \
            "${sdp4bit[@]}"
        same_sharded "$nodes" "$per_node" optim "world second second+offload" "${one[@]}" "${direct[@]}"
        same_sharded "$nodes" "$per_node" grads "node grads+offload grads+disk" "${sdp4bit[@]}"
        overlapped "sharded gradients and weights" "$nodes" "$per_node" "${sdp4bit[@]}" \
            --data-parallel-sharding-strategy optim_grads_params
    done
}
check_sharding4() {
    check_sharding "2 2"
    same_sharded 2 2 grads "node second+offload" "${direct[@]}" --pipeline-model-parallel-size 2 \
        --num-layers-per-virtual-pipeline-stage 1
}

check_exact() { # RANKS...
    local ranks nodes per_node share regime="exact regime against the simulator"
    for ranks in "$@"; do
        share=()
        if [ $ranks -le "$gpus" ]; then on_ranks "$regime, $ranks ranks" $ranks \
            "$BUILD/test/gpu/test_sdp4bit_mpi"; else share=(--emulate-nodes); fi
        for ((nodes = 1; ranks > 1 && nodes <= ranks; nodes *= 2)); do
            per_node=$((ranks / nodes))
            fits $nodes $per_node ||
                { skip "$nodes x $per_node ranks, the exact regime" "$gpus GPUs"; continue; }
            counted "collectives, $nodes x $per_node ranks" "${mpi[@]}" -np $ranks \
                "$BUILD/test/gpu/test_comm_gpu" --nodes $nodes ${share[@]+"${share[@]}"}
            [ ${#share[@]} = 0 ] || on_ranks "$regime, $nodes x $per_node ranks" $ranks \
                "$BUILD/test/gpu/test_sdp4bit_mpi" --emulate-nodes $per_node
        done
        [ $ranks = 1 ] || [ $ranks = 8 ] || on_ranks "local steps against the simulator, $ranks ranks" \
            $ranks "$BUILD/test/gpu/test_local_mpi" ${share[@]+"${share[@]}"}
    done
}

# --- compute-sanitizer -----------------------------------------------------------------------
# sanitize NAME TOOL PROGRAM FLAGS...: runs the program under a tool of compute-sanitizer
sanitize() {
    local name=$1 tool=$2 rc
    shift 2
    timeout 250 compute-sanitizer --tool "$tool" --error-exitcode 9 "$@" >"$work/log" 2>&1
    rc=$?
    if [ $rc -eq 0 ]; then ok "compute-sanitizer $tool: $name"
    elif grep -q 'Device not supported' "$work/log"; then skip "compute-sanitizer $tool: $name" \
        "the tool does not support this machine's driver"
    else not_ok "compute-sanitizer $tool: $name" \
        "exit code $rc: $(grep -E '[Ee]rror|not supported|Invalid|hazard|Race' "$work/log" | head -n 3 | tr '\n' ' ')"; fi
}
check_sanitizer() {
    if [ $sanitizer = 0 ]; then skip compute-sanitizer "--no-sanitizer"; return; fi
    if ! command -v compute-sanitizer >/dev/null; then skip compute-sanitizer "not installed"; return; fi
    sanitize "a training run" memcheck "$gpu" "${model[@]}" --train-iters 2 --lr-warmup-iters 0 \
        --hidden-dropout 0.1
    sanitize "a training run with Muon" memcheck "$gpu" "${model[@]}" --train-iters 2 --lr-warmup-iters 0 \
        --optimizer muon
    # racecheck (2025.3) crashes in programs that call cuBLASLt ("failed to handle a hardware
    # exception"), so these programs run only kernels that need no library. Cross-entropy, bias
    # gradients and GELU' are not checked, because they only run between GEMMs.
    sanitize "kernels of the exact regime" racecheck "$BUILD/test/gpu/kernels_dump"
    sanitize "ops without a library" racecheck "$BUILD/test/gpu/ops_dump" "$work/gpu" --own-kernels
}

if part ops; then check_ops; fi
if part runs; then check_runs; fi
# if_part PART COMMAND...: runs the command of a part that needs mpirun.
if_part() {
    part "$1" || return
    if command -v mpirun >/dev/null; then "${@:2}"; else skip "$1" "mpirun is not installed"; fi
}
if_part shapes check_shapes "1 2" "2 1"
if_part shapes check_ends
if_part shapes4 check_shapes "2 2" "4 1" "1 4"
if_part shapes8 check_shapes "4 2" "2 4"
if_part layouts check_layouts
if_part peer check_peer
if_part sharding check_sharding "1 2" "2 1"
if_part sharding4 check_sharding4
SECTION=presets if_part resume promised e2e/resume_presets
SECTION=settings if_part changed promised e2e/resume_presets
for script in nan spikes signals offload muon fp8 lossless; do if_part $script promised e2e/$script; done
if_part disk promised e2e/disk_offload
if_part fp8 promised e2e/fp8_delayed
if_part local promised e2e/local_steps
if_part bits promised fault/bits
if_part exact check_exact 1 2
if_part exact4 check_exact 4
if_part exact8 check_exact 8
if part sanitizer; then check_sanitizer; fi
finish
