#!/usr/bin/env bash
# convert_checkpoint for LoRA runs of a GPT-2 and a Llama: PEFT folders have PEFT's keys and shapes,
# merged exports are the model plus the adapters, and an imported merged model has the run's loss.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
# shellcheck source-path=SCRIPTDIR source=../convert_lib.sh
. test/convert_lib.sh
make_shard text 120 8
data=$work/text_text_document
plain=("${model[@]}" --tokenizer-type NullTokenizer --vocab-size 263)

# trained NAME: trains a model, then adapters for it in two pipeline stages, with large learning
# rates, so that the adapters matter.
trained() {
    local run=(--train-iters 8 --save-interval 8 --lr 3e-2 --lora-rank 8 --lora-alpha 24)
    trains 1 --train-iters 4 --save-interval 4 --save "$work/$1" &&
        trains 2 "${run[@]}" --pretrained-checkpoint "$work/$1" --pipeline-model-parallel-size 2 \
            --save "$work/$1.lora"
}
exported() { # NAME DTYPE ADAPTERS
    converts --load "$work/$1" --to-hf "$work/$1.hf" --dtype bf16 &&
        converts --load "$work/$1.lora" --to-peft "$work/$1.peft.$2" --dtype "$2" &&
        converts --load "$work/$1" --adapters "$work/$1.lora" --to-hf "$work/$1.merged.$2" --dtype "$2" ||
        return 1
    rm -rf "$work/$1.hf.$2"
    mv "$work/$1.hf" "$work/$1.hf.$2"
    python3 dev/ref/check_peft.py "$work/$1.hf.$2" "$work/$1.peft.$2" "$work/$1.merged.$2" \
        >"$work/out" 2>&1 &&
        [ "$(cat "$work/out")" = "$3" ] || { why=$(tail -n 1 "$work/out"); return 1; }
}
same_loss_when_merged() { # NAME: bf16 rounds the merged weights
    local a b c
    evaluated adapted "$work/$1.lora" --lora-rank 8 --lora-alpha 24 --pretrained-checkpoint "$work/$1" &&
        converts --from-hf "$work/$1.merged.fp32" --save "$work/$1.back" --make-vocab-size-divisible-by 8 &&
        evaluated merged "$work/$1.back" --finetune && evaluated plain "$work/$1" --finetune || return 1
    a=$(head -n 1 "$work/adapted.loss") b=$(head -n 1 "$work/merged.loss") c=$(head -n 1 "$work/plain.loss")
    awk -v a="$a" -v b="$b" -v c="$c" \
        'BEGIN { d = a - b; e = a - c; exit !(a > 0 && d * d < 0.02 * 0.02 * e * e && e * e > 1e-5) }' ||
        { why="loss $a with adapters, $b merged, $c without"; return 1; }
}

# If peft is installed, it must load the adapters and compute the merged model's logits and the
# run's loss and gradients. The corpus repeats a sentence of --seq-length bytes, so that all samples
# are equal.
sentence='the quick brown fox is not quick '
sentence=${sentence:0:32}
make_repeated() {
    printf '{"text": "%s"}\n' "$(for _ in {1..400}; do printf '%s' "$sentence"; done)" >"$work/same.jsonl"
    "$BUILD/preprocess_data" --input "$work/same.jsonl" --tokenizer-type Byte --workers 1 \
        --output-prefix "$work/same" >/dev/null 2>"$work/err" ||
        not_ok "preprocess" "$(tail -n 1 "$work/err")"
}
peft() {
    "$PYTHON" dev/ref/check_peft_loads.py "$@" >"$work/out" 2>&1 ||
        { why=$(tail -n 1 "$work/out"); return 1; }
}
same_logits_in_peft() { peft "$work/$1.hf.fp32" "$work/$1.peft.fp32" "$work/$1.merged.fp32"; } # NAME
same_gradients_in_peft() { # NAME: the step after the checkpoint, whose bf16 weights peft loads
    local data=$work/same_text_document tokens
    converts --load "$work/$1.lora" --to-peft "$work/$1.peft.step" --dtype bf16 &&
        logged step 1 --train-iters 9 --lora-rank 8 --lora-alpha 24 --pretrained-checkpoint "$work/$1" \
            --load "$work/$1.lora" --finetune --split 100,0,0 --eval-iters 0 || return 1
    tokens=$(printf '%s%s' "$sentence" "${sentence:0:1}" | od -An -v -tu1 | xargs | tr ' ' ',')
    peft "$work/$1.hf.fp32" "$work/$1.peft.step" --tokens "$tokens" \
        --loss "$(field step loss | head -n 1 | cut -d ' ' -f 2)" \
        --grad-norm "$(field step grad_norm | head -n 1 | cut -d ' ' -f 2)"
}
in_peft() { # NAME TEXT
    if "$PYTHON" -c 'import torch, transformers, peft' 2>/dev/null; then
        check "$2: peft computes the merged model's logits" same_logits_in_peft "$1"
        check "$2: peft computes the run's loss and gradient norm" same_gradients_in_peft "$1"
    else
        skip "$2: peft loads the adapters" "torch, transformers and peft are not installed"
    fi
}
make_repeated
model=("${plain[@]}")
trained gpt || not_ok "a GPT-2 with adapters" "$why"
check "GPT-2: PEFT's format and merge, fp32" exported gpt fp32 8
check "GPT-2: PEFT's format and merge, bf16" exported gpt bf16 8
check "GPT-2: the merged model has the same loss" same_loss_when_merged gpt
in_peft gpt GPT-2
model=("${plain[@]}" --normalization RMSNorm --position-embedding-type rope --swiglu --ffn-hidden-size 64
    --group-query-attention --num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights)
trained llama || not_ok "a Llama with adapters" "$why"
check "Llama: PEFT's format and merge, fp32" exported llama fp32 14
check "Llama: the merged model has the same loss" same_loss_when_merged llama
in_peft llama Llama

check "adapters as a model" no_convert 6 "holds only LoRA adapters" --load "$work/gpt.lora" \
    --to-hf "$work/none"
check "a model as adapters" no_convert 6 "no LoRA adapters" --load "$work/gpt" --to-peft "$work/none"
check "adapters of another model" no_convert 6 "belongs to another model" --load "$work/gpt" \
    --adapters "$work/llama.lora" --to-hf "$work/none"
check "--adapters without --to-hf" no_convert 2 "--adapters needs" --from-hf "$work/gpt.hf.bf16" \
    --save "$work/none" --adapters "$work/gpt.lora"
check "--adapters and --to-peft" no_convert 2 "use one of the two" --load "$work/gpt" \
    --adapters "$work/gpt.lora" --to-peft "$work/none"
generates() {
    timeout 60 "$BUILD/generate_cpu" --load "$work/gpt.lora" --prompt hi >"$work/out" 2>"$work/err" </dev/null
    error_names 6 "holds only LoRA adapters" $?
}
check "generate refuses adapters" generates
finish
