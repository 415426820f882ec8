#!/usr/bin/env bash
# A run that exceeds the available memory: one line says by how much, and suggests settings that
# fit. The suggested settings must fit. ulimit -v limits the memory.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"

# Many layers with few channels need much memory for little arithmetic: 290 MiB at a micro-batch
# size of 1024, 150 MiB at 512.
wide=(--num-layers 8 --global-batch-size 1024 --mock-data --train-iters 1 --lr-warmup-iters 0 --eval-iters 0)
export OMPI_MCA_plm=isolated OMPI_MCA_btl=^tcp OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
limited() { # MiB FLAGS...: runs one rank with this address space limit
    local kib=$(($1 * 1024))
    shift
    (ulimit -v $kib && timeout -k 5 "$LIMIT" "$BUILD/train_gpt_cpu" "${model[@]}" "${batch[@]}" "${wide[@]}" \
        "$@") >"$work/out" 2>"$work/err" </dev/null
}
# $before: address space in use before memory is planned, which depends on the machine. Computed
# from the error message of a run whose plan exceeds the limit.
limited 3072 --micro-batch-size 1024 --hidden-size 1024 --num-layers 24
before=$((3072 - $(sed -n 's/.*MiB, but \([0-9]*\)\.[0-9]* MiB are free.*/\1/p' "$work/err" | grep . || echo 3072)))
check "a plan that is too large is refused" [ $before -lt 3072 ]
enough=$((before + 230))

smaller_batch() {
    limited $enough --micro-batch-size 1024
    error_names 3 "MiB too much (see --plan); --micro-batch-size 512 fits" $? ||
        return 1
    limited $enough --micro-batch-size 512 || say "--micro-batch-size 512 was suggested but did not fit"
}
check "the largest micro-batch that fits is suggested, and trains" smaller_batch

more_recomputation() {
    limited $enough --micro-batch-size 1024
    error_names 3 "and so does --recompute-granularity full" $? || return 1
    limited $enough --micro-batch-size 1024 --recompute-granularity full ||
        say "full recomputation was suggested but did not fit"
}
check "recomputation that fits is suggested, and trains" more_recomputation

nothing_fits() {
    limited $enough --micro-batch-size 1 --hidden-size 1024 --num-layers 24
    error_names 3 "no setting fits: --micro-batch-size 1 with --recompute-granularity full needs" $?
}
check "reports that nothing fits" nothing_fits

reported() { # the JSON line has planned bytes and memory beyond the plan in separate keys
    logged small 2 || return 1
    local bytes
    bytes=$("$BUILD/train_gpt_cpu" "${model[@]}" "${batch[@]}" --data-path "$data" --plan \
        --plan-world-size 2 2>"$work/err" | awk '$1 == "total" { print $2 }')
    sizes="\"planned_bytes\":$bytes,\"allocated_bytes\":$bytes,\"host_bytes\":0"
    grep -q "^{\"kind\":\"memory\",\"iteration\":1,$sizes,\"timing\":{.*\"beside_plan_bytes\":" \
        "$work/small.jsonl" ||
        { why="$(grep '"memory"' "$work/small.jsonl" || echo no line) instead of $bytes"; return 1; }
    grep -q '^memory outside the plan (MB) | before allocation .*: [0-9.]* | since then ' "$work/out" ||
        say "memory beyond the plan is not logged"
}
make_shard text 400 7
data=$work/text_text_document
check "the plan and memory beyond it are logged" reported
finish
