#!/usr/bin/env bash
# --eval-tasks: scores are identical in every layout and strategy, standalone and during training,
# and scoring does not change training. Invalid task files end the run before it starts. If lm_eval
# is installed, it must find the same scores on an exported checkpoint.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 200 5
data=$work/text_text_document
model+=(--seq-length 128 --max-position-embeddings 128)
tasks=$work/tasks.jsonl

# Contexts of a few words, and contexts longer than the model's sequence length.
awk 'BEGIN {
    count = split("the quick brown fox jumps over a lazy dog while seven wizards brew tea", word, " ")
    for (i = 0; i < 60; i++) {
        context = words(i % 4 == 3 ? 40 : 1 + draw(12)) (i % 7 == 2 ? " " : "")
        if (i == 9 || i == 40) context = ""
        printf "{\"task\":\"%s\",\"context\":\"%s\",", i % 3 ? "choose" : "complete", context
        if (i % 3 == 0) printf "\"continuation\":\" %s\"}\n", words(1)
        else printf "\"choices\":[\"%s\",\"%s\",\"%s%s\"],\"gold\":%d}\n", words(1), words(2 + draw(3)), \
            words(3), i % 5 ? "" : "\xc3\xa9", draw(3)
    }
}
function words(n, text) {
    for (text = word[1 + draw(count)]; n-- > 1;) text = text " " word[1 + draw(count)]
    return text
}
function draw(n) { seed = (seed * 1103 + 12345) % 65536; return int(seed * n / 65536) }' >"$tasks"
scored=(--eval-tasks "$tasks" --log-eval-samples)

# scores NAME: prints the records of the last scored iteration.
scores() {
    local last
    last=$(field "$1" n task | tail -n 1 | cut -d ' ' -f 1)
    grep -E "^\{\"kind\":\"(task|eval_sample)\",\"iteration\":${last:-none}," "$work/$1.jsonl" \
        >"$work/$1.scores"
    [ "$(wc -l <"$work/$1.scores")" -eq 62 ] || { why="$(wc -l <"$work/$1.scores") records in $1"; return 1; }
}
# scored_alone NAME NP FLAGS...: scores the checkpoint without training data.
scored_alone() {
    local log=$work/$1.jsonl name=$1 np=$2
    shift 2
    rm -f "$log"
    ranks "$np" "${model[@]}" "${batch[@]}" --load "$work/run" --skip-train --override-opt_param-scheduler \
        "${scored[@]}" --log-jsonl "$log" "$@" || { say "np $np $* ended with exit code $?"; return 1; }
    scores "$name"
}

# --- during training -----------------------------------------------------------------------------
sdp4bit=("${paper[@]}" --gpus-per-node 2 --hidden-dropout 0.1 --attention-dropout 0.1)
during() {
    logged run 4 "${sdp4bit[@]}" --eval-interval 6 --save "$work/run" --save-interval 12 \
        --tensorboard-dir "$work/events" "${scored[@]}" && scores run &&
        [ "$(field run n task | cut -d ' ' -f 1 | tr '\n' ' ')" = "6 6 12 12 " ] ||
        { why=${why:-$(field run n task)}; return 1; }
    grep -q '^ task choose at iteration 12 | n: 40 | acc: 0\.[0-9]* | acc stderr: 0\.[0-9]* | acc_norm: ' \
        "$work/out" || { why="no line"; return 1; }
    grep -q 'task complete perplexity' "$work"/events/* || { why="no TensorBoard scalar"; return 1; }
}
check "scores at every evaluation, SDP4Bit" during
undisturbed() {
    logged quiet 4 "${sdp4bit[@]}" --eval-interval 6 --save "$work/quiet" --save-interval 12 &&
        same_training run quiet && same_shards "$work/run" "$work/quiet" 12 4
}
check "training is bitwise unchanged" undisturbed

# --- standalone, in other layouts ----------------------------------------------------------------
same_scores() { # NAME NP FLAGS...: bitwise identical
    scored_alone "$@" && cmp -s "$work/run.scores" "$work/$1.scores" ||
        { why=${why:-$(diff "$work/run.scores" "$work/$1.scores" | sed -n 2p | cut -c 1-160)}; return 1; }
}
check "standalone on one rank" same_scores one 1
check "on two ranks" same_scores two 2
check "on three ranks" same_scores three 3 --global-batch-size 6
check "two pipeline stages" same_scores staged 2 --pipeline-model-parallel-size 2
check "stages with chunks of layers, two replicas" same_scores chunks 4 --num-layers 2 \
    --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1
check "weights sharded across all ranks" same_scores zero3 2 --data-parallel-sharding-strategy \
    optim_grads_params \
    --shard-params-over world
check "full recomputation" same_scores again 1 --recompute-granularity full

# Tensor parallelism and other matrix shapes round differently: likelihoods agree within 0.01, and
# at most one sample has another choice.
close_scores() { # NAME NP FLAGS...
    scored_alone "$@" || return 1
    paste -d '\n' "$work/run.scores" "$work/$1.scores" | sed -e 's/"[a-z_]*":/ /g; s/[][{},]/ /g' | awk '
        NR % 2 { split($0, left); next }
        { for (i = 1; i <= NF; i++) {
            d = $i - left[i]; d = d < 0 ? -d : d
            size = left[i] < 0 ? -left[i] : 1
            if ($1 ~ /eval_sample/ && i < NF ? d > 0.01 * size : $1 ~ /"task"/ && i <= 6 && d > 0.026) {
                print left[i], $i; exit 1 } } }' >"$work/far" ||
        { why="$(cat "$work/far")"; return 1; }
}
check "other batch sizes" close_scores batches 2 --micro-batch-size 1
layout=(--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 4)
check "tensor parallel" close_scores cut 2 "${layout[@]}"
cut_again() {
    scored_alone cut_again 4 "${layout[@]}" --sequence-parallel && cmp -s "$work"/cut{,_again}.scores
}
check "two replicas with sequence parallelism: bitwise identical" cut_again

# --- memory --------------------------------------------------------------------------------------
check "memory matches the plan" memory_as_planned 2 "${layout[@]}" --eval-tasks "$tasks"
planned_more() {
    local with without
    make_plan 1 --eval-tasks "$tasks" && with=$(awk '$1 == "total" { print $2 }' "$work/plan") &&
        make_plan 1 && without=$(awk '$1 == "total" { print $2 }' "$work/plan")
    [ "$with" -gt "$without" ] || { why="$with bytes with, $without without"; return 1; }
}
check "the plan includes the memory for scoring" planned_more

# --- invalid input -------------------------------------------------------------------------------
{ cat "$tasks"; echo '{"task":"choose","context":"c","choices":["x"],"gold":1}'; } >"$work/bad.jsonl"
check "a correct choice out of range" refused 5 "bad.jsonl line 61: \"gold\"" 2 --eval-tasks \
    "$tasks" "$work/bad.jsonl"
check "a missing file" refused 5 "$work/none.jsonl" 2 --eval-tasks "$work/none.jsonl"
before_the_plan() { refused 5 'line 61' 1 --eval-tasks "$work/bad.jsonl" && ! grep -q 'memory plan' "$work/out"; }
check "task files are read before training starts" before_the_plan
check "samples without an output path" refused 2 "--log-jsonl" 1 "${scored[@]}"
no_words() {
    ranks 1 "${model[@]}" "${batch[@]}" --mock-data --tokenizer-type GPT2BPETokenizer --eval-tasks "$tasks"
    error_names 2 "--vocab-file" $?
}
check "no vocabulary" no_words
no_data() {
    ranks 1 "${model[@]}" "${batch[@]}" --eval-tasks "$tasks"
    error_names 2 "no training data" $?
}
check "training requires data" no_data

# --- the harness ---------------------------------------------------------------------------------
PYTHON=${PYTHON:-python3}
if "$PYTHON" -c 'import lm_eval, torch, transformers, accelerate' 2>/dev/null; then
    harness_agrees() {
        "$BUILD/convert_checkpoint" --load "$work/run" --to-hf "$work/hf" 2>"$work/err" &&
            "$PYTHON" dev/ref/harness_scores.py "$work/hf" "$tasks" "$work/run.jsonl" \
                >"$work/out" 2>"$work/err" ||
            say "$(tail -n 1 "$work/err")"
    }
    check "lm_eval finds the same scores on an export" harness_agrees
    same_file() {
        "$PYTHON" - "$tasks" "$work" <<'PY' 2>"$work/err" && HF_HUB_OFFLINE=1 "$PYTHON" dev/harness_tasks \
            --include-path "$work" choose complete 2>"$work/err" | sort >"$work/back.jsonl"
import pathlib, sys
sys.path.insert(0, "dev/ref")
from harness_scores import read_tasks, write_task
for name, samples in read_tasks(sys.argv[1]).items():
    write_task(pathlib.Path(sys.argv[2]), name, samples)
PY
        "$PYTHON" -c '
import json, sys
own, back = ([json.loads(line) for line in open(path)] for path in sys.argv[1:])
for sample in back:
    assert sample.pop("delimiter", " ") == " "
key = lambda sample: json.dumps(sample, sort_keys=True)
assert sorted(own, key=key) == sorted(back, key=key)' "$tasks" "$work/back.jsonl" 2>"$work/err" ||
            say "the samples differ"
    }
    check "dev/harness_tasks writes lm_eval's samples" same_file
else
    skip "lm_eval finds the same scores on an export" "lm_eval is not installed"
    skip "dev/harness_tasks writes lm_eval's samples" "lm_eval is not installed"
fi
finish
