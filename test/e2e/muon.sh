#!/usr/bin/env bash
# --optimizer muon: identical results with every sharding strategy, also with one rank per node,
# every preset trains, runs resume exactly, checkpoints of AdamW load weights only, and --plan
# predicts memory and bytes.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 3
data=$work/text_text_document
muon=(--optimizer muon --muon-extra-scale-factor 0.2 --eval-iters 0)
two_by_two=(--gpus-per-node 2 --verify-replicas-interval 1)

# --- the same results ---
sharded() { # NAME FLAGS...
    logged "$1" 4 "${muon[@]}" "${@:2}" && same_training optim "$1"
}
check "ZeRO-1" logged optim 4 "${muon[@]}"
check "no sharding: identical" sharded none --data-parallel-sharding-strategy no_shard
check "ZeRO-2: identical" sharded grads --data-parallel-sharding-strategy optim_grads
check "ZeRO-3: identical" sharded params --data-parallel-sharding-strategy optim_grads_params
check "ZeRO-3 over nodes: identical" sharded world --data-parallel-sharding-strategy optim_grads_params \
    --shard-params-over world --gpus-per-node 1
check "one rank per node: identical" sharded nodes --gpus-per-node 1
check "lossless weights: identical" sharded lossless @configs/lossless.args
check "repeated: identical" sharded again
pipeline() { # without the norm, whose order of additions differs
    logged one 1 "${muon[@]}" --clip-grad 0 &&
        logged stages 2 "${muon[@]}" --clip-grad 0 --pipeline-model-parallel-size 2 &&
        same_loss one stages 12
}
check "pipeline of two stages: as one rank" pipeline
parts() { # MODE; and resumed
    local flags=("${muon[@]}" --tensor-model-parallel-size 2 --muon-tp-mode "$1" --gpus-per-node 2
        --make-vocab-size-divisible-by 8)
    logged parts 4 "${flags[@]}" --save "$work/parts.$1" --save-interval 6 &&
        logged parts.none 4 "${flags[@]}" --data-parallel-sharding-strategy no_shard &&
        same_training parts parts.none &&
        logged parts.on 4 "${flags[@]}" --load "$work/parts.$1" --ckpt-step 6 &&
        same_training parts parts.on 6
}
check "tensor parallel 2, --muon-tp-mode blockwise" parts blockwise
check "tensor parallel 2, --muon-tp-mode duplicated" parts duplicated
llama() { # SwiGLU, grouped queries, untied head
    local flags=("${muon[@]}" --swiglu --ffn-hidden-size 48 --group-query-attention --num-query-groups 2
        --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
        --untie-embeddings-and-output-weights)
    logged llama 2 "${flags[@]}" &&
        logged llama_none 2 "${flags[@]}" --data-parallel-sharding-strategy no_shard &&
        same_training llama llama_none
}
check "layers of Llama" llama
fp8() { # changes only the linear layers
    local flags=("${muon[@]}" --fp8-format hybrid --fp8-recipe tensorwise)
    logged fp8 4 "${flags[@]}" &&
        logged fp8.none 4 "${flags[@]}" --data-parallel-sharding-strategy no_shard &&
        same_training fp8 fp8.none || return 1
    ! same_training optim fp8 || { why="no effect"; return 1; }
    awk -v a="$(mean_loss optim 10 12)" -v b="$(mean_loss fp8 10 12)" \
        'BEGIN { exit !(b < 1.005 * a && a < 1.005 * b) }' ||
        { why="loss $(mean_loss fp8 10 12), in bf16 $(mean_loss optim 10 12)"; return 1; }
    why=
}
check "FP8" fp8

# --- the updates ---
changes() { # NAME FLAGS...: the flags change the result
    logged "$1" 2 "${muon[@]}" --train-iters 3 "${@:2}" || return 1
    [ "$(field "$1" loss)" != "$(field plain loss)" ] || { why="no effect"; return 1; }
}
check "short run" logged plain 2 "${muon[@]}" --train-iters 3
check "--muon-nesterov" changes nesterov --muon-nesterov
check "--muon-momentum" changes momentum --muon-momentum 0.5
check "--muon-no-split-qkv" changes qkv --muon-no-split-qkv
check "--muon-num-ns-steps" changes steps --muon-num-ns-steps 3
for mode in unit_rms_norm shape_scaling; do
    check "--muon-scale-mode $mode" changes "$mode" --muon-scale-mode "$mode"
done
for type in simple polar_express cans aol deepseekv4 cubic5; do
    check "--muon-coefficient-type $type" changes "$type" --muon-coefficient-type "$type"
done

# --- presets ---
preset() { # NAME FLAGS...: the loss falls, replicas stay equal, and bytes are as planned
    local name=$1
    shift
    logged "$name" 4 "${two_by_two[@]}" "${muon[@]}" --train-iters 24 "$@" &&
        make_plan 4 "${two_by_two[@]}" "${muon[@]}" --train-iters 24 "$@" &&
        sends_as_planned "$name" 1 1 24 || return 1
    awk -v f="$(mean_loss "$name" 1 1)" -v l="$(mean_loss "$name" 22 24)" 'BEGIN { exit !(l < 0.8 * f) }' ||
        { why="loss from $(mean_loss "$name" 1 1) to $(mean_loss "$name" 22 24)"; return 1; }
}
small=(--wq-group-size 128)
check "baseline" preset baseline
check "SDP4Bit" preset sdp4bit "${paper[@]}" "${small[@]}"
check "SDP4Bit, ZeRO-3, checksums" preset sharded "${paper[@]}" "${small[@]}" --verify-wire \
    --data-parallel-sharding-strategy optim_grads_params
check "EDEN" preset eden @configs/eden.args "${small[@]}"
check "EDEN, 2 bits with error feedback" preset eden2-ef @configs/eden2-ef.args "${small[@]}"
local_steps() { # NAME FLAGS...
    local flags=("${two_by_two[@]}" "${muon[@]}" --train-iters 24 @configs/local.args "${small[@]}"
        --local-steps 4 "${@:2}")
    logged "$1" 4 "${flags[@]}" --save "$work/$1" --save-interval 12 &&
        logged "$1.on" 4 "${flags[@]}" --load "$work/$1" --ckpt-step 12 && same_training "$1" "$1.on" 12
}
check "local steps, resumed" local_steps local

# --- checkpoints ---
resumes() { # NAME FLAGS...: 12 iterations are the same as 6 and 6
    local name=$1
    shift
    logged "$name" 4 "${two_by_two[@]}" "${muon[@]}" "$@" --save "$work/$name" --save-interval 6 &&
        logged "$name.on" 4 "${two_by_two[@]}" "${muon[@]}" "$@" --load "$work/$name" --ckpt-step 6 \
            --save "$work/$name.on" --save-interval 6 &&
        same_training "$name" "$name.on" 6 && same_shards "$work/$name" "$work/$name.on" 12
}
check "resume, SDP4Bit" resumes resume "${paper[@]}" "${small[@]}"
check "resume, ZeRO-3 with background saves" resumes resume3 --async-save \
    --data-parallel-sharding-strategy optim_grads_params
other_layout() { # all 12 iterations again, in another layout from iteration 6 on
    logged plan4 4 "${muon[@]}" --save "$work/plan4" --save-interval 6 &&
        logged plan1 4 "${muon[@]}" --load "$work/plan4" --ckpt-step 6 --gpus-per-node 1 \
            --ddp-bucket-size 1 --data-parallel-sharding-strategy no_shard &&
        same_training plan4 plan1 6 &&
        logged plan2 2 "${muon[@]}" --load "$work/plan4" --ckpt-step 6 --pipeline-model-parallel-size 2 &&
        same_loss plan4 plan2 7
}
check "resume in another layout" other_layout
second_moments() { # counts elements by kind
    dev/checkpoint_info "$work/plan4" --slices >"$work/out" 2>&1 || { why=$(tail -1 "$work/out"); return 1; }
    awk '/layers.*(query_key_value|dense|4h_to_h|h_to_4h).weight / { layers[$2] += $5 - $3 }
        /word_embeddings.weight / { words[$2] += $5 - $3 }
        END { exit !(layers["exp_avg"] == 2 * 12 * 32 * 32 && layers["exp_avg_sq"] == 0 &&
                     words["exp_avg_sq"] == words["master"] && words["master"] > 0) }' "$work/out" ||
        { why="unexpected slices"; return 1; }
}
check "matrices have no second moments in checkpoints" second_moments
adam=(--optimizer adam --eval-iters 0)
check "AdamW" logged adam 2 "${adam[@]}" --save "$work/adam" --save-interval 6
check "a checkpoint of AdamW needs --no-load-optim" refused 6 \
    "saved with --optimizer adam, whose state --optimizer muon cannot use; add --no-load-optim" 2 "${muon[@]}" \
    --load "$work/adam"
check "a checkpoint of Muon needs it too" refused 6 "saved with --optimizer muon" 2 "${adam[@]}" \
    --load "$work/plan4"
weights_only() { # OPTIMIZER FOLDER
    trains 2 --optimizer "$1" --eval-iters 0 --load "$2" --no-load-optim --train-iters 14 \
        --lr-decay-iters 12 &&
        grep -q "and is now $1: only the weights are loaded" "$work/out" || { why="${why:-no note}"; return 1; }
}
check "weights of AdamW into Muon" weights_only muon "$work/adam"
check "weights of Muon into AdamW" weights_only adam "$work/plan4"
evaluated() { # FLAGS...: prints the validation loss of a checkpoint of Muon
    trains 2 --load "$work/plan4" --skip-train --split 50,50,0 --eval-iters 2 "$@" &&
        grep -o 'validation loss.*lm loss value: [^ ]*' "$work/out"
}
evaluates() {
    local as_muon as_adam
    as_muon=$(evaluated --optimizer muon) && as_adam=$(evaluated --train-iters 30) && [ -n "$as_muon" ] ||
        { why="no loss"; return 1; }
    [ "$as_muon" = "$as_adam" ] || { why="$as_muon, $as_adam"; return 1; }
}
check "evaluation does not depend on optimizer and schedule" evaluates

# --- offload ---
# The host updates the matrices, the device orthogonalizes: identical results and checkpoints, which
# load into each other. Memory is as planned.
offloaded() { # NAME NP FLAGS...
    local name=$1 how bytes
    logged "$name" "${@:2}" "${muon[@]}" --save "$work/$name" --save-interval 6 || return 1
    for how in "--optimizer-cpu-offload" "--optimizer-disk-offload $work/state"; do
        rm -rf "$work/$name.off"
        # shellcheck disable=SC2086 # split on purpose
        make_plan "${@:2}" "${muon[@]}" $how --save "$work/none" --save-interval 6 &&
            logged off "${@:2}" "${muon[@]}" $how --save "$work/$name.off" --save-interval 6 &&
            allocated_as_planned && same_training "$name" off &&
            same_shards "$work/$name" "$work/$name.off" 12 &&
            logged on "${@:2}" "${muon[@]}" $how --load "$work/$name" --ckpt-step 6 &&
            same_training "$name" on 6 || { why="$how: $why"; return 1; }
        bytes=$(awk '/^  host memory / { host = $3 } /^  disk / { disk = ",\"disk_bytes\":" $2 }
            END { print "\"host_bytes\":" host disk }' "$work/plan")
        grep -q "$bytes," "$work/off.jsonl" || { why="$how: planned $bytes"; return 1; }
    done
}
check "offload, one rank" offloaded one_off 1 --muon-nesterov
# The default --wq-group-size does not divide the sizes of these matrices.
check "offload, one rank, quantized weights" offloaded odd_off 1 --quantized-weights --hidden-size 96 \
    --num-attention-heads 4
check "offload, SDP4Bit, nodes of two" offloaded sdp4bit_off 4 "${two_by_two[@]}" "${paper[@]}" "${small[@]}"
check "offload, ZeRO-3, background saves" offloaded sharded_off 2 --async-save \
    --data-parallel-sharding-strategy optim_grads_params
check "offload, tensor parallel 2, no sharding" offloaded parts_off 4 --tensor-model-parallel-size 2 \
    --muon-tp-mode blockwise --make-vocab-size-divisible-by 8 --data-parallel-sharding-strategy no_shard
check "offload, tensor parallel 2, whole matrices" offloaded whole_off 4 --tensor-model-parallel-size 2 \
    --make-vocab-size-divisible-by 8
# --- momentum in bf16 ---
narrow=(--exp-avg-dtype bf16)
check "momentum in bf16" logged narrow 4 "${muon[@]}" "${narrow[@]}" --save "$work/narrow" --save-interval 6
check "changes the result" eval '! same_training optim narrow; why='
close_to_fp32() {
    awk -v a="$(mean_loss optim 10 12)" -v b="$(mean_loss narrow 10 12)" \
        'BEGIN { exit !(b < 1.005 * a && a < 1.005 * b) }' ||
        { why="loss $(mean_loss narrow 10 12), with fp32 $(mean_loss optim 10 12)"; return 1; }
}
check "trains like fp32" close_to_fp32
narrow_sharded() { # NAME FLAGS...
    logged "$1" 4 "${muon[@]}" "${narrow[@]}" "${@:2}" && same_training narrow "$1"
}
check "bf16, no sharding: identical" narrow_sharded narrow.none --data-parallel-sharding-strategy no_shard
check "bf16, ZeRO-3: identical" narrow_sharded narrow.params \
    --data-parallel-sharding-strategy optim_grads_params
check "resume, bf16" resumes narrow_on "${narrow[@]}" "${paper[@]}" "${small[@]}"
check "resume, bf16, ZeRO-3 with background saves" resumes narrow_on3 "${narrow[@]}" --async-save \
    --data-parallel-sharding-strategy optim_grads_params
check "offload, bf16" offloaded narrow_off 2 "${narrow[@]}" --muon-nesterov
check "offload, bf16, ZeRO-3, background saves" offloaded narrow_off3 2 "${narrow[@]}" --async-save \
    --data-parallel-sharding-strategy optim_grads_params
check "local steps, bf16, resumed" local_steps narrow_local "${narrow[@]}"
other_dtype() { # checkpoints hold fp32, so that either run loads the other's
    logged to_wide 4 "${muon[@]}" --load "$work/narrow" --ckpt-step 6 &&
        logged to_narrow 4 "${muon[@]}" "${narrow[@]}" --load "$work/plan4" --ckpt-step 6
}
check "resume with the other type" other_dtype
# state_bytes: memory of the optimizer state in the plan.
state_bytes() {
    awk '/^    (fp32 master weights|first moments|momentum of matrices in bf16|second moments), own/ {
            n += $NF }
        END { print n }' "$work/plan"
}
saved() { # FLAGS...: memory of the optimizer state, and the saving that --plan prints
    local flags=(--num-layers 4 --micro-batch-size 1 "${muon[@]}" "$@") fp32 bf16 said
    make_plan 4 "${flags[@]}" && fp32=$(state_bytes) && make_plan 4 "${flags[@]}" "${narrow[@]}" &&
        bf16=$(state_bytes) || return 1
    said=$(sed -nE 's/^ *momentum in bf16: ([0-9]+) bytes per rank less.*/\1/p' "$work/plan")
    why="$fp32 bytes, $bf16 in bf16, said $said"
    [ "${said:-0}" -gt 0 ] && [ $((fp32 - bf16)) = "$said" ]
}
check "--plan shows what bf16 saves" saved
check "--plan shows what bf16 saves on the host" saved --optimizer-cpu-offload
# sums: total, optimizer state and host memory of the plan.
sums() {
    awk '$1 == "optimizer" && $4 == "bytes" { state = $3 } $1 == "total" { total = $2 }
        $1 == "host" && $2 == "memory" { host = $3 } END { print total + 0, state + 0, host + 0 }' "$work/plan"
}
# compared FLAGS...: the comparison with AdamW is the difference of the sums of both plans.
compared() {
    local flags=(--num-layers 4 --micro-batch-size 1 "$@") adam diff want=''
    make_plan 4 "${flags[@]}" && adam=$(sums) && make_plan 4 "${flags[@]}" "${muon[@]}" || return 1
    read -ra diff < <(awk -v a="$adam" -v b="$(sums)" 'BEGIN { split(a, x); split(b, y);
        for (i = 1; i <= 3; i++) printf "%+.0f ", y[i] - x[i] }')
    want="total ${diff[0]}"
    [ "${diff[1]}" = +0 ] || want+=", of which optimizer state ${diff[1]}"
    [ "${diff[2]}" = +0 ] || want+=", in host memory ${diff[2]}"
    why="$(grep 'compared with' "$work/plan"), not $want"
    [ "${diff[1]}${diff[2]}" != +0+0 ] && grep -qx "  compared with AdamW, bytes per rank: $want" "$work/plan"
}
check "--plan compares memory with AdamW" compared
check "--plan compares memory with AdamW, offload" compared --optimizer-cpu-offload
check "an update beyond the range on the host ends the run" refused 4 "the update on rank" 2 "${muon[@]}" \
    --lr 3.4e38 --min-lr 0 --lr-decay-style constant --lr-warmup-iters 0 --optimizer-cpu-offload

# --- plans, flags ---
check "memory as planned" memory_as_planned 4 "${two_by_two[@]}" "${muon[@]}" "${paper[@]}" "${small[@]}"
balanced() {
    make_plan 8 "${muon[@]}" --num-layers 8 --micro-batch-size 1 &&
        grep -qE 'Newton-Schulz per step: .* at most ([0-9.e-]+) on a rank \(mean \1\)' "$work/plan" &&
        grep -qE 'TFLOP by data-parallel rank: [0-9.e-]+ on 0 to 7$' "$work/plan" &&
        grep -q 'which takes 0.0 % of padding' "$work/plan" ||
        { why="not balanced: $(grep -A 2 Newton "$work/plan")"; return 1; }
}
check "--plan shows the work of Newton-Schulz" balanced
# 24 layers on 32 ranks: the work of the ranks adds up to all of it, with the stated maximum.
shared_work() {
    "$BUILD/train_gpt_cpu" @configs/gpt_1.3b.args --plan --mock-data --plan-world-size 32 --gpus-per-node 8 \
        --global-batch-size 256 "${muon[@]}" >"$work/plan" 2>"$work/err" || { why="--plan failed"; return 1; }
    why="$(grep -A 1 Newton "$work/plan")"
    sed -n 's/.*TFLOP by data-parallel rank: //p' "$work/plan" | tr ',' '\n' | awk -v said="$why" \
        '{ ranks = $4 == "to" ? $5 - $3 + 1 : 1; n += ranks; sum += $1 * ranks; rows++
           if ($1 > most) most = $1 }
         END { match(said, /at most [0-9.]+/); told = substr(said, RSTART + 8, RLENGTH - 8)
           exit !(n == 32 && rows > 1 && most == told && sum > 61.8 && sum < 61.9) }'
}
check "--plan shows the work of each rank" shared_work
unshared_work() {
    make_plan 4 "${muon[@]}" --data-parallel-sharding-strategy no_shard &&
        grep -qE 'Newton-Schulz per step: ([0-9.e-]+) TFLOP, at most \1 on a rank \(mean \1\)' "$work/plan" ||
        { why="${why:-$(grep Newton "$work/plan")}"; return 1; }
}
check "--plan without sharding: every rank does all the work" unshared_work
# 5 steps of 4 m^2 n + 2 m^3 operations: four m x m matrices and two m x 4m in each layer.
operations() {
    "$BUILD/train_gpt_cpu" @configs/gpt_1.3b.args --plan --mock-data "${muon[@]}" >"$work/plan" 2>"$work/err" ||
        { why="--plan failed"; return 1; }
    local m=2048 layers=24 want
    want=$(awk -v m=$m -v l=$layers 'BEGIN { printf "%.4g", 1e-12 * 5 * l * (4 * 6 + 2 * 18) * m * m * m }')
    grep -q "Newton-Schulz per step: $want TFLOP" "$work/plan" ||
        { why="$(grep Newton "$work/plan"), not $want"; return 1; }
}
check "--plan counts the operations of Newton-Schulz" operations
# step_ms FLAGS...: predicted step time.
step_ms() {
    "$BUILD/train_gpt_cpu" @configs/gpt_1.3b.args --plan --plan-network 1000 "$@" >"$work/plan" 2>"$work/err" ||
        { say "--plan failed"; return 1; }
    awk '$1 == "this" && $2 == "run" && NF > 4 && $3 ~ /^[0-9]/ { print $4; exit }' "$work/plan"
}
# Steps 6 to 10 take the FLOPs of steps 1 to 5 on the busiest rank, at 75 % of the GPU's bf16 peak,
# and 7.8 us for each of its products: 15 for each of 6 matrices in 24 layers, together 61.85 TFLOP.
# With several ranks all layers are in one bucket, because otherwise the iteration overlaps with
# waiting for weights.
predicted() { # WORLD GPU PEAK FLAGS...
    local flags=(--plan-world-size "$1" --gpus-per-node "$(($1 < 8 ? $1 : 8))" --plan-gpu "$2" "${muon[@]}")
    [ "$1" = 1 ] || flags+=(--ddp-bucket-size 2000000000)
    local five ten tflop
    flags+=("${@:4}")
    five=$(step_ms "${flags[@]}") && ten=$(step_ms "${flags[@]}" --muon-num-ns-steps 10) || return 1
    tflop=$(sed -nE 's/.*Newton-Schulz per step: .*at most ([0-9.e+]+) on.*/\1/p' "$work/plan")
    why="5 steps $five ms, 10 steps $ten ms, which are $tflop TFLOP"
    awk -v a="$five" -v b="$ten" -v tflop="$tflop" -v peak="$3" 'BEGIN {
        ms = tflop / 2 * (1e3 / (0.75 * peak) + 15 * 6 * 24 * 0.0078 / 61.85)
        d = b - a - ms; exit !(ms > 1 && d < 0.11 && d > -0.11) }'
}
check "--plan-network counts Newton-Schulz: one GPU" predicted 1 H100 989
check "--plan-network counts Newton-Schulz: 16 GPUs" predicted 16 A100 312
check "--plan-network counts Newton-Schulz: every rank updates all" predicted 16 H100 989 \
    --data-parallel-sharding-strategy no_shard
check "an update beyond the range ends the run" refused 4 "the update on rank" 2 "${muon[@]}" --lr 3.4e38 \
    --min-lr 0 --lr-decay-style constant --lr-warmup-iters 0
check "cubic5 has 5 steps" refused 2 "exactly 5 steps" 1 "${muon[@]}" --muon-coefficient-type cubic5 \
    --muon-num-ns-steps 4
gathered() { # 12 * 64^2 elements of a layer, half on each of two ranks, of 4 bytes; blockwise gathers none
    local flags=("${muon[@]}" --num-layers 4 --hidden-size 64 --num-attention-heads 4
        --tensor-model-parallel-size 2 --data-parallel-sharding-strategy no_shard)
    make_plan 4 "${flags[@]}" && grep -qE "momentum of whole matrices, at most +$((4 * 12 * 64 * 64 / 2 * 4))\$" \
        "$work/plan" || { why="${why:-$(grep momentum "$work/plan")}"; return 1; }
    make_plan 4 "${flags[@]}" --muon-tp-mode blockwise && ! grep -q "momentum of whole" "$work/plan"
}
check "--plan shows the momentum that tensor-parallel ranks gather" gathered
idle() {
    trains 1 --train-iters 3 --eval-iters 0 --muon-momentum 0.8 &&
        grep -q -- '--muon-momentum has no effect without --optimizer muon' "$work/out" "$work/err" ||
        { why="${why:-no note}"; return 1; }
}
check "a flag without effect is reported" idle
finish
