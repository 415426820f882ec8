#!/usr/bin/env bash
# Repeating a command gives bitwise identical results. Options that only change when or where work
# is done (overlap, recomputation, the number of all-to-all chunks) do not change the results
# either. Compares the JSON lines of all iterations, which have losses and norms in full precision.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 3
data=$work/text_text_document
run=(4 --gpus-per-node 2 --global-batch-size 16 --hidden-dropout 0.1 --attention-dropout 0.1 \
    --eval-interval 5 --wq-group-size 128)
quantized=("${paper[@]}" --wq-group-size 128)

same_as() { # REFERENCE NAME FLAGS...
    local reference=$1
    shift
    logged "$1" "${run[@]}" "${@:2}" && same_training "$reference" "$1" && same_evaluation "$reference" "$1"
}
same_evaluation() {
    grep '^{"kind":"valid"' "$work/$1.jsonl" >"$work/left"
    grep '^{"kind":"valid"' "$work/$2.jsonl" >"$work/right"
    [ -s "$work/left" ] && cmp -s "$work/left" "$work/right" || why="validation lines differ"
    [ -z "$why" ]
}
check "baseline" logged baseline "${run[@]}"
check "baseline again" same_as baseline again
check "baseline, --no-overlap" same_as baseline serial --no-overlap
check "baseline, --overlap-* flags" same_as baseline overlap --overlap-grad-reduce --overlap-param-gather
check "baseline, full recomputation" same_as baseline full --recompute-granularity full \
    --recompute-method uniform --recompute-num-layers 1
check "baseline, selective recomputation" same_as baseline selective --recompute-activations \
    --recompute-granularity selective
check "baseline, no log lines in between" same_as baseline quiet --log-interval 1000
check "baseline, --timing-log-level 2" same_as baseline timed --timing-log-level 2
check "SDP4Bit" logged sdp4bit "${run[@]}" "${quantized[@]}"
check "SDP4Bit again" same_as sdp4bit sdp4bit_again "${quantized[@]}"
check "SDP4Bit, --no-overlap" same_as sdp4bit sdp4bit_serial "${quantized[@]}" --no-overlap
check "SDP4Bit, full recomputation" same_as sdp4bit sdp4bit_full "${quantized[@]}" \
    --recompute-granularity full
for chunks in 2 3 8; do
    check "SDP4Bit in $chunks chunks" same_as sdp4bit "chunks$chunks" "${quantized[@]}" \
        --gradient-alltoall-pipeline $chunks
done
# Stochastic rounding depends on a parameter's position in the model, not in its bucket.
check "SDP4Bit in several buckets" logged sdp4bit_buckets "${run[@]}" "${quantized[@]}" --ddp-bucket-size 1000
# The gradient norm is summed bucket by bucket, so other buckets change its rounding. Only the
# losses of the first iterations can be bitwise identical.
buckets_equal() {
    local i
    for i in 1 2; do
        [ "$(field sdp4bit loss | sed -n "${i}p")" = "$(field sdp4bit_buckets loss | sed -n "${i}p")" ] ||
            { why="iteration $i: $(field sdp4bit_buckets loss | sed -n "${i}p")"; return 1; }
    done
}
check "the first step does not depend on the bucket layout" buckets_equal
# By default the program splits tensors larger than a bucket's target size.
check "SDP4Bit with the default number of chunks" same_as sdp4bit_buckets sdp4bit_one_chunk \
    "${quantized[@]}" --ddp-bucket-size 1000 --gradient-alltoall-pipeline 1
seed_matters() { logged seed "${run[@]}" --seed 4321 && ! same_training baseline seed; }
check "--seed changes the run" seed_matters
finish
