#!/usr/bin/env bash
# Restarts a training command until training is complete. The command must have --save and --load
# with the same folder, so that every start resumes from the last checkpoint.
# It restarts immediately after exit code 75 (stopped by a signal, saved). It restarts after an
# increasing pause after exit code 7 (a rank, a network or a GPU was lost) and after a signal killed
# a rank (SIGKILL by the out-of-memory killer, SIGBUS, SIGSEGV).
# It gives up after several starts in a row without a new checkpoint, because such a failure is
# likely to repeat.
# mpirun of Open MPI 4 can hang after all of its ranks are gone. The script ends it after a grace
# period without ranks and restarts the command as after exit code 7.
#
#   scripts/run_until_done.sh [--max-restarts 100] [--max-without-progress 3] [--pause 10] -- \
#       scripts/mpirun.sh -np 8 build/train_gpt @configs/gpt_1.3b.args --save runs/my --load runs/my
#   CHECKPOINT_PATH=runs/1.3b scripts/run_until_done.sh -- scripts/train_1.3b.sh ...
#
# The command may be a script that starts mpirun. On Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 the run
# saves and exits. A second Ctrl-C or SIGTERM ends it at once. The exit code is
# the last run's.
# shellcheck source-path=SCRIPTDIR source=common.sh source=ask_to_stop.sh
caller=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
. scripts/ask_to_stop.sh
set -u
cd "$caller" || exit 3 # relative paths refer to the caller's folder

most=100 fruitless=3 pause=10 grace=60
say() { printf 'run_until_done: %s\n' "$*" >&2; }
usage() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}
number() {
    case ${2:-} in
    '' | *[!0-9]*) usage "$1 must be a non-negative integer" ;;
    *) printf '%s' "$((10#$2))" ;;
    esac
}
while [ $# -gt 0 ]; do
    case $1 in
    --max-restarts) most=$(number "$@") || exit 2; shift 2 ;;
    --max-without-progress) fruitless=$(number "$@") || exit 2; shift 2 ;;
    --pause) pause=$(number "$@") || exit 2; shift 2 ;;
    --grace) grace=$(number "$@") || exit 2; shift 2 ;;
    --help | -h)
        cat <<'HELP'
usage: scripts/run_until_done.sh [--max-restarts N] [--max-without-progress N] [--pause SECONDS]
                                 [--grace SECONDS] -- COMMAND...
Restarts COMMAND until training is complete. COMMAND must have --save and --load with the same folder.
It restarts after exit codes 7 and 75, and after a signal killed a rank (129 to 192, such as 137 for
SIGKILL). It does not restart after 130 and 143 (SIGINT, SIGTERM), which are deliberate stops.

  --max-restarts N          give up after N restarts [100]
  --max-without-progress N  give up after N starts in a row without a new checkpoint [3]
  --pause SECONDS           pause before a restart [10]; none after 75. It doubles while there is no
                            progress, up to 16 times its initial length.
  --grace SECONDS           end an mpirun whose ranks on this machine are all gone for this long [60],
                            and restart; 0: wait for it without limit

On Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 the run saves and exits. A second Ctrl-C or SIGTERM ends it at
once.
HELP
        exit 0 ;;
    --) shift; break ;;
    *) usage "unknown argument $1; put -- before the command" ;;
    esac
done
[ $# -gt 0 ] || usage "no command given; see --help"
[ "$fruitless" -gt 0 ] || usage "--max-without-progress must be at least 1"

# Sets $folder, $from and $step to the values of --save, --load and --ckpt-step. As in the trainer,
# the flags can be in an argument file and the last ones win. scripts/train_*.sh use CHECKPOINT_PATH
# as the default of --save and --load.
folder='' from='' step=''
find_folder() {
    local word words value
    if [ -n "${CHECKPOINT_PATH:-}" ] && [ "${SPEED:-}" != 1 ]; then
        for word; do
            case ${word##*/} in train_*.sh) folder=$CHECKPOINT_PATH from=$CHECKPOINT_PATH ;; esac
        done
    fi
    read_words "$@"
    last_value --save
    [ -z "$value" ] || folder=$value
    last_value --load
    [ -z "$value" ] || from=$value
    last_value --ckpt-step
    step=$value
}
# same_folder A B: true for two paths of one folder, which need not exist yet.
same_folder() {
    [ "$1" = "$2" ] || [ "$1" -ef "$2" ] ||
        [ "$(realpath -m -- "$1" 2>/dev/null)" = "$(realpath -m -- "$2" 2>/dev/null)" ]
}
find_folder "$@"
[ -n "$folder" ] && [ -n "$from" ] ||
    usage "the command has no --save or no --load, so a restart would start from scratch"
same_folder "$folder" "$from" ||
    usage "the command has --save $folder and --load $from, so every restart would begin with the \
checkpoint in the latter; use the same folder for both (to start from another run's checkpoint, run \
without this script until the first save)"
case $step in '' | -1) ;; *)
    usage "the command has --ckpt-step $step, so every restart would go back to that iteration; run \
without this script until the first save, then without the flag" ;;
esac
# Prints the iteration of the last checkpoint. Reads only regular files, because a pipe would block,
# and a limited length, because a damaged tracker can have any size.
saved() {
    local tracker=$folder/latest_checkpointed_iteration.txt
    if [ -f "$tracker" ] && [ -r "$tracker" ]; then
        head -c 64 "$tracker" | tr -d '\000'
    else
        echo none
    fi
}

# Succeeds for exit codes that justify a restart: saved and stopped (75), a lost rank (7), a rank
# killed by a signal (128 + signal). SIGINT (130) and SIGTERM (143) are deliberate stops. SIGUSR1
# (138) arrived before the ranks had started and counts like 75.
should_restart() {
    case $1 in
    7 | 75) return 0 ;;
    130 | 143) return 1 ;;
    *) [ "$1" -gt 128 ] && [ "$1" -le 192 ] ;;
    esac
}

# count_ranks PID: sets $launchers and $ranks to the numbers of launchers and of running ranks among
# process PID and its descendants. A rank has its number in the environment. Zombies have none.
count_ranks() {
    local pid rest name
    launchers=0 ranks=0
    while read -r pid rest; do
        if tr '\0' '\n' <"/proc/$pid/environ" | grep -qE '^(OMPI_COMM_WORLD_RANK|PMI_RANK)='; then
            ranks=$((ranks + 1))
        fi
        read -r name <"/proc/$pid/comm" || continue
        case $name in
        mpirun* | mpiexec* | orterun | prterun | hydra_pmi_proxy) launchers=$((launchers + 1)) ;;
        esac
    done < <(processes_below "$1") 2>/dev/null
}
# end_idle_launcher PID: ends the run PID and returns 7 if its launcher has been alive for $grace
# seconds without any rank. Returns 0 once the run has ended by itself. Does nothing before the
# first rank on this machine, because all ranks may be on other machines.
end_idle_launcher() {
    local launchers ranks seen=0 since=$SECONDS pids
    while kill -0 "$1" 2>/dev/null; do
        count_ranks "$1"
        if [ "$ranks" -gt 0 ]; then seen=1; fi
        if [ "$ranks" -gt 0 ] || [ "$launchers" = 0 ]; then since=$SECONDS; fi
        if [ $seen = 1 ] && [ $((SECONDS - since)) -ge "$grace" ]; then
            say "no rank has been running for $grace s, but the launcher has not exited; ending it"
            mapfile -t pids < <(processes_below "$1" | cut -d ' ' -f 1)
            kill -s TERM "${pids[@]}" 2>/dev/null
            sleep 5
            kill -s KILL "${pids[@]}" 2>/dev/null
            return 7
        fi
        if [ $seen = 1 ]; then sleep 1; else sleep 0.2; fi # ranks may fail soon after their start
    done
    return 0
}

# Signals to this script are forwarded to the run, which saves and exits with 75. After that there
# is no restart. The run has its own session, because Ctrl-C in the terminal would make mpirun kill
# the ranks.
signals=0 last_signal='' child='' session=()
if command -v setsid >/dev/null; then session=(setsid); fi
forward() {
    signals=$((signals + 1)) last_signal=$1
    [ -z "$child" ] || stop_run "$1" $signals "$child"
}
for name in HUP INT TERM USR1; do
    # shellcheck disable=SC2064 # expand the name now
    trap "forward $name" $name
done

wait_until_exit() { # PID: sets $status. A signal interrupts wait before the process has exited.
    local seen
    while :; do
        seen=$signals
        wait "$1"
        status=$?
        [ "$seen" != "$signals" ] || break
    done
}

restarts=0 without=0 wait_for=$pause
while :; do
    before=$(saved) handled=$signals
    ${session[@]+"${session[@]}"} "$@" &
    child=$! watcher=
    # A signal that arrived before $child was set has not been forwarded.
    [ $signals = "$handled" ] || stop_run "$last_signal" $signals "$child"
    if [ "$grace" -gt 0 ]; then
        end_idle_launcher "$child" </dev/null &
        watcher=$!
    fi
    wait_until_exit "$child"
    code=$status child=
    if [ -n "$watcher" ]; then
        wait_until_exit "$watcher"
        [ $status != 7 ] || code=7
    fi
    should_restart "$code" || exit "$code"
    if [ $signals -gt 0 ]; then
        say "stopped by a signal; exit code $code, last checkpoint $(saved)"
        exit "$code"
    fi
    if [ "$(saved)" = "$before" ]; then without=$((without + 1)); else without=0 wait_for=$pause; fi
    if [ $without -ge "$fruitless" ]; then
        say "giving up: exit code $code, and no checkpoint after $before in $without starts"
        exit "$code"
    fi
    if [ $restarts -ge "$most" ]; then
        say "giving up after $restarts restarts: exit code $code, last checkpoint $(saved)"
        exit "$code"
    fi
    restarts=$((restarts + 1))
    if [ $code != 75 ]; then
        say "exit code $code; restart $restarts from checkpoint $(saved) in $wait_for s"
        sleep "$wait_for" &
        child=$!
        wait "$child"
        child=
        [ $without = 0 ] || [ $wait_for -ge $((16 * pause)) ] || wait_for=$((2 * wait_for))
        [ $signals = 0 ] || exit "$code"
    else
        say "exit code 75; restart $restarts from checkpoint $(saved)"
    fi
done
