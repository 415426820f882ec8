#!/usr/bin/env bash
# Python programs: --help works without the packages that a program needs. Wrong usage (exit code 2)
# and missing packages (3) print one line. Prints "ok NAME" and "not ok NAME".
set -u
cd "$(dirname "$0")/../../.." || exit 1
. test/results.sh
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
for package in numpy lm_eval pyarrow; do
    echo "raise ImportError('$package is not here')" >"$work/$package.py"
done
export PYTHONPATH=$work PYTHONDONTWRITEBYTECODE=1
# ends CODE COMMAND...: expects this exit code, and one line "error: ..." unless it is 0.
ends() {
    local code=$1 rc
    shift
    "$@" >"$work/out" 2>"$work/err"
    rc=$?
    [ $rc = "$code" ] || { why="exit code $rc instead of $code: $(tail -n 1 "$work/err")"; return 1; }
    if [ "$code" = 0 ]; then
        [ -s "$work/out" ] && [ ! -s "$work/err" ] || { why="nothing, or not on standard output"; return 1; }
    else
        [ "$(wc -l <"$work/err")" = 1 ] && grep -q '^error: .*; ' "$work/err" ||
            { why="not one line of error: $(head -n 2 "$work/err")"; return 1; }
    fi
}
for program in dev/checkpoint_info dev/compare_logs dev/harness_tasks dev/plot_distributions \
    dev/data/parquet_to_jsonl dev/data/render_chats dev/experiments/local_steps_model dev/experiments/study \
    dev/experiments/weight_entropy; do
    check "$program --help" ends 0 $program --help
    check "$program reports an unknown flag in one line" ends 2 $program --no-such-flag
done
check "study run reports an invalid value in one line" ends 2 dev/experiments/study run --data x --ranks none
check "dev/bench/presets_table --help" ends 0 dev/bench/presets_table --help
check "harness_tasks without lm_eval" ends 3 dev/harness_tasks piqa
check "weight_entropy without numpy" ends 3 dev/experiments/weight_entropy .
check "local_steps_model without numpy" ends 3 dev/experiments/local_steps_model x.bin 1,0
check "parquet_to_jsonl without pyarrow" ends 3 dev/data/parquet_to_jsonl x.parquet
check "render_chats without transformers" ends 3 dev/data/render_chats x
echo '{' >"$work/manifest.json"
check "checkpoint_info reports a damaged manifest" ends 6 dev/checkpoint_info "$work"
check "checkpoint_info names its path" grep -qF "$work/manifest.json is not JSON" "$work/err"
echo '{}' >"$work/manifest.json"
check "checkpoint_info reports a manifest of another program" ends 6 dev/checkpoint_info "$work"
check "checkpoint_info names its folder" grep -qF "$work: manifest.json has an unknown format" "$work/err"
finish
