#!/usr/bin/env bash
# Measures training steps on several GPUs for each preset, within one node and over emulated
# networks of several speeds. Compares each step with the best possible schedule (comm_bound.py),
# which is computed from layer times and from the bandwidth of plain collectives in the same run.
#
# Prints a table of steps and a table of memory, and writes JSON and a plot. The files are updated
# after every network, so an interrupted call keeps its results. --sync-only measures only
# synchronization.
#
#   dev/bench/comm.sh [--models "125m:32 1.3b:8 1.3b:1"] [--networks "inside sockets 25 10"]
#                     [--presets "fp32 bf16 qwd tlq-hs ulq sdp4bit"] [--shape NxD] [--iters 4]
#                     [--time-limit 540] [--flags "FLAGS"] [--logs FOLDER] [--out FILE.json]
#                     [--plain-mb 256] [--sync-only]
#
#   models     NAME:MICRO_BATCH of configs/gpt_NAME.args, of dev/bench/NAME.args or of a file.
#              Global batch = micro-batch x ranks
#   networks   inside: one node. logical: N nodes of D ranks, without an emulated network. sockets:
#              N nodes of D ranks over the loopback device, limited only by the CPUs (about 100 Gb/s
#              per node). A number: like sockets, but limited to that many Gb/s per node; NCCL
#              reaches 10 and 25, but less than half of 100. sockets and numbers need root and tc;
#              the loopback device is restored at the end. Networks that this machine cannot emulate
#              are skipped with a warning
#   presets    qwd has bf16 gradients, tlq-hs has bf16 weights, ulq and sdp4bit are as in the paper.
#              Other presets: tlq, qw, and from configs/: eden, eden3, eden2-ef, lossless,
#              eden-lossless, local (use --iters 30, because it has an outer sync every 30 steps; it
#              needs two nodes).
#              NAME+sums adds --verify-wire, NAME+grads the sharding strategy optim_grads,
#              NAME+params optim_grads_params, NAME+offload --optimizer-cpu-offload. If NAME is
#              measured too, a line shows the cost of the added flag. Example: --networks inside
#              --models 1.3b:8 --presets "sdp4bit sdp4bit+grads sdp4bit+params" --iters 20
#   shape      nodes x ranks per node [2 nodes of half of the GPUs]
#   iters      number of measured steps, after the same number of warm-up steps [4]. Short steps are
#              repeated for about a second (up to 30 steps). If the steps would take longer than
#              3 s, fewer are measured, but at least 2. A line below the table lists points with
#              fewer than 3
#   time-limit seconds for the whole call, including ten seconds for cleaning up. Presets that do
#              not fit are skipped with a message
#   flags      additional trainer flags for every preset
#   plain-mb   size of the buffers of the plain collectives [256; CPU ranks 4]
#   logs       keeps the logs in FOLDER. Later calls with the same folder add rows to the table and
#              reuse the layer times. Measuring a preset again discards its old row, even if the new
#              run fails
#
# All presets of a model and network run in one process. If one preset fails, the remaining ones are
# run again without it.
#
# The TCP congestion control is the machine's setting (sysctl net.ipv4.tcp_congestion_control); the
# stored results used cubic.
#
# Needs make gpu-bench. DEVICE=cpu uses CPU ranks to try the scripts (make bench). It measures a
# small model, small:2, by default, and writes results to runs/. It does not support the network
# sockets, and networks with a speed only with --shape Nx1. Times are meaningful only over a slow
# network such as 0.1 Gb/s. BUILD: folder of the programs.
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
caller=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
help_if_asked dev/bench/comm.sh "$@"
set -euo pipefail

COMMAND_LINE="dev/bench/comm.sh${*:+ ${*@Q}}"
export COMMAND_LINE
models='' networks='' presets='' shape='' most=4 limit=540 flags=() logs='' out='' plain_mb='' sync_only=0
device=${DEVICE:-gpu}
while [ $# -gt 0 ]; do
    [ "$1" = --sync-only ] || [ $# -ge 2 ] || die 2 "$1 needs a value; see dev/bench/comm.sh --help"
    case $1 in
    --models) models=$2; shift ;;
    --networks) networks=$2; shift ;;
    --presets | --arms) presets=$2; shift ;;
    --shape) shape=$2; shift ;;
    --iters) most=$2; shift ;;
    --time-limit) limit=$2; shift ;;
    --plain-mb) plain_mb=$2; shift ;;
    --flags) read -ra flags <<<"$2"; shift ;;
    --logs) logs=$2; shift ;;
    --out) case $2 in /*) out=$2 ;; *) out=$caller/$2 ;; esac; shift ;;
    --sync-only) sync_only=1 ;;
    *) die 2 "unknown argument $1; see dev/bench/comm.sh --help" ;;
    esac
    shift
done
if [ "$device" = cpu ]; then
    models=${models:-small:2} networks=${networks:-inside logical} results=runs made=_cpu
else
    results=dev/bench/results made=
fi
if [ $sync_only = 1 ]; then
    models=${models:-1.3b:1} networks=${networks:-inside logical sockets} out=${out:-$results/sync$made.json}
    presets=${presets:-fp32 bf16 ulq tlq tlq-hs qw qwd sdp4bit}
else
    models=${models:-125m:32 1.3b:8 1.3b:1} networks=${networks:-inside sockets 25 10}
    presets=${presets:-fp32 bf16 qwd tlq-hs ulq sdp4bit} out=${out:-$results/comm$made.json}
fi
make_folder "$(dirname "$out")"
[[ $most =~ ^[1-9][0-9]*$ && $limit =~ ^[1-9][0-9]*$ ]] ||
    die 2 "--iters and --time-limit must be positive numbers"

# --- ranks, programs, presets ---------------------------------------------------------------------

suffix='' start=9 benches=gpu-bench
case $device in
gpu) ;;
cpu) suffix=_cpu start=1 benches=bench plain_mb=${plain_mb:-4} ;;
*) die 2 "DEVICE=$device is unknown; use gpu or cpu" ;;
esac
trainer=$BUILD/dev/bench/train_presets$suffix synchronizer=$BUILD/dev/bench/sync_only$suffix
for program in "$trainer" "$synchronizer" "$BUILD/dev/bench/step_bound"; do
    [ -x "$program" ] || die 3 "$program is missing; run make $benches"
done
gpus=4
IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES:-}"
if [ "$device" = gpu ]; then
    gpus=${#visible[@]}
    [ "$gpus" -gt 0 ] || gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
fi
if [ -z "$shape" ]; then
    [ "$gpus" -ge 2 ] || die 3 "at least two GPUs are needed; this machine has $gpus"
    shape=2x$((gpus / 2))
fi
[[ $shape =~ ^([1-9][0-9]*)x([1-9][0-9]*)$ ]] || die 2 "--shape $shape is not of the form NxD"
nodes=${BASH_REMATCH[1]} per_node=${BASH_REMATCH[2]}
ranks=$((nodes * per_node))
for network in $networks; do
    case $network in
    inside | logical) ;;
    sockets) [ "$device" = gpu ] || die 2 "the network 'sockets' needs GPUs" ;;
    *)
        [[ $network =~ ^[0-9]+(\.[0-9]+)?$ ]] ||
            die 2 "the network $network is unknown; use inside, logical, sockets or a number of Gb/s"
        [ "$device" = gpu ] || [ "$per_node" = 1 ] ||
            die 2 "networks with a speed need nodes with one CPU rank: --shape 2x1"
        ;;
    esac
done
config_of() { # NAME
    local path
    for path in "configs/gpt_$1.args" "dev/bench/$1.args" "$caller/$1"; do
        [ ! -f "$path" ] || { say "$path"; return; }
    done
}
for model in $models; do
    [ -n "$(config_of "${model%:*}")" ] || die 2 "there is no model config configs/gpt_${model%:*}.args"
    [[ ${model##*:} =~ ^[1-9][0-9]*$ ]] || die 2 "the model $model has no micro-batch; use NAME:MICRO_BATCH"
done
name_of() { basename "${1%:*}" .args; } # MODEL:ROWS

weights=(--quantized-weights --weight-quantization-bits 4 --wq-group-size 2048 --wq-rounding stochastic)
gradients=(--quantized-gradients --gradient-quantization-bits-inter 4 --gq-group-size-inter 128
    --gradient-quantization-bits-intra 8 --gq-group-size-intra 128)
preset_flags() { # NAME: sets $preset
    case ${1%%+*} in
    fp32) preset=() ;;
    bf16) preset=(--grad-reduce-in-bf16) ;;
    qwd) preset=(--grad-reduce-in-bf16 "${weights[@]}") ;;
    qw) preset=(--grad-reduce-in-bf16 "${weights[@]}" --weight-quantization-method direct) ;;
    tlq) preset=("${gradients[@]}") ;;
    tlq-hs) preset=("${gradients[@]}" --hadamard-transform) ;;
    ulq) preset=("${gradients[@]}" --gradient-quantization-bits-intra 4) ;;
    sdp4bit) preset=("${weights[@]}" "${gradients[@]}" --hadamard-transform) ;;
    eden | eden3 | eden2-ef | lossless | eden-lossless | local) preset=("@configs/${1%%+*}.args") ;;
    *) die 2 "the preset $1 is unknown; use fp32, bf16, qwd, qw, tlq, tlq-hs, ulq, \
sdp4bit or one of configs/" ;;
    esac
    case $1 in
    *+sums) preset+=(--verify-wire) ;;
    *+grads) preset+=(--data-parallel-sharding-strategy optim_grads) ;;
    *+params) preset+=(--data-parallel-sharding-strategy optim_grads_params) ;;
    *+offload) preset+=(--optimizer-cpu-offload) ;;
    *+*) die 2 "the preset $1 is unknown; use NAME, NAME+sums, NAME+grads, NAME+params or NAME+offload" ;;
    esac
}
for name in $presets; do preset_flags "$name"; done  # fail early on an unknown preset

# network_flags NETWORK: sets $where.
network_flags() {
    unset OMPI_MCA_pml OMPI_MCA_btl OMPI_MCA_btl_tcp_if_include
    case $1 in
    inside) where=(--gpus-per-node "$ranks") ;;
    logical) where=(--gpus-per-node "$per_node") ;;
    *)
        where=(--gpus-per-node "$per_node" --emulate-nodes)
        # Without this MPI would use shared memory.
        [ "$device" = gpu ] ||
            export OMPI_MCA_pml=ob1 OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=lo
        ;;
    esac
}
# model_flags MODEL:ROWS RANKS MICRO_BATCHES: sets $what.
model_flags() {
    # With a timeout of one minute, a hanging rank is reported before the time limit.
    what=("@$(config_of "${1%:*}")" --micro-batch-size "${1##*:}" --global-batch-size $((${1##*:} * $2 * $3))
        --mock-data --hidden-dropout 0 --attention-dropout 0 --train-iters 1000000 --eval-interval 1000000
        --eval-iters 0 --distributed-timeout-minutes 1 ${flags[@]+"${flags[@]}"})
}

# --- running --------------------------------------------------------------------------------------

grace=5  # seconds for a command to stop
ending=5 # seconds to write the table and restore the loopback
folder=$(mktemp -d) shaped=0
end_jobs() { # stops background jobs
    local running
    running=$(jobs -p)
    # shellcheck disable=SC2086 # $running is a list
    [ -z "$running" ] || { kill -TERM $running 2>/dev/null || true; wait; }
}
clean_up() {
    trap '' HUP INT TERM # a second Ctrl-C must not skip restoring the loopback
    end_jobs
    [ $shaped = 0 ] || scripts/emulate_network.sh restore >&2 || true
    rm -rf "$folder"
}
stopped() { # handles a signal
    trap '' HUP INT TERM
    end_jobs
    if write_table 2>/dev/null; then
        say "stopped; what was measured before is in $out" >&2
    else
        say "stopped before anything was measured" >&2
    fi
    exit 1
}
case $logs in '') logs=$folder ;; /*) ;; *) logs=$caller/$logs ;; esac
table=(table "$logs" "$out" "${out%.json}.svg")
[ $sync_only = 0 ] || table=(sync "$logs" "$out")
write_table() { python3 dev/bench/comm_table.py "${table[@]}" >"$folder/table"; }
trap clean_up EXIT
trap stopped HUP INT TERM
mkdir -p "$logs"

# shape_network NETWORK: returns false with a warning if this machine cannot emulate the network.
shape_network() {
    local words=(restore) how=0
    case $1 in
    inside | logical) [ $shaped = 1 ] || return 0 ;;
    *) words=("$nodes" "${1/sockets/unlimited}") how=1 ;;
    esac
    [ $how = 0 ] || shaped=1 # restore the loopback even after a partial failure
    if scripts/emulate_network.sh "${words[@]}" >"$folder/shape" 2>&1; then
        shaped=$how
        cat "$folder/shape" >&2
    else
        say "warning: skipped the network $1: $(tail -n 1 "$folder/shape")" >&2
        return 1
    fi
}
left() { say $((limit - SECONDS)); }
# time_for SECONDS: prints SECONDS, or less if the time limit requires it; 0 if no time is left.
# Don't pass 0 to timeout, where it means no limit.
time_for() {
    local most=$((limit - SECONDS - grace - ending))
    [ $most -le "$1" ] || most=$1
    [ $most -ge 0 ] || most=0
    say $most
}
# started COMMAND...: runs the command with its output in files. On failure, prints the last lines
# and keeps the files in --logs. The command runs in the background, because the shell handles
# signals only after a foreground command has ended, and Ctrl-C does not reach timeout's process
# group.
started() {
    "$@" >"$folder/out" 2>"$folder/err" &
    wait $! && return
    cp "$folder/out" "$logs/failed.$SECONDS.out" && cp "$folder/err" "$logs/failed.$SECONDS.err"
    grep -v '^--\|^$' "$folder/err" | tail -n 5 >&2
    tail -n 1 "$folder/out" >&2
    return 1
}
export -f launch one_machine without_banners oom_kills out_of_memory say_killed_rank say say_signal
# in_time SECONDS RANKS COMMAND...: replaces the shell with timeout, which then gets signals. The
# inner shell ignores SIGTERM, so that timeout waits for mpirun, which gets the signal too and ends
# its ranks.
in_time() {
    local seconds=$1
    shift
    exec timeout -k $grace "$seconds" bash -c 'trap : TERM; launch "$@"' launch "$@"
}

# synchronize MODEL NETWORK REPETITIONS: measures the bandwidth of plain collectives and the bytes
# per bucket of each preset. With REPETITIONS > 0, also measures the time of synchronization.
synchronize() {
    local name words=() file seconds
    seconds=$(time_for "$limit")
    [ "$seconds" -gt 0 ] || { say "skipped for lack of time: synchronization of $1, $2" >&2; return; }
    file=$logs/sync/$(name_of "$1")/$2.jsonl
    mkdir -p "$(dirname "$file")"
    network_flags "$2"
    model_flags "$1" $ranks 1
    for name in $presets; do
        preset_flags "$name"
        words+=(--preset "$name" ${preset[@]+"${preset[@]}"})
    done
    started in_time "$seconds" $ranks "$synchronizer" --out "$file" --repetitions "$3" \
        --plain-mb "${plain_mb:-256}" "${what[@]}" "${where[@]}" "${words[@]}" ||
        say "warning: measuring the synchronization of $1, $2 failed" >&2
}

config_value() { sed -n "s/^--$2[ =]*\([0-9]*\).*/\1/p" "$1" | tail -n 1; } # FILE NAME: a number
# second_of LAYERS MODEL MICRO_BATCHES: prints how many steps a GPU with 400 TFLOP/s computes in
# about a second, at least four.
second_of() {
    local file hidden length steps=10
    file=$(config_of "${2%:*}")
    hidden=$(config_value "$file" hidden-size) length=$(config_value "$file" seq-length)
    [ "$1" -lt 1 ] || [ "${hidden:-0}" = 0 ] || [ "${length:-0}" = 0 ] ||
        steps=$((400000000000000 / (72 * $1 * hidden * hidden * length * ${2##*:} * $3) + 1))
    [ $steps -ge 4 ] || steps=4
    [ $steps -le 200 ] || steps=200
    say $steps
}
# compute_alone MODEL GPU: starts to measure layer times on one rank, with all layers and with half
# of them, and with one and two micro-batches. Each measurement follows two seconds of the same
# steps, so that the GPU runs at its sustained clock, as in the steps of all ranks.
alone_pid=() alone_model=() alone_at=() alone_out=() # of running measurements
compute_alone() {
    local depth words=() k at layers steps warm=2 seconds
    [ "$device" = gpu ] || warm=1
    at=$logs/one/$(name_of "$1")/${1##*:}
    if [ -e "$at/done" ]; then
        say "using the layer times of $1 from an earlier call in $at;" \
            "remove that folder to measure them again, for example on another machine" >&2
        return
    fi
    seconds=$(time_for 200)
    [ "$seconds" -gt 0 ] || { say "skipped for lack of time: layers of $1: no bound" >&2; return; }
    mkdir -p "$at"
    layers=$(config_value "$(config_of "${1%:*}")" num-layers)
    for depth in full half; do
        [ $depth = full ] || layers=$((layers / 2))
        for k in 1 2; do
            model_flags "$1" 1 $k
            steps=$most
            [ "$device" = cpu ] || steps=$(second_of "$layers" "$1" "$k")
            words+=(--preset "$depth-$k" "${what[@]}" --log-interval "$steps"
                --exit-interval $(((warm + 1) * steps)) --timing-log-level 2
                --log-jsonl "$at/$depth-$k.jsonl")
            [ $depth = full ] || words+=(--num-layers "$layers")
        done
    done
    # One rank needs no launcher.
    env OMPI_MCA_plm=isolated OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
        ${2:+CUDA_VISIBLE_DEVICES="$2"} \
        timeout -k $grace "$seconds" "$trainer" "${words[@]}" >"$folder/one.$2.out" 2>&1 &
    alone_pid+=($!) alone_model+=("$1") alone_at+=("$at") alone_out+=("$folder/one.$2.out")
}
layers_timed() { # waits for running measurements
    local i
    for ((i = 0; i < ${#alone_pid[@]}; i++)); do
        if wait "${alone_pid[i]}"; then
            : >"${alone_at[i]}/done"
        else
            tail -n 3 "${alone_out[i]}" >&2
            say "warning: ${alone_model[i]} on one rank failed: no bound" >&2
        fi
    done
    alone_pid=() alone_model=() alone_at=() alone_out=()
}

# forget FOLDER PRESET...: removes the logs of earlier runs of these presets, so that a new run
# without loopback byte counts does not get the old counts.
forget() {
    local at=$1 name
    shift
    for name in "$@"; do
        rm -f "$at/$name.jsonl"
        [ ! -e "$at/loopback" ] || sed -i "/^{\"arm\":\"$name\",/d" "$at/loopback"
    done
}

# train_once MODEL NETWORK PRESET...: runs the presets that fit into the time limit in one process
# per rank. Sets $begun to their names. Returns false if a rank failed.
begun=()
train_once() {
    local model=$1 network=$2 name steps words=() planned=0 before=$SECONDS at seconds count
    shift 2
    at=$logs/train/$(name_of "$model")/${model##*:}/$network begun=()
    network_flags "$network"
    model_flags "$model" $ranks 1
    seconds=$(time_for "$limit")
    python3 dev/bench/comm_table.py steps "$logs" "$(name_of "$model")" "${model##*:}" "$network" \
        "$seconds" "$start" "$most" "$@" >"$folder/steps"
    while read -r name steps; do
        if [ "$name" = seconds ]; then
            planned=${steps%.*}
        elif [ "$steps" = 0 ]; then
            say "skipped for lack of time or communication: $model, $network, $name ($(left) s left)" >&2
        elif [ "${name%%+*}" = local ] && { [ "$network" = inside ] || [ "$nodes" = 1 ]; }; then
            say "skipped, because local steps need two nodes: $model, $network, $name" >&2
        else
            preset_flags "$name"
            words+=(--preset "$name" ${preset[@]+"${preset[@]}"} --log-interval "$steps"
                --exit-interval $((2 * steps)) --log-jsonl "$at/$name.jsonl")
            begun+=("$name")
        fi
    done <"$folder/steps"
    count=${#begun[@]}
    [ "$count" -gt 0 ] || return 0
    mkdir -p "$at"
    forget "$at" "${begun[@]}"
    say "$SECONDS s: $model, $network, $count presets, about $planned s" >&2
    started in_time "$seconds" $ranks "$trainer" --loopback "$at/loopback" "${what[@]}" "${where[@]}" \
        "${words[@]}" || return 1
    # Update the estimated start-up time of a preset.
    start=$(((SECONDS - before - planned + start * count + count - 1) / count))
    [ $start -ge 1 ] || start=1
}

# train MODEL NETWORK: runs all presets. If a preset fails, runs the remaining ones without it.
train() {
    local lost=()
    # shellcheck disable=SC2086 # $presets is a list
    train_once "$1" "$2" $presets && return
    # Presets run in this order, so the first one without a row has failed.
    mapfile -t lost < <(python3 dev/bench/comm_table.py unfinished "$logs" "$(name_of "$1")" "${1##*:}" "$2" \
        "${begun[@]}")
    if [ ${#lost[@]} -lt 2 ] || [ "$(time_for "$limit")" = 0 ]; then
        say "warning: not every preset of $1, $2 finished${lost[0]:+: ${lost[*]}}" >&2
        return
    fi
    say "warning: $1, $2, ${lost[0]} did not finish; running again without it: ${lost[*]:1}" >&2
    train_once "$1" "$2" "${lost[@]:1}" || say "warning: not every preset of $1, $2 finished" >&2
}

sizes=$(for model in $models; do say "${model%:*}"; done | sort -u)
first_of() { # SIZE: the first model of that size
    for model in $models; do [ "${model%:*}" != "$1" ] || { say "$model"; return; }; done
}
# Try every network before measuring anything.
had=''
for network in $networks; do ! shape_network "$network" || had+=" $network"; done
networks=$had
[ -n "$networks" ] || die 3 "no network is left to measure"
shape_network inside || true

if [ $sync_only = 0 ]; then
    k=0
    for model in $models; do
        if [ "$device" = gpu ]; then
            compute_alone "$model" "${visible[k]:-$k}" # each model on another GPU
            k=$(((k + 1) % gpus))
        else
            compute_alone "$model" ''
        fi
        [ $k -gt 0 ] || layers_timed
    done
    layers_timed
    say "$SECONDS s: measured the layer times" >&2
fi
for network in $networks; do
    shape_network "$network" || continue
    for size in $sizes; do synchronize "$(first_of "$size")" "$network" "$((sync_only * (most + 1)))"; done
    if [ $sync_only = 0 ]; then for model in $models; do train "$model" "$network"; done; fi
    write_table 2>/dev/null || true # there may be no row yet
done
write_table && cat "$folder/table"
