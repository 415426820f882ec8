#!/usr/bin/env bash
# Communication benchmarks on CPU ranks: several presets trained in one process (with the same
# results as in separate processes), synchronization-only runs, and the tables of
# dev/bench/comm.sh and save.sh. Also checks that initial weights do not depend on the number of
# threads.
# shellcheck source-path=SCRIPTDIR source=../lib.sh disable=SC2015,SC2054,SC2317 # check calls the functions
. "$(dirname "$0")/../lib.sh"
presets=$BUILD/dev/bench/train_presets_cpu synchronize=$BUILD/dev/bench/sync_only_cpu
bound=$BUILD/dev/bench/step_bound
for program in "$presets" "$synchronize" "$bound"; do
    [ -x "$program" ] || { not_ok "${program##*/}" "not built; run make bench BUILD=$BUILD"; finish; }
done
make_shard text 400 7
data=$work/text_text_document

# --- several presets in one process ---------------------------------------------------------------
# start NP PROGRAM ARGS...: like ranks, but runs another program.
start() {
    local np=$1
    shift
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np "$np" "$@" >"$work/out" 2>"$work/err" </dev/null
}
common=("${model[@]}" "${batch[@]}" --data-path "$data" --gpus-per-node 2 --train-iters 6)
one_process() {
    local name
    rm -f "$work"/preset_*.jsonl
    start 4 "$presets" --loopback "$work/loopback" "${common[@]}" \
        --preset first --log-jsonl "$work/preset_first.jsonl" \
        --preset second "${paper[@]}" --log-jsonl "$work/preset_second.jsonl" \
        --preset third --grad-reduce-in-bf16 --seed 7 --log-jsonl "$work/preset_third.jsonl" ||
        { say "exit code $?"; return 1; }
    logged alone_first 4 --gpus-per-node 2 --train-iters 6 &&
        logged alone_second 4 --gpus-per-node 2 --train-iters 6 "${paper[@]}" &&
        logged alone_third 4 --gpus-per-node 2 --train-iters 6 --grad-reduce-in-bf16 --seed 7 || return 1
    for name in first second third; do
        same_training "preset_$name" "alone_$name" || { why="$name: $why"; return 1; }
    done
    train_lines preset_first >"$work/left"
    train_lines preset_second >"$work/right"
    ! cmp -s "$work/left" "$work/right" || { why="two presets have the same losses"; return 1; }
    [ "$(grep -c '^{"arm":"[a-z]*","loopback_bytes":[0-9]*}$' "$work/loopback")" -eq 3 ] ||
        { why="no loopback bytes of three presets"; return 1; }
}
check "three presets in one process match three processes" one_process
one_folder() { # the second preset resumes, so the first one must have released the directory lock
    start 2 "$presets" "${common[@]}" --save "$work/presets" --save-interval 100 --preset first \
        --exit-interval 3 \
        --preset second --load "$work/presets" --log-jsonl "$work/preset_on.jsonl" ||
        { say "exit code $?"; return 1; }
    [ "$(train_lines preset_on | wc -l)" -eq 3 ] || say "the second preset did not resume"
}
check "two presets save into the same directory in sequence" one_folder
next_trains() {
    rm -f "$work"/preset_*.jsonl
    start 2 "$presets" "${common[@]}" --preset bad --hidden-size 33 --preset good --log-jsonl "$work/preset_good.jsonl"
    local rc=$?
    [ $rc -eq 2 ] && grep -qx 'error: preset bad ended with exit code 2' "$work/err" ||
        { say "exit code $rc"; return 1; }
    [ "$(train_lines preset_good | wc -l)" -eq 6 ] || say "the next preset did not train"
}
check "a failing preset is reported by name, and the next one trains" next_trains
stopped() {
    local pid rc
    rm -f "$work"/preset_*.jsonl
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np 2 "$presets" "${common[@]}" --train-iters 1000000 \
        --preset long \
        --log-jsonl "$work/preset_long.jsonl" --preset never \
        --log-jsonl "$work/preset_never.jsonl" >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    wait_for_iteration preset_long 2 || { say "training did not start"; return 1; }
    for pid in $(rank_pids); do kill -USR1 "$pid"; done
    wait $job
    rc=$?
    [ $rc -eq 75 ] && [ ! -e "$work/preset_never.jsonl" ] || say "exit code $rc"
}
check "a signal ends all presets" stopped
no_preset() {
    start 2 "$presets" "${common[@]}"
    error_names 2 "no preset is given" $?
}
check "no preset is a usage error" no_preset

# The tensors are large enough to be initialized by several threads.
same_weights() {
    # mpirun binds each rank to one core.
    logged one_core 1 --hidden-size 256 --train-iters 4 --exit-interval 1 --global-batch-size 2 || return 1
    rm -f "$work/all_cores.jsonl"
    OMPI_MCA_plm=isolated OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "$BUILD/train_gpt_cpu" \
        "${model[@]}" "${batch[@]}" --data-path "$data" --hidden-size 256 \
        --train-iters 4 --exit-interval 1 --global-batch-size 2 --log-jsonl "$work/all_cores.jsonl" \
        >"$work/out" 2>"$work/err" </dev/null || { say "exit code $?"; return 1; }
    same_training one_core all_cores
}
check "initial weights do not depend on the number of threads" same_weights

# --- synchronization alone -----------------------------------------------------------------------
sync_alone() {
    start 4 "$synchronize" --out "$work/sync.jsonl" --repetitions 2 --plain-mb 1 "${common[@]}" \
        --preset bf16 \
        --grad-reduce-in-bf16 --preset sdp4bit "${paper[@]}" || { say "exit code $?"; return 1; }
    ranks 1 "${model[@]}" "${batch[@]}" --data-path "$data" --plan --plan-world-size 4 --gpus-per-node 2 \
        "${paper[@]}" || { say "--plan failed"; return 1; }
    why=$(python3 - "$work/sync.jsonl" "$work/out" 2>&1 <<'END'
import json, re, sys
found = [json.loads(line) for line in open(sys.argv[1])]
plan = open(sys.argv[2]).read()
plain, bf16, sdp = found
if [r["kind"] for r in found] != ["plain", "arm", "arm"] or (bf16["arm"], sdp["arm"]) != ("bf16", "sdp4bit"):
    sys.exit("expected one line of plain collectives and two of presets")
if not all(plain[k] > 0 for k in plain if k.startswith("all_")):
    sys.exit("a plain collective has no rate")
for r in bf16, sdp:
    if not (r["gradients_ms"] > 0 and r["adamw_ms"] > 0 and r["weights_ms"] + r["adamw_ms"] > 0):
        sys.exit("a time is not positive")
hops = {"grad_node": "gradients, inside a node", "grad_rail": "gradients, between nodes",
        "weight_node": "weights, inside a node", "weight_rail": "weights, between nodes"}
sent = r"inside +(\d+) between +(\d+)"
lines = re.findall(rf"bucket +\d+: gradients {sent}  weights {sent}", plan)
for k, (hop, name) in enumerate(hops.items()):
    planned = int(re.search(name + r" +(\d+)", plan).group(1))
    if sum(b[hop] for b in sdp["buckets"]) != planned or sum(int(line[k]) for line in lines) != planned:
        sys.exit(f"{name}: the buckets send {sum(b[hop] for b in sdp['buckets'])} bytes, {planned} by --plan")
found = re.findall(r"^  (weights|gradients|optimizer state) +(\d+) ", plan, re.M)
memory = {group: int(size) for group, size in found}
for group, size in memory.items():
    if sdp["memory"][group] != size:
        sys.exit(f"{group}: {sdp['memory'][group]} bytes, {size} by --plan")
if len(memory) != 3:
    sys.exit("the plan does not list weights, gradients and optimizer state")
END
)
}
check "sync only: times, bytes per bucket and memory match the plan" sync_alone
# A second call appends its presets to the file. A preset that is measured again replaces its row.
# Each row refers to the bandwidths measured in the same call.
sync_again() {
    local file=$work/adds/sync/m/inside.jsonl plain i
    mkdir -p "${file%/*}"
    for i in "--preset bf16 --grad-reduce-in-bf16 --preset fp32" "--preset fp32 --preset sdp4bit ${paper[*]}"; do
        # shellcheck disable=SC2086 # split on purpose
        start 2 "$synchronize" --out "$file" --repetitions 0 --plain-mb 1 "${common[@]}" $i ||
            { say "exit code $?"; return 1; }
        printf '{"kind":"arm","arm":"cut sho' >>"$file"  # truncated line of a killed call
    done
    plain=$(grep -c '"kind":"plain"' "$file")
    why=$(PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=dev/bench:dev python3 - "$work/adds" "$plain" 2>&1 <<'END'
import json, sys
import comm_table
found = comm_table.read_sync(sys.argv[1], "m", "inside")
calls = [line for line in open(sys.argv[1] + "/sync/m/inside.jsonl") if '"plain"' in line]
rates = [json.loads(line)["all_to_all_node"] for line in calls]
call_of = {preset: rates.index(r["plain"]["all_to_all_node"]) for preset, r in found.items()}
if sys.argv[2] != "2" or call_of != {"bf16": 0, "fp32": 1, "sdp4bit": 1}:
    sys.exit(f"{sys.argv[2]} calls in the file, presets {sorted(found)}")
END
)
}
check "sync only: a second call appends to the first" sync_again

# sync_hangs PATTERN COMMAND...: waits until all ranks have started (the plain collectives are
# logged), makes a rank hang with COMMAND, and expects an error that matches PATTERN. 40 presets of
# 100 steps run longer than the test.
sync_hangs() {
    local pattern=$1 words=() i
    shift
    for ((i = 0; i < 40; i++)); do words+=(--preset "preset$i" "${paper[@]}"); done
    rm -f "$work/hangs.jsonl"
    timeout -k 5 "$LIMIT" "${launcher[@]}" -np 4 "$synchronize" --out "$work/hangs.jsonl" --repetitions 100 \
        --plain-mb 1 "${common[@]}" --distributed-timeout-minutes 0.05 \
        "${words[@]}" >"$work/out" 2>"$work/err" </dev/null &
    job=$!
    wait_until grep -qs '"kind":"plain"' "$work/hangs.jsonl"
    "$@" || return 1
    job_ended hangs
    error_names 7 "preset" $? || return 1
    grep -qE "^error: .*$pattern" "$work/err" || say "not $pattern"
}
check "sync only: a stopped rank ends the run within the time limit and is named" sync_hangs \
    "rank 1 has shown no sign of life for .*last seen at preset[0-9]*\)" signal_rank STOP 1
sync_stuck() { # N: rank 2 hangs before the N-th wait
    export SDP4BIT_FAULT=stall:2:0:$1
    sync_hangs "(rank 2 \(.* preset[0-9]*: no progress for|rank 2 is still busy .*preset)" true
    local rc=$?
    unset SDP4BIT_FAULT
    return $rc
}
check "sync only: a rank stuck in a step ends the run within the time limit and is named" sync_stuck 900

# --- the whole comparison ------------------------------------------------------------------------
cat >"$work/tiny.args" <<'END'
--num-layers 4
--hidden-size 64
--num-attention-heads 4
--seq-length 32
--max-position-embeddings 32
--make-vocab-size-divisible-by 8
--tokenizer-type Byte
--bf16
--use-distributed-optimizer
--lr 1e-3
--train-iters 100
END
root=$PWD
compare() { # ARGS...: comm.sh on CPU ranks, in the directory of the model config
    (cd "$work" && DEVICE=cpu timeout -k 5 "$LIMIT" "$root/dev/bench/comm.sh" --models tiny.args:2 \
        --shape 2x2 --iters 1 --plain-mb 1 --flags "--ddp-bucket-size 50000" "$@") \
        >"$work/out" 2>"$work/err" </dev/null
}
# rows_of FILE KEY...: prints the values of these keys, one line per row of a JSON file.
rows_of() {
    python3 -c 'import json, sys
for row in json.load(open(sys.argv[1]))["rows"]: print(*(row[key] for key in sys.argv[2:]))' "$@"
}
comparison() {
    # The directory contains lines of an earlier run with two presets, one of which is run again.
    local at=$work/logs/train/tiny/2/logical
    mkdir -p "$at"
    printf '{"arm":"%s","loopback_bytes":-1}\n' sdp4bit sdp4bit+sums >"$at/loopback"
    printf '{"kind":"start"}\n' >"$at/sdp4bit.jsonl"
    compare --networks logical --presets "fp32 bf16 sdp4bit" --out "$work/comm.json" --logs "$work/logs" ||
        { say "exit code $?"; return 1; }
    ! grep -q "^using the layer times of" "$work/err" || { why="layer times were not measured"; return 1; }
    [ "$(grep -c '"sdp4bit"' "$at/loopback") $(grep -c -- '-1}$' "$at/loopback")" = "1 1" ] &&
        [ "$(grep -c '"kind":"start"' "$at/sdp4bit.jsonl")" = 1 ] ||
        { why="lines of an earlier run were not removed"; return 1; }
    compare --networks inside --presets "fp32 sdp4bit" --out "$work/comm.json" --logs "$work/logs" ||
        { say "exit code $?, second call"; return 1; }
    grep -q "^using the layer times of tiny.args:2 from an earlier call in $work/logs/one/tiny/2; " \
        "$work/err" || { why="the source of the layer times is not named"; return 1; }
    why=$(python3 - "$work" 2>&1 <<'END'
import json, sys, xml.dom.minidom
made = json.load(open(sys.argv[1] + "/comm.json"))
rows = {(r["network"], r["arm"]): r for r in made["rows"]}
wanted = {"logical": ("fp32", "bf16", "sdp4bit"), "inside": ("fp32", "sdp4bit")}
if set(rows) != {(network, preset) for network, presets in wanted.items() for preset in presets}:
    sys.exit(f"rows {sorted(rows)}")
for name, r in rows.items():
    gradients, weights = r["exposed_gradients_ms"], r["exposed_weights_ms"]
    if not (r["ms"] > 0 and r["tokens_per_second"] > 0 and r["tflops_per_gpu"] > 0 and gradients >= 0
            and weights >= 0 and r["exposed_most_ms"] >= gradients + weights):
        sys.exit(f"{name}: a figure is missing")
    if not (r["bound_ms"] >= r["compute_ms"] > 0 and abs(r["over_bound"] - r["ms"] / r["bound_ms"]) < 1e-9):
        sys.exit(f"{name}: bound {r['bound_ms']}, computing {r['compute_ms']}")
    base = rows[r["network"], "fp32"]
    if abs(r["over_fp32"] - base["ms"] / r["ms"]) > 1e-9:
        sys.exit(f"{name}: speedup {r['over_fp32']}")
sent = lambda *point: rows[point]["node_bytes"]
if sent("inside", "sdp4bit") != 0 or not sent("logical", "bf16") > 3 * sent("logical", "sdp4bit") > 0:
    sys.exit("wrong number of bytes between nodes")
memory = {(m["nodes"], m["arm"]): m for m in made["memory"]}
sdp = memory[2, "sdp4bit"]
# Bytes per parameter. Always: bf16 weights (2), fp32 gradients (4), optimizer state (12) on 4
# ranks, int4 weight codes with a scale per 2048. During communication: two buffers of int8 codes
# with a scale per 128, and int4 codes sharded over two ranks.
always, transient = 9 + 0.5 + 4 / 2048, 2 * (1 + 4 / 128) + (0.5 + 4 / 128) / 2
near = lambda a, b: abs(a - b) < 1e-9
if not (near(sdp["release_always"], always) and near(sdp["release_transient"], transient) and sdp["sum"] > 9):
    sys.exit(f"memory {sdp}")
for shape in (2, "sdp4bit"), (2, "bf16"), (1, "fp32"):
    for m in memory[shape]["measured"]:
        if not (m["micro_batch"] == 2 and m["taken_bytes"] > m["allocated_bytes"] >= m["planned_bytes"] > 0
                and m["taken_per_parameter"] > m["planned_per_parameter"] > memory[shape]["sum"]):
            sys.exit(f"memory taken {shape}: {m}")
    if len(memory[shape]["measured"]) != 1:
        sys.exit(f"memory taken {shape}: expected the measurement of one run")
xml.dom.minidom.parse(sys.argv[1] + "/comm.svg")
END
) || return 1
    grep -q '^tiny  *2  logical nodes  *SDP4Bit ' "$work/out" ||
        grep -q '^tiny  *2 logical nodes  *SDP4Bit ' "$work/out" ||
        { why="no row of SDP4Bit in the table"; return 1; }
    grep -q '^tiny  *2x2  *SDP4Bit .*| *2  *[0-9.]*  *[0-9.]*$' "$work/out" ||
        { why="no row of SDP4Bit in the table of memory"; return 1; }
}
check "comm.sh: table, JSON and plot of two calls combined" comparison
# The comparison on 4 emulated GPUs as 2 nodes: CPU programs replace the GPU programs, in a private
# network namespace.
pretended=$work/pretended
mkdir -p "$pretended/build/dev/bench" "$pretended/bin"
ln -sf "$presets" "$pretended/build/dev/bench/train_presets"
ln -sf "$synchronize" "$pretended/build/dev/bench/sync_only"
ln -sf "$bound" "$pretended/build/dev/bench/"
printf '#!/bin/sh\nfor gpu in 0 1 2 3; do echo "GPU $gpu: pretended"; done\n' >"$pretended/bin/nvidia-smi"
chmod +x "$pretended/bin/nvidia-smi"
on_pretended() { # COMMAND: shell command, run in $work by exec
    cd "$work" && PATH=$pretended/bin:$PATH BUILD=$pretended/build exec unshare -n -m bash -c \
        "mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /run && ip link set lo up && $1" >"$work/out" \
        2>"$work/err" </dev/null
}
export -f on_pretended
export work pretended
networks_in_turn() {
    local options="--models tiny.args:1 --networks '100 10' --presets 'fp32 sdp4bit' --iters 1 --plain-mb 1"
    timeout -k 5 "$LIMIT" bash -c 'on_pretended "$1"' bash \
        "'$root/dev/bench/comm.sh' $options --logs turn --out comm3.json && tc qdisc show dev lo" ||
        { say "exit code $?"; return 1; }
    grep -q '^loopback: 200000 Mb/s' "$work/err" && grep -q '^loopback: 20000 Mb/s' "$work/err" &&
        ! grep -q 'qdisc tbf' "$work/out" || { why="the loopback's speed is wrong or was not restored"; return 1; }
    [ "$(grep -c '"kind":"interval","iteration":[246]00,' "$work/turn/one/tiny/1/full-1.jsonl")" -eq 3 ] ||
        { why="layers were not timed for two seconds or the maximum number of steps"; return 1; }
    # CPU ranks do not use sockets, so the loopback counter must exist and stay small.
    why="rows: $(rows_of "$work/comm3.json" network arm nodes | tr '\n' ',')"
    [ "$why" = "rows: 100 fp32 2,100 sdp4bit 2,10 fp32 2,10 sdp4bit 2," ] || return 1
    rows_of "$work/comm3.json" loopback_ratio | awk '!($1 >= 0 && $1 < 1) { exit 1 }' ||
        { why="the loopback byte count is missing"; return 1; }
}
# If the traffic shaper refuses one speed, the others are still measured, and the refusal is
# reported before any measurement.
network_refused() {
    mkdir -p "$work/refusing"
    # shellcheck disable=SC2016 # expanded by the fake tc
    printf '%s\n' '#!/bin/sh' 'case "$*" in *"rate 20000mbit"*) echo "Error: refused" >&2; exit 2 ;; esac' \
        "exec $(command -v tc) \"\$@\"" >"$work/refusing/tc"
    chmod +x "$work/refusing/tc"
    local options="--models tiny.args:1 --networks '10 100' --presets fp32 --iters 1 --plain-mb 1"
    timeout -k 5 "$LIMIT" bash -c 'on_pretended "$1"' bash \
        "PATH=$work/refusing:\$PATH '$root/dev/bench/comm.sh' $options --out comm4.json && tc qdisc show dev lo" ||
        { say "exit code $?"; return 1; }
    local refusal='^warning: skipped the network 10: error: tc could not shape the loopback'
    [ "$(grep -c "$refusal" "$work/err")" -eq 1 ] || { why="no line about 10 Gb/s"; return 1; }
    sed '/measured the layer times/q' "$work/err" | grep -q '^warning: skipped the network 10: ' ||
        { why="the network was not tried before layers were timed"; return 1; }
    ! grep -q 'qdisc tbf' "$work/out" || { why="the loopback's speed is wrong or was not restored"; return 1; }
    why="rows: $(rows_of "$work/comm4.json" network arm)"
    [ "$why" = "rows: 100 fp32" ]
}
# signaled SIGNAL FILE COMMAND...: starts COMMAND, waits for FILE and signals only that process,
# which must exit with 1 and leave no ranks running.
signaled() {
    local signal=$1 file=$2 rc
    shift 2
    rm -f "$file"
    # Shells start background commands with SIGINT ignored, and a script cannot trap an ignored
    # signal.
    python3 -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])' "$@" &
    job=$!
    wait_until test -s "$file"
    kill -"$signal" "$job"
    job_ended comm.sh
    rc=$?
    [ $rc -eq 1 ] || { say "SIG$signal: exit code $rc"; return 1; }
    [ -z "$(rank_pids)" ] || say "SIG$signal: ranks are still running"
}
# Eight presets of 600 steps each run longer than the test.
loopback_restored() {
    local signal options="--models tiny.args:1 --networks 100 --iters 300 --plain-mb 1"
    options+=" --presets 'fp32 bf16 qwd qw tlq tlq-hs ulq sdp4bit'"
    for signal in INT TERM; do
        signaled $signal "$work/signaled/train/tiny/1/100/fp32.jsonl" bash -c 'on_pretended "$1"' bash \
            "exec '$root/dev/bench/comm.sh' $options --logs $work/signaled --out comm5.json" || return 1
        [ "$(grep -c '^loopback: unlimited$' "$work/err")" -eq 2 ] ||
            { why="SIG$signal: the loopback was not restored, or this was not reported"; return 1; }
    done
}
# CPU ranks over a slow network: presets with less traffic are faster, and with local steps the
# network costs almost no time.
slow_network() {
    cat >"$work/slow.args" <<'END'
--num-layers 2
--hidden-size 192
--num-attention-heads 4
--seq-length 32
--max-position-embeddings 32
--tokenizer-type Byte
--lr 1e-3
--use-distributed-optimizer
END
    local options="--models slow.args:1 --networks 0.1 --shape 2x1 --iters 30 --plain-mb 1"
    options+=" --presets 'bf16 sdp4bit eden2-ef eden-lossless local'"
    timeout -k 5 "$LIMIT" bash -c 'on_pretended "$1"' bash \
        "BUILD=$BUILD DEVICE=cpu '$root/dev/bench/comm.sh' $options --out slow.json" ||
        { say "exit code $?"; return 1; }
    why=$(python3 - "$work/slow.json" 2>&1 <<'END'
import json, sys
ms = {r["arm"]: r["ms"] for r in json.load(open(sys.argv[1]))["rows"]}
slower = ("bf16", "sdp4bit", "local")
if len(ms) != 5 or any(ms[a] < 1.3 * ms[b] for a, b in zip(slower, slower[1:])):
    sys.exit(f"ms a step: {ms}")
print(ms)
END
) || return 1
    [ "${VERBOSE:-0}" = 0 ] || echo "# $why"
}
if ! command -v tc >/dev/null || ! command -v ip >/dev/null ||
    ! unshare -n -m sh -c 'mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /run && ip link set lo up' \
    2>/dev/null; then
    for name in "networks of several speeds" "a network that is refused is left out" \
        "a signal ends it soon, with the loopback restored" "CPU ranks over a slow network"; do
        skip "comm.sh: $name" "needs tc, ip and permission to create a network namespace"
    done
else
    check "comm.sh: networks of several speeds" networks_in_turn
    check "comm.sh: leaves out a network that the shaper refuses" network_refused
    check "comm.sh: a signal ends it promptly and restores the loopback" loopback_restored
    check "comm.sh: CPU ranks over a slow network" slow_network
fi
too_late() {
    compare --networks inside --presets "fp32 bf16" --time-limit 1 --out "$work/late.json"
    [ $? -eq 1 ] && grep -q '^skipped for lack of time.*tiny.args:2, inside, bf16' "$work/err" &&
        grep -qx 'error: no preset finished; see above' "$work/err" || say "the presets did not exceed the time limit"
}
check "comm.sh: names the presets that exceed the time limit" too_late
# SIGINT or SIGTERM while the second network is measured: the output file is valid and contains the
# first network's row.
what_it_has() {
    local signal
    for signal in INT TERM; do
        rm -rf "$work/had" "$work/had.json"
        # shellcheck disable=SC2016 # expanded by the inner shell
        signaled $signal "$work/had/train/tiny/2/logical/fp32.jsonl" bash -c 'cd "$1" || exit
            DEVICE=cpu exec "$2" --models tiny.args:2 --shape 2x2 --networks "inside logical" --presets fp32 \
                --iters 300 --plain-mb 1 --logs had --out had.json >"$1/out" 2>"$1/err" </dev/null' \
            bash "$work" "$root/dev/bench/comm.sh" || return 1
        why="rows: $(rows_of "$work/had.json" network)"
        [ "$why" = "rows: inside" ] || return 1
        grep -qx "stopped; what was measured before is in $work/had.json" "$work/err" ||
            { why="SIG$signal: the path of the results was not printed"; return 1; }
    done
}
check "comm.sh: a signal ends it promptly and keeps its results" what_it_has
# impostor DIR LINE...: creates stub programs. The stub of train_presets_cpu runs these lines if
# there are several ranks.
impostor() {
    local folder=$work/$1/dev/bench
    shift
    mkdir -p "$folder"
    ln -sf "$synchronize" "$bound" "$folder/"
    { printf '%s\n' '#!/bin/bash' "real=$presets work=$work" \
        '[ "${OMPI_COMM_WORLD_SIZE:-1}" -gt 1 ] || exec "$real" "$@"' "$@"; } >"$folder/train_presets_cpu"
    chmod +x "$folder/train_presets_cpu"
}
# comm.sh ends within --time-limit even if presets hang and ignore SIGTERM.
hard_end() {
    local since=$SECONDS
    impostor hangs 'trap "" TERM' ': >"$work/hung"' 'while :; do sleep 1; done'
    BUILD=$work/hangs compare --networks inside --presets "fp32 bf16" --time-limit 30 --out "$work/hangs.json"
    [ $((SECONDS - since)) -le 120 ] || { why="took $((SECONDS - since)) s with a limit of 30 s"; return 1; }
    [ -e "$work/hung" ] &&
        grep -q '^warning: not every preset of tiny.args:2, inside finished: fp32 bf16$' "$work/err" ||
        { say "the presets did not run"; return 1; }
    [ -z "$(rank_pids)" ] || say "ranks are still running"
}
check "comm.sh: enforces the time limit" hard_end
# Rank 1 dies in the bf16 preset: later presets are rerun, earlier ones are not.
lost_rank() {
    impostor loses 'echo "$*" >>"$work/called.${OMPI_COMM_WORLD_RANK:-0}"' \
        '[ "$OMPI_COMM_WORLD_RANK" = 1 ] || exec "$real" "$@"' \
        'log=$work/lost/train/tiny/2/inside/bf16.jsonl' \
        'until_bf16() { until grep -qs "\"interval\"" "$log"; do sleep 0.05; done; }' \
        'case "$*" in *"--preset bf16"*) (until_bf16; kill -KILL $$) & ;; esac' 'exec "$real" "$@"'
    BUILD=$work/loses compare --networks inside --presets "fp32 bf16 qwd sdp4bit" --iters 300 --logs \
        "$work/lost" --out "$work/lost.json" || { say "exit code $?"; return 1; }
    grep -qx 'warning: tiny.args:2, inside, bf16 did not finish; running again without it: qwd sdp4bit' \
        "$work/err" || { say "the failed preset bf16 was not reported"; return 1; }
    calls() { grep -c -- "--preset $1" "$work/called.0"; }
    [ "$(calls fp32) $(calls bf16) $(calls sdp4bit)" = "1 1 2" ] ||
        { why="presets that have a row were rerun, or one without a row was not"; return 1; }
    why="rows: $(rows_of "$work/lost.json" arm | tr '\n' ' ')"
    [ "$why" = "rows: fp32 qwd sdp4bit " ]
}
check "comm.sh: reruns presets lost with a rank once" lost_rank
sync_table() {
    compare --sync-only --networks logical --presets "bf16 tlq-hs tlq-hs+sums" --out "$work/sync.json" ||
        { say "exit code $?"; return 1; }
    why=$(python3 - "$work/sync.json" "$work/out" 2>&1 <<'END'
import json, re, sys
rows = json.load(open(sys.argv[1]))["rows"]
line = re.search(r"^checksums \(--verify-wire\), tiny, logical nodes, TLq-HS: "
                 r"[0-9.]+ -> [0-9.]+ ms .* and (\d+) bytes$", open(sys.argv[2]).read(), re.M)
plain, sums = (sum(r["sent"].values()) for r in rows[1:])
more = sums - plain
if not line or int(line.group(1)) != more or more % 8 or not 0 < more < 0.01 * plain:
    sys.exit(f"checksums: {plain} and {sums} bytes")
times = ("gradients_ms", "gradients_floor_ms", "weights_floor_ms")
presets = [r["arm"] for r in rows]
if presets != ["bf16", "tlq-hs", "tlq-hs+sums"] or not all(r[time] > 0 for r in rows for time in times):
    sys.exit("rows or times are missing")
END
)
}
check "comm.sh --sync-only" sync_table
# A slow disk: each fsync takes 200 ms, and a save calls fsync at least four times.
saving() {
    local shim=$BUILD/test/fault/shim.so
    mkdir -p "$work/disk"
    (cd "$work" && LD_PRELOAD=$shim SHIM_SLOW_MS=200 SHIM_RANK=0 SHIM_FOLDER=$work/disk SHIM_AT=0 DEVICE=cpu \
        timeout -k 5 "$LIMIT" "$root/dev/bench/save.sh" --model tiny.args:1 \
        --iters 20 --save-interval 10 --folder disk --out save.json) >"$work/out" 2>"$work/err" </dev/null ||
            { say "exit code $?"; return 1; }
    [ -z "$(ls -A "$work/disk")" ] || { why="left $(ls -A "$work/disk")"; return 1; }
    ranks 1 @"$work/tiny.args" --micro-batch-size 1 --global-batch-size 2 --mock-data --plan \
        --plan-world-size 2 --gpus-per-node 2 --save x --async-save --save-interval 10 \
        --quantized-weights --quantized-gradients --gq-group-size-intra 128 --hadamard-transform ||
            { say "--plan failed"; return 1; }
    why=$(python3 - "$work/save.json" "$(awk '/copy of a checkpoint/ { print $NF }' "$work/out")" 2>&1 <<'END'
import json, sys
none, background, foreground = json.load(open(sys.argv[1]))["rows"]
if (none["way"], background["way"], foreground["way"]) != ("none", "async", "sync") or "saves" in none:
    sys.exit("expected rows none, async, sync")
for r in background, foreground:
    saves = [(s["iteration"], len(s["after_ms"])) for s in r["saves"]]
    if saves != [(10, 3), (20, 0)] or not r["bytes"] > 14 * r["parameters"]:
        sys.exit(f"{r['way']}: saves {r['saves']}, {r['bytes']} bytes")
    if not all(s["complete_s"] > 0.8 for s in r["saves"]):
        sys.exit(f"{r['way']}: complete after {[s['complete_s'] for s in r['saves']]} s")
if background["pinned_bytes_per_rank"] != int(sys.argv[2]) or foreground["pinned_bytes_per_rank"] != 0:
    sys.exit(f"page-locked: {background['pinned_bytes_per_rank']} instead of {sys.argv[2]} bytes")
wait, first = foreground["saves"][0], background["saves"][0]
if not (wait["begins_ms"] > 800 and wait["after_ms"][0] > none["step_ms"] + 800
        and wait["excess_percent"] > 0 and wait["lost_ms"] > 400):
    sys.exit(f"in the foreground: {wait}")
if not (first["begins_ms"] < 400 and first["after_ms"][0] < wait["after_ms"][0] - 400):
    sys.exit(f"in the background: {first}")
# Unless steps take long, the second save starts while the first is pending and waits for it.
if first["waits_ms"] != 0 or (10 * none["step_ms"] < 500 and not background["saves"][1]["waits_ms"] > 0):
    sys.exit(f"waits: {background['saves']}")
END
)
}
if [ -e "$BUILD/test/fault/shim.so" ]; then
    check "save.sh: cost of saves on a slow disk" saving
else
    skip "save.sh" "$BUILD/test/fault/shim.so is not built"
fi
# With no settings except DEVICE=cpu both scripts finish within two minutes and do not overwrite the
# GPU results in dev/bench.
by_default() {
    DEVICE=cpu timeout -k 5 "$LIMIT" dev/bench/comm.sh --out "$work/default.json" >"$work/out" 2>"$work/err" \
        </dev/null || { say "exit code $?"; return 1; }
    why=$(python3 - "$work/default.json" 2>&1 <<'END'
import json, sys
rows = {(r["network"], r["arm"]) for r in json.load(open(sys.argv[1]))["rows"]}
presets = ("fp32", "bf16", "qwd", "tlq-hs", "ulq", "sdp4bit")
if rows != {(network, preset) for network in ("inside", "logical") for preset in presets}:
    sys.exit(f"rows {sorted(rows)}")
END
) || return 1
    DEVICE=cpu timeout -k 5 "$LIMIT" dev/bench/save.sh --folder "$work" --out "$work/save_default.json" \
        >"$work/out" 2>"$work/err" </dev/null && [ -s "$work/save_default.json" ] ||
        say "save.sh: exit code $?"
}
check "DEVICE=cpu comm.sh and save.sh by default" by_default
# --- layouts -------------------------------------------------------------------------------------
layouts() { # ARGS...: layouts.sh on CPU ranks
    DEVICE=cpu timeout -k 5 "$LIMIT" dev/bench/layouts.sh --iters 1 --micro-batches 4 "$@" \
        >"$work/out" 2>"$work/err" </dev/null
}
layouts_table() {
    layouts --layouts "2x1+s 1x2 1x2+c1 2x2" --out "$work/layouts.json" || { say "exit code $?"; return 1; }
    ! grep -q warning "$work/err" "$work/out" || { why=$(cat "$work/err" "$work/out"); return 1; }
    why=$(python3 - "$work/layouts.json" 2>&1 <<'END'
import json, sys
rows = json.load(open(sys.argv[1]))["rows"]
shapes = [(r["tensor"], r["stages"], r["chunks"], r["sequence"], r["ranks"]) for r in rows]
if shapes != [(1, 1, 1, False, 1), (2, 1, 1, True, 2), (1, 2, 1, False, 2), (1, 2, 2, False, 2),
              (2, 2, 1, False, 4)] or any(r["micro_batches"] != 4 for r in rows):
    sys.exit(f"rows {shapes}")
alone = rows[0]
rest = alone["ms"] - alone["forward_backward_ms"]
for r, idle in zip(rows, (1, 1, 5 / 4, 4.5 / 4, 5 / 4)):
    bound = (alone["forward_backward_ms"] * idle + rest) / r["ranks"]
    if abs(r["bound_ms"] - bound) > 1e-9 or abs(r["of_bound"] * r["ms"] - bound) > 1e-9:
        sys.exit(f"bound {r['bound_ms']} instead of {bound}")
    for name, apart in (("loss", 0.01), ("first_loss", 0.001), ("first_norm", 0.01)):
        if not abs(r[name] - alone[name]) < apart:
            sys.exit(f"{name} {r[name]}, one rank: {alone[name]}")
    if not r["commit"]:
        sys.exit(f"no commit: {r}")
END
)
}
check "layouts.sh: rows, bounds and losses" layouts_table
wrong_layouts() { # TEXT WORDS...
    local text=$1
    shift
    layouts "$@"
    error_names 2 "$text" $?
}
check "layouts.sh: malformed layout" wrong_layouts "2+s is not of the form TxP" --layouts "1x2 2+s"
check "layouts.sh: model without layers" wrong_layouts "has no layers" --models small
impossible() { # T=3 does not divide the heads: only this layout's row is omitted
    layouts --layouts "3x1 1x2" --out "$work/layouts.json" || { say "exit code $?"; return 1; }
    grep -q '^warning: the run failed' "$work/err" && grep -q '^error' "$work/err" ||
        { why="the failure of 3 ranks is not reported"; return 1; }
    why="rows: $(rows_of "$work/layouts.json" ranks | tr '\n' ' ')"
    [ "$why" = "rows: 1 2 " ]
}
check "layouts.sh: impossible layout" impossible
layout_flags() { # one rank does not accept these flags
    layouts --layouts "1x2" --layout-flags "--quantized-activations --aq-group-size 32" \
        --out "$work/layouts.json" || { why=$(tail -n 1 "$work/err"); return 1; }
    why="rows: $(rows_of "$work/layouts.json" ranks | tr '\n' ' ')"
    [ "$why" = "rows: 1 2 " ]
}
check "layouts.sh: flags for several ranks" layout_flags
beside_pytorch() { # tensor parallelism in PyTorch computes the same losses as one rank
    layouts --layouts "2x1 2x1+s 1x2" --pytorch --out "$work/layouts.json" ||
        { why=$(tail -n 1 "$work/err"); return 1; }
    why=$(python3 - "$work/layouts.json" 2>&1 <<'END'
import json, sys
rows = json.load(open(sys.argv[1]))["pytorch_rows"]
if [(r["tensor"], r["sequence"]) for r in rows] != [(1, False), (2, False), (2, True)]:
    sys.exit(f"rows {rows}")
for r in rows:
    for name in ("first_loss", "loss"):
        if not abs(r[name] / rows[0][name] - 1) < 1e-3:
            sys.exit(f"{name} {r[name]}, one rank: {rows[0][name]}")
END
)
}
overhead() {
    timeout -k 5 "$LIMIT" dev/bench/elastic_overhead.sh --repeats 1 --steps 600 --local-steps 5 \
        --flags "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 \
        --max-position-embeddings 32 --micro-batch-size 2 --lr 1e-3" --out "$work/overhead.json" \
        >"$work/out" 2>"$work/err" </dev/null || { why="exit code $?: $(tail -n 1 "$work/err")"; return 1; }
    why=$(python3 - "$work/overhead.json" 2>&1 <<'END'
import json, sys
found = json.load(open(sys.argv[1]))
row, = found["rows"]
if row["mpi_ms"] <= 0 or abs(row["groups_ms"] / row["mpi_ms"] - 1 - found["overhead"]) > 1e-9:
    sys.exit(f"rows {found}")
END
)
}
check "elastic_overhead.sh" overhead

if "${PYTHON:-python3}" -c 'import torch, numpy' 2>/dev/null; then
    check "layouts.sh: PyTorch" beside_pytorch
else
    skip "layouts.sh: PyTorch" "no PyTorch for ${PYTHON:-python3}"
fi

wrong() { # TEXT WORDS...
    local text=$1
    shift
    compare "$@"
    error_names 2 "$text" $?
}
check "comm.sh: network speeds need one rank per node" wrong "need nodes with one CPU rank" \
    --networks 25
check "comm.sh: unknown preset" wrong "the preset nosuch is unknown" --networks inside --presets "fp32 nosuch"
built() { # `make bench` from scratch builds what comm.sh and save.sh need with DEVICE=cpu
    local program
    make -n bench BUILD="$work/nothing" >"$work/out" 2>"$work/err" ||
        { say "make -n bench failed"; return 1; }
    for program in train_gpt_cpu dev/bench/train_presets_cpu dev/bench/sync_only_cpu dev/bench/step_bound; do
        grep -q -- " -o $work/nothing/$program\$" "$work/out" ||
            { why="$program would not be built"; return 1; }
    done
}
check "make bench builds all programs that the scripts run on CPU ranks" built
check "comm.sh: unknown model" wrong "there is no model config" --networks inside --models nosuch:1
finish
