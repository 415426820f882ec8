#!/usr/bin/env bash
# --local-steps: every node trains independently between outer steps. Tests bit-exact resumes, lost
# nodes, resuming with one node fewer or more, other presets that resume from such checkpoints,
# corrupted messages, a NaN on one node, and refused combinations.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 11
data=$work/text_text_document

run=(--train-iters 12 --ddp-bucket-size 1 --global-batch-size 12 --micro-batch-size 1 --eval-interval 6
    --save-interval 4 --local-steps 5 --quantized-gradients --gq-group-size-intra 32
    --gq-group-size-inter 32 --hadamard-transform)

# saved A B ITERATION: compares the checkpoints of two runs byte by byte.
saved() { same_shards "$work/$1" "$work/$2" "$3"; }
# back FROM TO ITERATION: copies a checkpoint directory without the checkpoints after ITERATION.
back() {
    local folder
    rm -rf "${work:?}/$2"
    cp -r "$work/$1" "$work/$2"
    for folder in "$work/$2"/iter_*; do
        [ "$((10#${folder##*_}))" -le "$3" ] || rm -r "$folder"
    done
    echo "$3" >"$work/$2/latest_checkpointed_iteration.txt"
}
has() { grep -q -- "$1" "$work/$2" || { why="no line '$1'"; return 1; }; }

resumes() { # NP PER_NODE FLAGS...
    local np=$1 per_node=$2
    shift 2
    rm -rf "$work/a"
    trains "$np" --gpus-per-node "$per_node" "${run[@]}" "$@" --save "$work/a" && back a b 4 &&
        trains "$np" --gpus-per-node "$per_node" "${run[@]}" "$@" --save "$work/b" --load "$work/b" &&
        saved a b 8 && saved a b 12
}
check "2 nodes resume bit-exactly" resumes 2 1 --verify-wire
check "2 nodes with --local-steps-delay and --local-steps-mix resume bit-exactly" resumes 2 1 --local-steps-delay 3 --local-steps-mix 0.3
check "2 x 2 ranks resume bit-exactly" resumes 4 2 --quantized-weights --wq-group-size 128 --async-save
check "EDEN on 3 nodes resumes bit-exactly" resumes 3 1 --gradient-quantization-method eden \
    --gq-group-size-inter 256

# --error-feedback: residuals are saved, and belong to the nodes.
two_bits=(--gradient-quantization-method eden --gradient-quantization-bits-inter 2 --gq-group-size-inter 256)
fed=("${two_bits[@]}" --error-feedback)
lost="WARNING: the checkpoint has no error-feedback residual that fits this run, so the residual starts at 0"
feeds() { # NP PER_NODE FLAGS...
    resumes "$@" "${fed[@]}" || return 1
    ! grep -qF "$lost" "$work/out" || { why="the residual was not loaded"; return 1; }
    dev/checkpoint_info "$work/a" | grep -q 'holds .*local_residual' || { why="no residual is saved"; return 1; }
}
check "error feedback on 2 nodes resumes bit-exactly" feeds 2 1 --verify-wire
check "error feedback on 3 nodes with delay and mixing resumes bit-exactly" feeds 3 1 --local-steps-delay 3 \
    --local-steps-mix 0.3
check "error feedback on 2 x 2 ranks resumes bit-exactly" feeds 4 2 --async-save --quantized-weights \
    --wq-group-size 128 --data-parallel-sharding-strategy optim_grads_params
check "error feedback with tensor parallelism resumes bit-exactly" feeds 4 2 --tensor-model-parallel-size 2 \
    --sequence-parallel --make-vocab-size-divisible-by 32
check "error feedback with Muon resumes bit-exactly" feeds 2 1 --optimizer muon
# Ranks per node and buckets may change. A run that loads a checkpoint without residuals says so.
kept() {
    rm -rf "$work/fed" "$work/unfed"
    trains 2 --gpus-per-node 1 "${run[@]}" "${two_bits[@]}" --save "$work/unfed" &&
        trains 2 --gpus-per-node 1 "${run[@]}" "${fed[@]}" --save "$work/fed" || return 1
    ! saved fed unfed 12 || { why="the flag changes nothing"; return 1; }
    back fed on 8 && back unfed off 8 &&
        trains 4 --gpus-per-node 2 "${run[@]}" "${fed[@]}" --ddp-bucket-size 10000 --load "$work/on" ||
        return 1
    ! grep -qF "$lost" "$work/out" || { why="the residual was not loaded"; return 1; }
    trains 2 --gpus-per-node 1 "${run[@]}" "${fed[@]}" --load "$work/off" || return 1
    grep -qF "$lost" "$work/out" || { why="no line about the residual"; return 1; }
}
check "error feedback changes training, and a residual fits other layouts" kept

# The residual has as many bytes as the outer weights. Without the flag nothing is reserved.
planned() {
    local plan=(--plan --plan-world-size 16 --gpus-per-node 8)
    "$BUILD/train_gpt_cpu" @configs/gpt_1.3b.args @configs/local.args "${plan[@]}" --error-feedback >"$work/plan" &&
        "$BUILD/train_gpt_cpu" @configs/gpt_1.3b.args @configs/local.args "${plan[@]}" >"$work/without" ||
        { why="--plan failed"; return 1; }
    awk '/fp32 outer weights, own shard/ { outer = $NF }
        /residual of error feedback, own shard/ { residual = $NF }
        END { exit !(outer > 0 && residual == outer) }' "$work/plan" || { why="other bytes"; return 1; }
    ! grep -q "residual of error" "$work/without" || { why="reserved without the flag"; return 1; }
}
check "--plan shows the memory of residuals" planned

# The last of three nodes is lost. The checkpoint contains the outer weights and the state of the
# other two nodes, so two nodes resume from it and the loss keeps falling.
continues() { # NP FLAGS...: from the checkpoint of 3 nodes at iteration 8
    local np=$1
    shift
    back three on 8
    trains "$np" --gpus-per-node 1 "${run[@]}" "$@" --train-iters 16 --save "$work/on" --load "$work/on" &&
        has "successfully loaded checkpoint" out && has "successfully saved checkpoint at iteration      16" out
}
loss_of() { sed -n 's/.*validation loss at iteration '"${1:-12}"' | lm loss value: \([0-9.E+-]*\).*/\1/p' "$work/out" | head -1; }
near() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a > 0 && a < 1.05 * b) }' || { why="validation loss $1 instead of about $2"; return 1; }; }
three_nodes() {
    trains 3 --gpus-per-node 1 "${run[@]}" --train-iters 16 --save "$work/three" &&
        whole=$(loss_of) early=$(loss_of 6)
}
without_one() { continues 2 && near "$(loss_of)" "$whole"; }
with_one_more() { continues 4 && near "$(loss_of)" "$whole"; }
# An ordinary run loads only the outer weights. It learns more slowly without the outer momentum.
ordinary() { continues 3 --local-steps 1 && near "$(loss_of)" "$early"; }
check "3 nodes train" three_nodes
check "a run resumes with one node fewer" without_one
check "a run resumes with one node more" with_one_more
check "an ordinary run resumes from outer weights" ordinary
outer_from_ordinary() {
    trains 2 --gpus-per-node 1 "${run[@]}" --local-steps 1 --save "$work/plain" && back plain on 8 &&
        trains 2 --gpus-per-node 1 "${run[@]}" --save "$work/on" --load "$work/on"
}
check "a run with local steps resumes from an ordinary run" outer_from_ordinary

# When a node is lost, the others save their state and the run ends. The restarted run resumes from
# that checkpoint, and the replacement of the lost node starts from the outer weights.
ends_without() { # NODE ITERATION NP PER_NODE FLAGS...: SDP4BIT_FAULT makes the run lose NODE
    local node=$1 at=$2 np=$3 per_node=$4 rc=0
    shift 4
    rm -rf "$work/k"
    LIMIT=90 train "$np" --gpus-per-node "$per_node" "${run[@]}" --save "$work/k" "$@" || rc=$?
    error_names 7 "node $node was lost" $rc || return 1
    [ "$(cat "$work/k/latest_checkpointed_iteration.txt")" = "$at" ] ||
        { why="saved $(cat "$work/k/latest_checkpointed_iteration.txt") instead of $at"; return 1; }
}
# hangs FAULT NODE ITERATION NP PER_NODE FLAGS...: ends_without after a hang
soon=(--distributed-timeout-minutes 0.05)
hangs() {
    SDP4BIT_FAULT=$1 ends_without "${@:2}" "${soon[@]}" || return 1
    local np=$4 per_node=$5
    shift 5
    trains "$np" --gpus-per-node "$per_node" "${run[@]}" "$@" --save "$work/k" --load "$work/k" &&
        has "successfully saved checkpoint at iteration      12" out
}
check "a hung node loses only its own work" hangs stall:1:7:1 1 7 2 1 --verify-wire
check "the same with --local-steps-delay" hangs stall:1:7:1 1 7 2 1 --local-steps-delay 3
check "the first node hangs" hangs stall:0:7:1 0 7 2 1
check "the first node hangs during a run with background saves" hangs stall:0:7:1 0 7 2 1 --async-save
check "the second rank of the first node hangs during a run with background saves" hangs stall:1:7:1 0 7 4 2 --async-save
check "one of three nodes hangs" hangs stall:1:7:1 1 7 3 1 --gradient-quantization-method eden \
    --gq-group-size-inter 256
check "one of three nodes with error feedback hangs" hangs stall:1:7:1 1 7 3 1 "${fed[@]}"
check "a node hangs in the last step, which the restarted run repeats" hangs stall:1:12:0 1 11 2 1
check "a node of two ranks hangs during a background save" hangs stall:2:5:2 1 5 4 2 \
    --quantized-weights --wq-group-size 128 --async-save
check "a node hangs during an evaluation" hangs stall:1:6:4 1 6 2 1 --eval-iters 3
check "a node hangs while the run writes its last checkpoint" hangs stall:1:8:28 1 8 2 1 --async-save \
    --exit-interval 8
# tensors(DIR, ITERATION): returns the tensors of a checkpoint's first shard as {name: bytes}.
cat >"$work/shards.py" <<'END'
import glob, json, struct
def tensors(folder, iteration):
    found = {}
    for path in glob.glob(f"{folder}/iter_{iteration:07d}/mp_rank_00/shard_00000_*"):
        data = open(path, "rb").read()
        size = struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8:8 + size]).items():
            if name != "__metadata__":
                lo, hi = entry["data_offsets"]
                found[name] = data[8 + size + lo:8 + size + hi]
    return found
END
# The surviving node's master weights and outer weights match a run that lost no node, except for
# tensors whose outer sync failed. For those, the checkpoint has the previous outer weights and the
# master weights that the surviving node had trained, and the previous residual of error feedback.
keeps() { # FLAGS...
    rm -rf "$work/replicate"
    trains 2 --gpus-per-node 1 "${run[@]}" --train-iters 20 --exit-interval 5 --save "$work/replicate" "$@" &&
        SDP4BIT_FAULT=stall:1:5:0 ends_without 1 5 2 1 --train-iters 20 "${soon[@]}" "$@" || return 1
    PYTHONPATH=$work python3 - "$work"/{k,replicate} <<'END' 2>"$work/err" || { say "compared"; return 1; }
import sys
from shards import tensors
before, left, replicate = tensors(sys.argv[1], 4), tensors(sys.argv[1], 5), tensors(sys.argv[2], 5)
assert set(left) == set(replicate), set(left) ^ set(replicate)
failed = [name for name in replicate if left[name] != replicate[name]]
kinds = {name.split("|")[1] for name in failed}
fed = [name for name in replicate if "|local_residual" in name]
wanted = {"master", "outer_momentum", "local_master", "weight"} | set(["local_residual"] if fed else [])
assert kinds == wanted, kinds
master_names = [name for name in failed if "|local_master" in name]
assert 0 < len(master_names) < sum("|local_master" in name for name in replicate), master_names
for name in master_names:
    outer = name.replace("local_master", "master").rsplit("|", 1)[0]
    assert left[outer] == before[outer] != left[name] != before[name], name
    assert replicate[outer] == replicate[name], name
    residual = name.replace("local_master", "local_residual")
    assert not fed or left[residual] == before[residual] != replicate[residual], name
END
}
check "the surviving nodes keep what they have trained" keeps
check "the surviving nodes keep their residuals" keeps "${fed[@]}"

# After the last iteration all buckets are synchronized. If a longer run resumes there, no outer
# sync that was started earlier may overwrite what its nodes learn.
longer() {
    local flags=(2 --gpus-per-node 1 "${run[@]}" --local-steps-delay 3 --save "$work/longer")
    rm -rf "$work/longer"
    trains "${flags[@]}" && trains "${flags[@]}" --load "$work/longer" --train-iters 20 --exit-interval 13 \
        --override-opt_param-scheduler || return 1
    PYTHONPATH=$work python3 - "$work/longer" <<'END' 2>"$work/err" || { say "compared"; return 1; }
import sys
from shards import tensors
found = tensors(sys.argv[1], 13)
master_names = [name for name in found if "|local_master" in name]
same = [name for name in master_names
        if found[name] == found[name.replace("local_master", "master").rsplit("|", 1)[0]]]
assert master_names and not same, same
END
}
check "an extended run keeps what its nodes learn" longer

# When a rank dies, mpirun kills the others after a configurable grace period.
killed() {
    local rc=0 at
    export OMPI_MCA_odls_base_sigkill_timeout=15 PRTE_MCA_odls_base_sigkill_timeout=15
    in_background killed 2 --gpus-per-node 1 "${run[@]}" --train-iters 200000 --lr-decay-iters 100 \
        --eval-interval 100000 --save-interval 100000 --save "$work/killed"
    wait_for_iteration killed 25 && signal_rank KILL 1
    wait "$job" || rc=$?
    unset OMPI_MCA_odls_base_sigkill_timeout PRTE_MCA_odls_base_sigkill_timeout
    [ $rc -ne 0 ] && has "error: rank 0 .*: node 1 was lost" err || { say "exit code $rc"; return 1; }
    at=$(cat "$work/killed/latest_checkpointed_iteration.txt")
    [ "${at:-0}" -ge 25 ] || { why="saved '$at'"; return 1; }
    trains 2 --gpus-per-node 1 "${run[@]}" --train-iters $((at + 5)) --override-opt_param-scheduler \
        --save "$work/killed" --load "$work/killed"
}
check "a killed node loses only its own work" killed
# A stopped node is continued while the other node, whose disk is slow, saves without it. The late
# node must wait for that save, because mpirun ends all ranks as soon as one exits. Its line comes
# first, because mpirun may kill it after the other node has exited.
woken() {
    local rc=0
    rm -rf "$work/woken"
    slow_disk 2000 0 in_background woken 2 --gpus-per-node 1 "${run[@]}" --train-iters 200000 \
        --lr-decay-iters 100 --eval-interval 100000 --save-interval 100000 --save "$work/woken" "${soon[@]}"
    wait_for_iteration woken 25 && signal_rank STOP 1 && wait_until saving_begins "$work/woken" || return 1
    signal_rank CONT 1
    wait "$job" || rc=$?
    grep '^error' "$work/err" >"$work/lines"
    [ $rc -eq 7 ] && [ "$(grep -c . "$work/lines")" = 2 ] || { say "exit code $rc"; return 1; }
    head -n 1 "$work/lines" | grep -q "^error: rank 1 .*: this node answered too late" &&
        tail -n 1 "$work/lines" | grep -q "^error: rank 0 .*: node 1 was lost .* saved a checkpoint" ||
        { why="$(cat "$work/lines")"; return 1; }
    trains 2 --gpus-per-node 1 "${run[@]}" --save "$work/woken" --load "$work/woken" --exit-interval 1 \
        --train-iters 200000 --lr-decay-iters 100 && has "successfully loaded checkpoint" out
}
saving_begins() { compgen -G "$1/.iter_*.tmp" >"$work/begun"; }
if [ -e "$shim" ]; then check "a node that continues too late waits for the others to save" woken
else skip "a node that continues too late waits for the others to save" "$shim is not built"; fi
# SIGTERM arrives while one node is slow, which looks as if the launcher were ending the job. The
# slow node responds in time, so all nodes save.
late() {
    local rc=0
    in_background late 2 --gpus-per-node 1 "${run[@]}" --train-iters 200000 --lr-decay-iters 100 \
        --eval-interval 100000 --save-interval 100000 --save "$work/late"
    wait_for_iteration late 25 && signal_rank STOP 1 && sleep 1 && signal_rank CONT 0 || return 1
    sleep 8
    signal_rank CONT 1
    wait "$job" || rc=$?
    error_names 7 "all nodes responded and saved a checkpoint" $rc || return 1
    ls "$work"/late/iter_*/mp_rank_00 >"$work/shards"
    [ "$(grep -c shard "$work/shards")" = 2 ] || { why="$(cat "$work/shards")"; return 1; }
}
check "a slow node is not treated as lost" late
# mpirun and Slurm end a job with SIGCONT and SIGTERM to all ranks. One node has a slow disk. Ranks
# that wait for it during the save must not treat it as lost.
told_to_end() {
    local rc=0 rank
    slow_disk 4000 1 in_background told 2 --gpus-per-node 1 "${run[@]}" --train-iters 200000 \
        --lr-decay-iters 100 --eval-interval 100000 --save-interval 100000 --save "$work/told"
    wait_for_iteration told 25 || return 1
    for rank in 0 1; do signal_rank CONT $rank && signal_rank TERM $rank || return 1; done
    SECONDS=0
    wait "$job" || rc=$?
    [ $rc -eq 75 ] && [ ! -s "$work/err" ] || { say "exit code $rc"; return 1; }
    [ $SECONDS -ge 7 ] || { why="the save took $SECONDS s: no rank waited for it"; return 1; }
}
if [ -e "$shim" ]; then
    check "a node that saves slowly on job termination is not treated as lost" told_to_end
else skip "a node that saves slowly on job termination is not treated as lost" "$shim is not built"; fi
# Stops all ranks for longer than the time limit and continues them, like Ctrl-Z and fg.
paused() {
    local rc=0 at
    in_background paused 2 --gpus-per-node 1 "${run[@]}" --train-iters 200000 --lr-decay-iters 100 \
        --eval-interval 100000 --save-interval 100000 --save "$work/paused" "${soon[@]}"
    wait_for_iteration paused 25 && signal_rank STOP 0 && signal_rank STOP 1 || return 1
    sleep 7
    signal_rank CONT 0 && signal_rank CONT 1 || return 1
    at=$(field paused loss | tail -n 1 | cut -d ' ' -f 1)
    wait_for_iteration paused $((at + 20)) && signal_rank TERM 0 || return 1
    wait "$job" || rc=$?
    [ $rc -eq 75 ] && ! grep '^error' "$work/err" >"$work/lines" || say "exit code $rc"
}
check "no node is lost if all are stopped together and continued" paused

# Each node computes its own step status. The fault corrupts an exponent in one rank's shard after
# the last gradient reduction, so only that node detects it.
wild=(--ddp-bucket-size 1000000 --gradient-alltoall-pipeline 1)
fault=message:3:6:0:-2
ends_all() { # NAME FLAGS...
    SDP4BIT_FAULT=$fault LIMIT=60 train 4 --gpus-per-node 2 "${run[@]}" "${wild[@]}" --save "$work/$1" \
        --save-interval 5 "${@:2}"
    error_names 4 "iteration 6 update: the loss" $? && has "^error: rank 2 (node 1[,)]" err || return 1
    [ "$(cat "$work/$1/latest_checkpointed_iteration.txt")" = 5 ] && [ ! -e "$work/$1/iter_0000006" ] ||
        { why="the bad step was saved"; return 1; }
}
check "a non-finite value on one node stops the run on all nodes" ends_all nan --log-interval 1
check "the same between two log lines" ends_all late_nan --log-interval 100
# One node skips the fifth step. The checkpoint records this, and the run resumes bit-exactly.
skips() {
    local flags=(4 --gpus-per-node 2 "${run[@]}" "${wild[@]}" --quantized-weights --wq-group-size 128
        --save-interval 6 --on-nan skip --verify-replicas-interval 1)
    SDP4BIT_FAULT=$fault trains "${flags[@]}" --save "$work/skip" || return 1
    grep -c '"skipped_iterations": *1' "$work"/skip/iter_0000006/manifest.json >"$work/skips"
    [ "$(cat "$work/skips")" = 1 ] || { why="$(cat "$work/skips") nodes have skipped"; return 1; }
    back skip skip_on 6 && trains "${flags[@]}" --save "$work/skip_on" --load "$work/skip_on" &&
        saved skip skip_on 12
}
check "one node skips a step, and the run resumes bit-exactly" skips

wrong_message() { # N: corrupts the N-th message
    SDP4BIT_FAULT=message:0:$1:$2 train 2 --gpus-per-node 1 "${run[@]}" --verify-wire
    [ $? -eq 7 ] && has "message from rank 1 to rank 0, .*pseudo-gradients between nodes" err
}
check "a corrupted pseudo-gradient ends the run" wrong_message 5 0
check "a corrupted mean ends the run" wrong_message 5 1

no() { # TEXT FLAGS...: refused with this text
    local text=$1
    shift
    refused 2 "$text" 2 --gpus-per-node 1 "${run[@]}" "$@"
}
refusals() {
    no "need --local-steps H" --local-steps 1 --outer-momentum 0.5 &&
        no "--local-steps-delay must be less" --local-steps-delay 5 &&
        no "drop --optimizer-cpu-offload" --optimizer-cpu-offload &&
        no "drop --optimizer-disk-offload" --optimizer-disk-offload "$work/state" &&
        no "drop --pipeline-model-parallel-size" --pipeline-model-parallel-size 2 &&
        no "drop --shard-params-over world" --data-parallel-sharding-strategy optim_grads_params \
            --shard-params-over world &&
        no "lower --tensor-model-parallel-size 2" --tensor-model-parallel-size 2
}
check "refused combinations" refusals
# The outer step of a single group would only change its own training.
one_node() {
    local few="--local-steps needs two or more nodes, or replica groups"
    refused 2 "$few" 1 "${run[@]}" && refused 2 "$few" 2 --gpus-per-node 2 "${run[@]}" &&
        refused 2 "$few" 4 --gpus-per-node 4 "${run[@]}" --tensor-model-parallel-size 2 || return 1
    [ "$(grep -c . "$work/err")" = 1 ] || { why="more than one line"; return 1; }
}
check "one node is refused" one_node
untrained() { # takes no outer step
    trains 1 "${run[@]}" --check-data && trains 1 "${run[@]}" --inspect-data 0 &&
        trains 1 "${run[@]}" --plan &&
        has "--local-steps needs two or more nodes to train, but this plan has one" out &&
        trains 3 --gpus-per-node 1 "${run[@]}" --save "$work/scored" &&
        trains 1 "${run[@]}" --skip-train --load "$work/scored"
}
check "one node plans, checks data and evaluates" untrained
finish
