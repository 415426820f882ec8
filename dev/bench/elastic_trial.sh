#!/usr/bin/env bash
# Trains with elastic replica groups over a slow network while groups fail. Four groups of one CPU
# rank and the rendezvous each have a network namespace of this machine, connected by
# dev/bench/slow_network. Regularly a random group is killed and restarts, is frozen, or is cut off
# from the network. The rendezvous restarts twice, and one group runs at half speed for a quarter of
# the time. Undisturbed runs with other seeds train at the same time, over the loopback.
# dev/bench/elastic_trial.py describes the results. Targets: goodput at least 88 %, no wait for a
# round longer than --grace (restarts of the rendezvous count, too), training blocked no longer than
# that, equal weights in all groups, and a loss between the undisturbed runs'.
#
#   dev/bench/elastic_trial.sh [--minutes 20] [--mbit 100] [--rtt 50] [--interval 60] [--grace 5]
#                              [--away 1] [--local-steps 10] [--iters N] [--cpus 0.1]
#                              [--undisturbed 2] [--seed 1] [--logs FOLDER] [--out FILE.json]
#
#   minutes      how long groups are disturbed
#   mbit, rtt    rate of each group's link in Mb/s, and round trip in ms
#   interval     seconds from one failure to the next
#   grace        --sync-grace-seconds
#   away         seconds from a kill of the rendezvous to its restart. Longer than --grace, no round
#                can close in time, but training is still blocked for at most --grace
#   iters        --train-iters [minutes x 960]. The run must take longer than the failures
#   cpus         CPU cores for each group (cgroups)
#   undisturbed  number of undisturbed runs
#   seed         of the failures
#   logs         keeps the logs in this folder
#
# The fourth group accepts no connections, as with NAT, so it connects to the others. Needs root,
# /dev/net/tun, make and make bench. BUILD: folder of the programs.
# shellcheck source-path=SCRIPTDIR source=../../scripts/common.sh
caller=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
help_if_asked dev/bench/elastic_trial.sh "$@"
set -euo pipefail

COMMAND_LINE="dev/bench/elastic_trial.sh${*:+ ${*@Q}}"
COMMIT=$(git rev-parse --short HEAD 2>/dev/null || say unknown)
export COMMAND_LINE COMMIT LC_ALL=C OPENBLAS_NUM_THREADS=1
minutes=20 mbit=100 rtt=50 interval=60 grace=5 away=1 steps=10 iters='' cpus=0.1 undisturbed=2 seed=1 logs=''
out=dev/bench/results/elastic_trial.json
from_caller() { case $1 in /*) say "$1" ;; *) say "$caller/$1" ;; esac; }
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || die 2 "$1 needs a value; see dev/bench/elastic_trial.sh --help"
    case $1 in
    --minutes) minutes=$2 ;;
    --mbit) mbit=$2 ;;
    --rtt) rtt=$2 ;;
    --interval) interval=$2 ;;
    --grace) grace=$2 ;;
    --away) away=$2 ;;
    --local-steps) steps=$2 ;;
    --iters) iters=$2 ;;
    --cpus) cpus=$2 ;;
    --undisturbed) undisturbed=$2 ;;
    --seed) seed=$2 ;;
    --logs) logs=$(from_caller "$2") ;;
    --out) out=$(from_caller "$2") ;;
    *) die 2 "unknown argument $1; see dev/bench/elastic_trial.sh --help" ;;
    esac
    shift 2
done
iters=${iters:-$((minutes * 960))}
programs=("$BUILD"/{train_gpt_cpu,rendezvous,preprocess_data,dev/bench/slow_network})
for program in "${programs[@]}"; do
    [ -x "$program" ] || die 3 "$program is missing; run make all bench"
done
[ "$(id -u)" = 0 ] || die 3 "network namespaces need root"
work=$(mktemp -d)
cp "${programs[@]}" "$work" # a build during the run does not change them
logs=${logs:-$work/logs}
make_folder "$logs"
make_folder "$(dirname "$out")"
one_machine

sites=() # network namespaces of this run
# Ends everything in the namespaces.
finish() {
    local site
    exec 2>/dev/null # no messages of the shell about killed jobs
    for site in ${sites[@]+"${sites[@]}"}; do
        ip netns pids "$site" | xargs -r kill -KILL || true
        ip netns del "$site" || true
    done
    sleep 1 # a cgroup can be removed once its processes have ended
    for site in ${sites[@]+"${sites[@]}"}; do rmdir "$(quota_folder "$site")" || true; done
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

half() { awk -v number="$1" 'BEGIN { print number / 2 }'; }

# ---- machines: a namespace and a CPU quota -------------------------------------------------------
cgroups=/sys/fs/cgroup
[ ! -d /sys/fs/cgroup/cpu ] || cgroups=/sys/fs/cgroup/cpu # version 1
quota_folder() { say "$cgroups/$1"; }
# set_quota SITE CORES
set_quota() {
    local folder period=20000 used
    folder=$(quota_folder "$1")
    used=$(awk -v cores="$2" -v period=$period 'BEGIN { printf "%d", cores * period }')
    if [ -e "$folder/cpu.max" ]; then say "$used $period" >"$folder/cpu.max"; return; fi
    say $period >"$folder/cpu.cfs_period_us"
    say "$used" >"$folder/cpu.cfs_quota_us"
}
add_site() { # NAME
    ip netns add "$1"
    sites+=("$1")
    ip -n "$1" link set lo up
    mkdir -p "$(quota_folder "$1")"
}
# in_site SITE COMMAND...: replaces this shell, so call it in the background.
in_site() {
    local site=$1
    shift
    say "$BASHPID" >"$(quota_folder "$site")/cgroup.procs"
    exec ip netns exec "$site" nice -n 5 "$@"
}

# ---- programs ------------------------------------------------------------------------------------
keys=$work/keys names=(one two three four)
"$work/rendezvous" keygen "$keys" "${names[@]}" >/dev/null
find llmc dev test sdp4bit docs -name '*.[ch]' -o -name '*.md' -o -name '*.py' | sort >"$work/files"
"$work/preprocess_data" --text --input-list "$work/files" --tokenizer-type Byte --append-eod --workers 1 \
    --output-prefix "$work/text" >/dev/null 2>&1 || die 1 "preprocess_data failed"
data=$(ls "$work"/text*.bin)
flags=(--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --make-vocab-size-divisible-by 8 --tokenizer-type Byte --bf16 --use-distributed-optimizer
    --micro-batch-size 8 --global-batch-size 8 --lr 2e-3 --min-lr 2e-3 --lr-decay-style constant
    --lr-warmup-iters 50 --hidden-dropout 0 --attention-dropout 0 --clip-grad 1.0 --split 994,3,3
    --train-iters "$iters" --log-interval 1 --eval-interval $((iters / 10)) --eval-iters 1 --full-validation
    --local-steps "$steps" --quantized-gradients --gradient-quantization-method eden
    --gq-group-size-inter 256 --max-replica-groups 4 --sync-grace-seconds "$grace"
    --save-interval 100 --keep-last-checkpoints 1 --data-path "${data%.bin}")
# group RUN SITE NAME FLAGS...: starts a group, which restarts until it has finished. Its log, with
# times, is $logs/RUN.NAME.lines.
group() {
    local run=$1 site=$2 name=$3
    shift 3
    (in_site "$site" scripts/run_until_done.sh --pause 1 --max-restarts 1000 --max-without-progress 1000 \
        -- mpirun "${options[@]}" -np 1 "$work/train_gpt_cpu" "${flags[@]}" --save "$work/$run.$name" \
        --load "$work/$run.$name" --rendezvous-keys "$keys" --replica-group "$name" "$@" \
        2>"$logs/$run.$name.err" </dev/null) | python3 dev/bench/save_table.py stamp "$logs/$run.$name.lines" &
    groups+=("$!")
}
serve() { # RUN SITE
    (in_site "$2" "$work/rendezvous" serve --listen 'tcp://*:29400' --keys "$keys" \
        >>"$logs/$1.rendezvous" 2>&1 </dev/null) &
    [ "$1" != trial ] || server=$!
}
# pids_of SITE PROGRAM
pids_of() {
    local pid
    for pid in $(ip netns pids "$1"); do
        [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ] && say "$pid"
    done
    return 0
}
send() { # SIGNAL SITE
    pids_of "$2" train_gpt_cpu | xargs -r kill -"$1" || true
}
options=(--oversubscribe --bind-to none) # not all ranks on the first core
[ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)

# ---- runs ----------------------------------------------------------------------------------------
groups=()
prefix=trial$$-
machines=("${prefix}server" "${names[@]/#/$prefix}")
for machine in "${machines[@]}"; do add_site "$machine"; done
mkfifo "$work/commands"
"$work/slow_network" "$(half "$rtt")" "$mbit" "${machines[@]}" <"$work/commands" >"$work/network" &
exec 9>"$work/commands"
until grep -q ready "$work/network"; do
    kill -0 $! 2>/dev/null || die 3 "the emulated network could not be started"
    sleep 0.1
done
for i in "${!machines[@]}"; do
    ip -n "${machines[i]}" addr add "10.77.0.$((i + 1))/24" dev slow
    ip -n "${machines[i]}" link set slow up
done
say "outgoing ${prefix}four" >&9
set_quota "${prefix}server" "$cpus"
serve trial "${prefix}server"
for i in "${!names[@]}"; do
    listens=(--rendezvous-listen "tcp://10.77.0.$((i + 2)):29401")
    [ "${names[i]}" != four ] || listens=()
    set_quota "$prefix${names[i]}" "$cpus"
    group trial "$prefix${names[i]}" "${names[i]}" --seed 1 --rendezvous tcp://10.77.0.1:29400 \
        ${listens[@]+"${listens[@]}"}
done
for run in $(seq "$undisturbed"); do
    add_site "${prefix}seed$run"
    set_quota "${prefix}seed$run" "$(awk -v cpus="$cpus" 'BEGIN { print 4.2 * cpus }')"
    serve "seed$run" "${prefix}seed$run"
    for name in "${names[@]}"; do
        group "seed$run" "${prefix}seed$run" "$name" --seed "$run" --rendezvous tcp://127.0.0.1:29400
    done
done

# ---- failures ------------------------------------------------------------------------------------
event() { # WORDS...
    say "$(cut -d ' ' -f 1 /proc/uptime) $*" | tee -a "$logs/trial.events" >&2
}
running() { [ -n "$(pids_of "$1" train_gpt_cpu)" ]; }
# disturb KIND NAME SECONDS
disturb() {
    local site=$prefix$2
    event "$1" "$2" "$3"
    case $1 in
    kill) send KILL "$site" ;;
    freeze) send STOP "$site"; sleep "$3"; send CONT "$site" ;;
    cut)
        say "cut $site" >&9
        sleep "$3"
        if [ "$2" = four ]; then say "outgoing $site" >&9; else say "heal $site" >&9; fi
        ;;
    esac
    event end "$1" "$2"
}
restart_rendezvous() {
    event restart rendezvous "$away"
    pids_of "${prefix}server" rendezvous | xargs -r kill -KILL || true
    wait "$server" 2>/dev/null || true
    sleep "$away"
    serve trial "${prefix}server"
    event end restart rendezvous
}
rm -f "$logs/trial.events"
sleep $((interval < 30 ? interval : 30))
RANDOM=$seed
began=$SECONDS count=$((minutes * 60 / interval)) kinds=(kill freeze cut)
for ((i = 0; i < count; i++)); do
    kind=${kinds[RANDOM % 3]} name=${names[RANDOM % 4]} seconds=$((5 + RANDOM % (interval * 2 / 3)))
    [ "$kind" != kill ] || seconds=0
    running "${prefix}one" || break
    case $i in
    $((count / 4))) event slow two 0; set_quota "${prefix}two" "$(half "$cpus")" ;;
    $((count / 2))) event end slow two; set_quota "${prefix}two" "$cpus" ;;
    esac
    disturb "$kind" "$name" "$seconds"
    if [ $i = $((count / 3)) ] || [ $i = $((count * 2 / 3)) ]; then
        sleep $(((interval - seconds) / 2))
        restart_rendezvous
    fi
    left=$((began + (i + 1) * interval - SECONDS))
    [ $left -le 0 ] || sleep $left
done
say "waiting for the end of the runs" >&2
wait "${groups[@]}" || true
exec 9>&-
python3 dev/bench/elastic_trial.py "$logs" "$out" "$steps" "$grace" "$mbit" "$rtt" "$minutes" "$cpus"
