#!/bin/bash
# dev/compare_logs: known results, Megatron-LM's text, resumed and truncated logs, the plot's XML,
# and errors.
set -euo pipefail
cd "$(dirname "$0")/../../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
compare=dev/compare_logs
failures=0

fail() {
    echo "failed: $1"
    failures=$((failures + 1))
}
# has NAME TEXT: checks that the last output contains this line, ignoring the number of spaces
has() {
    tr -s ' ' < "$folder/out" | grep -qxF -- "$2" || { fail "$1"; cat "$folder/out" "$folder/err"; }
}
lacks() {
    if grep -qF -- "$2" "$folder/out"; then fail "$1"; fi
}
# runs CODE ARGUMENTS...: runs compare_logs and checks its exit code
runs() {
    local expected=$1 code=0
    shift
    "$compare" "$@" > "$folder/out" 2> "$folder/err" || code=$?
    [ "$code" = "$expected" ] ||
        { fail "exit code $code, not $expected: $*"; cat "$folder/out" "$folder/err"; }
}
# one_error TEXT: checks that the last run printed only this line to stderr
one_error() {
    if [ "$(wc -l < "$folder/err")" != 1 ] || ! grep -qF -- "$1" "$folder/err"; then
        fail "error line: $1"
        cat "$folder/err"
    fi
}
well_formed() {
    python3 -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' "$1" ||
        fail "plot is not well-formed"
}

# JSON lines. The reference's loss is 5 - i/100. The other loss is 0.03 higher at odd iterations and
# 0.05 at even ones. Over the last 20 iterations the gap is 0.04, its standard deviation 0.01 *
# sqrt(20/19) and its standard error 0.01 / sqrt(19) = 0.0023. Relative to the reference's mean of
# 4.095 it is 0.98 %.
json_log() { # add_odd add_even inter_bytes ms tokens_per_second last
    awk -v odd="$1" -v even="$2" -v bytes="$3" -v ms="$4" -v tokens="$5" -v last="$6" 'BEGIN {
        print "{\"kind\":\"start\",\"world_size\":4}"
        for (i = 1; i <= last; i++) {
            loss = 5 - i / 100 + (i % 2 ? odd : even)
            printf "{\"kind\":\"train\",\"iteration\":%d,\"loss\":%.17g,\"skipped\":false}\n", i, loss
            if (i % 10 == 0) {
                printf "{\"kind\":\"interval\",\"iteration\":%d,\"iterations\":10,\"loss\":%.17g,", i, loss
                printf "\"global_batch_size\":8,\"inter_node_bytes\":%d,\"intra_node_bytes\":2500000,", bytes
                printf "\"timing\":{\"elapsed_ms\":%g,", i == 10 ? 9999 : ms
                printf "\"tokens_per_second\":%g,", i == 10 ? 1 : tokens
                printf "\"exposed_comm_ms\":%g}}\n", ms / 10
            }
            if (i % 50 == 0) {
                printf "{\"kind\":\"valid\",\"iteration\":%d,\"split\":\"valid\",\"where\":\"x\",", i
                printf "\"loss\":%.17g,\"ppl\":1}\n", loss + 0.5
            }
        }
        printf "{\"kind\":\"valid\",\"iteration\":100,\"split\":\"test\",\"where\":\"x\","
        print "\"loss\":99,\"ppl\":1}"
        printf "{\"kind\":\"trai"
    }'
}
json_log 0 0 40000000 200 1000 100 > "$folder/base.jsonl"
json_log 0.03 0.05 10000000 160 1250 100 > "$folder/quant.jsonl"
runs 0 base="$folder/base.jsonl" quant="$folder/quant.jsonl" --curves 3 --svg "$folder/a.svg"
has "reference row" "base 100 4.0000 4.0950 - - - 4.5000 - 1,000 40.000 2.500 20.0"
has "other row" "quant 100 4.0500 4.1350 +0.0400 +0.98 0.0023 4.5500 +1.11 1,250 10.000 2.500 16.0"
has "the meaning of tail noise" \
    "tail noise: standard error of the mean over the tail of this pair of runs, which does not"
has "the variation between seeds" "include the variation between seeds, many times as large (see --help)"
[ "$(grep -c '^tail noise' "$folder/out")" = 1 ] || fail "the meaning of tail noise is printed once"
head -n 1 "$folder/out" | grep -q ' gap  *tail ' || fail "column headings"
has "note" "quant: loss +0.98 % compared with base over iterations 81 to 100, \
4.00x fewer bytes between nodes, 1.25x its tokens/s"
has "curves, head" "iteration base quant difference"
has "curves, first row" " 1 4.9900 5.0200 +0.0300"
has "curves, middle row" " 50 4.5950 4.6350 +0.0400"
has "curves, last row" " 100 4.0950 4.1350 +0.0400"
[ ! -s "$folder/err" ] || fail "a truncated last line causes a note"
well_formed "$folder/a.svg"
[ "$(grep -c '<polyline' "$folder/a.svg")" = 9 ] ||
    fail "plot: two raw, two smoothed lines and a difference over iterations, four lines over time"
for text in '>base<' '>quant<' '>training loss<' '>iteration<' '>difference<' '>4.0950<' \
    '>training time (seconds'; do
    grep -qF -- "$text" "$folder/a.svg" || fail "plot lacks $text"
done
runs 0 base="$folder/base.jsonl" quant="$folder/quant.jsonl" --smooth 50
has "another window" "quant 100 4.0500 4.2850 +0.0400 +0.94 0.0014 4.5500 +1.11 1,250 10.000 2.500 16.0"

runs 0 base="$folder/base.jsonl" quant="$folder/quant.jsonl" --smooth 2
has "a narrow window, of every iteration" \
    "quant 100 4.0500 4.0450 +0.0400 +1.00 0.0100 4.5500 +1.11 1,250 10.000 2.500 16.0"

runs 0 base="$folder/base.jsonl" quant="$folder/quant.jsonl" --x iteration --svg "$folder/i.svg"
well_formed "$folder/i.svg"
[ "$(grep -c '<polyline' "$folder/i.svg")" = 5 ] || fail "a plot over iterations has five lines"
if grep -q 'training time' "$folder/i.svg"; then fail "a plot over iterations shows time"; fi

# Over time, the faster run's curve ends at 10 * 9.999 + 90 * 0.16 = 114.39 s, the other one at
# 117.99 s. The axis starts at pixel 92 and is 720 pixels long.
for end in "base 812.0" "quant 790.0"; do
    grep -o '<polyline class="soft[^>]*>' "$folder/a.svg" | tail -n 2 | grep -q " ${end#* },[0-9.]*\"/>" ||
        fail "the curve of ${end% *} ends at the wrong time"
done

# Ten iterations have a gap of 0.03, then ten a gap of 0.05. The correlation r = 17/20 of neighbors
# makes the standard error larger: 0.01 / sqrt(19) * sqrt(1.85 / 0.15) = 0.0081.
two_steps() { # ABOVE_FIRST_TEN ABOVE_LAST_TEN
    awk -v a="$1" -v b="$2" 'BEGIN { for (i = 1; i <= 20; i++)
        printf "{\"kind\":\"train\",\"iteration\":%d,\"loss\":%.17g}\n", i, 5 - i / 100 + (i <= 10 ? a : b) }'
}
two_steps 0.03 0.05 > "$folder/drift.jsonl"
two_steps 0 0 > "$folder/straight.jsonl"
runs 0 straight="$folder/straight.jsonl" drift="$folder/drift.jsonl"
grep -q '^drift .* +0.0400 .* 0.0081$' "$folder/out" || fail "standard error of correlated neighbors"
runs 0 straight="$folder/straight.jsonl" drift="$folder/drift.jsonl" --svg "$folder/d.svg"
if grep -q 'training time' "$folder/d.svg"; then fail "logs without times are plotted over iterations"; fi

# Time: 10 iterations of 9.999 s, 90 of 0.2 s.
runs 0 base="$folder/base.jsonl" quant="$folder/quant.jsonl" --x time --svg "$folder/t.svg"
well_formed "$folder/t.svg"
grep -q 'training time (seconds' "$folder/t.svg" || fail "plot over time: axis"
lacks "a difference over time" "difference"

# Logs without a name get the name of their file or of their folder.
mkdir "$folder/run7"
cp "$folder/base.jsonl" "$folder/run7/log.jsonl"
runs 0 "$folder/base.jsonl" "$folder/run7/log.jsonl"
grep -q '^base ' "$folder/out" || fail "a log is named after its file"
runs 0 "$folder/base.jsonl"
lacks "one log has no gap, nor its noise" "noise"
runs 0 "$folder/base.jsonl" "$folder/run7/log.jsonl"
grep -q '^run7 .*+0.0000' "$folder/out" || fail "a log is named after its folder"

grep -q '^run7: loss +0.00 % .*, the same number of bytes between nodes' "$folder/out" || fail "comparison of equal logs"

# A log may have byte counts and no speed, or a speed and no byte counts.
sed 's/"tokens_per_second":[0-9]*,//' "$folder/quant.jsonl" > "$folder/slow.jsonl"
runs 0 base="$folder/base.jsonl" slow="$folder/slow.jsonl"
has "no speed" "slow: loss +0.98 % compared with base over iterations 81 to 100, 4.00x fewer bytes between nodes"
sed 's/"inter_node_bytes":[0-9]*,//' "$folder/quant.jsonl" > "$folder/mute.jsonl"
runs 0 base="$folder/base.jsonl" mute="$folder/mute.jsonl"
has "no bytes" "mute: loss +0.98 % compared with base over iterations 81 to 100, 1.25x its tokens/s"

# If one log is shorter, the last common iterations are compared: 41 to 60.
json_log 0.03 0.05 10000000 160 1250 60 > "$folder/short.jsonl"
runs 0 base="$folder/base.jsonl" short="$folder/short.jsonl"
grep -qF 'compared with base over iterations 41 to 60' "$folder/out" || fail "common iterations"
grep -qF '+0.0400' "$folder/out" || fail "gap at common iterations"

# A run reached iteration 60 and was resumed from 40, now at 50. Iterations 51 to 60 of the first
# part are dropped.
{
    json_log 1 1 40000000 200 1000 60 | sed '$d'
    printf '{"kind":"trai\n'
    json_log 0 0 40000000 200 1000 50 | awk '/"start"/ || /"test"/ {next}
        match($0, /"iteration":[0-9]+/) {if (substr($0, RSTART + 12, RLENGTH - 12) + 0 > 40) print}'
} > "$folder/resumed.jsonl"
runs 0 r="$folder/resumed.jsonl"
# The mean of the last 20 iterations is 5.095: 4.545 for iterations 41 to 50 of the second part, and
# 5.645 for 31 to 40 of the first part.
grep -q '^r  *50  *4.5000  *5.0950 ' "$folder/out" || fail "losses of a resumed run"
grep -q '1 unreadable JSON lines' "$folder/err" || fail "a truncated line inside the log is not reported"

# Two runs in one file are distinguished by the flags at their start, except folders and lengths.
part() { # FIRST LAST FLAGS
    awk -v first="$1" -v last="$2" -v flags="$3" 'BEGIN {
        print "{\"kind\":\"start\",\"arguments\":" flags "}"
        for (i = first; i <= last; i++) printf "{\"kind\":\"train\",\"iteration\":%d,\"loss\":5}\n", i
    }'
}
plain='{"quantized_weights":false,"lr":0.1,"load":null,"exit_interval":null}'
quantized='{"quantized_weights":true,"lr":0.2,"load":null,"exit_interval":null}'
{ part 1 30 "$plain"; part 1 20 "$quantized"; part 11 20 "$quantized"; } > "$folder/twice.jsonl"
runs 0 t="$folder/twice.jsonl"
one_error "note: t: iterations starting at 1 occur twice, the second time with different lr, \
quantized_weights: the file contains two runs"
elsewhere='{"quantized_weights":false,"lr":0.1,"load":"x","exit_interval":7}'
{ part 1 30 "$plain"; part 21 40 "$elsewhere"; part 41 50 "$quantized"; } > "$folder/once.jsonl"
runs 0 "$folder/once.jsonl"
[ ! -s "$folder/err" ] || fail "no note about a run that was resumed: $(cat "$folder/err")"
{ part 1 30 3; part 1 20 '[1]'; part 1 20 "$plain"; } > "$folder/flagless.jsonl"
runs 0 "$folder/flagless.jsonl"
[ ! -s "$folder/err" ] || fail "no note without flags to compare: $(cat "$folder/err")"

# Megatron-LM's text: a line of a real run, time stamps of newer versions, prefixes of launchers, an
# incomplete last line.
cat > "$folder/megatron.log" <<'END'
  seq_length ...................................... 2048
[after dataloaders are built] datetime: 2024-05-05 10:00:00
 iteration      100/   80000 | consumed samples:          400 | elapsed time per iteration (ms): 913.0 | throughput per GPU (TFLOP/s/GPU): 20.3 | learning rate: 2.857E-05 | global batch size:     4 | lm loss: 9.000000E-02 | loss scale: 1.0 | grad norm: 0.500 | number of skipped iterations:   0 | number of nan iterations:   0 |
 iteration      200/   80000 | consumed samples:          800 | elapsed time per iteration (ms): 733.7 | throughput per GPU (TFLOP/s/GPU): 25.3 | learning rate: 5.714E-05 | global batch size:     4 | lm loss: 8.118460E-03 | loss scale: 1.0 | grad norm: 0.053 | number of skipped iterations:   0 | number of nan iterations:   0 |
(min, max) time across ranks (ms):
    forward-backward ...............................: (209.10, 210.20)
-----------------------------------------------------------------------------------------------
 validation loss at iteration 200 | lm loss value: 8.013795E-03 | lm loss PPL: 1.008046E+00 | 
-----------------------------------------------------------------------------------------------
3:  [2024-10-28 11:02:03] iteration      300/   80000 | consumed samples:         1200 | elapsed time per iteration (ms): 733.7 | learning rate: 8.571429E-05 | global batch size:     4 | lm loss: 7.000000E-03 | loss scale: 1.0 | grad norm: 0.050 | number of skipped iterations:   0 | number of nan iterations:   0 |
END
printf ' iteration      400/   80000 | consumed samples:         1600 | lm loss: 6.0' >> \
    "$folder/megatron.log"
runs 0 megatron="$folder/megatron.log" --svg "$folder/m.svg" --x time
# 4 * 2048 tokens in 0.7337 s are 11165 tokens/s. Columns that Megatron-LM does not log are omitted.
has "Megatron's text" "megatron 300 0.0070 0.0350 0.0080 11,165"
well_formed "$folder/m.svg"

# Two Megatron-LM logs with an interval of 100. The window is widened to five intervals, 600 to
# 1000, with gaps of 0.03, 0.05, 0.03, 0.05, 0.03. Their mean is 0.038 (relative to 4.76), their
# standard deviation sqrt(0.00048 / 4). Neighbors are uncorrelated, so the standard error is 0.0049.
for add in 0 0.03; do
    awk -v add=$add 'BEGIN { for (i = 100; i <= 1000; i += 100) {
        printf " iteration %8d/%8d | consumed samples: %12d |", i, 1000, 8 * i
        printf " elapsed time per iteration (ms): 160.0 | global batch size: %5d |", 8
        printf " lm loss: %.6E |", 5 - i / 1000 * 0.3 + (add ? add + (i % 200 == 100 ? 0.02 : 0) : 0)
        print " number of skipped iterations:   0 |"
    } }' > "$folder/mega-$add.log"
done
runs 0 a="$folder/mega-0.log" b="$folder/mega-0.03.log" --curves 2
has "a note about a window of five log intervals" "means are over the last 500 iterations: with a log \
interval of 100, --smooth 20 would have fewer than 5 values"
has "a window of five log intervals" "b 1000 4.7300 4.7980 +0.0380 +0.80 0.0049"
has "and in the curves" "loss, mean of the last 500 iterations"
runs 0 a="$folder/mega-0.log" b="$folder/mega-0.03.log" --smooth 700
lacks "a window that is wide enough stays" "would hold fewer"
grep -q 'last 700' "$folder/out" || fail "a window that is wide enough was changed"

# This program's text is compared with JSON lines of the same run over complete log intervals, at
# least five.
awk 'BEGIN { for (i = 10; i <= 100; i += 10) {
    printf " iteration %8d/%8d | consumed samples: %12d |", i, 100, 8 * i
    printf " elapsed time per iteration (ms): 160.0 | learning rate: 1.000E-04 |"
    printf " global batch size: %5d | lm loss: %.6E |", 8, 5 - (i - 4.5) / 100 + 0.04
    printf " loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 |"
    printf " number of nan iterations:   0 | tokens/s: 1250 | MFU: 41.5%% | inter-node MB/step: 10.000 |"
    print " intra-node MB/step: 2.500 | exposed comm (ms): 16.0 | ETA: 1h02m | epoch: 0.125 |"
} }' > "$folder/quant.log"
runs 0 base="$folder/base.jsonl" quant="$folder/quant.log"
has "text against JSON lines" "quant 100 4.0850 4.2850 +0.0400 +0.94 0.0000 - 1,250 10.000 2.500 16.0"
runs 0 quant="$folder/quant.log" base="$folder/base.jsonl"
grep -q '^base .* -0.0400  *-0.93 ' "$folder/out" || fail "comparison in the other direction"

# NaN in three forms: JSON null, "nan" in this program's text, and a field that Megatron-LM omits.
# The plot has a gap.
{
    sed '$d' "$folder/base.jsonl"
    echo '{"kind":"train","iteration":101,"loss":null,"loss_text":"nan","skipped":true}'
} > "$folder/nan.jsonl"
runs 0 base="$folder/base.jsonl" nan="$folder/nan.jsonl" --svg "$folder/n.svg"
grep -q '^nan  *101  *nan  *nan  *+0.0000 ' "$folder/out" || fail "NaN in JSON lines"
grep -q '^nan: the loss is nan from iteration 101 to the end$' "$folder/out" || fail "NaN in the notes"
well_formed "$folder/n.svg"
if grep -q 'nan,\|,nan\|"nan"' "$folder/n.svg"; then fail "NaN coordinates in the plot"; fi
for field in ' lm loss: nan |' ''; do
    sed '$d' "$folder/quant.log" > "$folder/nan.log"
    tail -n 1 "$folder/quant.log" | sed "s/ lm loss: [^|]*|/$field/" >> "$folder/nan.log"
    runs 0 x="$folder/nan.log"
    grep -q '^x  *100  *nan  *nan ' "$folder/out" || fail "NaN in text"
done

# Names that XML must escape.
runs 0 "a<b>&\"c\"=$folder/base.jsonl" --svg "$folder/e.svg"
well_formed "$folder/e.svg"

runs 0 --help
grep -q '"tail noise"' "$folder/out" || fail "--help explains the tail noise"

# Errors print one line. Exit code 5, or 2 for wrong usage.
runs 5 "$folder/absent.jsonl"
one_error "absent.jsonl: No such file"
: > "$folder/empty"
runs 5 "$folder/empty"
one_error "no training lines"
head -c 3000 /dev/urandom > "$folder/noise"
runs 5 "$folder/noise"
one_error "no training lines"
runs 5 "$folder"
one_error "Is a directory"
awk 'BEGIN { print "{\"kind\":\"train\",\"iteration\":500,\"loss\":1}" }' > "$folder/later.jsonl"
runs 5 "$folder/base.jsonl" "$folder/later.jsonl"
one_error "no iteration in common"
runs 5 "$folder/later.jsonl" --svg "$folder/x.svg" --x time
one_error "plot it over iterations"
runs 5 "$folder/base.jsonl" --svg "$folder/none/x.svg"
one_error "choose another path"
runs 2 "$folder/base.jsonl" --curves 0
runs 2
printf '%s\n' '{"kind":"train","iteration":"x"}' '[1]' '{"kind":"train"}' \
    '{"kind":"train","iteration":1,"loss":{}}' \
    '{"kind":"interval","iteration":1,"timing":3}' '{' > "$folder/odd"
cat "$folder/base.jsonl" >> "$folder/odd"
runs 0 "$folder/odd"
grep -q '^odd  *100  *4.0000' "$folder/out" || fail "damaged lines before good ones"

# hostile NAME UNREADABLE LINES...: puts lines that no run writes before good lines in a log, which
# is compared and plotted. UNREADABLE lines are ignored and counted; the others are read without the
# non-numeric field.
hostile() {
    local name=$1 unreadable=$2
    shift 2
    { printf '%s\n' "$@"; cat "$folder/base.jsonl"; } > "$folder/hostile.jsonl"
    runs 0 base="$folder/base.jsonl" h="$folder/hostile.jsonl" --curves 3 --svg "$folder/h.svg"
    grep -q '^h  *100  *4.0000  *4.0950  *+0.0000 .* 1,000  *40.000  *2.500  *20.0$' "$folder/out" ||
        { fail "hostile: $name"; cat "$folder/out"; }
    if [ "$unreadable" = 0 ]; then
        [ ! -s "$folder/err" ] || { fail "hostile: $name: $(tail -n 1 "$folder/err")"; }
    else
        one_error "h: $unreadable unreadable JSON lines"
    fi
    well_formed "$folder/h.svg"
}
long=1$(head -c 400 /dev/zero | tr '\0' 0)
longer=$long$(head -c 6000 /dev/zero | tr '\0' 0)
nested=$(head -c 100000 /dev/zero | tr '\0' '[')
lines=()
for value in 1e400 NaN 1.5 -3 "$long" "$longer" true; do
    lines+=("{\"kind\":\"train\",\"iteration\":$value,\"loss\":1}")
done
hostile "iterations that are not integers" 7 "${lines[@]}"
lines=()
for value in 1e400 '[]' "$long"; do
    lines+=("{\"kind\":\"interval\",\"iteration\":1,\"iterations\":$value,\"loss\":5,\"timing\":{}}")
done
hostile "spans that are not integers" 3 "${lines[@]}"
hostile "nested a hundred thousand times" 1 "{\"kind\":$nested"
hostile "a loss nested deep" 0 '{"kind":"train","iteration":0,"loss":{"a":[1]}}'
hostile "a long line of text" 0 "$nested" " iteration $longer/ 10 | lm loss: 1.0 |" \
    "validation loss at iteration $longer | lm loss value: 1.0 | lm loss PPL: 1.0 |"
for value in '"x"' '[1]' '{}' 1e400 -1e400 NaN true "$long"; do
    form='{"kind":"interval","iteration":1,"iterations":1,"loss":5,%s,"timing":{%s}}'
    # shellcheck disable=SC2059 # $form is a format
    hostile "fields that are $value" 0 "$(printf "$form" \
        "\"global_batch_size\":$value,\"inter_node_bytes\":$value,\"intra_node_bytes\":$value" \
        "\"elapsed_ms\":$value,\"tokens_per_second\":$value,\"exposed_comm_ms\":$value")"
done
# A valid number may be too large: the sum of ten such times is infinite.
sed 's/"elapsed_ms":200/"elapsed_ms":1e308/' "$folder/base.jsonl" > "$folder/huge.jsonl"
runs 5 "$folder/huge.jsonl" --x time --svg "$folder/h.svg"
one_error "too large or too small; look for"
# A percentage of a zero reference loss is undefined.
printf '{"kind":"train","iteration":1,"loss":0}\n{"kind":"valid","iteration":1,"split":"valid","loss":0}\n' \
    > "$folder/zero.jsonl"
runs 0 a="$folder/zero.jsonl" b="$folder/zero.jsonl"
grep -q '^b .* nan ' "$folder/out" || fail "percentage of a zero reference loss"

if [ "$failures" != 0 ]; then
    echo "compare_logs: $failures checks failed"
    exit 1
fi
echo "compare_logs: all checks passed"
