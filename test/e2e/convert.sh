#!/usr/bin/env bash
# convert_checkpoint: exports checkpoints of several layouts to Hugging Face directories and imports
# them again. Tensors are bitwise identical after the round trip, evaluation gives the same loss,
# and training continues. Inputs that cannot be converted cause one error line and leave no output.
# If transformers is installed, from_pretrained loads the directory and computes the golden logits.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
# shellcheck source-path=SCRIPTDIR source=../convert_lib.sh
. test/convert_lib.sh
make_shard text 120 8
data=$work/text_text_document
golden=test/golden/hf
null=(--tokenizer-type NullTokenizer --vocab-size 263) # 264 rows: no padding
two=(--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 4)

# Tensor parallelism splits tensors by rows and by columns. With SDP4Bit on two nodes the model
# weights differ from the rounded master weights.
trains 4 "${paper[@]}" "${null[@]}" --gpus-per-node 2 "${two[@]}" --train-iters 6 --save-interval 6 \
    --save "$work/cut" || not_ok "tensor-parallel run" "$why"
trains 2 --pipeline-model-parallel-size 2 --train-iters 4 --save-interval 2 --save "$work/staged" ||
    not_ok "pipeline-parallel run" "$why"
check "tensor parallel, fp32" round_trip cut fp32
check "tensor parallel, bf16" round_trip cut bf16
check "pipeline, fp32" round_trip staged fp32
check "pipeline, bf16, weights only" round_trip staged bf16 --no-save-optim

# --- the same model ------------------------------------------------------------------------------
same_evaluation() {
    evaluated first "$work/cut" "${null[@]}" &&
        evaluated second "$work/cut.bf16.back" "${null[@]}" --finetune &&
        cmp -s "$work/first.loss" "$work/second.loss" ||
        { why="${why:-$(cat "$work"/*.loss | tr '\n' ' ')}"; return 1; }
}
check "an imported model has the same loss" same_evaluation

continues() { # FLAGS...
    logged on 2 "${null[@]}" --train-iters 3 --load "$work/cut.fp32.back" "$@" &&
        [ "$(train_lines on | wc -l)" -eq 3 ]
}
check "training resumes from iteration 0" continues
check "training starts with --finetune" continues --finetune "${two[@]}"
needs_finetune() {
    train 1 --load "$work/staged.bf16.back" --train-iters 3
    error_names 6 "--finetune" $?
}
check "weights without optimizer state require --finetune" needs_finetune
as_text() { # exports the byte vocabulary in GPT-2's file format
    trains 1 --load "$work/staged.bf16.back" --finetune --train-iters 3 \
        --tokenizer-type GPT2BPETokenizer --vocab-file "$work/staged.bf16/vocab.json" \
        --merge-file "$work/staged.bf16/merges.txt"
}
check "a byte vocabulary works as a tokenizer" as_text
older_step() {
    converts --load "$work/staged" --ckpt-step 2 --to-hf "$work/older" --dtype fp32 &&
        grep -q 'iteration 2,' "$work/err" &&
        ! cmp -s "$work/older/model.safetensors" "$work/staged.fp32/model.safetensors"
}
check "an older checkpoint of the directory" older_step

# Without a tokenizer, text is token ids, and the end of a document need not be the last one.
only_ids() {
    cp -r "$golden" "$work/ids"
    sed -i 's/"eos_token_id": .*,/"eos_token_id": 2,/' "$work/ids/config.json"
    converts --from-hf "$work/ids" --save "$work/ids.run" --no-tokenizer \
        --make-vocab-size-divisible-by 8 || return 1
    timeout -k 5 "$LIMIT" "$BUILD/generate_cpu" --load "$work/ids.run" --prompt "5 49 2" \
        --num-tokens 4 --ignore-eod >"$work/out" 2>"$work/err" || { why=$(head -n 1 "$work/err"); return 1; }
    grep -qE '^ 5 49<.endoftext.>( [0-9]+|<.endoftext.>){4}$' "$work/out" || { why=$(cat "$work/out"); return 1; }
    grep -qx -- '--tokenizer-eod 2' "$work/ids.run/model.args" || { why="no --tokenizer-eod"; return 1; }
    trains 1 "@$work/ids.run/model.args" --mock-data --seq-length 12 --finetune \
        --load "$work/ids.run" --train-iters 4 \
        --save-interval 4 --save "$work/ids.on" &&
        converts --load "$work/ids.on" --to-hf "$work/ids.hf" &&
        grep -q '"eos_token_id": 2,' "$work/ids.hf/config.json" &&
        grep -q '"bos_token_id": null,' "$work/ids.hf/config.json"
}
check "a model without a tokenizer reads and writes ids" only_ids

# Each has one note, and the export has the run's end-of-document id.
invalid_ids() {
    local ids
    for ids in '"x"' '{"a": 1}' -1 2.5 '[[1]]' '[]' '[999999]'; do
        rm -rf "$work"/odd*
        cp -r "$golden" "$work/odd"
        sed -i "s/\"eos_token_id\": .*,/\"eos_token_id\": $ids,/" "$work/odd/config.json"
        converts --from-hf "$work/odd" --save "$work/odd.run" --make-vocab-size-divisible-by 8 &&
            [ "$(grep -c '^config.json: eos_token_id ' "$work/err")" -eq 1 ] &&
            converts --load "$work/odd.run" --to-hf "$work/odd.hf" &&
            [ "$(grep -c 'eos_token_id' "$work/err")" -eq 1 ] &&
            grep -q '"eos_token_id": 49,' "$work/odd.hf/config.json" ||
            { why="$ids: ${why:-$(cat "$work/err")}"; return 1; }
    done
    sed -i 's/"eos_token_id": .*,/"eos_token_id": [49, 50],/' "$work/odd.run/config.json"
    rm -rf "$work/odd.hf"
    converts --load "$work/odd.run" --to-hf "$work/odd.hf" && grep -q '"eos_token_id": \[49,' \
        "$work/odd.hf/config.json" && grep -q '^config.json: eos_token_id ' "$work/err"
}
check "invalid special token ids" invalid_ids

# --- inputs that are refused ---------------------------------------------------------------------
cp -r "$golden" "$work/short"
truncate -s -1 "$work/short/model.safetensors"
cp -r "$work/staged" "$work/broken"
truncate -s -1 "$work"/broken/iter_0000004/mp_rank_00_001/*
out=(--to-hf "$work/none") in=(--save "$work/none")
check "no flags" no_convert 2 "--load with --to-hf"
check "both directions at once" no_convert 2 "--load with --to-hf" --load "$work/cut" --from-hf "$golden"
check "an incomplete direction" no_convert 2 "--to-hf is missing" --load "$work/cut"
check "an unknown flag" no_convert 2 "--to-huggingface" --to-huggingface x
check "output directory exists" no_convert 2 "is not empty" --load "$work/cut" --to-hf "$work/staged"
check "--save directory exists" no_convert 2 "holds checkpoints" --from-hf "$golden" --save "$work/staged"
check "--tokenizer-eod without a tokenizer" no_convert 2 "--tokenizer-eod has no effect" \
    --from-hf "$golden" "${in[@]}" --no-tokenizer --tokenizer-eod 5
check "--tokenizer-eod for a folder without a tokenizer" no_convert 2 "--tokenizer-eod has no effect" \
    --from-hf "$golden" "${in[@]}" --tokenizer-eod 5
check "--tokenizer-eod for a run without a tokenizer" no_convert 2 "--tokenizer-eod has no effect" \
    --load "$work/cut" "${out[@]}" --tokenizer-eod 9
check "--weights of an import" no_convert 2 "--weights" --from-hf "$golden" "${in[@]}" --weights mean
check "only one tokenizer file" no_convert 2 "must be used together" --load "$work/cut" "${out[@]}" \
    --vocab-file x
check "a missing vocabulary" no_convert 5 "$work/x" --load "$work/cut" "${out[@]}" \
    --vocab-file "$work/x" --merge-file "$work/x"
check "another model's vocabulary" no_convert 5 "ids" --load "$work/staged" "${out[@]}" \
    --vocab-file test/golden/tokenizer/vocab.json --merge-file test/golden/tokenizer/merges.txt
check "no checkpoint" no_convert 6 "holds no checkpoint" --load "$work/nothing" "${out[@]}"
check "a damaged checkpoint does not fall back to an older one" no_convert 6 "--ckpt-step 2" \
    --load "$work/broken" "${out[@]}"
check "a truncated weight file" no_convert 6 "is shorter than its tensors" --from-hf "$work/short" \
    "${in[@]}"
check "a native checkpoint given to --from-hf" no_convert 6 "config.json" --from-hf "$work/cut" "${in[@]}"
trainer_says() {
    train 1 --load "$golden" --train-iters 3
    error_names 6 "convert_checkpoint" $?
}
check "the trainer suggests convert_checkpoint" trainer_says
check "an output path that cannot be created" no_convert 6 "/proc/" --load "$work/staged" --to-hf /proc/none
several() {
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np 2 "$BUILD/convert_checkpoint" --load "$work/cut" "${out[@]}" \
        >"$work/out" 2>"$work/err" </dev/null
    error_names 2 "single process" $?
}
check "under mpirun with several processes" several

# --- transformers --------------------------------------------------------------------------------
if has_transformers; then
    from_pretrained() {
        reproduces_golden_logits "$golden" && opened "$work/staged.bf16" --bytes ||
            { why=${why:-$(tail -n 1 "$work/out")}; return 1; }
    }
    check "transformers loads the exported directories" from_pretrained
else
    skip "transformers loads the exported directories" "torch and transformers are not installed"
fi
finish
