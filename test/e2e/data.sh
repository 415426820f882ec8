#!/usr/bin/env bash
# Data handling as users see it: inspecting samples, checking shards, masks and positions at
# document ends, blends, epochs, validation and test, and early exits.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 600 9
make_shard other 300 10
make_shard tiny 12 11
data=$work/text_text_document

# --- --inspect-data, --check-data ---
# tokens SEQUENCE FROM TO: prints token ids that od reads from .idx and .bin. An .idx file has a
# 34-byte header, then all lengths (4 bytes each), then all offsets (8 bytes each).
tokens() {
    local sequences offset
    sequences=$(od -An -t d8 -j 18 -N 8 "$data.idx" | tr -d ' ')
    offset=$(od -An -t d8 -j $((34 + 4 * sequences + 8 * $1)) -N 8 "$data.idx" | tr -d ' ')
    od -An -v -t u2 -w2 -j $((offset + 2 * $2)) -N $((2 * ($3 - $2 + 1))) "$data.bin" | tr -d ' '
}
inspects() { # SAMPLE
    ranks "$2" "${model[@]}" "${batch[@]}" --data-path "$data" --inspect-data "$1" ||
        { say "failed"; return 1; }
    sed -n 's/^    tokens [0-9.]*: sequence \([0-9]*\) .* from \([0-9]*\) to \([0-9]*\)$/\1 \2 \3/p' \
        "$work/out" >"$work/slices"
    while read -r sequence from to; do tokens "$sequence" "$from" "$to"; done <"$work/slices" |
        tr '\n' ' ' >"$work/want"
    sed -n 's/^  ids: \(.*\)$/\1 /p' "$work/out" | tr -d '\n' >"$work/got"
    [ "$(wc -w <"$work/got")" -eq 33 ] && cmp -s "$work/want" "$work/got" ||
        { why="ids $(cat "$work/got"), in the shard $(cat "$work/want")"; return 1; }
    grep -q '^  epoch: ' "$work/out" || { why="the epoch is not printed"; return 1; }
}
for sample in 0 3 17 101; do check "--inspect-data $sample" inspects $sample 1; done
check "--inspect-data on 4 ranks" inspects 5 4
check "--inspect-data of a sample out of range" refused 2 "--inspect-data 99999999" 4 \
    --inspect-data 99999999
checks_data() {
    ranks 4 "${model[@]}" "${batch[@]}" --data-path 1 "$data" 2 "$work/other_text_document" --check-data ||
        { say "failed"; return 1; }
    [ "$(grep -c ' tokens of 2 bytes, .* largest id 256 of 257: OK$' "$work/out")" -eq 2 ] ||
        { why="not two good shards"; return 1; }
    ! grep -q '^ iteration' "$work/out" || { why="it trained"; return 1; }
}
check "--check-data" checks_data

checks_alone() { # data flags are sufficient
    ranks 2 --check-data --tokenizer-type Byte --data-path "$data" || { say "failed"; return 1; }
    grep -q 'text_text_document: 600 sequences, .*: OK$' "$work/out" || { why="no report"; return 1; }
    ranks 1 --check-data --data-path "$data"
    error_names 2 "--vocab-file" $?
}
check "--check-data with data flags only" checks_alone
inspects_without_lr() {
    local own=("${batch[@]}") i
    for i in "${!own[@]}"; do [[ "${own[i]:-}" = --lr || "${own[i]:-}" = --min-lr ]] &&
        unset "own[i]" "own[i + 1]"; done
    ranks 1 "${model[@]}" "${own[@]}" --data-path "$data" --inspect-data 0 || say "failed"
}
check "--inspect-data without --lr" inspects_without_lr

# --- a shard of byte tokens, read with a different vocabulary in which all its ids are valid ---
bpe=(--tokenizer-type GPT2BPETokenizer --vocab-file test/golden/tokenizer/vocab.json \
    --merge-file test/golden/tokenizer/merges.txt)
check "byte tokens, BPE vocabulary" refused 5 "its documents end with id 256, which occurs nowhere else" 2 \
    "${bpe[@]}"
check "--check-data of byte tokens with a BPE vocabulary" refused 5 "its documents end with id 256" 2 \
    "${bpe[@]}" \
    --check-data
numbers() {
    trains 2 --tokenizer-type NullTokenizer --vocab-size 300 || return 1
    local warning='^ > WARNING: every sampled sequence of .*text_text_document ends with id 256 instead of 300'
    [ "$(grep -c "$warning" "$work/out")" -eq 1 ] || why="not one warning"
    [ -z "$why" ]
}
check "byte tokens with NullTokenizer: a warning" numbers
# --- a Hugging Face tokenizer.json with 561 ids ---
json=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model test/golden/tokenizer_json/llama3)
check "byte tokens with a tokenizer.json" refused 5 "its documents end with id 256" 2 "${json[@]}"
check "--tokenizer-model is required" refused 2 "needs --tokenizer-model" 1 \
    --tokenizer-type HuggingFaceTokenizer
check "a missing tokenizer.json" refused 5 "cannot open no-such/tokenizer.json" 1 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model no-such/tokenizer.json
trains_with_json() {
    local data=$work/json_text_document
    "$BUILD/preprocess_data" --input "$work/text.jsonl" "${json[@]}" --append-eod --workers 1 \
        --output-prefix "$work/json" 2>"$work/err" || { say "preprocessing failed"; return 1; }
    trains 2 "${json[@]}" --check-data || return 1
    # Ids 556 and 557 are whole words; the three after them are added tokens.
    grep -q 'largest id 559 of 561: OK$' "$work/out" || { why="the largest id was not checked"; return 1; }
    trains 2 "${json[@]}" --save "$work/json_run" --save-interval 12 \
        --sample-prompt "Hello<|eot_id|>" --sample-tokens 8 || return 1
    grep -qaF '<|begin_of_text|>Hello<|eot_id|>' "$work/out" || { why="no sample"; return 1; }
    grep -q '^  padded_vocab_size \.* 568$' "$work/out" || { why="561 ids are not padded to 568"; return 1; }
    grep -q '"tokenizer_model": *"test/golden/tokenizer_json/llama3"' \
        "$work/json_run/iter_0000012/manifest.json" || { why="not in the checkpoint"; return 1; }
    # If the end-of-document token differs from the shard's, the tokenizer is probably wrong.
    train 2 "${json[@]}" --tokenizer-eod "<|eot_id|>"
    error_names 5 "instead of 560" $?
}
check "a run with a tokenizer.json" trains_with_json
own_end() { trains 2 && ! grep -q 'WARNING: every sampled sequence' "$work/out" ||
    { why=${why:-a warning}; return 1; }; }
check "byte tokens with the byte tokenizer: no warning" own_end

# --- document ends ---
masks_matter() {
    local flags=("" "--eod-mask-loss" "--reset-position-ids" "--reset-attention-mask" \
        "--eod-mask-loss --reset-position-ids --reset-attention-mask") i j
    for i in 0 1 2 3 4; do
        # shellcheck disable=SC2086 # split on purpose
        logged "mask$i" 4 --gpus-per-node 2 --hidden-dropout 0 ${flags[i]} || return 1
    done
    for ((i = 0; i < 5; i++)); do
        for ((j = i + 1; j < 5; j++)); do
            [ "$(mean_loss "mask$i" 1 1)" != "$(mean_loss "mask$j" 1 1)" ] ||
                { why="'${flags[i]}' and '${flags[j]}' begin with the same loss"; return 1; }
        done
        awk -v a="$(mean_loss "mask$i" 10 12)" -v b="$(mean_loss mask0 10 12)" \
            'BEGIN { d = a / b; exit !(d > 0.8 && d < 1.2) }' ||
            { why="'${flags[i]}' ends with loss $(mean_loss "mask$i" 10 12)"; return 1; }
    done
}
check "--eod-mask-loss, --reset-position-ids, --reset-attention-mask each change the loss" masks_matter
masks_on_ranks() {
    local all=(--eod-mask-loss --reset-position-ids --reset-attention-mask)
    logged masked1 1 "${all[@]}" && logged masked4 4 "${all[@]}" --gpus-per-node 2 || return 1
    { field masked1 loss | head -n 2; field masked4 loss | head -n 2; } |
        awk '{ v[NR] = $2 } END { for (i = 1; i <= 2; i++) { d = v[i] / v[i + 2] - 1; if (d > 1e-5 || d < -1e-5) exit 1 } }' ||
        why="losses of 1 and 4 ranks differ: $(field masked4 loss | head -n 2 | tr '\n' ' ')"
    [ -z "$why" ]
}
check "masked losses do not depend on the number of ranks" masks_on_ranks

# Half of the documents consist of end-of-document tokens and one letter, so the number of unmasked
# tokens differs much between micro-batches.
eot=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model test/golden/tokenizer_json/llama3
    --tokenizer-eod "<|eot_id|>")
make_masked() { # NAME EVEN ODD [TOKEN]: texts of even and odd documents; 31 x TOKEN precedes odd ones
    awk -v even="$2" -v odd="$3" -v token="${4:-<|eot_id|>}" 'BEGIN {
        for (i = 0; i < 30; i++) {
            print "{\"text\": \"" even "\"}"
            text = ""
            for (j = 0; j < 31; j++) text = text token
            print "{\"text\": \"" text odd "\"}"
        } }' >"$work/$1.jsonl"
    "$BUILD/preprocess_data" --input "$work/$1.jsonl" "${eot[@]}" --workers 1 --output-prefix "$work/$1" \
        >/dev/null 2>"$work/err" || say "preprocessing failed"
}
# masked_run MICRO_BATCH RANKS FLAGS...: prints "iteration loss iteration gradient_norm" of the last
# iteration, and the validation loss.
masked_run() {
    logged masked "$2" "${eot[@]}" --data-path "$masked" --eod-mask-loss --micro-batch-size "$1" \
        --make-vocab-size-divisible-by 16 --lr-warmup-iters 0 --train-iters 3 --lr-decay-iters 3 \
        --split 50,50,0 --full-validation "${@:3}" ||
        return 1
    echo "$(field masked loss | tail -n 1) $(field masked grad_norm | tail -n 1)" \
        "$(sed -n 's/.*validation loss at.*lm loss value: \([^ ]*\).*/\1/p' "$work/out")"
}
# about_equal LINE LINE COLUMN...: compares columns to 1e-3.
about_equal() {
    awk -v a="$1" -v b="$2" -v columns="${*:3}" 'BEGIN {
        n = split(columns, c, " "); split(a, x, " "); split(b, y, " ")
        for (i = 1; i <= n; i++) { d = x[c[i]] / y[c[i]] - 1; if (!(d < 1e-3 && d > -1e-3)) exit 1 } }'
}
same_masked_losses() { # COLUMNS FLAGS...: compares several layouts with a single micro-batch on one rank
    local one other layout columns=$1
    shift
    one=$(masked_run 8 1 "$@") || { say "the run with one micro-batch failed"; return 1; }
    for layout in "1 1" "2 1" "4 2" "1 2 --pipeline-model-parallel-size 2" \
        "2 2 --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 8"; do
        # shellcheck disable=SC2086 # split on purpose
        other=$(masked_run $layout "$@") || { say "the run with $layout failed"; return 1; }
        # shellcheck disable=SC2086
        about_equal "$one" "$other" $columns || { why="$layout: $other instead of $one"; return 1; }
    done
}
make_masked masked "qwertyuiopasdfghjklzxcvbnm" "x"
masked=$work/masked_text_document
check "losses of a step are means over unmasked tokens, for any micro-batch size and layout" \
    same_masked_losses 2 --train-iters 1
check "--calculate-per-token-loss: gradients and validation loss are means over unmasked tokens" \
    same_masked_losses "2 4 5" --calculate-per-token-loss
averages_micro_batches() { # the first step has the same loss but other gradients
    local one two
    one=$(masked_run 8 1 --train-iters 1) && two=$(masked_run 1 1 --train-iters 1) ||
        { say "failed"; return 1; }
    ! about_equal "$one" "$two" 4 || why="gradient norms are equal: $one, $two"
    [ -z "$why" ]
}
check "without --calculate-per-token-loss, gradients are averaged per micro-batch, as in Megatron-LM" averages_micro_batches
all_masked() {
    local eot=("${eot[@]}" --tokenizer-eod "<|begin_of_text|>") masked=$work/blank_text_document flags
    make_masked blank "<|begin_of_text|>" "" "<|begin_of_text|>" || return 1
    for flags in "" "--calculate-per-token-loss"; do
        # shellcheck disable=SC2086
        masked_run 1 1 $flags >/dev/null || { say "failed"; return 1; }
        [ "$(grep -c ' iteration .* grad norm: 0.000 .* nan iterations:   0 ' "$work/out")" -eq 3 ] ||
            { why="$flags: $(grep -m 1 ' iteration ' "$work/out")"; return 1; }
    done
}
check "a step whose tokens are all masked prints a line and changes nothing" all_masked

# --- blends ---
blend() {
    logged blend 2 --data-path 3 "$data" 1 "$work/other_text_document" --train-iters 100 \
        --lr-decay-iters 100 --log-interval 50 || return 1
    ranks 1 "${model[@]}" "${batch[@]}" --train-iters 100 --data-path 3 "$data" 1 \
        "$work/other_text_document" --inspect-data 0 || { say "--inspect-data failed"; return 1; }
    local parts
    parts=$(sed -n 's/.*_text_document: \([0-9]*\) samples, .* tokens, .* epochs of .*/\1/p' "$work/out" |
        tr '\n' ' ')
    [ "$parts" = "600 200 " ] || { why="800 samples at 3 to 1 are taken as $parts"; return 1; }
}
check "a blend of 3 to 1" blend
apart() {
    local own=("${batch[@]}") i
    for i in "${!own[@]}"; do [ "${own[i]:-}" = --split ] && unset "own[i]" "own[i + 1]"; done
    rm -f "$work/apart.jsonl"
    ranks 2 "${model[@]}" "${own[@]}" --train-data-path "$data" \
        --valid-data-path "$work/other_text_document" --test-data-path 1 "$data" 1 \
        "$work/other_text_document" --log-jsonl "$work/apart.jsonl" || { say "failed"; return 1; }
    [ "$(field apart loss valid | wc -l)" -eq 2 ] || { why="no validation and test"; return 1; }
}
check "--train-data-path, --valid-data-path, --test-data-path" apart
order() { # FLAGS...: the first tokens of training samples 0 to 2
    local k
    for k in 0 1 2; do
        ranks 1 "${model[@]}" "${batch[@]}" --split 90,5,5 "$@" --inspect-data $k ||
            { say "failed"; return 1; }
        sed -n 's/^  ids: //p' "$work/out"
    done
}
from_files() { # a list in a file and on the command line give the same order
    printf '3 %s\n1 %s\n' "$data" "$work/other_text_document" >"$work/list"
    order --data-path 3 "$data" 1 "$work/other_text_document" >"$work/want" &&
        order --data-args-path "$work/list" >"$work/got" || return 1
    [ -s "$work/want" ] && cmp -s "$work/want" "$work/got" || { why="the order differs"; return 1; }
    printf '{"train": ["%s"], "valid": [1, "%s"], "test": null}\n' "$data" "$work/other_text_document" \
        >"$work/splits"
    local own=("${batch[@]}") i
    for i in "${!own[@]}"; do [ "${own[i]:-}" = --split ] && unset "own[i]" "own[i + 1]"; done
    ranks 2 "${model[@]}" "${own[@]}" --per-split-data-args-path "$work/splits" || { say "failed"; return 1; }
    grep -q '^ > test: no data$' "$work/out" &&
        grep -q '^ validation loss at iteration 12 on validation set' "$work/out" ||
        { why="not the file's splits"; return 1; }
}
check "--data-args-path, --per-split-data-args-path" from_files
check "a list without weights is read once" refused 5 "a list of prefixes without weights is read once" 2 \
    --data-path "$data" "$work/other_text_document" --train-iters 100000
list() { trains 2 --data-path "$data" "$work/other_text_document"; }
check "a list without weights" list
surplus() {
    trains 2 --data-path 3 "$data" 1 "$work/other_text_document" --mid-level-dataset-surplus 0.005 &&
        grep -q '^  mid_level_dataset_surplus \.* 0\.005$' "$work/out"
}
check "--mid-level-dataset-surplus" surplus
epochs() { # the shard has about 45 samples; the run reads 160
    logged epochs 2 --data-path "$work/tiny_text_document" --train-iters 20 --split 100,0,0 || return 1
    awk -v e="$(field epochs epoch interval | tail -n 1 | cut -d ' ' -f 2)" 'BEGIN { exit !(e > 2) }' ||
        { why="epoch $(field epochs epoch interval | tail -n 1)"; return 1; }
    ! grep -q '^ validation' "$work/out" || { why="validated without a validation split"; return 1; }
}
check "several epochs of a small shard" epochs
mock() { trains 2 --mock-data --data-path nowhere; }
check "--mock-data needs no data" mock

# --- evaluation ---
evaluates() {
    logged evaluates 2 --eval-interval 5 --eval-iters 2 || return 1
    local form='lm loss value: [0-9.]*E[+-][0-9]* | lm loss PPL: [0-9.]*E[+-][0-9]* | $' where
    for where in "iteration 5" "iteration 10" "iteration 12 on validation set" "iteration 12 on test set"; do
        [ "$(grep -c "^ validation loss at $where | $form" "$work/out")" -eq 1 ] ||
            { why="not one line for $where"; return 1; }
    done
    [ "$(grep -c '^ validation loss' "$work/out")" -eq 4 ] &&
        [ "$(field evaluates loss valid | wc -l)" -eq 4 ] || { why="other than 4 evaluations"; return 1; }
    # As in Megatron-LM, the dashed lines are one character longer than the text.
    awk '/^-+$/ { frame = length($0); next } /^ validation loss/ { if (frame != length($0) + 1) exit 1 }' \
        "$work/out" || { why="the frame is not as long as the line"; return 1; }
    # PPL is exp(loss).
    sed -n 's/.*lm loss value: \([^ ]*\) | lm loss PPL: \([^ ]*\) .*/\1 \2/p' "$work/out" |
        awk '{ d = exp($1) / $2 - 1; if (d > 1e-4 || d < -1e-4) exit 1 }' ||
        { why="PPL is not exp(loss)"; return 1; }
}
check "validation and test lines in Megatron's format" evaluates
iterator() {
    logged still 2 --lr 0 --min-lr 0 --weight-decay 0 --eval-interval 5 --eval-iters 2 || return 1
    [ "$(field still loss valid | sed -n 1p | cut -d ' ' -f 2)" != \
        "$(field still loss valid | sed -n 2p | cut -d ' ' -f 2)" ] ||
        { why="two evaluations of the same weights are equal: the iterator was rewound"; return 1; }
}
check "consecutive evaluations use consecutive samples" iterator
full_validation() { # reads the same samples each time, so constant weights give the same loss
    logged full 2 --lr 0 --min-lr 0 --weight-decay 0 --eval-interval 5 --eval-iters 2 --full-validation ||
        return 1
    grep -q '^    validation: None$' "$work/out" || { why="a target for validation"; return 1; }
    [ "$(field full loss valid | head -n 3 | cut -d ' ' -f 2 | sort -u | wc -l)" -eq 1 ] ||
        { why="other losses: $(field full loss valid)"; return 1; }
    local samples
    samples=$(sed -n 's/^ > validation: \([0-9]*\) samples.*/\1/p' "$work/out")
    grep -q "^Evaluating on $((samples / 8 * 8)) samples" "$work/out" ||
        { why="not all $samples samples"; return 1; }
}
check "--full-validation" full_validation
check "--full-validation of less than a batch" refused 5 "fewer than a global batch of 8" 2 \
    --data-path "$work/tiny_text_document" --split 90,10,0 --full-validation
check "--full-validation of a weighted blend" refused 2 "a weighted blend cannot read its validation split exactly once" 2 \
    --data-path 1 "$data" 2 "$work/other_text_document" --full-validation
wsd() {
    logged wsd 2 --lr-decay-style WSD --lr-wsd-decay-iters 6 --lr-wsd-decay-style linear --min-lr 0 ||
        return 1
    # 12 iterations of 8 samples with a warm-up of 2. The line of iteration i shows the rate of the
    # next step: constant until 6, 0 after 12.
    [ "$(field wsd lr | cut -d ' ' -f 2 | sed -n '3p;6p;9p;12p' | tr '\n' ' ')" = "0.003 0.003 0.0015 0 " ] ||
        { why="rates $(field wsd lr | tr '\n' ' ')"; return 1; }
}
check "--lr-decay-style WSD" wsd
no_evaluation() { trains 2 --eval-interval 5 --eval-iters 0 && ! grep -q 'validation loss' "$work/out"; }
check "--eval-iters 0" no_evaluation
skip_train() {
    logged trained 2 --save "$work/trained" --save-interval 100 --eval-iters 2 &&
        cp "$work/out" "$work/first" || return 1
    logged skipped 2 --load "$work/trained" --skip-train --eval-iters 2 || return 1
    [ "$(train_lines skipped | wc -l)" -eq 0 ] || { why="it trained"; return 1; }
    [ "$(grep '^ validation loss' "$work/first")" = "$(grep '^ validation loss' "$work/out")" ] ||
        { why="other losses than at the end of training"; return 1; }
}
check "--skip-train evaluates a checkpoint" skip_train
evaluates_alone() { # evaluation needs neither training data nor a training split
    local own=("${batch[@]}") i
    for i in "${!own[@]}"; do [ "${own[i]:-}" = --split ] && unset "own[i]" "own[i + 1]"; done
    ranks 2 "${model[@]}" "${own[@]}" --valid-data-path "$data" --skip-train --eval-iters 2 ||
        { say "failed"; return 1; }
    grep -q '^ validation loss at iteration 0 on validation set' "$work/out" ||
        { why="not evaluated"; return 1; }
    ranks 2 "${model[@]}" "${batch[@]}" --data-path "$data" --split 0,1,0 --skip-train --eval-iters 2 ||
        say "failed without a training split"
}
check "--skip-train without training data" evaluates_alone
sample() {
    trains 2 --sample-prompt "the quick " --sample-tokens 20 || return 1
    grep -q '^sample at iteration 12:$' "$work/out" && grep -qa '^the quick ' "$work/out" ||
        { why="no sample"; return 1; }
}
check "--sample-prompt" sample

# --- early exits ---
exit_interval() {
    logged leaving 4 --gpus-per-node 2 --save "$work/leaving" --save-interval 100 --exit-interval 5 ||
        return 1
    [ "$(train_lines leaving | wc -l)" -eq 5 ] &&
        grep -q '^\[exiting program at iteration 5\] datetime: ' "$work/out" &&
        [ "$(cat "$work/leaving/latest_checkpointed_iteration.txt")" = 5 ] ||
        { why="did not exit at iteration 5 with a save"; return 1; }
    ! grep -q 'on test set' "$work/out" || { why="evaluated at the end"; return 1; }
}
check "--exit-interval" exit_interval
exit_duration() {
    logged minutes 4 --gpus-per-node 2 --train-iters 1000000 --lr-decay-iters 100 --log-interval 100 \
        --save "$work/minutes" --save-interval 1000000 --exit-duration-in-mins 0.03 || return 1
    grep -qE '^\[exiting program after 0\.[0-9]+ minutes\] datetime: ' "$work/out" ||
        { why="no line reports it"; return 1; }
    [ "$(cat "$work/minutes/latest_checkpointed_iteration.txt")" = \
        "$(field minutes loss | tail -n 1 | cut -d ' ' -f 1)" ] ||
        { why="the last iteration was not saved"; return 1; }
}
check "--exit-duration-in-mins" exit_duration
extra_fields() {
    trains 2 --log-params-norm --log-num-zeros-in-grad --log-throughput || return 1
    grep -q '| throughput per GPU (TFLOP/s/GPU): [0-9.]* | .* | grad norm: [0-9.]* | num zeros: [0-9.]* | params norm: [0-9.]* | number of skipped' "$work/out" || { why="fields are missing"; return 1; }
}
check "--log-params-norm, --log-num-zeros-in-grad, --log-throughput" extra_fields
# Prints the norms of a checkpoint's model weights and of its master weights with three digits.
norms() { # FOLDER
    python3 - "$1" <<'PY'
import array, glob, json, math, struct, sys
squares = {"weight": 0.0, "master": 0.0}
for path in glob.glob(sys.argv[1] + "/iter_0000012/*/*.safetensors"):
    data = open(path, "rb").read()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    for name, slice in json.loads(data[8:start]).items():
        kind = name.split("|")[1] if "|" in name else ""
        if kind not in squares:
            continue
        raw = data[start + slice["data_offsets"][0]:start + slice["data_offsets"][1]]
        if slice["dtype"] == "BF16":
            raw = b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2))
        squares[kind] += sum(x * x for x in array.array("f", raw))
print("%.3f %.3f" % (math.sqrt(squares["weight"]), math.sqrt(squares["master"])))
PY
}
params_norm() { # with 4-bit model weights, which differ clearly from the master weights
    logged norm 2 --log-params-norm --quantized-weights --weight-quantization-method direct \
        --save "$work/norm" --save-interval 12 || return 1
    local said weight master
    said=$(sed -n 's/.*iteration       12.*params norm: \([0-9.]*\) .*/\1/p' "$work/out")
    read -r weight master < <(norms "$work/norm")
    [ "$weight" != "$master" ] || { why="weights and master weights have the same norm, $weight"; return 1; }
    [ "$said" = "$weight" ] ||
        { why="said $said; of the weights it is $weight, of the master weights $master"; return 1; }
}
if command -v python3 >/dev/null; then check "the params norm is computed from the model weights" \
    params_norm; else skip \
    "the params norm is computed from the model weights" "no python3"; fi
finish
