#!/usr/bin/env bash
# Supervised fine-tuning: the loss and gradient norm are PyTorch's mean over the assistant's tokens;
# every layout trains alike; killed runs resume bit-exactly; wrong data and flags cause one error
# line. test_chat.c tests the templates, test_packed.c the samples.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
golden=test/golden

# make_chats FILE COUNT SEED: conversations of one to three questions, of very different lengths.
make_chats() {
    awk -v count="$2" -v seed="$3" 'BEGIN {
        for (i = 0; i < count; i++) {
            printf "{\"messages\":["
            turns = 1 + draw(3)
            for (t = 0; t < turns; t++) {
                digits = ""
                for (k = draw(9); k >= 0; k--) digits = digits draw(10)
                printf "%s{\"role\":\"user\",\"content\":\"say %s\"},", (t ? "," : ""), digits
                printf "{\"role\":\"assistant\",\"content\":\"%s\"}", digits
            }
            print "]}"
        }
    }
    function draw(n) { seed = (seed * 1103 + 12345) % 65536; return int(seed * n / 65536) }' >"$1"
}
# preprocess NAME FLAGS...: writes $work/NAME_messages_document and its masks.
preprocess() {
    "$BUILD/preprocess_data" --tokenizer-type Byte --workers 1 --output-prefix "$work/$1" "${@:2}" \
        >/dev/null 2>"$work/err" || say "preprocess_data failed"
}
make_chats "$work/chats.jsonl" 200 3
preprocess chats --chat plain --input "$work/chats.jsonl" || not_ok "preprocess" "$why"
preprocess golden --chat rendered --input $golden/sft/rendered.jsonl || not_ok "preprocess" "$why"
make_shard text 60 4
data=$work/chats_messages_document
model+=(--seq-length 128 --max-position-embeddings 128)
batch+=(--train-iters 6)
sft=(--sft)

# --- the loss of PyTorch -------------------------------------------------------------------------
# An epoch of the golden conversations is 11 samples.
reference=(--seq-length 12 --max-position-embeddings 12 --num-layers 2 --ffn-hidden-size 40 \
    --norm-epsilon 1e-3 --tokenizer-type NullTokenizer --vocab-size 49 --make-vocab-size-divisible-by 2 \
    --bf16 --use-distributed-optimizer --lr 1e-3 --train-iters 1 --attention-dropout 0 --hidden-dropout 0 \
    --finetune --sft --global-batch-size 11 --eval-interval 100 --eval-iters 0)
hf=(--hidden-size 24 --num-attention-heads 3)
hf_mistral=(--hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 \
    --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
    --position-embedding-type rope --rotary-base 500 --window-size 4,0)
# near FOUND EXPECTED PART: relative difference of at most PART.
near() {
    awk -v a="$1" -v b="$2" -v part="$3" \
        'BEGIN { d = b > 0 ? a / b - 1 : 1; exit !(d <= part && d >= -part) }' ||
        { why="$1 instead of $2"; return 1; }
}
expected() { # MODEL KEY
    awk -v model="\"$1\":" -v key="\"$2\":" '$1 == model { here = 1 }
        here && $1 == key { sub(/,/, ""); print $2; exit }' $golden/sft/expected.json
}
import() { # MODEL
    "$BUILD/convert_checkpoint" --from-hf "$golden/$1" --save "$work/$1" --make-vocab-size-divisible-by 2 \
        >/dev/null 2>"$work/err" || say "convert_checkpoint failed"
}
same_as_torch() { # MODEL NP MICRO_BATCH FLAGS...
    local -n flags=$1
    rm -f "$work/torch.jsonl"
    ranks "$2" "${reference[@]}" "${flags[@]}" --load "$work/$1" --micro-batch-size "$3" \
        --train-data-path "$work/golden_messages_document" --log-jsonl "$work/torch.jsonl" "${@:4}" ||
        { say "failed"; return 1; }
    near "$(field torch loss | cut -d ' ' -f 2)" "$(expected "$1" loss)" 1e-3 &&
        near "$(field torch grad_norm | cut -d ' ' -f 2)" "$(expected "$1" grad_norm)" 2e-3
}
import hf && import hf_mistral || not_ok "import" "$why"
check "GPT-2: loss and gradient norm of PyTorch" same_as_torch hf 1 1
check "GPT-2: the same in one micro-batch" same_as_torch hf 1 11
check "Mistral: loss and gradient norm of PyTorch" same_as_torch hf_mistral 1 1
check "Mistral: the same on two pipeline stages" same_as_torch hf_mistral 2 1 --pipeline-model-parallel-size 2
evaluates() {
    rm -f "$work/eval.jsonl"
    ranks 1 "${reference[@]}" "${hf[@]}" --load "$work/hf" --micro-batch-size 1 --skip-train \
        --full-validation --valid-data-path "$work/golden_messages_document" --log-jsonl "$work/eval.jsonl" ||
        { say "failed"; return 1; }
    near "$(field eval loss valid | cut -d ' ' -f 2)" "$(expected hf loss)" 1e-3
}
check "evaluation counts the same tokens" evaluates

# transformers renders with the model's own template.
PYTHON=${PYTHON:-python3}
renders() {
    mkdir -p "$work/model"
    cp $golden/chat/bytes/tokenizer.json "$work/model/" || return 1
    printf '%s' '{"tokenizer_class":"PreTrainedTokenizerFast","eos_token":"<|im_end|>","chat_template":"' \
        '{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}' \
        '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"}' \
        >"$work/model/tokenizer_config.json"
    "$PYTHON" dev/ref/make_chat_golden.py --compare "$work/model" chatml "$BUILD/preprocess_data" \
        >"$work/out" 2>"$work/err" || { why=$(tail -n 1 "$work/out"); return 1; }
    echo '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}' |
        "$PYTHON" dev/data/render_chats "$work/model" 2>"$work/err" >"$work/lines" ||
        { say "render_chats failed"; return 1; }
    grep -q '"assistant_masks": \[0, .*, 0, 1, 1, 1\]}$' "$work/lines" || { why=$(cat "$work/lines"); return 1; }
    echo '{"messages":[{"role":"assistant","content":"b","weight":0}]}' |
        "$PYTHON" dev/data/render_chats "$work/model" 2>"$work/err" >"$work/lines" &&
        { why="render_chats accepts an answer of weight 0"; return 1; }
    grep -q '^error: .*line 1: .*message 1 has the weight 0, which the template ignores' "$work/err" ||
        { why=$(cat "$work/err"); return 1; }
}
if "$PYTHON" -c 'import transformers, jinja2' 2>"$work/err"; then
    check "transformers renders the same" renders
else
    skip "transformers renders the same" "$PYTHON has no transformers or jinja2"
fi

# --- layouts -------------------------------------------------------------------------------------
# Stages add in the same order as one rank if there is one micro-batch and one bucket per layer.
stages_change_no_bit() {
    local one=(--global-batch-size 2 --ddp-bucket-size 1 --eval-interval 3)
    logged one 1 "${one[@]}" "${sft[@]}" &&
        logged two 2 "${one[@]}" "${sft[@]}" --pipeline-model-parallel-size 2 &&
        same_training one two || return 1
    [ "$(field one loss valid)" = "$(field two loss valid)" ] || { why="validation losses differ"; return 1; }
}
check "two pipeline stages are bitwise identical to one rank" stages_change_no_bit
# close A B PART: relative difference of every loss.
close() {
    [ "$(field "$1" loss | wc -l)" -eq 6 ] || { why="too few losses"; return 1; }
    paste -d ' ' <(field "$1" loss) <(field "$2" loss) | awk -v part="$3" \
        '{ d = $2 / $4 - 1; if (!(d < part && d > -part)) { print; exit 1 } }' >"$work/far" ||
        { why="losses of $1 and $2: $(cat "$work/far")"; return 1; }
}
like_one_rank() { # PART NP FLAGS...
    logged other "$2" "${sft[@]}" "${@:3}" && close whole other "$1"
}
logged whole 1 "${sft[@]}" || not_ok "one rank" "$why"
tensor=(--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 4)
check "two data-parallel ranks" like_one_rank 1e-4 2
check "tensor parallel" like_one_rank 2e-3 2 "${tensor[@]}"
check "tensor and sequence parallel, two stages" like_one_rank 2e-3 4 "${tensor[@]}" --sequence-parallel \
    --pipeline-model-parallel-size 2
check "ZeRO-2" like_one_rank 1e-4 2 --data-parallel-sharding-strategy optim_grads
check "ZeRO-3" like_one_rank 1e-4 2 --data-parallel-sharding-strategy optim_grads_params
check "SDP4Bit on two nodes" like_one_rank 1e-2 2 --gpus-per-node 1 "${paper[@]}"
# Other updates: the first loss is the same, and the run learns.
learns() { # NP FLAGS...
    logged other "$1" "${sft[@]}" "${@:2}" || return 1
    near "$(field other loss | sed -n 's/^1 //p')" "$(field whole loss | sed -n 's/^1 //p')" 1e-2 || return 1
    awk -v a="$(mean_loss other 1 1)" -v b="$(mean_loss other 6 6)" 'BEGIN { exit !(b < a) }' ||
        { why="the loss does not fall"; return 1; }
}
check "Muon" learns 2 --optimizer muon
check "FP8" learns 1 --fp8-format hybrid --fp8-recipe tensorwise
local_steps() { # each group averages over its own tokens
    logged other 2 "${sft[@]}" --gpus-per-node 1 --local-steps 3 && near "$(mean_loss other 6 6)" \
        "$(mean_loss whole 6 6)" 2e-2
}
check "local steps" local_steps

# --- resuming ------------------------------------------------------------------------------------
# The killed run is too long to end before the signal. The others continue past its checkpoint.
resumes() {
    local run=(2 "${sft[@]}" --lr-decay-iters 12 --save-interval 4 --eval-interval 3) from
    in_background killed "${run[@]}" --train-iters 1000000 --save "$work/killed"
    wait_for_iteration killed 9 && signal_rank KILL 1 || return 1
    wait "$job"
    from=$(cat "$work/killed/latest_checkpointed_iteration.txt") && [ "$from" -ge 4 ] ||
        { why="no checkpoint was left"; return 1; }
    run+=(--train-iters $((from + 8)))
    logged resumed "${run[@]}" --load "$work/killed" || return 1
    grep -q "successfully loaded checkpoint.* iteration $from\b" "$work/out" ||
        { why="iteration $from was not loaded"; return 1; }
    logged straight "${run[@]}" && same_training straight resumed "$from" &&
        [ "$(train_lines resumed | wc -l)" -eq 8 ] || { why=${why:-"not 8 iterations"}; return 1; }
}
check "a killed run resumes bit-exactly" resumes

# --- looking at the data -------------------------------------------------------------------------
looks() {
    train 1 "${sft[@]}" --check-data || { say "failed"; return 1; }
    grep -q '_loss_mask: the loss counts [0-9]* tokens; 0 sequences have none: OK$' "$work/out" ||
        { why="no report of the masks"; return 1; }
    train 1 "${sft[@]}" --inspect-data 2 || { say "failed"; return 1; }
    grep -q ' tokens [0-9.]*: padding$' "$work/out" && grep -q '^  loss masks: 0 .*0 1 1' "$work/out" ||
        { why="$(head -n 12 "$work/out" | tail -n 6)"; return 1; }
    memory_as_planned 2 "${sft[@]}"
}
check "--check-data, --inspect-data and --plan" looks

# --- errors --------------------------------------------------------------------------------------
check "text without masks" refused 5 "--sft reads the loss masks of preprocess_data --chat" 2 \
    "${sft[@]}" --data-path "$work/text_text_document"
copy_masks() { # FROM: masks of another shard for the text
    for kind in bin idx; do cp "$work/$1.$kind" "$work/text_text_document_loss_mask.$kind"; done
}
copy_masks chats_messages_document_loss_mask
check "masks of another shard" refused 5 "sequence 0 differs in length" 2 "${sft[@]}" \
    --data-path "$work/text_text_document"
copy_masks text_text_document
check "masks that are not 0 or 1" refused 5 "loss masks other than 0 and 1" 2 "${sft[@]}" \
    --data-path "$work/text_text_document"
check "JSON lines, as Megatron-LM reads them" refused 5 "tokenize it with preprocess_data, conversations with --chat" \
    1 "${sft[@]}" --data-path "$work/chats.jsonl"
check "--reset-position-ids" refused 2 "drop --reset-position-ids" 1 "${sft[@]}" --reset-position-ids
check "--eod-mask-loss" refused 2 "drop --eod-mask-loss" 1 "${sft[@]}" --eod-mask-loss
check "--mock-data" refused 2 "which --mock-data lacks" 1 "${sft[@]}" --mock-data
finish
