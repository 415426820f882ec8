#!/usr/bin/env bash
# Measures tensor, sequence and pipeline parallelism within one node: steps of a few layers of the
# 6.7B and 1.3B models on several GPUs. Compares them with the same layers on one GPU and with a
# bound, the work of one GPU divided evenly plus the idle time of 1F1B: with m micro-batches and P
# stages, forward and backward take (m + (P - 1) / chunks) / m times as long.
#
# The vocabulary has 1024 tokens. With GPT-2's vocabulary the LM head would cost as much as another
# layer and make the last stage the slowest. Sequence length 2048, no dropout, synthetic data.
# Prints a table and writes JSON.
#
#   dev/bench/layouts.sh [--models "1.3b:8 6.7b:8"] [--layouts "2x1 2x1+s 4x1+s 1x2 1x4 2x2+s"]
#                        [--micro-batch 1] [--micro-batches 8] [--iters 10] [--flags "FLAGS"]
#                        [--layout-flags "FLAGS"] [--pytorch] [--out FILE.json]
#
#   models         NAME:LAYERS, the first LAYERS layers of gpt_NAME.args or dev/bench/NAME.args
#   layouts        TxP: T tensor-parallel x P pipeline-parallel ranks. +s adds --sequence-parallel,
#                  +cN chunks of N layers. Layouts that need more GPUs than this machine has are
#                  skipped with a message. One GPU is always measured
#   micro-batch    samples per micro-batch
#   micro-batches  micro-batches per step
#   iters          measured steps, after the same number of warm-up steps
#   flags          additional trainer flags for every run
#   layout-flags   additional trainer flags for runs on several ranks
#   pytorch        also measures PyTorch (pytorch_layouts.py) on one GPU and in layouts with P = 1
#
# Needs make gpu. DEVICE=cpu uses CPU ranks (make), a small model, and writes results to runs/. It
# is for trying the script, not for measurements. BUILD: folder of the programs.
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
caller=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
help_if_asked dev/bench/layouts.sh "$@"
set -euo pipefail

COMMAND_LINE="dev/bench/layouts.sh${*:+ ${*@Q}}"
export COMMAND_LINE
models='' layouts="2x1 2x1+s 4x1+s 1x2 1x4 2x2+s" rows=1 count=8 iterations=10 flags=() out=''
several=() pytorch=0
while [ $# -gt 0 ]; do
    if [ "$1" = --pytorch ]; then pytorch=1; shift; continue; fi
    [ $# -ge 2 ] || die 2 "$1 needs a value; see dev/bench/layouts.sh --help"
    case $1 in
    --models) models=$2 ;;
    --layouts) layouts=$2 ;;
    --micro-batch) rows=$2 ;;
    --micro-batches) count=$2 ;;
    --iters) iterations=$2 ;;
    --flags) read -ra flags <<<"$2" ;;
    --layout-flags) read -ra several <<<"$2" ;;
    --out) case $2 in /*) out=$2 ;; *) out=$caller/$2 ;; esac ;;
    *) die 2 "unknown argument $1; see dev/bench/layouts.sh --help" ;;
    esac
    shift 2
done
case ${DEVICE:-gpu} in
gpu)
    program=$BUILD/train_gpt made_by="make gpu"
    models=${models:-1.3b:8 6.7b:8} out=${out:-dev/bench/results/layouts.json}
    IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES:-}"
    gpus=${#visible[@]}
    [ "$gpus" -gt 0 ] || gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    ;;
cpu)
    program=$BUILD/train_gpt_cpu made_by=make gpus=1024
    models=${models:-small:4} out=${out:-runs/layouts_cpu.json}
    ;;
*) die 2 "DEVICE=$DEVICE is unknown; use gpu or cpu" ;;
esac
[ -x "$program" ] || die 3 "$program is missing; run $made_by"
[[ "$rows $count $iterations" =~ ^[1-9][0-9]*\ [1-9][0-9]*\ [1-9][0-9]*$ ]] ||
    die 2 "--micro-batch, --micro-batches and --iters must be positive numbers"
config_of() { # NAME
    local path
    for path in "configs/gpt_$1.args" "dev/bench/$1.args"; do
        [ ! -f "$path" ] || { say "$path"; return; }
    done
}
for model in $models; do
    [ -n "$(config_of "${model%:*}")" ] || die 2 "there is no model config configs/gpt_${model%:*}.args"
    [[ ${model##*:} =~ ^[1-9][0-9]*$ ]] || die 2 "the model $model has no layers; use NAME:LAYERS"
done
for layout in $layouts; do
    [[ $layout =~ ^[1-9][0-9]*x[1-9][0-9]*(\+s)?(\+c[1-9][0-9]*)?$ ]] ||
        die 2 "--layouts: $layout is not of the form TxP, TxP+s or TxP+s+cN"
done
make_folder "$(dirname "$out")"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# train MODEL LAYOUT: runs the trainer with its JSON log in the folder.
train() {
    local model=$1 layout=$2 t=${2%x*} p=${2#*x} more=() words
    p=${p%%+*}
    words="$t x $p ranks of $(basename "$(config_of "${model%:*}")" .args)"
    if [ $((t * p)) -gt "$gpus" ]; then say "skipped: $words; this machine has $gpus GPUs" >&2; return; fi
    [[ $layout != *+s* ]] || more=(--sequence-parallel)
    [[ $layout != *+c* ]] || more+=(--num-layers-per-virtual-pipeline-stage "${layout##*+c}")
    [ "$layout" = 1x1 ] || more+=(${several[@]+"${several[@]}"})
    say "running $words, ${model##*:} layers${more[*]:+, ${more[*]}}" >&2
    launch $((t * p)) "$program" "@$(config_of "${model%:*}")" --num-layers "${model##*:}" \
        --tokenizer-type NullTokenizer --vocab-size 1023 --make-vocab-size-divisible-by 128 \
        --tensor-model-parallel-size "$t" --pipeline-model-parallel-size "$p" ${more[@]+"${more[@]}"} \
        --micro-batch-size "$rows" --global-batch-size $((rows * count)) --mock-data \
        --hidden-dropout 0 --attention-dropout 0 --train-iters 100000 --log-interval "$iterations" \
        --exit-interval $((2 * iterations)) --eval-interval 1000000 --eval-iters 0 --timing-log-level 1 \
        --distributed-timeout-minutes 2 --log-jsonl "$folder/${model%:*}.$layout.jsonl" \
        ${flags[@]+"${flags[@]}"} >"$folder/log" 2>"$folder/err" ||
        { say "warning: the run failed" >&2; grep -h '^error' "$folder/err" "$folder/log" >&2 || true; }
}
# train_pytorch MODEL LAYOUT: the same with PyTorch.
train_pytorch() {
    local model=$1 layout=$2 more=()
    [[ $layout == *x1 || $layout == *x1+s ]] && [ "${layout%%x*}" -le "$gpus" ] || return 0
    [[ $layout != *+s ]] || more=(--sequence-parallel)
    [ "${DEVICE:-gpu}" = gpu ] || more+=(--device cpu --sequence 32)
    say "running PyTorch, ${layout%%x*} ranks, ${model%:*}, ${model##*:} layers${more[*]:+, ${more[*]}}" >&2
    "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node "${layout%%x*}" \
        dev/bench/pytorch_layouts.py "${model/:/-}" --micro-batch "$rows" --micro-batches "$count" \
        --steps "$iterations" ${more[@]+"${more[@]}"} >>"$folder/pytorch.json" 2>"$folder/err" ||
        { say "warning: PyTorch failed: $(grep -m 1 Error "$folder/err")" >&2; }
}
for model in $models; do
    for layout in 1x1 $layouts; do train "$model" "$layout"; done
    [ $pytorch = 0 ] || for layout in 1x1 $layouts; do train_pytorch "$model" "$layout"; done
done
python3 dev/bench/layouts_table.py "$folder" "$out"
