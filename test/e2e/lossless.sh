#!/usr/bin/env bash
# Losslessly coded weights: losses, norms and checkpoints are bitwise identical to those with bf16
# weights in every layout and strategy, and fewer bytes are sent. Also tests kills, skipped steps
# and corrupted messages.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 11
data=$work/text_text_document
long() { [ "${LONG:-0}" = 1 ]; }

# Small buckets: one per layer. They share two buffers alternately.
model+=(--num-layers 4 --make-vocab-size-divisible-by 32)
run=(--train-iters 6 --ddp-bucket-size 1 --eval-interval 3 --save-interval 6 --log-interval 2
    --hidden-dropout 0.1 --verify-replicas-interval 2)
lossless=(--quantized-weights --weight-quantization-method lossless)
gradients=(--quantized-gradients --gq-group-size-intra 128 --gq-group-size-inter 128 --hadamard-transform)
all=(--data-parallel-sharding-strategy optim_grads_params)

# bytes NAME: prints the sum of inter-node and intra-node bytes over all intervals.
bytes() {
    { field "$1" inter_node_bytes interval; field "$1" intra_node_bytes interval; } |
        awk '{ sum += $2 } END { printf "%d", sum }'
}
# agree NP FLAGS...: compares a run with lossless weights and one with bf16 weights.
agree() {
    local np=$1 flags=("${run[@]}" --global-batch-size $((2 * $1)) "${@:2}")
    rm -rf "$work"/{bf16,coded}.saved
    logged bf16 "$np" "${flags[@]}" --save "$work/bf16.saved" &&
        make_plan "$np" "${flags[@]}" "${lossless[@]}" &&
        logged coded "$np" "${flags[@]}" "${lossless[@]}" --save "$work/coded.saved" &&
        same_training bf16 coded && allocated_as_planned || return 1
    local file
    for file in "$work"/bf16.saved/iter_0000006/mp_rank_*/*.safetensors; do
        cmp -s "$file" "$work/coded.saved/${file#"$work/bf16.saved/"}" ||
            { why="${file##*/} differs"; return 1; }
    done
    [ "$(field bf16 loss valid)" = "$(field coded loss valid)" ] ||
        { why="validation losses differ"; return 1; }
    [ "$np" = 1 ] && return
    [ "$(bytes coded)" -lt "$(bytes bf16)" ] || { why="$(bytes coded) bytes, bf16 $(bytes bf16)"; return 1; }
}
check "2 nodes of 2" agree 4 --gpus-per-node 2
check "2 nodes of 1, checksums" agree 2 --gpus-per-node 1 --verify-wire
check "1 node of 3, no overlap" agree 3 --gpus-per-node 3 --no-overlap
check "one rank sends nothing" agree 1 --gpus-per-node 1
check "with SDP4Bit's gradients, checksums" agree 4 --gpus-per-node 2 "${gradients[@]}" --verify-wire
check "sharded gradients, two micro-batches" agree 4 --gpus-per-node 2 --global-batch-size 16 \
    --data-parallel-sharding-strategy optim_grads
check "weights sharded inside the node" agree 4 --gpus-per-node 2 "${all[@]}" --verify-wire
check "the optimizer on the host" agree 4 --gpus-per-node 2 --optimizer-cpu-offload --verify-wire
check "the optimizer on disk" agree 4 --gpus-per-node 2 --optimizer-disk-offload "$work/state"
check "sharded weights, the optimizer on the host" agree 4 --gpus-per-node 2 "${all[@]}" \
    --optimizer-cpu-offload
check "tensor parallel 2, sequence parallel" agree 4 --gpus-per-node 2 --tensor-model-parallel-size 2 \
    --make-vocab-size-divisible-by 16 --sequence-parallel --global-batch-size 4
check "two pipeline stages" agree 4 --gpus-per-node 2 --pipeline-model-parallel-size 2 --global-batch-size 4 \
    --num-layers 8 --max-position-embeddings 512
check "local steps, checksums" agree 4 --gpus-per-node 2 "${gradients[@]}" --local-steps 3 \
    --local-steps-delay 1 --verify-wire
check "background saves" agree 4 --gpus-per-node 2 --async-save --save-interval 2
if long; then
    check "4 nodes of 2, several layers per bucket" agree 8 --gpus-per-node 2 --num-layers 6 \
        --ddp-bucket-size 30000
    check "3 nodes of 2, weights sharded inside the node, checksums" agree 6 --gpus-per-node 2 "${all[@]}" \
        --verify-wire \
        --global-batch-size 24
fi

# Skipped steps send almost nothing and change nothing.
skips_alike() {
    local flags=(4 "${run[@]}" --gpus-per-node 2 --train-iters 80 --lr-decay-iters 80 --eval-interval 100
        --save-interval 80 --hidden-dropout 0 --on-spike skip --loss-spike-factor 0.01
        --norm-spike-factor 0.01 --max-skipped-in-a-row 0 "$@")
    logged bf16 "${flags[@]}" && logged coded "${flags[@]}" "${lossless[@]}" && same_training bf16 coded ||
        return 1
    [ "$(grep -c '"kind":"spike".*"skipped":true' "$work/coded.jsonl")" -ge 3 ] ||
        { why="few spikes"; return 1; }
}
check "skipped steps" skips_alike --verify-wire

# Checkpoints do not record the weight format, so runs with either format can resume from them.
takes_turns() {
    local name turns=("$work/turns.saved") flags=(4 "${run[@]}" --gpus-per-node 2 --save-interval 2)
    rm -rf "${turns[0]}" "$work/whole.saved"
    logged whole "${flags[@]}" --save "$work/whole.saved" || return 1
    for name in 2 4 6; do
        local weights=("${lossless[@]}")
        [ $name = 4 ] && weights=()
        logged turn "${flags[@]}" "${weights[@]}" --save "${turns[0]}" --load "${turns[0]}" \
            --exit-interval $name || return 1
    done
    same_shards "$work/whole.saved" "${turns[0]}" 6 4
}
check "a lossless run resumes with bf16 weights and then with lossless ones" takes_turns

killed_and_resumed() { # FLAGS...; needs the runs of takes_turns
    local flags=("${run[@]}" --gpus-per-node 2 --save-interval 2 "${lossless[@]}"
        --save "$work/killed.saved" "$@")
    rm -rf "$work/killed.saved"
    SDP4BIT_FAULT=stall:3:5:0 in_background killed 4 "${flags[@]}" --async-save
    wait_for_iteration killed 4 && signal_rank KILL 1 || return 1
    job_ended killed && { why="exit code 0"; return 1; }
    logged resumed 4 "${flags[@]}" --load "$work/killed.saved" &&
        same_shards "$work/whole.saved" "$work/killed.saved" 6 4
}
check "kill -9, resumed bit-exactly" killed_and_resumed
check "kill -9 with sharded weights and the optimizer on the host" killed_and_resumed "${all[@]}" \
    --optimizer-cpu-offload

# Corruption. The decoder detects invalid headers and a receiver whose previous weights differ from
# the sender's. Only a checksum detects every flipped bit.
finds() { # TEXT FAULT FLAGS...
    SDP4BIT_FAULT=$2 train 2 "${run[@]}" --gpus-per-node 1 --grad-reduce-in-bf16 "${lossless[@]}" \
        --verify-replicas-interval 100 "${@:3}"
    error_names 7 "$1" $?
}
check "an undecodable message" finds \
    "message from rank 0 to rank 1, weights between nodes, bucket 0: it is corrupt, or" message:1:3:5:0
check "a replica that differs" finds "the weights of the two ranks already differed" replica:1:3:1:14
check "checksums detect the corruption" finds \
    "weights between nodes, bucket 0: it was corrupted in transit" \
    message:1:3:5:0 --verify-wire
check "checksums detect corruption inside a node" finds "weights inside the node, bucket 0: it is corrupt" message:1:3:5:0 \
    --gpus-per-node 2

check "weights sharded across all ranks are refused" refused 2 \
    "--shard-params-over world keeps no full weights" 2 \
    "${lossless[@]}" "${all[@]}" --shard-params-over world
finish
