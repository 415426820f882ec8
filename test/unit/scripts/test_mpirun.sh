#!/usr/bin/env bash
# scripts/mpirun.sh and launch: a failure is explained in one line. mpirun is a stub that prints the
# messages of Open MPI 4.
# shellcheck disable=SC2317 # check calls the functions
set -u
cd "$(dirname "$0")/../../.." || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
# shellcheck source-path=SCRIPTDIR source=../../results.sh
. test/results.sh

# The rank's behavior is in the first argument. dmesg prints a file.
mkdir "$work/bin"
cat >"$work/bin/mpirun" <<'STUB'
#!/usr/bin/env bash
[ "${1:-}" != --version ] || { echo 'mpirun (Open MPI) 4.1.4'; exit 0; }
line=$(printf -- '-%.0s' {1..74})
for word; do
    case $word in oom | log | unnamed | elsewhere | segv | missing | kill | fail | wait) how=$word ;; esac
done
killed() { # SIGNAL NAME
    printf '%s\n' "$line" 'Primary job  terminated normally, but 1 process returned' "$line" "$line" \
        "mpirun noticed that process rank 3 with PID 0 on node ${node:-$(uname -n)} exited on signal $1 ($2)." \
        "$line" >&2
    exit $((128 + $1))
}
case $how in
unnamed) # sometimes mpirun exits before it names the rank
    printf '%s\n' "$line" 'Primary job  terminated normally, but 1 process returned' "$line" >&2
    echo 'oom_kill 1' >"$MEMORY_EVENTS"
    exit 137 ;;
oom) echo 'oom_kill 1' >"$MEMORY_EVENTS"; killed 9 Killed ;;
log) echo '[99.1] Out of memory: Killed process 12 (train_gpt_cpu) total-vm:1kB' >>"$KERNEL_LOG"; killed 9 Killed ;;
elsewhere) echo 'oom_kill 1' >"$MEMORY_EVENTS"; node=other killed 9 Killed ;;
segv) echo 'oom_kill 1' >"$MEMORY_EVENTS"; killed 11 'Segmentation fault' ;;
missing)
    printf '%s\n' "$line" 'mpirun was unable to launch the specified application' '' 'Executable: x' "$line" >&2
    exit 132 ;;
wait)
    trap 'exit 75' USR1
    touch "$1"
    for _ in {1..100}; do sleep 0.1; done ;;
kill) echo '[99.1] Out of memory: Killed process 13 (firefox) total-vm:1kB' >>"$KERNEL_LOG"; killed 9 Killed ;;
fail)
    echo 'error: no such flag' >&2
    printf '%s\n' "$line" 'mpirun detected that one or more processes exited with non-zero status' "$line" >&2
    exit 2 ;;
esac
cat
STUB
printf '#!/bin/sh\ncat "$KERNEL_LOG"\n' >"$work/bin/dmesg"
chmod +x "$work"/bin/*
export PATH="$work/bin:$PATH" MEMORY_EVENTS=$work/events KERNEL_LOG=$work/kernel

# explains HOW EXIT-CODE TEXT: checks the exit code and the only line of standard error
explains() {
    local code rc text way
    for way in scripts/mpirun.sh launch; do
        echo 'oom_kill 0' >"$MEMORY_EVENTS"
        echo '[1.0] Out of memory: Killed process 11 (train_gpt_cpu) total-vm:1kB' >"$KERNEL_LOG"
        if [ $way = launch ]; then
            bash -c '. scripts/common.sh; set -euo pipefail; launch 4 build/train_gpt_cpu "$1"' launch "$1"
        else
            $way -np 4 build/train_gpt_cpu "$1"
        fi 2>"$work/err" </dev/null
        rc=$?
        [ $rc = "$2" ] && [ "$(cat "$work/err")" = "$3" ] ||
            { why="$way: exit code $rc, $(cat "$work/err")"; return 1; }
    done
}
here="rank 3 on $(uname -n) was killed by"
check "a killed rank" explains kill 137 "error: $here SIGKILL"
check "a crashed rank" explains segv 139 "error: $here SIGSEGV"
check "a rank killed in a cgroup without memory" explains oom 137 "error: $here SIGKILL (probably out of memory)"
check "a rank killed according to the kernel log" explains log 137 "error: $here SIGKILL (probably out of memory)"
check "a killed rank of another machine" explains elsewhere 137 "error: rank 3 on other was killed by SIGKILL"
check "the banner after an error line is removed" explains fail 2 "error: no such flag"
check "a killed rank that mpirun does not name" explains unnamed 137 \
    "error: a rank was killed by SIGKILL (probably out of memory)"
forwards() {
    local job rc tries=100
    scripts/mpirun.sh "$work/started" wait & job=$!
    until [ -e "$work/started" ] || [ $((tries -= 1)) = 0 ]; do sleep 0.1; done
    kill -s USR1 $job
    wait $job
    rc=$?
    [ $rc = 75 ] || { why="exit code $rc"; return 1; }
}
check "SIGUSR1 is forwarded to mpirun" forwards
line=$(printf -- '-%.0s' {1..74})
check "a missing program" explains missing 132 "$line
mpirun was unable to launch the specified application

Executable: x
$line"
standard_input() { [ "$(echo text | scripts/mpirun.sh true)" = text ]; }
check "standard input reaches mpirun" standard_input
terminal() { # the next commands, typed or pasted in advance, are not for mpirun
    timeout 60 python3 -c 'import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) != 0)' \
        scripts/mpirun.sh true </dev/null >"$work/out" 2>&1 || { why="mpirun waits for input"; return 1; }
}
check "a terminal is not read" terminal
finish
