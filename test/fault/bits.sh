#!/usr/bin/env bash
# Flips single bits of model weights, payloads and checkpoints (SDP4BIT_FAULT, llmc/base/fault.h).
# Every flip must be detected and reported. Weights are repaired, and training then is
# bitwise identical to a run without the fault.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 8
data=$work/text_text_document
run=(--gpus-per-node 2 --eval-iters 0 --ddp-bucket-size 1000 --wq-group-size 128)
several=("${paper[@]}" --wq-group-size 128 --gradient-alltoall-pipeline 1)

# --- replicas ---
with_fault() { # FAULT NAME NP FLAGS...
    local fault=$1
    shift
    SDP4BIT_FAULT=$fault logged "$@"
}
repairs() { grep '^{"kind":"repair"' "$work/$1.jsonl" | sed 's/"kind":"repair",//'; }
repaired() { # PRESET FAULT EXPECTED FLAGS...: logs EXPECTED and trains as without the fault
    local name=$1 fault=$2 expected=$3
    shift 3
    [ -s "$work/$name.jsonl" ] || logged "$name" 4 "${run[@]}" "$@" --verify-replicas-interval 1 || return 1
    with_fault "$fault" hit 4 "${run[@]}" "$@" --verify-replicas-interval 1 || return 1
    [ -z "$(repairs "$name")" ] && [ "$(repairs hit)" = "$expected" ] ||
        { why="repairs: $(repairs hit), without the fault: $(repairs "$name")"; return 1; }
    same_training "$name" hit
}
check "baseline: rank 2 in the minority" repaired baseline replica:2:5:0 \
    '{"iteration":5,"bucket":0,"ranks":"2","from":0}'
check "SDP4Bit: rank 2 in the minority" repaired sdp4bit replica:2:5:1 \
    '{"iteration":5,"bucket":1,"ranks":"2","from":0}' "${several[@]}"
check "SDP4Bit: in the middle of a bucket" repaired sdp4bit replica:1:5:1:60007 \
    '{"iteration":5,"bucket":1,"ranks":"1","from":0}' "${several[@]}"
check "SDP4Bit: at the end of a bucket" repaired sdp4bit replica:1:5:0:-1 \
    '{"iteration":5,"bucket":0,"ranks":"1","from":0}' "${several[@]}"
check "SDP4Bit: rank 0 in the minority" repaired sdp4bit replica:0:12:0 \
    '{"iteration":12,"bucket":0,"ranks":"0","from":1}' "${several[@]}"
check "SDP4Bit: two buckets, two iterations" repaired sdp4bit replica:3:4:0,replica:3:4:1,replica:1:7:1 \
    '{"iteration":4,"bucket":0,"ranks":"3","from":0}
{"iteration":4,"bucket":1,"ranks":"3","from":0}
{"iteration":7,"bucket":1,"ranks":"1","from":0}' "${several[@]}"
repairs_logged() {
    grep -q '^WARNING: iteration 7: the weights of rank 1 differ from 3 of 4 ranks in bucket 1 (layers [0-9]* to [0-9]*); copied from rank 0 (repair 3 of this run)$' "$work/out" ||
        { why="the log says $(grep -m 1 'weights of rank' "$work/out")"; return 1; }
}
check "the log has iteration, rank, bucket and repair count" repairs_logged
# Without a majority, model weights are restored from the master weights. The bf16 baseline's model
# weights are the rounded master weights, so training does not change.
check "baseline: two ranks of four, no majority" repaired baseline replica:1:5:0,replica:3:5:0 \
    '{"iteration":5,"bucket":0,"ranks":"0, 1, 2, 3","from":null}'
# Tensor and pipeline parallelism. With one data-parallel rank, only tensors that are replicated
# inside the model can be compared: ranks 1 and 3 hold the same shard of the word embeddings.
parts=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --make-vocab-size-divisible-by 16)
check "T = P = 2: word embeddings on the first stage" repaired parts replica:1:5:0 \
    '{"iteration":5,"stage":0,"bucket":0,"tensor":"embedding.word_embeddings.weight","ranks":"1, 3","from":null}' \
    "${parts[@]}"
check "T = P = 2: word embeddings on the last stage" repaired parts replica:2:5:0 \
    '{"iteration":5,"stage":0,"bucket":0,"tensor":"embedding.word_embeddings.weight","ranks":"0, 2","from":null}' \
    "${parts[@]}"
halves=(--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 16 --sequence-parallel)
check "T = 2, two replicas, no majority: all copies are restored" repaired halves replica:3:5:1:-1 \
    '{"iteration":5,"bucket":1,"ranks":"1, 3","from":null}' "${halves[@]}"
no_majority() {
    with_fault replica:1:5:1 two 2 "${run[@]}" --gpus-per-node 1 "${several[@]}" \
        --verify-replicas-interval 1 --save "$work/two" --save-interval 100 || return 1
    [ "$(repairs two)" = '{"iteration":5,"bucket":1,"ranks":"0, 1","from":null}' ] ||
        { why="repairs: $(repairs two)"; return 1; }
    logged calm 2 "${run[@]}" --gpus-per-node 1 "${several[@]}" || return 1
    awk -v a="$(mean_loss two 6 12)" -v b="$(mean_loss calm 6 12)" \
        'BEGIN { exit !(a / b < 1.01 && b / a < 1.01) }' ||
        { why="mean loss $(mean_loss two 6 12), without the fault $(mean_loss calm 6 12)"; return 1; }
    grep -q '"repairs": *1' "$work"/two/iter_*/manifest.json ||
        { why="the checkpoint does not count the repair"; return 1; }
}
check "SDP4Bit: one rank of two, no majority" no_majority
late() { # weights are sent as differences, so the error persists until the next check
    with_fault replica:2:5:0 late 4 "${run[@]}" "${several[@]}" --verify-replicas-interval 4 &&
        [ "$(repairs late)" = '{"iteration":8,"bucket":0,"ranks":"2","from":0}' ] ||
        { why="${why:-repairs: $(repairs late)}"; return 1; }
    ! same_training sdp4bit late || { why="the fault changed nothing"; return 1; }
    why=
}
check "detected by the next check" late
before_saves() { # by default, weights are checked every thousand iterations and before each save
    with_fault replica:2:5:0 before 4 "${run[@]}" "${several[@]}" --save "$work/before" --save-interval 7 &&
        [ "$(repairs before)" = '{"iteration":7,"bucket":0,"ranks":"2","from":0}' ] ||
        { why="${why:-repairs: $(repairs before)}"; return 1; }
}
check "detected before the next save, by default" before_saves
unseen() { # control: nothing else detects the flip
    with_fault replica:2:5:0 unseen 4 "${run[@]}" "${several[@]}" --verify-replicas-interval 0 \
        --save "$work/unseen" --save-interval 7 && [ -z "$(repairs unseen)" ] &&
        ! same_training sdp4bit unseen || { why="the fault changed nothing"; return 1; }
    why=
}
check "not detected with --verify-replicas-interval 0" unseen
malformed() {
    local fault
    for fault in replica:2:5 replica:2:5:0: message:2:5:0:1:1 stall:2:5:0:1; do
        SDP4BIT_FAULT=$fault train 4 "${run[@]}"
        error_names 2 "cannot parse SDP4BIT_FAULT=$fault" $? || return 1
    done
}
check "a malformed SDP4BIT_FAULT" malformed

# --- payloads ---
# A step on 2 x 2 ranks with three buckets of one chunk has 12 exchanges:
#   0 to 5    gradients, for each bucket in backward order: inside the node, between nodes
#   6 to 11   weights, for each bucket in forward order: between nodes, inside the node
# found EXCHANGE[:BIT] TEXT SAVE-INTERVAL: flips a bit of the payload that rank 1 receives in that
# exchange of iteration 6, and expects an error with TEXT.
found() {
    rm -rf "$work/wire"
    SDP4BIT_FAULT=message:1:6:$1 train 4 "${run[@]}" "${several[@]}" --verify-wire --save "$work/wire" \
        --save-interval "$3"
    error_names 7 "message from $2: it was corrupted in transit" $? || return 1
    [ "$(cat "$work/wire/latest_checkpointed_iteration.txt")" = 5 ] ||
        { why="iteration $(cat "$work/wire/latest_checkpointed_iteration.txt") was saved"; return 1; }
    logged after 4 "${run[@]}" "${several[@]}" --load "$work/wire" && same_training sdp4bit after 5
}
check "--verify-wire: gradients inside the node" found 0 \
    "rank 0 to rank 1, gradients inside the node, bucket 2" 5
check "--verify-wire: gradients between nodes, end of the payload" found 5:-1 \
    "rank 3 to rank 1, gradients between nodes, bucket 0" 5
check "--verify-wire: weights between nodes, middle of the payload" found 8:2001 \
    "rank 3 to rank 1, weights between nodes, bucket 1" 5
check "--verify-wire: weights inside the node, end of the payload" found 7:-1 \
    "rank 0 to rank 1, weights inside the node, bucket 0" 5
check "--verify-wire: weights, detected before the following save" found 8 \
    "rank 3 to rank 1, weights between nodes, bucket 1" 1
coded() { # BIT CONFIG: flips a bit of another codec's payload; there is a single bucket
    SDP4BIT_FAULT=message:1:6:1:$1 train 4 "${run[@]}" "@configs/$2.args" --gradient-alltoall-pipeline 1 \
        --verify-wire
    error_names 7 "message from rank 3 to rank 1, gradients between nodes, bucket 0: it was corrupted" $?
}
check "--verify-wire: code of an EDEN payload" coded 7 eden
check "--verify-wire: end of a 3-bit EDEN payload" coded -1 eden3
check "--verify-wire: 2-bit EDEN code" coded 100 eden2-ef
last_step() { # there is no later step to report it
    SDP4BIT_FAULT=message:2:12:11 train 4 "${run[@]}" "${several[@]}" --verify-wire
    error_names 7 "message from rank 3 to rank 2, weights inside the node, bucket 2" $?
}
check "--verify-wire: weights of the last step" last_step
unverified() {
    local number
    for number in 5 8 7; do
        with_fault message:1:6:$number unverified 4 "${run[@]}" "${several[@]}" &&
            ! same_training sdp4bit unverified ||
            { why="exchange $number: ${why:-the fault changed nothing}"; return 1; }
    done
    why=
}
check "without --verify-wire the flips go undetected and change the training" unverified
undisturbed() {
    logged undisturbed 4 "${run[@]}" "${several[@]}" --verify-wire --gradient-alltoall-pipeline 3 &&
        same_training sdp4bit undisturbed
}
check "--verify-wire reports nothing without a fault" undisturbed

# --- checkpoints ---
damaged() { # flips one bit of each file in turn; the checkpoint must not load
    local file size at
    trains 4 "${run[@]}" "${several[@]}" --save "$work/saved" --save-interval 6 --lr-decay-iters 12 ||
        return 1
    for file in "$work"/saved/iter_0000012/manifest.json \
        "$work"/saved/iter_0000012/mp_rank_00/*.safetensors; do
        cp "$file" "$work/whole"
        size=$(stat -c %s "$file")
        for at in $((size / 3)) $((size - 40)); do
            printf '%b' "\\x$(printf %02x $((0x$(dd if="$file" bs=1 skip="$at" count=1 status=none | od -An -tx1 | tr -d ' ') ^ 16)))" | dd of="$file" bs=1 seek="$at" count=1 conv=notrunc status=none
            cmp -s "$file" "$work/whole" && { why="no bit was flipped"; return 1; }
            train 4 "${run[@]}" "${several[@]}" --load "$work/saved" --train-iters 14 --lr-decay-iters 12
            grep -q "successfully loaded checkpoint from .* at iteration 12" "$work/out" &&
                { why="${file##*/} with a flipped bit at $at was loaded"; return 1; }
            cat "$work/out" "$work/err" | grep -q "${file##*/}" ||
                { why="${file##*/} is not named: $(tail -n 1 "$work/err")"; return 1; }
            cp "$work/whole" "$file"
        done
    done
    trains 4 "${run[@]}" "${several[@]}" --load "$work/saved" --train-iters 14 --lr-decay-iters 12 &&
        grep -q "successfully loaded checkpoint from .* at iteration 12" "$work/out" ||
        { why="the intact checkpoint does not load"; return 1; }
}
check "a flipped bit in each file of a checkpoint" damaged
finish
