#!/usr/bin/env bash
# Forks of dev/experiments/study. Part 1: statistics of synthetic results with known answers. Part
# 2: a real base run and forks of a tiny model: data, learning rate, replicates, resuming after an
# interruption, recreating a lost base run, and refused arguments.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the
# functions
. "$(dirname "$0")/../lib.sh"
same_kernels
make_shard text 600 8
data=$work/text_text_document
export BUILD
unset PRESET SPEED DATA_PATH CHECKPOINT_PATH LOG_DIR RANKS HOSTFILE MPIRUN_FLAGS DEVICE DRY_RUN
study=dev/experiments/study

# ---- synthetic results ---------------------------------------------------------------------------
# made FOLDER PRESET SEED LOSS [LENGTH]: writes the result of a fork
made() {
    mkdir -p "$work/$1"
    printf '{"arm":"%s","seed":%d,"seq_length":1000,"settings":{"model":"125m","trunk":"t","point":500,
"iterations":%d,"global_batch_size":10,"ranks":4,"ranks_per_node":2,"flags":[]},"data":"c","seconds":20,
"commit":"c","device":"d","parameters":7,"diverged":false,"bits":"%s","valid_loss":%s,
"train_loss":{"every":1,"mean":[3,%s]},"tokens_per_second":1000,"inter_node_bytes":2500000,
"errors":[[10,9,9],[90,0.1,1.5]]}\n' "$2" "$3" "${5:-100}" "$4" "$4" "$4" \
        >"$work/$1/$2.p500.l${5:-100}.d$3.json"
}
# Losses of baseline and replicate are 3.000 and 3.002 for data 0, 3.100 and 3.100 for data 1. The
# squared deviations 2e-6 + 0 over two degrees of freedom give a standard deviation of 0.001 per run
# and 0.00141 per gap.
made one baseline 0 3.000
made one twin1 0 3.002
made one baseline 1 3.100
made one twin1 1 3.100
made one baseline 2 3.2
# Gaps to the mean of baseline and replicates: 0.004, 0.006, 0.005; standard deviation 0.001.
made one sdp4bit 0 3.005
made one sdp4bit 1 3.106
made one sdp4bit 2 3.205
# Gaps of qwd: 0.0001 and 0.0003; of tlq-hs: 0.0100, 0.0102, 0.0101.
made one qwd 0 3.0011
made one qwd 1 3.1003
made one tlq-hs 0 3.0110
made one tlq-hs 1 3.1102
made one tlq-hs 2 3.2101
made one lossless 0 3.000
made one tlq 1 3.099
reports() {
    "$study" report "$@" --out "$work/page" >"$work/out" 2>"$work/err" || { say "exit code $?"; return 1; }
}
says() { # TEXT: the page contains it, regardless of line breaks
    tr -s ' \n' ' ' <"$work/page/125m-branches.md" | grep -qF -- "$(tr -s ' ' <<<"$1")" ||
        { why="no '$1' in $(grep -F "${1:0:12}" "$work/page/125m-branches.md" | head -n 3)"; return 1; }
}
# Half widths of the 95 % intervals, computed by hand:
#   sdp4bit            4.303 * 0.001 / sqrt(3) = 0.00248
#   qwd               12.706 * 0.000141 / sqrt(2) = 0.00127
#   tlq-hs             4.303 * 0.0001 / sqrt(3) = 0.00025
#   tlq                no interval, because it has a single gap
by_hand() {
    reports "$work/one" || return 1
    says 'The base run had read 5.0 M tokens. A fork reads 1.0 M tokens.' &&
        says '| baseline | 3 | 3.10033 | - | - | - |' &&
        says '| sdp4bit | 3 | 3.10533 | +0.00500 | 0.00248 | +0.161 | worse | 0.1000 | 1.500 |' &&
        says '| qwd | 2 | 3.05070 | +0.00020 | 0.00127 | +0.007 | inside the noise |' &&
        says '| tlq | 1 | 3.09900 | -0.00100 | - | -0.032 | one seed: inconclusive |' &&
        says 'standard deviation of 0.001414 (2 degrees of freedom)' &&
        says '- sdp4bit is as good as the baseline, to 0.003: **inconclusive** (+0.00500 ± 0.00248)' &&
        says '- qwd is as good as the baseline, to 0.003: holds (+0.00020 ± 0.00127)' &&
        says '- tlq-hs is as good as the baseline, to 0.003: **does not hold** (+0.01010 ± 0.00025)' &&
        says '- tlq is worse than tlq-hs: inconclusive with one seed (-0.01120 ± ?)' &&
        says '- lossless is bitwise identical to the baseline: holds, every loss and gradient norm in 1 fork' &&
        says '![p500_l100_gaps](125m-branches_p500_l100_gaps.svg)' &&
        [ -s "$work/page/125m-branches_p500_l100_gradient_error.svg" ]
}
check "gaps, intervals and conclusions with known answers" by_hand
# Gaps of fp8-delayed to the mean of baseline and replicates: 0.001, 0.001, 0.001. Gaps of
# sdp4bit-fp8-delayed to SDP4Bit: 0.0010, 0.0030, 0.0020; half width 4.303 * 0.001 / sqrt(3).
fp8() {
    cp -r "$work/one" "$work/fp8" && made fp8 fp8-delayed 0 3.002 && made fp8 fp8-delayed 1 3.101 &&
        made fp8 fp8-delayed 2 3.201 && made fp8 sdp4bit-fp8-delayed 0 3.006 &&
        made fp8 sdp4bit-fp8-delayed 1 3.109 && made fp8 sdp4bit-fp8-delayed 2 3.207 && reports "$work/fp8" &&
        says '| fp8-delayed | 3 | 3.10133 | +0.00100 | 0.00000 | +0.032 | worse |' &&
        says '- fp8-delayed is as good as the baseline, to 0.003: holds (+0.00100 ± 0.00000)' &&
        says '- sdp4bit-fp8-delayed is as good as sdp4bit, to 0.003: **inconclusive** (+0.00200 ± 0.00248)'
}
check "FP8 presets are compared with the same preset in bf16" fp8
other_bits() {
    cp -r "$work/one" "$work/bits" && made bits lossless 0 3.0000 && reports "$work/bits" &&
        says 'lossless is bitwise identical to the baseline: **does not hold** for data 0'
}
check "reports lossless weights that are not bit-exact" other_bits
# Forks needed for an interval of +-0.003, computed by hand. n forks with standard deviation s give
# t(n - 1) * s / sqrt(n). "limit" is the upper 90 % confidence limit of s: s * sqrt(f / q), where q
# is the 10 % quantile of chi squared with f degrees of freedom.
#               s          f  q        limit     forks for s            forks for the limit
#   replicates  0.001414   2  0.2107   0.00436   4 (3 give 0.00351)     11 (10 give 0.00312)
#   sdp4bit     0.001      2  0.2107   0.00308   3 (0.00248)             7 (6 give 0.00323)
#   qwd         0.000141   1  0.01579  0.001125                          3 (0.00280)
power() {
    "$study" power "$work/one" >"$work/out" 2>"$work/err" || { say "exit code $?"; return 1; }
    grep -qF '| 500 | 100 | replicates | 0.001414 | 2 | 0.004357 | 4 | 11 |' "$work/out" &&
        grep -qF '| 500 | 100 | sdp4bit | 0.001000 | 2 | 0.003081 | 3 | 7 |' "$work/out" &&
        grep -qF '| 500 | 100 | qwd | 0.000141 | 1 | 0.001125 | 2 | 3 |' "$work/out" &&
        ! grep -qF '| tlq |' "$work/out" &&
        grep -qF 'Cheapest plan: 7 forks per preset of 100 iterations from iteration 500, 140 s per preset.' "$work/out" &&
        grep -qF 'This follows from the upper 90 % limit of qwd, tlq-hs, sdp4bit.' "$work/out" || { why=$(tail -n 1 "$work/out"); return 1; }
}
check "number of forks needed for a known spread" power
cheapest() { # shorter forks with a larger spread need more forks than 7, at 20 s each
    cp -r "$work/one" "$work/two" && made two baseline 0 3.000 50 && made two baseline 1 3.000 50 &&
        made two qwd 0 3.000 50 && made two qwd 1 3.009 50 && "$study" power "$work/two" >"$work/out" &&
        grep -q '^Cheapest plan: 7 forks per preset of 100 ' "$work/out" ||
        { why=$(tail -n 1 "$work/out"); return 1; }
}
check "the cheapest of several designs" cheapest
replicates_alone() { # the noise of replicates gives the number of forks that every preset needs
    made eight baseline 0 3.000 && made eight replicate1 0 3.002 &&
        "$study" power "$work/eight" >"$work/out" &&
        grep -q '^Cheapest plan: at least [0-9]* forks per preset.* limit of replicates\.' "$work/out" ||
        { why=$(tail -n 1 "$work/out"); return 1; }
}
check "replicates alone give the minimum number" replicates_alone
refused() { # CODE TEXT COMMAND...
    local rc=0 code=$1 text=$2
    shift 2
    "$study" "$@" >"$work/out" 2>"$work/err" || rc=$?
    error_names "$code" "$text" $rc
}
made three replicate1 0 3
check "no baseline" refused 5 "run it first" report "$work/three" --out "$work/page"
check "no replicates" refused 5 "no data seed has a baseline and a replicate" power "$work/three"
made nine baseline 0 3 200
sed -i 's/"model":"125m"/"model":"125m-prose"/' "$work"/nine/*.json
check "forks on two corpora" refused 5 "differ in their model" \
    report "$work/one" "$work/nine" --out "$work/page"
check "no results" refused 5 "no fork in" power "$work/none"
cp -r "$work/one" "$work/four"
sed -i 's/"global_batch_size":10/"global_batch_size":20/' "$work/four/tlq.p500.l100.d1.json"
check "forks with different settings" refused 5 "different settings" report "$work/four" --out "$work/page"

# ---- real runs -----------------------------------------------------------------------------------
tiny=(--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 \
    --make-vocab-size-divisible-by 8 --tokenizer-type Byte)
place=(--data "$data" --device cpu --results "$work/study")
base_run() { # POINTS
    "$study" base "${place[@]}" --points "$1" --global-batch-size 8 --lr 3e-3 --warmup 4 --split 950,50,0 \
        "${@:2}" -- "${tiny[@]}" >"$work/out" 2>"$work/err"
}
forks() { # PRESETS SEEDS [OPTIONS...]
    "$study" fork "${place[@]}" --point 12 --length 8 --reserve 12 --error-interval 4 --presets "$1" \
        --seeds "$2" "${@:3}" >"$work/out" 2>"$work/err"
}
check "no base run" refused 5 "run \`study base\` first" fork "${place[@]}" --point 12 --length 8
base_run_exists() {
    base_run 6,12 || { say "exit code $?"; return 1; }
    grep -q '"points": {"6":"[0-9a-f]*","12":"[0-9a-f]*"}' "$work/study/125m-branches/trunk.json" ||
        { why="$(cat "$work/out")"; return 1; }
    base_run 6,12 && grep -qx 'the base run already has all points; nothing to do' "$work/out"
}
check "a base run is created once" base_run_exists
begun() { # SIGTERM before the first point; the base run's settings are already recorded
    local log=$work/study/raw/begun-branches/trunk/log.jsonl rc=0 job
    "$study" base "${place[@]}" --name begun --points 400 --global-batch-size 8 --lr 3e-3 --warmup 4 \
        --split 950,50,0 -- "${tiny[@]}" >"$work/out" 2>"$work/err" &
    job=$!
    wait_until grep -qs '"kind":"train"' "$log" || { say "no iteration was logged"; return 1; }
    kill -TERM $job
    wait $job
    [ -d "$work/study/raw/begun-branches/trunk.checkpoints" ] || { say "no checkpoint was saved"; return 1; }
    base_run 400 --name begun --lr 2e-3 || rc=$?
    error_names 5 "lr 0.003 and 0.002" $rc || return 1
    base_run 400 --name begun || { say "exit code $?"; return 1; }
    python3 - "$work/study/begun-branches/trunk.json" <<'END' 2>"$work/err" || say "$(tail -n 1 "$work/err")"
import json, sys
made = json.load(open(sys.argv[1]))
assert len(made["train_loss"]["mean"]) == 400 and list(made["points"]) == ["400"], made
END
}
twice() { # a killed base run logs the iterations after its last checkpoint again
    python3 - "$study" "$work/study/raw/begun-branches/trunk/log.jsonl" <<'END' 2>"$work/err" ||
import os, sys
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from accuracy import trainer
lines = trainer.read_lines(sys.argv[2])
again = [r for r in lines if r.get("iteration", 0) > 300]
assert trainer.summary(lines, False)["train_loss"] == trainer.summary(lines + again, False)["train_loss"]
END
        say "$(tail -n 1 "$work/err")"
}
check "an interrupted base run resumes, with its own settings only" begun
check "iterations trained twice count once" twice
repeats() { # needed for bitwise comparisons of lossless weights and of a recreated base run
    python3 - "$study" <<'END' 2>"$work/err" || say "$(tail -n 1 "$work/err")"
import os, sys, types
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from accuracy import base_run, forks
settings = {"global_batch_size": 8, "seed": 1, "split": "9,1,0", "lr": 1e-3, "warmup": 4, "flags": []}
for device, there in ("gpu", True), ("cpu", False):
    options = types.SimpleNamespace(
        device=device, micro_batch_size=1, global_batch_size=8, ranks=4, results="r", name="n", flags=[],
        point=6, length=4, evaluations=1, gpus_per_node=2, error_interval=0)
    made = base_run.base_run_flags(settings, options, [6]), forks.fork_flags(
        options, {"settings": settings}, "lossless", "start")
    assert all(("--deterministic-mode" in flags) == there for flags in made), made
END
}
check "on GPUs base run and forks are bitwise reproducible" repeats
first_call() {
    forks baseline,replicate1,sdp4bit 0,1 --minutes 0.0001 || { say "exit code $?"; return 1; }
    grep -q '^5 runs are left' "$work/out" || { why="$(cat "$work/out")"; return 1; }
    forks baseline,replicate1,sdp4bit 0,1 && grep -q '1 of 6 runs are done, 5 to do' "$work/out"
}
check "interrupted forks resume" first_call
lossless() { forks lossless 0 || say "exit code $?"; }
check "lossless weights" lossless
# Samples: the base run reads 0 to 95, forks with data 0 read 96 to 159, forks with data 1 160 to
# 223.
contents() {
    python3 - "$work/study" <<'END' 2>"$work/err" || { why=$(tail -n 1 "$work/err"); return 1; }
import json, sys
result = lambda preset, seed: json.load(open(f"{sys.argv[1]}/125m-branches/{preset}.p12.l8.d{seed}.json"))
log = lambda preset, seed: [json.loads(line) for line in
    open(f"{sys.argv[1]}/raw/125m-branches/{preset}.p12.l8.d{seed}/log.jsonl")]
steps = lambda preset, seed: [r for r in log(preset, seed) if r["kind"] == "train"]
base = steps("baseline", 1)
assert [r["iteration"] for r in base] == list(range(13, 21)), base
assert [r["consumed_samples"] for r in base] == list(range(96 + 72, 96 + 136, 8)), base
first = steps("baseline", 0)[0]["consumed_samples"]
assert first == 96 + 8, first
rates = [r["lr"] for r in base]
assert all(abs(rate - 3e-3 * (7 - i) / 8) < 1e-9 for i, rate in enumerate(rates)), rates
replicate = steps("twin1", 1)
assert replicate[0]["loss"] == base[0]["loss"] == steps("sdp4bit", 1)[0]["loss"], (replicate[0], base[0])
assert 0 < replicate[0]["lr"] / base[0]["lr"] - 1 < 2e-7
assert result("twin1", 1)["bits"] != result("baseline", 1)["bits"]
base_run = [json.loads(line) for line in open(f"{sys.argv[1]}/raw/125m-branches/trunk/log.jsonl")]
rates = [r["lr"] for r in base_run if r["kind"] == "train"]
assert abs(rates[0] - 3e-3 / 4) < 1e-9 and all(abs(r - 3e-3) < 1e-9 for r in rates[3:]), rates
quant = result("sdp4bit", 0)
assert [e[0] for e in quant["errors"]] == [4, 8] and 0.01 < quant["errors"][1][1] < 1, quant["errors"]
assert quant["evaluations"] == [[8, quant["valid_loss"]]] and quant["settings"]["iterations"] == 8
assert result("lossless", 0)["bits"] == result("baseline", 0)["bits"] != result("twin1", 0)["bits"]
END
}
check "samples and learning rates of forks, and the contents of a result" contents
real_report() {
    reports "$work/study/125m-branches" && says '| sdp4bit | 2 |' && says "holds, every loss and gradient norm in 1 fork" &&
        "$study" power "$work/study/125m-branches" >"$work/out" && grep -q '^| 12 | 8 | ' "$work/out"
}
check "report and power for real forks" real_report
# Forks whose settings differ from the forks in the base run's folder. On one rank there is no
# communication, so only the linear layers of an FP8 fork differ from the baseline.
one_rank() {
    local name
    forks baseline,fp8-tensorwise,fp8-delayed 0 --name one --base-run 125m --ranks 1 --gpus-per-node 1 &&
        forks sdp4bit-fp8-delayed 0 || { say "exit code $?: $(tail -n 1 "$work/err")"; return 1; }
    [ ! -e "$work/study/one-branches/trunk.json" ] || { say "another base run"; return 1; }
    for name in fp8-tensorwise fp8-delayed; do
        grep -q '"kind":"start".*"fp8_recipe":"'"${name#fp8-}"'"' \
            "$work/study/raw/one-branches/$name.p12.l8.d0/log.jsonl" || { say "$name did not use FP8"; return 1; }
    done
    python3 - "$work/study" <<'END' 2>"$work/err" || say "$(tail -n 1 "$work/err")"
import json, sys
result = lambda path: json.load(open(f"{sys.argv[1]}/{path}.p12.l8.d0.json"))
base = result("one-branches/baseline")
for name in "fp8-tensorwise", "fp8-delayed":
    fork = result("one-branches/" + name)
    assert fork["settings"] == base["settings"] and fork["settings"]["ranks"] == 1, fork["settings"]
    assert fork["inter_node_bytes"] == 0 and 0 < abs(fork["valid_loss"] - base["valid_loss"]) < 0.05, fork
both, quant = result("125m-branches/sdp4bit-fp8-delayed"), result("125m-branches/sdp4bit")
assert both["settings"] == quant["settings"] and both["inter_node_bytes"] == quant["inter_node_bytes"], both
assert both["bits"] != quant["bits"]
END
}
check "FP8 forks, and forks of another folder's base run" one_rank
larger_batch() { # data and learning rates are positions in samples, so the base run still fits
    local raw=$work/study/raw
    mkdir -p "$work/study/double-branches" "$raw/double-branches" &&
        cp "$work/study/125m-branches/trunk.json" "$work/study/double-branches" &&
        cp -r "$raw/125m-branches/trunk.checkpoints" "$raw/double-branches" &&
        forks baseline 1 --name double --global-batch-size 16 || { say "exit code $?"; return 1; }
    python3 - "$raw/double-branches/baseline.p12.l8.d1/log.jsonl" <<'END' 2>"$work/err" || { say "$(tail -n 1 "$work/err")"; return 1; }
import json, sys
steps = [r for r in map(json.loads, open(sys.argv[1])) if r["kind"] == "train"]
assert [r["iteration"] for r in steps] == list(range(13, 21)), steps
assert [r["consumed_samples"] for r in steps] == list(range(96 + 128 + 16, 96 + 257, 16)), steps
assert all(abs(r["lr"] - 3e-3 * (7 - i) / 8) < 1e-9 for i, r in enumerate(steps)), steps
END
    rc=0
    forks baseline 0 --name double --global-batch-size 36 || rc=$?
    error_names 2 "does not divide the samples" $rc
}
check "forks with a larger batch" larger_batch
again() { # the checkpoints are deleted; recreated ones are identical
    rm -r "$work/study/raw/125m-branches/trunk.checkpoints"
    rc=0
    forks tlq 0 || rc=$?
    error_names 5 "is missing or belongs to a different base run" $rc || return 1
    base_run 6,12 && forks tlq 0 || { say "exit code $?"; return 1; }
    grep -q '^tlq from 12 over 8, data 0: validation loss' "$work/out"
}
check "a lost base run is recreated" again
one_point() { # training cannot return to an earlier point, so the base run starts over
    rm -r "$work/study/raw/125m-branches/trunk.checkpoints/iter_0000006"
    base_run 6,12 && [ -e "$work/study/raw/125m-branches/trunk.checkpoints/iter_0000006" ] &&
        base_run 3,12 && grep -q '"points": {"6":"[0-9a-f]*","12":"[0-9a-f]*","3":"[0-9a-f]*"}' \
        "$work/study/125m-branches/trunk.json" ||
        { say "$(cat "$work/out" "$work/err" "$work/study/125m-branches/trunk.json")"; return 1; }
}
check "a lost point is recreated, and an earlier point is added" one_point
used_start() { # a start directory that another call is reading is not replaced
    local start=$work/study/raw/125m-branches/start.p12.l8.d0/iter_0000012 before
    before=$(stat -c %i "$start" "$start"/*.json) && forks sdp4bit 0 &&
        [ "$(stat -c %i "$start")" = "${before%%$'\n'*}" ] || say "the start folder was recreated"
}
check "a fork's start directory is kept while in use" used_start
longer() { # adds a later point and does not change the existing ones
    cp "$work/study/125m-branches/trunk.json" "$work/before.json"
    base_run 6,18 && python3 - "$work/before.json" "$work/study/125m-branches/trunk.json" <<'END'
import json, sys
before, now = (json.load(open(path))["points"] for path in sys.argv[1:])
assert set(now) == {"3", "6", "12", "18"} and all(now[p] == before[p] for p in before), (before, now)
END
}
check "a base run can be extended" longer
other_bits_base_run() {
    sed -i 's/"6":"[0-9a-f]*"/"6":"0123456789abcdef"/' "$work/study/125m-branches/trunk.json"
    rc=0
    base_run 6,12 || rc=$?
    error_names 5 "the base run differs from trunk.json" $rc
}
check "refuses a base run that is not bit-exact" other_bits_base_run
check "a base run with different settings" refused 5 "lr 0.003 and 0.002" base "${place[@]}" --points 6,12 \
    --global-batch-size 8 --lr 2e-3 --warmup 4 --split 950,50,0 -- "${tiny[@]}"
check "a point not in the base run" refused 2 "the base run's points are" fork "${place[@]}" --point 7 \
    --length 8
check "data that would repeat" refused 5 "data would repeat" fork "${place[@]}" --point 12 --length 8 \
    --seeds 99999
check "no point" refused 2 "must be integers" base "${place[@]}" --points x
check "deprecated names of commands" refused 2 "must be integers" trunk "${place[@]}" --points x
finish
