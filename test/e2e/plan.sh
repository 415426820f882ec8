#!/usr/bin/env bash
# --plan: parameter counts of the model configs (without ranks, data or vocabulary), memory and
# traffic compared with real runs, step-time estimates, tables in the documents, and invalid input.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 7
data=$work/text_text_document

config() { # NAME PARAMETERS
    "$BUILD/train_gpt_cpu" "@configs/gpt_$1.args" --plan --plan-world-size 16 --gpus-per-node 4 "${@:3}" \
        >"$work/out" 2>"$work/err" </dev/null || { say "failed"; return 1; }
    local parameters
    parameters=$(awk '$1 == "parameters" { print $2 }' "$work/out")
    [ "$parameters" = "$2" ] || { why="$parameters parameters instead of $2"; return 1; }
    grep -q '^  16 ranks = 4 nodes x 4' "$work/out" && grep -q '^  total ' "$work/out" ||
        { why="no ranks or no total in the plan"; return 1; }
}
configs=("125m 125262336" "350m 355919872" "1.3b 1315819520" "2.7b 2651673600" "6.7b 6658596864" \
    "13b 12853626880" "18b 18444251136")
for line in "${configs[@]}"; do
    # shellcheck disable=SC2086 # split on purpose
    check "${line% *}: ${line#* } parameters" config $line
    # shellcheck disable=SC2086
    check "${line% *}: the same with SDP4Bit" config $line "${paper[@]}"
done
# Compares the inter-node bytes of SDP4Bit with the bf16 baseline.
ratio() {
    local baseline quantized
    config "$1" "$2" --grad-reduce-in-bf16 || return 1
    baseline=$(awk '/between nodes, out of each node/ { print $7 }' "$work/out")
    config "$1" "$2" "${paper[@]}" || return 1
    quantized=$(awk '/between nodes, out of each node/ { print $7 }' "$work/out")
    # 4 bits, plus a scale per 128 gradients or 2048 weights, replace 16 bits.
    awk -v b="$baseline" -v q="$quantized" \
        'BEGIN { r = b / q; exit !(r > 3.5 && r <= 32 / (4 + 32 / 128 + 4 + 32 / 2048)) }' ||
        { why="$baseline bytes, quantized $quantized"; return 1; }
}
check "125m: at least 3.5 times fewer bytes between nodes" ratio 125m 125262336
check "18b: at least 3.5 times fewer bytes between nodes" ratio 18b 18444251136

larger=(--num-layers 4 --hidden-size 128)
check "memory of one rank" memory_as_planned 1 "${larger[@]}"
check "memory of the baseline, 2 x 2" memory_as_planned 4 "${larger[@]}" --gpus-per-node 2
check "memory of SDP4Bit, 2 x 2" memory_as_planned 4 "${larger[@]}" --gpus-per-node 2 "${paper[@]}"
# By default, the plan assumes that ranks of a node copy from each other's GPU memory. CPU ranks
# ignore a request for peer copies, with a warning.
copies() {
    memory_as_planned 4 "${larger[@]}" --gpus-per-node 2 "${paper[@]}" --node-exchange copies || return 1
    grep -q 'WARNING: --node-exchange copies has no effect: CPU ranks send everything through MPI' \
        "$work/out" || { why="no warning"; return 1; }
    planned_flags 2 || { why="no flags in the plan"; return 1; }
    if planned_flags 2 --node-exchange nccl || planned_flags 1; then why="flags without copies"; return 1; fi
}
# The same for tensor parallelism over peer memory.
peer_tensors() {
    memory_as_planned 2 "${larger[@]}" --tensor-model-parallel-size 2 --sequence-parallel \
        --tp-comm-backend peer || return 1
    grep -q 'WARNING: --tp-comm-backend peer has no effect: CPU ranks send everything through MPI' \
        "$work/out" || { why="no warning"; return 1; }
}
planned_flags() { # RANKS_PER_NODE FLAGS...
    local per_node=$1
    shift
    ranks 1 "${model[@]}" "${batch[@]}" --data-path "$data" --plan --plan-world-size 4 \
        --gpus-per-node "$per_node" "$@" && grep -q "flags of the node's ranks  *2097152" "$work/out"
}
check "memory with peer-to-peer copies inside a node" copies
check "memory with tensor parallelism over peer memory" peer_tensors
check "memory with delayed quantization" memory_as_planned 4 "${larger[@]}" --gpus-per-node 2 \
    "${paper[@]}" --gradients-quantization-start-iteration 5
check "memory with full recomputation" memory_as_planned 2 "${larger[@]}" --recompute-granularity full
recompute_saves() {
    local without with
    without=$("$BUILD/train_gpt_cpu" @configs/gpt_125m.args --plan --plan-world-size 4 2>"$work/err" |
        awk '$1 == "total" { print $2 }')
    with=$("$BUILD/train_gpt_cpu" @configs/gpt_125m.args --plan --plan-world-size 4 \
        --recompute-granularity full 2>"$work/err" | awk '$1 == "total" { print $2 }')
    awk -v a="$without" -v b="$with" 'BEGIN { exit !(b > 0 && b < 0.6 * a) }' ||
        { why="$with bytes instead of $without"; return 1; }
}
check "full recomputation needs less memory" recompute_saves
under_mpirun() {
    ranks 4 "${model[@]}" "${batch[@]}" --data-path "$data" --plan --gpus-per-node 2 &&
        [ "$(grep -c '^model$' "$work/out")" -eq 1 ] && grep -q '^  4 ranks = 2 nodes x 2' "$work/out" ||
        { why="not one plan of 4 ranks"; return 1; }
}
check "--plan under mpirun prints one plan" under_mpirun

# The summary at the end of --plan: GiB by purpose, GPUs with enough memory, inter-node bytes.
summary() { # CONFIG RANKS RANKS_PER_NODE FLAGS...: writes the summary to $work/summary
    "$BUILD/train_gpt_cpu" "@configs/gpt_$1.args" --plan --plan-world-size "$2" --gpus-per-node "$3" \
        "${@:4}" \
        >"$work/out" 2>"$work/err" </dev/null || { say "--plan failed"; return 1; }
    sed -n '/^summary$/,$p' "$work/out" >"$work/summary"
    [ -s "$work/summary" ] || { why="no summary"; return 1; }
}
tells() { grep -qE -- "$1" "$work/summary" ||
    { why="no '$1' in: $(tr '\n' ';' <"$work/summary")"; return 1; }; }
does_not_tell() { ! grep -qiE -- "$1" "$work/out" ||
    { why="it says '$(grep -iE -- "$1" "$work/out" | head -n 1)'"; return 1; }; }
gib_add_up() { # the GiB of all purposes add up to the total, which matches the total in bytes
    summary 1.3b 16 8 "${paper[@]}" || return 1
    awk '$1 == "total" && !bytes { bytes = $2 } /^summary$/ { inside = 1 } /^  a GPU/ { inside = 0 }
        inside && /^    all / { all = $2 }
        inside && /^    [a-z ]+ [0-9.]+$/ && !/^    all / { sum += $NF; rows++ }
        function apart(a, b) { return a > b ? a - b : b - a }
        END { gib = bytes / 2 ^ 30
            exit !(rows >= 6 && all > 0 && apart(sum, all) < 0.05 && apart(gib, all) < 0.006) }' \
        "$work/out" ||
        { why="$(tr '\n' ';' <"$work/summary")"; return 1; }
}
check "the summary's GiB add up to the total" gib_add_up
largest() { # GB: the largest --micro-batch-size that fits, according to the summary
    sed -nE "s/^  a GPU of +$1 GB .*: fits.* up to --micro-batch-size ([0-9]+).*/\1/p" "$work/summary"
}
largest_fits() { # the suggested micro-batch size fits, and one more does not
    local gb=$1 most
    summary 1.3b 16 8 "${paper[@]}" || return 1
    most=$(largest "$gb")
    [ "${most:-0}" -ge 4 ] || { why="no micro-batch for $gb GB: $(tr '\n' ';' <"$work/summary")"; return 1; }
    summary 1.3b 16 8 "${paper[@]}" --micro-batch-size "$most" --global-batch-size $((most * 16)) || return 1
    [ "$(largest "$gb")" = "$most" ] || { why="with $most: $(tr '\n' ';' <"$work/summary")"; return 1; }
    summary 1.3b 16 8 "${paper[@]}" --micro-batch-size $((most + 1)) --global-batch-size $((most * 16 + 16)) \
        || return 1
    tells "^  a GPU of +$gb GB .*: does not fit" && [ -z "$(largest "$gb")" ]
}
check "the largest micro-batch that fits 80 GB" largest_fits 80
check "the largest micro-batch that fits 141 GB" largest_fits 141
# docs/memory.md lists micro-batch sizes for the GPU program. The CPU program needs less workspace,
# so its micro-batch sizes are equal or slightly larger.
table_row() { # CONFIG: the micro-batches on eight GPUs of 80 and 141 GB, from docs/memory.md
    awk -F ' *[|] *' -v model="${1^^}" \
        '$2 == model && NF == 6 && $4 ~ /^[-0-9]+, [-0-9]+$/ { gsub("-", "0", $4); sub(",", "", $4); print $4 }' docs/memory.md
}
table_is_true() {
    local name said now gb
    for name in 125m 350m 1.3b 2.7b 6.7b 13b 18b; do
        summary $name 8 8 @configs/sdp4bit.args --micro-batch-size 1 || return 1
        now=$(for gb in 80 141; do largest $gb | grep . || echo 0; done | tr '\n' ' ')
        said=$(table_row $name)
        echo "$said $now" | awk 'NF != 4 { exit 1 } { for (i = 1; i < 3; i++) if ($(i + 2) < $i || $(i + 2) > 1.03 * $i + 1) exit 1 }' ||
            { why="$name: docs/memory.md says '$said', --plan '$now'"; return 1; }
    done
}
check "docs/memory.md: table of what fits" table_is_true
# cell NAME COLUMN: prints an entry of the table of model-parallel configurations.
cell() { awk -F ' *[|] *' -v model="${1^^}" -v column="$2" \
    '$2 == model && NF == 8 { gsub("-", "0"); sub(",", "", $column); print $column }' docs/memory.md; }
parts_table_is_true() {
    local name column said now gb sizes=("1 1" "2 1" "4 1" "8 1" "4 2") tensor pipeline
    for name in 6.7b 13b 18b; do
        for column in 0 1 2 3 4; do
            read -r tensor pipeline <<<"${sizes[column]}"
            summary $name 8 8 @configs/sdp4bit.args --micro-batch-size 1 --sequence-parallel \
                --tensor-model-parallel-size "$tensor" --pipeline-model-parallel-size "$pipeline" \
                --global-batch-size $((8 * 8 / tensor / pipeline)) || return 1
            now=$(for gb in 80 141; do largest $gb | grep . || echo 0; done | tr '\n' ' ')
            said=$(cell $name $((column + 3)))
            echo "$said $now" | awk 'NF != 4 { exit 1 }
                { for (i = 1; i < 3; i++) if ($(i + 2) < $i || $(i + 2) > 1.03 * $i + 1) exit 1 }' ||
                { why="$name, ${sizes[column]}: docs/memory.md says '$said', --plan '$now'"; return 1; }
        done
    done
}
check "docs/memory.md: table of model-parallel configurations" parts_table_is_true
# Checks the rows "MODEL, GPUS" of docs/memory.md: the micro-batch sizes that fit with each
# strategy, and host memory per node.
strategies_table_is_true() {
    local row name ranks column said now gb rows=0 params=optim_grads_params
    local strategies=(optim optim_grads "$params" "$params --optimizer-cpu-offload")
    while IFS= read -r row; do
        name=$(sed -E 's/^\| ([0-9.]+B), .*/\1/' <<<"$row")
        ranks=8
        [[ $row != *"two hosts"* ]] || ranks=16
        for column in 0 1 2 3; do
            # shellcheck disable=SC2086 # split on purpose
            summary "${name,,}" $ranks 8 @configs/sdp4bit.args --recompute-granularity full \
                --micro-batch-size 1 --data-parallel-sharding-strategy ${strategies[column]} || return 1
            now=$(for gb in 80 141; do largest $gb | grep . || echo -; done | paste -s -d ' ')
            said=$(awk -F ' *[|] *' -v column=$((column + 3)) \
                '{ sub(",", "", $column); print $column }' <<<"$row")
            [ "$now" = "$said" ] ||
                { why="$name on $ranks, ${strategies[column]}: '$said', --plan '$now'"; return 1; }
        done
        now=$(sed -nE 's/.* rank, ([0-9.]+) for the 8 ranks of a node; this machine has [0-9.]+$/\1/p' "$work/summary")
        said=$(awk -F ' *[|] *' '{ print $7 + 0 }' <<<"$row")
        awk -v now="${now:-0}" -v said="$said" 'BEGIN { exit !(now - said < 0.51 && said - now < 0.51) }' ||
            { why="$name on $ranks: $said GiB of a node's host, --plan '$now'"; return 1; }
        rows=$((rows + 1))
    done < <(grep -E '^\| [0-9.]+B, (eight|two hosts of eight) \|' docs/memory.md)
    [ $rows = 5 ] || { why="$rows rows"; return 1; }
}
check "docs/memory.md: table of sharding strategies" strategies_table_is_true
a_strategy_is_named() { # 18B fits on eight 80 GB GPUs only with one strategy
    summary 18b 8 8 "${paper[@]}" --micro-batch-size 1 &&
        tells '^    no setting fits.*; try --data-parallel-sharding-strategy optim_grads_params, --opt' &&
        tells '^    --data-parallel-sharding-strategy optim_grads_params with --recompute-.* fits, up to .* 17$'
}
check "a plan that does not fit suggests a strategy that does" a_strategy_is_named
too_large() {
    summary 18b 16 8 || return 1
    tells '^  a GPU of  80 GB .*: does not fit' && tells '^    no setting fits'
}
check "18b does not fit 80 GB" too_large
# Rows "NAME  GB" of the traffic that leaves a node. Bits per value for gradients + weights are 32 +
# 16 and 16 + 16 for the baselines, and 4 + 4 and scales for SDP4Bit. With two nodes, half of a
# node's gradients leave it.
gigabytes() { sed -nE "s/^    $1 +([0-9.]+).*/\1/p" "$work/summary"; }
side_by_side() {
    local fp32 bf16 sdp4bit own
    summary 1.3b 16 8 "$@" || return 1
    fp32=$(gigabytes 'fp32 gradients, bf16 weights') bf16=$(gigabytes 'bf16 gradients, bf16 weights') \
        sdp4bit=$(gigabytes 'SDP4Bit')
    own=$(awk '/between nodes, out of each node/ { print $7 / 1e9 }' "$work/out")
    awk -v f="$fp32" -v b="$bf16" -v s="$sdp4bit" -v n=1.3158 \
        'function near(x, y) { return x > 0.99 * y && x < 1.01 * y }
        BEGIN { four = 1 + 4 / 128 + 4 / 2048
            exit !(near(f, n * 6 / 2) && near(b, n * 4 / 2) && near(s, n * four / 2)) }' ||
        { why="$fp32, $bf16, $sdp4bit GB"; return 1; }
    awk -v own="$own" -v said="$(gigabytes 'this run')" \
        'BEGIN { exit !(said > 0 && (own - said) ^ 2 <= 0.006 ^ 2) }' ||
        { why="$own GB are sent: $(tr '\n' ';' <"$work/summary")"; return 1; }
}
check "table of inter-node bytes, SDP4Bit run" side_by_side "${paper[@]}"
check "table of inter-node bytes, baseline run" side_by_side
one_node() { # 4-bit gradients are used between nodes only
    summary 1.3b 8 8 "${paper[@]}" || return 1
    tells 'no traffic between nodes' && tells '8 bits' && does_not_tell 'between nodes: int4' &&
        [ -z "$(gigabytes 'SDP4Bit')" ]
}
check "one node: no inter-node traffic, and a note" one_node
one_rank() {
    summary 1.3b 1 1 "${paper[@]}" || return 1
    tells 'a single rank sends nothing' && does_not_tell '(inside a|between) nodes?: int'
}
check "one rank: no traffic, and a note" one_rank
two_nodes_of_one() {
    summary 1.3b 2 1 "${paper[@]}" || return 1
    tells 'SDP4Bit' && does_not_tell 'inside a node: int8'
}
check "nodes of one rank: no intra-node traffic" two_nodes_of_one
preset_file() {
    local flag value
    summary 1.3b 16 8 "${paper[@]}" && cp "$work/out" "$work/flags" || return 1
    summary 1.3b 16 8 @configs/sdp4bit.args || return 1
    cmp -s "$work/out" "$work/flags" ||
        { why="another plan: $(diff "$work/out" "$work/flags" | head -n 3 | tr '\n' ';')"; return 1; }
    DRY_RUN=1 DEVICE=cpu LOG_DIR='' PRESET=sdp4bit scripts/train_1.3b.sh --mock-data >"$work/command" \
        2>"$work/err" || { say "no command"; return 1; }
    while read -r flag value; do
        [ "$flag" = --use-distributed-optimizer ] && continue # the model configs set this flag
        grep -qwF -- "$flag${value:+ $value}" "$work/command" ||
            { why="PRESET=sdp4bit has no $flag $value"; return 1; }
    done < <(grep '^--' configs/sdp4bit.args)
}
check "configs/sdp4bit.args matches the scripts' preset" preset_file

# ---- model parallelism -------------------------------------------------------------------------
# Parameter counts of the paper's models, whose vocabulary is padded to a multiple of 128 x T: WHOLE
# of the model, and COUNT per rank of each stage.
parts() { # CONFIG T P ROWS WHOLE COUNT...
    local counts started=${EPOCHREALTIME/./}
    summary "$1" 128 8 --tensor-model-parallel-size "$2" --pipeline-model-parallel-size "$3" || return 1
    [ $((${EPOCHREALTIME/./} - started)) -lt 5000000 ] || { why="it took more than 5 s"; return 1; }
    grep -q "padded vocabulary $4\$" "$work/out" || { why="not $4 rows"; return 1; }
    counts=$(awk '$1 == "parameters" { print $2 } / GiB per rank$/ { print $(NF - 5) }' "$work/out" | tr '\n' ' ')
    [ "$counts" = "$5 ${*:6} " ] || { why="$counts parameters"; return 1; }
    grep -q "^  128 ranks = pipeline $3 x data parallel $((128 / $2 / $3)) x tensor parallel $2, on 16 nodes of 8\$" \
        "$work/out" || { why="no such layout"; return 1; }
}
check "6.7b, tensor parallel 4" parts 6.7b 4 1 50688 6660169728 1671929856
check "13b, tensor parallel 8" parts 13b 8 1 51200 12858214400 1617536000
check "13b, tensor parallel 4, two stages" parts 13b 4 2 50688 12855592960 1649024000 1638548480
check "18b, tensor parallel 8" parts 18b 8 1 51200 18449756160 2318530560
check "18b, tensor parallel 4, two stages" parts 18b 4 2 50688 18446610432 2356316160 2343745536
flops() { # Megatron-LM's FLOPs, with the vocabulary padded for T
    summary 13b 128 8 --tensor-model-parallel-size 8 &&
        awk '$1 == "FLOPs" { exit !($4 / 16 > 1.681479e14 && $4 / 16 < 1.681481e14) }' "$work/out" || say "wrong FLOPs"
}
check "FLOPs with a vocabulary padded for 8 ranks" flops
# The time of attention falls with the keys that a query sees: on average 4096 of 8192 tokens, 1792
# of a window of 2048, and 960 of a window of 1024.
windows() {
    local flags ms=()
    for flags in "" "--window-size 8191,0" "--window-size 2047,0" "--window-size 1023,0" \
        "--window-size 1023,0 --window-attn-skip-freq 2"; do
        # shellcheck disable=SC2086 # several words
        ranks 1 @configs/gpt_125m.args --micro-batch-size 1 --global-batch-size 64 --seq-length 8192 \
            --max-position-embeddings 8192 --plan --plan-world-size 1 --plan-network 100 $flags &&
            ms+=("$(sed -n 's/^  forward and backward take \([0-9.]*\) ms.*/\1/p' "$work/out")") ||
            { say "no plan with '$flags'"; return 1; }
    done
    awk 'function near(a, b) { return a > 0.99 * b && a < 1.01 * b }
        { all = $1 - $4
          exit !($1 == $2 && near(($1 - $3) / all, 2304 / 3136) && near(($1 - $5) / all, 0.5)) }' \
        <<<"${ms[*]}" || { why="${ms[*]} ms"; return 1; }
}
check "windows shorten attention" windows
middle_stages() { # consecutive stages with equal sizes share a row
    summary 13b 128 8 --pipeline-model-parallel-size 8 &&
        grep -qE '^  stage  1 to  6, 5 layers: 1573196800 parameters, [0-9.]+ GiB per rank$' "$work/out" &&
        [ "$(awk '$1 == "parameters" { print $2 }' "$work/out")" = 12853626880 ] || say "the stages' row is wrong"
}
check "13b, eight stages" middle_stages
# Each rank of a stage sends 2048 x 5120 bf16 activations, and the fp32 gradient of its part of the
# tied embedding.
pipeline_bytes() {
    summary 13b 128 8 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "$@" || return 1
    grep -qE '^  to a neighboring stage +20971520  each way$' "$work/out" &&
        grep -qE '^  gradients of the tied embedding +259522560  each way$' "$work/out" || say "wrong bytes"
    tells "^    pipeline +0.17$" && tells "^    tied embedding +2.08$"
}
check "bytes between two stages" pipeline_bytes
# 32 layers have 4 all-reduces each; embedding and LM head add more. An all-reduce sends 3/4 of
# 2 x 2048 x 4096 bytes in each direction. The loss sends 12 bytes per token to each of 3 ranks.
tensor_bytes() {
    summary 6.7b 128 8 --tensor-model-parallel-size 4 --micro-batch-size 1 &&
        grep -qE "^  tensor parallelism +$((130 * 2 * 3 / 4 * 2 * 2048 * 4096 + 12 * 3 * 2048))\$" "$work/out" &&
        does_not_tell '^    tensor parallelism' || say "wrong bytes"
}
check "bytes between tensor-parallel ranks" tensor_bytes
across_nodes() { # 4 of a rank's 7 peers are on the other node
    summary 6.7b 128 4 --tensor-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 16 || return 1
    tells "^    tensor parallelism +$(awk 'BEGIN { printf "%.2f",
        (130 * 2 * 7 / 8 * 2 * 2048 * 4096 + 12 * 7 * 2048) * 4 / 7 * 4 / 1e9 }')\$" &&
        tells 'needs fast links; --tensor-model-parallel-size 4 keeps it inside a node'
}
check "a tensor-parallel group over two nodes" across_nodes
# The 8 ranks of a node hold one copy of the model. fp32 gradients and bf16 weights are 6 bytes per
# parameter; with 16 nodes, 15/16 of them leave the node.
node_of_a_group() {
    summary 13b 128 8 --tensor-model-parallel-size 8 || return 1
    awk -v said="$(gigabytes 'fp32 gradients, bf16 weights')" -v run="$(gigabytes 'this run')" \
        'BEGIN { n = 8 * 1.617536 * 6 * 15 / 16; exit !(said > 0.999 * n && said < 1.001 * n && run >= said) }' ||
        { why="$(tr '\n' ';' <"$work/summary")"; return 1; }
    tells 'SDP4Bit' && does_not_tell 'inside a node: '
}
check "inter-node bytes if each node holds one copy of the model" node_of_a_group
check "memory of tensor-parallel ranks" memory_as_planned 4 "${larger[@]}" --gpus-per-node 2 "${paper[@]}" \
    --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 8
check "memory with sequence parallelism" memory_as_planned 4 "${larger[@]}" --tensor-model-parallel-size 4 \
    --sequence-parallel
# The plan shows the stage that needs the most memory. Here it is the first one, because the LM head
# is small.
check "memory of a stage" memory_as_planned 4 "${larger[@]}" --gpus-per-node 2 \
    --pipeline-model-parallel-size 2 --max-position-embeddings 512 --tensor-model-parallel-size 2
sequence_saves() {
    local without with
    summary 13b 128 8 --tensor-model-parallel-size 8 || return 1
    without=$(gigabytes activations)
    summary 13b 128 8 --tensor-model-parallel-size 8 --sequence-parallel || return 1
    with=$(gigabytes activations)
    # Activations per token and layer: 4 h + (3 h + h + 8 h) / 8 without sequence parallelism, and
    # an eighth of 16 h with it.
    awk -v a="$without" -v b="$with" 'BEGIN { r = b / a * 5.5 / 2; exit !(r > 0.97 && r < 1.03) }' ||
        { why="$with GiB instead of $without"; return 1; }
}
check "sequence parallelism needs less memory" sequence_saves
# The planned model-parallel bytes equal the sum of the bytes that all ranks of a run count.
parts_sent() { # NP FLAGS...
    local np=$1 said sent
    ranks 1 "${model[@]}" "${batch[@]}" --data-path "$data" --plan --plan-world-size "$np" "${@:2}" ||
        { say "--plan failed"; return 1; }
    # A step has two micro-batches. With two stages, one rank sends activations and the other
    # gradients. Interleaved stages have 2 x chunks - 1 boundaries.
    said=$(awk -v np="$np" '/^  tensor parallelism / { sum += 2 * $NF }
        /^  to a neighboring stage/ { sum += 2 * $5 * (/times$/ ? 2 * $(NF - 1) - 1 : 1) }
        /^  gradients of LayerNorms/ || /^  gradients of the tied embedding/ { sum += /tied/ ? $6 : $NF }
        END { print np * sum }' "$work/out")
    logged parts "$np" --train-iters 3 "${@:2}" || return 1
    sent=$(sed -n 's/.*"model_parallel_bytes": *\([0-9.]*\).*/\1/p' "$work/parts.jsonl" | tail -n 1)
    [ "${said:-0}" -gt 0 ] && [ "$said" = "${sent%.*}" ] ||
        { why="planned ${said:-none}, sent ${sent:-none}"; return 1; }
}
check "a run's tensor-parallel bytes match" parts_sent 4 --tensor-model-parallel-size 2
check "a run's sequence-parallel bytes match" parts_sent 4 --tensor-model-parallel-size 2 --sequence-parallel
check "a run's bytes with full recomputation match" parts_sent 4 --tensor-model-parallel-size 2 \
    --sequence-parallel --recompute-granularity full
check "a run's bytes between stages match" parts_sent 4 --pipeline-model-parallel-size 2
chunks_sent() { # two chunks in each of two stages have three boundaries
    summary 13b 128 8 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 \
        --num-layers-per-virtual-pipeline-stage 10 --global-batch-size 32 || return 1
    grep -q '^  stage  0, 20 layers in 2 chunks, embeddings: 1649024000 parameters' "$work/out" &&
        grep -qE '^  to a neighboring stage +20971520  each way, 2 times$' "$work/out" || { why="no chunks"; return 1; }
    tells "^    pipeline +1.01$" || return 1 # 8 ranks, 2 micro-batches, 2 chunks forward and 1 back
    parts_sent 4 --num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1
}
check "bytes of interleaved stages" chunks_sent
check "memory of interleaved stages" memory_as_planned 2 "${larger[@]}" \
    --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --max-position-embeddings 512

# Estimated step times for each preset over a network, and the recommended preset.
takes() { # PRESET FLAGS...
    "$BUILD/train_gpt_cpu" @configs/gpt_125m.args --plan --plan-world-size 16 --gpus-per-node 8 "${@:2}" \
        >"$work/out" 2>"$work/err" </dev/null || { say "--plan failed"; return 1; }
    why=$(sed -n '/^step time/,$p' "$work/out")
    grep -q "^  use PRESET=$1: " "$work/out" && [[ $why == *"this run"* ]]
}
check "--plan-network: local steps for a slow network" takes local --plan-network 1
check "--plan-network: no quantization for a fast network" takes baseline --plan-network 100000
own_row() { # the row of the run's flags equals the row of the preset with these flags
    takes eden-lossless --plan-network 5 @configs/sdp4bit.args --plan-step-ms 120 || return 1
    awk '$1 == "sdp4bit" { preset = $2 " " $3 } /^  this run +[0-9.]+ +[0-9.]+ / { run = $3 " " $4 }
        /out of each node +[0-9]/ { sent = $7 / 1e9 }
        END { off = sent - preset
            exit !(preset == run && off < 0.001 && off > -0.001 && preset ~ / 1[2-9]/) }' \
        "$work/out"
}
check "--plan-network: the run's own row" own_row
presets_table_is_true() { # WHAT PAGE
    BUILD=$BUILD dev/bench/presets_table "$1" >"$work/$1" 2>"$work/err" ||
        { say "presets_table failed"; return 1; }
    [ -s "$work/$1" ] && ! grep -vxFf "$2" "$work/$1" >"$work/diff" ||
        { why="not in $2: $(head -n 1 "$work/diff")"; return 1; }
}
check "the table of presets by network" presets_table_is_true users docs/how_it_works.md
check "the table of growing clusters" presets_table_is_true scale dev/bench/README.md
check "the table that the README compares with the paper" presets_table_is_true paper dev/bench/README.md
# Compares computed and measured step times with the tables in dev/bench/README.md and with
# docs/how_it_works.md.
measured_is_true() {
    local results=dev/bench/results
    BUILD=$BUILD dev/bench/presets_table check \
        $results/{comm_2gpu,comm_2gpu_h100,comm_4gpu,codecs_2gpu_h100}.json \
        $results/{local_steps_2gpu,strategies_2gpu,layouts_2gpu_norm}.json >"$work/check" 2>"$work/err" ||
        { say "presets_table failed"; return 1; }
    ! grep '^|' "$work/check" | grep -vxFf dev/bench/README.md >"$work/diff" ||
        { why="not in dev/bench/README.md: $(head -n 1 "$work/diff")"; return 1; }
    why=$(tail -n 1 "$work/check")
    [[ $why == *" of "*" within 10 %" ]] && tr '\n' ' ' <docs/how_it_works.md |
        grep -qF "[${why% within*} measured steps]"
}
check "the table of computed and measured steps" measured_is_true
picture_is_true() {
    BUILD=$BUILD dev/bench/presets_table picture "$work/picture.svg" &&
        cmp "$work/picture.svg" docs/where_it_pays.svg
}
check "the plot of where SDP4Bit pays off" picture_is_true
# 12 layers, 4 micro-batches, T = 2: of 172 messages per micro-batch, 52 are in bf16. Only these use
# peer memory, which takes 0.026 ms less than NCCL, or are quantized, which takes 0.1 ms.
tensor_messages() {
    local tensor=(--plan-gpu H100 --tensor-model-parallel-size 2 --sequence-parallel --fp8-format e4m3 \
        --fp8-recipe tensorwise) nccl peer codes
    exposed_ms() { takes eden-lossless --plan-network 25 "$@" &&
        awk '$1 == "this" && $2 == "run" && NF == 8 { print $5 }' "$work/out"; }
    nccl=$(exposed_ms "${tensor[@]}" --tp-comm-backend nccl) && peer=$(exposed_ms "${tensor[@]}") &&
        codes=$(exposed_ms "${tensor[@]}" --quantized-tensor-parallel) || return 1
    awk -v n="$nccl" -v p="$peer" -v c="$codes" \
        'BEGIN { gain = n - p; cost = c - n; exit !(gain > 5.2 && gain < 5.6 && cost > 14 && cost < 22) }' ||
        { why="nccl $nccl, peer $peer, codes $codes"; return 1; }
}
check "--plan-network: which messages use peer memory or are quantized" tensor_messages
# Buckets of whole matrices are reduced in chunks, as soon as their layers are complete. The ratio
# of the step times with Muon and AdamW would be 1.25 if all chunks waited for the first layer.
chunks_overlap() {
    local adam muon
    step_ms() { "$BUILD/train_gpt_cpu" @configs/gpt_1.3b.args --plan --plan-world-size 32 --gpus-per-node 8 \
        --plan-network 25 "$@" 2>"$work/err" </dev/null | awk '$1 == "sdp4bit" && NF == 7 { print $3 }'; }
    adam=$(step_ms) && muon=$(step_ms @configs/muon.args)
    why="AdamW $adam ms, Muon $muon ms"
    awk -v a="$adam" -v m="$muon" 'BEGIN { exit !(a > 0 && m / a > 1.126 && m / a < 1.138) }'
}
check "--plan-network: chunks of Muon's buckets overlap with backward" chunks_overlap
passes_ms() { # FLAGS...: forward and backward time of a step, computed by --plan-network
    takes baseline --plan-network 100000 "$@" && sed -n 's/^  forward and backward take \([0-9.]*\) ms.*/\1/p' "$work/out"
}
gpus_differ() { # A100 to H200: 3.17 times as long for matrix products, 2.35 times for memory access
    local slow fast given said
    slow=$(passes_ms --plan-gpu A100) fast=$(passes_ms)
    said=$(sed -n 's/^  forward and backward take .* ms per step: \([0-9.]*\) TFLOP.*(--plan-gpu)$/\1/p' "$work/out")
    given=$(passes_ms --plan-gpu A100 --plan-tflops "$said")
    awk -v s="$slow" -v f="$fast" -v g="$given" \
        'BEGIN { r = s / f; off = g / f - 1; exit !(f > 0 && off > -0.001 && off < 0.001 && r > 2.4 && r < 3.16) }' ||
        { why="$slow $fast $given"; return 1; }
}
check "--plan-gpu, and flags that replace it" gpus_differ
named_gpu() { # says whether the run fits on the named GPU, instead of on 80 GB and 141 GB GPUs
    takes baseline --plan-network 100000 --plan-gpu RTX5090 &&
        grep -q '^  RTX5090 (.* GiB for the plan): ' "$work/out" || { why="no line"; return 1; }
    ! grep '^  a GPU of' "$work/out" || { why="other GPUs too"; return 1; }
}
check "--plan-gpu: whether the run fits on it" named_gpu
# Forward and backward times of H200s match the measurements in dev/bench/results: comm_2gpu.json,
# comm_4gpu.json, and single_gpu.json without its times for AdamW and the norm.
passes_are_true() {
    local config rows measured got
    while read -r config rows measured; do
        got=$("$BUILD/train_gpt_cpu" "@configs/gpt_$config.args" --plan --micro-batch-size "$rows" \
            --global-batch-size "$rows" --plan-network 10 2>/dev/null </dev/null |
            sed -n 's/^  forward and backward take \([0-9.]*\) ms.*/\1/p')
        awk -v got="$got" -v measured="$measured" 'BEGIN { r = got / measured; exit !(r > 0.93 && r < 1.05) }' ||
            { why="$config, micro-batch $rows: $got ms computed, $measured measured"; return 1; }
    done <<'END'
125m 32 120.2
125m 32 115.0
350m 16 155.3
1.3b 8 233.4
1.3b 8 232.9
1.3b 1 34.0
1.3b 1 35.7
END
}
check "--plan-gpu: forward and backward times match measurements" passes_are_true
# On an H100, the linear layers of a transformer layer save 3.27 ms in FP8 at 1.3B and 7.13 ms at
# 6.7B (micro-batches of 8 and 4), before quantization, which takes a part of it.
fp8_saves() {
    local config rows layers saves bf16 fp8 inner
    while read -r config rows layers saves; do
        passes() {
            "$BUILD/train_gpt_cpu" "@configs/gpt_$config.args" --plan --micro-batch-size "$rows" \
                --global-batch-size "$rows" --plan-network 10 --plan-gpu H100 \
                --tensor-model-parallel-size 1 "$@" 2>/dev/null </dev/null |
                sed -n 's/^  forward and backward take \([0-9.]*\) ms.*/\1/p'
        }
        bf16=$(passes) fp8=$(passes --fp8-format hybrid)
        inner=$(passes --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16)
        awk -v bf16="$bf16" -v fp8="$fp8" -v inner="$inner" -v n="$layers" -v most="$saves" 'BEGIN {
            saved = (bf16 - fp8) / n; part = (bf16 - inner) / (bf16 - fp8) - (n - 2) / n
            exit !(saved > 0 && saved < most && part > -0.02 && part < 0.02) }' ||
            { why="$config: $bf16 ms in bf16, $fp8 in FP8, $inner without the first and last layer"; return 1; }
    done <<'END'
1.3b 8 24 3.27
6.7b 4 32 7.13
END
}
check "--plan-network: FP8 saves time in the layers that use it" fp8_saves
fp8_needs_fp8_tensor_cores() {
    "$BUILD/train_gpt_cpu" @configs/gpt_125m.args --plan --plan-network 10 --plan-gpu A100 \
        --fp8-format hybrid >"$work/out" 2>"$work/err" </dev/null
    [ $? = 2 ] && [ ! -s "$work/out" ] &&
        [ "$(grep -c "^error: .*--plan-gpu A100 has no FP8 tensor cores; drop --fp8-format" "$work/err")" = 1 ] ||
        { why=$(head -n 1 "$work/err"); return 1; }
}
check "--plan-gpu: FP8 on a GPU without it is refused" fp8_needs_fp8_tensor_cores
preset_must_fit() { # local steps on nodes of one GPU need 92 GiB, but an H100 has 77
    "$BUILD/train_gpt_cpu" @configs/gpt_2.7b.args --plan --plan-world-size 2 --gpus-per-node 1 \
        --micro-batch-size 4 --plan-network 1 --plan-gpu "$1" >"$work/out" 2>"$work/err" </dev/null ||
        { say "--plan failed"; return 1; }
    why=$(sed -n '/^  take/,/^  this run/p' "$work/out")
    grep -q "^  use PRESET=$2: " "$work/out" &&
        [ "$(grep -c "^    not local, which needs 9[0-9.]* of the GPU's 7" "$work/out")" = "$3" ]
}
check "--plan-network: a preset that does not fit is not recommended" preset_must_fit H100 eden-lossless 1
check "--plan-network: a preset that fits is recommended" preset_must_fit H200 local 0
a_burst_helps() { # 100 MB at 10 Gb/s are 80 ms
    local ms
    for burst in 0 100; do
        takes "$1" --plan-network 10 --plan-network-burst $burst || return 1
        ms+=" $(awk '$1 == "baseline" { print $3 }' "$work/out")"
    done
    awk -v ms="$ms" 'BEGIN { split(ms, m, " "); off = m[1] - m[2]; exit !(off > 79 && off < 161) }' || { why=$ms; return 1; }
}
check "--plan-network-burst" a_burst_helps eden-lossless
bits_count() { # changes inter-node bytes: 62 M of 124 M matrix elements are sent
    local sent=''
    for bits in 1 2 3; do
        takes "$1" --plan-network 10 --plan-lossless-bits $bits || return 1
        sent+=" $(awk '$1 == "eden-lossless" { print $2 }' "$work/out")"
    done
    takes "$1" --plan-network 10 || return 1 # 3 bits
    sent+=" $(awk '$1 == "eden-lossless" { print $2 }' "$work/out")"
    awk -v sent="$sent" 'BEGIN { split(sent, s, " "); a = s[2] - s[1]; b = s[3] - s[2];
        exit !(a > 0.006 && a - b < 0.0021 && b - a < 0.0021 && s[4] == s[3]) }' || { why=$sent; return 1; }
}
check "--plan-lossless-bits" bits_count eden-lossless
# of_row ROW COLUMN: prints an entry of the table in $work/out.
of_row() { sed -n "s/^  $1   *//p" "$work/out" | awk -v column="$2" '{ print $column }'; }
exposed_and_tokens() { # a step has 256 sequences of 2048 tokens
    local far near
    takes eden-lossless --plan-network 10 && far=$(of_row baseline 2) exposed=$(of_row baseline 3) \
        tokens=$(of_row baseline 4) && takes baseline --plan-network 1e6 --plan-network-inside 1e6 &&
        near=$(of_row baseline 2) || return 1
    awk -v far="$far" -v near="$near" -v exposed="$exposed" -v tokens="$tokens" \
        'BEGIN { off = far - near - exposed; rate = tokens * far / 1e3 / 256 / 2048
            exit !(exposed > 200 && off > -1 && off < 1 && rate > 0.999 && rate < 1.001) }' ||
        { why="$far and $near ms, $exposed exposed, $tokens tokens/s"; return 1; }
}
check "--plan-network: exposed communication and tokens/s" exposed_and_tokens
# The computed step of one rank on a host with 16 cores matches
# dev/bench/results/strategies_1gpu.json.
offload_is_true() {
    "$BUILD/train_gpt_cpu" @configs/gpt_1.3b.args --plan --plan-world-size 1 --micro-batch-size 8 \
        --global-batch-size 8 --plan-network 1 --plan-step-ms 241.9 --optimizer-cpu-offload \
        >"$work/out" 2>"$work/err" </dev/null || { say "--plan failed"; return 1; }
    why=$(sed -n '/^step time/,$p' "$work/out")
    grep -q "^  local  *incompatible with this run's flags" "$work/out" &&
        awk -v run="$(of_row "this run" 2)" -v strategy="$(of_row "optim_grads_params, offload" 1)" \
            'BEGIN { exit !(run == strategy && run > 0.9 * 684 && run < 1.1 * 684) }'
}
check "--plan-network: offloading matches measurements, and invalid combinations" offload_is_true
strategies_compared() { # with two micro-batches, optim_grads reduces gradients twice per step
    local optim grads params
    takes eden-lossless --plan-network 10 && optim=$(of_row optim 1) grads=$(of_row optim_grads 1) \
        params=$(of_row optim_grads_params 1) || return 1
    [ "$optim" = "$(of_row "this run" 2)" ] && awk -v optim="$optim" -v grads="$grads" -v params="$params" \
        'BEGIN { exit !(grads > 1.2 * optim && params >= grads) }' || { why="$optim, $grads, $params ms"; return 1; }
    # If weights are sharded across all ranks, local steps are marked as incompatible, and the
    # command for the eden preset includes the additional flag that it needs.
    takes eden --plan-network 10 --data-parallel-sharding-strategy optim_grads_params \
        --shard-params-over world && grep -q "^  local  *incompatible with this run's flags" "$work/out" &&
        grep -q "^  use PRESET=eden: @configs/eden.args --weight-quantization-method direct$" "$work/out"
}
check "--plan-network: strategies compared" strategies_compared
# Two stages, each on its own node with 10 Gb/s for four ranks. Per rank and direction:
#   activations   8 micro-batches of 4 x 2048 x 768 bf16 values, 40.3 ms each
#   embedding     gradient of 50304 x 768 fp32 values, 494 ms
pipeline_waits() {
    local common=(--gpus-per-node 4 --plan-world-size 8 --pipeline-model-parallel-size 2 --micro-batch-size 4
        --global-batch-size 128 --plan-network 10)
    takes baseline "${common[@]}" --plan-tflops 494.5 || return 1
    awk -v ms="$(of_row baseline 3)" 'BEGIN { least = 494.5 + 2 * 40.3; exit !(ms > least && ms < 1.5 * least) }' ||
        { why="$(of_row baseline 3) ms exposed"; return 1; }
    takes baseline "${common[@]}" --plan-tflops 0.01 || return 1
    awk -v ms="$(of_row baseline 3)" 'BEGIN { least = 494.5 + 2 * 40.3; exit !(ms > 0.99 * least && ms < 1.01 * least) }' ||
        { why="$(of_row baseline 3) ms exposed with long passes"; return 1; }
}
check "--plan-network: pipeline traffic" pipeline_waits
six_layers=(--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 2 --tokenizer-type Byte --bf16
    --use-distributed-optimizer)
measures() { # --plan-measure times the first four layers of a small model
    local said
    "$BUILD/train_gpt_cpu" "${six_layers[@]}" --plan --plan-world-size 4 --gpus-per-node 2 --plan-network 1 \
        --plan-measure "$@" >"$work/out" 2>"$work/err" </dev/null ||
        { say "--plan-measure failed"; return 1; }
    said=$(awk '/^  forward and backward take .*--plan-measure/ { print $5, $9 }' "$work/out")
    awk -v said="$said" \
        'BEGIN { exit !(split(said, s, " ") == 2 && s[1] > 0.1 && s[2] > 1e-5 && s[2] < 100) }' ||
        { why=$said; return 1; }
}
check "--plan-measure" measures
check "--plan-measure with model parallelism" measures --tensor-model-parallel-size 2 \
    --recompute-granularity full
check "--plan-measure with a long warm-up" measures --train-iters 500000 --lr-warmup-iters 2000
check "--plan-measure with batch size ramp-up" measures --train-samples 100000 --global-batch-size 64 \
    --rampup-batch-size 16 16 1000 --lr-warmup-samples 5000
check "--plan-measure with a WSD schedule and all logging" measures --train-iters 9000 \
    --lr-decay-style WSD --lr-wsd-decay-iters 3000 --dump-distributions "$work/histograms" \
    --dump-distributions-interval 1 --quantized-gradients --log-quantization-error-interval 1
check "--plan-measure with weights sharded across all ranks" measures \
    --data-parallel-sharding-strategy optim_grads_params --shard-params-over world --secondary-partition
check "--plan-measure with local steps and EDEN" measures --local-steps 30 --local-steps-delay 5 \
    --quantized-gradients --gradient-quantization-method eden
check "--plan-measure with --sft" measures --sft
check "--plan-measure with --sft, absent data and LoRA" measures --sft --train-data-path "$work/absent" \
    --lora-rank 8 --load "$work/absent" --finetune
plan_refused() { # CODE TEXT FLAGS...
    local code=$1 text=$2
    shift 2
    "$BUILD/train_gpt_cpu" @configs/gpt_6.7b.args --plan "$@" >"$work/out" 2>"$work/err" </dev/null
    error_names "$code" "$text" $?
}
check "--plan-network: an invalid speed" plan_refused 2 "--plan-network must be at least" \
    --plan-network 1e-300
check "--plan-network-inside: an invalid speed" plan_refused 2 "--plan-network-inside must be at least" \
    --plan-network 10 --plan-network-inside 1e-4
check "--plan-tflops: an invalid speed" plan_refused 2 "--plan-tflops must be at least 0.001" \
    --plan-network 10 --plan-tflops 1e-300
check "--plan-tflops without a network" plan_refused 2 "--plan-step-ms need --plan-network; add it" \
    --plan-tflops 10
check "--plan-tflops and --plan-step-ms" plan_refused 2 "both set a GPU's speed; keep one" \
    --plan-network 10 --plan-tflops 10 --plan-step-ms 5
check "--plan-measure and --plan-tflops" plan_refused 2 "keep one" --plan-network 10 --plan-tflops 10 \
    --plan-measure
check "a tensor-parallel size that does not divide the heads" plan_refused 2 "num-attention-heads 32" \
    --plan-world-size 12 --tensor-model-parallel-size 3
check "a pipeline size that does not divide the layers" plan_refused 2 "num-layers 32" --plan-world-size 12 \
    --pipeline-model-parallel-size 3
check "more stages than layers" plan_refused 2 "num-layers 32" --plan-world-size 64 \
    --pipeline-model-parallel-size 64
check "ranks that the layout does not divide" plan_refused 2 "start a multiple of 8 ranks" \
    --plan-world-size 12 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2
check "more tensor-parallel ranks than ranks" plan_refused 2 "start a multiple of 8 ranks" \
    --plan-world-size 4 --tensor-model-parallel-size 8
check "tensor-parallel groups that do not fit the nodes" plan_refused 2 "does not fit nodes of 6" \
    --plan-world-size 24 --gpus-per-node 6 --tensor-model-parallel-size 4
check "stages that end inside nodes" plan_refused 2 "--pipeline-model-parallel-size" --plan-world-size 24 \
    --gpus-per-node 8 --pipeline-model-parallel-size 2
check "ranks not a multiple of the ranks per node" plan_refused 2 "--gpus-per-node" \
    --plan-world-size 12 --gpus-per-node 8
check "lossless weights with messages beyond 32-bit sizes" plan_refused 2 "lower --ddp-bucket-size" \
    --plan-world-size 2 --ddp-bucket-size 10000000000 --quantized-weights \
    --weight-quantization-method lossless
check "--plan-world-size without --plan" refused 2 "--plan" 1 --plan-world-size 8
finish
