#!/usr/bin/env bash
# LoRA runs: the start equals the frozen model, all presets, sharding strategies and pipelines train
# the adapters, a resumed run is bit-exact, checkpoints hold only adapters, and wrong combinations
# are refused.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 4
# Other words, so that the adapters have something to learn.
make_text "$work/words.jsonl" 200 9
sed 's/brown/jjjjj/g; s/wizards/kkkk/g; s/gradients/zzzzz/g; s/the/xx/g; s/lazy/vvv/g; s/dog/uu/g
    s/count/qqqq/g; s/jumps/ppp/g' "$work/words.jsonl" >"$work/other.jsonl"
"$BUILD/preprocess_data" --input "$work/other.jsonl" --tokenizer-type Byte --append-eod --workers 1 \
    --output-prefix "$work/other" >/dev/null 2>"$work/err" || not_ok "preprocess" "$(tail -n 1 "$work/err")"
data=$work/text_text_document
base=$work/base
trains 1 --train-iters 40 --lr 1e-2 --save-interval 40 --save "$base" || not_ok "the base model" "$why"
data=$work/other_text_document
lora=(--lora-rank 8 --lora-alpha 32 --lora-dropout 0.1 --pretrained-checkpoint "$base")

# loss_at NAME KIND: prints the first loss of this kind.
loss_at() { field "$1" loss "$2" | head -n 1 | cut -d ' ' -f 2; }
start_equals_base() {
    logged base.eval 1 --load "$base" --finetune --skip-train --eval-iters 4 &&
        logged lora.eval 1 "${lora[@]}" --skip-train --eval-iters 4 &&
        logged from.load 1 --lora-rank 8 --load "$base" --finetune --skip-train --eval-iters 4 || return 1
    local a b c
    a=$(loss_at base.eval valid) b=$(loss_at lora.eval valid) c=$(loss_at from.load valid)
    [ -n "$a" ] && [ "$a" = "$b" ] && [ "$a" = "$c" ] || { why="losses $a, $b, $c"; return 1; }
}
check "the start equals the frozen model" start_equals_base

# learns NAME NP FLAGS...: the validation loss falls, and replicas stay equal.
learns() {
    local name=$1 np=$2
    shift 2
    logged "$name" "$np" "${lora[@]}" --train-iters 16 --lr 5e-3 --verify-replicas-interval 4 \
        --eval-interval 16 --eval-iters 4 --save-interval 8 --save "$work/$name" "$@" || return 1
    ! grep -q '"kind":"repair"' "$work/$name.jsonl" || { why="replicas were repaired"; return 1; }
    awk -v a="$(loss_at lora.eval valid)" -v b="$(loss_at "$name" valid)" \
        'BEGIN { exit !(a > 0 && b > 0 && b < a - 0.04) }' ||
        { why="loss $(loss_at lora.eval valid) to $(loss_at "$name" valid)"; return 1; }
}
two_nodes=(2 --gpus-per-node 1 --emulate-nodes)
four=(4 --gpus-per-node 2 --emulate-nodes)
check "one rank" learns one 1
check "SDP4Bit, four ranks" learns paper "${four[@]}" "${paper[@]}"
check "weights sharded, lossless and EDEN" learns params "${four[@]}" @configs/eden-lossless.args \
    --data-parallel-sharding-strategy optim_grads_params
check "local steps" learns local "${two_nodes[@]}" --local-steps 2
check "nothing sharded" learns no_shard "${two_nodes[@]}" --data-parallel-sharding-strategy no_shard
check "two pipeline stages, optimizer on the CPU" learns pipeline 2 --pipeline-model-parallel-size 2 \
    --optimizer-cpu-offload
check "full recomputation, some matrices" learns some 1 --recompute-granularity full \
    --lora-targets query_key_value,dense_4h_to_h
check "NF4" learns nf4 1 --lora-base-format nf4
check "int8, two pipeline stages" learns int8 2 --lora-base-format int8 --pipeline-model-parallel-size 2
near_bf16() { # quantization changes the first loss a little
    local a b c
    a=$(field one loss | sed -n 's/^1 //p') b=$(field int8 loss | sed -n 's/^1 //p')
    c=$(field nf4 loss | sed -n 's/^1 //p')
    awk -v a="$a" -v b="$b" -v c="$c" 'BEGIN { d = b / a - 1; e = c / a - 1
        exit !(d != 0 && e != 0 && d * d < 1e-5 && e * e < 1e-3) }' ||
        { why="first losses $a in bf16, $b in int8, $c in nf4"; return 1; }
}
check "quantized models start near bf16" near_bf16
fits_24_gb() { # a Llama with 7B parameters
    ranks 1 --plan --plan-world-size 1 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 \
        --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --swiglu \
        --normalization RMSNorm --position-embedding-type rope --disable-bias-linear \
        --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 31999 --bf16 \
        --use-distributed-optimizer --mock-data --lr 1e-4 --train-iters 10 --micro-batch-size 1 \
        --global-batch-size 8 --recompute-granularity full --lora-rank 16 --lora-base-format nf4 ||
        { say "--plan failed"; return 1; }
    awk '$1 == "total" { exit !($2 > 3e9 && $2 < 24e9) }' "$work/out" || { why=$(grep total "$work/out"); return 1; }
}
check "7B with NF4 fits into 24 GB" fits_24_gb
same_loss_as_one() { same_loss one no_shard 1; }
check "one and two ranks start with the same loss" same_loss_as_one
pipeline_matches() { same_loss one pipeline 1; }
check "the pipeline starts with the same loss" pipeline_matches

resumed() {
    local run=("${four[@]}" "${paper[@]}" "${lora[@]}" --train-iters 16 --lr 5e-3 --verify-replicas-interval 4
        --eval-interval 16 --eval-iters 4 --save-interval 8 --save "$work/again")
    logged again "${run[@]}" --exit-interval 8 && logged rest "${run[@]}" --load "$work/again" &&
        same_training paper rest 8 && same_shards "$work/paper" "$work/again" 16 4
}
check "resumed bit-exactly" resumed
only_adapters() {
    local manifest=$work/paper/iter_0000016/manifest.json
    grep -q 'encoder.layers.1.mlp.dense_4h_to_h.lora_B.weight' "$manifest" &&
        ! grep -q 'word_embeddings' "$manifest" || { why="tensors of the manifest"; return 1; }
}
check "a checkpoint holds only adapters" only_adapters
from_adapters() { # a run that starts from adapters of another one, and on other ranks
    logged tuned 1 "${lora[@]}" --load "$work/one" --finetune --skip-train --eval-iters 4 &&
        logged tuned2 2 "${lora[@]}" --load "$work/one" --finetune --skip-train --eval-iters 4 || return 1
    local a b c
    a=$(loss_at tuned valid) b=$(loss_at tuned2 valid) c=$(loss_at lora.eval valid)
    awk -v a="$a" -v b="$b" -v c="$c" 'BEGIN { exit !(a > 0 && a < c && a - b < 1e-5 && b - a < 1e-5) }' ||
        { why="losses $a, $b, base $c"; return 1; }
}
check "adapters load into another layout" from_adapters
planned_memory() {
    memory_as_planned "${two_nodes[@]}" "${lora[@]}" && grep -q 'frozen weights' "$work/plan" ||
        { why=${why:-no frozen weights in the plan}; return 1; }
}
check "--plan predicts the memory" planned_memory
planned_gathers() { # one bucket for each layer; the first is not sharded
    make_plan 4 --gpus-per-node 2 "${lora[@]}" --ddp-bucket-size 1 \
        --data-parallel-sharding-strategy optim_grads_params &&
        logged gathers "${four[@]}" "${lora[@]}" --ddp-bucket-size 1 --train-iters 4 \
            --data-parallel-sharding-strategy optim_grads_params && sends_as_planned gathers 1 2 4
}
check "--plan predicts the bytes of sharded weights" planned_gathers
other_names() {
    logged named 1 "${lora[@]}" --load "$work/one" --train-iters 16 --lr 5e-3 --skip-train --eval-iters 4 \
        --lora-targets dense,query_key_value,dense_4h_to_h,dense_h_to_4h
}
check "other names of the same matrices" other_names

check "--save into the folder of the frozen model" refused 2 "is the folder of the frozen model" 1 \
    "${lora[@]}" --save "$base" --save-interval 8
check "no base" refused 2 "--pretrained-checkpoint FOLDER" 1 --lora-rank 8
check "tensor parallelism" refused 2 "--tensor-model-parallel-size must be 1" 2 "${lora[@]}" \
    --tensor-model-parallel-size 2
check "Muon" refused 2 "--optimizer muon" 1 "${lora[@]}" --optimizer muon
check "FP8" refused 2 "--fp8-format is not supported" 1 "${lora[@]}" --fp8-format hybrid
check "a rank beyond the width" refused 2 "so it is not low-rank; use 8 to 32" 1 "${lora[@]}" \
    --lora-rank 40
check "an unknown matrix" refused 2 "unknown name 'lm_head'" 1 "${lora[@]}" --lora-targets lm_head
check "a part of a fused matrix" refused 2 "lacks k_proj" 1 "${lora[@]}" --lora-targets q_proj,v_proj
check "a base without LoRA" refused 2 "--pretrained-checkpoint needs --lora-rank" 1 \
    --pretrained-checkpoint "$base"
check "adapters as a base" refused 6 "holds only LoRA adapters" 1 --lora-rank 8 \
    --pretrained-checkpoint "$work/one"
check "a model as adapters" refused 6 "holds a whole model" 1 "${lora[@]}" --load "$base"
check "adapters as a model" refused 6 "holds only LoRA adapters of rank 8" 1 --load "$work/one"
check "adapters of another rank" refused 6 "lora_rank 8, but this run has 16" 1 "${lora[@]}" --lora-rank 16 \
    --load "$work/one"
check "an empty base" refused 6 "holds no checkpoint" 1 --lora-rank 8 --pretrained-checkpoint "$work/none"
finish
