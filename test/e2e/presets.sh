#!/usr/bin/env bash
# Every preset of the paper trains on 2 nodes x 2 ranks: the loss falls and ends near the
# baseline's, all replicas stay equal, and the bytes sent match --plan. With a tiny model and 40
# iterations the bounds are loose; they detect a preset that does not learn. Other tests check codec
# quality.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 800 2
data=$work/text_text_document
two_by_two=(--gpus-per-node 2 --train-iters 40 --verify-replicas-interval 1)

# preset NAME PERCENT FLAGS...: checks that the mean loss of the last 5 iterations is below 80 % of
# the first loss and at most PERCENT % above the baseline's mean.
preset() {
    local name=$1 percent=$2
    shift 2
    logged "$name" 4 "${two_by_two[@]}" "$@" && make_plan 4 "${two_by_two[@]}" "$@" &&
        sends_as_planned "$name" 1 1 40 || return 1
    local first last baseline
    first=$(mean_loss "$name" 1 1)
    last=$(mean_loss "$name" 36 40)
    baseline=$(mean_loss baseline 36 40)
    awk -v f="$first" -v l="$last" -v b="$baseline" -v p="$percent" \
        'BEGIN { exit !(l < 0.8 * f && l <= b * (1 + p / 100) && l > 0.9 * b) }' || {
        why="loss from $first to $last, baseline's $baseline"
        return 1
    }
    [ "${VERBOSE:-0}" = 0 ] || echo "# $name: loss $last, baseline $baseline, bytes $(sent "$name" 1 40)"
}
weights=(--quantized-weights --wq-group-size 128 --wq-rounding stochastic)
gradients=(--quantized-gradients --gq-group-size-intra 128 --gq-group-size-inter 128)
check "baseline, fp32 gradients" preset baseline 0
check "baseline, bf16 gradients" preset bf16 1 --grad-reduce-in-bf16
check "qW" preset qw 5 "${weights[@]}" --weight-quantization-method direct
check "qW, 8 bits" preset qw8 2 "${weights[@]}" --weight-quantization-method direct \
    --weight-quantization-bits 8
check "qWD" preset qwd 2 "${weights[@]}"
check "qWD, 8 bits" preset qwd8 2 "${weights[@]}" --weight-quantization-bits 8
check "ULq" preset ulq 10 "${gradients[@]}" --gradient-quantization-bits-intra 4
check "TLq" preset tlq 5 "${gradients[@]}"
check "TLq, 8 bits between nodes" preset tlq8 2 "${gradients[@]}" --gradient-quantization-bits-inter 8
check "TLq-HS" preset tlqhs 5 "${gradients[@]}" --hadamard-transform
check "SDP4Bit" preset sdp4bit 5 "${paper[@]}"
check "SDP4Bit, weights rounded to nearest" preset nearest 5 "${paper[@]}" --wq-rounding nearest
check "EDEN" preset eden 5 @configs/eden.args --wq-group-size 128
check "EDEN, 3 bits" preset eden3 8 @configs/eden3.args --wq-group-size 128
check "EDEN, 2 bits with error feedback" preset eden2-ef 10 @configs/eden2-ef.args --wq-group-size 128
check "Muon" preset muon 5 @configs/muon.args
without_loss() { # fewer bytes than with bf16 weights
    logged lossless 4 "${two_by_two[@]}" @configs/lossless.args && same_training baseline lossless || return 1
    awk -v plain="$(sent baseline 1 40)" -v coded="$(sent lossless 1 40)" \
        'BEGIN { split(plain, p); split(coded, c); exit !(p[1] > 1.1 * c[1] && p[2] > c[2]) }' ||
        { why="$(sent lossless 1 40) bytes, bf16 weights $(sent baseline 1 40)"; return 1; }
}
check "lossless weights: identical to the baseline" without_loss
local_steps() { # the loss is near the baseline's, and the inter-node traffic is small and as planned
    local flags=("${two_by_two[@]}" @configs/local.args --wq-group-size 128 --local-steps 5)
    logged local 4 "${flags[@]}" && make_plan 4 "${flags[@]}" || return 1
    awk -v l="$(mean_loss local 36 40)" -v b="$(mean_loss baseline 36 40)" \
        'BEGIN { exit !(l > 0.9 * b && l < 1.1 * b) }' ||
        { why="loss $(mean_loss local 36 40), baseline's $(mean_loss baseline 36 40)"; return 1; }
    # Each bucket is synchronized eight times in 40 steps. The plan shows the mean bytes per step,
    # rounded.
    field local inter_node_bytes interval | awk -v eden="$(sent eden 1 40)" -v plan="$(planned 1 2)" \
        '{ sum += $2 } END { split(eden, e); split(plan, p); rest = sum / 40 - p[1]
            exit !(p[1] > 0 && rest >= 0 && rest < 20 && e[1] > 3 * p[1]) }' ||
        { why="$(field local inter_node_bytes interval | tr '\n' ' '); planned $(planned 1 2)"; return 1; }
}
check "local steps" local_steps
sealed() { # checksums add 16 bytes per message in the plan and in the run
    preset sealed 5 "${paper[@]}" --verify-wire && same_training sdp4bit sealed &&
        [ "$(sent sealed 1 40)" != "$(sent sdp4bit 1 40)" ] ||
        { why="${why:-no checksums are sent}"; return 1; }
}
check "SDP4Bit with --verify-wire: identical losses" sealed
check "SDP4Bit in 3 chunks and several buckets" preset chunks 5 "${paper[@]}" --wq-group-size 128 \
    --gradient-alltoall-pipeline 3 --ddp-bucket-size 1000

# Every preset must differ from the others in its losses or its bytes.
presets_differ() {
    local names=(baseline bf16 qw qw8 qwd qwd8 ulq tlq tlq8 tlqhs sdp4bit nearest eden eden3 eden2-ef muon)
    local i j
    for ((i = 0; i < ${#names[@]}; i++)); do
        for ((j = i + 1; j < ${#names[@]}; j++)); do
            ! same_training "${names[i]}" "${names[j]}" ||
                { why="${names[i]} and ${names[j]} train identically"; return 1; }
        done
    done
}
check "no two presets train identically" presets_differ
fewer_bytes() {
    awk -v bf16="$(sent bf16 1 40)" -v quantized="$(sent sdp4bit 1 40)" \
        'BEGIN { split(bf16, b); split(quantized, q); exit !(b[1] > 2.5 * q[1]) }' ||
        why="bf16 sent $(sent bf16 1 40), SDP4Bit $(sent sdp4bit 1 40)"
}
check "SDP4Bit sends far fewer bytes between nodes" fewer_bytes

late_start() {
    local flags=(--gpus-per-node 2 --train-iters 12 "${gradients[@]}" \
        --gradients-quantization-start-iteration 5)
    logged late 4 "${flags[@]}" && make_plan 4 "${flags[@]}" && sends_as_planned late 1 1 5 &&
        sends_as_planned late 2 6 12
}
check "--gradients-quantization-start-iteration switches the gradient format" late_start
single_hop() { # NP PER-NODE: one of the two reductions has only one rank per group
    logged "hop$2" "$1" "${paper[@]}" --gpus-per-node "$2" --train-iters 20 --verify-replicas-interval 1 ||
        return 1
    local last
    last=$(mean_loss "hop$2" 16 20)
    awk -v l="$last" -v f="$(mean_loss "hop$2" 1 1)" 'BEGIN { exit !(l < 0.9 * f) }' ||
        { why="loss ends at $last"; return 1; }
}
check "SDP4Bit on one node of 4" single_hop 4 4
check "SDP4Bit on 2 nodes of 1" single_hop 2 1
# With groups of 32 the bucket layout equals the baseline's, so gradient norms are summed in the
# same order too.
one_rank_exact() {
    local groups=(--wq-group-size 32 --gq-group-size-intra 32 --gq-group-size-inter 32)
    logged alone 1 && logged quantized_alone 1 "${paper[@]}" "${groups[@]}" &&
        same_training alone quantized_alone || return 1
    [ "$(grep -c 'WARNING: a single data-parallel rank sends no weights and gradients' "$work/out")" -eq 1 ] ||
        { why="no warning, or several"; return 1; }
}
check "one rank: the quantization flags change nothing, with one warning" one_rank_exact
finish
