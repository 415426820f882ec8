#!/usr/bin/env bash
# The program generate: text from checkpoints of every layout is identical to the trainer's samples
# (which recompute the whole sequence for each token) and to transformers. Also tests prompts from
# three sources, sampling options, UTF-8 output, the last position, signals, closed pipes and
# invalid input.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 4
data=$work/text_text_document
longer=(--seq-length 64 --max-position-embeddings 64)
llama=(--normalization RMSNorm --position-embedding-type rope --swiglu --ffn-hidden-size 64 \
    --disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention \
    --num-query-groups 2 --qk-layernorm)

# generated FLAGS...: runs generate with the text in $work/text and messages in $work/err.
generated() { timeout -k 5 "$LIMIT" "$BUILD/generate_cpu" "$@" >"$work/text" 2>"$work/err" </dev/null; }
generates() { generated "$@" || say "generate $* ended with exit code $?"; }
no_text() { # CODE TEXT FLAGS...: one error line and no text
    local code=$1 text=$2
    shift 2
    generated "$@"
    error_names "$code" "$text" $? && { [ ! -s "$work/text" ] || { why="text was written"; return 1; }; }
}

# Generates up to the last position, because the trainer's samples shift their context beyond it.
written_by_trainer() { # DIR TEMPERATURE FLAGS...: writes $work/expected
    local folder=$1 temperature=$2
    shift 2
    trains 1 --load "$folder" --skip-train --override-opt_param-scheduler --sample-prompt "the quick" \
        --sample-tokens 50 --sample-temperature "$temperature" --seed 77 "$@" || return 1
    sed '1,/^ *sample at iteration/d' "$work/out" | head -n 1 >"$work/expected"
    [ -s "$work/expected" ] || { why="the trainer wrote no sample"; return 1; }
}
same_text() { # DIR FLAGS...: greedy and sampled
    local folder=$1 temperature
    shift
    for temperature in 0 0.7; do
        written_by_trainer "$folder" $temperature "$@" &&
            generates --load "$folder" --prompt "the quick" --num-tokens 50 --temperature $temperature \
                --seed 77 || return 1
        cmp -s <(head -n 1 "$work/text") "$work/expected" ||
            { why="temperature $temperature: $(head -c 60 "$work/text")"; return 1; }
    done
}
trains 1 "${longer[@]}" --train-iters 40 --save "$work/plain" --save-interval 20 || not_ok "a run" "$why"
check "GPT-2: the trainer's text" same_text "$work/plain" "${longer[@]}"
trains 4 "${longer[@]}" "${llama[@]}" "${paper[@]}" --num-layers 4 --gpus-per-node 2 --train-iters 20 \
    --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 12 --save "$work/llama" \
    --save-interval 20 || not_ok "tensor-parallel run" "$why"
check "Llama, tensor parallel, two nodes: the trainer's text" same_text "$work/llama" "${longer[@]}" \
    --num-layers 4 "${llama[@]}" --make-vocab-size-divisible-by 24
trains 4 "${longer[@]}" --pipeline-model-parallel-size 2 --train-iters 12 --save "$work/staged" --no-save-optim \
    --data-parallel-sharding-strategy optim_grads_params --save-interval 12 || not_ok \
        "pipeline-parallel run" "$why"
check "pipeline, sharded weights, no optimizer state: the trainer's text" same_text "$work/staged" \
    "${longer[@]}" \
    --no-load-optim

steps_differ() {
    generates --load "$work/plain" --ckpt-step 20 --prompt "the quick" || return 1
    grep -q '^iteration 20;' "$work/err" || { why="iteration 20 was not loaded"; return 1; }
    cp "$work/text" "$work/first"
    generates --load "$work/plain" --prompt "the quick" && ! cmp -s "$work/text" "$work/first"
}
check "--ckpt-step" steps_differ
three_prompts() {
    printf 'a lazy dog\n' >"$work/prompt"
    generates --load "$work/plain" --prompt "a lazy dog" --num-tokens 30 --seed 3 || return 1
    cp "$work/text" "$work/first"
    generates --load "$work/plain" --prompt-file "$work/prompt" --num-tokens 30 --seed 3 &&
        cmp -s "$work/text" "$work/first" || { why="${why:-another text from a file}"; return 1; }
    "$BUILD/generate_cpu" --load "$work/plain" --num-tokens 30 --seed 3 <"$work/prompt" 2>"$work/err" |
        cmp -s - "$work/first" || { why="another text from standard input"; return 1; }
    generates --load "$work/plain" --prompt "a lazy dog" --num-tokens 30 --seed 3 --no-echo &&
        [ "a lazy dog$(cat "$work/text")" = "$(cat "$work/first")" ] ||
        { why="the echo is not the prompt"; return 1; }
    generates --load "$work/plain" --prompt "" --num-tokens 5 || return 1
    ! grep -q endoftext "$work/text" || { why="the end of a document is shown"; return 1; }
}
check "a prompt from a flag, a file or standard input, or none" three_prompts
drawn() {
    local flags
    generates --load "$work/plain" --prompt "the" --num-tokens 40 --greedy || return 1
    cp "$work/text" "$work/greedy"
    for flags in "--top-k 1" "--top-p 0.000001" "--temperature 0"; do
        # shellcheck disable=SC2086 # split on purpose
        generates --load "$work/plain" --prompt "the" --num-tokens 40 $flags &&
            cmp -s "$work/text" "$work/greedy" ||
            { why="$flags does not give the likeliest text; $why"; return 1; }
    done
    flags="--prompt the --num-tokens 40 --top-k 20 --top-p 0.9 --num-samples 3"
    # shellcheck disable=SC2086 # split on purpose
    generates --load "$work/plain" $flags --seed 5 && cp "$work/text" "$work/first" || return 1
    [ "$(grep -c '^--- sample [123] ---$' "$work/text")" -eq 3 ] &&
        [ "$(sort -u "$work/text" | wc -l)" -eq 6 ] ||
        { why="not three texts"; return 1; }
    # shellcheck disable=SC2086 # split on purpose
    generates --load "$work/plain" $flags --seed 5 && cmp -s "$work/text" "$work/first" ||
        { why="another text from the same seed"; return 1; }
    # shellcheck disable=SC2086 # split on purpose
    generates --load "$work/plain" $flags --seed 6 && ! cmp -s "$work/text" "$work/first"
}
check "top-k, top-p, temperature, seeds" drawn
documents_end() {
    local flags=(--load "$work/plain" --prompt "" --num-tokens 64 --num-samples 150 --temperature 3)
    generates "${flags[@]}" || return 1
    ! grep -q endoftext "$work/text" || { why="the end of a document is shown"; return 1; }
    generates "${flags[@]}" --ignore-eod &&
        grep -q 'endoftext.' "$work/text" || { why="no text follows a document"; return 1; }
}
check "end of document ends the text" documents_end
whole_characters() { # a byte model with nearly uniform sampling
    generates --load "$work/plain" --prompt $'\xC3\xA4\xE2\x82\xAC' --num-tokens 60 --temperature 50 \
        --num-samples 20 || return 1
    iconv -f UTF-8 -t UTF-8 "$work/text" >/dev/null 2>&1 || { why="the text is not UTF-8"; return 1; }
    grep -q $'\xC3\xA4\xE2\x82\xAC' "$work/text" || { why="the prompt has changed"; return 1; }
}
check "only whole UTF-8 characters are printed" whole_characters
positions_end() {
    generates --load "$work/plain" --prompt "the quick" --num-tokens 500 --ignore-eod --greedy || return 1
    grep -q '^The text ends here: prompt and text use all 64 positions' "$work/err" ||
        { why="no line reports it"; return 1; }
    grep -q ' 56 written ' "$work/err" || { why="$(tail -n 1 "$work/err")"; return 1; }
}
check "the last position ends the text" positions_end
check "a prompt longer than the position range" no_text 2 "the prompt has 65 tokens, but the model has 64 positions" \
    --load "$work/plain" --prompt "$(printf 'x%.0s' {1..65})"

# --- early exits ----------------------------------------------------------------------------------
interrupted() {
    local pid rc
    "$BUILD/generate_cpu" --load "$work/plain" --prompt "the" --num-samples 1000000 >"$work/text" \
        2>"$work/err" </dev/null &
    job=$! pid=$!
    wait_until grep -qs '^--- sample 3' "$work/text" || { say "the third sample was not printed"; return 1; }
    kill -TERM $pid  # background jobs of a shell ignore SIGINT
    wait $pid
    rc=$?
    job=
    [ $rc -eq 75 ] && [ "$(tail -c 1 "$work/text" | wc -l)" -eq 1 ] || { say "exit code $rc"; return 1; }
}
check "a signal ends the program after a complete token" interrupted
reader_leaves() {
    local codes
    "$BUILD/generate_cpu" --load "$work/plain" --prompt "the" --num-samples 1000000 2>"$work/err" </dev/null |
        head -n 3 >"$work/text"
    codes="${PIPESTATUS[*]}"
    [ "$codes" = "0 0" ] && ! grep -q '^error' "$work/err" || { say "exit codes $codes"; return 1; }
}
check "a reader that closes the pipe" reader_leaves
full_disk() {
    [ -w /dev/full ] || return 0
    "$BUILD/generate_cpu" --load "$work/plain" --prompt "the" >/dev/full 2>"$work/err" </dev/null
    error_names 3 "cannot write the text: No space left" $?
}
check "a full disk" full_disk

# --- invalid input --------------------------------------------------------------------------------
check "no --load" no_text 2 "--load is missing" --prompt x
check "an unknown flag" no_text 2 "--num-token" --load "$work/plain" --num-token 3
check "two prompts" no_text 2 "mutually exclusive" --load "$work/plain" --prompt x --prompt-file y
check "a missing prompt file" no_text 5 "$work/none" --load "$work/plain" \
    --prompt-file "$work/none"
check "several greedy samples" no_text 2 "remove --num-samples" --load "$work/plain" --prompt x --greedy \
    --num-samples 2
check "top-p of 0" no_text 2 "--top-p" --load "$work/plain" --prompt x --top-p 0
check "a missing directory" no_text 6 "holds no checkpoint" --load "$work/none" --prompt x
check "a missing checkpoint" no_text 6 "no checkpoint of iteration 13 (existing iterations: " --load "$work/plain" --ckpt-step 13 --prompt x
check "another tokenizer's files" no_text 5 "pass the model's --vocab-file" --load "$work/plain" \
    --prompt x --tokenizer-type GPT2BPETokenizer --vocab-file test/golden/tokenizer/vocab.json \
    --merge-file test/golden/tokenizer/merges.txt
damaged() {
    cp -r "$work/staged" "$work/broken"
    local shard
    shard=$(find "$work/broken" -name 'shard*' | head -n 1)
    printf x | dd of="$shard" bs=1 seek=900 conv=notrunc 2>/dev/null
    no_text 6 "is damaged" --load "$work/broken" --prompt x
}
check "a damaged shard" damaged
several_ranks() {
    "${launcher[@]}" -np 2 "$BUILD/generate_cpu" --load "$work/plain" --prompt x >"$work/text" \
        2>"$work/err" </dev/null
    error_names 2 "start it without mpirun" $?
}
check "mpirun" several_ranks
shows_help() { generates --help && grep -q -- '--top-p' "$work/text"; }
check "--help" shows_help

# --- transformers ---------------------------------------------------------------------------------
# Greedy text of the golden models, generated by transformers 5.23 in fp32 from the exported
# directories (Mistral with its window and Qwen2 with YaRN: by 4.46). The logits of the best two
# tokens always differ by at least 0.23.
golden_text() { # NAME TEXT: text continued from its first two or three ids
    "$BUILD/convert_checkpoint" --from-hf "test/golden/$1" --save "$work/$1" \
        --make-vocab-size-divisible-by 8 >"$work/out" 2>"$work/err" || { say "the import failed"; return 1; }
    generates --load "$work/$1" --prompt "${2%% /*}" --num-tokens 8 --greedy || return 1
    [ "$(cat "$work/text")" = " ${2/\/ /}" ] || { why="$(cat "$work/text")"; return 1; }
}
check "the golden GPT-2's text" golden_text hf "30 2 / 21 21 21 21 21 21 21 21"
check "the golden Qwen3's text" golden_text hf_qwen3 "8 / 42 18 18 18 18 18 18 18"
check "the golden Mistral's text" golden_text hf_mistral "30 17 / 4 19 4 3 3 3 3 3"
check "the golden Qwen2's text" golden_text hf_qwen2 "7 / 37 37 37 37 37 37 37 37"
PYTHON=${PYTHON:-python3}
greedy_by_transformers() { # DIR IDS: prints the ids before the first small logit margin
    "$PYTHON" - "$@" <<'END' 2>/dev/null
import sys, torch, transformers
ids = [int(i) for i in sys.argv[2].split()]
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40, output_scores=True,
                     return_dict_in_generate=True, eos_token_id=10**6, pad_token_id=0)
sure = len(ids)
for s in out.scores:
    best = s[0].topk(2).values
    if best[0] - best[1] < 0.1:
        break
    sure += 1
print(*out.sequences[0, :sure].tolist())
END
}
as_transformers() { # compares up to the first token whose choice bf16 rounding may change
    local expected
    "$BUILD/convert_checkpoint" --load "$work/plain" --to-hf "$work/plain.hf" >"$work/out" 2>"$work/err" ||
        { say "the export failed"; return 1; }
    # In the byte vocabulary an id is the byte's value.
    expected=$(greedy_by_transformers "$work/plain.hf" "116 104 101 32 113 117 105 99 107")
    [ "$(wc -w <<<"$expected")" -gt 12 ] || { why="transformers decides too little: $expected"; return 1; }
    generates --load "$work/plain" --prompt "the quick" --num-tokens 40 --greedy || return 1
    [[ "$(od -An -v -tu1 -w1000 "$work/text" | tr -s ' ') " = " $expected "* ]] ||
        { why="transformers: $expected; generate: $(head -c 60 "$work/text")"; return 1; }
}
if "$PYTHON" -c 'import torch, transformers' 2>/dev/null; then
    check "transformers generates the same text" as_transformers
else
    skip "transformers generates the same text" "torch and transformers are not installed"
fi
finish
