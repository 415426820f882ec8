#!/usr/bin/env bash
# convert_checkpoint for the Llama family: round trips of tensor-parallel, pipeline and SDP4Bit
# checkpoints with grouped-query attention, an untied output layer, and query/key norms. Evaluation
# gives the same loss, and training continues with the flags that an import prints. If transformers
# is installed, from_pretrained loads the directories and computes the golden logits.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
# shellcheck source-path=SCRIPTDIR source=../convert_lib.sh
. test/convert_lib.sh
make_shard text 120 8
data=$work/text_text_document
plain=("${model[@]}")
llama=(--normalization RMSNorm --position-embedding-type rope --rotary-base 500 --swiglu \
    --ffn-hidden-size 64 --group-query-attention --num-query-groups 2)
null=(--tokenizer-type NullTokenizer --vocab-size 263) # 264 rows: no padding
two=(--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 4)

# Two nodes with tensor parallel size 2 and SDP4Bit, so the model weights differ from the rounded
# master weights.
model+=("${llama[@]}" --disable-bias-linear --untie-embeddings-and-output-weights)
trains 4 "${paper[@]}" "${null[@]}" --gpus-per-node 2 "${two[@]}" --train-iters 6 --save-interval 6 --save "$work/cut" ||
    not_ok "tensor-parallel Llama run" "$why"
check "Llama, tensor parallel, fp32" round_trip cut fp32
check "Llama, tensor parallel, bf16" round_trip cut bf16
same_evaluation() {
    evaluated first "$work/cut" "${null[@]}" &&
        evaluated second "$work/cut.bf16.back" "${null[@]}" --finetune &&
        cmp -s "$work/first.loss" "$work/second.loss" ||
        { why="${why:-$(cat "$work"/*.loss | tr '\n' ' ')}"; return 1; }
}
check "an imported Llama has the same loss" same_evaluation

# Query/key norms, tied embeddings, pipeline stages, and tensor plus pipeline parallelism.
model=("${plain[@]}" "${llama[@]}" --disable-bias-linear --qk-layernorm)
trains 4 "${two[@]}" --pipeline-model-parallel-size 2 --train-iters 4 --save-interval 4 \
    --save "$work/staged" || not_ok "tensor- and pipeline-parallel Qwen3 run" "$why"
check "Qwen3, tensor and pipeline parallel, bf16" round_trip staged bf16
is_qwen3() { grep -q '"model_type": "qwen3"' "$work/staged.bf16/config.json"; }
check "the model type is Qwen3" is_qwen3

# Trains with the flags that the import printed.
by_its_flags() { # FOLDER FLAGS...
    local folder=$1
    shift
    ranks 2 "@$folder/model.args" "${batch[@]}" --bf16 --use-distributed-optimizer --seq-length 32 \
        --data-path "$data" --train-iters 3 --load "$folder" --log-jsonl "$work/on.jsonl" "$@" ||
        { say "training failed"; return 1; }
    [ "$(train_lines on | wc -l)" -eq 3 ] || { why="not 3 iterations"; return 1; }
    rm "$work/on.jsonl"
}
check "training resumes from iteration 0" by_its_flags "$work/cut.fp32.back"
check "--finetune, tensor parallel" by_its_flags "$work/staged.bf16.back" --finetune "${two[@]}"

# A tokenizer.json is copied with its companion files and used by the resumed run.
own=$work/llama3
cp -r test/golden/tokenizer_json/llama3 "$own"
rm "$own/ids.json"
mkdir "$own/additional_chat_templates"
echo '{% for m in messages %}{{ m["content"] }}{% endfor %}' >"$own/chat_template.jinja"
echo '{{ tools }}' >"$own/additional_chat_templates/tool_use.jinja"
echo '{{ tools }}' >"$own/additional_chat_templates/tool.json.jinja"
echo '{"<|eot_id|>": 560}' >"$own/added_tokens.json"
echo '{"eos_token": "<|end_of_text|>", "pad_token": "!"}' >"$own/special_tokens_map.json"
echo '{"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": {"content": "!"},
"tokenizer_class": "PreTrainedTokenizerFast"}' >"$own/tokenizer_config.json"
as_text=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$own")
model=("${plain[@]}" "${llama[@]}" "${as_text[@]}")
"$BUILD/preprocess_data" --input "$work/text.jsonl" "${as_text[@]}" --append-eod --workers 1 \
    --output-prefix "$work/ids" >/dev/null 2>"$work/err" || not_ok "preprocess" "$(tail -n 1 "$work/err")"
data=$work/ids_text_document
trains 1 --train-iters 4 --save-interval 4 --save "$work/text" ||
    not_ok "a Llama with a tokenizer.json" "$why"
# ids FOLDER EOS BOS PAD: checks the special token ids in config.json.
ids() {
    local key
    for key in "\"eos_token_id\": $2," "\"bos_token_id\": $3," "\"pad_token_id\": $4,"; do
        grep -qF "$key" "$1/config.json" ||
            { why="no $key in $(grep token_id "$1/config.json" | tr -d '\n')"; return 1; }
    done
}
holds_all_of() { # SOURCE FOLDER
    diff -rq -x config.json -x model.safetensors "$1" "$2" >"$work/diff" ||
        { why=$(head -n 1 "$work/diff"); return 1; }
}
# transformers reads the same from both folders. It needs no torch for that.
reads_the_same() { # SOURCE FOLDER
    "$PYTHON" -c 'import transformers' 2>"$work/err" || return 0
    "$PYTHON" dev/ref/check_hf_same.py "$1" "$2" >"$work/out" 2>&1 ||
        { why=$(tail -n 1 "$work/out"); return 1; }
}
tokenizer_copied() {
    round_trip text bf16 && holds_all_of "$own" "$work/text.bf16" && ids "$work/text.bf16" 559 558 0
}
check "a tokenizer's files are copied" tokenizer_copied
generation_copied() {
    echo '{"eos_token_id": [559, 560], "pad_token_id": 0, "bos_token_id": null, "temperature": 0.6}' \
        >"$own/generation_config.json"
    converts --load "$work/text" --to-hf "$work/chat" && holds_all_of "$own" "$work/chat" &&
        ids "$work/chat" "[559,560]" null 0
}
check "ids of generation_config.json" generation_copied
model_copied() { # config.json and generation_config.json disagree
    cp -r "$work/chat" "$work/model"
    sed -i 's/"eos_token_id": .*,/"eos_token_id": [559, 1],/; s/"pad_token_id": .*,/"pad_token_id": 0,/
        s/"bos_token_id": .*,/"bos_token_id": null,/; s/"tokenizer_class".*/"model_max_length": 64}/' \
        "$work"/model/*config.json
    sed -i 's/\[559, 1\]/[560, 2]/' "$work/model/generation_config.json"
    local way
    for way in "" --no-tokenizer "--tokenizer-model $own"; do
        rm -rf "$work/model.run" "$work/model.hf"
        # shellcheck disable=SC2086 # several words
        converts --from-hf "$work/model" --save "$work/model.run" --make-vocab-size-divisible-by 8 $way &&
            converts --load "$work/model.run" --to-hf "$work/model.hf" &&
            ids "$work/model.hf" "[559,1]" null 0 &&
            cmp "$work/model/generation_config.json" "$work/model.hf/generation_config.json" >"$work/diff" ||
            { why=${why:-generation_config.json}; return 1; }
        [ -z "$way" ] || continue
        holds_all_of "$work/model" "$work/model.hf" && reads_the_same "$work/model" "$work/model.hf" ||
            return 1
    done
}
check "a model's ids, templates and generation settings" model_copied
# The folder of the tokenizer has another end token than the run.
own_end_token() {
    cp -r "$own" "$work/other" && cp "$work/model/config.json" "$work/other" || return 1
    sed -i 's/"eos_token_id": .*,/"eos_token_id": 559,/' "$work/other/config.json"
    sed 's/\[559, 560\]/559/' "$own/generation_config.json" >"$work/other/generation_config.json"
    local end=(--tokenizer-model "$work/other" --tokenizer-eod '<|eot_id|>') data=$work/turns_text_document
    "$BUILD/preprocess_data" --input "$work/text.jsonl" "${as_text[@]}" "${end[@]}" --append-eod --workers 1 \
        --output-prefix "$work/turns" >/dev/null 2>"$work/err" || { say "preprocess failed"; return 1; }
    trains 1 "${end[@]}" --train-iters 4 --save-interval 4 --save "$work/turn" &&
        converts --load "$work/turn" --to-hf "$work/turn.hf" && ids "$work/turn.hf" 560 null 0 || return 1
    tr -d ' \t\n' <"$work/turn.hf/generation_config.json" | grep -q '"eos_token_id":560,.*"temperature":0.6' ||
        { why="generation_config.json"; return 1; }
    [ "$(grep -c 'eos_token_id' "$work/err")" -eq 1 ] || { why="no note: $(cat "$work/err")"; return 1; }
    sed -i 's/559/[559, 560]/' "$work/other/config.json"
    converts --load "$work/turn" --to-hf "$work/turns.hf" && ids "$work/turns.hf" "[559,560]" null 0 &&
        ! grep -q 'eos_token_id' "$work/err" || { why=${why:-a note}; return 1; }
}
check "the run's end token" own_end_token
templates_unread() { # as if the permission were missing, which root does not need
    local folder=$work/unread
    cp -r "$own" "$folder" && rm -r "$folder/additional_chat_templates" &&
        touch "$folder/additional_chat_templates" &&
        no_convert 5 "$folder/additional_chat_templates: Not a directory" --load "$work/text" \
            --to-hf "$work/none" --tokenizer-model "$folder"
}
check "unreadable chat templates" templates_unread
# Where the source does not name the tokenizer's class and has another model_type, or none.
class_named() {
    echo '{"eos_token": "<|end_of_text|>"}' >"$own/tokenizer_config.json"
    converts --load "$work/text" --to-hf "$work/named" &&
        grep -q PreTrainedTokenizerFast "$work/named/tokenizer_config.json" &&
        grep -q end_of_text "$work/named/tokenizer_config.json" ||
        { why=${why:-no tokenizer_class}; return 1; }
}
check "tokenizer_class" class_named
check "training continues with tokenizer.json" by_its_flags "$work/text.bf16.back" --finetune
# A directory may contain both tokenizer.json and vocab.json with merges.txt, which can tokenize
# differently.
tokenizer_json_first() {
    cp -r "$work/text.bf16" "$work/both" && cp test/golden/tokenizer/{vocab.json,merges.txt} "$work/both" &&
        echo '{"eos_token": "<|end_of_text|>", "tokenizer_class": "GPT2Tokenizer"}' \
            >"$work/both/tokenizer_config.json" &&
        converts --from-hf "$work/both" --save "$work/both.run" --make-vocab-size-divisible-by 8 &&
        grep -q '^--tokenizer-type HuggingFaceTokenizer' "$work/both.run/model.args" ||
        { why="${why:-wrong tokenizer type}"; return 1; }
}
check "tokenizer.json takes precedence over vocab.json" tokenizer_json_first
absolute_path() { # model.args may be used from another directory
    (cd "$work" && "$BUILD/convert_checkpoint" --from-hf both --save relative.run \
        --make-vocab-size-divisible-by 8 >out 2>err) || { why="$(head -n 1 "$work/err")"; return 1; }
    grep -qx -- "--tokenizer-model $work/relative.run/tokenizer.json" "$work/relative.run/model.args" ||
        { why="$(grep tokenizer-model "$work/relative.run/model.args")"; return 1; }
}
check "model.args has the absolute path of the tokenizer" absolute_path

# A model that is neither a GPT-2 nor a Llama cannot be exported.
data=$work/text_text_document
model=("${plain[@]}" --normalization RMSNorm)
trains 1 --train-iters 4 --save-interval 4 --save "$work/mixed" || not_ok "a mixed model" "$why"
check "an unsupported model" no_convert 6 "normalization RMSNorm" --load "$work/mixed" --to-hf "$work/none"

if has_transformers; then
    for name in hf_llama hf_qwen3; do
        check "transformers loads $name" reproduces_golden_logits "test/golden/$name"
    done
    # A Mistral is imported and exported as the equivalent Llama.
    mistral() {
        "$PYTHON" - "$work/mistral" >"$work/out" 2>&1 <<'END' &&
import sys
from transformers import MistralConfig, MistralForCausalLM
MistralForCausalLM(MistralConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, head_dim=16,
    num_key_value_heads=2, intermediate_size=40, max_position_embeddings=64, vocab_size=50, eos_token_id=49,
    bos_token_id=48, sliding_window=None, initializer_range=0.3)).save_pretrained(sys.argv[1])
END
            converts --from-hf "$work/mistral" --save "$work/mistral.run" &&
            converts --load "$work/mistral.run" --to-hf "$work/mistral.llama" --dtype fp32 &&
            grep -q '"model_type": "llama"' "$work/mistral.llama/config.json" &&
            opened "$work/mistral.llama" --same-as "$work/mistral" ||
            { why=${why:-$(tail -n 1 "$work/out")}; return 1; }
    }
    check "a Mistral is exported as a Llama" mistral
    takes_runs() {
        opened "$work/cut.fp32" && opened "$work/staged.bf16" --bytes &&
            opened "$work/text.bf16" --tokenizer "$own/tokenizer.json" ||
            { why=$(tail -n 1 "$work/out"); return 1; }
    }
    check "transformers loads the runs' models and tokenizers" takes_runs
else
    skip "transformers loads the directories" "torch and transformers are not installed"
fi
finish
