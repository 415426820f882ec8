#!/usr/bin/env bash
# dev/experiments/study. Part 1: statistics of synthetic results with known answers. Part 2: real
# runs of a tiny model: presets, skipping completed runs, a time budget, other settings, a failing
# run, several directories in one report.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
make_shard text 600 8
data=$work/text_text_document
export BUILD
unset PRESET SPEED DATA_PATH CHECKPOINT_PATH LOG_DIR RANKS HOSTFILE MPIRUN_FLAGS DEVICE DRY_RUN
study=dev/experiments/study

# ---- synthetic results ---------------------------------------------------------------------------
# made DIR PRESET SEED LOSS [BATCH]: writes a result with two logged errors, of which the one in the
# first half of the run is ignored.
made() {
    mkdir -p "$work/$1"
    printf '{"arm":"%s","seed":%d,"settings":{"model":"125m","iterations":100,"global_batch_size":%d,
"ranks":4,"ranks_per_node":2,"flags":[]},"seconds":1,"commit":"c","device":"d","parameters":7,
"diverged":false,
"valid_loss":%s,"train_loss":{"every":1,"mean":[3,2,%s]},"tokens_per_second":1000,"inter_node_bytes":2500000,
"errors":[[50,9,9],[60,0.1,1.5],[100,0.3,2.5]]}\n' "$2" "$3" "${5:-64}" "$4" "$4" >"$work/$1/$2.$3.json"
}
i=0
for loss in 3.00 3.02 2.98 3.04; do made one baseline $((i += 1)) $loss; done
i=0
for loss in 3.01 3.05 3.00 3.06; do made two sdp4bit $((i += 1)) $loss; done
made two qw-g2048 1 3.5
made two qwd 1 2.99
made two tlq 1 3.02
made two tlq-hs 1 3.02
reports() {
    "$study" report "$@" --out "$work/page" >"$work/out" 2>"$work/err" || { say "exit code $?"; return 1; }
}
# says TEXT: the page contains it, ignoring line breaks.
says() {
    tr -s ' \\\n' ' ' <"$work/page/125m.md" | grep -qF -- "$(tr -s ' ' <<<"$1")" ||
        { why="no '$1' in $(grep -F "${1:0:12}" "$work/page/125m.md" | head -n 3)"; return 1; }
}
# The gaps 0.01, 0.03, 0.02, 0.02 have mean 0.02 and standard deviation sqrt(0.0002 / 3) = 0.00816.
# With three degrees of freedom t = 3.182, so the half width of the interval is 0.01299 for four
# seeds and 0.02598 for one.
by_hand() {
    reports "$work/one" "$work/two" || return 1
    says '| baseline | 4 | 3.01000 | - | - | - |  | 0.2000 | 2.000 | 2.500 | 1,000 |' &&
        says '| sdp4bit | 4 | 3.03000 | +0.02000 | 0.01299 | +0.664 | worse | 0.2000 | 2.000 | 2.500 | 1,000 |' &&
        says '| qw-g2048 | 1 | 3.50000 | +0.50000 | 0.02598 | +16.667 | worse |' &&
        says '| qwd | 1 | 2.99000 | -0.01000 | 0.02598 | -0.333 | inside the noise |' &&
        says 'standard deviation of 0.02582 over 4 seeds' && says 'own standard deviation is 0.00816' &&
        says '- qw-g2048 is worse than qwd: holds (+0.51000 ± 0.02598)' &&
        says '- tlq is worse than tlq-hs: **inconclusive**, inside the noise (+0.00000 ± 0.02598)' &&
        says '- sdp4bit is as good as the baseline, to 0.003: **does not hold** (+0.02000 ± 0.01299)' &&
        says '- qwd is as good as the baseline, to 0.003: **inconclusive** (-0.01000 ± 0.02598)'
}
check "gaps, intervals and conclusions with known answers" by_hand
pictures() {
    local name
    for name in gaps training gradient_error replica_error; do
        says "![$name](125m_$name.svg)" &&
            python3 -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' \
            "$work/page/125m_$name.svg" || { why="the plot $name is wrong"; return 1; }
    done
}
check "the plots" pictures
warnings() {
    reports "$work/one" "$work/two" && says 'not a speed measurement' &&
        says 'Presets with one seed share one reference'
}
check "warnings on the page" warnings
fp8() { # the references are the baseline and SDP4Bit
    local i=0 loss
    cp -r "$work/one" "$work/fp8" && cp "$work"/two/sdp4bit.*.json "$work/fp8"
    for loss in 3.001 3.021 2.981 3.041; do made fp8 fp8-delayed $((i += 1)) $loss; done
    i=0
    for loss in 3.01 3.05 3.00 3.06; do made fp8 sdp4bit-fp8-blockwise $((i += 1)) $loss; done
    reports "$work/fp8" && says '## FP8 in these runs' &&
        says '- fp8-delayed is as good as the baseline, to 0.003: **inconclusive** (+0.00100 ±' &&
        says '- sdp4bit-fp8-blockwise is as good as sdp4bit, to 0.003: **inconclusive** (+0.00000 ±' &&
        grep -qF -- '- sdp4bit-fp8-blockwise is as good as sdp4bit' "$work/out" || return 1
    reports "$work/one" "$work/two" && ! grep -q FP8 "$work/page/125m.md" ||
        say "a page without FP8 mentions it"
}
check "FP8 presets are compared with the same preset in bf16" fp8
command_of() { # includes the micro-batch size only if all runs have the same
    local command='    dev/experiments/study run --data PREFIX --model 125m --iterations 100 --global-batch-size 64'
    cp -r "$work/one" "$work/eight" && reports "$work/eight" && says "$command --ranks 4 --gpus-per-node 2" ||
        return 1
    sed -i 's/"commit"/"micro_batch_size":8,&/' "$work"/eight/*.json && reports "$work/eight" &&
        says "$command --micro-batch-size 8 --ranks 4 --gpus-per-node 2" || return 1
    sed -i 's/"micro_batch_size":8/"micro_batch_size":4/' "$work/eight/baseline.2.json" &&
        reports "$work/eight" && says "$command --ranks 4 --gpus-per-node 2" || return 1
    reports "$work/one" && ! grep -q 'share one reference' "$work/page/125m.md" ||
        { why="a shared reference is mentioned"; return 1; }
}
check "the command that produced the runs" command_of
reversed() { # gaps with opposite signs and no noise estimate
    made three baseline 1 3.0 && made three tlq 1 2.8 && made three tlq-hs 1 2.9 && reports "$work/three" ||
        return 1
    says '| tlq | 1 | 2.80000 | -0.20000 | - | -6.667 | one seed: inconclusive |' &&
        says 'no gap can be distinguished from random' && says 'tlq is worse than tlq-hs: inconclusive with one seed'
}
check "no conclusion from a single seed" reversed
# Only the baseline has several seeds. Losses 3.0 and 3.2 have a standard deviation of 0.14142, that
# of a gap is sqrt(2) times larger, and t = 12.706.
from_baseline() {
    made three baseline 2 3.2 && reports "$work/three" &&
        says '| tlq | 1 | 2.80000 | -0.20000 | 2.54120 | -6.667 | inside the noise |'
}
check "noise is estimated from the baseline's seeds" from_baseline
# lost FOLDER PRESET SEED: writes the result of a run that diverged.
lost() {
    made "$1" "$2" "$3" null &&
        sed -i 's/"diverged":false/"diverged":true/; s/\[3,2,null\]/[3,2]/' "$work/$1/$2.$3.json"
}
for i in 1 2 3 4; do made six baseline $i 3.0$i; done
for i in 1 2 3; do made six sdp4bit $i 3.0$i; done
lost six sdp4bit 4
lost six qw-g2048 1
lost six ulq 1
made six tlq 1 3.01
lost six tlq-hs 1
diverged() {
    reports "$work/six" && says '| sdp4bit | 3 of 4 | 3.02000 | +0.00000 | - | +0.000 | diverged |' &&
        says '- sdp4bit is as good as the baseline, to 0.003: **does not hold**: 1 of 4 runs diverged,' &&
        says "runs diverged, compared with 0 of 4 baseline runs" &&
        says '- qw-g2048 is worse than baseline: holds (1 of 1 runs diverged)' &&
        says '- tlq is worse than tlq-hs: **does not hold**: 1 of 1 runs of tlq-hs diverged' &&
        says '- ulq is worse than tlq-hs: **inconclusive**: runs of both diverged' &&
        grep -q 'sdp4bit (1 diverged)' "$work/page/125m_gaps.svg" &&
        grep -q 'ulq (1 diverged)' "$work/page/125m_gaps.svg"
}
check "diverged runs count against their preset" diverged
# One preset has three gaps that are all 0.02 by chance. The gaps of another preset have a standard
# deviation of 0.00816. The pooled standard deviation is sqrt(0.0002 / 5) = 0.00632. Both presets
# share the baseline's runs, so t has only three degrees of freedom.
lucky() {
    local i=0 loss
    cp -r "$work/one" "$work/seven"
    for loss in 3.01 3.05 3.00 3.06; do made seven sdp4bit $((i += 1)) $loss; done
    i=0
    for loss in 3.02 3.04 3.00; do made seven qwd $((i += 1)) $loss; done
    reports "$work/seven" && says '| qwd | 3 | 3.02000 | +0.02000 | 0.01162 |'
}
check "equal gaps do not give an empty interval" lucky
wrong() { # TEXT FOLDERS...
    local rc=0 text=$1
    shift
    "$study" report "$@" --out "$work/page" >"$work/out" 2>"$work/err" || rc=$?
    error_names 5 "$text" $rc
}
made four baseline 1 3.0 32
check "results with different settings" wrong "global_batch_size" "$work/one" "$work/four"
made five baseline 1 9.0
check "two results for one run" wrong "baseline seed 1" "$work/one" "$work/five"
check "no baseline" wrong "run the baseline first" "$work/two"
printf '{"arm":' >"$work/five/qwd.1.json"
check "a truncated result" wrong "not a result of this program" "$work/five"
rm "$work/five"/*
made five baseline 1 null
check "a result without its loss" wrong "not a result of this program" "$work/five"

# ---- synthetic sweeps ----------------------------------------------------------------------------
# swept FOLDER PRESET NODES LR ITERATIONS SEED LOSS [BATCH]: writes a result of a sweep.
swept() {
    local lost=false
    [ "$7" != null ] || lost=true
    mkdir -p "$work/$1-sweep"
    printf '{"arm":"%s","seed":%d,"settings":{"model":"125m","iterations":%d,"global_batch_size":%d,"lr":%s,
"ranks":%d,"ranks_per_node":1,"eval_iterations":2,"warmup_fraction":0.05,"flags":[]},
"data":"text","commit":"c","device":"d","parameters":7,"diverged":%s,"valid_loss":%s,
"train_loss":{"every":1,"mean":[3]},"tokens_per_second":1000,"errors":[]}\n' \
        "$2" "$6" "$5" "${8:-64}" "$4" "$3" $lost "$7" \
        >"$work/$1-sweep/$2.$3x1.lr$4.i$5.$6.json"
}
# sweep_says FOLDER TEXT...: the page of the sweep contains the texts, ignoring line breaks.
sweep_says() {
    local text folder=$1
    shift
    "$study" report "$work/$folder-sweep" --out "$work/page" >"$work/out" 2>"$work/err" ||
        { say "exit code $?"; return 1; }
    for text; do
        tr -s ' \n' ' ' <"$work/page/125m-sweep.md" | grep -qF -- "$text" || {
            why="no '$text' in $(grep -F "${text:0:12}" "$work/page/125m-sweep.md" | head -n 3)"
            return 1
        }
    done
}
swept s baseline 1 0.001 1000 1 3.0
swept s baseline 1 0.001 1000 2 3.1
swept s baseline 1 0.002 1000 1 3.2
swept s baseline 1 0.004 1000 1 null
swept s muon 1 0.002 1000 1 2.9
swept s muon 1 0.002 1000 2 3.0
swept s muon 1 0.002 500 1 3.1
swept s muon 1 0.002 500 2 3.15
# The loss of seed 1 is reached in the middle of log(500) and log(1000), 0.5 * 2^(1/2) of the steps,
# and of seed 2 after a third, 0.5 * 2^(1/3). With one degree of freedom t = 12.706, so the half
# width is 12.706 * (0.7071 - 0.6300) / 2.
crossings() {
    sweep_says s '| muon | 1 x 1 | 1000 iterations, lr 0.001 | 1: 0.707, 2: 0.630 | 0.669 | 0.490 | inconclusive; goal inconclusive |' \
        '| baseline | 1 x 1 | 1000 | 0.001 | the smallest | 3.05000 | - | 0 |' \
        '| muon | 1 x 1 | 1000 | 0.002 | the only one | 2.95000 | baseline, lr 0.001 | 2 | -0.10000 | 0.00000 | -3.279 | better |' \
        '| muon | 1 x 1 | 500 | 0.002 | the only one | 3.12500 | - | 0 |' \
        '| baseline | 1 x 1 | 1000 | 0.004 | 1 | - (1 diverged) | - | 1,000 |' \
        'The best learning rate is at the edge of those run** (baseline, 1000 iterations)'
}
check "sweep: steps to the baseline's loss, with known answers" crossings
goal() { # three equal fractions reach the goal
    swept s baseline 1 0.001 1000 3 3.2 && swept s muon 1 0.002 1000 3 3.1 &&
        swept s muon 1 0.002 500 3 3.3 && swept s muon 1 0.002 500 2 3.2 &&
        sweep_says s '1: 0.707, 2: 0.707, 3: 0.707 | 0.707 | 0.000 | fewer steps; goal reached |' || return 1
    swept s muon 1 0.002 1000 3 3.25 && sweep_says s '3: >1.000 | - | - | outside the lengths run |' || return 1
    swept s muon 1 0.002 500 3 3.1 && sweep_says s '3: <0.500 | - | - | outside the lengths run |' || return 1
    swept s muon 1 0.002 1000 3 null && swept s muon 1 0.002 500 3 null &&
        sweep_says s '3: >1.000 | - | - |' '| 2.95000 (1 diverged) | baseline, lr 0.001 | 2 | -0.10000 | 0.00000 | -3.279 | diverged |'
}
check "sweep: the goal and bounds" goal
local_reference() { # local steps are compared with the same optimizer, which may have another layout
    swept s local 2 0.001 1000 1 3.3 && swept s muon-local 4 0.002 1000 1 2.958 &&
        sweep_says s '| local | 2 x 1 | 1000 | 0.001 | the only one | 3.30000 | baseline, lr 0.001 | 1 | +0.30000 | - | +10.000 | one seed: inconclusive |' \
            '| muon-local | 4 x 1 | 1000 | 0.002 | the only one | 2.95800 | muon, lr 0.002 | 1 | +0.05800 | - | +2.000 |'
}
check "sweep: the reference of local steps" local_reference
one_corpus() { # another file name of the same shard
    sed -i 's/"data":"text"/"data":"copy"/' "$work/s-sweep/muon.1x1.lr0.002.i1000.1.json" &&
        sweep_says s 'Corpus: `copy` (in some runs named `text`).' '| muon | 1 x 1 | 1000 | 0.002 |'
}
check "sweep: one corpus with two names" one_corpus
sweep_settings() {
    local rc=0
    swept s muon 1 0.002 1000 4 3.0 32
    "$study" report "$work/s-sweep" --out "$work/page" >"$work/out" 2>"$work/err" || rc=$?
    error_names 5 "global_batch_size 64 and 32" $rc || return 1
    swept t muon 1 0.002 1000 1 3.0
    rc=0
    "$study" report "$work/t-sweep" --out "$work/page" >"$work/out" 2>"$work/err" || rc=$?
    error_names 5 "run the baseline first" $rc
}
check "sweep: other settings and no baseline are refused" sweep_settings

# ---- real runs -----------------------------------------------------------------------------------
tiny=(--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 \
    --make-vocab-size-divisible-by 8 --tokenizer-type Byte --lr 3e-3 --min-lr 3e-4)
# runs CODE PRESETS SEEDS [OPTIONS...]: runs the study and checks its exit code
runs() {
    local rc=0 code=$1 presets=$2 seeds=$3
    shift 3
    "$study" run --data "$data" --device cpu --iterations 6 --global-batch-size 8 --eval-iterations 2 \
        --error-interval "${ERRORS:-2}" --warmup-fraction 0.2 \
        --results "$work/study" --presets "$presets" --seeds "$seeds" "$@" -- "${tiny[@]}" \
        ${extra[@]+"${extra[@]}"} >"$work/out" 2>"$work/err" || rc=$?
    [ $rc = "$code" ] || { say "exit code $rc instead of $code"; return 1; }
}
extra=()
first_call() {
    runs 0 baseline,sdp4bit 1,2 --minutes 0.0001 || return 1
    [ "$(find "$work/study/125m" -name '*.json' | wc -l)" = 1 ] && grep -q '^3 runs are left' "$work/out" ||
        { why="the time budget was not kept: $(cat "$work/out")"; return 1; }
}
check "--minutes leaves runs for the next call" first_call
second_call() {
    local before
    before=$(stat -c %Y.%i "$work/study/125m/baseline.1.json")
    runs 0 baseline,sdp4bit 1,2 || return 1
    grep -q '1 of 4 runs are done, 3 to do' "$work/out" &&
        [ "$(find "$work/study/125m" -name '*.json' | wc -l)" = 4 ] || { why="$(cat "$work/out")"; return 1; }
    [ "$before" = "$(stat -c %Y.%i "$work/study/125m/baseline.1.json")" ] ||
        { why="a finished run was repeated"; return 1; }
    runs 0 baseline,sdp4bit 1,2 && grep -q '4 of 4 runs are done, 0 to do' "$work/out"
}
check "the next call continues" second_call
contents() {
    python3 - "$work/study/125m" <<'END' 2>"$work/err" || { why=$(tail -n 1 "$work/err"); return 1; }
import json, math, sys
load = lambda name: json.load(open(f"{sys.argv[1]}/{name}.json"))
base, quant, other = load("baseline.1"), load("sdp4bit.1"), load("baseline.2")
assert base["micro_batch_size"] == 2 and "micro_batch_size" not in base["settings"], base
assert len(base["train_loss"]["mean"]) == 6 and base["nodes"] == 2 and base["valid_loss"] > 0, base
# The same initial weights and data: nothing is quantized before the first loss is computed.
assert base["train_loss"]["mean"][0] == quant["train_loss"]["mean"][0] != other["train_loss"]["mean"][0]
assert base["valid_loss"] != quant["valid_loss"]
assert base["inter_node_bytes"] > 3 * quant["inter_node_bytes"] > 0
assert [e[0] for e in quant["errors"]] == [2, 4, 6], quant["errors"]
assert all(e[1] == 0 and e[2] == 1 for e in base["errors"]), base["errors"]
assert all(0.01 < e[1] < 1 and e[2] > 1 for e in quant["errors"]), quant["errors"]
END
}
check "contents of a result" contents
real_report() {
    "$study" report "$work/study/125m" --out "$work/page2" >"$work/out" 2>"$work/err" &&
        grep -q '^| sdp4bit | 2 |' "$work/page2/125m.md" || say "the report was not written"
}
check "a report of real runs" real_report
shows() {
    "$study" status --results "$work/study" --presets baseline,qwd >"$work/out" &&
        grep -q '^baseline *1234 *to do' "$work/out" || say "status"
}
check "status" shows
other_settings() {
    extra=(--lr 1e-3)
    runs 5 baseline 1 && error_names 5 "choose another --results folder" 5
}
check "results with different settings are not mixed" other_settings
# --emulate-nodes changes only the transport, so results with and without it are comparable.
other_transport() {
    python3 - "$study" "$work" <<'END' 2>"$work/err" || say "$(tail -n 1 "$work/err")"
import os, sys, types
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from accuracy import scratch as study, trainer
study.data_fingerprint = lambda prefix: "same"
options = lambda *flags: types.SimpleNamespace(
    name="125m", iterations=1, global_batch_size=1, ranks=4, gpus_per_node=2, eval_iterations=1,
    warmup_fraction=0.05, data="", flags=list(flags), micro_batch_size=1, error_interval=0)
plain, emulated, other = options(), options("--emulate-nodes"), options("--lr", "1e-3")
assert study.settings_of(plain) == study.settings_of(emulated) != study.settings_of(other)
path = sys.argv[2] + "/one/baseline.1.json"
made = open(path).read()
open(sys.argv[2] + "/transport.json", "w").write(made.replace('"flags":[]', '"flags":["--emulate-nodes"]'))
settings = lambda path: trainer.read_result(path)["settings"]
assert '"flags":[]' in made and settings(sys.argv[2] + "/transport.json") == settings(path)
assert "--emulate-nodes" in study.trainer_flags(emulated, "baseline", 1)
END
}
check "--emulate-nodes is not part of the settings" other_transport
fails() {
    extra=()
    ERRORS=0 runs 1 qwd 3 --micro-batch-size 3 && grep -q 'qwd seed 3: exit code 2: error: ' "$work/err" &&
        [ ! -e "$work/study/125m/qwd.3.json" ] || say "the failed run has a result"
}
check "a failed run is reported and has no result" fails
# fails_alike CODE OPTIONS...: a usage or environment error would occur in every run, so the study
# ends after the first one. One line reports the failed run and another the remaining runs.
fails_alike() {
    local code=$1
    shift
    extra=()
    ERRORS=0 runs 1 baseline,qwd,tlq 4 "$@" || return 1
    [ "$(grep -c ": exit code $code: error: " "$work/err")" -eq 1 ] &&
        grep -qx "stopped: exit code $code will most likely repeat; 2 of 3 runs were not started" \
            "$work/err" || say "the study continued"
}
check "a usage error ends the study at its first run" fails_alike 2 --micro-batch-size 3
no_program() { BUILD=$work/none fails_alike 3; }
check "an environment error ends it too" no_program
claimed_elsewhere() { # skips a run that another process has locked
    extra=()
    mkdir -p "$work/study/raw/125m"
    (
        flock -n 9 || exit 1
        runs 0 tlq 3 && grep -q 'tlq seed 3: another process is running it' "$work/out" &&
            [ ! -e "$work/study/125m/tlq.3.json" ]
    ) 9>"$work/study/raw/125m/tlq.3.lock" || { why="$(cat "$work/out")"; return 1; }
    runs 0 tlq 3 && [ -e "$work/study/125m/tlq.3.json" ]
}
check "two processes do not execute the same run" claimed_elsewhere
usage() { # CODE TEXT OPTIONS...
    local rc=0 code=$1 text=$2
    shift 2
    "$study" "${command:-run}" --data "$data" --device cpu "$@" >"$work/out" 2>"$work/err" || rc=$?
    error_names "$code" "$text" $rc
}
check "an unknown preset" usage 2 "sdp4bit-nearest" --presets sdp5bit
check "an unknown model" usage 2 "train_1b.sh" --model 1b
check "no data" usage 5 "token shard" --data "$work/absent"
check "a folder that is not writable" usage 5 "/proc/none" --results /proc/none
# sweeps CODE OPTIONS...: runs a sweep on the CPU and checks its exit code.
sweeps() {
    local rc=0 code=$1
    shift
    "$study" sweep --data "$data" --device cpu --global-batch-size 8 --eval-iterations 2 \
        --warmup-fraction 0.2 --results "$work/study" "$@" -- "${tiny[@]}" >"$work/out" 2>"$work/err" || rc=$?
    [ $rc = "$code" ] || { say "exit code $rc instead of $code"; return 1; }
}
real_sweep() {
    sweeps 0 --lrs 3e-3,6e-3 --iterations 6,4 --seeds 1 && grep -q '0 of 8 runs are done' "$work/out" &&
        sweeps 0 --presets muon --lrs 6e-3 --iterations 4 --seeds 1,2 &&
        grep -q '1 of 2 runs are done' "$work/out" &&
        sweeps 0 --presets muon-local-eden2 --lrs 3e-3 --iterations 6 --seeds 1 --ranks 2 || return 1
    "$study" report "$work/study/125m-sweep" --out "$work/page2" >"$work/out" 2>"$work/err" &&
        grep -q '^| muon | 1 x 1 | 4 | 0.006 | 2 |' "$work/page2/125m-sweep.md" ||
        { say "the report"; return 1; }
    python3 - "$work/study" <<'END' 2>"$work/err" || { why=$(tail -n 1 "$work/err"); return 1; }
import json, sys
load = lambda name: json.load(open(f"{sys.argv[1]}/125m-sweep/{name}.1.json"))
log = lambda name: [json.loads(line) for line in open(f"{sys.argv[1]}/raw/125m-sweep/{name}.1/log.jsonl")]
adam, muon = load("baseline.1x1.lr0.003.i6"), load("muon.1x1.lr0.003.i6")
groups, short = load("muon-local-eden2.2x1.lr0.003.i6"), load("muon.1x1.lr0.003.i4")
assert adam["settings"] == muon["settings"] and adam["settings"]["lr"] == 0.003, adam["settings"]
assert short["settings"]["iterations"] == 4 and groups["settings"]["ranks"] == groups["nodes"] == 2, groups
# The same initial weights and data, with another optimizer, length and layout.
assert adam["train_loss"]["mean"][0] == muon["train_loss"]["mean"][0] == short["train_loss"]["mean"][0]
assert abs(groups["train_loss"]["mean"][0] - muon["train_loss"]["mean"][0]) < 1e-2, groups
assert adam["valid_loss"] != muon["valid_loss"] != groups["valid_loss"]
used = next(r for r in log("muon.1x1.lr0.003.i6") if r["kind"] == "start")["arguments"]
assert [used[k] for k in ("optimizer", "lr", "min_lr", "lr_decay_iters")] == ["muon", 0.003, 0, 6], used
END
}
check "a sweep: presets, learning rates, lengths and layouts" real_sweep
command=sweep check "a learning rate that is not positive" usage 2 "--lrs 1e-3,0" --lrs 1e-3,0
finish
