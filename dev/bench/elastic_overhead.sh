#!/usr/bin/env bash
# Compares two ways to train two groups with an outer sync every H steps, on CPU ranks of this
# machine: one MPI job of two nodes with --local-steps, and two replica groups with a rendezvous,
# connected over the loopback. Each group is one rank with one thread. Both ways alternate.
#
# Prints the median time of a step for each way and repetition, and writes JSON. Needs two idle
# cores.
#
#   dev/bench/elastic_overhead.sh [--repeats 3] [--steps 240] [--local-steps 30]
#                                 [--flags "MODEL FLAGS"] [--out FILE.json]
#
#   repeats      runs of each way
#   steps        per run. The median is taken over intervals of H steps, without the first one
#   local-steps  H
#   flags        model and batch, instead of 4 layers with hidden size 256
#
# Needs make all. BUILD: folder of the programs.
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
caller=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
help_if_asked dev/bench/elastic_overhead.sh "$@"
set -euo pipefail

COMMAND_LINE="dev/bench/elastic_overhead.sh${*:+ ${*@Q}}"
export COMMAND_LINE LC_ALL=C OPENBLAS_NUM_THREADS=1
repeats=3 steps=240 local=30 out=dev/bench/results/elastic_overhead.json
flags=(--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128
    --max-position-embeddings 128 --micro-batch-size 8 --lr 1e-3)
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || die 2 "$1 needs a value; see dev/bench/elastic_overhead.sh --help"
    case $1 in
    --repeats) repeats=$2 ;;
    --steps) steps=$2 ;;
    --local-steps) local=$2 ;;
    --flags) read -ra flags <<<"$2" ;;
    --out) case $2 in /*) out=$2 ;; *) out=$caller/$2 ;; esac ;;
    *) die 2 "unknown argument $1; see dev/bench/elastic_overhead.sh --help" ;;
    esac
    shift 2
done
[[ "$repeats $steps $local" =~ ^[1-9][0-9]*\ [1-9][0-9]*\ [1-9][0-9]*$ ]] ||
    die 2 "--repeats, --steps and --local-steps must be positive numbers"
[ "$steps" -ge $((2 * local)) ] || die 2 "--steps $steps has no second interval of $local steps"
trainer=$BUILD/train_gpt_cpu rendezvous=$BUILD/rendezvous
for program in "$trainer" "$rendezvous"; do [ -x "$program" ] || die 3 "$program is missing; run make"; done
make_folder "$(dirname "$out")"
folder=$(mktemp -d) port=$((20000 + $$ % 20000))
trap 'rm -rf "$folder"; [ -z "$(jobs -p)" ] || kill $(jobs -p) 2>/dev/null || true' EXIT
"$rendezvous" keygen "$folder/keys" one two >/dev/null
allow=()
[ "$(id -u)" -ne 0 ] || allow=(--allow-run-as-root)

# train NP LOG FLAGS...
train() {
    local np=$1 log=$2
    shift 2
    mpirun ${allow[@]+"${allow[@]}"} --bind-to none --oversubscribe -np "$np" "$trainer" "${flags[@]}" \
        --tokenizer-type NullTokenizer --vocab-size 511 --mock-data --bf16 --use-distributed-optimizer \
        --local-steps "$local" --quantized-gradients --gradient-quantization-method eden \
        --gq-group-size-inter 256 --eval-iters 0 --eval-interval 1000000 --log-interval "$local" \
        --log-jsonl "$log" "$@" >"$log.out" 2>&1 </dev/null || die 1 "a run failed: $(tail -n 1 "$log.out")"
}
with_mpi() { # REPETITION
    train 2 "$folder/mpi.$1" --train-iters "$steps" --global-batch-size 16 --gpus-per-node 1 --emulate-nodes
}
with_groups() { # REPETITION
    local address=tcp://127.0.0.1:$port server first second
    local group=(--train-iters "$steps" --global-batch-size 8 --rendezvous "$address"
        --rendezvous-keys "$folder/keys" --min-replica-groups 2 --max-replica-groups 2)
    "$rendezvous" serve --listen "$address" --keys "$folder/keys" >"$folder/server.$1" 2>&1 &
    server=$!
    train 1 "$folder/groups.$1.one" "${group[@]}" --replica-group one &
    first=$!
    train 1 "$folder/groups.$1.two" "${group[@]}" --replica-group two &
    second=$!
    wait "$first"
    wait "$second"
    kill "$server"
    wait "$server" 2>/dev/null || true
}
for repetition in $(seq "$repeats"); do
    with_mpi "$repetition"
    with_groups "$repetition"
done
python3 dev/bench/elastic_overhead.py "$folder" "$out"
