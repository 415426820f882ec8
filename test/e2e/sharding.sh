#!/usr/bin/env bash
# Sharded gradients and weights, and the optimizer in host memory. With one micro-batch per step,
# every strategy is bitwise identical to `optim` in losses, norms, validation, text samples and
# checkpoints. Every run allocates and sends what --plan predicts. Also tests checkpoints across
# strategies, kills, flipped bits, and model parallelism. LONG=1 tests every strategy with every
# preset and layout.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 11
data=$work/text_text_document
long() { [ "${LONG:-0}" = 1 ]; }

# Small groups and buckets make each of the four layers a separate bucket, and there are two buffer
# slots. With only two layers per stage, both would still be in the slots after an evaluation, and
# the next step would send less than planned. Many positions make the first stage the largest one,
# whose memory --plan reports.
model+=(--num-layers 4 --make-vocab-size-divisible-by 32)
run=(--train-iters 6 --ddp-bucket-size 1 --eval-interval 3 --save-interval 6 --log-interval 2
    --hidden-dropout 0.1 --attention-dropout 0.1 --sample-prompt "the quick " --sample-tokens 8
    --verify-replicas-interval 2)
sdp4bit=(--quantized-weights --wq-group-size 128 --wq-rounding stochastic --quantized-gradients
    --gq-group-size-intra 128 --gq-group-size-inter 128 --hadamard-transform)
direct=(--quantized-weights --weight-quantization-method direct --wq-group-size 128)

# strategy_of NAME: sets $strategy to the flags of a strategy. "grads+offload" is optim_grads with
# the optimizer in host memory, "grads+disk" with the optimizer in files.
strategy_of() {
    local all=(--data-parallel-sharding-strategy optim_grads_params)
    case ${1%+*} in
    optim) strategy=() ;;
    none) strategy=(--data-parallel-sharding-strategy no_shard) ;;
    grads) strategy=(--data-parallel-sharding-strategy optim_grads) ;;
    node) strategy=("${all[@]}") ;;
    world) strategy=("${all[@]}" --shard-params-over world) ;;
    second) strategy=("${all[@]}" --shard-params-over world --secondary-partition) ;;
    esac
    case $1 in
    *+offload) strategy+=(--optimizer-cpu-offload) ;;
    *+disk) strategy+=(--optimizer-disk-offload "$work/state") ;;
    esac
}

# same_saved A B: compares weights and moments of two runs' last checkpoints byte by byte.
same_saved() {
    local file found=0
    for file in "$work/$1.saved"/iter_*/mp_rank_*/*.safetensors; do
        cmp -s "$file" "$work/$2.saved/${file#"$work/$1.saved/"}" ||
            { why="${file##*/} of $2 differs"; return 1; }
        found=$((found + 1))
    done
    [ "$found" -gt 0 ] || { why="$1 saved nothing"; return 1; }
}
# same_run A B: compares everything that two runs log about training.
same_run() {
    same_training "$1" "$2" && same_saved "$1" "$2" || { why="$2: $why"; return 1; }
    [ "$(field "$1" loss valid)" = "$(field "$2" loss valid)" ] && [ -n "$(field "$1" loss valid)" ] ||
        { why="validation losses of $2 differ"; return 1; }
    cmp -s "$work/$1.sample" "$work/$2.sample" && [ -s "$work/$1.sample" ] ||
        { why="the text of $2 differs"; return 1; }
}
# saved NAME NP FLAGS...: trains and keeps the checkpoint and the text sample.
saved() {
    local name=$1
    rm -rf "$work/$name.saved"
    logged "$@" --save "$work/$name.saved" && sed -n '/^sample at/,$p' "$work/out" >"$work/$name.sample"
}
# trains_alike STRATEGIES NP PER_NODE FLAGS...: checks that each strategy matches optim with one
# micro-batch per step, and allocates and sends what is planned. The first step sends more if later
# steps gather quantized weights, because initial weights are not quantized.
trains_alike() {
    local name np=$2 per_node=$3 words=$1 from
    shift 3
    local flags=("${run[@]}" --gpus-per-node "$per_node" --global-batch-size $((2 * np)) "$@")
    saved optim "$np" "${flags[@]}" || return 1
    for name in $words; do
        strategy_of "$name"
        make_plan "$np" "${flags[@]}" "${strategy[@]}" &&
            saved "$name" "$np" "${flags[@]}" "${strategy[@]}" &&
            same_run optim "$name" && allocated_as_planned || { why="$name: $why"; return 1; }
        case $name in world* | second*) from=3 ;; *) from=1 ;; esac
        [ "$np" = 1 ] || sends_as_planned "$name" 1 $from 100 "$per_node" || { why="$name: $why"; return 1; }
    done
}
few="node node+offload" five="grads node optim+offload grads+offload node+offload node+disk"
over_all="world second"
if long; then few=$five over_all="world second world+offload second+offload second+disk"; fi
check "SDP4Bit, 2 nodes of 2: bitwise identical to optim" trains_alike "$five" 4 2 "${sdp4bit[@]}"
check "SDP4Bit, 2 nodes of 1" trains_alike "$few" 2 1 "${sdp4bit[@]}"
check "2 nodes of 1, sharded across all ranks" trains_alike "$over_all" 2 1
check "SDP4Bit, 1 node of 2" trains_alike "$few" 2 2 "${sdp4bit[@]}"
check "SDP4Bit, 1 node of 4, full recomputation" trains_alike "$few" 4 4 "${sdp4bit[@]}" \
    --recompute-granularity full
check "one rank shards nothing" trains_alike "node optim+offload" 1 1 "${sdp4bit[@]}"
check "fp32 gradients" trains_alike "$few $over_all" 4 2
check "TLq and direct weights" trains_alike "grads node $over_all" 4 2 "${sdp4bit[@]:5}" "${direct[@]}"
check "--verify-wire" trains_alike "grads node" 4 2 "${sdp4bit[@]}" --verify-wire
check "--verify-wire, sharded across all ranks" trains_alike "$over_all" 4 2 "${direct[@]}" --verify-wire
check "nothing sharded, 2 nodes of 2, checksums" trains_alike "none none+offload none+disk" 4 2 "${sdp4bit[@]:5}" \
    --verify-wire --error-feedback
if long; then
    check "nothing sharded, 2 nodes of 1" trains_alike "none none+offload" 2 1
    check "nothing sharded, 1 node of 2" trains_alike "none none+offload" 2 2 --no-overlap
    check "nothing sharded, one rank" trains_alike "none none+offload" 1 1
    check "nothing sharded, two pipeline stages" trains_alike none 4 2 --pipeline-model-parallel-size 2 \
        --global-batch-size 4 --num-layers 8 --max-position-embeddings 512
    check "bf16 gradients" trains_alike "$five $over_all" 4 2 --grad-reduce-in-bf16
    check "qWD" trains_alike "$five" 4 2 --grad-reduce-in-bf16 "${sdp4bit[@]:0:5}"
    check "qW" trains_alike "$five $over_all" 4 2 --grad-reduce-in-bf16 "${direct[@]}"
    check "ULq" trains_alike "$five $over_all" 4 2 "${sdp4bit[@]:5}" --gradient-quantization-bits-intra 4
    check "ZeRO++ on 4 nodes of 2" trains_alike "$over_all" 8 2 "${direct[@]}" "${sdp4bit[@]:5}" \
        --gradient-quantization-bits-intra 4 --num-layers 8
    check "8 ranks, several layers per bucket" trains_alike "$five" 8 4 "${sdp4bit[@]}" --num-layers 6 \
        --ddp-bucket-size 30000
fi

# Model parallelism.
halves=(--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 16)
check "tensor parallel 2, sequence parallel" trains_alike "$few" 4 2 "${sdp4bit[@]}" "${halves[@]}" \
    --sequence-parallel --global-batch-size 4
check "tensor parallel 2, nothing sharded" trains_alike none 4 2 "${halves[@]}" --sequence-parallel \
    --global-batch-size 4
check "two pipeline stages" trains_alike "$few" 4 2 "${sdp4bit[@]}" --pipeline-model-parallel-size 2 \
    --global-batch-size 4 --num-layers 8 --max-position-embeddings 512
if long; then
    check "four stages, the middle ones without embeddings" trains_alike "$five" 8 2 "${sdp4bit[@]}" \
        --pipeline-model-parallel-size 4 --global-batch-size 4 --num-layers 12 --max-position-embeddings 512
    check "tensor parallel 2, pipeline 2" trains_alike "$five" 8 4 "${sdp4bit[@]}" "${halves[@]}" \
        --pipeline-model-parallel-size 2 --global-batch-size 4 --num-layers 8 --max-position-embeddings 512
fi

# With several micro-batches, sharded gradients are quantized once per micro-batch, so losses differ
# slightly from optim. Strategies that only store weights or optimizer elsewhere are still
# identical.
several_micro_batches() { # STRATEGIES NP FLAGS...
    local name np=$2 flags=("${run[@]}" --gpus-per-node 2 "${@:3}")
    for name in optim grads $1; do
        strategy_of "$name"
        make_plan "$np" "${flags[@]}" "${strategy[@]}" &&
            saved "$name" "$np" "${flags[@]}" "${strategy[@]}" &&
            allocated_as_planned && sends_as_planned "$name" 1 3 100 || { why="$name: $why"; return 1; }
        case $name in optim | grads) continue ;; esac
        same_run grads "$name" || return 1
    done
    paste -d ' ' <(field optim loss) <(field grads loss) | awk \
        '{ d = $2 / $4 - 1; n++; if (!(d < 5e-3 && d > -5e-3)) exit 1 } END { exit n != 6 }' ||
        { why="losses of grads are far from optim's"; return 1; }
    ! same_training optim grads || { why="grads and optim are bitwise identical"; return 1; }
    why=
}
moved="node grads+offload node+disk"
check "three micro-batches per step" several_micro_batches "$moved" 4 "${sdp4bit[@]}" --global-batch-size 24
check "two micro-batches per step, weights sharded across all ranks" several_micro_batches "$over_all" 4 "${sdp4bit[@]:5}" "${direct[@]}" \
    --global-batch-size 16
check "four micro-batches through two interleaved stages" several_micro_batches "$moved" 4 "${sdp4bit[@]}" \
    --global-batch-size 16 --num-layers 8 --pipeline-model-parallel-size 2 \
    --num-layers-per-virtual-pipeline-stage 2 --max-position-embeddings 512

# Each strategy resumes bit-exactly from a checkpoint of another strategy.
change=(--train-iters 12 --ddp-bucket-size 1 --eval-interval 100 --save-interval 2 --gpus-per-node 2
    --log-interval 2)
strategies_take_turns() { # STRATEGIES FLAGS...: six strategies
    local name at=0 change=("${change[@]}" "${@:2}")
    rm -rf "$work/turns" "$work/whole.saved"
    logged whole 4 "${change[@]}" --save "$work/whole.saved" || return 1
    for name in $1; do
        at=$((at + 2))
        strategy_of "$name"
        logged turn 4 "${change[@]}" "${strategy[@]}" --save "$work/turns" --load "$work/turns" \
            --exit-interval $at || return 1
        [ "$(train_lines turn)" = "$(train_lines whole $((at - 2)) | head -n 2)" ] ||
            { why="$name diverged at iteration $at"; return 1; }
    done
    ln -sfn "$work/turns" "$work/turns.saved" && same_saved whole turns
}
check "strategies without quantized weights take turns" strategies_take_turns \
    "none node+offload none+disk optim none grads+disk" "${sdp4bit[@]:5}" --async-save
check "strategies take turns on one checkpoint" strategies_take_turns \
    "optim node+disk grads node optim+offload grads+disk" "${sdp4bit[@]}"

killed_and_resumed() { # STRATEGY FLAGS...; needs a run of strategies_take_turns with these flags
    local change=("${change[@]}" "${@:2}" --save "$work/killed.saved")
    strategy_of "$1"
    rm -rf "$work/killed.saved"
    SDP4BIT_FAULT=stall:3:11:0 in_background killed 4 "${change[@]}" "${strategy[@]}" --async-save
    wait_for_iteration killed 7 && signal_rank KILL 1 || return 1
    job_ended killed && { why="exit code 0"; return 1; }
    logged resumed 4 "${change[@]}" "${strategy[@]}" --load "$work/killed.saved" &&
        same_training whole resumed "$(($(field resumed loss | head -n 1 | cut -d ' ' -f 1) - 1))" &&
        same_saved whole killed
}
check "kill -9, resumed bit-exactly" killed_and_resumed node+disk "${sdp4bit[@]}"
if long; then
    check "strategies that shard across all ranks take turns" strategies_take_turns \
        "world optim second node second+offload world" "${direct[@]}" "${sdp4bit[@]:5}"
    check "kill -9, resumed bit-exactly with ZeRO++" killed_and_resumed second "${direct[@]}" "${sdp4bit[@]:5}"
fi

# A skipped step must not change the weights. If weights are sharded across all ranks, it must not
# change the stored quantized weights.
skips_alike() { # STRATEGIES FLAGS...
    local name words=$1 flags=(4 "${run[@]}" --gpus-per-node 2 --train-iters 80 --lr-decay-iters 80
        --eval-interval 100 --save-interval 80 --hidden-dropout 0 --attention-dropout 0 --on-spike skip
        --loss-spike-factor 0.01 --norm-spike-factor 0.01 --max-skipped-in-a-row 0 "${@:2}")
    saved optim "${flags[@]}" || return 1
    [ "$(grep -c '"kind":"spike".*"skipped":true' "$work/optim.jsonl")" -ge 3 ] ||
        { why="few spikes"; return 1; }
    for name in $words; do
        strategy_of "$name"
        saved "$name" "${flags[@]}" "${strategy[@]}" && same_training optim "$name" &&
            same_saved optim "$name" || { why="$name: $why"; return 1; }
    done
}
check "skipped steps" skips_alike node "${sdp4bit[@]}" --global-batch-size 8
if long; then
    check "skipped steps, nothing sharded" skips_alike "none none+offload" "${sdp4bit[@]:5}" \
        --global-batch-size 8
fi
check "skipped steps, sharded across all ranks" skips_alike "world second" "${direct[@]}" \
    --global-batch-size 8

# Skips the first step, before any update has produced quantized weights, by corrupting a gradient
# message. EXCHANGE is the message's index, which depends on the gathers in forward and backward.
skips_the_first() { # STRATEGY EXCHANGE
    local flags=(4 "${run[@]}" --gpus-per-node 2 --global-batch-size 8 --on-nan skip "${direct[@]}")
    strategy_of "$1"
    SDP4BIT_FAULT=message:3:1:1:-2 saved optim "${flags[@]}" &&
        SDP4BIT_FAULT=message:3:1:$2:-2 saved "$1" "${flags[@]}" "${strategy[@]}" || return 1
    [ "$(field "$1" skipped | head -n 1)" = "1 true" ] || { why="the first step is applied"; return 1; }
    [ "$(train_lines optim 1)" = "$(train_lines "$1" 1)" ] && [ "$(train_lines "$1" 1 | wc -l)" -gt 3 ] &&
        same_saved optim "$1"
}
check "the first step is skipped, sharded across all ranks" skips_the_first world 9

# A bit flips in one copy of a weight. If weights are sharded inside a node, each node has one copy.
# With two nodes there is no majority, so both restore from the master weights. With four nodes the
# other three agree.
flipped() { # STRATEGY NP EXPECTED
    strategy_of "$1"
    local check=("$2" "${run[@]}" --gpus-per-node 2 --global-batch-size $((2 * $2)) "${strategy[@]}"
        --verify-replicas-interval 1 --grad-reduce-in-bf16 --eval-interval 100)
    logged calm "${check[@]}" && SDP4BIT_FAULT=replica:2:4:1 logged hit "${check[@]}" || return 1
    grep '^{"kind":"repair"' "$work/hit.jsonl" | grep -qF "$3" ||
        { why="repairs: $(grep '^{"kind":"repair"' "$work/hit.jsonl")"; return 1; }
    same_training calm hit
}
check "flipped bit, weights sharded in the node: both nodes take the master weights" flipped node 4 \
    '"from":null'
check "flipped bit, four nodes: the majority wins" flipped node 8 '"ranks":"2","from":0'
check "flipped bit, only gradients sharded: the same as with optim" flipped grads 4 '"ranks":"2","from":0'
check "flipped bit, nothing sharded: the majority wins" flipped none 4 '"ranks":"2","from":0'

# Differing copies of a tensor are repaired from the master weights when the run ends with a save.
# From then on gathers must send the repaired weights, not the quantized weights of the last update:
# evaluation must use the weights that are saved.
repaired_and_saved() {
    local end=(4 "${run[@]}" --gpus-per-node 2 --global-batch-size 4 "${direct[@]}" "${halves[@]}"
        --verify-replicas-interval 1000 --eval-interval 1000)
    strategy_of world
    rm -rf "$work/hit.saved"
    SDP4BIT_FAULT=replica:2:6:1:-2 \
        logged hit "${end[@]}" "${strategy[@]}" --save "$work/hit.saved" || return 1
    grep -q '^{"kind":"repair"' "$work/hit.jsonl" || { why="nothing was repaired"; return 1; }
    logged loaded "${end[@]}" "${strategy[@]}" --load "$work/hit.saved" --skip-train || return 1
    [ -n "$(field hit loss valid)" ] && [ "$(field hit loss valid)" = "$(field loaded loss valid)" ] ||
        { why="losses $(field hit loss valid | tr '\n' ' '), from the checkpoint $(field loaded loss valid | tr '\n' ' ')"; return 1; }
}
check "repaired copies are sent" repaired_and_saved

# A bit flips in a message.
broken_message() { # STRATEGY FROM TEXT [EXCHANGE]
    strategy_of "$1"
    SDP4BIT_FAULT=message:1:4:${4:-0} train 4 "${run[@]}" --gpus-per-node 2 "${sdp4bit[@]}" "${strategy[@]}" \
        --verify-wire
    error_names 7 "message from rank $2 to rank 1, $3, bucket" $?
}
check "--verify-wire detects it with sharded gradients" broken_message grads 0 "gradients inside the node"
check "--verify-wire detects it in a layer's weights" broken_message node 0 "weights of a layer"
quantized=("${sdp4bit[@]}")
sdp4bit=("${quantized[@]:5}")
check "--verify-wire detects it in reduced gradients" broken_message none 0 \
    "reduced gradients inside the node" 3
sdp4bit=("${quantized[@]}" --weight-quantization-method direct)
check "--verify-wire detects it in a layer's quantized weights" broken_message world 3 \
    "weights of a layer between nodes"

# Bytes per parameter without activations, for the model sizes that need these strategies.
bytes_per_parameter() { # MOST STRATEGY CONFIG
    strategy_of "$2"
    "$BUILD/train_gpt_cpu" "@configs/gpt_$3.args" @configs/sdp4bit.args --plan --plan-world-size 16 \
        --gpus-per-node 8 --recompute-granularity full "${strategy[@]}" >"$work/plan" 2>"$work/err" ||
        { say "--plan failed"; return 1; }
    awk -v most="$1" '/^  (weights|gradients|optimizer state|norm and step status|communication) .* bytes/ {
            sum += $(NF - 1); groups++ }
        END { printf "%.3f\n", sum; exit !(groups >= 4 && sum <= most) }' "$work/plan" >"$work/bytes" ||
        { why="$(cat "$work/bytes") bytes instead of $1"; return 1; }
}
for config in 1.3b 13b; do
    check "$config: optim_grads, 4.2 bytes per parameter" bytes_per_parameter 4.2 grads $config
    check "$config: optim_grads_params, 2.6" bytes_per_parameter 2.6 node $config
    check "$config: with offload, 1.6" bytes_per_parameter 1.6 node+offload $config
done
finish
