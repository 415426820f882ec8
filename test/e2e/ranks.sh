#!/usr/bin/env bash
# If nothing is quantized, N ranks match one rank. Trains the same global batch on 1, 2 and 4 ranks
# in every node layout, with several buckets and gradient accumulation. Only the order of sums
# differs. The micro-batch size on one rank also changes this order, so the bound is the spread of
# results over micro-batch sizes.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 800 1
data=$work/text_text_document
same=(--global-batch-size 16 --eval-iters 2)

for size in 1 2 4 8; do
    check "one rank, micro-batches of $size" logged "one$size" 1 "${same[@]}" --micro-batch-size "$size"
done

# spread FIELD: prints "iteration deviation" over the micro-batch sizes. The deviation is a running
# maximum, because differences grow during training.
spread() {
    local size
    for size in 1 2 4 8; do field "one$size" "$1"; done |
        awk '{ if (!($1 in low) || $2 < low[$1]) low[$1] = $2
            if (!($1 in high) || $2 > high[$1]) high[$1] = $2
            if ($1 > last) last = $1 }
        END { for (i = 1; i <= last; i++) {
            if (high[i] - low[i] > most) most = high[i] - low[i]
            printf "%d %.9g\n", i, most } }'
}
# equal_to_one NAME FIELD [REFERENCE]: checks that the run is within twice the spread of one rank,
# plus two fp32 ulps.
equal_to_one() {
    local reference=${3:-one2}
    spread "$2" >"$work/spread"
    field "$reference" "$2" >"$work/reference"
    field "$1" "$2" | awk -v spread="$work/spread" -v reference="$work/reference" '
        BEGIN { while ((getline <spread) > 0) bound[$1] = $2
            while ((getline <reference) > 0) { want[$1] = $2; wanted++ } }
        { d = $2 - want[$1]; if (d < 0) d = -d; n++
            if (!($1 in want) || d > 2 * bound[$1] + 2.4e-7 * $2) {
                printf "iteration %d: %s, one rank %s, bound %g", $1, $2, want[$1], 2 * bound[$1]
                bad = 1
                exit } }
        END {
            if (!bad && (n != wanted || n < 12)) {
                printf "%d iterations instead of %d", n, wanted
                bad = 1
            }
            exit bad }' >"$work/result"
    local rc=$?
    why="$2 $(cat "$work/result")"
    return "$rc"
}
# In the first iteration all runs have the same weights, so gradient norms must agree closely. This
# detects a missing factor 1/N, to which AdamW's updates are insensitive.
starts_equal() {
    local fields
    for fields in loss grad_norm; do
        { field one2 "$fields" | head -n 1; field "$1" "$fields" | head -n 1; } | awk 'NR == 1 { want = $2 }
            NR == 2 { d = $2 / want - 1; exit !(d < 1e-5 && d > -1e-5) } END { exit NR != 2 }' ||
                { why="$fields of the first iteration differs"; return 1; }
    done
}
validates_equal() {
    { field one2 loss valid; field "$1" loss valid; } | awk '{ v[NR] = $2 } END { if (NR < 4 || NR % 2) exit 1
        for (i = 1; i <= NR / 2; i++) { d = v[i] / v[i + NR / 2] - 1; if (d > 2e-4 || d < -2e-4) exit 1 } }' \
            || { why="validation losses differ: $(field "$1" loss valid | tr '\n' ' ')"; return 1; }
}
agrees() { # NAME NP FLAGS...
    logged "$@" "${same[@]}" --verify-replicas-interval 4 && starts_equal "$1" && equal_to_one "$1" loss &&
        equal_to_one "$1" grad_norm && validates_equal "$1"
}
check "one node of 2" agrees n1x2 2 --gpus-per-node 2
check "two nodes of 1" agrees n2x1 2 --gpus-per-node 1
check "one node of 4" agrees n1x4 4 --gpus-per-node 4
check "two nodes of 2" agrees n2x2 4 --gpus-per-node 2
check "four nodes of 1" agrees n4x1 4 --gpus-per-node 1
check "node layout of the real host" agrees real 4
check "no overlap" agrees serial 4 --gpus-per-node 2 --no-overlap

several_buckets() {
    ranks 1 "${model[@]}" "${batch[@]}" "${same[@]}" --data-path "$data" --plan --plan-world-size 4 \
        --gpus-per-node 2 --ddp-bucket-size 1000 || return 1
    local buckets
    buckets=$(sed -n 's/^  \([0-9]*\) buckets, .*/\1/p' "$work/out")
    [ "${buckets:-0}" -ge 2 ] || { why="--ddp-bucket-size 1000 gives ${buckets:-no} buckets"; return 1; }
}
check "a small --ddp-bucket-size gives several buckets" several_buckets
check "several buckets, 2 x 2" agrees buckets 4 --gpus-per-node 2 --ddp-bucket-size 1000
check "several buckets, 1 x 4" agrees buckets4 4 --gpus-per-node 4 --ddp-bucket-size 1000
check "micro-batches of 4 on 2 ranks" agrees micro4 2 --micro-batch-size 4
check "micro-batches of 1 on 4 ranks" agrees micro1 4 --micro-batch-size 1 --gpus-per-node 2

# Dropout masks depend on the sample, not on the rank.
dropped=(--hidden-dropout 0.1 --attention-dropout 0.1 "${same[@]}")
drops_equal() {
    logged drop1 1 "${dropped[@]}" && logged drop4 4 "${dropped[@]}" --gpus-per-node 2 &&
        equal_to_one drop4 loss drop1
}
check "dropout does not depend on the number of ranks" drops_equal
different_with_dropout() { ! same_training one2 drop1; }
check "dropout changes the training" different_with_dropout
finish
