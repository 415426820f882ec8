#!/usr/bin/env bash
# Quantization statistics during training: --log-quantization-error-interval and
# --dump-distributions. They must not change training or the byte counts. Also tests known values:
# no error for exact presets, the exact norm of the first step, and counts and norms of tensors.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 400 8
data=$work/text_text_document
probe=(--log-quantization-error-interval 1)
dump() { echo "--dump-distributions $work/$1 --dump-distributions-interval 6"; }
errors() { grep '"kind":"quantization_error"' "$work/$1.jsonl"; }
# stats_hold NAME CONDITION: checks that the Python condition holds for all statistics lines of the
# run. i, g, n, r are the iteration, gradient error, exact norm and replica error.
stats_hold() {
    errors "$1" | python3 -c '
import json, sys
lines = [json.loads(line) for line in sys.stdin]
assert lines, "no lines"
for line in lines:
    i, g, r = line["iteration"], line["gradient_error"], line["replica_error"]
    n = line.get("exact_gradient_norm")
    assert eval(sys.argv[1]), line' "$2" 2>"$work/err" ||
        { why="$2 is false: $(tail -n 1 "$work/err")"; return 1; }
}

unchanged() { # NP FLAGS...: compares the run with and without statistics
    local np=$1
    shift
    # shellcheck disable=SC2046 # split on purpose
    logged plain "$np" "${paper[@]}" --log-interval 4 "$@" &&
        logged probed "$np" "${paper[@]}" --log-interval 4 "$@" "${probe[@]}" $(dump dist) \
        --verify-replicas-interval 3 || return 1
    same_training plain probed || return 1
    [ "$(field plain inter_node_bytes interval)" = "$(field probed inter_node_bytes interval)" ] &&
        [ -n "$(field plain inter_node_bytes interval)" ] || { why="other bytes between nodes"; return 1; }
    [ "$(field plain intra_node_bytes interval)" = "$(field probed intra_node_bytes interval)" ] ||
        { why="other bytes inside a node"; return 1; }
    stats_hold probed '0.002 < g < 1 and (r > 1 or i == 1)'  # the first learning rate is 0
}
check "2 x 2 ranks: training and bytes are unchanged" unchanged 4 --gpus-per-node 2
check "1 x 4" unchanged 4 --gpus-per-node 4
check "4 x 1, chunks, small buckets" unchanged 4 --gpus-per-node 1 --gradient-alltoall-pipeline 3 \
    --ddp-bucket-size 1000
check "dropout, several micro-batches" unchanged 2 --gpus-per-node 1 --hidden-dropout 0.1 \
    --attention-dropout 0.1 --micro-batch-size 1

exact_presets() {
    logged fp32 4 --gpus-per-node 2 "${probe[@]}" && stats_hold fp32 'g == 0 and r == 1' || return 1
    [ "$(errors fp32 | wc -l)" = 12 ] || { why="not one line per iteration"; return 1; }
    logged bf16 4 --gpus-per-node 2 --grad-reduce-in-bf16 "${probe[@]}" &&
        stats_hold bf16 '0 < g < 0.004 and r == 1'
}
check "exact presets have at most bf16 rounding error" exact_presets
exact_norm() { # before the first update all presets have the same local gradients
    logged sdp4bit 4 --gpus-per-node 2 "${paper[@]}" "${probe[@]}" || return 1
    python3 - "$(field fp32 grad_norm | sed -n '1s/.* //p')" \
        "$(field sdp4bit grad_norm | sed -n '1s/.* //p')" \
        "$(errors sdp4bit | sed -n '1s/.*"exact_gradient_norm":\([^,}]*\).*/\1/p')" <<'END' 2>"$work/err" || \
        { why=$(tail -n 1 "$work/err"); return 1; }
import sys
exact, quantized, stats_hold = map(float, sys.argv[1:])
assert abs(stats_hold / exact - 1) < 1e-6 < abs(quantized / exact - 1), sys.argv
END
}
check "the exact norm matches the baseline's" exact_norm
check "values are logged with full precision" stats_hold sdp4bit \
    'len(repr(g)) > 12 and len(repr(n)) > 12 and (len(repr(r)) > 12 or i == 1)'
ordering() {
    logged both8 4 --gpus-per-node 2 --quantized-gradients --gradient-quantization-bits-inter 8 \
        "${probe[@]}" && stats_hold both8 '0.001 < g < 0.03 and r == 1' || return 1
    logged ulq 4 --gpus-per-node 2 --quantized-gradients --gradient-quantization-bits-intra 4 \
        --gq-group-size-intra 128 "${probe[@]}" && stats_hold ulq 'g > 0.06' || return 1
    logged qwd 4 --gpus-per-node 2 --quantized-weights "${probe[@]}" &&
        stats_hold qwd 'g == 0 and (1 < r < 4 or i == 1)' || return 1
    logged qw 4 --gpus-per-node 2 --quantized-weights --weight-quantization-method direct "${probe[@]}" &&
        stats_hold qw 'g == 0 and (r is None and line["replica_error_text"] == "inf" if i == 1 else r > 8)'
}
check "error decreases with bits and by method" ordering
late_start() {
    logged late 4 --gpus-per-node 2 --quantized-gradients --gradients-quantization-start-iteration 6 \
        "${probe[@]}" && stats_hold late '(g == 0) == (i <= 6)'
}
check "no error before the start iteration" late_start
one_rank() { logged one 1 "${probe[@]}" && stats_hold one 'g == 0 and r == 1 and n is None'; }
check "one rank" one_rank
scalars() { logged tb 2 "${probe[@]}" --tensorboard-dir "$work/tb" &&
    grep -qa 'quantization-error gradient' "$work"/tb/events* || say "TensorBoard events contain no statistics"; }
check "TensorBoard" scalars

# ---- distributions --------------------------------------------------------------------------
# Values: two layers of 12 * 32 * 32, a vocabulary of 264 x 32, and 32 x 32 positions. $work/dist is
# from a run with 2 x 1 ranks; the run with 2 x 2 ranks must write the same.
contents() {
    # shellcheck disable=SC2046 # split on purpose
    logged dumped 4 --gpus-per-node 2 "${paper[@]}" $(dump four) || return 1
    python3 - "$work/four" <<'END' 2>"$work/err" || { why=$(tail -n 1 "$work/err"); return 1; }
import collections, json, math, os, sys
names = sorted(os.listdir(sys.argv[1]))
assert names == [f"iter_{i:07d}.rank_{r:03d}.jsonl" for i in (6, 12) for r in range(4)], names
count, squares, binned = collections.Counter(), collections.Counter(), collections.Counter()
for name in names[:4]:
    lines = [json.loads(line) for line in open(os.path.join(sys.argv[1], name))]
    assert lines[0]["kind"] == "bins" and lines[0]["iteration"] == 6 and lines[0]["ranks"] == 4
    for item in lines[1:]:
        assert "norm" not in item["tensor"] and "bias" not in item["tensor"], item["tensor"]
        counted = sum(n for _, n in item["positive"] + item["negative"])
        assert item["count"] == item["zeros"] + counted, item["tensor"]
        count[item["kind"]] += item["count"]
        squares[item["kind"]] += item["squares"]
        for side in ("positive", "negative"):
            binned.update({(item["kind"], side, k): n for k, n in item[side]})
matrices = 2 * 12 * 32 * 32 + (264 + 32) * 32
assert count == {kind: matrices for kind in ("weight", "difference", "gradient", "gradient_hadamard")}, count
assert abs(squares["gradient_hadamard"] / squares["gradient"] - 1) < 1e-5, squares
spread = {kind: {key[1:]: n for key, n in binned.items() if key[0] == kind} for kind in count}
assert spread["gradient"] != spread["gradient_hadamard"]
rms = {kind: math.sqrt(squares[kind] / count[kind]) for kind in count}
assert 0.01 < rms["weight"] < 0.04, rms                      # --init-method-std 0.02
assert 1e-4 < rms["difference"] < 1.5 * 3e-3, rms             # a step of Adam is the learning rate or less
END
}
check "contents of the files" contents
rotation() { # NP FLAGS...: EDEN's rotation instead of the Hadamard transform, with the same norm
    local np=$1
    shift
    # shellcheck disable=SC2046 # split on purpose
    logged rotated "$np" --gpus-per-node 1 --quantized-gradients --gradient-quantization-method eden \
        --gq-group-size-intra 32 "$@" $(dump rotation) || return 1
    python3 - "$work/rotation" <<'END' 2>"$work/err" || { why=$(tail -n 1 "$work/err"); return 1; }
import collections, glob, json, sys
squares = collections.Counter()
for name in glob.glob(sys.argv[1] + "/iter_0000006.*"):
    for item in map(json.loads, open(name)):
        squares[item["kind"]] += item.get("squares", 0)
assert "gradient_hadamard" not in squares, squares
assert abs(squares["gradient_rotation"] / squares["gradient"] - 1) < 1e-5, squares
END
}
check "EDEN's rotation" rotation 2
# On one rank tensors are not padded to groups, so 24 x 24 matrices end inside a block of the
# transform.
check "EDEN's rotation of matrices that end inside a block" rotation 1 --hidden-size 24 --num-attention-heads 3
replaced() {
    cp -r "$work/four" "$work/before"
    # shellcheck disable=SC2046
    logged again 4 --gpus-per-node 2 "${paper[@]}" $(dump four) &&
        diff -r "$work/before" "$work/four" >"$work/diff" ||
        { why="files differ: $(head -n 1 "$work/diff")"; return 1; }
}
check "repeating the run writes the same files" replaced
plot_refuses() { # TEXT ARGUMENTS...
    local rc=0 text=$1
    shift
    dev/plot_distributions "$@" >"$work/out" 2>"$work/err" || rc=$?
    error_names 5 "$text" $rc
}
# The same iterations are dumped again on fewer ranks, as after a resume. The plot ignores old files
# of ranks that no longer exist, and refuses to combine files of two runs.
fewer_ranks() {
    cp -r "$work/four" "$work/fewer"
    # shellcheck disable=SC2046
    logged fewer 2 --gpus-per-node 1 "${paper[@]}" $(dump fewer) &&
        dev/plot_distributions "$work/fewer" >"$work/out" 2>"$work/err" || { say "failed"; return 1; }
    grep -qE '^weights +34048 ' "$work/out" && [ ! -s "$work/err" ] ||
        { why="$(grep '^weights' "$work/out") $(cat "$work/err")"; return 1; }
    cp "$work/four"/*.rank_003.jsonl "$work/fewer/"
    plot_refuses "of runs with 2 and 4 ranks" "$work/fewer"
}
check "the same iterations on fewer ranks" fewer_ranks
empty_shard() { # more ranks than groups, so the last ranks own no part of a matrix
    # shellcheck disable=SC2046
    logged empty 6 --quantized-weights --wq-group-size 8192 --global-batch-size 12 $(dump empty) &&
        dev/plot_distributions "$work/empty" >"$work/out" 2>"$work/err" || { say "failed"; return 1; }
    grep -qE '^weights +34048 ' "$work/out" && [ ! -s "$work/err" ] || { why="$(cat "$work/err")"; return 1; }
}
check "ranks that own no part of a matrix" empty_shard
drawn() {
    dev/plot_distributions "$work/four" --svg "$work/plot.svg" >"$work/out" 2>"$work/err" ||
        { say "exit code $?"; return 1; }
    python3 -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' "$work/plot.svg" ||
        { why="no SVG"; return 1; }
    grep -q '^iteration 12, 10 tensors' "$work/out" && grep -qE '^weights +34048 ' "$work/out" &&
        [ "$(grep -c '<polyline' "$work/plot.svg")" = 5 ] || { why="$(head -n 3 "$work/out")"; return 1; }
    dev/plot_distributions "$work/four" --iteration 6 --tensor 'layers.1.mlp.dense_h_to_4h' >"$work/out" \
        2>"$work/err" && grep -qE '^gradients +4096 ' "$work/out"
}
check "dev/plot_distributions" drawn
by_hand() { # files of two ranks with values 1, 1, -2 and 0: sigma sqrt(12 / 8), maximum 1.6 sigma
    mkdir "$work/hand"
    for rank in 0 1; do
        printf '{"kind":"bins","iteration":1,"rank":%d,"ranks":2,"bins":2048,"shift":20}\n{"kind":"gradient","tensor":"a","count":4,"zeros":1,"non_finite":0,"sum":0,"squares":6,"fourth":18,"largest":2,"positive":[[1016,2]],"negative":[[1024,1]]}\n' $rank >"$work/hand/iter_0000001.rank_00$rank.jsonl"
    done
    dev/plot_distributions "$work/hand" >"$work/out" 2>"$work/err" &&
        grep -qE '^gradients +8 +1.225e\+00 +2.000e\+00 +1.6 +-1.00 +25.00$' "$work/out" ||
        { why="$(tail -n 1 "$work/out")"; return 1; }
}
check "dev/plot_distributions: values computed by hand" by_hand
check "dev/plot_distributions: missing iteration" plot_refuses "use one of 6, 12" "$work/four" --iteration 7
check "dev/plot_distributions: missing tensor" plot_refuses "no tensor" "$work/four" --tensor decoder
check "dev/plot_distributions: missing directory" plot_refuses "absent" "$work/absent"
mkdir "$work/bad"
check "dev/plot_distributions: empty directory" plot_refuses "no files" "$work/bad"
printf "{\"kind\":\"bi" >"$work/bad/iter_0000001.rank_000.jsonl"
check "dev/plot_distributions: truncated file" plot_refuses "is not a valid file" "$work/bad"
: >"$work/file"
check "a directory that cannot be created is reported at the start" refused 3 "$work/file" 2 \
    --dump-distributions "$work/file/dist" --dump-distributions-interval 6
check "a directory in /proc is reported at the start" refused 3 "/proc/nope" 4 --dump-distributions /proc/nope \
    --dump-distributions-interval 6
blocked() { # a directory with the name of a dump file blocks it later in the run
    mkdir -p "$work/taken/iter_0000006.rank_000.jsonl"
    logged blocked 2 --dump-distributions "$work/taken" --dump-distributions-interval 6 || return 1
    grep -q 'warning: .*training continues without these histograms' "$work/err" &&
        [ "$(train_lines blocked | wc -l)" = 12 ] || { why="no warning, or no training"; return 1; }
}
check "a file that cannot be written causes a warning" blocked
check "a directory without an interval" refused 2 "need each other" 2 --dump-distributions "$work/x"
check "an interval without a directory" refused 2 "need each other" 2 --dump-distributions-interval 3
plan_shows() {
    ranks 1 "${model[@]}" "${batch[@]}" "${paper[@]}" --plan --plan-world-size 4 --gpus-per-node 2 \
        "${probe[@]}" && grep -q 'quantization error' "$work/out" ||
        { why="--plan does not name the scratch"; return 1; }
    ranks 1 "${model[@]}" "${batch[@]}" "${paper[@]}" --plan --plan-world-size 4 --gpus-per-node 2 &&
        ! grep -q 'quantization error' "$work/out" || { why="scratch without the flag"; return 1; }
}
check "memory is allocated only when enabled" plan_shows
finish
