#!/usr/bin/env bash
# Monitoring during training: text samples (which must not change training), the short log line,
# warnings, and the tags of TensorBoard events.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 8
data=$work/text_text_document
sampling=(--sample-prompt "the quick " --sample-tokens 15 --sample-interval 4)

# ---- text -----------------------------------------------------------------------------------
# Dropout, several micro-batches, evaluations and saves have state that sampling could disturb.
busy=(--hidden-dropout 0.1 --attention-dropout 0.1 --micro-batch-size 1 --eval-interval 3 --save-interval 5 \
    "${paper[@]}")
samples() {
    logged plain 4 --gpus-per-node 2 "${busy[@]}" --save "$work/save1" && cp "$work/out" "$work/out1" ||
        return 1
    logged sampled 4 --gpus-per-node 2 "${busy[@]}" --save "$work/save2" "${sampling[@]}" \
        --tensorboard-dir "$work/tb" || return 1
    same_training plain sampled || return 1
    [ "$(grep ' validation loss' "$work/out1")" = "$(grep ' validation loss' "$work/out")" ] ||
        { why="other validation losses"; return 1; }
    [ "$(grep -c '^sample at iteration [48]:$' "$work/out")" = 2 ] &&
        [ "$(grep -c '^sample at iteration 12:$' "$work/out")" = 1 ] ||
        { why="not after 4, 8 and at the end"; return 1; }
    [ "$(grep -a -A 1 '^sample at' "$work/out" | grep -ac '^the quick ')" = 3 ] ||
        { why="texts that do not continue the prompt"; return 1; }
}
check "--sample-interval does not change losses, evaluations and their order" samples
weights_equal() {
    local file files
    mapfile -t files < <(find "$work/save1" -name '*.safetensors')
    [ ${#files[@]} -ge 4 ] || { why="no checkpoint"; return 1; }
    for file in "${files[@]}"; do cmp -s "$file" "${file/save1/save2}" ||
        { why="$file differs"; return 1; }; done
}
check "--sample-interval does not change weights and moments" weights_equal
in_json() {
    grep '"kind":"sample"' "$work/sampled.jsonl" | python3 -c '
import json, sys
lines = [json.loads(line) for line in sys.stdin]
assert [line["iteration"] for line in lines] == [4, 8, 12], lines
assert all(line["text"].startswith("the quick ") for line in lines), lines' 2>"$work/err" ||
    { why=$(tail -n 1 "$work/err"); return 1; }
}
check "samples as JSON lines" in_json
recomputing() { logged again 2 --recompute-granularity full "${sampling[@]}" &&
    logged plain2 2 --recompute-granularity full && same_training plain2 again; }
check "samples with full recomputation" recomputing
# lengths PROMPT: checks that a sample has the requested number of tokens after the prompt. Tokens
# are bytes, and an invalid UTF-8 byte is printed as three bytes.
lengths() {
    logged sampled 1 --sample-prompt "$1" --sample-tokens 3 --sample-temperature 0 || return 1
    grep '"kind":"sample"' "$work/sampled.jsonl" | python3 -c '
import json, sys
text = json.loads(sys.stdin.read())["text"]
text = text.removeprefix("<|endoftext|>") if sys.argv[1] == "" else text.removeprefix(sys.argv[1])
assert len(text) == 3, text' "$1" 2>"$work/err" || { why=$(tail -n 1 "$work/err"); return 1; }
}
check "the number of tokens requested, after a prompt" lengths "the quick "
check "the number of tokens requested, after an empty prompt" lengths ""
no_ids() {
    trains 1 --tokenizer-type NullTokenizer --vocab-size 260 --sample-prompt "116 hello 999" \
        --sample-tokens 2 && grep -q 'WARNING: this tokenizer cannot encode 2 parts of --sample-prompt' "$work/out" ||
        { why=${why:-no warning}; return 1; }
}
check "prompt words without tokens" no_ids
check "an interval without a prompt" refused 2 "needs --sample-prompt" 2 --sample-interval 3
check "GPT-2's tokenizer without its vocabulary" refused 2 "--vocab-file" 2 "${sampling[@]}" \
    --tokenizer-type GPT2BPETokenizer

# ---- lines and warnings ---------------------------------------------------------------------
short() {
    logged short 2 --log-line short --log-interval 6 || return 1
    [ "$(grep -cE '^step +(6|12)/12 \| loss [0-9.]+ \| norm [0-9.]+ \| lr [0-9.e-]+ \| [0-9,]+ tokens/s( \| MFU [0-9.]+ %)? \| ETA [0-9]+s$' "$work/out")" = 2 ] || { why="$(grep '^step' "$work/out" | head -n 1)"; return 1; }
    ! grep -q '^ iteration' "$work/out" || { why="Megatron's log line was printed too"; return 1; }
}
check "--log-line short" short
# warns TEXT NP FLAGS...: the output of a run contains TEXT. quiet TEXT NP FLAGS...: it does not.
warns() { trains "${@:2}" && grep -qF -- "$1" "$work/out" || { why="no '$1'"; return 1; }; }
quiet() { trains "${@:2}" && ! grep -qF -- "$1" "$work/out" || { why="'$1' was printed"; return 1; }; }
check "one node: inter-node bits have no effect" warns \
    "WARNING: one node: all gradients use 8 bits" 2 --gpus-per-node 2 --quantized-gradients
check "one rank per node: intra-node bits have no effect" warns \
    "WARNING: one rank per node: all gradients use 4 bits" 2 --gpus-per-node 1 --quantized-gradients
check "one rank per node with local steps: only pseudo-gradients are sent" warns \
    "WARNING: one rank per node: no gradients are sent, only pseudo-gradients in 4 bits" 2 --gpus-per-node 1 \
    --quantized-gradients --local-steps 5
check "one node of two ranks" warns "using 1 node x 2 data-parallel ranks (--gpus-per-node)" 2 --gpus-per-node 2
check "one node of one rank" warns "using 1 node x 1 data-parallel rank (--gpus-per-node)" 1 --gpus-per-node 1
check "one node with tensor parallelism" warns \
    "using 1 node (--gpus-per-node); a data-parallel group has 1 rank on one node" 2 --gpus-per-node 2 \
    --tensor-model-parallel-size 2
check "2 x 2 with both: no warning" quiet "WARNING" 4 --gpus-per-node 2 "${paper[@]}"
check "a new epoch is reported" warns "NOTE: all training data has been seen; epoch 1 begins" 2 \
    --train-iters 80 \
    --log-interval 10 --split 5,90,5
check "no epoch message within an epoch" quiet "has been seen" 2
skipping() {
    trains 2 --lr 3e37 --min-lr 3e37 --lr-warmup-iters 0 --clip-grad 0 --on-nan skip --train-iters 8 ||
        return 1
    [ "$(grep -c '^WARNING: iteration [0-9]* was skipped' "$work/out")" -ge 1 ] ||
        { why="no warning of skipped steps"; return 1; }
    [ "$(grep -c '^WARNING: iteration [0-9]* was skipped' "$work/out")" -le 4 ] ||
        { why="a warning for every step"; return 1; }
}
check "skipped steps" skipping
check "no spikes in a healthy run" quiet "WARNING: .*spike" 2 --train-iters 100 --lr 1e-4 --min-lr 1e-4 \
    --log-interval 50

# ---- TensorBoard ----------------------------------------------------------------------------
# Reads the events of the run above with TensorBoard's package, if it is installed. PYTHON selects
# the interpreter.
python=${PYTHON:-python3}
tags() {
    "$python" - "$work/tb" "$(field sampled loss | sed -n '5s/.* //p')" <<'END' 2>"$work/err" || { \
        why=$(tail -n 1 "$work/err"); return 1; }
import struct, sys
from tensorboard.backend.event_processing import event_accumulator as ea
events = ea.EventAccumulator(sys.argv[1], size_guidance={ea.SCALARS: 0, ea.TENSORS: 0})
events.Reload()
# The tags of Megatron-LM, followed by the additional tags of this program.
names = "learning-rate", "lm loss", "loss-scale", "grad-norm", "lm loss validation"
megatron = {name + more for name in names for more in ("", " vs samples")}
scalars = set(events.Tags()["scalars"])
assert megatron <= scalars, megatron - scalars
assert {"tokens-per-second", "inter-node-bytes-per-step", "intra-node-bytes-per-step"} <= scalars, scalars
loss = events.Scalars("lm loss")
assert [e.step for e in loss] == list(range(1, 13)), [e.step for e in loss]
assert loss[4].value == struct.unpack("f", struct.pack("f", float(sys.argv[2])))[0]
assert [e.step for e in events.Scalars("lm loss vs samples")] == [8 * i for i in range(1, 13)]
assert [e.step for e in events.Tensors("sample/text_summary")] == [4, 8, 12]
assert events.Tensors("sample/text_summary")[0].tensor_proto.string_val[0].startswith(b"the quick ")
END
}
if "$python" -c 'from tensorboard.backend.event_processing import event_accumulator' 2>/dev/null; then
    check "TensorBoard's package reads Megatron's tags and the samples" tags
else
    skip "TensorBoard's package reads Megatron's tags and the samples" "$python has no tensorboard package"
fi
finish
