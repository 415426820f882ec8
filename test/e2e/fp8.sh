#!/usr/bin/env bash
# FP8 linear layers on CPU ranks, which compute the same codes as GPUs: every preset, GPT and Llama,
# tensor, sequence and pipeline parallelism, sharding strategies, recomputation, evaluation, text
# samples and checkpoints. Losses must be near bf16's. Where a feature changes no bit in bf16, it
# changes none in FP8.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 800 2
data=$work/text_text_document
tensorwise=(--fp8-format hybrid --fp8-recipe tensorwise)
delayed=(--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max)
# Sizes that block scales allow: 128 tokens, hidden size 128, QKV 384, MLP 512. With 3e-3, the
# learning rate of the smaller model, the norm has spikes in bf16 and FP8, after which losses differ
# more.
wide=(--lr 1e-3 --hidden-size 128 --seq-length 64 --max-position-embeddings 64)
blockwise=("${wide[@]}" --fp8-format e4m3 --fp8-recipe blockwise)
llama=(--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2)
two_nodes=(--gpus-per-node 1 --train-iters 30 --verify-replicas-interval 1 --global-batch-size 4)

says() { grep -qF -- "$1" "$work/out" || { why="no line '$1'"; return 1; }; }
runs_in_fp8() { says "FP8: $1 scaling, linear layers of ${2:-2 of 2} transformer layers"; }
# near A B: checks that A's mean loss over the last 5 of 30 iterations is below 90 % of its first
# loss and at most 0.5 % from B's, but that the runs are not identical. FP8 rounds each operand by
# up to 6 or 12 %, but independently, so that sums of many products are much closer. Losses of these
# models differ by up to 0.25 %, most by less than 0.1 %.
near() {
    local a b first
    first=$(mean_loss "$1" 1 1) a=$(mean_loss "$1" 26 30) b=$(mean_loss "$2" 26 30)
    awk -v a="$a" -v b="$b" -v f="$first" \
        'BEGIN { d = 100 * (a / b - 1); exit !(a < 0.9 * f && d <= 0.5 && d >= -0.5) }' ||
        { why="loss from $first to $a, $2 has $b"; return 1; }
    ! same_training "$1" "$2" || { why="$1 and $2 are identical"; return 1; }
    why=
    [ "${VERBOSE:-0}" = 0 ] || echo "# $1: loss $a, $2 $b"
}

# --- presets -------------------------------------------------------------------------------------
# Sends as many bytes as planned in bf16, and replicas stay equal.
preset() { # NAME FLAGS...
    local name=$1
    shift
    logged "$name.bf16" 2 "${two_nodes[@]}" "$@" && make_plan 2 "${two_nodes[@]}" "$@" &&
        logged "$name" 2 "${two_nodes[@]}" "$@" "${tensorwise[@]}" && runs_in_fp8 "hybrid, tensorwise" &&
        near "$name" "$name.bf16" || return 1
    ! grep -q '"kind":"repair"' "$work/$name.jsonl" || { why="replicas differed"; return 1; }
    case $name in
    local) ;;
    lossless) same_training baseline lossless ;;
    eden-lossless) ;; # the number of bytes depends on the weights
    *) sends_as_planned "$name" 1 1 30 1 ;;
    esac
}
check "baseline" preset baseline
for args in configs/*.args; do
    name=${args##*/} name=${name%.args}
    case $name in
    gpt_* | llama_* | tiny) ;;
    lossless | eden-lossless) check "@$args" preset "$name" "@$args" ;;
    local) check "@$args" preset "$name" "@$args" --wq-group-size 128 --local-steps 5 ;;
    *) check "@$args" preset "$name" "@$args" --wq-group-size 128 ;;
    esac
done

# --- recipes and layers --------------------------------------------------------------------------
one=(--train-iters 30 --global-batch-size 2)
recipe() { # NAME "FORMAT, RECIPE" LAYERS FLAGS...: compared with the run NAME.bf16
    logged "$1" 1 "${one[@]}" "${@:4}" && runs_in_fp8 "$2" "$3" && near "$1" bf16
}
logged bf16 1 "${one[@]}" || not_ok "a run in bf16" "$why"
check "tensorwise, E4M3" recipe e4m3 "e4m3, tensorwise" "2 of 2" --fp8-format e4m3 --fp8-recipe tensorwise
check "delayed, as by default" recipe default "hybrid, delayed" "2 of 2" --fp8-format hybrid
check "delayed, a history of 4 steps" recipe history "hybrid, delayed" "2 of 2" "${delayed[@]}"
bf16_layers() {
    logged bf16 1 "${one[@]}" --num-layers 4 &&
        recipe ends "hybrid, tensorwise" "2 of 4" --num-layers 4 "${tensorwise[@]}" --first-last-layers-bf16
}
check "first and last layer in bf16" bf16_layers
block_scales() {
    logged bf16 1 "${one[@]}" "${wide[@]}" && recipe blocks "e4m3, blockwise" "2 of 2" "${blockwise[@]}"
}
check "blockwise" block_scales

# --- layouts -------------------------------------------------------------------------------------
# layout NAME NP FLAGS...: a run in FP8, which allocates what is planned.
layout() {
    make_plan "${@:2}" "${tensorwise[@]}" && logged "$@" "${tensorwise[@]}" && allocated_as_planned
}
# Stages add up the gradient norm in another order if the LM head has weights of its own, and bias
# gradients on GPUs.
same_stages() {
    case "${DEVICE:-cpu} $* " in gpu* | *" --untie-"*) ;; *) same_training alone stages; return ;; esac
    paste -d ' ' <(field alone loss) <(field stages loss) | awk \
        '{ d = $2 / $4 - 1; n++; if (!(d < 1e-4 && d > -1e-4)) exit 1 } END { exit n != 30 }' ||
        { why="losses of two stages are far from one rank's"; return 1; }
}
# Tensor parallelism splits the inputs of two linear layers, so each part has a scale of its own.
family() { # FLAGS...
    local all=("${one[@]}" --num-layers 4 --make-vocab-size-divisible-by 16 "$@")
    logged bf16 1 "${all[@]}" && layout whole 1 "${all[@]}" && near whole bf16 &&
        layout halves 2 "${all[@]}" --make-vocab-size-divisible-by 8 --tensor-model-parallel-size 2 &&
        near halves whole &&
        layout rows 2 "${all[@]}" --make-vocab-size-divisible-by 8 --tensor-model-parallel-size 2 \
            --sequence-parallel --verify-replicas-interval 1 && equal_ranks && near rows whole &&
        logged stages 2 "${all[@]}" "${tensorwise[@]}" --ddp-bucket-size 1 --pipeline-model-parallel-size 2 &&
        layout alone 1 "${all[@]}" --ddp-bucket-size 1 && same_stages "$@" &&
        layout full 1 "${all[@]}" --recompute-granularity full && same_training whole full
}
check "GPT: tensor, sequence and pipeline parallelism, full recomputation" family
check "GPT with dropout" family --hidden-dropout 0.1
check "Llama" family "${llama[@]}" --lr 1e-3
both() {
    local all=("${one[@]}" --global-batch-size 8)
    logged bf16 1 "${all[@]}" --make-vocab-size-divisible-by 16 &&
        layout both 4 "${all[@]}" --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
            --sequence-parallel --make-vocab-size-divisible-by 8 --verify-replicas-interval 1 &&
        equal_ranks && near both bf16
}
check "tensor parallel 2, pipeline 2, several micro-batches" both

# Sequence parallelism gathers FP8 codes, or bf16 with the blockwise recipe.
sends_codes() { # NP FLAGS...
    local np=$1 rows=(--tensor-model-parallel-size 2 --sequence-parallel --train-iters 3 "${@:2}")
    make_plan "$np" "${rows[@]}" && logged codes "$np" "${rows[@]}" && parts_as_planned codes "$np"
}
check "bytes of tensorwise codes" sends_codes 2 "${tensorwise[@]}"
check "bytes of tensorwise codes, full recomputation" sends_codes 4 "${tensorwise[@]}" \
    --recompute-granularity full
check "bytes of codes in 2 of 4 layers of Llama" sends_codes 2 "${tensorwise[@]}" "${llama[@]}" \
    --num-layers 4 --first-last-layers-bf16
check "bytes of codes and of 8-bit sums" sends_codes 2 "${tensorwise[@]}" --quantized-tensor-parallel \
    --aq-group-size 32
check "bytes of codes with delayed scales" sends_codes 2 "${delayed[@]}"
check "bytes with blockwise scales" sends_codes 2 "${blockwise[@]}" --kv-channels 64 \
    --recompute-granularity full

# --- sharding strategies -------------------------------------------------------------------------
strategies() { # FLAGS...: the same bits in every strategy
    local run=(2 --gpus-per-node 2 --train-iters 6 --global-batch-size 4 --ddp-bucket-size 1 "$@") name
    local all=(--data-parallel-sharding-strategy optim_grads_params)
    logged optim "${run[@]}" || return 1
    for name in "${all[0]} no_shard" "${all[0]} optim_grads" "${all[*]}" \
        "${all[*]} --shard-params-over world" "--optimizer-cpu-offload" \
        "${all[*]} --optimizer-cpu-offload"; do
        # shellcheck disable=SC2086 # split on purpose
        make_plan "${run[@]}" $name && logged other "${run[@]}" $name && allocated_as_planned &&
            same_training optim other || { why="$name: $why"; return 1; }
    done
}
check "every sharding strategy: identical" strategies "${tensorwise[@]}"
check "the same with delayed scales" strategies "${delayed[@]}"
check "the same with full recomputation" strategies "${tensorwise[@]}" --recompute-granularity full

# --- checkpoints ---------------------------------------------------------------------------------
saves=(--gpus-per-node 1 --train-iters 12 --global-batch-size 4 --save-interval 6 --eval-interval 6
    "${paper[@]}" --wq-group-size 128)
resumes() { # FLAGS...: continues bit-exactly, with evaluations
    rm -rf "$work/saved"
    logged whole 2 "${saves[@]}" "$@" --save "$work/saved" && echo 6 >"$work/saved/latest_checkpointed_iteration.txt" &&
        logged resumed 2 "${saves[@]}" "$@" --load "$work/saved" && same_training whole resumed 6 &&
        [ "$(train_lines resumed | wc -l)" = 6 ] || return 1
    [ -n "$(field resumed loss valid)" ] &&
        [ "$(field whole loss valid | tail -n 1)" = "$(field resumed loss valid | tail -n 1)" ] ||
        { why="validation losses differ"; return 1; }
}
check "resumes bit-exactly: tensorwise" resumes "${tensorwise[@]}"
check "resumes bit-exactly: delayed" resumes "${delayed[@]}"
check "resumes bit-exactly: blockwise" resumes "${blockwise[@]}"
# A bf16 checkpoint continues in FP8 and back. The note names the difference.
there_and_back() { # "RECIPE" FLAGS...
    local turns=(2 --gpus-per-node 1 --global-batch-size 4 --train-iters 30 --save-interval 10)
    rm -rf "$work/turns"
    turns+=(--save "$work/turns")
    logged bf16 2 --gpus-per-node 1 --global-batch-size 4 --train-iters 30 &&
        logged turn "${turns[@]}" --exit-interval 10 &&
        logged there "${turns[@]}" --load "$work/turns" --exit-interval 20 "${@:2}" &&
        says 'fp8_format was "none" in the checkpoint and is now "hybrid", so linear layers' &&
        runs_in_fp8 "hybrid, $1" &&
        logged back "${turns[@]}" --load "$work/turns" &&
        says 'fp8_format was "hybrid" in the checkpoint and is now "none", so linear layers' || return 1
    cat "$work/turn.jsonl" "$work/there.jsonl" "$work/back.jsonl" >"$work/turns.jsonl"
    near turns bf16
}
check "bf16, tensorwise, bf16" there_and_back tensorwise "${tensorwise[@]}"
check "bf16, delayed, bf16" there_and_back delayed "${delayed[@]}"
# Only training runs in FP8: a bf16 run that loads the saved weights gets the same losses, scores of
# tasks and text samples.
echo '{"task":"last","context":"the quick brown","continuation":" fox"}' >"$work/tasks.jsonl"
results() { # NAME: scores, test loss and first validation loss, and the text
    grep -E '"kind":"task"|"split":"test"' "$work/$1.jsonl" | sed 's/"consumed_samples":[0-9]*,//' | sort -u
    grep -m 1 '"split":"valid"' "$work/$1.jsonl" | sed 's/.*"loss"/"valid loss"/'
    sed -n '/^sample at/,$p' "$work/out"
}
evaluates_in_bf16() { # NP FLAGS...
    local asks=(--sample-prompt "the quick " --sample-tokens 8 --sample-temperature 0 --eval-interval 4
        --eval-tasks "$work/tasks.jsonl" --global-batch-size 4 --train-iters 4)
    rm -rf "$work/said"
    logged fp8 "$1" "${asks[@]}" --save "$work/said" --save-interval 4 "${@:2}" && runs_in_fp8 "$recipe" &&
        results fp8 >"$work/in_training" &&
        logged none "$1" "${asks[@]}" --load "$work/said" --skip-train "${@:2}" --fp8-format none &&
        results none >"$work/in_bf16" || return 1
    [ "$(grep -cE '"(task|test|valid loss)":?|^sample at' "$work/in_bf16")" = 4 ] ||
        { why="not all results: $(cat "$work/in_bf16")"; return 1; }
    cmp -s "$work/in_training" "$work/in_bf16" ||
        { why="in bf16: $(diff "$work/in_training" "$work/in_bf16" | head -n 4)"; return 1; }
}
recipe="hybrid, tensorwise"
check "evaluates in bf16: tensorwise" evaluates_in_bf16 1 "${tensorwise[@]}"
check "evaluates in bf16: Llama, tensor and sequence parallel" evaluates_in_bf16 2 "${tensorwise[@]}" \
    "${llama[@]}" --tensor-model-parallel-size 2 --sequence-parallel
check "evaluates in bf16: two stages, full recomputation" evaluates_in_bf16 2 "${tensorwise[@]}" \
    --pipeline-model-parallel-size 2 --recompute-granularity full
recipe="hybrid, delayed"
check "evaluates in bf16: delayed, ZeRO-3" evaluates_in_bf16 2 "${delayed[@]}" \
    --data-parallel-sharding-strategy optim_grads_params
recipe="e4m3, blockwise"
check "evaluates in bf16: blockwise" evaluates_in_bf16 1 "${blockwise[@]}"

# --- bad input -----------------------------------------------------------------------------------
check "a recipe without a format is refused" refused 2 "--fp8-recipe needs --fp8-format" 2 \
    --fp8-recipe tensorwise
check "sizes that FP8 refuses" refused 2 "multiples of 16, but the hidden size is 40" 2 "${tensorwise[@]}" \
    --hidden-size 40 --num-attention-heads 5
check "sizes that block scales refuse" refused 2 "multiples of 128, but the number of tokens" 1 \
    --fp8-format e4m3 --fp8-recipe blockwise
check "bf16 layers with delayed scales are refused" refused 2 "cannot be combined with --fp8-recipe delayed" \
    2 "${delayed[@]}" --first-last-layers-bf16
check "local steps with delayed scales are refused" refused 2 "--local-steps cannot be combined" 2 \
    "${delayed[@]}" --gpus-per-node 1 --local-steps 5
ranks_differ() { # the second rank has other flags
    timeout "$LIMIT" "${launcher[@]}" -np 1 "$trainer" "${model[@]}" "${batch[@]}" --data-path "$data" \
        "${tensorwise[@]}" : -np 1 "$trainer" "${model[@]}" "${batch[@]}" --data-path "$data" \
        >"$work/out" 2>"$work/err" </dev/null
    error_names 2 '--fp8-format is "none" here and "hybrid" on rank 0' $?
}
check "ranks with different precision are refused" ranks_differ
finish
