#!/usr/bin/env bash
# --eval-text and cloze samples of --eval-tasks: results are the same in every layout, standalone
# and during training. Invalid files and flags are refused.
# test/unit/run/test_eval_tasks.c compares the results with a reference.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 200 5
data=$work/text_text_document
tr -d '{}":' <"$work/text.jsonl" | sed -n '1,24s/^text / /p' >"$work/long.txt"
printf 'a short text' >"$work/short.txt" # shorter than a window, without a newline
sed -n 1,30p "$work/text.jsonl" | sed 's/ "}/"}/' >"$work/cloze.jsonl"
texts=(--eval-text "$work/long.txt" "$work/short.txt" --overlapping-eval 8 --eval-tasks "$work/cloze.jsonl" \
    --strict-lambada)

# results NAME: writes the records of the last evaluation to $work/NAME.results.
results() {
    grep -E '"kind":"(eval_text|task)"' "$work/$1.jsonl" | tail -n 3 >"$work/$1.results"
    [ "$(grep -c eval_text "$work/$1.results")" -eq 2 ] ||
        { why="$(wc -l <"$work/$1.results") records"; return 1; }
}
alone() { # NAME NP FLAGS...: evaluates the checkpoint without training data
    local log=$work/$1.jsonl name=$1 np=$2
    shift 2
    rm -f "$log"
    ranks "$np" "${model[@]}" "${batch[@]}" --load "$work/run" --skip-train --override-opt_param-scheduler \
        "${texts[@]}" --log-jsonl "$log" "$@" || { say "np $np $* ended with exit code $?"; return 1; }
    results "$name"
}

# --- during training -----------------------------------------------------------------------------
sdp4bit=("${paper[@]}" --gpus-per-node 1)
during() {
    logged run 2 "${sdp4bit[@]}" --eval-interval 6 --save "$work/run" --save-interval 12 \
        --tensorboard-dir "$work/events" "${texts[@]}" && results run || return 1
    grep -q '^ text long.txt at iteration 12 | tokens: [0-9]* | avg loss: [0-9.E+-]* | ppl: ' "$work/out" ||
        { why="no line"; return 1; }
    [ "$(grep -c '"kind":"eval_text"' "$work/run.jsonl")" -eq 4 ] ||
        { why="not at each evaluation"; return 1; }
    grep -q 'text long.txt adjusted ppl' "$work"/events/* || { why="no TensorBoard scalar"; return 1; }
}
check "texts at every evaluation, SDP4Bit" during

# --- standalone, in other layouts ----------------------------------------------------------------
same_results() { # NAME NP FLAGS...: bitwise identical
    alone "$@" && cmp -s "$work/run.results" "$work/$1.results" ||
        { why=${why:-$(diff "$work/run.results" "$work/$1.results" | sed -n 2p)}; return 1; }
}
check "standalone on one rank" same_results one 1
check "three ranks" same_results three 3 --global-batch-size 6
check "two pipeline stages" same_results staged 2 --pipeline-model-parallel-size 2
check "weights sharded across all ranks" same_results zero3 2 --data-parallel-sharding-strategy \
    optim_grads_params --shard-params-over world
# Tensor parallelism rounds differently: the losses agree within 0.1 %, one word may be another.
close_results() { # NAME NP FLAGS...
    alone "$@" || return 1
    paste -d ' ' "$work/run.results" "$work/$1.results" | awk '
        function value(key, part,  rest) {
            rest = substr(part, index(part, "\"" key "\":") + length(key) + 3)
            return rest + 0
        }
        { split($0, half, " [{]"); key = /eval_text/ ? "loss" : "acc"; bound = key == "loss" ? 0.001 : 1 / 29
          a = value(key, half[1]); b = value(key, half[2]); d = a - b; d = d < 0 ? -d : d
          if (d > bound * (key == "loss" ? a : 1)) { print key, a, b; exit 1 } }' >"$work/far" ||
        { why=$(cat "$work/far"); return 1; }
}
check "tensor parallel" close_results cut 2 --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 4

# --- other strides -------------------------------------------------------------------------------
loss_of() { sed -n "s/.*\"text\":\"long.txt\".*\"loss\":\([0-9.e+-]*\),.*/\1/p" "$work/$1.results"; }
no_overlap() { # 32 is the sequence length of this model
    alone windows 1 --overlapping-eval 32 && [ -n "$(loss_of windows)" ] &&
        [ "$(loss_of windows)" != "$(loss_of one)" ] || { why=${why:-"equal losses"}; return 1; }
}
check "windows without overlap give another loss" no_overlap

# --- invalid input -------------------------------------------------------------------------------
printf 'a b\nc \xff d\n' >"$work/bad.txt"
: >"$work/empty.txt"
check "invalid UTF-8" refused 5 "$work/bad.txt line 2: byte 7 of the file, 0xFF" 2 --eval-text "$work/bad.txt"
check "an empty file" refused 5 "$work/empty.txt has 0 words" 1 --eval-text "$work/empty.txt"
check "a missing file" refused 5 "$work/none.txt" 2 --eval-text "$work/none.txt"
check "windows that leave out tokens" refused 2 "--overlapping-eval 33 exceeds --seq-length 32" 1 \
    --eval-text "$work/long.txt" --overlapping-eval 33
check "a stride without a text" refused 2 "need --eval-text" 1 --overlapping-eval 8
check "last words without tasks" refused 2 "--strict-lambada needs --eval-tasks" 1 --strict-lambada
finish
