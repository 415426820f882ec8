#!/usr/bin/env bash
# Measures the cost of saving checkpoints: runs the same steps without saves, with --async-save, and
# with blocking saves. Prints a table and writes JSON. dev/bench/save_table.py describes the
# columns. Target: the step after a background save takes at most 5 % longer.
#
#   dev/bench/save.sh [--model 1.3b:8] [--ranks N] [--iters 400] [--save-interval 100]
#                     [--ways "none async sync"] [--flags "FLAGS"] [--folder FOLDER]
#                     [--logs FOLDER] [--out FILE.json]
#
#   model          NAME:MICRO_BATCH of configs/gpt_NAME.args, of dev/bench/NAME.args or of a file.
#                  Global batch = micro-batch x ranks
#   ranks          number of ranks, in one node [all GPUs]
#   iters          number of steps per run, a multiple of save-interval, because a run also saves at
#                  its end [400; CPU ranks 30]
#   save-interval  steps between saves [100; CPU ranks 10]. They must take longer than writing a
#                  checkpoint: saves that wait for the previous one are excluded from the step
#                  columns
#   flags          additional trainer flags, such as payload formats [SDP4Bit]
#   folder         folder for checkpoints, on the disk to measure [temporary]. Needs space for two
#                  checkpoints of 14 bytes per parameter
#   logs           keeps the logs of the runs in this folder
#
# Needs make gpu. DEVICE=cpu uses CPU ranks, by default a small model (small:2), and writes results
# to runs/. It is for trying the script, not for measurements. BUILD: folder of the programs.
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
caller=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
help_if_asked dev/bench/save.sh "$@"
set -euo pipefail

COMMAND_LINE="dev/bench/save.sh${*:+ ${*@Q}}"
export COMMAND_LINE
model='' ranks='' iters='' interval='' ways='none async sync' folder='' logs='' out=''
device=${DEVICE:-gpu}
flags=(--quantized-weights --quantized-gradients --gq-group-size-intra 128 --hadamard-transform)
from_caller() { case $1 in /*) say "$1" ;; *) say "$caller/$1" ;; esac; }
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || die 2 "$1 needs a value; see dev/bench/save.sh --help"
    case $1 in
    --model) model=$2 ;;
    --ranks) ranks=$2 ;;
    --iters) iters=$2 ;;
    --save-interval) interval=$2 ;;
    --ways) ways=$2 ;;
    --flags) read -ra flags <<<"$2" ;;
    --folder) folder=$(from_caller "$2") ;;
    --logs) logs=$(from_caller "$2") ;;
    --out) out=$(from_caller "$2") ;;
    *) die 2 "unknown argument $1; see dev/bench/save.sh --help" ;;
    esac
    shift 2
done
case $device in
gpu)
    trainer=$BUILD/train_gpt model=${model:-1.3b:8} iters=${iters:-400} interval=${interval:-100}
    out=${out:-dev/bench/results/save.json} made='make gpu'
    IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES:-}"
    [ -n "$ranks" ] || [ ${#visible[@]} = 0 ] || ranks=${#visible[@]}
    [ -n "$ranks" ] || ranks=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    ;;
cpu)
    trainer=$BUILD/train_gpt_cpu model=${model:-small:2} iters=${iters:-30} interval=${interval:-10}
    out=${out:-runs/save_cpu.json} made=make ranks=${ranks:-2}
    ;;
*) die 2 "DEVICE=$device is unknown; use gpu or cpu" ;;
esac
make_folder "$(dirname "$out")"
[ -x "$trainer" ] || die 3 "$trainer is missing; run $made"
[[ $ranks =~ ^[1-9][0-9]*$ ]] || die 3 "no GPU was found; set the number of ranks with --ranks"
[[ $iters =~ ^[1-9][0-9]*$ && $interval =~ ^[1-9][0-9]*$ ]] && [ $((iters % interval)) = 0 ] &&
    [ "$iters" -ge $((2 * interval)) ] ||
    die 2 "--iters must be a multiple of --save-interval, and at least twice as large"
[[ $model =~ ^(.+):([1-9][0-9]*)$ ]] ||
    die 2 "the model $model has no micro-batch; use NAME:MICRO_BATCH"
config=configs/gpt_${BASH_REMATCH[1]}.args rows=${BASH_REMATCH[2]}
[ -f "$config" ] || config=dev/bench/${BASH_REMATCH[1]}.args
[ -f "$config" ] || config=$(from_caller "${BASH_REMATCH[1]}")
[ -f "$config" ] || die 2 "there is no model config configs/gpt_${model%:*}.args"
for way in $ways; do
    case $way in none | async | sync) ;; *) die 2 "the way $way is unknown; use none, async or sync" ;; esac
done

[ -z "$folder" ] || mkdir -p "$folder"
own=$(mktemp -d ${folder:+"$folder/save.XXXXXX"}) ||
    die 3 "cannot create a folder for checkpoints${folder:+ in $folder}"
trap 'rm -rf "$own"' EXIT
trap 'exit 1' HUP INT TERM
[ -n "$logs" ] || logs=$own/logs
mkdir -p "$logs"

common=("@$config" --micro-batch-size "$rows" --global-batch-size $((rows * ranks)) --mock-data
    --hidden-dropout 0 --attention-dropout 0 --train-iters 1000000 --eval-interval 1000000 --eval-iters 0
    --log-interval 1 --exit-interval "$iters" --gpus-per-node "$ranks" ${flags[@]+"${flags[@]}"})
for way in $ways; do
    saves=()
    [ "$way" = none ] || saves=(--save "$own/$way" --save-interval "$interval" --keep-last-checkpoints 1)
    [ "$way" != async ] || saves+=(--async-save)
    say "$SECONDS s: $way" >&2
    rm -f "$logs/$way".*
    # The table needs the arrival time of each line.
    launch "$ranks" "$trainer" "${common[@]}" ${saves[@]+"${saves[@]}"} --log-jsonl "$logs/$way.jsonl" \
        2>"$logs/$way.err" | python3 dev/bench/save_table.py stamp "$logs/$way.lines" ||
        { tail -n 5 "$logs/$way.err" >&2; die 1 "the run $way failed"; }
    if [ "$way" != none ]; then
        # Size of the only checkpoint, and file system.
        {
            find "$own/$way" -type f -path '*/iter_*' -printf '%s\n' |
                awk '{ sum += $1 } END { printf "bytes %d\n", sum }'
            say "filesystem $(df --output=fstype "$own" | tail -n 1)"
            "$trainer" "${common[@]}" "${saves[@]}" --plan --plan-world-size "$ranks" 2>/dev/null |
                awk '/copy of a checkpoint/ { bytes = $NF } END { printf "pinned %d\n", bytes }'
        } >"$logs/$way.sizes"
        rm -rf "${own:?}/$way"
    fi
done
python3 dev/bench/save_table.py table "$logs" "$out" "$model" "$iters" "$interval" "$ways"
