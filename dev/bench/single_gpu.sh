#!/usr/bin/env bash
# Measures training speed on one GPU with and without --deterministic-mode, for several GPT models
# (or llama_125m and llama_1.1b). Sequence length 2048, no dropout, synthetic data. Also measures
# PyTorch (compiled modules, fused AdamW, SDPA) if it is installed: with fp32 weights under bf16
# autocast, as precise as this program, and with bf16 weights and moments, which are less precise.
# Prints a table and writes a JSON file. Needs build/train_gpt and a GPU.
#
#   dev/bench/single_gpu.sh [--models "125m:32 350m:16 1.3b:8"] [--iters 30]
#                           [--modes "default deterministic"]
#                           [--pytorch "fp32 bf16"|none] [--out FILE.json]
#
#   models    NAME:ROWS, ROWS samples per micro-batch. NAME-N:ROWS, such as 6.7b-8:4, uses the first
#             N layers and a vocabulary of 1024, for models that do not fit on one GPU
#   modes     default, deterministic, or fp8-RECIPE: --fp8-format hybrid with this --fp8-recipe
#   pytorch   fp32, bf16: data type of the weights. fp32+fp8 and bf16+fp8 run the linear layers of
#             all blocks in FP8 with scales per tensor, which needs torchao
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
caller=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
help_if_asked dev/bench/single_gpu.sh "$@"
set -euo pipefail

models="125m:32 350m:16 1.3b:8" iterations=30 modes="default deterministic" pytorch="fp32 bf16"
out=dev/bench/results/single_gpu.json
while [ $# -gt 0 ]; do
    case $1 in
    --models) models=$2; shift ;;
    --iters) iterations=$2; shift ;;
    --modes) modes=$2; shift ;;
    --pytorch) pytorch=$2; shift ;;
    --out) case $2 in /*) out=$2 ;; *) out=$caller/$2 ;; esac; shift ;;
    *) die 2 "unknown argument $1; see dev/bench/single_gpu.sh --help" ;;
    esac
    shift
done
make_folder "$(dirname "$out")"
program=$BUILD/train_gpt
[ -x "$program" ] || die 3 "$program is missing; run make gpu"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# flags_of MODEL: sets $config to the model config, with a synthetic vocabulary of the right size.
flags_of() {
    case $1 in
    llama_1.1b) config=(@configs/llama_1.1b.args --tokenizer-type NullTokenizer --vocab-size 31999) ;;
    llama_*) config=(@configs/"$1".args) ;;
    *-*) config=(@configs/gpt_"${1%-*}".args --num-layers "${1##*-}" --tokenizer-type NullTokenizer
        --vocab-size 1023 --make-vocab-size-divisible-by 128) ;;
    *) config=(@configs/gpt_"$1".args) ;;
    esac
}
for model in $models; do
    flags_of "${model%:*}"
    for mode in $modes; do
        case $mode in
        deterministic) flags=(--deterministic-mode) ;;
        fp8-*) flags=(--fp8-format hybrid --fp8-recipe "${mode#fp8-}") ;;
        *) flags=() ;;
        esac
        rows=${model#*:}
        echo "running ${model%:*}, micro-batch $rows, $mode" >&2
        "$program" "${config[@]}" --micro-batch-size "$rows" --global-batch-size "$rows" \
            --mock-data --hidden-dropout 0 --attention-dropout 0 --train-iters 100000 --log-interval 10 \
            --exit-interval "$iterations" --eval-interval 1000000 --eval-iters 0 \
            --log-jsonl "$folder/${model%:*}.$rows.$mode.jsonl" "${flags[@]}" >"$folder/log" 2>&1 ||
            tail -n 5 "$folder/log" >&2
    done
done
if [ "$pytorch" != none ] && python3 -c 'import torch' 2>/dev/null; then
    for peer in $pytorch; do
        flags=()
        [[ $peer != *+fp8 ]] || flags=(--float8 tensorwise)
        # shellcheck disable=SC2086 # $models is a list
        python3 dev/bench/pytorch_gpt.py $models --weights "${peer%+fp8}" ${flags[@]+"${flags[@]}"} \
            >>"$folder/pytorch.json" || true
    done
fi
python3 dev/bench/single_gpu_table.py "$folder" "$out"
