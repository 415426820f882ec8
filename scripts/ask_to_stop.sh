# shellcheck shell=bash
# How a run is asked to save and leave; sourced by run_until_done.sh and train.sh.

# ask_to_stop LAUNCHER: SIGUSR1 to mpirun, or whatever process the run is, and to the ranks that it has started on this machine: not every mpirun hands the
# signal on, one rank is enough, and to a rank a second signal makes no difference. (On SIGTERM mpirun would kill its ranks.)
ask_to_stop() {
    local pid ranks=()
    while read -r pid; do
        if grep -qsz '^OMPI_COMM_WORLD_RANK=' "/proc/$pid/environ"; then ranks+=("$pid"); fi
    done < <(grep -lsx "PPid:[[:space:]]*$1" /proc/[0-9]*/status | cut -d / -f 3)
    kill -s USR1 "$1" ${ranks[@]+"${ranks[@]}"} 2>/dev/null || true
}
