# shellcheck shell=bash
# Asks a run to save and exit, or ends it. Sourced by run_until_done.sh and train.sh.

# processes_below PID: prints a line "pid catches" for the process and each of its descendants.
# catches is 1 if the process has a handler for SIGUSR1.
processes_below() {
    grep -hsE '^(Pid|PPid|SigCgt):' /proc/[0-9]*/status | awk -v root="$1" '
        $1 == "Pid:" { pid = $2 }
        $1 == "PPid:" { parent[pid] = $2 }
        $1 == "SigCgt:" { catches[pid] = index("2367abef", substr($2, length($2) - 2, 1)) > 0 } # bit 9
        END {
            for (pid in catches) {
                for (up = pid; up in parent && up != root; up = parent[up]) { }
                if (up == root) print pid, catches[pid]
            }
        }'
}

is_shell() {
    case $(readlink "/proc/$1/exe") in
    */bash | */dash | */sh | */ksh* | */zsh* | */busybox) return 0 ;;
    *) return 1 ;;
    esac
}

# catches_usr1 PID: succeeds if the process has a handler for SIGUSR1 now.
catches_usr1() { grep -qsE '^SigCgt:.*[2367abef]..$' "/proc/$1/status"; }

# ask_to_stop PID: sends SIGUSR1 to the run that is process PID or its descendant. Ranks save and
# exit on SIGUSR1. Launchers forward it to ranks on other machines, but not all of them do so on
# this machine, so local ranks get it directly (a second SIGUSR1 has no effect on a rank). A script
# without a handler would be killed and leave mpirun running. Therefore only processes with a
# handler get the signal, and scripts only if no program has one. If there is no handler at all,
# training has not started yet, and all processes are ended. A process that a script has just forked
# has the script's handlers until it executes its program, so programs are checked again.
ask_to_stop() {
    local pid catches programs=() scripts=() others=()
    while read -r pid catches; do
        if [ "$catches" = 0 ]; then
            others+=("$pid")
        elif is_shell "$pid"; then
            scripts+=("$pid")
        elif catches_usr1 "$pid"; then
            programs+=("$pid")
        else
            others+=("$pid")
        fi
    done < <(processes_below "$1")
    if [ ${#programs[@]} -gt 0 ]; then
        kill -s USR1 "${programs[@]}"
    elif [ ${#scripts[@]} -gt 0 ]; then
        kill -s USR1 "${scripts[@]}"
    elif [ ${#others[@]} -gt 0 ]; then
        kill -s USR1 "${others[@]}"
    fi 2>/dev/null || true
}

# stop_run SIGNAL TIMES PID: handles the TIMES-th signal for the run PID. The first one asks the run
# to stop. A second SIGINT or SIGTERM ends it at once (mpirun kills its ranks on SIGTERM). A second
# SIGHUP or SIGUSR1 does not, because these are rarely sent by a person.
stop_run() {
    local pids
    case $1-$2 in
    *-1 | HUP-* | USR1-*) ask_to_stop "$3" ;;
    *)
        mapfile -t pids < <(processes_below "$3" | cut -d ' ' -f 1)
        [ ${#pids[@]} = 0 ] || kill -s TERM "${pids[@]}" 2>/dev/null || true
        ;;
    esac
}
