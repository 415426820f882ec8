#!/usr/bin/env bash
# --replica-group: pairs of replica groups with different ranks, layouts and strategies keep bitwise
# identical outer weights. The groups exchange files instead of messages (test/fake). elastic.sh
# tests the network.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2317 # check calls the functions
trainer=$(cd "$(dirname "$0")/../.." && pwd)/${BUILD:-build}/test/train_gpt_fake
case ${BUILD:-build} in /*) trainer=$BUILD/test/train_gpt_fake ;; esac
. "$(dirname "$0")/../lib.sh"
make_shard text 400 11
data=$work/text_text_document
keys=$work/keys
launcher+=(--bind-to none) # each launcher would bind its first rank to the same core
run=(--train-iters 120 --local-steps 5 --log-interval 5 --rendezvous tcp://nowhere:1 --rendezvous-keys "$keys"
    --sync-grace-seconds 60 --quantized-gradients --gradient-quantization-method eden
    --gq-group-size-inter 256)

# group NAME NP FLAGS...: trains a group. Output goes to $work/NAME.out and .err.
group() {
    local name=$1 np=$2
    shift 2
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np "$np" "$trainer" "${model[@]}" "${batch[@]}" \
        --data-path "$data" "${run[@]}" --replica-group "$name" "$@" >"$work/$name.out" 2>"$work/$name.err" \
        </dev/null
}
fresh() { rm -rf "$keys" && mkdir "$keys"; }
# A group's own syncs, over all log lines.
syncs() { sed -n 's/^replica groups: .* chunk syncs, \([0-9]*\) with this.*/\1/p' "$work/$1.out" | awk '{ sum += $1 } END { print sum + 0 }'; }
test_loss() { sed -n 's/.*on test set | lm loss value: \([0-9.E+-]*\).*/\1/p' "$work/$1.out"; }

# equal NP FLAGS... [-- FLAGS of both]: a group of one rank and a group of NP ranks.
equal() {
    local np=$1 own=() job rc first second
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do own+=("$1"); shift; done
    [ $# -eq 0 ] || shift
    fresh
    group one 1 --min-replica-groups 2 "$@" &
    job=$!
    group two "$np" --min-replica-groups 2 "$@" ${own[@]+"${own[@]}"}
    rc=$?
    wait "$job" && [ $rc -eq 0 ] || { why=$(grep -hm 1 error "$work/one.err" "$work/two.err"); return 1; }
    ! cat "$work/one.out" "$work/two.out" | grep -E 'hashes differ|last sync' ||
        { why="the groups differ"; return 1; }
    first=$(syncs one) second=$(syncs two)
    [ "$first" -ge 3 ] && [ "$second" -ge 3 ] || { why="$first and $second syncs"; return 1; }
    first=$(test_loss one) second=$(test_loss two)
    awk -v a="$first" -v b="$second" 'BEGIN { d = a - b; exit !(a > 0 && a < 4 && d < 0.01 && d > -0.01) }' ||
        { why="test losses $first and $second"; return 1; }
}
tp=(--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 4) pp=(--pipeline-model-parallel-size 2)
zero3=(--data-parallel-sharding-strategy optim_grads_params)
llama=(--normalization RMSNorm --position-embedding-type rope --swiglu --ffn-hidden-size 64
    --disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2)
check "tensor parallelism, sequence parallelism and ZeRO-1" equal 4 "${tp[@]}" --sequence-parallel
check "a pipeline with tied embeddings and ZeRO-2" equal 4 "${pp[@]}" \
    --data-parallel-sharding-strategy optim_grads
check "Llama in a pipeline with tensor parallelism" equal 4 "${pp[@]}" "${tp[@]}" -- "${llama[@]}"
check "two nodes with ZeRO-3 and 4-bit weights" equal 4 --gpus-per-node 2 "${zero3[@]}" --quantized-weights \
    --wq-group-size 128
check "two nodes with weights sharded over all ranks" equal 4 --gpus-per-node 2 "${zero3[@]}" \
    --shard-params-over world -- --gradient-quantization-method uniform --hadamard-transform \
    --gq-group-size-inter 128
check "Muon" equal 2 -- --optimizer muon
check "Muon, momentum in bf16, tensor parallelism" equal 4 "${tp[@]}" -- --optimizer muon --exp-avg-dtype bf16
check "delayed FP8 scales" equal 2 -- --fp8-format hybrid

# Starts a group in the background, as part of a long run.
long_group() { group "$@" --train-iters 100000 --sync-grace-seconds 1 --log-interval 1 & }
iteration() { sed -n 's/^ iteration *\([0-9]*\)\/.*/\1/p' "$work/$1.out" | tail -n 1; }
more_syncs() { # NAME COUNT
    local at
    at=$(($(syncs "$1") + $2))
    wait_until eval "[ \$(syncs $1) -ge $at ]" || { why="group $1: $(tail -n 1 "$work/$1.err")"; return 1; }
}
# counted_once NAME: no chunk has counted more tokens of the group than it has trained.
counted_once() {
    local trained counted file
    trained=$(($(grep -c '^ iteration ' "$work/$1.out") * 8 * 32))
    for file in "$keys"/counted.*."$1"; do
        counted=$(od -An -td8 -j32 -N8 "$file")
        [ "$counted" -gt 0 ] && [ "$counted" -le "$trained" ] ||
            { why="$counted of $trained tokens of $1 counted"; return 1; }
    done
}
# A group misses rounds, and no other group sends the state. It trains on until one does.
trains_on() {
    local jobs=() before
    fresh
    long_group one 1
    jobs+=("$!")
    long_group two 2 "${tp[@]}"
    jobs+=("$!")
    more_syncs two 3 && more_syncs one 3 || return 1
    touch "$keys/hold.0.0.two"
    wait_until grep -q "^missed rounds of chunk" "$work/two.out" || { why="it missed nothing"; return 1; }
    before=$(iteration two)
    wait_until eval "[ \$(iteration two) -gt $((before + 50)) ]" || { why="it does not train"; return 1; }
    rm "$keys/hold.0.0.two"
    more_syncs two 5 && more_syncs one 5 || return 1
    # shellcheck disable=SC2046 # one word per rank
    kill -TERM $(rank_pids)
    wait "${jobs[@]}"
    counted_once one && counted_once two || return 1
    ! cat "$work/one.out" "$work/two.out" | grep -E 'hashes differ' || { why="the groups differ"; return 1; }
}
check "a group that has missed rounds trains on, and all it trains counts once" trains_on

# A group alone that sends pseudo-gradients in fp32 and takes them over as they are trains like a
# run of its own.
alone() {
    local flags=(--train-iters 30 --outer-lr 1 --outer-momentum 0 --max-replica-groups 1) without
    fresh
    run=(--train-iters 30 --local-steps 5 --log-interval 5 --rendezvous tcp://nowhere:1
        --rendezvous-keys "$keys")
    group alone 1 "${flags[@]}" && trains 1 --train-iters 30 || return 1
    without=$(sed -n 's/.*on test set | lm loss value: \([0-9.E+-]*\).*/\1/p' "$work/out")
    [ "$(test_loss alone)" = "$without" ] || { why="test losses $(test_loss alone) and $without"; return 1; }
}
check "a group alone trains like a run without groups" alone

# A checkpoint restarts the run in another layout, and another group joins with its copy.
restart() {
    local flags=(--min-replica-groups 2 --save-interval 100) logs=("$work/one.out" "$work/two.out") log
    fresh
    group one 2 "${flags[@]}" --min-replica-groups 1 --exit-interval 20 --save "$work/a" || return 1
    cp -r "$work/a" "$work/b"
    fresh
    group two 4 "${tp[@]}" "${flags[@]}" --load "$work/b" --save "$work/b" &
    group one 1 "${flags[@]}" --load "$work/a" --save "$work/a" && wait $! || return 1
    ! cat "${logs[@]}" | grep -E 'hashes differ|last sync' && grep -q "starts the run" "${logs[@]}" &&
        grep -q "^joined at" "${logs[@]}" || return 1
    for log in "${logs[@]}"; do
        grep -q "successfully saved checkpoint at iteration      30" "$log" || return 1
    done
}
check "a checkpoint restarts the run in other layouts" restart

refuses() { # MESSAGE FLAGS...
    local message=$1
    shift
    group bad 1 "$@"
    [ $? -eq 2 ] && [ "$(grep -c . "$work/bad.err")" -le 2 ] && grep -qF -- "$message" "$work/bad.err" ||
        { why=$(cat "$work/bad.err"); return 1; }
}
check "refused without --local-steps" refuses "--replica-group needs --local-steps" --local-steps 1
check "refused with a batch size that grows" refuses "--rampup-batch-size" --rampup-batch-size 4 4 40
check "refused with a port that does not exist" refuses "a port from 1 to 65535" --rendezvous tcp://host:70000
check "refused with a bad name" refuses "1 to 32 letters" --replica-group "a b"
check "refused with master weights on the host" refuses "--optimizer-cpu-offload" --optimizer-cpu-offload
finish
