#!/usr/bin/env bash
# Runs a training command again and again until it is done. The command must have --save and --load
# of one folder, so that every start goes on from the last checkpoint.
# It is started again at once after exit code 75 (stopped by a signal, saved). After 7 (a rank, a
# network or a GPU was lost) and after a rank that was killed by a signal (SIGKILL for want of
# memory, SIGBUS, SIGSEGV) it is started again after a pause, which grows.
# It is given up when starts bring no new checkpoint: what ends a run twice at the same place will
# end it again.
#
#   scripts/run_until_done.sh [--max-restarts 100] [--max-without-progress 3] [--pause 10] -- \
#       mpirun -np 8 build/train_gpt @configs/gpt_1.3b.args --save runs/a --load runs/a ...
#   CHECKPOINT_PATH=runs/a scripts/run_until_done.sh -- scripts/train_1.3b.sh ...
#
# The command may be a script that starts mpirun. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 let the run
# save and leave. A second one ends it at once. The exit code is that of the last run.
# shellcheck source-path=SCRIPTDIR source=common.sh source=ask_to_stop.sh
caller=$PWD
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
. scripts/ask_to_stop.sh
set -u
cd "$caller" || exit 3 # relative paths are the caller's

most=100 fruitless=3 pause=10
say() { printf 'run_until_done: %s\n' "$*" >&2; }
usage() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}
number() {
    case ${2:-} in
    '' | *[!0-9]*) usage "$1 wants a whole number" ;;
    *) printf '%s' "$((10#$2))" ;;
    esac
}
while [ $# -gt 0 ]; do
    case $1 in
    --max-restarts) most=$(number "$@") || exit 2; shift 2 ;;
    --max-without-progress) fruitless=$(number "$@") || exit 2; shift 2 ;;
    --pause) pause=$(number "$@") || exit 2; shift 2 ;;
    --help | -h)
        cat <<'HELP'
usage: scripts/run_until_done.sh [--max-restarts N] [--max-without-progress N] [--pause SECONDS]
                                 -- COMMAND...
Runs COMMAND again and again until it is done. COMMAND must have --save and --load of one folder.
It is started again after exit codes 7 and 75, and after a rank that a signal killed (129 to 192,
as 137 for SIGKILL). It is not after 130 and 143 (SIGINT, SIGTERM): somebody ended it.

  --max-restarts N          give up after N restarts [100]
  --max-without-progress N  give up after N starts in a row without a new checkpoint [3]
  --pause SECONDS           before a restart [10]; none after 75. It doubles while there is no
                            progress, up to 16 times its length.

Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 let the run save and leave. A second one ends it at once.
HELP
        exit 0 ;;
    --) shift; break ;;
    *) usage "unknown argument $1; write -- before the command" ;;
    esac
done
[ $# -gt 0 ] || usage "no command is given; see --help"
[ "$fruitless" -gt 0 ] || usage "--max-without-progress wants 1 or more"

# Sets $folder and $from, the folders of --save and --load. They may stand in an argument file, and
# the last ones count, as in the program. scripts/train_*.sh save to and load from CHECKPOINT_PATH
# when the command says nothing else.
folder='' from=''
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
}
# same_folder A B: also by another path, and before it is made.
same_folder() {
    [ "$1" = "$2" ] || [ "$1" -ef "$2" ] ||
        [ "$(realpath -m -- "$1" 2>/dev/null)" = "$(realpath -m -- "$2" 2>/dev/null)" ]
}
find_folder "$@"
[ -n "$folder" ] && [ -n "$from" ] ||
    usage "the command has no --save or no --load: a restart would begin anew"
same_folder "$folder" "$from" ||
    usage "the command has --save $folder and --load $from: every restart would go back to what is \
there; give both the same folder (a run that begins with another one's checkpoint goes without \
this script until its first save)"
# The last checkpoint's iteration. A pipe in the tracker's place would never end, and a damaged one
# may be of any size.
saved() {
    local tracker=$folder/latest_checkpointed_iteration.txt
    if [ -f "$tracker" ] && [ -r "$tracker" ]; then
        head -c 64 "$tracker" | tr -d '\000'
    else
        echo none
    fi
}

# Exit codes that a start from the last checkpoint may mend: saved and left (75), a lost rank (7),
# one that was killed by a signal (128 and its number). SIGINT (130) and SIGTERM (143) were meant to
# end the run. SIGUSR1 (138: the ranks were not there yet) was meant to save it, as with 75.
goes_on() {
    case $1 in
    7 | 75) return 0 ;;
    130 | 143) return 1 ;;
    *) [ "$1" -gt 128 ] && [ "$1" -le 192 ] ;;
    esac
}

# A signal to this script is for the run, which saves and leaves with 75. Then nothing is started
# again. The run has a session of its own: the terminal's Ctrl-C would make mpirun kill the ranks.
signals=0 child='' session=()
if command -v setsid >/dev/null; then session=(setsid); fi
forward() {
    signals=$((signals + 1))
    [ -z "$child" ] || stop_run "$1" $signals "$child"
}
for name in HUP INT TERM USR1; do
    # shellcheck disable=SC2064  # the name of now
    trap "forward $name" $name
done

restarts=0 without=0 wait_for=$pause
while :; do
    before=$(saved)
    ${session[@]+"${session[@]}"} "$@" &
    child=$!
    while :; do # a signal ends wait with its own number, before the child ends
        seen=$signals
        wait "$child"
        code=$?
        [ "$seen" != "$signals" ] || break
    done
    child=
    goes_on "$code" || exit "$code"
    if [ $signals -gt 0 ]; then
        say "stopped by a signal; exit code $code, last checkpoint $(saved)"
        exit "$code"
    fi
    if [ "$(saved)" = "$before" ]; then without=$((without + 1)); else without=0 wait_for=$pause; fi
    if [ $without -ge "$fruitless" ]; then
        say "gives up: exit code $code, and $without starts brought no checkpoint after $before"
        exit "$code"
    fi
    if [ $restarts -ge "$most" ]; then
        say "gives up after $restarts restarts: exit code $code, last checkpoint $(saved)"
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
