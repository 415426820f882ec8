#!/usr/bin/env bash
# scripts/run_until_done.sh: restarts, giving up, and signals. The command is a stub that exits with
# codes from a list, sometimes after writing a new checkpoint.
# shellcheck disable=SC2015,SC2317 # check calls the functions
set -u
cd "$(dirname "$0")/../../.." || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
# shellcheck source-path=SCRIPTDIR source=../../results.sh
. test/results.sh

# Each start uses the next word of the list. A number is an exit code; + means that there is a new
# checkpoint. Other words wait for a signal for at most two minutes.
cat >"$work/stub" <<'STUB'
#!/usr/bin/env bash
folder=$1 n=$(($(cat "$1/starts" 2>/dev/null || echo 0) + 1))
echo $n >"$folder/starts"
echo $$ >>"$folder/pids"
read -ra play <"$folder/play"
word=${play[n - 1]:-0}
sleeps() { for _ in $(seq 1200); do sleep 0.1; done; }
waits_for_ranks() {
    until [ -e "$folder/waiting0" ] && [ -e "$folder/waiting1" ]; do sleep 0.1; done
    touch "$folder/waiting"
    while kill -0 $! 2>/dev/null; do wait $!; code=$?; done
    exit $code
}
case $word in
*+) echo $((n * 10)) >"$folder/latest_checkpointed_iteration.txt" ;;
wait) # a run without ranks
    trap 'echo 5 >"$folder/latest_checkpointed_iteration.txt"; exit 75' USR1
    touch "$folder/waiting"
    sleeps ;;
busy) # a run whose save never ends; exits on SIGTERM
    trap 'touch "$folder/saving"' USR1
    touch "$folder/waiting"
    sleeps ;;
deaf) # an mpirun that forwards no signals: two ranks, of which only the second handles them
    trap : USR1
    for rank in 0 1; do
        bash -c 'echo $$ >>"$1/pids"
            [ $0 = 0 ] || trap "echo 5 >$1/latest_checkpointed_iteration.txt; exit 75" USR1
            touch "$1/waiting$0"
            for _ in $(seq 1200); do sleep 0.1; done' $rank "$folder" &
    done
    waits_for_ranks ;;
esac
exit "${word%+}"
STUB
chmod +x "$work/stub"
# A script that starts the command and has no signal handler. Bash still ends on SIGUSR1, because it
# catches signals for the EXIT trap.
cat >"$work/wrapper.sh" <<'WRAPPER'
trap 'echo cleaned >>"$1/cleaned"' EXIT
"$0" "$@" | cat
exit ${PIPESTATUS[0]}
WRAPPER
# A program that catches SIGUSR1, like the trainer.
cat >"$work/program" <<'PROGRAM'
#!/usr/bin/env python3
import os, signal, sys, time
folder = sys.argv[1]
def save(*_):
    open(folder + "/latest_checkpointed_iteration.txt", "w").write("5\n")
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
open(folder + "/starts", "w").write("1\n")
open(folder + "/pids", "a").write(f"{os.getpid()}\n")
open(folder + "/waiting", "w")
for _ in range(1200):
    time.sleep(0.1)
PROGRAM
chmod +x "$work/program"
# plays "CODES" CODE STARTS FLAGS...: checks the exit code and the number of starts for a list of
# codes
plays() {
    local play=$1 code=$2 starts=$3 rc
    shift 3
    rm -rf "$work/run" && mkdir "$work/run" && echo "$play" >"$work/run/play"
    timeout 300 scripts/run_until_done.sh --pause 0 "$@" -- "$work/stub" "$work/run" --save "$work/run" \
        --load "$work/run" 2>"$work/err"
    rc=$?
    [ $rc = "$code" ] || { why="exit code $rc instead of $code: $(tail -n 1 "$work/err")"; return 1; }
    [ "$(cat "$work/run/starts")" = "$starts" ] ||
        { why="$(cat "$work/run/starts") starts instead of $starts"; return 1; }
}
check "a run that completes at the first start" plays "0" 0 1
check "restarts after exit codes 7 and 75 and killed ranks" plays "7+ 75+ 137+ 139+ 134+ 0" 0 6
check "runs killed by any signal are restarted" plays "129+ 131+ 132+ 133+ 135+ 136+ 138+ 141+ 152+ 159+ 192+ 0" 0 12
for code in 1 2 3 4 5 6 127 128 130 143 193 255; do
    check "no restart after exit code $code" plays "$code" $code 1
done
check "gives up without progress" plays "7 7 7 7 7 7" 7 3
check "gives up when progress ends" plays "7+ 7 7+ 7 7 7 7 0" 7 6
check "exit code 75 without a new checkpoint does not count as progress" plays "75 75 0" 75 2 --max-without-progress 2
check "does not give up while there is some progress" plays "7+ 7 7 7+ 7 7 0" 0 7
check "--max-restarts limits the restarts" plays "7+ 7+ 7+ 7+ 7+ 0" 7 4 --max-restarts 3
check "the first start is not a restart" plays "7+ 0" 7 1 --max-restarts 0
shell=()
# started WORD COMMAND...: starts the loop in the background and waits until the run waits for a
# signal. The caller waits for $job.
started() {
    local tries=1200
    rm -rf "$work/run" && mkdir "$work/run" && echo "$1 0" >"$work/run/play"
    shift
    # Shells without job control start background commands with SIGINT ignored.
    env --default-signal=INT "${shell[@]}" scripts/run_until_done.sh --pause 0 -- "$@" "$work/run" \
        --save "$work/run" --load "$work/run" 2>"$work/err" &
    job=$!
    until [ -e "$work/run/waiting" ]; do
        sleep 0.1
        [ $((tries -= 1)) -gt 0 ] || { why="the stub did not start"; return 1; }
    done
}
# signaled SIGNAL WORD COMMAND...: checks that the signal is forwarded, the run saves and ends, and
# no process is left
signaled() {
    local rc pid signal=$1
    shift
    started "$@" || return 1
    kill -s "$signal" $job
    wait $job
    rc=$?
    [ $rc = 75 ] && [ "$(cat "$work/run/starts")" = 1 ] &&
        [ "$(cat "$work/run/latest_checkpointed_iteration.txt")" = 5 ] ||
        why="exit code $rc after $(cat "$work/run/starts") starts"
    for pid in $(cat "$work/run/pids"); do
        case $(tr '\0' ' ' <"/proc/$pid/cmdline") in *"$work/run"*)
            [ "$1" = deaf ] || why="${why:+$why; }process $pid is still running"
            kill "$pid" ;;
        esac
    done 2>/dev/null
    [ -z "$why" ]
}
check "SIGTERM stops the run and the loop" signaled TERM wait "$work/stub"
# Bash pauses before every command after the first background process, so the signal arrives before
# the loop knows the process of the run.
echo 'trap "[ -z \"\$(jobs -p)\" ] || sleep 0.4" DEBUG' >"$work/pauses"
slow_shell() { local shell=(BASH_ENV="$work/pauses"); signaled "$@"; }
check "SIGTERM while the run starts" slow_shell TERM wait "$work/stub"
check "SIGUSR1 stops the run and the loop" signaled USR1 wait "$work/stub"
# nohup makes a process ignore SIGHUP.
catches_hup() { [ $((0x$(awk '/^SigIgn:/ { print $2 }' "/proc/$$/status") % 2)) = 0 ]; }
if catches_hup; then check "SIGHUP stops the run and the loop" signaled HUP wait "$work/stub"
else skip "SIGHUP stops the run and the loop" "SIGHUP is ignored"; fi
check "Ctrl-C stops the run and the loop" signaled INT wait "$work/stub"
check "ranks are signaled if the launcher does not forward signals" signaled TERM deaf "$work/stub"
wrapper=(bash -c "$(cat "$work/wrapper.sh")")
check "Ctrl-C stops a run that a script starts" signaled INT wait "${wrapper[@]}" "$work/program"
check "Ctrl-C stops a run that is a script with a trap" signaled INT wait bash -c '"$0" "$@"; exit $?' \
    "$work/stub"
twice() { # a second SIGHUP still waits for the save; a Ctrl-C after it does not
    local tries=1200 rc
    started busy "$work/stub" || return 1
    kill -s HUP $job
    until [ -e "$work/run/saving" ] || [ $((tries -= 1)) = 0 ]; do sleep 0.1; done
    rm -f "$work/run/saving"
    kill -s HUP $job
    until [ -e "$work/run/saving" ] || [ $((tries -= 1)) = 0 ]; do sleep 0.1; done
    [ -e "$work/run/saving" ] && kill -0 $job || why="the second SIGHUP ended the run"
    kill -s INT $job
    wait $job
    rc=$?
    [ $rc = 143 ] || why="exit code $rc instead of 143"
    [ -z "$why" ]
}
if catches_hup; then check "Ctrl-C after an earlier signal ends the run at once" twice
else skip "Ctrl-C after an earlier signal ends the run at once" "SIGHUP is ignored"; fi
pauses() { # 1 + 2 + 0 seconds: the pause doubles while there is no progress
    local since=$SECONDS
    rm -rf "$work/run" && mkdir "$work/run" && echo "7 7 75+ 0" >"$work/run/play"
    scripts/run_until_done.sh --pause 1 -- "$work/stub" "$work/run" --save "$work/run" --load "$work/run" \
        2>"$work/err" || { why="exit code $?"; return 1; }
    [ $((SECONDS - since)) -ge 3 ] || { why="$((SECONDS - since)) s instead of 3"; return 1; }
    [ "$(grep -c 'restart 2 from checkpoint none in 2 s' "$work/err")" = 1 ] ||
        { why="$(cat "$work/err")"; return 1; }
}
check "the pause doubles" pauses
folders() { # all forms of --save
    local words home="$work/a run"
    printf -- '--lr 1  # --save nowhere\n--save "%s" --load "%s"  # here\n' "$home" "$home" >"$work/args"
    printf -- "# of another folder's own\n@args # not --save nowhere\n--tokens 'a --load b'" >"$work/outer"
    for words in "--save=$home|--load=$home" "@$work/args" "--save|/nowhere|@$work/args" "@$work/outer"; do
        rm -rf "$home" && mkdir "$home" && echo "7+ 7+ 7+ 7+ 0" >"$home/play"
        IFS='|' read -ra words <<<"$words"
        scripts/run_until_done.sh --pause 0 -- "$work/stub" "$home" "${words[@]}" 2>"$work/err" ||
            { why="${words[*]}: $(tail -n 1 "$work/err")"; return 1; }
    done
}
check "finds --save= and --save in argument files" folders
relative() { # paths are relative to the caller's folder
    rm -rf "$work/run" && mkdir "$work/run" && echo "7+ 7+ 7+ 7+ 0" >"$work/run/play"
    echo '--save run --load run' >"$work/args"
    (cd "$work" && "$OLDPWD/scripts/run_until_done.sh" --pause 0 -- ./stub run @args) 2>"$work/err" ||
        { why="exit code $?: $(tail -n 1 "$work/err")"; return 1; }
}
check "can be started from another folder" relative
# scripts/train_*.sh take the folder from CHECKPOINT_PATH, except speed runs. Flags take precedence.
checkpoint_path() {
    local rc other="$work/other"
    cp "$work/stub" "$work/train_stub.sh"
    rm -rf "$work/run" "$other" && mkdir "$work/run" "$other" && echo "7+ 7+ 7+ 7+ 0" |
        tee "$other/play" >"$work/run/play"
    CHECKPOINT_PATH=$work/run scripts/run_until_done.sh --pause 0 -- "$work/train_stub.sh" "$work/run" \
        2>"$work/err" || { why="exit code $?: $(tail -n 1 "$work/err")"; return 1; }
    CHECKPOINT_PATH=/nowhere scripts/run_until_done.sh --pause 0 -- "$work/train_stub.sh" "$other" \
        --save "$other" --load "$other" 2>"$work/err" || { why="a flag does not take precedence"; return 1; }
    for words in "SPEED=1 CHECKPOINT_PATH=$work/run $work/train_stub.sh" \
        "CHECKPOINT_PATH= $work/train_stub.sh" "CHECKPOINT_PATH=$work/run $work/stub"; do
        # shellcheck disable=SC2086 # split on purpose
        env ${words% *} scripts/run_until_done.sh -- ${words##* } "$work/run" 2>"$work/err"
        rc=$?
        [ $rc = 2 ] || { why="$words: exit code $rc"; return 1; }
    done
}
check "takes the folder of scripts/train_*.sh from CHECKPOINT_PATH" checkpoint_path
two_folders() { # a restart would resume from the --load folder
    local words rc home="$work/run"
    rm -rf "$home" && mkdir "$home" && echo "7+ 0" >"$home/play" && echo "--load $work/from" >"$work/args" &&
        ln -sfn run "$work/also"
    for words in "--save $home --load $work/from" "--save=$home --load=$work/from" \
        "--save $home --load $home @$work/args" \
        "--load $home --save $work/from --save $home --load $work/from"; do
        # shellcheck disable=SC2086 # split on purpose
        timeout -k 1 300 scripts/run_until_done.sh --pause 0 -- "$work/stub" "$home" $words 2>"$work/err"
        rc=$?
        [ $rc = 2 ] && [ "$(grep -c '^error: ' "$work/err")" = 1 ] && grep -q "$work/from" "$work/err" &&
            [ ! -e "$home/starts" ] || { why="'$words': exit code $rc, $(cat "$work/err")"; return 1; }
    done
    for words in "--save $home/ --load $work/./run" "--save $home --load $work/also" \
        "--save $work/new/run --load $work//new/run/"; do
        rm -f "$home/starts"
        # shellcheck disable=SC2086 # split on purpose
        timeout -k 1 300 scripts/run_until_done.sh --pause 0 -- "$work/stub" "$home" $words 2>"$work/err" ||
            { why="'$words': $(cat "$work/err")"; return 1; }
    done
}
check "refuses different folders for --save and --load" two_folders
# A launcher that starts two ranks, which exit with code 7 after one second. On its first start it
# then hangs and ignores SIGTERM, as mpirun of Open MPI 4 sometimes does.
cat >"$work/mpirun" <<'LAUNCHER'
#!/bin/bash
echo start >>"$1/starts"
echo $$ >>"$1/pids"
for rank in 0 1; do OMPI_COMM_WORLD_RANK=$rank bash -c 'sleep 1; exit 7' & done
wait
[ "$(wc -l <"$1/starts")" = 1 ] || exit 0
trap '' TERM
for _ in $(seq 1200); do sleep 0.1; done
LAUNCHER
chmod +x "$work/mpirun"
hanging_launcher() {
    local rc
    rm -rf "$work/run" && mkdir "$work/run"
    timeout -k 1 60 scripts/run_until_done.sh --pause 0 --grace 2 -- "$work/mpirun" "$work/run" \
        --save "$work/run" --load "$work/run" 2>"$work/err"
    rc=$?
    for pid in $(cat "$work/run/pids"); do
        ! grep -q "$work/run" "/proc/$pid/cmdline" ||
            { why="launcher $pid is still running"; kill -KILL "$pid"; }
    done 2>/dev/null
    [ -z "$why" ] || return 1
    [ $rc = 0 ] && [ "$(wc -l <"$work/run/starts")" = 2 ] && grep -q 'exit code 7; restart 1' "$work/err" ||
        { why="exit code $rc: $(tail -n 1 "$work/err")"; return 1; }
}
check "a launcher that hangs without ranks is ended" hanging_launcher
# slow COMMAND...: a run that is longer than the grace period and ends by itself
slow() {
    scripts/run_until_done.sh --pause 0 --grace 1 -- "$@" --save "$work/run" --load "$work/run" \
        2>"$work/err" ||
        { why="exit code $?: $(tail -n 1 "$work/err")"; return 1; }
}
cp "$(command -v sleep)" "$work/mpiexec"
check "ranks on other machines: the launcher is not ended" slow bash -c '"$0" 3' "$work/mpiexec"
check "work after the ranks is not interrupted" slow bash -c 'PMI_RANK=0 sleep 1; sleep 3'
odd_trackers() { # a pipe must not block the loop
    local tracker="$work/run/latest_checkpointed_iteration.txt" rc kind
    for kind in "mkfifo" "mkdir" "ln -s /dev/zero" "truncate -s 100M"; do
        rm -rf "$work/run" && mkdir "$work/run" && echo "7 7 7 0" >"$work/run/play"
        $kind "$tracker"
        timeout -k 1 300 scripts/run_until_done.sh --pause 0 -- "$work/stub" "$work/run" --save "$work/run" \
            --load "$work/run" 2>"$work/err"
        rc=$?
        [ $rc = 7 ] && ! grep -qv '^run_until_done: ' "$work/err" ||
            { why="$kind: exit code $rc, $(head -c 300 "$work/err")"; return 1; }
    done
}
check "a tracker that is not a plain file does not block the loop" odd_trackers
usage() {
    local rc
    for words in "" "--max-restarts -- true" "--max-restarts x -- true --save a --load a" "true" "-- true" \
        "--max-without-progress 0 -- true --save a --load a" "-- true --save a" \
        "-- true --save a --load a --ckpt-step=20"; do
        # shellcheck disable=SC2086 # split on purpose
        scripts/run_until_done.sh $words 2>"$work/err"
        rc=$?
        [ $rc = 2 ] && [ "$(grep -c '^error: ' "$work/err")" = 1 ] ||
            { why="'$words': exit code $rc, $(cat "$work/err")"; return 1; }
    done
}
check "usage" usage
default_step() { # -1, the default of --ckpt-step, loads the latest checkpoint
    echo "--ckpt-step 20" >"$work/step.args"
    scripts/run_until_done.sh -- true --save a --load a --ckpt-step -1 2>"$work/err" &&
        scripts/run_until_done.sh -- true --save a --load a "@$work/step.args" --ckpt-step -1 2>"$work/err" ||
        { why="$(cat "$work/err")"; return 1; }
}
check "--ckpt-step -1 is accepted" default_step
finish
