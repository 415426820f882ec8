#!/usr/bin/env bash
# The base model of LoRA adapters: a checkpoint of adapters records it, a resumed run and a merged
# export refuse another one, copies of it are accepted, and both iterations can be chosen.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
# shellcheck source-path=SCRIPTDIR source=../convert_lib.sh
. test/convert_lib.sh
make_shard text 120 8
data=$work/text_text_document
model=("${model[@]}" --tokenizer-type NullTokenizer --vocab-size 263)
lora=(--lora-rank 8 --train-iters 8 --save-interval 4)

# The base has iterations 2 and 4. The adapters belong to iteration 2, the latest when they started.
trains 1 --train-iters 4 --save-interval 2 --exit-interval 2 --save "$work/base" &&
    trains 2 "${lora[@]}" --pretrained-checkpoint "$work/base" --save "$work/adapters" --exit-interval 4 &&
    cp -r "$work/base" "$work/copy" &&
    trains 1 --train-iters 4 --save-interval 2 --load "$work/base" --save "$work/base" &&
    trains 1 --train-iters 4 --save-interval 2 --exit-interval 2 --seed 77 --save "$work/other" ||
    not_ok "models and adapters" "$why"

warned() { grep -q "^WARNING: .*$1" "$work/out" || { why="no warning '$1'"; return 1; }; }
recorded() {
    grep -qE "^\"base\": \{\"path\": \"$work/base\", \"iteration\": 2, \"xxh3\": \"[0-9a-f]{16}\"\}," \
        "$work/adapters/iter_0000004/manifest.json" || { why="no base in the manifest"; return 1; }
}
check "the manifest records the base model" recorded
resumes() { trains 2 "${lora[@]}" --load "$work/adapters" "$@" && ! grep -q '^WARNING' "$work/out"; }
# 2 layers with 8 (32 + 96 + 32 + 32 + 32 + 128 + 128 + 32) parameters in adapters
counted() {
    trains 2 "${lora[@]}" --pretrained-checkpoint "$work/copy" --skip-train \
        --pipeline-model-parallel-size 2 &&
        grep -q '^LoRA: 8192 trainable parameters in adapters, [0-9]* frozen parameters$' "$work/out" ||
        { why=${why:-no counts}; return 1; }
}
check "the log counts trainable and frozen parameters" counted
check "a copy of the base is accepted" resumes --pretrained-checkpoint "$work/copy"
trained_on="the adapters were trained on iteration 2 of"
check "another iteration of the base" refused 6 "$trained_on $work/base, but iteration 4 of $work/base has" 1 \
    "${lora[@]}" --pretrained-checkpoint "$work/base" --load "$work/adapters"
check "another base" refused 6 "$trained_on $work/base, but iteration 2 of $work/other has other weights" 2 \
    "${lora[@]}" --pretrained-checkpoint "$work/other" --load "$work/adapters"
starts_on_another() {
    trains 1 "${lora[@]}" --pretrained-checkpoint "$work/other" --load "$work/adapters" --finetune &&
        warned "$trained_on $work/base"
}
check "--finetune starts on another base with a warning" starts_on_another

# --ckpt-step selects adapters, --pretrained-checkpoint-step the base.
trains 1 "${lora[@]}" --pretrained-checkpoint "$work/base" --pretrained-checkpoint-step 2 \
    --load "$work/adapters" --save "$work/adapters" || not_ok "more adapters" "$why"
loaded() { # WHAT ITERATION
    grep -q "$1 at iteration $2\$" "$work/out" || { why="iteration $2 of $1 was not loaded"; return 1; }
}
chosen() { # ADAPTERS FLAGS...: the base has iteration 2
    local adapters=$1
    shift
    resumes --pretrained-checkpoint "$work/base" --pretrained-checkpoint-step 2 --skip-train "$@" &&
        loaded "frozen model from $work/base" 2 && loaded "successfully loaded checkpoint from $work/adapters" "$adapters"
}
check "--pretrained-checkpoint-step leaves the adapters" chosen 8
check "--ckpt-step selects the adapters" chosen 4 --ckpt-step 4
check "--ckpt-step leaves the base" refused 6 "for example with --pretrained-checkpoint-step 2" 1 "${lora[@]}" \
    --pretrained-checkpoint "$work/base" --load "$work/adapters" --ckpt-step 4
check "a missing iteration of the base" refused 6 \
    "iteration 3 (existing iterations: 2 and 4); pass --pretrained-checkpoint-step 2 to load" 2 \
    "${lora[@]}" --pretrained-checkpoint "$work/base" --pretrained-checkpoint-step 3
check "a step without a folder" refused 2 "--pretrained-checkpoint-step needs --pretrained-checkpoint" 1 \
    "${lora[@]}" --load "$work/base" --finetune --pretrained-checkpoint-step 2
from_load() {
    trains 1 --lora-rank 8 --load "$work/base" --finetune --ckpt-step 2 --skip-train &&
        loaded "frozen model from $work/base" 2
}
check "--ckpt-step selects a base that --load names" from_load

merges() {
    rm -rf "$work/merged"
    converts --adapters "$work/adapters" --to-hf "$work/merged" "$@"
}
check "a merged export of the base" merges --load "$work/base" --ckpt-step 2
check "a merged export of a copy" merges --load "$work/copy"
check "a merged export of another iteration" no_convert 6 "load the original base, for example with --ckpt-step 2" \
    --load "$work/base" --adapters "$work/adapters" --to-hf "$work/none"
check "a merged export of another base" no_convert 6 "iteration 2 of $work/other has other weights" \
    --load "$work/other" --adapters "$work/adapters" --to-hf "$work/none"
names_base() {
    converts --load "$work/adapters" --to-peft "$work/peft" &&
        grep -qF "The adapters belong to iteration 2 of $work/base." "$work/err" || { why=${why:-no note}; return 1; }
}
check "the PEFT export names the base" names_base

# Removes the record of the base, as in adapters of earlier versions.
cp -r "$work/adapters" "$work/old"
python3 - "$work/old/iter_0000008/manifest.json" <<'END' || not_ok "old adapters" "python3 failed"
import ctypes, re, sys
xxhash = ctypes.CDLL("libxxhash.so.0").XXH3_64bits
xxhash.restype, xxhash.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
with open(sys.argv[1], "rb") as file:
    text = file.read()
text, found = re.subn(rb'^"base": .*\n', b"", text[: text.rindex(b'"xxh3"')], flags=re.M)
assert found == 1
with open(sys.argv[1], "wb") as file:
    file.write(text + b'"xxh3": "%016x"\n}\n' % xxhash(text, len(text)))
END
old_resumes() {
    trains 1 "${lora[@]}" --pretrained-checkpoint "$work/base" --load "$work/old" &&
        warned "the adapters' checkpoint does not record its base model"
}
check "adapters without the record resume with a warning" old_resumes
old_merges() {
    rm -rf "$work/merged"
    converts --load "$work/base" --adapters "$work/old" --to-hf "$work/merged" &&
        grep -q "^WARNING: .*does not record its base model" "$work/err" || { why=${why:-no warning}; return 1; }
}
check "adapters without the record are merged with a warning" old_merges
finish
