# shellcheck shell=bash
# How a run is asked to save and leave, and how it is ended. Sourced by run_until_done.sh and
# train.sh.

# processes_below PID: a line "pid catches" for it and each of its descendants. catches is 1 where
# the process has a handler for SIGUSR1.
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

# ask_to_stop PID: SIGUSR1 to the run that the process PID is, or has started through scripts.
# Ranks save and leave on it. Launchers hand it on to the ranks of other machines. Not all of them
# do so for this machine's, so those get it here too. To a rank a second one makes no difference.
# A script that does not expect the signal would die of it and leave mpirun behind. So only
# processes that catch it get it, and scripts only where no program catches it. Where nothing does,
# nothing has been trained yet, and all of it is ended.
ask_to_stop() {
    local pid catches programs=() scripts=() others=()
    while read -r pid catches; do
        if [ "$catches" = 0 ]; then
            others+=("$pid")
        elif is_shell "$pid"; then
            scripts+=("$pid")
        else
            programs+=("$pid")
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

# stop_run SIGNAL TIMES PID: what a script does with a signal that is for the run PID. At the first
# of them the run is asked to stop. A second SIGINT or SIGTERM ends it at once: mpirun kills its
# ranks on SIGTERM. A second SIGHUP or SIGUSR1 does not, for no person has sent it.
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
