#!/usr/bin/env bash
# convert_checkpoint: from checkpoints of several layouts to Hugging Face folders and back. The same
# bytes come out again, evaluation gives the same loss, training goes on. What cannot be converted
# ends with one line and leaves nothing. With Python's transformers: from_pretrained takes the
# folder and computes the golden logits.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
# shellcheck source-path=SCRIPTDIR source=../convert_lib.sh
. test/convert_lib.sh
make_shard text 120 8
data=$work/text_text_document
golden=test/golden/hf
null=(--tokenizer-type NullTokenizer --vocab-size 263) # 264 rows: no padding
two=(--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 4)

# Every rank's columns and rows, of two nodes and SDP4Bit: replicas are not the rounded master
# weights.
trains 4 "${paper[@]}" "${null[@]}" --gpus-per-node 2 "${two[@]}" --train-iters 6 --save-interval 6 \
    --save "$work/cut" || not_ok "a run in parts" "$why"
trains 2 --pipeline-model-parallel-size 2 --train-iters 4 --save-interval 2 --save "$work/staged" ||
    not_ok "a run in stages" "$why"
check "tensor parallel, fp32" comes_back cut fp32
check "tensor parallel, bf16" comes_back cut bf16
check "pipeline, fp32" comes_back staged fp32
check "pipeline, bf16, weights alone" comes_back staged bf16 --no-save-optim

# --- the same model ------------------------------------------------------------------------------
same_evaluation() {
    evaluated first "$work/cut" "${null[@]}" &&
        evaluated second "$work/cut.bf16.back" "${null[@]}" --finetune &&
        cmp -s "$work/first.loss" "$work/second.loss" ||
        { why="${why:-$(cat "$work"/*.loss | tr '\n' ' ')}"; return 1; }
}
check "an imported model has the same loss" same_evaluation

goes_on() { # FLAGS...
    logged on 2 "${null[@]}" --train-iters 3 --load "$work/cut.fp32.back" "$@" &&
        [ "$(train_lines on | wc -l)" -eq 3 ]
}
check "training goes on from iteration 0" goes_on
check "training goes on with --finetune" goes_on --finetune "${two[@]}"
masters_needed() {
    train 1 --load "$work/staged.bf16.back" --train-iters 3
    error_names 6 "--finetune" $?
}
check "weights alone want --finetune" masters_needed
as_text() { # the vocabulary of bytes serves as GPT-2's
    trains 1 --load "$work/staged.bf16.back" --finetune --train-iters 3 \
        --tokenizer-type GPT2BPETokenizer --vocab-file "$work/staged.bf16/vocab.json" \
        --merge-file "$work/staged.bf16/merges.txt"
}
check "the vocabulary of bytes is a tokenizer" as_text
older_step() {
    converts --load "$work/staged" --ckpt-step 2 --to-hf "$work/older" --dtype fp32 &&
        grep -q 'iteration 2,' "$work/err" &&
        ! cmp -s "$work/older/model.safetensors" "$work/staged.fp32/model.safetensors"
}
check "an older checkpoint" older_step

# --- what cannot be converted --------------------------------------------------------------------
cp -r "$golden" "$work/short"
truncate -s -1 "$work/short/model.safetensors"
cp -r "$work/staged" "$work/broken"
truncate -s -1 "$work"/broken/iter_0000004/mp_rank_00_001/*
out=(--to-hf "$work/none") in=(--save "$work/none")
check "no flags" no_convert 2 "--load and --to-hf"
check "both ways at once" no_convert 2 "--load and --to-hf" --load "$work/cut" --from-hf "$golden"
check "half a way" no_convert 2 "--to-hf is missing" --load "$work/cut"
check "an unknown flag" no_convert 2 "--to-huggingface" --to-huggingface x
check "a folder that is taken" no_convert 2 "is not empty" --load "$work/cut" --to-hf "$work/staged"
check "a --save that is taken" no_convert 2 "holds checkpoints" --from-hf "$golden" --save "$work/staged"
check "one tokenizer file" no_convert 2 "belong together" --load "$work/cut" "${out[@]}" --vocab-file x
check "a vocabulary that is not there" no_convert 5 "$work/x" --load "$work/cut" "${out[@]}" \
    --vocab-file "$work/x" --merge-file "$work/x"
check "another model's vocabulary" no_convert 5 "ids" --load "$work/staged" "${out[@]}" \
    --vocab-file test/golden/tokenizer/vocab.json --merge-file test/golden/tokenizer/merges.txt
check "no checkpoint" no_convert 6 "holds no checkpoint" --load "$work/nothing" "${out[@]}"
check "a damaged checkpoint is not replaced by an older one" no_convert 6 "--ckpt-step 2" \
    --load "$work/broken" "${out[@]}"
check "a folder of weights cut short" no_convert 6 "ends before its tensors" --from-hf "$work/short" \
    "${in[@]}"
check "a checkpoint of ours is no model of theirs" no_convert 6 "config.json" --from-hf "$work/cut" "${in[@]}"
trainer_says() {
    train 1 --load "$golden" --train-iters 3
    error_names 6 "convert_checkpoint" $?
}
check "the trainer names the tool" trainer_says
check "a place where no folder can be" no_convert 6 "/proc/" --load "$work/staged" --to-hf /proc/none
several() {
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np 2 "$BUILD/convert_checkpoint" --load "$work/cut" "${out[@]}" \
        >"$work/out" 2>"$work/err" </dev/null
    error_names 2 "one process" $?
}
check "under mpirun with several processes" several

# --- transformers --------------------------------------------------------------------------------
if has_transformers; then
    from_pretrained() {
        comes_from_hf "$golden" && opened "$work/staged.bf16" --bytes ||
            { why=${why:-$(tail -n 1 "$work/out")}; return 1; }
    }
    check "transformers takes the folders" from_pretrained
else
    skip "transformers takes the folders" "torch and transformers are not installed"
fi
finish
